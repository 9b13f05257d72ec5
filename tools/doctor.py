"""
What is wrong with a dataset, before a training is spent on it? Reads datasets as cache.py does, lists every error,
prints a table of what they hold, and looks for pairs that teach the wrong thing:

    identical       target and control are the same picture; good as examples of "keep the image", else a mistake
    moved           the target shows the scene shifted or zoomed, so that the LoRA will learn to move pictures
    recoloured      all its colours have changed, also where nothing was edited
    other shape     target and control differ in aspect, or by twice the side
    duplicate       the same pair and instruction twice
    other caption   the same pair with another instruction
    other target    the same control and instruction with another target

The edit itself raises no alarm. Errors make the exit status 1; findings do not, they are a reason to look. Writes
report.json (a line for each sample) and sheet_*.png (each finding's pictures) to OUT. No model is needed.

--mask auto draws the masks that train.py would make with it. --align DIR writes the dataset again, to a new folder in
which what has moved is repaired: the target is warped onto its control, and both (and the mask) are cropped to what
they share. All other pictures are copied byte for byte, also those of another shape. A pair that still moves after that
is listed and left out, and so is a sample with an error.

$ python tools/doctor.py photos                          # -> out/doctor-photos
$ python tools/doctor.py photos drawings --out report
$ python tools/doctor.py photos --mask auto --align photos_aligned
$ python tools/doctor.py photos --target_pixels 512x512 --model Qwen/Qwen-Image-Edit-2509
"""
import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent)) # where the core scripts are
import cache
import common
from cache import CONDITION_IMAGE_SIZE, is_plus
from common import InputError, fit_size, pixels, read_image
from extras.motion import ASPECT, auto_mask, copy_size, find_cast, find_motion, fit_motion
from extras.sheet import contact_sheet, shown_prompt
from predict import save_png
from tools.import_data import picture_suffix, places_of, write_caption

# identical, in levels of 0 to 255; JPEG of quality 70 makes up to 4.5 and 8
SAME_RMS = 5.0 # root mean square of the difference
SAME_BLOCK = 9.0 # largest mean difference of 8x8 pixels, so that a small edit counts
SCALE = 2.0 # other shape: quotient of the two sides (and ASPECT)
# twins, on copies of 16x16 pixels
TWIN = 4.0 # RMS in levels: re-encoded copies stay below 3
OTHER = 16.0 # RMS in levels of targets that are clearly different
KINDS = ["identical", "moved", "recoloured", "other shape", "duplicate", "other caption", "other target"]

# ---- a pair; pairs of pairs ------------------------------------------------------------------------------------------

def examine_pair(target, control):
    """-> {kind of finding: in words} of two PIL images."""
    found, (w, h), (cw, ch) = {}, target.size, control.size
    aspect, scale = abs(math.log(w / h / (cw / ch))), abs(math.log(w * h / (cw * ch))) / 2
    if aspect > math.log(ASPECT) or scale > math.log(SCALE):
        found["other shape"] = f"target {w}x{h}, control {cw}x{ch}"
    size = copy_size((w, h))

    def shrunk(factor):
        to = [max(1, round(n / factor)) for n in size]
        return [np.asarray(image.resize(to, Image.BOX)) for image in (target, control)]
    whole, blocks = [np.subtract(*shrunk(factor), dtype=float) for factor in (1, 8)]
    if np.sqrt((whole.mean(-1) ** 2).mean()) < SAME_RMS and abs(blocks).max() < SAME_BLOCK:
        return found | {"identical": f"differ by {abs(whole).mean():.1f} levels"}
    if aspect < math.log(ASPECT) and (motion := find_motion(target, control, size)) is not None:
        dx, dy = motion[:2] * max(w, h) / max(size)
        found["moved"] = f"{dx:+.1f} px right, {dy:+.1f} px down, zoom {100 * motion[2]:+.1f} %"
    if (cast := find_cast(*shrunk(max(1, max(size) / 64)))) is not None:
        found["recoloured"] = "by {:+.0f} red, {:+.0f} green, {:+.0f} blue".format(*cast[0])
    return found

