"""
Nothing but the training ends a training, and whatever ends it saves what was learned: a failing log, tracker, bar,
validation or disk is one warning; an exception at any line of the loop leaves a checkpoint of the last whole step.

$ python -m pytest -q tests/test_loop_ends.py --full    # every line of the loop: two minutes; else every third
"""
import ast
import builtins
import errno
import gc
import json
import shutil
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

import cache
import common
from library.cli import command_line
from library.files import tensor_files
from library.lora import lora_paths
from library.models import devices
from training import best_step, run_folder, run_log, validation
import predict
import rope_patch
from tests.harness import (FULL, HERE, assert_bitwise, assert_same_run, is_one_line, log_of, run_script, start_ranks,
                           steps_of, validations_of, works)

STEPS = 4

@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """A training of four steps that nothing disturbs, with a checkpoint of each; its flags; LoRAs by step."""
    folder = tmp_path_factory.mktemp("whole")
    flags = [*small.flags, "--max_steps", STEPS, "--warmup_steps", 0, "--lora_rank", 1]
    works("train.py", *flags, "--save_every", 1, "--keep", 9, "--out_dir", folder / "run")
    loras = {step: predict.read_lora(folder / f"run/checkpoint-{step:06d}").state for step in range(1, STEPS + 1)}
    return SimpleNamespace(run=folder / "run", flags=[*flags, "--save_every", 100], loras=loras,
                           cache=shutil.copytree(small.cache, folder / "cache")) # for pictures of a validation

class Planted(Exception):
    """What no line of ours expects."""

class Left(SystemExit):
    """A library's sys.exit(3)."""
    def __init__(self):
        super().__init__(3)

def lines_of_the_loop():
    """-> the first line of each statement in the loop of train.py."""
    tree = ast.parse((HERE / "train.py").read_text(encoding="utf-8"))
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
    assert_bitwise(predict.read_lora(out_dir / f"checkpoint-{newest:06d}").state, whole.loras[newest])
    return newest

LINES = lines_of_the_loop()

def test_an_exception_at_any_line_of_the_loop_leaves_the_last_whole_step(whole, tmp_path):
    """Before each statement in turn; the first few are resumed and end as the undisturbed run."""
    never = []
    for n, line in enumerate(LINES if FULL else LINES[::3]):
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

def failing(patch, owner, name, calls, error=OSError(errno.EIO, "Input/output error"), after=None):
    """In the loop owner.name raises at these calls, counted from 1 (None: at all), after(*args) being called before ->
    the list of calls so far."""
    made, real, progress, begun = [], getattr(owner, name), common.progress, []

    def fail(*args, **kwargs):
        if not begun:
            return real(*args, **kwargs)
        made.append(args)
        if calls is None or len(made) in calls:
            if after:
                after(*args)
            raise error
        return real(*args, **kwargs)

    def progress_begins(what, *more, **options):
        if what == "training": # training/preflight.py, before, takes steps too
            begun.append(True)
        return progress(what, *more, **options)
    patch.setattr(owner, name, fail)
    patch.setattr(common, "progress", progress_begins)
    return made

# ---- what does not train is a warning --------------------------------------------------------------------------------

def failing_log(patch, numbers, half=False):
    """Opening log.jsonl to append fails at these calls (None: all); half: a part of the line is written first."""
    calls, real = [], builtins.open

    def open_file(file, mode="r", *args, **kwargs):
        if str(file).endswith("log.jsonl") and "a" in mode:
            calls.append(file)
            if numbers is None or len(calls) in numbers:
                if half:
                    with real(file, "a") as f:
                        f.write('{"step": 9, "lo')
                raise OSError(errno.EIO, "Input/output error")
        return real(file, mode, *args, **kwargs)
    patch.setattr(builtins, "open", open_file)

