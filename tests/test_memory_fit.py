"""training/memory_fit.py: on a GPU, as few blocks are computed again as its memory allows. Here bytes are counted on a
CPU."""
import dataclasses
import functools
import itertools
import json
import math
import re
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel

import predict
import rope_patch
from training import memory_fit, plan
from tests import varlen_cpu # which gives torch's variable-length attention a CPU kernel
from tests.harness import (as_strangers, assert_bitwise, copy_model, curve, hot_model, is_one_line, log_of, lora_of,
                           make_batch, patched_copy, recipe, run, run_script, start_ranks, works)

BLOCKS = 10

passes = itertools.count()

def count_bytes(f, device):
    """fit.measure for a CPU. Each pass is said to be faster than the one before, so attention is kept where it fits."""
    with plan.LiveBytes(torch.nn.Module()) as live:
        f()
    return live.peak, -next(passes)

def on_a_card(room, varlen=False):
    """Makes fit.py see one with so many free bytes, and rope_patch.py the one kernel of attention."""
    memory_fit.has_own_memory, memory_fit.room = lambda device: True, lambda device: room
    memory_fit.measure = count_bytes
    if varlen:
        rope_patch.has_varlen = lambda x: True

@pytest.fixture
def card(monkeypatch):
    """on_a_card, for this test alone."""
    for module, name in ((memory_fit, "has_own_memory"), (memory_fit, "room"), (memory_fit, "measure"),
                         (rope_patch, "has_varlen")):
        monkeypatch.setattr(module, name, getattr(module, name))
    return on_a_card

# ---- which pack is the largest ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("batch_size, max_tokens", [(1, 50), (3, 50), (3, 47), (4, 1000), (2, 9)])
def test_no_pack_is_larger_than_the_largest(batch_size, max_tokens):
    lengths = {17, 11, 30, 8}
    args = SimpleNamespace(batch_size=batch_size, max_tokens=max_tokens)
    packs = [pack for n in range(1, batch_size + 1) for pack in itertools.combinations_with_replacement(lengths, n)
             if n == 1 or sum(pack) <= max_tokens]
    most = max(map(sum, packs))
    got = sum(memory_fit.largest_pack(lengths, args, 1))
    assert got == most

@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_with_several_processes_a_pack_has_fewer_samples(processes, monkeypatch):
    """What train.py deals out is never larger than the largest pack, which comes. Each process gets a sample before one
    gets a second."""
    deal_packs = recipe()["deal_packs"]
    monkeypatch.setitem(deal_packs.__globals__, "world_size", processes)
    lengths, args = {17, 11, 30, 8}, deal_packs.__globals__["args"]
    monkeypatch.setattr(args, "batch_size", 4), monkeypatch.setattr(args, "max_tokens", 60)
    dealt = []
    for batch in itertools.product(lengths, repeat=4):
        dealt += [sum(batch[place] for place in pack) for packs in deal_packs(batch) for pack in packs]
    assert max(dealt) == sum(memory_fit.largest_pack(lengths, args, processes))

def test_several_samples_are_measured_as_such():
    """If they come near the longest one, as they take a little more memory than one sample of so many tokens."""
    def pack(lengths, batch_size):
        return memory_fit.largest_pack(lengths, SimpleNamespace(batch_size=batch_size, max_tokens=100), 1)
    assert pack({98, 48}, 2) == [49, 49] and pack({98, 48}, 1) == [98] and pack({98, 40}, 2) == [98]

def test_the_largest_pack_of_thousands_of_lengths_is_found_at_once():
    args, begin = SimpleNamespace(batch_size=64, max_tokens=100_000), time.process_time()
    assert sum(memory_fit.largest_pack(set(range(501, 8000, 2)), args, 1)) == 100_000
    args.max_tokens = 10**11
    assert sum(memory_fit.largest_pack({700, 900}, args, 1)) == 64 * 900
    assert time.process_time() - begin < 5

@pytest.mark.parametrize("tokens", [5, 6, 77, 500, 8450, 34_001])
def test_a_blank_sample_has_that_many_tokens_or_a_few_more(tokens):
    [(_, h, w)], text = memory_fit.shape_of(tokens)
    assert 0 <= h * w + text - tokens < w and max(h, w) < 200

