"""
tools/page.py: what is in a log is on the page, whatever texts and names come in; in a browser its slider, its wipe and
its keys work. The browser is Chromium (apt install chromium) with playwright; without them those tests are skipped.
"""
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from common import printable
from training import best_step
from tests.fuzz import fuzz
from tests.harness import Reader, add_item, is_one_line, run_script, until, within
from tools import page

ATTACKS = ["<script>window.hit = 1</script>", "</script><script>window.hit = 1</script>", "a\u2028b <b>bold</b>",
           '"><img src=x onerror="window.hit = 1">', "'); window.hit = 1; ('", "<!--body--> <!--title--> &lt;",
           "\u628a\u5929\u7a7a\u53d8\u6210\u591c\u665a", "\u062d\u0648\u0651\u0644 {x} ${window.hit = 1} \\"]
ODD_NAME = "a b'c\"d#e%41?&lt;<i>\u732b"
KEYS = ["input", "base", "lora", "vae"]

# ---- runs that train.py could have written ---------------------------------------------------------------------------

def write_log(folder, records, **flags):
    folder.mkdir(exist_ok=True, parents=True)
    first = dict(flags=flags, torch="2.13.0", commit="abc", started=1.0)
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, [first, *records])) + "\n", "utf-8")
    return folder

def toy_log(steps=200):
    """Every loss grows with the timestep, and that of sample 3 is three times the others'. It is seen where all is
    easy, so that its losses are not the largest. Before the second half of the run sample 1 is worse."""
    rng, records = np.random.default_rng(0), []
    for step in range(1, steps + 1):
        names = [str(n) for n in rng.integers(0, 8, 2)]
        s = [x * (0.4 if name == "3" else 1) for name, x in zip(names, rng.random(2))]
        hard = {"3": 3, "1": 9 if step <= steps // 2 else 1}
        losses = [hard.get(name, 1) * 10 ** x for name, x in zip(names, s)]
        records.append(dict(step=step, loss=float(np.mean(losses)), lr=1e-4 * step, grad_norm=float(rng.random()),
                            seconds=0.5, tokens=1000, memory=2.0, samples=names, timesteps=s, losses=losses))
    return records

def colour_of(step, n):
    """Of the picture that the LoRA draws: another one at each step, and for each file."""
    return step % 256, 40 * n % 256, 200

def make_run(folder, steps=200, every=50, prompts=("add a border",), files=None, controls=1, **flags):
    """A run whose control is red, its base gray, its target green, and its LoRA's pictures colour_of."""
    files = files or [f"val/{n:03}.png" for n in range(len(prompts))]
    records = toy_log(steps)
    places = dict(base="gray", target="green", control="red", control_1="yellow")

    def draw(place, file, colour):
        path = folder / "samples" / place / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48), colour).save(path)
    for n, file in enumerate(files):
        for place, colour in places.items():
            draw(place, file, colour)
    for step in range(every, steps + 1, every):
        shown = []
        for n, (file, prompt) in enumerate(zip(files, prompts)):
            draw(f"step_{step:06d}", file, colour_of(step, n))
            shown.append(dict(file=file, prompt=prompt, controls=controls, psnr=[10, 12, step / 10 + n, 40]))
        records.append(dict(step=step, val_loss=1 / step, psnr={"val": dict(zip(KEYS, [10, 12, step / 10, 40]))},
                            pictures=shown))
    return write_log(folder, sorted(records, key=lambda r: r["step"]), max_steps=steps, **flags)

def draw_page(*flags):
    """-> tools/page.py's result; it has to succeed."""
    result = run_script("tools/page.py", *flags)
    assert result.status == 0, result.err
    return result

def ends_of(path):
    """{(title of a curve's figure, its name): the number that its description says it ends at}."""
    found = {}
    for tag, attributes in Reader(path).tags:
        title, _, text = attributes.get("aria-label", "").partition(": ") if tag == "svg" else ("", "", "")
        for name, value in re.findall(r"([^,]+?) ends at ([\d.,e+-]*\d)", text):
            found[title, name.strip()] = float(value.replace(",", ""))
    return found

def verdicts_of(path):
    """The lines of the headline."""
    return [text for text in Reader(path).texts["p"] if re.match("(Mean PSNR to the target|Best by .*): ", text)]

# ---- without a browser -----------------------------------------------------------------------------------------------

def test_the_hardest_sample_is_found_whatever_its_timesteps(tmp_path):
    run = write_log(tmp_path / "run", toy_log())
    draw_page(run, "--hardest", 8)
    rows = page.find_hardest(page.read_log(run).steps)
    assert len(rows) == 8 and rows[0][0] == "3" and rows[0][1] > 2 * rows[1][1]
    assert sum(times for *_, times in rows) == 200 # the second half
    assert np.median([ratio for _, ratio, _ in rows]) == 1

