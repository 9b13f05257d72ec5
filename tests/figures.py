"""
Do the commands still print the figures that README.md, README.zh.md and GUIDE.md claim? Each row below has a piece of
the documents' text, where its numbers stand in the output of a command, and how far the two may differ.

$ python tests/figures.py                        # lists the commands, and what the documents say they print
$ python tests/figures.py --only demo bench      # runs these, and compares
$ python tests/figures.py --all                  # runs all: hours on one core
$ python tests/figures.py --all --reuse          # compares the outputs of earlier runs with the documents of today

The outputs stay in out/figures/. The exit status is 1 if a figure differs, stands in no document or was not measured.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parents[1]
KEPT = HERE / "out/figures"
DOCUMENTS = "README.md", "README.zh.md", "GUIDE.md"

# ---- parts of commands: $OUT is an empty folder; with $SEED a command runs three times, with the seeds 0, 1 and 2 ----

TRAIN = "python train.py --seed $SEED --out_dir $OUT/run "
# the real model's configs, without weights; each picture of tiny/val has one control, and then 8,315 or 8,404 tokens
REAL = """python -c "from tests.fake_card.program import write_model; write_model('$OUT/real', 60, True)" && """
PLAN = ("train.py --plan --model $OUT/real --data tiny/val --val_data tiny/val --target_pixels 1024x1024 "
        "--control_pixels 1024x1024 --device cpu --max_steps 1000 --sample_every 100 --val_pictures 4 ")
FAULTS = "pytest -s tests/test_faults.py "
# parts of outputs, in which # is a number
VAL = r"^val +\d+ +[\d.]+ +[\d.]+ +#" # the LoRA's column
OUTPUT, GRADIENT = r"\d, from stock: #", "lora.*, from stock: #"
PLANNED = r"^(?: +[\d.]+){3} +# +" # the total; then comes the host's memory
LEAST, INT8, NF4 = [rf"{PLANNED}.*checkpointing 60 --quantize {kind} --offload 0" for kind in ("none", "int8", "nf4")]
OFFLOADED = PLANNED + "#.*60 --quantize int8 --offload 20" # and the host's memory

def cell(row, card):
    """A card's range in a row of --plan, up to its lower end."""
    return rf"^{row}" + r"(?: +\S+)" * ["H200", "H100", "A100", "5090", "4090"].index(card) + " +#-"

def seconds(card):
    return r" .as given[\s\S]*?" + cell("a step, in seconds", card)

def time(card):
    return seconds(card) + r"#[\s\S]*?" + cell("in all", card) + "#"

PADDED_SORTED_SINGLE = r"\npadded .*? # \[.*\nsorted .*? # \[.*\nsingle .*? # \[" # relative to ours
BOTH = r"\b{0}, outputs: # .*\s+.*\b{0}, LoRA gradients: # " # errors of a base in few bits

# ---- the rows --------------------------------------------------------------------------------------------------------