def test_the_rotary_tables_of_all_sizes_are_counted():
    """diffusers keeps them on the device, for 128 pictures at most."""
    def sample(*pictures):
        return SimpleNamespace(encodings=[dict(img_shapes=[(1, h, w) for h, w in pictures])])
    samples = [sample((64, 64), (64, 64)), sample((64, 64)), sample((32, 64), (64, 64))]
    assert memory_fit.table_bytes(samples) == 512 * (64 * 64 * 2 + 32 * 64)
    assert memory_fit.table_bytes([sample((n, 10)) for n in range(1, 201)]) == 512 * 10 * sum(range(73, 201))
    # and they are what diffusers keeps
    model = hot_model(dtype=torch.float32, num_layers=1)
    table = model.pos_embed._compute_video_freqs
    first = table(1, 8, 12, 0)
    assert first.numel() * first.itemsize == 8 * 12 * 8 * sum(model.config.axes_dims_rope) // 2
    for n, kept in ((127, True), (128, False)):
        for width in range(n):
            table(1, 1, width + 1, 1)
        assert (table(1, 8, 12, 0) is first) == kept

# ---- how much fits ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("selective", [False, True])
def test_as_many_blocks_are_kept_as_surely_fit(selective):
    """By a card's rule: the inputs of all blocks that are recomputed, all of those that are kept, and of one block at
    work. Nothing is tried that does not fit; in the end there is not room for one more."""
    for free in range(50, 1200, 7):
        def added(kept, keeps_attention):
            bytes_ = (60 - kept) * (2 if keeps_attention else 1) + 12 * max(kept, 1) + 8
            assert bytes_ <= free or kept == keeps_attention == 0
            return bytes_, 1 - 0.1 * keeps_attention
        kept, keeps_attention, adds = memory_fit.find_fit(60, free, 60, added, selective)
        assert adds == added(kept, keeps_attention)[0] and (kept == 60 or free - adds < 12 + 8 / max(kept, 1))
        assert keeps_attention == (selective and free >= 80 + 63 and kept < 60)

def test_a_try_that_runs_out_of_memory_costs_nothing():
    """Fragments, or another process: what was found before it stays."""
    def added(kept, selective):
        return math.inf if kept > 20 else 60 - kept + 12 * max(kept, 1) + 8, 1
    kept, _, adds = memory_fit.find_fit(60, 10**4, 60, added, False)
    assert kept == 0 and adds == added(0, False)[0] # its first try is all 60
    kept, _, adds = memory_fit.find_fit(60, 400, 60, added, False)
    assert 0 < kept <= 20 and adds == added(kept, False)[0] <= 400

def test_attention_is_kept_only_if_that_pass_is_the_faster_one():
    """Each operation of such a block passes through Python, which takes longer than a short attention."""
    for seconds, keeps in ((0.9, True), (1.1, False)):
        def added(kept, selective):
            return 60 - kept + 60 * selective + 12 * max(kept, 1) + 8, seconds if selective else 1.0
        kept, keeps_attention, adds = memory_fit.find_fit(60, 300, 60, added, True)
        assert keeps_attention == keeps and 0 < kept < 60 and adds == added(kept, keeps)[0]

def test_with_fsdp_no_try_comes_near_the_edge():
    """There a pass that runs out of memory cannot be agreed on."""
    def added(kept, selective):
        tried.append(60 - kept + 60 * selective + 20 * max(kept, 1))
        return tried[-1], 1 - selective
    for free in range(100, 1300, 50):
        tried = []
        kept, _, adds = memory_fit.find_fit(60, free, 60, added, True, edge=memory_fit.EDGE)
        assert max(tried[1:], default=0) <= memory_fit.EDGE * free
        assert kept == 60 or adds > memory_fit.EDGE * free - 61

def hot_transformer():
    model = patched_copy(hot_model(dtype=torch.float32, num_layers=BLOCKS)).requires_grad_(False)
    predict.add_lora(model, r=4, target_modules=["to_q", "net.2"], init_lora_weights=False)
    return model.train()

def flow_loss(model, items):
    latents = [torch.cat([i.x0.to(model.dtype), i.controls]) for i in items]
    preds = rope_patch.run_packed(model, latents, [i.prompt for i in items], torch.stack([i.s for i in items]),
                                  [i.img_shapes for i in items])
    return [(pred - i.velocity).square().mean() for pred, i in zip(preds, items)]

