"""
Edit pictures: control picture(s) and an instruction -> PNG, with the stock pipeline's numbers, and samples of any sizes
in one batch.

$ python predict.py                                    # tiny/: its validation pictures, with its newest LoRA
$ python predict.py --model Qwen/Qwen-Image-Edit-2509 --image cat.jpg --prompt "make it snow" --lora out/RUN
$ python predict.py --model ... --image person.png coat.png --prompt "the person wears the coat of picture 2"
$ python predict.py --model ... --image photos --prompt "make it snow" --out_dir edited # every picture of a folder
$ python predict.py --model ... --jobs jobs.jsonl --out_dir edited # lines: {"image": ["a.jpg"], "prompt": "snow"}
$ python predict.py --model ... --lora out/RUN --scales 0 0.5 1 --seed 0 1 ...  # side by side in a sheet; 0: the base
$ python predict.py --model ... --lora out/RUN LIGHTNING --shift 3 --num_inference_steps 4 --true_cfg_scale 1 ...
$ torchrun --nproc_per_node=8 predict.py --model ... --jobs jobs.jsonl --out_dir edited   # eight share the work

A folder, a dataset and a line of jobs.jsonl are samples as in cache.py; a line may also set out, negative_prompt,
height, width, size_from, seed, num_inference_steps, true_cfg_scale, sigmas and shift. All samples are encoded first,
into --cache_dir; then the encoders are unloaded and the transformer is loaded. Another LoRA, seed or scale needs no new
encoding. In --out_dir a picture that already exists with the same settings is not drawn again; --out is overwritten.
Shape letters as in rope_patch.py.
"""
import argparse
import io
import json
import math
import re
import shlex
import sys
import textwrap
import warnings
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import init_empty_weights
from diffusers import (AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageEditPlusPipeline,
                       QwenImageTransformer2DModel)
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_shift, retrieve_timesteps
from diffusers.training_utils import cast_training_params
from diffusers.utils import get_peft_kwargs
from diffusers.utils.torch_utils import randn_tensor
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners import lora
from PIL import Image, ImageDraw, ImageFont, ImageOps, PngImagePlugin
from safetensors import SafetensorError
from tqdm import tqdm

import cache
from cache import InputError, number, pixels
from rope_patch import patch_qwen_model_for_multi_resolution, plan_packs, run_packed

LORA_FILE = "pytorch_lora_weights.safetensors" # the name that stock load_lora_weights looks for in a folder
SAMPLING = dict(negative_prompt=cache.NEGATIVE_PROMPT, num_inference_steps=20, true_cfg_scale=4.0, sigmas=None,
                shift=None)
TINY_SAMPLING = dict(true_cfg_scale=1.0) # tiny was not trained to go without a prompt
SHEET = "sheet.png" # in --out_dir
JOB = dict(out=str, negative_prompt=str, height=int, width=int, size_from=int, seed=int, num_inference_steps=int,
           true_cfg_scale=(int, float), sigmas=list, shift=(int, float)) # what a line of jobs.jsonl may set

# ---- the transformer and its LoRAs -----------------------------------------------------------------------------------

def load_transformer(folder, dtype, weights=True):
    """The frozen transformer, patched so that a batch may hold any sizes. Its weights stay in the files, memory-mapped,
    until they are copied to the device (if the dtypes match). Without weights: on the meta device, for its shapes."""
    if weights:
        transformer = cache.load_part(QwenImageTransformer2DModel, folder / "transformer", dtype)
    else:
        with init_empty_weights():
            transformer = QwenImageTransformer2DModel.from_config(QwenImageTransformer2DModel.load_config(
                folder / "transformer")).requires_grad_(False)
        torch.nn.Module.to(transformer, getattr(torch, dtype)) # not diffusers' own, which warns
    return patch_qwen_model_for_multi_resolution(transformer)

def add_transformer_flags(parser):
    """Which transformer train.py and predict.py use, and what they can do if it is too large for its device -> the
    add_argument of the flags' group."""
    flag = parser.add_argument_group("transformer, memory").add_argument
    flag("--transformer", metavar="MODEL", help="hub id or folder whose transformer/ replaces --model's")
    blocks = lambda text: 10**9 if text == "all" else number(int, 0)(text)
    blocks.__name__ = "number of blocks" # argparse says "invalid number of blocks value"
    cache.add_quantize_flag(flag, "--quantize", "the frozen blocks of the transformer, 41 GB in bf16")
    flag("--offload", type=blocks, default=0, metavar="BLOCKS",
         help="blocks (a number, or all) that wait in host memory and are copied to the device for each forward and "
              "backward pass, behind the computation if a pass has enough tokens: raise --max_tokens too")
    return flag

