"""
An index joins a dataset's samples to their encoded files: one JSON file, CACHE_DIR/<model>-<data>.json. cache.py and
train.py write it when all files are there. tools/prune.py knows from it which files are needed, and train.py takes it
as --data, also on a machine that has a copy of the cache folder, and no pictures.

An index may come from a stranger. So every field is checked before it is used: it names files of its own folder only,
and no number is larger than cache.py would write. The pictures that it names may lie anywhere, as it was perhaps made
here; they are compared with their hashes, and one with another hash is never shown, as a run folder or a page may be
passed on, and the picture with it.
"""
import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path

import common
from common import InputError, LONG_TEXT, MAX_PIXELS, tell
from library.data import dataset
from library.data.dataset import MAX_TOKENS, Planned, overlay_roles
from library.files import stray_files, tensor_files
from library.files.tensor_files import VERSION

def row_of(sample):
    """Planned -> its line of an index, a dictionary."""
    row = dict(name=sample.name, root=sample.root, controls=sample.controls, prompts=sample.prompts,
               target=sample.target)
    for role in overlay_roles(): # each is a field, too
        row[role] = sample.overlays.get(role)
    texts = [[*key, text] for key, text in sample.texts.items()] # JSON has no keys of two parts
    return row | dict(repeats=sample.repeats, contents=sample.contents, sizes=sample.sizes,
                      prompt_sizes=sample.prompt_sizes, encodings=sample.encodings, texts=texts)

def write_index(path, samples, geometry, fingerprints, roots=()):
    """Writes JSON that read_index reads, a line for each sample; an index that is right already is left alone, and that
    of other datasets (roots), or other sizes, is not replaced in silence. Files are named relative to the index's
    folder, so that the folder may be copied elsewhere. geometry: as for cache.plan_sizes; fingerprints:
    cache.encoder_fingerprints."""
    rows = list(map(row_of, samples))
    roots = [str(Path(root).resolve()) for root in roots]
    index = dict(version=VERSION, models=fingerprints, roots=roots, geometry=geometry, samples=rows)
    text = json.dumps(index, default=lambda file: file.relative_to(path.parent).as_posix())
    data = text.replace('{"name"', '\n{"name"').encode() # (quotes in a text are escaped)
    before = b"" # there is none, or it is too large to be one
    if path.is_file() and path.stat().st_size <= LONG_TEXT:
        before = path.read_bytes()
    if before == data:
        return
    with contextlib.suppress(Exception): # there is none, or a damaged one
        old = json.loads(before)
        for what in ("roots", "geometry"):
            if old[what] != index[what]:
                tell(f"warning: {path}: replaces the index of {len(old['samples'])} samples with other {what} "
                     f"({str(old[what]):.300}); give another --cache_dir to keep both", file=sys.stderr)
    common.write_file(path, data, rb'\A{"version": "[\d.]+", "models"')

def read_index(path):
    """-> ([Planned], geometry, fingerprints of the encoders, the folders or manifests that were encoded). InputError if
    it is damaged."""
    path = Path(path)
    text = stray_files.read_text(path, LONG_TEXT)
    for folder in ("latents", "text"):
        stray_files.refuse_outside(path.parent / folder, path.parent)
    try:
        index = json.loads(text)
        if index["version"] != VERSION or not index["samples"]:
            raise ValueError(f"version {index['version']!r:.20}, {len(index['samples'])} samples")
        if not fits(index, INDEX) or not index["geometry"]["target_pixels"]:
            raise ValueError("a field that cache.py would not write")
        samples = []
        for n, row in enumerate(index["samples"], 1):
            try:
                samples.append(read_row(row, path.parent))
            except ValueError as e:
                raise ValueError(f"sample {n}: {e}")
        if (uses := sum(sample.repeats for sample in samples)) > 10**7: # train.py lists them
            raise ValueError(f"{uses:,} uses of samples in an epoch")
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{path}: no index that this version can read ({type(e).__name__}: {common.first_words(e)}); "
                         "run cache.py again")
    for sample in samples:
        for encoded in (*sample.encodings, *sample.texts.values()):
            if encoded["file"].is_symlink():
                stray_files.refuse_outside(encoded["file"], path.parent)
    return samples, index["geometry"], index["models"], index["roots"]

# ---- what a field may hold -------------------------------------------------------------------------------------------

