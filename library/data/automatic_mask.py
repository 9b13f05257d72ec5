"""
How does a target show its control's scene? Its motion and its overall colour, and where the two differ: the edit.
For --mask auto of train.py and cache.py, tools/doctor.py and tools/measure.py. Pictures in, numbers or pictures out.

Shapes: H, W height and width of a small copy in pixels, N pixels, K pixels that both pictures show.
"""
import math

import numpy as np
from PIL import Image, ImageFilter

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
    copies = []
    for scale in scales:
        small = [max(4, round(n / scale)) for n in size]
        copies.append([high_pass(im, small) for im in (target, control)])
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

def fine_part(image, size):
    """-> brightness without what is coarser than a 48th of the picture: float (H, W). Unlike the coarse picture of
    high_pass, which lies on fixed cells and draws a fit to rest, a blur moves with the picture."""
    bright = image.convert("L").resize(size, Image.BOX)
    return np.asarray(bright, float) - np.asarray(bright.filter(ImageFilter.GaussianBlur(max(size) / 48)))

def fit_motion(target, control, motion=(0, 0, 0, 0)):
    """The motion, in pixels of copies of SIDE, that makes the control the target -> the same in pixels of the target,
    refined on copies of FINE. The two need the same aspect, not the same size."""
    size = copy_size(target.size)
    for side in FINE:
        before, size = size, copy_size(target.size, side)
        motion = scaled(motion, max(size) / max(before))
        motion = refine(motion, fine_part(target, size), fine_part(control, size))
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
