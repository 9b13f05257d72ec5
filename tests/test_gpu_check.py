"""tools/gpu_check.py: all of it on an imitated card, where tensors have no numbers; and its verdicts on a CPU."""
import json
import math
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import rope_patch
from library.models import offloading, quantization
from tests import varlen_cpu # noqa: F401 (which gives torch's variable-length attention a CPU kernel)
from tests.fake_card import client, guard
from tests.harness import FULL, is_one_line, run_script, until
from tools import bench_common, gpu_numbers

# ---- on an imitated card ---------------------------------------------------------------------------------------------

on_imitated_card = pytest.mark.skipif(bool(guard.why_not()), reason=f"{guard.why_not()}")
TWO_CARDS = dict(gib=140.4, cards=2)
# Two blocks; FA3 is there; nothing is compiled (test_compilation.py does that); other programs end at once, with what
# the tool reads of them; each step is timed once; and the memory of a third block, times no block, is not counted.
PRELUDE = """
import subprocess
from training import plan
from rope_patch import blocks_of
from tools import bench_common, gpu_numbers

def start(*command):
    words, out_dir = "2 passed in 1 s", dict(zip(command, command[1:])).get("--out_dir")
    if "tools.gpu_numbers" in command:
        words = '{"GB/s": 1}'
    if out_dir:
        out_dir.mkdir()
        (out_dir / "log.jsonl").write_text('{}' + chr(10) + '{"loss": 1}')
    seen.loaded.append(list(map(str, command)))
    return subprocess.Popen(["echo", words], stdout=subprocess.PIPE, text=True)

def timed(f, device, before):
    before()
    added = bench_common.peak_gib(lambda: seen.loaded.append(bench_common.seconds(f, device)), device)
    return {"first call": 1.0, "seconds": 1.0, "added GiB": added}

def step_bytes(model, *pack, **options):
    return real_bytes(model, *pack, **options) if len(blocks_of(model)) == 2 else 0

bench_common.start, bench_common.timed, plan.step_bytes, real_bytes = start, timed, step_bytes, plan.step_bytes
bench_common.MODELS["full"]["num_layers"] = gpu_numbers.BLOCKS = 2
torch.nn.Module.compile = lambda self, **options: seen.loaded.append("compiled")
torch.nn.attention.current_flash_attention_impl = lambda: "FA3"
torch.nn.attention.restore_flash_attention_impl = lambda: seen.loaded.append("FA2")
"""

@on_imitated_card
def test_every_stage_runs_on_an_imitated_card(tmp_path):
    """So that the first real one does not find a wrong device or a missing name; and --plan expects what it counts."""
    pytest.importorskip("bitsandbytes")
    answer = client.ask(script="tools/gpu_check.py", flags=[], folder=tmp_path, card=TWO_CARDS, prelude=PRELUDE)
    print(f"{answer.seconds:.1f} s of CPU time")
    found = json.loads((tmp_path / "gpu_check.json").read_bytes())
    rows = {stage: {row["what"]: row for row in found[stage]} for stage in STAGES}
    assert not [row for stage in STAGES for row in found[stage] if "broken" in row or "note" in row], answer.out
    assert {stage: list(rows[stage]) for stage in STAGES} == STAGES and "**speed**" in answer.out
    assert len(found["speed"]) == 3 * 4 + 8 # FA2 and the first three: all packs
    for row in found["speed"]: # an H100 unpacks eight bits, which takes less than the products that --plan counts
        few = "int8" in row["what"] or "fp8" in row["what"]
        assert row["GiB"] == pytest.approx(row["planned GiB"], rel=0.15 if few else 0.03), row
    assert answer.loaded.count("compiled") == 2 * (4 + 3) and answer.loaded.count("FA2") == 1
    programs = [words for words in answer.loaded if isinstance(words, list)]
    assert ["--fsdp" in words for words in programs if "train.py" in words] == [False, True]

