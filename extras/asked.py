"""
What the flags of predict.py ask for: samples of a FILE, a FOLDER or --jobs, looked at before torch is imported, so that
a wrong name is answered at once; and what a result says of itself.
"""
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from PIL import PngImagePlugin

import common
from common import InputError, make_sample
from extras import foreign, strays


def read_samples(args):
    """What the flags ask for -> (samples, problems)."""
    if args.jobs:
        if args.jobs.is_file() and args.jobs.suffix != ".jsonl":
            raise InputError(f"--jobs {args.jobs}: the name of a list ends in .jsonl; rename it")
        return common.read_dataset(args.jobs, is_job=True)
    folder = args.image[0]
    if args.image[1:] and any(map(Path.is_dir, args.image)):
        raise InputError("--image: a folder stands alone; give one folder, or files")
    if not folder.is_dir():
        sample = make_sample("--prompt", folder, folder.stem, None, args.image, [args.prompt])
        for path in args.image:
            if not os.path.lexists(path):
                raise InputError(f"{path}: {strays.why_gone(path) or strays.no_picture(path)}")
        return [sample], []
    from extras import hints # here, as it imports others that read datasets
    if hints.is_dataset(folder):
        raise InputError(f"--image {folder}: a dataset, with its targets; give {folder / 'control'}, or --jobs "
                         f"{folder} without --prompt, which takes its captions")
    if hints.is_dataset(args.out_dir):
        raise InputError(f"--out_dir {args.out_dir}: a dataset; leave it out (out/predict), or give another folder")
    if args.out_dir.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"--out_dir {args.out_dir}: lies in the folder of --image; leave it out, or give another")
    # each picture of a folder is a sample of its own, with the same prompt
    samples, found = [], common.find_files(folder)
    problems = strays.sort_out(folder, found)
    for (stem, kind), paths in found.items(): # of kind other: GIF and the like, each of which becomes an error line
        if kind == "caption":
            continue
        for path in paths:
            name = stem if len(paths) == 1 else path.relative_to(folder).as_posix() # a.png beside a.jpg
            with common.noted(problems):
                common.refuse_outside(path, folder)
                samples.append(make_sample("--prompt", folder, name, None, [path], [args.prompt]))
    if not samples and not problems:
        raise InputError(f"--image {folder}: no picture in it; give a folder of pictures")
    return samples, problems


def refuse_nothing(args):
    """Ends the script if nothing of what the flags ask for can be drawn: no picture can be read, no line is right; or
    if a LoRA is of another model. (Of several processes none looks: the first one says it later.)"""
    if common.world() > 1:
        return
    for file in args.lora:
        foreign.refuse_family(file)
    samples, problems = read_samples(args)
    look, _ = common.looks([replace(sample, others={}) for sample in samples], args.cache_dir)
    good = 0
    for sample in samples:
        with common.noted(problems):
            for path in common.pictures_of(sample):
                look(path)
            good += 1
    if not good:
        common.print_problems(list(dict.fromkeys(problems))) # each picture of a folder has the same prompt
        sys.exit(1)


def about(picture, jobs):
    """-> what a result says of itself, beside its command: of its own sample, seed and scale, as a command may make
    many pictures. picture: a predict.Picture; jobs: --jobs."""
    sample = picture.sample
    said = dict(prompt=sample.prompts[0], controls=sample.controls)
    said |= {name: value for name, value in sample.settings.items() if value is not None and name != "out"}
    if picture.strengths:
        said["lora_scale"] = picture.strengths
    if picture.line is not None:
        said["line"] = f"{jobs}:{picture.line}"
    return said


def png_of(image, key="", code=None, said=None):
    """-> the bytes of a PNG. key: a hash of its settings, code: what has drawn it (sources.drawing), for
    extras/finished.py. It also tells a person the command that made it, and `said`: of its own settings."""
    png, meta = io.BytesIO(), PngImagePlugin.PngInfo()
    meta.add_text("key", key)
    if code:
        meta.add_text("code", json.dumps(code))
    meta.add_text("command", common.command(["python", *sys.argv]))
    if said:
        meta.add_text("sample", json.dumps(said))
    image.save(png, format="PNG", pnginfo=meta, icc_profile=None) # (a profile would stand before the key)
    return png.getvalue()
