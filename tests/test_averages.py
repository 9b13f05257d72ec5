"""
Optimizers that train other weights (y) than those that are of use (x, an average): schedule-free ones
(arxiv.org/abs/2405.15682), and any with --ema. Pictures, losses of validations and every LoRA's file have x; the
training goes on with y.

$ python -m pytest -q tests/test_averages.py    # thirty seconds
"""
import contextlib
import os
import re
from types import SimpleNamespace

import pytest
import torch
from diffusers.training_utils import EMAModel

from library.files import disk, tensor_files
from training import failures, memory_fit, optimizers, plan, resume, run_folder
from tests.harness import (EXACT, NATIVE, add_item, assert_bitwise, assert_same_run, curve, log_of, lora_of, refused,
                           run_script, validations_of, works)

class ScheduleFreeSGD(torch.optim.Optimizer):
    """As in the package schedulefree: a step wants train(); x and y are made of each other, which rounds. Like that of
    prodigyplus it keeps a part of its state in bf16."""
    def __init__(self, params, lr, weight_decay, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta, k=0, train_mode=False))

    def turn(self, train):
        for group in self.param_groups:
            weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
            for p in group["params"] if group["train_mode"] != train else []:
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = train

    def train(self):
        self.turn(True)

    def eval(self):
        self.turn(False)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for y in group["params"]:
                state = self.state[y]
                if not state:
                    state["z"], state["mean"] = y.clone(), torch.zeros_like(y, dtype=torch.bfloat16)
                state["mean"].mul_(0.9).add_(y.grad)
                y.lerp_(state["z"], 1 / group["k"])
                y.sub_(state["mean"], alpha=group["lr"] * (1 - group["beta"] * (1 - 1 / group["k"])))
                state["z"].sub_(state["mean"], alpha=group["lr"])

class TwoGroups(torch.optim.Optimizer):
    """Each second matrix is in another group; what it keeps of a parameter has the name that --ema's might have."""
    def __init__(self, params, lr, weight_decay):
        params = list(params)
        super().__init__([dict(params=params[::2]), dict(params=params[1::2])], dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["ema"] = 0.5 * state.get("ema", p.grad) + 0.5 * p.grad
                p.sub_(state["ema"], alpha=group["lr"])

OPTIMIZERS = {f"{__name__}.ScheduleFreeSGD": 10, "schedulefree.AdamWScheduleFree": 1e-2,
              "prodigyplus.ProdigyPlusScheduleFree": 1, "torch.optim.AdamW --ema 0.3": 1e-2}
# by where they keep state: filled when it is empty, nowhere, in the group, in two groups (more: test_optimizers.py)
WITH_EMA = {"torch.optim.AdamW": 1e-2, "torch.optim.SGD": 10, "tests.test_optimizers.TensorInGroup": 1e-2,
            f"{__name__}.TwoGroups": 10}

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return add_item(add_item(folder / "data", "a"), "b", [(96, 64), (64, 64)])

def flags_of(data, optimizer):
    return ["--data", data, "--cache_dir", data.parent / "cache", "--batch_size", 2, "--lora_rank", 4, "--lora_alpha",
            6, "--lora_targets", "to_q", "to_v", "--lr_scheduler", "constant", "--warmup_steps", 0, "--optimizer",
            *optimizer.split(), "--lr", (OPTIMIZERS | WITH_EMA)[optimizer], "--num_inference_steps", 2, *NATIVE, *EXACT,
            "--device", "cpu"]

def train(out_dir, flags, *more):
    return works("train.py", *flags, "--out_dir", out_dir, *more)

def for_use(state):
    """It returns a LoRA with the scale of these runs in lora_B, as files have it."""
    return {name: tensor * (1.5 if "lora_B" in name else 1) for name, tensor in state.items()}

@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_files_have_the_average_and_the_training_goes_on_as_if_nobody_had_looked(tmp_path, data, optimizer):
    """Bit for bit: a run that is validated and saved after every step, a run that is resumed, and one that is left
    alone. Each checkpoint's LoRA, as predict.py loads it, is what the optimizer itself calls the average; another one
    is trained."""
    pytest.importorskip(optimizer.split(".")[0])
    flags = flags_of(data, optimizer)
    alone = train(tmp_path / "alone", flags, "--val_data", "--max_steps", 5)
    often = ["--save_every", 1, "--keep", 9, "--sample_every", 1, "--val_data", data]
    looked = train(tmp_path / "looked", flags, *often, "--max_steps", 5)
    assert_same_run(tmp_path / "looked", tmp_path / "alone")
    for steps in (2, 5):
        train(tmp_path / "resumed", flags, "--val_data", "--max_steps", steps, *["--resume"] * (steps > 2))
    assert_same_run(tmp_path / "resumed", tmp_path / "alone")
    for n in (3, 5):
        ns = train(tmp_path / f"{n}", flags, "--val_data", "--max_steps", n).globals if n < 5 else alone.globals
        trained = [p.detach().clone() for p in ns["lora"].values()]
        assert not any("trained" in state for state in ns["optimizer"].state.values())
        ns["optimizer"].eval()
        averages = {f"transformer.{name.replace('.default', '')}": p.data for name, p in ns["lora"].items()}
        saved = lora_of(tmp_path / f"looked/checkpoint-{n:06d}")
        assert_bitwise(saved, for_use(averages))
        assert not all(torch.equal(y, x) for y, x in zip(trained, averages.values()))
        # so is what the validation saw
        ns["transformer"].eval()
        ns["val_samples"][:] = looked.globals["val_samples"]
        with torch.no_grad():
            assert ns["validation_loss"]().mean().item() == validations_of(tmp_path / "looked")[n - 1]["val_loss"]
    assert_bitwise(lora_of(tmp_path / "alone"), saved)

def test_other_optimizers_have_files_without_a_second_copy(tmp_path, data):
    """And --ema 0 leaves the class as it is."""
    ns = train(tmp_path / "a", flags_of(data, "torch.optim.AdamW"), "--val_data", "--max_steps", 1).globals
    moments, _ = tensor_files.read_tensors(tmp_path / "a/checkpoint-000001/optimizer.safetensors")
    # (lora_B as it is trained, since the file for use has its scale in it)
    assert {name.split(".")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "step", "trained"}
    assert type(ns["optimizer"]) is torch.optim.AdamW
    assert {*ns["optimizer"].state[next(iter(ns["lora"].values()))]} == {"exp_avg", "exp_avg_sq", "step"}

# ---- --ema -----------------------------------------------------------------------------------------------------------

def share_of(n, decay):
    """The weight of the n-th step's weights in the average."""
    return 1 - min(decay, n / (n + 9))

@pytest.mark.parametrize("optimizer", WITH_EMA)
def test_the_average_is_that_of_a_run_without_and_the_training_is_the_same(tmp_path, data, optimizer):
    """Bit for bit: the average of each checkpoint, computed here from the checkpoints of a run without --ema; the
    losses of both runs; and a run that is resumed after its third step, within the average's warm-up."""
    pytest.importorskip(optimizer.split(".")[0])
    flags = [*flags_of(data, optimizer), "--val_data", "--save_every", 1, "--keep", 9]
    train(tmp_path / "plain", flags, "--max_steps", 6)
    train(tmp_path / "ema", flags, "--max_steps", 6, "--ema", 0.37)
    assert curve(log_of(tmp_path / "ema")) == curve(log_of(tmp_path / "plain"))
    average = {}
    for n in range(1, 7):
        trained = resume.read_checkpoint(tmp_path / f"plain/checkpoint-{n:06d}").lora
        for name, w in trained.items():
            average[name] = torch.lerp(average.get(name, w), w, share_of(n, 0.37))
        assert_bitwise(lora_of(tmp_path / f"ema/checkpoint-{n:06d}"), for_use(average))
    assert not all(torch.equal(trained[name], average[name]) for name in trained)
    assert_bitwise(lora_of(tmp_path / "ema"), for_use(average))
    for steps in (3, 6):
        train(tmp_path / "resumed", flags, "--ema", 0.37, "--max_steps", steps, *["--resume"] * (steps > 3))
    assert_same_run(tmp_path / "resumed", tmp_path / "ema")

def test_the_average_is_diffusers_and_forgets_its_start():
    """Also in its warm-up. Of a start that was wrong nothing is left after three hundred steps, whatever the decay."""
    for decay in (0.5, 0.9, 0.9999):
        p = torch.nn.Parameter(torch.zeros(3, 5))
        optimizer = optimizers.with_ema(torch.optim.SGD, decay)([p], lr=1)
        theirs = EMAModel([p], decay=decay)
        for n in range(300):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(n)) - (n == 20) * 100
            optimizer.step()
            theirs.step([p])
            torch.testing.assert_close(optimizer.state[p]["averaged"], theirs.shadow_params[0])
        assert (optimizer.state[p]["averaged"] - p).abs().max() < 25

