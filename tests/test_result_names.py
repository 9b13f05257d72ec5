"""
Which file a result of predict.py goes into: names that are chosen replace nothing, a result that is there is found
under any name, and of two processes at work none replaces what the other writes. And what a result says of itself.

$ python -m pytest -q tests/test_result_names.py    # 25 seconds
"""
import contextlib
import functools
import json
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import cache
import common
from library.cli import flag_types
from library.files import disk, tensor_files
from library.results import result_names
import predict
from tests.harness import (add_item, is_one_line, is_whole, kill, lora_file, lora_tensors, paint_picture, refused,
                           run_script, save, start_ranks, until)

# ---- predict.py as a command -----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with the photographs in/bee.png and in/cat.png, which keeps what was encoded."""
    folder = tmp_path_factory.mktemp("here")
    for n, name in enumerate(("bee", "cat")):
        save(paint_picture((64, 64), n), folder / f"in/{name}.png")
    return folder

def flags_of(here, out, lora=""):
    return ["--out_dir", out, "--lora", lora, "--num_inference_steps", 2, "--cache_dir", here / "cache"]

def draw(here, out, *flags, lora=""):
    """-> result of predict.py, which went well, with .drawn: names of the files that it has drawn."""
    result = run_script("predict.py", *flags_of(here, out, lora), *flags)
    assert result.status == 0, result.err
    result.drawn = [Path(path).name for path in re.findall(r"(\S+\.png): \d+x\d+ \|", result.out)]
    return result

def draw_list(here, out, *rows):
    """Likewise, a list of (picture, prompt)."""
    lines = [json.dumps(dict(image=str(here / f"in/{picture}.png"), prompt=prompt)) for picture, prompt in rows]
    jobs = here / "jobs.jsonl"
    jobs.write_text("\n".join(lines), "utf-8")
    return draw(here, out, "--jobs", jobs)

def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))

def pixels(path):
    return Image.open(path).tobytes()

def said(path):
    """What a result says of itself."""
    return json.loads(Image.open(path).text["sample"])

# ---- one rule --------------------------------------------------------------------------------------------------------

KINDS = dict(file=lambda here: ["--image", here / "in/bee.png"], folder=lambda here: ["--image", here / "in"],
             dataset=lambda here: ["--jobs", here / "data"])

@pytest.mark.parametrize("kind", KINDS)
def test_a_second_result_of_a_picture_is_kept_beside_the_first(here, tmp_path, kind):
    """For a FILE, a FOLDER and --jobs alike; both are found again, and nothing is left beside them."""
    add_item(here / "data", "bee")
    what = KINDS[kind](here)
    more = [["--seed", seed] if kind == "dataset" else ["--prompt", f"go {seed}"] for seed in (0, 1)]
    first = draw(here, tmp_path, *what, *more[0])
    assert first.drawn[0] == "bee.png"
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    assert draw(here, tmp_path, *what, *more[1]).drawn == [name.replace(".", "-2.") for name in first.drawn]
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())
    assert files(tmp_path) == sorted([*before, *[name.replace(".", "-2.") for name in before]])
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    for flags in more:
        assert "there already" in draw(here, tmp_path, *what, *flags).out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times

def test_a_folders_pictures_keep_their_subfolders(here, tmp_path):
    for name in ("in/a.png", "in/deep/a.png"):
        save(paint_picture(seed=len(name)), tmp_path / name)
    for prompt in ("go", "stop"):
        draw(here, tmp_path / "out", "--image", tmp_path / "in", "--prompt", prompt)
    assert files(tmp_path / "out") == ["a-2.png", "a.png", "deep", "deep/a-2.png", "deep/a.png", "sheet-2.png",
                                       "sheet.png"]

def test_what_is_no_result_of_ours_is_in_the_way(here, tmp_path):
    """A photograph, a folder, a link that leads nowhere."""
    save(paint_picture(seed=7), tmp_path / "bee.png")
    (tmp_path / "bee-2.png").mkdir()
    (tmp_path / "bee-3.png").symlink_to("nowhere")
    before = (tmp_path / "bee.png").read_bytes()
    assert draw(here, tmp_path, "--image", here / "in/bee.png", "--prompt", "go").drawn == ["bee-4.png"]
    assert (tmp_path / "bee.png").read_bytes() == before and len(files(tmp_path)) == 4

def test_a_picture_that_is_read_is_in_the_way_although_it_is_ours(here, tmp_path):
    draw(here, tmp_path, "--image", here / "in/bee.png", "--prompt", "go")
    before = (tmp_path / "bee.png").read_bytes()
    assert draw(here, tmp_path, "--image", tmp_path / "bee.png", "--prompt", "go").drawn == ["bee-2.png"]
    assert (tmp_path / "bee.png").read_bytes() == before

