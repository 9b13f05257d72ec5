"""
Kills, signals, full disks, damaged files, two runs at one folder: nothing finished is lost, nothing wrong gets in.

$ pytest tests/test_faults.py --kills 200 --fuzz 1000 -s     # 7 minutes; without the flags a few of each
"""
import functools
import importlib
import itertools
import os
import random
import re
import resource
import shutil
import signal
import time

import pytest
import torch
from conftest import OPTIONS

import cache
from library.data import index_file
from library.files import tensor_files
from library.lora import lora_paths
from training import run_folder
import predict
import rope_patch
from tests.harness import (assert_checkpoints_whole, assert_same_run, damage_tensors, error_of, flip, is_one_line, kill,
                           killed_runs, log_of, refused, run_script, steps_of, until)

def lines_of(out_dir):
    return len(log_of(out_dir)) if (out_dir / "log.jsonl").exists() else 0

def slow(module, name, seconds):
    """For a child process: this function takes longer there."""
    module = importlib.import_module(module)
    real = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: time.sleep(seconds) or real(*args, **kwargs))

def stops_before_the_second_file(mark):
    """For a child process: it stops itself there, and says so by this file; each file takes a while, to encode and to
    write."""
    slow("library", "code_hash", 0.2) # which is asked for each file
    real, calls = tensor_files.write_tensors, []

    def write_tensors(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)
        return real(*args, **kwargs)
    tensor_files.write_tensors = write_tensors

def slow_steps():
    """For a child process: a checkpoint, and each step, take so long that a signal comes before the next one."""
    slow("os", "fsync", 0.05)
    slow("torch.nn.utils", "clip_grad_norm_", 0.2)

# ---- kill -9 ---------------------------------------------------------------------------------------------------------

def test_cache_killed_at_any_instant_loses_and_repeats_nothing(tmp_path, small, start):
    """After each kill every file under a final name is whole, and what is finished is never written again."""
    whole = {p.relative_to(small.cache): p.read_bytes() for p in small.cache.glob("*/*.safetensors")}
    t0 = time.monotonic()
    assert start("cache.py", *small.cache_flags, "--cache_dir", tmp_path / "timed").wait() == 0
    seconds = time.monotonic() - t0
    rng, kills, caches, seen = random.Random(0), 0, 0, {}
    while kills < OPTIONS["kills"] or seen:
        cache_dir = tmp_path / f"{caches}"
        process = start("cache.py", *small.cache_flags, "--cache_dir", cache_dir)
        if kills < OPTIONS["kills"]:
            time.sleep(rng.uniform(0, seconds))
            kill(process)
        status = process.wait()
        kills += status == -9
        for path in cache_dir.glob("*/*.safetensors"):
            tensor_files.read_tensors(path, key=path.stem)
            assert seen.setdefault(path, path.stat().st_mtime_ns) == path.stat().st_mtime_ns, "encoded again"
        if status == 0:
            assert {p.relative_to(cache_dir): p.read_bytes() for p in cache_dir.glob("*/*.safetensors")} == whole
            caches, seen = caches + 1, {}
        else:
            assert status == -9, process.output()
    print(f"{kills} kills of cache.py in {caches} caches: no corrupt file, nothing encoded twice")

def test_training_killed_at_any_instant_ends_as_the_unbroken_run(tmp_path, small, start, unbroken):
    """Steps, losses, learning rates, gradient norms and the final LoRA, bit for bit."""
    for _, process, status, _ in killed_runs(start, small, unbroken, tmp_path, 0):
        assert status == -9, process.output()

def test_the_log_is_on_the_disk_before_the_checkpoint_is(tmp_path, small, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append(str(b)) or replace(a, b))
    run = tmp_path / "run"
    assert run_script("train.py", *small.flags, "--out_dir", run, "--max_steps", 1).status == 0
    log, renamed = str(run / "log.jsonl"), calls.index(str(run / "checkpoint-000001" / predict.LORA_FILE))
    assert log in calls[calls.index(log) + 1:renamed] # (first it is created)
    assert calls[renamed + 1:][:2] == [str(run / "checkpoint-000001"), str(run)] # whose entry this folder is

def test_orphans_are_swept_when_nobody_can_be_at_work_on_them(tmp_path):
    (tmp_path / "latents").mkdir()
    for name, age in ((".tmp-00000000000000ff", 60), (".tmp-0123456789abcdef", 3700)):
        (tmp_path / "latents" / name).write_bytes(b"half")
        os.utime(tmp_path / "latents" / name, (0, time.time() - age))
    assert run_script("tools/prune.py", tmp_path, "--delete").status == 0
    assert [p.name for p in (tmp_path / "latents").iterdir()] == [".tmp-00000000000000ff"]

