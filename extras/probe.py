"""
Does a checkpoint keep all of an optimizer's state? train.py asks before the first step, not at the first checkpoint.

An optimizer, of any package, may keep what it wants where it wants. Here one takes a few steps with small copies of the
LoRA, is saved and read back into a second one, which must then be equal in every part, and go on with the same steps.
The copies are of two parameters of each shape, so this takes a second; the gradients are random numbers.
"""
import random
import secrets
import shutil
import tempfile
import types
from pathlib import Path

import torch

from common import InputError, first_words, read_tensors
from extras.resume import OPTIMIZER_FILE, copies_of, load_optimizer, save_optimizer, some_of, take_steps, trial

STEPS = 11, 3 # before and after the checkpoint: some fill a part of their state in the second step, or the tenth
FUNCTIONS = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)


def check(args, lora, make_optimizer, averaged_weights, out_dir=None):
    """InputError if an optimizer of --optimizer would not resume to the bit, or cannot be written. All but `args` is
    train.py's; lora: {name: parameter}; out_dir: where its trial is written, by default the system's TMPDIR."""
    # torch's own need no trial with their defaults: the tests have tried them
    if args.optimizer.startswith("torch.optim.") and not args.optimizer_args:
        return
    folder = Path(out_dir or tempfile.gettempdir(), f".tmp-{secrets.token_hex(8)}")
    try:
        with trial():
            lost, moved = find_lost(some_of(lora), make_optimizer, averaged_weights, folder)
    except Exception as e: # a foreign class can fail in any way
        raise InputError(f"--optimizer {args.optimizer}: fails in a trial on a part of the LoRA ({type(e).__name__}: "
                         f"{first_words(e)}); give other --optimizer_args, or another, such as torch.optim.AdamW")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if lost is not None:
        raise InputError(f"--optimizer {args.optimizer}: a checkpoint cannot keep {lost}, so --resume would begin that "
                         "anew; take another, such as torch.optim.AdamW")
    if args.lr > 0 and not moved:
        raise InputError(f"--optimizer {args.optimizer}: changes no weight in {STEPS[0]} steps; give other "
                         "--optimizer_args, or another, such as torch.optim.AdamW")


def find_lost(few, make_optimizer, averaged_weights, folder):
    """-> (what of an optimizer's state does not come back, None if all does; whether it changes the weights). few:
    {name: parameter}; folder: where it may write."""
    first = copies_of(few)
    optimizer = make_optimizer(first.values())
    take_steps(optimizer, first, range(STEPS[0]))
    with averaged_weights(optimizer):
        second = copies_of(first)
        save_optimizer(folder, optimizer, first)
        tensors, info = read_tensors(folder / OPTIMIZER_FILE)
    other = make_optimizer(second.values())
    load_optimizer(other, second, tensors, info["optimizer"])
    moved = not all(same_bits(first[name], few[name]) for name in few)
    lost = difference(vars(optimizer), vars(other), "", set())
    if lost is None:
        for one, parameters in ((optimizer, first), (other, second)):
            random.seed(id(one)) # a resumed process has other numbers here, too; torch's are seeded for each step
            take_steps(one, parameters, range(STEPS[0], sum(STEPS)))
        if not all(close(first[name], second[name], few[name]) for name in few):
            lost = "all of its state: with the same gradients it goes on with other steps"
        with averaged_weights(optimizer):
            save_optimizer(folder, optimizer, first) # what has come since can be saved, too
    return lost, moved


def close(p, other, before):
    """To the bit on a CPU; a GPU may add in another order."""
    if p.device.type == "cpu":
        return same_bits(p, other)
    return bool((p - other).norm() <= 0.01 * (p - before).norm())


def same_bits(a, b):
    if (type(a), a.dtype, a.shape, a.device) != (type(b), b.dtype, b.shape, b.device):
        return False
    a, b = [x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in (a, b)]
    return torch.equal(a, b)


def difference(a, b, path, seen):
    """-> where two values differ in any part, at any depth: ".state.0.exp_avg"; None if nowhere. seen: pairs that are
    being compared already, as objects may refer to each other."""
    if a is b or (id(a), id(b)) in seen:
        return None
    seen.add((id(a), id(b)))
    if torch.is_tensor(a) and torch.is_tensor(b):
        return None if same_bits(a, b) else path
    if type(a) is not type(b):
        return path
    if isinstance(a, FUNCTIONS): # of each instance its own
        return None if a.__name__ == b.__name__ else path
    if isinstance(a, dict):
        a, b = [[(key if isinstance(key, str) else n, [key, value]) for n, (key, value) in enumerate(x.items())]
                for x in (a, b)]
    elif isinstance(a, (list, tuple)):
        a, b = list(enumerate(a)), list(enumerate(b))
    elif isinstance(a, (str, int, float, bytes, set, frozenset, torch.dtype, torch.device)):
        return None if a == b or a != a and b != b else path
    else: # an object: what pickle would keep of it, such as a generator's position
        a, b = [[("", part) for part in x.__reduce_ex__(4)[1:]] for x in (a, b)]
    if len(a) != len(b):
        return path
    for (key, value), (_, other) in zip(a, b):
        found = difference(value, other, f"{path}.{key}".strip("."), seen)
        if found is not None:
            return found
    return None
