"""tools/gpu_check.py, on a CPU: the code that a card will run, with a small model."""
import itertools
import json
import math
import os
import signal
import subprocess
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import rope_patch
from extras import offload
from extras import quantize as low_bit
from tests import varlen_cpu # which gives torch's variable-length attention a CPU kernel
from tests.harness import FULL, is_one_line, run_script
from tools import bench_common, gpu_numbers

PACKS = ("one", "mixed", "equal")
CELLS = {*itertools.product(PACKS, ("none", "int8", "fp8", "nf4"), ("all", "none"), (False, True)),
         *itertools.product(PACKS, ["int8 unpacked"], ("all", "none"), [False]),
         *itertools.product(PACKS, ["none"], ["all but attention"], [False])}

def gpu_check(folder, *flags):
    """-> result of run_script with the JSON, whose rows are read by stage."""
    result = run_script("tools/gpu_check.py", "--device", "cpu", "--out", folder / "found.json", *flags)
    result.found = json.loads((folder / "found.json").read_text()) if (folder / "found.json").exists() else {}
    return result

def cells_of(result):
    return {(r["pack"], r["weights"], r["checkpointed"], r["compiled"]): r for r in result.found["speed"]}

@pytest.fixture
def one_call(monkeypatch):
    """Everything is called once, and took a second."""
    def timed(f, device, before=None):
        f()
        return {"seconds": 1.0, "added GiB": 1.0}
    monkeypatch.setattr(bench_common, "timed", timed)

@pytest.fixture
def as_a_card(monkeypatch):
    """The roads that only a card takes, on a CPU. Nothing is compiled: it would take minutes, and test_rope_patch.py
    does it; but the code runs that would be. `compiled`: the options of the calls."""
    monkeypatch.setitem(bench_common.MODELS, "small", bench_common.MODELS["small"] | dict(num_attention_heads=4))
    monkeypatch.setattr(rope_patch, "has_varlen", lambda x: True)
    monkeypatch.setattr(low_bit, "can_multiply", lambda kind, device: True)
    monkeypatch.setattr(low_bit, "has_product", lambda x, layer: (
        layer.multiply and layer.kind in low_bit.TOP and x.numel() > 16 * x.shape[-1]))
    state = SimpleNamespace(compiled=[], compiling=False)
    def compile(self, **options):
        state.compiled.append(options)
        state.compiling = True
    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: setattr(state, "compiling", False))
    compiler = SimpleNamespace(is_compiling=lambda: state.compiling, disable=lambda f: f)
    monkeypatch.setattr(rope_patch, "torch", Overlay(torch, compiler=compiler))
    return state

class Overlay:
    """A module with some other names."""

    def __init__(self, module, **names):
        self.__dict__ = vars(module) | names

def start_no_shards(folder, name, *flags, real=gpu_numbers.start, **options):
    """gpu_numbers.start, but two trainings instead of five: the others take what the first one makes."""
    if FULL or name in ("whole", "resumed"):
        return real(folder, name, *flags, **options)
    (folder / name).symlink_to(folder / "whole")
    return []

def test_every_stage_and_cell_has_figures(tmp_path, monkeypatch, as_a_card):
    monkeypatch.setattr(gpu_numbers, "start", start_no_shards)
    pytest.importorskip("bitsandbytes")
    result = gpu_check(tmp_path, "-k", "get_image_shapes_multi_resolution_from")
    assert result.status == 0, result.err
    found = result.found
    assert [(r["dtype"], r["failed"]) for r in found["claims"]] == [("float32", 0), ("bfloat16", 0)]
    good = [r["what"] for r in found["distance"] if 0 <= r.pop("distance") <= r["limit"]] # 0: bit-equal
    assert good == ["stock, MATH", "packed", "padded"] * 2
    numbers = {r["what"]: (r.pop("limit"), *[r.pop(k) for k in ("outputs", "gradients", "losses", "LoRA") if k in r])
               for r in found["numbers"] if "note" not in r}
    assert all(max(distances) <= limit for limit, *distances in numbers.values())
    assert all(min(numbers[f"{kind} products from unpacked"]) > 0 for kind in ("int8", "fp8")) # or nothing was unpacked
    assert [what for what, (limit, *_) in numbers.items() if limit == 0] == EQUAL_BITS
    assert numbers.keys() - EQUAL_BITS == NEAR
    assert cells_of(result).keys() == CELLS and "not run" not in result.out
    assert as_a_card.compiled == [dict(dynamic=True)] * (2 * gpu_numbers.BLOCKS + 2 * 4) # 4: groups of cells
    flat = lambda x: [y for value in x for y in flat(value)] if isinstance(x, list) else [x]
    figures = [x for rows in found.values() if isinstance(rows, list) for row in rows for x in flat(list(row.values()))
               if isinstance(x, float)]
    assert len(figures) > 48 * 10 and all(math.isfinite(x) and x > 0 for x in figures), figures
    assert found["encoding"][0]["tokens"] > 14 * 14 # a picture as the real model sees it
    assert found["about"]["torch"] == torch.__version__ and "--device cpu" in found["about"]["command"]
    # the tables that README would get: a cell of Speed and one of Memory for each of the two
    tables = result.out[result.out.index("**Speed"):]
    assert tables.count("tok/s") == tables.count("->") - 1 == len(CELLS)

