"""
tools/page.py: what is in a log is on the page, whatever texts and names come in; in a browser its slider, its wipe and
its keys work. The browser is Chromium (apt install chromium) with playwright; without them those tests are skipped.
"""
import html
import io
import json
import os
import re
import shutil
import time
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from common import printable
from training import best_step, run_folder
from tests.fuzz import fuzz
from tests.harness import Reader, add_item, is_one_line, run_script, until, within, works
from tools import page

ATTACKS = ["<script>window.hit = 1</script>", "</script><script>window.hit = 1</script>", "a\u2028b <b>bold</b>",
           '"><img src=x onerror="window.hit = 1">', "'); window.hit = 1; ('", "<!--body--> <!--title--> &lt;",
           "\u628a\u5929\u7a7a\u53d8\u6210\u591c\u665a", "\u062d\u0648\u0651\u0644 {x} ${window.hit = 1} \\",
           "a\x1b[2J\x07\x9b31m\u202e\r\nerror: planted\x85"] # which would move a terminal's cursor, too
ODD_NAME = "a b'c\"d#e%41?&lt;<i>\u732b"

# ---- runs that train.py could have written ---------------------------------------------------------------------------

def write_log(folder, records, **flags):
    folder.mkdir(exist_ok=True, parents=True)
    first = dict(flags=flags, torch="2.13.0", commit="abc", started=1.0)
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, [first, *records])) + "\n", "utf-8")
    return folder

def toy_log(steps=200):
    """Steps whose losses are between 1 and 10."""
    return [dict(step=n + 1, loss=10 ** loss) for n, loss in enumerate(np.random.default_rng(0).random(steps))]

def validation(step, loss=1, pictures=(), **more):
    return dict(step=step, val_loss=loss, val_key="a", pairs=8, pictures=list(pictures), psnr={}) | more

def colour_of(step, n):
    """Of the picture that the LoRA draws: another one at each step, and for each file."""
    return step % 256, 40 * n % 256, 200

def make_run(folder, steps=200, every=50, prompts=("add a border",), files=None, controls=1, **flags):
    """A run whose control is red, its base gray, its target green, and its LoRA's pictures colour_of."""
    files = files or [f"val/{n:03}.png" for n in range(len(prompts))]
    records = toy_log(steps)

    def draw(place, file, colour):
        path = folder / "samples" / place / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48), colour).save(path)
    for file in files:
        for place, colour in dict(base="gray", target="green", control="red", control_1="yellow").items():
            draw(place, file, colour)
    for step in range(every, steps + 1, every):
        shown = []
        for n, (file, prompt) in enumerate(zip(files, prompts)):
            draw(f"step_{step:06d}", file, colour_of(step, n))
            shown.append(dict(file=file, prompt=prompt, controls=controls, psnr=[10, 12, step / 10 + n, 40]))
        records.append(validation(step, 1 / step, shown))
    return write_log(folder, sorted(records, key=lambda r: r["step"]), max_steps=steps, **flags)

def read_page(run, *flags, file="index.html"):
    """Draws the page of a run, which has to succeed -> Reader, with the script's result and the headline's lines."""
    result = works("tools/page.py", run, *flags)
    read = Reader(run / file)
    read.result, read.text = result, (run / file).read_text("utf-8")
    read.verdicts = list(map(html.unescape, re.findall('<p class="verdict">(.*?)</p>', read.text)))
    return read

def refuse(run, *flags):
    """-> the one line with which the page of a folder is refused."""
    result = run_script("tools/page.py", run, *flags)
    assert result.status == 1 and is_one_line(*result.errors), result.err
    return result.errors[0]

def add_lines(run, *records):
    with open(run / "log.jsonl", "a", encoding="utf-8") as f:
        f.writelines(json.dumps(record) + "\n" for record in records)

# ---- without a browser -----------------------------------------------------------------------------------------------

