"""
Configurations of other trainers -> which folders and tables their datasets are, for tools/import_data.py, and the line
of train.py with those of their settings that it has, too. They may come from strangers: values are data, nothing in
them is run, and a file that one names is opened only below its own folder, but for pictures.

What is not here, and has no line: the defaults of a program whose file is silent, units other than train.py's, and
words for what stays behind. It stands in one line, `not taken over: key = value, ...`, to be looked up in train.py -h.
"""
import argparse
import math
import os
import re
import shlex
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

CONFIGS = ".toml .yaml .yml .sh .env".split()
ASK = "name the folders: OUT --target DIR --control DIR" # what to do about any layout that this script does not know
CONTROLS = ["control_path", *[f"control_path{middle}{n}" for middle in ("", "_") for n in range(10)]] # ai-toolkit's

MOST_SHOWN = 500 # settings that are not taken over
MOST_YAML = 2**20 # bytes: stray_files.read_text reads no more of a configuration

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
    """-> (the program whose configuration this is, a name in TABLES; what its file says). Any exception if it cannot
    be read."""
    text = stray_files.read_text(path)
    if path.suffix in (".sh", ".env"):
        found = read_shell(text)
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
    """-> (for each dataset in a configuration the arguments of read_folders or read_tables, and of write_masks; its
    Settings). InputError if there are neither datasets nor settings of a training."""
    parts, why, settings = [], "its layout is another one", None
    try:
        program, config = parse(path)
        take_apart, part_of = PROGRAMS[program]
        values, rows, other = take_apart(path, config)
        settings = Settings(path, program, collect(values))
        if other and not rows:
            more, rows, _ = take_apart(path, parse(own_file(path, other))[1])
            settings.values = collect(more + values)
        if not rows:
            raise KeyError("datasets")
        parts = [part_of(path, row) for row in rows]
        settings.datasets = len(parts)
    except Exception as e: # a foreign file can fail in any way
        if isinstance(e, KeyError):
            why = f"no {e}"
        elif isinstance(e, (ValueError, yaml.YAMLError)): # (the others speak of Python)
            why = common.first_words(e)
    no_data = "" if parts else f"{path}: no datasets of pictures in it ({why}); {ASK}"
    for place in [place for part in parts for place in (part.get("target"), *part.get("tables", [])) if place]:
        if not os.path.exists(place):
            no_data = f"{place}: does not exist; {stray_files.near_path(place)}, or {ASK}"
    if no_data and not (settings and translate(settings)[0]):
        raise InputError(no_data)
    settings.no_data = no_data
    for trigger in dict.fromkeys(part["trigger"] for part in parts if part.get("trigger")):
        tell(f"{path}: captions without {trigger!r:.100}, the trigger word, will begin with it")
    different = []
    for part in parts: # other programs have a dataset once for each of its sizes: a pair could be trained and held out
        if part not in different:
            different.append(part)
        else:
            tell(f"{path}: {part.get('target') or part.get('tables')} is there twice, and is read once")
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
    folder = config.resolve().parent
    places = [Path(name), config.parent / name, *[above / name for above in folder.parents[:2]]]
    return next((path for path in map(stray_files.on_disk, places) if path.exists()), config.parent / name)

def caption_suffix(extension):
    """txt or .txt -> .txt. ValueError if no file name can end in it."""
    return Path("caption").with_suffix("." + extension.lstrip(".")).suffix

# ---- settings: their key, our flag, and a setting that must have one of these values, or this one is asleep ----------

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
train.gradient_accumulation                      accumulation
train.gradient_accumulation_steps                accumulation
train.steps                                      max_steps
train.optimizer                                  optimizer
train.lr                                         lr
train.lr_scheduler                               lr_scheduler
train.lr_scheduler_params.warmup_steps           warmup_steps
train.optimizer_params.weight_decay              weight_decay
train.max_grad_norm                              max_grad_norm
train.ema_config.ema_decay                       ema                    train.ema_config.use_ema=True
model.qtype                                      quantize               model.quantize=True
model.qtype_te                                   quantize_text_encoder  model.quantize_te=True
sample.sample_every                              sample_every
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
gradient_accumulation_steps                      accumulation
max_train_epochs                                 epochs
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
sample_every_n_steps                             sample_every
save_every_n_steps                               save_every""",
    onetrainer="""