def find_folders(args, parts, weights=True):
    """cache.find_model's folder of these parts of --model, and the folder whose transformer/ is used."""
    if args.transformer:
        return (cache.find_model(args.model, parts, weights),
                cache.find_model(args.transformer, ["transformer"], weights, flag="--transformer"))
    folder = cache.find_model(args.model, [*parts, "transformer"], weights)
    return folder, folder

def place_transformer(transformer, device, quantize="none", offload=0, fsdp=False):
    """Moves the transformer with its LoRAs to the device, and quantizes, shards or offloads it as the flags say: block
    by block, so that the device never holds more than one block in full precision."""
    smaller = lambda block: block
    if quantize != "none":
        if any("lora_magnitude" in name for name, _ in transformer.named_parameters()):
            raise InputError("--quantize: a DoRA needs the norms of a base in full precision; leave it out")
        low_bit = cache.load_extra("quantize")
        smaller = lambda block: low_bit.make_low_bit(block, quantize, device, multiply=True)
    try:
        blocks = len(transformer.transformer_blocks)
        offload = min(offload, blocks)
        away = [i * blocks // offload for i in range(offload)] # spread evenly
        if fsdp:
            return cache.load_extra("fsdp").shard(transformer, device, away, smaller)
        if offload:
            return cache.load_extra("offload").place(transformer, device, away, smaller)
        for block in transformer.transformer_blocks:
            smaller(block).to(device)
        return transformer.to(device)
    except torch.OutOfMemoryError:
        raise InputError(f"--model: its weights do not fit on {device}; --quantize or --offload need less memory, "
                         "in train.py --fsdp too (train.py --plan says how much)")

class LoraLinear(lora.Linear): # a class because peft takes one in the place of its own
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
            narrow = F.linear(self.lora_dropout[name](x), a)
            # product, scale and sum in one kernel: apart they would read and write the wide output twice more
            result = torch.addmm(result.flatten(0, -2), narrow.flatten(0, -2), b.T,
                                 alpha=self.scaling[name]).view_as(result)
        return result

def add_lora(transformer, **config):
    """A new LoRA with fp32 weights for training; config: LoraConfig's arguments -> {name: parameter}."""
    config = lora.LoraConfig(**config)
    config._register_custom_module({torch.nn.Linear: LoraLinear})
    transformer.add_adapter(config)
    cast_training_params(transformer, torch.float32)
    return {name: p for name, p in transformer.named_parameters() if p.requires_grad}

def checkpoints(run):
    """The checkpoints in a run's folder, oldest first. A person's copies (checkpoint-000200.bak) are none."""
    number = lambda path: path.name.removeprefix("checkpoint-")
    return sorted((p for p in Path(run).glob("checkpoint-*") if number(p).isdigit()), key=lambda p: int(number(p)))

def find_lora(path):
    """A LoRA file; the one in this folder, or in its newest checkpoint if it is that of an unfinished run; or
    user/repo[/file.safetensors] of the hub -> file."""
    file = Path(path, LORA_FILE) if Path(path).is_dir() else Path(path)
    if not file.exists() and (saved := checkpoints(path)):
        file = saved[-1] / LORA_FILE
        print(f"{path}: not finished; taking its newest checkpoint, {file.parent.name}", file=sys.stderr)
    if not file.parent.exists() and re.fullmatch(r"[\w-]+/[\w.-]+(/.+\.safetensors)?", str(path)):
        from huggingface_hub import hf_hub_download
        user, repo, *name = str(path).split("/", 2)
        try:
            return Path(hf_hub_download(f"{user}/{repo}", *(name or [LORA_FILE])))
        except Exception as e: # a dozen kinds, as in find_model
            raise InputError(f"{path}: neither here nor on the hub with a {(name or [LORA_FILE])[0]} "
                             f"({type(e).__name__}); check the name, add the file's, or log in: hf auth login")
    if not file.is_file() or file.suffix != ".safetensors":
        raise InputError(f"{file}: no LoRA; give a .safetensors file, a folder with {LORA_FILE} or checkpoints, or "
                         "user/repo of the hub")
    return file

def read_lora(path):
    """What find_lora takes -> (state dict with transformer. keys, metadata). diffusers converts the keys of ComfyUI and
    kohya, and works their alpha in. InputError if it is no LoRA, damaged or incomplete, or holds NaN."""
    file = find_lora(path)
    try:
        with safetensors.safe_open(file, "pt") as f:
            notes, raw = f.metadata() or {}, {k: f.get_tensor(k) for k in f.keys()}
        kind = "lora_adapter_metadata" if "lora_adapter_metadata" in notes else "train" # (the latter for ComfyUI)
        meta = dict(json.loads(notes.get(kind, "{}")))
        if "digest" in meta: # one of ours
            raw, meta = cache.read_tensors(file, kind)
        if other := re.search("dora_scale|lokr_|hada_", " ".join(raw)): # diffusers leaves out the first
            raise ValueError(f"{other[0]}: a DoRA in the form of kohya and ComfyUI, a LoKr or a LoHa")
        if any(k.startswith("transformer_blocks.") for k in raw): # no prefix, as Lightning's
            raw = {f"diffusion_model.{k}": v for k, v in raw.items()}
        state = QwenImageEditPlusPipeline.lora_state_dict(raw)
        if wrong := find_faults(state, meta.get("transformer.target_modules")):
            raise ValueError(wrong[0])
    except (OSError, SafetensorError, ValueError, LookupError, AttributeError, TypeError, RuntimeError) as e:
        raise InputError(f"{file}: cannot be used as a LoRA: {cache.first_words(e)}; take another file "
                         "(tools/convert_lora.py reads peft's folders)")
    return state, meta

def find_faults(state, trained):
    """What keeps a state dict from being a LoRA of Qwen-Image. trained: names of all its layers, if its file says."""
    layers = lambda kind: {k.rsplit(".lora_", 1)[0]: v for k, v in state.items() if f".lora_{kind}." in k}
    a, b = layers("A"), layers("B")
    wrong = [] if state else ["it is empty"]
    ours = r"transformer\.(transformer_blocks\.\d+\.|img_in|txt_in|proj_out|norm_out|time_text_embed).*\.lora_"
    wrong += [f"{k} is none of Qwen-Image's" for k in state if not re.match(ours, k)]
    wrong += [f"lora_A or lora_B of {k} is missing" for k in a.keys() ^ b.keys()]
    wrong += [f"lora_A and lora_B of {t} are missing" for t in (trained if isinstance(trained, list) else [])
              if not any(k.endswith("." + t) for k in a)]
    wrong += [f"lora_A and lora_B of {k} do not go together" for k in a.keys() & b.keys()
              if not (a[k].ndim == b[k].ndim == 2 and a[k].shape[0] == b[k].shape[1])]
    return wrong + [f"NaN or Inf in {k}: its training diverged" for k, v in state.items() if not v.isfinite().all()]

def lora_config(path):
    """-> LoraConfig's arguments for a LoRA that load_weights can fill with this one: layers, ranks, scales."""
    state, meta = read_lora(path)
    state = {k.removeprefix("transformer."): v for k, v in state.items()}
    found = get_peft_kwargs({f"^{k}": v.shape[1] for k, v in state.items() if ".lora_B." in k}, None, state)
    known = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
    return {k: v for k, v in found.items() if k != "lora_bias"} | {
        k: meta[f"transformer.{k}"] for k in known if f"transformer.{k}" in meta}

def check_fit(transformer, path, state):
    """InputError with counts if keys fit nothing or in part; diffusers itself only warns, or says nothing."""
    modules, misfit = dict(transformer.named_modules()), {}
    for key, value in state.items():
        layer, kind = key.removeprefix("transformer.").rsplit(".lora_", 1)
        side, axis = ("in_features", 1) if kind == "A.weight" else ("out_features", 0)
        if (want := getattr(modules.get(layer), side, None)) != value.shape[axis]:
            misfit[layer] = f"{layer} (got {tuple(value.shape)}, the model has {want or 'no such layer'})"
    if misfit:
        layers = len({key.rsplit(".lora_", 1)[0] for key in state})
        raise InputError(f"{path}: {len(misfit)} of {layers} layers do not fit, for instance {min(misfit.values())}; "
                         "it was made for another model")

def load_loras(transformer, paths, scales):
    """Adds these LoRAs to the transformer, all active, each at its scale."""
    warnings.filterwarnings("ignore", "Already found a `peft_config`") # several are what is wanted
    names = [f"lora{i}" for i in range(len(paths))]
    for name, path in zip(names, paths):
        state, meta = read_lora(path)
        check_fit(transformer, path, state)
        config = {k: v for k, v in meta.items() if k.startswith("transformer.")}
        try:
            QwenImageEditPlusPipeline.load_lora_into_transformer(state, transformer, adapter_name=name,
                                                                 metadata=config or None)
        except (TypeError, ValueError, KeyError, RuntimeError) as e:
            raise InputError(f"{path}: diffusers cannot load it ({cache.first_words(e)}); take another file")
    if names:
        transformer.set_adapters(names, list(scales))

def load_weights(transformer, state, path=None):
    """Fills the adapter "default" with read_lora's tensors, bit for bit. path: that of a file that may not fit."""
    if path:
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
    cache.write_tensors(path, state, meta | {f"train.{k}": v for k, v in train.items()}, "lora_adapter_metadata")

# ---- sampling: what the stock pipeline computes ----------------------------------------------------------------------

def prompts_of(sample, settings):
    """What a sample's runs are told: the instruction, and for true CFG the negative prompt."""
    return [sample.prompts[0]] + [settings["negative_prompt"]] * (settings["true_cfg_scale"] > 1)

def load_job(sample, settings, seed, device, pipe=None):
    """What denoise needs to draw a sample, from the cache (or with `pipe` encoded now): noise (I_0, 64), as stock draws
    it for this seed, control_latent (sum I_c, 64), prompt_embeds of prompts_of, img_shapes, and the settings of
    SAMPLING."""
    resolution = sample.resolutions[0]
    controls = cache.load_latents(sample, resolution, pipe)["control_latent"]
    embeds = [cache.load_text(sample, (prompt, True), pipe).to(device) for prompt in prompts_of(sample, settings)]
    _, h, w = resolution["img_shapes"][0]
    shape = 1, controls.shape[1] // 4, 2 * h, 2 * w # a token is 2x2 of the latent's pixels
    noise = randn_tensor((1, *shape), torch.Generator().manual_seed(seed), torch.device(device), embeds[0].dtype)
    noise, = QwenImageEditPlusPipeline._pack_latents(noise, *shape)
    return SimpleNamespace(noise=noise, control_latent=controls.to(device), prompt_embeds=embeds,
                           img_shapes=resolution["img_shapes"], **{k: settings[k] for k in SAMPLING})

def make_schedule(job, config):
    """-> (scheduler, timesteps) of this job. The timesteps' shift depends on the target's number of tokens, unless
    job.shift fixes it as Qwen-Image-Lightning does: the same for every size, and not stretched."""
    if job.shift:
        config = {**config, "base_shift": math.log(job.shift), "max_shift": math.log(job.shift), "shift_terminal": None}
    mu = calculate_shift(len(job.noise), config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096),
                         config.get("base_shift", 0.5), config.get("max_shift", 1.15))
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    sigmas = job.sigmas or np.linspace(1.0, 1 / job.num_inference_steps, job.num_inference_steps)
    timesteps, _ = retrieve_timesteps(scheduler, device=job.noise.device, sigmas=sigmas, mu=mu)
    scheduler.set_begin_index(0)
    return scheduler, timesteps

