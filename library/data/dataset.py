"""
Samples, as a person gives them: a folder with target/, control/ and captions, a manifest (metadata.jsonl, jobs.jsonl),
or what predict.py's flags name. No picture is decoded here; check_datasets and read_facts look at the files' headers.

A line of a manifest is one JSON object; paths begin at the manifest's folder:

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
import sys
import unicodedata
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import common
from common import (InputError, LONG_TEXT, collect_errors, error_line, file_hash, first_words, is_inside,
                    print_problems, read_object, shell_command, world)
from library.cli.command_line import SAMPLE_FLAGS, check_text, is_index, is_visible, noise_level, png_name, seed_number
from library.data import picture_files, stat_cache
from library.data.picture_files import image_size, mask_is_empty, open_image, read_mask, reserve_pixels
from library.files import stray_files
from library.files.stray_files import find_files, near_path, read_text, refuse_outside

MOST_CONTROLS = 99 # of a sample
MAX_TOKENS = 65536 # of a picture as it is encoded or generated: 4096x4096 pixels

@dataclass(frozen=True)
class Sample:
    """What a person gave: a training pair, a validation pair, a line of jobs.jsonl, a photo to edit."""
    name: str # its path in the dataset, without suffix
    root: str # the dataset's name
    controls: list # pictures given, in order; none: text-to-image
    prompts: list # the instruction, in one or several wordings; each use of the sample picks one
    target: str | None = None # the picture wanted; None: one will be generated
    overlays: dict = field(default_factory=dict) # {role: picture that lies over the target}, of ROLES
    repeats: int = 1 # how often an epoch has it
    # what its line of jobs.jsonl sets (JOB_TYPES), and `line`: the line's number
    job_fields: dict = field(default_factory=dict)

    @property
    def mask(self):
        return self.overlays.get("mask")

@dataclass(frozen=True, kw_only=True)
class Planned(Sample):
    """A sample, and what will be encoded of it. cache.plan_sample makes it in one go, and nothing changes it later; it
    leaves out of `overlays` a mask that marks nothing."""
    contents: dict # {path of a picture of the sample: hash of its file}
    # original (width, height) in pixels: of the target (without one, of the control that gives the shape), the controls
    sizes: list
    prompt_sizes: list # (width, height) of the controls' copies for the text encoder
    # for each of --target_pixels dict(file=of the latents, img_shapes=[(1, height, width), ...]), in tokens, the target
    # first; and mask="auto" if --mask auto makes one
    encodings: list
    # {text key: dict(file=, tokens=)}; a text key is (prompt, whether the pictures come with it)
    texts: dict

@dataclass
class Role:
    """What a sample has a picture for."""
    folders: tuple # names that its folder in a dataset may have
    tensor: str # what becomes of it in an encoded file, where train.py's load_item finds it
    is_mask: bool = False # read as a mask, which becomes one number a token; else in RGB, encoded by the VAE

# A role that you add here is found everywhere by its name, which is also its field in metadata.jsonl. A sample has at
# most one such picture, in Sample.overlays: of the target's shape, read at its size, and in the key of what is encoded.
ROLES = dict(target=Role(("target", "training_images"), "pixel_latent"),
             control=Role(("control", "control_images"), "control_latent"),
             mask=Role(("mask",), "edit_mask", is_mask=True)) # white = the edited region

def overlay_roles():
    """Those of Sample.overlays."""
    return [role for role in ROLES if role not in ("target", "control")]

# ---- a dataset: a folder or a manifest -------------------------------------------------------------------------------

LAYOUT = "want target/NAME.png + .txt and control/NAME.png, or metadata.jsonl; tools/import_data.py converts others"

def root_name(data):
    """A dataset's name: its folder's."""
    data = Path(data).resolve()
    return (data.parent if data.is_file() else data).name

def read_dataset(root, is_job=False):
    """A folder or manifest -> (samples, problems): a line for each thing that is wrong. No picture is opened yet.
    InputError if there is no dataset at all. is_job: a manifest is jobs.jsonl, see the top of this file."""
    root = Path(root)
    folders = find_folders(root)
    manifest = root if root.is_file() else root / "metadata.jsonl"
    if "target" in folders:
        samples, problems = read_folder(root, folders)
    elif manifest.is_file() and manifest.suffix == ".jsonl":
        samples, problems = read_manifest(manifest, is_job, root)
    else:
        raise InputError(no_dataset(root))
    if not samples and not problems:
        raise InputError(f"{root}: nothing in it; {LAYOUT}")
    return samples, problems

def no_dataset(root):
    """-> why there is no dataset at `root`, and what may be meant."""
    for place in (root, root / "metadata.jsonl"):
        if why := stray_files.why_gone(place):
            return f"{place}: {why}"
    if not root.exists():
        return f"{root}: does not exist; {near_path(root)}"
    for folder in (root, *root.parents):
        if any(folder.name in role.folders for role in ROLES.values()) and is_dataset(folder.parent):
            return f"{root}: is no dataset; give {common.shell_command([folder.parent])}"
    holds = "" # a file, a pipe, a device
    if root.is_dir():
        names = [path.name for path in stray_files.listed(root, "*")]
        holds = f"; it holds {', '.join(names[:5]) or 'nothing'}"
    return f"{root}: is no dataset{holds}; {LAYOUT}"

def is_dataset(folder):
    """Whether it has a folder of targets with a picture in it."""
    for target in filter(Path.is_dir, [folder / name for name in ROLES["target"].folders]):
        if any(kind == "picture" for _, kind in stray_files.find_files(target)):
            return True
    return False

# ---- folders ---------------------------------------------------------------------------------------------------------

def find_folders(data):
    """{"target": data/target, ...}: those that are here, under their names. InputError if a role has two."""
    folders = {}
    for role in ROLES:
        for name in ROLES[role].folders:
            if not os.path.lexists(data / name):
                continue
            if role in folders:
                raise InputError(f"{data / name}: means the same as {folders[role].name}/; keep one of them")
            folders[role] = data / name
    return folders

def read_folder(data, folders):
    """What find_folders has found -> (samples, problems). Without a folder of controls they are pictures alone."""
    for path in data.glob("*/"): # a misspelt control/ would silently mean pictures alone
        if path not in folders.values() and not stray_files.is_junk(path.name):
            raise InputError(f"{path}: a dataset has no folder of this name; call it {'/, '.join(ROLES)}/ if it is one "
                             "of these, or move it elsewhere")
    for folder in folders.values():
        refuse_outside(folder, data)
    # what no sample has taken yet
    left = {(role, *key): paths for role, folder in folders.items() for key, paths in find_files(folder).items()}
    samples = []
    whole = {(role, stem) for role, stem, kind in left if kind == "picture"}
    problems = stray_files.sort_out(data, left)
    for role, name, kind in list(left):
        if (role, kind) == ("target", "picture"):
            with collect_errors(problems):
                samples.append(sample_of_target(data, folders, left, name))
    if (data / "metadata.jsonl").exists():
        problems.append(error_line(f"{data / 'metadata.jsonl'}: not used beside target/; give the file itself as the "
                                   "dataset, or delete it"))
    for (_, _, kind), paths in left.items():
        why = "no target has this name (controls are NAME, NAME_1, NAME_2, ... without gaps); rename or delete it"
        if kind == "other":
            why = f"{paths[0].suffix} is not read; convert it to PNG or JPEG"
        problems += [error_line(f"{path}: not used: {why}") for path in paths]
    lacking = set() # names of samples of which a control, or a mask, cannot be used: --skip_bad leaves them out
    for role, stem, kind in left:
        in_place = kind != "picture" and (role, stem) in whole
        if role != "target" and kind != "caption" and not in_place:
            lacking |= {stem, re.sub(r"_\d+$", "", stem)}
    return [sample for sample in samples if sample.name not in lacking], problems

def sample_of_target(data, folders, left, name):
    """The Sample of target/NAME. Its files are taken out of `left`: {(role, stem, kind): paths}."""
    def take(role, stem=name, kind="picture"):
        return left.pop((role, stem, kind), [])
    target, caption, controls = take("target"), take("target", kind="caption"), [take("control")]
    overlays = {role: take(role) for role in overlay_roles()}
    # NAME_1, NAME_2, ... are further controls, unless a target of that name claims one
    next_name = f"{name}_1"
    while ("control", next_name, "picture") in left and ("target", next_name, "picture") not in left:
        controls.append(take("control", next_name))
        next_name = f"{name}_{len(controls)}"
    for paths in (target, caption, *overlays.values(), *controls):
        if len(paths) > 1:
            raise InputError(f"{paths[0]}: {paths[1].name} has the same name; keep one of them")
        if paths and paths[0].is_symlink():
            refuse_outside(paths[0], data)
    if not controls[0] and "control" in folders:
        raise InputError(f"{target[0]}: no control; expected {folders['control'] / name}.png or .jpg")
    if further := left.get(("control", next_name, "picture")): # not taken above, as there is a target of this name
        raise InputError(f"{further[0]}: either the control of the target with its name, or one more control of "
                         f"{name}; rename one of the two targets")
    if not caption:
        raise InputError(f"{target[0]}: no caption; expected {target[0].with_suffix('.txt')}")
    lines = list(filter(is_visible, re.split("[\r\n]", read_text(caption[0]))))
    overlays = {role: path for role, paths in overlays.items() for path in paths} # one of each, or none
    return make_sample(caption[0], data, name, target[0], sum(controls, []), lines, overlays)

def make_sample(where, root, name, target, controls, prompts, overlays=None, job_fields=None):
    """-> Sample. InputError if a prompt is empty, or holds what the tokenizer would take for its own marks."""
    for prompt in prompts or [""]:
        if not isinstance(prompt, str) or not is_visible(prompt):
            raise InputError(f"{where}: empty prompt, or no text; write the instruction into it")
        check_text(where, prompt)
    return Sample(str(name), root_name(root), list(map(str, controls)), list(dict.fromkeys(map(str.strip, prompts))),
                  target and str(target), {role: str(path) for role, path in (overlays or {}).items()},
                  job_fields=job_fields or {})

def run_name(model, roots):
    """<model>-<data>+<more data>, for indexes and run folders."""
    model = Path(model).name if Path(model).is_dir() else model.split("/", 1)[-1].replace("/", "-") # (ID@refs/pr/3)
    names = [Path(root).stem if is_index(root) else root_name(root) for root in roots]
    return f"{model}-{'+'.join(names).removeprefix(model + '-')}" # an index has that name already

# ---- facts of its pictures: what can be said without encoding anything -----------------------------------------------

def picture_facts(path):
    """-> [(width, height), content hash] of a picture; behind the hash stands a mark if its colours are converted to
    sRGB: another picture than one of these bytes that is not. InputErrors are image_size's."""
    with open_image(path) as image:
        mark = picture_files.mark_of(image, path)
    return [image_size(path), file_hash(path) + mark]

