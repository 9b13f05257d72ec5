"""
How does a target show its control's scene? Its motion and its overall colour, and where else the two differ: the edit.
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
# edited
ALL = 0.9 # share of the tokens: beyond, the edit is everywhere
EDITED = 12.0 # levels by which it differs; JPEG of quality 70 makes up to 7 in 99 % of a photograph
CLOSE = 6 # pixels: gaps of twice this in the edit are edited too
GAIN = 3.5 # times the edited share: a token with over a seventh edited has 0.5, with two sevenths it counts in full

# ---- moved: robust least squares on gradients (Lucas and Kanade 1981), coarse to fine --------------------------------
# A motion is (shift x, shift y, zoom about the middle), of the control against the target, in pixels of the copies.

def copy_size(size, side=SIDE):
    """(width, height) of copies whose longest side is at most `side`."""
    return [max(8, round(n * min(1, side / max(size)))) for n in size]

def high_pass(image, size):
    """-> brightness, and what of it is finer than a 24th of the picture: float (H, W)."""
    x = image.convert("L").resize(size, Image.BOX).convert("F")
    coarse = x.resize([max(2, round(24 * n / max(size))) for n in size], Image.BOX)
    return np.asarray(x), np.asarray(x) - np.asarray(coarse.resize(size, Image.BICUBIC))

def show_moved(image, motion, resample=Image.BICUBIC):
    """A PIL image as the motion shows it."""
    (w, h), (dx, dy, zoom) = image.size, motion
    affine = (1 + zoom, 0, dx - zoom * w / 2, 0, 1 + zoom, dy - zoom * h / 2)
    return image.transform((w, h), Image.AFFINE, affine, resample)

def move(x_HW, motion):
    return np.asarray(show_moved(Image.fromarray(x_HW), motion, Image.BILINEAR))

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
    """-> how the target shows the control's scene (the reverse of fit_motion's), in pixels of copies of `size`, or
    None. Tried from rest, from where phase correlation peaks, and from zooms; of the motions that pass, that with the
    most edges counts."""
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

def change_of(control_N3, fit_C2):
    """How offset and gain of each channel change these colours: (N, 3)."""
    return (control_N3 / 128 - 1) * fit_C2[:, 0] + fit_C2[:, 1]

def fit_change(control_N3, change_N3, votes_N):
    """-> gain and offset of each channel that most colours agree on: (3, 2), for change_of. Robust least squares, from
    the change that has the most votes."""
    columns = np.stack([control_N3 / 128 - 1, np.ones_like(control_N3)], -1)
    _, group = np.unique(change_N3 // 12 @ [10_000, 100, 1], return_inverse=True)
    fitted_N3 = change_N3[group == np.bincount(group, votes_N).argmax()].mean(0)
    for sigma in (24, 16, 12, 8, 6, 6, 6):
        weight = votes_N / (1 + (abs(change_N3 - fitted_N3).max(1) / sigma) ** 2) ** 2
        gram = np.einsum("n,nci,ncj->cij", weight, columns, columns) + weight.sum() * np.diag([0.02, 1e-6]) + 1e-12
        right = np.einsum("n,nci,nc->ci", weight, columns, change_N3)
        fit_C2 = np.linalg.solve(gram, right[..., None])[..., 0]
        fitted_N3 = change_of(control_N3, fit_C2)
    return fit_C2

def find_cast(target, control):
    """-> (mean change of red, green and blue, fit_change's fit) if one offset and gain for each turn the control's
    colours, edited or not, into the target's; else None. uint8 (H, W, 3)."""
    control_N3 = control.reshape(-1, 3).astype(float)
    change_N3, votes_N = target.reshape(-1, 3) - control_N3, votes_of(control_N3)
    fit_C2 = fit_change(control_N3, change_N3, votes_N)
    fitted_N3 = change_of(control_N3, fit_C2)
    alike = abs(change_N3 - fitted_N3).max(1) < ALIKE
    unchanged = votes_N @ (abs(change_N3).max(1) < ZERO)
    if unchanged > UNCHANGED or votes_N @ alike < RECOLOURED + 1.5 * unchanged: # as many are alike by chance
        return None
    cast = np.average(fitted_N3[alike], axis=0, weights=votes_N[alike] + 1e-12)
    return (cast, fit_C2) if abs(cast).max() > CAST else None

# ---- the edit: where target and control differ, but for motion and colour --------------------------------------------

def fit_motion(target, control, motion=(0, 0, 0)):
    """The motion, in pixels of copies of SIDE, that makes the control the target -> the same in pixels of the target,
    refined on copies of FINE. The two need the same aspect, not the same size."""
    size, motion = copy_size(target.size), np.array(motion, float)
    for side in FINE:
        before, size = size, copy_size(target.size, side)
        motion *= [max(size) / max(before)] * 2 + [1]
        motion = refine(motion, high_pass(target, size)[1], high_pass(control, size)[1])
    return motion * ([max(target.size) / max(size)] * 2 + [1])

def recolour(control, target):
    """The control in the target's overall colour, if that has changed."""
    small = [np.asarray(image.resize(copy_size(target.size, 64), Image.BOX)) for image in (target, control)]
    if (cast := find_cast(*small)) is None:
        return control
    colours_N3 = np.asarray(control, float).reshape(-1, 3)
    colours_N3 = (colours_N3 + change_of(colours_N3, cast[1])).clip(0, 255).round().astype(np.uint8)
    return Image.fromarray(colours_N3.reshape(*control.size[::-1], 3))

def difference(target, control):
    """By how many levels a channel of the target is beyond all that the control shows within a pixel: (H, W)."""
    target, control = [image.filter(ImageFilter.BoxBlur(1)) for image in (target, control)]
    low, high = [np.asarray(control.filter(rank(3)), float) for rank in (ImageFilter.MinFilter, ImageFilter.MaxFilter)]
    return np.maximum(np.asarray(target) - high, low - np.asarray(target)).max(-1)

def auto_mask(target, control):
    """Where the target differs from the control once their motion and overall colour are taken out -> PIL image "L", a
    pixel for each token of 16x16 pixels: the edited share, soft. None if nothing differs, nearly all does, or the two
    have different shapes: then a mask says nothing, and every token weighs the same."""
    (w, h), (cw, ch) = target.size, control.size
    if abs(math.log(w / h / (cw / ch))) > math.log(ASPECT):
        return None
    control, best_score = control.resize((w, h), Image.BICUBIC), math.inf
    found = find_motion(target, control, copy_size((w, h)))
    rest = np.zeros(3)
    starts = [rest] if found is None else [rest, -found]
    for motion in [rest, *[fit_motion(target, control, start) for start in starts]]: # what explains most, wins
        seen = seen_by_both((h, w), motion)
        differs = difference(target, recolour(show_moved(control, motion), target))
        score = np.minimum(differs, 2 * EDITED)[seen].mean() if seen.any() else math.inf
        if score < best_score:
            edited, best_score = (differs > EDITED) & seen, score
    edited = Image.fromarray(edited).convert("L").filter(ImageFilter.MedianFilter(5))
    edited = edited.filter(ImageFilter.MaxFilter(2 * CLOSE + 1))
    edited = edited.filter(ImageFilter.MinFilter(2 * CLOSE + 3)) # and back, with the pixel that the blur has added
    mask = edited.resize((w // 16, h // 16), Image.BOX).point(lambda share: min(255, round(GAIN * share)))
    return mask if 0 < np.mean(np.asarray(mask) >= 128) < ALL else None