def fits(value, form):
    """Whether a value of JSON has this form: a type; a range, for a whole number; a pattern, for the bytes of a text;
    {name: its form}; [the form of each item], or of several forms a row of these; (one form, or another)."""
    if isinstance(form, tuple):
        return any(fits(value, one) for one in form)
    if isinstance(form, range):
        return type(value) is int and value in form # True is no number here
    if isinstance(form, re.Pattern):
        return isinstance(value, str) and bool(form.fullmatch(os.fsencode(value)))
    if isinstance(form, list):
        if not isinstance(value, list):
            return False
        forms = form if form[1:] else form * len(value)
        return len(forms) == len(value) and all(map(fits, value, forms))
    if isinstance(form, dict):
        known = isinstance(value, dict) and value.keys() <= form.keys()
        return known and all(fits(value.get(name), form[name]) for name in form)
    return type(value) is form

TABLE = 4096 # rotary positions of a side, and of a text (rope_patch.ROPE_TABLE, which would import torch)
NONE = type(None)
PATH = re.compile(rb"(?!.*[^/]{256})[^\0]{1,4000}", re.DOTALL) # to anywhere, of a picture that was encoded
# A relative name that stays in its folder, on any system: no drive, no part that is empty, . or .., or too long.
PART = rb"(?!\.\.?([/\\]|\Z))[^\0/\\]{1,255}"
NAME = re.compile(rb"(?=.{1,3000}\Z)(?![A-Za-z]:)" + PART + rb"([/\\]" + PART + rb")*", re.DOTALL)
# a picture's whole hash, as dataset.picture_facts has it: who has not the picture cannot name it
HASH = re.compile(rb"[0-9a-f]{64}( in sRGB)?")
LATENTS = re.compile(rb"latents/[0-9a-f]{32}\.safetensors")
TEXT = re.compile(rb"text/[0-9a-f]{32}\.safetensors")
SIDE = range(1, MAX_PIXELS + 1) # in pixels, or in tokens
SIZES = [[SIDE, SIDE]] # (width, height) of each picture
AREA = (range(32 * 32, MAX_PIXELS + 1), re.compile(b"native"))
INDEX = dict(version=str, models=dict, roots=[PATH], samples=list,
             geometry=dict(target_pixels=[AREA], control_pixels=AREA, upscale=bool))
SAMPLE = dict( # and the fields of overlay_roles
    name=NAME,
    root=NAME,
    target=(NONE, PATH),
    controls=[PATH],
    prompts=[str],
    repeats=range(1, 10_001),
    contents=dict,
    sizes=SIZES,
    prompt_sizes=SIZES,
    encodings=[dict(file=LATENTS, img_shapes=[[range(1, 2), SIDE, SIDE]], mask=(NONE, re.compile(b"auto")))],
    texts=[[str, bool, dict(file=TEXT, tokens=range(1, TABLE + 1))]])

def read_row(row, folder):
    """What row_of makes -> Planned, with files in this folder. ValueError unless each field holds what
    cache.plan_sample writes, and they agree."""
    if not fits(row, SAMPLE | dict.fromkeys(overlay_roles(), (NONE, PATH))):
        raise ValueError("a field that cache.py would not write")
    overlays = {role: row.pop(role) for role in overlay_roles() if row.get(role)}
    fields = {name: row[name] for name in SAMPLE}
    texts = {(prompt, with_pictures): text for prompt, with_pictures, text in row["texts"]}
    for encoded in (*row["encodings"], *texts.values()):
        encoded["file"] = folder / encoded["file"]
    sample = Planned(**fields | dict(texts=texts, overlays=overlays))
    pictures = dataset.pictures_of(sample)
    if not sample.contents.keys() >= {*pictures, *sample.overlays.values()}:
        raise ValueError("contents lack a picture")
    if not fits(list(sample.contents.values()), [HASH]):
        raise ValueError("contents are no hashes")
    if sample.controls and not sample.target:
        raise ValueError("controls without a target")
    if not (sample.prompts and sample.encodings and texts):
        raise ValueError("no prompts, no encodings or no texts")
    for encoding in sample.encodings:
        shapes = encoding["img_shapes"]
        if not len(shapes) == len(sample.sizes) == (len(pictures) or len(shapes)): # (an imported cache names none)
            raise ValueError(f"{len(shapes)} img_shapes, {len(sample.sizes)} sizes and {len(pictures)} pictures")
        if any(h * w > MAX_TOKENS for _, h, w in shapes):
            raise ValueError("a picture is too large")
        left = TABLE - max(max(h, w) for _, h, w in shapes) // 2 # as in cache.check_lengths
        if any(text["tokens"] > left for text in texts.values()):
            raise ValueError(f"a text is longer than {left} tokens, or a side is too long")
    return sample

