"""
One command to run when you have a GPU: do README's claims hold there, how fast is it, how much memory does it need?

$ python tools/gpu_check.py                              # the real 60 blocks, random weights: ten minutes on an H200
$ python tools/gpu_check.py --stages speed --minutes 25  # one stage, with time for all of its cells
$ python tools/gpu_check.py --stages claims --tests all -k "not resume"
$ python tools/gpu_check.py --device cpu                 # a small model: shows only that this script runs

    claims     runs pytest on the device, in fp32 and in bf16, in processes of their own
    distance   packed and padded against stock, one sample at a time; for scale, stock with another attention kernel
    numbers    compares outputs and LoRA gradients of steps that are offloaded, recomputed, compiled, in low bits or
               with FA3 to those of a plain step; resumes and shards a run of train.py
    offload    times a step with all blocks in host memory, a step with none there, and the copies alone
    attention  times each kernel alone and in a step: torch's (FA2), FA3 or FA4 if installed, and cuDNN's on Hopper
    encoding   times a prompt with its picture in a text encoder of the real shape, and the VAE's decoder
    fit        shows what extras/fit.py keeps in this GPU's memory, and whether three real steps then fit
    speed      measures s/step, tokens/s and the share of the matmul rate, and memory beside its plan, for
               combinations of low bits, compiling, checkpointing and packs

It ends by printing Markdown tables for README. It rewrites --out after every line, so a kill loses one line at most.
When --minutes are over it stops: one line says which measurement was cut short, others say what was not run. The exit
status is 1 if a claim is false or something broke; the line then says what is `wrong`. Running out of memory is a
result, not a failure.
"""
import contextlib
import copy
import functools
import gc
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

BEGUN = time.monotonic() # here, so that the imports below count too
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8") # without this, cuBLAS's sums may differ between calls

import diffusers
import peft
import torch
import torch.nn.functional as F
import transformers
from accelerate import init_empty_weights
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))
import cache
import common
import predict
import rope_patch
from extras import fit, plan
from rope_patch import checkpoint_blocks, patch_qwen_model_for_multi_resolution, run_packed, run_padded
from tools import gpu_numbers
from tools.bench_common import (MODELS, end, flops, heat, loss_of, make_model, make_samples, make_text_encoder,
                                matmul_rate, multiplies, open_device, recompute, run_on, seconds, share, timed,
                                unpack, used_gib, with_lora)

# per sample: sides in tokens (height, width) of the target and of its controls, and text tokens
PACKS = dict(
    full={"8.3k x 1": [([(64, 64), (64, 64)], 108)],
          "16k mixed": [([(64, 64), (64, 64)], 500), ([(32, 32), (32, 32)], 300), ([(48, 24), (48, 24)], 350),
                        ([(24, 40), (24, 40)], 300)],
          "512 px x 7": [([(32, 32), (32, 32)], 250)] * 7},
    small={"one": [([(6, 6), (6, 6)], 9)], "mixed": [([(4, 8), (4, 8)], 9), ([(4, 4), (2, 4), (4, 2)], 5)],
           "equal": [([(4, 4), (4, 4)], 6)] * 3})
# (--quantize, compiled): the important ones come first, then eager before compiled, as compiling takes a minute
GROUPS = [("none", False), ("none", True), ("int8", False), ("int8 unpacked", False), ("nf4", False), ("fp8", False),
          ("int8", True), ("fp8", True), ("nf4", True)]
TESTS = dict(quick=["test_consistency.py"], all=["test_consistency.py", "tests/test_rope_patch.py",
                                                 "tests/test_cuda.py", "tests/test_extras.py"])
STAGES = ["claims", "distance", "numbers", "offload", "attention", "encoding", "fit", "speed"]

parser = common.Parser(__doc__)
parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="which to run; they keep this order")
parser.add_argument("--minutes", type=common.number(float, 0, 1e5), default=10.0,
                    help="stop after this time, with the results so far; the stage claims gets two fifths of it")
parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; cpu: shows only that this script runs")
parser.add_argument("--size", choices=MODELS, help="full: the real shape, 41 GB (default: full on a GPU, else small)")
parser.add_argument("--tests", choices=TESTS, default="quick",
                    help="claims: quick runs test_consistency.py; all adds the other tests that depend on the device")
