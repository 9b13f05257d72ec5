"""
--transformer FILE.safetensors: each form that ComfyUI, Civitai and diffusers write trains and draws what the folder of
the same weights does, bit for bit; fp8 stays fp8 under --quantize fp8; memory holds one block at a time; each other
file is one line.
"""
import json
import shlex
import shutil
import zlib

import pytest
import safetensors.torch
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cache
import common
import predict
from extras import quantize
from extras.transformer import MARK_2511
from tests.harness import (HERE, NATIVE, TINY, add_item, assert_bitwise, copy_model, curve, log_of, lora_file, lora_of,
                           lora_tensors, refused, is_one_line, run_script, start_ranks, train)

OURS = safetensors.torch.load_file(TINY / "transformer/diffusion_pytorch_model.safetensors")
COMFY, E4M3 = "model.diffusion_model.", torch.float8_e4m3fn
MATRICES = [k for k, v in OURS.items() if v.dim() == 2 and k.startswith("transformer_blocks.")]
VARIANTS = ["bf16", "ComfyUI's bf16", "all in one", "cast", "scale_weight", "weight_scale", "rows"]

def with_scale(rows):
    """-> (all of tiny's tensors, its blocks' matrices in fp8; {matrix: its scale, (N, 1) or ()})."""
    state, scales = dict(OURS), {}
    for k in MATRICES:
        weight = OURS[k].float()
        # a scale that is no power of two: to forget it, or to round it to bf16, shows in the last bit
        scales[k] = (weight.abs().amax(1, keepdim=True) if rows else weight.abs().max()) / 400
        state[k] = (weight / scales[k]).to(E4M3)
    return state, scales

def file_of(form):
    """-> (tensors of a file in this form, {name: weight} as dequantized by hand)."""
    if form == "cast": # as ComfyUI's ModelSave: everything, norms and biases too
        state = {k: v.to(E4M3) for k, v in OURS.items()}
        return {COMFY + k: v for k, v in state.items()}, {k: v.float() for k, v in state.items()}
    if form in ("scale_weight", "weight_scale", "rows"):
        state, scales = with_scale(rows=form == "rows")
        want = {k: v.float() * scales.get(k, 1) for k, v in state.items()}
        notes = {} # for ComfyUI alone
        for k, scale in scales.items():
            layer = k.removesuffix(".weight")
            if form == "scale_weight":
                notes |= {f"{layer}.scale_weight": scale, f"{layer}.scale_input": torch.tensor(3.0)}
            else:
                said = dict(format="float8_e4m3fn", full_precision_matrix_mult=True)
                notes |= {f"{layer}.weight_scale": scale, f"{layer}.input_scale": torch.tensor(3.0),
                          f"{layer}.comfy_quant": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)}
        if form == "scale_weight":
            notes["scaled_fp8"] = torch.zeros(2, dtype=E4M3)
        return {(COMFY if form == "scale_weight" else "") + k: v for k, v in (state | notes).items()}, want
    state = OURS if form == "bf16" else {COMFY + k: v for k, v in OURS.items()}
    if form == "all in one":
        state |= {"vae.decoder.conv1.weight": torch.ones(2), "text_encoders.qwen.layers.0.self_attn.q.weight":
                  torch.ones(2, dtype=torch.int8)}
    return state, OURS

def write(state, path, **meta):
    save_file({k: v.contiguous() for k, v in state.items()}, path, metadata=meta or None)
    return path

def folder_of(weights, folder):
    """A diffusers folder with these weights, those in fp32 as fp64: weights that are mapped lie at other addresses than
    converted ones, and a product on a CPU may differ by that in its last bit."""
    weights = {k: v.double() if v.dtype == torch.float32 else v for k, v in weights.items()}
    (folder / "transformer").mkdir(parents=True)
    shutil.copy(TINY / "transformer/config.json", folder / "transformer")
    write(weights, folder / "transformer/diffusion_pytorch_model.safetensors", format="pt")
    return folder

@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """There are a dataset of two pairs, and the flags of a training on it."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("cat", "dog"):
        add_item(folder / "data", name, [(32, 64), (64, 32)])
    return folder

def train_three(home, out, *flags, dtype="float32"):
    """-> the result of a training of three steps, with its curve and LoRA."""
    result = run_script("train.py", "--data", home / "data", "--val_data", "--cache_dir", home / f"cache-{dtype}",
                        "--out_dir", out, "--max_steps", 3, "--batch_size", 2, "--lora_rank", 2, *NATIVE, "--device",
                        "cpu", "--dtype", dtype, "--lora_targets", "to_q", "net.2", *flags)
    if result.status == 0:
        result.curve, result.lora = curve(log_of(out)), lora_of(out)
    return result

def draw(home, out, *flags):
    result = run_script("predict.py", "--image", home / "data/control/cat.png", "--prompt", "add a red border",
                        "--cache_dir", home / "cache-float32", "--out", out, "--num_inference_steps", 2, *NATIVE,
                        "--device", "cpu", "--dtype", "float32", "--lora", *flags)
    assert result.status == 0, result.err
    return common.read_image(out).tobytes()

@pytest.mark.parametrize("form", VARIANTS)
def test_a_file_trains_and_draws_as_the_folder_of_its_weights(tmp_path, home, form):
    """Losses, LoRA and pictures, bit for bit. An fp8 file's folder is dequantized by hand."""
    state, weights = file_of(form)
    file, folder = write(state, tmp_path / "x.safetensors"), folder_of(weights, tmp_path / "folder")
    got = train_three(home, tmp_path / "file", "--transformer", file)
    assert got.status == 0, got.err
    want = train_three(home, tmp_path / "by hand", "--transformer", folder)
    assert got.curve == want.curve
    assert_bitwise(got.lora, want.lora)
    ask = ["", "--true_cfg_scale", 1]
    assert draw(home, tmp_path / "a.png", *ask, "--transformer", file) == draw(
        home, tmp_path / "b.png", *ask, "--transformer", folder)
    if form == "cast": # and not as --model's own
        assert got.curve != train_three(home, tmp_path / "own").curve
