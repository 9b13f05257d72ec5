"""
Configurations of other trainers -> which folders and tables their datasets are, for tools/import_data.py, and the line
of train.py with those of their settings that it has, too. They may come from strangers: values are data, nothing in
them is run, and a file that one names is opened only below its own folder, but for pictures.

What is not here, and has no line: the defaults of a program whose file is silent, units other than train.py's, keys
that count only beside another one, and what would have to be computed, as steps from epochs. It stands in one line,
`not taken over: key = value, ...`, to be looked up in train.py -h.
"""
import contextlib
import re
import shlex
import textwrap
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml # comes with huggingface_hub

import common
from common import InputError, tell
from library.cli import command_line
from library.cli.command_line import not_negative, number, positive
from library.data.dataset import as_list
from library.files import stray_files
from library.lora import peft_config

CONFIGS = ".toml .yaml .yml .sh".split()
ASK = "name the folders: OUT --target DIR --control DIR" # what to do about any layout that this script does not know
MOST_SHOWN = 20_000 # letters of settings that are not taken over

# a dotted key of TOML with over 20 parts: tomllib's time grows with the square of their number
LONG_KEY = re.compile(r"""(?<![\w-])((?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*\.[ \t]*){20}""")

class Loader(yaml.BaseLoader): # a class, as yaml calls its methods
    def compose_mapping_node(self, anchor):
        """ValueError for a key that is given twice, of which yaml would keep the last value in silence."""
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"{key!r:.100} is given twice")
        return node

    def construct_scalar(self, node):
        """Numbers stay texts: as a number, 1:0:0:0..., which YAML counts in sixties, takes minutes."""
        text = super().construct_scalar(node)
        return {"true": True, "false": False, "null": None, "~": None, "": None}.get(text.lower(), text)

    def compose_node(self, parent, index):
        """ValueError for an alias: a few lines of them can stand for more than a memory holds."""
        if self.check_event(yaml.AliasEvent):
            raise ValueError("an alias, *name; write its value in its place")
        return super().compose_node(parent, index)

def parse(path):
    """-> (the program whose configuration this is, a name in TABLES; what its file says). Any exception if it cannot
    be read."""
    text = stray_files.read_text(path)
    if path.suffix == ".sh":
        found = read_shell(text)
        return "diffsynth" if "dataset_base_path" in found else "kohya", found
    if path.suffix == ".toml":
        if LONG_KEY.search(text):
            raise ValueError("a key of more than 20 parts")
        return "kohya", tomllib.loads(text)
    if path.suffix != ".json":
        return "aitoolkit", yaml.load(text, Loader)
    found = common.read_json(text)
    first = found[0] if isinstance(found, list) else found
    return ("onetrainer" if {"balancing", "training_method"} & first.keys() else "simpletuner"), found

def read_config(path):
    """-> (for each dataset in a configuration the arguments of read_folders or read_tables; its Settings). InputError
    if there are no datasets."""
    parts, why = [], "its layout is another one"
    try:
        program, config = parse(path)
        take_apart, part_of = PROGRAMS[program]
        values, rows, other = take_apart(path, config)
        if other and not rows:
            more, rows, _ = take_apart(path, parse(own_file(path, other))[1])
            values = more + values
        if not rows:
            raise KeyError("datasets")
        parts = [part_of(path, row) for row in rows]
        settings = Settings(path, program, collect(values), len(parts))
    except Exception as e: # a foreign file can fail in any way
        if isinstance(e, KeyError):
            why = f"no {e!s:.100}"
        elif isinstance(e, (ValueError, yaml.YAMLError)): # (the others speak of Python)
            why = common.first_words(e)
        raise InputError(f"{path}: no datasets of pictures in it ({why}); {ASK}")
    # other programs have a dataset once for each of its sizes: a pair could be trained and held out
    different = [part for n, part in enumerate(parts) if part not in parts[:n]]
    if different != parts:
        tell(f"{path}: names {len(parts)} datasets, of which some are the same; each is read once")
    return different, settings

def own_file(config, name):
    """-> the file that a configuration names, which must lie below its folder: perhaps it is a key, of which errors
    would tell. ValueError if it lies elsewhere, or is not there."""
    file = locate(config, command_line.only_text(name))
    if not file.is_file():
        raise ValueError(f"{file} does not exist")
    if not common.is_inside(file, config.parent):
        raise ValueError(f"{file} lies outside of {config.parent}; if you trust {config.name}, which names it, give "
                         "this file itself as SOURCE")
    return file