base_model_name                                  model
resolution                                       target_pixels
concepts.balancing                               repeats                concepts.balancing_strategy=REPEATS
text_encoder.dropout_probability                 caption_dropout_rate
lora_rank                                        lora_rank
lora_alpha                                       lora_alpha
dropout_probability                              lora_dropout
batch_size                                       batch_size
gradient_accumulation_steps                      accumulation
epochs                                           epochs
optimizer.optimizer                              optimizer
learning_rate                                    lr
learning_rate_scheduler                          lr_scheduler
learning_rate_warmup_steps                       warmup_steps
optimizer.weight_decay                           weight_decay
clip_grad_norm                                   max_grad_norm
ema_decay                                        ema                    ema=GPU|CPU
transformer.weight_dtype                         quantize
text_encoder.weight_dtype                        quantize_text_encoder
sample_after                                     sample_every           sample_after_unit=STEP
save_every                                       save_every             save_every_unit=STEP""",
    simpletuner="""
model_flavour                                    model
pretrained_model_name_or_path                    model
model_name                                       model
resolution                                       target_pixels
conditioning.resolution                          control_pixels
repeats                                          repeats+1
caption_dropout_probability                      caption_dropout_rate
lora_rank                                        lora_rank
lora_alpha                                       lora_alpha
lora_dropout                                     lora_dropout
train_batch_size                                 batch_size
gradient_accumulation_steps                      accumulation
num_train_epochs                                 epochs
num_epochs                                       epochs
max_train_steps                                  max_steps
max_num_steps                                    max_steps
optimizer                                        optimizer
learning_rate                                    lr
lr_scheduler                                     lr_scheduler
lr_schedule                                      lr_scheduler
lr_warmup_steps                                  warmup_steps
weight_decay                                     weight_decay
max_grad_norm                                    max_grad_norm
ema_decay                                        ema                    use_ema=True
seed                                             seed
training_seed                                    seed
base_model_precision                             quantize
text_encoder_1_precision                         quantize_text_encoder
musubi_blocks_to_swap                            offload
validation_step_interval                         sample_every
validation_steps                                 sample_every
checkpoint_step_interval                         save_every
checkpointing_steps                              save_every""",
    diffsynth="""
