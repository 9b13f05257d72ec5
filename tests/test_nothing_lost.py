"""
What a person has written is never replaced or deleted: for every flag of every script that names an output, a file of
the user's at that place survives, and one line says so.

$ python -m pytest -q tests/test_nothing_lost.py
"""
import argparse
import hashlib
import os
import re
import shutil
from types import SimpleNamespace

import pytest

import common
import predict
from tests.harness import (HERE, TINY, add_item, is_one_line, is_whole, lora_file, lora_tensors, paint_picture,
                           run_script, save, works)

# ---- which flags name an output --------------------------------------------------------------------------------------

# Every flag, and every argument without a flag, whose value may be a name has a case below, or stands here.
OTHERS = """
--model --data --val_data --device --vae_device --text_encoder_device --transformer_device --preserve_prompts --image
--prompt --jobs --lora --sample_lora --negative_prompt --transformer --lora_targets --pretrained_lora --optimizer
""".split()
OF_SCRIPT = {"tools/convert_lora.py": ["lora"], "tools/doctor.py": ["data"], "tools/measure.py": ["results", "dataset"],
             "tools/import_data.py": ["source", "--target", "--control", "--mask"]}

def flags_of(script, monkeypatch):
    """-> the names of a script's flags and arguments that take a name or another text."""
    found = []

    def note(parser, *args, **kwargs):
        for action in parser._actions:
            if action.nargs != 0 and not action.choices and any(takes(action, name) for name in NAMES):
                found.append((action.option_strings or [action.dest])[0])
        raise SystemExit(0)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", note)
    if script.startswith("tiny"): # it imports its neighbour
        monkeypatch.syspath_prepend(TINY)
    run_script(script, "x") # (without any word predict.py prints its usage)
    return set(found)

NAMES = "name", "name.png", "name.html", "name.json", "name.safetensors"

def takes(action, text):
    try:
        (action.type or str)(text)
    except (argparse.ArgumentTypeError, TypeError, ValueError):
        return False
    return True

PATTERNS = ("*.py", "tools/*.py", "tiny/*.py", "library/**/*.py", "training/*.py")
SCRIPTS = sorted(path.relative_to(HERE).as_posix() for pattern in PATTERNS
                 for path in HERE.glob(pattern) if re.search(r"^(    )?parser = ", path.read_text("utf-8"), re.M))

def test_each_flag_that_takes_a_name_is_known_to_be_an_output_or_not(monkeypatch):
    """A new one that has no case and stands not among the others fails here."""
    assert len(SCRIPTS) >= 12 and {case.split()[0] for case in CASES} <= {*SCRIPTS}
    for script in SCRIPTS:
        with monkeypatch.context() as patch:
            names = flags_of(script, patch)
        outputs = {case.split()[1] for case in CASES if case.split()[0] == script}
        unknown = names - outputs - {*OTHERS, *OF_SCRIPT.get(script, [])}
        assert not unknown, f"{script}: {unknown}: does it name an output? see CASES"
        assert outputs <= names, script

# ---- what the user has there survives --------------------------------------------------------------------------------

TRAIN = ("--data {made}/data --val_data --cache_dir {made}/c --lora_rank 1 --lr_scheduler constant --batch_size 2 "
         "--device cpu")

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What the scripts below read: a run, a LoRA, a dataset, a cache, results, pictures. It is never written to."""
    folder = tmp_path_factory.mktemp("made")
    add_item(add_item(folder / "data", "a"), "b")
    for name in ("one/cat", "two/cat"):
        save(paint_picture((64, 64), seed=len(name) + ord(name[0])), folder / f"{name}.png")
    works("train.py", *TRAIN.replace("{made}", str(folder)).split(), "--max_steps", 1, "--out_dir", folder / "run")
    return SimpleNamespace(folder=folder, lora=lora_file(folder, lora_tensors()))

def contents(folder):
    """-> {path: hash, or where a link leads}."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[path] = os.readlink(path)
        elif path.is_file():
            found[path] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found