def test_a_result_is_found_under_any_name(here, tmp_path):
    """Also by flags that give it another end; and it keeps the name that a person gave it."""
    one = ["--image", here / "in/bee.png", "--prompt", "go"]
    draw(here, tmp_path, *one, "--seed", 0)
    assert draw(here, tmp_path, *one, "--seed", 0, 1).drawn == ["bee-s1.png"]
    assert draw(here, tmp_path, *one, "--seed", 1).drawn == []
    (tmp_path / "bee-s1.png").rename(tmp_path / "the best.png")
    assert draw(here, tmp_path, *one, "--seed", 0, 1).drawn == []
    assert files(tmp_path) == ["bee-sheet.png", "bee.png", "the best.png"]

def test_a_damaged_result_is_drawn_again_in_its_place(here, tmp_path):
    one = ["--image", here / "in/bee.png", "--prompt"]
    for prompt in ("go", "stop"):
        draw(here, tmp_path, *one, prompt)
    whole = {name: pixels(tmp_path / name) for name in files(tmp_path)}
    for name, prompt in (("bee.png", "go"), ("bee-2.png", "stop")):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-30])
        assert draw(here, tmp_path, *one, prompt).drawn == [name]
    assert {name: pixels(tmp_path / name) for name in files(tmp_path)} == whole

def test_where_all_is_there_nothing_is_written(here, tmp_path, monkeypatch):
    """A folder that may be read only serves, too."""
    flags = ["--image", here / "in", "--prompt", "go"]
    draw(here, tmp_path, *flags)
    monkeypatch.setattr(disk, "try_out", lambda *_: pytest.fail("wants to write"))
    monkeypatch.setattr(common, "write_file", lambda *_: pytest.fail("wants to write"))
    assert "2 of 2 pictures are there already" in draw(here, tmp_path, *flags).out

# ---- lines of --jobs -------------------------------------------------------------------------------------------------

BEE, CAT, BLUE, GREEN = ("bee", "red"), ("cat", "red"), ("bee", "blue"), ("bee", "green")
EDITS = { # a list of before, the same edited, how many are drawn, how many files there are then
    "a line on top": ([BEE, CAT], [GREEN, BEE, CAT], 1, 3),
    "a line on top, all of one picture": ([BEE, BLUE], [GREEN, BEE, BLUE], 1, 3),
    "a line removed": ([BEE, CAT, BLUE], [CAT, BLUE], 0, 3),
    "two of one picture swapped": ([BEE, BLUE], [BLUE, BEE], 0, 2),
    "a line edited": ([BEE, CAT], [BLUE, CAT], 1, 3),
    "reversed, and one more in the middle": ([BEE, CAT, BLUE], [BLUE, GREEN, CAT, BEE], 1, 4),
    "two equal lines": ([BEE, BEE], [BEE, CAT, BEE], 1, 3),
    "one more equal line": ([BEE], [BEE, BEE], 1, 2)}

@pytest.mark.parametrize("edit", EDITS)
def test_a_result_stays_whichever_line_asks_for_it_now(here, tmp_path, edit):
    """What was drawn is not drawn again, is not lost or changed, and keeps its name; each line has a file of its own.
    """
    before, after, drawn, count = EDITS[edit]
    draw_list(here, tmp_path, *before)
    first = {path: path.read_bytes() for path in tmp_path.glob("[0-9]*.png")}
    result = draw_list(here, tmp_path, *after)
    assert len(result.drawn) == drawn, result.out
    assert {path: path.read_bytes() for path in first} == first
    results = [(Path(about["controls"][0]).stem, about["prompt"]) for about in map(said, tmp_path.glob("[0-9]*.png"))]
    assert len(results) == count and all(results.count(row) >= after.count(row) for row in after)
    left = files(tmp_path)
    assert not draw_list(here, tmp_path, *after).drawn and files(tmp_path) == left
    assert not [name for name in left if name.startswith(".")]