def test_a_validation_of_nan_is_in_words_and_no_number(tmp_path):
    """Whatever the names of its pictures; the curves have the other steps."""
    odd = ["lora of " + ATTACKS[0], "base of a/\ud800.png", "vae of \u732b"]
    run = make_run(tmp_path / "run")
    lines = (run / "log.jsonl").read_text("utf-8").splitlines()
    lines.append(json.dumps(dict(step=225, val_loss=float("nan"), psnr={}, pictures=[], not_finite=odd)))
    (run / "log.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    draw_page(run)
    text = (run / "index.html").read_text("utf-8")
    for name in ("validation loss", "mean PSNR"):
        said = page.measures(page.read_log(run))[f"Best by {name}"]
        assert said.startswith("step 200 (") and "NaN or Inf was computed: step 225" in said
        assert ("the last, step 225, has NaN or Inf" in said) == (name == "validation loss")
    assert "Step 225 is not shown" in text and ATTACKS[0] not in text and ">nan" not in text and "NaN dB" not in text
    assert ends_of(run / "index.html")["Validation loss", "held-out pairs"] == 1 / 200

def log_of_losses(folder, factors, seen=20):
    """Every pair's loss is a few percent around its factor, at one noise level; each is seen so often in each half."""
    rng, records = np.random.default_rng(0), []
    for step in range(1, 2 * seen + 1):
        losses = [factor * rng.uniform(0.9, 1.1) for factor in factors.values()]
        records.append(dict(step=step, loss=float(np.mean(losses)), samples=list(factors), losses=losses,
                            timesteps=[0.5] * len(losses)))
    return write_log(folder, records)

@pytest.mark.parametrize("factors, named, said", [
    (dict(a=1, b=1.1, c=0.9, d=1.7, e=1), [], "No pair stands out"),
    (dict(a=1, b=3, c=0.9, d=1.1, e=9), ["e", "b"], "2 of 5 pairs stand out")])
def test_only_pairs_that_stand_out_are_named_and_page_and_terminal_say_the_same(tmp_path, factors, named, said):
    run = log_of_losses(tmp_path / "run", factors)
    first, *rest = [line for line in draw_page(run).out.splitlines() if "open it" not in line]
    read = Reader(run / "index.html")
    assert first.startswith(f"{run}: {said}") and first.removeprefix(f"{run}: ") in read.texts["p"]
    assert [line.split(":")[0] for line in rest] == named
    assert [text for text in read.texts["p"] if "times the median, seen" in text] == rest
    assert ("target may be wrong" in (run / "index.html").read_text("utf-8")) == bool(named)

def test_a_pair_that_was_hardly_seen_is_not_accused(tmp_path):
    run = log_of_losses(tmp_path / "run", dict(a=1, b=9, c=1, d=1, e=1), seen=2)
    assert "too short to tell" in draw_page(run).out
    assert len(draw_page(log_of_losses(tmp_path / "many", {f"p{n}": 9 if n < 9 else 1 for n in range(40)}), "--hardest",
                         2).out.splitlines()) == 1 + 2 + 1

def test_what_train_writes_is_shown_and_its_command_continues_it(tmp_path, small, monkeypatch):
    """Also while the run is at work: the last line may be half a line. The commands are for the folder in which the
    page was made; no path of the disk is in the page, for whoever gets it."""
    run = tmp_path / "it's a run"
    flags = [*small.flags, "--val_data", small.folder / "data", "--sample_every", 2, "--max_steps", 3, "--out_dir", run,
             "--lora_args", "use_rslora=true", "init_lora_weights=gaussian", "--offload", "all"]
    assert run_script("train.py", *flags).status == 0
    with open(run / "log.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step": 4, "lo')
    assert "too short to tell" in draw_page(run).out
    read = Reader(run / "index.html")
    again, sample, convert = map(shlex.split, read.texts["pre"])
    assert sample[:2] == ["python", "predict.py"] and run.name in sample and run.name in convert
    assert sample[sample.index("--offload") + 1] == "all"
    root = Path(os.path.commonpath([tmp_path, small.folder]))
    monkeypatch.chdir(root)
    page.make_page([run], run / "index.html", 6)
    again, sample, convert = map(shlex.split, Reader(run / "index.html").texts["pre"])
    assert str(run.relative_to(root)) in sample and str(run.relative_to(root)) in convert
    again = [str(root / word) if (root / word).exists() else word for word in again] # as run_script is in no folder
    assert "--lora_dropout" not in again # as it has the default
    log = (run / "log.jsonl").read_text("utf-8") # of a command without --batch_size, by another number of processes
    words = json.loads(log.splitlines()[0])["command"]
    at = words.index("--batch_size")
    (run / "log.jsonl").write_text(log.replace(json.dumps(words), json.dumps(words[:at] + words[at + 2:])), "utf-8")
    page.make_page([run], run / "index.html", 6)
    same = shlex.split(Reader(run / "index.html").texts["pre"][0])
    assert same[same.index("--batch_size") + 1] == again[again.index("--batch_size") + 1]
    result = run_script(*again[1:])
    assert result.status == 0 and "already done after 3 steps" in result.out, result.err
    lora = next(picture for picture in read.pictures if picture["data-name"] == "LoRA")
    assert json.loads(lora["data-at"]) == {str(n): f"samples/step_{n:06d}/data/0.png" for n in (2, 3)}
    assert [picture["data-name"] for picture in read.pictures[:4]] == ["control", "base", "LoRA", "target"]
    assert "add a red border" in read.texts["h3"]
    for made in (lambda: draw_page(run), lambda: page.make_page([run], run / "index.html", 6)):
        made()
        assert str(root) not in (run / "index.html").read_text("utf-8")

@pytest.mark.parametrize("text, named", [(None, "is no run"), ('{"flags": 1}', "with flags"), ("", "with flags"),
                                         ('{"flags": [1]}\n{"step": 1, "loss": 1}', "with flags"),
                                         ('{}\n{"step"\n{"step": 2}', "log.jsonl:2"), ("[]\n{}", "log.jsonl:1"),
                                         ('{}\n{"step": "x", "loss": 1}\n{}', "log.jsonl:2")])
def test_a_folder_without_a_log_is_one_line(tmp_path, text, named):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text, "utf-8")
    result = run_script("tools/page.py", tmp_path)
    assert result.status == 1 and is_one_line(result.errors[-1], tmp_path, named)
    (tmp_path / "log.jsonl").write_bytes(b"\xff")
    assert is_one_line(run_script("tools/page.py", tmp_path).errors[-1], tmp_path / "log.jsonl", "cannot be read")
    result = run_script("tools/page.py", tmp_path / "none")
    assert result.status == 1 and is_one_line(result.errors[-1], tmp_path / "none")

def test_of_a_folder_that_holds_runs_these_are_listed_with_their_state(tmp_path):
    for n, steps in enumerate((20, 30)):
        write_log(tmp_path / f"out/tiny-00{n}", toy_log(steps), max_steps=30)
        os.utime(tmp_path / f"out/tiny-00{n}/log.jsonl", (n, n))
    (tmp_path / "out/tiny-001/DONE").touch()
    (tmp_path / "out/other").mkdir()
    (tmp_path / "out/other/log.jsonl").write_text("[]", "utf-8") # is another program's
    os.utime(tmp_path / "out/other/log.jsonl", (0, 0))
    for flags in ([], ["--watch"]):
        result = run_script("tools/page.py", tmp_path / "out", *flags)
        assert result.status == 1 and len(result.err.splitlines()) == 1
        assert is_one_line(result.errors[0], tmp_path / "out", "holds runs", tmp_path / "out/tiny-001") # the newest
        lines = result.out.splitlines()
        assert "20 steps of 30; running or stopped" in lines[0] and "30 steps of 30; finished" in lines[1]
        assert [line.split(":")[0] for line in lines] == [str(tmp_path / f"out/tiny-00{n}") for n in (0, 1)]
    result = run_script("tools/page.py", tmp_path / "out/tiny-00")
    assert is_one_line(result.errors[0], tmp_path / "out/tiny-00:", f"give {tmp_path}/out/tiny-00")

def test_a_run_before_its_first_step_has_a_page_that_says_so(tmp_path):
    for name, records in (("run", []), ("other", toy_log())):
        write_log(tmp_path / name, records, max_steps=500, data=["photos"], val_data=["photos_val"])
    draw_page(tmp_path / "run")
    read = Reader(tmp_path / "run/index.html")
    assert any("no step is done yet" in text for text in read.texts["p"]) and "Curves" not in read.texts["h2"]
    assert any("There are none yet" in text for text in read.texts["p"])
    draw_page(tmp_path / "run", tmp_path / "other") # side by side with one that has steps
    assert "Curves" in Reader(tmp_path / "run/index.html").texts["h2"]

def points_of(path, title):
    """{name of a line: [(x, y), ...]} of a chart; of the band first its lower edge, then its upper one backwards."""
    figure = next(part for part in path.read_text("utf-8").split("<figure") if f"<strong>{title}" in part)
    return {name: np.array([point.split(",") for point in d.split()], float) * (1, -1)
            for name, d in re.findall(r'data-name="([^"]*)" d="M([^"Z]*)', figure)}

@pytest.mark.parametrize("steps", [2, 3, 39, 40, 60, 299, 301, 500, 2000])
def test_a_smoothed_curve_lies_within_its_band_from_the_first_step_to_the_last(tmp_path, steps):
    """Also where the loss falls steeply at the start, which lifts a trailing mean above all steps."""
    rng = np.random.default_rng(0)
    losses = (0.05 + 2 * np.exp(-np.arange(steps) / 8)) * rng.uniform(0.8, 1.2, steps)
    run = write_log(tmp_path / "run", [dict(step=n + 1, loss=loss) for n, loss in enumerate(losses)])
    draw_page(run)
    lines = points_of(run / "index.html", "Training loss")
    band, line = lines["range"], lines["smoothed"]
    lower, upper = band[:len(line)], band[len(line):][::-1]
    assert (lower[:, 0] == line[:, 0]).all() and (upper[:, 0] == line[:, 0]).all()
    assert (lower[:, 1] <= line[:, 1] + 1e-6).all() and (line[:, 1] <= upper[:, 1] + 1e-6).all()
    column = -(-steps // page.COLUMNS) # that many steps are one point
    assert line[0, 0] == 1 and line[-1, 0] == steps and np.isclose(line[0, 1], losses[:column].mean(), rtol=1e-5)
    if steps == 500: # and it is smooth at the end
        assert np.isclose(line[-1, 1], losses[-2 * (1 + 4):].mean(), rtol=1e-5)
        assert np.abs(np.diff(line[-100:, 1])).mean() < np.abs(np.diff(losses[-100:])).mean() / 5

def test_a_curve_ends_at_the_value_of_its_own_column(tmp_path):
    records = toy_log()
    run = write_log(tmp_path / "run", records)
    draw_page(run)
    ends = ends_of(run / "index.html")
    for title, field in (("Training loss", "loss"), ("Gradient norm", "grad_norm")):
        assert np.isclose(ends[title, "smoothed"], np.mean([r[field] for r in records[-4:]]), rtol=0.01), title
    assert ends["Learning rate", "at each step"] == 0.02 and ends["Tokens per second", "smoothed"] == 2000

def test_the_two_losses_are_drawn_apart_unless_the_log_has_both_at_the_same_noise_levels(tmp_path):
    for name, more in (("run", {}), ("both", dict(train_loss=0.5))):
        run = make_run(tmp_path / name)
        records = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()[1:]]
        write_log(run, [r | more if "val_loss" in r else r for r in records])
        draw_page(run)
        titles = {line: title for title, line in ends_of(run / "index.html")}
        assert titles["held-out pairs"] == "Validation loss" != titles["smoothed"]
        said, = [text for text in Reader(run / "index.html").texts["p"] if "noise levels differ" in text]
        assert (titles.get("training pairs") == "Validation loss") == ("overfitting" in said) == bool(more)
        assert not any("Training loss" in text for text in verdicts_of(run / "index.html")) # it misleads there

def test_the_best_steps_are_named_by_loss_and_by_psnr(tmp_path):
    """The mean PSNR counts each picture once, whatever its group; of equal losses the first one wins."""
    def validation(step, loss, *psnrs):
        files = "val/0.png", "val/1.png", "val/2.png", "known/0.png"
        pictures = [dict(file=file, prompt="x", controls=1, psnr=[9, 9, psnr, 40]) for file, psnr in zip(files, psnrs)]
        means = dict(val=float(np.mean(psnrs[:-1])), known=psnrs[-1])
        return dict(step=step, val_loss=loss, pictures=pictures, psnr={
            group: dict(input=9, base=9, lora=mean, vae=40) for group, mean in means.items()})
    validations = [validation(10, 0.5, 10, 10, 10, 40), validation(20, 0.3, 20, 20, 20, 16),
                   validation(30, 0.3, 19, 19, 19, 17), validation(40, 0.4, 12, 12, 12, 30)]
    run = write_log(tmp_path / "run", [*toy_log(40), *validations])
    draw_page(run)
    read = Reader(run / "index.html")
    first, by_loss, by_psnr = verdicts_of(run / "index.html")
    assert "9.0 \u2192 16.5 dB" in first # all of it is the mean over all pictures
    assert by_loss == "Best by validation loss: step 20 (0.3; the last, step 40, has 0.4)"
    assert by_psnr.startswith("Best by mean PSNR: step 20 and step 40 (19.0 dB and 16.5 dB, equal as far as 4")
    rows = [text for text in read.texts["tr"] if text.startswith("Mean PSNR")]
    numbers = [["9.0", lora, "40.0", "9.0"] for lora in ("16.5", "12.0", "30.0")]
    assert [re.findall(r"[\d.]+", row) for row in rows] == numbers
    assert [row.split("9.0")[0] for row in rows] == [f"Mean PSNR {of}" for of in ("to the target", "val", "known")]
    assert ends_of(run / "index.html")["PSNR to the target (dB)", "LoRA"] == 16.5
    older = dict(psnr={group: dict(input=1, base=1, lora=lora, vae=1) for group, lora in (("a", 3), ("b", 5))})
    assert best_step.mean_psnr(older)["lora"] == 4

def test_what_matters_comes_first_and_six_pictures_are_open(tmp_path):
    run = make_run(tmp_path / "run", prompts=[f"edit {n}" for n in range(24)],
                   files=[f"{'val' if n < 20 else 'known'}/{n}.png" for n in range(24)])
    two = '"psnr": {"val": {"input": 1, "base": 1, "lora": 2, "vae": 3}, "known/x": {'
    (run / "log.jsonl").write_text((run / "log.jsonl").read_text("utf-8").replace('"psnr": {"val": {', two), "utf-8")
    draw_page(run)
    read = Reader(run / "index.html")
    assert read.texts["h2"][:4] == ["Validation pictures", "Curves", "Numbers", "Hardest training pairs"]
    chapters = [a["href"] for tag, a in read.tags if tag == "a"]
    assert chapters == [f"#{a['id']}" for tag, a in read.tags if tag == "section"] and "#pictures" in chapters
    assert any(text.startswith("Mean PSNR known/x12.0") for text in read.texts["tr"])
    assert not any("known" in text for text in read.texts["strong"] + verdicts_of(run / "index.html"))
    text = (run / "index.html").read_text("utf-8")
    assert text.split("<details>")[0].count('class="card"') == 6
    assert "18 more pictures" in read.texts["summary"]

def test_of_one_validation_there_is_no_slider_and_no_chart_of_a_dot(tmp_path):
    run = make_run(tmp_path / "run", steps=470, every=470)
    draw_page(run)
    read = Reader(run / "index.html")
    assert read.texts["strong"] == ["Training loss", "Gradient norm", "Learning rate", "Tokens per second"]
    assert not [a for tag, a in read.tags if "data-steps" in a] and "more with --sample_every N" in str(read.texts["p"])
    marks = re.findall(r'<span class="x"[^>]*>([^<]*)', (run / "index.html").read_text("utf-8"))
    assert marks[:4] == ["0", "200", "470", "0"] # the last step has a mark of its own, 400 is too near
    draw_page(make_run(tmp_path / "two", steps=400, every=200))
    read = Reader(tmp_path / "two/index.html")
    assert "Validation loss" in read.texts["strong"] and [a for tag, a in read.tags if "data-steps" in a]

@pytest.mark.parametrize("seconds, left", [({}, 300 * 2), (dict(seconds=60), 300 * 2 + 4 * 60)])
def test_the_time_left_counts_the_validations_to_come(tmp_path, seconds, left):
    """100 of 400 steps; a validation each 100 steps, where the last step's is the one at the end."""
    records = [r | dict(seconds=2.0) for r in toy_log(100)]
    run = write_log(tmp_path / "run", records, max_steps=400, sample_every=100)
    if seconds:
        write_log(run, [*records, dict(step=80, val_loss=1, **seconds)], max_steps=400, sample_every=80)
    assert abs(page.seconds_left(page.read_log(run)) - left) <= 2
    os.utime(run / "log.jsonl", (1, 1))
    assert page.seconds_left(page.read_log(run)) is None # it was stopped
    os.utime(run / "log.jsonl")
    (run / "DONE").touch()
    assert page.seconds_left(page.read_log(run)) is None

def test_a_long_curve_is_thinned_out_and_keeps_its_extremes():
    x, y = np.arange(1.0, 100_001), np.zeros(100_000)
    y[77_777], y[33_333] = 9, -9
    thin_x, least, mean, greatest = page.thin(x, y)
    assert len(thin_x) == page.COLUMNS and greatest.max() == 9 and least.min() == -9
    assert abs(x[77_777] - thin_x[greatest.argmax()]) < 400 and abs(mean).max() < 0.1
    assert all(np.array_equal(values, y[:300]) for values in page.thin(x[:300], y[:300])[1:]) # few are left alone
    for points in (450, 599, 301): # all columns are of as many points: else a band would become a line in mid-chart
        thin_x, least, _, greatest = page.thin(np.arange(points), np.arange(points))
        assert set((greatest - least)[:-1]) == {1} and len(thin_x) <= page.COLUMNS

def test_a_page_without_pictures_says_what_would_give_them(tmp_path):
    run = write_log(tmp_path / "run", toy_log())
    draw_page(run)
    assert not any("none yet" in text for text in Reader(run / "index.html").texts["p"])
    assert any("--val_data DIR" in text for text in Reader(run / "index.html").texts["p"])
    draw_page(make_run(tmp_path / "other"))
    assert not any("--val_data DIR" in text for text in Reader(tmp_path / "other/index.html").texts["p"])

def test_a_resumed_log_counts_a_step_once_and_takes_its_last_flags(tmp_path):
    run = make_run(tmp_path / "run", lr=1)
    lines = (run / "log.jsonl").read_text("utf-8").splitlines()
    later = [json.dumps(dict(flags=dict(lr=2))), *lines[-40:]]
    (run / "log.jsonl").write_text("\n".join(lines + later), "utf-8")
    read = page.read_log(run)
    assert [r["step"] for r in read.steps] == list(range(1, 201)) and len(read.validations) == 4
    assert read.flags["lr"] == 2

def test_a_text_stays_a_text(tmp_path):
    """Captions, file names, flags, groups, versions. Whoever forgets to escape one makes tags of it."""
    data = tmp_path / "data"
    for n, attack in enumerate(ATTACKS):
        add_item(data, f"{n}", caption=attack.replace("\u2028", " "))
    run = make_run(tmp_path / ODD_NAME, prompts=ATTACKS, files=[f"{ODD_NAME}/{n} #.png" for n in range(len(ATTACKS))],
                   data=[str(data)], lora_args=[["a", ATTACKS[0]]], model=ATTACKS[1])
    log = (run / "log.jsonl").read_text("utf-8").replace('"val": {', json.dumps(ATTACKS[0]) + ": {").splitlines()
    hard = {f"data/{n}": 9 for n in range(len(ATTACKS))} # all of these stand out
    steps = log_of_losses(tmp_path / "losses", hard | {f"easy/{n}": 1 for n in range(12)}, seen=100)
    losses = (steps / "log.jsonl").read_text("utf-8").splitlines()[1:]
    (run / "log.jsonl").write_text("\n".join([log[0], *losses, *[line for line in log if "val_loss" in line]]) + "\n",
                                   "utf-8")
    draw_page(run, "--hardest", len(ATTACKS), "--data", data)
    read = Reader(run / "index.html")
    kinds = [tag for tag, _ in read.tags]
    assert kinds.count("script") == 1 and "bold" not in read.texts["b"]
    assert read.texts["title"] == read.texts["h1"] == [ODD_NAME]
    assert not [a for _, attributes in read.tags for a in attributes if a.startswith("on")]
    headings = read.texts["h3"]
    assert headings[:len(ATTACKS)] == list(map(printable, ATTACKS))
    assert sorted(set(headings[len(ATTACKS):2 * len(ATTACKS)])) == sorted(a.replace("\u2028", " ") for a in ATTACKS)
    assert len([a for a in read.pictures if a["src"].startswith("data:image/jpeg")]) == 2 * len(ATTACKS)
    assert any(ATTACKS[0] in shlex.split(text)[-1] for text in read.texts["td"] if "a=" in text)

def test_every_link_is_a_file_also_from_another_folder(tmp_path):
    run = make_run(tmp_path / ODD_NAME, prompts=["x", "y"], files=["v/1 #?.png", ODD_NAME + ".png"], controls=2)
    (run / "samples/control_1/v/1 #?.png").unlink()
    (run / "samples").rename(run / "elsewhere")
    (run / "samples").symlink_to(run / "elsewhere")
    for out in (run / "index.html", tmp_path / "pages #1/both.html"):
        draw_page(run, "--out", out)
        sources = [a["data-at"] for a in Reader(out).pictures]
        assert len(sources) == 9 # of 2 pictures with control, control 2, base, LoRA, target; one is gone
        links = [link for at in sources for link in json.loads(at).values()]
        assert len(set(links)) == 7 + 2 * 4 and not [link for link in links if re.search(r"[ '\"#?<]", link)]
        assert all((out.parent / unquote(link)).is_file() for link in links)
        assert not [link for link in links if "elsewhere" in link]

def test_of_deleted_steps_only_the_numbers_are_left(tmp_path):
    run = make_run(tmp_path / "run")
    shutil.rmtree(run / "samples/step_000050")
    draw_page(run)
    slider, = [json.loads(a["data-steps"]) for tag, a in Reader(run / "index.html").tags if "data-steps" in a]
    assert slider == [100, 150, 200]
    shutil.rmtree(run / "samples")
    draw_page(run)
    assert "add a border" in Reader(run / "index.html").texts["h3"]

def test_two_runs_stand_side_by_side_with_what_differs_in_their_flags(tmp_path):
    runs = [make_run(tmp_path / "a/run", lr=1, seed=0), make_run(tmp_path / "b/run", every=40, lr=2, seed=0)]
    draw_page(*runs)
    read = Reader(runs[0] / "index.html")
    rows = [text for text in read.texts["tr"] if text.startswith("--")]
    assert rows[0] == "--lr12" and "--seed00" not in rows # of all flags the one that differs
    names = [a["data-name"] for a in read.pictures]
    assert names == ["control", "base", "LoRA a/run", "LoRA b/run", "target"]
    slider, = [json.loads(a["data-steps"]) for tag, a in read.tags if "data-steps" in a]
    assert slider == [40, 50, 80, 100, 120, 150, 160, 200]
    assert [text for text in read.texts["span"] if text.startswith("base")] == ["base, a/run"] # theirs is the same
    assert {("Training loss", name) for name in ("a/run", "b/run")} <= ends_of(runs[0] / "index.html").keys()

def test_watching_writes_the_page_again_as_the_log_grows_until_the_end(tmp_path, monkeypatch):
    """A folder without a log is waited for. The terminal tells it when it begins and when it ends."""
    run = make_run(tmp_path / "run")
    lines = (run / "log.jsonl").read_text("utf-8").splitlines(keepends=True)
    (run / "log.jsonl").unlink()
    seen, left = [], lines

    def sleep(seconds):
        file = run / "index.html"
        seen.append(file.stat().st_mtime_ns if file.exists() else 0)
        assert not file.exists() or "data-reload" in file.read_text("utf-8")
        if len(seen) % 2: # half of the time there is nothing new
            with open(run / "log.jsonl", "a", encoding="utf-8") as f:
                f.writelines(left[:50])
            del left[:50]
        elif not left:
            (run / "DONE").touch()
    monkeypatch.setattr(time, "sleep", sleep)
    result = draw_page(run, "--watch")
    assert seen[0] == 0 and len(seen) == 10 and len(set(seen)) == 6
    text = (run / "index.html").read_text("utf-8")
    assert result.out.count("open it") == 2 and re.search(r"; finished \d", text)
    assert "data-reload" not in text and "data-made" not in text # it is final

# ---- a run from a stranger ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["{private}", "../../{private}", "linked.png", "folder/a.png",
                                  "val/../../../private/a.png"])
