"""
What is checked is what is used: the pictures that were hashed are the ones that are encoded, trained and compared; what
is planned is not pruned; what processes assume of each other is compared. Models and LoRAs: test_changed_files.py.
"""
import functools
import os
import shutil
import sys

import filelock
import pytest

import cache
import predict
from library.files import tensor_files
from library.lora import lora_paths
from tests.harness import (NATIVE, ON_DEVICE, add_item, assert_same_run, cached_files, index_of, is_one_line,
                           log_of, make_cache, paint_picture, run_script, save, start_ranks, steps_of, train,
                           validations_of, works)
from training import failures, resume

# ---- the bytes that are hashed are the bytes that are encoded --------------------------------------------------------

@pytest.mark.parametrize("role", ["control", "target", "mask"])
def test_a_picture_that_changes_before_it_is_encoded_enters_no_cache(tmp_path, data, monkeypatch, role):
    """Nor does it stop the others; and when the original is back, all is as in a fresh cache."""
    half = paint_picture(mode="L").point(lambda level: 0)
    half.paste(255, (0, 0, 32, 64))
    add_item(data, "cat", mask=half)
    path, real = data / role / "cat.png", cache.encode_files
    original = path.read_bytes()

    def encode_files(*args):
        save(half.rotate(90) if role == "mask" else paint_picture(seed=99), path)
        return real(*args)
    monkeypatch.setattr(cache, "encode_files", encode_files)
    result = make_cache(data, tmp_path / "c", *NATIVE)
    assert result.status == 1 and {is_one_line(e, path, "changed") for e in result.errors} == {True}, result.err
    monkeypatch.setattr(cache, "encode_files", real)
    path.write_bytes(original)
    for folder in ("c", "fresh"):
        assert make_cache(data, tmp_path / folder, *NATIVE).status == 0
    for file in cached_files(tmp_path / "fresh"):
        assert (tmp_path / "c" / file).read_bytes() == (tmp_path / "fresh" / file).read_bytes()

def test_a_picture_that_changes_while_it_is_trained_live_ends_the_run(tmp_path, data, monkeypatch):
    """The steps before are kept."""
    real, read = cache.read_pictures, []

    def read_pictures(*args):
        read.append(args)
        if len(read) == 9: # a step of two samples reads each twice, for the VAE and for the text encoder
            save(paint_picture((320, 40), seed=99), data / "target/cat.png")
        return real(*args)
    monkeypatch.setattr(cache, "read_pictures", read_pictures)
    result = train(data, tmp_path, "--no-use_cache", "--max_steps", 9, *NATIVE)
    assert result.status == 1 and is_one_line(result.errors[-1], "target/cat.png", "changed"), result.err
    assert steps_of(tmp_path / "run-0") == [len(log_of(tmp_path / "run-0"))] == [2]

def test_validation_compares_with_what_was_encoded(tmp_path, data):
    """Not with what lies at its path now; and an index whose pictures were edited since is told."""
    val = add_item(tmp_path / "val", "dog")
    flags = ["--cache_dir", tmp_path / "c", *NATIVE]
    few = ["--max_steps", 1, "--num_inference_steps", 2]
    run_script("cache.py", "--data", data, "--val_data", val, *ON_DEVICE, *flags)
    index = tmp_path / "c/tiny-val-val.json"
    rows = []
    edit = functools.partial(save, paint_picture(seed=99), val / "target/dog.png")
    for change in (lambda: None, edit, functools.partial(shutil.rmtree, val)):
        change()
        result = train(data, tmp_path, "--val_data", index, *few, *flags)
        assert result.status == 0, result.err
        record, = validations_of(tmp_path / f"run-{len(rows)}")
        rows.append(record["psnr"]["val"])
        told = [line for line in (result.out + result.err).splitlines() if "warning" in line and "dog.png" in line]
        assert len(told) == (2 if len(rows) == 2 else 0), told # of the index, and of the comparison
    assert rows[1]["vae"] == rows[2]["vae"] == 99 and rows[0]["vae"] < 99
    assert rows[1]["base"] == pytest.approx(rows[2]["base"])

# ---- indexes, and what is planned ------------------------------------------------------------------------------------

def test_an_index_of_another_dataset_or_of_other_sizes_is_not_replaced_in_silence(tmp_path, data):
    other = add_item(tmp_path / "elsewhere/data", "dog")
    for dataset, flags, told in ((data, [], None), (data, [], None), (other, [], "elsewhere"), (other, [], None),
                                 (other, ["--target_pixels", "32*32"], "geometry")):
        warnings = [line for line in make_cache(dataset, tmp_path / "c", *NATIVE, *flags).err.splitlines()
                    if "tiny-data.json" in line]
        assert len(warnings) == bool(told), warnings
    add_item(data, "new")
    make_cache(data, tmp_path / "c", *NATIVE)
    add_item(data, "newer") # the same dataset with another pair
    assert "warning" not in make_cache(data, tmp_path / "c", *NATIVE).err

