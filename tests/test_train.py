"""train.py: its stream, its loss, optimizer, flags, run folders and end. Validations: tests/test_validation.py. What it
computes: test_consistency.py."""
import functools
import gc
import importlib.util
import math
import os
import re
import shlex
import shutil
import sys
import threading
from collections import Counter
from math import prod
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
from PIL import Image

import cache
from library.cli import command_line
from library.files import tensor_files
import predict
import rope_patch
from tests.harness import (ADAMW, EXACT, FULL, HERE, NATIVE, ON_DEVICE, TINY, add_item, curve, demo_cache, error_of,
                           globals_of_train, is_one_line, log_of, lora_file, lora_of, lora_tensors, losses_of, rel,
                           run_script, show, start_ranks, train, train_demo, train_log, until, validations_of, works)

def test_trains_for_exactly_max_steps_and_keeps_two_checkpoints(tmp_path):
    assert [r["step"] for r in train_log(tmp_path / "a", "--save_every", 1)] == [1, 2, 3]
    assert sorted(p.name for p in tmp_path.glob("a/checkpoint-*")) == ["checkpoint-000002", "checkpoint-000003"]
    assert (tmp_path / "a/DONE").is_file()

def test_only_the_lora_trains_and_is_float32(tmp_path):
    """With a bf16 base too: fp32 adapters (1 + 1e-3 is 1 in bf16, so small steps would be lost), the base untouched."""
    ns = globals_of_train(tmp_path / "a", "--dtype", "bfloat16", "--no-use_cache")
    fresh = predict.load_transformer(TINY, "bfloat16").state_dict()
    after = {k.replace(".base_layer", ""): v for k, v in ns["transformer"].state_dict().items() if ".lora_" not in k}
    assert after.keys() == fresh.keys() and all(torch.equal(after[k], fresh[k]) for k in fresh)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in ns["lora"].values())
    assert not [n for n, p in ns["transformer"].named_parameters() if p.requires_grad and n not in ns["lora"]]

# ---- the stream ------------------------------------------------------------------------------------------------------

def noise_at(ns, position):
    picked = ns["pick"](position)
    return picked.s, torch.randn(24, 64, generator=picked.noise_generator)

def test_samples_and_noise_are_functions_of_seed_and_position(tmp_path):
    """The stream does not know of batch size, ranks or time: epochs are permutations, noise belongs to a position."""
    dropout = ["--caption_dropout_rate", 0.25]
    a = globals_of_train(tmp_path / "a", *dropout)
    b = globals_of_train(tmp_path / "b", *dropout, "--batch_size", 7, "--max_tokens", 100)
    c = globals_of_train(tmp_path / "c", *dropout, "--seed", 1)
    n = len(a["samples"])
    names = lambda ns, start: [ns["pick"](p).sample.name for p in range(start, start + n)]
    assert names(a, 0) == names(b, 0) != names(c, 0) and names(a, 0) != names(a, n)
    assert sorted(names(a, 0)) == sorted(names(a, n)) == sorted(s.name for s in a["samples"])
    for p in (0, 1, 12345):
        (s1, n1), (s2, n2), (s3, n3) = [noise_at(ns, p) for ns in (a, b, c)]
        assert s1 == s2 != s3 and torch.equal(n1, n2) and not torch.equal(n1, n3)
    assert abs(np.mean([a["pick"](p).prompt == "" for p in range(2000)]) - 0.25) < 0.04
    noise = torch.cat([noise_at(a, p)[1].flatten() for p in range(100)])
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01
    assert len({noise_at(a, p)[1][0, 0].item() for p in range(2 * n)}) == 2 * n # two epochs have different noise