@torch.no_grad()
def denoise(transformer, scheduler_config, jobs, max_tokens, bar=None):
    """Euler steps from each job's noise -> its latents (I_0, 64). The conditional and unconditional runs of all jobs go
    through the transformer together, at most max_tokens tokens a forward pass; jobs may differ in everything, the
    number of steps too. bar: a tqdm, one per job and step."""
    schedules = [make_schedule(job, scheduler_config) for job in jobs]
    latents = [job.noise for job in jobs]
    for i in range(max(len(timesteps) for _, timesteps in schedules)):
        active = [j for j, (_, timesteps) in enumerate(schedules) if i < len(timesteps)]
        runs = [(j, k) for j in active for k in range(len(jobs[j].prompt_embeds))] # k: 0 conditional, 1 unconditional
        lengths = [len(latents[j]) + len(jobs[j].control_latent) + len(jobs[j].prompt_embeds[k]) for j, k in runs]
        preds = {}
        for pack in plan_packs(lengths, max_tokens):
            some = [runs[r] for r in pack]
            t = torch.stack([schedules[j][1][i].to(latents[j].dtype) / 1000 for j, _ in some])
            outs = run_packed(transformer, [torch.cat([latents[j], jobs[j].control_latent]) for j, _ in some],
                              [jobs[j].prompt_embeds[k] for j, k in some], t, [jobs[j].img_shapes for j, _ in some])
            preds |= {(j, k): out[:len(latents[j])] for (j, k), out in zip(some, outs)}
        for j in active:
            pred = preds[j, 0]
            if (j, 1) in preds: # true CFG, rescaled to the conditional run's norm per token
                uncond = preds[j, 1]
                both = uncond + jobs[j].true_cfg_scale * (pred - uncond)
                pred = both * (pred.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True))
            scheduler, timesteps = schedules[j]
            latents[j] = scheduler.step(pred[None], timesteps[i], latents[j][None], return_dict=False)[0][0]
        if bar is not None:
            bar.update(len(active))
    return latents

