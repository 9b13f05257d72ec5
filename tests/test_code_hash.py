"""
The code is an input of a picture: an edit of anything on its way draws it again, and a comment does not. Encoded files
tell that other functions have made them. A picture counts as finished if every bit of it is as it was written, and what
a script has planned is forgotten when it ends.
"""
import ast
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image, PngImagePlugin

import cache
import common
from library.data import dataset
from library.data.index_file import keep_from_prune
from library.files import tensor_files
from library.results import code_hash, contact_sheets, result_names
import predict
from tests.harness import (HERE, ON_DEVICE, cached_files, flip, is_whole, make_cache, paint_picture, refused,
                           run_script, save)

# ---- what counts as an edit ------------------------------------------------------------------------------------------

def functions(text, names=None):
    """The functions and methods of a source, those inside of others too: (name, node)."""
    tops = [node for node in ast.parse(text).body if not names or getattr(node, "name", None) in names]
    return [(node.name, node) for top in tops for node in ast.walk(top) if isinstance(node, ast.FunctionDef)]

def with_line(text, number, line):
    """The source with one more line before the line of this number."""
    lines = text.splitlines()
    return "\n".join(lines[:number - 1] + [line] + lines[number - 1:]) + "\n"

PARTS = [(file, None) for file in code_hash.WHOLE] + [("cache.py", code_hash.DRAWING)] + list(code_hash.ENCODING.items())
PARTS += [(file, None) for file in code_hash.EXTRAS]

@pytest.mark.parametrize("file, names", PARTS, ids=lambda value: value if isinstance(value, str) else "")
def test_an_edit_of_any_function_is_one_and_a_comment_or_docstring_is_none(file, names):
    """Of all that draws and encodes: a statement more at the end of each function; a comment above and behind a line, a
    docstring of other words, a blank line."""
    text = (HERE / file).read_text("utf-8")
    before, found = code_hash.digest(text, names), functions(text, names)
    assert found and {name for name, _ in found} >= {*(names or [])} - {"Processor"}
    for name, node in random.Random(0).sample(found, min(len(found), 25)):
        first, last = node.body[0], node.body[-1]
        indent = " " * last.col_offset
        assert code_hash.digest(with_line(text, last.lineno, f"{indent}pass"), names) != before, name
        lines = with_line(text, last.lineno, f"{indent}# a note, with 'quotes' and a # in it\n").splitlines()
        lines[last.end_lineno + 1] += " # behind a line" # two lines more stand above
        if ast.get_docstring(node) and len(node.body) > 1:
            lines[first.lineno - 1:first.end_lineno] = [f'{indent}"""Other words,', "", f'{indent}of three lines."""']
        assert code_hash.digest("\n".join(lines) + "\n", names) == before, name

@pytest.mark.parametrize("old, new", [
    ("guided = uncond + jobs[j].settings[\"true_cfg_scale\"] * (pred - uncond)", "guided = 2 * pred - uncond"),
    ("pred = guided * (pred.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))", "pred = guided"),
    ("np.linspace(1.0, 1 / steps, steps)", "np.linspace(1.0, 2 / steps, steps)"),
    ("/ 1000, jobs[j].img_shapes", "/ 999, jobs[j].img_shapes"), ("z / (1.0 / std).to(z)", "z * std.to(z)"),
    ('if sample.settings["true_cfg_scale"] > 1:', 'if sample.settings["true_cfg_scale"] > 0:'),
    ("transformer.set_adapters(list(active), list(active.values()))", "transformer.set_adapters(list(active))")])
def test_a_change_of_the_sampler_is_an_edit(old, new):
    text = (HERE / "predict.py").read_text("utf-8")
    assert text.count(old) == 1 and code_hash.digest(text.replace(old, new)) != code_hash.digest(text)

def test_texts_that_look_like_comments_count():
    """A # in a string, a string that is an argument; a string of three quotes that is no docstring."""
    for a, b in (('x = "# a"\n', 'x = "# b"\n'), ('f("a")\n', 'f("b")\n'), ('x = """a\nb"""\n', 'x = """a\nc"""\n'),
                 ("x = f'{y} # a'\n", "x = f'{y} # b'\n"), ('x = """a\n\nb"""\n', 'x = """a\nb"""\n'),
                 ('x = """a\n  \nb"""\n', 'x = """a\n\nb"""\n'), ('x = """a \nb"""\n', 'x = """a\nb"""\n'),
                 ('x = f"""{y}\n\n"""\n', 'x = f"""{y}\n"""\n'), ('def f(): "a"\n', 'def g(): "a"\n'),
                 ('"""a"""; x = 1\n', '"""a"""; x = 2\n'),
                 ("def f():\n    return 'a'\n", "def f():\n    return 'b'\n")):
        assert code_hash.digest(a) != code_hash.digest(b), a
    assert code_hash.digest('"""a"""\nx = 1 # b\n') == code_hash.digest("'c'\n\n# d\nx = 1\n")