def test_a_picture_outside_of_the_run_s_folder_is_not_shown(tmp_path, name):
    """Neither one that the log names by its place, nor one that a link in samples/ leads to."""
    private = add_item(tmp_path / "private", "a") / "target/a.png"
    (tmp_path / "private/a.png").symlink_to(private)
    run = make_run(tmp_path / "run", files=["val/0.png", name.format(private=private)], prompts=["x", "y"])
    for folder in (run / "samples").iterdir():
        (folder / "linked.png").unlink(missing_ok=True)
        (folder / "linked.png").symlink_to(private)
        if (folder / "folder").is_dir():
            shutil.rmtree(folder / "folder")
        (folder / "folder").symlink_to(private.parent)
    assert all(page.size_of(folder / name.format(private=private)) for folder in (run / "samples").iterdir())
    draw_page(run)
    read = Reader(run / "index.html")
    assert len(read.pictures) == 4 and all("/val/0.png" in picture["src"] for picture in read.pictures)
    assert "private" not in " ".join(read.texts["pre"])

def test_samples_that_lie_elsewhere_are_not_the_run_s(tmp_path):
    """A whole folder of another place, linked under the run's own name."""
    run = make_run(tmp_path / "run", files=["val/0.png"], prompts=["x"])
    (run / "samples").rename(tmp_path / "private")
    (run / "samples").symlink_to(tmp_path / "private")
    draw_page(run)
    assert not Reader(run / "index.html").pictures

