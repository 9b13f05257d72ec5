"""
What is wrong with a dataset, before you spend a training on it? Reads datasets as cache.py does, lists every error,
prints a table of sizes and lengths, and looks for pairs that teach the wrong thing:

    other picture   target and control show different scenes, unlike the other pairs: two lists that are off by one
    mirrored        the target shows the control mirrored, or upside down
    turned          the target shows the control turned by 90 degrees: one of the two has lost its EXIF rotation
    swapped         the pair changes the other way round than the others with its prompt (12 or more): before is after
    identical       target and control are the same picture: intended for "keep the image", otherwise a mistake
    moved           the target shows the scene shifted, zoomed or turned: the LoRA would learn to move pictures
    recoloured      the target's colours have changed everywhere, not only where it was edited
    lost profile    one of the two has a wide colour profile, the other has its numbers without it
    softer          the target has less fine detail than the control: a blur, a resize, a poor encoding
    sharper         ... or more
    clear edge      rows or columns at an edge of one of the two are transparent, and are trained as white
    other shape     target and control have different aspects, or one has more than twice the other's side
    enlarged        training would enlarge the picture to 1.1 times its sides or more, which teaches blur: train with
                    the flags that the finding names
    empty mask      a mask by hand that selects nothing or everything
    duplicate       the same pair and prompt twice
    other caption   the same pair with another prompt
    other target    the same control and prompt with another target
    same control    a further control is one of the others again

The edit itself raises no alarm, but for a tone, which recolours. Errors make the exit status 1; findings do not: they
are a reason to look. The last line is the command that comes next. Writes to OUT report.json (a line for each sample),
index.html (a verdict, the pictures of each finding, and masks by hand, for a browser; click one to compare it with
another at full size) and sheet_*.png (the same as contact sheets). It needs no model.

--mask auto shows the masks that this flag of train.py would make. --align DIR writes a copy of the dataset in which
moved targets are repaired: it warps the target onto its control, and crops both (and the mask) to the region that both
show. It copies all other pictures byte for byte, even if their shapes differ. Then it measures the motion again, in
each half of the picture. It leaves out, and lists, pairs that still move and pairs that were turned by more than 4
degrees; it also leaves out samples with errors.

$ python tools/doctor.py photos                          # -> out/doctor-photos
$ python tools/doctor.py photos drawings --out report
$ python tools/doctor.py photos --mask auto --align photos_aligned
$ python tools/doctor.py photos --target_pixels 512x512 --model Qwen/Qwen-Image-Edit-2509
"""
import functools
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1") # our own threads use all cores already; numpy reads this when it loads
import numpy as np
from PIL import Image, ImageChops

sys.path.insert(0, str(Path(__file__).resolve().parent.parent)) # where the core scripts are
import library # first, so that no other folder is taken for one of our modules
import common
from common import InputError, tell
from library.cli import command_line
from library.cli.command_line import pixels
from library.data import dataset, picture_files
from library.data.automatic_mask import (affine_of, auto_mask, copy_size, find_change, find_motion, fit_motion,
                                         inverse, remaining_motion, same_shape, scaled)
from library.data.picture_files import fit_size, mask_is_empty, read_image, read_mask, reserve_pixels
from library.data.sample_checks import how_many
from library.files import disk
from library.models.hub import MODELS
from library.results import result_files
from library.results.contact_sheets import contact_sheet, shown_prompt, thumbnail
from tools.doctor_pairs import (change_of_detail, looks_of, odd_pairs, profile_is_lost, read_side, small_copy,
                                swapped_pairs)
from tools.import_data import places_of, write_sample
from tools.page_common import (OURS, PAGE, area_words, card, chapters, detail, fold, link, node, save_page, section,
                               table, tile, to_jpeg)

