"""
Edit pictures: control picture(s) and an instruction -> PNG, with the stock pipeline's numbers, and many jobs of mixed
sizes in one batch.

$ python predict.py                                    # embedded default: held-out toy pictures, with the newest LoRA
$ python predict.py --model Qwen/Qwen-Image-Edit-2509 --image cat.jpg --prompt "make it snow" --lora out/RUN
$ python predict.py --model ... --image person.png coat.png --prompt "the person wears the coat of picture 2"
$ python predict.py --model ... --image photos --prompt "make it snow" --out_dir edited # every picture of a folder
$ python predict.py --model ... --jobs jobs.jsonl --out_dir edited # lines: {"image": ["a.jpg"], "prompt": "snow"}
$ python predict.py --model ... --lora out/RUN --seed 0 1 2 --compare ...  # sheet: a column per seed, base | LoRA
$ python predict.py --model ... --lora out/RUN LIGHTNING --shift 3 --num_inference_steps 4 --true_cfg_scale 1 ...
$ python predict.py --model ... --lora A B --lora_scale 1 0.5 --merge_lora merged/model # then --model merged/model
$ torchrun --nproc_per_node=8 predict.py --model ... --jobs jobs.jsonl --out_dir edited   # eight share the jobs
$ python predict.py --again out.png                      # once more, with the settings that stand in the picture
$ python predict.py --model ... --transformer_device cuda:0 --text_encoder_device cuda:1 --vae_device cuda:1 ...

Where many pictures are drawn, one that was made with the same settings stays: a second call draws what is missing. A
job's line may also set out, negative_prompt, height, width, size_from, seed, num_inference_steps, true_cfg_scale,
sigmas and shift. Conditional and unconditional runs of all jobs share the packs. Shape letters as in rope_patch.py.
"""
import argparse
import contextlib
import copy
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
import textwrap
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import peft
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from accelerate import init_empty_weights
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPlusPipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_shift, retrieve_timesteps
from diffusers.training_utils import cast_training_params
from diffusers.utils import get_peft_kwargs
from diffusers.utils.torch_utils import randn_tensor
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners import lora
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps, PngImagePlugin
from safetensors import SafetensorError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from cache import (ENCODER_PARTS, InputError, OTHER_SUFFIXES, SUFFIXES, TINY, add_model_flags, add_quantize_flag,
                   check_prompt, check_writable, content_key, encode_image, encode_prompt, file_hash, find_files,
                   find_model, fingerprint, fit_size, image_size, is_plus, load_encoders, load_part, load_pipeline,
                   make_low_bit, model_bytes, number, open_image, parse_args, pixels, prompt_length, prompt_size,
                   read_dataset, read_image, read_tensors, read_text, sweep, write_file, write_tensors)
from rope_patch import patch_qwen_model_for_multi_resolution, plan_packs, run_packed

warnings.filterwarnings("ignore", "Already found a `peft_config`") # several LoRAs are what is wanted
LORA_FILE = "pytorch_lora_weights.safetensors" # the name that stock load_lora_weights looks for in a folder
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json" # peft's own: the scale stands in the second

# ---- models ----------------------------------------------------------------------------------------------------------

def load_transformer(folder, dtype, weights=True):
    """The frozen transformer, patched so that a batch may hold any sizes. As long as dtype is its files', its weights
    are mappings of these, which take no memory and are shared by all processes, until place_transformer copies them.
    Without weights: on the meta device, for its shapes."""
    if weights:
        transformer = load_part(QwenImageTransformer2DModel, folder, "transformer", dtype)
    else:
        with init_empty_weights():
            transformer = QwenImageTransformer2DModel.from_config(QwenImageTransformer2DModel.load_config(
                folder / "transformer")).requires_grad_(False)
        torch.nn.Module.to(transformer, getattr(torch, dtype)) # not diffusers' own, which warns
    return patch_qwen_model_for_multi_resolution(transformer)

def count_or_all(text):
    """For argparse's type=: a number of blocks, or 'all'."""
    return 10**9 if text == "all" else number(int, 0)(text)

count_or_all.__name__ = "number of blocks" # argparse says "invalid number of blocks value"

def add_memory_flags(parser):
    """What train.py and predict.py can do about a transformer that is too large for its device."""
    add_quantize_flag(parser, "--quantize", "the frozen blocks of the transformer, 41 GB in bf16")
    parser.add_argument("--offload", type=count_or_all, default=0, metavar="BLOCKS",
                        help="blocks (a number, or all) that wait in pinned host memory and are copied to the device "
                             "for each forward and backward pass; raise it if memory runs out, with --max_tokens, as "
                             "more tokens a pass mean fewer copies")

def place_transformer(transformer, device, quantize="none", offload=0, fsdp=False):
    """Brings the transformer, with its LoRAs, to the device, block by block, at the number of bits that `quantize` says
    (what is no block, a hundredth of all weights, keeps its own). `offload` of the blocks, spread evenly, wait in
    pinned host memory; with fsdp each process holds its part of each block. Both are FSDP2: a block is gathered when it
    is entered, in the forward as in the backward pass, and freed behind it; between processes the next one comes while
    this one computes, from host memory alone it does not. All other layers and the LoRAs are whole on every device.
    Needs a process group, and makes one where a process is alone. (diffusers' group offloading has taken a block away
    when its backward pass begins.)"""
    device, blocks = torch.device(device), transformer.transformer_blocks
    offload = min(offload, len(blocks))
    away = [i * len(blocks) // offload for i in range(offload)]
    transformer.bytes_away = 0 # what a forward or a backward pass copies from host memory
    if quantize != "none" and any("lora_magnitude" in name for name, _ in transformer.named_parameters()):
        raise InputError("--quantize: a DoRA needs the norms of a base in full precision; leave it out")
    check_memory(device, *transformer_bytes(transformer, quantize, offload, dist.get_world_size() if fsdp else 1))
    if device.type == "cuda":
        torch.cuda.set_device(device) # where FSDP2 works
    if (away or fsdp) and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0,
                                world_size=1)
    if away or fsdp:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view") # nothing works in place
        ranks = dist.get_world_size()
        mesh = init_device_mesh(device.type, (1, ranks) if fsdp else (ranks, 1), mesh_dim_names=("copies", "parts"))
    for i, block in enumerate(blocks):
        if quantize != "none":
            make_low_bit(block, quantize, device)
        if fsdp or i in away:
            loras = {p for name, p in block.named_parameters() if ".lora_" in name}
            for p in loras:
                p.data = p.data.to(device)
            fully_shard(block, mesh=mesh["parts"], reshard_after_forward=True, ignored_params=loras, offload_policy=(
                CPUOffloadPolicy(pin_memory=device.type == "cuda") if i in away else OffloadPolicy()))
            frozen = [p.to_local().nbytes for p in block.parameters() if p not in loras]
            transformer.bytes_away += sum(frozen) if i in away else 0
        else:
            block.to(device)
    for name, child in transformer.named_children():
        if name != "transformer_blocks":
            child.to(device)
    if away or fsdp: # the root ties the blocks together: they share streams, and know who comes next
        fully_shard(transformer, mesh=mesh["parts"], ignored_params={
            p for p in transformer.parameters() if not isinstance(p, DTensor)})
    return transformer

