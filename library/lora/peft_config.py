"""
peft's LoraConfig: what it says of a LoRA's layers, the rank and the alpha of each, and so its scale; by which of its
fields a file is no plain LoRA; and which of them --lora_args may set.

One number stands for all layers, and patterns name those that have another one: rank_pattern, alpha_pattern. A file may
hold this config in its header, or have it beside it; it is a stranger's until it has been checked here. lora_file.py
and foreign_loras.py share this room, and the words for a file that is no LoRA.
"""
import json
import math
import re

from common import InputError, flag_error, warn_once

MOST_RANK = 3072 # of a LoRA: as the layers are wide
MOST_ALPHA = 1e6 # of a LoRA: a stronger one draws black

PATTERNS = "rank_pattern alpha_pattern".split() # {"LAYER": NUMBER, ...}, a layer by the end of its name
# What a pattern of rank_pattern or alpha_pattern may consist of. In peft it is any regex, and one from a file could
# search for years; one of these parts, with one group and few that repeat, cannot.
PATTERN = re.compile(r"(?:[\w^$|()-]|\\[.d-]\+?|\[[0-9-]+\]\+?|\.\*?)*")
MOST_MATCHED = 10**8 # letters of patterns x layers, which take a second. Ours for all layers have 3e7

# Every field of peft 0.21's LoraConfig and LoKrConfig stands in one of these lists (a test fails at a new
# one). A and B of a plain LoRA mean y = W x + scale B A x, with W as it was published. These fields tell the scale,
SCALE = "r lora_alpha alpha use_rslora".split() + PATTERNS
# these tell how it was trained, or do nothing in a linear layer, or what the tensors show as well,
TRAINING = ("task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules "
            "exclude_modules layers_to_transform layers_pattern target_parameters lora_dropout fan_in_fan_out "
            "megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size "
            "velora_config monteclora_config runtime_config ensure_weight_tying rank_dropout module_dropout "
            "rank_dropout_scale init_weights use_effective_conv2d decompose_both decompose_factor").split()
# and by these the matrices mean something else, or are not all that was trained, but for a value here, or none. (pissa,
# olora, corda, loftq and lora_ga have changed W before the first step)
CHANGES = dict(peft_type="lora lokr", init_lora_weights="true gaussian orthogonal eva mica", bias="none",
               **dict.fromkeys("use_dora use_qalora alora_invocation_tokens lora_bias modules_to_save "
                               "trainable_token_indices layer_replication use_bdlora arrow_config kasa_config".split(),
                               ""))
NOTHING = "none null false 0 {} []".split() # as a flat header says that a field is not set

def lora_error(file, what, remedy="take another file"):
    return InputError(f"{file}: cannot be used as a LoRA: {what}; {remedy}")

def words_of(value):
    """What a file says, for an error line: a number, the beginning of a text, or else what it is."""
    return f"{value!r:.60}" if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"

def refuse_changes(file, where, config):
    """InputError for what makes a file no plain LoRA. config: {a field of LoraConfig, maybe behind a prefix: its value,
    or that as a text}, and anything else."""
    for name, value in config.items():
        field = name.rpartition(".")[2]
        if field not in CHANGES or not value:
            continue
        said = words_of(value).strip("'\" ").lower().rpartition(".")[2] # (of PeftType.LORA the end)
        if said not in NOTHING + CHANGES[field].split():
            raise lora_error(file, f"{where} says {field} {words_of(value)}, so it is no plain LoRA, whose matrices "
                             "alone change the published model", "have its trainer save it as one (of PiSSA and its "
                             "kin by peft's path_initial_model_for_weight_conversion), or take another file")

def warn_unknown(file, where, config):
    """A line for a field that is in none of the lists, such as a later peft's."""
    known = {*SCALE, *TRAINING, *CHANGES}
    if unknown := [name for name in config if config[name] and name not in known and "." not in name]:
        warn_once(f"warning: {file}: {where} says {unknown[0]:.60}, a field that is not known here; if that is "
                  "more than a note about the training, the LoRA does something else here")

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
    """A config that says alpha, its patterns read, and use_rslora as true or false. rank_pattern is None if it cannot
    be read, as the tensors tell the ranks. ValueError says what is wrong, or that it would take long to look up so many
    layers in the patterns."""
    patterns = dict(rank_pattern=None)
    for name in PATTERNS:
        try:
            patterns[name] = read_patterns(config.get(name), f"{name} of {where}")
        except ValueError:
            if name == "alpha_pattern":
                raise
    letters = 0
    for regex, _ in (patterns["rank_pattern"] or []) + patterns["alpha_pattern"]:
        letters += len(regex.pattern)
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
    said = rank
    if config["rank_pattern"] is not None:
        said = number_of_layer(config["rank_pattern"], layer, config.get("r", rank))
    elif not rank: # of a LoKr, whose tensors do not always tell it
        raise ValueError(f"rank_pattern of {where} is more than names, and tells no rank of {layer}")
    said = number_of_file(said, "r")
    if rank and said != rank: # another program has resized it, and may have kept its scale or not
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

def refuse_lora_args(fields):
    """Ends the script for an argument that a LoRA's file cannot hold, before anything slow. fields: {name: value}."""
    for field, value in fields.items():
        if field not in PATTERNS and json.dumps(value) not in VALUES.get(field, []):
            choices = ", ".join(f"{name}={' or '.join(values)}" for name, values in VALUES.items())
            flag_error(f"--lora_args {field}={value}: a LoRA's file cannot hold it, or it means nothing here; give "
                       f"{choices}, {' or '.join(PATTERNS)} (--lora_rank, --lora_alpha, --lora_dropout and "
                       "--lora_targets are flags)")
        try:
            if field in PATTERNS and min([number for _, number in read_patterns(value, field)], default=0) <= 0:
                raise ValueError(f"{field} names no layer, or has 0, with which a layer learns nothing")
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
