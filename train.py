"""
Teach Qwen-Image-Edit (v1, 2509, 2511) an edit: before/after pictures of any sizes -> LoRA.

Reads a dataset (layout: cache.py) or the cache made of it; writes a run folder: log.jsonl, loss.png, samples/ (of
held-out pictures), checkpoint-000200/ and at the end pytorch_lora_weights.safetensors, which predict.py and stock
diffusers load.

$ python train.py                                                           # embedded default, CPU, minutes
$ python train.py --model Qwen/Qwen-Image-Edit-2509 --data photos --plan    # what it would take; trains nothing
$ python train.py --model Qwen/Qwen-Image-Edit-2509 --data photos           # one GPU
$ torchrun --nproc_per_node=8 train.py --model Qwen/Qwen-Image-Edit-2509 --data photos
$ python train.py --resume                                                  # go on with the newest run

A step takes --batch_size samples from the stream, whatever the number of processes; they are packed into forward passes
of at most --max_tokens tokens, without padding. Sample order, noise, timesteps and dropped captions are functions of
(seed, position in the stream): 1 and 8 processes see the same; a resumed run is the unbroken run (on a CPU to the bit).
SIGTERM, SIGUSR1 or Ctrl-C end a run after the step at hand, with a checkpoint and status 0; DONE marks a finished one.
Shape letters as in rope_patch.py.
"""
import argparse
import fcntl
import gc
import hashlib
import io
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import weakref
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import diffusers
import numpy as np
import peft
import torch
import torch.distributed as dist
import transformers
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_shift
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import cache
import predict
from cache import (ENCODER_PARTS, InputError, find_model, fingerprint, load_sample, number, read_tensors, sync_folder,
                   write_file, write_tensors)
from predict import LORA_FILE, load_transformer
from rope_patch import deal_to_ranks, even_packs, plan_packs, plan_padded, run_packed, run_padded

# ---- flags -----------------------------------------------------------------------------------------------------------

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
cache.add_model_flags(parser)
cache.add_data_flags(parser)
# data
parser.add_argument("--use_cache", action=argparse.BooleanOptionalAction, default=True,
                    help="encode once, then train with only the transformer on the device; --no-use_cache encodes each "
                         "batch anew and keeps all models there")
parser.add_argument("--caption_dropout_rate", type=number(float, 0, 1), default=0.0,
                    help="share of samples trained with the empty prompt")
parser.add_argument("--prompt_image_dropout_rate", type=number(float, 0, 1), default=0.0,
                    help="share of samples trained without their control pictures, in the latents and in the prompt, "
                         "as text-to-image; not with Qwen-Image-Edit v1")
parser.add_argument("--out_dir", help="run folder (default: out/<model>-<data>-001, next number for the next run)")
# LoRA
parser.add_argument("--lora_rank", type=number(int, 1), default=16,
                    help="width of the LoRA: more learns more, and costs memory")
parser.add_argument("--lora_alpha", type=number(float, 0),
                    help="the LoRA works at alpha / rank times its weights (default: the rank)")
parser.add_argument("--lora_dropout", type=number(float, 0, 1), default=0.0, help="share of the LoRA's inputs set to 0")
parser.add_argument("--lora_init", choices=["gaussian", "kaiming"], default="gaussian",
                    help="of lora_A; lora_B is zero")
parser.add_argument("--lora_targets", nargs="+", default=["to_q", "to_k", "to_v", "to_out.0"], metavar="NAME",
                    help="linear layers, by the end of their names; attention: all of its, of pictures and text; "
                         "all-linear: all of the blocks")
parser.add_argument("--rslora", action=argparse.BooleanOptionalAction, default=False,
                    help="scale by alpha / sqrt(rank), so that a large rank learns as fast as a small one")
parser.add_argument("--dora", action=argparse.BooleanOptionalAction, default=False,
                    help="learn direction and length of the weights apart: slower, better at small ranks")
parser.add_argument("--lora_format", choices=["diffusers", "comfyui"], default="diffusers",
                    help="comfyui: at the end also <run folder>_comfyui.safetensors")
parser.add_argument("--pretrained_lora", metavar="PATH",
                    help="start from this LoRA (file, folder, or user/repo of the hub): rank, alpha and layers are its")
parser.add_argument("--base_lora", metavar="PATH",
                    help="a LoRA that stays as it is under the trained one, such as Lightning's; sample with both")
parser.add_argument("--base_lora_scale", type=number(float, -10, 10), default=1.0, help="its strength")
# step
parser.add_argument("--max_steps", type=number(int, 1), default=2000, help="optimizer steps")
parser.add_argument("--batch_size", type=number(int, 1), default=4,
                    help="samples per optimizer step, over all processes")
parser.add_argument("--max_tokens", type=number(int, 1), default=16_384,
                    help="image + text tokens per forward pass; lower this first if you run out of memory")
parser.add_argument("--batching", choices=["packed", "padded"], default="packed", help="padded is the slow reference")
parser.add_argument("--optimizer", choices=["adamw", "adamw8bit", "prodigy"], default="adamw",
                    help="adamw8bit: moments of a quarter the memory (pip install bitsandbytes); prodigy finds the "
                         "learning rate itself, and takes twice the memory (pip install prodigyopt)")
parser.add_argument("--lr", type=number(float, 0), default=1e-4,
                    help="learning rate; lower it if the loss jumps; of prodigy a factor, 1 if it is not given")
parser.add_argument("--lr_scheduler", choices=["constant", "cosine", "linear"], default="constant",
                    help="after the warm-up")
parser.add_argument("--warmup_steps", type=number(int, 0), default=0,
                    help="steps over which the learning rate rises from 0")
parser.add_argument("--weight_decay", type=number(float, 0), default=0.01, help="pull of the LoRA's weights to 0")
parser.add_argument("--ema_decay", type=number(float, 0, 1), default=0.0,
                    help="above 0, such as 0.99: the LoRA that is drawn, and written at the end, is a running mean "
                         "over about 1 / (1 - decay) steps, less noisy than the last one's, which is then "
                         f"{LORA_FILE.replace('.', '_raw.')}; checkpoints have the latter. 0: off")
parser.add_argument("--max_grad_norm", type=number(float, 1e-12), default=1.0,
                    help="a longer gradient is cut to this length")
# loss
parser.add_argument("--timestep_sampling", choices=["uniform", "logit_normal", "qwen_shift"], default="uniform",
                    help="qwen_shift: logit-normal, shifted by the picture's size as in inference")
parser.add_argument("--loss_norm", choices=["sample", "token"], default="sample",
                    help="mean per sample, then over samples; or mean over all tokens: large pictures weigh more")
parser.add_argument("--mask_foreground_weight", type=number(float, 0), default=2.0,
                    help="of the edited region, where there is a mask")
parser.add_argument("--mask_background_weight", type=number(float, 0), default=1.0,
                    help="of the rest of that picture")
# memory
parser.add_argument("--gradient_checkpointing", type=number(int, 0), metavar="BLOCKS",
                    help="blocks computed again in the backward pass: fewer is faster, more saves memory (default: "
                         "all; on a GPU the first step says if fewer would do)")
parser.add_argument("--fsdp", action="store_true",
                    help="under torchrun each process holds its part of the frozen blocks, and of those at work and "
                         "next all: the base takes about its memory / processes")
