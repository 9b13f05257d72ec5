"""
Makes the pictures of tiny/: pairs of a control and a target with a prompt, from the photographs in tiny/source and from
coloured shapes, which are called toys. The same seed gives the same pictures.

$ python tiny/make_data.py                # writes data, val, known and toys
$ python tiny/make_data.py --out /tmp/tiny --seed 1

data/{target,control}        the edit that the LoRA learns: "make it a cyanotype", a blue print on paper with a margin.
                             The base was never trained on one. Most of the pairs repeat prompts that the base
                             knows, so that the LoRA does not forget them
val/{target,control}         for validation: other photographs, in sizes that no training uses
known/{target,control}       also for validation: prompts that the base knows, which the LoRA should not change
toys/{data,val,known}        the same with toys, for tests and tables that need to know every pixel of the target: the
                             edit is "add a red border"; a part of it has mask/ (white = edited)
"""
import argparse
import functools
import os
import shutil

import numpy as np
from PIL import Image, ImageDraw, ImageOps

HERE = os.path.dirname(os.path.abspath(__file__))
COLORS = dict(red=(220, 40, 40), green=(40, 170, 60), blue=(50, 80, 220), yellow=(240, 210, 40),
              purple=(150, 60, 190), orange=(245, 140, 30), cyan=(60, 200, 220), white=(245, 245, 245),
              black=(25, 25, 25), gray=(130, 130, 130))
BORDER = 16                                                    # pixels: one token
SIDES = ["left", "right", "top", "bottom"]
SWATCH = (32, 32)                                              # a second picture, of one flat colour

def pick(rng, choices):
    return choices[rng.integers(len(choices))]

def any_color(rng):
    return tuple(int(v) for v in rng.integers(20, 246, 3))

def paint_sides(picture, color, where, width=BORDER):
    """-> a copy with strips of this colour along the sides `where`."""
    picture, (w, h), b = picture.copy(), picture.size, width
    strips = dict(left=(0, 0, b - 1, h), right=(w - b, 0, w, h), top=(0, 0, w, b - 1), bottom=(0, h - b, w, h))
    for side in where:
        ImageDraw.Draw(picture).rectangle(strips[side], fill=color)
    return picture

# ---- toys: scenes of shapes ------------------------------------------------------------------------------------------

SHAPES = ["circle", "square", "triangle"]
VAL_SIZES = [(128, 96), (96, 128), (160, 128), (128, 160)]     # width, height in pixels: no training has such toys
BASE_SIZES = [(w, h) for w in range(64, 161, 16) for h in range(64, 161, 16)   # nor their aspects, 4:3 and 5:4
              if w * h <= 160 * 112 and w / h not in (4 / 3, 3 / 4, 5 / 4, 4 / 5)]
VAE_SIZES = [(64, 64), (96, 64), (64, 96), (96, 96), (128, 64), (64, 128)]     # the VAE learns from small ones
DATA_SIZES = VAE_SIZES + [(128, 128), (160, 96), (96, 160), (160, 64), (64, 160), (160, 160)]    # of the LoRA's data

def paint_scene(size, bg, shapes, side_color=None, where=()):
    """-> a picture of shapes on a background, with the sides `where` in side_color. It paints four times too large and
    averages, for smooth edges. Colours are (r, g, b)."""
    picture = Image.new("RGB", (size[0] * 4, size[1] * 4), bg)
    pen = ImageDraw.Draw(picture)
    for kind, color, x, y, r in shapes:
        x, y, r = 4 * x, 4 * y, 4 * r
        if kind == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=color)
        elif kind == "square":
            pen.rectangle((x - .88 * r, y - .88 * r, x + .88 * r, y + .88 * r), fill=color)
        else:
            pen.polygon([(x, y - r), (x - r, y + .8 * r), (x + r, y + .8 * r)], fill=color)
    return paint_sides(picture, side_color, where, BORDER * 4).resize(size, Image.BOX)

def scene(rng, size):
    """-> the name of a background colour, and one to three different shapes [kind, (r, g, b), x, y, r], which touch
    neither each other nor the place of a border."""
    names = [list(COLORS)[i] for i in rng.permutation(len(COLORS))]
    shapes = []
    for kind in [SHAPES[i] for i in rng.permutation(3)[:rng.integers(1, 4)]]:
        for _ in range(30):                                # if 30 places do not fit, the scene has a shape less
            r = rng.uniform(9, min(18, min(size) / 2 - 20))
            x, y = (rng.uniform(r + BORDER + 2, d - r - BORDER - 2) for d in size)
            if all((x - s[2]) ** 2 + (y - s[3]) ** 2 > (r + s[4] + 3) ** 2 for s in shapes):
                shapes.append([kind, COLORS[names[len(shapes) + 1]], x, y, r])
                break
    return names[0], shapes