def test_what_fails_within_a_validation_leaves_the_trained_weights():
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = optimizers.with_ema(torch.optim.SGD, 0.5)([p], lr=1)
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
    trained = p.detach().clone()
    with pytest.raises(ZeroDivisionError), optimizers.averaged_weights(optimizer):
        assert not torch.equal(p, trained)
        1 / 0
    assert torch.equal(p, trained) and "trained" not in optimizer.state[p]

def test_half_a_step_with_ema_is_noticed():
    """training/failures.py counts the changes of torch's own optimizers; with --ema they are still known as torch's."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = optimizers.with_ema(torch.optim.AdamW, 0.9)([p])
    for change in (lambda: p.add_(1), lambda: optimizer.state[p]["averaged"].add_(1)):
        p.grad = torch.ones(3)
        optimizer.step()
        before = failures.versions_of(optimizer, 1)
        assert before == failures.versions_of(optimizer, 1)
        with torch.no_grad():
            change()
        assert before != failures.versions_of(optimizer, 1)

def test_the_average_is_counted_wherever_memory_and_room_are(tmp_path, data, monkeypatch):
    """On the card, in --plan's table, on the disk, and in what a checkpoint may be long."""
    model = torch.nn.Linear(10, 10, bias=False)
    assert [memory_fit.learning_bytes(model, SimpleNamespace(ema=ema)) for ema in (0, 0.9)] == [5 * 400, 6 * 400]
    monkeypatch.setattr(plan, "GIB", 2**20)
    flags = [*flags_of(data, "torch.optim.AdamW"), "--val_data", "--lora_rank", 64, "--plan"]
    rows = []
    for ema in (0, 0.9):
        planned = run_script("train.py", *flags, "--ema", ema)
        rows.append(re.search(r"^ +[\d.]+ +([\d.]+).*as given", planned.out, re.M)[1])
    assert float(rows[1]) == pytest.approx(float(rows[0]) * 4 / 3, abs=0.02)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(total=10**12, free=19 * 10**6))
    run_folder.check_room(tmp_path, 10**6, 1)
    with refused(tmp_path, "takes 0.02 GB"):
        run_folder.check_room(tmp_path, 10**6, 1, ema=0.9)
    (tmp_path / "long").touch()
    for moments in (5, 7):
        os.truncate(tmp_path / "long", moments * 4 * 2**26)
        with refused("over") if moments > 5 else contextlib.nullcontext():
            resume.refuse_long_state(tmp_path / "long", dict(a=torch.empty(2**26, device="meta")), "torch.optim.AdamW")
