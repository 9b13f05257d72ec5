"""
Converts a dataset of another layout into ours. SOURCE is only read; OUT appears whole, or not at all. SOURCE is one of
    a folder        of other trainers, with names in FOLDERS; controls NAME, NAME_1 or NAME_control_1 or, counted from
                    0, NAME_0000; masks NAME_mask, beside the target or the control
    a manifest      .jsonl, .json, .csv (commas, semicolons or tabs) with names in COLUMNS, or a metadata.* in a folder
    parquet files   of the Hugging Face hub, in a folder (pip install datasets)
    a 1.0 cache     a folder of .safetensors dictionaries, one a sample, with height and width instead of img_shapes;
                    without height_control and width_control the control has the target's size
The first three become a dataset: OUT/target, control and mask. Its pictures are hard links where possible: they take no
space, but a program that changes one in place changes both. A cache becomes a cache, whose index train.py takes as
--data. What is wrong is listed, a line each; then nothing is written, unless --skip_bad leaves those samples out.

$ python tools/import_data.py downloads/musubi photos     # next: python tools/doctor.py photos
$ python tools/import_data.py faces.csv faces --alone     # pictures without controls
$ python tools/import_data.py old_cache cache/old         # next: python train.py --data cache/old/old_cache.json
"""
import csv
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import safetensors
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent)) # where the core scripts are
import cache
import common
from common import InputError, Sample, error_line
from rope_patch import get_image_shapes_multi_resolution

# what others call it: folders; and columns, with or without path_ before, _path or _file_name behind
FOLDERS = dict(target=("target", "targets", "target_images", "training_images", "images"),
               control=("control", "controls", "control_images"), mask=("mask", "masks", "mask_images"))
COLUMNS = dict(
    target=("target", "target_image", "target_img", "image", "output", "output_image", "edited_image", "file_name"),
    control=("control", "control_image", "control_images", "edit_image", "edit_images", "source", "source_image",
             "source_img", "input", "input_image", "original_image", "conditioning_image"), # also numbered, from 0 or 1
    mask=("mask", "mask_image", "mask_img", "edit_mask", "control_mask"),
    prompt=("prompt", "caption", "text", "instruction", "edit_prompt", "edit_instruction"))

# ---- folders ---------------------------------------------------------------------------------------------------------

def find_folders(source):
    """-> {role: folder}. InputError if two mean the same."""
    found = {}
    for role, folder in [(role, source / name) for role, names in FOLDERS.items() for name in names]:
        if folder.is_dir() and found.setdefault(role, folder) != folder:
            raise InputError(f"{folder}: means the same as {found[role].name}/; keep one of them")
    return found

def meanings(role, stem, kind, targets):
    """What a file may be, by its name: [(name of a target, "target", "caption", "mask" or which of its controls)]."""
    found = [(stem, "caption")] if (role, kind) == ("target", "caption") else []
    if kind == "picture":
        found = [(stem, 0 if role == "control" else role)]
        if stem.endswith("_mask") and not (role == "target" and stem in targets):
            found += [(stem.removesuffix("_mask"), "mask")]
        if role == "control" and (m := re.fullmatch(r"(?s)((.+?)(?:_control)?)_(\d+)", stem)):
            found += [(name, int(m[3])) for name in {m[1], m[2]}] # the same one, unless it is NAME_control_1
    return [(name, what) for name, what in found if name in targets]

def read_folders(source, folders):
    """-> (samples, problems)."""
    files = {(role, *key): paths for role, folder in folders.items()
             for key, paths in common.find_files(folder).items()}
    images = {stem for role, stem, kind in files if (role, kind) == ("target", "picture")}
    masks = {s for s in images if s.endswith("_mask") and s[:-5] in images and ("target", s, "caption") not in files}
    targets, samples, problems = {name: {} for name in sorted(images - masks)}, [], []
    for key, paths in files.items():
        owners = meanings(*key, targets)
        for name, what in owners:
            targets[name].setdefault(what if len(owners) == 1 else "unclear", []).extend(paths)
        problems += [error_line(f"{path}: not used: no target has this name, or this kind of file is not read; rename, "
                                "convert or delete it") for path in paths if not owners]
    for name, own in targets.items():
        try:
            samples.append(read_files(source, name, own, targets))
        except InputError as e:
            problems.append(str(e))
    return samples, problems

