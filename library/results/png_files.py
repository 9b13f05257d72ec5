"""A result as a PNG, and what it says of itself."""
import io
import json
import sys

from PIL import PngImagePlugin

import common
from common import InputError

def png_texts(picture, jobs):
    """-> what a result says of itself, beside its command: of its own sample, seed and scale, as a command may make
    many pictures. picture: a predict.Picture; jobs: --jobs."""
    sample = picture.sample
    said = dict(prompt=sample.prompts[0], controls=sample.controls)
    said |= {name: value for name, value in vars(picture.settings).items() if value is not None}
    if picture.strengths:
        said["lora_scale"] = picture.strengths
    if "line" in sample.job_fields:
        said["line"] = f"{jobs}:{sample.job_fields['line']}"
    return said

def encode_png(image, key="", code=None, said=None):
    """-> the bytes of a PNG. key: a hash of its settings, code: what has drawn it (sources.drawing), for
    library/results/result_names.py. It also tells a person the command that made it, and `said`: of its own settings."""
    png, meta = io.BytesIO(), PngImagePlugin.PngInfo()
    meta.add_text("key", key)
    if code:
        meta.add_text("code", json.dumps(code))
    meta.add_text("command", common.shell_command(["python", *sys.argv]))
    if said:
        meta.add_text("sample", json.dumps(said))
    image.save(png, format="PNG", pnginfo=meta, icc_profile=None) # (a profile would stand before the key)
    return png.getvalue()

def cause_of(model, lora, cfg, dtype=""):
    """-> what may have made this model, "transformer" or "VAE", compute NaN or Inf, and what helps: those suspects that
    are at work. lora: what makes a LoRA weaker, or "" if there is none; cfg: the CFG scale."""
    suspects = {f"a LoRA that is too strong ({lora})": lora,
                "float16, which ends at 65,504 (give --dtype bfloat16 or float32)": dtype == "float16",
                f"--true_cfg_scale {cfg:g} (lower it)": cfg > 30}
    at_work = [words for words, is_there in suspects.items() if is_there]
    return " or ".join(at_work or [f"damaged weights of the {model} (take another copy of them)"])

def refuse_picture(picture, model, dtype):
    """InputError if this model has computed NaN or Inf for one of predict.plan_pictures; model may be None."""
    if model:
        lora = any(picture.strengths) and "lower --lora_scale; --scales 0 is the base alone"
        cause = cause_of(model, lora, picture.settings.true_cfg_scale, dtype)
        raise InputError(f"{picture.path}: NaN or Inf in what the {model} computed, and no picture; the cause may be "
                         f"{cause}")
