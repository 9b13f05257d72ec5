"""
What fails in a training. What does not train is a warning: a log, a tracker, a bar, a validation's pictures. What ends
the run saves the last whole step before.
"""
import contextlib

import torch

import common
from common import InputError, first_words, say, tell
from library.lora import lora_paths
from library.lora.lora_paths import LORA_FILE, checkpoints
from training import run_folder

@contextlib.contextmanager
def catch_into(caught):
    """Within `with`, an exception, or a library's sys.exit, goes into this list, and the code behind the block runs all
    the same. Take it out of the list: as long as it is there, it and the list hold each other, and with them all
    tensors of the functions that have failed."""
    try:
        yield
    except (Exception, SystemExit) as e:
        caught.append(e)


@contextlib.contextmanager
def warn_on_failure(what):
    """Within `with`, a failure is a warning, the first time, and ends nothing. what: its beginning."""
    caught = []
    with catch_into(caught):
        yield
    if caught:
        warn(what, caught.pop())


@contextlib.contextmanager
def fail_as_input_error(flag):
    """Within `with`, before the first step, whatever fails is an InputError about this flag."""
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as e:
        raise InputError(f"{flag}: {first_words(e)}; mend it, or leave the flag out, then --resume")


def warn(what, why):
    """The first time that this has failed. why: an exception, or words."""
    if not any(line.startswith(f"warning: {what}: ") for line in common.WARNED):
        why = first_words(why).removeprefix("error: ")
        common.warn_once(f"warning: {what}: {why}; the work goes on, and tries it again next time")


class FailedElsewhere(SystemExit): # a class because warn_of_validation must know it from a library's
    """Another process has failed, which prints the reason: this one exits with status 1 and no line."""

    def __init__(self, reason):
        super().__init__(reason)
        self.code = 1


def on_all_processes(work, fsdp=False):
    """-> work(), which each process does for itself. If it fails on one, it raises on all of them, before they wait for
    each other: there its exception, elsewhere Elsewhere. fsdp: they wait for each other within it, so nothing helps."""
    if fsdp:
        return work()
    caught = []
    with catch_into(caught):
        result = work()
    reasons = common.gather_objects("".join(map(first_words, caught)))
    for rank, reason in enumerate(reasons):
        if reason:
            raise caught.pop() if caught else FailedElsewhere(f"{reason.removeprefix('error: ')} (on process {rank})")
    return result


def warn_of_validation(e, step, fsdp):
    """Says that it has failed with this exception, on each process that has one. With --fsdp that ends the run: the
    others wait for this process."""
    if fsdp and isinstance(e, torch.OutOfMemoryError):
        raise InputError(f"--val_data: out of memory after step {step}; lower --max_tokens, then --resume")
    if fsdp:
        raise e
    if isinstance(e, torch.OutOfMemoryError):
        warn("no memory for the validation", "lower --max_tokens for it")
    else:
        warn("the validation", e)
    if common.rank() and not isinstance(e, FailedElsewhere): # warn() speaks for the first one alone
        tell(f"warning: the validation: {first_words(e)} (on process {common.rank()})")


def versions_of(optimizer, step):
    """-> the step, and what is another one after any change of the weights or of the optimizer's state, at no cost:
    torch counts the changes of each tensor. What other classes than torch's do, and its fused kernels, nobody
    counts: for them it is always another one."""
    fused = optimizer.param_groups[0].get("fused")
    if fused or not type(optimizer).__module__.startswith("torch.optim"):
        return [step, object()]
    found = [step]
    found += [p._version for group in optimizer.param_groups for p in group["params"]]
    for state in optimizer.state.values():
        found += [x._version if torch.is_tensor(x) else x for x in state.values()]
    return found


def save_whole(save, out_dir, step):
    """save(step). If it fails, what it leaves of a checkpoint goes, as it takes the room that the next try needs."""
    path = out_dir / f"checkpoint-{step:06d}"
    try:
        save(step)
    finally:
        if path.is_dir() and not (path / LORA_FILE).exists():
            run_folder.remove_old(path)


