"""
What lies in a folder of pictures and has none of the suffixes that common.py knows: pictures without a suffix, which
are taken; what systems leave everywhere, which is passed over; and all others, which one line counts.

Only a name without any suffix is looked into. One that we do not know often says something of its own: cat.png.part is
not whole yet, cat.jpg_original and cat.jpg~ are copies from before an edit. Taken, they would be trained, or edited,
beside cat; so the line names them as the pictures that they are, and a person may rename them.
"""
import os
import re

import common

JUNK = ("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r") # of Windows and macOS; names that begin with a dot, too
# how files begin that common.open_image can open: PNG, JPEG, WebP, BMP, TIFF, AVIF and HEIC
PICTURE = re.compile(rb"(?s)\x89PNG\r\n|\xff\xd8\xff|RIFF.{4}WEBP|BM.{4}\0{4}|II\*\0|MM\0\*|.{4}ftyp(avi|he|mif1|msf1)")
NAMED = 2 # files in a line
NOT_FOLLOWED = "a link to a folder, which is not followed; put the folder itself there, or delete it"


def kind_of(path):
    """A file without a known suffix -> "picture", "unknown", or None for junk."""
    if path.name.startswith(".") or path.name.lower() in JUNK:
        return None
    return "unknown" if path.suffix or not begins_like_picture(path) else "picture"


def begins_like_picture(path):
    """By its first bytes. A link is not looked into, as a stranger's may lead anywhere; nor is a pipe, which hangs."""
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with open(path, "rb") as f:
            return bool(PICTURE.match(f.read(32)))
    except OSError: # it may not be read
        return False


def is_named_picture(path):
    """By its suffix, also of a kind that is not read."""
    return common.KINDS.get(path.suffix.lower()) in ("picture", "other") and path.is_file()


def unused_line(folder, paths, why=""):
    """-> a warning that these files, named as seen from the folder, are not used; None if there are none. why: they
    are not."""
    if not paths:
        return None
    ordered = dict.fromkeys([*filter(begins_like_picture, paths), *paths]) # pictures first
    names = [os.path.relpath(path, folder) for path in ordered][:NAMED]
    files = "1 file is" if len(ordered) == 1 else f"{len(ordered):,} files are"
    line = f"warning: {folder}: {files} not used: {', '.join(names)}{', ...' if len(ordered) > NAMED else ''}"
    return f"{line}; {why or 'to use a picture of them, make it a whole .jpg or .png in a folder that is read'}"


def sort_out(folder, found):
    """Takes all but captions and pictures out of `found`: {(..., kind): paths}, as common.find_files has it -> error
    lines for links to folders. It tells how many files of the folder are not used, pictures beside those that were
    found too, and pictures that are called .txt: once a run, as a script reads a dataset before its libraries are
    loaded, and once more behind."""
    kinds = {kind: [] for kind in ("link", "unknown")}
    for key in list(found):
        if key[-1] in kinds:
            kinds[key[-1]] += found.pop(key)
        elif key[-1] == "caption" and begins_like_picture(found[key][0]):
            kinds["unknown"] += found.pop(key)
    read = set(sum(found.values(), []))
    beside = [path for path in sorted(folder.glob("[!.]*")) if is_named_picture(path) and path not in read]
    line = unused_line(folder, beside + kinds["unknown"])
    if line:
        common.warn_once(line)
    return [common.error_line(f"{path}: not used: {NOT_FOLLOWED}") for path in kinds["link"]]
