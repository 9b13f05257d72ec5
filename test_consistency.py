"""
The claims of this project as tests. The oracle is stock diffusers, called with one sample at a time.

$ pytest test_consistency.py                                    # float32 on the CPU
$ pytest test_consistency.py --dtype bfloat16 --device cuda     # one GPU
$ pytest test_consistency.py --full -k "split or full_batch"    # with the samples of 8,192 tokens, 2 minutes
$ pytest test_consistency.py --kills 200 --fuzz 1000 -k "killed_at or no_damage_to_a_file"  # 7 minutes
$ pytest test_consistency.py -k packed -s                       # -s prints each measured error beside its limit

Shapes: B samples, I image tokens (target first, then controls), T text tokens, S = T + I (joint rows: [text, image]),
C channels, J text channels, E inner channels, O output channels, H heads, D head dim, R = D/2 complex rotations.
"""
import contextlib
import copy
import csv
import functools
import gc
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata
import zlib
from collections import Counter
from math import prod
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import OPTIONS
from diffusers import QwenImageTransformer2DModel
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.transformers import transformer_qwenimage as stock_code
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as v1_code
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus_code
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, set_peft_model_state_dict
from PIL import Image, ImageDraw, ImageFilter
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

import cache
import predict
import rope_patch
from rope_patch import (
    QwenDoubleStreamAttnProcessor2_0_MultiRes,
    apply_rotary_emb_qwen_batched,
    deal_to_ranks,
    extract_batch_field,
    get_image_shapes_multi_resolution,
    pad_latents_for_multi_res,
    patch_qwen_forward_for_multi_resolution,
    patch_qwen_model_for_multi_resolution,
    plan_packs,
    plan_padded,
    should_use_multi_resolution_mode,
)

DTYPE, DEVICE, FULL = OPTIONS["dtype"], OPTIONS["device"], OPTIONS["full"]
both_dtypes = pytest.mark.parametrize("dtype", [DTYPE, torch.bfloat16][:1 + (DTYPE == torch.float32)], ids=str)


# ---- models, samples, comparison: shared by all chapters ----

C, J, E, O = 64, 512, 128, 64
SMALL = dict(num_layers=2, num_attention_heads=4, attention_head_dim=E // 4, axes_dims_rope=(8, 12, 12),
             joint_attention_dim=J, in_channels=C, out_channels=O // 4)
VARIANTS = {
    "v1": {},
    "2511": dict(zero_cond_t=True),
    "layered": dict(use_layer3d_rope=True, use_additional_t_cond=True),
    "2511 layered": dict(zero_cond_t=True, use_layer3d_rope=True, use_additional_t_cond=True),
}
# every linear of the model: a wrong gradient anywhere shows in one of them
LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
                "img_mod.1", "txt_mod.1", "net.0.proj", "net.2", "img_in", "txt_in", "linear_1", "linear_2",
                "norm_out.linear", "proj_out"]


def add_lora(model):
    """LoRA with two random factors, in float32 as train.py keeps it; alpha differs from the rank on purpose."""
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules=LORA_TARGETS, init_lora_weights=False))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.bfloat16().float()
    return model


@functools.cache
def hot_model(variant="v1", dtype=DTYPE, lora=False, **config):
    """A stock model that feels its attention: as initialised, wrong positions move the output by 6e-4, here by 0.4.

    It is shared, so a test that changes it takes a copy. Its weights are exact in bfloat16, so that the float32 model
    knows the exact answer for the bfloat16 one.
    """
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(**SMALL | VARIANTS[variant] | config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"_mod\.1\.bias$", name):
                weight.normal_()
            elif re.search(r"norm_(added_)?[qk]\.weight$", name):
                weight.fill_(2)
            elif re.search(r"(to_v|add_v_proj)\.weight$", name):
                weight.mul_(4)
    model.to(torch.bfloat16).to(DEVICE, dtype)
    return add_lora(model) if lora else model


def patched_copy(model):
    return patch_qwen_model_for_multi_resolution(copy.deepcopy(model))


@functools.cache
def patched_model(*args, **kwargs):
    """The patched twin of `hot_model`, shared in the same way."""
    return patched_copy(hot_model(*args, **kwargs))


def make_sample(shapes, text_len, text_mask=None, seed=0):
    """One sample in float32 on the CPU. Its numbers are exact in bfloat16, so that every dtype sees the same sample."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(size, generator=generator).bfloat16().float()
    image_len = sum(map(prod, shapes))
    return SimpleNamespace(shapes=list(shapes), image_IC=draw(image_len, C), text_TJ=draw(text_len, J),
                           text_mask=None if text_mask is None else torch.tensor(text_mask),
                           time=draw(1).sigmoid().bfloat16().float(), layered=torch.tensor([seed % 2]),
                           out_grad_IO=draw(image_len, O))  # gradient of the sample's loss with respect to its output


def make_batch(*shapes_and_text):
    return [make_sample(*each, seed=seed) for seed, each in enumerate(shapes_and_text)]


def to_model(model, tensor):
    return tensor.to(DEVICE, model.dtype if tensor.is_floating_point() else tensor.dtype)


def rel(got, want):
    """Relative L2 distance; where the wanted tensor is zero, the absolute one."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / (want.norm() if want.any() else 1))


def assert_equals_stock(got, stock, exact=None):
    """The rule of design.md section 3, for each tensor of two lists or dicts. float32: within 1e-5 of stock. bfloat16,
    where `exact` is stock's float32 answer: within 1e-2 of stock, or at most twice as far from `exact` as stock is.
    """
    got, stock, exact = [x if isinstance(x, dict) else dict(enumerate(x or ())) for x in (got, stock, exact)]
    assert got.keys() == stock.keys()
    for name, want in stock.items():
        assert (got[name].shape, got[name].dtype) == (want.shape, want.dtype), name
        error, limit = rel(got[name], want), 1e-2 if exact else 1e-5
        print(f"{name}: {error:.1e} from stock (limit {limit:.0e})")
        if exact and error > limit:
            error, limit = rel(got[name], exact[name]), 2 * rel(want, exact[name])
            print(f"{name}: {error:.1e} from stock in float32 (limit {limit:.1e})")
        assert error <= limit, name


def assert_bitwise(got, want):
    got, want = [x if isinstance(x, dict) else dict(enumerate(x)) for x in (got, want)]
    assert got.keys() == want.keys()
    different = {name: rel(got[name], want[name]) for name in want if not torch.equal(got[name], want[name])}
    assert not different


# ---- rope_patch.py: the doors into the model ----
# A door makes the arguments of one model call out of a list of samples. `run` goes through it and splits the output.


def pad(rows, length, fill=0):
    """Right-pad tensors of different first dimension into one batch."""
    batch = rows[0].new_full((len(rows), length, *rows[0].shape[1:]), fill)
    for padded_row, row in zip(batch, rows):
        padded_row[:len(row)] = row
    return batch


def image_lens(samples):
    return [len(s.image_IC) for s in samples]


def text_lens(samples):
    return [len(s.text_TJ) for s in samples]


def image_mask_of(samples, width):
    return pad([torch.ones(n, dtype=torch.bool) for n in image_lens(samples)], width).to(DEVICE)


def text_mask_of(samples):
    own = [torch.ones(len(s.text_TJ)).bool() if s.text_mask is None else s.text_mask for s in samples]
    return pad(own, max(text_lens(samples))).to(DEVICE)


def joint_mask_of(samples, width):
    return torch.cat([text_mask_of(samples), image_mask_of(samples, width)], dim=1)


def conditions(model, samples):
    """What every call has once per sample."""
    layered = torch.cat([s.layered for s in samples]).to(DEVICE) if model.config.use_additional_t_cond else None
    return dict(timestep=to_model(model, torch.cat([s.time for s in samples])), additional_t_cond=layered,
                img_shapes=[s.shapes for s in samples])


def padded_call(model, samples, spare=3):
    """Mode 2, and for samples of equal sizes without spare rows the stock call."""
    text_mask_BT = text_mask_of(samples)
    return conditions(model, samples) | dict(
        hidden_states=to_model(model, pad([s.image_IC for s in samples], max(image_lens(samples)) + spare)),
        encoder_hidden_states=to_model(model, pad([s.text_TJ for s in samples], max(text_lens(samples)))),
        encoder_hidden_states_mask=None if text_mask_BT.all() else text_mask_BT)


def stock_call(model, samples):
    return padded_call(model, samples, spare=0)


def precomputed_call(model, samples, spare=3):
    """Mode 3 with a joint mask, as the seed document calls it. Shapes are given only where they are needed."""
    call = padded_call(model, samples, spare)
    width, text_width = call["hidden_states"].shape[1], call["encoder_hidden_states"].shape[1]
    freqs = [model.pos_embed([s.shapes], max_txt_seq_len=text_width, device=DEVICE) for s in samples]
    return call | dict(
        image_rotary_emb=(pad([img for img, _ in freqs], width), torch.stack([txt for _, txt in freqs])),
        attention_kwargs={"attention_mask": joint_mask_of(samples, width)[:, None, None]},
        encoder_hidden_states_mask=None, img_shapes=call["img_shapes"] if model.config.zero_cond_t else None)


def packed_call(model, samples):
    """Mode 4."""
    return conditions(model, samples) | dict(
        hidden_states=to_model(model, torch.cat([s.image_IC for s in samples]))[None],
        encoder_hidden_states=to_model(model, torch.cat([s.text_TJ for s in samples]))[None],
        txt_seq_lens=text_lens(samples))


DOORS = dict(stock=stock_call, padded=padded_call, precomputed=precomputed_call, packed=packed_call)
MIXED_DOORS = ["padded", "precomputed", "packed"]
every_door = pytest.mark.parametrize("door", DOORS)
every_mixed_door = pytest.mark.parametrize("door", MIXED_DOORS)
every_masked_door = pytest.mark.parametrize("door", ["stock", "padded", "precomputed"])

HOLES = [True, False, True, True, False, False, True, True, False]
EQUAL = make_batch(([(1, 6, 4), (1, 4, 4)], 9), ([(1, 6, 4), (1, 4, 4)], 9))
MIXED = make_batch(([(1, 6, 10)], 7), ([(1, 4, 6), (1, 4, 6)], 12))


def batch_for(door):
    return EQUAL if door == "stock" else MIXED


def take_apart(out, door, samples):
    """The samples' outputs without pads, which must be zero wherever a test goes."""
    if door == "packed":
        return list(out[0].split(image_lens(samples)))
    assert all((row_IO[n:] == 0).all() for row_IO, n in zip(out, image_lens(samples)))
    return [row_IO[:n] for row_IO, n in zip(out, image_lens(samples))]


def run(model, door, samples, **changes):
    return take_apart(model(**DOORS[door](model, samples) | changes).sample, door, samples)


def one_by_one(model, samples, **changes):
    return [run(model, "stock", [sample], **changes)[0] for sample in samples]


def assert_one_by_one(got, samples, stock_changes={}, **which_model):
    """`got` is what stock answers to each sample alone."""
    stock = one_by_one(hot_model(**which_model), samples, **stock_changes)
    exact = one_by_one(hot_model(dtype=torch.float32, **which_model), samples, **stock_changes)
    assert_equals_stock(got, stock, exact if DTYPE == torch.bfloat16 else None)


def at_half_scale(model, door, samples):
    """What changes in a call when its LoRA works at half strength."""
    return dict(attention_kwargs=DOORS[door](model, samples).get("attention_kwargs", {}) | {"scale": 0.5})


def with_gradients(model, samples, outputs):
    """Outputs, and by name the LoRA gradients of the samples' summed losses. A dead parameter has the gradient zero."""
    model.zero_grad()
    torch.autograd.backward(outputs, [s.out_grad_IO.to(out) for s, out in zip(samples, outputs)])
    return dict(enumerate(outputs)) | {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                                       for name, p in model.named_parameters() if p.requires_grad}


# ---- rope_patch.py: the shapes of a batch (first seed document) ----


def test_get_image_shapes_multi_resolution_from_img_shapes():
    shapes = [[(1, 32, 32), (1, 16, 24)], [(1, 40, 40), (1, 8, 8)]]
    for img_shapes in (shapes, torch.tensor(shapes), [torch.tensor(s) for s in shapes]):
        # height and width, which old caches hold, have the lower priority
        assert get_image_shapes_multi_resolution({"img_shapes": img_shapes, "height": 16, "width": 16}, 2) == shapes
    for one in (shapes[:1], torch.tensor(shapes[:1])):
        assert get_image_shapes_multi_resolution({"img_shapes": one}, 3) == shapes[:1] * 3
    ragged = [[(1, 32, 32)], [(1, 8, 8), (1, 4, 4)]]
    assert get_image_shapes_multi_resolution({"img_shapes": ragged}, 2) == ragged


def test_get_image_shapes_multi_resolution_from_height_width():
    want = [[(1, 32, 32)], [(1, 40, 40)], [(1, 48, 32)]]
    for kind in (list, tuple, torch.tensor):
        sizes = dict(height=kind([512, 640, 768]), width=kind([512, 640, 512]))
        assert get_image_shapes_multi_resolution(sizes, 3) == want
    assert get_image_shapes_multi_resolution({"height": 512, "width": torch.tensor([640])}, 2) == [[(1, 32, 40)]] * 2


def test_get_image_shapes_with_additional_controls():
    sizes = dict(height=[512, 640], width=[512, 640], height_control=[256, 320], width_control=[128, 160],
                 height_control_1=[64, 80], width_control_1=[96, 112],
                 height_control_2=[None, 16], width_control_2=[None, 32])
    first = [(1, 32, 32), (1, 16, 8), (1, 4, 6)]
    second = [(1, 40, 40), (1, 20, 10), (1, 5, 7), (1, 1, 2)]
    for n_controls in ([1, 2], torch.tensor([1, 2])):  # it counts the controls after the first, sample by sample
        assert get_image_shapes_multi_resolution(sizes | {"n_controls": n_controls}, 2) == [first, second]
    assert get_image_shapes_multi_resolution(sizes | {"n_controls": 0}, 2) == [first[:2], second[:2]]
    del sizes["height_control_2"], sizes["width_control_2"]  # without n_controls the keys count
    assert get_image_shapes_multi_resolution(sizes, 2) == [first, second[:3]]


@pytest.mark.parametrize("lacking", ["height", "width", "width_control", "height_control_1", "width_control_2"])
def test_a_missing_size_is_a_key_error_that_names_it(lacking):
    pictures = ("", "_control", "_control_1", "_control_2")
    sizes = {side + which: [64] for which in pictures for side in ("height", "width")}
    del sizes[lacking]
    with pytest.raises(KeyError, match=rf"\b{lacking}\b"):
        get_image_shapes_multi_resolution(sizes | {"n_controls": 2}, 1)


def test_extract_batch_field_list():
    assert extract_batch_field({"height": [512, 640]}, "height", 1) == 640
    assert extract_batch_field({"height": (512, 640)}, "height", 0) == 512
    assert extract_batch_field({"prompt": ["a", "b"]}, "prompt", 1) == "b"


def test_extract_batch_field_tensor():
    for values, index, want in [([64, 80], 1, 80), ([64], 0, 64), ([64], 2, 64), (64, 1, 64), ([0.2, 0.5], 1, 0.5)]:
        got = extract_batch_field({"height": torch.tensor(values)}, "height", index)
        assert got == want and type(got) is type(want)  # a python number, which can stand in a shape


def test_extract_batch_field_scalar():
    for value in (512, 0.5, "cat", None):
        assert extract_batch_field({"height": value}, "height", 3) is value
    with pytest.raises(KeyError, match="depth"):
        extract_batch_field({"height": 512}, "depth", 0)


def test_latents_are_padded_with_zeros_and_a_mask_says_where():
    samples = [torch.randn(n, C) for n in (8, 12, 6)]
    for max_len, width in ((None, 12), (15, 15)):
        padded_BIC, mask_BI = pad_latents_for_multi_res(samples, max_len)
        assert mask_BI.dtype == torch.bool and mask_BI.sum(1).tolist() == [8, 12, 6]
        assert torch.equal(padded_BIC, pad(samples, width)) and torch.equal(padded_BIC[mask_BI], torch.cat(samples))


@pytest.mark.parametrize("samples, max_len", [([], None), ([torch.zeros(1, 4, C)], None), ([torch.zeros(4, C)], 3),
                                              ([torch.zeros(4, C), torch.zeros(4, C + 1)], None)])
def test_latents_that_cannot_be_padded_are_a_value_error(samples, max_len):
    with pytest.raises(ValueError):
        pad_latents_for_multi_res(samples, max_len)


@pytest.mark.parametrize("mixed, img_shapes", [
    (False, [[(1, 8, 8), (1, 4, 4)]]),
    (False, [[(1, 8, 8), (1, 4, 4)]] * 3),
    (True, [[(1, 8, 8)], [(1, 8, 6)]]),
    (True, [[(1, 8, 8)], [(1, 4, 16)]]),  # equal token counts: a decision by length would be silently wrong here
    (True, [[(1, 8, 8), (1, 4, 4)], [(1, 8, 8), (1, 2, 8)]]),
    (True, [[(1, 8, 8), (1, 4, 4)], [(1, 8, 8)]]),
])
def test_a_mixed_batch_is_told_by_its_shapes(mixed, img_shapes):
    assert should_use_multi_resolution_mode(img_shapes) is mixed


@pytest.mark.parametrize("n", [0, 1, 7, 100])
def test_packs_hold_every_sample_once_within_the_limit(n):
    rng, limit = random.Random(n), 1000
    lengths = [rng.randint(1, 1100) for _ in range(n)] + [limit] * (n > 0)
    packs = plan_packs(lengths, limit)
    assert packs == plan_packs(list(lengths), limit)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(pack and (len(pack) == 1 or sum(lengths[i] for i in pack) <= limit) for pack in packs)
    fitting = [x for x in lengths if x <= limit]  # even the simplest packing fills half of its packs' room
    assert len(packs) <= len(lengths) - len(fitting) + 2 * sum(fitting) / limit + 1


# ---- rope_patch.py: one batch of three sizes (first seed document) ----


def test_qwen_multi_resolution_inference_consistency():
    config = dict(attention_head_dim=64, axes_dims_rope=(8, 28, 28))
    samples = make_batch(([(1, 16, 32)], 64), ([(1, 24, 24)], 64), ([(1, 20, 28)], 64))
    for door in MIXED_DOORS:
        assert_one_by_one(run(patched_model(**config), door, samples), samples, **config)


# ---- rope_patch.py: ten steps from the stock model to the masked mixed batch (second seed document) ----

SIDES = (32, 32, 64, 64) if FULL else (8, 8, 16, 16)
S2_CONFIG = dict(attention_head_dim=128, axes_dims_rope=(16, 56, 56))
S2_SAMPLES = make_batch(*[([(1, side, side)] * 2, 77) for side in SIDES])


@functools.cache
@torch.no_grad()
def s2_rows(model, split, masked):
    """The rows of two calls of two equal samples (split) or of one call of all four, with or without the joint mask."""
    rows = []
    for samples in (S2_SAMPLES[:2], S2_SAMPLES[2:]) if split else (S2_SAMPLES,):
        mask_B11S = joint_mask_of(samples, max(image_lens(samples))).view(len(samples), 1, 1, -1)
        rows += model(**padded_call(model, samples, spare=0),
                      attention_kwargs={"attention_mask": mask_B11S} if masked else None).sample
    return rows


def s2_original(dtype=DTYPE):
    return s2_rows(hot_model(dtype=dtype, **S2_CONFIG), split=True, masked=False)


def s2_custom(split, masked):
    rows = s2_rows(patched_model(**S2_CONFIG), split, masked)
    return [row_IO[:n] for row_IO, n in zip(rows, image_lens(S2_SAMPLES))]


def s2_exact():
    return s2_original(torch.float32) if DTYPE == torch.bfloat16 else None


def assert_all_tokens_alive(outputs):
    assert [tuple(out.shape) for out in outputs] == [(n, O) for n in image_lens(S2_SAMPLES)]
    assert all(out.isfinite().all() and out.abs().sum(1).min() > 0 for out in outputs)


def test_model_parameters_equivalence():
    original, custom = hot_model(**S2_CONFIG).state_dict(), patched_model(**S2_CONFIG).state_dict()
    assert list(original) == list(custom)
    assert_bitwise(custom, original)


def test_original_model_split_batches():
    assert_all_tokens_alive(s2_original())


def test_custom_model_split_batches():
    assert_all_tokens_alive(s2_custom(split=True, masked=False))


def test_equivalence_split_vs_split():
    assert_bitwise(s2_custom(split=True, masked=False), s2_original())


def test_custom_model_split_with_mask():
    assert_all_tokens_alive(s2_custom(split=True, masked=True))


def test_equivalence_split_with_vs_without_mask():
    assert_equals_stock(s2_custom(split=True, masked=True), s2_custom(split=True, masked=False), s2_exact())


def test_custom_model_full_batch_with_mask():
    valid = joint_mask_of(S2_SAMPLES, max(image_lens(S2_SAMPLES))).sum(1).tolist()
    assert valid == ([2125, 2125, 8269, 8269] if FULL else [205, 205, 589, 589])
    assert_all_tokens_alive(s2_custom(split=False, masked=True))


def test_equivalence_split_vs_full():
    assert_equals_stock(s2_custom(split=False, masked=True), s2_custom(split=True, masked=False), s2_exact())


def test_equivalence_original_vs_custom_full():
    for masked in (True, False):  # the shapes alone also tell where the pads are
        assert_equals_stock(s2_custom(split=False, masked=masked), s2_original(), s2_exact())


def test_padding_is_masked():
    for row_IO, n in zip(s2_rows(patched_model(**S2_CONFIG), split=False, masked=True), image_lens(S2_SAMPLES)):
        assert len(row_IO) == max(image_lens(S2_SAMPLES)) and (row_IO[n:] == 0).all()
        assert row_IO[:n].abs().sum(1).min() > 0


# ---- rope_patch.py: the stock call (mode 1) ----

RESIDUALS = torch.randn(2, 2, 40, E, generator=torch.Generator().manual_seed(0))  # of two blocks, two samples
# what differs from the call of the two samples EQUAL; the shapes (1, 8, 5) and (2, 4, 5) have their 40 tokens too
STOCK_CALLS = {
    "nested shapes": {},
    "one nested list for all": dict(img_shapes=[[(1, 6, 4), (1, 4, 4)]]),
    "shared shape": dict(img_shapes=[(1, 8, 5)]),
    "flat shapes": dict(img_shapes=[(1, 8, 5), (1, 8, 5)]),
    "two frames": dict(img_shapes=[(2, 4, 5)]),
    "text mask with holes": dict(encoder_hidden_states_mask=torch.tensor([HOLES, HOLES[::-1]])),
    "integer text mask": dict(encoder_hidden_states_mask=torch.tensor([HOLES, [True] * 9]).long()),
    "float text mask": dict(encoder_hidden_states_mask=torch.tensor([HOLES, [True] * 9]).float()),
    "text mask of ones": dict(encoder_hidden_states_mask=torch.ones(2, 9, dtype=torch.long)),
    "one timestep for all": dict(timestep=torch.tensor([0.5])),
    "controlnet residual per block": dict(controlnet_block_samples=RESIDUALS),
    "controlnet residual for two blocks": dict(controlnet_block_samples=RESIDUALS[:1]),
    "LoRA scale": dict(attention_kwargs={"scale": 0.5}),
    "empty attention_kwargs": dict(attention_kwargs={}),
}
STOCK_CANNOT = [("2511", "shared shape"), ("2511", "flat shapes"), ("2511", "two frames"), ("layered", "two frames")]
STOCK_CAN = [(variant, name) for variant in ("v1", "2511", "layered") for name in STOCK_CALLS
             if (variant, name) not in STOCK_CANNOT]


def everything(model, name, *positional):
    """Output and all gradients, those of images and texts too, of a stock call. `positional` names go by position."""
    call = stock_call(model, EQUAL) | {key: to_model(model, value) if torch.is_tensor(value) else value
                                       for key, value in STOCK_CALLS[name].items()}
    model.zero_grad()
    leaves = [call[name].requires_grad_() for name in ("hidden_states", "encoder_hidden_states")]
    out = model(*[call.pop(name, None) for name in positional], **call).sample
    out.backward(to_model(model, torch.stack([s.out_grad_IO for s in EQUAL])))
    return [out, *(x.grad for x in (*leaves, *model.parameters()) if x.grad is not None)]


@both_dtypes
@pytest.mark.parametrize("lora", [False, True], ids=["base", "LoRA"])
@pytest.mark.parametrize("variant, name", STOCK_CAN)
def test_stock_call_is_bitwise_stock(variant, name, lora, dtype):
    which_model = variant, dtype, lora
    assert_bitwise(everything(patched_model(*which_model), name), everything(hot_model(*which_model), name))


def test_stock_arguments_keep_their_order():
    order = list(inspect.signature(QwenImageTransformer2DModel.forward).parameters)[1:-1]  # not self, not return_dict
    assert list(inspect.signature(patched_model("layered").forward).parameters)[:len(order)] == order
    for name in ("text mask with holes", "controlnet residual per block"):
        assert_bitwise(everything(patched_model("layered"), name, *order), everything(hot_model("layered"), name))


@every_door
def test_return_dict_works_both_ways(door):
    model = patched_model()
    call = DOORS[door](model, batch_for(door))
    as_tuple, as_object, by_default = model(**call, return_dict=False), model(**call, return_dict=True), model(**call)
    assert type(as_tuple) is tuple and len(as_tuple) == 1
    assert_bitwise([as_object.sample, by_default.sample], as_tuple * 2)


# ---- rope_patch.py: mixed batches (modes 2 to 4) equal stock one by one ----


def random_batch(n):
    rng = random.Random(n)
    pictures = lambda: [(1, rng.randint(1, 8), rng.randint(1, 8)) for _ in range(rng.randint(1, 3))]
    return make_batch(*[(pictures(), rng.randint(1, 15)) for _ in range(n)])


BATCHES = {
    "one sample": make_batch(([(1, 5, 7), (1, 4, 3)], 11)),
    "mixed sizes": make_batch(([(1, 6, 10)], 9), ([(1, 12, 4)], 9), ([(1, 3, 5)], 9)),
    "equal sizes, unequal text": make_batch(([(1, 6, 6), (1, 4, 4)], 3), ([(1, 6, 6), (1, 4, 4)], 11)),
    "equal tokens": make_batch(([(1, 4, 16)], 9), ([(1, 8, 8)], 9), ([(1, 4, 8), (1, 8, 4)], 9)),
    # layer3d takes the text's position in the last sample from the number of its pictures, not from their size
    "one to six pictures": make_batch(([(1, 8, 8)], 7), ([(1, 4, 6), (1, 7, 5)], 1),
                                      ([(1, 3, 3), (1, 2, 9), (1, 6, 2)], 14), ([(1, 2, 2)] * 6, 5)),
    "holes in the text": make_batch(([(1, 6, 10)], 9, HOLES), ([(1, 4, 6), (1, 4, 6)], 12),
                                    ([(1, 5, 5)], 2, [False, False])),
    "twelve samples": random_batch(12),
}
BATCHES_AND_DOORS = [(batch, door) for batch in BATCHES for door in MIXED_DOORS
                     if (batch, door) != ("holes in the text", "packed")]  # packed mode takes no mask


@functools.cache
def stock_answer(batch, variant, dtype):
    model = hot_model(variant, dtype, lora=True)
    return with_gradients(model, BATCHES[batch], one_by_one(model, BATCHES[batch]))


@both_dtypes
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch, door", BATCHES_AND_DOORS)
def test_mixed_batch_and_its_gradients_equal_one_by_one(batch, door, variant, dtype):
    model = patched_model(variant, dtype, lora=True)
    got = with_gradients(model, BATCHES[batch], run(model, door, BATCHES[batch]))
    exact = stock_answer(batch, variant, torch.float32) if dtype == torch.bfloat16 else None
    assert_equals_stock(got, stock_answer(batch, variant, dtype), exact)


def test_text_positions_of_the_first_sample_are_wrong_for_the_others():
    """The negative control: the hot model feels this common mistake, so the tests above have teeth."""
    model, samples = patched_model(dtype=torch.float32), BATCHES["mixed sizes"]
    img_freqs_BIR, txt_freqs_BTR = precomputed_call(model, samples)["image_rotary_emb"]
    wrong = run(model, "precomputed", samples, image_rotary_emb=(img_freqs_BIR, txt_freqs_BTR[0]))
    errors = list(map(rel, wrong, one_by_one(hot_model(dtype=torch.float32), samples)))
    print("errors:", errors)
    assert errors[0] <= 1e-5 and min(errors[1:]) > 0.1


def test_flat_shapes_mean_one_picture_per_sample():
    samples = BATCHES["mixed sizes"]
    flat = run(patched_model(), "padded", samples, img_shapes=[s.shapes[0] for s in samples])
    assert_bitwise(flat, run(patched_model(), "padded", samples))


@pytest.mark.parametrize("kind", [list, torch.tensor])
@pytest.mark.parametrize("batch", ["mixed sizes", "equal sizes, unequal text", "twelve samples"])
def test_text_lengths_of_several_rows_mean_a_right_padded_mask(batch, kind):
    """Older diffusers' argument, which its pipelines always pass. In packed mode a tensor is as good as a list."""
    model, samples = patched_model(), BATCHES[batch]
    lens, no_mask = dict(txt_seq_lens=kind(text_lens(samples))), dict(encoder_hidden_states_mask=None)
    assert_bitwise(run(model, "padded", samples, **lens, **no_mask), run(model, "padded", samples))
    assert_bitwise(run(model, "packed", samples, **lens), run(model, "packed", samples))


def test_controlnet_residuals_work_in_padded_batches():
    torch.manual_seed(0)
    residuals = [[torch.randn(n, E).bfloat16() for n in image_lens(MIXED)] for _ in range(2)]  # block by block
    padded = [to_model(hot_model(), pad(r, max(image_lens(MIXED)) + 3, fill=float("nan"))) for r in residuals]
    got = run(patched_model(), "padded", MIXED, controlnet_block_samples=padded)
    for i, sample in enumerate(MIXED):
        own = [r[i][None].to(DEVICE) for r in residuals]
        assert_one_by_one(got[i:i + 1], [sample], dict(controlnet_block_samples=own))


@every_mixed_door
def test_float16_is_clipped_as_in_stock(door):
    """Stock clips what overflows between two blocks; without that the next norm makes it NaN."""
    stock = copy.deepcopy(hot_model(dtype=torch.float32)).half()
    for block in stock.transformer_blocks:
        block.img_mlp.net[2].bias.data.fill_(60000)
        block.txt_mlp.net[2].bias.data.fill_(60000)
    want, got = one_by_one(stock, MIXED), run(patched_copy(stock), door, MIXED)
    assert all(out.isfinite().all() for out in want) and max(map(rel, got, want)) <= 1e-2


def test_packed_linears_see_real_tokens_only():
    model, samples, tokens = patched_copy(hot_model()), BATCHES["twelve samples"], Counter()
    block = model.transformer_blocks[0]
    linears = dict(image=[block.attn.to_q, block.attn.to_out[0], block.img_mlp.net[2]],
                   text=[block.attn.add_k_proj, block.attn.to_add_out, block.txt_mlp.net[2]])
    for kind in linears:
        for linear in linears[kind]:
            linear.register_forward_hook(lambda *call, kind=kind: tokens.update({kind: call[-1][..., 0].numel()}))
    run(model, "packed", samples)
    assert tokens == dict(image=3 * sum(image_lens(samples)), text=3 * sum(text_lens(samples)))


# ---- rope_patch.py: precomputed positions and masks (mode 3) ----


@pytest.mark.parametrize("img_ndim", [2, 3])
@pytest.mark.parametrize("txt_ndim", [2, 3])
@pytest.mark.parametrize("masked", [True, False])
def test_precomputed_positions_are_shared_or_per_sample(img_ndim, txt_ndim, masked):
    call = precomputed_call(patched_model(), EQUAL, spare=0)
    freqs = tuple(f if ndim == 3 else f[0] for f, ndim in zip(call["image_rotary_emb"], (img_ndim, txt_ndim)))
    mask = call["attention_kwargs"] if masked else None
    out = patched_model()(**call | dict(image_rotary_emb=freqs, attention_kwargs=mask)).sample
    assert_one_by_one(take_apart(out, "precomputed", EQUAL), EQUAL)


def test_precomputed_positions_win_over_shapes():
    model, wrong = patched_model(), [[(f, w, h) for f, h, w in s.shapes] for s in MIXED]
    assert_bitwise(run(model, "precomputed", MIXED, img_shapes=wrong), run(model, "precomputed", MIXED))


def test_samples_of_equal_length_need_no_mask():
    samples = BATCHES["equal tokens"]
    call = precomputed_call(patched_model(), samples, spare=0) | dict(attention_kwargs=None)
    assert_one_by_one(take_apart(patched_model()(**call).sample, "precomputed", samples), samples)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
                                   torch.float32, torch.float64], ids=str)
def test_all_forms_of_a_mask_mean_the_same(dtype):
    model = patched_model()
    mask_BS = joint_mask_of(MIXED, max(image_lens(MIXED)) + 3).to(dtype)
    for door in ("padded", "precomputed"):
        want = run(model, door, MIXED)
        for mask in (mask_BS, mask_BS[:, None, None]):
            assert_bitwise(run(model, door, MIXED, attention_kwargs={"attention_mask": mask}), want)
    assert_bitwise(run(model, "padded", MIXED, encoder_hidden_states_mask=text_mask_of(MIXED).to(dtype)),
                   run(model, "padded", MIXED))


@pytest.mark.parametrize("excluded", [float("-inf"), torch.finfo(torch.float32).min, -1e4, 0.5])
@every_masked_door
def test_additive_mask_is_a_value_error(door, excluded):
    """Read as a 0/1 mask it would mean the opposite."""
    call = DOORS[door](patched_model(), batch_for(door))
    width = call["encoder_hidden_states"].shape[1] + call["hidden_states"].shape[1]
    additive_BS = torch.zeros(2, width, device=DEVICE)
    additive_BS[1, -4:] = excluded
    with pytest.raises(ValueError, match="mask"):
        patched_model()(**call | dict(attention_kwargs={"attention_mask": additive_BS}))


@every_masked_door
def test_text_mask_and_joint_mask_both_apply(door):
    samples = copy.deepcopy(batch_for(door))
    call = DOORS[door](patched_model(), samples)
    by_text, by_joint = text_mask_of(samples), joint_mask_of(samples, call["hidden_states"].shape[1])
    by_text[0, 2] = by_text[1, 0] = by_joint[0, 4] = by_joint[1, 3] = False
    call |= dict(encoder_hidden_states_mask=by_text, attention_kwargs={"attention_mask": by_joint})
    for i, sample in enumerate(samples):  # as stock sees it
        sample.text_mask = (by_text & by_joint[:, :by_text.shape[1]])[i, :len(sample.text_TJ)].cpu()
    assert_one_by_one(take_apart(patched_model()(**call).sample, door, samples), samples)


def test_masked_image_tokens_may_stand_anywhere():
    """All targets side by side, then all controls: the layout of trainers that pad each picture on its own."""
    samples, width = make_batch(([(1, 6, 10), (1, 3, 4)], 7), ([(1, 4, 6), (1, 5, 8)], 12)), 60 + 40
    call = precomputed_call(patched_model(), samples, spare=width - max(image_lens(samples)))
    img_freqs_BIR, txt_freqs_BTR = call["image_rotary_emb"]
    together_BI, apart_BI = image_mask_of(samples, width), image_mask_of(samples, width)
    apart_BI[1, 24:60], apart_BI[1, 60:] = False, True
    move = lambda x, fill: torch.full_like(x, fill).masked_scatter(apart_BI[..., None], x[together_BI])
    out = patched_model()(**call | dict(
        hidden_states=move(call["hidden_states"], float("nan")),
        image_rotary_emb=(move(img_freqs_BIR, 0), txt_freqs_BTR),
        attention_kwargs={"attention_mask": torch.cat([text_mask_of(samples), apart_BI], dim=1)})).sample
    assert (out[~apart_BI] == 0).all()
    assert_one_by_one(out[apart_BI].split(image_lens(samples)), samples)


