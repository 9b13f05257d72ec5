"""
--resume: what only a run that goes on needs. It finds the newest intact checkpoint, refuses other settings, and puts
LoRA and optimizer back, bit for bit on a CPU.

An optimizer may keep state anywhere: for each parameter, in its param group (Prodigy), or as its own attributes, and
not only tensors and numbers (SOAP has lists of tensors). All of it goes into optimizer.safetensors, as tensors and
JSON; never as pickles, which run code when they are loaded. training/preflight.py tries before the first step whether all of
it comes back.

A checkpoint may come from a stranger. What its files say is data: it names no code, and goes only to places where the
optimizer itself has put such data.
"""
import contextlib
import io
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import predict
from common import InputError, first_words, say, shell_command
from library.cli.flag_types import SAMPLING, is_index
from library.files.disk import delete
from library.files.stray_files import listed
from library.files.tensor_files import OtherVersion, read_header, read_tensors, write_tensors
from library.lora import lora_file
from library.lora.lora_paths import LORA_FILE, checkpoints, number_of, numbered
from library.models import environment
from training import best_step, optimizers
from training.run_folder import remove_old

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
CONTENTS = dict(data_hash="--data", model_hash="the transformer", scheduler_hash="--model's scheduler",
                pretrained_hash="--pretrained_lora") # of these a checkpoint has hashes, which tell a person nothing
LEFT_OUT = "--resume --out_dir --lora_rank --lora_alpha --lora_targets --lora_args --pretrained_lora".split()


@dataclass
class Checkpoint:
    path: Path # its folder
    lora: dict # {diffusers' name: tensor}
    tensors: dict # the optimizer's: {"exp_avg.PARAMETER": tensor}
    info: dict # step, config, and `optimizer`: all else of its state, as save_optimizer writes it


def read_checkpoint(path, optimizer=""):
    """-> Checkpoint. InputError if a bit of it has changed: read_tensors compares the digest that each file carries; or
    if a file is longer than it can be. OtherVersion for one of another version. optimizer: --optimizer, if it is
    known."""
    refuse_long_lora(path / LORA_FILE)
    lora, meta = read_tensors(path / LORA_FILE, "lora_adapter_metadata")
    refuse_long_state(path / OPTIMIZER_FILE, lora, optimizer)
    tensors, info = read_tensors(path / OPTIMIZER_FILE)
    if "optimizer" not in info: # until 25 November 2026 it had other entries
        raise OtherVersion(f"{path / OPTIMIZER_FILE}: was written by an older version of this project; use that one")
    # both files must be of the step in the folder's name
    if not meta.get("train.step") == info.get("step") == number_of(path):
        raise InputError(f"{path}: its files do not belong together; it is damaged")
    for name, kind in dict(step=int, config=dict, optimizer=list).items():
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
    a matrix, and --ema its average and its trained weights; SOAP and Shampoo a few squares of its longer side, too."""
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
            line, also = str(e).removeprefix("error: ").split("; ")[0], ""
            if "an older version" in line: # whose LoRA can be read
                also = f", or start a new run from its LoRA: {from_its_lora(path)}"
            raise InputError(f"--resume: {line}; continue with that version{also}")
        except InputError as e:
            say(f"warning: {path} is damaged; trying the checkpoint before it ({first_words(e)})")
    # a run that was killed before its first checkpoint begins again; one killed before its log has left hidden names
    log, lora = [(out_dir / name).exists() for name in ("log.jsonl", LORA_FILE)]
    if not saved and (log and not lora or not listed(out_dir, "*")):
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
    if "data_hash" not in old:
        raise InputError(f"--resume: {out_dir} was begun by an older version of train.py; continue it with that one, "
                         "or start a new run from its LoRA with --pretrained_lora")
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
        raise InputError(f"--resume: {out_dir} was begun with other samples (data_hash: pictures, prompts or encoders "
                         f"of --data {' '.join(map(str, data))} have changed); give the old ones, or start a new run "
                         f"on these from its LoRA: {from_its_lora(out_dir)}")
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
    return shell_command(["python", sys.argv[0], *words, "--pretrained_lora", str(out_dir)])


def clean_folder(out_dir, step):
    """Removes what an earlier process has left: half-written files and checkpoints, and what marks a run as finished.
    The checkpoints after this step, which are damaged, get another name: they must not count for --keep -> the lines of
    the log that stay: the first, and those up to the checkpoint, because later steps run again, and a kill may have
    left half a line."""
    for path in out_dir.glob(".tmp-*"): # train.py holds the lock, so these belong to a dead process
        remove_old(path)
    damaged = checkpoints(out_dir)
    for path in numbered(out_dir, "checkpoint"):
        if number_of(path) > step and path in damaged:
            put_aside(path)
        elif number_of(path) > step:
            remove_old(path)
    for name in ("DONE", LORA_FILE):
        delete(out_dir / name, "is of a finished run", "close what has it open, or delete it; then run again")
    log = out_dir / "log.jsonl"
    lines = log.read_text("utf-8", "replace").splitlines() if step and log.exists() else []
    first = [line for line in lines[:1] if '"val_loss"' not in line] # which the lines of validations alone have
    return first + [line for line in lines[1:] if is_record(line, step)]


def continue_log(out_dir, step, around):
    """Says that the run continues, and what is no longer as it was around it -> clean_folder's lines."""
    say(f"{out_dir}: continues after step {step}")
    kept = clean_folder(out_dir, step)
    say(*environment.environment_changes("".join(kept[:1]), around))
    return kept


