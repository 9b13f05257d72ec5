"""tools/bench.py times only what computes the same, and its FLOPs are those that torch counts."""
import re
from math import prod

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.harness import is_one_line, run_script, show
from tools import bench_common

QUICK = ["--what", "quick", "--rounds", 1]

@pytest.fixture(scope="module")
def benched():
    return run_script("tools/bench.py", *QUICK)

def test_training_is_timed_only_where_all_ways_agree(monkeypatch, benched):
    assert all(re.search(rf"^{way} ", benched.out, re.M) for way in ("packed", "padded", "sorted", "single", "stock"))
    real = bench_common.run_with_pads
    monkeypatch.setattr(bench_common, "run_with_pads", lambda *args: [1.001 * x for x in real(*args)])
    result = run_script("tools/bench.py", *QUICK)
    assert is_one_line(result.errors[0], "padded") and not re.search("^packed ", result.out, re.M)

def test_all_ways_have_one_copy_of_the_frozen_weights(benched):
    """Their LoRAs are their own."""
    models = benched.globals["make_models"]()
    frozen = [{p.data_ptr() for name, p in model.named_parameters() if ".lora_" not in name}
              for model in models.values()]
    assert all(pointers == frozen[0] for pointers in frozen)
    assert len({id(model.lora) for model in models.values()}) == 4

def test_a_ratio_is_taken_round_by_round(benched):
    ratios = [benched.globals["ratio"](np.array(times), np.array([1, 2, 4, 8]))
              for times in ([2, 4, 8, 16], [2, 4, 16, 32])]
    assert ratios[0] == " 2.00 [2.00, 2.00]" and ratios[1].startswith(" 3.00 [2.00, 4.00] INVALID")

def test_flops_are_those_that_torch_counts(benched):
    """Of the small model, as torch counts them while they run, modulation left out."""
    script, op = benched.globals, torch.ops.aten
    samples = script["make_samples"](script["config"], script["PRESETS"]["mixed"], torch.float32, "cpu")
    cpu_attention = { # torch does not count this kernel: two products, backward five
        op._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 4 * prod(q) * k[2],
        op._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, *__, **___: 10 * prod(q) * k[2]}
    with FlopCounterMode(display=False, custom_mapping=cpu_attention) as counter:
        script["train_step"](script["make_models"]()["packed"], [samples])
    counted = bench_common.flops(script["config"], [s.lens for s in samples]) / counter.get_total_flops()
    show("packed: FLOPs, from what torch counts", abs(counted - 1), 0.03)
    assert counted == pytest.approx(1, abs=0.03)