def cache_names(node):
    """The names X of cache.X in a part of a source."""
    return {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)
            and isinstance(child.value, ast.Name) and child.value.id == "cache"}

def test_all_that_draws_of_cache_py_is_listed():
    """What predict.py's library and generate() call there, and what these call; but for what finds files, hashes them,
    or encodes (which an encoded file carries)."""
    text = (HERE / "predict.py").read_text("utf-8")
    library = text[:text.index("# ==== the command line ====")].count("\n")
    nodes = [node for node in ast.parse(text).body if node.lineno < library or getattr(node, "name", "") == "generate"]
    used = set().union(*map(cache_names, nodes))
    here = dict(functions((HERE / "cache.py").read_text("utf-8")))
    for name in list(used & here.keys() & {*code_hash.DRAWING}):
        used |= {n.id for n in ast.walk(here[name]) if isinstance(n, ast.Name) and n.id in here}
    assert used - {"find_model", "hash_part", "hash_encoder"} - {*code_hash.ENCODING["cache.py"]} <= {*code_hash.DRAWING}
    assert {*code_hash.DRAWING} <= used

# ---- the command -----------------------------------------------------------------------------------------------------

@pytest.fixture
def edit(monkeypatch):
    """-> edit(file, source), after which scripts that are started run this source."""
    edited = dict(code_hash.TEXTS)
    monkeypatch.setattr(code_hash, "TEXTS", edited)
    return edited.__setitem__

@pytest.fixture
def photo(tmp_path):
    """-> draw(*flags), which runs predict.py on two photographs, and returns its result."""
    for name in "ab":
        save(paint_picture(seed=ord(name)), tmp_path / f"photos/{name}.png")

    def draw(*flags):
        images = [] if "--image" in flags else ["--image", tmp_path / "photos"]
        result = run_script("predict.py", *images, "--prompt", "x", "--out_dir",
                            tmp_path / "out", "--cache_dir", tmp_path / "cache", "--num_inference_steps", 2,
                            "--target_pixels", "64*64", "--lora=", *ON_DEVICE, *flags)
        assert result.status == 0, result.err
        return result.out
    return draw

def test_pictures_of_other_code_are_drawn_again_at_their_places_and_a_line_says_why(photo, tmp_path, edit):
    out = tmp_path / "out"
    photo()
    assert "2 of 2 pictures are there already" in photo() and "drawn again" not in photo()
    text = code_hash.TEXTS["predict.py"]
    edit("predict.py", text + "\n# a note\n")
    assert "2 of 2 pictures are there already" in photo()
    edit("predict.py", text + "\nx = 1\n")
    lines = photo().splitlines()
    assert f"{out}: 2 pictures are drawn again: predict.py has changed since they were drawn" in lines
    assert sorted(path.name for path in out.iterdir()) == ["a.png", "b.png", "sheet.png"]
    assert "2 of 2 pictures are there already" in photo()
    for file in ("rope_patch.py", "cache.py"):
        more = "\ndef load_part():\n    pass\n" if file == "cache.py" else "\nx = 1\n"
        edit(file, code_hash.TEXTS[file] + more)
    assert "drawn again: rope_patch.py, cache.py have changed since they were drawn" in photo()

def test_pictures_of_encodings_that_other_functions_made_are_drawn_again(photo, tmp_path, edit):
    """Also if the cache was emptied after an edit, and PREPROCESSING not raised: the names of encodings are alike."""
    photo()
    edit("cache.py", code_hash.TEXTS["cache.py"] + "\ndef encode_image():\n    pass\n")
    assert "2 of 2 pictures are there already" in photo() # these encodings are still those of before
    shutil.rmtree(tmp_path / "cache")
    assert "2 pictures are drawn again: cache.py's encoding has changed since they were drawn" in photo()
    assert "2 of 2 pictures are there already" in photo()

