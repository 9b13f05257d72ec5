"""
--transformer FILE.safetensors: a transformer in one file, as ComfyUI, Civitai and diffusers have it.

The names of its tensors are diffusers', maybe behind a prefix (model.diffusion_model. in ComfyUI's); what stands beside
that prefix, such as the VAE of an all-in-one checkpoint, is not used. Weights are bf16, fp16, fp32 or fp8. An fp8
weight may have a scale (X.scale_weight or X.weight_scale, of the whole weight or of each row), by which it is
multiplied. config.json comes from --model.

The file is mapped into memory, and a block's weights are unpacked when predict.place_transformer comes to that block:
20 billion weights in bf16 beside a file of 20 GB would take 60 GB of host memory. With --quantize
fp8 a linear layer keeps the file's own bytes and scale (extras/quantize.py), so that nothing is rounded a second time.

Formats of fewer bits are refused: to unpack them takes their makers' code (nvfp4, Nunchaku, ConvRot).
"""
import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel

from common import InputError, first_words

TAKEN = dict(BF16="bf16", F16="fp16", F32="fp32", F8_E4M3="fp8 (e4m3)", F8_E5M2="fp8 (e5m2)") # dtypes in a header
REMEDY = "take its bf16 or fp8 file, and --quantize nf4 or int8 if memory is short"
MARK_2511 = "__index_timestep_zero__" # ComfyUI's: controls are at timestep 0, which is zero_cond_t in diffusers' config
SCALES = ("scale_weight", "weight_scale")
NOT_USED = ("scale_input", "input_scale", "comfy_quant") # of activations; a note that refuse_format looks at
SIGNS = {b"GGUF": "a gguf", b"PK": "a pickle, which may run code", b"\x80": "a pickle, which may run code",
         b"version https://git-lfs": "a pointer of git lfs", b"<": "a web page"} # how other files begin
# a tensor's name -> what such a file is, by the first that fits
LORAS = r"lora_|\.lora\.|lokr_|hada_|dora_scale"
FORMATS = {r"\.(qzeros|g_idx)$": "int4 of GPTQ or AWQ", r"\.(qweight|wscales|smooth_factor)$": "Nunchaku's SVDQuant, "
           "int4 or nvfp4", r"\.weight_scale_2$": "nvfp4", r"\.absmax$|bitsandbytes": "bitsandbytes' 4 or 8 bits",
           r"\._data$|_qtype$": "quanto's"}
DTYPES = dict(I8="int8", U8="4 bits, packed in bytes", F4="fp4", F8_E8M0="mxfp8")
FAMILIES = {r"visual\.blocks\.0\.|layers\.0\.self_attn\.": "a text encoder", r"(^|\.)decoder\.(conv|up)": "a VAE",
            r"double_blocks\.0\.|single_transformer_blocks\.0\.": "Flux or one of its kin",
            r"input_blocks\.0\.|down_blocks\.0\.": "a UNet (Stable Diffusion, SDXL)", r"joint_blocks\.0\.": "SD 3",
            r"(^|\.)blocks\.0\.": "Wan or another video model", r"(^|\.)decoder\.": "a VAE"}


@dataclass
class Layout:
    """Where the model's weights are in a file."""
    keys: dict # {the name of a weight in the model: in the file}
    scales: dict # {the name of a weight in the model: its scale's name in the file}
    shapes: dict # {the name of a weight in the model: [rows, ...]}
    marked: bool # as a 2511
    form: str # in words


def error_of(path, what, remedy):
    return InputError(f"--transformer {path}: {what}; {remedy}")