parser.add_argument("-k", default="", metavar="EXPRESSION", help="claims: pytest's -k (default: all tests)")
parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="the JSON file with all results")
args = parser.parse_args()
common.prepare_folder(args.out.absolute().parent)
if args.out.is_dir():
    parser.error(f"argument --out: {args.out} is a folder; give the name of a file")
on_card = args.device.startswith("cuda")
args.size = args.size or ("full" if on_card else "small")
dtype = torch.bfloat16 if args.size == "full" else torch.float32
device_name = open_device(args.device, dtype)
deadline = BEGUN + 0.98 * 60 * args.minutes # a bit early, as a running kernel cannot be interrupted
config, packs = MODELS[args.size], PACKS[args.size]
layers, (first_pack, mixed_pack, _) = config["num_layers"], packs.values()
one_kernel = rope_patch.has_varlen(torch.empty(0, dtype=dtype, device=args.device)) # computes a whole pack's attention
matmul = matmul_rate(dtype, args.device) # FLOP/s of a large product

# ---- correctness -----------------------------------------------------------------------------------------------------

def check_claims():
    """Tests both dtypes at the same time: the tests are small, and keep the host busier than the GPU."""
    limit, begin, running = 0.4 * 60 * args.minutes, time.monotonic(), []
    try:
        for name in ("float32", "bfloat16"):
            command = [sys.executable, "-m", "pytest", "-v", "--tb=line", "-p", "no:cacheprovider",
                       *TESTS[args.tests], "-k", args.k, "--device", args.device, "--dtype", name]
            output = tempfile.TemporaryFile("w+", errors="replace")
            running.append((name, output, subprocess.Popen(command, cwd=HERE, stdout=output, stderr=subprocess.STDOUT,
                                                           start_new_session=True)))
        if "speed" in args.stages:
            plan_memory() # it takes the host half a minute, and its result is cached for the stage speed
        for name, output, process in running:
            try:
                process.wait(max(1, begin + limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                end(process)
            yield result_of(name, output, process, time.monotonic() - begin)
    finally: # a test left behind would occupy the GPU
        for _, _, process in running:
            end(process)

def result_of(name, output, process, took):
    """-> a row that counts the tests of a pytest process and names those that failed."""
    output.seek(0)
    text = output.read()
    results = dict(re.findall(r"^(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)", text, re.M))
    failed = [test.split("::")[1] for test, result in results.items() if result in ("FAILED", "ERROR")]
    row = dict(dtype=name, passed=list(results.values()).count("PASSED"), failed=len(failed), seconds=took)
    if process.returncode < 0:
        row["note"] = f"stopped after {took:.0f} s"
    if failed or not row["passed"]:
        row["wrong"] = ", ".join(failed) or text.strip().rpartition("\n")[2] # for example that pytest is missing
    return row

@torch.no_grad()
def check_distance():
    """Relative L2 distances, each the largest among a pack's samples. In bf16 the limit is 1e-2, or three times the
    distance between stock's own results with two attention kernels; in fp32 it is the limit of README's proof."""
    def distance(got):
        return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, want))

    def one_at_a_time(shapes):
        return [stock(x[None], prompt[None], timestep=t[None].to(kind), img_shapes=[shape], return_dict=False)[0][0]
                for x, prompt, t, shape in zip(*pack, shapes)]
    for blocks, kind in ((layers, torch.bfloat16), (min(layers, 4), torch.float32)):
        stock = heat(make_model(config | dict(num_layers=blocks), kind, args.device)).eval()
        ours = patch_qwen_model_for_multi_resolution(share(stock).eval())
        samples = make_samples(config, mixed_pack, kind, args.device)
        shapes, times = [s.shapes for s in samples], torch.stack([s.timestep for s in samples])
        pack = [s.latents for s in samples], [s.prompt for s in samples], times
        want = one_at_a_time(shapes)
        other = SDPBackend.EFFICIENT_ATTENTION if on_card and kind == torch.bfloat16 else SDPBackend.MATH
        with sdpa_kernel(other):
            noise = distance(one_at_a_time(shapes))
        limit = 1e-5 if kind == torch.float32 else max(1e-2, 3 * noise)
        swapped = distance(one_at_a_time([[(f, w, h) for f, h, w in shape] for shape in shapes]))
        packed, padded = distance(run_packed(ours, *pack, shapes)), distance(run_padded(ours, *pack, shapes))
        for what, value, good in (
                (f"stock, {other.name}", noise, True), ("shown wrong: sides swapped", swapped, swapped > limit),
                ("packed", packed, packed <= limit), ("padded", padded, padded <= limit)):
            row = dict(model=f"{blocks} blocks, {str(kind)[6:]}", what=what, distance=value, limit=limit)
            yield row if good else row | dict(wrong="on the wrong side of the limit")

