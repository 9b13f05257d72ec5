"""
Folders -> samples, pictures -> pixels. What is right is read as a person means it; what is wrong is one
line that names it, and the rest of the dataset goes on.
"""
import json
import os
import shutil
import struct
import unicodedata
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image

import cache
from library.data import dataset, picture_files
from tests.harness import (DEVICE, NATIVE, ON_DEVICE, add_item, assert_same, encode, index_of, is_one_line, make_cache,
                           paint_picture, refused, run_script, samples_of, save, train, within)

# ---- a bad item is named and left out --------------------------------------------------------------------------------

def instead(file, make):
    def spoil(d):
        (d / file).unlink(missing_ok=True)
        (d / file).parent.mkdir(exist_ok=True)
        make(d / file)
    return spoil

def resized(file, *size):
    return instead(file, lambda path: paint_picture(size).save(path))

def caption(content):
    return lambda d: (d / "target/cat.txt").write_bytes(content)

def animation(path, **options):
    paint_picture().save(path, save_all=True, append_images=[paint_picture(seed=s) for s in (1, 2)], **options)

def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

def claim_size(width, height):
    """A PNG whose header, checksum included, says that it is this large."""
    def make(path):
        sound = save(paint_picture(), path).read_bytes()
        path.write_bytes(sound[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + sound[33:])
    return make

BAD_ITEMS = { # what is done to cat, and what the one line about it must name
    "no control": (lambda d: (d / "control/cat.png").unlink(), "target/cat.png", "control/cat.png"),
    "no caption": (lambda d: (d / "target/cat.txt").unlink(), "target/cat.txt"),
    "blank caption": (caption(b"\xef\xbb\xbf \r\n\t"), "target/cat.txt"),
    "caption of marks that nobody sees": (caption("\u200b\n\u2060\u00ad \ufe0f\u2800\u3164".encode()), "empty prompt"),
    "caption with ai-toolkit's [trigger]": (caption(b"[trigger] in snow"), "target/cat.txt", "write the word itself"),
    "UTF-16 without its mark": (caption("red".encode("utf-16-le")), "target/cat.txt"),
    "Latin-1": (caption("caf\u00e9".encode("latin-1")), "target/cat.txt"),
    "long caption": (caption(b"red " * 2000), "cat", "1024"),
    "caption with a token of the template": (caption(b"a <|image_pad|> b"), "target/cat.txt", "<|image_pad|>"),
    "two targets": (lambda d: paint_picture().save(d / "target/cat.jpg"), "cat.jpg", "cat.png"),
    "two controls": (lambda d: paint_picture().save(d / "control/cat.WEBP"), "cat.WEBP", "cat.png"),
    "two captions": (lambda d: (d / "target/cat.TXT").write_text("go", "utf-8"), "cat.TXT", "cat.txt"),
    "second control, or another item's first": (lambda d: add_item(d, "cat_1"), "control/cat_1.png"),
    "second control, but no first": (lambda d: (d / "control/cat.png").rename(d / "control/cat_1.png"), "cat.png"),
    "31 pixels": (resized("control/cat.png", 64, 31), "control/cat.png", "64x31"),
    "aspect above 10": (resized("target/cat.png", 32, 321), "target/cat.png", "32x321"),
    "mask of another shape": (instead("mask/cat.png", lambda p: paint_picture((256, 64), mode="L").save(p)),
                              "mask/cat.png", "256x64", "64x64"),
    "web page": (instead("control/cat.png", lambda p: p.write_text("<html>404</html>", "utf-8")), "control/cat.png"),
    "GIF": (instead("target/cat.png", lambda p: animation(p, format="GIF")), "target/cat.png"),
    "animated PNG": (instead("target/cat.png", animation), "target/cat.png", "several frames"),
    "3600 megapixels": (instead("control/cat.png", claim_size(60000, 60000)), "control/cat.png", "pixels"),
    "169 megapixels": (instead("mask/cat.png", claim_size(13000, 13000)), "mask/cat.png", "megapixels"),
    "FIFO as target": (instead("target/cat.png", os.mkfifo), "target/cat.png"),
    "folder as control": (instead("control/cat.png", Path.mkdir), "control/cat.png"),
    "dangling link": (instead("control/cat.png", lambda p: p.symlink_to("nowhere.png")), "control/cat.png"),
}

@pytest.mark.parametrize("kind", BAD_ITEMS)
def test_a_bad_item_is_named_and_left_out_and_the_others_stay(data, plus, kind):
    spoil, *named = BAD_ITEMS[kind]
    with within(2):
        spoil(data)
        samples, problems = samples_of(plus, data)
    assert len(problems) == 1 and is_one_line(problems[0], *named), problems
    assert "good" in samples and "cat" not in samples

STRAYS = { # what is put beside two good items, and what the one line about it must name
    "control": (lambda d: paint_picture().save(d / "control/dog.png"), "control/dog.png"),
    "mask": (lambda d: save(paint_picture(), d / "mask/dog.png"), "mask/dog.png"),
    "caption": (lambda d: (d / "target/dog.txt").write_text("add a border", "utf-8"), "target/dog.txt"),
    "picture in another format": (lambda d: animation(d / "target/dog.gif"), "target/dog.gif", ".gif is not read"),
    "picture in JPEG XL": (lambda d: (d / "target/dog.JXL").write_bytes(b"x"), "target/dog.JXL", "to PNG or JPEG"),
    "picture of an iPhone": (lambda d: (d / "target/dog.HEIC").write_bytes(b"x"), "target/dog.HEIC", "no control"),
    "link to a folder": (lambda d: (d / "target/dog").symlink_to(add_item(d / "../x", "x") / "target"), "target/dog"),
    "manifest": (lambda d: (d / "metadata.jsonl").write_text("{}", "utf-8"), "metadata.jsonl", "give the file itself"),
}

@pytest.mark.parametrize("kind", STRAYS)
def test_no_file_is_passed_over_in_silence(data, plus, kind):
    stray, name, *words = STRAYS[kind]
    stray(data)
    samples, problems = samples_of(plus, data)
    assert set(samples) == {"good", "cat"} and len(problems) == 1, problems
    assert is_one_line(problems[0], data / name, *words), problems

@pytest.mark.parametrize("name", ["control/cat_2.png", "control/cat_01.png", "control/cat_1.gif", "mask/cat.gif"])
def test_skip_bad_leaves_out_a_sample_of_which_a_control_or_the_mask_is_not_used(data, plus, name):
    """A gap in its controls, other numbers, a picture that is not read: its prompt may mean it."""
    (data / name).parent.mkdir(exist_ok=True)
    (data / name).write_bytes((data / "control/cat.png").read_bytes())
    samples, problems = samples_of(plus, data)
    assert set(samples) == {"good"} and len(problems) == 1 and is_one_line(*problems, "not used"), problems

NO_DATASET = { # what is there instead of a dataset, and what else the one line must name
    "nothing": (lambda d: None, "photos: does not exist; check the name"),
    "empty folder": (Path.mkdir, "is no dataset; it holds nothing", "target/NAME.png"),
    "unknown folders": (lambda d: (d / "after").mkdir(parents=True), "after", "target/NAME.png", "import_data.py"),
    "folders almost of the right names": (lambda d: [(d / x).mkdir(parents=True) for x in ("Targets", "controls")],
                                          "holds Targets, controls; want target/NAME.png"),
    "two folders of one meaning": (lambda d: [(d / x).mkdir(parents=True) for x in ("target", "training_images")],
                                   "training_images", "target"),
    "a misspelt folder": (lambda d: [(d / x).mkdir(parents=True) for x in ("target", "contorl")], "contorl",
                          "control/"),
    "control/ of a disk that is not there": (lambda d: (d / "target").mkdir(parents=True) or (d / "control").symlink_to(
        d / "nowhere"), "control", "mount"),
    "a file called target": (lambda d: d.mkdir() or (d / "target").write_text("x", "utf-8"), "photos/target", "folder"),
    "a file called control": (lambda d: add_item(d, "a") and shutil.rmtree(d / "control") or (
        d / "control").write_text("x", "utf-8"), "photos/control", "folder"),
    "empty manifest": (lambda d: d.mkdir() or (d / "metadata.jsonl").write_text("\n \n", "utf-8"),),
    "a table": (lambda d: d.mkdir() or (d / "metadata.csv").write_bytes(b"target,control,prompt\n"), "metadata.csv"),
    "a text file": (lambda d: d.write_text("hello", "utf-8"), "target/NAME.png"),
}

@pytest.mark.parametrize("script, kind", [*(("cache.py", kind) for kind in NO_DATASET), ("train.py", "empty folder")])
def test_no_dataset_is_one_line_and_status_1(tmp_path, monkeypatch, script, kind):
    monkeypatch.setattr(cache, "load_part", lambda *_: pytest.fail("a model was loaded"))
    make, *named = NO_DATASET[kind]
    make(tmp_path / "photos")
    result = run_script(script, "--data", tmp_path / "photos", "--val_data", *ON_DEVICE)
    assert result.status == 1 and len(result.errors) == 1 and "holds ;" not in result.err
    assert is_one_line(result.errors[0], "photos", *named), result.err

# ---- names, captions -------------------------------------------------------------------------------------------------

NAMES = ["\u65e5\u672c \u8a9e", "\U0001f431", "[1] (2)*", "it's", 'quo"te', "a.b.c", "50%", "-dash", "tab\tand\nline",
         "{x}", "#1;2", "Upper", "a/x", "b/x", "a/b/x", "cafe\u0301", "\udcff"]

def test_names_of_every_kind_work(tmp_path):
    """Also in what cache.py and train.py say of each. (In errors: tests/test_printable.py.)"""
    for name in NAMES:
        add_item(tmp_path / "data", name, [(70, 64), (64, 64)])
    for old, new in (("target/cafe\u0301.txt", "target/caf\u00e9.txt"), # macOS takes names apart, Linux does not
                     ("control/cafe\u0301.png", "control/caf\u00e9.png"), ("target/Upper.png", "target/Upper.PNG")):
        (tmp_path / "data" / old).rename(tmp_path / "data" / new)
    result = make_cache(tmp_path / "data", tmp_path / "c", "--control_pixels", "32*32")
    assert result.status == 0, result.err
    samples = index_of(tmp_path / "c")
    assert set(samples) == {unicodedata.normalize("NFC", name) for name in NAMES}
    assert len({s.encodings[0]["file"] for s in samples.values()}) == len(NAMES)
    result = train(tmp_path / "c/tiny-data.json", tmp_path, "--max_tokens", 1, "--max_steps", 1, "--batch_size", 17)
    assert result.status == 0 and len(result.losses) == 1, result.err

def test_controls_differ_in_number_and_size_and_are_counted_not_spelled(tmp_path, plus):
    add_item(tmp_path, "one", [(64, 64), (96, 32)])
    add_item(tmp_path, "many", [(32, 32)] + [(32, 32 * (1 + k)) for k in range(1, 8)] * 2) # _10 follows _9, not _1
    samples, problems = samples_of(plus, tmp_path)
    assert not problems
    assert samples["one"].encodings[0]["img_shapes"] == [(1, 4, 4), (1, 2, 6)]
    heights = [h for _, h, _ in samples["many"].encodings[0]["img_shapes"]]
    assert heights == [2] + [2 * (1 + k) for k in range(1, 8)] * 2

def test_lines_of_a_caption_are_wordings_of_which_each_position_draws_one(tmp_path, plus):
    """Without the mark of an editor, line ends and repetitions."""
    data = add_item(tmp_path / "data", "cat", caption="\ufeffone\r\n\n two two \nthree\none\n")
    sample, wordings = samples_of(plus, data)[0]["cat"], ["one", "two two", "three"]
    assert sample.prompts == wordings
    for prompt in wordings:
        assert sample.texts[prompt, True]["tokens"] == len(encode(plus, sample, prompt)["prompt_embed"])
    run = train(data, tmp_path, "--cache_dir", tmp_path / "c", "--caption_dropout_rate", 0.3, *NATIVE)
    assert run.status == 0 and len(list((tmp_path / "c/text").iterdir())) == 4, run.err
    picked = [run.globals["pick"](p).prompt for p in range(600)]
    counts = [picked.count(prompt) for prompt in ["", *wordings]]
    assert all(abs(n - want) < 45 for n, want in zip(counts, (180, 140, 140, 140))), counts
    assert picked == [run.globals["pick"](p).prompt for p in range(600)]

def test_marks_and_blank_lines_are_no_part_of_a_prompt_and_joiners_are(tmp_path):
    """`cat a.txt b.txt` leaves the mark of an editor inside; emoji and Persian are written with joiners."""
    lines = ["\U0001f469\u200d\U0001f4bb at work", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "!"]
    data = add_item(tmp_path, "cat", caption="\ufeff" + "\n\u200b\n\ufeff".join(lines))
    (tmp_path / "m.jsonl").write_text(json.dumps(dict(target="target/cat.png", control=[], prompt=lines)), "utf-8")
    for root in (data, tmp_path / "m.jsonl"):
        assert dataset.read_dataset(root)[0][0].prompts == lines

def test_what_may_not_be_read_is_one_line(data, monkeypatch):
    """A picture; a folder, which is not passed over. (root may read everything.)"""
    def no(*args, **kwargs):
        raise PermissionError
    with monkeypatch.context() as patch, refused(data / "target/cat.png", "permissions"):
        patch.setattr(cache.Image, "open", no)
        picture_files.image_size(data / "target/cat.png")
    real = os.walk
    def walk(folder, onerror):
        onerror(PermissionError(13, "Permission denied", f"{folder}/deep"))
        yield from real(folder)
    monkeypatch.setattr(os, "walk", walk)
    with refused(data / "target/deep", "permissions"):
        dataset.read_dataset(data)

# ---- several datasets, and pictures without controls -----------------------------------------------------------------

def test_pictures_without_controls_are_encoded_as_the_stock_pipeline_does_and_train_beside_edits(data, tmp_path, plus):
    """The prompt has no picture then, the control has no token."""
    for name in ("face", "more/face"):
        save(paint_picture((96, 64)), tmp_path / f"faces/target/{name}.png")
        (tmp_path / f"faces/target/{name}.txt").write_text("a face\nthe face", "utf-8")
    samples, problems = samples_of(plus, [data, tmp_path / "faces"])
    sample = samples["more/face"]
    got = encode(plus, sample)
    assert not problems and got["control_latent"].shape == (0, 64) and got["img_shapes"].tolist() == [[1, 4, 6]]
    stock, _ = plus.encode_prompt(["a face"], None, device=DEVICE)
    assert torch.equal(got["prompt_embed"], stock[0]) and sample.texts["a face", True]["tokens"] == len(stock[0])
    flags = ["--data", data, tmp_path / "faces", "--repeats", 2, 1, "--batch_size", 3, *NATIVE, *ON_DEVICE]
    run = run_script("train.py", *flags, "--val_data", "--cache_dir", tmp_path / "c", "--max_steps", 2)
    picked = [run.globals["pick"](p).sample.name for p in range(6)]
    assert run.status == 0 and sorted(picked) == ["cat", "cat", "face", "good", "good", "more/face"], run.err

def test_version_1_of_the_model_takes_exactly_one_control(data, tmp_path, pipes):
    paint_picture().save(data / "control/cat_1.png")
    save(paint_picture(), tmp_path / "faces/target/face.png")
    (tmp_path / "faces/target/face.txt").write_text("a face", "utf-8")
    samples, problems = samples_of(pipes["v1"], [data, tmp_path / "faces"])
    assert list(samples) == ["good"] and len(problems) == 2
    assert all(is_one_line(p, file, "one control") for p, file in zip(problems, ("control/cat_1.png", "face.png")))
    folder = pipes["v1"].name_or_path
    result = make_cache(data, tmp_path / "c", "--model", folder, "--prompt_image_dropout_rate", 0.5)
    assert result.status == 1 and is_one_line(result.errors[0], "--prompt_image_dropout_rate", "v1")

# ---- pictures --------------------------------------------------------------------------------------------------------

def test_every_picture_of_a_sample_is_prepared_alike(tmp_path, plus):
    """A turned picture with transparency equals the one that a person sees, as target, control, mask and prompt."""
    seen = paint_picture((96, 64))
    exif = Image.Exif()
    exif[0x0112] = 6
    hidden = seen.convert("RGBA")
    hidden.putpixel((5, 5), (1, 2, 3, 0))
    seen.putpixel((5, 5), (255, 255, 255))
    samples = []
    for name, image, options in (("seen", seen, {}), ("raw", hidden.transpose(Image.ROTATE_90), dict(exif=exif))):
        for folder in ("target", "control"):
            save(image, tmp_path / name / folder / "cat.png", **options)
        mask = paint_picture((96, 64), mode="L")
        save(mask.transpose(Image.ROTATE_90) if options else mask, tmp_path / name / "mask/cat.png", **options)
        (tmp_path / name / "target/cat.txt").write_text("add a red border", "utf-8")
        samples.append(samples_of(plus, tmp_path / name)[0]["cat"])
    assert samples[0].sizes == samples[1].sizes == [(96, 64), (96, 64)]
    assert_same(*[encode(plus, s) for s in samples])
