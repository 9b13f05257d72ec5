"""
--resume: what only a run that goes on needs. It finds the newest intact checkpoint, refuses other settings, and puts
LoRA and optimizer back, bit for bit on a CPU.

An optimizer's state is its state_dict(), as torch's contract has it: what an optimizer keeps elsewhere is lost, which
training/preflight.py notices before the first step. The state goes into optimizer.safetensors as tensors and JSON,
never as a pickle, which runs code when it is loaded.

A checkpoint may come from a stranger. We read tensors and plain JSON values from it, and hand these to
load_state_dict(), so they reach the optimizer's two dictionaries (param_groups and state) and nothing else.
"""
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from common import InputError, first_words, say, shell_command
from library.files.tensor_files import OtherVersion, read_header, read_tensors, write_tensors
from library.lora import lora_file
from library.lora.lora_paths import LORA_FILE, checkpoints, number_of
from training import optimizers

OPTIMIZER_FILE = "optimizer.safetensors"
# All flags are compared with the checkpoint's but those of MAY_CHANGE. A flag that you add is compared, unless you name
# it there. (The code is not compared.)
BY_CONTENT = ( # compared as hashes of what they lead to, which train.py adds when it knows them
    "pretrained_lora model transformer data repeats mask skip_bad target_pixels control_pixels upscale cache_dir "
    "use_cache max_sequence_length").split()
MAY_CHANGE = ( # what is written, when and where; then what changes speed and memory
    "val_data val_pictures sample_every save_every keep out_dir tracker plan resume sample_lora "
    "device vae_device text_encoder_device flash_attention max_tokens gradient_checkpointing offload fsdp compile "
    "negative_prompt num_inference_steps true_cfg_scale cfg_norm shift").split() # from negative_prompt on: of
    # validations' pictures
CONTENTS = dict(data_hash="--data", model_hash="the transformer", scheduler_hash="--model's scheduler",
                pretrained_hash="--pretrained_lora") # of these a checkpoint has hashes, which tell a person nothing
LEFT_OUT = "--resume --out_dir --lora_rank --lora_alpha --lora_targets --lora_args --pretrained_lora".split()

@dataclass
class Checkpoint:
    path: Path # its folder
    lora: dict # {diffusers' name: tensor}, as it was trained
    tensors: dict # the optimizer's: {"exp_avg.PARAMETER": tensor}
    info: dict # step, config, and `optimizer`: the rest of its state, as save_optimizer writes it

def read_checkpoint(path, optimizer=""):
    """-> Checkpoint. InputError if a bit of it has changed: read_tensors compares the digest that each file carries; or
    if a file is longer than it can be. OtherVersion for one of another version. optimizer: --optimizer, if it is
    known."""
    refuse_long_lora(path / LORA_FILE)
    lora, meta = read_tensors(path / LORA_FILE, "lora_adapter_metadata")
    refuse_long_state(path / OPTIMIZER_FILE, lora, optimizer)
    tensors, info = read_optimizer(path)
    lora |= {name: tensors.pop(f"trained.{name}") for name in lora if f"trained.{name}" in tensors}
    # both files must be of the step in the folder's name
    if not meta.get("train.step") == info.get("step") == number_of(path):
        raise InputError(f"{path}: its files do not belong together; it is damaged")
    for name, kind in dict(step=int, config=dict).items():
        if type(info.get(name)) is not kind:
            raise InputError(f"{path / OPTIMIZER_FILE}: its {name} is no {kind.__name__}; take another copy")
    if not 1 <= info["step"] <= 10**9:
        raise InputError(f"{path}: no run has so many steps; take another copy")
    return Checkpoint(path, lora, tensors, info)

def refuse_long_lora(file):
    """InputError for a LoRA with larger matrices than a layer has, by its header. (A file with holes takes no place on
    the disk, and whatever its header says in the memory.)"""
    if file.is_file():
        try:
            with open(file, "rb") as f:
                lora_file.refuse_header(read_header(f))
        except Exception as e: # a damaged file can fail in any way
            raise InputError(f"{file}: is no LoRA ({first_words(e)}); take another copy")

