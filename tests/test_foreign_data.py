"""
Datasets, job lists, tables, caches and indexes from strangers are data: they choose no file outside, cost no more than
they should, and whatever is in them ends in one line. The last claim is for many seeds: pytest --fuzz 2000.
"""
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import common
from library.cli import command_line
from library.data import dataset, index_file, picture_files, stat_cache
from library.files import tensor_files
from library.results import contact_sheets
import predict
from tests.fuzz import STRANGE, fuzz
from tests.harness import (NATIVE, add_item, copy_model, is_one_line, make_cache, paint_picture, refused,
                           run_script, samples_of, save, train, within)
from tests.import_sources import put, write_parquet, write_rows
from tools import import_configs, import_data

SECRET = "KEY-5fa1"

# ---- links and paths -------------------------------------------------------------------------------------------------

def link_to(data, file, outside):
    """It puts a link to a file or folder outside of the dataset in the place of one inside."""
    path = data / file
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(outside)

@pytest.fixture
def outside(tmp_path):
    """A folder that no dataset is in: a key, a picture with it in its notes, and a folder of controls."""
    folder = tmp_path / "home"
    add_item(folder, "cat", caption=SECRET)
    (folder / "key.txt").write_text(SECRET, "utf-8")
    return folder

LINKS = {"target/cat.png": "target/cat.png", "target/cat.txt": "key.txt", "control/cat.png": "control/cat.png",
         "mask/cat.png": "target/cat.png", "control": "control"}

@pytest.mark.parametrize("file", LINKS)
def test_a_folders_link_that_leads_out_is_one_line_and_its_content_is_not_read(data, outside, tmp_path, plus, file):
    """As in a manifest. Neither the doctor's report nor a copy that import_data.py makes holds anything of it."""
    link_to(data, file, outside / LINKS[file])
    content = (outside / LINKS[file]).read_bytes() if file != "control" else b"\0" * 99
    if file == "control":
        with refused(data / file, "leads out", "cp -rL"):
            dataset.read_dataset(data)
    else:
        samples, problems = samples_of(plus, data)
        assert list(samples) == ["good"] and is_one_line(*problems, data / file, "leads out", "cp -rL")
    written = tmp_path / "written"
    run_script("tools/doctor.py", data, "--out", written / "doctor", "--align", written / "aligned")
    result = run_script("tools/import_data.py", data, written / "copy", "--skip_bad")
    assert [error for error in result.errors if "leads out" in error]
    for path in filter(Path.is_file, written.rglob("*")):
        assert SECRET.encode() not in path.read_bytes() and path.read_bytes() != content, path
    result = make_cache(data, tmp_path / "c", *NATIVE)
    assert result.status == 1 and is_one_line(result.errors[0], data / file, "leads out")
    assert os.system(f"cp -rL {data} {tmp_path / 'whole'}") == 0 # the remedy works
    assert not any("leads out" in problem for problem in dataset.read_dataset(tmp_path / "whole")[1])

def test_links_inside_of_a_dataset_and_a_link_to_it_are_followed(data, tmp_path, plus):
    link_to(data, "control/cat.png", "../target/good.png")
    link_to(data, "target/cat.txt", "good.txt")
    (tmp_path / "link").symlink_to(data)
    for root in (data, tmp_path / "link"):
        samples, problems = samples_of(plus, root)
        assert sorted(samples) == ["cat", "good"] and not problems

def image_flags(folder, out_dir):
    return type("Flags", (), dict(jobs=None, image=[Path(folder)], prompt="go", out_dir=Path(out_dir)))

def test_image_folder_leaves_out_what_leads_out_and_a_picture_that_is_named_may_be_a_link(data, outside, tmp_path):
    link_to(data, "control/cat.png", outside / "control/cat.png")
    samples, problems = dataset.read_samples(image_flags(data / "control", tmp_path / "out"))
    assert [s.name for s in samples] == ["good"] and is_one_line(*problems, "control/cat.png", "leads out")
    samples, problems = dataset.read_samples(image_flags(data / "control/cat.png", tmp_path / "out"))
    assert len(samples) == 1 and not problems

def test_jobs_jsonl_may_name_any_picture_and_a_dataset_given_as_jobs_may_not(data, outside, tmp_path):
    line = json.dumps(dict(control=[str(outside / "control/cat.png")], prompt="go"))
    for name, count in (("jobs.jsonl", 1), ("metadata.jsonl", 0)):
        write_rows(tmp_path / "list" / name, line)
        for root in [tmp_path / "list" / name, tmp_path / "list"][:2 - count]:
            samples, problems = dataset.read_dataset(root, is_job=True)
            assert (len(samples), len(problems)) == (count, 1 - count)
            assert not problems or is_one_line(problems[0], "metadata.jsonl:1", "is no file")

