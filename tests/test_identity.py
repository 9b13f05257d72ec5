"""
What is checked is what is used: the bytes that were hashed are the ones that are encoded, trained and compared; a key
changes with everything that it stands for, and with nothing else; what processes assume of each other is compared.
"""
import functools
import json
import os
import random
import shutil

import filelock
import pytest
import safetensors.torch

import cache
import common
import predict
from library.data import stat_cache
from library.files import tensor_files
from library.lora import lora_paths
from tests.harness import (NATIVE, ON_DEVICE, TINY, add_item, assert_same_run, cached_files,
                           change_weight, copy_model, free_port, index_of, is_one_line, log_of, lora_file, lora_tensors,
                           make_cache, paint_picture, run_script, save, start_ranks, steps_of, train, validations_of)
from training import resume

WEIGHTS = "diffusion_pytorch_model.safetensors"

# ---- a model is known by every byte ----------------------------------------------------------------------------------

@pytest.fixture
def settled(monkeypatch):
    """All that a test writes counts as old enough to be remembered."""
    monkeypatch.setattr(stat_cache, "SETTLED", -10**15)

def overwrite(path, place, value):
    """Other bytes in place, the same length and time of change."""
    times = path.stat()
    with open(path, "r+b") as f:
        f.seek(place)
        f.write(value)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

def test_one_byte_of_any_tensor_is_another_model(tmp_path, settled):
    """Of a folder and of one file; the hashes of earlier starts are remembered meanwhile."""
    folder = shutil.copytree(TINY / "transformer", tmp_path / "transformer")
    file, seen = folder / WEIGHTS, {}
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    rng = random.Random(0)
    seen[cache.hash_part(folder, tmp_path)], seen[cache.hash_part(file, tmp_path)] = "whole folder", "whole file"
    for name in rng.sample(sorted(header.keys() - {"__metadata__"}), 40):
        low, high = header[name]["data_offsets"]
        place = begin + rng.randrange(low, high)
        overwrite(file, place, bytes([data[place] ^ 1]))
        for n, model in enumerate((folder, file)):
            assert seen.setdefault(cache.hash_part(model, tmp_path), (name, n)) == (name, n), name
        overwrite(file, place, data[place:place + 1])
    assert seen[cache.hash_part(folder, tmp_path)] == "whole folder" and (tmp_path / "models.txt").exists()

SAME = {"another name": lambda model: model.rename(model.with_name("renamed")),
        "another time": lambda model: [os.utime(path, ns=(0, 0)) or model for path in model.iterdir()][0],
        "a README": lambda model: (model / "README.md").write_text("x", "utf-8") and model,
        "a hidden file": lambda model: (model / ".gitattributes").write_text("x", "utf-8") and model}

@pytest.mark.parametrize("what", SAME)
def test_what_does_not_matter_is_the_same_model(tmp_path, settled, what):
    model = shutil.copytree(TINY / "transformer", tmp_path / "model")
    before = cache.hash_part(model, tmp_path)
    assert cache.hash_part(SAME[what](model), tmp_path) == before

def test_a_model_is_read_once_and_again_when_it_has_changed(tmp_path, settled, monkeypatch):
    model, read, real = shutil.copytree(TINY / "transformer", tmp_path / "model"), [], common.file_hash
    monkeypatch.setattr(cache, "file_hash", lambda path: read.append(path.name) or real(path))
    for want in ({"config.json", WEIGHTS}, set()):
        cache.hash_part(model, tmp_path)
        assert set(read) == want
        read.clear()
    change_weight(model)
    cache.hash_part(model, tmp_path)
    assert set(read) == {WEIGHTS}

# ---- finished pictures and runs depend on what they are made of ------------------------------------------------------

