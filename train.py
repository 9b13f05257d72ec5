"""
Teach Qwen-Image-Edit (v1, 2509, 2511) an edit: before/after pictures of any sizes -> LoRA.

Reads datasets (layout: cache.py), or the index of one that cache.py has encoded. Writes a run folder: log.jsonl,
checkpoint-000200/, samples/ (held-out pictures) and at the end pytorch_lora_weights.safetensors, which predict.py and
stock diffusers load.

$ python train.py                                                           # the toy dataset and model in tiny/
$ python train.py --model Qwen/Qwen-Image-Edit-2509 --data photos --plan    # what it would take; trains nothing
$ python train.py --model Qwen/Qwen-Image-Edit-2509 --data photos           # one GPU
$ torchrun --nproc_per_node=8 train.py --model Qwen/Qwen-Image-Edit-2509 --data photos
$ python train.py --model ... --data photos --resume         # the same flags and --resume: continue the newest such run

A step uses --batch_size samples, whatever the number of processes. They are packed without padding into forward passes
of at most --max_tokens tokens. Sample order, noise, timesteps and dropped captions are functions of
(seed, position in the stream): 1 and 8 processes see the same, and resuming gives the run you would have had without
stopping, bit for bit on a CPU. SIGTERM, SIGUSR1 or Ctrl-C end a run after the step at hand, with a checkpoint and
status 0; DONE marks a finished run. Shape letters as in rope_patch.py.
"""
import argparse
import contextlib
import hashlib
import importlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import diffusers
import filelock
import numpy as np
import peft
import torch
import torch.distributed as dist
import transformers
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_shift
from PIL import Image
from tqdm import tqdm

import cache
import predict
from cache import InputError, number
from predict import LORA_FILE, checkpoints
from rope_patch import plan_packs, run_packed, run_padded

# ---- flags -----------------------------------------------------------------------------------------------------------

def key_value(text):
    """'use_dora=true' -> ('use_dora', True); the value is JSON, or else a string."""
    key, _, value = text.partition("=")
    if not key.isidentifier() or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value

parser = cache.Parser(__doc__)
cache.add_model_flags(parser)
cache.add_data_flags(parser)
flag = parser.add_argument_group("LoRA").add_argument
flag("--lora_rank", type=number(int, 1), default=16, help="width: more learns more, and costs memory")
flag("--lora_alpha", type=number(float, 1e-6), help="the LoRA's output is scaled by alpha / rank (default: the rank)")
flag("--lora_dropout", type=number(float, 0, 0.99), default=0.0, help="share of the LoRA's inputs that is set to 0")
flag("--lora_targets", nargs="+", default=["attention"], metavar="NAME",
     help="linear layers, by the ends of their names (to_q net.2 ...); attention (default): all of the attention, "
          "image and text; all-linear: all of the blocks")
flag("--lora_args", nargs="+", type=key_value, default=[], metavar="KEY=VALUE",
     help="other arguments of peft.LoraConfig, as use_dora=true (default: none)")
flag("--pretrained_lora", metavar="PATH",
     help="start from this LoRA (file, folder, user/repo), with its rank, alpha and layers")
flag("--base_lora", metavar="PATH", help="a LoRA to add to the frozen weights, such as Lightning's; sample with both")
flag = parser.add_argument_group("step").add_argument
flag("--max_steps", type=number(int, 1), default=2000, help="optimizer steps")
flag("--batch_size", type=number(int, 1), default=4, help="samples per optimizer step, over all processes")
flag("--max_tokens", type=number(int, 1), default=10_000,
     help="image + text tokens per forward pass; lower this first if you run out of memory")
flag("--batching", choices=["packed", "padded"], default="packed", help="padded is the slow reference")
flag("--optimizer", default="torch.optim.AdamW", metavar="CLASS", help="or bitsandbytes.optim.AdamW8bit (less memory), "
     "prodigyopt.Prodigy (finds the learning rate itself: --lr 1), ...: any class whose package is installed")
flag("--optimizer_args", nargs="+", type=key_value, default=[], metavar="KEY=VALUE",
     help="other arguments of that class, as betas=[0.9,0.99] (default: none)")
flag("--lr", type=number(float, 0), default=1e-4, help="learning rate; lower it if the loss jumps")
flag("--lr_scheduler", choices=["constant", "cosine", "linear"], default="constant", help="after the warm-up")
flag("--warmup_steps", type=number(int, 0), default=0, help="steps in which the learning rate rises from 0")
flag("--weight_decay", type=number(float, 0), default=0.01, help="pull of the LoRA's weights to 0")
flag("--max_grad_norm", type=number(float, 1e-12), default=1.0, help="a longer gradient is cut to this length")
flag = parser.add_argument_group("loss").add_argument
flag("--timestep_sampling", choices=["uniform", "logit_normal", "qwen_shift"], default="qwen_shift",
     help="qwen_shift: logit-normal, shifted by the picture's size as in inference")
flag("--loss_norm", choices=["sample", "token"], default="sample",
     help="sample: mean per sample, then over samples; token: mean over all tokens, large pictures weigh more")
flag("--mask_foreground_weight", type=number(float, 0), default=2.0, help="loss weight of a mask's edited region")
flag("--mask_background_weight", type=number(float, 0), default=1.0, help="loss weight of the rest of that picture")
flag = predict.add_transformer_flags(parser)
flag("--gradient_checkpointing", type=number(int, 0), metavar="BLOCKS",
     help="blocks computed again in the backward pass: fewer is faster, more saves memory (default: all)")