@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_that_is_kept_is_not_computed_again(dropout, monkeypatch):
    """And the gradients are the same to the bit. On CUDA attention is one kernel; here it is written out."""
    calls, real = [], varlen_cpu.varlen_reference
    monkeypatch.setattr(rope_patch, "has_varlen", lambda x: True)
    monkeypatch.setattr(varlen_cpu, "varlen_reference", lambda *args: calls.append(1) or real(*args))
    model = patched_copy(hot_model(dtype=torch.float32, num_layers=3)).requires_grad_(False)
    lora = predict.add_lora(model, r=4, target_modules=["to_q", "to_out.0"], init_lora_weights=False,
                            lora_dropout=dropout)
    model.train()
    samples, numbers = make_batch(([(1, 8, 8), (1, 8, 6)], 20), ([(1, 4, 12), (1, 4, 4)], 9)), []
    for recomputed, options in ((0, {}), (3, {}), (3, dict(context_fn=memory_fit.keep_attention)),
                                (2, dict(context_fn=memory_fit.keep_attention))):
        rope_patch.checkpoint_blocks(model, recomputed, preserve_rng_state=dropout > 0, **options)
        torch.manual_seed(5)
        loss = sum(out.square().sum() for out in run(model, "packed", samples))
        grads = torch.autograd.grad(loss, list(lora.values()))
        numbers.append([len(calls), loss, *grads])
        calls.clear()
    assert [n[0] for n in numbers] == [3, 6, 3, 3]
    for got in numbers[1:]:
        assert_bitwise(got[1:], numbers[0][1:])

def test_room_and_measure_ask_torch_for_the_right_numbers(monkeypatch):
    have = dict(mem_get_info=(30, 100), memory_reserved=10, memory_allocated=4, max_memory_allocated=4)
    for name in have:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: have[name])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: have.update(
        max_memory_allocated=have["memory_allocated"]))
    margins = [memory_fit.margin(gib * memory_fit.GIB) for gib in (100, 8)]
    assert margins == [5 * memory_fit.GIB, memory_fit.GIB]
    assert memory_fit.room("cuda") == 30 + (10 - 4) - memory_fit.margin(100)
    have["max_memory_allocated"] = 99 # of something before
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert memory_fit.measure(lambda: have.update(max_memory_allocated=25), "cuda")[0] == 25 - 4
    assert have["max_memory_allocated"] == 4 # the log's `memory` is the training's
    assert memory_fit.measure(lambda: time.sleep(0.1), "cuda")[1] >= 0.1

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert memory_fit.measure(full, "cuda") == (math.inf, math.inf)

def test_lengths_are_all_that_can_be_drawn():
    pictures = [[(1, 2, 3), (1, 4, 5)], [(1, 20, 30), (1, 4, 5)]]
    sample = SimpleNamespace(encodings=[dict(img_shapes=shapes) for shapes in pictures], texts={
        ("a", True): dict(tokens=1000), ("", True): dict(tokens=2000), ("a", False): dict(tokens=5000)})
    assert memory_fit.lengths_of([sample], recipe()["Pick"]) == {1026, 2026, 5006, 1620, 2620, 5600}

def fitted(model, room, varlen=True, **changes):
    """-> (kept blocks, what is said)."""
    flags = dict(batch_size=2, max_tokens=900, device="cpu", compile=False, fsdp=False, ema=0, resume=False) | changes
    recompute, said = functools.partial(rope_patch.checkpoint_blocks, model, preserve_rng_state=False), []
    on_a_card(memory_fit.learning_bytes(model, SimpleNamespace(**flags)) + room, varlen)
    recomputed = memory_fit.keep_what_fits(model, {400, 300}, 0, recipe()["Item"], flow_loss, recompute,
                                           SimpleNamespace(**flags), said.append)
    return BLOCKS - recomputed, said[-1]

def test_what_is_kept_fits_and_nothing_else_was_tried(card, monkeypatch):
    model, tried, found = hot_transformer(), [], []
    monkeypatch.setattr(plan.LiveBytes, "__exit__", lambda self, *args: (
        tried.append(self.peak), super(plan.LiveBytes, self).__exit__(*args))[1])
    parameters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert memory_fit.learning_bytes(model, SimpleNamespace(ema=0)) == 5 * parameters
    for room in (0, 76, 86, 10**6):
        tried.clear()
        kept, said = fitted(model, room * 2**20, varlen=False)
        found.append(kept)
        assert len(tried) == 2 or max(tried[2:]) <= room * 2**20 # (all blocks are recomputed in the first two)
        assert f"{kept} blocks are kept; a pass of 800 tokens, the largest, takes" in said
        assert all(p.grad is None for p in model.parameters())
    assert found[0] == 0 < found[1] < found[2] < found[3] == BLOCKS

@pytest.mark.parametrize("changes, keeps", [({}, True), (dict(compile=True), False)])
def test_attention_is_kept_where_that_is_said(changes, keeps, card, monkeypatch):
    calls, real, model = [], varlen_cpu.varlen_reference, hot_transformer()
    monkeypatch.setattr(varlen_cpu, "varlen_reference", lambda *args: calls.append(1) or real(*args))
    found = set()
    for room in (40, 56, 88):
        kept, said = fitted(model, room * 2**20, **changes)
        selective = f"{kept} blocks are kept, and the attention of the other {BLOCKS - kept};" in said
        found.add(selective)
        calls.clear()
        sum(flow_loss(model, memory_fit.blank_items(recipe()["Item"], [memory_fit.shape_of(400)], model))).backward()
        assert len(calls) == (BLOCKS if selective else 2 * BLOCKS - kept)
    assert (True in found) == keeps

