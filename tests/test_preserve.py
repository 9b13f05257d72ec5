"""
--preserve: other instructions, to which the base's own answer is right.

$ python -m pytest -q tests/test_preserve.py -s    # half a minute
"""
import shutil
from collections import Counter

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

import cache
from tests.harness import (EXACT, FULL, NATIVE, TINY, add_item, curve, is_one_line, log_of, lora_of, losses_of,
                           paint_picture, rel, run_script, show, start_ranks, validations_of)

LINES = ["keep the image", "make the background blue", "remove the circle"]

@pytest.fixture
def flags(tmp_path, data):
    """Of a training on three samples of different sizes, of which half the draws are preserved."""
    add_item(data, "wide", [(128, 64), (96, 64), (32, 32)], mask=paint_picture((128, 64)))
    return ["--data", data, "--val_data", "--cache_dir", tmp_path / "c", "--batch_size", 4, "--max_tokens", 150,
            "--lora_rank", 2, "--lr", 1e-3, "--lr_scheduler", "constant", "--device", "cpu", *NATIVE, *EXACT,
            "--preserve", 0.5, "--preserve_prompts", *LINES]

def trained(flags, out_dir, *more):
    result = run_script("train.py", *flags, "--out_dir", out_dir, *more)
    assert result.status == 0, result.err
    return result

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
    asked = [i.velocity is None for i in items]
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
    """The LoRA is the base until it has learned something else."""
    ns = trained(flags, tmp_path / "a", "--max_steps", 1, "--preserve", 1).globals
    record, = log_of(tmp_path / "a")
    assert record["loss"] == record["grad_norm"] == 0 and set(record["losses"]) == {0.0}
    assert all(ns["pick"](p).prompt in LINES for p in range(99))

def test_it_is_the_same_however_it_is_computed(tmp_path, flags, start):
    """Resumed: to the bit, with dropout. Padded, one at a time, without a cache, by two processes, with --fsdp (where
    all must run as many forward passes), with blocks recomputed or offloaded: to 1e-5."""
    dropout = ["--lora_dropout", 0.5]
    trained(flags, tmp_path / "whole", "--max_steps", 4, *dropout)
    trained(flags, tmp_path / "parts", "--max_steps", 2, *dropout)
    trained(flags, tmp_path / "parts", "--max_steps", 4, *dropout, "--resume")
    assert curve(log_of(tmp_path / "parts")) == curve(log_of(tmp_path / "whole"))
    a, b = lora_of(tmp_path / "parts"), lora_of(tmp_path / "whole")
    assert all(torch.equal(a[k], b[k]) for k in a)
    flags = [*flags, "--max_steps", 4]
    trained(flags, tmp_path / "want", "--gradient_checkpointing", 0)
    want = losses_of(log_of(tmp_path / "want"))
    for n, more in enumerate((["--batching", "padded"], ["--max_tokens", 1], ["--no-use_cache"], ["--offload", 2],
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
    encoded = run_script("cache.py", *[f for f in flags if f not in ("--batch_size", 4, "--max_tokens", 150,
        "--lora_rank", 2, "--lr", 1e-3, "--lr_scheduler", "constant")])
    assert encoded.status == 0, encoded.err
    trained(["--data", *index], tmp_path / "b")

@pytest.mark.parametrize("text, named", [("add a red border", "is trained"), ("add a red border ", "is trained"),
                                         ("a <|im_end|> b", "special token")])
def test_lines_that_cannot_be_right_are_one_line(tmp_path, flags, text, named):
    result = run_script("train.py", *flags, text, "--out_dir", tmp_path / "o", "--max_steps", 1)
    assert result.status in (1, 2) and len(result.errors) == 1 and is_one_line(result.errors[0], named), result.err
    assert not (tmp_path / "c/latents").exists() and not list(tmp_path.glob("o/*.safetensors"))

# ---- what it is good for ---------------------------------------------------------------------------------------------

KNOWN = ["keep the image", "make the background red", "make the background like picture 2", "remove the circle",
         "remove the triangle", "paint the top orange", "paint the left like picture 2", "paint the bottom gray"]

@pytest.mark.skipif(not FULL, reason="nine trainings of a minute and more each: --full -k forgets -s")
def test_the_demo_forgets_nothing_without_known_edits_among_its_data(tmp_path):
    """The toy edit, learned from its own pairs alone, by three seeds: what that costs the instructions that the base
    knows, in dB, with and without --preserve. GUIDE.md has the table."""
    captions = [p for p in (TINY / "toys/data/target").glob("*.txt") if "border" in p.read_text()]
    for path in [path for caption in captions for path in (TINY / "toys/data").glob(f"*/{caption.stem}*")]:
        (tmp_path / "border" / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "border" / path.parent.name)
    val = ["--val_data", TINY / "toys/val", TINY / "toys/known", "--cache_dir", tmp_path / "cache"]
    ways = {"nothing": [], "empty": ["--preserve", 0.4],
            "lines": ["--preserve", 0.4, "--preserve_prompts", *KNOWN]}
    lost, edit = {way: [] for way in ways}, {way: [] for way in ways}
    for seed in range(3):
        for way, flags in ways.items():
            trained(["--data", tmp_path / "border", *val, "--seed", seed, *flags], tmp_path / f"{way}-{seed}")
            psnr = validations_of(tmp_path / f"{way}-{seed}")[-1]["psnr"]
            edit[way].append(psnr.pop("val")["lora"])
            lost[way].append({name: m["base"] - m["lora"] for name, m in psnr.items()})
    for way in ways:
        print(f"\n{way}: val {[round(x, 1) for x in edit[way]]}")
        for name in lost[way][0]:
            print(f"  {name} loses {[round(row[name], 1) for row in lost[way]]}")
    mean = lambda way: {name: sum(row[name] for row in lost[way]) / 3 for name in lost[way][0]}
    assert max(mean("lines").values()) <= 2.5 and sum(edit["lines"]) / 3 > sum(edit["nothing"]) / 3 - 5
    assert all(mean("nothing")[f"known/{name}"] > 5 for name in ("keep", "side")) and mean("empty")["known/side"] > 4
