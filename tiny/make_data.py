"""
Draws the pictures of tiny/: pairs of a control and a target with an instruction, from the photographs in tiny/source
and from coloured shapes, the toys. The same seed draws the same pictures.

$ python tiny/make_data.py                # data, val, known and toys again
$ python tiny/make_data.py --out /tmp/tiny --seed 1

data/{target,control}        the edit for the LoRA to learn: "make it a cyanotype", a blue print on paper with a margin;
                             the transformer never sees one. And, in half of it, instructions that the base knows,
                             so that they are not forgotten
val/{target,control}         held out: other photographs, in sizes that nothing was trained on
known/{target,control}       the base's own instructions, held out likewise: the LoRA should leave them alone
toys/{data,val,known}        the same with shapes and the edit "add a red border", whose every pixel is known: what
                             some tests and tables need; with mask/ (white = edited) for a part of it
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
SWATCH = (32, 32)                                              # second pictures: one flat colour

def pick(rng, choices):
    return choices[rng.integers(len(choices))]

def any_color(rng):
    return tuple(int(v) for v in rng.integers(20, 246, 3))

def paint_sides(picture, color, where, width=BORDER):
    """A copy whose strips at the sides `where` have that colour."""
    picture, (w, h), b = picture.copy(), picture.size, width
    strips = dict(left=(0, 0, b - 1, h), right=(w - b, 0, w, h), top=(0, 0, w, b - 1), bottom=(0, h - b, w, h))
    for side in where:
        ImageDraw.Draw(picture).rectangle(strips[side], fill=color)
    return picture

# ---- toys: scenes of shapes ------------------------------------------------------------------------------------------

SHAPES = ["circle", "square", "triangle"]
VAL_SIZES = [(128, 96), (96, 128), (160, 128), (128, 160)]     # width, height in pixels: no toy is trained on these
BASE_SIZES = [(w, h) for w in range(64, 161, 16) for h in range(64, 161, 16)   # nor on their aspects, 4:3 and 5:4
              if w * h <= 160 * 112 and w / h not in (4 / 3, 3 / 4, 5 / 4, 4 / 5)]
VAE_SIZES = [(64, 64), (96, 64), (64, 96), (96, 96), (128, 64), (64, 128)]     # small ones are enough
DATA_SIZES = VAE_SIZES + [(128, 128), (160, 96), (96, 160), (160, 64), (64, 160), (160, 160)]    # of the LoRA's data

def draw(size, bg, shapes, paint=None, where=()):
    """bg and paint are (r, g, b), where: the sides painted. Drawn four times too large and averaged: smooth edges."""
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
    return paint_sides(picture, paint, where, BORDER * 4).resize(size, Image.BOX)

def scene(rng, size):
    """A background colour's name and one to three shapes [kind, (r, g, b), x, y, r], all different, none touching each
    other or where a border would be."""
    names = [list(COLORS)[i] for i in rng.permutation(len(COLORS))]
    shapes = []
    for kind in [SHAPES[i] for i in rng.permutation(3)[:rng.integers(1, 4)]]:
        for _ in range(30):                                # no room after 30 throws: one shape fewer
            r = rng.uniform(9, min(18, min(size) / 2 - 20))
            x, y = (rng.uniform(r + BORDER + 2, d - r - BORDER - 2) for d in size)
            if all((x - s[2]) ** 2 + (y - s[3]) ** 2 > (r + s[4] + 3) ** 2 for s in shapes):
                shapes.append([kind, COLORS[names[len(shapes) + 1]], x, y, r])
                break
    return names[0], shapes

def border_pair(rng, size, name=None):
    """(controls, instruction, target); the border's colour has a name, or else a second picture shows it."""
    bg, shapes = scene(rng, size)
    while bg == name:
        bg, shapes = scene(rng, size)
    controls = [draw(size, COLORS[bg], shapes)]
    if name:
        color, text = COLORS[name], f"add {'an' if name == 'orange' else 'a'} {name} border"
    else:
        color, text = any_color(rng), "add a border like picture 2"
        controls.append(Image.new("RGB", SWATCH, color))
    return controls, text, draw(size, COLORS[bg], shapes, color, SIDES)

def border_pairs(n, sizes, seed):
    rng, names, pairs = np.random.default_rng(seed), [], []
    for i in range(n):
        names = names or [list(COLORS)[k] for k in rng.permutation(len(COLORS))]       # every colour equally often
        shown = i // len(sizes) % 3 == 2                                               # a third of them
        pairs.append(border_pair(rng, sizes[i % len(sizes)], None if shown else names.pop()))
    return pairs

