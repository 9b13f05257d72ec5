"""
Six claims, each with a negative control that shows its teeth. The oracle is stock diffusers, one sample at a time.

1. A call that stock diffusers knows is bit-equal to stock.
2. A batch of mixed sizes, and its gradients, equal stock one sample at a time; pads never leak.
3. A training step is the formula with the stock model; packed, one at a time and on two processes alike.
4. A resumed run is the unbroken run, a cached sample is the live one, and the LoRA loads in the stock pipeline.
5. What predict.py generates is what the stock pipeline draws.
6. The VAE computes one frame with stock's numbers, and several frames as stock does.

$ pytest test_consistency.py                                    # float32 on the CPU, two minutes on one core
$ pytest test_consistency.py --dtype bfloat16 --device cuda     # one GPU
$ pytest test_consistency.py --full -k "split or full_batch"    # with the samples of 8,192 tokens, 2 minutes
$ pytest test_consistency.py -k mixed -s                        # -s prints each measured error beside its limit
$ pytest                                                        # these, and all of tests/

Models, samples, scripts and fixtures are in tests/harness.py.

Shapes: B samples, I image tokens (target first, then controls), T text tokens, S = T + I (joint rows: [text, image]),
C channels, J text channels, E inner channels, O output channels, H heads, D head dim, R = D/2 complex rotations.
"""
import copy
import functools
import inspect
import json
import os
import shutil
import subprocess
import sys
from math import prod

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageEditPipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus_code
from peft import LoraConfig, set_peft_model_state_dict
from PIL import Image

import cache
from library.files import tensor_files
from library.models import picture_vae
import predict
import rope_patch
from rope_patch import extract_batch_field, get_image_shapes_multi_resolution, patch_qwen_model_for_multi_resolution
from tests.harness import (ADAMW, BATCHES, DEVICE, DTYPE, E, EXACT, FULL, HERE, HOLES, MIXED, MIXED_MODES, MODES, O,
                           TINY, add_item, as_v1, assert_bitwise, assert_equals_stock, assert_one_by_one, copy_model,
                           curve, demo_cache, encoder_flags, everything, free_port, globals_of_train, hot_model,
                           image_lens, image_mask_of, job_of, joint_mask_of, log_of, lora_of, losses_of, make_batch,
                           one_by_one, padded_call, paint_picture, patched_copy, patched_model, precomputed_call, rel,
                           run, run_script, show, stock_answer, stock_area, stock_pipeline, take_apart, text_mask_of,
                           train_log, unpatched, with_gradients)

# ==== claim 1: a call that stock diffusers knows is bit-equal to stock ================================================

RESIDUALS = torch.randn(2, 2, 40, E, generator=torch.Generator().manual_seed(0)) # of two blocks, two samples
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
BFLOAT = torch.bfloat16
GRID = [("v1", DTYPE, True, name) for name in STOCK_CALLS] # all of them once; then other variants and bfloat16
GRID += [(variant, DTYPE, True, name) for variant in ("2511", "layered")
         for name in ("nested shapes", "text mask with holes", "controlnet residual per block")]
GRID += [("v1", BFLOAT, lora, name) for name in ("nested shapes", "text mask with holes") for lora in (True, False)]
GRID += [("2511", BFLOAT, True, "nested shapes")]

@pytest.mark.parametrize("variant, dtype, lora, name", GRID, ids=str)
def test_stock_call_is_bitwise_stock(variant, dtype, lora, name):
    patched, stock = patched_model(variant, dtype, lora), hot_model(variant, dtype, lora)
    assert_bitwise(everything(patched, STOCK_CALLS[name]), everything(stock, STOCK_CALLS[name]))

def test_stock_arguments_keep_their_order():
    order = list(inspect.signature(QwenImageTransformer2DModel.forward).parameters)[1:-1] # not self, not return_dict
    assert list(inspect.signature(patched_model("layered").forward).parameters)[:len(order)] == order
    for changes in (STOCK_CALLS["text mask with holes"], STOCK_CALLS["controlnet residual per block"]):
        assert_bitwise(everything(patched_model("layered"), changes, *order), everything(hot_model("layered"), changes))

def test_two_stock_calls_differ():
    """The negative control: bit-equality is not had by chance, nor by gradients that are never compared."""
    model = patched_model(lora=True)
    whole, masked = [everything(model, STOCK_CALLS[name]) for name in ("nested shapes", "text mask with holes")]
    assert len(whole) > 30 and all(rel(a, b) > 1e-3 for a, b in zip(whole, masked) if b.any())

# ==== claim 2: a batch of mixed sizes, and its gradients, equal stock one sample at a time; pads never leak ===========

