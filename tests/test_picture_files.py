"""
Files -> pixels. Photographs as cameras make them: other colours than sRGB, TIFF, AVIF, HEIC, turned, transparent,
damaged. Colours are computed here from primaries and curves, not by the library that picture_files.read_image uses.

$ python -m pytest -q tests/test_picture_files.py     # 15 seconds
"""
import os
import struct
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

import cache
import common
from library.data import dataset, picture_files
import predict
from tests.harness import (NATIVE, add_item, flip, is_one_line, paint_picture, refused, samples_of, save, show, within,
                           works)
from tests.icc_profiles import (TO_D50, curve, fixed, in_srgb, lab_in_srgb, profile_of, rgb_profile, srgb_level,
                                to_xyz)

try:
    import pillow_heif
    pillow_heif.register_heif_opener()
except ImportError:
    pillow_heif = None
HEIC = pytest.param("heic", marks=pytest.mark.skipif(not pillow_heif, reason="pip install pillow-heif"))

# ---- profiles --------------------------------------------------------------------------------------------------------

def table_profile():
    """Of a table of colours that are linear between its corners, as scanners have it."""
    corners = np.stack(np.meshgrid([0, 1], [0, 1], [0, 1], indexing="ij"), -1).reshape(-1, 3)
    clut = (corners @ (TO_D50 @ to_xyz("sRGB")).T * 32768).clip(0, 65535).astype(">u2").tobytes()
    ramp = np.array([0, 65535], ">u2").tobytes()
    head = b"mft2\0\0\0\0" + bytes([3, 3, 2, 0]) + fixed(1, 0, 0, 0, 1, 0, 0, 0, 1) + struct.pack(">2H", 2, 2)
    return profile_of(b"RGB ", {b"A2B0": head + 3 * ramp + clut + 3 * ramp})

def gray_profile(gamma):
    return profile_of(b"GRAY", {b"kTRC": curve(lambda x: x**gamma)})

# Lab of each corner of CMYK, i.e. of all sixteen mixtures of full inks
CORNERS = np.linspace([100, 0, 0], [0, 0, 0], 16).round()
CORNERS[1:-1, 1:] = (40 * np.sin(np.arange(28))).round().reshape(14, 2)

def cmyk_profile():
    clut = np.stack([CORNERS[:, 0] * 255 / 100, CORNERS[:, 1] + 128, CORNERS[:, 2] + 128], -1).round().astype(np.uint8)
    ramp = bytes(range(256))
    table = bytes([4, 3, 2, 0]) + fixed(1, 0, 0, 0, 1, 0, 0, 0, 1) + 4 * ramp + clut.tobytes() + 3 * ramp
    return profile_of(b"CMYK", {b"A2B0": b"mft1\0\0\0\0" + table}, b"prtr", b"Lab ")

def builtin(name):
    return ImageCms.ImageCmsProfile(ImageCms.createProfile(name)).tobytes()

def patches(channels=3, seed=0):
    """36 colours in squares of 16 pixels; the first four are corners."""
    colours = np.random.default_rng(seed).integers(0, 256, (6, 6, channels), dtype=np.uint8)
    colours[0, 0], colours[0, 1], colours[0, 2], colours[0, 3] = 0, 255, [255] + [0] * (channels - 1), 128
    return colours.repeat(16, 0).repeat(16, 1)

def centres(image):
    """The colours of such patches, away from their edges, which JPEG and AVIF soften."""
    return np.asarray(image).astype(float)[8::16, 8::16]

def furthest(got, want):
    return abs(centres(got) - want[8::16, 8::16]).max()

LOSS = dict(png=({}, 0), tif=({}, 0), webp=(dict(lossless=True), 0), jpg=(dict(quality=100, subsampling=0), 2),
            avif=(dict(quality=100, subsampling="4:4:4"), 2), heic=(dict(quality=-1, chroma=444), 2), bmp=({}, 0))

