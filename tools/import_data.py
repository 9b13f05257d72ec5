"""
Converts a dataset from another layout to ours. The source does not change. OUT appears only when it is complete.

$ python tools/import_data.py SOURCE OUT             # it prints the commands that come next
  SOURCE is recognised by its names. It is
    a folder         which contains folders of targets and controls, with names in FOLDERS; or a table called
                     metadata.*; or parquet files of the Hugging Face hub in it or its data/; or NAME-condlabel.png
                     beside NAME.png, as OneTrainer has it
    a table          .jsonl, .json, .csv (commas, semicolons or tabs) or .parquet, whose columns have names in COLUMNS
    a configuration  .yaml of ai-toolkit, .toml of musubi-tuner or sd-scripts, .json of OneTrainer, config.json or
                     multidatabackend.json of SimpleTuner, or .sh with the command of DiffSynth-Studio or musubi-tuner:
                     its folders, its tables and its captions; and its settings, as a line of train.py
    a 1.0 cache      a folder of .safetensors dictionaries, one for each sample, with img_shapes, or height and width;
                     without height_control and width_control the control has the target's size
$ python tools/import_data.py OUT --target DIR --control DIR [DIR ...] [--mask DIR] [--prompt TEXT] # file names match
$ python tools/import_data.py SOURCE OUT --columns target=dst control=src,ref prompt=instr  # a table with other names
$ python tools/import_data.py faces.csv OUT --alone                                 # pictures without controls
$ python tools/import_data.py SOURCE OUT --hold_out 10                # a tenth of them to OUT_val, for --val_data

The controls of NAME are called NAME, NAME_1, NAME_2 (or NAME_control_1), or, counted from 0, NAME_0, NAME_1; its mask
NAME_mask or NAME-masklabel. Where more names agree without it, an ending such as -Edit, _after or ~2 is left out, and
the E of IMG_E7. Where none agree, so is what all names of a folder share in front and behind, if the rests of both
folders are the same: before_001 is a control of after_001. The prompt is in NAME.txt or NAME.caption beside the target,
or else beside the control; several lines become one prompt (in OUT each line is a prompt of its own). Masks may have
any form that read_mask lists. The pictures in OUT are hard links where the disk allows it: they take no space, but a
program that changes one in place changes the original too.
A table or configuration that you give is no link out of its folder; it may refer to any picture or folder, and a
configuration to tables below its own folder. What is found in a folder, which may come from strangers, may not: a table
refers only to files below its own folder, and no link leads out. A cache becomes a cache; give its index to train.py as
--data. Every error is printed, equal ones in one line, and then nothing is written, unless --skip_bad leaves the faulty
samples out.
"""
import argparse
import csv
import functools
import hashlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent)) # where the core scripts are
import library # first, so that no other folder is taken for one of our modules
import common
from common import InputError, error_line, tell
from library.cli import command_line
from library.data import dataset, picture_files
from library.data.dataset import refuse_many
from library.files import disk, stray_files
from tools.import_configs import ASK, CONFIGS, is_config, next_commands, read_config

# names that other trainers use: of folders, also with - for _; of columns, also with path_ in front, or with _path or
# _file_name behind
FOLDERS = dict(
    target="target targets target_images training_images images image_dir edited_images".split(),
    control="control controls control_images control_dir reference_images".split(),
    mask="mask masks mask_images".split())
COLUMNS = dict(
    target="target target_image target_img image output output_image edited edited_image after file_name".split(),
    control="control control_image control_images edit_image edit_images source source_image source_img input "
            "input_image original original_image conditioning_image reference reference_image reference_images "
            "before".split(), # also numbered, from 0 or 1
    mask="mask mask_image mask_img edit_mask control_mask".split(),
    prompt="prompt caption text instruction edit_prompt edit_instruction".split())
TABLES = ".jsonl .json .csv .tsv".split()
NOTHING_SAID = ["", "nan", "none", "null", "n/a", "<na>"] # cells as programs write what is not there
CACHES = ".safetensors .pt .pth .bin .ckpt .pkl".split() # all but the first are pickles: refused
OTHERS = { # what to do about files that hold samples, and are not read
    ".arrow": "a dataset of save_to_disk; write it as a table with datasets.load_from_disk(FOLDER).to_parquet(FILE), "
              "or load_from_disk(FOLDER)['train'] if it has splits",
    ".tar": f"an archive; unpack it (tar xf FILE), put its targets and controls into two folders, then {ASK}"}
MOST_COLUMNS = 100 # of a table: each row of a letter has a cell for each of them

def role_of(name, names_of):
    """-> the role of FOLDERS or COLUMNS that has this name, or None."""
    return next((role for role, names in names_of.items() if name in names), None)

# ---- folders ---------------------------------------------------------------------------------------------------------