def locate(config, name):
    """-> a path of a configuration. A relative one begins at the working folder, as for its trainer, at the
    configuration, or at one of the two folders above it, as the trainer is started there: where something exists."""
    places = [Path(name), *[above / name for above in config.resolve().parents[:3]]]
    return next((path for path in map(stray_files.on_disk, places) if path.exists()), config.parent / name)

def caption_suffix(extension):
    """txt or .txt -> .txt. ValueError for JSON, and what no file's name ends in."""
    if not re.fullmatch(r"\.?(?!json)\w+", extension):
        raise ValueError(f"caption files that end in {extension!r:.50}: write them as .txt")
    return "." + extension.lstrip(".")

# ---- settings: their key, our flag -----------------------------------------------------------------------------------

# The keys are those of the programs' documents, from October 2025 to August 2026: ai-toolkit's config_modules.py,
# musubi-tuner's and sd-scripts' parsers and dataset documents, OneTrainer's modules/util/config/, SimpleTuner's
# OPTIONS.md, DATALOADER.md and quickstart/QWEN_EDIT.md, DiffSynth-Studio's parsers.py. Of several keys for one flag the
# first one of the table counts, if the flag takes its value. A key of a dataset counts before the same one of the job.
TABLES = dict(
    aitoolkit="""
model.name_or_path                               model
resolution                                       target_pixels
num_repeats                                      repeats
caption_dropout_rate                             caption_dropout_rate
network.linear                                   lora_rank
network.rank                                     lora_rank
network.linear_alpha                             lora_alpha
network.alpha                                    lora_alpha
network.dropout                                  lora_dropout
train.batch_size                                 batch_size
train.steps                                      max_steps
train.optimizer                                  optimizer
train.lr                                         lr
train.lr_scheduler                               lr_scheduler
train.lr_scheduler_params.warmup_steps           warmup_steps
train.optimizer_params.weight_decay              weight_decay
train.max_grad_norm                              max_grad_norm
save.save_every                                  save_every""",
    kohya="""
model_version                                    model
pretrained_model_name_or_path                    model
resolution                                       target_pixels
control_resolution                               control_pixels
qwen_image_edit_control_resolution               control_pixels
num_repeats                                      repeats
caption_dropout_rate                             caption_dropout_rate
network_dim                                      lora_rank
network_alpha                                    lora_alpha
network_dropout                                  lora_dropout
batch_size                                       batch_size
train_batch_size                                 batch_size
max_train_steps                                  max_steps
optimizer_type                                   optimizer
learning_rate                                    lr
lr_scheduler                                     lr_scheduler
lr_warmup_steps                                  warmup_steps
max_grad_norm                                    max_grad_norm
seed                                             seed
fp8_base                                         quantize
fp8_vl                                           quantize_text_encoder
blocks_to_swap                                   offload
save_every_n_steps                               save_every""",
    onetrainer="""
base_model_name                                  model
resolution                                       target_pixels
text_encoder.dropout_probability                 caption_dropout_rate
lora_rank                                        lora_rank
lora_alpha                                       lora_alpha
dropout_probability                              lora_dropout
batch_size                                       batch_size
optimizer.optimizer                              optimizer
learning_rate                                    lr
learning_rate_scheduler                          lr_scheduler
optimizer.weight_decay                           weight_decay
clip_grad_norm                                   max_grad_norm
transformer.weight_dtype                         quantize
text_encoder.weight_dtype                        quantize_text_encoder""",
    simpletuner="""
model_flavour                                    model
pretrained_model_name_or_path                    model
model_name                                       model
resolution                                       target_pixels
conditioning.resolution                          control_pixels
caption_dropout_probability                      caption_dropout_rate
lora_rank                                        lora_rank
lora_alpha                                       lora_alpha
lora_dropout                                     lora_dropout
train_batch_size                                 batch_size
max_train_steps                                  max_steps
max_num_steps                                    max_steps
optimizer                                        optimizer
learning_rate                                    lr
lr_scheduler                                     lr_scheduler
lr_schedule                                      lr_scheduler
lr_warmup_steps                                  warmup_steps
weight_decay                                     weight_decay
max_grad_norm                                    max_grad_norm
seed                                             seed
training_seed                                    seed
base_model_precision                             quantize
text_encoder_1_precision                         quantize_text_encoder
musubi_blocks_to_swap                            offload
checkpoint_step_interval                         save_every
checkpointing_steps                              save_every""",
    diffsynth="""
model_id_with_origin_paths                       model
max_pixels                                       target_pixels
dataset_repeat                                   repeats
lora_rank                                        lora_rank
learning_rate                                    lr
weight_decay                                     weight_decay
save_steps                                       save_every""")