@torch.no_grad()
def decode(vae, latents, img_shapes):
    """Packed latents (I_0, 64) -> PIL image."""
    _, h, w = img_shapes[0]
    z = QwenImageEditPlusPipeline._unpack_latents(latents[None], 16 * h, 16 * w, 8).to(vae.device, vae.dtype)
    mean, std = [torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std)]
    z = z / (1.0 / std).to(z) + mean.to(z) # in this order, for the stock pipeline's bits
    return VaeImageProcessor(16).postprocess(vae.decode(z, return_dict=False)[0][:, :, 0])[0]

def draw_samples(transformer, vae, scheduler_config, items, max_tokens, device, pipe=None, share=slice(None), bar=None):
    """[(sample, settings, seed)] -> yields (place in the list, PIL image), many drawn at once. share: which of the
    packs this process draws. Without a VAE nothing is decoded, nor yielded."""
    lengths = []
    for sample, settings, _ in items:
        images = sum(h * w for _, h, w in sample.resolutions[0]["img_shapes"])
        lengths.append(sum(images + sample.texts[prompt, True]["tokens"] for prompt in prompts_of(sample, settings)))
    for pack in plan_packs(lengths, max_tokens)[share]: # so much is under way at once; denoise packs each step's runs
        jobs = [load_job(*items[i], device, pipe) for i in pack]
        for i, job, latents in zip(pack, jobs, denoise(transformer, scheduler_config, jobs, max_tokens, bar)):
            if vae is not None:
                yield i, decode(vae, latents, job.img_shapes)

