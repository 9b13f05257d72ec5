"""
Teach Qwen-Image-Edit (v1, 2509, 2511) an edit: before/after pictures of any sizes -> LoRA.

It reads datasets (cache.py describes their layout), or an index that cache.py has written. It writes a run folder:
log.jsonl, checkpoint-000200/, samples/ (pictures of the validations), and at the end pytorch_lora_weights.safetensors,
which predict.py, diffusers and ComfyUI load.

$ python train.py                                                           # the photographs and model in tiny/
$ python train.py --model Qwen/Qwen-Image-Edit-2509 --data photos --plan    # what it would take; trains nothing
$ python train.py --model Qwen/Qwen-Image-Edit-2509 --data photos           # one GPU
$ torchrun --nproc_per_node=8 train.py --model Qwen/Qwen-Image-Edit-2509 --data photos
$ python train.py --model ... --data photos --resume     # the same command and --resume: continue the newest such run

Without --model the toy model in tiny/ is trained, whatever --data is. Each step uses --batch_size samples, however many
processes run. They are put, at their own sizes, into packs of at most --max_tokens tokens; the model computes one pack
at a time. Sample order, noise, timesteps and dropped captions depend on the seed and on the sample's position in the
run alone: one process and eight see the same data (with the same --batch_size), and a resumed run equals an
uninterrupted one, bit for bit on a CPU.
Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal end a run after the current step, with a checkpoint and exit status 0.

Behind the flags stands what needs only seconds: checks, the run's folder, devices, LoRAs. Three chapters follow. THE
RECIPE: which sample, at which noise, with which loss. HELPERS. THE RUN: what happens from where the processes start to
the last line. Start with THE RUN for the overview.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__))) # PYTHONSAFEPATH leaves it out
import library # before all others: refuses a folder here that Python would import in place of one of them
import contextlib
import hashlib
import json
import math
import time
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path

import common
from common import InputError, first_words, say, write_file
from library.cli import command_line
from library.cli.command_line import given_flags, key_value, natural, not_negative, number, positive
from library.data import dataset
from library.lora.lora_paths import LORA_FILE, checkpoints, find_lora
from training import optimizers, run_folder
from library.lora import peft_config

# ---- flags: flag(name, default, help). Others come from command_line.add_model_flags, add_data_flags, ... ------------

parser = command_line.Parser(__doc__, "--model MODEL --data DIR [--val_data DIR] [--plan] [--max_steps N] "
                             "[--sample_every N] [--target_pixels AREA] [--quantize int8] [--offload N] [--resume]")
command_line.add_model_flags(parser)
command_line.add_data_flags(parser)
flag = parser.group("LoRA")
flag("--lora_rank", 16, "a higher rank can learn more, and takes more memory",
     type=number(int, 1, peft_config.MOST_RANK))
flag("--lora_alpha", None, "the LoRA's output is scaled by alpha / rank (default: the rank)",
     type=number(float, 1e-6, peft_config.MOST_ALPHA))
flag("--lora_dropout", 0.0, "share of the LoRA's inputs that are set to 0", type=number(float, 0, 0.99))
flag("--lora_targets", ["attention"], "linear layers, by the ends of their names (to_q net.2 ...); attention: all of "
     "the attention, image and text; all-linear: all of the blocks", nargs="+")
flag("--lora_args", [], "KEY=VALUE of peft.LoraConfig: use_rslora=true, rank_pattern={\"proj_out\":64}, "
     "alpha_pattern={\"proj_out\":64}, init_lora_weights=orthogonal", nargs="+", type=key_value)
flag("--pretrained_lora", None, "start from this LoRA (file, folder, user/repo), with its rank, alpha and layers")
flag = parser.group("step")
flag("--max_steps", 2000, "optimizer steps", type=positive)
flag("--batch_size", max(4, common.world()), "samples per optimizer step, over all processes "
     "(default: 4, with more processes one for each)", type=positive)
flag("--max_tokens", 10_000, "image + text tokens per forward pass; lower this first if memory runs out", type=positive)
flag("--optimizer", "torch.optim.AdamW", "or bitsandbytes.optim.AdamW8bit (less memory), prodigyopt.Prodigy (finds the "
     "learning rate itself: --lr 1), or another class that takes lr and weight_decay, a schedule-free one too")
flag("--optimizer_args", [], "KEY=VALUE: its other arguments, such as betas=[0.9,0.99]", nargs="+", type=key_value)
flag("--ema", 0.0, "validate and save a moving average of the LoRA's weights over about 1 / (1 - this) steps, such as "
     "0.99, but at most a ninth of the run so far; 0: the weights themselves", type=number(float, 0, 0.99999))
flag("--lr", 1e-4, "learning rate; lower it if the loss jumps", type=not_negative)
flag("--lr_scheduler", "constant", "after the warm-up", choices=["constant", "cosine", "linear"])
flag("--warmup_steps", 0, "steps in which the learning rate rises from 0", type=natural)
flag("--weight_decay", 0.01, "how strongly the LoRA's weights are pulled towards 0 (default: 0.01, and 0 for an "
     "--optimizer that adds it to the gradient)", type=not_negative)
flag("--max_grad_norm", 1.0, "a gradient longer than this is scaled down to it",
     type=number(float, 1e-12, why="inf turns it off"))
flag = parser.group("loss")
flag("--timestep_sampling", "qwen_shift", "qwen_shift: logit-normal, shifted by the picture's size as in inference",
     choices=["uniform", "logit_normal", "qwen_shift"])
flag("--mask_foreground_weight", 2.0, "loss weight of a mask's edited region", type=not_negative)
flag("--mask_background_weight", 1.0, "loss weight of the rest of that picture", type=not_negative)
# These change memory and speed. Only --quantize and --transformer change the result.
flag = command_line.add_transformer_flags(parser)
flag("--gradient_checkpointing", None, "number of blocks that the backward pass recomputes: more take less memory and "
     "more time (default: on a GPU as many as its memory requires, else all)", type=natural)
flag("--fsdp", False, "shard the frozen base over torchrun's processes (FSDP2)")
flag("--compile", False, "torch.compile the blocks: minutes at first, then faster; needs gcc")
flag = parser.group("validation pictures: as predict.py generates them with the same flags")
flag("--sample_lora", [], "LoRAs added to the trained one while these are generated, such as Lightning", nargs="+")
command_line.add_sample_flags(flag, "num_inference_steps true_cfg_scale cfg_norm shift negative_prompt".split())
flag = parser.group("run")
flag("--use_cache", True, "--no-use_cache encodes each sample when it is used; all models stay loaded")
flag("--seed", 0, "seed of order, noise, timesteps, dropout, initial LoRA", type=command_line.seed_number)
flag("--out_dir", None, "run folder (default: out/<model>-<data>-001, next number for the next run)")
flag("--sample_every", 0, "steps between validations; 0: only at the end", type=natural)
flag("--val_pictures", 24, "generate at most this many validation pictures, spread over all samples; the validation "
     "loss uses all samples", type=natural)
flag("--save_every", 200, "steps between checkpoints", type=positive)
flag("--keep", 2, "number of newest checkpoints to keep", type=positive)
flag("--tracker", "none", "where else to log (WANDB_MODE=offline: locally)", choices=["none", "tensorboard", "wandb"])
flag("--plan", False, "only print the tokens, memory and time this would take; needs no weights")
flag("--resume", False, "continue the run in --out_dir, or the newest run of this model and data; if there is none, "
     "begin")
args = command_line.parse_data_args(parser, "train.py") # hub.TINY_DEFAULTS has those of --model tiny

# Flags that contradict each other, or ask for something that does not exist, end the script before anything is loaded.
peft_args = dict(args.lora_args)
if args.pretrained_lora and {"--lora_rank", "--lora_alpha", "--lora_targets", "--lora_args"} & {*given_flags()}:
    parser.error("argument --pretrained_lora: that LoRA has its own rank, alpha and layers; leave out --lora_rank, "
                 "--lora_alpha, --lora_targets and --lora_args")
peft_config.refuse_lora_args(peft_args)
if args.dtype == "float16":
    parser.error("argument --dtype: float16 needs loss scaling, which train.py does not have; use bfloat16")
if args.num_inference_steps == 1 and not args.shift:
    parser.error("argument --num_inference_steps: 1 needs a --shift; give one, or 2 or more steps")
command_line.check_text("--negative_prompt", args.negative_prompt)
if args.fsdp and common.world() < 2:
    parser.error("argument --fsdp: needs several processes; start with torchrun --nproc_per_node=N")
if not args.use_cache and (args.skip_bad or any(map(command_line.is_index, args.data + args.val_data))):
    parser.error("argument --use_cache: an index is a cache, and --skip_bad finds broken pictures when it fills one; "
                 "leave out --no-use_cache")
if "lr" in dict(args.optimizer_args):
    parser.error("argument --optimizer_args: lr would be ignored; give --lr")
pretrained_file = find_lora(args.pretrained_lora) if args.pretrained_lora else None
sample_lora_files = [find_lora(path) for path in args.sample_lora]
run_name = dataset.run_name(args.model, args.data)
out_dir = run_folder.find(args, run_name)
dataset.check_datasets(args)
say(f"{out_dir}: a LoRA for {args.model}, trained on {' '.join(args.data)}; the libraries take some seconds")

# What follows takes ten seconds to import, so it comes behind all that needs a second.
make_optimizer = optimizers.find_optimizer(args, parser) # imports its package
import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import cache
import predict
from library.lora import lora_file
from library.models import devices
from training import failures, memory_fit, plan, preflight, resume, validation
from training.run_log import Log, describe_environment, environment_changes, open_tracker
from rope_patch import blocks_of, checkpoint_blocks, plan_packs, run_packed

# --plan works without a network, too: of a published model it knows the configs. It plans such a model for a card.
if args.plan:
    plan.settle(args)
devices.find_devices(args) # fills in --device, --vae_device, --text_encoder_device and --dtype
predict.check_file(args)
dtype = getattr(torch, args.dtype) # of the frozen base; LoRA weights, their gradients and the optimizer are fp32
# LoRAs are read now, as a model may be downloaded next; and once, so they are what their hashes say.
sample_loras = [lora_file.read_lora(path) for path in sample_lora_files]
pretrained = None
if pretrained_file: # one of ours comes at the scale at which it was trained
    pretrained = lora_file.unfold(lora_file.read_lora(pretrained_file))
pretrained_hash = pretrained.hash if pretrained else None

# ==== THE RECIPE: which sample, at which noise, with which loss =======================================================
# In the order of a step, which is in short:
#
#   picks = [pick(position), ...]                 which samples, at which noise; no file is opened yet
#   for pack in deal_packs(...)[rank]:            a pack: places in picks that this process computes together
#       items = [load_item(picks[place]), ...]    their tensors: in a thread, while the step before computes
#       items = list(map(to_device, items))       to the GPU
#       items = ask_base(transformer, items)      --preserve
#       losses = flow_loss(transformer, items)    calls predict_velocity: one forward pass
#       (sum(losses) / len(picks)).backward()
#
#   target, control   the picture wanted, and a picture given (before, after)
#   sample            a target with its controls and its prompts; dataset.Planned lists the fields
#   latents, token    a picture as the VAE encodes it; a token is 16x16 pixels of it, or a piece of a prompt
#   base              the frozen model without the LoRA
#   position          the number of a sample in the endless stream: step n uses n * batch_size and so on
#   --preserve        some samples get another prompt, and the LoRA learns to answer it as the base does
#
# One rule for all functions here: they read as globals the flags and what THE RUN makes once; what differs from call to
# call is handed over (a model that computes, too, as --plan measures another one). These read epoch (the samples of one
# pass through the data), scheduler_config, dtype, the transformer's config, encoders (usually None, because the cache
# has their output), and copying (a stream of the GPU, or None).

@dataclass
class Pick:
    """What is trained at one position of the stream, chosen before any file is opened."""
    sample: dataset.Planned
    encoding: dict # one of sample.encodings: the shapes and the file of its latents
    prompt: str # one of the sample's; "" if it was dropped; with `preserve` one of --preserve_prompts
    with_controls: bool # False: text-to-image; the prompt's embedding does not see the controls either
    preserve: bool # learn what the base answers to this prompt, not the target
    s: torch.Tensor # () the noise level, which is the model's timestep: 0 is data, 1 is noise
    noise_generator: torch.Generator # load_item draws the noise from it

    @property
    def img_shapes(self):
        """[(1, height, width), ...] in tokens of 16x16 pixels, the target first."""
        return self.encoding["img_shapes"] if self.with_controls else self.encoding["img_shapes"][:1]

    @property
    def tokens(self):
        """The number of image and text tokens that it adds to a forward pass: packs and memory are planned by it."""
        text = self.sample.texts[self.prompt, self.with_controls]
        return sum(h * w for _, h, w in self.img_shapes) + text["tokens"]

@dataclass
class Item:
    """The tensors of a Pick. I: target tokens, K: tokens of all controls, T: prompt tokens, C: latent channels, J: text
    channels; base: in --dtype. Python ignores the strings; training/memory_fit.py makes items of zeros by them, to
    measure memory. A field that few samples have gets a default: in those items it stays at that, and takes none."""
    x0: "float32 I C" # the target's latents, i.e. the data
    noise: "float32 I C"
    velocity: "float32 I C" # what the model should predict: noise - x0; with `preserve` the answer of ask_base
    s: "float32" # noise level
    controls: "base K C" # latents of the controls, without noise, one after the other
    prompt: "base T J" # embeddings
    weight: "float32 I" # of each target token in the loss; zeros in an idle pass
    img_shapes: list # as Pick.img_shapes
    mask: "float32 I" = None # the edited share of each target token, from 0 to 1; None without a mask
    preserve: bool = False # as Pick.preserve

# Everything random is a function of (seed, position), so resuming needs one number, and every process knows what the
# others do. A generator that is used up step by step would have to be saved, for each process.

def seed_of(*what, seed=args.seed): # validations give another one, which is the same in all runs
    # We hash, because with seed + position a run with seed 1 would get the noise of a run with seed 0, one sample
    # later. torch's CPU generator uses 32 bits of a seed, so of a million samples about 100 pairs share their noise.
    return int(hashlib.sha256(repr((seed, *what)).encode()).hexdigest()[:8], 16)

def generator(*what, **seed):
    return torch.Generator().manual_seed(seed_of(*what, **seed))

@lru_cache(maxsize=2)
def shuffled(n):
    """The order of the n-th epoch, as places in `epoch`. Another order goes here."""
    return torch.randperm(len(epoch), generator=generator("order", n)).tolist()

def chance(g): # uniform in [0, 1)
    return torch.rand((), generator=g).item()

def choose(g, options): # one of them, all equally likely
    return options[torch.randint(len(options), (), generator=g)]

def pick(position):
    """-> Pick of this position in the stream of samples, which goes through one shuffled epoch after the other."""
    n, place = divmod(position, len(epoch))
    sample = epoch[shuffled(n)[place]]
    # Every random number is drawn, even if it is not needed: turning a flag on changes no other decision. (The names
    # are parts of the seeds. --timestep_sampling also changes the noise, which comes from the same generator as s.)
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
    if preserve: # the base needs the controls to answer
        prompt, drop_controls = preserve_prompt, False
    g = generator("noise", position)
    s = pick_timestep(g, math.prod(encoding["img_shapes"][0]))
    return Pick(sample=sample, encoding=encoding, prompt=prompt, with_controls=not drop_controls, preserve=preserve,
                s=s, noise_generator=g)

def pick_timestep(g, img_len):
    """-> the noise level s for a target of img_len tokens, fp32. Another distribution goes here, and its name into the
    flag's choices; validations have levels of their own."""
    if args.timestep_sampling == "uniform":
        return torch.rand((), generator=g)
    s = torch.randn((), generator=g).sigmoid() # logit-normal
    if args.timestep_sampling == "logit_normal":
        return s
    assert args.timestep_sampling == "qwen_shift" # a choice that you add needs a branch
    mu = predict.find_mu(img_len, scheduler_config) # larger pictures get more noise, as the scheduler shifts its sigmas
    return math.exp(mu) / (math.exp(mu) + 1 / s - 1)