@pytest.mark.parametrize("name", ["P3", "Adobe", "linear"])
@pytest.mark.parametrize("suffix", ["png", "tif", "webp", "jpg", "avif", HEIC])
def test_a_wide_colour_is_the_same_colour_in_srgb(tmp_path, suffix, name):
    """What sRGB has not is clipped; the picture that comes out has no profile."""
    pixels = patches()
    options, loss = LOSS[suffix]
    path = save(Image.fromarray(pixels), tmp_path / f"a.{suffix}", icc_profile=rgb_profile(name), **options)
    stored = Image.open(path).convert("RGB")
    assert furthest(stored, pixels) <= loss
    got, want = picture_files.read_image(path), in_srgb(stored, name)
    error = abs(np.asarray(got) - want).max()
    show(f"{name} in sRGB, {suffix}, levels", error, 1.5)
    assert error <= 1.5 and furthest(stored, want) > 30
    assert got.mode == "RGB" and "icc_profile" not in got.info
    predict.save_png(got, tmp_path / "out.png")
    assert "icc_profile" not in Image.open(tmp_path / "out.png").info

GRAYS = np.arange(256, dtype=np.uint8).repeat(16).reshape(64, 64)

@pytest.mark.parametrize("gamma", [1.0, 1.8])
@pytest.mark.parametrize("mode", ["L", "LA", "I;16"])
def test_gray_of_another_gamma(tmp_path, mode, gamma):
    image = Image.fromarray(GRAYS.astype(np.uint16) * 257 if mode == "I;16" else GRAYS)
    if mode == "LA":
        image.putalpha(255)
    got = picture_files.read_image(save(image, tmp_path / "a.png", icc_profile=gray_profile(gamma)))
    want = srgb_level((GRAYS / 255) ** gamma)
    assert abs(np.asarray(got) - want[..., None]).max() <= 1.5 and abs(GRAYS - want).max() > 15

def test_gray_with_a_profile_of_colours_is_a_colour_of_equal_parts(tmp_path):
    """Editors save it so."""
    path = save(Image.fromarray(GRAYS), tmp_path / "a.jpg", icc_profile=rgb_profile("Adobe"), quality=100)
    want = in_srgb(np.stack([Image.open(path)] * 3, -1), "Adobe")
    assert abs(np.asarray(picture_files.read_image(path)) - want).max() <= 1.5

# ---- 16 bits ---------------------------------------------------------------------------------------------------------

def write_png(path, levels, profile, orientation=1):
    """Of 16 bits: gray, gray and alpha, RGB or RGBA by its last axis, which PIL cannot write."""
    h, w, n = levels.shape
    header = struct.pack(">2I5B", w, h, 16, {1: 0, 2: 4, 3: 2, 4: 6}[n], 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in levels.astype(">u2"))
    parts = dict(IHDR=header, iCCP=b"x\0\0" + zlib.compress(profile), eXIf=turned(orientation).tobytes()[6:],
                 IDAT=zlib.compress(rows), IEND=b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name.encode(), part) for name, part in parts.items()))
    return path

def dark_levels():
    """16 bits, (64, 96, 3); most are dark, where 8 bits of linear light are few."""
    return (65535 * np.random.default_rng(0).random((64, 96, 3)) ** 4).round().astype(np.uint16)

def with_alpha(levels):
    return np.concatenate([levels, np.full_like(levels[..., :1], 65535)], -1)

DEEP = { # a file of 16 bits: how it is written
    "PNG": lambda path, levels, icc: write_png(path, levels, icc),
    "a turned PNG": lambda path, levels, icc: write_png(path, levels, icc, 6),
    "an opaque PNG": lambda path, levels, icc: write_png(path, with_alpha(levels), icc),
    "a gray PNG": lambda path, levels, icc: write_png(path, levels[..., :1], icc),
    "TIFF": lambda path, levels, icc: write_tiff(path, levels, "<", 2, t34675=icc),
    "TIFF of a Mac": lambda path, levels, icc: write_tiff(path, levels, ">", 2, t34675=icc),
    "an opaque TIFF": lambda path, levels, icc: write_tiff(path, with_alpha(levels), "<", 2, t338=2, t34675=icc),
    "a gray TIFF": lambda path, levels, icc: write_tiff(path, levels[..., 0], "<", t34675=icc),
    "a gray TIFF of a Mac": lambda path, levels, icc: write_tiff(path, levels[..., 0], ">", t34675=icc)}

@pytest.mark.parametrize("name", ["linear", "linear ProPhoto", "ProPhoto", "Adobe"])
@pytest.mark.parametrize("form", DEEP)
def test_a_profile_is_applied_to_all_16_bits(tmp_path, form, name):
    """8 bits of them would be up to 10, 25, 3 and 1.2 levels off. (Gray is of equal parts in any space of colours.)"""
    levels = dark_levels()
    want = in_srgb((levels[..., [0, 0, 0]] if "gray" in form else levels) / 257, name)
    path = DEEP[form](tmp_path / "a", levels, rgb_profile(name))
    for content in (None, common.file_hash(path)):
        got = np.asarray(picture_files.read_image(path, content))
        error = abs(got - (np.rot90(want, -1) if "turned" in form else want)).max()
        assert error <= 1
    show(f"16 bits in {name}, {form}, levels", error, 1)
    assert dataset.picture_facts(path)[1] == common.file_hash(path) + " in sRGB"

