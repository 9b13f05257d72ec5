"""
How does a target show its control's scene? Its motion and its overall colour, and where the two differ: the edit.
For --mask auto of train.py and cache.py, tools/doctor.py and tools/measure.py. Pictures in, numbers or pictures out.
At the end: masks by hand, in other programs' colours, and those that leave a training nothing to learn.

Shapes: H, W height and width of a small copy in pixels, N pixels, K pixels that both pictures show.
"""
import math
import sys

import numpy as np
from PIL import Image, ImageFilter

import common
from common import InputError, first_words
from extras.strangers import open_tensors

# A motion is sought in copies of this longest side, in pixels: enough to see a shift of 4 pixels in 1024, in 60 ms.
SIDE = 256
FINE = (128, 256, 512, 1024) # it is refined on copies of these sides, one after the other
ASPECT = 1.05 # quotient of two aspects: a stretch of 5 % is visible
# moved
REACH = 1.0 # pixels by which something moves at the picture's edge: less is within the error of measurement
FAR = 0.15 # shift in parts of the side, or zoom and turn together (0.15 is 8.6 degrees): beyond, few were right
STEPS = 30 # of one refinement, at most: it ends when
STILL = 0.01 # pixels are all that a step still changes
TURNS = range(-6, 7) # degrees that phase correlation is tried at
STRUCTURE = 6.0 # levels above the coarse picture that make an edge
FITS = 0.35 # two edges fit if they differ by less than this part of the stronger one
BETTER = 2.0 # levels by which an edge must fit better to count for one side
WINS = 1.35 # edges that fit only when moved, in parts of those that fit only at rest
SHARE = 0.02 # ... and of all edges
SURE = 0.3 # lead of the edges that fit moved, in parts of all: right fits have 0.2 to 0.7, wrong ones up to 0.2
CLEAR = 0.05 # ... and product of both parts: by chance there are many of neither, or few of both
# recoloured
CAST = 5.0 # levels of a change to be named
ZERO = 4.0 # levels within which a colour is unchanged
ALIKE = 6.0 # levels within which a colour follows the common change
RECOLOURED = 0.08 # share of all colours that must follow it, at least
WHOLE = 0.1 # ... and share of all pixels
UNCHANGED = 0.1 # share of all colours that may be unchanged, at most
# edited
ALL = 0.9 # share of the tokens: beyond, the edit is everywhere
EDITED = 12.0 # levels by which it differs; JPEG of quality 70 makes up to 7 in 99 % of a photograph
CLOSE = 6 # pixels: gaps of twice this in the edit are edited too
GAIN = 3.5 # times the edited share: a token with over a seventh edited has 0.5, with two sevenths it counts in full
# masks by hand
WHITE, BLACK = 224, 31 # levels that white strokes have at least, and black at most: editors and WebP round them
OFF = 32 # levels that a channel may be off the colour that it is taken for

# ---- moved: robust least squares on gradients (Lucas and Kanade 1981), coarse to fine --------------------------------
# A motion is (shift x, shift y, zoom, turn) of the control against the target: with x and y counted from the middle,
# the target's pixel (x, y) shows the control's (x + shift x + zoom x - turn y, y + shift y + zoom y + turn x). So turn
# is a sine and 1 + zoom a cosine, and the motion is linear in all four. Shifts are in pixels of the copies.

def copy_size(size, side=SIDE):
    """(width, height) of copies whose longest side is at most `side`."""
    return [max(8, round(n * min(1, side / max(size)))) for n in size]

def high_pass(image, size):
    """-> brightness, and what of it is finer than a 24th of the picture: float (H, W)."""
    x = image.convert("L").resize(size, Image.BOX).convert("F")
    coarse = x.resize([max(2, round(24 * n / max(size))) for n in size], Image.BOX)
    return np.asarray(x), np.asarray(x) - np.asarray(coarse.resize(size, Image.BICUBIC))

def same_shape(size, other):
    """Whether two (width, height) have the same aspect, but for a stretch that is hardly visible."""
    return abs(math.log(size[0] / size[1] / (other[0] / other[1]))) < math.log(ASPECT)

