"""
--preserve: other instructions, to which the base's own answer is right.

$ python -m pytest -q tests/test_preserve.py -s    # half a minute
"""
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel

import cache
from tests.harness import (ADAMW, EXACT, FULL, NATIVE, TINY, add_item, curve, is_one_line, log_of, lora_of, losses_of,
                           paint_picture, rel, run_script, show, start_ranks, toy_functions, validations_of, works)

LINES = ["keep the image", "make the background blue", "remove the circle"]

@pytest.fixture
def flags(tmp_path, data):
    """Of a training on three samples of different sizes, of which half the draws are preserved."""
    add_item(data, "wide", [(128, 64), (96, 64), (32, 32)], mask=paint_picture((128, 64), mode="L"))
    return ["--data", data, "--val_data", "--cache_dir", tmp_path / "c", "--batch_size", 4, "--max_tokens", 150,
            "--lora_rank", 2, *ADAMW, "--lr_scheduler", "constant", "--device", "cpu", *NATIVE, *EXACT,
            "--preserve", 0.5, "--preserve_prompts", *LINES]

def trained(flags, out_dir, *more):
    return works("train.py", *flags, "--out_dir", out_dir, *more)

def test_a_share_of_the_positions_gets_one_of_the_lines_and_the_others_feel_nothing(tmp_path, flags):
    more = ["--max_steps", 1, "--caption_dropout_rate", 0.3, "--prompt_image_dropout_rate", 0.3]
    ns = trained(flags, tmp_path / "a", *more).globals
    plain = trained(flags[:flags.index("--preserve")], tmp_path / "b", *more).globals
    picks = [(ns["pick"](p), plain["pick"](p)) for p in range(900)]
    picked = Counter(p.prompt for p, _ in picks if p.prompt in LINES)
    assert len(picked) == 3 and all(115 < n < 185 for n in picked.values()), picked
    for p, without in picks:
        assert p.preserve == (p.prompt in LINES) and not without.preserve and p.s == without.s
        if p.preserve:
            assert p.with_controls and len(p.img_shapes) == 1 + len(p.sample.controls)
        else:
            assert (p.sample.name, p.img_shapes, p.prompt, p.with_controls) == (
                without.sample.name, without.img_shapes, without.prompt, without.with_controls)

def test_such_a_sample_learns_the_velocity_of_stock_without_the_lora(tmp_path, flags):
    """With a LoRA that has learned something. A mask is of the edit, not of these; the others' losses are as ever."""
    ns = trained(flags, tmp_path / "a", "--max_steps", 3, "--lr", 0.02, "--lora_dropout", 0.5).globals
    stock = cache.load_part(QwenImageTransformer2DModel, TINY / "transformer", "float32")
    model = ns["transformer"].eval()
    items = [ns["load_item"](ns["pick"](p)) for p in range(12)]
    asked = [i.preserve for i in items]
    items = ns["ask_base"](model, items)
    losses = ns["flow_loss"](model, items)
    assert all(p.requires_grad for p in ns["lora"].values())
    assert {(was_asked, item.weight.unique().numel() > 1) for item, was_asked in zip(items, asked)} == {
        (True, False), (False, False), (False, True)}
    for item, was_asked, loss in zip(items, asked, losses):
        noisy = torch.cat([(1 - item.s) * item.x0 + item.s * item.noise, item.controls])[None]
        call = dict(encoder_hidden_states=item.prompt[None], timestep=item.s[None], img_shapes=[item.img_shapes],
                    return_dict=False)
        with torch.no_grad():
            want = stock(noisy, **call)[0][0, :len(item.x0)] if was_asked else item.noise - item.x0
            got = model(noisy, **call)[0][0, :len(item.x0)]
        assert rel(item.velocity, want) < 1e-5 and not item.velocity.requires_grad
        want_loss = ((got - want).square().mean(-1) * item.weight).sum() / item.weight.sum()
        show("loss", abs(loss.item() / want_loss.item() - 1), 1e-4)
        assert loss.item() == pytest.approx(want_loss.item(), rel=1e-4) and loss > 1e-4

def test_the_first_step_has_nothing_to_learn_of_them(tmp_path, flags):
    """The LoRA is the base until it has learned something else. (With --preserve 1 it never does, which is refused.)"""
    ns = trained(flags, tmp_path / "a", "--max_steps", 1, "--preserve", 0.9999).globals
    record, = log_of(tmp_path / "a")
    assert record["loss"] == record["grad_norm"] == 0 and set(record["losses"]) == {0.0}
    assert all(ns["pick"](p).prompt in LINES for p in range(99))