REFUSED_16 = {
    "a profile of tables": lambda path: write_png(path, dark_levels(), table_profile()),
    "gray and alpha": lambda path: write_png(path, dark_levels()[..., :2], gray_profile(1.0)),
    "gray and alpha in colours": lambda path: write_png(path, dark_levels()[..., :2], rgb_profile("linear")),
    "inks": lambda path: write_tiff(path, with_alpha(dark_levels()), photometric=5, t34675=cmyk_profile())}

@pytest.mark.parametrize("kind", REFUSED_16)
def test_16_bits_that_could_be_converted_in_8_only_are_one_line(tmp_path, kind):
    """Before a model loads, and when they are read. Without a profile, or with 8 bits, they are read."""
    path = REFUSED_16[kind](tmp_path / "a")
    for read in (dataset.picture_facts, picture_files.read_image):
        with refused(path, "save it in sRGB, or with 8 bits"):
            read(path)
    image = Image.open(path)
    image.info.clear()
    eight = save(image, tmp_path / "b.tif", icc_profile=table_profile() if image.mode == "RGB" else None)
    assert picture_files.read_image(eight).size == (96, 64)

def parametric(kind, *numbers):
    return b"para\0\0\0\0" + struct.pack(">2H", kind, 0) + fixed(*numbers)

def counted(count, size=0):
    return b"curv\0\0\0\0" + struct.pack(">I", count) + bytes(size)

@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("trc", [
    b"", b"curv", b"junk" * 9, counted(2**32 - 1), counted(1000, 10), counted(256, 512), counted(2**17, 2**18),
    parametric(9, 1.0), parametric(0, 0.0), parametric(0, -1.0), parametric(3, -30000, 30000, -30000, 1, 0.5),
    parametric(4, 30000, 30000, 30000, 1, 0, -30000, 30000)], ids=lambda trc: trc[:14].hex())
def test_no_curve_of_a_profile_is_a_traceback(tmp_path, capsys, trc):
    """Not one that is broken, huge, or infinite: at most one line, in no time."""
    path = write_png(tmp_path / "a.png", dark_levels(), rgb_profile("linear", trc))
    with within(5):
        assert picture_files.read_image(path).size == (96, 64)
    assert capsys.readouterr().err.count("\n") <= 1

@pytest.mark.parametrize("suffix", ["tif", "jpg"])
def test_inks_are_the_colours_that_their_profile_prints(tmp_path, suffix):
    """Adobe's JPEGs store them inverted."""
    corners = np.arange(16).reshape(4, 4)
    inks = np.stack([(corners >> bit & 1) * 255 for bit in (3, 2, 1, 0)], -1).astype(np.uint8) # cyan varies slowest
    image = Image.fromarray(inks.repeat(16, 0).repeat(16, 1), "CMYK")
    options = dict(quality=100, subsampling=0) if suffix == "jpg" else {}
    got = picture_files.read_image(save(image, tmp_path / f"a.{suffix}", icc_profile=cmyk_profile(), **options))
    want = lab_in_srgb(CORNERS)[corners]
    assert abs(centres(got) - want).max() <= (4 if suffix == "jpg" else 1.5)
    assert abs(centres(image.convert("RGB")) - want).max() > 50

@pytest.mark.parametrize("kind", ["RGBA", "palette", "one colour"])
def test_what_is_transparent_in_wide_colours_becomes_white(tmp_path, kind):
    """The colour is converted first: white on screen is white in any space, and half of each lies between."""
    pixels = patches()
    image, options = Image.fromarray(pixels), {}
    alpha = np.full(pixels.shape[:2], 255, np.uint8)
    if kind == "RGBA":
        alpha[:] = np.arange(96)[:, None] * 2
        image.putalpha(Image.fromarray(alpha))
    else:
        where, alpha[8, 8] = (pixels == pixels[40, 40]).all(-1), 255
        alpha[where] = 0
        if kind == "palette":
            image = image.quantize(64)
            assert np.array_equal(np.asarray(image.convert("RGB")), pixels)
        options["transparency"] = image.getpixel((40, 40))
    path = save(image, tmp_path / "a.png", icc_profile=rgb_profile("P3"), **options)
    share = alpha[..., None] / 255
    want = share * in_srgb(pixels, "P3") + (1 - share) * 255
    assert abs(np.asarray(picture_files.read_image(path)) - want).max() <= 2.5