def check_memory(device, need, host):
    """InputError if a transformer that takes these bytes does not fit, before any are taken. (On a CPU the weights are
    there already, as mappings of their files.)"""
    host *= int(os.environ.get("LOCAL_WORLD_SIZE", 1)) # all processes of this machine
    for where, bytes_needed in ((str(device), need), ("cpu", host)) if device.type == "cuda" else []:
        if bytes_needed > free_bytes(where):
            raise InputError(f"--model: {bytes_needed / 2**30:.1f} GiB for its weights, but {where} has "
                             f"{free_bytes(where) / 2**30:.1f} free; --quantize, --offload or --fsdp take less "
                             "(train.py --plan says how much), and --text_encoder_device cpu leaves room")

def free_bytes(device):
    """What this process could still take on a device."""
    if not device.startswith("cuda"):
        return next(int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if line.startswith("MemAvailable"))
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

def transformer_bytes(transformer, quantize, offload, parts):
    """-> (bytes on the device, bytes of pinned host memory) of what place_transformer places; parts: processes under
    fsdp. torch rounds each pinned tensor up to a power of two."""
    block = transformer.transformer_blocks[0]
    number, each, rest = len(transformer.transformer_blocks), model_bytes(block, quantize), model_bytes(transformer)
    rest -= number * model_bytes(block)
    away = min(offload, number)
    # the block at work; between processes also the next one and the buffer in which that arrives
    gathered = 3 * each if parts > 1 else each if away else 0
    linears = [m for name, m in block.named_modules() if type(m) is torch.nn.Linear and ".lora_" not in name]
    unpacked = max(map(model_bytes, linears)) if quantize != "none" else 0
    rounded = sum(2 ** math.ceil(math.log2(model_bytes(m, quantize) / parts)) for m in linears)
    return rest + (number - away) * each // parts + gathered + unpacked, away * rounded

class LoraLinear(lora.Linear):
    """peft computes an fp32 adapter in fp32 even where the base is bf16: 12 to 16 % of a training step on a CPU. Here
    its weights are cast when they are used, while they, their gradients and the file stay fp32. Plain LoRA only: all
    else is left to peft."""

    def forward(self, x, *args, **kwargs):
        names = [name for name in self.active_adapters if name in self.lora_A]
        if (x.dtype == torch.float32 or self.disable_adapters or self.merged or args or kwargs or self.lora_variant
                or any(self.lora_bias[name] for name in names)):
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x)
        for name in names:
            a, b = self.lora_A[name].weight.to(x.dtype), self.lora_B[name].weight.to(x.dtype)
            result = result + F.linear(F.linear(self.lora_dropout[name](x), a), b) * self.scaling[name]
        return result

def add_lora(transformer, **config):
    """A new LoRA with fp32 weights for training; config: LoraConfig's arguments -> {name: parameter}."""
    config = lora.LoraConfig(**config)
    config._register_custom_module({torch.nn.Linear: LoraLinear})
    transformer.add_adapter(config)
    cast_training_params(transformer, torch.float32)
    weights = {name: p for name, p in transformer.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in weights)
    return weights

def find_lora(path):
    """A LoRA file; the one in this folder, ours or peft's; or user/repo, user/repo/file.safetensors of the hub -> its
    path, which need not exist."""
    path = Path(path)
    if path.is_dir():
        return path / (PEFT_FILE if (path / PEFT_FILE).is_file() and not (path / LORA_FILE).exists() else LORA_FILE)
    if not re.fullmatch(r"[\w-]+/[\w.-]+(/.+\.safetensors)?", str(path)) or Path(path.parts[0]).exists():
        return path
    from huggingface_hub import hf_hub_download, list_repo_files
    repo, name = "/".join(path.parts[:2]), "/".join(path.parts[2:])
    try:
        names = [name] if name else [n for n in list_repo_files(repo) if n.endswith(".safetensors")]
        names = [n for n in names if n in (LORA_FILE, PEFT_FILE)][:1] or names
        if len(names) == 1:
            path = Path(hf_hub_download(repo, names[0]))
            if path.name == PEFT_FILE:
                hf_hub_download(repo, str(Path(names[0]).with_name(PEFT_CONFIG)))
    except Exception as e: # a dozen kinds, as in find_model
        raise InputError(f"{path}: neither a file or folder nor to be had from the hub ({type(e).__name__}); check the "
                         "name, or log in with `hf auth login`") from None
    if len(names) != 1:
        raise InputError(f"{path}: {len(names)} .safetensors files ({', '.join(names[:9])}); add the name of one")
    return path

def lora_digest(path):
    """sha256 of all that decides what a LoRA does."""
    files = [find_lora(path), find_lora(path).with_name(PEFT_CONFIG)]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.is_file())).hexdigest()