def test_a_line_that_names_its_file_has_it_and_others_make_room(here, tmp_path):
    """Its own old picture is replaced; the name that another line would have is taken."""
    def call(prompt):
        rows = [dict(prompt="red"), dict(prompt=prompt, out="001-bee.png"), dict(prompt=prompt, out="sub/x.png")]
        jobs = tmp_path / "jobs.jsonl"
        jobs.write_text("\n".join(json.dumps(row | dict(image=str(here / "in/bee.png"))) for row in rows), "utf-8")
        return sorted(draw(here, tmp_path / "out", "--jobs", jobs).drawn)
    assert call("blue") == ["001-bee-2.png", "001-bee.png", "x.png"] and call("green") == ["001-bee.png", "x.png"]
    out = tmp_path / "out"
    assert [said(out / f"{name}.png")["prompt"] for name in ("001-bee", "sub/x", "001-bee-2")] == ["green", "green",
                                                                                                    "red"]
    assert files(out) == ["001-bee-2.png", "001-bee.png", "sheet-2.png", "sheet.png", "sub", "sub/x.png"]

def test_a_result_that_another_line_reads_stays_where_it_is(here, tmp_path):
    """A list may edit its own results."""
    draw_list(here, tmp_path, BEE)
    before = pixels(tmp_path / "001-bee.png")
    jobs = tmp_path / "jobs.jsonl"
    rows = [(tmp_path / "001-bee.png", "blue"), (here / "in/bee.png", "red"), (here / "in/bee.png", "green")]
    jobs.write_text("\n".join(json.dumps(dict(image=str(image), prompt=prompt)) for image, prompt in rows), "utf-8")
    result = draw(here, tmp_path, "--jobs", jobs)
    assert sorted(result.drawn) == ["001-001-bee.png", "003-bee.png"] and pixels(tmp_path / "001-bee.png") == before

# ---- choosing, without drawing ---------------------------------------------------------------------------------------

def flags(folder):
    return SimpleNamespace(out=None, out_dir=folder, jobs=Path("jobs.jsonl"), image=None)

def ask(folder, stem, key, **settings):
    """A picture as predict.plan_pictures returns it."""
    sample = SimpleNamespace(name=stem, settings=settings)
    return predict.Picture(sample, 1, (), 0, "result", key, {}, *result_names.wanted(sample, flags(folder), ""))

def find(folder, *pictures, inputs=(), finished=is_whole):
    """-> the places that are given."""
    return result_names.find_results(pictures, inputs, flags(folder), finished)[1]

def write(picture, given=()):
    """-> the name of its file."""
    return result_names.write_picture(picture, predict.png_of(paint_picture(), picture.key), given).name

def test_a_file_that_a_line_names_is_no_other_lines(tmp_path):
    """Although it holds what that one asks for; and it is left free, also in other letter case, for Windows and macOS.
    """
    predict.save_png(paint_picture(), tmp_path / "002-bee.png", "1")
    for key in ("1", "2"):
        own, other = ask(tmp_path, "001-bee", key, out="002-bee.png"), ask(tmp_path, "003-bee", "1")
        find(tmp_path, own, other)
        assert (own.path.name, own.done) == ("002-bee.png", key == "1")
        assert (other.path.name, other.done) == ("003-bee.png", False)
    chosen, own = ask(tmp_path, "a", "3"), ask(tmp_path, "b", "4", out="A.png")
    given = find(tmp_path, chosen, own)
    assert write(chosen, given) == "a-2.png" and write(own, given) == "A.png"

def test_a_name_that_is_given_twice_or_is_read_is_an_error(tmp_path):
    """By whatever path: through a link, through another folder, or in other letter case (where a disk takes both names
    for one file, as it does those of a hard link)."""
    ours = tmp_path / "ours.png"
    (tmp_path / "sub").mkdir()
    predict.save_png(paint_picture(), ours, "0")
    (tmp_path / "link.png").symlink_to(ours)
    (tmp_path / "folder").symlink_to(tmp_path)
    os.link(ours, tmp_path / "OURS.PNG")
    for inputs, *outs in ([[], "x.png", "x.png"], [[], "x.png", "sub/../x.png"], [[], "x.png", "folder/x.png"],
                          [[], "ours.png", "OURS.PNG"], [["ours.png"], "OURS.PNG"], [["ours.png"], "ours.png"],
                          [["link.png"], "link.png"], [["link.png"], "ours.png"], [["folder/ours.png"], "ours.png"]):
        with refused("jobs.jsonl", "would overwrite"):
            find(tmp_path, *[ask(tmp_path, "a", key, out=out) for key, out in zip("12", outs)],
                 inputs=[tmp_path / name for name in inputs])
    find(tmp_path, ask(tmp_path, "a", "1", out="x.png"), ask(tmp_path, "a", "2", out="X.png"), inputs=[ours])
    assert is_whole(ours, "0")

