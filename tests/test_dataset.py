"""
Folders -> samples, pictures -> pixels. What is right is read as a person means it; what is wrong is one
line that names it, and the rest of the dataset goes on.
"""
import json
import os
import shutil
import struct
import time
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import cache
import common
from library.data import dataset, picture_files
from tests.harness import (DEVICE, NATIVE, ON_DEVICE, add_item, assert_same, encode, flip, index_of, is_one_line,
                           make_cache, paint_picture, refused, run_script, samples_of, save, show, train, within)

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
    "caption of two marks of an editor": (caption(b"\xef\xbb\xbf" * 2), "target/cat.txt", "empty prompt"),
    "caption with ai-toolkit's [trigger]": (caption(b"[trigger] in snow"), "target/cat.txt", "write the word itself"),
    "caption with ai-toolkit's [name]": (caption(b"so\na photo of [name]"), "target/cat.txt", "[name]"),
    "Latin-1": (caption("caf\u00e9".encode("latin-1")), "target/cat.txt"),
    "UTF-16 without its mark": (caption("red".encode("utf-16-le")), "target/cat.txt"),
    "long caption": (caption(b"red " * 2000), "cat", "1024"),
    "one long wording": (caption(b"red\n" + b"red " * 2000), "cat", "1024"),
    "caption with a token of the template": (caption(b"a <|image_pad|> b"), "target/cat.txt", "<|image_pad|>"),
    "two targets": (lambda d: paint_picture().save(d / "target/cat.jpg"), "cat.jpg", "cat.png"),
    "two controls": (lambda d: paint_picture().save(d / "control/cat.WEBP"), "cat.WEBP", "cat.png"),
    "two masks": (lambda d: [save(paint_picture(), d / f"mask/cat.{s}") for s in ("bmp", "png")], "cat.bmp", "cat.png"),
    "two captions": (lambda d: (d / "target/cat.TXT").write_text("go", "utf-8"), "cat.TXT", "cat.txt"),
    "second control, or another item's first": (lambda d: add_item(d, "cat_1"), "control/cat_1.png"),
    "second control, but no first": (lambda d: (d / "control/cat.png").rename(d / "control/cat_1.png"), "cat.png"),
    "31 pixels": (resized("control/cat.png", 64, 31), "control/cat.png", "64x31"),
    "aspect above 10": (resized("target/cat.png", 32, 321), "target/cat.png", "32x321"),
    "mask of another shape": (instead("mask/cat.png", lambda p: paint_picture((256, 64), mode="L").save(p)),
                              "mask/cat.png", "256x64", "64x64"),
    "empty file": (instead("control/cat.png", Path.touch), "control/cat.png", "empty file"),
    "web page": (instead("control/cat.png", lambda p: p.write_text("<html>404</html>", "utf-8")), "control/cat.png"),
    "GIF": (instead("target/cat.png", lambda p: animation(p, format="GIF")), "target/cat.png"),
    "animated PNG": (instead("target/cat.png", animation), "target/cat.png", "animated"),
    "animated WebP": (instead("target/cat.png", lambda p: animation(p, format="WEBP")), "target/cat.png", "animated"),
    "3600 megapixels": (instead("control/cat.png", claim_size(60000, 60000)), "control/cat.png", "pixels"),
    "169 megapixels": (instead("mask/cat.png", claim_size(13000, 13000)), "mask/cat.png", "megapixels"),
    "FIFO as target": (instead("target/cat.png", os.mkfifo), "target/cat.png"),
    "FIFO as control": (instead("control/cat.png", os.mkfifo), "control/cat.png"),
    "FIFO as caption": (instead("target/cat.txt", os.mkfifo), "target/cat.txt"),
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
    "third control, but no second": (lambda d: paint_picture().save(d / "control/cat_2.png"), "control/cat_2.png"),
    "mask": (lambda d: save(paint_picture(), d / "mask/dog.png"), "mask/dog.png"),
    "numbered mask": (lambda d: save(paint_picture(), d / "mask/cat_1.png"), "mask/cat_1.png"),
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

