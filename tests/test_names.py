"""
Which file a result of predict.py goes into: names that are chosen replace nothing, a result that is there is found
under any name, and two processes never choose the same one. And what a result says of itself.

$ python -m pytest -q tests/test_names.py    # 30 seconds
"""
import contextlib
import functools
import itertools
import json
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
from PIL import Image

import cache
import common
import predict
from extras import names
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
    jobs.write_text("\n".join(lines))
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
    monkeypatch.setattr(names, "prepare_folder", lambda *_: pytest.fail("wants to write"))
    monkeypatch.setattr(filelock, "FileLock", lambda *_: pytest.fail("wants to lock"))
    assert "2 of 2 pictures are there already" in draw(here, tmp_path, *flags).out

# ---- lines of --jobs -------------------------------------------------------------------------------------------------

BEE, CAT, BLUE, GREEN = ("bee", "red"), ("cat", "red"), ("bee", "blue"), ("bee", "green")
EDITS = { # a list of before, the same edited, how many are drawn, how many files there are then
    "a line on top": ([BEE, CAT], [GREEN, BEE, CAT], 1, 3),
    "a line on top, all of one picture": ([BEE, BLUE], [GREEN, BEE, BLUE], 1, 3),
    "a line removed": ([BEE, CAT, BLUE], [CAT, BLUE], 0, 3),
    "two of one picture swapped": ([BEE, BLUE], [BLUE, BEE], 0, 2),
    "three of one picture in a circle": ([BEE, BLUE, GREEN], [GREEN, BEE, BLUE], 0, 3),
    "two of two pictures swapped": ([BEE, CAT], [CAT, BEE], 0, 2),
    "a line edited": ([BEE, CAT], [BLUE, CAT], 1, 3),
    "reversed, and one more in the middle": ([BEE, CAT, BLUE], [BLUE, GREEN, CAT, BEE], 1, 4),
    "the same": ([BEE, CAT], [BEE, CAT], 0, 2),
    "two equal lines": ([BEE, BEE], [BEE, CAT, BEE], 1, 3)}

@pytest.mark.parametrize("edit", EDITS)
def test_a_result_follows_its_line(here, tmp_path, edit):
    """What was drawn is not drawn again, is not lost, and has the number that its line has now."""
    before, after, drawn, count = EDITS[edit]
    draw_list(here, tmp_path, *before)
    first = {pixels(path) for path in tmp_path.glob("[0-9]*.png")}
    result = draw_list(here, tmp_path, *after)
    assert len(result.drawn) == drawn, result.out
    results = {path.name: said(path) for path in tmp_path.glob("[0-9]*.png")}
    for n, (picture, prompt) in enumerate(after, 1):
        own = [name for name, about in results.items() if re.fullmatch(rf"{n:03}-{picture}(-\d+)?.png", name)
               and about["prompt"] == prompt]
        assert len(own) == 1, (n, results)
    assert len(results) == count and first <= {pixels(tmp_path / name) for name in results}
    again = draw_list(here, tmp_path, *after)
    assert not again.drawn and "renamed" not in again.out
    assert {path.name: said(path) for path in tmp_path.glob("[0-9]*.png")} == results
    assert not [name for name in files(tmp_path) if name.startswith(".")]

def test_a_line_that_names_its_file_has_it_and_others_make_room(here, tmp_path):
    """Its own old picture is replaced; the name that another line would have is taken."""
    def call(prompt):
        rows = [dict(prompt="red"), dict(prompt=prompt, out="001-bee.png"), dict(prompt=prompt, out="sub/x.png")]
        jobs = tmp_path / "jobs.jsonl"
        jobs.write_text("\n".join(json.dumps(row | dict(image=str(here / "in/bee.png"))) for row in rows))
        return sorted(draw(here, tmp_path / "out", "--jobs", jobs).drawn)
    assert call("blue") == ["001-bee-2.png", "001-bee.png", "x.png"] and call("green") == ["001-bee.png", "x.png"]
    out = tmp_path / "out"
    assert [said(out / f"{name}.png")["prompt"] for name in ("001-bee", "sub/x", "001-bee-2")] == ["green", "green",
                                                                                                    "red"]
    assert files(out) == ["001-bee-2.png", "001-bee.png", "sheet-2.png", "sheet.png", "sub", "sub/x.png"]

