"""
training/best_step.py: the best validation is said, its checkpoint stays, and the end recommends it; what a terminal sees of a
run; and why a run whose learning rate has ended cannot go on.
"""
import json
import re
import shutil

import pytest

import common
from library.lora import lora_paths
from training import best_step
from tests.harness import (add_item, is_one_line, lora_file, lora_tensors, refused, run_script,
                           validations_of)
from tools import page

@pytest.fixture
def flags(small):
    more = [word for word in small.flags if word != small.cache / "tiny-data.json"]
    more[:2] = ["--data", small.folder / "data", "--val_data", small.folder / "data"]
    return [*more, "--val_pictures", 2, "--num_inference_steps", 2, "--sample_every", 1, "--keep", 1]

def write_log(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [dict(flags={}, command=[]), *records]),
                                      "utf-8")

def validation(step, loss, *psnrs, **made_of):
    shown = [dict(file=f"a/{n}.png", prompt="go", controls=1, psnr=[1, 2, psnr, 40]) for n, psnr in enumerate(psnrs)]
    return dict(step=step, val_loss=loss, psnr={}, pictures=shown, **made_of)

def made_of(data, pictures=4, **flags):
    """What a validation of this data, with so many pictures, says that it was made of."""
    return dict(loss_of=dict(val_data=data), psnr_of=dict(val_data=data, val_pictures=pictures, **flags))

def test_the_best_step_is_that_of_the_least_loss_and_of_the_greatest_mean_psnr(tmp_path):
    """Of equal ones the first; NaN is none. tools/page.py says the same."""
    write_log(tmp_path, [dict(step=1, loss=2.0)])
    assert best_step.best_steps(tmp_path) == {}
    write_log(tmp_path, [validation(10, float("nan"), 20, 22), dict(step=11, loss=0.1), validation(20, 0.5, 24, 26),
                         validation(30, 0.25, 25, 25), validation(40, 0.25, 1, 2), validation(50, 0.3)])
    assert best_step.best_steps(tmp_path) == {"validation loss": (30, 0.25), "mean PSNR": (20, 25.0)}
    assert best_step.describe(tmp_path) == ("best so far: step 30 by validation loss (0.25; the last, step 50, has 0.3), "
                                       "step 20 by mean PSNR (25.0 dB; the last, step 40, has 1.5 dB)")
    shown = page.measures(page.read_log(tmp_path))
    for name, (step, _) in best_step.best_steps(tmp_path).items():
        assert shown[f"Best by {name}"].startswith(f"step {step} (")

@pytest.mark.parametrize("first, last, said", [
    ((26.993,), (26.971,), "step 200 and step 600 by mean PSNR (27.0 dB, equal)"), # they print alike
    ((27.1, 27.3, 26.9, 27.5), (27.3, 26.9, 26.9, 27.1),
     "step 200 and step 600 by mean PSNR (27.2 dB and 27.0 dB, equal as far as 4 held-out pairs can tell)"),
    ((20, 30, 25), (19, 28.9, 24.1), "step 200 by mean PSNR (25.0 dB; the last, step 600, has 24.0 dB)"), # each loses 1
    ((27.0,), (26.9,), "step 200 by mean PSNR (27.0 dB; the last, step 600, has 26.9 dB)")]) # of one pair the digits
def test_no_verdict_is_finer_than_what_is_shown_or_than_what_held_out_pairs_can_tell(tmp_path, first, last, said):
    """The line of train.py, the page's headline and its marks, and the end of a run say the same; which checkpoint is
    kept stays a matter of the exact numbers."""
    write_log(tmp_path, [validation(200, 0.54321, *first), validation(400, 0.7, *[5] * len(first)),
                         validation(600, 0.54329, *last)])
    assert best_step.best_steps(tmp_path) == {"validation loss": (200, 0.54321), "mean PSNR": (200, sum(first) / len(first))}
    assert best_step.steps_to_keep(tmp_path) == {200}
    by_loss = "step 200 and step 600 by validation loss (0.543, equal)"
    assert best_step.describe(tmp_path) == f"best so far: {by_loss}, {said}"
    for step in (200, 600):
        folder = tmp_path / f"checkpoint-{step:06d}"
        folder.mkdir()
        (folder / lora_paths.LORA_FILE).touch()
    better = {} if " and step" in said else {tmp_path / "checkpoint-000200": ["mean PSNR"]}
    assert best_step.better_checkpoints(tmp_path) == better
    assert page.measures(page.read_log(tmp_path))["Best by mean PSNR"] == said.replace(" by mean PSNR", "")