def test_what_train_writes_is_shown(tmp_path, small):
    """Also while the run is at work: the last line may be half a line, which is no reason to warn. No path of the disk
    is in the page, for whoever gets it."""
    run = tmp_path / "it's a run"
    works("train.py", *small.flags, "--val_data", small.folder / "data", "--sample_every", 2,
          "--max_steps", 3, "--out_dir", run, "--lora_args", "use_rslora=true")
    with open(run / "log.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step": 4, "lo')
    read = read_page(run)
    assert read.result.out == f"{run / 'index.html'}: open it in a browser\n" and not read.result.err
    lora = next(picture for picture in read.pictures if picture["data-name"] == "LoRA")
    assert json.loads(lora["data-at"]) == {str(n): f"samples/step_{n:06d}/data/0.png" for n in (2, 3)}
    assert "add a red border" in read.texts["h3"] and any("step 3 of 3; finished" in text for text in read.texts["p"])
    given, others = read.text.split("<details>")
    assert {"--max_steps3", "--lora_argsuse_rslora=True"} <= {*read.texts["tr"]}
    assert "--max_steps" in given and "--lora_dropout" in others and "--lora_dropout" not in given
    assert str(tmp_path) not in read.text and str(small.folder) not in read.text

@pytest.mark.parametrize("text", [None, "", '{"flags": 1}', "[]\n3", '"val_loss"', "\xff"])
def test_a_folder_without_a_log_of_ours_is_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text, encoding="latin-1")
    assert str(tmp_path) in refuse(tmp_path) and not (tmp_path / "index.html").exists()

def test_of_a_folder_that_holds_runs_the_newest_one_is_named_and_none_is_waited_for(tmp_path):
    for n in (0, 1):
        write_log(tmp_path / f"out/tiny-00{n}", toy_log(20))
        os.utime(tmp_path / f"out/tiny-00{n}/log.jsonl", (n, n))
    assert f"give {tmp_path}/out/tiny-001" in refuse(tmp_path / "out", "--watch")

@pytest.mark.parametrize("line", [
    "[1, 2]", "{", '{"step": "x", "loss": 1}', '{"step": 1, "loss": "x"}', '{"step": -1, "loss": 1}',
    '{"step": 2, "val_loss": 1}', '{"flags": 3}', '{"command": 3}', '{"x": ' + 300 * "[" + 300 * "]" + "}",
    '{"x": ' + 90_000 * "["], ids=range(10))
def test_a_line_that_is_not_ours_is_skipped_and_a_line_says_so(tmp_path, line):
    """(Damaged validations: test_best_step.py.)"""
    run = make_run(tmp_path / "run")
    log = (run / "log.jsonl").read_text("utf-8")
    before = read_page(run).text
    (run / "log.jsonl").write_text(log.replace("\n", f"\n{line}\n", 1), "utf-8")
    read = read_page(run)
    assert read.result.err == f"warning: {run / 'log.jsonl'}: line 2 is not train.py's; such lines are skipped\n"
    assert read.text.partition("<h2>")[2] == before.partition("<h2>")[2] # above it stands the time

def test_what_is_not_there_yet_has_a_sentence_and_no_chart(tmp_path):
    """Before the first step; without held-out pairs; after one validation, of which a chart would be a dot."""
    def page_of(folder):
        read = read_page(folder)
        return " ".join(read.texts["p"]), read.texts.get("strong", []), "data-steps=" in read.text, read.text
    said, charts, slider, _ = page_of(write_log(tmp_path / "a", [], max_steps=500, val_data=["photos_val"]))
    assert "no step is done yet" in said and "There are none yet" in said and not charts and not slider
    said, charts, slider, _ = page_of(write_log(tmp_path / "b", toy_log()))
    assert "none yet" not in said and "--val_data DIR" in said and charts == ["Training loss"]
    said, charts, slider, text = page_of(make_run(tmp_path / "c", steps=470, every=470))
    assert "more with --sample_every N" in said and "--val_data DIR" not in said and len(charts) == 1 and not slider
    assert "Too few held-out pairs to tell steps apart: 1" in said
    marks = re.findall(r'<span class="x"[^>]*>([^<]*)', text)
    assert marks == ["0", "200", "470"] # the last step has a mark of its own, 400 is too near