@pytest.mark.parametrize("numbers, half", [([2], False), ([2, 3], True), ([1, 4], True)])
def test_a_log_that_fails_is_one_warning_and_its_lines_come_later_in_order(whole, tmp_path, monkeypatch, numbers, half):
    """Also behind half a line, which is taken away; at the end the log is that of the undisturbed run."""
    failing_log(monkeypatch, numbers, half)
    result = run_script("train.py", *whole.flags, "--out_dir", tmp_path / "run")
    assert result.status == 0 and result.err.count("warning: ") == 1 and "log.jsonl: [Errno 5]" in result.err
    assert_same_run(tmp_path / "run", whole.run)
    lines = (tmp_path / "run/log.jsonl").read_text(encoding="utf-8").splitlines()
    records = list(map(json.loads, lines)) # no line is broken
    assert [r["warning"] for r in records if "warning" in r] == [result.err.strip()]
    page = run_script("tools/page.py", tmp_path / "run")
    assert page.status == 0 and "warning" not in page.err
    assert run_folder.is_record(lines[-1], STEPS) and best_step.read_validations(tmp_path / "run") == []

def test_a_log_that_fails_to_the_end_is_a_line_at_the_end(whole, tmp_path, monkeypatch):
    failing_log(monkeypatch, None)
    result = run_script("train.py", *whole.flags, "--out_dir", tmp_path / "run")
    assert result.status == 0 and result.err.count("warning: ") == 1
    assert f"its last {STEPS + 1} lines could not be written" in result.out
    assert (tmp_path / "run/DONE").exists() and log_of(tmp_path / "run") == []

def test_a_tracker_or_a_bar_that_fails_is_one_warning(whole, tmp_path, monkeypatch):
    """Whatever they raise, at each step."""
    def track(*_):
        raise Planted("no network")
    monkeypatch.setattr(run_log, "open_tracker", lambda *_: track)
    monkeypatch.setattr(command_line, "PACKAGES", {})
    for name in ("update", "close"):
        failing(monkeypatch, tqdm, name, None, Planted("no bar"))
    result = run_script("train.py", *whole.flags, "--out_dir", tmp_path / "run", "--tracker", "tensorboard")
    assert result.status == 0 and result.err.count("warning: ") == 2, result.err
    assert result.err.count("--tracker: no network") == result.err.count("the log or the bar: no bar") == 1
    assert_same_run(tmp_path / "run", whole.run)

def test_what_is_only_for_the_log_ends_no_run(whole, tmp_path, monkeypatch):
    """Such as the memory that the process has, which a container may not ask."""
    failing(monkeypatch, devices, "memory_of", None, Planted("access denied"))
    result = run_script("train.py", *whole.flags, "--out_dir", tmp_path / "run")
    assert result.status == 0 and result.err.count("warning: the log or the bar: access denied") == 1, result.err
    assert_bitwise(predict.read_lora(tmp_path / "run").state, predict.read_lora(whole.run).state)

@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), Left()])
def test_a_tracker_that_cannot_be_opened_is_one_line_before_the_training(whole, tmp_path, monkeypatch, error):
    def open_tensorboard(*_):
        raise error
    monkeypatch.setattr(run_log, "open_tensorboard", open_tensorboard)
    monkeypatch.setattr(command_line, "PACKAGES", {})
    result = run_script("train.py", *whole.flags, "--out_dir", tmp_path / "run", "--tracker", "tensorboard")
    assert result.status == 1 and is_one_line(result.errors[0], "--tracker tensorboard", "leave"), result.err
    assert "step 1/" not in result.out

def test_a_log_that_cannot_be_read_deletes_no_checkpoint_and_ends_no_run(whole, tmp_path, monkeypatch):
    """The checkpoint is written: which older ones may go nobody knows."""
    failing(monkeypatch, best_step, "read_validations", None)
    result = run_script("train.py", *whole.flags, "--save_every", 1, "--keep", 1, "--out_dir", tmp_path / "run")
    assert result.status == 0 and result.err.count("warning: old checkpoints: ") == 1, result.err
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]

@pytest.mark.parametrize("place", ["pictures", "memory", "base", "report", "loss", "best", "disk"])
def test_a_validation_that_fails_is_a_warning_and_changes_no_step(whole, small, tmp_path, monkeypatch, place):
    """Its pictures, their report, its loss; what worked is in the log."""
    flags = [*whole.flags, "--val_data", small.folder / "data", "--val_pictures", 1, "--sample_every", 2,
             "--num_inference_steps", 2, "--cache_dir", whole.cache]
    where = dict(pictures=(predict, "generate_samples"), memory=(predict, "generate_samples"),
                 loss=(common, "progress"), base=(validation.Drawer, "compare"), best=(best_step, "describe"),
                 report=(validation.Drawer, "report"), disk=(predict, "save_png"))[place]
    errors = dict(disk=common.InputError("samples/x.png: cannot be written; mend it"), memory=torch.OutOfMemoryError())
    error = errors.get(place, Planted("planted"))
    real = common.progress
    if place == "loss":
        def progress(what, *args, **options):
            if what == "validation loss":
                raise error
            return real(what, *args, **options)
        monkeypatch.setattr(common, "progress", progress)
    else:
        failing(monkeypatch, *where, None, error)
    result = run_script("train.py", *flags, "--out_dir", tmp_path / "run")
    assert result.status == 0 and result.err.count("warning: ") == 1, result.err
    assert ("no memory for the validation" in result.err) == (place == "memory")
    assert_same_run(tmp_path / "run", whole.run)
    assert len(validations_of(tmp_path / "run")) == (0 if place == "loss" else 2)

