"""
Several processes: is their LoRA still one and the same?

Each process takes every optimizer step by itself, from the same gradients and with the same random numbers, so that no
weights have to be sent. What would part them is silent: a kernel that is not deterministic, a class with a generator of
its own, a broken memory. train.py asks here before it writes a checkpoint, so that a checkpoint is what all have (but
for the one that is saved when an error ends the run, as the other processes may be gone).
"""
import torch

import common
from common import InputError


def digest(parameters):
    """A number of 64 bits for the fp32 weights of these parameters: another bit in any one of them makes another
    number. A sum of integers, in which the order of a GPU's threads does not matter. Nothing is copied to the host."""
    total = 0
    for p in parameters:
        bits = p.detach().flatten().view(torch.int32).long()
        odd = torch.arange(1, 2 * len(bits), 2, device=p.device) # an odd factor loses no bit modulo 2**64
        total = 1_000_003 * total + (bits * odd).sum()
    return int(total)


class Parted(InputError):
    """The processes have different LoRAs, of which none is saved."""


def compare(out_dir, step, parameters):
    """If these parameters differ between the processes, all end, and the first one prints the error."""
    found = common.gather_objects(digest(parameters))
    others = [n for n, number in enumerate(found) if number != found[0]]
    if others and common.rank():
        raise SystemExit(1)
    if others:
        saved = common.checkpoints(out_dir) # each was written after such a comparison, or read by all processes
        since = common.number_of(saved[-1]) if saved else 0
        raise Parted(f"{out_dir}: process {others[0]} has another LoRA than the first one at step {step}, and had "
                     f"the same at step {since}; continue from there in one process, with --resume (and without "
                     "--fsdp), or start a new run with another --optimizer")