def test_it_is_the_same_however_it_is_computed(tmp_path, flags, start):
    """Resumed: to the bit, with dropout. One at a time, without a cache, by two processes, with --fsdp (where
    all must run as many forward passes), with blocks recomputed or offloaded: to 1e-5."""
    dropout = ["--lora_dropout", 0.5]
    trained(flags, tmp_path / "whole", "--max_steps", 3, *dropout)
    trained(flags, tmp_path / "parts", "--max_steps", 2, *dropout)
    trained(flags, tmp_path / "parts", "--max_steps", 3, *dropout, "--resume")
    assert curve(log_of(tmp_path / "parts")) == curve(log_of(tmp_path / "whole"))
    a, b = lora_of(tmp_path / "parts"), lora_of(tmp_path / "whole")
    assert all(torch.equal(a[k], b[k]) for k in a)
    flags = [*flags, "--max_steps", 3]
    trained(flags, tmp_path / "want", "--gradient_checkpointing", 0)
    want = losses_of(log_of(tmp_path / "want"))
    for n, more in enumerate((["--max_tokens", 1], ["--no-use_cache"], ["--offload", 2],
                              ["--gradient_checkpointing", 3])):
        trained(flags, tmp_path / f"{n}", *more)
        assert losses_of(log_of(tmp_path / f"{n}")) == pytest.approx(want, rel=1e-5), more
    trained(flags, tmp_path / "seldom", "--preserve", 0.2) # so that few packs have one
    for name, share, more in (("want", 0.5, []), ("seldom", 0.2, ["--fsdp"])):
        ranks = start_ranks(start, *flags, "--preserve", share, *more, "--out_dir", tmp_path / f"{name}-2")
        assert not any([r.wait() for r in ranks]), [r.output() for r in ranks]
        assert losses_of(log_of(tmp_path / f"{name}-2")) == pytest.approx(losses_of(log_of(tmp_path / name)), rel=1e-5)

def test_a_flag_that_would_do_nothing_is_told_and_runs_without_it_go_on(tmp_path, flags):
    plain = [*flags[:flags.index("--preserve")], "--max_steps", 1]
    for wrong, named in ((["--preserve_prompts", "keep the image"], "give both"), (["--mask", "auto"], "index")):
        index = [tmp_path / "c/tiny-data.json"] if "--mask" in wrong else plain[1:2]
        result = run_script("train.py", "--data", *index, *plain[2:], *wrong, "--out_dir", tmp_path / "o")
        assert result.status == 2 and is_one_line(result.errors[0], wrong[0], named), result.err
    trained(plain, tmp_path / "a")
    result = run_script("train.py", *flags, "--resume", "--out_dir", tmp_path / "a", "--max_steps", 2)
    assert result.status == 1 and is_one_line(result.errors[0], "preserve: 0.0 -> 0.5"), result.err
    trained([*plain, "--max_steps", 2], tmp_path / "a", "--resume")

def test_without_lines_the_instruction_is_empty_and_an_index_knows_the_lines(tmp_path, flags, data):
    blank = flags[:flags.index("--preserve_prompts")] + ["--max_steps", 1]
    ns = trained(blank, tmp_path / "a").globals
    assert {ns["pick"](p).prompt for p in range(50)} == {cache.NEGATIVE_PROMPT, "add a red border"}
    index = [tmp_path / "c/tiny-data.json", "--max_steps", 1, *flags[2:]]
    result = run_script("train.py", "--data", *index, "--out_dir", tmp_path / "b")
    assert result.status == 1 and is_one_line(result.errors[0], "keep the image", "--preserve*"), result.err
    works("cache.py", *[f for f in flags if f not in ("--batch_size", 4, "--max_tokens", 150,
        "--lora_rank", 2, *ADAMW, "--lr_scheduler", "constant")])
    trained(["--data", *index], tmp_path / "b")

@pytest.mark.parametrize("text, named", [("add a red border", "is trained"), ("add a red border ", "is trained"),
                                         ("a <|im_end|> b", "special token")])
def test_lines_that_cannot_be_right_are_one_line(tmp_path, flags, text, named):
    result = run_script("train.py", *flags, text, "--out_dir", tmp_path / "o", "--max_steps", 1)
    assert result.status in (1, 2) and len(result.errors) == 1 and is_one_line(result.errors[0], named), result.err
    assert not (tmp_path / "c/latents").exists() and not list(tmp_path.glob("o/*.safetensors"))

# ---- what it is good for ---------------------------------------------------------------------------------------------