# ---- pictures --------------------------------------------------------------------------------------------------------

def psnr(image, reference):
    """dB between two pictures of one size; equal ones have 99."""
    error = np.mean((np.asarray(image, float) - np.asarray(reference, float)) ** 2)
    return float(10 * np.log10(255**2 / max(error, 255**2 / 10**9.9)))

def shown_prompt(sample):
    """For a sheet: the instruction, or the sample's name where PIL's font lacks a letter, as all of Chinese."""
    font = ImageFont.load_default(14)
    missing, *letters = [bytes(font.getmask(c)) for c in ["\uffff", *set(sample.prompts[0])]]
    return sample.name if missing in letters else sample.prompts[0]

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

def side_by_side(images):
    """One cell of a contact sheet for a sample's controls."""
    small = [ImageOps.contain(image, (192, 192)) for image in images]
    beside = Image.new("RGB", (sum(s.width for s in small), max(s.height for s in small)), "white")
    for i, image in enumerate(small):
        beside.paste(image, (sum(s.width for s in small[:i]), 0))
    return beside

def save_png(image, path, key=""):
    """key: a hash of its settings, for `finished`. The PNG also tells a person the command that made it."""
    png, notes = io.BytesIO(), PngImagePlugin.PngInfo()
    notes.add_text("key", key)
    notes.add_text("command", shlex.join(["python", *sys.argv]))
    image.save(png, format="PNG", pnginfo=notes)
    cache.write_file(path, png.getvalue())

def finished(path, key):
    """The picture that an earlier call has saved here with the same key, or None."""
    try:
        with Image.open(path) as image:
            image.load()
            return image if image.info.get("key") == key else None
    except (OSError, ValueError, SyntaxError): # none, or a broken one: it is drawn again
        return None

# ---- command line: flags; what is to be drawn; drawing ---------------------------------------------------------------