def test_a_new_field_of_an_item_gets_its_zeros_and_one_with_a_default_costs_nothing(card):
    """Of the shape that its annotation says: a field that fit did not know would fail on a card alone. One with a
    default is left at it, or all would pay for a tensor of few. And the annotations are right: train.py's own items
    have these shapes."""
    names = recipe()
    longer = dataclasses.make_dataclass("Longer", [("reference", "base K J"), ("level", "float32"),
                                                   ("few", "float32 I C", None)],
                                        bases=(names["Item"],), kw_only=True)
    model, shapes = names["transformer"], [([(1, 4, 6), (1, 2, 3), (1, 1, 5)], 9)]
    [blank], [old] = memory_fit.blank_items(longer, shapes, model), memory_fit.blank_items(names["Item"], shapes, model)
    assert blank.reference.shape == (11, model.config.joint_attention_dim) and blank.level.shape == ()
    assert blank.few is blank.mask is None
    picked = names["pick"](0)
    item = names["load_item"](picked)
    [blank] = memory_fit.blank_items(names["Item"], [(item.img_shapes, len(item.prompt))], model)
    for name, value in vars(item).items():
        if torch.is_tensor(value):
            want = getattr(blank, name)
            assert (value.shape, value.dtype) == (want.shape, want.dtype) and not want.any(), name
    assert {name for name, value in vars(old).items() if torch.is_tensor(value)} == {
        f.name for f in dataclasses.fields(names["Item"]) if f.default is dataclasses.MISSING} - {"img_shapes"}
    names["flow_loss"](model, [old])

# ---- what --plan expects of a card -----------------------------------------------------------------------------------

def real_transformer(blocks):
    with init_empty_weights():
        model = QwenImageTransformer2DModel(num_layers=blocks).requires_grad_(False)
    torch.nn.Module.to(model, torch.bfloat16)
    model = rope_patch.patch_qwen_model_for_multi_resolution(model)
    predict.add_lora(model, r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    return model

def test_the_counted_time_is_that_of_its_parts():
    """Four samples of 8,450 tokens; the sums that were made by hand, of a sample: matrix products 0.54 s, attention
    0.69, all else 0.23 on an H200 if all is computed again; 0.36, 0.56 and 0.16 if all is kept."""
    def seconds(*args):
        return plan.step_seconds(real_transformer(60), [[8450]] * 4, *args)
    assert seconds("H200", 1, False, 0) == pytest.approx(4 * (0.54 + 0.69 + 0.23), rel=0.01)
    assert seconds("H200", 0, False, 0) == pytest.approx(4 * (0.36 + 0.56 + 0.16), rel=0.01)
    assert seconds("H200", 1, True, 0) == pytest.approx(4 * (0.54 + 0.56 + 0.23), rel=0.01)
    assert seconds("RTX 4090", 1, False, 0) == pytest.approx(4 * 5.2, rel=0.02)
    assert seconds("RTX 5090", 1, False, 0) == pytest.approx(4 * (1.91 + 1.54 + 0.55), rel=0.01)
    assert seconds("A100", 1, False, 0) == pytest.approx(4 * (1.50 + 1.21 + 0.51), rel=0.01)
    assert seconds("RTX 4090", 1, False, 10) == 80 # that long a pass waits for its weights, twice
    # a forward pass alone, in which nothing is kept
    assert seconds("H200", 1, False, 0, 0) == pytest.approx(4 * (0.18 + 0.13 + 0.07), rel=0.05)
    # a pass of few tokens waits for the host, and longest where attention alone is kept
    waits = [plan.step_seconds(real_transformer(60), [[500]], "H200", *args) * 1000 / 60
             for args in ((0, False, 0), (1, False, 0), (1, True, 0), (1, False, 0, 0))]
    assert waits == pytest.approx([plan.HOST[kind] for kind in ("kept", "recomputed", "selective", "forward")])

# ---- in train.py -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def flags(small, tmp_path_factory):
    """small.flags for a model that has no number of blocks among its defaults, as tiny has."""
    folder = as_strangers(copy_model(tmp_path_factory.mktemp("model") / "tiny"))
    return [*small.flags, "--model", folder, "--max_steps", 3, "--dtype", "float32"]

def trained(flags, folder):
    result = works("train.py", *flags, "--out_dir", folder)
    recomputed = re.search(r"the backward pass computes (\d) of 3 blocks again", result.out) # no line if it is none
    return int(recomputed[1]) if recomputed else 0, curve(log_of(folder)), lora_of(folder)

def test_a_resumed_run_may_keep_another_number(flags, card, tmp_path):
    want = trained(flags, tmp_path / "want")
    card(10**12)
    assert trained([*flags, "--max_steps", 2], tmp_path / "run")[0] == 0
    card(10**6)
    recomputed, curve, lora = trained([*flags, "--resume"], tmp_path / "run")
    assert recomputed == 3 and curve == want[1]
    assert_bitwise(lora, want[2])

@pytest.fixture(scope="module")
def little_room(flags, tmp_path_factory):
    """Free bytes that hold no block of that training, but attention's output of all of them."""
    tried = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("has_own_memory", lambda device: True), ("room", lambda device: 0),
                            ("measure", lambda f, device: tried.append(count_bytes(f, device)) or tried[-1])):
            patch.setattr(memory_fit, name, value)
        patch.setattr(memory_fit, "learning_bytes", lambda model, args: 0)
        trained(flags, tmp_path_factory.mktemp("room") / "run")
    return tried[-1][0]