# ---- what ends a run saves first -------------------------------------------------------------------------------------

@pytest.mark.parametrize("owner, name, call, error", [
    (cache, "load_latents", 6, Planted), (rope_patch, "run_packed", 3, KeyboardInterrupt),
    (torch, "manual_seed", 5, Left), (torch.optim.Muon, "step", 3, KeyboardInterrupt),
    (torch.optim.Muon, "zero_grad", 2, Left)],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_a_called_function_raises_ends_the_run_with_its_last_whole_step(whole, tmp_path, owner, name, call, error):
    """In a thread that loads; a Ctrl-C that somebody has not noted; a library's sys.exit. The line says which step is
    saved."""
    with pytest.MonkeyPatch.context() as patch:
        armed = failing(patch, owner, name, [call], error)
        try:
            result = run_script("train.py", *whole.flags, "--out_dir", tmp_path / "run")
            assert result.status == 3 and error is Left
        except (Planted, KeyboardInterrupt) as e:
            assert type(e) is error
    assert len(armed) >= call # (what a thread loads may be ahead)
    tqdm._instances.clear()
    check_newest(tmp_path / "run", whole, 1)
    works("train.py", *whole.flags, "--out_dir", tmp_path / "run", "--resume")
    assert_bitwise(predict.read_lora(tmp_path / "run").state, predict.read_lora(whole.run).state)

@pytest.mark.parametrize("code", [0, None])
def test_a_library_that_leaves_with_status_0_is_no_success(whole, tmp_path, monkeypatch, code):
    failing(monkeypatch, rope_patch, "run_packed", [3], SystemExit(code))
    result = run_script("train.py", *whole.flags, "--out_dir", tmp_path / "run")
    assert result.status == 1 and is_one_line(result.errors[-1], f"sys.exit({code})", "--resume"), result.err
    assert steps_of(tmp_path / "run") == [2]

@pytest.mark.parametrize("what", ["weights", "state"])
def test_an_optimizer_that_dies_half_way_leaves_no_checkpoint_of_a_step(whole, tmp_path, what):
    """The line names the newest one, from which the run goes on."""
    def change(optimizer, *_):
        p = optimizer.param_groups[0]["params"][0]
        with torch.no_grad():
            (p if what == "weights" else optimizer.state[p]["momentum_buffer"]).add_(1)
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, torch.optim.Muon, "step", [4], Planted("planted"), change)
        said = failing(patch, common, "tell", [])
        assert run_and_catch(*whole.flags, "--save_every", 2, "--out_dir", tmp_path / "run")[1] is Planted
    assert steps_of(tmp_path / "run") == [2]
    assert any("step 3 could not be saved" in str(line) and "after checkpoint-000002" in str(line) for line in said)
    assert run_script("train.py", *whole.flags, "--out_dir", tmp_path / "run", "--resume").status == 0
    assert_same_run(tmp_path / "run", whole.run)

def failing_disk(patch, calls):
    """The file of a checkpoint's LoRA cannot be written at these calls (None: all), but in the trial it can."""
    made, real = [], tensor_files.write_tensors

    def write_tensors(path, *args, **kwargs):
        if "checkpoint-" in str(path) and ".tmp-" not in str(path) and path.name == lora_paths.LORA_FILE:
            made.append(path)
            if calls is None or len(made) in calls:
                try:
                    raise OSError(errno.ENOSPC, "No space left on device")
                except OSError:
                    raise common.InputError(f"{path}: 9 bytes cannot be written (No space); free some space")
        return real(path, *args, **kwargs)
    patch.setattr(tensor_files, "write_tensors", write_tensors)
    return made

