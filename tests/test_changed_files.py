"""
A key changes with everything that it stands for, and with nothing else; and what is hashed is what is used: a file of a
model, or a LoRA, that is replaced between the moment at which it is hashed and the one at which it is read ends the
command with one line, and makes no picture, no step, and no encoded file under a wrong key. One that is replaced when
it has been read changes nothing.
"""
import functools
import json
import os
import random
import shutil

import pytest
import safetensors.torch
from PIL import Image

import cache
import common
from library.data import stat_cache
import predict
from tests.harness import (ON_DEVICE, TINY, add_item, assert_bitwise, cached_files, change_weight, copy_model,
                           is_one_line, lora_file, lora_of, lora_tensors, paint_picture, results_of, run_script, save,
                           steps_of)

WEIGHTS = "diffusion_pytorch_model.safetensors"

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, its transformer as one file, two LoRAs, a photograph, a dataset, a cache of both."""
    folder = tmp_path_factory.mktemp("place")
    copy_model(folder / "model")
    shutil.copy(TINY / "transformer" / WEIGHTS, folder / "one.safetensors")
    for n in (1, 2):
        (folder / f"lora{n}").mkdir()
        lora_file(folder / f"lora{n}", {k: 0.05 * n * v for k, v in lora_tensors().items()})
    save(paint_picture(), folder / "photos/a.bmp")
    add_item(add_item(folder / "data", "cat"), "dog")
    assert draw_in(folder).status == 0
    shutil.rmtree(folder / "out")
    return folder

@pytest.fixture
def here(place, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(place, tmp_path / "here")

def draw_in(folder, *flags):
    lora = [] if "--lora" in flags else ["--lora", folder / "lora1"]
    return run_script("predict.py", "--model", folder / "model", *lora, "--image", folder / "photos", "--prompt", "x",
                      "--out_dir", folder / "out", "--cache_dir", folder / "cache", "--num_inference_steps", 2,
                      "--target_pixels", "64*64", *flags)

def train_in(folder, *flags):
    return run_script("train.py", "--data", folder / "data", "--val_data", folder / "data", "--model", folder / "model",
                      "--cache_dir", folder / "cache", "--out_dir", folder / "run", "--max_steps", 1, "--batch_size", 2,
                      "--val_pictures", 1, "--num_inference_steps", 2, *ON_DEVICE, *flags)

def shrink(file):
    """A sound transformer with one block less, in one file."""
    tensors = safetensors.torch.load_file(file)
    last = max(int(name.split(".")[1]) for name in tensors if name.startswith("transformer_blocks."))
    kept = {name: t for name, t in tensors.items() if not name.startswith(f"transformer_blocks.{last}.")}
    safetensors.torch.save_file(kept, file)

def edit_json(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_bytes()) | fields), "utf-8")

def other_lora(folder):
    shutil.copy(folder / "lora2" / predict.LORA_FILE, folder / "lora1" / predict.LORA_FILE)

def other_words(folder):
    """A tokenizer of other bytes."""
    file = folder / "model/tokenizer/tokenizer.json"
    file.write_text(file.read_text("utf-8") + " ", "utf-8")

def change_weight_of(file):
    tensors = safetensors.torch.load_file(file)
    tensors["proj_out.weight"] += 0.01
    safetensors.torch.save_file(tensors, file)

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

def is_drawn(folder, *flags):
    """Whether predict.py, on the transformer's one file, draws the picture anew."""
    result = draw_in(folder, "--transformer", folder / "one.safetensors", *flags)
    assert result.status == 0, result.err
    return "there already" not in result.out

RUN = ["--val_data", "--lr_scheduler", "constant", "--save_every", 1]

@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    """A copy of `place` with a finished picture and a run of one step."""
    folder = shutil.copytree(place, tmp_path_factory.mktemp("finished") / "here")
    assert is_drawn(folder)
    assert train_in(folder, *RUN, "--transformer", folder / "one.safetensors").status == 0
    return folder