@pytest.mark.parametrize("last, said", [
    ([0.52, 0.62, 0.42], "step 200 by validation loss (0.5; the last, step 600, has 0.52)"), # all lose as much
    ([0.92, 0.43, 0.21], "step 200 and step 600 by validation loss (0.5 and 0.52, equal as far as 3 held-out pairs can "
                         "tell)"),
    ([0.51, 0.62, 0.43], "step 200 and step 600 by validation loss (0.5 and 0.52, equal as far as 3 held-out pairs can "
                         "tell)")]) # (twice the standard error would do, were it not of three)
def test_the_losses_of_held_out_pairs_are_compared_pair_by_pair(tmp_path, last, said):
    """And a stranger's, which may be any number, or none, stop nothing."""
    first, last = validation(200, 0.5, val_losses=[0.5, 0.6, 0.4]), validation(600, 0.52, val_losses=last)
    write_log(tmp_path, [first, last])
    assert best_step.describe(tmp_path) == f"best so far: {said}"
    for odd in ([float("nan"), 1e300, -1e300], [0.1], []):
        write_log(tmp_path, [first, last | dict(val_losses=odd)])
        assert "step 200 by validation loss (0.5; " in best_step.describe(tmp_path)
    for wrong in ([0.1, "x"], 3, [[1]]): # train.py does not write such a line: it is left out
        write_log(tmp_path, [first, last | dict(val_losses=wrong)])
        assert best_step.describe(tmp_path) == "best so far: step 200 by validation loss (0.5)"

V, W = made_of("v"), made_of("w")
OTHER_DATA = [validation(2, 2.2, 30, **V), validation(4, 2.0, 29, **V), # 4, once more, is of other data
              validation(4, 2.3, 20, **W), validation(6, 2.1, 21, **W), validation(8, 2.2, 19, **W)]

def test_only_validations_made_of_the_same_things_are_compared(tmp_path):
    """After --resume with other --val_data the best is the best of the new set, a line says so, and the page says the
    same. Back at the first set, this is compared again."""
    write_log(tmp_path, OTHER_DATA)
    assert best_step.best_steps(tmp_path) == {"validation loss": (6, 2.1), "mean PSNR": (6, 21.0)}
    said = best_step.describe(tmp_path)
    for measure in ("validation loss", "mean PSNR"):
        assert f"2 earlier validations with other val_data are not compared by {measure}" in said
    shown = page.measures(page.read_log(tmp_path))
    assert all(text.startswith("step 6 (") for name, text in shown.items() if name != "Mean PSNR to the target")
    assert "2 earlier validations with other val_data are not compared" in shown["Best by mean PSNR"]
    write_log(tmp_path, [*OTHER_DATA, validation(10, 2.1, 29.5, **V)])
    assert best_step.best_steps(tmp_path) == {"validation loss": (4, 2.0), "mean PSNR": (2, 30.0)}
    assert "3 earlier validations" in best_step.describe(tmp_path)

def test_other_pictures_or_sampling_leave_the_losses_comparable(tmp_path):
    for other in (made_of("v", 9), made_of("v", shift=3.0)):
        write_log(tmp_path, [validation(2, 2.0, 30, **V), validation(4, 2.1, 20, **other)])
        assert best_step.best_steps(tmp_path) == {"validation loss": (2, 2.0), "mean PSNR": (4, 20.0)}
        said = best_step.describe(tmp_path)
        assert f"1 earlier validation with other {'shift' if 'shift' in str(other) else 'val_pictures'} is not" in said
        assert "compared by validation loss" not in said
    write_log(tmp_path, [validation(2, 2.0, 30), validation(4, 2.1, 20)]) # of an older train.py
    assert best_step.best_steps(tmp_path) == {"validation loss": (2, 2.0), "mean PSNR": (2, 30.0)}
    assert "not compared" not in best_step.describe(tmp_path)

def test_the_best_of_each_set_is_kept(tmp_path):
    """Or --keep would delete what was the best by data that a later --resume may return to."""
    write_log(tmp_path, OTHER_DATA)
    assert best_step.steps_to_keep(tmp_path) == {2, 4, 6}

