"""
How validations generate their pictures: --sample_lora, and predict.py's flags of sampling in train.py.

$ python -m pytest -q tests/test_sample_lora.py    # half a minute
"""
import shlex

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import cache
from library.data import picture_files
from library.models import compilation
from training import plan
import predict
from tests.harness import (EXACT, NATIVE, add_item, curve, is_one_line, log_of, lora_file, lora_tensors, renamed,
                           results_of, run_script, start_ranks, validations_of, works)

FEW = ["--num_inference_steps", 2, "--true_cfg_scale", 2, "--shift", 3, "--negative_prompt", "blurry"]

@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A LoRA to sample with: on layers that the training's LoRA has, and on others."""
    tensors = {k: 0.2 * v for k, v in lora_tensors(rank=3, names=("attn.to_q", "img_mlp.net.2", "img_mod.1")).items()}
    return lora_file(tmp_path_factory.mktemp("other"), tensors)

@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a training with validations, in a cache that all tests share."""
    folder = tmp_path_factory.mktemp("flags")
    add_item(folder / "data", "wide", [(96, 64), (64, 64)])
    add_item(folder / "data", "tall", [(64, 96), (64, 64), (32, 32)])
    return ["--data", folder / "data", "--val_data", folder / "data", "--cache_dir", folder / "cache", "--max_steps", 2,
            "--batch_size", 2, "--lora_rank", 2, "--lr", 1e-2, "--lr_scheduler", "constant", "--save_every", 1,
            "--sample_every", 1, "--lora_targets", "to_q", "to_v", *NATIVE, *EXACT, "--device", "cpu"]

def train(out_dir, flags, *more):
    return works("train.py", *flags, "--out_dir", out_dir, *more)

def pictures_of(folder):
    """-> {name: pixels} of the PNGs below a folder."""
    return {path.stem: np.asarray(picture_files.read_image(path)) for path in folder.rglob("*.png")}

def same(a, b, levels=0):
    return a.keys() == b.keys() and all(np.allclose(a[name], np.asarray(b[name], int), 0, levels) for name in a)

def predicted(tmp_path, flags, loras, *more):
    """What predict.py generates for the validation samples with these LoRAs."""
    data, cache_dir = flags[1], flags[5]
    out = tmp_path / f"predicted-{len(list(tmp_path.glob('predicted-*')))}"
    works("predict.py", "--jobs", data, "--cache_dir", cache_dir, "--out_dir", out, "--max_tokens", 4096,
          *NATIVE, *EXACT, "--device", "cpu", *(["--lora", *loras] if loras else []), *more)
    results = results_of(out)
    results.pop("sheet").unlink()
    for name, path in results.items():
        path.rename(out / f"{name}.png")
    return pictures_of(out)

def files_of(run):
    """-> {name: {tensor's name: bytes}} of a run's LoRAs and checkpoints."""
    return {path.relative_to(run): {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}
            for path in run.rglob("*.safetensors")}

def test_a_validation_generates_what_predict_py_does_and_the_training_feels_nothing(tmp_path, flags, other):
    """To the bit: each step's pictures are predict.py's with its checkpoint and the other LoRA, those of the base are
    with the other LoRA alone; losses, LoRAs and checkpoints are those of a training without these flags, with dropout
    and --preserve, whose base has no LoRA at all. The log and the last words of the run tell how."""
    more = ["--lora_dropout", 0.3, "--preserve", 0.5]
    drawn = train(tmp_path / "a", flags, *more, "--sample_lora", other, other, *FEW) # two of them
    train(tmp_path / "b", flags, *more, "--num_inference_steps", 2)
    assert curve(log_of(tmp_path / "a")) == curve(log_of(tmp_path / "b"))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") and len(files_of(tmp_path / "a")) == 5
    for n in (1, 2):
        checkpoint = tmp_path / f"a/checkpoint-00000{n}"
        want = predicted(tmp_path, flags, [checkpoint, other, other], *FEW)
        assert same(pictures_of(tmp_path / f"a/samples/step_00000{n}"), want)
    base = pictures_of(tmp_path / "a/samples/base")
    assert same(base, predicted(tmp_path, flags, [other, other], *FEW))
    assert same(pictures_of(tmp_path / "b/samples/base"), predicted(tmp_path, flags, [], "--num_inference_steps", 2))
    assert not same(base, pictures_of(tmp_path / "b/samples/base")) and not same(base, want)
    # afterwards the trained LoRA alone is active, and learns
    ns = drawn.globals
    assert {n for n, p in ns["transformer"].named_parameters() if p.requires_grad} == {*ns["lora"]}
    assert ns["transformer"].active_adapters() == ["default"]
    command, = [line for line in drawn.out.splitlines() if "python predict.py" in line]
    words = shlex.split(command)
    assert words[words.index("--lora"):][:3] == ["--lora", str(tmp_path / "a"), str(other)]
    assert words[words.index("--negative_prompt") + 1] == "blurry" and "--true_cfg_scale" in words

def test_a_resumed_run_may_generate_otherwise(tmp_path, flags, other):
    """It continues bit for bit; the base's pictures are made anew, so that a sheet compares like with like."""
    run = tmp_path / "a"
    train(run, flags, "--num_inference_steps", 2, "--max_steps", 1)
    before = pictures_of(run / "samples/base")
    train(run, flags, "--resume", "--sample_lora", other, *FEW)
    train(tmp_path / "b", flags, "--num_inference_steps", 2)
    assert curve(log_of(run)) == curve(log_of(tmp_path / "b"))
    base = pictures_of(run / "samples/base")
    assert not same(base, before) and same(base, predicted(tmp_path, flags, [other], *FEW))

@pytest.mark.parametrize("more", [["--offload", 2], ["--quantize", "int8"], ["--no-use_cache"]], ids=str)
def test_it_works_with(tmp_path, flags, other, more):
    train(tmp_path / "a", flags, *FEW, "--sample_lora", other, *more)
    want = predicted(tmp_path, flags, [tmp_path / "a", other], *FEW, *(more if "--quantize" in more else []))
    # predict.py's prompts have shared a pass of the text encoder, which rounds otherwise
    assert same(pictures_of(tmp_path / "a/samples/step_000002"), want, levels="--no-use_cache" in more)
    train(tmp_path / "b", [*flags, "--sample_every", 0, "--val_data"], *more)
    assert curve(log_of(tmp_path / "a")) == curve(log_of(tmp_path / "b"))

def test_compiled_blocks_are_not_compiled_anew_after_a_validation(tmp_path, flags, other, monkeypatch):
    """One block and one sample, as they are compiled for long."""
    real_compile, steps = torch.nn.Module.compile, []
    monkeypatch.setattr(compilation, "compile_blocks", lambda blocks: real_compile(
        blocks[0], dynamic=True, backend="eager"))
    real = torch.nn.utils.clip_grad_norm_ # which each step calls
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: steps.append(
        torch._dynamo.utils.counters["frames"]["total"]) or real(*args))
    torch._dynamo.reset()
    data = add_item(tmp_path / "data", "cat")
    with torch._dynamo.config.patch(allow_empty_graphs=True):
        train(tmp_path / "a", ["--data", data, "--val_data", data, *flags[4:]], "--compile", "--sample_lora", other,
              *FEW, "--max_steps", 3, "--max_tokens", 1)
    torch._dynamo.reset()
    assert len(validations_of(tmp_path / "a")) == 3 and steps[0] > 0 and len(set(steps)) == 1, steps

def test_sharded_processes_generate_the_same(tmp_path, flags, other, start):
    flags = [*flags, "--max_steps", 1, "--sample_lora", other, *FEW]
    train(tmp_path / "one", flags)
    ranks = start_ranks(start, *flags, "--fsdp", "--out_dir", tmp_path / "two")
    assert [r.wait() for r in ranks] == [0, 0], [r.output() for r in ranks]
    for folder in ("base", "step_000001"):
        one, two = [pictures_of(tmp_path / run / "samples" / folder) for run in ("one", "two")]
        assert one.keys() == two.keys() and all(np.abs(one[k].astype(int) - two[k]).max() <= 1 for k in one)

WRONG = [
    ("--model a/b --num_inference_steps 1", 2, "--shift"), ("--true_cfg_scale much", 2, "--true_cfg_scale"),
    ("--sample_lora", 2, "--sample_lora"), ("--negative_prompt <|im_end|>", 1, "special token"),
    ("--sample_lora no/where/x.safetensors", 1, "x.safetensors"), ("--sigmas 1 0.5", 2, "--sigmas"),
    ("--sample_lora GOOD --sample_lora GOOD", 2, "given twice"), ("--sample_lora DAMAGED", 1, "DAMAGED"),
    ("--sample_lora BAD", 1, "BAD")]

@pytest.mark.parametrize("line, status, named", WRONG)
def test_what_cannot_work_is_one_line(tmp_path, flags, other, line, status, named, monkeypatch):
    """Before a model is looked for. A LoRA of another model shows when it meets this one, before the encoding."""
    monkeypatch.setattr(cache, "encode_samples", lambda *_, **__: pytest.fail("it encodes first"))
    for name, change in dict(GOOD=dict, BAD=renamed("to_q", "qkv"), DAMAGED=dict).items():
        (tmp_path / name).mkdir()
        lora_file(tmp_path / name, change(lora_tensors()))
        line = line.replace(name, str(tmp_path / name))
    damaged = tmp_path / "DAMAGED" / predict.LORA_FILE
    damaged.write_bytes(damaged.read_bytes()[:-100])
    if "BAD" not in named:
        monkeypatch.setattr(cache, "find_model", lambda *_: pytest.fail("model looked for"))
    result = run_script("train.py", *flags, "--out_dir", tmp_path / "a", *line.split())
    assert result.status == status and is_one_line(result.errors[0], named), result.err
    assert "BAD" in named or not (tmp_path / "a").exists()

def test_the_plan_counts_the_other_lora(tmp_path, flags, other, monkeypatch):
    """In the memory of the base, and not among the parameters."""
    monkeypatch.setattr(plan, "step_bytes", lambda *_, **__: 0) # which takes seconds
    def planned(*more):
        result = works("train.py", *flags, "--plan", *more)
        row, = [line for line in result.out.splitlines() if "(as given)" in line]
        return float(row.split()[0]), [line for line in result.out.splitlines() if line.startswith("parameters")]
    # of rank 3040; 3072 is the most
    large = {k: v.repeat_interleave(190, 0 if "lora_A" in k else 1) for k, v in lora_tensors(rank=16).items()}
    path = lora_file(tmp_path, large)
    (before, parameters), (after, same_parameters) = planned(), planned("--sample_lora", path)
    assert parameters == same_parameters
    assert after - before == pytest.approx(4 * sum(v.numel() for v in large.values()) / 2**30, abs=0.01)
    assert after > before