flag("--fsdp", action="store_true", help="shard the frozen base over torchrun's processes (FSDP2): a GPU holds 1/N of "
     "it, plus two whole blocks while they compute")
flag("--compile", action="store_true", help="torch.compile the blocks: minutes at first, then faster; needs a compiler")
flag = parser.add_argument_group("run").add_argument
flag("--use_cache", action=argparse.BooleanOptionalAction, default=True,
     help="--no-use_cache: encode each batch anew, with all models on the device")
flag("--seed", type=number(int, 0, 2**64 - 1), default=0, help="seed of order, noise, timesteps, dropout, initial LoRA")
flag("--out_dir", help="run folder (default: out/<model>-<data>-001, next number for the next run)")
flag("--sample_every", type=number(int, 0), default=0, help="steps between validations; 0: only at the end")
flag("--save_every", type=number(int, 1), default=200, help="steps between checkpoints")
flag("--keep", type=number(int, 1), default=2, help="how many of the newest checkpoints stay on disk")
flag("--tracker", choices=["none", "tensorboard", "wandb"], default="none",
     help="log numbers and pictures there too (tensorboard --logdir RUN_FOLDER; WANDB_MODE=offline needs no network)")
flag("--plan", action="store_true", help="only print the tokens and memory this would take; needs no weights")
flag("--resume", action="store_true", help="with the flags of a run: continue it (--out_dir, or the newest of this "
     "model and data)")
args = cache.parse_data_args(parser, dict( # --model tiny brings native sizes, and a minute on a CPU
    **cache.TINY, max_steps=400, batch_size=8, max_tokens=4096, lr=4e-3, lr_scheduler="linear", warmup_steps=10,
    gradient_checkpointing=0, lora_targets=["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj",
                                            "add_v_proj", "net.0.proj", "net.2", "proj_out", "img_in"]))
lora_args, given, package = dict(args.lora_args), {a.split("=")[0] for a in sys.argv}, args.optimizer.split(".")[0]
if args.pretrained_lora and given & {"--lora_rank", "--lora_alpha", "--lora_targets", "--lora_args"}:
    parser.error("argument --pretrained_lora: has its own rank, alpha and layers; leave out --lora_rank, --lora_alpha, "
                 "--lora_targets and --lora_args")
if lora_args.get("use_dora") and args.quantize != "none":
    parser.error("argument --lora_args: a DoRA needs the norms of a base in full precision; leave out --quantize")
if str(lora_args.get("init_lora_weights")).startswith(("pissa", "olora", "corda", "loftq")):
    parser.error("argument --lora_args: this initialization changes the base's weights, which the LoRA file does "
                 "not store; choose another init_lora_weights")
if args.dtype == "float16":
    parser.error("argument --dtype: float16 needs loss scaling, which train.py does not have; use bfloat16")
if args.fsdp and int(os.environ.get("WORLD_SIZE", 1)) < 2:
    parser.error("argument --fsdp: needs several processes; start with torchrun --nproc_per_node=N")
if args.sample_every and not args.val_data:
    parser.error("argument --sample_every: there is nothing to draw; give --val_data")
if not args.use_cache and any(map(cache.is_index, args.data + args.val_data)):
    parser.error("argument --use_cache: an index is a cache; leave out --no-use_cache")
if "lr" in dict(args.optimizer_args):
    parser.error("argument --optimizer_args: lr would be ignored; give --lr")
if package == args.optimizer:
    parser.error(f"argument --optimizer: {args.optimizer!r} is no path of a class; give for instance "
                 "torch.optim.AdamW, or bitsandbytes.optim.AdamW8bit")
if not find_spec(package):
    parser.error(f"argument --optimizer: the package {package} is not installed; pip install {package}")
module, _, name = args.optimizer.rpartition(".")
try:
    optimizer_class = getattr(importlib.import_module(module), name)
except (ImportError, AttributeError) as e:
    parser.error(f"argument --optimizer: {cache.first_words(e)}; give for instance torch.optim.AdamW")

# what decides the numbers: a resumed run must not change it
config = {name: getattr(args, name) for name in (
    "dtype", "seed", "caption_dropout_rate", "prompt_image_dropout_rate", "lora_rank", "lora_alpha", "lora_dropout",
    "lora_targets", "lora_args", "batch_size", "batching", "optimizer", "optimizer_args", "lr", "lr_scheduler",
    "warmup_steps", "weight_decay", "max_grad_norm", "timestep_sampling", "loss_norm", "mask_foreground_weight",
    "mask_background_weight", "quantize", "quantize_text_encoder")}
config.update(preserve=args.preserve or None, preserve_prompts=args.preserve_prompts if args.preserve else None)
config["max_steps"] = None if args.lr_scheduler == "constant" else args.max_steps # a constant rate can go on for ever
for name in ("pretrained_lora", "base_lora"): # by content, wherever they lie
    setattr(args, name, getattr(args, name) and str(predict.find_lora(getattr(args, name))))
    config[name] = getattr(args, name) and cache.file_hash(getattr(args, name))

# ---- processes: no DDP wrapper, as a step's only traffic is one all-reduce of the LoRA's gradients -------------------

rank, world_size = cache.start_processes(args)
say = tqdm.write if rank == 0 else lambda line: None

# ---- run folder ------------------------------------------------------------------------------------------------------

def step_of(path):
    return int(path.name.split("-")[-1])

