"""
What a disk must be able to do. Network disks, mounted buckets and NAS folders lack some of it, so it is tried before
anything slow, by the functions that will write. Where a weaker way is safe it is taken, with one line: no fsync, no
locks, no hard links. For what is needed an error names what is missing: to rename, append to or delete a file, room
for a checkpoint. No script needs to rename a folder while it works (some of tools/ do at their end).
"""
import os
import secrets
import shutil
from pathlib import Path

import common
from common import InputError, disk_error, file_in, os_reason, warn_once

def rename_folder(folder, place):
    """Gives a complete folder its name. Exists if something has come there, InputError if this disk cannot do it."""
    try:
        os.replace(folder, place) # which replaces an empty folder, but on Windows none
    except OSError as e:
        common.refuse_to_replace(place)
        raise disk_error(place, e, "this disk cannot rename folders")

def delete(file, why, remedy):
    """Deletes a file of a cache. why: what is wrong with it; InputError if that cannot be done."""
    try:
        file.unlink(missing_ok=True)
    except OSError as e:
        raise InputError(f"{file}: {why}, and cannot be deleted ({os_reason(e)}); {remedy}")

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
        raise disk_error(folder, e.__cause__)
    except OSError as e:
        raise disk_error(folder, e, what)

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
        raise disk_error(place, e, what)
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
