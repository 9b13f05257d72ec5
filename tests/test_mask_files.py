"""
picture_files.read_mask: a mask means the same region in whatever form a program writes it, or is refused with a line.

$ python -m pytest -q tests/test_mask_files.py     # 5 seconds
"""
import hashlib
import time

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageOps

from library.data import picture_files
from tests.harness import TINY, refused, save

SIZE = (160, 128)
PHOTO = Image.open(TINY / "source/astronaut.jpg").convert("RGB").resize(SIZE)

def draw(soft=False):
    """White on black, at places that no form could hit by chance; soft: with edges of all levels."""
    image = Image.new("L", SIZE)
    ImageDraw.Draw(image).ellipse((90, 14, 141, 71), 255)
    ImageDraw.Draw(image).rectangle((17, 80, 50, 111), 255)
    return image.filter(ImageFilter.GaussianBlur(4)) if soft else image

def with_alpha(image, alpha, mode="RGBA"):
    image = image.convert(mode.removesuffix("A"))
    image.putalpha(alpha)
    return image

def hidden(image, colour=(9, 200, 77)):
    """The same picture; under alpha 0 lies another colour."""
    pixels = np.array(image)
    pixels[pixels[..., -1] == 0, :-1] = colour[:pixels.shape[-1] - 1]
    return Image.fromarray(pixels)

def in_16_bits(image, factor):
    return Image.fromarray((np.asarray(image).astype(np.uint16) * factor).astype(np.uint16))

def palette(image, *colours):
    """Indices 0 and 1 (and so on) of these colours."""
    indexed = Image.fromarray((np.asarray(image) > 127).astype(np.uint8)).convert("P")
    indexed.putpalette(sum(colours, ()))
    return indexed

BLACK, WHITE = Image.new("RGB", SIZE), Image.new("RGB", SIZE, "white")
FORMS = { # {name: image of a mask in "L", and how to save it}: any mask, soft or not
    "gray": lambda m: (m, {}), "RGB": lambda m: (m.convert("RGB"), {}),
    "opaque alpha": lambda m: (m.convert("RGBA"), {}), "opaque LA": lambda m: (m.convert("LA"), {}),
    "half transparent as a whole": lambda m: (with_alpha(m, 128), {}),
    "palette of grays": lambda m: (m.convert("P"), {}),
    "16 bits": lambda m: (in_16_bits(m, 257), {}), "0 to 255 in 16 bits": lambda m: (in_16_bits(m, 1), {}),
    "white strokes": lambda m: (with_alpha(WHITE, m), {}),
    "white strokes, LA": lambda m: (with_alpha(WHITE, m, "LA"), {}),
    "white strokes, WebP": lambda m: (with_alpha(WHITE, m), dict(suffix="webp", lossless=True)),
    "white strokes over a hidden colour": lambda m: (hidden(with_alpha(WHITE, m)), {}),
    "black with a hole": lambda m: (with_alpha(BLACK, ImageOps.invert(m)), {}),
    "black with a hole, LA, over a hidden white": lambda m: (hidden(with_alpha(BLACK, ImageOps.invert(m), "LA"),
                                                                    (255,)), {}),
    "erased photo": lambda m: (with_alpha(PHOTO, ImageOps.invert(m)), {}),
    "erased photo over black": lambda m: (hidden(with_alpha(PHOTO, ImageOps.invert(m)), (0, 0, 0)), {}),
    "erased gray photo": lambda m: (with_alpha(PHOTO, ImageOps.invert(m), "LA"), {}),
    "erased photo, WebP": lambda m: (with_alpha(PHOTO, ImageOps.invert(m)), dict(suffix="webp", quality=80)),
    "BMP": lambda m: (m, dict(suffix="bmp"))}
