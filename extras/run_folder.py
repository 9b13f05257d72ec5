"""
A run folder may come from a stranger, like a LoRA. train.py writes, renames and deletes in it, so before it reads a
thing there (--resume, --plan, a folder of --out_dir that is here already) nothing in it may lead to another place.
"""
import os
import sys
from pathlib import Path

from common import LONG_TEXT, InputError, is_inside, numbered
from extras.strangers import is_utf8
from extras.strays import is_broken

FOLDERS = "samples tensorboard wandb".split() # all folders that a run makes, beside its checkpoints


def check(folder, tracker):
    """InputError names a link that leads out of a run's folder, what is neither file nor folder, a file in the place of
    one of its folders, a log that is too long, or a name that the tracker cannot take. (wandb's own links stay inside.
    common.lock_folder looks at the files.)"""
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
