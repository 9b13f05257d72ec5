"""
tools/import_data.py: what comes out is what went in; what is wrong is named, and then nothing comes out.

$ python -m pytest -q tests/test_import_data.py    # a minute; some tests need the package pyarrow
"""
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image, ImageOps

from library.data.dataset import read_dataset
from library.files import tensor_files
from tests.harness import (NATIVE, add_item, assert_same, index_of, is_one_line, load, make_cache, paint_picture,
                           paste, run_script, save)
from tests.import_sources import PICTURES, hole, import_data, masks_of, put, write_parquet, write_rows

# ---- layouts ---------------------------------------------------------------------------------------------------------

FOLDERS = { # files that hold target, first and second control and mask of cat
    "ours": "target/cat.png control/cat.png control/cat_1.png mask/cat.png",
    "qwen-image-finetune": "training_images/cat.png control_images/cat.bmp control_images/cat_control_1.png "
                           "control_images/cat_mask.png",
    "mask beside the target": "targets/cat.png controls/cat.png controls/cat_1.PNG targets/cat_mask.png",
    "musubi-tuner": "images/cat.png control/cat_0000.png control/cat_0001.png masks/cat_mask.png",
    "SimpleTuner": "edited-images/cat.png reference-images/cat.png reference-images/cat_1.png mask/cat.png",
    "capitals": "Target/cat.png Control/cat.png Control/cat_1.png MASK/cat.png",
    "below a folder": "target/a/cat.png control/a/cat.png control/a/cat_1.png mask/a/cat.png"}
@pytest.mark.parametrize("layout", FOLDERS)
def test_folders_of_other_trainers_give_the_same_sample(tmp_path, layout):
    """The source stays as it is, and the pictures take no space."""
    target, *_ = files = FOLDERS[layout].split()
    source = put(tmp_path / "source", FOLDERS[layout], [Path(target).with_suffix(".txt")])
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    [(name, sample)] = import_data(source, tmp_path / "out").samples.items()
    assert name.endswith("cat") and sample == (["go"], [0, 1, 2], 3)
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before
    assert {(source / file).stat().st_ino for file in files} < {p.stat().st_ino for p in (tmp_path / "out").rglob("*")}

CSV = ',path_target,path_control,path_control_1,path_mask,prompt\n7,a.png,b.png,c.png,d.png,"g;o"\n' # pandas' index too
MANIFESTS = {
    "ours.jsonl": dict(target="a.png", control=["b.png", "c.png"], mask="d.png", prompt="go"),
    "metadata.jsonl": dict(image_path="a.png", control_path_1="c.png", control_path_0="b.png", mask="d.png", text="go"),
    "metadata.json": [dict(image="a.png", edit_image=["b.png", "c.png"], mask="d.png", prompt="go")], # DiffSynth-Studio
    "imagefolder.jsonl": dict(file_name="a.png", control_images=["b.png", "c.png"], control_mask="d.png", text="go"),
    "pix2pix.jsonl": dict(edited_image="a.png", input_image=["b.png", "c.png"], mask_image="d.png", edit_prompt="go",
                          edited_prompt="not this", unknown=None), # instruct-pix2pix; the CSV is qwen-image-finetune's
    "metadata.csv": CSV, "semicolons.csv": CSV.replace(",", ";"), "tabs.csv": CSV.replace(",", "\t")}
@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifests_of_other_trainers_give_the_same_sample(tmp_path, kind):
    source, rows = put(tmp_path / "source", "a.png b.png c.png d.png"), MANIFESTS[kind]
    (source / kind).write_text(rows if isinstance(rows, str) else json.dumps(rows), encoding="utf-8-sig")
    result = import_data(source if kind.startswith("metadata") else source / kind, tmp_path / "out")
    assert result.samples == {"000000-a": (["g;o" if isinstance(rows, str) else "go"], [0, 1, 2], 3)}

def test_names_and_prompts_are_made_such_that_the_folders_mean_the_same(tmp_path):
    """Rows share a target; a name looks like another's further control, or has no suffix; prompts have line breaks."""
    source = put(tmp_path / "source", "cat.png cat_1.png x/cat.png")
    (source / "x/cat.png").rename(source / "x/.cat")
    rows = [dict(zip(("target", "control", "prompt"), row)) for row in (
        ("cat.png", "cat_1.png", ["a\nb", "c"]), ("cat.png", "x/.cat", "d"),
        ("cat_1.png", ["x/../cat.png", "x/.cat"], "e\nf\r\n "), ("x/.cat", "cat.png", "red " * 40_000))]
    got = import_data(write_rows(source / "m.jsonl", *rows), tmp_path / "out").samples.values()
    assert [pictures for _, pictures, _ in got] == [[0, 1], [0, 2], [1, 0, 2], [2, 0]]
    assert [prompts for prompts, _, _ in got] == [["a b", "c"], ["d"], ["e f"], ["red " * 39_999 + "red"]]

def test_pictures_without_controls_become_a_folder_without_controls(tmp_path):
    path = put(tmp_path / "source", "a.png b.png") / "faces.csv"
    write_rows(path, "image,text", "a.png,a face", "b.png,the face")
    [error] = import_data(path, tmp_path / "out", status=1).errors # said once, not for each row
    assert is_one_line(error, "faces.csv:2: no control, only image, text", "--columns control=NAME", "--alone")
    samples = import_data(path, tmp_path / "out", "--alone").samples
    assert samples == {"000000-a": (["a face"], [0], None), "000001-b": (["the face"], [1], None)}
    write_rows(path, "image,source,text", "a.png,b.png,a face")
    assert "faces.csv:2" in import_data(path, tmp_path / "other", "--alone", status=1).errors[0]