def load_item(picked):
    """-> Item, from the cache, or encoded now by the pipeline `encoders`. It stays on the CPU: the loader thread, which
    calls this, would otherwise wait for all that the GPU still has to do."""
    latents = cache.load_latents(picked.sample, picked.encoding, encoders)
    x0 = latents["pixel_latent"].to("cpu", torch.float32)
    noise = torch.randn(x0.shape, generator=picked.noise_generator)
    weight = torch.ones(len(x0))
    mask = None if picked.preserve else latents.get("edit_mask") # (that prompt does not ask for the edit)
    if mask is not None:
        weight = args.mask_foreground_weight * mask + args.mask_background_weight * (1 - mask)
        if not weight.any():
            common.warn_once(f"warning: {picked.sample.name}: its mask leaves no token a weight, so nothing is learned "
                             "from it; correct the mask, or raise --mask_foreground_weight, --mask_background_weight")
    controls = latents["control_latent"] if picked.with_controls else latents["control_latent"][:0]
    prompt = cache.load_text(picked.sample, (picked.prompt, picked.with_controls), encoders)
    if prompt.shape[1] != transformer.config.joint_attention_dim: # a foreign cache may hold anything
        raise InputError(f"{picked.sample.name}: its prompt_embed has {prompt.shape[1]} columns, as of another model; "
                         "run cache.py with this one")
    return Item(x0=x0, noise=noise, velocity=noise - x0, s=picked.s, controls=controls.to("cpu", dtype),
                prompt=prompt.to("cpu", dtype), weight=weight, img_shapes=picked.img_shapes, mask=mask,
                preserve=picked.preserve)