def test_threads_share_a_conversion(tmp_path):
    profiles = [rgb_profile("P3"), rgb_profile("Adobe")]
    paths = [save(Image.fromarray(patches(seed=n)), tmp_path / f"{n}.png", icc_profile=profiles[n % 2])
             for n in range(8)]
    want = [picture_files.read_image(path).tobytes() for path in paths]
    picture_files.conversion.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda path: picture_files.read_image(path).tobytes(), paths * 20))
    assert got == want * 20

# ---- what is sRGB, or counts as such, stays as it is -----------------------------------------------------------------

@pytest.mark.parametrize("profile", [builtin("sRGB"), rgb_profile("sRGB")], ids=["of the library", "by hand"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_srgb_stays_to_the_bit_with_or_without_a_profile(tmp_path, mode, profile):
    image = paint_picture(mode=mode)
    plain, tagged = save(image, tmp_path / "a.png"), save(image, tmp_path / "b.png", icc_profile=profile)
    assert picture_files.read_image(plain).tobytes() == picture_files.read_image(tagged).tobytes()
    for path in (plain, tagged): # in the key as it was before profiles were read
        assert dataset.picture_facts(path) == [(64, 64), common.file_hash(path)]
    assert picture_files.conversion(profile, mode) == (None, None)

BROKEN = {"cut": (rgb_profile("P3")[:300], "is broken"), "noise": (os.urandom(2000), "is broken"),
          "empty": (b"\0", "is broken"), "of gray": (gray_profile(1.8), "is for GRAY, and the picture is RGB"),
          "of inks": (cmyk_profile(), "is for CMYK, and the picture is RGB")}

@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_profile_that_cannot_be_used_is_ignored_with_one_line(tmp_path, capsys, suffix, kind):
    profile, problem = BROKEN[kind]
    path = save(paint_picture(), tmp_path / f"a.{suffix}", icc_profile=profile)
    want = Image.open(path).convert("RGB").tobytes()
    assert {picture_files.read_image(path).tobytes() for _ in range(3)} == {want}
    err = capsys.readouterr().err
    assert err == f"warning: {path}: its colour profile {problem}; it is ignored, and the colours count as sRGB\n"
    assert dataset.picture_facts(path)[1] == common.file_hash(path)

def test_a_mask_has_no_colours(tmp_path):
    """Its levels are shares."""
    mask = Image.fromarray(GRAYS)
    for suffix in ("png", "tif", "jpg"):
        options = dict(quality=100) if suffix == "jpg" else {}
        path = save(mask, tmp_path / f"a.{suffix}", icc_profile=gray_profile(1.0), **options)
        assert picture_files.read_mask(path).tobytes() == Image.open(path).tobytes()
        assert dataset.mask_facts(path)[1] == common.file_hash(path)
    labels = Image.fromarray((np.asarray(mask) > 99).astype(np.uint8)) # of a format without loss: 0 and 1
    assert picture_files.read_mask(save(labels, tmp_path / "b.tif")).getextrema() == (0, 255)

# ---- the cache -------------------------------------------------------------------------------------------------------

def test_another_profile_is_another_encoding(tmp_path, plus):
    """But that of sRGB, which changes nothing."""
    add_item(tmp_path / "d", "cat")
    target, image = tmp_path / "d/target/cat.png", paint_picture()
    keys, texts, pictures = [], [], []
    for profile in (None, rgb_profile("sRGB"), rgb_profile("P3"), rgb_profile("Adobe")):
        save(image, target, icc_profile=profile)
        sample = samples_of(plus, tmp_path / "d")[0]["cat"]
        keys.append(sample.encodings[0]["file"])
        texts.append({text["file"] for text in sample.texts.values()}) # which do not see the target
        pixels, = cache.read_pictures(plus, sample, "vae", sample.encodings[0])["target"]
        pictures.append(pixels[0, :, 0].permute(1, 2, 0).add(1).mul(127.5).round().byte().numpy().tobytes())
    assert len(set(keys)) == 4 and len(set(map(str, texts))) == 1
    assert pictures[:2] == [image.tobytes()] * 2 and len(set(pictures)) == 3

@pytest.mark.parametrize("suffix, wide", [*((suffix, False) for suffix in ("png", "jpg", "webp", "bmp", "tif", "avif")),
                                          ("png", True), ("jpg", True), ("tif", True)])
def test_what_is_decoded_is_what_was_hashed(tmp_path, suffix, wide):
    """The hash of a picture that is converted is not that of its file alone."""
    path = save(paint_picture(), tmp_path / f"a.{suffix}", icc_profile=rgb_profile("P3") if wide else None)
    content = dataset.picture_facts(path)[1]
    assert content == common.file_hash(path) + (" in sRGB" if wide else "")
    assert picture_files.read_image(path, content).tobytes() == picture_files.read_image(path).tobytes()
    for change in (lambda: save(paint_picture(seed=1), path), lambda: path.write_bytes(b""), path.unlink):
        change()
        for read in (picture_files.read_image, picture_files.read_mask):
            with refused(path):
                read(path, content)

# ---- TIFF ------------------------------------------------------------------------------------------------------------

def write_tiff(path, pixels, order="<", photometric=1, sample_format=1, bits=None, **more):
    """An uncompressed TIFF of one strip. more: {t254: value}, further tags."""
    pixels = np.ascontiguousarray(pixels)
    h, w = pixels.shape[:2]
    n = pixels.shape[2] if pixels.ndim > 2 else 1
    data = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    bits = bits or 8 * pixels.itemsize
    tags = {256: w, 257: h, 258: [bits] * n, 259: 1, 262: photometric, 273: 8, 277: n, 278: h, 279: len(data),
            339: [sample_format] * n} | {int(name[1:]): value for name, value in more.items()}
    ifd, spare, start = b"", b"", 8 + len(data) + len(data) % 2
    for tag, value in sorted(tags.items()):
        values = list(value) if isinstance(value, (list, bytes)) else [value]
        kind, letter = (4, "I") if tag in (256, 257, 273, 278, 279) else (3, "H")
        if isinstance(value, bytes): # a profile
            kind, letter = 7, "B"
        content = struct.pack(f"{order}{len(values)}{letter}", *values)
        if len(content) > 4:
            content, spare = struct.pack(order + "I", start + 6 + 12 * len(tags) + len(spare)), spare + content
        ifd += struct.pack(order + "HHI", tag, kind, len(values)) + content.ljust(4, b"\0")
    mark = {"<": b"II*\0", ">": b"MM\0*"}[order]
    path.write_bytes(mark + struct.pack(order + "I", start) + data + bytes(len(data) % 2)
                     + struct.pack(order + "H", len(tags)) + ifd + bytes(4) + spare)
    return path

@pytest.mark.parametrize("order", "<>")
def test_16_bits_are_scaled_not_clipped(tmp_path, order):
    levels = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    tiff, png = write_tiff(tmp_path / "a.tif", levels, order), save(Image.fromarray(levels), tmp_path / "a.png")
    for path in (tiff, png):
        got = np.asarray(picture_files.read_image(path)).astype(float)
        assert abs(got - (levels / 257)[..., None]).max() <= 0.5
        assert abs(np.asarray(picture_files.read_mask(path)) - levels / 257).max() <= 0.5
    colours = np.stack([levels, levels[::-1], levels.T], -1)
    got = np.asarray(picture_files.read_image(write_tiff(tmp_path / "a.tif", colours, order, 2))).astype(float)
    assert abs(got - colours / 257).max() <= 1 and got.min() == 0 and got.max() == 255

def test_a_tiff_of_several_pages_is_refused(tmp_path):
    """Of layers the first one is not the picture."""
    path = save(paint_picture((96, 64)), tmp_path / "a.tif", save_all=True, append_images=[paint_picture((32, 48))])
    for content in (None, common.file_hash(path)):
        with refused(path, "several frames or pages", "export one"):
            picture_files.read_image(path, content)

NOT_PLAIN = { # what the line says
    "floats": (lambda: np.zeros((64, 64), np.float32), dict(sample_format=3), "8 or 16 bits"),
    "signed": (lambda: np.zeros((64, 64), np.int16), dict(sample_format=2), "8 or 16 bits"),
    "12 bits": (lambda: np.zeros((64, 96), np.uint8), dict(bits=12, t256=64), "8 or 16 bits"),
    "white is 0": (lambda: np.zeros((64, 64), np.uint16), dict(photometric=0), "8 or 16 bits"),
    "Lab": (lambda: np.zeros((64, 64, 3), np.uint8), dict(photometric=8), "Lab"),
    "planar": (lambda: np.zeros((64, 64, 3), np.uint16), dict(photometric=2, t284=2), "planar"),
    "a preview": (lambda: np.zeros((64, 64, 3), np.uint8), dict(photometric=2, t254=1), "a raw file"),
    "DNG": (lambda: np.zeros((64, 64, 3), np.uint8), dict(photometric=2, t50706=1), "a raw file")}

@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_tiff_that_would_be_misread_is_refused(tmp_path, kind):
    pixels, options, words = NOT_PLAIN[kind]
    path = write_tiff(tmp_path / "a.tif", pixels(), **options)
    Image.open(path).load() # as PIL reads it
    for read in (dataset.picture_facts, picture_files.read_image, picture_files.read_mask):
        with refused(path, words):
            read(path)

# ---- which way is up -------------------------------------------------------------------------------------------------

TURNS = {1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
         5: lambda a: a.transpose(1, 0, 2), 6: lambda a: np.rot90(a, -1),
         7: lambda a: np.rot90(a, 2).transpose(1, 0, 2), 8: lambda a: np.rot90(a)} # by EXIF orientation

def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif

@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif", "avif", HEIC])
@pytest.mark.parametrize("wide", [False, True])
def test_pictures_are_turned_once(tmp_path, monkeypatch, suffix, orientation, wide):
    """PIL turns a TIFF, and pillow-heif a HEIC, by itself; an AVIF is ours to turn."""
    image, exif = Image.fromarray(patches()[:64]), turned(orientation)
    image.info["exif"] = exif.tobytes()
    options, loss = LOSS[suffix]
    if suffix != "heic": # (which writes the turn only from there)
        options = options | dict(exif=exif)
    if wide:
        options = options | dict(icc_profile=rgb_profile("P3"))
    path = save(image, tmp_path / f"a.{suffix}", **options)
    want = TURNS[orientation](in_srgb(patches()[:64], "P3") if wide else patches()[:64])
    assert picture_files.image_size(path) == (want.shape[1], want.shape[0])
    got = picture_files.read_image(path)
    assert got.size == picture_files.image_size(path) and furthest(got, want) <= 1.5 + 3 * loss
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decodes the pixels"))
    assert dataset.picture_facts(path)[0] == got.size

@pytest.mark.parametrize("mode", ["L", "I;16", "P", "RGBA", "CMYK", "RGB", "1"])
@pytest.mark.parametrize("orientation", [3, 6, 7])
def test_a_turned_tiff_is_read_by_its_path_as_from_its_bytes(tmp_path, mode, orientation):
    """PIL maps an uncompressed file into memory by the size after the turn."""
    image = Image.fromarray(patches()[:64]).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    path = save(image, tmp_path / "a.tif", exif=turned(orientation))
    plain = picture_files.read_image(save(image, tmp_path / "b.tif"))
    want = TURNS[orientation](np.asarray(plain))
    assert np.array_equal(np.asarray(picture_files.read_image(path)), want)
    assert np.array_equal(np.asarray(picture_files.read_image(path, common.file_hash(path))), want)

def chunk(kind, content):
    """A part of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

def write_notes_behind(path, orientation, kind):
    """Writes a PNG whose pixels stand before what says how they lie."""
    block = turned(orientation).tobytes()
    xmp = f'<rdf:Description tiff:Orientation="{orientation}"/>'.encode()
    profile = f"\nexif\n{len(block):8}\n{block.hex()}\n".encode()
    notes = dict(eXIf=chunk(b"eXIf", block[6:]), XMP=chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
                 profile=chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile)))[kind]
    sound = save(paint_picture((96, 64)), path).read_bytes()
    path.write_bytes(sound[:-12] + notes + sound[-12:])

@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("kind", ["eXIf", "XMP", "profile"])
def test_exif_behind_the_pixels_of_a_png_turns_it(tmp_path, kind, orientation, monkeypatch):
    """As viewers turn it; the size alone needs no pixel. (XMP counts where there is no EXIF.)"""
    path = tmp_path / "a.png"
    write_notes_behind(path, orientation, kind)
    want = ImageOps.exif_transpose(Image.open(path))
    assert np.array_equal(np.asarray(want), TURNS[orientation](np.asarray(paint_picture((96, 64)))))
    for content in (None, common.file_hash(path)):
        assert np.array_equal(np.asarray(picture_files.read_image(path, content)), np.asarray(want))
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decodes the pixels"))
    assert picture_files.image_size(path) == want.size

def strange_exif():
    """Blocks with damage of every kind; all of them hold an orientation at first."""
    exif = turned(6)
    exif[0x010e], exif[0x011a] = "a description", 72.0
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

XMP = b"""<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>"""

@pytest.mark.parametrize("suffix", ["tif", "avif", HEIC])
def test_xmp_does_not_turn_what_its_format_turns(tmp_path, suffix):
    """Editors turn the pixels and leave the words."""
    options = dict(tiffinfo={700: XMP}) if suffix == "tif" else dict(xmp=XMP)
    image = Image.fromarray(patches()[:64])
    path = tmp_path / f"a.{suffix}"
    if suffix == "heic":
        heif = pillow_heif.from_pillow(image)
        heif.save(path, quality=-1)
    else:
        save(image, path, **options)
    assert picture_files.image_size(path) == picture_files.read_image(path).size == (96, 64)

# ---- HEIC ------------------------------------------------------------------------------------------------------------

def test_heic_without_its_package_is_told_by_its_first_bytes(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for brand in (b"heic", b"heix", b"hevc", b"mif1", b"msf1"):
        path = tmp_path / "a.jpg"
        path.write_bytes(b"\0\0\0\x18ftyp" + brand + bytes(40))
        with refused(path, "pip install pillow-heif"):
            picture_files.image_size(path)
    for head in (b"\xff\n", b"\0\0\0\fJXL \r\n\x87\n"):
        path.write_bytes(head + bytes(40))
        with refused(path, "a JPEG XL", "djxl"):
            picture_files.image_size(path)
    path.write_bytes(b"\0\0\0\x18ftypmp42" + bytes(40)) # a film
    with refused(path, "no PNG, JPEG, WebP, BMP, TIFF, AVIF or HEIC picture"):
        picture_files.image_size(path)

@pytest.mark.parametrize("suffix", ["avif", HEIC, "png"])
@pytest.mark.parametrize("primaries, curve", [(9, 16), (9, 18), (12, 13), (1, 13), (2, 2), (6, 6)])
def test_hdr_is_refused(tmp_path, suffix, primaries, curve):
    """Where it is told by numbers alone, which PIL ignores. Those of sRGB and of films are read."""
    path, notes = tmp_path / f"a.{suffix}", PngImagePlugin.PngInfo()
    notes.add(b"cICP", bytes([primaries, curve, 0, 1]))
    if suffix == "png":
        paint_picture().save(path, pnginfo=notes)
    else:
        head, box, tail = save(paint_picture(), path).read_bytes().partition(b"colrnclx")
        path.write_bytes(head + box + struct.pack(">2H", primaries, curve) + tail[4:])
        assert box
    if primaries < 9:
        assert picture_files.image_size(path) == picture_files.read_image(path).size
        return
    with refused(path, "HDR or wide colours"):
        picture_files.image_size(path)

# ---- damage, and files beside the code -------------------------------------------------------------------------------

@pytest.mark.filterwarnings("ignore") # of PIL, about the damage
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "tif", "avif", HEIC])
def test_no_damage_is_a_traceback(tmp_path, suffix):
    """A truncated file of any kind can be told; a flipped bit of a JPEG cannot, but must do no harm."""
    options, _ = LOSS[suffix]
    path = save(paint_picture((96, 64)), tmp_path / f"a.{suffix}", icc_profile=rgb_profile("P3"), **options)
    sound, rng = path.read_bytes(), np.random.default_rng(0)
    damaged = [sound[:int(n)] for n in np.linspace(0, len(sound) // 2, 40)]
    bits = [*range(0, 8 * 400, 5), *rng.integers(0, 8 * len(sound), 200)]
    damaged += [flip(int(bit))(sound) for bit in bits if bit < 8 * len(sound)]
    for n, content in enumerate(damaged):
        path.write_bytes(content)
        try:
            with within(5):
                assert dataset.picture_facts(path)[0] == picture_files.read_image(path).size
            assert n >= 40, f"cut to {len(content)} bytes went unnoticed"
        except common.InputError as e:
            assert is_one_line(str(e), path)

def test_a_jpeg_with_a_preview_is_read(tmp_path):
    """As phones write it."""
    path = save(paint_picture(), tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[paint_picture()])
    assert picture_files.image_size(path) == picture_files.read_image(path).size == (64, 64)

def test_a_picture_with_a_bomb_in_its_text_is_refused(tmp_path):
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(80 * 2**20)))
    path = save(paint_picture(), tmp_path / "a.png")
    sound = path.read_bytes()
    for where in (33, -12): # after the header, and before the end
        path.write_bytes(sound[:where] + bomb + sound[where:])
        with refused(path):
            picture_files.read_image(path)

# ---- memory ----------------------------------------------------------------------------------------------------------

def test_threads_wait_for_room_and_never_for_each_other(tmp_path, monkeypatch):
    """All pictures of a sample together: eight threads with two pictures each hold at most what may be in flight."""
    paths = [save(paint_picture((100, 100), n), tmp_path / f"{n}.png") for n in range(16)]
    monkeypatch.setattr(picture_files, "MOST", 50_000)
    most = [0]

    def work(n):
        with picture_files.reserve_pixels(paths[2 * n:2 * n + 2]):
            most[0] = max(most[0], sum(picture_files.held.values()))
            time.sleep(0.05)
            with picture_files.reserve_pixels(paths[:1]): # a second time: it has its room
                pass
    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    with within(20):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [40_000] and not picture_files.held
    with within(5), picture_files.reserve_pixels(paths): # larger than all there is: alone
        assert sum(picture_files.held.values()) == 160_000

@pytest.mark.parametrize("script", ["cache.py", "tools/doctor.py", "tools/import_data.py", "masks"])
def test_every_reader_of_many_pictures_waits_for_room(data, tmp_path, monkeypatch, script):
    """Whoever decodes in threads holds room for what it decodes."""
    save(Image.fromarray(np.arange(4096, dtype=np.uint8).reshape(64, 64)), data / "mask/cat.png")
    without, real = [], picture_files.decode

    def decode(path, content=None):
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main and not picture_files.held.get(threading.get_ident()):
            without.append(path)
        return real(path, content)
    monkeypatch.setattr(picture_files, "decode", decode)
    flags = {"cache.py": ["--data", data, "--cache_dir", tmp_path / "c", *NATIVE, "--mask", "auto"],
             "tools/doctor.py": [data, "--out", tmp_path / "out"], "tools/import_data.py": [data, tmp_path / "out"]}
    if script == "masks":
        dataset.remember_facts(dataset.read_dataset(data)[0], tmp_path / "c")
    else:
        works(script, *flags[script])
    assert not without

@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I;16", "CMYK", "L", "RGB", "1"])
def test_a_large_picture_is_made_plain_as_its_parts_are(mode):
    """In strips, for the memory. Transparent over white; what is opaque as PIL converts it."""
    rng = np.random.default_rng(0)
    rgba = Image.fromarray(rng.integers(0, 256, (700, 90, 4), dtype=np.uint8))
    image = Image.fromarray(rng.integers(0, 2**16, (700, 90), dtype=np.uint16)) if mode == "I;16" else (
        rgba.quantize(50) if mode == "P" else rgba.convert(mode))
    if mode in ("L", "RGB"):
        image.info["transparency"] = 5 if mode == "L" else tuple(rgba.getpixel((0, 0))[:3])
    if mode in ("RGBA", "CMYK"):
        image.info["icc_profile"] = builtin("sRGB")
    got = picture_files.to_plain(image.copy(), "a")
    parts = [picture_files.to_plain(image.crop((0, y, 90, y + 50)), "a") for y in range(0, 700, 50)]
    assert got.mode == "RGB" and np.array_equal(np.asarray(got), np.concatenate(parts))
    if mode in ("RGBA", "LA", "P", "L", "RGB"):
        rgba = image.convert("RGBA")
        want = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
        assert got.tobytes() == want.tobytes()
    elif mode in ("1", "CMYK"):
        assert got.tobytes() == image.convert("RGB").tobytes()

def test_a_profile_of_many_megabytes_is_ignored_with_a_line(tmp_path, capsys):
    picture = save(paint_picture(), tmp_path / "a.tif", icc_profile=b"x" * (picture_files.LARGE_PROFILE + 1))
    image = picture_files.read_image(picture)
    assert image.tobytes() == paint_picture().tobytes() and "16,777,216 bytes" in capsys.readouterr().err