def mask_facts(path):
    """-> [(width, height), content hash, whether it marks a part] of a mask. InputErrors are read_mask's."""
    content = file_hash(path)
    with reserve_pixels([path]): # as this decodes it, and threads do so
        return [image_size(path), content, not mask_is_empty(read_mask(path, content))]

def pictures_of(sample):
    """The paths of its target, if it has one, and its controls."""
    return [path for path in (sample.target, *sample.controls) if path]

def remember_facts(samples, cache_dir):
    """-> picture_facts and mask_facts, as functions that already know the answers for the pictures of these samples."""
    pictures, masks = [], []
    for sample in samples:
        pictures += pictures_of(sample)
        for role, path in sample.overlays.items():
            (masks if ROLES[role].is_mask else pictures).append(path)
    return (stat_cache.remember_by_stat(pictures, picture_facts, Path(cache_dir, "pictures.txt")),
            stat_cache.remember_by_stat(masks, mask_facts, Path(cache_dir, "masks.txt")))

def check_shape(path, size, target_size):
    """InputError for a picture that cannot lie over the target: of another shape (it may have another size)."""
    (w, h), (target_w, target_h) = size, target_size
    if abs(w / h / (target_w / target_h) - 1) > 0.02:
        raise InputError(f"{path}: {w}x{h} for a target of {target_w}x{target_h}; give it that shape")