def open_file(path):
    """-> the file, mapped by safetensors. InputError says what it is instead."""
    if not os.path.isfile(path):
        raise error_of(path, "no file of that name", "check it (of the hub: hf download REPO FILE --local-dir .)")
    try:
        return safetensors.safe_open(path, "pt")
    except Exception as e: # a foreign file can fail in any way
        with open(path, "rb") as f:
            start = f.read(200)
        for sign, what in SIGNS.items():
            if start.startswith(sign):
                raise error_of(path, what, REMEDY if what == "a gguf" else "download the .safetensors file itself")
        what = first_words(e) if start else "an empty file"
        raise error_of(path, f"is no whole .safetensors file ({what})", "download it again")


def is_used(name):
    """Whether a tensor is a weight or its scale, and not one of those that only ComfyUI reads."""
    return name.rpartition(".")[2] not in NOT_USED and name not in ("scaled_fp8", MARK_2511)


def read_layout(path):
    """-> Layout, from the header. InputError if it is no transformer of Qwen-Image, or of a format that is refused."""
    f = open_file(path)
    keys = list(f.keys())
    text = "\n".join(keys)
    if re.search(LORAS, text):
        raise error_of(path, "a LoRA", "give it as --lora (in train.py --pretrained_lora), and leave out --transformer")
    block = re.search(r"^((?:.*\.)?)transformer_blocks\.0\.attn\.", text, re.M)
    for pattern, family in FAMILIES.items():
        if re.search(pattern, text, re.M) and (not block or "single_" in pattern):
            raise error_of(path, f"looks like {family}", "give a transformer of Qwen-Image-Edit")
    if not block:
        raise error_of(path, f"is no transformer of Qwen-Image (a tensor of it: {min(keys, default='none')})",
                     "give one of Qwen-Image-Edit")
    prefix = block[1]
    names = {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}
    refuse_format(path, f, names)

    layout = Layout({}, {}, {}, MARK_2511 in {*names, *keys}, "")
    dtypes = Counter()
    for name, key in names.items():
        layer, _, kind = name.rpartition(".")
        if kind in SCALES:
            layout.scales[f"{layer}.weight"] = key
        elif is_used(name):
            part = f.get_slice(key)
            layout.keys[name], layout.shapes[name] = key, part.get_shape()
            if kind == "weight" and len(part.get_shape()) == 2:
                dtypes[TAKEN[part.get_dtype()]] += 1
    for name, key in layout.scales.items():
        shape, rows = f.get_slice(key).get_shape(), layout.shapes.get(name, [0])[0]
        if not rows or shape not in ([], [1], [1, 1], [rows], [rows, 1]):
            raise error_of(path, f"{key} is {shape}: neither one scale of a weight nor one for each of its {rows} rows",
                         REMEDY)
    layout.form = " and ".join(f"{n} matrices in {dtype}" for dtype, n in dtypes.most_common())
    if layout.scales:
        layout.form += ", with scales"
    return layout


def refuse_format(path, f, names):
    """InputError names the format if it is not taken. f: the open file; names: {in the model: in the file}."""
    try: # ComfyUI's notes: {"format": "nvfp4"}, in a tensor of each layer, or together in the header
        notes = [json.loads(bytes(f.get_tensor(key).tolist())) for name, key in names.items()
                 if name.endswith(".comfy_quant")]
        header = json.loads((f.metadata() or {}).get("_quantization_metadata", "{}"))
        notes += [note for layer, note in header.get("layers", {}).items() if f"{layer}.weight" in names.values()]
        formats = {(note["format"], note.get("convrot", False)) for note in notes}
    except Exception as e: # a foreign file can fail in any way
        raise error_of(path, f"its notes of ComfyUI cannot be read ({type(e).__name__}: {first_words(e)})", REMEDY)
    for said, rotated in formats:
        if rotated or said not in ("float8_e4m3fn", "float8_e5m2"):
            words = f"{said}, ConvRot" if rotated else said
            raise error_of(path, f"in ComfyUI's format {words}, which is not taken", REMEDY)
    text = "\n".join(names)
    for pattern, what in FORMATS.items():
        if found := re.search(f".*(?:{pattern}).*", text, re.M):
            raise error_of(path, f"in the format {what} (it has {found[0]}), which is not taken", REMEDY)
    for name, key in names.items():
        dtype = f.get_slice(key).get_dtype()
        if dtype not in TAKEN and is_used(name):
            raise error_of(path, f"in the format {DTYPES.get(dtype, dtype)} ({name} is {dtype}), which is not taken",
                         REMEDY)