@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "qwen_shift"])
def test_timestep_distribution(tmp_path, sampling):
    """Quartiles of 2,000 timesteps. qwen_shift moves the median to e^mu / (e^mu + 1), mu from the sample's own size:
    2.001 / 3.001 for 1024*1024 pixels (the shift that the scheduler uses at inference)."""
    ns = globals_of_train(tmp_path / "a", "--timestep_sampling", sampling)
    s = torch.stack([ns["pick_timestep"](ns["generator"]("noise", p), 4096) for p in range(2000)])
    quartiles = dict(uniform=[0.25, 0.5, 0.75], logit_normal=[0.3375, 0.5, 0.6625])
    shift = lambda u: 2.0007 * u / (1 + 1.0007 * u)
    want = quartiles.get(sampling) or [shift(u) for u in quartiles["logit_normal"]]
    assert 0 < s.min() and s.max() < 1
    assert torch.quantile(s, torch.tensor([0.25, 0.5, 0.75])).tolist() == pytest.approx(want, abs=0.03)

def test_repeats_and_several_roots_make_the_epoch(tmp_path):
    """An epoch has each sample as often as --repeats says, in the order of --data; a resumed run cannot change either;
    an index knows it."""
    for root, names in (("a", "xy"), ("b", "x")):
        for name in names:
            add_item(tmp_path / root, name, caption=f"{root} {name}")
    roots, flags = [tmp_path / "a", tmp_path / "b"], ["--cache_dir", tmp_path / "c", "--max_steps", 1, *NATIVE, *EXACT]
    flags += ["--lr_scheduler", "constant", "--lora_rank", 2, "--val_data"]
    run = run_script("train.py", "--data", *roots, "--repeats", 1, 3, "--out_dir", tmp_path / "r", *flags)
    assert run.status == 0 and "trained for 1 steps on 3 samples" in run.out, run.err
    names = lambda ns: [f"{s.root}/{s.name}" for s in [ns["pick"](p).sample for p in range(5)]]
    epoch = names(run.globals)
    assert sorted(epoch) == ["a/x", "a/y", "b/x", "b/x", "b/x"] and run.globals["run_name"] == "tiny-a+b"
    again = run_script("train.py", "--data", tmp_path / "c/tiny-a+b.json", "--out_dir", tmp_path / "n", *flags)
    assert again.status == 0 and names(again.globals) == epoch and again.globals["run_name"] == "tiny-a+b", again.err
    for other in ([*roots], [*roots[::-1], "--repeats", 3, 1]): # the order of the datasets is the samples' order
        result = run_script("train.py", "--data", *other, "--resume", "--out_dir", tmp_path / "r", *flags,
                            "--max_steps", 2)
        assert result.status == 1 and is_one_line(result.errors[0], "data_hash: "), result.err

def test_dropped_pictures_leave_latents_and_prompt(tmp_path, data, plus):
    """The share that was asked for, in a stream of its own: all else of a position is as without the flag. Such a
    sample is the target alone with the caption as stock encodes it without pictures, or the empty prompt likewise."""
    rates = ["--caption_dropout_rate", 0.5, "--cache_dir", tmp_path / "c", *NATIVE, *EXACT]
    without = train(data, tmp_path, *rates)
    result = train(data, tmp_path, *rates, "--prompt_image_dropout_rate", 0.5)
    assert result.status == 0, result.err
    ns, before = result.globals, without.globals
    picks = [ns["pick"](p) for p in range(400)]
    for p, picked in enumerate(picks):
        want = before["pick"](p)
        assert (picked.sample.name, picked.prompt) == (want.sample.name, want.prompt)
        assert picked.img_shapes == want.img_shapes[:None if picked.with_controls else 1]
    kinds = Counter((picked.with_controls, picked.prompt == "") for picked in picks)
    assert len(kinds) == 4 and all(75 < n < 125 for n in kinds.values()), kinds
    for prompt in ("add a red border", ""):
        p = next(p for p, picked in enumerate(picks) if (picked.prompt, picked.with_controls) == (prompt, False))
        item, full = [names["load_item"](names["pick"](p)) for names in (ns, before)]
        want = cache.encode_prompts(plus, [prompt], [])[0]
        assert len(want) == picks[p].sample.texts[prompt, False]["tokens"] and rel(item.prompt, want) < 1e-6
        assert item.controls.shape == (0, 64) and len(item.img_shapes) == 1 and torch.equal(item.x0, full.x0)
    assert without.losses != result.losses

