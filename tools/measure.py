"""
How near are generated pictures to a dataset's targets? Compares the results of predict.py --jobs DATASET with the
targets, and prints a line for each folder of the dataset, with means over its pictures. Several seeds (--seed) are
averaged; several LoRA scales (--scales) get a line each:

    input, result, VAE   PSNR to the target in dB: of the first control; of the generated picture; of the target after
                         the VAE alone, which is the best that any LoRA can reach
    kept                 PSNR of the result where nothing should change, i.e. where target and control differ by at most
                         8 levels of 255
    inside, outside      PSNR of the result inside and outside of the mask: the dataset's, or else (also if that selects
                         nothing or everything) the one that --mask auto makes; empty if there is no mask, because
                         nothing differs or nearly everything
    shift, zoom, colour  how the edit disturbed the part that should not change: a motion in pixels, a change of size in
                         percent, a colour cast in levels; medians. The reference is the target after the VAE

A PSNR ends at 99 dB, which equal pictures have. Shift and zoom are right up to a tenth of the picture's longer side and
10 %, and say nothing beyond. The table repeats this.

$ python predict.py --lora out/RUN --jobs tiny/val --out_dir out/predict
$ python tools/measure.py out/predict tiny/val
$ python tools/measure.py out/predict photos --model Qwen/Qwen-Image-Edit-2509 --json measured.json
$ python tools/measure.py out/predict photos --model none   # without a VAE: shift, zoom, colour against the target
$ python predict.py --lora out/RUN --jobs photos --scales 0 0.5 1 --seed 0 1 --out_dir out/scales
$ python tools/measure.py out/scales photos                 # which scale is best? 0 is the base
"""
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import library # first, so that no other folder is taken for one of our modules
import common
from common import InputError, tell
from library.cli import command_line
from library.data import dataset, picture_files
from library.data.automatic_mask import auto_mask, copy_size, find_motion, fit_motion, high_pass, inverse, STRUCTURE
from library.files import stray_files
from library.results.result_files import picture_stem

OURS = rb'\A\{\n "[^"]*": \{\n  "pictures": \d+' # how the file of --json begins

def read_flags():
    """-> args. A slip ends the script here."""
    parser = command_line.Parser(__doc__)
    parser.add_argument("results", type=Path, help="folder of the generated PNGs: predict.py's --out_dir")
    parser.add_argument("dataset", type=Path, help="folder or metadata.jsonl with the targets: predict.py's --jobs")
    flag = parser.group("flags")
    flag("--model", "tiny", "hub id or folder of the model that generated them, for its VAE; none: use no VAE")
    flag("--device", None, "where the VAE runs (default: cuda if there is one)", choices=["cpu", "cuda"])
    flag("--json", None, "also write the numbers to this file (default: none)", type=Path, metavar="FILE")
    args = parser.parse_args()
    if (args.results / "log.jsonl").exists():
        words = ["--lora", args.results, "--jobs", args.dataset, "--out_dir", "edited"]
        draw = common.shell_command(["python", "predict.py", *words])
        raise InputError(f"{args.results}: is a run; first {draw}, then measure edited")
    if not args.results.is_dir():
        raise InputError(f"{args.results}: no folder of results; {stray_files.near_path(args.results)}")
    if not args.dataset.exists():
        raise InputError(dataset.no_dataset(args.dataset))
    if args.json:
        common.refuse_to_replace(args.json, OURS)
    return args

if __name__ == "__main__": # before the imports below: a slip is answered in a second, and they take ten
    args = read_flags()

import diffusers
import numpy as np
import torch
from PIL import Image

import cache
from library.models import devices
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
        found = find_motion(image, reference, size)
        motion = inverse(fit_motion(image, reference, np.zeros(4) if found is None else found))
        drifts["shift"] = float(np.hypot(*motion[:2]))
        drifts["zoom"] = float(100 * abs(np.hypot(1 + motion[2], motion[3]) - 1))
    return drifts

