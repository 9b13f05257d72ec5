"""
What lies in a folder of pictures beside those that we know by their suffixes: what systems and programs leave
everywhere, which is passed over; links to folders; and all others, which one line counts. Names of a table may be
spelled in another form of Unicode than those on the disk.

A name that we do not know often says something of its own: cat.png.part is not whole yet, cat.jpg_original and cat.jpg~
are copies from before an edit. Taken, they would be trained, or edited, beside cat; so the line names them, and a
person may rename them.
"""
import contextlib
import functools
import os
import re
import unicodedata
from pathlib import Path

import common
from common import InputError, is_inside

def refuse_outside(path, folder):
    """InputError unless is_inside: who has made a dataset does not choose what else is read of this disk."""
    if why := why_gone(path):
        raise InputError(f"{path}: {why}")
    if not is_inside(path, folder):
        raise InputError(f"{path}: a link that leads out of {folder}, and so is not read; if you trust it, make a copy "
                         "with the files themselves: cp -rL")

# what PNG, JPEG, WebP, BMP, TIFF, AVIF and HEIC files are called, by browsers on Windows and by Twitter, too
PICTURES = """.png .apng .jpg .jpeg .jpe .jfif .jfi .jif .pjpeg .pjp .mpo .webp .bmp .dib .tif .tiff .avif .avifs .heic
              .heics .heif .heifs .hif .jpg_large .jpeg_large .png_large .jpg-large .png-large .jpg:large .png:large
              .jpg_orig .jpeg_orig .png_orig .jpg:orig .png:orig""".split()
NOT_READ = ".gif .jxl .cr2 .cr3 .nef .arw .dng .raf .orf .rw2".split() # reported; most are raw files
KINDS = {".txt": "caption", **dict.fromkeys(PICTURES, "picture"), **dict.fromkeys(NOT_READ, "other")} # by suffix

def find_files(folder):
    """Files below `folder` -> {(stem relative to it, kind): [paths]}, sorted, without junk; kind: as of kind_of, and
    "link" for one to a folder. Stems are NFC, so that names from macOS match."""

    def unreadable(e):
        raise InputError(f"{e.filename}: cannot be read as a folder ({e.strerror}); mount it, or fix its permissions")
    found = {}
    for root, dirs, names in os.walk(folder, onerror=unreadable):
        dirs[:] = [name for name in dirs if not is_junk(name)]
        links = {name for name in dirs if Path(root, name).is_symlink()} # which os.walk does not follow
        for name in sorted([*names, *links]):
            if is_junk(name):
                continue
            path = Path(root, name)
            stem = path.relative_to(folder).with_suffix("").as_posix()
            kind = "link" if name in links else kind_of(path)
            found.setdefault((unicodedata.normalize("NFC", stem), kind), []).append(path)
    return dict(sorted(found.items()))

def read_text(path, most=2**20):
    """A text file in UTF-8, without the marks that editors on Windows write before it (and that `cat` leaves inside).
    most: bytes; the default is for a caption or a configuration. InputError names the file."""
    if not path.exists():
        raise InputError(f"{path}: does not exist; {near_path(path)}")
    with contextlib.suppress(OSError, ValueError):
        if path.stat().st_size > most:
            raise InputError(f"{path}: over {most:,} bytes, which is no text of this kind; shorten it")
        # a FIFO would hang; UTF-16 can pass for UTF-8
        if path.is_file() and "\0" not in (text := path.read_bytes().decode()):
            refuse_pointer(path, text.encode())
            return text.replace("\ufeff", "")
    raise InputError(f"{path}: no readable text in UTF-8 (Latin-1 or UTF-16?); save it as UTF-8")

# What systems and programs leave in folders, beside names that begin with a dot: .DS_Store, ._cat.png, .Trashes, QNAP's
# .@__thumb, .stfolder, .dropbox.cache, .ipynb_checkpoints, .git. A bin holds what its owner has deleted, and a folder
# of thumbnails each picture once more. A name that a person could choose (backup, Recycle, found.001) is none of it.
JUNK = re.compile(r"""(?xi)
    \.(?!\.?\Z) .*
    | @eaDir | \#recycle | \#snapshot | @tmp | SYNO(FILE|PHOTO)_THUMB.* | .*@?Syno(Resource|EAStream) # Synology
    | @Recycle | @Recently-Snapshot | ~snapshot | @GMT-[\d.]+-[\d.]+ # QNAP, NetApp, Samba
    | (eh)?thumbs(_vista)?\.db(:encryptable)? | desktop\.ini | .*[:\uf03a]Zone\.Identifier.* # Windows
    | \$RECYCLE\.BIN | (?-i:RECYCLER) | System\ Volume\ Information | ~\$.*
    | __MACOSX | Icon[\r\uf00d] | Network\ Trash\ Folder | Temporary\ Items # macOS
    | lost\+found | __pycache__
    | picasa\.ini | zbthumbnail\.info | .+\.(xmp|lrdata) # notes and previews of programs for photographs
    | ~syncthing~.* | _gsdata_""", re.DOTALL)
