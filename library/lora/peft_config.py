"""
peft's LoraConfig: what it says of a LoRA's layers, the rank and the alpha of each, and so its scale; and which of its
fields --lora_args may set.

One number stands for all layers, and patterns name those that have another one: rank_pattern, alpha_pattern. A file may
hold this config in its header, or have it beside it; it is a stranger's until it has been checked here. lora_file.py
and foreign_loras.py share this room, and the words for a file that is no LoRA.
"""
import json
import math
import re

from common import InputError, flag_error

MOST_RANK = 3072 # of a LoRA: as the layers are wide
MOST_ALPHA = 1e6 # of a LoRA: a stronger one draws black

PATTERNS = "rank_pattern alpha_pattern".split() # {"LAYER": NUMBER, ...}, a layer by the end of its name
# What a pattern of rank_pattern or alpha_pattern may consist of. In peft it is any regex, and one from a file could
# search for years; one of these parts, with one group and few that repeat, cannot.
PATTERN = re.compile(r"(?:[\w^$|()-]|\\[.d-]\+?|\[0-9\]\+?|\.\*?)*")
MOST_MATCHED = 10**8 # letters of patterns x layers, which take a second. Ours for all layers have 3e7


def lora_error(file, what, remedy="take another file"):
    return InputError(f"{file}: cannot be used as a LoRA: {what}; {remedy}")


def words_of(value):
    """What a file says, for an error line: a number, the beginning of a text, or else what it is."""
    return f"{value!r:.60}" if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def number_of_file(value, what):
    """A number of a file. ValueError if it is a text, true, NaN or too large: a LoRA of infinite strength draws
    black."""
    if type(value) not in (int, float) or not abs(value) <= MOST_ALPHA: # (NaN, too)
        raise ValueError(f"{what} is {words_of(value)}, and no number up to {MOST_ALPHA:,.0f}")
    return value


def read_patterns(patterns, what):
    """rank_pattern or alpha_pattern -> [(compiled regex, number)]: number_of_layer does what peft's get_pattern_key
    does with them. ValueError for what could be slow, or is no pattern."""
    patterns = patterns or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{what} is {words_of(patterns)}, and no object of names and numbers")
    text, read = "".join(patterns), []
    if len(text) > 200_000 or len(patterns) > 2000 or text.count(".*") > 40:
        raise ValueError(f"{what} has too many names")
    for pattern, value in patterns.items():
        simple = pattern.count("(") <= 1 and pattern.count(".*") <= 2 and pattern.count("+") <= 2
        if not simple or not PATTERN.fullmatch(pattern):
            raise ValueError(f"{what} has {pattern[:60]!r}, which is more than a layer's name")
        try:
            regex = re.compile(rf"(.*\.)?({pattern})$")
        except re.error:
            raise ValueError(f"{what} has {pattern[:60]!r}, which is no layer's name")
        read.append((regex, number_of_file(value, f"{what} {pattern[:60]!r}")))
    return read


def number_of_layer(patterns, layer, default):
    """The number of the first of read_patterns' patterns that fits this layer's name."""
    for pattern, value in patterns:
        if pattern.match(layer):
            return value
    return default


def check_config(where, config, layers):
    """A config that says alpha, its patterns read, and use_rslora as true or false. ValueError says what is wrong, or
    that it would take long to look up so many layers in the patterns."""
    patterns = {name: read_patterns(config.get(name), f"{name} of {where}") for name in PATTERNS}
    letters = sum(len(regex.pattern) for regex, _ in sum(patterns.values(), []))
    if letters * layers > MOST_MATCHED:
        raise ValueError(f"the patterns of {where} have too many names: {letters:,} letters for {layers:,} layers")
    root = config.get("use_rslora") or False
    if isinstance(root, str): # in a flat header
        root = {"true": True, "1": True, "false": False, "0": False, "none": False}.get(root.lower())
    if type(root) is not bool:
        raise ValueError(f"use_rslora of {where} is neither true nor false")
    return config | patterns | dict(use_rslora=root)


