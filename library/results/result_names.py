"""
Which file a result of predict.py goes into: one rule for a FILE, a FOLDER and --jobs.

1. A name that you give (--out, or `out` of a line) is that file. What is there when the command begins is replaced if
   it is a picture of ours, and an error if not; so is what another process writes there meanwhile.
2. A name that we choose replaces no other picture. A result that the folder has already, under whatever name, stays
   there. Another one gets NAME.png, or NAME-2.png, NAME-3.png and so on if something is there. The name is chosen when
   the picture is written, minutes after the start, in one act: of two processes the disk lets one succeed. So nothing
   is claimed before, and a killed process leaves a temporary file at most.
"""
import contextlib
import io
import json
import os
import re
from collections import Counter
from itertools import count
from pathlib import Path

from PIL import Image

import common
from common import Exists, InputError, NAME_BYTES, NOTHING, refuse_to_replace, write_file
from library.files import disk
from library.results.code_hash import changes, is_current

OURS = rb"tEXtkey\0" # is in every picture that predict.save_png has written
BEFORE = 8 + 25 # bytes of a PNG that stand before its first chunk of text, which has the key
LONGEST = 2**20 # bytes of a key: a sheet's lists its pictures'
SHEET = "sheet " # how the key of a sheet begins
SHEET_ROWS = 24 # samples on a sheet of results
NUMBER = re.compile(r"\d{3,}-") # how the name begins that we choose for a line of --jobs

# ---- what a file is --------------------------------------------------------------------------------------------------

def key_of(path):
    """-> the key that save_png has put into a PNG, of whatever state; None if it is not ours."""
    with contextlib.suppress(OSError):
        if os.path.isfile(path): # a FIFO would hang
            with open(path, "rb") as f:
                head = f.read(BEFORE + 8)
                size, kind = int.from_bytes(head[BEFORE:BEFORE + 4], "big"), head[BEFORE + 4:]
                name, _, key = f.read(min(size, LONGEST)).partition(b"\0")
                if kind == b"tEXt" and name == b"key":
                    return key.decode("latin-1")


def mark_of(path):
    """-> the mark with which common.write_file replaces what is here now, and nothing else."""
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb") as f:
                return rb"\A" + re.escape(f.read(4096))
    return NOTHING


def place_of(path):
    return str(path.parent.resolve() / path.name)


def identity_of(path):
    """-> what tells that two paths lead to one file, also through links, or in other letter case: its number on the
    disk; the place where it would be if nothing is there."""
    with contextlib.suppress(OSError):
        about = os.stat(path)
        return about.st_dev, about.st_ino
    return place_of(Path(path))


def sheet_key(pictures):
    return SHEET + " ".join(dict.fromkeys(picture.key for picture in pictures))

# ---- names -----------------------------------------------------------------------------------------------------------

def picture_stem(sample):
    """A sample's name may lead through folders of its dataset; its picture's name does not."""
    return sample.name.replace("/", "-")


def wanted(sample, args, end):
    """-> (the path of a sample's result, if nothing is in the way; whether the user has given it). end: what stands
    behind its stem."""
    name = sample.name if args.image else picture_stem(sample) # a folder's picture keeps its subfolder
    given = args.out or sample.job_fields.get("out")
    path = args.out or args.out_dir / (given or f"{name}.png")
    return path.with_stem(path.stem + end), bool(given)


def beside(path, end, most=NAME_BYTES):
    """-> a name of so many bytes at most that begins as this one and has an end such as -2.png: a long one is cut."""
    stem = os.fsencode(path.stem)[:most - len(end)].decode(errors="ignore") # never half a letter
    return path.with_name(stem + end)


def names_from(path):
    yield path
    for number in count(2):
        yield beside(path, f"-{number}.png")


def is_form_of(path, name):
    """Whether we could have called a result so that we would call `name` now: with -2, with the number of another
    line."""
    stem, want = [NUMBER.sub("", one.stem, count=1) for one in (path, name)]
    return stem.startswith(want) and bool(re.fullmatch(r"(-\d+)?", stem[len(want):]))

# ---- before they are drawn -------------------------------------------------------------------------------------------

def find_results(pictures, inputs, args, finished):
    """Finds out which of these pictures (predict.Picture) are there, and sets their path, mark and done -> (pictures;
    places that the user has given, in small letters). InputError if one of these is another's. inputs: paths of the
    pictures that are read; finished(path, key): whether a file is that result, and whole."""
    read = {identity_of(path) for path in inputs}
    long = [picture for picture in pictures if len(os.fsencode(picture.path.name)) > 100]
    most = disk.longest_name(args.out_dir) if long else 0
    for picture in long:
        length = len(os.fsencode(picture.path.name))
        if most < length <= NAME_BYTES and not picture.given:
            picture.path = beside(picture.path, ".png", most - 16) # names_from may add a number, a sheet its own end
        elif most < length:
            raise InputError(f"{picture.path}: its name is too long for a file; give a shorter one, with --out or a "
                             "line of --jobs")
    given = [picture for picture in pictures if picture.given]
    taken = take_given(given, read, args.jobs or "--image", finished)
    find_kept([picture for picture in pictures if not picture.given], taken, read, finished)
    if not all(picture.done for picture in pictures): # where all is finished, nothing need be written
        disk.try_out(args.out_dir)
    return pictures, {place_of(picture.path).casefold() for picture in given} # as Windows and macOS compare them