# what programs and people add to the names of edited pictures, and of their originals: an ending; the ~2 of Google and
# Samsung; Apple's E in IMG_E1234
ADDED = re.compile(r"(?i)(?<=[^/])[-_ .](edit|edited|after|target|output|result|retouched|bearbeitet|final|dxo"
                   r"|before|original|orig|control|source|input|raw)\Z|(?<=[^/])~\d+\Z|(?<=IMG_)E(?=\d+\Z)")
# what a name consists of: numbers, words of an alphabet, and single other letters and signs
PIECES = re.compile(r"(?is)\d+|[a-z\u00c0-\u1fff]+|.")
BESIDE = {"_mask": "mask", "-masklabel": "mask", "-condlabel": ("control", 0, 0)} # endings of pictures beside a target
WHY_NOT = {"picture": "no target has this name; rename or delete it",
           "caption": "no target has this name; rename or delete it",
           "other": "this script cannot read such pictures; convert it to PNG (a .jxl by djxl) or delete it"}

def find_folders(source):
    """-> {role: folder}, by the names in FOLDERS. InputError if two folders have the same role."""
    folders = {}
    for folder in filter(Path.is_dir, sorted(source.glob("*"))):
        role = role_of(folder.name.lower().replace("-", "_"), FOLDERS)
        if role:
            stray_files.refuse_outside(folder, source)
        if role and folders.setdefault(role, folder) != folder:
            raise InputError(f"{folder}: means the same as {folders[role].name}/; keep one of them, or {ASK}")
    return folders

def list_files(folders, suffix, source):
    """{role: folder} -> ({(role, stem, kind): paths} of pictures and of captions, which have this suffix or .caption;
    problems). If one folder lies in another, its files count for it alone. Prints what is neither, as cache.py does of
    a dataset. source: the folder in which these were found, or None."""
    files, problems = {}, []
    for role, folder in folders.items():
        inner = [other for other in folders.values() if other != folder and other.is_relative_to(folder)]
        own = {}
        for (stem, kind), paths in stray_files.find_files(folder).items():
            for path in paths:
                if kind in ("caption", "unknown"):
                    kind = "caption" if path.suffix.lower() in (suffix, ".caption") else "unknown"
                if not any(map(path.is_relative_to, inner)):
                    own.setdefault((role, stem, kind), []).append(path)
        if not source:
            problems += stray_files.sort_out(folder, own)
        files |= own
    if source:
        for (stem, _), paths in stray_files.find_files(source).items():
            if not any(map(paths[0].is_relative_to, folders.values())): # such pictures belong to nothing
                files[None, stem, "unknown"] = list(filter(stray_files.is_named_picture, paths))
        problems += stray_files.sort_out(source, files)
    return files, problems

def stems_of(role, kind, files):
    return {stem for r, stem, k in files if (r, k) == (role, kind)}

def count_agreeing(files):
    """-> the number of controls that have the name of a target, or this name with a number behind it."""
    names = stems_of("target", "picture", files)
    return sum(bool(meanings(*key, names)) for key in files if isinstance(key[0], int) and key[2] == "picture")

def cut_added(files):
    """list_files's files, with stems without what was ADDED."""
    cut = {}
    for (role, stem, kind), paths in files.items():
        cut.setdefault((role, ADDED.sub("", stem), kind), []).extend(paths)
    return cut

def cut_shared(stems):
    """Names of a folder -> ({what is left of each without the PIECES that all share in front and behind: name}, the
    form of all, such as before_*). Numbers in front stay: 2023_1 and 2024_1 are two photographs."""
    begin = os.path.commonprefix([PIECES.findall(stem) for stem in stems]) # (which compares the items of any lists)
    front = re.match(r"\D*", "".join(begin))[0]
    rests = [stem[len(front):] for stem in stems]
    end = os.path.commonprefix([PIECES.findall(rest)[::-1] for rest in rests])
    behind = "".join(end[::-1])
    cut = [rest.removesuffix(behind) for rest in rests]
    return dict(zip(cut, stems)), f"{front}*{behind}"

def match_rests(files, folders):
    """-> {(role, name): a target's name} of the controls or masks in a folder without any target's name, if cut_shared
    leaves the same of both, which is printed. (With more on one side nobody knows.) files, folders: list_files's."""
    targets, form = cut_shared(stems_of("target", "picture", files))
    found = {}
    for role, folder in folders.items():
        others, other_form = cut_shared(stems_of(role, "picture", files))
        is_same = targets and targets.keys() == others.keys() and "" not in targets
        if is_same and {*targets.values()}.isdisjoint(others.values()):
            found |= {(role, name): targets[rest] for rest, name in others.items()}
            tell(f"{folder}: {len(others)} names are matched by what differs in them: {other_form} belongs to {form}")
    return found