def read_facts(sample, of_picture=None, of_mask=None, size_from=None):
    """-> (sizes, contents, overlays), as Planned has them: without a mask that marks nothing or everything. of_picture,
    of_mask: picture_facts and mask_facts, or remember_facts's. size_from: which control gives the shape of a result,
    from 1; None: the last, as in stock. InputErrors are theirs and check_shape's."""
    of_picture, of_mask = of_picture or picture_facts, of_mask or mask_facts
    sizes, contents, overlays = [], {}, {}
    for path in pictures_of(sample):
        size, contents[path] = of_picture(path)
        sizes.append(size)
    if not sample.target:
        sizes.insert(0, sizes[(size_from or 0) - 1])
    for role, path in sample.overlays.items():
        size, contents[path], *marks = (of_mask if ROLES[role].is_mask else of_picture)(path)
        check_shape(path, size, sizes[0])
        if marks != [False]:
            overlays[role] = path
    return sizes, contents, overlays

def check_datasets(args):
    """Ends the script if a dataset of --data or --val_data has an error, without --skip_bad: before the libraries are
    loaded, as a person has to mend these first. (Of several processes none does so: make_cache's first one will.)"""
    problems = []
    if args.skip_bad or world() > 1:
        return
    for root in [*args.data, *args.val_data]:
        if not is_index(root):
            samples, wrong = read_dataset(root)
            problems += wrong
            facts = remember_facts(samples, args.cache_dir)
            for sample in samples:
                with collect_errors(problems):
                    read_facts(sample, *facts)
    if problems:
        print_problems(problems)
        sys.exit("correct these samples, or go on without them: --skip_bad")

