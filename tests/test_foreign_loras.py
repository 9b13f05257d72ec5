"""
LoRA files: those of any tool are loaded whole or refused; what train.py writes loads in stock diffusers and goes on; a
LoRA to start from, and one to train on top of.
"""
import json
import math
import random
import re
import shlex

import pytest
import safetensors.torch
import torch
from conftest import OPTIONS
from diffusers import QwenImageTransformer2DModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig

import common
from library.cli import command_line
from library.files import tensor_files
from library.lora import foreign_loras
from library.lora.lora_linear import LoraLinear
import predict
import rope_patch
from tests.harness import (DEVICE, DTYPE_NAME, E, SMALL, TINY, assert_bitwise, curve, damage_tensors, flip,
                           hot_model, is_one_line, layers_of, log_of, lora_file, lora_of, lora_tensors, make_batch,
                           patched_copy, refused, rel, renamed, run, run_script, stock_pipeline, train_demo, train_log,
                           works)

def tiny_with(path, scale=1.0):
    """The tiny transformer with this LoRA."""
    transformer = predict.load_transformer(TINY, DTYPE_NAME)
    predict.load_loras(transformer, [predict.read_lora(path)], [scale])
    return predict.place_transformer(transformer, DEVICE)

# ---- files of other tools --------------------------------------------------------------------------------------------

def named(prefix, a="lora_A.weight", b="lora_B.weight", flat=False):
    """-> a function that gives a LoRA's tensors other names; flat: with _ for each point of a layer's."""
    def rename(tensors):
        out = {}
        for key, tensor in tensors.items():
            layer, half = key.removeprefix("transformer.").rsplit(".lora_", 1)
            out[f"{prefix}{layer.replace('.', '_') if flat else layer}.{a if half[0] == 'A' else b}"] = tensor
        return out
    return rename

as_kohya = named("lora_unet_", "lora_down.weight", "lora_up.weight", flat=True)
as_comfyui = named("diffusion_model.")
as_lightning = named("", "lora_down.weight", "lora_up.weight")

def with_alpha(tensors, alpha=1.0, layers="", dtype=torch.float32, shape=()):
    """An .alpha beside each layer whose name matches."""
    found = sorted({re.split(r"\.lora[._]", key)[0] for key in tensors if re.search(layers, key)})
    return tensors | {f"{layer}.alpha": torch.full(shape, alpha, dtype=dtype) for layer in found}

def cast(tensors, dtype):
    return {k: v.to(dtype) for k, v in tensors.items()}

def mixed_ranks(tensors):
    """Rank 1 for to_q, where lora_A's second row has no part any more."""
    return {k: (v[:1] if "lora_A" in k else v[:, :1]).clone() if "to_q" in k else v for k, v in tensors.items()}

def of_diffusers(**config):
    return dict(lora_adapter_metadata=json.dumps({f"transformer.{k}": v for k, v in config.items()}))

