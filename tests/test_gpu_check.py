"""tools/gpu_check.py: all of it on an imitated card, where tensors have no numbers; and its verdicts on a CPU."""
import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

import rope_patch
from library.models import offloading, quantization
from tests import varlen_cpu # noqa: F401 (which gives torch's variable-length attention a CPU kernel)
from tests.fake_card import client, guard
from tests.harness import is_one_line, run_script, until
from tools import bench_common

WAYS = ["packed", "padded", "kept", "attention_kept", "offload_30", "offload_all", "int8", "int8_offload_20", "fp8",
        "nf4", "compiled", "int8_compiled", "fp8_compiled"]

# ---- on an imitated card ---------------------------------------------------------------------------------------------

# Two blocks, of which each model computes two steps; FA3 is there; nothing is compiled (test_compilation.py does that);
# pytest ends at once, with what the tool reads of it. All distances are 0, as no tensor has numbers.
PRELUDE = """
import subprocess
from tools import bench_common

def train_step(model, *batches, real=bench_common.train_step):
    model.steps = getattr(model, "steps", 0) + 1
    return real(model, *batches) if model.steps <= 2 else []

real = subprocess.Popen
class Popen(real): # a class, as asyncio wants one
    def __init__(self, command, **options):
        super().__init__(["echo", "2 passed in 1 s"] if "pytest" in command else command, **options)
subprocess.Popen = Popen
bench_common.MODELS["full"]["num_layers"] = bench_common.FEW = 2
bench_common.distance, bench_common.train_step = lambda got, want: 0.0, train_step
torch.equal = lambda a, b: a.shape == b.shape
torch.nn.Module.compile = lambda self, **options: seen.loaded.append("compiled")
torch.nn.attention.current_flash_attention_impl = lambda: "FA3"
torch.nn.attention.restore_flash_attention_impl = lambda: seen.loaded.append("FA2")
"""

@pytest.mark.skipif(bool(guard.why_not()), reason=f"{guard.why_not()}")
def test_every_row_is_measured_on_an_imitated_card(tmp_path):
    """So that the first real one does not find a wrong device or a missing name. What two blocks take is more than
    their weights, and offloaded or in few bits less than in bf16."""
    pytest.importorskip("bitsandbytes")
    answer = client.ask(script="tools/gpu_check.py", flags=["--minutes", "100"], folder=tmp_path,
                        card=dict(gib=140.4), prelude=PRELUDE)
    print(f"{answer.seconds:.1f} s of CPU time")
    rows = json.loads((tmp_path / "gpu_check.json").read_bytes())["rows"]
    assert list(rows) == ["claims", *WAYS, "flash_2"] and "| nf4 |" in answer.out, answer.out
    assert rows.pop("claims") == dict(said="2 passed in 1 s")
    assert all({"off by", "s", "tokens/s", "GiB"} <= row.keys() and not {"broken", "note"} & row.keys()
               for row in rows.values()), answer.out
    assert answer.loaded.count("compiled") == 3 * (2 + 2) and answer.loaded.count("FA2") == 2
    memory = {name: row["GiB"] for name, row in rows.items()}
    assert memory["nf4"] < memory["int8"] < memory["packed"] < memory["attention_kept"] < memory["kept"]

# ---- on a CPU --------------------------------------------------------------------------------------------------------

def gpu_check(folder, *flags):
    """-> result of run_script with the rows of the JSON."""
    result = run_script("tools/gpu_check.py", "--device", "cpu", "--out", folder / "found.json", *flags)
    result.rows = json.loads((folder / "found.json").read_bytes())["rows"]
    return result

@pytest.fixture
def as_a_card(monkeypatch):
    """The roads that only a card takes. `compiled` blocks are not: the code runs that would be."""
    monkeypatch.setitem(bench_common.MODELS, "small", bench_common.MODELS["small"] | dict(num_attention_heads=2))
    monkeypatch.setattr(rope_patch, "has_varlen", lambda x: True)
    monkeypatch.setattr(quantization, "can_multiply", lambda kind, device: True)
    state = SimpleNamespace(compiling=False)
    monkeypatch.setattr(quantization, "has_product", lambda x, layer: (
        state.compiling and layer.multiply and layer.kind in quantization.TOP and x.numel() > 16 * x.shape[-1]))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: setattr(state, "compiling", True))
    monkeypatch.setattr(torch._dynamo, "reset", lambda: setattr(state, "compiling", False))

