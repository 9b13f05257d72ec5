"""
The examples of the documents that this project grew from, as far as they are ours to run: S0 is the summary of
multi-resolution training, S1 and S4 describe the trainer, S2 the tests of the custom transformer, S3 the architecture.
The seven tests of S0 and the ten of S2 are in test_consistency.py.
"""
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
from math import prod

import pytest
import safetensors.torch
import torch
from diffusers import QwenImageTransformer2DModel
from models import is_one_line, make_cache, refused, train
from PIL import Image

import cache
import predict
import rope_patch
from test_consistency import (C, DEVICE, EQUAL, MIXED, NATIVE, TINY, add_item, assert_bitwise, assert_one_by_one,
                              copy_model, draw_picture, encoder_flags, hot_model, image_lens, joint_mask_of, make_batch,
                              one_by_one, pad, padded_call, patched_model, rel, run, run_script, stock_call, text_lens,
                              text_mask_of, to_model)

# ---- S0 and S3: calls of the transformer -----------------------------------------------------------------------------

@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("lens", [list, torch.tensor])
def test_one_row_with_mask_and_text_length_is_the_stock_call(holes, lens):
    """S0's step 1 and S3's list of inputs; older diffusers' pipelines called it so."""
    model, samples, length = patched_model(), EQUAL[:1], 6 if holes else 9
    mask_BT = torch.arange(9, device=DEVICE)[None] < length
    call = stock_call(model, samples) | dict(encoder_hidden_states_mask=mask_BT)
    got = model(**call, txt_seq_lens=lens([length])).sample
    assert_bitwise(got, hot_model()(**call).sample)
    joint = torch.cat([mask_BT, mask_BT.new_ones(1, 40)], 1)
    call |= dict(encoder_hidden_states_mask=None, attention_kwargs={"attention_mask": joint})
    assert rel(model(**call, txt_seq_lens=lens([length])).sample, got) <= 1e-2

@torch.no_grad()
def test_one_row_without_a_mask_stays_packed():
    for mode in ("stock", "packed"):
        assert_one_by_one(run(patched_model(), mode, EQUAL[:1], txt_seq_lens=[9]), EQUAL[:1])

@pytest.mark.parametrize("kind", [list, torch.tensor])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_flat_list_of_one_sample_s_pictures_is_refused(batch, kind):
    """S3's img_shapes = [(frame, height, width), ...] for two pictures in each sample: read as one picture a sample it
    would blank the second ones."""
    model, pictures = patched_model(), [(1, 6, 4), (1, 4, 4)]
    call = stock_call(model, EQUAL[:batch]) | dict(img_shapes=kind(pictures))
    with pytest.raises(ValueError, match="img_shapes: got .* want"):
        model(**call)
    alone = kind([(1, 6, 4)] * batch) # too few tokens: stock fails too
    for which in (model, hot_model()):
        with pytest.raises((ValueError, RuntimeError)):
            which(**call | dict(img_shapes=alone))

def precomputing_lines():
    """The three lines in the docstring of forward()."""
    lines = inspect.getdoc(rope_patch.model_forward).splitlines()
    first = next(n for n, line in enumerate(lines) if "freqs = [" in line)
    return textwrap.dedent("\n".join(lines[first:first + 3]))

@torch.no_grad()
@pytest.mark.parametrize("variant", ["v1", "2511"])
def test_the_docstring_s_lines_precompute_what_padded_mode_computes(variant):
    """S0, 3.3: positions for each sample, made by the caller, and S0's mask (B, 1, 1, S)."""
    model, call = patched_model(variant), padded_call(patched_model(variant), MIXED, spare=0)
    names = dict(vars(rope_patch), model=model, img_shapes=call["img_shapes"], device=DEVICE, txt_len=12)
    exec(precomputing_lines(), names)
    mask_BS = joint_mask_of(MIXED, call["hidden_states"].shape[1])
    call |= dict(image_rotary_emb=names["image_rotary_emb"], encoder_hidden_states_mask=None,
                 attention_kwargs={"attention_mask": mask_BS.view(2, 1, 1, -1)})
    out = model(**call, return_dict=False)[0]
    assert_one_by_one([row[:n] for row, n in zip(out, image_lens(MIXED))], MIXED, variant=variant)

