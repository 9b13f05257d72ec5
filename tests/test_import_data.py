"""
tools/import_data.py: what comes out is what went in; what is wrong is named, and then nothing comes out.

$ python -m pytest -q tests/test_import_data.py    # 20 seconds; one test needs the package datasets
"""
import json
import pickle
import shutil
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from models import assert_same, index_of, is_one_line, load, make_cache, refused, train

import cache
import common
import predict
from test_consistency import NATIVE, add_item, draw_picture, run_script, save

PICTURES = [np.asarray(draw_picture((64, 32), seed=n)) for n in range(6)] # told apart by their numbers

def put(source, files, captions=()):
    """Pictures 0, 1, ... under these names, and captions."""
    for n, name in enumerate(files.split()):
        save(draw_picture((64, 32), seed=n), source / name)
    for name in captions:
        (source / name).write_text("go")
    return source

def import_data(source, out, *flags, status=0):
    """-> result with the samples by name: prompts, numbers of target and controls, number of the mask."""
    result = run_script("tools/import_data.py", source, out, *flags)
    assert result.status == status and out.exists() != bool(status), result.err
    assert all(map(is_one_line, result.errors)) and not list(out.parent.glob(".import-*"))
    no_dataset = status or list(out.glob("*.json")) # but a cache
    found, problems = ([], []) if no_dataset else common.read_dataset(out)
    assert not problems and (result.errors or not status)
    number = lambda path: path and [np.array_equal(common.read_image(path), p) for p in PICTURES].index(True)
    result.samples = {s.name: (s.prompts, [*map(number, [s.target, *s.controls])], number(s.mask)) for s in found}
    return result

# ---- layouts ---------------------------------------------------------------------------------------------------------

FOLDERS = { # files that hold target, first and second control and mask of cat
    "ours": "target/cat.png control/cat.png control/cat_1.png mask/cat.png",
    "qwen-image-finetune": "training_images/cat.png control_images/cat.bmp control_images/cat_control_1.png "
                           "control_images/cat_mask.png",
    "mask beside the target": "targets/cat.png controls/cat.png controls/cat_1.PNG targets/cat_mask.png",
    "musubi-tuner": "images/cat.png control/cat_0000.png control/cat_0001.png masks/cat_mask.png",
    "below a folder": "target/a/cat.png control/a/cat.png control/a/cat_1.png mask/a/cat.png"}
@pytest.mark.parametrize("layout", FOLDERS)
def test_folders_of_other_trainers_give_the_same_sample(tmp_path, layout):
    """The source stays as it is, and the pictures take no space."""
    target, *_ = files = FOLDERS[layout].split()
    source = put(tmp_path / "source", FOLDERS[layout], [target.replace(".png", ".txt")])
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

def write_rows(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text, encoding="latin-1")
    return path

def test_names_and_prompts_are_made_such_that_the_folders_mean_the_same(tmp_path):
    """Rows share a target; a name looks like another's further control, or has no suffix; prompts have line breaks."""
    source = put(tmp_path / "source", "cat.png cat_1.png x/cat.png")
    (source / "x/cat.png").rename(source / "x/.cat")
    rows = [dict(zip(("target", "control", "prompt"), row)) for row in (
        ("cat.png", "cat_1.png", ["a\nb", "c"]), ("cat.png", "x/.cat", "d"),
        ("cat_1.png", ["x/../cat.png", "x/.cat"], "e\0f\r\n "), ("x/.cat", "cat.png", "red " * 40_000))]
    got = import_data(write_rows(source / "m.jsonl", *rows), tmp_path / "out").samples.values()
    assert [pictures for _, pictures, _ in got] == [[0, 1], [0, 2], [1, 0, 2], [2, 0]]
    assert [prompts for prompts, _, _ in got] == [["a b", "c"], ["d"], ["e f"], ["red " * 39_999 + "red"]]

