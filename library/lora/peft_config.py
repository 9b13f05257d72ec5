"""
What peft's LoraConfig says of a LoRA's layers: the rank and the alpha of each, and so its scale.

One number stands for all layers, and patterns name those that have another one: rank_pattern, alpha_pattern. A file may
hold this config in its header, or have it beside it; it is a stranger's until it has been checked here. lora_file.py
and foreign_loras.py share this room, and the words for a file that is no LoRA.
"""
import math
import re

from common import InputError
from library.cli.flag_types import MOST_ALPHA

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