def put_aside(folder):
    """Moves the files of a damaged checkpoint to another folder, for a person, the LoRA first: without it this is no
    checkpoint. (Not every disk can rename the folder.)"""
    aside = folder.with_name(f"{folder.name}.damaged-{time.time_ns()}")
    try:
        aside.mkdir()
        for file in sorted(folder.iterdir(), key=lambda file: file.name != LORA_FILE):
            os.replace(file, aside / file.name)
    except OSError as e:
        raise InputError(f"{folder}: is damaged, and cannot be moved aside ({e.strerror}); delete it")
    remove_old(folder)


def is_record(line, step):
    """Whether a line of the log is whole, and of a step up to this one; a validation's, if training/best_step.py reads it."""
    with contextlib.suppress(Exception): # a foreign log can fail in any way
        record = best_step.read_line(line)
        if "val_loss" in record:
            best_step.check_validation(record)
        return best_step.is_count(record["step"], step)
    return False

# ---- the optimizer's state -------------------------------------------------------------------------------------------


def places_of(optimizer, lora):
    """{a parameter's name, "group" or "self": the dictionary in which the optimizer keeps state}."""
    states = {name: optimizer.state[p] for name, p in lora.items()}
    return states | {"group": optimizer.param_groups[0], "self": vars(optimizer)}


def state_of(optimizer, lora):
    """-> (tensors, [(place, key, value as to_json makes it)]) of all that an optimizer keeps. InputError names state of
    a parameter that cannot be saved; beside it there are objects, which are made with the optimizer."""
    tensors, state = {}, []
    for place, values in places_of(optimizer, lora).items():
        for key, value in values.items():
            try:
                state.append((place, key, to_json(value, f"{key}.{place}", tensors)))
            except TypeError as e:
                if place in lora:
                    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
                    raise InputError(f"--optimizer {kind}: a checkpoint cannot keep {e} in its {key}; take another, "
                                     "such as torch.optim.AdamW")
    return tensors, state


def save_optimizer(folder, optimizer, lora, **info):
    """Writes all that the optimizer keeps into a checkpoint's folder. lora: {name: parameter}; info: step and config.
    To be called within averaged_weights. InputErrors are state_of's."""
    tensors, state = state_of(optimizer, lora)
    write_tensors(folder / OPTIMIZER_FILE, tensors, dict(info, optimizer=state))