# ---- manifests -------------------------------------------------------------------------------------------------------

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
              png_name="name such as cat.png", only_text="text", true_or_false="true or false")

def read_manifest(manifest, is_job=False, root=None):
    """-> (samples, problems): a line for each thing that is wrong. root: the folder in which the manifest was found.
    InputError for another trainer's manifest."""
    if root not in (None, manifest): # else the user has named it
        refuse_outside(manifest, root)
    samples = []
    problems = []
    text = read_text(manifest, LONG_TEXT)
    if not is_job and text.strip() and not re.search('"(target|prompt)"', text):
        convert = shell_command(["python", "tools/import_data.py", manifest])
        raise InputError(f"{manifest}: another trainer's manifest; {convert} NEW_FOLDER")
    for n, line in enumerate(text.split("\n"), 1): # not splitlines, which takes U+2028 in a prompt for a line's end
        if line.strip():
            with collect_errors(problems):
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
        overlays = {role: row.pop(role, None) for role in overlay_roles()}
        if not target and not is_job:
            raise KeyError("target")
    except KeyError as e:
        want = "image and prompt"
        if not is_job:
            want = f"target, control ([] for none), prompt and maybe {', '.join(overlay_roles())}"
        raise InputError(f"{where}: no field {e}; want {want}")
    except Exception as e: # a line of JSON can be anything
        # a link that you name may be a stranger's, to a key, which is not quoted
        why = first_words(e) if is_inside(manifest, manifest.parent) else "no JSON object of a sample"
        raise InputError(f"{where}: {why}; {remedy}")
    if not target and len(prompts) > 1: # a target's are wordings
        raise InputError(f"{where}: several prompts, and a job has one; write a line for each")
    job_fields = {}
    for key, value in row.items():
        if not is_job or key not in JOB_TYPES:
            raise InputError(f"{where}: unknown field {key!r:.100}; correct it, or leave it out")
        kind = JOB_TYPES[key]
        try:
            job_fields[key] = kind(value)
        except Exception as e: # as a value of JSON
            own = isinstance(e, argparse.ArgumentTypeError)
            why = first_words(e) if own else f"is no {WANTED[kind.__name__]}"
            said = json.dumps(value, ensure_ascii=False)[:100]
            raise InputError(f"{where}: {key} {said}: {why}; correct it, or leave it out")
    refuse_many(where, controls)
    find = partial(find_picture, manifest, where, is_job and manifest.name != "metadata.jsonl")
    controls = list(map(find, controls))
    target, overlays = target and find(target), {role: find(file) for role, file in overlays.items() if file}
    if target:
        name = unicodedata.normalize("NFC", os.path.splitext(stray_files.seen_from(manifest.parent, target))[0])
    else:
        name = "-".join([f"{n:03}", *[path.stem for path in controls[:1]]])
    if is_job:
        job_fields["line"] = n
    return make_sample(where, manifest, name, target, controls, prompts, overlays, job_fields)

