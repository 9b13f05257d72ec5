"""
What the pages of tools/ are made of: elements of HTML, in which a text stays a text whatever is in it, links to
pictures, small copies of pictures, and page.html, the template that has the style, the slider over steps and the wipe.
"""
import base64
import contextlib
import hashlib
import io
import json
import os
import re
from html import escape
from pathlib import Path
from urllib.parse import quote
from xml.etree.ElementTree import Element, tostring

from PIL import Image

from common import InputError, open_image, read_image, write_file

THUMBNAIL = 360 # pixels

def node(tag, *children, **attributes):
    """An element of HTML. Children are texts, which are escaped when it is written, and behind them elements; None is
    left out. class_ and data_at mean class and data-at."""
    names = {name.rstrip("_").replace("_", "-"): str(value) for name, value in attributes.items() if value is not None}
    element = Element(tag, names)
    for child in children:
        if isinstance(child, Element):
            element.append(child)
        elif child is not None:
            element.text = (element.text or "") + child
    return element

def link(path, page):
    """A file's address as seen from the page; names may hold anything. Links of the disk stay as they are, so that the
    address holds where the folder is copied to."""
    way = os.path.relpath(path, Path(page).parent)
    return "/".join(quote(os.fsencode(part), safe="") for part in Path(way).parts)

def to_jpeg(image, side):
    """A copy whose sides are at most that long -> the bytes of its file."""
    image = image.convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    image.save(jpeg := io.BytesIO(), "JPEG", quality=90)
    return jpeg.getvalue()

def thumbnail(path):
    """A picture's small copy as an address that holds it; None if it is not on this machine, or broken."""
    with contextlib.suppress(InputError):
        return "data:image/jpeg;base64," + base64.b64encode(to_jpeg(read_image(path), THUMBNAIL)).decode()

def size_of(path):
    """(width, height); None if it is not on this machine, or no picture."""
    with contextlib.suppress(InputError), open_image(path) as image:
        return image.size

def tile(name, links, alt, values={}, size=(None, None), wipe=False):
    """A picture above its name, and a number. links, values: {step: address} and {step: text}; the page's slider shows
    the newest ones up to a step. wipe: a click opens it at full size, beside another one. None without a picture."""
    if not links:
        return None
    image = node("img", src=links[max(links)], data_at=json.dumps(links), data_name=name, alt=f"{name}: {alt}",
                 loading="lazy", width=size[0], height=size[1])
    value = node("b", values[max(values)], data_at=json.dumps(values)) if values else None
    return node("figure", node("button", image, type="button") if wipe else image, node("figcaption", name, value),
                class_="tile")

def card(text, detail, tiles):
    """Pictures that belong together, under their instruction."""
    return node("article", node("h3", text, dir="auto"), node("p", detail, class_="detail"),
                node("div", *tiles, class_="tiles"), class_="card")

def table(rows, head=None):
    """Rows of texts or elements; the first of each names it."""
    body = node("tbody")
    for name, *cells in rows:
        body.append(node("tr", node("th", name), *[node("td", cell) for cell in cells]))
    top = node("thead", node("tr", *[node("th", cell) for cell in head])) if head else None
    return node("div", node("table", top, body), class_="scroll")

def section(title, *children):
    return node("section", node("h2", title), *children) if any(child is not None for child in children) else None

def save_page(path, title, sections):
    """The template with these elements in it. Its one script is the only one that a browser will run in it."""
    template = Path(__file__).with_name("page.html").read_text()
    script = re.search("<script>(.*?)</script>", template, re.DOTALL)[1]
    parts = dict(title=escape(title), hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
                 body="".join(tostring(part, "unicode", method="html") for part in sections if part is not None))
    page = re.sub("<!--(title|hash|body)-->", lambda place: parts[place[1]], template)
    write_file(path, page.encode("utf-8", "replace"))