# ---- the step --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("schedule, want", [
    ("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
    ("cosine", [0.5, 1, 1, *(0.5 + 0.5 * math.cos(math.pi * x) for x in (0.25, 0.5, 0.75))])])
def test_learning_rate_is_a_function_of_the_step(tmp_path, schedule, want):
    ns = globals_of_train(tmp_path / "a", "--lr_scheduler", schedule, "--warmup_steps", 2, "--lr", 3)
    ns["args"].max_steps = 6
    assert [ns["learning_rate"](step) / 3 for step in range(6)] == pytest.approx(want)

@pytest.mark.parametrize("weight, colour", [("background", "black"), ("foreground", "white")])
def test_a_mask_that_leaves_the_loss_nothing_is_one_warning_and_a_loss_of_0(tmp_path, weight, colour):
    """Its loss would be 0 / 0. A gray pixel of 256 is no token, but marks something. Whether encoded, or with each use;
    the other samples are learned as ever, and other weights have no warning."""
    add_item(tmp_path / "data", "a")
    dot = Image.new("L", (64, 64), colour)
    for n in (1, 2): # (two values would be labels)
        dot.putpixel((20 * n, 20), 255 - 50 * n if colour == "white" else 50 * n)
    add_item(tmp_path / "data", "b", mask=dot)
    flags = ["--max_steps", 2, "--batch_size", 2, "--cache_dir", tmp_path / "c", *NATIVE]
    for n, more in enumerate(([], ["--no-use_cache"])):
        result = train(tmp_path / "data", tmp_path / f"{n}", *flags, f"--mask_{weight}_weight", 0, *more)
        assert result.status == 0 and result.err.count("no token a weight") == 1, result.err
        assert re.search(f"warning: b: .* no token a weight.*--mask_{weight}_weight", result.err)
        for record in log_of(result.globals["out_dir"])[:2]:
            losses = dict(zip(record["samples"], record["losses"]))
            assert losses["data/b"] == 0 < losses["data/a"]
    result = train(tmp_path / "data", tmp_path / "defaults", *flags)
    assert result.status == 0 and "no token a weight" not in result.err

def test_a_gradient_of_exactly_zero_ends_the_run_before_the_step(tmp_path, data):
    """--preserve 1 on a LoRA that has learned nothing, and a LoRA of zeros; but not --lr 0, nor a step whose samples
    are all `preserve` while others will come."""
    assert train(data, tmp_path, "--lr", 0).status == 0
    assert train(data, tmp_path, "--warmup_steps", 2).status == 0
    result = train(data, tmp_path, "--preserve", 1)
    assert result.status == 1 and is_one_line(result.errors[0], "exactly 0 at step 1 (", "cat", "--preserve 1")
    result = train(data, tmp_path / "b", "--preserve", 0.999)
    assert result.status == 0 and result.losses == [0, 0], result.err # from the second on, too
    zeros = lora_file(tmp_path, {name: 0 * x for name, x in lora_tensors().items()})
    result = run_script("train.py", "--data", data, "--val_data", "--pretrained_lora", zeros, "--out_dir",
                        tmp_path / "zeros", "--max_steps", 2)
    assert result.status == 1, result.err
    assert is_one_line(result.errors[0], "exactly 0 at step 1 (", "--pretrained_lora"), result.err
    assert not log_of(tmp_path / "zeros") and not list(tmp_path.glob("zeros/checkpoint-*"))

def test_packs_are_dealt_to_all_by_cost_and_evened_out(tmp_path):
    """Every sample once, nobody above the limit, the dearest share within a tenth of the mean; with --fsdp everybody
    makes the same number of passes, and those that only keep the others company are empty packs."""
    ns = globals_of_train(tmp_path / "a", "--max_tokens", 400)
    deal, globals_, rng = ns["deal_packs"], ns["deal_packs"].__globals__, np.random.default_rng(0)
    for ranks, n, fsdp in [(1, 7, False), (4, 1, True), (4, 3, True), (4, 40, False), (4, 40, True), (3, 11, True)]:
        globals_["world_size"], ns["args"].fsdp = ranks, fsdp
        lengths = rng.integers(1, 300, n).tolist()
        dealt = deal(lengths)
        assert len(dealt) == ranks and dealt == deal(list(lengths))
        assert sorted(i for packs in dealt for pack in packs for i in pack) == list(range(n))
        assert all(sum(lengths[i] for i in pack) <= 400 for packs in dealt for pack in packs)
        assert not fsdp or len({len(packs) for packs in dealt}) == 1
        assert fsdp or all(pack for packs in dealt for pack in packs)
    cost = lambda packs: sum(lengths[i] * (6 * 128 + lengths[i]) for pack in packs for i in pack)
    lengths = rng.integers(1, 300, 40).tolist()
    costs = list(map(cost, deal(lengths)))
    assert max(costs) <= 1.1 * sum(costs) / len(costs)

