"""
The run folder of a training: which one it is, what may be in it, that no other run is at work in it, whether it has
room, which of its checkpoints are deleted; and at the end the commands for what is in it.

It may come from a stranger, like a LoRA. train.py writes, renames and deletes in it, so before it reads a thing there
(--resume, --plan, a folder of --out_dir that is here already) nothing in it may lead to another place.
"""
import contextlib
import math
import os
import re
import shutil
import time
import weakref
from pathlib import Path

from common import (InputError, LONG_TEXT, file_in, is_inside, os_reason, refuse_to_replace, say, shell_command,
                    warn_once)
from library.files import disk
from library.files.stray_files import is_broken, listed
from library.lora.lora_paths import LORA_FILE, checkpoints, number_of, numbered
from training import best_step

FOLDERS = "samples tensorboard wandb".split() # all folders that a run makes, beside its checkpoints

# ---- which folder, and what may be in it -----------------------------------------------------------------------------

def find(args, name):
    """-> the folder of a training: --out_dir; with --resume the newest of this name; else the next number. Hidden
    names, which listed() leaves out, may be of a start that was killed before its log."""
    # a folder without a log does not count: its run never began
    runs = [run for run in numbered("out", name) if (run / "log.jsonl").exists()]
    folder = Path(args.out_dir or f"out/{name}-{number_of(runs[-1]) + 1 if runs else 1:03d}")
    if args.resume and runs and not args.out_dir:
        folder = runs[-1]
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out_dir {folder}: is no folder; give another one")
    try:
        used = listed(folder, "*")
    except OSError as e: # such as a name that is too long
        raise InputError(f"--out_dir {folder}: cannot be looked at ({e.strerror}); give another folder")
    if args.resume and not used:
        say(f"{folder}: nothing to resume; begins there")
    is_run = (folder / "log.jsonl").exists() or (folder / LORA_FILE).exists() or checkpoints(folder)
    if args.resume and used and not is_run:
        raise InputError(f"--resume: no run in {folder}; give the right --out_dir, or begin a new run in another, "
                         "without --resume")
    if used and not (args.resume or args.plan):
        raise InputError(f"--out_dir {folder}: is not empty; continue its run with --resume, or give another folder")
    check(folder)
    return folder

def check(folder):
    """InputError names a link that leads out of a run's folder, what is neither file nor folder, a file in the place of
    one of its folders, or a log that is too long. (wandb's own links stay inside. lock looks at the files.)"""
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

# ---- the lock --------------------------------------------------------------------------------------------------------

def lock(args, folder, name):
    """-> (the run folder, its lock, which we hold until this process ends, even if it crashes). If another run without
    --out_dir has just taken this folder, ours is the next number."""
    import filelock # here, as it is not needed with --plan
    made, held = not folder.exists(), filelock.FileLock(folder / ".lock")
    disk.try_out(folder, append=True)
    try:
        has_locks = disk_has_locks(folder)
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

def disk_has_locks(folder):
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
            warn_once(f"{folder}: no locks on this disk ({os_reason(e)}): do not start two runs in this folder")
            return False
    return True

# ---- a run that continues --------------------------------------------------------------------------------------------

def clean_folder(out_dir, step):
    """Prepares the folder for a run that continues after this step, and says so: removes what an earlier process has
    left (half-written files and checkpoints, and what marks a run as finished). The checkpoints after this step, which
    are damaged, get another name: they must not count for --keep -> the lines of the log that stay: the first, and
    those up to the checkpoint, because later steps run again, and a kill may have left half a line."""
    say(f"{out_dir}: continues after step {step}" if step else f"{out_dir}: has no checkpoint; begins at step 0")
    for path in out_dir.glob(".tmp-*"): # train.py holds the lock, so these belong to a dead process
        remove_old(path)
    damaged = checkpoints(out_dir)
    for path in numbered(out_dir, "checkpoint"):
        if number_of(path) > step and path in damaged:
            put_aside(path)
        elif number_of(path) > step:
            remove_old(path)
    for name in ("DONE", LORA_FILE):
        disk.delete(out_dir / name, "is of a finished run", "close what has it open, or delete it; then run again")
    log = out_dir / "log.jsonl"
    lines = log.read_text("utf-8", "replace").splitlines() if step and log.exists() else []
    first = [line for line in lines[:1] if '"val_loss"' not in line] # which the lines of validations alone have
    return first + [line for line in lines[1:] if is_record(line, step)]