def prepare(sample, size, pipe):
    """-> what to compare a sample's results of this size with: SimpleNamespace(target, reference: the target after the
    VAE (without a pipe the target itself), control: the first one or None, edited and keep: bool (H, W))."""
    whole = picture_files.read_image(sample.target)
    target = reference = whole.resize(size, Image.Resampling.LANCZOS)
    if pipe:
        latents = cache.encode_image(pipe, cache.to_pixels(pipe, target))
        reference, broken = decode(pipe.vae, latents, [(1, target.height // 16, target.width // 16)])
        if broken:
            raise InputError(f"{sample.target}: the {broken} computes NaN or Inf of it; take another copy of --model")
    control = keep = None
    edited = np.zeros(target.size[::-1], bool)
    if sample.controls:
        original = picture_files.read_image(sample.controls[0])
        control = original.resize(size, Image.Resampling.LANCZOS)
        mask = picture_files.read_mask(sample.mask) if sample.mask else None
        if mask is None or picture_files.mask_is_empty(mask): # then it is trained without, too
            mask = auto_mask(whole, original, size)
        if mask:
            edited = np.asarray(mask.resize(size, Image.Resampling.NEAREST)) >= 128
        keep = np.abs(np.asarray(control, int) - np.asarray(target, int)).max(-1) <= 8
    return SimpleNamespace(target=target, reference=reference, control=control, edited=edited, keep=keep)

def measure(result, against, pipe):
    """-> {measure: value} of a generated picture. against: what `prepare` returned for it."""
    values = dict(result=psnr(result, against.target))
    if pipe:
        values["vae"] = psnr(against.reference, against.target)
    if against.control:
        values["input"] = psnr(against.control, against.target)
        parts = dict(inside=against.edited, outside=~against.edited) if against.edited.any() else {}
        if against.keep.mean() > 0.1:
            parts["kept"] = against.keep
            values |= drift(result, against.reference, against.keep)
        for name, part in parts.items():
            if part.any():
                values[name] = psnr(np.asarray(result)[part], np.asarray(against.target)[part])
    return values

def read_result(path, by_vae):
    """-> a generated picture. InputError if predict.py cannot have generated its size; without a VAE sides need not be
    multiples of 16."""
    result = picture_files.read_image(path)
    rest = [side % 16 for side in result.size if by_vae]
    if min(result.size) < 32 or any(rest):
        raise InputError(f"{path}: {result.width}x{result.height}, but sides must be 32 or more and multiples of 16; "
                         "generate it again with predict.py, or give --model none, which needs no multiples")
    return result

def results_in(folder):
    """-> ({name of a result without its key: path}, paths of results with the same name, of other settings). Of several
    the newest counts."""
    newest, older = {}, []
    for file in sorted(folder.glob("*.png"), key=lambda path: path.stat().st_mtime):
        name = re.sub(r"-[0-9a-f]{8}\Z", "", file.stem)
        if name in newest:
            older.append(newest[name])
        newest[name] = file
    return newest, older

def ends_of(names, stems):
    """Finds out with which --seed and --scales predict.py has generated the results of these names: several seeds add
    endings such as -s1, several scales -x0.5. stems: the names without an ending -> {ending: its scale, as a text},
    sorted by scale."""
    scale, readings = r"-x(-?\d+(?:\.\d+)?(?:e[-+]\d+)?)", []
    for name in sorted(names):
        matches = [re.fullmatch(f"(?s)(.+)({end})", name) for end in ("()", r"-s\d+()", scale, r"-s\d+" + scale)]
        readings.append([(m[2], m[3]) for m in matches if m and m[1] in stems])
    # a name may itself end in -s1, and then has two readings: the ending that more files have is the right one
    times = Counter(end for of_file in readings for end in of_file)
    ends = dict(max(of_file, key=times.get) for of_file in readings if of_file)
    return dict(sorted(ends.items(), key=lambda item: float(item[1] or "-inf")))

COLUMNS = dict(input="7.1f", result="7.1f", vae="7.1f", kept="9.1f", inside="7.1f",
               outside="7.1f", shift="9.2f", zoom="7.2f", colour="7.1f")

def average(records):
    """[{measure: value}] -> the number of pictures, and the mean of each measure; medians where there are outliers."""
    means = dict(pictures=len(records))
    for key in COLUMNS:
        mean = np.median if key in ("shift", "zoom", "colour") else np.mean
        if values := [r[key] for r in records if key in r]:
            means[key] = float(mean(values))
    return means

def main(args):
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    devices.check_device("device", args.device)
    samples, problems = dataset.read_dataset(args.dataset)
    diffusers.utils.logging.disable_progress_bar()
    stems = {picture_stem(sample): sample for sample in samples}
    results, older = results_in(args.results)
    ends = ends_of(results, stems)
    if stems and not ends:
        raise InputError(f"{args.results}: none of the pictures of {args.dataset}; generate them: predict.py --jobs")
    if older:
        tell(f"warning: {args.results}: {len(older)} results of other calls, such as {older[0].name}, are not "
             "measured, as newer ones have their names; give each call of predict.py an --out_dir of its own",
             file=sys.stderr)
    pipe = None
    if args.model != "none":
        pipe = cache.load_pipeline(cache.find_model(args.model, ["vae", "tokenizer", "processor", "scheduler"]))
        cache.load_encoder(pipe, "vae", SimpleNamespace(dtype="float32", vae_device=args.device))
        pipe.vae.to(args.device)

    groups = {}
    for stem, sample in common.progress("measuring", stems.items(), unit=" samples"):
        by_size = {} # what `prepare` returned: the scales and seeds of a sample share it
        for end, scale in ends.items():
            with common.collect_errors(problems):
                path = results.get(stem + end, args.results / f"{stem}{end}.png")
                result = read_result(path, by_vae=pipe is not None)
                if result.size not in by_size:
                    by_size[result.size] = prepare(sample, result.size, pipe)
                name = "/".join([sample.root, *Path(sample.name).parent.parts]) + (f" x{scale}" if scale else "")
                groups.setdefault(name, []).append(measure(result, by_size[result.size], pipe))
    tell(*problems, file=sys.stderr)
    if not groups:
        sys.exit(1)

    tell(f"{'':20} pictures   input  result     VAE |    kept  inside outside  shift px  zoom %  colour")
    groups = {name: average(records) for name, records in groups.items()}
    for name, m in groups.items():
        cells = [f"{m[key]:{form}}" if key in m else " " * int(form[0]) for key, form in COLUMNS.items()]
        tell(" ".join([f"{common.printable(name):20} {m['pictures']:8}", *cells[:3], "|" + cells[3], *cells[4:]]))
    tell("Ranges: PSNR up to 99 dB; shift up to a tenth of the longer side; zoom up to 10 %.")
    if args.json:
        common.write_file(args.json, json.dumps(groups, indent=1).encode(), OURS)
    sys.exit(1 if problems else 0)

if __name__ == "__main__":
    main(args)
