"""--tracker: send the numbers of log.jsonl, and the contact sheets of validations, to tensorboard or wandb too."""
import hashlib

import numpy as np

from common import InputError, first_line, shown


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
                writer.add_image(shown(name), np.asarray(image), step, dataformats="HWC")
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
        run.log({**values, **{shown(name): wandb.Image(image) for name, image in pictures.items()}}, step=step)
    return track
