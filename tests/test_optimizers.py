"""
Optimizers of any package: with what their state_dict() has, a run that is resumed is the unbroken run to the bit. One
that keeps a part of its state elsewhere, or that hardly moves a LoRA, is refused before the first step, in one line.

$ python -m pytest -q tests/test_optimizers.py    # twenty seconds
"""
import functools
import json
import random
import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import common
from training import failures, optimizers, preflight, resume
from tests.harness import (assert_bitwise, assert_same_run, is_one_line, log_of, lora_of, run_script, start_ranks,
                           steps_of, works)

class Optimizer(torch.optim.Optimizer):
    """Each class below says how it updates one parameter, from a state of some form."""
    def __init__(self, params, lr, weight_decay, **group):
        super().__init__(params, dict(lr=lr, **group))
        self.begin()

    def begin(self):
        pass

    @torch.no_grad()
    def step(self):
        group, = self.param_groups
        self.begin_step(group)
        for p in group["params"]:
            p.sub_(group["lr"] * self.update(p, self.state[p], group) * p.grad)

    def begin_step(self, group):
        pass

# ---- state that a checkpoint keeps -----------------------------------------------------------------------------------

class TensorInGroup(Optimizer):
    """As d-adaptation's; also a tuple there."""
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, lr, weight_decay, d=torch.tensor(1.0), pair=(1, 2.0))

    def begin_step(self, group):
        group["d"] *= 1.5
        group["pair"] = group["pair"][0] + 1, 2.0

    def update(self, p, state, group):
        return group["d"] * group["pair"][0]

class Lists(Optimizer):
    """As SOAP's and Shampoo's: matrices in lists, a part of them filled in the second step, None before that."""
    def update(self, p, state, group):
        if not state:
            state.update(GG=[torch.eye(p.shape[0]), []], Q=None, first=True, n=0)
        state["n"] += 1
        state["GG"][0].lerp_(torch.full((len(p), len(p)), float(state["n"])), 0.1)
        if state["n"] == 2:
            state["Q"], state["first"] = [state["GG"][0].bfloat16()], False
        return 1 if state["first"] else state["GG"][0].mean() + state["Q"][0].float().mean()

class Nested(Optimizer):
    """As SPAM's and ScalableShampoo's: dictionaries, with keys that JSON would turn into strings."""
    def update(self, p, state, group):
        if not state:
            state["precond"] = {0: {"a": torch.ones(2)}, (1, "b"): (torch.tensor(1), None, True, float("inf"))}
            state["precond"]["0"] = {"a": 3 * torch.ones(2)}
        state["precond"][0]["a"] += 1
        assert state["precond"][1, "b"][1:] == (None, True, float("inf"))
        return state["precond"][0]["a"][1] + state["precond"]["0"]["a"][0]

class HalfPrecision(Optimizer):
    """As prodigyplus: load_state_dict() makes fp32 of it, and fp32 rounds otherwise. Also of integers."""
    def update(self, p, state, group):
        state["mean"] = state.get("mean", torch.zeros_like(p, dtype=torch.bfloat16)) * 0.9 + p.grad.bfloat16()
        state["n"] = state.get("n", torch.zeros(2, dtype=torch.int64)) + 2**24 + 1
        return state["mean"].float() + (state["n"] % 7).sum()

class Columns(Optimizer):
    """As SOAP's: matrices column by column, of whose products the last bits are others than row by row."""
    def update(self, p, state, group):
        if not state:
            state["Q"] = torch.randn(p.shape[1], p.shape[1], generator=torch.Generator().manual_seed(0)).t()
        return p.grad @ state["Q"] @ state["Q"] / p.grad

class Draws(Optimizer):
    """As SGLD, stochastic rounding, random projections: torch's numbers, also in its constructor. train.py seeds them
    for each step."""
    def begin(self):
        self.param_groups[0]["scale"] = torch.rand(())

    def update(self, p, state, group):
        if not state:
            state["projection"] = torch.randn_like(p)
        return group["scale"] + 0.1 * (torch.randn_like(p) + state["projection"])

# ---- and that it does not --------------------------------------------------------------------------------------------

class Attribute(Optimizer):
    """As StableSPAM's total_steps; it stands for counters, generators and windows of any kind that an object has."""
    def begin(self):
        self.t = 0

    def begin_step(self, group):
        self.t += 1

    def update(self, p, state, group):
        return self.t

