"""
tools/lean_train.py: what train.py computes, on one page. The same bits, also after a stop; the same in two processes;
its limits.
"""
import ast
import signal

import pytest
import torch

from library.files import tensor_files
import predict
from tests.harness import (ADAMW, EXACT, HERE, add_item, assert_bitwise, curve, damage_tensors, demo_cache, is_one_line,
                           kill, log_of, lora_of, losses_of, paint_picture, rel, run_script, start_ranks, until, works)

LEAN = "tools/lean_train.py"
DEMO = ["--max_steps", 6, *EXACT, "--device", "cpu", "--caption_dropout_rate", 0.1]

def lean(out_dir, *flags):
    """It trains, which has to succeed."""
    return works(LEAN, "--out_dir", out_dir, *flags)

def assert_same(out_dir, other, steps=12):
    """Log and LoRA agree in every bit."""
    assert len(log_of(out_dir)) == steps and curve(log_of(out_dir)) == curve(log_of(other))
    assert_bitwise(lora_of(out_dir), lora_of(other))

@pytest.fixture(scope="module")
def training(small):
    """Flags of a training of 12 steps on 5 samples, which lean_train.py takes."""
    return [flag for flag in small.flags if flag != "--val_data"]

@pytest.fixture(scope="module")
def unstopped(training, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("unstopped") / "run"
    lean(out_dir, *training)
    return out_dir

class ScheduleFree(torch.optim.SGD):
    """It looks like one of the package schedulefree."""
    def eval(self):
        pass

def at_step(monkeypatch, step, act):
    """In the next run act() is called within this step."""
    clip, seen = torch.nn.utils.clip_grad_norm_, []

    def clip_and_act(*args):
        seen.append(1)
        if len(seen) == step:
            act()
        return clip(*args)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_act)

# ---- the same as train.py --------------------------------------------------------------------------------------------

def test_the_demo_equals_train_py_in_every_bit(tmp_path):
    flags = ["--cache_dir", demo_cache(), *DEMO]
    lean(tmp_path / "lean", *flags)
    assert run_script("train.py", "--out_dir", tmp_path / "train", "--val_data", *flags).status == 0
    assert_same(tmp_path / "lean", tmp_path / "train", steps=6)
    sizes = [predict.read_lora(tmp_path / name).meta["train.geometry"] for name in ("lean", "train")]
    assert sizes[0] == sizes[1] # at which predict.py generates

def test_masks_sizes_wordings_repeats_packs_and_optimizers_too(tmp_path):
    """One dataset that has them all."""
    mask = paint_picture((64, 64), mode="L").point(lambda level: 255 * (level > 128))
    for data in ("a", "b"):
        add_item(tmp_path / data, "masked", mask=mask, caption="one\ntwo\nthree")
        add_item(tmp_path / data, "wide", [(160, 64), (64, 64), (96, 64)])
    add_item(tmp_path / "b", "plain", caption="alone")
    flags = ["--data", tmp_path / "a", tmp_path / "b", "--repeats", 2, 1, "--cache_dir", tmp_path / "cache", *ADAMW,
             "--optimizer_args", "betas=[0.8,0.9]", "--target_pixels", "64x80", "native", "--control_pixels", "64x64",
             "--max_tokens", 60, "--mask_foreground_weight", 3, "--mask_background_weight", 0.5, "--seed", 5,
             "--gradient_checkpointing", 1, "--max_grad_norm", 0.1, "--lr_scheduler", "linear",
             "--lora_targets", "attention", "--caption_dropout_rate", 0.3, *DEMO[:-2]]
    lean(tmp_path / "lean", *flags)
    assert run_script("train.py", "--out_dir", tmp_path / "train", *flags).status == 0
    assert_same(tmp_path / "lean", tmp_path / "train", steps=6)

def test_an_optimizer_that_draws_numbers_too(tmp_path, training):
    """Each of its steps has the same seed in both."""
    more = [*training, "--max_steps", 3, "--optimizer", "tests.test_optimizers.Draws", "--lr", 1e-2, "--out_dir"]
    for name, script in (("a", "train.py"), ("b", LEAN)):
        assert run_script(script, *more, tmp_path / name).status == 0
    assert_same(tmp_path / "a", tmp_path / "b", steps=3)

# ---- stop and resume -------------------------------------------------------------------------------------------------

def test_after_a_signal_the_step_is_finished_and_resume_is_bitwise(tmp_path, training, unstopped, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda: signal.raise_signal(signal.SIGTERM))
        lean(tmp_path, *training, "--save_every", 100)
    assert len(log_of(tmp_path)) == 6 # the signal came when step 5 was as good as done
    assert predict.read_lora(tmp_path).meta["train.step"] == 6
    lean(tmp_path, *training, "--save_every", 100, "--resume", "--max_tokens", 10_000)
    assert_same(tmp_path, unstopped)