def other_shift(folder):
    edit_json(folder / "model/scheduler/scheduler_config.json", max_shift=2.0)

def other_picture(folder):
    path = folder / "photos/a.bmp"
    overwrite(path, path.stat().st_size - 300, bytes(range(200)))

DRAWS = { # change -> whether the picture is another one. It may return flags.
    "nothing": (lambda f: [], False),
    "merged base": (lambda f: change_weight_of(f / "one.safetensors"), True),
    "scheduler": (other_shift, True),
    "VAE": (lambda f: change_weight(f / "model/vae"), True),
    "text encoder": (lambda f: change_weight(f / "model/text_encoder"), True),
    "LoRA": (other_lora, True),
    "a picture edited in place, same length and time": (other_picture, True),
    "prompt": (lambda f: ["--prompt", "y"], True),
    "guidance": (lambda f: ["--true_cfg_scale", 4], True),
    "strength": (lambda f: ["--lora_scale", 0.5], True),
    "scales": (lambda f: ["--scales", 0.25], True),
    "seed": (lambda f: ["--seed", 1], True),
    "steps": (lambda f: ["--num_inference_steps", 3], True),
    "shift": (lambda f: ["--shift", 2], True),
    "size": (lambda f: ["--target_pixels", "96*96"], True),
    "quantize": (lambda f: ["--quantize", "int8"], True),
    "LoRA under another name": (lambda f: ["--lora", (f / "lora1").rename(f / "other")], False),
    "base under another name": (lambda f: ["--transformer", (f / "one.safetensors").rename(f / "two.safetensors")],
                                False),
    "tokens of a pass": (lambda f: ["--max_tokens", 100], False),
    "moved cache": (lambda f: ["--cache_dir", (f / "cache").rename(f / "elsewhere")], False)}

@pytest.mark.parametrize("change", DRAWS)
def test_a_finished_picture_is_drawn_again_if_anything_that_decides_it_has_changed(finished, tmp_path, change):
    folder = shutil.copytree(finished, tmp_path / "here")
    make, another = DRAWS[change]
    assert is_drawn(folder, *make(folder) or []) == another

RESUMED = { # change -> what the error names
    "merged base": (lambda f: change_weight_of(f / "one.safetensors"), "model_hash"),
    "scheduler": (other_shift, "scheduler_hash"),
    "text encoder": (lambda f: change_weight(f / "model/text_encoder"), "data_hash"),
    "VAE": (lambda f: change_weight(f / "model/vae"), "data_hash"),
    "a picture": (lambda f: save(paint_picture(seed=9), f / "data/control/cat.png"), "data_hash"),
    "README": (lambda f: (f / "model/scheduler/README.md").write_bytes(b"x"), None)}

@pytest.mark.parametrize("change", RESUMED)
def test_resume_compares_everything_that_decides_the_run(finished, tmp_path, change):
    folder = shutil.copytree(finished, tmp_path / "here")
    make, named = RESUMED[change]
    make(folder)
    result = train_in(folder, *RUN, "--transformer", folder / "one.safetensors", "--max_steps", 2, "--resume")
    if named:
        assert result.status == 1 and is_one_line(result.errors[-1], named), result.err
    else:
        assert result.status == 0 and steps_of(folder / "run") == [1, 2], result.err

# ---- what is replaced between its hash and its use ------------------------------------------------------------------

# {what is replaced: (how, what the line names)}
REPLACED = {
    "transformer": (lambda f: change_weight(f / "model/transformer"), "transformer"),
    "transformer's config": (lambda f: edit_json(f / "model/transformer/config.json", patch_size=1), "transformer"),
    "transformer, gone": (lambda f: (f / "model/transformer" / WEIGHTS).unlink(), "transformer"),
    "VAE": (lambda f: change_weight(f / "model/vae"), "vae"),
    "VAE, gone": (lambda f: shutil.rmtree(f / "model/vae"), "vae"),
    "text encoder": (lambda f: change_weight(f / "model/text_encoder"), "text_encoder"),
    "tokenizer": (other_words, "tokenizer"),
    "scheduler": (other_shift, "scheduler")}