QUICK = "--num_inference_steps 2 --lora= --cache_dir {made}/c"
CASES = { # script and flag: (command line, with {} for a folder of the user's; the files that are there already)
    "cache.py --cache_dir": [("--data {made}/data --val_data --cache_dir {}", "tiny-data.json")],
    "train.py --cache_dir": [(TRAIN + " --max_steps 1 --out_dir {}/new --cache_dir {}", "tiny-data.json")],
    "train.py --out_dir": [(TRAIN + " --max_steps 2 --out_dir {} " + more, file)
                           for more, file in (("", "notes.txt"), ("", ".lock"), ("--resume", "log.jsonl"),
                                              ("--resume", "DONE"), ("--resume", ".lock"),
                                              ("--resume", predict.LORA_FILE))],
    "predict.py --cache_dir": [("--image {made}/one/cat.png --prompt x --out_dir {}/o " + QUICK + " --cache_dir {}",
                                "pictures.txt")],
    "predict.py --out": [("--image {made}/one/cat.png --prompt x --out {}/x.png " + QUICK, "x.png"),
                         ("--image {made}/one/cat.png --prompt x --out {}/x.png --seed 0 1 " + QUICK, "x-s1.png")],
    "predict.py --out_dir": [("--jobs {made}/data --out_dir {} " + QUICK, "a.png"),
                             ("--image {made}/one --prompt x --out_dir {} " + QUICK, "cat.png")],
    "tools/page.py --out": [("{made}/run --out {}/x.html", "x.html"), ("{made}/run --out {}/x.md", "x.md"),
                            ("{made}/run --out {}/photo.png", "photo.png")],
    "tools/page.py run": [("{}", "index.html log.jsonl")],
    "tools/convert_lora.py --out": [("{lora} --to comfyui --out {}/x.safetensors", "x.safetensors"),
                                    ("{lora} --to model --out {}", "x"), ("{lora} --to model --out {}/link", "link")],
    "tools/import_data.py out": [("{made}/data {}", "x"), ("{made}/data {}/link", "link")],
    "tools/doctor.py --out": [("{made}/data --out {}", file) for file in (
        "index.html", "report.json", "pictures/overview-0-0.jpg", "pictures/notes.txt")],
    "tools/doctor.py --align": [("{made}/data --out {}/o --align {}", "x"),
                                ("{made}/data --out {}/o --align {}/link", "link")],
    "tools/lean_train.py --cache_dir": [("--data {made}/data --max_steps 1 --out_dir {}/new --cache_dir {}",
                                         "tiny-data.json")],
    "tools/lean_train.py --out_dir": [
        ("--data {made}/data --cache_dir {made}/c --max_steps 1 --out_dir {} " + more, file)
        for more, file in (("", "notes.txt"), ("--resume", "log.jsonl"), ("--resume", "state.safetensors"))],
    "tools/gpu_check.py --out": [("--device cpu --rows claims --minutes 0 --out {}/x.json", "x.json")],
    "tools/prune.py cache_dir": [("{} --delete", "latents/mine.safetensors text/0.safetensors")],
    "tiny/make_data.py --out": [("--out {}", "val/x.png")],
    "tiny/make_tiny.py --out": [("--out {} --random", "vae/x.png")]}
SILENT = { # these do what was asked, beside the user's file
    "predict.py --cache_dir", "tools/prune.py cache_dir", *[f"predict.py --out_dir {n}" for n in range(4)]}

def fill(folder, files):
    """Puts a file of the user's at each of these places: a picture where the name asks for one. link: one that leads
    nowhere."""
    for name in files.split():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".png", ".jpg"):
            paint_picture(seed=7).save(path)
        elif name == "link":
            path.symlink_to("nowhere")
        else:
            path.write_text(f"mine, and not to be lost: {name}\n", "utf-8")