def test_a_name_is_reached_by_a_link_and_the_picture_behind_it_stays(tmp_path):
    ours = tmp_path / "other/ours.png"
    predict.save_png(paint_picture(), ours, "0")
    (tmp_path / "link.png").symlink_to(ours)
    own = ask(tmp_path, "a", "1", out="link.png")
    find(tmp_path, own)
    assert write(own) == "link.png" and is_whole(ours, "0") and is_whole(tmp_path / "link.png", "1")

def test_what_is_to_be_drawn_again_keeps_its_place_if_we_gave_it(tmp_path):
    """Under the number of any line, with -2, too; but not under a person's name, and not if it is read."""
    again = dict(finished=lambda path, key: False)
    for name, mine in (("001-bee", True), ("002-bee", True), ("007-bee-3", True), ("best", False), ("001-bees", False),
                       ("001-bee-s1", False), ("001-bee-x", False), ("001-cat", False)):
        path = tmp_path / name / f"{name}.png"
        predict.save_png(paint_picture(), path, "1")
        picture = ask(path.parent, "002-bee", "1")
        find(path.parent, picture, **again)
        assert picture.path == (path if mine else path.with_name("002-bee.png")) and not picture.done
        assert write(picture) == picture.path.name and len(files(path.parent)) == (1 if mine else 2)
    read = tmp_path / "001-bee/001-bee.png"
    before = read.read_bytes()
    picture = ask(read.parent, "001-bee", "1")
    find(read.parent, picture, inputs=[read], **again)
    assert write(picture) == "001-bee-2.png" and read.read_bytes() == before

def test_many_lines_move_at_once_and_no_file_stays_open(tmp_path):
    """A line on top of 300; the names of 3,000 more."""
    for n in range(1, 301):
        predict.save_png(Image.new("RGB", (8, 8)), tmp_path / f"{n:03}-bee.png", f"key {n}")
    moved = [ask(tmp_path, f"{n + 1:03}-bee", f"key {n}") for n in range(1, 301)]
    more = [ask(tmp_path, f"{n:03}-bee", f"key {n}") for n in [0, *range(1001, 4001)]]
    opened = len(os.listdir("/proc/self/fd"))
    find(tmp_path, *more, *moved)
    assert len(os.listdir("/proc/self/fd")) <= opened + 2
    assert [picture.path.name for picture in moved if picture.done] == [f"{n:03}-bee.png" for n in range(1, 301)]
    assert not any(picture.done for picture in more) and write(more[0]) == "000-bee.png"

def test_a_long_name_is_cut_for_its_number(tmp_path):
    picture = ask(tmp_path, "\u732b" * 83, "1") # 249 bytes, and .png
    find(tmp_path, picture)
    for n in range(1, 12):
        assert len(os.fsencode(write(picture))) <= 255 and len(files(tmp_path)) == n

def test_what_is_no_png_of_ours_has_no_key(tmp_path):
    predict.save_png(Image.new("RGB", (8, 8)), tmp_path / "ours.png", "the key")
    whole = (tmp_path / "ours.png").read_bytes()
    assert result_names.key_of(tmp_path / "ours.png") == "the key"
    os.mkfifo(tmp_path / "fifo.png")
    for size in range(60):
        (tmp_path / "cut.png").write_bytes(whole[:size])
        assert (result_names.key_of(tmp_path / "cut.png") or "") in "the key"
    save(paint_picture(), tmp_path / "photo.png")
    for name in ("fifo.png", "photo.png", "gone.png", "."):
        assert result_names.key_of(tmp_path / name) is None

# ---- sheets ----------------------------------------------------------------------------------------------------------

def test_a_sheet_replaces_an_older_one_only_with_all_its_pictures(here, tmp_path):
    """More seeds, one more picture: the same sheet. Others, a photograph or an older version's sheet stay."""
    image = ["--image", here / "in/bee.png", "--prompt", "go"]
    sheet = tmp_path / "bee-s1-sheet.png"
    draw(here, tmp_path, *image, "--seed", 1, 2)
    first = sheet.read_bytes()
    draw(here, tmp_path, *image, "--seed", 1, 2, 3)
    assert sheet.read_bytes() != first and len(list(tmp_path.glob("*sheet*"))) == 1
    first = sheet.read_bytes()
    assert "bee-s1-sheet-2.png: 2 of them" in draw(here, tmp_path, *image, "--seed", 1, 4).out
    assert sheet.read_bytes() == first
    for theirs in (lambda path: save(paint_picture(), path), lambda path: path.mkdir(),
                   lambda path: predict.save_png(paint_picture(), path)):
        folder = tmp_path / f"{len(files(tmp_path))}"
        folder.mkdir()
        theirs(folder / "sheet.png")
        assert "sheet-2.png: 2 of them" in draw(here, folder, "--image", here / "in", "--prompt", "go").out

