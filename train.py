"""
Teach Qwen-Image-Edit (v1, 2509, 2511) an edit: before/after pictures of any sizes -> LoRA.

Reads datasets (layout: cache.py), or an index of cache.py. Writes a run folder: log.jsonl, checkpoint-000200/, samples/
(held-out pictures) and at the end pytorch_lora_weights.safetensors: for predict.py, diffusers and (no DoRA) ComfyUI.

$ python train.py                                                           # the photographs and model in tiny/
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
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
import warnings
from datetime import timedelta
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from pydoc import locate
from types import SimpleNamespace

import diffusers
import filelock
import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageOps
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

import cache
import common
import predict
from common import (InputError, file_hash, first_words, key_value, load_extra, natural, not_negative, number, positive,
                    read_tensors, write_file)
from predict import LORA_FILE, checkpoints, number_of, without_lora
from rope_patch import checkpoint_blocks, plan_packs, run_packed, run_padded

# ---- flags -----------------------------------------------------------------------------------------------------------

parser = common.Parser(__doc__)
common.add_model_flags(parser)
cache.add_data_flags(parser)
flag = parser.group("LoRA")
flag("--lora_rank", 16, "width: more learns more, and costs memory", type=positive)
flag("--lora_alpha", None, "the LoRA's output is scaled by alpha / rank (default: the rank)", type=number(float, 1e-6))
flag("--lora_dropout", 0.0, "share of the LoRA's inputs that is set to 0", type=number(float, 0, 0.99))
flag("--lora_targets", ["attention"], "linear layers, by the ends of their names (to_q net.2 ...); attention: all of "
     "the attention, image and text; all-linear: all of the blocks", nargs="+")
flag("--lora_args", [], "KEY=VALUE: peft.LoraConfig's other arguments, as use_dora=true", nargs="+", type=key_value)
flag("--pretrained_lora", None, "start from this LoRA (file, folder, user/repo), with its rank, alpha and layers")
flag("--base_lora", None, "a LoRA to add to the frozen weights, such as Lightning's; sample with both")
flag = parser.group("step")
flag("--max_steps", 2000, "optimizer steps", type=positive)
flag("--batch_size", 4, "samples per optimizer step, over all processes", type=positive)
flag("--max_tokens", 10_000, "image + text tokens per forward pass; lower this first if memory runs out", type=positive)
flag("--batching", "packed", "padded is the slow reference", choices=["packed", "padded"])
flag("--optimizer", "torch.optim.AdamW", "or bitsandbytes.optim.AdamW8bit (less memory), prodigyopt.Prodigy (finds the "
     "learning rate itself: --lr 1), or another class that takes lr and weight_decay")
flag("--optimizer_args", [], "KEY=VALUE: its other arguments, as betas=[0.9,0.99]", nargs="+", type=key_value)
flag("--lr", 1e-4, "learning rate; lower it if the loss jumps", type=not_negative)
flag("--lr_scheduler", "constant", "after the warm-up", choices=["constant", "cosine", "linear"])
flag("--warmup_steps", 0, "steps in which the learning rate rises from 0", type=natural)
flag("--weight_decay", 0.01, "pull of the LoRA's weights to 0", type=not_negative)
flag("--max_grad_norm", 1.0, "a longer gradient is cut to this length", type=number(float, 1e-12))
flag = parser.group("loss")
flag("--timestep_sampling", "qwen_shift", "qwen_shift: logit-normal, shifted by the picture's size as in inference",
     choices=["uniform", "logit_normal", "qwen_shift"])
flag("--loss_norm", "sample", "mean over samples, or over tokens: large ones weigh more", choices=["sample", "token"])
flag("--mask_foreground_weight", 2.0, "loss weight of a mask's edited region", type=not_negative)
flag("--mask_background_weight", 1.0, "loss weight of the rest of that picture", type=not_negative)
flag = predict.add_transformer_flags(parser)
flag("--gradient_checkpointing", None, "blocks computed twice: more saves memory (default: all; on a GPU those that do "
     "not fit)", type=natural)
flag("--fsdp", False, "shard the frozen base over torchrun's processes (FSDP2)", action="store_true")
flag("--compile", False, "torch.compile the blocks: minutes at first, then faster; needs gcc", action="store_true")
flag = parser.group("run")
flag("--use_cache", True, "no: encode each batch live, all models loaded", action=argparse.BooleanOptionalAction)
flag("--seed", 0, "seed of order, noise, timesteps, dropout, initial LoRA", type=number(int, 0, 2**64 - 1))
flag("--out_dir", None, "run folder (default: out/<model>-<data>-001, next number for the next run)")
flag("--sample_every", 0, "steps between validations; 0: only at the end", type=natural)
flag("--val_pictures", 24, "most held-out samples that are drawn, spread over all; the loss is of all", type=natural)
flag("--save_every", 200, "steps between checkpoints", type=positive)
flag("--keep", 2, "how many of the newest checkpoints stay on disk", type=positive)
flag("--tracker", "none", "where else to log (WANDB_MODE=offline: locally)", choices=["none", "tensorboard", "wandb"])
flag("--plan", False, "only print the tokens, memory and time this would take; needs no weights", action="store_true")
flag("--resume", False, "continue the run of these flags: --out_dir, or the newest of its name", action="store_true")
args = cache.parse_data_args(parser, dict( # defaults of --model tiny: native sizes, two minutes on a CPU
    **common.TINY, max_steps=450, batch_size=8, max_tokens=4096, lr=4e-3, lr_scheduler="linear", warmup_steps=10,
    val_pictures=32, gradient_checkpointing=0, lora_targets=[
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "net.0.proj", "net.2", "proj_out",
        "img_in"]))
lora_args = dict(args.lora_args)
if args.pretrained_lora and parser.given() & {"--lora_rank", "--lora_alpha", "--lora_targets", "--lora_args"}:
    parser.error("argument --pretrained_lora: has its own rank, alpha and layers; leave out --lora_rank, --lora_alpha, "
                 "--lora_targets and --lora_args")
if str(lora_args.get("init_lora_weights")).startswith(("pissa", "olora", "corda", "loftq")):
    parser.error("argument --lora_args: init_lora_weights changes the base, which no LoRA file stores; choose another")
if args.dtype == "float16":
    parser.error("argument --dtype: float16 needs loss scaling, which train.py does not have; use bfloat16")
if args.fsdp and int(os.environ.get("WORLD_SIZE", 1)) < 2:
    parser.error("argument --fsdp: needs several processes; start with torchrun --nproc_per_node=N")
if not args.use_cache and any(map(cache.is_index, args.data + args.val_data)):
    parser.error("argument --use_cache: an index is a cache; leave out --no-use_cache")
if "lr" in dict(args.optimizer_args):
    parser.error("argument --optimizer_args: lr would be ignored; give --lr")
optimizer_class = locate(args.optimizer)
if not callable(optimizer_class):
    parser.error(f"argument --optimizer: found no {args.optimizer!r}; pip install it, or give torch.optim.AdamW")
pretrained_lora = predict.find_lora(args.pretrained_lora) if args.pretrained_lora else None
base_lora = predict.find_lora(args.base_lora) if args.base_lora else None

# what decides the numbers: a resumed run must not change it
config = {name: getattr(args, name) for name in (
    "dtype", "seed", "caption_dropout_rate", "prompt_image_dropout_rate", "lora_rank", "lora_alpha", "lora_dropout",
    "lora_targets", "lora_args", "batch_size", "batching", "optimizer", "optimizer_args", "lr", "lr_scheduler",
    "warmup_steps", "weight_decay", "max_grad_norm", "timestep_sampling", "loss_norm", "mask_foreground_weight",
    "mask_background_weight", "quantize", "quantize_text_encoder")}
config["preserve"] = args.preserve or None
config["preserve_prompts"] = args.preserve_prompts if args.preserve else None
config["max_steps"] = None if args.lr_scheduler == "constant" else args.max_steps # a constant rate can go on for ever
config["pretrained_lora"] = pretrained_lora and file_hash(pretrained_lora) # by content, wherever they lie
config["base_lora"] = base_lora and file_hash(base_lora)

# ---- processes: no DDP wrapper, as a step's only traffic is one all-reduce of the LoRA's gradients -------------------

rank, world_size = common.start_processes(args)

def say(line):
    if rank == 0:
        tqdm.write(line)

# ---- run folder ------------------------------------------------------------------------------------------------------

run_name = cache.run_name(args.model, args.data)
runs = [p.parent for p in Path("out").glob("*/log.jsonl") if re.fullmatch(re.escape(run_name) + r"-\d+", p.parent.name)]
newest = max(runs, default=None, key=number_of) # (a folder without a log is that of a run that never began)
next_run = f"out/{run_name}-{number_of(newest) + 1 if newest else 1:03d}"
out_dir = Path(args.out_dir or (args.resume and newest) or next_run)
log = out_dir / "log.jsonl"
if not (args.resume or args.plan) and any(not path.name.startswith(".") for path in out_dir.glob("*")):
    raise InputError(f"--out_dir {out_dir}: is not empty; go on with --resume, or give another folder")

def read_checkpoint(path):
    """-> LoRA, optimizer state, and a dict of step and config. InputError if any bit of it is not as it was saved."""
    weights, meta = read_tensors(path / LORA_FILE, "lora_adapter_metadata")
    moments, state = read_tensors(path / "optimizer.safetensors")
    if "config" not in state or {meta.get("train.step"), state.get("step")} != {number_of(path)}:
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
if checkpoint:
    refuse_changes(checkpoint[2]["config"]) # before anything slow
    step = checkpoint[2]["step"]
elif args.resume:
    killed_early = log.exists() and not (out_dir / LORA_FILE).exists() # before its first checkpoint: it begins again
    if saved or not killed_early: # all checkpoints are damaged; or no run, or a finished one without them
        raise InputError(f"--resume: no whole checkpoint in {out_dir}; give the right --out_dir, or leave out --resume")
if step >= args.max_steps and (out_dir / "DONE").exists():
    say(f"{out_dir}: already done after {step} steps; a larger --max_steps continues it (constant learning rate only)")
    sys.exit(0)

def lock_folder(folder):
    """-> (the run folder, its lock: ours until this process ends, however it ends). Without --out_dir it is the next
    number if another run was started at the same time."""
    common.prepare_folder(folder)
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
        return folder, lock
    except filelock.Timeout:
        if args.out_dir or args.resume:
            raise InputError(f"--out_dir {folder}: another run is at work in it; wait, or give another folder")
        return lock_folder(folder.with_name(f"{run_name}-{number_of(folder) + 1:03d}"))

if not args.plan:
    if rank == 0:
        out_dir, lock = lock_folder(out_dir)
    out_dir = common.gather_objects(out_dir, world_size)[0] # all have looked at the folder before one writes to it
    log = out_dir / "log.jsonl"

# ---- data: encode what the cache lacks; the encoders have left the device when make_cache returns --------------------

datasets = [root for root in args.data + args.val_data if not cache.is_index(root)]
parts = cache.ENCODERS if datasets else ["scheduler", "vae"] # indexes need no encoders; the VAE is for validation
folder, transformer_folder = predict.find_folders(args, parts, not args.plan)
pipe = cache.load_pipeline(folder) if datasets else None
samples, val_samples, geometry = cache.make_cache(pipe, folder, args, rank, world_size,
                                                  encode=args.use_cache and not args.plan)
live = None if args.use_cache else pipe # encodes each batch anew
if live and not args.plan:
    cache.load_encoder(live, "vae", args)
    cache.load_encoder(live, "text", args)

# ---- the stream: everything random is a function of (seed, position), so that resume needs one integer ---------------

def generator(*what, seed=args.seed):
    # by hash, because neighbouring seeds must not give related streams; 32 bits are all that a CPU generator uses
    return torch.Generator().manual_seed(int(hashlib.sha256(repr((seed, *what)).encode()).hexdigest()[:8], 16))

epoch = [sample for sample in samples for _ in range(sample.repeats)]

@lru_cache(maxsize=2)
def shuffled(n):
    return torch.randperm(len(epoch), generator=generator("order", n)).tolist()

def chance(g):
    return torch.rand((), generator=g).item()

def choose(g, options):
    return options[torch.randint(len(options), (), generator=g)]

def pick_sample(position):
    """-> (sample, resolution, text key) at this position: one of sample.resolutions, one of the keys of sample.texts.
    Caption dropout picks the empty prompt; picture dropout drops the controls, from the prompt too; --preserve picks an
    instruction that is not the sample's, and marks the resolution: the base answers it (set_velocities)."""
    n, i = divmod(position, len(epoch))
    sample = epoch[shuffled(n)[i]]
    # all numbers first. a generator for each feature, so that its flag never shifts what the others get
    g = generator("draw", position)
    resolution = choose(g, sample.resolutions)
    drop_caption = chance(g) < args.caption_dropout_rate
    g = generator("preserve", position)
    preserve = chance(g) < args.preserve
    other_prompt = choose(g, args.preserve_prompts)
    prompt = choose(generator("wording", position), sample.prompts)
    with_pictures = chance(generator("pictures", position)) >= args.prompt_image_dropout_rate
    if preserve and sample.controls:
        return sample, resolution | dict(preserved=True), (other_prompt, True)
    if not with_pictures:
        resolution = resolution | dict(img_shapes=resolution["img_shapes"][:1]) # of the target alone
    return sample, resolution, ("" if drop_caption else prompt, with_pictures)