MIXTURES = [(batch, mode, variant, DTYPE) for batch in BATCHES for mode in MIXED_MODES for variant in ("v1", "2511")]
MIXTURES += [("one to six pictures", mode, variant, DTYPE) for mode in MIXED_MODES
             for variant in ("layered", "2511 layered")]
MIXTURES += [(batch, mode, variant, BFLOAT) for mode in MIXED_MODES
             for batch, variant in (("mixed sizes", "v1"), ("one to six pictures", "2511"))]
MIXTURES = [m for m in MIXTURES if m[:2] != ("holes in the text", "packed")] # packed mode takes no mask

@pytest.mark.parametrize("batch, mode, variant, dtype", MIXTURES, ids=str)
def test_mixed_batch_and_its_gradients_equal_one_by_one(batch, mode, variant, dtype):
    model = patched_model(variant, dtype, lora=True)
    got = with_gradients(model, BATCHES[batch], run(model, mode, BATCHES[batch]))
    exact = stock_answer(batch, variant, torch.float32) if dtype == BFLOAT else None
    assert_equals_stock(got, stock_answer(batch, variant, dtype), exact)

def test_text_positions_of_the_first_sample_are_wrong_for_the_others():
    """The negative control: the hot model feels this common mistake, so the tests above have teeth."""
    model, samples = patched_model(dtype=torch.float32), BATCHES["mixed sizes"]
    img_freqs_BIR, txt_freqs_BTR = precomputed_call(model, samples)["image_rotary_emb"]
    wrong = run(model, "precomputed", samples, image_rotary_emb=(img_freqs_BIR, txt_freqs_BTR[:1].expand(3, -1, -1)))
    errors = list(map(rel, wrong, one_by_one(hot_model(dtype=torch.float32), samples)))
    print("errors:", errors)
    assert errors[0] <= 1e-5 and min(errors[1:]) > 0.1

@pytest.mark.parametrize("garbage", [1e3, float("nan")])
@pytest.mark.parametrize("mode, argument, variant", [
    ("padded", "hidden_states", "v1"), ("padded", "encoder_hidden_states", "2511"),
    ("precomputed", "hidden_states", "2511"), ("precomputed", "encoder_hidden_states", "v1"),
    ("precomputed", "image frequencies", "v1"), ("precomputed", "text frequencies", "v1")])
def test_padding_never_leaks(mode, argument, variant, garbage):
    """Outputs and LoRA gradients stay bitwise the same, and pads get no gradient."""
    model, samples, answers = patched_model(variant, lora=True), BATCHES["holes in the text"], []
    for fill in (0, garbage):
        call = MODES[mode](model, samples)
        freqs = dict(zip(("image frequencies", "text frequencies"), call.get("image_rotary_emb", ())))
        spoilt = (call | freqs)[argument]
        pads = ~(text_mask_of(samples) if argument in ("encoder_hidden_states", "text frequencies") else
                 image_mask_of(samples, spoilt.shape[1]))
        spoilt[pads] = fill
        for name in ("hidden_states", "encoder_hidden_states"):
            call[name].requires_grad_()
        answers.append(with_gradients(model, samples, take_apart(model(**call).sample, mode, samples)))
        assert spoilt.is_complex() or (spoilt.grad[pads] == 0).all()
    assert_bitwise(*answers)

@torch.no_grad()
def test_without_its_mask_padding_would_leak():
    """The negative control: the same pads, called valid, move the samples beside them."""
    model, call = patched_model(), padded_call(patched_model(), MIXED)
    valid = run(model, "padded", MIXED)
    ones = torch.ones(2, call["hidden_states"].shape[1] + 12, dtype=torch.bool, device=DEVICE)
    call |= dict(precomputed_call(model, MIXED), attention_kwargs={"attention_mask": ones})
    call["hidden_states"][1, 48:] = call["hidden_states"][0, :15]
    assert rel(model(**call).sample[1, :48], valid[1]) > 0.01

# ---- of the first seed document: seven tests -------------------------------------------------------------------------

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
    for n_controls in ([1, 2], torch.tensor([1, 2])): # it counts the controls after the first, sample by sample
        assert get_image_shapes_multi_resolution(sizes | {"n_controls": n_controls}, 2) == [first, second]
    assert get_image_shapes_multi_resolution(sizes | {"n_controls": 0}, 2) == [first[:2], second[:2]]
    del sizes["height_control_2"], sizes["width_control_2"] # without n_controls the keys count
    assert get_image_shapes_multi_resolution(sizes, 2) == [first, second[:3]]