def check_numbers():
    with contextlib.closing(gpu_numbers.comparisons(config, mixed_pack, dtype, args.device)) as comparisons:
        for rows in comparisons:
            yield from (dict(what=rows.__name__) | row for row in guarded(rows))

# ---- steps -----------------------------------------------------------------------------------------------------------

def build(quantize="none", compiled=False):
    """-> the model as train.py sets it up, on the device, with every block checkpointed."""
    model = patch_qwen_model_for_multi_resolution(make_model(config, dtype, args.device))
    predict.place_transformer(with_lora(model), args.device, quantize)
    recompute(model, "all")
    for block in model.transformer_blocks if compiled else []:
        block.compile(dynamic=True)
    return model

def measure(model, pack):
    """-> time and memory of a training step over a pack: forward pass, loss, backward pass."""
    def step():
        model.zero_grad()
        loss_of(samples, run_on(model, samples)).backward()

    gc.collect() # a step that ran out of memory leaves tensors behind
    samples = make_samples(config, pack, dtype, args.device)
    row, lens = timed(step, args.device, before=model.zero_grad), [s.lens for s in samples]
    return row | {"tokens/s": sum(map(sum, lens)) / row["seconds"],
                  "of matmul": flops(config, lens, tail=False) / row["seconds"] / matmul}

def check_offload():
    """A step copies all weights twice, forward and backward. hiding: the step's time, divided by that of its copies or
    its computation, whichever takes longer; 1 is ideal. unhidden: what that would be if one followed the other."""
    model = build()
    weights = sum(p.nbytes for p in model.transformer_blocks.parameters() if not p.requires_grad)
    if on_card and plan.free_bytes("cpu") < 1.1 * weights: # Linux would kill a process
        yield dict(note=f"not run: the host has less than {1.1 * weights / 2**30:.0f} GiB free")
        return
    plain = measure(model, first_pack)["seconds"]
    predict.place_transformer(model, args.device, offload=layers)
    offloaded = measure(model, first_pack)
    host = torch.empty(2**28 if on_card else 2**24, dtype=torch.uint8, pin_memory=on_card)
    copy = torch.empty_like(host, device=args.device)
    bandwidth = len(host) / min(seconds(lambda: copy.copy_(host, non_blocking=True), args.device) for _ in range(9))
    copies = 2 * weights / bandwidth
    yield {"on the card, s": plain, "offloaded, s": offloaded["seconds"], "copies, s": copies, "GB/s": bandwidth / 1e9,
           "hiding": offloaded["seconds"] / max(plain, copies), "unhidden": (plain + copies) / max(plain, copies),
           "added GiB": offloaded["added GiB"], "host GiB": weights / 2**30}

def attention_alone(kernel):
    """-> time and memory of one sample's attention, forward and backward pass."""
    samples = make_samples(config, first_pack, dtype, args.device)
    n, heads, dim = sum(samples[0].lens), config["num_attention_heads"], config["attention_head_dim"]
    q, k, v = [torch.randn(n, heads, dim, dtype=dtype, device=args.device, requires_grad=True) for _ in range(3)]
    bounds, grad = torch.tensor([0, n], dtype=torch.int32, device=args.device), torch.randn_like(q)

    def both_passes():
        if kernel == "cuDNN":
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = F.scaled_dot_product_attention(*[x.transpose(0, 1)[None] for x in (q, k, v)])[0].transpose(0, 1)
        else:
            out = rope_patch.varlen_attn(q, k, v, bounds, bounds, n, n)
        torch.autograd.grad(out, (q, k, v), grad)

    row = timed(both_passes, args.device)
    return row | {"TFLOP/s": 3.5 * 4 * n**2 * heads * dim / row["seconds"] / 1e12}

