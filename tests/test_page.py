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
import time
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from tests.harness import Reader, add_item, is_one_line, run_script, until
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
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, [first, *records])) + "\n")
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

# ---- without a browser -----------------------------------------------------------------------------------------------

def test_the_hardest_sample_is_found_whatever_its_timesteps(tmp_path):
    run = write_log(tmp_path / "run", toy_log())
    result = draw_page(run, "--hardest", 8)
    rows = [line.split() for line in result.out.splitlines() if "seen" in line]
    assert len(rows) == 8 and rows[0][1] == "3" and float(rows[0][0]) > 1.3 * float(rows[1][0])
    assert sum(int(row[3]) for row in rows) == 200 # the second half
    assert re.findall(r"(\d): [\d.]+ times the mean loss", (run / "index.html").read_text())[0] == "3"

def test_what_train_writes_is_shown_and_its_command_continues_it(tmp_path, small, monkeypatch):
    """Also while the run is at work: the last line may be half a line. The commands are for the folder in which the
    page was made; no path of the disk is in the page, for whoever gets it."""
    run = tmp_path / "it's a run"
    flags = [*small.flags, "--val_data", small.folder / "data", "--sample_every", 2, "--max_steps", 3, "--out_dir", run,
             "--lora_args", "use_rslora=true", "init_lora_weights=gaussian", "--offload", "all"]
    assert run_script("train.py", *flags).status == 0
    with open(run / "log.jsonl", "a") as f:
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
    result = run_script(*again[1:])
    assert result.status == 0 and "already done after 3 steps" in result.out, result.err
    lora = next(picture for picture in read.pictures if picture["data-name"] == "LoRA")
    assert json.loads(lora["data-at"]) == {str(n): f"samples/step_{n:06d}/data/0.png" for n in (2, 3)}
    assert [picture["data-name"] for picture in read.pictures[:4]] == ["control", "base", "LoRA", "target"]
    assert "add a red border" in read.texts["h3"]
    for made in (lambda: draw_page(run), lambda: page.make_page([run], run / "index.html", 6)):
        made()
        assert str(root) not in (run / "index.html").read_text()

@pytest.mark.parametrize("text, named", [(None, "cannot be read"), ('{"flags": 1}', "no steps"), ("", "no steps"),
                                         ('{}\n{"step"\n{"step": 2}', "log.jsonl:2"), ("[]\n{}", "log.jsonl:1"),
                                         ('{}\n{"step": "x", "loss": 1}\n{}', "log.jsonl:2")])
def test_a_folder_without_a_log_is_one_line(tmp_path, text, named):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    result = run_script("tools/page.py", tmp_path)
    assert result.status == 1 and is_one_line(result.errors[-1], tmp_path, named)
    assert run_script("tools/page.py", tmp_path / "none").status == 1

def test_a_smoothed_value_is_the_mean_of_the_last_ones_of_its_own_column(tmp_path):
    y = np.random.default_rng(0).random(1000)
    x, means = page.smooth(np.arange(1, 1001), y)
    assert np.array_equal(x, np.arange(50, 1001)) and np.allclose(means, np.convolve(y, np.ones(50) / 50, "valid"))
    assert [values.tolist() for values in page.smooth(np.array([7]), np.array([0.5]))] == [[7], [0.5]]
    records = toy_log()
    run = write_log(tmp_path / "run", records)
    draw_page(run)
    ends = ends_of(run / "index.html")
    for title, field in (("Loss", "loss"), ("Gradient norm", "grad_norm")):
        assert np.isclose(ends[title, "smoothed"], np.mean([r[field] for r in records[-10:]]), rtol=0.01), title
        assert np.isclose(ends[title, "each step"], records[-1][field], rtol=0.01), title
    assert ends["Learning rate", "at each step"] == 0.02 and ends["Tokens per second", "smoothed"] == 2000
    assert ends["Memory (GiB)", "at each step"] == 2

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
    assert any("--val_data DIR" in text for text in Reader(run / "index.html").texts["p"])
    draw_page(make_run(tmp_path / "other"))
    assert not any("--val_data DIR" in text for text in Reader(tmp_path / "other/index.html").texts["p"])

def test_a_resumed_log_counts_a_step_once_and_takes_its_last_flags(tmp_path):
    run = make_run(tmp_path / "run", lr=1)
    lines = (run / "log.jsonl").read_text().splitlines()
    later = [json.dumps(dict(flags=dict(lr=2))), *lines[-40:]]
    (run / "log.jsonl").write_text("\n".join(lines + later))
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
    log = (run / "log.jsonl").read_text().replace('"val": {', json.dumps(ATTACKS[0]) + ": {")
    names = re.sub(r'"samples": \["(.)", "(.)"\]', r'"samples": ["data/\1", "data/\2"]', log)
    (run / "log.jsonl").write_text(names)
    draw_page(run, "--hardest", len(ATTACKS))
    read = Reader(run / "index.html")
    kinds = [tag for tag, _ in read.tags]
    assert kinds.count("script") == 1 and "bold" not in read.texts["b"]
    assert read.texts["title"] == read.texts["h1"] == [ODD_NAME]
    assert not [a for _, attributes in read.tags for a in attributes if a.startswith("on")]
    headings = read.texts["h3"]
    assert headings[:len(ATTACKS)] == ATTACKS
    assert sorted(set(headings[len(ATTACKS):2 * len(ATTACKS)])) == sorted(a.replace("\u2028", " ") for a in ATTACKS)
    assert len([a for a in read.pictures if a["src"].startswith("data:image/jpeg")]) == 2 * len(ATTACKS)
    assert any(ATTACKS[0] in shlex.split(text)[-1] for text in read.texts["td"] if "a=" in text)