@pytest.mark.parametrize("out", ["../x.png", "/tmp/x.png", "link/x.png", "link/sub/x.png", "a/../../x.png"])
def test_a_lines_out_stays_below_out_dir_after_links_too(data, outside, tmp_path, out):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/link").symlink_to(outside)
    before = set(tmp_path.rglob("*.png"))
    jobs = write_rows(tmp_path / "jobs.jsonl", dict(image=str(data / "control/cat.png"), prompt="go", out=out))
    result = run_script("predict.py", "--jobs", jobs, "--out_dir", tmp_path / "out", "--cache_dir", tmp_path / "c")
    assert result.status == 1 and is_one_line(result.errors[0], "out", "below --out_dir")
    assert set(tmp_path.rglob("*.png")) == before

def test_a_table_or_a_folder_that_is_found_is_no_link_to_elsewhere(outside, tmp_path):
    write_rows(outside / "metadata.csv", "target,control,prompt", f"{outside}/target/cat.png,b.png,{SECRET}")
    shutil.copy(outside / "metadata.csv", outside / "rows.parquet")
    for name in ("metadata.csv", "data.parquet", "data"):
        source = tmp_path / f"source-{name}"
        source.mkdir()
        (source / name).symlink_to(outside if name == "data" else outside / "metadata.csv")
        result = run_script("tools/import_data.py", source, tmp_path / "out")
        assert result.status == 1 and is_one_line(result.errors[0], source / name, "leads out")
        assert SECRET not in result.err + result.out

def test_a_table_that_is_named_may_name_pictures_and_nothing_else(data, outside, tmp_path):
    """A key that it calls a control is not copied."""
    row = dict(target=str(data / "target/cat.png"), control=str(outside / "key.txt"), prompt="go")
    result = run_script("tools/import_data.py", write_rows(tmp_path / "list/rows.jsonl", row), tmp_path / "out")
    assert result.status == 1 and is_one_line(result.errors[0], "key.txt")
    assert SECRET not in result.err + result.out and not (tmp_path / "out").exists()

NO_TABLES = { # a person's own file of another kind, which holds a key
    "csv": f"machine hub.co login me password {SECRET}\n", "json": json.dumps(dict(token=SECRET)),
    "jsonl": json.dumps([SECRET]) + "\n" + json.dumps(SECRET), "parquet": SECRET, "yaml": f"machine: [{SECRET}",
    "toml": f"machine = {SECRET}", "txt": SECRET}

@pytest.mark.parametrize("kind", NO_TABLES)
def test_what_is_no_table_is_not_quoted_where_a_strangers_file_or_link_leads_to_it(tmp_path, outside, kind):
    """The line of the error says what to do, and nothing of what is in the file."""
    key, link, config = outside / f"key.{kind}", tmp_path / f"set/rows.{kind}", tmp_path / "set/d.toml"
    config.parent.mkdir()
    key.write_text(NO_TABLES[kind], "utf-8")
    link.symlink_to(key)
    for name in (link.name, str(key), f"../home/{key.name}", ""):
        config.write_text(f"[[datasets]]\nimage_jsonl_file = {json.dumps(name)}", "utf-8")
        result = run_script("tools/import_data.py", config if name else link, tmp_path / "out")
        named = ("lies outside of", "give this file itself as SOURCE") if name else ("leads out",)
        assert result.status == 1 and is_one_line(*result.errors, f".{kind}", *named)
        assert SECRET not in result.out + result.err

@pytest.mark.parametrize("name", ["jobs.jsonl", "metadata.jsonl"])
def test_a_manifest_that_is_a_link_is_not_quoted(tmp_path, outside, name):
    """Of one that lies there the line is."""
    (outside / name).write_text(f'["prompt", "{SECRET}"]', "utf-8")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).symlink_to(outside / name)
    for folder, is_quoted in ((tmp_path / "set", False), (outside, True)):
        samples, problems = dataset.read_dataset(folder / name, is_job=name == "jobs.jsonl")
        assert not samples and is_one_line(*problems, f"{name}:1") and (SECRET in problems[0]) == is_quoted

