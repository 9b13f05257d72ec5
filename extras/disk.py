"""
What a disk must be able to do. Network disks, mounted buckets and NAS folders lack some of it, so it is tried before
anything slow, by the functions that will write. Where a weaker way is safe it is taken, with one line: no fsync, no
locks, no hard links. For what is needed an error names what is missing: to rename, append to or delete a file, room
for a checkpoint. No script needs to rename a folder while it works (some of tools/ do at their end).
"""
import contextlib
import errno
import math
import os
import re
import secrets
import shutil
from pathlib import Path

import common
from common import LORA_FILE, InputError, warn_once

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
# how disks say that they lack something: each network disk in its own way
LACKING = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.EBADF,
           errno.EISDIR, errno.ENOTTY, errno.EXDEV}
TRIED = 2 * 10**9 # bytes at most that are written to find out about a quota


def reason_of(e):
    return e.strerror or common.first_words(e)


def refusal(place, e, what="cannot be written"):
    """-> the InputError of an OSError; what: what failed at this place."""
    reason, remedy = reason_of(e), "give a folder on another disk"
    plain = what.endswith("cannot be written")
    if plain and e.errno in (errno.EEXIST, errno.ENOTDIR) and not e.filename2:
        path = Path(e.filename or "")
        for folder in (path, *path.parents):
            if os.path.lexists(folder) and not os.path.isdir(folder):
                return InputError(f"{place}: cannot be written, as {folder} is no folder, or a link that leads nowhere "
                                  f"({reason}); move it elsewhere, or give another folder")
    if os.name == "nt" and e.errno == errno.EACCES:
        remedy = "close the program that has it open, or mend the permissions"
    elif e.errno in FULL:
        remedy = "free some space, and run again"
    elif e.errno == errno.ENAMETOOLONG:
        remedy = "give shorter names"
    # of a copy, which also has two names, they are in two folders
    elif plain and e.filename2 and Path(e.filename).parent == Path(e.filename2).parent:
        what = "this disk cannot rename files"
    elif plain and e.errno in FORBIDDEN:
        remedy = "mend its permissions, or give another folder"
    return InputError(f"{place}: {what} ({reason}); {remedy}")


def rename_folder(folder, place):
    """Gives a complete folder its name. Exists if something has come there, InputError if this disk cannot do it."""
    try:
        os.replace(folder, place) # which replaces an empty folder, but on Windows none
    except OSError as e:
        common.refuse_to_replace(place)
        raise refusal(place, e, "this disk cannot rename folders")


@contextlib.contextmanager
def file_in(folder):
    """Makes the folder. Within `with` the path of a temporary file there, which must be closed by the end: if it still
    has this name, it is deleted then. (tempfile's are deleted while they are open, which not every disk can do.)"""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".tmp-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        with contextlib.suppress(OSError): # what a kill leaves here, tools/prune.py deletes
            path.unlink(missing_ok=True)


def sync(descriptor, place):
    """fsync. On a disk that has none it is left out, with a line; where it fails it raises OSError."""
    with unsynced(place):
        os.fsync(descriptor)


def sync_folder(path):
    """A rename is safe from power loss only when the folder is on the disk, too (Windows cannot do that)."""
    if os.name == "nt":
        return
    with unsynced(path):
        folder = os.open(path, os.O_RDONLY) # (not of one that may only be written)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def unsynced(place):
    """Within `with`, what says that this disk has no fsync is a line, and any other failure is raised."""
    try:
        yield
    except OSError as e:
        say_lack(place, e, "fsync", "a power loss may cost what was written last")
        if e.errno not in LACKING:
            raise OSError(e.errno, f"fsync: {reason_of(e)}") from e


def remove_old(path):
    """Deletes a checkpoint, whose LoRA goes first, as without it it is none, or another folder or file of a run. A
    warning if that fails: NFS keeps files that somebody reads, as Windows does."""
    try:
        if path.is_dir() and not path.is_symlink():
            (path / LORA_FILE).unlink(missing_ok=True)
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as e:
        old = re.match(".[a-z]*[-_]?", path.name)[0] # one line for all of them
        warn_once(f"warning: {path.parent}: an old {old}... cannot be deleted ({reason_of(e)}); tried again later")


def say_unlinked(place, e):
    say_lack(place, e, "hard links", "of two scripts that write one file at once the last one wins")


def say_lack(place, e, what, then):
    """Once for a disk, which its mount point names; nothing if this OSError is about another thing."""
    if e.errno in LACKING:
        mount = Path(place).resolve()
        while not os.path.ismount(mount):
            mount = mount.parent
        warn_once(f"{mount}: no {what} on this disk ({reason_of(e)}): {then}")


