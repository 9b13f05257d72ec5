"""
Which file a result of predict.py goes into: one rule for a FILE, a FOLDER and --jobs.

1. A name that you give (--out, or `out` of a line) is that file. Our own picture there is replaced; a file that is not
   ours is an error.
2. A name that we choose never replaces another picture. If the folder has this result already, under whatever name, it
   is that one. Otherwise a name that is taken gets -2, -3, and so on. A line's number is a part of the name that we
   choose, so a result is renamed when its line has another number now.
3. A name is taken when it is chosen, which is minutes before it is written. Each process lists its names in a hidden
   file of --out_dir, .names-TOKEN.json, while it holds the lock beside it. The system releases the lock of a process
   that dies, so the next process deletes what a killed one has left.
"""
import contextlib
import functools
import json
import os
import re
import secrets
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import filelock

from common import (NAME_BYTES, InputError, find_extra, move_new, prepare_folder, refuse_to_replace, say,
                    write_file)

OURS = rb"tEXtkey\0" # is in every picture that predict.save_png has written
BEFORE = 8 + 25 # bytes of a PNG that stand before its first chunk of text, which has the key
LONGEST = 2**20 # bytes of a key: a sheet's lists its pictures'
NOTHING = rb"(?!)" # for common.write_file: nothing may be replaced
SHEET = "sheet " # how the key of a sheet begins
SHEET_ROWS = 24 # samples on a sheet of results
NUMBER = re.compile(r"\d{3,}-") # how the name begins that we choose for a line of --jobs
PATIENCE = 60 # seconds: to choose takes less, even among thousands of pictures

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


def mark_of(key):
    """-> the regular expression with which common.write_file replaces this result and nothing else. (It sees the first
    4 KiB, and a sheet's key may be longer.)"""
    return re.escape(b"tEXtkey\0" + key.encode("latin-1")[:2000])


def sheet_key(pictures):
    return SHEET + " ".join(dict.fromkeys(p.key for p in pictures))


def results_in(folder):
    """-> {key: paths} of our pictures in a folder, sorted."""
    found = {}
    with contextlib.suppress(OSError): # it is not there yet; or prepare_folder says what is wrong
        for path in sorted(folder.iterdir()):
            if path.suffix.lower() == ".png" and (key := key_of(path)):
                found.setdefault(key, []).append(path)
    return found


# ---- names -----------------------------------------------------------------------------------------------------------

def with_end(path, end):
    """-> the path with this behind its stem. InputError if it is longer than a file's name may be."""
    path = path.with_stem(path.stem + end)
    if len(os.fsencode(path.name)) > NAME_BYTES:
        raise InputError(f"{path}: its name is too long for a file; give a shorter one, with --out or a line of --jobs")
    return path


def picture_stem(sample):
    """A sample's name may lead through folders of its dataset; its picture's name does not."""
    return sample.name.replace("/", "-")


def wanted(sample, args):
    """-> the path of a sample's result, if nothing is in the way, and whether the user has given it."""
    given = args.out or sample.settings.get("out")
    if args.out:
        return args.out, True
    name = sample.name if args.image else picture_stem(sample) # a folder's picture keeps its subfolder
    return args.out_dir / (given or f"{name}.png"), bool(given)


def is_numbered(picture):
    """Whether the name that we choose for it begins with the number of its line."""
    return picture.line is not None and picture.sample.name.startswith(f"{picture.line:03}-")


def is_form_of(path, picture, name):
    """Whether we could have called this picture so: `name`, NAME-2, or the same with the number of another line."""
    stem, want = path.stem, name.stem
    if is_numbered(picture):
        if not NUMBER.match(stem):
            return False
        stem, want = NUMBER.sub("", stem, count=1), NUMBER.sub("", want, count=1)
    again = stem.removeprefix(f"{want}-")
    return path.suffix == name.suffix and (stem == want or stem != again and again.isdecimal())


def number_of(path):
    return NUMBER.match(path.name)[0]


def folds_case(folder):
    """Whether its disk takes A.png for a.png, as those of Windows and macOS do."""
    here = next(place for place in (folder, *folder.parents) if place.exists()).resolve()
    other = str(here).swapcase()
    return other != str(here) and os.path.exists(other)


@dataclass
class Taken:
    """The names that no result may have. A name is a path relative to --out_dir, as name_in makes it."""
    root: Path # --out_dir
    folds: bool # whether its disk takes A.png for a.png
    inputs: set # of pictures that are read
    others: dict # {name: key} of other processes at work
    ours: dict = field(default_factory=dict) # {name: key} of this call


def name_in(taken, path):
    """-> a path's name, as it is compared, and told to other processes."""
    name = os.path.relpath(path.parent.resolve() / path.name, taken.root)
    return name.casefold() if taken.folds else name