def test_a_file_that_is_saved_while_the_libraries_load_is_one_line(monkeypatch):
    """It was read by us, and perhaps not by Python yet: predict.py asks when all is imported."""
    code_hash.refuse_edits()
    assert (HERE / "predict.py").read_bytes().endswith(b'"__main__":\n    sources.refuse_edits()\n    main(args)\n')
    real = code_hash.read
    monkeypatch.setattr(code_hash, "read", lambda file: real(file) + "# edited")
    with refused("predict.py", "changed", "same command"):
        code_hash.refuse_edits()
    for extra in code_hash.EXTRAS: # which some scripts import before anything is hashed
        monkeypatch.setattr(code_hash, "read", lambda file: real(file) + ("# edited" if file == extra else ""))
        with refused(extra, "changed", "same command"):
            code_hash.refuse_edits()

def test_an_extra_is_hashed_as_it_was_when_the_script_began(monkeypatch):
    """What is saved later is not what runs: refuse_edits has loaded all of them."""
    flags = SimpleNamespace(quantize="int8", offload=2, transformer="a.safetensors", lora=["x"])
    before = code_hash.drawing(flags)
    monkeypatch.setattr(code_hash, "read", lambda file: "x = 1")
    assert code_hash.drawing(flags) == before

def test_a_picture_from_before_code_was_noted_is_of_an_older_version(photo, tmp_path):
    photo()
    path = tmp_path / "out/a.png"
    with Image.open(path) as image:
        image.load()
    meta = PngImagePlugin.PngInfo()
    for name in ("key", "command"):
        meta.add_text(name, image.text[name])
    image.save(path, pnginfo=meta)
    out = photo()
    assert "1 of 2 pictures are there already" in out
    assert f"{path.parent}: 1 pictures are drawn again: they were drawn by an older version" in out

def test_another_version_of_a_package_is_told_and_draws_nothing_again(photo, tmp_path, monkeypatch):
    photo()
    real = code_hash.version
    monkeypatch.setattr(code_hash, "version", lambda name: "9.9" if name == "diffusers" else real(name))
    out = photo()
    assert "2 of 2 pictures are there already" in out and "drawn again" not in out
    assert f"2 pictures that are there were drawn with diffusers {real('diffusers')} (here 9.9)" in out

def test_an_extra_counts_where_it_is_at_work():
    """With --quantize its code is noted, without it not; one that is noted and not at work decides nothing."""
    flags = SimpleNamespace(quantize="none", offload=0, transformer=None, lora=[])
    plain = code_hash.drawing(flags)
    at_work = code_hash.drawing(SimpleNamespace(quantize="int8", offload=2, transformer="a.safetensors", lora=["x"]))
    assert at_work.keys() - plain.keys() == {f"library/{name}.py" for name in (
        "models/quantization", "models/offloading", "models/one_file", "lora/foreign_loras")}
    assert code_hash.is_current(at_work, plain) and code_hash.is_current(plain, at_work)
    for file in at_work.keys() - {*code_hash.PACKAGES}:
        assert not code_hash.is_current(at_work | {file: "0"}, at_work), file
    assert not code_hash.is_current(None, plain) and not code_hash.is_current({}, plain)

def test_a_strangers_note_of_the_code_is_no_reason_to_fail(tmp_path):
    """Whatever it holds, the picture is drawn again; a sound note with other things beside it counts."""
    image, path = paint_picture(), tmp_path / "a.png"
    code = code_hash.drawing(SimpleNamespace(quantize="none", offload=0, transformer=None, lora=[]))
    sound = json.dumps(code | dict(torch=[1, {}], diffusers="9" * 10**4, x=None))
    deep = "[" * 10**5
    for note in ("", "[]", "5", "{", "null", "[[1, 2]]", '{"predict.py": [1, {}]}', deep, sound):
        meta = PngImagePlugin.PngInfo()
        for name, text in dict(key="k", code=note).items():
            meta.add_text(name, text)
        image.save(path, pnginfo=meta)
        done = result_names.is_finished(dict(k=code), result_names.drawn_by, path, "k")
        picture = SimpleNamespace(path=path, key="k", code=code, done=done)
        result_names.describe_results(tmp_path, [picture], result_names.drawn_by)
        assert done == (note is sound), note[:99]

# ---- encoded files ---------------------------------------------------------------------------------------------------

def test_files_that_other_functions_have_encoded_are_told_of_once(data, tmp_path, edit):
    """Nothing is encoded again, and their names stay; a comment is no other function."""
    assert "warning" not in make_cache(data, tmp_path / "c").err + make_cache(data, tmp_path / "c").err
    files = cached_files(tmp_path / "c")
    text = code_hash.TEXTS["cache.py"]
    old = "    embeds, _ = pipe.encode_prompt("
    assert text.count(old) == 1
    for new, told in (("    # a note\n" + old, 0), (old.replace("embeds, _", "embeds, mask"), 1)):
        edit("cache.py", text.replace(old, new))
        warnings = [line for line in make_cache(data, tmp_path / "c").err.splitlines() if "another cache.py" in line]
        assert len(warnings) == told and all("PREPROCESSING (3)" in line for line in warnings)
        assert cached_files(tmp_path / "c") == files

