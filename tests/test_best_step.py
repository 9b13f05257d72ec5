"""
training/best_step.py: the best validation is printed, its checkpoint stays, and the end recommends it; what a terminal
sees of a run; and why a run whose learning rate has ended cannot go on.
"""
import json
import re

import pytest

import common
from library.lora import lora_paths
from training import best_step, run_folder
from tests.harness import add_item, is_one_line, lora_file, lora_tensors, run_script, validations_of, works

@pytest.fixture
def flags(small):
    more = [word for word in small.flags if word != small.cache / "tiny-data.json"]
    more[:2] = ["--data", small.folder / "data", "--val_data", small.folder / "data"]
    return [*more, "--val_pictures", 2, "--num_inference_steps", 2, "--sample_every", 1, "--keep", 1]

def write_log(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [dict(flags={}, command=[]), *records]),
                                      "utf-8")

def validation(step, loss, *psnrs, key="v", pairs=20):
    """A validation's line in a log: psnrs are those of the LoRA's pictures."""
    pictures = [dict(file=f"a/{n}.png", prompt="go", controls=1, psnr=[1, 2, psnr, 40]) for n, psnr in enumerate(psnrs)]
    return dict(step=step, val_loss=loss, psnr={}, pictures=pictures, val_key=key, pairs=pairs)

def many(psnr):
    """So many pictures that they can tell steps apart, with this mean PSNR."""
    return [psnr] * best_step.ENOUGH

def test_the_best_step_is_that_of_the_least_loss_and_of_the_greatest_mean_psnr(tmp_path):
    """Neither NaN nor a number that no float holds is one; failed pictures are not compared."""
    write_log(tmp_path, [dict(step=1, loss=2.0)])
    assert best_step.read_validations(tmp_path) == best_step.read_validations(tmp_path / "no run") == []
    for nothing in ([], [validation(1, float("nan"), pairs=9)]):
        assert best_step.best_steps(nothing) == {} and best_step.describe(nothing) == ["best so far: none"]
    write_log(tmp_path, [validation(10, 10**400, *many(21)), dict(step=11, loss=0.1),
                         validation(20, 0.5, *many(25)), validation(30, 0.25, *many(23)),
                         validation(40, 0.27, *many(1.5)), validation(50, 0.3)])
    validations = best_step.read_validations(tmp_path)
    assert best_step.best_steps(validations) == {"validation loss": 30, "mean PSNR": 20}
    assert best_step.describe(validations) == [
        "best so far: step 30 by validation loss (0.2500; the last, step 50, has 0.3000), "
        "step 20 by mean PSNR (25.0 dB; the last, step 40, has 1.5 dB)"]

@pytest.mark.parametrize("losses, psnrs, best", [
    ((0.54321, 0.54324), (26.993, 27.02), (200, 200)), # all print alike: the first
    ((0.54321, 0.54319), (26.94, 26.97), (200, 600)), # the losses do, the PSNRs do not
    ((0.5433, 0.5432), (27.0, 26.9), (600, 200))])
def test_steps_are_compared_at_the_digits_that_are_printed(losses, psnrs, best):
    """By the line, by --keep and by the commands at the end."""
    validations = [validation(step, loss, *many(psnr)) for step, loss, psnr in zip((200, 600), losses, psnrs)]
    assert tuple(best_step.best_steps(validations).values()) == best
    assert best_step.steps_to_keep(validations) == {*best}
    better = {} if losses[0] == 0.54321 and psnrs[1] > psnrs[0] else {200: ["mean PSNR"]}
    assert best_step.better_steps(validations) == better
    words = best_step.verdict(validations, "mean PSNR")
    printed = [f"{psnr:.1f} dB" for psnr in psnrs]
    assert words == (("step 600", printed[1]) if best[1] == 600 else
                     ("step 200", f"{printed[0]}; the last, step 600, has {printed[1]}"))

