"""
One command to run when you have a GPU: are the numbers right there, how long does a step take, how much memory?

$ python tools/gpu_check.py --minutes 7                  # the real 60 blocks, random weights; on a card of any size
$ python tools/gpu_check.py --device cpu                 # a small model: shows only that this script runs

One row is `claims`: test_consistency.py on the device. Each of the others is a way to compute a training step:

    numbers  of a few blocks of the real width and samples of mixed sizes, from stock diffusers' in fp32 with the same
             weights, one sample at a time; a row of EXACT has to have the bits of the row `packed`
    speed    of all blocks, and a 1024x1024 target with one control: its time, tokens/s, share of the matmul rate, and
             the memory in GUIDE's table ("What does it cost?")

It rewrites --out after each of them, and ends with a Markdown table; after --minutes, Ctrl-C or SIGTERM it does so at
once (--rows measures those that are missing). The exit status is 1 if something is `wrong` or `broken`. To run out of
memory is a result, not a failure.
"""
import os
import sys
import time
from pathlib import Path

BEGUN = time.monotonic() # here, so that the imports below count too
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8") # without this, cuBLAS's sums may differ between calls

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import library # first, so that no other folder is taken for one of our modules
import common
from library.cli import command_line
from library.files import disk
from library.models import environment

# {row: where it differs from the first one, as which train.py computes}
INT8, FP8 = dict(quantize="int8"), dict(quantize="fp8")
WAYS = {
    "packed": {},
    "padded": dict(mode="padded"),
    "kept": dict(recomputed="none"),
    "attention_kept": dict(recomputed="all but attention"),
    "offload_30": dict(offload=30),
    "offload_all": dict(offload=60),
    "int8": INT8,
    "int8_offload_20": INT8 | dict(offload=20),
    "fp8": FP8,
    "nf4": dict(quantize="nf4"),
    "compiled": dict(compiled=True),
    "int8_compiled": INT8 | dict(compiled=True),
    "fp8_compiled": FP8 | dict(compiled=True),
    "flash_2": dict(flash_2=True)} # the last, as the newer one does not come back
EXACT = ["kept", "attention_kept", "offload_30", "offload_all"]
LIMITS = dict(int8=0.25, fp8=0.6) # for those that multiply eight bits: about twice what a CPU has, at d = 512
LIMIT = 0.1 # for all others: bf16's rounding; wrong positions are off by 0.3

parser = command_line.Parser(__doc__)
flag = parser.group("flags")
flag("--rows", ["claims", *WAYS], "which to measure; they keep this order", nargs="+", choices=["claims", *WAYS])
flag("--minutes", 10.0, "stop after this time, with the results so far; the claims get two fifths of it",
     type=command_line.number(float, 0, 1e5))
flag("--device", "cuda", "cuda, cuda:1, ...; cpu: shows only that this script runs")
flag("--out", Path("gpu_check.json"), "the JSON file with all results", type=Path)
args = parser.parse_args()
environment.refuse_devices(args)
OURS = rb'\A\{\n "about": \{\n  "command": "python ' # how the file of --out begins
common.refuse_to_replace(args.out, OURS)
disk.try_out(args.out.absolute().parent)

# What follows takes seconds to import, so it comes behind the flags.
import contextlib
import gc
import json
import re
import signal
import subprocess
import traceback
from functools import cache, partial

import diffusers
import numpy as np
import peft
import psutil
import torch
import transformers

import predict
from library.models.compilation import compile_blocks
from training import memory_fit
from rope_patch import blocks_of, checkpoint_blocks, patch_qwen_model_for_multi_resolution
from tools.bench_common import (FEW, MODELS, PRESETS, distance, flops, make_model, make_samples, matmul_rate,
                                open_device, peak_gib, seconds, train_step, used_gib, with_lora)

on_card = args.device.startswith("cuda")
dtype = torch.bfloat16 if on_card else torch.float32
device_name = open_device(args.device, dtype)
whole = MODELS["full" if on_card else "small"]
few = whole | dict(num_layers=FEW)
mixed, pair = [PRESETS[name] for name in (("mixed_1024", "pair_1024") if on_card else ("quick", "quick"))]
matmul = matmul_rate(dtype, args.device) # FLOP/s of a large product

# ---- what is measured: each gives a part of a row --------------------------------------------------------------------