class HalfPrecisionInAList(Optimizer):
    """load_state_dict() makes fp32 of it, and fp32 rounds otherwise."""
    def update(self, p, state, group):
        mean, = state.get("mean", [torch.zeros_like(p, dtype=torch.bfloat16)])
        state["mean"] = [mean * 0.9 + p.grad.bfloat16()]
        return state["mean"][0].float()

class GlobalGenerator(Optimizer):
    def update(self, p, state, group):
        return random.random()

class ObjectInState(Optimizer):
    """As Automagic's Auto8bitTensor."""
    def update(self, p, state, group):
        state["moment"] = types.SimpleNamespace(x=p.grad)
        return 1

class StateOfAll(Optimizer):
    def update(self, p, state, group):
        self.state["all"] = dict(n=self.state["all"].get("n", 0) + 1)
        return self.state["all"]["n"]

class OneTensorTwice(Optimizer):
    """In the group and in the state: read back, they would be two."""
    def begin_step(self, group):
        group.setdefault("d", torch.ones(1)).add_(1)

    def update(self, p, state, group):
        state.setdefault("d", group["d"])
        return state["d"]

class NoTrain(Optimizer):
    """As if it had an average."""
    def eval(self):
        pass

class TensorForItsRate(Optimizer):
    """As torchao's _AdamW. The loop sets a number."""
    def begin(self):
        self.param_groups[0]["lr"] = torch.tensor(0.01)

    def begin_step(self, group):
        group["lr"].item()

class ChangesNothing(Optimizer):
    def update(self, p, state, group):
        return 0

class FailsInItsStep(Optimizer):
    def update(self, p, state, group):
        return {}["missing"]

# torch.optim's, by their defaults, and those of other packages with what they need
TORCH = "Adadelta Adagrad Adam Adamax ASGD NAdam RAdam RMSprop Adafactor Muon"
KEPT = [f"torch.optim.{name}" for name in TORCH.split()]
KEPT += ["bitsandbytes.optim.PagedAdEMAMix8bit", "bitsandbytes.optim.Lion8bit", "schedulefree.RAdamScheduleFree",
         "schedulefree.AdamWScheduleFreeReference", "prodigyplus.ProdigyPlusScheduleFree", "prodigyopt.Prodigy"]
OWN = [f"{__name__}.{c.__name__}" for c in (TensorInGroup, Lists, Nested, HalfPrecision, Draws, Columns)]
ELSEWHERE = [Attribute, HalfPrecisionInAList, GlobalGenerator, OneTensorTwice]
LOST = dict.fromkeys(ELSEWHERE, "would take other steps")
LOST |= {ObjectInState: "cannot keep SimpleNamespace", StateOfAll: "cannot keep 'all'", FailsInItsStep: "KeyError",
         ChangesNothing: "by 0.0e+00 a step", NoTrain: "no attribute 'train'", TensorForItsRate: "'item'"}

@pytest.mark.parametrize("optimizer", LOST, ids=lambda c: c.__name__)
def test_what_a_checkpoint_cannot_keep_is_refused_before_the_first_step(small, tmp_path, optimizer):
    result = run_script("train.py", *small.flags, "--optimizer", f"{__name__}.{optimizer.__name__}",
                        "--out_dir", tmp_path / "a")
    assert result.status == 1 and is_one_line(result.errors[0], f"--optimizer {__name__}", LOST[optimizer]), result.err
    assert not (tmp_path / "a/log.jsonl").exists() and "step 1" not in result.out

@pytest.mark.parametrize("text", ["import no_such_package", "1 / 0", "def f(:", "raise SystemExit"], ids=str)
def test_a_module_that_fails_when_it_is_imported_is_one_line(tmp_path, monkeypatch, text):
    (tmp_path / "broken.py").write_text(text, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    result = run_script("train.py", "--optimizer", "broken.Best")
    assert result.status == 2 and len(result.errors) == 1, result.err
    assert is_one_line(result.errors[0], "--optimizer: broken.Best cannot be imported"), result.err

def maker(optimizer, ema=0, lr=None, **more):
    """-> make_optimizer as train.py has it."""
    lr = lr or (1 if "rodigy" in optimizer else 0.01)
    args = types.SimpleNamespace(optimizer=optimizer, ema=ema, lr=lr, weight_decay=0.01,
                                 optimizer_args=list(more.items()), lr_scheduler="constant")
    return optimizers.find_optimizer(args, None)

def trial(make_optimizer, factor=0.1):
    """training/preflight.py's, on a LoRA of three layers, the second halves of which are multiplied by factor."""
    torch.manual_seed(0)
    lora = {}
    for n in range(3):
        lora[f"{n}.lora_A"] = torch.nn.Parameter(0.1 * torch.randn(16, 320))
        lora[f"{n}.lora_B"] = torch.nn.Parameter(factor * torch.randn(512, 16))
    before = {name: p.detach().clone() for name, p in lora.items()}
    with tempfile.TemporaryDirectory() as folder:
        preflight.check_optimizer(make_optimizer.args[1], lora, make_optimizer, Path(folder))
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in lora.items())