predict.add_memory_flags(parser)
parser.add_argument("--compile", action="store_true",
                    help="torch.compile the blocks: minutes at the start, then faster; needs a C++ compiler")
# run
parser.add_argument("--val_data", nargs="*", metavar="DATA",
                    help="datasets that are not trained on: drawn and measured at the end, without and with the LoRA "
                         "(default: none; the toy dataset has its own)")
parser.add_argument("--sample_every", type=number(int, 0), default=0,
                    help="steps between looks at --val_data: its loss goes into the log as val_loss, its pictures into "
                         "samples/; raise it if drawing takes long; 0: only at the end")
parser.add_argument("--save_every", type=number(int, 1), default=200, help="steps between checkpoints")
parser.add_argument("--keep", type=number(int, 1), default=2, help="newest checkpoints that stay on disk")
parser.add_argument("--tracker", choices=["none", "tensorboard", "wandb"], default="none",
                    help="log losses, learning rate, gradient norm and pictures there too (pip install its name): "
                         "tensorboard --logdir RUN_FOLDER; wandb: WANDB_MODE=offline needs no network")
parser.add_argument("--plan", action="store_true",
                    help="only say what this training would take: tokens, steps, memory with these and other flags; "
                         "needs no weights")
parser.add_argument("--resume", action="store_true",
                    help="go on with --out_dir, or with the newest run of this model and data")
args = cache.parse_args(parser, dict( # what differs with --model tiny: native sizes, and a minute on two CPU cores
    **cache.TINY, max_steps=400, batch_size=8, max_tokens=4096, lr=4e-3, lr_scheduler="linear", warmup_steps=10,
    timestep_sampling="qwen_shift", gradient_checkpointing=0, lora_targets=[
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "net.0.proj", "net.2", "proj_out",
        "img_in"]))
if args.val_data is None:
    args.val_data = [str(Path(args.data[0]).with_name(name)) for name in ("val", "known")] if (
        args.data == cache.TINY["data"]) else []
args.data = None if args.data in ([""], ["none"]) else args.data
if not args.data and not (args.cache_dir and args.use_cache):
    parser.error("argument --data: missing; give a dataset, or --data none and a --cache_dir that was made elsewhere")
if args.dtype == "float16":
    parser.error("argument --dtype: gradients would vanish in float16, as losses are not scaled here; take bfloat16")
given = {a.split("=")[0].replace("--no-", "--") for a in sys.argv}
lora_config = dict(r=args.lora_rank, lora_alpha=args.lora_rank if args.lora_alpha is None else args.lora_alpha,
                   use_rslora=args.rslora, use_dora=args.dora)
if args.pretrained_lora: # what it is, no flag can change
    found = predict.lora_config(args.pretrained_lora)
    for flag, name in (("--lora_rank", "r"), ("--lora_alpha", "lora_alpha"), ("--rslora", "use_rslora"),
                       ("--dora", "use_dora"), ("--lora_targets", None), ("--lora_init", None)):
        if flag in given and (name is None or found.get(name, False) != lora_config[name]):
            parser.error(f"argument {flag}: is another in --pretrained_lora, or follows from it; leave it out")
    lora_config.update(found)
    args.lora_targets = []
args.lora_rank, args.lora_alpha = lora_config["r"], lora_config["lora_alpha"]
args.rslora, args.dora = lora_config["use_rslora"], lora_config["use_dora"]
if args.base_lora:
    predict.read_lora(args.base_lora)
if args.dora and args.quantize != "none":
    parser.error("argument --dora: needs the norms of a base in full precision; leave out --quantize")
if args.fsdp and int(os.environ.get("WORLD_SIZE", 1)) == 1:
    parser.error("argument --fsdp: there is one process only; start it with torchrun --nproc_per_node=N")
if args.dora and args.lora_format == "comfyui":
    parser.error("argument --lora_format: ComfyUI divides a DoRA by another norm than peft; give diffusers")
packages = dict(adamw8bit="bitsandbytes", prodigy="prodigyopt", tensorboard="tensorboard", wandb="wandb")
for flag, value in (("--optimizer", args.optimizer), ("--tracker", args.tracker)):
    if value in packages and not find_spec(packages[value]):
        parser.error(f"argument {flag}: {value} needs a package that is not here; pip install {packages[value]}")
if args.optimizer == "prodigy" and "--lr" not in given:
    args.lr = 1.0
if args.sample_every and not args.val_data:
    parser.error("argument --sample_every: there is nothing to look at; give --val_data")
if args.val_data and not args.data:
    parser.error("argument --val_data: needs the encoders, which --data none does without; give --data too")
for path in args.val_data:
    if not Path(path).is_dir():
        parser.error(f"argument --val_data: {path} is no folder; give a dataset's")
dtype = getattr(torch, args.dtype) # of the frozen base; LoRA weights, their gradients and the optimizer are fp32

# ---- ranks -----------------------------------------------------------------------------------------------------------

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world_size > 1: # no DDP wrapper: the only traffic is one all-reduce of the LoRA gradients a step
    dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo", timeout=timedelta(days=7))
master = rank == 0

def say(line):
    if master:
        tqdm.write(line)

# ---- run folder ------------------------------------------------------------------------------------------------------

run_name = cache.run_name(args.model, args.data or [args.cache_dir])
runs = {int(m[1]): p for p in Path("out").glob("*") if (m := re.fullmatch(re.escape(run_name) + r"-(\d+)", p.name))
        and (p / "log.jsonl").exists()} # others never began
newest = max(runs, default=0)
out_dir = Path(args.out_dir or (runs[newest] if args.resume and runs else f"out/{run_name}-{newest + 1:03d}"))
log = out_dir / "log.jsonl"
if out_dir.exists() and not out_dir.is_dir():
    raise InputError(f"--out_dir {out_dir}: is a file; give a folder")
if out_dir.is_dir() and not (args.resume or args.plan or all(p.name.startswith(".") for p in out_dir.iterdir())):
    raise InputError(f"--out_dir {out_dir}: is not empty; go on with --resume, or give another folder")
by_step = lambda path: int(path.name.split("-")[-1])
checkpoints = sorted(out_dir.glob("checkpoint-*"), key=by_step, reverse=True) if args.resume else []
if args.resume and not checkpoints and not log.exists(): # (a run may be killed before its first checkpoint)
    raise InputError(f"--resume: no checkpoint in {out_dir}; start without --resume, or give the right --out_dir")
if world_size > 1:
    dist.barrier() # all have looked at the folder before one writes to it
if master and not args.plan:
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = open(out_dir / ".lock", "w")
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB) # not flock: children, who may outlive us, would hold that too
    except BlockingIOError:
        raise InputError(f"--out_dir {out_dir}: another run is at work in it; wait, or give another folder") from None
    except OSError as e:
        raise InputError(f"--out_dir {out_dir}: cannot be written ({e.strerror}); give another folder") from None

config = {k: v for k, v in vars(args).items() if k not in ( # what decides the numbers: a resumed run must not change it
    "model", "data", "repeats", "reg_data", "cache_dir", "out_dir", "device", "vae_encoder_device",
    "text_encoder_device", "use_cache", "skip_bad", "max_tokens", "gradient_checkpointing", "fsdp", "offload",
    "compile", "val_data", "sample_every", "save_every", "keep", "tracker", "resume", "plan", "lora_format")}