def read_lora(path):
    """LoRA file, or what find_lora takes -> (state dict with transformer. keys, metadata). Keys of ComfyUI and kohya
    files are converted by diffusers, which also works their alpha in. InputError if it is no LoRA, has A without B, or
    holds NaN."""
    file = find_lora(path)
    if not file.is_file() or file.suffix != ".safetensors":
        raise InputError(f"{file}: no LoRA; want a .safetensors file, a folder with {LORA_FILE} or {PEFT_FILE}, or "
                         "user/repo of the hub")
    try:
        with safetensors.safe_open(file, "pt") as f:
            notes = f.metadata() or {}
            kind = "lora_adapter_metadata" if "lora_adapter_metadata" in notes else "train" # the latter: save_comfyui
            meta = json.loads(notes.get(kind, "{}"))
            raw = {k: f.get_tensor(k) for k in f.keys()}
        if not isinstance(meta, dict):
            raise ValueError("metadata is no dictionary")
        if "digest" in meta: # one of ours
            raw, meta = read_tensors(file, kind)
        if any("dora_scale" in k for k in raw): # diffusers would leave it out
            raise ValueError("DoRA in the form of kohya and ComfyUI")
        if file.with_name(PEFT_CONFIG).is_file() and all(k.startswith("base_model.model.") for k in raw):
            raw = {k.replace("base_model.model.", "transformer.", 1): v for k, v in raw.items()}
            meta = {f"transformer.{k}": v for k, v in json.loads(file.with_name(PEFT_CONFIG).read_text()).items()
                    if k in SHAPE}
            meta["transformer.target_modules"] = sorted({k[12:].rsplit(".lora_", 1)[0] for k in raw})
        elif any(k.startswith("transformer_blocks.") for k in raw): # no prefix: as ComfyUI takes it
            raw = {f"diffusion_model.{k}": v for k, v in raw.items()}
        state = QwenImageEditPlusPipeline.lora_state_dict(raw)
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as e:
        raise InputError(f"{file}: cannot be read as a LoRA ({str(e).splitlines()[0]}); take another file") from None
    if not all(k.startswith("transformer.") and ".lora_" in k for k in state) or not state:
        other = next((k for k in state if not k.startswith("transformer.") or ".lora_" not in k), "nothing")
        raise InputError(f"{file}: no LoRA of Qwen-Image: it holds {other}; want transformer.*.lora_A.weight (peft's: "
                         f"with its {PEFT_CONFIG} beside it)")
    a, b = [{k.rsplit(".lora_", 1)[0]: v for k, v in state.items() if f".lora_{x}." in k} for x in "AB"]
    targets = meta.get("transformer.target_modules")
    missing = [] if not isinstance(targets, list) else [t for t in targets if not any(k.endswith("." + t) for k in a)]
    if a.keys() != b.keys() or missing:
        raise InputError(f"{file}: lora_A or lora_B of {[*(a.keys() ^ b.keys()), *missing][0]} is missing; the file is "
                         "incomplete")
    odd = [k for k in a if a[k].ndim != 2 or b[k].ndim != 2 or a[k].shape[0] != b[k].shape[1]]
    if odd:
        raise InputError(f"{file}: shapes {tuple(a[odd[0]].shape)} and {tuple(b[odd[0]].shape)} of {odd[0]} do not go "
                         "together; the file is broken")
    bad = [k for k, v in state.items() if not v.isfinite().all()]
    if bad:
        raise InputError(f"{file}: NaN or Inf in {bad[0]}; the training diverged, take an earlier checkpoint")
    return state, meta

SHAPE = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora") # of LoraConfig's arguments

def lora_config(path):
    """-> LoraConfig's arguments for a LoRA that load_weights can fill with this one: layers, ranks, scales."""
    state, meta = read_lora(path)
    state = {k.removeprefix("transformer."): v for k, v in state.items()}
    found = get_peft_kwargs({f"^{k}": v.shape[1] for k, v in state.items() if ".lora_B." in k}, None, state)
    return {**{k: found[k] for k in found if k != "lora_bias"},
            **{k: meta[f"transformer.{k}"] for k in SHAPE if f"transformer.{k}" in meta}}

def check_fit(transformer, path, state):
    """InputError with counts if keys fit nothing or in part; diffusers itself only warns, or says nothing."""
    modules = dict(transformer.named_modules())
    layers = {k.removeprefix("transformer.").rsplit(".lora_", 1)[0] for k in state}
    missing = sorted(layers - modules.keys())
    if missing:
        raise InputError(f"{path}: {len(missing)} of {len(layers)} layers are not in this model, for instance "
                         f"{missing[0]}; it was made for another one")
    misfit = []
    for key, value in state.items():
        layer, kind = key.removeprefix("transformer.").rsplit(".lora_", 1)
        side, axis = ("in_features", 1) if kind == "A.weight" else ("out_features", 0)
        want = getattr(modules[layer], side, None)
        if want != value.shape[axis]:
            misfit.append(f"{layer} (got {tuple(value.shape)}, the model has {want})")
    if misfit:
        raise InputError(f"{path}: {len(misfit)} of {len(state)} matrices do not fit, for instance {misfit[0]}; it was "
                         "made for another model")

def load_lora(transformer, path, scale=1.0, name="default"):
    """Adds a LoRA to the transformer, as the only one that is active -> its metadata."""
    state, meta = read_lora(path)
    check_fit(transformer, path, state)
    config = {k: v for k, v in meta.items() if k.startswith("transformer.")}
    try:
        QwenImageEditPlusPipeline.load_lora_into_transformer(state, transformer, adapter_name=name,
                                                             metadata=config or None)
    except (TypeError, ValueError, KeyError, RuntimeError) as e:
        raise InputError(f"{path}: diffusers cannot load it ({str(e).splitlines()[0]}); take another file") from None
    transformer.set_adapters([name], [scale])
    return meta

def load_loras(transformer, paths, scales):
    """All these LoRAs at once, each at its scale."""
    names = [f"lora{i}" for i in range(len(paths))]
    for name, path in zip(names, paths):
        load_lora(transformer, path, name=name)
    if names:
        transformer.set_adapters(names, list(scales))

def load_weights(transformer, path, state=None):
    """Fills the adapter "default" with a LoRA file, or with these tensors of one, bit for bit."""
    if state is None:
        state, _ = read_lora(path)
        check_fit(transformer, path, state)
    found = set_peft_model_state_dict(transformer, {k.removeprefix("transformer."): v for k, v in state.items()})
    assert not found.unexpected_keys and not [k for k in found.missing_keys if ".default" in k], found

def save_lora(path, transformer, train):
    """The adapter "default" as diffusers' file: its key names, rank and alpha in its metadata. train: a dictionary of
    our own entries there."""
    state = {f"transformer.{k}": v for k, v in get_peft_model_state_dict(transformer).items()}
    meta = {f"transformer.{k}": sorted(v) if isinstance(v, set) else v
            for k, v in transformer.peft_config["default"].to_dict().items()}
    # the layers that have one, by their full names: peft warns when names are more, or exclude_modules finds nothing
    layers = sorted({k.rsplit(".lora_", 1)[0].removeprefix("transformer.") for k in state})
    meta.update({"transformer.target_modules": layers, "transformer.exclude_modules": None})
    write_tensors(path, state, meta | {f"train.{k}": v for k, v in train.items()}, meta_key="lora_adapter_metadata")

