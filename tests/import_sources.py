"""What the tests of tools/import_data.py share: sources of numbered pictures, and what comes out of them."""
import json

from PIL import Image

from library.data import picture_files
from library.data.dataset import read_dataset
from tests.harness import is_one_line, paint_picture, run_script, save

PICTURES = [paint_picture((64, 32), seed=n, mode="L") for n in range(6)] # told apart by their numbers; masks are gray

def put(source, files, captions=()):
    """Pictures 0, 1, ... under these names, and captions."""
    for n, name in enumerate(files.split()):
        save(PICTURES[n], source / name, format="PNG") # also as .jpg: content counts
    for name in captions:
        (source / name).write_text("go", "utf-8")
    return source

def import_data(source, out, *flags, status=0):
    """-> result with the samples by name: prompts, numbers of target and controls, number of the mask. source: or None,
    if flags name the folders."""
    result = run_script("tools/import_data.py", *[source] * (source is not None), out, *flags)
    assert result.status == status and out.exists() != bool(status), result.err
    assert all(map(is_one_line, result.errors)) and not list(out.parent.glob(".import-*"))
    no_dataset = status or list(out.glob("*.json")) # but a cache
    found, problems = ([], []) if no_dataset else read_dataset(out)
    assert not problems and (result.errors or not status)
    known = [p.convert("RGB") for p in PICTURES]
    number = lambda path: path and [*map(picture_files.read_image(path).__eq__, known), True].index(True)
    result.samples = {s.name: (s.prompts, [*map(number, [s.target, *s.controls])], number(s.mask)) for s in found}
    return result

def write_rows(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text, encoding="latin-1")
    return path

def write_parquet(path, rows):
    import pyarrow.parquet # here, as it need not be installed
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path

def hole(x=0):
    """White on black, in the left half or (x = 32) in the right one."""
    image = Image.new("L", (64, 32))
    image.paste(255, (x, 8, x + 24, 24))
    return image

def masks_of(out):
    """-> {name: what cache.py will read of it}."""
    return {path.stem: picture_files.read_mask(path) for path in sorted((out / "mask").rglob("*.*"))}