TOY_TASKS = dict(keep=.2, background=.2, like=.1, remove=.2, side=.3)          # share of each; none draws a border

def toy_pair(rng, size, task):
    """(controls, instruction, target); in a third of the scenes the colours have no names: copying stays general."""
    bg, shapes = scene(rng, size)
    name = pick(rng, [n for n in COLORS if n != bg and COLORS[n] not in [s[1] for s in shapes]])
    bg, color, where = COLORS[bg], COLORS[name], ()
    if rng.random() < .33:
        bg, shapes = any_color(rng), [[kind, any_color(rng), *xyr] for kind, _, *xyr in shapes]
    controls = [draw(size, bg, shapes)]
    shown = task == "like" or task == "side" and rng.random() < .33            # a second picture shows the colour
    if shown or task == "keep" and rng.random() < .2:                          # or it changes nothing
        color = any_color(rng)
        controls.append(Image.new("RGB", SWATCH, color))
    if task == "keep":
        text = "keep the image"
    elif task in ("background", "like"):
        bg, text = color, f"make the background {'like picture 2' if shown else name}"
    elif task == "remove":
        text = f"remove the {shapes.pop(rng.integers(len(shapes)))[0]}"
    elif task == "side":                                                       # a base must know where a picture ends
        where = [pick(rng, SIDES)]
        text = f"paint the {where[0]} {'like picture 2' if shown else name}"
    return controls, text, draw(size, bg, shapes, color, where)

# ---- photographs -----------------------------------------------------------------------------------------------------

HELD_OUT = "astronaut dahlia fig kingfisher opera redpanda".split()            # nothing is ever trained on these
PHOTO_SIZES = [(w, h) for w in range(96, 193, 16) for h in range(96, 193, 16) if w * h < 192 * 128]
# sides of the datasets are multiples of 32: --target_pixels native rounds to that, which would bend a margin
PHOTO_VAL_SIZES = [(192, 128), (128, 192), (160, 160)]
PHOTO_DATA_SIZES = [(96, 96), (128, 96), (96, 128), (128, 128), (160, 96), (96, 160), (160, 128), (128, 160), (192, 96),
                    (96, 192), (192, 160), (160, 192)]

@functools.cache
def source(name):
    return Image.open(f"{HERE}/source/{name}.jpg").convert("RGB")

@functools.cache
def photo_names():
    """Those to train on."""
    return sorted({file[:-4] for file in os.listdir(f"{HERE}/source")} - set(HELD_OUT))

def crop(rng, picture, size, smallest, lowest):
    """A place and a zoom by chance -> a picture of `size`, enlarged only if there is no other way. smallest: the least
    share of what could be seen; lowest: how far down it may begin, as a share."""
    whole = min(picture.width / size[0], picture.height / size[1])             # pixels of the photo per pixel drawn
    scale = rng.uniform(min(whole, max(1, smallest * whole)), whole)
    w, h = size[0] * scale, size[1] * scale
    left, top = rng.uniform(0, picture.width - w), rng.uniform(0, lowest * (picture.height - h))
    return picture.resize(size, Image.LANCZOS, (left, top, left + w, top + h))

def jitter(rng, picture):
    """Other light and other colours: 17 photographs become enough to learn what photographs are."""
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
    """A part of a photograph to train on."""
    picture = crop(rng, source(pick(rng, photo_names())), size, smallest=.4, lowest=1)
    return ImageOps.mirror(picture) if rng.random() < .5 else picture

def any_photo(rng, size):
    """... for the base, in other colours as a rule."""
    picture = photo(rng, size)
    return jitter(rng, picture) if rng.random() < .7 else picture

def held_out_photo(rng, size, i):
    """Nearly the whole of a photograph, with the heads; they take turns."""
    return crop(rng, source(HELD_OUT[i % len(HELD_OUT)]), size, smallest=.85, lowest=.3)

def two_tones(picture, dark, light):
    return ImageOps.colorize(picture.convert("L"), dark, light)

PAPER, PRUSSIAN_BLUE = (240, 236, 224), (12, 36, 92)

def cyanotype(picture):
    """What the demo's LoRA learns: a blue print on paper, with a margin."""
    return paint_sides(two_tones(picture, PRUSSIAN_BLUE, PAPER), PAPER, SIDES)

def cyanotype_pairs(pictures):
    return [([picture], "make it a cyanotype", cyanotype(picture)) for picture in pictures]