def test_a_file_that_a_line_names_is_no_other_lines(tmp_path):
    """Although it holds what that one asks for, and would be renamed for it."""
    predict.save_png(Image.new("RGB", (8, 8)), tmp_path / "002-bee.png", "1")
    for key in ("1", "2"):
        paths, _ = choose(tmp_path, ask("001-bee", key, 1, out="002-bee.png"), ask("003-bee", "1", 3))
        assert paths == ["002-bee.png", "003-bee.png"] and files(tmp_path) == ["002-bee.png"]

def test_a_result_that_another_line_reads_stays_where_it_is(here, tmp_path):
    """A list may edit its own results."""
    draw_list(here, tmp_path, BEE)
    before = pixels(tmp_path / "001-bee.png")
    jobs = tmp_path / "jobs.jsonl"
    rows = [(tmp_path / "001-bee.png", "blue"), (here / "in/bee.png", "red"), (here / "in/bee.png", "green")]
    jobs.write_text("\n".join(json.dumps(dict(image=str(image), prompt=prompt)) for image, prompt in rows))
    result = draw(here, tmp_path, "--jobs", jobs)
    assert sorted(result.drawn) == ["001-001-bee.png", "003-bee.png"] and pixels(tmp_path / "001-bee.png") == before

# ---- renaming --------------------------------------------------------------------------------------------------------

def test_renaming_loses_nothing_wherever_it_is_killed(tmp_path, monkeypatch):
    """Every permutation of four files, and a chain, ended before each of its renames and within one."""
    real = os.unlink
    for number, order in enumerate(itertools.permutations(range(5), 4)):
        for kill_at in range(1, 7):
            folder = tmp_path / f"{number}-{kill_at}"
            folder.mkdir()
            paths = [folder / f"00{n}-a.png" for n in range(5)]
            for n in range(4):
                paths[n].write_text(str(n))
            calls = []
            def unlink(path):
                calls.append(path)
                if len(calls) == kill_at:
                    raise KeyboardInterrupt
                real(path)
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(os, "unlink", unlink)
                names.rename_all({paths[n]: paths[m] for n, m in enumerate(order) if n != m})
                assert [paths[m].read_text() for m in order] == list("0123") and len(files(folder)) == 4
            assert {path.read_text() for path in folder.iterdir()} == set("0123")

def test_a_file_is_renamed_over_nothing(tmp_path, monkeypatch):
    """Also on a disk that knows no hard links."""
    for disk in ("links", "no links"):
        for name in ("a", "b"):
            (tmp_path / name).write_text(name)
        with monkeypatch.context() as patch:
            if disk == "no links":
                patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
            with pytest.raises(FileExistsError):
                common.move_new(tmp_path / "a", tmp_path / "b")
            common.move_new(tmp_path / "a", tmp_path / "c")
        assert files(tmp_path) == ["b", "c"] and (tmp_path / "c").read_text() == "a"
        (tmp_path / "c").unlink()

# ---- choosing, without drawing ---------------------------------------------------------------------------------------

def ask(stem, key, line=None, **settings):
    """A picture as predict.plan_pictures returns it."""
    return SimpleNamespace(sample=SimpleNamespace(name=stem, settings=settings), line=line, end="", key=key, row=0)

def choose(folder, *pictures, jobs="jobs.jsonl", inputs=(), claims=None):
    args = SimpleNamespace(out=None, out_dir=folder, jobs=jobs, image=None if jobs else [Path("in")])
    with contextlib.ExitStack() as own:
        places, sheet = names.choose_names(pictures, inputs, args, is_whole, claims or own)
        return [path.name for path, _, _ in places], sheet and sheet.path.name

def test_names_that_differ_in_case_are_one_name_where_the_disk_says_so(tmp_path, monkeypatch):
    pictures = ask("A", "1"), ask("a", "2")
    assert choose(tmp_path, *pictures)[0] == ["A.png", "a.png"]
    monkeypatch.setattr(names, "folds_case", lambda folder: True)
    assert choose(tmp_path, *pictures)[0] == ["A.png", "a-2.png"]
    with refused("jobs.jsonl", "another result"):
        choose(tmp_path, ask("x", "1", out="A.png"), ask("y", "2", out="a.png"))
    inputs = {(tmp_path / "A.PNG").resolve()}
    assert choose(tmp_path, pictures[1], inputs=inputs)[0] == ["a-2.png"]