# identical: limits in levels of 0 to 255. JPEG of quality 70 reaches 4.5 and 8
SAME_RMS = 5.0 # root mean square of the difference
SAME_BLOCK = 9.0 # largest mean difference of a block of 8x8 pixels, so that a small edit counts
SCALE = 2.0 # other shape: ratio of the two sides (library/data/automatic_mask.py's ASPECT: ratio of the two aspects)
ENLARGED = 1.1 # ratio of the side in training to the side in the file
# --align: what counts as repaired
TURNED = 4.0 # most degrees: tests/test_automatic_mask.py plants up to 3
REMAINS = 0.5 # most pixels that a corner may still seem to move, in copies of up to 1024: right fits stay below 0.4
# duplicates and contradictions, found on copies of 16x16 pixels
TWIN = 4.0 # RMS in levels below which two pictures are the same: re-encoded copies stay below 3
OTHER = 16.0 # RMS in levels above which two targets are clearly different
REPORT = rb'\A\[(\{"name": |\]\s*\Z)' # how a report.json of ours begins
KINDS = { # {kind of finding: what it means, and what to do}
    "other picture": "Target and control show different scenes, unlike your other pairs: as a rule one of the two "
    "lists of files has slipped. Put the right ones together; until then the pair teaches nonsense.",
    "mirrored": "The target shows the control mirrored, and the LoRA would learn to mirror. If that is not the edit, "
    "turn one of the two.",
    "turned": "The target shows the control turned by 90 degrees. One of the two has probably lost its EXIF rotation, "
    "as in sharp, scikit-image, imageio, torchvision and img2dataset. Export it again, turned upright.",
    "swapped": "The pair changes the other way round than the others with its prompt. Look at it, and let target and "
    "control change places if it is so.",
    "identical": "Target and control are the same picture. That is right where the prompt asks for it, such as \"keep "
    "the image\"; otherwise the pair teaches to do nothing: delete it.",
    "moved": "The target shows the scene shifted, zoomed or turned, and the LoRA would learn to move pictures. --align "
    "DIR writes a copy of the dataset in which these are repaired.",
    "recoloured": "All colours have changed, also those of what was not edited. If the edit is a tone, this is right. "
    "Otherwise two exports or white balances differ: make both pictures with the same settings, or leave the pair out.",
    "lost profile": "One of the two has a wide colour profile, such as a phone's Display P3, and the other the same "
    "numbers without it, so that its colours are duller. A program has probably dropped it (Inkscape, exiftool -all=, "
    "convert -strip, jpegoptim --strip-all). Export that file again, with its profile or converted to sRGB.",
    "softer": "The target has less fine detail than the control, and the LoRA would learn to blur. It was probably "
    "blurred, enlarged, or saved as a WebP or JPEG of low quality. Save it again from its source, at high quality. "
    "All pairs alike: perhaps the edit.",
    "sharper": "The target has more fine detail than the control. It was probably sharpened, or its control blurred, "
    "enlarged, or saved as a WebP or JPEG of low quality. Save both again from their sources, at high quality. All "
    "pairs alike: perhaps the edit.",
    "clear edge": "Rows or columns at an edge are transparent on one side only, and are trained as a white strip. A "
    "program has probably moved the picture (align_image_stack, a layer that was shifted). Crop both pictures alike.",
    "other shape": "Target and control have different aspects, or one is more than twice as large. That is right if "
    "the edit crops or extends pictures; otherwise crop both alike.",
    "enlarged": "Training would enlarge these pictures, which teaches blur. With --no-upscale, which "
    "the command at the top of this page has, they keep their sizes.",
    "empty mask": "The mask selects nothing or everything, and then it says nothing: the pair is trained as one "
    "without a mask. Paint the edited region white on black, or delete the mask.",
    "duplicate": "The pair is there twice, and so it counts twice. Delete one, unless you want that.",
    "other caption": "The same pair has two prompts. That is right if both ask for this target.",
    "other target": "One control and prompt have two targets, and the LoRA would learn their mean. Delete one, or let "
    "the prompts tell them apart.",
    "same control": "Two controls of a sample are the same picture. A second export has probably got the next name "
    "(darktable writes cat_01 beside cat). Delete it, unless the model is to see the picture twice."}
MEANT = {"recoloured": 0.5, "softer": 0.9, "sharper": 0.9} # part of the pairs beyond which it is perhaps the edit
PERHAPS = "That is perhaps the edit, and then there is nothing to do."
NUMBERS = ("aspect: width / height of the target. rounding: by how much that changes, as sides are rounded to 32. "
           "tokens: what a sample costs in memory and time; the image's are 16x16 pixels each.")

# ---- one pair; pairs that are nearly the same ------------------------------------------------------------------------

def examine_pair(target, control):
    """-> {kind of finding: its description} for two PIL images."""
    findings, (w, h), (cw, ch) = {}, target.size, control.size
    scale = math.sqrt(w * h / (cw * ch))
    if not same_shape(target.size, control.size) or max(scale, 1 / scale) > SCALE:
        findings["other shape"] = f"target {w}x{h}, control {cw}x{ch}"
    size = copy_size((w, h))
    same, levels = compare(target, control)
    if same:
        return findings | {"identical": f"differ by {levels:.1f} levels"}
    motion, cast = find_change(target, control)
    if motion is not None:
        dx, dy, zoom, turn = scaled(inverse(motion), max(w, h) / max(size)) # how the target shows the control's scene
        larger = math.hypot(1 + zoom, turn)
        degrees = math.degrees(math.atan2(turn, 1 + zoom))
        findings["moved"] = f"{dx:+.1f} px right, {dy:+.1f} px down, zoom {round(100 * larger - 100, 1) + 0.0:+.1f} %"
        if abs(degrees) >= 0.05:
            findings["moved"] += f", turned {abs(degrees):.1f} degrees {'counter' if degrees < 0 else ''}clockwise"
    if cast is not None:
        findings["recoloured"] = "by {:+.0f} red, {:+.0f} green, {:+.0f} blue".format(*cast)
    if motion is None and cast is None: # both change the detail, too
        ratio = change_of_detail(target, control)
        if ratio != 1:
            findings["softer" if ratio < 1 else "sharper"] = f"{ratio:.2f} times the control's fine detail"
    return findings

