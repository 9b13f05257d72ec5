"""
The whole training on one page, to be read before train.py: before/after pictures -> a LoRA for Qwen-Image-Edit.

$ python tools/lean_train.py                                                    # the photographs and model in tiny/
$ python tools/lean_train.py --model Qwen/Qwen-Image-Edit-2509 --data photos --out_dir out/snow # --resume: go on
$ torchrun --nproc_per_node=8 tools/lean_train.py --batch_size 8 --model ...   # eight GPUs share each step

In one process on a CPU train.py computes the same with the same flags, bit for bit. This lacks: validations, --plan,
--no-use_cache, --fsdp, --compile, --tracker, --pretrained_lora, --preserve, --weight_decay, other kinds of LoRA and
timesteps, dropped controls, averaged weights, older checkpoints, locked folders, recomputing by need, checks.
"""
import hashlib
import io
import json
import math
import sys
import time
from pathlib import Path
from pydoc import locate
sys.path.insert(0, str(Path(__file__).resolve().parents[1])) # where the core files are
import library # first, so that no other folder is taken for one of our modules
import common
from common import InputError, first_words, tell
from library.cli import command_line
from library.cli.command_line import given_flags, key_value, natural, not_negative, number, positive
from library.data import dataset
from library.files import stray_files, tensor_files

# ---- flags: flag(name, default, help); others come from common -------------------------------------------------------
parser = command_line.Parser(__doc__)
command_line.add_model_flags(parser)
command_line.add_data_flags(parser)
command_line.add_transformer_flags(parser)
flag = parser.group("training")
flag("--gradient_checkpointing", None, "blocks recomputed in backward, to save memory (default: all)", type=natural)
flag("--lora_rank", 16, "a higher rank can learn more, and takes more memory", type=positive)
flag("--lora_targets", ["attention"], "linear layers, by the ends of their names; or attention, all-linear", nargs="+")
flag("--max_steps", 2000, "optimizer steps", type=positive)
flag("--batch_size", 4, "samples per optimizer step, over all processes", type=positive)
flag("--max_tokens", 10_000, "image + text tokens per forward pass; lower this first if memory runs out", type=positive)
flag("--optimizer", "torch.optim.AdamW", "a class that takes lr and weight_decay, decoupled as AdamW's")
flag("--optimizer_args", [], "KEY=VALUE: its other arguments, such as betas=[0.9,0.99]", nargs="+", type=key_value)
flag("--lr", 1e-4, "learning rate; lower it if the loss jumps", type=not_negative)
flag("--lr_scheduler", "constant", "after the warm-up", choices=["constant", "cosine", "linear"])
flag("--warmup_steps", 0, "steps in which the learning rate rises from 0", type=natural)
flag("--max_grad_norm", 1.0, "a gradient longer than this is scaled down to it", type=number(float, 1e-12))
flag("--mask_foreground_weight", 2.0, "loss weight of a mask's edited region", type=not_negative)
flag("--mask_background_weight", 1.0, "loss weight of the rest of that picture", type=not_negative)
flag("--seed", 0, "seed of order, noise, timesteps, dropped captions, initial LoRA", type=command_line.seed_number)
flag("--out_dir", Path("out/lean"), "gets the LoRA (also for ComfyUI), log.jsonl, and what --resume needs", type=Path)
flag("--save_every", 200, "steps between saves, each of which replaces the one before", type=positive)
flag("--resume", False, "continue the run in --out_dir; begin if that has none")
args = command_line.parse_data_args(parser, "train.py") # tiny has train.py's defaults, too
if lacking := {"--val_data", "--preserve", "--prompt_image_dropout_rate"}.intersection(given_flags()):
    parser.error(f"argument {min(lacking)}: lean_train.py lacks it; leave it out, or take train.py")
args.val_data = [] # tiny's defaults have some
if args.dtype == "float16":
    parser.error("argument --dtype: float16 needs loss scaling, which is not here; use bfloat16")
there = {path.name for path in args.out_dir.glob("[!.]*")}
saved = args.resume and "state.safetensors" in there # else --resume begins
if there and not saved and not (args.resume and there == {"log.jsonl"}): # which a start leaves that was killed early
    parser.error(f"argument --out_dir: {args.out_dir} is not empty; give another, or --resume its state.safetensors")
dataset.check_datasets(args) # an error in any sample's files ends the script here, before anything slow

import torch # from here on imports take ten seconds; what is above needs one
from diffusers import FlowMatchEulerDiscreteScheduler
import cache
import predict
from library.models import devices
from rope_patch import checkpoint_blocks, plan_packs, run_packed

# ---- the recipe: which sample, at which noise, with which loss -------------------------------------------------------
# A sample (dataset.Planned): a target (picture wanted), its controls (those given) and prompts, all encoded. What is
# random depends on seed and position in the stream of samples, so one number resumes a run. The run makes the globals.

def generator(*what):
    seed = int(hashlib.sha256(repr((args.seed, *what)).encode()).hexdigest()[:8], 16)
    return torch.Generator().manual_seed(seed)

