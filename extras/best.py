"""
Which validation of a run is its best so far. train.py says it after each one and keeps that step's checkpoint; at the
end extras/hints.py recommends it. Without this file only the newest --keep checkpoints stay.
"""
import json
import math

from common import checkpoints, number_of


def best_steps(out_dir):
    """-> {measure: (step, value)} by the run's log, of equal ones the first: the step of the least validation loss, and
    that of the LoRA's greatest mean PSNR over all pictures, as tools/page.py has them. {} before the first."""
    best = dict.fromkeys(["validation loss", "mean PSNR"])
    log = out_dir / "log.jsonl" # only the first process has one
    lines = log.read_text().splitlines() if log.exists() else []
    for record in [json.loads(line) for line in lines if '"val_loss"' in line]: # few of a long log
        values = {"validation loss": record["val_loss"]}
        if psnrs := [picture["psnr"][2] for picture in record.get("pictures") or ()]: # of input, base, LoRA, VAE
            values["mean PSNR"] = sum(psnrs) / len(psnrs)
        for name, value in values.items():
            sign = -1 if name == "mean PSNR" else 1
            if math.isfinite(value) and (not best[name] or sign * value < sign * best[name][1]):
                best[name] = record["step"], value
    return {name: found for name, found in best.items() if found}


def steps_to_keep(out_dir):
    """-> the best steps, whose checkpoints --keep does not delete."""
    return {step for step, _ in best_steps(out_dir).values()}


def describe(out_dir):
    """-> "best so far: step 200 by validation loss (0.5432), step 300 by mean PSNR (24.1 dB)"."""
    words = []
    for name, (step, value) in best_steps(out_dir).items():
        words.append(f"step {step} by {name} ({f'{value:.1f} dB' if name == 'mean PSNR' else f'{value:.4f}'})")
    return f"best so far: {', '.join(words)}"


def better_checkpoints(out_dir):
    """-> {checkpoint's folder: the measures by which it is better than the newest one}, as far as it is still there."""
    saved = {number_of(path): path for path in checkpoints(out_dir)[:-1]}
    better = {}
    for name, (step, _) in best_steps(out_dir).items():
        if step in saved:
            better.setdefault(saved[step], []).append(name)
    return better
