"""
How near are drawn pictures to a dataset's targets? Compares what predict.py --jobs DATASET has drawn with the targets,
and prints a line for each folder of the dataset, means over its pictures. What --seed has drawn several times is
averaged; what --scales has drawn gets a line for each scale:

    input, drawn, VAE    PSNR to the target in dB: of the first control, of the picture, of what the VAE makes of the
                         target, which is the best that any LoRA can reach
    kept                 PSNR of the picture where nothing should change: there target and control differ by at most 8
                         levels of 255
    inside, outside      PSNR of the picture in the tokens that are edited, and in the others: by the dataset's mask,
                         else by that of --mask auto; empty where it has none, as nothing differs or nearly all
    shift, zoom, colour  what the edit did there and should not: a motion in pixels, a change of size in percent, a cast
                         in levels; medians. They are against the target as the VAE draws it, whose soft edges would
                         pass for a zoom of half a percent

$ python predict.py --lora out/RUN --jobs tiny/val --out_dir out/predict
$ python tools/measure.py out/predict tiny/val
$ python tools/measure.py out/predict photos --model Qwen/Qwen-Image-Edit-2509 --json measured.json
$ python tools/measure.py out/predict photos --model none   # without a model: against the targets themselves
$ python predict.py --lora out/RUN --jobs photos --scales 0 0.5 1 --seed 0 1 --out_dir out/scales; \
  python tools/measure.py out/scales photos                 # which scale is best? 0 is the base
"""
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
from PIL import Image, ImageFilter
from tqdm import tqdm

import cache
import common
from common import InputError
from extras.mask import auto_mask
from predict import decode, picture_stem, psnr

def drift(image, reference, keep):
    """What an edit did where nothing should change -> dict of colour (levels of 255) and, where there is anything to
    see, shift (pixels) and zoom (%). keep: bool (H, W). Least squares of image - reference on the reference's gradients
    (Lucas and Kanade 1981): unlike phase correlation it can leave pixels out, and it leaves out 4 more around the edit,
    whose soft edge would pass for a zoom. Motions of over a pixel are underestimated."""
    a, b = np.asarray(image, float), np.asarray(reference, float)
    h, w = keep.shape
    inner = np.asarray(Image.fromarray(keep).convert("L").filter(ImageFilter.MinFilter(9))) > 0
    dy, dx = np.gradient(b.mean(-1))
    y, x = np.mgrid[:h, :w] - np.array([(h - 1) / 2, (w - 1) / 2])[:, None, None]
    found = dict(colour=float(np.abs((a - b)[keep].mean(0)).max()))
    if np.hypot(dx, dy)[inner].sum() > 1000: # else nothing is left whose motion could be seen
        # a(x) = b(x - shift - zoom * x) + colour
        shift, zoom = np.stack([-dx, -dy, np.ones((h, w))], -1)[inner], -(dx * x + dy * y)[inner]
        own = zoom - shift @ np.linalg.lstsq(shift, zoom, rcond=None)[0] # what no shift explains
        both = own @ own > 0.25 * zoom @ zoom # one shape far from the middle: its zoom would look like a shift
        columns = np.column_stack([shift, zoom]) if both else shift
        moved = np.linalg.lstsq(columns, (a - b).mean(-1)[inner], rcond=None)[0]
        found.update(shift=float(np.hypot(*moved[:2])), **(dict(zoom=float(100 * abs(moved[3]))) if both else {}))
    return found

