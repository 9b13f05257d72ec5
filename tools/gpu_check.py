"""
One command to run when you have a GPU: are the numbers right there, how long does a step take, how much memory?

$ python tools/gpu_check.py --minutes 7                  # the real 60 blocks, random weights
$ python tools/gpu_check.py --device cpu                 # a small model: shows only that this script runs

    claims   runs test_consistency.py on the device, in fp32 and in bf16
    numbers  compares packed, padded, low-bit and compiled steps to fp32, recomputed and offloaded ones to plain ones,
             and train.py --fsdp on two GPUs to one
    fit      what training/memory_fit.py expects of the largest pass, and how much memory real steps take
    speed    a step in several ways: its time, tokens/s, share of the matmul rate and memory, beside what --plan expects
    nccl     times an all-reduce on two GPUs

What tests/fake_card proves without a GPU is not repeated here. It rewrites --out after every line, and ends with
Markdown tables for README; after --minutes, Ctrl-C or SIGTERM it does so at once. The exit status is 1 if something is
`wrong` or `broken`. To run out of memory is a result, not a failure.
"""
import _thread
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from functools import cache, partial
from itertools import starmap
from pathlib import Path
from types import SimpleNamespace

BEGUN = time.monotonic() # here, so that the imports below count too
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8") # without this, cuBLAS's sums may differ between calls

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import library # first, so that no other folder is taken for one of our modules
import common
from library.cli import command_line
from library.files import disk
from library.models import environment

# per sample, in tokens: height x width of its target and of its controls, and the length of its text
PACKS = dict(
    full=[["64x64 64x64 108"], ["32x32 32x32 250"] * 7,
          ["64x64 64x64 500", "32x32 32x32 300", "48x24 48x24 350", "24x40 24x40 300"]],
    small=[["6x6 6x6 9"], ["4x4 4x4 6"] * 3, ["4x8 4x8 9", "4x4 2x4 4x2 5"]])
# {a way to compute a step: where it differs from train.py's, all blocks recomputed}; FA2, last, is for good
INT8, FP8 = dict(quantize="int8"), dict(quantize="fp8")
WAYS = {"packed": {}, "padded": dict(mode="padded"), "compiled": dict(compiled=True), "kept": dict(recomputed="none"),
        "attention kept": dict(recomputed="all but attention"), "int8": INT8, "fp8": FP8,
        "nf4": dict(quantize="nf4"), "offloaded": dict(offload=60), "int8 compiled": INT8 | dict(compiled=True),
        "fp8 compiled": FP8 | dict(compiled=True), "FA2": dict(flash=2)}
STAGES = ["claims", "numbers", "fit", "speed", "nccl"]

parser = command_line.Parser(__doc__)
flag = parser.group("flags")
flag("--stages", STAGES, "which to run; they keep this order", nargs="+", choices=STAGES)
flag("--minutes", 10.0, "stop after this time, with the results so far; the stage claims gets two fifths of it",
     type=command_line.number(float, 0, 1e5))
flag("--device", "cuda", "cuda, cuda:1, ...; cpu: shows only that this script runs")
flag("--out", Path("gpu_check.json"), "the JSON file with all results", type=Path)
args = parser.parse_args()
environment.refuse_devices(args)
OURS = rb'\A\{\n "about": \{\n  "command": "python ' # how the file of --out begins
common.refuse_to_replace(args.out, OURS)
disk.try_out(args.out.absolute().parent)

# What follows takes seconds to import, so it comes behind the flags.
import diffusers
import peft
import torch
import transformers
from accelerate import init_empty_weights

import predict
from library.models.compilation import compile_blocks
from training import memory_fit, plan
from rope_patch import blocks_of, checkpoint_blocks, patch_qwen_model_for_multi_resolution
from tools import gpu_numbers
from tools.bench_common import (MODELS, end, flops, loss_of, make_model, make_samples, matmul_rate, open_device,
                                peak_gib, read_sample, recompute, run_on, start, started, timed, used_gib, with_lora)

on_card = args.device.startswith("cuda")
size, dtype = ("full", torch.bfloat16) if on_card else ("small", torch.float32)
device_name = open_device(args.device, dtype)
config, packs = MODELS[size], PACKS[size]
matmul = matmul_rate(dtype, args.device) # FLOP/s of a large product

# ---- the stages: generators of rows ----------------------------------------------------------------------------------

