"""
Converts a dataset of another layout into ours. What is given is only read; OUT appears whole, or not at all.

$ python tools/import_data.py SOURCE OUT             # next: python tools/doctor.py OUT; python train.py --data OUT
  SOURCE is known by its names. It is
    a folder         with targets and controls in folders with names in FOLDERS; or with tables called metadata.* in it,
                     in its train/ or data/; or with parquet files of the Hugging Face hub in it or its data/; or with
                     NAME-condlabel.png beside NAME.png, as OneTrainer has it
    a table          .jsonl, .json, .csv (commas, semicolons or tabs) or .parquet, whose columns have names in COLUMNS
    a configuration  .toml of musubi-tuner, .yaml of ai-toolkit: its folders and tables, and the suffix of captions
    a 1.0 cache      a folder of .safetensors dictionaries, one a sample, with img_shapes, or height and width; without
                     height_control and width_control the control has the target's size
$ python tools/import_data.py OUT --target DIR --control DIR [DIR ...] [--mask DIR] [--prompt TEXT] # the same names
$ python tools/import_data.py SOURCE OUT --columns target=dst control=src,ref prompt=instr  # a table of other names
$ python tools/import_data.py faces.csv OUT --alone                                 # pictures without controls

Controls of NAME are NAME, NAME_1, NAME_2 (or NAME_control_1), or counted from 0, NAME_0, NAME_1; masks NAME_mask or
NAME-masklabel. Captions are NAME.txt beside the target, else beside the control; one of several lines is joined to a
single prompt (in OUT a line is one more wording). Pictures are hard links where possible: they take no space, but a
program that changes one in place changes both. A table or configuration that you name may name any file; a table found
in a folder, which may come from strangers, only files below its own. A cache becomes a cache, whose index train.py
takes as --data. What is wrong is listed, a line each; then nothing is written, unless --skip_bad leaves it out.
"""
import argparse
import csv
import functools
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

import yaml # comes with huggingface_hub
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent)) # where the core scripts are
import common
from common import InputError, error_line
from tools import import_cache

# what others call it: folders, with - for _; columns, with or without path_ before, _path or _file_name behind
FOLDERS = dict(
    target=("target", "targets", "target_images", "training_images", "images", "image_dir", "edited_images"),
    control=("control", "controls", "control_images", "control_dir", "reference_images"),
    mask=("mask", "masks", "mask_images"))
COLUMNS = dict(
    target=("target", "target_image", "target_img", "image", "output", "output_image", "edited", "edited_image",
            "file_name"),
    control=("control", "control_image", "control_images", "edit_image", "edit_images", "source", "source_image",
             "source_img", "input", "input_image", "original", "original_image", "conditioning_image", "reference",
             "reference_image", "reference_images"), # also numbered, from 0 or 1
    mask=("mask", "mask_image", "mask_img", "edit_mask", "control_mask"),
    prompt=("prompt", "caption", "text", "instruction", "edit_prompt", "edit_instruction"))
TABLES, CONFIGS = (".jsonl", ".json", ".csv", ".tsv"), (".toml", ".yaml", ".yml")
ASK = "name the folders: OUT --target DIR --control DIR" # the way out of all that is not understood

def role_of(name, names_of):
    """Which role of FOLDERS or COLUMNS has this name? None if none has."""
    return next((role for role, names in names_of.items() if name in names), None)

# ---- folders ---------------------------------------------------------------------------------------------------------

BESIDE = {"_mask": "mask", "-masklabel": "mask", "-condlabel": ("control", 0, 0)} # endings of pictures beside a target
WHY_NOT = dict(dict.fromkeys(["picture", "caption"], "no target has this name; rename or delete it"),
               other="this kind of picture is not read; convert it to PNG or delete it",
               link="a link to a folder is not followed; put the folder itself there, or delete it")

def find_folders(source):
    """-> {role: folder} of FOLDERS. InputError if two mean the same."""
    found = {}
    for folder in filter(Path.is_dir, sorted(source.glob("*"))):
        role = role_of(folder.name.lower().replace("-", "_"), FOLDERS)
        if role and found.setdefault(role, folder) != folder:
            raise InputError(f"{folder}: means the same as {found[role].name}/; keep one of them, or {ASK}")
    return found

