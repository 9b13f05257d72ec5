"""
Teach Qwen-Image-Edit (v1, 2509, 2511) an edit: before/after pictures of any sizes -> LoRA.

Reads datasets (cache.py describes their layout), or an index that cache.py has written. Writes a run folder: log.jsonl,
checkpoint-000200/, samples/ (pictures of the validations), and at the end pytorch_lora_weights.safetensors, which
predict.py, diffusers and ComfyUI load.

$ python train.py                                                           # the photographs and model in tiny/
$ python train.py --model Qwen/Qwen-Image-Edit-2509 --data photos --plan    # what it would take; trains nothing
$ python train.py --model Qwen/Qwen-Image-Edit-2509 --data photos           # one GPU
$ torchrun --nproc_per_node=8 train.py --model Qwen/Qwen-Image-Edit-2509 --data photos
$ python train.py --model ... --data photos --resume         # the same flags and --resume: continue the newest such run

A step uses --batch_size samples, whatever the number of processes. They are packed without padding into forward passes
of at most --max_tokens tokens. Sample order, noise, timesteps and dropped captions are functions of
(seed, position in the stream): 1 and 8 processes see the same, and resuming gives the run you would have had without
stopping, bit for bit on a CPU. SIGTERM, SIGUSR1 or Ctrl-C end a run after the step at hand, with a checkpoint and
status 0; DONE marks a finished run.

Behind the flags come three chapters. THE RECIPE: which sample, at which noise, with which loss. HELPERS. THE RUN: what
happens, from the first line to the last; begin there if you like to know the end of a story.
Shape letters as in rope_patch.py.
"""
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
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import tee
from pathlib import Path
from pydoc import locate

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

# ---- flags (more of them are in common.add_model_flags, cache.add_data_flags, predict.add_transformer_flags) ---------

parser = common.Parser(__doc__)
common.add_model_flags(parser)
cache.add_data_flags(parser)
# what learns
flag = parser.group("LoRA")
flag("--lora_rank", 16, "width: more learns more, and costs memory", type=positive)
flag("--lora_alpha", None, "the LoRA's output is scaled by alpha / rank (default: the rank)", type=number(float, 1e-6))
flag("--lora_dropout", 0.0, "share of the LoRA's inputs that is set to 0", type=number(float, 0, 0.99))
flag("--lora_targets", ["attention"], "linear layers, by the ends of their names (to_q net.2 ...); attention: all of "
     "the attention, image and text; all-linear: all of the blocks", nargs="+")
flag("--lora_args", [], "KEY=VALUE: peft.LoraConfig's other arguments, as use_rslora=true", nargs="+", type=key_value)
flag("--pretrained_lora", None, "start from this LoRA (file, folder, user/repo), with its rank, alpha and layers")
# how it learns
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
flag("--mask_foreground_weight", 2.0, "loss weight of a mask's edited region", type=not_negative)
flag("--mask_background_weight", 1.0, "loss weight of the rest of that picture", type=not_negative)
# what costs memory and time, and changes nothing else (quantize excepted)
flag = predict.add_transformer_flags(parser)
flag("--gradient_checkpointing", None, "blocks computed twice: more saves memory (default: all; on a GPU those that do "
     "not fit)", type=natural)
flag("--fsdp", False, "shard the frozen base over torchrun's processes (FSDP2)")
flag("--compile", False, "torch.compile the blocks: minutes at first, then faster; needs gcc")
# what is kept, shown and resumed
flag = parser.group("run")
flag("--use_cache", True, "no: encode each batch live, all models loaded")
flag("--seed", 0, "seed of order, noise, timesteps, dropout, initial LoRA", type=number(int, 0, 2**64 - 1))
flag("--out_dir", None, "run folder (default: out/<model>-<data>-001, next number for the next run)")
flag("--sample_every", 0, "steps between validations; 0: only at the end", type=natural)
flag("--val_pictures", 24, "at most so many validation pictures are generated, spread over all samples; the validation "
     "loss is of all", type=natural)
flag("--save_every", 200, "steps between checkpoints", type=positive)
flag("--keep", 2, "how many of the newest checkpoints stay on disk", type=positive)
flag("--tracker", "none", "where else to log (WANDB_MODE=offline: locally)", choices=["none", "tensorboard", "wandb"])
flag("--plan", False, "only print the tokens, memory and time this would take; needs no weights")
flag("--resume", False, "continue the run of these flags: --out_dir, or the newest of its name")
# tiny's own defaults: native sizes, two minutes on a CPU. It is small enough to train every linear layer that an edit
# needs; the real model learns with its attention alone
args = cache.parse_data_args(parser, dict(
    **common.TINY, max_steps=450, batch_size=8, max_tokens=4096, lr=4e-3, lr_scheduler="linear", warmup_steps=10,
    val_pictures=32, gradient_checkpointing=0, lora_targets="to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj "
    "net.0.proj net.2 proj_out img_in".split()))

# Flags that contradict each other, or ask for something that does not exist, end the script before anything is loaded.
lora_args = dict(args.lora_args)
if args.pretrained_lora and parser.given() & {"--lora_rank", "--lora_alpha", "--lora_targets", "--lora_args"}:
    parser.error("argument --pretrained_lora: has its own rank, alpha and layers; leave out --lora_rank, --lora_alpha, "
                 "--lora_targets and --lora_args")
if lora_args.get("use_dora"):
    parser.error("argument --lora_args: use_dora is not trained here, as ComfyUI ignores a DoRA's magnitudes and a "
                 "quantized base has none; leave it out, and raise --lora_rank")
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
dtype = getattr(torch, args.dtype) # of the frozen base; LoRA weights, their gradients and the optimizer are fp32

