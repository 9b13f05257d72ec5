"""
The file of a result of predict.py: its name tells its key, so that the same command finds its pictures finished,
another one writes beside them, and edited code draws anew; what a result says of itself; what is whole.
"""
import atexit
import contextlib
import functools
import json
import os
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import cache
import common
import library
from library.data import dataset
from library.files import tensor_files
from library.results import contact_sheets
import predict
from tests.harness import (ON_DEVICE, add_item, cached_files, is_one_line, is_whole, lora_file, lora_tensors,
                           make_cache, paint_picture, run_script, save, works, write_jobs)

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
    result = works("predict.py", *flags_of(here, out, lora), *flags)
    result.drawn = [Path(path).name for path in re.findall(r"(\S+\.png): \d+x\d+ \|", result.out)]
    result.stems = sorted(re.sub(r"-[0-9a-f]{8}\.png", "", name) for name in result.drawn)
    return result

def draw_list(here, out, *rows):
    """Likewise, a list of (picture, prompt)."""
    jobs = [dict(image=str(here / f"in/{picture}.png"), prompt=prompt) for picture, prompt in rows]
    return draw(here, out, "--jobs", write_jobs(here, jobs))

def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))

def pixels(path):
    return Image.open(path).tobytes()

def said(path):
    """What a result says of itself."""
    return json.loads(Image.open(path).text["sample"])

# ---- names -----------------------------------------------------------------------------------------------------------

KINDS = dict(file=lambda here: ["--image", here / "in/bee.png"], folder=lambda here: ["--image", here / "in"],
             dataset=lambda here: ["--jobs", here / "data"])

@pytest.mark.parametrize("kind", KINDS)
def test_another_result_stands_beside_the_first_and_the_same_one_is_finished(here, tmp_path, kind):
    """For a FILE, a FOLDER and --jobs alike: each name has eight letters of its key; then nothing is written."""
    add_item(here / "data", "bee")
    what = KINDS[kind](here)
    more = [["--seed", seed] if kind == "dataset" else ["--prompt", f"go {seed}"] for seed in (0, 1)]
    first = draw(here, tmp_path, *what, *more[0])
    assert first.stems[0] == "bee"
    for path in tmp_path.glob("bee-*.png"):
        assert path.stem == "bee-" + Image.open(path).info["key"][:8]
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    second = draw(here, tmp_path, *what, *more[1])
    assert second.stems == first.stems and not {*second.drawn} & {*first.drawn}
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    for flags in more:
        again = draw(here, tmp_path, *what, *flags)
        assert not again.drawn and "pictures are there already, with the same settings" in again.out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times

def test_a_file_that_is_not_ours_is_never_replaced(here, tmp_path):
    """Not by a name that the user gives, nor by one that we choose: one line before anything is computed."""
    flags = ["--image", here / "in/bee.png", "--prompt", "go"]
    chosen, = draw(here, tmp_path / "ours", *flags).drawn
    theirs = save(paint_picture(seed=9), tmp_path / "out" / chosen).read_bytes()
    save(paint_picture(seed=9), tmp_path / "out/x.png")
    for more in (["--out_dir", tmp_path / "out"], ["--out", tmp_path / "out/x.png"]):
        result = run_script("predict.py", *flags_of(here, tmp_path)[2:], *flags, *more)
        assert result.status == 1 and is_one_line(*result.errors, "already exists"), result.err
    assert all((tmp_path / "out" / name).read_bytes() == theirs for name in (chosen, "x.png"))

def test_what_comes_while_it_is_drawn_is_not_replaced_and_stops_no_others(here, tmp_path, monkeypatch):
    """A photograph of the user's, under the name of a result."""
    real = cache.encode_samples

    def encode_samples(*args, **kwargs):
        failed = real(*args, **kwargs)
        save(paint_picture(seed=9), tmp_path / "x.png")
        return failed
    monkeypatch.setattr(cache, "encode_samples", encode_samples)
    bee = str(here / "in/bee.png")
    jobs = write_jobs(tmp_path, [dict(image=bee, prompt="red", out="x.png"), dict(image=bee, prompt="blue")])
    result = run_script("predict.py", *flags_of(here, tmp_path), "--jobs", jobs)
    assert result.status == 1 and is_one_line(*result.errors, "x.png", "already exists"), result.err
    assert pixels(tmp_path / "x.png") == paint_picture(seed=9).tobytes()
    assert [said(path)["prompt"] for path in tmp_path.glob("bee-*.png")] == ["blue"]