for name in ("pretrained_lora", "base_lora"): # wherever it lies
    config[name] = config[name] and predict.lora_digest(config[name])
config["max_steps"] = None if args.lr_scheduler == "constant" else args.max_steps # a constant rate can go on for ever

def read_checkpoint(path):
    """-> LoRA, optimizer moments, and a dict of step and config. InputError if any bit of it is not as it was saved."""
    weights, meta = read_tensors(path / LORA_FILE, "lora_adapter_metadata")
    moments, state = read_tensors(path / "optimizer.safetensors")
    if not meta.get("train.step") == state.get("step") == by_step(path) or "config" not in state:
        raise InputError(f"{path}: its files do not belong together; it is damaged")
    return weights, moments, state

def refuse_other_settings(settings):
    begun = {k: checkpoint[2]["config"].get(k, parser.get_default(k)) for k in settings} # older runs lack newer flags
    differ = [f"{k}: {begun[k]} -> {v}" for k, v in settings.items() if begun[k] != v]
    if differ:
        raise InputError(f"--resume: {out_dir} was begun with other settings ({'; '.join(differ)}); give the old ones, "
                         "or start a new run")

step, checkpoint = 0, None
for path in checkpoints:
    try:
        checkpoint = read_checkpoint(path)
        break
    except InputError as e:
        say(f"{str(e).removeprefix('error: ').rsplit('; ', 1)[0]}; going back to the checkpoint before")
if checkpoints and not checkpoint:
    raise InputError(f"--resume: no checkpoint in {out_dir} is whole; start a new run")
if checkpoint:
    # before anything slow. what the data decide comes later; without --data that is the geometry too
    refuse_other_settings({k: v for k, v in config.items() if args.data or k not in (
        "target_pixels", "control_pixels", "upscale")})
    step = checkpoint[2]["step"]
    if step >= args.max_steps and (out_dir / "DONE").exists():
        say(f"{out_dir}: already done, {step} steps; a larger --max_steps would go on (constant learning rate only)")
        sys.exit(0)
if args.resume:
    say(f"{out_dir}: going on after step {step}")

# ---- data ------------------------------------------------------------------------------------------------------------

drop_captions, drop_pictures = args.caption_dropout_rate > 0, args.prompt_image_dropout_rate > 0
folder = find_model(args.model, ["transformer", "scheduler"] + (ENCODER_PARTS if args.data else []), not args.plan)
pipe = cache.load_pipeline(folder) if args.data else None
cache_dir = Path(args.cache_dir or Path("cache", run_name))
problems = []
if args.data: # parquet files become folders
    args.data = cache.export_parquet(args.data, cache_dir, rank, world_size)
    args.reg_data = cache.export_parquet(args.reg_data, cache_dir, rank, world_size)
if not args.data: # a cache that was made elsewhere
    index = cache.load_index(cache_dir)
    pipeline = json.loads((folder / "model_index.json").read_text())["_class_name"]
    for part, here in [*cache.model_fingerprints(folder).items(), ("pipeline", pipeline)]:
        made = {**(index["models"] or {}), "pipeline": index.get("pipeline")}.get(part)
        if made and made.split("-")[0] != here: # (its encoder may have been quantised)
            raise InputError(f"{cache_dir}: was encoded with another model than {args.model} ({part}); run cache.py "
                             "with this one")
    for name in ("target_pixels", "control_pixels", "upscale"): # not this call's flags but those that made the cache
        setattr(args, name, index.get(name, getattr(args, name)))
    if drop_captions and not all(s["empty_text"] for s in index["samples"]):
        raise InputError(f"{cache_dir}: no empty prompt for --caption_dropout_rate; run cache.py --empty_prompt")
    if drop_pictures and not all(len(s.get("plain_text", [])) >= len(s["text"]) + drop_captions
                                 for s in index["samples"]):
        raise InputError(f"{cache_dir}: no prompts without pictures for --prompt_image_dropout_rate; run cache.py "
                         "--plain_prompt" + " --empty_prompt" * drop_captions)
elif args.use_cache and not args.plan:
    index, problems = cache.make_cache(pipe, folder, args, cache_dir, drop_captions, rank, world_size,
                                       plain_prompt=drop_pictures)
else:
    index, problems = cache.build_index(pipe, folder, args, drop_captions, not master, drop_pictures)
    if master:
        cache.report(index, problems)
    if not args.plan:
        cache.load_encoders(pipe, folder, args.dtype, args.vae_encoder_device, args.text_encoder_device,
                            args.quantize_text_encoder)
if problems and not args.skip_bad: # they have been reported
    sys.exit(1)
if not index["samples"]:
    raise InputError(f"{' '.join(args.data)}: no usable sample; mend those named above")
samples = [s for s in index["samples"] for _ in range(s.get("repeats", 1))]

# held-out pictures: encoded now, while the encoders are here
geometry = dict(target_pixels=args.target_pixels[0], control_pixels=args.control_pixels, upscale=args.upscale)
held_out = []
for path in args.val_data if (master or args.fsdp) and not args.plan else []:
    jobs, wrong = predict.read_jobs(path, {**predict.SAMPLING, **geometry, "seed": args.seed,
                                           **(predict.TINY_SAMPLING if args.model == "tiny" else {})})
    if wrong:
        sys.exit("\n".join(wrong))
    for job in jobs: # a dataset with folders is measured folder by folder, and drawn on one sheet
        job.sheet = Path(path).name
        job.group = "/".join([job.sheet, *Path(job.name).parent.parts])
        predict.plan_job(pipe, job)
    held_out += jobs
if held_out:
    cache.load_encoders(pipe, folder, args.dtype, args.vae_encoder_device, args.text_encoder_device,
                        args.quantize_text_encoder)
for job in tqdm(held_out, desc="encoding held-out pictures", disable=None, leave=False):
    predict.encode_job(pipe, job, args.device)
    job.target = cache.read_image(job.size_from).resize((job.width, job.height), Image.Resampling.LANCZOS)
    job.target_latent = cache.encode_image(pipe, job.target, job.target.size)
if args.use_cache and pipe is not None: # only the transformer stays on the device
    pipe.text_encoder = None
    if pipe.vae is not None:
        pipe.vae.to("cpu")
gc.collect()
if args.device.startswith("cuda"): # the log shows the training's peak, not the encoding's
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

# ---- model -----------------------------------------------------------------------------------------------------------

transformer = load_transformer(folder, args.dtype, weights=not args.plan)
linears = [name for name, m in transformer.named_modules() if isinstance(m, torch.nn.Linear)]
presets = {"attention": ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]}
presets["all-linear"] = [*presets["attention"], "img_mod.1", "txt_mod.1", "net.0.proj", "net.2"]
targets = [name for target in args.lora_targets for name in presets.get(target, [target])]
for target in targets: # peft is silent as long as any of the names fits
    if not any(name == target or name.endswith("." + target) for name in linears):
        known = sorted({re.sub(r".*\d+\.(attn\.)?", "", n) for n in linears if "blocks" in n})
        raise InputError(f"--lora_targets {target}: no linear layer of that name; there are {' '.join(known)}")
