"""library/models/: few bits, sharding, --plan, trackers; offloading with them. The same numbers, less memory; how
much."""
import copy
import gc
import ctypes
import functools
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from functorch.compile import make_boxed_func
from PIL import Image
from torch._dynamo.backends.common import aot_autograd

from library.files import tensor_files
from library.models import model_files, quantization
from training import plan
import predict
from tests.harness import (ADAMW, DEVICE, EXACT, FULL, NATIVE, TINY, add_item, assert_bitwise, copy_model, curve,
                           hot_model, is_one_line, log_of, lora_of, lora_tensors, losses_of, make_batch, patched_copy,
                           rel, run, run_script, show, start_ranks, train, works)

def needs(quantize):
    """nf4 comes from a package that requirements.txt does not name."""
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")

# ---- all together ----------------------------------------------------------------------------------------------------

# every pair of the values of any two columns stands in one of these rows
COMBINATIONS = [
    # processes, quantize, checkpointed blocks, offload
    ("1", "none", 0, 0), ("2", "none", 3, 3), ("fsdp", "none", 3, 3),
    ("1", "int8", 3, 3), ("2", "int8", 0, 0), ("fsdp", "int8", 0, 3),
    ("1", "fp8", 0, 3), ("2", "fp8", 3, 0), ("fsdp", "fp8", 3, 0),
    ("1", "nf4", 3, 0), ("2", "nf4", 0, 3), ("fsdp", "nf4", 0, 0),
]
FIVE_STEPS = [*ADAMW, "--max_steps", 5, "--batch_size", 5, "--max_tokens", 200]

@pytest.fixture(scope="module")
def plain(small, start, tmp_path_factory):
    """plain(quantize) -> losses of 5 steps, packed, in one process, nothing recomputed or offloaded."""
    @functools.cache
    def run_plain(quantize):
        out_dir = tmp_path_factory.mktemp("plain") / "run"
        process = start("train.py", *small.flags, *FIVE_STEPS, "--quantize", quantize, "--out_dir", out_dir)
        assert process.wait() == 0, process.output()
        return losses_of(log_of(out_dir))
    return run_plain

@pytest.mark.parametrize("processes, quantize, checkpointed, offload", COMBINATIONS)
def test_combinations_agree_with_the_plain_run(tmp_path, small, start, plain, processes, quantize, checkpointed,
                                               offload):
    """5 samples a step in packs of 1 to 3, which do not divide among processes. The format's own error is another
    test's business: here the plain run has the same base."""
    needs(quantize)
    flags = [*small.flags, *FIVE_STEPS, "--quantize", quantize, "--gradient_checkpointing", checkpointed,
             "--offload", offload, "--out_dir", tmp_path / "run", *["--fsdp"] * (processes == "fsdp")]
    ranks = [start("train.py", *flags)] if processes == "1" else start_ranks(start, *flags)
    assert not any([r.wait() for r in ranks]), [r.output() for r in ranks]
    want, got = plain(quantize), losses_of(log_of(tmp_path / "run"))
    show("combination", max(abs(a / b - 1) for a, b in zip(got, want)), 1e-5)
    assert got == pytest.approx(want, rel=1e-5) and len(set(got)) == 5

# ---- shards ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_is_data_parallel_bit_for_bit_and_takes_turns(tmp_path, small, start, ranks):
    """--fsdp trains the same LoRA as data parallel processes, with uneven packs, and with a process that has nothing to
    do; a run may change from the one to the other, and to another number of processes."""
    flags = [*small.flags, *ADAMW, "--batch_size", 3, "--max_tokens", 100, "--max_steps", 4]

    def train_on(out_dir, n, *more):
        processes = start_ranks(start, *flags, *more, "--out_dir", tmp_path / out_dir / "run", preludes=[None] * n)
        assert not any([p.wait() for p in processes]), [p.output() for p in processes]
        run = tmp_path / out_dir / "run" # (a file's title is its run's name)
        return losses_of(log_of(run)), (run / predict.LORA_FILE).read_bytes()
    dp, fsdp = train_on("dp", ranks), train_on("fsdp", ranks, "--fsdp")
    assert dp == fsdp
    one = train_on("one", 1)[0]
    assert fsdp[0] == pytest.approx(one, rel=1e-6)
    if ranks == 4:
        train_on("turns", 2, "--max_steps", 2, "--fsdp")
        assert train_on("turns", ranks, "--resume")[0] == pytest.approx(one, rel=1e-6)

# ---- few bits --------------------------------------------------------------------------------------------------------