# What the functions at the end of this file read of a dataset; control_path_1 stands for control_path_2, ... too.
DATA_KEYS = dict(
    aitoolkit="folder_path control_path mask_path caption_ext",
    kohya="image_directory image_dir image_jsonl_file control_directory conditioning_data_dir caption_extension "
          "dataset_config",
    onetrainer="concepts.path concepts.enabled concept_file_name",
    simpletuner="id type dataset_type disabled disable instance_data_dir conditioning_data conditioning_type "
                "source_dataset_id caption_strategy disable_multiline_split data_backend_config",
    diffsynth="dataset_base_path dataset_metadata_path")
# their words for our values, without marks and capitals
QUANTIZE = dict(true="fp8", float8="fp8", fp8quanto="fp8", int8="int8", int8quanto="int8", nfloat4="nf4", nf4bnb="nf4")
WORDS = dict(
    model=dict(edit="Qwen/Qwen-Image-Edit", editv1="Qwen/Qwen-Image-Edit", edit2509="Qwen/Qwen-Image-Edit-2509",
               editv2="Qwen/Qwen-Image-Edit-2509", edit2511="Qwen/Qwen-Image-Edit-2511"),
    optimizer=dict(adamw="torch.optim.AdamW", adamw8bit="bitsandbytes.optim.AdamW8bit", prodigy="prodigyopt.Prodigy",
                   lion="lion_pytorch.Lion"),
    lr_scheduler=dict(constant="constant", constantwithwarmup="constant", cosine="cosine", linear="linear"),
    quantize=QUANTIZE, quantize_text_encoder=QUANTIZE)

def model_name(text):
    """For other values of --model: ValueError unless it names a Qwen-Image-Edit."""
    if not re.fullmatch(r"(?i)[\w.~/][\w./ -]*", text) or not re.search("(?i)qwen-image-edit", text):
        raise ValueError("is another model")

# {flag of train.py: the type that it has there}; test_import_configs.py compares them
TYPES = dict(
    model=model_name, target_pixels=command_line.pixels, control_pixels=command_line.pixels,
    repeats=number(int, 1, 10_000), caption_dropout_rate=command_line.fraction,
    lora_rank=number(int, 1, peft_config.MOST_RANK), lora_alpha=number(float, 1e-6, peft_config.MOST_ALPHA),
    lora_dropout=number(float, 0, 0.99), batch_size=positive, max_steps=positive, lr=not_negative,
    warmup_steps=command_line.natural, weight_decay=not_negative, max_grad_norm=number(float, 1e-12),
    seed=command_line.seed_number, offload=command_line.natural, save_every=positive)
SECRET = re.compile("(?i)token$|api_?key|secret|password") # a key whose value is nobody's business

@dataclass
class Settings:
    """What a configuration says beside which pictures there are."""
    file: Path
    program: str # a name in TABLES
    values: dict # {key, with dots: [a value for each dataset that has it]}
    datasets: int

def flatten(value, key=""):
    """Yields (key with dots, value). Of a list of objects each one counts, so a key may come several times."""
    if isinstance(value, dict) and (value or not key):
        for name, inner in value.items():
            yield from flatten(inner, f"{key}.{name}".strip("-.")[:200])
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        for one in value:
            yield from flatten(one, key)
    else:
        yield key, value

def collect(configs):
    """-> {key: [its values]} of these dictionaries."""
    values = {}
    for config in configs:
        for key, value in flatten(config):
            values.setdefault(key, []).append(value)
    return values

def read_shell(text):
    """A script with `accelerate launch train.py --flag value ...` -> {flag: value}. Nothing is run, and no variable is
    filled in."""
    values = {}
    for line in re.sub(r"[\\^`]\r?\n", " ", text).splitlines():
        flag = None
        if not re.search(r"\.py\b|\blaunch\b", line): # a download
            continue
        for word in shlex.split(line, comments=True):
            if word.startswith("--"):
                flag, _, word = word[2:].partition("=")
                values[flag] = word or True
            elif flag: # what stands behind a value, such as && and a further command, stays with it
                values[flag] = word if values[flag] is True else f"{values[flag]} {word}"
    return values

