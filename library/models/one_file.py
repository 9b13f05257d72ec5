"""
--transformer FILE.safetensors: a transformer in one file, as ComfyUI, Civitai and diffusers have it.

The names of its tensors are diffusers', maybe behind a prefix (model.diffusion_model. in ComfyUI's); what stands beside
that prefix, such as the VAE of an all-in-one checkpoint, is not used. Weights are bf16, fp16, fp32 or fp8. An fp8
weight may have a scale (X.scale_weight or X.weight_scale, of the whole weight or of each row), by which it is
multiplied. config.json comes from --model.

The file is mapped into memory, and a block's weights are unpacked when predict.place_transformer comes to that block:
20 billion weights in bf16 beside a file of 20 GB would take 60 GB of host memory. With --quantize
fp8 a linear layer keeps the file's own bytes and scale (library/models/quantization.py), so that nothing is rounded a
second time.

Formats of fewer bits are refused: to unpack them takes their makers' code (nvfp4, Nunchaku, ConvRot).
"""
import functools
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from diffusers import QwenImageTransformer2DModel

import common
from common import InputError, first_words, near_file
from library.files import tensor_files
from library.models import model_files
from rope_patch import blocks_of

TAKEN = dict(BF16="bf16", F16="fp16", F32="fp32", F8_E4M3="fp8 (e4m3)", F8_E5M2="fp8 (e5m2)") # dtypes in a header
REMEDY = "take its bf16 or fp8 file, and --quantize nf4 or int8 if memory is short"
CLASS = "QwenImageTransformer2DModel"
# fields that say what latents, prompts and places it is for, and whether it is a 2511; with their defaults in diffusers
KIND = dict(in_channels=64, joint_attention_dim=3584, use_layer3d_rope=False, zero_cond_t=False)
MARK_2511 = "__index_timestep_zero__" # ComfyUI's: controls are at timestep 0, which is zero_cond_t in diffusers' config
SCALES = ("scale_weight", "weight_scale")
NOT_USED = ("scale_input", "input_scale", "comfy_quant") # of activations; a note that refuse_format looks at
# a tensor's name -> what such a file is, by the first that fits
LORAS = r"lora_|\.lora\.|lokr_|hada_|dora_scale"
FORMATS = {r"\.(qzeros|g_idx)$": "int4 of GPTQ or AWQ", r"\.(qweight|wscales|smooth_factor)$": "Nunchaku's SVDQuant, "
           "int4 or nvfp4", r"\.weight_scale_2$": "nvfp4", r"\.absmax$|bitsandbytes": "bitsandbytes' 4 or 8 bits",
           r"\._data$|_qtype$": "quanto's"}
MOST_NAME = 1000 # characters of a tensor's name; an honest one has a hundred
MOST_NOTE = 2**16 # bytes of a note of ComfyUI
SHARD = r"-\d{5}-of-\d{5}"
DTYPES = dict(I8="int8", U8="4 bits, packed in bytes", F4="fp4", F8_E8M0="mxfp8")

@dataclass
class Layout:
    """Where the model's weights are in a file."""
    keys: dict # {the name of a weight in the model: in the file}
    scales: dict # {the name of a weight in the model: its scale's name in the file}
    shapes: dict # {the name of a weight in the model: [rows, ...]}
    marked: bool # as a 2511
    form: str # in words
    file: safetensors.safe_open # mapped: if another file takes its place later, this is still the one

def error_of(path, what, remedy):
    return InputError(f"--transformer {path}: {what}; {remedy}")

def open_file(path):
    """-> the file, mapped by safetensors. InputError says what it is instead."""
    if not Path(path).is_file():
        near = near_file(Path(path))
        give = f"give {near}" if near else "check the name"
        raise error_of(path, "no file of that name", f"{give} (of the hub: hf download REPO FILE --local-dir .)")
    return tensor_files.open_safetensors(path, functools.partial(error_of, path), REMEDY)

def is_used(name):
    """Whether a tensor is a weight or its scale, and not one of those that only ComfyUI reads."""
    return name.rpartition(".")[2] not in NOT_USED and name not in ("scaled_fp8", MARK_2511)