def test_pictures_without_controls_become_a_folder_without_controls(tmp_path):
    path = put(tmp_path / "source", "a.png b.png") / "faces.csv"
    write_rows(path, "image,text", "a.png,a face", "b.png,the face")
    assert len(import_data(path, tmp_path / "out", status=1).errors) == 2 # without the flag a control is missing
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

def test_everything_wrong_in_folders_is_listed_and_the_rest_can_be_had(tmp_path):
    """Then nothing is written, unless --skip_bad says so."""
    source = tmp_path / "source"
    for name in "good lonely gap empty twins two two_1 m m_1 masked silent".split():
        put(source, f"target/{name}.png control/{name}{'_0000' * (name in ('m', 'm_1'))}.png", [f"target/{name}.txt"])
    for file in ("control/gap_2.png", "control/twins.jpg", "mask/masked.png", "control/masked_mask.png",
                 "control/stray.png", "control/good.gif", "mask/sub/x.png"):
        save(draw_picture(), source / file)
    (source / "target/silent.txt").unlink(), (source / "control/lonely.png").unlink()
    (source / "target/empty.txt").write_text(" \n")
    (source / "control/link").symlink_to("../target")
    write_rows(source / "metadata.jsonl", {})
    wrong = """target/lonely.png target/gap.png target/empty.txt control/twins control/two_1.png target/m_1.png
               mask/masked.png target/silent.png stray.png good.gif x.png control/link metadata.jsonl""".split()
    errors = import_data(source, tmp_path / "out", status=1).errors
    assert not [named for named in wrong if not any(named in error for error in errors)]
    got = import_data(source, tmp_path / "out", "--skip_bad")
    assert got.errors == errors and got.samples == dict.fromkeys(["good", "m"], (["go"], [0, 1], None))

ROW = dict(target="a.png", control=["b.png"], prompt="go")
BAD_ROWS = { # line 2 of a manifest, and what is named beside the line's number
    "no JSON": ('{"target": "a.png", ',), "no object": (["a.png"],), "deep": ("[" * 100_000,),
    "no target": (ROW | dict(target=None), "target"), "no control": (ROW | dict(control=[]), "control"),
    "number": (ROW | dict(control=["b.png", 5]), "5"), "NaN": (ROW | dict(prompt=float("nan")), "prompt"),
    "blank prompt": (ROW | dict(prompt=" "), "prompt"), "missing": (ROW | dict(control="tom.png"), "tom.png"),
    "outside": (ROW | dict(control=["../secret.png"]), "../secret.png"), "link": (ROW | dict(mask="link.png"), "link"),
    "duplicate": (ROW | dict(target="x/../a.png", prompt="so"), "m.jsonl:1"), "csv: few": ("a.png,b.png", "prompt"),
    "two masks": (ROW | dict(mask=["c.png"] * 2), "masks"), "two targets": (ROW | dict(image="a.png"), "image"),
    "mixed": (ROW | dict(source_1="c.png"), "source_1"), "spelled": (ROW | dict(control_path="b.png"), "control_path"),
    "csv: no prompt": ("a.png,b.png,", "prompt"), "csv: NaN": ("a.png,b.png,NaN", "prompt"),
    "csv: no control": ("a.png,,go", "control"), "csv: no quotes": ("a.png,b.png,make it red, not blue", "comma")}
@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_named_by_line_and_column(tmp_path, kind):
    source, (row, *named) = put(tmp_path / "source", "a.png b.png c.png x/d.png ../secret.png"), BAD_ROWS[kind]
    (source / "link.png").symlink_to("../secret.png")
    name, *good = ("m.jsonl", ROW | dict(prompt="so")) if not kind.startswith("csv") else (
        "m.csv", "target,control,prompt", "a.png,b.png,so")
    got = import_data(write_rows(source / name, *good, row), tmp_path / "out", "--skip_bad")
    assert list(got.samples.values()) == [(["so"], [0, 1], None)]
    assert len(got.errors) == 1 and is_one_line(got.errors[0], f"{name}:{len(good) + 1}", *named), got.errors