def count_tokens(sample, resolution, text_key):
    return sum(h * w for _, h, w in resolution["img_shapes"]) + sample.texts[text_key]["tokens"]

scheduler_config = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler").config

def pick_timestep(g, img_len):
    """-> s in (0, 1) for a target of img_len tokens, fp32."""
    s = torch.rand((), generator=g) if args.timestep_sampling == "uniform" else torch.randn((), generator=g).sigmoid()
    if args.timestep_sampling == "qwen_shift":
        mu = predict.find_mu(img_len, scheduler_config)
        s = math.exp(mu) / (math.exp(mu) + 1 / s - 1) # as the scheduler shifts its sigmas
    return s

def pick(position):
    """What is trained at this position -> SimpleNamespace(sample, resolution, text_key, s: the timestep,
    noise_generator: its next numbers are the noise, which load_item takes once)."""
    sample, resolution, text_key = pick_sample(position)
    g = generator("noise", position)
    s = pick_timestep(g, math.prod(resolution["img_shapes"][0]))
    return SimpleNamespace(sample=sample, resolution=resolution, text_key=text_key, s=s, noise_generator=g)

# ---- loss: flow matching ---------------------------------------------------------------------------------------------

dtype = getattr(torch, args.dtype) # of the frozen base; LoRA weights, their gradients and the optimizer are fp32

