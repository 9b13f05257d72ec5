"""
Whether the optimizer was in the middle of a step when something failed. Then weights and state are of no step, and are
not saved.
"""
import torch

from common import InputError


def refuse_half(before, optimizer, step):
    """InputError if the step after this one has changed something. before: marks() before the last try of a step."""
    if before[:1] == [step] and before != marks(optimizer, step):
        raise InputError(f"step {step + 1}: failed in the middle, with its changes half made")


def marks(optimizer, step):
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
