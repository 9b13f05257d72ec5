"""
The flags that a model's folder sets, by its defaults.json: {"train.py": {"max_steps": 500, "lr": 0.005}, ...}.

Such a folder may come from anyone. So its file may set numbers and choices that a model can want: sizes, steps, rates,
the shift, the CFG scale, an optimizer of torch.optim. All else stays with the person who starts the script: what is
read and written, which device computes, what is downloaded or sent, which code is imported, what a disk or a card has
to hold. A value is checked as the flag's would be, and a line at the start says which flags the folder sets.
"""
import json
import os
import re
import shlex
import textwrap
from argparse import ArgumentError, ArgumentTypeError, BooleanOptionalAction
from pathlib import Path

import common
from common import InputError, first_words, printable
from library.files import stray_files
from library.models import hub

SCRIPTS = ["cache.py", "train.py", "predict.py"] # tools/lean_train.py reads train.py's
SETTABLE = """
    target_pixels control_pixels upscale max_tokens max_sequence_length
    max_steps batch_size lr lr_scheduler warmup_steps weight_decay max_grad_norm optimizer_args gradient_checkpointing
    lora_rank lora_alpha lora_dropout caption_dropout_rate prompt_image_dropout_rate
    timestep_sampling mask_foreground_weight mask_background_weight
    num_inference_steps true_cfg_scale shift sample_every val_pictures""".split()
# further ones, for which argparse takes any text: what this may be
TEXTS = dict(optimizer=r"torch\.optim\.[A-Z]\w*", lora_targets=r"\w+(\.\w+)*(-linear)?")
MOST_BATCH = 4096 # a batch is a list in memory before it is computed
MOST_BYTES = 2**16 # of the file
# a flag of the command line that makes others of the folder meaningless
REPLACES = {"--data": ["val_data"], "--optimizer": ["optimizer_args"], "--sigmas": ["num_inference_steps"],
            "--pretrained_lora": ["lora_rank", "lora_alpha", "lora_targets"]}


def folder_of(model):
    return hub.TINY_DATA.parent if model == "tiny" else Path(model)


def is_ours(folder):
    return os.path.realpath(folder) == os.path.realpath(hub.TINY_DATA.parent)


def read_sections(folder):
    """-> {script: {flag: value}} of the folder's defaults.json, {} if it has none. InputError if it says anything that
    a model's folder may not."""
    file = folder / "defaults.json"
    if not os.path.lexists(file):
        return {}
    # a pipe would wait for ever; a link would show what another file holds
    if not file.is_file() or not common.is_inside(file, folder) or file.stat().st_size > MOST_BYTES:
        raise InputError(f"{file}: is no file of at most {MOST_BYTES:,} bytes in this folder; delete it")
    try:
        sections = common.read_object(stray_files.read_text(file))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{file}: is no JSON object ({first_words(e)}); mend it, or delete it")
    for script, flags in sections.items():
        if script not in SCRIPTS or not isinstance(flags, dict):
            raise InputError(f"{file}: {script:.60}: want {{flag: value}} of {', '.join(SCRIPTS)}; delete the entry")
        for name in flags:
            if name not in SETTABLE and name not in TEXTS:
                raise InputError(f"{file}: sets {name:.60} of {script}, which is not for a model's folder to set; "
                                 f"delete the entry, and give --{name:.60} yourself if you want that")
    return sections


def words_of(name, value):
    """-> the words that a person would write behind --NAME. ArgumentTypeError if they would not."""
    values = value if isinstance(value, list) else [value]
    if name == "optimizer_args":
        return [f"{key}={plain(argument)}" for key, argument in map(pair, values)]
    if not values or not all(type(word) in (int, float, str) for word in values):
        raise ArgumentTypeError(f"{json.dumps(value)} is no number or name, and no list of such")
    words = list(map(str, values))
    for word in words:
        if name in TEXTS and not re.fullmatch(TEXTS[name], word):
            raise ArgumentTypeError(f"{word!r} is none that a model's folder may name")
    return words


def pair(value):
    if not isinstance(value, list) or len(value) != 2:
        raise ArgumentTypeError(f"{json.dumps(value)} is no pair of a key and a value")
    return value


def plain(value):
    """An argument of an optimizer as the command line has it: 3, true, [0.9,0.99], match_rms_adamw.
    ArgumentTypeError for what is no number or choice."""
    if isinstance(value, str) and re.fullmatch(r"\w{1,99}", value):
        return value
    numbers = value if isinstance(value, list) else [value]
    if len(numbers) < 9 and all(type(n) in (bool, int, float) and abs(n) < 1e30 for n in numbers): # False for nan
        return json.dumps(value)
    raise ArgumentTypeError(f"{json.dumps(value)} is no number or choice")


def parse(parser, action, value):
    """-> what argparse would make of the value for this flag. ArgumentError or ArgumentTypeError if it would not."""
    if isinstance(action, BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"{json.dumps(value)} is neither true nor false")
        return value
    parsed = []
    for word in words_of(action.dest, value):
        parsed.append(parser._get_value(action, word)) # (argparse has no public way to ask one flag)
        parser._check_value(action, parsed[-1])
    if action.nargs:
        return parsed
    if len(parsed) > 1:
        raise ArgumentTypeError(f"{json.dumps(value)} is more than one value")
    if action.dest == "batch_size" and parsed[0] > MOST_BATCH:
        raise ArgumentTypeError(f"{value} is more than {MOST_BATCH}")
    return parsed[0]


def read(parser, model, script):
    """-> {flag: value}, parsed: what the folder of --model sets, of the flags that this parser knows. InputError names
    an entry that its flag would refuse."""
    actions = {action.dest: action for action in parser._actions}
    folder, found = folder_of(model), {}
    if is_ours(folder) and "data" in actions:
        found = dict(data=[str(folder / "data")], val_data=[str(folder / "val"), str(folder / "known")])
    for name, value in read_sections(folder).get(script, {}).items():
        try:
            if name in actions:
                found[name] = parse(parser, actions[name], value)
        except (ArgumentError, ArgumentTypeError) as e:
            reason = str(e).removeprefix(f"argument --{name}: ")
            raise InputError(f"{folder / 'defaults.json'}: {name} of {script}: {reason:.200}; mend the entry, or "
                             "delete it")
    return found


def describe(defaults):
    """{flag: value} -> the same as flags."""
    words = []
    for name, value in defaults.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *["=".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values]]
    return shlex.join(words)


def epilog(parser, script):
    """What -h says of --model tiny."""
    flags = describe(read(parser, "tiny", script)).replace(str(hub.TINY_DATA.parent), "tiny")
    return textwrap.fill(f"With --model tiny these defaults apply: {flags}", 100, break_on_hyphens=False)


def apply(parser, model, script):
    """Makes what the folder of --model sets the parser's defaults, and says so."""
    given = set(parser.given())
    replaced = [name for flag in given & REPLACES.keys() for name in REPLACES[flag]]
    defaults = {}
    for name, value in read(parser, model, script).items():
        if name not in replaced and f"--{name}" not in given and f"--no-{name}" not in given:
            defaults[name] = value
    parser.set_defaults(**defaults)
    if defaults and not is_ours(folder_of(model)): # whose flags -h lists
        common.say(printable(f"{folder_of(model) / 'defaults.json'} sets {describe(defaults)}"))