def skip_unless_it_can(optimizer, ema):
    pytest.importorskip(optimizer.split(".")[0])
    if ema and "ScheduleFree" in optimizer:
        pytest.skip("has an average of its own")

@pytest.mark.parametrize("ema", [0, 0.3])
@pytest.mark.parametrize("optimizer", KEPT)
def test_published_optimizers_pass_the_trial_which_changes_nothing(optimizer, ema):
    """With an average, too."""
    skip_unless_it_can(optimizer, ema)
    torch.manual_seed(3)
    state = random.getstate()
    trial(maker(optimizer, ema))
    assert random.getstate() == state

class ByNorm(Optimizer):
    """As LAMB, LARS and Fromage: a zero stays a zero."""
    def update(self, p, state, group):
        return p.norm() / p.grad.norm()

class NeverA(Optimizer):
    """It moves one half of a LoRA."""
    def update(self, p, state, group):
        return (len(p) > 16) / p.grad.abs()

HIGHER, FACTOR = "give a higher --lr", "give --lr 1"
MOVES = [ # optimizer, --lr, and what is said of it; a word of a warning, or of an error that names a remedy
    ("bitsandbytes.optim.LAMB", 1e-3, HIGHER), (f"{__name__}.ByNorm", 1, HIGHER), (f"{__name__}.NeverA", 1, HIGHER),
    ("torch.optim.Adafactor", 1e-4, HIGHER), ("torch.optim.Adafactor", 1e-3, "slowly"),
    ("torch.optim.Adafactor", 1e-2, ""), ("torch.optim.SGD", 1e-3, HIGHER), ("torch.optim.SGD", 1, ""),
    ("prodigyopt.Prodigy", 1e-4, FACTOR), ("prodigyopt.Prodigy", 1, ""),
    ("prodigyplus.ProdigyPlusScheduleFree", 1e-4, FACTOR), ("prodigyplus.ProdigyPlusScheduleFree", 1, ""),
    ("torch.optim.AdamW", 1e-6, ""), ("torch.optim.RAdam", 1e-4, ""),
    ("torch.optim.Muon", 1e-4, ""), ("schedulefree.AdamWScheduleFree", 1e-5, ""),
    ("bitsandbytes.optim.AdamW8bit", 1e-5, "")]

@pytest.mark.parametrize("optimizer, lr, said", MOVES)
def test_what_hardly_moves_a_lora_at_its_rate_is_refused_and_what_is_slow_is_said(optimizer, lr, said):
    """B begins at zero. What is compared is how far AdamW moves each number."""
    skip_unless_it_can(optimizer, 0)
    common.warn_once.cache_clear()
    seen = len(common.WARNED)
    line = ""
    try:
        trial(maker(optimizer, lr=lr), factor=0)
    except common.InputError as e:
        line = str(e)
        assert is_one_line(line, f"--optimizer {optimizer}", f"--lr {lr:g}"), line
    assert bool(line) == said.startswith("give") and len(common.WARNED) - seen == (said == "slowly"), line
    assert said in "".join([line, *common.WARNED[seen:]])

DECAYS = { # optimizer: its other arguments, and whether the weight decay would be a part of its gradients
    "torch.optim.AdamW": ({}, False), "torch.optim.Muon": ({}, False), "torch.optim.Adafactor": ({}, False),
    "torch.optim.SGD": (dict(momentum=0.9), True), "torch.optim.RAdam": ({}, True), "torch.optim.NAdam": ({}, True),
    "torch.optim.Adam": ({}, True), "torch.optim.RMSprop": ({}, True), "torch.optim.Adamax": ({}, True),
    "torch.optim.NAdam ": (dict(decoupled_weight_decay=True), False), "bitsandbytes.optim.AdamW8bit": ({}, False),
    "schedulefree.AdamWScheduleFree": ({}, False), "prodigyopt.Prodigy": ({}, False),
    "prodigyopt.Prodigy ": (dict(decouple=False), True), f"{__name__}.Draws": ({}, False)}