def refuse_long_state(file, lora, optimizer):
    """InputError for more bytes than an optimizer can keep for this LoRA. In fp32 torch's keep at most three moments of
    a matrix, and --ema its average and its trained weights; SOAP and Shampoo a few squares of its longer side, too. And
    there may be lora_B as it was trained."""
    if optimizer.startswith("torch.optim."):
        numbers = sum(6 * tensor.numel() for tensor in lora.values())
    else:
        numbers = sum(8 * max(tensor.shape, default=1)**2 for tensor in lora.values())
    most = 4 * numbers + 2**26 # the names, settings and counters
    if file.is_file() and file.stat().st_size > most:
        raise InputError(f"{file}: over {most:,} bytes, which no optimizer keeps for this LoRA; take another copy")

def find_checkpoint(out_dir, args):
    """-> the newest intact Checkpoint, or None for a run that begins. A damaged one costs a warning and the steps since
    the one before it, so that a flipped bit does not cost a night's run. args: the flags."""
    saved = checkpoints(out_dir)
    for path in reversed(saved):
        try:
            return read_checkpoint(path, args.optimizer)
        except OtherVersion as e: # the other checkpoints are of that version, too
            line = str(e).removeprefix("error: ").split("; ")[0]
            new_run = ""
            if "newer" not in line.replace(str(path), ""): # a LoRA of an earlier version can be read
                new_run = f", or start a new run from its LoRA: {from_its_lora(path)}"
            raise InputError(f"--resume: {line}; continue with that version{new_run}")
        except InputError as e:
            say(f"warning: {path} is damaged; trying the checkpoint before it ({first_words(e)})")
    if not saved and not (out_dir / LORA_FILE).exists(): # it was killed before its first checkpoint, and begins again
        return None
    raise InputError(f"--resume: no intact checkpoint in {out_dir}; give the right --out_dir, or begin a new run in "
                     "another, without --resume")

def begin(out_dir, args, pretrained_hash, parser):
    """-> find_checkpoint's, and its step. InputError if the flags of this command cannot continue it, as far as they
    tell before the data is known. Ends the script with a line if the run is done."""
    checkpoint, step = find_checkpoint(out_dir, args), 0
    if checkpoint:
        config = compared_settings(args, pretrained_hash=pretrained_hash, **sizes(args))
        refuse_changes(out_dir, checkpoint.info["config"], config, parser, args.data)
        step = checkpoint.info["step"]
    if step >= args.max_steps and (out_dir / "DONE").exists():
        say(f"{out_dir}: already done after {step} steps; a larger --max_steps continues it (constant learning rate "
            "only)")
        sys.exit(0)
    if step > args.max_steps:
        raise InputError(f"--max_steps {args.max_steps}: {out_dir} is at step {step} already; give {step} to finish it "
                         "there, or more")
    return checkpoint, step

def compared_settings(args, **contents):
    """-> what a checkpoint says of its run, for refuse_changes: {flag: value}, and contents: what stands for the flags
    of BY_CONTENT, as far as it is known."""
    config = {name: value for name, value in vars(args).items() if name not in BY_CONTENT + MAY_CHANGE}
    if args.lr_scheduler == "constant": # only the other schedules depend on max_steps
        del config["max_steps"]
    return config | contents

def refuse_changes(out_dir, old, config, parser, data=()):
    """InputError names what differs between a checkpoint's config and ours. If a flag is newer than the checkpoint, it
    had its default there. data: --data, as of the samples the config has only a hash."""
    changes = {}
    for name, value in json.loads(json.dumps(config)).items(): # as the checkpoint's JSON has it: tuples are lists there
        before = old.get(name, parser.get_default(name))
        if name == "max_steps" and name not in old: # the rate was constant, and then it is not compared
            continue
        if before != value:
            changes[name] = f"{name}: {in_short(before)} -> {in_short(value)}"
    for name in CONTENTS.keys() & changes.keys():
        changes[name] = f"{name}: {CONTENTS[name]} has another content"
    if changes.keys() == {"max_steps"}:
        raise InputError(f"--resume: {out_dir} was begun with --max_steps {old['max_steps']}, where the learning rate "
                         f"of --lr_scheduler {config['lr_scheduler']} ends; give that to go on until there; to train "
                         f"beyond, start a new run from its LoRA: {from_its_lora(out_dir)}")
    if changes.keys() == {"data_hash"}:
        raise InputError(f"--resume: {out_dir} was begun with other samples (data_hash: names, pictures, prompts or "
                         f"encoders of --data {' '.join(map(str, data))} have changed); give the old ones, or start a "
                         f"new run on these from its LoRA: {from_its_lora(out_dir)}")
    if changes:
        raise InputError(f"--resume: {out_dir} was begun with other settings ({'; '.join(changes.values())}); give the "
                         "old ones, or start a new run")

