"""
What a folder holds is used or counted: pictures are known by a full list of suffixes; what is no picture, no caption
and no known junk is one line.
"""
import pytest
from PIL import Image

from library.files import stray_files
from tests.harness import EXACT, paint_picture, results_of, save, works

CPU = ["--device", "cpu", *EXACT]
DRAW = ["--prompt", "snow", "--num_inference_steps", 2, *CPU]

def put(path, seed=0, form="JPEG"):
    """A picture of this format, whatever its name says."""
    return save(paint_picture(seed=seed), path, format=form)

def put_pair(data, target, control, form="JPEG"):
    """A pair of these names, with a caption."""
    put(data / "target" / target, 1, form)
    put(data / "control" / control, 2, form)
    (data / "target" / target).with_suffix(".txt").write_text("make it snow", "utf-8")

def put_strays(folder):
    """Two files that no script knows, one of which is a picture, and what systems leave everywhere."""
    (folder / "layers.psd").write_bytes(b"8BPS")
    put(folder / "part.jpg.part")
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store", "._cat.png", ".hidden"):
        (folder / name).write_bytes(b"x")

def lines_about_unused(result):
    return [line for line in (result.out + result.err).splitlines() if "not used" in line]

# ---- the table -------------------------------------------------------------------------------------------------------

def test_every_suffix_that_pillow_registers_for_our_formats_is_in_the_table():
    """Those of the formats that open_image reads, and what browsers and Twitter call a JPEG."""
    Image.init()
    registered = {suffix for suffix, form in Image.registered_extensions().items()
                  if form in ("PNG", "JPEG", "WEBP", "BMP", "DIB", "TIFF", "AVIF", "MPO", "HEIF")}
    others = set(".heic .heics .heif .heifs .hif .jfif .jfi .jif .jpe .pjpeg .pjp .jpg_large .jpeg_large .jpg_orig "
                 ".png_large".split())
    assert registered | others <= set(stray_files.PICTURES)

# ---- --image FOLDER --------------------------------------------------------------------------------------------------

def test_a_folder_of_pictures_with_any_suffix_is_edited_whole(tmp_path):
    """What Windows and Twitter call them, in capitals too; the rest is one line."""
    names = ["a.jfif", "b.JPE", "c.pjpeg", "d.jpg_large", "f.jpg:orig"]
    for n, name in enumerate(names):
        put(tmp_path / "in" / name, n)
    put_strays(tmp_path / "in")
    (tmp_path / "in/a.txt").write_text("a caption", "utf-8")
    result = works("predict.py", "--image", tmp_path / "in", "--out_dir", tmp_path / "out", "--cache_dir",
                   tmp_path / "c", *DRAW)
    assert len(results_of(tmp_path / "out").keys() - {"sheet"}) == len(names)
    line, = lines_about_unused(result)
    assert line.startswith(f"warning: {tmp_path / 'in'}: 2 files are not used: layers.psd, part.jpg.part; ")
    assert "make it a whole .jpg or .png" in line

# ---- datasets --------------------------------------------------------------------------------------------------------

@pytest.fixture
def dataset(tmp_path):
    """Pairs whose suffixes differ, with strays in each folder, and a picture beside the folders."""
    data = tmp_path / "data"
    put_pair(data, "cat.jfif", "cat.png", "PNG")
    put_pair(data, "dog.jpe", "dog.JPG_LARGE")
    for folder in ("target", "control", "mask"):
        (data / folder).mkdir(exist_ok=True)
        put_strays(data / folder)
    put(data / "forgotten.jpg")
    (data / "README.md").write_text("x", "utf-8")
    return data

SCRIPTS = {
    "cache.py": ["--data", "@", "--val_data", *CPU], "tools/doctor.py": ["@"],
    "tools/import_data.py": ["@", "imported"],
    "predict.py": ["--jobs", "@", "--num_inference_steps", 2, *CPU]}

@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dataset_pairs_any_suffixes_and_counts_the_rest_once(dataset, script):
    """Though it is read twice; a second command says it again."""
    for _ in range(2 if script == "cache.py" else 1):
        result = works(script, *[dataset if word == "@" else word for word in SCRIPTS[script]])
        assert "2 samples" in result.out or "pictures: 2" in result.out
        line, = lines_about_unused(result)
        assert line.startswith(f"warning: {dataset}: 7 files are not used: ") and "forgotten.jpg" in line