# ---- signals ---------------------------------------------------------------------------------------------------------

def test_a_signal_ends_a_training_after_the_step_with_a_checkpoint(tmp_path, small, start, unbroken):
    """Two of each kind, the second ones while the checkpoint is being written; status 0, no DONE, and the resumed run
    is the unbroken one."""
    out_dir = tmp_path / "run"
    for n, number in enumerate((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)):
        process = start("train.py", *small.flags, "--out_dir", out_dir, "--save_every", 100, *["--resume"] * (n > 0),
                        prelude=slow_steps)
        before = max(steps_of(out_dir), default=0)
        until(lambda: lines_of(out_dir) > before + 1)
        kill(process, number)
        until(lambda: list(out_dir.glob("checkpoint-*/.tmp-*")) or max(steps_of(out_dir), default=0) > before)
        kill(process, number)
        assert process.wait() == 0 and "stopped by a signal" in process.output(), process.output()
        assert not (out_dir / "DONE").exists() and max(steps_of(out_dir)) == log_of(out_dir)[-1]["step"] < 12
        assert_checkpoints_whole(out_dir)
    assert start("train.py", *small.flags, "--out_dir", out_dir, "--resume").wait() == 0
    assert_same_run(out_dir, unbroken.out_dir)

def test_a_signal_ends_cache_py_after_the_file_at_hand(tmp_path, small, start):
    files = lambda: {p: p.stat().st_mtime_ns for p in tmp_path.glob("c/*/*.safetensors")}
    process = start("cache.py", *small.cache_flags, "--cache_dir", tmp_path / "c",
                    prelude=functools.partial(stops_before_the_second_file, tmp_path / "stops"))
    until((tmp_path / "stops").exists) # and nothing is written while we count
    kill(process, signal.SIGSTOP) # (if it has only touched the file)
    before = len(files())
    assert before < 4 # so many threads write
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        kill(process, number)
    assert process.wait() == 128 + signal.SIGINT # so that `cache.py && train.py` does not go on
    assert "stopped by a signal" in process.output() and "complete" not in process.output()
    done = files()
    # the file at hand, and what is encoded already and waits for the disk
    assert before <= len(done) < 10 and not (tmp_path / "c/tiny-data.json").exists()
    assert not list(tmp_path.rglob(".tmp-*"))
    assert start("cache.py", *small.cache_flags, "--cache_dir", tmp_path / "c").wait() == 0
    assert len(files()) == 10 and done.items() <= files().items()

# ---- a full disk, no memory ------------------------------------------------------------------------------------------