STAGES = dict(
    claims=["float32", "bfloat16"],
    numbers=["shown wrong: sides swapped", "packed, float32", "padded, float32", "stock, bfloat16", "packed, bfloat16",
             "padded, bfloat16", *[f"--quantize {kind}, from fp32" for kind in ("none", "int8", "fp8", "nf4")],
             "all recomputed, from kept", "all but attention recomputed, from kept",
             "offloaded, none recomputed, from on the device", "offloaded, all recomputed, from on the device",
             "train.py --fsdp on two GPUs, from one", "--quantize none, compiled, from fp32",
             "--quantize int8, multiplied as such, compiled, from fp32",
             "--quantize fp8, multiplied as such, compiled, from fp32", "--quantize nf4, compiled, from fp32"],
    fit=["largest"],
    speed=["packed", "padded", "compiled", "kept", "attention kept", "int8", "fp8", "nf4", "offloaded", "int8 compiled",
           "fp8 compiled", "FA2"],
    nccl=["nccl"])

@on_imitated_card
def test_an_all_reduce_on_two_imitated_cards(tmp_path):
    env = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    answer = client.ask(script="tools/gpu_numbers.py", flags=[], folder=tmp_path, card=TWO_CARDS, env=env)
    row = json.loads(answer.out.splitlines()[-1])
    assert answer.status == 0 and row["GB/s"] == pytest.approx(2**30 / 1e-3 / 1e9) and row["wrong"] == "the sum of ones"

# ---- on a CPU --------------------------------------------------------------------------------------------------------

def gpu_check(folder, *flags):
    """-> result of run_script with the JSON, whose rows are read by stage."""
    result = run_script("tools/gpu_check.py", "--device", "cpu", "--out", folder / "found.json", *flags)
    result.found = json.loads((folder / "found.json").read_bytes()) if (folder / "found.json").exists() else {}
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

COPIED = {what for what in STAGES["numbers"] if what.startswith("offloaded")}
REPEATED = {what for what in STAGES["numbers"] if what.endswith("from kept")}
MULTIPLIED = {what for what in STAGES["numbers"] if "multiplied" in what}

def test_good_numbers_are_within_their_limits(tmp_path, as_a_card):
    result = gpu_check(tmp_path, "--stages", "numbers")
    assert result.status == 0, result.out
    rows = {row["what"]: row for row in result.found["numbers"]}
    assert COPIED | REPEATED | MULTIPLIED < rows.keys()
    assert all(rows[what]["outputs"] == 0 == rows[what]["gradients"] for what in COPIED | REPEATED)
    assert all(rows[what]["outputs"] > 1e-3 for what in MULTIPLIED) # or nothing was
    assert not torch.are_deterministic_algorithms_enabled()

def test_each_fault_turns_its_own_rows(tmp_path, monkeypatch, as_a_card):
    """Dropout is another when it is recomputed, two blocks are exchanged in host memory, an input's scale is left out,
    and padded rows have another answer."""
    checkpoint, copy_ahead = torch.utils.checkpoint.checkpoint, offloading.copy_ahead
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *args, **options: (
        checkpoint(*args, **options, preserve_rng_state=False)))
    monkeypatch.setattr(offloading, "copy_ahead", lambda blocks, hosts, buffers, device: (
        copy_ahead(blocks, [hosts[1], hosts[0], *hosts[2:]], buffers, device)))
    product, run_padded = quantization.eight_bit_product, bench_common.run_padded
    monkeypatch.setattr(quantization, "eight_bit_product", lambda rows, row_scale, *more, **fast: (
        product(rows, torch.ones_like(row_scale), *more, **fast)))
    monkeypatch.setattr(bench_common, "run_padded", lambda *args: [1.001 * x for x in run_padded(*args)])
    result = gpu_check(tmp_path, "--stages", "numbers")
    wrong = {row["what"] for row in result.found["numbers"] if "wrong" in row}
    assert result.status == 1 and wrong == {"padded, float32"} | COPIED | REPEATED | MULTIPLIED