@pytest.mark.parametrize("case, number", [(case, n) for case, all_of in CASES.items() for n in range(len(all_of))])
def test_a_users_file_survives_where_an_output_is_named(case, number, made, tmp_path, monkeypatch):
    script, flags, files = case.split()[0], *CASES[case][number]
    folder = tmp_path / "theirs"
    if script == "train.py" and "--resume" in flags:
        shutil.copytree(made.folder / "run", folder)
        if files == "log.jsonl":
            for path in [folder / predict.LORA_FILE, *folder.glob("checkpoint-*")]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (folder / ".lock").unlink(missing_ok=True)
    fill(folder, files)
    if case == "tools/page.py run":
        shutil.copyfile(made.folder / "run/log.jsonl", folder / "log.jsonl")
    if script.startswith("tiny"):
        monkeypatch.syspath_prepend(TINY)
    before = contents(tmp_path) | contents(made.folder / "data")
    words = flags.replace("{made}", str(made.folder)).replace("{lora}", str(made.lora)).replace("{}", str(folder))
    result = run_script(script, *words.split())
    after = contents(tmp_path) | contents(made.folder / "data")
    assert {path: after.get(path) for path in before} == before, result.err
    if case in SILENT or f"{case} {number}" in SILENT:
        assert result.status == 0, result.err
    else:
        assert result.status in (1, 2) and len(result.errors) == 1, result.err
        assert is_one_line(result.errors[0], folder) and "Traceback" not in result.err, result.err
        assert script != "train.py" or files in result.errors[0] or "not empty" in result.errors[0]

# ---- predict.py's own pictures ---------------------------------------------------------------------------------------

def test_out_replaces_only_what_predict_has_drawn(made, tmp_path):
    flags = ["--image", made.folder / "one/cat.png", "--prompt", "x", "--cache_dir", made.folder / "c", "--out",
             tmp_path / "x.png", "--num_inference_steps", 2, "--lora="]
    assert run_script("predict.py", *flags).status == 0
    before = contents(tmp_path)
    assert run_script("predict.py", *flags, "--seed", 5).status == 0
    assert contents(tmp_path) != before and len(contents(tmp_path)) == 1
    before = contents(tmp_path)
    result = run_script("predict.py", *flags[2:], "--image", tmp_path / "x.png") # its own, but now it is read
    assert result.status == 1 and is_one_line(result.errors[0], "x.png", "is read"), result.err
    assert contents(tmp_path) == before

def test_a_picture_with_a_large_colour_profile_is_ours_all_the_same(tmp_path):
    image = paint_picture()
    image.info["icc_profile"] = os.urandom(9000)
    for _ in range(2):
        predict.save_png(image, tmp_path / "x.png", "key")
    assert is_whole(tmp_path / "x.png", "key")

def test_reports_of_ours_are_written_again(made, tmp_path):
    """Pages and reports: the rule must not forbid the second call."""
    for _ in range(2):
        for script, *flags in (["tools/page.py", made.folder / "run", "--out", tmp_path / "x.html"],
                               ["tools/doctor.py", made.folder / "data", "--out", tmp_path / "doctor"]):
            works(script, *flags)
    result = run_script("tools/page.py", made.folder / "run", "--out", tmp_path / "new.jpg") # a page has another suffix
    assert result.status == 1 and is_one_line(result.errors[0], "new.jpg", ".html"), result.err
    assert not (tmp_path / "new.jpg").exists()

def test_the_rule(tmp_path):
    path = tmp_path / "x"
    common.refuse_to_replace(path)
    for make in (lambda: path.write_bytes(b"theirs"), lambda: path.mkdir(), lambda: path.symlink_to("nowhere"),
                 lambda: os.mkfifo(path), lambda: path.write_bytes(b" " * 5000 + b"ours")):
        make()
        with pytest.raises(common.InputError) as e:
            common.write_file(path, b"new", b"ours")
        assert is_one_line(str(e.value), path)
        path.rmdir() if path.is_dir() else path.unlink()
    path.write_bytes(b"ours, old")
    common.write_file(path, b"ours, new", rb"\Aours")
    assert path.read_bytes() == b"ours, new"
    with pytest.raises(common.InputError):
        common.refuse_to_replace(path)