@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A folder with a model, its transformer as one file, a LoRA, a picture, a cache, and what predict.py has drawn."""
    folder = tmp_path_factory.mktemp("drawn")
    copy_model(folder / "model")
    shutil.copy(TINY / "transformer" / WEIGHTS, folder / "one.safetensors")
    (folder / "lora").mkdir()
    lora_file(folder / "lora", {k: 0.1 * v for k, v in lora_tensors().items()})
    save(paint_picture(), folder / "photos/a.bmp")
    draw(folder)
    return folder

def draw(folder, *flags, lora="lora", base="one.safetensors"):
    """-> whether predict.py drew the picture anew."""
    result = run_script("predict.py", "--model", folder / "model", "--transformer", folder / base, "--lora",
                        folder / lora, "--image", folder / "photos", "--prompt", "x", "--out_dir", folder / "out",
                        "--cache_dir", folder / "cache", "--num_inference_steps", 2, *flags)
    assert result.status == 0, result.err
    return "there already" not in result.out

def merged(folder, name="transformer_blocks.1.attn.to_q.weight"):
    """The one file gets other weights in one layer, as by a merged LoRA: the same length."""
    file = folder / "one.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors[name] += 0.01 * tensors[name].abs().mean()
    safetensors.torch.save_file(tensors, file)

def other_shift(model):
    config = model / "scheduler/scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()) | dict(max_shift=2.0)), "utf-8")

def other_lora(folder):
    lora_file(folder / "lora", {k: 0.2 * v for k, v in lora_tensors().items()})

def other_picture(folder):
    path = folder / "photos/a.bmp"
    overwrite(path, path.stat().st_size - 300, bytes(range(200)))

DRAWS = { # change -> whether the picture is another one
    "nothing": (lambda f: [], False),
    "merged base": (merged, True),
    "scheduler": (lambda f: other_shift(f / "model"), True),
    "VAE": (lambda f: change_weight(f / "model/vae"), True),
    "text encoder": (lambda f: change_weight(f / "model/text_encoder"), True),
    "LoRA": (other_lora, True),
    "a picture edited in place, same length and time": (other_picture, True),
    "strength": (lambda f: ["--lora_scale", 0.5], True),
    "seed": (lambda f: ["--seed", 1], True),
    "steps": (lambda f: ["--num_inference_steps", 3], True),
    "shift": (lambda f: ["--shift", 2], True),
    "size": (lambda f: ["--target_pixels", "96*96"], True),
    "quantize": (lambda f: ["--quantize", "int8"], True),
    "LoRA under another name": (lambda f: dict(lora=(f / "lora").rename(f / "other")), False),
    "base under another name": (lambda f: dict(base=(f / "one.safetensors").rename(f / "two.safetensors")), False),
    "tokens of a pass": (lambda f: ["--max_tokens", 100], False),
    "moved cache": (lambda f: (f / "cache").rename(f / "elsewhere") and ["--cache_dir", f / "elsewhere"], False)}

@pytest.mark.parametrize("change", DRAWS)
def test_a_finished_picture_is_drawn_again_if_anything_that_decides_it_has_changed(drawn, tmp_path, change):
    folder = shutil.copytree(drawn, tmp_path / "here")
    make, another = DRAWS[change]
    flags = make(folder)
    assert (draw(folder, **flags) if isinstance(flags, dict) else draw(folder, *(flags or []))) == another

RESUMED = { # change of the model's folder -> what the error names
    "merged base": (merged, "model_hash"),
    "scheduler": (lambda f: other_shift(f / "model"), "scheduler_hash"),
    "text encoder": (lambda f: change_weight(f / "model/text_encoder"), "data_hash"),
    "VAE": (lambda f: change_weight(f / "model/vae"), "data_hash"),
    "a picture": (lambda f: save(paint_picture(seed=9), f / "data/control/cat.png"), "data_hash"),
    "nothing": (lambda f: None, None), "README": (lambda f: (f / "model/scheduler/README.md").write_bytes(b"x"), None)}

@pytest.mark.parametrize("change", RESUMED)
def test_resume_compares_everything_that_decides_the_run(drawn, tmp_path, data, change):
    folder = shutil.copytree(drawn, tmp_path / "here")
    shutil.copytree(data, folder / "data")
    flags = ["--data", folder / "data", "--val_data", "--model", folder / "model", "--transformer",
             folder / "one.safetensors", "--cache_dir", folder / "cache", "--out_dir", folder / "run", *ON_DEVICE,
             "--lr_scheduler", "constant", "--save_every", 1, "--batch_size", 2]
    assert run_script("train.py", *flags, "--max_steps", 1).status == 0
    make, named = RESUMED[change]
    make(folder)
    result = run_script("train.py", *flags, "--max_steps", 2, "--resume")
    if named:
        assert result.status == 1 and is_one_line(result.errors[-1], named), result.err
    else:
        assert result.status == 0 and steps_of(folder / "run") == [1, 2], result.err

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
    run_script("cache.py", "--data", data, "--val_data", val, *ON_DEVICE, *flags)
    index = tmp_path / "c/tiny-val-val.json"
    rows = []
    edit = functools.partial(save, paint_picture(seed=99), val / "target/dog.png")
    for change in (lambda: None, edit, functools.partial(shutil.rmtree, val)):
        change()
        result = train(data, tmp_path, "--val_data", index, *flags)
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

@pytest.mark.parametrize("flags", [[], ["--skip_bad"]], ids=str)
def test_a_file_that_vanishes_while_others_are_encoded_is_an_error(tmp_path, data, monkeypatch, flags):
    real = cache.encode_files

    def encode_files(pipe, jobs, args):
        failed = real(pipe, jobs, args)
        min(jobs).unlink()
        return failed
    monkeypatch.setattr(cache, "encode_files", encode_files)
    result = make_cache(data, tmp_path / "c", *flags)
    assert result.status == 1 and is_one_line(result.errors[-1], "deleted") and "complete" not in result.out
    assert not list(tmp_path.glob("c/*.json"))

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
    assert not list(tmp_path.glob("c/.planned-*")) and done.items() <= cached_files(tmp_path / "c").items()

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

def sees_one_sample_less():
    """For a child process: its view of the cache lacks a sample."""
    make = cache.make_cache

    def make_cache(*args, **kwargs):
        samples, val_samples, *sizes = make(*args, **kwargs)
        return samples[1:], val_samples, *sizes
    cache.make_cache = make_cache

def sees_another_model():
    """For a child process: its copy of the transformer is another one."""
    real = cache.hash_part
    cache.hash_part = lambda place, cache_dir: "another" if place.name == "transformer" else real(place, cache_dir)

def sees_one_validation_sample_less():
    """Likewise of --val_data."""
    make = cache.make_cache

    def make_cache(*args, **kwargs):
        samples, val_samples, *sizes = make(*args, **kwargs)
        return samples, val_samples[1:], *sizes
    cache.make_cache = make_cache

@pytest.mark.parametrize("view, named", [(sees_one_sample_less, "data_hash"), (sees_another_model, "model_hash"),
                                         (sees_one_validation_sample_less, "val_data")])
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

def test_processes_with_different_flags_are_refused(tmp_path, small, start):
    env = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks = [start("train.py", *small.flags, "--out_dir", tmp_path / "run", *flags, env=env | {"RANK": str(n)})
             for n, flags in enumerate(([], ["--max_tokens", 999]))]
    assert [r.wait() for r in ranks] == [1, 1]
    assert is_one_line(ranks[0].output().strip().splitlines()[-1], "process 1", "max_tokens 999")

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