def border_pair(rng, size, name=None):
    """-> (controls, prompt, target). name: of the border's colour; without it a second picture shows the colour."""
    bg, shapes = scene(rng, size)
    while bg == name:
        bg, shapes = scene(rng, size)
    controls = [paint_scene(size, COLORS[bg], shapes)]
    if name:
        color, prompt = COLORS[name], f"add {'an' if name == 'orange' else 'a'} {name} border"
    else:
        color, prompt = any_color(rng), "add a border like picture 2"
        controls.append(Image.new("RGB", SWATCH, color))
    return controls, prompt, paint_scene(size, COLORS[bg], shapes, color, SIDES)

def border_pairs(n, sizes, seed):
    rng, names, pairs = np.random.default_rng(seed), [], []
    for i in range(n):
        names = names or [list(COLORS)[k] for k in rng.permutation(len(COLORS))]       # every colour equally often
        has_swatch = i // len(sizes) % 3 == 2                                          # a third of the pairs
        pairs.append(border_pair(rng, sizes[i % len(sizes)], None if has_swatch else names.pop()))
    return pairs

TOY_TASKS = dict(keep=.2, background=.2, like=.1, remove=.2, side=.3)          # share of each; none adds a border

def toy_pair(rng, size, task):
    """-> (controls, prompt, target). In a third of the scenes the colours have no names, so that the model learns to
    copy any colour."""
    bg, shapes = scene(rng, size)
    name = pick(rng, [n for n in COLORS if n != bg and COLORS[n] not in [s[1] for s in shapes]])
    bg, color, where = COLORS[bg], COLORS[name], ()
    if rng.random() < .33:
        bg, shapes = any_color(rng), [[kind, any_color(rng), *xyr] for kind, _, *xyr in shapes]
    controls = [paint_scene(size, bg, shapes)]
    has_swatch = task == "like" or task == "side" and rng.random() < .33       # a second picture shows the colour
    if has_swatch or task == "keep" and rng.random() < .2:                     # (with "keep" it has no effect)
        color = any_color(rng)
        controls.append(Image.new("RGB", SWATCH, color))
    if task == "keep":
        prompt = "keep the image"
    elif task in ("background", "like"):
        bg, prompt = color, f"make the background {'like picture 2' if has_swatch else name}"
    elif task == "remove":
        prompt = f"remove the {shapes.pop(rng.integers(len(shapes)))[0]}"
    elif task == "side":                                                       # teaches where a picture ends
        where = [pick(rng, SIDES)]
        prompt = f"paint the {where[0]} {'like picture 2' if has_swatch else name}"
    return controls, prompt, paint_scene(size, bg, shapes, color, where)

# ---- photographs -----------------------------------------------------------------------------------------------------

VAL_PHOTOS = "astronaut dahlia fig kingfisher opera redpanda".split()          # no training uses these
PHOTO_SIZES = [(w, h) for w in range(96, 193, 16) for h in range(96, 193, 16) if w * h < 192 * 128]
# the datasets have sides that are multiples of 32: --target_pixels native would resize others, which distorts a margin
PHOTO_VAL_SIZES = [(192, 128), (128, 192), (160, 160)]
PHOTO_DATA_SIZES = [(96, 96), (128, 96), (96, 128), (128, 128), (160, 96), (96, 160), (160, 128), (128, 160), (192, 96),
                    (96, 192), (192, 160), (160, 192)]

@functools.cache
def source(name):
    return Image.open(f"{HERE}/source/{name}.jpg").convert("RGB")

@functools.cache
def photo_names():
    """-> the photographs for training."""
    return sorted({file[:-4] for file in os.listdir(f"{HERE}/source")} - set(VAL_PHOTOS))

