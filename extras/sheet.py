"""
Contact sheets: pictures side by side, to look at. For the validations of train.py, --scales and --seed of predict.py,
and tools/doctor.py; without this file they draw no sheet. PIL images in, a PIL image out.
"""
import textwrap

from PIL import Image, ImageDraw, ImageFont, ImageOps

CELL = 192 # pixels


def thumbnail(cell):
    """A picture, or a list of them side by side, as a contact sheet shows it. One that is made already stays as it is,
    so whoever holds many pictures can let the large ones go."""
    picture = side_by_side(cell) if isinstance(cell, list) else cell
    return ImageOps.contain(picture, (CELL, CELL), Image.Resampling.LANCZOS)


def contact_sheet(rows, titles):
    """Rows of cells under titles. A cell: a picture, a list of pictures, a text, or None."""
    pitch, font = CELL + 8, ImageFont.load_default(14)
    sheet = Image.new("RGB", (len(titles) * pitch, len(rows) * pitch + 24), "white")
    pen = ImageDraw.Draw(sheet)
    for i, title in enumerate(titles):
        pen.text((i * pitch + CELL // 2, 4), title, "black", font, anchor="ma")
    for j, row in enumerate(rows):
        for i, cell in enumerate(row):
            x, y = i * pitch + 4, j * pitch + 28
            if isinstance(cell, str):
                pen.multiline_text((x + CELL // 2, y + CELL // 2), textwrap.fill(cell, CELL // 8), "black", font, "mm",
                                   align="center")
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


def shown_prompt(sample):
    """The instruction, or the sample's name where PIL's font may lack a letter, as all of Chinese."""
    return sample.prompts[0] if sample.prompts[0].isascii() else sample.name


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