def list_files(folders):
    """{role: folder} -> {(role, stem, kind): paths}. What lies in two of the folders counts for the inner one."""
    files = {}
    for role, folder in folders.items():
        inner = [other for other in folders.values() if other != folder and other.is_relative_to(folder)]
        for (stem, kind), paths in common.find_files(folder).items():
            if not any(paths[0].is_relative_to(other) for other in inner):
                files[role, stem, kind] = paths
    return files

def meanings(role, stem, kind, targets):
    """What a file may be, by its name: [(name of a target, what)]. what: "target", "caption", "mask", "spare caption"
    (a control's), or ("control", k, its number in the folder of controls k)."""
    found = []
    if kind == "caption" and role != "mask":
        found = [(stem, "caption" if role == "target" else "spare caption")]
    if kind == "picture":
        found = [(stem, ("control", role, 0) if isinstance(role, int) else role)]
        if isinstance(role, int) and (m := re.fullmatch(r"(?s)((.+?)(?:_control)?)_(\d+)", stem)):
            found += [(name, ("control", role, int(m[3]))) for name in {m[1], m[2]}] # one, unless NAME_control_1
        if role != "target" or stem not in targets:
            found += [(stem.removesuffix(end), what) for end, what in BESIDE.items() if stem.endswith(end)]
    return [(name, what) for name, what in found if name in targets]

def read_folders(target, controls, mask=None, suffix=".txt", alone=False, prompt=None):
    """Folders in which names match -> (samples, problems). suffix: of the captions; prompt: of targets without one."""
    folders = {"target": target, **dict(enumerate(controls))}
    if mask:
        folders["mask"] = mask
    for folder in folders.values():
        if not folder.is_dir():
            raise InputError(f"{folder}: no folder of this name; correct it, or {ASK}")
    if target in controls:
        raise InputError(f"{target}: both targets and controls; give the folder of the controls")
    if alone and controls:
        raise InputError(f"{controls[0]}: a folder of controls; leave --alone out, or give OUT --target DIR --alone")
    files = list_files(folders)
    images = {stem for role, stem, kind in files if (role, kind) == ("target", "picture")}
    beside = {stem for stem in images for end in BESIDE if stem.endswith(end) and stem.removesuffix(end) in images}
    beside -= {stem for role, stem, kind in files if (role, kind) == ("target", "caption")} # these are targets
    targets, samples, problems = {name: {} for name in sorted(images - beside)}, [], []
    for key, paths in files.items():
        owners = meanings(*key, targets)
        for name, what in owners:
            targets[name].setdefault(what if len(owners) == 1 else "unclear", []).extend(paths)
        if not owners and (key[2] != "caption" or suffix == ".txt"):
            problems += [error_line(f"{path}: not used: {WHY_NOT[key[2]]}") for path in paths]
    found = {what for own in targets.values() for what in own}
    if targets and not alone and not any(what == "unclear" or what[0] == "control" for what in found):
        raise InputError(f"{target}: no control has the name of one of these targets; {ASK}, or --alone for none")
    for name, own in targets.items():
        try:
            check_files(name, own, targets, controls, alone)
            own_controls = [own[what][0] for what in sorted(what for what in own if what[0] == "control")]
            path, text = read_caption(own, own_controls, suffix, prompt)
            samples.append(common.make_sample(path, target, name, own["target"][0], own_controls, [text],
                                              *own.get("mask", [])))
        except InputError as e:
            problems.append(str(e))
    return samples, problems

def check_files(name, files, targets, controls, alone):
    """InputError if a target's {what: paths} are not one each, with controls counted from 0 in each folder of them."""
    target = files["target"][0]
    if "unclear" in files:
        raise InputError(f"{files['unclear'][0]}: of {name}, or of another target; rename one of them")
    base = re.sub(r"(?s)_\d+$", "", name)
    if base != name and base in targets and not alone:
        raise InputError(f"{target}: its control would be taken for a further one of {base}; rename it")
    for what, (path, *others) in files.items():
        if others and what != "spare caption":
            raise InputError(f"{path}: {others[0]} is meant for the same; keep one of them")
    if alone and ("control", 0, 0) in files:
        raise InputError(f"{files['control', 0, 0][0]}: a control; leave --alone out, or move it elsewhere")
    for k, folder in enumerate(controls or [target.parent] * (not alone)):
        numbers = sorted(what[2] for what in files if what[:2] == ("control", k))
        if numbers != list(range(len(numbers) or 1)):
            held = f"its controls are numbered {numbers}" if numbers else "no control"
            raise InputError(f"{target}: {held} in {folder}; want one of its name, further ones numbered 1, 2, ...")

