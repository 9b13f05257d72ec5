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

Shapes: H, W height and width of a small copy in pixels, N pixels or samples, K pixels that both pictures show.
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
from predict import contact_sheet, save_png, shown_prompt, side_by_side

# A pair is examined in copies of this longest side, in pixels: enough to see a shift of 4 pixels in 1024, in 60 ms.
SIDE = 256
# identical, in levels of 0 to 255; JPEG of quality 70 makes up to 4.5 and 8
SAME_RMS = 5.0 # root mean square of the difference
SAME_BLOCK = 9.0 # largest mean difference of 8x8 pixels, so that a small edit counts
# other shape
ASPECT = 1.05 # quotient of the two aspects: a stretch of 5 % is visible
SCALE = 2.0 # quotient of the two sides
# moved
REACH = 1.0 # pixels by which something moves at the picture's edge: less is within the error of measurement
FAR = 0.15 # shift in parts of the side, or zoom: beyond, no estimate was ever right
STRUCTURE = 6.0 # levels above the coarse picture that make an edge
FITS = 0.35 # two edges fit if they differ by less than this part of the stronger one
BETTER = 2.0 # levels by which an edge must fit better to count for one side
WINS = 1.1 # edges that fit only when moved, in parts of those that fit only at rest
SHARE = 0.02 # ... and of all edges
CLEAR = 0.05 # ... and product of both parts: by chance there are many of neither, or few of both
# recoloured
CAST = 5.0 # levels of a change to be named
ZERO = 4.0 # levels within which a colour is unchanged
ALIKE = 6.0 # levels within which a colour follows the common change
RECOLOURED = 0.08 # share of all colours that must follow it, at least
UNCHANGED = 0.1 # share of all colours that may be unchanged, at most
# twins, on copies of 16x16 pixels
TWIN = 4.0 # RMS in levels: re-encoded copies stay below 3
OTHER = 16.0 # RMS in levels of targets that are clearly different
KINDS = ["identical", "moved", "recoloured", "other shape", "duplicate", "other caption", "other target"]

# ---- moved: robust least squares on gradients (Lucas and Kanade 1981), coarse to fine --------------------------------
# A motion is (shift x, shift y, zoom about the middle), of the control against the target, in pixels of the copies.

def high_pass(image, size):
    """-> brightness, and what of it is finer than a 24th of the picture: float (H, W)."""
    x = image.convert("L").resize(size, Image.BOX).convert("F")
    coarse = x.resize([max(2, round(24 * n / max(size))) for n in size], Image.BOX)
    return np.asarray(x), np.asarray(x) - np.asarray(coarse.resize(size, Image.BICUBIC))

def move(x_HW, motion):
    """The picture as the motion shows it."""
    (h, w), (dx, dy, zoom) = x_HW.shape, motion
    affine = (1 + zoom, 0, dx - zoom * w / 2, 0, 1 + zoom, dy - zoom * h / 2)
    return np.asarray(Image.fromarray(x_HW).transform((w, h), Image.AFFINE, affine, Image.BILINEAR))

def from_middle(shape):
    """-> y, x of each pixel, counted from the picture's middle: (2, H, W)."""
    h, w = shape
    return np.mgrid[:h, :w] - np.array([(h - 1) / 2, (w - 1) / 2])[:, None, None]

def seen_by_both(shape, motion):
    """Pixels that do not leave the picture with this motion: bool (H, W)."""
    (h, w), (dx, dy, zoom), (y, x) = shape, motion, from_middle(shape)
    return (abs(x + zoom * x + dx) < w / 2 - 1) & (abs(y + zoom * y + dy) < h / 2 - 1)

def phase_shift(target_HW, control_HW):
    """Where the phase correlation peaks -> motion."""
    window = np.hanning(target_HW.shape[0])[:, None] * np.hanning(target_HW.shape[1])
    cross = np.fft.rfft2(control_HW * window) * np.fft.rfft2(target_HW * window).conj()
    peak = np.fft.irfft2(cross / (abs(cross) + 1e-3 * abs(cross).max() + 1e-9), target_HW.shape)
    place = np.unravel_index(peak.argmax(), peak.shape)
    dy, dx = [n - length if n > length / 2 else n for n, length in zip(place, peak.shape)]
    return [dx, dy, 0]

def refine(motion, target_HW, control_HW):
    """Six steps from this motion to that which makes the control the target. A pixel's weight falls with its error, so
    that what was edited has little say."""
    (h, w), (y, x) = target_HW.shape, from_middle(target_HW.shape)
    for _ in range(6):
        now, seen = move(control_HW, motion), seen_by_both(target_HW.shape, motion)
        dy, dx = np.gradient(now)
        slopes_K3, error_K = np.stack([dx, dy, dx * x + dy * y], -1)[seen], (target_HW - now)[seen]
        weighted_K3 = slopes_K3 / (1 + (error_K[:, None] / 12) ** 2) ** 2
        motion = motion + np.linalg.solve(weighted_K3.T @ slopes_K3 + 1e-3 * np.eye(3), weighted_K3.T @ error_K)
        motion = motion.clip([-w, -h, -0.5], [w, h, 0.5])
    return motion