def test_fuzz_of_a_log(tmp_path, capsys):
    """The page is drawn, or one line says why not; --keep, the best step and --resume read the same log."""
    from training import resume
    run = make_run(tmp_path / "run", steps=20, every=10, prompts=["x", "y"])
    records = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]

    def case(damaged):
        lines = damaged if isinstance(damaged, list) else [damaged]
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        best_step.describe(run), best_step.steps_to_keep(run), best_step.better_checkpoints(run)
        resume.clean_folder(run, 10)
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        page.make_page([run], run / "index.html", 6)
    fuzz("log", records, case, share=0.5)

def test_a_log_that_is_a_link_is_not_followed_nor_a_page(tmp_path):
    """A DONE that leads elsewhere says nothing. A page replaces the link at its place, not the file behind that."""
    other, run = make_run(tmp_path / "other"), make_run(tmp_path / "run")
    (other / "DONE").touch()
    draw_page(other)
    before = (other / "index.html").read_bytes()
    (run / "DONE").symlink_to(other / "DONE")
    (run / "index.html").symlink_to(other / "index.html")
    draw_page(run)
    assert not page.read_log(run).done and (other / "index.html").read_bytes() == before
    assert not (run / "index.html").is_symlink() and Reader(run / "index.html").texts["h1"] == ["run"]
    (run / "log.jsonl").unlink()
    (run / "log.jsonl").symlink_to(other / "log.jsonl")
    result = run_script("tools/page.py", run)
    assert result.status == 1 and is_one_line(result.errors[-1], run / "log.jsonl", "link")