def check_tensors(tensors, sample, encoded):
    """InputError unless what was read of a file is what the index, or the plan, says of it. encoded: one of
    sample.encodings, or of the values of sample.texts."""
    file = encoded["file"]
    # its digest is right, but it may be foreign
    tensor_files.refuse_not_finite(file, tensors, "cache.py --verify encodes it again")
    if "tokens" in encoded:
        prefix = "" if "prompt_embed" in tensors else "empty_"
        return check_rows(tensors, file, {f"{prefix}prompt_embed": encoded["tokens"]})
    target, *controls = [h * w for _, h, w in encoded["img_shapes"]]
    rows = dict(control_latent=sum(controls))
    masks = {}
    if sample.target or not sample.controls:
        rows["pixel_latent"] = target
    for name in overlay_roles():
        role = dataset.ROLES[name]
        if name in sample.overlays or role.tensor in tensors: # (--mask auto makes one without a file)
            (masks if role.is_mask else rows)[role.tensor] = target
    check_rows(tensors, file, rows, [64])
    check_rows(tensors, file, masks, [])

def check_rows(tensors, file, rows, columns=None):
    """InputError unless these tensors of a file have so many rows: {name: rows}. columns: [how many they have], which
    may be any number; [] for a number in each row."""
    for name, count in rows.items():
        found = tensors.get(name)
        shape = [] if found is None else list(found.shape)
        rest = (shape[1:2] or [0]) if columns is None else columns
        if shape != [count, *rest] or not found.is_floating_point():
            raise InputError(f"{file}: {name} is {shape or 'missing'}, and {count} rows of floats are wanted; delete "
                             "this file, and run cache.py again")

def open_index(path, fingerprints, texts_of, args):
    """read_index -> (samples, geometry). InputError if other encoders have encoded them than those of these
    fingerprints, or if a file is missing, or a text that texts_of(sample) asks for. A line says if the dataset was
    edited since."""
    samples, geometry, encoded_by, roots = read_index(path)
    # each encoder that is here must be the one that has encoded
    for encoder, here in fingerprints.items():
        if encoded_by.get(encoder, here) != here: # (tools/import_data.py does not know who encoded a cache)
            raise InputError(f"{path}: encoded with another model than {args.model} ({encoder}); run cache.py with "
                             "this one")
    for sample in samples:
        for text_key in texts_of(sample):
            if text_key not in sample.texts:
                raise InputError(f"{path}: lacks the prompt {text_key} (True: with pictures); run cache.py with the "
                                 "same --val_data, --caption_dropout_rate, --prompt_image_dropout_rate, --preserve* "
                                 "(for --negative_prompt give the dataset)")
        for encoded in (*sample.encodings, *sample.texts.values()):
            if not encoded["file"].is_file():
                raise InputError(f"{encoded['file']}: missing; copy the whole cache, or run cache.py again")
    if changed := changed_since(samples, roots) + edited_pictures(samples, args.cache_dir):
        tell(f"warning: {path}: {len(changed)} samples or pictures are new, edited or gone since it was made, for "
             f"instance {changed[0]}; it trains what was encoded; run cache.py again for the others", file=sys.stderr)
    return samples, geometry

def changed_since(samples, roots):
    """-> names of samples that are new, gone, or have other captions, as far as the datasets are here. (New are also
    those that --skip_bad had left out.)"""
    encoded = {(sample.root, sample.name): sample.prompts for sample in samples}
    here, names = {}, set()
    for root in roots:
        with contextlib.suppress(InputError), contextlib.redirect_stderr(io.StringIO()): # it lies elsewhere by now
            here |= {(sample.root, sample.name): sample.prompts for sample in dataset.read_dataset(root)[0]}
            names.add(dataset.root_name(root))
    keys = sorted(here.keys() | encoded.keys())
    return [name for root, name in keys if root in names and here.get((root, name)) != encoded.get((root, name))]

def edited_pictures(samples, cache_dir):
    """-> the pictures of these samples that were edited since they were encoded, as far as they are here."""
    here = [sample for sample in samples if all(map(os.path.isfile, sample.contents))]
    facts_of, _ = dataset.remember_facts(here, cache_dir)
    edited = []
    for sample in here:
        overlays = [path for role, path in sample.overlays.items() if not dataset.ROLES[role].is_mask]
        for picture in dataset.pictures_of(sample) + overlays:
            with contextlib.suppress(InputError): # the file is another one, and no picture
                _, content = facts_of(picture)
                if content == sample.contents[picture]:
                    continue
            edited.append(picture)
    return edited