def test_after_a_kill_the_log_is_cut_back_and_resume_is_bitwise(tmp_path, training, unstopped, monkeypatch):
    """Steps 5 and 6 are in the log, and half a line, but not in the state, which is of step 4."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_step(patch, 7, lambda: (_ for _ in ()).throw(KeyboardInterrupt)) # as if killed
        run_script(LEAN, *training, "--out_dir", tmp_path, "--save_every", 4)
    with open(tmp_path / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"step": 7, "lo')
    lean(tmp_path, *training, "--save_every", 4, "--resume")
    assert_same(tmp_path, unstopped)

# ---- several processes -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("batch_size", [3, 1])
def test_two_processes_equal_one(tmp_path, training, start, batch_size):
    """Also if one has nothing to do."""
    flags = [*training, *ADAMW, "--max_steps", 4, "--batch_size", batch_size]
    lean(tmp_path / "one", *flags)
    ranks = start_ranks(start, *flags, "--out_dir", tmp_path / "two", script=LEAN)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output() for rank in ranks]
    one, two = log_of(tmp_path / "one"), log_of(tmp_path / "two")
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-6)
    assert [r["grad_norm"] for r in two] == pytest.approx([r["grad_norm"] for r in one], rel=1e-5)
    a, b = lora_of(tmp_path / "one"), lora_of(tmp_path / "two")
    assert rel(torch.cat([b[k].flatten() for k in a]), torch.cat([a[k].flatten() for k in a])) <= 1e-3

def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path, training, start):
    ranks = start_ranks(start, *training, "--out_dir", tmp_path / "run", "--max_steps", 2000, "--save_every", 2000,
                        script=LEAN)
    log = tmp_path / "run/log.jsonl"
    until(lambda: log.exists() and log.read_text("utf-8").count("\n") > 1)
    kill(ranks[1], signal.SIGUSR1)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output() for rank in ranks]
    _, state = tensor_files.read_tensors(tmp_path / "run/state.safetensors")
    assert state["step"] == log_of(tmp_path / "run")[-1]["step"] < 2000

# ---- limits ----------------------------------------------------------------------------------------------------------

def test_it_is_one_page_and_imports_no_extra():
    """But the package, which keeps other folders from being taken for our modules."""
    text = (HERE / LEAN).read_text("utf-8")
    assert len(text.splitlines()) <= 220
    for node in ast.walk(ast.parse(text)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
        assert not any(name.split(".")[0] in ("train", "training", "tools") for name in names)

@pytest.mark.parametrize("flags, named", [
    ("--preserve 0.5", "--preserve: lean_train.py lacks it"), ("--val_data x", "--val_data: lean_train.py lacks it"),
    ("--prompt_image_dropout_rate=0.5", "--prompt_image_dropout_rate: lean"), ("--dtype float16", "--dtype: float16"),
    ("--learning_rate 1", "here --lr"), ("--out_dir {full}", "--out_dir: "), ("--data {full}", "{full}"),
    ("--lora_targets to_q nosuch", "--lora_targets nosuch"), ("--optimizer nosuch.Class", "--optimizer nosuch.Class"),
    ("--optimizer_args nosuch=1", "--optimizer torch.optim.Muon"),
    ("--optimizer tests.test_lean_train.ScheduleFree", "schedule-free"),
    ("--resume --out_dir {full}", "state.safetensors"), ("--lr 1e30", "lower --lr")])
def test_bad_input_is_one_line(flags, named, tmp_path, training):
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").touch()
    flags, named = [text.format(full=full) for text in (flags, named)]
    result = run_script(LEAN, *training, *flags.split()) if "--data" not in flags.split() else run_script(
        LEAN, *flags.split())
    assert result.status in (1, 2) and is_one_line(result.errors[-1], named), result.err
    assert "Traceback" not in result.err

def test_resume_refuses_what_has_changed_or_is_damaged(tmp_path, training):
    lean(tmp_path, *training, "--max_steps", 2)
    for flags, named in ((["--lr", 1], "lr"), (["--lora_rank", 1], "lora_rank"), (["--seed", 1], "seed")):
        result = run_script(LEAN, *training, "--max_steps", 2, "--out_dir", tmp_path, "--resume", *flags)
        assert result.status == 1 and is_one_line(result.errors[0], f"other {named};"), result.err
    damage_tensors(tmp_path / "state.safetensors")
    result = run_script(LEAN, *training, "--max_steps", 2, "--out_dir", tmp_path, "--resume")
    assert result.status == 1 and is_one_line(result.errors[0], "state.safetensors"), result.err