def compare_edges(motion, target, control):
    """-> numbers of edges that fit only moved, that fit only at rest, and of all. They fit in what is finer than their
    surroundings, or by brightness if these were edited. target, control: high_pass's."""
    (bright, fine), moved, fits, errors = target, [move(x, motion) for x in control], [], []
    for now_bright, now_fine in (control, moved):
        errors.append(np.minimum(abs(fine - now_fine), abs(bright - now_bright)))
        edge = seen_by_both(fine.shape, motion) & (np.minimum(abs(fine), abs(now_fine)) > STRUCTURE)
        fits.append(edge & (errors[-1] < FITS * np.maximum(abs(fine), abs(now_fine))))
    only_moved = fits[1] & (errors[0] > errors[1] + BETTER)
    only_at_rest = fits[0] & (errors[1] > errors[0] + BETTER)
    return only_moved.sum(), only_at_rest.sum(), (np.maximum(abs(fine), abs(moved[1])) > 2 * STRUCTURE).sum()

def find_motion(target, control, size):
    """-> how the target shows the control's scene, in pixels of copies of `size`; or None. Tried from rest, from where
    phase correlation peaks, and from zooms; of the motions that pass, that with the most edges counts."""
    scales = [scale for scale in (8, 4, 2, 1) if round(max(size) / scale) >= 24 or scale == 1]
    copies = [[high_pass(im, [max(4, round(n / scale)) for n in size]) for im in (target, control)] for scale in scales]
    (_, fine), (_, control_fine) = copies[-1]
    starts = [[0, 0, 0], phase_shift(fine, control_fine), [0, 0, 0.05], [0, 0, -0.05]]
    best, best_lead = None, 0
    for n, motion in enumerate(np.array(starts)):
        for scale, ((_, fine), (_, control_fine)) in [*zip(scales, copies)][-2 if n else 0:]:
            unit = np.array([scale, scale, 1])
            motion = refine(motion / unit, fine, control_fine) * unit
        shift, zoom = np.hypot(*motion[:2]), abs(motion[2])
        reach = max(shift, zoom * max(size) / 2)
        if reach < REACH / 2: # at rest, and so it would be from any start
            return None
        moved, at_rest, edges = compare_edges(motion, *copies[-1])
        passes = moved > WINS * at_rest and moved > SHARE * edges and moved**2 > CLEAR * edges * (at_rest + 3)
        if passes and moved - at_rest > best_lead and reach > REACH and max(shift / max(size), zoom) < FAR:
            best, best_lead = -motion, moved - at_rest # the control's against the target, turned round
    return best

# ---- recoloured: what offset and gain of each channel do most colours share? -----------------------------------------

def votes_of(control_N3):
    """Each of 512 coarse colours has one vote, shared by its pixels, so that a new background is no cast; a colour of
    less than three pixels has none."""
    _, colour, count = np.unique(control_N3 // 32 @ [64, 8, 1], return_inverse=True, return_counts=True)
    votes = np.where(count >= 3, 1 / count, 0)[colour]
    return votes / max(votes.sum(), 1e-9)

def fit_change(control_N3, change_N3, votes_N):
    """-> the change of each pixel if offset and gain were what most colours agree on. Robust least squares, from the
    change that has the most votes."""
    columns = np.stack([control_N3 / 128 - 1, np.ones_like(control_N3)], -1)
    _, group = np.unique(change_N3 // 12 @ [10_000, 100, 1], return_inverse=True)
    fit = change_N3[group == np.bincount(group, votes_N).argmax()].mean(0)
    for sigma in (24, 16, 12, 8, 6, 6, 6):
        weight = votes_N / (1 + (abs(change_N3 - fit).max(1) / sigma) ** 2) ** 2
        gram = np.einsum("n,nci,ncj->cij", weight, columns, columns) + weight.sum() * np.diag([0.02, 1e-6]) + 1e-12
        right = np.einsum("n,nci,nc->ci", weight, columns, change_N3)
        fit = np.einsum("nci,ci->nc", columns, np.linalg.solve(gram, right[..., None])[..., 0])
    return fit

def find_cast(target, control):
    """-> mean change of red, green and blue if one offset and gain for each turn the control's colours, edited or not,
    into the target's; else None. uint8 (H, W, 3)."""
    control_N3 = control.reshape(-1, 3).astype(float)
    change_N3, votes_N = target.reshape(-1, 3) - control_N3, votes_of(control_N3)
    fit_N3 = fit_change(control_N3, change_N3, votes_N)
    alike = abs(change_N3 - fit_N3).max(1) < ALIKE
    unchanged = votes_N @ (abs(change_N3).max(1) < ZERO)
    if unchanged > UNCHANGED or votes_N @ alike < RECOLOURED + 1.5 * unchanged: # as many are alike by chance
        return None
    cast = np.average(fit_N3[alike], axis=0, weights=votes_N[alike] + 1e-12)
    return cast if abs(cast).max() > CAST else None

# ---- a pair; pairs of pairs ------------------------------------------------------------------------------------------

def examine_pair(target, control):
    """-> {kind of finding: in words} of two PIL images."""
    found, (w, h), (cw, ch) = {}, target.size, control.size
    aspect, scale = abs(math.log(w / h / (cw / ch))), abs(math.log(w * h / (cw * ch))) / 2
    if aspect > math.log(ASPECT) or scale > math.log(SCALE):
        found["other shape"] = f"target {w}x{h}, control {cw}x{ch}"
    size = [max(8, round(n * min(1, SIDE / max(w, h)))) for n in (w, h)]

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
        found["recoloured"] = "by {:+.0f} red, {:+.0f} green, {:+.0f} blue".format(*cast)
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
    cache.check_mask(sample, (w, h))
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
            problems += cache.broken_pictures(sample) or [str(e)]
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