run_name = cache.run_name(args.model, args.data)
runs = [p.parent for p in Path("out").glob("*/log.jsonl") if re.fullmatch(re.escape(run_name) + r"-\d+", p.parent.name)]
newest = max(runs, default=None, key=step_of) # (a folder without a log is that of a run that never began)
next_run = f"out/{run_name}-{step_of(newest) + 1 if newest else 1:03d}"
out_dir = Path(args.out_dir or (args.resume and newest) or next_run)
log = out_dir / "log.jsonl"
if out_dir.exists() and not (args.resume or args.plan or all(p.name.startswith(".") for p in out_dir.glob("*"))):
    raise InputError(f"--out_dir {out_dir}: is not empty; go on with --resume, or give another folder")

def read_checkpoint(path):
    """-> LoRA, optimizer state, and a dict of step and config. InputError if any bit of it is not as it was saved."""
    weights, meta = cache.read_tensors(path / LORA_FILE, "lora_adapter_metadata")
    moments, state = cache.read_tensors(path / "optimizer.safetensors")
    if "config" not in state or not meta.get("train.step") == state.get("step") == step_of(path):
        raise InputError(f"{path}: its files do not belong together; it is damaged")
    return weights, moments, state

def refuse_changes(old):
    changes = [f"{k}: {old.get(k)} -> {v}" for k, v in json.loads(json.dumps(config)).items() if old.get(k) != v]
    if changes:
        raise InputError(f"--resume: {out_dir} was begun with other settings ({'; '.join(changes)}); give the old "
                         "ones, or start a new run")

step, checkpoint = 0, None
saved = checkpoints(out_dir) if args.resume else []
for path in reversed(saved):
    try:
        checkpoint = read_checkpoint(path)
        break
    except InputError as e:
        say(f"warning: {path} is damaged; trying the checkpoint before it ({e})")
begun = [name for name in ("log.jsonl", ".lock") if (out_dir / name).exists()] # perhaps killed before a checkpoint
finished = [name for name in ("DONE", LORA_FILE) if (out_dir / name).exists()] # its checkpoints have been deleted
if args.resume and not checkpoint and (saved or finished or not begun):
    raise InputError(f"--resume: no whole checkpoint in {out_dir}; give the right --out_dir, or leave out --resume")
if checkpoint:
    refuse_changes(checkpoint[2]["config"]) # before anything slow
    step = checkpoint[2]["step"]
if step >= args.max_steps and (out_dir / "DONE").exists():
    say(f"{out_dir}: already done after {step} steps; a larger --max_steps continues it (constant learning rate only)")
    sys.exit(0)
if world_size > 1:
    dist.barrier() # all have looked at the folder before one writes to it
if rank == 0 and not args.plan:
    cache.prepare_folder(out_dir, "give another folder")
    lock = filelock.FileLock(out_dir / ".lock")
    try:
        lock.acquire(blocking=False) # ours until this process ends, however it ends
    except filelock.Timeout:
        raise InputError(f"--out_dir {out_dir}: another run is at work in it; wait, or give another folder")

# ---- data: encode what the cache lacks; the encoders have left the device when make_cache returns --------------------

encoded = all(map(cache.is_index, args.data + args.val_data))
parts = ["scheduler"] + ["vae"] * bool(args.val_data) if encoded else cache.ENCODERS
folder, transformer_folder = predict.find_folders(args, parts, not args.plan)
pipe = None if encoded else cache.load_pipeline(folder)
samples, val_samples, geometry, problems = cache.make_cache(pipe, folder, args, rank, world_size,
                                                         encode=args.use_cache and not args.plan)
if problems and not args.skip_bad: # they have been reported
    sys.exit(1)
if not samples:
    raise InputError(f"{' '.join(args.data)}: no usable sample; fix the errors listed above")
if alone := [s.name for s in val_samples if not s.controls]:
    raise InputError(f"--val_data: {alone[0]} has no control, so that nothing can be drawn; leave it out")
live = None if args.use_cache else pipe # encodes each batch anew
for part in ("vae", "text") if live and not args.plan else ():
    cache.load_encoder(live, part, args)

# ---- the stream: everything random is a function of (seed, position), so that resume needs one integer ---------------

def generator(*what, seed=args.seed):
    # by hash, because neighbouring seeds must not give related streams; 32 bits are all that a CPU generator uses
    return torch.Generator().manual_seed(int(hashlib.sha256(repr((seed, *what)).encode()).hexdigest()[:8], 16))

epoch = [sample for sample in samples for _ in range(sample.repeats)]

@lru_cache(maxsize=2)
def shuffled(n):
    return torch.randperm(len(epoch), generator=generator("order", n)).tolist()

def pick(position):
    """-> (sample, resolution, text) at this position: one of sample.resolutions, one of the keys of sample.texts.
    Caption dropout picks the empty prompt; picture dropout drops the controls, from the prompt too; --preserve picks an
    instruction that is not the sample's, which the base answers (flow_loss)."""
    n, i = divmod(position, len(epoch))
    sample, g = epoch[shuffled(n)[i]], generator("draw", position)
    resolution = sample.resolutions[torch.randint(len(sample.resolutions), (), generator=g)]
    dropped = torch.rand((), generator=g).item() < args.caption_dropout_rate
    # from generators of their own, so that the flags of one do not change what the others draw
    draw, others = generator("preserve", position), args.preserve_prompts
    if torch.rand((), generator=draw).item() < args.preserve and sample.controls:
        other = others[torch.randint(len(others), (), generator=draw)]
        return sample, resolution | dict(preserved=True), (other, True)
    which = torch.randint(len(sample.prompts), (), generator=generator("wording", position))
    shown = torch.rand((), generator=generator("pictures", position)).item() >= args.prompt_image_dropout_rate
    if not shown:
        resolution = resolution | dict(img_shapes=resolution["img_shapes"][:1]) # of the target alone
    return sample, resolution, ("" if dropped else sample.prompts[which], shown)