def test_a_picture_called_sheet_and_the_sheet_are_two(here, tmp_path):
    for name in ("sheet", "other"):
        save(paint_picture(seed=len(name)), tmp_path / f"in/{name}.jpg")
    for prompt in ("go", "go", "stop"):
        draw(here, tmp_path / "out", "--image", tmp_path / "in", "--prompt", prompt)
    assert files(tmp_path / "out") == ["other-2.png", "other.png", "sheet-2.png", "sheet-3.png", "sheet-4.png",
                                       "sheet.png"]
    assert said(tmp_path / "out/sheet.png")["prompt"] == "go"

def test_a_sheet_that_is_read_is_not_replaced(tmp_path):
    pictures = [ask(tmp_path, "a", "1"), ask(tmp_path, "b", "2")]
    sheet = predict.png_of(paint_picture(), result_names.sheet_key(pictures))
    for inputs, name in (([], "sheet.png"), ([], "sheet.png"), (["sheet.png"], "sheet-2.png")):
        read = [tmp_path / one for one in inputs]
        assert result_names.write_sheet(sheet, pictures, read, flags(tmp_path)) == tmp_path / name

# ---- two processes ---------------------------------------------------------------------------------------------------

def waits_for(file):
    """For a child process: when it is about to encode, after it has looked at the folder, it waits for this file."""
    real = cache.encode_samples

    def encode_samples(*args, **kwargs):
        file.with_name(f"waits-{os.getpid()}").touch()
        until(file.exists)
        return real(*args, **kwargs)
    cache.encode_samples = encode_samples

@pytest.fixture
def slow(here, tmp_path, start):
    """-> draw(*flags), which starts predict.py, and returns when it waits for the file `go`."""
    def draw(*more):
        flags = [*flags_of(here, tmp_path / "out"), *more]
        process = start("predict.py", *flags, prelude=functools.partial(waits_for, tmp_path / "go"))
        until((tmp_path / f"waits-{process.pid}").exists)
        return process
    return draw

def test_two_processes_side_by_side_have_two_names_and_a_killed_one_leaves_nothing(here, tmp_path, slow):
    """Pictures and sheets."""
    out, go = tmp_path / "out", tmp_path / "go"
    flags = ["--image", here / "in/bee.png", "--prompt", "go"]
    first = slow(*flags, "--seed", 1, 2)
    killed = slow(*flags, "--seed", 4)
    assert draw(here, out, *flags, "--seed", 3).drawn == ["bee.png"]
    kill(killed)
    killed.wait()
    assert draw(here, out, *flags, "--seed", 5).drawn == ["bee-2.png"]
    # the same names as those of the first
    both = draw(here, out, *flags, "--seed", 1, 2, "--shift", 2)
    assert both.drawn == ["bee-s1.png", "bee-s2.png"] and "bee-s1-sheet.png: 2 of" in both.out
    before = {path: path.read_bytes() for path in out.iterdir()}
    go.touch()
    assert first.wait() == 0, first.output()
    assert {path: path.read_bytes() for path in before} == before
    assert files(out) == sorted([path.name for path in before] + ["bee-s1-2-sheet.png", "bee-s1-2.png",
                                                                  "bee-s2-2.png"])
    assert not draw(here, out, *flags, "--seed", 1, 2).drawn

def test_the_same_command_twice_at_once_draws_equal_pictures(here, tmp_path, slow):
    """Neither is in the other's way, whoever chooses the name, and later nothing is drawn again."""
    out, flags = tmp_path / "out", ["--image", here / "in", "--prompt", "go"]
    other = slow(*flags)
    assert draw(here, out, *flags).drawn == ["bee.png", "cat.png"]
    (tmp_path / "go").touch()
    assert other.wait() == 0, other.output()
    assert pixels(out / "bee.png") == pixels(out / "bee-2.png") and len(list(out.glob("*sheet*"))) == 1
    assert not draw(here, out, *flags).drawn and len(files(out)) == 5
    picture = ask(out, "a", "1", out="x.png")
    find(out, picture)
    assert [write(picture), write(picture)] == ["x.png"] * 2

def dies_before_it_links():
    """For a child process: SIGKILL at the moment when its picture would get its name."""
    os.link = lambda *_: os.kill(os.getpid(), 9)