def scaled(motion, factor):
    """The same motion in pixels of copies that are `factor` times as large."""
    return motion * np.array([factor, factor, 1, 1])

def inverse(motion):
    """The target's against the control, of the control's against the target; and the reverse."""
    dx, dy, zoom, turn = motion
    scale = 1 / complex(1 + zoom, turn)
    shift = -complex(dx, dy) * scale
    return np.array([shift.real, shift.imag, scale.real - 1, scale.imag])

def reach(motion, size):
    """By how many pixels it moves the worst corner, at most."""
    return np.hypot(*motion[:2]) + np.hypot(*motion[2:]) * np.hypot(*size) / 2

def affine_of(motion, size):
    """A motion as PIL wants it: (a, b, c, d, e, f), where (x, y) shows (a x + b y + c, d x + e y + f)."""
    (w, h), (dx, dy, zoom, turn) = size, motion
    return 1 + zoom, -turn, dx - (zoom * w - turn * h) / 2, turn, 1 + zoom, dy - (zoom * h + turn * w) / 2

def show_moved(image, motion, resample=Image.BICUBIC):
    """A PIL image as the motion shows it."""
    return image.transform(image.size, Image.AFFINE, affine_of(motion, image.size), resample)

def move(x_HW, motion):
    return np.asarray(show_moved(Image.fromarray(x_HW), motion, Image.BILINEAR))

def from_middle(shape):
    """-> y, x of each pixel, counted from the picture's middle: (2, H, W)."""
    h, w = shape
    return np.mgrid[:h, :w] - np.array([(h - 1) / 2, (w - 1) / 2])[:, None, None]

def seen_by_both(shape, motion):
    """Pixels that do not leave the picture with this motion: bool (H, W)."""
    (h, w), (dx, dy, zoom, turn), (y, x) = shape, motion, from_middle(shape)
    inside_x = abs(x + zoom * x - turn * y + dx) < w / 2 - 1
    inside_y = abs(y + zoom * y + turn * x + dy) < h / 2 - 1
    return inside_x & inside_y