def test_pictures_are_copied_where_they_cannot_be_linked_and_nothing_is_left_of_a_failure(tmp_path, monkeypatch):
    source, out = put(tmp_path / "source", FOLDERS["ours"], ["target/cat.txt"]), tmp_path / "out"
    full = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    monkeypatch.setattr("os.link", full)
    assert import_data(source, out).samples == {"cat": (["go"], [0, 1, 2], 3)}
    assert (out / "target/cat.png").stat().st_ino != (source / "target/cat.png").stat().st_ino
    monkeypatch.setattr("shutil.copyfile", full)
    assert "No space left" in import_data(source, tmp_path / "new", status=1).errors[0]
    assert is_one_line(run_script("tools/import_data.py", source, out).errors[0], out) # it is there already

def test_one_of_n_samples_is_held_out(tmp_path):
    """In a dataset of its own; with too few samples, or where something lies in its place, none. The doctor is next."""
    source, out = tmp_path / "source", tmp_path / "out"
    for n, name in enumerate("abc"):
        put(source, f"target/{name}.png control/{name}.png control/{name}_1.png", [f"target/{name}.txt"])
        save(paint_picture(seed=n), source / f"control/{name}.png")
    got = import_data(source, out, "--hold_out", 2)
    held_out, problems = read_dataset(tmp_path / "out_val")
    assert len(got.samples) == 2 and not problems
    assert [(len(s.controls), s.prompts) for s in held_out] == [(2, ["go"])] and held_out[0].name not in got.samples
    title, doctor = got.out.splitlines()[-2:]
    assert title == "next:" and paste(doctor) == ["python", "tools/doctor.py", str(out), f"{out}_val"]
    (tmp_path / "new_val").mkdir()
    assert is_one_line(import_data(source, tmp_path / "new", "--hold_out", 2, status=1).errors[0], "new_val")
    (source / "target/bad.png").write_bytes(b"")
    error = import_data(source, tmp_path / "none", "--hold_out", 4, "--skip_bad", status=1).errors[-1]
    assert is_one_line(error, "--hold_out")

def test_everything_wrong_in_folders_is_listed_and_the_rest_can_be_had(tmp_path):
    """Then nothing is written, unless --skip_bad says so."""
    source = tmp_path / "source"
    for name in "good lonely gap empty twins two two_1 m m_1 masked silent".split():
        put(source, f"target/{name}.png control/{name}{'_0000' * (name in ('m', 'm_1'))}.png", [f"target/{name}.txt"])
    for file in ("control/gap_2.png", "control/twins.jpg", "mask/masked.png", "control/masked_mask.png",
                 "control/stray.png", "control/good.gif", "mask/sub/x.png"):
        save(paint_picture(), source / file)
    (source / "target/silent.txt").unlink(), (source / "control/lonely.png").unlink()
    (source / "target/empty.txt").write_text(" \n", "utf-8")
    (source / "control/link").symlink_to("../target")
    wrong = """target/lonely.png target/gap.png target/empty.txt control/twins control/two_1.png target/m_1.png
               mask/masked.png target/silent.png stray.png good.gif x.png control/link""".split()
    errors = import_data(source, tmp_path / "out", status=1).errors
    assert not [named for named in wrong if not any(named in error for error in errors)]
    got = import_data(source, tmp_path / "out", "--skip_bad")
    assert got.errors == errors and got.samples == dict.fromkeys(["good", "m"], (["go"], [0, 1], None))

ROW = dict(target="a.png", control=["b.png"], prompt="go")
BAD_ROWS = { # line 2 of a manifest, and what is named beside the line's number
    "no JSON": ('{"target": "a.png", ',), "no object": (["a.png"], "no JSON object"),
    "deep": ("[" * 100_000,),
    "no target": (ROW | dict(target=None), "target"), "no control": (ROW | dict(control=[]), "control", "--skip_bad"),
    "number": (ROW | dict(control=["b.png", 5]), "5"), "NaN": (ROW | dict(prompt=float("nan")), "prompt"),
    "blank prompt": (ROW | dict(prompt=" "), "prompt"), "missing": (ROW | dict(control="tom.png"), "tom.png"),
    "outside": (ROW | dict(control=["../secret.png"]), "../secret.png"), "link": (ROW | dict(mask="link.png"), "link"),
    "csv: few": ("a.png,b.png", "prompt"),
    "two masks": (ROW | dict(mask=["c.png"] * 2), "masks"), "two targets": (ROW | dict(image="a.png"), "image"),
    "mixed": (ROW | dict(source_1="c.png"), "source_1"),
    "spelled": (ROW | dict(control_path="b.png"), "control_path", "--columns control=control_path"),
    "csv: NaN": ("a.png,b.png,NaN", "an empty prompt"), "csv: None": ("a.png,b.png,None", "an empty prompt"),
    "csv: n/a": ("a.png,b.png,n/a", "an empty prompt"), "csv: no control": ("a.png,,go", "control"),
    "a caption's file": (ROW | dict(prompt="a.txt"), "put its text into the table"),
    "twice": ('{"target": "a.png", "control": "b.png", "control": "c.png", "prompt": "go"}', "is given twice"),
    "csv: no quotes": ("a.png,b.png,make it red, not blue", "comma")}
