"""
Contact sheets: pictures side by side, to look at. For the validations of train.py, --scales and --seed of predict.py,
and tools/doctor.py; without this file they draw no sheet. PIL images in, a PIL image out.
"""
import contextlib
import functools
import math
import textwrap

from PIL import Image, ImageDraw, ImageFont, ImageOps

CELL = 192 # pixels
# PIL's own font has no accents. These are looked for in the system's folders: European scripts, then Chinese, Japanese
# and Korean on Linux, Windows and macOS
FONTS = ["DejaVuSans.ttf", "NotoSansCJK-Regular.ttc", "NotoSansCJKsc-Regular.otf", "wqy-microhei.ttc", "msyh.ttc",
         "malgun.ttf", "Hiragino Sans GB.ttc", "Arial Unicode.ttf"]


def thumbnail(cell):
    """A cell as a contact sheet shows it: a picture, or a list of them side by side, becomes small. One that is small
    already stays as it is, so whoever holds many pictures can let the large ones go."""
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
        pen.text((i * pitch + CELL // 2, 4), title, "black", fonts()[0], anchor="ma")
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
    beside, x = Image.new("RGB", (sum(s.width for s in small), max(s.height for s in small)), "white"), 0
    for image in small:
        beside.paste(image, (x, 0))
        x += image.width
    return beside


@functools.cache
def fonts():
    """PIL's own, and those of FONTS that are here."""
    found = [ImageFont.load_default(14)]
    for name in FONTS:
        with contextlib.suppress(OSError):
            found.append(ImageFont.truetype(name, 14))
    return found


def font_for(text):
    """The first font that has all letters of a text, or None. What a font lacks, it draws as a box."""
    for font in fonts():
        box = bytes(font.getmask("\uffff")) # which is no letter
        if all(letter.isspace() or bytes(font.getmask(letter)) != box for letter in set(text)):
            return font


def write(pen, middle, text):
    """A text, in a cell's width; its numbers (\\u732b) for letters that no font here has."""
    if not (font := font_for(text)):
        text, font = text.encode("ascii", "backslashreplace").decode(), fonts()[0]
    letter = max(8, math.ceil(font.getlength(text) / max(1, len(text))))
    pen.multiline_text(middle, textwrap.fill(text, CELL // letter), "black", font, "mm", align="center")


def shown_prompt(sample):
    """The instruction, or the sample's name where no font here has its letters."""
    return sample.prompts[0] if font_for(sample.prompts[0]) else sample.name


def validation_sheets(samples, rows):
    """train.py's: [(place in samples, PSNRs, thumbnails of controls, base's picture, LoRA's picture and target)] ->
    {name of a dataset: its sheet}."""
    by_dataset = {}
    for i, _, (controls, *pictures) in rows:
        by_dataset.setdefault(samples[i].root, []).append([controls, shown_prompt(samples[i]), *pictures])
    titles = ["control", "instruction", "base", "LoRA", "target"]
    return {name: contact_sheet(lines, titles) for name, lines in by_dataset.items()}


def results_sheet(done, read_image):
    """predict.py's: [SimpleNamespace(sample, row, title, path, ...)] -> a sheet with a row for each sample and a column
    for each title."""
    titles, rows = list(dict.fromkeys(p.title for p in done)), {}
    for p in done:
        if p.row not in rows:
            controls = [read_image(path) for path in p.sample.controls]
            rows[p.row] = [thumbnail(controls), shown_prompt(p.sample)] + [None] * len(titles)
        rows[p.row][2 + titles.index(p.title)] = thumbnail(read_image(p.path))
    return contact_sheet(list(rows.values()), ["control", "instruction", *titles])