@pytest.mark.parametrize("more", [[], ["--lora_dropout", 0.5], ["--offload", "all"]],
                         ids=["plain", "dropout", "offload"])
def test_a_run_is_the_same_to_the_bit_whatever_fits(flags, more, little_room, card, tmp_path):
    """No card; one that is full; one that is empty; and, where attention is one kernel, one that is empty, and one
    with room for the attention of all blocks."""
    def run_on(name, *room, **more_of_card):
        if room:
            card(*room, **more_of_card)
        return trained([*flags, *more], tmp_path / name)
    runs = [run_on("none"), run_on("full", 10**6), run_on("empty", 10**12)]
    one_kernel = [run_on("one kernel", 10**12, varlen=True), run_on("some", int(1.3 * little_room), varlen=True)]
    assert [recomputed for recomputed, *_ in runs] == [3, 3, 0] and one_kernel[0][0] == 0 < one_kernel[1][0]
    for want, *others in (runs, one_kernel):
        for got in others:
            assert got[1] == want[1]
            assert_bitwise(got[2], want[2])

@pytest.mark.parametrize("more", [[], ["--fsdp"]], ids=["data parallel", "fsdp"])
def test_all_processes_keep_what_the_smallest_room_allows(flags, start, tmp_path, little_room, more):
    """And train what they would have trained with all blocks computed again."""
    some = int((2 if more else 1.3) * little_room) # (FSDP gathers a block in memory that this counts too)
    for name, rooms in (("none", (0, 0)), ("less", (10**12, 0)), ("some", (some,) * 2)):
        preludes = [functools.partial(on_a_card, room, varlen=True) for room in rooms]
        ranks = start_ranks(start, *flags, *more, "--out_dir", tmp_path / name, preludes=preludes)
        assert [r.wait() for r in ranks] == [0, 0], [r.output() for r in ranks]
        assert "computes 3 of 3 blocks again" in ranks[0].output()
        assert ("and the attention of the other" in ranks[0].output()) == (name == "some")
        assert curve(log_of(tmp_path / name)) == curve(log_of(tmp_path / "none"))

def test_a_pack_that_never_fits_is_told_before_the_first_step(flags, card, tmp_path, monkeypatch):
    card(10**9)
    monkeypatch.setattr(memory_fit, "measure", lambda f, device: (math.inf, math.inf))
    result = run_script("train.py", *flags, "--out_dir", tmp_path / "run")
    assert result.status == 1 and is_one_line(result.errors[-1], "--max_tokens 10000", "--offload"), result.err
    assert "step 1/" not in result.out

def test_train_py_measures_the_lengths_of_all_samples(flags, card, monkeypatch, tmp_path):
    seen = []
    card(10**12)
    monkeypatch.setattr(memory_fit, "largest_pack",
                        lambda lengths, args, processes: seen.append(lengths) or [max(lengths)])
    trained([*flags, "--batch_size", 1, "--max_steps", 10], tmp_path / "run")
    log = (tmp_path / "run/log.jsonl").read_text("utf-8").splitlines()[1:]
    assert seen == [{json.loads(line)["tokens"] for line in log}] and len(seen[0]) == 2

def test_a_number_that_is_given_is_not_measured(flags, card, tmp_path):
    card(10**12)
    assert trained([*flags, "--gradient_checkpointing", 2], tmp_path / "run")[0] == 2