def test_good_numbers_are_within_their_limits_and_each_fault_turns_its_own_rows(tmp_path, monkeypatch, as_a_card):
    """The faults: two blocks are exchanged in host memory, an input's scale is left out, padded rows have another
    answer, and positions are those of pictures with their sides swapped."""
    def wrong_rows():
        result = gpu_check(tmp_path, "--rows", *WAYS)
        wrong = {name for name, row in result.rows.items() if "wrong" in row}
        assert list(result.rows) == WAYS and all("tokens/s" in row for row in result.rows.values()), result.err
        assert result.status == bool(wrong) and not torch.are_deterministic_algorithms_enabled()
        return wrong, result.rows
    wrong, rows = wrong_rows()
    multiplied = {"int8_compiled", "fp8_compiled"}
    assert not wrong and all(rows[name]["off by"] > 1e-3 for name in multiplied) # or nothing was
    copy_ahead, product, run_padded = offloading.copy_ahead, quantization.eight_bit_product, bench_common.run_padded
    monkeypatch.setattr(offloading, "copy_ahead", lambda blocks, hosts, buffers, device: (
        copy_ahead(blocks, [hosts[1], hosts[0], *hosts[2:]], buffers, device)))
    monkeypatch.setattr(quantization, "eight_bit_product", lambda rows, row_scale, *more, **fast: (
        product(rows, torch.ones_like(row_scale), *more, **fast)))
    monkeypatch.setattr(bench_common, "run_padded", lambda *args: [1.2 * x for x in run_padded(*args)])
    wrong, _ = wrong_rows()
    assert wrong == {"padded", "int8_offload_20", "offload_30", "offload_all"} | multiplied
    monkeypatch.undo()
    run_packed = rope_patch.run_packed
    monkeypatch.setattr(rope_patch, "run_packed", lambda *args: run_packed(*args[:-1], [
        [(f, w, h) for f, h, w in shapes] for shapes in args[-1]]))
    assert "wrong" in gpu_check(tmp_path, "--rows", "packed").rows["packed"]

def test_nan_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_common, "distance", lambda got, want: math.nan)
    assert "wrong" in gpu_check(tmp_path, "--rows", "packed").rows["packed"]

def test_claims_count_and_name_what_fails(tmp_path, monkeypatch):
    """A real process, which writes what pytest would."""
    code = "print('FAILED t.py::test_b[v1-2] - AssertionError'); print('1 failed, 2 passed in 3 s'); exit(1)"
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start([sys.executable, "-c", code], **options))
    result = gpu_check(tmp_path, "--rows", "claims")
    assert result.status == 1
    assert result.rows == dict(claims=dict(said="1 failed, 2 passed in 3 s", wrong="test_b[v1-2]"))

@pytest.mark.parametrize("rows, words", [(["claims", "packed"], "stopped after two fifths"), (["packed"], "stopped")])
def test_a_run_ends_in_time(tmp_path, monkeypatch, rows, words):
    """Whatever is at work, even what catches all exceptions; its processes end too."""
    def forever(*_, **__):
        try:
            time.sleep(600)
        except Exception:
            time.sleep(600)
    sleep = f"600.{os.getpid()}"
    code = f"import subprocess; subprocess.run(['sleep', '{sleep}'])"
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start([sys.executable, "-c", code], **options)
                        if "pytest" in command else start(command, **options))
    monkeypatch.setattr(bench_common, "train_step", forever)
    result = gpu_check(tmp_path, "--rows", *rows, "--minutes", 0.1)
    assert result.status == 0 and words in result.rows[rows[0]]["note"], result.out
    assert result.rows["packed"] == dict(note="stopped here")
    until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if sleep in (p.info["cmdline"] or ())])
    assert not torch.are_deterministic_algorithms_enabled()

def test_what_does_not_fit_or_breaks_says_so_and_ends_nothing_else(tmp_path, monkeypatch):
    def quantize_linears(block, kind, device, multiply):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(blocks):
        raise RuntimeError("no compiler\nsecond line")
    monkeypatch.setattr(quantization, "quantize_linears", quantize_linears)
    monkeypatch.setattr("library.models.compilation.compile_blocks", broken)
    result = gpu_check(tmp_path, "--rows", "int8", "compiled", "padded")
    assert result.status == 1 and result.rows["compiled"] == dict(broken="RuntimeError: no compiler")
    assert result.rows["int8"] == dict(note="out of memory") and "tokens/s" in result.rows["padded"]
    assert "| out of memory |" in result.out

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_missing_card_is_one_line():
    """A small model on a CPU would say nothing about a card, so nobody gets that without having asked for it."""
    for flags in ([], ["--device", "cuda"]):
        result = run_script("tools/gpu_check.py", *flags)
        assert result.status == 2 and is_one_line(result.errors[0], "--device: 'cuda", "give cpu") and not result.out
