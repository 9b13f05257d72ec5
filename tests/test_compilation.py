"""
train.py --compile: the same training, in as few compiled graphs as a block can have.

$ python -m pytest -q tests/test_compilation.py -s    # two minutes of one core

Dynamo captures the blocks as it does for a card. Its graphs then run as they are, operation by operation, so there is
no compiler to wait for, and every number can be compared.
"""
import functools
import importlib
import shutil
import sys

import pytest
import torch

import rope_patch
from tests import varlen_cpu # which gives torch's variable-length attention a CPU kernel
from tests.harness import (EXACT, assert_same_run, is_one_line, log_of, lora_of, refused, rel, run_script, show,
                           start_ranks, validations_of, works)
from tests.places import windows

RAN = "a graph ran" # the output has it once for each time
BLOCKS, STEPS = 3, 3 # BLOCKS: tiny's
# SGD adds up gradients as they are, so every digit of them shows in the LoRA; AdamW would keep little but their signs
FLAGS = ["--val_data", *EXACT, "--device", "cpu", "--max_steps", STEPS, "--batch_size", 2, "--save_every", 2,
         "--optimizer", "torch.optim.SGD", "--lr", 0.5, "--lr_scheduler", "constant", "--warmup_steps", 0,
         "--lora_rank", 2, "--lora_targets", "to_q", "to_v", "net.2", "img_mod.1"]

def as_captured(graph, inputs):
    """A backend for torch.compile: the graph as it is, which says that it runs."""
    def run(*args):
        print(RAN)
        return graph(*args)
    return run

def on_a_card():
    """train.py compiles with that backend, and attention is one kernel, as it is on a card in bfloat16."""
    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend=as_captured)
    torch._dynamo.config.recompile_limit = 64 # as library/models/devices.py sets it there
    rope_patch.has_varlen = lambda x: True

def in_float32():
    """Likewise, but attention is one call a sample, between two compiled parts of a block."""
    on_a_card()
    rope_patch.has_varlen = lambda x: False

@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """Each test compiles anew; on_a_card and the settings end with it."""
    monkeypatch.setattr(torch.nn.Module, "compile", torch.nn.Module.compile)
    monkeypatch.setattr(rope_patch, "has_varlen", rope_patch.has_varlen)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_empty_graphs=False, recompile_limit=8):
        yield
    torch._dynamo.reset()

@pytest.fixture
def flags(small, tmp_path):
    """Of a training on the five samples of `small`, whose cache is copied, as some flags have more encoded."""
    shutil.copytree(small.cache, tmp_path / "cache")
    return ["--data", small.folder / "data", "--cache_dir", tmp_path / "cache", *FLAGS]

def train(out_dir, flags, *more):
    """-> what run_script returns, with the forward passes that the run has trained with."""
    result = works("train.py", *flags, "--out_dir", out_dir, *more)
    result.passes = sum(len(result.globals["plan_step"](n)[1]) for n in range(STEPS))
    return result

def assert_same_training(out_dir, other):
    """Each step's losses and length of the gradient, and in the end the LoRA, are the same."""
    numbers = lambda run: torch.tensor([[*r["losses"], r["loss"], r["grad_norm"]] for r in log_of(run)])
    got, want = [dict(lora_of(run), log=numbers(run)) for run in (out_dir, other)]
    assert got.keys() == want.keys()
    errors = {name: rel(got[name], want[name]) for name in want}
    show("log", errors["log"], 1e-5)
    show("LoRA", max(errors.values()), 1e-5)
    assert max(errors.values()) <= 1e-5, errors

def test_without_a_compiler_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delitem(sys.modules, "library.models.compilation", raising=False)
    result = run_script("train.py", "--compile", "--out_dir", tmp_path / "run")
    assert result.status == 1 and is_one_line(result.errors[-1], "--compile", "compiler"), result.err

def test_on_windows_a_missing_triton_is_one_line(monkeypatch):
    """torch brings triton along everywhere else."""
    windows.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None) # as if it were not there
    monkeypatch.delitem(sys.modules, "library.models.compilation", raising=False)
    with refused("--compile", "triton", "pip install triton-windows"):
        importlib.import_module("library.models.compilation")