def put_aside(folder):
    """Moves the files of a damaged checkpoint to another folder, for a person, the LoRA first: without it this is no
    checkpoint. (Not every disk can rename the folder.)"""
    aside = folder.with_name(f"{folder.name}.damaged-{time.time_ns()}")
    try:
        aside.mkdir()
        for file in sorted(folder.iterdir(), key=lambda file: file.name != LORA_FILE):
            os.replace(file, aside / file.name)
    except OSError as e:
        raise InputError(f"{folder}: is damaged, and cannot be moved aside ({e.strerror}); delete it")
    remove_old(folder)

def is_record(line, step):
    """Whether a line of the log is whole, and of a step up to this one; a validation's, if training/best_step.py can
    read it."""
    with contextlib.suppress(Exception): # a foreign log can fail in any way
        record = best_step.read_line(line)
        if "val_loss" in record:
            best_step.check_validation(record)
        return best_step.is_count(record["step"], step)
    return False

# ---- room for checkpoints, and which of them go ----------------------------------------------------------------------

def check_room(folder, numbers, keep, ema=0, trained={}):
    """InputError if a checkpoint of so many LoRA parameters does not fit: fp32, and as much twice for an optimizer such
    as AdamW, four times with --ema, which adds the average and the trained weights; and as_trained's. A warning
    if --keep do not, with the one that is written before the oldest is deleted, and the LoRA. (A quota, which the disk
    does not tell, is met at a checkpoint: failures.save_or_warn.)"""
    lora = 4 * numbers # bytes, also of the finished one
    size = lora + (16 if ema else 8) * numbers + 4 * sum(p.numel() for p in trained.values())
    others = max(keep + 1 - len(checkpoints(folder)), 1) # that are still to come
    usage = shutil.disk_usage(folder)
    free = usage.free if usage.total else math.inf # unknown
    if free < size:
        raise InputError(f"{folder}: has room for {free / 1e9:.3g} GB, and a checkpoint takes {size / 1e9:.3g} GB; "
                         "free some space, or give a folder on another disk")
    if free < others * size + lora:
        warn_once(f"warning: {folder}: has room for {int(free // size)} more checkpoints of {size / 1e9:.3g} GB, and "
                  f"--keep {keep} will need {others}, and the finished LoRA; free some space")

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
        warn_once(f"warning: {path.parent}: an old {old}... cannot be deleted ({os_reason(e)}); tried again later")

def remove_checkpoints(out_dir, newest):
    """Deletes all checkpoints but these and the best ones, and what is left of those whose deletion has failed; nothing
    where the log cannot be read."""
    best = best_step.steps_to_keep(best_step.read_validations(out_dir))
    for path in numbered(out_dir, "checkpoint"):
        if path not in newest and number_of(path) not in best:
            remove_old(path)

def remove_pictures(out_dir):
    """Deletes the full-size pictures of validations, which take space, but those of the newest 20 and of the best ones.
    Contact sheets stay."""
    best = best_step.steps_to_keep(best_step.read_validations(out_dir))
    names = {f"step_{step:06d}" for step in best}
    folders = [path for path in sorted(out_dir.glob("samples/step_*[0-9]/")) if not path.is_symlink()]
    for path in folders[:-20]:
        if path.name not in names:
            remove_old(path)

# ---- what to do with a finished run ----------------------------------------------------------------------------------

def next_commands(out_dir, predict_words, sample_lora):
    """-> lines: what a person may want to do with a finished run. predict_words: what command_line.words_for_predict
    returns; sample_lora: --sample_lora's files."""
    lines = []
    lora = out_dir
    # The best checkpoint is recommended only if it is the best by all measures; otherwise the pictures must tell.
    validations = best_step.read_validations(out_dir)
    better = best_step.better_steps(validations)
    for path in checkpoints(out_dir)[:-1]:
        measures = better.get(number_of(path))
        if measures:
            lines.append(f"{path} is better than the last one by {' and '.join(measures)}; compare them")
            if len(measures) == len(best_step.best_steps(validations)):
                lora = path
    draw = shell_command(["python", "predict.py", *predict_words, "--lora", lora, *sample_lora])
    look = shell_command(["python", "tools/page.py", out_dir])
    convert = shell_command(["python", "tools/convert_lora.py", lora, "--to"])
    return [
        *lines,
        "next:",
        f"  {draw} --image CONTROL.png --prompt \"...\"",
        f"  {look}",
        f"ComfyUI: copy it to models/loras; diffusers: pipe.load_lora_weights({str(lora / LORA_FILE)!r}); InvokeAI, "
        "stable-diffusion.cpp: as it is (steps, sizes, weights: GUIDE.md, \"ComfyUI and other programs\")",
        f"DiffSynth, mflux, SGLang, LightX2V, musubi and others (-h): {convert} PROGRAM --out NAME.safetensors",
    ]