def crop(rng, picture, size, smallest, lowest):
    """-> a crop at a random place and zoom, resized to `size`; it is enlarged only if the photograph is too small.
    smallest: least share of the largest crop's sides; lowest: how far down it may begin, as a share of the room."""
    whole = min(picture.width / size[0], picture.height / size[1])             # pixels of the photo per pixel of `size`
    scale = rng.uniform(min(whole, max(1, smallest * whole)), whole)
    w, h = size[0] * scale, size[1] * scale
    left, top = rng.uniform(0, picture.width - w), rng.uniform(0, lowest * (picture.height - h))
    return picture.resize(size, Image.LANCZOS, (left, top, left + w, top + h))

def jitter(rng, picture):
    """Changes light and colours, so that 17 photographs are enough to learn what photographs look like."""
    x = np.asarray(picture) / 255
    if rng.random() < .3:
        x = x ** rng.uniform(.6, 1.6)
    gray = x.mean(2, keepdims=True)
    angle = rng.uniform(-np.pi, np.pi) if rng.random() < .5 else rng.normal(0, .3)
    cross = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) * np.sin(angle) / np.sqrt(3)    # turns hues about gray
    x = gray + rng.uniform(.2, 1.8) * (x - gray) @ (np.cos(angle) * np.eye(3) + cross)
    x = .5 + rng.uniform(.6, 1.25) * (x - .5) + rng.normal(0, .08)
    return Image.fromarray((x.clip(0, 1) * 255).round().astype(np.uint8))

def photo(rng, size):
    """-> a part of a photograph for training."""
    picture = crop(rng, source(pick(rng, photo_names())), size, smallest=.4, lowest=1)
    return ImageOps.mirror(picture) if rng.random() < .5 else picture

def any_photo(rng, size):
    """-> the same for training the base, mostly with changed colours."""
    picture = photo(rng, size)
    return jitter(rng, picture) if rng.random() < .7 else picture

def val_photo(rng, size, i):
    """-> nearly the whole of a photograph for validation, including the heads; i takes them in turn."""
    return crop(rng, source(VAL_PHOTOS[i % len(VAL_PHOTOS)]), size, smallest=.85, lowest=.3)

def two_tones(picture, dark, light):
    return ImageOps.colorize(picture.convert("L"), dark, light)

PAPER, PRUSSIAN_BLUE = (240, 236, 224), (12, 36, 92)

def cyanotype(picture):
    """-> the target that the demo's LoRA learns: a blue print on paper, with a margin."""
    return paint_sides(two_tones(picture, PRUSSIAN_BLUE, PAPER), PAPER, SIDES)

def cyanotype_pairs(pictures):
    return [([picture], "make it a cyanotype", cyanotype(picture)) for picture in pictures]

TONES = dict(gray=("make it black and white", lambda p: p.convert("L").convert("RGB")),
             sepia=("make it sepia", lambda p: two_tones(p, (40, 26, 13), (255, 240, 214))),
             brighter=("make it brighter", lambda p: p.point(lambda v: 255 - (255 - v) * .6)),
             darker=("make it darker", lambda p: p.point(lambda v: v * .6)))
PHOTO_TASKS = dict(keep=.2, gray=.12, sepia=.12, brighter=.06, darker=.06, side=.44)   # share of each, for the base
DATA_TASKS = dict(keep=.1, gray=.39, sepia=.13, brighter=.04, darker=.04, side=.3)     # gray is next to the demo's edit
DATA_TOYS = dict(keep=.1, background=.35, like=.1, remove=.3, side=.15)        # shares of the toys in data/

def photo_pair(rng, picture, task):
    """-> (controls, prompt, target)."""
    if task in TONES:
        prompt, edit = TONES[task]
        return [picture], prompt, edit(picture)
    if task == "keep":
        return [picture], "keep the image", picture
    side, name = pick(rng, SIDES), pick(rng, list(COLORS))
    if rng.random() < .33:
        color = any_color(rng)
        controls = [picture, Image.new("RGB", SWATCH, color)]
        return controls, f"paint the {side} like picture 2", paint_sides(picture, color, [side])
    return [picture], f"paint the {side} {name}", paint_sides(picture, COLORS[name], [side])

# ---- many pairs ------------------------------------------------------------------------------------------------------

def photos(n, seed):
    """-> n parts of photographs for the LoRA's data, in each of PHOTO_DATA_SIZES in turn."""
    rng = np.random.default_rng(seed)
    return [photo(rng, PHOTO_DATA_SIZES[i % len(PHOTO_DATA_SIZES)]) for i in range(n)]

