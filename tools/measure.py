"""
How near are generated pictures to a dataset's targets? Compares the results of predict.py --jobs DATASET with the
targets, and prints a line for each folder of the dataset, with means over its pictures. Several LoRA scales (--scales)
get a line each; several seeds need a folder of results each:

    input, result, VAE   PSNR to the target in dB: of the first control; of the generated picture; of the target after
                         the VAE alone, which is the best that any LoRA can reach
    shift, zoom, colour  how the edit disturbed what it should keep: a motion in pixels, a change of size in percent, a
                         colour cast in levels, where target and control differ by at most 8 levels of 255 (over a tenth
                         of the picture); medians. The reference is the target after the VAE

A PSNR ends at 99 dB, which equal pictures have. Shift and zoom are right up to a tenth of the picture's longer side and
10 %, and say nothing beyond. The table repeats this.

$ python predict.py --lora out/RUN --jobs tiny/val --out_dir out/predict
$ python tools/measure.py out/predict tiny/val
$ python tools/measure.py out/predict photos --model Qwen/Qwen-Image-Edit-2509
$ python tools/measure.py out/predict photos --model none   # without a VAE: shift, zoom, colour against the target
$ python predict.py --lora out/RUN --jobs photos --scales 0 0.5 1 --out_dir out/scales
$ python tools/measure.py out/scales photos                 # which scale is best? 0 is the base
"""
import functools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import library # first, so that no other folder is taken for one of our modules
import common
from common import InputError, tell
from library.cli import command_line
from library.data import dataset
from library.data.automatic_mask import copy_size, find_motion, fit_motion, high_pass, STRUCTURE
from library.data.picture_files import read_image
from library.results.result_files import picture_stem

def read_flags():
    parser = command_line.Parser(__doc__)
    parser.add_argument("results", type=Path, help="folder of generated PNGs: predict.py's --out_dir")
    parser.add_argument("dataset", type=Path, help="folder or metadata.jsonl with the targets: predict.py's --jobs")
    flag = parser.group("flags")
    flag("--model", "tiny", "hub id or folder of the model that generated them, for its VAE; none: use no VAE")
    args = parser.parse_args()
    if not args.dataset.exists():
        raise InputError(dataset.no_dataset(args.dataset))
    return args

if __name__ == "__main__": # before the imports below: a slip is answered in a second, and they take ten
    args = read_flags()

import diffusers
import numpy as np
import torch
from PIL import Image

import cache
from training.validation import psnr
from predict import decode

def drift(image, reference, keep):
    """How did an edit disturb what it should keep? -> dict of colour (levels of 255) and, if there are edges to measure
    them by, shift (pixels) and zoom (%) of two PIL images: the fit gives little weight to what differs. keep: bool
    (H, W), the pixels whose colour should not change."""
    difference = np.subtract(image, reference, dtype=float)
    drifts = dict(colour=float(abs(difference[keep].mean(0)).max()))
    size = copy_size(image.size)
    if np.mean(abs(high_pass(reference, size)[1]) > STRUCTURE) > 0.01: # with fewer edges no motion could be seen
        found = find_motion(reference, image, size)
        motion = fit_motion(reference, image, np.zeros(4) if found is None else found)
        drifts["shift"] = float(np.hypot(*motion[:2]))
        drifts["zoom"] = float(100 * abs(np.hypot(1 + motion[2], motion[3]) - 1))
    return drifts