def hot_base(quantize, outliers):
    """A hot model in bf16 with a LoRA -> patched model with that base, its LoRA's parameters."""
    model = patched_copy(hot_model(dtype=torch.bfloat16, num_attention_heads=16, attention_head_dim=32,
                                   axes_dims_rope=(8, 12, 12)))
    if outliers: # heavy-tailed input channels, as large transformers have
        for linear in [m for m in model.transformer_blocks.modules() if isinstance(m, torch.nn.Linear)]:
            some = torch.randperm(linear.in_features, generator=torch.Generator().manual_seed(3))[:4]
            linear.weight.data[:, some] *= 20
    torch.manual_seed(1)
    lora = predict.add_lora(model, r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0", "net.2"],
                            init_lora_weights=False)
    predict.place_transformer(model, DEVICE, quantize)
    return model.train(), lora

def out_and_gradients(model, lora):
    samples = make_batch(([(1, 8, 8), (1, 8, 6)], 20), ([(1, 4, 12), (1, 4, 4)], 9))
    out = torch.cat([o.flatten() for o in run(model, "packed", samples)])
    grads = torch.autograd.grad(out.float().square().sum(), list(lora.values()), allow_unused=True)
    return out.detach(), torch.cat([g.flatten() for g in grads if g is not None])

def multiply_eight_bits(monkeypatch):
    """As a card does, by torch's own products, which run on a CPU too."""
    monkeypatch.setattr(quantization, "has_product", lambda x, layer: x.numel() > 16 * x.shape[-1])

@pytest.mark.parametrize("outliers", [False, True], ids=["plain", "outliers"])
@pytest.mark.parametrize("quantize, multiplied, limits", [
    ("int8", False, (0.03, 0.06)), ("fp8", False, (0.12, 0.25)), ("nf4", False, (0.35, 0.7)),
    ("int8", True, (0.05, 0.06)), ("fp8", True, (0.15, 0.25))])
def test_a_low_bit_base_errs_by_what_its_format_explains(quantize, multiplied, limits, outliers, monkeypatch):
    """Outputs and LoRA gradients against the bf16 base, on a hot model, which makes any error large (bf16 itself is at
    0.013 and 0.031 from fp32). With outlier channels, which the rows of int8 feel most, up to ten times as much."""
    needs(quantize)
    if multiplied:
        multiply_eight_bits(monkeypatch)
    else: # on a card too, whatever it has
        monkeypatch.setattr(quantization, "has_product", lambda x, layer: False)
    want, got = [out_and_gradients(*hot_base(q, outliers)) for q in ("none", quantize)]
    for name, a, b, limit in zip(("outputs", "LoRA gradients"), got, want, limits):
        limit *= 10 if outliers and quantize == "int8" else 3 if outliers else 1
        error = rel(a, b)
        show(f"{quantize}{' multiplied as such' * multiplied}, {name}", error, limit)
        assert 0 < error <= limit

