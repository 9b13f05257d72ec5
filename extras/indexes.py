"""
An index joins a dataset's samples to their encoded files: one JSON file, CACHE_DIR/<model>-<data>.json. cache.py and
train.py write it when all files are there. tools/prune.py knows from it which files are needed, and train.py takes it
as --data, also on a machine that has a copy of the cache folder, and no pictures.
"""
import contextlib
import json
import os
import sys
from pathlib import Path

import common
from common import VERSION, InputError, Sample


def write_indexes(args, samples, val_samples, geometry, fingerprints):
    """The index of --data, and that of --val_data, unless they are indexes themselves. geometry: as for
    cache.plan_sizes; fingerprints: cache.encoder_fingerprints."""
    for roots, encoded, end in ((args.data, samples, ""), (args.val_data, val_samples, "-val")):
        if encoded and not any(map(common.is_index, roots)):
            path = Path(args.cache_dir, f"{common.run_name(args.model, roots)}{end}.json")
            write_index(path, encoded, geometry, fingerprints, roots)
            print(f"{path}: {len(encoded)} samples")


def write_index(path, samples, geometry, fingerprints, roots=()):
    """Writes JSON that read_index reads, a line for each sample; an index that is right already is left alone, and that
    of other datasets (roots), or other sizes, is not replaced in silence. Files are named relative to the index's
    folder, so that the folder may be copied elsewhere."""
    # vars of a Sample are its fields
    rows = []
    for s in samples:
        texts = [[*key, text] for key, text in s.texts.items()] # JSON has no keys of two parts
        rows.append(vars(s) | dict(texts=texts))
    roots = [str(Path(root).resolve()) for root in roots]
    index = dict(version=VERSION, models=fingerprints, roots=roots, geometry=geometry, samples=rows)
    text = json.dumps(index, default=lambda file: file.relative_to(path.parent).as_posix())
    data = text.replace('{"name"', '\n{"name"').encode() # (quotes in a text are escaped)
    if path.is_file() and path.read_bytes() == data:
        return
    with contextlib.suppress(Exception): # there is none, or a damaged one
        old = json.loads(path.read_text())
        for what in ("roots", "geometry"):
            if old[what] != index[what]:
                print(f"warning: {path}: replaces the index of {len(old['samples'])} samples with other {what} "
                      f"({old[what]}); give another --cache_dir to keep both", file=sys.stderr)
    common.write_file(path, data, rb'\A{"version": "[\d.]+", "models"')


def read_index(path):
    """-> (samples, geometry, fingerprints of the encoders). InputError if it is damaged."""
    path = Path(path)
    try:
        index = json.loads(path.read_text())
        samples = [Sample(**row) for row in index["samples"]]
        # back to what write_index had: pairs as keys, and paths
        for s in samples:
            s.texts = {(prompt, with_pictures): text for prompt, with_pictures, text in s.texts}
            for encoded in (*s.encodings, *s.texts.values()):
                encoded["file"] = path.parent / encoded["file"]
        if index["version"] != VERSION or not samples:
            raise ValueError(f"version {index['version']}, {len(samples)} samples")
        return samples, index["geometry"], index["models"]
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{path}: no index of version {VERSION} ({type(e).__name__}: {e}); run cache.py again")


def open_index(path, fingerprints, texts_of, args):
    """read_index -> (samples, geometry). InputError if other encoders have encoded them than those of these
    fingerprints, or if a file is missing, or a text that texts_of(sample) asks for. A line says if pictures were edited
    since."""
    samples, geometry, encoded_by = read_index(path)
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
    if others := edited_pictures(samples, args.cache_dir):
        print(f"warning: {path}: {len(others)} of its pictures are not those that were encoded, for instance "
              f"{others[0]}; it trains the encoded ones; run cache.py for the others", file=sys.stderr)
    return samples, geometry


def edited_pictures(samples, cache_dir):
    """-> the pictures of these samples that are others than those that were encoded, as far as they are here."""
    here = [sample for sample in samples if all(map(os.path.isfile, sample.contents))]
    look, _ = common.looks(here, cache_dir)
    others = []
    for sample in here:
        for picture in common.pictures_of(sample):
            with contextlib.suppress(InputError): # the file is another one, and no picture
                if look(picture)[1] == sample.contents[picture]:
                    continue
            others.append(picture)
    return others