UNKNOWN = { # files of a folder, what is in them, and what is named
    "no dataset": ("after/cat.png", "", "after", "target/NAME.png"), "no JSON": ("metadata.json", "{", "JSON list"),
    "two names": ("target/a.png images/a.png", "", "images"), "Latin-1": ("metadata.csv", "caf\xe9", "UTF-8"),
    "two manifests": ("metadata.csv metadata.json", "", "two"), "no samples": ("target/notes.md", "", "no sample"),
    "no header": ("metadata.csv", "a.png,b.png,go\na.png,b.png,go\n", "no target"),
    "two columns": ("metadata.csv", "target,control,prompt,prompt\na.png,b.png,go,go\n", "two columns"),
    "open quote": ("metadata.csv", 'target,"control,prompt\na.png,b.png,go\n', "close its quote"),
    "open cell": ("metadata.csv", 'target,control,prompt\na.png,b.png,x\na.png,b.png,"go\na.png,b.png,so\n', "csv:2"),
    "a configuration": ("config.toml", "[general]", "config.toml"),
    "two folders of controls": ("target/a.png control1/a.png control2/a.png", "", "control1, control2")}
@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_source_that_cannot_be_understood_is_named(tmp_path, kind):
    files, text, *named = UNKNOWN[kind]
    for file in files.split():
        write_rows(tmp_path / "source" / file, text)
    errors = import_data(tmp_path / "source", tmp_path / "out", status=1).errors
    assert len(errors) == 1 and is_one_line(errors[0], tmp_path / "source", *named), errors

