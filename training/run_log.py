"""
The numbers of a run: log.jsonl has a line for each step, each validation and each warning. With --tracker, tensorboard
or wandb gets the losses and the contact sheets of validations, too. A failure of either is a warning and ends no run.
What a line holds is said where it is made: in train.py's loop and in validation.py.
"""
import contextlib
import hashlib
import json
import os
import platform
import re

import numpy as np

import common
from common import InputError, first_line, first_words, printable

# ---- log.jsonl -------------------------------------------------------------------------------------------------------

class Log: # a class because it keeps the lines that are not on the disk yet
    """log.jsonl at `path`, whose first line is written, and the tracker's function from open_tracker. A disk that
    refuses a line, as network disks do at times, gets it with the next one."""

    def __init__(self, path, track):
        self.path, self.track = path, track
        self.waiting, self.step = [], 0 # lines, in order, and the last one's step
        self.warnings = 0 # of common.WARNED: so many are written, or wait
        self.size, self.failed = path.stat().st_size, False # bytes of it that are whole; whether more may follow

    def write(self, record, names, pictures={}, sync=False):
        """Appends the line of a step or a validation, and sends its values of these names, and the pictures, to the
        tracker. sync: as for flush."""
        self.step = record["step"]
        self.waiting.append(json.dumps(record))
        self.flush(sync)
        with common.warn_on_failure("--tracker"):
            self.track(self.step, {name: record[name] for name in names}, pictures)

    def flush(self, sync=False):
        """Writes what waits, and the warnings until now -> whether it worked; if not, a warning says so, once. sync:
        onto the disk, so that after a power loss the log is never behind a checkpoint."""
        for line in common.WARNED[self.warnings:]:
            self.waiting.append(json.dumps(dict(step=self.step, warning=line)))
        self.warnings = len(common.WARNED)
        with common.warn_on_failure(self.path):
            with open(self.path, "ab") as f:
                # the disk may have taken half a line before it refused the rest
                if self.failed and os.fstat(f.fileno()).st_size > self.size:
                    f.truncate(self.size)
                f.write("".join(f"{line}\n" for line in self.waiting).encode())
                f.flush()
                if sync:
                    common.sync(f.fileno(), self.path.parent)
                size = os.fstat(f.fileno()).st_size
            # only when it is closed, as NFS may refuse it then
            self.waiting, self.size = [], size
        self.failed = bool(self.waiting)
        return not self.waiting

# ---- what a run's first line says of the machine ---------------------------------------------------------------------

# variables that change the last bits of a result, or the speed
OTHER_BITS = re.compile("(TORCH|PYTORCH|TORCHINDUCTOR|CUBLAS|CUBLASLT|CUDNN|NCCL|MKL|OMP|KMP|ATEN|ONEDNN|DNNL)_.*")

def environment_changes(begun, now):
    """-> a line if a run goes on with other packages, another recipe, or in other surroundings. begun: its log's first
    line."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError): # it may be anything
        before = json.loads(begun)
        differ = [f"{name} {before[name]!s:.200} -> {now[name]}" for name in now
                  if before.get(name, now[name]) != now[name]] # an older log lacks some
        if differ:
            return [f"warning: other than when this run began: {', '.join(differ)}; its numbers may differ"]
    return []

def describe_environment():
    """-> {name: what may change the last bits of a result}, beside the packages' versions."""
    set_here = {name: value for name, value in os.environ.items() if OTHER_BITS.fullmatch(name)}
    return dict(python=platform.python_version(), machine=platform.machine(), environment=set_here)

# ---- --tracker -------------------------------------------------------------------------------------------------------

def open_tracker(kind, out_dir, step, config):
    """-> track(step, values, pictures), with PIL images. A resumed run, which is at `step`, continues its curves. kind
    "none": it does nothing. InputError if the tracker cannot be opened, as when wandb wants a login."""
    if kind == "none":
        return lambda *_: None
    try:
        if kind == "tensorboard":
            return open_tensorboard(out_dir, step)
        return open_wandb(out_dir, config)
    except InputError:
        raise
    except (Exception, SystemExit) as e: # of a library, whose errors can be of any kind
        raise InputError(f"--tracker {kind}: {first_words(e)}; mend it, or leave the flag out, then --resume")

def open_tensorboard(out_dir, step):
    from torch.utils.tensorboard import SummaryWriter
    # a run that was killed may have sent steps that are not in its checkpoint: they are taken back
    writer = SummaryWriter(out_dir / "tensorboard", purge_step=step + 1)

    def track(step, values, pictures):
        for name, x in values.items():
            writer.add_scalar(name, x, step)
        for name, image in pictures.items():
            writer.add_image(printable(name), np.asarray(image), step, dataformats="HWC")
        writer.flush()
    return track

def open_wandb(out_dir, config):
    import wandb
    # the log's first line says when the run was begun, so a resumed run has the same id
    begun = (out_dir / "log.jsonl").read_text(encoding="utf-8").split("\n")[0]
    try:
        run = wandb.init(project="qwen-image-edit", name=out_dir.resolve().name, dir=out_dir, config=config,
                         id=hashlib.sha256(begun.encode()).hexdigest()[:32], resume="allow")
    except wandb.Error as e:
        raise InputError(f"--tracker wandb: {first_line(e)}; run `wandb login`, or set WANDB_MODE=offline, "
                         "then --resume")

    def track(step, values, pictures):
        shown = {printable(name): wandb.Image(image) for name, image in pictures.items()}
        run.log(values | shown, step=step)
    return track