def load_optimizer(optimizer, lora, tensors, state):
    """Puts back what save_optimizer has written: its tensors, and the entry `optimizer`."""
    places = places_of(optimizer, lora)
    device = next(iter(lora.values())).device
    for place, key, value in state:
        places[place][key] = from_json(value, tensors, device)
    optimizers.use_trained_weights(optimizer)


def load_checkpoint(checkpoint, transformer, lora, optimizer, make_optimizer):
    """Puts LoRA and optimizer back, bit for bit. InputError, before the optimizer has changed, for what another LoRA or
    optimizer has saved. make_optimizer: train.py's."""
    refuse_lora(checkpoint, lora)
    predict.load_weights(transformer, checkpoint.lora, checkpoint.path)
    tensors, state = checkpoint.tensors, checkpoint.info["optimizer"]
    try:
        with trial():
            refuse_state(lora, tensors, state, references_of(lora, checkpoint.info["step"], make_optimizer))
            try_state(lora, tensors, state, make_optimizer)
    except Exception as e: # it may be anything
        raise InputError(f"{checkpoint.path / OPTIMIZER_FILE}: is not what {type(optimizer).__name__} keeps "
                         f"({type(e).__name__}: {first_words(e)}); take another copy, or start a new run from its "
                         f"LoRA: {from_its_lora(checkpoint.path)}")
    load_optimizer(optimizer, lora, tensors, state)