def to_device(item):
    """Copies an Item to the device, on a stream of its own: on the one that computes, the copy would wait for all that
    the GPU still has to do. When .to() returns, the copy is done."""
    with torch.cuda.stream(copying): # (without a GPU this does nothing)
        moved = {name: x.to(args.device) for name, x in vars(item).items() if torch.is_tensor(x)}
    if copying:
        for x in moved.values(): # their memory is free again when the computing stream, too, has done with them
            x.record_stream(torch.cuda.current_stream())
    return replace(item, **moved)

def predict_velocity(model, items):
    """-> (I, C) in fp32 for each of these items, of any sizes, in one forward pass."""
    latents = []
    for i in items:
        noisy = (1 - i.s) * i.x0 + i.s * i.noise # data at s = 0, noise at s = 1
        latents.append(torch.cat([noisy.to(dtype), i.controls])) # the model sees the controls as they are
    prompts = [i.prompt for i in items]
    timesteps = torch.stack([i.s for i in items])
    preds = run_packed(model, latents, prompts, timesteps, [i.img_shapes for i in items])
    return [pred[:len(i.x0)].float() for i, pred in zip(items, preds, strict=True)] # the controls' rows are dropped

def ask_base(model, items):
    """--preserve: the velocity of such an item becomes what the model predicts for it without its LoRA -> items."""
    asked = [i for i in items if i.preserve]
    # With --fsdp every process must run the same number of passes: if one asks, all must. So one that has nothing to
    # ask asks for an item of another kind, and does not use the answer.
    if args.fsdp and args.preserve:
        asked = asked or items[-1:]
    if not asked:
        return items
    model.disable_adapters() # (and their requires_grad; enable_adapters turns that on again, and gradients stay)
    with torch.no_grad():
        answers = iter(predict_velocity(model, asked))
    model.enable_adapters()
    return [replace(i, velocity=next(answers)) if i.preserve else i for i in items]