def test_extract_batch_field_list():
    assert extract_batch_field({"height": [512, 640]}, "height", 1) == 640
    assert extract_batch_field({"height": (512, 640)}, "height", 0) == 512
    assert extract_batch_field({"prompt": ["a", "b"]}, "prompt", 1) == "b"

def test_extract_batch_field_tensor():
    for values, index, want in [([64, 80], 1, 80), ([64], 0, 64), ([64], 2, 64), (64, 1, 64), ([0.2, 0.5], 1, 0.5)]:
        got = extract_batch_field({"height": torch.tensor(values)}, "height", index)
        assert got == want and type(got) is type(want) # a python number, which can stand in a shape

def test_extract_batch_field_scalar():
    for value in (512, 0.5, "cat", None):
        assert extract_batch_field({"height": value}, "height", 3) is value
    with pytest.raises(KeyError, match="depth"):
        extract_batch_field({"height": 512}, "depth", 0)

def test_qwen_multi_resolution_inference_consistency():
    config = dict(attention_head_dim=64, axes_dims_rope=(8, 28, 28))
    samples = make_batch(([(1, 16, 32)], 64), ([(1, 24, 24)], 64), ([(1, 20, 28)], 64))
    for mode in MIXED_MODES:
        assert_one_by_one(run(patched_model(**config), mode, samples), samples, **config)

# ---- of the second seed document: ten steps from the stock model to the masked mixed batch ---------------------------

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
    return s2_original(torch.float32) if DTYPE == BFLOAT else None

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
    for masked in (True, False): # the shapes alone also tell where the pads are
        assert_equals_stock(s2_custom(split=False, masked=masked), s2_original(), s2_exact())

def test_padding_is_masked():
    for row_IO, n in zip(s2_rows(patched_model(**S2_CONFIG), split=False, masked=True), image_lens(S2_SAMPLES)):
        assert len(row_IO) == max(image_lens(S2_SAMPLES)) and (row_IO[n:] == 0).all()
        assert row_IO[:n].abs().sum(1).min() > 0

# ==== claim 3: a training step is the formula with the stock model, however it is computed ============================

@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """-> flags of a dataset of 12 samples of six sizes, with one control or two, half of them with an edit mask."""
    folder = tmp_path_factory.mktemp("masked")
    for n in range(12):
        sizes = [(128 + 32 * (n % 3), 128 + 32 * (n % 2)), (96, 64), (64, 128)][:2 + (n % 4 > 1)]
        add_item(folder / "data", f"{n:02}", sizes, f"paint {n} sides red",
                 paint_picture(sizes[0], mode="L") if n < 6 else None)
    return ["--data", folder / "data", "--cache_dir", folder / "cache", "--mask_foreground_weight", 3,
            "--mask_background_weight", 0.5]

def test_training_step_equals_the_formula_with_stock_one_at_a_time(tmp_path, masked):
    """The first step's LoRA gradients and loss, computed here from the definition with the stock model, one sample at a
    time, equal what train.py applied: read from its optimizer, exp_avg = 0.1 * gradient after one step."""
    train_log(tmp_path / "a", *masked, *ADAMW, "--max_steps", 1, "--max_grad_norm", 1e9, "--warmup_steps", 0, "--lr", 0)
    ns = globals_of_train(tmp_path / "b", *masked)
    stock = cache.load_part(QwenImageTransformer2DModel, TINY / "transformer", "float32").requires_grad_(False)
    stock.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=ns["args"].lora_targets))
    set_peft_model_state_dict(stock, {k.removeprefix("transformer."): v for k, v in lora_of(tmp_path / "a").items()})
    losses, weights = [], []
    for position in range(4):
        p = ns["pick"](position)
        t, g = cache.load_latents(p.sample, p.encoding), ns["generator"]("noise", position)
        s = ns["pick_timestep"](g, len(t["pixel_latent"]))
        noise = torch.randn(t["pixel_latent"].shape, generator=g)
        x = torch.cat([(1 - s) * t["pixel_latent"] + s * noise, t["control_latent"]])
        v = stock(hidden_states=x[None], encoder_hidden_states=cache.load_text(p.sample, (p.prompt, True))[None],
                  timestep=s[None], img_shapes=[p.img_shapes], return_dict=False)[0][0, :len(noise)]
        weight = 0.5 + 2.5 * t["edit_mask"] if "edit_mask" in t else torch.ones(len(noise))
        weights.append(weight)
        losses.append(((v - (noise - t["pixel_latent"])).square().mean(-1) * weight).sum() / weight.sum())
    assert {weight.unique().numel() > 1 for weight in weights} == {False, True}
    loss = torch.stack(losses).mean()
    loss.backward()
    error = abs(log_of(tmp_path / "a")[0]["loss"] / loss.item() - 1)
    show("loss", error, 3e-6)
    assert error <= 3e-6 # one of them maybe on a card
    moments, _ = tensor_files.read_tensors(tmp_path / "a" / "checkpoint-000001" / "optimizer.safetensors")
    grads = {name: p.grad for name, p in stock.named_parameters() if p.requires_grad and p.grad is not None}
    errors = {name: rel(10 * moments["exp_avg." + name], grad) for name, grad in grads.items() if grad.any()}
    show("worst LoRA gradient", max(errors.values()), 1e-5)
    assert len(errors) >= 32 and max(errors.values()) <= 1e-5