@pytest.mark.parametrize("name", ["metadata.jsonl", "x.json", "metadata.csv"])
def test_a_manifest_a_table_and_an_index_have_a_gigabyte_at_most(tmp_path, name):
    with (tmp_path / name).open("wb") as f:
        f.truncate(2**31)
    read = dict(json=index_file.read_index, jsonl=dataset.read_dataset).get(name.split(".")[1])
    with within(5), refused(name, "over 1,073,741,824 bytes"):
        if read:
            read(tmp_path / name)
        run = run_script("tools/import_data.py", tmp_path / name, tmp_path / "out")
        raise common.InputError(run.errors[0].removeprefix("error: "))

@pytest.mark.parametrize("content", ["[]", "5", '{"a": 5}', '{"a": [1]}', None])
def test_a_foreign_list_of_known_pictures_is_left_aside(tmp_path, content):
    """Though its digest is right; and a FIFO of its name."""
    path = tmp_path / "pictures.txt"
    path.write_text(f"{stat_cache.digest_of(content)}\n{content}", "utf-8") if content else os.mkfifo(path)
    with within(5):
        assert stat_cache.read_memory(path) == {}

def test_of_a_foreign_cache_no_file_of_gigabytes_is_read_whole(tmp_path, monkeypatch):
    """Neither a list of what is known, nor the index in the place of a new one: they are left aside."""
    for name in ("pictures.txt", "x.json"):
        with (tmp_path / name).open("wb") as f:
            f.write(b'{"version": "2.0", "models"')
            f.truncate(3 * 10**9)
    for method in ("read_text", "read_bytes"):
        monkeypatch.setattr(Path, method, lambda *_: pytest.fail("read"))
    assert stat_cache.read_memory(tmp_path / "pictures.txt") == {}
    index_file.write_index(tmp_path / "x.json", [], {}, {})
    assert (tmp_path / "x.json").stat().st_size < 1000

@pytest.mark.parametrize("size, named", [(2**31, "over 1,048,576 bytes"), (900_000, "prompt of 900,000 letters")])
def test_a_caption_has_limits_before_anything_reads_it(data, plus, size, named):
    with (data / "target/cat.txt").open("wb") as f:
        f.write(b"go" * 450_000)
        f.truncate(size) # two gigabytes, which take no space
    with within(5):
        samples, problems = samples_of(plus, data)
    assert list(samples) == ["good"] and is_one_line(*problems, "target/cat.txt", named)

def test_a_merged_model_holds_no_file_that_a_link_of_the_model_names(outside, tmp_path, two_loras):
    model = copy_model(tmp_path / "model")
    (model / "tokenizer/notes.txt").symlink_to(outside / "key.txt")
    result = run_script("tools/convert_lora.py", two_loras[0], "--to", "model", "--model", model, "--out",
                        tmp_path / "merged", "--dtype", "float32")
    assert result.status == 1 and is_one_line(result.errors[0], "tokenizer/notes.txt", "leads out")
    assert not (tmp_path / "merged").exists()

PRUNED = {"latents": lambda c, other: link_to(c, "latents", other / "latents"),
          "text": lambda c, other: link_to(c, "text", other / "text"),
          "index": lambda c, other: (c / "x.json").symlink_to(next(other.glob("*.json"))),
          "plan": lambda c, other: (c / f".planned-{'0' * 32}").symlink_to(next(other.glob("*.json"))),
          "names": lambda c, other: rename_files(next(c.glob("*.json")), str(other / "latents")),
          "up": lambda c, other: rename_files(next(c.glob("*.json")), "../other/latents")}

def rename_files(index, folder):
    index.write_text(index.read_text("utf-8").replace('"latents/', f'"{folder}/'), "utf-8")

@pytest.mark.parametrize("kind", PRUNED)
def test_prune_deletes_nothing_outside_of_its_cache(data, tmp_path, small, kind):
    shutil.copytree(small.cache, tmp_path / "cache"), shutil.copytree(small.cache, tmp_path / "other")
    for file in (tmp_path / "other").glob("*/*"):
        file.rename(file.with_stem(f"{int(file.stem, 16) ^ 1:032x}")) # which the cache does not know
    before = sorted((tmp_path / "other").rglob("*"))
    PRUNED[kind](tmp_path / "cache", tmp_path / "other")
    result = run_script("tools/prune.py", tmp_path / "cache", "--delete")
    assert result.status == 1 and len(result.errors) == 1 and is_one_line(result.errors[0]), result.err
    assert sorted((tmp_path / "other").rglob("*")) == before

# ---- indexes ---------------------------------------------------------------------------------------------------------

NAMES = ["/abs", "../../x", "a/../../x", "", ".", "a/.", "a//b", "a/" * 2000 + "a", "D:x",
         "a\0b", "..\\x", "C:\\x", "\\\\host\\x", "x" * 300, 5, None, ["a"],
         "\ud800"]