EQUAL_BITS = ["recomputed from kept", "all but attention recomputed, from kept", "recomputed from kept, LoRA dropout",
              "all but attention recomputed, from kept, LoRA dropout", "offloaded from on the device, kept",
              "offloaded from on the device, recomputed", "train.py resumed, from unbroken"]
NEAR = {"int8 products from unpacked", "fp8 products from unpacked", "compiled from eager, LoRA on attention",
        "compiled from eager, LoRA on all-linear", "train.py, two processes with --fsdp, from one"}

@pytest.fixture
def faults(monkeypatch):
    """One for each pair of ways: FA3 is 3 % off, dropout is another when it is recomputed, two blocks are exchanged in
    host memory, an input's scale is left out, and modulations get no gradient when compiled."""
    flash = ["FA3"]
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: flash[-1])
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: flash.append(None))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", flash.append)
    attention = rope_patch.varlen_attn
    monkeypatch.setattr(rope_patch, "varlen_attn", lambda *a: attention(*a) * (1.03 if flash[-1] else 1))
    checkpoint = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *args, **options: (
        checkpoint(*args, **options, preserve_rng_state=False)))
    copy_ahead = offload.copy_ahead
    monkeypatch.setattr(offload, "copy_ahead", lambda blocks, hosts, buffers, device: (
        copy_ahead(blocks, [hosts[1], hosts[0], *hosts[2:]], buffers, device)))
    product = low_bit.eight_bit_product
    monkeypatch.setattr(low_bit, "eight_bit_product", lambda rows, row_scale, *more, **fast: (
        product(rows, torch.full_like(row_scale, row_scale.mean()), *more, **fast)))
    monkeypatch.setattr(rope_patch, "RowsByIndex", SimpleNamespace(apply=lambda rows, index: rows.detach()[index]))

def test_a_wrong_number_is_status_1(tmp_path, monkeypatch, as_a_card, faults):
    """Each fault turns its own rows and no others. A training that fails is one too, and ends no other row."""
    def start(folder, name, *_, **__):
        (folder / f"{name}.txt").write_text("step 1\nerror: no luck\n")
        return [subprocess.Popen(["sleep", "60"], start_new_session=True), subprocess.Popen(["false"])]
    monkeypatch.setattr(gpu_numbers, "start", start)
    result = gpu_check(tmp_path, "--stages", "numbers")
    wrong = {r["what"]: r["wrong"] for r in result.found["numbers"] if "wrong" in r}
    assert result.status == 1 and "wrong" in result.out[result.out.index("**numbers**"):]
    assert {what for what, words in wrong.items() if words == "beyond the limit"} == {
        "FA3 from FA2", *EQUAL_BITS[2:6], "int8 products from unpacked", "fp8 products from unpacked",
        "compiled from eager, LoRA on all-linear"}
    assert {what: words for what, words in wrong.items() if words != "beyond the limit"} == dict.fromkeys(
        ["resumed", "sharded"], "RuntimeError: error: no luck")

def test_all_but_attention_is_computed_again(monkeypatch, as_a_card):
    calls, real = [], varlen_cpu.varlen_reference
    monkeypatch.setattr(varlen_cpu, "varlen_reference", lambda *args: calls.append(1) or real(*args))
    setup = SimpleNamespace(config=bench_common.MODELS["small"], pack=[([(4, 4)], 5)] * 2, dtype=torch.float32,
                            device="cpu")
    model, counts = gpu_numbers.build(setup), []
    for which in ("none", "all", "all but attention"):
        bench_common.recompute(model, which)
        gpu_numbers.step(setup, model)
        counts.append(len(calls))
        calls.clear()
    assert counts == [2, 4, 2]

def test_nan_and_missing_gradients_are_wrong():
    a, nan = torch.ones(2), torch.tensor([1, math.nan])
    for got in (dict(x=a, y=nan), dict(x=nan, y=a), dict(x=a), dict(x=a, y=1.1 * a)):
        for limit in (0, 0.05):
            assert "wrong" in gpu_numbers.row("", dict(gradients=got), dict(gradients=dict(x=a, y=a)), limit)
    assert "wrong" not in gpu_numbers.row("", dict(losses=dict(x=a)), dict(losses=dict(x=a)), 0)