BEE, CAT, BLUE, GREEN = ("bee", "red"), ("cat", "red"), ("bee", "blue"), ("bee", "green")
EDITS = { # a list of before, the same edited, how many are drawn then
    "a line on top": ([BEE, CAT], [GREEN, BEE, CAT], 1), "a line removed": ([BEE, CAT, BLUE], [CAT, BLUE], 0),
    "two of one picture swapped": ([BEE, BLUE], [BLUE, BEE], 0), "a line edited": ([BEE, CAT], [BLUE, CAT], 1),
    "two equal lines": ([BEE, BEE], [BEE, CAT, BEE], 1)}

@pytest.mark.parametrize("edit", EDITS)
def test_a_result_stays_whichever_line_asks_for_it_now(here, tmp_path, edit):
    """What was drawn is not drawn again, and keeps its name; equal lines share a file."""
    before, after, drawn = EDITS[edit]
    draw_list(here, tmp_path, *before)
    first = {path: path.read_bytes() for path in tmp_path.glob("[bc]*.png")}
    assert len(draw_list(here, tmp_path, *after).drawn) == drawn
    assert {path: path.read_bytes() for path in first} == first
    results = {(Path(about["controls"][0]).stem, about["prompt"]) for about in map(said, tmp_path.glob("[bc]*.png"))}
    assert results == {*before, *after} and len(list(tmp_path.glob("[bc]*.png"))) == len(results)

def test_out_is_a_path_from_here(here, tmp_path):
    """Its folder is not put before it twice; `out` of a line is a path in --out_dir."""
    flags = ["--image", here / "in/bee.png", "--prompt", "go"]
    for out in ("x.png", "deep/y.png"):
        result = run_script("predict.py", *flags_of(here, tmp_path)[2:], *flags, "--out", out, folder=tmp_path)
        assert result.status == 0 and (tmp_path / out).is_file(), result.err
    jobs = write_jobs(tmp_path, [dict(image=str(here / "in/bee.png"), prompt="go", out="z/w.png")])
    assert run_script("predict.py", *flags_of(here, "results"), "--jobs", jobs, folder=tmp_path).status == 0
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png")) == [
        "deep/y.png", "results/z/w.png", "x.png"]

def test_the_same_command_twice_at_once_ends_with_one_set_of_pictures(here, tmp_path, start):
    out, flags = tmp_path / "out", ["--image", here / "in", "--prompt", "go"]
    both = [start("predict.py", *flags_of(here, out), *flags) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0], [process.output() for process in both]
    assert not draw(here, out, *flags).drawn and len(files(out)) == 3

def dies_before_it_renames():
    """For a child process: SIGKILL at the moment when its picture would get its name."""
    os.link = os.replace = lambda *_: os.kill(os.getpid(), 9)

def test_a_process_that_is_killed_while_it_writes_leaves_a_temporary_file(here, tmp_path, start):
    flags = ["--image", here / "in/bee.png", "--prompt", "go"]
    draw(here, tmp_path / "other", *flags) # which fills the cache
    process = start("predict.py", *flags_of(here, tmp_path / "out"), *flags, prelude=dies_before_it_renames)
    process.wait()
    assert all(name.startswith(".tmp-") for name in files(tmp_path / "out"))
    assert draw(here, tmp_path / "out", *flags).stems == ["bee"]

# ---- files that come meanwhile, for all that writes ------------------------------------------------------------------

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
    other = said(next((tmp_path / "out").glob("bee-x1-*.png")))
    assert (other["prompt"], other["seed"], other["line"], other["lora_scale"]) == ("red", 0, f"{jobs}:1", [2.0])
    text = Image.open(tmp_path / "out/x-x0.5.png").text
    assert list(text) == ["key", "command", "sample"] and "--scales 0.5 1" in text["command"]

# ---- flags and fields ------------------------------------------------------------------------------------------------