def take_given(pictures, read, where, finished):
    """-> identities of the names that the user has given."""
    taken = set()
    for picture in pictures:
        path, identity = picture.path, identity_of(picture.path)
        if identity in read or identity in taken:
            raise InputError(f"{where}: {path} would overwrite a picture that is read, or another result; give it "
                             "another name")
        refuse_to_replace(path, OURS)
        picture.mark, picture.done = mark_of(path), finished(path, picture.key)
        taken.add(identity)
    return taken


def find_kept(pictures, taken, read, finished):
    """Of those whose name we choose: a finished one stays where it is, unless the user has given that name to another;
    one that is damaged, or drawn by older code, is replaced if we could have called it so. Of two equal pictures each
    has a file of its own."""
    here = {} # {(folder, key): [(whether it must be drawn again, path)]}
    keys = {picture.key for picture in pictures}
    for folder in {picture.path.parent for picture in pictures}:
        for path in folder.glob("*.[pP][nN][gG]"):
            key = key_of(path)
            if key in keys and identity_of(path) not in taken:
                here.setdefault((folder, key), []).append((not finished(path, key), path))
    offers = []
    for n, picture in enumerate(pictures):
        for again, path in here.get((picture.path.parent, picture.key), []):
            if not again or is_form_of(path, picture.path) and identity_of(path) not in read:
                offers.append((again, path != picture.path, path, n))
    settled = set()
    for again, _, path, n in sorted(offers): # the best first
        if settled.isdisjoint((path, n)):
            pictures[n].path, pictures[n].mark, pictures[n].done = path, mark_of(path), not again
            settled.update((path, n))

# ---- when they are written -------------------------------------------------------------------------------------------

def write_picture(picture, data, given):
    """-> the file into which it has written the bytes of this PNG. InputError if another process has written to a name
    that you have given; or of a full disk. given: of find_results."""
    for path in [picture.path] if picture.given else names_from(picture.path):
        if not picture.given and place_of(path).casefold() in given:
            continue
        with contextlib.suppress(Exists):
            write_file(path, data, picture.mark if path == picture.path else NOTHING)
            return path
    if key_of(picture.path) == picture.key: # the same command was at work twice
        return picture.path
    raise InputError(f"{picture.path}: was written by another process meanwhile; give another name")


def write_sheet(data, pictures, inputs, args):
    """-> the file into which it has written the bytes of these pictures' sheet. It replaces an older sheet whose
    pictures are all among these, unless that is read."""
    path = args.out_dir / "sheet.png"
    if args.image and not args.image[0].is_dir():
        path = beside(pictures[0].path, "-sheet.png")
    keys = {picture.key for picture in pictures}
    read = {identity_of(one) for one in inputs}
    for name in names_from(path):
        mark = mark_of(name)
        key = key_of(name) or ""
        older = key.startswith(SHEET) and keys.issuperset(key.removeprefix(SHEET).split())
        with contextlib.suppress(Exists):
            write_file(name, data, mark if older and identity_of(name) not in read else NOTHING)
            return name


# ---- finished ------------------------------------------------------------------------------------------
# Which pictures predict.py need not draw: those that are there, whole, with the same settings (their key), and drawn by
# code that computes the same (library/results/code_hash.py). predict.save_png writes both into each PNG.

END = b"\0\0\0\0IEND\xaeB`\x82" # the last chunk of every PNG


def drawn_by(path, key):
    """The code that has drawn this picture with this key; {} of one from before that was noted. None if there is no
    such picture, or if any bit of it has changed: every byte is read, and no pixel decoded."""
    with contextlib.suppress(Exception), Image.open(path) as image:
        if image.info.get("key") == key:
            image.fp.seek(-len(END), io.SEEK_END)
            whole = image.fp.read() == END # which verify does not compare
            image.verify() # the checksums of all chunks before it
            return dict(json.loads(image.info.get("code", "{}"))) if whole else None


def is_finished(codes, look, path, key):
    """Whether this picture is there, whole, with this key, and drawn by its code. codes: {key: sources.with_encoding};
    look: drawn_by, or one that remembers what it has read."""
    return is_current(look(path, key), codes[key])


def describe_results(where, pictures, look):
    """Says how many of these pictures (predict.Picture) are there, and why others are drawn again. where: the folder;
    look: as for is_finished."""
    drawn = [look(p.path, p.key) for p in pictures]
    kept = [(p.code, then or {}) for p, then in zip(pictures, drawn) if p.done]
    if kept:
        common.say(f"{where}: {len(kept)} of {len(pictures)} pictures are there already, with the same settings")
    old = [changes(then, p.code, packages=False) for p, then in zip(pictures, drawn) if not p.done and then is not None]
    if old:
        names = list(dict.fromkeys(sum(old, [])))
        why = "they were drawn by an older version"
        if names:
            why = f"{', '.join(names)} {'have' if names[1:] else 'has'} changed since they were drawn"
        common.say(f"{where}: {len(old)} pictures are drawn again: {why}")
    others = Counter()
    for here, then in kept:
        names = changes(then, here, packages=True)
        others.update(f"{name} {then[name]!s:.30} (here {here[name]})" for name in names)
    for package, count in others.items():
        common.say(f"{where}: {count} pictures that are there were drawn with {package}")