def test_a_process_that_is_killed_while_it_writes_leaves_a_temporary_file(here, tmp_path, start):
    flags = ["--image", here / "in/bee.png", "--prompt", "go"]
    killed = start("predict.py", *flags_of(here, tmp_path), *flags, prelude=dies_before_it_links)
    assert killed.wait() == -9
    left, = files(tmp_path)
    assert left.startswith(".tmp-")
    assert draw(here, tmp_path, *flags).drawn == ["bee.png"] and files(tmp_path) == [left, "bee.png"]

def test_threads_that_write_at_once_get_a_name_each(tmp_path, monkeypatch):
    """All have seen that nothing is there, whichever call then makes the name."""
    written, barrier = [], threading.Barrier(8)

    def at_once(real):
        def wait(*paths):
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(5)
            barrier.abort() # it waits for the first call of each only
            return real(*paths)
        return wait
    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, at_once(getattr(os, name)))
    threads = [threading.Thread(target=lambda n: written.append(write(ask(tmp_path, "a", str(n)))), args=[n])
               for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(written) == ["a-2.png", "a-3.png", "a-4.png", "a-5.png", "a-6.png", "a-7.png", "a-8.png", "a.png"]
    assert {result_names.key_of(tmp_path / name) for name in written} == set("01234567")
    assert files(tmp_path) == sorted(written)

def finds_nothing():
    """For a child process: it fails if it looks for results."""
    result_names.find_results = None

def test_of_two_processes_of_one_call_the_first_looks_and_knows_all_names(here, tmp_path, start):
    """Each writes its own share, and the sheet shows all."""
    out = tmp_path / "out"
    draw_list(here, out, BEE)
    for name in ("001-cat", "003-bee"):
        save(paint_picture(), out / f"{name}.png")
    jobs = tmp_path / "jobs.jsonl"
    rows = [CAT, BEE, GREEN]
    jobs.write_text("\n".join(json.dumps(dict(image=str(here / f"in/{name}.png"), prompt=prompt))
                              for name, prompt in rows), encoding="utf-8")
    ranks = start_ranks(start, *flags_of(here, out), "--jobs", jobs, "--device", "cpu", script="predict.py",
                        preludes=[None, finds_nothing])
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output() for rank in ranks]
    assert files(out) == ["001-bee.png", "001-cat-2.png", "001-cat.png", "003-bee-2.png", "003-bee.png", "sheet.png"]
    assert "sheet.png: 3 of them" in ranks[0].output()

# ---- between planning and writing ------------------------------------------------------------------------------------

THEIRS = dict(photograph=lambda path: save(paint_picture(seed=9), path),
              result=lambda path: predict.save_png(paint_picture(seed=9), path, "f" * 32))

@pytest.mark.parametrize("given", [False, True], ids=["chosen", "given"])
@pytest.mark.parametrize("theirs", THEIRS)
@pytest.mark.parametrize("before", ["nothing", "ours"])
def test_what_has_come_meanwhile_is_not_replaced(tmp_path, theirs, before, given):
    """A name that we choose is another one then; one that the user has given is an error."""
    path = tmp_path / "bee.png"
    if before == "ours":
        predict.save_png(paint_picture(), path, "2" if given else "1")
    picture = ask(tmp_path, "bee", "1", **(dict(out="bee.png") if given else {}))
    find(tmp_path, picture, finished=lambda path, key: False)
    THEIRS[theirs](path)
    if given:
        with refused("bee.png", "was written by another process meanwhile"):
            write(picture)
    else:
        assert write(picture) == "bee-2.png"
    assert pixels(path) == paint_picture(seed=9).tobytes() and len(files(tmp_path)) == 2 - given

def test_a_given_name_that_another_process_has_written_is_one_line_and_stops_no_others(here, tmp_path, slow):
    """In the command: an old picture of ours there may be replaced, but not by both."""
    out = tmp_path / "out"
    flags = ["--image", here / "in/bee.png", "--prompt", "go", "--out", out / "x.png"]
    run = lambda *flags: run_script("predict.py", *flags_of(here, out)[2:], *flags)
    assert run(*flags).status == 0
    jobs = tmp_path / "jobs.jsonl"
    rows = [dict(prompt="red", out="x.png"), dict(prompt="blue")]
    jobs.write_text("\n".join(json.dumps(row | dict(image=str(here / "in/bee.png"))) for row in rows), "utf-8")
    other = slow("--jobs", jobs)
    assert run(*flags, "--seed", 1).status == 0
    (tmp_path / "go").touch()
    assert other.wait() == 1 and "x.png: was written by another process meanwhile; give" in other.output()
    assert said(out / "x.png")["seed"] == 1 and files(out) == ["002-bee.png", "x.png"]