# the text stream of the last block is never read: a LoRA there would get no gradient
last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}."
dead = [n for n in linears if n.startswith((last + "attn.add_q_proj", last + "attn.to_add_out", last + "txt_mlp"))]
torch.manual_seed(args.seed)
lora_config.update(lora_dropout=args.lora_dropout,
                   init_lora_weights="gaussian" if args.lora_init == "gaussian" else True)
if not args.pretrained_lora:
    lora_config.update(target_modules=targets, exclude_modules=[n for n in dead if n.endswith(tuple(targets))] or None)
lora = predict.add_lora(transformer, **lora_config)
base = dict(base=args.base_lora_scale) if args.base_lora else {}

def activate_loras():
    """The trained LoRA over the frozen one, if there is one."""
    transformer.set_adapters(["default", *base], [1.0, *base.values()])
    for name, p in transformer.named_parameters(): # peft lets all that are active learn
        p.requires_grad_(name in lora)

if not args.plan:
    if args.pretrained_lora:
        predict.load_weights(transformer, args.pretrained_lora)
    if base:
        predict.load_lora(transformer, args.base_lora, name="base")
        activate_loras()
    predict.place_transformer(transformer, args.device, args.quantize, args.offload, args.fsdp)
transformer.train()
if args.gradient_checkpointing != 0:
    transformer.enable_gradient_checkpointing()
    transformer.gradient_checkpointing_blocks = args.gradient_checkpointing
if args.compile: # block by block, as all are alike; dynamic, as every batch has lengths of its own
    for block in transformer.transformer_blocks:
        block.compile(dynamic=True)
ema = {name: p.detach().clone() for name, p in lora.items()} if args.ema_decay else {}
if args.optimizer == "adamw":
    optimizer = torch.optim.AdamW(lora.values(), lr=args.lr, weight_decay=args.weight_decay)
elif args.optimizer == "adamw8bit":
    import bitsandbytes
    optimizer = bitsandbytes.optim.AdamW8bit(lora.values(), lr=args.lr, weight_decay=args.weight_decay)
else: # with what its authors advise for diffusion models
    import prodigyopt
    optimizer = prodigyopt.Prodigy(lora.values(), lr=args.lr, weight_decay=args.weight_decay, use_bias_correction=True,
                                   safeguard_warmup=True)
copies = 3 + 2 * (args.optimizer == "prodigy") + bool(ema) # of the LoRA in fp32: itself, moments, ...
say(f"{args.model}: LoRA on {sum('.lora_A.' in n for n in lora)} layers, "
    f"{sum(p.numel() for p in lora.values()):,} parameters, "
    f"{args.dtype} base on {args.device}, {world_size} process{'es' if world_size > 1 else ''}")

# ---- the stream of samples: functions of (seed, position), of nothing else -------------------------------------------

def generator(*what, seed=args.seed):
    # by hash, because neighbouring seeds must not give related streams; 32 bits are all that a CPU generator uses
    return torch.Generator().manual_seed(int(hashlib.sha256(repr((seed, *what)).encode()).hexdigest()[:8], 16))

@lru_cache(maxsize=2)
def epoch_order(epoch):
    return torch.randperm(len(samples), generator=generator("order", epoch)).tolist()

def sample_at(position):
    epoch, i = divmod(position, len(samples))
    return samples[epoch_order(epoch)[i]]

def draw(position):
    """-> (sample, scale, text): one of its captions, or the empty one if that is dropped; the target alone and a text
    without pictures if these are."""
    sample, g = sample_at(position), generator("draw", position)
    scale = sample["scales"][torch.randint(len(sample["scales"]), (), generator=g)]
    dropped = torch.rand((), generator=g).item() < args.caption_dropout_rate
    which = torch.randint(len(sample["text"]), (), generator=generator("wording", position))
    if drop_pictures and torch.rand((), generator=generator("pictures", position)) < args.prompt_image_dropout_rate:
        return sample, {**scale, "img_shapes": scale["img_shapes"][:1]}, sample["plain_text"][-1 if dropped else which]
    return sample, scale, sample["empty_text"] if dropped else sample["text"][which]

def tokens_of(sample, scale, text):
    return sum(h * w for _, h, w in scale["img_shapes"]) + text["tokens"]

def draw_noise(position, img_len, channels):
    """-> timestep s in (0, 1) and noise (I_0, C), fp32."""
    g = generator("noise", position)
    s = torch.rand((), generator=g) if args.timestep_sampling == "uniform" else torch.randn((), generator=g).sigmoid()
    if args.timestep_sampling == "qwen_shift":
        mu = calculate_shift(img_len, *[shift_config[k] for k in (
            "base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")])
        s = math.exp(mu) / (math.exp(mu) + 1 / s - 1)
    return s, torch.randn(img_len, channels, generator=g)

shift_config = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler").config

def learning_rate(step):
    """Of the step that takes the run from `step` to `step` + 1."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.lr * dict(constant=1.0, linear=1 - done, cosine=0.5 + 0.5 * math.cos(math.pi * done))[args.lr_scheduler]

# ---- loss ------------------------------------------------------------------------------------------------------------

def load_batch(positions):
    """Everything that the forward pass over these positions needs, on the device: lists with one entry a sample."""
    entries = []
    for p in positions:
        sample, scale, text = draw(p)
        empty = text is sample["empty_text"] or text.get("prompt") == ""
        if args.use_cache:
            t = load_sample(cache_dir, sample, scale, text)
        else:
            t = cache.encode_latents(pipe, sample, scale) | cache.encode_text(pipe, sample, text)
        x0 = t["pixel_latent"].to(args.device, torch.float32)
        weight = torch.ones(len(x0), device=args.device)
        if "edit_mask" in t:
            mask = t["edit_mask"].to(args.device)
            weight = args.mask_foreground_weight * mask + args.mask_background_weight * (1 - mask)
        shapes = [tuple(shape) for shape in scale["img_shapes"]]
        embed = t["empty_prompt_embed" if empty else "prompt_embed"]
        controls = t["control_latent"][:sum(h * w for _, h, w in shapes[1:])] # none if they are dropped
        entries.append((x0, *draw_noise(p, *x0.shape), controls, embed, shapes, weight))
    return make_batch(entries)

def make_batch(entries):
    """[(target (I_0, C), timestep, noise (I_0, C), controls, prompt, img_shapes, weights (I_0,))] -> load_batch's."""
    batch = dict(latents=[], prompt_embeds=[], timesteps=[], img_shapes=[], targets=[], weights=[])
    for x0, s, noise, controls, prompt, shapes, weight in entries:
        noise = noise.to(args.device)
        # flow matching: data at s = 0, noise at s = 1, velocity noise - data
        noisy = ((1 - s) * x0 + s * noise).to(dtype)
        batch["latents"].append(torch.cat([noisy, controls.to(args.device, dtype)]))
        batch["prompt_embeds"].append(prompt.to(args.device, dtype))
        batch["timesteps"].append(s)
        batch["img_shapes"].append(shapes)
        batch["targets"].append(noise - x0)
        batch["weights"].append(weight)
    return batch