# name: (command, rows of (text, output, which, limit)). text: of a document; # is a number, or `bit-equal`, which is 0;
# a space is any white space; ... is anything short. which: the "last" numbers that the first seed's output has, or of
# all the "mean", "most", "sum" or "range" (least and most). limit: how far the two may be apart, as a number or in
# percent of the claim; "up to": the output has at most the claim. Without these the command has to succeed.
FIGURES = {
    "tiny": ("cat tiny/*/*.safetensors | wc -c | awk '{print $1 / 1e6}'", [("Edit of # MB", "^#$", "last", "0.6")]),
    "demo": (TRAIN + "--cache_dir $OUT/cache", [
        ("step 500: validation loss #", "^step 500: validation loss #", "last", "0.005"),
        ("val # # # # #", "^val +# +# +# +# +#", "last", "0.3"),
        ("known/keep # # # # #", "^known/keep +# +# +# +# +#", "last", "0.3"),
        ("and Muon # dB", VAL, "mean", "0.2")]),
    "adamw": (TRAIN + "--optimizer torch.optim.AdamW --lr 4e-3 --lr_scheduler linear", [
        ("AdamW reaches # dB", VAL, "mean", "0.2")]),
    "adamw_cosine": (TRAIN + "--optimizer torch.optim.AdamW --lr 4e-3 --lr_scheduler cosine", [
        ("with cosine #)", VAL, "mean", "0.2")]),
    "positions": ("pytest -s tests/test_train.py --full -k shared_positions", [
        ("reaches # dB instead of", "^shared +# dB", "last", "0.3"),
        ("dB instead of #", "^mixed +# dB", "last", "0.3"),
        ("text positions alone it reaches #)", "^text +# dB", "last", "0.3"),
        ("the demo reaches # and # dB", r"^mixed +# dB[\s\S]*?^one +# dB", "last", "0.1")]),
    "claims": ("pytest -s test_consistency.py -k 'not bfloat16'", [
        ("knows: outputs and gradients | # |", "", "", ""),
        ("each: outputs, fp32 | up to # |", OUTPUT, "most", "up to"),
        ("linear layer, each by itself | up to # |", GRADIENT, "most", "up to"),
        ("NaN in them changes nothing | # |", "", "", ""),
        ("the formula: loss / gradients | up to # /", r"loss: # \(limit", "last", "up to"),
        ("the formula: loss / gradients | up to ... / # |", "worst LoRA gradient: #", "last", "up to"),
        ("recomputed blocks: losses of a run | up to # |", "(?:time|packs|padded|recomputed): #", "most", "up to"),
        ("a step of the stock pipeline | up to # |", r"velocity at [\d.]+: #", "most", "up to"),
        ("two processes against one: losses of a run | up to # |", "two processes: #", "last", "up to"),
        ("a resumed run: losses, rates, gradient norms, LoRA | # |", "", "", ""),
        ("cached against live encoding | # |", "", "", ""),
        ("pipeline, against `predict.py` | up to # |", "predict.py's LoRA: #", "last", "up to"),
        ("1 to 3 pictures, CFG | up to # |", "from the stock pipeline: #", "most", "up to"),
        ("in one batch against each alone | up to # |", "from alone: #", "most", "up to"),
        ("text positions of the first sample for all | **#, #**", r"errors: \[[^,]*, #, #\]", "last", "0.01")]),
    "bf16": ("pytest -s test_consistency.py -k 'mixed_batch and bfloat16'", [
        ("outputs in bf16 | up to # |", OUTPUT, "most", "up to"),
        ("LoRA gradients in bf16 | up to # |", GRADIENT, "most", "up to")]),
    "compiled": ("pytest -s tests/test_rope_patch.py -k thousands", [
        ("gradients, from fp32 | # to # |", r"weight: # \(limit", "range", "30 %")]),
    "bench": ("python tools/bench.py --preset mixed", [
        ("padded #, padded after sorting #, one at a time #, one at a time with recomputed blocks #",
         PADDED_SORTED_SINGLE + r".*\nstock .*? # \[", "last", "10 %")]),
    "bench_mild": ("python tools/bench.py --preset mild", [
        ("first three take #, # and #", PADDED_SORTED_SINGLE, "last", "10 %")]),
    "plan": (f"{REAL} python {PLAN} && python {PLAN} --quantize int8 --offload 20 "
             f"&& python {PLAN} --quantize int8 && python {PLAN} --quantize nf4 --quantize_text_encoder nf4", [
        ("| all blocks recomputed | #", LEAST, "last", "3 %"),
        ("| `--gradient_checkpointing 0` | #", PLANNED + ".*checkpointing 0", "last", "3 %"),
        ("| `--quantize int8` or `fp8` | #", INT8, "last", "3 %"),
        ("| `--quantize nf4` | # |", NF4, "last", "3 %"),
        ("| `--offload 30` | # | # |", PLANNED + "#.*60 --quantize none --offload 30", "last", "3 %"),
        ("| `--offload all` | # | # |", PLANNED + "#.*60 --quantize none --offload 60", "last", "3 %"),
        ("# GiB for the text encoder in bf16, # with", r"text #; one[\s\S]*?text #; one", "last", "3 %"),
        ("| `--quantize int8 --offload 20` | # | # |", OFFLOADED, "last", "3 %"),
        ("| 24 GB (4090) | ... | # GiB | #-# s | #-# h |", PLANNED + ".*--offload 20" + time("4090"), "last",
         "5 %"),
        ("# s a step, and `nf4` # s", seconds("4090") + r"[\s\S]*?nf4 --offload 0" + seconds("4090"),
         "last", "5 %"),
        ("| 32 GB (5090) | ... | # GiB | #-# s | #-# h |", INT8 + time("5090"), "last", "5 %"),
        ("| 80 GB (A100) | none | # GiB | #-# s | #-# h |", LEAST + time("A100"), "last", "5 %"),
        ("| 80 GB (H100) | none | # GiB | #-# s | #-# h |", LEAST + time("H100"), "last", "5 %")]),
    "two": (f"{REAL} python {PLAN} --quantize nf4 --max_tokens 17000", [
        ("two such samples in one pass take #", NF4, "last", "3 %")]),
    "fsdp": (REAL + "torchrun --nproc_per_node=8 " + PLAN + "--fsdp", [
        ("--fsdp` | #", PLANNED + ".*as given", "last", "3 %")]),
    "eight": (REAL + "torchrun --nproc_per_node=8 " + PLAN + "--batch_size 8", [
        ("`--batch_size 8` take #-# card-hours", cell("card-hours", "H100") + "#", "last", "5 %")]),
    "card": ("pytest -s tests/test_fake_card.py --full -k plan", [("counts the same within # %", "", "", "")]),
    "low_bit": ("pytest -s tests/test_quantization.py -k low_bit_base", [
        (f"| `{kind}` | # / # | # / # |", BOTH.format(kind) + r"[\s\S]*?" + BOTH.format(kind), "last", "6 %")
        for kind in ("int8", "fp8", "nf4")]), # without outlier channels, then with them
    "kill_cache": (FAULTS + "--kills 200 -k cache_killed", [("kill `cache.py` # times", "# kills of", "last", "0")]),
    "kill_train": (FAULTS + "--kills 200 -k training_killed", [("`train.py` # times", "# kills of", "last", "0")]),
    "fuzz": (FAULTS + "--fuzz 1000 -k no_damage", [("| # damages", ": # damages", "sum", "5 %")]),
    "doctor": ("pytest -s tests/test_doctor.py", [("must find # % of most kinds, with at most # %", "", "", "")]),
    "align": ("pytest -s tests/test_automatic_mask.py --full -k also_if_it_was_turned", [
        ("Of # pairs with planted motions it called", "^turned.*: # of", "last", "0"),
        ("# of them were within a quarter", "^turned.*, # within", "last", "0")]),
    "sizes": ("pytest -s tests/test_sizes.py --full", [
        ("aspect ratios it reached # dB and # dB", r"^native, .*result #[\s\S]*?^buckets, .*result #", "mean", "0.3")]),
    "preserve": ("pytest -s tests/test_preserve.py --full -k forgets", [
        (f"| {label} |" + " # |" * 7, f"^{way}: val # #" + r" \| \w+ #" * 5, "last", "0.2") # time: on an idle core
        for way, label in {"nothing": "no `--preserve`", "empty 0.4": "0.4, empty prompt",
                           "lines 0.15": "0.15, prompts named", "lines 0.3": "0.3, prompts named",
                           "lines 0.4": "0.4, prompts named"}.items()])}