# ---- rope_patch.py: pads ----


@pytest.mark.parametrize("garbage", [1e3, float("inf"), float("nan")])
@pytest.mark.parametrize("variant", ["v1", "2511"])
@pytest.mark.parametrize("door, argument", [
    ("padded", "hidden_states"), ("padded", "encoder_hidden_states"),
    ("precomputed", "hidden_states"), ("precomputed", "encoder_hidden_states"),
    ("precomputed", "image frequencies"), ("precomputed", "text frequencies")])
def test_padding_never_leaks(door, argument, variant, garbage):
    """Outputs and LoRA gradients stay bitwise the same, and pads get no gradient."""
    model, samples, answers = patched_model(variant, lora=True), BATCHES["holes in the text"], []
    for fill in (0, garbage):
        call = DOORS[door](model, samples)
        call["image frequencies"], call["text frequencies"] = call.get("image_rotary_emb", (None, None))
        spoilt = call[argument]
        pads = ~(text_mask_of(samples) if argument in ("encoder_hidden_states", "text frequencies") else
                 image_mask_of(samples, spoilt.shape[1]))
        spoilt[pads] = fill
        del call["image frequencies"], call["text frequencies"]
        for name in ("hidden_states", "encoder_hidden_states"):
            call[name].requires_grad_()
        answers.append(with_gradients(model, samples, take_apart(model(**call).sample, door, samples)))
        assert spoilt.is_complex() or (spoilt.grad[pads] == 0).all()
    assert_bitwise(*answers)


# ---- rope_patch.py: gradient checkpointing ----


@pytest.mark.parametrize("make", [patched_copy, copy.deepcopy], ids=["set after the patch", "set before the patch"])
@pytest.mark.parametrize("blocks", [None, 0, 1, 2])
@pytest.mark.parametrize("variant", ["v1", "2511"])
@every_door
def test_checkpointing_changes_memory_only(door, variant, blocks, make):
    samples, plain, entered = batch_for(door), patched_model(variant, lora=True), Counter()
    model = make(hot_model(variant, lora=True))
    model.enable_gradient_checkpointing()
    model.gradient_checkpointing_blocks = blocks
    patch_qwen_model_for_multi_resolution(model)
    for index, block in enumerate(model.transformer_blocks):
        block.register_forward_pre_hook(lambda *_, index=index: entered.update([index]))
    # stock recomputes without the scale, so its gradients would be wrong
    changes = {} if door == "stock" else at_half_scale(plain, door, samples)
    assert_bitwise(with_gradients(model, samples, run(model, door, samples, **changes)),
                   with_gradients(plain, samples, run(plain, door, samples, **changes)))
    checkpointed = 2 if blocks is None else blocks
    assert entered == {index: 2 if index < checkpointed else 1 for index in range(2)}  # backward enters them once more


class Probe(QwenDoubleStreamAttnProcessor2_0_MultiRes):
    """A processor with an argument of its own."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, encoder_hidden_states_mask=None,
                 attention_mask=None, image_rotary_emb=None, probe=None):
        probe.update(["attention"])
        return super().__call__(attn, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, attention_mask,
                                image_rotary_emb)


@pytest.mark.parametrize("checkpointing", [False, True])
@every_masked_door
def test_attention_kwargs_reach_every_block(door, checkpointing):
    model, entered, samples = patched_copy(hot_model()), Counter(), batch_for(door)
    model.set_attn_processor(Probe())
    if checkpointing:
        model.enable_gradient_checkpointing()
    call = DOORS[door](model, samples)
    call["attention_kwargs"] = call.get("attention_kwargs", {}) | {"probe": entered}
    assert_bitwise(take_apart(model(**call).sample, door, samples), run(patched_model(), door, samples))
    assert entered["attention"] == 2


# ---- rope_patch.py: LoRA ----


@every_door
def test_lora_may_be_added_after_the_patch(door):
    samples = batch_for(door)
    after, before = [with_gradients(model, samples, run(model, door, samples))
                     for model in (add_lora(patched_copy(hot_model())), patched_model(lora=True))]
    assert_bitwise(after, before)
    assert rel(after[0], run(hot_model(), "stock", samples[:1])[0]) > 0.1  # this LoRA matters


@every_mixed_door
def test_lora_scale_scales_as_in_stock(door):
    model, half = patched_model(lora=True), at_half_scale(patched_model(), door, MIXED)
    unscaled, scaled = run(model, door, MIXED), run(model, door, MIXED, **half)
    assert_one_by_one(scaled, MIXED, dict(attention_kwargs={"scale": 0.5}), lora=True)
    assert min(map(rel, scaled, unscaled)) > 0.05

    def out_of_memory(*_):
        raise RuntimeError("out of memory")

    hook = model.transformer_blocks[1].attn.to_out[0].register_forward_pre_hook(out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(model, door, MIXED, **half)
    hook.remove()
    assert_bitwise(run(model, door, MIXED), unscaled)  # the scale has not been left behind


# ---- rope_patch.py: good manners ----


@every_door
def test_arguments_stay_as_they_were(door):
    model, samples = patched_model("2511", lora=True), batch_for(door)
    call = DOORS[door](model, samples) | at_half_scale(model, door, samples)
    before = copy.deepcopy(call)
    model(**call).sample.sum().backward()
    torch.testing.assert_close(call, before, rtol=0, atol=0)


@every_door
def test_patching_twice_is_patching_once(door):
    model, samples = patched_copy(hot_model(lora=True)), batch_for(door)
    assert patch_qwen_model_for_multi_resolution(model) is model
    half = at_half_scale(model, door, samples)  # applied twice, it would be a quarter
    assert_bitwise(run(model, door, samples, **half), run(patched_model(lora=True), door, samples, **half))


def test_the_forward_patch_alone_keeps_stock_calls_and_refuses_what_stock_attention_cannot():
    model = copy.deepcopy(hot_model())
    patch_qwen_forward_for_multi_resolution(model)
    for name in ("nested shapes", "text mask with holes"):
        assert_bitwise(everything(model, name), everything(hot_model(), name))
    for door in MIXED_DOORS:
        with pytest.raises(ValueError):
            run(model, door, MIXED)


def test_only_this_model_is_patched():
    def surroundings():
        owners = [stock_code, torch.nn.Module, *filter(inspect.isclass, vars(stock_code).values())]
        state = {(owner, name): id(value) for owner in owners for name, value in vars(owner).items()}
        return state | {name: list(vars(module)) for name, module in other.named_modules()}

    other = copy.deepcopy(hot_model())
    before, model = surroundings(), patched_copy(other)
    for door in DOORS:
        run(model, door, batch_for(door))
    assert surroundings() == before
    assert all(type(p) is stock_code.QwenDoubleStreamAttnProcessor2_0 for p in other.attn_processors.values())


def test_state_config_and_files_stay_stock(tmp_path):
    stock, model = hot_model("2511"), patched_copy(hot_model("2511"))
    for door in DOORS:
        run(model, door, batch_for(door))
    assert [name for name, _ in model.named_modules()] == [name for name, _ in stock.named_modules()]
    assert list(model.state_dict()) == list(stock.state_dict()) and model.config == stock.config
    files = []
    for saved in (stock, model):
        saved.save_pretrained(tmp_path / str(len(files)))
        files.append({path.name: path.read_bytes() for path in (tmp_path / str(len(files))).iterdir()})
    assert files[0] == files[1]
    loaded = QwenImageTransformer2DModel.from_pretrained(tmp_path / "1", torch_dtype=DTYPE).to(DEVICE)
    assert_bitwise(run(loaded, "stock", EQUAL), run(stock, "stock", EQUAL))


@pytest.mark.parametrize("used", [False, True])
@every_door
def test_a_deep_copy_lives_its_own_life(door, used):
    """A patch that closes over the model would send the copy's calls through the original's weights."""

    def changed(model):
        model.proj_out.weight.data.mul_(2)
        model.transformer_blocks[0].attn.to_v.weight.data.neg_()
        model.transformer_blocks[1].img_mlp.net[2].weight.data.neg_()
        return model

    samples, model = batch_for(door), patched_copy(hot_model("2511"))
    if used:
        run(model, door, samples)
    twin = changed(copy.deepcopy(model))
    want = patched_copy(changed(copy.deepcopy(hot_model("2511"))))
    assert_bitwise(run(twin, door, samples), run(want, door, samples))
    assert_bitwise(run(model, door, samples), run(patched_model("2511"), door, samples))


class CountCalls(ModelHook):
    """The kind of hook by which diffusers offloads blocks: it replaces the block's forward."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def pre_forward(self, module, *args, **kwargs):
        self.calls.update(["offload"])
        return args, kwargs


@every_door
def test_every_block_is_entered_through_its_own_call(door):
    model, calls = copy.deepcopy(hot_model("2511")), Counter()

    def hook(when):
        for block in model.transformer_blocks:
            block.register_forward_pre_hook(lambda *_: calls.update([f"{when}, pre"]))
            block.register_forward_hook(lambda *_: calls.update([f"{when}, post"]))

    hook("before the patch")
    patch_qwen_model_for_multi_resolution(model)
    hook("after it")
    for block in model.transformer_blocks:
        HookRegistry.check_if_exists_or_initialize(block).register_hook(CountCalls(calls), "count")
    patch_qwen_model_for_multi_resolution(model)  # patching again must not take the offload hook away
    assert_bitwise(run(model, door, batch_for(door)), run(patched_model("2511"), door, batch_for(door)))
    assert calls == {kind: 2 for kind in ("before the patch, pre", "before the patch, post", "after it, pre",
                                          "after it, post", "offload")}


@pytest.mark.parametrize("place", ["model", "block"])
def test_a_replaced_forward_is_not_thrown_away(place):
    """An offload hook that came before the patch would be lost, so the patch refuses."""
    model = copy.deepcopy(hot_model())
    hooked = dict(model=model, block=model.transformer_blocks[1])[place]
    HookRegistry.check_if_exists_or_initialize(hooked).register_hook(CountCalls(Counter()), "count")
    with pytest.raises(ValueError, match="hook"):
        patch_qwen_model_for_multi_resolution(model)


# ---- rope_patch.py: errors ----


def cut(call, name):
    return {name: call[name][:, :-1]}


def cut_freqs(call, which):
    freqs = [f[:, :-1] if i == which else f for i, f in enumerate(call["image_rotary_emb"])]
    return dict(image_rotary_emb=tuple(freqs))


def joint_mask(*shape):
    return dict(attention_kwargs={"attention_mask": torch.ones(shape, dtype=torch.bool, device=DEVICE)})


def ones(*shape):
    return torch.ones(shape, device=DEVICE)


# MIXED has 60 and 48 image tokens (in 63 rows when padded) and 7 and 12 text tokens, EQUAL has 40 and 9 in each sample.
# The numbers are what was got and what is wanted.
ERRORS = {
    ("stock", "image tokens", 39, 40): lambda call: cut(call, "hidden_states"),
    ("stock", "text mask", 8, 9): lambda call: dict(encoder_hidden_states_mask=ones(2, 8)),
    ("padded", "image tokens", 59, 60): lambda call: dict(hidden_states=call["hidden_states"][:, :59]),
    ("padded", "shapes", 3, 2): lambda call: dict(img_shapes=call["img_shapes"] + [[(1, 2, 2)]]),
    ("padded", "text mask", 11, 12): lambda call: cut(call, "encoder_hidden_states_mask"),
    ("padded", "joint mask", 74, 75): lambda call: joint_mask(2, 74),
    ("padded", "text lengths", 13, 12): lambda call: dict(txt_seq_lens=[7, 13], encoder_hidden_states_mask=None),
    ("padded", "timesteps", 3, 2): lambda call: dict(timestep=ones(3)),
    ("precomputed", "joint mask", 76, 75): lambda call: joint_mask(2, 1, 1, 76),
    ("precomputed", "joint mask's batch", 3, 2): lambda call: joint_mask(3, 75),
    ("precomputed", "image frequencies", 62, 63): lambda call: cut_freqs(call, 0),
    ("precomputed", "text frequencies", 11, 12): lambda call: cut_freqs(call, 1),
    ("precomputed", "timesteps", 3, 2): lambda call: dict(timestep=ones(3)),
    ("packed", "image tokens", 107, 108): lambda call: cut(call, "hidden_states"),
    ("packed", "text tokens", 18, 19): lambda call: cut(call, "encoder_hidden_states"),
    ("packed", "shapes", 3, 2): lambda call: dict(img_shapes=call["img_shapes"] + [[(1, 2, 2)]]),
    ("packed", "timesteps", 3, 2): lambda call: dict(timestep=ones(3)),
    ("packed", "text mask"): lambda call: dict(encoder_hidden_states_mask=ones(1, 19)),
    ("packed", "joint mask"): lambda call: joint_mask(1, 19 + 108),
    ("packed", "ControlNet"): lambda call: dict(controlnet_block_samples=[ones(1, 108, E)]),
}


def assert_names(error, *numbers):
    assert all(re.search(rf"(?<!\d)({n})(?!\d)", str(error.value)) for n in numbers), error.value


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: " ".join(case[:2]))
def test_what_does_not_fit_is_a_value_error_that_names_it(case):
    door, _, *numbers = case
    call = DOORS[door](patched_model(), batch_for(door))
    with pytest.raises(ValueError) as error:
        patched_model()(**call | ERRORS[case](call))
    assert_names(error, *numbers)


def test_zero_cond_t_with_precomputed_positions_asks_for_the_shapes():
    with pytest.raises(ValueError, match="img_shapes"):
        run(patched_model("2511"), "precomputed", MIXED, img_shapes=None)


@pytest.mark.parametrize("variant", ["v1", "layered"])
@pytest.mark.parametrize("door", ["stock", "padded", "packed"])
@pytest.mark.parametrize("shape, text_len, got, want", [((1, 2, 4), 4095, 4095, "4094|4096"),
                                                        ((1, 1, 8194), 3, 8194, "8192|4096")])
def test_positions_past_the_table_are_a_value_error(door, variant, shape, text_len, got, want):
    """The table has 4096 positions for each sign. Stock slices it short and fails later, with an error about shapes."""
    long = make_sample([shape], text_len)
    with pytest.raises(ValueError) as error:
        run(patched_model(variant), door, [long] if door == "stock" else [make_sample([(1, 2, 2)], 5), long])
    assert_names(error, got, want)


@torch.no_grad()
def test_the_last_position_of_the_table_is_usable():
    samples = make_batch(([(1, 2, 4)], 4094), ([(1, 3, 2)], 5))
    assert_one_by_one(run(patched_model(), "packed", samples), samples)


# ---- rope_patch.py: the fast road ----


def varlen_reference(q, k, v, cu_q, cu_k, max_q, max_k):
    """torch.nn.attention.varlen.varlen_attn in plain words: it has no CPU kernel. (N, H, D) tensors."""
    assert q.ndim == 3 and cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())
    assert (len(q), len(k)) == (cu_q[-1], cu_k[-1]) and len(cu_q) == len(cu_k)
    cut = lambda x, cu: [x[a:b].transpose(0, 1) for a, b in zip(cu, cu[1:])]
    return torch.cat([torch.nn.functional.scaled_dot_product_attention(*qkv).transpose(0, 1)
                      for qkv in zip(cut(q, cu_q), cut(k, cu_k), cut(v, cu_k))])


@pytest.mark.parametrize("variant", ["v1", "2511"])
def test_packed_attention_in_one_kernel_call(monkeypatch, variant):
    """What CUDA gets, with the kernel written out: one call a block, its bounds made once per forward pass."""
    calls, layouts = [], []
    monkeypatch.setattr(rope_patch, "has_varlen", lambda x: True)
    monkeypatch.setattr(rope_patch, "varlen_attn", lambda *a: calls.append(a) or varlen_reference(*a))
    real = rope_patch.pack_layout
    monkeypatch.setattr(rope_patch, "pack_layout", lambda *a: layouts.append(a) or real(*a))
    model, ours = hot_model(variant, torch.float32, lora=True), patched_model(variant, torch.float32, lora=True)
    samples = make_batch(([(1, 6, 10)], 7), ([(1, 4, 6), (1, 4, 6)], 12), ([(1, 3, 3), (1, 2, 5)], 4))
    got = with_gradients(ours, samples, run(ours, "packed", samples))
    assert len(calls) == SMALL["num_layers"] and len(layouts) == 1
    assert_equals_stock(got, with_gradients(model, samples, one_by_one(model, samples)))


@every_mixed_door
def test_text_that_nobody_reads_is_not_computed(door):
    """The last block's text goes nowhere: its query, its output projection and its MLP are left out."""
    model, called = patched_copy(hot_model()), set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    run(model, door, MIXED)
    parts = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp")
    assert {f"transformer_blocks.0.{p}" for p in parts} <= called
    assert not {f"transformer_blocks.1.{p}" for p in parts} & called
    assert "transformer_blocks.1.attn.add_k_proj" in called


def test_compiled_blocks_do_not_compile_anew_for_new_lengths():
    """After one batch of several samples and one of a single one, every other mixture runs what is compiled."""
    plain = patched_copy(hot_model(dtype=torch.float32))
    predict.add_lora(plain.requires_grad_(False), r=4, target_modules=["to_q", "net.2"], init_lora_weights=False)
    model = copy.deepcopy(plain)
    torch._dynamo.reset()
    for block in model.transformer_blocks[:None if FULL else 1]:
        block.compile(dynamic=True, backend="eager")
    batches = [MIXED, MIXED[:1], make_batch(([(1, 3, 5)], 9), ([(1, 8, 2), (1, 4, 6)], 3), ([(1, 5, 5)], 31)),
               make_batch(*[([(1, h, 4)], h) for h in range(2, 9)]), make_batch(([(1, 7, 9), (1, 2, 2)], 17))]
    for i, samples in enumerate(batches if FULL else batches[:3]):
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            got = with_gradients(model, samples, run(model, "packed", samples))
        assert_equals_stock(got, with_gradients(plain, samples, run(plain, "packed", samples)))
    torch._dynamo.reset()


# ---- rope_patch.py: its parts ----


@both_dtypes
def test_batched_rotation_is_stocks_for_each_sample(dtype):
    torch.manual_seed(0)
    x_BSHD = torch.randn(3, 4, 4, 32, dtype=dtype, device=DEVICE)  # S = H: rotating along the wrong one would not fail
    freqs_BSR = torch.polar(torch.ones(3, 4, 16), torch.randn(3, 4, 16)).to(DEVICE)
    stock = functools.partial(stock_code.apply_rotary_emb_qwen, use_real=False)
    for freqs, want in ((freqs_BSR, torch.cat([stock(x[None], f) for x, f in zip(x_BSHD, freqs_BSR)])),
                        (freqs_BSR[0], stock(x_BSHD, freqs_BSR[0]))):
        got = apply_rotary_emb_qwen_batched(x_BSHD, freqs)
        assert got.dtype == dtype and torch.equal(got, want)


def test_processor_is_a_drop_in_for_stocks():
    model = copy.deepcopy(hot_model())
    model.set_attn_processor(QwenDoubleStreamAttnProcessor2_0_MultiRes())  # and no patch of the forward
    model.set_attention_backend("native")
    for name in ("nested shapes", "text mask with holes"):
        assert_bitwise(everything(model, name), everything(hot_model(), name))
    parameters = inspect.signature(QwenDoubleStreamAttnProcessor2_0_MultiRes.__call__).parameters
    assert set(inspect.signature(stock_code.QwenDoubleStreamAttnProcessor2_0.__call__).parameters) <= set(parameters)
    # diffusers drops every argument that is not named
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())


def test_processor_takes_positions_per_sample_and_a_joint_mask():
    stock = hot_model(dtype=torch.float32).transformer_blocks[0].attn
    attn = copy.deepcopy(stock)
    attn.set_processor(QwenDoubleStreamAttnProcessor2_0_MultiRes())
    torch.manual_seed(0)
    image_BIE, text_BTE = torch.randn(2, 6, E, device=DEVICE), torch.randn(2, 4, E, device=DEVICE)
    img_freqs_BIR, txt_freqs_BTR = [torch.polar(torch.ones(2, n, 16), torch.randn(2, n, 16)).to(DEVICE) for n in (6, 4)]
    text_mask_BT = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], device=DEVICE).bool()
    mask_BS = torch.tensor([[1] * 10, [1] * 2 + [0] * 2 + [1] * 5 + [0]], device=DEVICE).bool()
    image_out, text_out = attn(
        hidden_states=image_BIE, encoder_hidden_states=text_BTE, image_rotary_emb=(img_freqs_BIR, txt_freqs_BTR),
        encoder_hidden_states_mask=text_mask_BT, attention_mask=mask_BS[:, None, None])
    for i, (I, T) in enumerate([(6, 3), (5, 2)]):
        want = stock(hidden_states=image_BIE[i:i + 1, :I], encoder_hidden_states=text_BTE[i:i + 1, :T],
                     image_rotary_emb=(img_freqs_BIR[i, :I], txt_freqs_BTR[i, :T]))
        assert_equals_stock([image_out[i:i + 1, :I], text_out[i:i + 1, :T]], want)


# ==== chapter 2: dataset, pictures and cache ==========================================================================
# What cache.py promises, and train.py and predict.py where they read pictures, caches and LoRA files. A small dataset
# is made, spoiled in one respect, and read: all that is wrong must be named, all the rest must go on working.

# ---- scripts, datasets, refusals: shared by this chapter ----

HERE = Path(cache.__file__).parent
TINY = HERE / "tiny"
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
ON_DEVICE = ["--dtype", DTYPE_NAME, "--device", DEVICE]
NATIVE = ["--target_pixels", "native", "--control_pixels", "native"]  # the default of --model tiny only


def run_script(script, *flags):
    """`python SCRIPT FLAGS` in an empty folder -> exit status, what it wrote, and its errors. In this process, because
    imports take seconds; cache.py and predict.py as the imported modules, so that a test may replace functions."""
    out, err = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace")]
    with (tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch,
          contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [script, *map(str, flags)])
        names = {}
        try:
            if script in ("train.py", "bench.py"):
                names = runpy.run_path(str(HERE / script), run_name="__main__")
            else:
                {"cache.py": cache, "predict.py": predict}[script].main()
            status = 0
        except SystemExit as e:  # as the interpreter does it
            status = e.code if isinstance(e.code, int) else int(e.code is not None)
            if isinstance(e.code, str):
                print(e.code, file=err)
    tqdm._instances.clear()  # bars that a script left open must not move those of the next
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    errors = list(dict.fromkeys(re.findall(r"\berror: [^\r\n]*", texts[1])))  # also behind a progress bar
    return SimpleNamespace(status=status, out=texts[0], err=texts[1], errors=errors, globals=names)


def make_cache(data, cache_dir, *flags):
    return run_script("cache.py", "--data", data, "--cache_dir", cache_dir, *ON_DEVICE, *flags)


def train(data, tmp_path, *flags):
    """Two steps -> result of run_script, with the losses."""
    out_dir = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
    result = run_script("train.py", *(["--data", data] if data else []), "--out_dir", out_dir, "--max_steps", 2,
                        "--batch_size", 2, "--lora_rank", 2, *ON_DEVICE, *flags)
    log = out_dir / "log.jsonl"
    result.losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()[1:]] if log.exists() else []
    return result


def is_one_line(line, *named):
    """The form that a person can act on: error: <file or flag>: <what is wrong>; <what to do>."""
    return bool(re.fullmatch(r"error: \S.*: .+; .+", line)) and all(str(n) in line for n in named)


@contextlib.contextmanager
def refused(*named):
    with pytest.raises(cache.InputError) as e:
        yield
    assert is_one_line(str(e.value), *named), e.value


@contextlib.contextmanager
def within(seconds):
    """Fails if the block hangs, as reading a FIFO does."""
    def stop(*_):
        pytest.fail(f"hangs for {seconds} s")
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def draw_picture(size=(64, 64), seed=0, mode="RGB"):
    """Smooth, colourful, not symmetric, another one for every seed."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(size, Image.BICUBIC).convert(mode)


def save(image, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def add_item(data, name, sizes=((64, 64), (64, 64)), caption="add a red border", mask=None):
    """target/NAME.png of the first size, control/NAME.png, NAME_1.png, ... of the others, target/NAME.txt."""
    seed = zlib.crc32(name.encode(errors="surrogateescape"))
    for k, size in enumerate(sizes):
        file = f"target/{name}.png" if k == 0 else f"control/{name}.png" if k == 1 else f"control/{name}_{k - 1}.png"
        save(draw_picture(size, seed=(seed, k)), data / file)
    (data / f"target/{name}.txt").write_text(caption, encoding="utf-8")
    if mask:
        save(mask, data / f"mask/{name}.png")
    return data


@pytest.fixture
def data(tmp_path):
    """Two items: `good`, which stays so, and `cat`, which a test spoils."""
    return add_item(add_item(tmp_path / "data", "good"), "cat")


def copy_model(folder):
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("data", "val", "known", "*.py", "*.png"))
    return folder


def change_weight(part):
    """One weight of one tensor, by one part in a hundred."""
    file, = part.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    tensors[max(tensors)].view(-1)[0] += 0.01 * tensors[max(tensors)].abs().max()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def as_v1(model):
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {"_class_name": "QwenImageEditPipeline"}))
    return model


@pytest.fixture(scope="session")
def pipes(tmp_path_factory):
    """The tiny model under both names, with encoders. Plus is what 2509 and 2511 are."""
    folders = dict(Plus=TINY, v1=as_v1(copy_model(tmp_path_factory.mktemp("model") / "v1")))
    pipes = {family: cache.load_pipeline(folder) for family, folder in folders.items()}
    for pipe in pipes.values():
        cache.load_encoders(pipe, TINY, DTYPE_NAME, DEVICE, DEVICE)
    return pipes


@pytest.fixture
def plus(pipes):
    return pipes["Plus"]


def flags_for(data, **changes):
    """What the command line would give; pictures keep their sizes."""
    return SimpleNamespace(**dict(
        data=data if isinstance(data, list) else [data], repeats=None, reg_data=[], dtype=DTYPE_NAME,
        target_pixels=["native"], control_pixels="native", upscale=True,
        max_sequence_length=1024, vae_encoder_device=DEVICE, text_encoder_device=DEVICE,
        quantize_text_encoder="none") | changes)


def index_of(pipe, data, empty_prompt=False, **changes):
    """-> samples by name, problems."""
    index, problems = cache.build_index(pipe, TINY, flags_for(data, **changes), empty_prompt, quiet=True)
    return {s["name"]: s for s in index["samples"]}, problems


def encode(pipe, sample, prompt=None):
    text = sample["text"][0] if prompt is None else dict(prompt=prompt)
    return cache.encode_latents(pipe, sample, sample["scales"][0]) | cache.encode_text(pipe, sample, text)


def load(cache_dir, name=None):
    """One sample's tensors and its entry in the index."""
    sample = next(s for s in cache.load_index(cache_dir)["samples"] if name in (None, s["name"]))
    return cache.load_sample(cache_dir, sample, sample["scales"][0]), sample


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and torch.equal(got[name].cpu(), want[name].cpu()), name


def cached_files(cache_dir):
    return {p.relative_to(cache_dir): p.stat().st_mtime_ns for p in cache_dir.glob("*/*")}


# ---- encoding equals the stock pipeline ----

AREA = 128 * 128  # instead of the stock pipeline's 1024 * 1024, so that it takes milliseconds


def stock_processor(pipe):
    """The stock class without its constructor, which needs torchvision; its call needs it for videos only."""
    processor = object.__new__(Qwen2VLProcessor)
    processor.tokenizer, processor.image_processor = pipe.tokenizer, pipe.processor.image_processor
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.image_token_id, processor.video_token_id = pipe.tokenizer.convert_tokens_to_ids(
        [processor.image_token, processor.video_token])
    return processor


def given_by_stock(pipe, monkeypatch, **call):
    """What the stock pipeline hands to the transformer in its first step: keyword arguments of the call."""
    class Caught(Exception):
        pass

    def forward(**kwargs):
        raise Caught(kwargs)

    stock_dimensions = v1_code.calculate_dimensions
    monkeypatch.setattr(plus_code, "VAE_IMAGE_SIZE", AREA)
    monkeypatch.setattr(v1_code, "calculate_dimensions", lambda area, ratio: stock_dimensions(AREA, ratio))
    model = diffusers.QwenImageTransformer2DModel
    transformer = model.from_config(model.load_config(TINY / "transformer")).to(DEVICE, DTYPE)
    transformer.forward = forward
    parts = dict(pipe.components, transformer=transformer, processor=stock_processor(pipe))
    stock = getattr(diffusers, type(pipe).__name__)(**parts)
    stock.set_progress_bar_config(disable=True)
    with pytest.raises(Caught) as caught:
        stock(**call, num_inference_steps=2, true_cfg_scale=1.0, output_type="latent")
    return SimpleNamespace(**caught.value.args[0])


@pytest.mark.parametrize("family, sizes", [
    ("Plus", [(96, 64), (100, 75)]),  # enlarged
    ("Plus", [(64, 96), (257, 301), (640, 64), (48, 80)]),  # shrunk, long, one side rounded up; three controls
    ("v1", [(96, 64), (100, 75)]),
    ("v1", [(64, 64), (64, 301)]),
], ids=str)
@pytest.mark.parametrize("prompt", ["turn the {red} circle blue", "", "\u96ea \U0001f431\n 100% <b>"], ids=ascii)
def test_samples_are_encoded_as_the_stock_pipeline_encodes_them(tmp_path, pipes, monkeypatch, family, sizes, prompt):
    pipe = pipes[family]
    data = add_item(tmp_path, "cat", sizes, prompt or "the prompt that is dropped")
    sample = index_of(pipe, data, empty_prompt=True, control_pixels=AREA)[0]["cat"]
    got = encode(pipe, sample, prompt)
    name = "prompt" if prompt else "empty_prompt"

    images = [Image.open(c) for c in sample["control"]]
    stock = given_by_stock(pipe, monkeypatch, image=images if family == "Plus" else images[0], prompt=prompt,
                           width=sizes[0][0], height=sizes[0][1])
    target_len = len(got["pixel_latent"])
    assert torch.equal(got["control_latent"], stock.hidden_states[0, target_len:])
    assert torch.equal(got[name + "_embed"], stock.encoder_hidden_states[0])
    assert got[name + "_embeds_mask"].all() and stock.encoder_hidden_states_mask is None
    assert list(map(tuple, got["img_shapes"].tolist())) == stock.img_shapes[0]
    length = cache.prompt_length(pipe, prompt, sample["prompt_sizes"])  # known without encoding
    assert length == len(got[name + "_embed"]) and sample["empty_text"]["tokens"] <= length


def test_tokens_are_those_of_the_stock_processor(plus):
    images = [draw_picture((64, 64)), draw_picture((320, 32))]
    texts = ["a <|image_pad|> b", "<|image_pad|>, a longer text"]
    want = stock_processor(plus)(text=texts, images=images, padding=True, return_tensors="pt")
    assert_same(dict(plus.processor(text=texts, images=images)), {k: v for k, v in want.items() if "type" not in k})


def test_latents_are_the_normalised_mode_of_the_posterior(plus):
    image, vae = draw_picture((96, 64)), plus.vae
    got = cache.encode_image(plus, image, (96, 64))
    assert torch.equal(got, cache.encode_image(plus, image, (96, 64)))  # nothing is drawn
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    mode = vae.encode(x.to(DEVICE, DTYPE)).latent_dist.mode()[0, :, 0].cpu().float()
    mean, std = [torch.tensor(v)[:, None, None] for v in (vae.config.latents_mean, vae.config.latents_std)]
    z = (mode - mean) / std
    patches = z.reshape(16, 4, 2, 6, 2).permute(1, 3, 0, 2, 4).reshape(24, 64)  # row by row; in a token channel, y, x
    torch.testing.assert_close(got.cpu().float(), patches, rtol=0, atol=1e-5 if DTYPE == torch.float32 else 0.05)
    unpacked = plus._unpack_latents(got[None], 64, 96, 8)
    assert torch.equal(plus._pack_latents(unpacked, 1, 16, 8, 12)[0], got)


@pytest.mark.parametrize("size, area, upscale, want", [
    ((1000, 1000), 1024 * 1024, True, (1024, 1024)),
    ((1920, 1080), 1024 * 1024, True, (1376, 768)),  # sqrt(area * 16 / 9) = 1365 is nearest to 43 * 32
    ((64, 48), 1024 * 1024, True, (1184, 896)),
    ((64, 48), 1024 * 1024, False, (64, 64)),  # its own size, sides rounded to 32, never enlarged to the area
    ((4000, 3000), 1024 * 1024, False, (1184, 896)),
    ((1920, 1080), "native", True, (1920, 1088)),
    ((33, 330), "native", False, (32, 320)),
    ((640, 64), 64 * 64, True, (192, 32)),
    ((640, 64), 32 * 32, True, (96, 32)),  # the stock formula gives a side of 0 here, and crashes
])
def test_sizes_are_the_stock_geometry(size, area, upscale, want):
    assert cache.fit_size(size, area, upscale) == want


@pytest.mark.parametrize("version", ["v1", "Plus"])
def test_the_text_encoder_knows_rows_and_columns_of_a_picture(pipes, monkeypatch, version):
    """Qwen2.5-VL positions a picture's tokens by time, row and column. transformers from 5.3 on forgets them unless it
    gets mm_token_type_ids, which diffusers 0.42.1 does not pass (diffusers issue 14194): hence the pin."""
    seen, encoder = [], pipes[version].text_encoder
    language_model = encoder.model.language_model
    real = language_model.forward
    monkeypatch.setattr(language_model, "forward", lambda *a, **kw: seen.append(kw["position_ids"]) or real(*a, **kw))
    cache.encode_prompt(pipes[version], "go", [draw_picture((128, 64))], [(128, 64)])
    time, row, column = seen[0][-3:, 0]  # transformers may put text positions in front
    assert not torch.equal(row, column) and not torch.equal(time, column)


def test_the_text_encoder_sees_384_times_384_or_in_v1_what_the_vae_sees(pipes):
    assert cache.prompt_size(pipes["Plus"], (1920, 1080), AREA, False) == (512, 288)
    assert cache.prompt_size(pipes["v1"], (1920, 1080), AREA, True) == cache.fit_size((1920, 1080), AREA) == (160, 96)


@pytest.mark.parametrize("empty_prompt", [False, True])
def test_the_same_prompt_for_another_picture_is_another_text(data, plus, empty_prompt):
    add_item(data, "copy")
    shutil.copy(data / "control/cat.png", data / "control/copy.png")
    samples, _ = index_of(plus, data, empty_prompt=True)
    text, embed, prompt = ("empty_text", "empty_prompt_embed", "") if empty_prompt else ("text", "prompt_embed", None)
    keys = {name: (s[text] if empty_prompt else s[text][0])["key"] for name, s in samples.items()}
    assert keys["cat"] != keys["good"] and keys["cat"] == keys["copy"]
    embeds = {name: encode(plus, s, prompt)[embed] for name, s in samples.items()}
    assert not torch.equal(embeds["cat"], embeds["good"]) and torch.equal(embeds["cat"], embeds["copy"])


