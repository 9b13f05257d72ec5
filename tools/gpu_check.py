"""
One command for the day a card is at hand: are README's claims true there, how fast is it, what does it take?

$ python tools/gpu_check.py                              # the real 60 blocks, random weights: ten minutes on an H200
$ python tools/gpu_check.py --stages speed --minutes 25  # one stage, with time for all of its cells
$ python tools/gpu_check.py --stages claims --tests all -k "not resume"
$ python tools/gpu_check.py --device cpu                 # a small model: shows only that this script runs

    claims     pytest on the device, in fp32 and in bf16, in processes of their own
    distance   packed and padded against stock one at a time, beside the distance between two attention kernels of stock
    numbers    outputs and LoRA gradients, offloaded, recomputed, compiled, by FA3, of low bits, against the plain way;
               train.py resumed, and sharded
    offload    a step with all blocks in host memory, without any there, and the copies alone
    attention  alone and in a step: torch's own (FA2), FA3 or FA4 where its package is installed, on Hopper cuDNN's
    encoding   a prompt with its picture, through a text encoder of the real shape; the VAE's decoder
    fit        what extras/fit.py keeps on this card, and whether three real steps then fit
    speed      s/step, tokens/s, share of the matmul rate, and memory, planned and measured: low bits x compiled x
               checkpointed x packs

The last lines are Markdown tables for README. --out has everything and is rewritten after every line, so that a kill
loses one at most. When --minutes are over all ends: a line says what was at work, and what was not run. Status 1: a
claim is false or something broke; that line says what is `wrong`. To run out of memory is no failure but a result.
"""
import contextlib
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

BEGUN = time.monotonic() # the imports below count too
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8") # without it its sums may differ from call to call

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
# (--quantize, compiled): the more important first, and eager before what takes a minute to compile
GROUPS = [("none", False), ("none", True), ("int8", False), ("int8 unpacked", False), ("nf4", False), ("fp8", False),
          ("int8", True), ("fp8", True), ("nf4", True)]
TESTS = dict(quick=["test_consistency.py"], all=["test_consistency.py", "tests/test_rope_patch.py",
                                                 "tests/test_cuda.py", "tests/test_extras.py"])
STAGES = ["claims", "distance", "numbers", "offload", "attention", "encoding", "fit", "speed"]

parser = common.Parser(__doc__)
parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="what to do, in this order")
parser.add_argument("--minutes", type=common.number(float, 0, 1e5), default=10.0, help="after which it ends, with "
                    "what it has found so far; claims get two fifths of them")
parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; cpu: shows only that this script runs")
parser.add_argument("--size", choices=MODELS, help="full: the real shape, 41 GB (default: full on a card, else small)")
parser.add_argument("--tests", choices=TESTS, default="quick", help="claims: test_consistency.py, or what else has "
                    "something to say about a device too")
parser.add_argument("-k", default="", metavar="EXPRESSION", help="claims: pytest's -k (default: all tests)")
parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="the JSON")
args = parser.parse_args()
common.prepare_folder(args.out.absolute().parent)
if args.out.is_dir():
    parser.error(f"argument --out: {args.out} is a folder; give the name of a file")
on_card = args.device.startswith("cuda")
args.size = args.size or ("full" if on_card else "small")
dtype = torch.bfloat16 if args.size == "full" else torch.float32
device_name = open_device(args.device, dtype)
deadline = BEGUN + 0.98 * 60 * args.minutes # a kernel at work cannot be interrupted
config, packs = MODELS[args.size], PACKS[args.size]
layers, (first_pack, mixed_pack, _) = config["num_layers"], packs.values()
one_kernel = rope_patch.has_varlen(torch.empty(0, dtype=dtype, device=args.device)) # attention, of a pack
matmul = matmul_rate(dtype, args.device) # FLOP/s of a large product

# ---- correctness -----------------------------------------------------------------------------------------------------