def test_parquet_files_become_a_dataset_if_something_here_can_read_them(tmp_path, monkeypatch):
    source, path = put(tmp_path / "source", "0.png 1.png 2.png"), tmp_path / "hf/data/train-00000-of-00001.parquet"
    write_rows(path, "PAR1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in import_data(tmp_path / "hf", tmp_path / "out", status=1).errors[0]
    monkeypatch.undo()
    pytest.importorskip("datasets")
    import pyarrow.parquet
    assert "cannot be read" in import_data(tmp_path / "hf", tmp_path / "out", status=1).errors[0]
    cells, image = [dict(bytes=(source / f"{n}.png").read_bytes(), path="") for n in range(3)], dict(_type="Image")
    table = pyarrow.table(dict(input_image=[cells, cells[1:], []], edit_prompt=["a\nb", "c", "d"], edited_image=cells))
    types = dict(input_image=[image], edit_prompt=dict(_type="Value", dtype="string"), edited_image=image)
    table = table.replace_schema_metadata({"huggingface": json.dumps(dict(info=dict(features=types)))})
    pyarrow.parquet.write_table(table, path)
    got = import_data(tmp_path / "hf", tmp_path / "out", "--skip_bad")
    assert [*got.samples.values()] == [(["a b"], [0, 0, 1, 2], None), (["c"], [1, 1, 2], None)]
    assert len(got.errors) == 1 and is_one_line(got.errors[0], "hf: row 2", "control")

# ---- caches of version 1.0, and pickles ------------------------------------------------------------------------------

def as_version_1(tensors, padded):
    """A dictionary as older code wrote it: sizes in pixels for img_shapes; a batch of 1 with pads, or no masks."""
    shapes, suffixes = tensors.pop("img_shapes").tolist(), ["", "_control", "_control_1", "_control_2"]
    old = tensors | {side + suffix: torch.tensor(16 * n) for suffix, (_, *sides) in zip(suffixes, shapes)
                     for side, n in zip(("height", "width"), sides)}
    if not padded:
        return {k: v for k, v in old.items() if not k.endswith("s_mask")}
    for name, width in (("prompt_embed", 7), ("empty_prompt_embed", 3)):
        old[name] = torch.cat([old[name], old[name].new_full((width, old[name].shape[1]), torch.nan)])
        old[name + "s_mask"] = torch.nn.functional.pad(old[name + "s_mask"].to(torch.int64), (0, width))
    return {k: v[None] if v.ndim != 1 or k.endswith("mask") else v for k, v in old.items()}

def tensors_of(cache_dir, name):
    tensors, sample = load(cache_dir, name)
    return tensors | common.read_tensors(sample.texts["", True]["file"])[0]

@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """The same two samples as a cache of today and in two forms as version 1.0."""
    root = tmp_path_factory.mktemp("caches")
    add_item(add_item(root / "data", "cat", mask=draw_picture()), "dog", [(64, 32), (64, 64), (64, 64), (32, 64)])
    assert make_cache(root / "data", root / "new", "--caption_dropout_rate", 0.5, *NATIVE).status == 0
    for form, name in [(form, name) for form in ("padded", "unpadded") for name in ("cat", "dog")]:
        (root / form).mkdir(exist_ok=True)
        old = as_version_1(tensors_of(root / "new", name), form == "padded")
        safetensors.torch.save_file(old, root / form / f"{name}.safetensors")
    return root

@pytest.mark.parametrize("form", ["padded", "unpadded"])
def test_version_1_dictionaries_become_today_s_cache(tmp_path, caches, form):
    import_data(caches / form, tmp_path / "out")
    for name in ("cat", "dog"):
        assert_same(tensors_of(tmp_path / "out", name), tensors_of(caches / "new", name))
        got, want = [index_of(folder)[name] for folder in (tmp_path / "out", caches / "new")]
        assert got.sizes == want.sizes and got.resolutions[0]["img_shapes"] == want.resolutions[0]["img_shapes"]

def test_they_train_as_today_s_cache_does(tmp_path, caches):
    import_data(caches / "padded", tmp_path / "out")
    new, old = [train(index, tmp_path, "--caption_dropout_rate", 0.5)
                for index in (caches / "new/tiny-data.json", tmp_path / "out/padded.json")]
    assert len(new.losses) == 2 and old.losses == new.losses, old.err

SPOILS = [dict(height=None), dict(width_control=None), dict(pixel_latent=None), dict(height=torch.tensor([32])),
          dict(height=torch.tensor([[64, 64, 64]])), dict(prompt_embeds_mask=torch.ones(3)),
          dict(pixel_latent=torch.zeros(16)), dict(edit_mask=torch.ones(3)), {}] # the last one of another version
def test_every_broken_dictionary_is_named_and_the_others_are_converted(tmp_path, caches):
    source = shutil.copytree(caches / "padded", tmp_path / "old")
    for n, spoil in enumerate(SPOILS):
        tensors = safetensors.torch.load_file(source / "cat.safetensors") | spoil
        tensors = {k: v for k, v in tensors.items() if v is not None}
        safetensors.torch.save_file(tensors, source / f"{n}.safetensors", dict(version="1.7" if n == 8 else "1.0"))
    errors = import_data(source, tmp_path / "out", status=1).errors
    assert len(errors) == 9 and all(f"/{n}.safetensors: " in e for n, e in enumerate(errors)) and "1.7" in errors[-1]
    assert import_data(source, tmp_path / "out", "--skip_bad").errors == errors
    assert index_of(tmp_path / "out").keys() == {"cat", "dog"}

@pytest.mark.parametrize("write", [torch.save, pickle.dump])
def test_no_pickle_is_ever_opened(tmp_path, write):
    Bomb = type("Bomb", (), dict(__reduce__=lambda self: (open, (str(tmp_path / "marker"), "w")))) # makes a file
    for file in [tmp_path / f"a{suffix}" for suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors")]:
        with open(file, "wb") as f:
            write(Bomb(), f)
        for read in (common.read_tensors, predict.read_lora):
            with refused(file):
                read(file)
    errors = import_data(tmp_path, tmp_path / "out", status=1).errors
    assert ["save_file" in e for e in errors] == [True] * 5 + [False] and not (tmp_path / "marker").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert (tmp_path / "marker").exists() # so it would have gone off