def save_comfyui(path, transformer, train):
    """The same for ComfyUI, whose scale is alpha / rank in every layer: alpha is what makes that the true one, with
    rsLoRA too. The metadata has another key, as diffusers would apply rank and alpha from there once more."""
    state = {}
    for key, value in get_peft_model_state_dict(transformer).items():
        state[f"diffusion_model.{key}"] = value
        if key.endswith(".lora_A.weight"):
            layer = key.removesuffix(".lora_A.weight")
            alpha = transformer.get_submodule(layer).scaling["default"] * len(value)
            state[f"diffusion_model.{layer}.alpha"] = torch.tensor(alpha)
    write_tensors(path, state, {f"train.{k}": v for k, v in train.items()}, meta_key="train")

def save_merged(transformer, folder, out):
    """A complete model folder: the active LoRAs added to the transformer's weights, the other parts of `folder` as hard
    links, or copies where the disk is another. `out` appears whole."""
    def link(source, target):
        try:
            os.link(os.path.realpath(source), target) # the hub's cache holds links
        except OSError:
            shutil.copy2(source, target)
    tmp = out.with_name(f".tmp-{os.getpid()}-{out.name}")
    try:
        tmp.mkdir(parents=True)
        link(folder / "model_index.json", tmp / "model_index.json")
        for part in ENCODER_PARTS:
            shutil.copytree(folder / part, tmp / part, copy_function=link)
        transformer.fuse_lora()
        transformer.unload_lora()
        transformer.save_pretrained(tmp / "transformer")
        os.replace(tmp, out)
    except (OSError, SafetensorError) as e:
        raise InputError(f"--merge_lora {out}: cannot be written ({e}); free some space, or mend its path") from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)

# ---- sampling: what the stock pipeline computes ----------------------------------------------------------------------

def plan_job(pipe, job):
    """Fills in what can be known before any model runs: sizes, shapes and token counts (which decide the packs). As in
    stock, the last picture gives the target's aspect, and sides are rounded down to 16. (size_from: another one does,
    counted from 1; a dataset's job has a target of its own, a path, whose size counts.)"""
    sizes = [image_size(path) for path in job.image]
    if not sizes:
        raise InputError(f"{job.out}: a picture without a control; predict.py edits pictures, so leave it out")
    if not is_plus(pipe) and len(sizes) > 1:
        raise InputError(f"{job.image[1]}: Qwen-Image-Edit v1 takes one picture; leave it out")
    if job.sigmas:
        wrong = [s for s, t in zip(job.sigmas, [*job.sigmas[1:], 0]) if not 1 >= s > t]
        if wrong:
            raise InputError(f"{job.image[0]}: sigma {wrong[0]} is not from 1 to 0, or not above the next; give the "
                             "noise level of each step, falling")
        job.num_inference_steps = len(job.sigmas)
    if job.shift is not None and not job.shift > 0:
        raise InputError(f"{job.image[0]}: shift {job.shift}; give a number above 0, 3 for Lightning LoRAs")
    if job.num_inference_steps < 1 + bool(pipe.scheduler.config.shift_terminal and not job.shift):
        raise InputError(f"{job.image[0]}: {job.num_inference_steps} steps; at least 2 are needed, as the schedule is "
                         "stretched between its first and its last (--shift: not stretched)")
    if isinstance(job.size_from, int) and not 1 <= job.size_from <= len(job.image):
        raise InputError(f"{job.image[0]}: size_from {job.size_from} of {len(job.image)} pictures; count from 1")
    shape = job.image[job.size_from - 1] if isinstance(job.size_from, int) else job.size_from or job.image[-1]
    width, height = fit_size(image_size(shape), job.target_pixels, job.upscale)
    job.width, job.height = (job.width or width) // 16 * 16, (job.height or height) // 16 * 16
    if min(job.width, job.height) < 32:
        raise InputError(f"{job.image[0]}: width {job.width}, height {job.height}; give at least 32 each")
    for prompt in (job.prompt, job.negative_prompt):
        check_prompt(job.image[0], prompt)
    job.control_sizes = [fit_size(s, job.control_pixels, job.upscale) for s in sizes]
    job.prompt_sizes = [prompt_size(pipe, s, job.control_pixels, job.upscale) for s in sizes]
    job.img_shapes = [(1, h // 16, w // 16) for w, h in [(job.width, job.height), *job.control_sizes]]
    job.prompts = [job.prompt] + ([job.negative_prompt] if job.true_cfg_scale > 1 else [])
    img_len = sum(h * w for _, h, w in job.img_shapes)
    job.tokens = sum(img_len + prompt_length(pipe, p, job.prompt_sizes) for p in job.prompts)

def encode_job(pipe, job, device, twin=None):
    """Noise, control latents and prompt embeddings, on the transformer's device. twin: a job that differs in its seed
    or LoRA only, and has been encoded."""
    if twin:
        job.control_latent, job.prompt_embeds = twin.control_latent, twin.prompt_embeds
    else:
        images = [read_image(path) for path in job.image]
        latents = [encode_image(pipe, im, s) for im, s in zip(images, job.control_sizes)]
        job.control_latent = torch.cat(latents).to(device)
        job.prompt_embeds = [encode_prompt(pipe, p, images, job.prompt_sizes).to(device) for p in job.prompts]
    shape = 1, 1, pipe.vae.config.z_dim, job.height // 8, job.width // 8
    noise = randn_tensor(shape, torch.Generator().manual_seed(job.seed), device, job.prompt_embeds[0].dtype)
    job.noise = pipe._pack_latents(noise, 1, *shape[2:])[0]

def set_schedule(job, config):
    """The job's own timesteps: their shift depends on the target's number of tokens, unless job.shift fixes it as
    Qwen-Image-Lightning does: the same for every size, and not stretched."""
    if job.shift:
        config = {**config, "base_shift": math.log(job.shift), "max_shift": math.log(job.shift), "shift_terminal": None}
    mu = calculate_shift(len(job.noise), config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096),
                         config.get("base_shift", 0.5), config.get("max_shift", 1.15))
    job.scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    sigmas = job.sigmas or np.linspace(1.0, 1 / job.num_inference_steps, job.num_inference_steps)
    job.timesteps, _ = retrieve_timesteps(job.scheduler, device=job.noise.device, sigmas=sigmas, mu=mu)
    job.scheduler.set_begin_index(0)

@torch.no_grad()
def denoise(transformer, scheduler_config, jobs, max_tokens, bar=None):
    """Euler steps from job.noise to job.latents, (I_0, 64), for all jobs at once; each forward pass takes at most
    max_tokens tokens. Jobs may differ in everything, the number of steps too. bar: a tqdm, one per job and step."""
    for j in jobs:
        set_schedule(j, scheduler_config)
        j.latents = j.noise
    for i in range(max(len(j.timesteps) for j in jobs)):
        active = [j for j in jobs if i < len(j.timesteps)]
        runs = [(j, embeds) for j in active for embeds in j.prompt_embeds]
        preds = [None] * len(runs)
        for pack in plan_packs([len(j.latents) + len(j.control_latent) + len(e) for j, e in runs], max_tokens):
            t = torch.stack([runs[r][0].timesteps[i].to(runs[r][0].latents.dtype) / 1000 for r in pack])
            outs = run_packed(transformer, [torch.cat([runs[r][0].latents, runs[r][0].control_latent]) for r in pack],
                              [runs[r][1] for r in pack], t, [runs[r][0].img_shapes for r in pack])
            for r, out in zip(pack, outs):
                preds[r] = out[:len(runs[r][0].latents)]
        preds = iter(preds)
        for j in active:
            pred = next(preds)
            if len(j.prompt_embeds) > 1: # true CFG, rescaled to the conditional run's norm per token
                uncond = next(preds)
                both = uncond + j.true_cfg_scale * (pred - uncond)
                pred = both * (pred.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True))
            j.latents = j.scheduler.step(pred[None], j.timesteps[i], j.latents[None], return_dict=False)[0][0]
        if bar is not None:
            bar.update(len(active))

