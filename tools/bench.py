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
$ python tools/bench.py --predict          # sampling: N jobs of mixed sizes in one batch, or N stock pipeline calls
$ python tools/bench.py --cost             # does the time grow in proportion to the FLOPs?
$ python tools/bench.py --size full --device cuda --preset mixed_1024 --rounds 15  # the real 60 blocks, random weights

Times are compared only within a round. A line shows the median and the quartiles of a ratio over all rounds, beside the
ratio of the FLOPs. A round without a clock comes first: in it all ways must agree on the loss and on every LoRA
gradient.
"""
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import extras # first, so that no other folder is taken for one of our modules
import common

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

parser = common.Parser(__doc__)
flag = parser.group("what to time")
flag("--cost", False, "measure how the time grows with the tokens, and with the number of samples")
flag("--predict", False, "time sampling instead of training")
flag("--size", "small", "full: the real shape, with 41 GB of weights", choices=["small", "full"])
flag("--preset", None, "which samples (default: mixed mild uniform; with --size full four others)", nargs="+",
     choices=PRESETS)
flag = parser.group("how")
flag("--rounds", 9, "number of timed rounds; use 9 or more for a figure that you quote", type=common.positive)
flag("--device", "cpu", "cpu, cuda, cuda:1, ...")
flag("--dtype", None, "dtype of the model (default: float32; with --size full bfloat16)",
     choices=["float32", "bfloat16"])
flag("--threads", 1, "CPU threads; with 1 the clock is processor time, with more wall time", type=common.positive)
flag("--padded_batch", 4, "samples per padded batch", type=common.positive)
flag("--checkpointing", None, "recompute this many blocks in the backward pass; stock can recompute only all or none "
     "(default: none; with --size full all)", type=common.natural, metavar="BLOCKS")
flag("--compile", False, "torch.compile the blocks of packed")
args = parser.parse_args()

# What follows takes seconds to import, so it comes behind the flags.
import numpy as np
import psutil
import torch
import transformers
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock_code
from PIL import Image

import cache
import predict
from rope_patch import checkpoint_blocks, patch_qwen_model_for_multi_resolution
from tools.bench_common import (MODELS, flops, loss_of, make_model, make_samples, matmul_rate, open_device, peak_gib,
                                run_on, seconds, share, with_lora, with_pads)

dtype = getattr(torch, args.dtype or ("bfloat16" if args.size == "full" else "float32"))
torch.set_num_threads(args.threads)
device_name = open_device(args.device, dtype)
transformers.utils.logging.disable_progress_bar()
config = dict(MODELS[args.size])
layers = config["num_layers"]
if args.checkpointing is None:
    args.checkpointing = layers if args.size == "full" else 0

# ---- the ways --------------------------------------------------------------------------------------------------------

PADDED = ("padded", "sorted")
MODES = dict(packed="packed", **dict.fromkeys(PADDED, "with pads")) # of run_on; all other ways are stock

def batches_of(samples, way):
    n = args.padded_batch
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

def ratio(times, way, reference="packed"):
    """-> the text of time(way) / time(reference): median and quartiles of the ratios within each round."""
    low, median, high = np.quantile(times[way] / times[reference], [.25, .5, .75])
    return f"{median:5.2f} [{low:.2f}, {high:.2f}]" + (" INVALID" if high - low > .1 * median else "")

def explain(lines):
    if any("INVALID" in line for line in lines):
        print("INVALID: the quartiles are more than 10 % apart; measure again on a quieter machine")

def head(title):
    load = " ".join(f"{x:.1f}" for x in psutil.getloadavg())
    print()
    print(f"{title} | {args.size} {str(dtype)[6:]} | {device_name} | torch {torch.__version__} | load {load}")

# ---- training --------------------------------------------------------------------------------------------------------

def make_ours():
    """-> the patched model, as train.py sets it up."""
    ours = patch_qwen_model_for_multi_resolution(with_lora(make_model(config, dtype, args.device)))
    if args.checkpointing:
        checkpoint_blocks(ours, args.checkpointing)
    if args.compile:
        import extras.compile # which looks for a compiler
        extras.compile.compile_blocks(ours.transformer_blocks)
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
    head(f"preset {preset}: (image, text) tokens {' '.join(map(str, lens))}")

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
    explain(lines)

# ---- growth ----------------------------------------------------------------------------------------------------------

def bench_cost():
    """Times one sample of 512 to 16k tokens, then 4096 tokens split into 2 to 16 samples. The ratio of time to FLOPs
    should stay the same."""
    def tokens(n): # n in all: target, control, text
        return f"{n // 64}x32 {n // 64}x28 {n // 16}"
    model = make_ours()
    sets = {f"1 x {n}": [tokens(n)] for n in (512, 1024, 2048, 4096, 8192, 16384)}
    sets |= {f"{k} x {4096 // k}": [tokens(4096 // k)] * k for k in (2, 4, 8, 16)}
    samples = {name: make_samples(config, s, dtype, args.device) for name, s in sets.items()}
    ways = {name: lambda s=s: step("packed", dict(packed=model), s) for name, s in samples.items()}
    for way in ways.values():
        way()
    head("time against FLOPs, packed")
    times = interleave(ways, args.rounds)
    print("samples x tokens   s/step   time / (1 x 4096), quartiles   FLOPs / (1 x 4096)")
    cost = {name: flops_of("packed", [s]) for name, s in samples.items()}
    lines = [f"{name:16s} {np.median(times[name]):8.3f}   {ratio(times, name, '1 x 4096'):28s} "
             f"{cost[name] / cost['1 x 4096']:12.2f}" for name in ways]
    print(*lines, sep="\n")
    explain(lines)

# ---- sampling --------------------------------------------------------------------------------------------------------

def bench_predict():
    """Times jobs of mixed sizes: in one batch through predict.py's functions, and one by one through the stock
    pipeline. Both encode pictures and prompts every time (ours into files, as predict.py does); neither decodes."""
    area, sizes = 192 * 192, [(192, 192), (256, 128), (128, 256), (288, 160), (96, 96), (160, 224)]
    geometry = dict(target_pixels=[area], control_pixels=area, upscale=True)
    folder = cache.find_model("tiny", cache.ENCODERS)
    pipe = cache.load_pipeline(folder)
    flags = SimpleNamespace(dtype=str(dtype)[6:], vae_device=args.device, text_encoder_device=args.device,
                            quantize_text_encoder="none", max_sequence_length=1024)
    for part in ("vae", "text"):
        cache.load_encoder(pipe, part, flags)
    config["joint_attention_dim"] = 64 # the width of tiny's text encoder, which encodes here
    ours = patch_qwen_model_for_multi_resolution(make_model(config, dtype, args.device).eval())
    pipe.transformer = share(ours).eval()
    pipe.set_progress_bar_config(disable=True)
    stock_code.VAE_IMAGE_SIZE = area # (it was 1024 * 1024)
    with tempfile.TemporaryDirectory() as flags.cache_dir:
        jobs, models = [], cache.encoder_fingerprints(folder, flags.cache_dir)
        for i, (width, height) in enumerate(sizes):
            file = f"{flags.cache_dir}/{i}.png"
            Image.fromarray(np.random.default_rng(i).integers(0, 255, (height, width, 3), np.uint8)).save(file)
            settings = common.SAMPLING | dict(num_inference_steps=4, width=width, height=height, seed=i)
            jobs.append(common.make_sample("--predict", file, i, None, [file], ["add a red border"], settings=settings))

        def batch():
            encoded = []
            for job in jobs:
                cache.plan_sample(pipe, job, predict.text_keys_of(job), geometry, models, flags)
                for file, (part, what) in cache.files_of(job).items():
                    tensors = (cache.encode_latents(pipe, job, what) if part == "vae" else
                               cache.encode_text(pipe, job, what))
                    common.write_tensors(file, tensors, dict(version=common.VERSION, key=file.stem))
                encoded.append(predict.load_job(job, args.device))
            return predict.denoise(ours, pipe.scheduler.config, encoded, max_tokens=20_000)

        def single():
            return [pipe(Image.open(job.controls[0]), job.prompts[0], generator=torch.Generator().manual_seed(seed),
                         output_type="latent", **{k: v for k, v in job.settings.items() if k not in ("seed", "shift")}
                         ).images[0] for seed, job in enumerate(jobs)]

        with torch.no_grad():
            worst = torch.stack([(a - b).norm() / b.norm() for a, b in zip(batch(), single())]).max().item()
        if not worst <= (1e-4 if dtype == torch.float32 else 0.05):
            raise SystemExit(f"error: predict: its latents are off by {worst:.1e}; its time would mean nothing")
        head(f"predict: {len(jobs)} jobs of mixed sizes, 4 steps, CFG")
        times = interleave(dict(batch=batch, single=single), args.rounds)
    line = f"N stock calls / one batch of N: {ratio(times, 'single', 'batch')}"
    print(f"worst distance of the latents {worst:.1e}")
    print(line)
    explain([line])

if args.predict:
    bench_predict()
elif args.cost:
    bench_cost()
else:
    models = make_models()
    for preset in args.preset or dict(small=["mixed", "mild", "uniform"], full=[
            "mixed_512", "uniform_512", "mixed_1024", "single_1024"])[args.size]:
        bench_training(preset, models)
