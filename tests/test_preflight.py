"""
What a run does first at its end is tried before its first step (training/preflight.py): edits that break it, as a
person could make them, end the run there with one line. The optimizer's part has its tests in test_optimizers.py.

$ python -m pytest -q tests/test_preflight.py    # half a minute
"""
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

import predict
from training import preflight
from tests.harness import ADAMW, HERE, is_one_line, run_script

def edit(monkeypatch, module, name, old, new):
    """It replaces a function of a module by one with this change of its text."""
    text, names = inspect.getsource(getattr(module, name)), dict(vars(module))
    assert text.count(old) == 1
    exec(text.replace(old, new), names)
    monkeypatch.setattr(module, name, names[name])

def refused_run(small, out_dir, script="train.py", *flags):
    """It returns the line that ends the run before its first step; nothing is left of the trial."""
    result = run_script(script, *small.flags, *ADAMW, *flags, "--out_dir", out_dir)
    assert result.status == 1 and len(result.errors) == 1 and is_one_line(result.errors[0], out_dir), result.err
    assert "step 1" not in result.out and [path.name for path in out_dir.iterdir() if path.name != ".lock"] == []
    return result.errors[0]

# edits of predict.save_lora, by what they add before or put instead of a part of its text
CONFIG = "    tensor_files.refuse_not_finite("
ONE_LESS = f"    state = {{key: state[key] for key in state if '1.attn.to_q' not in key}}\n{CONFIG}"
HALVES = f"    state = {{key: state[key].half() for key in state}}\n{CONFIG}"
SWAP = ".replace('to_q', 'to_?').replace('to_v', 'to_q').replace('to_?', 'to_v')"
SWAPPED = f"    state = {{key{SWAP}: state[key] for key in state}}\n{CONFIG}"
# and of others
FULL_LAYER = ("add_lora", "    return {", "    transformer.norm_out.linear.weight.requires_grad_()\n    return {")
COPIES = ("find_layers", "return dict(", "return dict(modules_to_save=['norm_out'], ")
ALPHA = ["--lora_alpha", 3]
EDITS = { # (the function, its text, another one); words of the line
    "a layer is not saved": (("save_lora", CONFIG, ONE_LESS), "lacks transformer.transformer_blocks.1.attn.to_q"),
    "the scale changes the model": (("save_lora", "state[key] = state[key] * scale", "state[key].mul_(scale)"),
                                    "other numbers"),
    "two layers change places": (("save_lora", CONFIG, SWAPPED), "other numbers"),
    "half precision": (("save_lora", CONFIG, HALVES), "other numbers"),
    "a full layer is not saved": (FULL_LAYER, "lacks transformer.norm_out.linear.weight"),
    "a layer is trained as a copy": (COPIES, "norm_out.linear.bias; take another")}

@pytest.mark.parametrize("what", EDITS)
def test_a_file_that_would_not_hold_what_is_trained_ends_the_run_before_its_first_step(
        small, tmp_path, monkeypatch, what):
    """Whichever function of predict.py a person has changed."""
    (name, old, new), words = EDITS[what]
    edit(monkeypatch, predict, name, old, new)
    assert words in refused_run(small, tmp_path, "train.py", *ALPHA)

MADE = "\noptimizer = make_optimizer(lora.values())"
TENSOR = "torch.nn.Parameter(torch.ones(3))"
TRAIN_EDITS = { # edits of train.py: its text, another one, words of the line
    "a tensor for the optimizer alone": (MADE, MADE.replace("lora.values()", f"[*lora.values(), {TENSOR}]"),
                                         "no checkpoint would keep"),
    "a group with another rate": (MADE, f"{MADE}\noptimizer.add_param_group(dict(params=[{TENSOR}], lr=1.0))",
                                       "several learning rates"),
    "a tensor beside the LoRA": (MADE, f"\nlora['mine'] = {TENSOR}{MADE}", "lacks transformer.mine"),
    "a checkpoint of another step": ("trained, step=step, config", "trained, step=step + 1, config", "together"),
    "a checkpoint with the scale in it": ("lora, trained, step", "lora, {}, step", "other numbers"),
    "a note that is no JSON": ("areas=areas, config", "areas=areas, mine=torch.ones(()), config", "a 0-d tensor")}

@pytest.mark.parametrize("what", TRAIN_EDITS)
def test_an_edit_of_train_that_a_checkpoint_cannot_keep_ends_the_run_likewise(small, tmp_path, monkeypatch, what):
    old, new, words = TRAIN_EDITS[what]
    text = (HERE / "train.py").read_text("utf-8")
    assert text.count(old) == 1
    (tmp_path / "train.py").write_text(text.replace(old, new), "utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert words in refused_run(small, tmp_path / "run", tmp_path / "train.py", *ALPHA)

def test_only_the_first_process_tries_the_files_and_a_plan_tries_nothing(small, tmp_path, monkeypatch):
    real, tried = preflight.check_files, []
    monkeypatch.setattr(preflight, "check_files", lambda *arguments: tried.append(arguments) or real(*arguments))
    assert run_script("train.py", *small.flags, "--plan").status == 0 and not tried
    result = run_script("train.py", *small.flags, "--max_steps", 1, "--out_dir", tmp_path)
    assert result.status == 0 and len(tried) == 1, result.err
    monkeypatch.setenv("RANK", "1")
    lora = {"a": torch.nn.Parameter(torch.ones(1))}
    monkeypatch.setattr(preflight, "check_optimizer", lambda *_: None) # which each process does for itself
    preflight.check(result.globals["args"], tmp_path, lora, torch.optim.SGD(lora.values()), None, None)
    assert len(tried) == 1

def test_what_a_start_that_was_killed_in_its_trial_has_left_is_gone_after_the_next_one(small, tmp_path, monkeypatch):
    """Without --resume, too, as that run had not begun."""
    command = ["train.py", *small.flags, *ADAMW, "--max_steps", 1, "--out_dir", tmp_path / "a"]
    with monkeypatch.context() as killed:
        killed.setattr(preflight, "shutil", SimpleNamespace(rmtree=lambda *_, **__: None))
        killed.setattr(preflight, "same_bits", lambda *_: False)
        assert run_script(*command).status == 1
    assert list((tmp_path / "a").glob(".tmp-*"))
    result = run_script(*command)
    assert result.status == 0 and not list((tmp_path / "a").glob(".tmp-*")), result.err
