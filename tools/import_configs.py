"""
Configurations of other trainers -> which folders and tables their datasets are, for tools/import_data.py, and what else
they say, for tools/settings.py. They may come from strangers: values are data, nothing in them is run, and a file that
one names is opened only below its own folder, but for pictures.
"""
import math
import os
import re
import tomllib
from collections import Counter
from pathlib import Path

import yaml # comes with huggingface_hub

import common
from common import InputError, tell
from library.cli import flag_types
from library.data.dataset import as_list
from library.files import stray_files
from tools import settings

CONFIGS = ".toml .yaml .yml .sh .env".split()
ASK = "name the folders: OUT --target DIR --control DIR" # what to do about any layout that this script does not know
CONTROLS = ["control_path", *[f"control_path{middle}{n}" for middle in ("", "_") for n in range(10)]] # ai-toolkit's

MOST_YAML = 2**20 # bytes: common.read_text reads no more of a configuration

# a dotted key of TOML with over 20 parts: tomllib's time grows with the square of their number
LONG_KEY = re.compile(r"""(?<![\w-])((?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*\.[ \t]*){20}""")

class Loader(yaml.SafeLoader): # a class, as yaml calls its method
    def compose_mapping_node(self, anchor):
        """ValueError for a key that is given twice, of which yaml would keep the last value in silence."""
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"{key!r:.100} is given twice")
        return node

    def construct_scalar(self, node):
        """ValueError for a number with so many digits that to count them takes minutes: 1:0:0:0..., in sixties."""
        text = super().construct_scalar(node)
        if node.tag.endswith((":int", ":float")) and len(text) > 1000:
            raise ValueError(f"a number of {len(text):,} letters")
        return text

    def get_single_node(self):
        """ValueError for aliases that would make more of the text than a person can have written."""
        node = super().get_single_node()
        if size_of(node, {}) > 10 * MOST_YAML:
            raise ValueError("its aliases stand for millions of letters")
        return node

