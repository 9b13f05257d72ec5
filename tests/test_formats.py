"""
Files of every format that this project has written are used, or refused as older; those of a newer one as newer; none
of them is called damaged.

tests/formats/COMMIT holds what the commit's own scripts have made, of one pair of 64 x 64 pixels:

    $ python train.py --model TINY --data DATA --cache_dir cache --target_pixels native --control_pixels native \
        --device cpu --max_steps 2 --save_every 1 --lora_rank 1 --lora_alpha 2 --lora_targets to_q --batch_size 1 \
        --lr 0.01 --out_dir run
    $ python tools/convert_lora.py run/checkpoint-000002 --to comfyui --out comfyui.safetensors

Format 1 is of a0de35c (the first one) and 2113f1a, format 2 of 8323e9b and 17016b9. When common.FORMAT becomes
another number, a folder of the last commit before it belongs here.
"""
import json
import random
import shlex
import shutil
from pathlib import Path

import pytest
import safetensors.torch

import common
from library.data import index_file
from library.files import tensor_files
from training import resume
import predict
from tests.harness import TINY, assert_bitwise, assert_no_flip_is_silent, is_one_line, refused, renamed, run_script

FORMATS = Path(__file__).with_name("formats")
LORAS = sorted(path for path in FORMATS.rglob("*.safetensors") if path.parent.name not in ("latents", "text")
               and path.name != resume.OPTIMIZER_FILE)
FIRST = "a0de35c", "2113f1a" # whose files have format 1
name_of = lambda path: "-".join(path.relative_to(FORMATS).with_suffix("").parts)

@pytest.fixture(autouse=True)
def lines_begin_anew():
    common.warn_once.cache_clear() # each is printed once in a process

def is_old(line):
    return "an older version of this project" in line and "damaged" not in line

@pytest.mark.parametrize("path", LORAS, ids=name_of)
def test_a_lora_of_every_format_is_used(path, capfd):
    """Checkpoints, finished runs' files and what was made for ComfyUI: each with the tensors that the file has, at its
    own scale. One line if it is of format 1; format 2 is checked as ours is."""
    lora = predict.read_lora(path)
    lines = capfd.readouterr().err.splitlines()
    raw = {key: value for key, value in safetensors.torch.load_file(path).items() if ".lora_" in key}
    assert_bitwise(lora.state, renamed("diffusion_model.", "transformer.")(raw))
    assert [is_old(line) for line in lines] == [True] * (path.parts[-2] in FIRST or path.parts[-3] in FIRST), lines
    assert lora.meta["train.step"] == 2 and lora.meta["train.geometry"]["upscale"] is True
    transformer = predict.load_transformer(TINY, "float32", weights=False)
    predict.load_loras(transformer, [lora])
    scales = {m.scaling["lora0"] for m in transformer.modules() if "lora0" in getattr(m, "scaling", {})}
    folded = path.parent.parent == FORMATS and path.name == predict.LORA_FILE # a finished run's
    assert scales == {1.0 if folded else 2.0}

def test_a_lora_of_the_first_format_is_converted_and_trained_on(tmp_path, small):
    file = FORMATS / f"a0de35c/checkpoint-000002/{predict.LORA_FILE}"
    result = run_script("tools/convert_lora.py", file, "--to", "diffusers", "--out", tmp_path / "x.safetensors")
    assert result.status == 0 and is_old(result.err), result.err
    assert_bitwise(predict.read_lora(tmp_path / "x.safetensors").state, predict.read_lora(file).state)
    result = run_script("train.py", *small.flags[:7], "--max_steps", 1, "--batch_size", 1, "--lr", 1e-30, "--optimizer",
                        "torch.optim.SGD", "--weight_decay", 0, "--out_dir", tmp_path / "run", "--pretrained_lora",
                        file.parent)
    assert result.status == 0, result.err
    assert_bitwise(predict.read_lora(tmp_path / "run/checkpoint-000001").state, predict.read_lora(file).state)

def test_no_flipped_bit_of_an_older_lora_is_silent(tmp_path):
    """It is refused, or read as before, with the line that it is older."""
    for commit in ("a0de35c", "8323e9b"):
        source = FORMATS / commit / "checkpoint-000002" / predict.LORA_FILE
        sound = source.read_bytes()
        bits = random.Random(0).sample(range(8 * len(sound)), 400)
        want = predict.read_lora(source)
        assert assert_no_flip_is_silent(tmp_path / "x.safetensors", sound, want, bits) < 10