def check_attention():
    if not one_kernel:
        yield dict(kernel="FA2, FA3, FA4", note="not for this device")
        return
    chosen = torch.nn.attention.current_flash_attention_impl() # extras/cuda.py has chosen it for the other stages too
    model = build()
    for kernel in (chosen, "FA2", chosen) if chosen else ("FA2",):
        if kernel == "FA2" and chosen:
            torch.nn.attention.restore_flash_attention_impl()
        elif chosen:
            torch.nn.attention.activate_flash_attention_impl(chosen)
        yield dict(kernel=kernel, of="one sample, alone") | attention_alone(kernel)
        yield dict(kernel=kernel, of="a step") | measure(model, mixed_pack)
    if on_card and torch.cuda.get_device_capability() == (9, 0): # on Hopper cuDNN may be worth supporting
        yield dict(kernel="cuDNN", of="one sample, alone") | attention_alone("cuDNN")

@torch.no_grad()
def check_encoding():
    folder = cache.find_model("tiny", cache.ENCODERS) # its tokenizer serves both sizes
    pipe, depths = cache.load_pipeline(folder), (28, 32) if plan.free_bytes(args.device) > 20 * 2**30 else (4, 4)
    depths = depths if args.size == "full" else None
    pipe.processor.image_processor = cache.Qwen2VLImageProcessorPil() # tiny's own makes pictures smaller
    pipe.text_encoder = make_text_encoder(folder, depths, dtype, args.device)
    image, prompt = Image.effect_noise((384, 384), 64).convert("RGB"), "let a storm come up behind the house. " * 8
    yield {"what": "prompt and picture", "layers": str(depths or "small"),
           "tokens": cache.prompt_length(pipe, prompt, [(384, 384)]),
           "weights GiB": plan.model_bytes(pipe.text_encoder) / 2**30} | timed(
               lambda: cache.encode_prompt(pipe, prompt, [image]), args.device)
    pipe.text_encoder = None
    shape = {} if args.size == "full" else AutoencoderKLQwenImage.load_config(folder / "vae")
    vae = torch.nn.Module.to(AutoencoderKLQwenImage.from_config(shape), args.device, dtype) # (diffusers' .to warns)
    for side in (64, 128) if args.size == "full" else (4, 8): # in tokens
        latents = torch.randn(side * side, 64, device=args.device)
        yield {"what": f"decoding {16 * side} x {16 * side}", "weights GiB": plan.model_bytes(vae) / 2**30} | timed(
            lambda: predict.decode(vae, latents, [(1, side, side)]), args.device)

@dataclass
class Item:
    """The fields of train.py's items that `losses` needs, with the same shape letters."""
    x0: "float32 I C"
    s: "float32"
    controls: "base K C"
    prompt: "base T J"
    img_shapes: list

def losses(model, items):
    """Stands in for train.py's flow_loss."""
    samples = [SimpleNamespace(latents=torch.cat([i.x0.to(dtype), i.controls]), prompt=i.prompt, target=i.x0,
                               timestep=i.s, shapes=i.img_shapes) for i in items]
    return [loss_of(samples, run_on(model, samples))]

