"""library/models/offloading.py: the numbers of a model that is all on the device, to the bit, with copies that come
late."""
import math
import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import common
from library.data import picture_files
from library.models import host_memory, offloading, sharding
from training import plan
import predict
import rope_patch
from tests.harness import (FULL, TINY, assert_bitwise, hot_model, is_one_line, log_of, losses_of, make_batch,
                           patched_copy, refused, run, run_script, works)

SAMPLES = make_batch(([(1, 8, 8), (1, 8, 6)], 20), ([(1, 4, 12), (1, 4, 4)], 9))

class LateCopies(TorchDispatchMode): # a class because torch wants one to see each copy
    """torch.cpu's streams, which do nothing, as a card's at their worst: a copy destroys what was there at once, and
    arrives only when the stream that computes waits for it. events: "+2" where block 2 is copied, "2" where it is about
    to compute, "2~" while a copy is under way."""

    def __init__(self):
        super().__init__()
        self.events, self.late, self.sources = [], [], []
        self.copies = SimpleNamespace(wait_stream=lambda other: self.events.append("wait"))
        self.compute = SimpleNamespace(wait_stream=lambda other: self.arrive())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        to, source = args[:2]
        assert function is torch.ops.aten.copy_.default and self.events.pop() == "wait" # for what reads the old ones
        if not any(source is s for s in self.sources):
            self.sources.append(source)
        self.events.append(f"+{[source is s for s in self.sources].index(True)}")
        self.late.append((to, source))
        return to.fill_(255) # NaN in fp32

    def arrive(self):
        for to, source in self.late:
            to.copy_(source)
        self.late.clear()

    def watch(self, model): # in hooks behind those of --offload
        for i, block in enumerate(model.transformer_blocks):
            block.register_forward_pre_hook(lambda *_, i=i: self.events.append(f"{i}" + "~" * len(self.late)))

    def take(self):
        """-> what has happened since the last call, as one string."""
        events, self.events = " ".join(self.events), []
        return events

@pytest.fixture
def late(monkeypatch):
    late = LateCopies()
    monkeypatch.setattr(torch.cpu, "Stream", lambda device: late.copies)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda device: late.compute)
    monkeypatch.setattr(torch.cpu, "stream", lambda stream: late)
    return late

def build(offload, quantize="none", checkpointed=None, blocks=5):
    """-> hot model in fp32 with a LoRA, its LoRA's parameters."""
    model = patched_copy(hot_model(dtype=torch.float32, num_layers=blocks, attention_head_dim=32,
                                   axes_dims_rope=(8, 12, 12))).requires_grad_(False)
    torch.manual_seed(1)
    lora = predict.add_lora(model, r=4, target_modules=["to_q", "add_q_proj", "net.2"], init_lora_weights=False)
    predict.place_transformer(model, "cpu", quantize, offload)
    if checkpointed != 0:
        rope_patch.checkpoint_blocks(model, checkpointed)
    return model.train(), list(lora.values())

def gradients(lora, outs):
    grads = torch.autograd.grad(sum(out.square().sum() for out in outs), lora, allow_unused=True)
    return [grad for grad in grads if grad is not None]

def use(model, lora, mode="packed"):
    """All that a training does with its model, twice -> all numbers that come out."""
    numbers = []
    for _ in range(2):
        with torch.no_grad(): # as a validation does, on batches of its own
            numbers += run(model, mode, SAMPLES) + run(model, mode, SAMPLES[:1])
        for batch in (SAMPLES, SAMPLES[1:]): # a step of two packs
            outs = run(model, mode, batch)
            numbers += [*outs, *gradients(lora, outs)]
        outs = run(model, mode, SAMPLES) + run(model, mode, SAMPLES[:1]) # two forward passes, then one backward
        numbers += gradients(lora, outs)
    return numbers

@pytest.mark.parametrize("quantize", ["none", "int8", "nf4"])
@pytest.mark.parametrize("checkpointed", [None, 0, 2], ids=["recomputed", "kept", "two recomputed"])
def test_blocks_in_host_memory_compute_the_same_bits(late, quantize, checkpointed):
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")
    for mode in ("packed", "padded") if FULL else ("packed",):
        want = use(*build(0, quantize, checkpointed), mode)
        assert all(n.isfinite().all() for n in want)
        for offload in (1, 2, 3, 4, 5) if FULL else (3, 10**9):
            assert_bitwise(use(*build(offload, quantize, checkpointed), mode), want)
    assert late.take()

def test_a_missing_wait_would_be_noticed(late):
    """The teeth of these tests: nobody waits for the copies."""
    late.compute.wait_stream = lambda other: None
    with torch.no_grad():
        assert not run(build(5)[0], "packed", SAMPLES)[0].isfinite().any()