def test_a_batch_is_at_least_one_sample_a_process_or_says_what_idles(small, tmp_path, start, monkeypatch):
    """The others' work is that of one process."""
    flags = [*small.flags, *ADAMW, "--max_steps", 3, "--batch_size", 1, "--out_dir"]
    ranks = start_ranks(start, *flags, tmp_path / "two")
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output() for rank in ranks]
    said = [rank.output().count("warning: --batch_size 1 for 2 processes") for rank in ranks]
    works("train.py", *flags, tmp_path / "one")
    one, two = [log_of(tmp_path / name) for name in ("one", "two")]
    assert said == [1, 0] and [record["samples"] for record in one] == [record["samples"] for record in two]
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-6)
    for name, value in dict(RANK="0", WORLD_SIZE="8", MASTER_ADDR="a", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    defaults = []
    monkeypatch.setattr(command_line.Parser, "parse_args", lambda self: sys.exit(defaults.append(
        self.get_default("batch_size"))))
    run_script("train.py")
    assert defaults == [8]

def test_nan_stops_before_the_step_is_taken(tmp_path, data):
    """A poisoned sample: no step, its name on the last line, the earlier checkpoint intact."""
    flags = ["--cache_dir", tmp_path / "c", "--save_every", 1, *NATIVE, *EXACT]
    first = train(data, tmp_path, *flags, "--max_steps", 1, "--batch_size", 1)
    picked = first.globals["pick"](1)
    tensors, meta = tensor_files.read_tensors(picked.encoding["file"])
    tensors["pixel_latent"] *= 1e30 # (NaN itself is refused when it is read); its square overflows
    tensor_files.write_tensors(picked.encoding["file"], tensors, meta)
    result = train(data, tmp_path, *flags, "--batch_size", 1)
    assert result.status == 1 and is_one_line(result.errors[-1], picked.sample.name, "step 2", "--lr")
    run = tmp_path / "run-1"
    assert [r["step"] for r in log_of(run)] == [1]
    assert all(v.isfinite().all() for v in lora_of(run / "checkpoint-000001").values())

@pytest.mark.parametrize("live", [False, True], ids=["cached", "live"])
def test_the_next_step_is_read_while_one_computes(small, tmp_path, monkeypatch, live):
    """No further, and not where encoders are at work."""
    real, load, loaded, computed = rope_patch.run_packed, cache.load_text, [], []

    def run_packed(*args):
        step = len(computed) // 2 # of two packs
        computed.append(1)
        ahead = 0 if live else 1
        until(lambda: len(loaded) == min(2 * (step + 1 + ahead), 6))
        return real(*args)
    monkeypatch.setattr(rope_patch, "run_packed", run_packed)
    monkeypatch.setattr(cache, "load_text", lambda *args: (load(*args), loaded.append(threading.current_thread()))[0])
    flags = ["--data", small.folder / "data", "--no-use_cache", *small.flags[2:]] if live else small.flags
    result = run_script("train.py", *flags, "--out_dir", tmp_path / "run", "--max_steps", 3,
                        "--max_tokens", 1, "--target_pixels", "native", "--control_pixels", "native")
    assert result.status == 0 and len(computed) == len(loaded) == 6, result.err
    assert len(set(loaded)) == 1

@pytest.mark.parametrize("flags, dropout", [("--lora_dropout 0", False), ("--lora_dropout 0.5", True)])
def test_recomputed_blocks_draw_the_same_dropout(small, tmp_path, monkeypatch, flags, dropout):
    """The state of the generators is kept for that, and for nothing else. Each step has a seed of its own."""
    kept, real, seeds, seed = [], torch.utils.checkpoint.checkpoint, [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda n: seeds.append(n) or seed(n))
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *args, **kwargs: (
        kept.append(kwargs["preserve_rng_state"]) or real(*args, **kwargs)))
    for blocks in (0, 9):
        result = run_script("train.py", *small.flags, "--out_dir", tmp_path / f"{blocks}", "--max_steps", 3,
                            *flags.split(), "--gradient_checkpointing", blocks)
        assert result.status == 0 and len(set(seeds[-3:])) == 3, result.err
    assert curve(log_of(tmp_path / "0")) == curve(log_of(tmp_path / "9")) and set(kept) == {dropout}

