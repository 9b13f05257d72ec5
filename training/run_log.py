"""
log.jsonl: a line for each step, each validation and each warning of a run. A disk that refuses a line, as network disks
do at times, gets it with the next one.
"""
import hashlib
import json
import os

import numpy as np

import common
from common import InputError, first_line, printable
from training import failures

class Log: # a class because it keeps the lines that are not on the disk yet

    def __init__(self, path):
        self.path = path
        self.waiting, self.step = [], 0 # lines, in order, and the last one's step
        self.warnings = 0 # of common.WARNED: so many are written, or wait
        self.size, self.failed = path.stat().st_size, False # bytes of it that are whole; whether more may follow

    def write(self, record, sync=False):
        """Appends the line of a step or a validation. sync: as for flush."""
        self.step = record["step"]
        self.waiting.append(json.dumps(record))
        self.flush(sync)

    def flush(self, sync=False):
        """Writes what waits, and the warnings until now -> whether it worked; if not, a warning says so, once. sync:
        onto the disk, so that after a power loss the log is never behind a checkpoint."""
        for line in common.WARNED[self.warnings:]:
            self.waiting.append(json.dumps(dict(step=self.step, warning=line)))
        self.warnings = len(common.WARNED)
        with failures.warn_on_failure(self.path):
            with open(self.path, "ab") as f:
                if self.failed and os.fstat(f.fileno()).st_size > self.size: # half a line
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


# ---- tracker ------------------------------------------------------------------------------------------
# --tracker: send the numbers of log.jsonl, and the contact sheets of validations, to tensorboard or wandb too.


def open_tracker(kind, out_dir, step, config):
    """-> track(step, values, pictures={}), with PIL images. A resumed run, which is at `step`, continues its curves.
    InputError if wandb wants a login. kind "none": it does nothing."""
    if kind == "none":
        return lambda *_: None

    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(out_dir / "tensorboard", purge_step=step + 1)

        def track(step, values, pictures={}):
            for name, x in values.items():
                writer.add_scalar(name, x, step)
            for name, image in pictures.items():
                writer.add_image(printable(name), np.asarray(image), step, dataformats="HWC")
            writer.flush()
        return track

    import wandb
    # the log's first line says when the run was begun, so a resumed run has the same id
    begun = (out_dir / "log.jsonl").read_text(encoding="utf-8").split("\n")[0]
    try:
        run = wandb.init(project="qwen-image-edit", name=out_dir.resolve().name, dir=out_dir, config=config,
                         id=hashlib.sha256(begun.encode()).hexdigest()[:32], resume="allow")
    except wandb.Error as e:
        raise InputError(f"--tracker wandb: {first_line(e)}; run `wandb login`, or set WANDB_MODE=offline, "
                         "then --resume")

    def track(step, values, pictures={}):
        run.log({**values, **{printable(name): wandb.Image(image) for name, image in pictures.items()}}, step=step)
    return track