# What --resume may change. All other flags decide the numbers, and are compared with the checkpoint's: a flag that you
# add is compared too, unless you name it here.
MAY_CHANGE = (
    # compared by what they stand for: the weights below and in THE RUN, pictures and texts by what was encoded of them
    "pretrained_lora model transformer data repeats mask skip_bad target_pixels control_pixels upscale cache_dir "
    "use_cache max_sequence_length "
    # what is written, when and where
    "val_data val_pictures sample_every save_every keep out_dir tracker plan resume "
    # speed and memory
    "device vae_device text_encoder_device flash_attention max_tokens gradient_checkpointing offload fsdp compile "
).split()
config = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}
config["pretrained_lora"] = pretrained_lora and file_hash(pretrained_lora)
if args.lr_scheduler == "constant": # the other rates depend on where the run ends
    del config["max_steps"]

# ==== THE RECIPE: which sample, at which noise, with which loss =======================================================
# In the order of a step. pick: which sample; load_item: its tensors; predict_velocity: the model; flow_loss: the loss.
# Beside the flags these functions read three things that THE RUN has made before its first step: epoch (the samples,
# each as often as --repeats says), scheduler_config, and encoders (as a rule None: the cache has what they would make).

@dataclass
class Pick:
    """What is trained at one position of the stream, chosen before any file is opened."""
    sample: common.Sample
    encoding: dict # one of sample.encodings: the shapes and the file of its latents
    prompt: str # one of the sample's; "" if it was dropped; with `preserve` one of --preserve_prompts
    with_controls: bool # False: text-to-image; the prompt's embedding does not see the controls either
    preserve: bool # learn what the base answers to this prompt, not the target
    s: torch.Tensor # () the noise level, which is the model's timestep: 0 is data, 1 is noise
    noise_generator: torch.Generator # its next numbers are the noise; load_item takes them

    @property
    def img_shapes(self):
        """[(1, height, width), ...] in tokens of 16x16 pixels, the target first."""
        return self.encoding["img_shapes"] if self.with_controls else self.encoding["img_shapes"][:1]

    @property
    def tokens(self):
        """Its length in a forward pass: image and text."""
        text = self.sample.texts[self.prompt, self.with_controls]
        return sum(h * w for _, h, w in self.img_shapes) + text["tokens"]

@dataclass
class Item:
    """The tensors of a Pick. I: target tokens, K: tokens of all controls, T: prompt tokens, C: latent channels, J: text
    channels. extras/fit.py reads these shapes, to measure memory with items of zeros."""
    x0: "float32 I C" # the target's latents, i.e. the data
    noise: "float32 I C"
    velocity: "float32 I C" # what the model should predict: noise - x0. None until ask_base has filled it in
    s: "float32" # noise level
    controls: "base K C" # latents of the controls, without noise, one after the other
    prompt: "base T J" # embeddings
    weight: "float32 I" # of each target token in the loss
    img_shapes: list # as Pick.img_shapes

# Everything random is a function of (seed, position), so that resuming needs one number and every process can tell
# what the others do. A random number generator that is used up step by step would have to be saved, for each process.

def generator(*what, seed=args.seed):
    # by hash: seeds like seed + position would give runs with neighbouring seeds the same noise, shifted by a step. 32
    # bits are all that torch's CPU generator uses. (birthdays: of a million samples about 100 pairs share their noise)
    return torch.Generator().manual_seed(int(hashlib.sha256(repr((seed, *what)).encode()).hexdigest()[:8], 16))

@lru_cache(maxsize=2)
def shuffled(n):
    """The order of the n-th epoch, as places in `epoch`."""
    return torch.randperm(len(epoch), generator=generator("order", n)).tolist()

def chance(g): # uniform in [0, 1)
    return torch.rand((), generator=g).item()

def choose(g, options): # one of them, all equally likely
    return options[torch.randint(len(options), (), generator=g)]

def pick(position):
    """-> Pick of this position in the stream of samples, which goes through one shuffled epoch after the other."""
    n, place = divmod(position, len(epoch))
    sample = epoch[shuffled(n)[place]]
    # A generator for each decision, asked even where its answer has no use: so a flag that is turned on never changes
    # the other decisions. (The names are a part of the seeds.)
    g = generator("draw", position)
    encoding = choose(g, sample.encodings)
    drop_caption = chance(g) < args.caption_dropout_rate
    prompt = choose(generator("wording", position), sample.prompts)
    drop_controls = chance(generator("pictures", position)) < args.prompt_image_dropout_rate
    g = generator("preserve", position)
    preserve = chance(g) < args.preserve and bool(sample.controls)
    preserve_prompt = choose(g, args.preserve_prompts)
    if drop_caption:
        prompt = ""
    if preserve: # the base can only answer about pictures that it sees
        prompt, drop_controls = preserve_prompt, False
    g = generator("noise", position)
    s = pick_timestep(g, math.prod(encoding["img_shapes"][0]))
    return Pick(sample, encoding, prompt, not drop_controls, preserve, s, g)

def pick_timestep(g, img_len):
    """-> s in (0, 1) for a target of img_len tokens, fp32."""
    s = torch.rand((), generator=g) if args.timestep_sampling == "uniform" else torch.randn((), generator=g).sigmoid()
    if args.timestep_sampling == "qwen_shift":
        mu = predict.find_mu(img_len, scheduler_config)
        s = math.exp(mu) / (math.exp(mu) + 1 / s - 1) # as the scheduler shifts its sigmas
    return s

def load_item(picked):
    """-> Item, on the CPU: a thread that copied it to a GPU would wait for all that the GPU still has to do. From the
    cache, or encoded now by the pipeline `encoders`."""
    latents = cache.load_latents(picked.sample, picked.encoding, encoders)
    x0 = latents["pixel_latent"].to("cpu", torch.float32)
    noise = torch.randn(x0.shape, generator=picked.noise_generator)
    weight = torch.ones(len(x0))
    if "edit_mask" in latents and not picked.preserve: # the mask belongs to the edit, which is not asked for
        mask = latents["edit_mask"] # (I,) from 0 to 1: the edited share of a token
        weight = args.mask_foreground_weight * mask + args.mask_background_weight * (1 - mask)
    controls = latents["control_latent"] if picked.with_controls else latents["control_latent"][:0]
    prompt = cache.load_text(picked.sample, (picked.prompt, picked.with_controls), encoders)
    velocity = None if picked.preserve else noise - x0
    return Item(x0, noise, velocity, picked.s, controls.to("cpu", dtype), prompt.to("cpu", dtype), weight,
                picked.img_shapes)