@pytest.mark.parametrize("calls, saved", [([1], [3, 4]), ([1, 2], [4])])
def test_a_checkpoint_that_a_full_disk_refuses_is_tried_after_the_next_step(whole, tmp_path, monkeypatch, calls, saved):
    """One warning, however long the disk stays full, and the checkpoint of the first step that fits."""
    failing_disk(monkeypatch, calls)
    result = run_script("train.py", *whole.flags, "--save_every", 2, "--out_dir", tmp_path / "run")
    assert result.status == 0 and result.err.count("warning: ") == 1 and "tried again" in result.err
    assert steps_of(tmp_path / "run") == saved
    assert_same_run(tmp_path / "run", whole.run)

def test_what_has_failed_is_not_held():
    """Or the tensors of a validation that is out of memory would stay, and the next step would be, too."""
    def work():
        x = torch.empty(1)
        held.append(weakref.ref(x))
        raise Planted("planted")
    held = []
    gc.disable()
    try:
        with common.warn_on_failure("x"):
            work()
        with pytest.raises(Planted):
            common.on_all_processes(work)
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()

@pytest.mark.parametrize("calls, saved", [([1, 2], 3), (None, 1)])
def test_a_disk_that_stays_full_ends_the_run_when_the_next_is_due(whole, tmp_path, monkeypatch, calls, saved):
    """With the error's line and status 1, after one more try, which may succeed; the checkpoint before stays till
    then."""
    flags = [*whole.flags, "--save_every", 1, "--keep", 1]
    assert run_script("train.py", *flags, "--max_steps", 1, "--out_dir", tmp_path / "run").status == 0
    failing_disk(monkeypatch, calls)
    result = run_script("train.py", *flags, "--out_dir", tmp_path / "run", "--resume")
    assert result.status == 1 and is_one_line(result.errors[-1], "cannot be written"), result.err
    found = list((tmp_path / "run").glob("checkpoint-*")) # also no half, which would take the room of the next try
    assert [path.name for path in found] == [f"checkpoint-{saved:06d}"]
    assert ("stopped after step 3" if saved == 3 else "step 3 could not be saved") in result.out
    monkeypatch.undo()
    assert run_script("train.py", *flags, "--out_dir", tmp_path / "run", "--resume").status == 0
    assert_same_run(tmp_path / "run", whole.run)

def fails_at_step_3():
    """For a child process: a forward pass."""
    failing(pytest.MonkeyPatch(), rope_patch, "run_packed", [3], Planted("planted"))

@pytest.mark.parametrize("rank", [0, 1])
def test_if_one_of_two_processes_fails_both_leave_and_the_first_one_saves(tmp_path, small, start, rank):
    """None waits for the other. (A sample that cannot be loaded: test_identity.py.)"""
    preludes = [None, None]
    preludes[rank] = fails_at_step_3
    flags = [*small.flags, "--save_every", 100, "--out_dir", tmp_path / "run"]
    ranks = start_ranks(start, *flags, preludes=preludes)
    assert [process.wait() for process in ranks] == [1, 1]
    assert "Planted: planted" in ranks[rank].output() and "Traceback" not in ranks[1 - rank].output()
    assert "stopped after step 2" in ranks[0].output() and steps_of(tmp_path / "run") == [2]

def no_room_in_validation():
    """For a child process: the first tensor of a validation's loss does not fit."""
    real = torch.zeros

    def zeros(*args, **kwargs):
        if sys._getframe(1).f_code.co_name == "validation_loss":
            raise torch.OutOfMemoryError("planted")
        return real(*args, **kwargs)
    torch.zeros = zeros

def test_a_validation_that_fails_on_one_process_ends_on_all_and_the_log_says_why(tmp_path, small, start):
    """Wherever it fails: none waits for the other."""
    flags = [*small.flags, "--max_steps", 1, "--val_data", small.folder / "data", "--out_dir", tmp_path / "run"]
    ranks = start_ranks(start, *flags, "--cache_dir", tmp_path / "cache", preludes=[None, no_room_in_validation])
    assert [process.wait() for process in ranks] == [0, 0], [process.output() for process in ranks]
    assert "planted (on process 1)" in (tmp_path / "run/log.jsonl").read_text("utf-8")
