"""
--resume: what only a run that goes on needs. It finds the newest intact checkpoint, refuses other settings, and puts
LoRA and optimizer back, bit for bit on a CPU. Without this file checkpoints hold the LoRA alone.

An optimizer may keep state anywhere: for each parameter, in its param group (Prodigy), or as its own attributes, and
not only tensors and numbers (SOAP has lists of tensors). All of it goes into optimizer.safetensors, as tensors and
JSON; never as pickles, which run code when they are loaded. extras/probe.py tries before the first step whether all of
it comes back.
"""
import contextlib
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pydoc import locate

import torch

import predict
from common import (LORA_FILE, SAMPLING, InputError, checkpoints, command, is_index, load_extra, number_of,
                    read_tensors, say, write_tensors)

OPTIMIZER_FILE = "optimizer.safetensors"
# All flags are compared with the checkpoint's but these. A flag that you add is compared, unless you name it here. (The
# code is not compared.)
BY_CONTENT = ( # compared as hashes of what they lead to, which train.py adds when it knows them
    "pretrained_lora model transformer data repeats mask skip_bad target_pixels control_pixels upscale cache_dir "
    "use_cache max_sequence_length").split()
MAY_CHANGE = ( # what is written, when and where; then what changes speed and memory
    "val_data val_pictures sample_every save_every keep out_dir tracker plan resume sample_lora "
    "device vae_device text_encoder_device flash_attention max_tokens gradient_checkpointing offload fsdp compile"
).split() + list(SAMPLING)
LEFT_OUT = "--resume --out_dir --lora_rank --lora_alpha --lora_targets --lora_args --pretrained_lora".split()


@dataclass
class Checkpoint:
    lora: dict # {diffusers' name: tensor}
    tensors: dict # the optimizer's: {"exp_avg.PARAMETER": tensor}
    info: dict # step, config, and `optimizer`: all else of its state, as save_optimizer writes it


def read_checkpoint(path):
    """-> Checkpoint. InputError if a bit of it has changed: read_tensors compares the digest that each file carries."""
    lora, meta = read_tensors(path / LORA_FILE, "lora_adapter_metadata")
    tensors, info = read_tensors(path / OPTIMIZER_FILE)
    # both files must be of the step in the folder's name
    if "optimizer" not in info or not meta.get("train.step") == info.get("step") == number_of(path):
        raise InputError(f"{path}: its files do not belong together; it is damaged, or of an older train.py")
    return Checkpoint(lora, tensors, info)


def find_checkpoint(out_dir):
    """-> the newest intact Checkpoint, or None for a run that begins. A damaged one costs a warning and the steps since
    the one before it, so that a flipped bit does not cost a night's run."""
    saved = checkpoints(out_dir)
    for path in reversed(saved):
        try:
            return read_checkpoint(path)
        except InputError as e:
            say(f"warning: {path} is damaged; trying the checkpoint before it ({e})")
    # a run that was killed before its first checkpoint begins again
    if not saved and (out_dir / "log.jsonl").exists() and not (out_dir / LORA_FILE).exists():
        return None
    raise InputError(f"--resume: no intact checkpoint in {out_dir}; give the right --out_dir, or begin a new run in "
                     "another, without --resume")


def compared(args):
    """-> what a checkpoint says of its run's flags, for refuse_changes: {flag: value}."""
    config = {name: value for name, value in vars(args).items() if name not in BY_CONTENT + MAY_CHANGE}
    if args.lr_scheduler == "constant": # only the other schedules depend on max_steps
        del config["max_steps"]
    return config


def refuse_changes(out_dir, old, config, parser):
    """InputError names what differs between a checkpoint's config and ours. If a flag is newer than the checkpoint, it
    had its default there."""
    if "data_hash" not in old:
        raise InputError(f"--resume: {out_dir} was begun by an older version of train.py; continue it with that one, "
                         "or start a new run from its LoRA with --pretrained_lora")
    changes = {}
    for name, value in json.loads(json.dumps(config)).items(): # as the checkpoint's JSON has it: tuples are lists there
        before = old.get(name, parser.get_default(name))
        if name == "max_steps" and name not in old: # the rate was constant, and then it is not compared
            continue
        if before != value:
            changes[name] = f"{name}: {before} -> {value}"
    if changes.keys() == {"max_steps"}:
        raise InputError(f"--resume: {out_dir} was begun with --max_steps {old['max_steps']}, where the learning rate "
                         f"of --lr_scheduler {config['lr_scheduler']} ends; give that to go on until there; to train "
                         f"beyond, start a new run from its LoRA: {from_its_lora(out_dir)}")
    if changes:
        raise InputError(f"--resume: {out_dir} was begun with other settings ({'; '.join(changes.values())}); give the "
                         "old ones, or start a new run")


