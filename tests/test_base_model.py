"""
A LoRA that was trained on another model than it is used on gets one line, wherever it is taken; the same model, and a
file that does not say, get none.
"""
import json
from types import SimpleNamespace

import pytest
import safetensors.torch

import common
from library.files import tensor_files
from library.lora.lora_file import warn_other_base
import predict
from tests.harness import (ON_DEVICE, as_v1, copy_model, lora_tensors, paint_picture,
                           run_script, save, works)

@pytest.fixture(autouse=True)
def lines_begin_anew():
    common.warn_once.cache_clear() # each is printed once in a process

@pytest.fixture(scope="module")
def made(small, tmp_path_factory):
    """A LoRA of two steps on tiny; tiny as a v1, as a 2511, and as it is under another name."""
    folder = tmp_path_factory.mktemp("made")
    works("train.py", *small.flags, "--max_steps", 2, "--out_dir", folder / "run")
    models = {name: copy_model(folder / name) for name in ("v1", "2511", "same")}
    as_v1(models["v1"])
    config = models["2511"] / "transformer/config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()) | dict(zero_cond_t=True)), "utf-8")
    return SimpleNamespace(run=folder / "run", models=models, photo=save(paint_picture(), folder / "in/bee.png"))

def warnings_of(result):
    assert result.status == 0, result.err
    return [line for line in result.err.splitlines() if line.startswith("warning: ") and "was trained" in line]

WORDS = {"v1": "(v1)", "2511": "(2511)"}

@pytest.mark.parametrize("kind", [*WORDS, "same"])
def test_a_lora_on_another_base_gets_one_line_in_predict(tmp_path, made, kind):
    """Which names both models and their kinds, if these differ; and none on a copy of its own model."""
    model = made.models[kind]
    result = run_script("predict.py", "--model", model, "--lora", made.run, "--image", made.photo, "--prompt", "snow",
                        "--cache_dir", tmp_path / "cache", "--out_dir", tmp_path / "o", "--num_inference_steps", 2,
                        *ON_DEVICE)
    lines = warnings_of(result)
    assert len(lines) == (kind != "same"), result.err
    if lines:
        assert f"{made.run / predict.LORA_FILE}: was trained on tiny (Plus); here is {model} (" in lines[0], lines
        assert WORDS[kind] in lines[0]

def test_a_lora_on_another_base_gets_one_line_where_it_is_merged(tmp_path, made):
    for kind in ("v1", "same"):
        result = run_script("tools/convert_lora.py", made.run, "--to", "model", "--model", made.models[kind], "--out",
                            tmp_path / kind)
        assert [WORDS[kind] in line for line in warnings_of(result)] == [True] * (kind != "same"), result.err

def test_a_lora_on_another_base_gets_one_line_where_it_is_trained_with(tmp_path, small, made):
    """--pretrained_lora and --sample_lora, each with its own line."""
    data = small.folder / "data"
    copy = made.run.with_name("copy.safetensors")
    copy.write_bytes((made.run / predict.LORA_FILE).read_bytes())
    result = run_script("train.py", "--model", made.models["v1"], "--data", data, "--val_data", "--device", "cpu",
                        "--cache_dir", tmp_path / "cache", "--max_steps", 1, "--batch_size", 1, "--out_dir",
                        tmp_path / "run", "--pretrained_lora", made.run, "--sample_lora", copy)
    assert sorted(line.split(": ")[1] for line in warnings_of(result)) == sorted(map(str, [
        copy, made.run / predict.LORA_FILE])), result.err

def written(path, **train):
    meta = {"transformer.r": 2, "transformer.lora_alpha": 2} | {f"train.{key}": value for key, value in train.items()}
    tensor_files.write_tensors(path, lora_tensors(), meta, "lora_adapter_metadata")
    return path

PLUS = dict(model="tiny", pipeline="QwenImageEditPlusPipeline", zero_cond_t=False, model_hash="a")

def lines_of(capfd, path, here):
    warn_other_base([predict.read_lora(path)], here)
    return capfd.readouterr().err.splitlines()

def test_what_a_file_does_not_say_is_not_compared(tmp_path, capfd):
    """Files of diffusers, of an older version, and of strangers, who may say anything."""
    for n, train in enumerate([{}, dict(model="tiny", config=dict(model_hash="0123456789abcdef")), dict(model=5),
                               dict(pipeline=["x"], model_hash={}, zero_cond_t="yes")]):
        assert not lines_of(capfd, written(tmp_path / f"{n}.safetensors", **train), PLUS)

@pytest.mark.parametrize("architecture, told", [
    ("Qwen-Image-Edit/lora", True), ("Qwen-Image-Edit-Plus/lora", False), ("Qwen-Image-Edit-2511/lora", True),
    ("Qwen-Image/lora", False)])
def test_the_architecture_that_musubi_tuner_writes_is_compared(tmp_path, capfd, architecture, told):
    """Qwen-Image is the family: its LoRAs are used for edits on purpose."""
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(lora_tensors(), path, metadata={"modelspec.architecture": architecture})
    lines = lines_of(capfd, path, PLUS)
    assert len(lines) == told and all("another model" in line for line in lines)