def flow_loss(model, items):
    """Flow matching (arxiv.org/abs/2210.02747): the model predicts the velocity of the straight path from data to noise
    -> the loss of each item: the weighted mean over its own target tokens, so that a large picture counts as much as a
    small one. Another loss goes here; training, validation and the measurement of memory all call this."""
    losses = []
    for i, pred in zip(items, predict_velocity(model, items), strict=True):
        # in fp32: bf16 keeps three digits, and to square, add and compare such numbers would lose them
        error = (pred - i.velocity).square().mean(-1) # (I,)
        total = i.weight.sum().clamp(min=torch.finfo(torch.float32).tiny) # 0 in an idle pass, whose loss is 0, too
        losses.append((error * i.weight).sum() / total)
    return losses

def learning_rate(n):
    """The learning rate of the step after n steps. A pure function needs no scheduler object in a checkpoint."""
    if n < args.warmup_steps:
        return args.lr * (n + 1) / args.warmup_steps
    done = (n - args.warmup_steps) / (args.max_steps - args.warmup_steps)
    shape = dict(constant=1.0, linear=1 - done, cosine=0.5 + 0.5 * math.cos(math.pi * done))
    return args.lr * shape[args.lr_scheduler]

# ==== HELPERS, by subject (if you have one GPU, skip what they say about ranks, processes and --fsdp) =================

# ---- checkpoints: the LoRA, and what training/resume.py needs to go on -----------------------------------------------

def write_checkpoint(path, step, optimizer):
    """Writes a checkpoint, its LoRA last: a folder without one is none (lora_paths.checkpoints), so that no disk needs
    to rename folders. training/preflight.py tries this before the first step, with an optimizer of its own."""
    try:
        with optimizers.averaged_weights(optimizer):
            trained = resume.as_trained(transformer, lora)
            resume.save_optimizer(path, optimizer, lora, trained, step=step, config=config, date=meta["date"])
            predict.save_lora(path / LORA_FILE, transformer, dict(step=step, **meta))
    finally:
        if path.is_dir() and not (path / LORA_FILE).exists(): # the next try needs the room of this half
            run_folder.remove_old(path)

def save_checkpoint(step):
    """Adds a checkpoint to the run folder. The newest --keep, with this one, and the best stay."""
    path = out_dir / f"checkpoint-{step:06d}"
    write_checkpoint(path, step, optimizer)
    common.sync_folder(out_dir)
    with common.warn_on_failure("old checkpoints"):
        run_folder.remove_checkpoints(out_dir, newest=[*checkpoints(out_dir)[-args.keep:], path])

# ---- model: frozen base, LoRA in fp32, optimizer ---------------------------------------------------------------------

def make_model(weights):
    """-> (the frozen transformer with a LoRA on it, on the CPU; {name: parameter} of the LoRA: what learns). Without
    weights they are shapes alone."""
    transformer = predict.load_transformer(transformer_folder, args.dtype, weights, transformer_file)
    if pretrained:
        lora_config = lora_file.config_of(pretrained)
    else:
        lora_config = predict.find_layers(transformer, args.lora_targets)
        lora_config.update(r=args.lora_rank, lora_alpha=args.lora_alpha or args.lora_rank)
    # one of a LoRA's two matrices is random, the other zero, so the first step starts at the base model
    lora_config |= dict(lora_dropout=args.lora_dropout, init_lora_weights="gaussian") | peft_args
    # that peft found nothing to exclude is fine; of a pattern without a layer refuse_unused_args speaks, below
    warnings.filterwarnings("ignore", "You have passed exclude_modules|The following .*_pattern keys")
    torch.manual_seed(args.seed) # every process makes the same LoRA, so none has to be sent
    try:
        lora = predict.add_lora(transformer, **lora_config)
    except Exception as e: # whatever peft raises
        raise InputError(f"--lora_args, --lora_targets: peft refuses them ({first_words(e)}); give other "
                         "--lora_args, or another --lora_rank")
    peft_config.refuse_unused_args(peft_args, lora)
    if pretrained and weights:
        predict.load_weights(transformer, pretrained.state, pretrained.path)
    predict.load_loras(transformer, sample_loras)
    transformer.set_adapter("default") # the trained one: it alone is active, and learns
    return transformer, lora

