"""
Schedule-free optimizers (arxiv.org/abs/2405.15682): they train other weights (y) than those that are of use (x, an
average). Pictures, losses of validations and every LoRA's file have x; the training goes on with y.

$ python -m pytest -q tests/test_schedule_free.py    # ten seconds
"""
import pytest
import torch

import common
from tests.harness import (EXACT, NATIVE, add_item, assert_bitwise, assert_same_run, lora_of, run_script,
                           validations_of)

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

OPTIMIZERS = {f"{__name__}.ScheduleFreeSGD": 10, "schedulefree.AdamWScheduleFree": 1e-2,
              "prodigyplus.ProdigyPlusScheduleFree": 1}

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return add_item(add_item(folder / "data", "a"), "b", [(96, 64), (64, 64)])

def flags_of(data, optimizer):
    return ["--data", data, "--cache_dir", data.parent / "cache", "--batch_size", 2, "--lora_rank", 4, "--lora_alpha",
            6, "--lora_targets", "to_q", "to_v", "--lr_scheduler", "constant", "--warmup_steps", 0, "--optimizer",
            optimizer, "--lr", OPTIMIZERS.get(optimizer, 1e-3), "--num_inference_steps", 2, *NATIVE, *EXACT,
            "--device", "cpu"]

def train(out_dir, flags, *more):
    result = run_script("train.py", *flags, "--out_dir", out_dir, *more)
    assert result.status == 0, result.err
    return result

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
        assert_bitwise(saved, averages)
        assert not all(torch.equal(y, x) for y, x in zip(trained, saved.values()))
        # so is what the validation saw
        ns["transformer"].eval()
        ns["val_samples"][:] = looked.globals["val_samples"]
        with torch.no_grad():
            total, count = ns["validation_loss"]()
            assert total.item() / count == validations_of(tmp_path / "looked")[n - 1]["val_loss"]
    assert_bitwise(lora_of(tmp_path / "alone"), {k: v * (1.5 if "lora_B" in k else 1) for k, v in saved.items()})

def test_other_optimizers_have_files_without_a_second_copy(tmp_path, data):
    ns = train(tmp_path / "a", flags_of(data, "torch.optim.AdamW"), "--val_data", "--max_steps", 1).globals
    moments, _ = common.read_tensors(tmp_path / "a/checkpoint-000001/optimizer.safetensors")
    assert {name.split(".")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}
    assert {*ns["optimizer"].state[next(iter(ns["lora"].values()))]} == {"exp_avg", "exp_avg_sq", "step"}