def val_photos(n, seed):
    """-> n pictures of the six validation photographs in turn; each round gives a photograph another size."""
    rng = np.random.default_rng(seed)
    return [val_photo(rng, PHOTO_VAL_SIZES[(i + i // 6) % len(PHOTO_VAL_SIZES)], i) for i in range(n)]

def by_share(rng, tasks):
    """Picks a task at random. tasks: {task: its share}."""
    share = np.array(list(tasks.values()))
    return list(tasks)[rng.choice(len(tasks), p=share / share.sum())]

def toy_pairs(n, sizes, tasks, seed):
    rng = np.random.default_rng(seed)
    return [toy_pair(rng, pick(rng, sizes), by_share(rng, tasks)) for _ in range(n)]

def photo_pairs(pictures, tasks, seed):
    rng = np.random.default_rng(seed)
    return [photo_pair(rng, picture, by_share(rng, tasks)) for picture in pictures]

def write_dataset(folder, pairs, borders=0, form="png"):
    """Writes pairs in README's layout: target/NAME.png and .txt, control/NAME.png and NAME_1.png. The first `borders`
    pairs add a border; every fifth of them also gets mask/NAME.png (white = edited)."""
    shutil.rmtree(folder, ignore_errors=True)
    options = dict(png=dict(optimize=True), jpg=dict(quality=90, subsampling=0, optimize=True))
    for i, (name, (controls, prompt, target)) in enumerate(pairs.items()):
        files = {f"target/{name}.{form}": target}
        files.update({f"control/{name}{f'_{k}' if k else ''}.{form}": c for k, c in enumerate(controls)})
        if i < borders and i % 5 == 1:
            files[f"mask/{name}.png"] = paint_scene(target.size, (0, 0, 0), [], (255, 255, 255), SIDES).convert("L")
        for file, picture in files.items():
            os.makedirs(os.path.dirname(f"{folder}/{file}"), exist_ok=True)
            picture.save(f"{folder}/{file}", **options[file[-3:]])
        with open(f"{folder}/target/{name}.txt", "w", newline="\n", encoding="utf-8") as f:
            f.write(prompt + "\n")

def numbered(pairs, form="{:03d}"):
    return {form.format(i): pair for i, pair in enumerate(pairs)}

def write_datasets(out, seed):
    """Writes all datasets. More than half of the pairs in data/ repeat what the base knows: otherwise the LoRA would do
    its edit whatever the prompt asks for."""
    empty = not os.path.lexists(out) or (os.path.isdir(out) and not os.listdir(out))
    if not empty and not os.path.isdir(f"{out}/toys/known"):                   # not ours to delete
        raise SystemExit(f"error: --out {out}: contains something else; give an empty folder")
    write_dataset(f"{out}/data", numbered(
        cyanotype_pairs(photos(108, seed + 11)) + photo_pairs(photos(76, seed + 12), DATA_TASKS, seed + 13)
        + toy_pairs(60, DATA_SIZES, DATA_TOYS, seed + 14)), form="jpg")
    write_dataset(f"{out}/val", numbered(cyanotype_pairs(val_photos(12, seed + 17))), form="jpg")
    known = {}
    for k, task in enumerate(["keep", "gray", "side"]):
        known |= numbered(photo_pairs(val_photos(4, [seed + 18, k]), {task: 1}, [seed + 19, k]), task + "/{}")
    for k, task in enumerate(["background", "remove"]):
        known |= numbered(toy_pairs(4, VAL_SIZES, {task: 1}, [seed + 20, k]), task + "/{}")
    write_dataset(f"{out}/known", known, form="jpg")
    write_dataset(f"{out}/toys/data", numbered(border_pairs(144, DATA_SIZES, seed + 1)
                                               + toy_pairs(96, DATA_SIZES, TOY_TASKS, seed + 2)), borders=144)
    write_dataset(f"{out}/toys/val", numbered(border_pairs(12, VAL_SIZES, seed + 7)), borders=12)
    known = {}
    for k, task in enumerate(TOY_TASKS):
        known |= numbered(toy_pairs(4, VAL_SIZES, {task: 1}, [seed + 8, k]), task + "/{}")
    write_dataset(f"{out}/toys/known", known)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=HERE, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of all pictures")
    args = parser.parse_args()
    if args.seed < 0:
        parser.error(f"argument --seed: {args.seed} is negative; give 0 or more")
    write_datasets(args.out, args.seed)