def batch_loss(batch, transformer=transformer):
    """-> (numerator with gradient, denominator): the step's loss is the quotient of their sums over all its batches and
    processes. Per sample a mean weighted by the edit mask, so that an all-white mask changes nothing; those means go
    into batch["losses"]."""
    run = run_packed if args.batching == "packed" else run_padded
    preds = run(transformer, batch["latents"], batch["prompt_embeds"], torch.stack(batch["timesteps"]).to(
        batch["latents"][0].device), batch["img_shapes"])
    top, bottom, batch["losses"] = 0.0, 0.0, []
    for pred, target, weight in zip(preds, batch["targets"], batch["weights"]):
        per_token = (pred[:len(target)].float() - target).square().mean(dim=-1)
        # fp32: bf16 cannot count to 257. clamped: a mask may be black all over, and weigh nothing
        total, count = (per_token * weight).sum(), weight.sum().clamp_min(1e-12)
        batch["losses"].append((total / count).detach())
        top, bottom = (top + total / count, bottom + 1) if args.loss_norm == "sample" else (top + total, bottom + count)
    return top, bottom

# ---- memory ----------------------------------------------------------------------------------------------------------

class LiveBytes(TorchDispatchMode):
    """Inside `with`: the bytes of all tensors made there that are alive (`now`), and their greatest number (`peak`)."""

    def __init__(self, model):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet(p.untyped_storage() for p in model.parameters())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and (storage := tensor.untyped_storage()) not in self.known:
                self.known.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return out

    def add(self, n):
        self.now += n
        self.peak = max(self.peak, self.now)

def step_bytes(model, pack, checkpointed):
    """Peak bytes of a forward and backward pass over `pack`, a list of (img_shapes, text tokens), beside the weights:
    the training's own code on fake tensors, which have shapes and no memory. model: load_transformer's without weights,
    with a LoRA."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    fake = torch.empty(p.shape, dtype=p.dtype)
                    module._parameters[name] = torch.nn.Parameter(fake, p.requires_grad)
        model.train().enable_gradient_checkpointing()
        model.gradient_checkpointing_blocks = checkpointed
        with LiveBytes(model) as live:
            images = [sum(h * w for _, h, w in shapes) for shapes, _ in pack]
            targets = [shapes[0][1] * shapes[0][2] for shapes, _ in pack]
            top, _ = batch_loss(dict(
                latents=[torch.empty(n, 64, dtype=dtype) for n in images],
                prompt_embeds=[torch.empty(n, model.config.joint_attention_dim, dtype=dtype) for _, n in pack],
                timesteps=[torch.empty(()) for _ in pack], img_shapes=[shapes for shapes, _ in pack],
                targets=[torch.empty(n, 64) for n in targets], weights=[torch.empty(n) for n in targets]), model)
            top.backward()
        return live.peak

def sizes_of(positions):
    """-> [(img_shapes, text tokens)], as step_bytes takes them."""
    return [([tuple(shape) for shape in scale["img_shapes"]], text["tokens"])
            for _, scale, text in map(draw, positions)]

def advise_on_memory(positions):
    """Says after the first step, over these positions, if fewer blocks need be computed again in the backward pass."""
    model, total = load_transformer(folder, args.dtype, weights=False), len(transformer.transformer_blocks)
    predict.add_lora(model, **lora_config)
    del model.transformer_blocks[3:] # three show what one takes
    blocks = total if args.gradient_checkpointing is None else min(total, args.gradient_checkpointing)
    pack = sizes_of(positions)
    tokens = sum(h * w for shapes, _ in pack for _, h, w in shapes) + sum(n for _, n in pack)
    growth = max(1, args.max_tokens / tokens)
    recomputed, kept = [step_bytes(model, pack, n) for n in (3, 1)]
    takes = growth * (kept - recomputed) # one block's: the last one keeps all it has in any case
    if args.device.startswith("cuda"):
        recomputed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    free = predict.free_bytes(args.device) - growth * recomputed
    fit = max(0, blocks - int(max(0, 0.9 * free / takes)))
    if fit < blocks:
        say(f"memory: about {free / 2**30:.1f} GiB stay free; a block that is not recomputed takes up to "
            f"{takes / 2**30:.2f}: --gradient_checkpointing {fit} should fit, and is faster")

def print_plan():
    """What the first 50 steps and their heaviest forward pass would take, with these and with other flags."""
    steps, plan = min(args.max_steps, 50), plan_packs if args.batching == "packed" else plan_padded
    lengths, packs, padded = [], [], 0 # tokens; those of each forward pass of each process; tokens with padding
    heaviest, most = [], 0
    for i in range(steps):
        at = range(i * args.batch_size, (i + 1) * args.batch_size)
        step_lengths = [tokens_of(*draw(p)) for p in at]
        lengths += step_lengths
        for batch in plan_padded(step_lengths, args.max_tokens):
            padded += len(batch) * step_lengths[batch[0]]
        for share in deal_to_ranks(step_lengths, transformer.inner_dim, world_size):
            for pack in plan([step_lengths[j] for j in share], args.max_tokens):
                tokens = [step_lengths[share[j]] for j in pack]
                packs.append(sum(tokens) if plan is plan_packs else len(tokens) * max(tokens))
                if packs[-1] > most:
                    most, heaviest = packs[-1], [at[share[j]] for j in pack]
    lora_bytes, GiB = 4 * sum(p.numel() for p in lora.values()), 2**30
    ordered = sorted(lengths)
    say(f"tokens a sample: {ordered[0]:,} to {ordered[-1]:,}, median {ordered[len(ordered) // 2]:,}; padding would "
        f"compute {padded / sum(lengths):.2f} times as many")
    say(f"{args.max_steps} steps of {args.batch_size} samples, {args.max_steps * args.batch_size / len(samples):.1f} "
        f"epochs; {len(packs) / steps / world_size:.1f} forward passes a step and process, the heaviest (of {steps} "
        f"steps) of {len(heaviest)} samples and {most:,} tokens (--max_tokens {args.max_tokens:,})")
    say(f"parameters: {sum(p.numel() for p in transformer.parameters()):,}, of which {lora_bytes // 4:,} in the LoRA")
    encoders = [cache.model_bytes(model, quantize) for model, quantize in cache.empty_encoders(folder, args)
                ] if pipe is not None else [0, 0]
    say(f"encoders, in GiB: VAE {encoders[0] / GiB:.1f}, text {encoders[1] / GiB:.1f}; "
        + ("one after the other, before the training" if args.use_cache else "all the time, so in `base`"))
    say("\nexpected memory of a process, in GiB. an estimate; 1 GiB for CUDA and fragmentation is in `card`\n"
        f"{'base':>7} {'LoRA':>7} {'step':>7} {'in all':>7} {'host':>7}  card  flags")
    blocks, processes = len(transformer.transformer_blocks), world_size if args.fsdp else 1
    checkpointed = blocks if args.gradient_checkpointing is None else min(blocks, args.gradient_checkpointing)
    given = checkpointed, args.quantize, min(args.offload, blocks)
    others = [(0, "none", 0), (blocks, "none", 0), (blocks, "int8", 0), (blocks, "nf4", 0),
              (blocks, "none", blocks // 2), (blocks, "none", blocks), (blocks, "int8", blocks)]
    peaks = {n: step_bytes(transformer, sizes_of(heaviest), n) for n in {checkpointed, 0, blocks}}
    for row in dict.fromkeys([given, *others]):
        checkpointed, quantize, offload = row
        base, host = predict.transformer_bytes(transformer, quantize, offload, processes)
        base += 0 if args.use_cache else sum(encoders)
        # then weights and moments; then activations and gradients
        device = base, copies * lora_bytes, max(peaks[checkpointed], 3 * lora_bytes)
        cards = [c for c in (8, 12, 16, 24, 32, 48, 80, 141) if sum(device) / GiB + 1 <= 0.9375 * c] # of their GB
        card = f"{cards[0]} GB" if cards else "-"
        say(" ".join(f"{n / GiB:7.2f}" for n in (*device, sum(device), host)) + f" {card:>6}"
            f"  --gradient_checkpointing {checkpointed} --quantize {quantize} --offload {offload}"
            + " --fsdp" * args.fsdp + " (as given)" * (row == given))
    say(f"{args.device} has {predict.free_bytes(args.device) / GiB:.1f} GiB free")

if args.plan:
    print_plan()
    sys.exit(0)

# ---- checkpoints -----------------------------------------------------------------------------------------------------

config.update(target_pixels=args.target_pixels, control_pixels=args.control_pixels, upscale=args.upscale,
              model=fingerprint(folder / "transformer"),
              data=cache.content_key(samples=[[s["name"], s["scales"], s["text"]] for s in samples]))

versions = dict(commit=subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True,
                                      text=True).stdout.strip(),
                **{m.__name__: m.__version__ for m in (torch, diffusers, peft, transformers)})

def about(step):
    """What the LoRA's file says of its training. config: all flags that decide the numbers, and digests of the data and
    the model."""
    return dict(geometry=geometry, model=args.model, step=step, config=config, versions=versions)

def save_checkpoint(step):
    """A folder that appears whole: LoRA, the optimizer's tensors and numbers, step and configuration. Older ones beyond
    --keep go."""
    tmp, path = out_dir / f".tmp-checkpoint-{step:06d}", out_dir / f"checkpoint-{step:06d}"
    shutil.rmtree(tmp, ignore_errors=True)
    predict.save_lora(tmp / LORA_FILE, transformer, about(step))
    state = {f"{key}.{name}": value for name, p in lora.items() for key, value in optimizer.state[p].items()}
    moments = {key: value.cpu().clone() for key, value in state.items() if torch.is_tensor(value)} # some are the same
    moments |= {f"ema.{name}": value for name, value in ema.items()}
    write_tensors(tmp / "optimizer.safetensors", moments, dict(
        step=step, config=config, numbers={key: value for key, value in state.items() if key not in moments},
        group={key: value for key, value in optimizer.param_groups[0].items() if isinstance(value, (int, float))}))
    shutil.rmtree(path, ignore_errors=True) # a damaged one
    os.replace(tmp, path)
    sync_folder(out_dir)
    for old in sorted(out_dir.glob("checkpoint-*"), key=by_step)[:-args.keep]:
        shutil.rmtree(old)

def load_checkpoint(weights, moments, state):
    """Puts LoRA and optimizer back, bit for bit."""
    predict.load_weights(transformer, None, weights)
    optimizer.param_groups[0].update(state["group"])
    for key, value in {**moments, **state["numbers"]}.items():
        key, name = key.split(".", 1)
        if key == "ema":
            ema[name].copy_(value)
        else:
            optimizer.state[lora[name]][key] = ( # AdamW wants its step on the CPU
                value.to(args.device) if torch.is_tensor(value) and key != "step" else value)

def is_taken(line):
    """Whether a line of the log is a step up to the checkpoint: a killed run has logged steps after it, which are about
    to be taken again, and maybe half a line."""
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False

if checkpoint:
    refuse_other_settings(config)
    load_checkpoint(*checkpoint)
    checkpoint = None # its tensors would stay in memory
if master:
    need = 4 * copies * sum(p.numel() for p in lora.values()) * (args.keep + 1)
    free = shutil.disk_usage(out_dir).free
    if need > free:
        raise InputError(f"--out_dir {out_dir}: checkpoints need {need / 1e9:.3f} GB, {free / 1e9:.3f} GB are free; "
                         "lower --keep, or give a folder on another disk")
    for left in [*out_dir.glob(".tmp-*"), *out_dir.glob("DONE")]: # of a killed process, as the lock is ours; and of a
        shutil.rmtree(left) if left.is_dir() else left.unlink()    # finished one that now goes on
    lines = log.read_text(errors="replace").splitlines() if step and log.exists() else [json.dumps(dict(
        flags=vars(args), **versions, started=time.time()), default=str)]
    write_file(log, ("\n".join(lines[:1] + [line for line in lines[1:] if is_taken(line)]) + "\n").encode())

# ---- what the log tells ----------------------------------------------------------------------------------------------

if master and args.tracker == "tensorboard":
    from torch.utils.tensorboard import SummaryWriter
    tracker = SummaryWriter(out_dir / "tensorboard", purge_step=step + 1)
if master and args.tracker == "wandb":
    import wandb
    try: # the log's first line says when the run began: resumed, it goes on with its curve
        tracker = wandb.init(project="qwen-image-edit", name=out_dir.resolve().name, dir=out_dir, config=config,
                             id=cache.content_key(run=lines[0]), resume="allow")
    except wandb.Error as e:
        raise InputError(f"--tracker wandb: {str(e).splitlines()[0]}; run `wandb login`, or set WANDB_MODE=offline, "
                         "then --resume") from None

def track(values, pictures={}):
    """This step's numbers and PIL images, for the tracker."""
    if args.tracker == "tensorboard":
        for name, x in values.items():
            tracker.add_scalar(name, x, step)
        for name, image in pictures.items():
            tracker.add_image(name, np.asarray(image), step, dataformats="HWC")
        tracker.flush()
    if args.tracker == "wandb":
        tracker.log({**values, **{name: wandb.Image(image) for name, image in pictures.items()}}, step=step)