def prepare(sample, size, pipe):
    """What a sample's pictures of this size are compared with -> SimpleNamespace(target, reference: the target as the
    VAE draws it (without a pipe the target itself), given: the first control or None, edited and keep: bool (H, W))."""
    whole = common.read_image(sample.target)
    target = reference = whole.resize(size, Image.Resampling.LANCZOS)
    if pipe:
        latents = cache.encode_image(pipe, target)
        reference = decode(pipe.vae, latents, [(1, target.height // 16, target.width // 16)])
    given, edited, keep = None, np.zeros(target.size[::-1], bool), None
    if sample.controls:
        control = common.read_image(sample.controls[0])
        given = control.resize(size, Image.Resampling.LANCZOS)
        mask = common.read_image(sample.mask).convert("L") if sample.mask else auto_mask(whole, control, size)
        if mask:
            edited = np.asarray(mask.resize(size, Image.Resampling.NEAREST)) >= 128
        keep = np.abs(np.asarray(given, int) - np.asarray(target, int)).max(-1) <= 8
    return SimpleNamespace(target=target, reference=reference, given=given, edited=edited, keep=keep)

def measure(picture, wanted, pipe):
    """-> {measure: value} of this picture. wanted: of prepare."""
    found = dict(drawn=psnr(picture, wanted.target))
    if pipe:
        found["vae"] = psnr(wanted.reference, wanted.target)
    if wanted.given:
        found["input"] = psnr(wanted.given, wanted.target)
        for name, part in (("inside", wanted.edited), ("outside", ~wanted.edited)):
            if wanted.edited.any() and part.any():
                found[name] = psnr(np.asarray(picture)[part], np.asarray(wanted.target)[part])
        if wanted.keep.mean() > 0.1:
            found["kept"] = psnr(np.asarray(picture)[wanted.keep], np.asarray(wanted.target)[wanted.keep])
            found |= drift(picture, wanted.reference, wanted.keep)
    return found

def read_drawn(path, by_vae):
    """-> the picture. InputError for a size that predict.py does not draw; only the VAE minds sides that 16 does not
    divide."""
    picture = common.read_image(path)
    rest = [side % 16 for side in picture.size if by_vae]
    if min(picture.size) < 32 or any(rest):
        raise InputError(f"{path}: {picture.width}x{picture.height}; want sides of at least 32 that 16 divides: draw "
                         "it again with predict.py, or give --model none for other sides")
    return picture

def ends_of(folder, stems):
    """-> {end of a name: scale in words} of the pictures of these names, by scale: several --seed and --scales of
    predict.py add -s1 and -x0.5. If there are no pictures, the one end is empty."""
    scale, readings = r"-x(-?\d+(?:\.\d+)?(?:e[-+]\d+)?)", []
    for file in sorted(folder.glob("*.png")):
        matches = [re.fullmatch(f"(?s)(.+)({end})", file.stem) for end in ("()", r"-s\d+()", scale, r"-s\d+" + scale)]
        readings.append([(m[2], m[3]) for m in matches if m and m[1] in stems])
    times = Counter(end for of_file in readings for end in of_file)
    ends = dict(max(of_file, key=times.get) for of_file in readings if of_file) # as a name may itself end in -s1
    return dict(sorted(ends.items(), key=lambda item: float(item[1] or "-inf"))) or {"": ""}

COLUMNS = dict(input="7.1f", drawn="7.1f", vae="7.1f", kept="9.1f", inside="7.1f",
               outside="7.1f", shift="9.2f", zoom="7.2f", colour="7.1f")

def average(records):
    """[{measure: value}] -> the means; medians of what has outliers."""
    values = {key: [r[key] for r in records if key in r] for key in COLUMNS}
    kind = lambda key: np.median if key in ("shift", "zoom", "colour") else np.mean
    return dict(pictures=len(records)) | {key: float(kind(key)(v)) for key, v in values.items() if v}

def main():
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    parser = common.Parser(__doc__)
    parser.add_argument("pictures", type=Path, help="folder of PNGs: predict.py's --out_dir")
    parser.add_argument("dataset", type=Path, help="folder or metadata.jsonl with the targets: predict.py's --jobs")
    parser.add_argument("--model", default="tiny", help="hub id or folder of the model whose VAE counts; none: no VAE")
    parser.add_argument("--device", choices=devices, default=devices[-1], help="of the VAE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too (default: nowhere)")
    args = parser.parse_args()
    (samples, problems), pipe = common.read_dataset(args.dataset), None
    if args.model != "none":
        pipe = cache.load_pipeline(cache.find_model(args.model, ["vae", "tokenizer", "processor", "scheduler"]))
        cache.load_encoder(pipe, "vae", SimpleNamespace(dtype="float32", vae_device=args.device))
        pipe.vae.to(args.device)

    groups, stems = {}, {picture_stem(sample): sample for sample in samples}
    ends = ends_of(args.pictures, stems)
    for stem, sample in tqdm(stems.items(), desc="measuring", unit=" samples", disable=None, leave=False):
        wanted = {} # by size: the scales and seeds of a sample share it
        for end, scale in ends.items():
            try:
                picture = read_drawn(args.pictures / f"{stem}{end}.png", by_vae=pipe is not None)
                if picture.size not in wanted:
                    wanted[picture.size] = prepare(sample, picture.size, pipe)
            except InputError as e:
                problems.append(str(e))
                continue
            name = "/".join([sample.root, *Path(sample.name).parent.parts]) + (f" x{scale}" if scale else "")
            groups.setdefault(name, []).append(measure(picture, wanted[picture.size], pipe))
    for problem in problems:
        print(problem, file=sys.stderr)
    if not groups:
        raise InputError(f"{args.pictures}: none of the pictures of {args.dataset}; draw them with predict.py --jobs")

    print(f"{'':20} pictures   input   drawn     VAE |    kept  inside outside  shift px  zoom %  colour")
    groups = {name: average(records) for name, records in groups.items()}
    for name, m in groups.items():
        cells = [f"{m[key]:{form}}" if key in m else " " * int(form[0]) for key, form in COLUMNS.items()]
        print(f"{name:20} {m['pictures']:8}", *cells[:3], "|" + cells[3], *cells[4:])
    if args.json:
        common.write_file(args.json, json.dumps(groups, indent=1).encode())
    sys.exit(1 if problems else 0)

if __name__ == "__main__":
    main()