def pick(position):
    """-> (sample, one of its encodings, one of its prompts, number of tokens). No file is opened."""
    n, place = divmod(position, len(epoch))
    order = torch.randperm(len(epoch), generator=generator("order", n)) # of the n-th epoch
    sample, g = epoch[order[place]], generator("draw", position)
    encoding = sample.encodings[torch.randint(len(sample.encodings), (), generator=g)] # one for each --target_pixels
    prompts = [""] if torch.rand((), generator=g).item() < args.caption_dropout_rate else sample.prompts
    prompt = prompts[torch.randint(len(prompts), (), generator=generator("wording", position))]
    tokens = sum(h * w for _, h, w in encoding["img_shapes"]) + sample.texts[prompt, True]["tokens"]
    return sample, encoding, prompt, tokens

def load(position):
    """Adds noise to what pick chooses -> what flow_loss takes apart. I target and K control tokens of 16x16 pixels."""
    sample, encoding, prompt, _ = pick(position)
    latents, g = cache.load_latents(sample, encoding), generator("noise", position)
    embeds = cache.load_text(sample, (prompt, True)).to(dtype) # (T, J); True: the text encoder has seen the controls
    # The noise level s is also the model's timestep: 0 is data, 1 is noise. A normal number's sigmoid u is shifted as
    # in inference, so that larger pictures get more: s / (1 - s) = shift * u / (1 - u). (mu is the shift's logarithm.)
    shift = math.exp(predict.find_mu(math.prod(encoding["img_shapes"][0]), scheduler_config))
    s = shift / (shift + 1 / torch.randn((), generator=g).sigmoid() - 1)
    # Flow matching (arxiv.org/abs/2210.02747): the model learns the velocity of a straight path from data to noise.
    x0 = latents["pixel_latent"].float() # (I, 64)
    noise = torch.randn(x0.shape, generator=g)
    x = torch.cat([((1 - s) * x0 + s * noise).to(dtype), latents["control_latent"].to(dtype)]) # (I + K, 64)
    weight = torch.ones(len(x0)) # (I,) of each target token in the loss
    if (mask := latents.get("edit_mask")) is not None: # (I,) from 0 to 1: the edited share of a token
        weight = args.mask_foreground_weight * mask + args.mask_background_weight * (1 - mask)
    return [t.to(args.device) for t in (x, embeds, s, noise - x0, weight)] + [encoding["img_shapes"]]

def load_step(n):
    """-> for each forward pass of this process in step n: (positions of its samples, what load returns of each)."""
    lengths = {position: pick(position)[-1] for position in range(n * args.batch_size, (n + 1) * args.batch_size)}
    # The processes get samples as players get cards, the longest first. A pack: positions for one forward pass.
    mine = sorted(lengths, key=lengths.get, reverse=True)[rank::world_size]
    packs = plan_packs({position: lengths[position] for position in mine}, args.max_tokens)
    return [(positions, list(map(load, positions))) for positions in packs]

def flow_loss(items):
    """One forward pass over samples of any sizes. Yields the loss of each: the mean over its own target tokens."""
    xs, embeds, s, velocities, weights, img_shapes = zip(*items)
    preds = run_packed(transformer, xs, embeds, torch.stack(s), img_shapes)
    for pred, v, weight in zip(preds, velocities, weights):
        error = (pred[:len(v)].float() - v).square().mean(-1) # what it predicts for controls is dropped
        yield (error * weight).sum() / weight.sum()

def learning_rate(n):
    if n < args.warmup_steps:
        return args.lr * (n + 1) / args.warmup_steps
    done = (n - args.warmup_steps) / (args.max_steps - args.warmup_steps)
    return args.lr * dict(constant=1.0, linear=1 - done, cosine=0.5 + 0.5 * math.cos(math.pi * done))[args.lr_scheduler]

# ---- the run ---------------------------------------------------------------------------------------------------------
devices.find_devices(args)
predict.check_file(args)
devices.start_processes(args) # torchrun starts several of this script; else there is one, rank 0
rank, world_size = common.rank(), common.world()
dtype = getattr(torch, args.dtype) # of the frozen model; LoRA, gradients and optimizer are fp32

# Data. What the cache lacks is encoded now. geometry: the pictures' sizes, which the LoRA's file tells predict.py.
model_folder, pipe = cache.find_pipeline(args)
transformer_folder, transformer_file = predict.find_transformer(args)
samples, _, geometry, _ = cache.make_cache(pipe, model_folder, args)
epoch = [sample for sample in samples for _ in range(sample.repeats)]
scheduler_config = FlowMatchEulerDiscreteScheduler.from_pretrained(model_folder / "scheduler").config

