"""What a flag, a prompt or a field of jobs.jsonl may hold: functions for argparse's type=."""
import argparse
import json
import math
import re
import unicodedata
from pathlib import Path

from common import InputError, MAX_PIXELS

MOST_RANK = 3072 # of a LoRA: as the layers are wide
MOST_ALPHA = 1e6 # of a LoRA: a stronger one draws black
NEGATIVE_PROMPT = " " # the prompt of an unconditional run, as in the model cards

def pixels(text):
    """For argparse's type=: 'native', 1048576 or 1024*1024 -> 'native' or an area in pixels."""
    if text == "native":
        return text
    if re.fullmatch(r"\d+([*x]\d+)?", text):
        area = math.prod(map(int, re.split("[*x]", text)))
        least = 4097 if text.isdigit() else 32 * 32 # a smaller number is a side, as other trainers give it
        if least <= area <= MAX_PIXELS:
            return area
    raise argparse.ArgumentTypeError(f"{text!r} is no area; give 1024x1024, 1048576 or native")

def number(kind, low, high=math.inf, why=""):
    """For argparse's type=: an int or a float from low to high. argparse turns the error into a line and status 2. why:
    there is this limit."""
    def parse(text):
        value = kind(str(text)) # a number of jobs.jsonl too: int(0.5) would be 0
        if low <= value <= high: # False for nan too
            return value
        raise argparse.ArgumentTypeError(f"{text} is out of range{why and f' ({why})'}; give {low} to {high}")
    parse.__name__ = kind.__name__ # argparse says "invalid int value"
    return parse

def key_value(text):
    """For argparse's type=: 'use_rslora=true' -> ('use_rslora', True); the value is JSON, or else a string."""
    key, _, value = text.partition("=")
    if not key.isidentifier() or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE; give all three, as in use_rslora=true")
    value = {"True": "true", "False": "false", "None": "null"}.get(value, value) # as Python writes them
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value

natural, positive = number(int, 0, 10**9), number(int, 1, 10**9)
# torch's generator on a CPU takes 32 bits of a seed
seed_number = number(int, 0, 2**32 - 1, "torch uses 32 bits of a seed, so that a larger one repeats a smaller one's")
noise_level = number(float, 1e-6, 1, "a schedule ends at 0 by itself, so leave a last 0 out")
not_negative, fraction = number(float, 0, 1e30), number(float, 0, 1) # fp32 holds sums of such numbers
ALL_BLOCKS = 10**9 # what --offload all is: more than any model has
NEGATIVE = re.compile(r"(?i)-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\Z|-(inf|nan)\Z")

def number_of_blocks(text):
    return ALL_BLOCKS if text == "all" else natural(text)

def is_one_file(name):
    return Path(name or "").is_file() or str(name).endswith((".safetensors", ".gguf"))

# how the stock pipeline samples, as the model cards have it
SAMPLING = dict(negative_prompt=NEGATIVE_PROMPT, num_inference_steps=20, true_cfg_scale=4.0, sigmas=None,
                shift=None)

def png_name(text):
    if not text.lower().endswith(".png") or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no .png name; give one, or --out_dir for a folder")
    return text

def only_text(value):
    if not isinstance(value, str):
        raise TypeError("is no text")
    return value

# Flags that a line of jobs.jsonl may set, too, for its own picture: {name: (type, help)}. train.py has those of
# SAMPLING, for its validation pictures.
SAMPLE_FLAGS = dict(
    negative_prompt=(only_text, "prompt of the unconditional pass (default: one space)"),
    num_inference_steps=(number(int, 1, 1000), "Euler steps: at least 2, or 1 with a --shift"),
    true_cfg_scale=(number(float, 0, 1e6), "CFG scale; at 1 or below no unconditional pass is run: half the time"),
    shift=(number(float, 1e-6, 1e6), "one shift for all sizes, not stretched: 3 for Qwen-Image-Lightning (default: the "
           "model's own, by size)"),
    height=(number(int, 32, 16384), "of the result, in pixels, rounded down to 16 (default: from the area)"),
    width=(number(int, 32, 16384), "pixels, likewise"),
    size_from=(positive, "which picture gives the result its shape, from 1 (default: the last, as in stock)"))
INVISIBLE = "\u115f\u1160\u2800\u3164\uffa0" # fillers and a blank, which count as letters or symbols

def is_visible(text):
    """Whether it has a character that can be seen: no space, control or format character (such as U+200B), or mark."""
    return any(unicodedata.category(c) not in "Cc Cf Mn Zl Zp Zs" and c not in INVISIBLE for c in text)

def check_text(where, prompt):
    if len(prompt) > 200_000: # its tokens are counted, which takes minutes for more
        raise InputError(f"{where}: prompt of {len(prompt):,} letters; shorten it")
    if re.search("<[|]|[\ud800-\udfff]", prompt):
        raise InputError(f"{where}: a special token, or half a character, in {prompt!r:.200}; leave it out, or "
                         "if it looks right to you, set LC_ALL=C.UTF-8")
    if found := re.search(r"\[(trigger|name)\]", prompt): # ai-toolkit's, which would be trained literally
        raise InputError(f"{where}: {found[0]} stands for a word in {prompt!r:.200}; write the word itself")

def is_index(root):
    return Path(root).suffix == ".json"