def load_item(picked):
    """What the loss needs of what pick has picked: x0 (I_0, C), noise (I_0, C), velocity (I_0, C) or None for the
    base's, s, controls (sum I_c, C), prompt (T, J), img_shapes, weight (I_0,). On the CPU: a thread that copies to a
    GPU would wait for all that the GPU has to do."""
    t, shapes = cache.load_latents(picked.sample, picked.resolution, live), picked.resolution["img_shapes"]
    x0 = t["pixel_latent"].to("cpu", torch.float32)
    noise = torch.randn(x0.shape, generator=picked.noise_generator)
    velocity, weight = noise - x0, torch.ones(len(x0))
    if "preserved" in picked.resolution: # marked by pick_sample
        velocity = None
    elif "edit_mask" in t:
        mask = t["edit_mask"]
        weight = args.mask_foreground_weight * mask + args.mask_background_weight * (1 - mask)
    controls = t["control_latent"][:sum(h * w for _, h, w in shapes[1:])].to("cpu", dtype) # none if dropped
    prompt = cache.load_text(picked.sample, picked.text_key, live).to("cpu", dtype)
    return SimpleNamespace(x0=x0, noise=noise, velocity=velocity, s=picked.s, controls=controls, prompt=prompt,
                           img_shapes=shapes, weight=weight)

