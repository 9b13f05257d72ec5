"""
What would happen for the first time at a checkpoint, or at the end of a run, is tried before its first step.

An optimizer, of any package, may keep state that its state_dict() lacks. Here one takes a few steps with copies of a
part of the LoRA, is saved and read back into a second one, and both take the same steps from there: the weights must be
equal. The copies are of two parameters of each shape, so this takes a second. Each of them must also move: a class that
multiplies its steps by the size of the weights (LAMB) never leaves the zeros with which one half of a LoRA begins.

A checkpoint is written, read back, and compared with what is trained, by names and bits.
"""
import random
import shutil

import torch

import predict
from common import FULL, InputError, first_words, on_first_process, rank, warn_once
from training.optimizers import KNOWN, averaged_weights, d_of, trial
from training.resume import load_optimizer, names_in_file, read_checkpoint, read_optimizer, save_optimizer, take_steps

STEPS = 11 # before the checkpoint, and behind it: some change a part of their state in every tenth step

def check(args, out_dir, lora, optimizer, make_optimizer, write_checkpoint):
    """InputError if an optimizer of --optimizer would not resume to the bit, or if a checkpoint of this run would not
    hold what is trained. lora: {name: parameter}; the functions are train.py's. Nothing is changed."""
    if len({group["lr"] for group in optimizer.param_groups}) > 1:
        raise InputError(f"{out_dir}: the optimizer's groups of parameters have several learning rates, and the loop "
                         "sets one for all; let it multiply them, or put all into one group")
    here = {*lora.values()}
    strange = [p for group in optimizer.param_groups for p in group["params"] if p not in here]
    if strange:
        raise InputError(f"{out_dir}: the optimizer trains {len(strange)} tensors that no checkpoint would keep, for "
                         f"instance one of {list(strange[0].shape)}; mend make_model or make_optimizer in train.py")
    folder = out_dir / f".tmp-trial-{rank()}" # one name: the next start deletes what a killed one has left
    check_optimizer(args, lora, make_optimizer, folder)
    on_first_process(lambda: check_files(out_dir, folder, lora, make_optimizer, write_checkpoint))

# ---- the files -------------------------------------------------------------------------------------------------------

def check_files(out_dir, folder, lora, make_optimizer, write_checkpoint):
    """InputError names what a checkpoint, which is written into `folder`, does not give back as it is trained."""
    path, found = folder / "checkpoint-000001", None
    before = {p: p.detach().to("cpu", copy=True) for p in lora.values()}
    try:
        for p in before: # the zeros of a new LoRA would hide what is missing
            p.data += 1
        with trial():
            write_checkpoint(path, 1, make_optimizer(lora.values()))
        trained, read, in_use = names_in_file(lora), read_checkpoint(path).lora, predict.read_lora(path).state
        for name in sorted(trained.keys() | read.keys() | in_use.keys()):
            if name not in trained:
                found = f"it has {name}, which is not trained"
            elif name not in read or name not in in_use:
                found = f"it lacks {name}"
            elif not same_bits(read[name], trained[name].cpu()):
                found = f"it has other numbers in {name}"
    except InputError as e: # which names a file that will not be there
        if getattr(e.__context__, "errno", None) in FULL: # as by a quota
            raise
        found = first_words(e).removeprefix("error: ")
    except Exception as e: # of code that a person has changed, which can fail in any way
        found = f"{type(e).__name__}: {first_words(e)}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for p, numbers in before.items():
            p.data.copy_(numbers)
    if found:
        raise InputError(f"{out_dir}: a checkpoint fails in a trial before the first step ({found}); mend "
                         "write_checkpoint, predict.py's save_lora, or library/lora/lora_file.py")

# ---- the optimizer ---------------------------------------------------------------------------------------------------

def check_optimizer(args, lora, make_optimizer, folder):
    """InputError if an optimizer of --optimizer would not resume to the bit, cannot be written, into `folder`, or
    hardly moves the LoRA; a warning if it moves it slowly."""
    if args.optimizer in KNOWN and not args.optimizer_args:
        return
    try:
        with trial():
            goes_on, (moved, name), d = try_optimizer(two_of_each_shape(lora), make_optimizer, args.lr, folder)
    except Exception as e: # a foreign class can fail in any way
        raise InputError(f"--optimizer {args.optimizer}: fails in a trial on a part of the LoRA ({type(e).__name__}: "
                         f"{first_words(e)}); give other --optimizer_args, or another, such as torch.optim.AdamW")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not goes_on:
        raise InputError(f"--optimizer {args.optimizer}: --resume would take other steps than an unbroken run, because "
                         "its state_dict() lacks a part of its state, or because it draws numbers that are not "
                         "torch's; take another, such as torch.optim.AdamW")
    # AdamW moves each number by about its rate, and 1e-4 is usual; a class that finds its own has only begun to
    usual = min(args.lr, 1e-5 if d else 1e-4)
    found = (f"--optimizer {args.optimizer}: with --lr {args.lr:g} it moves {name} by {moved:.1e} a step, "
             f"torch.optim.AdamW with --lr {usual:g} by {usual:.1e}")
    if args.lr > 0 and not moved > 1e-3 * usual: # (or NaN)
        cause = ("its steps are as small as the gradients, or as the weights, and a LoRA's B begin at 0; give a higher "
                 "--lr (Adafactor 0.01, SGD 1), other --optimizer_args, or another, such as torch.optim.AdamW")
        if d:
            cause = "it finds the rate itself, and --lr is a factor of that; give --lr 1"
        raise InputError(f"{found}: {cause}")
    if moved < 1e-2 * usual:
        warn_once(f"warning: {found}: it may learn slowly, and need a higher --lr")

def two_of_each_shape(lora):
    """-> of the parameters of each shape at most two."""
    few = {}
    for name, p in lora.items():
        if sum(p.shape == other.shape for other in few.values()) < 2:
            few[name] = p
    return few

def try_optimizer(few, make_optimizer, lr, folder):
    """-> (whether an optimizer that is saved and loaded takes the same steps as one that goes on, (how far a step moves
    a number of the slowest parameter, its name), optimizers.d_of). few: {name: parameter}; folder: where it may
    write."""
    first = copies_of(few)
    optimizer = make_optimizer(first.values())
    take_steps(optimizer, first, range(STEPS), lr)
    with averaged_weights(optimizer):
        second = copies_of(first)
        save_optimizer(folder, optimizer, first)
    tensors, info = read_optimizer(folder)
    resumed = make_optimizer(second.values())
    load_optimizer(resumed, second, tensors, info["optimizer"])
    middle = copies_of(first) # (`second` may be the average)
    for each, parameters in ((optimizer, first), (resumed, second)):
        random.seed(id(each)) # a resumed process has other numbers here, too; torch's are seeded for each step
        take_steps(each, parameters, range(STEPS, 2 * STEPS), lr)
    with averaged_weights(optimizer):
        save_optimizer(folder, optimizer, first) # what has come since can be saved, too
    goes_on = all(close(first[name], second[name], few[name]) for name in few)
    moved = [((p - middle[name]).norm().item() / p.numel()**0.5 / STEPS, name) for name, p in first.items()]
    return goes_on, min(moved), d_of(optimizer)

def copies_of(parameters):
    return {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}

def close(p, other, before):
    """To the bit on a CPU; a GPU may add in another order."""
    if p.device.type == "cpu":
        return same_bits(p, other)
    return bool((p - other).norm() <= 0.01 * (p - before).norm())

def same_bits(a, b):
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    a, b = [x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in (a, b)]
    return torch.equal(a, b)