model_id_with_origin_paths                       model
max_pixels                                       target_pixels
dataset_repeat                                   repeats
lora_rank                                        lora_rank
gradient_accumulation_steps                      accumulation
num_epochs                                       epochs
learning_rate                                    lr
weight_decay                                     weight_decay
save_steps                                       save_every""")

# What the functions at the end of this file read of a dataset; control_path_1 stands for control_path_2, ... too.
DATA_KEYS = dict(
    aitoolkit="folder_path control_path mask_path alpha_mask invert_mask caption_ext caption_type default_caption "
              "trigger_word",
    kohya="image_directory image_dir image_jsonl_file control_directory conditioning_data_dir caption_extension "
          "multiple_target dataset_config",
    onetrainer="concepts.path concepts.enabled concept_file_name",
    simpletuner="id type dataset_type disabled disable instance_data_dir instance_data_root conditioning_data "
                "conditioning_type source_dataset_id caption_strategy instance_prompt only_instance_prompt "
                "prepend_instance_prompt disable_multiline_split data_backend_config dataloader_config",
    diffsynth="dataset_base_path dataset_metadata_path")
# their words for our values, without marks and capitals
QUANTIZE = dict(true="fp8", fp8="fp8", float8="fp8", qfloat8="fp8", fp8quanto="fp8", int8="int8", qint8="int8",
                int8quanto="int8", nf4="nf4", nfloat4="nf4", nf4bnb="nf4")
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
    ema=number(float, 0, 0.99999), seed=command_line.seed_number, offload=command_line.natural,
    sample_every=command_line.natural, save_every=positive)
REFUSALS = (ArithmeticError, LookupError, TypeError, ValueError, argparse.ArgumentTypeError)
SECRET = re.compile("(?i)token$|api_?key|secret|password") # a key whose value is nobody's business

@dataclass
class Settings:
    """What a configuration says beside which pictures there are."""
    file: Path
    program: str # a name in TABLES
    values: dict # {key, with dots: [a value for each dataset that has it]}
    datasets: int = 1
    no_data: str = "" # why its pictures are not found, if they are not

def flatten(value, key=""):
    """Yields (key with dots, value). Of a list of objects each one counts, so a key may come several times."""
    if isinstance(value, dict) and (value or not key):
        for name, inner in value.items():
            yield from flatten(inner, f"{key}.{name}".strip("-.")[:200])
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        for one in value:
            yield from flatten(one, key)
    else:
        yield key, {"true": True, "false": False}.get(str(value).lower(), value)

def collect(configs):
    """-> {key: [its values]} of these dictionaries. ValueError for more settings than a program has."""
    values = {}
    for config in configs:
        for key, value in flatten(config):
            values.setdefault(key, []).append(value)
    if len(values) > 5000:
        raise ValueError(f"{len(values):,} settings")
    return values

def read_shell(text):
    """A script with `accelerate launch train.py --flag value ...`, or lines of NAME=value -> {flag or name in small
    letters: value}. Nothing is run, and no variable is filled in."""
    values = {}
    for line in re.sub(r"[\\^`]\r?\n", " ", text).splitlines():
        flag = None
        if not re.search(r"^--|\.py\b|\blaunch\b|^(export )?\w+=", line): # a download
            continue
        for word in shlex.split(line, comments=True):
            if word.startswith("--"):
                flag, _, word = word[2:].partition("=")
                values[flag] = word or values.get(flag) or True
            elif flag and word in ("&&", "||", "|", ";", "&"):
                flag = None
            elif flag and not word.endswith(".py"):
                values[flag] = word if values[flag] is True else [*as_list(values[flag]), word]
            elif "=" in word:
                name, _, word = word.partition("=")
                values |= read_shell(word) if word.startswith("--") else {name.lower(): word}
    return values

def areas(value, program):
    """A resolution -> [its areas]: 512, "512,768", [512, 768]. sd-scripts and musubi-tuner mean a width and a height by
    two numbers."""
    parts = value if isinstance(value, list) else str(value).split(",")
    if program == "kohya" and len(parts) > 1:
        parts = ["x".join(map(numeral, parts))]
    return parts

def numeral(value):
    """A value as the type of a flag reads it: 2000.0 -> "2000"."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()

def to_word(flag, value):
    """One value of theirs -> the word of train.py's command line that means it. One of REFUSALS if there is none."""
    text = numeral(value)
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
    """The values of one key, one of each dataset that has it -> words of one flag. One of REFUSALS if it refuses them,
    or if the datasets differ, which are one dataset here. Sizes are collected."""
    if flag.endswith("pixels"):
        values = [area for value in values for area in areas(value, settings.program)]
    if flag == "repeats": # a dataset without counts once
        values = values + [1] * (settings.datasets - len(values))
    words = list(dict.fromkeys(to_word(flag, value) for value in values))
    if not words or (len(words) > 1 and flag != "target_pixels"):
        raise ValueError("differs")
    return words

def take_over(settings, flag, values, flags, samples):
    """The values of one key, for this word of TABLES -> (flag of train.py, its words). One of REFUSALS, as to_words.
    flags: {flag: words} of the rows above, on which steps and epochs depend."""
    batch = int(flags.get("batch_size", ["1"])[0])
    if flag == "repeats+1": # SimpleTuner counts those after the first one
        return "repeats", to_words(settings, "repeats", [command_line.natural(numeral(value)) + 1 for value in values])
    if flag == "accumulation":
        count, = to_words(settings, "batch_size", values)
        return "batch_size", to_words(settings, "batch_size", [batch * int(count)])
    if flag == "epochs":
        count, = to_words(settings, "max_steps", values)
        steps = math.ceil(samples * int(flags.get("repeats", ["1"])[0]) / batch)
        return "max_steps", to_words(settings, "max_steps", [steps * int(count)])
    return flag, to_words(settings, flag, values)

def is_awake(settings, condition):
    """Whether a row of TABLES counts: KEY=VALUE|VALUE, the setting with this key has one of these values."""
    key, _, states = condition.partition("=")
    values = {str(value) for value in settings.values.get(key, [])}
    return bool(values) and values <= set(states.split("|"))