@pytest.mark.parametrize("pairs, pictures, few", [(20, 8, None), (8, 0, None), (7, 0, 7), (2, 2, 2), (20, 4, 4)])
def test_below_eight_held_out_pairs_one_line_says_that_they_cannot_tell(pairs, pictures, few):
    """The verdict is there all the same: a loss that has doubled is worse, also of two pairs."""
    lines = best_step.describe([validation(step, loss, *[20] * pictures, pairs=pairs)
                                for step, loss in ((2, 0.1), (4, 0.2))])
    assert "step 2 by validation loss (0.1000; the last, step 4, has 0.2000)" in lines[0]
    assert [line.split(";")[0] for line in lines[1:]] == (
        [f"too few held-out pairs to tell steps apart: {few}"] if few else [])

OTHER_DATA = [validation(2, 2.2, *many(30)), validation(4, 2.0, *many(29)), # 4, once more, is of other data
              validation(4, 2.3, *many(20), key="w"), validation(6, 2.1, *many(21), key="w"),
              validation(8, 2.2, *many(19), key="w")]

def test_with_other_held_out_pairs_the_comparison_begins_anew():
    """But --keep deletes no checkpoint that was the best by the pairs before: a later --resume may return to them."""
    assert best_step.best_steps(OTHER_DATA) == {"validation loss": 6, "mean PSNR": 6}
    assert "; not compared: 2 with other --val_data or flags of pictures" in best_step.describe(OTHER_DATA)[0]
    assert "not compared" not in best_step.describe(OTHER_DATA[:2])[0]
    assert best_step.steps_to_keep(OTHER_DATA) == {2, 4, 6}
    assert best_step.best_steps([*OTHER_DATA, validation(10, 2.1)]) == {"validation loss": 4, "mean PSNR": 2}

DAMAGES = [dict(val_loss=None), dict(val_loss="1"), dict(step=-1), dict(step=float("inf")), dict(step="2"),
           dict(step=int(20 * "1")), dict(pictures=5), dict(pictures={"a": 1}), dict(psnr={"a": [1]}), dict(psnr=[1]),
           dict(pairs=-1), dict(pairs=None), dict(val_key=3), dict(flags=3), dict(not_finite={"a": 1}),
           dict(not_finite=[3])]
PICTURE = dict(file="a/b", prompt="", controls=1, psnr=[1, 2, 3, 4])
DAMAGES += [dict(pictures=[PICTURE | damage]) for damage in (
    dict(psnr=[1, 2, 3]), dict(psnr=[1, 2, 3, "x"]), dict(file="\0"), dict(file=3), dict(prompt=3),
    dict(controls=1000000000))]
LINES = [json.dumps(validation(4, 0.1) | damage) for damage in DAMAGES]
LINES += ['{"val_loss": 0.1', '"val_loss"', '["val_loss"]', '{"val_loss": 0.1}', '{"val_loss": 0.1, "step": 1}']
LINES += [json.dumps(validation(4, 0.1))[:-1] + f', "x": {deep}}}' for deep in (90_000 * "[", 300 * "[" + 300 * "]")]
LINES += ["", "\0" * 100, "[]", "3", "{", "[" * 5000, '{"step": "1"}', '{"step": true}', '{"step": []}', "\udc80"]