@functools.lru_cache(1) # a sample's results at several scales follow each other
def read_target(path, size, pipe):
    """-> a target at this size (width, height), and after the VAE (without a pipe as it is): PIL images."""
    target = read_image(path).resize(size, Image.Resampling.LANCZOS)
    if not pipe:
        return target, target
    latents = cache.encode_image(pipe, cache.to_pixels(pipe, target))
    after_vae, broken = decode(pipe.vae, latents, [(1, target.height // 16, target.width // 16)])
    if broken:
        raise InputError(f"{path}: the {broken} computes NaN or Inf of it; take another copy of --model")
    return target, after_vae

def measure(path, sample, pipe):
    """-> {measure: value} of a sample's result, in the file `path`. InputError if predict.py cannot have generated its
    size; without a VAE sides need not be multiples of 16."""
    result = read_image(path)
    rest = [side % 16 for side in result.size if pipe]
    if min(result.size) < 32 or any(rest):
        raise InputError(f"{path}: {result.width}x{result.height}, but sides must be 32 or more and multiples of 16; "
                         "generate it again with predict.py, or give --model none, which needs no multiples")
    target, after_vae = read_target(sample.target, result.size, pipe)
    values = dict(result=psnr(result, target))
    if pipe:
        values["VAE"] = psnr(after_vae, target)
    if sample.controls:
        control = read_image(sample.controls[0]).resize(result.size, Image.Resampling.LANCZOS)
        values["input"] = psnr(control, target)
        keep = abs(np.subtract(control, target, dtype=float)).max(-1) <= 8
        if keep.mean() > 0.1:
            values |= drift(result, after_vae, keep)
    return values

def results_in(folder, stems):
    """Finds the results of these samples by predict.py's names: a stem, -x0.5 if there are several scales, and a key ->
    {"-x0.5", or "": {stem: path}}, sorted by scale. InputError if a sample has two of a scale."""
    found = {}
    for file in sorted(folder.glob("*.png")):
        name = re.sub(r"-[0-9a-f]{8}\Z", "", file.stem)
        stem, scale = re.fullmatch(r"(?s)(.+?)(-x-?\d+(?:\.\d+)?(?:e[-+]\d+)?)?", name).groups("")
        for stem, scale in ((name, ""), (stem, scale)): # a sample's name may itself end in -x2
            if stem in stems:
                if stem in found.setdefault(scale, {}):
                    raise InputError(f"{file}: {found[scale][stem].name} is of the same sample; delete one, or give "
                                     "each call of predict.py an --out_dir of its own")
                found[scale][stem] = file
                break
    return dict(sorted(found.items(), key=lambda item: float(item[0][2:] or "-inf")))

MEDIANS = ["shift", "zoom", "colour"] # of what has outliers
COLUMNS = ["input", "result", "VAE", *MEDIANS]

def main(args):
    samples, problems = dataset.read_dataset(args.dataset)
    diffusers.utils.logging.disable_progress_bar()
    stems = {picture_stem(sample): sample for sample in samples}
    scales = results_in(args.results, stems)
    if stems and not scales:
        raise InputError(f"{args.results}: no results of {args.dataset}; draw them with one --seed: python predict.py "
                         f"--lora RUN --jobs {args.dataset} --out_dir edited")
    pipe = None
    if args.model != "none":
        pipe = cache.load_pipeline(cache.find_model(args.model, ["vae", "tokenizer", "processor", "scheduler"]))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        cache.load_encoder(pipe, "vae", SimpleNamespace(dtype="float32", vae_device=device))
        pipe.vae.to(device) # its decoder, too

    groups = {}
    for stem, sample in common.progress("measuring", stems.items(), unit=" samples"):
        folder = "/".join([sample.root, *Path(sample.name).parent.parts])
        for scale, results in scales.items():
            with common.collect_errors(problems):
                values = measure(results.get(stem, args.results / f"{stem}{scale}.png"), sample, pipe)
                groups.setdefault(folder + scale.replace("-x", " x"), []).append(values)
    tell(*problems, file=sys.stderr)
    if not groups:
        sys.exit(1)

    tell(f"{'':20} pictures" + "".join(f"{name:>8}" for name in COLUMNS))
    for folder, records in groups.items():
        line = f"{common.printable(folder):20} {len(records):8}"
        for name in COLUMNS:
            values = [record[name] for record in records if name in record]
            average = np.median if name in MEDIANS else np.mean
            line += f"{average(values):8.2f}" if values else f"{'-':>8}"
        tell(line)
    tell("Ranges: PSNR up to 99 dB; shift up to a tenth of the longer side; zoom up to 10 %.")
    sys.exit(1 if problems else 0)

if __name__ == "__main__":
    main(args)