def count_tokens(sample, resolution, text):
    return sum(h * w for _, h, w in resolution["img_shapes"]) + sample.texts[text]["tokens"]

scheduler_config = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler").config

def draw_timestep(g, img_len):
    """-> s in (0, 1) for a target of img_len tokens, fp32."""
    s = torch.rand((), generator=g) if args.timestep_sampling == "uniform" else torch.randn((), generator=g).sigmoid()
    if args.timestep_sampling == "qwen_shift":
        mu = calculate_shift(img_len, *[scheduler_config[k] for k in (
            "base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")])
        s = math.exp(mu) / (math.exp(mu) + 1 / s - 1)
    return s

# ---- loss: flow matching ---------------------------------------------------------------------------------------------

dtype = getattr(torch, args.dtype) # of the frozen base; LoRA weights, their gradients and the optimizer are fp32

def load_item(sample, resolution, text, g, s=None):
    """What the loss needs of a sample, on the device: x0 (I_0, C), noise (I_0, C), velocity (I_0, C) or None for the
    base's, s, controls (sum I_c, C), prompt (T, J), img_shapes, weight (I_0,). g: where the noise comes from, and s if
    it is not given."""
    t = cache.load_latents(sample, resolution, live)
    x0, shapes = t["pixel_latent"].to(args.device, torch.float32), [tuple(shape) for shape in resolution["img_shapes"]]
    s = draw_timestep(g, len(x0)) if s is None else torch.tensor(s)
    noise, weight = torch.randn(x0.shape, generator=g).to(args.device), torch.ones(len(x0), device=args.device)
    preserved = "preserved" in resolution
    if "edit_mask" in t and not preserved: # which is of the edit
        mask = t["edit_mask"].to(args.device)
        weight = args.mask_foreground_weight * mask + args.mask_background_weight * (1 - mask)
    controls = t["control_latent"][:sum(h * w for _, h, w in shapes[1:])].to(args.device, dtype) # none if dropped
    prompt = cache.load_text(sample, text, live).to(args.device, dtype)
    return SimpleNamespace(x0=x0, noise=noise, velocity=None if preserved else noise - x0, s=s, controls=controls,
                           prompt=prompt, img_shapes=shapes, weight=weight)

def predict_velocity(model, items):
    """-> (I_0, C) in fp32 for each of these items, of any sizes, in one forward pass."""
    noisy = [(1 - i.s) * i.x0 + i.s * i.noise for i in items] # data at s = 0, noise at s = 1
    run = run_packed if args.batching == "packed" else run_padded
    preds = run(model, [torch.cat([x.to(dtype), i.controls]) for x, i in zip(noisy, items)], [i.prompt for i in items],
                torch.stack([i.s for i in items]).to(noisy[0].device), [i.img_shapes for i in items])
    return [pred[:len(i.x0)].float() for i, pred in zip(items, preds)] # the controls have no loss

@contextlib.contextmanager
def without_lora(model):
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()

def flow_loss(model, items):
    """-> [(loss, weight)] of these items. The step's loss is the sum of all losses over the sum of all weights, of all
    packs of all processes. An item without a velocity (--preserve) learns what the base predicts, without the LoRA."""
    asked = [i for i in items if i.velocity is None]
    if asked or (args.fsdp and args.preserve and torch.is_grad_enabled()): # all processes must run as many passes
        with without_lora(model), torch.no_grad():
            answers = predict_velocity(model, asked or items[-1:])
        for i, answer in zip(asked, answers):
            i.velocity = answer
    losses = []
    for i, pred in zip(items, predict_velocity(model, items)):
        error = (pred - i.velocity).square().mean(-1)
        loss, weight = (error * i.weight).sum(), i.weight.sum().clamp_min(1e-12) # a mask may be black all over
        losses.append((loss / weight, 1) if args.loss_norm == "sample" else (loss, weight))
    return losses

# ---- model: frozen base, LoRA in fp32 --------------------------------------------------------------------------------

def find_layers(transformer, names):
    """--lora_targets -> LoraConfig's target_modules and exclude_modules. InputError for a name that no layer has: peft
    is silent as long as any name fits."""
    linears = [name for name, m in transformer.named_modules() if isinstance(m, torch.nn.Linear)]
    attention = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    presets = {"attention": attention, "all-linear": [*attention, "img_mod.1", "txt_mod.1", "net.0.proj", "net.2"]}
    targets = [end for name in names for end in presets.get(name, [name])]
    for end in targets:
        if not any(name == end or name.endswith("." + end) for name in linears):
            known = sorted({re.sub(r".*\d+\.(attn\.)?", "", n) for n in linears if "blocks" in n})
            raise InputError(f"--lora_targets {end}: no linear layer of that name; there are {' '.join(known)}")
    # the text stream of the last block is never read: a LoRA there would get no gradient
    last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}."
    dead = [n for n in linears if n.startswith((last + "attn.add_q_proj", last + "attn.to_add_out", last + "txt_mlp"))]
    return dict(target_modules=targets, exclude_modules=[n for n in dead if n.endswith(tuple(targets))] or None)

transformer = predict.load_transformer(transformer_folder, args.dtype, weights=not args.plan)
if args.base_lora and not args.plan: # before the base is quantized
    predict.load_loras(transformer, [args.base_lora], [1.0])
    transformer.fuse_lora()
    transformer.unload_lora()