def to_device(item):
    return Item(*[x.to(args.device) if torch.is_tensor(x) else x for x in vars(item).values()])

def predict_velocity(model, items):
    """-> (I, C) in fp32 for each of these items, of any sizes, in one forward pass."""
    latents = []
    for i in items:
        noisy = (1 - i.s) * i.x0 + i.s * i.noise # data at s = 0, noise at s = 1
        latents.append(torch.cat([noisy.to(dtype), i.controls])) # the model sees the controls as they are
    prompts = [i.prompt for i in items]
    timesteps = torch.stack([i.s for i in items])
    run = run_packed if args.batching == "packed" else run_padded
    preds = run(model, latents, prompts, timesteps, [i.img_shapes for i in items])
    return [pred[:len(i.x0)].float() for i, pred in zip(items, preds)] # what it says of the controls has no use

def ask_base(model, items):
    """--preserve: what items without a velocity should learn is what the base predicts, without the LoRA -> items."""
    asked = [i for i in items if i.velocity is None]
    if args.fsdp and args.preserve: # every process must run the same number of passes: one that need not ask asks too
        asked = asked or items[-1:]
    if not asked:
        return items
    # the same noise and controls: only the prompt is another one
    with without_lora(model), torch.no_grad():
        answers = iter(predict_velocity(model, asked))
    return [replace(i, velocity=next(answers)) if i.velocity is None else i for i in items]

def flow_loss(model, items):
    """Flow matching: the model predicts the straight way from data to noise (https://arxiv.org/abs/2210.02747). -> the
    loss of each item: the weighted mean over its own target tokens, so that a large picture counts as a small one."""
    losses = []
    for i, pred in zip(items, predict_velocity(model, items)):
        # fp32, also on a bf16 base: bf16 has 8 bits, and a difference of two such numbers few that are right
        error = (pred - i.velocity).square().mean(-1) # (I,)
        losses.append((error * i.weight).sum() / i.weight.sum().clamp_min(1e-12)) # all weights are 0 in an idle pass
    return losses