def find_twins(samples, thumbnails):
    """-> [(kind, index of a sample, index of its twin)]. thumbnails: 16x16 of targets and of controls, (2, N, 768)."""
    numbered = lambda values: np.unique(values, return_inverse=True)[1]
    asked = numbered([" ".join(s.prompts[0].lower().split()) for s in samples])
    further = numbered([f"{s.controls[1:]} {bool(s.controls)}" for s in samples])
    edits, twins = np.array([bool(s.controls) for s in samples]), []
    x = thumbnails.astype(np.float32) - 128
    square = (x ** 2).sum(-1)
    for i in range(len(samples)): # a row at a time: N x N distances of 20,000 samples would take 3 GB
        target, control = [np.sqrt(abs(sq[i:] + sq[i] - 2 * y[i:] @ y[i]) / 768) for sq, y in zip(square, x)]
        near, same = (control < TWIN) & (further[i:] == further[i]), asked[i:] == asked[i]
        for kind, which in (("duplicate", near & same & (target < TWIN)),
                            ("other caption", near & ~same & (target < TWIN)),
                            ("other target", near & same & edits[i:] & (target > OTHER))):
            twins += [(kind, i, i + j) for j in np.flatnonzero(which).tolist() if j]
    return twins

# ---- a dataset -------------------------------------------------------------------------------------------------------