NO_DATASET = { # what is there instead of a dataset, and what else the one line must name
    "nothing": (lambda d: None, "photos: does not exist; check the name"),
    "empty folder": (Path.mkdir, "is no dataset; it holds nothing", "target/NAME.png"),
    "empty folders": (lambda d: [(d / name).mkdir(parents=True) for name in ("target", "control")],),
    "unknown folders": (lambda d: (d / "after").mkdir(parents=True), "after", "target/NAME.png", "import_data.py"),
    "folders almost of the right names": (lambda d: [(d / x).mkdir(parents=True) for x in ("Targets", "controls")],
                                          "rename Targets to target"),
    "no target": (lambda d: [(d / x).mkdir(parents=True) for x in ("control", "mask")], "holds control, mask; want"),
    "two folders of one meaning": (lambda d: [(d / x).mkdir(parents=True) for x in ("target", "training_images")],
                                   "training_images", "target"),
    "a misspelt folder": (lambda d: [(d / x).mkdir(parents=True) for x in ("target", "contorl")], "contorl",
                          "control/"),
    "a folder of another trainer": (lambda d: [(d / x).mkdir(parents=True) for x in ("target", "input")], "input",
                                    "control"),
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
    """Also in what cache.py says of the largest change of aspect, train.py of each sample, and both in errors."""
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
    strange = [tmp_path / f"data/control/{name}.png" for name in ("\udcff", "tab\tand\nline")]
    for path in strange:
        path.write_bytes(b"")
    for result in (make_cache(tmp_path / "data", tmp_path / "c"), train(tmp_path / "data", tmp_path, "--no-use_cache")):
        assert result.status == 1 and len(result.errors) == 2
        assert all(is_one_line(line, "empty file") for line in result.errors), result.err

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
    lines = ["\U0001f469\u200d\U0001f4bb at work", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
             "\U0001fae9", "!"]
    data = add_item(tmp_path, "cat", caption="\ufeff" + "\n\u200b\n\ufeff".join(lines))
    (tmp_path / "target/dog.png").write_bytes((tmp_path / "target/cat.png").read_bytes())
    (tmp_path / "m.jsonl").write_text(json.dumps(dict(target="target/cat.png", control=[], prompt=lines)), "utf-8")
    for root in (data, tmp_path / "m.jsonl"):
        samples, _ = dataset.read_dataset(root)
        assert samples[0].prompts == lines

def test_a_broken_picture_is_listed_and_left_out(tmp_path, data):
    broken = add_item(data, "bad", [(64, 64)] * 3) / "control/bad_1.png"
    broken.write_bytes(broken.read_bytes()[:-40])
    for skip in ([], ["--skip_bad"]):
        result = train(data, tmp_path, "--cache_dir", tmp_path / "c", *NATIVE, *skip)
        assert result.status == (0 if skip else 1) and len(result.losses) == 2 * bool(skip), result.err
        assert len(result.errors) == 1 and is_one_line(result.errors[0], broken), result.err

def test_hidden_files_and_folders_are_passed_over(data):
    """What file managers and notebooks leave there."""
    (data / "target/._cat.png").write_bytes(b"not a picture")
    save(paint_picture(), data / "target/.ipynb_checkpoints/cat-checkpoint.png")
    save(paint_picture(), data / ".trash/cat.png")
    samples, problems = dataset.read_dataset(data)
    assert sorted(s.name for s in samples) == ["cat", "good"] and not problems

def test_a_picture_that_may_not_be_read_is_one_line(data, monkeypatch):
    def no(*args, **kwargs):
        raise PermissionError
    monkeypatch.setattr(cache.Image, "open", no) # root may read everything
    with refused(data / "target/cat.png", "permissions"):
        picture_files.image_size(data / "target/cat.png")

def test_a_folder_that_cannot_be_read_is_not_passed_over(data, monkeypatch):
    real = os.walk
    def walk(folder, onerror):
        onerror(PermissionError(13, "Permission denied", f"{folder}/deep")) # root may read everything
        yield from real(folder)
    monkeypatch.setattr(os, "walk", walk)
    with refused(data / "target/deep", "permissions"):
        dataset.read_dataset(data)

# ---- several datasets, and pictures without controls -----------------------------------------------------------------

def test_several_roots_are_one_dataset_and_repeats_are_the_stream(tmp_path):
    """An epoch has each sample as often as --repeats says, the index knows it, and a resumed run cannot change it."""
    for root, names in (("a", "xy"), ("b", "x")):
        for name in names:
            add_item(tmp_path / root, name, caption=f"{root} {name}")
    data, epochs = [tmp_path / "a", tmp_path / "b"], []
    flags = ["--val_data", "--max_steps", 1, "--lr_scheduler", "constant", "--lora_rank", 2, *NATIVE, *ON_DEVICE,
             "--cache_dir", tmp_path / "c"]
    for out_dir, roots in (("r", [*data, "--repeats", 1, 3]), ("n", [tmp_path / "c/tiny-a+b.json"])):
        run = run_script("train.py", *flags, "--out_dir", tmp_path / out_dir, "--data", *roots)
        assert run.status == 0 and run.globals["run_name"] == "tiny-a+b", run.err
        picked = [run.globals["pick"](p).sample for p in range(5)]
        epochs.append([f"{s.root}/{s.name}" for s in picked])
    assert epochs[0] == epochs[1] and sorted(epochs[0]) == ["a/x", "a/y", "b/x", "b/x", "b/x"]
    other = run_script("train.py", *flags, "--data", *data, "--resume", "--out_dir", tmp_path / "r", "--max_steps", 2)
    assert other.status == 1 and is_one_line(other.errors[0], "--resume", "data")

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

TURNS = { # what the EXIF standard says about orientation 1 to 8
    1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2), 6: lambda a: np.rot90(a, -1), 7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}

