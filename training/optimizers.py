"""
--optimizer, --optimizer_args and --ema: which class trains the LoRA, and which of its weights are of use. (The course
of the learning rate is train.py's learning_rate, whatever the class.)

An optimizer may train one set of weights, and an average of them is what you use: a schedule-free class
(arxiv.org/abs/2405.15682), or any class with --ema. Such a class has train() and eval(), which put either set into the
parameters. Validations, best step, checkpoints and the finished LoRA have the average; the training goes on from the
trained weights, also after --resume.

--ema D keeps an exponential moving average of the weights w (Polyak & Juditsky 1992; arxiv.org/abs/2411.18704):

    a(1) = w(1), a(n) = d a(n-1) + (1 - d) w(n) with d = min(D, n / (n + 9))

The second part of the minimum is the warm-up of diffusers' EMAModel. It matters here, because a LoRA begins at zero and
learns for a few hundred steps: after 300 steps an average with d = 0.99 all along would be 5 % that zero, and with
0.9999 97 % of it. So the average is over about the last ninth of the run (Karras et al. 2023, arxiv.org/abs/2312.02696,
average over such a share throughout), until 1 / (1 - D) steps are less than that: with 0.99 100 steps, after step 891.
"""
import contextlib
import io
import random
from functools import partial
from pydoc import ErrorDuringImport, locate

from common import InputError, first_words, warn_once
from library.cli.command_line import is_given

KNOWN = ("torch.optim.AdamW", "torch.optim.Muon") # they need no trial: the tests have tried them, with --ema, too

def find_optimizer(args, parser):
    """-> make_optimizer(parameters), by the flags; all that can be wrong with them ends the script with a line, here
    or when one is made."""
    try:
        # imports a class by its dotted name: one that leads nowhere does not wait for torch
        found = locate(args.optimizer)
    except ErrorDuringImport as e:
        parser.error(f"argument --optimizer: {args.optimizer} cannot be imported ({first_words(e)}); mend that, "
                     "or give torch.optim.AdamW")
    if not isinstance(found, type): # None, or a function
        parser.error(f"argument --optimizer: found no {args.optimizer!r}; pip install it, or give torch.optim.AdamW")
    if args.ema and has_average(found):
        parser.error(f"argument --ema: {args.optimizer} has an average of its own; leave out --ema")
    if args.lr_scheduler != "constant" and has_average(found):
        warn_once(f"warning: --lr_scheduler {args.lr_scheduler}: {args.optimizer} is schedule-free, and its average "
                  "replaces a schedule; give constant")
    if args.ema:
        found = with_ema(found, args.ema)
    return partial(make, found, args)

def make(optimizer_class, args, parameters):
    """All parameters are one group: train.py's loop sets its learning rate, and a checkpoint has its settings. Without
    --weight_decay a class has the default only if its decay is AdamW's, see couples_decay."""
    given = dict(args.optimizer_args)
    settings = dict(lr=args.lr, weight_decay=args.weight_decay) | given
    untried = settings["weight_decay"] and args.optimizer not in KNOWN
    if untried and couples_decay(optimizer_class, settings, next(iter(parameters)).device):
        if is_given("--weight_decay") or "weight_decay" in given:
            warn_once(f"warning: --weight_decay: {args.optimizer} adds it to the gradient, where it can outweigh what "
                      "the pictures say; --weight_decay 0 leaves it out")
        else:
            settings["weight_decay"] = 0.0
    try:
        optimizer = optimizer_class(parameters, **settings)
        use_trained_weights(optimizer)
    except Exception as e: # a foreign class can fail in any way
        raise InputError(f"--optimizer {args.optimizer}: {first_words(e)}; give a class and its arguments")
    return optimizer

@contextlib.contextmanager
def trial():
    """Within `with` an optimizer may be tried out without a trace: what its class prints has been printed once, and
    Python's and torch's random numbers go on where they were."""
    import torch
    state_of_python = random.getstate()
    try:
        with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state_of_python)

def couples_decay(optimizer_class, settings, device):
    """Whether a class adds the weight decay to the gradient (L2), as Adam does, and SGD with a momentum. AdamW takes
    lr * weight_decay of a weight in each step (arxiv.org/abs/1711.05101). But Adam makes a full step even of a tiny
    gradient, and where it is nearly zero, as a LoRA's A has it at first, that is a step of the decay. So we compare
    steps of zero gradients with AdamW's."""
    import torch
    w = torch.nn.Parameter(torch.full((16, 64), 0.01, device=device))
    try:
        with trial():
            optimizer = optimizer_class([w], **settings | dict(lr=0.001, weight_decay=0.1))
            use_trained_weights(optimizer)
            for _ in range(11): # RAdam's first ones are another class's
                w.grad = torch.zeros_like(w)
                optimizer.step()
    except Exception: # D-Adaptation's SGD divides by the gradient's norm
        return True
    return (0.01 - w).abs().mean() > 1.2 * 11 * 0.001 * 0.1 * 0.01 * (d_of(optimizer) or 1)

def d_of(optimizer):
    """-> what Prodigy, D-Adaptation and such have found until now, and call d in their groups: a factor of --lr. 0 of
    other classes. (torch's Adafactor calls another number so.)"""
    if type(optimizer).__module__.startswith("torch."):
        return 0
    return max(float(group.get("d", 0)) for group in optimizer.param_groups)

def with_ema(optimizer_class, decay):
    """-> the class with an average of the weights. It is kept in the optimizer's state of each parameter, where a
    checkpoint keeps it, but only from the first step on: many classes take a state that is not empty for one that they
    have filled."""

    class WithEma(optimizer_class): # a class because it has the two methods of a schedule-free one
        __module__ = optimizer_class.__module__ # by which training/failures.py knows torch's own

        def step(self):
            super().step()
            group = self.param_groups[0] # where state_dict() finds the count
            n = group["ema_steps"] = group.get("ema_steps", 0) + 1
            share = 1 - min(decay, n / (n + 9))
            for p in self.all_parameters():
                state = self.state[p]
                if "averaged" not in state:
                    state["averaged"] = p.detach().clone()
                state["averaged"].lerp_(p.detach(), share)

        def eval(self):
            for p in self.all_parameters():
                p.data.copy_(self.state[p].get("averaged", p))

        def all_parameters(self): # which a class may put into several groups
            return [p for group in self.param_groups for p in group["params"]]

        def train(self):
            """Does nothing: use_trained_weights puts them back, from a copy."""
    WithEma.__name__ = optimizer_class.__name__
    return WithEma

# ---- the average -----------------------------------------------------------------------------------------------------

def has_average(optimizer):
    """Whether an optimizer, or a class of them, trains one set of weights and lets you use an average of them."""
    return hasattr(optimizer, "eval")

@contextlib.contextmanager
def averaged_weights(optimizer):
    """Within `with` the parameters are the average, if the optimizer has one. The trained weights wait beside its
    state, so that a checkpoint that is written now has both."""
    if not has_average(optimizer):
        yield
        return
    try:
        for p, state in optimizer.state.items():
            state["trained"] = p.data.clone()
        optimizer.eval()
        yield
    finally:
        use_trained_weights(optimizer)

def use_trained_weights(optimizer):
    """Puts the trained weights back, from the copy: a schedule-free optimizer's own way back rounds, so that a
    validation would change the training."""
    if has_average(optimizer):
        optimizer.train()
        for p, state in optimizer.state.items():
            p.data.copy_(state.pop("trained", p))
