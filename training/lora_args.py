"""
--lora_args: the fields of peft.LoraConfig that a LoRA's file can hold.

A file has the matrices A and B of some layers, for y = W x + (alpha / rank) B A x, on the base as it was published. So
you may choose a layer's rank and alpha, and how A and B begin, as long as W stays. All else that peft can do would be
missing when predict.py, diffusers or ComfyUI use the file, or does nothing in this training.
"""
import json

import common
from library.cli.flag_types import MOST_ALPHA, MOST_RANK
from library.lora.peft_config import PATTERNS, read_patterns

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
            common.flag_error(f"--lora_args {field}: a LoRA's file cannot hold it, or it does nothing here; {remedy}")
        elif json.dumps(value) not in VALUES[field]:
            common.flag_error(f"--lora_args {field}={value}: cannot be kept, or means nothing; give "
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
        common.flag_error(f"--lora_args: {e}; give layers by the ends of their names, such as {{\"attn.to_q\": 8}}")


def refuse_unused_args(fields, lora):
    """InputError for a pattern that fits no layer, which peft would ignore. lora: {name: parameter}."""
    layers = sorted({name.rsplit(".lora_", 1)[0] for name in lora})
    for field in PATTERNS:
        patterns = fields.get(field) or {}
        for pattern, (regex, _) in zip(patterns, read_patterns(patterns, field)):
            if not any(map(regex.match, layers)):
                raise common.InputError(f"--lora_args {field}: no layer of this LoRA is named {pattern}; there are "
                                        f"{', '.join(layers[:4])} ...")