DECODED = {"transformer", "transformer's config", "transformer, gone", "VAE", "VAE, gone"}

def before(monkeypatch, module, name, act, times=1):
    """The function runs as before, but act() comes first, at its first calls."""
    real, calls = getattr(module, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) <= times:
            act()
        return real(*args, **kwargs)
    monkeypatch.setattr(module, name, call)

@pytest.mark.parametrize("what, moment", [(what, "encode_files") for what in REPLACED] + [
    (what, "encode_samples") for what in sorted(DECODED)] + [("transformer", "load_part"), ("VAE", "load_part")])
def test_what_changes_before_it_is_used_is_one_line_and_no_picture(place, here, monkeypatch, what, moment):
    """While pictures are encoded, where no file enters the cache that the old model would not have made; or with all
    encoded already, when only the transformer and the VAE, which decodes, are read."""
    change, named = REPLACED[what]
    if moment == "encode_files":
        shutil.rmtree(here / "cache")
    before(monkeypatch, cache, moment, functools.partial(change, here))
    result = draw_in(here)
    assert result.status == 1 and is_one_line(result.errors[-1], named, "" if "gone" in what else "changed"), result.err
    assert "Traceback" not in result.err and not list((here / "out").glob("*.png"))
    assert not list((here / "cache").glob(".planned-*"))
    for file in cached_files(here / "cache"):
        if file.suffix == ".safetensors":
            assert_bitwise(*[safetensors.torch.load_file(f / "cache" / file) for f in (here, place)])

@pytest.mark.parametrize("script", ["predict", "train"])
@pytest.mark.parametrize("change", [False, True], ids=["same", "other"])
def test_another_machine_has_the_same_files_elsewhere(here, monkeypatch, script, change):
    """What the first process sends holds no path of its own hub cache: here each path below model/ or lora1/ that is
    sent becomes one that is not there. A file that changes is named as this process finds it."""
    real = common.on_first_process

    def sent(value):
        if isinstance(value, dict):
            return {sent(key): sent(one) for key, one in value.items()}
        own = str(value).startswith((f"{here}/model", f"{here}/lora1"))
        return type(value)(f"/elsewhere{value}") if own else value
    monkeypatch.setattr(common, "on_first_process", lambda make: sent(real(make)))
    if change:
        before(monkeypatch, predict, "place_transformer", lambda: change_weight(here / "model/transformer"))
    else:
        shutil.rmtree(here / "cache")
    result = (draw_in if script == "predict" else train_in)(here)
    assert result.status == change, result.err
    if change:
        assert is_one_line(result.errors[-1], here / "model/transformer", "changed"), result.err

@pytest.mark.parametrize("change", ["other", "gone"])
@pytest.mark.parametrize("moment", ["encode_samples", "load_part"])
def test_a_lora_that_changes_when_it_has_been_read_changes_no_picture(here, monkeypatch, moment, change):
    """What is in memory is what was hashed: the picture and its key are the first LoRA's; the second one draws anew."""
    lora = here / "lora1" / predict.LORA_FILE
    want = draw_in(here, "--out_dir", here / "want")
    with monkeypatch.context() as patch:
        before(patch, cache, moment, functools.partial(other_lora, here) if change == "other" else lora.unlink)
        result = draw_in(here)
    assert want.status == result.status == 0, result.err
    pictures = [Image.open(results_of(here / name)["a"]) for name in ("want", "out")]
    assert pictures[0].info["key"] == pictures[1].info["key"] and pictures[0].tobytes() == pictures[1].tobytes()
    if change == "other":
        again = draw_in(here, "--out_dir", here / "again")
        assert again.status == 0, again.err
        assert Image.open(results_of(here / "again")["a"]).tobytes() != pictures[0].tobytes()

@pytest.mark.parametrize("change", [
    lambda file: change_weight_of(file), shrink, lambda file: file.unlink(), lambda file: file.write_bytes(b"x")],
    ids=["other weights", "other blocks", "gone", "broken"])