FILES = ["/etc/passwd", "../latents/x.safetensors", "latents/../../x.safetensors", "latents/x", "", 5, None, ["a"],
         f"latents/{'0' * 32}.pt", f"elsewhere/{'0' * 32}.safetensors"]
SHAPES = [[[1, -4, 4], [1, 4, 4]], [[1, 4, 10**12], [1, 4, 4]], [[2, 4, 4], [1, 4, 4]], [[1, 4], [1, 4, 4]], [], "abc",
          [[1, 4.5, 4], [1, 4, 4]], [[True, 4, 4], [1, 4, 4]], [[1, 9000, 4], [1, 4, 4]], [[1, 4, 4]] * 3, None, 4,
          [[1, 4, 4]] * 10**4, [[[1]], [[4]]], [[1, float("nan"), 4], [1, 4, 4]], {"1": 2}, [[1, "4", 4], [1, 4, 4]]]
HASHES = ["", "0", "0" * 63, "0" * 64 + " in sRGB ", "0" * 64 + "\n", "Z" * 64, " in sRGB", None, 5]
BAD_FIELDS = { # place in an index, * is the first one: values that cache.py would not write there
    "samples * name": NAMES, "samples * root": NAMES, "samples * encodings * file": FILES,
    "samples * texts * 2 file": [str(file).replace("latents", "text") for file in FILES],
    "samples * encodings * img_shapes": SHAPES, "samples * contents *": HASHES,
    "samples * texts * 2 tokens": [-1, 0, 10**9, 1.5, "5", None, True, [5]],
    "samples * repeats": [0, -1, 10**9, 1.5, "5", None, True], "samples * prompts": [[], "go", [5], None, {"go": 1}],
    "samples * controls": ["a", [5], None, ["a"] * 9, ["a\0b"]],
    "samples * sizes": [5, [5], [[0, 5]], [["a", 5]], [[1, 2, 3]], None],
    "geometry target_pixels": [[], ["x"], ["abc"], [-4], [10**9], "native", None, [1.5], [float("inf")]],
    "geometry control_pixels": [["x"], "abc", -4, 10**10], "geometry upscale": ["yes"], "geometry x": [1],
    "geometry": [5], "samples * contents": [[1], {}],
    "samples * target": [5, None, "/a/" + "x" * 300], "roots": [["/" + "x" * 300], ["a\0b"], "a"],
    "samples * mask": [["a"]], "samples * encodings": [[], 5],
    "samples * encodings * mask": ["x"], "samples * prompt_sizes": ["abc"], "samples * texts": [{}, []],
    "samples * texts * 0": [5], "samples * texts * 1": [1], "samples * texts * 2": ["abc"], "samples * evil": [1],
    "samples": [{"a": 1}, [], [5], 5], "models": [[1]], "version": [None]}
OTHER_INDEXES = {
    "no name": lambda index: index["samples"][0].pop("name"),
    "many uses": lambda index: index.update(samples=[index["samples"][0] | dict(repeats=10_000)] * 1001)}

def key_of(inner, word):
    """-> the key or number that a word of a place means."""
    if word == "*":
        return 0 if isinstance(inner, list) else next(iter(inner))
    return int(word) if isinstance(inner, list) else word

def put_value(index, place, value):
    *path, last = place.split()
    for word in path:
        index = index[key_of(index, word)]
    index[key_of(index, last)] = value

@pytest.mark.parametrize("place", [*BAD_FIELDS, *OTHER_INDEXES])
def test_a_field_of_an_index_that_cache_py_would_not_write_is_one_line(small, tmp_path, place):
    for value in BAD_FIELDS.get(place, [None]):
        index = json.loads((small.cache / "tiny-data.json").read_bytes())
        if place in OTHER_INDEXES:
            OTHER_INDEXES[place](index)
        else:
            put_value(index, place, value)
        (tmp_path / "x.json").write_text(json.dumps(index), "utf-8")
        with refused("x.json", "run cache.py again"), within(5):
            index_file.read_index(tmp_path / "x.json")

@pytest.mark.parametrize("content", ["[" * 10**5, "", "5", "null", '{"samples": ' + "[" * 10**5, "\0", "\xff", "[1]"])
def test_an_index_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content.encode("latin-1"))
    with refused("x.json"), within(5):
        index_file.read_index(tmp_path / "x.json")

def out_of_memory(path):
    raise MemoryError

