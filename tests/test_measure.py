"""tools/measure.py: what it measures is what was planted."""
import runpy

import numpy as np
import pytest
from PIL import Image

import cache
from library.data import picture_files
import predict
from tests.harness import (HERE, TINY, add_item, encoder_flags, is_one_line, measured, paint_picture, run_script, save,
                           show)
from training import validation

drift = runpy.run_path(str(HERE / "tools/measure.py"))["drift"]

def measure(folder, model="none", results="out"):
    """-> result of the script for FOLDER/out and FOLDER/data, and the numbers that it has printed."""
    result = run_script("tools/measure.py", folder / results, folder / "data", "--model", model)
    return result, measured(result) if result.out else {}

@pytest.mark.parametrize("shift, zoom", [(0, 0), (0.5, 0), (1, 0), (2, 0), (4, 0), (12, 0), (0, 0.5), (0, 1), (0, 2),
                                         (0, 8), (1, -1)])
def test_the_shift_and_zoom_of_a_result_are_those_that_were_planted(shift, zoom):
    """Within 0.05 pixels and 0.06 %; as windows of a larger photograph, at any angle. A cast of 5 levels is told, too,
    and an edit that came out differently has little say."""
    for n, name in enumerate(("astronaut", "coffee", "giraffe")):
        photo = Image.open(TINY / f"source/{name}.jpg").convert("RGB")
        size, middle = [side * 3 // 4 for side in photo.size], np.array(photo.size * 2) / 2

        def window(dx=0, dy=0, zoom=0):
            half = np.array([-size[0], -size[1], *size]) / 2 / (1 + zoom / 100)
            return photo.resize(size, Image.LANCZOS, tuple(middle + half - [dx, dy, dx, dy]))
        target, keep = window(), np.ones(size[::-1], bool)
        result = window(shift * np.cos(n), shift * np.sin(n), zoom)
        keep[:60, :60] = False
        for image, colour in ((target, "red"), (result, "blue")):
            image.paste(colour, (10, 10, 50, 50))
        result = np.asarray(result, float) + [0, 0, 5 * (not shift and not zoom)]
        found = drift(Image.fromarray(result.clip(0, 255).astype(np.uint8)), target, keep)
        show(f"shift {shift}, zoom {zoom}", abs(found["shift"] - abs(shift)), 0.05)
        assert found["shift"] == pytest.approx(shift, abs=0.05) and found["zoom"] == pytest.approx(abs(zoom), abs=0.06)
        assert shift or zoom or found["colour"] == pytest.approx(5, abs=0.5)

def test_where_there_are_no_edges_no_motion_is_told():
    flat = Image.new("RGB", (128, 96), (60, 60, 60))
    assert drift(Image.new("RGB", (128, 96), (60, 63, 60)), flat, np.ones((96, 128), bool)) == dict(colour=3)

def test_a_folder_of_pictures_is_measured_by_groups(tmp_path):
    """In a/ the edit is a border, as it looks after the VAE; in b/ nothing is kept; of c/ a picture is missing."""
    names = ["a/x", "a/y", "a/z", "b/x", "top"]
    for name in [*names, "c/lost"]:
        add_item(tmp_path / "data", name, [(96, 64), (96, 64)])
    pipe, want, moved, keep = cache.load_pipeline(TINY), {}, [], np.arange(64)[:, None].repeat(96, 1) >= 16
    cache.load_encoder(pipe, "vae", encoder_flags())
    for n, name in enumerate(names):
        image = paint_picture((96, 64), seed=n)
        if name != "b/x": # whose control has nothing to do with it
            save(image, tmp_path / f"data/control/{name}.png")
        image.paste((9, 9, 9 + 80 * n), (0, 0, 96, 16))
        save(image, tmp_path / f"data/target/{name}.png")
        generated, _ = predict.decode(pipe.vae, cache.encode_image(pipe, cache.to_pixels(pipe, image)), [(1, 4, 6)])
        save(generated, tmp_path / "out" / (name.replace("/", "-") + ".png"))
        want.setdefault("/".join(["data", *name.split("/")[:-1]]), []).append(validation.psnr(generated, image))
        moved.append(drift(generated, image, keep)["shift"])
    result, found = measure(tmp_path, model="tiny")
    assert result.status == 1 and len(result.errors) == 1 and is_one_line(result.errors[0], "c-lost.png"), result.err
    assert found.keys() == want.keys() == {"data", "data/a", "data/b"} and found["data/a"]["pictures"] == 3
    for group, m in found.items():
        assert m["result"] == pytest.approx(np.mean(want[group]), abs=0.01) == m["VAE"] and m["input"] < m["result"]
        assert "shift" not in m if group == "data/b" else m["shift"] < 1e-6 and m["colour"] == 0
    plain = measure(tmp_path)[1]["data/a"]
    assert "VAE" not in plain and plain["shift"] == pytest.approx(np.median(moved[:3]), abs=0.01)
    save(paint_picture(), tmp_path / "others/other.png")
    for results in ("data", "others", "none"):
        result, _ = measure(tmp_path, results=results) # before each sample would be an error of its own
        assert result.status == 1 and len(result.errors) == 1 and is_one_line(result.errors[0], results, "no results")

def test_two_results_of_a_sample_are_an_error(tmp_path):
    """Of another call in the same folder: they have the same name, and another key."""
    for n, name in enumerate(("cat", "dog", "dog-2")):
        add_item(tmp_path / "data", name)
        save(paint_picture(seed=n), tmp_path / f"out/{name}-0123456{n}.png")
    assert measure(tmp_path)[0].status == 0
    save(paint_picture(), tmp_path / "out/dog-2-89abcdef.png")
    result, _ = measure(tmp_path)
    assert result.status == 1 and is_one_line(*result.errors, "dog-2-89abcdef.png", "dog-2-01234562.png"), result.err

@pytest.mark.parametrize("size, model, status", [
    ((65, 64), "tiny", 1), ((65, 64), "none", 0), ((64, 16), "none", 1), ((32, 32), "tiny", 0)])
def test_a_picture_of_another_program_is_measured_if_its_size_allows_it(tmp_path, size, model, status):
    add_item(tmp_path / "data", "cat")
    save(paint_picture(size), tmp_path / "out/cat.png")
    result, _ = measure(tmp_path, model=model)
    assert result.status == status and ("data  " in result.out) != bool(status), result.err
    assert not status or is_one_line(result.errors[0], "out/cat.png", "{}x{}".format(*size)), result.err

def test_scales_have_a_line_each(tmp_path):
    """By predict.py's names. A name that itself ends in -x1 is a name; a picture that only one sample lacks, and those
    of several seeds, are errors."""
    rng, psnrs = np.random.default_rng(0), {}
    for name in ("a", "a-x1", "deep/b"):
        add_item(tmp_path / "data", name, [(96, 64), (96, 64)])
        target = picture_files.read_image(tmp_path / f"data/target/{name}.png")
        for scale, sigma in (("0", 60), ("0.5", 5), ("2", 20), ("1e-05", 50)):
            noise = rng.normal(0, sigma, (64, 96, 3))
            image = Image.fromarray((np.asarray(target) + noise).clip(0, 255).astype(np.uint8))
            if (name, scale) == ("a", "2"): # of another call, at another size
                image = image.resize((48, 32), Image.BOX)
            save(image, tmp_path / f"out/{name.replace('/', '-')}-x{scale}-01234567.png")
            psnr = validation.psnr(image, target.resize(image.size, Image.LANCZOS))
            psnrs.setdefault(f"{'data/deep' if '/' in name else 'data'} x{scale}", []).append(psnr)
    result, found = measure(tmp_path)
    assert result.status == 0, result.err
    scales = ["0", "1e-05", "0.5", "2"]
    assert sorted(found) == sorted(f"{folder} x{scale}" for folder in ("data", "data/deep") for scale in scales)
    assert [group for group in found if "deep" not in group] == [f"data x{scale}" for scale in scales]
    for group, values in psnrs.items():
        assert found[group]["pictures"] == len(values)
        assert found[group]["result"] == pytest.approx(np.mean(values), abs=0.01)
    (tmp_path / "out/a-x1-x0.5-01234567.png").rename(tmp_path / "out/a-x0.5-s1-01234567.png")
    result, _ = measure(tmp_path)
    assert result.status == 1 and is_one_line(*result.errors, "out/a-x1-x0.5.png"), result.err