def test_no_curve_joins_what_is_not_comparable(tmp_path):
    write_log(tmp_path, [dict(step=n, loss=1.0) for n in range(1, 9)] + OTHER_DATA)
    page.make_page([tmp_path], tmp_path / "index.html", 0)
    lines = dict(re.findall(r'data-name="([^"]*)" d="M([^"]*)"', (tmp_path / "index.html").read_text("utf-8")))
    steps = {name: [float(point.split(",")[0]) for point in d.split()] for name, d in lines.items()}
    assert steps["held-out pairs"] == steps["LoRA"] == [4, 6, 8]
    assert steps["held-out pairs (earlier set 1)"] == steps["LoRA (earlier set 1)"] == [2, 4]
    assert "not compared by mean PSNR, and not shown" in (tmp_path / "index.html").read_text("utf-8")

def test_runs_with_other_validations_are_not_to_be_compared(tmp_path):
    for name, data in (("a", V), ("b", W), ("c", V)):
        write_log(tmp_path / name, [dict(step=1, loss=1.0), dict(step=2, loss=1.0), validation(2, 2.0, 30, **data)])
    for other, said in (("b", True), ("c", False)):
        page.make_page([tmp_path / "a", tmp_path / other], tmp_path / "both.html", 0)
        text = (tmp_path / "both.html").read_text("utf-8")
        for measure in best_step.MEASURES:
            assert (f"Do not compare these runs by {measure}: their validations had other val_data" in text) == said

DAMAGES = ['{"val_loss": 0.1', '"val_loss"', '["val_loss"]', '{"val_loss": null, "step": 1}', '{"val_loss": 0.1}',
           '{"val_loss": 0.1, "step": -1}', '{"val_loss": 0.1, "step": 1e999}', '{"val_loss": 0.1, "step": "2"}',
           '{"val_loss": 0.1, "step": 2, "pictures": 5}', '{"val_loss": 0.1, "step": 2, "pictures": {"a": 1}}',
           '{"val_loss": 0.1, "step": 2, "pictures": [{"file": "a/b", "prompt": "", "controls": 1, "psnr": [1, 2]}]}',
           '{"val_loss": 0.1, "step": 2, "pictures": [{"file": "\\u0000", "prompt": "", "controls": 1, '
           '"psnr": [1, 2, 3, 4]}]}', '{"val_loss": 0.1, "step": 2, "psnr": {"a": [1]}}',
           '{"val_loss": 0.1, "step": 2, "pictures": [{"file": "a/b", "prompt": "", "controls": 1000000000, '
           '"psnr": [1, 2, 3, 4]}]}', '{"val_loss": 0.1, "step": ' + 5000 * "1" + '}',
           '{"val_loss": 0.1, "step": 2, "not_finite": {"a": 1}}', '{"val_loss": 0.1, "step": 2, "not_finite": [3]}',
           '{"val_loss": 0.1, "step": 2, "loss_of": 3}', '{"val_loss": 0.1, "step": 2, "x": ' + 90_000 * "[",
           '{"val_loss": 0.1, "step": 2, "x": ' + 300 * "[" + 300 * "]" + "}"]

@pytest.mark.parametrize("line", DAMAGES, ids=range(len(DAMAGES)))
def test_a_foreign_line_of_a_log_counts_as_none(tmp_path, line):
    """A run folder may come from anywhere. tools/page.py names the line."""
    write_log(tmp_path, [validation(2, 2.0, 30)])
    whole = (tmp_path / "log.jsonl").read_text("utf-8")
    (tmp_path / "log.jsonl").write_text(f"{whole}{line}\n{json.dumps(validation(4, 3.0, 20))}\n", "utf-8")
    assert best_step.best_steps(tmp_path) == {"validation loss": (2, 2.0), "mean PSNR": (2, 30.0)}
    assert best_step.steps_to_keep(tmp_path) == {2}
    with refused(f"{tmp_path / 'log.jsonl'}:3"):
        page.make_page([tmp_path], tmp_path / "index.html", 0)

def test_a_number_that_no_float_holds_is_infinite(tmp_path):
    write_log(tmp_path, [validation(2, 2.0, 30)])
    with open(tmp_path / "log.jsonl", "a", encoding="utf-8") as f:
        f.write('{"val_loss": 1' + 400 * "0" + ', "step": 4}\n')
    assert best_step.best_steps(tmp_path)["validation loss"] == (2, 2.0)
    page.make_page([tmp_path], tmp_path / "index.html", 0)