def read_flags():
    """-> args. What contradicts itself ends the script here."""
    parser = cache.Parser(__doc__)
    cache.add_model_flags(parser)
    flag = parser.add_argument_group("what to draw").add_argument
    flag("--image", nargs="+", type=Path, help="control picture(s), or one folder: each of its pictures")
    flag("--prompt", help="the instruction")
    flag("--jobs", type=Path, help="jobs.jsonl, or a dataset: many samples in one batch")
    flag("--out", type=Path, default="out.png", help="PNG to write for --image FILES (overwritten if it exists)")
    flag("--out_dir", type=Path, default="out/predict", help="folder for the PNGs of --jobs or of an --image "
         "folder; if given also for --image FILES, in the place of --out")
    flag("--seed", type=number(int, 0, 2**64 - 1), nargs="+", default=[0],
         help="seed of the noise; several: each sample is drawn once per seed")
    flag = parser.add_argument_group("with which LoRA").add_argument
    flag("--lora", nargs="+", help="LoRA file(s), run folders or user/repo[/file] of the hub, all active together "
         "(default: none; with --model tiny the newest run's)")
    flag("--lora_scale", type=number(float, -10, 10), nargs="+", default=[1.0],
         help="strength of the LoRA, or of each: 0 is none, 1 as trained")
    flag("--scales", type=number(float, -10, 10), nargs="+", default=[1.0],
         help="each picture at these strengths of all its LoRAs, side by side; 0 is the base")
    flag = parser.add_argument_group("how").add_argument
    flag("--negative_prompt", help="prompt of the unconditional pass (default: one space)")
    flag("--num_inference_steps", type=number(int, 1), help="Euler steps: at least 2, or at least 1 with a --shift")
    flag("--true_cfg_scale", type=float, help="CFG scale; at 1 or below no unconditional pass is run: half the time")
    flag("--sigmas", type=number(float, 1e-6, 1), nargs="+",
         help="noise level of each step, before the shift: falling, from 1 (default: evenly spaced)")
    flag("--shift", type=number(float, 1e-6),
         help="one shift for all sizes, not stretched: 3 for Qwen-Image-Lightning (default: the model's own, by size)")
    flag("--height", type=number(int, 32), help="of the result, in pixels, rounded down to 16 (default: from the area)")
    flag("--width", type=number(int, 32), help="pixels, likewise")
    flag("--size_from", type=number(int, 1), metavar="N",
         help="which picture gives the result its shape, from 1 (default: the last, as in stock)")
    flag("--target_pixels", type=pixels, metavar="AREA",
         help="area of the result, or native (default: as the LoRA was trained, else 1024x1024; tiny: native)")
    flag("--control_pixels", type=pixels, metavar="AREA", help="area of the pictures given, likewise")
    flag("--upscale", action=argparse.BooleanOptionalAction,
         help="enlarge smaller pictures to the area (default: as the LoRA was trained, else yes)")
    flag = add_transformer_flags(parser)
    flag("--max_tokens", type=number(int, 1), default=20_000,
         help="tokens per forward pass; lower it if memory runs out")
    flag("--transformer_device", help="default: --device")
    parser.set_defaults(**SAMPLING)
    given = {a.split("=")[0] for a in sys.argv[1:]}
    runs = sorted(Path("out").glob(f"tiny-*/{LORA_FILE}"), key=lambda p: p.stat().st_mtime)
    args = cache.parse_args(parser, TINY_SAMPLING | dict(
        lora=[str(runs[-1])] if runs else None,
        jobs=None if given & {"--image", "--jobs"} else cache.TINY_DATA.with_name("val")))

    args.lora = [path for path in args.lora or [] if path and (args.model == "tiny" or "--lora" in given)]
    for name in ("scales", "lora_scale"):
        if getattr(args, name) != [1.0] and not args.lora:
            parser.error(f"argument --{name}: no LoRA; give --lora")
    if len(args.lora_scale) not in (1, len(args.lora)):
        parser.error(f"argument --lora_scale: {len(args.lora_scale)} for {len(args.lora)} LoRAs; give one, or one each")
    args.lora_scale = args.lora_scale * (len(args.lora) if len(args.lora_scale) == 1 else 1)
    for name in ("scales", "seed"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            parser.error(f"argument --{name}: a value is given twice; give each once")
    if {"--sigmas", "--num_inference_steps"} <= given:
        parser.error("argument --sigmas: has a value for each step; leave out --num_inference_steps")
    if bool(args.image) == bool(args.jobs) or bool(args.image) != (args.prompt is not None):
        parser.error("argument --image: give --image with --prompt, or --jobs")
    args.many = bool(args.jobs) or args.image[0].is_dir() or "--out_dir" in given
    if args.many and "--out" in given:
        parser.error("argument --out: is for one result; leave it out, or give --image FILES without --out_dir")
    if args.out.suffix.lower() != ".png" or args.out.resolve() in [path.resolve() for path in args.image or []]:
        parser.error(f"argument --out: {args.out} is no .png name, or is one of the --image files; give another name")
    return args

def find_geometry(args, quiet):
    """The sizes to draw at: those of the flags, else those at which the first LoRA was trained, else stock's."""
    trained = [g for g in (read_lora(path)[1].get("train.geometry") for path in args.lora) if g]
    if any(g != trained[0] for g in trained) and not quiet:
        print(f"warning: the LoRAs were trained at different sizes ({'; '.join(map(str, trained))}); the first is used")
    area = "native" if cache.is_tiny(args.model) else 1024 * 1024
    sizes = dict(target_pixels=area, control_pixels=area, upscale=True) | (trained[0] if trained else {})
    return {k: v if getattr(args, k) is None else getattr(args, k) for k, v in sizes.items()}

def read_samples(args):
    """What the flags ask for -> (samples, problems)."""
    if args.jobs and args.jobs.suffix == ".jsonl" and args.jobs.name != "metadata.jsonl":
        samples, problems = cache.read_manifest(args.jobs, settings=JOB)
        if not samples and not problems:
            raise InputError(f"--jobs {args.jobs}: no jobs in it; write lines of JSON into it")
        return samples, problems
    if args.jobs:
        return cache.read_dataset(args.jobs)
    folder = args.image[0]
    if args.image[1:] and (folders := list(filter(Path.is_dir, args.image))):
        raise InputError(f"--image {folders[0]}: a folder stands alone; give one folder, or files")
    if not folder.is_dir():
        return [cache.make_sample("--prompt", folder, folder.stem, None, args.image, [args.prompt])], []
    samples = []
    for (stem, kind), paths in cache.find_files(folder).items():
        for path in paths if kind in ("picture", "other") else []: # other: TIFF and the like, each an error by its name
            name = stem if len(paths) == 1 else path.relative_to(folder).as_posix() # a.png beside a.jpg
            samples.append(cache.make_sample("--prompt", folder, name, None, [path], [args.prompt]))
    if not samples:
        raise InputError(f"--image {folder}: no picture in it; give a folder of pictures")
    return samples, []

def complete_settings(sample, args, stretched):
    """Adds the flags to what the sample's line has set. InputError for what makes no sense. stretched: whether the
    schedule is, between its first and its last step."""
    own, given = sample.settings, {k: getattr(args, k) for k in (*SAMPLING, "height", "width", "size_from")}
    if "num_inference_steps" in own: # not the --sigmas of the command line
        given["sigmas"] = None
    s = sample.settings = given | own
    sigmas, out = s["sigmas"] or [], Path(s.get("out", "x.png"))
    s["num_inference_steps"] = len(sigmas) or s["num_inference_steps"]
    numbers = all(isinstance(x, (int, float)) for x in sigmas)
    least, pictures = 1 if s["shift"] or not stretched else 2, len(sample.controls)
    limits = dict(num_inference_steps=(least, 1000), true_cfg_scale=(-1e6, 1e6), shift=(1e-6, 1e6), height=(32, 16384),
                  width=(32, 16384), size_from=(1, pictures), seed=(0, 2**64 - 1))
    where = f"{args.jobs or '--image'}: {sample.name}"
    cache.check_text(f"{where}: negative prompt", s["negative_prompt"])
    cache.check_text(f"{where}: out", own.get("out", ""))
    wrong = [f"{key} {s[key]}; give {low} to {high}" for key, (low, high) in limits.items()
             if s.get(key) is not None and not low <= s[key] <= high] # also for nan
    for is_wrong, what in (
            (not pictures, "a picture without a control cannot be edited; leave it out"),
            ("sigmas" in own and "num_inference_steps" in own, "both sigmas and num_inference_steps; leave one out"),
            (not numbers or any(not 1 >= x > y for x, y in zip(sigmas, [*sigmas[1:], 0])),
             f"sigmas {sigmas}; give falling numbers, none above 1, all above 0"),
            (out.suffix.lower() != ".png" or out.is_absolute() or ".." in out.parts or "\0" in str(out),
             f"'out' is {str(out)!r}; give a PNG below --out_dir"),
            ("seed" in own and len(args.seed) > 1, "its own seed, and --seed gives several; leave one out")):
        wrong += [what] * is_wrong
    if wrong:
        raise InputError(f"{where}: {wrong[0]}")

def plan_pictures(samples, args, many, model_fingerprint):
    """-> [SimpleNamespace(sample, row, title, seed, scale, path, key)], one for each sample, seed and scale. key: a
    hash of all that decides the picture. InputError if two would be written to one file."""
    loras = [[cache.file_hash(path), scale] for path, scale in zip(args.lora, args.lora_scale)]
    pictures, sheet = {}, args.out_dir / SHEET
    sources = {Path(p).resolve() for s in samples for p in (s.target, s.mask, *s.controls) if p}
    for row, sample in enumerate(samples):
        files = [sample.resolutions[0]["file"].stem, *[text["file"].stem for text in sample.texts.values()]]
        decides = {k: v for k, v in sample.settings.items() if k not in ("out", "seed", "size_from")}
        name = sample.settings.get("out") or sample.name.replace("/", "-" if args.jobs else "/") + ".png"
        out = args.out_dir / name if many else args.out
        for seed, scale in [(sample.settings.get("seed", seed), scale) for seed in args.seed for scale in args.scales]:
            words = [f"seed {seed}"] * (len(args.seed) > 1) + [f"LoRA x {scale:g}"] * (len(args.scales) > 1)
            end = f"-s{seed}" * (len(args.seed) > 1) + f"-x{scale:g}" * (len(args.scales) > 1)
            path = out.with_stem(out.stem + end)
            if path in pictures or (many and path == sheet):
                raise InputError(f"{args.jobs or '--image'}: two pictures would be {path}; give each its own name")
            if path.resolve() in sources:
                raise InputError(f"{path}: would overwrite a picture that is read; give another --out_dir or --out")
            key = cache.content_key(files=files, transformer=model_fingerprint, quantize=args.quantize, seed=seed,
                                    loras=[[lora, strength * scale] for lora, strength in loras], **decides)
            pictures[path] = SimpleNamespace(sample=sample, row=row, title=", ".join(words) or "result", seed=seed,
                                             scale=scale, path=path, key=key)
    return list(pictures.values())

def draw(args, folder, transformer_folder, scheduler_config, pictures, quiet):
    """Draws these pictures, many at once, saves each when it is done -> problems: one that fails stops no others."""
    transformer, problems = load_transformer(transformer_folder, args.dtype), []
    load_loras(transformer, args.lora, args.lora_scale)
    if not quiet:
        print("\n".join(f"LoRA {path} at scale {scale:g}" for path, scale in zip(args.lora, args.lora_scale))
              or "no LoRA: the base model draws")
    place_transformer(transformer, args.transformer_device, args.quantize, args.offload)
    vae = cache.load_part(AutoencoderKLQwenImage, folder / "vae", args.dtype).to(args.vae_device)
    t0 = monotonic()
    bar = tqdm(total=sum(p.sample.settings["num_inference_steps"] for p in pictures), desc=f"{len(pictures)} pictures",
               unit="step", disable=quiet or None)
    for scale in args.scales: # two strengths of a LoRA cannot share a forward pass
        some = [p for p in pictures if p.scale == scale]
        if args.lora:
            transformer.set_adapters([f"lora{i}" for i in range(len(args.lora))], [s * scale for s in args.lora_scale])
        items = [(p.sample, p.sample.settings, p.seed) for p in some]
        for i, image in draw_samples(transformer, vae, scheduler_config, items, args.max_tokens,
                                     args.transformer_device, bar=bar):
            try:
                save_png(image, some[i].path, some[i].key)
                tqdm.write(f"{some[i].path}: {image.width}x{image.height} | {some[i].sample.prompts[0]}")
            except InputError as e: # a full disk
                problems.append(str(e))
                tqdm.write(str(e), file=sys.stderr)
    bar.close()
    if not quiet:
        gib = cache.memory_of(args.transformer_device)
        print(f"pictures: {len(pictures)}, {monotonic() - t0:.1f} s, {gib:.1f} GiB")
    return problems

def write_sheet(path, pictures):
    """The first rows of all pictures, those of earlier calls too, where there are several."""
    titles, rows = list(dict.fromkeys(p.title for p in pictures)), {}
    done = [(p, image) for p in pictures if p.row < 24 and (image := finished(p.path, p.key))]
    for p, image in done if len(done) > 1 else []:
        if p.row not in rows:
            controls = side_by_side([cache.read_image(path) for path in p.sample.controls])
            rows[p.row] = [controls, shown_prompt(p.sample), *[None] * len(titles)]
        rows[p.row][2 + titles.index(p.title)] = ImageOps.contain(image, (192, 192), Image.Resampling.LANCZOS)
    if rows:
        save_png(contact_sheet([*rows.values()], ["control", "instruction", *titles]), path)
        print(f"{path}: {len(done)} of them side by side")

def main():
    args = read_flags()
    rank, world_size = cache.start_processes(args)
    args.lora = [str(find_lora(path)) for path in args.lora]
    many, geometry = args.many, find_geometry(args, rank > 0)
    geometry["target_pixels"] = [geometry["target_pixels"]] # plan_samples takes several
    place = args.out_dir if many else args.out.parent
    if many and args.image and args.image[0].resolve() in (place.resolve(), *place.resolve().parents):
        raise InputError(f"--out_dir {place}: lies in the folder of --image; give another one")

    # what is to be drawn
    samples, problems = read_samples(args)
    folder, transformer_folder = find_folders(args, cache.ENCODERS)
    pipe = cache.load_pipeline(folder)
    config, good = pipe.scheduler.config, []
    for sample in samples:
        try:
            complete_settings(sample, args, config.shift_terminal)
            good.append(sample)
        except InputError as e:
            problems.append(str(e))
    texts = lambda s: [(prompt, True) for prompt in prompts_of(s, s.settings)]
    good, wrong = cache.plan_samples(pipe, good, texts, geometry, args, rank > 0)
    problems += wrong
    pictures = plan_pictures(good, args, many, cache.fingerprint(transformer_folder / "transformer"))
    missing = [p for p in pictures if not (many and finished(p.path, p.key))]
    if missing:
        cache.prepare_folder(place, "choose another folder")
    if rank == 0 and len(missing) < len(pictures):
        print(f"{place}: {len(pictures) - len(missing)} of {len(pictures)} pictures are there already, made with the "
              "same settings")

    # encode it all, let the encoders go, then draw. all_gather in encode_samples also waits until all have looked
    problems += cache.encode_samples(pipe, [p.sample for p in missing], args, rank, world_size, verify=True)
    for p in problems if rank == 0 else []:
        print(p, file=sys.stderr)
    mine = [p for p in missing[rank::world_size] if cache.is_cached(p.sample)] # dealt first: all deal the same list
    try:
        problems += draw(args, folder, transformer_folder, config, mine, quiet=rank > 0) if mine else []
    except torch.OutOfMemoryError:
        raise InputError(f"--max_tokens {args.max_tokens}: out of memory; lower it, or give --quantize, --offload or, "
                         "where it decodes, --vae_device cpu. the same command goes on with what is missing")
    if world_size > 1:
        dist.barrier() # all are done: torchrun would end the others when one returns 1
    if rank == 0 and missing:
        write_sheet(place / (SHEET if many else f"{args.out.stem}-sheet.png"), pictures)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(1 if problems else 0)

if __name__ == "__main__":
    main()