# ---- optimizers ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, status, named", [
    (["--optimizer", "not_installed.Prodigy"], 2, "not_installed"),
    (["--optimizer="], 2, "torch.optim.AdamW"),
    (["--tracker", "wandb"], 2, "pip install wandb"),
    (["--quantize", "nf4"], 2, "pip install bitsandbytes"),
    (["--lora_args", "lora_bias=true", "init_lora_weights=true"], 2, "lora_bias"),
    (["--lora_dropout", 1], 2, "--lora_dropout"),
    (["--lr", "1e39"], 2, "--lr"), (["--lr", "inf"], 2, "1e+30"), (["--weight_decay", "1e39"], 2, "--weight_decay"),
    (["--max_grad_norm", "0"], 2, "inf turns it off"), (["--mask_background_weight", "1e39"], 2, "1e+30"),
    (["--lora_targets", "to_q", "to_kk"], 1, "to_k "), # peft would go on
    (["--lora_targets", "to_q", "k"], 1, "--lora_targets k:"), # to_k ends in it, but only whole words count
    (["--fsdp"], 2, "torchrun"),
    *[(line.split(), 2, line.split()[0].rstrip("=")) for line in (
        "--batch_size 0", "--max_steps 0", "--max_tokens 0", "--lora_rank 0", "--save_every 0", "--keep 0", "--lr fast",
        "--lr -1", "--lr nan", "--lr_scheduler step", "--caption_dropout_rate 1.5", "--lora_dropout -0.1",
        "--lora_alpha 0", "--lora_alpha nan", "--lora_alpha 1e7", "--warmup_steps -1", "--gradient_checkpointing -1",
        "--lora_targets", "--seed x", "--data=", "--mask_foreground_weight -1", "--lora_args rank", "--offload some",
        "--mod tiny")]], ids=str)
def test_a_bad_flag_is_one_line_before_anything_slow(small, tmp_path, monkeypatch, flags, status, named):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name not in (
        "prodigyopt", "wandb", "bitsandbytes") and find_spec(name) or None)
    monkeypatch.setattr(command_line, "find_spec", importlib.util.find_spec)
    if status == 2:
        monkeypatch.setattr(cache, "find_model", lambda *_: pytest.fail("model looked for"))
    result = run_script("train.py", *small.flags, *flags, "--out_dir", tmp_path / "a")
    assert result.status == status and named in result.errors[-1], result.err
    assert status == 2 or is_one_line(result.errors[-1])
    assert not (tmp_path / "a/checkpoint-000002").exists()

WARNINGS = { # flags of a training on pairs of 64x64, or of two shapes -> what is warned of
    "--negative_prompt ugly": "--negative_prompt: has no effect at a CFG scale of 1 or below",
    "--negative_prompt ugly --true_cfg_scale 2": None,
    "--sample_every 1": "--sample_every: nothing will be generated", "--max_tokens 9": "--max_tokens 9: cat has ",
    "--mask_foreground_weight 5": "there is no mask", "--mask auto --mask_foreground_weight 5": None,
    "--optimizer tests.test_averages.ScheduleFreeSGD": "--lr_scheduler cosine: tests.test_averages.Schedul",
    "--optimizer tests.test_averages.ScheduleFreeSGD --lr_scheduler constant": None,
    "--preserve 0.5": None}