# ---- checks: what could end the run later ends it at its start -------------------------------------------------------

def check_before_encoding():
    """Tries on shapes, without weights, whether LoRAs and flags fit the model, and whether the disk has room for the
    checkpoints -> {part: hash of its files}. InputError says what does not."""
    model, shapes = make_model(weights=False)
    common.on_first_process(partial(run_folder.check_room, out_dir, sum(p.numel() for p in shapes.values()), args.keep,
                                    args.ema, resume.as_trained(model, shapes)))
    # 58 GB take a minute: the first process reads them, the others find its answers (on other machines they read, too)
    common.on_first_process(lambda: list(map(hash_part, models.values())))
    return {part: hash_part(place) for part, place in models.items()}

def check_before_training():
    """Data, models and checkpoint are known now. InputError says what does not agree, or cannot be saved."""
    lora_file.warn_other_base(lora_files, based_on)
    # Each process has read flags, model and checkpoint for itself. From here on all assume that these are the same.
    devices.refuse_differences(out_dir, vars(args) | config | dict(step=step, val_data=cache.data_hash(val_samples)))
    # A checkpoint is written, read back and thrown away, and the optimizer takes steps that are forgotten.
    preflight.check(args, out_dir, lora, optimizer, make_optimizer, write_checkpoint)
    if checkpoint: # was it trained with these settings, on this data?
        resume.refuse_changes(out_dir, checkpoint.info["config"], config, parser, args.data)
    # Is what is in memory what was hashed? Asked before the log begins, so that the same command may run again. A file
    # that changes from here on does not matter.
    cache.refuse_changed_parts(models.values(), hashes.values(), args.cache_dir)

# ---- packs: which process computes which samples, in which forward passes --------------------------------------------

def deal_packs(lengths):
    """Samples of these lengths, in tokens -> for each process its packs: lists of places in `lengths`, at most
    --max_tokens in each, one forward pass each. All processes compute the same. With --fsdp every process must run the
    same number of passes: one with fewer gets empty packs, which load_pack fills."""
    # a token of an n-token sample costs 24 dim^2 FLOPs in a block's linears, and 4 n dim in its attention: here, both
    # divided by 4 dim
    cost = [n * (6 * transformer.inner_dim + n) for n in lengths]
    shares, work = [{} for _ in range(world_size)], [0] * world_size # a share: {place: tokens}
    # the classic greedy schedule: longest first, each to the process that has least to do
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = work.index(min(work))
        shares[least][i] = lengths[i]
        work[least] += cost[i]
    # each process packs its share without padding
    dealt = [plan_packs(share, args.max_tokens) for share in shares]
    if args.fsdp:
        passes = max(map(len, dealt))
        dealt = [packs + [[]] * (passes - len(packs)) for packs in dealt]
    return dealt

def plan_step(n):
    """-> (the Picks of step n, this process's packs of them), the same whenever it is asked."""
    picks = [pick(position) for position in range(n * args.batch_size, (n + 1) * args.batch_size)]
    return picks, deal_packs([p.tokens for p in picks])[rank]

def load_pack(picks, pack):
    """-> (pack, its Items). An empty one becomes an idle pass: the shortest sample, weighed with zeros."""
    if pack:
        return pack, [load_item(picks[place]) for place in pack]
    shortest = min(range(len(picks)), key=lambda place: picks[place].tokens)
    item = load_item(picks[shortest])
    return [shortest], [replace(item, weight=torch.zeros_like(item.weight))]

def load_step(n):
    """-> (the Picks of step n, load_pack of each forward pass of this process)."""
    picks, packs = plan_step(n)
    return picks, [load_pack(picks, pack) for pack in packs]

# ---- a step: sums over the processes, its line, its errors -----------------------------------------------------------

def sum_over_processes(losses, signals):
    """Adds up the LoRA's gradients, in place, a tensor of losses, and a number, in one all-reduce -> (losses, signals)
    as numbers. Why not DDP: it requires the same number of backward passes from every process."""
    for p in lora.values(): # a process without a pack has no gradients
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    # as one tensor, because one large message costs less than hundreds of small ones
    grads = [p.grad for p in lora.values()]
    flat = torch.cat([parameters_to_vector(grads), losses, torch.full_like(losses[:1], signals)])
    if world_size > 1:
        dist.all_reduce(flat)
    vector_to_parameters(flat, grads) # each gradient is a view of its part of `flat` now
    *losses, signals = flat[-len(losses) - 1:].tolist()
    return losses, signals

def clock():
    if args.device.startswith("cuda"):
        torch.cuda.synchronize() # kernels run later than they are called
    return time.perf_counter()

def step_lines(record, left):
    """A step as a person reads it -> lines. record: what the log has of it; left: seconds until the end."""
    line = ("step {step}/{last}  loss {loss:.4f}  lr {lr:.1e}  grad {grad_norm:.2g}  {seconds:.3g} s  "
            "{speed:.3g}k tok/s  {memory:.3g} GiB").format(
                **record, last=args.max_steps, speed=record["tokens"] / record["seconds"] / 1000)
    if "d" in record:
        line += f"  d {record['d']:.1e}"
    if record["step"] > 1: # the first step also warms up
        line += f"  {timedelta(seconds=round(left)) if left < 86400 else f'{left / 3600:.0f} h'} left"
    if record["loss"] <= 10:
        return [line]
    return [line, "exploded: a model that predicts nothing has a loss of 2; start a new run with a lower --lr"]