# None of these lines is tested: what is named survives, and the question is what else does. So "keep" and "like", each
# of which has one instruction only, have no line here.
KNOWN = ["make the background blue", "make the background purple", "make the background white", "remove the circle",
         "paint the top orange", "paint the left like picture 2", "paint the bottom gray", "paint the right yellow"]
WAYS = {"nothing": [], "empty 0.4": ["--preserve", 0.4],
        "lines 0.4": ["--preserve", 0.4, "--preserve_prompts", *KNOWN],
        "lines 0.3": ["--preserve", 0.3, "--preserve_prompts", *KNOWN],
        "lines 0.15": ["--preserve", 0.15, "--preserve_prompts", *KNOWN]}
EDITS = ["background", "keep", "like", "remove", "side"]

def draw_unseen(folder):
    """It draws 24 borders and 16 toys of each known edit, which nothing is trained on: other scenes, other sizes."""
    toys = toy_functions()
    write, numbered, sizes = toys["write_dataset"], toys["numbered"], toys["VAL_SIZES"]
    write(folder / "val", numbered(toys["border_pairs"](24, sizes, 100)))
    known = {}
    for k, task in enumerate(toys["TOY_TASKS"]):
        pairs = toys["toy_pairs"](48, sizes, {task: 1}, [101, k])
        not_named = [pair for pair in pairs if pair[1] not in KNOWN]
        known |= numbered(not_named[:16], task + "/{:02d}")
    write(folder / "known", known)

def row_of(out_dir):
    """It returns what a run is judged by, in dB: mean and median PSNR of the edit, what each known edit gains; and the
    seconds of its steps."""
    validation = validations_of(out_dir)[-1]
    val = [p["psnr"][2] for p in validation["pictures"] if p["file"].startswith("val/")]
    row = dict(val=np.mean(val), median=np.median(val))
    for name in EDITS:
        means = validation["psnr"]["known/" + name]
        row[name] = means["lora"] - means["base"]
    return row | dict(seconds=sum(r["seconds"] for r in log_of(out_dir)))

def print_row(name, row):
    gained = " | ".join(f"{edit} {row[edit]:+.1f}" for edit in EDITS)
    print(f"{name}: val {row['val']:.1f} {row['median']:.1f} | {gained} | seconds {row['seconds']:.2f}")

@pytest.mark.skipif(not FULL, reason="fifteen trainings of a minute and more each: --full -k forgets -s")
def test_the_demo_forgets_nothing_without_known_edits_among_its_data(tmp_path):
    """The toy edit, learned from its own pairs alone, by three seeds: what that costs the instructions that the base
    knows, with and without --preserve. It prints GUIDE.md's table; the seconds are shares of those of `nothing`."""
    captions = [p for p in (TINY / "toys/data/target").glob("*.txt") if "border" in p.read_text("utf-8")]
    for path in [path for caption in captions for path in (TINY / "toys/data").glob(f"*/{caption.stem}*")]:
        (tmp_path / "border" / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "border" / path.parent.name)
    draw_unseen(tmp_path)
    captions = [*tmp_path.glob("known/target/*/*.txt"), *(TINY / "toys").glob("known/target/*/*.txt")]
    tested = {path.read_text("utf-8").strip() for path in captions}
    assert len(captions) == 5 * (16 + 4) and not tested & set(KNOWN)
    data = ["--data", tmp_path / "border", "--val_data", tmp_path / "val", tmp_path / "known", "--val_pictures", 104,
            "--cache_dir", tmp_path / "cache", "--max_steps", 450]
    rows = {way: [] for way in WAYS}
    print()
    for seed in range(3):
        for way, flags in WAYS.items():
            trained([*data, "--seed", seed, *flags], tmp_path / f"{way}-{seed}")
            row = row_of(tmp_path / f"{way}-{seed}")
            if way == "nothing":
                alone = row["seconds"]
            row["seconds"] /= alone
            rows[way].append(row)
            print_row(f"{way}, seed {seed}", row)
    mean = {way: {name: np.mean([row[name] for row in rows[way]]) for name in rows[way][0]} for way in WAYS}
    for way in WAYS:
        print_row(way, mean[way])
    assert min(mean["lines 0.4"][name] for name in EDITS) >= -2
    assert min(mean["lines 0.15"][name] for name in EDITS) >= -4
    assert mean["lines 0.4"]["val"] > mean["nothing"]["val"] - 3.5 < mean["lines 0.15"]["val"]
    assert max(mean["nothing"]["keep"], mean["nothing"]["side"]) < -5 and mean["empty 0.4"]["side"] < -4