def test_an_older_cache_says_nothing(data, tmp_path, monkeypatch):
    """Its files have no such entry."""
    real = tensor_files.write_tensors
    monkeypatch.setattr(tensor_files, "write_tensors", lambda path, tensors, meta, *more: real(
        path, tensors, {k: v for k, v in meta.items() if k != "code"}, *more))
    make_cache(data, tmp_path / "c")
    monkeypatch.undo()
    monkeypatch.setattr(code_hash, "encoding", lambda *about: "other")
    assert make_cache(data, tmp_path / "c").err == ""

def test_the_quantizing_decides_texts_where_it_is_asked_for_alone(edit):
    latents, text = Path("c/latents/0.safetensors"), Path("c/text/0.safetensors")
    before = [code_hash.encoding(file, mode) for file in (latents, text) for mode in ("none", "int8")]
    edit("library/models/quantization.py", "x = 1\n")
    after = [code_hash.encoding(file, mode) for file in (latents, text) for mode in ("none", "int8")]
    assert [a == b for a, b in zip(before, after)] == [True, True, True, False]

@pytest.mark.parametrize("folder", [b"c", b"caf\xe9"])
def test_a_few_files_of_others_among_many_are_told_of_in_a_folder_of_any_name(tmp_path, capsys, folder):
    """Of 200 the 10 in the middle: no header at either end says it."""
    files = [Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), folder)), "text", f"{n:032x}") for n in range(200)]
    for n, file in enumerate(files):
        code = "other" if 95 <= n < 105 else code_hash.encoding(file, "none")
        tensor_files.write_tensors(file, {"a": torch.zeros(1)}, dict(code=code))
    code_hash.warn_of_encoding(files, "none", 3)
    assert capsys.readouterr().err.count("another cache.py") == 1

# ---- finished means whole --------------------------------------------------------------------------------------------

def test_a_picture_with_any_bit_flipped_any_part_cut_or_zeroed_is_not_finished(tmp_path):
    path, rng = tmp_path / "a.png", random.Random(0)
    predict.save_png(paint_picture((12, 12)), path, "key", {"predict.py": "1"})
    sound = path.read_bytes()
    assert is_whole(path, "key") and not is_whole(path, "other")
    assert result_names.drawn_by(path, "key") == {"predict.py": "1"}
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

def test_a_start_reads_a_finished_picture_once(photo, monkeypatch):
    """Though its name is chosen by what it is, and a line says by which versions it was drawn."""
    photo()
    read, real = [], result_names.drawn_by
    monkeypatch.setattr(result_names, "drawn_by", lambda path, key: read.append(Path(path).name) or real(path, key))
    assert "2 of 2 pictures are there already" in photo()
    assert sorted(read) == ["a.png", "b.png"]

def test_a_damaged_picture_is_drawn_again_at_its_place_and_shown_in_the_sheet(photo, tmp_path):
    """Of a folder, and of a file, where another photograph's result would get another name."""
    path = tmp_path / "out/a.png"
    photo()
    sound = path.read_bytes()
    key = Image.open(path).info["key"]
    path.write_bytes(flip(4 * len(sound))(sound))
    assert "1 of 2 pictures are there already" in photo() and is_whole(path, key)
    path.write_bytes(flip(8 * len(sound) - 150)(sound))
    photo("--image", tmp_path / "photos/a.png")
    assert is_whole(path, key)
    assert sorted(file.name for file in path.parent.iterdir()) == ["a.png", "b.png", "sheet.png"]

def test_a_sheet_is_made_though_a_picture_of_it_cannot_be_read(tmp_path):
    """An older picture, or a photograph that is gone: its cell says so."""
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

def test_two_commands_on_the_same_pictures_have_a_list_each(tmp_path):
    """The first one to end took the list of the other away."""
    files = {tmp_path / "text/0.safetensors": None}
    with keep_from_prune(["a"], tmp_path, lambda sample: files):
        with keep_from_prune(["a"], tmp_path, lambda sample: files):
            assert len(list(tmp_path.glob(".planned-*"))) == 2
        left, = tmp_path.glob(".planned-*")
        assert left.read_text("utf-8") == "text/0.safetensors"
    assert not list(tmp_path.glob(".planned-*"))
