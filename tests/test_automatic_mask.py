"""
library/data/automatic_mask.py, and what uses it: automatic masks cover what was edited, and --align repairs what has
moved. On photographs that scikit-image brings, through JPEG, with edits that no threshold was chosen on (another seed;
but the photographs are the same).

$ python -m pytest -q tests/test_automatic_mask.py -s     # a minute; --full: 100 pairs of each kind
"""
import io
import json
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

import cache
from library.data import automatic_mask, dataset, picture_files
from tests.harness import (FULL, TINY, add_item, edited_pair, index_of, is_one_line, make_cache, paint_picture,
                           run_script, save, show)
from tools import doctor

PHOTOS = """astronaut.png chelsea.png coffee.png rocket.jpg motorcycle_left.png camera.png coins.png brick.png
            gravel.png grass.png ihc.png retina.jpg hubble_deep_field.jpg moon.png""".split()
EDITS = ["object", "remove", "patch", "colour", "texture", "light"]

@pytest.fixture(scope="module")
def photos():
    """RGB pictures of at most 640 pixels, of scikit-image, which need not be imported."""
    if (package := find_spec("skimage")) is None:
        pytest.skip("needs scikit-image's pictures")
    files = [Path(package.origin).parent / "data" / name for name in PHOTOS]
    images = [Image.open(file).convert("RGB") for file in files]
    for image in images:
        image.thumbnail((640, 640), Image.LANCZOS)
    return images

def through_jpeg(rng, image):
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=int(rng.integers(70, 96)))
    return Image.open(file).convert("RGB")

