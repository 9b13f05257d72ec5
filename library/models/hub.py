"""What --model may be: tiny, a folder, or an id of the hub."""
import os
from pathlib import Path

from common import InputError, first_words
from library.files.stray_files import closest

TINY_DATA = Path(__file__).parents[2] / "tiny/data"
TINY_WIDTH = '"joint_attention_dim": 64,' # in the config.json of tiny's transformer; the real model has 3584

def from_hub(name, fetch):
    """What fetch(), a download of huggingface_hub's, returns. InputError says that `name` is not there."""
    try:
        return Path(fetch())
    except Exception as e: # a dozen kinds: no such name, no network, no login, ...
        remedy = offline_hint() + near_id(name)
        raise InputError(f"{name}: not here, and the hub does not give it; {remedy}check the name and "
                         f"the network, or log in: hf auth login ({type(e).__name__}: {first_words(e)})")

def is_tiny(model):
    """Whether this is tiny/ or a model of its size: a copy, a merged one."""
    config = Path(model, "transformer/config.json")
    if model == "tiny" or not config.is_file():
        return model == "tiny"
    with open(config, errors="replace", encoding="utf-8") as f:
        return TINY_WIDTH in f.read(2**16) # a stranger's file may have a gigabyte

MODELS = "tiny Qwen/Qwen-Image-Edit Qwen/Qwen-Image-Edit-2509 Qwen/Qwen-Image-Edit-2511".split()

def near_id(name):
    """-> what a line adds about a hub's id, the last word of `name`, that is like one of MODELS."""
    model = name.split()[-1]
    near = closest(model, dict(zip(MODELS, MODELS)), 0.9)
    return f"give {near}, " if near not in (None, model) else ""

def offline_hint():
    """-> what a line adds about the hub if the environment forbids it."""
    found = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name, "0") not in ("", "0")]
    return f"unset {' '.join(found)}, " if found else ""