def file_limit(size):
    """For a child process: no file can be larger, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_file(tmp_path, small, start):
    limit = max(p.stat().st_size for p in small.cache.glob("*/*")) - 1
    process = start("cache.py", *small.cache_flags, "--cache_dir", tmp_path / "c",
                    prelude=functools.partial(file_limit, limit))
    assert process.wait() == 1 and "Traceback" not in process.output()
    assert is_one_line(error_of(process), tmp_path / "c", ".safetensors: ", "bytes")
    assert not list((tmp_path / "c").rglob(".tmp-*"))
    for path in tmp_path.glob("c/*/*.safetensors"):
        tensor_files.read_tensors(path, key=path.stem)

def test_a_checkpoint_that_does_not_fit_ends_the_run_and_the_old_one_stays(tmp_path, small, start, unbroken):
    out_dir = tmp_path / "run"
    assert start("train.py", *small.flags, "--out_dir", out_dir, "--max_steps", 4).wait() == 0
    limit = min(p.stat().st_size for p in out_dir.glob("checkpoint-*/*")) - 1
    process = start("train.py", *small.flags, "--out_dir", out_dir, "--resume",
                    prelude=functools.partial(file_limit, limit))
    assert process.wait() == 1 and steps_of(out_dir) == [2, 4] # refused before it begins
    assert is_one_line(error_of(process), out_dir) and "Traceback" not in process.output()
    assert_checkpoints_whole(out_dir)
    assert start("train.py", *small.flags, "--out_dir", out_dir, "--resume").wait() == 0
    assert_same_run(out_dir, unbroken.out_dir)

def test_out_of_memory_names_samples_and_saves_the_steps_before(tmp_path, small, unbroken, monkeypatch):
    real, calls = rope_patch.run_packed, []

    def run_packed(*args):
        calls.append(args)
        if len(calls) == 4:
            raise torch.OutOfMemoryError
        return real(*args)
    monkeypatch.setattr(rope_patch, "run_packed", run_packed)
    result = run_script("train.py", *small.flags, "--out_dir", tmp_path / "run")
    assert result.status == 1 and is_one_line(result.errors[0], "--max_tokens", "step 4", "--resume")
    assert steps_of(tmp_path / "run") == [2, 3]
    assert_checkpoints_whole(tmp_path / "run")
    assert run_script("train.py", *small.flags, "--out_dir", tmp_path / "run", "--resume").status == 0
    assert_same_run(tmp_path / "run", unbroken.out_dir)

# ---- resume ----------------------------------------------------------------------------------------------------------

DAMAGED_CHECKPOINTS = { # of 12, the newest; 10 is the one before
    "bit": lambda new, old: damage_tensors(new / "optimizer.safetensors"),
    "cut": lambda new, old: (new / predict.LORA_FILE).write_bytes((new / predict.LORA_FILE).read_bytes()[:-1]),
    "gone": lambda new, old: (new / "optimizer.safetensors").unlink(),
    "of another step": lambda new, old: shutil.copy(old / predict.LORA_FILE, new),
    "renamed": lambda new, old: shutil.rmtree(new) or shutil.copytree(old, new),
    "empty folder": lambda new, old: shutil.rmtree(new) or new.mkdir(),
}

@pytest.mark.parametrize("how", DAMAGED_CHECKPOINTS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, small, start, unbroken, how):
    out_dir = shutil.copytree(unbroken.out_dir, tmp_path / "run")
    for name in ("DONE", predict.LORA_FILE):
        (out_dir / name).unlink()
    shutil.copytree(out_dir / "checkpoint-000010", out_dir / "checkpoint-000010.bak") # a person's copy is none
    DAMAGED_CHECKPOINTS[how](out_dir / "checkpoint-000012", out_dir / "checkpoint-000010")
    process = start("train.py", *small.flags, "--out_dir", out_dir, "--resume", "--save_every", 11, "--keep", 1)
    assert process.wait() == 0, process.output()
    shutil.rmtree(out_dir / "checkpoint-000010.bak")
    assert how == "empty folder" or re.search(r"checkpoint-000012 is damaged", process.output()) # (which is none)
    assert "after step 10" in process.output()
    assert_same_run(out_dir, unbroken.out_dir)

def test_a_damaged_checkpoint_displaces_no_whole_one(tmp_path, small, start, unbroken):
    """It would count for --keep, and the last whole one would be deleted in its place. Its bits stay, for a person."""
    out_dir = shutil.copytree(unbroken.out_dir, tmp_path / "run")
    DAMAGED_CHECKPOINTS["bit"](out_dir / "checkpoint-000012", None)
    process = start("train.py", *small.flags, "--out_dir", out_dir, "--resume", "--max_steps", 13, "--save_every", 13)
    assert process.wait() == 0, process.output()
    names = sorted(path.name for path in out_dir.glob("checkpoint-*"))
    assert names[0] == "checkpoint-000010" and names[1].startswith("checkpoint-000012.damaged-"), names
    assert names[2:] == ["checkpoint-000013"] and (out_dir / names[1] / "optimizer.safetensors").exists()
    begun = [(run / "log.jsonl").read_text("utf-8").splitlines()[0] for run in (out_dir, unbroken.out_dir)]
    assert begun[0] == begun[1] # how the run was begun, not how it was resumed

def test_a_finished_run_that_goes_on_is_no_longer_finished(tmp_path, unbroken):
    """Until it ends again its newest checkpoint is its LoRA, and a kill leaves no DONE."""
    out_dir = shutil.copytree(unbroken.out_dir, tmp_path / "run")
    assert run_folder.clean_folder(out_dir, 12) == (unbroken.out_dir / "log.jsonl").read_text("utf-8").splitlines()
    assert not (out_dir / "DONE").exists()
    assert lora_paths.find_lora(out_dir).parent == out_dir / "checkpoint-000012"

def test_a_run_without_a_whole_checkpoint(tmp_path, small, start, unbroken):
    """All damaged: an error, for a person to decide. None written yet, as after an early kill: from the start."""
    out_dir = shutil.copytree(unbroken.out_dir, tmp_path / "run")
    for path in out_dir.glob("checkpoint-*/optimizer.safetensors"):
        path.write_bytes(b"")
    process = start("train.py", *small.flags, "--out_dir", out_dir, "--resume")
    assert process.wait() == 1 and is_one_line(error_of(process), out_dir)
    for path in out_dir.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.name != "log.jsonl" and path.unlink()
    process = start("train.py", *small.flags, "--out_dir", out_dir, "--resume")
    assert process.wait() == 0, process.output()
    assert_same_run(out_dir, unbroken.out_dir)

# ---- several processes -----------------------------------------------------------------------------------------------

def test_two_runs_do_not_share_a_folder_and_the_dead_hold_no_lock(tmp_path, small, start, unbroken):
    out_dir = tmp_path / "run"
    first = start("train.py", *small.flags, "--out_dir", out_dir, prelude=functools.partial(slow, "os", "fsync", 0.1))
    until(lambda: steps_of(out_dir))
    kill(first, signal.SIGSTOP) # so that it is at work still, however long the second takes to begin
    second = start("train.py", *small.flags, "--out_dir", out_dir, "--resume")
    assert second.wait() == 1 and is_one_line(error_of(second), out_dir, "another run")
    kill(first)
    assert first.wait() == -9
    assert start("train.py", *small.flags, "--out_dir", out_dir, "--resume").wait() == 0
    assert_same_run(out_dir, unbroken.out_dir)

def test_three_writers_and_a_reader_of_one_cache(tmp_path, small, start):
    """No bad read, nothing left behind, the bytes of one writer."""
    writers = [start("cache.py", *small.cache_flags, "--cache_dir", tmp_path) for _ in range(3)]
    reads = 0
    while any(w.alive() for w in writers):
        for path in tmp_path.glob("*/*.safetensors"):
            cache.read_tensors(path, key=path.stem)
            reads += 1
        if (tmp_path / "tiny-data.json").exists():
            assert len(index_file.read_index(tmp_path / "tiny-data.json")[0]) == 5
    assert [w.wait() for w in writers] == [0, 0, 0], [w.output() for w in writers]
    print(f"{reads} reads, none bad")
    assert reads > 10 and not list(tmp_path.rglob(".tmp-*"))
    files = [p.relative_to(small.cache) for p in small.cache.glob("*/*.safetensors")]
    assert files and all((tmp_path / f).read_bytes() == (small.cache / f).read_bytes() for f in files)

# ---- damaged bits ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("file", ["latents", "text", predict.LORA_FILE, "optimizer.safetensors"])
def test_no_damage_to_a_file_is_silent(tmp_path, small, unbroken, file):
    """Cuts, flipped bits, zeroed 512-byte blocks, and bits of the header, all with --fuzz."""
    root = small.cache / file if file in ("latents", "text") else unbroken.out_dir / "checkpoint-000012"
    source = min(root.glob("*.safetensors" if file in ("latents", "text") else file))
    key = source.stem if file in ("latents", "text") else None
    kind = "lora_adapter_metadata" if file == predict.LORA_FILE else "json"
    path, sound = tmp_path / source.name, source.read_bytes()
    path.write_bytes(sound)
    tensor_files.read_tensors(path, kind, key)
    rng, n = random.Random(0), OPTIONS["fuzz"] or 30
    header = range(8 * (8 + int.from_bytes(sound[:8], "little")))
    damages = [sound[:rng.randrange(len(sound))] for _ in range(n)]
    damages += [flip(rng.randrange(8 * len(sound)))(sound) for _ in range(n)]
    for place in (rng.randrange(len(sound) // 512) * 512 for _ in range(n)):
        damages.append(sound[:place] + bytes(len(sound[place:place + 512])) + sound[place + 512:])
    bits = header if OPTIONS["fuzz"] else rng.sample(header, 100)
    for damaged in itertools.chain(damages, (flip(bit)(sound) for bit in bits)):
        if damaged == sound: # a block of zeros
            continue
        path.write_bytes(damaged)
        with refused(path):
            tensor_files.read_tensors(path, kind, key)
    print(f"{file}: {len(damages) + len(bits)} damages, none silent")

@pytest.mark.parametrize("old, new", [(b'"F32"', b'"I32"'), (b'"one"', b'"two"'), (b"[2,3]", b"[3,2]")])
def test_a_tensor_of_another_type_name_or_shape_is_refused(tmp_path, old, new):
    path = tmp_path / "a.safetensors"
    tensor_files.write_tensors(path, dict(one=torch.arange(6).reshape(2, 3).float()), {})
    sound = path.read_bytes()
    assert sound.count(old) == 1
    path.write_bytes(sound.replace(old, new))
    with refused(path, "content does not match its digest"):
        tensor_files.read_tensors(path)
