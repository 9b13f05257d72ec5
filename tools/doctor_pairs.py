"""
Which pairs of a dataset are unlike its others, and what has a program done to one side of a pair? A part of doctor.py,
which is the command to run.

Two pictures correspond if edges of the same direction are at the same places. Tones, borders and most styles keep that;
whether an edge is light on dark or dark on light does not count. Small copies are compared, so that a few percent of
shift do no harm.

Counted once (commit aaaf9f3) in folders of 30 or 40 JPEG pairs from 40 photographs, a quarter each with one tone,
border, local edit or strong style: it finds 790 of 800 pairs that are off by one, 764 of 800 mirrored ones, 350 of 400
whose own picture is not in the folder, and 217 of 400 swapped ones (borders 99 of 100, added objects none); it raises
13 false alarms on 1,600 right pairs, 11 of them styles. tests/test_doctor.py counts fewer pairs at each run.
"""
import functools

import numpy as np
from PIL import Image, ImageFilter

from library.data import picture_files
from library.data.automatic_mask import copy_size

SIDE = 64 # pixels of the copies, whatever the aspect
SHIFT = 3 # pixels by which the two may be shifted
ZOOMS = 1, 0.85, 0.72 # how much of a picture is compared: an edit may have put it into a frame
# Chosen on photographs: two different ones fit by 0.05, at most 0.2; a photograph and its edit by 0.3 to 1.
CLEAR = 0.22 # a fit above this is no accident
BETTER = 2.0 # a mirrored control, or another pair's, that fits so many times better than the own is the right one
NONE = 0.15 # a pair below this does not correspond, if it is also
USUAL = 0.95 # ... below so many of the target's fits with other controls: a sketch may fit badly, but others fit worse
NEAR = 64 # neighbours by name that a target without correspondence is compared with: lists slip by a few files
TURNS = { # {how the target shows the control: the same of an array}
    "mirrored left to right": np.fliplr, "mirrored upside down": np.flipud,
    "turned by 180 degrees": functools.partial(np.rot90, k=2), "turned by 90 degrees counterclockwise": np.rot90,
    "turned by 90 degrees clockwise": functools.partial(np.rot90, k=3)}
# swapped
LEAST = 12 # pairs with one prompt, from which on they have a direction
DISTINCT = 2.5 # times the usual deviation, of the change that they share
STEADY = 0.75 # part of them that must go along with it
AGAINST = -0.5 # times the change that they share, of a pair that goes back

# ---- other picture, mirrored -----------------------------------------------------------------------------------------

def small_copy(image):
    """-> a PIL image's brightness, uint8 (SIDE, SIDE)."""
    return np.asarray(image.convert("L").resize((SIDE, SIDE), Image.BOX))

def edges_of(small_HW):
    """-> the Fourier transform of the edges, in which their directions are doubled, so that an edge and its negative
    are the same; an edge is as strong as the square root of its gradient; all together have length 1."""
    dy, dx = np.gradient(small_HW.astype(np.float32))
    slope = dx + 1j * dy
    edges = slope**2 / (abs(slope) + 1e-6) ** 1.5
    window = np.sin(np.pi * (np.arange(SIDE) + 1) / (SIDE + 1)) ** 0.4
    window = np.outer(window, window)
    edges = edges * window
    edges -= window * edges.mean() / window.mean() # all pictures have more upright and level edges than slanting ones
    return np.fft.fft2(edges / (np.linalg.norm(edges) + 1e-6))

def edges_of_middles(small_HW):
    """-> edges_of a picture's middle, at each of ZOOMS: (Z, SIDE, SIDE)."""
    image, edges = Image.fromarray(small_HW), []
    for zoom in ZOOMS:
        rest = (1 - zoom) * SIDE / 2
        middle = image.resize((SIDE, SIDE), Image.BILINEAR, (rest, rest, SIDE - rest, SIDE - rest))
        edges.append(edges_of(np.asarray(middle)))
    return np.array(edges)

# one row of the inverse transform for each shift: only these are needed
SHIFTS = np.exp(2j * np.pi / SIDE * np.outer(np.arange(-SHIFT, SHIFT + 1), np.arange(SIDE))) / SIDE

def fit(target_ZHW, control_HW):
    """-> how well edges_of_middles of a target fit edges_of a control, at most 1: the best of all zooms and shifts."""
    return float((SHIFTS @ (target_ZHW.conj() * control_HW) @ SHIFTS.T).real.max())