@pytest.mark.parametrize("mode", ["L", "1", "RGB"])
@pytest.mark.parametrize("mask_size", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_the_edit_mask_is_the_edited_share_of_each_token(tmp_path, plus, mode, mask_size):
    mask = np.zeros((64, 64), np.uint8)
    mask[:, :24] = 255  # one and a half of the four columns of tokens
    mask[63, 63] = 255
    mask = Image.fromarray(mask).resize(mask_size, Image.NEAREST).convert(mode)
    sample = index_of(plus, add_item(tmp_path, "cat", mask=mask))[0]["cat"]
    want = torch.tensor([[1, 0.5, 0, 0]]).repeat(4, 1)
    want[3, 3] = 1 / 256  # a single pixel counts, but not for a whole token
    torch.testing.assert_close(encode(plus, sample)["edit_mask"].reshape(4, 4), want, rtol=0, atol=0.5 / 255 + 1e-6)


def test_a_mask_of_another_shape_is_named(data, plus):
    """It would be stretched over the target, and weigh what nobody meant."""
    save(draw_picture((256, 64)), data / "mask/cat.png")
    samples, problems = index_of(plus, data)
    assert list(samples) == ["good"] and len(problems) == 1
    assert is_one_line(problems[0], "mask/cat.png", "256x64", "64x64")


def test_every_target_area_has_its_own_latents_and_all_share_the_text(data, tmp_path, plus):
    areas = ["64*64", "128x64", "16384", "native"]  # native is 64 * 64 here, so that its file is the first one's
    assert make_cache(data, tmp_path / "c", "--target_pixels", *areas, "--control_pixels", "32*32").status == 0
    sample = cache.load_index(tmp_path / "c")["samples"][0]
    loaded = [cache.load_sample(tmp_path / "c", sample, scale) for scale in sample["scales"]]
    assert [t["img_shapes"].tolist()[0] for t in loaded] == [[1, 4, 4], [1, 6, 6], [1, 8, 8], [1, 4, 4]]
    assert all(t["img_shapes"].tolist()[1] == [1, 2, 2] for t in loaded)
    assert [len(t["pixel_latent"]) for t in loaded] == [16, 36, 64, 16]
    assert len({s["key"] for s in sample["scales"]}) == 3
    assert len(list((tmp_path / "c/latents").iterdir())) == 6 and len(list((tmp_path / "c/text").iterdir())) == 2


def test_a_cached_sample_holds_what_the_contract_names(cached_dataset):
    """cat: 64x64 with one control and a mask; dog: 64x32 with three controls."""
    for name, target_len, control_len, mask in (("cat", 16, 16, {"edit_mask": (16,)}), ("dog", 8, 16 + 16 + 8, {})):
        tensors, sample = load(cached_dataset / "cache", name)
        text_len, images = sample["text"][0]["tokens"], 1 + len(sample["control"])
        assert {k: tuple(v.shape) for k, v in tensors.items()} == mask | dict(
            pixel_latent=(target_len, 64), control_latent=(control_len, 64), img_shapes=(images, 3),
            prompt_embed=(text_len, 64), prompt_embeds_mask=(text_len,))
        assert all(tensors[k].dtype == DTYPE for k in ("pixel_latent", "control_latent", "prompt_embed"))
        assert tensors["prompt_embeds_mask"].dtype == torch.bool
    for path in (cached_dataset / "cache").glob("*/*"):
        with safetensors.safe_open(path, "pt") as f:
            text, = f.metadata().values()  # one string, because several come out in any order
        meta = json.loads(text)
        assert {"digest", "sources", "sizes"} <= meta.keys() and meta["version"] == "2.0" and meta["key"] == path.stem


def test_counts_and_the_largest_change_of_aspect_are_reported(data, tmp_path):
    add_item(data, "wide", [(70, 64), (64, 64)])
    result = make_cache(data, tmp_path / "c")
    assert "3 samples" in result.out and "8.6%" in result.out and "wide" in result.out


# ---- what a cached file depends on ----

def overwrite(path, image):
    """Other content under the same name, with the same time and, being BMP, the same length."""
    times = path.stat()
    image.save(path, format="BMP")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def redraw(file):
    return lambda data, model, monkeypatch: overwrite(data / file, draw_picture((64, 64), seed=99))


def write_caption(content):
    return lambda data, model=None, monkeypatch=None: (data / "target/cat.txt").write_bytes(content)


def with_flags(*flags):
    return lambda data, model, monkeypatch: flags


def swap_files(a, b):
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)


def change_config(part, file):
    def change(data, model, monkeypatch):
        path = model / part / file
        path.write_text(path.read_text().rstrip() + "\n\n")
    return change


OTHER_DTYPE = "bfloat16" if DTYPE == torch.float32 else "float32"
CHANGES = {  # of two items, cat with a mask and dog with three controls: how many latents and texts are encoded again
    "nothing": (lambda d, m, mp: None, 0, 0),
    "time of a file": (lambda d, m, mp: os.utime(d / "target/cat.png"), 0, 0),
    "folder's name": (lambda d, m, mp: d.rename(d.with_name("renamed")), 0, 0),
    "item's name": (lambda d, m, mp: [p.rename(p.with_stem("tom")) for p in d.glob("*/cat.*")], 0, 0),
    "line end of a caption": (write_caption(b"\xef\xbb\xbfadd a red border\r\n"), 0, 0),
    "transformer": (lambda d, m, mp: change_weight(m / "transformer"), 0, 0),
    "another item": (lambda d, m, mp: add_item(d, "new"), 1, 1),
    "target": (redraw("target/cat.png"), 1, 0),
    "mask": (redraw("mask/cat.png"), 1, 0),
    "no mask": (lambda d, m, mp: (d / "mask/cat.png").unlink(), 1, 0),
    "control": (redraw("control/cat.png"), 1, 1),
    "second control": (redraw("control/dog_1.png"), 1, 1),
    "one control more": (lambda d, m, mp: save(draw_picture(), d / "control/cat_1.png"), 1, 1),
    "order of controls": (lambda d, m, mp: swap_files(d / "control/dog.png", d / "control/dog_1.png"), 1, 1),
    "caption": (write_caption(b"add a blue border"), 0, 1),
    "target size": (with_flags("--target_pixels", "32*32"), 2, 0),
    "control size": (with_flags("--control_pixels", "32*32"), 2, 0),
    "dtype": (with_flags("--dtype", OTHER_DTYPE), 2, 2),
    "empty prompt": (with_flags("--empty_prompt"), 0, 2),
    "VAE": (lambda d, m, mp: change_weight(m / "vae"), 2, 0),
    "text encoder": (lambda d, m, mp: change_weight(m / "text_encoder"), 0, 2),
    "tokenizer": (change_config("tokenizer", "tokenizer_config.json"), 0, 2),
    "processor": (change_config("processor", "preprocessor_config.json"), 0, 2),
    "model family": (lambda d, m, mp: as_v1(m) and [(d / f"control/dog_{k}.png").unlink() for k in (1, 2)], 2, 2),
    "preprocessing": (lambda d, m, mp: mp.setattr(cache, "PREPROCESSING", "another"), 2, 2),
    "cache version": (lambda d, m, mp: mp.setattr(cache, "VERSION", "2.1"), 2, 2),
}


@pytest.fixture(scope="session")
def cached_dataset(tmp_path_factory):
    """A folder with model, data and cache, to be copied."""
    folder = tmp_path_factory.mktemp("cached")
    copy_model(folder / "model")
    add_item(folder / "data", "cat", mask=draw_picture())
    add_item(folder / "data", "dog", [(64, 32), (64, 64), (64, 64), (32, 64)])
    for path in folder.glob("data/*/*.png"):
        overwrite(path, Image.open(path))
    assert make_cache(folder / "data", folder / "cache", "--model", folder / "model", *NATIVE).status == 0
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_encodes_again_what_it_touches_and_nothing_else(tmp_path, cached_dataset, monkeypatch, change):
    root = shutil.copytree(cached_dataset, tmp_path / "root")
    apply, latents, texts = CHANGES[change]
    flags = apply(root / "data", root / "model", monkeypatch)
    if latents + texts == 0:  # not even the models are loaded
        monkeypatch.setattr(cache, "load_encoders", lambda *_: pytest.fail("encoders loaded"))
    before = cached_files(root / "cache")
    data, = [p for p in root.iterdir() if (p / "target").is_dir()]
    result = make_cache(data, root / "cache", "--model", root / "model", *NATIVE,
                        *(flags if isinstance(flags, tuple) else ()))
    assert result.status == 0, result.err
    new = [path.parent.name for path, time in cached_files(root / "cache").items() if before.get(path) != time]
    assert (new.count("latents"), new.count("text"), len(new)) == (latents, texts, latents + texts)


def test_a_large_weight_file_is_known_by_its_length_its_begin_its_middle_and_its_end(tmp_path):
    path = tmp_path / "part/model.safetensors"
    path.parent.mkdir()

    def print_of(size, place=None):
        with open(path, "wb") as f:
            f.truncate(size)
            if place is not None:
                f.seek(place)
                f.write(b"x")
        return cache.fingerprint(path.parent)

    size = 2**25
    prints = [print_of(size)] + [print_of(size + 1)] + [print_of(size, place) for place in (0, size // 2, size - 1)]
    assert len(set(prints)) == len(prints)
    assert print_of(size) == prints[0]
    path.rename(path.with_name("other.safetensors"))
    assert cache.fingerprint(path.parent) != prints[0]


# ---- damaged files ----

def flip(bit):
    return lambda data: data[:bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1:]


def damage_tensors(path):
    """One bit near the end of the file, where the tensors are."""
    path.write_bytes(flip(8 * (path.stat().st_size - 100))(path.read_bytes()))


def test_no_damage_to_a_cache_file_goes_unnoticed(tmp_path):
    path = tmp_path / "f.safetensors"
    meta = dict(version="2.0", key="k")
    cache.write_tensors(path, dict(a=torch.zeros(4, 4), b=torch.ones(7, dtype=torch.bool)), meta)
    sound = path.read_bytes()
    assert cache.read_tensors(path, key="k")[1] == meta
    damages = {f"bit {n}": flip(n) for n in range(8 * len(sound))}
    damages |= {f"cut to {n}": lambda data, n=n: data[:n] for n in range(len(sound))}
    damages |= {f"junk of {n}": lambda data, n=n: data + bytes(n) for n in (1, 8, 512)}
    damages |= {f"hole at {n}": lambda data, n=n: data[:n] + bytes(16) + data[n + 16:]
                for n in range(0, len(sound) - 16, 8) if any(sound[n:n + 16])}
    for name, damage in damages.items():
        path.write_bytes(damage(sound))
        try:
            cache.read_tensors(path, key="k")
        except cache.InputError as e:
            assert is_one_line(str(e), path), (name, e)
        else:
            pytest.fail(f"{name} went unnoticed")


@pytest.mark.parametrize("meta", ["[]", "5", "null", '{"digest": 5}', '{"digest": ""}', "{"])
def test_a_file_with_strange_metadata_is_refused(tmp_path, meta):
    path = tmp_path / "f.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(2)}, path, metadata={"json": meta})
    with refused(path):
        cache.read_tensors(path)


def rewrite(path, version):
    tensors, meta = cache.read_tensors(path)
    cache.write_tensors(path, tensors, meta | {"version": version})


SPOILED = {
    "cut": lambda a, b: a.write_bytes(a.read_bytes()[:-1]),
    "bit": lambda a, b: damage_tensors(a),
    "empty": lambda a, b: a.write_bytes(b""),
    "swapped": swap_files,
    "another's copy": lambda a, b: shutil.copy(b, a),
    "latents for a text": lambda a, b: shutil.copy(next(a.parent.parent.glob("latents/*")), a),
    "gone": lambda a, b: a.unlink(),
    "version 3.0": lambda a, b: rewrite(a, "3.0"),
    "a folder": lambda a, b: a.unlink() or a.mkdir(),
}


@pytest.mark.parametrize("how", SPOILED)
def test_training_stops_at_a_spoiled_file_and_names_it(tmp_path, cached_dataset, how):
    cache_dir = shutil.copytree(cached_dataset / "cache", tmp_path / "cache")
    a, b = sorted(cache_dir.glob("text/*"))
    SPOILED[how](a, b)
    result = train(None, tmp_path, "--cache_dir", cache_dir, "--model", cached_dataset / "model")
    assert result.status == 1 and not result.losses[1:]
    assert is_one_line(result.errors[-1], "text/") and (a.name in result.errors[-1] or b.name in result.errors[-1])


def test_an_error_begins_its_own_line(tmp_path, cached_dataset):
    """Also where a progress bar stands."""
    root = shutil.copytree(cached_dataset, tmp_path / "root")
    for path in root.glob("cache/text/*"):
        path.write_bytes(b"")
    flags = ["--model", root / "model", *NATIVE]
    (root / "data/target/cat.txt").unlink()
    for result in (train(None, tmp_path, "--cache_dir", root / "cache", "--model", root / "model"),
                   make_cache(root / "data", root / "cache", *flags, "--verify")):
        assert result.status == 1 and result.errors
        assert all(re.search(r"(^|[\r\n])" + re.escape(line), result.err) for line in result.errors), result.err


def test_verify_names_every_damaged_file_and_encodes_only_these_again(tmp_path, cached_dataset):
    root = shutil.copytree(cached_dataset, tmp_path / "root")
    flags = ["--model", root / "model", *NATIVE]
    before = cached_files(root / "cache")
    assert make_cache(root / "data", root / "cache", *flags, "--verify").status == 0
    damaged = [min(root.glob("cache/latents/*")), max(root.glob("cache/text/*"))]
    for path in damaged:
        damage_tensors(path)
    result = make_cache(root / "data", root / "cache", *flags, "--verify")
    assert result.status == 0
    assert set(re.findall(r"[^/\n]+(?=: damaged)", result.err)) == {p.name for p in damaged}
    for path in damaged:
        assert cache.read_tensors(path, key=path.stem)
    after = cached_files(root / "cache")
    assert {p for p in after if after[p] != before[p]} == {p.relative_to(root / "cache") for p in damaged}


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch, fails):
    path = tmp_path / "sub/f.bin"
    cache.write_file(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, fails, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.write_file(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in path.parent.iterdir()] == ["f.bin"]
    # what a killed process of the same number has left; in a container all runs have the same numbers
    for pid in range(os.getpid() - 1, os.getpid() + 2):
        (path.parent / f".tmp-{pid}-f.bin").write_bytes(b"left")
    cache.write_file(path, b"new")
    assert path.read_bytes() == b"new"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask  # a shared cache stays readable to the group


def test_the_same_sample_is_the_same_bytes(data, tmp_path):
    for name in "ab":
        make_cache(data, tmp_path / name)
    files = list(cached_files(tmp_path / "a"))
    assert files and files == list(cached_files(tmp_path / "b"))
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"version": "2.0", "samples": []}',
                                     b'{"version": "3.0", "models": null, "samples": [{}]}'])
def test_a_damaged_index_is_named(tmp_path, cached_dataset, content):
    cache_dir = shutil.copytree(cached_dataset / "cache", tmp_path / "cache")
    (cache_dir / "index.json").write_bytes(content)
    result = train(None, tmp_path, "--cache_dir", cache_dir, "--model", cached_dataset / "model")
    assert result.status == 1 and is_one_line(result.errors[-1], "index.json")


@pytest.mark.parametrize("what", ["vae", "text_encoder", "tokenizer", "processor", "model family"])
def test_training_refuses_a_cache_of_another_model(tmp_path, cached_dataset, what):
    model = copy_model(tmp_path / "model")
    if what == "model family":  # Edit and Edit-2509 share VAE and text encoder, but show them other pictures
        as_v1(model)
    elif what in ("vae", "text_encoder"):
        change_weight(model / what)
    else:
        path = model / what / "tokenizer_config.json"
        path.write_text(path.read_text() + "\n")
    result = train(None, tmp_path, "--cache_dir", cached_dataset / "cache", "--model", model)
    assert result.status == 1 and is_one_line(result.errors[-1], cached_dataset / "cache") and not result.losses


# ---- caches of version 1.0, and pickles ----

def as_version_1(tensors, form):
    """A dictionary as the older code wrote it: sizes in pixels instead of img_shapes, prompts padded."""
    (_, h, w), *controls = tensors["img_shapes"].tolist()
    old = {k: v for k, v in tensors.items() if k != "img_shapes"}
    old |= dict(height=torch.tensor([16 * h]), width=torch.tensor([16 * w]))
    for k, (_, h, w) in enumerate(controls):
        suffix = "_control" + (f"_{k}" if k else "")
        old |= {"height" + suffix: torch.tensor(16 * h), "width" + suffix: torch.tensor(16 * w)}
    if form != "unpadded":
        for name in ("prompt_embed", "empty_prompt_embed"):
            embed = old[name]
            old[name] = torch.cat([embed, embed.new_full((7, embed.shape[1]), torch.nan)])
            old[name + "s_mask"] = (torch.arange(len(embed) + 7) < len(embed)).to(torch.int64)
    if form == "unpadded":  # as some wrote it: no masks where nothing is padded
        old = {k: v for k, v in old.items() if not k.endswith("s_mask")}
        old["n_controls"] = torch.tensor(len(controls) - 1)
    if form == "batch of 1":
        old = {k: v[None] if v.ndim == 2 or k.endswith("mask") else v for k, v in old.items()}
    return {k: v.contiguous() for k, v in old.items()}


@pytest.fixture(scope="session")
def new_and_old(tmp_path_factory, cached_dataset):
    """The same samples as a cache of today and as version 1.0 in three forms."""
    root = tmp_path_factory.mktemp("old")
    make_cache(cached_dataset / "data", root / "new", "--empty_prompt", "--model", cached_dataset / "model", *NATIVE)
    for form in ("padded", "unpadded", "batch of 1"):
        (root / form).mkdir()
        for name in ("cat", "dog"):
            old = as_version_1(load(root / "new", name)[0], form)
            safetensors.torch.save_file(old, root / form / f"{name}.safetensors")
    return root


@pytest.mark.parametrize("form", ["padded", "unpadded", "batch of 1"])
def test_version_1_dictionaries_are_read_and_trained_as_today_s_cache(tmp_path, cached_dataset, new_and_old, form):
    for name in ("cat", "dog"):
        want = load(new_and_old / "new", name)[0]
        assert_same({k: v for k, v in load(new_and_old / form, name)[0].items() if k in want}, want)
    new, old = [train(None, tmp_path, "--cache_dir", new_and_old / name, "--model", cached_dataset / "model",
                      "--caption_dropout_rate", 0.5, "--max_steps", 1) for name in ("new", form)]
    assert len(new.losses) == 1 and old.losses == new.losses, old.err


@pytest.mark.parametrize("spoil", [
    lambda t: t.pop("height"), lambda t: t.pop("width_control"), lambda t: t.pop("pixel_latent"),
    lambda t: t.pop("prompt_embed"), lambda t: t.update(height=torch.tensor([32])),
    lambda t: t.update(prompt_embeds_mask=torch.ones(3)), lambda t: t.update(img_shapes=torch.ones(5)),
    lambda t: t.update(pixel_latent=torch.zeros(16)), lambda t: t.update(height=torch.tensor([64, 64, 64])[None])])
def test_a_broken_version_1_dictionary_is_named(tmp_path, new_and_old, spoil):
    tensors = safetensors.torch.load_file(new_and_old / "padded/cat.safetensors")
    spoil(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "cat.safetensors")
    with refused("cat.safetensors"):
        cache.load_index(tmp_path)


def test_an_unknown_version_is_refused(tmp_path, new_and_old):
    tensors = safetensors.torch.load_file(new_and_old / "padded/cat.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "cat.safetensors", metadata={"version": "1.7"})
    with refused("cat.safetensors", "1.7"):
        cache.load_index(tmp_path)


class Bomb:
    """Unpickling it runs code: here, it makes a file."""
    marker = None

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "a.ckpt", "a.pkl", "a.safetensors"])
@pytest.mark.parametrize("write", [lambda bomb, f: torch.save(bomb, f), pickle.dump], ids=["torch", "pickle"])
def test_no_pickle_is_ever_opened(tmp_path, name, write):
    path, bomb = tmp_path / "files" / name, Bomb()
    bomb.marker = tmp_path / "marker"
    path.parent.mkdir()
    with open(path, "wb") as f:
        write(bomb, f)
    for read in (cache.read_tensors, predict.read_lora, lambda path: cache.load_index(path.parent)):
        with refused(name):
            read(path)
    assert not bomb.marker.exists()
    pickle.loads(pickle.dumps(bomb))
    assert bomb.marker.exists()  # so it would have gone off


# ---- cached equals live ----

def test_cached_samples_equal_live_encoding_bit_for_bit(tmp_path, cached_dataset, plus):
    for sample in index_of(plus, cached_dataset / "data")[0].values():
        assert_same(load(cached_dataset / "cache", sample["name"])[0], encode(plus, sample))


def test_cached_and_live_training_log_the_same_losses(tmp_path, cached_dataset):
    flags = ["--cache_dir", tmp_path / "cache", "--model", cached_dataset / "model", *NATIVE, "--max_steps", 3,
             "--target_pixels", "native", "32*64", "--caption_dropout_rate", 0.5]
    cached = train(cached_dataset / "data", tmp_path, *flags)
    live = train(cached_dataset / "data", tmp_path, *flags, "--no-use_cache")
    assert len(cached.losses) == 3 and cached.losses == live.losses


# ---- what is wrong with a dataset ----

def instead(file, make):
    def spoil(d):
        (d / file).unlink(missing_ok=True)
        (d / file).parent.mkdir(exist_ok=True)
        make(d / file)
    return spoil


def resized(file, *size):
    return instead(file, lambda path: draw_picture(size).save(path))


def animation(path, **options):
    draw_picture().save(path, save_all=True, append_images=[draw_picture(seed=s) for s in (1, 2)], **options)


def claim_size(width, height):
    """A PNG whose header, checksum included, says that it is this large."""
    def make(path):
        header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        sound = save(draw_picture(), path).read_bytes()
        path.write_bytes(sound[:12] + header + struct.pack(">I", zlib.crc32(header)) + sound[33:])
    return make


BAD_ITEMS = {  # what is done to cat, and what the one line about it must name
    "no control": (lambda d: (d / "control/cat.png").unlink(), "target/cat.png", "control/cat.png"),
    "no caption": (lambda d: (d / "target/cat.txt").unlink(), "target/cat.txt"),
    "empty caption": (write_caption(b""), "target/cat.txt"),
    "blank caption": (write_caption(b"\xef\xbb\xbf \r\n\t"), "target/cat.txt"),
    "Latin-1": (write_caption("caf\u00e9".encode("latin-1")), "target/cat.txt"),
    "UTF-16": (write_caption("caf\u00e9".encode("utf-16")), "target/cat.txt"),
    "UTF-16 without its mark": (write_caption("red".encode("utf-16-le")), "target/cat.txt"),
    "long caption": (write_caption(b"red " * 2000), "cat", "1024"),
    "caption with a token of the template": (write_caption(b"a <|image_pad|> b"), "cat"),
    "two targets": (lambda d: draw_picture().save(d / "target/cat.jpg"), "cat.jpg", "cat.png"),
    "two controls": (lambda d: draw_picture().save(d / "control/cat.WEBP"), "cat.WEBP", "cat.png"),
    "second control, or another item's first": (lambda d: add_item(d, "cat_1"), "cat_1"),
    "second control, but no first": (lambda d: (d / "control/cat.png").rename(d / "control/cat_1.png"), "cat.png"),
    "third control, but no second": (lambda d: draw_picture().save(d / "control/cat_2.png"), "cat"),
    "one pixel": (resized("control/cat.png", 1, 1), "control/cat.png", "1x1"),
    "thin": (resized("target/cat.png", 10000, 1), "target/cat.png", "10000x1"),
    "31 pixels": (resized("control/cat.png", 64, 31), "control/cat.png", "64x31"),
    "aspect above 10": (resized("target/cat.png", 32, 321), "target/cat.png", "32x321"),
    "empty file": (instead("control/cat.png", Path.touch), "control/cat.png"),
    "web page": (instead("control/cat.png", lambda p: p.write_text("<html>404</html>")), "control/cat.png"),
    "TIFF": (instead("control/cat.png", lambda p: draw_picture().save(p, format="TIFF")), "control/cat.png"),
    "animated PNG": (instead("target/cat.png", animation), "target/cat.png"),
    "animated WebP": (instead("target/cat.png", lambda p: animation(p, format="WEBP")), "target/cat.png"),
    "GIF": (instead("target/cat.png", lambda p: animation(p, format="GIF")), "target/cat.png"),
    "3600 megapixels": (instead("control/cat.png", claim_size(60000, 60000)), "control/cat.png", "pixels"),
    "121 megapixels": (instead("mask/cat.png", claim_size(11000, 11000)), "mask/cat.png", "megapixels"),
    "FIFO as target": (instead("target/cat.png", os.mkfifo), "target/cat.png"),
    "FIFO as control": (instead("control/cat.png", os.mkfifo), "control/cat.png"),
    "FIFO as mask": (instead("mask/cat.png", os.mkfifo), "mask/cat.png"),
    "FIFO as caption": (instead("target/cat.txt", os.mkfifo), "target/cat.txt"),
    "folder as control": (instead("control/cat.png", Path.mkdir), "control/cat.png"),
    "folder as caption": (instead("target/cat.txt", Path.mkdir), "target/cat.txt"),
    "dangling link": (instead("control/cat.png", lambda p: p.symlink_to("nowhere.png")), "control/cat.png"),
    "link to itself": (instead("target/cat.png", lambda p: p.symlink_to(p)), "target/cat.png"),
    "broken mask": (instead("mask/cat.png", lambda p: p.write_bytes(b"x")), "mask/cat.png"),
}


@pytest.mark.parametrize("kind", BAD_ITEMS)
def test_a_bad_item_is_named_and_left_out_and_the_others_stay(data, plus, kind):
    spoil, *named = BAD_ITEMS[kind]
    with within(2):
        spoil(data)
        samples, problems = index_of(plus, data)
    assert len(problems) == 1 and is_one_line(problems[0], *named), problems
    assert "good" in samples and "cat" not in samples
    assert all(s["target"] != s["control"][0] for s in samples.values())


STRAYS = {
    "control": lambda d: draw_picture().save(d / "control/dog.png"),
    "mask": lambda d: save(draw_picture(), d / "mask/dog.png"),
    "caption": lambda d: (d / "target/dog.txt").write_text("add a border"),
    "numbered mask": lambda d: save(draw_picture(), d / "mask/dog_1.png"),
    "picture in another format": lambda d: animation(d / "target/dog.gif"),
    "link to a folder": lambda d: (d / "target/dog").symlink_to(add_item(d.with_name("more"), "x") / "target"),
    "manifest": lambda d: (d / "metadata.jsonl").write_text(ROW % '"mask": "dog.png"'),
}


@pytest.mark.parametrize("kind", STRAYS)
def test_no_file_is_passed_over_in_silence(data, plus, kind):
    STRAYS[kind](data)
    samples, problems = index_of(plus, data)
    assert len(samples) == 2
    assert problems and all(is_one_line(p, "metadata.jsonl" if kind == "manifest" else "dog") for p in problems)


def test_version_1_of_the_model_takes_one_control(data, pipes):
    draw_picture().save(data / "control/cat_1.png")
    samples, problems = index_of(pipes["v1"], data)
    assert list(samples) == ["good"] and is_one_line(problems[0], "control/cat_1.png") and len(problems) == 1