def areas(value, program):
    """A resolution -> [its areas]. Of [960, 544] musubi-tuner means a width and a height, ai-toolkit two sizes."""
    if not isinstance(value, list):
        return [value]
    return ["x".join(map(str, value))] if program == "kohya" else value

def to_word(flag, value):
    """One value of theirs -> the word of train.py's command line that means it. An exception if there is none."""
    text = str(value).strip()
    if len(text) > 300:
        raise ValueError("is too long")
    if flag == "model": # DiffSynth-Studio has files behind it
        text = text.split(":")[0]
    name = re.sub("[^a-z0-9]", "", text.split(".")[-1].lower())
    if name in WORDS.get(flag, {}):
        return WORDS[flag][name]
    if flag.endswith("pixels") and text.isdigit() and int(text) <= 4096: # a side
        text = f"{text}x{text}"
    TYPES[flag](text)
    return text

def to_words(settings, flag, values):
    """The values of one key, one of each dataset that has it -> words of one flag. An exception if it refuses
    them, or if the datasets differ, which are one dataset here. Sizes are collected."""
    if flag.endswith("pixels"):
        values = [area for value in values for area in areas(value, settings.program)]
    if flag == "repeats": # a dataset without counts once
        values = values + [1] * (settings.datasets - len(values))
    words = list(dict.fromkeys(to_word(flag, value) for value in values))
    if not words or (len(words) > 1 and flag != "target_pixels"):
        raise ValueError("differs")
    return words

def translate(settings):
    """-> ({flag of train.py: its words}, ["key = value", ...] of all that is not taken over)."""
    flags, taken = {}, set()
    for row in TABLES[settings.program].strip().splitlines():
        key, flag = row.split()
        if f"datasets.{key}" in settings.values:
            key = f"datasets.{key}"
        if flag not in flags and key in settings.values:
            with contextlib.suppress(Exception): # a foreign value can fail in any way
                flags[flag] = to_words(settings, flag, settings.values[key])
                taken.add(key)
    data = DATA_KEYS[settings.program].split()
    rest = []
    for key, values in settings.values.items():
        name = re.sub(r"^(datasets|conditioning)\.|(?<=control_path)_?\d$", "", key)
        if key not in taken and name not in data:
            shown = "..." if SECRET.search(key) else ", ".join(dict.fromkeys(map(str, values)))
            rest.append(f"{key} = {shown:.80}")
    return flags, rest

def next_commands(settings, out, val):
    """-> lines: what is not taken over, and the commands that come next. settings: or None, of data without; val: the
    folder of the samples that are held out, or None."""
    doctor = ["python", "tools/doctor.py", out]
    train = ["python", "train.py", "--model", "Qwen/Qwen-Image-Edit-2511", "--data", out]
    if val:
        doctor.append(val)
        train += ["--val_data", val]
    if not settings:
        return ["next:", f"  {common.shell_command(doctor)}"]
    flags, rest = translate(settings)
    lines = []
    if rest:
        shown = textwrap.shorten(", ".join(rest), MOST_SHOWN, placeholder=", ...")
        lines.append(f"{settings.file.name}: not taken over: {shown}")
    if "model" in flags:
        train[3], = flags.pop("model")
    else:
        lines.append(f"{settings.file.name}: no Qwen-Image-Edit is named; --model is a choice of ours")
    for flag, words in flags.items():
        train += [f"--{flag}", *words]
        if flag.endswith("pixels"):
            doctor += [f"--{flag}", *words]
    return [*lines, "next:", f"  {common.shell_command(doctor)}", f"  {common.shell_command(train)}"]

# ---- datasets -------------------------------------------------------------------------------------------------------

# For each program one function takes a file apart -> ([dictionaries of settings], [datasets], the name of the file that
# has the datasets, or None). Another one makes arguments of read_folders, ... of a dataset.

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
    return [*rows, flags], rows, flags.get("dataset_config")

def kohya_part(path, their_dataset):
    """Settings of a dataset -> arguments of read_folders or read_tables."""
    if "image_jsonl_file" in their_dataset:
        return dict(tables=[own_file(path, their_dataset["image_jsonl_file"])], anywhere=True)
    controls = [their_dataset[key] for key in ("control_directory", "conditioning_data_dir") if key in their_dataset]
    target = their_dataset.get("image_dir") or their_dataset["image_directory"]
    return dict(target=locate(path, target), controls=[locate(path, name) for name in controls],
                suffix=caption_suffix(their_dataset.get("caption_extension", "txt")))