def test_a_negative_number_may_have_an_exponent(here, tmp_path):
    """argparse alone takes it for a flag."""
    lora = lora_file(tmp_path, lora_tensors())
    flags = ["--image", here / "in/bee.png", "--prompt", "x"]
    for more in (["--scales", "-1e-1", 1], ["--lora_scale", "-5E-2"]):
        draw(here, tmp_path / "out", *flags, *more, lora=lora)
    assert said(next((tmp_path / "out").glob("bee-x-0.1-*.png")))["lora_scale"] == [-0.1]
    assert [-0.05] in [said(path)["lora_scale"] for path in (tmp_path / "out").glob("bee-*.png")]
    out = tmp_path / "merged"
    result = run_script("tools/convert_lora.py", lora, "--to", "model", "--scale", "-1e-1", "--out", out)
    assert result.status == 0 and (out / "transformer").is_dir(), result.err
    result = run_script("predict.py", *flags, "--scales", "-inf")
    assert result.status == 2 and is_one_line(*result.errors, "--scales", "out of range")

def test_a_list_that_is_a_pipe_is_one_line(tmp_path):
    for flags in (["predict.py", "--jobs"], ["train.py", "--data"]):
        read, write = os.pipe()
        result = run_script(*flags, f"/dev/fd/{read}")
        assert result.status == 1 and is_one_line(*result.errors, "is no dataset; want"), result.err
        os.close(read), os.close(write)

# ---- the code is an input --------------------------------------------------------------------------------------------

@pytest.fixture
def edit(tmp_path, monkeypatch):
    """-> edit(file): that file of the project is another one from now on, for who hashes it."""
    root = tmp_path / "project"
    shutil.copytree(Path(library.ROOT) / "library", root / "library")
    for file in ("rope_patch.py", "predict.py", "cache.py", "train.py"):
        shutil.copy(Path(library.ROOT) / file, root)
    monkeypatch.setattr(library, "ROOT", root)
    return lambda file: (root / file).write_text((root / file).read_text("utf-8") + "\nx = 1\n", "utf-8")

@pytest.mark.parametrize("file", ["rope_patch.py", "cache.py", "library/lora/lora_file.py"])
def test_edited_code_draws_anew_beside_the_older_pictures(here, tmp_path, edit, file):
    flags = ["--image", here / "in/bee.png", "--prompt", "go"]
    first, = draw(here, tmp_path / "out", *flags).drawn
    edit(file)
    second, = draw(here, tmp_path / "out", *flags).drawn
    assert first != second and pixels(tmp_path / "out" / first) == pixels(tmp_path / "out" / second)
    assert not draw(here, tmp_path / "out", *flags).drawn

def test_an_edited_copy_of_predict_py_draws_its_own(here, tmp_path):
    script = Path(shutil.copy(Path(library.ROOT) / "predict.py", tmp_path))
    flags = [*flags_of(here, tmp_path / "out"), "--image", here / "in/bee.png", "--prompt", "go"]
    for count, edit in ((1, ""), (1, ""), (2, "\n# edited\n")):
        script.write_text(script.read_text("utf-8") + edit, "utf-8")
        assert run_script(str(script), *flags).status == 0
        assert len(list((tmp_path / "out").iterdir())) == count

def test_code_that_is_saved_while_the_libraries_load_is_one_line(here, tmp_path, monkeypatch):
    """It was hashed, and perhaps not read by Python yet."""
    hashes = iter("ab")
    monkeypatch.setattr(library, "code_hash", lambda files: next(hashes, "b"))
    result = run_script("predict.py", *flags_of(here, tmp_path), "--image", here / "in/bee.png", "--prompt", "go")
    assert result.status == 1 and is_one_line(*result.errors, "predict.py", "has changed", "run it again"), result.err

def test_files_that_other_code_has_encoded_are_told_of_once(data, tmp_path, edit):
    """Nothing is encoded again, and their names stay."""
    assert "warning" not in make_cache(data, tmp_path / "c").err + make_cache(data, tmp_path / "c").err
    files = cached_files(tmp_path / "c")
    edit("library/data/automatic_mask.py")
    warnings = [line for line in make_cache(data, tmp_path / "c").err.splitlines() if "another cache.py" in line]
    assert len(warnings) == 1 and "PREPROCESSING (4)" in warnings[0] and cached_files(tmp_path / "c") == files

