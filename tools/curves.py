"""
Look at a training: draws loss.png (the loss over the steps, and over the timesteps) into the run folder, and names the
hardest samples, those with the greatest loss for their timesteps. Look at them: their target may be wrong.

$ python tools/curves.py out/RUN        # loss.png needs matplotlib: pip install matplotlib
"""
import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np

from common import InputError, Parser, write_file

def read_log(folder):
    """-> (records of steps, of validations). The last line of a run that is at work, or was killed, may be cut."""
    log = folder / "log.jsonl"
    try:
        lines = log.read_text().splitlines()[1:]
    except (OSError, ValueError) as e:
        raise InputError(f"{log}: cannot be read ({e}); give a run folder of train.py")
    records = []
    for n, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except ValueError:
            if n + 1 < len(lines):
                raise InputError(f"{log}:{n + 2}: no JSON; take the line out")
    steps = [r for r in records if "samples" in r]
    if not steps:
        raise InputError(f"{log}: no steps yet; come back later")
    return steps, [r for r in records if "val_loss" in r]

def by_timestep(steps):
    """-> for each sample in these records its name, its loss and the tenth of (0, 1) that its timestep is in; of each
    tenth the mean loss and the number of samples."""
    names, s, losses = [np.array([x for r in steps for x in r[key]]) for key in ("samples", "timesteps", "losses")]
    tenths = np.minimum(s * 10, 9).astype(int)
    counts = np.bincount(tenths, minlength=10)
    return names, losses, tenths, np.bincount(tenths, losses, 10) / np.maximum(counts, 1), counts

def find_hardest(steps):
    """-> [(name, ratio, times seen)] of all samples, the hardest first: its losses in the second half of the run, each
    divided by the mean at that timestep."""
    names, losses, tenths, means, counts = by_timestep(steps[len(steps) // 2:])
    ratios = {}
    for name, loss, tenth in zip(names, losses, tenths):
        if counts[tenth] >= 5: # fewer are nothing to compare with
            ratios.setdefault(str(name), []).append(loss / max(means[tenth], 1e-12))
    found = [(name, float(np.mean(r)), len(r)) for name, r in ratios.items()]
    return sorted(found, key=lambda row: -row[1])

def draw_curves(steps, validations):
    """-> a PNG's bytes."""
    from matplotlib.figure import Figure
    figure, n = Figure((12, 4), layout="constrained"), max(1, len(steps) // 20)
    left, right = figure.subplots(1, 2)
    x, y = [[r[key] for r in steps] for key in ("step", "loss")]
    left.plot(x, y, color="lightgray", label="training")
    left.plot(x[n - 1:], np.convolve(y, np.ones(n) / n, "valid"), label=f"mean of {n}")
    if validations:
        left.plot([r["step"] for r in validations], [r["val_loss"] for r in validations], "o-", label="validation")
    left.set(xlabel="step", ylabel="loss")
    left.legend()
    right.bar(np.arange(10) / 10, by_timestep(steps[-100:])[3], 0.09, align="edge")
    right.set(xlabel="timestep (1: noise)", ylabel="loss, last 100 steps")
    figure.savefig(png := io.BytesIO())
    return png.getvalue()

def main():
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, help="run folder of train.py, or its copy")
    parser.add_argument("--hardest", type=int, default=5, metavar="N", help="how many samples to name")
    args = parser.parse_args()
    steps, validations = read_log(args.run)
    hardest = find_hardest(steps)[:args.hardest]
    print(f"hardest samples of {args.run}, by their loss over the mean at the same timesteps:"
          + " none, the run is too short to tell" * (not hardest))
    for name, ratio, times in hardest:
        print(f"{ratio:6.2f}  {name}  (seen {times} times)")
    if not find_spec("matplotlib"):
        return print("loss.png: not drawn; pip install matplotlib")
    write_file(args.run / "loss.png", draw_curves(steps, validations))
    print(f"{args.run / 'loss.png'}: the losses, and the last 100 steps' by timestep")

if __name__ == "__main__":
    main()