def find_picture(manifest, where, anywhere, name):
    """A manifest's path -> file. A dataset's stays in its folder, also after following links; with `anywhere` it may be
    any file."""
    folder = manifest.parent
    with contextlib.suppress(Exception): # `name` may be a number, hold NUL, or lead through links in a circle
        file = stray_files.on_disk(os.path.normpath(folder / name))
        if anywhere and file.is_file():
            return file
        if not file.is_relative_to(folder): # its absolute path, where the folder was given as a link
            file = folder / os.path.relpath(os.path.realpath(file), os.path.realpath(folder))
        if ".." not in file.relative_to(folder).parts:
            if file.is_file() and is_inside(file, folder):
                return file
    raise InputError(f"{where}: {name!r:.200} is no file; paths begin at {folder}, and a dataset's must stay inside "
                     "it, also after links (cp -rL makes a copy without links)")

# ---- what the flags of predict.py ask for: a file, a folder, or --jobs -----------------------------------------------

def read_samples(args):
    """What the flags ask for -> (samples, problems)."""
    if args.jobs:
        if args.jobs.is_file() and args.jobs.suffix != ".jsonl":
            raise InputError(f"--jobs {args.jobs}: the name of a list ends in .jsonl; rename it")
        return read_dataset(args.jobs, is_job=True)
    folder = args.image[0]
    if args.image[1:] and any(map(Path.is_dir, args.image)):
        raise InputError("--image: a folder stands alone; give one folder, or files")
    if not folder.is_dir():
        sample = make_sample("--prompt", folder, folder.stem, None, args.image, [args.prompt])
        for path in args.image:
            if not os.path.lexists(path):
                raise InputError(f"{path}: no file of that name; {near_path(path)}")
        return [sample], []
    if is_dataset(folder):
        raise InputError(f"--image {folder}: a dataset, with its targets; give {folder / 'control'}, or --jobs "
                         f"{folder} without --prompt, which takes its captions")
    if is_dataset(args.out_dir):
        raise InputError(f"--out_dir {args.out_dir}: a dataset; leave it out (out/predict), or give another folder")
    if args.out_dir.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"--out_dir {args.out_dir}: lies in the folder of --image; leave it out, or give another")
    # each picture of a folder is a sample of its own, with the same prompt
    samples, found = [], find_files(folder)
    problems = stray_files.sort_out(folder, found)
    for (stem, kind), paths in found.items(): # of kind other: GIF and the like, each of which becomes an error line
        if kind == "caption":
            continue
        for path in paths:
            name = stem if len(paths) == 1 else path.relative_to(folder).as_posix() # a.png beside a.jpg
            with collect_errors(problems):
                refuse_outside(path, folder)
                samples.append(make_sample("--prompt", folder, name, None, [path], [args.prompt]))
    if not samples and not problems:
        raise InputError(f"--image {folder}: no picture in it; give a folder of pictures")
    return samples, problems

def refuse_missing_input(args):
    """Ends the script if nothing of what the flags ask for can be drawn: no picture can be read, no line is right. (Of
    several processes none looks: the first one says it later.)"""
    if world() > 1:
        return
    samples, problems = read_samples(args)
    facts_of, _ = remember_facts([replace(sample, overlays={}) for sample in samples], args.cache_dir)
    good = 0
    for sample in samples:
        with collect_errors(problems):
            for path in pictures_of(sample):
                facts_of(path)
            good += 1
    if not good:
        print_problems(list(dict.fromkeys(problems))) # each picture of a folder has the same prompt
        sys.exit(1)