def read_sample(sample, pipe, args):
    """-> (target, first control or None, row of report.json). Opens every picture. InputError for what is wrong."""
    (w, h), *control_sizes = sizes = [common.image_size(path) for path in [sample.target, *sample.controls]]
    if sample.mask:
        cache.check_mask(sample.mask, (w, h))
    pictures = [read_image(path) for path in [sample.target, *sample.controls, *filter(None, [sample.mask])]]
    controls = [fit_size(size, args.control_pixels) for size in control_sizes]
    targets = [fit_size((w, h), area) for area in args.target_pixels]
    row = dict(name=sample.name, prompts=sample.prompts, sizes=sizes, aspect=w / h, controls=len(sample.controls),
               rounding=abs(targets[0][0] / targets[0][1] / (w / h) - 1),
               image_tokens=[sum(a * b // 256 for a, b in [target, *controls]) for target in targets]) # of 16x16 pixels
    if pipe:
        seen = [fit_size(size, CONDITION_IMAGE_SIZE) for size in control_sizes] if is_plus(pipe) else controls
        row["text_tokens"] = [cache.prompt_length(pipe, prompt, seen) for prompt in sample.prompts]
    return pictures[0], pictures[1] if sample.controls else None, row

def examine(samples, pipe, args):
    """-> (good samples, rows of report.json, {kind: [(words, index of the sample and maybe its twin's)]}, problems)."""
    good, rows, found, thumbnails, problems = [], [], {kind: [] for kind in KINDS}, [], []
    for sample in tqdm(samples, desc="examining pairs", unit=" samples", disable=None, leave=False):
        try:
            target, control, row = read_sample(sample, pipe, args)
        except InputError as e:
            problems.append(str(e))
            continue
        wrong = examine_pair(target, control) if control else {}
        for kind, words in wrong.items():
            found[kind].append((f"{sample.name}: {words}", [len(good)]))
        rows.append(row | dict(findings=[f"{kind}: {words}" for kind, words in wrong.items()]))
        thumbnails.append([np.asarray(im.resize((16, 16), Image.BOX)).flatten() for im in (target, control or target)])
        good.append(sample)
    for kind, i, j in find_twins(good, np.array(thumbnails).swapaxes(0, 1)) if good else []:
        found[kind].append((f"{good[i].name}: and {good[j].name}", [i, j]))
        rows[i]["findings"].append(f"{kind}: and {good[j].name}")
    return good, rows, found, problems

def cells_of(sample):
    """A sample on a sheet: its controls and its target."""
    return [list(map(read_image, sample.controls)), read_image(sample.target)]

def masked_cells(sample, area):
    """... and what of the target --mask auto takes for edited, at the area that is trained; the rest is dark."""
    target = read_image(sample.target)
    target = target.resize(fit_size(target.size, area))
    mask = auto_mask(target, read_image(sample.controls[0]))
    dark = target.point(lambda level: level // 4)
    edit = Image.composite(target, dark, mask.resize(target.size, Image.NEAREST)) if mask else "no mask"
    return [*cells_of(sample), edit]

def difference_cells(sample):
    target = read_image(sample.target)
    return [ImageChops.difference(target, read_image(sample.controls[0]).resize(target.size))]

def write_sheets(folder, kind, entries, samples, cells=cells_of, titles=()):
    """FOLDER/sheet_KIND_PAGE.png with the cells of [(words, indices of samples)], of 24 a page."""
    file = lambda page: f"sheet_{kind.replace(' ', '_')}_{page}.png"
    for old in folder.glob(file("*")):
        old.unlink()
    for page, start in enumerate(range(0, len(entries), 24), 1):
        lines = [[words, *[cell for i in of for cell in cells(samples[i])]]
                 for words, of in entries[start:start + 24]]
        above = ["", *(titles or ["control", "target", "its control", "its target"])][:len(lines[0])]
        save_png(contact_sheet(lines, above), folder / file(page))

def print_table(rows):
    """What the dataset holds, and by how much sides rounded to 32 pixels change a target's aspect."""
    print(f"{len(rows)} samples with {sum(len(row['prompts']) for row in rows)} prompts")
    columns = {"target width": [row["sizes"][0][0] for row in rows], "aspect": [row["aspect"] for row in rows],
               "target height": [row["sizes"][0][1] for row in rows], "controls": [row["controls"] for row in rows],
               "rounding, %": [100 * row["rounding"] for row in rows],
               "image tokens": [n for row in rows for n in row["image_tokens"]],
               "text tokens": [n for row in rows for n in row.get("text_tokens", [])]}
    print(f"{'':16}     min  median     max")
    for title, values in columns.items():
        if values: # prompts are counted only with --model
            print(f"{title:16}{min(values):8.5g}{np.median(values):8.5g}{max(values):8.5g}")

# ---- --align ---------------------------------------------------------------------------------------------------------

def copy_to(folder, sample, taken):
    """Writes a sample as it is -> the Sample there, of the layout folder. taken: the names that all before have."""
    there = {}
    for place, file in places_of(sample).items():
        if place in taken: # of a manifest, whose names need not fit a folder
            raise InputError(f"--align: {file}: another sample has {place} already; rename its target")
        taken.add(place)
        path = folder / (place + picture_suffix(file))
        path.parent.mkdir(parents=True, exist_ok=True)
        there[place] = shutil.copyfile(file, str(path))
    write_caption(sample, folder)
    return replace(sample, target=there[f"target/{sample.name}"], mask=there.get(f"mask/{sample.name}"),
                   controls=[path for place, path in there.items() if place.startswith("control/")])

def align_pair(target, control, mask):
    """The target, and its mask if it has one, warped onto the control -> (target, control, mask), cropped to what they
    share. The control's pixels are only cropped; the target's are resampled."""
    start = find_motion(target, control, copy_size(target.size))
    dx, dy, zoom = fit_motion(target, control, -start)
    left, right, width, x, step_x = shared_part(target.width, control.width, dx, zoom)
    top, bottom, height, y, step_y = shared_part(target.height, control.height, dy, zoom)
    warp = lambda image: image and image.resize(target.size).transform(
        (width, height), Image.AFFINE, (step_x, 0, x, 0, step_y, y), Image.BICUBIC)
    return warp(target), control.crop((left, top, right, bottom)), warp(mask)

def shared_part(n, of_control, shift, zoom):
    """Along one side, of n pixels in the target and of_control in the control -> first and last pixel of the control
    that both show; the result's pixels; where in the target they begin, and their step there."""
    shown_at = lambda x: (1 + zoom) * x + shift - zoom * n / 2 # by the control, in pixels of the target
    unit = of_control / n
    first, last = math.ceil(max(0, shown_at(0)) * unit), math.floor(min(n, shown_at(n)) * unit)
    size = max(1, round((last - first) / unit))
    return first, last, size, (first / unit - shown_at(0)) / (1 + zoom), (last - first) / size / unit / (1 + zoom)

def repair(sample):
    """Aligns a copied sample in place -> what is wrong, or None. Repaired pictures are PNG."""
    target, control = read_image(sample.target), read_image(sample.controls[0])
    mask = read_image(sample.mask).convert("L") if sample.mask else None
    target, control, mask = align_pair(target, control, mask)
    if min(*target.size, *control.size) < 32 or "moved" in examine_pair(target, control):
        return "moves still"
    for path, image in ((sample.target, target), (sample.controls[0], control), (sample.mask, mask)):
        if image:
            os.unlink(path)
            save_png(image, Path(path).with_suffix(".png"))

def write_aligned(out, samples, moved, sheets):
    """OUT, whole or not at all: the samples, repaired where their index is in `moved`; and in `sheets` the differences
    before and after -> [names of those left out]."""
    left_out, entries, pairs, taken = [], [], [], set()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".align-", dir=out.parent) as tmp:
        folder = Path(tmp, "out")
        for i, sample in enumerate(tqdm(samples, desc="aligning", unit=" samples", disable=None, leave=False)):
            if (folder / f"target/{sample.name}.txt").exists(): # a manifest may use a target twice
                sample = replace(sample, name=f"{sample.name}-{i}")
            there = copy_to(folder, sample, taken)
            if i in moved and repair(there):
                left_out.append(sample.name)
                for path in (there.target, there.mask, Path(there.target).with_suffix(".txt"), *there.controls):
                    Path(path).unlink() if path else None
            elif i in moved:
                pngs = [str(Path(path).with_suffix(".png")) for path in (there.target, there.controls[0])]
                entries.append((sample.name, [len(pairs), len(pairs) + 1]))
                pairs += [sample, replace(there, target=pngs[0], controls=[pngs[1]])]
        write_sheets(sheets, "aligned", entries, pairs, difference_cells, ["difference before", "after"])
        os.replace(folder, out)
    return left_out

# ---- command line ----------------------------------------------------------------------------------------------------

def main():
    for stream in (sys.stdout, sys.stderr): # a file name may be no UTF-8
        stream.reconfigure(errors="backslashreplace")
    parser = common.Parser(__doc__)
    parser.add_argument("data", nargs="+", help="dataset folders or metadata.jsonl files")
    parser.add_argument("--out", type=Path, help="folder of the report (default: out/doctor-<data>)")
    parser.add_argument("--target_pixels", type=pixels, nargs="+", default=[1024 * 1024], metavar="AREA",
                        help="area of the target that tokens are counted at, as in cache.py; several: each")
    parser.add_argument("--control_pixels", type=pixels, default=1024 * 1024, metavar="AREA", help="of the controls")
    parser.add_argument("--model", help="hub id or folder; its tokenizer counts prompts' tokens (default: none)")
    parser.add_argument("--skip_bad", action=argparse.BooleanOptionalAction, default=False,
                        help="exit with status 0 although there are errors")
    parser.add_argument("--mask", choices=["auto"], help="draw the masks that this flag of train.py makes at the first "
                        "of --target_pixels, in sheet_mask_*.png (default: none)")
    parser.add_argument("--align", type=Path, metavar="DIR", help="write the dataset here, repaired; a new folder")
    args = parser.parse_args()
    if args.align and args.align.exists() and not (args.align.is_dir() and not any(args.align.iterdir())):
        raise InputError(f"{args.align}: is there already; give --align another folder")
    roots, parts = args.data, ["tokenizer", "processor", "scheduler"]
    if args.align and any(Path(root).resolve() in args.align.resolve().parents for root in roots):
        raise InputError(f"--align {args.align}: lies in a dataset; give another folder")
    out = args.out or Path("out", cache.run_name("doctor", roots))
    pipe = args.model and cache.load_pipeline(cache.find_model(args.model, parts, weights=False))
    samples, problems = [], []
    for root in roots:
        found, wrong = common.read_dataset(root)
        for sample in found if len(roots) > 1 else []:
            sample.name = f"{sample.root}/{sample.name}"
        samples, problems = samples + found, problems + wrong
    common.prepare_folder(out)
    samples, rows, found, wrong = examine(samples, pipe, args)
    problems += wrong
    print("".join(problem + "\n" for problem in problems), end="", file=sys.stderr)
    if samples:
        lines = ",\n".join(map(json.dumps, rows))
        common.write_file(out / "report.json", f"[{lines}]\n".encode())
        overview = [(f"{sample.name}: {shown_prompt(sample)}", [i]) for i, sample in enumerate(samples)]
        write_sheets(out, "overview", overview[::max(1, len(samples) // 12)][:12], samples)
        print_table(rows)
        for kind, entries in found.items():
            write_sheets(out, kind, entries, samples)
            if names := [words for words, _ in entries]:
                print(f"{kind}, {len(names)}: {'; '.join(names[:8])}{'; ...' if len(names) > 8 else ''}")
        if args.mask:
            drawn = [(sample.name, [i]) for i, sample in enumerate(samples) if sample.controls and not sample.mask]
            write_sheets(out, "mask", drawn, samples, lambda sample: masked_cells(sample, args.target_pixels[0]),
                         ["control", "target", "edited"])
        print(f"{out}: report.json has all of them, sheet_*.png their pictures")
        if args.align and (alone := [sample.name for sample in samples if not sample.controls]):
            raise InputError(f"--align: {alone[0]} has no control to be aligned to; leave it out")
        if args.align:
            moved = {i for _, of in found["moved"] for i in of}
            try:
                left_out = write_aligned(args.align, samples, moved, out)
            except OSError as e:
                raise InputError(f"{args.align}: cannot be written ({e.strerror}); give another folder, or free space")
            repaired = len(moved) - len(left_out)
            print(f"{args.align}: {len(samples) - len(left_out)} samples, {repaired} of them repaired; "
                  f"not repaired and left out, {len(left_out)}: {', '.join(left_out) or '-'}")
    sys.exit(1 if not samples or (problems and not args.skip_bad) else 0)

if __name__ == "__main__":
    main()
