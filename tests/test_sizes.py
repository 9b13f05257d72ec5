"""
Do sizes matter? The demo's edit, trained on the same pairs at their own sizes, and as trainers with buckets do it:
resized to the nearest of three buckets, 96x96, 128x64 and 64x128, and cropped in the middle. Both then edit pictures of
twelve aspects from 1:3 to 3:1, of which none was trained on.

$ python -m pytest -q tests/test_sizes.py --full -s    # six trainings, a quarter of an hour; draws sizes.png
"""
import math
import shutil

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.harness import FULL, TINY, toy_functions, train_and_measure

WIDE = [(192, 160), (128, 96), (224, 160), (224, 128), (224, 96), (192, 64)]
ASPECTS = [(h, w) for w, h in reversed(WIDE)] + WIDE
BUCKETS = [(96, 96), (128, 64), (64, 128)]

def draw_aspects(folder):
    """Six border pairs of each aspect, drawn as tiny/toys/val is."""
    names = toy_functions()
    rng, colours, pairs = np.random.default_rng(77), list(names["COLORS"]), {}
    for k, size in enumerate(ASPECTS):
        for i in range(6): # a third takes its colour from a second picture
            colour = colours[(6 * k + i) % 10] if i % 3 < 2 else None
            pairs["{}x{}/{}".format(*size, i)] = names["border_pair"](rng, size, colour)
    names["write_dataset"](str(folder), pairs)

def crop_to_buckets(folder):
    """A copy of tiny/toys/data; second pictures, which show a colour, stay as they are."""
    shutil.copytree(TINY / "toys/data", folder)
    for target in folder.glob("target/*.png"):
        w, h = Image.open(target).size
        bucket = min(BUCKETS, key=lambda b: abs(math.log(b[0] / b[1] * h / w)))
        for path in [folder / role / target.name for role in ("target", "control", "mask")]:
            if path.exists():
                ImageOps.fit(Image.open(path), bucket, Image.Resampling.LANCZOS).save(path)

def plot(path, table):
    """PSNR over the aspects, a line for each training of each way."""
    figure = pytest.importorskip("matplotlib.figure").Figure((7, 2.6), layout="constrained")
    axes = figure.subplots()
    for (way, seed), by_aspect in table.items():
        axes.plot([w / h for w, h in ASPECTS], by_aspect, "o-", color=dict(native="C0", buckets="C1")[way],
                  label={"native": "own sizes", "buckets": "three buckets, centre crop"}[way] if seed == 0 else None)
    axes.set(xscale="log", xlabel="aspect, width / height", ylabel="PSNR to the target, dB")
    axes.set_xticks([1 / 3, 0.5, 0.75, 4 / 3, 2, 3], ["1:3", "1:2", "3:4", "4:3", "2:1", "3:1"], minor=False)
    axes.minorticks_off()
    figure.legend(loc="outside upper center", ncols=2, frameon=False) # above, where it hides no point
    figure.savefig(path, dpi=100)

@pytest.mark.skipif(not FULL, reason="six trainings of a minute and more each: --full -s")
def test_own_sizes_are_better_at_every_aspect(tmp_path):
    draw_aspects(tmp_path / "aspects")
    crop_to_buckets(tmp_path / "buckets")
    table = {}
    for seed in range(3):
        for way, data in (("native", TINY / "toys/data"), ("buckets", tmp_path / "buckets")):
            found = train_and_measure(tmp_path / f"{way}-{seed}", tmp_path / "aspects", "--data", data, "--val_data",
                                      "--seed", seed)
            rows = [found["aspects/{}x{}".format(*size)] for size in ASPECTS]
            table[way, seed] = [row["result"] for row in rows]
            means = {key: np.mean([row[key] for row in rows])
                     for key in ("result", "VAE", "shift", "zoom", "colour")}
            print(f"\n{way}, seed {seed}: PSNR " + " ".join(f"{x:.1f}" for x in table[way, seed])
                  + "; means: " + ", ".join(f"{key} {x:.2f}" for key, x in means.items()))
    for seed in range(3):
        assert all(np.array(table["native", seed]) > np.array(table["buckets", seed]) + 3)
    plot(tmp_path / "sizes.png", table)
    print(f"{tmp_path / 'sizes.png'}")
