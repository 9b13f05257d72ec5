"""
Safetensors files of another format than ours: a newer one is said to be newer, an older LoRA is read as any plain LoRA
is, an older cache file is encoded again. None of them is called damaged.

$ python -m pytest -q tests/test_formats.py    # twenty seconds
"""
import json
import shlex
import shutil

import pytest
import safetensors.torch

import predict
from library.files import tensor_files
from training import resume
from tests.harness import assert_bitwise, is_one_line, lora_tensors, refused, run_script

OLDER = {"sha256": "0" * 64, "dtypes": ["torch.float32"]} # how the JSON began before formats had a number

def save_older(path, tensors, meta, meta_key="json"):
    """It writes a file in the form of an earlier version of this project."""
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, path, {meta_key: json.dumps(OLDER | meta)})
    return path

def test_a_lora_of_an_older_format_is_read_as_any_plain_lora_is(tmp_path):
    """At its own scale, and with what it says about its training."""
    meta = {"transformer.r": 2, "transformer.lora_alpha": 4, "train.step": 3}
    path = save_older(tmp_path / predict.LORA_FILE, lora_tensors(), meta, "lora_adapter_metadata")
    lora = predict.read_lora(path)
    state, read = lora.state, lora.meta
    assert_bitwise(state, lora_tensors())
    assert read["transformer.lora_alpha"] == 4 and read["train.step"] == 3

def older_run(small, folder, older):
    """It returns a run whose last checkpoint's file is of an earlier version."""
    flags = [*small.flags, "--max_steps", 2, "--save_every", 1]
    assert run_script("train.py", *flags, "--out_dir", folder).status == 0
    path = folder / "checkpoint-000002" / older
    if older == predict.LORA_FILE:
        tensors, meta = tensor_files.read_tensors(path, "lora_adapter_metadata")
        save_older(path, tensors, meta, "lora_adapter_metadata")
    else:
        tensors, info = tensor_files.read_tensors(path)
        tensor_files.write_tensors(path, tensors, info | dict(optimizer=[["group", "lr", 0.1], ["self", "t", 3]]))
    return flags

@pytest.mark.parametrize("older", [predict.LORA_FILE, resume.OPTIMIZER_FILE])
def test_a_checkpoint_of_an_older_format_is_refused_as_older(tmp_path, small, older):
    """--resume names the way on, a new run from its LoRA, and that command works; whatever the folder is called."""
    run = tmp_path / "a newer run"
    flags = older_run(small, run, older)
    result = run_script("train.py", *flags, "--out_dir", run, "--resume", "--max_steps", 3)
    line = result.errors[-1]
    assert result.status == 1 and is_one_line(line, f"checkpoint-000002/{older}", "continue with that version, or")
    assert "version of this project" in line and "damaged" not in result.err
    python, script, *words = shlex.split(line.split("its LoRA: ")[1])
    assert words[-2:] == ["--pretrained_lora", str(run / "checkpoint-000002")]
    result = run_script(script, *words, "--max_steps", 1, "--out_dir", tmp_path / "new")
    assert python == "python" and result.status == 0 and "trained for 1 steps" in result.out, result.err

def test_a_cache_file_of_an_older_format_is_encoded_again(tmp_path, small):
    shutil.copytree(small.cache, tmp_path / "cache")
    file = min((tmp_path / "cache/latents").glob("*.safetensors"))
    sound, (tensors, meta) = file.read_bytes(), tensor_files.read_tensors(file, key=file.stem)
    save_older(file, tensors, meta)
    with refused(file, "of another version of this project", "cache.py --verify") as e:
        tensor_files.read_tensors(file, key=file.stem)
    assert isinstance(e.value, tensor_files.OtherVersion) and "damaged" not in str(e.value)
    result = run_script("cache.py", *small.cache_flags, "--cache_dir", tmp_path / "cache", "--verify")
    assert result.status == 0 and file.read_bytes() == sound
    assert "of another version of this project; encoding it again" in result.err and "damaged" not in result.err

def test_a_file_of_a_newer_format_is_of_another_version(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    monkeypatch.setattr(tensor_files, "FORMAT", tensor_files.FORMAT + 1)
    tensor_files.write_tensors(path, lora_tensors(), {"transformer.lora_alpha": 2}, "lora_adapter_metadata")
    monkeypatch.undo()
    with refused(path, "a newer version of this project") as e:
        predict.read_lora(path)
    assert isinstance(e.value, tensor_files.OtherVersion) and "damaged" not in str(e.value)