WAYS = {
    "one at a time": ["--max_tokens", 1], "several packs": ["--max_tokens", 150],
    "recomputed": ["--gradient_checkpointing", 2]}

@pytest.fixture(scope="module")
def packed_log(tmp_path_factory, masked):
    return train_log(tmp_path_factory.mktemp("packed") / "a", *masked, *SIX)

SIX = [*ADAMW, "--caption_dropout_rate", 0.1, "--batch_size", 6]

@pytest.mark.parametrize("way", WAYS)
def test_batching_does_not_change_training(tmp_path, masked, packed_log, way):
    """Two controls, edit masks and dropped captions included: the same losses and gradient norms."""
    log = train_log(tmp_path / "a", *masked, *SIX, *WAYS[way])
    show(way, max(abs(a / b - 1) for a, b in zip(losses_of(log), losses_of(packed_log))), 1e-5)
    assert losses_of(log) == pytest.approx(losses_of(packed_log), rel=1e-5)
    assert [r["grad_norm"] for r in log] == pytest.approx([r["grad_norm"] for r in packed_log], rel=1e-3)

def test_another_mixture_would_change_the_losses(tmp_path, masked, packed_log, monkeypatch):
    """The negative control: with the first sample's positions for the whole pack, the mistake of stock diffusers."""
    real, first = rope_patch.sample_freqs, []

    def shared(pos_embed, shapes, txt_len, device):
        first[:] = first or [shapes]
        img_freqs, txt_freqs = real(pos_embed, first[0], txt_len, device)
        return img_freqs[torch.arange(sum(map(prod, shapes))) % len(img_freqs)], txt_freqs
    monkeypatch.setattr(rope_patch, "sample_freqs", shared)
    log = train_log(tmp_path / "a", *masked, *SIX)
    assert all(abs(a / b - 1) > 1e-3 for a, b in zip(losses_of(log), losses_of(packed_log)))

def test_two_ranks_equal_one(tmp_path):
    """torchrun: the same samples with the same noise, losses to 3e-6, one LoRA file. 5 samples a step, of which one has
    two and the other three."""
    flags = [*ADAMW, "--max_steps", 3, "--batch_size", 5]
    one = train_log(tmp_path / "one", *flags)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port", free_port(),
               HERE / "train.py", "--cache_dir", demo_cache(), "--val_data", *EXACT, "--device", "cpu",
               "--out_dir", tmp_path / "two", *flags]
    job = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8",
                         env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert job.returncode == 0 and "Traceback" not in job.stderr, job.stderr
    two = log_of(tmp_path / "two")
    show("two processes", max(abs(a / b - 1) for a, b in zip(losses_of(two), losses_of(one))), 3e-6)
    assert losses_of(two) == pytest.approx(losses_of(one), rel=3e-6) # the one maybe on a card
    assert [r["samples"] for r in two] == [r["samples"] for r in one]
    assert [r["grad_norm"] for r in two] == pytest.approx([r["grad_norm"] for r in one], rel=1e-4)
    a, b = lora_of(tmp_path / "one"), lora_of(tmp_path / "two")
    assert rel(torch.cat([b[k].flatten() for k in a]), torch.cat([a[k].flatten() for k in a])) <= 1e-3

@pytest.mark.parametrize("family, controls", [
    ("v1", [(100, 75)]), ("Plus", [(64, 150), (100, 75)]), ("2511", [(100, 75), (64, 150)])],
    ids=lambda v: v if isinstance(v, str) else f"{len(v)} controls")