def to_device(item):
    moved = {name: x.to(args.device) if torch.is_tensor(x) else x for name, x in vars(item).items()}
    return SimpleNamespace(**moved)

def predict_velocity(model, items):
    """-> (I_0, C) in fp32 for each of these items, of any sizes, in one forward pass."""
    latents = []
    for i in items:
        noisy = (1 - i.s) * i.x0 + i.s * i.noise # data at s = 0, noise at s = 1
        latents.append(torch.cat([noisy.to(dtype), i.controls]))
    prompts = [i.prompt for i in items]
    timesteps = torch.stack([i.s for i in items])
    run = run_packed if args.batching == "packed" else run_padded
    preds = run(model, latents, prompts, timesteps, [i.img_shapes for i in items])
    return [pred[:len(i.x0)].float() for i, pred in zip(items, preds)] # the controls have no loss

def set_velocities(model, items):
    """--preserve: an item without a velocity learns what the base predicts, without the LoRA."""
    asked = [i for i in items if i.velocity is None]
    if args.fsdp and args.preserve: # all processes must run as many passes
        asked = asked or items[-1:]
    if asked:
        with without_lora(model), torch.no_grad():
            answers = predict_velocity(model, asked)
        for i, answer in zip(asked, answers):
            i.velocity = answer if i.velocity is None else i.velocity

def flow_loss(model, items):
    """-> [(loss, weight)] of these items. The step's loss is the sum of all losses over the sum of all weights, of all
    packs of all processes."""
    losses = []
    for i, pred in zip(items, predict_velocity(model, items)):
        error = (pred - i.velocity).square().mean(-1)
        loss, weight = (error * i.weight).sum(), i.weight.sum().clamp_min(1e-12) # a mask may be black all over
        losses.append((loss / weight, 1) if args.loss_norm == "sample" else (loss, weight))
    return losses

# ---- model: frozen base, LoRA in fp32 --------------------------------------------------------------------------------

def find_layers(transformer, names):
    """--lora_targets -> LoraConfig's target_modules and exclude_modules. InputError for a name that no layer has: peft
    is silent as long as any name fits. With use_dora a layer with a row of zeros is left out."""
    linears = [name for name, m in transformer.named_modules() if isinstance(m, torch.nn.Linear)]
    attention = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    presets = {"attention": attention, "all-linear": [*attention, "img_mod.1", "txt_mod.1", "net.0.proj", "net.2"]}
    targets = [end for name in names for end in presets.get(name, [name])]
    for end in targets:
        if not any(f".{name}".endswith(f".{end}") for name in linears):
            raise InputError(f"--lora_targets {end}: no linear layer of that name; there are "
                             f"{' '.join(presets['all-linear'])}, img_in, txt_in, proj_out")
    # the text stream of the last block is never read: a LoRA there would get no gradient
    last = len(transformer.transformer_blocks) - 1
    dead = rf"transformer_blocks\.{last}\.(attn\.add_q_proj|attn\.to_add_out|txt_mlp\..*)"
    for name in linears if lora_args.get("use_dora") and not args.plan else []:
        # it divides by each row's norm; of the last block's txt_mod most rows are never read either, and zeros in tiny
        if not transformer.get_submodule(name).weight.any(1).all():
            dead += f"|{name}"
    return dict(target_modules=targets, exclude_modules=dead)

transformer = predict.load_transformer(transformer_folder, args.dtype, weights=not args.plan)
if base_lora and not args.plan: # before the base is quantized
    predict.load_loras(transformer, [base_lora], [1.0])
    transformer.fuse_lora()
    transformer.unload_lora()
if pretrained_lora:
    lora_config = predict.lora_config(pretrained_lora)
else:
    lora_config = find_layers(transformer, args.lora_targets)
    lora_config.update(r=args.lora_rank, lora_alpha=args.lora_alpha or args.lora_rank)
lora_config |= dict(lora_dropout=args.lora_dropout, init_lora_weights="gaussian") | lora_args
warnings.filterwarnings("ignore", "You have passed exclude_modules") # where there is nothing to exclude
torch.manual_seed(args.seed) # every process makes the same LoRA; nothing has to be sent
try:
    lora = predict.add_lora(transformer, **lora_config) # {name: parameter}: all that learns
except (TypeError, ValueError, AttributeError) as e:
    raise InputError(f"--lora_args: peft refuses them ({first_words(e)}); see peft.LoraConfig")
if lora_args.get("target_parameters") or any(".lora_" not in name for name in lora):
    raise InputError("--lora_args: would train what a LoRA's file cannot hold; leave out bias, modules_to_save and "
                     "target_parameters")

# ---- packs: which process computes which samples, in which forward passes --------------------------------------------

