"""
What is hashed is what is used: a file of a model, or a LoRA, that is replaced between the moment at which it is hashed
and the one at which it is read ends the command with one line, and makes no picture, no step, and no encoded file under
a wrong key. One that is replaced when it has been read changes nothing.
"""
import functools
import json
import shutil

import pytest
import safetensors.torch
import torch
from PIL import Image

import cache
import common
from library.models import devices
from library.data import stat_cache
import predict
from tests.harness import (ON_DEVICE, TINY, add_item, assert_bitwise, cached_files, change_weight, copy_model,
                           is_one_line, lora_file, lora_of, lora_tensors, make_cache,
                           paint_picture, results_of, run_script, save, steps_of)

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
    save(paint_picture(), folder / "photos/a.png")
    add_item(add_item(folder / "data", "cat"), "dog")
    assert draw_in(folder).status == 0
    shutil.rmtree(folder / "out")
    return folder

@pytest.fixture
def here(place, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(place, tmp_path / "here")

def draw_in(folder, *flags):
    return run_script("predict.py", "--model", folder / "model", "--lora", folder / "lora1", "--image",
                      folder / "photos", "--prompt", "x", "--out_dir", folder / "out", "--cache_dir", folder / "cache",
                      "--num_inference_steps", 2, "--target_pixels", "64*64", *flags)

def train_in(folder, *flags):
    return run_script("train.py", "--data", folder / "data", "--val_data", folder / "data", "--model", folder / "model",
                      "--cache_dir", folder / "cache", "--out_dir", folder / "run", "--max_steps", 1, "--batch_size", 2,
                      *ON_DEVICE, *flags)

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

# {what is replaced: (how, what the line names)}
REPLACED = {
    "transformer": (lambda f: change_weight(f / "model/transformer"), "transformer"),
    "transformer's config": (lambda f: edit_json(f / "model/transformer/config.json", patch_size=1), "transformer"),
    "transformer, gone": (lambda f: (f / "model/transformer" / WEIGHTS).unlink(), "transformer"),
    "VAE": (lambda f: change_weight(f / "model/vae"), "vae"),
    "VAE, gone": (lambda f: shutil.rmtree(f / "model/vae"), "vae"),
    "text encoder": (lambda f: change_weight(f / "model/text_encoder"), "text_encoder"),
    "tokenizer": (other_words, "tokenizer"),
    "scheduler": (lambda f: edit_json(f / "model/scheduler/scheduler_config.json", max_shift=2.0), "scheduler")}
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

@pytest.mark.parametrize("what", REPLACED)
def test_what_changes_while_pictures_are_encoded_is_one_line_and_no_picture(place, here, monkeypatch, what):
    """With nothing encoded yet; no file enters the cache that the old model would not have made."""
    change, named = REPLACED[what]
    shutil.rmtree(here / "cache")
    before(monkeypatch, cache, "encode_files", functools.partial(change, here))
    result = draw_in(here)
    assert result.status == 1 and is_one_line(result.errors[-1], named, "" if "gone" in what else "changed"), result.err
    assert "Traceback" not in result.err and not list((here / "out").glob("*.png"))
    assert not list((here / "cache").glob(".planned-*"))
    for file in cached_files(here / "cache"):
        if file.suffix == ".safetensors":
            assert_bitwise(*[safetensors.torch.load_file(f / "cache" / file) for f in (here, place)])

@pytest.mark.parametrize("what, moment", [(what, "encode_samples") for what in sorted(DECODED)] + [
    ("transformer", "load_part"), ("VAE", "load_part")])
def test_what_changes_before_it_is_loaded_is_one_line_and_no_picture(here, monkeypatch, what, moment):
    """With all encoded already: only the transformer and the VAE, which decodes, are read."""
    change, named = REPLACED[what]
    before(monkeypatch, cache, moment, functools.partial(change, here))
    result = draw_in(here)
    assert result.status == 1 and is_one_line(result.errors[-1], named, "" if "gone" in what else "changed"), result.err
    assert "Traceback" not in result.err and not list((here / "out").glob("*.png"))

@pytest.mark.parametrize("module, moment", [(devices, "start_processes"), (cache, "load_pipeline"),
                                            (cache, "encoder_fingerprints"), (predict, "plan_requests")])
@pytest.mark.parametrize("what", ["lora1/" + predict.LORA_FILE, "model/model_index.json", "model/vae"])
def test_what_is_gone_before_it_is_hashed_or_behind_is_one_line(here, monkeypatch, module, moment, what):
    """At any moment, though the line says it in other words where the file was never seen."""
    before(monkeypatch, module, moment, lambda: (here / what).rename(here / "elsewhere"))
    result = draw_in(here)
    is_read = moment == "plan_requests" if what.endswith("model_index.json") else moment != "start_processes"
    if is_read and not what.endswith("vae"): # all of it is in memory
        assert result.status == 0
        return
    assert result.status == 1 and is_one_line(result.errors[-1], (here / what).name), result.err
    assert not list((here / "out").glob("*.png"))

def test_the_class_of_a_pipeline_that_is_replaced_later_changes_nothing(here, monkeypatch):
    """The keys have the class that was loaded, and its encoders encode on."""
    want = draw_in(here, "--out_dir", here / "want", "--cache_dir", here / "other")
    before(monkeypatch, predict, "plan_requests",
           lambda: edit_json(here / "model/model_index.json", _class_name="QwenImageEditPipeline"))
    result = draw_in(here, "--cache_dir", here / "new")
    assert want.status == result.status == 0, result.err
    assert {*cached_files(here / "other")} == {*cached_files(here / "new")}
    pictures = [Image.open(results_of(here / name)["a"]) for name in ("want", "out")]
    assert pictures[0].info["key"] == pictures[1].info["key"] and pictures[0].tobytes() == pictures[1].tobytes()

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

def change_weight_of(file):
    tensors = safetensors.torch.load_file(file)
    tensors["proj_out.weight"] += 0.01
    safetensors.torch.save_file(tensors, file)

TRAINED = {
    "transformer": (lambda f: change_weight(f / "model/transformer"), cache, "encode_samples", "transformer"),
    "transformer, while it is loaded": (lambda f: change_weight(f / "model/transformer"), predict, "place_transformer",
                                        "transformer"),
    "scheduler": (lambda f: edit_json(f / "model/scheduler/scheduler_config.json", max_shift=2.0), cache,
                  "encode_samples", "scheduler"),
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

def test_a_run_folders_lora_is_looked_up_once(here, monkeypatch):
    """Its newest checkpoint would be another one at each look, while it is being trained."""
    run = here / "other"
    for step in (1, 2):
        (run / f"checkpoint-{step:06d}").mkdir(parents=True)
    shutil.copy(here / "lora1" / predict.LORA_FILE, run / "checkpoint-000001")
    shutil.rmtree(run / "checkpoint-000002")

    def newer():
        (run / "checkpoint-000002").mkdir()
        shutil.copy(here / "lora2" / predict.LORA_FILE, run / "checkpoint-000002")
    before(monkeypatch, cache, "encode_samples", newer)
    seen, real = [], predict.read_lora
    monkeypatch.setattr("library.lora.lora_file.read_lora", lambda path: seen.append(str(path)) or real(path))
    result = train_in(here, "--sample_lora", run)
    assert result.status == 0, result.err
    assert seen == [str(run / "checkpoint-000001" / predict.LORA_FILE)]
    used, = result.globals["sample_loras"]
    assert used.hash == common.file_hash(run / "checkpoint-000001" / predict.LORA_FILE)

def test_an_index_names_the_encoders_that_have_encoded(here, monkeypatch):
    """Not those that lie there when it is written."""
    models = cache.encoder_fingerprints(here / "model", here / "cache")
    real = cache.encode_samples

    def encode_samples(*args, **kwargs):
        failed = real(*args, **kwargs)
        change_weight(here / "model/vae")
        return failed
    monkeypatch.setattr(cache, "encode_samples", encode_samples)
    assert make_cache(here / "data", here / "cache", "--model", here / "model").status == 0
    assert json.loads((here / "cache/model-data.json").read_bytes())["models"] == models

def test_small_weights_do_not_lie_in_their_files(tmp_path):
    """Of a folder and of one file: they are overwritten in place, and the model stays."""
    folder = shutil.copytree(TINY / "transformer", tmp_path / "model/transformer")
    file = shutil.copy(folder / WEIGHTS, tmp_path / "one.safetensors")
    models = [predict.load_transformer(tmp_path / "model", "bfloat16"), # the files' own
              predict.load_transformer(tmp_path / "model", "bfloat16", file=file)]
    predict.place_transformer(models[1], "cpu")
    want = safetensors.torch.load_file(TINY / "transformer" / WEIGHTS)
    for path in (folder / WEIGHTS, tmp_path / "one.safetensors"):
        with open(path, "r+b") as f:
            f.write(b"\xff" * path.stat().st_size)
    for model in models:
        for name, p in model.named_parameters():
            assert torch.equal(p, want[name]), name

def test_the_second_look_at_a_model_reads_no_byte(here, monkeypatch):
    """Its stamps are enough: what the comparison costs for 58 GB."""
    monkeypatch.setattr(stat_cache, "SETTLED", -10**15)
    draw_in(here)
    monkeypatch.setattr(cache, "file_hash", lambda path: pytest.fail(f"{path} is read"))
    assert draw_in(here, "--seed", 1).status == 0