def test_of_datasets_that_the_log_names_none_is_opened(tmp_path):
    """Only those of --data; a line says so, with the command."""
    data = tmp_path / "data"
    for n in range(4):
        add_item(data, f"{n}")
    run = log_of_losses(tmp_path / "a run", {f"data/{n}": 9 if n == 3 else 1 for n in range(4)})
    log = run / "log.jsonl"
    log.write_text(log.read_text("utf-8").replace('"flags": {}',
                   json.dumps(dict(flags=dict(data=[str(data)])))[1:-1], 1), "utf-8")
    assert page.read_log(run).flags["data"] == [str(data)]
    line = draw_page(run).out.splitlines()[-1]
    assert not Reader(run / "index.html").pictures and "--data DIR" in " ".join(Reader(run / "index.html").texts["p"])
    words = shlex.split(line.rpartition(": ")[2])
    assert words[:2] == ["python", "tools/page.py"]
    draw_page(*words[2:-1], data)
    assert len(Reader(run / "index.html").pictures) == 2
    assert is_one_line(run_script("tools/page.py", run, "--data", tmp_path / "none").errors[0], tmp_path / "none")

def test_a_picture_that_an_index_names_is_shown_only_if_it_has_the_hash_in_it(tmp_path, small):
    """An index comes from a stranger, as the log does, and may name any picture of the disk as an odd pair's."""
    index = json.loads((small.cache / "tiny-data.json").read_bytes())
    sample, *_ = index["samples"]
    names = [f"{s['root']}/{s['name']}" for s in index["samples"]]
    run = log_of_losses(tmp_path / "run", {name: 1 if n else 9 for n, name in enumerate(names)})
    shutil.copytree(small.cache, tmp_path / "cache")
    private = str(add_item(tmp_path / "private", "a") / "target/a.png")
    stolen = dict(sample, target=private, contents={**sample["contents"], private: "0" * 64})
    for named, pictures in ((sample, 2), (stolen, 1)):
        path = tmp_path / "cache/stranger.json"
        path.write_text(json.dumps(index | dict(samples=[named, *index["samples"][1:]])), "utf-8")
        draw_page(run, "--data", path)
        assert len(Reader(run / "index.html").pictures) == pictures

def test_a_log_of_pictures_that_are_not_there_costs_no_more_than_its_size(tmp_path):
    """60 validations name 100 pictures each, with 100 controls: 600,000 places, none of which is asked for."""
    rows = [dict(file=f"val/{n}.png", prompt="x", controls=100, psnr=[1, 2, 3, 4]) for n in range(6000)]
    records = [dict(step=step, val_loss=1, pictures=rows[100 * (step - 1):100 * step]) for step in range(1, 61)]
    run = write_log(tmp_path / "run", records)
    with within(3):
        page.make_page([run], run / "index.html", 6)
    picture = run / "samples/control_99/val/5.png"
    picture.parent.mkdir(parents=True)
    Image.new("RGB", (64, 48)).save(picture)
    page.make_page([run], run / "index.html", 6)
    assert [picture["src"] for picture in Reader(run / "index.html").pictures] == ["samples/control_99/val/5.png"]

def test_a_link_in_samples_is_shown_if_it_leads_to_a_place_there(tmp_path):
    """As the hub's snapshots have them; one file that is named many times is opened once."""
    run = make_run(tmp_path / "run", steps=10, every=10, files=["val/0.png"])
    target = run / "samples/target/val/0.png"
    target.rename(target.with_name("1.png"))
    target.symlink_to("1.png")
    draw_page(run)
    assert "samples/target/val/0.png" in [picture["src"] for picture in Reader(run / "index.html").pictures]

def test_the_seconds_of_a_log_have_a_limit_that_their_sum_can_be_said(tmp_path):
    """Of a step that took a thousand million seconds one line says that train.py writes no such line."""
    run = write_log(tmp_path / "run", [dict(step=n, loss=1, seconds=1e6, memory=1) for n in range(1, 90_001)])
    draw_page(run)
    run = write_log(tmp_path / "run", [dict(step=n, loss=1, seconds=1e9, memory=1) for n in range(1, 90_001)])
    result = run_script("tools/page.py", run)
    assert result.status == 1 and is_one_line(result.errors[-1], "log.jsonl:2", "delete it")