def take(taken, path, which):
    taken.ours[name_in(taken, path)] = which


def is_taken(taken, path, which):
    """Another process may have the name if it draws the same result."""
    name = name_in(taken, path)
    return name in taken.inputs or name in taken.ours or taken.others.get(name, which) != which


def take_free(taken, path, which, leaving):
    """-> path, or the first of path-2, path-3, ... that is not taken and where no file is, but for those that are
    leaving. It is taken then."""
    name = path
    number = 1
    while is_taken(taken, name, which) or (os.path.lexists(name) and name not in leaving):
        number += 1
        name = with_end(path, f"-{number}")
    take(taken, name, which)
    return name


def begin(args, inputs, others):
    """-> Taken, before any result has a name."""
    taken = Taken(args.out_dir.resolve(), folds_case(args.out_dir), set(), others)
    taken.inputs.update(name_in(taken, path) for path in inputs)
    return taken


# ---- choosing --------------------------------------------------------------------------------------------------------

def choose_names(pictures, inputs, args, finished, claims):
    """-> ([(path, mark: of what may be replaced there, whether it is finished)] of these pictures, the same of their
    sheet, or None). InputError if a name that you have given is another's. pictures: what predict.plan_pictures
    returns; inputs: paths of the pictures that are read; finished(path, key): whether a file is that result, and whole;
    claims: an ExitStack, at whose end the names are free again."""
    where = args.jobs or "--image"
    wants = [] # of each picture: (its path if nothing is in the way, whether the user has given it)
    for picture in pictures:
        path, given = wanted(picture.sample, args)
        wants.append((with_end(path, picture.end), given))
    # without a lock first: where all is finished, nothing need be written
    finished = functools.cache(finished)
    taken = begin(args, inputs, {})
    places = take_given(pictures, wants, taken, finished, where)
    for n, (path, done) in find_kept(pictures, wants, taken, finished).items():
        if done and not has_moved(path, pictures[n], wants[n][0]):
            places[n] = path, NOTHING, True
    if len(places) == len(pictures) and all(done for *_, done in places.values()):
        return [places[n] for n in range(len(pictures))], None

    prepare_folder(args.out_dir)
    with alone(args.out_dir) as locked:
        # once more, as another process may have written meanwhile
        taken = begin(args, inputs, claims_of_others(args.out_dir) if locked else {})
        places = take_given(pictures, wants, taken, finished, where)
        places |= take_chosen(pictures, wants, taken, find_kept(pictures, wants, taken, finished))
        places = [places[n] for n in range(len(pictures))]
        sheet = None
        if find_extra("sheet") and len(pictures) > 1 and not all(done for *_, done in places):
            sheet = take_sheet(pictures, places, taken, args)
        if locked:
            claim(args.out_dir, taken.ours, claims)
    return places, sheet


def take_given(pictures, wants, taken, finished, where):
    """-> {n: (path, mark, done)} of the names that the user has given."""
    places = {}
    for n, (path, given) in enumerate(wants):
        if not given:
            continue
        key = pictures[n].key
        name = name_in(taken, path)
        if name in taken.inputs or name in taken.ours:
            raise InputError(f"{where}: {path} would overwrite a picture that is read, or another result; give it "
                             "another name")
        if is_taken(taken, path, key):
            raise InputError(f"{where}: {path} is what another predict.py is drawing; wait, or give another name")
        refuse_to_replace(path, OURS)
        take(taken, path, key)
        places[n] = path, OURS, finished(path, key)
    return places


def find_kept(pictures, wants, taken, finished):
    """-> {n: (path, done)} of the pictures that the folder has, of those whose name we choose: finished ones under any
    name that the user has not given to another one, others under a name that we could have given them. Of two equal
    pictures each has a file of its own."""
    here = {folder: results_in(folder) for folder in {path.parent for path, given in wants if not given}}
    offers = []
    for n, (name, given) in enumerate(wants):
        key = pictures[n].key
        known = [] if given else here[name.parent].get(key, [])
        for path in known:
            done, ours = finished(path, key), is_form_of(path, pictures[n], name)
            if (done or ours) and name_in(taken, path) not in taken.ours:
                offers.append((not done, path != name, not ours, str(path), n))
    kept = {}
    used = set()
    for not_done, _, _, path, n in sorted(offers): # the best first
        if n not in kept and path not in used:
            kept[n] = Path(path), not not_done
            used.add(path)
    return kept


def has_moved(path, picture, name):
    """Whether a picture has the number that its line had before."""
    return is_numbered(picture) and is_form_of(path, picture, name) and number_of(path) != number_of(name)