@torch.no_grad()
def test_text_positions_shared_by_pictures_of_mixed_sizes_are_refused():
    """S0's recipe keeps the last sample's txt_freqs for all, which is wrong by 0.3. Shared by equal sizes they are
    right, and image positions shared by all are the caller's word that sizes are equal."""
    model, call = patched_model(), padded_call(patched_model(), MIXED, spare=0)
    freqs = [rope_patch.sample_freqs(model.pos_embed, s.shapes, 12, DEVICE) for s in MIXED]
    img_freqs_BIR, txt_freqs = rope_patch.pad_latents_for_multi_res([img for img, _ in freqs])[0], freqs[-1][1]
    with pytest.raises(ValueError, match=r"image_rotary_emb: got .* want \(2, 12, R\), as text begins"):
        model(**call, image_rotary_emb=(img_freqs_BIR, txt_freqs))
    meant = model(**call, image_rotary_emb=(img_freqs_BIR, txt_freqs.expand(2, -1, -1))).sample
    assert rel(meant[0], model(**call).sample[0]) > 0.1 # so much for the recipe
    # 5x4 and 6x4 begin alike, but the text begins at 2 after the one and at 3 after the other
    samples = make_batch(([(1, 5, 4)], 9), ([(1, 6, 4)], 9))
    freqs = [rope_patch.sample_freqs(model.pos_embed, s.shapes, 9, DEVICE) for s in samples]
    assert torch.equal(freqs[0][0], freqs[1][0][:20]) and not torch.equal(freqs[0][1], freqs[1][1])
    with pytest.raises(ValueError, match="image_rotary_emb: got"):
        model(**padded_call(model, samples, 0), image_rotary_emb=(
            rope_patch.pad_latents_for_multi_res([img for img, _ in freqs])[0], freqs[0][1]))

# ---- S1 and S4: caches of version 1.0 --------------------------------------------------------------------------------

SIX = ["pixel_latent", "control_latent", "prompt_embed", "prompt_embeds_mask", "empty_prompt_embed",
       "empty_prompt_embeds_mask"]

def tensors_of(cache_dir):
    """The one sample of a cache, whole."""
    index, = cache_dir.glob("*.json")
    (sample, *_), *_ = cache.read_index(index)
    tensors = cache.read_tensors(sample.resolutions[0]["file"])[0]
    for text in sample.texts.values():
        tensors |= cache.read_tensors(text["file"])[0]
    return tensors

@pytest.fixture(scope="module")
def today(tmp_path_factory):
    """A cache of today: one sample, whose control has the target's size."""
    root = tmp_path_factory.mktemp("today")
    add_item(root / "data", "cat", [(96, 64), (96, 64)])
    assert make_cache(root / "data", root / "cache", "--caption_dropout_rate", 0.5, *NATIVE).status == 0
    return root / "cache"

def old_dictionary(today, *sizes):
    """The six keys, in rows of a batch of 1 with four pads, and these sizes in pixels."""
    old = {name: tensors_of(today)[name] for name in SIX}
    for name in ("prompt_embed", "empty_prompt_embed"):
        old[name] = torch.nn.functional.pad(old[name], (0, 0, 0, 4))
        old[name + "s_mask"] = torch.nn.functional.pad(old[name + "s_mask"].long(), (0, 4))
    return {name: t[None] for name, t in old.items()} | dict(zip(("height", "width"), map(torch.tensor, sizes)))

def import_cache(source, out):
    return run_script("tools/import_data.py", source, out)

def assert_today_s(out, today):
    got, want = tensors_of(out), tensors_of(today)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)

def test_six_keys_with_height_and_width_alone_are_read(tmp_path, today):
    """S4's _compute_loss takes one height and width: target and control were resized to one size."""
    (tmp_path / "old").mkdir()
    safetensors.torch.save_file(old_dictionary(today, 64, 96), tmp_path / "old/cat.safetensors")
    assert import_cache(tmp_path / "old", tmp_path / "out").status == 0
    assert_today_s(tmp_path / "out", today)
    assert tensors_of(tmp_path / "out")["img_shapes"].tolist() == [[1, 4, 6], [1, 4, 6]]
    losses = [train(index, tmp_path, "--caption_dropout_rate", 0.5).losses
              for index in (tmp_path / "out/old.json", next(today.glob("*.json")))]
    assert len(losses[0]) == 2 and losses[0] == losses[1]

def test_sizes_that_nobody_wrote_are_not_guessed(tmp_path, today):
    """S1's six keys alone: 24 tokens may be 4x6 or 6x4. And a control of another length has another size."""
    other = old_dictionary(today, 64, 96)
    other["control_latent"] = other["control_latent"][:, :20]
    for n, (old, *named) in enumerate([(old_dictionary(today), "add both"), (other, "[24, 20] tokens")]):
        source = tmp_path / f"{n}"
        source.mkdir()
        safetensors.torch.save_file({k: v.contiguous() for k, v in old.items()}, source / "cat.safetensors")
        errors = import_cache(source, tmp_path / "out").errors
        assert len(errors) == 1 and is_one_line(errors[0], "cat.safetensors", *named), errors

def test_a_pt_file_is_refused_with_the_line_that_converts_it(tmp_path, today):
    source = tmp_path / "it's old"
    source.mkdir()
    torch.save(old_dictionary(today) | dict(height=64, width=96), source / "cat.pt")
    error, = import_cache(source, tmp_path / "out").errors
    assert is_one_line(error, "cat.pt", "pickle") and not (tmp_path / "out").exists()
    command = error.partition("tensors by: ")[2].replace("python", sys.executable, 1)
    assert subprocess.run(["sh", "-c", command], capture_output=True).returncode == 0
    (source / "cat.pt").unlink()
    assert import_cache(source, tmp_path / "out").status == 0
    assert_today_s(tmp_path / "out", today)