@pytest.mark.parametrize("steps", [2, 61, 2000])
def test_the_mean_of_the_loss_lies_within_its_band(tmp_path, steps):
    """Also where the loss falls steeply at the start, which lifts a trailing mean above all steps."""
    losses = (0.05 + 2 * np.exp(-np.arange(steps) / 8)) * np.random.default_rng(0).uniform(0.8, 1.2, steps)
    text = read_page(write_log(tmp_path, [dict(step=n + 1, loss=loss) for n, loss in enumerate(losses)])).text
    paths = re.findall(r'data-name="[a-z]*" d="M([^"]*)', text)
    band, line = [np.array([point.split(",") for point in d.split()], float) * (1, -1) for d in paths]
    lower, upper = band[:len(line)], band[len(line):][::-1]
    assert (lower[:, 0] == line[:, 0]).all() and (upper[:, 0] == line[:, 0]).all()
    assert (lower[:, 1] <= line[:, 1] + 1e-6).all() and (line[:, 1] <= upper[:, 1] + 1e-6).all()
    assert np.isclose([lower[:, 1].min(), upper[:, 1].max()], [losses.min(), losses.max()], rtol=1e-5).all()
    size = -(-steps // page.COLUMNS) # all points are of as many steps: else the band would become a line in mid-chart
    assert len(line) == -(-steps // size) and np.isclose(line[0, 1], losses[:size].mean(), rtol=1e-5)
    assert line[0, 0] == size and line[-1, 0] == steps
    said = re.search(r'"Training loss: mean ends at ([\d.e-]+)"', text)[1] # for whoever does not see the chart
    assert np.isclose(float(said), line[-1, 1], rtol=0.01)

def test_the_headline_names_the_best_steps_and_those_with_nan(tmp_path):
    """The mean PSNR is over all pictures. A validation of NaN is in words, whatever the names of its pictures, and no
    point of a curve."""
    records = []
    for step, loss, psnrs in ((10, 0.3, [20, 20, 20, 18]), (20, 0.4, [12, 12, 12, 30])):
        shown = [dict(file=f"{n}.png", prompt="x", controls=1, psnr=[9, 9, x, 40]) for n, x in enumerate(psnrs)]
        records.append(validation(step, loss, shown))
    records.append(validation(30, float("nan"), not_finite=["lora of " + ATTACKS[0], "base of a/\ud800.png"]))
    read = read_page(write_log(tmp_path, records))
    assert read.verdicts == [
        "Mean PSNR to the target: 9.0 \u2192 16.5 dB (base \u2192 LoRA; VAE alone 40.0, input 9.0)",
        "Best by validation loss: step 10 (0.3000; the last, step 30, has NaN or Inf)",
        "Best by mean PSNR: step 10 (19.5 dB; the last, step 20, has 16.5 dB)",
        "Steps at which NaN or Inf was computed: 30"]
    assert ATTACKS[0] not in read.text and ">nan" not in read.text and "held-out pairs ends at 0.4" in read.text

def test_what_matters_comes_first_and_six_pictures_are_open(tmp_path):
    read = read_page(make_run(tmp_path / "run", prompts=[f"edit {n}" for n in range(24)]))
    assert read.texts["h2"] == read.texts["a"] == ["Validation pictures", "Curves", "Flags"]
    assert read.texts["strong"] == ["Training loss", "Validation loss", "PSNR to the target (dB)"]
    links = [a["href"] for tag, a in read.tags if tag == "a"]
    assert links == [f"#{a['id']}" for tag, a in read.tags if tag == "section"]
    assert read.text.split("<details>")[0].count('class="card"') == 6 and "18 more pictures" in read.texts["summary"]

def test_a_resumed_log_has_its_last_flags_and_an_earlier_set_of_validations_is_left_out(tmp_path):
    """Of an earlier --val_data the pictures are no longer in samples/, and its numbers are not compared."""
    run = make_run(tmp_path / "run", lr=1)
    shown = dict(file="other/0.png", prompt="z", controls=1, psnr=[1, 2, 3, 4])
    add_lines(run, dict(flags=dict(lr=2)), validation(250, 0.5, [shown], val_key="b"))
    read = read_page(run)
    assert "--lr2" in read.texts["tr"] and "--lr1" not in read.texts["tr"]
    assert read.texts["h3"] == ["z"] and "validation loss: step 250" in read.verdicts[1]
    assert any("Not compared and not shown: 4 earlier validations" in text for text in read.texts["p"])

def test_a_text_stays_a_text(tmp_path):
    """Captions, file names, flags, versions. Whoever forgets to escape one makes tags of it."""
    run = make_run(tmp_path / ODD_NAME, prompts=ATTACKS, files=[f"{ODD_NAME}/{n} #.png" for n in range(len(ATTACKS))],
                   data=ATTACKS[2:], lora_args=[["a", ATTACKS[0]]], model=ATTACKS[1], target_pixels=[25600, 393216])
    add_lines(run, {f"torch{ATTACKS[0]}": ATTACKS[1]}, dict(command=["train.py", "--data", ATTACKS[0]]))
    read = read_page(run)
    assert [tag for tag, _ in read.tags].count("script") == 1 and "bold" not in read.texts["b"]
    assert read.texts["title"] == read.texts["h1"] == [ODD_NAME]
    assert read.texts["h3"] == list(map(printable, ATTACKS))
    # no link but those to the page's own chapters, no picture but the run's
    assert not [a for _, attributes in read.tags for a in attributes if a.startswith("on")]
    assert all(a["href"].startswith("#") for tag, a in read.tags if tag == "a")
    assert all(picture["src"].startswith("samples/") for picture in read.pictures)
    assert f"torch{ATTACKS[0]}" in read.texts["th"]
    assert {f"a={ATTACKS[0]}", "160x160 393216"} <= {*read.texts["td"]} # an area is written as its sides

def test_every_link_is_a_file_also_from_another_folder(tmp_path):
    """One control and the pictures of one step are deleted, and no stop of the slider leads to that step."""
    run = make_run(tmp_path / ODD_NAME, prompts=["x", "y"], files=["v/1 #?.png", ODD_NAME + ".png"], controls=2)
    (run / "samples/control_1/v/1 #?.png").unlink()
    shutil.rmtree(run / "samples/step_000050")
    (run / "samples").rename(run / "elsewhere")
    (run / "samples").symlink_to(run / "elsewhere")
    for out in (run / "index.html", tmp_path / "pages #1/both.html"):
        read = read_page(run, "--out", out, file=out)
        sources = [picture["data-at"] for picture in read.pictures]
        assert len(sources) == 9 # of 2 pictures with control, control 2, base, LoRA, target; one is gone
        links = [link for at in sources for link in json.loads(at).values()]
        assert len(set(links)) == 7 + 2 * 3 and not [link for link in links if re.search(r"[ '\"#?<]", link)]
        assert all((out.parent / unquote(link)).is_file() and "elsewhere" not in link for link in links)
    assert "[100, 150, 200]" in [a["data-steps"] for _, a in read.tags if "data-steps" in a]

def test_watching_writes_the_page_again_as_the_log_grows_until_the_end(tmp_path, monkeypatch):
    """A folder without a log is waited for. The terminal tells it when it begins and when it ends."""
    run = make_run(tmp_path / "run")
    file, left, seen = run / "index.html", (run / "log.jsonl").read_text("utf-8").splitlines(keepends=True), []
    (run / "log.jsonl").unlink()

    def sleep(seconds):
        seen.append(file.stat().st_mtime_ns if file.exists() else 0)
        assert not file.exists() or "data-reload" in file.read_text("utf-8")
        if len(seen) % 2: # half of the time there is nothing new
            with open(run / "log.jsonl", "a", encoding="utf-8") as f:
                f.writelines(left[:50])
            del left[:50]
        elif not left:
            (run / "DONE").touch()
    monkeypatch.setattr(time, "sleep", sleep)
    read = read_page(run, "--watch")
    assert seen[0] == 0 and len(seen) == 10 and len(set(seen)) == 6
    assert read.result.out.count("open it") == 2 and re.search(r"; finished \d", read.text)
    assert "data-reload" not in read.text and "data-made" not in read.text # it is final

# ---- a run from a stranger -------------------------------------------------------------------------------------------

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
    assert all(Image.open(folder / name.format(private=private)).size for folder in (run / "samples").iterdir())
    read = read_page(run)
    assert len(read.pictures) == 4 and all("/val/0.png" in picture["src"] for picture in read.pictures)

def test_a_link_in_samples_is_shown_if_it_leads_to_a_place_there(tmp_path):
    """As the hub's snapshots have them. But samples/ itself may not lead to another place."""
    run = make_run(tmp_path / "run", steps=10, every=10)
    target = run / "samples/target/val/000.png"
    target.rename(target.with_name("1.png"))
    target.symlink_to("1.png")
    assert "samples/target/val/000.png" in [picture["src"] for picture in read_page(run).pictures]
    (run / "samples").rename(tmp_path / "private")
    (run / "samples").symlink_to(tmp_path / "private")
    assert not read_page(run).pictures

def test_a_log_that_is_a_link_is_not_followed_nor_a_page(tmp_path):
    """A DONE that leads elsewhere says nothing. A page replaces the link at its place, not the file behind that."""
    run, page_file = make_run(tmp_path / "run"), tmp_path / "page.html"
    (tmp_path / "DONE").touch()
    (run / "DONE").symlink_to(tmp_path / "DONE")
    before = read_page(run, "--out", page_file, file=page_file).text
    (run / "index.html").symlink_to(page_file)
    add_lines(run, validation(250))
    read_page(run)
    assert page_file.read_text("utf-8") == before and not (run / "index.html").is_symlink()
    assert "running or stopped" in before
    (run / "log.jsonl").rename(tmp_path / "log")
    (run / "log.jsonl").symlink_to(tmp_path / "log")
    assert f"{run / 'log.jsonl'}: a link" in refuse(run)

def test_fuzz_of_a_log(tmp_path, capsys):
    """The page is drawn of the other lines; --keep, the best step and --resume read the same log."""
    run = make_run(tmp_path / "run", steps=20, every=10, prompts=["x", "y"])
    records = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]

    def case(damaged):
        lines = damaged if isinstance(damaged, list) else [damaged]
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        validations = best_step.read_validations(run)
        best_step.describe(validations), best_step.steps_to_keep(validations), best_step.better_steps(validations)
        page.make_page(run, run / "index.html")
        run_folder.clean_folder(run, 10)
    fuzz("log", records, case, share=0.5, refuses=False)

def test_a_log_of_pictures_that_are_not_there_costs_no_more_than_its_size(tmp_path):
    """60 validations name 100 pictures each, with 100 controls: 600,000 places, none of which is asked for."""
    rows = [dict(file=f"val/{n}.png", prompt="x", controls=100, psnr=[1, 2, 3, 4]) for n in range(6000)]
    run = write_log(tmp_path / "run", [validation(n + 1, pictures=rows[100 * n:100 * n + 100]) for n in range(60)])
    with within(3):
        page.make_page(run, run / "index.html")
    assert not Reader(run / "index.html").pictures

def test_a_log_of_gigabytes_is_not_read(tmp_path, monkeypatch):
    os.truncate(write_log(tmp_path, []) / "log.jsonl", 2**31)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("read"))
    assert "over 1,073,741,824 bytes" in refuse(tmp_path)

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
        # (a page that loads itself again may break off what it loads)
        tab.on("requestfailed", lambda request: "ABORTED" in request.failure or complaints.append(request.url))
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