def dies_at_its_second_file():
    """For a child process: it is killed when it has written two encoded files."""
    real, written = tensor_files.write_tensors, []

    def write_tensors(path, *args):
        real(path, *args)
        written.append(path)
        if len(written) == 2:
            os.kill(os.getpid(), 9)
    tensor_files.write_tensors = write_tensors

def test_prune_leaves_alone_what_another_process_is_encoding_or_has_encoded_before_it_was_killed(tmp_path, data, start,
                                                                                                monkeypatch):
    """Killed, by SIGKILL: a script that ends in any other way takes its list with it."""
    flags = ["--data", data, "--cache_dir", tmp_path / "c", "--val_data", *ON_DEVICE]
    killed = start("cache.py", *flags, prelude=dies_at_its_second_file)
    assert killed.wait() == -9, killed.output()
    done = cached_files(tmp_path / "c")
    assert len(done) == 2
    out = run_script("tools/prune.py", tmp_path / "c", "--delete").out
    assert ".planned-" in out and "0 files" in out and cached_files(tmp_path / "c") == done
    real, kept = tensor_files.write_tensors, []

    def write_tensors(path, *args):
        real(path, *args)
        with pytest.MonkeyPatch.context() as patch: # as a process of its own
            patch.setattr(tensor_files, "write_tensors", real)
            kept.append("; deleted" in run_script("tools/prune.py", tmp_path / "c", "--delete").out)
    monkeypatch.setattr(tensor_files, "write_tensors", write_tensors)
    assert make_cache(data, tmp_path / "c").status == 0 and kept == [True] * 2
    assert done.items() <= cached_files(tmp_path / "c").items()
    assert len(index_of(tmp_path / "c")) == 2 and len(list(tmp_path.glob("c/.planned-*"))) == 1 # the killed one's
    assert ".planned-" not in run_script("tools/prune.py", tmp_path / "c", "--delete").out
    assert done.items() <= cached_files(tmp_path / "c").items()

def test_captions_and_pairs_that_changed_since_an_index_was_made_are_counted(tmp_path, data):
    assert make_cache(data, tmp_path / "c", *NATIVE).status == 0

    def told():
        result = train(tmp_path / "c/tiny-data.json", tmp_path, "--max_steps", 1, *NATIVE)
        assert result.status == 0, result.err
        return [line for line in result.err.splitlines() if "since it was made" in line]
    assert not told()
    (data / "target/cat.txt").write_text("another", "utf-8")
    add_item(data, "new")
    assert "2 samples or pictures are new, edited or gone since it was made, for instance cat; it" in told()[0]
    for path in data.glob("*/good*"):
        path.unlink()
    assert "3 samples or pictures are new" in told()[0]
    save(paint_picture(seed=9), data / "target/cat.png")
    assert "4 samples or pictures are new" in told()[0]
    shutil.rmtree(data) # the index may be used where its pictures are not
    assert not told()

@pytest.mark.parametrize("kind", ["folder", "index"])
def test_prune_leaves_alone_what_a_training_reads_while_its_index_is_replaced(tmp_path, small, monkeypatch, kind):
    real, cache_dir, data = failures.compare_loras, tmp_path / "c", small.folder / "data"
    shutil.copytree(small.cache, cache_dir, ignore=shutil.ignore_patterns(".planned-*")) # of a process that was killed

    def compare_loras(*args):
        for side in (96, 32):
            works("tools/prune.py", cache_dir, "--delete")
            make_cache(data, cache_dir, "--target_pixels", side * side)
        works("tools/prune.py", cache_dir, "--delete")
        return real(*args)
    monkeypatch.setattr(failures, "compare_loras", compare_loras)
    source = data if kind == "folder" else cache_dir / "tiny-data.json"
    assert small.flags[0] == "--data"
    result = run_script("train.py", "--data", source, *small.flags[2:], "--cache_dir", cache_dir, "--out_dir",
                        tmp_path / "run", "--max_steps", 6)
    assert result.status == 0 and not list(cache_dir.glob(".planned-*")), result.err

def test_prune_leaves_alone_what_predict_is_about_to_draw(tmp_path, photos, monkeypatch):
    real = predict.generate

    def generate(*args, **kwargs):
        out = run_script("tools/prune.py", tmp_path / "c", "--delete").out
        assert "0 files" in out
        return real(*args, **kwargs)
    monkeypatch.setattr(predict, "generate", generate)
    flags = ["--image", photos[0].parent, "--prompt", "x", "--out_dir", tmp_path / "o", "--cache_dir", tmp_path / "c",
             "--num_inference_steps", 2, "--target_pixels", "64*64", "--lora="]
    assert run_script("predict.py", *flags).status == 0 and len(list(tmp_path.glob("o/?-*.png"))) == 3
    assert not list(tmp_path.glob("c/.planned-*"))

# ---- what processes assume of each other -----------------------------------------------------------------------------