@pytest.mark.parametrize("flags", WARNINGS)
def test_what_a_person_may_not_expect_is_said_once_before_anything_is_encoded(tmp_path, flags, monkeypatch):
    data, named = add_item(tmp_path / "data", "cat"), WARNINGS[flags]
    monkeypatch.setattr(cache, "encode_samples", lambda *_, **__: sys.exit(7))
    result = train(data, tmp_path, *flags.split())
    lines = [line for line in result.err.splitlines() if "warning" in line]
    assert result.status == 7 and len(lines) == bool(named) and (not named or named in lines[0]), result.err

# ---- runs and their folders ------------------------------------------------------------------------------------------

def test_a_run_that_fails_before_its_log_leaves_no_folder_and_no_file_of_others_goes(tmp_path, data):
    """Damaged pixels are found behind the lock of the folder; a damaged header would be before."""
    picture = data / "control/cat.png"
    picture.write_bytes(picture.read_bytes()[:-2000])
    (tmp_path / "kept").mkdir()
    for folder in ("new", "kept"):
        result = run_script("train.py", "--data", data, "--val_data", "--out_dir", tmp_path / folder)
        assert result.status == 1 and "cat.png" in result.err, result.err
        gc.collect() # a process would end here
    assert not (tmp_path / "new").exists() and (tmp_path / "kept").exists() # the user has made that one
    result = run_script("train.py", "--data", data, "--val_data", "--out_dir", tmp_path / "new", "--skip_bad",
                        "--max_steps", 3, "--batch_size", 1, "--lora_rank", 1)
    gc.collect()
    assert result.status == 0 and (tmp_path / "new/log.jsonl").exists(), result.err

def test_resume_refuses_other_settings_and_finished_runs(tmp_path, monkeypatch):
    """Differing fields are listed, before anything slow; a finished run says so, and is not begun anew without its
    checkpoints. What else test_remedies.py tries is not here."""
    train_log(tmp_path / "a", "--lr_scheduler", "linear")
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    flags = ["--lr_scheduler", "linear", "--resume"]
    result = train_demo(tmp_path / "a", *flags)
    assert result.status == 0 and "already done" in result.out
    monkeypatch.setattr(cache, "find_model", lambda *_: pytest.fail("model looked for"))
    changes = dict(lora_rank=8, lora_targets="to_k", batch_size=3, seed=1, preserve=0.5, weight_decay=0.5)
    for name, value in changes.items():
        result = train_demo(tmp_path / "a", *flags, f"--{name}", value)
        assert result.status == 1 and is_one_line(result.errors[0], f"{name}: "), result.err
        assert not [other for other in changes if other != name and f"{other}: " in result.errors[0]]
    for path in tmp_path.glob("a/checkpoint-*"):
        shutil.rmtree(path)
    result = train_demo(tmp_path / "a", *flags, "--max_steps", 9)
    assert result.status == 1 and is_one_line(result.errors[0], "checkpoint")
    left = {p: p.read_bytes() for p in (tmp_path / "a").glob("*") if p.is_file()}
    assert left.keys() == {p for p in before if p.parent == tmp_path / "a"}
    assert all(before[p] == content for p, content in left.items() if p.name != ".lock")

def test_a_run_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    for folder, status, words in ((tmp_path / "file/run", 1, str(tmp_path / "file/run")),
                                  (tmp_path / ("x" * 300), 2, "--out_dir: longer than a file's name")):
        result = train_demo(folder)
        assert result.status == status and is_one_line(result.errors[-1], words), result.err

