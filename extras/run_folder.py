"""
The run folder of a training: which one it is, that no other run is at work in it, and what may be in it.

It may come from a stranger, like a LoRA. train.py writes, renames and deletes in it, so before it reads a thing there
(--resume, --plan, a folder of --out_dir that is here already) nothing in it may lead to another place.
"""
import contextlib
import os
import sys
import weakref
from pathlib import Path

from common import LONG_TEXT, LORA_FILE, InputError, is_inside, number_of, numbered, refuse_to_replace, say
from extras import disk
from extras.strangers import is_utf8
from extras.strays import is_broken, listed

FOLDERS = "samples tensorboard wandb".split() # all folders that a run makes, beside its checkpoints


def find(args, name):
    """-> the folder of a training: --out_dir; with --resume the newest of this name; else the next number. Hidden
    names, which listed() leaves out, may be of a start that was killed before its log."""
    # a folder without a log does not count: its run never began
    runs = [run for run in numbered("out", name) if (run / "log.jsonl").exists()]
    folder = Path(args.out_dir or f"out/{name}-{number_of(runs[-1]) + 1 if runs else 1:03d}")
    if args.resume and runs and not args.out_dir:
        folder = runs[-1]
    try:
        used = listed(folder, "*")
    except OSError as e: # such as a name that is too long
        raise InputError(f"--out_dir {folder}: cannot be looked at ({e.strerror}); give another folder")
    if args.resume and not used:
        say(f"{folder}: nothing to resume; begins there")
    if used and not (args.resume or args.plan):
        raise InputError(f"--out_dir {folder}: is not empty; continue its run with --resume, or give another folder")
    check(folder, args.tracker)
    return folder


def lock(args, folder, name):
    """-> (the run folder, its lock, which we hold until this process ends, even if it crashes). If another run without
    --out_dir has just taken this folder, ours is the next number."""
    import filelock # here, as it is not needed with --plan
    made, held = not folder.exists(), filelock.FileLock(folder / ".lock")
    disk.try_out(folder, append=True)
    try:
        has_locks = disk.has_locks(folder)
        for file in (".lock", "log.jsonl", "DONE", LORA_FILE): # ours are empty, or begin like one of these
            refuse_to_replace(folder / file, rb'(?s)\A(\Z|\{"command": |\d+ steps|.{,99}"lora_adapter_metadata)')
        # the system releases a lock when its process dies, so a killed run leaves none behind
        if has_locks:
            held.acquire(blocking=False)
        if made:
            weakref.finalize(held, remove_unused, folder) # if the run fails before its log begins
        return folder, held
    except (filelock.Timeout, PermissionError):
        if args.out_dir or args.resume:
            raise InputError(f"--out_dir {folder}: another run is at work in it; wait, or give another folder")
        return lock(args, folder.with_name(f"{name}-{number_of(folder) + 1:03d}"), name)


def remove_unused(folder):
    """Removes a folder in which a lock is all there is. (Not within lock, or it would hold on to that lock.)"""
    with contextlib.suppress(OSError): # it is gone already, or Windows holds on to the lock
        if os.listdir(folder) == [".lock"]:
            os.unlink(folder / ".lock")
        os.rmdir(folder) # only if it is empty


def check(folder, tracker):
    """InputError names a link that leads out of a run's folder, what is neither file nor folder, a file in the place of
    one of its folders, a log that is too long, or a name that the tracker cannot take. (wandb's own links stay inside.
    lock looks at the files.)"""
    words = [folder]
    if tracker == "wandb": # which also sends the command, and where it was given
        words += [os.getcwd(), *sys.argv]
    strange = [word for word in words if not is_utf8(word)]
    if strange and tracker != "none":
        raise InputError(f"--tracker {tracker}: takes no name that is no UTF-8, as {strange[0]}; rename it, or leave "
                         "--tracker out")
    def unreadable(e):
        raise InputError(f"{e.filename}: cannot be read ({e.strerror}); mend its permissions, or give another one")
    for place in (folder, *folder.parents):
        if is_broken(place):
            raise InputError(f"{place}: a link that leads nowhere; delete it, or make the folder that it leads to")
    if not folder.is_dir(): # a new run's
        return
    for root, folders, files in os.walk(folder, onerror=unreadable):
        for name in folders + files:
            path = Path(root, name)
            if path.is_symlink() and not is_inside(path, folder):
                raise InputError(f"{path}: a link that leads out of its run's folder; delete it, or put there what it "
                                 "leads to")
            if not (path.is_symlink() or path.is_file() or path.is_dir()): # a FIFO would hang who reads it
                raise InputError(f"{path}: neither a file nor a folder; delete it")
    folders = [folder / name for name in FOLDERS] + numbered(folder, "checkpoint")
    # what is deleted or renamed as a whole: a link of these, although it stays inside, would be an error much later
    for path in [*folders, *folder.glob(".tmp-*"), *folder.glob("samples/*"), folder / ".lock"]:
        if path.is_symlink():
            raise InputError(f"{path}: a link, where a run has none; delete it")
    for path in folders:
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: no folder, as a run has it there; move it elsewhere")
    log = folder / "log.jsonl" # which --resume reads whole
    if log.is_file() and log.stat().st_size > LONG_TEXT:
        raise InputError(f"{log}: over {LONG_TEXT:,} bytes, which is no log of a run; move it elsewhere")
    if (folder / ".lock").exists() and not os.access(folder / ".lock", os.R_OK | os.W_OK):
        raise InputError(f"{folder / '.lock'}: cannot be locked; mend its permissions, or delete it")
