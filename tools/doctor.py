"""
What is wrong with a dataset, before you spend a training on it? Reads datasets as cache.py does, lists every error,
prints a table of sizes (image tokens, of 16x16 pixels each, cost memory and time), and looks for pairs that teach the
wrong thing:

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
    transparent     one of the two is transparent along an edge, or has a hole: that is trained as white
    other shape     target and control have different aspects, or one has more than twice the other's side
    enlarged        training would enlarge the picture to 1.1 times its sides or more, which teaches blur
    empty mask      a mask by hand that selects nothing or everything
    other region    the two differ outside of the mask, and hardly in it: it is inverted, or another pair's
    duplicate       the same pair and prompt twice
    other caption   the same pair with another prompt
    other target    the same control and prompt with another target
    same control    a further control is one of the others again

The edit itself raises no alarm, but for a tone, which recolours. Errors make the exit status 1; findings do not: they
are a reason to look. The last line is the command that comes next. Writes to OUT report.json (a line for each sample)
and index.html, for a browser: a verdict, pictures of the first 24 pairs of each finding, and of 24 samples all over the
dataset (where there are masks, of those with one). Click a picture to compare it at full size. It needs no model.

--mask auto shows the masks that this flag of train.py would make. --align DIR writes a copy of the dataset in which
moved targets are repaired: it warps the target onto its control (of another size: resized to the target's), and crops
both (and the mask) to the region that both show. It copies all other pictures byte for byte, even if their shapes
differ. Then it measures the motion again, in each half of the picture. It leaves out, and lists, pairs that still move
and pairs that were turned by more than 4 degrees; it also leaves out samples with errors.

$ python tools/doctor.py photos                          # -> out/doctor-photos
$ python tools/doctor.py photos drawings --out report
$ python tools/doctor.py photos --mask auto --align photos_aligned
$ python tools/doctor.py photos --target_pixels 512x512
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
                                         inverse, remaining_motion, same_shape, scaled, show_moved)
from library.data.picture_files import fit_size, mask_is_empty, read_image, read_mask, reserve_pixels
from library.data.sample_checks import how_many
from library.files import disk
from library.models.hub import MODELS
from tools.doctor_pairs import (change_by_mask, change_of_detail, looks_of, odd_pairs, profile_is_lost, read_side,
                                small_copy, swapped_pairs)
from tools.import_data import places_of, write_sample
from tools.page_common import (OURS, area_words, card, chapters, detail, link, node, save_page, section, tile, to_jpeg)

# identical: limits in levels of 0 to 255. JPEG of quality 70 reaches 4.5 and 8
SAME_RMS = 5.0 # root mean square of the difference
SAME_BLOCK = 9.0 # largest mean difference of a block of 8x8 pixels, so that a small edit counts
SCALE = 2.0 # other shape: ratio of the two sides (library/data/automatic_mask.py's ASPECT: ratio of the two aspects)
ELSEWHERE = 2.0 # other region: times the change in the mask
ENLARGED = 1.1 # ratio of the side in training to the side in the file
# --align: what counts as repaired
TURNED = 4.0 # most degrees: tests/test_automatic_mask.py plants up to 3
REMAINS = 0.5 # most pixels that a corner may still seem to move, in copies of up to 1024: right fits stay below 0.4
# duplicates and contradictions, found on copies of 16x16 pixels
TWIN = 4.0 # RMS in levels below which two pictures are the same: re-encoded copies stay below 3
OTHER = 16.0 # RMS in levels above which two targets are clearly different
REPORT = rb'\A\[(\{"name": |\]\s*\Z)' # how a report.json of ours begins
SHOWN = 24 # pairs of a section of the page
KINDS = { # {kind of finding: what it means, and what to do}
    "other picture": "Target and control show different scenes, unlike your other pairs: as a rule one of the two "
    "lists of files has slipped. Put the right ones together.",
    "mirrored": "The LoRA would learn to mirror, or to turn by 180 degrees. If that is not the edit, turn one of the "
    "two. A half turn may be a lost EXIF rotation, see \"turned\".",
    "turned": "One of the two has probably lost its EXIF rotation, as in sharp, scikit-image, imageio, torchvision and "
    "img2dataset. Export it again, turned upright.",
    "swapped": "The pair changes the other way round than the others with its prompt. Look at it, and let target and "
    "control change places if it is so.",
    "identical": "Target and control are the same picture. That is right where the prompt asks for it, such as \"keep "
    "the image\"; otherwise delete the pair.",
    "moved": "The target shows the scene shifted, zoomed or turned, and the LoRA would learn to move pictures. --align "
    "DIR writes a copy of the dataset in which these are repaired.",
    "recoloured": "All colours have changed, also those of what was not edited. If the edit is a tone, this is right. "
    "Otherwise make both pictures with the same settings, or leave the pair out.",
    "lost profile": "One of the two has a wide colour profile, the other the same numbers without it. A program has "
    "probably dropped it (Inkscape, exiftool -all=, convert -strip, jpegoptim --strip-all). Export that file again, "
    "with its profile or converted to sRGB.",
    "softer": "The LoRA would learn to blur. The target was probably blurred, enlarged, or saved as a WebP or JPEG of "
    "low quality. Save it again from its source. All pairs alike: perhaps the edit.",
    "sharper": "The target was probably sharpened, or its control blurred, enlarged, or saved as a WebP or JPEG of low "
    "quality. Save both again from their sources. All pairs alike: perhaps the edit.",
    "transparent": "What is transparent on one side only is trained as white. At an edge a program has probably moved "
    "the picture (align_image_stack, a layer that was shifted): crop both pictures alike. A hole is probably a mask "
    "(of ComfyUI's mask editor): save the picture without transparency, and the mask in mask/.",
    "other shape": "Target and control have different aspects, or one is more than twice as large. That is right if "
    "the edit crops or extends pictures; otherwise crop both alike.",
    "enlarged": "Training would enlarge these pictures, which teaches blur. With --no-upscale they keep their sizes.",
    "empty mask": "The pair is trained as one without a mask. Paint the edited region white on black.",
    "other region": "The pictures differ where the mask is black, and hardly where it is white, which means edited. It "
    "is probably inverted (as by ComfyUI's InvertMask), or another pair's.",
    "duplicate": "The pair is there twice, and so it counts twice. Delete one, unless you want that. If one is held "
    "out, it was trained, too, and its validation says nothing.",
    "other caption": "The same pair has two prompts. That is right if both ask for this target.",
    "other target": "One control and prompt have two targets, and the LoRA would learn their mean. Delete one, or let "
    "the prompts tell them apart.",
    "same control": "Two controls of a sample are the same picture. A second export has probably got the next name "
    "(darktable writes cat_01 beside cat). Delete it, unless the model is to see the picture twice."}
# part of the pairs beyond which it is perhaps the edit
MEANT = {"recoloured": 0.5, "softer": 0.9, "sharper": 0.9, "transparent": 0.4}
PERHAPS = "That is perhaps the edit, and then there is nothing to do."

# ---- one pair; pairs that are nearly the same ------------------------------------------------------------------------

def examine_pair(target, control):
    """-> {kind of finding: its description} for two PIL images."""
    findings, (w, h), (cw, ch) = {}, target.size, control.size
    scale = math.sqrt(w * h / (cw * ch))
    if not same_shape(target.size, control.size) or max(scale, 1 / scale) > SCALE:
        findings["other shape"] = f"target {w}x{h}, control {cw}x{ch}"
    size = copy_size(target.size)
    if is_same(target, control):
        return findings | {"identical": "the same picture twice"}
    motion, cast = find_change(target, control)
    if motion is not None:
        dx, dy, zoom, turn = scaled(inverse(motion), max(w, h) / max(size)) # how the target shows the control's scene
        percent = round(100 * math.hypot(1 + zoom, turn) - 100, 1) + 0.0 # no -0.0
        degrees = round(math.degrees(math.atan2(turn, 1 + zoom)), 1) + 0.0
        findings["moved"] = (f"{dx:+.1f} px right, {dy:+.1f} px down, zoom {percent:+.1f} %, "
                             f"turned {degrees:+.1f} degrees clockwise")
    if cast is not None:
        findings["recoloured"] = "by {:+.0f} red, {:+.0f} green, {:+.0f} blue".format(*cast)
    if motion is None and cast is None: # both change the detail, too
        ratio = change_of_detail(target, control)
        if ratio != 1:
            findings["softer" if ratio < 1 else "sharper"] = f"{ratio:.2f} times the control's fine detail"
    return findings

def is_same(picture, other, times=1):
    """Whether two PIL images are the same picture. times: by which the limits are raised, as for copies of other sizes.
    """
    size = copy_size(picture.size)
    copies = [image.resize(size, Image.BOX) for image in (picture, other)]
    whole = np.subtract(*copies, dtype=float)
    blocks = np.subtract(*[copy.reduce(8) for copy in copies], dtype=float)
    return np.sqrt((whole.mean(-1) ** 2).mean()) < times * SAME_RMS and abs(blocks).max() < times * SAME_BLOCK

def examine_files(sides):
    """-> {kind of finding: its description} of what the files of a target and its control say, read_side's."""
    findings = {}
    for (name, side), (other_name, of_other) in itertools.permutations(zip(("target", "control"), sides)):
        (picture, bare, clear), (other, other_bare, other_clear) = side, of_other
        if bare is not None and other_bare is None and profile_is_lost(bare, picture, other):
            findings["lost profile"] = f"the {other_name} has the {name}'s numbers without its colour profile"
        parts = [f"{count} pixels {place}" for place, count in clear.items() if place not in other_clear]
        if parts:
            findings["transparent"] = f"{name}: {', '.join(parts)}"
    return findings