def check_claims():
    """Both dtypes at once: the tests are small, and keep the host busier than the card."""
    limit, begin, running = 0.4 * 60 * args.minutes, time.monotonic(), []
    try:
        for name in ("float32", "bfloat16"):
            command = [sys.executable, "-m", "pytest", "-v", "--tb=line", "-p", "no:cacheprovider",
                       *TESTS[args.tests], "-k", args.k, "--device", args.device, "--dtype", name]
            output = tempfile.TemporaryFile("w+", errors="replace")
            running.append((name, output, subprocess.Popen(command, cwd=HERE, stdout=output, stderr=subprocess.STDOUT,
                                                           start_new_session=True)))
        if "speed" in args.stages:
            plan_memory() # half a minute of the host's time, kept for later
        for name, output, process in running:
            try:
                process.wait(max(1, begin + limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                end(process)
            yield result_of(name, output, process, time.monotonic() - begin)
    finally: # a test left behind would hold the card
        for _, _, process in running:
            end(process)

def result_of(name, output, process, took):
    output.seek(0)
    text = output.read()
    found = dict(re.findall(r"^(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)", text, re.M))
    failed = [test.split("::")[1] for test, result in found.items() if result in ("FAILED", "ERROR")]
    row = dict(dtype=name, passed=list(found.values()).count("PASSED"), failed=len(failed), seconds=took)
    if process.returncode < 0:
        row["note"] = f"stopped after {took:.0f} s"
    if failed or not row["passed"]:
        row["wrong"] = ", ".join(failed) or text.strip().rpartition("\n")[2] # that pytest is missing, say
    return row

@torch.no_grad()
def check_distance():
    """Relative L2 distances, the worst of a pack's samples. In bf16 packed may be 1e-2 from stock, or three times as
    far as stock is from itself under another kernel; in fp32 it has the limit of README's proof."""
    far = lambda got: max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, want))
    for blocks, kind in ((layers, torch.bfloat16), (min(layers, 4), torch.float32)):
        stock = heat(make_model(config | dict(num_layers=blocks), kind, args.device)).eval()
        ours = patch_qwen_model_for_multi_resolution(share(stock).eval())
        samples = make_samples(config, mixed_pack, kind, args.device)
        shapes, times = [s.shapes for s in samples], torch.stack([s.timestep for s in samples])
        pack = [s.latents for s in samples], [s.prompt for s in samples], times
        one_at_a_time = lambda shapes: [
            stock(x[None], prompt[None], timestep=t[None].to(kind), img_shapes=[shape], return_dict=False)[0][0]
            for x, prompt, t, shape in zip(*pack, shapes)]
        want = one_at_a_time(shapes)
        other = SDPBackend.EFFICIENT_ATTENTION if on_card and kind == torch.bfloat16 else SDPBackend.MATH
        with sdpa_kernel(other):
            noise = far(one_at_a_time(shapes))
        limit = 1e-5 if kind == torch.float32 else max(1e-2, 3 * noise)
        swapped = far(one_at_a_time([[(f, w, h) for f, h, w in shape] for shape in shapes]))
        packed, padded = far(run_packed(ours, *pack, shapes)), far(run_padded(ours, *pack, shapes))
        for what, distance, good in (
                (f"stock, {other.name}", noise, True), ("shown wrong: sides swapped", swapped, swapped > limit),
                ("packed", packed, packed <= limit), ("padded", padded, padded <= limit)):
            row = dict(model=f"{blocks} blocks, {str(kind)[6:]}", what=what, distance=distance, limit=limit)
            yield row if good else row | dict(wrong="on the wrong side of the limit")

def check_numbers():
    with contextlib.closing(gpu_numbers.comparisons(config, mixed_pack, dtype, args.device)) as comparisons:
        for rows in comparisons:
            yield from (dict(what=rows.__name__) | row for row in guarded(rows))

# ---- steps -----------------------------------------------------------------------------------------------------------

def build(quantize="none", compiled=False):
    """The model as train.py sets it up, on the device, every block checkpointed."""
    model = patch_qwen_model_for_multi_resolution(make_model(config, dtype, args.device))
    predict.place_transformer(with_lora(model), args.device, quantize)
    recompute(model, "all")
    for block in model.transformer_blocks if compiled else []:
        block.compile(dynamic=True)
    return model

def measure(model, pack):
    """Time and memory of a training step over a pack: forward, loss, backward."""
    def step():
        model.zero_grad()
        loss_of(samples, run_on(model, samples)).backward()

    gc.collect() # what a step that ran out of memory has left
    samples = make_samples(config, pack, dtype, args.device)
    row, lens = timed(step, args.device, before=model.zero_grad), [s.lens for s in samples]
    return row | {"tokens/s": sum(map(sum, lens)) / row["seconds"],
                  "of matmul": flops(config, lens, tail=False) / row["seconds"] / matmul}