def compare(picture, other):
    """-> (whether two PIL images are the same picture, by how many levels they differ in the mean)."""
    size = copy_size(picture.size)
    copies = [image.resize(size, Image.BOX) for image in (picture, other)]
    whole = np.subtract(*copies, dtype=float)
    blocks = np.subtract(*[copy.resize([side // 8 for side in size], Image.BOX) for copy in copies], dtype=float)
    same = np.sqrt((whole.mean(-1) ** 2).mean()) < SAME_RMS and abs(blocks).max() < SAME_BLOCK
    return same, abs(whole).mean()

def examine_files(sides):
    """-> {kind of finding: its description} of what the files of a target and its control say, read_side's."""
    findings = {}
    for (name, side), (other_name, of_other) in itertools.permutations(zip(("target", "control"), sides)):
        (picture, bare, edges), (other, other_bare, other_edges) = side, of_other
        if bare is not None and other_bare is None and profile_is_lost(bare, picture, other):
            findings["lost profile"] = f"the {other_name} has the {name}'s numbers without its colour profile"
        strips = [f"{count} at the {edge}" for edge, count in edges.items() if edge not in other_edges]
        if strips:
            findings["clear edge"] = f"{name}, transparent rows or columns: {', '.join(strips)}"
    return findings

def find_twins(samples, thumbnails):
    """-> [(kind, index of a sample, index of its twin)]. thumbnails: 16x16 pixels of the targets and the controls, (2,
    N, 768). An RMS is never smaller than the difference of the means. So it sorts the samples by the means of their
    controls, and compares each one only with its neighbours."""
    def numbered(values): # equal values get the same number
        return np.unique(values, return_inverse=True)[1]
    order = np.argsort(thumbnails[1].mean(-1), kind="stable")
    samples, mean = [samples[i] for i in order], thumbnails[1, order].mean(-1)
    prompts = numbered([" ".join(s.prompts[0].lower().split()) for s in samples])
    further = numbered([f"{s.controls[1:]} {bool(s.controls)}" for s in samples])
    edits, twins = np.array([bool(s.controls) for s in samples]), []
    targets, controls = thumbnails[:, order].astype(np.float32) - 128
    for start in range(0, len(samples), 256):
        stop = min(start + 256, len(samples))
        rows, others = slice(start, stop), slice(start, np.searchsorted(mean, mean[stop - 1] + TWIN, "right"))
        near = (distances(controls[rows], controls[others]) < TWIN) & (further[rows, None] == further[others])
        near = np.triu(near, 1) # each two samples once
        if not near.any():
            continue
        target, same = distances(targets[rows], targets[others]), prompts[rows, None] == prompts[others]
        for kind, which in (("duplicate", near & same & (target < TWIN)),
                            ("other caption", near & ~same & (target < TWIN)),
                            ("other target", near & same & edits[others] & (target > OTHER))):
            twins += [(kind, *sorted(order[start + pair].tolist())) for pair in np.argwhere(which)]
    return sorted(twins, key=lambda twin: (twin[1], list(KINDS).index(twin[0]), twin[2]))

def distances(a, b):
    """-> the RMS in levels between each row of a and each row of b: (M, 768), (N, 768) -> (M, N)."""
    square_a, square_b = (a ** 2).sum(-1), (b ** 2).sum(-1)
    return np.sqrt(abs(square_a[:, None] + square_b - 2 * a @ b.T) / 768)

# ---- a dataset -------------------------------------------------------------------------------------------------------

def enlargement(size, to):
    """-> by how many times training enlarges the sides of a picture of this size, whose size it makes `to`."""
    if tuple(to) == fit_size(size, "native"): # a small picture, which is not enlarged but to 32 pixels
        return 1
    return math.sqrt(math.prod(to) / math.prod(size))

def examine_pictures(paths):
    """A target and its control, or a target alone -> (examine_pair's findings, 16x16 pixels of both for find_twins,
    small_copy of both for odd_pairs, by how much their looks_of differ). At full size they are held here only."""
    with reserve_pixels(paths):
        sides = list(map(read_side, paths))
        pair = sides[0][0], sides[-1][0] # of a picture alone the target stands for its control
        findings = examine_pair(*pair) | examine_files(sides) if len(sides) == 2 else {}
        small = [np.asarray(image.resize((16, 16), Image.BOX)).flatten() for image in pair]
        return findings, small, list(map(small_copy, pair)), np.subtract(*map(looks_of, pair))

def examine_sample(sample, pipe, args):
    """Opens every picture of a sample -> (row of report.json, {kind of finding: its description}, sizes of the
    controls' copies for the text encoder, and what else examine_pictures has of target and control). InputError if
    something is wrong."""
    import cache
    sizes = [picture_files.image_size(path) for path in dataset.pictures_of(sample)]
    targets, controls, prompt_sizes = cache.plan_sizes(pipe, sizes, vars(args))
    w, h = sizes[0]
    findings, *looks = examine_pictures([sample.target, *sample.controls[:1]])
    controls_seen = []
    for path in sample.controls if len(sample.controls) > 1 else []: # each must be whole
        with reserve_pixels([path]):
            picture = read_image(path)
        small = picture.resize(copy_size(picture.size), Image.BOX)
        for earlier, earlier_path in controls_seen:
            if same_shape(small.size, earlier.size) and compare(small, earlier)[0]:
                findings["same control"] = f"{Path(path).name} is {Path(earlier_path).name} again"
        controls_seen.append((small, path))
    row = dict(name=sample.name, prompts=sample.prompts, sizes=sizes, aspect=w / h, controls=len(controls),
               rounding=abs(targets[0][0] / targets[0][1] / (w / h) - 1),
               image_tokens=[sum(a * b // 256 for a, b in [target, *controls]) for target in targets]) # of 16x16 pixels
    uses = [("", sizes[0], to) for to in targets]
    uses += [("control ", *use) for use in zip(sizes[1:], controls)]
    whose, size, to = max(uses, key=lambda use: enlargement(*use[1:]))
    if enlargement(size, to) >= ENLARGED:
        findings["enlarged"] = "{}{}x{} -> {}x{}".format(whose, *size, *to)
    if sample.mask:
        dataset.check_shape(sample.mask, picture_files.image_size(sample.mask), (w, h))
        with reserve_pixels([sample.mask]):
            mask = read_mask(sample.mask)
        if mask_is_empty(mask):
            findings["empty mask"] = "selects everything" if mask.getextrema()[1] >= 128 else "selects nothing"
    return row, findings, prompt_sizes, *looks

def find_strangers(samples, found, copies, changes):
    """-> what is found of pairs that are unlike the others; this and `found`: [(kind, [index], words)]."""
    pairs = [i for i, sample in enumerate(samples) if sample.controls]
    excused = [i for kind, (i,), _ in found if kind in ("moved", "other shape")]
    odd = odd_pairs([samples[i].name for i in pairs], [copies[i] for i in pairs],
                    {place for place, i in enumerate(pairs) if i in excused})
    strangers = [(kind, [pairs[place]], words) for kind, place, words in odd]
    by_prompt = {}
    for i in pairs:
        by_prompt.setdefault(samples[i].prompts[0], []).append(i)
    for same in by_prompt.values():
        for place in swapped_pairs(np.array([changes[i] for i in same])):
            strangers.append(("swapped", [same[place]], "changes the other way round than the others with this prompt"))
    return strangers

def examine(samples, pipe, args):
    """-> (good samples, rows of report.json, {kind: [(description, index of the sample and of its twin, if it has
    one)]}, problems)."""
    good, rows, found, seen, problems = [], [], [], [], []
    import cache
    work = functools.partial(examine_sample, pipe=pipe, args=args)
    examined = common.run_ahead(work, samples, common.THREADS, 2 * common.THREADS)
    for sample, future in zip(common.progress("examining pairs", samples, unit=" samples"), examined):
        with common.collect_errors(problems):
            row, of_sample, prompt_sizes, *looks = future.result()
            if pipe: # outside of the threads, as a tokenizer serves one thread at a time
                row["text_tokens"] = [cache.prompt_length(pipe, text, prompt_sizes) for text in sample.prompts]
            found += [(kind, [len(good)], words) for kind, words in of_sample.items()]
            rows.append(row | dict(findings=[]))
            seen.append(looks)
            good.append(sample)
    if not good:
        return [], [], {}, problems
    thumbnails, copies, changes = zip(*seen)
    strangers = find_strangers(good, found, copies, changes)
    # between different pictures these say nothing
    different = [indices for kind, indices, _ in strangers if kind in ("other picture", "turned")]
    same_scene = "moved", "recoloured", "softer", "sharper"
    found = [one for one in found if one[0] not in same_scene or one[1] not in different] + strangers
    for kind, i, j in find_twins(good, np.array(thumbnails).swapaxes(0, 1)):
        found.append((kind, [i, j], f"and {good[j].name}"))
    findings = {kind: [] for kind in KINDS}
    for kind, indices, words in found:
        twin = len(indices) > 1 # whose words begin with "and"
        findings[kind].append((f"{good[indices[0]].name}{' ' if twin else ': '}{words}", indices))
        rows[indices[0]]["findings"].append(f"{kind}: {words}")
    return good, rows, findings, problems

def cells_of(sample):
    """-> a sample's row on a sheet: its controls and its target."""
    return [list(map(read_image, sample.controls)), read_image(sample.target)]

def masked_cells(sample, area=None, upscale=True):
    """-> the same row, and the target with all dark that its mask does not count as edited: the mask by hand, or, with
    an area, the one that --mask auto makes when the sample is trained at this area."""
    target = read_image(sample.target)
    if area:
        mask = auto_mask(target, read_image(sample.controls[0]), fit_size(target.size, area, upscale))
    else:
        mask = read_mask(sample.mask)
    dark = target.point(lambda level: level // 4)
    edit = Image.composite(target, dark, mask.resize(target.size, Image.NEAREST)) if mask else "no mask"
    return [*cells_of(sample), edit]

def difference_cells(sample):
    target = read_image(sample.target)
    return [ImageChops.difference(target, read_image(sample.controls[0]).resize(target.size))]

def write_sheets(folder, kind, entries, cells=cells_of,
                 titles=("control", "target", "its control", "its target"), of=0):
    """Writes FOLDER/sheet_KIND_PAGE.png, with 24 entries on each sheet -> the section of the page with the first 24.
    entries: [(description, samples)]; cells(sample) -> its pictures; titles: one for each cell; of: how many there are,
    if these are some of them."""
    from predict import save_png
    cards = []
    for page, start in enumerate(range(0, len(entries), 24), 1):
        rows = []
        for words, samples in entries[start:start + 24]:
            shown = [cell for sample in samples for cell in cells(sample)]
            names = titles[:len(shown)]
            prompt = samples[0].prompts[0]
            said = f"{words}: {shown_prompt(prompt, words)}" if kind == "overview" else words
            rows.append([said, *map(thumbnail, shown)])
            if page == 1:
                tiles = copies(folder, f"{kind}-{len(cards)}", zip(names, shown), words)
                cards.append(card(words, prompt, tiles))
        save_png(contact_sheet(rows, ["", *names]), folder / f"sheet_{kind}_{page}.png".replace(" ", "_"))
    if not cards:
        return None
    count = f", {len(entries)}" if kind in KINDS else ""
    if len(entries) < of:
        count = f", {len(entries)} of {of}"
    if len(entries) > 24:
        count = f", the first 24 of {len(entries)}"
    meaning = detail(KINDS[kind]) if kind in KINDS else None
    return section(kind.capitalize() + count, meaning, node("div", *cards, class_="pairs four"))

def copies(folder, name, cells, words):
    """Writes the pictures of a card to FOLDER/pictures, at up to 1024 pixels -> their tiles. cells: pairs (title,
    picture or list of pictures or text)."""
    tiles = []
    for title, cell in cells:
        for n, image in enumerate(cell if isinstance(cell, list) else [cell]):
            if isinstance(image, Image.Image): # and not the text "no mask"
                path = folder / "pictures" / f"{name}-{len(tiles)}.jpg".replace(" ", "_")
                common.write_file(path, to_jpeg(image, 1024), OURS)
                links, numbered = {0: link(path, folder / "index.html")}, f"{title} {n + 1}" if n else title
                tiles.append(tile(numbered, links, words, image.size))
    return tiles

def numbers_of(rows):
    """-> the table of sizes and lengths: [[title, least, median, greatest]]. "rounding": by how much the aspect of a
    target changes when its sides are rounded to 32 pixels."""
    widths, heights = zip(*[row["sizes"][0] for row in rows])
    columns = {"target width": widths, "aspect": [row["aspect"] for row in rows], "target height": heights,
               "controls": [row["controls"] for row in rows], "rounding, %": [100 * row["rounding"] for row in rows],
               "image tokens": [n for row in rows for n in row["image_tokens"]],
               "text tokens": [n for row in rows for n in row.get("text_tokens", [])]}

    def shown(n):
        return f"{n:.4g}" if n < 100 else f"{n:.0f}"
    return [[title, *map(shown, (min(values), np.median(values), max(values)))]
            for title, values in columns.items() if values] # (without --model there are no text tokens)

# ---- --align ---------------------------------------------------------------------------------------------------------

def copy_to(folder, sample, taken):
    """Copies a sample's files to a dataset's folder -> {place: file}. InputError if an earlier sample has such a place;
    taken: the places of these."""
    for place, file in places_of(sample).items():
        if place in taken: # the names in a manifest need not be distinct in a folder
            raise InputError(f"--align: {file}: another sample also needs the name {place}; rename its target")
    return write_sample(sample, folder, shutil.copyfile)

def align_pair(target, control, *others):
    """Warps the target, and the others that lie over it, onto the control, and crops all to what the two show in common
    -> (target, control, *others), or a text that says why this is not possible. It resamples the target, but only crops
    the control."""
    motion = fit_motion(target, control, find_motion(target, control, copy_size(target.size)))
    degrees = abs(math.degrees(math.atan2(motion[3], 1 + motion[2])))
    if degrees > TURNED:
        return f"turned by {degrees:.1f} degrees"
    left, top, right, bottom = shared_box(motion, target.size, control.size)
    unit_x, unit_y = control.width / target.width, control.height / target.height
    width, height = round((right - left) / unit_x), round((bottom - top) / unit_y)
    for sides in ((width, height), (right - left, bottom - top)): # the limits of picture_files.image_size
        if min(sides) < 32 or max(sides) > 10 * min(sides):
            return "shares too little"
    # from a pixel of the result to the control (resized to the target's size), and from there to the target
    x, step_x = left / unit_x, (right - left) / unit_x / width
    y, step_y = top / unit_y, (bottom - top) / unit_y / height
    a, b, c, d, e, f = affine_of(inverse(motion), target.size)
    affine = a * step_x, b * step_y, a * x + b * y + c, d * step_x, e * step_y, d * x + e * y + f

    def warp(image):
        return image.resize(target.size).transform((width, height), Image.AFFINE, affine, Image.BICUBIC)
    return warp(target), control.crop((left, top, right, bottom)), *map(warp, others)

def shared_box(motion, size, control_size):
    """-> (left, top, right, bottom) of the region of the control that the target shows too, in pixels of the control.
    If the target is turned, it is an upright rectangle within that region."""
    (w, h), (control_w, control_h) = size, control_size
    a, b, c, d, e, f = affine_of(motion, size)
    corners = (0, 0), (w, 0), (w, h), (0, h) # of the target, clockwise
    xs = [(a * x + b * y + c) * control_w / w for x, y in corners] # where the control has them
    ys = [(d * x + e * y + f) * control_h / h for x, y in corners]
    return (math.ceil(max(0, xs[0], xs[3])), math.ceil(max(0, ys[0], ys[1])),
            math.floor(min(control_w, xs[1], xs[2])), math.floor(min(control_h, ys[2], ys[3])))

def repair(sample, folder):
    """-> the sample with aligned pictures, PNGs in `folder`; or a text that says why it cannot be repaired."""
    from predict import save_png
    others = []
    for role, path in sample.overlays.items():
        read = read_mask if dataset.ROLES[role].is_mask else read_image
        others.append(read(path))
    aligned = align_pair(read_image(sample.target), read_image(sample.controls[0]), *others)
    if isinstance(aligned, str):
        return aligned
    if "moved" in examine_pair(*aligned[:2]) or remaining_motion(*aligned[:2]) > REMAINS:
        return "still moves"
    for role, image in zip(("target", "control", *sample.overlays), aligned):
        save_png(image, folder / f"{role}.png")
    return replace(sample, target=folder / "target.png", controls=[folder / "control.png", *sample.controls[1:]],
                   overlays={role: folder / f"{role}.png" for role in sample.overlays})

def write_aligned(out, samples, moved, sheets):
    """Writes the folder `out`, which appears only when it is complete: all samples, those with an index in `moved`
    repaired. Also writes sheets of the differences before and after to the folder `sheets`, and prints the result
    -> a section of the page."""
    left_out, entries, names, taken = [], [], set(), set()
    try:
        with tempfile.TemporaryDirectory(prefix=".align-", dir=out.parent, ignore_cleanup_errors=True) as tmp:
            folder = Path(tmp, "out")
            folder.mkdir()
            for i, sample in enumerate(common.progress("aligning", samples, unit=" samples")):
                if sample.name in names: # a manifest may use a target twice
                    sample = replace(sample, name=f"{sample.name}-{i}")
                names.add(sample.name)
                repaired = repair(sample, Path(tmp)) if i in moved else sample
                if isinstance(repaired, str):
                    left_out.append(f"{sample.name} ({repaired})")
                    continue
                files = copy_to(folder, repaired, taken)
                taken |= files.keys()
                if i in moved:
                    target, control = files[f"target/{sample.name}"], files[f"control/{sample.name}"]
                    entries.append((sample.name, [sample, replace(sample, target=target, controls=[control])]))
            titles = ["difference before", "difference after"]
            page_section = write_sheets(sheets, "aligned", entries, difference_cells, titles)
            disk.rename_folder(folder, out)
    except OSError as e:
        raise common.disk_error(f"--align {out}", e)
    tell(f"{out}: {len(samples) - len(left_out)} samples, {len(moved) - len(left_out)} of them repaired; "
         f"not repaired and left out, {len(left_out)}: {', '.join(left_out) or '-'}")
    return page_section

# ---- command line ----------------------------------------------------------------------------------------------------

def read_flags():
    parser = command_line.Parser(__doc__)
    parser.add_argument("data", nargs="+", help="dataset folders or metadata.jsonl files")
    flag = parser.group("flags")
    flag("--out", None, "folder of the report (default: out/doctor-<data>)", type=Path)
    flag("--target_pixels", [1024 * 1024],
         "target areas of the training, as for cache.py; tokens are counted at each of them", type=pixels, nargs="+",
         metavar="AREA")
    flag("--control_pixels", 1024 * 1024, "control area of the training, as for cache.py", type=pixels, metavar="AREA")
    flag("--upscale", True, "training enlarges smaller pictures to the area, as for cache.py")
    flag("--model", None, "hub id or folder; its tokenizer counts the prompts' tokens (default: none)")
    flag("--skip_bad", False, "exit with status 0 even if there are errors")
    flag("--mask", None, "show the masks that this flag of train.py would make at the first of --target_pixels, in "
         "sheet_mask_*.png (default: none)", choices=["auto"])
    flag("--align", None, "new folder for a copy with moved targets repaired", type=Path, metavar="DIR")
    args = parser.parse_args()
    if len(set(map(os.path.realpath, args.data))) < len(args.data):
        parser.error(f"argument {args.data[0]}: a dataset is given twice; give each once")
    if args.align:
        if not args.align.is_dir() or os.listdir(args.align):
            common.refuse_to_replace(args.align)
        if any(Path(root).resolve() in args.align.resolve().parents for root in args.data):
            raise InputError(f"--align {args.align}: lies in a dataset; give another folder")
    return args

def read_samples(roots):
    """-> (samples, problems). With several datasets, the name of a sample begins with the name of its dataset."""
    samples, problems = [], []
    for root in roots:
        new, faults = dataset.read_dataset(root)
        if len(roots) > 1:
            new = [replace(sample, name=f"{sample.root}/{sample.name}") for sample in new]
        samples, problems = samples + new, problems + faults
    return samples, problems

def perhaps_the_edit(samples, findings):
    """-> the kinds of MEANT that so many pairs share. (A single pair tells nothing.)"""
    pairs = max(sum(bool(sample.controls) for sample in samples), 2)
    return [kind for kind, part in MEANT.items() if len(findings[kind]) > part * pairs]

def verdict_of(samples, findings):
    """-> what the page begins with: how many pairs have a finding. What is perhaps the edit is counted apart."""
    pairs, perhaps = sum(bool(sample.controls) for sample in samples), perhaps_the_edit(samples, findings)
    found = {i for kind, entries in findings.items() for _, indices in entries for i in indices
             if kind not in perhaps}
    what = "pairs" if pairs == len(samples) else "samples"
    line = "".join(f"{len(findings[kind])} of {pairs} pairs are {kind}. {PERHAPS} " for kind in perhaps)
    line += f"{len(found) or 'None'} of {len(samples)} {what} {'has' if len(found) == 1 else 'have'} "
    return line + ("another finding" if perhaps else "a finding") + (": look below." if found else ".")

def next_training(args, enlarged):
    """-> the command of the training that comes next, at the sizes that were judged. enlarged: the pictures that are,
    with these flags."""
    held_out = [root for root in args.data if dataset.root_name(root).endswith("_val")]
    trained = [args.align] if args.align else [root for root in args.data if root not in held_out]
    words = ["python", "train.py", "--model", args.model or MODELS[-1], "--data", *(trained or args.data)]
    if held_out and trained:
        words += ["--val_data", *held_out]
    if args.mask:
        words += ["--mask", args.mask]
    for name, areas in (("--target_pixels", args.target_pixels), ("--control_pixels", [args.control_pixels])):
        if areas != [1024 * 1024]: # train.py's default
            words += [name, *map(area_words, areas)]
    if enlarged or not args.upscale: # small pictures beside large ones are what a batch here can have
        words.append("--no-upscale")
    return common.shell_command(words)

def print_findings(title, numbers, findings, verdict):
    tell(title)
    tell(f"{'':16}     min  median     max")
    for name, *values in numbers:
        tell(f"{name:16}" + "".join(f" {value:>7}" for value in values))
    for kind, entries in findings.items():
        if not entries:
            continue
        names = [words for words, _ in entries]
        line = f"{kind}, {len(names)}: {'; '.join(names[:8])}"
        if len(names) > 8:
            line += "; ..."
        if kind == "enlarged":
            line += "; --no-upscale leaves them at their sizes"
        tell(line)
    tell(verdict.strip())

def write_page(out, title, verdict, samples, numbers, findings, problems, aligned, step, args):
    """Writes the sheets, and index.html, which shows them. aligned: a section of the page, or None; step: what comes
    next."""
    of_kinds = {}
    for kind, entries in findings.items():
        shown = []
        for words, indices in entries:
            shown.append((words, [samples[i] for i in indices]))
        of_kinds[kind] = write_sheets(out, kind, shown)
    probably_meant = [of_kinds.pop(kind) for kind in perhaps_the_edit(samples, findings)]
    parts = [aligned, *of_kinds.values()]
    by_hand = [(sample.name, [sample]) for sample in samples if sample.mask]
    titles = ["control", "target", "edited (dark = not)"]
    some = by_hand[::max(1, len(by_hand) // 24)][:24]
    parts.append(write_sheets(out, "mask by hand", some, masked_cells, titles))
    if args.mask:
        with_mask = functools.partial(masked_cells, area=args.target_pixels[0], upscale=args.upscale)
        empty = [i for _, indices in findings["empty mask"] for i in indices]
        entries = [(sample.name, [sample]) for i, sample in enumerate(samples)
                   if sample.controls and (not sample.mask or i in empty)]
        parts.append(write_sheets(out, "mask", entries, with_mask, titles))
    some = samples[::max(1, len(samples) // 12)][:12]
    parts.append(write_sheets(out, "overview", [(sample.name, [sample]) for sample in some], of=len(samples)))
    for heading, *rest in probably_meant:
        parts.append(section(heading.text, fold("show", *rest)))
    head = node("header", node("h1", f"Before training: {', '.join(map(dataset.root_name, args.data))}"),
                node("p", node("b", verdict)), node("p", f"{title}."), node("p", step),
                chapters(parts))
    errors = section("Errors", *[node("p", problem) for problem in problems])
    tables = section("Numbers", table([["", "least", "median", "greatest"], *numbers]), detail(NUMBERS))
    save_page(out / "index.html", head[0].text, [head, errors, *parts, tables])
    tell(f"{out}: index.html and sheet_*.png show the findings; report.json has all samples")

def main():
    args = read_flags()
    samples, problems = read_samples(args.data) # before the imports, as a wrong name is answered at once
    import cache
    out = args.out or Path("out", dataset.run_name("doctor", args.data))
    parts = ["tokenizer", "processor", "scheduler"]
    pipe = args.model and cache.load_pipeline(cache.find_model(args.model, parts, weights=False))
    if args.align:
        for sample in samples:
            if not sample.controls:
                raise InputError(f"--align: {sample.name} has no control to which it could be aligned; leave --align "
                                 "out")
        disk.try_renames(args.align, f"--align {args.align}")
    disk.try_out(out)
    earlier = {out / "index.html": PAGE, out / "report.json": REPORT}
    for pattern, mark in {"sheet_*_*.png": result_files.OURS, "pictures/*": OURS}.items():
        earlier |= dict.fromkeys(out.glob(pattern), mark)
    for path, mark in earlier.items():
        common.refuse_to_replace(path, mark)
    for path in earlier: # of an earlier report, in case this call ends early
        disk.delete(path, "is of an earlier report", "close what has it open, or give another --out")
    samples, rows, findings, faults = examine(samples, pipe, args)
    problems += faults
    tell(*problems, file=sys.stderr)
    if samples:
        common.write_file(out / "report.json", ("[" + ",\n".join(map(json.dumps, rows)) + "]\n").encode(), REPORT)
        title, numbers, verdict = how_many(samples), numbers_of(rows), verdict_of(samples, findings)
        print_findings(title, numbers, findings, verdict)
        moved = {i for _, indices in findings["moved"] for i in indices}
        aligned = write_aligned(args.align, samples, moved, out) if args.align else None
        step = next_training(args, findings["enlarged"])
        write_page(out, title, verdict, samples, numbers, findings, problems, aligned, f"Next: {step}", args)
        tell("when the errors are corrected, next:" if problems else "next:", f"  {step}")
    sys.exit(1 if not samples or (problems and not args.skip_bad) else 0)

if __name__ == "__main__":
    main()