@pytest.mark.parametrize("quantize", ["int8", "fp8", "nf4"])
def test_a_low_bit_layer_keeps_nothing_for_its_backward_pass(quantize):
    """And its gradient is that of the weight it stands for; its memory is that of its format."""
    needs(quantize)
    torch.manual_seed(0)
    linear = torch.nn.Linear(192, 64, dtype=torch.bfloat16)
    low = quantization.LowBitLinear(linear, quantize)
    twin = copy.deepcopy(linear)
    twin.weight.data = low.unpacked(torch.bfloat16)
    saved, x = [], torch.randn(2, 5, 192, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = low(x)
    assert not saved
    assert torch.equal(out, twin(x)) or rel(out, twin(x)) < 3e-3 # the bias is added in another place
    grad = torch.randn_like(out)
    assert torch.equal(torch.autograd.grad(out, x, grad)[0], torch.autograd.grad(twin(x), x, grad)[0])
    per_weight = (low.weight.nbytes + low.scale.nbytes) / linear.weight.numel()
    assert per_weight == pytest.approx(dict(nf4=0.5625).get(quantize, 1 + 4 / 192))
    assert plan.model_bytes(torch.nn.Sequential(linear), quantize) == sum(p.nbytes for p in low.parameters())
    assert 0 < rel(low.unpacked(torch.float32), linear.weight.float()) < dict(int8=0.01, fp8=0.04, nf4=0.11)[quantize]

@pytest.mark.parametrize("quantize, limit", [("int8", 0.02), ("fp8", 0.05)])
def test_eight_bits_are_multiplied_as_such_where_the_device_can(quantize, limit, monkeypatch):
    """In the forward and in the backward pass; rows get their own scales, however different they are in size. As near
    to the exact product as two roundings allow."""
    torch.manual_seed(0)
    rows = lambda n: (torch.randn(2, 20, n) * 10.0**torch.randint(-9, 3, (2, 20, 1))).bfloat16()
    low = quantization.LowBitLinear(torch.nn.Linear(192, 64, dtype=torch.bfloat16), quantize)
    x, grad = rows(192), rows(64)
    low.bias = None
    x[0, 3] = grad[0, 5] = 0
    x.requires_grad_()
    want = low(x)
    wanted, = torch.autograd.grad(want, x, grad)
    multiply_eight_bits(monkeypatch)
    monkeypatch.setattr(quantization.LowBitLinear, "unpacked", None)
    got = low(x)
    gotten, = torch.autograd.grad(got, x, grad)
    for a, b in ((got, want), (gotten, wanted)):
        assert a.dtype == torch.bfloat16 and a.isfinite().all()
        error = max(rel(p, q) for p, q in zip(a.flatten(0, 1), b.flatten(0, 1)) if q.any())
        show(f"{quantize}, the worst row", error, limit)
        assert 0 < error < limit

def test_q_k_and_v_quantize_their_input_once(monkeypatch):
    """Which is forgotten when nobody holds the input any more."""
    made, real = [], quantization.quantize_rows
    monkeypatch.setattr(quantization, "quantize_rows", lambda *args: made.append(1) or real(*args))
    multiply_eight_bits(monkeypatch)
    layers = [quantization.LowBitLinear(torch.nn.Linear(64, 32, dtype=torch.bfloat16), "int8") for _ in range(3)]
    x, y = [torch.randn(1, 20, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    first = [layer(x) for layer in layers]
    assert len(made) == 1
    layers[0](y)
    assert torch.equal(layers[0](x), first[0]) and len(made) == 3 and len(quantization.latest) == 1
    with torch.no_grad(): # another content, so quantized anew
        assert rel(layers[0](x.mul_(2)), 2 * first[0] - layers[0].bias) < 0.01
    del x, y, first
    gc.collect()
    assert len(quantization.latest) == 0

@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_compiled_blocks_multiply_eight_bits_on_every_card(quantize, monkeypatch):
    """In both passes, in one graph for any number of rows; on Hopper, where blocks that are not compiled unpack
    them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    graphs, products = [], (torch.ops.aten._int_mm.default, torch.ops.aten._scaled_mm.default)

    def keep(graph, inputs):
        graphs.append([node for node in graph.graph.nodes if node.target in products])
        return make_boxed_func(graph.forward)
    low = quantization.LowBitLinear(torch.nn.Linear(64, 32, dtype=torch.bfloat16), quantize, multiply=True)
    torch._dynamo.reset()
    compiled = torch.compile(low, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=keep))
    for rows in (33, 20):
        x = torch.randn(1, rows, 64, dtype=torch.bfloat16, requires_grad=True)
        got, = torch.autograd.grad(compiled(x).sum(), x)
    torch._dynamo.reset()
    [forward], [backward] = graphs
    assert [True in node.args for node in (forward, backward)] == [quantize == "fp8", False] # fast sums
    plain, = torch.autograd.grad(low(x).sum(), x)
    want, = torch.autograd.grad((x @ low.unpacked(x.dtype).T).sum(), x)
    assert torch.equal(plain, want) and 0 < rel(got, want) < 0.1

def test_predict_py_draws_from_a_low_bit_base_in_host_memory(tmp_path, photos):
    """The flags together, as a user gives them; the picture is near the plain one, and not the same. Offloaded blocks
    alone change nothing."""
    lora = tmp_path / "lora.safetensors"
    tensor_files.write_tensors(lora, {k: 0.05 * v for k, v in lora_tensors().items()}, {}, "lora_adapter_metadata")
    flags = ["--image", photos[0], "--prompt", "make it blue", "--lora", lora, "--num_inference_steps", 2, *EXACT,
             "--target_pixels", "64*64", "--control_pixels", "64*64", "--device", "cpu", "--cache_dir", tmp_path / "c"]
    pictures = []
    int8 = ["--quantize", "int8", "--quantize_text_encoder", "int8"]
    for n, more in enumerate(([], ["--offload", 2], [*int8, "--offload", "all"])):
        works("predict.py", *flags, *more, "--out", tmp_path / f"{n}.png")
        pictures.append(np.asarray(Image.open(tmp_path / f"{n}.png"), int))
    plain, offloaded, low = pictures
    assert np.abs(plain - offloaded).max() == 0 and 0 < np.abs(plain - low).mean() < 8 # levels of 255

def test_a_low_bit_training_goes_on_bit_for_bit(tmp_path, small, start):
    """int8 in host memory, stopped after 3 of 5 steps; another base than before is refused."""
    flags = [*small.flags, *FIVE_STEPS, "--quantize", "int8", "--offload", "all"]
    assert start("train.py", *flags, "--out_dir", tmp_path / "whole").wait() == 0
    assert start("train.py", *flags, "--out_dir", tmp_path / "run", "--max_steps", 3).wait() == 0
    refused = start("train.py", *flags, "--out_dir", tmp_path / "run", "--resume", "--quantize", "none")
    assert refused.wait() == 1 and "quantize: int8 -> none" in refused.output()
    assert start("train.py", *flags, "--out_dir", tmp_path / "run", "--resume").wait() == 0
    assert curve(log_of(tmp_path / "run")) == curve(log_of(tmp_path / "whole"))
    assert_bitwise(lora_of(tmp_path / "run"), lora_of(tmp_path / "whole"))

@pytest.mark.parametrize("part", ["transformer", "text encoder"])
def test_too_little_memory_is_one_line(tmp_path, data, monkeypatch, part):
    def out_of_memory(self, *args, **kwargs):
        encoder = "Qwen2_5_VL" if part == "text encoder" else "QwenImageTransformer"
        if type(self).__name__.startswith(encoder) and not next(self.parameters()).is_meta:
            raise torch.OutOfMemoryError
        return real(self, *args, **kwargs)
    real = torch.nn.Module.to
    monkeypatch.setattr(torch.nn.Module, "to", out_of_memory)
    result = train(data, tmp_path, "--cache_dir", tmp_path / "c", *NATIVE)
    assert result.status == 1 and is_one_line(result.errors[-1], "--quantize"), result.err[-300:]

# ---- memory: of loading, and as planned ------------------------------------------------------------------------------

def large_model(tmp_path, dtype):
    """tiny's folder with a transformer of d = 512."""
    folder = copy_model(tmp_path / "large")
    config = {k: v for k, v in QwenImageTransformer2DModel.load_config(TINY / "transformer").items() if k[0] != "_"}
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel.from_config(config | dict(
        num_layers=4, num_attention_heads=8, attention_head_dim=64, axes_dims_rope=[16, 24, 24]))
    model.to(dtype).save_pretrained(folder / "transformer")
    return folder

def status_of_process(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status", encoding="utf-8") if line.startswith(key))

def load_and_tell(folder):
    """For a child process: what loading the transformer takes, in KiB, and what its weights are."""
    model_files.SMALL = 0 # as if it were the real one: small models are copied
    before = status_of_process("RssAnon")
    transformer = predict.load_transformer(Path(folder), "bfloat16")
    print("MEMORY", status_of_process("RssAnon") - before, sum(p.nbytes for p in transformer.parameters()) // 1024)
    sys.exit(0)

def test_a_model_is_loaded_without_a_second_copy_in_memory(tmp_path, start):
    """In its files' dtype a model takes no memory until it is placed: its weights are memory-mapped. (A copy would make
    the ratio 1; what is left are the modules themselves, 4 MB here.)"""
    process = start("train.py", prelude=functools.partial(load_and_tell, large_model(tmp_path, torch.bfloat16)))
    assert process.wait() == 0, process.output()
    took, weighs = map(int, re.search(r"MEMORY (\d+) (\d+)", process.output()).groups())
    show("memory of a loaded model / its weights", took / weighs, 0.1)
    assert took <= 0.1 * weighs

def tell_peak():
    """For a child process: by how much it has grown at most, when it ends."""
    ctypes.CDLL(None).mallopt(-3, 65536) # M_MMAP_THRESHOLD: what is freed goes back at once
    before = status_of_process("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", "utf-8")
    exit_now = os._exit
    def say_and_exit(status):
        print("PEAK", (status_of_process("VmHWM") - before) * 1024, flush=True)
        exit_now(status)
    os._exit = say_and_exit

@pytest.mark.parametrize("checkpointed", [0, 2, 4] if FULL else [4])
def test_the_plan_s_memory_is_what_the_training_takes(tmp_path, start, checkpointed):
    """The growth of a process from its start to the peak of a step, d = 512, against what --plan adds up."""
    folder, data = large_model(tmp_path, torch.float32), tmp_path / "data"
    for name, size in (("a", (256, 384)), ("b", (384, 256))): # so the largest pack that can come is the one that comes
        add_item(data, name, [size, size], "words " * 190)
    flags = ["--model", folder, "--cache_dir", tmp_path / "c", "--val_data", *EXACT, "--device", "cpu"]
    assert run_script("cache.py", "--data", data, *flags, *NATIVE).status == 0
    flags += ["--data", tmp_path / "c/large-data.json", "--batch_size", 2, "--max_steps", 1, "--gradient_checkpointing",
              checkpointed]
    planned = run_script("train.py", *flags, "--plan", "--out_dir", tmp_path / "none")
    assert planned.status == 0 and not (tmp_path / "none").exists(), planned.err
    [row] = re.findall(r"^ +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+).*as given", planned.out, re.M)
    process = start("train.py", *flags, "--out_dir", tmp_path / "run", prelude=tell_peak)
    assert process.wait() == 0, process.output()
    took = int(re.search(r"PEAK (\d+)", process.output())[1]) / 2**30
    show("planned / measured memory", float(row) / took, 1.15)
    assert float(row) == pytest.approx(took, rel=0.15)

def test_the_plan_of_the_real_model_needs_no_weights(tmp_path, monkeypatch):
    """Only config files. 10 of its 60 blocks have 3.5 billion parameters; every way to save memory saves some."""
    monkeypatch.setattr(plan, "RATES", {"Slow": (80, 6, 4, 3, 0.03, 50, 50)})
    folder = copy_model(tmp_path / "real", "*.safetensors")
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | dict(
        num_layers=10, num_attention_heads=24, attention_head_dim=128, joint_attention_dim=3584,
        axes_dims_rope=[16, 56, 56])), encoding="utf-8")
    result = works("train.py", "--plan", "--model", folder, "--data", TINY / "data", "--dtype", "bfloat16",
                   "--target_pixels", "256*256", "--control_pixels", "256*256", "--device", "cpu", "--val_data",
                   "--cache_dir", tmp_path / "c", "--lora_targets", "to_q", "to_k", "to_v", "to_out.0")
    assert "parameters: 3,442,768,448, of which 3,932,160 in the LoRA" in result.out and not result.err.strip()
    rows = [tuple(map(float, r)) for r in re.findall("^" + r" +([\d.]+)" * 5, result.out, re.M)]
    given, unchecked, int8, nf4, half, away, int8_away = rows
    base, block = given[0], 339_806_208 * 2 / 2**30 # GiB
    near = functools.partial(pytest.approx, abs=0.03)
    assert base == near(0.08 + 10 * block) and half[0] == near(base - 3 * block) and away[0] == near(base - 8 * block)
    assert int8[0] == near(base - 5 * block) and nf4[0] == near(base - 7.19 * block)
    # as they are: library/models/devices.py keeps torch from rounding each pinned tensor up to a power of two
    assert (half[4], away[4], int8_away[4]) == (near(5 * block), near(10 * block), near(5 * block))
    assert unchecked[2] > 3 * given[2]
    # from our formula to three times that
    rows = re.findall(r"^(?:in all|a step, in seconds) +([\d.]+)-([\d.]+)$", result.out, re.M)
    (seconds, most_seconds), (hours, most_hours) = [map(float, row) for row in rows]
    assert seconds > 2 and most_seconds == near(3 * seconds, abs=0.2) and most_hours == near(3 * hours, abs=0.2)
    # what it has looked at, and nothing encoded
    assert {p.name for p in tmp_path.glob("c/*")} <= {"pictures.txt", "masks.txt", "models.txt"}

# ---- trackers --------------------------------------------------------------------------------------------------------

def test_tensorboard_has_the_curves_and_the_pictures(tmp_path, data):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    flags = ["--cache_dir", tmp_path / "c", "--tracker", "tensorboard", "--val_data", data, *NATIVE, *EXACT]
    assert train(data, tmp_path, *flags).status == 0
    records = list(map(json.loads, (tmp_path / "run-0/log.jsonl").read_text("utf-8").splitlines()[1:]))
    events = EventAccumulator(str(tmp_path / "run-0/tensorboard")).Reload()
    for name in ("loss", "lr", "grad_norm", "val_loss"):
        assert [e.value for e in events.Scalars(name)] == pytest.approx([r[name] for r in records if name in r])
    assert [e.step for e in events.Images("data")] == [2]

def test_wandb_works_offline(small, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    result = run_script("train.py", *small.flags, "--max_steps", 1, "--out_dir", tmp_path / "a", "--tracker", "wandb")
    assert result.status == 0 and list((tmp_path / "a/wandb").glob("offline-run-*/*.wandb")), result.err
    wandb.finish()