def check_fit():
    if not on_card:
        yield dict(note="only on a GPU")
        return
    model, messages = build(), []
    samples = make_samples(config, first_pack, dtype, args.device)
    tokens = sum(map(sum, [s.lens for s in samples]))
    flags = SimpleNamespace(device=args.device, batching="packed", batch_size=1, max_tokens=tokens, compile=False)
    recompute_first = functools.partial(checkpoint_blocks, model)
    optimizer = torch.optim.AdamW(model.lora.values())
    try:
        recomputed = fit.keep_what_fits(model, {tokens}, Item, losses, recompute_first, flags, messages.append)
        for _ in range(3):
            loss_of(samples, run_on(model, samples)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except (torch.OutOfMemoryError, common.InputError):
        yield dict(said=messages, wrong="what it kept does not fit")
        return
    free, total = torch.cuda.mem_get_info(args.device)
    row = {"recomputed": recomputed, "said": messages[0], "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
           "reserved GiB": torch.cuda.max_memory_reserved() / 2**30, "free GiB": free / 2**30}
    yield row if free > 0.02 * total else row | dict(wrong="less than 2 % of the memory is free")

# ---- speed and memory ------------------------------------------------------------------------------------------------

@functools.cache
def plan_memory():
    """-> the memory that --plan expects, in GiB: ({quantize: base}, LoRA, {(pack, checkpointed blocks, quantize):
    step})."""
    with init_empty_weights():
        model = QwenImageTransformer2DModel(**config).requires_grad_(False)
    model = with_lora(patch_qwen_model_for_multi_resolution(torch.nn.Module.to(model, dtype)))
    lora = sum(p.nbytes for p in model.lora.values()) / 2**30
    base = {name: plan.transformer_bytes(model, name.split()[0], 0, 1)[0] / 2**30 for name, _ in GROUPS}
    steps = {}
    for name, pack in packs.items():
        sizes = [([(1, *hw) for hw in pictures], text) for pictures, text in pack]
        tokens = sum(text + sum(h * w for h, w in pictures) for pictures, text in pack)
        kept = config["attention_head_dim"] * dtype.itemsize + 4 # per head and token: an output, and a scale in fp32
        attention = layers * tokens * config["num_attention_heads"] * kept
        all_blocks, no_blocks = [plan.step_bytes(copy.deepcopy(model), Item, losses, sizes, n) for n in (layers, 0)]
        peaks = {"all": all_blocks, "all but attention": all_blocks + attention, "none": no_blocks}
        # what products of few bits hold for a while shows in a model of the first blocks
        few = copy.deepcopy(model)
        few.transformer_blocks = few.transformer_blocks[:3]
        count = functools.cache(lambda kind: plan.step_bytes(copy.deepcopy(few), Item, losses, sizes, 3, kind))
        for (checkpointed, peak), quantize in itertools.product(peaks.items(), base):
            kind = "nf4" if "unpacked" in quantize else quantize # which --plan counts as unpacked
            steps[name, checkpointed, quantize] = (peak + count(kind) - count("none")) / 2**30
    return base, lora, steps

def cells():
    """Yields (quantize, compiled, checkpointed, name of the pack) of each cell of the table."""
    for quantize, compiled in GROUPS:
        plain = quantize == "none" and not compiled
        ways = ("all", "all but attention", "none") if plain else ("all", "none")
        yield from itertools.product([quantize], [compiled], ways, packs)

def why_not(quantize, checkpointed):
    """-> why a cell cannot be measured, or None."""
    if time.monotonic() > deadline:
        return "not run"
    if quantize == "nf4" and not find_spec("bitsandbytes"):
        return "bitsandbytes is not installed"
    if checkpointed == "all but attention" and not one_kernel:
        return "attention is not one kernel here"

def counted(model, pack, checkpointed):
    """-> how long --plan expects such a step to take on this GPU, if it knows the GPU."""
    lengths = [text + sum(h * w for h, w in pictures) for pictures, text in pack]
    cards = [card for card in plan.RATES if re.search(rf"\b{card}\b", device_name)]
    return {"counted": plan.step_seconds(model, lengths, card, checkpointed != "none",
                                         checkpointed == "all but attention", 0)[0] for card in cards}

def check_speed():
    group = None
    for quantize, compiled, checkpointed, name in cells():
        row = dict(pack=name, weights=quantize, checkpointed=checkpointed, compiled=compiled)
        if group != (quantize, compiled):
            group = quantize, compiled
            model = failure = None
        if note := why_not(quantize, checkpointed):
            row["note"] = note
        elif failure:
            row |= failure
        else:
            try:
                base, lora, steps = plan_memory()
                row["planned"] = [base[quantize], lora, steps[name, checkpointed, quantize]]
                if model is None:
                    torch._dynamo.reset() # its graphs would keep the previous model in memory
                    before = used_gib(args.device)
                    model = build(quantize.split()[0], compiled)
                    base_gib = used_gib(args.device) - before - lora
                    if "unpacked" in quantize:
                        unpack(model)
                recompute(model, checkpointed)
                row |= measure(model, packs[name])
                if group == ("none", False): # --plan's time is for eager bf16 only
                    row |= counted(model, packs[name], checkpointed)
                row["measured"] = [base_gib, lora, row.pop("added GiB")]
                if quantize in ("int8", "fp8") and not multiplies(model, dtype, args.device):
                    row["remark"] = "unpacked: no such products here"
            except (Exception, common.InputError, OutOfTime) as e: # e.g. the compiler's: other cells may still work
                problem = reason(e)
                row |= problem
                failure = problem if model is None else None # without a model the whole group fails
        yield row

# ---- all of it -------------------------------------------------------------------------------------------------------

class OutOfTime(BaseException): # not an Exception, because libraries catch those
    """--minutes are over."""

def ring(number, frame):
    raise OutOfTime

def set_alarm(on):
    """The alarm repeats every 5 seconds, because Python ignores what a signal handler raises within a destructor."""
    remaining = max(1e-3, deadline - time.monotonic())
    signal.setitimer(signal.ITIMER_REAL, remaining if on else 0, 5)

def reason(e):
    """-> what a line says instead of figures. (An InputError of place_transformer may hide that memory ran out.)"""
    if isinstance(e, OutOfTime):
        set_alarm(False)
        return dict(note="out of time")
    if torch.OutOfMemoryError in (type(e), type(e.__context__)):
        return dict(note="out of memory")
    traceback.print_exception(e)
    return dict(wrong=f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}")

def text_of(value):
    return f"{value:.3g}" if isinstance(value, float) else str(value)

def table(rows):
    """-> the rows as a Markdown table."""
    columns = sorted(dict.fromkeys(key for row in rows for key in row), key=["limit", "note", "wrong"].count)
    lines = [columns, ["---"] * len(columns), *[[text_of(row.get(c, "")) for c in columns] for row in rows]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)

def beside(rows, figures):
    """-> the rows of `speed`, each eager one joined with its compiled one."""
    pairs = {}
    for row in rows:
        if "pack" not in row: # the stage itself broke
            row = dict(pack="-", weights="-", checkpointed="-", compiled=False) | row
        key = row["pack"], row["weights"], row["checkpointed"]
        pair = pairs.setdefault(key, dict(zip(("pack", "weights", "checkpointed blocks"), key)))
        parts = [figures(row)] if "seconds" in row else []
        parts += [row[key] for key in ("note", "wrong", "remark") if key in row]
        pair["compiled" if row["compiled"] else "eager"] = ", ".join(parts)
    return list(pairs.values())

def summary(found):
    """-> the tables for README."""
    def sums(gib):
        return "{:.1f} + {:.1f} + {:.1f} = {:.1f}".format(*gib, sum(gib))
    tables = {stage: rows for stage, rows in found.items() if stage != "speed"}
    if "speed" in found:
        tables["Speed of a step"] = beside(found["speed"], lambda row: (
            f"{row['seconds']:.3g} s ({text_of(row.get('counted', '-'))} counted), {row['tokens/s']:,.0f} tok/s, "
            f"{row['of matmul']:.0%}"))
        tables["Memory in GiB: base + LoRA + step; planned -> measured"] = beside(found["speed"], lambda row: (
            f"{sums(row['planned'])} -> {sums(row['measured'])}"))
    return "\n".join(f"**{title}**\n\n{table(rows)}" for title, rows in tables.items())

def guarded(rows):
    """Yields these rows. If one of them breaks, the last row says so."""
    try:
        yield from rows
    except (Exception, common.InputError) as e: # (an InputError is a SystemExit, not an Exception)
        yield reason(e)

for number in (signal.SIGINT, signal.SIGTERM): # these too must let check_claims end its tests
    signal.signal(number, lambda number, frame: sys.exit(128 + number))
driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                        text=True).stdout.strip() if shutil.which("nvidia-smi") else "none"
about = dict(command=shlex.join(["python", *sys.argv]), device=device_name, driver=driver, size=args.size,
             cuda=torch.version.cuda, **{m.__name__: m.__version__ for m in (torch, diffusers, transformers, peft)})
print(*[f"{key}: {value}" for key, value in about.items()], sep="\n")
found = {}

def write(stage, row):
    found[stage].append(row)
    print(f"{stage}: " + ", ".join(f"{key} {text_of(value)}" for key, value in row.items()), flush=True)
    common.write_file(args.out, json.dumps(dict(about=about, **found), indent=1).encode())

signal.signal(signal.SIGALRM, ring)
for stage in [stage for stage in STAGES if stage in args.stages]:
    print(f"{stage} ...", flush=True)
    found[stage], begin = [], time.monotonic()
    late = begin > deadline
    rows = guarded(globals()[f"check_{stage}"]())
    if late and stage != "speed": # (each cell of speed says so itself)
        rows = guarded([dict(note="not run")])
    try:
        set_alarm(not late)
        for row in rows:
            write(stage, row)
    except OutOfTime as e:
        row = reason(e) # this also stops the alarm
        rows.close() # this ends the stage's processes
        write(stage, row)
    set_alarm(False)
    gc.collect()
    torch.cuda.empty_cache()
    print(f"{stage}: {time.monotonic() - begin:.0f} s")
print(f"\n{summary(found)}\n{args.out}")
sys.exit(int(any("wrong" in row for rows in found.values() for row in rows)))