def read_log():
    return [json.loads(line) for line in log.read_text().splitlines()[1:]]

def by_timestep(records):
    """-> of each sample in these records its loss and the tenth of (0, 1) its timestep is in; mean loss of each."""
    s, losses = [np.array([x for r in records for x in r[key]]) for key in ("timesteps", "losses")]
    tenths = np.minimum(s * 10, 9).astype(int)
    return losses, tenths, np.bincount(tenths, losses, 10) / np.maximum(np.bincount(tenths, minlength=10), 1)

def draw_curves():
    """loss.png: the losses, and the last 100 steps' by timestep."""
    from matplotlib.figure import Figure
    records, figure = read_log(), Figure((12, 4), layout="constrained")
    looks, losses, n = [r for r in records if "val_loss" in r], [r["loss"] for r in records], max(1, len(records) // 20)
    left, right = figure.subplots(1, 2)
    left.plot([r["step"] for r in records], losses, color="lightgray", label="training")
    left.plot([r["step"] for r in records[n - 1:]], np.convolve(losses, np.ones(n) / n, "valid"), label=f"mean of {n}")
    left.plot([r["step"] for r in looks], [r["val_loss"] for r in looks], "o-", label="held-out pictures")
    left.set(xlabel="step", ylabel="loss")
    left.legend()
    right.bar(np.arange(10) / 10, by_timestep(records[-100:])[2], 0.09, align="edge")
    right.set(xlabel="timestep (1: noise)", ylabel="loss, last 100 steps")
    figure.savefig(png := io.BytesIO())
    write_file(out_dir / "loss.png", png.getvalue())

def find_hardest():
    """The five samples with the greatest loss, each time divided by the mean at that timestep, in the second half of
    the run."""
    records = read_log()
    records = records[len(records) // 2:]
    losses, tenths, means = by_timestep(records)
    enough = np.bincount(tenths, minlength=10)[tenths] >= 5 # to compare with
    positions = [(r["step"] - 1) * args.batch_size + i for r in records for i in range(args.batch_size)]
    ratios = {}
    for p, ratio in zip(np.array(positions)[enough], (losses / np.maximum(means[tenths], 1e-12))[enough]):
        ratios.setdefault(sample_at(int(p))["name"], []).append(ratio)
    worst = sorted(ratios, key=lambda name: -np.mean(ratios[name]))[:5]
    return [dict(name=name, ratio=float(np.mean(ratios[name])), times=len(ratios[name])) for name in worst]

# ---- held-out pictures: on the master alone; with --fsdp on all, as no forward pass is possible alone ----------------

@contextmanager
def evaluating():
    """Inside `with`: the weights' running mean, if there is one, no gradients, no dropout, and nothing compiled once
    more, which would take longer."""
    transformer.eval()
    raw = {name: lora[name].detach().clone() for name in ema}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for name in ema:
            lora[name].copy_(ema[name])
        yield
        for name in ema:
            lora[name].copy_(raw[name])
    transformer.train()

def validation_loss():
    """The training's loss over the held-out pictures, at four noise levels each. Noise depends on a picture's place in
    --val_data and not on --seed, so that the curves of all runs compare."""
    top = bottom = 0.0
    runs = [(i, (k + 0.5) / 4) for i in range(len(held_out)) for k in range(4)]
    lengths = [sum(h * w for _, h, w in held_out[i].img_shapes) + len(held_out[i].prompt_embeds[0]) for i, _ in runs]
    with evaluating():
        for pack in plan_packs(lengths, args.max_tokens):
            entries = []
            for (i, s), job in [(runs[r], held_out[runs[r][0]]) for r in pack]:
                x0 = job.target_latent.to(args.device, torch.float32)
                noise = torch.randn(x0.shape, generator=generator("validation", i, s, seed=0))
                entries.append((x0, torch.tensor(s), noise, job.control_latent, job.prompt_embeds[0], job.img_shapes,
                                torch.ones(len(x0), device=args.device)))
            numerator, denominator = batch_loss(make_batch(entries))
            top, bottom = top + numerator, bottom + denominator
    return float(top / bottom)

def draw_held_out():
    """Every held-out picture, sizes mixed -> PIL images."""
    for pack in plan_packs([j.tokens for j in held_out], args.max_tokens):
        predict.denoise(transformer, pipe.scheduler.config, [held_out[i] for i in pack], args.max_tokens)
    return [predict.decode(pipe, j.latents, j.height, j.width) for j in held_out]

def measure_held_out(before, after):
    """-> {group: measures}: mean PSNR to the target of the input, without and with the LoRA, and of the VAE alone, the
    ceiling; and, where the target equals the input, the LoRA's mean PSNR and median shift, zoom and colour. Those are
    against the target as the VAE draws it, whose own soft edges would pass for a zoom of half a percent."""
    groups = {}
    for job, b, a in zip(held_out, before, after):
        given = cache.read_image(job.image[0]).resize(job.target.size, Image.Resampling.LANCZOS)
        ceiling = predict.decode(pipe, job.target_latent.to(args.device), job.height, job.width)
        record = dict(input=predict.psnr(given, job.target), before=predict.psnr(b, job.target),
                      after=predict.psnr(a, job.target), vae=predict.psnr(ceiling, job.target))
        keep = np.abs(np.asarray(given, int) - np.asarray(job.target, int)).max(-1) <= 8
        if keep.mean() > 0.1:
            record.update({f"kept_{k}": v for k, v in predict.drift(a, ceiling, keep).items()})
            record["kept_psnr"] = predict.psnr(np.asarray(a)[keep], np.asarray(job.target)[keep])
        groups.setdefault(job.group, []).append(record)
    average = lambda key: np.median if key in ("kept_shift", "kept_zoom", "kept_colour") else np.mean
    keys = lambda records: dict.fromkeys(k for r in records for k in r)
    return {group: {"pictures": len(records), **{k: float(average(k)([r[k] for r in records if k in r]))
                                                 for k in keys(records)}} for group, records in groups.items()}

def show_held_out():
    """Contact sheets and measures of this step, into samples/ and on the screen; "before" is drawn the first time."""
    pipe.vae.to(args.vae_encoder_device)
    with evaluating():
        if not before:
            transformer.set_adapters([*base], [*base.values()]) if base else transformer.disable_adapters()
            before.extend(draw_held_out())
            transformer.enable_adapters()
            activate_loras()
        after = draw_held_out()
    measured, sheets = measure_held_out(before, after), {}
    if args.use_cache:
        pipe.vae.to("cpu")
    if not master:
        return
    for job, b, a in zip(held_out, before, after):
        sheets.setdefault(job.sheet, []).append([*predict.sheet_row(job), b, a, job.target])
    for name, rows in sheets.items():
        sheets[name] = predict.contact_sheet(rows, ["control", "instruction", "before", "after", "target"])
        predict.save_png(sheets[name], out_dir / "samples" / f"step_{step:06d}_{name}.png")
    track({}, sheets)
    write_file(out_dir / "samples" / f"step_{step:06d}.json", json.dumps(measured, indent=1).encode())
    say("held-out pictures: PSNR to the target in dB, and what happened where nothing should change")
    say(f"{'':16} pictures  input  before   after   VAE |   PSNR  shift px  zoom %  colour")
    for group, m in measured.items():
        kept = "{kept_psnr:7.1f} {kept_shift:9.2f} {kept_zoom:7.2f} {kept_colour:7.1f}" if "kept_psnr" in m else ""
        say(("{:16} {pictures:8} {input:6.1f} {before:7.1f} {after:7.1f} {vae:5.1f} |" + kept).format(group, **m))
    say(f"{out_dir / 'samples'}/step_{step:06d}_*.png: control, instruction, before, after, target")

before = []

# ---- training --------------------------------------------------------------------------------------------------------

warned, first_step, stopped, stop = set(), step + 1, [], False
handlers = {name: signal.signal(name, lambda name, _: stopped.append(name)) # the loop looks there
            for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
bar = tqdm(total=args.max_steps, initial=step, desc="training", unit=" steps", disable=not master or None, leave=False)
while step < args.max_steps:
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
    t0 = time.perf_counter()

    # this step's samples, dealt to the processes; this process' share in packs. every rank plans the same
    positions = range(step * args.batch_size, (step + 1) * args.batch_size)
    lengths = [tokens_of(*draw(p)) for p in positions]
    shares = deal_to_ranks(lengths, transformer.inner_dim, world_size)
    plan = plan_packs if args.batching == "packed" else plan_padded
    plans = [[[share[i] for i in pack] for pack in plan([lengths[i] for i in share], args.max_tokens)]
             for share in shares]
    mine, packs = shares[rank], plans[rank]
    if args.fsdp: # a forward pass is everybody's, so all must make the same number
        packs = even_packs(packs, max(map(len, plans)))
    for i in mine:
        if lengths[i] > args.max_tokens and (name := draw(positions[i])[0]["name"]) not in warned:
            warned.add(name)
            tqdm.write(f"{name}: {lengths[i]:,} tokens, over --max_tokens {args.max_tokens:,}; runs alone")

    # gradients of the sum; LoRA dropout is the only user of the global random state
    top = bottom = computed = 0.0
    seen = torch.zeros(args.batch_size, 2, device=args.device) # timestep and loss of each sample
    for pack in packs:
        torch.manual_seed(generator("dropout", step, rank, *pack[:1]).initial_seed())
        batch = load_batch([positions[i] for i in pack or [lengths.index(min(lengths))]])
        try:
            numerator, denominator = [len(pack[:1]) * x for x in batch_loss(batch)] # an empty pack counts for nothing
            numerator.backward()
        except torch.OutOfMemoryError:
            names = ", ".join(f"{draw(positions[i])[0]['name']}: {lengths[i]:,}" for i in pack)
            raise InputError(f"--max_tokens {args.max_tokens}: out of memory at step {step + 1} (tokens of {names}); "
                             "lower it, or raise --gradient_checkpointing, then --resume") from None
        top, bottom = top + numerator.detach(), bottom + denominator
        computed += sum(lengths[i] for i in pack) if args.batching == "packed" else len(pack) * (
            max(map(len, batch["latents"])) + max(map(len, batch["prompt_embeds"])))
        if pack:
            seen[pack] = torch.stack([torch.stack(batch["timesteps"]).to(args.device), torch.stack(batch["losses"])], 1)

    # one all-reduce: gradients, numerator, denominator, computed tokens, whether any process was told to stop, for all
    # must do so after the same step, and each sample's loss; then divide by what all processes saw together
    for p in lora.values():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    sums = torch.tensor([top, bottom, computed, len(stopped)], device=args.device)
    flat = torch.cat([*[p.grad.flatten() for p in lora.values()], sums, seen.flatten()])
    if world_size > 1:
        dist.all_reduce(flat)
    *grads, sums, seen = flat.split([*[p.numel() for p in lora.values()], 4, seen.numel()])
    top, bottom, computed, stop = sums.tolist()
    for p, grad in zip(lora.values(), grads):
        p.grad = (grad / bottom).view_as(p)
    loss = top / bottom
    grad_norm = torch.nn.utils.clip_grad_norm_(lora.values(), args.max_grad_norm).item()
    if not math.isfinite(grad_norm) or not math.isfinite(loss): # the same on every rank; the step is not taken
        names = ", ".join(draw(p)[0]["name"] for p in positions)
        raise InputError(f"{out_dir}: loss {loss}, gradient norm {grad_norm} at step {step + 1} ({names}); lower --lr, "
                         "check these samples, then --resume")
    lr = learning_rate(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for name in ema: # shorter at first, so that it forgets the start
        ema[name].lerp_(lora[name].detach(), 1 - min(args.ema_decay, (1 + step) / (10 + step)))
    lr *= optimizer.param_groups[0].get("d", 1) # Prodigy's own factor
    step += 1
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - t0

    # look, log and save: nothing below changes the training
    looks = held_out and (step == args.max_steps or args.sample_every and step % args.sample_every == 0)
    val_loss = dict(val_loss=validation_loss()) if looks else {}
    if master:
        memory = torch.cuda.max_memory_allocated() if args.device.startswith("cuda") else resource.getrusage(
            resource.RUSAGE_SELF).ru_maxrss * 1024
        tokens, copied = sum(lengths), 2 * len(packs) * transformer.bytes_away # forward and backward pass
        record = dict(step=step, loss=loss, lr=lr, grad_norm=grad_norm, seconds=round(seconds, 4),
                      images=args.batch_size, tokens=tokens, computed_tokens=int(computed), memory=memory,
                      copied_from_host=copied, **val_loss, timesteps=[round(s, 4) for s in seen[::2].tolist()],
                      losses=[round(x, 5) for x in seen[1::2].tolist()])
        saving = stop or looks or step % args.save_every == 0 or step == args.max_steps # drawing may take long
        try:
            with open(log, "a") as f:
                f.write(json.dumps(record) + "\n")
                if saving: # after a power loss the log must not lag behind the checkpoint
                    f.flush()
                    os.fsync(f.fileno())
        except OSError as e:
            raise InputError(f"{log}: cannot be written ({e.strerror}); free some space, then --resume") from None
        say(f"step {step}/{args.max_steps} | loss {loss:.4f} | lr {lr:.1e} | grad {grad_norm:.3f} | {seconds:.2f} s | "
            f"{args.batch_size} img | {tokens:,} tok | {tokens / seconds / 1000:.1f}k tok/s | {memory / 2**30:.1f} GiB"
            + (f" | {tokens / computed:.0%} of computed tokens valid" if args.batching == "padded" else "")
            + (f" | {copied / len(mine) / 1e9:.3f} GB/img from host" if args.offload else "")
            + "".join(f" | val loss {x:.4f}" for x in val_loss.values()))
        bar.set_postfix(loss=f"{loss:.4f}", tok_s=int(tokens / seconds))
        bar.update()
        track(dict(loss=loss, lr=lr, grad_norm=grad_norm, **val_loss))
        if saving:
            save_checkpoint(step)
            if find_spec("matplotlib"):
                draw_curves()
        if step == first_step and args.gradient_checkpointing != 0 and args.device.startswith("cuda") and not (
                args.compile or args.fsdp or args.offload):
            advise_on_memory([positions[i] for i in packs[0]])
    if looks and step < args.max_steps and not stop: # at the end the LoRA is written first
        show_held_out()
    if stop:
        break
bar.close()
for name, handler in handlers.items():
    signal.signal(name, handler)
if stop:
    say(f"{out_dir}: stopped by a signal after step {step}; --resume goes on")
    sys.exit(0)

if master: # first of all, for drawing takes minutes
    with evaluating():
        predict.save_lora(out_dir / LORA_FILE, transformer, about(step))
        if args.lora_format == "comfyui":
            predict.save_comfyui(out_dir / f"{out_dir.resolve().name}_comfyui.safetensors", transformer, about(step))
    if ema:
        predict.save_lora(out_dir / LORA_FILE.replace(".", "_raw."), transformer, about(step))

if held_out: # on the master alone; with --fsdp on all, as no forward pass is possible alone
    show_held_out()

# ---- goodbye ---------------------------------------------------------------------------------------------------------

if master:
    hardest = find_hardest()
    write_file(out_dir / "samples" / "hardest.json", json.dumps(hardest, indent=1).encode())
    say("hardest samples, by their loss over the mean at the same timesteps (look at them: samples/hardest.json): "
        + ", ".join("{name} {ratio:.1f}".format(**h) for h in hardest))
    say(f"{out_dir}/loss.png: curves" if find_spec("matplotlib") else "for curves in loss.png: pip install matplotlib")
    write_file(out_dir / "DONE", f"{step} steps\n".encode())
    say(f"{out_dir / LORA_FILE}: trained for {step} steps on {len(index['samples'])} samples. next:\n"
        "  python predict.py " + shlex.join(["--model", args.model, "--lora", str(out_dir), *(
            [args.base_lora, "--lora_scale", "1", str(args.base_lora_scale)] if args.base_lora else [])])
        + " --image CONTROL.png --prompt \"...\"")
if dist.is_initialized(): # --offload has one of its own
    dist.destroy_process_group()