def claims():
    """Both dtypes at the same time: the tests are small, and keep the host busier than the GPU."""
    flags = "-m pytest test_consistency.py -q --tb=line -p no:cacheprovider --device".split() + [args.device]
    processes = {name: start(*flags, "--dtype", name) for name in ("float32", "bfloat16")}
    for name, process in processes.items():
        try:
            text = process.communicate(timeout=max(1, BEGUN + 0.4 * 60 * args.minutes - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            end(process)
            yield dict(what=name, note="stopped after two fifths of --minutes")
            continue
        row = dict(what=name, said=text.strip().rpartition("\n")[2]) # the number of tests, or that pytest is missing
        failed = re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", text, re.M)
        yield row | dict(wrong=", ".join(failed)) if process.returncode else row

@dataclass
class Item: # of train.py's items, what a step needs; make_samples has the same names
    target: "float32 I C"
    controls: "base K C"
    prompt: "base T J"
    timestep: "float32"
    img_shapes: list

    @property
    def latents(self):
        return torch.cat([self.target.to(dtype), self.controls])

def losses(model, items, mode="packed"):
    """Stands in for train.py's flow_loss."""
    return [loss_of(items, run_on(model, items, mode))]

def build(quantize="none", offload=0):
    """-> the model as train.py sets it up."""
    model = with_lora(patch_qwen_model_for_multi_resolution(make_model(config, dtype, args.device)))
    return predict.place_transformer(model, args.device, quantize, offload)

def largest_pass():
    """Takes the first pack as the largest that can come."""
    model, samples, said = build(), make_samples(config, packs[0], dtype, args.device), []
    tokens = sum(samples[0].lens)
    flags = SimpleNamespace(device=args.device, batch_size=1, max_tokens=tokens, compile=False, fsdp=False, ema=0,
                            resume=False)
    memory_fit.keep_what_fits(model, {tokens}, 0, Item, losses, partial(checkpoint_blocks, model), flags, said.append)
    optimizer = torch.optim.AdamW(model.lora.values())

    def step():
        optimizer.zero_grad()
        losses(model, samples)[0].backward()
        optimizer.step()
    step() # from the next one on the optimizer's state is in memory
    added, (free, total) = peak_gib(step, args.device), torch.cuda.mem_get_info(args.device)
    row = {"said": said[0], "a step added, GiB": added, "free, GiB": free / 2**30}
    yield row if free > 0.02 * total else row | dict(wrong="less than 2 % of the memory is free")

def without_weights(blocks):
    with init_empty_weights():
        model = diffusers.QwenImageTransformer2DModel(**config | dict(num_layers=blocks)).requires_grad_(False)
    return with_lora(patch_qwen_model_for_multi_resolution(torch.nn.Module.to(model, dtype)))

@cache
def planned(place, mode, recomputed, quantize, offload):
    """-> GiB that --plan expects for a pack. All blocks but the last are alike, so it counts two and three."""
    options = memory_fit.options_of(selective=recomputed == "all but attention")
    two, three = [plan.step_bytes(without_weights(n), Item, partial(losses, mode=mode), map(read_sample, packs[place]),
                                  0 if recomputed == "none" else n, quantize, **options) for n in (2, 3)]
    whole = without_weights(config["num_layers"])
    base, _ = plan.transformer_bytes(whole, quantize, offload, 1)
    lora = sum(p.nbytes for p in whole.lora.values())
    return (base + lora + two + (config["num_layers"] - 2) * (three - two)) / 2**30

def speed(mode="packed", recomputed="all", compiled=False, quantize="none", offload=0, flash=3):
    if flash == 2:
        torch.nn.attention.restore_flash_attention_impl() # from now on
    before = used_gib(args.device)
    model = build(quantize, offload)
    recompute(model, recomputed)
    if compiled:
        compile_blocks(blocks_of(model))
    held = used_gib(args.device) - before
    plain = recomputed == "all" and quantize == "none" and not offload
    for place, pack in enumerate(packs if plain else packs[:1]):
        def step():
            model.zero_grad()
            losses(model, samples, mode)[0].backward()
        samples = make_samples(config, pack, dtype, args.device)
        lens = [s.lens for s in samples]
        took, tokens = timed(step, args.device, before=model.zero_grad), sum(map(sum, lens))
        yield {"tokens": f"{tokens:,} of {len(lens)}", "s": took["seconds"], "tokens/s": tokens / took["seconds"],
               "of matmul": flops(config, lens, tail=False) / took["seconds"] / matmul,
               "first call, s": took["first call"], "GiB": held + took["added GiB"],
               "planned GiB": planned(place, mode, recomputed, quantize, offload)}

def nccl():
    yield json.loads(gpu_numbers.on_two("-m", "tools.gpu_numbers").splitlines()[-1])

# ---- the run ---------------------------------------------------------------------------------------------------------

def table(rows):
    """-> the rows as a Markdown table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *[[str(row.get(c, "")) for c in columns] for row in rows]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)

def write(stage, row):
    row = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
    found[stage].append(row)
    print(f"{stage}: " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    common.write_file(args.out, json.dumps(dict(about=about, **found), indent=1).encode(), OURS)

def end_in_time(ended):
    """Sends the main thread SIGTERM after --minutes, if it has not `ended`: a bit early, as a running kernel cannot be
    interrupted; and again, as Python ignores what is raised in a destructor. (Windows has no timer that sends it.)"""
    wait = max(0.1, BEGUN + 0.98 * 60 * args.minutes - time.monotonic())
    while not ended.wait(wait):
        if os.name == "nt":
            _thread.interrupt_main(signal.SIGTERM)
        else: # this one also ends a system call
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        wait = 5

about = dict(command=common.shell_command(["python", *sys.argv]), device=device_name, cuda=torch.version.cuda,
             **{m.__name__: m.__version__ for m in (torch, diffusers, transformers, peft)})
print(*[f"{key}: {value}" for key, value in about.items()], sep="\n")
setup = SimpleNamespace(config=config | dict(num_layers=gpu_numbers.BLOCKS), pack=packs[-1], dtype=dtype,
                        device=args.device)
compared = dict(modes=gpu_numbers.modes(setup), few_bits=gpu_numbers.few_bits(setup),
                equal_bits=gpu_numbers.equal_bits(setup), sharded=gpu_numbers.sharded(setup),
                compiled=gpu_numbers.few_bits(setup, compiled=True)) # this comes last because it takes minutes
jobs = dict(claims=dict(claims=claims()), fit=dict(largest=largest_pass()), nccl=dict(nccl=nccl()),
            numbers={name: starmap(gpu_numbers.row, rows) for name, rows in compared.items()},
            speed={name: speed(**way) for name, way in WAYS.items()})
if not on_card:
    del jobs["fit"]["largest"]
if not on_card or torch.cuda.device_count() < 2:
    del jobs["nccl"]["nccl"], jobs["numbers"]["sharded"]
if not torch.nn.attention.current_flash_attention_impl(): # library/models/devices.py has chosen it
    del jobs["speed"]["FA2"]
if "nf4" not in gpu_numbers.KINDS:
    del jobs["speed"]["nf4"]
found = {stage: [] for stage in STAGES if stage in args.stages}
stage, name = args.stages[0], "nothing" # until the loop below
signal.signal(signal.SIGTERM, signal.default_int_handler) # a KeyboardInterrupt, as libraries catch all Exceptions
ended = threading.Event()
threading.Thread(target=end_in_time, args=(ended,), daemon=True).start()
try:
    for stage, name in [(stage, name) for stage in found for name in jobs[stage]]:
        # kernels of the stage numbers add up in a fixed order, without which no two results would have equal bits
        torch.use_deterministic_algorithms(stage == "numbers")
        try:
            for row in jobs[stage][name]:
                write(stage, dict(what=name) | row)
        except (Exception, common.InputError) as e: # (an InputError is a SystemExit)
            print(*traceback.format_exc().splitlines(), sep="\n", file=sys.stderr)
            broken = dict(broken=f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}")
            no_memory = torch.OutOfMemoryError in (type(e), type(e.__context__)) # place_transformer hides it in another
            write(stage, dict(what=name) | (dict(note="out of memory") if no_memory else broken))
        torch._dynamo.reset() # its graphs would keep the model
        gc.collect()
        torch.cuda.empty_cache()
except KeyboardInterrupt:
    write(stage, dict(what=name, note="stopped here"))
finally:
    ended.set()
    torch.use_deterministic_algorithms(False)
    for process in started:
        end(process)
for stage, rows in found.items():
    if rows:
        print("", f"**{stage}**", "", *table(rows).splitlines(), sep="\n")
print(args.out)
sys.exit(int(any("wrong" in row or "broken" in row for rows in found.values() for row in rows)))