def size_of(node, sizes):
    """How many letters of values a node of yaml stands for, where each alias is what it names. sizes: of nodes that are
    known: {id: size}; it adds its own. A node that holds itself is endless."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf # until it is known
        inner = [] if node is None or isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            inner = [one for pair in inner for one in pair]
        sizes[id(node)] = 1 + sum(size_of(one, sizes) for one in inner)
        if isinstance(node, yaml.ScalarNode):
            sizes[id(node)] += len(node.value)
    return sizes[id(node)]

def parse(path):
    """-> (the program whose configuration this is, as tools/settings.py calls it; what its file says). Any exception if
    it cannot be read."""
    text = stray_files.read_text(path)
    if path.suffix in (".sh", ".env"):
        found = settings.read_shell(text)
        if path.suffix == ".env":
            return "simpletuner", found
        return "diffsynth" if "dataset_base_path" in found else "kohya", found
    if path.suffix == ".toml":
        if LONG_KEY.search(text):
            raise ValueError("a key of more than 20 parts")
        return "kohya", tomllib.loads(text)
    if path.suffix != ".json":
        return "aitoolkit", yaml.load(text, Loader)
    found = common.read_json(text)
    if isinstance(found, list):
        return ("onetrainer" if "balancing" in found[0] else "simpletuner"), found
    if "config" in found:
        return "aitoolkit", found
    if found.keys() & {"network_dim", "network_alpha", "train_data_dir"}: # as a window of sd-scripts saves it
        return "kohya", found
    return ("onetrainer" if "training_method" in found else "simpletuner"), found

def read_config(path):
    """-> (for each dataset in a configuration the arguments of read_folders or read_tables, and of fit_masks; its
    Settings). InputError if there are neither datasets nor settings of a training."""
    parts, why, found = [], "its layout is another one", None
    try:
        program, config = parse(path)
        take_apart, part_of = PROGRAMS[program]
        values, rows, other = take_apart(path, config)
        found = settings.Settings(path, program, settings.collect(values))
        if other and not rows:
            more, rows, _ = take_apart(path, parse(own_file(path, other))[1])
            found.values = settings.collect(more + values)
        if not rows:
            raise KeyError("datasets")
        parts = [part_of(path, row) for row in rows]
        found.datasets = len(parts)
        found.jobs = jobs_of(path, values) if program == "aitoolkit" else []
    except Exception as e: # a foreign file can fail in any way
        if isinstance(e, KeyError):
            why = f"no {e}"
        elif isinstance(e, (ValueError, yaml.YAMLError)): # (the others speak of Python)
            why = common.first_words(e)
    no_data = "" if parts else f"{path}: no datasets of pictures in it ({why}); {ASK}"
    for place in [place for part in parts for place in (part.get("target"), *part.get("tables", [])) if place]:
        if not os.path.exists(place):
            no_data = f"{place}: does not exist; {stray_files.near_path(place)}, or {ASK}"
    if no_data and not (found and settings.is_training(settings.translate(found)[0])):
        raise InputError(no_data)
    found.no_data = no_data
    for trigger in dict.fromkeys(part["trigger"] for part in parts if part.get("trigger")):
        tell(f"{path}: captions without {trigger!r:.100}, the trigger word, will begin with it")
    different = []
    for part in parts: # other programs have a dataset once for each of its sizes: a pair could be trained and held out
        if part not in different:
            different.append(part)
        else:
            tell(f"{path}: {part.get('target') or part.get('tables')} is there twice, and is read once")
    return different, found

def own_file(config, name):
    """-> the file that a configuration names, which must lie below its folder: perhaps it is a key, of which errors
    would tell. ValueError if it lies elsewhere, or is not there."""
    file = locate(config, flag_types.only_text(name))
    if not file.is_file():
        raise ValueError(f"{file} does not exist")
    if not common.is_inside(file, config.parent):
        raise ValueError(f"{file} lies outside of {config.parent}; if you trust {config.name}, which names it, give "
                         "this file itself as SOURCE")
    return file

def locate(config, name):
    """-> a path of a configuration. A relative one begins at the working folder, as for its trainer, at the
    configuration, or at one of the two folders above it, as the trainer is started there: where something exists."""
    folder = config.resolve().parent
    places = [Path(name), config.parent / name, *[above / name for above in folder.parents[:2]]]
    return next((path for path in map(stray_files.on_disk, places) if path.exists()), config.parent / name)

def caption_suffix(extension):
    """txt or .txt -> .txt. ValueError if no file name can end in it."""
    return Path("caption").with_suffix("." + extension.lstrip(".")).suffix

# Of each program a function takes a file apart -> ([dictionaries of settings; of two values the first one counts],
# [datasets], the name of the file that has the datasets, or None). Another one makes a part of a dataset.

# ---- musubi-tuner and sd-scripts: a file of datasets, a file of flags, or one with both ------------------------------

def kohya_apart(path, config):
    flags, rows = {}, []
    for name, value in config.items():
        if name not in ("general", "datasets"):
            flags |= value if isinstance(value, dict) else {name: value} # sections mean nothing
    for part in config.get("datasets", []):
        for subset in part.get("subsets", [{}]):
            rows.append(config.get("general", {}) | part | subset)
            rows[-1].pop("subsets", None)
    return [*[dict(datasets=row) for row in rows], flags], rows, flags.get("dataset_config")

def kohya_part(path, their_dataset):
    """Settings of a dataset -> arguments of read_folders or read_tables."""
    if their_dataset.get("multiple_target"):
        raise ValueError("multiple_target: its pictures are several targets of one sample, which must be pairs here")
    if "image_jsonl_file" in their_dataset:
        return dict(tables=[own_file(path, their_dataset["image_jsonl_file"])], anywhere=True)
    controls = [their_dataset[key] for key in ("control_directory", "conditioning_data_dir") if key in their_dataset]
    target = their_dataset["image_dir"] if "image_dir" in their_dataset else their_dataset["image_directory"]
    return dict(target=locate(path, target), controls=[locate(path, name) for name in controls],
                suffix=caption_suffix(their_dataset.get("caption_extension", "txt")))

# ---- ai-toolkit ------------------------------------------------------------------------------------------------------

def aitoolkit_apart(path, config):
    job = config.pop("config")
    processes = job.pop("process")
    rows = [process | part for process in processes for part in process.get("datasets") or []]
    return [*processes, job, config], rows, None

def jobs_of(path, processes):
    """ai-toolkit's sample prompts that have pictures -> rows of a jobs.jsonl."""
    rows = []
    for process in processes:
        sample = process.get("sample") or {}
        usual = numbers_of(sample)
        word = str(process.get("trigger_word") or "")[:100] # a prompt may name it a thousand times
        for n, one in enumerate(sample.get("samples") or []):
            pictures = [one[name] for name in ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3") if one.get(name)]
            row = usual | numbers_of(one)
            if sample.get("walk_seed") and "seed" in usual and "seed" not in one:
                row["seed"] += n
            if pictures and len(one["prompt"]) < 10_000:
                row["image"] = [os.path.abspath(locate(path, name)) for name in pictures]
                rows.append(row | dict(prompt=fill(one["prompt"], word)))
    return rows

def numbers_of(sample):
    """Those that a line of jobs.jsonl may have, too; each line repeats them."""
    return {name: sample[name] for name in ("width", "height", "seed") if isinstance(sample.get(name), int)}

def fill(text, word):
    """A caption with this word in ai-toolkit's placeholders."""
    return text.replace("[trigger]", word).replace("[name]", word)

def aitoolkit_part(config, their_dataset):
    """ai-toolkit's settings of a dataset, and of its job -> arguments of read_folders, and of fit_masks. Its controls
    are control_path, a string or a list, and control_path_1 or control_path2, ..., which may be null."""
    controls = []
    for key in sorted(their_dataset.keys() & set(CONTROLS)):
        controls += as_list(their_dataset[key] or [])
    trigger = their_dataset.get("trigger_word")
    if isinstance(trigger, (list, dict)):
        raise ValueError(f"trigger_word {trigger!r:.100} is no word")
    alpha, mask = bool(their_dataset.get("alpha_mask")), their_dataset.get("mask_path")
    if alpha and mask:
        tell(f"{config}: mask_path is not converted, as alpha_mask is set and comes first")
    default = flag_types.only_text(their_dataset.get("default_caption") or "")
    if alpha:
        tell(f"{config}: alpha_mask: what is opaque in a target becomes its mask, and what is transparent becomes "
             "white; to leave that out of the loss use train.py --mask_background_weight 0")
    suffix = their_dataset.get("caption_type") or their_dataset.get("caption_ext", "txt") # the first is its older name
    return dict(target=locate(config, their_dataset["folder_path"]), controls=[locate(config, name) for name in controls],
                mask=locate(config, mask) if mask and not alpha else None, alpha=alpha,
                invert=bool(their_dataset.get("invert_mask")), suffix=caption_suffix(suffix),
                trigger=None if trigger is None else str(trigger).strip(), default=default or None)

EMBEDS = "text_embeds image_embeds conditioning_image_embeds".split() # SimpleTuner's caches

# ---- SimpleTuner -----------------------------------------------------------------------------------------------------

def simpletuner_apart(path, config):
    """Its list of datasets, beside which the flags may be in config.json or config.env; or its file of flags."""
    if isinstance(config, dict):
        flags = {name.lstrip("-"): value for name, value in config.items()}
        other = flags.get("data_backend_config", flags.get("dataloader_config", "multidatabackend.json"))
        return [flags], [], other
    values = []
    for row in config:
        if row.get("dataset_type") not in EMBEDS:
            values.append({"conditioning" if row.get("dataset_type") == "conditioning" else "datasets": row})
    for beside in [path.with_name("config.json"), path.with_name("config.env")]:
        if beside.is_file() and common.is_inside(beside, path.parent):
            values += simpletuner_apart(path, parse(beside)[1])[0]
    return values, simpletuner_pairs(path, config), None

def is_config(source):
    """Whether a file is a configuration, and no table."""
    if source.suffix != ".json":
        return source.suffix in CONFIGS
    text = stray_files.read_text(source, common.LONG_TEXT)
    return text.lstrip().startswith("{") or bool(re.search(
        '"(instance_data_(dir|root)|dataset_type|balancing)"\\s*:', text))

def simpletuner_pairs(config, rows):
    """SimpleTuner's list of datasets -> [(one of targets, its datasets of conditions)]. Others are printed, but for its
    caches. ValueError for pictures that lie in no folder, and for conditions of no target."""
    targets, others, idle = [], [], set() # idle: what may belong to a disabled dataset
    for row in rows:
        kind = row.get("dataset_type", "image")
        if row.get("disabled") or row.get("disable") or kind in EMBEDS:
            idle |= {row.get("id"), *as_list(row.get("conditioning_data") or [])}
            continue
        if kind not in ("image", "conditioning"):
            tell(f"{config}: {row.get('id')}: dataset_type {kind} is not converted")
            continue
        if row.get("type", "local") != "local":
            raise ValueError(f"{row['id']}: its type is {row['type']}, and only local folders are read")
        (targets if kind == "image" else others).append(row)
    pairs = [(target, conditions_of(target, others)) for target in targets]
    used = [row["id"] for _, own in pairs for row in own]
    for row in others:
        if row["id"] not in used and idle.isdisjoint([row["id"], row.get("source_dataset_id")]):
            raise ValueError(f"{row['id']}: no dataset has it as conditioning_data")
    return pairs

def conditions_of(target, others):
    """-> those of these datasets of conditions that belong to this one of targets, which each of the two may say."""
    named = as_list(target.get("conditioning_data") or [])
    own = {row["id"]: row for row in others if row["id"] in named or row.get("source_dataset_id") == target["id"]}
    return [own[name] for name in dict.fromkeys([*named, *own]) if name in own] # in the order in which they are named

def simpletuner_part(config, pair):
    """SimpleTuner's settings of a dataset, and those of its conditions -> arguments of read_folders."""
    row, own = pair
    def folder(row):
        name = row.get("instance_data_dir") or row.get("instance_data_root") # its older name
        if not name:
            raise ValueError(f"{row['id']}: no instance_data_dir")
        return locate(config, name)
    masks, controls = [], []
    for other in own:
        (masks if other.get("conditioning_type") == "mask" else controls).append(folder(other))
    if masks[1:]:
        raise ValueError(f"{row['id']}: two datasets of masks, and a sample has one")
    if controls[1:]: # there --conditioning_multidataset_sampling says whether a sample gets all or one of them
        tell(f"{config}: {row['id']}: each sample gets a control of each of {len(controls)} datasets")
    strategy, words = row.get("caption_strategy") or "textfile", row.get("instance_prompt")
    if strategy not in ("textfile", "filename", "instanceprompt"):
        raise ValueError(f"caption_strategy {strategy}: only textfile, filename and instanceprompt are read")
    part = dict(target=folder(row), controls=controls, mask=masks[0] if masks else None)
    if strategy == "instanceprompt" or row.get("only_instance_prompt"):
        if not words:
            raise KeyError("instance_prompt")
        return part | dict(suffix=None, prompt=list(map(flag_types.only_text, as_list(words))))
    if strategy == "filename":
        part.update(suffix=None, prompt=None)
    if row.get("prepend_instance_prompt"):
        part["trigger"] = flag_types.only_text(row["instance_prompt"])
    return part | dict(wordings=not row.get("disable_multiline_split"))


# ---- OneTrainer, DiffSynth-Studio ------------------------------------------------------------------------------------

def onetrainer_apart(path, config):
    """Its settings, in which its concepts are or the name of their file; or this file."""
    if isinstance(config, list):
        config = dict(concepts=config)
    concepts = config.pop("concepts", None) or []
    rows = [concept for concept in concepts if concept.get("enabled", True)]
    return [*[dict(concepts=row) for row in rows], config], rows, config.get("concept_file_name")

def onetrainer_part(path, concept):
    return dict(target=locate(path, concept["path"]), controls=[])

def diffsynth_apart(path, config):
    return [config], [config], None

def diffsynth_part(path, config):
    return dict(tables=[own_file(path, config["dataset_metadata_path"])], anywhere=True)

PROGRAMS = dict(aitoolkit=(aitoolkit_apart, aitoolkit_part), kohya=(kohya_apart, kohya_part),
                simpletuner=(simpletuner_apart, simpletuner_part), onetrainer=(onetrainer_apart, onetrainer_part),
                diffsynth=(diffsynth_apart, diffsynth_part))