def sizes(args):
    """What the flags say of the config's sizes, before anything is encoded. {} of an index, which has its own."""
    if any(map(is_index, args.data)):
        return {}
    return dict(geometry=dict(target_pixels=args.target_pixels[0], control_pixels=args.control_pixels,
                              upscale=args.upscale))


def from_its_lora(out_dir):
    """-> this process's command, as one that starts a new run from that LoRA, which has its own rank and layers."""
    words, left_out = [], False
    for word in sys.argv[1:]:
        if word.startswith("--"):
            left_out = word.split("=")[0] in LEFT_OUT
        words += [] if left_out else [word]
    return command(["python", sys.argv[0], *words, "--pretrained_lora", str(out_dir)])


def clean_folder(out_dir, step):
    """Removes what an earlier process has left: half-written files, and what marks a run as finished. The checkpoints
    after this step, which are damaged, get another name: they must not count for --keep -> the lines of the log that
    stay: the first, and those up to the checkpoint, because later steps run again, and a kill may have left half a
    line."""
    for path in out_dir.glob(".tmp-*"): # train.py holds the lock, so these belong to a dead process
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for path in checkpoints(out_dir):
        if number_of(path) > step:
            path.rename(f"{path}.damaged-{time.time_ns()}")
    for name in ("DONE", LORA_FILE):
        (out_dir / name).unlink(missing_ok=True)
    log = out_dir / "log.jsonl"
    lines = log.read_text(errors="replace").splitlines() if step and log.exists() else []
    kept = lines[:1]
    for line in lines[1:]:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    return kept

# ---- the optimizer's state -------------------------------------------------------------------------------------------


def places_of(optimizer, lora):
    """{a parameter's name, "group" or "self": the dictionary in which the optimizer keeps state}."""
    states = {name: optimizer.state[p] for name, p in lora.items()}
    return states | {"group": optimizer.param_groups[0], "self": vars(optimizer)}


def save_optimizer(folder, optimizer, lora, **info):
    """Writes all that the optimizer keeps into a checkpoint's folder. lora: {name: parameter}; info: step and config.
    To be called within train.py's averaged_weights. InputError names state that cannot be saved."""
    tensors, state = {}, []
    for place, values in places_of(optimizer, lora).items():
        for key, value in values.items():
            try:
                state.append((place, key, to_json(value, f"{key}.{place}", tensors)))
            except TypeError as e: # beside parameters' states there are objects, which are made with the optimizer
                if place in lora:
                    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
                    raise InputError(f"--optimizer {kind}: a checkpoint cannot keep {e} in its {key}; take another, "
                                     "such as torch.optim.AdamW")
    write_tensors(folder / OPTIMIZER_FILE, tensors, dict(info, optimizer=state))


def load_optimizer(optimizer, lora, tensors, state):
    """Puts back what save_optimizer has written: its tensors, and the entry `optimizer`."""
    places = places_of(optimizer, lora)
    device = next(iter(lora.values())).device
    for place, key, value in state:
        places[place][key] = from_json(value, tensors, device)
    if hasattr(optimizer, "eval"): # a schedule-free one
        load_extra("schedule_free").use_trained_weights(optimizer)


def load_checkpoint(checkpoint, out_dir, transformer, lora, optimizer):
    """Puts LoRA and optimizer back, bit for bit."""
    predict.load_weights(transformer, checkpoint.lora, out_dir)
    load_optimizer(optimizer, lora, checkpoint.tensors, checkpoint.info["optimizer"])


def to_json(value, path, tensors):
    """A value as JSON, which from_json reads; its tensors are added to `tensors`. TypeError if it has other parts."""
    if torch.is_tensor(value) and not isinstance(value, torch.nn.Parameter): # (extras/probe.py compares the types)
        tensors[path] = value
        return {"tensor": [path, value.is_cpu and not value.dim()]} # torch wants its counters on the CPU
    if type(value) in (list, tuple, dict):
        parts = value.items() if type(value) is dict else value
        return {type(value).__name__: [to_json(part, f"{path}.{n}", tensors) for n, part in enumerate(parts)]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(type(value).__name__)


def from_json(value, tensors, device):
    """The value that to_json was given, its tensors on the device."""
    if type(value) is not dict:
        return value
    (kind, parts), = value.items()
    if kind == "tensor":
        path, on_cpu = parts
        return tensors[path].to("cpu" if on_cpu else device)
    made = [from_json(part, tensors, device) for part in parts]
    return locate(kind)(made) # list, tuple or dict