def learning_rate(n):
    """Of the step that takes the run from n to n + 1: a pure function, so a checkpoint holds no scheduler object."""
    if n < args.warmup_steps:
        return args.lr * (n + 1) / args.warmup_steps
    done = (n - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    shape = dict(constant=1.0, linear=1 - done, cosine=0.5 + 0.5 * math.cos(math.pi * done))
    return args.lr * shape[args.lr_scheduler]

# ==== HELPERS, in the order in which THE RUN needs them ===============================================================
# Beside args and config they read rank, world_size and out_dir, with which THE RUN begins. All else they are given.

def say(line):
    if rank == 0:
        tqdm.write(line) # print would tear the progress bar

# ---- the run folder --------------------------------------------------------------------------------------------------

def find_folder(name):
    """-> the run's folder: --out_dir; with --resume the newest of this name; else the next number."""
    # a run without a log never began, and is not counted
    runs = [p.parent for p in Path("out").glob("*/log.jsonl") if re.fullmatch(re.escape(name) + r"-\d+", p.parent.name)]
    newest = max(runs, default=None, key=number_of)
    next_run = f"out/{name}-{number_of(newest) + 1 if newest else 1:03d}"
    folder = Path(args.out_dir or (args.resume and newest) or next_run)
    if not (args.resume or args.plan) and any(not path.name.startswith(".") for path in folder.glob("*")):
        raise InputError(f"--out_dir {folder}: is not empty; continue its run with --resume, or give another folder")
    return folder

def lock_folder(folder, name):
    """-> (the run folder, its lock: ours until this process ends, however it ends). Without --out_dir it is the next
    number if another run was started at the same time."""
    common.prepare_folder(folder)
    # the system lets a lock go when its process dies, so a killed run leaves none behind
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
        return folder, lock
    except filelock.Timeout:
        if args.out_dir or args.resume:
            raise InputError(f"--out_dir {folder}: another run is at work in it; wait, or give another folder")
        return lock_folder(folder.with_name(f"{name}-{number_of(folder) + 1:03d}"), name)

def begin_log(step, versions):
    """Takes the folder over from a dead process, or from a run that continues, and writes the log's first line: how the
    run was begun. A resumed log keeps its lines up to the checkpoint: later steps run again, and a kill may have left
    half a line."""
    for path in out_dir.glob(".tmp-*"): # we hold the lock, so these belong to a dead process
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for name in ("DONE", LORA_FILE): # the run continues beyond these
        (out_dir / name).unlink(missing_ok=True)
    log = out_dir / "log.jsonl"
    # the first line stays that of the first start
    lines = log.read_text(errors="replace").splitlines() if step and log.exists() else []
    begin = dict(command=sys.argv, flags=vars(args), **versions, started=time.time())
    kept = lines[:1] or [json.dumps(begin, default=str)]
    for line in lines[1:]:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    write_file(log, ("\n".join(kept) + "\n").encode())

def write_log(record, sync=False):
    """Appends a line of JSON. sync: to the disk, so that the log has what a checkpoint has, also after a power loss."""
    try:
        with open(out_dir / "log.jsonl", "a") as f:
            f.write(json.dumps(record) + "\n")
            if sync:
                f.flush()
                os.fsync(f.fileno())
    except OSError as e:
        raise InputError(f"{out_dir}/log.jsonl: cannot be written ({e.strerror}); free some space, then --resume")

# ---- checkpoints: LoRA and optimizer, as safetensors and JSON; never pickles, which run code when they are loaded ----

@dataclass
class Checkpoint:
    lora: dict # {diffusers' name: tensor}
    moments: dict # the optimizer's tensors: {"exp_avg.PARAMETER": tensor}
    state: dict # step, config, numbers and group: the optimizer's other state and settings

def read_checkpoint(path):
    """-> Checkpoint. InputError if any bit of it is not as it was saved."""
    lora, meta = read_tensors(path / LORA_FILE, "lora_adapter_metadata")
    moments, state = read_tensors(path / "optimizer.safetensors")
    # each file carries its own digest; that they are of one step, the folder's, is checked here
    if "config" not in state or {meta.get("train.step"), state.get("step")} != {number_of(path)}:
        raise InputError(f"{path}: its files do not belong together; it is damaged")
    return Checkpoint(lora, moments, state)

def find_checkpoint():
    """-> the newest whole Checkpoint, or None for a run that begins. A night's run is not lost over one flipped bit: a
    damaged checkpoint is passed over, with a warning."""
    saved = checkpoints(out_dir) if args.resume else []
    for path in reversed(saved):
        try:
            return read_checkpoint(path)
        except InputError as e:
            say(f"warning: {path} is damaged; trying the checkpoint before it ({e})")
    # a run that was killed before its first checkpoint begins again
    killed_early = (out_dir / "log.jsonl").exists() and not (out_dir / LORA_FILE).exists()
    if args.resume and (saved or not killed_early):
        raise InputError(f"--resume: no whole checkpoint in {out_dir}; give the right --out_dir, or leave out --resume")

def refuse_changes(old):
    """InputError names what differs between a checkpoint's config and ours. A flag that is newer than the checkpoint
    counts as having had its default."""
    changes = []
    for name, value in json.loads(json.dumps(config)).items(): # as the checkpoint's JSON has it: tuples are lists there
        before = old.get(name, parser.get_default(name))
        if before != value:
            changes.append(f"{name}: {before} -> {value}")
    if changes:
        raise InputError(f"--resume: {out_dir} was begun with other settings ({'; '.join(changes)}); give the old "
                         "ones, or start a new run")

def data_key(epoch):
    """A hash of what is trained: the samples' names, and their encoded files, which are named by their content."""
    contents = []
    for sample in epoch:
        contents.append([sample.name, [file.stem for file in cache.files_of(sample)]])
    return common.content_key(samples=contents)

def save_checkpoint(step, transformer, lora, optimizer, meta):
    """Writes a folder that appears whole, and deletes older ones beyond --keep."""
    tmp, path = out_dir / f".tmp-checkpoint-{step:06d}", out_dir / f"checkpoint-{step:06d}"
    shutil.rmtree(tmp, ignore_errors=True)
    predict.save_lora(tmp / LORA_FILE, transformer, dict(step=step, **meta))
    tensors, numbers = {}, {} # the optimizer's state, by what it is and the parameter's name
    for name, p in lora.items():
        for key, value in optimizer.state[p].items():
            kind = tensors if torch.is_tensor(value) else numbers
            kind[f"{key}.{name}"] = value
    # its settings, for those that change them as they go, as Prodigy does
    group = {key: value for key, value in optimizer.param_groups[0].items() if isinstance(value, (int, float))}
    state = dict(step=step, config=config, numbers=numbers, group=group)
    common.write_tensors(tmp / "optimizer.safetensors", tensors, state)
    # a rename is the moment at which the checkpoint exists: a kill before it leaves the older ones as they were
    shutil.rmtree(path, ignore_errors=True) # a damaged one of this step
    os.replace(tmp, path)
    common.sync_folder(out_dir)
    whole = [old for old in checkpoints(out_dir) if number_of(old) <= step] # --resume may have found later ones damaged
    for old in whole[:-args.keep]:
        shutil.rmtree(old)

def load_checkpoint(checkpoint, transformer, lora, optimizer):
    """Puts LoRA and optimizer back, bit for bit."""
    predict.load_weights(transformer, checkpoint.lora, out_dir)
    # {"exp_avg.PARAMETER": value} -> {"PARAMETER": {"exp_avg": value}}
    by_name = {name: {} for name in lora}
    for entry, value in {**checkpoint.moments, **checkpoint.state["numbers"]}.items():
        key, name = entry.split(".", 1)
        by_name[name][key] = value
    group = optimizer.state_dict()["param_groups"][0] | checkpoint.state["group"]
    # torch's optimizers number their parameters, in the order in which they got them
    optimizer.load_state_dict(dict(state=dict(enumerate(by_name.values())), param_groups=[group]))

# ---- model: frozen base, LoRA in fp32, optimizer ---------------------------------------------------------------------

def find_layers(transformer, names):
    """--lora_targets -> LoraConfig's target_modules and exclude_modules. InputError for a name that no layer has: peft
    is silent as long as any name fits."""
    # a layer is meant by the end of its name: net.2 is the second linear layer of both MLPs of each block
    linears = [name for name, m in transformer.named_modules() if isinstance(m, torch.nn.Linear)]
    attention = "to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj to_add_out".split()
    presets = {"attention": attention, "all-linear": attention + "img_mod.1 txt_mod.1 net.0.proj net.2".split()}
    targets = [end for name in names for end in presets.get(name, [name])]
    for end in targets:
        if not any(f".{name}".endswith(f".{end}") for name in linears):
            raise InputError(f"--lora_targets {end}: no linear layer of that name; there are "
                             f"{' '.join(presets['all-linear'])}, img_in, txt_in, proj_out")
    # the text stream of the last block is never read: a LoRA there would get no gradient
    last = len(transformer.transformer_blocks) - 1
    dead = rf"transformer_blocks\.{last}\.(attn\.add_q_proj|attn\.to_add_out|txt_mlp\..*)"
    return dict(target_modules=targets, exclude_modules=dead)

def make_model(folder):
    """-> (the frozen transformer with a LoRA on it, on the CPU; {name: parameter} of the LoRA: all that learns)."""
    transformer = predict.load_transformer(folder, args.dtype, weights=not args.plan)
    # where the LoRA goes, and how wide it is
    if pretrained_lora:
        lora_config = predict.lora_config(pretrained_lora)
    else:
        lora_config = find_layers(transformer, args.lora_targets)
        lora_config.update(r=args.lora_rank, lora_alpha=args.lora_alpha or args.lora_rank)
    # A random and B zero: the first step starts at the base model
    lora_config |= dict(lora_dropout=args.lora_dropout, init_lora_weights="gaussian") | lora_args
    warnings.filterwarnings("ignore", "You have passed exclude_modules") # where there is nothing to exclude
    torch.manual_seed(args.seed) # every process makes the same LoRA, so none has to be sent
    try:
        lora = predict.add_lora(transformer, **lora_config)
    except Exception as e: # whatever peft says of them
        raise InputError(f"--lora_args: peft refuses them ({first_words(e)}); see peft.LoraConfig")
    # peft would train these as well, and the file that we save would lack them
    if lora_args.get("target_parameters") or any(".lora_" not in name for name in lora):
        raise InputError("--lora_args: would train what a LoRA's file cannot hold; leave out bias, modules_to_save and "
                         "target_parameters")
    if pretrained_lora and not args.plan:
        predict.load_weights(transformer, predict.read_lora(pretrained_lora)[0], pretrained_lora)
    return transformer, lora

def recompute_blocks(transformer, samples):
    """Gradient checkpointing, as --gradient_checkpointing says, or else as the device's memory allows -> the number of
    blocks that the backward pass computes again."""
    # only dropout is random in a block: with it the second computation must repeat the first one's random numbers, and
    # to keep their state costs a copy from the device
    dropout = transformer.peft_config["default"].lora_dropout > 0
    recompute = partial(checkpoint_blocks, transformer, preserve_rng_state=dropout)
    # on a GPU some passes over the largest pack that can come find out how many blocks can be kept
    fit = common.find_extra("fit") if args.gradient_checkpointing is None else None
    if not (fit and fit.has_own_memory(args.device)):
        return recompute(args.gradient_checkpointing)
    return fit.keep_what_fits(transformer, fit.lengths_of(samples, Pick), Item, flow_loss, recompute, args, say)

def make_optimizer(parameters):
    optimizer_args = dict(lr=args.lr, weight_decay=args.weight_decay) | dict(args.optimizer_args)
    try:
        return optimizer_class(parameters, **optimizer_args)
    except Exception as e: # a foreign class can fail in any way
        raise InputError(f"--optimizer {args.optimizer}: {first_words(e)}; give a class and its arguments")

# ---- packs: which process computes which samples, in which forward passes --------------------------------------------
# The gradient of a sum is the sum of the gradients, so who computes which sample changes the time and nothing else.

def deal_packs(lengths):
    """Samples of these lengths, in tokens -> for each process its packs: lists of places in `lengths`, at most
    --max_tokens in each, one forward pass each. All processes compute the same. With --fsdp every process must run the
    same number of passes: one with fewer gets empty packs (load_pack)."""
    # a token of an n-token sample costs 24 dim^2 FLOPs in a block's linears, and 4 n dim in its attention
    cost = [n * (6 * transformer.inner_dim + n) for n in lengths]
    shares, work = [[] for _ in range(world_size)], [0] * world_size
    # the classic greedy schedule: longest first, each to the process that has least to do
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = work.index(min(work))
        shares[least].append(i)
        work[least] += cost[i]
    # each process packs its share without padding
    dealt = []
    for share in shares:
        dealt.append([])
        for pack in plan_packs([lengths[i] for i in share], args.max_tokens, args.batching == "padded"):
            dealt[-1].append([share[i] for i in pack])
    if args.fsdp:
        passes = max(map(len, dealt))
        dealt = [packs + [[]] * (passes - len(packs)) for packs in dealt]
    return dealt

def plan_step(n):
    """-> (the Picks of step n, this process's packs of them)."""
    picks = [pick(position) for position in range(n * args.batch_size, (n + 1) * args.batch_size)]
    return picks, deal_packs([p.tokens for p in picks])[rank]

def load_pack(picks, pack):
    """-> the Items of a pack. An empty one is an idle pass: the shortest sample, whose loss weighs nothing."""
    if pack:
        return [load_item(picks[place]) for place in pack]
    item = load_item(min(picks, key=lambda p: p.tokens))
    return [replace(item, weight=torch.zeros_like(item.weight))]

def sum_over_processes(parameters, *numbers):
    """Adds up the gradients of these parameters, in place, and these tensors of numbers, in one all-reduce -> a list of
    all the numbers' sums. By hand, and not by DDP: that wants the same number of backward passes from every process,
    and would add up after each."""
    for p in parameters: # a process without a pack has no gradients
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    # one tensor, as one large message costs less than hundreds of small ones
    grads = [p.grad for p in parameters]
    flat = torch.cat([parameters_to_vector(grads), *numbers])
    if world_size > 1:
        dist.all_reduce(flat)
    vector_to_parameters(flat, grads) # each gradient is a part of `flat` now
    return flat[-sum(map(len, numbers)):].tolist()

def clock():
    if args.device.startswith("cuda"):
        torch.cuda.synchronize() # kernels run later than they are called
    return time.perf_counter()

def step_line(record, left):
    """A step as a person reads it. record: what the log has of it; left: seconds until the end."""
    line = ("step {step}/{max_steps} | loss {loss:.4f} | lr {lr:.1e} | grad {grad_norm:.3f} | {seconds:.2f} s | "
            "{batch_size} img | {tokens:,} tok | {speed:.1f}k tok/s | {memory:.1f} GiB")
    line = line.format(**vars(args) | record, speed=record["tokens"] / record["seconds"] / 1000)
    if record["step"] % 10 == 0:
        line += f" | {timedelta(seconds=round(left))} left"
    if record["loss"] > 10:
        line += "\nexploded: predicting nothing has a loss of 2; lower --lr in a new run"
    return line

def too_large(step, picks, pack, recomputed):
    """The InputError of a pack that does not fit into the device's memory."""
    names = ", ".join(f"{picks[i].sample.name}: {picks[i].tokens:,}" for i in pack)
    return InputError(f"--max_tokens {args.max_tokens}: out of memory at step {step + 1} (tokens of {names}), with "
                      f"--gradient_checkpointing {recomputed}; lower the one, or raise the other, then --resume")

def diverged(step, picks, loss, grad_norm):
    """The InputError of a loss or a gradient that is no number."""
    names = ", ".join(p.sample.name for p in picks)
    return InputError(f"{out_dir}: loss {loss}, gradient norm {grad_norm} at step {step + 1} ({names}); check these "
                      "samples, and start a new run with a lower --lr (--pretrained_lora takes a checkpoint from "
                      "before the loss rose)")

# ---- validation: loss and pictures of samples that are not trained ---------------------------------------------------
# These functions also read what THE RUN has made: transformer, scheduler_config, encoders, val_samples, vae.

def validation_due(step):
    """Whether a validation follows after so many steps. After the last one it comes in any case."""
    every = args.sample_every or args.max_steps
    return bool(val_samples) and step > 0 and (step % every == 0 or step >= args.max_steps)

def validation_loss():
    """The training's loss over --val_data, at four noise levels each. The noise depends on a sample's place in
    --val_data and not on --seed, so runs with the same flags of loss and sizes can be compared."""
    # the middles of four equal parts of the noise levels
    picks = []
    for place, sample in enumerate(val_samples):
        for s in (0.125, 0.375, 0.625, 0.875):
            noise = generator("validation", place, s, seed=0)
            picks.append(Pick(sample, sample.encodings[0], sample.prompts[0], with_controls=True, preserve=False,
                              s=torch.tensor(s), noise_generator=noise))
    total = torch.zeros((), device=args.device)
    for pack in deal_packs([p.tokens for p in picks])[rank]:
        total += sum(flow_loss(transformer, list(map(to_device, load_pack(picks, pack)))))
    if world_size > 1:
        dist.all_reduce(total)
    return total.item() / len(picks)

def generate_pictures():
    """{place in val_samples: PIL image} of at most --val_pictures. All processes together generate them; this one
    returns its share."""
    # which of the packs are this process's
    share, decoder = slice(rank, None, world_size), vae
    # sharded, every process has to join every forward pass: all generate everything, and the first one decodes it
    if args.fsdp:
        share, decoder = slice(None), None if rank else vae
    # spread over all samples, as neighbours are often alike
    count = min(args.val_pictures, len(val_samples))
    places = [n * len(val_samples) // count for n in range(count)]
    sampling = predict.SAMPLING | (predict.TINY_SAMPLING if common.is_tiny(args.model) else {})
    jobs = [(val_samples[place], sampling, args.seed) for place in places]
    images = predict.generate_samples(transformer, decoder, scheduler_config, jobs, args.max_tokens, args.device,
                                      encoders, share)
    images = tqdm(images, desc="validation pictures", disable=rank > 0 or None, leave=False)
    return {places[n]: image for n, image in images}

@lru_cache # once, as the base does not change
def generate_base_pictures():
    with without_lora(transformer):
        return generate_pictures()

def picture_file(sample):
    return f"{sample.root}/{predict.picture_stem(sample)}.png"

def compare(place, base, picture, step):
    """Compares a validation sample's pictures, without and with the LoRA, with its target, and saves all in samples/
    -> (its place in val_samples; what the log tells of it, with the PSNRs of the input, the base, the LoRA, and the VAE
    alone, which is the best that can be had). Where the pictures are not on this machine, what the VAE makes of their
    latents stands in."""
    sample = val_samples[place]
    shapes, tensors = sample.encodings[0]["img_shapes"], cache.load_latents(sample, sample.encodings[0], encoders)
    latents = torch.cat([tensors["pixel_latent"], tensors["control_latent"]]).split([h * w for _, h, w in shapes])

    def by_vae(n):
        return predict.decode(vae, latents[n].to(args.device), [shapes[n]])
    target, *controls = [common.read_image(path) if Path(path).is_file() else by_vae(n)
                         for n, path in enumerate([sample.target, *sample.controls])]
    # compared at the size that was generated
    target, control = [image.resize(picture.size, Image.Resampling.LANCZOS) for image in (target, controls[0])]
    psnrs = [predict.psnr(image, target) for image in (control, base, picture, by_vae(0))]
    # samples/step_000200/DATASET/NAME.png, and beside the steps what they are compared with, which is saved once
    shown = {f"step_{step:06d}": picture, "base": base, "target": target, "control": control}
    shown |= {f"control_{n}": ImageOps.contain(image, picture.size) for n, image in enumerate(controls[1:], 1)}
    for name, image in shown.items():
        path = out_dir / "samples" / name / picture_file(sample)
        if image is picture or not path.exists():
            predict.save_png(image, path)
    return place, dict(file=picture_file(sample), prompt=sample.prompts[0], controls=len(sample.controls), psnr=psnrs)

def report(step, val_loss, rows, track):
    """Says and logs the loss and each folder's mean PSNRs; a contact sheet of each dataset goes to samples/. rows: of
    compare, in the order of val_samples."""
    table = f". mean PSNR to the target in dB:\n{'':20} pictures   input    base    LoRA  VAE alone"
    say(f"step {step}: validation loss {val_loss:.4f}{table if rows else ''}")
    # by folder of a dataset: one row of the table each
    groups, means = {}, {}
    for place, record in rows:
        folder = "/".join([val_samples[place].root, *Path(val_samples[place].name).parent.parts])
        groups.setdefault(folder, []).append(record["psnr"])
    for name, psnrs in groups.items():
        means[name] = dict(zip(("input", "base", "lora", "vae"), np.mean(psnrs, 0).tolist()))
        say("{:20} {:8} {input:7.1f} {base:7.1f} {lora:7.1f} {vae:7.1f}".format(name, len(psnrs), **means[name]))
    records = [record for _, record in rows]
    write_log(dict(step=step, val_loss=val_loss, psnr=means, pictures=records))
    # pictures in full are large: those of the newest 20 validations stay, and all contact sheets
    for old in sorted((out_dir / "samples").glob("step_*[0-9]/"))[:-20]:
        shutil.rmtree(old)
    sheets, sheet = {}, common.find_extra("sheet")
    if sheet and rows:
        sheets = sheet.validation_sheets(out_dir / "samples", step, records)
        say(f"{out_dir / 'samples'}/step_{step:06d}_*.png: control, instruction, base, LoRA, target")
    for name, image in sheets.items():
        predict.save_png(image, out_dir / "samples" / f"step_{step:06d}_{name}.png")
    if track:
        track(step, dict(val_loss=val_loss), sheets)

def validate(step, track):
    """Loss, pictures and PSNRs of --val_data: all processes compute them, and the first one reports."""
    say(f"step {step}: validation on {len(val_samples)} samples")
    # give torch's cached memory back: cuDNN allocates its own. (without a GPU this does nothing)
    torch.cuda.empty_cache()
    vae.to(args.vae_device)
    transformer.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"): # to compile for inference too would take longer
            val_loss, base_pictures = validation_loss(), generate_base_pictures()
            rows = [compare(place, base_pictures[place], picture, step)
                    for place, picture in generate_pictures().items()]
            rows = sorted(sum(common.gather_objects(rows), []))
            if rank == 0:
                report(step, val_loss, rows, track)
    except torch.OutOfMemoryError:
        if world_size > 1: # the others are waiting for this process's share
            raise InputError(f"--val_data: out of memory after step {step}; lower --max_tokens, then --resume")
        say(f"warning: no memory for the validation after step {step}; the training continues (--max_tokens)")
    finally:
        transformer.train()
        (vae.decoder if encoders else vae).to("cpu") # a training that encodes live needs the VAE's encoder
        if args.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats() # the log's `memory` is the training's

def next_commands(samples):
    """What a person may want to do with a finished run."""
    flags = ["--lora", str(out_dir)]
    for name in "quantize_text_encoder quantize transformer model".split(): # which predict.py needs, too
        if getattr(args, name) not in (None, "none"):
            flags = [f"--{name}", getattr(args, name), *flags]
    return (f"{out_dir / LORA_FILE}: trained for {args.max_steps} steps on {len(samples)} samples. next:\n"
            f"  python predict.py {shlex.join(flags)} --image CONTROL.png --prompt \"...\"\n"
            f"  python tools/page.py {shlex.quote(str(out_dir))}\n"
            f"ComfyUI: copy it to models/loras; diffusers: pipe.load_lora_weights({str(out_dir / LORA_FILE)!r})")

# ==== THE RUN =========================================================================================================

# Processes. torchrun starts several of this script, each with a rank of its own; alone it is rank 0 of 1.
rank, world_size = common.start_processes(args)

# The run folder, and the checkpoint to continue from. We look at both before anything slow begins: a flag that must not
# change is refused within seconds, and a finished run says so.
run_name = cache.run_name(args.model, args.data)
out_dir = find_folder(run_name)
checkpoint, step = find_checkpoint(), 0
if checkpoint:
    refuse_changes(checkpoint.state["config"])
    step = checkpoint.state["step"]
if step >= args.max_steps and (out_dir / "DONE").exists():
    say(f"{out_dir}: already done after {step} steps; a larger --max_steps continues it (constant learning rate only)")
    sys.exit(0)

# Two runs in one folder would spoil each other, so the first process locks it until it ends. Gathering its name waits
# until every process has looked into the folder, which nobody has written to so far. --plan writes nothing at all.
if not args.plan:
    if rank == 0:
        out_dir, lock = lock_folder(out_dir, run_name)
    out_dir = common.gather_objects(out_dir)[0]

# Data. make_cache encodes what the cache lacks, and its encoders have left the device when it returns: they and the
# transformer never share the memory. pipe is None if everything was encoded elsewhere (--data INDEX.json).
folder, pipe = cache.find_pipeline(args, weights=not args.plan)
transformer_folder = predict.find_transformer(args, weights=not args.plan)
samples, val_samples, geometry = cache.make_cache(pipe, folder, args, rank, world_size,
                                                  encode=args.use_cache and not args.plan)
# --repeats: an epoch has some samples several times
epoch = [sample for sample in samples for _ in range(sample.repeats)]

# With --no-use_cache nothing was encoded: VAE and text encoder stay loaded, and encode each sample when it is used.
encoders = None if args.use_cache or args.plan else pipe
if encoders:
    cache.load_encoder(encoders, "vae", args)
    cache.load_encoder(encoders, "text", args)

# Model: the frozen base in --dtype, and on it a LoRA in fp32, whose weights are all that learns. The schedule says how
# far the model shifts its noise levels for a picture of some size.
scheduler_config = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler").config
transformer, lora = make_model(transformer_folder)
# planning needs shapes and no numbers, so it ends here
if args.plan:
    load_extra("plan").print_plan(args, transformer, lora, folder, epoch, plan_step, Pick, Item, flow_loss, say)
    sys.exit(0)

# Onto the device, block by block: quantized, sharded or offloaded as the flags say.
predict.place_transformer(transformer, args.device, args.quantize, args.offload, args.fsdp)
transformer.train()
if args.compile: # a block, as all are alike; dynamic, as every batch has lengths of its own
    for block in transformer.transformer_blocks:
        block.compile(dynamic=True)

# What the backward pass needs is kept where the memory allows, and else computed a second time.
recomputed = recompute_blocks(transformer, samples)
optimizer = make_optimizer(lora.values())
say(f"gradient checkpointing: the backward pass computes {recomputed} of {len(transformer.transformer_blocks)} blocks "
    "again")
say(f"{args.model}: LoRA of {sum(p.numel() for p in lora.values()):,} parameters, {args.dtype} base on {args.device}, "
    f"{world_size} process(es)")

# What checkpoints and LoRA files tell about this run: predict.py generates at these sizes (at the first area, if there
# are several), and --resume compares the config.
geometry = geometry | dict(target_pixels=geometry["target_pixels"][0])
config.update(geometry=geometry, model=cache.fingerprint(transformer_folder / "transformer"), data=data_key(epoch))
versions = {name: version(name) for name in "torch diffusers transformers peft".split()}
meta = dict(geometry=geometry, model=args.model, config=config, versions=versions)

# Continue: compare once more, now that data and model are known, then put LoRA and optimizer back. Order, noise and
# learning rate follow from the step alone.
if args.resume:
    say(f"{out_dir}: continues after step {step}")
if checkpoint:
    refuse_changes(checkpoint.state["config"])
    load_checkpoint(checkpoint, transformer, lora, optimizer)
    checkpoint = None # or its tensors would stay in memory

# The first process writes the log, and to another place if one is wanted. The VAE decodes the validations' pictures.
track = vae = None
if rank == 0:
    begin_log(step, versions)
    if args.tracker != "none":
        track = load_extra("tracker").open_tracker(args.tracker, out_dir, step, config)
if val_samples:
    vae = encoders.vae if encoders else cache.load_part(diffusers.AutoencoderKLQwenImage, folder / "vae", args.dtype)

# ---- the loop --------------------------------------------------------------------------------------------------------

# A signal (Ctrl-C, SIGTERM, a closed terminal) is only noted, and ends the run after the step at hand. The stack stands
# for a `with`, which would indent all that follows.
signals, stop = contextlib.ExitStack(), False
signals_seen = signals.enter_context(common.signals_noted())

# One stream of planned steps with two readers: the loop, and a thread that is a pack ahead of it, which reads and
# checks the files of the next pack while this one computes. (Live encoders need the device, so they wait their turn.)
plans, plans_ahead = tee(map(plan_step, range(step, args.max_steps)))
packs_ahead = ((picks, pack) for picks, packs in plans_ahead for pack in packs)
loaded = common.run_ahead(lambda job: load_pack(*job), packs_ahead, most=0 if encoders else 1)

bar = tqdm(total=args.max_steps, initial=step, desc="training", unit=" steps", disable=rank > 0 or None, leave=False)
begun, first_step = time.monotonic(), step
while step < args.max_steps and not stop:
    # A validation comes before the next step, so that a run which was killed in one begins with it when it is resumed.
    if validation_due(step):
        validate(step, track)
    t0 = clock()

    # Forward and backward, pack by pack. The step's loss is the mean of its samples' losses, and the gradient of a mean
    # is the mean of the gradients: every pack adds its part to p.grad.
    picks, packs = next(plans)
    sample_losses = torch.zeros(len(picks), device=args.device)
    for pack in packs:
        # Only LoRA dropout is random here. Each pack has a seed of its own, so that a resumed run drops the same.
        torch.manual_seed(generator("dropout", step, rank, *pack[:1]).initial_seed())
        try:
            items = ask_base(transformer, list(map(to_device, next(loaded).result())))
            losses = flow_loss(transformer, items)
            (sum(losses) / len(picks)).backward()
        except torch.OutOfMemoryError:
            raise too_large(step, picks, pack, recomputed)
        for place, loss in zip(pack, losses):
            sample_losses[place] = loss.detach()

    # One all-reduce for all that the processes must agree on: gradients, losses, and whether one has seen a signal.
    *sample_losses, stop = sum_over_processes(
        lora.values(), sample_losses, torch.tensor([float(len(signals_seen))], device=args.device))
    loss = sum(sample_losses) / len(sample_losses)

    # Clip the gradient, and stop before a step that would ruin the weights: one NaN makes all of them NaN.
    grad_norm = torch.nn.utils.clip_grad_norm_(lora.values(), args.max_grad_norm).item()
    if not math.isfinite(grad_norm) or not math.isfinite(loss):
        raise diverged(step, picks, loss, grad_norm)

    # The optimizer's step, at this step's learning rate.
    lr = learning_rate(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    seconds = clock() - t0

    # Log and save; nothing below changes the training. A checkpoint precedes a validation, which may take minutes. The
    # time that is left counts the validations so far.
    saving = step == args.max_steps or validation_due(step) or stop or step % args.save_every == 0
    if rank == 0:
        record = dict(step=step, loss=loss, lr=lr, grad_norm=grad_norm, seconds=round(seconds, 4),
                      tokens=sum(p.tokens for p in picks), memory=round(common.memory_of(args.device), 3))
        record["samples"] = [f"{p.sample.root}/{p.sample.name}" for p in picks]
        record["timesteps"] = [round(p.s.item(), 4) for p in picks]
        record["losses"] = [round(x, 5) for x in sample_losses]
        write_log(record, sync=saving)
        if track:
            track(step, dict(loss=loss, lr=lr, grad_norm=grad_norm))
        say(step_line(record, (time.monotonic() - begun) / (step - first_step) * (args.max_steps - step)))
        bar.update()
        if saving:
            save_checkpoint(step, transformer, lora, optimizer, meta)
bar.close()

# ---- the end: --resume comes here again if it was interrupted --------------------------------------------------------

# The finished LoRA, a last validation, and then DONE, which says that both are there.
if stop:
    say(f"{out_dir}: stopped by a signal after step {step}; the same command with --resume continues it")
else:
    if rank == 0:
        predict.save_lora(out_dir / LORA_FILE, transformer, dict(step=step, **meta), fold=True)
    if val_samples:
        validate(step, track)
    if rank == 0:
        write_file(out_dir / "DONE", f"{step} steps\n".encode())
    say(next_commands(samples))
signals.close()
if dist.is_initialized():
    dist.destroy_process_group()