@pytest.mark.parametrize("checkpointed", [None, 0], ids=["recomputed", "kept"])
def test_each_block_is_on_its_way_while_the_one_before_computes(late, checkpointed):
    """Forward and backward, and no block is copied twice: the last two are still there when the way back begins."""
    model, lora = build(5, checkpointed=checkpointed)
    late.watch(model)
    for first in ("+0 +1 0~", "0"): # from the second step on the first two blocks are there
        outs = run(model, "packed", SAMPLES)
        assert late.take() == first + " +2 1~ +3 2~ +4 3~ 4"
        gradients(lora, outs)
        assert late.take() == ("+2 +1 +0" if checkpointed == 0 else "4 +2 3~ +1 2~ +0 1~ 0")
    with torch.no_grad():
        run(model, "packed", SAMPLES)
        late.take()
        run(model, "packed", SAMPLES)
    assert late.take() == "+0 +1 0~ +2 1~ +3 2~ +4 3~ 4" # sampling waits for one copy, the first

@pytest.mark.parametrize("checkpointed", [None, 0], ids=["recomputed", "kept"])
def test_a_pass_that_breaks_off_leaves_nothing_wrong_behind(late, checkpointed):
    """As when memory runs out in a validation: the training goes on."""
    want, (model, lora) = use(*build(0, checkpointed=checkpointed)), build(5, checkpointed=checkpointed)
    fuse = []
    def burn(*_):
        if fuse and fuse.pop() == "now":
            raise torch.OutOfMemoryError
    for block in model.transformer_blocks:
        block.attn.register_forward_pre_hook(burn)
    for calls in (2, 3, 5, 7): # before it breaks, in the forward pass or the recomputation
        fuse[:] = ["now", *["later"] * calls]
        try:
            gradients(lora, run(model, "packed", SAMPLES))
        except torch.OutOfMemoryError:
            pass
        fuse.clear()
        assert_bitwise(use(model, lora), want)

@pytest.mark.parametrize("mode", ["packed", "padded"] if FULL else ["padded"]) # packed takes 20 seconds
def test_compiled_blocks_can_be_offloaded(late, mode):
    """Recomputed and kept, with no other graphs than those of blocks on the device."""
    graphs = []
    for offload in (0, 3):
        model, lora = build(offload, checkpointed=2, blocks=3)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for block in model.transformer_blocks:
            block.compile(dynamic=False, backend="eager") # (dynamic shapes take three times as long)
        outs = run(model, mode, SAMPLES)
        got = outs + gradients(lora, outs)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if not offload:
            want = got
    torch._dynamo.reset()
    assert_bitwise(got, want)
    assert graphs[0] == graphs[1] > 0

def test_train_py_copies_what_the_plan_counts_and_a_pack_shares_it(tmp_path, small, late):
    """Of tiny's three blocks one is copied on the way there and one on the way back; four samples in one pack cost a
    quarter a sample. Losses as without."""
    works("train.py", *small.flags, "--max_steps", 1, "--batch_size", 4, "--out_dir", tmp_path / "plain")
    for max_tokens, copies in ((10_000, 3 + 1), (1, 3 + 1 + 3 * 2)):
        late.sources.clear()
        works("train.py", *small.flags, "--max_steps", 1, "--batch_size", 4, "--offload", "all", "--max_tokens",
              max_tokens, "--out_dir", tmp_path / str(copies))
        assert len(re.findall(r"\+", late.take())) == copies
        assert losses_of(log_of(tmp_path / str(copies))) == pytest.approx(losses_of(log_of(tmp_path / "plain")), 1e-6)
        transformer = predict.load_transformer(TINY, "float32")
        device, host = plan.transformer_bytes(transformer, "none", 3, 1)
        pinned = sum(s.nbytes for s in late.sources)
        assert host <= pinned < host + 256 * len(list(transformer.parameters()))
        assert device == plan.transformer_bytes(transformer, "none", 0, 1)[0] - host // 3

# ---- a host with too little memory -----------------------------------------------------------------------------------

@pytest.fixture
def host(monkeypatch):
    """A host with all the memory there is; a test may change it, in bytes. asked: what is allocated there."""
    host = SimpleNamespace(available=math.inf, total=math.inf, rss=7, shared=7, asked=[])
    monkeypatch.setattr(host_memory, "OWN_GROUPS", "/nowhere") # those of this machine
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: host))

    def empty(*size, real=torch.empty, **kwargs):
        if "pin_memory" in kwargs:
            host.asked.append(size[0])
        return real(*size, **kwargs)
    monkeypatch.setattr(torch, "empty", empty)
    return host