def sees_one_sample_less(place):
    """For a child process: its view of the cache lacks a sample, of --data (place 0) or of --val_data (1)."""
    make = cache.make_cache

    def make_cache(*args, **kwargs):
        found = list(make(*args, **kwargs))
        found[place] = found[place][1:]
        return found
    cache.make_cache = make_cache

def sees_another_model():
    """For a child process: its copy of the transformer is another one."""
    real = cache.hash_part
    cache.hash_part = lambda place, cache_dir: "another" if place.name == "transformer" else real(place, cache_dir)

def has_another_flag():
    """For a child process: its command line is another one."""
    sys.argv += ["--max_tokens", "999"]

@pytest.mark.parametrize("view, named", [
    (functools.partial(sees_one_sample_less, 0), "data_hash"), (sees_another_model, "model_hash"),
    (functools.partial(sees_one_sample_less, 1), "val_data"), (has_another_flag, "max_tokens 999")],
    ids=["data", "model", "validation", "flags"])
def test_processes_with_different_views_are_refused(tmp_path, small, start, view, named):
    flags = [*small.flags, "--val_data", small.folder / "data", "--cache_dir", tmp_path / "c", "--max_steps", 2]
    ranks = start_ranks(start, *flags, "--out_dir", tmp_path / "run", preludes=[None, view])
    assert [r.wait() for r in ranks] == [1, 1]
    assert is_one_line(ranks[0].output().strip().splitlines()[-1], "process 1", named), ranks[0].output()
    assert not list(tmp_path.glob("run/checkpoint-*"))

def sees_the_checkpoint_before():
    """For a child process: its view of the run folder lacks the newest checkpoint."""
    resume.checkpoints = lambda run: lora_paths.checkpoints(run)[:-1]

def test_processes_that_would_continue_from_different_steps_are_refused(tmp_path, small, start, unbroken):
    shutil.copytree(unbroken.out_dir, tmp_path / "run")
    (tmp_path / "run/DONE").unlink()
    ranks = start_ranks(start, *small.flags, "--out_dir", tmp_path / "run", "--resume",
                        preludes=[None, sees_the_checkpoint_before])
    assert [r.wait() for r in ranks] == [1, 1], ranks[0].output()
    assert is_one_line(ranks[0].output().strip().splitlines()[-1], "process 1 has step 10, the first one 12")

def fails_at(call):
    """For a child process: the sample that it loads at this call cannot be read."""
    real, calls = cache.load_latents, []

    def load_latents(*args):
        calls.append(args)
        if len(calls) == call:
            raise cache.InputError("b.png: spoiled; mend it")
        return real(*args)
    cache.load_latents = load_latents

@pytest.mark.parametrize("preludes, more", [
    ([functools.partial(fails_at, 9)], []), ([None, functools.partial(fails_at, 5)], []),
    ([functools.partial(fails_at, 5), None], []), ([functools.partial(fails_at, 5), None], ["--fsdp"])],
    ids=["one", "second", "first", "fsdp"])
def test_what_was_learned_before_a_sample_could_not_be_loaded_is_saved(tmp_path, small, start, unbroken, preludes,
                                                                       more):
    flags = [*small.flags, *more, "--save_every", 999, "--out_dir", tmp_path / "run"]
    ranks = start_ranks(start, *flags, preludes=preludes)
    assert [r.wait() for r in ranks] == [1] * len(ranks)
    outputs = [r.output() for r in ranks]
    last_lines = [line for out in outputs for line in out.strip().splitlines()[-1:]]
    assert sum(is_one_line(line, "spoiled") for line in last_lines) == 1, outputs
    assert "Traceback" not in "".join(outputs)
    assert steps_of(tmp_path / "run") == [4] and len(log_of(tmp_path / "run")) == 4
    assert [r.wait() for r in start_ranks(start, *flags, "--resume", preludes=[None] * len(ranks))] == [0] * len(ranks)
    if len(ranks) == 1:
        assert_same_run(tmp_path / "run", unbroken.out_dir)
    else:
        assert len(log_of(tmp_path / "run")) == 12

def test_a_checkpoint_that_appears_before_the_lock_is_held_is_seen(tmp_path, small, monkeypatch):
    """The run that is just ending is not begun again from its checkpoint before."""
    out_dir, whole = tmp_path / "run", tmp_path / "whole"
    flags = [*small.flags, "--max_steps", 4]
    assert run_script("train.py", *flags, "--out_dir", whole).status == 0
    shutil.copytree(whole, out_dir, ignore=shutil.ignore_patterns("checkpoint-000004", "DONE", predict.LORA_FILE))
    real = filelock.FileLock.acquire

    def acquire(lock, **kwargs): # now the other process ends
        shutil.copytree(whole, out_dir, dirs_exist_ok=True)
        return real(lock, **kwargs)
    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    result = run_script("train.py", *flags, "--out_dir", out_dir, "--resume")
    assert result.status == 0 and "already done" in result.out, result.out + result.err
    assert steps_of(out_dir) == [2, 4] and (out_dir / predict.LORA_FILE).exists()
    assert not list(out_dir.glob("*.damaged*"))
