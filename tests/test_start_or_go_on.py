"""
Start or go on: one command, with --resume and --out_dir, for a job that is killed and started again until it is done.
"""
import importlib
import os
import shlex
import subprocess
import sys
from functools import partial

import pytest

import predict
from tests.harness import (HERE, add_item, assert_same_run, free_port, is_one_line, log_of, run_script, steps_of,
                           train)

def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

def killed_in(module, name, number, what, after):
    """For a child process: it dies before, or after, the `number`th call of this function for `what`: the name of a
    file, a keyword, or None."""
    module = importlib.import_module(module)
    real, seen = getattr(module, name), []

    def killed(*args, **options):
        seen.extend([1] * (what is None or what in options or args[0].name == what))
        if len(seen) < number:
            return real(*args, **options)
        if after:
            real(*args, **options)
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
    setattr(module, name, killed)

MOMENTS = [ # of the life of a run
    ("training.run_folder", "lock", 1, None, False), # nothing is there yet
    ("training.run_folder", "lock", 1, None, True), # a folder with a lock
    ("cache", "make_cache", 1, None, False),
    ("common", "write_file", 1, "log.jsonl", False), ("common", "write_file", 1, "log.jsonl", True),
    ("library.models.devices", "memory_of", 2, None, False), # between the log and the first checkpoint
    ("predict", "save_lora", 1, None, True), # of the trial before the first step
    ("library.models.devices", "memory_of", 4, None, False), # between two checkpoints
    ("predict", "save_lora", 2, None, False), ("predict", "save_lora", 2, None, True), # half a checkpoint, a whole one
    ("common", "write_file", 1, "DONE", False), ("common", "write_file", 1, "DONE", True)]

def test_one_command_repeated_after_a_kill_at_any_moment_is_the_unbroken_run(tmp_path, small, start, unbroken):
    """Twelve kills, from before its folder exists to after DONE; then the same command has status 0 and changes
    nothing, so that a loop that requeues it ends."""
    out_dir = tmp_path / "out/run"
    command = ["train.py", *small.flags, "--out_dir", out_dir, "--resume"]
    for n, moment in enumerate(MOMENTS):
        process = start(*command, prelude=partial(killed_in, *moment))
        assert process.wait() == -9 and "damaged" not in process.output(), process.output()
        assert ("nothing to resume; begins there" in process.output()) == (n < 5) # until it has a log
    assert_same_run(out_dir, unbroken.out_dir)
    before = contents(out_dir)
    again = start(*command)
    assert again.wait() == 0 and "already done after 12 steps" in again.output() and contents(out_dir) == before

@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a killed start", "no --out_dir"])
def test_resume_where_no_run_is_begins_one_and_says_so(tmp_path, small, left):
    out_dir = tmp_path / "out/run"
    if left in ("an empty folder", "a killed start"):
        out_dir.mkdir(parents=True)
    if left == "a killed start":
        (out_dir / ".lock").touch(), (out_dir / ".tmp-0123456789abcdef").write_bytes(b"{")
    flags = ["--out_dir", out_dir] if left != "no --out_dir" else []
    result = run_script("train.py", *small.flags, "--max_steps", 1, *flags, "--resume")
    place = out_dir if flags else "out/tiny-data-001"
    assert result.status == 0 and result.out.startswith(f"{place}: nothing to resume; begins there\n"), result.err
    assert not flags or len(log_of(out_dir)) == 1 and not list(out_dir.glob(".tmp-*"))

@pytest.mark.parametrize("script", ["train.py", "tools/lean_train.py"])
def test_resume_in_a_folder_with_other_things_is_refused_and_leaves_them(tmp_path, small, script):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine", "utf-8")
    result = run_script(script, "--data", small.folder / "data", "--out_dir", tmp_path / "mine", "--resume")
    assert result.status in (1, 2) and is_one_line(result.errors[-1], tmp_path / "mine"), result.err
    assert (tmp_path / "mine/notes.txt").read_text("utf-8") == "mine"
    assert {path.name for path in (tmp_path / "mine").iterdir()} <= {"notes.txt", ".lock"}

def test_the_lean_training_begins_and_goes_on_by_one_command_too(tmp_path, data):
    """Also after a kill before its first checkpoint, which leaves a log alone."""
    flags = ["--data", data, "--cache_dir", tmp_path / "cache", "--out_dir", tmp_path / "run", "--resume"]
    for n, steps in enumerate((1, 1, 0)): # the last one has nothing to do
        result = run_script("tools/lean_train.py", *flags, "--max_steps", 1)
        assert result.status == 0 and result.out.count("step 1  loss") == steps, result.err
        assert len(log_of(tmp_path / "run")) == 1
        if n == 0:
            (tmp_path / "run/state.safetensors").unlink(), (tmp_path / "run" / predict.LORA_FILE).unlink()

def test_what_a_nas_has_put_into_a_new_folder_is_no_run(tmp_path, small):
    """--resume begins beside it."""
    (tmp_path / "run/@eaDir").mkdir(parents=True)
    result = run_script("train.py", *small.flags, "--max_steps", 1, "--out_dir", tmp_path / "run", "--resume")
    assert result.status == 0 and steps_of(tmp_path / "run") == [1], result.err

RESTARTED = """
import os, runpy, sys
sys.path.insert(0, {root!r})
import library
from training import failures
compare, calls = failures.compare_loras, []
def killed(*args):
    calls.append(1)
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(calls) == 2:
        os.kill(os.getpid(), 9)
    compare(*args)
failures.compare_loras = killed
sys.argv[0] = {root!r} + "/train.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""

def test_torchrun_restarts_both_processes_of_a_run_after_one_was_killed(tmp_path, small):
    """--max_restarts: the second one dies at step 4, which the first one saves, and the log has it.
    They do not look for each other at the addresses of the dead ones."""
    (tmp_path / "killed.py").write_text(RESTARTED.format(root=str(HERE)), "utf-8")
    job = subprocess.run(
        list(map(str, [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max_restarts=1",
                       "--master_port", free_port(), "--monitor-interval=0.1", tmp_path / "killed.py", *small.flags,
                       "--out_dir", tmp_path / "run", "--resume"])),
        capture_output=True, encoding="utf-8", env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert job.returncode == 0, job.stderr[-3000:]
    assert "nothing to resume; begins there" in job.stdout and "continues after step 4" in job.stdout
    assert [r["step"] for r in log_of(tmp_path / "run")] == list(range(1, 13))
    assert steps_of(tmp_path / "run") == [10, 12]
    assert (tmp_path / "run/DONE").exists()

def test_more_data_with_resume_names_the_dataset_and_the_command_that_goes_on(tmp_path, data):
    """Not two hashes; the command is pasted, and trains on the new data from the run's LoRA."""
    run, flags = tmp_path / "run", ["--cache_dir", tmp_path / "cache", "--lr_scheduler", "constant"]
    train(data, tmp_path, *flags, "--out_dir", run)
    add_item(data, "more")
    result = train(data, tmp_path, *flags, "--out_dir", run, "--resume", "--max_steps", 4)
    line, = result.errors
    assert result.status == 1 and is_one_line(line, f"--data {data}", "give the old ones, or start a new run"), line
    python, script, *words = shlex.split(line.split("its LoRA: ")[1])
    result = run_script(script, *words, "--out_dir", tmp_path / "new")
    assert (python, result.status) == ("python", 0) and len(log_of(tmp_path / "new")) == 4, result.err