def translate(settings, samples=0, held_out=False):
    """-> ({flag of train.py: its words}, ["key = value", ...] of all that is not taken over). samples: that are
    trained, 0 if it is not known: then epochs are no steps; held_out: whether there are others, to validate."""
    flags, done, taken = {}, set(), set()
    for row in TABLES[settings.program].strip().splitlines():
        key, flag, *conditions = row.split()
        if f"datasets.{key}" in settings.values:
            key = f"datasets.{key}"
        if flag in flags or flag in done or key not in settings.values:
            continue
        if flag == "sample_every" and not held_out: # train.py has nothing to validate then
            continue
        if not all(is_awake(settings, condition) for condition in conditions):
            continue
        try:
            name, words = take_over(settings, flag, settings.values[key], flags, samples)
        except REFUSALS:
            continue
        flags[name] = words
        done.add(flag)
        taken |= {key, *[condition.split("=")[0] for condition in conditions]}
    data = DATA_KEYS[settings.program].split()
    rest = []
    for key, values in settings.values.items():
        name = re.sub(r"^(datasets|conditioning)\.|(?<=control_path)_?\d$", "", key)
        if key not in taken and name not in data:
            shown = "..." if SECRET.search(key) else ", ".join(dict.fromkeys(map(str, values)))
            rest.append(f"{key} = {shown:.80}")
    return flags, rest

def next_commands(settings, out, val, count):
    """-> lines: what is not taken over, and the commands that come next. settings: or None, of data without; val: the
    folder of the samples that are held out, or None; count: of the others, 0 if it is not known."""
    doctor = ["python", "tools/doctor.py", out]
    train = ["python", "train.py", "--model", "Qwen/Qwen-Image-Edit-2509", "--data", out]
    if val:
        doctor.append(val)
        train += ["--val_data", val]
    if not settings:
        return ["next:", f"  {common.shell_command(doctor)}"]
    flags, rest = translate(settings, count, bool(val))
    lines = []
    if rest:
        more = f", and {len(rest) - MOST_SHOWN:,} more" if len(rest) > MOST_SHOWN else ""
        lines.append(f"{settings.file.name}: not taken over: {', '.join(rest[:MOST_SHOWN])}{more}")
    if "model" in flags:
        train[3], = flags.pop("model")
    else:
        lines.append(f"{settings.file.name}: no Qwen-Image-Edit is named; --model is a choice of ours")
    for flag, words in flags.items():
        train += [f"--{flag}", *words]
        if flag.endswith("pixels"):
            doctor += [f"--{flag}", *words]
    title = "next:" if count else "when the pictures are imported:"
    return [*lines, title, f"  {common.shell_command(doctor)}", f"  {common.shell_command(train)}"]

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

def fill(text, word):
    """A caption with this word in ai-toolkit's placeholders."""
    return text.replace("[trigger]", word).replace("[name]", word)

def aitoolkit_part(config, their_dataset):
    """ai-toolkit's settings of a dataset, and of its job -> arguments of read_folders, and of write_masks. Its controls
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
    default = command_line.only_text(their_dataset.get("default_caption") or "")
    if alpha:
        tell(f"{config}: alpha_mask: what is opaque in a target is its mask, and what is transparent becomes white")
    if alpha or mask:
        tell(f"{config}: to leave what is outside of a mask out of the loss, use train.py --mask_background_weight 0")
    suffix = their_dataset.get("caption_type") or their_dataset.get("caption_ext", "txt") # the first is its older name
    controls = [locate(config, name) for name in controls]
    mask = locate(config, mask) if mask and not alpha else None
    trigger = None if trigger is None else str(trigger).strip()
    return dict(target=locate(config, their_dataset["folder_path"]), controls=controls, mask=mask, alpha=alpha,
                invert=bool(their_dataset.get("invert_mask")), suffix=caption_suffix(suffix),
                trigger=trigger, default=default or None)

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
        return part | dict(suffix=None, prompt=list(map(command_line.only_text, as_list(words))))
    if strategy == "filename":
        part.update(suffix=None, prompt=None)
    if row.get("prepend_instance_prompt"):
        part["trigger"] = command_line.only_text(row["instance_prompt"])
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