def read_caption(files, controls, suffix, prompt):
    """A target's {what: paths} and its controls -> (caption's file, text)."""
    target = files["target"][0]
    found = files.get("caption", []) + files.get("spare caption", [])
    if suffix != ".txt":
        found = [path.with_suffix(suffix) for path in (target, *controls) if path.with_suffix(suffix).exists()]
    if not found and prompt:
        return target, prompt
    if not found:
        raise InputError(f"{target}: no caption; expected {target.with_suffix(suffix)}, or give --prompt for all such")
    text = common.read_text(found[0]).strip()
    if suffix == ".json":
        raise InputError(f"{found[0]}: a caption in JSON is not read; write it as .txt, then {ASK}")
    if "[trigger]" in text:
        raise InputError(f"{found[0]}: holds [trigger]; write the word itself")
    return found[0], text

# ---- tables ----------------------------------------------------------------------------------------------------------

def read_rows(table):
    """-> pairs (where, row). A row is an object, or a line that should be one; None in it is an empty cell."""
    if table.suffix == ".parquet":
        return read_parquet(table)
    if table.suffix not in TABLES:
        raise InputError(f"{table}: no table; want {', '.join(TABLES)}, .parquet or a trainer's {', '.join(CONFIGS)}")
    text = common.read_text(table)
    if table.suffix == ".jsonl":
        return [(f"{table}:{n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if table.suffix == ".json":
        try:
            return [(f"{table}:{n}", row) for n, row in enumerate(json.loads(text), 1)]
        except (ValueError, TypeError, RecursionError) as e:
            raise InputError(f"{table}: no JSON list ({e}); want one object a sample")
    csv.field_size_limit(2**31 - 1) # a prompt that is too long has its line in cache.py
    separator = max(",;\t", key=re.split("[\r\n]", text)[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, restkey="more cells", strict=True)
    rows, line = [], 0
    try:
        if len(set(reader.fieldnames or ())) != len(reader.fieldnames or ()):
            raise InputError(f"{table}: two columns of the same name in {reader.fieldnames}; rename one")
        for row in reader:
            line = reader.line_num
            empty = [column for column, cell in row.items() if cell in ("", "NaN", "nan")]
            rows.append((f"{table}:{line}", row | dict.fromkeys(empty)))
    except csv.Error as e: # a quote that is never closed would hold all that follows
        raise InputError(f"{table}:{line}: a broken cell after this line ({e}); close its quote")
    return rows

def read_parquet(table):
    """Yields (where, row), a few at a time, as pictures may be inside."""
    try:
        import pyarrow.parquet
        batches = pyarrow.parquet.ParquetFile(table).iter_batches(batch_size=16)
        rows = (row for batch in batches for row in batch.to_pylist())
        for n, row in enumerate(tqdm(rows, desc=f"reading {table}", unit=" rows", disable=None)):
            yield f"{table}: row {n}", row
    except ImportError:
        raise InputError(f"{table}: parquet files need a package; pip install pyarrow")
    except Exception as e: # whatever it makes of a broken file
        raise InputError(f"{table}: cannot be read ({type(e).__name__}: {e}); put its pictures in folders, then {ASK}")

def read_column(column):
    """Its name -> (role or None, name without what COLUMNS leaves out, number or -1)."""
    base, number = re.fullmatch(r"(?s)(?:path_)?(.*?)(?:_path|_file_names?)?(?:_(\d+))?", column).groups()
    role = role_of(base, COLUMNS)
    return role if role == "control" or number is None else None, base, int(number or -1)

class NoColumn(InputError):
    """A row lacks a column; a class of its own because of a csv or parquet file then all rows do, and one says it."""

def rename(row, where, columns):
    """A row with the columns of --columns, {role: [names]}, under our names, and without others of these roles."""
    named = sum(columns.values(), [])
    if missing := [name for name in named if name not in row]:
        raise NoColumn(f"{where}: no column {missing[0]}, only {', '.join(row)}; correct --columns")
    renamed = {name: cell for name, cell in row.items() if name not in named and read_column(name)[0] not in columns}
    for role, names in columns.items():
        for n, name in enumerate(names):
            renamed[f"control_{n}" if role == "control" else role] = row[name]
    return renamed

def by_role(row, where):
    """A row with names of COLUMNS -> {role: [cells]} of the roles that have a column. InputError if two columns mean
    the same."""
    found, spelled = {}, {}
    for column, cell in row.items():
        role, base, number = read_column(column)
        cells = found.setdefault(role, {})
        if role is None or cell is None:
            continue
        if spelled.setdefault(role, base) != base or number in cells:
            raise InputError(f"{where}: column {column!r} means {role}, as another one does; say which: --columns "
                             f"{role}={column}")
        cells[number] = cell if isinstance(cell, list) else [cell]
    return {role: sum([cells[n] for n in sorted(cells)], []) for role, cells in found.items()}

def read_row(number, where, row, place, columns, alone):
    """-> Sample. Its number keeps rows of one target apart. place(where, cell) -> the picture as a file."""
    try:
        row = json.loads(row) if isinstance(row, str) else row
        cells = by_role(rename(row, where, columns), where)
    except (ValueError, RecursionError, AttributeError, TypeError) as e:
        raise InputError(f"{where}: no JSON object ({e}); want one a line")
    if "more cells" in row:
        raise InputError(f"{where}: more cells than columns; put a prompt that holds a comma in quotes")
    roles = ["target", "prompt"] if alone else ["target", "control", "prompt"]
    if missing := [role for role in roles if role not in cells]:
        raise NoColumn(f"{where}: no {', '.join(missing)}, only {', '.join(row) or 'nothing'}; say which column it is: "
                       f"--columns {'=NAME '.join(missing)}=NAME, or --alone if there are no controls")
    for role in roles:
        if not cells[role]:
            raise InputError(f"{where}: an empty {role}; correct it, or leave such rows out: --skip_bad")
    target, control, mask = [[place(where, cell) for cell in cells.get(role, ())]
                             for role in ("target", "control", "mask")]
    if alone and control + mask:
        raise InputError(f"{where}: a control or mask; leave --alone out")
    if target[1:] or mask[1:]:
        raise InputError(f"{where}: several targets or masks; leave one, or name another column: --columns")
    name = f"{number:06}-{target[0].stem}"
    return common.make_sample(where, "rows", name, target[0], control, cells["prompt"], *mask)

def find_file(table, anywhere, folder, where, cell):
    """A cell of a table -> file. A path begins at the table's folder, or with `anywhere` at the working folder; the
    bytes of a picture, as parquet files have them, become a file in `folder`."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if isinstance(cell, bytes):
        suffix = {b"\xff\xd8": ".jpg", b"RI": ".webp", b"BM": ".bmp"}.get(cell[:2], ".png")
        file = folder / (hashlib.sha256(cell).hexdigest()[:16] + suffix)
        file.write_bytes(cell)
        return file
    base = table.parent
    if not isinstance(cell, str) or not cell:
        raise InputError(f"{where}: {cell!r:.100} is no picture or path; name another column: --columns")
    file = Path(os.path.normpath(base / cell)) # first: link/../a.png may be another file than a.png
    if os.path.isfile(file):
        if anywhere or file.resolve().is_relative_to(base.resolve()):
            return file
        raise InputError(f"{where}: {cell!r} lies outside of {base}; if you trust it, give {table} itself as SOURCE")
    if anywhere and os.path.isfile(cell):
        return Path(cell)
    raise InputError(f"{where}: {cell!r:.200} is no file; paths begin at {base}: correct it, or move the table")

def read_tables(tables, anywhere, folder, columns, alone):
    """-> (samples, problems). What two tables have is one sample. anywhere, folder: see find_file."""
    samples, problems, seen = [], [], {}
    rows = ((table, where, row) for table in tables for where, row in read_rows(table))
    for number, (table, where, row) in enumerate(rows):
        try:
            place = functools.partial(find_file, table, anywhere, folder)
            sample = read_row(number, where, row, place, columns, alone)
            first_table, first = seen.setdefault(str([sample.target, sample.controls, sample.prompts]), (table, where))
            if first == where:
                samples.append(sample)
            elif first_table == table:
                raise InputError(f"{where}: the same as {first}; delete one")
        except InputError as e:
            if isinstance(e, NoColumn) and table.suffix not in (".json", ".jsonl"):
                raise
            problems.append(str(e))
    return samples, problems

# ---- configurations of other trainers --------------------------------------------------------------------------------

NOT_TAKEN = ("num_repeats", "trigger_word", "default_caption", "multiple_target", "is_reg") # said, if they are set

def read_config(path):
    """-> a list of what read_folders or read_tables takes, one for each dataset in it."""
    text = common.read_text(path)
    try:
        if path.suffix == ".toml":
            config = tomllib.loads(text)
            datasets = [config.get("general", {}) | dataset for dataset in config["datasets"]]
            parts = [musubi_part(path, dataset) for dataset in datasets]
        else:
            processes = yaml.safe_load(text)["config"]["process"]
            datasets = [process | dataset for process in processes for dataset in process["datasets"]]
            parts = [aitoolkit_part(path, dataset) for dataset in datasets]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as e:
        raise InputError(f"{path}: no datasets of pictures in it ({type(e).__name__}: {common.first_words(e)}); {ASK}")
    for key in NOT_TAKEN:
        if any(dataset.get(key) not in (None, "", 1, False) for dataset in datasets):
            print(f"{path}: {key} is not taken over" + "; train.py --repeats does that" * (key == "num_repeats"))
    return parts

def locate(config, name):
    """A path in a configuration begins at the working folder, as for its trainer, or else at the configuration."""
    return Path(name) if os.path.exists(name) else config.parent / name

def caption_suffix(extension):
    """txt or .txt -> .txt. ValueError for what no file name can end in."""
    return Path("caption").with_suffix("." + extension.lstrip(".")).suffix

def musubi_part(config, dataset):
    if "image_jsonl_file" in dataset:
        return dict(tables=[locate(config, dataset["image_jsonl_file"])], anywhere=True)
    controls = [locate(config, dataset["control_directory"])] if "control_directory" in dataset else []
    return dict(target=locate(config, dataset["image_directory"]), controls=controls,
                suffix=caption_suffix(dataset.get("caption_extension", "txt")))

def aitoolkit_part(config, dataset):
    """Its controls are control_path, a text or a list, and control_path_1 or control_path2, ..., which may be null."""
    controls = []
    for key in sorted(dataset):
        if re.fullmatch(r"control_path(_?\d)?", key) and dataset[key]:
            controls += dataset[key] if isinstance(dataset[key], list) else [dataset[key]]
    return dict(target=locate(config, dataset["folder_path"]), controls=[locate(config, name) for name in controls],
                mask=locate(config, dataset["mask_path"]) if dataset.get("mask_path") else None,
                suffix=caption_suffix(dataset.get("caption_ext", "txt")))

# ---- what comes out --------------------------------------------------------------------------------------------------

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

# ---- command line ----------------------------------------------------------------------------------------------------

def column(text):
    """For argparse's type=: 'control=src,ref' -> ('control', ['src', 'ref'])."""
    role, _, names = text.partition("=")
    if role not in COLUMNS or not names:
        raise argparse.ArgumentTypeError(f"{text!r} is not target=NAME, control=NAME,NAME, mask=NAME or prompt=NAME")
    return role, names.split(",") if role == "control" else [names]

def find_parts(source, columns, alone):
    """Whatever SOURCE is, but a cache -> a list of what read_folders or read_tables takes."""
    if source.suffix in CONFIGS:
        return read_config(source)
    if source.is_file():
        return [dict(tables=[source], anywhere=True)]
    if parquets := sorted([*source.glob("*.parquet"), *source.glob("data/*.parquet")]):
        return [dict(tables=[path for path in parquets if "train" in path.name] or parquets, anywhere=False)]
    folders = find_folders(source)
    found = [path for name in (".", "train", "data") for path in sorted(source.glob(f"{name}/metadata.*"))]
    tables = [path for path in found if path.suffix in TABLES and path.parent == found[0].parent]
    if tables and (columns or not {"target", "control"} <= folders.keys()):
        return [dict(tables=tables, anywhere=False)]
    if tables:
        raise InputError(f"{tables[0]}: not used, as there are folders; delete it, or give it itself as SOURCE")
    target = folders.get("target", source)
    if alone or {"target", "control"} <= folders.keys() or list(target.glob("*-condlabel.*")):
        controls = [folders["control"]] if "control" in folders else []
        return [dict(target=target, controls=controls, mask=folders.get("mask"))]
    if not source.exists():
        raise InputError(f"{source}: does not exist; check the name")
    held = ", ".join([path.name for path in sorted(source.glob("*"))][:5]) or "nothing"
    raise InputError(f"{source}: holds {held}; {ASK} (or --target DIR --alone), or give a table or a configuration "
                     "itself as SOURCE; -h tells which names are known")

def convert(args, columns, tmp):
    """What the flags name, to TMP/out -> (samples, problems)."""
    source = args.target or args.source
    old = [path for path in [source, *sorted(source.glob("*"))] if path.suffix in import_cache.SUFFIXES]
    if old and not args.target and not args.alone and not find_folders(source):
        if args.prompt:
            raise InputError(f"--prompt: {source} is a cache of version 1.0, which has its own; leave it out")
        return import_cache.convert_cache(old, tmp / "out")
    if args.target:
        parts = [dict(target=args.target, controls=args.control, mask=args.mask)]
    else:
        parts = find_parts(source, columns, args.alone)
    if columns and not any("tables" in part for part in parts):
        raise InputError(f"--columns: {source} is no table; leave it out")
    if args.prompt and all("tables" in part for part in parts):
        raise InputError(f"--prompt: {source} is a table, which has its own; leave it out")
    samples, problems = [], []
    for n, part in enumerate(parts):
        if "tables" in part:
            found, wrong = read_tables(**part, folder=tmp, columns=columns, alone=args.alone)
        else:
            found, wrong = read_folders(**part, alone=args.alone, prompt=args.prompt)
        for sample in found:
            if len(parts) > 1: # each has its folder, as their names may be the same
                sample.name = f"{n}/{sample.name}"
        samples += found
        problems += wrong
    if not samples and not problems:
        problems.append(error_line(f"{source}: no sample in it; see -h for the layouts, or {ASK}"))
    write_dataset(samples, tmp / "out")
    return samples, problems

def main():
    parser = common.Parser(__doc__)
    parser.usage = "import_data.py SOURCE OUT [flags], or import_data.py OUT --target DIR --control DIR [flags]"
    names = [f"  {role}: {', '.join(names)}" for known in (FOLDERS, COLUMNS) for role, names in known.items()]
    parser.epilog = "FOLDERS and then COLUMNS:\n" + "\n".join(names)
    by_flags = parser.given() & {"--target", "--control", "--mask"}
    if not by_flags:
        parser.add_argument("source", type=Path, help="a folder, a table or a configuration, as above")
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--target", type=Path, metavar="DIR", help="the folder of the targets, in place of SOURCE")
    parser.add_argument("--control", type=Path, nargs="+", action="extend", default=[], metavar="DIR",
                        help="the folders of the controls, in their order")
    parser.add_argument("--mask", type=Path, metavar="DIR", help="the folder of the masks, if there are any")
    parser.add_argument("--prompt", metavar="TEXT", help="the instruction of each target that has no caption")
    parser.add_argument("--columns", type=column, nargs="+", action="extend", default=[], metavar="ROLE=NAME",
                        help="columns of a table that are target, control (several with commas), prompt, mask")
    parser.add_argument("--alone", action="store_true", help="there are no controls, and OUT has no control/")
    parser.add_argument("--skip_bad", action="store_true", help="go on without the samples that have an error")
    args = parser.parse_args()
    columns = {}
    for role, names in args.columns:
        if role in columns and role != "control":
            parser.error(f"argument --columns: {role} is given twice; leave one out")
        columns[role] = columns.get(role, []) + names
    if args.prompt is not None:
        common.make_sample("--prompt", args.out, "", None, [], [args.prompt]) # is a good prompt, or ends here
    if by_flags and not args.target:
        parser.error("argument --target: missing; give it with --control or --mask")
    if args.out.exists():
        raise InputError(f"{args.out}: is there already; give another folder")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".import-", dir=args.out.parent) as tmp:
            samples, problems = convert(args, columns, Path(tmp))
            print("".join(problem + "\n" for problem in problems), end="", file=sys.stderr)
            if not samples or (problems and not args.skip_bad):
                sys.exit("nothing is written; correct these errors, or leave the samples out: --skip_bad")
            os.replace(Path(tmp, "out"), args.out)
    except OSError as e:
        raise InputError(f"{args.out}: cannot be written ({e}); free some space, or give another folder")
    print(f"{args.out}: {len(samples)} samples")

if __name__ == "__main__":
    main()