@pytest.mark.parametrize("commit", ["a0de35c", "2113f1a", "8323e9b"])
def test_a_checkpoint_of_an_older_format_is_refused_as_older(tmp_path, small, commit):
    """--resume names the way on, a new run from its LoRA, and that command works."""
    run = tmp_path / "run"
    shutil.copytree(FORMATS / commit / "checkpoint-000002", run / "checkpoint-000002")
    (run / "log.jsonl").write_text('{"command": []}\n', "utf-8")
    result = run_script("train.py", *small.flags, "--out_dir", run, "--resume")
    assert result.status == 1 and is_old(result.err), result.err
    assert is_one_line(result.errors[-1], run / "checkpoint-000002", "continue with that version, or"), result.err
    python, script, *flags = shlex.split(result.errors[-1].split("its LoRA: ")[1])
    result = run_script(script, *flags, "--max_steps", 1, "--out_dir", tmp_path / "new")
    assert python == "python" and result.status == 0 and "trained for 1 steps" in result.out, result.err

def test_a_checkpoint_of_the_last_format_is_read():
    from training import resume
    checkpoint = resume.read_checkpoint(FORMATS / "17016b9/checkpoint-000002", "torch.optim.Muon")
    assert checkpoint.info["step"] == 2 and len(checkpoint.lora) == 6 and checkpoint.tensors

def test_a_cache_file_of_an_older_format_is_encoded_again(tmp_path, small):
    """In the place of one of ours; and where nothing can encode it, it is refused as older."""
    old = FORMATS / "2113f1a/cache/latents/c1ca30339e4adb0d9dab892f24e29182.safetensors"
    with refused(old, "an older version", "cache.py --verify") as e:
        tensor_files.read_tensors(old, key=old.stem)
    shutil.copytree(small.cache, tmp_path / "cache")
    file = min((tmp_path / "cache/latents").glob("*.safetensors"))
    sound = file.read_bytes()
    file.write_bytes(old.read_bytes())
    result = run_script("cache.py", *small.cache_flags, "--cache_dir", tmp_path / "cache", "--verify")
    assert result.status == 0 and file.read_bytes() == sound
    assert "of another version of this project; encoding it again" in result.err and "damaged" not in result.err
    last = next((FORMATS / "17016b9/cache/latents").glob("*.safetensors"))
    assert tensor_files.read_tensors(last, key=last.stem)[0]["pixel_latent"].shape == (16, 64)

def test_an_index_of_an_older_version_is_not_called_damaged():
    for commit, name in (("a0de35c", "index.json"), ("2113f1a", "tiny-data.json")):
        try:
            index_file.read_index(FORMATS / commit / "cache" / name)
        except common.InputError as e:
            assert is_one_line(str(e), name, "run cache.py again") and "damaged" not in str(e)

def test_a_file_of_a_newer_format_is_said_to_be_newer(tmp_path, monkeypatch):
    """A LoRA, a cache file and an optimizer's state."""
    from training import resume
    tensors, path = safetensors.torch.load_file(LORAS[0]), tmp_path / "x.safetensors"
    monkeypatch.setattr(tensor_files, "FORMAT", tensor_files.FORMAT + 1)
    tensor_files.write_tensors(path, tensors, {"transformer.lora_alpha": 2}, "lora_adapter_metadata")
    tensor_files.write_tensors(tmp_path / "k.safetensors", tensors, dict(version=tensor_files.VERSION, key="k"))
    run = tmp_path / "run/checkpoint-000002"
    tensor_files.write_tensors(run / predict.LORA_FILE, tensors, {"train.step": 2}, "lora_adapter_metadata")
    monkeypatch.undo()
    for read in (lambda: predict.read_lora(path),
                 lambda: tensor_files.read_tensors(tmp_path / "k.safetensors", key="k"),
                 lambda: resume.read_checkpoint(run)):
        with pytest.raises(tensor_files.OtherVersion) as e:
            read()
        assert is_one_line(str(e.value), "a newer version of this project", "update this one")
        assert "damaged" not in str(e.value)

def test_the_number_of_the_format_comes_first(tmp_path):
    tensor_files.write_tensors(tmp_path / "x.safetensors", safetensors.torch.load_file(LORAS[0]), {})
    with open(tmp_path / "x.safetensors", "rb") as f:
        text = tensor_files.read_header(f)["__metadata__"]["json"]
    assert list(json.loads(text))[0] == "format" and json.loads(text)["format"] == tensor_files.FORMAT