@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_foreign_line_of_a_log_counts_as_none(tmp_path, line):
    """A run folder may come from anywhere. A run that goes on drops such a line, also where it is the first."""
    write_log(tmp_path, [validation(2, 2.0, 30)])
    whole = (tmp_path / "log.jsonl").read_text("utf-8")
    last = json.dumps(validation(4, 3.0, 20))
    text = f"{whole}{line}\n{last}\n"
    (tmp_path / "log.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    validations = best_step.read_validations(tmp_path)
    assert [record["step"] for record in validations] == [2, 4] and best_step.steps_to_keep(validations) == {2}
    assert run_folder.clean_folder(tmp_path, 4) == [*whole.splitlines(), last]
    (tmp_path / "log.jsonl").write_text('{"command": [], "val_loss": "x"}\n' + last, "utf-8")
    assert run_folder.clean_folder(tmp_path, 4) == [last]

def test_a_line_of_the_log_says_what_its_validation_is_compared_with(tmp_path, small, flags):
    """--val_data, --val_pictures and the flags of sampling may change with --resume, each alone; then back again. A
    LoRA of --sample_lora counts by its content."""
    for name in ("3", "4", "0"):
        add_item(tmp_path / "other", name)
    lora = tmp_path / "lora"
    lora.mkdir()
    lora_file(lora, lora_tensors())
    ways = [[], ["--val_pictures", 1], ["--shift", 2], ["--val_data", tmp_path / "other"], ["--sample_lora", lora],
            ["--true_cfg_scale", 2], []] # the last one of a flag counts
    for n, way in enumerate(ways):
        result = works("train.py", *flags, *way, "--sample_every", 0, "--max_steps", n + 1, "--out_dir",
                       tmp_path / "run", *["--resume"] * (n > 0))
    keys = [record["val_key"] for record in validations_of(tmp_path / "run")]
    assert len(keys) == len(ways) and len(set(keys)) == len(ways) - 1 and keys[0] == keys[-1]
    assert f"not compared: {len(ways) - 2} with other --val_data" in result.out
    assert 4 in best_step.steps_to_keep(best_step.read_validations(tmp_path / "run")) # the only one of the other data

@pytest.mark.parametrize("psnr_step", [2, 3])
def test_its_checkpoint_is_not_deleted_and_the_end_names_it(tmp_path, flags, monkeypatch, psnr_step):
    """As if the validation after step 2 had had the least loss, and this one the greatest PSNR; as it is, the last one
    would be the best, and equal to others. A checkpoint that is the best by all measures is recommended."""
    real, best = best_step.value_of, {"validation loss": (2, 0.0), "mean PSNR": (psnr_step, 90.0)}

    def value_of(record, measure):
        step, value = best[measure]
        return value if record["step"] == step else real(record, measure)
    monkeypatch.setattr(best_step, "value_of", value_of)
    result = works("train.py", *flags, "--max_steps", 4, "--out_dir", tmp_path / "a")
    names = [path.name for path in lora_paths.checkpoints(tmp_path / "a")]
    assert names == [f"checkpoint-{step:06d}" for step in sorted({2, psnr_step, 4})]
    if psnr_step == 2:
        assert "checkpoint-000002 is better than the last one by validation loss and mean PSNR" in result.out
        assert f"--lora {tmp_path / 'a/checkpoint-000002'} " in result.out
    else:
        assert "checkpoint-000002 is better than the last one by validation loss;" in result.out
        assert "checkpoint-000003 is better than the last one by mean PSNR;" in result.out
        assert f"--lora {tmp_path / 'a'} " in result.out
    assert "too few held-out pairs to tell steps apart: 2" in result.out

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
    """A line that is printed has at most 100 columns, also of a long run."""
    monkeypatch.setattr(common, "quiet", lambda: not terminal)
    result = works("train.py", *small.flags, "--max_steps", 22, "--save_every", 15, "--out_dir", tmp_path / "a")
    steps = [int(n) for n in re.findall(r"^step (\d+)/22 ", result.out, re.M)]
    assert steps == ([1, 10, 15, 20, 22] if terminal else [*range(1, 23)])
    lines = [line for line in result.out.splitlines() if line.startswith("step ")]
    assert f"tools/page.py {tmp_path / 'a'} --watch" in result.out
    result.globals["args"].max_steps = 20000
    record = dict(step=12345, loss=1.23456, lr=1.25e-4, grad_norm=0.0123456, seconds=123.456, tokens=4_000_000,
                  memory=131.25)
    assert max(map(len, [*lines, *result.globals["step_lines"](record, 345678)])) <= 100