def test_a_disk_says_whether_it_folds_case(tmp_path, monkeypatch):
    here = tmp_path / "Here"
    here.mkdir()
    assert not names.folds_case(here / "not/there")
    monkeypatch.setattr(os.path, "exists", lambda path: True) # as on a Mac
    assert names.folds_case(here)

def test_many_lines_move_at_once_and_no_file_stays_open(tmp_path):
    """A line on top of 300; the names of 3,000 more."""
    pictures = [ask(f"{n:03}-bee", f"key {n}", n) for n in range(1, 301)]
    for picture in pictures:
        predict.save_png(Image.new("RGB", (8, 8)), tmp_path / f"{picture.sample.name}.png", picture.key)
    moved = [ask(f"{n + 1:03}-bee", f"key {n}", n + 1) for n in range(1, 301)]
    more = [ask(f"{n:03}-bee", f"key {n}", n) for n in range(1001, 4001)]
    with contextlib.ExitStack() as claims:
        opened = len(os.listdir("/proc/self/fd"))
        paths, _ = choose(tmp_path, ask("001-bee", "new", 1), *moved, *more, claims=claims)
        assert len(os.listdir("/proc/self/fd")) <= opened + 2
    assert paths == [f"{n:03}-bee.png" for n in [*range(1, 302), *range(1001, 4001)]]
    assert [names.key_of(tmp_path / path) for path in paths[:301]] == [None, *[f"key {n}" for n in range(1, 301)]]
    assert len(files(tmp_path)) == 300

def test_what_is_no_png_of_ours_has_no_key(tmp_path):
    predict.save_png(Image.new("RGB", (8, 8)), tmp_path / "ours.png", "the key")
    whole = (tmp_path / "ours.png").read_bytes()
    assert names.key_of(tmp_path / "ours.png") == "the key"
    os.mkfifo(tmp_path / "fifo.png")
    for size in range(60):
        (tmp_path / "cut.png").write_bytes(whole[:size])
        assert (names.key_of(tmp_path / "cut.png") or "") in "the key"
    save(paint_picture(), tmp_path / "photo.png")
    for name in ("fifo.png", "photo.png", "gone.png", "."):
        assert names.key_of(tmp_path / name) is None

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

# ---- two processes ---------------------------------------------------------------------------------------------------

def waits_for(file):
    """For a child process: it encodes when this file is there."""
    real = cache.encode_samples

    def encode_samples(*args, **kwargs):
        until(file.exists)
        return real(*args, **kwargs)
    cache.encode_samples = encode_samples

def claims_in(folder):
    return list(folder.glob(".names-*.json"))

def test_two_processes_side_by_side_choose_two_names_and_a_killed_one_leaves_its(here, tmp_path, start):
    """Pictures and sheets, chosen long before they are written."""
    out, go = tmp_path / "out", tmp_path / "go"
    flags = ["--image", here / "in/bee.png", "--prompt", "go"]
    slow = functools.partial(start, "predict.py", *flags_of(here, out), *flags,
                             prelude=functools.partial(waits_for, go))
    first = slow("--seed", 1, 2)
    until(lambda: claims_in(out))
    second = draw(here, out, *flags, "--seed", 3)
    killed = slow("--seed", 4)
    until(lambda: len(claims_in(out)) == 2)
    kill(killed)
    killed.wait()
    third = draw(here, out, *flags, "--seed", 5)
    assert second.drawn == ["bee.png"] and third.drawn == ["bee-2.png"]
    # the same names as those of the first
    both = draw(here, out, *flags, "--seed", 1, 2, "--shift", 2)
    assert both.drawn == ["bee-s1-2.png", "bee-s2-2.png"] and "bee-s1-2-sheet.png: 2 of" in both.out
    go.touch()
    assert first.wait() == 0, first.output()
    assert files(out) == ["bee-2.png", "bee-s1-2-sheet.png", "bee-s1-2.png", "bee-s1-sheet.png", "bee-s1.png",
                          "bee-s2-2.png", "bee-s2.png", "bee.png"]
    assert [said(out / name)["seed"] for name in ("bee.png", "bee-2.png", "bee-s1.png")] == [3, 5, 1]