def read_layout(path):
    """-> Layout, from the header. InputError if it is no transformer of Qwen-Image, or of a format that is refused."""
    f = open_file(path)
    keys = list(f.keys())
    if longest := [key for key in keys if len(key) > MOST_NAME]:
        raise error_of(path, f"has a tensor whose name is {len(longest[0]):,} characters long", REMEDY)
    text = "\n".join(keys)
    model_files.refuse_wrapped(f"--transformer {path}", keys)
    if re.search(LORAS, text):
        raise error_of(path, "a LoRA", "give it as --lora (in train.py --pretrained_lora), and leave out --transformer")
    prefixes = sorted(set(re.findall(r"^((?:.*\.)?)transformer_blocks\.\d+\.attn\.", text, re.M)))
    # an all-in-one file has a text encoder and a VAE beside; Flux has blocks of the same name, and single ones
    family, _ = tensor_files.family_of([key for key in keys if not prefixes or "single_" in key])
    if family:
        raise error_of(path, f"looks like {family}", "give a transformer of Qwen-Image-Edit")
    if not prefixes:
        raise error_of(path, f"is no transformer of Qwen-Image (a tensor of it: {min(keys, default='none')})",
                       "give one of Qwen-Image-Edit")
    if len(prefixes) > 1: # such as the moving average of a training beside its last weights
        copies = " and ".join(f"{prefix}transformer_blocks" for prefix in prefixes)
        raise error_of(path, f"has several transformers, {copies}", "save the one that is meant in a file of its own")
    prefix, = prefixes
    names = {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}
    marks = refuse_format(path, f, names)

    layout = Layout({}, {}, {}, MARK_2511 in {*names, *keys}, "", f)
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
    check_scales(path, f, marks, layout)
    layout.form = " and ".join(f"{n} matrices in {dtype}" for dtype, n in dtypes.most_common())
    if layout.scales:
        layout.form += ", with scales"
    return layout

def check_scales(path, f, marks, layout):
    """InputError if a matrix in fp8 has no scale although ComfyUI's marks, or the scales of others, say that it had
    one: it would be wrong by a large factor. (A file that was only cast to fp8 has no scales at all, and in one with
    scales some matrices stay in bf16.)"""
    if not layout.scales and not marks:
        return
    lost = [name for name, key in layout.keys.items() if name not in layout.scales and name.endswith(".weight")
            and len(layout.shapes[name]) == 2 and f.get_slice(key).get_dtype().startswith("F8")]
    if lost:
        why = f"it has {marks[0]}" if marks else f"{len(layout.scales)} others have one"
        raise error_of(path, f"{len(lost)} weights in fp8 lack their scale, for instance {lost[0]}, and {why}",
                       "take another copy of the file")

def refuse_format(path, f, names):
    """-> ComfyUI's marks of fp8 with scales: where they stand. InputError names the format if it is not taken. f: the
    open file; names: {in the model: in the file}."""
    try: # ComfyUI's notes: {"format": "nvfp4"}, in a tensor of each layer, or together in the header
        notes = {}
        for name, key in names.items():
            if name.endswith(".comfy_quant"):
                if math.prod(f.get_slice(key).get_shape()) > MOST_NOTE:
                    raise ValueError(f"{name} is no note")
                notes[name] = json.loads(bytes(f.get_tensor(key).tolist()))
        header = json.loads((f.metadata() or {}).get("_quantization_metadata", "{}"))
        for layer, note in header.get("layers", {}).items():
            if f"{layer}.weight" in names.values():
                notes[f"_quantization_metadata of {layer}"] = note
        formats = {(note["format"], note.get("convrot", False)) for note in notes.values()}
    except Exception as e: # a foreign file can fail in any way
        raise error_of(path, f"its notes of ComfyUI cannot be read ({type(e).__name__}: {first_words(e)})", REMEDY)
    for said, rotated in formats:
        if rotated or said not in ("float8_e4m3fn", "float8_e5m2"):
            words = f"{said!s:.60}, ConvRot" if rotated else f"{said!s:.60}"
            raise error_of(path, f"in ComfyUI's format {words}, which is not taken", REMEDY)
    for pattern, what in FORMATS.items():
        if found := next((name for name in names if re.search(pattern, name)), None):
            raise error_of(path, f"in the format {what} (it has {found}), which is not taken", REMEDY)
    for name, key in names.items():
        dtype = f.get_slice(key).get_dtype()
        if dtype not in TAKEN and is_used(name):
            raise error_of(path, f"in the format {DTYPES.get(dtype, dtype)} ({name} is {dtype}), which is not taken",
                           REMEDY)
    return [name for name in names if name == "scaled_fp8"] + [*notes]