def deal_packs(lengths):
    """Samples of these lengths -> for each process [(pack, factor)]: the samples' places in `lengths`, at most
    --max_tokens in a pack. All processes compute the same. With --fsdp each must run as many forward passes as any
    other: one with fewer packs repeats the shortest sample at a factor of 0 to its loss; all other factors are 1."""
    # a token of an n-token sample costs 24 dim^2 FLOPs in a block's linears, and 4 n dim in its attention
    cost = [n * (6 * transformer.inner_dim + n) for n in lengths]
    shares, work, dealt = [[] for _ in range(world_size)], [0] * world_size, []
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for i in longest_first:
        least = work.index(min(work)) # the process that has least to do
        shares[least].append(i)
        work[least] += cost[i]
    for share in shares:
        dealt.append([])
        for pack in plan_packs([lengths[i] for i in share], args.max_tokens, args.batching == "padded"):
            dealt[-1].append(([share[i] for i in pack], 1))
    if args.fsdp:
        passes = max(map(len, dealt))
        dealt = [packs + [(longest_first[-1:], 0)] * (passes - len(packs)) for packs in dealt]
    return dealt

if args.plan: # needs the LoRA's shapes, not its values
    load_extra("plan").print_plan(args, transformer, lora, folder, epoch, pick_sample, count_tokens, deal_packs,
                                  flow_loss, checkpoint_blocks, say)
    sys.exit(0)

# ---- onto the device, and the optimizer ------------------------------------------------------------------------------

if pretrained_lora:
    predict.load_weights(transformer, predict.read_lora(pretrained_lora)[0], pretrained_lora)
predict.place_transformer(transformer, args.device, args.quantize, args.offload, args.fsdp)
transformer.train()
if args.compile: # block by block, as all are alike; dynamic, as every batch has lengths of its own
    for block in transformer.transformer_blocks:
        block.compile(dynamic=True)
# only dropout draws random numbers in a block
recompute = partial(checkpoint_blocks, transformer, preserve_rng_state=lora_config["lora_dropout"] > 0)
fit = common.find_extra("fit") if args.gradient_checkpointing is None else None
if fit and fit.has_own_memory(args.device):
    lengths, gather = fit.lengths_of(samples, count_tokens), partial(common.gather_objects, world_size=world_size)
    try:
        recomputed = fit.keep_what_fits(transformer, lengths, flow_loss, recompute, gather, args, say)
    except torch.OutOfMemoryError:
        raise InputError(f"--max_tokens {args.max_tokens}: out of memory in the largest pass that can come, all blocks "
                         "computed again; lower it, or give --quantize or --offload")
else:
    recomputed = recompute(args.gradient_checkpointing)
say(f"gradient checkpointing: the backward pass computes {recomputed} of {len(transformer.transformer_blocks)} blocks "
    "again")
try:
    optimizer_args = dict(lr=args.lr, weight_decay=args.weight_decay) | dict(args.optimizer_args)
    optimizer = optimizer_class(lora.values(), **optimizer_args)
except (AttributeError, TypeError, ValueError) as e:
    raise InputError(f"--optimizer {args.optimizer}: {first_words(e)}; give a class and its arguments")
say(f"{args.model}: LoRA of {sum(p.numel() for p in lora.values()):,} parameters, {args.dtype} base on {args.device}, "
    f"{world_size} process(es)")