def test_blocks_split_by_a_graph_break_can_be_recomputed(flags, tmp_path):
    """Six functions of a block are compiled. Where one of them has a variant with nothing to compute, this must not
    spoil the other variants. It was an error of torch.utils.checkpoint."""
    in_float32()
    plain = train(tmp_path / "plain", flags)
    for recomputed in (BLOCKS, 0):
        run = tmp_path / f"{recomputed} recomputed"
        result = train(run, flags, "--compile", "--gradient_checkpointing", recomputed)
        assert_same_training(run, tmp_path / "plain")
        assert result.out.count(RAN) == plain.passes * BLOCKS * 6 * (2 if recomputed else 1)

def test_a_block_is_one_graph_where_attention_is_one_kernel(flags, tmp_path):
    """Recomputed in part, offloaded, and with packs of one sample and of two. Validations do not compile. What is
    compiled already serves a resumed run, and that is the run without a break, to the bit."""
    on_a_card()
    train(tmp_path / "plain", flags)
    validate = ["--compile", "--sample_every", 2, "--val_data", flags[1], "--val_pictures", 0]
    for name, recomputed, more in (("recomputed", 2, validate), ("offloaded", 0, ["--compile", "--offload", 2])):
        result = train(tmp_path / name, flags, "--gradient_checkpointing", recomputed, *more)
        assert_same_training(tmp_path / name, tmp_path / "plain")
        assert result.out.count(RAN) == result.passes * (BLOCKS + recomputed), name
    assert len(validations_of(tmp_path / "recomputed")) == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        for more in (["--max_steps", 2], ["--resume"]):
            train(tmp_path / "resumed", flags, "--gradient_checkpointing", 2, *validate, *more)
    assert_same_run(tmp_path / "resumed", tmp_path / "recomputed")

    two_packs = ["--batch_size", 3, "--max_tokens", 150, "--gradient_checkpointing", 1]
    train(tmp_path / "two packs", flags, *two_packs)
    result = train(tmp_path / "compiled", flags, *two_packs, "--compile")
    assert_same_training(tmp_path / "compiled", tmp_path / "two packs")
    assert result.passes == 2 * STEPS and result.out.count(RAN) == result.passes * (BLOCKS + 1)

def test_eight_bit_layers_are_in_the_graph(flags, tmp_path):
    on_a_card()
    for more in ([], ["--compile"]):
        result = train(tmp_path / f"int8{len(more)}", flags, "--quantize", "int8", *more)
    assert_same_training(tmp_path / "int81", tmp_path / "int80")
    assert result.out.count(RAN) == result.passes * BLOCKS

def test_the_base_is_asked_in_graphs_of_its_own(flags, tmp_path):
    """--preserve computes some samples once more, without gradients and without the LoRA."""
    on_a_card()
    flags += ["--preserve", 0.5, "--preserve_prompts", "keep the image"]
    train(tmp_path / "plain", flags)
    result = train(tmp_path / "compiled", flags, "--compile", "--gradient_checkpointing", 2)
    assert_same_training(tmp_path / "compiled", tmp_path / "plain")
    picks = [result.globals["plan_step"](n)[0] for n in range(STEPS)]
    asked = sum(any(p.preserve for p in step) for step in picks)
    assert 0 < asked and result.out.count(RAN) == BLOCKS * asked + (BLOCKS + 2) * result.passes

def test_a_sharded_base_is_compiled_too(flags, tmp_path, start):
    """Two processes, each with half of the samples."""
    train(tmp_path / "plain", flags)
    ranks = start_ranks(start, *flags, "--out_dir", tmp_path / "sharded", "--fsdp", "--compile",
                        "--gradient_checkpointing", 2, preludes=(on_a_card, on_a_card))
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output() for rank in ranks]
    assert_same_training(tmp_path / "sharded", tmp_path / "plain")
    assert [rank.output().count(RAN) for rank in ranks] == [STEPS * (BLOCKS + 2)] * 2