if args.pretrained_lora:
    lora_config = predict.lora_config(args.pretrained_lora)
else:
    lora_config = dict(find_layers(transformer, args.lora_targets), r=args.lora_rank,
                       lora_alpha=args.lora_rank if args.lora_alpha is None else args.lora_alpha)
lora_config |= dict(lora_dropout=args.lora_dropout, init_lora_weights="gaussian") | lora_args
torch.manual_seed(args.seed) # the same LoRA on every process, without a word between them
try:
    lora = predict.add_lora(transformer, **lora_config) # {name: parameter}: all that learns
except (TypeError, ValueError) as e:
    raise InputError(f"--lora_args: peft refuses them ({cache.first_words(e)}); see peft.LoraConfig")
if lora_args.get("target_parameters") or any(".lora_" not in name for name in lora):
    raise InputError("--lora_args: would train what a LoRA's file cannot hold; leave out bias, modules_to_save and "
                     "target_parameters")

# ---- packs: which process computes which samples, in which forward passes --------------------------------------------

def deal_packs(lengths):
    """Samples of these lengths -> for each process [(pack, factor)]: the samples' places in `lengths`, at most
    --max_tokens in a pack. Each process computes the same answer, so nothing has to be sent.

    With --fsdp every process must run as many forward passes as any other, as blocks are gathered from all of them.
    Who has fewer repeats the shortest sample, with a factor of 0 to its loss; all others have 1."""
    # a token of an n-token sample costs 24 dim^2 FLOPs in a block's linears, and 4 n dim in its attention
    cost = [n * (6 * transformer.inner_dim + n) for n in lengths]
    longest_first, shares = sorted(range(len(lengths)), key=lambda i: -lengths[i]), [[] for _ in range(world_size)]
    for i in longest_first: # to whoever has least to do
        min(shares, key=lambda share: sum(cost[j] for j in share)).append(i)
    dealt = []
    for share in shares:
        packs = plan_packs([lengths[i] for i in share], args.max_tokens, args.batching == "padded")
        dealt.append([([share[i] for i in pack], 1) for pack in packs])
    if args.fsdp:
        passes = max(map(len, dealt))
        dealt = [packs + [(longest_first[-1:], 0)] * (passes - len(packs)) for packs in dealt]
    return dealt

if args.plan: # needs the LoRA's shapes, not its values
    steps = [[pick(n * args.batch_size + i) for i in range(args.batch_size)] for n in range(min(args.max_steps, 50))]
    cache.load_extra("plan").print_plan(args, transformer, lora, folder, len(epoch), steps, count_tokens, deal_packs,
                                        flow_loss, say)
    sys.exit(0)

# ---- onto the device, and the optimizer ------------------------------------------------------------------------------

if args.pretrained_lora:
    predict.load_weights(transformer, predict.read_lora(args.pretrained_lora)[0], args.pretrained_lora)
predict.place_transformer(transformer, args.device, args.quantize, args.offload, args.fsdp)
transformer.train()
if args.gradient_checkpointing != 0:
    transformer.enable_gradient_checkpointing(partial( # only dropout draws random numbers in a block
        torch.utils.checkpoint.checkpoint, use_reentrant=False, preserve_rng_state=lora_config["lora_dropout"] > 0))
    transformer.gradient_checkpointing_blocks = args.gradient_checkpointing
    blocks = len(transformer.transformer_blocks)
    again = blocks if args.gradient_checkpointing is None else min(args.gradient_checkpointing, blocks)
    say(f"gradient checkpointing: the backward pass computes {again} of {blocks} blocks again")
if args.compile: # block by block, as all are alike; dynamic, as every batch has lengths of its own
    for block in transformer.transformer_blocks:
        block.compile(dynamic=True)
try:
    optimizer = optimizer_class(
        lora.values(), **dict(lr=args.lr, weight_decay=args.weight_decay) | dict(args.optimizer_args))
except (AttributeError, TypeError, ValueError) as e:
    raise InputError(f"--optimizer {args.optimizer}: {cache.first_words(e)}; give a class and its arguments")
say(f"{args.model}: LoRA on {sum('.lora_A.' in n for n in lora)} layers, {sum(p.numel() for p in lora.values()):,} "
    f"parameters, {args.dtype} base on {args.device}, {world_size} process{'es' * (world_size > 1)}")