def test_a_line_of_the_log_says_what_its_validation_was_made_of(tmp_path, small, flags):
    """--val_data, --val_pictures and the flags of sampling may change with --resume, each alone; then back again. A
    LoRA of --sample_lora counts by its content, and a negative prompt only if it is read."""
    for name in ("3", "4", "0"):
        add_item(tmp_path / "other", name)
    lora = tmp_path / "lora"
    lora.mkdir()
    lora_file(lora, lora_tensors())
    ways = [[], ["--val_pictures", 1], ["--shift", 2], ["--val_data", tmp_path / "other"], ["--sample_lora", lora],
            ["--negative_prompt", "a frame"], ["--true_cfg_scale", 2],
            ["--true_cfg_scale", 2, "--negative_prompt", "a frame"], []] # the last one of a flag counts
    for n, way in enumerate(ways):
        result = run_script("train.py", *flags, *way, "--sample_every", 0, "--max_steps", n + 1, "--out_dir",
                            tmp_path / "run", *["--resume"] * (n > 0))
        assert result.status == 0, result.err
    found = validations_of(tmp_path / "run")
    assert len(found) == len(ways)
    losses, psnrs = [[json.dumps(record[key]) for record in found] for key in ("loss_of", "psnr_of")]
    assert [n for n, loss in enumerate(losses) if loss != losses[0]] == [3] # the other data
    assert [n for n, psnr in enumerate(psnrs) if psnr == psnrs[0]] == [0, 5, 8] # tiny has a CFG scale of 1
    assert len(set(psnrs)) == len(ways) - 2
    assert "earlier validations with other" in result.out and len(json.dumps(found[0]["psnr_of"])) < 400
    assert 4 in best_step.steps_to_keep(tmp_path / "run") # the only one of the other data

def test_only_checkpoints_before_the_last_one_are_better_than_it(tmp_path):
    write_log(tmp_path, [validation(20, 0.5, 25), validation(30, 0.25, 24), validation(40, 0.3, 1)])
    folders = {step: tmp_path / f"checkpoint-{step:06d}" for step in (20, 30, 40)}
    for folder in folders.values():
        folder.mkdir()
        (folder / lora_paths.LORA_FILE).touch()
    assert best_step.better_checkpoints(tmp_path) == {folders[30]: ["validation loss"], folders[20]: ["mean PSNR"]}
    shutil.rmtree(folders[40])
    assert best_step.better_checkpoints(tmp_path) == {folders[20]: ["mean PSNR"]}

@pytest.mark.parametrize("place", ["samples", "samples/base/data", "samples/step_000002"])
def test_no_picture_is_written_through_a_link_out_of_the_run(tmp_path, flags, place):
    """A run folder may come from anywhere; what lies there stays as it was."""
    run = tmp_path / "run"
    assert run_script("train.py", *flags, "--max_steps", 1, "--out_dir", run).status == 0
    for n in range(30):
        (tmp_path / f"mine/step_{n:06d}/data").mkdir(parents=True)
    if (run / place).exists():
        shutil.rmtree(run / place)
    (run / place).symlink_to(tmp_path / "mine")
    before = sorted(tmp_path.glob("mine/**/*"))
    result = run_script("train.py", *flags, "--max_steps", 2, "--out_dir", run, "--resume")
    assert result.status == 1 and is_one_line(result.errors[-1], run), result.err
    assert sorted(tmp_path.glob("mine/**/*")) == before

@pytest.mark.parametrize("psnr_step", [2, 3])
def test_its_checkpoint_is_not_deleted_and_the_end_names_it(tmp_path, flags, monkeypatch, psnr_step):
    """As if the validation after step 2 had had the least loss, and this one the greatest PSNR; as it is, the last one
    would be the best, and equal to others. A checkpoint that is the best by all measures is recommended."""
    real, last = best_step.best_of, {"validation loss": 2, "mean PSNR": psnr_step}

    def best_of(records, measure):
        return next((record for record in records if record["step"] == last[measure]), real(records, measure))
    monkeypatch.setattr(best_step, "best_of", best_of)
    monkeypatch.setattr(best_step, "are_equal", lambda *records: False)
    result = run_script("train.py", *flags, "--max_steps", 4, "--out_dir", tmp_path / "a")
    assert result.status == 0, result.err
    names = [path.name for path in lora_paths.checkpoints(tmp_path / "a")]
    assert names == [f"checkpoint-{step:06d}" for step in sorted({2, psnr_step, 4})]
    if psnr_step == 2:
        assert "checkpoint-000002 is better than the last one by validation loss and mean PSNR" in result.out
        assert f"--lora {tmp_path / 'a/checkpoint-000002'} " in result.out
    else:
        assert "checkpoint-000002 is better than the last one by validation loss;" in result.out
        assert "checkpoint-000003 is better than the last one by mean PSNR;" in result.out
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
    line, = train["step_lines"](record, 345678)
    assert len(line) <= 100
