"""
The parts of the HTML pages that page.py and doctor.py write: elements, whose text is always escaped; links to pictures;
and page.html, the template with the style, the slider over the steps and the before/after wipe.
"""
import base64
import hashlib
import io
import json
import math
import os
import re
from html import escape
from pathlib import Path
from urllib.parse import quote
from xml.etree.ElementTree import Element, tostring

from PIL import Image

from common import printable, write_file

PAGE = b'<meta name="generator" content="tools/page_common.py">' # every page has it; which replaces no other file
OURS = b"tools/page_common.py" # a comment in every JPEG of a page

def node(tag, *children, **attributes):
    """-> an HTML element. children: texts, which are escaped when the page is written, then elements; None is left out.
    The attributes class_ and data_at become class and data-at. Control characters, which HTML has no letters for, or
    which turn the direction of writing, become \\x1b, as on a terminal."""
    element = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.rstrip("_").replace("_", "-"), printable(value))
    for child in children:
        if isinstance(child, Element):
            element.append(child)
        elif child is not None:
            element.text = (element.text or "") + printable(child)
    return element

def link(path, page):
    """-> a file's URL, relative to the page; its name may contain any character. Symbolic links are not resolved, so
    that the URL stays right when the folder is copied."""
    try:
        relative = os.path.relpath(path, page.parent)
    except ValueError: # another drive of Windows
        return Path(os.path.abspath(path)).as_uri()
    return quote(os.fsencode(Path(relative).as_posix()))

def to_jpeg(image, side):
    """-> the bytes of a JPEG file: a copy whose sides have at most `side` pixels."""
    image = image.convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    image.save(jpeg := io.BytesIO(), "JPEG", quality=90, comment=OURS)
    return jpeg.getvalue()

def tile(name, links, alt, size, values={}):
    """-> a picture with its name and a number below it; a click opens it at full size, to compare it with another one
    of its card. links: {step: URL}; values: {step: text}; the page's slider shows the newest ones up to its step. size:
    (width, height)."""
    image = node("img", src=links[max(links)], data_at=json.dumps(links), data_name=name, alt=f"{name}: {alt}",
                 loading="lazy", width=size[0], height=size[1])
    value = node("b", values[max(values)], data_at=json.dumps(values)) if values else None
    return node("figure", node("button", image, type="button"), node("figcaption", name, value), class_="tile")

def detail(text):
    """-> a paragraph in small letters."""
    return node("p", text, class_="detail")

def fold(title, *children):
    """-> elements that a click on the title shows."""
    return node("details", node("summary", title), *children)

def card(heading, remark, tiles):
    """-> pictures that belong together, under a heading (as a rule their prompt)."""
    return node("article", node("h3", heading, dir="auto"), detail(remark), node("div", *tiles, class_="tiles"),
                class_="card")

def table(rows):
    """-> a table. rows: lists of texts or elements; the first of each list is the row's heading."""
    body = node("table")
    for name, *cells in rows:
        body.append(node("tr", node("th", name), *[node("td", cell) for cell in cells]))
    return node("div", body, class_="scroll")

def area_words(area):
    """-> an area as --target_pixels takes it: "160x160" for 25600 pixels, "25601", "native"."""
    if type(area) is int and area > 0:
        side = math.isqrt(area)
        if side * side == area:
            return f"{side}x{side}"
    return str(area)

def section(title, *children):
    """-> a section of the page, to which #its-title leads; None if it has no children."""
    if any(child is not None for child in children):
        return node("section", node("h2", title), *children, id=title.split(",")[0].lower().replace(" ", "-"))

def chapters(sections):
    """-> links to these sections of the page; those that are None are left out."""
    return node("nav", *[node("a", part[0].text, href=f"#{part.get('id')}") for part in sections if part is not None])

def save_page(path, title, sections):
    """Writes the template with these sections in it. The page tells browsers to run only the template's own script."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    # without this hash in its head, no browser would run the script: nor does one run a stranger's
    script = re.search("<script>(.*?)</script>", template, re.DOTALL)[1]
    parts = dict(title=escape(printable(title)),
                 hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
                 body=tostring(node("main", *sections), "unicode", method="html"))
    page = re.sub("<!--(title|hash|body)-->", lambda place: parts[place[1]], template)
    write_file(path, page.encode("utf-8", "replace"), PAGE)