def learning_rate(n):
    """Of the step that takes the run from n to n + 1."""
    if n < args.warmup_steps:
        return args.lr * (n + 1) / args.warmup_steps
    done = (n - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    shape = dict(constant=1.0, linear=1 - done, cosine=0.5 + 0.5 * math.cos(math.pi * done))
    return args.lr * shape[args.lr_scheduler]

# ---- checkpoints and log ---------------------------------------------------------------------------------------------

draw_geometry = geometry | dict(target_pixels=geometry["target_pixels"][0]) # predict.py draws at the first area
contents = []
for sample in epoch:
    contents.append([sample.name, [file.stem for file in cache.files_of(sample)]])
config.update(geometry=draw_geometry, model=cache.fingerprint(transformer_folder / "transformer"),
              data=common.content_key(samples=contents))
versions = {name: version(name) for name in ("torch", "diffusers", "transformers", "peft")}

def save_lora(path, fold):
    notes = dict(geometry=draw_geometry, model=args.model, step=step, config=config, versions=versions)
    predict.save_lora(path, transformer, notes, fold)

def save_checkpoint():
    """A folder that appears whole: LoRA, the optimizer's tensors and numbers, step and configuration. Older ones beyond
    --keep go."""
    tmp, path = out_dir / f".tmp-checkpoint-{step:06d}", out_dir / f"checkpoint-{step:06d}"
    shutil.rmtree(tmp, ignore_errors=True)
    save_lora(tmp / LORA_FILE, fold=False)
    tensors, numbers = {}, {} # of the optimizer, by what they are and the parameter's name
    for name, p in lora.items():
        for key, value in optimizer.state[p].items():
            if torch.is_tensor(value):
                tensors[f"{key}.{name}"] = value.cpu().clone() # some share memory
            else:
                numbers[f"{key}.{name}"] = value
    group = {key: value for key, value in optimizer.param_groups[0].items() if isinstance(value, (int, float))}
    state = dict(step=step, config=config, numbers=numbers, group=group)
    common.write_tensors(tmp / "optimizer.safetensors", tensors, state)
    shutil.rmtree(path, ignore_errors=True) # a damaged one
    os.replace(tmp, path)
    common.sync_folder(out_dir)
    done = [old for old in checkpoints(out_dir) if number_of(old) <= step] # (--resume found later ones damaged)
    for old in done[:-args.keep]:
        shutil.rmtree(old)

def load_checkpoint(weights, tensors, state):
    """Puts LoRA and optimizer back, bit for bit."""
    refuse_changes(state["config"]) # once more, now that config has model, data and geometry
    predict.load_weights(transformer, weights, out_dir)
    by_name = {name: {} for name in lora}
    for entry, value in {**tensors, **state["numbers"]}.items():
        key, name = entry.split(".", 1)
        by_name[name][key] = value
    group = optimizer.state_dict()["param_groups"][0] | state["group"]
    # torch's optimizers number their parameters
    optimizer.load_state_dict(dict(state=dict(enumerate(by_name.values())), param_groups=[group]))

def due(n):
    """Whether a validation follows n steps; after the last one it comes in any case."""
    every = args.sample_every or args.max_steps
    return bool(val_samples) and n > 0 and (n % every == 0 or n >= args.max_steps)

def begin_log():
    """Writes the first line, which tells how the run was begun. If resumed, it keeps the lines up to the checkpoint:
    later steps run again, and a kill may have left half a line."""
    lines = log.read_text(errors="replace").splitlines() if step and log.exists() else []
    begin = dict(command=sys.argv, flags=vars(args), **versions, started=time.time())
    kept = lines[:1] or [json.dumps(begin, default=str)]
    for line in lines[1:]:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    write_file(log, ("\n".join(kept) + "\n").encode())

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
    for left in out_dir.glob(".tmp-*"): # of a dead process, as we hold the lock
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
    for name in ("DONE", LORA_FILE): # the run goes on, beyond what is in the newest checkpoint too
        (out_dir / name).unlink(missing_ok=True)
    begin_log()
track = None # function of --tracker
if args.tracker != "none" and rank == 0:
    try:
        track = load_extra("tracker").open_tracker(args.tracker, out_dir, step, config)
    except ConnectionError as e:
        raise InputError(f"--tracker {args.tracker}: {e}")

# ---- validation: the loss and the pictures of held-out samples -------------------------------------------------------

sheet = common.find_extra("sheet")
sampling = predict.SAMPLING | (predict.TINY_SAMPLING if common.is_tiny(args.model) else {})

def validation_loss():
    """The training's loss over --val_data, at four noise levels each. The noise depends on a sample's place in
    --val_data and not on --seed, so that runs with the same flags of loss and sizes compare."""
    picked, lengths = [], []
    for i, sample in enumerate(val_samples):
        what = dict(sample=sample, resolution=sample.resolutions[0], text_key=(sample.prompts[0], True))
        for s in (0.125, 0.375, 0.625, 0.875):
            g = generator("validation", i, s, seed=0)
            picked.append(SimpleNamespace(**what, s=torch.tensor(s), noise_generator=g))
            lengths.append(count_tokens(**what))
    sums = torch.zeros(2, device=args.device)
    for pack, factor in deal_packs(lengths)[rank]:
        for loss, weight in flow_loss(transformer, [to_device(load_item(picked[i])) for i in pack]):
            sums += factor * torch.tensor([loss, weight], device=args.device)
    if world_size > 1:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()

@lru_cache # once
def load_vae():
    return live.vae if live else cache.load_part(diffusers.AutoencoderKLQwenImage, folder / "vae", args.dtype)

def draw_pictures():
    """{place in val_samples: PIL image} of --val_pictures; all processes together draw them, each has its share."""
    share, vae = slice(rank, None, world_size), load_vae() # of the packs
    if args.fsdp: # every process has to join every forward pass, so all draw everything, and the first one decodes it
        share = slice(None)
        vae = vae if rank == 0 else None
    drawn = min(args.val_pictures, len(val_samples))
    places = [n * len(val_samples) // drawn for n in range(drawn)]
    items = [(val_samples[i], sampling, args.seed) for i in places]
    images = predict.draw_samples(transformer, vae, scheduler_config, items, args.max_tokens, args.device, live, share)
    bar = tqdm(images, desc="held-out pictures", unit=" drawn", disable=rank > 0 or None, leave=False)
    return {places[n]: image for n, image in bar}

@lru_cache # once
def draw_base_pictures():
    with without_lora(transformer):
        return draw_pictures()

def picture_file(sample):
    return f"{sample.root}/{predict.picture_stem(sample)}.png"

def compare(i, base, picture):
    """-> (i, PSNRs to the target: of the input, without and with the LoRA, of the VAE alone; thumbnails for the sheet).
    Where the pictures are not on this machine, what the VAE makes of their latents stands in. Saves all in samples/."""
    sample, resolution = val_samples[i], val_samples[i].resolutions[0]
    t, shapes = cache.load_latents(sample, resolution, live), resolution["img_shapes"]
    latents = torch.cat([t["pixel_latent"], t["control_latent"]]).split([h * w for _, h, w in shapes])

    def by_vae(n):
        return predict.decode(load_vae(), latents[n].to(args.device), [shapes[n]])
    target, *controls = [common.read_image(path) if Path(path).is_file() else by_vae(n)
                         for n, path in enumerate([sample.target, *sample.controls])]
    target, control = [image.resize(picture.size, Image.Resampling.LANCZOS) for image in (target, controls[0])]
    psnrs = [predict.psnr(image, target) for image in (control, base, picture, by_vae(0))]
    shown = {f"step_{step:06d}": picture, "base": base, "target": target, "control": control}
    shown |= {f"control_{n}": ImageOps.contain(image, picture.size) for n, image in enumerate(controls[1:], 1)}
    for name, image in shown.items():
        path = out_dir / "samples" / name / picture_file(sample)
        if image is picture or not path.exists(): # the others stay as they are
            predict.save_png(image, path)
    return i, psnrs, [sheet.thumbnail(cell) for cell in (controls, base, picture, target)] if sheet else []

def report(val_loss, rows):
    """Says and logs the loss and each folder's mean PSNRs; a contact sheet of each dataset goes to samples/. rows: of
    compare, sorted."""
    table = f". mean PSNR to the target in dB:\n{'':20} pictures   input    base    LoRA  VAE alone"
    say(f"step {step}: validation loss {val_loss:.4f}{table if rows else ''}")
    groups, means, sheets, pictures = {}, {}, {}, []
    for i, psnrs, _ in rows:
        sample = val_samples[i]
        pictures.append(dict(file=picture_file(sample), prompt=sample.prompts[0], controls=len(sample.controls),
                             psnr=[round(x, 2) for x in psnrs]))
        groups.setdefault("/".join([sample.root, *Path(sample.name).parent.parts]), []).append(psnrs)
    for name, psnrs in groups.items():
        means[name] = dict(zip(("input", "base", "lora", "vae"), np.mean(psnrs, 0).tolist()))
        say("{:20} {:8} {input:7.1f} {base:7.1f} {lora:7.1f} {vae:7.1f}".format(name, len(psnrs), **means[name]))
    write_log(step=step, val_loss=val_loss, psnr=means, pictures=pictures)
    for old in sorted((out_dir / "samples").glob("step_*[0-9]/"))[:-20]: # sheets stay
        shutil.rmtree(old)
    if sheet and rows:
        sheets = sheet.validation_sheets(val_samples, rows)
        say(f"{out_dir / 'samples'}/step_{step:06d}_*.png: control, instruction, base, LoRA, target")
    for name, image in sheets.items():
        predict.save_png(image, out_dir / "samples" / f"step_{step:06d}_{name}.png")
    if track:
        track(step, dict(val_loss=val_loss), sheets)

def validate():
    """Loss, pictures and PSNRs of --val_data, which all processes compute and the first one reports."""
    say(f"step {step}: validation on {len(val_samples)} held-out pictures")
    torch.cuda.empty_cache() # for cuDNN, whose memory is not torch's (without a GPU it does nothing)
    vae = load_vae().to(args.vae_device)
    transformer.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"): # compiling once more would take longer
            val_loss, base_pictures = validation_loss(), draw_base_pictures()
            rows = [compare(i, base_pictures[i], picture) for i, picture in draw_pictures().items()]
            rows = sorted(sum(common.gather_objects(rows, world_size), []))
            if rank == 0:
                report(val_loss, rows)
    except torch.OutOfMemoryError:
        if world_size > 1: # the others are waiting for this process's share
            raise InputError(f"--val_data: out of memory after step {step}; lower --max_tokens, then --resume")
        say(f"warning: no memory for the validation after step {step}; the training goes on (--max_tokens)")
    finally:
        transformer.train()
        (vae.decoder if live else vae).to("cpu") # live training needs the encoder
        if args.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats() # the log's `memory` is the training's

# ---- training --------------------------------------------------------------------------------------------------------

def clock():
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()

def sum_over_processes(numbers):
    """Adds up the LoRA's gradients, in place, and these numbers, in one all-reduce -> the numbers' sums."""
    for p in lora.values(): # a process without a pack has none
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    grads = [p.grad for p in lora.values()]
    flat = torch.cat([parameters_to_vector(grads), torch.tensor(numbers, device=args.device)])
    if world_size > 1:
        dist.all_reduce(flat)
    vector_to_parameters(flat, grads) # each gradient is a part of `flat` now
    return flat[-len(numbers):].tolist()

@lru_cache(maxsize=2) # packs_from, which walks the same packs as the loop below, is one step ahead of it
def plan_step(n):
    """-> what pick picks for step n's samples, their lengths, and this process's [(pack, factor)]."""
    picked = [pick(position) for position in range(n * args.batch_size, (n + 1) * args.batch_size)]
    lengths = [count_tokens(p.sample, p.resolution, p.text_key) for p in picked]
    return picked, lengths, deal_packs(lengths)[rank]

def packs_from(first):
    """Yields what pick has picked for each pack of this process, in the order in which the loop below asks for them."""
    for n in range(first, args.max_steps):
        picked, _, packs = plan_step(n)
        for pack, _ in packs:
            yield [picked[i] for i in pack]

signals = contextlib.ExitStack() # (`with` would indent all that follows)
stopped, stopping = signals.enter_context(common.signals_noted()), False # a signal ends the run after the step at hand
bar = tqdm(total=args.max_steps, initial=step, desc="training", unit=" steps", disable=rank > 0 or None, leave=False)
# while a pack computes, a thread reads and checks the files of the next. (live encoders need the device themselves)
loaded = common.run_ahead(lambda picked: list(map(load_item, picked)), packs_from(step), most=0 if live else 1)
begun, first_step = time.monotonic(), step
while step < args.max_steps and not stopping:
    if due(step): # before the next step: a run that was killed in a validation begins with it when it is resumed
        validate()
    t0 = clock()

    # forward and backward, pack by pack: the gradients of sums add up
    picked, lengths, packs = plan_step(step)
    loss_sum, weight_sum, sample_losses = 0.0, 0.0, [0.0] * len(picked)
    for pack, factor in packs:
        torch.manual_seed(generator("dropout", step, rank, pack[0]).initial_seed()) # of LoRA dropout, nothing else
        try:
            items = list(map(to_device, next(loaded).result()))
            set_velocities(transformer, items)
            losses = flow_loss(transformer, items)
            pack_loss = factor * sum(loss for loss, _ in losses)
            pack_loss.backward()
        except torch.OutOfMemoryError:
            names = ", ".join(f"{picked[i].sample.name}: {lengths[i]:,}" for i in pack)
            raise InputError(f"--max_tokens {args.max_tokens}: out of memory at step {step + 1} (tokens of {names}), "
                             f"with --gradient_checkpointing {recomputed}; lower the one, or raise the other, then "
                             "--resume")
        for i, (loss, weight) in zip(pack, losses):
            sample_losses[i] += factor * (loss / weight).item()
            weight_sum += factor * weight
        loss_sum += pack_loss.detach()

    # add up with the other processes, divide by what all of them saw, step
    loss_sum, weight_sum, stopping, *sample_losses = sum_over_processes(
        [loss_sum, weight_sum, len(stopped), *sample_losses])
    torch._foreach_div_([p.grad for p in lora.values()], weight_sum) # few kernels for hundreds of tensors
    loss, lr = loss_sum / weight_sum, learning_rate(step)
    grad_norm = torch.nn.utils.clip_grad_norm_(lora.values(), args.max_grad_norm).item()
    if not math.isfinite(grad_norm) or not math.isfinite(loss): # the same on every process; the step is not taken
        raise InputError(f"{out_dir}: loss {loss}, gradient norm {grad_norm} at step {step + 1} "
                         f"({', '.join(p.sample.name for p in picked)}); check these samples, and start a new "
                         "run with a lower --lr (--pretrained_lora takes a checkpoint from before the loss rose)")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    seconds = clock() - t0

    # log and save: nothing below changes the training. A validation, which takes minutes, is preceded by a checkpoint
    saving = step == args.max_steps or due(step) or stopping or step % args.save_every == 0
    if rank == 0:
        tokens, memory = sum(lengths), common.memory_of(args.device)
        names = [f"{p.sample.root}/{p.sample.name}" for p in picked]
        timesteps = [round(p.s.item(), 4) for p in picked]
        write_log(saving, step=step, loss=loss, lr=lr, grad_norm=grad_norm, seconds=round(seconds, 4), tokens=tokens,
                  memory=round(memory, 3), samples=names, timesteps=timesteps,
                  losses=[round(x, 5) for x in sample_losses])
        if track:
            track(step, dict(loss=loss, lr=lr, grad_norm=grad_norm))
        line = (f"step {step}/{args.max_steps} | loss {loss:.4f} | lr {lr:.1e} | grad {grad_norm:.3f} | {seconds:.2f} s"
                f" | {args.batch_size} img | {tokens:,} tok | {tokens / seconds / 1000:.1f}k tok/s | {memory:.1f} GiB")
        if step % 10 == 0: # validations so far included
            left = (time.monotonic() - begun) / (step - first_step) * (args.max_steps - step)
            line += f" | {timedelta(seconds=round(left))} left"
        say(line)
        if loss > 10:
            say("exploded: predicting nothing has a loss of 2; lower --lr in a new run")
        bar.update()
        if saving:
            save_checkpoint()
bar.close()

# ---- the end, which --resume takes again if it was interrupted -------------------------------------------------------

if stopping:
    say(f"{out_dir}: stopped by a signal after step {step}; the same command with --resume continues it")
else:
    if rank == 0:
        save_lora(out_dir / LORA_FILE, fold=True)
    if val_samples:
        validate()
    if rank == 0:
        write_file(out_dir / "DONE", f"{step} steps\n".encode())
    same = [name for name in ("model", "transformer", "quantize", "quantize_text_encoder")
            if getattr(args, name) not in (None, "none")]
    flags = [word for name in same for word in (f"--{name}", getattr(args, name))]
    loras = map(str, filter(None, [out_dir, base_lora]))
    say(f"{out_dir / LORA_FILE}: trained for {step} steps on {len(samples)} samples. next:\n"
        f"  python predict.py {shlex.join([*flags, '--lora', *loras])} --image CONTROL.png --prompt \"...\"\n"
        f"  python tools/page.py {shlex.quote(str(out_dir))}\n"
        f"ComfyUI: copy it to models/loras (no DoRA); diffusers: pipe.load_lora_weights({str(out_dir / LORA_FILE)!r})")
signals.close()
if dist.is_initialized():
    dist.destroy_process_group()