@pytest.mark.parametrize("content", ["", "0" * 64])
def test_a_picture_without_the_hash_that_an_index_names_goes_nowhere(small, tmp_path, outside, content):
    """Neither into the run's folder, as what a validation compares with, nor on a page: an index may name any picture
    of the disk, though not its hash. (An empty hash is none, and not one that all have.)"""
    private = str(save(paint_picture((64, 64), 77), outside / "target/cat.png"))
    with refused(private, "has changed"):
        picture_files.read_image(private, content)
    scan = save(paint_picture(), tmp_path / "scan.tiff") # one that cannot be read whole is not opened, either
    with pytest.MonkeyPatch.context() as patch, refused(scan):
        patch.setattr(Path, "read_bytes", out_of_memory)
        picture_files.read_image(scan, content)
    validation = ["--val_data", small.folder / "data", "--cache_dir", tmp_path / "cache"]
    assert run_script("cache.py", *small.cache_flags, *validation).status == 0
    stranger = tmp_path / "cache/tiny-data-val.json"
    index = json.loads(stranger.read_bytes())
    for sample in index["samples"]:
        sample.update(target=private, controls=[private] * len(sample["controls"]), contents={private: content})
    stranger.write_text(json.dumps(index), "utf-8")
    run = tmp_path / "run"
    result = run_script("train.py", *small.flags, "--val_data", stranger, "--max_steps", 1, "--num_inference_steps", 2,
                        "--out_dir", run)
    assert result.status == (0 if content else 1), result.err
    assert bool(list(run.glob("samples/target/*/*.png"))) == bool(content)
    for path in run.glob("samples/*/*/*.png"):
        with Image.open(path) as image, Image.open(private) as hidden:
            assert np.abs(np.asarray(image.resize((64, 64)), int) - np.asarray(hidden, int)).mean() > 10, path

def test_an_index_whose_files_are_links_that_lead_out_is_refused(small, tmp_path):
    """A link of one file, or of the whole folder."""
    for place in ("latents", "text", "latents/*", "text/*"):
        folder = tmp_path / place.replace("/*", "-file")
        shutil.copytree(small.cache, folder / "cache")
        path, = list((folder / "cache").glob(place))[:1]
        path.rename(folder / path.name)
        path.symlink_to(folder / path.name)
        with refused(path, "leads out"):
            index_file.read_index(folder / "cache/tiny-data.json")

OTHER_SHAPES = { # folder, tensor, its change, and what is named beside the tensor
    "fewer target tokens": ("latents", "pixel_latent", lambda t: t[1:]),
    "no target": ("latents", "pixel_latent", lambda t: None),
    "fewer control tokens": ("latents", "control_latent", lambda t: t[1:]),
    "channels": ("latents", "pixel_latent", lambda t: t[:, 1:]),
    "three dims": ("latents", "pixel_latent", lambda t: t[None]),
    "integers": ("latents", "control_latent", lambda t: t.int()), "text": ("text", "prompt_embed", lambda t: t[1:]),
    "no dims": ("text", "prompt_embed", lambda t: t.sum()), "no text": ("text", "prompt_embed", lambda t: None),
    "another encoder": ("text", "prompt_embed", lambda t: t[:, 1:])}

@pytest.mark.parametrize("kind", OTHER_SHAPES)
def test_a_cached_file_of_other_shapes_than_its_index_says_is_one_line_that_names_it(small, tmp_path, kind):
    """Though its key and its digest are right. Of a text's width the model tells, and no index."""
    folder, name, change = OTHER_SHAPES[kind]
    shutil.copytree(small.cache, tmp_path / "cache")
    for file in (tmp_path / "cache" / folder).iterdir():
        tensors, meta = tensor_files.read_tensors(file, key=file.stem)
        changed = {key: change(tensor) if key == name else tensor for key, tensor in tensors.items()}
        tensor_files.write_tensors(file, {key: t for key, t in changed.items() if t is not None}, meta)
    result = train(tmp_path / "cache/tiny-data.json", tmp_path, "--cache_dir", tmp_path / "cache")
    named = "prompt_embed has 63 columns" if kind == "another encoder" else tmp_path / "cache" / folder
    assert result.status == 1 and is_one_line(result.errors[0], name, named), result.err[-2000:]