@pytest.mark.parametrize("validations", [1, 40])
def test_the_first_screen_shows_the_headline_and_a_picture(tmp_path, view, validations):
    """Without scrolling, also on a phone; and nothing is wider than the screen."""
    run = make_run(tmp_path / "photos", 400, 400 // validations, ["make it a snowy winter evening"] * 3,
                   model="Qwen/Qwen-Image-Edit-2509", data=["photos"])
    read_page(run)
    for width, height in ((1280, 800), (390, 844)):
        tab = view(run / "index.html", width, height=height)
        heading, *verdicts = [line.bounding_box() for line in tab.locator("h1, .verdict").all()]
        pictures = [image.bounding_box() for image in tab.locator("main .tile img").all()]
        assert heading["y"] > 0 and verdicts and max(box["y"] + box["height"] for box in verdicts) < pictures[0]["y"]
        assert any(box["height"] > 60 and box["y"] + box["height"] <= height for box in pictures)
        assert tab.evaluate("document.documentElement.scrollWidth") == width

def test_the_best_step_s_pictures_stand_beside_those_of_the_slider_s_step(tmp_path, view):
    """At first these are the last step's. Marks on the slider and the curves tell the best; the slider, its buttons,
    the arrow keys, a step's name or mark, and a click on a curve change the step."""
    run = make_run(tmp_path / "run", prompts=["x", "y"])
    log = (run / "log.jsonl").read_text("utf-8")
    (run / "log.jsonl").write_text(log.replace("[10, 12, 15.0, 40]", "[10, 12, 35.0, 40]"), "utf-8") # of step 150
    read_page(run)
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
    for key, step in (("ArrowLeft", 50), ("ArrowLeft", 50), ("ArrowRight", 100)): # there is none before 50
        tab.keyboard.press(key)
        assert shown() == [150, step]
    tab.locator("main input.step").fill("0")
    assert shown() == [150, 50] and tab.locator("main .bar output").text_content() == "50"
    assert tab.locator(".now").first.evaluate("line => line.style.left") == "25%"
    assert tab.locator(".tile", has=tab.locator("img[data-name=LoRA]")).nth(1).text_content() == "LoRAstep 50: 6.0 dB"
    marks, bar = tab.locator("main .marks a"), tab.locator("main input.step").bounding_box()
    assert [mark.get_attribute("title") for mark in marks.all()] == ["best: step 150", "best: step 200"] # by PSNR, loss
    middle = marks.last.evaluate("mark => mark.getBoundingClientRect().left + mark.offsetWidth / 2")
    assert abs(middle - (bar["x"] + bar["width"] - 8)) < 2 # below the middle of the slider's thumb
    marks.first.click()
    assert shown() == [150, 150]
    plot = tab.locator("figure.chart", has_text="PSNR").locator(".plot")
    assert plot.locator("path.peak.dot").get_attribute("d") == "M150,-25.5h0"
    plot.hover(position=dict(x=plot.bounding_box()["width"] * 0.5, y=50)) # the numbers under the pointer
    said = tab.locator(".chart output").nth(2).text_content()
    assert re.fullmatch(r"step (99|100|101) . LoRA 10.5 . base 12.0 . VAE alone 40.0", said), said
    plot.click(position=dict(x=plot.bounding_box()["width"] * 0.26, y=50)) # near step 50
    assert shown() == [150, 50] and -1 < tab.locator("#validation-pictures").bounding_box()["y"] < 900