def test_a_run_ends_in_time(tmp_path, monkeypatch):
    """Whatever is at work, even one that catches all exceptions; its processes end too."""
    started = []
    def start(*_, **__):
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return started[-1:]
    def forever(*_, **__):
        try:
            time.sleep(600)
        except Exception:
            time.sleep(600)
    monkeypatch.setattr(gpu_numbers, "start", start)
    monkeypatch.setattr(gpu_numbers, "step", forever)
    monkeypatch.setattr(bench_common, "timed", forever)
    begun = time.monotonic()
    result = gpu_check(tmp_path, "--stages", "numbers", "offload", "speed", "--minutes", 0.08)
    assert result.status == 0 and time.monotonic() - begun < 10
    assert result.found["numbers"][-1] == dict(note="out of time") and result.found["offload"] == [dict(note="not run")]
    assert len(started) == 3 and all(process.poll() == -9 for process in started)
    assert {r["note"] for r in cells_of(result).values()} == {"not run"} and cells_of(result).keys() == CELLS
    result = gpu_check(tmp_path, "--stages", "speed", "--minutes", 0.08)
    notes = [r["note"] for r in result.found["speed"]]
    assert notes == ["out of time"] + ["not run"] * (len(CELLS) - 1) and "out of time" in result.out
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and not torch.are_deterministic_algorithms_enabled()

def test_a_wrong_result_is_status_1(tmp_path, monkeypatch):
    real = rope_patch.run_packed
    monkeypatch.setattr(rope_patch, "run_packed", lambda *args: [1.1 * x for x in real(*args)])
    result = gpu_check(tmp_path, "--stages", "distance")
    assert result.status == 1 and {r["what"] for r in result.found["distance"] if "wrong" in r} == {"packed"}

def test_a_failed_claim_and_a_stopped_one(tmp_path, monkeypatch):
    class FakePytest: # of subprocess.Popen's interface
        def __init__(self, command, cwd, stdout, stderr, start_new_session):
            self.pid, self.returncode = command, None
            self.slow = "bfloat16" in command
            print("t.py::test_a[one two] PASSED [ 33%]", file=stdout)
            print("t.py::test_b[v1-2] " + ("" if self.slow else "FAILED [ 66%]\nFAILED t.py::test_b"), file=stdout)

        def wait(self, timeout=None):
            self.returncode = -9 if self.slow else 1
            if self.slow and timeout:
                self.returncode = None
                raise subprocess.TimeoutExpired("pytest", timeout)

        def poll(self):
            return self.returncode

    killed = []
    monkeypatch.setattr(subprocess, "Popen", FakePytest)
    monkeypatch.setattr(os, "killpg", lambda command, number: killed.append("bfloat16" in command))
    result = gpu_check(tmp_path, "--stages", "claims")
    broken, stopped = result.found["claims"]
    assert result.status == 1 and broken["wrong"] == "test_b[v1-2]" and (broken["passed"], broken["failed"]) == (1, 1)
    assert "stopped" in stopped["note"] and "wrong" not in stopped and killed == [True]

def test_what_is_not_run_does_not_fit_or_breaks_says_so(tmp_path, monkeypatch, one_call):
    real = low_bit.quantize_linears
    def quantize_linears(block, kind, device, multiply=False):
        if kind == "int8" and not isinstance(block, torch.nn.ModuleList): # --plan, which only counts, gives all blocks
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(block, kind, device)
    def broken(self, **options):
        raise RuntimeError("no compiler\nsecond line")
    monkeypatch.setattr(low_bit, "quantize_linears", quantize_linears)
    monkeypatch.setattr(torch.nn.Module, "compile", broken)
    result = gpu_check(tmp_path, "--stages", "speed")
    assert result.status == 1
    for (_, weights, checkpointed, compiled), row in cells_of(result).items():
        said = {}
        if compiled:
            said = dict(wrong="RuntimeError: no compiler")
        if weights.startswith("int8"):
            said = dict(note="out of memory")
        if weights == "nf4" and not find_spec("bitsandbytes"):
            said = dict(note="bitsandbytes is not installed")
        if checkpointed == "all but attention":
            said = dict(note="attention is not one kernel here")
        assert {k: row[k] for k in ("note", "wrong") if k in row} == said and ("seconds" in row) == (not said)
    assert result.out.count("| out of memory | out of memory |") == 2 * 6 # in both tables

    result = gpu_check(tmp_path, "--minutes", 0, "--stages", "encoding", "speed")
    assert result.status == 0 and all(r["note"] == "not run" for r in cells_of(result).values())
    assert result.found["encoding"] == [dict(note="not run")] and cells_of(result).keys() == CELLS

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_missing_card_is_one_line():
    """A small model on a CPU would say nothing about a card, so nobody gets that without having asked for it."""
    for flags in ([], ["--device", "cuda"]):
        result = run_script("tools/gpu_check.py", *flags)
        assert result.status == 2 and is_one_line(result.errors[0], "--device: 'cuda", "give cpu") and not result.out