def check_offload():
    """A step copies twice, forward and backward. hiding: 1 if it takes no longer than its copies or its work, whichever
    is longer; unhidden: the same if they came one after the other."""
    model = build()
    away = sum(p.nbytes for p in model.transformer_blocks.parameters() if not p.requires_grad)
    if on_card and plan.free_bytes("cpu") < 1.1 * away: # the kernel would end a process
        yield dict(note=f"not run: the host has less than {1.1 * away / 2**30:.0f} GiB free")
        return
    near = measure(model, first_pack)["seconds"]
    predict.place_transformer(model, args.device, offload=layers)
    far = measure(model, first_pack)
    host = torch.empty(2**28 if on_card else 2**24, dtype=torch.uint8, pin_memory=on_card)
    there = torch.empty_like(host, device=args.device)
    bandwidth = len(host) / min(seconds(lambda: there.copy_(host, non_blocking=True), args.device) for _ in range(9))
    copies = 2 * away / bandwidth
    yield {"on the card, s": near, "offloaded, s": far["seconds"], "copies, s": copies, "GB/s": bandwidth / 1e9,
           "hiding": far["seconds"] / max(near, copies), "unhidden": (near + copies) / max(near, copies),
           "added GiB": far["added GiB"], "host GiB": away / 2**30}

def attention_alone(kernel):
    """Forward and backward pass of the attention of one sample."""
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
    found = torch.nn.attention.current_flash_attention_impl() # extras/cuda.py has chosen it for all else here
    model = build()
    for kernel in (found, "FA2", found) if found else ("FA2",):
        if kernel == "FA2" and found:
            torch.nn.attention.restore_flash_attention_impl()
        elif found:
            torch.nn.attention.activate_flash_attention_impl(found)
        yield dict(kernel=kernel, of="one sample, alone") | attention_alone(kernel)
        yield dict(kernel=kernel, of="a step") | measure(model, mixed_pack)
    if on_card and torch.cuda.get_device_capability() == (9, 0): # which may be worth a road of its own
        yield dict(kernel="cuDNN", of="one sample, alone") | attention_alone("cuDNN")

@torch.no_grad()
def check_encoding():
    folder = cache.find_model("tiny", cache.ENCODERS) # for its tokenizer
    pipe, depths = cache.load_pipeline(folder), (28, 32) if plan.free_bytes(args.device) > 20 * 2**30 else (4, 4)
    depths = depths if args.size == "full" else None
    pipe.processor.image_processor = cache.Qwen2VLImageProcessorPil() # tiny's makes pictures smaller
    pipe.text_encoder = make_text_encoder(folder, depths, dtype, args.device)
    image, prompt = Image.effect_noise((384, 384), 64).convert("RGB"), "let a storm come up behind the house. " * 8
    yield {"what": "prompt and picture", "layers": str(depths or "small"),
           "tokens": cache.prompt_length(pipe, prompt, [(384, 384)]),
           "weights GiB": plan.model_bytes(pipe.text_encoder) / 2**30} | timed(
               lambda: cache.encode_prompt(pipe, prompt, [image]), args.device)
    pipe.text_encoder = None
    shape = {} if args.size == "full" else AutoencoderKLQwenImage.load_config(folder / "vae")
    vae = torch.nn.Module.to(AutoencoderKLQwenImage.from_config(shape), args.device, dtype) # diffusers' own .to warns
    for side in (64, 128) if args.size == "full" else (4, 8): # in tokens
        latents = torch.randn(side * side, 64, device=args.device)
        yield {"what": f"decoding {16 * side} x {16 * side}", "weights GiB": plan.model_bytes(vae) / 2**30} | timed(
            lambda: predict.decode(vae, latents, [(1, side, side)]), args.device)

@dataclass
class Item:
    """What `losses` needs of train.py's items, in the same letters."""
    x0: "float32 I C"
    s: "float32"
    controls: "base K C"
    prompt: "base T J"
    img_shapes: list