def examine_mask(path, target, control, findings):
    """-> {kind of finding: its description} of a mask by hand. findings: examine_pair's, of these two PIL images."""
    mask = read_mask(path)
    if mask_is_empty(mask):
        return {"empty mask": "selects nothing, or everything"}
    if findings.keys() & {"moved", "recoloured", "other shape"}: # then they differ everywhere
        return {}
    inside, outside = change_by_mask(target, control, mask)
    if outside > ELSEWHERE * inside + 1: # a level of noise
        return {"other region": f"differs by {inside:.0f} levels in the mask, by {outside:.0f} outside"}
    return {}

def find_twins(samples, thumbnails):
    """-> [(kind, index of a sample, index of its twin)]. thumbnails: 16x16 pixels of the targets and the controls, (2,
    N, 768). An RMS is never smaller than the difference of the means. So it sorts the samples by the means of their
    controls, and compares each one only with its neighbours."""
    prompts = [" ".join(sample.prompts[0].lower().split()) for sample in samples]
    further = [(bool(sample.controls), sample.controls[1:]) for sample in samples]
    order = np.argsort(thumbnails[1].mean(-1), kind="stable").tolist()
    targets, controls = thumbnails[:, order].astype(np.float32)
    means = controls.mean(-1)
    twins = []
    for place, i in enumerate(order):
        after = slice(place + 1, np.searchsorted(means, means[place] + TWIN, "right"))
        near = place + 1 + np.flatnonzero(rms(controls[after] - controls[place]) < TWIN)
        for other, levels in zip(near, rms(targets[near] - targets[place])):
            j = order[other]
            same = prompts[i] == prompts[j]
            if further[i] != further[j]:
                continue
            if levels < TWIN:
                twins.append(("duplicate" if same else "other caption", *sorted((i, j))))
            elif same and levels > OTHER:
                twins.append(("other target", *sorted((i, j))))
    return sorted(twins, key=lambda twin: (twin[1], list(KINDS).index(twin[0]), twin[2]))