def read_files(source, name, files, targets):
    """A target's {what: [paths]} -> Sample."""
    target, numbers = files["target"][0], sorted(what for what in files if isinstance(what, int))
    if "unclear" in files:
        raise InputError(f"{files['unclear'][0]}: of {name}, or of another target; rename one of them")
    if (base := re.sub(r"(?s)_\d+$", "", name)) != name and base in targets:
        raise InputError(f"{target}: its control would be taken for a further one of {base}; rename it")
    for path, *others in files.values():
        if others:
            raise InputError(f"{path}: {others[0]} is meant for the same; keep one of them")
    if numbers != list(range(len(numbers) or 1)):
        raise InputError(f"{target}: {f'its controls are numbered {numbers}' if numbers else 'no control'}; want "
                         f"{Path('control', name)}.png, further ones numbered 1, 2, ...")
    if "caption" not in files:
        raise InputError(f"{target}: no caption; expected {target.with_suffix('.txt')}")
    caption = common.read_text(files["caption"][0]).strip() # one, of however many lines
    if "[trigger]" in caption:
        raise InputError(f"{files['caption'][0]}: holds [trigger]; write the word itself")
    return common.make_sample(files["caption"][0], source, name, target, [files[n][0] for n in numbers], [caption],
                             *files.get("mask", []))

# ---- rows of manifests and parquet files -----------------------------------------------------------------------------