@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_pictures_are_turned_as_exif_says(tmp_path, suffix, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(paint_picture((96, 64)), tmp_path / f"a.{suffix}", exif=exif)
    want = TURNS[orientation](np.asarray(Image.open(path).convert("RGB")))
    assert np.array_equal(np.asarray(picture_files.read_image(path)), want)
    assert picture_files.image_size(path) == (want.shape[1], want.shape[0])

def notes_behind(path, turned, kind):
    """Writes a PNG whose pixels stand before what says how they lie -> the bytes of that."""
    exif = Image.Exif()
    exif[0x0112] = turned
    block = exif.tobytes()
    xmp = f'<rdf:Description tiff:Orientation="{turned}"/>'.encode()
    profile = f"\nexif\n{len(block):8}\n{block.hex()}\n".encode()
    notes = dict(eXIf=chunk(b"eXIf", block[6:]), XMP=chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
                 profile=chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile)))[kind]
    sound = save(paint_picture((96, 64)), path).read_bytes()
    path.write_bytes(sound[:-12] + notes + sound[-12:])
    return notes

@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("kind", ["eXIf", "XMP", "profile"])
def test_exif_behind_the_pixels_of_a_png_turns_it(tmp_path, kind, orientation, monkeypatch):
    """As viewers and ImageOps.exif_transpose turn it; the size alone needs no pixel. (Of XMP, too, which counts where
    there is no EXIF.)"""
    path = tmp_path / "a.png"
    notes_behind(path, orientation, kind)
    want = ImageOps.exif_transpose(Image.open(path))
    assert np.array_equal(np.asarray(want), TURNS[orientation](np.asarray(paint_picture((96, 64)))))
    for content in (None, common.file_hash(path)):
        assert np.array_equal(np.asarray(picture_files.read_image(path, content)), np.asarray(want))
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decodes the pixels"))
    assert picture_files.image_size(path) == want.size

def test_damage_behind_the_pixels_of_a_png_must_not_matter(tmp_path):
    """No note of it hides the EXIF in its right place, and size and pixels agree."""
    rng, path, exif = np.random.default_rng(0), tmp_path / "a.png", Image.Exif()
    notes, turned = notes_behind(path, 8, "eXIf"), 0
    exif[0x0112] = 6
    sound = save(paint_picture((96, 64)), path, exif=exif).read_bytes()
    for place in [*range(len(notes)), *rng.integers(0, len(notes), 50)]:
        damaged = bytearray(notes)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(sound[:-12] + damaged + sound[-12:])
        try:
            size = picture_files.read_image(path).size
        except common.InputError: # a chunk's length that leads nowhere
            continue
        assert picture_files.image_size(path) == size
        turned += size == (64, 96)
    assert turned > 40

def test_the_size_of_a_large_png_is_known_without_reading_it(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (2000, 2000, 3), dtype=np.uint8)
    path = save(Image.fromarray(noise), tmp_path / "a.png", compress_level=0)
    begin = time.process_time()
    assert {picture_files.image_size(path) for _ in range(20)} == {(2000, 2000)}
    seconds = (time.process_time() - begin) / 20
    show("seconds for the size of a PNG of 12 MB", seconds, 0.03)
    assert seconds < 0.03

@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "tif", "avif"])
def test_what_is_decoded_is_what_was_hashed(tmp_path, suffix):
    path = save(paint_picture(), tmp_path / f"a.{suffix}")
    content, want = common.file_hash(path), picture_files.read_image(path)
    assert np.array_equal(np.asarray(picture_files.read_image(path, content)), np.asarray(want))
    save(paint_picture(seed=1), path)
    for read in (picture_files.read_image, picture_files.read_mask):
        with refused(path, "has changed since it was looked at; run the same command again"):
            read(path, content)
    with pytest.MonkeyPatch.context() as patch: # it changes between two readings: there is only one
        patch.setattr(Path, "read_bytes", lambda path, data=path.read_bytes(): data)
        content, changed = common.file_hash(path), picture_files.read_image(path)
        save(paint_picture(seed=2), path)
        assert np.array_equal(np.asarray(picture_files.read_image(path, content)), np.asarray(changed))
    path.write_bytes(b"")
    with refused(path):
        picture_files.read_image(path, content)
    path.unlink()
    with refused(path):
        picture_files.read_image(path, content)