@torch.no_grad()
def decode(pipe, latents, height, width):
    """Packed latents (I_0, 64) -> PIL image."""
    z = pipe._unpack_latents(latents[None], height, width, pipe.vae_scale_factor).to(pipe.vae.device, pipe.vae.dtype)
    config = pipe.vae.config
    mean, std = [torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std)]
    z = z / (1.0 / std).to(z) + mean.to(z) # in this order, for the stock pipeline's bits
    return pipe.image_processor.postprocess(pipe.vae.decode(z, return_dict=False)[0][:, :, 0])[0]

# ---- looking at results ----------------------------------------------------------------------------------------------

def psnr(image, reference):
    """dB between two pictures of one size; equal ones have 99."""
    error = np.mean((np.asarray(image, float) - np.asarray(reference, float)) ** 2)
    return float(10 * np.log10(255**2 / max(error, 255**2 / 10**9.9)))

def drift(image, reference, keep):
    """What an edit did where nothing should change -> dict of psnr (dB), colour (levels of 255) and, where there is
    anything to see, motion: shift (pixels), zoom (%). keep: bool (H, W). Least squares of image - reference on the
    reference's gradients (Lucas and Kanade 1981): unlike phase correlation it can leave pixels out, and it leaves out 4
    more around the edit, whose soft edge would pass for a zoom. Motions of over a pixel are underestimated."""
    a, b = np.asarray(image, float), np.asarray(reference, float)
    h, w = keep.shape
    inner = np.asarray(Image.fromarray(keep).convert("L").filter(ImageFilter.MinFilter(9))) > 0
    dy, dx = np.gradient(b.mean(-1))
    y, x = np.mgrid[:h, :w] - np.array([(h - 1) / 2, (w - 1) / 2])[:, None, None]
    found = dict(psnr=psnr(a[keep], b[keep]), colour=float(np.abs((a - b)[keep].mean(0)).max()))
    if np.hypot(dx, dy)[inner].sum() > 1000: # else nothing is left whose motion could be seen
        # a(x) = b(x - shift - zoom * x) + colour
        shift, zoom = np.stack([-dx, -dy, np.ones((h, w))], -1)[inner], -(dx * x + dy * y)[inner]
        own = zoom - shift @ np.linalg.lstsq(shift, zoom, rcond=None)[0]
        both = own @ own > 0.25 * zoom @ zoom # one shape far from the middle: its zoom would look like a shift
        columns = np.column_stack([shift, zoom]) if both else shift
        moved = np.linalg.lstsq(columns, (a - b).mean(-1)[inner], rcond=None)[0]
        found.update(shift=float(np.hypot(*moved[:2])), **(dict(zoom=float(100 * abs(moved[3]))) if both else {}))
    return found