def odd_pairs(names, copies, excused=()):
    """-> [(kind, index, words)] of the pairs that do not correspond, or only if mirrored. copies: small_copy of the
    target and of the control of each pair; excused: indices of pairs that need not correspond, as their shapes differ
    or they moved, unless another control fits."""
    @functools.lru_cache(2 * NEAR)
    def control_edges(i):
        return edges_of(copies[i][1])
    found, alone, fitting = [], [], 0
    for i, (target, control) in enumerate(copies):
        edges = edges_of_middles(target)
        own = fit(edges, control_edges(i))
        if own < CLEAR: # the edit may have taken a frame away
            own = max(own, fit(edges_of_middles(control), edges[0]))
        fitting += own > CLEAR
        turned = {how: fit(edges, edges_of(turn(control))) for how, turn in TURNS.items()}
        how = max(turned, key=turned.get)
        near = range(max(0, i - NEAR // 2), min(len(copies), i + NEAR // 2 + 1))
        others = [fit(edges, control_edges(j)) for j in near] if own < CLEAR else [own]
        if max(turned[how], *others) > max(CLEAR, BETTER * own):
            if turned[how] > max(others):
                found.append(("turned" if "90" in how else "mirrored", i, f"the target shows the control {how}"))
            else:
                found.append(("other picture", i, f"shows the control of {names[near[np.argmax(others)]]}"))
        elif own < min(NONE, np.quantile(others, USUAL)) and i not in excused:
            alone.append(("other picture", i, "target and control have no edges in common"))
    # an edit that makes new pictures is no mistake of single pairs
    return sorted(found + alone if 2 * fitting > len(copies) else found, key=lambda one: one[1])

# ---- what a program has done to one side ----------------------------------------------------------------------------

# detail, in the middle of copies of up to 1024 pixels
MIDDLE = 256
FINEST, COARSER = 1, 4 # radii of blurs: the first takes away the finest detail, the second also the middle one
ALIKE = 8 # levels that the rest may differ by, where two pictures count
STRONG = 0.96 # ... and part of these that is too weak in its middle detail
FINE_SOFTER = 1.15 # times, of the finest detail
# how much more the finest detail has changed than the middle one, as logarithms: another contrast changes both alike;
# JPEG and grain change hardly anything but the finest
LEAST_MORE, MOST_MORE = 1.15, 15

def change_of_detail(target, control):
    """-> by how many times the target's finest detail is stronger than the control's (two PIL images), where the two
    are alike and most of it has changed: by a blur, sharpening or a poor encoding, not by an edit or another contrast.
    1.0 otherwise."""
    size = copy_size(target.size, min(1024, max(target.size), max(control.size)))
    middle = [min(side, MIDDLE) for side in size]
    levels = [] # of both pictures: as it is, without the finest detail, without the middle detail
    for image in (target, control):
        left, top = [(1 - part / side) / 2 * full for part, side, full in zip(middle, size, image.size)]
        grey = image.resize(middle, Image.LANCZOS, (left, top, image.width - left, image.height - top)).convert("L")
        levels.append([grey, *[grey.filter(ImageFilter.BoxBlur(radius)) for radius in (FINEST, COARSER)]])
    sharp_2HW, blurred_2HW, coarse_2HW = np.array(levels, np.float32).swapaxes(0, 1)
    alike_HW = abs(coarse_2HW[0] - coarse_2HW[1]) < ALIKE
    if alike_HW.mean() < 0.2:
        return 1.0
    finest, other_finest = np.std((sharp_2HW - blurred_2HW)[:, alike_HW], -1) + 0.2
    middle_2HW = abs(blurred_2HW - coarse_2HW)
    weaker_HW = middle_2HW.min(0) # a place that was blurred as an edit is weak
    strong_HW = alike_HW & (weaker_HW >= np.quantile(weaker_HW[alike_HW], STRONG))
    middle, other_middle = middle_2HW[:, strong_HW] + 0.2
    fine, change = np.log(finest / other_finest), np.median(np.log(middle / other_middle))
    if change * fine > 0 and LEAST_MORE * abs(change) < abs(fine) < MOST_MORE * abs(change):
        if abs(fine) > np.log(FINE_SOFTER):
            return float(np.exp(fine))
    return 1.0

def change_by_mask(target, control, mask):
    """-> by how many levels small copies of a target and of its control (PIL images) differ where a mask is white, and
    where it is black. Not for a mask that is all white or black."""
    white_HW = np.asarray(mask.convert("F").resize((SIDE, SIDE), Image.BOX)) / 255
    change_HW = abs(colours_of(target) - colours_of(control)).max(-1)
    return [(change_HW * part_HW).sum() / part_HW.sum() for part_HW in (white_HW, 1 - white_HW)]

# lost profile
TELLS = 3 # levels by which a profile must change a colour to count
BARE = 0.5 # of the difference that is left with the profile: without it the two fit better if less is left

def read_side(path):
    """A file -> (picture as read_image returns it; its numbers without its colour profile, as small_copy has them, or
    None if it has none that changes colours; clear_parts)."""
    image = picture_files.decode(path, None)
    bare, profile = None, image.info.get("icc_profile")
    if profile and picture_files.find_conversion(profile, image.mode)[0] and image.mode in ("RGB", "RGBA", "CMYK", "L"):
        bare = colours_of(image)
    return picture_files.to_rgb(image, path), bare, clear_parts(image)

def colours_of(image):
    return np.asarray(image.resize((SIDE, SIDE), Image.BOX).convert("RGB"), float)

def profile_is_lost(bare, picture, other):
    """Whether a picture's numbers without its profile (bare) agree with the other picture, and those with it do not."""
    with_profile, other = colours_of(picture), colours_of(other)
    tells = abs(bare - with_profile).max(-1) > TELLS
    far, far_bare = [abs(colours - other).max(-1)[tells] for colours in (with_profile, bare)]
    return tells.mean() > 0.01 and np.mean(far_bare < BARE * far) > 0.5

def clear_parts(image):
    """-> {place: pixels that are transparent there}: of an edge, how many rows or columns are; in the middle, how many
    pixels. {} for an object that was cut out."""
    if not image.has_transparency_data:
        return {}
    clear_HW = np.asarray(image.convert("RGBA").getchannel("A")) < 128
    h, w = clear_HW.shape
    edges = {"top": clear_HW, "bottom": clear_HW[::-1], "left": clear_HW.T, "right": clear_HW.T[::-1]}
    counts = {f"at the {edge}": int(np.argmin(lines.mean(1) > 0.5)) for edge, lines in edges.items()}
    counts = {place: count for place, count in counts.items() if count}
    hole = int(clear_HW[h // 8:-(h // 8), w // 8:-(w // 8)].sum())
    if hole < 0.001 * clear_HW.size:
        return counts
    return {} if counts else {"in the middle": hole}

# ---- swapped: target and control changed places ----------------------------------------------------------------------

def looks_of(image):
    """-> numbers of a PIL image that an edit may change in all pictures alike: (11,). Those of brightness count 16
    levels, the others a quarter of a doubling, as one."""
    rgb = image.convert("RGB")
    rgb_HW3 = np.asarray(rgb.resize((SIDE, SIDE), Image.BOX), float)
    grey_HW = rgb_HW3.mean(-1)
    fine = np.asarray(rgb.convert("L").resize((4 * SIDE, 4 * SIDE), Image.BOX), float)
    margin = np.concatenate([grey_HW[0], grey_HW[-1], grey_HW[:, 0], grey_HW[:, -1]])
    levels = [*rgb_HW3.mean((0, 1)), margin.mean() - grey_HW[16:48, 16:48].mean()]
    # how far the colours spread along their three axes (a sepia print's along one), the strength of the edges ...
    spreads = np.sqrt(np.linalg.eigvalsh(np.cov(rgb_HW3.reshape(-1, 3).T)).clip(0)) + 2
    strengths = [abs(np.stack(np.gradient(x))).mean() + 0.5 for x in (fine, grey_HW)]
    others = [margin.std() + 2, np.ptp(rgb_HW3, -1).mean() + 2] # ... unrest of the margin, saturation
    return np.array([*np.array(levels) / 16, *4 * np.log2([*spreads, *strengths, *others])])

def swapped_pairs(changes_NK):
    """-> indices of the pairs whose change goes against that of nearly all. changes_NK: looks_of the target minus that
    of the control, of pairs with the same prompt. [] if they share no change, such as those that add a hat."""
    if len(changes_NK) < LEAST:
        return []
    along_N = np.ones(len(changes_NK))
    for _ in range(4): # Fisher's discriminant, of those that go along
        kept_NK = changes_NK[along_N > 0]
        shared_K = np.median(kept_NK, 0)
        off_NK = kept_NK - shared_K
        spread_KK = off_NK.T @ off_NK / len(kept_NK) + 0.5 * np.eye(len(shared_K))
        weight_K = np.linalg.solve(spread_KK, shared_K)
        distinct = shared_K @ weight_K # squared
        along_N = changes_NK @ weight_K / (distinct + 1e-9) # 1: just the change that they share; -1: its reverse
        if (along_N > 0.3).mean() < STEADY:
            return []
    return np.flatnonzero(along_N < AGAINST).tolist() if distinct > DISTINCT**2 else []