def phase_start(target_HW, control_HW):
    """The turn and shift at which phase correlation peaks highest -> motion."""
    (h, w), highest, best = target_HW.shape, 0, np.zeros(4)
    window = np.hanning(h)[:, None] * np.hanning(w)
    seen = np.fft.rfft2(target_HW * window).conj()
    for degrees in TURNS:
        turned = np.exp(1j * np.radians(degrees))
        cross = np.fft.rfft2(move(control_HW, [0, 0, turned.real - 1, turned.imag]) * window) * seen
        peak = np.fft.irfft2(cross / (abs(cross) + 1e-3 * abs(cross).max() + 1e-9), (h, w))
        if peak.max() > highest:
            highest, (y, x) = peak.max(), np.unravel_index(peak.argmax(), (h, w))
            shift = turned * complex((x + w // 2) % w - w // 2, (y + h // 2) % h - h // 2)
            best = np.array([shift.real, shift.imag, turned.real - 1, turned.imag])
    return best

def starts_of(target_HW, control_HW):
    """Yields motions from which the right one may be near. A generator, as the first is often enough."""
    yield np.zeros(4)
    yield phase_start(target_HW, control_HW)
    for zoom in (0.05, -0.05):
        yield np.array([0, 0, zoom, 0])

def refine(motion, target_HW, control_HW, part_HW=True):
    """From this motion to that which makes the control the target. A pixel's weight falls with its error, so that what
    was edited has little say. part_HW: bool, the pixels that count."""
    (h, w), (y, x) = target_HW.shape, from_middle(target_HW.shape)
    for _ in range(STEPS):
        before = motion
        now, seen = move(control_HW, motion), seen_by_both(target_HW.shape, motion) & part_HW
        dy, dx = np.gradient(now)
        slopes_K4 = np.stack([dx, dy, dx * x + dy * y, dy * x - dx * y], -1)[seen]
        error_K = (target_HW - now)[seen]
        weighted_K4 = slopes_K4 / (1 + (error_K[:, None] / 12) ** 2) ** 2
        motion = motion + np.linalg.solve(weighted_K4.T @ slopes_K4 + 1e-3 * np.eye(4), weighted_K4.T @ error_K)
        motion = motion.clip([-w, -h, -0.5, -0.5], [w, h, 0.5, 0.5])
        if reach(motion - before, (w, h)) < STILL:
            break
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
    """-> the motion that makes the control the target, in pixels of copies of `size`, or None. Tried from rest, from
    where phase correlation peaks, and from zooms; of the motions that pass, that with the most edges counts."""
    scales = [scale for scale in (8, 4, 2, 1) if round(max(size) / scale) >= 24 or scale == 1]
    copies = [[high_pass(im, [max(4, round(n / scale)) for n in size]) for im in (target, control)] for scale in scales]
    (_, fine), (_, control_fine) = copies[-1]
    best, best_lead = None, 0
    for n, motion in enumerate(starts_of(fine, control_fine)):
        for scale, ((_, fine), (_, control_fine)) in [*zip(scales, copies)][-2 if n else 0:]:
            motion = scaled(refine(scaled(motion, 1 / scale), fine, control_fine), scale)
        shift, zoom = np.hypot(*motion[:2]), np.hypot(*motion[2:])
        far = max(shift, zoom * max(size) / 2)
        if far < REACH / 2: # at rest, and so it would be from any start
            return None
        moved, at_rest, edges = compare_edges(motion, *copies[-1])
        passes = moved > WINS * at_rest and moved > SHARE * edges and moved**2 > CLEAR * edges * (at_rest + 3)
        if passes and moved - at_rest > best_lead and far > REACH and max(shift / max(size), zoom) < FAR:
            best, best_lead = motion, moved - at_rest
            if best_lead > SURE * edges:
                break
    return best

# ---- recoloured: what offset and gain of each channel do most colours share? -----------------------------------------

def votes_of(control_N3):
    """Each of 512 coarse colours has one vote, shared by its pixels, so that a new background is no cast; a colour of
    less than three pixels has none."""
    _, colour, count = np.unique(control_N3 // 32 @ [64, 8, 1], return_inverse=True, return_counts=True)
    votes = np.where(count >= 3, 1 / count, 0)[colour]
    return votes / max(votes.sum(), 1e-9)

def fit_change(control_N3, change_N3, votes_N):
    """-> the change of each colour by the one affine map of colours that most of them agree on: (N, 3). Robust least
    squares, from the change that has the most votes."""
    columns_N4 = np.column_stack([control_N3 / 128 - 1, np.ones(len(control_N3))])
    _, group = np.unique(change_N3 // 12 @ [10_000, 100, 1], return_inverse=True)
    fitted_N3 = change_N3[group == np.bincount(group, votes_N).argmax()].mean(0)
    for sigma in (24, 16, 12, 8, 6, 6, 6):
        weight_N = votes_N / (1 + (abs(change_N3 - fitted_N3).max(1) / sigma) ** 2) ** 2
        weighted_N4 = weight_N[:, None] * columns_N4
        gram = weighted_N4.T @ columns_N4 + weight_N.sum() * np.diag([0.02, 0.02, 0.02, 1e-6]) + 1e-12 * np.eye(4)
        fitted_N3 = columns_N4 @ np.linalg.solve(gram, weighted_N4.T @ change_N3)
    return fitted_N3

def find_cast(target, control):
    """-> mean change of red, green and blue if one offset and gain for each turn the control's colours, edited or not,
    into the target's; else None. The colours of their pixels: uint8 (N, 3)."""
    control_N3 = control.astype(float)
    change_N3, votes_N = target - control_N3, votes_of(control_N3)
    fitted_N3 = fit_change(control_N3, change_N3, votes_N)
    unchanged = abs(change_N3).max(1) < ZERO
    alike = ~unchanged & (abs(change_N3 - fitted_N3).max(1) < ALIKE)
    share, unchanged_share = votes_N @ alike, votes_N @ unchanged
    if unchanged_share > UNCHANGED or share < RECOLOURED + 1.5 * unchanged_share: # as many are alike by chance
        return None
    if alike.mean() < WHOLE:
        return None
    cast = np.average(fitted_N3[alike], axis=0, weights=votes_N[alike] + 1e-12)
    return cast if abs(cast).max() > CAST else None

def find_change(target, control):
    """How two PIL images differ as a whole -> (find_motion's motion or None, find_cast's cast or None). The doctor's
    findings are this, and no pair that it calls recoloured gets an automatic mask."""
    size, small = copy_size(target.size), copy_size(target.size, 64)
    motion = find_motion(target, control, size) if same_shape(target.size, control.size) else None
    there = np.zeros(4) if motion is None else scaled(motion, max(small) / max(size))
    seen = seen_by_both(small[::-1], there)
    target, control = [image.resize(small, Image.BOX) for image in (target, control)]
    return motion, find_cast(np.asarray(target)[seen], np.asarray(show_moved(control, there))[seen])

# ---- the edit: where target and control differ, but for their motion -------------------------------------------------

def fit_motion(target, control, motion=(0, 0, 0, 0)):
    """The motion, in pixels of copies of SIDE, that makes the control the target -> the same in pixels of the target,
    refined on copies of FINE. The two need the same aspect, not the same size."""
    size = copy_size(target.size)
    for side in FINE:
        before, size = size, copy_size(target.size, side)
        motion = scaled(motion, max(size) / max(before))
        motion = refine(motion, high_pass(target, size)[1], high_pass(control, size)[1])
    return scaled(motion, max(target.size) / max(size))

def remaining_motion(target, control):
    """How far a repaired pair may still move at its worst corner, in pixels of copies of at most 1024: the larger of
    two motions, each fitted to one half of the picture, the black or the white fields of a chessboard. A right fit
    leaves both at rest; a wrong one, which holds on to a few edges by chance, leaves the halves at odds."""
    size = copy_size(target.size, FINE[-1])
    fine, control_fine = high_pass(target, size)[1], high_pass(control, size)[1]
    y, x = np.mgrid[:size[1], :size[0]]
    white = (y * 6 // size[1] + x * 6 // size[0]) % 2 == 0
    return max(reach(refine(np.zeros(4), fine, control_fine, part), size) for part in (white, ~white))

def difference(target, control):
    """By how many levels a channel of the target is beyond all that the control shows within a pixel: (H, W)."""
    target, control = [image.filter(ImageFilter.BoxBlur(1)) for image in (target, control)]
    low, high = [np.asarray(control.filter(rank(3)), float) for rank in (ImageFilter.MinFilter, ImageFilter.MaxFilter)]
    return np.maximum(np.asarray(target) - high, low - np.asarray(target)).max(-1)

def count(samples):
    """-> a line: how many of these planned samples have a mask, by hand or of --mask auto, as far as they are encoded;
    "" if none should have one."""
    by_hand = sum(bool(sample.mask) for sample in samples)
    files = [sample.encodings[0]["file"] for sample in samples if "mask" in sample.encodings[0]]
    if not by_hand and not files:
        return ""
    if not all(file.is_file() for file in files): # --plan, --no-use_cache
        return f"masks: {by_hand} of {len(samples)} pairs by hand; --mask auto makes others when it encodes them"
    made = sum("edit_mask" in open_tensors(file).keys() for file in files)
    line = f"masks: {by_hand + made} of {len(samples)} pairs"
    if made < len(files):
        line += (f" ({len(files) - made} differ nowhere or nearly everywhere, are recoloured, or have two shapes; "
                 "tools/doctor.py DATA --mask auto shows them)")
    return line

def auto_mask(target, control, size):
    """Where the target differs from the control once their motion is taken out -> PIL image "L", a pixel for each token
    of 16x16 pixels of `size`, (width, height) of the target as it is trained: the edited share, soft. None if nothing
    differs, nearly all does, the two have different shapes, or the whole picture is recoloured: then a mask says
    nothing, and every token weighs the same."""
    if not same_shape(target.size, control.size): # as they are: a small `size` is rounded to another shape
        return None
    w, h = size
    target, control = target.resize(size, Image.LANCZOS), control.resize(size, Image.BICUBIC)
    found, cast = find_change(target, control)
    if cast is not None:
        return None
    best_score = math.inf
    rest = np.zeros(4)
    starts = [rest] if found is None else [rest, found]
    for motion in [rest, *[fit_motion(target, control, start) for start in starts]]: # what explains most, wins
        seen = seen_by_both((h, w), motion)
        differs = difference(target, show_moved(control, motion))
        score = np.minimum(differs, 2 * EDITED)[seen].mean() if seen.any() else math.inf
        if score < best_score:
            edited, best_score = (differs > EDITED) & seen, score
    edited = Image.fromarray(edited).convert("L").filter(ImageFilter.MedianFilter(5))
    edited = edited.filter(ImageFilter.MaxFilter(2 * CLOSE + 1))
    edited = edited.filter(ImageFilter.MinFilter(2 * CLOSE + 3)) # and back, with the pixel that the blur has added
    mask = edited.resize((w // 16, h // 16), Image.BOX).point(lambda share: min(255, round(GAIN * share)))
    return mask if 0 < np.mean(np.asarray(mask) >= 128) < ALL else None

# ---- a mask by hand in another program's colours ---------------------------------------------------------------------

def read_form(image):
    """A mask as its file has it -> PIL image "L", white = the edited region; None if it could mean several things.
    common.read_mask lists the forms."""
    if image.mode.startswith("I;16"):
        mask_HW = np.asarray(image)
        if mask_HW.max() >= 2**14:
            mask_HW = (np.arange(2**16) / np.float32(257)).round().astype(np.uint8)[mask_HW]
    else:
        rgba_HW4 = rgba_of(image)
        if rgba_HW4[..., 3].min() == 255 and np.ptp(rgba_HW4[..., :3], -1).max() <= 32: # gray, through JPEG or WebP
            del rgba_HW4
            mask_HW = np.asarray(image.convert("RGB").convert("L"))
        else:
            mask_HW = region_of(rgba_HW4)
    if mask_HW is None:
        return None
    has_level = np.zeros(2**16, bool)
    for row_W in mask_HW: # all at once would take 8 bytes a pixel
        has_level[row_W] = True
    levels = np.flatnonzero(has_level).tolist()
    dark = [level for level in levels if level < 255]
    # Up to 32 levels below 96 are labels (COCO has 91), beside which 255 means "ignore", or a gray without any white.
    # In a JPEG or WebP they are noise.
    is_labels = image.format in ("PNG", "BMP", "TIFF") and 1 < len(dark) <= 32 and dark[-1] < 96
    if is_labels and levels == [0, 1]:
        mask_HW = mask_HW * 255
    elif is_labels or levels[-1] > 255:
        return None
    return Image.fromarray(mask_HW.astype(np.uint8))

def rgba_of(image):
    """-> its pixels as RGBA: uint8 (H, W, 4). In strips, as PIL needs three copies for this."""
    w, h = image.size
    rgba_HW4 = np.empty((h, w, 4), np.uint8)
    for top in range(0, h, 256):
        rgba_HW4[top:top + 256] = image.crop((0, top, w, min(top + 256, h))).convert("RGBA")
    return rgba_HW4

def region_of(rgba_HW4):
    """The pixels of a mask that has colours or transparency -> its region: uint8 (H, W), white = edited. None if it
    could be another region just as well. common.read_mask lists the forms."""
    colours_HW3, alpha_HW = rgba_HW4[..., :3], rgba_HW4[..., 3]
    if not alpha_HW.any(): # a layer that nothing was painted on
        return alpha_HW
    if alpha_HW.min() < alpha_HW.max():
        shown_N3 = colours_HW3[alpha_HW >= alpha_HW.max() / 2] # where less is seen, programs round the colour
        if shown_N3.min() >= WHITE:
            return alpha_HW
        # black strokes and cut-out objects look like this, too, but cover less than a picture with a hole
        is_hole = (shown_N3.max() <= BLACK or is_photo(shown_N3)) and (alpha_HW >= 128).mean() > 0.5
        # else they are strokes of a colour, or black ones beside white ones: what is transparent may be the region, or
        # what is not edited
        return 255 - alpha_HW if is_hole else None
    if np.ptp(colours_HW3, -1).max() <= OFF: # gray, all of it half transparent
        return np.asarray(Image.fromarray(colours_HW3).convert("L"))
    bright_HW = colours_HW3.max(-1)
    brightest = colours_HW3.reshape(-1, 3)[bright_HW.argmax()]
    region_HW = np.empty_like(bright_HW)
    for region_W, bright_W, colours_W3 in zip(region_HW, bright_HW, colours_HW3): # at once: 40 bytes a pixel
        share_W = bright_W / np.float32(brightest.max()) # of this colour; less at soft edges
        if abs(share_W[:, None] * brightest - colours_W3).max() > OFF:
            return None
        region_W[:] = (255 * share_W).round()
    return region_HW

def is_photo(shown_N3):
    """Whether a tenth of these colours, uint8 (N, 3), has other ones than the eight commonest, of 32 levels a channel.
    Strokes and labels have not, nor have drawings in flat colours: these cannot be told from labels."""
    some_N3 = shown_N3[::len(shown_N3) // 10**5 + 1]
    counts = np.sort(np.bincount(some_N3 // 8 @ [1024, 32, 1]))
    return counts[:-8].sum() > len(some_N3) / 10

# ---- a mask that leaves the loss nothing, because its only part has the weight 0 -------------------------------------

def check_weights(args, samples, val_samples):
    """-> (samples, validation samples): planned ones, and encoded as far as they will be, without those whose mask
    leaves no token a weight in train.py's flow_loss, whose loss of them would be 0 in silence. If there are any, they
    are named, and end the script, without --skip_bad. The same on every process."""
    weights = [getattr(args, f"mask_{part}_weight", 1.0) for part in ("foreground", "background")] # cache.py has none
    if min(weights) > 1e-30: # (in fp32 a smaller one may be 0)
        return samples, val_samples
    problems, *kept = common.on_first_process(lambda: split_weightless(samples, val_samples, weights))
    if common.rank() == 0:
        common.print_problems(problems)
    if problems and not args.skip_bad:
        sys.exit("correct these masks, or go on without these samples: --skip_bad" if common.rank() == 0 else 1)
    if not kept[0]:
        raise InputError(f"{' '.join(args.data)}: no sample is left; correct the masks that are listed above")
    return kept

def split_weightless(samples, val_samples, weights):
    """-> (a line for each mask that leaves nothing, the other samples, the other validation samples)."""
    problems, kept = [], ([], [])
    for all_of, good in zip((samples, val_samples), kept):
        for sample in common.progress("masks", all_of, unit="sample"):
            with common.noted(problems):
                for encoding in sample.encodings:
                    check_weight(sample, encoding, *weights)
                good.append(sample)
    return problems, *kept

def check_weight(sample, encoding, foreground, background):
    """InputError if this encoding's mask leaves no token a weight."""
    _, h, w = encoding["img_shapes"][0]
    mask_I = edit_mask_of(sample, encoding["file"], (w, h))
    if mask_I is not None and (foreground * mask_I + background * (1 - mask_I)).sum() == 0: # as load_item has it
        part = "foreground" if foreground < background else "background"
        raise InputError(f"{sample.mask or sample.name}: this mask leaves no token a weight in the loss at {16 * w}x"
                         f"{16 * h}; correct it, or raise --mask_{part}_weight")

def edit_mask_of(sample, file, size):
    """-> the edited share of each of (width, height) tokens, fp32, as cache.encode_latents has it: read from the
    encoded file alone, or of a mask that will be encoded later. None without a mask, or for a later one of auto_mask,
    which has both parts. InputError names a damaged file."""
    if file.is_file():
        try:
            with open_tensors(file, "np") as f:
                return f.get_tensor("edit_mask") if "edit_mask" in f.keys() else None
        except Exception as e: # it is damaged, which can fail in any way
            raise InputError(f"{file}: cannot be read ({first_words(e)}); cache.py --verify encodes it again")
    if not sample.mask:
        return None
    mask = common.read_mask(sample.mask, sample.contents[sample.mask]).resize(size, Image.BOX)
    return np.asarray(mask).flatten() / np.float32(255)