def test_a_cache_is_not_filled_through_a_link(data, tmp_path, small):
    """Of a stranger's --cache_dir."""
    (tmp_path / "cache").mkdir(), (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache/latents").symlink_to(tmp_path / "elsewhere")
    result = run_script("cache.py", "--data", data, "--cache_dir", tmp_path / "cache", *NATIVE)
    assert result.status == 1 and is_one_line(result.errors[0], tmp_path / "cache/latents", "leads out"), result.err
    assert not list((tmp_path / "elsewhere").iterdir())

# ---- sizes: of texts, of numbers, of pictures ------------------------------------------------------------------------

def laughs(key, depth=9):
    """YAML of a few lines that stands for 10^depth values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, depth)]
    return "\n".join([*lines, f"config: {{process: [{{datasets: [{{folder_path: data, {key}: *a{depth - 1}}}]}}]}}"])

BOMBS = {
    "laughs": ("x.yaml", laughs("control_path")),
    "itself": ("x.yaml", "a: &a [*a]\nconfig: *a"), "deep yaml": ("x.yaml", "config: " + "{a: " * 5000),
    "long": ("x.yaml", "config: " + "x" * 2**21), "deep toml": ("x.toml", "datasets = " + "[" * 10**5),
    "digits": ("x.toml", "datasets = " + "9" * 10**5), "deep json": ("x.json", '[{"dataset_type": ' + "[" * 10**5),
    "digits in json": ("x.json", '[{"dataset_type": ' + "9" * 10**5 + "}]"),
    "dotted key": ("x.toml", "a." * 60_000 + "b = 1"), "dotted table": ("x.toml", "[" + "a . " * 60_000 + "b]"),
    "quoted keys": ("x.toml", r'"a\"b".' * 60_000 + "b = 1"),
    "dots in braces": ("x.toml", "c = {" + "'a'." * 60_000 + "b = 1}"), "one word": ("x.toml", "a" * 10**6),
    "quotes": ("x.toml", '"' * 10**6), "escapes": ("x.toml", '"' + "\\" * 10**6),
    "sixties": ("x.yaml", f"config: {{process: [{{datasets: [{{folder_path: 1{':0' * 500_000}}}]}}]}}"),
    "binary": ("x.yaml", "config: !!binary x"), "python": ("x.yaml", "config: !!python/object/apply:os.system [ls]")}

@pytest.mark.parametrize("kind", BOMBS)
def test_a_configuration_costs_no_more_than_its_size(tmp_path, kind):
    name, content = BOMBS[kind]
    (tmp_path / name).write_text(content, "utf-8")
    (tmp_path / "data").mkdir()
    with within(10):
        result = run_script("tools/import_data.py", tmp_path / name, tmp_path / "out")
    assert result.status == 1 and len(result.errors) == 1 and is_one_line(result.errors[0]), result.err[-2000:]
    assert len(result.err) < 1500

def test_dots_that_join_no_keys_are_read():
    """Numbers, names of files, a rule of dots."""
    for text in ("a = [0.1, " + "1.5, " * 100 + "]", "# " + "." * 999 + " a.b.c", "a.b.c.d.e = 1",
                 "a = 'x.png, y.png " + "z.png, " * 99 + "'", "a = '/a.b/c.d/e.f/" * 9):
        assert not import_configs.LONG_KEY.search(text)

def test_a_picture_that_would_be_computed_too_large_is_one_line(data, tmp_path):
    """Whoever asks for it: a flag here; a LoRA, a line of jobs.jsonl and a model's folder come the same way."""
    result = make_cache(data, tmp_path / "cache", "--target_pixels", 5000 * 5000)
    assert result.status == 1 and is_one_line(result.errors[0], "over 4096x4096"), result.err

PAIR = dict(target="a.png", prompt="go")
MANY = { # file, its content, and what is named
    "columns": ("rows.csv", f"target,control,prompt{',a' * 200_000}\n" + "a\n" * 3000, "200,003 columns"),
    "tabs": ("rows.tsv", "\t" * 200_000 + "\n" + "a\n" * 3000, "200,001 columns"),
    "digits in csv": ("rows.csv", f"target,prompt,control_{'1' * 5000}\na.png,go,b.png\n", "no control"),
    "digits in json": ("rows.json", [PAIR | {f"target_{'1' * 5000}": "b.png"}], "no control"),
    "controls": ("rows.json", [PAIR | dict(control=["b.png"] * 200_000)], "200,000 controls, and a sample has 99"),
    "controls in columns": ("rows.json", [PAIR | dict(control_1="b.png", control_2=["b.png"] * 99)], "100 controls"),
    "targets": ("rows.json", [PAIR | dict(target=["a.png"] * 200_000, control="b.png")], "several"),
    "a prompt": ("rows.json", [PAIR | dict(control="b.png", prompt="go " * 4_000_000)], "12,000,000 letters; shorten"),
    "a key twice": ("rows.json", f'[{{"{"a" * 9999}": 1, "{"a" * 9999}": 2}}]', "twice")}

@pytest.mark.parametrize("kind", MANY)
def test_a_row_costs_no_more_than_its_size_and_its_error_is_short(tmp_path, kind):
    name, content, named = MANY[kind]
    put(tmp_path, "a.png b.png")
    with within(5):
        result = run_script("tools/import_data.py", write_rows(tmp_path / name, content), tmp_path / "out")
    assert result.status == 1 and is_one_line(*result.errors, name, named), result.err[-2000:]
    assert len(result.err) < 1500

def test_a_table_is_read_a_row_at_a_time(tmp_path):
    """A row of a letter has a cell for each of a hundred columns, and all of them would take gigabytes."""
    write_rows(tmp_path / "rows.csv", ",".join(f"c{n}" for n in range(100)) + "\n" + "a\n" * 10**6)
    with within(4):
        where, row = next(import_data.read_rows(tmp_path / "rows.csv"))
    assert where.endswith("rows.csv:2") and len(row) == 100

def test_a_parquet_file_has_a_hundred_columns_at_most(tmp_path):
    path = write_parquet(tmp_path / "rows.parquet", [{f"c{n}": 1 for n in range(101)}])
    result = run_script("tools/import_data.py", path, tmp_path / "out")
    assert result.status == 1 and is_one_line(result.errors[0], "rows.parquet", "over 100 columns")

def test_a_manifests_prompt_and_controls_have_limits_before_anything_reads_them(data):
    row = dict(target="target/cat.png", control=["control/cat.png"], prompt="go")
    large = {"12,000,000 letters": dict(prompt="go " * 4_000_000), "100 controls": dict(control=["a.png"] * 100),
             "200,000 controls": dict(control=["a.png"] * 200_000)}
    write_rows(data / "metadata.jsonl", row, *[row | change for change in large.values()])
    for is_job in (False, True):
        with within(5):
            samples, problems = dataset.read_dataset(data / "metadata.jsonl", is_job)
        assert len(samples) == 1 and len(problems) == len(large) and max(map(len, problems)) < 300
        assert all(is_one_line(problem, named) for problem, named in zip(problems, large))

def test_a_sheet_paints_a_long_prompt_in_no_time():
    """A cell has room for three hundred letters."""
    prompt = "".join(map(chr, range(0x4e00, 0x9000))) * 6
    with within(5):
        cells = ["a long prompt " * 60_000, contact_sheets.shown_prompt(prompt, "cat")]
        assert contact_sheets.contact_sheet([cells], ["", ""]).size

# ---- whatever is in them ---------------------------------------------------------------------------------------------

STRANGER = [*STRANGE, "../home/key.txt", "../home/target/cat.png", "link/cat.png", "/etc/passwd", ".", "C:\\x", "~/x",
            "%s%n{0}", "a\0b", "\ud800", "[trigger]", "<|im_end|>", "a.png", "txt", "native", "9" * 5000, [None],
            ["a.png"] * 300, dict(bytes="x", path="../home/key.txt")]
MARKS = ['"', "{", "}", "[", "]", ",", ":", "\n", "\t", "&a ", "*a", "- ", "0", "e9", "=", "\\", "\x1b", "\u2028", "<<",
         "!!str ", "#", ""]

def scratched(rng, text):
    """In one of six cases it changes some letters of a text."""
    for _ in range(rng.choice([0, 0, 0, 0, 0, 3])):
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(MARKS) + text[place + rng.randint(0, 3):]
    return text

def as_toml(value):
    """A value as TOML writes it, in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return '""' if value is None else json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")

def read_index(kind, rng, folder, index):
    (folder / kind).write_text(scratched(rng, json.dumps(index)), "utf-8")
    index_file.read_index(folder / kind)

def read_lines(kind, rng, folder, rows):
    """A manifest, or jobs, whose settings are completed as predict.py does it."""
    lines = [scratched(rng, json.dumps(row)) for row in rows]
    (folder / kind).write_text("\n".join(lines), "utf-8")
    is_job = kind == "jobs.jsonl"
    samples, problems = dataset.read_dataset(folder / kind, is_job)
    flags = type("Flags", (), dict(command_line.SAMPLING, **dict.fromkeys(["height", "width", "size_from"]), seed=[0],
                                   jobs=kind, out_dir=folder / "out"))
    for sample in samples:
        with common.collect_errors(problems):
            if is_job:
                predict.complete_settings(sample, flags, shift_terminal=0.02)
                assert common.is_inside(folder / "out" / sample.job_fields.get("out", "x.png"), folder / "out")
            dataset.read_facts(sample)
    assert all(map(is_one_line, problems)), problems

def imported(source, folder):
    """What import_data.py does, without the start of a script."""
    flags = type("Flags", (), dict(source=source, target=None, control=[], mask=None, prompt=None, alone=False,
                                   hold_out=0))
    (folder / "work").mkdir()
    problems = import_data.convert(flags, {}, folder / "work")[1]
    assert all(map(is_one_line, problems)), problems

def read_table(kind, rng, folder, rows):
    table, rows = folder / kind, [row if isinstance(row, dict) else dict(target=row) for row in rows]
    if kind.endswith("csv"):
        lines = ["target,control,prompt,mask", *[",".join(map(str, row.values())) for row in rows]]
        table.write_text(scratched(rng, "\n".join(lines)), encoding="utf-8", errors="replace")
    elif kind.endswith("json"):
        table.write_text(scratched(rng, json.dumps(rows)), "utf-8")
    else:
        import pyarrow
        try:
            data = bytearray(write_parquet(table, rows).read_bytes())
        except (pyarrow.ArrowException, UnicodeError, OverflowError, TypeError): # it cannot hold such a value
            data = bytearray(b"PAR1" + rng.randbytes(100) + b"PAR1")
        for _ in range(rng.choice([0, 0, 5])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        table.write_bytes(data)
    imported(rng.choice([folder, table]), folder)

def read_config(kind, rng, folder, config):
    if kind.endswith("toml"):
        text = "\n".join(f"{json.dumps(str(key))} = {as_toml(value)}" for key, value in config.items())
    else:
        text = yaml.safe_dump(config, allow_unicode=True) if kind.endswith("yaml") else json.dumps(config)
    (folder / kind).write_text(scratched(rng, text), encoding="utf-8", errors="replace")
    imported(folder / kind, folder)

ROWS = [dict(target="a.png", control=["b.png"], prompt="go", mask="c.png")] * 2
JOB = dict(image=["a.png", "b.png"], prompt="go", out="x/y.png", seed=3, sigmas=[1.0, 0.5], shift=3.0, height=64,
           width=64, size_from=1, true_cfg_scale=4.0, negative_prompt=" ", num_inference_steps=4)
MUSUBI = dict(general=dict(caption_extension=".txt", batch_size=1), datasets=[dict(
    image_directory="set/target", control_directory="set/control", num_repeats=1, resolution=[960, 544])])
TOOLKIT = dict(job="extension", config=dict(name="x", process=[dict(trigger_word="p3r5on", datasets=[dict(
    folder_path="set/target", control_path=["set/control"], caption_ext="txt", mask_path=None, num_repeats=1)])]))
SIMPLE = [dict(id="a", type="local", instance_data_dir="set/target", conditioning_data=["b"], repeats=0,
               caption_strategy="textfile", resolution=1024),
          dict(id="b", type="local", dataset_type="conditioning", conditioning_type="reference_strict",
               instance_data_dir="set/control", source_dataset_id="a")]
FUZZED = { # file: what it holds, and what reads it. (An index is cache.py's.)
    "index.json": (None, read_index), "metadata.jsonl": (ROWS, read_lines), "jobs.jsonl": ([JOB] * 2, read_lines),
    "metadata.csv": (ROWS, read_table), "metadata.json": (ROWS, read_table), "metadata.parquet": (ROWS, read_table),
    "x.toml": (MUSUBI, read_config), "x.yaml": (TOOLKIT, read_config), "x.json": (SIMPLE, read_config)}

@pytest.mark.parametrize("kind", FUZZED)
def test_whatever_is_in_a_file_ends_in_lines_and_touches_nothing_outside(tmp_path, small, outside, monkeypatch, kind):
    """A folder beside the dataset stays as it is, its key is shown nowhere, and a file takes less than five seconds."""
    monkeypatch.chdir(tmp_path)
    sound, folder, rng = tmp_path / "sound", tmp_path / "dataset", random.Random(kind)
    put(sound, "a.png b.png c.png")
    add_item(sound / "set", "cat")
    (sound / "link").symlink_to(outside / "target")
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    content, read = FUZZED[kind]
    def case(damaged):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder, symlinks=True)
        try:
            read(kind, rng, folder, damaged)
        except common.InputError as e:
            assert SECRET not in str(e)
            raise
        copies = filter(Path.is_file, (folder / "work").rglob("*"))
        assert not [path for path in copies if SECRET.encode() in path.read_bytes()]
    fuzz(kind, content or json.loads((small.cache / "tiny-data.json").read_bytes()), case, seconds=5.0, share=0.4,
         refuses=read != read_lines, strange=STRANGER)
    assert before == {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