def in_short(value):
    """A setting in an error line. A checkpoint's may be anything."""
    try:
        return f"{value!s:.200}"
    except RecursionError: # lists in lists
        return f"a {type(value).__name__}"

def sizes(args):
    """What the flags say of the config's sizes, before anything is encoded. {} of an index, which has its own."""
    if any(Path(root).suffix == ".json" for root in args.data):
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
    return shell_command(["python", sys.argv[0], *words, "--pretrained_lora", str(out_dir)])

# ---- LoRA and optimizer of a checkpoint ------------------------------------------------------------------------------

def as_trained(transformer, lora):
    """-> {name in a LoRA's file: parameter} of those that the file of a checkpoint, which is for use, has with another
    scale. lora: {name: parameter}."""
    parameters, scales = names_in_file(lora), lora_file.scales_of(transformer)
    scaled = [f"transformer.{layer}.lora_B.weight" for layer, scale in scales.items() if scale != 1]
    return {name: parameters[name] for name in scaled}

def save_optimizer(folder, optimizer, lora, trained={}, **info):
    """Writes an optimizer's state_dict() into a checkpoint's folder, its tensors as EXP_AVG.PARAMETER, and beside them
    as_trained's. lora: {name: parameter}; info: step, config and date. To be called within averaged_weights. InputError
    for state that is neither a tensor nor JSON."""
    tensors, state = lora_file.with_prefix("trained", trained), optimizer.state_dict()
    names = names_of(optimizer, lora)
    try:
        # by name, and not by number, as another version of diffusers may have another order of layers
        saved = {names[n]: to_json(values, names[n], tensors) for n, values in state["state"].items()}
        groups = to_json(state["param_groups"], "group", tensors)
    except (TypeError, KeyError) as e: # a KeyError: state of no parameter
        raise InputError(f"--optimizer {type(optimizer).__module__}.{type(optimizer).__name__}: a checkpoint cannot "
                         f"keep {e} of its state; take another, such as torch.optim.AdamW")
    write_tensors(folder / OPTIMIZER_FILE, tensors, dict(info, optimizer=dict(state=saved, param_groups=groups)))

def read_optimizer(folder):
    """-> what save_optimizer has written: (tensors, {step, config, optimizer})."""
    tensors, info = read_tensors(folder / OPTIMIZER_FILE)
    if type(info.get("optimizer")) is not dict: # until 28 November 2026 it was a list
        raise OtherVersion(f"{folder / OPTIMIZER_FILE}: was written by an earlier version of this project; start a new "
                           f"run from its LoRA: --pretrained_lora {folder}")
    return tensors, info

def load_optimizer(optimizer, lora, tensors, saved):
    """Puts back what read_optimizer returns: its tensors, and the entry `optimizer`. Raises anything for a state that
    is not this optimizer's."""
    device = next(iter(lora.values())).device
    unread = dict(tensors)
    state = {name: dict(from_json(values, unread, device)) for name, values in saved["state"].items()}
    groups = from_json(saved["param_groups"], unread, device)
    if unread:
        raise ValueError(f"{len(unread)} tensors too many, for instance {min(unread):.100}")
    number_of_name = {name: n for n, name in names_of(optimizer, lora).items()}
    by_number = {number_of_name[name]: values for name, values in state.items()}
    optimizer.load_state_dict(dict(state=by_number, param_groups=groups))
    # It has made fp32 of all tensors. One that was kept in bf16 would round otherwise from now on
    for name, values in state.items():
        loaded = optimizer.state[lora[name]]
        for key, value in values.items():
            if torch.is_tensor(value) and torch.is_tensor(loaded.get(key)) and loaded[key].dtype != value.dtype:
                loaded[key] = value
    optimizers.use_trained_weights(optimizer)