def delete(file, why, remedy):
    """Deletes a file of a cache. why: what is wrong with it; InputError if that cannot be done."""
    try:
        file.unlink(missing_ok=True)
    except OSError as e:
        raise InputError(f"{file}: {why}, and cannot be deleted ({reason_of(e)}); {remedy}")


def try_out(folder, append=False):
    """Makes the folder, and does there what will be done: write a file, replace it, delete it; append to it. InputError
    names what this disk cannot do."""
    what = "cannot be written"
    try:
        with file_in(folder) as trial:
            for text in (b"new", b"replaced"):
                common.write_file(trial, text)
            if append:
                what = "this disk cannot append to files"
                with open(trial, "ab") as f:
                    f.write(b"more")
            what = "this disk cannot delete files"
            trial.unlink()
    except InputError as e: # of write_file, which names the trial
        raise refusal(folder, e.__cause__)
    except OSError as e:
        raise refusal(folder, e, what)


def try_renames(out, place):
    """InputError, about this place, on a disk that cannot rename folders with something in them, for a tool that will
    do that at its end, to `out`."""
    trial = out.with_name(f".tmp-{secrets.token_hex(8)}")
    what = "cannot be written"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        trial.mkdir()
        (trial / "file").touch()
        what = "this disk cannot rename folders"
        trial = trial.replace(f"{trial}-2")
    except OSError as e:
        raise refusal(place, e, what)
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def try_cache(args):
    """Says at the start whether the cache can be written. One that cannot serves if it is complete, which the plan will
    tell: see keep_from_prune."""
    try:
        try_out(Path(args.cache_dir))
    except InputError as e:
        if not Path(args.cache_dir, "latents").is_dir() and vars(args).get("use_cache", True):
            raise
        warn_once(f"warning: {str(e).removeprefix('error: ').split('; ')[0]}: it serves only if it is complete")


def has_locks(folder):
    """Whether this disk has locks; PermissionError if another process holds this folder's on Windows, where nobody may
    read it then. filelock's answers differ: its oldest version takes most disks without locks for locked, its newest
    one leaves a lock of its own, which stays there after a kill."""
    if os.path.isfile(folder / ".lock"):
        with open(folder / ".lock", "rb") as f:
            f.read(1)
    try:
        import fcntl
    except ModuleNotFoundError: # Windows always has them
        return True
    with file_in(folder) as trial, open(trial, "xb") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            warn_once(f"{folder}: no locks on this disk ({reason_of(e)}): do not start two runs in this folder")
            return False
    return True


def longest_name(folder):
    """-> bytes that a file's name may have here: encrypted disks take fewer than others."""
    while not folder.is_dir():
        folder = folder.parent
    for size in (common.NAME_BYTES, 143, 100):
        trial = folder / (".tmp-" + secrets.token_hex(size)[5:size])
        try:
            trial.touch()
            trial.unlink()
            break
        except OSError as e:
            if e.errno != errno.ENAMETOOLONG: # which the trial of the folder will tell
                break
    return size


def check_room(folder, numbers, keep, ema=0):
    """InputError if a checkpoint of so many LoRA parameters does not fit: fp32, and as much twice for an optimizer such
    as AdamW, four times with --ema, which adds the average and the trained weights. A warning if --keep do not, with
    the one that is written before the oldest is deleted, and the LoRA."""
    files = 4 * numbers, (16 if ema else 8) * numbers
    size = sum(files)
    more = max(keep + 1 - len(common.checkpoints(folder)), 1)
    usage = shutil.disk_usage(folder)
    free = usage.free if usage.total else math.inf # unknown
    if size <= min(free, TRIED):
        free = min(free, room_for(folder, files))
    if free < size:
        raise InputError(f"{folder}: has room for {free / 1e9:.3g} GB, and a checkpoint takes {size / 1e9:.3g} GB; "
                         "free some space, or give a folder on another disk")
    if free < more * size + files[0]:
        warn_once(f"warning: {folder}: has room for {int(free // size)} more checkpoints of {size / 1e9:.3g} GB, and "
                  f"--keep {keep} will need {more}, and the finished LoRA; free some space")


def room_for(folder, sizes):
    """-> infinity if files of these sizes, in bytes, can be written; else the bytes that could be, as by a quota."""
    part, written = os.urandom(2**20), 0
    try:
        with contextlib.ExitStack() as stack:
            for size in sizes:
                trial = stack.enter_context(file_in(folder))
                f = stack.enter_context(open(trial, "xb", buffering=0))
                while size: # a write that reaches a limit is a short one, which raises nothing
                    done = f.write(part[:size])
                    size, written = size - done, written + done
                    if not done:
                        return written
                sync(f.fileno(), folder)
    except OSError as e: # (any other does not tell)
        if e.errno in FULL:
            return written
    return math.inf
