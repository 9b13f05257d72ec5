"""
What fails in a training, and what then becomes of it.

What does not train is a warning: the log, the tracker, the bar, a validation. What ends the run saves the last whole
step before. Several processes end together, and a checkpoint is written only while all of them have the same LoRA.
"""
import torch

import common
from common import InputError, first_words, say, tell
from library.lora.lora_paths import LORA_FILE, checkpoints, number_of

# ---- a validation that fails -----------------------------------------------------------------------------------------

def warn_of_validation(e, step, fsdp):
    """Prints that the validation has failed with this exception, on each process that has one. With --fsdp this ends
    the run, as the others wait for this process."""
    if fsdp and isinstance(e, torch.OutOfMemoryError):
        raise InputError(f"--val_data: out of memory after step {step}; lower --max_tokens, then --resume")
    if fsdp:
        raise e
    if isinstance(e, torch.OutOfMemoryError):
        common.warn_again("no memory for the validation", "lower --max_tokens for it")
    else:
        common.warn_again("the validation", e)
    if common.rank() and not isinstance(e, common.FailedElsewhere): # warn_again() speaks for the first one alone
        tell(f"warning: the validation: {first_words(e)} (on process {common.rank()})")

def less_memory(args, blocks, recomputed, samples, out_dir):
    """-> what to do about a step of so many samples without memory: what --resume allows, unless it is at its end, or
    a new run. recomputed: of the blocks."""
    remedies = [f"lower --max_tokens below {args.max_tokens}"] if samples > 1 else []
    if recomputed < blocks:
        remedies.append(f"give --gradient_checkpointing {blocks}")
    if args.offload < blocks:
        remedies.append("raise --offload")
    resume = f"{' or '.join(remedies)}, then --resume; or " if remedies else ""
    return (f"{resume}begin a new run with smaller --target_pixels or with --quantize int8 (--pretrained_lora "
            f"{out_dir} takes its LoRA, if a step was saved)")

# ---- several processes: do all still have the same LoRA? -------------------------------------------------------------

# Each process takes every optimizer step by itself, from the same gradients and with the same random numbers, so no
# weights have to be sent. Nothing would tell that they part: a kernel that is not deterministic, an optimizer with a
# generator of its own, a broken memory. So train.py compares them before each checkpoint (but for the one that is saved
# when an error ends the run, as the other processes may be gone).

class Diverged(InputError): # a class because save_the_rest must know it
    """The processes have different LoRAs, of which none is saved."""

def digest(parameters):
    """A number of 64 bits for the fp32 weights of these parameters: another bit in any one of them makes another
    number. A sum of integers, in which the order of a GPU's threads does not matter. Nothing is copied to the host."""
    total = 0
    for p in parameters:
        bits = p.detach().flatten().view(torch.int32).long()
        odd = torch.arange(1, 2 * len(bits), 2, device=p.device) # an odd factor loses no bit modulo 2**64
        total = 1_000_003 * total + (bits * odd).sum()
    return int(total)

def compare_loras(out_dir, step, parameters):
    """If these parameters differ between the processes, all end, and the first one prints the error."""
    digests = common.gather_objects(digest(parameters))
    different = [rank for rank, number in enumerate(digests) if number != digests[0]]
    if different and common.rank():
        raise SystemExit(1)
    if different:
        saved = checkpoints(out_dir) # each was written after such a comparison, or read by all processes
        since = number_of(saved[-1]) if saved else 0
        raise Diverged(f"{out_dir}: process {different[0]} has another LoRA than the first one at step {step}, and had "
                       f"the same at step {since}; continue from there in one process, with --resume (and without "
                       "--fsdp), or start a new run with another --optimizer")

# ---- checkpoints: a disk that refuses one, and the last one before an error ends the run -----------------------------

def save_or_warn(save, out_dir, step, late, save_every, at_end):
    """Calls save(step) -> late: 0, or the step of the first checkpoint that the disk has refused since the last one
    that it took. The loop then tries again after each step. A refusal is a warning; at the end, or when the next
    checkpoint is due, it is an InputError."""
    try:
        save(step)
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

def versions_of(optimizer, step):
    """-> [step, version of each tensor, ...]: another list after any change of the weights or of the optimizer's state.
    It costs nothing, as torch counts the changes of each tensor. It does not count those of its fused kernels, and
    classes that are not torch's may keep state elsewhere: for these no two lists are equal."""
    fused = optimizer.param_groups[0].get("fused")
    if fused or not type(optimizer).__module__.startswith("torch.optim"):
        return [step, object()]
    versions = [step]
    versions += [p._version for group in optimizer.param_groups for p in group["params"]]
    for state in optimizer.state.values():
        versions += [x._version if torch.is_tensor(x) else x for x in state.values()]
    return versions

def save_the_rest(save, out_dir, step, error, before, optimizer):
    """Before this error ends the run: saves the steps since the last checkpoint, with save(step), and says so. before:
    versions_of the optimizer before the newest step began; if they have changed and the step has not, it has failed
    in the middle, and its half cannot be saved."""
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
            save(step)
        except (Exception, InputError) as e: # the first error must be seen all the same
            problem = first_words(e)
    if problem:
        saved = ["nothing, from the start", *(path.name for path in checkpoints(out_dir))]
        say(f"{out_dir}: step {step} could not be saved ({problem}); --resume continues after {saved[-1]}")
    else:
        say(f"{out_dir}: stopped after step {step}; the same command with --resume continues it")
