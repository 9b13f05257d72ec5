"""tools/gpu_check.py, on a CPU: the code that a card will run, with a small model."""
import itertools
import json
import os
import math
import subprocess
from importlib.util import find_spec

import pytest
import torch

import rope_patch
from extras import low_bit
from models import is_one_line
from test_consistency import run_script
from tools import bench_common

CELLS = {*itertools.product(("one", "mixed", "equal"), ("none", "int8", "fp8", "nf4"), ("all", "none"), (False, True))}

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

def test_every_stage_and_cell_has_figures(tmp_path, monkeypatch):
    """Nothing is compiled here: it would take minutes, and test_rope_patch.py does it."""
    monkeypatch.setitem(bench_common.MODELS, "small", bench_common.MODELS["small"] | dict(num_attention_heads=4))
    compiled, real = [], torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: (
        compiled.append(options), real(self, disable=True, **options)))
    pytest.importorskip("bitsandbytes")
    result = gpu_check(tmp_path, "-k", "get_image_shapes_multi_resolution_from")
    assert result.status == 0, result.err
    found = result.found
    assert [(r["dtype"], r["failed"]) for r in found["claims"]] == [("float32", 0), ("bfloat16", 0)]
    good = [r["what"] for r in found["distance"] if 0 <= r.pop("distance") <= r["limit"]] # 0: bit-equal
    assert good == ["stock, MATH", "packed", "padded"] * 2
    assert cells_of(result).keys() == CELLS and "not run" not in result.out
    assert compiled == [dict(dynamic=True)] * 2 * 4 # blocks, groups of cells
    flat = lambda x: [y for value in x for y in flat(value)] if isinstance(x, list) else [x]
    figures = [x for rows in found.values() if isinstance(rows, list) for row in rows for x in flat(list(row.values()))
               if isinstance(x, float)]
    assert len(figures) > 48 * 10 and all(math.isfinite(x) and x > 0 for x in figures), figures
    assert found["encoding"][0]["tokens"] > 14 * 14 # a picture as the real model sees it
    assert found["about"]["torch"] == torch.__version__ and "--device cpu" in found["about"]["command"]
    # the tables that README would get: a cell of Speed and one of Memory for each of the two
    tables = result.out[result.out.index("**Speed"):]
    assert tables.count("tok/s") == tables.count("->") - 1 == len(CELLS)

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
    real = low_bit.make_low_bit
    def make_low_bit(block, kind, device, multiply):
        if kind == "int8":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(block, kind, device)
    def broken(self, **options):
        raise RuntimeError("no compiler\nsecond line")
    monkeypatch.setattr(low_bit, "make_low_bit", make_low_bit)
    monkeypatch.setattr(torch.nn.Module, "compile", broken)
    result = gpu_check(tmp_path, "--stages", "speed")
    assert result.status == 1
    for (_, weights, _, compiled), row in cells_of(result).items():
        said = {}
        if compiled:
            said = dict(wrong="RuntimeError: no compiler")
        if weights == "int8":
            said = dict(note="out of memory")
        if weights == "nf4" and not find_spec("bitsandbytes"):
            said = dict(note="bitsandbytes is not installed")
        assert {k: row[k] for k in ("note", "wrong") if k in row} == said and ("seconds" in row) == (not said)
    assert result.out.count("| out of memory | out of memory |") == 2 * 6 # in both tables

    result = gpu_check(tmp_path, "--minutes", 0, "--stages", "encoding", "speed")
    assert result.status == 0 and all(r["note"] == "not run" for r in cells_of(result).values())
    assert result.found["encoding"] == [dict(note="not run")] and cells_of(result).keys() == CELLS

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_missing_card_is_one_line(tmp_path):
    result = run_script("tools/gpu_check.py", "--device", "cuda")
    assert result.status == 1 and is_one_line(result.errors[0], "--device cuda")