def manifest_rows(path):
    """-> [(where, row)]. A row is an object, or a line that should be one."""
    if path.suffix not in (".jsonl", ".json", ".csv", ".tsv"):
        raise InputError(f"{path}: no manifest; give the folder, or the .jsonl, .json, .csv or .tsv, that it names")
    text = common.read_text(path)
    if path.suffix == ".jsonl":
        return [(f"{path}:{n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix == ".json":
        try:
            return [(f"{path}:{n}", row) for n, row in enumerate(json.loads(text), 1)]
        except (ValueError, TypeError, RecursionError) as e:
            raise InputError(f"{path}: no JSON list ({e}); want one object a sample")
    csv.field_size_limit(2**31 - 1) # a prompt that is too long has its line in cache.py
    separator = max(",;\t", key=re.split("[\r\n]", text)[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, restkey="more cells", strict=True)
    filled = lambda row: {column: cell for column, cell in row.items() if cell not in (None, "", "NaN", "nan")}
    rows, line = [], 0
    try:
        if len(set(reader.fieldnames or ())) != len(reader.fieldnames or ()):
            raise InputError(f"{path}: two columns of the same name in {reader.fieldnames}; rename one")
        for row in reader:
            line = reader.line_num
            rows.append((f"{path}:{line}", filled(row)))
    except csv.Error as e: # a quote that is never closed would hold all that follows
        raise InputError(f"{path}:{line}: a broken cell after this line ({e}); close its quote")
    return rows

def by_role(row, where):
    """A row with names of COLUMNS -> {role: [cells]}. InputError if two columns mean the same."""
    cells, spelled = {role: {} for role in COLUMNS}, {}
    for column, cell in row.items():
        base, number = re.fullmatch(r"(?s)(?:path_)?(.*?)(?:_path|_file_name)?(?:_(\d+))?", column).groups()
        role, number = next((role for role, names in COLUMNS.items() if base in names), None), int(number or -1)
        if role is None or cell is None or (number >= 0 and role != "control"):
            continue
        if spelled.setdefault(role, base) != base or number in cells[role]:
            raise InputError(f"{where}: column {column!r} means {role}, as another one does; keep one of them")
        cells[role][number] = cell if isinstance(cell, list) else [cell]
    return {role: sum([numbered[n] for n in sorted(numbered)], []) for role, numbered in cells.items()}

def read_row(root, n, where, row, place, alone):
    """-> Sample. Its number in the name keeps rows of one target apart. place(where, cell) -> the picture as a file."""
    try:
        row = json.loads(row) if isinstance(row, str) else row
        cells = by_role(row, where)
    except (ValueError, RecursionError, AttributeError) as e:
        raise InputError(f"{where}: no JSON object ({e}); want one a line")
    if "more cells" in row:
        raise InputError(f"{where}: more cells than columns; put a prompt that holds a comma in quotes")
    for role in ["target", "prompt"] + ["control"] * (not alone):
        if not cells[role]:
            raise InputError(f"{where}: no {role}, only {', '.join(row) or 'nothing'}; fill in a column of that name")
    target, control, mask = [[place(where, cell) for cell in cells[role]] for role in ("target", "control", "mask")]
    if target[1:] or mask[1:] or (alone and control + mask):
        raise InputError(f"{where}: {'a control or mask' if alone else 'several targets or masks'}; leave it out")
    return common.make_sample(where, root, f"{n:06}-{target[0].stem}", target[0], control, cells["prompt"], *mask)

def read_rows(root, rows, place, alone):
    """[(where, row)] -> (samples, problems)."""
    samples, problems, seen = [], [], {}
    for n, (where, row) in enumerate(rows):
        try:
            sample = read_row(root, n, where, row, place, alone)
            if seen.setdefault(key := str([sample.target, sample.controls, sample.prompts]), where) != where:
                raise InputError(f"{where}: the same as {seen[key]}; delete one")
            samples.append(sample)
        except InputError as e:
            problems.append(str(e))
    return samples, problems

def read_parquet(source, folder, alone):
    """-> (samples, problems). Pictures become files in `folder`."""
    def place(where, cell):
        if not isinstance(cell, dict) or not cell.get("bytes"):
            raise InputError(f"{where}: {cell!r:.40} is no picture with its bytes; give the pictures as a folder")
        suffix = {b"\xff\xd8": ".jpg", b"RI": ".webp", b"BM": ".bmp"}.get(cell["bytes"][:2], ".png")
        file = folder / (hashlib.sha256(cell["bytes"]).hexdigest()[:16] + suffix)
        file.write_bytes(cell["bytes"])
        return file
    try:
        import datasets
        rows = datasets.load_dataset(str(source), split="train", streaming=True).decode(False)
        rows = tqdm(rows, desc=f"reading {source}", unit=" rows", disable=None)
        return read_rows(folder, ((f"{source}: row {n}", row) for n, row in enumerate(rows)), place, alone)
    except ImportError:
        raise InputError(f"{source}: parquet files need the package datasets; pip install datasets")
    except Exception as e: # whatever a dozen packages make of a broken file
        raise InputError(f"{source}: cannot be read ({type(e).__name__}: {e}); give its pictures as a folder")

# ---- what comes out: a dataset, or a cache ---------------------------------------------------------------------------

def places_of(sample):
    """{its place in our layout, without suffix: picture} of a sample, controls in order."""
    files = {f"target/{sample.name}": sample.target, f"mask/{sample.name}": sample.mask} | {
        f"control/{sample.name}" + f"_{n}" * (n > 0): file for n, file in enumerate(sample.controls)}
    return {place: file for place, file in files.items() if file}

def picture_suffix(file):
    """Its own, or .png where that names no picture: content counts."""
    suffix = Path(file).suffix
    return suffix if common.KINDS.get(suffix.lower()) == "picture" else ".png"

def write_caption(sample, folder):
    lines = [re.sub(r"\s*[\r\n\0]\s*", " ", prompt) for prompt in sample.prompts] # a line is one more wording
    (folder / f"target/{sample.name}.txt").write_text("\n".join(lines), encoding="utf-8")

def write_dataset(samples, folder):
    """FOLDER/target, control and mask. Pictures are linked, or copied where the disk cannot link."""
    for s in samples:
        for place, file in places_of(s).items():
            path = folder / (place + picture_suffix(file).lower())
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(os.path.realpath(file), path)
            except OSError:
                shutil.copyfile(file, path)
        write_caption(s, folder)

def as_safetensors(path):
    """A command that turns a pickled dictionary of tensors and numbers into safetensors, without running its code."""
    code = ("import sys, torch, safetensors.torch as s; "
            "d = {k: torch.as_tensor(v).clone().contiguous() for k, v in torch.load(sys.argv[1], weights_only=True)"
            ".items()}; s.save_file(d, sys.argv[2])")
    return shlex.join(["python", "-c", code, str(path), str(path.with_suffix(".safetensors"))])

def read_old(path):
    """A dictionary of version 1.0, perhaps with pads and a batch dimension of 1 -> tensors as cache.py has them."""
    if path.suffix != ".safetensors":
        raise InputError(f"{path}: a pickle, which can run code when it is read; convert a dictionary of tensors by: "
                         + as_safetensors(path))
    try:
        with safetensors.safe_open(path, "pt") as f:
            version, tensors = (f.metadata() or {}).get("version", "1.0"), {k: f.get_tensor(k) for k in f.keys()}
        if not {"height", "width", "img_shapes"} & tensors.keys():
            raise ValueError("it has no height and width, and tokens alone may have any shape: add both, in pixels, "
                             "as tensors")
        shapes = get_image_shapes_multi_resolution(tensors, 1)[0]
        tensors = {k: t[0] if t.ndim == 3 or k.endswith("_mask") and t.ndim == 2 else t for k, t in tensors.items()}
        for name in [name for name in ("prompt_embed", "empty_prompt_embed") if name in tensors]: # pads go
            tensors[name] = tensors[name][tensors.get(name + "s_mask", torch.ones(len(tensors[name]))).bool()]
            tensors[name + "s_mask"] = torch.ones(len(tensors[name]), dtype=torch.bool)
        rows = [tensors[name] for name in ("pixel_latent", "control_latent", "prompt_embed")]
        if len(shapes) == 1 and len(rows[1]) == len(rows[0]): # of the time when both were resized to one size
            shapes *= 2
        shapes = torch.tensor(shapes)
        areas, lengths = shapes.prod(-1).tolist(), [len(t) for t in (*rows[:2], tensors.get("edit_mask", rows[0]))]
        if version != "1.0" or lengths != [areas[0], sum(areas[1:]), areas[0]] or any(t.ndim != 2 for t in rows):
            raise ValueError(f"version {version}, {lengths[:2]} tokens for {shapes.tolist()}")
        return tensors | dict(img_shapes=shapes)
    except (OSError, safetensors.SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as e:
        raise InputError(f"{path}: no version 1.0 cache file ({type(e).__name__}: {e}); encode it again")

PARTS = [("latents", "pixel_latent", "control_latent", "img_shapes", "edit_mask"), # a file's folder and tensors
         ("text", "prompt_embed", "prompt_embeds_mask"), ("text", "empty_prompt_embed", "empty_prompt_embeds_mask")]

def convert_cache(paths, folder):
    """-> (samples, problems). The files name no prompts and no model; predict.py will draw at the stock area."""
    samples, problems = [], []
    for path in tqdm(paths, desc="converting", unit=" files", disable=None, leave=False):
        try:
            tensors, name, files = read_old(path), path.stem, {}
            shapes = tensors["img_shapes"].tolist()
            sizes = [(16 * w, 16 * h) for _, h, w in shapes]
            for kind, first, *others in [part for part in PARTS if part[1] in tensors]:
                key = common.content_key(old=common.file_hash(path), part=first)
                files[first] = folder / kind / f"{key}.safetensors"
                common.write_tensors(files[first], {k: tensors[k] for k in [first, *others] if k in tensors},
                                    dict(version=common.VERSION, key=key, sizes=sizes, sources=[str(path)]))
            texts = {(prompt, True): dict(tokens=len(tensors[part]), file=files[part])
                     for prompt, part in ((name, "prompt_embed"), ("", "empty_prompt_embed")) if part in files}
            resolutions = [dict(img_shapes=shapes, file=files["pixel_latent"])]
            samples.append(Sample(name, path.parent.name, [], [name], sizes=sizes, resolutions=resolutions,
                                  texts=texts))
        except InputError as e:
            problems.append(str(e))
    geometry = dict(target_pixels=[1024 * 1024], control_pixels=1024 * 1024, upscale=True)
    cache.write_index(folder / f"{paths[0].resolve().parent.name}.json", samples, geometry, fingerprints={})
    return samples, problems

# ---- command line ----------------------------------------------------------------------------------------------------

def convert_source(source, folder, alone):
    """Whatever SOURCE is, to `folder` -> (samples, problems)."""
    folders, below = find_folders(source), [source] if source.is_file() else sorted(source.glob("*"))
    old = [p for p in below if p.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl")]
    manifests = [p for p in below if p == source or p.name in ("metadata.jsonl", "metadata.json", "metadata.csv")]
    if old and not folders and not alone:
        return convert_cache(old, folder)
    if [*source.glob("*.parquet"), *source.glob("data/*.parquet")]:
        folder.with_name("rows").mkdir()
        samples, problems = read_parquet(source, folder.with_name("rows"), alone)
    elif len(manifests) == 1 and not {"target", "control"} <= folders.keys():
        place = lambda where, name: common.find_picture(manifests[0], where, name, anywhere=False)
        samples, problems = read_rows(manifests[0], manifest_rows(manifests[0]), place, alone)
    elif "target" in folders and "control" not in folders and not alone and len(held := [
            path.name for path in below if path.is_dir()]) > 1:
        raise InputError(f"{source}: holds {', '.join(held)}; name the folder of the controls control/, and further "
                         "controls in it NAME_1, NAME_2")
    elif "target" in folders and not alone:
        samples, problems = read_folders(source, folders)
        problems += [error_line(f"{p}: not used, as there are folders; delete it, or give it alone") for p in manifests]
    else:
        held = ", ".join(path.name for path in below[:5]) if source.exists() else "does not exist"
        raise InputError(f"{source}: {'two manifests' if manifests else held}; want target/NAME.png, control/NAME.png, "
                         "one metadata.jsonl, .json or .csv, parquet files, or a cache of version 1.0")
    write_dataset(samples, folder)
    return samples, problems or [error_line(f"{source}: no sample in it; --help tells the layouts")] * (not samples)

def main():
    parser = common.Parser(__doc__)
    parser.add_argument("source", type=Path, help="a folder or a manifest, as above")
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--alone", action="store_true", help="rows have no controls, and OUT no control/")
    parser.add_argument("--skip_bad", action="store_true", help="go on without the samples that have an error")
    args = parser.parse_args()
    if args.out.exists():
        raise InputError(f"{args.out}: is there already; give another folder")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".import-", dir=args.out.parent) as tmp:
            samples, problems = convert_source(args.source, Path(tmp, "out"), args.alone)
            print("".join(problem + "\n" for problem in problems), end="", file=sys.stderr)
            if not samples or (problems and not args.skip_bad):
                sys.exit("nothing is written; correct these errors, or leave the samples out: --skip_bad")
            os.replace(Path(tmp, "out"), args.out)
    except OSError as e:
        raise InputError(f"{args.out}: cannot be written ({e}); free some space, or give another folder")
    print(f"{args.out}: {len(samples)} samples")

if __name__ == "__main__":
    main()