def check_fit(path, folder):
    """InputError unless the file holds just the tensors that transformer/config.json of this folder asks for."""
    layout, config = read_layout(path), folder / "transformer" / "config.json"
    fields = json.loads(config.read_text())
    if layout.marked != bool(fields.get("zero_cond_t")):
        has = "has" if layout.marked else "lacks"
        remedy = "give the --model it was made from"
        if not layout.marked:
            remedy += "; if it is a 2511 that was saved without the mark, give its diffusers folder"
        raise error_of(path, f"{has} {MARK_2511}, the mark of a 2511, and --model's {config} has zero_cond_t "
                       f"{fields.get('zero_cond_t', False)}", remedy)
    with init_empty_weights():
        model = QwenImageTransformer2DModel.from_config(fields)
    wanted = {name: list(p.shape) for name, p in model.state_dict().items()}
    if missing := sorted(wanted.keys() - layout.keys):
        remedy = "download it again, or give the --model it was made from"
        if re.search(r"-\d{5}-of-\d{5}", Path(path).name):
            remedy = "it is one of several; give the diffusers folder of all"
        raise error_of(path, f"lacks {len(missing)} of {len(wanted)} tensors, for instance {missing[0]}", remedy)
    if foreign := sorted(layout.keys.keys() - wanted):
        raise error_of(path, f"has {len(foreign)} tensors that --model's {config} does not know, for instance "
                     f"{foreign[0]}", "give the --model it was made from")
    for name, shape in wanted.items():
        if layout.shapes[name] != shape:
            raise error_of(path, f"{name} is {layout.shapes[name]}, and --model's {config} asks for {shape}",
                         "give the --model it was made from")


def attach(transformer, path):
    """Prepares a transformer on the meta device. It adds transformer.fill_from_file(module, quantize), which reads the
    weights under one module; the blocks' are left to predict.place_transformer, all others are read now. Until then a
    weight has its dtype and shape (peft looks at them), and the memory of one number."""
    layout, f = read_layout(path), safetensors.safe_open(path, "pt")
    waiting = {} # {parameter: its name}
    for layer_name, layer in transformer.named_modules():
        for name, p in list(layer.named_parameters(recurse=False)):
            blank = torch.nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), requires_grad=False)
            setattr(layer, name, blank)
            waiting[blank] = f"{layer_name}.{name}"

    def fill(module, quantize="none"):
        for layer in module.modules():
            for kind, p in list(layer.named_parameters(recurse=False)):
                if p not in waiting: # a LoRA's
                    continue
                name = waiting.pop(p)
                weight = f.get_tensor(layout.keys[name])
                scale = f.get_tensor(layout.scales[name]).float() if name in layout.scales else torch.ones(1)
                scale = scale.view(-1, *[1] * (weight.dim() - 1)) # of a row, or of all rows
                linear = type(layer) is torch.nn.Linear and kind == "weight"
                if quantize == "fp8" and linear and weight.dtype == torch.float8_e4m3fn:
                    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
                    layer.register_buffer("scale", scale.expand(len(weight), 1).contiguous())
                elif name in layout.scales:
                    p.data = weight.to(torch.float32, copy=True).mul_(scale).to(p.dtype)
                else:
                    p.data = weight.to(p.dtype) # a mapping still, if that is the file's dtype

    for name, child in transformer.named_children():
        if name != "transformer_blocks":
            fill(child)
    transformer.fill_from_file = fill
    transformer.eval() # as from_pretrained leaves it
    if os.environ.get("RANK", "0") == "0":
        print(f"{path}: the transformer, {layout.form}")