EMPTY = {
    "no such folder": lambda d: None,
    "empty folder": lambda d: d.mkdir(),
    "empty folders": lambda d: [(d / name).mkdir(parents=True) for name in ("target", "control")],
    "empty manifest": lambda d: d.mkdir() or (d / "metadata.jsonl").write_text("\n \n"),
    "only a header": lambda d: d.mkdir() or (d / "metadata.csv").write_text("target,control,prompt\n"),
    "two manifests": lambda d: d.mkdir() or [(d / f"metadata.{s}").write_text("x") for s in ("csv", "jsonl")],
    "a text file": lambda d: d.write_text("hello"),
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("script", ["cache.py", "train.py"])
def test_no_dataset_is_one_line_and_exit_1(tmp_path, monkeypatch, kind, script):
    monkeypatch.setattr(cache, "load_part", lambda *_: pytest.fail("a model was loaded"))
    EMPTY[kind](tmp_path / "photos")
    result = run_script(script, "--data", tmp_path / "photos")
    assert result.status == 1 and len(result.errors) == 1 and is_one_line(result.errors[0], "photos")


# ---- names, captions, manifests that are right ----

NAMES = ["\u65e5\u672c \u8a9e", "\U0001f431", "[1] (2)*", "it's", 'quo"te', "a.b.c", "50%", "-dash", "tab\tand\nline",
         "{x}", "#1;2", "Upper", "a/x", "b/x", "a/b/x", "cafe\u0301", "\udcff"]


def test_names_of_every_kind_work(tmp_path):
    for name in NAMES:
        add_item(tmp_path / "data", name, [(70, 64), (64, 64)])
    for old, new in (("target/cafe\u0301.txt", "target/caf\u00e9.txt"),  # macOS takes names apart, Linux does not
                     ("control/cafe\u0301.png", "control/caf\u00e9.png"), ("target/Upper.png", "target/Upper.PNG")):
        (tmp_path / "data" / old).rename(tmp_path / "data" / new)
    result = make_cache(tmp_path / "data", tmp_path / "c", "--control_pixels", "32*32")
    assert result.status == 0, result.err
    samples = cache.load_index(tmp_path / "c")["samples"]
    assert {s["name"] for s in samples} == {unicodedata.normalize("NFC", n) for n in NAMES}
    assert len({s["scales"][0]["key"] for s in samples}) == len(NAMES)
    assert all(cache.load_sample(tmp_path / "c", s, s["scales"][0]) for s in samples)


@pytest.mark.parametrize("name", ["\udcff", "tab\tand\nline"], ids=ascii)
def test_no_script_stumbles_over_a_strange_name(tmp_path, name):
    """Each says it: cache.py of the picture with the largest change of aspect, train.py of one above --max_tokens,
    predict.py of every job; and all in errors."""
    data = add_item(tmp_path / "data", name, [(70, 64), (64, 64)])
    assert make_cache(data, tmp_path / "c").status == 0
    for live in ([], ["--no-use_cache"]):
        flags = ["--cache_dir", tmp_path / "c", "--max_tokens", 1, "--max_steps", 1]
        assert train(data, tmp_path, *flags, *live).status == 0
    assert run_script("predict.py", "--jobs", data, "--out_dir", tmp_path / "o", "--num_inference_steps", 2, "--lora",
                      "", *ON_DEVICE).status == 0
    assert len(list((tmp_path / "o").iterdir())) == 1
    (data / f"control/{name}.png").write_bytes(b"")
    for result in (make_cache(data, tmp_path / "c"), train(data, tmp_path, "--no-use_cache"),
                   run_script("predict.py", "--jobs", data, *ON_DEVICE)):
        assert result.status == 1 and "empty file" in result.err


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfadd a red border", b"\n add a red border \r\n\t"])
def test_a_caption_is_read_without_its_mark_and_its_line_ends(data, plus, content):
    write_caption(content)(data)
    assert index_of(plus, data)[0]["cat"]["text"][0]["prompt"] == "add a red border"


def test_controls_differ_in_number_and_size_and_are_counted_not_spelled(tmp_path, plus):
    add_item(tmp_path, "one", [(64, 64), (96, 32)])
    add_item(tmp_path, "many", [(32, 32)] + [(32, 32 * (1 + k)) for k in range(1, 8)] * 2)  # _10 follows _9, not _1
    samples, problems = index_of(plus, tmp_path)
    assert not problems
    assert samples["one"]["scales"][0]["img_shapes"] == [(1, 4, 4), (1, 2, 6)]
    assert [h for _, h, _ in samples["many"]["scales"][0]["img_shapes"]] == [2] + [2 * (1 + k) for k in range(1, 8)] * 2


PROMPT = 'say "hi",\u2028 and\u0085go\u00a0on'  # str.splitlines, but not JSON, takes two of these for ends of lines


def write_jsonl(path, rows, ascii=False):
    lines = [json.dumps(row, ensure_ascii=ascii) for row in rows]
    path.write_text("\ufeff" + "\r\n\r\n".join(lines), encoding="utf-8", newline="")


def write_csv(path, rows):
    with open(path, "w", encoding="utf-8-sig", newline="") as f:
        columns = ["prompt", "control"] + [f"control_{k}" for k in range(1, 12)] + ["mask", "target"]
        writer = csv.DictWriter(f, columns)
        writer.writeheader()
        for row in rows:
            first, *others = row.pop("control")
            writer.writerow(row | dict(control=first) | {f"control_{k}": c for k, c in enumerate(others, 1)})


@pytest.mark.parametrize("kind", ["jsonl", "ascii jsonl", "csv"])
def test_a_manifest_gives_the_same_samples_as_the_folder(tmp_path, plus, kind):
    data = add_item(tmp_path / "data", "cat", [(64, 32)] + [(32, 32 * (1 + k % 3)) for k in range(12)], PROMPT,
                    mask=draw_picture((64, 32)))
    add_item(data, "sub/[1] \U0001f431", [(64, 64), (32, 32)])
    want, problems = index_of(plus, data)
    assert len(want) == 2 and not problems
    relative = lambda path: os.path.relpath(path, data)
    rows = [dict(target=relative(s["target"]), control=[relative(c) for c in s["control"]],
                 prompt=s["text"][0]["prompt"])
            | (dict(mask=relative(s["mask"])) if s["mask"] else {}) for s in want.values()]
    if kind == "csv":
        write_csv(data / "metadata.csv", rows)
    else:
        write_jsonl(data / "metadata.jsonl", rows, ascii=kind == "ascii jsonl")
    got, problems = index_of(plus, next(data.glob("metadata.*")))
    assert not problems
    content = lambda samples: sorted((s["scales"][0]["key"], s["text"][0]["key"]) for s in samples.values())
    assert content(got) == content(want)


def test_a_folder_with_a_manifest_but_no_target_folder_is_read_by_its_manifest(tmp_path, plus):
    for name in "ab":
        save(draw_picture(seed=ord(name)), tmp_path / f"{name}.png")
    (tmp_path / "metadata.jsonl").write_text('{"target": "a.png", "control": "b.png", "prompt": "add a border"}')
    samples, problems = index_of(plus, tmp_path)
    assert list(samples) == ["a"] and not problems


ROW = '{"target": "target/cat.png", "control": ["control/cat.png"], "prompt": "go", %s}'
BAD_ROWS = {  # line 2 of metadata.jsonl, and what is named beside the line number
    "no JSON": ('{"target": "target/cat.png", ',),
    "no object": ('["target/cat.png"]',),
    "null": ("null",),
    "no target": (ROW % '"target": null', "target"),
    "no control": ('{"target": "target/cat.png", "prompt": "go"}', "control"),
    "number among controls": (ROW % '"control": ["control/cat.png", 5]', "control"),
    "NaN": (ROW % '"prompt": NaN', "prompt"),
    "blank prompt": (ROW % '"prompt": " "', "prompt"),
    "number": (ROW % '"prompt": 5', "prompt"),
    "duplicate": (ROW % '"target": "target/good.png", "control": ["control/good.png"]', "line 1"),
    "duplicate by a detour": (ROW % '"target": "./mask/../target/good.png", "control": ["control/good.png"]', "line 1"),
    "parent": (ROW % '"control": ["../secret.png"]', "control", "../secret.png"),
    "parent in the middle": (ROW % '"mask": "control/../../secret.png"', "mask"),
    "absolute": (ROW % '"target": "/etc/passwd"', "target", "/etc/passwd"),
    "URL": (ROW % '"control": ["http://localhost:1/cat.png"]', "control", "http://localhost:1/cat.png"),
    "link to the outside": (ROW % '"control": ["control/link.png"]', "control", "link.png"),
    "link to itself": (ROW % '"control": ["control/loop.png"]', "control", "loop.png"),
    "folder": (ROW % '"target": "."', "target"),
    "NUL": (ROW % r'"target": "a\u0000.png"', "target"),
    "half a character in a name": (ROW % r'"target": "\ud83d.png"', "target"),
    "half a character": (ROW % r'"prompt": "add a \ud83d"', "prompt"),
    "deep": ("[" * 100_000,),
}


@pytest.fixture
def manifest(data):
    """A folder from which `target/good.png` is read by line 1; outside it lies secret.png, inside it a link to that."""
    save(draw_picture(), data / "../secret.png")
    (data / "control/link.png").symlink_to("../../secret.png")
    (data / "control/loop.png").symlink_to("loop.png")
    return data / "metadata.jsonl"


GOOD_ROW = '{"target": "target/good.png", "control": ["control/good.png"], "prompt": "go"}\n'


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_of_a_manifest_is_named_by_line_and_column(manifest, plus, kind):
    line, *named = BAD_ROWS[kind]
    manifest.write_text(GOOD_ROW + line.replace(", }", "}") + "\n")
    samples, problems = index_of(plus, manifest)
    assert len(samples) == 1 and len(problems) == 1 and is_one_line(problems[0], "metadata.jsonl:2", *named), problems


def test_an_absolute_path_is_refused_even_if_it_leads_inside(manifest, plus):
    manifest.write_text(GOOD_ROW + ROW.replace(", %s", "").replace("target/cat", f"{manifest.parent}/target/cat"))
    assert is_one_line(index_of(plus, manifest)[1][0], "metadata.jsonl:2", "target")


def test_a_missing_picture_of_a_manifest_is_named(manifest, plus):
    manifest.write_text(GOOD_ROW + ROW.replace(", %s", "").replace("control/cat", "control/tom"))
    assert is_one_line(index_of(plus, manifest)[1][0], "control/tom.png")


BAD_CSV_ROWS = {
    "no prompt": ("target/cat.png,control/cat.png,", ":3", "prompt"),
    "no control": ("target/cat.png,,go", ":3", "control"),
    "too few": ("target/cat.png", ":3"),
    "comma in a prompt without quotes": ("target/cat.png,control/cat.png,make it red, not blue", ":3"),
    "NaN": ("target/cat.png,control/cat.png,NaN", ":3", "prompt"),
    "outside": ("../secret.png,control/cat.png,go", ":3", "target", "../secret.png"),
    "very long": ("target/cat.png,control/cat.png," + "red " * 40_000,),
}


@pytest.mark.parametrize("kind", BAD_CSV_ROWS)
def test_a_bad_row_of_a_csv_is_named(manifest, plus, kind):
    row, *named = BAD_CSV_ROWS[kind]
    path = manifest.with_suffix(".csv")
    path.write_text(f"target,control,prompt\ntarget/good.png,control/good.png,go\n{row}\n")
    samples, problems = index_of(plus, path)
    assert len(samples) == 1 and len(problems) == 1 and is_one_line(problems[0], *named)


@pytest.mark.parametrize("columns", ["target;control;prompt", "target/cat.png,control/cat.png,go",
                                     "target,control,prompt,prompt", 'target,"control,prompt'])
def test_a_csv_without_its_columns_is_refused(data, plus, columns):
    path = data / "metadata.csv"
    path.write_text(f"{columns}\ntarget/good.png,control/good.png,go,go\n")
    try:
        samples, problems = index_of(plus, path)
    except cache.InputError as e:
        samples, problems = {}, [str(e)]
    assert not samples and problems and all(is_one_line(p, "metadata.csv") for p in problems)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_csv_may_have_any_line_ends(data, plus, end):
    path = data / "metadata.csv"
    path.write_text(end.join(["target,control,prompt", "target/good.png,control/good.png,go", ""]), newline="")
    samples, problems = index_of(plus, path)
    assert len(samples) == 1 and not problems


# ---- pictures ----

TURNS = {  # what the EXIF standard says about orientation 1 to 8
    1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2), 6: lambda a: np.rot90(a, -1), 7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_pictures_are_turned_as_exif_says(tmp_path, suffix, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(draw_picture((96, 64)), tmp_path / f"a.{suffix}", exif=exif)
    want = TURNS[orientation](np.asarray(Image.open(path).convert("RGB")))
    assert np.array_equal(np.asarray(cache.read_image(path)), want)
    assert cache.image_size(path) == (want.shape[1], want.shape[0])


def strange_exif():
    """Blocks with damage of every kind; all of them hold an orientation at first."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010e], exif[0x011a] = 6, "a description", 72.0
    sound, rng = exif.tobytes(), np.random.default_rng(0)
    yield from (b"", b"Exif\0\0", b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff")
    yield from (sound[:n] for n in range(6, len(sound)))
    for _ in range(300):
        damaged = bytearray(sound)
        for place in rng.integers(6, len(sound), 3):
            damaged[place] = rng.integers(256)
        yield bytes(damaged)


@pytest.mark.filterwarnings("ignore")  # of PIL, about the damage
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_damaged_exif_is_ignored(tmp_path, suffix):
    image = draw_picture((96, 64))
    for n, block in enumerate(strange_exif()):
        path = save(image, tmp_path / f"{n}.{suffix}", exif=block)
        try:
            assert cache.image_size(path) == cache.read_image(path).size
        except BaseException as e:
            pytest.fail(f"EXIF {block!r}: {type(e).__name__}: {e}")


@pytest.mark.parametrize("mode, suffix, level", [
    ("RGBA", "png", 0), ("LA", "png", 0), ("P", "png", 0), ("RGB", "png", 0), ("L", "png", 0), ("RGBA", "webp", 3)])
def test_what_is_transparent_becomes_white(tmp_path, mode, suffix, level):
    """A quarter of the picture is transparent over a hidden 200, the rest opaque."""
    gray, alpha = np.full((64, 64), 30, np.uint8), np.full((64, 64), 255, np.uint8)
    gray[:32, :32], alpha[:32, :32] = 200, 0
    image, options = Image.fromarray(gray), {}
    if mode in ("RGBA", "LA"):
        image = image.convert(mode[:-1])
        image.putalpha(Image.fromarray(alpha))
    else:  # one colour, or one entry of the palette, is declared transparent
        image = image.convert(mode)
        options["transparency"] = (200, 200, 200) if mode == "RGB" else 200 if mode == "L" else image.getpixel((0, 0))
    got = np.asarray(cache.read_image(save(image, tmp_path / f"a.{suffix}", **options)))
    assert (got[:32, :32] == 255).all()
    assert (abs(got[32:].astype(int) - 30) <= level).all()


def test_half_transparent_is_half_white(tmp_path):
    path = save(Image.new("RGBA", (32, 32), (0, 100, 200, 128)), tmp_path / "a.png")
    assert cache.read_image(path).getpixel((0, 0)) == pytest.approx((127, 177, 227), abs=1)


def test_16_bit_gray_is_scaled_not_clipped(tmp_path):
    levels = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    got = np.asarray(cache.read_image(save(Image.fromarray(levels), tmp_path / "a.png"))).astype(float)
    assert abs(got - (levels / 257)[..., None]).max() <= 1


@pytest.mark.parametrize("mode, name", [("CMYK", "a.jpg"), ("1", "a.png"), ("1", "a.bmp"), ("L", "a.jpg"),
                                        ("P", "a.png"), ("RGB", "a.JPEG"), ("L", "a.bmp")])
def test_other_modes_become_rgb(tmp_path, mode, name):
    path = save(draw_picture(mode=mode), tmp_path / name)
    want = Image.open(path).convert("RGB")
    assert cache.read_image(path).mode == "RGB" and np.array_equal(np.asarray(cache.read_image(path)), np.asarray(want))


def test_the_content_counts_not_the_suffix(tmp_path):
    image = draw_picture()
    path = tmp_path / "a.jpg"
    image.save(path, format="PNG")
    assert np.array_equal(np.asarray(cache.read_image(path)), np.asarray(image))
    image.save(path, format="MPO", save_all=True, append_images=[image])  # a JPEG with a preview, as phones write them
    assert cache.image_size(path) == cache.read_image(path).size == (64, 64)


FORMATS = dict(png="PNG", jpg="JPEG", webp="WEBP", bmp="BMP")


@pytest.mark.parametrize("suffix", FORMATS)
def test_no_damage_to_a_picture_is_a_traceback(tmp_path, suffix):
    """PNG and a truncated file of any kind can be told; a flipped bit of a JPEG cannot, but must do no harm."""
    path, rng = save(draw_picture((96, 64)), tmp_path / f"a.{suffix}"), np.random.default_rng(0)
    sound = path.read_bytes()
    cuts = [sound[:n] for n in sorted({int(n) for n in np.linspace(0, len(sound) // 2, 40)})]
    flips = [flip(int(bit))(sound) for bit in [*range(8 * 60), *rng.integers(0, 8 * len(sound), 300)]]
    for n, content in enumerate(cuts + flips):
        path.write_bytes(content)
        for read in (cache.image_size, cache.read_image):
            try:
                with within(5):
                    read(path)
                assert n >= len(cuts) or read is cache.image_size, f"cut to {len(content)} bytes went unnoticed"
            except cache.InputError as e:
                assert is_one_line(str(e), path)
            except Exception as e:
                pytest.fail(f"{read.__name__}, {'cut' if n < len(cuts) else 'flip'} {n}: {type(e).__name__}: {e}")


def test_a_picture_with_a_bomb_in_its_text_is_refused(tmp_path):
    data = b"zTXt", b"Comment\0\0" + zlib.compress(bytes(80 * 2**20))
    chunk = struct.pack(">I", len(data[1])) + data[0] + data[1] + struct.pack(">I", zlib.crc32(data[0] + data[1]))
    path = save(draw_picture(), tmp_path / "a.png")
    sound = path.read_bytes()
    for where in (33, -12):  # after the header, and before the end
        path.write_bytes(sound[:where] + chunk + sound[where:])
        for read in (cache.image_size, cache.read_image):
            with contextlib.suppress(cache.InputError):
                read(path)


def test_every_picture_of_a_sample_is_prepared_alike(tmp_path, plus):
    """A turned picture with transparency equals the one that a person sees, as target, control, mask and prompt."""
    seen = draw_picture((96, 64))
    exif = Image.Exif()
    exif[0x0112] = 6
    hidden = Image.new("RGBA", seen.size)
    hidden.paste(seen.convert("RGBA"), (0, 0))
    hidden.putpixel((5, 5), (1, 2, 3, 0))
    seen.putpixel((5, 5), (255, 255, 255))
    samples = []
    for name, image, options in (("seen", seen, {}), ("raw", hidden.transpose(Image.ROTATE_90), dict(exif=exif))):
        data = tmp_path / name
        for folder in ("target", "control", "mask"):
            save(image, data / folder / "cat.png", **options)
        (data / "target/cat.txt").write_text("add a red border")
        samples.append(index_of(plus, data)[0]["cat"])
    assert samples[0]["sizes"] == samples[1]["sizes"] == [(96, 64), (96, 64)]
    assert_same(*[encode(plus, s) for s in samples])


# ---- good items go on ----

def test_good_items_are_cached_although_others_are_bad(data, tmp_path):
    """Bad in ways that are seen early and in ways that show only when the picture is decoded; each is named once."""
    for suffix, fmt in FORMATS.items():
        add_item(data, suffix)
        path = data / f"control/{suffix}.png"
        draw_picture((96, 64)).save(path, format=fmt)
        path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    (data / "target/cat.txt").unlink()
    result = make_cache(data, tmp_path / "c")
    assert result.status == 1 and len(result.errors) == 5
    for name in ["target/cat.txt"] + [f"control/{suffix}.png" for suffix in FORMATS]:
        assert sum(is_one_line(line, data / name) for line in result.errors) == 1, result.errors
    assert [s["name"] for s in cache.load_index(tmp_path / "c")["samples"]] == ["good"]
    assert load(tmp_path / "c", "good")

    # the same call with --skip_bad is a success, and train.py trains what is left, cached or live
    assert make_cache(data, tmp_path / "c", "--skip_bad").status == 0
    assert train(data, tmp_path, "--cache_dir", tmp_path / "c").status == 1
    assert len(train(data, tmp_path, "--cache_dir", tmp_path / "c", "--skip_bad").losses) == 2


def test_errors_go_to_stderr_and_each_is_said_once(data, tmp_path):
    (data / "target/cat.txt").unlink()
    for result in (make_cache(data, tmp_path / "c"), train(data, tmp_path, "--cache_dir", tmp_path / "c"),
                   train(data, tmp_path, "--no-use_cache")):
        assert result.status == 1 and "error:" not in result.out
        assert result.err.count("target/cat.txt") == 1


def test_nothing_usable_is_an_error_not_a_loop(data, tmp_path):
    for path in data.glob("target/*.txt"):
        path.unlink()
    for flags in ([], ["--skip_bad"]):
        assert make_cache(data, tmp_path / "c", *flags).status == 1
        for live in ([], ["--no-use_cache"]):
            result = train(data, tmp_path, "--cache_dir", tmp_path / "c", *flags, *live)
            assert result.status == 1 and is_one_line(result.errors[-1])


@pytest.mark.parametrize("part", ["encode_image", "encode_prompt"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e5])
def test_what_is_not_finite_is_not_cached(data, tmp_path, monkeypatch, part, value):
    """1e5 is finite, but not in float16. Only the samples that have it are lost."""
    stock, calls = getattr(cache, part), []

    def spoiled(*args):
        calls.append(args)
        x = stock(*args)
        return x.index_fill(0, torch.tensor([0]), value).to(torch.float16) if len(calls) == 1 else x
    monkeypatch.setattr(cache, part, spoiled)
    result = make_cache(data, tmp_path / "c")
    assert result.status == 1 and len(result.errors) == 1 and is_one_line(result.errors[0], "target/cat.png")
    assert [s["name"] for s in cache.load_index(tmp_path / "c")["samples"]] == ["good"]
    tensors = [cache.read_tensors(f)[0] for f in (tmp_path / "c").glob("*/*.safetensors")]
    assert len(tensors) == 3 and all(t.isfinite().all() for each in tensors for t in each.values())


def test_files_of_removed_items_stay_until_they_are_pruned(data, tmp_path):
    make_cache(data, tmp_path / "c")
    before = cached_files(tmp_path / "c")
    for path in data.glob("*/cat.*"):
        path.unlink()
    result = make_cache(data, tmp_path / "c")
    assert result.status == 0 and "2 files" in result.out and cached_files(tmp_path / "c") == before
    assert [s["name"] for s in cache.load_index(tmp_path / "c")["samples"]] == ["good"]  # so that nobody trains them
    assert make_cache(data, tmp_path / "c", "--prune").status == 0
    assert len(cached_files(tmp_path / "c")) == 2 and load(tmp_path / "c", "good")


def test_processes_that_share_the_work_leave_nothing_out(tmp_path, plus):
    """Each rank decides alone which files are its own, perhaps when others have written theirs already."""
    for n in range(5):
        add_item(tmp_path / "data", str(n))
    flags = flags_for(tmp_path / "data")
    index, _ = cache.build_index(plus, TINY, flags, False, quiet=True)
    shares = []
    for rank in range(3):
        before = cached_files(tmp_path / "c")
        assert not cache.encode_missing(plus, TINY, index, tmp_path / "c", flags, rank, 3)
        shares.append(len(cached_files(tmp_path / "c")) - len(before))
    assert sum(shares) == 10
    assert all(file.exists() for s in index["samples"] for file in cache.sample_files(tmp_path / "c", s))


def test_a_full_disk_is_told_before_the_models_are_loaded(data, tmp_path, monkeypatch):
    make_cache(data, tmp_path / "a")
    size = sum(path.stat().st_size for path in (tmp_path / "a").glob("*/*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size))
    assert make_cache(data, tmp_path / "b").status == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0.8 * size))
    monkeypatch.setattr(cache, "load_encoders", lambda *_: pytest.fail("encoders loaded"))
    result = make_cache(data, tmp_path / "c")
    assert result.status == 1 and is_one_line(result.errors[0], tmp_path / "c")


def test_a_cache_folder_that_cannot_be_made_is_one_line(data, tmp_path):
    (tmp_path / "c").write_text("a file")
    result = make_cache(data, tmp_path / "c")
    assert result.status == 1 and is_one_line(result.errors[0], tmp_path / "c")


# ---- flags and model folders ----

BAD_FLAGS = [f"{script} {flags}" for script, every in {
    "cache.py": ["--target_pixels 0", "--target_pixels 12.5", "--target_pixels 1024*", "--control_pixels big",
                 "--dtype float64", "--device banana", "--vae_encoder_device cuda:99", "--max_sequence_length 0",
                 "--max_sequence_length many", "--no_such_flag", "--data", "--model"],
    "train.py": ["--batch_size 0", "--max_steps 0", "--max_tokens 0", "--lora_rank 0", "--save_every 0", "--keep 0",
                 "--lr fast", "--lr -1", "--lr nan", "--lr_scheduler step", "--caption_dropout_rate 1.5",
                 "--lora_dropout -0.1", "--warmup_steps -1", "--gradient_checkpointing -1", "--max_grad_norm 0",
                 "--lora_targets", "--seed x", "--data= --no-use_cache", "--batching both",
                 "--mask_foreground_weight -1"],
    "predict.py": ["--num_inference_steps 0", "--height 0", "--width -16", "--max_tokens 0", "--true_cfg_scale x",
                   "--image a.png", "--prompt go", "--image a.png --prompt go --jobs b.jsonl", "--lora_scale big"],
}.items() for flags in every]


@pytest.mark.parametrize("line", BAD_FLAGS)
def test_a_bad_flag_is_told_before_any_model_is_loaded(tmp_path, monkeypatch, line):
    monkeypatch.setattr(cache, "load_pipeline", lambda *_: pytest.fail("not told before the work began"))
    monkeypatch.setattr(predict, "load_pipeline", cache.load_pipeline)
    result = run_script(*line.split())
    assert result.status == 2 and re.search(r"--\w+", line)[0] in result.err.splitlines()[-1], result.err


@pytest.mark.parametrize("script", ["cache.py", "train.py", "predict.py"])
def test_a_shortened_flag_is_refused(tmp_path, monkeypatch, script):
    """--mod would be understood as --model, but too late for the defaults that depend on it."""
    monkeypatch.setattr(cache, "load_pipeline", lambda *_: pytest.fail("taken for another flag"))
    monkeypatch.setattr(predict, "load_pipeline", cache.load_pipeline)
    assert run_script(script, "--mod", "no/such-model").status == 2


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5000000000\n"


def lose_a_tensor(path):
    tensors = safetensors.torch.load_file(path)
    tensors.pop(sorted(tensors)[len(tensors) // 2])
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def lose_a_shard(path):
    """As a download of several files that broke off."""
    shards = [f"{path.stem}-0000{n}-of-00002.safetensors" for n in (1, 2)]
    weight_map = {name: shards[n % 2] for n, name in enumerate(safetensors.torch.load_file(path))}
    path.with_name(path.name + ".index.json").write_text(json.dumps(dict(metadata={}, weight_map=weight_map)))
    path.rename(path.with_name(shards[0]))


WEIGHTS = ["vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors",
           "transformer/diffusion_pytorch_model.safetensors"]
CONFIGS = ["model_index.json", "vae/config.json", "text_encoder/config.json", "transformer/config.json",
           "tokenizer/tokenizer.json", "processor/preprocessor_config.json", "scheduler/scheduler_config.json"]
DAMAGES = {"gone": Path.unlink, "LFS pointer": lambda p: p.write_bytes(POINTER), "empty": lambda p: p.write_bytes(b""),
           "cut": lambda p: p.write_bytes(p.read_bytes()[:p.stat().st_size // 2]), "no shard": lose_a_shard,
           "one tensor less": lose_a_tensor}


@pytest.mark.parametrize("file, how", [(f, how) for f in WEIGHTS for how in DAMAGES]
                         + [(f, how) for f in CONFIGS for how in ("gone", "LFS pointer", "empty")])
def test_an_incomplete_model_is_named(data, tmp_path, file, how):
    model = copy_model(tmp_path / "model")
    DAMAGES[how](model / file)
    result = train(data, tmp_path, "--model", model, "--cache_dir", tmp_path / "c", *NATIVE)
    part, name = os.path.split(model / file)
    named = {"one tensor less": [], "no shard": [Path(name).stem + "-00002-of-00002"]}.get(how, [name])
    assert result.status == 1 and is_one_line(result.errors[-1], part, *named), result.err[-500:]


def test_a_model_of_another_kind_is_refused(data, tmp_path):
    model = copy_model(tmp_path / "model")
    (model / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    assert is_one_line(make_cache(data, tmp_path / "c", "--model", model).errors[0], "model_index.json", "FluxPipeline")


def test_an_unmatched_lora_target_is_an_error(data, tmp_path):
    result = train(data, tmp_path, "--cache_dir", tmp_path / "c", "--lora_targets", "to_q", "to_kk")  # peft would go on
    assert result.status == 1 and is_one_line(result.errors[-1], "--lora_targets", "to_kk", "to_k ")


# ---- LoRA files ----

def tiny_transformer():
    return predict.place_transformer(predict.load_transformer(TINY, DTYPE_NAME), DEVICE)


def lora_tensors(rank=2, names=("attn.to_q", "attn.to_out.0", "img_mlp.net.2"), blocks=(0, 1), prefix="transformer."):
    shapes = dict(safetensors.torch.load_file(TINY / WEIGHTS[2]))
    rng, tensors = torch.Generator().manual_seed(0), {}
    for layer in [f"transformer_blocks.{b}.{name}" for b in blocks for name in names]:
        out_len, in_len = shapes[f"{layer}.weight"].shape
        tensors[f"{prefix}{layer}.lora_A.weight"] = torch.randn(rank, in_len, generator=rng)
        tensors[f"{prefix}{layer}.lora_B.weight"] = torch.randn(out_len, rank, generator=rng)
    return tensors


def lora_file(tmp_path, tensors, **meta):
    path = tmp_path / predict.LORA_FILE
    safetensors.torch.save_file(tensors, path, metadata=dict(lora_adapter_metadata=json.dumps(meta)) if meta else None)
    return path


def effect(transformer):
    """What the adapter adds to each layer's weight."""
    layers = {name: m for name, m in transformer.named_modules() if "default" in getattr(m, "lora_A", {})}
    matrix = lambda part: part["default"].weight.float().cpu()
    return {name: m.scaling["default"] * matrix(m.lora_B) @ matrix(m.lora_A) for name, m in layers.items()}


def renamed(old, new):
    return lambda tensors: {k.replace(old, new): v for k, v in tensors.items()}


def as_kohya(tensors):
    names = {k: k.removeprefix("transformer.").rsplit(".lora_", 1)[0].replace(".", "_") for k in tensors}
    return {f"lora_unet_{names[k]}.lora_{'down' if 'lora_A' in k else 'up'}.weight": v for k, v in tensors.items()}


def with_alpha(tensors):
    """alpha equal to the rank, which changes nothing."""
    return tensors | {k.rsplit(".lora_", 1)[0] + ".alpha": torch.tensor(2.0) for k in tensors}


FOREIGN = {
    "diffusers": lambda t: t,
    "ComfyUI": renamed("transformer.", "diffusion_model."),
    "ComfyUI, alpha": lambda t: with_alpha(renamed("transformer.", "diffusion_model.")(t)),
    "kohya, alpha": lambda t: with_alpha(as_kohya(t)),
    "peft": renamed("transformer.", "base_model.model."),
    "peft, adapter named": lambda t: {k.replace("transformer.tr", "tr").replace(".weight", ".default.weight"): v
                                      for k, v in t.items()},
    "no prefix": lambda t: {k.removeprefix("transformer."): v for k, v in t.items()},
    "Qwen-Image-Lightning": lambda t: {k.removeprefix("transformer.").replace("lora_A", "lora_down").replace(
        "lora_B", "lora_up"): v for k, v in with_alpha(t).items()},
}


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_lora_of_any_tool_is_loaded_whole_or_refused(tmp_path, kind, scale):
    """diffusers itself only warns, and draws the base model's picture."""
    transformer, tensors = tiny_transformer(), lora_tensors()
    path = lora_file(tmp_path, FOREIGN[kind](tensors))
    try:
        predict.load_lora(transformer, path, scale)
    except cache.InputError as e:
        assert kind == "peft" and is_one_line(str(e), path)
        return
    got = effect(transformer)
    layers = {k.removeprefix("transformer.").rsplit(".lora_", 1)[0] for k in tensors}
    assert got.keys() == layers
    for name in layers:
        a, b = [tensors[f"transformer.{name}.lora_{x}.weight"].to(DTYPE).float() for x in "AB"]
        torch.testing.assert_close(got[name], scale * b @ a)


LAYER = "transformer.transformer_blocks.0.attn.to_q"
A, B = f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"
BAD_LORAS = {  # what becomes of a good one's six layers, and what the error counts or names
    "nothing in it": (lambda t: {},),
    "another model's layers": (renamed("to_q", "qkv"), "2 of 6"),
    "more blocks than the model has": (renamed("blocks.1", "blocks.57"), "3 of 6"),
    "A only": (lambda t: {k: v for k, v in t.items() if "lora_A" in k}, "lora_B"),
    "one B missing": (lambda t: {k: v for k, v in t.items() if k != B}, "to_q"),
    "wrong width": (lambda t: t | {A: torch.ones(2, 96)}, "to_q", "96"),
    "wrong height": (lambda t: t | {B: torch.ones(96, 2)}, "to_q", "96"),
    "A and B of different rank": (lambda t: t | {B: torch.ones(128, 4)}, "to_q"),
    "a vector": (lambda t: t | {A: torch.ones(128)}, "to_q"),
    "NaN": (lambda t: t | {A: t[A].index_fill(1, torch.tensor(5), math.nan)}, "to_q"),
    "Inf": (lambda t: t | {B: t[B].index_fill(0, torch.tensor(5), math.inf)}, "to_q"),
    "a checkpoint": (lambda t: {f"{LAYER}.weight": torch.ones(128, 128)}, "to_q"),
    "a text encoder's": (renamed("transformer.", "text_encoder."), "text_encoder"),
    "of a layer that is not linear": (renamed("to_q", "norm_q"), "norm_q"),
    "kohya of another model": (lambda t: as_kohya(renamed("attn.to_q", "self_attn.qkv")(t)),),
}


@pytest.mark.parametrize("kind", BAD_LORAS)
def test_a_lora_that_does_not_fit_is_an_error_with_counts(tmp_path, kind):
    change, *named = BAD_LORAS[kind]
    path = lora_file(tmp_path, change(lora_tensors()))
    with refused(tmp_path, *named):
        predict.load_lora(tiny_transformer(), path)


@pytest.mark.filterwarnings("ignore")  # peft says it too, as a warning
@pytest.mark.parametrize("short_names", [True, False])
def test_a_lora_without_half_of_the_layers_it_was_trained_with_is_an_error(tmp_path, short_names):
    whole = lora_tensors(names=["attn.to_q", "attn.to_out.0"], blocks=range(3))
    layers = ["to_q", "to_out.0"] if short_names else [k.removeprefix("transformer.").removesuffix(".lora_A.weight")
                                                       for k in whole if "lora_A" in k]
    meta = {f"transformer.{k}": v for k, v in dict(r=2, lora_alpha=2, target_modules=layers).items()}
    predict.load_lora(tiny_transformer(), lora_file(tmp_path, whole, **meta))
    half = {k: v for k, v in whole.items() if "to_q" in k}
    with refused(tmp_path):
        predict.load_lora(tiny_transformer(), lora_file(tmp_path, half, **meta))


@pytest.mark.parametrize("name, content", [
    ("gone.safetensors", None), ("no/such/user", None), ("run", "folder"), ("empty.safetensors", b""),
    ("pointer.safetensors", POINTER), ("picture.png", b"\x89PNG")])
def test_a_lora_that_is_no_lora_is_one_line(tmp_path, name, content):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    result = run_script("predict.py", "--lora", path, *ON_DEVICE)
    assert result.status == 1 and is_one_line(result.errors[-1], name)


@pytest.mark.parametrize("meta", ["{", "[]", "5", '{"transformer.r": 2}'])
def test_a_lora_with_strange_metadata_is_no_traceback(tmp_path, meta):
    path = tmp_path / predict.LORA_FILE
    safetensors.torch.save_file(lora_tensors(), path, metadata=dict(lora_adapter_metadata=meta))
    image = save(draw_picture(), tmp_path / "a.png")
    result = run_script("predict.py", "--lora", path, "--image", image, "--prompt", "go", "--num_inference_steps", 2,
                        *ON_DEVICE)
    assert result.status == 0 or is_one_line(result.errors[-1], path)


def test_a_lora_that_was_damaged_after_training_is_refused(data, tmp_path):
    train(data, tmp_path, "--cache_dir", tmp_path / "c", "--max_steps", 1)
    path = tmp_path / "run-0" / predict.LORA_FILE
    assert predict.read_lora(path)[1]["train.step"] == 1
    damage_tensors(path)
    with refused(path):
        predict.read_lora(path)


# ---- chapter 3: predict.py -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stock_area(area):
    """The stock pipelines work at 1024*1024 and 384*384; here at `area`, so that a CPU is done in a second."""
    with pytest.MonkeyPatch.context() as patch:
        small = lambda real: lambda target_area, ratio: real(area if target_area == 1024 * 1024 else target_area, ratio)
        for module in (plus_code, v1_code):
            patch.setattr(module, "calculate_dimensions", small(module.calculate_dimensions))
        yield


def stock_pipeline(folder):
    """The unmodified pipeline, with weights, and with our processor, since its own needs torchvision."""
    pipe = cache.load_pipeline(folder)
    cache.load_encoders(pipe, folder, "float32", "cpu", "cpu")
    pipe.transformer = cache.load_part(QwenImageTransformer2DModel, folder, "transformer", "float32")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def tiny_v1(tmp_path_factory):
    """tiny as a Qwen-Image-Edit v1: the same weights, the other pipeline class."""
    folder = tmp_path_factory.mktemp("v1") / "tiny"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("data", "val", "known", "*.py", "*.png"))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "QwenImageEditPipeline"}))
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three pictures of different sizes and aspects."""
    folder = tmp_path_factory.mktemp("photos")
    return [
        save(draw_picture(size, seed), folder / f"{seed}.png")
        for seed, size in enumerate([(100, 60), (64, 128), (90, 90)])
    ]


def make_input(model, shapes, txt_lens):
    """Random packed samples for one call of a transformer; the stock call if it is one."""
    g, c = torch.Generator().manual_seed(0), model.config
    packed = dict(txt_seq_lens=txt_lens) if len(shapes) > 1 else {}
    return packed | dict(
        hidden_states=torch.randn(1, sum(prod(p) for s in shapes for p in s), c.in_channels, generator=g),
        encoder_hidden_states=torch.randn(1, sum(txt_lens), c.joint_attention_dim, generator=g),
        timestep=torch.rand(len(shapes), generator=g),
        img_shapes=shapes,
    )


def job_of(images, area=64 * 64, **fields):
    return SimpleNamespace(
        **{
            **dict(
                image=images,
                prompt="add a red border",
                negative_prompt=" ",
                height=None,
                width=None,
                seed=3,
                num_inference_steps=3,
                true_cfg_scale=4.0,
                target_pixels=area,
                control_pixels=area,
                upscale=True,
                size_from=None,
                sigmas=None,
                shift=None,
            ),
            **fields,
        }
    )


def predict_latents(pipe, transformer, jobs, max_tokens=10_000):
    for job in jobs:
        predict.plan_job(pipe, job)
        predict.encode_job(pipe, job, "cpu")
    predict.denoise(transformer, pipe.scheduler.config, jobs, max_tokens)
    return [job.latents for job in jobs]


@pytest.mark.parametrize(
    "version, pictures, fields",
    [
        ("v1", 1, {}),
        ("plus", 1, {}),
        ("plus", 2, {}),
        ("plus", 3, dict(true_cfg_scale=1.0, num_inference_steps=4)),
        ("plus", 1, dict(height=96, width=200)),
    ],
)
def test_single_job_equals_stock_pipeline(version, pictures, fields, tiny_v1, photos):
    """Same seed, same pictures: the latents of predict.py and of the stock pipeline differ by at most 1e-5."""
    folder = tiny_v1 if version == "v1" else TINY
    pipe, area = stock_pipeline(folder), 1024 * 1024 if FULL else 96 * 96
    job = job_of(photos[:pictures], area, **fields)
    with stock_area(area):
        images = [Image.open(p) for p in job.image]
        stock = pipe(
            image=images if version == "plus" else images[0],
            prompt=job.prompt,
            negative_prompt=job.negative_prompt,
            num_inference_steps=job.num_inference_steps,
            true_cfg_scale=job.true_cfg_scale,
            height=job.height,
            width=job.width,
            generator=torch.manual_seed(job.seed),
            output_type="latent",
        ).images
    (ours,) = predict_latents(pipe, patch_qwen_model_for_multi_resolution(pipe.transformer), [job])
    print(f"latents: {rel(ours, stock[0]):.1e} from the stock pipeline (limit 1e-5)")
    assert rel(ours, stock[0]) <= 1e-5


def test_batch_predict_equals_single_predict(photos):
    """Jobs that differ in size, pictures, prompt, steps and CFG share their packs, and each gets what it gets alone."""
    pipe = stock_pipeline(TINY)
    transformer = patch_qwen_model_for_multi_resolution(pipe.transformer)
    jobs = lambda: [
        job_of(photos[:1], 64 * 64),
        job_of(photos[1:2], 96 * 96, prompt="keep the image", num_inference_steps=2),
        job_of(photos[:2], 64 * 96, true_cfg_scale=1.0),
        job_of(photos[2:3], 48 * 48, height=32, width=128, seed=9),
    ]
    alone = [predict_latents(pipe, transformer, [job])[0] for job in jobs()]
    for max_tokens in (10_000, 200, 1):  # all runs in one pack; several packs; each run by itself
        for one, many in zip(alone, predict_latents(pipe, transformer, jobs(), max_tokens)):
            print(f"{rel(many, one):.1e} from alone (limit 1e-5)")
            assert rel(many, one) <= 1e-5


def test_decoded_picture_is_the_stock_pipelines(photos):
    pipe = stock_pipeline(TINY)
    latents = torch.randn(24, 64)
    real = pipe.vae.decode
    with pytest.MonkeyPatch.context() as patch:  # let the stock pipeline decode our latents: its last lines only
        patch.setattr(type(pipe.scheduler), "step", lambda self, pred, t, x, return_dict: (latents[None],))
        with stock_area(64 * 64):
            stock = pipe(
                image=[Image.open(photos[0])],
                prompt="x",
                num_inference_steps=1,
                height=64,
                width=96,
                true_cfg_scale=1.0,
            ).images[0]
    assert pipe.vae.decode == real
    assert np.array_equal(np.asarray(predict.decode(pipe, latents, 64, 96)), np.asarray(stock))


def test_predict_jobs_writes_every_good_picture(tmp_path, photos):
    """One bad job does not lose the others: they are written, the bad one is named, the exit status is 1."""
    jobs = [
        dict(image=str(photos[0]), prompt="add a red border", num_inference_steps=2),
        dict(image=["missing.png"], prompt="x"),
        dict(image=[str(photos[1]), str(photos[0])], prompt="y", out="b.png", num_inference_steps=2, true_cfg_scale=2),
        dict(image=str(photos[0])),
        dict(image=str(photos[0]), prompt="x", heigth=3),
    ]
    (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, jobs)))
    result = run_script("predict.py", "--jobs", tmp_path / "jobs.jsonl", "--out_dir", tmp_path / "edited")
    assert result.status == 1 and len(result.errors) == 3 and all(is_one_line(line) for line in result.errors)
    for name in ("missing.png", "jobs.jsonl:4", "'heigth'"):
        assert name in result.err
    assert sorted(p.name for p in (tmp_path / "edited").iterdir()) == [
        f"001-{photos[0].stem}.png",
        "b.png",
        "sheet.png",
    ]
    assert Image.open(tmp_path / "edited" / "b.png").size == tuple(
        cache.fit_size(cache.image_size(photos[0]), "native")
    )


def test_predict_takes_its_geometry_from_the_lora(tmp_path, photos, trained):
    """A LoRA trained at native sizes is applied at native sizes, whatever the defaults; flags still win."""
    flags = [
        "--image",
        str(photos[0]),
        "--prompt",
        "x",
        "--lora",
        str(trained),
        "--num_inference_steps",
        "2",
        "--true_cfg_scale",
        "1",
        "--model",
        str(TINY),
    ]  # a path: not the defaults of --model tiny
    for out, more in (("a.png", []), ("b.png", ["--target_pixels", "32*32"])):
        assert run_script("predict.py", *flags, "--out", tmp_path / out, *more).status == 0
    assert Image.open(tmp_path / "a.png").size == tuple(cache.fit_size(cache.image_size(photos[0]), "native"))
    assert Image.open(tmp_path / "b.png").size == tuple(cache.fit_size(cache.image_size(photos[0]), 32 * 32))


@pytest.mark.parametrize(
    "shift, zoom, colour", [((0.0, 0.0), 0.0, 0), ((0.3, 0.0), 0.0, 3), ((0.1, -0.2), 0.4, 0), ((0.0, 0.0), -0.8, 0)]
)
def test_drift_measures_planted_motion(shift, zoom, colour):
    """Blobs moved by a known fraction of a pixel, under a border that is left out (and is wrong on purpose)."""

    def blobs(shift=(0, 0), zoom=0, height=96, width=128):
        y, x = np.mgrid[:height, :width].astype(float)
        cx, cy = (width - 1) / 2, (height - 1) / 2
        x, y = cx + (x - cx - shift[0]) / (1 + zoom / 100), cy + (y - cy - shift[1]) / (1 + zoom / 100)
        blob = lambda at, r, level: level * np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / 2 / r**2)
        return np.repeat((60 + blob((40, 40), 8, 120) + blob((90, 60), 10, 100))[..., None], 3, -1)

    keep = np.zeros((96, 128), bool)
    keep[16:-16, 16:-16] = True
    image = blobs(shift, zoom) + colour
    image[~keep] = 0
    image[16:19] = 0  # the soft edge of the edit
    found = predict.drift(image, blobs(), keep)
    assert found["shift"] == pytest.approx(np.hypot(*shift), abs=0.01)
    assert found["zoom"] == pytest.approx(abs(zoom), abs=0.01)
    image[16:19] = blobs(shift, zoom)[16:19] + colour
    found = predict.drift(image, blobs(), keep)
    assert found["colour"] == pytest.approx(colour, abs=0.3)
    assert found["psnr"] == pytest.approx(predict.psnr(image[16:-16, 16:-16], blobs()[16:-16, 16:-16]))


def test_the_shipped_base_copies_and_follows():
    """What the demo stands on: held-out pictures in sizes that nothing was trained on, drawn by the base alone."""
    jobs, problems = predict.read_jobs(TINY / "known", predict.SAMPLING | predict.TINY_SAMPLING | dict(
        target_pixels="native", control_pixels="native", upscale=True, seed=0, num_inference_steps=8))
    assert not problems
    jobs = [j for j in jobs if j.name.split("/")[0] in ("keep", "background")]
    pipe = stock_pipeline(TINY)
    transformer = patch_qwen_model_for_multi_resolution(pipe.transformer)
    found = {}
    for job in jobs:
        predict.plan_job(pipe, job)
        predict.encode_job(pipe, job, "cpu")
    predict.denoise(transformer, pipe.scheduler.config, jobs, 4096)
    for job in jobs:
        target = cache.read_image(job.size_from)
        ceiling = predict.decode(pipe, cache.encode_image(pipe, target, target.size), job.height, job.width)
        got = predict.psnr(predict.decode(pipe, job.latents, job.height, job.width), target)
        found.setdefault(job.name.split("/")[0], []).append((got, predict.psnr(ceiling, target)))
    (keep, ceiling), (background, _) = [np.mean(found[k], axis=0) for k in ("keep", "background")]
    print(f"keep {keep:.1f} dB, background {background:.1f} dB, VAE alone {ceiling:.1f} dB")
    assert ceiling >= 30 and keep >= ceiling - 3 and background >= 22


def test_lora_on_a_bf16_base_is_cast_when_used():
    """Master weights, their gradients and the file stay fp32, peft's own layer gives the same but for bf16's rounding,
    scale and disable work; on an fp32 base nothing differs at all."""
    layers = {}
    for dtype in (torch.float32, torch.bfloat16):
        for add in (predict.add_lora, lambda m, **c: (m.add_adapter(LoraConfig(**c)), cast_training_params(m))):
            torch.manual_seed(0)
            model = QwenImageTransformer2DModel(**SMALL).to(dtype).requires_grad_(False)
            add(model, r=4, lora_alpha=6, target_modules=["to_q"], init_lora_weights=False)
            layer = model.transformer_blocks[0].attn.to_q
            torch.manual_seed(1)
            for p in layer.parameters():
                if p.requires_grad:
                    p.data = torch.randn(p.shape)
            layers[dtype, isinstance(layer, predict.LoraLinear)] = layer
    x = torch.randn(3, 24, E)
    for scale in (1, 0.5, 0):
        out, grads = {}, {}
        for (dtype, ours), layer in layers.items():
            layer.enable_adapters(scale > 0)
            layer.scale_layer(scale or 1)
            layer.zero_grad()
            out[dtype, ours] = layer(x.to(dtype))
            if scale:
                out[dtype, ours].float().square().sum().backward()
                grads[dtype, ours] = [p.grad for p in layer.parameters() if p.requires_grad]
                assert len(grads[dtype, ours]) == 2 and all(g.dtype == torch.float32 for g in grads[dtype, ours])
            layer.unscale_layer()
        assert torch.equal(out[torch.float32, True], out[torch.float32, False])
        assert out[torch.bfloat16, True].dtype == torch.bfloat16
        assert rel(out[torch.bfloat16, True], out[torch.float32, True]) < 1e-2
        for ours, theirs in zip(grads.get((torch.bfloat16, True), []), grads.get((torch.float32, False), [])):
            assert rel(ours, theirs) < 2e-2
    assert len(layers) == 4


# ---- chapter 4: train.py ---------------------------------------------------------------------------------------------


EXACT = ["--dtype", "float32"]  # where training is compared to 1e-5, whatever pytest's --dtype


@functools.cache
def toy_cache():
    """The toy dataset, encoded once for all tests, with the empty prompt."""
    folder = Path(tempfile.mkdtemp(), "cache")
    assert run_script("cache.py", "--cache_dir", folder, "--empty_prompt", *ON_DEVICE).status == 0
    return folder


def train_toy(out_dir, *flags):
    """A short run on the toy dataset -> result of run_script."""
    return run_script(
        "train.py",
        "--cache_dir",
        toy_cache(),
        "--out_dir",
        out_dir,
        "--max_steps",
        3,
        "--batch_size",
        4,
        "--val_data",
        *ON_DEVICE,
        *flags,
    )


def train_log(out_dir, *flags):
    result = train_toy(out_dir, *flags)
    assert result.status == 0, result.err
    return log_of(out_dir)


def log_of(out_dir):
    return [json.loads(line) for line in (Path(out_dir) / "log.jsonl").read_text().splitlines()[1:]]


def curve(log):
    return [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in log]


def lora_of(out_dir):
    return predict.read_lora(out_dir)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run folder of 3 steps with alpha != rank and LoRAs in both streams, the last block's dead ends included."""
    out_dir = tmp_path_factory.mktemp("run") / "a"
    train_log(
        out_dir,
        "--lora_rank",
        4,
        "--lora_alpha",
        8,
        "--save_every",
        2,
        "--lora_targets",
        "to_q",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "to_add_out",
        "net.2",
        "img_mod.1",
    )
    return out_dir