def test_a_few_files_of_others_among_many_are_told_of_in_a_folder_of_any_name(tmp_path, capsys):
    """Of 200 the 10 in the middle: no header at either end says it."""
    files = [tmp_path / os.fsdecode(b"caf\xe9") / "text" / f"{n:032x}" for n in range(200)]
    for n, file in enumerate(files):
        code = "other" if 95 <= n < 105 else library.code_hash(library.ENCODING)
        tensor_files.write_tensors(file, {"a": torch.zeros(1)}, dict(code=code))
    cache.warn_of_other_code(files)
    assert capsys.readouterr().err.count("another cache.py") == 1

# ---- finished means whole --------------------------------------------------------------------------------------------

def test_a_picture_with_any_bit_flipped_any_part_cut_or_zeroed_is_not_finished(tmp_path):
    path, rng = tmp_path / "a.png", random.Random(0)
    predict.save_png(paint_picture((12, 12)), path, "key")
    sound = path.read_bytes()
    assert is_whole(path, "key") and not is_whole(path, "other")
    for place in range(len(sound)):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert not is_whole(path, "key"), place
    for place in range(0, len(sound), 11):
        end = place + 1 + rng.randrange(200)
        for damaged in (sound[:place], sound[:place] + bytes(end - place) + sound[end:], sound[:place] + sound[end:]):
            path.write_bytes(damaged)
            assert damaged == sound or not is_whole(path, "key"), place
    path.write_bytes(sound + b"more")
    assert not is_whole(path, "key")

def test_a_sheet_is_made_though_a_picture_of_it_cannot_be_read(tmp_path):
    """An older picture, or a photograph that is gone: its cell stays empty."""
    good = save(paint_picture(), tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(good.read_bytes()[:100])
    pictures = []
    for row, (control, path) in enumerate([("a", "b"), ("b", "a"), ("none", "none")]):
        sample = dataset.make_sample("", tmp_path, "a", None, [tmp_path / f"{control}.png"], ["x"])
        pictures.append(SimpleNamespace(sample=sample, row=row, title="result", path=tmp_path / f"{path}.png"))
    assert contact_sheets.results_sheet(pictures).height > 3 * contact_sheets.CELL

# ---- what was planned is forgotten -----------------------------------------------------------------------------------

@pytest.mark.parametrize("script", ["cache.py", "train.py", "predict.py"])
@pytest.mark.parametrize("error", [common.InputError("x: y; z"), KeyboardInterrupt(), RuntimeError("a bug")], ids=repr)
def test_no_list_of_planned_files_is_left_when_a_script_ends_with_an_error(data, tmp_path, monkeypatch, script, error):
    """Whatever the error. (A list keeps encoded files from tools/prune.py for ever.)"""
    seen = []

    def encode_files(pipe, jobs, args):
        seen.append(list(tmp_path.glob("c/.planned-*")))
        raise error
    monkeypatch.setattr(cache, "encode_files", encode_files)
    flags = {"cache.py": ["--data", data, "--val_data"],
             "train.py": ["--data", data, "--val_data", "--out_dir", tmp_path / "run"],
             "predict.py": ["--image", data / "control/cat.png", "--prompt", "x", "--out", tmp_path / "x.png"]}[script]
    try:
        assert run_script(script, *flags, "--cache_dir", tmp_path / "c", *ON_DEVICE).status == 1
    except (KeyboardInterrupt, RuntimeError):
        pass
    assert len(seen) == len(seen[0]) == 1 and not list(tmp_path.glob("c/.planned-*"))

def test_two_commands_on_the_same_pictures_have_a_list_each(tmp_path, monkeypatch):
    """The first one to end took the list of the other away. One may read pictures of several caches."""
    ends = []
    monkeypatch.setattr(atexit, "register", lambda *call: ends.append(functools.partial(*call)))
    samples = [SimpleNamespace(encodings=[], texts={("x", True): dict(file=tmp_path / folder / "text/0.safetensors")})
               for folder in "ab"]
    assert cache.keep_from_prune(samples) == cache.keep_from_prune(samples) == [tmp_path / "a", tmp_path / "b"]
    for end, left in zip(ends, (3, 2, 1, 0), strict=True):
        assert {path.read_text("utf-8") for path in tmp_path.glob("?/.planned-*")} == {"text/0.safetensors"}
        end()
        assert len(list(tmp_path.glob("?/.planned-*"))) == left