def test_the_wipe_shows_one_picture_left_and_another_one_right(tmp_path, view):
    """Looked at by pixels."""
    run = make_run(tmp_path / "run", prompts=["x", "y"])
    read_page(run)
    tab = view(run / "index.html")
    red, green = (255, 0, 0), (0, 128, 0)

    def colours(*shares):
        wait_for_pictures(tab, ".stage img")
        shot = Image.open(io.BytesIO(tab.locator(".stage").screenshot())).convert("RGB")
        return [shot.getpixel((int(share * shot.width), shot.height // 2)) for share in shares]

    def press(place, key):
        tab.locator(place).focus()
        tab.keyboard.press(key)
    tab.locator("img[data-name=LoRA]").first.click()
    assert colours(0.1, 0.4, 0.6, 0.9) == [red, red, colour_of(200, 0), colour_of(200, 0)]
    box = tab.locator(".stage").bounding_box()
    assert box["height"] > 600 # full size
    tab.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 100)
    assert colours(0.6, 0.75, 0.85) == [red, red, colour_of(200, 0)]
    tab.mouse.move(5, 5)
    press("dialog .close", "ArrowLeft") # an earlier step
    sides = [tab.locator(f"select.{side} option:checked").text_content() for side in ("left", "right")]
    assert sides == ["control \u00b7 10.0 dB", "LoRA \u00b7 step 150: 15.0 dB"]
    tab.locator("select.left").select_option(label="target \u00b7 VAE alone 40.0 dB")
    assert colours(0.75, 0.85) == [green, colour_of(150, 0)]
    press("dialog .close", "ArrowDown") # the next picture
    assert tab.locator(".prompt").text_content() == "y" and colours(0.4, 0.6) == [green, colour_of(150, 1)]
    press("input.wipe", "Home")
    assert colours(0.1) == [colour_of(150, 1)]
    tab.locator("input.exact").check()
    assert tab.locator(".stage").bounding_box()["width"] == 64
    tab.keyboard.press("Escape")
    assert not tab.locator("dialog").is_visible()

def test_a_watched_page_loads_itself_again_and_a_reader_keeps_the_place(tmp_path, view):
    """But not while a picture is open, nor while a text is selected, and no longer when the run is done."""
    run = make_run(tmp_path / "run", prompts=[f"edit {n}" for n in range(9)])
    file = run / "index.html"

    def write(title):
        page.make_page(run, file, watched=True)
        text = re.sub('data-reload="[0-9]+"', 'data-reload="1"', file.read_text("utf-8"))
        file.write_text(text.replace("<h1>run", f"<h1>{title}"), "utf-8")

    def evaluate(script):
        while True: # a reload takes the page away from under a script
            try:
                return tab.evaluate(script)
            except Exception as e:
                assert "context was destroyed" in str(e), e

    def becomes(place, text):
        until(lambda: re.fullmatch(text, tab.locator(place).text_content()), seconds=20)

    def stays(title):
        time.sleep(2.5)
        assert tab.locator("h1").text_content() == title
    write("one")
    tab = view(file)
    picture, dialog = tab.locator("img[data-name=LoRA]").nth(2), tab.locator("dialog[open]")
    until(lambda: dialog.count() or picture.click(), seconds=20) # (a reload may take the page away from under a click)
    evaluate("document.querySelector('details').open = true")
    write("two")
    stays("one")
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("Escape")
    evaluate("scrollTo(0, 700)")
    becomes("h1", "two")
    # it goes on loading itself, each second
    until(lambda: evaluate("scrollY") == 700, seconds=20)
    folds = "[...document.querySelectorAll('details')].map(fold => fold.open)"
    until(lambda: evaluate(folds) == [True, False], seconds=20)
    becomes("main .bar output", "100")
    becomes(".live", r"updated \d+ s ago")
    evaluate("getSelection().selectAllChildren(document.querySelector('h2'))")
    (run / "DONE").touch()
    write("three")
    stays("two")
    evaluate("getSelection().empty()")
    becomes("h1", "three")
    assert tab.locator(".live").count() == 0

def test_a_curve_is_drawn_at_the_marks_of_its_numbers(tmp_path, view):
    """Of many steps, with a loss that is far from 0."""
    read_page(write_log(tmp_path, [validation(50_000), validation(100_000, 0.9)]))
    chart = view(tmp_path / "index.html").locator("figure.chart", has_text="Validation loss")
    end = chart.locator("path[data-name='held-out pairs']").first.evaluate("""path => {
        const end = path.getPointAtLength(path.getTotalLength()).matrixTransform(path.getScreenCTM())
        return [end.x, end.y]}""")
    across, up = [chart.locator(f".{axis}").get_by_text(text, exact=True).evaluate(
        "mark => [mark.getBoundingClientRect().left + mark.clientWidth / 2, mark.getBoundingClientRect().top]")
        for axis, text in (("x", "100,000"), ("y", "0.9"))]
    assert abs(end[0] - across[0]) < 1 and abs(end[1] - up[1]) < 1

@pytest.mark.parametrize("scheme, ground", [("light", "rgb(255, 255, 255)"), ("dark", "rgb(22, 22, 22)")])
def test_an_attack_does_nothing_in_a_browser_also_on_a_phone_and_in_the_dark(tmp_path, view, scheme, ground):
    """Pictures of any name are shown, with a hairline around them, as one may have the page's colour."""
    run = make_run(tmp_path / ODD_NAME, prompts=ATTACKS, files=[f"{ODD_NAME}/{n} #.png" for n in range(len(ATTACKS))],
                   model="y" * 100, data=[ATTACKS[1], "x" * 200], controls=2)
    read_page(run)
    tab = view(run / "index.html", 390, scheme)
    tab.evaluate("document.querySelectorAll('img').forEach(image => { image.loading = 'eager' })")
    wait_for_pictures(tab, "main img")
    assert tab.locator("article h3").all_text_contents() == list(map(printable, ATTACKS))
    tab.locator("summary").first.click()
    for button in tab.locator(".tile button").all()[::5]:
        button.click()
        assert tab.locator(".prompt").text_content() in map(printable, ATTACKS)
        assert tab.evaluate("document.querySelector('dialog').scrollWidth") <= 390
        tab.keyboard.press("Escape")
    assert tab.evaluate("window.hit") is None and tab.locator("script").count() == 1
    assert tab.evaluate("document.documentElement.scrollWidth") == 390 and tab.locator("img:not([alt])").count() == 0
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    for picture in (".tile img", ".stage"):
        assert tab.locator(picture).first.evaluate("picture => getComputedStyle(picture).outlineStyle") == "solid"

def test_a_run_of_100_000_steps_opens_in_two_seconds(tmp_path, view):
    """With 24 pictures at 20 validations, of which the browser asks only for those that are seen, also when the step
    changes. (Chromium loads some 2,000 pixels ahead.)"""
    run = make_run(tmp_path / "run", steps=100_000, every=5_000, prompts=[f"edit {n}" for n in range(24)])
    assert len(read_page(run).text) < 600_000
    tab = view(run / "index.html")
    assert tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000") < 2
    loaded = "[...document.querySelectorAll('main img')].filter(image => image.complete).length"
    assert tab.locator("main img").count() == 24 * 4 and tab.evaluate(loaded) <= 6 * 4
    tab.keyboard.press("ArrowLeft")
    time.sleep(1)
    assert 0 < tab.evaluate(loaded) <= 6 * 4