@pytest.mark.parametrize("script", ["predict", "train"])
def test_one_file_of_a_transformer_that_changes_is_one_line(here, monkeypatch, change, script):
    """Its layout was read at the start: a file with other tensors ended with a KeyError."""
    file = here / "one.safetensors"
    before(monkeypatch, cache, "encode_samples", lambda: change(file))
    result = (draw_in if script == "predict" else train_in)(here, "--transformer", file)
    assert result.status == 1 and is_one_line(result.errors[-1], file), result.err
    assert "Traceback" not in result.err and not list((here / "out").glob("*.png")) and not steps_of(here / "run")

TRAINED = {
    "transformer": (lambda f: change_weight(f / "model/transformer"), cache, "encode_samples", "transformer"),
    "transformer, while it is loaded": (lambda f: change_weight(f / "model/transformer"), predict, "place_transformer",
                                        "transformer"),
    "scheduler": (other_shift, cache, "encode_samples", "scheduler"),
    "VAE of the validation": (lambda f: change_weight(f / "model/vae"), predict, "place_transformer", "vae"),
    "VAE": (lambda f: change_weight(f / "model/vae"), cache, "encode_files", "vae"),
    "text encoder": (lambda f: change_weight(f / "model/text_encoder"), cache, "encode_files", "text_encoder")}

@pytest.mark.parametrize("what", TRAINED)
def test_a_training_on_what_changes_before_its_first_step_is_one_line_and_no_step(here, monkeypatch, what):
    change, module, moment, named = TRAINED[what]
    if moment == "encode_files":
        shutil.rmtree(here / "cache")
    before(monkeypatch, module, moment, functools.partial(change, here))
    result = train_in(here)
    assert result.status == 1 and is_one_line(result.errors[-1], named, "changed"), result.err
    assert "Traceback" not in result.err and not list((here / "run").glob("[!.]*")) # the same command may run again
    assert not list((here / "cache").glob(".planned-*"))

def trainings_without_and_with(here, monkeypatch, name, change, *flags):
    """Asserts that a training is the same, to the bit and with the pictures of its validations, when change() is
    called before cache's function of that name -> both results."""
    want = train_in(here, *flags)
    shutil.move(here / "run", here / "want")
    before(monkeypatch, cache, name, change)
    got = train_in(here, *flags)
    assert want.status == got.status == 0, got.err
    assert_bitwise(lora_of(here / "run"), lora_of(here / "want"))
    pictures = [path.relative_to(here / "want") for path in here.glob("want/samples/*/data/*.png")]
    assert pictures
    for file in pictures:
        assert Image.open(here / "run" / file).tobytes() == Image.open(here / "want" / file).tobytes()
    return want, got

def test_loras_that_change_when_they_have_been_read_change_no_training(here, monkeypatch):
    """--pretrained_lora and --sample_lora, both replaced while the cache is filled."""
    def replace_both():
        for n in (1, 2):
            lora_file(here / f"lora{n}", {k: 0.3 * v for k, v in lora_tensors().items()})
    flags = ["--pretrained_lora", here / "lora1", "--sample_lora", here / "lora2"]
    want, got = trainings_without_and_with(here, monkeypatch, "encode_samples", replace_both, *flags)
    assert got.globals["config"]["pretrained_hash"] == want.globals["config"]["pretrained_hash"]

def test_what_is_replaced_when_it_has_been_read_stops_nothing_and_changes_nothing(here, monkeypatch):
    """Overwritten in place and shorter, as cp does it, when the first step is loaded. In the files' own dtype nothing
    of a small model is mapped any more, on a CPU either: the process would die by SIGBUS."""
    def spoil():
        for file in [*(here / "lora1").iterdir(), *here.glob("model/*/*.*")]:
            file.write_bytes(b"x" * 999)
    flags = ["--sample_lora", here / "lora1", "--max_steps", 2, "--dtype", "bfloat16"]
    trainings_without_and_with(here, monkeypatch, "load_latents", spoil, *flags)