# ---- measuring -------------------------------------------------------------------------------------------------------

def find_numbers(pattern, text):
    """-> an array: a row for each place where the pattern fits, with the numbers there."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text).replace("bit-equal", "0")
    places = re.findall(pattern.replace("#", r"([-+]?\d+(?:\.\d+)?(?:e-?\d+)?)"), text, re.M)
    return np.array([[place] if isinstance(place, str) else place for place in places], float)

def output_of(name, command, seed, reuse):
    kept, folder = KEPT / f"{name}-{seed}.txt", KEPT / f"{name}-{seed}"
    if not (reuse and kept.exists()):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}" # in which `python` is this one
        env = dict(PATH=path, OUT=str(folder), SEED=str(seed), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        subprocess.run(["bash", "-c", f"({command}; echo exit status $?) &> {kept}"], cwd=HERE, env=os.environ | env)
    return kept.read_text(errors="replace", encoding="utf-8")

def pick(which, found):
    """found: of each seed, what find_numbers returned -> the numbers to compare."""
    places = np.concatenate(found)
    least, most = places.min(0), places.max(0)
    return dict(last=found[0][-1], mean=places.mean(0), most=most, sum=places.sum(0),
                range=np.array([*least, *most]))[which]

def agree(claim, measured, limit):
    if limit == "up to":
        return bool((measured <= claim).all())
    allowed = abs(claim) * float(limit[:-1]) / 100 if limit.endswith("%") else float(limit)
    return bool((abs(measured - claim) <= allowed + 1e-9).all())

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--only", nargs="+", choices=FIGURES, metavar="NAME")
for flag in ("--all", "--reuse"):
    parser.add_argument(flag, action="store_true")
args = parser.parse_args()
differences = 0
for name in args.only or FIGURES:
    command, rows = FIGURES[name]
    print(f"\n{name}: {command}", flush=True)
    seeds = (0, 1, 2) if "$SEED" in command else (0,)
    outputs = [output_of(name, command, seed, args.reuse) for seed in seeds if args.all or args.only]
    for text, pattern, which, limit in rows:
        words = re.escape(text).replace(r"\ ", r"\s+").replace(r"\.\.\.", r"[\s\S]{0,80}?").replace(r"\#", "#")
        claims = [claim for document in DOCUMENTS
                  for claim in find_numbers(words, (HERE / document).read_text("utf-8"))]
        found = [find_numbers(pattern, output) for output in outputs if pattern]
        measured = pick(which, found) if found and all(map(len, found)) else np.array([])
        verdict = "ok" if outputs else ""
        if not claims:
            verdict = "in no document"
        elif not all("\nexit status 0\n" in output for output in outputs):
            verdict = "the command failed"
        elif outputs and pattern and not len(measured):
            verdict = "not measured"
        elif len(measured) and not all(agree(claim, measured, limit) for claim in claims):
            verdict = "differs"
        differences += verdict not in ("ok", "")
        said, got = [" ".join(f"{x:.5g}" for x in numbers) for numbers in (claims[0] if claims else [], measured)]
        print(f"    {text} | {said or '-'} | {got or '-'} | {limit or 'passes'} | {verdict}", flush=True)
sys.exit(differences > 0)