def test_every_link_is_a_file_also_from_another_folder(tmp_path):
    run = make_run(tmp_path / ODD_NAME, prompts=["x", "y"], files=["v/1 #?.png", ODD_NAME + ".png"], controls=2)
    (run / "samples/control_1/v/1 #?.png").unlink()
    (run / "samples").rename(tmp_path / "elsewhere")
    (run / "samples").symlink_to(tmp_path / "elsewhere")
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

def test_an_older_run_shows_its_contact_sheets(tmp_path):
    run = make_run(tmp_path / "run")
    records = [r | dict(pictures=[]) for r in page.read_log(run).validations]
    write_log(run, toy_log() + records)
    for step in (50, 100):
        Image.new("RGB", (100, 200)).save(run / f"samples/step_{step:06d}_my_val.png")
    draw_page(run)
    read = Reader(run / "index.html")
    at, = [json.loads(a["data-at"]) for a in read.pictures]
    assert at == {"50": "samples/step_000050_my_val.png", "100": "samples/step_000100_my_val.png"}
    assert "run: my_val" in read.texts["h3"]

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
    assert {("Loss", name) for name in ("a/run", "b/run")} <= ends_of(runs[0] / "index.html").keys()

def test_watching_writes_the_page_again_at_each_validation_until_the_end(tmp_path, monkeypatch):
    """A run that has only begun is waited for."""
    run = make_run(tmp_path / "run")
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text(lines[0])
    seen, left = [], lines[1:]

    def sleep(seconds):
        file = run / "index.html"
        seen.append(file.stat().st_mtime_ns if file.exists() else 0)
        with open(run / "log.jsonl", "a") as f:
            f.writelines(left[:10])
        del left[:10]
        if not left:
            (run / "DONE").touch()
    monkeypatch.setattr(time, "sleep", sleep)
    result = draw_page(run, "--watch")
    assert seen[0] == 0 and len(seen) == 21 and len(set(seen)) == 5 # none; 10 steps; three validations
    assert result.out.count("open it") == 5 and re.search(r"; finished \d", (run / "index.html").read_text())

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

    def view(file, width=1400, scheme="light"):
        tab = chromium.new_page(viewport=dict(width=width, height=900), color_scheme=scheme)
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
    assert lora_at(tab, 1) == ("samples/step_000200/val/001.png", "21.0 dB") # the newest one comes first
    tab.locator("main input.step").evaluate("bar => { bar.value = 1; bar.dispatchEvent(new Event('input')) }")
    assert lora_at(tab, 1) == ("samples/step_000100/val/001.png", "11.0 dB")
    assert tab.locator("main .bar output").text_content() == "100"
    assert tab.locator(".now").first.evaluate("line => line.style.left") == "50%"
    tab.keyboard.press("ArrowLeft")
    assert lora_at(tab) == ("samples/step_000050/val/000.png", "5.0 dB")
    tab.keyboard.press("ArrowLeft") # there is none before
    tab.keyboard.press("ArrowRight")
    assert lora_at(tab) == ("samples/step_000100/val/000.png", "10.0 dB")
    assert tab.locator("img[data-name=base]").first.get_attribute("src") == "samples/base/val/000.png"

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
    tab.locator("select.left").select_option(label="target")
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

def test_the_numbers_under_the_pointer_are_those_of_the_log(tmp_path, view):
    run = make_run(tmp_path / "run")
    draw_page(run)
    tab = view(run / "index.html")
    plot = tab.locator(".plot").nth(1) # the first PSNR
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    said = tab.locator(".chart output").nth(1).text_content()
    assert re.fullmatch(r"step (99|100|101) . LoRA 10.0 . base 12.0 . VAE alone 40.0", said), said

def test_a_curve_is_drawn_at_the_marks_of_its_numbers(tmp_path, view):
    """The LoRA's PSNR ends at step 200 with 20 dB. Of many steps: a small learning rate; a loss that is far from 0."""
    run = make_run(tmp_path / "run")
    records = [r | dict(step=500 * r["step"], lr=1e-6 * r["step"], loss=0.95) for r in toy_log()]
    many = write_log(tmp_path / "many", [*records, dict(step=50_000, val_loss=1), dict(step=100_000, val_loss=0.9)])
    for folder, title, name, x, y in ((run, "PSNR", "LoRA", "200", "20"),
                                      (many, "Learning rate", "at each step", "100,000", "0.0002"),
                                      (many, "Loss", "validation", "100,000", "0.9")):
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
    assert tab.locator("article h3").all_text_contents()[:len(ATTACKS)] == ATTACKS
    for button in tab.locator(".tile button").all()[::4]:
        button.click()
        assert tab.locator(".prompt").text_content() in ATTACKS
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
    begin = time.monotonic()
    draw_page(run)
    seconds, size = time.monotonic() - begin, (run / "index.html").stat().st_size
    tab = view(run / "index.html")
    opened = tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000")
    print(f"written in {seconds:.1f} s, {size / 1000:.0f} kB, opened in {opened:.2f} s")
    assert opened < 2 and size < 600_000 and seconds < 30