@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_what_does_not_fit_into_the_host_is_refused_before_any_of_it_is_there(quantize, host, late):
    """Three of five blocks, as they will wait there. What was converted to another dtype is in memory already, and goes
    while it is copied."""
    block = build(0, quantize, blocks=1)[0].transformer_blocks[0]
    need = 3 * sum(p.nbytes for name, p in block.named_parameters() if ".lora_" not in name)
    for converted in (0, need // 3):
        host.available, host.rss = need - converted, host.shared + converted
        build(3, quantize)
        assert len(host.asked) == 3 and sum(host.asked) == pytest.approx(need, rel=0.02)
        host.asked.clear()
        host.available -= 1
        with refused("--offload", "3 blocks need", "--quantize"):
            build(3, quantize)
        assert not host.asked

GIB = 2**30
LIMITS = { # files of control groups, in GiB or words -> what is free, and in all
    "none": ({}, 50, 100),
    "no limit": ({"memory.max": "max", "memory.current": 5}, 50, 100),
    "a container": ({"memory.max": 20, "memory.current": 5, "memory.stat": 2}, 17, 20), # 2 are files that were read
    "a group above ours": ({"a/memory.max": 30, "a/memory.current": 10, "a/b/memory.max": 40, "a/b/memory.current": 0},
                           20, 30),
    "a container under its host's name": ({"b/memory.max": 7, "b/memory.current": 1}, 6, 7),
    "version 1": ({"memory/a/memory.limit_in_bytes": 8, "memory/a/memory.usage_in_bytes": 3,
                   "memory/a/memory.stat": 1}, 6, 8),
    "over it": ({"memory.max": 20, "memory.current": 21}, 0, 20)}
@pytest.mark.parametrize("kind", LIMITS)
def test_the_memory_of_the_host_is_that_of_this_job(tmp_path, host, monkeypatch, kind):
    """Its control groups' in both versions: where Linux kills the process without a word."""
    files, free, total = LIMITS[kind]
    for name, value in files.items():
        place = tmp_path / "groups" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        text = str(value * GIB) if isinstance(value, int) else value
        if name.endswith("stat"):
            key = "total_active_file" if "version 1" in kind else "active_file"
            text = f"anon 5\n{key} {value * GIB - 4096}\n{key.replace('active', 'inactive')} 4096"
        place.write_text(text + "\n", "utf-8")
    (tmp_path / "own").write_text("4:memory:/a/b\n1:name=systemd:/\n0::/a/b\n", "utf-8")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "own")
    host.available, host.total, host.rss, host.shared = 50 * GIB, 100 * GIB, 3 * GIB, 2 * GIB
    assert host_memory.host_memory() == (free * GIB, total * GIB)
    picture_files.pixels_that_fit.cache_clear()
    assert picture_files.pixels_that_fit() == free * GIB // 16
    picture_files.pixels_that_fit.cache_clear()

def test_processes_share_the_memory_of_their_host(host, monkeypatch):
    """Some may have theirs by now, so what all take is compared with all that there is."""
    block = torch.nn.Linear(2**15, 2**14, bias=False, dtype=torch.bfloat16, device="meta") # 1 GiB
    host.available, host.total = 60 * 2**30, 480 * 2**30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert offloading.check_host(block, 60) == offloading.check_host(block, 120, shards=2) == 60 * 2**30
    for name, blocks, words in (
            ("total", 60, "60 blocks need 480.0 GiB of host memory, 479.5 are there for 8 processes; "),
            ("available", 60, "60 blocks need 60.0 GiB of host memory, 59.5 are free; "),
            ("available", 119, "119 blocks need 59.5 GiB of host memory, 59.0 are free; ")):
        with monkeypatch.context() as patch, pytest.raises(common.InputError, match=words):
            patch.setattr(host, name, getattr(host, name) - 2**29 * (1 + blocks % 2))
            offloading.check_host(block, blocks, shards=1 + blocks % 2)

def test_shards_that_do_not_fit_into_the_host_are_refused_before_they_are_made(host, monkeypatch):
    """One half of each block, in each of two processes."""
    model = hot_model(dtype=torch.float32)
    need = sum(p.nbytes for p in model.transformer_blocks.parameters()) // 2
    made = []
    monkeypatch.setattr(sharding, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(sharding, "fully_shard", lambda module, **_: made.append(module))
    monkeypatch.setattr(sharding.dist, "get_world_size", lambda: 2)
    host.available = need
    predict.place_transformer(patched_copy(model), "cpu", offload=2, fsdp=True)
    assert len(made) == 3
    host.available -= 1
    with refused("--offload", "2 blocks need"):
        predict.place_transformer(patched_copy(model), "cpu", offload=2, fsdp=True)
    assert len(made) == 3
    predict.place_transformer(patched_copy(model), "cpu", fsdp=True)

def test_memory_that_cannot_be_pinned_is_one_line(tmp_path, small, host, late, monkeypatch):
    """CUDA says so in an error that is no torch.OutOfMemoryError, and in several lines."""
    def empty(*size, real=torch.empty, **kwargs):
        if "pin_memory" in kwargs and len(host.asked) == 1:
            raise torch.AcceleratorError("CUDA error: out of memory\nCompile with this and that")
        return real(*size, **kwargs)
    monkeypatch.setattr(torch, "empty", empty)
    result = run_script("train.py", *small.flags, "--offload", "all", "--out_dir", tmp_path / "run")
    assert result.status == 1 and len(host.asked) == 1
    assert is_one_line(result.errors[-1], "--offload: 3 blocks need", "(CUDA error: out of memory)"), result.err
