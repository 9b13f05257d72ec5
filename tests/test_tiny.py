"""tiny/: what its photographs may be used for, how large it is, and that its pictures come of tiny/make_data.py."""
import re

import numpy as np
import pytest
from PIL import Image

from tests.harness import TINY, toy_functions

def test_every_photograph_has_a_free_licence_and_a_line_of_credit():
    credits = (TINY / "CREDITS.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in credits.splitlines() if line.startswith("| ")]
    licences = {row[0]: row[3] for row in rows if len(row) == 5 and row[0] != "name"}
    assert set(licences) == {path.stem for path in (TINY / "source").iterdir()}
    for name, licence in licences.items():
        assert re.fullmatch(r"public domain|CC0|CC BY [24]\.0 \(\d\)", licence), name
        number = re.search(r"\((\d)\)", licence)
        assert not number or re.search(rf"^{number[1]}\. {name}: (.* )?by ", credits, re.M), name # who made it
    assert "creativecommons.org/licenses/by/2.0/" in credits and "creativecommons.org/licenses/by/4.0/" in credits

def test_it_is_small():
    files = [path for path in TINY.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 12e6
    assert all(max(Image.open(path).size) <= 384 for path in (TINY / "source").iterdir())

def test_the_validation_photographs_are_in_no_training_picture():
    names = toy_functions()
    seen, validation = names["photo_names"](), names["VAL_PHOTOS"]
    assert len(seen) >= 15 and len(validation) == 6 and not set(seen) & set(validation)
    assert {path.stem for path in (TINY / "source").iterdir()} == {*seen, *validation}

@pytest.mark.parametrize("folder", ["data", "val", "known", "toys/data", "toys/val", "toys/known"])
def test_the_pictures_are_drawn_by_make_data(tmp_path, drawn, folder):
    files = {path.relative_to(drawn / folder) for path in (drawn / folder).rglob("*.*")}
    assert files == {path.relative_to(TINY / folder) for path in (TINY / folder).rglob("*.*")}
    for file in files:
        if file.suffix == ".txt":
            assert (drawn / folder / file).read_text("utf-8") == (TINY / folder / file).read_text("utf-8")
        else: # another Pillow may round another way
            got, want = [np.asarray(Image.open(root / folder / file), float) for root in (drawn, TINY)]
            assert got.shape == want.shape and abs(got - want).mean() < 1

def test_a_data_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(SystemExit, match="error: --out"):
        toy_functions()["write_datasets"](str(tmp_path), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]

@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    toy_functions()["write_datasets"](str(folder), 0)
    return folder
