"""
Your own model, with its real weights: the first thing to run on a card.

$ pytest tests/test_own_model.py --model Qwen/Qwen-Image-Edit-2509 --device cuda --dtype bfloat16 -s
"""
import functools
import gc
import re
from math import prod

import pytest
import torch
from conftest import OPTIONS
from torch.nn.attention import SDPBackend, sdpa_kernel

import cache
import predict
import rope_patch
from tests.harness import DEVICE, DTYPE, DTYPE_NAME, ON_DEVICE, log_of, rel, run_script, show

MODEL = OPTIONS["model"]

@functools.cache
def own_transformer():
    transformer = predict.load_transformer(cache.find_model(MODEL, ["transformer"]), DTYPE_NAME)
    return predict.place_transformer(transformer, DEVICE)

def own_batch(transformer):
    """Three edits of mixed sizes, prompts and numbers of pictures, of noise."""
    generator = torch.Generator().manual_seed(0)
    width = transformer.config.joint_attention_dim
    shapes = [[(1, 16, 24), (1, 16, 16)], [(1, 32, 16), (1, 16, 24), (1, 8, 8)], [(1, 8, 8), (1, 32, 32)]]
    latents = [torch.randn(sum(map(prod, s)), 64, generator=generator).to(DEVICE, DTYPE) for s in shapes]
    prompts = [torch.randn(n, width, generator=generator).to(DEVICE, DTYPE) for n in (40, 7, 200)]
    return latents, prompts, torch.tensor([0.9, 0.5, 0.1], device=DEVICE, dtype=DTYPE), shapes

@torch.no_grad()
def stock_one_at_a_time(transformer, latents, prompts, times, shapes):
    """The patched model runs stock's own code for every call that stock knows."""
    return [type(transformer).forward(transformer, x[None], p[None], None, t[None], [s], return_dict=False)[0][0]
            for x, p, t, s in zip(latents, prompts, times, shapes)]

@functools.cache
def limit():
    """1e-5 in float32, 1e-2 in bfloat16; or, where 60 blocks make more of a rounding, twice the distance of stock from
    itself with another attention kernel."""
    answers = []
    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION if DTYPE != torch.float32 else
                   SDPBackend.EFFICIENT_ATTENTION if DEVICE.type == "cuda" else SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(kernel):
            answers.append(stock_one_at_a_time(own_transformer(), *own_batch(own_transformer())))
    floor = max(map(rel, *answers))
    show(f"{MODEL}, stock from stock with another attention kernel", floor, 1)
    return max(1e-5 if DTYPE == torch.float32 else 1e-2, 2 * floor)

@torch.no_grad()
def test_own_model_packed_equals_stock_one_at_a_time():
    transformer = own_transformer()
    batch = own_batch(transformer)
    packed = rope_patch.run_packed(transformer, *batch)
    for n, (got, want) in enumerate(zip(packed, stock_one_at_a_time(transformer, *batch))):
        show(f"{MODEL}, sample {n}", rel(got, want), limit())
        assert rel(got, want) <= limit()

@torch.no_grad()
def test_own_models_first_blocks_are_exact_in_float32():
    """What bfloat16 cannot tell: four blocks of the real weights, 5.4 GB, are within 1e-5."""
    transformer = predict.load_transformer(cache.find_model(MODEL, ["transformer"]), DTYPE_NAME) # in the files as yet
    transformer.transformer_blocks = transformer.transformer_blocks[:4]
    torch.nn.Module.to(transformer, DEVICE, torch.float32)
    latents, prompts, times, shapes = own_batch(transformer)
    batch = [x.float() for x in latents], [p.float() for p in prompts], times.float(), shapes
    for got, want in zip(rope_patch.run_packed(transformer, *batch), stock_one_at_a_time(transformer, *batch)):
        show(f"{MODEL}, first blocks in float32", rel(got, want), 1e-5)
        assert rel(got, want) <= 1e-5

def test_own_model_lora_round_trip(tmp_path):
    """A LoRA on every attention layer, saved and loaded again, answers the same."""
    transformer = own_transformer()
    predict.add_lora(transformer, r=4, lora_alpha=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"],
                     init_lora_weights=False)
    batch = own_batch(transformer)
    with torch.no_grad():
        want = torch.cat(rope_patch.run_packed(transformer, *batch))
        predict.save_lora(tmp_path / predict.LORA_FILE, transformer, {})
        transformer.delete_adapters("default")
        base = torch.cat(rope_patch.run_packed(transformer, *batch))
        predict.load_loras(transformer, [predict.read_lora(tmp_path)])
        got = torch.cat(rope_patch.run_packed(transformer, *batch))
    transformer.delete_adapters("lora0")
    show(f"{MODEL}, LoRA loaded again", rel(got, want), limit())
    assert rel(got, want) <= limit() < rel(base, want)

@pytest.mark.skipif(DEVICE.type == "cpu", reason="on a CPU test_quantization.py measures this, with a model of d = 512")
def test_own_model_trains_in_the_planned_memory(tmp_path, data):
    """Two steps, at most 15 % from what --plan says."""
    flags = ["--model", MODEL, "--data", data, "--max_steps", 2, "--target_pixels", "256*256", "--control_pixels",
             "256*256", "--gradient_checkpointing", 1000, "--val_data", "--cache_dir", tmp_path / "c", *ON_DEVICE]
    own_transformer.cache_clear() # two would not fit
    gc.collect()
    planned = run_script("train.py", *flags, "--plan")
    result = run_script("train.py", *flags, "--out_dir", tmp_path / "run")
    assert planned.status == result.status == 0, planned.err + result.err
    [row] = re.findall(r"^ +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+).*as given", planned.out, re.M)
    memory = log_of(tmp_path / "run")[-1]["memory"]
    show(f"{MODEL}, planned / measured memory", float(row) / memory, 1.15)
    assert float(row) == pytest.approx(memory, rel=0.15)