def test_trains_for_exactly_max_steps(trained):
    assert [r["step"] for r in log_of(trained)] == [1, 2, 3]
    assert sorted(p.name for p in trained.glob("checkpoint-*")) == ["checkpoint-000002", "checkpoint-000003"]
    assert (trained / "DONE").is_file()


def test_lora_has_no_layer_that_nobody_reads(trained):
    """The last block's text output goes nowhere: LoRAs there would stay zero. Everything else has moved."""
    state = lora_of(trained)
    last = max(int(re.search(r"blocks\.(\d+)", k)[1]) for k in state)
    assert not [k for k in state if re.search(rf"blocks\.{last}\.(attn\.(add_q_proj|to_add_out)|txt_mlp)", k)]
    assert [k for k in state if f"blocks.{last - 1}.attn.to_add_out" in k]
    assert all(v.dtype == torch.float32 for v in state.values())
    assert all(v.any() for k, v in state.items() if "lora_B" in k)


def test_lora_loads_in_stock_pipeline(trained, photos):
    """File -> unmodified pipe.load_lora_weights == file -> predict.load_lora == weights by hand; alpha != rank."""
    pipe = stock_pipeline(TINY)
    base = copy.deepcopy(pipe.transformer)
    ours = patch_qwen_model_for_multi_resolution(copy.deepcopy(base))
    by_hand = copy.deepcopy(base)
    pipe.load_lora_weights(str(trained))
    predict.load_lora(ours, trained)
    state = lora_of(trained)
    for key in [k for k in state if "lora_A" in k]:
        linear = by_hand.get_submodule(key.removeprefix("transformer.").removesuffix(".lora_A.weight"))
        linear.weight.data += 8 / 4 * state[key.replace("lora_A", "lora_B")] @ state[key]
    x = make_input(base, [[(1, 4, 6), (1, 4, 4)]], [7])
    with torch.no_grad():
        a, b, c, d = [m(**x, return_dict=False)[0] for m in (pipe.transformer, ours, by_hand, base)]
    assert rel(a, b) <= 1e-6 and rel(a, c) <= 1e-5 and rel(d, c) > 1e-4


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_lora_scale(trained, scale):
    transformer = predict.load_transformer(TINY, "float32")
    x = make_input(transformer, [[(1, 4, 6)], [(1, 4, 4)]], [7, 3])
    half = copy.deepcopy(transformer)
    state = lora_of(trained)
    for key in [k for k in state if "lora_A" in k]:
        linear = half.get_submodule(key.removeprefix("transformer.").removesuffix(".lora_A.weight"))
        linear.weight.data += scale * 2 * state[key.replace("lora_A", "lora_B")] @ state[key]
    predict.load_lora(transformer, trained, scale)
    with torch.no_grad():
        assert rel(transformer(**x).sample, half(**x).sample) <= 1e-5


@pytest.mark.parametrize(
    "flags",
    [
        ["--max_tokens", "1"],
        ["--max_tokens", "150"],
        ["--batching", "padded", "--max_tokens", "250"],
        ["--gradient_checkpointing", "2"],
    ],
)
def test_batching_does_not_change_training(tmp_path, flags):
    """Packed, padded, one sample at a time (--max_tokens 1), several packs, recomputed blocks: the same losses, the
    same LoRA. Two controls, edit masks and dropped captions included."""
    common = ["--caption_dropout_rate", 0.3, "--loss_norm", "token", "--batch_size", 6, *EXACT]
    one, other = train_log(tmp_path / "a", *common), train_log(tmp_path / "b", *common, *flags)
    limit = 1e-5 if "padded" in flags else 1e-6  # the split into packs is worth less than the padding's other kernels
    assert [r["loss"] for r in other] == pytest.approx([r["loss"] for r in one], rel=limit)
    assert [r["grad_norm"] for r in other] == pytest.approx([r["grad_norm"] for r in one], rel=1e-3)
    if "padded" in flags:  # the log shows the waste
        assert all(r["computed_tokens"] > r["tokens"] for r in other) and all(
            r["computed_tokens"] == r["tokens"] for r in one
        )


@pytest.mark.skipif(not FULL, reason="the same as above, of three steps: --full")
@pytest.mark.parametrize("flags", [["--batching", "padded"], ["--max_tokens", 1]])
def test_twenty_steps_are_the_same_steps(tmp_path, twenty_steps, flags):
    """Twenty optimizer steps at the demo's own settings: one packed batch a step, padded, one at a time."""
    log = train_log(tmp_path / "a", *TWENTY, *flags)
    assert [r["loss"] for r in log] == pytest.approx([r["loss"] for r in twenty_steps], rel=1e-5)


TWENTY = ["--max_steps", 20, "--batch_size", 8, *EXACT]


@pytest.fixture(scope="module")
def twenty_steps(tmp_path_factory):
    return train_log(tmp_path_factory.mktemp("twenty") / "a", *TWENTY)


@pytest.mark.skipif(not FULL, reason="four trainings of a minute each: --full -k shared_positions -s")
def test_the_edit_is_learned_in_three_ways_and_not_with_shared_positions(tmp_path, monkeypatch):
    """The toy edit by mixed-size packs, one sample at a time and padded batches, from the same stream of samples, has
    the same quality. With the first sample's positions for the whole batch, as stock diffusers computes it, it has not.
    -s prints the table; the pictures are in the test's folder."""

    def shared(pos_embed, shapes, txt_len, device, real=rope_patch.sample_freqs):
        if not torch.is_grad_enabled():  # pictures are drawn with the right positions, as the stock pipeline does
            return real(pos_embed, shapes, txt_len, device)
        img_freqs, txt_freqs = real(pos_embed, first[0], txt_len, device)
        return img_freqs[torch.arange(sum(map(prod, shapes))) % len(img_freqs)], txt_freqs

    def remember_first(*args, real=rope_patch.sample_shapes):
        first[:] = real(*args)
        return real(*args)

    first, after = [], {}
    ways = {"mixed": [], "one": ["--max_tokens", 1], "padded": ["--batching", "padded"], "shared": []}
    for name, flags in ways.items():
        if name == "shared":
            monkeypatch.setattr(rope_patch, "sample_freqs", shared)
            monkeypatch.setattr(rope_patch, "sample_shapes", remember_first)
        result = run_script("train.py", "--cache_dir", toy_cache(), "--out_dir", tmp_path / name, *flags)
        assert result.status == 0, result.err
        (measured,) = (tmp_path / name / "samples").glob("*.json")
        after[name] = json.loads(measured.read_text())["val"]
        print(f"\n{name:8} loss {log_of(tmp_path / name)[-1]['loss']:.4f} {after[name]} {tmp_path / name}")
    assert all(abs(after[way]["after"] - after["mixed"]["after"]) < 0.3 for way in ("one", "padded"))
    assert after["shared"]["after"] < after["mixed"]["after"] - 3


def test_gradients_equal_stock_one_at_a_time(tmp_path):
    """The first step's LoRA gradients and loss, computed here from the definition with the stock model, one sample at a
    time, equal what train.py applied: read from its optimizer, exp_avg = 0.1 * gradient after one step."""
    train_log(tmp_path / "a", "--max_steps", 1, "--max_grad_norm", 1e9, "--warmup_steps", 0, "--lr", 0, *EXACT)
    ns = globals_of_train(tmp_path / "b", *EXACT)
    stock = cache.load_part(QwenImageTransformer2DModel, TINY, "transformer", "float32").requires_grad_(False)
    stock.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    set_peft_model_state_dict(stock, {k.removeprefix("transformer."): v for k, v in lora_of(tmp_path / "a").items()})
    losses = []
    for position in range(4):
        sample, scale, _ = ns["draw"](position)
        t = cache.load_sample(toy_cache(), sample, scale)
        s, noise = ns["draw_noise"](position, *t["pixel_latent"].shape)
        x = torch.cat([(1 - s) * t["pixel_latent"] + s * noise, t["control_latent"]])
        v = stock(
            hidden_states=x[None],
            encoder_hidden_states=t["prompt_embed"][None],
            timestep=s[None],
            img_shapes=[[tuple(i) for i in t["img_shapes"].tolist()]],
            return_dict=False,
        )[0][0, : len(noise)]
        weight = 1 + t["edit_mask"] if "edit_mask" in t else torch.ones(len(noise))
        losses.append(((v - (noise - t["pixel_latent"])).square().mean(-1) * weight).sum() / weight.sum())
    loss = torch.stack(losses).mean()
    loss.backward()
    assert log_of(tmp_path / "a")[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    moments, _ = cache.read_tensors(tmp_path / "a" / "checkpoint-000001" / "optimizer.safetensors")
    got, want = [], []
    for name, p in stock.named_parameters():
        if p.requires_grad:
            got.append(10 * moments["exp_avg." + name].flatten())
            want.append(p.grad.flatten())
    assert rel(torch.cat(got), torch.cat(want)) <= 1e-5


@pytest.mark.parametrize(
    "flags",
    [
        [],
        [
            "--batching",
            "padded",
            "--caption_dropout_rate",
            0.5,
            "--lora_dropout",
            0.5,
            "--lr_scheduler",
            "cosine",
            "--gradient_checkpointing",
            1,
        ],
    ],
)
def test_resume_is_bitwise(tmp_path, flags):
    """6 steps in one go == 4 steps, killed after the checkpoint of step 2, resumed: log and LoRA, bit for bit. The log
    of the killed run ran ahead of its checkpoint and ends in half a line."""
    flags = [*flags, "--max_steps", 6, "--save_every", 2]
    whole = train_log(tmp_path / "a", *flags)
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        real = torch.optim.AdamW.step
        patch.setattr(
            torch.optim.AdamW,
            "step",
            lambda self: (
                real(self)
                if int(next(iter(self.state.values()), {"step": 0})["step"]) < 4
                else (_ for _ in ()).throw(KeyboardInterrupt)
            ),
        )
        train_log(tmp_path / "b", *flags)
    shutil.rmtree(tmp_path / "b" / "checkpoint-000004")
    with open(tmp_path / "b" / "log.jsonl", "a") as f:
        f.write('{"step": 5, "lo')
    assert curve(train_log(tmp_path / "b", *flags, "--resume")) == curve(whole)
    a, b = lora_of(tmp_path / "a"), lora_of(tmp_path / "b")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_resume_refuses_other_settings_and_finished_runs(tmp_path):
    """Differing fields are listed; a finished run says so; a folder with a run in it is not overwritten."""
    train_log(tmp_path / "a", "--lr_scheduler", "linear")
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    result = train_toy(tmp_path / "a", "--lr_scheduler", "linear", "--resume", "--lora_rank", 8, "--lr", 0.5)
    assert result.status == 1 and is_one_line(result.errors[-1], "lora_rank: 16 -> 8", "lr: 0.004 -> 0.5")
    assert "seed" not in result.err
    result = train_toy(tmp_path / "a", "--lr_scheduler", "linear", "--resume")
    assert result.status == 0 and "already done" in result.out
    result = train_toy(tmp_path / "a", "--lr_scheduler", "linear")
    assert result.status == 1 and is_one_line(result.errors[-1], f"--out_dir {tmp_path / 'a'}: is not empty")
    assert before == {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    result = train_toy(tmp_path / "b", "--resume")
    assert result.status == 1 and is_one_line(result.errors[-1], "no checkpoint") and not (tmp_path / "b").exists()


@pytest.mark.parametrize("ranks, batch_size", [(2, 5), (4, 3)])
def test_ranks_equal_one_process(tmp_path, start, ranks, batch_size):
    """Several processes: the same samples with the same noise, losses to 1e-6, one LoRA file. 5 samples a step do not
    divide by 2; 3 leave one of 4 ranks without work. (torchrun itself: test_a_dead_rank_ends_the_job_and_is_named.)"""
    flags = ["--cache_dir", toy_cache(), "--max_steps", 3, "--batch_size", batch_size, *EXACT, "--val_data"]
    one = train_log(tmp_path / "one", *flags[2:])
    processes = start_ranks(start, *flags, "--out_dir", tmp_path / "many", preludes=[""] * ranks)
    assert not any([p.wait() for p in processes]), [p.output() for p in processes]
    many = log_of(tmp_path / "many")
    assert [r["loss"] for r in many] == pytest.approx([r["loss"] for r in one], rel=1e-6)
    assert [r["tokens"] for r in many] == [r["tokens"] for r in one]
    a, b = lora_of(tmp_path / "one"), lora_of(tmp_path / "many")
    assert rel(torch.cat([b[k].flatten() for k in a]), torch.cat([a[k].flatten() for k in a])) <= 1e-3


def globals_of_train(tmp_path, *flags):
    """train.py's functions, after a run of one step with these flags."""
    result = train_toy(tmp_path / "g", "--max_steps", 1, *flags)
    assert result.status == 0, result.err
    return result.globals


def test_samples_and_noise_are_functions_of_seed_and_position(tmp_path):
    """The stream does not know of batch size, ranks or time: epochs are permutations, noise belongs to a position."""
    a = globals_of_train(tmp_path / "a", "--caption_dropout_rate", 0.25)
    b = globals_of_train(tmp_path / "b", "--caption_dropout_rate", 0.25, "--batch_size", 7, "--max_tokens", 100)
    c = globals_of_train(tmp_path / "c", "--caption_dropout_rate", 0.25, "--seed", 1)
    n = len(a["samples"])
    names = lambda ns, start: [ns["draw"](p)[0]["name"] for p in range(start, start + n)]
    assert names(a, 0) == names(b, 0) != names(c, 0) and names(a, 0) != names(a, n)
    assert sorted(names(a, 0)) == sorted(names(a, n)) == sorted(s["name"] for s in a["samples"])
    for p in (0, 1, 12345):
        (s1, n1), (s2, n2), (s3, n3) = [ns["draw_noise"](p, 24, 64) for ns in (a, b, c)]
        assert s1 == s2 != s3 and torch.equal(n1, n2) and not torch.equal(n1, n3)
    assert abs(np.mean([a["draw"](p)[2]["prompt"] == "" for p in range(2000)]) - 0.25) < 0.04
    noise = torch.cat([a["draw_noise"](p, 24, 64)[1].flatten() for p in range(100)])
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "qwen_shift"])
def test_timestep_distribution(tmp_path, sampling):
    """Quantiles of 2,000 draws. qwen_shift moves the median to e^mu / (e^mu + 1), mu from the sample's own size:
    2.001 / 3.001 for 1024*1024 pixels (reference: the shift that the scheduler uses at inference)."""
    ns = globals_of_train(tmp_path, "--timestep_sampling", sampling)
    s = torch.stack([ns["draw_noise"](p, 4096, 1)[0] for p in range(2000)])
    quartiles = dict(uniform=[0.25, 0.5, 0.75], logit_normal=[0.3375, 0.5, 0.6625])
    shift = lambda u: 2.0007 * u / (1 + 1.0007 * u)
    want = quartiles.get(sampling) or [shift(u) for u in quartiles["logit_normal"]]
    assert 0 < s.min() and s.max() < 1
    assert torch.quantile(s, torch.tensor([0.25, 0.5, 0.75])).tolist() == pytest.approx(want, abs=0.03)


@pytest.mark.parametrize(
    "schedule, want",
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, *(0.5 + 0.5 * math.cos(math.pi * x) for x in (0.25, 0.5, 0.75))]),
    ],
)
def test_learning_rate_is_a_function_of_the_step(tmp_path, schedule, want):
    ns = globals_of_train(tmp_path, "--lr_scheduler", schedule, "--warmup_steps", 2, "--lr", 3)
    ns["args"].max_steps = 6
    ns["learning_rate"].__globals__["args"].max_steps = 6
    assert [ns["learning_rate"](step) / 3 for step in range(6)] == pytest.approx(want)


def test_edit_mask_weighs_and_is_normalised(tmp_path):
    """A mask that is all white or all black changes nothing; a half one weighs 2 : 1; sample and token means differ as
    they should when sizes do."""
    sample, token = globals_of_train(tmp_path / "s"), globals_of_train(tmp_path / "t", "--loss_norm", "token")

    def loss(ns, weights):
        batch = dict(sample["load_batch"]([0, 1]), weights=weights)
        errors = [torch.zeros(len(t), 64) for t in batch["targets"]]  # predictions 0, targets 1 and 3: squares 1 and 9
        for e in errors:
            e[len(e) // 2 :] = 2
        batch["targets"] = [e + 1 for e in errors]
        patched = dict(run_packed=lambda model, latents, *_: [torch.zeros_like(x) for x in latents])
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ns["batch_loss"].__globals__, "run_packed", patched["run_packed"])
            top, bottom = ns["batch_loss"](batch)
        return float(top / bottom)

    lens = [len(t) for t in sample["load_batch"]([0, 1])["targets"]]
    ones, halves = [torch.ones(n) for n in lens], [1 + (torch.arange(n) >= n // 2).float() for n in lens]
    for ns in (sample, token):
        assert loss(ns, ones) == loss(ns, [2 * w for w in ones]) == pytest.approx(5)
        assert loss(ns, halves) == pytest.approx((1 + 2 * 9) / 3)
    uneven = [ones[0], halves[1]]
    assert loss(sample, uneven) == pytest.approx((5 + 19 / 3) / 2)
    assert loss(token, uneven) == pytest.approx((5 * lens[0] + 9.5 * lens[1]) / (lens[0] + 1.5 * lens[1]))


def test_only_the_lora_trains_and_is_float32(tmp_path):
    """With a bf16 base too: fp32 adapters (1 + 1e-3 is 1 in bf16, so small steps would be lost), the base untouched."""
    ns = globals_of_train(tmp_path, "--dtype", "bfloat16", "--no-use_cache")
    fresh = predict.load_transformer(TINY, "bfloat16").state_dict()
    trained = {k.replace(".base_layer", ""): v for k, v in ns["transformer"].state_dict().items() if ".lora_" not in k}
    assert trained.keys() == fresh.keys() and all(torch.equal(trained[k], fresh[k]) for k in fresh)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in ns["lora"].values())
    assert not [n for n, p in ns["transformer"].named_parameters() if p.requires_grad and n not in ns["lora"]]


def test_nan_stops_before_the_step_is_taken(tmp_path):
    """A poisoned sample: no step, its name on the last line, the earlier checkpoint intact."""
    shutil.copytree(toy_cache(), tmp_path / "cache")
    ns = globals_of_train(tmp_path, "--cache_dir", tmp_path / "cache")
    sample, scale, _ = ns["draw"](4 + 1)  # in step 2 of batches of 4
    path = cache.latents_file(tmp_path / "cache", scale)
    tensors, meta = cache.read_tensors(path)
    cache.write_tensors(path, {**tensors, "pixel_latent": tensors["pixel_latent"] * math.nan}, meta)
    result = train_toy(tmp_path / "a", "--cache_dir", tmp_path / "cache", "--save_every", 1)
    assert result.status == 1 and is_one_line(result.errors[-1], sample["name"], "step 2")
    assert [r["step"] for r in log_of(tmp_path / "a")] == [1] and all(
        v.isfinite().all() for v in lora_of(tmp_path / "a" / "checkpoint-000001").values()
    )


def test_plans_cover_every_sample_within_the_budget():
    rng = np.random.default_rng(0)
    for n in (1, 2, 7, 40):
        lengths = rng.integers(1, 300, n).tolist()
        packs, batches, shares = plan_packs(lengths, 400), plan_padded(lengths, 400), deal_to_ranks(lengths, 128, 4)
        for plan in (packs, batches, shares):
            assert sorted(i for part in plan for i in part) == list(range(n))
        assert all(sum(lengths[i] for i in p) <= 400 for p in packs)
        assert all(max(lengths[i] for i in b) * len(b) <= 400 for b in batches)
        assert len(packs) <= 1.23 * math.ceil(sum(lengths) / 400) + 1  # first-fit decreasing: 11/9 of the optimum
    cost = lambda share: sum(lengths[i] * (6 * 128 + lengths[i]) for i in share)
    assert max(map(cost, shares)) <= 1.1 * sum(map(cost, shares)) / 4


# ---- chapter 5: bench.py ---------------------------------------------------------------------------------------------


BENCH = ["--preset", "quick", "--rounds", 1]


@pytest.fixture(scope="module")
def benched():
    return run_script("bench.py", *BENCH)


def test_bench_times_only_what_agrees(monkeypatch, benched):
    """Every way gives the same loss and gradients, or there is no table."""
    ways = ("packed", "padded", "sorted", "single", "stock")
    assert all(re.search(rf"^{way} ", benched.out, re.M) for way in ways)
    real = rope_patch.run_padded
    monkeypatch.setattr(rope_patch, "run_padded", lambda *args: [x + 0.5 for x in real(*args)])
    assert is_one_line(run_script("bench.py", *BENCH).errors[0], "padded")


def test_bench_counts_flops(benched):
    """Of the real 60 blocks at 1024 * 1024 with one control and 500 tokens of text, as counted by hand: 431 TFLOP, with
    every block recomputed 605. Of the small model, as torch counts them while they run, modulation left out."""
    script = benched.globals
    samples, op = script["make_samples"](script["PRESETS"]["mixed"]), torch.ops.aten
    cpu_attention = {  # torch does not count this kernel: two products, backward five
        op._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 4 * prod(q) * k[2],
        op._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, *__, **___: 10 * prod(q) * k[2]}
    for way in ("single", "packed"):
        with FlopCounterMode(display=False, custom_mapping=cpu_attention) as counter:
            script["step"](way, script["models"], samples)
        counted = script["flops_of"](way, script["batches_of"](samples, way))
        print(f"{way}: {counted / counter.get_total_flops():.3f} of what torch counts")
        assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)
    script["args"].size = "full"
    assert script["flops"]([(8192, 500)]) == pytest.approx(431e12, rel=0.005)
    assert script["flops"]([(8192, 500)], checkpointed=60) == pytest.approx(605e12, rel=0.005)


# ---- chapter 6: faults -----------------------------------------------------------------------------------------------
# Kills, signals, full disks, damaged files, two runs at one folder: nothing finished is lost, nothing wrong gets in.

FORK_SERVER = """
import json, os, resource, runpy, sys, time, traceback
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import cache, predict  # and all that train.py imports
print("ready", flush=True)
for line in sys.stdin:
    what, *given = json.loads(line)
    if what == "wait":
        print(os.waitstatus_to_exitcode(os.waitpid(given[0], 0)[1]), flush=True)
        continue
    script, sys.argv[1:], env, prelude, output = given
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    os.environ.update(env)
    status = 0
    try:
        exec(prelude)
        modules = {"cache.py": cache.main, "predict.py": predict.main}
        modules.get(os.path.basename(script), lambda: runpy.run_path(script, run_name="__main__"))()
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        print(e.code if isinstance(e.code, str) else "")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)
"""


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """start(script, *flags) -> a process of its own, to be killed: pid, wait() -> status (-9 of SIGKILL), output().
    Forked after the imports, so that it costs less than a second. `prelude`: Python that runs in it first."""
    folder = tmp_path_factory.mktemp("output")
    server = subprocess.Popen([sys.executable, "-c", FORK_SERVER, str(HERE)], stdin=subprocess.PIPE, text=True,
                              stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    server.stdout.readline()

    def ask(*what):
        print(json.dumps(what), file=server.stdin, flush=True)
        return int(server.stdout.readline())

    def start(script, *flags, env={}, prelude=""):
        output = folder / f"{len(list(folder.iterdir()))}.txt"
        output.touch()
        pid = ask("start", str(HERE / script), list(map(str, flags)), env, prelude, str(output))
        return SimpleNamespace(pid=pid, wait=lambda: ask("wait", pid), output=output.read_text)
    yield start
    server.stdin.close()
    server.wait()


def start_ranks(start, *flags, preludes=("", ""), script="train.py"):
    """train.py with a process per prelude, as torchrun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = dict(WORLD_SIZE=str(len(preludes)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return [start(script, *flags, env=env | {"RANK": str(n)}, prelude=p) for n, p in enumerate(preludes)]


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A dataset of 5 samples and its cache; flags of cache.py, and of a training of 12 steps on it."""
    folder = tmp_path_factory.mktemp("small")
    for n in range(5):
        add_item(folder / "data", f"{n}", [(64, 64 + 32 * (n % 2)), (64, 64)])
    flags = ["--data", folder / "data", *EXACT, "--device", "cpu"]
    assert run_script("cache.py", *flags, "--cache_dir", folder / "cache").status == 0
    training = ["--data", "none", "--cache_dir", folder / "cache", "--val_data", *EXACT, "--device", "cpu",
                "--max_steps", 12, "--save_every", 2, "--batch_size", 2, "--lora_rank", 2, "--lora_targets", "to_q",
                "to_v", "--lr_scheduler", "constant", "--warmup_steps", 4]
    return SimpleNamespace(folder=folder, cache=folder / "cache", cache_flags=flags, flags=training)


@pytest.fixture(scope="session")
def unbroken(small, start, tmp_path_factory):
    """That training, left alone -> its folder and seconds."""
    out_dir = tmp_path_factory.mktemp("unbroken") / "run"
    t0 = time.monotonic()
    assert start("train.py", *small.flags, "--out_dir", out_dir).wait() == 0
    return SimpleNamespace(out_dir=out_dir, seconds=time.monotonic() - t0)


def assert_same_run(out_dir, unbroken):
    """Log and final LoRA, bit for bit; finished; nothing left behind."""
    assert curve(log_of(out_dir)) == curve(log_of(unbroken.out_dir))
    a, b = lora_of(out_dir), lora_of(unbroken.out_dir)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert (out_dir / "DONE").exists() and not list(out_dir.rglob(".tmp-*"))


def assert_checkpoints_whole(out_dir):
    for path in out_dir.glob("checkpoint-*/*.safetensors"):
        cache.read_tensors(path, "lora_adapter_metadata" if path.name == predict.LORA_FILE else "json")


def steps_of(out_dir):
    return sorted(int(p.name[-6:]) for p in out_dir.glob("checkpoint-*"))


# ---- kill -9 ----

def test_cache_killed_at_any_instant_loses_and_repeats_nothing(tmp_path, small, start):
    """G1. After each kill every file under a final name is whole, and what is finished is never written again."""
    whole = {p.relative_to(small.cache): p.read_bytes() for p in small.cache.glob("*/*.safetensors")}
    t0 = time.monotonic()
    assert start("cache.py", *small.cache_flags, "--cache_dir", tmp_path / "timed").wait() == 0
    seconds = time.monotonic() - t0
    rng, kills, caches, seen = random.Random(0), 0, 0, {}
    while kills < OPTIONS["kills"] or seen:
        cache_dir = tmp_path / f"{caches}"
        process = start("cache.py", *small.cache_flags, "--cache_dir", cache_dir)
        if kills < OPTIONS["kills"]:
            time.sleep(rng.uniform(0, seconds))
            os.kill(process.pid, signal.SIGKILL)
        status = process.wait()
        kills += status == -9
        for path in cache_dir.glob("*/*.safetensors"):
            cache.read_tensors(path, key=path.stem)
            assert seen.setdefault(path, path.stat().st_mtime_ns) == path.stat().st_mtime_ns, "encoded again"
        if status == 0:
            assert {p.relative_to(cache_dir): p.read_bytes() for p in cache_dir.glob("*/*.safetensors")} == whole
            assert not list(cache_dir.rglob(".tmp-*"))
            caches, seen = caches + 1, {}
        else:
            assert status == -9, process.output()
    print(f"{kills} kills of cache.py in {caches} caches: no corrupt file, nothing encoded twice")


def test_training_killed_at_any_instant_ends_as_the_unbroken_run(tmp_path, small, start, unbroken):
    """G2. Steps, losses, learning rates, gradient norms and the final LoRA, bit for bit."""
    rng, kills, runs = random.Random(0), 0, 0
    while kills < OPTIONS["kills"] or (tmp_path / f"{runs}").exists():
        out_dir = tmp_path / f"{runs}"
        resume = ["--resume"] if (out_dir / "log.jsonl").exists() else []
        process = start("train.py", *small.flags, "--out_dir", out_dir, *resume)
        if kills < OPTIONS["kills"]:
            time.sleep(rng.uniform(0, 0.8 * unbroken.seconds))
            os.kill(process.pid, signal.SIGKILL)
        status = process.wait()
        kills += status == -9
        assert_checkpoints_whole(out_dir)
        if status == 0:
            assert_same_run(out_dir, unbroken)
            runs += 1
        else:
            assert status == -9, process.output()
    print(f"{kills} kills of train.py in {runs} runs: all end as the unbroken one")


@pytest.mark.parametrize("place", [".tmp-checkpoint-000004", "checkpoint-000004"])
def test_a_checkpoint_killed_while_it_is_written_is_none(tmp_path, small, start, unbroken, place):
    """Before its last file, or before the folder, gets its final name. And the log ends in rubbish, as after a power
    loss."""
    out_dir = tmp_path / "run"
    process = start("train.py", *small.flags, "--out_dir", out_dir, prelude=f"""
replace = os.replace
def killed(a, b):
    if "{place}" in (os.path.basename(b), os.path.basename(os.path.dirname(b))) and "weights" not in str(b):
        os.kill(os.getpid(), 9)
    replace(a, b)
os.replace = killed""")
    assert process.wait() == -9 and steps_of(out_dir) == [2] and len(log_of(out_dir)) == 4
    with open(out_dir / "log.jsonl", "ab") as f:
        f.write(bytes(100) + b'\n"step"}\n{"st')
    (out_dir / ".tmp-checkpoint-000001").mkdir()
    (out_dir / ".tmp-1-host-log.jsonl.part").touch()
    process = start("train.py", *small.flags, "--out_dir", out_dir, "--resume")
    assert process.wait() == 0 and "after step 2" in process.output(), process.output()
    assert_same_run(out_dir, unbroken)


def test_a_file_is_on_the_disk_before_its_name_and_its_name_before_the_call_returns(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    kind = lambda fd: "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(kind(fd)) or fsync(fd))
    unfinished = []

    def rename(a, b):
        calls.append("rename")
        unfinished.extend(tmp_path.glob("*.safetensors"))
        replace(a, b)
    monkeypatch.setattr(os, "replace", rename)
    cache.write_file(tmp_path / "f.safetensors", b"x")
    assert calls == ["file", "rename", "folder"] and not unfinished


def test_the_log_is_on_the_disk_before_the_checkpoint_is(tmp_path, small, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append(str(b)) or replace(a, b))
    run = tmp_path / "run"
    assert run_script("train.py", *small.flags, "--out_dir", run, "--max_steps", 1).status == 0
    renamed = calls.index(str(run / "checkpoint-000001"))
    assert str(run / "log.jsonl") in calls[calls.index(str(run / "log.jsonl")) + 1:renamed]  # (first it is created)
    assert calls[renamed + 1] == str(run)


def test_orphans_are_swept_and_the_files_of_the_living_are_not(tmp_path, start, small):
    dead = start("cache.py", "-h")
    dead.wait()
    mine, theirs, other, old = [tmp_path / f".tmp-{name}-f.safetensors.part" for name in (
        f"{os.getpid()}-{cache.HOST}", f"{dead.pid}-{cache.HOST}", f"{dead.pid}-otherhost", f"{dead.pid}-otherhost2")]
    for path in (mine, theirs, other, old, tmp_path / "f.safetensors"):
        path.write_bytes(b"half")
    os.utime(old, (0, time.time() - 3700))
    cache.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, other, tmp_path / "f.safetensors"])
    (small.cache / "text" / theirs.name).write_bytes(b"half")
    assert run_script("cache.py", *small.cache_flags, "--cache_dir", small.cache).status == 0
    assert not list(small.cache.rglob(".tmp-*"))