def rms(levels):
    return np.sqrt((levels ** 2).mean(-1))

# ---- a dataset -------------------------------------------------------------------------------------------------------

def enlargement(size, to):
    """-> by how many times training enlarges the sides of a picture of this size, whose size it makes `to`."""
    if tuple(to) == fit_size(size, "native"): # a small picture, which is not enlarged but to 32 pixels
        return 1
    return math.sqrt(math.prod(to) / math.prod(size))

def examine_pictures(paths, mask=None):
    """A target and its controls, and maybe the file of a mask -> (examine_pair's and other findings, 16x16 pixels of
    the target and of the first control for find_twins, small_copy of both for odd_pairs, by how much their looks_of
    differ). Pictures at full size are held here only."""
    with reserve_pixels([*paths[:2], mask] if mask else paths[:2]):
        sides = list(map(read_side, paths[:2]))
        pair = sides[0][0], sides[-1][0] # of a picture alone the target stands for its control
        findings = examine_pair(*pair) | examine_files(sides) if len(sides) == 2 else {}
        small = [np.asarray(image.resize((16, 16), Image.BOX)).flatten() for image in pair]
        looks = small, list(map(small_copy, pair)), np.subtract(*map(looks_of, pair))
        controls = [pair[1].resize(copy_size(pair[1].size), Image.BOX)]
        if mask:
            findings |= examine_mask(mask, *pair, findings)
    for path in paths[2:]: # each must be whole
        with reserve_pixels([path]):
            picture = read_image(path)
            copy = picture.resize(copy_size(picture.size), Image.BOX)
        for earlier, earlier_path in zip(controls, paths[1:]):
            if same_shape(copy.size, earlier.size) and is_same(copy, earlier):
                findings["same control"] = f"{Path(path).name} is {Path(earlier_path).name} again"
        controls.append(copy)
    return findings, *looks

