"""
What the compiler makes of a transformer block of the real width, for cards that are not there.

$ python -m pytest -q tests/test_machine_code.py -s    # one minute of one core; -s: the registers of each kernel
"""
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.fake_card import guard
from tests.harness import FULL, HERE

MISSING = guard.why_not() or (None if find_spec("triton") else "no triton, which compiles the kernels")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}")
# H100 and RTX 5090, with most and with least shared memory; A100, RTX 4090 and B200 as well with --full
CARDS = ["80", "89", "90", "100", "120"] if FULL else ["90", "120"]
SHARED = {"80": 163, "89": 99, "90": 227, "100": 227, "120": 99} # KiB of shared memory that a kernel can have there
# What neither Triton compiles nor a view is: products of matrices and attention, which have kernels of their own. An
# index_put_ here would add up a modulation's gradient atomically, in bfloat16.
CALLS = {"extern_kernels.mm", "extern_kernels.addmm", "torch.ops.torch_attn._varlen_attn.default",
         "torch.ops.torch_attn._varlen_attn_backward.default"}

@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """[forward, backward] of machine_code.describe; in a process of its own, as the guard has to come before torch."""
    library = guard.build(tmp_path_factory.mktemp("guard"))
    env = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    done = subprocess.run([sys.executable, "-m", "tests.fake_card.machine_code", library, *CARDS],
                          cwd=HERE, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])

def test_a_block_is_one_graph_of_so_many_launches(passes):
    """With LoRAs on the attention and on img_mod.1, two samples, lengths that may change, bfloat16."""
    forward, backward = passes
    for name, found, limit in (("forward", forward, 74), ("backward", backward, 96)):
        print(f"{name}: {found['launches']} launches (limit {limit}), {len(found['kernels']['90'])} Triton kernels")
        assert found["launches"] <= limit
    assert {*forward["calls"], *backward["calls"]} == CALLS

@pytest.mark.parametrize("card", CARDS)
def test_every_kernel_compiles_without_atomics_or_spilled_registers(card, passes):
    """Atomic sums round differently in each run."""
    kernels = {name: found for one in passes for name, found in one["kernels"][card].items()}
    assert kernels
    for name, found in kernels.items():
        print("{card} {name}: {registers} registers".format(name=name, **found))
        assert not found["atomics"] and not found["spilled"], name
        assert found["shared"] <= SHARED[card] * 2**10, name