def scale_of_layer(where, config, layer, rank):
    """The scale of a layer by peft's config, which stands at `where`. rank: the tensors', or None."""
    alpha = config.get("lora_alpha", config.get("alpha"))
    alpha = number_of_file(number_of_layer(config["alpha_pattern"], layer, alpha), "lora_alpha")
    said = number_of_file(number_of_layer(config["rank_pattern"], layer, config.get("r", rank)), "r")
    if rank and said != rank and not config.get("ours"): # see foreign_loras.warn_resized
        raise ValueError(f"{where} says rank {said:g} for {layer}, and its tensors have {rank}")
    if said < 1:
        raise ValueError(f"{where} says rank {said:g} for {layer}")
    return alpha / (math.sqrt(said) if config["use_rslora"] else said)

# ---- --lora_args -----------------------------------------------------------------------------------------------------

# A file has the matrices A and B of some layers, for y = W x + (alpha / rank) B A x, on the base as it was published.
# So you may choose a layer's rank and alpha, and how A and B begin, as long as W stays. All else that peft can do would
# be missing when predict.py, diffusers or ComfyUI use the file, or does nothing in this training.

# olora, pissa, corda and loftq change W, and eva and lora_ga want calls that nobody makes here
VALUES = dict(use_rslora=["true", "false"], init_lora_weights=["true", "false", '"gaussian"', '"orthogonal"'])
FULL = ("a layer is trained in full by --lora_targets attention proj_out --lora_args rank_pattern={\"proj_out\":64} "
        "alpha_pattern={\"proj_out\":64}, the smaller of its sides; give that")
INSTEAD = dict(r="give --lora_rank", lora_alpha="give --lora_alpha, for single layers alpha_pattern",
               lora_dropout="give --lora_dropout", use_dora="ComfyUI ignores its magnitudes; raise --lora_rank",
               loftq_config="give --quantize", modules_to_save=FULL, trainable_token_indices=FULL,
               **dict.fromkeys("target_modules exclude_modules target_parameters layers_to_transform layers_pattern "
                               "layer_replication".split(), "name the layers as --lora_targets, in single blocks as "
                               "transformer_blocks.1.attn.to_q"))


def refuse_lora_args(fields):
    """Ends the script for an argument that a LoRA's file cannot hold, before anything slow. fields: {name: value}."""
    for field, value in fields.items():
        if field in PATTERNS:
            refuse_pattern(field, value)
        elif field not in VALUES:
            remedy = INSTEAD.get(field, f"leave it out; there are {', '.join([*PATTERNS, *VALUES])}")
            flag_error(f"--lora_args {field}: a LoRA's file cannot hold it, or it does nothing here; {remedy}")
        elif json.dumps(value) not in VALUES[field]:
            flag_error(f"--lora_args {field}={value}: cannot be kept, or means nothing; give "
                       f"{' or '.join(VALUES[field])}")


def refuse_pattern(field, value):
    """Likewise, for a pattern that could not be read back from the file."""
    most = MOST_RANK if field == "rank_pattern" else MOST_ALPHA
    try:
        if value is None:
            raise ValueError(f"{field} is null")
        for _, number in read_patterns(value, field):
            if not 0 < number <= most:
                raise ValueError(f"{field} has {number:g}, which is not above 0 and up to {most:g}")
            if field == "rank_pattern" and type(number) is not int:
                raise ValueError(f"{field} has {number:g}, which is no whole number")
    except ValueError as e:
        flag_error(f"--lora_args: {e}; give layers by the ends of their names, such as {{\"attn.to_q\": 8}}")


def refuse_unused_args(fields, lora):
    """InputError for a pattern that fits no layer, which peft would ignore. lora: {name: parameter}."""
    layers = sorted({name.rsplit(".lora_", 1)[0] for name in lora})
    for field in PATTERNS:
        patterns = fields.get(field) or {}
        for pattern, (regex, _) in zip(patterns, read_patterns(patterns, field)):
            if not any(map(regex.match, layers)):
                raise InputError(f"--lora_args {field}: no layer of this LoRA is named {pattern}; there are "
                                 f"{', '.join(layers[:4])} ...")