def examine_sample(sample, args):
    """Opens every picture of a sample -> (row of report.json, {kind of finding: its description}, and what else
    examine_pictures has of target and control). InputError if something is wrong."""
    size, *control_sizes = [picture_files.image_size(path) for path in dataset.pictures_of(sample)]
    targets = [fit_size(size, area, args.upscale) for area in args.target_pixels]
    controls = [fit_size(own, args.control_pixels, args.upscale) for own in control_sizes]
    control_tokens = sum(w * h // 256 for w, h in controls) # of 16x16 pixels
    row = dict(name=sample.name, prompts=sample.prompts, sizes=[size, *control_sizes],
               image_tokens=[w * h // 256 + control_tokens for w, h in targets])
    mask = sample.mask
    if mask:
        dataset.check_shape(mask, picture_files.image_size(mask), size)
    findings, *looks = examine_pictures([sample.target, *sample.controls], mask)
    uses = [(size, target) for target in targets] + [*zip(control_sizes, controls)]
    own, to = max(uses, key=lambda use: enlargement(*use))
    if enlargement(own, to) >= ENLARGED:
        findings["enlarged"] = "{}x{} -> {}x{}".format(*own, *to)
    return row, findings, *looks

def find_strangers(samples, found, copies, changes):
    """-> [(kind, index, words)] of pairs that are unlike the others. found: what is found of each sample; copies,
    changes: examine_pictures's."""
    pairs = [i for i, sample in enumerate(samples) if sample.controls]
    excused = {place for place, i in enumerate(pairs) if {"moved", "other shape"} & found[i].keys()}
    names = [samples[i].name for i in pairs]
    odd = odd_pairs(names, [copies[i] for i in pairs], excused)
    strangers = [(kind, pairs[place], words) for kind, place, words in odd]
    by_prompt = {}
    for i in pairs:
        by_prompt.setdefault(samples[i].prompts[0], []).append(i)
    for same in by_prompt.values():
        for place in swapped_pairs(np.array([changes[i] for i in same])):
            strangers.append(("swapped", same[place], "changes the other way round than the others with this prompt"))
    return strangers

def examine(samples, args):
    """-> (good samples, rows of report.json, {kind: [(description, index of the sample and of its twin, if it has
    one)]}, problems)."""
    good, rows, found, seen, problems = [], [], [], [], []
    work = functools.partial(examine_sample, args=args)
    examined = common.run_ahead(work, samples, common.THREADS, 2 * common.THREADS)
    for sample, future in zip(common.progress("examining pairs", samples, unit=" samples"), examined):
        with common.collect_errors(problems):
            row, of_sample, *looks = future.result()
            good.append(sample)
            rows.append(row | dict(findings=[]))
            found.append(of_sample)
            seen.append(looks)
    if not good:
        return [], [], {}, problems
    thumbnails, copies, changes = zip(*seen)
    for kind, i, words in find_strangers(good, found, copies, changes):
        if kind in ("other picture", "turned"): # between different pictures these say nothing
            for same_scene in ("moved", "recoloured", "softer", "sharper", "other region"):
                found[i].pop(same_scene, None)
        found[i][kind] = words
    everything = [(kind, [i], words) for i, of_sample in enumerate(found) for kind, words in of_sample.items()]
    for kind, i, j in find_twins(good, np.array(thumbnails).swapaxes(0, 1)):
        if kind != "other target":
            targets = [read_image(good[n].target) for n in (i, j)]
            if not is_same(*targets, times=2): # two small edits of one photograph
                continue
        everything.append((kind, [i, j], f"see {good[j].name}"))
    findings = {kind: [] for kind in KINDS}
    for kind, indices, words in everything:
        findings[kind].append((f"{good[indices[0]].name}: {words}", indices))
        rows[indices[0]]["findings"].append(f"{kind}: {words}")
    return good, rows, findings, problems

def shown_pictures(samples):
    """-> [(title, picture)] of a sample, or of a sample and its twin."""
    pictures = []
    for whose, sample in zip(("", "its "), samples):
        for n, path in enumerate(sample.controls):
            pictures.append((f"{whose}control {n + 1}" if n else f"{whose}control", read_image(path)))
        pictures.append((f"{whose}target", read_image(sample.target)))
    return pictures

def with_mask(samples, args):
    """-> the pictures of one sample and, if it has a mask, the target with all dark that this does not count as edited:
    the mask by hand or, without one or if it is empty, what --mask auto makes at the first of --target_pixels."""
    [sample] = samples
    pictures = shown_pictures(samples)
    (_, control), (_, target) = pictures[0], pictures[-1]
    mask = read_mask(sample.mask) if sample.mask else None
    if args.mask and sample.controls and (not mask or mask_is_empty(mask)):
        mask = auto_mask(target, control, fit_size(target.size, args.target_pixels[0], args.upscale))
    if mask:
        dark = target.point(lambda level: level // 4)
        edit = Image.composite(target, dark, mask.resize(target.size, Image.NEAREST))
        pictures.append(("edited (dark = not)", edit))
    return pictures

def differences(samples):
    """-> the pictures of a sample and the same one after --align: where target and control differ."""
    pictures = []
    for when, sample in zip(("before", "after"), samples):
        target = read_image(sample.target)
        control = read_image(sample.controls[0]).resize(target.size)
        pictures.append((f"difference {when}", ImageChops.difference(target, control)))
    return pictures

def show_pairs(folder, title, samples, entries, meaning="", pictures=shown_pictures):
    """Writes the pictures of the first entries to FOLDER/pictures, at up to 1024 pixels -> a section of the page, None
    without entries. entries: [(description, indices of samples)]; pictures(samples) -> [(title, picture)]."""
    cards = []
    for words, indices in entries[:SHOWN]:
        tiles = []
        for name, image in pictures([samples[i] for i in indices]):
            file = f"{title}-{len(cards)}-{len(tiles)}.jpg".lower().replace(" ", "_")
            common.write_file(folder / "pictures" / file, to_jpeg(image, 1024), OURS)
            links = {0: link(folder / "pictures" / file, folder / "index.html")}
            tiles.append(tile(name, links, words, image.size))
        cards.append(card(words, samples[indices[0]].prompts[0], tiles))
    if cards: # else there is no section
        return section(f"{title}, {len(entries)}", detail(meaning), node("div", *cards, class_="pairs four"))

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
    -> (target, control, *others), of one size; or a text that says why this is not possible. A control of the target's
    size is only cropped."""
    motion = fit_motion(target, control, find_motion(target, control, copy_size(target.size)))
    degrees = abs(math.degrees(math.atan2(motion[3], 1 + motion[2])))
    if degrees > TURNED:
        return f"turned by {degrees:.1f} degrees"
    box = left, top, right, bottom = shared_box(motion, target.size)
    sides = right - left, bottom - top
    if min(sides) < 32 or max(sides) > 10 * min(sides): # the limits of picture_files.image_size
        return "shares too little"
    size = target.size
    target, *others = [show_moved(image.resize(size), inverse(motion)) for image in (target, *others)]
    return tuple(image.crop(box) for image in (target, control.resize(size), *others))

def shared_box(motion, size):
    """-> (left, top, right, bottom) of the region of the control that the target shows too, both of this size. If the
    target is turned, it is an upright rectangle within that region."""
    w, h = size
    a, b, c, d, e, f = affine_of(motion, size)
    x, y = np.array([(0, 0), (w, 0), (w, h), (0, h)]).T # the target's corners, clockwise
    xs, ys = a * x + b * y + c, d * x + e * y + f # where the control has them
    return (math.ceil(max(0, xs[0], xs[3])), math.ceil(max(0, ys[0], ys[1])),
            math.floor(min(w, xs[1], xs[2])), math.floor(min(h, ys[2], ys[3])))

def repair(sample, folder):
    """-> the sample with aligned pictures, PNGs in `folder`; or a text that says why it cannot be repaired."""
    others = []
    for role, path in sample.overlays.items():
        read = read_mask if dataset.ROLES[role].is_mask else read_image
        others.append(read(path))
    aligned = align_pair(read_image(sample.target), read_image(sample.controls[0]), *others)
    if isinstance(aligned, str):
        return aligned
    if "moved" in examine_pair(*aligned[:2]) or remaining_motion(*aligned[:2]) > REMAINS:
        return "still moves"
    folder.mkdir(exist_ok=True)
    for role, image in zip(("target", "control", *sample.overlays), aligned):
        image.save(folder / f"{role}.png", icc_profile=None)
    return replace(sample, target=folder / "target.png", controls=[folder / "control.png", *sample.controls[1:]],
                   overlays={role: folder / f"{role}.png" for role in sample.overlays})

def write_aligned(out, samples, moved):
    """Writes the folder `out`, which appears only when it is complete: all samples, those with an index in `moved`
    repaired. Prints the result -> [(index, the repaired sample)]."""
    left_out, taken, aligned = [], set(), []
    try:
        with tempfile.TemporaryDirectory(prefix=".align-", dir=out.parent, ignore_cleanup_errors=True) as tmp:
            folder = Path(tmp, "out")
            folder.mkdir()
            for i, sample in enumerate(common.progress("aligning", samples, unit=" samples")):
                if f"target/{sample.name}" in taken: # a manifest may use a target twice
                    sample = replace(sample, name=f"{sample.name}-{i}")
                repaired = repair(sample, Path(tmp, "repaired")) if i in moved else sample
                if isinstance(repaired, str):
                    left_out.append(f"{sample.name} ({repaired})")
                    continue
                files = copy_to(folder, repaired, taken)
                taken |= files.keys()
                if i in moved:
                    pair = [out / files[f"{role}/{sample.name}"].relative_to(folder) for role in ("target", "control")]
                    aligned.append((i, replace(sample, target=pair[0], controls=pair[1:])))
            if len(left_out) == len(samples):
                raise InputError(f"--align {out}: no sample can be repaired: {', '.join(left_out)}; leave --align out")
            disk.rename_folder(folder, out)
    except OSError as e:
        raise common.disk_error(f"--align {out}", e)
    tell(f"{out}: {len(samples) - len(left_out)} samples, {len(moved) - len(left_out)} of them repaired; "
         f"not repaired and left out, {len(left_out)}: {', '.join(left_out) or '-'}")
    return aligned

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
    flag("--mask", None, "show the masks that this flag of train.py would make at the first of --target_pixels "
         "(default: none)", choices=["auto"])
    flag("--align", None, "new folder for a copy with moved targets repaired", type=Path, metavar="DIR")
    args = parser.parse_args()
    if args.align:
        if not args.align.is_dir() or os.listdir(args.align):
            common.refuse_to_replace(args.align)
        held_out = held_out_of(args.data)
        if held_out and len(held_out) < len(args.data):
            raise InputError(f"--align {args.align}: {held_out[0]} is held out, and would be trained; align it alone")
        if any(Path(root).resolve() in args.align.resolve().parents for root in args.data):
            raise InputError(f"--align {args.align}: lies in a dataset; give another folder")
    return args

def held_out_of(roots):
    """-> those of these datasets that are called as import_data.py --hold_out calls them."""
    return [root for root in roots if dataset.root_name(root).endswith("_val")]

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

def mistakes(samples, findings):
    """-> the kinds of findings that are there, but for what is perhaps the edit, or mended by a flag."""
    apart = [*perhaps_the_edit(samples, findings), "enlarged"]
    return [kind for kind, entries in findings.items() if entries and kind not in apart]

def verdict_of(samples, findings):
    """-> what the page begins with: how many samples have one of the mistakes. Other findings are counted apart."""
    lines = [f"{len(findings[kind])} pairs are {kind}. {PERHAPS}" for kind in perhaps_the_edit(samples, findings)]
    if findings["enlarged"]:
        lines.append(f"{len(findings['enlarged'])} would be enlarged.")
    found = set()
    for kind in mistakes(samples, findings):
        found |= {i for _, indices in findings[kind] for i in indices}
    return " ".join([*lines, f"{len(found)} of {len(samples)} have {'another' if lines else 'a'} finding."])

def next_training(args, enlarged):
    """-> the command of the training that comes next, at the sizes that were judged. enlarged: the pictures that are,
    with these flags."""
    held_out = held_out_of(args.data)
    trained = [args.align] if args.align else [root for root in args.data if root not in held_out]
    words = ["python", "train.py", "--model", MODELS[-1], "--data", *(trained or args.data)]
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

def print_findings(title, rows, findings, verdict):
    tell(title)
    tell(f"{'':16}     min  median     max")
    widths, heights = zip(*[row["sizes"][0] for row in rows])
    controls = [len(row["sizes"]) - 1 for row in rows]
    columns = {"target width": widths, "target height": heights, "controls": controls,
               "image tokens": [n for row in rows for n in row["image_tokens"]]}
    for name, values in columns.items():
        tell(f"{name:16} {min(values):7} {np.median(values):7.0f} {max(values):7}")
    for kind, entries in findings.items():
        if entries:
            line = f"{kind}, {len(entries)}: {'; '.join(words for words, _ in entries[:8])}"
            tell(line + "; ..." if len(entries) > 8 else line)
    tell(verdict)

def write_page(out, title, verdict, samples, findings, problems, aligned, step, args):
    """Writes index.html. aligned: write_aligned's; step: what comes next."""
    parts = []
    if aligned:
        after = [sample for _, sample in aligned]
        entries = [(samples[i].name, [i, len(samples) + n]) for n, (i, _) in enumerate(aligned)]
        parts.append(show_pairs(out, "Aligned", samples + after, entries, pictures=differences))
    first = mistakes(samples, findings)
    for kind in sorted(findings, key=lambda kind: kind not in first):
        parts.append(show_pairs(out, kind.capitalize(), samples, findings[kind], KINDS[kind]))
    some = [i for i, sample in enumerate(samples) if sample.mask or args.mask] or range(len(samples))
    some = [(samples[i].name, [i]) for i in some[::math.ceil(len(some) / SHOWN)]] # from all over the dataset
    parts.append(show_pairs(out, "Overview", samples, some, pictures=functools.partial(with_mask, args=args)))
    head = node("header", node("h1", f"Before training: {', '.join(map(dataset.root_name, args.data))}"),
                node("p", node("b", verdict)), node("p", f"{title}; {SHOWN} at most are shown of a finding. "
                "Mend the originals and import them again, or replace files in these folders: import_data.py may have "
                "linked them, so that to change one changes its original."), node("p", step), chapters(parts))
    errors = section("Errors", *[node("p", problem) for problem in problems])
    save_page(out / "index.html", head[0].text, [head, errors, *parts])
    tell(f"{out}: index.html shows the findings; report.json has all samples")

def main():
    args = read_flags()
    samples, problems = read_samples(args.data)
    out = args.out or Path("out", dataset.run_name("doctor", args.data))
    if args.align:
        disk.try_renames(args.align, f"--align {args.align}")
    disk.try_out(out)
    earlier = [out / "index.html", out / "report.json", *out.glob("pictures/*")]
    for path in earlier:
        common.refuse_to_replace(path, OURS + b"|" + REPORT)
    for path in earlier: # of an earlier report, in case this call ends early
        disk.delete(path, "is of an earlier report", "close what has it open, or give another --out")
    samples, rows, findings, faults = examine(samples, args)
    problems += faults
    tell(*problems, file=sys.stderr)
    if samples:
        common.write_file(out / "report.json", ("[" + ",\n".join(map(json.dumps, rows)) + "]\n").encode(), REPORT)
        title, verdict = how_many(samples), verdict_of(samples, findings)
        print_findings(title, rows, findings, verdict)
        aligned = []
        if args.align:
            aligned = write_aligned(args.align, samples, {i for _, indices in findings["moved"] for i in indices})
        step = next_training(args, findings["enlarged"])
        write_page(out, title, verdict, samples, findings, problems, aligned, f"Next: {step}", args)
        when = "when what was found is mended, or meant, next:" if problems or mistakes(samples, findings) else "next:"
        tell(when, f"  {step}")
    sys.exit(1 if problems or not samples else 0)

if __name__ == "__main__":
    main()
