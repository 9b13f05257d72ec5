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

$ python tools/doctor.py photos                          # -> out/doctor-photos
$ python tools/doctor.py photos drawings --reg_data faces --out report
$ python tools/doctor.py photos --target_pixels 512x512 --model Qwen/Qwen-Image-Edit-2509

Shapes: N samples.
"""
import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent)) # where the core scripts are
import cache
from cache import CONDITION_IMAGE_SIZE, InputError, fit_size, is_plus, pixels, read_image
from extras.motion import ASPECT, copy_size, find_cast, find_motion
from predict import contact_sheet, save_png, shown_prompt, side_by_side

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
    (w, h), *control_sizes = sizes = [cache.image_size(path) for path in [sample.target, *sample.controls]]
    mask_w, mask_h = cache.image_size(sample.mask) if sample.mask else (w, h)
    if abs(mask_w / mask_h / (w / h) - 1) > 0.02: # as in cache.plan_sample
        raise InputError(f"{sample.mask}: {mask_w}x{mask_h} for a target of {w}x{h}; give it the target's shape")
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

def write_sheets(folder, kind, entries, samples):
    """FOLDER/sheet_KIND_PAGE.png with the pictures of [(words, indices of samples)], of 24 a page."""
    file = lambda page: f"sheet_{kind.replace(' ', '_')}_{page}.png"
    small = lambda paths: side_by_side(list(map(read_image, paths))) if paths else None
    for old in folder.glob(file("*")):
        old.unlink()
    for page, start in enumerate(range(0, len(entries), 24), 1):
        lines = [[words, *[small(paths) for i in of for paths in (samples[i].controls, [samples[i].target])]]
                 for words, of in entries[start:start + 24]]
        titles = ["", "control", "target", "its control", "its target"][:len(lines[0])]
        save_png(contact_sheet(lines, titles), folder / file(page))

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

# ---- command line ----------------------------------------------------------------------------------------------------

def main():
    for stream in (sys.stdout, sys.stderr): # a file name may be no UTF-8
        stream.reconfigure(errors="backslashreplace")
    parser = cache.Parser(__doc__)
    parser.add_argument("data", nargs="+", help="dataset folders or metadata.jsonl files")
    parser.add_argument("--reg_data", nargs="+", default=[], metavar="DIR", help="folders of pictures without controls")
    parser.add_argument("--out", type=Path, help="folder of the report (default: out/doctor-<data>)")
    parser.add_argument("--target_pixels", type=pixels, nargs="+", default=[1024 * 1024], metavar="AREA",
                        help="area of the target that tokens are counted at, as in cache.py; several: each")
    parser.add_argument("--control_pixels", type=pixels, default=1024 * 1024, metavar="AREA", help="of the controls")
    parser.add_argument("--model", help="hub id or folder; its tokenizer counts prompts' tokens (default: none)")
    parser.add_argument("--skip_bad", action=argparse.BooleanOptionalAction, default=False,
                        help="exit with status 0 although there are errors")
    args = parser.parse_args()
    roots, parts = args.data + args.reg_data, ["tokenizer", "processor", "scheduler"]
    out = args.out or Path("out", cache.run_name("doctor", roots))
    pipe = args.model and cache.load_pipeline(cache.find_model(args.model, parts, weights=False))
    samples, problems = [], []
    for n, root in enumerate(roots):
        found, wrong = cache.read_dataset(root, alone=n >= len(args.data))
        for sample in found if len(roots) > 1 else []:
            sample.name = f"{sample.root}/{sample.name}"
        samples, problems = samples + found, problems + wrong
    cache.prepare_folder(out, "give another --out")
    samples, rows, found, wrong = examine(samples, pipe, args)
    problems += wrong
    print("".join(problem + "\n" for problem in problems), end="", file=sys.stderr)
    if samples:
        lines = ",\n".join(map(json.dumps, rows))
        cache.write_file(out / "report.json", f"[{lines}]\n".encode())
        overview = [(f"{sample.name}: {shown_prompt(sample)}", [i]) for i, sample in enumerate(samples)]
        write_sheets(out, "overview", overview[::max(1, len(samples) // 12)][:12], samples)
        print_table(rows)
        for kind, entries in found.items():
            write_sheets(out, kind, entries, samples)
            if names := [words for words, _ in entries]:
                print(f"{kind}, {len(names)}: {'; '.join(names[:8])}{'; ...' if len(names) > 8 else ''}")
        print(f"{out}: report.json has all of them, sheet_*.png their pictures")
    sys.exit(1 if not samples or (problems and not args.skip_bad) else 0)

if __name__ == "__main__":
    main()
