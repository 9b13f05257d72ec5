"""
extras/best.py: the best validation is said, its checkpoint stays, and the end recommends it; what a terminal sees of a
run; and why a run whose learning rate has ended cannot go on.
"""
import json
import re

import pytest

import common
from extras import best
from tests.harness import is_one_line, run_script
from tools import page

@pytest.fixture
def flags(small):
    more = [word for word in small.flags if word != small.cache / "tiny-data.json"]
    more[:2] = ["--data", small.folder / "data", "--val_data", small.folder / "data"]
    return [*more, "--val_pictures", 2, "--num_inference_steps", 2, "--sample_every", 1, "--keep", 1]

def write_log(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [dict(flags={}, command=[]), *records]))

def validation(step, loss, *psnrs):
    shown = [dict(file=f"a/{n}.png", prompt="go", controls=1, psnr=[1, 2, psnr, 40]) for n, psnr in enumerate(psnrs)]
    return dict(step=step, val_loss=loss, psnr={}, pictures=shown)

def test_the_best_step_is_that_of_the_least_loss_and_of_the_greatest_mean_psnr(tmp_path):
    """Of equal ones the first; NaN is none. tools/page.py says the same."""
    write_log(tmp_path, [dict(step=1, loss=2.0)])
    assert best.best_steps(tmp_path) == {}
    write_log(tmp_path, [validation(10, float("nan"), 20, 22), dict(step=11, loss=0.1), validation(20, 0.5, 24, 26),
                         validation(30, 0.25, 25, 25), validation(40, 0.25, 1, 2), validation(50, 0.3)])
    assert best.best_steps(tmp_path) == {"validation loss": (30, 0.25), "mean PSNR": (20, 25.0)}
    assert best.describe(tmp_path) == "best so far: step 30 by validation loss (0.2500), step 20 by mean PSNR (25.0 dB)"
    shown = page.measures(page.read_log(tmp_path))
    for name, (step, _) in best.best_steps(tmp_path).items():
        assert shown[f"Best by {name}"][0] == f"step {step}"

def test_only_checkpoints_before_the_last_one_are_better_than_it(tmp_path):
    write_log(tmp_path, [validation(20, 0.5, 25), validation(30, 0.25, 24), validation(40, 0.3, 1)])
    folders = {step: tmp_path / f"checkpoint-{step:06d}" for step in (20, 30, 40)}
    for folder in folders.values():
        folder.mkdir()
    assert best.better_checkpoints(tmp_path) == {folders[30]: ["validation loss"], folders[20]: ["mean PSNR"]}
    folders[40].rmdir()
    assert best.better_checkpoints(tmp_path) == {folders[20]: ["mean PSNR"]}

@pytest.mark.parametrize("psnr_step", [2, 3])
def test_its_checkpoint_is_not_deleted_and_the_end_names_it(tmp_path, flags, monkeypatch, psnr_step):
    """As if the validation after step 2 had had the least loss, and this one the greatest PSNR; as it is, the last one
    would be the best. A checkpoint that is the best by all measures is recommended."""
    real, last = best.best_steps, {"validation loss": 2, "mean PSNR": psnr_step}
    monkeypatch.setattr(best, "best_steps", lambda out_dir: {
        name: (min(step, last[name]), value) for name, (step, value) in real(out_dir).items()})
    result = run_script("train.py", *flags, "--max_steps", 4, "--out_dir", tmp_path / "a")
    assert result.status == 0, result.err
    names = [path.name for path in common.checkpoints(tmp_path / "a")]
    assert names == [f"checkpoint-{step:06d}" for step in sorted({2, psnr_step, 4})]
    if psnr_step == 2:
        assert "checkpoint-000002 is better than the last one by validation loss and mean PSNR" in result.out
        assert f"--lora {tmp_path / 'a/checkpoint-000002'} " in result.out
    else:
        assert "checkpoint-000002 is better than the last one by validation loss;" in result.out
        assert "checkpoint-000003 is better than the last one by mean PSNR;" in result.out
        assert f"--lora {tmp_path / 'a'} " in result.out

def test_without_the_extra_the_newest_stay(tmp_path, flags, monkeypatch):
    real = common.find_extra
    monkeypatch.setattr(common, "find_extra", lambda name: None if name == "best" else real(name))
    result = run_script("train.py", *flags, "--max_steps", 3, "--out_dir", tmp_path / "a")
    assert result.status == 0 and "best so far" not in result.out, result.err
    assert [path.name for path in common.checkpoints(tmp_path / "a")] == ["checkpoint-000003"]
    assert f"--lora {tmp_path / 'a'} " in result.out

def test_a_run_whose_learning_rate_has_ended_says_why_it_cannot_go_on(tmp_path, small):
    """And the command that it prints works."""
    flags = [*small.flags, "--lr_scheduler", "cosine", "--lora_rank=4"]
    assert run_script("train.py", *flags, "--max_steps", 2, "--out_dir", tmp_path / "a").status == 0
    result = run_script("train.py", *flags, "--max_steps", 3, "--out_dir", tmp_path / "a", "--resume")
    assert result.status == 1 and is_one_line(result.errors[0], "--lr_scheduler cosine", "--max_steps 2"), result.err
    command = re.search(r"python \S*train.py (.*)", result.errors[0])[1].split()
    assert "--resume" not in command and command[-2:] == ["--pretrained_lora", str(tmp_path / "a")]
    assert not [word for word in command if word.startswith("--lora_")], command # it has these itself
    assert run_script("train.py", *command, "--out_dir", tmp_path / "b").status == 0

@pytest.mark.parametrize("terminal", [False, True])
def test_a_file_has_every_step_and_a_terminal_one_in_ten(tmp_path, small, terminal, monkeypatch):
    """A line that is printed has at most 100 columns."""
    monkeypatch.setattr(common, "quiet", lambda: not terminal)
    result = run_script("train.py", *small.flags, "--max_steps", 22, "--save_every", 15, "--out_dir", tmp_path / "a")
    assert result.status == 0, result.err
    steps = [int(n) for n in re.findall(r"^step (\d+)/22 ", result.out, re.M)]
    assert steps == ([1, 10, 15, 20, 22] if terminal else [*range(1, 23)])
    lines = [line for line in result.out.splitlines() if line.startswith("step ")]
    assert max(map(len, lines)) <= 100 and f"tools/page.py {tmp_path / 'a'} --watch" in result.out

def test_a_constant_rate_that_becomes_another_is_one_change(tmp_path, small):
    """A run at a constant rate does not compare its --max_steps."""
    run = ["train.py", *small.flags, "--out_dir", tmp_path / "a", "--max_steps", 2]
    assert run_script(*run).status == 0
    result = run_script(*[word if word != "constant" else "linear" for word in run], "--resume")
    assert result.status == 1 and is_one_line(result.errors[0], "(lr_scheduler: constant -> linear)"), result.err

def test_a_long_run_s_line_has_at_most_100_columns(tmp_path, small):
    result = run_script("train.py", *small.flags, "--max_steps", 1, "--out_dir", tmp_path / "a")
    train = result.globals
    train["args"].max_steps = 20000
    record = dict(step=12345, loss=1.23456, lr=1.25e-4, grad_norm=0.0123456, seconds=123.456, tokens=4_000_000,
                  memory=131.25)
    assert len(train["step_line"](record, 345678)) <= 100