def test_a_disk_without_hard_links_or_where_nothing_can_be_deleted_serves(tmp_path, monkeypatch):
    """The first makes a name by a check and a rename; on the second a temporary file stays."""
    def fails(*_, **__):
        raise PermissionError(1, "not permitted")
    save(paint_picture(seed=9), tmp_path / "a.png")
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fails)
        assert write(ask(tmp_path, "a", "1")) == "a-2.png" and len(files(tmp_path)) == 2
    monkeypatch.setattr(Path, "unlink", fails)
    assert write(ask(tmp_path, "a", "2")) == "a-3.png"
    assert pixels(tmp_path / "a.png") == paint_picture(seed=9).tobytes()

def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    """It is no name that is taken."""
    def full(*_):
        raise OSError(28, "No space left on device")
    predict.save_png(paint_picture(), tmp_path / "a.png", "1")
    picture = ask(tmp_path, "a", "1")
    find(tmp_path, picture, finished=lambda path, key: False)
    monkeypatch.setattr(os, "fsync", full)
    with refused("a.png", "No space left"):
        write(picture)
    assert files(tmp_path) == ["a.png"] and is_whole(tmp_path / "a.png", "1")

@pytest.mark.parametrize("mark", ["", "ours"])
def test_a_file_that_comes_while_another_is_written_is_judged_once_more(tmp_path, monkeypatch, mark):
    """By its first bytes, as those that were there before."""
    path = tmp_path / "x"
    for data in (b"theirs", b"ours"):
        path.unlink(missing_ok=True)
        monkeypatch.setattr(os, "fsync", lambda number: path.exists() or path.write_bytes(data))
        with contextlib.suppress(common.InputError):
            common.write_file(path, b"ours, new", mark.encode())
        monkeypatch.undo()
        assert path.read_bytes() == (b"theirs" if mark and data == b"theirs" else b"ours, new")
        assert files(tmp_path) == ["x"]

def test_convert_lora_replaces_nothing_that_has_come_meanwhile(tmp_path, monkeypatch):
    lora, out, real = lora_file(tmp_path, lora_tensors()), tmp_path / "out/x.safetensors", tensor_files.write_tensors

    def write_tensors(*args, **kwargs):
        out.parent.mkdir()
        out.write_bytes(b"theirs")
        real(*args, **kwargs)
    monkeypatch.setattr(tensor_files, "write_tensors", write_tensors)
    result = run_script("tools/convert_lora.py", lora, "--to", "diffusers", "--out", out)
    assert result.status == 1 and is_one_line(*result.errors, out, "already exists"), result.err
    assert out.read_bytes() == b"theirs" and files(out.parent) == [out.name]

# ---- what a result says of itself ------------------------------------------------------------------------------------

def test_a_result_says_its_own_prompt_seed_strength_and_line(here, tmp_path):
    """The key is still the first thing that it says, the command is there, too."""
    lora = lora_file(tmp_path, lora_tensors())
    rows = [dict(prompt="red"), {}, dict(prompt="it's \u96ea", negative_prompt="\u96e8", seed=3, true_cfg_scale=2,
                                         sigmas=[1, 0.5], out="x.png")]
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("\n".join(json.dumps(row | dict(image=str(here / "in/bee.png"))) if row else "" for row in rows),
                    "utf-8")
    draw(here, tmp_path / "out", "--jobs", jobs, "--scales", 0.5, 1, "--lora_scale", 2, lora=lora)
    about = said(tmp_path / "out/x-x0.5.png")
    want = dict(prompt="it's \u96ea", negative_prompt="\u96e8", seed=3, true_cfg_scale=2.0, sigmas=[1.0, 0.5],
                num_inference_steps=2, controls=[str(here / "in/bee.png")], line=f"{jobs}:3", lora_scale=[1.0])
    assert {name: about[name] for name in want} == want
    other = said(tmp_path / "out/001-bee-x1.png")
    assert (other["prompt"], other["seed"], other["line"], other["lora_scale"]) == ("red", 0, f"{jobs}:1", [2.0])
    text = Image.open(tmp_path / "out/x-x0.5.png").text
    assert list(text) == ["key", "code", "command", "sample"] and "--scales 0.5 1" in text["command"]

def test_a_path_that_is_no_text_can_be_said(here, tmp_path):
    picture = SimpleNamespace(sample=SimpleNamespace(prompts=["a\udce9"], controls=["in/caf\udce9.png"], settings={}),
                              strengths=(), line=2)
    predict.save_png(paint_picture(), tmp_path / "x.png", "key", {}, predict.about(picture, Path("caf\udce9.jsonl")))
    assert said(tmp_path / "x.png") == dict(prompt="a\udce9", controls=["in/caf\udce9.png"], line="caf\udce9.jsonl:2")

