"""
Contact sheets: pictures side by side, to look at, for the validations of train.py, and for --scales and --seed of
predict.py. PIL images in, a PIL image out.
"""
import contextlib
import functools
import math
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from common import InputError, printable
from library.data.picture_files import read_image

CELL = 192 # pixels
SHEET_ROWS = 24 # samples on a sheet of results
MOST_LETTERS = 1000 # of a text in a cell, which has room for 300

def thumbnail(cell):
    """Makes a cell's picture, or a list of them side by side, as small as a contact sheet shows it. Whoever holds many
    pictures can keep thumbnails only: the sheet takes them as they are."""
    if isinstance(cell, list) and cell:
        cell = side_by_side(cell)
    if isinstance(cell, Image.Image):
        return ImageOps.contain(cell, (CELL, CELL), Image.Resampling.LANCZOS)
    return cell

def contact_sheet(rows, titles):
    """Rows of cells under titles. A cell: a picture, a list of pictures, a text, or None."""
    pitch = CELL + 8
    sheet = Image.new("RGB", (len(titles) * pitch, len(rows) * pitch + 24), "white")
    pen = ImageDraw.Draw(sheet)
    for i, title in enumerate(titles):
        pen.text((i * pitch + CELL // 2, 4), title, "black", font(), anchor="ma")
    for j, row in enumerate(rows):
        for i, cell in enumerate(row):
            x, y = i * pitch + 4, j * pitch + 28
            if isinstance(cell, str):
                write(pen, (x + CELL // 2, y + CELL // 2), cell)
            elif cell:
                picture = thumbnail(cell)
                sheet.paste(picture, (x + (CELL - picture.width) // 2, y + (CELL - picture.height) // 2))
    return sheet

def side_by_side(images):
    small = [ImageOps.contain(image, (CELL, CELL)) for image in images]
    width = sum(s.width for s in small)
    beside = Image.new("RGB", (width, max(s.height for s in small)), "white")
    x = 0
    for image in small:
        beside.paste(image, (x, 0))
        x += image.width
    return beside

@functools.cache
def font():
    """PIL's own: the same sheet everywhere."""
    return ImageFont.load_default(14)

def has_letters(text):
    """Whether the font has all letters of a text. It shows a box for a letter that it lacks."""
    box = bytes(font().getmask("\uffff")) # which is no letter
    return all(letter.isspace() or bytes(font().getmask(letter)) != box for letter in set(text))

def write(pen, middle, text):
    """Paints a text in a cell's width. A letter that the font lacks is a box."""
    text = printable(text[:MOST_LETTERS])
    letter = max(8, math.ceil(font().getlength(text) / max(1, len(text))))
    pen.multiline_text(middle, textwrap.fill(text, CELL // letter), "black", font(), "mm", align="center")

def shown_prompt(prompt, name):
    """-> the prompt, or the name if the font lacks one of the prompt's letters."""
    return prompt if has_letters(printable(prompt[:MOST_LETTERS])) else name

def validation_sheets(folder, step, records):
    """The pictures that train.py has saved in its folder samples/ at this step -> {name of a dataset: its sheet}.
    records: what its log tells of them."""
    by_dataset = {}
    for record in records:
        file = record["file"]
        kinds = ["control"] + [f"control_{n}" for n in range(1, record["controls"])]
        controls = [read_small(folder / kind / file) for kind in kinds]
        pictures = [read_small(folder / kind / file) for kind in ("base", f"step_{step:06d}", "target")]
        prompt = shown_prompt(record["prompt"], Path(file).stem)
        by_dataset.setdefault(Path(file).parts[0], []).append([[c for c in controls if c], prompt, *pictures])
    titles = ["control", "instruction", "base", "LoRA", "target"]
    return {name: contact_sheet(lines, titles) for name, lines in by_dataset.items()}

def read_small(path):
    """The picture in this file, as a sheet shows it. None if it cannot be read: a sheet is no reason to end a command
    whose pictures are drawn, and another machine's process may have saved this one there."""
    with contextlib.suppress(InputError):
        return thumbnail(read_image(path))

def results_sheet(pictures):
    """[predict.Picture] -> a sheet with a row for each sample and a column for each title."""
    titles = list(dict.fromkeys(p.title for p in pictures))
    rows = {}
    for p in pictures:
        if p.row not in rows:
            controls = [small for small in map(read_small, p.sample.controls) if small] # those that can be read
            prompt = shown_prompt(p.sample.prompts[0], p.sample.name)
            rows[p.row] = [thumbnail(controls), prompt] + [None] * len(titles)
        rows[p.row][2 + titles.index(p.title)] = read_small(p.path)
    return contact_sheet(list(rows.values()), ["control", "instruction", *titles])