POINTER = re.compile(rb"version https://git-lfs|/annex/objects/") # in the place of a file that was not fetched
NAMED = 2 # files in a line

def is_junk(name):
    """Whether a file or folder of this name is none of a person's."""
    return bool(JUNK.fullmatch(name))

def kind_of(path):
    """A file -> one of KINDS, or "link" for one that leads nowhere, or "unknown"."""
    if kind := KINDS.get(path.suffix.lower()):
        return kind
    return "link" if is_broken(path) else "unknown"

def listed(folder, pattern):
    """-> what glob finds in a folder, sorted, without junk."""
    return [path for path in sorted(folder.glob(pattern)) if not is_junk(path.name)]

def is_broken(path):
    return os.path.islink(path) and not os.path.exists(path)

def why_gone(path):
    """Why nothing is at this path, and what to do; None if there is no special reason."""
    if is_broken(path):
        return "a link that leads nowhere; mount what it should lead to, or delete it"

def near_path(path):
    """What to do about a path where nothing is: "give photos" for photo, if photos is there."""
    meant = common.near_file(Path(path))
    return f"give {common.shell_command([meant])}" if meant else "check the name"

def why_not(path):
    """-> an error line for a link."""
    why = why_gone(path) or "a link to a folder, which is not followed; put the folder itself there, or delete it"
    return common.error_line(f"{path}: not used: {why}")

def refuse_pointer(path, data):
    """InputError if a file's first bytes are those of git, which has the file itself elsewhere."""
    if POINTER.match(data):
        raise InputError(f"{path}: a pointer of git lfs or git annex, not the file itself; fetch that: git lfs "
                         "pull, or git annex get")

@functools.lru_cache(64)
def spellings(folder, changed):
    """{a name in NFC: the same as the disk has it, maybe several} of what is in a folder; changed: when it was."""
    found = {}
    for name in sorted(os.listdir(folder)):
        found.setdefault(unicodedata.normalize("NFC", name), []).append(name)
    return found

def on_disk(path):
    """A path as the disk spells it: macOS and its archives take letters apart (NFD), which others write as one (NFC). A
    path that is there, or nowhere, stays as it is. InputError if it could be either of two."""
    path = Path(path)
    if str(path).isascii() or os.path.lexists(path):
        return path
    folder, names = on_disk(path.parent), []
    try:
        names = spellings(folder, os.stat(folder).st_mtime_ns).get(unicodedata.normalize("NFC", path.name), [])
    except (OSError, ValueError): # there is no such folder, or the name is none
        pass
    if names[1:]:
        raise InputError(f"{path}: {len(names)} files have this name, in other forms of Unicode; keep one of "
                         "them")
    return folder / (names[0] if names else path.name)

def is_named_picture(path):
    """By its suffix, also of a kind that is not read."""
    return KINDS.get(path.suffix.lower()) in ("picture", "other") and path.is_file()

def seen_from(folder, path):
    """A path as seen from a folder: the same text on each system. What lies on another drive of Windows is whole."""
    try:
        path = os.path.relpath(path, folder)
    except ValueError:
        pass
    return Path(path).as_posix()

def first_of(names):
    more = ", ..." if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more

def sort_out(folder, found):
    """Takes all but captions and pictures out of `found`: {(..., kind): paths}, as find_files has it -> error
    lines for links to folders. It tells how many files of the folder are not used, pictures beside those that were
    found too: once a run, as a script reads a dataset before its libraries are loaded, and once more behind."""
    kinds = {"unknown": [], "link": []}
    for key in list(found):
        if key[-1] in kinds:
            kinds[key[-1]] += found.pop(key)
    read = set(sum(found.values(), []))
    beside = [path for path in listed(folder, "*") if is_named_picture(path) and path not in read]
    names = [seen_from(folder, path) for path in dict.fromkeys(beside + kinds["unknown"])]
    if names:
        common.warn_once(f"warning: {folder}: {len(names):,} files are not used: {first_of(names)}; to use a picture "
                         "of them, make it a whole .jpg or .png in a folder that is read")
    return list(map(why_not, kinds["link"]))
