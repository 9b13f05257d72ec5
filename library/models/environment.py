"""
What surrounds a run, and stands in no flag: variables of the environment. What would change numbers in silence is
refused or removed; what changes the speed, or the last bits alone, stays as it is, and the log's first line says it.
"""
import logging
import os
import platform
import re
import sys
from glob import glob
from pathlib import Path

from common import InputError, flag_error

# bitsandbytes misses a package that only its layers on a CPU would use, which reads like an error of ours
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# numbers that torchrun sets for each process, and what holds without it
NUMBERS = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
MEETING = "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT".split() # all of these, for processes that find each other
# `accelerate launch` and others leave these: other attention (8 bits in some), weights that only the first process
# loads, products in TF32 or bf16
OTHER_NUMBERS = re.compile("ACCELERATE_.*|FSDP_.*|DIFFUSERS_ATTN_.*|TRANSFORMERS_SDPA_.*|USE_HUB_KERNELS|"
                           "TORCH_ALLOW_TF32_.*|NVIDIA_TF32_.*|(ONE|)DNNL?_DEFAULT_FPMATH_MODE")

def environment_error():
    """-> an error line, or None: if RANK and the like are those of no process, left in this environment, or half of a
    set, as from Slurm, MPI, a pod or a notebook (torchrun sets all; so may others: then env:// finds the processes); or
    if docstrings are left out, which diffusers reads."""
    if sys.flags.optimize > 1:
        return "PYTHONOPTIMIZE: 2, or -OO, with which diffusers cannot be imported; give 1, or leave it out"
    found = {name: os.environ[name] for name in (*NUMBERS, *MEETING[2:]) if name in os.environ}
    try:
        rank, world, local_rank, local_world = [int(found.get(name, default)) for name, default in NUMBERS.items()]
        if 0 <= local_rank <= rank < world and 1 <= local_world <= world:
            if world == 1 or all(found[name] for name in MEETING) and 0 < int(found["MASTER_PORT"]) < 2**16:
                return None
    except (KeyError, ValueError): # what lacks, or is no number
        pass
    words = " ".join(f"{name}={value}" for name, value in found.items())
    return (f"{words}: set in the environment, but not as torchrun sets {', '.join(MEETING)}; "
            f"unset {' '.join(found)}, or start with torchrun")

CARDS = "nvidia nvhost nvgpu dxg kfd".split() # how names of cards begin in Linux's /dev: also Jetson's, WSL's, AMD's

def no_card():
    """Whether this machine has no card that torch could use, as far as can be told without torch."""
    system = platform.system()
    return system == "Darwin" or system == "Linux" and not any(glob(f"/dev/{name}*") for name in CARDS)

def wants_card(args):
    """Whether a large model would be computed, and no flag says where."""
    if args.device or getattr(args, "plan", False) or args.model == "tiny":
        return False
    if Path(args.model).exists():
        return sum(file.stat().st_size for file in Path(args.model).glob("*/*.safetensors")) >= 4e9
    return re.fullmatch(r"[^/.][^/]*/[^/]+", args.model) is not None # else a slip of the pen

def refuse_devices(args):
    """Ends the script if its flags ask for a device that this machine lacks, or on which nobody has compared the
    numbers. It needs no torch, which takes ten seconds."""
    for name, device in vars(args).items():
        if not name.endswith("device") or not device:
            continue
        kind = device.partition(":")[0]
        if kind not in ("cuda", "cpu"): # (mps is silently wrong: pytorch issues 189690, 195910)
            flag_error(f"--{name}: {device!r}: only cuda and cpu have been compared with stock; give one of these")
        if kind == "cuda" and no_card():
            flag_error(f"--{name}: {device!r} cannot be used, as this machine has no card of NVIDIA; take one that "
                       "has, or give cpu, for a rehearsal")
    if no_card() and wants_card(args):
        who = "this machine (or its container) lacks"
        if platform.system() == "Darwin":
            who = "no Mac has"
        raise InputError(f"--device: the real model needs a card with CUDA, which {who}; take a machine with one, or "
                         "give --device cpu, which takes hours a step")

def remove_other_numbers():
    """Removes variables that change numbers -> a line for each that was set. Call it before torch is imported."""
    lines = []
    for name in sorted(os.environ):
        if OTHER_NUMBERS.fullmatch(name):
            value = os.environ.pop(name)
            lines.append(f"warning: {name}={value}: not used, as it changes what is computed")
    return lines