def test_a_flag_that_is_added_to_train_py_is_compared_on_resume(tmp_path):
    """Unless MAY_CHANGE names it; and a checkpoint that is older than the flag counts as having had its default."""
    own = tmp_path / "train.py"
    own.write_text((HERE / "train.py").read_text("utf-8").replace(
        'flag("--seed"', 'flag("--huber_delta", 0.5, "of a fork", type=not_negative)\nflag("--seed"'), encoding="utf-8")
    def run(script, *flags):
        return run_script(script, "--cache_dir", demo_cache(), "--out_dir", tmp_path / "run", "--val_data", *EXACT,
                          "--lr_scheduler", "constant", "--batch_size", 2, *flags)
    assert run("train.py", "--max_steps", 1).status == 0
    result = run(own, "--max_steps", 2, "--resume", "--huber_delta", 5)
    assert result.status == 1 and is_one_line(result.errors[0], "huber_delta: 0.5 -> 5.0"), result.err
    assert run(own, "--max_steps", 2, "--resume").status == 0
    result = run(own, "--max_steps", 3, "--resume", "--huber_delta", 5)
    assert result.status == 1 and is_one_line(result.errors[0], "huber_delta: 0.5 -> 5.0"), result.err
    assert run(own, "--max_steps", 3, "--resume", "--keep", 5, "--max_tokens", 999).status == 0

def test_runs_are_numbered_and_resume_takes_the_newest(tmp_path, small, start):
    """A folder of a run that never began does not count."""
    def run(*flags):
        process = start("train.py", *small.flags, *flags, prelude=functools.partial(os.chdir, tmp_path))
        assert process.wait() == 0, process.output()
        return process.output()
    (tmp_path / "out/tiny-data-009").mkdir(parents=True)
    for n in (1, 2):
        run("--max_steps", n)
    names = sorted(p.name for p in (tmp_path / "out").iterdir() if (p / "DONE").exists())
    assert len(names) == 2 and f"{names[1]}: continues after step 2" in run("--max_steps", 3, "--resume")
    assert len(list((tmp_path / "out").iterdir())) == 3

def test_runs_that_start_together_take_two_numbers(tmp_path, small, start):
    """One that was told its folder does not look for another; with two processes both go to the same one."""
    here = functools.partial(os.chdir, tmp_path)
    name = f"tiny-{Path(small.flags[1]).stem.removeprefix('tiny-')}"
    folders = [tmp_path / "out" / f"{name}-{n:03d}" for n in (1, 2)]
    folders[0].mkdir(parents=True)
    with filelock.FileLock(folders[0] / ".lock"):
        told = start("train.py", *small.flags, "--max_steps", 1, "--out_dir", folders[0], prelude=here)
        assert told.wait() == 1 and is_one_line(error_of(told), f"--out_dir {folders[0]}", "another run")
        ranks = start_ranks(start, *small.flags, "--max_steps", 10, preludes=(here, here))
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output()
    assert (folders[1] / "DONE").exists() and len(list((tmp_path / "out").iterdir())) == 2
    assert re.findall(r"^step (\d+)/10  .*  \d:\d\d:\d\d left$", ranks[0].output(), re.M) == [*map(str, range(2, 11))]

# ---- the end of a run ------------------------------------------------------------------------------------------------

def test_the_last_words_of_a_run_are_a_command_that_works(tmp_path):
    """With the base that it was trained on, and what a small card needs for it; the run's name may have a space."""
    result = train(add_item(tmp_path / "data", "cat"), tmp_path, "--cache_dir", tmp_path / "c", "--transformer", TINY,
                   "--quantize", "int8", "--quantize_text_encoder", "int8", "--offload", "all", "--out_dir",
                   tmp_path / "my run")
    [line] = [line for line in result.out.splitlines() if "python predict.py" in line]
    flags = shlex.split(line.replace("CONTROL.png", str(tmp_path / "data/control/cat.png")))[2:]
    assert {"--transformer", "--quantize", "--quantize_text_encoder", str(tmp_path / "my run")} <= {*flags}
    assert "--offload all" in line
    drawn = run_script("predict.py", *flags, "--out", tmp_path / "cat.png", "--num_inference_steps", 2, "--cache_dir",
                       tmp_path / "c", *ON_DEVICE)
    assert drawn.status == 0 and (tmp_path / "cat.png").exists(), drawn.err