@pytest.mark.parametrize("optimizer", DECAYS)
def test_a_weight_decay_that_a_class_adds_to_its_gradients_is_zero_unless_it_is_given(optimizer, monkeypatch):
    """Then a line says so. Measuring it draws none of torch's numbers."""
    skip_unless_it_can(optimizer, 0)
    more, coupled = DECAYS[optimizer]
    for given in (False, True):
        if given:
            monkeypatch.setattr("sys.argv", ["train.py", "--weight_decay=0.01"])
        common.warn_once.cache_clear()
        seen = len(common.WARNED)
        lora = random_lora()
        torch.manual_seed(0)
        group = maker(optimizer.strip(), **more)(lora.values()).param_groups[0]
        assert group.get("weight_decay", 0.01) == (0 if coupled and not given else 0.01)
        assert len(common.WARNED) - seen == (coupled and given)
        if "Draws" in optimizer:
            torch.manual_seed(0)
            assert group["scale"] == torch.rand(())

def test_what_an_optimizer_has_found_for_its_rate_is_in_the_log(small, tmp_path):
    for optimizer, wanted in (("tests.test_optimizers.TensorInGroup", [1.5, 2.25]), ("torch.optim.Adafactor", [0, 0])):
        out_dir = tmp_path / optimizer
        result = works("train.py", *small.flags, "--optimizer", optimizer, "--lr", 0.1, "--max_steps", 2, "--out_dir",
                       out_dir)
        assert [r.get("d", 0) for r in log_of(out_dir)] == wanted
        assert ("  d 2.2e+00" in result.out) == (wanted[0] > 0), result.out

def random_lora(factor=0.1):
    torch.manual_seed(0)
    return {"a": torch.nn.Parameter(torch.randn(16, 64)), "b": torch.nn.Parameter(factor * torch.randn(128, 16))}

def checkpoint_of(folder, optimizer, lora):
    """It returns what resume.read_checkpoint makes of a checkpoint's optimizer, beside this LoRA."""
    with optimizers.averaged_weights(optimizer):
        resume.save_optimizer(folder, optimizer, lora)
        tensors = {f"transformer.{name}": p.detach().clone() for name, p in lora.items()}
    return resume.Checkpoint(folder, tensors, *resume.read_optimizer(folder))

@pytest.mark.parametrize("ema", [0, 0.3])
@pytest.mark.parametrize("optimizer", KEPT + OWN)
def test_what_an_optimizer_has_saved_is_put_back_to_the_bit(tmp_path, optimizer, ema):
    """After one, two and thirty steps, from zeros and from other weights: the next steps are those of an optimizer that
    went on. What was read stays as it was."""
    skip_unless_it_can(optimizer, ema)
    make_optimizer = maker(optimizer, ema)
    for factor in (0, 0.1):
        lora, resumed = random_lora(factor), random_lora(factor)
        made = make_optimizer(lora.values())
        for steps in (range(1), range(1, 2), range(2, 30)):
            resume.take_steps(made, lora, steps, 0.01)
            checkpoint = checkpoint_of(tmp_path, made, lora)
            resume.take_steps(made, lora, range(90, 93), 0.01)
            before = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
            second = make_optimizer(resumed.values())
            resume.load_checkpoint(checkpoint, resumed, second, make_optimizer)
            resume.take_steps(second, resumed, range(90, 93), 0.01)
            assert_bitwise([p.detach() for p in resumed.values()], [p.detach() for p in lora.values()])
            assert all(torch.equal(checkpoint.tensors[name].nan_to_num(), x.nan_to_num()) for name, x in before.items())

def test_a_run_goes_on_as_if_no_trial_had_been(small, tmp_path, monkeypatch):
    """To the bit."""
    flags = [*small.flags, "--max_steps", 3, "--lora_dropout", 0.3]
    assert run_script("train.py", *flags, "--out_dir", tmp_path / "a").status == 0
    monkeypatch.setattr(preflight, "check", lambda *arguments: None)
    assert run_script("train.py", *flags, "--out_dir", tmp_path / "b").status == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")

def test_a_late_state_that_cannot_be_kept_is_one_line(small, tmp_path, monkeypatch):
    """Also where the trial has not seen it."""
    monkeypatch.setattr(preflight, "check", lambda *arguments: None)
    result = run_script("train.py", *small.flags, "--optimizer", f"{__name__}.ObjectInState", "--out_dir",
                        tmp_path / "a")
    assert result.status == 1 and is_one_line(result.errors[0], "cannot keep SimpleNamespace"), result.err