def test_a_log_of_gigabytes_is_not_read(tmp_path, capsys, monkeypatch):
    """page.py says so in one line; a validation's best is left aside, with a line once."""
    run = write_log(tmp_path / "run", toy_log(2))
    os.truncate(run / "log.jsonl", 2**31)
    result = run_script("tools/page.py", run)
    assert result.status == 1 and is_one_line(result.errors[-1], "log.jsonl", "over 1,073,741,824 bytes")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("read"))
    assert best_step.steps_to_keep(run) == set() and best_step.best_steps(run) == {} == best_step.better_checkpoints(run)
    line, = capsys.readouterr().err.splitlines()
    assert "log.jsonl: over 1,073,741,824 bytes, and left aside" in line

@pytest.mark.parametrize("command, why", [
    (["-c", "import os"], "not train.py's"), (["/tmp/evil.py", "--data", "d"], "not train.py's"),
    ([], "not train.py's"), ("train.py; reboot", "not train.py's"), (["train.py", 3], "not train.py's"),
    ([["train.py"]], "not train.py's"),
    (["train.py", "-c", "x"], "-c belongs to no flag"), (["train.py", "x.py"], "x.py belongs to no flag"),
    (["train.py", "--data", "d", "-m", "evil"], "-m belongs to no flag"), (["train.py", "--evil", "x"], "no --evil"),
    (["train.py", "--data;reboot"], "no --data;reboot"), (["train.py", "--optimizer", "evil.Opt"], "evil.Opt"),
    (["train.py", "--optimizer=torch.optim.sgd.torch.os.system"], "--optimizer"),
    (["train.py", "--optimizer", "torch.optim.AdamW", "evil.Opt"], "evil.Opt"),
    (["train.py", "--tracker", "wandb"], "--tracker"), (["train.py", "--tracker=wandb"], "--tracker"),
    (["train.py", "--data", "\ud800"], "")])
def test_a_stranger_s_command_is_not_offered(tmp_path, command, why):
    """What a page offers is pasted. A line says why there is none."""
    run = make_run(tmp_path / "run")
    log = run / "log.jsonl"
    log.write_text(log.read_text("utf-8").replace('"flags"',
                   json.dumps(dict(command=command))[1:-1] + ', "flags"', 1), "utf-8")
    draw_page(run)
    read = Reader(run / "index.html")
    predict, convert = map(shlex.split, read.texts["pre"])
    assert predict[:2] == ["python", "predict.py"] and convert[:2] == ["python", "tools/convert_lora.py"]
    assert any("No command is offered" in text and why in text for text in read.texts["p"])

@pytest.mark.parametrize("flags", [dict(model=["a"]), dict(model={"a": 1}), dict(sample_lora="x"),
                                   dict(sample_lora=[1]), dict(sample_lora=["--out=x.png"]), dict(model=True)])
def test_flags_of_a_log_that_are_no_flags_are_not_offered(tmp_path, flags):
    draw_page(make_run(tmp_path / "run", **flags))
    assert not any("predict.py" in text for text in Reader(tmp_path / "run/index.html").texts["pre"])

def test_an_offered_command_has_one_word_for_each_value(tmp_path):
    """It is quoted, and a value is no flag; the script and the run's folder are not the log's."""
    texts = ["$(touch hit)", "`touch hit`", "'; touch hit; '", "a\nb", "--out=/x.png"]
    run = make_run(tmp_path / "run", prompts=[texts[4]], model=texts[0], negative_prompt="-1", shift=2)
    words = ["/other/train.py", "--model", texts[0], "--data", *texts[1:4], "--negative_prompt=-1", "--shift", "2",
             "--optimizer", "torch.optim.AdamW", "--no-upscale", "--out_dir", "/elsewhere", "--resume"]
    log = run / "log.jsonl"
    log.write_text(log.read_text("utf-8").replace('"flags"',
                   json.dumps(dict(command=words))[1:-1] + ', "flags"', 1), "utf-8")
    draw_page(run)
    again, predict, _ = Reader(run / "index.html").texts["pre"]

    def paste(command):
        got = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, cwd=tmp_path)
        return got.stdout.decode().split("\0")[:-1]
    assert paste(again) == ["python", "train.py", *words[1:-3], "--resume", "--out_dir", "run"]
    assert paste(predict)[2:6] == ["--model", texts[0], "--negative_prompt=-1", "--shift"]
    assert paste(predict)[-1] == "--prompt=--out=/x.png" and not (tmp_path / "hit").exists()

# ---- in a browser ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def chromium():
    library = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not program:
        pytest.skip("needs a browser: apt install chromium")
    with library.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()

@pytest.fixture
def view(chromium):
    """-> view(file, width, scheme): the page in a browser, which must not complain about anything."""
    complaints, tabs = [], []

    def view(file, width=1400, scheme="light", height=900):
        tab = chromium.new_page(viewport=dict(width=width, height=height), color_scheme=scheme)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(dialog.message))
        tab.on("requestfailed", lambda request: complaints.append(request.url))
        tab.on("request", lambda request: request.url.startswith(("file:", "data:")) or complaints.append(request.url))
        tab.goto(file.as_uri())
        tabs.append(tab)
        return tab
    yield view
    for tab in tabs:
        tab.close()
    assert not complaints

def wait_for_pictures(tab, query):
    """(Chromium's own waiting is forbidden by the page, which forbids all scripts but its own.)"""
    loaded = f"[...document.querySelectorAll('{query}')].every(image => image.complete && image.naturalWidth == 64)"
    until(lambda: tab.evaluate(loaded), seconds=10)

def lora_at(tab, n=0):
    """(file that the LoRA's n-th tile shows, its number)."""
    picture = tab.locator("img[data-name=LoRA]").nth(n)
    number = tab.locator(".tile", has=tab.locator("img[data-name=LoRA]")).nth(n).locator("b")
    return picture.get_attribute("src"), number.text_content()

def test_the_slider_and_the_arrows_change_the_step(tmp_path, view):
    run = make_run(tmp_path / "run", prompts=["x", "y"])
    draw_page(run)
    tab = view(run / "index.html")
    assert lora_at(tab, 1) == ("samples/step_000200/val/001.png", "step 200: 21.0 dB") # the newest one comes first
    tab.locator("main input.step").evaluate("bar => { bar.value = 1; bar.dispatchEvent(new Event('input')) }")
    assert lora_at(tab, 1) == ("samples/step_000100/val/001.png", "step 100: 11.0 dB")
    assert tab.locator("main .bar output").text_content() == "100"
    assert tab.locator(".now").first.evaluate("line => line.style.left") == "50%"
    tab.keyboard.press("ArrowLeft")
    assert lora_at(tab) == ("samples/step_000050/val/000.png", "step 50: 5.0 dB")
    tab.keyboard.press("ArrowLeft") # there is none before
    tab.keyboard.press("ArrowRight")
    assert lora_at(tab) == ("samples/step_000100/val/000.png", "step 100: 10.0 dB")
    assert tab.locator("img[data-name=base]").first.get_attribute("src") == "samples/base/val/000.png"