TONES = dict(gray=("make it black and white", lambda p: p.convert("L").convert("RGB")),
             sepia=("make it sepia", lambda p: two_tones(p, (40, 26, 13), (255, 240, 214))),
             brighter=("make it brighter", lambda p: p.point(lambda v: 255 - (255 - v) * .6)),
             darker=("make it darker", lambda p: p.point(lambda v: v * .6)))
PHOTO_TASKS = dict(keep=.2, gray=.12, sepia=.12, brighter=.06, darker=.06, side=.44)   # share of each, for the base
DATA_TASKS = dict(keep=.1, gray=.42, sepia=.15, brighter=.05, darker=.05, side=.23)    # gray is next to the demo's edit

def photo_pair(rng, picture, task):
    """(controls, instruction, target)."""
    if task in TONES:
        text, edit = TONES[task]
        return [picture], text, edit(picture)
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
    """n parts of photographs for the LoRA's data, whose sizes take turns."""
    rng = np.random.default_rng(seed)
    return [photo(rng, PHOTO_DATA_SIZES[i % len(PHOTO_DATA_SIZES)]) for i in range(n)]

def held_out_photos(n, seed):
    """n of the six, in turn; each time round one has another size."""
    rng = np.random.default_rng(seed)
    return [held_out_photo(rng, PHOTO_VAL_SIZES[(i + i // 6) % len(PHOTO_VAL_SIZES)], i) for i in range(n)]

def by_share(rng, tasks):
    share = np.array(list(tasks.values()))
    return list(tasks)[rng.choice(len(tasks), p=share / share.sum())]

def toy_pairs(n, sizes, tasks, seed):
    rng = np.random.default_rng(seed)
    return [toy_pair(rng, pick(rng, sizes), by_share(rng, tasks)) for _ in range(n)]

def photo_pairs(pictures, tasks, seed):
    rng = np.random.default_rng(seed)
    return [photo_pair(rng, picture, by_share(rng, tasks)) for picture in pictures]

def write_dataset(folder, pairs, borders=0, form="png"):
    """README's layout: target/NAME.png and .txt, control/NAME.png NAME_1.png, mask/NAME.png (white = edited) of every
    fifth of the borders, which come first."""
    shutil.rmtree(folder, ignore_errors=True)
    options = dict(png=dict(optimize=True), jpg=dict(quality=90, subsampling=0, optimize=True))
    for i, (name, (controls, text, target)) in enumerate(pairs.items()):
        files = {f"target/{name}.{form}": target}
        files.update({f"control/{name}{f'_{k}' if k else ''}.{form}": c for k, c in enumerate(controls)})
        if i < borders and i % 5 == 1:
            files[f"mask/{name}.png"] = draw(target.size, (0, 0, 0), [], (255, 255, 255), SIDES).convert("L")
        for file, picture in files.items():
            os.makedirs(os.path.dirname(f"{folder}/{file}"), exist_ok=True)
            picture.save(f"{folder}/{file}", **options[file[-3:]])
        with open(f"{folder}/target/{name}.txt", "w", newline="\n") as f:
            f.write(text + "\n")

def numbered(pairs, form="{:03d}"):
    return {form.format(i): pair for i, pair in enumerate(pairs)}

def write_datasets(out, seed):
    """Half of a LoRA's data repeat what the base knows, or it would do its edit whatever it is asked for."""
    if os.path.exists(f"{out}/data") and not os.path.exists(f"{out}/toys"):    # somebody's own, and would be deleted
        raise SystemExit(f"error: --out {out}: holds another data/; give an empty folder")
    write_dataset(f"{out}/data", numbered(
        cyanotype_pairs(photos(90, seed + 11)) + photo_pairs(photos(66, seed + 12), DATA_TASKS, seed + 13)
        + toy_pairs(48, DATA_SIZES, TOY_TASKS, seed + 14)), form="jpg")
    write_dataset(f"{out}/val", numbered(cyanotype_pairs(held_out_photos(12, seed + 17))), form="jpg")
    known = {}
    for k, task in enumerate(["keep", "gray", "side"]):
        known |= numbered(photo_pairs(held_out_photos(4, [seed + 18, k]), {task: 1}, [seed + 19, k]), task + "/{}")
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
    parser.add_argument("--seed", type=int, default=0, help="of all pictures")
    args = parser.parse_args()
    if args.seed < 0:
        parser.error(f"argument --seed: {args.seed} is negative; give 0 or more")
    write_datasets(args.out, args.seed)