# ---- flags and fields ------------------------------------------------------------------------------------------------

def test_seeds_that_would_give_one_picture_are_refused(here, tmp_path):
    """Equal in their last 32 bits, which is all that torch takes."""
    for script in ("predict.py", "train.py", "tools/lean_train.py"):
        result = run_script(script, "--seed", 2**32)
        assert result.status == 2 and is_one_line(*result.errors, "--seed", "32 bits", "give 0 to 4294967295")
    assert flag_types.seed_number(2**32 - 1) == 2**32 - 1
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(json.dumps(dict(image=str(here / "in/bee.png"), prompt="x", seed=2**32 + 1)), "utf-8")
    result = run_script("predict.py", "--jobs", jobs)
    assert result.status == 1 and is_one_line(*result.errors, "jobs.jsonl:1", "32 bits"), result.err

@pytest.mark.parametrize("row, says", [
    ('"sigmas": "1 0.5"', "such as [1, 0.5]"), ('"sigmas": [1, null]', "[1, null]: is no list"),
    ('"sigmas": [1, 0.5, 0]', "leave a last 0 out"), ('"seed": "x"', 'seed "x": is no whole number'),
    ('"seed": true', "seed true: is no whole number"), ('"seed": 0.5', "whole"),
    ('"height": null', "height null: is no"),
    ('"shift": [3]', "shift [3]: is no number"), ('"out": 5', "is no name such as cat.png"),
    ('"negative_prompt": 5', "is no text"), ('"prompt": {}', "neither a text nor a list")])
def test_a_wrong_value_of_a_line_is_answered_in_the_words_of_the_list(here, tmp_path, row, says):
    """Not in Python's."""
    jobs = tmp_path / "jobs.jsonl"
    prompt = "" if "prompt\": {" in row else '"prompt": "x", '
    jobs.write_text(f'{{"image": "{here}/in/bee.png", {prompt}{row}}}', "utf-8")
    result = run_script("predict.py", "--jobs", jobs)
    assert result.status == 1 and is_one_line(*result.errors, "jobs.jsonl:1", says), result.err
    assert not re.search(r"None|True|literal|convert|object has|base 10", result.err)

def test_the_last_0_of_a_schedule_is_to_be_left_out():
    result = run_script("predict.py", "--image", "x.png", "--prompt", "x", "--sigmas", 1, 0.5, 0)
    assert result.status == 2 and is_one_line(*result.errors, "--sigmas", "leave a last 0 out")

def test_a_negative_number_may_have_an_exponent(here, tmp_path):
    """argparse alone takes it for a flag."""
    lora = lora_file(tmp_path, lora_tensors())
    flags = ["--image", here / "in/bee.png", "--prompt", "x"]
    for more in (["--scales", "-1e-1", 1], ["--lora_scale", "-5E-2"]):
        draw(here, tmp_path / "out", *flags, *more, lora=lora)
    assert said(tmp_path / "out/bee-x-0.1.png")["lora_scale"] == [-0.1]
    assert said(tmp_path / "out/bee.png")["lora_scale"] == [-0.05]
    out = tmp_path / "merged"
    result = run_script("tools/convert_lora.py", lora, "--to", "model", "--scale", "-1e-1", "--out", out)
    assert result.status == 0 and (out / "transformer").is_dir(), result.err
    result = run_script("predict.py", *flags, "--scales", "-inf")
    assert result.status == 2 and is_one_line(*result.errors, "--scales", "out of range")

def test_a_prompt_that_is_too_long_is_quoted(here, tmp_path):
    flags = ["--image", here / "in/bee.png", "--true_cfg_scale", 2, "--max_sequence_length", 20]
    for prompts, says in ((["--prompt", "x", "--negative_prompt", "blur " * 30], "'blur blur"),
                          (["--prompt", "word " * 30], "'word word")):
        result = run_script("predict.py", *flags_of(here, tmp_path), *flags, *prompts)
        assert result.status == 1 and is_one_line(*result.errors, "bee: prompt of", says), result.err

def test_a_list_that_is_a_pipe_is_to_be_saved(tmp_path):
    for flags in (["predict.py", "--jobs"], ["train.py", "--data"]):
        read, write = os.pipe()
        result = run_script(*flags, f"/dev/fd/{read}")
        assert result.status == 1 and is_one_line(*result.errors, "is a pipe", "save its lines as a file"), result.err
        os.close(read), os.close(write)
