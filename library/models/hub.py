"""What --model may be: tiny, a folder, or an id of the hub."""
import os
from pathlib import Path

from common import InputError, first_words

TINY_DATA = Path(__file__).parents[2] / "tiny/data"
TINY_WIDTH = '"joint_attention_dim": 64,' # in the config.json of tiny's transformer; the real model has 3584

# what --model tiny sets, for each script, unless the command line says otherwise: it is small, and so are its pictures
TINY_SIZES = "--target_pixels native --control_pixels native"
TINY_SAMPLING = "--true_cfg_scale 1 --num_inference_steps 8 --shift 5"
TINY_DEFAULTS = {
    "cache.py": f"--data tiny/data --val_data tiny/val tiny/known {TINY_SIZES}",
    "train.py": f"--data tiny/data --val_data tiny/val tiny/known {TINY_SIZES} {TINY_SAMPLING} --max_steps 500 "
                "--sample_every 100 --val_pictures 32 --batch_size 8 --max_tokens 4096 --gradient_checkpointing 0 "
                "--optimizer torch.optim.Muon --optimizer_args adjust_lr_fn=match_rms_adamw ns_steps=3 --lr 0.005 "
                "--lr_scheduler cosine --warmup_steps 10 --lora_targets to_q to_k to_v to_out.0 add_q_proj add_k_proj "
                "add_v_proj net.0.proj net.2 proj_out img_in",
    "predict.py": TINY_SAMPLING}

def from_hub(name, fetch):
    """What fetch(), a download of huggingface_hub's, returns. InputError says that `name` is not there."""
    try:
        return Path(fetch())
    except Exception as e: # a dozen kinds: no such name, no network, no login, ...
        raise InputError(f"{name}: not here, and the hub does not give it; {offline_hint()}check the name and "
                         f"the network, or log in: hf auth login ({type(e).__name__}: {first_words(e)})")

def is_tiny(model):
    """Whether this is tiny/ or a model of its size: a copy, a merged one."""
    config = Path(model, "transformer/config.json")
    if model == "tiny" or not config.is_file():
        return model == "tiny"
    with open(config, errors="replace", encoding="utf-8") as f:
        return TINY_WIDTH in f.read(2**16) # a stranger's file may have a gigabyte

MODELS = "tiny Qwen/Qwen-Image-Edit Qwen/Qwen-Image-Edit-2509 Qwen/Qwen-Image-Edit-2511".split()

def offline_hint():
    """-> what a line adds about the hub if the environment forbids it."""
    found = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name, "0") not in ("", "0")]
    return f"unset {' '.join(found)}, " if found else ""