def step_error(where, what, step, picks, remedy):
    """-> the InputError of a step that cannot, or must not, be taken with these samples."""
    names = ", ".join(f"{p.sample.name}: {p.tokens:,} tokens" for p in picks)
    return InputError(f"{where}: {what} at step {step + 1} ({names}); {remedy}")

# ---- validation: the loss of samples that are not trained; training/validation.py draws them -------------------------

def validation_due(step):
    """Whether a validation follows this step. (After the last step there is one in any case.)"""
    return val_samples and args.sample_every and step and step % args.sample_every == 0

LEVELS = 0.125, 0.375, 0.625, 0.875 # noise levels of a validation's loss: the middles of four quarters

def validation_loss():
    """-> the loss of each of --val_data, the mean of flow_loss at four noise levels, as far as this process computes
    them: a tensor to be summed. The noise depends on a sample's place in --val_data and not on --seed, so you can
    compare two runs that have the same sizes and flags of the loss. (Not with the training's loss, whose noise levels
    --timestep_sampling decides.)"""
    picks = []
    for place, sample in enumerate(val_samples):
        for s in LEVELS:
            noise = generator("validation", place, s, seed=0)
            picks.append(Pick(sample=sample, encoding=sample.encodings[0], prompt=sample.prompts[0], with_controls=True,
                              preserve=False, s=torch.tensor(s), noise_generator=noise))
    losses = torch.zeros(len(val_samples), device=args.device)
    for pack in common.progress("validation loss", deal_packs([p.tokens for p in picks])[rank], unit="pass"):
        places, items = load_pack(picks, pack)
        for place, loss in zip(places, flow_loss(transformer, list(map(to_device, items)))):
            losses[place // len(LEVELS)] += loss / len(LEVELS)
    return losses

def validate(step):
    """Loss, pictures and PSNRs of --val_data: all processes compute them, and the first one reports. What fails here is
    a warning, as nothing in it trains."""
    say(f"step {step}: validation on {len(val_samples)} samples")
    begun, val_loss, drawn = clock(), None, None
    transformer.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"): # compiling once more would take longer
            losses = common.on_all_processes(validation_loss, args.fsdp)
            if world_size > 1:
                dist.all_reduce(losses)
            val_loss = losses.mean().item()
            say(validation.loss_line(step, val_loss))
            drawn = drawer.draw(step)
    except (Exception, SystemExit) as e:
        failures.warn_of_validation(e, step, args.fsdp)
    finally:
        transformer.train()
    if rank == 0 and val_loss is not None:
        logged, sheets = drawn or (dict(psnr={}, pictures=[]), {})
        record = dict(step=step, val_loss=val_loss, pairs=len(val_samples), val_key=drawer.val_key, **logged)
        with common.warn_on_failure("the log"):
            log.write(record | dict(seconds=round(clock() - begun, 4)), ["val_loss"], sheets)
            say(*validation.best_lines(out_dir))
            run_folder.remove_pictures(out_dir)

# ==== THE RUN =========================================================================================================

# Processes. torchrun starts several of this script, each with a rank of its own; without torchrun there is one, rank 0.
devices.start_processes(args)
rank, world_size = common.rank(), common.world()
if args.batch_size < world_size:
    say(f"warning: --batch_size {args.batch_size} for {world_size} processes: some have no sample")

# The run folder. Two runs in one folder would spoil each other, so rank 0 locks it, as long as `lock` lives. --plan
# writes nothing.
if rank == 0 and not args.plan:
    out_dir, lock = run_folder.lock(args, out_dir, run_name)
out_dir = common.gather_objects(out_dir)[0] # (which may be the next number now)

# The checkpoint to continue from. We look for it only after taking the lock, as a run that is just ending may still
# write one, and before anything slow begins, so that a forbidden change or a finished run is reported within seconds.
checkpoint, step = None, 0
if args.resume:
    checkpoint, step = resume.begin(out_dir, args, pretrained_hash, parser)

# Data. make_cache encodes what the cache lacks. Its encoders leave the device when it returns, so they are never in
# memory together with the transformer. pipe is None if all datasets are indexes (--data INDEX.json).
transformer_folder, transformer_file = predict.find_transformer(args, weights=not args.plan)
model_folder, pipe = cache.find_pipeline(args, weights=not args.plan)
models = dict(model=Path(transformer_file or transformer_folder / "transformer"), scheduler=model_folder / "scheduler",
              vae=model_folder / "vae")
hash_part = partial(cache.hash_part, cache_dir=args.cache_dir)
hashes = {} if args.plan else check_before_encoding() # of each of these models' files
samples, val_samples, geometry, areas = cache.make_cache(pipe, model_folder, args,
                                                         encode=args.use_cache and not args.plan)
epoch = [sample for sample in samples for _ in range(sample.repeats)] # one pass through the data

# With --no-use_cache nothing is encoded yet: VAE and text encoder stay loaded, and encode each sample when it is used.
encoders = None if args.use_cache or args.plan else pipe
if encoders:
    cache.load_encoder(encoders, "vae", args)
    cache.load_encoder(encoders, "text", args)

# Model: the frozen base in --dtype, and on it a LoRA in fp32, whose weights are all that learns. The scheduler's config
# says how the noise levels shift with a picture's size.
scheduler_config = FlowMatchEulerDiscreteScheduler.from_pretrained(model_folder / "scheduler").config
transformer, lora = make_model(weights=not args.plan)
lora_files = [*sample_loras, pretrained] if pretrained else sample_loras
for file in lora_files:
    file.state = None # frees its tensors
copying = torch.cuda.Stream(args.device) if args.device.startswith("cuda") else None
if args.plan: # needs shapes and no numbers. (What plan.py needs is handed over, as nobody can import this script)
    requests = validation.choose_pictures(val_samples, args).values()
    raise SystemExit(plan.print_plan(args, transformer, model_folder, epoch, val_samples, requests, plan_step,
                                     deal_packs, Item, flow_loss))

# Onto the device, block by block: quantized, sharded or offloaded as the flags say.
predict.place_transformer(transformer, args.device, args.quantize, args.offload, args.fsdp)
transformer.train()
if args.compile:
    from library.models.compilation import compile_blocks # its file looks for a compiler
    compile_blocks(blocks_of(transformer))

# What a block computes is kept for the backward pass where the memory allows, and recomputed otherwise (gradient
# checkpointing). Without dropout, the only randomness in a block, its random state need not be kept: a copy less.
recompute = partial(checkpoint_blocks, transformer, preserve_rng_state=args.lora_dropout > 0)
recomputed = None
if args.gradient_checkpointing is None: # measures on a GPU; None on a CPU
    recomputed = memory_fit.keep_what_fits(transformer, memory_fit.lengths_of(samples, Pick),
                                           memory_fit.table_bytes(samples), Item, flow_loss, recompute, args, say)
if recomputed is None:
    recomputed = recompute(args.gradient_checkpointing)
if recomputed:
    say(f"to save memory the backward pass computes {recomputed} of {len(blocks_of(transformer))} blocks again "
        "(--gradient_checkpointing)")
optimizer = make_optimizer(lora.values())
say(f"{args.transformer or args.model}: LoRA of {sum(p.numel() for p in lora.values()):,} parameters, {args.dtype} "
    f"base on {args.device}" + (f", {world_size} processes" if world_size > 1 else ""))

# Every checkpoint and LoRA file says this about the run. predict.py generates at these sizes (at the first target area,
# if there are several), and --resume compares the config.
config = resume.compared_settings(args, pretrained_hash=pretrained_hash, geometry=geometry,
                                  data_hash=cache.data_hash(epoch), model_hash=hashes["model"],
                                  scheduler_hash=hashes["scheduler"])
versions = {name: version(name) for name in "torch diffusers transformers peft".split()}
around = versions | describe_environment() | dict(script=common.file_hash(__file__)[:12])
based_on = lora_file.base_of(args.model, args.transformer, model_folder, transformer_folder)
date = checkpoint.info.get("date") if checkpoint else None # a resumed run keeps its own: its file does not differ
meta = dict(geometry=geometry, areas=areas, config=config, versions=versions, run=out_dir.resolve().name,
            date=str(date or time.strftime("%Y-%m-%d", time.gmtime())), **based_on, model_hash=hashes["model"])

if val_samples: # a validation also draws pictures
    drawer = validation.Drawer(transformer, scheduler_config, val_samples, encoders, model_folder, out_dir,
                               [file.hash for file in sample_loras], args)

# All that could fail hours later fails now, with a line.
check_before_training()

# Continue: put LoRA and optimizer back. Order, noise and learning rate follow from --seed and the step.
if checkpoint:
    resume.load_checkpoint(checkpoint, lora, optimizer, make_optimizer)
    checkpoint = None # frees its tensors

# Rank 0 writes the log, whose first line says how the run was begun, and with --tracker to tensorboard or wandb, too.
if rank == 0:
    log_lines = run_folder.clean_folder(out_dir, step) if args.resume else []
    say(*environment_changes("".join(log_lines[:1]), around))
    begin = json.dumps(dict(command=sys.argv, flags=vars(args), **around, started=time.time()), default=str)
    write_file(out_dir / "log.jsonl", "".join(f"{line}\n" for line in log_lines or [begin]).encode())
    log = Log(out_dir / "log.jsonl", open_tracker(args.tracker, out_dir, step, config))

# ---- the loop --------------------------------------------------------------------------------------------------------

# From here on a signal (Ctrl-C, SIGTERM, a closed terminal) is noted, and ends the run after the current step; in a
# validation, after the step that follows it. ExitStack does what `with` does, without indenting the loop.
catching, stop = contextlib.ExitStack(), False
signals_seen = catching.enter_context(common.catch_signals())

# A thread loads the next step while this one computes. (Encoders need the device themselves, so with --no-use_cache the
# step waits its turn.)
loaded_steps = common.run_ahead(load_step, range(step, args.max_steps), most=0 if encoders else 1)

watch = common.shell_command(["python", "tools/page.py", out_dir, "--watch"])
say(f"the curves, in a browser: {watch}")
bar = common.progress("training", total=args.max_steps, initial=step, unit="step")
first_step = step
begun = time.monotonic()
versions_before, late = [], 0 # late: the step whose checkpoint the disk has refused, until one is written
try:
    while step < args.max_steps and not stop:
        # A validation comes before the next step, so that a run that was killed in one repeats it when it is resumed.
        # As every LoRA that is saved, it has the average of the weights, if the optimizer has one.
        if validation_due(step):
            with optimizers.averaged_weights(optimizer):
                validate(step)
        t0 = clock()

        # A file may be damaged, or have changed, on one process: then all leave.
        picks, passes = common.on_all_processes(next(loaded_steps).result)

        # Forward and backward, pack by pack. The step's loss is the mean of its samples' losses, and the gradient of a
        # mean is the mean of the gradients, so every pack adds its part to p.grad, whichever process computes it.
        sample_losses = torch.zeros(len(picks), device=args.device)
        failure = None
        try:
            for pack, items in passes:
                # Only --lora_dropout is random here. Each pack has a seed of its own, so a resumed run drops the same
                # inputs; other packs or processes drop others.
                torch.manual_seed(seed_of("dropout", step, rank, pack[0]))
                items = ask_base(transformer, list(map(to_device, items)))
                losses = flow_loss(transformer, items)
                (sum(losses) / len(picks)).backward()
                for place, loss in zip(pack, losses, strict=True):
                    sample_losses[place].add_(loss.detach()) # (which an idle pass leaves as it is)
        except torch.OutOfMemoryError: # (what it holds is free behind this block)
            failure = step_error(f"--max_tokens {args.max_tokens}", f"out of memory with --gradient_checkpointing "
                                 f"{recomputed}", step, [picks[place] for place in pack], failures.less_memory(
                                     args, len(blocks_of(transformer)), recomputed, len(pack), out_dir))
        except (Exception, SystemExit) as e:
            failure = e
        if failure and (world_size == 1 or args.fsdp): # --fsdp: the others wait in a block, until torchrun ends them
            raise failure

        # One all-reduce carries all that the processes share. If one has failed, all leave.
        sample_losses, signals = sum_over_processes(sample_losses, math.inf if failure else len(signals_seen))
        if signals == math.inf:
            raise failure or SystemExit(1)
        stop = signals > 0
        loss = sum(sample_losses) / len(sample_losses)

        # Clip the gradient, and stop before a step that would ruin the weights: one NaN makes all of them NaN.
        grad_norm = torch.nn.utils.clip_grad_norm_(lora.values(), args.max_grad_norm).item()
        if not math.isfinite(grad_norm) or not math.isfinite(loss):
            raise step_error(out_dir, f"loss {loss}, gradient norm {grad_norm}", step, picks, "check these samples, "
                             "and start a new run with a lower --lr (--pretrained_lora takes a checkpoint from before "
                             "the loss rose)")

        # A run that learns nothing must not look like a success. (Until the LoRA has changed something, samples with
        # `preserve` have no gradient; with --preserve below 1, others will come.)
        lr = learning_rate(step)
        if grad_norm == 0 and lr > 0 and not (args.preserve < 1 and all(p.preserve for p in picks)):
            raise step_error(out_dir, "a gradient of exactly 0", step, picks, "give other --lora_args, another "
                             "--pretrained_lora than one of zeros, or less than --preserve 1")
        for group in optimizer.param_groups: # the rate is ours: an optimizer's own would be overwritten
            group["lr"] = lr
        # Every process takes this step by itself, and must take the same one, also with an optimizer that draws
        # numbers. (Python's and numpy's are not seeded: training/preflight.py refuses an optimizer that draws those.)
        # The step and its number are one statement: whatever fails before or after it, the weights are what `step`
        # says.
        torch.manual_seed(seed_of("optimizer", step))
        versions_before = failures.versions_of(optimizer, step)
        _, step = optimizer.step(), step + 1
        optimizer.zero_grad(set_to_none=True)
        seconds = clock() - t0

        # Log and save; nothing below changes the training. A checkpoint precedes a validation, which may take minutes.
        # The estimate of the time left includes the validations so far.
        at_end = step == args.max_steps or stop
        save_now = at_end or validation_due(step) or step % args.save_every == 0 or late
        if rank == 0:
            with common.warn_on_failure("the log or the bar"):
                record = dict(step=step, loss=loss, lr=lr, grad_norm=grad_norm, seconds=round(seconds, 4),
                              tokens=sum(p.tokens for p in picks), memory=round(devices.memory_of(args.device), 3))
                record["samples"] = [f"{p.sample.root}/{p.sample.name}" for p in picks]
                record["timesteps"] = [round(p.s.item(), 4) for p in picks]
                record["losses"] = [round(x, 5) for x in sample_losses]
                shown = f"loss {loss:.4f}, {seconds:.3g} s a step"
                if d := optimizers.d_of(optimizer): # lr * d is the rate
                    record["d"] = d
                    shown += f", d {d:.1e}"
                log.write(record, ["loss", "lr", "grad_norm"], sync=save_now)
                # a terminal, where the bar tells how far it is, gets a line in ten steps, a file each step
                if bar.disable or save_now or step % 10 == 0 or step == first_step + 1 or loss > 10:
                    left = (time.monotonic() - begun) / (step - first_step) * (args.max_steps - step)
                    say(*step_lines(record, left))
                bar.set_postfix_str(shown)
                bar.update()
        if save_now: # what is saved is what all processes have. (Behind the log: if one has died, the first one saves)
            failures.compare_loras(out_dir, step, lora.values())
            late = common.on_first_process(partial(failures.save_or_warn, save_checkpoint, out_dir, step, late,
                                                   args.save_every, at_end))
except BaseException as e: # whatever ends the loop, what was learned is saved first
    failures.save_the_rest(save_checkpoint, out_dir, step, e, versions_before, optimizer)
    raise
finally:
    if rank == 0:
        log.flush()
    with common.warn_on_failure("the log or the bar"):
        bar.close()

# ---- the end: if a kill interrupts it, --resume repeats it -----------------------------------------------------------

# The finished LoRA, a last validation (which a signal does not end), and then DONE, which marks both as complete.
if stop:
    say(f"{out_dir}: stopped by a signal after step {step}; the same command with --resume continues it")
else:
    with optimizers.averaged_weights(optimizer):
        if rank == 0:
            predict.save_lora(out_dir / LORA_FILE, transformer, dict(step=step, **meta))
        if val_samples:
            validate(step)
    if rank == 0:
        write_file(out_dir / "DONE", f"{step} steps\n".encode())
    say(f"{out_dir / LORA_FILE}: trained for {args.max_steps} steps on {len(samples)} samples")
    with common.warn_on_failure("the next commands"):
        predict_words = command_line.words_for_predict(args, parser.get_default)
        say(*run_folder.next_commands(out_dir, predict_words, args.sample_lora))
if rank == 0 and not log.flush():
    say(f"warning: {log.path}: its last {len(log.waiting)} lines could not be written")
catching.close()
if dist.is_initialized():
    dist.destroy_process_group()