def learning_rate(step):
    """Of the step that takes the run from `step` to `step` + 1."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.lr * dict(constant=1.0, linear=1 - done, cosine=0.5 + 0.5 * math.cos(math.pi * done))[args.lr_scheduler]

# ---- checkpoints and log ---------------------------------------------------------------------------------------------

draw_geometry = geometry | dict(target_pixels=geometry["target_pixels"][0]) # predict.py draws at the first area
config.update(geometry=draw_geometry, model=cache.fingerprint(transformer_folder / "transformer"),
              data=cache.content_key(samples=[[s.name, [x["file"].stem for x in (*s.resolutions, *s.texts.values())]]
                                              for s in epoch]))
versions = {m.__name__: m.__version__ for m in (torch, diffusers, peft, transformers)}
if shutil.which("git"):
    versions["commit"] = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True,
                                        text=True).stdout.strip()

def save_lora(path):
    predict.save_lora(path, transformer, dict(geometry=draw_geometry, model=args.model, step=step, config=config,
                                              versions=versions))

def save_checkpoint():
    """A folder that appears whole: LoRA, the optimizer's tensors and numbers, step and configuration. Older ones beyond
    --keep go."""
    tmp, path = out_dir / f".tmp-checkpoint-{step:06d}", out_dir / f"checkpoint-{step:06d}"
    shutil.rmtree(tmp, ignore_errors=True)
    save_lora(tmp / LORA_FILE)
    state = {f"{key}.{name}": value for name, p in lora.items() for key, value in optimizer.state[p].items()}
    tensors = {key: value.cpu().clone() for key, value in state.items() if torch.is_tensor(value)} # some share memory
    cache.write_tensors(tmp / "optimizer.safetensors", tensors, dict(
        step=step, config=config, numbers={key: value for key, value in state.items() if key not in tensors},
        group={key: value for key, value in optimizer.param_groups[0].items() if isinstance(value, (int, float))}))
    shutil.rmtree(path, ignore_errors=True) # a damaged one
    os.replace(tmp, path)
    cache.sync_folder(out_dir)
    for old in [p for p in checkpoints(out_dir) if step_of(p) <= step][:-args.keep]: # later ones are damaged: see above
        shutil.rmtree(old)

def load_checkpoint(weights, tensors, state):
    """Puts LoRA and optimizer back, bit for bit."""
    refuse_changes(state["config"]) # once more, now that config has model, data and geometry
    predict.load_weights(transformer, weights)
    numbered, state_of = {name: n for n, name in enumerate(lora)}, {}
    for entry, value in {**tensors, **state["numbers"]}.items():
        key, name = entry.split(".", 1)
        state_of.setdefault(numbered[name], {})[key] = value
    group = optimizer.state_dict()["param_groups"][0] | state["group"]
    optimizer.load_state_dict(dict(state=state_of, param_groups=[group]))

def due(step):
    """Whether this many steps are followed by a validation; after the last one it comes in any case."""
    every = args.sample_every or args.max_steps
    return bool(val_samples) and step > 0 and (step % every == 0 or step >= args.max_steps)

def begin_log():
    """Writes the first line, which tells how the run was begun, and keeps the steps up to the checkpoint of a killed
    run: what comes after it is taken again, and its last line may be half a line."""
    lines = log.read_text(errors="replace").splitlines() if step and log.exists() else []
    kept = lines[:1] or [json.dumps(dict(flags=vars(args), **versions, started=time.time()), default=str)]
    for line in lines[1:]:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            again = record["step"] > step or (record["step"] == step and "val_loss" in record and due(step))
            kept += [] if again else [line]
    cache.write_file(log, ("\n".join(kept) + "\n").encode())

def write_log(sync=False, **record):
    try:
        with open(log, "a") as f:
            f.write(json.dumps(record) + "\n")
            if sync: # after a power loss the log must not lag behind the checkpoint
                f.flush()
                os.fsync(f.fileno())
    except OSError as e:
        raise InputError(f"{log}: cannot be written ({e.strerror}); free some space, then --resume")

if args.resume:
    say(f"{out_dir}: going on after step {step}")
if checkpoint:
    load_checkpoint(*checkpoint)
    checkpoint = None # its tensors would stay in memory
if rank == 0:
    need = 12 * sum(p.numel() for p in lora.values()) * (args.keep + 1) / 1e9 # the LoRA and AdamW's two moments, fp32
    if need > (free := shutil.disk_usage(out_dir).free / 1e9):
        raise InputError(f"--out_dir {out_dir}: checkpoints need {need:.3f} GB, {free:.3f} GB are free; lower --keep, "
                         "or give a folder on another disk")
    for left in [*out_dir.glob(".tmp-*"), *out_dir.glob("DONE")]: # a dead process's, as we hold the lock; and the run
        shutil.rmtree(left) if left.is_dir() else left.unlink()    # is not done: it continues
    begin_log()
track = lambda step, values, pictures={}: None
if args.tracker != "none" and rank == 0:
    try:
        track = cache.load_extra("tracker").open_tracker(args.tracker, out_dir, step, config)
    except ConnectionError as e:
        raise InputError(f"--tracker {args.tracker}: {e}")

# ---- validation: samples like any other, computed and drawn ----------------------------------------------------------

val_items = [(s, s.resolutions[0], (s.prompts[0], True)) for s in val_samples]
sampling = predict.SAMPLING | (predict.TINY_SAMPLING if cache.is_tiny(args.model) else {})
base_pictures, vae = None, None # drawn and loaded by the first validation

def validation_loss():
    """The training's loss over --val_data, at four noise levels each. The noise depends on a sample's place in
    --val_data and not on --seed, so that runs with the same flags of loss and sizes compare."""
    runs = [(i, (k + 0.5) / 4) for i in range(len(val_items)) for k in range(4)]
    sums = torch.zeros(2, device=args.device)
    for pack, factor in deal_packs([count_tokens(*val_items[i]) for i, _ in runs])[rank]:
        items = [load_item(*val_items[i], generator("validation", i, s, seed=0), s) for i, s in [runs[r] for r in pack]]
        for loss, weight in flow_loss(transformer, items):
            sums += factor * torch.tensor([loss, weight], device=args.device)
    if world_size > 1:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()

def draw_pictures():
    """-> {place in val_samples: PIL image} of this process's share. With --fsdp all draw everything, as no forward pass
    is possible alone, and the first process decodes it."""
    share, decoder = slice(rank, None, world_size), vae
    if args.fsdp:
        share, decoder = slice(None), vae if rank == 0 else None
    items = [(s, sampling, args.seed) for s in val_samples]
    drawn = predict.draw_samples(transformer, decoder, scheduler_config, items, args.max_tokens, args.device, live,
                                 share)
    return dict(tqdm(drawn, desc="held-out pictures", unit=" drawn", disable=rank > 0 or None, leave=False))

def compare(i, picture):
    """-> (a row of the contact sheet, PSNRs to the target: of the input, without and with the LoRA, of the VAE alone).
    Where the sample's pictures are not on this machine, what the VAE makes of their latents stands in."""
    sample, resolution, _ = val_items[i]
    t, shapes = cache.load_latents(sample, resolution, live), resolution["img_shapes"]
    latents = [t["pixel_latent"], *t["control_latent"].split([h * w for _, h, w in shapes[1:]])]
    decode = lambda k: predict.decode(vae, latents[k].to(args.device), shapes[k:])
    target, *controls = [cache.read_image(path) if Path(path).is_file() else decode(k)
                         for k, path in enumerate([sample.target, *sample.controls])]
    target, control = [image.resize(picture.size, Image.Resampling.LANCZOS) for image in (target, controls[0])]
    psnrs = [predict.psnr(image, target) for image in (control, base_pictures[i], picture, decode(0))]
    return [predict.side_by_side(controls), predict.shown_prompt(sample), base_pictures[i], picture, target], psnrs