def take_chosen(pictures, wants, taken, kept):
    """-> {n: (path, mark, done)} of the names that we choose. Renames the pictures of lines that have moved."""
    places = {}
    leaving = set() # pictures that get another number, unless another process or a line of this list needs them there
    for n, (path, done) in kept.items():
        name = name_in(taken, path)
        if has_moved(path, pictures[n], wants[n][0]) and name not in taken.others and name not in taken.inputs:
            leaving.add(path)
        else:
            take(taken, path, pictures[n].key)
            places[n] = path, mark_of(pictures[n].key), done
    moves = {}
    for n, (path, given) in enumerate(wants):
        if not given and n not in places:
            name = take_free(taken, path, pictures[n].key, leaving)
            done = False
            if n in kept:
                source, done = kept[n]
                moves[source] = name
            places[n] = name, mark_of(pictures[n].key), done
    rename_all(moves)
    if moves:
        say(f"{taken.root}: {len(moves)} pictures renamed, as their lines have other numbers now")
    return places


def rename_all(moves):
    """{source: target} -> files under their new names. A target is free, or another's source. A kill leaves each file
    under its old name, its new one, or one more that the next call takes for it."""
    moves = dict(moves)
    for first in list(moves):
        chain = []
        source = first
        while source in moves:
            chain.append((source, moves.pop(source)))
            source = chain[-1][1]
        if chain and source == first: # a circle: its first file makes room for the last
            number = 2
            while os.path.lexists(aside := with_end(first, f"-{number}")):
                number += 1
            rename(first, aside)
            chain[0] = aside, chain[0][1]
        for source, target in reversed(chain):
            rename(source, target)


def rename(source, target):
    try:
        move_new(source, target)
    except OSError as e:
        raise InputError(f"{source}: cannot be renamed to {target.name} ({e.strerror}); rename it, and run again")


def take_sheet(pictures, places, taken, args):
    """-> SimpleNamespace(path, mark). A sheet replaces an older one whose pictures are all among these."""
    ours = {picture.key for picture in pictures}
    which = sheet_key([picture for picture in pictures if picture.row < SHEET_ROWS])
    for number in count(1):
        end = "sheet.png" if number == 1 else f"sheet-{number}.png"
        path = args.out_dir / end
        if args.image and not args.image[0].is_dir():
            path = find_extra("sheet").path_beside(places[0][0], f"-{end}")
        key = key_of(path) or ""
        older = key.startswith(SHEET) and ours.issuperset(key.removeprefix(SHEET).split())
        if not is_taken(taken, path, which) and (older or not os.path.lexists(path)):
            take(taken, path, which)
            return SimpleNamespace(path=path, mark=mark_of(key if older else which))


# ---- processes -------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def alone(folder):
    """One process at a time chooses names in a folder. Yields False where the disk knows no locks."""
    file = folder / ".names.lock"
    refuse_to_replace(file, rb"\A\Z")
    lock = filelock.FileLock(file)
    try:
        lock.acquire(timeout=PATIENCE)
    except (OSError, NotImplementedError):
        say(f"{folder}: its disk knows no locks; let no other predict.py write there at the same time")
        yield False
        return
    try:
        yield True
    finally:
        if not any(folder.glob(".names-*.lock")): # who waits for the file sees that it is gone, and makes a new one
            with contextlib.suppress(OSError): # Windows deletes it when it is released
                file.unlink()
        lock.release()


def list_of(lock_file):
    return lock_file.with_suffix(".json")


def claims_of_others(folder):
    """-> {name: key} of all processes at work. Deletes what dead ones have left."""
    found = {}
    for file in folder.glob(".names-*.lock"):
        lock = filelock.FileLock(file)
        try:
            lock.acquire(blocking=False)
        except OSError: # its process is alive
            with contextlib.suppress(OSError, ValueError, TypeError): # (of another version, perhaps)
                found.update(json.loads(list_of(file).read_text()))
            continue
        forget(file)
        lock.release()
    return found


def claim(folder, names, claims):
    """Lists these names as ours, until `claims` ends. InputError if the disk is full."""
    file = folder / f".names-{secrets.token_hex(4)}.lock"
    lock = filelock.FileLock(file)
    claims.callback(release, folder, file, lock)
    with contextlib.suppress(OSError): # write_file says what is wrong
        lock.acquire(blocking=False)
    write_file(list_of(file), json.dumps(names).encode())


def release(folder, file, lock):
    with contextlib.suppress(InputError, OSError), alone(folder): # (the folder may be gone)
        forget(file)
    lock.release()


def forget(file):
    """Deletes a claim, whose lock we hold."""
    for path in (list_of(file), file):
        with contextlib.suppress(OSError): # Windows deletes a lock's file when it is released
            path.unlink()