def test_training_predicts_what_the_stock_pipeline_predicts(tmp_path, monkeypatch, family, controls):
    """From the files to the velocity: what train.py computes of a cached sample, in a pack with one of another size,
    takes the stock pipeline from the same noisy latents to where its own step at this noise level goes; and the
    velocity that the loss asks for would take it to the target."""
    model = copy_model(tmp_path / "model")
    if family == "v1":
        as_v1(model)
    config = json.loads((model / "transformer/config.json").read_bytes()) | dict(zero_cond_t=family == "2511")
    (model / "transformer/config.json").write_text(json.dumps(config), "utf-8")
    data, area = add_item(tmp_path / "data", "cat", [(90, 70), *controls], "turn it blue"), 96 * 96
    add_item(data, "dog", [(64, 130), (40, 40)], "add a red border around the dog, and leave the rest as it is")
    preds, run_packed = [], rope_patch.run_packed
    monkeypatch.setattr(rope_patch, "run_packed", lambda *args: preds.append(run_packed(*args)) or preds[-1])
    result = run_script("train.py", "--model", model, "--data", data, "--cache_dir", tmp_path / "c", "--out_dir",
                        tmp_path / "run", "--target_pixels", area, "--control_pixels", area, "--max_steps", 1,
                        "--batch_size", 2, "--lr", 0, "--gradient_checkpointing", 0, "--device", "cpu", *EXACT)
    assert result.status == 0, result.err
    ns = result.globals
    items = [ns["load_item"](ns["pick"](p)) for p in (0, 1)]
    with torch.no_grad():
        ns["flow_loss"](ns["transformer"], items)
    pipe = stock_pipeline(model)
    pipe.scheduler = type(pipe.scheduler)(shift=1.0) # its only noise level is the one that it is given
    for position, (got, item) in enumerate(zip(preds[-1], items)):
        sample = ns["pick"](position).sample
        target, *images = [Image.open(path) for path in [sample.target, *sample.controls]]
        width, height = plus_code.calculate_dimensions(area, target.width / target.height)
        size = dict(height=height, width=width)
        pixels = pipe.image_processor.preprocess(target, **size).unsqueeze(2)
        _, x0 = pipe.prepare_latents(pixels if family == "v1" else [pixels], 1, 16, height, width, torch.float32, "cpu",
                                     torch.Generator())
        noisy = (1 - item.s) * x0 + item.s * item.noise
        with stock_area(area):
            after = pipe(image=images[0] if family == "v1" else images, prompt=sample.prompts[0],
                         latents=noisy, **size, sigmas=[item.s.item()], num_inference_steps=1, true_cfg_scale=1.0,
                         output_type="latent").images
        error = rel(got[:len(item.noise)], (noisy - after)[0] / item.s)
        show(f"{family}, {sample.name}: velocity at {item.s:.3f}", error, 1e-5)
        assert error <= 1e-5 and rel(noisy[0] - item.s * (item.noise - item.x0), x0[0]) <= 1e-5

# ==== claim 4: a resumed run is the unbroken run, cached is live, the LoRA loads in the stock pipeline ================

@pytest.mark.parametrize("optimizer, flags", [("Muon", []), ("AdamW", [
    "--caption_dropout_rate", 0.1, "--lora_dropout", 0.5, "--lr_scheduler", "cosine",
    "--gradient_checkpointing", 1])], ids=["plain", "with dropout"])