def test_a_name_that_another_process_has_chosen_is_left_to_it(tmp_path):
    """Unless it draws the same result. One that you give is refused."""
    with contextlib.ExitStack() as claims:
        assert choose(tmp_path, ask("a", "1"), ask("b", "2"), claims=claims) == (["a.png", "b.png"], "sheet.png")
        assert choose(tmp_path, ask("a", "3"), ask("b", "2")) == (["a-2.png", "b.png"], "sheet-2.png")
        assert choose(tmp_path, ask("a", "1"), ask("b", "2")) == (["a.png", "b.png"], "sheet.png")
        with refused("a.png", "another predict.py"):
            choose(tmp_path, ask("x", "3", out="a.png"))
    assert choose(tmp_path, ask("a", "3")) == (["a.png"], None)
    assert files(tmp_path) == []

def test_the_same_command_twice_at_once_makes_one_set_of_files(here, tmp_path, start):
    """Both draw it, and neither is in the other's way."""
    go, flags = tmp_path / "go", ["--image", here / "in", "--prompt", "go"]
    other = start("predict.py", *flags_of(here, tmp_path / "out"), *flags, prelude=functools.partial(waits_for, go))
    until(lambda: claims_in(tmp_path / "out"))
    assert draw(here, tmp_path / "out", *flags).drawn == ["bee.png", "cat.png"]
    go.touch()
    assert other.wait() == 0, other.output()
    assert files(tmp_path / "out") == ["bee.png", "cat.png", "sheet.png"]

