"""What the flags of predict.py ask for: samples of a FILE, a FOLDER or --jobs."""
import os
import sys
from dataclasses import replace
from pathlib import Path

import common
from common import InputError
from library.data import dataset
from library.data.dataset import make_sample
from library.files import sniff, stray_files

def read_samples(args):
    """What the flags ask for -> (samples, problems)."""
    if args.jobs:
        if args.jobs.is_file() and args.jobs.suffix != ".jsonl":
            raise InputError(f"--jobs {args.jobs}: the name of a list ends in .jsonl; rename it")
        return dataset.read_dataset(args.jobs, is_job=True)
    folder = args.image[0]
    if args.image[1:] and any(map(Path.is_dir, args.image)):
        raise InputError("--image: a folder stands alone; give one folder, or files")
    if not folder.is_dir():
        sample = make_sample("--prompt", folder, folder.stem, None, args.image, [args.prompt])
        for path in args.image:
            if not os.path.lexists(path):
                raise InputError(f"{path}: {stray_files.why_gone(path) or stray_files.no_picture(path)}")
        return [sample], []
    if dataset.is_dataset(folder):
        raise InputError(f"--image {folder}: a dataset, with its targets; give {folder / 'control'}, or --jobs "
                         f"{folder} without --prompt, which takes its captions")
    if dataset.is_dataset(args.out_dir):
        raise InputError(f"--out_dir {args.out_dir}: a dataset; leave it out (out/predict), or give another folder")
    if args.out_dir.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"--out_dir {args.out_dir}: lies in the folder of --image; leave it out, or give another")
    # each picture of a folder is a sample of its own, with the same prompt
    samples, found = [], stray_files.find_files(folder)
    problems = stray_files.sort_out(folder, found)
    for (stem, kind), paths in found.items(): # of kind other: GIF and the like, each of which becomes an error line
        if kind == "caption":
            continue
        for path in paths:
            name = stem if len(paths) == 1 else path.relative_to(folder).as_posix() # a.png beside a.jpg
            with common.collect_errors(problems):
                stray_files.refuse_outside(path, folder)
                samples.append(make_sample("--prompt", folder, name, None, [path], [args.prompt]))
    if not samples and not problems:
        raise InputError(f"--image {folder}: no picture in it; give a folder of pictures")
    return samples, problems

def refuse_missing_input(args):
    """Ends the script if nothing of what the flags ask for can be drawn: no picture can be read, no line is right; or
    if a LoRA is of another model. (Of several processes none looks: the first one says it later.)"""
    if common.world() > 1:
        return
    for file in args.lora:
        sniff.refuse_family(file)
    samples, problems = read_samples(args)
    look, _ = dataset.looks([replace(sample, others={}) for sample in samples], args.cache_dir)
    good = 0
    for sample in samples:
        with common.collect_errors(problems):
            for path in dataset.pictures_of(sample):
                look(path)
            good += 1
    if not good:
        common.print_problems(list(dict.fromkeys(problems))) # each picture of a folder has the same prompt
        sys.exit(1)