# ---- signals ----

def test_a_signal_ends_a_training_after_the_step_with_a_checkpoint(tmp_path, small, start, unbroken):
    """Two of each kind, the second ones while the checkpoint is being written (each fsync takes long here); status 0,
    no DONE, and the resumed run is the unbroken one."""
    slow = "fsync = os.fsync; os.fsync = lambda fd: time.sleep(0.05) or fsync(fd)"
    out_dir = tmp_path / "run"
    for n, number in enumerate((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)):
        process = start("train.py", *small.flags, "--out_dir", out_dir, "--save_every", 100, *["--resume"] * (n > 0),
                        prelude=slow)
        before = max(steps_of(out_dir), default=0)
        until(lambda: (out_dir / "log.jsonl").exists() and len(log_of(out_dir)) > before + 1)
        os.kill(process.pid, number)
        until(lambda: list(out_dir.glob(".tmp-checkpoint-*")) or max(steps_of(out_dir), default=0) > before)
        os.kill(process.pid, number)
        assert process.wait() == 0 and "stopped by a signal" in process.output(), process.output()
        assert not (out_dir / "DONE").exists() and max(steps_of(out_dir)) == log_of(out_dir)[-1]["step"] < 12
        assert_checkpoints_whole(out_dir)
    assert start("train.py", *small.flags, "--out_dir", out_dir, "--resume").wait() == 0
    assert_same_run(out_dir, unbroken)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, small, start):
    ranks = start_ranks(start, *small.flags, "--out_dir", tmp_path / "run", "--max_steps", 2000, "--save_every", 2000)
    until(lambda: (tmp_path / "run/log.jsonl").exists() and len(log_of(tmp_path / "run")) > 1)
    os.kill(ranks[1].pid, signal.SIGUSR1)
    assert [r.wait() for r in ranks] == [0, 0], [r.output() for r in ranks]
    assert steps_of(tmp_path / "run") == [log_of(tmp_path / "run")[-1]["step"]]


def test_a_signal_ends_cache_py_after_the_file_at_hand(tmp_path, small, start):
    slow = "real = cache.write_tensors; cache.write_tensors = lambda *args: time.sleep(0.2) or real(*args)"
    files = lambda: {p: p.stat().st_mtime_ns for p in tmp_path.glob("c/*/*.safetensors")}
    process = start("cache.py", *small.cache_flags, "--cache_dir", tmp_path / "c", prelude=slow)
    until(files)
    before = len(files())
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    assert process.wait() == 0 and "stopped by a signal" in process.output() and "complete" not in process.output()
    done = files()
    assert before <= len(done) <= before + 2 and not (tmp_path / "c/index.json").exists()
    assert not list(tmp_path.rglob(".tmp-*"))
    assert start("cache.py", *small.cache_flags, "--cache_dir", tmp_path / "c").wait() == 0
    assert len(files()) == 10 and done.items() <= files().items()


# ---- a full disk, no memory ----

def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_file(tmp_path, small, start):
    limit = max(p.stat().st_size for p in small.cache.glob("*/*")) - 1
    full = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    process = start("cache.py", *small.cache_flags, "--cache_dir", tmp_path / "c", prelude=full)
    assert process.wait() == 1
    line = re.search(r"error: .*", process.output())[0]
    assert is_one_line(line, tmp_path / "c", ".safetensors: ", "bytes") and "Traceback" not in process.output()
    assert not list((tmp_path / "c").rglob(".tmp-*"))
    for path in tmp_path.glob("c/*/*.safetensors"):
        cache.read_tensors(path, key=path.stem)


def test_a_checkpoint_that_does_not_fit_ends_the_run_and_the_old_one_stays(tmp_path, small, start, unbroken,
                                                                           monkeypatch):
    out_dir = tmp_path / "run"
    assert start("train.py", *small.flags, "--out_dir", out_dir, "--max_steps", 4).wait() == 0
    limit = min(p.stat().st_size for p in out_dir.glob("checkpoint-*/*")) - 1
    process = start("train.py", *small.flags, "--out_dir", out_dir, "--resume",
                    prelude=f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))")
    assert process.wait() == 1 and steps_of(out_dir) == [2, 4] and not (out_dir / "DONE").exists()
    assert is_one_line(re.search(r"error: .*", process.output())[0], out_dir) and "Traceback" not in process.output()
    assert_checkpoints_whole(out_dir)
    assert start("train.py", *small.flags, "--out_dir", out_dir, "--resume").wait() == 0
    assert_same_run(out_dir, unbroken)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    result = run_script("train.py", *small.flags, "--out_dir", tmp_path / "other")
    assert result.status == 1 and is_one_line(result.errors[0], tmp_path / "other", "GB")


def test_out_of_memory_names_samples_and_keeps_the_checkpoint(tmp_path, small, monkeypatch):
    real, calls = rope_patch.run_packed, []

    def run_packed(*args):
        calls.append(args)
        if len(calls) == 4:
            raise torch.OutOfMemoryError
        return real(*args)
    monkeypatch.setattr(rope_patch, "run_packed", run_packed)
    result = run_script("train.py", *small.flags, "--out_dir", tmp_path / "run")
    assert result.status == 1 and is_one_line(result.errors[0], "--max_tokens", "step 4", "--resume")
    assert steps_of(tmp_path / "run") == [2]
    assert_checkpoints_whole(tmp_path / "run")


# ---- resume ----

DAMAGED_CHECKPOINTS = {  # of 12, the newest; 10 is the one before
    "bit": lambda new, old: damage_tensors(new / "optimizer.safetensors"),
    "cut": lambda new, old: (new / predict.LORA_FILE).write_bytes((new / predict.LORA_FILE).read_bytes()[:-1]),
    "gone": lambda new, old: (new / "optimizer.safetensors").unlink(),
    "of another step": lambda new, old: shutil.copy(old / predict.LORA_FILE, new),
    "renamed": lambda new, old: shutil.rmtree(new) or shutil.copytree(old, new),
    "empty folder": lambda new, old: shutil.rmtree(new) or new.mkdir(),
}


@pytest.mark.parametrize("how", DAMAGED_CHECKPOINTS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, small, start, unbroken, how):
    out_dir = shutil.copytree(unbroken.out_dir, tmp_path / "run")
    for name in ("DONE", predict.LORA_FILE):
        (out_dir / name).unlink()
    DAMAGED_CHECKPOINTS[how](out_dir / "checkpoint-000012", out_dir / "checkpoint-000010")
    process = start("train.py", *small.flags, "--out_dir", out_dir, "--resume")
    assert process.wait() == 0, process.output()
    assert re.search(r"checkpoint-000012.*going back", process.output()) and "after step 10" in process.output()
    assert_same_run(out_dir, unbroken)


def test_a_run_without_a_whole_checkpoint(tmp_path, small, start, unbroken):
    """All damaged: an error, for a person to decide. None written yet, as after an early kill: from the start."""
    out_dir = shutil.copytree(unbroken.out_dir, tmp_path / "run")
    for path in out_dir.glob("checkpoint-*/optimizer.safetensors"):
        path.write_bytes(b"")
    process = start("train.py", *small.flags, "--out_dir", out_dir, "--resume")
    assert process.wait() == 1 and is_one_line(re.search(r"error: .*", process.output())[0], out_dir)
    for path in out_dir.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.name != "log.jsonl" and path.unlink()
    process = start("train.py", *small.flags, "--out_dir", out_dir, "--resume")
    assert process.wait() == 0, process.output()
    assert_same_run(out_dir, unbroken)


def test_other_settings_are_refused_before_anything_slow(tmp_path, small, unbroken, monkeypatch):
    monkeypatch.setattr(predict, "load_transformer", lambda *_: pytest.fail("model loaded"))
    monkeypatch.setattr(cache, "find_model", lambda *_: pytest.fail("model looked for"))
    changes = dict(lr=0.5, lora_rank=4, lora_targets="to_k", batch_size=3, seed=1, loss_norm="token", weight_decay=0.5)
    for name, value in changes.items():
        result = run_script("train.py", *small.flags, "--out_dir", unbroken.out_dir, "--resume", f"--{name}", value)
        assert result.status == 1 and is_one_line(result.errors[0], f"{name}: "), result.err
        assert not [other for other in changes if other != name and f"{other}: " in result.errors[0]]


def test_other_data_is_refused(tmp_path, small, unbroken):
    other = add_item(shutil.copytree(small.folder / "data", tmp_path / "data"), "new")
    assert run_script("cache.py", "--data", other, *small.cache_flags[2:], "--cache_dir", tmp_path / "c").status == 0
    result = run_script("train.py", *small.flags, "--cache_dir", tmp_path / "c", "--out_dir", unbroken.out_dir,
                        "--resume", "--max_steps", 14)
    assert result.status == 1 and is_one_line(result.errors[0], "data: ")


@pytest.mark.parametrize("items", [5, 1] if FULL else [5])
def test_a_run_may_go_on_with_another_number_of_ranks(tmp_path, small, start, items):
    """1 -> 2 -> 1 processes, 3 samples a step, of 5 or of a single one: losses to 1e-6."""
    cache_dir = small.cache
    if items == 1:
        cache_dir = tmp_path / "c"
        add_item(tmp_path / "data", "only")
        run_script("cache.py", "--data", tmp_path / "data", *small.cache_flags[2:], "--cache_dir", cache_dir)
    flags = [*small.flags, "--cache_dir", cache_dir, "--batch_size", 3]
    assert start("train.py", *flags, "--out_dir", tmp_path / "one", "--max_steps", 9).wait() == 0
    flags += ["--out_dir", tmp_path / "two"]
    assert start("train.py", *flags, "--max_steps", 3).wait() == 0
    ranks = start_ranks(start, *flags, "--max_steps", 6, "--resume")
    assert [r.wait() for r in ranks] == [0, 0], [r.output() for r in ranks]
    assert start("train.py", *flags, "--max_steps", 9, "--resume").wait() == 0
    one, two = log_of(tmp_path / "one"), log_of(tmp_path / "two")
    assert [r["step"] for r in two] == list(range(1, 10))
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-6)


# ---- several processes ----

def test_two_runs_do_not_share_a_folder_and_the_dead_hold_no_lock(tmp_path, small, start, unbroken):
    out_dir = tmp_path / "run"
    slow = "fsync = os.fsync; os.fsync = lambda fd: time.sleep(0.1) or fsync(fd)"
    first = start("train.py", *small.flags, "--out_dir", out_dir, prelude=slow)
    until(lambda: steps_of(out_dir))
    second = start("train.py", *small.flags, "--out_dir", out_dir, "--resume")
    assert second.wait() == 1 and is_one_line(re.search(r"error: .*", second.output())[0], out_dir, "another run")
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -9
    assert start("train.py", *small.flags, "--out_dir", out_dir, "--resume").wait() == 0
    assert_same_run(out_dir, unbroken)


def test_a_run_folder_that_cannot_be_written_is_told_before_anything_slow(tmp_path, small, monkeypatch):
    monkeypatch.setattr(cache, "find_model", lambda *_: pytest.fail("model looked for"))
    (tmp_path / "file").write_text("")
    result = run_script("train.py", *small.flags, "--out_dir", tmp_path / "file/run")
    assert result.status == 1 and is_one_line(result.errors[0], tmp_path / "file/run")


def test_three_writers_and_a_reader_of_one_cache(tmp_path, small, start):
    """G6. No bad read, nothing left behind, the bytes of one writer."""
    writers = [start("cache.py", *small.cache_flags, "--cache_dir", tmp_path) for _ in range(3)]
    state = lambda process: Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1][0]
    reads = 0
    while any(state(w) != "Z" for w in writers):
        for path in tmp_path.glob("*/*.safetensors"):
            cache.read_tensors(path, key=path.stem)
            reads += 1
        if (tmp_path / "index.json").exists():
            assert len(cache.load_index(tmp_path)["samples"]) == 5
    assert [w.wait() for w in writers] == [0, 0, 0], [w.output() for w in writers]
    print(f"{reads} reads, none bad")
    assert reads > 10 and not list(tmp_path.rglob(".tmp-*"))
    files = [p.relative_to(small.cache) for p in small.cache.glob("*/*.safetensors")]
    assert files and all((tmp_path / f).read_bytes() == (small.cache / f).read_bytes() for f in files)


def test_a_rank_that_fails_says_why_and_the_other_ends_too(tmp_path, small, start):
    fail = """
def load_sample(*args):
    raise cache.InputError("b.png: spoiled; mend it")
cache.load_sample = load_sample"""
    t0 = time.monotonic()
    ranks = start_ranks(start, *small.flags, "--out_dir", tmp_path / "run", preludes=["", fail])
    assert [r.wait() for r in ranks] == [1, 1] and time.monotonic() - t0 < 30
    assert ranks[1].output().splitlines()[-1] == "error: b.png: spoiled; mend it"


def test_a_dead_rank_ends_the_job_and_is_named(tmp_path, small):
    """G9: under torchrun, in less than 30 s."""
    out_dir = tmp_path / "run"
    job = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", HERE / "train.py",
         *map(str, small.flags), "--max_steps", "100000", "--save_every", "100000", "--out_dir", out_dir],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    until(lambda: (out_dir / "log.jsonl").exists() and len(log_of(out_dir)) > 2 or job.poll())
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    victim, = [int(pid) for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    t0 = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, err = job.communicate(timeout=30)
    print(f"ended after {time.monotonic() - t0:.1f} s")
    assert job.returncode != 0 and re.search(r"rank *: 1 ", err) and "Signal 9" in err


# ---- damaged bits ----

@pytest.mark.parametrize("file", ["latents", "text", predict.LORA_FILE, "optimizer.safetensors"])
def test_no_damage_to_a_file_is_silent(tmp_path, small, unbroken, file):
    """G5: cuts, flipped bits, zeroed 512-byte blocks, and bits of the header, all with --fuzz."""
    root = small.cache / file if file in ("latents", "text") else unbroken.out_dir / "checkpoint-000012"
    source = min(root.glob("*.safetensors" if file in ("latents", "text") else file))
    key = source.stem if file in ("latents", "text") else None
    kind = "lora_adapter_metadata" if file == predict.LORA_FILE else "json"
    path, sound = tmp_path / source.name, source.read_bytes()
    path.write_bytes(sound)
    cache.read_tensors(path, kind, key)
    rng, n = random.Random(0), OPTIONS["fuzz"] or 30
    header = range(8 * (8 + int.from_bytes(sound[:8], "little")))
    damages = [sound[:rng.randrange(len(sound))] for _ in range(n)]
    damages += [flip(rng.randrange(8 * len(sound)))(sound) for _ in range(n)]
    for place in (rng.randrange(len(sound) // 512) * 512 for _ in range(n)):
        damages.append(sound[:place] + bytes(len(sound[place:place + 512])) + sound[place + 512:])
    bits = header if OPTIONS["fuzz"] else rng.sample(header, 100)
    for damaged in itertools.chain(damages, (flip(bit)(sound) for bit in bits)):
        if damaged == sound:  # a block of zeros
            continue
        path.write_bytes(damaged)
        with refused(path):
            cache.read_tensors(path, kind, key)
    print(f"{file}: {len(damages) + len(bits)} damages, none silent")


# ---- predict.py --jobs ----

def test_a_job_that_fails_late_loses_no_other_and_a_second_call_draws_only_it(tmp_path, monkeypatch):
    """Pictures that vanish or are cut between planning and drawing."""
    for n in range(4):
        save(draw_picture(seed=n), tmp_path / f"{n}.png")
    rows = [dict(image=f"{n}.png", prompt="add a red border", out=f"{n}.png", num_inference_steps=2) for n in range(4)]
    (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    real = predict.load_encoders

    def call(*flags, load=real):
        with monkeypatch.context() as patch:
            patch.setattr(predict, "load_encoders", load)
            return run_script("predict.py", "--jobs", tmp_path / "jobs.jsonl", "--out_dir", out, *ON_DEVICE, *flags)

    def spoil(*args):
        (tmp_path / "1.png").unlink()
        (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:2000])
        real(*args)
    (out / "3.png").mkdir(parents=True)  # where a picture should go
    result = call(load=spoil)
    assert result.status == 1 and len(result.errors) == 3 and all(map(is_one_line, result.errors)), result.err
    for name in ("1.png: ", "2.png: ", "3.png: "):
        assert name in result.err
    assert sorted(p.name for p in out.glob("*.png")) == ["0.png", "3.png"]
    first = (out / "0.png").stat().st_mtime_ns

    (out / "3.png").rmdir()
    for n in (1, 2):
        save(draw_picture(seed=n), tmp_path / f"{n}.png")
    result = call()
    assert result.status == 0 and "1 of 4 pictures are there already" in result.out and "/0.png:" not in result.out
    times = {p.name: p.stat().st_mtime_ns for p in out.glob("[0-3].png")}
    assert len(times) == 4 and times["0.png"] == first
    result = call(load=lambda *_: pytest.fail("models loaded"))
    assert result.status == 0 and "4 of 4" in result.out

    (out / "2.png").write_bytes((out / "2.png").read_bytes()[:-30])  # a damaged result is drawn again
    save(draw_picture(seed=9), tmp_path / "3.png")  # as one is whose picture has changed
    result = call()
    assert result.status == 0 and "2 of 4" in result.out
    assert "0 of 4" in call("--seed", 1).out or "already" not in call("--seed", 2).out


@pytest.mark.parametrize("many", [True, False])
def test_a_place_where_no_picture_can_go_is_told_before_a_model_is_loaded(tmp_path, monkeypatch, many):
    monkeypatch.setattr(predict, "load_encoders", lambda *_: pytest.fail("models loaded"))
    (tmp_path / "file").write_text("")
    image = save(draw_picture(), tmp_path / "a.png")
    flags = ["--out_dir"] if many else ["--image", image, "--prompt", "x", "--out"]
    result = run_script("predict.py", *flags, tmp_path / "file/a.png", *ON_DEVICE)
    assert result.status == 1 and is_one_line(result.errors[0], tmp_path / "file"), result.err


# ---- chapter 7: the real model fits ----------------------------------------------------------------------------------
# Several processes, FSDP2, blocks in host memory, low-bit bases, --plan: same numbers, less memory, and how much.

def needs(quantize):
    """nf4 comes from a package that requirements.txt does not name."""
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")


def show(what, error, limit):
    print(f"{what}: {error:.2g} (limit {limit:.2g})")


def losses(out_dir):
    return [r["loss"] for r in log_of(out_dir)]


# every pair of the values of any two columns stands in one of these rows
COMBINATIONS = [
    # batching, processes, quantize, checkpointed blocks, offload
    ("packed", "1", "none", 0, 0), ("padded", "2", "none", 3, 3), ("packed", "fsdp", "none", 3, 3),
    ("padded", "1", "int8", 3, 3), ("packed", "2", "int8", 0, 0), ("padded", "fsdp", "int8", 0, 3),
    ("packed", "1", "fp8", 0, 3), ("padded", "2", "fp8", 3, 0), ("packed", "fsdp", "fp8", 3, 0),
    ("padded", "1", "nf4", 3, 0), ("packed", "2", "nf4", 0, 3), ("padded", "fsdp", "nf4", 0, 0),
]


def test_every_pair_of_values_is_among_the_combinations():
    columns = list(zip(*COMBINATIONS))
    for a, b in itertools.combinations(columns, 2):
        assert set(zip(a, b)) == set(itertools.product(a, b))


@pytest.fixture(scope="module")
def plain(small, start, tmp_path_factory):
    """plain(quantize) -> losses and LoRA of 5 steps, packed, in one process, nothing recomputed or offloaded."""
    @functools.cache
    def run(quantize):
        out_dir = tmp_path_factory.mktemp("plain") / "run"
        process = start("train.py", *small.flags, *FIVE_STEPS, "--quantize", quantize, "--out_dir", out_dir)
        assert process.wait() == 0, process.output()
        return losses(out_dir), lora_of(out_dir)
    return run


FIVE_STEPS = ["--max_steps", 5, "--batch_size", 5, "--lr", 1e-3, "--max_tokens", 200]


@pytest.mark.parametrize("batching, processes, quantize, checkpointed, offload", COMBINATIONS)
def test_combinations_agree_with_the_plain_run(tmp_path, small, start, plain, batching, processes, quantize,
                                               checkpointed, offload):
    """5 samples a step in packs of 1 to 3, which do not divide among processes. The format's own error is another
    test's business: here the plain run has the same base."""
    needs(quantize)
    flags = [*small.flags, *FIVE_STEPS, "--batching", batching, "--quantize", quantize, "--gradient_checkpointing",
             checkpointed, "--offload", offload, "--out_dir", tmp_path / "run", *["--fsdp"] * (processes == "fsdp")]
    ranks = [start("train.py", *flags)] if processes == "1" else start_ranks(start, *flags)
    assert not any([r.wait() for r in ranks]), [r.output() for r in ranks]
    want, lora = plain(quantize)
    got = losses(tmp_path / "run")
    show("combination", max(abs(a / b - 1) for a, b in zip(got, want)), 1e-5)
    assert got == pytest.approx(want, rel=1e-5) and len(set(got)) == 5
    copied = [r["copied_from_host"] for r in log_of(tmp_path / "run")]
    assert all(copied) if offload else not any(copied)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_is_data_parallel_bit_for_bit_and_takes_turns(tmp_path, small, start, ranks):
    """--fsdp trains the same LoRA as data parallel processes, with uneven packs, and with a process that has nothing to
    do; a run may change from the one to the other, and to another number of processes."""
    flags = [*small.flags, "--batch_size", 3, "--max_tokens", 100, "--max_steps", 4]

    def run(out_dir, n, *more):
        processes = start_ranks(start, *flags, *more, "--out_dir", tmp_path / out_dir, preludes=[""] * n)
        assert not any([p.wait() for p in processes]), [p.output() for p in processes]
        return losses(tmp_path / out_dir), (tmp_path / out_dir / predict.LORA_FILE).read_bytes()
    dp, fsdp = run("dp", ranks), run("fsdp", ranks, "--fsdp")
    assert dp == fsdp
    one = run("one", 1)[0]
    assert fsdp[0] == pytest.approx(one, rel=1e-6)
    run("turns", 2, "--max_steps", 2, "--fsdp")
    assert run("turns", ranks, "--resume")[0] == pytest.approx(one, rel=1e-6)
    shares = [len(deal_to_ranks([50, 90, 50], 160, ranks)[n]) for n in range(ranks)]
    assert len(set(shares)) > 1 # or the test would not test uneven ones


@pytest.mark.parametrize("packs, n", [([[0, 1, 2], [3]], 4), ([[0]], 3), ([], 2), ([[0, 1], [2]], 2)])
def test_packs_are_evened_out(packs, n):
    even = rope_patch.even_packs(packs, n)
    assert len(even) == n and sorted(sum(even, [])) == sorted(sum(packs, []))
    assert sum(not p for p in even) == max(0, n - len(sum(packs, [])))


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


@pytest.mark.parametrize("outliers", [False, True], ids=["plain", "outliers"])
@pytest.mark.parametrize("quantize, limits", [("int8", (0.03, 0.06)), ("fp8", (0.12, 0.25)), ("nf4", (0.35, 0.7))])
def test_a_low_bit_base_errs_by_what_its_format_explains(quantize, limits, outliers):
    """Outputs and LoRA gradients against the bf16 base, on a hot model, which makes any error large (bf16 itself is at
    0.013 and 0.031 from fp32). With outlier channels, which the rows of int8 feel most, up to ten times as much."""
    needs(quantize)
    want, got = [out_and_gradients(*hot_base(q, outliers)) for q in ("none", quantize)]
    for name, a, b, limit in zip(("outputs", "LoRA gradients"), got, want, limits):
        limit *= 10 if outliers and quantize == "int8" else 3 if outliers else 1
        error = rel(a, b)
        show(f"{quantize}, {name}", error, limit)
        assert 0 < error <= limit


@pytest.mark.parametrize("quantize", ["int8", "fp8", "nf4"])
def test_a_low_bit_layer_keeps_nothing_for_its_backward_pass(quantize):
    """And its gradient is that of the weight it stands for; its memory is that of its format."""
    needs(quantize)
    torch.manual_seed(0)
    linear = torch.nn.Linear(192, 64, dtype=torch.bfloat16)
    low = cache.LowBitLinear(linear, quantize)
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
    assert cache.model_bytes(torch.nn.Sequential(linear), quantize) == sum(p.nbytes for p in low.parameters())
    assert 0 < rel(low.unpacked(torch.float32), linear.weight.float()) < dict(int8=0.01, fp8=0.04, nf4=0.11)[quantize]


def test_fp8_matrices_are_multiplied_as_such_where_the_device_can(monkeypatch):
    """Rows of the input get their own scales: as near to the exact product as two e4m3 roundings allow."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(192, 64, dtype=torch.bfloat16)
    low, x = cache.LowBitLinear(linear, "fp8"), (torch.randn(2, 5, 192) * torch.rand(2, 5, 1)).bfloat16()
    slow, calls, real = low(x), [], torch._scaled_mm
    monkeypatch.setattr(cache, "has_fp8_matmul", lambda x: True)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    assert 0 < rel(low(x), slow) < 0.05 and calls == [1]


def test_low_bit_sampling_with_a_lora_and_blocks_in_host_memory(photos, trained):
    """predict.py's way: a LoRA loaded on the plain base, which is then packed and offloaded."""
    pictures = []
    for quantize, offload in (("none", 0), ("none", 2), ("int8", 0), ("int8", 3)):
        transformer = predict.load_transformer(TINY, "float32")
        predict.load_lora(transformer, trained)
        predict.place_transformer(transformer, "cpu", quantize, offload)
        with torch.no_grad():
            pictures.append(effect_of(transformer))
    plain, offloaded, low, low_offloaded = pictures
    assert rel(offloaded, plain) <= 1e-6 and rel(low_offloaded, low) <= 1e-6 and 1e-4 < rel(low, plain) < 0.03


def test_predict_py_draws_from_a_low_bit_base_in_host_memory(tmp_path, photos, trained):
    """The flags together, as a user gives them; the picture is near the plain one, and not the same."""
    flags = ["--image", photos[0], "--prompt", "make it blue", "--lora", trained, "--num_inference_steps", 2, *EXACT,
             "--target_pixels", "64*64", "--control_pixels", "64*64", "--device", "cpu"]
    pictures = []
    for n, more in enumerate(([], ["--quantize", "int8", "--quantize_text_encoder", "int8", "--offload", "all"])):
        result = run_script("predict.py", *flags, *more, "--out", tmp_path / f"{n}.png")
        assert result.status == 0, result.err
        pictures.append(np.asarray(Image.open(tmp_path / f"{n}.png"), int))
    difference = np.abs(pictures[0] - pictures[1])
    assert 0 < difference.mean() < 8 # levels of 255


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


@pytest.mark.parametrize("free, where", [(dict(cpu=2**40), "cuda:0 has 0.0 free"), ({"cuda:0": 2**40}, "cpu has 0.0")])
def test_too_little_memory_is_one_line_before_any_is_taken(monkeypatch, free, where):
    monkeypatch.setattr(predict, "free_bytes", lambda device: free.get(device, 0))
    with refused("--model", where, "--quantize"):
        predict.check_memory(torch.device("cuda:0"), 10**9, 10**9)


def test_a_dora_on_a_low_bit_base_is_refused(tmp_path, photos):
    """Its norms would be those of packed bytes."""
    assert train_toy(tmp_path / "run", "--dora").status == 0
    result = run_script("predict.py", "--image", photos[0], "--prompt", "a", "--lora", tmp_path / "run", "--quantize",
                        "int8", "--out", tmp_path / "x.png", "--num_inference_steps", 2, *EXACT, "--device", "cpu")
    assert result.status == 1 and is_one_line(result.errors[-1], "--quantize", "DoRA"), result.err
    assert train_toy(tmp_path / "again", "--dora", "--quantize", "int8").status == 2
    assert train_toy(tmp_path / "base", "--base_lora", tmp_path / "run", "--quantize", "int8").status == 1


def test_the_advice_on_memory_fits(tmp_path, data, monkeypatch, capsys):
    """Five blocks; with room for 2.6 of what one keeps, the advised number of recomputed blocks must not take more."""
    folder = copy_model(tmp_path / "model")
    config = {k: v for k, v in QwenImageTransformer2DModel.load_config(TINY / "transformer").items() if k[0] != "_"}
    QwenImageTransformer2DModel.from_config(config | dict(num_layers=5)).save_pretrained(folder / "transformer")
    result = run_script("train.py", "--model", folder, "--data", data, "--cache_dir", tmp_path / "c", "--out_dir",
                        tmp_path / "run", "--max_steps", 1, "--gradient_checkpointing", 5, *EXACT, "--device", "cpu",
                        "--target_pixels", "256*256", "--control_pixels", "256*256", "--max_tokens", 1)
    assert result.status == 0, result.err
    names = result.globals
    model = predict.load_transformer(folder, "float32", weights=False)
    predict.add_lora(model, **names["lora_config"])
    peak = functools.cache(lambda n: names["step_bytes"](model, names["sizes_of"]([0]), n))
    room = 2.6 * (peak(2) - peak(3))
    monkeypatch.setattr(predict, "free_bytes", lambda device: peak(5) + room)
    capsys.readouterr()
    names["advise_on_memory"]([0])
    advised = int(re.search(r"--gradient_checkpointing (\d)", capsys.readouterr().out)[1])
    assert advised < 5 and peak(advised) - peak(5) <= room


def effect_of(transformer):
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    prompt = torch.randn(9, transformer.config.joint_attention_dim, generator=torch.Generator().manual_seed(1))
    return rope_patch.run_packed(transformer, [x], [prompt], torch.tensor([0.5]), [[(1, 4, 4), (1, 4, 6)]])[0]


def test_copies_from_host_memory_are_what_is_counted_and_fall_with_the_samples_a_pack(tmp_path, small, monkeypatch):
    """The bytes that FSDP2 really gathers, against the log; four samples in one pack cost a quarter a sample."""
    gathered = []
    real = fsdp_param.FSDPParam.all_gather_inputs
    monkeypatch.setattr(fsdp_param.FSDPParam, "all_gather_inputs", property(
        lambda self: [gathered.append(t.nbytes) or t for t in real.fget(self)]))
    for max_tokens, passes in ((10_000, 1), (1, 4)):
        gathered.clear()
        result = run_script("train.py", *small.flags, "--max_steps", 1, "--batch_size", 4, "--offload", 2,
                            "--max_tokens", max_tokens, "--out_dir", tmp_path / str(passes))
        assert result.status == 0, result.err
        [record] = log_of(tmp_path / str(passes))
        assert record["copied_from_host"] == sum(gathered) == 2 * passes * gathered_once(gathered)
        assert "GB/img from host" in result.out


def gathered_once(gathered):
    """Two of the three blocks of tiny, in fp32."""
    blocks = predict.load_transformer(TINY, "float32").transformer_blocks
    return 2 * sum(p.nbytes for p in blocks[0].parameters())


def test_a_model_is_loaded_without_a_second_copy_in_memory(tmp_path, small, start):
    """In its files' dtype a model takes no memory until it is placed: its weights are mappings of the files."""
    folder = large_model(tmp_path, torch.bfloat16)
    prelude = f"""
from pathlib import Path
def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon"))
open("/proc/self/clear_refs", "w").write("5")
before = anonymous()
transformer = predict.load_transformer(Path({str(folder)!r}), "bfloat16")
print("MEMORY", anonymous() - before, sum(p.nbytes for p in transformer.parameters()) // 1024)
sys.exit(0)
"""
    process = start("train.py", prelude=prelude)
    assert process.wait() == 0, process.output()
    took, weighs = map(int, re.search(r"MEMORY (\d+) (\d+)", process.output()).groups())
    show("memory of a loaded model / its weights", took / weighs, 0.05)
    assert took <= 0.05 * weighs


def large_model(tmp_path, dtype):
    """tiny's folder with a transformer of d = 512."""
    folder = copy_model(tmp_path / "large")
    config = {k: v for k, v in QwenImageTransformer2DModel.load_config(TINY / "transformer").items() if k[0] != "_"}
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel.from_config(config | dict(
        num_layers=4, num_attention_heads=8, attention_head_dim=64, axes_dims_rope=[16, 24, 24]))
    model.to(dtype).save_pretrained(folder / "transformer")
    return folder


@pytest.mark.parametrize("checkpointed", [0, 2, 4] if FULL else [4])
def test_the_plan_s_memory_is_what_the_training_takes(tmp_path, start, checkpointed):
    """The growth of a process from its start to the peak of a step, d = 512, against what --plan adds up."""
    folder = large_model(tmp_path, torch.float32)
    cache_dir = tmp_path / "cache"
    for n, (h, w) in enumerate([(24, 24), (24, 32)]):
        write_v1_sample(cache_dir / f"{n}.safetensors", h, w)
    flags = ["--model", folder, "--data", "none", "--cache_dir", cache_dir, "--val_data", "--batch_size", 2, "--device",
             "cpu", *EXACT, "--max_steps", 1, "--gradient_checkpointing", checkpointed]
    planned = run_script("train.py", *flags, "--plan", "--out_dir", tmp_path / "none")
    assert planned.status == 0 and not (tmp_path / "none").exists(), planned.err
    [row] = re.findall(r"^ +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+).*as given", planned.out, re.M)
    prelude = """
import ctypes
ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed goes back at once
before = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmRSS"))
open("/proc/self/clear_refs", "w").write("5")
def peak():
    hwm = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
    print("PEAK", (hwm - before) * 1024, flush=True)
real_exit = os._exit
os._exit = lambda status: (peak(), real_exit(status))
"""
    process = start("train.py", *flags, "--out_dir", tmp_path / "run", prelude=prelude)
    assert process.wait() == 0, process.output()
    took = int(re.search(r"PEAK (\d+)", process.output())[1]) / 2**30
    show("planned / measured memory", float(row) / took, 1.15)
    assert float(row) == pytest.approx(took, rel=0.15)


def write_v1_sample(path, h, w, text=200):
    """A version 1.0 cache file of a target of h x w tokens and a control of the same size, random."""
    path.parent.mkdir(exist_ok=True)
    safetensors.torch.save_file(dict(
        pixel_latent=torch.randn(h * w, 64), control_latent=torch.randn(h * w, 64), prompt_embed=torch.randn(text, 64),
        height=torch.tensor(h * 16), width=torch.tensor(w * 16), height_control=torch.tensor(h * 16),
        width_control=torch.tensor(w * 16)), path)


def test_the_plan_of_the_real_model_needs_no_weights(tmp_path):
    """Only config files. 10 of its 60 blocks have 3.5 billion parameters; every way to save memory saves some."""
    folder = tmp_path / "real"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors", "data", "val", "known", "*.p*"))
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(
        num_layers=10, num_attention_heads=24, attention_head_dim=128, joint_attention_dim=3584,
        axes_dims_rope=[16, 56, 56])))
    result = run_script("train.py", "--plan", "--model", folder, "--data", TINY / "data", "--dtype", "bfloat16",
                        "--target_pixels", "256*256", "--control_pixels", "256*256", "--device", "cpu", "--val_data")
    assert result.status == 0, result.err
    assert "parameters: 3,442,768,448, of which 3,932,160 in the LoRA" in result.out and not result.err.strip()
    rows = [tuple(map(float, r)) for r in re.findall("^" + r" +([\d.]+)" * 5, result.out, re.M)]
    given, unchecked, int8, nf4, half, away, int8_away = rows
    base, block, unpacked = given[0], 339_806_208 * 2 / 2**30, 3072 * 18432 * 2 / 2**30 # GiB
    near = functools.partial(pytest.approx, abs=0.03)
    assert base == near(0.08 + 10 * block) and half[0] == near(base - 4 * block) and away[0] == near(base - 9 * block)
    assert int8[0] == near(base - 5 * block + unpacked) and nf4[0] == near(base - 7.19 * block + unpacked)
    # a block's 648 MiB are 1 GiB when each tensor is rounded up to a power of two, as torch pins memory
    assert (half[4], away[4], int8_away[4]) == (5, 10, 5) and unchecked[2] > 3 * given[2]
    assert not list(tmp_path.glob("cache*"))


def test_the_text_encoder_in_few_bits_is_another_text(data, tmp_path):
    """Its embeddings differ by what the format explains, and their files have other names; latents are shared."""
    make_cache(data, tmp_path / "c")
    before, (want, _) = set((tmp_path / "c").rglob("*.safetensors")), load(tmp_path / "c")
    assert make_cache(data, tmp_path / "c", "--quantize_text_encoder", "int8").status == 0
    new, (got, _) = set((tmp_path / "c").rglob("*.safetensors")) - before, load(tmp_path / "c")
    assert new and all(p.parent.name == "text" for p in new)
    error = rel(got["prompt_embed"], want["prompt_embed"])
    show("int8 text encoder", error, 0.05)
    assert 0 < error < 0.05


def test_the_encoders_are_never_on_the_device_together(data, tmp_path, monkeypatch):
    """All latents are encoded first; before the text encoder comes, the VAE is sent away."""
    order, load, move = [], cache.load_encoders, diffusers.AutoencoderKLQwenImage.to
    monkeypatch.setattr(cache, "load_encoders", lambda *args: order.append(args[-1]) or load(*args))
    monkeypatch.setattr(diffusers.AutoencoderKLQwenImage, "to",
                        lambda self, *args: order.append(args) or move(self, *args))
    make_cache(data, tmp_path / "c")
    assert order == [["vae"], ("cpu",), ["text"]]


# ---- chapter 8: predict.py every day, and LoRA files that work elsewhere ---------------------------------------------


LIGHTNING = dict(base_shift=math.log(3), max_shift=math.log(3), max_image_seq_len=8192, shift_terminal=None)


def draw(*flags):
    """predict.py with two steps -> result of run_script, which went well."""
    steps = [] if "--sigmas" in flags else ["--num_inference_steps", 2]
    result = run_script("predict.py", *flags, *steps, *ON_DEVICE)
    assert result.status == 0, result.err
    return result


def pixels_of(path):
    return np.asarray(Image.open(path)).astype(int)


@pytest.fixture(scope="module")
def two_loras(tmp_path_factory):
    """Two random LoRAs with different layers, in diffusers' form: one with rsLoRA in its metadata."""
    paths = []
    for i, names in enumerate([("attn.to_q", "attn.to_out.0"), ("attn.to_q", "img_mlp.net.2")]):
        folder = tmp_path_factory.mktemp(f"lora{i}")
        tensors = {k: 0.05 * v for k, v in lora_tensors(rank=4, names=names).items()}
        layers = sorted({k.removeprefix("transformer.").rsplit(".lora_", 1)[0] for k in tensors})
        paths.append(lora_file(folder, tensors, **{"transformer.r": 4, "transformer.lora_alpha": 8,
                                                   "transformer.use_rslora": bool(i),
                                                   "transformer.target_modules": layers}))
    return paths


# ---- predict.py ----

@pytest.mark.parametrize("fields, config, call", [
    (dict(shift=3.0, num_inference_steps=4), LIGHTNING, {}),
    (dict(shift=3.0, num_inference_steps=1), LIGHTNING, {}),
    (dict(sigmas=[1.0, 0.7, 0.5, 0.2]), {}, dict(sigmas=[1.0, 0.7, 0.5, 0.2])),
    (dict(sigmas=[1.0, 0.6], shift=3.0), LIGHTNING, dict(sigmas=[1.0, 0.6])),
], ids=["shift", "one step", "sigmas", "both"])
def test_distilled_sampling_with_two_loras_equals_stock(fields, config, call, photos, two_loras):
    """Qwen-Image-Lightning's scheduler, two LoRAs at scales 0.7 and 1, no unconditional run: latents to 1e-5."""
    pipe, scales = stock_pipeline(TINY), [0.7, 1.0]
    original = pipe.scheduler
    for name, path in zip("ab", two_loras):
        pipe.load_lora_weights(str(path.parent), adapter_name=name)
    pipe.set_adapters(["a", "b"], scales)
    pipe.scheduler = type(original).from_config({**original.config, **config})
    job = job_of(photos[:1], 96 * 96, true_cfg_scale=1.0, **fields)
    with stock_area(96 * 96):
        stock = pipe(image=[Image.open(photos[0])], prompt=job.prompt, true_cfg_scale=1.0,
                     num_inference_steps=job.num_inference_steps, generator=torch.manual_seed(job.seed),
                     output_type="latent", **call).images[0]
    pipe.scheduler = original
    transformer = predict.load_transformer(TINY, "float32", "cpu")
    predict.load_loras(transformer, two_loras, scales)
    (ours,) = predict_latents(pipe, transformer, [job])
    predict.load_loras(other := predict.load_transformer(TINY, "float32", "cpu"), two_loras, [1.0, 1.0])
    (wrong,) = predict_latents(pipe, other, [job_of(photos[:1], 96 * 96, true_cfg_scale=1.0, **fields)])
    print(f"latents: {rel(ours, stock):.1e} from the stock pipeline (limit 1e-5)")
    assert rel(ours, stock) <= 1e-5 < 1e-3 < rel(wrong, stock)
    assert len(job.prompts) == 1


def test_size_from_is_stock_with_that_height_and_width(photos):
    pipe = stock_pipeline(TINY)
    with stock_area(96 * 96):
        width, height = plus_code.calculate_dimensions(1024 * 1024, 100 / 60)
        stock = pipe(image=[Image.open(p) for p in photos[:2]], prompt="x", true_cfg_scale=1.0, num_inference_steps=2,
                     height=height, width=width, generator=torch.manual_seed(3), output_type="latent").images[0]
    job = job_of(photos[:2], 96 * 96, prompt="x", true_cfg_scale=1.0, num_inference_steps=2, size_from=1)
    (ours,) = predict_latents(pipe, patch_qwen_model_for_multi_resolution(pipe.transformer), [job])
    assert (job.width, job.height) == (width, height) and width > height and rel(ours, stock) <= 1e-5


def test_a_folder_times_seeds_times_compare_is_one_batch_and_one_sheet(tmp_path, photos, two_loras):
    """Names are kept; each of the pictures is the one that a call for it alone draws; a second call draws what is
    missing."""
    for name, photo in (("a.png", photos[0]), ("deep/b.jpg", photos[1]), ("deep/b.png", photos[2])):
        save(Image.open(photo), tmp_path / "in" / name)
    flags = ["--image", tmp_path / "in", "--prompt", "go", "--out_dir", tmp_path / "out", "--lora", *two_loras,
             "--lora_scale", 2, 3, "--seed", 4, 5, "--compare"]
    out = draw(*flags)
    stems = ["a", "deep/b.jpg", "deep/b.png"]
    names = {f"{stem}-s{seed}{base}.png" for stem in stems for seed in (4, 5) for base in ("", "-base")} | {"sheet.png"}
    assert {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.png")} == names
    assert Image.open(tmp_path / "out/sheet.png").size == (6 * 200, 3 * 200 + 24) and "12 of them" in out.out
    alone = ["--image", tmp_path / "in/deep/b.jpg", "--prompt", "go", "--seed", 5, "--lora"]
    draw(*alone, *two_loras, "--lora_scale", 2, 3, "--out", tmp_path / "one.png")
    draw(*alone, "", "--out", tmp_path / "base.png")
    for one, many in (("one", "b.jpg-s5"), ("base", "b.jpg-s5-base")):
        assert abs(pixels_of(tmp_path / f"{one}.png") - pixels_of(tmp_path / f"out/deep/{many}.png")).max() <= 1
    assert abs(pixels_of(tmp_path / "one.png") - pixels_of(tmp_path / "base.png")).max() > 8
    assert abs(pixels_of(tmp_path / "out/a-s4.png") - pixels_of(tmp_path / "out/a-s5.png")).max() > 8
    (tmp_path / "out/a-s5-base.png").unlink()
    again = draw(*flags)
    assert "11 of 12 pictures are there" in again.out
    assert [Path(p).name for p in re.findall(r"(\S+\.png): \d+x", again.out)] == ["a-s5-base.png"]


def test_a_picture_is_drawn_again_bit_for_bit_from_what_stands_in_it(tmp_path, photos, two_loras):
    draw("--image", *photos[:2], "--prompt", "snow \u96ea", "--out", tmp_path / "a.png", "--lora", two_loras[1],
         "--seed", 7, "--lora_scale", 0.5, "--size_from", 1, "--sigmas", 1, 0.4, "--shift", 3, "--true_cfg_scale", 2,
         "--target_pixels", "64*64", "--negative_prompt", "fog")
    note = json.loads(Image.open(tmp_path / "a.png").text["made_with"])
    assert (note["prompt"], note["negative_prompt"], note["sigmas"]) == ("snow \u96ea", "fog", [1, 0.4])
    assert note["seed"] == [7] and note["lora_scale"] == [0.5] and note["versions"]["torch"] == torch.__version__
    assert note["lora_sha256"] == [[predict.lora_digest(two_loras[1]), 0.5]] and note["shift"] == 3
    result = run_script("predict.py", "--again", tmp_path / "a.png", "--out", tmp_path / "b.png", "--device", DEVICE)
    assert result.status == 0 and "warning" not in result.out, result.err
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    result = run_script("predict.py", "--again", tmp_path / "a.png", "--out", tmp_path / "c.png", "--seed", 8)
    assert "warning" in result.out and abs(pixels_of(tmp_path / "a.png") - pixels_of(tmp_path / "c.png")).max() > 8


def test_a_merged_model_draws_what_base_and_loras_draw(tmp_path, photos, two_loras, monkeypatch):
    """Here and in stock diffusers; a folder that is not empty is refused; a failure leaves nothing behind."""
    merge = ["--lora", *two_loras, "--lora_scale", 0.7, 1, "--merge_lora"]
    with monkeypatch.context() as patch:
        patch.setattr(QwenImageTransformer2DModel, "save_pretrained", lambda *_: (_ for _ in ()).throw(OSError("full")))
        result = run_script("predict.py", *merge, tmp_path / "m/merged", *ON_DEVICE)
    assert result.status == 1 and is_one_line(result.errors[-1], "--merge_lora") and not [*(tmp_path / "m").iterdir()]
    assert run_script("predict.py", *merge, tmp_path / "m/merged", "--dtype", "float32").status == 0
    result = run_script("predict.py", *merge, tmp_path / "m/merged", *ON_DEVICE)
    assert result.status == 1 and is_one_line(result.errors[-1], "--merge_lora", "not empty")
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["merged"]
    pipe = stock_pipeline(TINY)
    transformer = predict.load_transformer(TINY, "float32", "cpu")
    predict.load_loras(transformer, two_loras, [0.7, 1.0])
    merged = predict.load_transformer(cache.find_model(tmp_path / "m/merged", predict.ENCODER_PARTS), "float32", "cpu")
    stock = diffusers.QwenImageEditPlusPipeline.from_pretrained(tmp_path / "m/merged", processor=None)
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]
    job = lambda: job_of(photos[:1], true_cfg_scale=1.0, num_inference_steps=2)
    (want,), (got,) = [predict_latents(pipe, t, [job()]) for t in (transformer, merged)]
    assert rel(got, want) <= 1e-5
    assert_bitwise(dict(stock.transformer.state_dict()), dict(merged.state_dict()))
    assert_bitwise(dict(stock.vae.state_dict()), dict(pipe.vae.state_dict()))


@pytest.mark.parametrize("flags, status, named", [
    (["--sigmas", 0.5, 0.7], 1, "sigma 0.5"),
    (["--sigmas", 1.2], 2, "--sigmas"),
    (["--sigmas", 1, 0.5, "--num_inference_steps", 2], 2, "--sigmas"),
    (["--num_inference_steps", 1], 1, "at least 2"),
    (["--shift", 0], 2, "--shift"),
    (["--size_from", 2], 1, "size_from 2 of 1"),
    (["--seed", 1, 1], 2, "--seed"),
    (["--lora", "", "--compare"], 2, "--compare"),
    (["--lora", "", "--merge_lora", "m"], 2, "--merge_lora"),
    (["--lora", "LORA", "--lora_scale", 1, 2], 2, "--lora_scale"),
    (["--lora", "LORA", "--lora_scale", "nan"], 2, "--lora_scale"),
    (["--lora", "nobody/nothing"], 1, "from the hub"),
    (["--lora", "LORA", "--merge_lora", "m", "--prompt", "x"], 2, "--merge_lora"),
    (["--again", "a.png"], 1, "no file of that name"),
])
def test_nonsense_is_one_line_before_a_model_is_loaded(tmp_path, photos, two_loras, monkeypatch, flags, status, named):
    monkeypatch.setattr(predict, "load_encoders", lambda *_: pytest.fail("models loaded"))
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_: (_ for _ in ()).throw(OSError))
    flags = [two_loras[0] if f == "LORA" else f for f in flags]
    result = run_script("predict.py", "--image", photos[0], "--prompt", "x", *flags)
    assert result.status == status and named in result.errors[-1], result.err
    assert status == 2 or is_one_line(result.errors[-1])