HALF = dict(r=2, lora_alpha=1)
ROOT = math.sqrt(0.5)
E4M3 = torch.float8_e4m3fn
# what is written of a LoRA of rank 2: (tensors, header, adapter_config.json), and its strength in layers by name
FORMS = {
    "diffusers": (lambda t: (t,), 1),
    "diffusers, alpha": (lambda t: (t, of_diffusers(**HALF)), 0.5),
    "diffusers, rsLoRA": (lambda t: (t, of_diffusers(**HALF, use_rslora=True)), ROOT),
    "diffusers, patterns": (lambda t: (mixed_ranks(t), of_diffusers(
        **HALF, rank_pattern={"to_q": 1}, alpha_pattern={"net.2": 6})), {"net.2": 3, "to_q": 1, "": 0.5}),
    "diffusers, mixed ranks": (lambda t: (mixed_ranks(t),), 1),
    "alpha tensors": (lambda t: (with_alpha(t),), 0.5),
    "ComfyUI": (lambda t: (as_comfyui(t),), 1),
    "ComfyUI, alpha": (lambda t: (with_alpha(as_comfyui(t)),), 0.5),
    "ComfyUI, some alphas": (lambda t: (with_alpha(as_comfyui(t), layers="to_q"),), {"to_q": 0.5, "": 1}),
    "ComfyUI, two alphas": (lambda t: (with_alpha(with_alpha(as_comfyui(t), layers="to_q"), 6., "net"),),
                            {"to_q": 0.5, "net": 3, "": 1}),
    "ComfyUI, alphas with a dimension": (lambda t: (with_alpha(as_comfyui(t), shape=(1,)),), 0.5),
    "ComfyUI, alpha and metadata": (lambda t: (with_alpha(as_comfyui(t)), of_diffusers(**HALF)), 0.5),
    "ComfyUI, alpha and metadata, rsLoRA": (lambda t: (
        with_alpha(as_comfyui(t), ROOT * 2), of_diffusers(**HALF, use_rslora=True)), ROOT),
    "ComfyUI, mixed ranks and alpha": (lambda t: (with_alpha(mixed_ranks(as_comfyui(t))),), {"to_q": 1, "": 0.5}),
    "ComfyUI, lora_down": (lambda t: (with_alpha(named("diffusion_model.", "lora_down.weight", "lora_up.weight")(t)),),
                           0.5),
    "flat header": (lambda t: (as_comfyui(t), dict(lora_alpha="1", r="2")), 0.5),
    "flat header, diffusers' names": (lambda t: (t, dict(lora_alpha="1", lora_rank="2")), 0.5),
    "flat header, rsLoRA": (lambda t: (t, dict(lora_alpha="1", r="2", use_rslora="True")), ROOT),
    "LightX2V": (lambda t: (as_lightning(t), dict(alpha="1.0", rank="2", format="pt")), 0.5),
    "Qwen-Image-Lightning": (lambda t: (with_alpha(as_lightning(t)),), 0.5),
    "kohya": (lambda t: (with_alpha(as_kohya(t)), dict(ss_network_alpha="1", ss_network_dim="2")), 0.5),
    "kohya, alpha lost": (lambda t: (as_kohya(t), dict(ss_network_alpha="1", ss_network_dim="2")), 0.5),
    "kohya, resized": (lambda t: (with_alpha(as_kohya(t)), dict(ss_network_alpha="1", ss_network_dim="Dynamic")), 0.5),
    "musubi-tuner, converted": (lambda t: (as_comfyui(t), dict(ss_network_alpha="1", ss_network_dim="2")), 1),
    "OneTrainer": (lambda t: (with_alpha(named("transformer.", "lora_down.weight", "lora_up.weight")(t)),), 0.5),
    "OneTrainer, legacy": (lambda t: (with_alpha(named("lora_transformer_", "lora_down.weight", "lora_up.weight",
                                                       flat=True)(t)),), 0.5),
    "DiffSynth, pipe.dit": (lambda t: (named("pipe.dit.", "lora_A.default.weight", "lora_B.default.weight")(t),), 1),
    "another adapter's name": (lambda t: (named("transformer.", "lora_A.my_1.weight", "lora_B.my_1.weight")(t),), 1),
    "peft's names": (lambda t: (named("base_model.model.")(t),), 1),
    "peft's names, config beside": (lambda t: (named("base_model.model.")(t), {}, HALF), 0.5),
    "peft's names, patterns": (lambda t: (named("base_model.model.")(t), {}, dict(
        r=4, lora_alpha=4, rank_pattern={".*": 2}, alpha_pattern={".*to_q": 1})), {"to_q": 0.5, "": 2}),
    "no prefix": (lambda t: (named("")(t),), 1),
    "lora.down": (lambda t: (named("transformer.", "lora.down.weight", "lora.up.weight")(t),), 1),
    "diffusers of old": (lambda t: (named("transformer.", "lora_linear_layer.down.weight",
                                          "lora_linear_layer.up.weight")(t),), 1),
    "compiled": (lambda t: (renamed(".attn", "._orig_mod.attn")(named("transformer._orig_mod.")(t)),), 1),
    "4-D": (lambda t: (with_alpha({k: v[..., None, None] for k, v in as_kohya(t).items()}),), 0.5),
    "fp16": (lambda t: (cast(t, torch.float16),), 1),
    "bf16": (lambda t: (cast(with_alpha(as_comfyui(t)), torch.bfloat16),), 0.5),
    "fp8, e5m2": (lambda t: (cast(as_comfyui(t), torch.float8_e5m2),), 1),
    "fp8, metadata": (lambda t: (cast(t, E4M3), of_diffusers(**HALF)), 0.5),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8, e5m2": torch.float8_e5m2}

def write_form(folder, kind, tensors):
    """-> its path, and {layer: the change of its weight}, in double precision."""
    make, strength = FORMS[kind]
    made, header, config = (*make(tensors), {}, {})[:3]
    folder.mkdir(exist_ok=True)
    path = folder / "x.safetensors"
    safetensors.torch.save_file({k: v.contiguous() for k, v in made.items()}, path, metadata=header or None)
    if config:
        (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    dtype = DTYPES.get(kind, E4M3 if "fp8" in kind else torch.float64)
    truth = mixed_ranks(tensors) if "mixed" in kind or kind == "diffusers, patterns" else tensors
    strengths = strength if isinstance(strength, dict) else {"": strength}
    changes = {}
    for layer, product in products_of(cast(truth, dtype)).items():
        changes[layer] = next(v for name, v in strengths.items() if name in layer) * product
    return path, changes

def changes_of(transformer, adapter="lora0"):
    """-> {layer: what this adapter adds to its weight}."""
    layers = {name: m for name, m in transformer.named_modules() if adapter in getattr(m, "lora_A", {})}
    return {name: m.scaling[adapter] * m.lora_B[adapter].weight.double() @ m.lora_A[adapter].weight.double()
            for name, m in layers.items()}

def products_of(tensors, scale=1.0):
    """-> {layer: scale * lora_B @ lora_A} of a LoRA's tensors in diffusers' form, in double precision."""
    products = {}
    for layer in layers_of(tensors):
        a, b = [tensors[f"transformer.{layer}.lora_{half}.weight"].double() for half in "AB"]
        products[layer] = scale * b @ a
    return products

def assert_same_changes(got, want, limit=1e-6):
    assert got.keys() == want.keys()
    worst = max((rel(got[layer], want[layer]), layer) for layer in want)
    assert worst[0] <= limit, worst

def tiny_in_fp32(paths, scales=None):
    transformer = predict.load_transformer(TINY, "float32")
    predict.load_loras(transformer, list(map(predict.read_lora, paths)), scales)
    return transformer

SOME_ALPHAS = ["ComfyUI, some alphas", "ComfyUI, two alphas"]

@pytest.mark.parametrize("kind", FORMS)
def test_a_lora_of_any_tool_has_its_strength_in_every_layer(tmp_path, kind, capfd):
    """Alone, at a scale, as the second of two, and as the LoRA that a training starts from; without a word but for what
    is in doubt."""
    path, want = write_form(tmp_path / "a", kind, lora_tensors())
    assert_same_changes(changes_of(tiny_in_fp32([path])), want)
    error = capfd.readouterr().err
    doubtful = kind in ("musubi-tuner, converted", "peft's names", *SOME_ALPHAS)
    assert len(error.splitlines()) == doubtful and error.startswith("warning: " if doubtful else ""), error
    other = lora_file(tmp_path, lora_tensors(rank=3))
    both = tiny_in_fp32([other, path], [1.0, 0.25])
    assert_same_changes(changes_of(both, "lora1"), {layer: change / 4 for layer, change in want.items()})
    transformer = predict.load_transformer(TINY, "float32")
    predict.add_lora(transformer, **predict.config_of(predict.read_lora(path)))
    predict.load_weights(transformer, predict.read_lora(path).state, path)
    assert_same_changes(changes_of(transformer, "default"), want)

def comfyui_model(path):
    """tiny with this file, as ComfyUI adds it (comfy/lora.py and comfy/weight_adapter/lora.py of its commit 17358c8).
    It knows layers by three prefixes, reads no metadata, and where a layer has no .alpha it takes the rank -> (model,
    the file's keys that it leaves out, which its console lists)."""
    model = QwenImageTransformer2DModel.from_pretrained(TINY / "transformer")
    tensors = safetensors.torch.load_file(path)
    left = set(tensors)
    for name, weight in model.state_dict().items():
        for prefix in ("", "transformer.", "diffusion_model."):
            layer = prefix + name.removesuffix(".weight")
            b, a, alpha = keys = [f"{layer}.{end}" for end in ("lora_B.weight", "lora_A.weight", "alpha")]
            if b in tensors:
                scale = tensors[alpha].item() / len(tensors[a]) if alpha in tensors else 1.0
                weight += scale * (tensors[b].float() @ tensors[a].float()) # in fp32, whatever the file has
                left -= set(keys)
    return model, left

CONVERTED = ["diffusers", "diffusers, rsLoRA", "diffusers, patterns", "ComfyUI, two alphas",
             "ComfyUI, mixed ranks and alpha", "ComfyUI, alpha and metadata", "LightX2V", "kohya", "OneTrainer",
             "OneTrainer, legacy", "DiffSynth, pipe.dit", "peft's names, patterns", "4-D", "bf16", "fp8, metadata"]

@pytest.mark.parametrize("kind", CONVERTED)
def test_a_converted_lora_of_any_tool_is_the_same(tmp_path, kind):
    """Here, in the stock pipeline and in ComfyUI. (Merged into a model: test_convert_lora.py.)"""
    path, want = write_form(tmp_path / "a", kind, lora_tensors())
    for to in ("comfyui", "diffusers"):
        out = tmp_path / f"{to}.safetensors"
        result = run_script("tools/convert_lora.py", path, "--to", to, "--out", out)
        assert result.status == 0 and len(result.err.splitlines()) == (kind in SOME_ALPHAS), result.err
        assert_same_changes(changes_of(tiny_in_fp32([out])), want)
    pipe = stock_pipeline(TINY)
    pipe.load_lora_weights(str(tmp_path / "diffusers.safetensors"), adapter_name="lora0")
    assert_same_changes(changes_of(pipe.transformer), want)
    model, left = comfyui_model(tmp_path / "comfyui.safetensors")
    base, merged = predict.load_transformer(TINY, "float32").state_dict(), model.state_dict()
    added = {layer: (merged[f"{layer}.weight"].double() - base[f"{layer}.weight"].double()) for layer in want}
    assert_same_changes(added, want, 1e-5) # of weights that are much larger
    assert not left

LAYER = "transformer.transformer_blocks.0.attn.to_q"
A, B = f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"
TOP = ["img_in", "txt_in", "proj_out", "norm_out.linear", "time_text_embed.timestep_embedder.linear_1",
       "time_text_embed.timestep_embedder.linear_2"]

def test_every_linear_layer_of_the_model_is_found_by_each_name_of_it():
    model = predict.load_transformer(TINY, "float32", weights=False)
    names = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert set(TOP) <= set(names)
    for name in names:
        flat = name.replace(".", "_")
        for text in (name, f"diffusion_model.{name}", f"base_model.model.{name}", f"lora_unet_{flat}",
                     f"lycoris_{flat}", f"lora_transformer_{flat}", f"transformer_{flat}"):
            assert foreign_loras.find_layer(text) == name, text
    far = "transformer_blocks_59_img_mlp_net_0_proj"
    assert foreign_loras.find_layer(f"lora_unet_{far}") == "transformer_blocks.59.img_mlp.net.0.proj"

FLUX = {"transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(2, 8)}
BAD_LORAS = { # what becomes of a good one's six layers, and what the error counts or names
    "nothing in it": (lambda t: {}, "no LoRA"),
    "another model's layers": (renamed("to_q", "qkv"), "4 of 12"),
    "more blocks than the model has": (renamed("blocks.1", "blocks.57"), "6 of 12", "blocks.57"),
    "A only": (lambda t: {k: v for k, v in t.items() if "lora_A" in k}, "lora_A"),
    "one B missing": (lambda t: {k: v for k, v in t.items() if k != B}, "to_q"),
    "wrong width": (lambda t: t | {A: torch.ones(2, 96)}, "to_q", "96", "1 of 12"),
    "A and B of different rank": (lambda t: t | {B: torch.ones(128, 4)}, "to_q"),
    "a vector": (lambda t: t | {A: torch.ones(128)}, "to_q"),
    "a convolution": (lambda t: t | {A: torch.ones(2, 128, 3, 3)}, "to_q"),
    "int8": (lambda t: t | {A: torch.ones(2, 128, dtype=torch.int8)}, "int8"),
    "NaN": (lambda t: t | {A: t[A].index_fill(1, torch.tensor(5), math.nan)}, "to_q"),
    "a checkpoint": (lambda t: {f"{LAYER}.weight": torch.ones(128, 128)}, "no LoRA"),
    "a whole transformer": (lambda t: {"model.diffusion_model.transformer_blocks.0.attn.add_q_proj.weight":
                                       torch.ones(8, 8)}, "whole transformer", "--transformer"),
    "a VAE": (lambda t: {"decoder.conv_in.weight": torch.ones(8, 8)}, "a VAE"),
    "a text encoder's": (renamed("transformer.transformer_blocks", "text_encoder.layers"), "text encoder", "12 of 12"),
    "a text encoder's beside": (lambda t: t | {"lora_te_layers_0_mlp.lora_down.weight": torch.ones(2, 8)},
                                "text encoder", "1 of 13"),
    "Flux": (lambda t: FLUX, "Flux"), "Flux beside": (lambda t: t | FLUX, "Flux", "1 of 13"),
    "SDXL": (lambda t: {"lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q.lora_down.weight":
                        torch.ones(2, 8)}, "SDXL"),
    "Wan": (lambda t: {"diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.ones(2, 8)}, "Wan"),
    "Z-Image": (lambda t: {"diffusion_model.layers.0.attention.to_q.lora_A.weight": torch.ones(2, 8)}, "Z-Image"),
    "LTX": (lambda t: {"transformer.transformer_blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, 8)}, "LTX"),
    "of a layer that is not linear": (renamed("to_q", "norm_q"), "norm_q", "4 of 12"),
    "a DoRA": (lambda t: t | {A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(128)}, "DoRA"),
    "a Tucker": (lambda t: as_kohya(t) | {"lora_unet_x.lora_mid.weight": torch.ones(2, 2, 1, 1)}, "lora_mid"),
    "diff_b": (lambda t: as_comfyui(t) | {"diffusion_model.img_in.diff_b": torch.ones(8)}, "diff_b"),
    "biases": (lambda t: t | {f"{LAYER}.lora_B.bias": torch.ones(160)}, "bias"),
    "two copies": (lambda t: t | as_comfyui({k: v + 1 for k, v in t.items()}), "two tensors"),
    "alone": (lambda t: t | {"transformer.img_in.alpha": torch.tensor(1.0)}, "img_in"),
}

@pytest.mark.parametrize("kind", BAD_LORAS)
def test_a_lora_that_does_not_fit_is_one_line_with_counts(tmp_path, kind, capfd):
    """diffusers itself only warns, and draws the base model's picture. No library says a word before that line."""
    change, *words = BAD_LORAS[kind]
    with refused(tmp_path, *words):
        tiny_with(lora_file(tmp_path, {k: v.contiguous() for k, v in change(lora_tensors()).items()}))
    assert capfd.readouterr() == ("", "")

DIFFER = {
    "alpha tensors, metadata": (lambda t: with_alpha(as_comfyui(t)), of_diffusers(r=2, lora_alpha=2), None,
                                "its alpha tensors", "lora_adapter_metadata"),
    "alpha tensors, rsLoRA": (lambda t: with_alpha(as_comfyui(t)), of_diffusers(**HALF, use_rslora=True), None,
                              "its alpha tensors", "lora_adapter_metadata"),
    "metadata, flat": (lambda t: t, of_diffusers(**HALF) | dict(lora_alpha="2"), None, "lora_adapter_metadata",
                       "alpha in its header"),
    "metadata, config beside": (named("base_model.model."), of_diffusers(**HALF), dict(r=2, lora_alpha=2),
                                "lora_adapter_metadata", "adapter_config.json"),
    "rank in the header": (lambda t: t, of_diffusers(r=4, lora_alpha=4), None, "lora_adapter_metadata", "rank 4"),
    "rank beside": (named("base_model.model."), {}, dict(r=4, lora_alpha=4), "adapter_config.json", "rank 4"),
    "one layer": (lambda t: t | {f"{LAYER}.alpha": torch.tensor(8.0)}, of_diffusers(**HALF), None, "to_q")}

@pytest.mark.parametrize("kind", DIFFER)
def test_two_different_alphas_are_an_error_that_names_both_places(tmp_path, kind):
    change, header, config, *words = DIFFER[kind]
    safetensors.torch.save_file(change(lora_tensors()), tmp_path / "x.safetensors", metadata=header or None)
    if config:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    with refused(tmp_path / "x.safetensors", *words):
        predict.read_lora(tmp_path / "x.safetensors")

def zeroed(is_zero):
    """-> a function that puts zeros into the matrices whose names are such."""
    return lambda tensors: {k: v * 0 if is_zero(k) else v for k, v in tensors.items()}

DOUBTFUL = { # how it is changed, its header, what the line says
    "lora_B": (zeroed(lambda k: "lora_B" in k), {}, "has no effect"),
    "lora_A": (zeroed(lambda k: "lora_A" in k), {}, "has no effect"),
    "a half each": (zeroed(lambda k: ("to_q" in k) == ("lora_A" in k)), {}, "has no effect"),
    "alpha": (dict, of_diffusers(r=2, lora_alpha=0), "has no effect"),
    "alpha tensors": (lambda t: with_alpha(t, 0.0), {}, "has no effect"),
    "negative": (lambda t: with_alpha(t, -2.0), {}, "negative alpha, -2"),
    "some lost": (lambda t: with_alpha(as_comfyui(t), layers="net.2|to_out"), {}, "no alpha tensor, for instance "
                  "transformer_blocks.0.attn.to_q;")}

@pytest.mark.parametrize("kind", DOUBTFUL)
def test_a_lora_that_does_not_do_what_was_trained_loads_with_one_line(tmp_path, kind, capfd):
    """However often it is read."""
    change, header, words = DOUBTFUL[kind]
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(change(lora_tensors()), path, metadata=header or None)
    for _ in range(2):
        predict.read_lora(path)
    error = capfd.readouterr().err
    assert error.startswith(f"warning: {path}: ") and words in error and len(error.splitlines()) == 1, error

# ---- our own files after other programs, and after damage ------------------------------------------------------------

@pytest.fixture
def own(tmp_path):
    """An older checkpoint's LoRA, whose alpha is not its rank."""
    transformer = predict.load_transformer(TINY, "float32")
    torch.manual_seed(0)
    predict.add_lora(transformer, r=2, lora_alpha=3, target_modules=["0.attn.to_q", "1.attn.to_q"],
                     init_lora_weights=False)
    state = predict.with_prefix("transformer", predict.get_peft_model_state_dict(transformer))
    meta = {"transformer.r": 2, "transformer.lora_alpha": 3, "train.step": 3}
    path = tmp_path / "own.safetensors"
    tensor_files.write_tensors(path, state, meta, "lora_adapter_metadata", notes={"modelspec.title": "run"})
    return path

def rewritten(path, change=dict, **entries):
    """As a metadata editor or a dtype converter writes it."""
    with safetensors.safe_open(path, "pt") as f:
        header = f.metadata()
    out = path.with_name("rewritten.safetensors")
    safetensors.torch.save_file(change(safetensors.torch.load_file(path)), out, metadata=header | entries)
    return out

def test_our_lora_with_an_edited_header_or_cast_loads_with_one_line(own, capfd):
    """Its tensors and our own entry are intact, or it was cast as a whole; the alpha is kept."""
    want = predict.read_lora(own)
    assert not capfd.readouterr().err
    edited = rewritten(own, **{"modelspec.title": "snow", "format": "pt"})
    for _ in range(2):
        lora = predict.read_lora(edited)
    assert_bitwise(lora.state, want.state)
    error = capfd.readouterr().err
    assert lora.meta == want.meta and error.startswith(f"warning: {edited}: ") and "header was edited" in error
    assert len(error.splitlines()) == 1
    for dtype in (torch.float16, torch.bfloat16, E4M3):
        common.warn_once.cache_clear()
        file = rewritten(own, lambda t: cast(t, dtype), **{"modelspec.title": str(dtype)})
        assert_same_changes(changes_of(tiny_in_fp32([file])), products_of(cast(want.state, dtype), 1.5))
        error = capfd.readouterr().err
        assert "was changed by another program" in error and len(error.splitlines()) == 1, error

def test_a_changed_weight_or_entry_of_our_lora_is_refused_with_the_way_to_use_it(own, tmp_path):
    """The same names, shapes and dtypes: it may be damage. The command of the error line makes a file of it that is
    used, at the scale of its own header."""
    with safetensors.safe_open(own, "pt") as f:
        text = f.metadata()["lora_adapter_metadata"]
    def one_weight(tensors):
        min(tensors.values(), key=len).view(-1)[5] += 1
        return tensors
    for entry in (text.replace('"train.step": 3', '"train.step": 4'), text.replace('lora_alpha": 3', 'lora_alpha": 2')):
        assert entry != text
        with refused("rewritten", "digest"):
            predict.read_lora(rewritten(own, lora_adapter_metadata=entry))
    changed = rewritten(own, one_weight)
    with pytest.raises(common.InputError) as e:
        predict.read_lora(changed)
    assert is_one_line(str(e.value), "digest", "on purpose", changed)
    words = shlex.split(str(e.value).split("what this makes: ")[1])
    assert words[:2] == ["python", "tools/convert_lora.py"] and words[-1] == "NEW.safetensors"
    works(*words[1:-1], tmp_path / "new.safetensors")
    want = products_of(one_weight(safetensors.torch.load_file(own)), 1.5)
    assert_same_changes(changes_of(tiny_in_fp32([tmp_path / "new.safetensors"])), want)

def half_of(tensors):
    return {k: v.half() if "lora_A" in k else v for k, v in tensors.items()}

def second_layer(tensors):
    return {k: v for k, v in tensors.items() if "blocks.1." in k}

# how another program changes a file whose header it keeps; and a LoRA that does the same, by the scale of that header
CHANGES = dict(half_cast=(half_of, half_of), without_a_layer=(second_layer, second_layer),
               renamed=(renamed("transformer.", "diffusion_model."), dict))

@pytest.mark.parametrize("kind", CHANGES)
def test_our_lora_changed_by_another_program_is_used_at_the_scale_of_its_header(own, kind, capfd):
    """A change that no flipped bit makes is used, with a line that says so."""
    change, same = CHANGES[kind]
    file = rewritten(own, change)
    got = changes_of(tiny_in_fp32([file]))
    line, = capfd.readouterr().err.splitlines()
    assert "was changed by another program" in line and str(file) in line
    assert_same_changes(got, products_of(same(safetensors.torch.load_file(own)), 1.5))

def test_our_lora_of_another_rank_than_its_header_says_is_refused(own):
    """Who resizes or joins LoRAs may have kept the scale or not."""
    twice = rewritten(own, lambda t: {k: torch.cat([v, v], dim=0 if "lora_A" in k else 1) for k, v in t.items()})
    with refused(twice, "says rank 2", "its tensors have 4"):
        predict.read_lora(twice)

def test_no_flipped_bit_of_our_lora_is_silent(own, tmp_path):
    """In its header, with --fuzz each of them, and in its tensors: refused, or read as before."""
    sound, want, rng = own.read_bytes(), predict.read_lora(own), random.Random(0)
    path, header, passed = tmp_path / "x.safetensors", 8 * (8 + int.from_bytes(sound[:8], "little")), 0
    bits = [*range(0, header, 1 if OPTIONS["fuzz"] else 11)]
    bits += [rng.randrange(header, 8 * len(sound)) for _ in range(OPTIONS["fuzz"] or 50)]
    for bit in bits:
        path.write_bytes(flip(bit)(sound))
        try:
            got = predict.read_lora(path)
        except common.InputError as e:
            assert is_one_line(str(e), path)
            continue
        assert_bitwise(got.state, want.state)
        assert got.meta == want.meta
        passed += 1
    print(f"{len(bits)} flipped bits, {passed} of them without a change of what is read")
    assert passed < len(bits) / 50

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5000000000\n"

WHOLE = safetensors.torch.save(lora_tensors())
NO_FILES = [
    ("empty.safetensors", b"", "an empty file"), ("pointer.safetensors", POINTER, "git lfs"),
    ("page.safetensors", b"<!DOCTYPE html><html>Sign in</html>", "a web page"),
    ("words.safetensors", b"Entry not found", "no whole"),
    ("lora.pt", b"PK\3\4" + bytes(99), "a pickle"), ("lora.ckpt", b"\x80\x02}q", "a pickle"),
    ("lora.safetensors", b"\x80\x02}q" + bytes(99), "a pickle"), ("lora.gguf", b"GGUF" + bytes(99), "a gguf"),
    ("cut.safetensors", WHOLE[:-100], "no whole"), ("head.safetensors", WHOLE[:300], "no whole"),
    ("long.safetensors", WHOLE + b"x", "no whole"), ("zeros.safetensors", bytes(999), "no whole"),
    ("lora.json", b"{}", "no whole")]

@pytest.mark.parametrize("name, content, word", NO_FILES)
def test_a_lora_that_is_no_safetensors_file_is_one_line_that_says_what_it_is(tmp_path, name, content, word, capfd):
    (tmp_path / name).write_bytes(content)
    with refused(tmp_path / name, word):
        predict.read_lora(tmp_path / name)
    assert capfd.readouterr() == ("", "")

def test_a_safetensors_file_of_anything_else_is_one_line(tmp_path):
    """An optimizer's, as it lies beside each checkpoint's LoRA; a model's."""
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({f"exp_avg.{k}": v for k, v in lora_tensors().items()}, path)
    for file in [path, *TINY.glob("vae/*.safetensors"), *TINY.glob("text_encoder/*.safetensors"),
                 *TINY.glob("transformer/*.safetensors")]:
        with refused(file):
            predict.read_lora(file)

def test_an_entry_of_another_program_that_is_called_as_ours_is_not_read(tmp_path):
    safetensors.torch.save_file(as_comfyui(lora_tensors()), tmp_path / "x.safetensors", metadata=dict(train="3 steps"))
    meta = predict.read_lora(tmp_path / "x.safetensors").meta
    assert not [key for key in meta if key.startswith("train.")]

def test_a_folder_without_a_lora_of_its_name_names_the_file_that_is_there(tmp_path):
    safetensors.torch.save_file(lora_tensors(), tmp_path / "snow.safetensors")
    with refused(tmp_path, f"; give {tmp_path / 'snow.safetensors'}"):
        predict.find_lora(tmp_path)
    assert_bitwise(predict.read_lora(tmp_path / "snow.safetensors").state, lora_tensors())

def test_a_mistyped_path_in_a_folder_that_is_here_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    """What is fetched from there: tests/test_hub.py."""
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("looked for"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    with refused("a/b"):
        predict.find_lora("a/b")

# ---- what train.py writes, and reads ---------------------------------------------------------------------------------

def first_item(ns):
    return ns["load_item"](ns["pick"](0))

def stock_loss(ns, *loras):
    """The stock model's loss, with LoRAs loaded by the stock pipeline, for the first sample of this training."""
    pipe = stock_pipeline(TINY)
    for i, path in enumerate(loras):
        pipe.load_lora_weights(str(path), adapter_name=f"l{i}")
        pipe.set_adapters([f"l{j}" for j in range(i + 1)])
    return loss_of(pipe.transformer, ns)

def loss_of(transformer, ns):
    item = first_item(ns)
    x = torch.cat([(1 - item.s) * item.x0 + item.s * item.noise, item.controls])
    with torch.no_grad():
        v = transformer(hidden_states=x[None], encoder_hidden_states=item.prompt[None], timestep=item.s[None],
                        img_shapes=[item.img_shapes], return_dict=False)[0][0]
    error = (v[:len(item.noise)] - (item.noise - item.x0)).square().mean(-1)
    return ((error * item.weight).sum() / item.weight.sum()).item()

ONE = ["--batch_size", 1, "--lr_scheduler", "constant", "--device", "cpu"]

def short_run(tmp_path, *flags):
    """Two steps with these flags, all-linear -> result of run_script, and the loss of the model that was trained."""
    run = train_demo(tmp_path / "a", *ONE, "--lora_targets", "all-linear", "--max_steps", 2, *flags)
    assert run.status == 0, run.err
    return run, loss_of(run.globals["transformer"], run.globals)

ALPHA = ["--lora_rank", 4, "--lora_alpha", 6]
KINDS = {
    "plain": ALPHA,
    "rsLoRA": [*ALPHA, "--lora_args", "use_rslora=true"],
    "patterns": [*ALPHA, "--lora_args", 'rank_pattern={"to_q":2,"net.2":8}', 'alpha_pattern={"to_k":3}']}

@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_lora_train_save_load_in_stock_and_go_on(tmp_path, kind, caplog):
    """The file and a checkpoint's in the stock pipeline, and as --pretrained_lora, give the loss of the model that was
    trained; stock says nothing about their metadata; it resumes bit for bit; damaged it is refused. Every layer
    learns, but for those of the last block whose output goes nowhere."""
    flags = KINDS[kind]
    run, want = short_run(tmp_path, *flags)
    again = [*ONE, "--lora_targets", "all-linear", *flags]
    train_log(tmp_path / "r", *again, "--max_steps", 1)
    assert curve(train_log(tmp_path / "r", *again, "--max_steps", 2, "--resume")) == curve(log_of(tmp_path / "a"))
    assert_bitwise(lora_of(tmp_path / "r"), lora_of(tmp_path / "a"))
    meta = predict.read_lora(tmp_path / "a").meta
    peft_args = [list(command_line.key_value(text)) for text in flags[5:]]
    assert meta["train.config"]["lora_args"] == peft_args and meta["train.config"]["data_hash"]
    assert {"torch", "peft"} <= meta["train.versions"].keys()
    assert abs(want / stock_loss(run.globals) - 1) > 1e-4
    for path in (tmp_path / "a", tmp_path / "a/checkpoint-000002"):
        caplog.clear()
        assert stock_loss(run.globals, path / predict.LORA_FILE) == pytest.approx(want, rel=1e-6)
        assert not [r for r in caplog.records if r.name.startswith("diffusers")], caplog.text
        log = train_log(tmp_path / f"p{path.name}", "--pretrained_lora", path, *ONE, "--max_steps", 1)
        assert log[0]["loss"] == pytest.approx(want, rel=1e-6)
    model = QwenImageTransformer2DModel.from_pretrained(TINY / "transformer")
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "_blocks." in n}
    last = rf"blocks\.{len(model.transformer_blocks) - 1}\.(attn\.(add_q_proj|to_add_out)|txt_mlp)"
    dead = {n for n in linears if re.search(last, n)}
    assert set(layers_of(lora_of(tmp_path / "a"))) == linears - dead and len(dead) == 4
    assert all(v.any() for k, v in lora_of(tmp_path / "a").items() if "lora_B" in k)
    damage_tensors(tmp_path / "a" / predict.LORA_FILE)
    with refused(tmp_path / "a"):
        predict.read_lora(tmp_path / "a")

def test_a_lora_s_dropout_is_the_training_s_alone(tmp_path):
    """Pictures are generated without, here and in the stock pipeline, although the LoRA was trained with it; predict.py
    also where another program's file still says it."""
    run, _ = short_run(tmp_path, "--lora_dropout", 0.5)
    assert stock_loss(run.globals, tmp_path / "a") == stock_loss(run.globals, tmp_path / "a")
    tensors, meta = tensor_files.read_tensors(tmp_path / "a" / predict.LORA_FILE, "lora_adapter_metadata")
    assert "transformer.lora_dropout" not in meta and meta["train.config"]["lora_dropout"] == 0.5
    meta = {k: v for k, v in meta.items() if k.startswith("transformer.")} | {"transformer.lora_dropout": 0.5}
    transformer = tiny_with(lora_file(tmp_path, tensors, **meta))
    assert not any(isinstance(m, torch.nn.Dropout) and m.p for m in transformer.modules())
    assert loss_of(transformer, run.globals) == loss_of(transformer, run.globals)

FOLDED = {"alpha": ["--lora_alpha", 16], "rslora": ["--lora_alpha", 6, "--lora_args", "use_rslora=true"],
          "patterns": ["--lora_alpha", 16, "--lora_args", 'alpha_pattern={"to_q":2}', 'rank_pattern={"to_v":2}']}

@pytest.mark.parametrize("flags", FOLDED.values(), ids=FOLDED)
def test_going_on_from_a_finished_lora_is_going_on_from_its_checkpoint(small, tmp_path, flags):
    """Its scale was folded into lora_B: trained like that, the same step would change the weights less. Also of a copy
    that tools/convert_lora.py has made, for diffusers and for ComfyUI."""
    at = small.flags.index("--lora_rank")
    own, own_layers = [*small.flags[:at], *small.flags[at + 5:]], small.flags[at + 2:at + 5]
    sgd = ["--optimizer", "torch.optim.SGD", "--lr", 3, "--warmup_steps", 0, "--max_steps", 2, "--out_dir"]
    works("train.py", *own, "--lora_rank", 4, *own_layers, *flags, *sgd, tmp_path / "a")
    for to in ("diffusers", "comfyui"):
        works("tools/convert_lora.py", tmp_path / "a", "--to", to, "--out", tmp_path / f"{to}.safetensors")
    before = changes_of(tiny_in_fp32([tmp_path / "a"]))
    learned, norms = [], []
    for n, start in enumerate(("a/checkpoint-000002", "a", "diffusers.safetensors", "comfyui.safetensors")):
        works("train.py", *own, "--pretrained_lora", tmp_path / start, *sgd, tmp_path / f"{n}")
        after = changes_of(tiny_in_fp32([tmp_path / f"{n}"]))
        learned.append({layer: change - before[layer] for layer, change in after.items()})
        norms.append(log_of(tmp_path / f"{n}")[1]["grad_norm"])
        assert_same_changes(learned[n], learned[0], 1e-4)
    assert norms == pytest.approx([norms[0]] * 4, 1e-5) and norms[0] > 0

@pytest.mark.parametrize("flags, status, named", [
    ("--pretrained_lora GOOD --lora_rank 8", 2, "--lora_rank"), ("--pretrained_lora GOOD --lora_rank=8", 2, "rank"),
    ("--pretrained_lora GOOD --lora_alpha 3", 2, "--lora_alpha"), ("--pretrained_lora BAD", 1, "4 of 12"),
    ("--pretrained_lora GOOD --lora_targets to_q", 2, "--lora_targets"), ("--lora_args =3", 2, "--lora_args"),
    ("--pretrained_lora GOOD --lora_args use_rslora=true", 2, "--lora_args"),
    ("--lora_args use_rslora", 2, "--lora_args")])
def test_a_lora_to_start_from_that_does_not_fit_or_flags_is_refused(tmp_path, two_loras, flags, status, named):
    bad = lora_file(tmp_path, renamed("to_q", "qkv")(lora_tensors()))
    result = train_demo(tmp_path / "a", *flags.replace("GOOD", str(two_loras[0])).replace("BAD", str(bad)).split())
    assert result.status == status and named in result.errors[-1] and (status == 2 or is_one_line(result.errors[-1]))

def layer_with_lora(dtype, ours, other=False):
    """-> a model of this dtype, and a layer of it with a random LoRA in fp32, ours or peft's; perhaps with another
    beside it, which has a bias."""
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(**SMALL).to(dtype).requires_grad_(False)
    config = dict(r=4, lora_alpha=6, target_modules=["to_q"], init_lora_weights=False)
    predict.add_lora(model, **config) if ours else model.add_adapter(LoraConfig(**config))
    if other:
        model.add_adapter(LoraConfig(**config | dict(lora_bias=True)), "other")
    cast_training_params(model)
    layer = model.transformer_blocks[0].attn.to_q
    for name, p in layer.named_parameters():
        if "lora_" in name and "weight" in name:
            p.data.normal_(generator=torch.Generator().manual_seed(len(name) + ("lora_A" in name)))
    assert isinstance(layer, LoraLinear) == ours
    return model, layer

def test_lora_on_a_bf16_base_is_cast_when_used():
    """Master weights, their gradients and the file stay fp32, peft's own layer gives the same but for bf16's rounding,
    scale and disable work; on an fp32 base nothing differs at all."""
    x = torch.randn(3, 24, E)
    def compute(dtype, ours, scale):
        _, layer = layer_with_lora(dtype, ours)
        weights = [p for p in layer.parameters() if p.requires_grad]
        assert [w.dtype for w in weights] == [torch.float32] * 2
        layer.enable_adapters(scale > 0)
        layer.scale_layer(scale or 1)
        out = layer(x.to(dtype))
        return [out, *(torch.autograd.grad(out.float().square().sum(), weights) if scale else [])]
    for scale in (1, 0.5, 0):
        exact = compute(torch.float32, False, scale)
        assert_bitwise(compute(torch.float32, True, scale), exact)
        out, *grads = compute(torch.bfloat16, True, scale)
        assert out.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in grads)
        assert all(error < 2e-2 for error in map(rel, [out, *grads], exact))

def test_on_a_bf16_base_another_lora_changes_nothing_of_a_training_and_counts_when_it_is_active():
    """--sample_lora: the trained LoRA alone is computed as without another one beside it, to the bit; both together are
    what peft computes in fp32, but for bf16's rounding."""
    x = torch.randn(3, 24, E, generator=torch.Generator().manual_seed(9))
    def compute(dtype, ours, other, active):
        model, layer = layer_with_lora(dtype, ours, other)
        model.set_adapter(active)
        return layer(x.to(dtype))
    both = ["default", "other"]
    exact = [compute(torch.float32, False, True, active) for active in (["default"], ["other"], both)]
    half = [compute(torch.bfloat16, True, True, active) for active in (["default"], ["other"], both)]
    assert all(rel(got, want) < 2e-2 for got, want in zip(half, exact))
    assert all(rel(alone, exact[2]) > 0.1 for alone in exact[:2])
    for active in (["default"], []):
        assert_bitwise([compute(torch.bfloat16, True, True, active)], [compute(torch.bfloat16, True, False, active)])

def test_the_loras_of_a_block_are_cast_together_to_the_same_bits(monkeypatch):
    """Kept or recomputed; afterwards no cast is left. So are those of the base."""
    samples = make_batch(([(1, 8, 8), (1, 8, 6)], 20), ([(1, 4, 12), (1, 4, 4)], 9))
    def compute(together, recomputed):
        with monkeypatch.context() as patch:
            if not together:
                patch.setattr("library.lora.lora_linear.share_casts", lambda blocks: None)
            model = patched_copy(hot_model("2511", dtype=torch.bfloat16, num_layers=3)).requires_grad_(False).train()
            torch.manual_seed(0)
            weights = predict.add_lora(model, r=4, init_lora_weights=False, target_modules=[
                "to_q", "to_k", "add_v_proj", "img_mod.1", "img_mlp.net.2"]).values()
        rope_patch.checkpoint_blocks(model, recomputed)
        out = run(model, "packed", samples)
        grads = torch.autograd.grad(sum(o.float().square().sum() for o in out), [*weights])
        assert all(m.cast is None for m in model.modules() if isinstance(m, LoraLinear))
        model.disable_adapters()
        return [*out, *grads, *run(model, "packed", samples)]
    for recomputed in (0, 3):
        assert_bitwise(compute(True, recomputed), compute(False, recomputed))