def test_nan_and_missing_gradients_are_wrong():
    a, nan = torch.ones(2), torch.tensor([1, math.nan])
    for got in (dict(x=a, y=nan), dict(x=nan, y=a), dict(x=a), dict(x=a, y=1.2 * a)):
        for limit in (0, 0.05):
            assert "wrong" in gpu_numbers.row("", dict(gradients=got), dict(gradients=dict(x=a, y=a)), limit)
    assert "wrong" not in gpu_numbers.row("", dict(losses=dict(x=a)), dict(losses=dict(x=a)), 0)
    assert "wrong" in gpu_numbers.row("shown wrong", dict(losses=dict(x=a)), dict(losses=dict(x=a)), 0.1)

@pytest.mark.skipif(not FULL, reason="a minute; it runs with --full")
def test_a_sharded_run_in_two_processes():
    cells, = gpu_numbers.sharded(SimpleNamespace(device="cpu"))
    assert "wrong" not in gpu_numbers.row(*cells)

def test_claims_count_name_and_stop(tmp_path, monkeypatch):
    """Real processes, which write what pytest would: one claim fails, and one run takes too long."""
    def start(*command):
        code = "import time; time.sleep(600)"
        if "bfloat16" not in command:
            code = "print('FAILED t.py::test_b[v1-2] - AssertionError'); print('1 failed, 2 passed in 3 s'); exit(1)"
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, encoding="utf-8",
                                        start_new_session=True))
        return started[-1]
    started = []
    monkeypatch.setattr(bench_common, "start", start)
    result = gpu_check(tmp_path, "--stages", "claims", "--minutes", 0.2)
    broken, stopped = result.found["claims"]
    assert result.status == 1 and broken["wrong"] == "test_b[v1-2]" and broken["said"] == "1 failed, 2 passed in 3 s"
    assert "two fifths" in stopped["note"] and "wrong" not in stopped and started[1].poll() == -9

def test_a_run_ends_in_time(tmp_path, monkeypatch):
    """Whatever is at work, even what catches all exceptions; its processes end too."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    monkeypatch.setattr(bench_common, "started", [process])

    def forever(*_, **__):
        try:
            time.sleep(600)
        except Exception:
            time.sleep(600)
    monkeypatch.setattr(gpu_numbers, "step", forever)
    result = gpu_check(tmp_path, "--stages", "numbers", "speed", "--minutes", 0.05)
    assert result.status == 0 and process.poll() == -9
    assert result.found["numbers"] == [dict(what="modes", note="stopped here")] and not result.found["speed"]
    until(lambda: not [t for t in threading.enumerate() if "end_in_time" in t.name])
    assert not torch.are_deterministic_algorithms_enabled()

def test_what_does_not_fit_or_breaks_says_so_and_ends_nothing_else(tmp_path, monkeypatch):
    def quantize_linears(block, kind, device, multiply):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(blocks):
        raise RuntimeError("no compiler\nsecond line")

    def timed(f, device, before):
        return {"first call": 1.0, "seconds": 1.0, "added GiB": 1.0}
    monkeypatch.setattr(bench_common, "timed", timed)
    monkeypatch.setattr(quantization, "quantize_linears", quantize_linears)
    monkeypatch.setattr("library.models.compilation.compile_blocks", broken)
    monkeypatch.setattr("training.plan.step_bytes", lambda *_, **__: 0)
    result = gpu_check(tmp_path, "--stages", "speed")
    rows = {row["what"]: row for row in result.found["speed"]}
    assert result.status == 1 and rows["compiled"]["broken"] == "RuntimeError: no compiler"
    assert rows["int8"]["note"] == "out of memory" and "broken" not in rows["int8"]
    assert {what for what, row in rows.items() if "tokens/s" in row} == {"packed", "padded", "kept", "attention kept",
                                                                        "offloaded"}
    assert "| out of memory |" in result.out

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_missing_card_is_one_line():
    """A small model on a CPU would say nothing about a card, so nobody gets that without having asked for it."""
    for flags in ([], ["--device", "cuda"]):
        result = run_script("tools/gpu_check.py", *flags)
        assert result.status == 2 and is_one_line(result.errors[0], "--device: 'cuda", "give cpu") and not result.out