HARD = { # of two levels
    "1 bit": lambda m: (m.convert("1"), {}), "labels 0 and 1": lambda m: (m.point(lambda v: v // 255), {}),
    "labels 0 and 1 in 16 bits": lambda m: (in_16_bits(m.point(lambda v: v // 255), 1), {}),
    "labels 0 and 1 in RGB": lambda m: (m.point(lambda v: v // 255).convert("RGB"), {}),
    "labels in a palette": lambda m: (palette(m, (0, 0, 0), (1, 1, 1)), {}),
    "black and white palette": lambda m: (palette(m, (0, 0, 0), (255, 255, 255)), {}),
    "transparent palette": lambda m: (palette(m, (0, 0, 0), (255, 255, 255)), dict(transparency=0)),
    "palette with a hole": lambda m: (palette(m, (0, 0, 0), (255, 255, 255)), dict(transparency=1)),
    "transparent gray": lambda m: (m, dict(transparency=0)),
    "transparent colour": lambda m: (m.convert("RGB"), dict(transparency=(0, 0, 0))),
    "transparent level of 16 bits": lambda m: (in_16_bits(m, 257), dict(transparency=0))}

def store(path, image, suffix="png", **options):
    return save(image, path.with_suffix(f".{suffix}"), **options)

@pytest.mark.parametrize("form, soft", [*((form, False) for form in FORMS | HARD), *((form, True) for form in FORMS)])
def test_a_mask_is_the_same_in_every_form(tmp_path, form, soft):
    """To the bit. Colours are rounded where they are stored as such."""
    mask = draw(soft)
    image, options = (FORMS | HARD)[form](mask)
    path = store(tmp_path / "mask", image, **options)
    for content in (None, hashlib.sha256(path.read_bytes()).hexdigest()):
        got = picture_files.read_mask(path, content)
        assert got.mode == "L" and not picture_files.mask_is_empty(got)
        assert np.array_equal(np.asarray(got), np.asarray(mask)), abs(np.subtract(got, mask, dtype=int)).max()

@pytest.mark.parametrize("suffix, quality", [("jpg", 50), ("jpg", 75), ("jpg", 95), ("jpg", 100), ("webp", 50),
                                             ("webp", 90)])
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("soft", [False, True])
def test_what_jpeg_does_to_a_mask_is_no_other_form(tmp_path, suffix, quality, mode, soft):
    path = store(tmp_path / "mask", draw(soft).convert(mode), suffix=suffix, quality=quality)
    got = picture_files.read_mask(path)
    assert np.array_equal(np.asarray(got), np.asarray(Image.open(path).convert("L"))) # as it has always been read
    assert abs(np.subtract(got, draw(soft), dtype=int)).mean() < 3

def test_no_noise_of_jpeg_is_taken_for_labels(tmp_path):
    """Of some masks it leaves the levels 0, 1 and 255, of nothing but black 0 and 1."""
    rng, few = np.random.default_rng(0), 0
    for n in range(60):
        (w, h), image = rng.integers(64, 400, 2), Image.new("L", SIZE)
        ImageDraw.Draw(image).ellipse((10, 10, 10 + w // 8, 10 + h // 8), 255)
        path = store(tmp_path / "mask", image, suffix=("jpg", "webp")[n % 2], quality=int(rng.integers(20, 101)))
        got = np.asarray(picture_files.read_mask(path))
        assert np.array_equal(got, np.asarray(Image.open(path).convert("L")))
        few += len(np.unique(got)) < 5
    assert few
    noisy = Image.fromarray(np.eye(64, dtype=np.uint8))
    path = store(tmp_path / "mask", noisy, suffix="webp", lossless=True)
    assert picture_files.mask_is_empty(picture_files.read_mask(path))

def test_a_small_soft_mask_may_be_dim(tmp_path):
    """Blurred so much that nothing is white: it has more levels than a picture has labels."""
    image = Image.new("L", SIZE)
    ImageDraw.Draw(image).ellipse((60, 50, 85, 75), 255)
    image = image.filter(ImageFilter.GaussianBlur(14))
    assert max(image.getextrema()) < 96
    assert np.array_equal(picture_files.read_mask(save(image, tmp_path / "a.png")), image)

def test_white_strokes_through_lossy_webp_stay_strokes(tmp_path):
    for image, quality in ((with_alpha(WHITE, draw()), 60), (with_alpha(BLACK, ImageOps.invert(draw())), 60)):
        got = picture_files.read_mask(store(tmp_path / "mask", image, suffix="webp", quality=quality))
        assert np.array_equal(np.asarray(got), np.asarray(draw()))

def labels(*levels):
    """Stripes of these levels."""
    stripes = np.repeat(np.array(levels, np.uint16), 64)[None].repeat(64, 0)
    return Image.fromarray(stripes if max(levels) > 255 else stripes.astype(np.uint8))

def strokes(*colours):
    """Strokes of these colours on a transparent layer."""
    image = Image.new("RGBA", SIZE)
    for n, colour in enumerate(colours):
        ImageDraw.Draw(image).ellipse((10 + 30 * n, 20, 50 + 30 * n, 90), colour)
    return image

UNCLEAR = {
    "photo": PHOTO, "photo in colours of a palette": PHOTO.convert("P", palette=Image.Palette.ADAPTIVE),
    "red strokes": strokes("red"), "black and white strokes": strokes("black", "white"), "grey": strokes("gray"),
    "three colours of strokes": strokes("red", "lime", "blue"),
    "red on white": ImageOps.colorize(draw(), "white", "red"),
    "red on black": ImageOps.colorize(draw(), "black", "red"), "VOC's palette": palette(draw(), (0, 0, 0), (128, 0, 0)),
    "labels": labels(0, 1, 2), "labels of COCO": labels(0, 17, 90), "one label": labels(0, 15),
    "labels with void": labels(0, 1, 15, 255), "an object and void": labels(0, 1, 255),
    "labels without 0": labels(1, 2),
    "labels in 16 bits": labels(0, 1, 300), "12 bits": labels(0, 2000, 4095), "labels of ids": labels(0, 1001, 24012),
    "one id": labels(0, 300)}

@pytest.mark.parametrize("kind", UNCLEAR)
def test_a_mask_that_could_mean_two_things_is_refused(tmp_path, kind):
    with refused(tmp_path / "mask.png", "paint the edited region white on black"):
        picture_files.read_mask(save(UNCLEAR[kind], tmp_path / "mask.png"))

EMPTY = {
    "black": BLACK, "white": WHITE, "gray": Image.new("L", SIZE, 77), "16 bits": in_16_bits(WHITE.convert("L"), 257),
    "labels of one kind": Image.new("L", SIZE, 1), "a layer without strokes": Image.new("RGBA", SIZE),
    "a layer without strokes over hidden red": Image.new("RGBA", SIZE, (255, 0, 0, 0)),
    "a layer without strokes over a photo": with_alpha(PHOTO, 0),
    "black palette": palette(draw(), (0, 0, 0), (0, 0, 0))}

@pytest.mark.parametrize("kind", EMPTY)
def test_a_mask_that_selects_nothing_or_everything_is_recognised(tmp_path, kind):
    assert picture_files.mask_is_empty(picture_files.read_mask(save(EMPTY[kind], tmp_path / "mask.png")))
    assert picture_files.mask_is_empty(picture_files.read_mask(save(WHITE, tmp_path / "mask.jpg", quality=70)))

def test_a_mask_lies_as_its_exif_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    for image in (draw(), with_alpha(WHITE, draw()), in_16_bits(draw(), 257), draw().point(lambda v: v // 255)):
        got = picture_files.read_mask(save(image, tmp_path / "mask.png", exif=exif))
        assert np.array_equal(np.asarray(got), np.rot90(np.asarray(draw()), -1))

def test_a_large_mask_needs_no_more_memory_than_a_large_picture(tmp_path):
    """A photo's alpha of 24 megapixels, in seconds."""
    image = with_alpha(PHOTO.resize((6000, 4000)), ImageOps.invert(draw()).resize((6000, 4000), Image.NEAREST))
    path, begin = save(image, tmp_path / "mask.png", compress_level=1), time.process_time()
    got = picture_files.read_mask(path)
    assert time.process_time() - begin < 20 and got.size == (6000, 4000)