def claims():
    command = "-m pytest test_consistency.py -q --tb=line -p no:cacheprovider --device".split()
    process = subprocess.Popen([sys.executable, *command, args.device], cwd=Path(__file__).parents[1], encoding="utf-8",
                               errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        text, _ = process.communicate(timeout=max(1, seconds_left(0.4)))
    except subprocess.TimeoutExpired:
        return dict(note="stopped after two fifths of --minutes")
    finally:
        end(process)
    row = dict(said=text.strip().rpartition("\n")[2]) # the number of tests, or that pytest is missing
    failed = re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", text, re.M)
    return row | dict(wrong=", ".join(failed) or "it failed") if process.returncode else row

def end(process):
    """Kills a process, and those that it has started: they would occupy the GPU."""
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        for each in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()

def build(config, quantize="none", offload=0, recomputed="all", compiled=False, flash_2=False, dtype=dtype):
    """-> the model with its LoRA, as train.py sets it up."""
    if flash_2:
        torch.nn.attention.restore_flash_attention_impl() # from now on
    model = with_lora(patch_qwen_model_for_multi_resolution(make_model(config, dtype, args.device)))
    predict.place_transformer(model, args.device, quantize, offload)
    options = memory_fit.options_of(selective=recomputed == "all but attention")
    checkpoint_blocks(model, 0 if recomputed == "none" else None, **options)
    if compiled:
        compile_blocks(blocks_of(model))
    return model

def step_of_few(mode="packed", **way):
    """-> loss and gradients, by kernels that add up in a fixed order, without which no two would have equal bits."""
    model, samples = build(few, **way), make_samples(few, mixed, dtype, args.device)
    batches = [[s] for s in samples] if mode == "stock" else [samples]
    torch.use_deterministic_algorithms(True)
    try:
        return train_step(model, batches, mode)
    finally:
        torch.use_deterministic_algorithms(False)

wanted = cache(step_of_few) # several rows are compared with one step

def numbers(name, **way):
    quantize = way.get("quantize", "none") # in fp32 weights of few bits are unpacked
    got, want = step_of_few(**way), wanted(mode="stock", quantize=quantize, dtype=torch.float32)
    row, limit = {"off by": distance(got, want)}, LIMITS.get(quantize, LIMIT)
    if not row["off by"] <= limit: # (NaN fails too)
        row["wrong"] = f"off by more than {limit}"
    elif name in EXACT and not all(map(torch.equal, got, wanted())):
        row["wrong"] = "other bits than packed"
    return row

def speed(mode="packed", **way):
    model, samples = build(whole, **way), make_samples(whole, pair, dtype, args.device)
    step = partial(train_step, model, [samples], mode)
    first = seconds(step, args.device) # it may compile
    held, times = used_gib(args.device), []

    def three_steps():
        for _ in range(3):
            times.append(seconds(step, args.device))
    added = peak_gib(three_steps, args.device)
    took, lens = float(np.median(times)), [s.lens for s in samples]
    return {"s": took, "tokens/s": sum(map(sum, lens)) / took, "of matmul": flops(whole, lens) / took / matmul,
            "first call, s": first, "GiB": held + added}

# ---- the run ---------------------------------------------------------------------------------------------------------

def seconds_left(share):
    """-> of this share of --minutes."""
    return BEGUN + share * 60 * args.minutes - time.monotonic()

def save(name, cells):
    cells = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in cells.items()}
    found[name] = found.get(name, {}) | cells
    print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in cells.items()), flush=True)
    common.write_file(args.out, json.dumps(dict(about=about, rows=found), indent=1).encode(), OURS)

def say_table():
    """Prints what was found as Markdown."""
    columns = list(dict.fromkeys(key for row in found.values() for key in row))
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    for name, row in found.items():
        lines.append([name, *[str(row.get(key, "")) for key in columns]])
    for line in lines:
        print("| " + " | ".join(line) + " |")

about = dict(command=common.shell_command(["python", *sys.argv]), device=device_name, cuda=torch.version.cuda,
             **{m.__name__: m.__version__ for m in (torch, diffusers, transformers, peft)})
print(*[f"{key}: {value}" for key, value in about.items()], sep="\n")
jobs = [("claims", claims)]
for name, way in WAYS.items():
    jobs += [(name, partial(numbers, name, **way)), (name, partial(speed, **way))]
if not torch.nn.attention.current_flash_attention_impl(): # library/models/devices.py has chosen it
    jobs = [(name, job) for name, job in jobs if name != "flash_2"]
    jobs.append(("flash_2", lambda: dict(note="not measured: no newer FlashAttention was chosen here")))
found = {}
signal.signal(signal.SIGTERM, signal.default_int_handler) # a KeyboardInterrupt, as libraries catch all Exceptions
if hasattr(signal, "setitimer"): # Windows looks at the clock between two jobs only
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    # a bit early, as a running kernel cannot be interrupted; and again, as Python ignores what a destructor raises
    signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds_left(0.98)), 5)
try:
    for name, job in [(name, job) for name, job in jobs if name in args.rows]:
        if seconds_left(1) < 0:
            raise KeyboardInterrupt
        try:
            save(name, job())
        except (Exception, common.InputError) as e: # (an InputError is a SystemExit)
            if torch.OutOfMemoryError in (type(e), type(e.__context__)): # place_transformer hides it in another
                save(name, dict(note="out of memory"))
            else:
                print(*traceback.format_exc().splitlines(), sep="\n", file=sys.stderr)
                save(name, dict(broken=f"{type(e).__name__}: {common.first_line(e)}"))
        torch._dynamo.reset() # its graphs would keep the model
        gc.collect()
        torch.cuda.empty_cache()
except KeyboardInterrupt:
    save(name, dict(note="stopped here"))
finally:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
say_table()
print(args.out)
sys.exit(int(any("wrong" in row or "broken" in row for row in found.values())))
