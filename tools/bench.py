"""
How fast is a batch of mixed sizes? This script times one training step of a LoRA, computed in several ways that take
turns:

    packed     rope_patch: all samples in one row, without padding or a mask
    padded     stock's forward with rope_patch's attention: batches padded to their longest sample, with a mask
    sorted     the same, but samples of similar length share a batch
    single     stock diffusers with our LoRA layer, one sample at a time
    bucketed   the same with all samples in one batch, which needs equal shapes (preset uniform)
    stock      what other trainers run, uncompiled: one sample at a time, all blocks checkpointed, peft's LoRA in fp32

$ python tools/bench.py                    # small model (d = 512, 2 blocks), three presets: a few minutes
$ python tools/bench.py --what vae --dtype bfloat16 --rounds 2 # the VAE in its real shape, 256 * 256 (full: to 1024)
$ python tools/bench.py --what text --dtype bfloat16 # the text encoder at its real width, with six of its 60 layers
$ python tools/bench.py --size full --device cuda --preset mixed_1024 --rounds 15  # the real 60 blocks, random weights

Times are compared only within a round. A line shows the median and the quartiles of a ratio over all rounds, beside the
ratio of the FLOPs. A round without a clock comes first: in it all ways must agree on the loss and on every LoRA
gradient.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import library # first, so that no other folder is taken for one of our modules
import common
from library.cli import command_line
from library.models import environment

# per sample, in tokens: height x width of its target and of its controls, and the length of its text
PRESETS = dict(
    mixed=["8x8 8x8 20", "16x8 8x16 60", "16x16 16x16 110", "32x16 32x16 175"],
    mild=["15x15 15x15 96", "14x16 16x15 90", "16x16 15x16 115", "15x17 15x16 105"],
    uniform=["16x16 16x16 100"] * 4,
    quick=["2x3 3x2 5", "4x4 4x4 2x2 9", "6x3 3x6 3"], # only shows that it runs
    mixed_512=["32x32 32x32 300", "24x40 24x40 260", "48x24 48x24 32x32 420", "20x20 32x32 230"],
    uniform_512=["32x32 32x32 300"] * 4,
    mixed_1024=["64x64 64x64 500", "32x32 32x32 300", "48x24 48x24 350", "24x40 24x40 300"],
    single_1024=["64x64 64x64 500"])

parser = command_line.Parser(__doc__)
flag = parser.group("what to time")
flag("--what", "training", "training; the VAE with one picture, beside stock's; or the text encoder with the prompts "
     "about one picture, in one pass and one by one", choices=["training", "vae", "text"])
flag("--size", "small", "full: the real shape, with 41 GB of weights", choices=["small", "full"])
flag("--preset", None, "which samples (default: mixed mild uniform; with --size full four others)", nargs="+",
     choices=PRESETS)
flag = parser.group("how")
flag("--rounds", 9, "number of timed rounds; use 9 or more for a figure that you quote", type=command_line.positive)
flag("--device", "cpu", "cpu, cuda, cuda:1, ...")
flag("--dtype", None, "dtype of the model (default: float32; with --size full bfloat16)",
     choices=["float32", "bfloat16"])
flag("--threads", 1, "CPU threads; with 1 the clock is processor time, with more wall time", type=command_line.positive)
flag("--checkpointing", None, "recompute this many blocks in the backward pass; stock can recompute only all or none "
     "(default: none; with --size full all)", type=command_line.natural, metavar="BLOCKS")
flag("--compile", False, "torch.compile the blocks of packed")
args = parser.parse_args()
environment.refuse_devices(args)

# What follows takes seconds to import, so it comes behind the flags.
import numpy as np
import psutil
import torch

from rope_patch import blocks_of, checkpoint_blocks, patch_qwen_model_for_multi_resolution
from tools import bench_text, bench_vae
from tools.bench_common import (MODELS, flops, loss_of, make_model, make_samples, matmul_rate, open_device, peak_gib,
                                run_on, seconds, share, with_lora, with_pads)

dtype = getattr(torch, args.dtype or ("bfloat16" if args.size == "full" else "float32"))
torch.set_num_threads(args.threads)
device_name = open_device(args.device, dtype)
config = MODELS[args.size]
layers = config["num_layers"]
if args.checkpointing is None:
    args.checkpointing = layers if args.size == "full" else 0

# ---- the ways --------------------------------------------------------------------------------------------------------

PADDED, PADDED_BATCH = ("padded", "sorted"), 4 # samples
MODES = dict(packed="packed", **dict.fromkeys(PADDED, "with pads")) # of run_on; all other ways are stock

def batches_of(samples, way):
    n = PADDED_BATCH
    if way == "sorted":
        samples = sorted(samples, key=lambda s: -sum(s.lens))
        n = max(1, n // 2) if len(samples) <= n else n # a single batch would leave nothing to sort
    if way in PADDED:
        return [samples[i:i + n] for i in range(0, len(samples), n)]
    return [samples] if way in ("packed", "bucketed") else [[s] for s in samples]

def step(way, models, samples):
    """Computes one training step -> its loss. The gradients stay in the model."""
    model = models[way]
    for p in model.lora.values():
        p.grad = None
    total = 0.0
    for batch in batches_of(samples, way):
        loss = loss_of(batch, run_on(model, batch, MODES.get(way, "stock")))
        loss.backward()
        total = total + loss.detach()
    return total

# ---- measuring -------------------------------------------------------------------------------------------------------

def interleave(ways, rounds):
    """{name: call} -> {name: seconds of every round}. Every second round reverses the order, so that a machine that
    gets slower or faster affects all of them alike."""
    times = {name: [] for name in ways}
    for r in common.progress("rounds", range(rounds)):
        for name in list(ways) if r % 2 == 0 else reversed(list(ways)):
            times[name].append(seconds(ways[name], args.device))
    return {name: np.array(t) for name, t in times.items()}

def ratio(times, way):
    """-> the text of time(way) / time(packed): median and quartiles of the ratios within each round."""
    low, median, high = np.quantile(times[way] / times["packed"], [.25, .5, .75])
    return f"{median:5.2f} [{low:.2f}, {high:.2f}]" + (" INVALID" if high - low > .1 * median else "")

# ---- training --------------------------------------------------------------------------------------------------------

def make_ours():
    """-> the patched model, as train.py sets it up."""
    ours = patch_qwen_model_for_multi_resolution(with_lora(make_model(config, dtype, args.device)))
    if args.checkpointing:
        checkpoint_blocks(ours, args.checkpointing)
    if args.compile:
        import library.models.compilation # which looks for a compiler
        library.models.compilation.compile_blocks(blocks_of(ours))
    return ours

def make_models():
    """-> {way: model}. All of them share one set of frozen weights; there are four copies of the LoRA."""
    ours = make_ours()
    single, stock = with_lora(share(ours)), with_lora(share(ours), ours=False)
    padded = with_lora(with_pads(share(ours)))
    if args.checkpointing:
        single.enable_gradient_checkpointing()
        padded.enable_gradient_checkpointing()
    stock.enable_gradient_checkpointing()
    return {"packed": ours, **dict.fromkeys(PADDED, padded), "single": single, "stock": stock, "bucketed": single}

def widest(lens):
    return [(max(i for i, _ in lens), max(t for _, t in lens))] * len(lens)

def flops_of(way, batches):
    """-> the FLOPs that this way computes; padding counts as tokens."""
    blocks = args.checkpointing if way == "packed" else layers if way == "stock" or args.checkpointing else 0
    lens = [[s.lens for s in batch] for batch in batches]
    return sum(flops(config, widest(each) if way in PADDED else each, blocks, tail=way != "packed")
               for each in lens)

def bench_training(preset, models):
    samples = make_samples(config, PRESETS[preset], dtype, args.device)
    lens = [s.lens for s in samples]
    equal_shapes = len(set(PRESETS[preset])) == 1
    ways = {way: lambda way=way: step(way, models, samples) for way in models if way != "bucketed" or equal_shapes}
    load = " ".join(f"{x:.1f}" for x in psutil.getloadavg())
    print()
    print(f"preset {preset}: (image, text) tokens {' '.join(map(str, lens))} | {args.size} {str(dtype)[6:]} | "
          f"{device_name} | torch {torch.__version__} | load {load}")

    # the warm-up is also a gate: only ways that compute the same are timed. Each LoRA matrix must agree by itself, as
    # a mean over all could hide a wrong one
    want_loss = ways["single"]()
    want = {name: p.grad.clone() for name, p in models["single"].lora.items() if p.grad is not None}
    limit = 1e-4 if dtype == torch.float32 else 0.05
    for way in list(ways):
        try:
            first = seconds(ways[way], args.device)
            if args.device.startswith("cuda") or args.compile: # its clocks and allocator, or the compiler, warm up
                ways[way]()
                ways[way]()
            loss = ways[way]()
        except torch.OutOfMemoryError:
            print(f"{way:9s} out of memory")
            del ways[way]
            torch.cuda.empty_cache()
            continue
        if args.compile and way == "packed":
            print(f"{way:9s} first call, including compilation: {first:.1f} s")
        off = [((models[way].lora[name].grad - g).norm() / g.norm()).item() for name, g in want.items()]
        if not (abs(loss / want_loss - 1) <= limit and all(x <= limit for x in off)): # (NaN fails too)
            raise SystemExit(f"error: {way}: its loss is {loss:.6f} instead of {want_loss:.6f}, and its worst gradient "
                             f"is off by {max(off):.1e}; it computes something else, so its time would mean nothing")
    times = interleave(ways, args.rounds)

    rate, tokens = matmul_rate(dtype, args.device), sum(i + t for i, t in lens)
    least = flops_of("packed", [samples])
    print("way        s/step  tokens/s   MFU   peak GiB   time / packed, quartiles    FLOPs / packed     time / FLOPs")
    lines = []
    for way in ways:
        s, r = np.median(times[way]), flops_of(way, batches_of(samples, way)) / least
        lines.append(f"{way:9s} {s:7.3f} {tokens / s:9.0f}  {flops(config, lens, tail=False) / s / rate:4.0%} "
                     f"{peak_gib(ways[way], args.device):10.2f}   {ratio(times, way):30s} {r:4.2f} "
                     f"{np.median(times[way] / times['packed']) / r:16.2f}")
        print(lines[-1], flush=True)
    if any("INVALID" in line for line in lines):
        print("INVALID: the quartiles are more than 10 % apart; measure again on a quieter machine")

if args.what != "training":
    bench = dict(vae=bench_vae.bench_vae, text=bench_text.bench_text)[args.what]
    bench(args.size, dtype, args.device, lambda ways: interleave(ways, args.rounds))
    sys.exit()
models = make_models()
for preset in args.preset or dict(small=["mixed", "mild", "uniform"], full=[
        "mixed_512", "uniform_512", "mixed_1024", "single_1024"])[args.size]:
    bench_training(preset, models)