@pytest.mark.skipif(not FULL, reason="four trainings of a minute and more each: --full -k shared_positions -s")
def test_the_edit_is_learned_in_two_ways_and_not_with_shared_positions(tmp_path, monkeypatch):
    """The demo's edit by mixed-size packs and one sample at a time, from the same stream of samples, has the same
    quality. With the first sample's positions for the whole batch, as in stock diffusers, it has not. (Stock fails if
    the first sample is not the longest; here its positions begin again.) With those of its text alone this edit does
    not suffer. -s prints the table; the pictures are in the test's folder."""
    first, psnr = [], {}

    def shared(pos_embed, shapes, txt_len, device, real=rope_patch.sample_freqs):
        if not torch.is_grad_enabled(): # pictures are drawn with the right positions, as the stock pipeline does
            return real(pos_embed, shapes, txt_len, device)
        img_freqs, txt_freqs = real(pos_embed, first[0], txt_len, device)
        if name == "text": # the way that trains now, see below
            return real(pos_embed, shapes, txt_len, device)[0], txt_freqs
        return img_freqs[torch.arange(sum(map(prod, shapes))) % len(img_freqs)], txt_freqs

    def remember_first(*args, real=rope_patch.sample_shapes):
        first[:] = real(*args)
        return real(*args)
    ways = {"mixed": [], "one": ["--max_tokens", 1], "text": [], "shared": []}
    for name, flags in ways.items():
        if name == "text":
            monkeypatch.setattr(rope_patch, "sample_freqs", shared)
            monkeypatch.setattr(rope_patch, "sample_shapes", remember_first)
        works("train.py", "--cache_dir", demo_cache(), "--out_dir", tmp_path / name, *flags)
        psnr[name] = validations_of(tmp_path / name)[-1]["psnr"]["val"]["lora"]
        print(f"\n{name:8} {psnr[name]:.2f} dB in {tmp_path / name}")
    show("one, dB from mixed", abs(psnr["one"] - psnr["mixed"]), 0.3)
    assert abs(psnr["one"] - psnr["mixed"]) < 0.3
    assert psnr["shared"] < psnr["mixed"] - 3 and abs(psnr["text"] - psnr["mixed"]) < 1

def test_a_long_gradient_is_scaled_down(tmp_path):
    """SGD moves the LoRA by the learning rate times the clipped gradient, whose norm is --max_grad_norm."""
    flags = ["--max_steps", 1, "--optimizer", "torch.optim.SGD", "--weight_decay", 0, "--warmup_steps", 0,
             "--max_grad_norm", 1e-3]
    log = train_log(tmp_path / "a", *flags, "--lr", 2)
    train_log(tmp_path / "b", *flags, "--lr", 0)
    a, b = lora_of(tmp_path / "a"), lora_of(tmp_path / "b")
    moved = torch.cat([(a[key] - b[key]).flatten() for key in a]).norm()
    assert log[0]["grad_norm"] > 0.01 and moved.item() == pytest.approx(2e-3, rel=1e-3)

def test_a_loss_that_explodes_is_said(small, tmp_path):
    flags = [*small.flags, "--lora_targets", "all-linear", "proj_out", "--max_steps", 3, "--out_dir"]
    result = run_script("train.py", *flags, tmp_path / "a", "--lr", 10)
    steps = [line for line in result.out.splitlines() if line.startswith(("step ", "exploded"))]
    assert steps[1].startswith("step 2") and steps[-1].startswith("exploded") and "--lr" in steps[-1], result.out
    result = run_script("train.py", *flags, tmp_path / "b", "--lr", 1e-4)
    assert result.status == 0 and "exploded" not in result.out, result.err

def test_samples_without_a_control_are_trained_whatever_is_preserved(tmp_path):
    """They cannot be asked of the base."""
    add_item(add_item(tmp_path / "pairs", "a"), "b")
    add_item(tmp_path / "alone", "c", [(64, 64)])
    flags = ["--data", tmp_path / "pairs", tmp_path / "alone", "--repeats", 1, 2, "--cache_dir", tmp_path / "c",
             "--val_data", "--max_steps", 1, "--batch_size", 4, *NATIVE, *ON_DEVICE]
    assert run_script("train.py", *flags, "--out_dir", tmp_path / "b", "--preserve", 1).status == 0 # c is trained