def contact_sheet(rows, titles, cell=192):
    """Rows of pictures (text stands for itself, None stays empty) under titles -> one PIL image to look at."""
    sheet = Image.new("RGB", (len(titles) * (cell + 8), len(rows) * (cell + 8) + 24), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for i, title in enumerate(titles):
        pen.text((i * (cell + 8) + cell // 2, 4), title, "black", font, anchor="ma")
    for j, row in enumerate(rows):
        for i, entry in enumerate(row):
            x, y = i * (cell + 8) + 4, j * (cell + 8) + 28
            if isinstance(entry, str):
                pen.multiline_text((x + cell // 2, y + cell // 2), textwrap.fill(entry, cell // 8), "black", font, "mm",
                                   align="center")
            elif entry is not None:
                entry = ImageOps.contain(entry, (cell, cell), Image.Resampling.LANCZOS)
                sheet.paste(entry, (x + (cell - entry.width) // 2, y + (cell - entry.height) // 2))
    return sheet

def sheet_row(job):
    """The first columns of a job's row: control pictures, side by side, and instruction."""
    controls = [ImageOps.contain(read_image(p), (192, 192)) for p in job.image]
    beside = Image.new("RGB", (sum(c.width for c in controls), max(c.height for c in controls)), "white")
    for i, c in enumerate(controls):
        beside.paste(c, (sum(c.width for c in controls[:i]), 0))
    return [beside, job.prompt]

def save_png(image, path, settings="", made_with=None):
    """settings: a hash, for `finished`; made_with: the same in words, for a person and --again."""
    png, notes = io.BytesIO(), PngImagePlugin.PngInfo()
    notes.add_text("settings", settings)
    if made_with:
        notes.add_text("made_with", json.dumps(made_with))
    image.save(png, format="PNG", pnginfo=notes)
    write_file(path, png.getvalue())

def finished(path, settings):
    """The picture that an earlier call has saved here with the same settings, or None."""
    try:
        with Image.open(path) as image:
            image.load()
            return image if image.info.get("settings") == settings else None
    except (OSError, ValueError, SyntaxError): # none, or a broken one: it is drawn again
        return None

# ---- jobs ------------------------------------------------------------------------------------------------------------

SAMPLING = dict(negative_prompt=" ", num_inference_steps=20, true_cfg_scale=4.0, height=None, width=None,
                size_from=None, sigmas=None, shift=None)
GEOMETRY = dict(target_pixels=1024 * 1024, control_pixels=1024 * 1024, upscale=True)
TINY_SAMPLING = dict(true_cfg_scale=1.0) # tiny was not trained to go without a prompt
JOB_KEYS = dict(prompt=str, negative_prompt=str, out=str, height=int, width=int, seed=int, num_inference_steps=int,
                true_cfg_scale=(int, float), size_from=int, sigmas=list, shift=(int, float))
REPEAT = ("model", "dtype", "quantize", "quantize_text_encoder", "image", "prompt", "lora", "lora_scale", "seed",
          *GEOMETRY, *SAMPLING) # the flags that --again takes from a picture

def read_jobs(path, defaults):
    """jobs.jsonl, or a dataset folder (its controls and captions) -> (jobs, problems)."""
    if Path(path).is_dir():
        items, problems = read_dataset(path)
        own = lambda i: dict(image=i["controls"], prompt=i["prompts"][0], name=i["name"], size_from=i["target"],
                             out=i["name"].replace("/", "-") + ".png")
        return [SimpleNamespace(**{**defaults, **own(i)}) for i in items], problems
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; give jobs.jsonl or a dataset folder")
    jobs, problems = [], []
    lines = read_text(Path(path)).split("\n") # not splitlines, which takes U+2028 in a prompt for the end of a line
    for n, line in [(n, line) for n, line in enumerate(lines, 1) if line.strip()]:
        try:
            row = json.loads(line)
            images = [row["image"]] if isinstance(row["image"], str) else row["image"]
            wrong = [k for k, v in row.items() if k != "image" and not isinstance(v, JOB_KEYS.get(k, ()))]
            if wrong or "prompt" not in row:
                raise ValueError(f"field {(wrong or ['prompt'])[0]!r} is unknown, missing or of a wrong type")
            row = dict(out=f"{n:03d}-{Path(images[0]).stem}.png") | row | dict(
                image=[Path(path).parent / i for i in images])
            out = Path(row["out"])
            if out.suffix.lower() != ".png" or out.is_absolute() or ".." in out.parts:
                raise ValueError(f"'out' is {row['out']!r}, no PNG below --out_dir")
            if "sigmas" in row and "num_inference_steps" in row:
                raise ValueError("both sigmas and num_inference_steps")
            if "sigmas" in row:
                row["sigmas"] = [float(s) for s in row["sigmas"]]
            if "num_inference_steps" in row:
                row["sigmas"] = None # not those of --sigmas
            jobs.append(SimpleNamespace(**defaults | row))
        except (ValueError, KeyError, TypeError, IndexError) as e:
            problems.append(f'error: {path}:{n}: {e}; want {{"image": ["a.png"], "prompt": "..."}}')
    return jobs, problems

def read_folder(folder, defaults):
    """A job for every picture below this folder, under its own name."""
    found = find_files(folder, SUFFIXES + OTHER_SUFFIXES)
    if not found:
        raise InputError(f"--image {folder}: no picture in it; give a folder of {', '.join(SUFFIXES)}")
    name = lambda stem, path, paths: (stem if len(paths) == 1 else path.relative_to(folder).as_posix()) + ".png"
    return [SimpleNamespace(**{**defaults, "image": [path], "out": name(stem, path, paths)})
            for stem, paths in found.items() for path in paths]

def read_made_with(path):
    """The flags that --again repeats, from a picture of ours."""
    try:
        with open_image(path) as image:
            flags = json.loads(image.info["made_with"])
            return {k: flags[k] for k in REPEAT} | dict(settings=image.info["settings"])
    except (KeyError, ValueError, TypeError):
        raise InputError(f"--again {path}: no settings in it; give a PNG that predict.py has written") from None

# ---- command line: flags; what is to be drawn; drawing ---------------------------------------------------------------

def read_flags():
    """-> args; what contradicts itself ends the script here. args.many: several pictures, of which those that are in
    args.out_dir with the same settings stay; args.settings: those of --again's picture."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, conflict_handler="resolve") # for --seed
    add_model_flags(parser)
    parser.add_argument("--seed", type=int, nargs="+", default=[0],
                        help="of the noise; several: each job once per seed")
    # what to draw
    parser.add_argument("--image", nargs="+", type=Path, help="control picture(s), or one folder: each of its pictures")
    parser.add_argument("--prompt", help="the instruction")
    parser.add_argument("--negative_prompt", help="what the unconditional run is told (default: one blank)")
    parser.add_argument("--jobs", help="jobs.jsonl, or a dataset folder: many pictures in one batch")
    parser.add_argument("--again", metavar="PNG", help="a picture from here: its settings, unless a flag differs")
    parser.add_argument("--out", default="out.png", help="PNG of --image")
    parser.add_argument("--out_dir", default="out/predict", help="folder for many PNGs: of --jobs, or a folder's")
    parser.add_argument("--compare", action="store_true",
                        help="each picture also without the LoRA, from the same noise: NAME-base.png")
    # how
    parser.add_argument("--num_inference_steps", type=number(int, 1),
                        help="Euler steps: at least 2; with --shift 1 will do")
    parser.add_argument("--sigmas", type=number(float, 1e-6, 1), nargs="+",
                        help="noise level of each step, before the shift: falling, from 1 (default: evenly spaced)")
    parser.add_argument("--shift", type=number(float, 1e-6),
                        help="one shift for all sizes, and no stretching: 3 for Qwen-Image-Lightning (default: the "
                             "model's own, by size)")
    parser.add_argument("--true_cfg_scale", type=float, help="at 1 or below no unconditional run, half the time")
    parser.add_argument("--height", type=number(int, 32),
                        help="pixels, rounded down to 16 (default: from --size_from's aspect)")
    parser.add_argument("--width", type=number(int, 32), help="pixels, likewise")
    parser.add_argument("--size_from", type=number(int, 1), metavar="N",
                        help="which picture gives the result its shape, from 1 (default: the last, as in stock)")
    parser.add_argument("--target_pixels", type=pixels, metavar="AREA",
                        help="area of the result, or native (default: as the LoRA was trained, else 1024*1024)")
    parser.add_argument("--control_pixels", type=pixels, metavar="AREA", help="likewise, of the pictures given")
    parser.add_argument("--upscale", action=argparse.BooleanOptionalAction, default=None,
                        help="enlarge smaller pictures to the area (default: as the LoRA was trained, else yes)")
    parser.add_argument("--lora", nargs="+", help="LoRA file(s), run folders or user/repo[/file] of the hub, all "
                        "active together (default: none; with --model tiny the newest run's)")
    parser.add_argument("--lora_scale", type=number(float, -10, 10), nargs="+", default=[1.0],
                        help="strength of the LoRA, or of each: 0 is none, 1 as trained")
    parser.add_argument("--merge_lora", type=Path, metavar="DIR",
                        help="write a model folder with the LoRA(s) in its weights, in --dtype, and draw nothing")
    parser.add_argument("--max_tokens", type=number(int, 1), default=20_000,
                        help="tokens per forward pass; lower it if memory runs out")
    add_memory_flags(parser)
    add_quantize_flag(parser, "--quantize_text_encoder", "the text encoder's linear layers, 16 GB in bf16")
    for part in ("vae", "text_encoder", "transformer"):
        parser.add_argument(f"--{part}_device", help="default: --device")
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--again", type=read_made_with, default={})
    again = early.parse_known_args()[0].again
    parser.set_defaults(**SAMPLING | dict(settings=None) | again)
    given = {a.split("=")[0] for a in sys.argv[1:]}
    runs = sorted(Path("out").glob(f"tiny-*/{LORA_FILE}"), key=lambda p: p.stat().st_mtime)
    toy = None if given & {"--image", "--jobs", "--merge_lora", "--again"} else Path(TINY["data"][0]).with_name("val")
    args = parse_args(parser, TINY_SAMPLING | dict(
        target_pixels="native", control_pixels="native", upscale=True, lora=[str(runs[-1])] if runs else None,
        jobs=toy and str(toy)) | again)

    args.image = [Path(path) for path in args.image or []]
    args.lora = [path for path in args.lora or [] if path]
    if len(args.lora_scale) not in (1, len(args.lora)):
        parser.error(f"argument --lora_scale: {len(args.lora_scale)} for {len(args.lora)} LoRAs; give one, or one each")
    if len(args.lora_scale) == 1:
        args.lora_scale *= len(args.lora)
    if len(set(args.seed)) < len(args.seed):
        parser.error("argument --seed: one stands there twice; give each once")
    if (args.compare or args.merge_lora) and not args.lora:
        parser.error(f"argument --{'compare' if args.compare else 'merge_lora'}: no LoRA; give --lora")
    if {"--sigmas", "--num_inference_steps"} <= given:
        parser.error("argument --sigmas: has a value for each step; leave out --num_inference_steps")
    if args.merge_lora and (args.quantize != "none" or args.offload or int(os.environ.get("WORLD_SIZE", 1)) > 1):
        parser.error("argument --merge_lora: wants one process, and no --quantize or --offload; leave them out")
    if args.merge_lora and (args.image or args.jobs):
        parser.error("argument --merge_lora: draws nothing; leave out --image and --jobs, then give --model DIR")
    if not args.merge_lora and (bool(args.image) == bool(args.jobs) or bool(args.image) != (args.prompt is not None)):
        parser.error("argument --image: give --image with --prompt, or --jobs")
    if args.merge_lora and args.merge_lora.exists() and (args.merge_lora.is_file() or any(args.merge_lora.iterdir())):
        raise InputError(f"--merge_lora {args.merge_lora}: is not empty; give another folder")
    if args.image and (Path(args.out).suffix.lower() != ".png" or Path(args.out).resolve() in [
            path.resolve() for path in args.image]):
        parser.error(f"argument --out: {args.out} is no PNG, or one of the pictures given; give another name")
    folder_of_images = len(args.image) == 1 and args.image[0].is_dir()
    args.many = bool(args.jobs) or folder_of_images
    args.out_dir = Path(args.out_dir if args.many else "")
    if folder_of_images and args.image[0].resolve() in (args.out_dir.resolve(), *args.out_dir.resolve().parents):
        raise InputError(f"--out_dir {args.out_dir}: lies in the folder of --image; give another one")
    return args

def follow_loras(args):
    """Finds the LoRAs, and draws at the sizes at which they were trained, where no flag says otherwise."""
    args.lora = [str(find_lora(path)) for path in args.lora]
    trained = [t for t in (read_lora(path)[1].get("train.geometry") for path in args.lora) if t]
    if any(t != trained[0] for t in trained):
        print(f"warning: the LoRAs were trained at different sizes ({'; '.join(map(str, trained))}); the first counts")
    sizes = GEOMETRY | (trained[0] if trained else {})
    for name in GEOMETRY:
        if getattr(args, name) is None:
            setattr(args, name, sizes[name])

def merge(args):
    """--merge_lora."""
    folder = find_model(args.model, [*ENCODER_PARTS, "transformer"])
    transformer = load_transformer(folder, args.dtype).to(args.transformer_device)
    load_loras(transformer, args.lora, args.lora_scale)
    if len(args.lora) > 1 and any("lora_magnitude" in name for name, _ in transformer.named_parameters()):
        raise InputError("--merge_lora: a DoRA is scaled by the base's own weights, which another LoRA would change; "
                         "merge one at a time")
    save_merged(transformer, folder, args.merge_lora)
    print(f"{args.merge_lora}: {args.model} with {' + '.join(args.lora)}. as trained: --model {args.merge_lora} "
          f"--target_pixels {args.target_pixels} --control_pixels {args.control_pixels}"
          + ("" if args.upscale else " --no-upscale"))

def read_scenes(args):
    """-> (jobs, problems), one for each line, sample or picture that is to be edited."""
    defaults = {k: getattr(args, k) for k in ("image", "prompt", "out", *GEOMETRY, *SAMPLING)} | dict(seed=None)
    if args.jobs:
        return read_jobs(args.jobs, defaults)
    if args.many:
        return read_folder(args.image[0], defaults), []
    return [SimpleNamespace(**defaults)], []

def sheet_columns(args):
    """-> [(seed, whether with the LoRA, title, end of the files' names)]: what is drawn of each scene."""
    columns = []
    for seed in args.seed:
        for on in (False, True) if args.compare else (bool(args.lora),):
            words = [f"seed {seed}"] if len(args.seed) > 1 else []
            words += ["LoRA" if on else "base"] if args.compare else []
            end = (f"-s{seed}" if len(args.seed) > 1 else "") + ("-base" if args.compare and not on else "")
            columns.append((seed, on, " ".join(words) or "result", end))
    return columns

def plan_pictures(args, folder, pipe):
    """-> (jobs, problems): one job for each scene and column, with its file and `settings`, a hash of all that decides
    the picture."""
    scenes, problems = read_scenes(args)
    columns, jobs, outs = sheet_columns(args), [], set()
    # the scripts too, for they are made to be edited
    common = dict(model=[fingerprint(folder / part) for part in (*ENCODER_PARTS, "transformer")], dtype=args.dtype,
                  quantize=[args.quantize, args.quantize_text_encoder],
                  scripts=[file_hash(Path(__file__).with_name(f)) for f in
                           ("predict.py", "cache.py", "rope_patch.py")])
    loras = [[lora_digest(path), scale] for path, scale in zip(args.lora, args.lora_scale)]
    for row, scene in enumerate(scenes):
        try:
            if scene.seed is not None and len(args.seed) > 1:
                raise InputError(f"{args.jobs}: {scene.out} has its own seed, and --seed gives more; leave one out")
            plan_job(pipe, scene)
            decides = {k: v for k, v in vars(scene).items() if k not in ("image", "size_from", "out", "name", "seed")}
            cells = sheet_row(scene) if len(jobs) < 24 * len(columns) else None # now, for pictures may vanish
            pictures = [file_hash(path) for path in scene.image]
            for seed, on, title, end in columns:
                job = copy.copy(scene)
                job.row, job.cells, job.title, job.pictures = row, cells, title, pictures
                job.seed = seed if scene.seed is None else scene.seed
                job.loras = loras if on else []
                job.out = str(Path(scene.out).with_stem(Path(scene.out).stem + end))
                if job.out in outs:
                    raise InputError(f"{args.jobs or args.image[0]}: two jobs write {job.out}; give each its own 'out'")
                outs.add(job.out)
                job.path = args.out_dir / job.out
                job.settings = content_key(**common, **decides, seed=job.seed, lora=job.loras, pictures=pictures)
                jobs.append(job)
        except InputError as e:
            problems.append(str(e))
    return jobs, problems

@contextlib.contextmanager
def going_on(problems):
    """A job that fails (a broken picture, a full disk) stops no others."""
    try:
        yield
    except InputError as e:
        problems.append(str(e))
        tqdm.write(str(e), file=sys.stderr)

def draw(args, folder, pipe, jobs, problems, quiet):
    """Loads the models, draws these jobs, many at once, and saves each picture when it is done."""
    load_encoders(pipe, folder, args.dtype, args.vae_device, args.text_encoder_device, args.quantize_text_encoder)
    pipe.vae.to(args.vae_device)
    transformer = load_transformer(folder, args.dtype)
    load_loras(transformer, args.lora, args.lora_scale)
    for path, scale in zip(args.lora, args.lora_scale) if not quiet else []:
        print(f"LoRA {path} at scale {scale}")
    place_transformer(transformer, args.transformer_device, args.quantize, args.offload)
    bar = tqdm(total=sum(j.num_inference_steps for j in jobs), desc=f"{len(jobs)} pictures", unit="step",
               disable=quiet or None)
    for pack in plan_packs([j.tokens for j in jobs], args.max_tokens * (1 + args.compare)):
        batch, encoded = [], {}
        for job in [jobs[i] for i in pack]:
            with going_on(problems):
                encode_job(pipe, job, args.transformer_device, encoded.get(job.row))
                encoded[job.row] = job
                batch.append(job)
        for on in (False, True): # with and without the LoRA cannot share a forward pass
            some = [job for job in batch if bool(job.loras) == on]
            if some and args.compare:
                (transformer.enable_adapters if on else transformer.disable_adapters)()
            if some:
                denoise(transformer, pipe.scheduler.config, some, args.max_tokens, bar)
        for job in batch:
            image = decode(pipe, job.latents, job.height, job.width)
            job.latents = job.control_latent = job.prompt_embeds = None # a thousand jobs' would fill the memory
            with going_on(problems):
                save_png(image, job.path, job.settings, made_with(args, job))
                tqdm.write(f"{job.path}: {job.width}x{job.height} | {job.prompt}")
    bar.close()

def made_with(args, job):
    """The flags that --again takes from a picture, and what a person may want to know."""
    flags = {k: v for k, v in (vars(args) | vars(job)).items() if k in REPEAT}
    absolute = lambda paths: [str(Path(path).resolve()) for path in paths]
    return flags | dict(
        model=absolute([args.model])[0] if Path(args.model).is_dir() else args.model, image=absolute(job.image),
        size_from=None, seed=[job.seed], lora=absolute(args.lora) if job.loras else None, lora_sha256=job.loras,
        lora_scale=args.lora_scale if job.loras else [1.0], pictures=job.pictures,
        versions={m.__name__: m.__version__ for m in (torch, diffusers, transformers, peft)})

def write_sheet(path, jobs):
    """The first rows of all pictures, those of earlier calls too, where there are several."""
    titles, rows, count = list(dict.fromkeys(job.title for job in jobs)), {}, 0
    for job in jobs:
        if job.cells and (image := finished(job.path, job.settings)):
            row = rows.setdefault(job.row, [*job.cells, *[None] * len(titles)])
            row[2 + titles.index(job.title)] = ImageOps.contain(image, (192, 192), Image.Resampling.LANCZOS)
            count += 1
    if count > 1:
        save_png(contact_sheet([*rows.values()], ["control", "instruction", *titles]), path)
        print(f"{path}: {count} of them side by side")

def main():
    args = read_flags()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if args.device.startswith("cuda") else "gloo",
                                timeout=timedelta(days=7))
    follow_loras(args)
    if args.merge_lora:
        return merge(args)
    folder = find_model(args.model, [*ENCODER_PARTS, "transformer"])
    pipe = load_pipeline(folder)
    jobs, problems = plan_pictures(args, folder, pipe)
    if args.settings and any(job.settings != args.settings for job in jobs):
        print(f"warning: {args.again}: a flag, model, LoRA, picture or script is another than it was then")
    if args.many:
        sweep(args.out_dir)
    there = [job for job in jobs if args.many and finished(job.path, job.settings)]
    if rank == 0 and there:
        print(f"{args.out_dir}: {len(there)} of {len(jobs)} pictures are there already, with the same settings")
    for p in problems if rank == 0 else []:
        print(p, file=sys.stderr)
    # dealt before the finished ones go: another process may see one more
    missing = [job for job in jobs[rank::world_size] if job not in there]
    if world_size == 1 and not missing:
        sys.exit(1 if problems else 0)
    place = args.out_dir if args.many else Path(args.out).parent
    check_writable(place, "choose another folder")
    if world_size > 1:
        dist.barrier() # all have looked into the folder
    draw(args, folder, pipe, missing, problems, quiet=rank > 0)
    if world_size > 1:
        dist.barrier() # all are done: torchrun would end the others when one returns 1
    if rank == 0:
        write_sheet(place / (f"{Path(args.out).stem}-sheet.png" if not args.many else "sheet.png"), jobs)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(1 if problems else 0)

if __name__ == "__main__":
    main()