def to_json(value, path, tensors):
    """A value as JSON, which from_json reads; its tensors are added to `tensors`. TypeError if it has other parts."""
    if torch.is_tensor(value) and not isinstance(value, torch.nn.Parameter): # (training/preflight.py compares the types)
        tensors[path] = value
        return {"tensor": [path, value.is_cpu and not value.dim()]} # torch wants its counters on the CPU
    if type(value) in KINDS.values():
        parts = value.items() if type(value) is dict else value
        return {type(value).__name__: [to_json(part, f"{path}.{n}", tensors) for n, part in enumerate(parts)]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(type(value).__name__)


KINDS = dict(list=list, tuple=tuple, dict=dict) # no other name that a file has is looked up


def from_json(value, tensors, device):
    """The value that to_json was given, its tensors on the device. Raises anything for what to_json has not made."""
    if type(value) is not dict:
        return value
    (kind, parts), = value.items()
    if kind == "tensor":
        path, on_cpu = parts
        return tensors[path].to("cpu" if on_cpu else device, copy=True)
    made = [from_json(part, tensors, device) for part in parts]
    return KINDS[kind](made)

# ---- is it this optimizer's state? -----------------------------------------------------------------------------------


def refuse_lora(checkpoint, lora):
    """InputError unless a checkpoint's LoRA has just the tensors that are trained, finite ones."""
    want = {f"transformer.{name.replace('.default.', '.')}": p for name, p in lora.items()}
    wrong = sorted(want.keys() ^ checkpoint.lora.keys())
    for name in want.keys() & checkpoint.lora.keys():
        tensor = checkpoint.lora[name]
        if (tensor.shape, tensor.dtype) != (want[name].shape, want[name].dtype) or not tensor.isfinite().all():
            wrong.append(name)
    if wrong:
        raise InputError(f"{checkpoint.path / LORA_FILE}: {len(wrong)} of its tensors are not those of this LoRA, for "
                         f"instance {wrong[0]:.200}; give the run's own flags, or another copy")


@contextlib.contextmanager
def trial():
    """Within `with` an optimizer may be tried out without a trace: what its class prints has been printed once, and
    Python's random numbers go on where they were. (torch's are seeded for each step.)"""
    state_of_python = random.getstate()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(state_of_python)


def copies_of(parameters):
    return {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}


def some_of(lora):
    """-> of the parameters of each shape at most two."""
    few = {}
    for name, p in lora.items():
        if sum(p.shape == other.shape for other in few.values()) < 2:
            few[name] = p
    return few


def take_steps(optimizer, parameters, steps):
    """Takes the steps of these numbers with small random gradients, which depend on the number alone."""
    for n in steps:
        generator = torch.Generator().manual_seed(n)
        for p in parameters.values():
            p.grad = 0.01 * torch.randn(p.shape, generator=generator).to(p.device)
        torch.manual_seed(n)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def references_of(lora, step, make_optimizer):
    """-> what such an optimizer keeps after as many steps, but at most 11, with copies of a few parameters: [({place:
    {key: value in JSON}}, its tensors, {(place, key) of what a step does not change})]. A place is a parameter's shape,
    "group" or "self". One is for copies as they are, one for zeros, with which a training begins: some keep less of
    those."""
    references = []
    for factor in (1, 0):
        copies = copies_of({name: factor * p.detach() for name, p in some_of(lora).items()})
        optimizer = make_optimizer(copies.values())
        _, fresh = state_of(optimizer, copies)
        take_steps(optimizer, copies, range(min(step, 11)))
        with optimizers.averaged_weights(optimizer):
            tensors, state = state_of(optimizer, copies)
        reference = {}
        for place, key, value in state:
            place = copies[place].shape if place in copies else place
            reference.setdefault(place, {})[key] = value
        constant = set()
        for place, key, value in state:
            if (place, key, value) in fresh and "tensor" not in str(value): # (a tensor's numbers are not in JSON)
                constant.add((place, key))
        references.append((reference, tensors, constant))
    return references


def refuse_state(lora, tensors, state, references):
    """ValueError unless this state has the places and the forms of one of the references: a method must not become a
    number, a tensor not one of another size."""
    usual = [tensor for _, made, _ in references for tensor in made.values()]
    if all(map(is_finite, usual)):
        for name, tensor in tensors.items():
            if not is_finite(tensor):
                raise ValueError(f"{name} is not finite")
    found = {place: {} for place in (*lora, "group", "self")}
    for place, key, value in state:
        found[place][key] = value
    for place, values in found.items():
        wrong = []
        for reference, made, constant in references:
            wanted = reference.get(lora[place].shape if place in lora else place, {})
            missing = [key for key in wanted.keys() - values.keys() if (place, key) not in constant] # new in a version
            # more keys do no harm in a parameter's state, where some come late
            more = [] if place in lora else values.keys() - wanted.keys()
            other = [key for key in wanted.keys() & values.keys()
                     if not is_alike(values[key], tensors, wanted[key], made)]
            wrong.append(sorted(map(str, [*missing, *more, *other])))
        if all(wrong):
            raise ValueError(f"{place}: {wrong[0][0]:.100} is missing, of another form, or in no place of its state")


def is_finite(tensor):
    return not tensor.is_floating_point() or bool(tensor.float().isfinite().all())


def is_alike(value, tensors, other, made):
    """Whether two values in JSON are of one kind: tensors of one shape and dtype, two lists, two numbers, ... None,
    which is often replaced later, is like all."""
    if value is None or other is None:
        return True
    if isinstance(value, dict) and isinstance(other, dict):
        if value.keys() != other.keys() or "tensor" not in value:
            return value.keys() == other.keys()
        one, two = tensors[value["tensor"][0]], made[other["tensor"][0]]
        return (one.shape, one.dtype) == (two.shape, two.dtype)
    numbers = (int, float)
    if type(value) in numbers and type(other) in numbers:
        return abs(value) < float("inf") or not abs(other) < float("inf")
    return type(value) is type(other)


def try_state(lora, tensors, state, make_optimizer):
    """ValueError, or whatever the optimizer raises, if it cannot take a step from this state. Copies of a hundred
    parameters at a time take it, so that little memory is needed."""
    names = list(lora)
    for n in range(0, len(names), 100):
        copies = copies_of({name: lora[name] for name in names[n:n + 100]})
        optimizer = make_optimizer(copies.values())
        places = {*copies, "group", "self"}
        load_optimizer(optimizer, copies, tensors, [entry for entry in state if entry[0] in places])
        take_steps(optimizer, copies, [0])
        for name, p in copies.items():
            if not p.isfinite().all():
                raise ValueError(f"the next step would ruin {name}")
