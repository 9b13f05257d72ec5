"""
What would happen for the first time at a checkpoint, or at the end of a run, is tried before its first step.

An optimizer, of any package, may keep state that its state_dict() lacks. Here one takes a few steps with copies of a
part of the LoRA, is saved and read back into a second one, and both take the same steps from there: the weights must be
equal. The copies are of two parameters of each shape, so this takes a second. Each of them must also move: a class that
multiplies its steps by the size of the weights (LAMB) never leaves the zeros with which one half of a LoRA begins.

A checkpoint and the finished LoRA are written, read back, compared with what is trained, and put on a second model.
Meanwhile the LoRA has random numbers, as zeros would hide a wrong scale; and of blocks whose LoRAs are alike all but
the first have matrices of one column or row, so that this takes a second, too.
"""
import contextlib
import gc
import random
import shutil
from dataclasses import replace

import torch
from peft.tuners.lora import LoraLayer

import predict
from common import InputError, first_words, on_first_process, rank, warn_once
from rope_patch import blocks_of
from training.optimizers import KNOWN, averaged_weights, d_of, trial
from training.resume import load_optimizer, names_in_file, read_checkpoint, read_optimizer, save_optimizer, take_steps

STEPS = 11 # before the checkpoint, and behind it: some change a part of their state in every tenth step


def check(args, out_dir, transformer, lora, optimizer, make_optimizer, write_checkpoint, meta, load_empty):
    """InputError if an optimizer of --optimizer would not resume to the bit, or if the files of this run could not be
    used. lora: {name: parameter}; load_empty(): the transformer without weights or LoRA. All others are train.py's.
    Nothing is changed."""
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
    on_first_process(lambda: check_files(args, out_dir, folder, transformer, lora, make_optimizer, write_checkpoint,
                                         meta, load_empty))
    gc.collect() # the second model's parts refer to each other


# ---- the files -------------------------------------------------------------------------------------------------------


def check_files(args, out_dir, folder, transformer, lora, make_optimizer, write_checkpoint, meta, load_empty):
    """InputError names what is lost in the files of this run, which are written into `folder`."""
    try:
        with trial():
            trained, scales, firsts = write_files(folder, transformer, lora, make_optimizer, write_checkpoint, meta)
        try:
            found = find_wrong(folder, args.optimizer, trained, scales, firsts, load_empty())
        except InputError as e: # which names a file that will not be there
            found = first_words(e).removeprefix("error: ")
    except Exception as e: # of code that a person has changed, which can fail in any way
        found = f"{type(e).__name__}: {first_words(e)}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if found:
        raise InputError(f"{out_dir}: what ends a run fails in a trial before its first step ({found}); mend "
                         "write_checkpoint, predict.py's save_lora, or library/lora/lora_file.py")


def write_files(folder, transformer, lora, make_optimizer, write_checkpoint, meta):
    """Writes checkpoint-000001 and the finished LoRA -> {name in a file: tensor} of what is trained, {layer: scale},
    the numbers of the blocks whose matrices are whole."""
    with random_numbers(transformer, lora) as firsts:
        optimizer = make_optimizer(lora.values())
        write_checkpoint(folder / "checkpoint-000001", 1, optimizer)
        trained = lora | {name: p for name, p in transformer.named_parameters() if p.requires_grad}
        with averaged_weights(optimizer):
            predict.save_lora(folder / predict.LORA_FILE, transformer, dict(step=1, **meta))
            trained = {name: p.detach().to("cpu", copy=True) for name, p in names_in_file(trained).items()}
    return trained, predict.scales_of(transformer), firsts


@contextlib.contextmanager
def random_numbers(transformer, lora):
    """Within `with` the LoRA has random numbers, and of the blocks whose LoRAs have the same layers, ranks and scales
    only the first one has whole matrices -> the numbers of these. Afterwards all is as it was, to the bit."""
    kinds, narrow, weights = {}, set(), {p: p.data for p in lora.values()}
    for n, block in enumerate(blocks_of(transformer)):
        shapes = [(name, p.shape) for name, p in block.named_parameters() if p.requires_grad]
        scales = [module.scaling for module in block.modules() if isinstance(module, LoraLayer)]
        if kinds.setdefault(str((shapes, scales)), n) != n:
            narrow.update(block.parameters())
    try:
        for n, (name, p) in enumerate(lora.items()):
            part = p.data
            if p in narrow and ".lora_A." in name:
                part = part[:, :1]
            elif p in narrow and ".lora_B." in name:
                part = part[:1]
            numbers = torch.randn(part.shape, generator=torch.Generator().manual_seed(n))
            p.data = numbers.to(p.device)
        yield list(kinds.values())
    finally:
        for p, data in weights.items():
            p.data = data


def find_wrong(folder, optimizer, trained, scales, firsts, second):
    """-> what of write_files' answer does not come back from its files, in words; None if all does. second: an empty
    transformer, which gets both LoRAs, as far as they are whole."""
    checkpoint = folder / "checkpoint-000001"
    of_checkpoint, finished = predict.read_lora(checkpoint), predict.read_lora(folder)
    folded = dict(trained)
    for layer, scale in scales.items():
        folded[f"transformer.{layer}.lora_B.weight"] = scale * trained[f"transformer.{layer}.lora_B.weight"]
    for what, read, wanted in (("a checkpoint", read_checkpoint(checkpoint, optimizer).lora, trained),
                               ("a checkpoint's LoRA", of_checkpoint.state, folded),
                               ("the finished LoRA", finished.state, folded)):
        for name in sorted(read.keys() ^ wanted.keys()):
            return f"{what} has {name}, which is not trained" if name in read else f"{what} lacks {name}"
        for name, tensor in wanted.items():
            if not same_bits(read[name], tensor):
                return f"{what} has other numbers in {name}"
    narrow = set()
    for n, block in enumerate(blocks_of(second)):
        if n not in firsts:
            narrow.update(block.modules())
    places = {f"transformer.{name}" for name, module in second.named_modules() if module not in narrow}
    for adapter, lora in (("checkpoint", of_checkpoint), ("finished", finished)):
        whole = {name: tensor for name, tensor in lora.state.items() if name.rsplit(".lora_", 1)[0] in places}
        predict.load_lora(second, adapter, replace(lora, state=whole))
    for layer in (layer for layer in scales if f"transformer.{layer}" in places):
        found = second.get_submodule(layer).scaling
        if found["checkpoint"] != 1 or found["finished"] != 1:
            return f"{layer} is loaded at scales of {found['checkpoint']:g} and {found['finished']:g}, not 1"
    return None


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
    if (type(a), a.dtype, a.shape, a.device) != (type(b), b.dtype, b.shape, b.device):
        return False
    a, b = [x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in (a, b)]
    return torch.equal(a, b)