def meanings(role, stem, kind, targets):
    """-> what a file may be, by its name: [(name of a target, what)]. what: "target", "caption", "mask", "spare
    caption" (a control's), or ("control", number of its folder, its number in that folder)."""
    readings = []
    if kind == "caption" and role != "mask":
        readings = [(stem, "caption" if role == "target" else "spare caption")]
    if kind == "picture":
        readings = [(stem, ("control", role, 0) if isinstance(role, int) else role)]
        if isinstance(role, int) and (m := re.fullmatch(r"(?s)((.+?)(?:_control)?)_(\d+)", stem)):
            readings += [(name, ("control", role, int(m[3]))) for name in {m[1], m[2]}] # NAME_control_1 has two
        if role != "target" or stem not in targets:
            readings += [(stem.removesuffix(end), what) for end, what in BESIDE.items() if stem.endswith(end)]
    return [(name, what) for name, what in readings if name in targets]

def read_folders(target, controls, mask=None, suffix=".txt", alone=False, prompt=None, wordings=False, source=None):
    """Reads folders in which file names match -> (samples, problems). controls: list of folders; suffix: of the caption
    files; prompt: for targets that have no caption; wordings: each line of a caption is a prompt of its own; source:
    the folder in which they were found, out of which no link may lead (default: they were named, and a link may lead
    from one to another)."""
    folders = {"target": target, **dict(enumerate(controls))}
    if mask:
        folders["mask"] = mask
    for folder in folders.values():
        if not folder.is_dir():
            raise InputError(f"{folder}: no folder has this name; {stray_files.near_path(folder)}, or {ASK}")
    if target in controls:
        raise InputError(f"{target}: given as both targets and controls; give the folder of the controls")
    allowed = [source] if source else list(folders.values())
    files, problems = list_files(folders, suffix, source)
    if controls and count_agreeing(cut := cut_added(files)) > count_agreeing(files):
        files = cut
    names = match_rests(files, folders)
    images = stems_of("target", "picture", files)
    beside = {stem for stem in images for end in BESIDE if stem.endswith(end) and stem.removesuffix(end) in images}
    beside -= stems_of("target", "caption", files) # only targets have captions
    targets, samples, lacking = {name: {} for name in sorted(images - beside)}, [], set()
    for (role, stem, kind), paths in files.items():
        owners = meanings(role, names.get((role, stem), stem), kind, targets)
        for name, what in owners:
            targets[name].setdefault(what if len(owners) == 1 else "unclear", []).extend(paths)
        if not owners:
            problems += [error_line(f"{path}: not used: {WHY_NOT[kind]}") for path in paths]
        # a sample lacks this control, or mask, unless another picture is in its place
        if kind == "other" and role != "target" and (role, stem, "picture") not in files:
            lacking |= {stem, re.sub(r"(_control)?_\d+$", "", stem)}
    has_controls = any(what == "unclear" or what[0] == "control" for own in targets.values() for what in own)
    is_readable = all(kind != "other" for _, _, kind in files) # raw files have lines of their own
    if targets and not alone and not has_controls and is_readable:
        shown = {role: paths[0].name for (role, _, kind), paths in files.items() if kind == "picture"}
        forms = [cut_shared(stems_of(role, "picture", files))[1] for role in ("target", 0)]
        raise InputError(f"{target}: no control has the name of one of these targets (target {shown['target']} of all "
                         f"{forms[0]}, control {shown.get(0, 'none')} of all {forms[1]}: what differs must be the same "
                         f"on both sides); rename one side, or {ASK}, or give a table that names the pairs, or add "
                         "--alone if there are no controls")
    for name, own in [item for item in targets.items() if item[0] not in lacking]:
        with common.collect_errors(problems):
            refuse_links(sum(own.values(), []), allowed)
            check_files(name, own, targets, controls, alone)
            numbers = sorted(what for what in own if what[0] == "control")
            own_controls = [own[what][0] for what in numbers]
            path, captions = read_captions(own, suffix, prompt, wordings)
            masks = {"mask": path for path in own.get("mask", [])}
            samples.append(dataset.make_sample(path, target, name, own["target"][0], own_controls, captions, masks))
    return samples, problems

def refuse_links(paths, folders):
    """InputError for a link that leads out of all of these folders."""
    for path in paths:
        if path.is_symlink() and not any(common.is_inside(path, folder) for folder in folders):
            stray_files.refuse_outside(path, folders[0])

def check_files(name, files, targets, controls, alone):
    """InputError unless a target has one file of each kind, and controls without gaps in each folder. files: its {what:
    paths}."""
    target = files["target"][0]
    if "unclear" in files:
        raise InputError(f"{files['unclear'][0]}: belongs to {name} or to another target; rename one of them")
    base = re.sub(r"(?s)_\d+$", "", name)
    if base != name and base in targets and not alone:
        raise InputError(f"{target}: its control has the name of a further control of {base}; rename the pair")
    for what, (path, *others) in files.items():
        if others and what != "spare caption":
            raise InputError(f"{path}: {others[0]} has the same role; keep one of them")
    if alone and ("control", 0, 0) in files:
        raise InputError(f"{files['control', 0, 0][0]}: a control, which --alone excludes; leave --alone out, or move "
                         "the file elsewhere")
    for k, folder in enumerate(controls or [target.parent] * (not alone)):
        numbers = sorted(what[2] for what in files if what[:2] == ("control", k))
        if numbers != list(range(len(numbers) or 1)):
            fault = f"its controls are numbered {numbers}" if numbers else "no control"
            raise InputError(f"{target}: {fault} in {folder}; name the first one like the target, further ones with "
                             "_1, _2, ... behind it")

