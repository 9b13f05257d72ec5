"""tools/bench.py times only what computes the same, and its FLOPs are those that torch counts."""
import re
from math import prod

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.harness import is_one_line, run_script, show
from tools import bench_common

QUICK = ["--preset", "quick", "--rounds", 1]

@pytest.fixture(scope="module")
def benched():
    return run_script("tools/bench.py", *QUICK)

def test_training_is_timed_only_where_all_ways_agree(monkeypatch, benched):
    assert all(re.search(rf"^{way} ", benched.out, re.M) for way in ("packed", "padded", "sorted", "single", "stock"))
    real = bench_common.run_with_pads
    monkeypatch.setattr(bench_common, "run_with_pads", lambda *args: [x + 0.5 for x in real(*args)])
    result = run_script("tools/bench.py", *QUICK)
    assert is_one_line(result.errors[0], "padded") and not re.search("^packed ", result.out, re.M)

def test_all_ways_have_one_copy_of_the_frozen_weights(benched):
    """Which is 38 GiB of the real model. Their LoRAs are their own."""
    frozen = [{p.data_ptr() for name, p in model.named_parameters() if ".lora_" not in name}
              for model in benched.globals["models"].values()]
    assert all(pointers == frozen[0] for pointers in frozen)
    assert len({id(model.lora) for model in benched.globals["models"].values()}) == 4

def test_a_ratio_is_taken_round_by_round(benched):
    times = dict(packed=np.array([1, 2, 4, 8]), steady=np.array([2, 4, 8, 16]), shaky=np.array([2, 4, 16, 32]))
    ratios = [benched.globals["ratio"](times, way) for way in ("steady", "shaky")]
    assert ratios == [" 2.00 [2.00, 2.00]", " 3.00 [2.00, 4.00] INVALID"]

def test_flops_are_those_that_torch_counts(benched):
    """Of the real 60 blocks at 1024 * 1024 with one control and 500 tokens of text, as counted by hand: 431 TFLOP, with
    every block recomputed 605. Of the small model, as torch counts them while they run, modulation left out."""
    script = benched.globals
    real, op = script["MODELS"]["full"], torch.ops.aten
    samples = script["make_samples"](script["config"], script["PRESETS"]["mixed"], torch.float32, "cpu")
    cpu_attention = { # torch does not count this kernel: two products, backward five
        op._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 4 * prod(q) * k[2],
        op._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, *__, **___: 10 * prod(q) * k[2]}
    for way in ("single", "packed"):
        with FlopCounterMode(display=False, custom_mapping=cpu_attention) as counter:
            script["step"](way, script["models"], samples)
        counted = script["flops_of"](way, script["batches_of"](samples, way)) / counter.get_total_flops()
        show(f"{way}: FLOPs, from what torch counts", abs(counted - 1), 0.03)
        assert counted == pytest.approx(1, abs=0.03)
    assert script["flops"](real, [(8192, 500)]) == pytest.approx(431e12, rel=0.005)
    assert script["flops"](real, [(8192, 500)], checkpointed=60) == pytest.approx(605e12, rel=0.005)