def report(val_loss, compared):
    """Writes the validation loss to the log, a contact sheet of each dataset to samples/, and says the mean PSNRs of
    each of its folders. compared: {place in val_samples: what compare returns}."""
    rows, groups = {}, {}
    for i, (row, psnrs) in sorted(compared.items()):
        sample = val_samples[i]
        rows.setdefault(sample.root, []).append(row)
        groups.setdefault("/".join([sample.root, *Path(sample.name).parent.parts]), []).append(psnrs)
    titles = ["control", "instruction", "base", "LoRA", "target"]
    sheets = {name: predict.contact_sheet(r, titles) for name, r in rows.items()}
    for name, sheet in sheets.items():
        predict.save_png(sheet, out_dir / "samples" / f"step_{step:06d}_{name}.png")
    means = {name: dict(zip(("input", "base", "lora", "vae"), np.mean(p, 0).tolist())) for name, p in groups.items()}
    write_log(step=step, val_loss=val_loss, psnr=means)
    track(step, dict(val_loss=val_loss), sheets)
    say(f"step {step}: validation loss {val_loss:.4f}. mean PSNR to the target in dB:\n"
        f"{'':20} pictures   input    base    LoRA  VAE alone")
    for name, m in means.items():
        say("{:20} {:8} {input:7.1f} {base:7.1f} {lora:7.1f} {vae:7.1f}".format(name, len(groups[name]), **m))
    say(f"{out_dir / 'samples'}/step_{step:06d}_*.png: {', '.join(titles)}")

def validate():
    """Loss, pictures and PSNRs of --val_data, which all processes compute and the first one reports."""
    global vae, base_pictures
    vae = vae or (live.vae if live else cache.load_part(diffusers.AutoencoderKLQwenImage, folder / "vae", args.dtype))
    vae.to(args.vae_device)
    say(f"step {step}: validation on {len(val_items)} held-out pictures")
    transformer.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"): # compiling once more would take longer
            val_loss = validation_loss()
            if base_pictures is None:
                with without_lora(transformer):
                    base_pictures = draw_pictures()
            compared = {i: compare(i, picture) for i, picture in draw_pictures().items()}
    except torch.OutOfMemoryError:
        if world_size > 1: # the others are waiting for this process's share
            raise InputError(f"--val_data: out of memory after step {step}; lower --max_tokens, then --resume")
        return say(f"warning: no memory for the validation after step {step}; the training goes on (--max_tokens)")
    finally:
        transformer.train()
        (vae.decoder if live else vae).to("cpu")
        if args.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats() # the log's `memory` is the training's
    shares = [compared] * world_size
    if world_size > 1:
        dist.all_gather_object(shares, compared)
    if rank == 0:
        report(val_loss, {i: both for share in shares for i, both in share.items()})

# ---- training --------------------------------------------------------------------------------------------------------

def clock():
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()

def sum_over_processes(numbers):
    """Adds up the LoRA's gradients, in place, and these numbers, in one all-reduce -> the numbers' sums."""
    for p in lora.values(): # a process without a pack has none
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    flat = torch.cat([*[p.grad.flatten() for p in lora.values()], torch.tensor(numbers, device=args.device)])
    if world_size > 1:
        dist.all_reduce(flat)
    *grads, sums = flat.split([*[p.numel() for p in lora.values()], len(numbers)])
    for p, grad in zip(lora.values(), grads):
        p.grad = grad.view_as(p)
    return sums.tolist()

@lru_cache(maxsize=2) # load_packs is one step ahead of the loop
def plan_step(step):
    """-> positions of the step's samples, what pick picks there, their lengths, and this process's [(pack, factor)]."""
    positions = range(step * args.batch_size, (step + 1) * args.batch_size)
    picked = [pick(p) for p in positions]
    lengths = [count_tokens(*p) for p in picked]
    return positions, picked, lengths, deal_packs(lengths)[rank]

def load_packs(step):
    """Yields the items of each pack of this process, from this step to the last. While one computes, a thread reads and
    checks the files of the next, and waits for the device to copy them. Live encoders have the device to themselves."""
    plans = map(plan_step, range(step, args.max_steps))
    packs = ([(positions[i], picked[i]) for i in pack] for positions, picked, _, dealt in plans for pack, _ in dealt)
    load = lambda pack: [load_item(*what, generator("noise", position)) for position, what in pack]
    if live:
        yield from map(load, packs)
        return
    ahead = None
    with ThreadPoolExecutor(1) as thread:
        for pack in packs:
            ready, ahead = ahead, thread.submit(load, pack)
            if ready:
                yield ready.result()
        if ahead:
            yield ahead.result()