def strange_exif():
    """Blocks with damage of every kind; all of them hold an orientation at first."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010e], exif[0x011a] = 6, "a description", 72.0
    sound, rng = exif.tobytes(), np.random.default_rng(0)
    yield from (b"", b"Exif\0\0", b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff")
    yield from (sound[:n] for n in range(6, len(sound)))
    for _ in range(300):
        damaged = bytearray(sound)
        for place in rng.integers(6, len(sound), 3):
            damaged[place] = rng.integers(256)
        yield bytes(damaged)

@pytest.mark.filterwarnings("ignore") # of PIL, about the damage
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_damaged_exif_is_ignored(tmp_path, suffix):
    for n, block in enumerate(strange_exif()):
        path = save(paint_picture((96, 64)), tmp_path / f"{n}.{suffix}", exif=block)
        assert picture_files.image_size(path) == picture_files.read_image(path).size, block

@pytest.mark.parametrize("mode, suffix, level", [
    ("RGBA", "png", 0), ("LA", "png", 0), ("P", "png", 0), ("RGB", "png", 0), ("L", "png", 0), ("RGBA", "webp", 3)])
def test_what_is_transparent_becomes_white(tmp_path, mode, suffix, level):
    """A quarter of the picture is transparent over a hidden 200, the rest opaque."""
    gray, alpha = np.full((64, 64), 30, np.uint8), np.full((64, 64), 255, np.uint8)
    gray[:32, :32], alpha[:32, :32] = 200, 0
    image, options = Image.fromarray(gray), {}
    if mode in ("RGBA", "LA"):
        image = image.convert(mode[:-1])
        image.putalpha(Image.fromarray(alpha))
    else: # one colour, or one entry of the palette, is declared transparent
        image = image.convert(mode)
        options["transparency"] = (200, 200, 200) if mode == "RGB" else 200 if mode == "L" else image.getpixel((0, 0))
    got = np.asarray(picture_files.read_image(save(image, tmp_path / f"a.{suffix}", **options)))
    assert (got[:32, :32] == 255).all()
    assert (abs(got[32:].astype(int) - 30) <= level).all()

def test_half_transparent_is_half_white(tmp_path):
    path = save(Image.new("RGBA", (32, 32), (0, 100, 200, 128)), tmp_path / "a.png")
    assert picture_files.read_image(path).getpixel((0, 0)) == pytest.approx((127, 177, 227), abs=1)

def test_16_bit_gray_is_scaled_not_clipped(tmp_path):
    levels = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    got = np.asarray(picture_files.read_image(save(Image.fromarray(levels), tmp_path / "a.png"))).astype(float)
    assert abs(got - (levels / 257)[..., None]).max() <= 1

@pytest.mark.parametrize("mode, suffix", [("CMYK", "jpg"), ("1", "png"), ("L", "jpg"), ("P", "png"), ("L", "bmp")])
def test_other_modes_become_rgb(tmp_path, mode, suffix):
    path = save(paint_picture(mode=mode), tmp_path / f"a.{suffix}")
    got = picture_files.read_image(path)
    assert got.mode == "RGB" and np.array_equal(np.asarray(got), np.asarray(Image.open(path).convert("RGB")))

def test_the_content_counts_not_the_suffix(tmp_path):
    image, path = paint_picture(), tmp_path / "a.jpg"
    image.save(path, format="PNG")
    assert np.array_equal(np.asarray(picture_files.read_image(path)), np.asarray(image))
    image.save(path, format="MPO", save_all=True, append_images=[image]) # a JPEG with a preview, as phones write them
    assert picture_files.image_size(path) == picture_files.read_image(path).size == (64, 64)

@pytest.mark.filterwarnings("ignore") # of PIL, about the damage
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "tif", "avif"])
def test_no_damage_to_a_picture_is_a_traceback(tmp_path, suffix):
    """A truncated file of any kind can be told; a flipped bit of a JPEG cannot, but must do no harm."""
    path, rng = save(paint_picture((96, 64)), tmp_path / f"a.{suffix}"), np.random.default_rng(0)
    sound = path.read_bytes()
    cuts = [sound[:n] for n in sorted({int(n) for n in np.linspace(0, len(sound) // 2, 40)})]
    flips = [flip(int(bit))(sound) for bit in [*range(8 * 60), *rng.integers(0, 8 * len(sound), 300)]]
    for n, content in enumerate(cuts + flips):
        path.write_bytes(content)
        for read in (picture_files.image_size, picture_files.read_image):
            try:
                with within(5):
                    read(path)
                assert n >= len(cuts) or read is picture_files.image_size, f"cut to {len(content)} bytes went unnoticed"
            except common.InputError as e:
                assert is_one_line(str(e), path)

def test_a_picture_with_a_bomb_in_its_text_is_refused(tmp_path):
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(80 * 2**20)))
    path = save(paint_picture(), tmp_path / "a.png")
    sound = path.read_bytes()
    for where in (33, -12): # after the header, and before the end
        path.write_bytes(sound[:where] + bomb + sound[where:])
        with refused(path):
            picture_files.read_image(path)

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