def plant_edit(rng, photo, photos):
    """-> (control, target, region), an ellipse or a rectangle in which one of EDITS was made."""
    (w, h), region, kind = photo.size, Image.new("L", photo.size), EDITS[rng.integers(len(EDITS))]
    bw, bh = rng.uniform(0.15, 0.45, 2) * photo.size
    x, y = rng.uniform(0, w - bw), rng.uniform(0, h - bh)
    pen = ImageDraw.Draw(region)
    (pen.ellipse if rng.random() < 0.5 else pen.rectangle)((x, y, x + bw, y + bh), 255)
    before = after = np.asarray(photo, float)
    if kind in ("object", "remove"):
        after = before * 0 + rng.integers(0, 256, 3)
    elif kind == "patch":
        other = photos[rng.integers(len(photos))].resize(photo.size)
        after = np.asarray(other.transpose(Image.ROTATE_180), float)
    elif kind == "colour":
        after = before * rng.choice([0.5, 1.5], 3) + rng.choice([-40, 40], 3)
    elif kind == "texture":
        noise = Image.fromarray(rng.integers(0, 256, (h // 4, w // 4, 3), dtype=np.uint8))
        after = np.asarray(noise.resize(photo.size, Image.BICUBIC), float)
    else:
        after = before + rng.choice([-1, 1]) * rng.uniform(35, 70)
    edited = Image.composite(Image.fromarray(after.clip(0, 255).astype(np.uint8)), photo, region)
    return (edited, photo, region) if kind == "remove" else (photo, edited, region)

def covers(mask, edited, region):
    """Whether a mask has 95 % of what was edited and 5 % of what lies outside of the region, at a threshold of 0.5."""
    if mask is None:
        return False
    white = np.asarray(mask.resize(region.shape[::-1], Image.NEAREST)) >= 128
    return white[edited].mean() >= 0.95 and white[~region].mean() <= 0.05

def assert_right(good, what):
    """95 of 100 masks are. good: whether each is."""
    show(f"{what}, wrong masks of {len(good)}", good.count(False), 0.05 * len(good))
    assert good.count(False) <= 0.05 * len(good)

def read_pair(data, name):
    """-> target, control."""
    return [picture_files.read_image(data / f"{role}/{name}.png") for role in ("target", "control")]

# ---- --mask auto -----------------------------------------------------------------------------------------------------

def test_auto_masks_cover_edits_of_photographs(photos):
    """95 of 100. Edited is what the edit changes by 12 levels, before JPEG; shifted by a pixel is the scene."""
    rng, good = np.random.default_rng(2026), []
    for n in range(100 if FULL else 20):
        scale, photo = rng.uniform(0.6, 1), photos[n % len(photos)]
        photo = photo.resize([round(side * scale) for side in photo.size], Image.LANCZOS)
        control, target, region = plant_edit(rng, photo, photos)
        changed = np.abs(np.asarray(control, int) - np.asarray(target, int)).max(-1) >= automatic_mask.EDITED
        (dx, dy), (w, h) = [(0, 0), (1, 0), (0, -1), (-1, 1), (1, 1)][rng.integers(5)], photo.size
        control, target = control.crop((1 + dx, 1 + dy, w - 1 + dx, h - 1 + dy)), target.crop((1, 1, w - 1, h - 1))
        mask = automatic_mask.auto_mask(through_jpeg(rng, target), through_jpeg(rng, control), target.size)
        good.append(covers(mask, changed[1:-1, 1:-1], np.asarray(region)[1:-1, 1:-1] > 0))
    assert_right(good, "photographs")

@pytest.mark.parametrize("shifted, jpeg", [(False, False), (True, True)])
def test_auto_masks_cover_the_borders_of_the_toy_dataset(shifted, jpeg):
    """To the token: a small picture has four tokens inside its border, and one of them would be too many."""
    rng, good = np.random.default_rng(1), []
    names = [path.stem for path in sorted((TINY / "toys/data/target").glob("*.txt"))
             if "border" in path.read_text("utf-8")]
    for name in names[:None if FULL else 36]:
        target, control = read_pair(TINY / "toys/data", name)
        inside = np.ones(target.size[::-1], bool)
        inside[16:-16, 16:-16] = False
        if shifted:
            dx, dy = [(1, 0), (0, -1), (-1, 1), (1, 1)][rng.integers(4)]
            wide = np.pad(np.asarray(control), ((1, 1), (1, 1), (0, 0)), mode="edge")
            control = Image.fromarray(wide[1 + dy:1 + dy + control.height, 1 + dx:1 + dx + control.width])
        if jpeg:
            target, control = through_jpeg(rng, target), through_jpeg(rng, control)
        good.append(covers(automatic_mask.auto_mask(target, control, target.size), inside, inside))
    assert_right(good, "borders")

def test_there_is_no_mask_where_it_would_say_nothing():
    """The same picture, everything new, another shape; a cast alone and a motion alone are no edit."""
    picture = edited_pair(np.random.default_rng(4), "object", (256, 192))[0]
    scene = edited_pair(np.random.default_rng(3), "object", (300, 240))[0]
    red = Image.fromarray((np.asarray(picture) * 0.8 + [30, 0, 10]).clip(0, 255).astype(np.uint8))
    for target, control in ((picture, picture), (red, picture), (paint_picture((256, 192), seed=9), picture),
                            (paint_picture((192, 192)), picture),
                            (scene.crop((10, 10, 266, 202)), scene.crop((16, 14, 272, 206)))):
        assert automatic_mask.auto_mask(target, control, (256, 192)) is None

def test_what_the_doctor_calls_recoloured_gets_no_mask(photos):
    """Sepia and a warmer light, also on a picture that has moved besides; and the doctor does see most of them."""
    rng, sepia = np.random.default_rng(1), np.array([[0.39, 0.77, 0.19], [0.35, 0.69, 0.17], [0.27, 0.53, 0.13]])
    said = {"sepia": [], "warm": [], "warm and moved": []}
    for photo in photos:
        for way in said:
            x = np.asarray(photo, float)
            x = x @ sepia.T if way == "sepia" else x * [1.15, 1, 0.85] + [8, 0, -8]
            target, control = Image.fromarray(x.clip(0, 255).astype(np.uint8)), photo
            if "moved" in way:
                (w, h), (dx, dy) = photo.size, (round(0.03 * side) for side in photo.size)
                target, control = target.crop((dx, dy, w, h)), photo.crop((0, 0, w - dx, h - dy))
            target, control = through_jpeg(rng, target), through_jpeg(rng, control)
            recoloured = "recoloured" in doctor.examine_pair(target, control)
            said[way].append(recoloured)
            assert not recoloured or automatic_mask.auto_mask(target, control, target.size) is None
    for way, least in (("sepia", 10), ("warm", 13), ("warm and moved", 11)):
        show(f"{way}, not called recoloured of {len(photos)}", said[way].count(False), len(photos) - least)
        assert sum(said[way]) >= least

def test_a_pair_without_a_mask_gets_one_in_the_cache(tmp_path):
    """A mask by hand stays, and so does a pair of two shapes; 110x66, of one shape, is trained as 96x64. Without the
    flag nothing changes: no key, no tensor."""
    for name, mask, size in (("own", paint_picture(mode="L"), (96, 64)), ("none", None, (96, 64)),
                             ("rounded", None, (110, 66))):
        control = paint_picture(size, seed=2)
        add_item(tmp_path / "data", name, mask=mask and mask.resize(size))
        save(control, tmp_path / f"data/control/{name}.png")
        control.paste((9, 200, 9), (0, 0, size[0], 16))
        save(control, tmp_path / f"data/target/{name}.png")
    add_item(tmp_path / "data", "shapes", [(96, 96), (96, 64)])
    encoded, said = {}, {}
    for kind, mask in (("files", []), ("auto", ["--mask", "auto"])):
        result = make_cache(tmp_path / "data", tmp_path / kind, *mask)
        assert result.status == 0, result.err
        said[kind] = result.out
        encoded[kind] = {name: (s.encodings[0]["file"].name, cache.load_latents(s, s.encodings[0]))
                         for name, s in index_of(tmp_path / kind).items()}
    assert encoded["files"]["own"][0] == encoded["auto"]["own"][0]
    assert encoded["files"]["none"][0] != encoded["auto"]["none"][0]
    with_mask = {kind: {name for name, (_, tensors) in each.items() if "edit_mask" in tensors}
                 for kind, each in encoded.items()}
    assert with_mask == dict(files={"own"}, auto={"own", "none", "rounded"})
    assert "mask: 1 of 4 pairs\n" in said["files"] and "--mask auto" not in said["files"]
    assert "--mask auto looks for the edit in 3 pairs" in said["auto"]
    for name in ("none", "rounded"):
        assert encoded["auto"][name][1]["edit_mask"].reshape(4, 6).tolist() == [[1.0] * 6] + [[0.0] * 6] * 3

# ---- tools/doctor.py -------------------------------------------------------------------------------------------------

def plant_motion(rng, photo, photos, shift=0.06, zoom=0.04, degrees=0):
    """A window of an edited photo that has moved -> (target, control, the motion that fit_motion should find)."""
    control, target, _ = plant_edit(rng, photo, photos)
    (w, h), (x, y) = [int(side * 0.84) for side in photo.size], [side - int(side * 0.84) for side in photo.size]
    angle, far, zoom = rng.uniform(0, 2 * math.pi), rng.uniform(0, shift) * max(w, h), rng.uniform(-zoom, zoom)
    dx, dy, x, y = far * math.cos(angle), far * math.sin(angle), x // 2, y // 2
    cos, sin = (1 + zoom) * math.cos(math.radians(degrees)), (1 + zoom) * math.sin(math.radians(degrees))
    to_x, to_y = x + w / 2 + dx, y + h / 2 + dy # what the target's middle shows
    affine = (cos, -sin, to_x - cos * w / 2 + sin * h / 2, sin, cos, to_y - sin * w / 2 - cos * h / 2)
    target = target.transform((w, h), Image.AFFINE, affine, Image.BICUBIC)
    return through_jpeg(rng, target), through_jpeg(rng, control.crop((x, y, x + w, y + h))), (dx, dy, cos - 1, sin)

def residual(found, planted, size):
    """Pixels at the worst corner between two motions."""
    (dx, dy, zoom, turn), (w, h) = np.subtract(found, planted), size
    corners = [(x, y) for x in (-w / 2, w / 2) for y in (-h / 2, h / 2)]
    return max(math.hypot(dx + zoom * x - turn * y, dy + zoom * y + turn * x) for x, y in corners)

def repair_pair(target, control, folder, monkeypatch):
    """tools/doctor.py's --align of one pair -> (what it says, or None if it was not seen to move; the motion that was
    taken out)."""
    fits = []

    def fit(*pair):
        fits.append(automatic_mask.fit_motion(*pair))
        return fits[-1]
    monkeypatch.setattr(doctor, "fit_motion", fit)
    files = [str(save(image, folder / f"{role}.png")) for role, image in (("target", target), ("control", control))]
    if "moved" not in doctor.examine_pair(target, control):
        return None, None
    repaired = doctor.repair(dataset.Sample("pair", "data", files[1:], ["go"], files[0]), folder / "aligned")
    return repaired if isinstance(repaired, str) else "repaired", fits[-1]

def test_what_is_called_repaired_is_within_a_quarter_of_a_pixel_also_if_it_was_turned(photos, tmp_path, monkeypatch):
    """Turned by up to 3 degrees, every fifth not at all. Those that are seen to move and cannot be repaired are called
    so; few are not seen: of 100 pairs with another seed three (stars, a retina), which --align copies as they are."""
    rng, said, residuals = np.random.default_rng(2027), [], []
    for n in range(100 if FULL else 14):
        degrees = rng.uniform(-3, 3) if n % 5 else 0
        target, control, planted = plant_motion(rng, photos[n % len(photos)], photos, degrees=degrees)
        words, taken_out = repair_pair(target, control, tmp_path, monkeypatch)
        said.append(words)
        if words == "repaired":
            residuals.append(residual(taken_out, planted, target.size))
    far, repaired = sum(r > 0.25 for r in residuals), len(residuals)
    print(f"\nturned by up to 3 degrees: {repaired} of {len(said)} repaired, {repaired - far} within 0.25 px, "
          f"median {np.median(residuals):.3f} px")
    show("called repaired, and over 0.25 px", far, 0.05 * repaired)
    assert far <= 0.05 * repaired and repaired >= 0.9 * len(said)

def test_a_fit_that_is_wrong_is_not_called_repaired(photos, tmp_path, monkeypatch):
    """Whatever went wrong: half a degree is left, or a motion of 1.5 pixels or of 27, or a zoom of half a percent."""
    rng, right = np.random.default_rng(3), automatic_mask.fit_motion
    for n in (0, 2, 4, 8, 9): # two are mere texture, in which a far motion is hard to see
        target, control, _ = plant_motion(rng, photos[n], photos, degrees=1.5)
        for wrong in ([0, 0, 0, math.radians(0.5)], [1.5, 0, 0, 0], [25, 10, 0, 0], [0, 0, 0.005, 0]):
            monkeypatch.setattr(automatic_mask, "fit_motion", lambda *pair: right(*pair) + wrong)
            assert repair_pair(target, control, tmp_path, monkeypatch)[0] == "still moves", (n, wrong)

@pytest.mark.parametrize("n, too_high", [(7, 40), (11, 80)])
def test_a_fit_that_took_the_next_brick_is_not_called_repaired(photos, tmp_path, monkeypatch, n, too_high):
    """Or the next vessel of a retina. Such a fit is at rest as a whole: only the picture's halves are at odds."""
    target, control, planted = plant_motion(np.random.default_rng(3), photos[n], photos, degrees=1.5)
    unit, right = max(target.size) / automatic_mask.SIDE, automatic_mask.fit_motion
    start = (np.array(planted) - [0, too_high, 0, 0]) / [unit, unit, 1, 1]
    assert residual(right(target, control, start), planted, target.size) > too_high
    monkeypatch.setattr(automatic_mask, "fit_motion", lambda target, control, _: right(target, control, start))
    assert repair_pair(target, control, tmp_path, monkeypatch)[0] == "still moves"

@pytest.mark.parametrize("factor, turn", [(1, 2), (1.5, -2)])
def test_a_turned_target_is_warped_onto_its_control_and_what_they_share_is_kept(photos, factor, turn):
    """Without an edit and without JPEG nothing is left but the resampling, also for a control of another size, which
    gets the target's. A mask is warped as its target. No more is cut off than the turned corners and the shift."""
    photo = photos[2]
    w, h = photo.size[0] - 100, photo.size[1] - 100
    turned = photo.rotate(turn, Image.BICUBIC, translate=(9, -5)).crop((50, 50, 50 + w, 50 + h))
    control = photo.crop((50, 50, 50 + w, 50 + h))
    control = control.resize([round(factor * side) for side in control.size], Image.BICUBIC)
    white = Image.new("L", turned.size, 255)
    target, kept, mask, inside = doctor.align_pair(turned, control, turned.convert("L"), white)
    assert target.size == mask.size == kept.size
    far = lambda a, b: np.abs(np.subtract(a, b, dtype=float)).mean()
    assert far(target, kept) < 3 < 8 < far(turned, control.resize(turned.size))
    assert far(mask, target.convert("L")) < 0.6 and inside.getextrema() == (255, 255) # no corner beyond the target
    assert target.width > w - 9 - 2 * h * math.radians(2) / 2 - 4 and target.height > h - 5 - w * math.radians(2) - 4

def test_what_is_left_of_a_long_pair_must_be_a_shape_that_can_be_trained(photos):
    """600x60, of which the two share 591x55."""
    target, control = photos[2].crop((0, 9, 600, 69)), photos[2].crop((9, 14, 609, 74))
    assert doctor.align_pair(target, control) == "shares too little"
    assert doctor.align_pair(target.crop((0, 0, 500, 60)), control.crop((0, 0, 500, 60)))[0].width == 491

def align(out, *roots_and_flags):
    """-> result of the doctor with --align OUT."""
    return run_script("tools/doctor.py", *roots_and_flags, "--out", out.with_name("report"), "--align", out)

def test_align_repairs_what_moved_and_copies_the_rest_byte_for_byte(tmp_path, photos):
    """A pair that was turned too far is left out, and named."""
    rng, data, out = np.random.default_rng(5), tmp_path / "data", tmp_path / "aligned"
    target, control, _ = plant_motion(rng, photos[0], photos, degrees=2)
    far_turned, its_control, _ = plant_motion(rng, photos[0], photos, degrees=5)
    for name, pair in (("moved", (target, control)), ("clean", (control, control)), ("far", (far_turned, its_control))):
        for role, image in zip(("target", "control"), pair):
            save(image, data / f"{role}/sub/{name}.png")
        strokes = Image.new("RGBA", target.size, "white") # a mask as other programs write it: the alpha counts
        strokes.putalpha(target.convert("L"))
        save(strokes, data / f"mask/sub/{name}.png")
        save(paint_picture(), data / f"control/sub/{name}_1.jpg")
        (data / f"target/sub/{name}.txt").write_text("one\ntwo\n", "utf-8")
    before = {path: path.read_bytes() for path in data.rglob("*.*")}
    result = align(out, data, "--mask", "auto")
    assert result.status == 0 and "2 samples, 1 of them repaired; not repaired" in result.out, result.err
    assert "left out, 1: sub/far (turned by 5.0 degrees)" in result.out and not [*out.rglob("far*")]
    assert before == {path: path.read_bytes() for path in data.rglob("*.*")}
    for path, content in before.items():
        copy = out / path.relative_to(data)
        if not path.stem.startswith("far"):
            assert not copy.samefile(path) # a copy, and no link
            assert copy.read_bytes() == content or path.suffix == ".txt" or path.stem == "moved", path
    samples, problems = dataset.read_dataset(out)
    assert not problems and [len(s.controls) for s in samples] == [2, 2] and samples[0].prompts == ["one", "two"]
    moved = [s for s in samples if s.name.endswith("moved")][0]
    sizes = {picture_files.image_size(path) for path in (moved.target, moved.controls[0], moved.mask)}
    assert len(sizes) == 1 and sizes != {control.size}
    plain = read_pair(data, "sub/moved")
    assert np.array_equal(Image.open(moved.mask), doctor.align_pair(*plain, plain[0].convert("L"))[2])
    assert "moved" not in doctor.examine_pair(*read_pair(out, "sub/moved"))
    again = align(out, data)
    assert again.status == 1 and is_one_line(again.errors[0], "aligned", "already exists"), again.err
    # one target twice, not to be repaired
    twice = write_manifest(tmp_path / "twice", {"far.png": far_turned, "its.png": its_control},
                           [dict(target="far.png", control="its.png", prompt=prompt) for prompt in ("one", "two")])
    result = align(tmp_path / "gone", twice)
    assert result.status == 1 and is_one_line(result.errors[0], "no sample can be repaired: far (turned"), result.err
    assert not (tmp_path / "gone").exists()

def write_manifest(folder, pictures, rows):
    for name, image in pictures.items():
        save(image, folder / name)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder

def test_what_cannot_be_aligned_is_one_line_and_leaves_nothing(tmp_path, data):
    """Two samples of a manifest that need one name in a folder; a place within the dataset."""
    pictures = {name: paint_picture(seed=n) for n, name in enumerate(("cat.png", "cat_1.png", "x.png", "y.jpg"))}
    rows = [dict(target="cat.png", control=["x.png", "y.jpg"], prompt="go"),
            dict(target="cat_1.png", control=["x.png"], prompt="go")]
    manifest = write_manifest(tmp_path / "m", pictures, rows)
    for place, root, named in ((tmp_path, manifest, "control/cat_1"), (data, data, "lies in a dataset")):
        result = align(place / "no", root)
        assert result.status == 1 and is_one_line(result.errors[0], named), result.err
        assert not [*tmp_path.rglob("no"), *tmp_path.glob(".align-*")]

def test_pictures_without_controls_are_copied(tmp_path, data):
    save(paint_picture(), tmp_path / "faces/target/a.png")
    (tmp_path / "faces/target/a.txt").write_text("a face", "utf-8")
    result = align(tmp_path / "out", data, tmp_path / "faces")
    assert result.status == 0 and (tmp_path / "out/target/faces/a.png").exists(), result.err