# Model: the frozen base, and on it a LoRA, {name: parameter}, that learns (its alpha is its rank, as ComfyUI assumes).
transformer = predict.load_transformer(transformer_folder, args.dtype, file=transformer_file)
torch.manual_seed(args.seed)
names = predict.find_layers(transformer, args.lora_targets) # for peft; it leaves out layers whose output nothing reads
lora = predict.add_lora(transformer, **names, r=args.lora_rank, lora_alpha=args.lora_rank, init_lora_weights="gaussian")
predict.place_transformer(transformer, args.device, args.quantize, args.offload)
checkpoint_blocks(transformer, args.gradient_checkpointing, preserve_rng_state=False) # as there is no dropout
try:
    optimizer = locate(args.optimizer)(lora.values(), **dict(lr=args.lr, weight_decay=0.01) | dict(args.optimizer_args))
except Exception as e: # a foreign class can fail in any way
    raise InputError(f"--optimizer {args.optimizer}: {first_words(e)}; give a class and its --optimizer_args")
if hasattr(optimizer, "eval"):
    raise InputError(f"--optimizer {args.optimizer}: is schedule-free, which only train.py can use; take another")

# Continue. Data, and all flags but these, must be what they were.
may_change = "out_dir cache_dir save_every resume flash_attention max_tokens gradient_checkpointing offload".split()
config = {k: str(v) for k, v in vars(args).items() if k not in may_change and not k.endswith("device")}
config["samples"] = common.content_key(files=[file.stem for sample in epoch for file in cache.files_of(sample)])
state_file, log = args.out_dir / "state.safetensors", args.out_dir / "log.jsonl"
step, lines = 0, [json.dumps(dict(command=sys.argv, flags=vars(args)), default=str)]
if saved:
    stray_files.refuse_outside(log, args.out_dir)
    tensors, state = tensor_files.read_tensors(state_file)
    if changed := [name for name in config if state["config"].get(name) != config[name]]:
        raise InputError(f"--resume: {args.out_dir} was begun with other {', '.join(changed)}; give the old ones")
    step, lines = state["step"], stray_files.read_text(log, common.LONG_TEXT).splitlines()
    for name, p in lora.items():
        p.data.copy_(tensors[name])
    optimizer.load_state_dict(torch.load(io.BytesIO(tensors["optimizer"].numpy()), "cpu", weights_only=True))
if rank == 0: # a line for each step is in the log: those of later steps go, as these steps run again
    common.write_file(log, "".join(f"{line}\n" for line in lines[:step + 1]).encode(), rb'\A\{"command": ')

# The loop. A thread loads the next step while this one computes. A signal is noted, and ends the run after the step.
with common.catch_signals() as signals:
    for loaded in common.run_ahead(load_step, range(step, args.max_steps)):
        t0 = time.perf_counter()
        # A step's loss is the mean of its samples' losses, so every pack adds its part to p.grad, whoever computes it.
        numbers = torch.zeros(args.batch_size + 1, device=args.device) # a loss for each position, signals seen
        for p in lora.values(): # zero where a process has no pack
            p.grad = torch.zeros_like(p)
        for positions, items in loaded.result():
            losses = list(flow_loss(items))
            (sum(losses) / args.batch_size).backward()
            numbers[[position % args.batch_size for position in positions]] = torch.stack(losses).detach()
        numbers[-1] = len(signals)
        if world_size > 1: # sums over the processes
            for shared in (numbers, *[p.grad for p in lora.values()]):
                torch.distributed.all_reduce(shared)
        *losses, stop = numbers.tolist()
        loss = sum(losses) / args.batch_size
        # Clip the gradient, and end before a step that would ruin the weights: one NaN makes all of them NaN.
        grad_norm = torch.nn.utils.clip_grad_norm_(lora.values(), args.max_grad_norm).item()
        if not math.isfinite(loss + grad_norm):
            raise InputError(f"{log}: step {step + 1} has loss {loss}, gradient {grad_norm}; mend masks, or lower --lr")
        for group in optimizer.param_groups:
            group["lr"] = lr = learning_rate(step)
        torch.manual_seed(generator("optimizer", step).initial_seed()) # for an optimizer that draws random numbers
        optimizer.step()
        step += 1
        # Log and save. First the LoRA: killed before it has the state, too, the run repeats these steps after --resume.
        if rank == 0:
            record = dict(step=step, loss=loss, lr=lr, grad_norm=grad_norm, seconds=time.perf_counter() - t0)
            tell(f"step {step}  loss {loss:.4f}  gradient {grad_norm:.3g}  {record['seconds']:.3g} s")
            with open(log, "a", encoding="utf-8") as f:
                f.write(json.dumps(record) + "\n")
        if rank == 0 and (stop or step == args.max_steps or step % args.save_every == 0):
            predict.save_lora(args.out_dir / predict.LORA_FILE, transformer, dict(step=step, geometry=geometry))
            pickled = io.BytesIO() # its state may have any form, so the file has these bytes. (train.py has no pickles)
            torch.save(optimizer.state_dict(), pickled)
            tensors = lora | dict(optimizer=torch.frombuffer(pickled.getbuffer(), dtype=torch.uint8))
            tensor_files.write_tensors(state_file, tensors, dict(step=step, config=config))
            tell(f"{args.out_dir / predict.LORA_FILE}: trained for {step} of {args.max_steps} steps")
        if stop:
            break
if world_size > 1:
    torch.distributed.destroy_process_group()