def save_or_warn(save, out_dir, step, late, save_every, at_end):
    """save(step) -> late: 0, or the first step that the disk has refused since it took one, which is a warning; it is
    an InputError at the end, or if the next checkpoint is due by then."""
    try:
        save_whole(save, out_dir, step)
        return 0
    except (OSError, InputError) as e:
        if isinstance(e, OSError):
            e = InputError(f"{out_dir}: checkpoint {step} cannot be written ({first_words(e)}); free some space, or "
                           "mend the disk, then --resume")
        elif not isinstance(e.__context__, OSError): # such as NaN in the LoRA
            raise
        if at_end or late and step >= late + save_every:
            raise e
        if not late:
            common.warn_once(f"warning: {str(e).removeprefix('error: ')} (tried again after each step; the run ends if "
                             f"it still fails {save_every} steps later)")
        return late or step


def save_the_rest(save, out_dir, step, error, before, optimizer):
    """Before this error ends the run: saves the steps since the last checkpoint, with save(step), and says so. before:
    marks() before the last try of a step."""
    if isinstance(error, SystemExit) and not error.code: # of a library: only a signal ends a run with status 0
        error.code = InputError(f"{out_dir}: a library has ended the run, with sys.exit({error.code}), after step "
                                f"{step}; find out why, then --resume").code
    if common.rank() or not step or isinstance(error, Diverged):
        return
    problem = None
    if not (out_dir / f"checkpoint-{step:06d}" / LORA_FILE).exists():
        try:
            if before[:1] == [step] and before != versions_of(optimizer, step):
                raise InputError(f"step {step + 1}: failed in the middle, with its changes half made")
            save_whole(save, out_dir, step)
        except (Exception, InputError) as e: # the first error must be seen all the same
            problem = first_words(e)
    if problem:
        saved = ["nothing, from the start", *(path.name for path in checkpoints(out_dir))]
        say(f"{out_dir}: step {step} could not be saved ({problem}); --resume continues after {saved[-1]}")
    else:
        say(f"{out_dir}: stopped after step {step}; the same command with --resume continues it")


# ---- agree ------------------------------------------------------------------------------------------
# Several processes: is their LoRA still one and the same?
#
# Each process takes every optimizer step by itself, from the same gradients and with the same random numbers, so that no
# weights have to be sent. What would part them is silent: a kernel that is not deterministic, a class with a generator of
# its own, a broken memory. train.py asks here before it writes a checkpoint, so that a checkpoint is what all have (but
# for the one that is saved when an error ends the run, as the other processes may be gone).


def digest(parameters):
    """A number of 64 bits for the fp32 weights of these parameters: another bit in any one of them makes another
    number. A sum of integers, in which the order of a GPU's threads does not matter. Nothing is copied to the host."""
    total = 0
    for p in parameters:
        bits = p.detach().flatten().view(torch.int32).long()
        odd = torch.arange(1, 2 * len(bits), 2, device=p.device) # an odd factor loses no bit modulo 2**64
        total = 1_000_003 * total + (bits * odd).sum()
    return int(total)


class Diverged(InputError):
    """The processes have different LoRAs, of which none is saved."""


def compare_loras(out_dir, step, parameters):
    """If these parameters differ between the processes, all end, and the first one prints the error."""
    found = common.gather_objects(digest(parameters))
    others = [n for n, number in enumerate(found) if number != found[0]]
    if others and common.rank():
        raise SystemExit(1)
    if others:
        saved = lora_paths.checkpoints(out_dir) # each was written after such a comparison, or read by all processes
        since = lora_paths.number_of(saved[-1]) if saved else 0
        raise Diverged(f"{out_dir}: process {others[0]} has another LoRA than the first one at step {step}, and had "
                     f"the same at step {since}; continue from there in one process, with --resume (and without "
                     "--fsdp), or start a new run with another --optimizer")