# ---- ai-toolkit ------------------------------------------------------------------------------------------------------

def aitoolkit_apart(path, config):
    job = config.pop("config")
    processes = job.pop("process")
    rows = [process | part for process in processes for part in process.get("datasets") or []]
    return [*processes, job, config], rows, None

def aitoolkit_part(config, their_dataset):
    """ai-toolkit's settings of a dataset, and of its job -> arguments of read_folders. Its controls are control_path, a
    string or a list, and control_path_1 or control_path2, ..., which may be null."""
    controls = []
    for key in sorted(their_dataset):
        if re.fullmatch(r"control_path(_?\d)?", key):
            controls += as_list(their_dataset[key] or [])
    mask = their_dataset.get("mask_path")
    if mask and their_dataset.get("invert_mask"):
        raise ValueError("invert_mask: white is the edited region here; invert the masks, and delete this setting")
    if mask:
        tell(f"{config}: to leave what is outside of a mask out of the loss, use train.py --mask_background_weight 0")
    return dict(target=locate(config, their_dataset["folder_path"]),
                controls=[locate(config, name) for name in controls], mask=locate(config, mask) if mask else None,
                suffix=caption_suffix(their_dataset.get("caption_ext", "txt")))

# ---- SimpleTuner -----------------------------------------------------------------------------------------------------

EMBEDS = "text_embeds image_embeds conditioning_image_embeds".split() # SimpleTuner's caches

def simpletuner_apart(path, config):
    """Its list of datasets; or its file of flags, which names that."""
    if isinstance(config, dict):
        flags = {name.lstrip("-"): value for name, value in config.items()}
        return [flags], [], flags["data_backend_config"]
    rows = [row for row in config if row.get("dataset_type") not in EMBEDS]
    values = []
    for row in rows:
        values.append({"conditioning" if row.get("dataset_type") == "conditioning" else "datasets": row})
    return values, simpletuner_pairs(rows), None

def is_config(source):
    """Whether a file is a configuration, and no table."""
    if source.suffix != ".json":
        return source.suffix in CONFIGS
    text = stray_files.read_text(source, common.LONG_TEXT)
    return bool(re.search(r'\A\s*\{|"(instance_data_dir|dataset_type|balancing)"\s*:', text))

def simpletuner_pairs(rows):
    """SimpleTuner's list of datasets -> [(one of targets, its datasets of conditions, in the order in which it names
    them)]. ValueError for pictures that lie in no folder, and for conditions of no target."""
    named, pairs = set(), []
    for row in rows:
        named.update(as_list(row.get("conditioning_data") or []))
    rows = [row for row in rows if not (row.get("disabled") or row.get("disable"))]
    conditions = {row["id"]: row for row in rows if row.get("dataset_type") == "conditioning"}
    for row in rows:
        if row.get("dataset_type", "image") not in ("image", "conditioning") or row.get("type", "local") != "local":
            raise ValueError(f"{row['id']}: only folders of pictures are read; delete it, or set disabled")
        if row["id"] not in conditions:
            pairs.append((row, [conditions[name] for name in as_list(row.get("conditioning_data") or [])]))
    for name in conditions.keys() - named:
        raise ValueError(f"{name}: no dataset has it as conditioning_data")
    return pairs

def simpletuner_part(config, pair):
    """SimpleTuner's settings of a dataset, and those of its conditions -> arguments of read_folders."""
    row, own = pair
    strategy = row.get("caption_strategy") or "textfile"
    if strategy != "textfile" or row.get("only_instance_prompt"):
        raise ValueError(f"{row['id']}: only captions in files are read, and --prompt TEXT is one for all pictures")
    masks, controls = [], []
    for other in own:
        kind = masks if other.get("conditioning_type") == "mask" else controls
        kind.append(locate(config, other["instance_data_dir"]))
    if masks[1:]:
        raise ValueError(f"{row['id']}: two datasets of masks, and a sample has one")
    if controls[1:]: # there --conditioning_multidataset_sampling says whether a sample gets all or one of them
        tell(f"{config}: {row['id']}: each sample gets a control of each of {len(controls)} datasets")
    return dict(target=locate(config, row["instance_data_dir"]), controls=controls, mask=masks[0] if masks else None,
                wordings=not row.get("disable_multiline_split"))

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