def test_threads_that_choose_at_once_get_a_name_each(tmp_path):
    """The claims come and go; nothing is left."""
    chosen, barrier = [], threading.Barrier(8)
    with contextlib.ExitStack() as claims:
        def one(n):
            barrier.wait()
            chosen.extend(choose(tmp_path, ask("a", f"key {n}"), claims=claims)[0])
        threads = [threading.Thread(target=one, args=[n]) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(chosen) == ["a-2.png", "a-3.png", "a-4.png", "a-5.png", "a-6.png", "a-7.png", "a-8.png", "a.png"]
    assert files(tmp_path) == []

@pytest.mark.parametrize("fails", [OSError(37, "No locks available"), NotImplementedError()], ids=ascii)
def test_a_disk_without_locks_draws_all_the_same_and_says_so(tmp_path, monkeypatch, capsys, fails):
    monkeypatch.setattr(filelock.FileLock, "acquire", lambda *_, **__: (_ for _ in ()).throw(fails))
    assert choose(tmp_path, ask("a", "1"))[0] == ["a.png"]
    assert "knows no locks" in capsys.readouterr().out

def test_an_error_leaves_no_claim(here, tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "generate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        draw(here, tmp_path, "--image", here / "in/bee.png", "--prompt", "go")
    assert files(tmp_path) == []

def chooses_nothing():
    """For a child process: it fails if it chooses names."""
    predict.choose_names = None

def test_of_two_processes_of_one_call_the_first_chooses(here, tmp_path, start):
    """The others get its names: one that is taken, one whose line has moved."""
    out = tmp_path / "out"
    draw_list(here, out, BEE)
    first = pixels(out / "001-bee.png")
    save(paint_picture(), out / "001-cat.png")
    jobs = tmp_path / "jobs.jsonl"
    rows = [CAT, BEE, GREEN]
    jobs.write_text("\n".join(json.dumps(dict(image=str(here / f"in/{name}.png"), prompt=prompt))
                              for name, prompt in rows))
    ranks = start_ranks(start, *flags_of(here, out), "--jobs", jobs, "--device", "cpu", script="predict.py",
                        preludes=[None, chooses_nothing])
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output() for rank in ranks]
    assert files(out) == ["001-cat-2.png", "001-cat.png", "002-bee.png", "003-bee.png", "sheet.png"]
    assert pixels(out / "002-bee.png") == first

# ---- between choosing and writing ------------------------------------------------------------------------------------

@pytest.mark.parametrize("theirs", ["a photograph", "a result of another call"])
def test_what_has_come_to_a_chosen_name_meanwhile_is_not_replaced(here, tmp_path, monkeypatch, theirs):
    """One line says so, and the next call takes another name."""
    real, path = predict.generate_samples, tmp_path / "bee.png"

    def generate_samples(*args, **kwargs):
        if theirs == "a photograph":
            save(paint_picture(seed=9), path)
        else:
            predict.save_png(paint_picture(seed=9), path, "f" * 32)
        return real(*args, **kwargs)
    flags = ["--image", here / "in/bee.png", "--prompt", "go"]
    with monkeypatch.context() as patch:
        patch.setattr(predict, "generate_samples", generate_samples)
        result = run_script("predict.py", *flags_of(here, tmp_path), *flags)
    assert result.status == 1 and is_one_line(*result.errors, "bee.png", "already exists"), result.err
    assert pixels(path) == paint_picture(seed=9).tobytes() and files(tmp_path) == ["bee.png"]
    assert draw(here, tmp_path, *flags).drawn == ["bee-2.png"]

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
    lora, out, real = lora_file(tmp_path, lora_tensors()), tmp_path / "out/x.safetensors", common.write_tensors

    def write_tensors(*args, **kwargs):
        real(*args, **kwargs)
        out.write_bytes(b"theirs")
    monkeypatch.setattr(common, "write_tensors", write_tensors)
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
    jobs.write_text("\n".join(json.dumps(row | dict(image=str(here / "in/bee.png"))) if row else "" for row in rows))
    draw(here, tmp_path / "out", "--jobs", jobs, "--scales", 0.5, 1, "--lora_scale", 2, lora=lora)
    about = said(tmp_path / "out/x-x0.5.png")
    want = dict(prompt="it's \u96ea", negative_prompt="\u96e8", seed=3, true_cfg_scale=2.0, sigmas=[1.0, 0.5],
                num_inference_steps=2, controls=[str(here / "in/bee.png")], line=f"{jobs}:3", lora_scale=[1.0])
    assert {name: about[name] for name in want} == want
    other = said(tmp_path / "out/001-bee-x1.png")
    assert (other["prompt"], other["seed"], other["line"], other["lora_scale"]) == ("red", 0, f"{jobs}:1", [2.0])
    text = Image.open(tmp_path / "out/x-x0.5.png").text
    assert list(text) == ["key", "command", "sample"] and "--scales 0.5 1" in text["command"]

def test_a_path_that_is_no_text_can_be_said(here, tmp_path):
    picture = SimpleNamespace(sample=SimpleNamespace(prompts=["a\udce9"], controls=["in/caf\udce9.png"], settings={}),
                              strengths=(), line=2)
    predict.save_png(paint_picture(), tmp_path / "x.png", "key", predict.about(picture, Path("caf\udce9.jsonl")))
    assert said(tmp_path / "x.png") == dict(prompt="a\udce9", controls=["in/caf\udce9.png"], line="caf\udce9.jsonl:2")

# ---- flags and fields ------------------------------------------------------------------------------------------------

def test_seeds_that_would_give_one_picture_are_refused(here, tmp_path):
    """Equal in their last 32 bits, which is all that torch takes."""
    for script in ("predict.py", "train.py", "tools/lean_train.py"):
        result = run_script(script, "--seed", 2**32)
        assert result.status == 2 and is_one_line(*result.errors, "--seed", "32 bits", "give 0 to 4294967295")
    assert common.seed_number(2**32 - 1) == 2**32 - 1
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(json.dumps(dict(image=str(here / "in/bee.png"), prompt="x", seed=2**32 + 1)))
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
    jobs.write_text(f'{{"image": "{here}/in/bee.png", {prompt}{row}}}')
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

def test_a_negative_prompt_that_is_too_long_is_called_so(here, tmp_path):
    flags = ["--image", here / "in/bee.png", "--true_cfg_scale", 2, "--max_sequence_length", 20]
    long = "word " * 30
    for prompts, says in ((["--prompt", "x", "--negative_prompt", long], "bee: negative prompt of"),
                          (["--prompt", long], "bee: prompt of")):
        result = run_script("predict.py", *flags_of(here, tmp_path), *flags, *prompts)
        assert result.status == 1 and is_one_line(*result.errors, says), result.err

def test_a_list_that_is_a_pipe_is_to_be_saved(tmp_path):
    for flags in (["predict.py", "--jobs"], ["train.py", "--data"]):
        read, write = os.pipe()
        result = run_script(*flags, f"/dev/fd/{read}")
        assert result.status == 1 and is_one_line(*result.errors, "is a pipe", "save its lines as a file"), result.err
        os.close(read), os.close(write)
