"""
The claims of this project as tests. The oracle is stock diffusers, called with one sample at a time.

$ pytest test_consistency.py                                    # float32 on the CPU
$ pytest test_consistency.py --dtype bfloat16 --device cuda     # one GPU
$ pytest test_consistency.py --full -k "split or full_batch"    # with the samples of 8,192 tokens, 2 minutes
$ pytest test_consistency.py -k packed -s                       # -s prints each measured error beside its limit

Shapes: B samples, I image tokens (target first, then controls), T text tokens, S = T + I (joint rows: [text, image]),
C channels, J text channels, E inner channels, O output channels, H heads, D head dim, R = D/2 complex rotations.
"""
import copy
import functools
import inspect
import random
import re
from collections import Counter
from math import prod
from types import SimpleNamespace

import pytest
import torch
from conftest import OPTIONS
from diffusers import QwenImageTransformer2DModel
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.transformers import transformer_qwenimage as stock_code
from peft import LoraConfig

from rope_patch import (
    QwenDoubleStreamAttnProcessor2_0_MultiRes,
    apply_rotary_emb_qwen_batched,
    extract_batch_field,
    get_image_shapes_multi_resolution,
    pad_latents_for_multi_res,
    patch_qwen_forward_for_multi_resolution,
    patch_qwen_model_for_multi_resolution,
    plan_packs,
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
