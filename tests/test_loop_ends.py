"""
Nothing but the training ends a training, and whatever ends it saves what was learned: a failing log, tracker, bar,
validation or disk is one warning; an exception at any line of the loop leaves a checkpoint of the last whole step.

$ python -m pytest -q tests/test_loop_ends.py --full    # every line of the loop: two minutes; else every seventh
"""
import ast
import builtins
import errno
import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

import common
import predict
from extras import best, draw, resume, tracker
from tests.harness import (FULL, HERE, add_item, assert_bitwise, assert_same_run, curve, is_one_line, log_of,
                           records_of, run_script, start_ranks, steps_of, validations_of)

STEPS = 4

@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """A training of four steps that nothing disturbs, with a checkpoint of each; its flags; LoRAs by step."""
    folder = tmp_path_factory.mktemp("whole")
    flags = [*small.flags, "--max_steps", STEPS, "--warmup_steps", 0, "--lora_rank", 1]
    result = run_script("train.py", *flags, "--save_every", 1, "--keep", 9, "--out_dir", folder / "run")
    assert result.status == 0, result.err
    loras = {step: predict.read_lora(folder / f"run/checkpoint-{step:06d}")[0] for step in range(1, STEPS + 1)}
    return SimpleNamespace(run=folder / "run", flags=[*flags, "--save_every", 100], loras=loras)

class Planted(Exception):
    """What no line of ours expects."""

def lines_of_the_loop():
    """-> the first line of each statement in the loop of train.py."""
    tree = ast.parse((HERE / "train.py").read_text())
    loop, = [node for node in ast.walk(tree) if isinstance(node, ast.While) and "max_steps" in ast.unparse(node.test)]
    return sorted({node.lineno for node in ast.walk(loop) if isinstance(node, ast.stmt)} - {loop.lineno})

def raise_at(patch, line, step):
    """From now on train.py's loop raises before this line, once, in or after this step. -> a list that is filled
    then."""
    raised, real = [], common.progress

    def trace_line(frame, event, arg):
        if event == "line" and frame.f_lineno == line and frame.f_globals["step"] >= step and not raised:
            raised.append(frame.f_globals["step"])
            sys.settrace(None)
            raise Planted("planted")
        return trace_line

    def progress(what, *more, **options):
        if what == "training":
            sys.settrace(lambda *_: None)
            sys._getframe(1).f_trace = trace_line
        return real(what, *more, **options)
    patch.setattr(common, "progress", progress)
    return raised

def run_and_catch(*flags):
    """-> (run_script's result, None), or (None, the class of what the training raised)."""
    try:
        return run_script("train.py", *flags), None
    except Exception as e:
        tqdm._instances.clear()
        return None, type(e) # (its traceback would hold the folder's lock)

def check_newest(out_dir, whole, least):
    """The newest checkpoint is at least of this step, and has the LoRA of the undisturbed run at its step."""
    newest = max(steps_of(out_dir))
    assert newest >= least and steps_of(out_dir) == [newest]
    assert_bitwise(predict.read_lora(out_dir / f"checkpoint-{newest:06d}")[0], whole.loras[newest])
    return newest

LINES = lines_of_the_loop()

def test_an_exception_at_any_line_of_the_loop_leaves_the_last_whole_step(whole, tmp_path):
    """Before each statement in turn; the first few are resumed and end as the undisturbed run."""
    never = []
    for n, line in enumerate(LINES if FULL else LINES[::7]):
        out_dir = tmp_path / f"{line}"
        with pytest.MonkeyPatch.context() as patch:
            raised = raise_at(patch, line, 2)
            result, error = run_and_catch(*whole.flags, "--out_dir", out_dir)
            sys.settrace(None)
        if not raised: # such as what is done after an error
            never.append(line)
        elif error:
            assert error is Planted, line
            assert check_newest(out_dir, whole, raised[0]) == raised[0], line
        else: # a line of the log, a bar
            assert result.status == 0 and result.err.count("planted") == 1, (line, result.err)
        if error and n < 4:
            assert run_script("train.py", *whole.flags, "--out_dir", out_dir, "--resume").status == 0
            assert_same_run(out_dir, whole.run)
        shutil.rmtree(out_dir)
    assert len(never) < len(LINES) / 3, never