def read_captions(files, suffix, prompt, wordings):
    """-> (file of a target's caption, its prompts). files: the target's {what: paths}; prompt: for a target without a
    file; suffix, wordings: as for read_folders."""
    target = files["target"][0]
    captions = files.get("caption", []) + files.get("spare caption", [])
    if not captions:
        if not prompt:
            raise InputError(f"{target}: no caption; write {target.with_suffix(suffix)}, or give --prompt for all "
                             "targets without one")
        return target, [prompt]
    text = stray_files.read_text(captions[0]).strip()
    lines = [line for line in re.split("[\r\n]+", text) if line.strip()]
    return captions[0], lines if wordings else [text]

# ---- tables ----------------------------------------------------------------------------------------------------------

def read_rows(table):
    """-> pairs (where, row). A row is a dictionary, or a line of JSON that should hold one; None is an empty cell."""
    if table.suffix == ".parquet":
        return read_parquet(table)
    if table.suffix in OTHERS:
        raise InputError(f"{table}: {OTHERS[table.suffix]}")
    if table.suffix not in TABLES:
        raise InputError(f"{table}: not a table; give {', '.join(TABLES)}, .parquet or a trainer's "
                         + ", ".join(CONFIGS))
    text = stray_files.read_text(table, common.LONG_TEXT)
    if table.suffix == ".jsonl":
        return [(f"{table}:{n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if table.suffix == ".json":
        try:
            rows = common.read_json(text)
            if not isinstance(rows, list):
                raise TypeError(f"it is {text.strip():.40}")
        except Exception as e: # a foreign file can fail in any way
            raise InputError(f"{table}: no JSON list ({common.first_words(e)}); it must list an object for each sample")
        return [(f"{table}:{n}", row) for n, row in enumerate(rows, 1)]
    return read_csv(table, text)

def read_csv(table, text):
    """Yields (where, row), one at a time: a row of one letter has a cell for each column."""
    csv.field_size_limit(2**31 - 1) # make_sample reports prompts that are too long
    separator = max(",;\t", key=re.split("[\r\n]", text)[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, restkey="more cells", strict=True,
                            skipinitialspace=True)
    line = 0
    try:
        names = reader.fieldnames or []
        if len(names) > MOST_COLUMNS:
            raise InputError(f"{table}: {len(names):,} columns, and {MOST_COLUMNS:,} are read at most; leave out those "
                             "that say nothing about pictures")
        if len(set(names)) != len(names):
            raise InputError(f"{table}: two columns have the same name in {str(names):.300}; rename one")
        for row in reader:
            line = reader.line_num
            inner = [part for cell in row.values() if isinstance(cell, str) for part in cell.splitlines()[1:]]
            if any(is_row(part, separator, names) for part in inner):
                raise InputError(f"{table}:{line}: a cell with another row in it; close the quote that opens it")
            empty = [column for column, cell in row.items() if str(cell).lower() in NOTHING_SAID]
            yield f"{table}:{line}", row | dict.fromkeys(empty)
    except csv.Error as e: # e.g. a quote that is never closed, and would swallow the rest of the file
        raise InputError(f"{table}:{line}: a broken cell after this line ({e}); close its quote")

def is_row(text, separator, columns):
    """Whether a line of a cell looks like one of the table's rows, which a stray quote has swallowed."""
    cells = text.split(separator)
    return len(cells) == len(columns) and any(Path(cell).suffix.lower() in stray_files.PICTURES for cell in cells)

def read_parquet(table):
    """Yields (where, row). It reads a few rows at a time, as they may contain pictures."""
    try:
        import pyarrow.parquet
        file = pyarrow.parquet.ParquetFile(open(table, "rb")) # opened here, as it takes no name that is not UTF-8
        if len(file.schema_arrow) > MOST_COLUMNS:
            raise ValueError(f"over {MOST_COLUMNS:,} columns")
        batches = file.iter_batches(batch_size=16)
        rows = (row for batch in batches for row in batch.to_pylist())
        for n, row in enumerate(common.progress(f"reading {table}", rows, unit=" rows")):
            yield f"{table}: row {n}", row
    except ImportError:
        raise InputError(f"{table}: parquet files need a package; pip install pyarrow")
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{table}: cannot be read ({type(e).__name__}: {e}); put its pictures in folders, then {ASK}")

@functools.lru_cache(MOST_COLUMNS) # each row of a table has the same ones
def read_column(column):
    """Name of a column -> (role or None, name without the parts that COLUMNS leaves out, number or -1)."""
    base, number = re.fullmatch(r"(?s)(?:path_)?(.*?)(?:_path|_file_names?)?(?:_(\d{1,6}))?", column).groups()
    role = role_of(base.lower(), COLUMNS)
    return role if role == "control" or number is None else None, base, int(number or -1)

class NoColumn(InputError):
    """A row lacks a column. In csv and parquet files all rows do then, so the first such error ends the script."""

def by_role(row, where, columns):
    """A row -> ({role: [cells]} for each role that has a column, the columns that hold something and are not read, the
    number of its first control: 0 or 1). A role's columns are those that `columns` names, {role: [names]}, or else
    those with names in COLUMNS. InputError if two of these have the same role, or an empty one stands before another
    control."""
    chosen = sum(columns.values(), [])
    if missing := [name for name in chosen if name not in row]:
        raise NoColumn(f"{where}: no column {missing[0]}, only {', '.join(map(str, row)):.300}; "
                       "correct --columns")
    numbered, spelled, unread = {}, {}, []
    for role, names in columns.items():
        numbered[role] = {n: row[name] for n, name in enumerate(names)}
    for column in [column for column in row if column not in chosen]:
        role, base, number = read_column(column)
        cell = row[column]
        if role is None or role in columns:
            unread += [column] if cell is not None else []
            continue
        cells = numbered.setdefault(role, {})
        if spelled.setdefault(role, base) != base or number in cells:
            raise InputError(f"{where}: column {column!r:.100} and another one both mean {role}; choose one: "
                             f"--columns {role}={column:.100}")
        cells[number] = cell
    roles, begin = {role: [] for role in numbered}, {}
    for role, cells in numbered.items():
        filled = [n for n in sorted(cells) if cells[n] is not None]
        begin[role] = first = 1 if min(cells, default=0) > 0 else 0
        numbers = [max(0, n) for n in filled] # of one without a number: 0
        if numbers != list(range(first, first + len(filled))):
            raise InputError(f"{where}: its {role}s are numbered {numbers}; fill in those before, as a prompt may "
                             "mean one by its number")
        for n in filled:
            roles[role] += cells[n] if isinstance(cells[n], list) else [cells[n]]
    return roles, unread, begin.get("control", 0)

def parse_row(where, row):
    """A row of read_rows -> {column: cell}."""
    if isinstance(row, dict):
        return row
    try:
        return common.read_object(str(row))
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{where}: {common.first_words(e)}; write one JSON object for each sample")

def read_row(number, where, row, place, columns, alone):
    """-> (Sample, by_role's other answers). number: goes into its name, as several rows may share a target.
    place(where, cell) -> the picture's file."""
    cells, *others = by_role(row, where, columns)
    if "more cells" in row:
        raise InputError(f"{where}: more cells than columns; put a prompt that contains a comma in quotes")
    roles = ["target", "prompt"] if alone else ["target", "control", "prompt"]
    if missing := [role for role in roles if role not in cells]:
        raise NoColumn(f"{where}: no {', '.join(missing)}, only {', '.join(row) or 'nothing':.300}; name its column: "
                       f"--columns {'=NAME '.join(missing)}=NAME, or give --alone if there are no controls")
    for role in roles:
        if not cells[role]:
            raise InputError(f"{where}: an empty {role}; correct it, or leave such rows out: --skip_bad")
    for text in cells["prompt"]:
        if re.fullmatch(r"\S+\.txt", str(text)):
            raise InputError(f"{where}: the prompt is the name of a file, {text:.100}; put its text into the table")
    for role in ("target", "mask"):
        if len(cells.get(role, [])) > 1:
            raise InputError(f"{where}: several targets or masks; keep one, or name another column: --columns")
    refuse_many(where, cells.get("control", []))
    files = {}
    for role in ("target", "control", "mask"):
        files[role] = [place(where, cell) for cell in cells.get(role, [])]
    if alone and files["control"] + files["mask"]:
        raise InputError(f"{where}: a control or mask, which --alone excludes; leave --alone out")
    target, = files["target"]
    masks = {"mask": path for path in files["mask"]}
    sample = dataset.make_sample(where, "rows", f"{number:06}-{target.stem}", target, files["control"], cells["prompt"],
                                 masks)
    return sample, *others

def find_file(table, anywhere, folder, where, cell):
    """A cell of a table -> the picture's file. A path is relative to the table's folder, where the file must lie; with
    `anywhere` a picture may lie elsewhere, and its path may be relative to the working folder. The bytes of a picture,
    which a parquet file may contain, become a file in `folder`."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if isinstance(cell, bytes):
        suffix = {b"\xff\xd8": ".jpg", b"RI": ".webp"}.get(cell[:2], ".png") # (any name would do)
        file = folder / (hashlib.sha256(cell).hexdigest()[:16] + suffix)
        file.write_bytes(cell)
        return file
    base = table.parent
    if not isinstance(cell, str) or not cell:
        raise InputError(f"{where}: {cell!r:.100} is not a picture or path; name another column: --columns")
    file = stray_files.on_disk(os.path.normpath(base / cell)) # link/../a.png need not be a.png: normalise it first
    if anywhere and not os.path.isfile(file) and os.path.isfile(elsewhere := stray_files.on_disk(cell)):
        file = elsewhere
    if os.path.isfile(file):
        if common.is_inside(file, base):
            return file
        if anywhere:
            picture_files.open_image(file).close() # a list may come from a stranger: a key that it names is not copied
            return file
        raise InputError(f"{where}: {cell!r:.200} lies outside of {base}; if you trust the table, give {table} itself "
                         "as SOURCE")
    why = stray_files.why_gone(file) or f"not a file in {base}; correct the path, or move the table"
    raise InputError(f"{where}: {cell!r:.200}: {why}")

def read_tables(tables, anywhere, folder, columns, alone):
    """-> (samples, problems). Prints which columns it does not read. anywhere, folder: see find_file. InputError for
    rows whose controls begin with number 1 beside others that begin with 0: JSON may leave out what is empty."""
    samples, problems, unread, begin = [], [], {}, set()
    rows = ((table, where, row) for table in tables for where, row in read_rows(table))
    for number, (table, where, row) in enumerate(rows):
        try:
            row = parse_row(where, row)
            place = functools.partial(find_file, table, anywhere, folder)
            sample, others, first = read_row(number, where, row, place, columns, alone)
            samples.append(sample)
            unread.update(dict.fromkeys(others))
            begin.add(first)
        except InputError as e:
            if isinstance(e, NoColumn) and table.suffix not in (".json", ".jsonl"):
                raise
            problems.append(str(e))
    if len(begin) > 1:
        raise InputError(f"{tables[0]}: the controls of some rows begin with number 1, and those of others with 0; "
                         "fill in number 0, as a prompt may mean one by its number")
    if unread:
        names = ", ".join(f"{name or repr(name):.100}" for name in unread)
        tell(f"{tables[0]}: columns that are not read: {names:.2000}")
    return samples, problems

# ---- writing our layout ----------------------------------------------------------------------------------------------

def places_of(sample):
    """-> {place in our layout, without suffix: picture's file} of a sample, with the controls in order."""
    files = {f"{role}/{sample.name}": file for role, file in [("target", sample.target), *sample.overlays.items()]}
    for n, file in enumerate(sample.controls):
        files[f"control/{sample.name}" + f"_{n}" * (n > 0)] = file
    return files

def link_or_copy(file, path):
    try:
        os.link(os.path.realpath(file), path)
    except OSError: # another disk, or one without hard links
        shutil.copyfile(file, path)

def write_sample(sample, folder, put=link_or_copy):
    """Writes FOLDER/target, control, ... -> {place: file there}. put(file, path) copies a picture, or links it."""
    files = {}
    for place, file in places_of(sample).items():
        suffix = Path(file).suffix.lower()
        if suffix not in stray_files.PICTURES: # PIL recognises pictures by their content
            suffix = ".png"
        files[place] = path = folder / (place + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        put(file, path)
    lines = [re.sub(r"\s*[\r\n\0]\s*", " ", prompt) for prompt in sample.prompts] # each line is a prompt
    files[f"target/{sample.name}"].with_suffix(".txt").write_text("\n".join(lines), encoding="utf-8")
    return files

# ---- command line ----------------------------------------------------------------------------------------------------

def column(text):
    """For argparse's type=: 'control=src,ref' -> ('control', ['src', 'ref'])."""
    role, _, names = text.partition("=")
    if role not in COLUMNS or not names:
        raise argparse.ArgumentTypeError(f"{text!r} is not target=NAME, control=NAME,NAME, mask=NAME or prompt=NAME")
    return role, names.split(",")

def tell_unread_tables(source, tables):
    """Prints which other tables lie below the folder SOURCE: of another split, or of another part of the dataset; and
    which of several files of one split are missing."""
    suffixes = {".csv", ".tsv", ".jsonl", ".parquet"}
    paths = sum(stray_files.find_files(source).values(), [])
    unread = [stray_files.seen_from(source, path) for path in paths if path.suffix in suffixes and path not in tables]
    if unread:
        tell(f"warning: {source}: {len(unread)} tables are not read: {stray_files.first_of(unread)}; give each one as "
             "SOURCE, with an OUT of its own")
    shards = [re.fullmatch(r"(.*)-\d+-of-(\d+)", path.stem) for path in tables]
    for (name, of), count in Counter(shard.groups() for shard in shards if shard).items():
        if count != int(of):
            tell(f"warning: {source}: {count} of {int(of)} files {name}-*-of-{of}.parquet are there; download the "
                 "others")

def find_parts(source, alone):
    """SOURCE, which is not a cache -> (a list of arguments of read_folders or read_tables, a configuration's Settings
    or None)."""
    if not source.exists():
        raise InputError(f"{source}: does not exist; {stray_files.near_path(source)}")
    if source.is_file(): # an error would quote a key, to which a stranger's link may lead
        stray_files.refuse_outside(source, source.parent)
        if is_config(source):
            return read_config(source)
        return [dict(tables=[source], anywhere=True)], None
    parquets = sorted(stray_files.listed(source, "*.parquet") + stray_files.listed(source, "data/*.parquet"))
    tables = [path for path in stray_files.listed(source, "metadata.*") if path.suffix in TABLES]
    for path in (*parquets, *tables):
        stray_files.refuse_outside(path, source)
    if parquets: # of several splits the one called train, which is not constrained or pretrain
        tables = [path for path in parquets if re.search("(?i)(?<![a-z])train(?![a-z])", path.name)] or parquets
    tell_unread_tables(source, tables)
    if parquets:
        return [dict(tables=tables, anywhere=False)], None
    folders = find_folders(source)
    has_pairs = {"target", "control"} <= folders.keys()
    if tables[1:] or (tables and has_pairs):
        other = f"{tables[1].name} is there, too" if tables[1:] else "there are folders of pictures, too"
        raise InputError(f"{tables[0]}: {other}; delete what does not count, or give this file as SOURCE")
    if tables:
        return [dict(tables=tables, anywhere=False)], None
    target = folders.get("target", source)
    if alone or has_pairs or list(target.glob("*-condlabel.*")):
        controls = [folders["control"]] if "control" in folders else []
        return [dict(target=target, controls=controls, mask=folders.get("mask"), source=source)], None
    inside = stray_files.listed(source, "*")
    for path in [*inside, *stray_files.listed(source, "*/*.arrow")]:
        if path.suffix in OTHERS:
            raise InputError(f"{path}: {OTHERS[path.suffix]}")
    names = ", ".join([path.name for path in inside][:5]) or "nothing"
    raise InputError(f"{source}: holds {names}; {ASK} (or --target DIR --alone), or give a table or a configuration "
                     "itself as SOURCE; -h lists the names that are recognised")

def choose_held_out(samples, every):
    """-> the places of one in `every` of these samples. Those of one photograph, by the bytes of the target or of the
    first control, are on the same side: all its edits and wordings. Their hashes decide, as every N-th name could be
    the same edit each time. A picture that all samples share is ignored. InputError if they cannot be parted."""
    contents, group = [], {} # group: {a content: a lower one of the same photograph}

    def lowest(content):
        while content in group:
            content = group[content]
        return content
    for sample in common.progress("comparing pictures", samples, unit=" samples"):
        contents.append({common.file_hash(path) for path in dataset.pictures_of(sample)[:2]})
    counts = Counter(content for own in contents for content in own)
    photographs = {}
    shared = {content for content in counts if counts[content] == len(samples)}
    if shared:
        tell(f"warning: --hold_out {every}: all samples have a picture in common, which is trained and held out; if "
             "it is their photograph, the held-out ones tell little")
    for own in contents:
        own -= shared
        low, *others = sorted({lowest(content) for content in own or {""}})
        group |= dict.fromkeys(others, low)
    for place, own in enumerate(contents):
        photographs.setdefault(lowest(min(own, default="")), []).append(place)
    held_out = []
    # by the last digits: a large group is named by its lowest hash, so the first ones would favour it
    for content in sorted(photographs, key=lambda content: content[-16:]):
        if len(held_out) + len(photographs[content]) <= len(samples) // every:
            held_out += photographs[content]
    if not held_out:
        raise InputError(f"--hold_out {every}: there are only {len(samples)} samples, of {len(photographs)} "
                         "photographs; give a smaller number, or leave it out")
    return set(held_out)

def how_many_pictures(samples):
    """-> in words how many controls these samples have, and how many have a mask, with an example of each: a stray file
    may have become one."""
    kinds = {}
    for sample in samples:
        *_, last = sample.target, *sample.controls
        controls = f"{len(sample.controls)} control{'s' * (len(sample.controls) != 1)}"
        kinds.setdefault(controls, []).append(last)
        if "mask" in sample.overlays:
            kinds.setdefault("a mask", []).append(sample.overlays["mask"])
    return ", ".join([f"{len(files)} with {kind} ({Path(files[0]).name})" for kind, files in sorted(kinds.items())])

def convert(args, columns, tmp):
    """Writes TMP/out from what the flags name -> (samples, problems, a configuration's Settings or None, how many are
    held out)."""
    source = args.target or args.source
    old = [path for path in [source, *stray_files.listed(source, "*")] if path.suffix in CACHES]
    if old and not args.target and not args.alone and not find_folders(source):
        if args.prompt or args.hold_out:
            raise InputError(f"{source}: a cache of version 1.0, of encoded samples; leave --prompt and --hold_out out")
        from tools import import_cache # takes seconds; other sources do not need it
        samples, problems = import_cache.convert_cache(old, source, tmp / "out")
        return samples, problems, None, 0
    found = None # a configuration's Settings
    parts = [dict(target=args.target, controls=args.control, mask=args.mask)]
    if not args.target:
        parts, found = find_parts(source, args.alone)
    are_tables = ["tables" in part for part in parts]
    if columns and not any(are_tables):
        raise InputError(f"--columns: {source} is not a table; leave --columns out")
    if args.prompt and all(are_tables):
        raise InputError(f"--prompt: {source} is a table, which has its own prompts; leave --prompt out")
    samples, problems = [], []
    for n, part in enumerate(parts):
        if "tables" in part:
            new, faults = read_tables(**part, folder=tmp, columns=columns, alone=args.alone)
        else:
            new, faults = read_folders(**part, alone=args.alone, prompt=args.prompt)
        if len(parts) > 1: # each part gets a folder, as two parts may have the same names
            new = [replace(sample, name=f"{n}/{sample.name}") for sample in new]
        samples += new
        problems += faults
    if not samples and not problems:
        problems.append(error_line(f"{source}: no sample in it; see -h for the layouts, or {ASK}"))
    held_out = []
    if args.hold_out and samples and (args.skip_bad or not problems):
        held_out = choose_held_out(samples, args.hold_out)
    for place, sample in enumerate(samples):
        write_sample(sample, tmp / ("held_out" if place in held_out else "out"))
    return samples, problems, found, len(held_out)

def main():
    parser = command_line.Parser(__doc__)
    parser.usage = "import_data.py SOURCE OUT [flags], or import_data.py OUT --target DIR --control DIR [flags]"
    names = [f"  {role}: {', '.join(names)}" for known in (FOLDERS, COLUMNS) for role, names in known.items()]
    parser.epilog = "Names in FOLDERS, then in COLUMNS:\n" + "\n".join(names)
    by_flags = set(command_line.given_flags()) & {"--target", "--control", "--mask"}
    parser.add_argument("source", type=Path, nargs="?" if by_flags else None,
                        help="a folder, a table or a configuration, as above; none beside --target")
    parser.add_argument("out", type=Path, help="the folder to write, which must not exist yet")
    flag = parser.group("flags")
    flag("--target", None, "the folder of the targets, in place of SOURCE", type=Path, metavar="DIR")
    flag("--control", [], "the folders of the controls, in the order that samples should have", type=Path, nargs="+",
         action="extend", metavar="DIR")
    flag("--mask", None, "the folder of the masks, if there are any", type=Path, metavar="DIR")
    flag("--prompt", None, "the prompt of each target that has no caption file", metavar="TEXT")
    flag("--columns", [], "the table's columns for target, control (several with commas), prompt and mask", type=column,
         nargs="+", action="extend", metavar="ROLE=NAME")
    flag("--alone", False, "there are no controls, and OUT gets no control/")
    flag("--hold_out", 0, "write one in N samples to OUT_val, for train.py --val_data, and the others to OUT; those of "
         "one photograph stay together", type=command_line.number(int, 2), metavar="N")
    flag("--skip_bad", False, "leave out the samples that have an error")
    args = parser.parse_args()
    columns = {}
    for role, names in args.columns:
        columns[role] = columns.get(role, []) + names
    if args.prompt is not None:
        dataset.make_sample("--prompt", args.out, "", None, [], [args.prompt]) # raises InputError for a bad prompt
    if by_flags and args.source:
        parser.error(f"argument {args.source}: there is no SOURCE beside {min(by_flags)}; {ASK}")
    if by_flags and not args.target:
        parser.error("argument --target: missing; --control and --mask need it")
    common.refuse_to_replace(args.out)
    val = args.out.with_name(f"{args.out.name}_val")
    if args.hold_out:
        common.refuse_to_replace(val)
    for folder in [args.target, args.mask, *args.control]:
        if folder and folder.resolve() in args.out.resolve().parents:
            raise InputError(f"{args.out}: lies in {folder}, which is only read; give another folder")
    disk.try_renames(args.out, args.out)
    try:
        with tempfile.TemporaryDirectory(prefix=".import-", dir=args.out.parent, ignore_cleanup_errors=True) as tmp:
            samples, problems, found, held_out = convert(args, columns, Path(tmp))
            common.print_problems(problems)
            if not samples or (problems and not args.skip_bad):
                sys.exit("nothing was written; correct these errors, or leave the samples out: --skip_bad")
            if args.hold_out:
                disk.rename_folder(Path(tmp, "held_out"), val)
            disk.rename_folder(Path(tmp, "out"), args.out)
    except OSError as e:
        raise common.disk_error(args.out, e)
    tell(f"{args.out}: {len(samples) - held_out} samples" + (f"; {val}: {held_out}" if held_out else ""))
    if args.target or not list(args.out.glob("*.json")): # no cache
        tell(f"in all {how_many_pictures(samples)}. Pictures may be hard links: a change in place changes the "
             "original, too")
        tell(*next_commands(found, args.out, val if held_out else None))

if __name__ == "__main__":
    main()
