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
import math
import os
import re
import sys
from pathlib import Path

import common
from common import InputError, LONG_TEXT, MAX_PIXELS, NAME_BYTES, tell
from library.data import dataset
from library.data.dataset import MAX_TOKENS, MOST_CONTROLS, Planned, overlay_roles
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
        check_fields(index, dict(geometry=(is_geometry,), models=(is_text_dict,), roots=(is_list, is_path)))
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


# ---- what a field may hold: predicates of anything that JSON can hold -----------------------------------------------

TABLE = 4096 # rotary positions of a side, and of a text (rope_patch.ROPE_TABLE, which would import torch)


def is_text(value):
    return isinstance(value, str)


def is_text_dict(value):
    return isinstance(value, dict) and all(map(is_text, value.values()))


def is_name(value):
    """A relative name that stays in its folder, on any system."""
    if not is_text(value) or "\0" in value or re.match("[A-Za-z]:", value):
        return False
    parts = re.split(r"[/\\]", value)
    return len(value) <= 1000 and parts_fit(parts) and not {"", ".", ".."} & set(parts)


def is_path(value):
    """A path to anywhere, of a picture that was encoded."""
    return is_text(value) and "\0" not in value and len(value) <= 4000 and parts_fit(Path(value).parts)


def is_path_or_none(value):
    return value is None or is_path(value)


def is_contents(value):
    """{path of a picture: its whole hash, as dataset.picture_facts has it}: who has not the picture cannot name it."""
    if not is_text_dict(value) or not all(map(is_path, value)):
        return False
    return all(re.fullmatch("[0-9a-f]{64}( in sRGB)?", content) for content in value.values())


def parts_fit(parts):
    return all(len(os.fsencode(part)) <= NAME_BYTES for part in parts)


def is_list(value, rule, least=0, most=math.inf):
    return isinstance(value, list) and least <= len(value) <= most and all(map(rule, value))


def is_count(value, most=MAX_PIXELS):
    return type(value) is int and 1 <= value <= most # True is no number here


def is_size(value):
    """[width, height] in pixels."""
    return is_list(value, is_count, 2, 2)


def is_shape(value):
    """[1, height, width] in tokens."""
    return is_list(value, is_count, 3, 3) and value[0] == 1 and value[1] * value[2] <= MAX_TOKENS


def is_file(value, folder):
    return is_text(value) and bool(re.fullmatch(folder + r"/[0-9a-f]{32}\.safetensors", value))


def is_encoding(value):
    shapes = isinstance(value, dict) and is_list(value.get("img_shapes"), is_shape, 1, 100)
    return shapes and is_file(value.get("file"), "latents") and value.get("mask", "auto") == "auto"


def is_encoded_text(value):
    if not isinstance(value, list) or len(value) != 3:
        return False
    prompt, with_pictures, about = value
    counted = isinstance(about, dict) and is_count(about.get("tokens"), TABLE)
    return is_text(prompt) and type(with_pictures) is bool and counted and is_file(about.get("file"), "text")


def is_area(value):
    return value == "native" or is_count(value) and value >= 32 * 32


def is_geometry(value):
    """dict(target_pixels=[...], control_pixels, upscale), as cache.plan_sizes reads it."""
    if not isinstance(value, dict) or not value.keys() <= {"target_pixels", "control_pixels", "upscale"}:
        return False
    areas = is_list(value.get("target_pixels"), is_area, 1, 100)
    return areas and is_area(value.get("control_pixels", "native")) and type(value.get("upscale", True)) is bool


# the rules of a sample's fields: (rule, its further arguments ...)
RULES = dict(
    name=(is_name,), root=(is_name,), target=(is_path_or_none,), overlays=(is_text_dict,), contents=(is_contents,),
    controls=(is_list, is_path, 0, MOST_CONTROLS), prompts=(is_list, is_text, 1), repeats=(is_count, 10_000),
    sizes=(is_list, is_size), prompt_sizes=(is_list, is_size),
    encodings=(is_list, is_encoding, 1, 100), texts=(is_list, is_encoded_text, 1))


def check_fields(fields, rules):
    for name, (rule, *arguments) in rules.items():
        if not rule(fields[name], *arguments):
            raise ValueError(f"{name} {fields[name]!r:.100}")


def read_row(row, folder):
    """What row_of makes -> Planned, with files in this folder. ValueError, or whatever a foreign row can raise, unless
    each field holds what cache.plan_sample writes, and they agree."""
    fields = dict(row, overlays={})
    for role in overlay_roles():
        if (file := fields.pop(role, None)) is not None:
            fields["overlays"][role] = file
    if unknown := fields.keys() - RULES.keys():
        raise ValueError(f"unknown field {min(unknown)!r:.100}")
    check_fields(fields, RULES)
    texts = {}
    for prompt, with_pictures, text in fields["texts"]:
        if (prompt, with_pictures) in texts:
            raise ValueError("a text is there twice")
        texts[prompt, with_pictures] = text
    for encoded in (*fields["encodings"], *texts.values()):
        encoded["file"] = folder / encoded["file"]
    sample = Planned(**fields | dict(texts=texts))
    pictures = dataset.pictures_of(sample)
    if not sample.contents.keys() >= {*pictures, *sample.overlays.values()}:
        raise ValueError("contents lack a picture")
    if sample.controls and not sample.target:
        raise ValueError("controls without a target")
    for encoding in sample.encodings:
        shapes = encoding["img_shapes"]
        if len(shapes) != len(sample.sizes) or len(shapes) != (len(pictures) or len(shapes)):
            raise ValueError(f"{len(shapes)} img_shapes, {len(sample.sizes)} sizes and {len(pictures)} pictures")
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
    fingerprints, or if a file is missing, or a text that texts_of(sample) asks for. Lines say if pictures or
    captions were edited since, and how many pairs are new or gone."""
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
    if changes := changes_since(samples, roots):
        tell(f"warning: {path}: since it was made {changes}; it trains what was encoded; run cache.py again for the "
             "others", file=sys.stderr)
    if edited := edited_pictures(samples, args.cache_dir):
        tell(f"warning: {path}: {len(edited)} of its pictures are not those that were encoded, for instance "
             f"{edited[0]}; it trains the encoded ones; run cache.py for the others", file=sys.stderr)
    return samples, geometry


def changes_since(samples, roots):
    """-> "2 captions were edited, 1 pairs are gone" or the like, as far as the datasets are here; or ""."""
    encoded = {(sample.root, sample.name): sample.prompts for sample in samples}
    here, names = {}, set()
    for root in roots:
        with contextlib.suppress(InputError), contextlib.redirect_stderr(io.StringIO()): # it lies elsewhere by now
            here |= {(sample.root, sample.name): sample.prompts for sample in dataset.read_dataset(root)[0]}
            names.add(dataset.root_name(root))
    counts = {"captions were edited": sum(here[key] != encoded[key] for key in here.keys() & encoded.keys()),
              "pairs are new, or had been left out": len(here.keys() - encoded.keys()),
              "pairs are gone": sum(key[0] in names for key in encoded.keys() - here.keys())}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


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