def test_an_empty_folder_one_that_would_be_overwritten_and_two_seeds_are_one_line(tmp_path, photos):
    save(Image.open(photos[0]), tmp_path / "in/a.png")
    (tmp_path / "no").mkdir()
    flags = ["--prompt", "x", "--image"]
    for image, out in (("no", "out"), ("in", "in"), ("in", "in/out")):
        result = run_script("predict.py", *flags, tmp_path / image, "--out_dir", tmp_path / out)
        assert result.status == 1 and is_one_line(result.errors[-1], tmp_path / image)
    (tmp_path / "jobs.jsonl").write_text("\n".join(json.dumps(dict(image="in/a.png", prompt="x", **row)) for row in (
        dict(seed=3), dict(sigmas=[1, "x"]), dict(sigmas=[1, 2]), dict(size_from=0), dict(shift=-1),
        dict(sigmas=[1], num_inference_steps=3))))
    result = run_script("predict.py", "--jobs", tmp_path / "jobs.jsonl", "--seed", 1, 2, "--out_dir", tmp_path / "out")
    assert result.status == 1 and len(result.errors) == 6 and all(map(is_one_line, result.errors)), result.errors


# ---- LoRA files ----

PEFT_CONFIGS = {  # adapter_config.json -> the true scale of a LoRA of rank 2
    "alpha": (dict(r=2, lora_alpha=6), 3),
    "rslora": (dict(r=2, lora_alpha=6, use_rslora=True), 6 / math.sqrt(2)),
    "pattern": (dict(r=4, lora_alpha=6, rank_pattern={".*": 2}, alpha_pattern={".*to_q": 2, ".*": 4}), None),
}


@pytest.mark.parametrize("kind", PEFT_CONFIGS)
def test_a_peft_folder_has_the_scale_of_its_config(tmp_path, kind):
    config, scale = PEFT_CONFIGS[kind]
    tensors = lora_tensors()
    safetensors.torch.save_file(renamed("transformer.", "base_model.model.")(tensors), tmp_path / predict.PEFT_FILE)
    with refused(tmp_path, "adapter_config.json"):  # without it the scale is unknown
        predict.read_lora(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | dict(peft_type="LORA", some_new_field=1)))
    predict.load_lora(transformer := tiny_transformer(), tmp_path)
    got = effect(transformer)
    assert len(got) == 6
    for layer in got:
        a, b = [tensors[f"transformer.{layer}.lora_{x}.weight"].to(DTYPE).float() for x in "AB"]
        torch.testing.assert_close(got[layer], (scale or (1 if "to_q" in layer else 2)) * b @ a)


def test_a_hub_id_finds_the_one_lora_of_a_repository(tmp_path, monkeypatch):
    files = {"a/b": [predict.LORA_FILE, "x.safetensors"], "a/two": ["x.safetensors", "y.safetensors"]}
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repo: files[repo])
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, name: str(tmp_path / repo / name))
    monkeypatch.chdir(tmp_path)
    assert predict.find_lora("a/b") == tmp_path / "a/b" / predict.LORA_FILE
    assert predict.find_lora("a/b/deep/y.safetensors") == tmp_path / "a/b/deep/y.safetensors"
    with refused("a/two", "x.safetensors", "y.safetensors"):
        predict.find_lora("a/two")
    with refused("a/none", "hub"):
        predict.find_lora("a/none")
    (tmp_path / "a").mkdir()
    assert predict.find_lora("a/none") == Path("a/none")  # a path of ours, mistyped


def test_dora_of_kohya_is_refused_not_halved(tmp_path):
    tensors = as_kohya(lora_tensors())
    name = next(iter(tensors)).rsplit(".lora_", 1)[0]
    with refused(tmp_path, "DoRA"):
        predict.read_lora(lora_file(tmp_path, tensors | {f"{name}.dora_scale": torch.ones(128, 1)}))


def stock_loss(position, ns, *loras, scales=None, model=TINY):
    """The stock model's loss, with LoRAs loaded by the stock pipeline, for the sample at this position."""
    pipe = stock_pipeline(model)
    for i, path in enumerate(loras):
        pipe.load_lora_weights(str(path), adapter_name=f"l{i}")
    if loras:
        pipe.set_adapters([f"l{i}" for i in range(len(loras))], scales)
    sample, scale, _ = ns["draw"](position)
    t = cache.load_sample(toy_cache(), sample, scale)
    s, noise = ns["draw_noise"](position, *t["pixel_latent"].shape)
    x = torch.cat([(1 - s) * t["pixel_latent"] + s * noise, t["control_latent"]])
    with torch.no_grad():
        v = pipe.transformer(hidden_states=x[None], encoder_hidden_states=t["prompt_embed"][None], timestep=s[None],
                             img_shapes=[[tuple(i) for i in t["img_shapes"].tolist()]], return_dict=False)[0][0]
    weight = 1 + t["edit_mask"] if "edit_mask" in t else torch.ones(len(noise))
    return (((v[:len(noise)] - (noise - t["pixel_latent"])).square().mean(-1) * weight).sum() / weight.sum()).item()


@pytest.mark.parametrize("flags", [["--rslora", "--lora_targets", "all-linear"], ["--dora", "--lora_targets", "to_q"]],
                         ids=["rslora", "dora"])
def test_kinds_of_lora_train_save_load_in_stock_and_go_on(tmp_path, flags, caplog):
    """The file in the stock pipeline, and as --pretrained_lora, give the loss of the model that was trained; stock says
    nothing about its metadata; the ComfyUI file is the same LoRA; and it resumes bit for bit."""
    run = [*flags, *EXACT, "--lora_rank", 4, "--lora_alpha", 6, "--batch_size", 1, "--max_steps", 2,
           "--lr_scheduler", "constant"]
    comfyui = [] if "--dora" in flags else ["--lora_format", "comfyui"]
    whole = train_toy(tmp_path / "a", *run, *comfyui)
    assert whole.status == 0, whole.err
    assert train_toy(tmp_path / "r", *run, "--max_steps", 1).status == 0
    assert curve(train_log(tmp_path / "r", *run, "--resume")) == curve(log_of(tmp_path / "a"))
    assert_bitwise(lora_of(tmp_path / "r"), lora_of(tmp_path / "a"))
    meta = predict.read_lora(tmp_path / "a")[1]
    assert meta["train.config"]["lora_rank"] == 4 and meta["train.config"]["data"]
    assert {"commit", "torch", "peft"} <= meta["train.versions"].keys()
    log = train_log(tmp_path / "b", *EXACT, "--pretrained_lora", tmp_path / "a", "--batch_size", 1, "--max_steps", 1)
    caplog.clear()
    want = stock_loss(0, whole.globals, tmp_path / "a")
    assert not [r for r in caplog.records if r.name.startswith("diffusers")], caplog.text
    assert log[0]["loss"] == pytest.approx(want, rel=1e-6)
    assert abs(want / stock_loss(0, whole.globals) - 1) > 1e-4
    merge = ["--lora", tmp_path / "a", "--lora_scale", 1, "--merge_lora", tmp_path / "m"]
    assert run_script("predict.py", *merge, "--dtype", "float32").status == 0
    assert stock_loss(0, whole.globals, model=tmp_path / "m") == pytest.approx(want, rel=1e-5)
    if comfyui:
        file = tmp_path / "a/a_comfyui.safetensors"
        keys = safetensors.torch.load_file(file)
        assert all(k.startswith("diffusion_model.") for k in keys) and len(keys) % 3 == 0
        assert {v.item() for k, v in keys.items() if "alpha" in k} == {12 if "--rslora" in flags else 6}
        assert stock_loss(0, whole.globals, file) == pytest.approx(want, rel=1e-6)
        assert predict.read_lora(file)[1]["train.geometry"] == meta["train.geometry"]
    if "all-linear" in flags:
        layers = {k.rsplit(".lora_", 1)[0] for k in lora_of(tmp_path / "a")}
        linears = {f"transformer.{n}" for n, m in tiny_transformer().named_modules()
                   if isinstance(m, torch.nn.Linear) and "_blocks." in n}
        last = max(linears, key=lambda n: int(n.split(".")[2])).split(".")[2]
        dead = {n for n in linears if re.search(rf"blocks\.{last}\.(attn\.(add_q_proj|to_add_out)|txt_mlp)", n)}
        assert layers == linears - dead and len(dead) == 4
        assert all(v.any() for k, v in lora_of(tmp_path / "a").items() if "lora_B" in k)


def test_a_base_lora_stays_as_it_is_under_the_trained_one(tmp_path, two_loras):
    """The first loss is stock's with the base LoRA at its scale; gradients flow to the trained one only, which alone is
    saved; both together in stock give the loss after training; another base is refused when the run is resumed."""
    flags = [*EXACT, "--batch_size", 1, "--base_lora", two_loras[1], "--base_lora_scale", 0.5, "--lora_targets", "to_q"]
    run = train_toy(tmp_path / "a", *flags, "--max_steps", 1)
    assert run.status == 0, run.err
    log = log_of(tmp_path / "a")
    assert log[0]["loss"] == pytest.approx(stock_loss(0, run.globals, two_loras[1], scales=[0.5]), rel=1e-6)
    trained = {n for n, p in run.globals["transformer"].named_parameters() if p.requires_grad}
    assert trained == set(run.globals["lora"]) and all(".default." in n for n in trained)
    base = {n: p for n, p in run.globals["transformer"].named_parameters() if ".base." in n}
    file = predict.read_lora(two_loras[1])[0]
    assert len(base) == len(file) and all(torch.equal(p, file["transformer." + n.replace(".base", "")])
                                          for n, p in base.items())
    assert {k.rsplit(".lora_")[0].rsplit(".", 1)[1] for k in lora_of(tmp_path / "a")} == {"to_q"}
    with torch.no_grad():
        top, bottom = run.globals["batch_loss"](run.globals["load_batch"]([0]))
    want = stock_loss(0, run.globals, tmp_path / "a", two_loras[1], scales=[1.0, 0.5])
    assert (top / bottom).item() == pytest.approx(want, rel=1e-6) and want != pytest.approx(log[0]["loss"], rel=1e-4)
    for change in (["--base_lora_scale", 1], ["--base_lora", two_loras[0]]):
        result = train_toy(tmp_path / "a", *flags, *change, "--max_steps", 2, "--resume")
        assert result.status == 1 and is_one_line(result.errors[-1], change[0][2:])


@pytest.mark.parametrize("flags", [
    ["--lora_rank", 8], ["--rslora"], ["--no-dora", "--dora"], ["--lora_targets", "to_q"], ["--lora_alpha", 3]])
def test_flags_that_contradict_the_pretrained_lora_are_refused(tmp_path, two_loras, flags):
    result = train_toy(tmp_path / "a", "--pretrained_lora", two_loras[0], *flags)
    assert result.status == 2 and flags[-1 if "dora" in flags[0] else 0] in result.errors[-1], result.err


def test_dora_is_refused_for_comfyui(tmp_path):
    result = train_toy(tmp_path / "a", "--dora", "--lora_format", "comfyui")
    assert result.status == 2 and "--lora_format" in result.errors[-1]


def test_processes_share_the_jobs(tmp_path, photos, start):
    """Two processes draw the pictures that one draws, each of them once; the sheet shows all; a bad job stops none."""
    lines = [dict(image=[str(p)], prompt="make it blue", out=f"{n}.png")
             for n, p in enumerate([*photos[:3], "gone.png"])]
    (tmp_path / "cut.png").write_bytes(photos[0].read_bytes()[:2000])  # its size can be read, and nothing more
    lines.insert(0, dict(image=["cut.png"], prompt="\u2028 is no end of a line", out="cut.png"))
    lines.append(dict(image=[str(photos[0])], prompt="x", out=""))
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    flags = ["--jobs", tmp_path / "jobs.jsonl", "--target_pixels", "64*64", "--control_pixels", "64*64", *EXACT,
             "--num_inference_steps", 2, "--lora", "", "--device", "cpu"]
    one = run_script("predict.py", *flags, "--out_dir", tmp_path / "one")
    ranks = start_ranks(start, *flags, "--out_dir", tmp_path / "two", script="predict.py")
    assert one.status == 1 and sorted(r.wait() for r in ranks)[1] == 1, [r.output() for r in ranks]
    assert len(one.errors) == 3 and is_one_line(one.errors[0], "jobs.jsonl:6", "'out'") and "cut.png" in one.errors[1]
    names = ["0.png", "1.png", "2.png", "sheet.png"]
    for d in ("one", "two"):
        assert names == sorted(p.name for p in (tmp_path / d).iterdir())
    for name in names:
        a, b = [np.asarray(Image.open(tmp_path / d / name), int) for d in ("one", "two")]
        assert np.abs(a - b).max() <= 1, name # alone or in a batch
    drawn = [sum(f"/{n}.png: " in r.output() for n in range(3)) for r in ranks]
    assert sorted(drawn) == [1, 2] and "1 of them" not in one.out


# ---- chapter 9: data as people have it, and its report ---------------------------------------------------------------


def test_several_roots_are_one_dataset_and_repeats_are_the_stream(tmp_path, plus):
    """Names tell the root; an epoch has each sample as often as --repeats says; a resumed run cannot change that."""
    for root, names in (("a", "xy"), ("b", "x")):
        for name in names:
            add_item(tmp_path / root, name, caption=f"{root} {name}")
    data = [tmp_path / "a", tmp_path / "b"]
    samples, problems = index_of(plus, data, repeats=[1, 3])
    assert {n: s["repeats"] for n, s in samples.items()} == {"a/x": 1, "a/y": 1, "b/x": 3} and not problems
    flags = ["--cache_dir", tmp_path / "c", "--max_steps", 1, "--lr_scheduler", "constant", "--lora_rank", 2, *NATIVE]
    flags += ON_DEVICE
    run = run_script("train.py", "--data", *data, "--repeats", 1, 3, "--out_dir", tmp_path / "r", *flags)
    assert run.status == 0 and "trained for 1 steps on 3 samples" in run.out, run.err
    epoch = [run.globals["draw"](p)[0]["name"] for p in range(5)]
    assert sorted(epoch) == ["a/x", "a/y", "b/x", "b/x", "b/x"] and run.globals["run_name"] == "tiny-a+b"
    again = run_script("train.py", "--data", "none", "--out_dir", tmp_path / "n", *flags)  # index.json knows it
    assert again.status == 0 and [again.globals["draw"](p)[0]["name"] for p in range(5)] == epoch, again.err
    other = run_script("train.py", "--data", *data, "--resume", "--out_dir", tmp_path / "r", *flags, "--max_steps", 2)
    assert other.status == 1 and is_one_line(other.errors[0], "data")
    wrong = run_script("train.py", "--data", *data, "--repeats", 3, "--out_dir", tmp_path / "w", *flags)
    assert wrong.status == 2 and "--repeats" in wrong.err


def test_a_single_caption_draws_the_random_numbers_it_always_drew(tmp_path):
    """The wording has a draw of its own: scale and dropout are those of (seed, position) as before there was any."""
    ns = globals_of_train(tmp_path, "--caption_dropout_rate", 0.5)
    for p in range(50):
        g = ns["generator"]("draw", p)
        torch.randint(1, (), generator=g)
        assert (ns["draw"](p)[2]["prompt"] == "") == (torch.rand((), generator=g).item() < 0.5)


def test_lines_of_a_caption_are_wordings_of_which_each_position_draws_one(tmp_path, plus):
    data = add_item(tmp_path / "data", "cat", caption="one\r\n\n two two \nthree\none\n")
    rows = [dict(target="target/cat.png", control="control/cat.png", prompt=["one", "two two", "three"])]
    sample = index_of(plus, data)[0]["cat"]
    assert [t["prompt"] for t in sample["text"]] == ["one", "two two", "three"]
    assert [t["tokens"] for t in sample["text"]] == [len(encode(plus, sample, p)["prompt_embed"])
                                                     for p in ("one", "two two", "three")]
    losses = []
    for live in ([], ["--no-use_cache"]):
        run = train(data, tmp_path, "--cache_dir", tmp_path / "c", "--caption_dropout_rate", 0.3, *NATIVE, *live)
        assert run.status == 0, run.err
        losses.append(run.losses)
    assert losses[0] == losses[1] and len(list((tmp_path / "c/text").iterdir())) == 4
    drawn = [run.globals["draw"](p)[2]["prompt"] for p in range(600)]
    counts = [drawn.count(p) for p in ("", "one", "two two", "three")]
    assert all(abs(n - want) < 45 for n, want in zip(counts, (180, 140, 140, 140))), counts
    assert drawn == [run.globals["draw"](p)[2]["prompt"] for p in range(600)]
    write_jsonl(data.parent / "data/m.jsonl", rows)
    assert [t["key"] for t in index_of(plus, data / "m.jsonl")[0]["target/cat"]["text"]] == [
        t["key"] for t in sample["text"]]
    (data / "target/cat.txt").write_text("one\n" + "red " * 2000)  # each must fit
    assert is_one_line(index_of(plus, data)[1][0], "cat", "1024")


LAYOUTS = {  # files that hold target, first and second control and mask of cat
    "ours": "target/cat.png control/cat.png control/cat_1.png mask/cat.png",
    "qwen-image-finetune": "training_images/cat.png control_images/cat.jpg control_images/cat_control_1.png "
                           "control_images/cat_mask.png",
    "mask beside the target": "targets/cat.png controls/cat.png controls/cat_1.png targets/cat_mask.png",
    "musubi-tuner": "images/cat.png control/cat_0000.png control/cat_0001.png masks/cat.png",
    "jsonl": dict(target="a.png", control=["b.png", "c.png"], mask="d.png", prompt="go"),
    "jsonl of musubi-tuner": dict(image_path="a.png", control_path_0="b.png", control_path_1="c.png", mask="d.png",
                                  caption="go"),
    "csv of qwen-image-finetune": dict(path_target="a.png", path_control="b.png", path_control_1="c.png",
                                       path_mask="d.png", prompt="go"),
    "json of DiffSynth-Studio": dict(image="a.png", edit_image=["b.png", "c.png"], mask="d.png", prompt="go"),
    "imagefolder": dict(file_name="a.png", control_images=["b.png", "c.png"], control_mask="d.png", text="go"),
    "instruct-pix2pix": dict(edited_image="a.png", input_image=["b.png", "c.png"], mask_image="d.png",
                             edit_prompt="go", edited_prompt="not this"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_other_trainers_give_the_same_sample(tmp_path, plus, layout):
    pictures = [draw_picture((64, 32), seed=s) for s in range(4)]
    files = LAYOUTS[layout]
    want = index_of(plus, add_item(tmp_path / "want", "cat", [(64, 32)] * 3, "go", mask=pictures[3]))[0]["cat"]
    shutil.copytree(tmp_path / "want", tmp_path / "data")
    ours = [tmp_path / "data" / f for f in LAYOUTS["ours"].split()]
    if isinstance(files, str):
        for old, new in zip(ours, files.split()):
            (tmp_path / "data" / new).parent.mkdir(exist_ok=True)
            old.rename(tmp_path / "data" / new)
        if (new := (tmp_path / "data" / files.split()[0]).with_suffix(".txt")) != tmp_path / "data/target/cat.txt":
            (tmp_path / "data/target/cat.txt").rename(new)
    else:
        for old, new in zip(ours, "abcd"):
            old.rename(tmp_path / f"data/{new}.png")
        (tmp_path / "data/target/cat.txt").unlink()
        if "DiffSynth" in layout:
            (tmp_path / "data/metadata.json").write_text(json.dumps([files]))
        elif "csv" in layout:
            (tmp_path / "data/metadata.csv").write_text(",".join(files) + "\n" + ",".join(files.values()) + "\n")
        else:
            write_jsonl(tmp_path / "data/metadata.jsonl", [files])
    for folder in ("target", "control", "mask"):
        with contextlib.suppress(OSError):
            (tmp_path / "data" / folder).rmdir()
    samples, problems = index_of(plus, tmp_path / "data")
    got, = samples.values()
    assert not problems and got["scales"] == want["scales"] and got["text"] == want["text"]


AMBIGUOUS = {
    "two targets": (dict(target="a.png", image="a.png", control="b.png", prompt="go"), "image"),
    "two spellings": (dict(target="a.png", control="b.png", control_path="b.png", prompt="go"), "control_path"),
    "two prompts": (dict(target="a.png", control="b.png", prompt="go", text="go"), "text"),
}


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_two_columns_of_one_meaning_are_an_error(tmp_path, plus, kind):
    row, named = AMBIGUOUS[kind]
    for name in "ab":
        save(draw_picture(), tmp_path / f"{name}.png")
    write_jsonl(tmp_path / "metadata.jsonl", [row])
    assert is_one_line(index_of(plus, tmp_path)[1][0], "metadata.jsonl:1", named)


def test_an_unknown_or_double_layout_is_named_beside_the_right_one(data, plus):
    (data / "training_images").mkdir()
    with refused("training_images", "target"):
        index_of(plus, data)
    (data / "training_images").rmdir()
    (data / "target").rename(data / "after")
    with refused(data, "after", "target/NAME.png"):
        index_of(plus, data)
    shutil.copytree(data / "after", data / "target")
    save(draw_picture((64, 64)), data / "mask/cat.png")
    save(draw_picture((64, 64)), data / "mask/cat_mask.png")
    assert is_one_line(index_of(plus, data)[1][0], "mask")


def test_pictures_without_controls_are_encoded_as_the_stock_pipeline_does_and_train_beside_edits(data, tmp_path, plus):
    """The prompt has no picture then, the control has no token; and a missing control elsewhere stays an error."""
    for name in ("face", "more/face"):
        save(draw_picture((96, 64)), tmp_path / f"faces/{name}.png")
        (tmp_path / f"faces/{name}.txt").write_text("a face\nthe face")
    samples, problems = index_of(plus, data, reg_data=[tmp_path / "faces"], repeats=[2])
    sample = samples["faces/more/face"]
    assert not problems and sample["control"] == [] and sample["repeats"] == 1 and samples["data/cat"]["repeats"] == 2
    got = encode(plus, sample)
    assert got["control_latent"].shape == (0, 64) and got["img_shapes"].tolist() == [[1, 4, 6]]
    stock, _ = plus.encode_prompt(["a face"], None, device=DEVICE)
    assert torch.equal(got["prompt_embed"], stock[0]) and sample["text"][0]["tokens"] == len(stock[0])
    flags = ["--reg_data", tmp_path / "faces", "--cache_dir", tmp_path / "c", "--batch_size", 4, *NATIVE]
    run = train(data, tmp_path, *flags)
    assert run.status == 0 and len(run.losses) == 2 and all(map(math.isfinite, run.losses)), run.err
    padded = train(data, tmp_path, *flags, "--batching", "padded")
    assert padded.losses == pytest.approx(run.losses, rel=1e-5 if DTYPE == torch.float32 else 1e-2)
    write_jsonl(data / "m.jsonl", [dict(target="target/cat.png", control=[], prompt="a cat"),
                                   dict(target="target/good.png", prompt="a cat")])
    samples, problems = index_of(plus, data / "m.jsonl")
    assert list(samples) == ["target/cat"] and len(problems) == 1 and is_one_line(problems[0], "m.jsonl:3", "control")
    (data / "control/cat.png").unlink()
    assert is_one_line(index_of(plus, data)[1][0], "target/cat.png", "control/cat.png")


def test_version_1_of_the_model_refuses_pictures_without_controls(data, tmp_path, pipes):
    save(draw_picture(), tmp_path / "faces/face.png")
    (tmp_path / "faces/face.txt").write_text("a face")
    samples, problems = index_of(pipes["v1"], data, reg_data=[tmp_path / "faces"])
    assert len(samples) == 2 and len(problems) == 1 and is_one_line(problems[0], "face.png", "one control")


def test_parquet_files_are_exported_once_and_named_if_nothing_can_read_them(tmp_path, monkeypatch):
    (tmp_path / "hf/data").mkdir(parents=True)
    path = tmp_path / "hf/data/train-00000-of-00001.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = make_cache(tmp_path / "hf", tmp_path / "c")
    assert result.status == 1 and is_one_line(result.errors[0], "hf", "pip install datasets")
    monkeypatch.undo()
    datasets = pytest.importorskip("datasets")
    rows = dict(input_image=[draw_picture((64, 96), s) for s in range(3)], edit_prompt=["a\nb", "c", "d"],
                edited_image=[draw_picture((64, 96), 9 + s) for s in range(3)])
    image = datasets.Image()
    datasets.Dataset.from_dict(rows, features=datasets.Features(
        input_image=image, edited_image=image, edit_prompt=datasets.Value("string"))).to_parquet(path)
    for _ in range(2):
        assert make_cache(tmp_path / "hf", tmp_path / "c", *NATIVE).status == 0
        samples = cache.load_index(tmp_path / "c")["samples"]
        assert [s["text"][0]["prompt"] for s in samples] == ["a b", "c", "d"] and len(samples[0]["text"]) == 1
        for s, want in zip(samples, rows["edited_image"]):
            assert np.array_equal(cache.read_image(s["target"]), want)
        monkeypatch.setattr(cache, "write_row", lambda *_: pytest.fail("exported again"))


# natural-like pictures: noise of all sizes, shapes with sharp edges; and edits that must not raise an alarm
EDITS = ["border", "object", "remove", "background", "recolour", "half", "blur", "frame", "grain", "texture"]
SHAPES = [(96, 96), (160, 112), (128, 192), (256, 192), (300, 400)]


def natural(rng, size):
    out = np.zeros((size[1], size[0], 3))
    for cells, height in ((3, 70), (7, 40), (16, 22), (40, 12)):
        noise = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)).resize(size, Image.BICUBIC)
        out += height * (np.asarray(noise) / 127.5 - 1)
    return Image.fromarray((out + rng.integers(70, 190, 3)).clip(0, 255).astype(np.uint8))