def test_resume_is_bitwise(tmp_path, optimizer, flags):
    """6 steps in one go == 4 steps, killed after the checkpoint of step 2, resumed: log and LoRA, bit for bit. The log
    of the killed run ran ahead of its checkpoint and ends in half a line."""
    flags = [*flags, "--max_steps", 6, "--save_every", 2, "--optimizer", f"torch.optim.{optimizer}"]
    optimizer, calls = getattr(torch.optim, optimizer), []
    whole, real = train_log(tmp_path / "a", *flags), optimizer.step

    def killed(self):
        calls.append(self)
        if len(calls) > 4:
            raise KeyboardInterrupt
        real(self)
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "step", killed)
        train_log(tmp_path / "b", *flags)
    shutil.rmtree(tmp_path / "b" / "checkpoint-000004")
    with open(tmp_path / "b" / "log.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step": 5, "lo')
    assert curve(train_log(tmp_path / "b", *flags, "--resume")) == curve(whole)
    assert_bitwise(lora_of(tmp_path / "b"), lora_of(tmp_path / "a"))
    assert curve(train_log(tmp_path / "c", *flags, "--seed", 1)) != curve(whole) # the negative control

def test_cached_and_live_training_log_the_same_losses(data, tmp_path):
    add_item(data, "dog", [(64, 32), (64, 64), (64, 64), (32, 64)], "one\ntwo", mask=paint_picture((64, 32), mode="L"))
    flags = ["--data", data, "--cache_dir", tmp_path / "cache", "--target_pixels", "native", "32*64",
             "--caption_dropout_rate", 0.5, "--prompt_image_dropout_rate", 0.3]
    cached, live = train_log(tmp_path / "a", *flags), train_log(tmp_path / "b", *flags, "--no-use_cache")
    assert len(cached) == 3 # they differ by the rounding of prompts that have shared a pass
    np.testing.assert_allclose(curve(cached), curve(live), rtol=1e-5)

def test_lora_loads_in_stock_pipeline(tmp_path):
    """File -> unmodified pipe.load_lora_weights == file -> predict.load_loras == weights by hand == the model that
    train.py has in memory; alpha != rank."""
    trained = globals_of_train(tmp_path / "a", "--max_steps", 3, "--lora_rank", 4, "--lora_alpha", 8, "--lora_targets",
                               "to_q", "to_out.0", "add_q_proj", "to_add_out", "net.2", "img_mod.1")["transformer"]
    pipe = stock_pipeline(TINY)
    base = copy.deepcopy(pipe.transformer)
    ours, by_hand = patched_copy(base), copy.deepcopy(base)
    pipe.load_lora_weights(str(tmp_path / "a"))
    predict.load_loras(ours, [predict.read_lora(tmp_path / "a")], [1.0])
    state = lora_of(tmp_path / "a")
    layers = sorted({k.removeprefix("transformer.").rsplit(".lora_", 1)[0] for k in state})
    _, meta = tensor_files.read_tensors(tmp_path / "a" / predict.LORA_FILE, "lora_adapter_metadata")
    assert meta["transformer.target_modules"] == layers # so that a half is noticed
    for key in [k for k in state if "lora_A" in k]:
        linear = by_hand.get_submodule(key.removeprefix("transformer.").removesuffix(".lora_A.weight"))
        linear.weight.data += state[key.replace("lora_A", "lora_B")] @ state[key] # 8 / 4 is in lora_B
    g = torch.Generator().manual_seed(0)
    x = dict(hidden_states=torch.randn(1, 40, 64, generator=g), timestep=torch.tensor([0.5]),
             encoder_hidden_states=torch.randn(1, 7, base.config.joint_attention_dim, generator=g),
             img_shapes=[[(1, 4, 6), (1, 4, 4)]])
    with torch.no_grad():
        a, b, c, d, e = [m(**x, return_dict=False)[0] for m in (pipe.transformer, ours, by_hand, base, trained.eval())]
    show("predict.py's LoRA", rel(a, b), 1e-6)
    show("by hand", rel(a, c), 1e-5)
    show("as it was trained", rel(a, e), 1e-5)
    assert rel(a, b) <= 1e-6 and rel(a, c) <= 1e-5 and rel(a, e) <= 1e-5 and rel(d, c) > 1e-4

# ---- all prompts about the same pictures in one pass of the text encoder ---------------------------------------------

WORDINGS = ["add a red border", "", "add a", "turn the circle blue and the sky green, " * 20]
SEEN = [("v1", 1), ("Plus", 0), ("Plus", 1), ("Plus", 2)]

@functools.cache
def wordings(family, pictures, dtype="float32", way="together"):
    """It returns WORDINGS encoded in one pass, or by stock's classes one by one; `way` may be to leave out the mask."""
    pipe = cache.load_pipeline(TINY)
    cache.load_encoder(pipe, "text", encoder_flags(dtype=dtype, text_encoder_device=DEVICE))
    for layer in pipe.text_encoder.model.language_model.layers: # a hot model: its tokens attend to few others
        layer.self_attn.q_proj.weight.mul_(4)
        layer.self_attn.o_proj.weight.mul_(4)
    pipe.processor.image_processor = cache.Qwen2VLImageProcessorPil() # makes rows and columns of tokens, tiny's one row
    if family == "v1":
        pipe = QwenImageEditPipeline(**pipe.components)
    images = [paint_picture((112, 84 + 28 * n), seed=n) for n in range(pictures)]
    if way == "one by one":
        unpatched(pipe.text_encoder)
        return [cache.encode_prompts(pipe, [prompt], images)[0] for prompt in WORDINGS]
    if way == "without the mask": # transformers makes its own: a token sees all that stand before it
        pipe.text_encoder.model.register_forward_pre_hook(
            lambda _, args, call: (args, call | dict(attention_mask=None)), with_kwargs=True)
    return cache.encode_prompts(pipe, WORDINGS, images)

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family, pictures", SEEN)
def test_one_pass_of_all_prompts_equals_stock_one_by_one(family, pictures, dtype):
    exact = wordings(family, pictures, way="one by one") if dtype == "bfloat16" else None
    assert_equals_stock(wordings(family, pictures, dtype), wordings(family, pictures, dtype, "one by one"), exact)

def test_one_pass_without_its_mask_would_be_wrong():
    """The negative control: the first prompt is right, and the others are not, as they see those before them."""
    errors = list(map(rel, wordings("Plus", 1, way="without the mask"), wordings("Plus", 1, way="one by one")))
    print("errors:", errors)
    assert errors[0] <= 1e-5 and min(errors[1:]) > 0.01 and max(errors) > 0.1

# ==== claim 5: what predict.py draws is what the stock pipeline draws =================================================

@pytest.mark.parametrize("version, pictures, settings", [
    ("v1", 1, {}), ("plus", 1, {}), ("plus", 2, {}), ("plus", 3, dict(true_cfg_scale=1.0, num_inference_steps=4)),
    ("plus", 1, dict(height=96, width=200))], ids=str)
def test_single_job_equals_stock_pipeline(version, pictures, settings, tiny_v1, photos, tmp_path):
    """Same seed, same pictures: the latents of predict.py and of the stock pipeline differ by at most 2e-5: CPUs round
    the sums of three steps with guidance differently (5e-6 on an EPYC, 9e-6 on a Xeon)."""
    pipe, area = stock_pipeline(tiny_v1 if version == "v1" else TINY), 1024 * 1024 if FULL else 96 * 96
    job = job_of(pipe, photos[:pictures], tmp_path, area, **settings)
    images = [Image.open(p) for p in photos[:pictures]]
    call = dict(prompt="add a red border", negative_prompt=" ", num_inference_steps=3, true_cfg_scale=4.0,
                output_type="latent")
    with stock_area(area):
        stock, other = [pipe(image=images if version == "plus" else images[0], generator=torch.manual_seed(seed),
                             **call | settings).images[0] for seed in (3, 4)]
    patch_qwen_model_for_multi_resolution(pipe.transformer)
    ours, = predict.denoise(pipe.transformer, pipe.scheduler.config, [job], 10_000)
    show("latents, from the stock pipeline", rel(ours, stock), 2e-5)
    assert rel(ours, stock) <= 2e-5 < 1e-3 < rel(ours, other) # another seed is another picture

def test_batch_predict_equals_single_predict(photos, tmp_path):
    """Jobs that differ in size, pictures, prompt, steps and CFG share their packs, and each gets what it gets alone."""
    pipe = stock_pipeline(TINY)
    transformer = patch_qwen_model_for_multi_resolution(pipe.transformer)
    jobs = [job_of(pipe, photos[:1], tmp_path, 64 * 64),
            job_of(pipe, photos[1:2], tmp_path, 96 * 96, prompt="keep the image", num_inference_steps=2),
            job_of(pipe, photos[:2], tmp_path, 64 * 96, true_cfg_scale=1.0),
            job_of(pipe, photos[2:3], tmp_path, 48 * 48, height=32, width=128, seed=9)]
    alone = [predict.denoise(transformer, pipe.scheduler.config, [job], 10_000)[0] for job in jobs]
    for max_tokens in (10_000, 200, 1): # all runs in one pack; several packs; each run by itself
        for one, many in zip(alone, predict.denoise(transformer, pipe.scheduler.config, jobs, max_tokens)):
            show("in a batch, from alone", rel(many, one), 1e-5)
            assert rel(many, one) <= 1e-5

def test_decoded_picture_is_the_stock_pipelines(photos):
    pipe, latents = stock_pipeline(TINY), torch.randn(24, 64)
    with pytest.MonkeyPatch.context() as patch: # let the stock pipeline decode our latents: its last lines only
        patch.setattr(type(pipe.scheduler), "step", lambda self, pred, t, x, return_dict: (latents[None],))
        with stock_area(64 * 64), np.errstate(invalid="ignore"): # stock stretches a schedule of one step by 0 / 0
            stock = pipe(image=[Image.open(photos[0])], prompt="x", num_inference_steps=1, height=64, width=96,
                         true_cfg_scale=1.0).images[0]
    assert np.array_equal(np.asarray(predict.decode(pipe.vae, latents, [(1, 4, 6)])[0]), np.asarray(stock))

# ==== claim 6: the VAE computes one frame with stock's numbers ========================================================

@functools.cache
def hot_vae(dtype="float32"):
    """It returns a small stock VAE of the real structure; its norms' factors differ, and so do all its layers."""
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1).requires_grad_(False).eval()
    for name, weight in vae.named_parameters():
        if name.endswith("gamma"):
            weight += 0.2 * torch.randn_like(weight)
    return vae.to(torch.bfloat16).to(DEVICE, getattr(torch, dtype)) # exact in bfloat16, as hot_model