def names_of(optimizer, lora):
    """-> {number: name} of an optimizer's parameters, which its state_dict() numbers group by group."""
    names = {p: name for name, p in lora.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {n: names[p] for n, p in enumerate(parameters)}

def to_json(value, path, tensors):
    """A value as JSON, which from_json reads. Its tensors are added to `tensors`, with names that end in `path`.
    TypeError if it has other parts."""
    if torch.is_tensor(value):
        while path in tensors: # two keys may be the same text
            path += "'"
        tensors[path] = value
        # torch wants its counters on the CPU. The layout (SOAP has matrices column by column) decides how a product
        # is summed, and so its last bits; a file has rows
        layout = [] if value.is_contiguous() else torch.empty_like(value, device="meta").stride()
        return {"tensor": [path, value.is_cpu and not value.dim(), *layout]}
    if type(value) is dict: # JSON itself would make texts of all keys
        return {"dict": [[to_json(key, path, tensors), to_json(part, f"{key}.{path}", tensors)]
                         for key, part in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [to_json(part, f"{n}.{path}", tensors) for n, part in enumerate(value)]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(type(value).__name__)

KINDS = dict(list=list, tuple=tuple, dict=dict) # no other name that a file has is looked up

def from_json(value, tensors, device):
    """The value that to_json was given, with copies of its tensors on the device; each is taken out of `tensors`.
    Raises anything for what to_json has not made."""
    if type(value) is list: # a key and its value
        return [from_json(part, tensors, device) for part in value]
    if type(value) is not dict:
        return value
    (kind, parts), = value.items()
    if kind == "tensor":
        path, on_cpu, *layout = parts
        tensor, device = tensors.pop(path), "cpu" if on_cpu else device
        return tensor.new_empty_strided(tensor.shape, layout or tensor.stride(), device=device).copy_(tensor)
    return KINDS[kind](from_json(parts, tensors, device))

def load_checkpoint(checkpoint, lora, optimizer, make_optimizer):
    """Puts LoRA and optimizer back, bit for bit. InputError for what another LoRA or optimizer has saved: a second
    optimizer tries the first step. make_optimizer: train.py's."""
    refuse_lora(checkpoint, lora)
    state = checkpoint.tensors, checkpoint.info["optimizer"]
    load_lora(checkpoint, lora)
    try:
        with optimizers.trial():
            second = make_optimizer(lora.values())
            load_optimizer(second, lora, *state)
            with_state = sum(map(bool, second.state.values()))
            take_steps(second, lora, [0], second.param_groups[0]["lr"])
            if sum(map(bool, second.state.values())) > with_state:
                raise ValueError("it lacks the state of some parameters")
            if not all(p.isfinite().all() for p in lora.values()):
                raise ValueError("its next step would ruin the LoRA")
    except Exception as e: # it may be anything
        raise InputError(f"{checkpoint.path / OPTIMIZER_FILE}: is not what {type(optimizer).__name__} keeps "
                         f"({type(e).__name__}: {first_words(e)}); take another copy, or start a new run from its "
                         f"LoRA: {from_its_lora(checkpoint.path)}")
    load_lora(checkpoint, lora) # which the trial has changed
    load_optimizer(optimizer, lora, *state)

def names_in_file(lora):
    """{a parameter's name in a LoRA's file: the parameter}."""
    return {f"transformer.{name.replace('.default.', '.')}": p for name, p in lora.items()}

def refuse_lora(checkpoint, lora):
    """InputError unless a checkpoint's LoRA has just the tensors that are trained, finite ones."""
    parameters = names_in_file(lora)
    wrong = sorted(parameters.keys() ^ checkpoint.lora.keys())
    for name in parameters.keys() & checkpoint.lora.keys():
        tensor, p = checkpoint.lora[name], parameters[name]
        if (tensor.shape, tensor.dtype) != (p.shape, p.dtype) or not tensor.isfinite().all():
            wrong.append(name)
    if wrong:
        raise InputError(f"{checkpoint.path / LORA_FILE}: {len(wrong)} of its tensors are not those of this LoRA, for "
                         f"instance {wrong[0]:.200}; give the run's own flags, or another copy")

def load_lora(checkpoint, lora):
    """Fills the parameters with a checkpoint's LoRA, which refuse_lora has looked at."""
    for name, p in names_in_file(lora).items():
        p.data.copy_(checkpoint.lora[name])

def take_steps(optimizer, parameters, steps, lr):
    """Takes the steps of these numbers at the rate `lr`, as train.py's loop does. parameters: {name: parameter}. The
    gradients are as small as a real LoRA's, whose norm is 0.3 over 47 million numbers: a half that is the same in all
    steps, and a random one, which depends on the number alone."""
    for n in steps:
        generator = torch.Generator().manual_seed(n)
        for p in parameters.values():
            p.grad = 4e-5 * (1 + torch.randn(p.shape, generator=generator)).to(p.device)
        for group in optimizer.param_groups:
            group["lr"] = lr
        torch.manual_seed(n)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