signals = contextlib.ExitStack() # (`with` would indent all that follows)
stopped, stopping = signals.enter_context(cache.signals_noted()), False # a signal ends the run after the step at hand
bar = tqdm(total=args.max_steps, initial=step, desc="training", unit=" steps", disable=rank > 0 or None, leave=False)
loaded = load_packs(step)
while step < args.max_steps and not stopping:
    if due(step): # here and not after the step, so that a resumed run takes what an interruption has cut off
        validate()
    t0 = clock()

    # forward and backward, pack by pack: the gradients of sums add up
    positions, picked, lengths, packs = plan_step(step)
    loss_sum, weight_sum, sample_losses, cut = 0.0, 0.0, [0.0] * len(picked), False
    for pack, factor in packs:
        # a step may take longer than the time that torchrun gives after a signal. (With --fsdp it has to end, as all
        # processes gather each block together)
        cut = bool(stopped) and not args.fsdp
        if cut:
            break
        torch.manual_seed(generator("dropout", step, rank, pack[0]).initial_seed()) # of LoRA dropout, nothing else
        try:
            losses = flow_loss(transformer, next(loaded))
            (factor * sum(loss for loss, _ in losses)).backward()
        except torch.OutOfMemoryError:
            names = ", ".join(f"{picked[i][0].name}: {lengths[i]:,}" for i in pack)
            raise InputError(f"--max_tokens {args.max_tokens}: out of memory at step {step + 1} (tokens of {names}); "
                             "lower it, or raise --gradient_checkpointing, then --resume")
        for i, (loss, weight) in zip(pack, losses):
            sample_losses[i] += factor * (loss / weight).item()
        loss_sum += factor * sum(loss.detach() for loss, _ in losses)
        weight_sum += factor * sum(weight for _, weight in losses)

    # add up with the other processes, divide by what all of them saw, step
    loss_sum, weight_sum, stopping, cut, *sample_losses = sum_over_processes(
        [loss_sum, weight_sum, len(stopped), cut, *sample_losses])
    if cut: # of any process: the step is not taken, --resume takes it
        break
    for p in lora.values():
        p.grad /= weight_sum
    loss, lr = loss_sum / weight_sum, learning_rate(step)
    grad_norm = torch.nn.utils.clip_grad_norm_(lora.values(), args.max_grad_norm).item()
    if not math.isfinite(grad_norm) or not math.isfinite(loss): # the same on every process; the step is not taken
        raise InputError(f"{out_dir}: loss {loss}, gradient norm {grad_norm} at step {step + 1} "
                         f"({', '.join(s.name for s, _, _ in picked)}); check these samples, and start a new run "
                         "with a lower --lr (--pretrained_lora takes a checkpoint from before the loss rose)")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    seconds = clock() - t0

    # log and save: nothing below changes the training. A validation, which takes minutes, is preceded by a checkpoint
    saving = step == args.max_steps or due(step) or stopping or step % args.save_every == 0
    if rank == 0:
        tokens, memory = sum(lengths), cache.memory_of(args.device)
        # of all processes' samples: the first that load_item draws from this generator
        timesteps = [draw_timestep(generator("noise", p), math.prod(resolution["img_shapes"][0])).item()
                     for p, (_, resolution, _) in zip(positions, picked)]
        write_log(saving, step=step, loss=loss, lr=lr, grad_norm=grad_norm, seconds=round(seconds, 4), tokens=tokens,
                  memory=round(memory, 3), samples=[f"{s.root}/{s.name}" for s, _, _ in picked],
                  timesteps=[round(x, 4) for x in timesteps], losses=[round(x, 5) for x in sample_losses])
        track(step, dict(loss=loss, lr=lr, grad_norm=grad_norm))
        say(f"step {step}/{args.max_steps} | loss {loss:.4f} | lr {lr:.1e} | grad {grad_norm:.3f} | {seconds:.2f} s | "
            f"{args.batch_size} img | {tokens:,} tok | {tokens / seconds / 1000:.1f}k tok/s | {memory:.1f} GiB"
            + " | exploded: predicting nothing has a loss of 2; lower --lr in a new run" * (loss > 10))
        bar.update()
        if saving:
            save_checkpoint()
bar.close()

# ---- the end, which --resume takes again if it was interrupted -------------------------------------------------------

if stopping:
    if rank == 0 and step and step not in map(step_of, checkpoints(out_dir)): # in the midst of a step
        save_checkpoint()
    say(f"{out_dir}: stopped by a signal after step {step}; the same command with --resume continues it")
else:
    if rank == 0:
        save_lora(out_dir / LORA_FILE)
    if val_items:
        validate()
if rank == 0 and not stopping:
    cache.write_file(out_dir / "DONE", f"{step} steps\n".encode())
    model_flags = ["--model", args.model] + (["--transformer", args.transformer] if args.transformer else [])
    say(f"{out_dir / LORA_FILE}: trained for {step} steps on {len(samples)} samples. next:\n  python predict.py "
        + shlex.join([*model_flags, "--lora", str(out_dir), *([args.base_lora] if args.base_lora else [])])
        + " --image CONTROL.png --prompt \"...\"\n  python tools/curves.py " + shlex.quote(str(out_dir)))
signals.close()
if dist.is_initialized():
    dist.destroy_process_group()