def check_fit(path, folder):
    """InputError unless the file holds just the tensors that transformer/config.json of this folder asks for."""
    layout, config = read_layout(path), folder / "transformer" / "config.json"
    fields = json.loads(config.read_bytes())
    if layout.marked != bool(fields.get("zero_cond_t")):
        has = "has" if layout.marked else "lacks"
        remedy = "give the --model it was made from"
        if not layout.marked:
            remedy += "; if it is a 2511 that was saved without the mark, give its diffusers folder"
        raise error_of(path, f"{has} {MARK_2511}, the mark of a 2511, and --model's {config} has zero_cond_t "
                       f"{fields.get('zero_cond_t', False)}", remedy)
    model = model_files.empty_model(QwenImageTransformer2DModel, folder / "transformer")
    wanted = {name: list(p.shape) for name, p in model.state_dict().items()}
    differ = sorted(name for name in wanted.keys() | layout.shapes.keys()
                    if wanted.get(name) != layout.shapes.get(name))
    if differ:
        remedy = "give the --model it was made from, or download it again"
        if re.search(SHARD, Path(path).name):
            remedy = "it is one of several; give the diffusers folder of all"
        name = differ[0]
        found = layout.shapes.get(name, "missing")
        asked = wanted.get(name, "missing")
        raise error_of(path, f"{len(differ)} tensors are not as --model's {config} asks for them, for instance {name}: "
                       f"{found} in the file, {asked} by the config", remedy)

def check_folder(args, find_model):
    """InputError if --transformer's folder, or repository, says that it is no transformer of Qwen-Image-Edit, or one of
    another kind than --model's: the encoders' latents and prompts would not be what it was trained on. A transformer
    that was merged or trained on is of the same kind, and so is one with fewer blocks. v1 and 2509 have the same
    config.json: only a model_index.json tells them apart, and many folders have none. find_model: cache.py's.
    """
    name, parts = args.transformer, ["transformer"]
    folder = find_model(name, parts, False, "--transformer")
    model = find_model(args.model, [] if Path(args.model).is_dir() else parts, False) # a folder may be without it
    remedy = "give the --model it was made from, or one of its kind as --transformer"
    pipelines = [read_json(folder / "model_index.json", name), read_json(model / "model_index.json", "--model")]
    ours, theirs = [index.get("_class_name", "") for index in pipelines]
    if ours and not ours.startswith("QwenImageEdit"):
        raise error_of(name, f"its model_index.json says {ours}", "give a transformer of Qwen-Image-Edit")
    if ours and theirs and ("Plus" in ours) != ("Plus" in theirs):
        raise error_of(name, f"its model_index.json says {ours}, and that of --model {model} {theirs}", remedy)
    config = read_json(folder / "transformer/config.json", name)
    if config.get("_class_name", CLASS) != CLASS:
        raise error_of(name, f"its transformer is a {config['_class_name']}", "give a transformer of Qwen-Image-Edit")
    other = read_json(model / "transformer/config.json", "--model")
    for field, default in KIND.items():
        here, there = config.get(field, default), other.get(field, default)
        if other and here != there:
            raise error_of(name, f"{field} {here} in its transformer/config.json, and {there} in that of --model "
                           f"{model}", remedy)

def read_json(path, name):
    """-> the JSON object in a file, {} if there is none."""
    if not path.is_file():
        return {}
    try:
        fields = model_files.read_json(path)
        model_files.check_config(path.parent.name, path.name, fields)
        return fields
    except Exception as e: # a foreign file can fail in any way
        raise error_of(name, f"{path} cannot be read ({first_words(e)})", "download it again")

def attach(transformer, path):
    """Prepares a transformer on the meta device. It adds transformer.fill_from_file(module, quantize), which reads the
    weights under one module; the blocks' are left to predict.place_transformer, all others are read now. Until then a
    weight has its dtype and shape (peft looks at them), and the memory of one number."""
    layout = read_layout(path)
    if layout.shapes != {name: list(p.shape) for name, p in transformer.named_parameters()}: # check_fit has compared
        raise error_of(path, "has changed since it was looked at", "run the same command again")
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
                weight = layout.file.get_tensor(layout.keys[name])
                scale = layout.file.get_tensor(layout.scales[name]).float() if name in layout.scales else torch.ones(1)
                scale = scale.view(-1, *[1] * (weight.dim() - 1)) # of a row, or of all rows
                linear = type(layer) is torch.nn.Linear and kind == "weight"
                if quantize == "fp8" and linear and weight.dtype == torch.float8_e4m3fn:
                    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
                    layer.register_buffer("scale", scale.expand(len(weight), 1).contiguous())
                elif name in layout.scales:
                    p.data = weight.to(torch.float32, copy=True).mul_(scale).to(p.dtype)
                else:
                    p.data = weight.to(p.dtype) # a mapping still, if that is the file's dtype

    for child in transformer.children():
        if {*blocks_of(transformer)}.isdisjoint(child.modules()):
            fill(child)
    transformer.fill_from_file = fill
    transformer.eval() # as from_pretrained leaves it
    common.say(f"{path}: the transformer, {layout.form}")