def put_shape(rng, image):
    (w, h), (bw, bh) = image.size, rng.uniform(0.12, 0.35, 2) * image.size
    x, y = rng.uniform(0, w - bw), rng.uniform(0, h - bh)
    pen, box = ImageDraw.Draw(image), (x, y, x + bw, y + bh)
    (pen.ellipse if rng.random() < 0.5 else pen.rectangle)(box, tuple(rng.integers(0, 256, 3).tolist()))
    return box


def edited_pair(rng, kind, size):
    """-> control, target."""
    control = natural(rng, size)
    for _ in range(rng.integers(2, 6)):
        box = put_shape(rng, control)
    target, (w, h), colour = control.copy(), size, tuple(rng.integers(0, 256, 3).tolist())
    pen = ImageDraw.Draw(target)
    if kind in ("object", "remove"):
        put_shape(rng, target if kind == "object" else control)
    elif kind == "recolour":
        ImageDraw.Draw(control).rectangle(box, tuple(rng.integers(0, 256, 3).tolist()))
        pen.rectangle(box, colour)
    elif kind == "border":
        pen.rectangle((0, 0, w - 1, h - 1), outline=colour, width=int(min(size) * rng.uniform(0.03, 0.12)))
    elif kind == "frame":
        pen.rectangle((w * 0.15, h * 0.15, w * 0.85, h * 0.85), outline=colour, width=min(size) // 20)
    elif kind == "half":
        halves = (0, 0, w // 2, h), (0, 0, w, h // 2), (w // 2, 0, w, h), (0, h // 2, w, h)
        pen.rectangle(halves[rng.integers(4)], colour)
    elif kind == "background":
        mask, edge = Image.new("L", size), rng.uniform(0.12, 0.25)
        ImageDraw.Draw(mask).ellipse((w * edge, h * edge, w * (1 - edge), h * (1 - edge)), 255)
        behind = natural(rng, size) if rng.random() < 0.5 else Image.new("RGB", size, colour)
        target = Image.composite(control, behind, mask)
    elif kind == "blur":
        box = w // 5, h // 5, w * 4 // 5, h * 7 // 10
        target.paste(target.crop(box).filter(ImageFilter.GaussianBlur(min(size) / 30)), box)
    elif kind == "grain":
        target = Image.fromarray((np.asarray(target) + rng.normal(0, 12, (h, w, 3))).clip(0, 255).astype(np.uint8))
    else:
        target.paste(natural(rng, (w // 2, h // 2)), (rng.integers(w // 2), rng.integers(h // 2)))
    return control, target


def planted_motion(rng, kind, size, bad):
    """An edit of a larger scene, of which the two show windows that are shifted or zoomed: 1.5 pixels or more at the
    edge of a copy of 256. -> (control, target), what must be found."""
    wide, side = (int(size[0] * 1.3), int(size[1] * 1.3)), max(size)
    least = 1.5 * max(1, side / 256)
    control, target = edited_pair(rng, kind, wide)
    angle, shift = rng.uniform(0, 2 * math.pi), rng.uniform(max(0.012 * side, least), 0.05 * side)
    zoom = rng.choice([-1, 1]) * rng.uniform(max(0.02, 1.1 * least / (side / 2)), 0.09) if bad == "zoomed" else 0
    dx, dy = (0, 0) if zoom else (shift * math.cos(angle), shift * math.sin(angle))
    target = target.transform(wide, Image.AFFINE, (1 + zoom, 0, dx - zoom * wide[0] / 2, 0, 1 + zoom,
                                                   dy - zoom * wide[1] / 2), Image.BICUBIC)
    x, y = (wide[0] - size[0]) // 2, (wide[1] - size[1]) // 2
    return [im.crop((x, y, x + size[0], y + size[1])) for im in (control, target)], (-dx, -dy, -zoom)


def planted_cast(rng, image):
    offset, gain = rng.uniform(-30, 30, 3), np.ones(3)
    offset[rng.integers(3)] = rng.choice([-1, 1]) * rng.uniform(10, 30)
    if rng.random() < 0.5:
        offset, gain = 0, 1 + rng.choice([-1, 1], 3) * rng.uniform(0.1, 0.25, 3)
    return Image.fromarray((np.asarray(image) * gain + offset).clip(0, 255).round().astype(np.uint8))


def test_the_pair_doctor_finds_what_is_planted_and_nothing_else(tmp_path):
    """Recall of at least 95 % and at most 2 % false alarms, through JPEG, on pictures that were not used to choose the
    thresholds (another seed). Also how far and how much."""
    rng, counts, wrong, number = np.random.default_rng(2026), {}, [], itertools.count()

    def examined(control, target, quality=None):
        paths = [save(im, tmp_path / f"{next(number)}.jpg", quality=quality or int(rng.integers(70, 96)))
                 for im in (target, control)]
        return cache.examine(dict(target=paths[0], control=paths[1:]))[0]

    size = lambda: SHAPES[rng.integers(len(SHAPES))]
    for kind in EDITS * (5 if FULL else 2):
        found = examined(*edited_pair(rng, kind, size()))
        counts.setdefault("clean", []).append(not found)
        for bad in ("shifted", "zoomed"):
            pair, (dx, dy, zoom) = planted_motion(rng, kind, size(), bad)
            found = examined(*pair)
            counts.setdefault("moved", []).append("moved" in found)
            wrong.append(found.keys() - {"moved"})
            if "moved" in found and bad == "shifted":
                right, down = [float(n) for n in re.findall(r"[-+][\d.]+", found["moved"])[:2]]
                counts.setdefault("shift is right", []).append(math.hypot(right - dx, down - dy) < 2)
        control, target = edited_pair(rng, kind, size())
        found = examined(control, planted_cast(rng, target))
        counts.setdefault("recoloured", []).append("recoloured" in found)
        wrong.append(found.keys() - {"recoloured"})
    for _ in range(20 if FULL else 10):
        picture = edited_pair(rng, "object", size())[1]
        counts.setdefault("identical", []).append(list(examined(picture, picture)) == ["identical"])
        w, h = picture.size
        other = picture.resize((int(w * 1.1), h)) if rng.random() < 0.5 else picture.resize((w * 5 // 2, h * 5 // 2))
        counts.setdefault("other shape", []).append("other shape" in examined(picture, other))
    shares = {kind: np.mean(of) for kind, of in counts.items()}
    print(shares, "of", {kind: len(of) for kind, of in counts.items()}, "alarms of another kind", sum(map(bool, wrong)))
    assert shares.pop("clean") >= 0.98 and np.mean(list(map(bool, wrong))) <= 0.02
    assert all(share >= 0.95 for share in shares.values()), shares


def test_the_report_finds_twins_and_contradictions_and_nothing_in_the_toy_dataset(tmp_path, plus):
    """Copies are found through JPEG and other sizes; the same picture with another edit, or another second control, is
    neither twice nor a contradiction."""
    rng, data, planted = np.random.default_rng(7), tmp_path / "data", []
    def add(name, control, target, caption, size=None, suffix="png"):
        for folder, image in (("control", control), ("target", target)):
            image = image.resize(size or image.size, Image.LANCZOS)
            save(image, data / f"{folder}/{name}.{suffix}", **({"quality": 80} if suffix == "jpg" else {}))
        (data / f"target/{name}.txt").write_text(caption)
    for n in range(30):
        control, target = edited_pair(rng, EDITS[n % 8], SHAPES[n % 2])
        other = control.transpose(Image.FLIP_LEFT_RIGHT)
        other.paste(target.resize((target.width, target.height // 2)))
        add(f"a{n:02}", control, target, f"edit {n}")
        kind = ("duplicate", "other caption", "other target", None, None)[n % 5]
        if kind == "duplicate":
            add(f"b{n:02}", control, target, f"Edit  {n}", (int(control.width * 1.5), int(control.height * 1.5)), "jpg")
        elif kind == "other caption":
            add(f"b{n:02}", control, target, "another", suffix="jpg")
        else:  # None: another instruction gives another target
            add(f"b{n:02}", control, other, f"edit {n}" if kind else "another", suffix="jpg")
        planted += [(kind, f"a{n:02}", f"b{n:02}")] if kind else []
    result = make_cache(data, tmp_path / "c", "--report", *NATIVE)
    assert result.status == 0 and not list((tmp_path / "c").glob("*/*.safetensors")), result.err
    rows = json.loads((tmp_path / "c/report/report.json").read_text())
    found = {(f.split(": ")[0], r["name"], f.split()[-1]) for r in rows for f in r["findings"] if ": and " in f}
    assert found == set(planted)
    assert "duplicate, 6" in result.out and "60 in an epoch" in result.out and "median" in result.out
    sheets = {p.name for p in (tmp_path / "c/report").glob("sheet_*.png")}
    assert {f"sheet_{k}_1.png" for k in ("overview", "duplicate", "other_caption", "other_target")} <= sheets
    assert run_script("cache.py", "--report", "--cache_dir", tmp_path / "toy", *ON_DEVICE).status == 0
    rows = json.loads((tmp_path / "toy/report/report.json").read_text())
    keeps = {s["name"] for s in index_of(plus, TINY / "data")[0].values() if s["text"][0]["prompt"] == "keep the image"}
    assert {r["name"] for r in rows if any("identical" in f for f in r["findings"])} == keeps and len(keeps) == 14
    assert sum(any("identical" not in f for f in r["findings"]) for r in rows) <= 0.02 * len(rows)


# ---- chapter 10: your own model --------------------------------------------------------------------------------------
# $ pytest test_consistency.py -k own_model --model Qwen/Qwen-Image-Edit-2509 --device cuda --dtype bfloat16 -s

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
def test_own_model_packed_equals_stock_one_at_a_time():
    """Stock's own code, one sample at a time: the patched model runs it for every call that stock knows."""
    transformer = own_transformer()
    latents, prompts, times, shapes = own_batch(transformer)
    packed = rope_patch.run_packed(transformer, latents, prompts, times, shapes)
    for n in range(3):
        stock = type(transformer).forward(transformer, latents[n][None], prompts[n][None], None, times[n][None],
                                          [shapes[n]], return_dict=False)[0][0]
        limit = 1e-5 if DTYPE == torch.float32 else 1e-2
        show(f"{MODEL}, sample {n}", rel(packed[n], stock), limit)
        assert rel(packed[n], stock) <= limit


def test_own_model_lora_round_trip(tmp_path):
    """A LoRA on every attention layer, saved and loaded again, answers the same."""
    transformer = own_transformer()
    lora = predict.add_lora(transformer, r=4, lora_alpha=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"],
                            init_lora_weights=False)
    batch = own_batch(transformer)
    with torch.no_grad():
        want = torch.cat(rope_patch.run_packed(transformer, *batch))
        predict.save_lora(tmp_path / predict.LORA_FILE, transformer, {})
        transformer.delete_adapters("default")
        base = torch.cat(rope_patch.run_packed(transformer, *batch))
        predict.load_lora(transformer, tmp_path)
        got = torch.cat(rope_patch.run_packed(transformer, *batch))
    transformer.delete_adapters("default")
    limit = 1e-5 if DTYPE == torch.float32 else 1e-2
    show(f"{MODEL}, LoRA loaded again", rel(got, want), limit)
    assert rel(got, want) <= limit < rel(base, want)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="on a CPU another test measures this, with a model of d = 512")
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
    memory = log_of(tmp_path / "run")[-1]["memory"] / 2**30
    show(f"{MODEL}, planned / measured memory", float(row) / memory, 1.15)
    assert float(row) == pytest.approx(memory, rel=0.15)


# ---- chapter 11: what is trained is what is drawn --------------------------------------------------------------------


@pytest.mark.parametrize("family, controls", [
    ("v1", [(100, 75)]), ("Plus", [(100, 75)]), ("Plus", [(64, 150), (100, 75)]), ("2511", [(100, 75), (64, 150)])],
    ids=lambda v: v if isinstance(v, str) else f"{len(v)} controls")
def test_training_predicts_what_the_stock_pipeline_predicts(tmp_path, monkeypatch, family, controls):
    """From the files to the velocity: what train.py computes of a cached sample, in a pack with one of another size,
    takes the stock pipeline from the same noisy latents to where its own step at this noise level goes; and the
    velocity that the loss asks for would take it to the target."""
    model = copy_model(tmp_path / "model")
    if family == "v1":
        as_v1(model)
    config = json.loads((model / "transformer/config.json").read_text()) | dict(zero_cond_t=family == "2511")
    (model / "transformer/config.json").write_text(json.dumps(config))
    data, area = add_item(tmp_path / "data", "cat", [(90, 70), *controls], "turn it blue"), 96 * 96
    add_item(data, "dog", [(64, 130), (40, 40)], "add a red border around the dog, and leave the rest as it is")
    preds, run_packed = [], rope_patch.run_packed
    monkeypatch.setattr(rope_patch, "run_packed", lambda *args: preds.append(run_packed(*args)) or preds[-1])
    run = run_script("train.py", "--model", model, "--data", data, "--cache_dir", tmp_path / "c", "--out_dir",
                     tmp_path / "run", "--target_pixels", area, "--control_pixels", area, "--max_steps", 1,
                     "--batch_size", 2, "--lr", 0, "--gradient_checkpointing", 0, "--device", "cpu", *EXACT)
    assert run.status == 0, run.err
    batch = run.globals["load_batch"]([0, 1])
    with torch.no_grad():
        run.globals["batch_loss"](batch)
    pipe = stock_pipeline(model)
    pipe.scheduler = type(pipe.scheduler)(shift=1.0)  # its only noise level is the one that it is given
    for position, (got, velocity) in enumerate(zip(preds[-1], batch["targets"])):
        sample = run.globals["draw"](position)[0]
        target, *images = [Image.open(path) for path in [sample["target"], *sample["control"]]]
        width, height = plus_code.calculate_dimensions(area, target.width / target.height)
        size = dict(height=height, width=width)
        pixels = pipe.image_processor.preprocess(target, **size).unsqueeze(2)
        _, x0 = pipe.prepare_latents(pixels if family == "v1" else [pixels], 1, 16, height, width, torch.float32, "cpu",
                                     torch.Generator())
        s, noise = run.globals["draw_noise"](position, *x0[0].shape)
        noisy = (1 - s) * x0 + s * noise
        with stock_area(area):
            after = pipe(image=images[0] if family == "v1" else images, prompt=sample["text"][0]["prompt"],
                         latents=noisy, **size, sigmas=[s.item()], num_inference_steps=1, true_cfg_scale=1.0,
                         output_type="latent").images
        show(f"{family}, {sample['name']}: velocity at {s:.3f}", rel(got[:len(noise)], (noisy - after)[0] / s), 1e-5)
        assert rel(got[:len(noise)], (noisy - after)[0] / s) <= 1e-5
        assert rel(noisy[0] - s * velocity, x0[0]) <= 1e-5


# ---- chapter 12: watching and steering a training --------------------------------------------------------------------


def log_of_two_steps(data, tmp_path, *flags):
    """train() on EXACT numbers -> its records, its folder."""
    result = train(data, tmp_path, "--cache_dir", tmp_path / "c", *NATIVE, *EXACT, *flags)
    assert result.status == 0, result.err
    out_dir = max(tmp_path.glob("run-*"), key=lambda p: int(p.name[4:]))
    return log_of(out_dir), out_dir, result


def test_looking_changes_no_number(tmp_path, data, monkeypatch):
    """With pictures drawn and the validation loss measured after every step: the same curve and LoRA, to the bit, with
    dropout and a frozen LoRA below, which stays frozen. Pictures without the LoRA are drawn once."""
    monkeypatch.setitem(predict.SAMPLING, "num_inference_steps", 2)
    flags = ["--lora_dropout", 0.5, "--max_steps", 3, "--val_data"]
    _, base, _ = log_of_two_steps(data, tmp_path, *flags, "--seed", 5)
    flags[:0] = ["--base_lora", base]
    unseen, a, _ = log_of_two_steps(data, tmp_path, *flags)
    drawn, denoise = [], predict.denoise
    monkeypatch.setattr(predict, "denoise", lambda *args: drawn.append(1) or denoise(*args))
    seen, b, result = log_of_two_steps(data, tmp_path, *flags, data, "--sample_every", 1)
    ns = result.globals
    assert {n for n, p in ns["transformer"].named_parameters() if p.requires_grad} == set(ns["lora"])
    assert curve(seen) == curve(unseen) and len(drawn) == 1 + 3
    assert all(torch.equal(x, lora_of(b)[k]) for k, x in lora_of(a).items())
    assert [p.name for p in sorted((b / "samples").glob("*.png"))] == [f"step_{n:06d}_data.png" for n in (1, 2, 3)]
    assert all("val_loss" in r for r in seen) and not any("val_loss" in r for r in unseen)


def test_validation_losses_compare_across_runs(tmp_path, data, monkeypatch):
    """While the LoRA does nothing they are one number in every step and for every --seed, whatever is dropped; it falls
    when the pictures themselves are learned."""
    monkeypatch.setattr(predict, "denoise", lambda model, config, jobs, *_: [  # nobody looks at these pictures
        setattr(job, "latents", job.noise) for job in jobs])
    monkeypatch.setattr(predict, "drift", lambda *_: dict(shift=0, zoom=0, colour=0))
    flags = ["--val_data", data, "--sample_every", 1]
    still = ["--lr", 0, "--lora_dropout", 0.9, *flags]
    runs = [log_of_two_steps(data, tmp_path, *still, "--seed", seed)[0] for seed in (0, 1)]
    assert len({r["val_loss"] for log in runs for r in log}) == 1
    learned = log_of_two_steps(data, tmp_path, *flags, "--max_steps", 5, "--sample_every", 5, "--warmup_steps", 0)[0]
    assert ["val_loss" in r for r in learned] == [False] * 4 + [True]
    assert learned[-1]["val_loss"] < 0.98 * runs[0][0]["val_loss"]


def test_nothing_to_look_at_is_refused(tmp_path, data):
    result = train(data, tmp_path, "--val_data", "--sample_every", 1)
    assert result.status == 2 and is_one_line(result.errors[0], "--sample_every", "--val_data")


def test_the_log_has_every_samples_loss_whoever_computed_it(tmp_path, small, start):
    """One process or two: the same timesteps, those that the stream says, and the same losses, whose mean is the
    step's."""
    flags = [*small.flags, "--max_steps", 2, "--batch_size", 3]
    one = run_script("train.py", *flags, "--out_dir", tmp_path / "one")
    ranks = start_ranks(start, *flags, "--out_dir", tmp_path / "two")
    assert [r.wait() for r in ranks] == [0, 0], [r.output() for r in ranks]
    for a, b in zip(log_of(tmp_path / "one"), log_of(tmp_path / "two"), strict=True):
        assert a["timesteps"] == b["timesteps"] and b["losses"] == pytest.approx(a["losses"], abs=2e-5)
        assert np.mean(a["losses"]) == pytest.approx(a["loss"], abs=2e-5)
        position = 3 * (a["step"] - 1) + 1
        size = one.globals["draw"](position)[1]["img_shapes"][0]
        s, _ = one.globals["draw_noise"](position, prod(size), 64)
        assert a["timesteps"][1] == pytest.approx(float(s), abs=1e-4)


def test_the_hardest_sample_is_found_whatever_its_timesteps(small, tmp_path):
    """A log in which every loss grows with the timestep, and one sample's is three times the others'."""
    result = run_script("train.py", *small.flags, "--max_steps", 1, "--out_dir", tmp_path / "a")
    ns, rng, records = result.globals, np.random.default_rng(0), []
    for step in range(1, 201):
        s = rng.random(2)
        names = [ns["draw"](2 * (step - 1) + i)[0]["name"] for i in range(2)]
        slow = [0.4 if name == "3" else 1 for name in names]  # the hard one is seen where all is easy
        losses = [(3 if name == "3" else 1) * 10 ** (x * y) for name, x, y in zip(names, s, slow)]
        records.append(dict(step=step, loss=1, timesteps=list(s * slow), losses=losses))
    (tmp_path / "a/log.jsonl").write_text("\n".join(map(json.dumps, [{}, *records])))
    found = ns["find_hardest"]()
    assert found[0]["name"] == "3" and found[0]["ratio"] > 1.3 * found[1]["ratio"] and len(found) == 5
    assert sum(f["times"] for f in found) == 200
    written = json.loads((tmp_path / "a/samples/hardest.json").read_text())
    assert all(set(w) == {"name", "ratio", "times"} for w in written)
    assert ("pip install matplotlib" in result.out) != (tmp_path / "a/loss.png").exists()


def test_curves_are_drawn(small, tmp_path):
    pytest.importorskip("matplotlib")
    assert run_script("train.py", *small.flags, "--max_steps", 2, "--out_dir", tmp_path / "a").status == 0
    assert Image.open(tmp_path / "a/loss.png").size == (1200, 400)


def test_tensorboard_has_the_curves_and_the_pictures(tmp_path, data):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    log, out_dir, _ = log_of_two_steps(data, tmp_path, "--tracker", "tensorboard", "--val_data", data)
    events = EventAccumulator(str(out_dir / "tensorboard")).Reload()
    for name in ("loss", "lr", "grad_norm", "val_loss"):
        assert [e.value for e in events.Scalars(name)] == pytest.approx([r[name] for r in log if name in r])
    assert [e.step for e in events.Images("data")] == [2]


def test_wandb_works_offline(small, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    result = run_script("train.py", *small.flags, "--max_steps", 1, "--out_dir", tmp_path / "a", "--tracker", "wandb")
    assert result.status == 0 and list((tmp_path / "a/wandb").glob("offline-run-*/*.wandb"))
    result.globals["tracker"].finish()


@pytest.mark.parametrize("flag, package", [
    ("--tracker tensorboard", "tensorboard"), ("--tracker wandb", "wandb"),
    ("--optimizer adamw8bit", "bitsandbytes"), ("--optimizer prodigy", "prodigyopt")])
def test_a_package_that_is_missing_is_named_before_anything_slow(small, tmp_path, monkeypatch, flag, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != package and find_spec(name) or None)
    monkeypatch.setattr(cache, "find_model", lambda *_: pytest.fail("model looked for"))
    result = run_script("train.py", *small.flags, *flag.split(), "--out_dir", tmp_path / "a")
    assert result.status == 2 and is_one_line(result.errors[0], flag.split()[0], f"pip install {package}")


# ---- pictures left out ----

def test_dropped_pictures_leave_latents_and_prompt(tmp_path, data, plus):
    """The share that was asked for, in a stream of its own: all else of a position is as without the flag. Such a
    sample is the target alone with the caption as stock encodes it without pictures, or the empty prompt likewise."""
    rates = ["--caption_dropout_rate", 0.5, "--cache_dir", tmp_path / "c", *NATIVE, *EXACT]
    without = train(data, tmp_path, *rates)
    files = cached_files(tmp_path / "c")
    result = train(data, tmp_path, *rates, "--prompt_image_dropout_rate", 0.5)
    assert result.status == 0, result.err
    ns, before = result.globals, without.globals
    draws = [ns["draw"](p) for p in range(400)]
    for p, (sample, scale, text) in enumerate(draws):
        want = before["draw"](p)
        assert (sample["name"], text["prompt"]) == (want[0]["name"], want[2]["prompt"])
        assert scale["img_shapes"] == (want[1]["img_shapes"][:1] if text.get("plain") else want[1]["img_shapes"])
    kinds = Counter((bool(text.get("plain")), text["prompt"] == "") for _, _, text in draws)
    assert len(kinds) == 4 and all(75 < n < 125 for n in kinds.values()), kinds
    for prompt in ("add a red border", ""):
        p = next(p for p, (_, _, text) in enumerate(draws) if text.get("plain") and text["prompt"] == prompt)
        batch, full = ns["load_batch"]([p]), before["load_batch"]([p])
        want = cache.encode_prompt(plus, prompt, [], [])
        assert len(want) == draws[p][2]["tokens"] and rel(batch["prompt_embeds"][0], want) < 1e-6
        n = prod(batch["img_shapes"][0][0])
        assert len(batch["img_shapes"][0]) == 1 and torch.equal(batch["latents"][0], full["latents"][0][:n])
    kept = cached_files(tmp_path / "c")
    assert files.items() <= kept.items() and len(kept) == len(files) + 2  # two items of one caption
    live = train(data, tmp_path, *rates, "--prompt_image_dropout_rate", 0.5, "--no-use_cache")
    assert live.losses == pytest.approx(result.losses, rel=1e-5) and without.losses != result.losses


def test_prompts_without_pictures_can_be_prepared(tmp_path, data):
    """cache.py --plain_prompt makes all that a training from the cache alone needs; without it the flag is named."""
    flags = ["--cache_dir", tmp_path / "c", *NATIVE]
    training = [*flags, "--data", "none", "--prompt_image_dropout_rate", 1, "--val_data"]
    assert make_cache(data, *flags[1:]).status == 0
    refused = train(None, tmp_path, *training)
    assert refused.status == 1 and is_one_line(refused.errors[0], tmp_path / "c", "--plain_prompt")
    assert make_cache(data, *flags[1:], "--plain_prompt").status == 0
    assert train(None, tmp_path, *training).status == 0
    refused = train(None, tmp_path, *training, "--caption_dropout_rate", 1)
    assert refused.status == 1 and is_one_line(refused.errors[0], "empty prompt")
    assert make_cache(data, *flags[1:], "--plain_prompt", "--empty_prompt").status == 0
    assert train(None, tmp_path, *training, "--caption_dropout_rate", 1).status == 0


def test_v1_cannot_go_without_pictures(tmp_path, data, monkeypatch):
    model = as_v1(copy_model(tmp_path / "model"))
    monkeypatch.setattr(cache, "load_encoders", lambda *_: pytest.fail("model loaded"))
    for result in (train(data, tmp_path, "--model", model, "--prompt_image_dropout_rate", 0.1),
                   make_cache(data, tmp_path / "c", "--model", model, "--plain_prompt")):
        assert result.status == 1 and is_one_line(result.errors[0], "--prompt_image_dropout_rate", "v1")


# ---- mean weights, other optimizers ----

def test_the_final_lora_is_the_running_mean(small, tmp_path):
    """By its definition, from the checkpoints' own weights; the raw one lies beside it, and the run is as without."""
    flags = [*small.flags, "--max_steps", 4, "--save_every", 1, "--keep", 4]
    for name, decay in (("a", 0), ("b", 0.3)):
        result = run_script("train.py", *flags, "--out_dir", tmp_path / name, "--ema_decay", decay)
        assert result.status == 0, result.err
    a, b = tmp_path / "a", tmp_path / "b"
    assert curve(log_of(a)) == curve(log_of(b)) and not (a / "pytorch_lora_weights_raw.safetensors").exists()
    raw, final = lora_of(b / "pytorch_lora_weights_raw.safetensors"), lora_of(b)
    assert all(torch.equal(x, raw[k]) for k, x in lora_of(a).items())
    mean = {k: torch.zeros_like(x) for k, x in final.items() if "lora_B" in k}  # where it starts
    for step in range(4):
        decay = min(0.3, (1 + step) / (10 + step))
        weights = lora_of(b / f"checkpoint-{step + 1:06d}")
        mean = {k: decay * x + (1 - decay) * weights[k] for k, x in mean.items()}
    assert all(torch.allclose(final[k], x, rtol=1e-5) for k, x in mean.items())
    assert any(rel(raw[k], x) > 1e-2 for k, x in mean.items())


def test_pictures_and_validation_loss_are_of_the_mean(tmp_path, data, monkeypatch):
    """And drawn without dropout: measured again, with other raw weights, the loss is the same."""
    monkeypatch.setattr(predict, "denoise", lambda model, config, jobs, *_: [  # the weights, as a picture
        setattr(job, "latents", job.noise) for job in jobs] and seen.append(weight(model)))
    weight = lambda model: next(p for n, p in model.named_parameters() if "lora_B.default" in n).detach().clone()
    seen = []
    log, out_dir, result = log_of_two_steps(data, tmp_path, "--ema_decay", 0.9, "--lr", 1, "--lora_dropout", 0.5,
                                        "--val_data", data)
    ns = result.globals
    name = next(n for n in ns["lora"] if "lora_B" in n)
    assert torch.equal(seen[-1], ns["ema"][name]) and not torch.equal(seen[-1], ns["lora"][name])
    final = log[-1]["val_loss"]
    for p in ns["lora"].values():
        p.data += 1
    assert ns["validation_loss"]() == final


@pytest.mark.parametrize("optimizer, ema", [("adamw", 0.9), ("prodigy", 0), ("adamw8bit", 0)])
def test_every_optimizer_resumes_to_the_bit(small, tmp_path, optimizer, ema):
    packages = dict(prodigy="prodigyopt", adamw8bit="bitsandbytes")
    if optimizer in packages:
        pytest.importorskip(packages[optimizer])
    flags = [*small.flags, "--optimizer", optimizer, "--ema_decay", ema, "--lora_rank", 64]
    for name, steps, more in (("a", 4, []), ("b", 2, []), ("b", 4, ["--resume"])):
        result = run_script("train.py", *flags, "--out_dir", tmp_path / name, "--max_steps", steps, *more)
        assert result.status == 0, result.err
    assert curve(log_of(tmp_path / "a")) == curve(log_of(tmp_path / "b"))
    for file in {predict.LORA_FILE, "pytorch_lora_weights_raw.safetensors"} & set(os.listdir(tmp_path / "a")):
        a, b = lora_of(tmp_path / "a" / file), lora_of(tmp_path / "b" / file)
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_prodigy_finds_its_learning_rate(small, tmp_path):
    """With no --lr its factor is 1, not AdamW's rate of this model; the log has the rate that was applied."""
    pytest.importorskip("prodigyopt")
    result = run_script("train.py", *small.flags, "--out_dir", tmp_path / "a", "--optimizer", "prodigy")
    rates = [r["lr"] for r in log_of(tmp_path / "a")]
    assert result.globals["args"].lr == 1 and 0 < rates[0] < rates[-1] < 0.1


# ---- chapter 13: what a hostile user found ---------------------------------------------------------------------------

def test_a_report_lists_every_broken_picture_and_examines_the_others(tmp_path, data):
    for name in ("x", "y"):
        add_item(data, name)
        file = data / "target" / f"{name}.png"
        file.write_bytes(file.read_bytes()[:-40])
    result = run_script("cache.py", "--data", data, "--cache_dir", tmp_path / "c", "--report", *ON_DEVICE)
    assert result.status == 1 and len(result.errors) == 2 and "target width" in result.out
    assert all(any(f"target/{name}.png" in e for e in result.errors) for name in "xy")
    rows = json.loads((tmp_path / "c/report/report.json").read_text())
    assert rows and not {"x", "y"} & {r["name"] for r in rows}


def test_prompts_that_another_call_has_encoded_stay_in_the_index(tmp_path, data):
    make_cache(data, tmp_path / "c", "--empty_prompt", "--plain_prompt")
    before = (tmp_path / "c/index.json").read_text()
    assert make_cache(data, tmp_path / "c", "--prune").status == 0
    assert (tmp_path / "c/index.json").read_text() == before
    assert all(file.exists() for s in json.loads(before)["samples"] for file in cache.sample_files(tmp_path / "c", s))


def test_what_headers_tell_is_said_before_the_encoding(tmp_path, data, monkeypatch, capsys):
    (data / "target" / "lost.png").write_bytes(next((data / "target").glob("*.png")).read_bytes())
    said, real = [], cache.encode_missing
    monkeypatch.setattr(cache, "encode_missing",
                        lambda *args: said.append(sys.stderr.tell() or sys.stderr.buffer.tell()) or real(*args))
    result = make_cache(data, tmp_path / "c")
    assert said[0] > 0 and result.status == 1 and result.err.count("lost.png: no co") == 1


@pytest.mark.parametrize("out", ["given", "x.jpg"])
def test_a_picture_never_overwrites_the_one_given_and_is_a_png(tmp_path, photos, out):
    mine = shutil.copy(photos[0], tmp_path / "mine.png")
    before = Path(mine).read_bytes()
    result = run_script("predict.py", "--image", mine, "--prompt", "a", "--out", mine if out == "given" else out)
    assert result.status == 2 and "argument --out" in result.err and Path(mine).read_bytes() == before


def test_the_next_command_samples_with_the_base_lora_at_its_scale(tmp_path):
    assert train_toy(tmp_path / "base").status == 0
    result = train_toy(tmp_path / "my run", "--base_lora", tmp_path / "base", "--base_lora_scale", 0.5)
    assert f"--lora '{tmp_path / 'my run'}' {tmp_path / 'base'} --lora_scale 1 0.5 --image" in result.out, result.err