def test_a_checkpoints_state_is_json_and_tensors(small, tmp_path):
    """Counters stay on the CPU on any device; a list stays a list; numbers have their type."""
    turned = torch.randn(2, 3, 4).permute(2, 0, 1)[:, :, :2]
    value = {"a": [1, 1.0, True, None, "x", (), {}, float("inf")], 2: (torch.tensor(3), torch.ones(2, 2)),
             "2": [torch.zeros(2, dtype=torch.bfloat16)], (1, "b"): {0.5: torch.ones(1)}, "turned": turned}
    tensors = {}
    text = json.dumps(resume.to_json(value, "path", tensors))
    assert len(tensors) == 5
    back = resume.from_json(json.loads(text), tensors, "cpu")
    assert repr(back) == repr(value) and not tensors and back["turned"].stride() == turned.clone().stride()
    for bad in (object(), {1}, [b"bytes"], torch.float32, {object(): 1}, np.float64(1)):
        with pytest.raises(TypeError):
            resume.to_json(bad, "path", {})

# ---- several processes -----------------------------------------------------------------------------------------------

def unsaved():
    """For a child process: what each of them has in the end, beside what the first one saves."""
    def compare(out_dir, step, parameters, real=failures.compare_loras):
        real(out_dir, step, parameters)
        torch.save([p.detach().clone() for p in parameters], out_dir.with_name(f"rank-{common.rank()}"))
    failures.compare_loras = compare

def test_an_optimizer_that_draws_numbers_takes_the_same_step_on_each_process(small, tmp_path, start):
    """Each has its own dropout, whose seeds are the process's, before the step."""
    flags = [*small.flags, "--optimizer", f"{__name__}.Draws", "--lr", 1e-2, "--lora_dropout", 0.1, "--max_steps", 4,
             "--out_dir", tmp_path / "a"]
    ranks = start_ranks(start, *flags, preludes=[unsaved, unsaved])
    assert [r.wait() for r in ranks] == [0, 0], [r.output() for r in ranks]
    assert_bitwise(*[torch.load(tmp_path / f"rank-{n}") for n in (0, 1)])

def nudges_at(step):
    """For a child process: after this step one of its weights is another number."""
    real, calls = torch.optim.AdamW.step, []

    def nudged(self):
        real(self)
        calls.append(1)
        if len(calls) == step:
            self.param_groups[0]["params"][-1].data.view(-1)[-1] += 1e-4
    torch.optim.AdamW.step = nudged

@pytest.mark.parametrize("at, more, since, found", [
    (3, ["--save_every", 2], 2, 4), (1, ["--save_every", 9], 0, 5), (5, ["--save_every", 4], 4, 5)], ids=str)
def test_processes_that_part_end_the_run_before_they_write_a_checkpoint(small, tmp_path, start, at, more, since, found):
    """In one weight, and noticed where the next checkpoint or the finished LoRA would be written. What the error names
    goes on from where they were equal."""
    flags = [*small.flags, "--optimizer", "torch.optim.AdamW", "--max_steps", 5, *more, "--out_dir", tmp_path / "a"]
    ranks = start_ranks(start, *flags, preludes=[None, functools.partial(nudges_at, at)])
    assert [r.wait() for r in ranks] == [1, 1], [r.output() for r in ranks]
    last = ranks[0].output().strip().splitlines()[-1]
    assert is_one_line(last, "process 1 ", f"at step {found}", f"at step {since};", "--resume"), last
    assert not ranks[1].output().strip()
    assert steps_of(tmp_path / "a") == [since] * bool(since) and not (tmp_path / "a/DONE").exists()
    result = run_script("train.py", *flags, "--resume")
    assert result.status == 0 and [r["step"] for r in log_of(tmp_path / "a")] == [1, 2, 3, 4, 5], result.err
    assert lora_of(tmp_path / "a")

def test_any_bit_of_any_weight_changes_the_digest():
    """Also two weights that are exchanged, in one matrix or between two, and a zero's sign."""
    torch.manual_seed(0)
    a, b = torch.randn(3, 5), torch.randn(4)
    digests = [failures.digest([a, b]), failures.digest([b, a]), failures.digest([a[:, [1, 0, 2, 3, 4]], b])]
    for tensor in (a, b):
        bits = tensor.view(torch.int32).view(-1)
        for place in range(len(bits)):
            for bit in range(32):
                before = bits[place].item()
                bits[place] = before ^ (1 << bit if bit < 31 else -2**31)
                digests.append(failures.digest([a, b]))
                bits[place] = before
    assert len(set(digests)) == len(digests) == 3 + 19 * 32 and failures.digest([a, b]) == digests[0]