@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_named_by_line_and_column(tmp_path, kind):
    source, (row, *named) = put(tmp_path / "source", "a.png b.png c.png x/d.png ../secret.png"), BAD_ROWS[kind]
    (source / "link.png").symlink_to("../secret.png")
    name, *good = ("metadata.jsonl", ROW | dict(prompt="so")) if not kind.startswith("csv") else (
        "metadata.csv", "target,control,prompt", "a.png,b.png,so")
    write_rows(source / name, *good, row)
    got = import_data(source, tmp_path / "out", "--skip_bad")
    assert list(got.samples.values()) == [(["so"], [0, 1], None)]
    assert len(got.errors) == 1 and is_one_line(got.errors[0], f"{name}:{len(good) + 1}", *named), got.errors

UNKNOWN = { # files of a folder, what is in them, and what is named
    "no dataset": ("after/cat.png", "", "after", "--target DIR --control DIR"),
    "no JSON": ("metadata.json", "{", "JSON list"), "an object": ("metadata.json", '{"a": 1}', "JSON list (it is {"),
    "two names": ("target/a.png images/a.png", "", "images", "--control DIR"),
    "Latin-1": ("metadata.csv", "caf\xe9", "UTF-8"), "empty": (".hidden", "", "holds nothing", "--target DIR"),
    "no samples": ("target/notes.md control/notes.md", "", "no sample", "--target DIR"),
    "no header": ("metadata.csv", "a.png,b.png,go\na.png,b.png,go\n", "no target, control, prompt, only a.png",
                  "--columns target=NAME control=NAME prompt=NAME"),
    "no names": ("target/a.png control/b/a.png", "", "target: no control has the name", "--control DIR"),
    "a table too": ("target/a.png control/a.png metadata.csv", "", "metadata.csv: there are folders", "as SOURCE"),
    "two tables": ("metadata.csv metadata.json", "[]", "metadata.csv: metadata.json is there, too", "as SOURCE"),
    "two columns": ("metadata.csv", "target,control,prompt,prompt\na.png,b.png,go,go\n", "two columns"),
    "open quote": ("metadata.csv", 'target,"control,prompt\na.png,b.png,go\n', "close its quote"),
    "open cell": ("metadata.csv", 'target,control,prompt\na.png,b.png,x\na.png,b.png,"go\na.png,b.png,so\n', "csv:2"),
    "a row in a cell": ("metadata.csv", 'target,control,prompt\na.png,b.png,"red\nb.png,a.png,blue"\na.png,c.png,go',
                        "close the quote"),
    "a configuration": ("config.toml", "[general]", "config.toml", "configuration itself"),
    "pictures": ("a.png a.txt", "", "a.png", "--target DIR", "--alone"),
    "no table": ("a.xlsx", "", "a.xlsx", "a table"),
    "two of controls": ("target/a.png control1/a.png control2/a.png", "", "control1, control2", "--control DIR")}
@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_source_that_cannot_be_understood_is_named(tmp_path, kind):
    files, text, *named = UNKNOWN[kind]
    for file in files.split():
        write_rows(tmp_path / "source" / file, text)
    errors = import_data(tmp_path / "source", tmp_path / "out", status=1).errors
    assert len(errors) == 1 and is_one_line(errors[0], tmp_path / "source", *named), errors