def picture_vae_of(vae):
    return picture_vae.patch_vae_for_pictures(copy.deepcopy(vae))

def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).bfloat16().float()

@torch.no_grad()
def both_ways(vae, pixels, latents):
    """It returns the encoding of pixels and the decoding of latents, in float32."""
    pixels, latents = [x.to(DEVICE, vae.dtype) for x in (pixels, latents)]
    return vae.encode(pixels).latent_dist.parameters.float(), vae.decode(latents).sample.float()

@pytest.mark.parametrize("batch, height, width", [(1, 64, 48), (2, 24, 40), (1, 43, 35), (1, 8, 80)])
def test_one_frame_equals_stock(batch, height, width):
    """In float32 within 1e-5; bfloat16 is no further from stock's float32 than stock's bfloat16 is. A kernel's slice of
    another frame is wrong."""
    x = randn(batch, 3, 1, height, width), randn(batch, 16, 1, -(-height // 8), -(-width // 8))
    want, ours = both_ways(hot_vae(), *x), picture_vae_of(hot_vae())
    rounded, in_bf16 = [both_ways(vae, *x) for vae in (hot_vae("bfloat16"), picture_vae_of(hot_vae("bfloat16")))]
    got = both_ways(ours, *x)
    for layer in ours.modules():
        if isinstance(layer, torch.nn.Conv3d) and layer.kernel_size[0] == 3:
            layer.weight.data = layer.weight.data.roll(1, dims=2)
    for name, *tensors in zip(("encoded", "decoded"), got, in_bf16, rounded, both_ways(ours, *x), want):
        exact, bf16, stock_bf16, wrong = [rel(tensor, tensors[-1]) for tensor in tensors[:-1]]
        show(f"{name}, from stock", exact, 1e-5)
        show(f"{name} in bfloat16, from stock in float32", bf16, 1.1 * stock_bf16)
        assert exact <= 1e-5 and bf16 <= 1.1 * stock_bf16 and wrong > 0.1

def test_one_frame_in_strips_equals_the_whole(monkeypatch):
    """Strips of 8 rows, at each scale, of two pictures. With a row less above and below they would differ."""
    x, vae = (randn(2, 3, 1, 152, 24), randn(2, 16, 1, 19, 3)), picture_vae_of(hot_vae())
    whole, real = both_ways(vae, *x), picture_vae.in_strips
    monkeypatch.setattr(picture_vae, "STRIP", 1)
    strips = both_ways(vae, *x)
    monkeypatch.setattr(picture_vae, "in_strips", lambda f, x, halo=0, scale=1: real(f, x, max(halo - 1, 0), scale))
    for name, got, want, wrong in zip(("encoded", "decoded"), strips, whole, both_ways(vae, *x)):
        show(f"{name} in strips, from the whole", rel(got, want), 1e-6)
        assert rel(got, want) <= 1e-6 and rel(wrong, want) > 1e-3

def test_one_frame_leaves_videos_tiles_weights_and_other_models_to_stock(tmp_path):
    """Bit for bit, also behind a picture; a picture in tiles equals stock's. Patching twice is patching once, and a
    copy computes with its own weights."""
    stock, ours = copy.deepcopy(hot_vae()), picture_vae.patch_vae_for_pictures(picture_vae_of(hot_vae()))
    video, picture = (randn(1, 3, 5, 32, 24), randn(1, 16, 2, 4, 3)), (randn(1, 3, 1, 32, 24), randn(1, 16, 1, 4, 3))
    for tiled in (False, True):
        for vae in (stock, ours):
            if tiled:
                vae.enable_tiling(24, 24, 16, 16)
        found, want, want_video = both_ways(ours, *picture), both_ways(stock, *picture), both_ways(stock, *video)
        with torch.no_grad():
            assert_bitwise(ours._decode(z=picture[1][:1].to(DEVICE)).sample, found[1])
        assert all(tensor.is_contiguous() for tensor in found)
        assert max(map(rel, found, want)) <= 1e-5 and not torch.equal(found[1], want[1])
        assert_bitwise(both_ways(ours, *video), want_video)
    twin = copy.deepcopy(ours)
    twin.decoder.conv_out.weight.zero_()
    assert not torch.equal(both_ways(twin, *picture)[1], found[1])
    assert_bitwise(both_ways(ours, *picture), found)
    for name, vae in dict(ours=ours, stock=stock).items():
        vae.save_pretrained(tmp_path / name)
    for file in ("config.json", "diffusion_pytorch_model.safetensors"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "stock" / file).read_bytes()

if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