@pytest.mark.parametrize("validations, runs", [(1, 1), (5, 1), (40, 1), (4, 2)])
def test_the_first_screen_shows_the_headline_and_a_picture(tmp_path, view, validations, runs):
    """Without scrolling, also on a phone; and nothing is wider than the screen."""
    folders = [make_run(tmp_path / f"photos-{n}", 400, 400 // validations, ["make it a snowy winter evening"] * 3,
                        model="Qwen/Qwen-Image-Edit-2509", data=["photos"]) for n in range(runs)]
    draw_page(*folders)
    for width, height in ((1280, 800), (390, 844)):
        tab = view(folders[0] / "index.html", width, height=height)
        heading, *verdicts = [line.bounding_box() for line in tab.locator("h1, .verdict").all()]
        pictures = [image.bounding_box() for image in tab.locator("main .tile img").all()]
        assert heading["y"] > 0 and verdicts and max(box["y"] + box["height"] for box in verdicts) < pictures[0]["y"]
        assert any(box["height"] > 60 and box["y"] + box["height"] <= height for box in pictures)
        assert tab.evaluate("document.documentElement.scrollWidth") == width

def test_the_best_step_s_pictures_stand_beside_those_of_the_slider_s_step(tmp_path, view):
    """At first these are the last step's. Marks on the slider and the curves tell the best; its name, its mark, the
    buttons and a click on a curve move the slider."""
    run = make_run(tmp_path / "run", prompts=["x", "y"])
    log = (run / "log.jsonl").read_text("utf-8") # step 150 becomes the best
    for n in range(2):
        log = log.replace(f"[10, 12, {15.0 + n}, 40]", f"[10, 12, {25.0 + n}, 40]")
    (run / "log.jsonl").write_text(log, "utf-8")
    draw_page(run)
    tab = view(run / "index.html")

    def shown():
        tiles = [tab.locator(f"img[data-name='{name}']").first.get_attribute("src") for name in ("LoRA, best", "LoRA")]
        return [int(re.search(r"step_(\d+)", src)[1]) for src in tiles]
    assert shown() == [150, 200]
    tab.locator(".verdict", has_text="mean PSNR:").get_by_text("step 150", exact=True).click()
    assert shown() == [150, 150]
    for button, step in (("previous", 100), ("previous", 50), ("next", 100)):
        tab.locator("main").get_by_label(f"{button} step").click()
        assert shown() == [150, step]
    assert tab.locator("main .marks > *").count() == 4
    places = {title: mark.evaluate("mark => mark.getBoundingClientRect().left + mark.offsetWidth / 2")
              for mark in tab.locator("main .marks a").all() for title in [mark.get_attribute("title")]}
    assert places.keys() == {"best: step 150", "best: step 200"} # by PSNR, by loss
    bar = tab.locator("main input.step").bounding_box()
    assert abs(places["best: step 200"] - (bar["x"] + bar["width"] - 8)) < 2 # below the middle of the slider's thumb
    tab.locator("main .marks a").first.click()
    assert shown() == [150, 150]
    plot = tab.locator("figure.chart", has_text="PSNR").locator(".plot")
    assert plot.locator("path.peak.dot").get_attribute("d") == "M150,-25.5h0"
    plot.click(position=dict(x=plot.bounding_box()["width"] * 0.26, y=50)) # near step 50
    assert shown() == [150, 50] and -1 < tab.locator("#pictures").bounding_box()["y"] < 900

def test_whether_an_axis_begins_at_zero_does_not_hang_on_a_chart_s_title():
    lines = [("a", "line ink", np.array([1.0, 2.0]), np.array([100.0, 101.0]))]
    for title in ("Training loss", "PSNR", "Loss by noise", "anything"):
        boxes = [page.chart(title, lines, zero).find(".//svg").get("viewBox") for zero in (True, False)]
        heights = [float(box.split()[3]) for box in boxes]
        assert heights[0] > 100 and heights[1] < 2, title

def test_an_area_is_written_as_its_sides(tmp_path):
    draw_page(make_run(tmp_path / "run", target_pixels=[25600, 393216, "native"], control_pixels=1048576, seed=25600))
    cells = Reader(tmp_path / "run/index.html").texts["td"]
    assert {"160x160 393216 native", "1024x1024", "25600"} <= {*cells}