def test_parquet_files_become_a_dataset_if_something_here_can_read_them(tmp_path, monkeypatch):
    """What is wrong in them is named by its row."""
    source, path = put(tmp_path / "source", "0.png 1.png 2.png"), tmp_path / "hf/data/train-00000-of-00001.parquet"
    write_rows(path, "PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "pip install pyarrow" in import_data(tmp_path / "hf", tmp_path / "out", status=1).errors[0]
    monkeypatch.undo()
    pytest.importorskip("pyarrow")
    assert "cannot be read" in import_data(tmp_path / "hf", tmp_path / "out", status=1).errors[0]
    cells = [dict(bytes=(source / f"{n}.png").read_bytes(), path="") for n in range(3)]
    rows = [dict(input_image=cells[n:3], edit_prompt=["a\nb", "c"][n], edited_image=cells[n], mask=None)
            for n in range(2)]
    rows += [rows[0] | dict(input_image=[])]
    write_parquet(path, rows)
    write_parquet(path.with_name("test-00000-of-00001.parquet"), [rows[0] | dict(edit_prompt="held out")])
    for source in (tmp_path / "hf", path):
        got = import_data(source, tmp_path / f"out of {source.name}", "--skip_bad")
        assert [*got.samples.values()] == [(["a b"], [0, 0, 1, 2], None), (["c"], [1, 1, 2], None)]
        [error] = got.errors
        assert is_one_line(error, f"{path.name}: row 2", "empty control", "--skip_bad") and ".import-" not in got.err
        assert "not used" not in got.out

def test_one_instruction_serves_all_targets_that_have_none(tmp_path):
    source = put(tmp_path / "my photos", "after/cat.jpg before/cat.png after/dog.png before/dog.png", ["after/dog.txt"])
    flags = ["--target", source / "after", "--control", source / "before"]
    [error] = import_data(None, tmp_path / "none", *flags, status=1).errors
    assert "after/cat.jpg" in error and "--prompt" in error
    result = import_data(None, tmp_path / "out", *flags, "--prompt", "make it snow")
    assert {name: prompts for name, (prompts, *_) in result.samples.items()} == dict(cat=["make it snow"], dog=["go"])
    write_rows(tmp_path / "table.jsonl", dict(target="my photos/after/cat.jpg", control="my photos/before/cat.png"))
    [error] = import_data(tmp_path / "table.jsonl", tmp_path / "none", "--prompt", "go", status=1).errors
    assert error.startswith("error: --prompt")
    for words in ("", " ", "<|im_end|>"): # said once, not for each target
        [error] = import_data(None, tmp_path / "none", *flags, "--prompt", words, status=1).errors
        assert is_one_line(error, "--prompt")

def test_captions_of_several_lines_are_joined_and_those_beside_the_target_come_first(tmp_path):
    source = put(tmp_path / "edited-images", "cat.png dog.png").parent
    put(source / "reference-images", "cat.png dog.png", ["cat.txt", "dog.txt"])
    (source / "edited-images/cat.txt").write_text("a cat\nin  the rain\n", "utf-8")
    samples = import_data(source, tmp_path / "out").samples
    assert samples == {"cat": (["a cat in  the rain"], [0, 0], None), "dog": (["go"], [1, 1], None)}

def test_onetrainer_s_single_folder(tmp_path):
    """What is called like a mask, and has a caption, is a target."""
    pictures = "0001.jpg 0001-condlabel.png 0001-masklabel.png x.png x-condlabel.png x-masklabel.png"
    source = put(tmp_path / "concept", pictures, ["0001.txt", "x.txt", "x-masklabel.txt"])
    errors = import_data(source, tmp_path / "none", status=1).errors
    assert len(errors) == 1 and is_one_line(errors[0], "x-masklabel.png", "no control")
    got = import_data(source, tmp_path / "out", "--skip_bad").samples
    assert got == {"0001": (["go"], [0, 1], 2), "x": (["go"], [3, 4], None)}
    assert "leave --alone out" in import_data(source, tmp_path / "none", "--alone", status=1).errors[0]

def test_a_folder_with_a_table_is_read(tmp_path):
    """The documents' columns: file_name and *_file_name. Other splits lie beside it."""
    for n, name in enumerate(("metadata.csv", "metadata.jsonl")):
        hub = put(tmp_path / f"hub{n}", "0001.png in/0001.png test/0002.png")
        row = dict(edited_image_file_name="0001.png", original_image_file_name="in/0001.png", edit_prompt="go")
        row = row if n else dict(file_name="0001.png", original_file_name="in/0001.png", text="go")
        write_rows(hub / name, *([row] if n else [",".join(row), ",".join(row.values())]))
        write_rows(hub / "test/metadata.csv", "file_name", "gone.png")
        got = import_data(hub, tmp_path / f"out{n}")
        assert got.samples == {"000000-0001": (["go"], [0, 1], None)}
        assert "1 tables are not read: test/metadata.csv" in got.out

# ---- folders and columns that a person names -------------------------------------------------------------------------

def test_any_folders_are_taken_by_name(tmp_path):
    """Several controls, in their order, a mask, one folder in another; names match without their suffixes."""
    put(tmp_path, "my_lora/x/a.png my_lora/before/x/a.jpg ref/x/a.bmp masks_of_me/x/a.png", ["ref/x/a.txt"])
    flags = ["--target", tmp_path / "my_lora", "--control", tmp_path / "ref", tmp_path / "my_lora/before"]
    got = import_data(None, tmp_path / "out", *flags, "--mask", tmp_path / "masks_of_me")
    assert got.samples == {"x/a": (["go"], [0, 2, 1], 3)}
    twice = import_data(None, tmp_path / "twice", *flags[:4], "--control", tmp_path / "my_lora/before")
    assert twice.samples == {"x/a": (["go"], [0, 2, 1], None)}
    alone = import_data(None, tmp_path / "alone", "--target", tmp_path / "ref", "--alone")
    assert alone.samples == {"x/a": (["go"], [2], None)}

NAMES = { # targets; controls; the caption; the sample's name, or what is named
    "Lightroom": ("IMG_1-Edit.jpg IMG_2-Edit.jpg", "IMG_1.JPG IMG_2.JPG", "IMG_1-Edit", "IMG_1"),
    "both": ("a_after.png", "a_before.png", "a_after", "a"),
    "two controls": ("a_edited.png", "a_0.png a_1.png", "a_edited", "a"),
    "only some": ("a_after.png b.png", "a.png b.png", "b", "a"),
    "two of one name": ("a_after.png a.png c-Edit.png d-Edit.png", "a.png c.png d.png", "a",
                        ["a_after.png has the same"]),
    "of several kinds": ("IMG_E7.png b-Edit.png c~2.png d.png e_DxO.png", "IMG_7.png b.png c.png d.png e.png", "d",
                         "IMG_7"),
    "not edited": ("IMG_E7.png IMG_E8.png", "IMG_7.png IMG_8.png IMG_9.png", "IMG_E7", ["IMG_9.png: not used"]),
    "not in all": ("a_after.png c.png", "a.png d.png", "c", ["c.png: no control", "d.png: not used"]),
    "capitals": ("img_1.jpg", "IMG_1.JPG", "img_1", ["target img_1.jpg", "control IMG_1.JPG"]),
    "an ending alone": ("-Edit.png", "b.png", "-Edit", ["target -Edit.png", "control b.png"]),
    "raw": ("a.png", "", "a", ["a.CR2: not used: this script"])}
@pytest.mark.parametrize("kind", NAMES)
def test_endings_are_left_out_and_names_that_differ_are_shown(tmp_path, kind):
    targets, controls, caption, want = NAMES[kind]
    put(tmp_path / "after", targets), put(tmp_path / "before", controls)
    (tmp_path / f"after/{caption}.txt").write_text("go", "utf-8")
    for name in ("a.CR2", "a.gif") if kind == "raw" else ():
        write_rows(tmp_path / "before" / name, "")
    flags = ["--target", tmp_path / "after", "--control", tmp_path / "before", "--prompt", "go"]
    got = import_data(None, tmp_path / "out", *flags, status=int(isinstance(want, list)))
    if isinstance(want, str):
        assert got.samples[want] == (["go"], [0, *([0, 1] if kind == "two controls" else [0])], None)
        assert len(got.samples) == len(targets.split())
    else:
        assert all(any(is_one_line(error, named) for error in got.errors) for named in want), got.errors

SHARED = { # targets; controls of the same photographs, in this order; the line that says what is left out
    "Windows": ("cat - Copy, dog - Copy", "cat, dog", "* belongs to * - Copy"),
    "ComfyUI": ("after_00001_, after_00002_", "before_00001_, before_00002_", "before_*_ belongs to after_*_"),
    "darktable": ("cat_01, dog_01", "cat, dog", "* belongs to *_01"),
    "darktable's control": ("cat, dog", "cat_01, dog_01", "*_01 belongs to *"),
    "vipsthumbnail": ("cat, dog", "tn_cat, tn_dog", "tn_* belongs to *"),
    "a prefix": ("edit_cat, edit_dog", "cat, dog", "* belongs to edit_*"),
    "Chinese": ("\u732b\u540e, \u72d7\u540e", "\u732b\u524d, \u72d7\u524d", "*\u524d belongs to *\u540e"),
    "ten": ("after_9, after_10, after_11", "b9, b10, b11", "b* belongs to after_*"),
    # two photographs, or nobody knows
    "other photographs": ("IMG_2001, IMG_2002", "IMG_1001, IMG_1002", None),
    "other years": ("2025_1, 2025_2", "2024_1, 2024_2", None),
    "one more": ("tn_1, tn_2", "1, 2, 3", None),
    "two edits of one": ("a, a_b, c, c_b", "m_a_b, m_c_b", None),
    "off by one": ("tn_2, tn_3", "1, 2", None),
    "tens are no ones": ("after_0, after_1", "before_10, before_11", None),
    "a word is whole": ("cat, car", "bat, bar", None),
    "nothing left": ("cat, cat2", "cat-fs8, cat2-fs8", None),
    "one pair": ("tn_cat", "cat", None)}
@pytest.mark.parametrize("kind", SHARED)
def test_what_all_names_of_a_folder_share_is_no_part_of_them(tmp_path, kind):
    """The names that programs give: a line says what is left out. Never two targets for one control."""
    targets, controls, line = SHARED[kind]
    for folder, names in (("after", targets), ("before", controls)):
        for n, name in enumerate(names.split(", ")):
            save(PICTURES[n], tmp_path / folder / f"{name}.png")
    flags = ["--target", tmp_path / "after", "--control", tmp_path / "before", "--prompt", "go"]
    got = import_data(None, tmp_path / "out", *flags, status=int(line is None))
    if line:
        assert got.samples == {name: (["go"], [n, n], None) for n, name in enumerate(targets.split(", "))}
        assert f"{tmp_path / 'before'}: {len(got.samples)} names are matched" in got.out and line in got.out
    else:
        assert "must be the same on both sides); rename one side" in got.errors[0]

def test_each_folder_of_controls_and_masks_has_its_own_form(tmp_path):
    """With captions, beside the targets or a control. What was found is counted."""
    for folder, form in dict(after="{}_after", a="tn_{}", b="{}_after", m="{}-seg").items():
        for n, name in enumerate(["cat", "dog"]):
            save(hole(32 * n) if folder == "m" else PICTURES[n], tmp_path / folder / f"{form.format(name)}.png")
    (tmp_path / "after/cat_after.txt").write_text("sit", "utf-8")
    (tmp_path / "a/tn_dog.caption").write_text("run", "utf-8")
    folders = ["--target", tmp_path / "after", "--control", tmp_path / "a", tmp_path / "b", "--mask", tmp_path / "m"]
    got = import_data(None, tmp_path / "out", *folders)
    assert {name: sample[:2] for name, sample in got.samples.items()} == {
        "cat_after": (["sit"], [0, 0, 0]), "dog_after": (["run"], [1, 1, 1])}
    assert got.out.count("names are matched") == 2 and len(masks_of(tmp_path / "out")) == 2
    assert "2 with 2 controls (cat_after.png), 2 with a mask (cat-seg.png)." in got.out

@pytest.mark.parametrize("file, words", [
    ("data-00000-of-00001.arrow", "to_parquet"), ("train/data-00000-of-00001.arrow", "['train']"),
    ("shard-000000.tar", "tar xf")])
def test_other_containers_are_one_line_with_the_way_out(tmp_path, file, words):
    """What datasets.save_to_disk and webdataset write, as a folder and as a file."""
    path = write_rows(tmp_path / "source" / file, "")
    for source in (tmp_path / "source", path):
        [error] = import_data(source, tmp_path / "out", status=1).errors
        assert is_one_line(error, path, words)

def test_the_folders_that_are_given_are_only_read(tmp_path):
    put(tmp_path, "a/x.png b/x.png", ["a/x.txt"])
    for out in ("a/out", "b/x/out"):
        flags = ["--target", tmp_path / "a", "--control", tmp_path / "b"]
        [error] = import_data(None, tmp_path / out, *flags, status=1).errors
        assert is_one_line(error, out, "only read")

WRONG_FLAGS = { # flags, exit status, and what is named
    "--target a": (1, "--control DIR", "--alone"),
    "--target a --control a": (1, "both targets and controls"), "--target a --control gone": (1, "gone: no folder"),
    "--target a --control b --alone": (1, "leave --alone out"), "--target a --control b c": (1, "no control in", "c;"),
    "--target a --control b --columns target=x": (1, "--columns: ", "leave --columns out"),
    "--columns x=y": (2, "target=NAME"), "--columns target=": (2, "target=NAME")}
@pytest.mark.parametrize("flags", WRONG_FLAGS)
def test_flags_that_do_not_go_together_are_one_line(tmp_path, flags):
    put(tmp_path, "a/x.png b/x.png c/y.png", ["a/x.txt"])
    status, *named = WRONG_FLAGS[flags]
    flags = [tmp_path / word if word in ("a", "b", "c", "gone") else word for word in flags.split()]
    source = None if {"--target", "--control", "--mask"} & set(map(str, flags)) else tmp_path
    errors = import_data(source, tmp_path / "out", *flags, status=status).errors
    assert any(is_one_line(error, *named) for error in errors), errors

@pytest.mark.parametrize("kind", ["csv", "json", "parquet", "pictures inside"])
def test_columns_of_any_table_are_taken_by_name(tmp_path, kind):
    """Even where other columns have the names that are known."""
    source = put(tmp_path / "source", "a.png b.png c.png d.png")
    row = dict(dst="a.png", src="b.png", ref="c.png", instr="go", image="d.png", text="not this", hole="d.png")
    if kind in ("csv", "json"):
        rows = [row] if kind == "json" else ",".join(row) + "\n" + ",".join(row.values())
        path = write_rows(source / f"table.{kind}", rows)
    else:
        pytest.importorskip("pyarrow")
        if kind == "pictures inside":
            row |= {column: dict(bytes=(source / row[column]).read_bytes(), path="") for column in ("src", "dst")}
        path = write_parquet(source / "data.parquet", [row])
    flags = ["--columns", "target=dst", "control=src,ref", "prompt=instr", "mask=hole"]
    [sample] = import_data(path, tmp_path / "out", *flags).samples.values()
    assert sample == (["go"], [0, 1, 2], 3)
    repeated = ["--columns", "control=src", "target=dst", "control=ref", "--columns", "prompt=text"]
    [sample] = import_data(path, tmp_path / "two", *repeated).samples.values()
    assert sample == (["not this"], [0, 1, 2], None)
    for wrong, *named in (("control=src,reff", "no column reff, only dst, src"), ("control=instr", "go")):
        [error] = import_data(path, tmp_path / "none", *flags[:2], wrong, *flags[3:], status=1).errors
        assert is_one_line(error, *named), error
    [error] = import_data(path, tmp_path / "none", status=1).errors # src, dst, instr are nobody's names
    assert is_one_line(error, "=NAME", "--alone"), error

def test_masks_of_any_form_are_linked_as_they_are(tmp_path):
    """OneTrainer's, beside its target; and MagicBrush's table, whose masks are the source with a hole, of another size.
    read_mask understands them. What is not read is said once."""
    source, erased = put(tmp_path / "source", "a.jpg a-condlabel.png", ["a.txt"]), PICTURES[2].convert("RGBA")
    erased.putalpha(ImageOps.invert(hole()))
    save(erased.resize((128, 64), Image.NEAREST), source / "a-masklabel.png")
    row = dict(img_id="1", turn_index=1, source_img="a-condlabel.png", mask_img="a-masklabel.png", target_img="a.jpg",
               instruction="go", negative_prompt=None)
    table = write_rows(source / "rows.jsonl", row)
    for n, given in enumerate((source, table)):
        out = tmp_path / f"out{n}"
        said = import_data(given, out).out
        [mask], [path] = masks_of(out).values(), (out / "mask").iterdir()
        assert np.array_equal(mask, hole().resize((128, 64), Image.NEAREST))
        assert path.samefile(source / "a-masklabel.png")
    assert "columns that are not read: img_id, turn_index\n" in said

GAPS = { # a row's cells, beside target and prompt -> its number of controls, or an error
    "JSON without what is empty": ([dict(control_path_0="a.png"), dict(control_path_1="b.png")], "begin with number 1"),
    "an empty one between": (dict(control_1="a.png", control_2=None, control_3="c.png"), "numbered [1, 3]"),
    "an empty one before": (dict(control=None, control_1="b.png"), "numbered [1]"),
    "no column between": (dict(control_path_0="a.png", control_path_2="c.png"), "numbered [0, 2]"),
    "none before": (dict(control_2="a.png", control_3="c.png"), "numbered [2, 3]"),
    "padded numbers": (dict(control_01="a.png", control_03="c.png"), "numbered [1, 3]"),
    "a list": (dict(control=["a.png", None, "c.png"]), "None is not a picture"),
    "empty ones behind": (dict(control_1="a.png", control_2="b.png", control_3=None), 2),
    "the first without a number": (dict(control="a.png", control_1="b.png"), 2)}
@pytest.mark.parametrize("kind", GAPS)
def test_a_gap_in_numbered_controls_is_an_error_in_every_table(tmp_path, kind):
    """As in folders. --skip_bad leaves the row out, unless the rows' numbers mean different pictures."""
    cells, want = GAPS[kind]
    first, cells = cells if isinstance(cells, list) else ({name: "a.png" for name in cells}, cells)
    row = dict(target="d.png", prompt="put the hat of picture 3 on") | cells
    good = dict(target="c.png", prompt="go") | first
    put(tmp_path / "rows", "a.png b.png c.png d.png")
    tables = [write_rows(tmp_path / "rows/x.jsonl", good, row)]
    if "list" not in kind and "JSON" not in kind:
        lines = [",".join(str(cell or "") for cell in cells.values()) for cells in (good, row)]
        tables += [write_rows(tmp_path / "rows/x.csv", ",".join(row), *lines)]
        tables += [write_parquet(tmp_path / "rows/x.parquet", [good, row])] if find_spec("pyarrow") else []
    for table in tables:
        out = tmp_path / table.suffix
        if isinstance(want, int):
            assert len(import_data(table, out).samples["000001-d"][1]) == 1 + want
            continue
        errors = import_data(table, out, status=1).errors
        assert is_one_line(errors[-1], want)
        if len(errors) == 1 and "begin" not in want: # only this row has a gap
            assert list(import_data(table, out, "--skip_bad").samples) == ["000000-c"]

def test_of_several_tables_those_that_are_not_read_are_named(tmp_path):
    """train is a word of a name, not a part of one: constrained."""
    pytest.importorskip("pyarrow")
    for n, (files, samples, named) in enumerate([
            ("constrained pretrain", 2, ""), ("portrait_train free", 1, "free.parquet"),
            ("train-0 data/Train_1 validation-0 data/test", 2, "2 tables are not read"),
            ("data/validation-0 data/test-0", 2, "")]):
        source = put(tmp_path / str(n), "a.png b.png data/a.png data/b.png")
        for k, name in enumerate(files.split()):
            write_parquet(source / f"{name}.parquet", [dict(target="a.png", control="b.png", prompt=f"go {k}")])
        result = import_data(source, tmp_path / f"out{n}")
        told = [line for line in result.out.splitlines() if "not read" in line]
        assert len(result.samples) == samples and len(told) == bool(named) and named in "".join(told), result.out

def test_a_photograph_is_on_one_side_of_hold_out_with_all_its_edits_and_wordings(tmp_path):
    """Not each second name, which may be the same edit each time; and a target may have several controls."""
    rows = ["target,control,prompt"]
    for n in range(10):
        save(paint_picture(seed=n), tmp_path / f"rows/{n}.png")
        for kind in ("blue", "red"):
            save(paint_picture(seed=100 + 2 * n + (kind == "red")), tmp_path / f"rows/{n}_{kind}.png")
            rows += [f"{n}_{kind}.png,{n}.png,{words} {kind}" for words in ("make it", "now")]
    rows += ["3_red.png,3_blue.png,turn it", "black.png,4.png,off", "black.png,5.png,off"] # 4 and 5 are one by that
    save(paint_picture(seed=99), tmp_path / "rows/black.png")
    result = import_data(write_rows(tmp_path / "rows/x.csv", *rows), tmp_path / "out", "--hold_out", 4)
    sides = []
    for folder in ("out", "out_val"):
        samples = read_dataset(tmp_path / folder)[0]
        sides.append({Path(path).read_bytes() for s in samples for path in [s.target, *s.controls]})
    assert sides[0].isdisjoint(sides[1]) and 8 <= len(samples) <= 10, result.out
    prompts = sorted(sample.prompts[0] for sample in samples)
    assert sum("red" in prompt for prompt in prompts) >= 2 and sum("blue" in prompt for prompt in prompts) >= 2
    [error] = import_data(write_rows(tmp_path / "rows/one.csv", *rows[:3]), tmp_path / "none", "--hold_out", 2,
                          status=1).errors
    assert is_one_line(error, "of 1 photographs")

def test_a_prompt_of_several_lines_is_no_row(tmp_path):
    put(tmp_path / "rows", "a.png b.png")
    rows = ["target,control,prompt", 'a.png,b.png,"red,\nor blue, or green, and so on"']
    assert import_data(write_rows(tmp_path / "rows/x.csv", *rows), tmp_path / "out").samples

def test_what_a_dataset_lacks_or_shares_is_one_line(tmp_path):
    """A shard of a split; a picture on both sides of --hold_out."""
    pytest.importorskip("pyarrow")
    put(tmp_path / "rows", "a.png b.png c.png d.png")
    row = dict(target="a.png", control="b.png", prompt="go")
    for n in (0, 2):
        write_parquet(tmp_path / f"rows/train-0000{n}-of-00003.parquet", [row | dict(target="ac"[n // 2] + ".png")])
    said = import_data(tmp_path / "rows", tmp_path / "out", "--hold_out", 2).out
    assert "2 of 3 files train-*-of-00003.parquet are there" in said and "have a picture in common" in said

# ---- caches of version 1.0 -------------------------------------------------------------------------------------------

FORMS = ["padded", "unpadded", "shapes", "a batch of shapes"]

def as_version_1(tensors, form):
    """A dictionary as older code wrote it: sizes in pixels or img_shapes; a batch of 1 with pads, or no masks."""
    old, shapes, suffixes = dict(tensors), tensors["img_shapes"].long(), ["", "_control", "_control_1", "_control_2"]
    if form.endswith("shapes"):
        old |= dict(img_shapes=shapes[None] if form.startswith("a batch") else shapes, version=torch.tensor(1.0))
    else:
        del old["img_shapes"]
        for suffix, (_, height, width) in zip(suffixes, shapes.tolist()):
            old |= {"height" + suffix: torch.tensor(16 * height), "width" + suffix: torch.tensor(16 * width)}
    if form == "unpadded":
        return {k: v for k, v in old.items() if not k.endswith("s_mask")}
    for name, width in (("prompt_embed", 7), ("empty_prompt_embed", 3)):
        old[name] = torch.cat([old[name], old[name].new_full((width, old[name].shape[1]), torch.nan)])
        old[name + "s_mask"] = torch.nn.functional.pad(old[name + "s_mask"].to(torch.int64), (0, width))
    return {k: v[None] if k != "img_shapes" and v.ndim != 1 or k.endswith("mask") else v for k, v in old.items()}

def tensors_of(cache_dir, name):
    tensors, sample = load(cache_dir, name)
    return tensors | tensor_files.read_tensors(sample.texts["", True]["file"])[0]

@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """The same two samples as a cache of today and in the forms of version 1.0."""
    root = tmp_path_factory.mktemp("caches")
    add_item(root / "data", "cat", mask=paint_picture(mode="L"))
    add_item(root / "data", "dog", [(64, 32), (64, 64), (64, 64), (32, 64)])
    assert make_cache(root / "data", root / "new", "--caption_dropout_rate", 0.5, *NATIVE).status == 0
    for form, name in [(form, name) for form in FORMS for name in ("cat", "dog")]:
        (root / form).mkdir(exist_ok=True)
        old = as_version_1(tensors_of(root / "new", name), form)
        safetensors.torch.save_file(old, root / form / f"{name}.safetensors")
    return root

@pytest.mark.parametrize("form", FORMS)
def test_version_1_dictionaries_become_today_s_cache(tmp_path, caches, form):
    """To the bit; that one trains as today's: test_seeds.py."""
    [error] = import_data(caches / form, tmp_path / "out", "--prompt", "go", status=1).errors # it has its own
    assert is_one_line(error, "--prompt")
    import_data(caches / form, tmp_path / "out")
    for name in ("cat", "dog"):
        assert_same(tensors_of(tmp_path / "out", name), tensors_of(caches / "new", name))
        got, want = [index_of(folder)[name] for folder in (tmp_path / "out", caches / "new")]
        assert got.sizes == want.sizes and got.encodings[0]["img_shapes"] == want.encodings[0]["img_shapes"]

SPOILS = [dict(height=None), dict(width_control=None), dict(pixel_latent=None), dict(height=torch.tensor([32])),
          dict(height=torch.tensor([[64, 64, 64]])), dict(prompt_embeds_mask=torch.ones(3)), {}, # of another version
          dict(version=torch.tensor(3.0)), dict(version=torch.tensor([1, 0])), dict(edit_mask=torch.ones(3)),
          dict(img_shapes=torch.tensor([[1, -4, -4], [1, 4, 4]])), dict(img_shapes=torch.ones(2, 2)),
          dict(img_shapes=torch.tensor([[16, 1, 1], [1, 4, 4]])), dict(pixel_latent=torch.zeros(2, 16, 64)),
          dict(pixel_latent=torch.full((1, 16, 64), torch.nan)), dict(pixel_latent=torch.zeros(1, 16, 64).long()),
          dict(prompt_embeds_mask=torch.zeros(1, 0), prompt_embed=torch.zeros(1, 0, 64))]
def test_every_broken_dictionary_is_named_and_the_others_are_converted(tmp_path, caches):
    source = shutil.copytree(caches / "padded", tmp_path / "old")
    for n, spoil in enumerate(SPOILS):
        tensors = safetensors.torch.load_file(source / "cat.safetensors") | spoil
        tensors = {k: v for k, v in tensors.items() if v is not None}
        version = "1.0" if spoil else "1.7"
        safetensors.torch.save_file(tensors, source / f"x{n:02}.safetensors", dict(version=version))
    errors = import_data(source, tmp_path / "out", status=1).errors
    assert len(errors) == len(SPOILS) and all(f"/x{n:02}.safetensors: " in error for n, error in enumerate(errors))
    assert "version 1.7)" in errors[6] and "version 1.0, 3.0" in errors[7]
    assert import_data(source, tmp_path / "out", "--skip_bad").errors == errors
    assert index_of(tmp_path / "out").keys() == {"cat", "dog"}