def losses(model, items):
    """As train.py's flow_loss."""
    samples = [SimpleNamespace(latents=torch.cat([i.x0.to(dtype), i.controls]), prompt=i.prompt, target=i.x0,
                               timestep=i.s, shapes=i.img_shapes) for i in items]
    return [loss_of(samples, run_on(model, samples))]

def check_fit():
    if not on_card:
        yield dict(note="only on a card")
        return
    model, said = build(), []
    samples = make_samples(config, first_pack, dtype, args.device)
    tokens = sum(map(sum, [s.lens for s in samples]))
    flags = SimpleNamespace(device=args.device, batching="packed", batch_size=1, max_tokens=tokens, compile=False)
    recompute_first = functools.partial(checkpoint_blocks, model)
    optimizer = torch.optim.AdamW(model.lora.values())
    try:
        again = fit.keep_what_fits(model, {tokens}, Item, losses, recompute_first, flags, said.append)
        for _ in range(3):
            loss_of(samples, run_on(model, samples)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except (torch.OutOfMemoryError, common.InputError):
        yield dict(said=said, wrong="what was kept does not fit")
        return
    free, total = torch.cuda.mem_get_info(args.device)
    row = {"recomputed": again, "said": said[0], "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
           "reserved GiB": torch.cuda.max_memory_reserved() / 2**30, "free GiB": free / 2**30}
    yield row if free > 0.02 * total else row | dict(wrong="less than 2 % are free")

# ---- speed and memory ------------------------------------------------------------------------------------------------

@functools.cache
def plan_memory():
    """What --plan says, in GiB -> ({quantize: base}, LoRA, {(pack, checkpointed blocks, quantize): step})."""
    with init_empty_weights():
        model = QwenImageTransformer2DModel(**config).requires_grad_(False)
    model = with_lora(patch_qwen_model_for_multi_resolution(torch.nn.Module.to(model, dtype)))
    lora = sum(p.nbytes for p in model.lora.values()) / 2**30
    base = {name: plan.transformer_bytes(model, name.split()[0], 0, 1)[0] / 2**30 for name, _ in GROUPS}
    steps = {}
    for name, pack in packs.items():
        sizes = [([(1, *hw) for hw in pictures], text) for pictures, text in pack]
        tokens = sum(text + sum(h * w for h, w in pictures) for pictures, text in pack)
        all_again, none_again = [plan.step_bytes(model, Item, losses, sizes, n) for n in (layers, 0)]
        kept = config["attention_head_dim"] * dtype.itemsize + 4 # of a head and token: its output, and a scale in fp32
        attention = layers * tokens * config["num_attention_heads"] * kept
        peaks = {"all": all_again, "all but attention": all_again + attention, "none": none_again}
        for (again, peak), quantize in itertools.product(peaks.items(), base):
            steps[name, again, quantize] = (peak + plan.product_bytes(model, quantize, tokens)) / 2**30
    return base, lora, steps

def cells():
    """-> (quantize, compiled, checkpointed, name of the pack)"""
    for quantize, compiled in GROUPS:
        plain = quantize == "none" and not compiled
        ways = ("all", "all but attention", "none") if plain else ("all", "none")
        yield from itertools.product([quantize], [compiled], ways, packs)

def why_not(quantize, again):
    if time.monotonic() > deadline:
        return "not run"
    if quantize == "nf4" and not find_spec("bitsandbytes"):
        return "bitsandbytes is not installed"
    if again == "all but attention" and not one_kernel:
        return "attention is not one kernel here"

def counted(model, pack, again):
    """What --plan expects of such a step on this card, if it knows it."""
    lengths = [text + sum(h * w for h, w in pictures) for pictures, text in pack]
    cards = [card for card in plan.RATES if re.search(rf"\b{card}\b", device_name)]
    return {"counted": plan.step_seconds(model, lengths, card, again != "none", again == "all but attention", 0)[0]
            for card in cards}

def check_speed():
    group = None
    for quantize, compiled, again, name in cells():
        row = dict(pack=name, weights=quantize, checkpointed=again, compiled=compiled)
        if group != (quantize, compiled):
            group = quantize, compiled
            model = failure = None
        if note := why_not(quantize, again):
            row["note"] = note
        elif failure:
            row |= failure
        else:
            try:
                base, lora, steps = plan_memory()
                row["planned"] = [base[quantize], lora, steps[name, again, quantize]]
                if model is None:
                    torch._dynamo.reset() # its graphs would keep the model before
                    before = used_gib(args.device)
                    model = build(quantize.split()[0], compiled)
                    base_gib = used_gib(args.device) - before - lora
                    if "unpacked" in quantize:
                        unpack(model)
                recompute(model, again)
                row |= measure(model, packs[name])
                if group == ("none", False): # which is what it counts
                    row |= counted(model, packs[name], again)
                row["measured"] = [base_gib, lora, row.pop("added GiB")]
                if quantize in ("int8", "fp8") and not multiplies(model, dtype, args.device):
                    row["remark"] = "unpacked: no such products here"
            except (Exception, common.InputError, OutOfTime) as e: # of the compiler, say: other cells may have figures
                problem = reason(e)
                row |= problem
                failure = problem if model is None else None # the group's, which cannot be built
        yield row

# ---- all of it -------------------------------------------------------------------------------------------------------

class OutOfTime(BaseException): # a class because libraries catch every Exception
    """--minutes are over."""

def ring(number, frame):
    raise OutOfTime

def set_alarm(on):
    """It rings again if no one hears: what is raised in a destructor is lost."""
    left = max(1e-3, deadline - time.monotonic())
    signal.setitimer(signal.ITIMER_REAL, left if on else 0, 5)

def reason(e):
    """What a line has instead of figures. (place_transformer makes an InputError of it.)"""
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
    """Markdown."""
    columns = sorted(dict.fromkeys(key for row in rows for key in row), key=["limit", "note", "wrong"].count)
    lines = [columns, ["---"] * len(columns), *[[text_of(row.get(c, "")) for c in columns] for row in rows]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)

def beside(rows, figures):
    """The rows of `speed`, a compiled one beside its eager one."""
    pairs = {}
    for row in rows:
        if "pack" not in row: # of the stage itself, which broke
            row = dict(pack="-", weights="-", checkpointed="-", compiled=False) | row
        key = row["pack"], row["weights"], row["checkpointed"]
        pair = pairs.setdefault(key, dict(zip(("pack", "weights", "checkpointed blocks"), key)))
        said = [figures(row)] if "seconds" in row else []
        said += [row[key] for key in ("note", "wrong", "remark") if key in row]
        pair["compiled" if row["compiled"] else "eager"] = ", ".join(said)
    return list(pairs.values())

def summary(found):
    """README's tables."""
    sums = lambda gib: "{:.1f} + {:.1f} + {:.1f} = {:.1f}".format(*gib, sum(gib))
    tables = {stage: rows for stage, rows in found.items() if stage != "speed"}
    if "speed" in found:
        tables["Speed, of a step"] = beside(found["speed"], lambda row: (
            f"{row['seconds']:.3g} s ({text_of(row.get('counted', '-'))} counted), {row['tokens/s']:,.0f} tok/s, "
            f"{row['of matmul']:.0%}"))
        tables["Memory in GiB: base + LoRA + step; planned -> measured"] = beside(found["speed"], lambda row: (
            f"{sums(row['planned'])} -> {sums(row['measured'])}"))
    return "\n".join(f"**{title}**\n\n{table(rows)}" for title, rows in tables.items())

def guarded(rows):
    """These rows; if one breaks, a line that says so is the last."""
    try:
        yield from rows
    except (Exception, common.InputError) as e: # (the latter is none of the former)
        yield reason(e)

for number in (signal.SIGINT, signal.SIGTERM): # so that check_claims ends its tests
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
    if late and stage != "speed": # whose cells say so one by one
        rows = guarded([dict(note="not run")])
    try:
        set_alarm(not late)
        for row in rows:
            write(stage, row)
    except OutOfTime as e:
        row = reason(e) # no more alarms
        rows.close() # ends the processes of that stage
        write(stage, row)
    set_alarm(False)
    gc.collect()
    torch.cuda.empty_cache()
    print(f"{stage}: {time.monotonic() - begin:.0f} s")
print(f"\n{summary(found)}\n{args.out}")
sys.exit(int(any("wrong" in row for rows in found.values() for row in rows)))
