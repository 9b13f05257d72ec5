"""
Manifests -> samples: metadata.jsonl, a dataset as a list, and jobs.jsonl, what predict.py shall generate. Each line is
one JSON object; paths begin at the manifest's folder.

{"target": "target/cat.png", "control": ["control/cat.png"], "prompt": "make it snow", "mask": "mask/cat.png"}
{"image": "photo.jpg", "prompt": "make it snow", "seed": 3}

The first is a line of metadata.jsonl, where the mask may be left out. The second is one of jobs.jsonl, which needs no
target, may call its control `image`, and may set the fields of JOB_TYPES.

A dataset may come from strangers, so its lines, and the links in its folder, reach no file outside. A list of jobs is
your own, and may name pictures anywhere, unless it is called metadata.jsonl.
"""
import argparse
import contextlib
import json
import os
import re
import unicodedata
from functools import partial

from common import (LONG_TEXT, MOST_CONTROLS, SAMPLE_FLAGS, InputError, command, first_words, is_inside, make_sample,
                    noise_level, noted, other_roles, png_name, read_object, read_text, refuse_outside, seed_number)
from extras import strays


def as_list(value):
    if not isinstance(value, (str, list)):
        raise TypeError(f"{value!r:.100} is neither a text nor a list")
    return [value] if isinstance(value, str) else value


def refuse_many(where, controls):
    """InputError for more controls than a sample may have: a short line can name one file a million times."""
    if len(controls) > MOST_CONTROLS:
        raise InputError(f"{where}: {len(controls):,} controls, and a sample has {MOST_CONTROLS} at most; leave some "
                         "out")


def noise_levels(values):
    if not isinstance(values, list) or not 1 <= len(values) <= 1000:
        raise ValueError
    return list(map(noise_level, values))


# {field: function that makes its value}: flags of predict.py; three of them have another form on the command line
JOB_TYPES = dict(out=png_name, sigmas=noise_levels, seed=seed_number,
                 **{name: kind for name, (kind, _) in SAMPLE_FLAGS.items()})
# what a value should be, by the name of such a function; Python's own errors speak of Python's types
WANTED = dict(int="whole number", float="number", noise_levels="list of 1 to 1000 numbers, such as [1, 0.5]",
              png_name="name such as cat.png", only_text="text")


def read(manifest, is_job=False, root=None):
    """-> (samples, problems): a line for each thing that is wrong. root: the folder in which the manifest was found.
    InputError for another trainer's manifest."""
    if root not in (None, manifest): # else the user has named it
        refuse_outside(manifest, root)
    samples = []
    problems = []
    text = read_text(manifest, LONG_TEXT)
    if not is_job and text.strip() and not re.search('"(target|prompt)"', text):
        convert = command(["python", "tools/import_data.py", manifest])
        raise InputError(f"{manifest}: another trainer's manifest; {convert} NEW_FOLDER")
    for n, line in enumerate(text.split("\n"), 1): # not splitlines, which takes U+2028 in a prompt for a line's end
        if line.strip():
            with noted(problems):
                samples.append(read_row(manifest, n, line, is_job))
    return samples, problems


def read_row(manifest, n, line, is_job):
    """A line -> Sample, named as its target; without one by the line's number and its first picture."""
    where = f"{manifest}:{n}"
    remedy = "want one JSON object a line, each key once, no comma behind its last field"
    try:
        row = read_object(line)
        remedy = "correct this line"
        name = "image" if is_job and ("image" in row or "control" not in row) else "control"
        controls = as_list(row.pop(name))
        prompts, target = as_list(row.pop("prompt")), row.pop("target", None)
        others = {role: row.pop(role, None) for role in other_roles()}
        if not target and not is_job:
            raise KeyError("target")
    except KeyError as e:
        want = "image and prompt"
        if not is_job:
            want = f"target, control ([] for none), prompt and maybe {', '.join(other_roles())}"
        raise InputError(f"{where}: no field {e}; want {want}")
    except Exception as e: # a line of JSON can be anything
        # a link that you name may be a stranger's, to a key, which is not quoted
        why = first_words(e) if is_inside(manifest, manifest.parent) else "no JSON object of a sample"
        raise InputError(f"{where}: {why}; {remedy}")
    if not target and len(prompts) > 1: # a target's are wordings
        raise InputError(f"{where}: several prompts, and a job has one; write a line for each")
    settings = {}
    for key, value in row.items():
        if not is_job or key not in JOB_TYPES:
            raise InputError(f"{where}: unknown field {key!r:.100}; correct it, or leave it out")
        kind = JOB_TYPES[key]
        try:
            settings[key] = kind(value)
        except Exception as e: # as a value of JSON
            own = isinstance(e, argparse.ArgumentTypeError)
            why = first_words(e) if own else f"is no {WANTED[kind.__name__]}"
            said = json.dumps(value, ensure_ascii=False)[:100]
            raise InputError(f"{where}: {key} {said}: {why}; correct it, or leave it out")
    refuse_many(where, controls)
    find = partial(find_picture, manifest, where, is_job and manifest.name != "metadata.jsonl")
    controls = list(map(find, controls))
    target, others = target and find(target), {role: find(file) for role, file in others.items() if file}
    if target:
        name = unicodedata.normalize("NFC", os.path.splitext(strays.seen_from(manifest.parent, target))[0])
    else:
        name = "-".join([f"{n:03}", *[path.stem for path in controls[:1]]])
    if is_job:
        settings["line"] = n
    return make_sample(where, manifest, name, target, controls, prompts, others, settings)


def find_picture(manifest, where, anywhere, name):
    """A manifest's path -> file. A dataset's stays in its folder, also after following links; with `anywhere` it may be
    any file."""
    folder = manifest.parent
    why = None
    with contextlib.suppress(Exception): # `name` may be a number, hold NUL, or lead through links in a circle
        file = strays.on_disk(os.path.normpath(folder / name))
        if anywhere and file.is_file():
            return file
        if not file.is_relative_to(folder): # its absolute path, where the folder was given as a link
            file = folder / os.path.relpath(os.path.realpath(file), os.path.realpath(folder))
        if ".." not in file.relative_to(folder).parts:
            if file.is_file() and is_inside(file, folder):
                return file
            why = strays.why_gone(file)
            if file.is_file():
                why = f"a link that leads out of {folder}; if you trust it, make a copy without links: cp -rL"
    if why:
        raise InputError(f"{where}: {name!r:.200}: {why}")
    raise InputError(f"{where}: {name!r:.200} is no file; paths begin at {folder}, and a dataset's must stay inside "
                     "it, also after links (cp -rL makes a copy without links)")