def test_the_wipe_shows_one_picture_left_and_another_one_right(tmp_path, view):
    """Looked at by pixels."""
    run = make_run(tmp_path / "run", prompts=["x", "y"])
    draw_page(run)
    tab = view(run / "index.html")

    def colours(*shares):
        wait_for_pictures(tab, ".stage img")
        shot = Image.open(io.BytesIO(tab.locator(".stage").screenshot())).convert("RGB")
        return [shot.getpixel((int(share * shot.width), shot.height // 2)) for share in shares]
    red, green = (255, 0, 0), (0, 128, 0)
    tab.locator("img[data-name=LoRA]").first.click()
    assert colours(0.1, 0.4, 0.6, 0.9) == [red, red, colour_of(200, 0), colour_of(200, 0)]
    box = tab.locator(".stage").bounding_box()
    assert box["height"] > 600 # full size
    tab.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 100)
    assert colours(0.6, 0.75, 0.85) == [red, red, colour_of(200, 0)]
    tab.mouse.move(5, 5)
    tab.locator("dialog .close").focus()
    tab.keyboard.press("ArrowLeft")
    assert colours(0.75, 0.85) == [red, colour_of(150, 0)]
    # the names of both pictures, with their numbers, and of the pair
    sides = [tab.locator(f"select.{side} option:checked").text_content() for side in ("left", "right")]
    assert sides == ["control \u00b7 10.0 dB", "LoRA \u00b7 step 150: 15.0 dB"]
    assert tab.locator("dialog .detail").text_content() == "val/000.png"
    tab.locator("select.left").select_option(label="target \u00b7 VAE alone 40.0 dB")
    assert colours(0.75, 0.85) == [green, colour_of(150, 0)]
    tab.locator("dialog .close").focus()
    tab.keyboard.press("ArrowDown") # the next picture
    assert tab.locator(".prompt").text_content() == "y"
    assert colours(0.4, 0.6) == [green, colour_of(150, 1)]
    tab.locator("input.wipe").focus()
    tab.keyboard.press("Home")
    assert colours(0.1) == [colour_of(150, 1)]
    tab.locator("input.exact").check()
    assert tab.locator(".stage").bounding_box()["width"] == 64
    tab.keyboard.press("Escape")
    assert not tab.locator("dialog").is_visible()

def test_a_watched_page_loads_itself_again_and_a_reader_keeps_the_place(tmp_path, view):
    """But not while a picture is open, nor while a text is selected, and no longer when the run is done."""
    run = make_run(tmp_path / "run", prompts=[f"edit {n}" for n in range(9)])
    file = run / "index.html"

    def write(mark):
        page.make_page([run], file, 0, watched=True)
        text = re.sub('data-reload="[0-9]+"', 'data-reload="1"', file.read_text("utf-8"))
        file.write_text(text.replace("<h1>run", f"<h1>{mark}"), "utf-8")

    def evaluate(what, script):
        while True: # a reload takes the page away from under a script
            try:
                return what.evaluate(script)
            except Exception as e:
                assert "context was destroyed" in str(e), e
    write("one")
    tab = view(file)
    until(lambda: re.fullmatch(r"updated \d+ s ago", tab.locator(".live").text_content()), seconds=10)
    tab.locator("summary").first.click()
    evaluate(tab.locator("main input.step"), "bar => { bar.value = 1; bar.dispatchEvent(new Event('input')) }")
    evaluate(tab, "scrollTo(0, 1500)")
    write("two")
    until(lambda: tab.locator("h1").text_content() == "two", seconds=10)
    until(lambda: evaluate(tab, "scrollY") == 1500, seconds=10)
    assert tab.locator("details").first.get_attribute("open") is not None
    assert tab.locator("details").last.get_attribute("open") is None
    assert tab.locator("main .bar output").text_content() == "100"
    tab.locator("img[data-name=LoRA]").nth(2).click()
    write("three")
    time.sleep(2.5)
    assert tab.locator("dialog").is_visible() and tab.locator("h1").text_content() == "two"
    tab.keyboard.press("Escape")
    until(lambda: tab.locator("h1").text_content() == "three", seconds=10)
    evaluate(tab, "getSelection().selectAllChildren(document.querySelector('pre'))")
    write("four")
    time.sleep(2.5)
    assert tab.locator("h1").text_content() == "three"
    (run / "DONE").touch()
    write("five")
    evaluate(tab, "getSelection().empty()")
    until(lambda: tab.locator("h1").text_content() == "five", seconds=10)
    assert tab.locator(".live").count() == 0
    file.write_text(file.read_text("utf-8").replace("five", "six"), "utf-8")
    time.sleep(2.5)
    assert tab.locator("h1").text_content() == "five"

def test_a_browser_asks_only_for_pictures_that_are_seen(tmp_path, view):
    """Of 40 validations with 24 pictures; also when the step changes. (Chromium loads some 2,000 pixels ahead.)"""
    run = make_run(tmp_path / "run", steps=400, every=10, prompts=[f"edit {n}" for n in range(24)])
    draw_page(run)
    tab = view(run / "index.html")
    asked = "performance.getEntriesByType('resource').filter(entry => entry.name.endsWith('.png')).length"
    loaded = "[...document.querySelectorAll('main img')].filter(image => image.complete).length"
    assert tab.locator("main img").count() == 24 * 4
    assert tab.evaluate(loaded) <= 6 * 4
    tab.keyboard.press("ArrowLeft")
    time.sleep(1)
    assert 0 < tab.evaluate(loaded) <= 6 * 4 and tab.evaluate(asked) <= 6 * 5

@pytest.mark.parametrize("scheme, colour", [("dark", "#161616"), ("dark", "#181818"), ("light", "#ffffff")])
def test_a_picture_of_the_pages_colour_has_a_hairline(tmp_path, view, scheme, colour):
    run = make_run(tmp_path / "run")
    Image.new("RGB", (64, 48), colour).save(run / "samples/target/val/000.png")
    draw_page(run)
    tab = view(run / "index.html", scheme=scheme)
    for open_it in (False, True): # in the page, and alone
        if open_it:
            tab.locator("img[data-name=target]").click()
        place = tab.locator(".stage" if open_it else "img[data-name=target]")
        place.scroll_into_view_if_needed()
        time.sleep(0.3)
        box = place.bounding_box()
        clip = dict(x=box["x"] + box["width"] * 0.9 - 4, y=box["y"] - 4, width=8, height=8)
        pixels = np.asarray(Image.open(io.BytesIO(tab.screenshot(clip=clip))).convert("L"), int)[:, 4]
        assert max(abs(pixels - pixels[0])) > 40, pixels

def test_the_numbers_under_the_pointer_are_those_of_the_log(tmp_path, view):
    run = make_run(tmp_path / "run")
    draw_page(run)
    tab = view(run / "index.html")
    plot = tab.locator(".plot").nth(2) # PSNR
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    said = tab.locator(".chart output").nth(2).text_content()
    assert re.fullmatch(r"step (99|100|101) . LoRA 10.0 . base 12.0 . VAE alone 40.0", said), said

def test_a_curve_is_drawn_at_the_marks_of_its_numbers(tmp_path, view):
    """The LoRA's PSNR ends at step 200 with 20 dB. Of many steps: a small learning rate; a loss that is far from 0."""
    run = make_run(tmp_path / "run")
    records = [r | dict(step=500 * r["step"], lr=1e-6 * r["step"], loss=0.95) for r in toy_log()]
    many = write_log(tmp_path / "many", [*records, dict(step=50_000, val_loss=1), dict(step=100_000, val_loss=0.9)])
    for folder, title, name, x, y in ((run, "PSNR", "LoRA", "200", "20"),
                                      (many, "Learning rate", "at each step", "100,000", "0.0002"),
                                      (many, "Validation loss", "held-out pairs", "100,000", "0.9")):
        draw_page(folder)
        chart = view(folder / "index.html").locator("figure.chart", has_text=title).first
        end = chart.locator(f"path[data-name='{name}']").first.evaluate("""path => {
            const end = path.getPointAtLength(path.getTotalLength()).matrixTransform(path.getScreenCTM())
            return [end.x, end.y]}""")
        across, up = [chart.locator(f".{axis}").get_by_text(text, exact=True).evaluate(
            "mark => [mark.getBoundingClientRect().left + mark.clientWidth / 2, mark.getBoundingClientRect().top]")
            for axis, text in (("x", x), ("y", y))]
        assert abs(end[0] - across[0]) < 1 and abs(end[1] - up[1]) < 1

def test_an_attack_does_nothing_in_a_browser_and_pictures_of_any_name_are_shown(tmp_path, view):
    run = make_run(tmp_path / ODD_NAME, prompts=ATTACKS, files=[f"{ODD_NAME}/{n} #.png" for n in range(len(ATTACKS))],
                   model=ATTACKS[0], data=[ATTACKS[1]])
    draw_page(run)
    tab = view(run / "index.html")
    tab.evaluate("document.querySelectorAll('img').forEach(image => { image.loading = 'eager' })")
    wait_for_pictures(tab, "main img")
    assert tab.locator("article h3").all_text_contents()[:len(ATTACKS)] == list(map(printable, ATTACKS))
    tab.locator("summary").first.click()
    for button in tab.locator(".tile button").all()[::4]:
        button.click()
        assert tab.locator(".prompt").text_content() in map(printable, ATTACKS)
        tab.keyboard.press("Escape")
    assert tab.evaluate("window.hit") is None and tab.locator("script").count() == 1

def test_a_phone_and_the_dark_are_provided_for(tmp_path, view):
    run = make_run(tmp_path / "run", prompts=ATTACKS, data=["x" * 200], model="y" * 100, controls=2)
    draw_page(run)
    grounds = []
    for scheme in ("light", "dark"):
        tab = view(run / "index.html", 390, scheme)
        assert tab.evaluate("document.documentElement.scrollWidth") == 390
        assert tab.locator("img:not([alt])").count() == 0
        grounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        tab.locator(".tile button").first.click()
        assert tab.evaluate("document.querySelector('dialog').scrollWidth") <= 390
    assert grounds == ["rgb(255, 255, 255)", "rgb(22, 22, 22)"]

def test_a_run_of_100_000_steps_opens_in_two_seconds(tmp_path, view):
    """With 24 pictures at 20 validations. Writing the page takes some seconds, nearly all for the log's JSON."""
    run = make_run(tmp_path / "run", steps=100_000, every=5_000, prompts=[f"edit {n}" for n in range(24)])
    begin = time.process_time()
    draw_page(run)
    seconds, size = time.process_time() - begin, (run / "index.html").stat().st_size
    tab = view(run / "index.html")
    opened = tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000")
    print(f"written in {seconds:.1f} s, {size / 1000:.0f} kB, opened in {opened:.2f} s")
    assert opened < 2 and size < 600_000 and seconds < 30
