"""
Edit pictures: control picture(s) and an instruction -> PNG, with the stock pipeline's numbers, and samples of any sizes
in one batch.

Behind the flags, the first half is a library, which train.py uses too: the transformer, LoRAs, the sampler (`denoise`).
The second half is what a command does: samples, pictures, their files.

$ python predict.py --lora out/tiny-data-001            # without --image: the validation pictures of tiny/
$ python predict.py --model Qwen/Qwen-Image-Edit-2509 --image cat.jpg --prompt "make it snow" --lora out/RUN
$ python predict.py --model ... --image person.png coat.png --prompt "the person wears the coat of picture 2"
$ python predict.py --model ... --image photos --prompt "make it snow" --out_dir edited # every picture of a folder
$ python predict.py --model ... --jobs jobs.jsonl --out_dir edited # lines: {"image": ["a.jpg"], "prompt": "snow"}
$ python predict.py --model ... --lora out/RUN --scales 0 0.5 1 --seed 0 1 ...  # side by side in a sheet; 0: the base
$ python predict.py --model ... --lora out/RUN LIGHTNING --shift 3 --num_inference_steps 4 --true_cfg_scale 1 ...
$ torchrun --nproc_per_node=8 predict.py --model ... --jobs jobs.jsonl --out_dir edited   # eight share the work

A folder, a dataset and a line of jobs.jsonl are samples as in cache.py; a line may also set out, negative_prompt,
height, width, size_from, seed, num_inference_steps, true_cfg_scale, cfg_norm, sigmas and shift. All samples are encoded
first, into --cache_dir; then the encoders are unloaded and the transformer is loaded. Another LoRA, seed or scale needs
no new encoding. A result is called NAME-1a2b3c4d.png: the letters are a hash of all that decides it, such as settings,
LoRAs and code. If it is there already, it is not generated again. --out, or `out` of a line, names the file itself: an
older result is replaced there, but never a file that predict.py has not made. Shape letters as in rope_patch.py.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__))) # PYTHONSAFEPATH leaves it out
import library # before all others: refuses a folder here that Python would import in place of one of them
import argparse
import math
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from time import monotonic

import common
from common import InputError, tell
from library.cli import command_line
from library.cli.command_line import (SAMPLE_FLAGS, SAMPLING, is_one_file, noise_level, number, pixels, png_name,
                                      positive, seed_number)
from library.data import dataset, sample_checks
from library.files import disk, tensor_files
from library.files.stray_files import on_disk
from library.lora.lora_paths import LORA_FILE, find_lora
from library.models import hub
from library.results import contact_sheets, result_files
from library.results.result_files import encode_png, is_finished

def read_flags():
    """-> args. Flags that contradict each other end the script here."""
    parser = command_line.Parser(__doc__, "--model MODEL --lora LORA --image PICTURE --prompt TEXT [--out FILE] "
                                 "[--seed N] [--num_inference_steps N] [--true_cfg_scale X] [--quantize int8] "
                                 "[--offload N]")
    command_line.add_model_flags(parser)
    flag = parser.group("what to generate")
    flag("--image", None, "control picture(s), or one folder: each of its pictures", nargs="+", type=on_disk)
    flag("--prompt", None, "the instruction")
    flag("--jobs", None, "jobs.jsonl, or a dataset: many samples in one batch", type=Path)
    flag("--out", None, "PNG to write for --image FILES (default: in --out_dir, named after the first and the "
         "settings)", type=png_name)
    flag("--out_dir", "out/predict", "folder for all other PNGs", type=Path)
    flag("--seed", [0],
         "seed of the noise; several: each sample is generated once per seed", type=seed_number, nargs="+")
    flag = parser.group("with which LoRA")
    strength = number(float, -10, 10)
    flag("--lora", [], "LoRA file(s), run folders or user/repo[/file] of the hub, all active together (default: "
         "none; without --model and --transformer that of the newest out/tiny-*; \"\": none)", nargs="+")
    flag("--lora_scale", [1.0], "strength of the LoRA, or of each: 0 is none, 1 as trained", type=strength, nargs="+")
    flag("--scales", [1.0], "each picture at these strengths of all its LoRAs, side by side; 0 is the base",
         type=strength, nargs="+")
    flag = parser.group("how")
    command_line.add_sample_flags(flag, SAMPLE_FLAGS)
    flag("--sigmas", None,
         "noise level of each step, before the shift: falling, from 1 (default: evenly spaced)",
         type=noise_level, nargs="+")
    flag("--target_pixels", None,
         "area of the result, or native (default: as the LoRA was trained, else 1024x1024; tiny: native)",
         type=pixels)
    flag("--control_pixels", None, "area of the pictures given, likewise", type=pixels)
    flag("--upscale", None,
         "enlarge smaller pictures to the area (default: as the LoRA was trained, else yes)",
         action=argparse.BooleanOptionalAction)
    flag = command_line.add_transformer_flags(parser)
    flag("--max_tokens", 20_000, "tokens per forward pass; lower it if memory runs out", type=positive)
    flag("--transformer_device", None, "default: --device")
    given = set(command_line.given_flags())
    # without --model: tiny, with its newest LoRA, and without --image its validation pictures (with no flag an error)
    runs = sorted(Path("out").glob(f"tiny-*/{LORA_FILE}"), key=lambda path: path.stat().st_mtime)
    args = command_line.parse_args(parser, "predict.py")
    if hub.is_tiny(args.model) and given and not given & {"--image", "--jobs"}:
        args.jobs = hub.TINY_DATA.with_name("val")
    if bool(args.image) == bool(args.jobs) or bool(args.image) != (args.prompt is not None):
        parser.error("argument --image: give --image with --prompt, or --jobs")
    if given and runs and not given & {"--model", "--transformer", "--lora"}:
        args.lora = [str(runs[-1])]
        sys.argv += ["--lora", *args.lora] # each PNG tells this command

    # LoRAs, each with its strength
    args.lora = [str(find_lora(path)) for path in args.lora if path]
    if not args.lora and (args.scales != [1.0] or args.lora_scale != [1.0]):
        parser.error("argument --scales: --scales and --lora_scale need a LoRA; give --lora")
    if len(args.lora_scale) == 1:
        args.lora_scale *= len(args.lora)
    if len(args.lora_scale) != len(args.lora):
        parser.error(f"argument --lora_scale: {len(args.lora_scale)} for {len(args.lora)} LoRAs; give one, or one each")
    # what is generated, and where it goes: either one file --out, or files in --out_dir
    if {"--sigmas", "--num_inference_steps"} <= given:
        parser.error("argument --sigmas: has a value for each step; leave out --num_inference_steps")
    if args.out:
        if args.jobs or args.image[0].is_dir() or "--out_dir" in given:
            parser.error("argument --out: is for one result; leave it out, or give --image FILES without --out_dir")
        args.out = Path(args.out)
        args.out_dir = args.out.parent
    dataset.refuse_missing_input(args)
    # hashed before Python reads most of it, in the ten seconds in which an editor may save it
    args.code = result_files.drawing_hash(__file__)
    return args

if __name__ == "__main__": # before the imports below: a slip is answered in a second, and they take ten
    args = read_flags()

import numpy as np
import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPlusPipeline, QwenImageTransformer2DModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_shift
from diffusers.training_utils import cast_training_params
from diffusers.utils.torch_utils import randn_tensor
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

import cache
from library.lora import lora_file, lora_linear
from library.lora.lora_file import PLAIN, config_of, read_lora, scales_of, with_prefix, write_lora
from library.models import devices, model_files, offloading, one_file, quantization, sharding
from rope_patch import blocks_of, patch_qwen_model_for_multi_resolution, plan_packs, run_packed

# ==== the library =====================================================================================================

# ---- the transformer -------------------------------------------------------------------------------------------------

def load_transformer(folder, dtype, weights=True, file=None):
    """The frozen transformer, patched so that a batch may hold any sizes. Its weights are memory-mapped from the files
    until they are copied to the device (if the dtypes match). Without weights: on the meta device, for its shapes.
    file: --transformer's, if it is one file; place_transformer reads the blocks' weights from it."""
    if weights and not file:
        transformer = cache.load_part(QwenImageTransformer2DModel, folder / "transformer", dtype)
    else:
        empty = model_files.empty_model(QwenImageTransformer2DModel, folder / "transformer")
        transformer = empty.requires_grad_(False)
        torch.nn.Module.to(transformer, getattr(torch, dtype)) # not diffusers' own, which warns
        if weights:
            one_file.attach(transformer, file)
    return patch_qwen_model_for_multi_resolution(transformer)

def check_file(args):
    """InputError if --transformer is one file, and none that can be used: before anything slow."""
    if is_one_file(args.transformer):
        one_file.read_layout(args.transformer)

def find_transformer(args, weights=True):
    """-> (the folder whose transformer/ is used: --transformer's, or else --model's; None). If --transformer is one
    file: (--model's folder, for its config.json; this file, for its weights)."""
    if is_one_file(args.transformer):
        folder = cache.find_model(args.model, ["transformer"], weights=False)
        one_file.check_fit(args.transformer, folder)
        return folder, args.transformer
    if args.transformer:
        one_file.check_folder(args, cache.find_model) # before its weights are downloaded
    flag = "--transformer" if args.transformer else "--model"
    return cache.find_model(args.transformer or args.model, ["transformer"], weights, flag), None

def place_transformer(transformer, device, quantize="none", offload=0, fsdp=False):
    """Moves the transformer with its LoRAs to the device, and quantizes, shards or offloads it as the flags say: block
    by block, so that the device never holds more than one block in full precision."""
    blocks = blocks_of(transformer)
    bar = common.progress("loading", total=len(blocks), unit="block")

    def prepare_block(block):
        bar.update()
        if hasattr(transformer, "fill_from_file"): # one file's weights are unpacked block by block
            transformer.fill_from_file(block, quantize)
        if quantize == "none":
            return block
        return quantization.quantize_linears(block, quantize, device, multiply=True)

    offloaded_blocks = offloading.choose_blocks(offload, len(blocks))
    try:
        if fsdp:
            return sharding.shard(transformer, blocks, device, offloaded_blocks, prepare_block)
        if offload:
            return offloading.place(transformer, blocks, device, offloaded_blocks, prepare_block)
        for block in blocks:
            prepare_block(block).to(device)
        return model_files.copy_mapped_weights(transformer.to(device)) # on a CPU one file's weights are mapped still
    except torch.OutOfMemoryError:
        raise InputError(f"--model: its weights do not fit on {device}; --quantize or --offload need less memory, "
                         "in train.py --fsdp too (train.py --plan says how much)")

# ---- LoRA: y = W x + (alpha / r) B A x; B is zero at first, so that a training starts at the base model --------------

def find_layers(transformer, names):
    """--lora_targets -> peft.LoraConfig's target_modules and exclude_modules. InputError for a name that no layer has,
    which peft ignores as long as another one fits."""
    # a layer is meant by the end of its name: net.2 is the second linear layer of both MLPs of each block
    linears = [name for name, m in transformer.named_modules() if isinstance(m, torch.nn.Linear)]
    attention = "to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj to_add_out".split()
    presets = {"attention": attention, "all-linear": attention + "img_mod.1 txt_mod.1 net.0.proj net.2".split()}
    targets = [end for name in names for end in presets.get(name, [name])]
    for end in targets:
        if not any(f".{name}".endswith(f".{end}") for name in linears):
            raise InputError(f"--lora_targets {end}: no linear layer of that name; there are "
                             f"{' '.join(presets['all-linear'])}, img_in, txt_in, norm_out.linear, proj_out")
    # the text stream of the last block is never read: a LoRA there would get no gradient
    last = len(blocks_of(transformer)) - 1
    dead = rf"transformer_blocks\.{last}\.(attn\.add_q_proj|attn\.to_add_out|txt_mlp\..*)"
    return dict(target_modules=targets, exclude_modules=dead)

def add_lora(transformer, **config):
    """A new LoRA with fp32 weights for training; config: LoraConfig's arguments -> {name: parameter}."""
    config = LoraConfig(**config)
    # peft's own layer computes in fp32, also on a bf16 base; this is its documented way to bring another one
    config._register_custom_module({torch.nn.Linear: lora_linear.LoraLinear})
    transformer.add_adapter(config)
    cast_training_params(transformer, torch.float32)
    lora_linear.share_casts(blocks_of(transformer))
    return {name: p for name, p in transformer.named_parameters() if p.requires_grad}

# ---- LoRA files: library/lora/lora_file.py reads one into a Lora -----------------------------------------------------

def check_fit(transformer, state, path):
    """InputError unless each tensor of this state dict fits a layer of the model."""
    modules, wrong = dict(transformer.named_modules()), []
    for key, matrix in state.items():
        layer, half = PLAIN.fullmatch(key).groups()
        side, width = ("in_features", matrix.shape[1]) if half == "A" else ("out_features", matrix.shape[0])
        has = getattr(modules.get(layer), side, None) # only linear layers know their sides
        if has != width:
            wrong.append(f"{key} is for {width} {side}, and the model has {has or 'no such linear layer'}")
    if wrong:
        raise InputError(f"{path}: {len(wrong)} of {len(state)} tensors do not fit the model, for instance {wrong[0]}; "
                         "it was made for another one")

def load_lora(transformer, name, lora):
    """Adds a Lora to the transformer, as an adapter of this name."""
    # several LoRAs are wanted here, and a model without weights only tells whether they fit
    warnings.filterwarnings("ignore", "Already found a `peft_config`|for .* copying from a non-meta parameter")
    check_fit(transformer, lora.state, lora.path)
    config = with_prefix("transformer", config_of(lora))
    QwenImageEditPlusPipeline.load_lora_into_transformer(lora.state, transformer, adapter_name=name, metadata=config)

def load_loras(transformer, loras, scales=None):
    """Adds these [Lora] to the transformer, all active, each at its scale (default: 1) -> their adapters' names."""
    names = [f"lora{i}" for i in range(len(loras))]
    for name, lora in zip(names, loras):
        load_lora(transformer, name, lora)
    if names:
        transformer.set_adapters(names, scales)
    transformer.eval() # what is new is in training mode
    return names

def load_weights(transformer, state, path):
    """Fills the adapter "default" with the tensors of a Lora's state, bit for bit. path: its file, for an error."""
    check_fit(transformer, state, path)
    set_peft_model_state_dict(transformer, {k.removeprefix("transformer."): v for k, v in state.items()})

def save_lora(path, transformer, train):
    """Writes the adapter "default" for use, as library/lora/lora_file.py says: the scale goes into lora_B. If that
    changes lora_B, the entry `folded` has each layer's scale, for a training that goes on from this file. train: a
    dictionary of our own entries."""
    state, scales = get_peft_model_state_dict(transformer), scales_of(transformer)
    for layer, scale in scales.items():
        key = f"{layer}.lora_B.weight"
        state[key] = state[key] * scale # (not in place: it is the model's)
    if {*scales.values()} != {1.0}:
        train = train | dict(folded=scales)
    tensor_files.refuse_not_finite(path, state, "start a new run with a lower --lr (--pretrained_lora takes an earlier "
                                   "checkpoint)")
    write_lora(path, with_prefix("transformer", state), train)

# ---- sampling: what the stock pipeline computes ----------------------------------------------------------------------

@dataclass(frozen=True)
class Settings:
    """How one picture is generated: flags that count for it (SAMPLE_FLAGS explains them), and its seed."""
    negative_prompt: str
    num_inference_steps: int
    true_cfg_scale: float
    cfg_norm: bool # whether guidance keeps the norm of the conditional prediction
    sigmas: list | None # noise level of each step, before the shift; None: evenly spaced
    shift: float | None # None: the model's own, by size
    seed: int
    # the shape of a result; of a validation picture it is the target's
    height: int | None = None
    width: int | None = None
    size_from: int | None = None # which control gives it, from 1

def sampling_flags(args):
    """-> {name: value} of train.py's flags that Settings has, too, but for the seed."""
    return SAMPLING | {name: value for name, value in vars(args).items() if name in SAMPLING}

def text_keys_of(sample, settings):
    """-> keys of sample.texts that its picture needs: its prompt and, for true CFG, the negative one, with pictures."""
    keys = [(sample.prompts[0], True)]
    if settings.true_cfg_scale > 1:
        keys.append((settings.negative_prompt, True))
    return keys

@dataclass
class Job:
    """A picture to generate, for denoise."""
    noise: torch.Tensor # (I, 64) for the I tokens of the target: what the stock pipeline makes of this seed
    control_latent: torch.Tensor # (K, 64) for the K tokens of all controls
    prompt_embeds: list # of text_keys_of, each (T, 3584)
    img_shapes: list # [(1, h, w), ...] in tokens, the target first
    settings: Settings

def load_job(sample, settings, device, encoders=None):
    """A planned sample, Settings -> Job, from the cache, or encoded now by the pipeline `encoders`."""
    encoding = sample.encodings[0]
    controls = cache.load_latents(sample, encoding, encoders)["control_latent"]
    embeds = [cache.load_text(sample, key, encoders).to(device) for key in text_keys_of(sample, settings)]
    # stock fills (1, 1, 16, 2h, 2w), on the CPU, in the prompt's dtype; a token is 2x2 of these pixels
    _, h, w = encoding["img_shapes"][0]
    shape = 1, 16, 2 * h, 2 * w
    generator = torch.Generator().manual_seed(settings.seed)
    noise = randn_tensor((1, *shape), generator, torch.device(device), embeds[0].dtype)
    noise, = QwenImageEditPlusPipeline._pack_latents(noise, *shape)
    return Job(noise, controls.to(device), embeds, encoding["img_shapes"], settings)

def find_mu(img_len, scheduler_config):
    """How far the model shifts the timesteps of a target of so many tokens."""
    names = "base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"
    return calculate_shift(img_len, *[scheduler_config[name] for name in names])

def make_schedule(job, config):
    """-> this job's scheduler, with its timesteps from 1000 to 0. How far they are shifted depends on the target's
    number of tokens, unless `shift` fixes it as Qwen-Image-Lightning does: the same for every size, and not stretched
    to end at the same noise level."""
    shift, steps = job.settings.shift, job.settings.num_inference_steps
    mu = find_mu(len(job.noise), config)
    if shift:
        mu, config = math.log(shift), dict(config, shift_terminal=None)
    # a scheduler of its own, as it counts its steps
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    sigmas = job.settings.sigmas or np.linspace(1.0, 1 / steps, steps)
    scheduler.set_timesteps(device=job.noise.device, sigmas=sigmas, mu=mu)
    scheduler.set_begin_index(0) # or it would look its first timestep up, which waits for the GPU
    return scheduler

def run_in_packs(transformer, runs, max_tokens):
    """[(latents (I, C), prompt_embeds (T, J), timestep, img_shapes)] -> [prediction (I, C)], in forward passes of at
    most max_tokens tokens."""
    lengths = [len(latents) + len(prompt) for latents, prompt, _, _ in runs]
    preds = {} # packed by length, and put back in the order of the runs
    for pack in plan_packs(dict(enumerate(lengths)), max_tokens):
        latents, prompts, timesteps, img_shapes = zip(*[runs[r] for r in pack])
        found = run_packed(transformer, latents, prompts, torch.stack(timesteps), img_shapes)
        preds.update(zip(pack, found, strict=True))
    return [preds[r] for r in range(len(runs))]

@torch.no_grad()
def denoise(transformer, scheduler_config, jobs, max_tokens, bar=None):
    """From each job's noise to its latents (I, 64). The conditional and unconditional runs of all jobs go through the
    transformer together, at most max_tokens tokens a forward pass; jobs may differ in everything, the number of steps
    too. bar: a tqdm, one per job and step."""
    latents = [job.noise for job in jobs]
    schedulers = [make_schedule(job, scheduler_config) for job in jobs]
    # a step: the timestep of each job, or None if it has fewer steps and is done
    for step in zip_longest(*[scheduler.timesteps for scheduler in schedulers]):
        active = [j for j, t in enumerate(step) if t is not None]
        runs = []
        for j in active:
            rows = torch.cat([latents[j], jobs[j].control_latent])
            for prompt in jobs[j].prompt_embeds:
                runs.append((rows, prompt, step[j].to(rows.dtype) / 1000, jobs[j].img_shapes))
        preds = iter(run_in_packs(transformer, runs, max_tokens))
        for j in active:
            pred = next(preds)[:len(latents[j])] # what is predicted of the controls has no use
            if len(jobs[j].prompt_embeds) > 1:
                # classifier-free guidance; stock then scales each token back to the norm of the conditional run
                uncond = next(preds)[:len(latents[j])]
                guided = uncond + jobs[j].settings.true_cfg_scale * (pred - uncond)
                if jobs[j].settings.cfg_norm:
                    guided = guided * (pred.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
                pred = guided
            # Euler: x + (next sigma - sigma) * velocity, computed by stock's scheduler. Another sampler goes here
            latents[j] = schedulers[j].step(pred[None], step[j], latents[j][None]).prev_sample[0]
        if bar is not None:
            bar.update(len(active))
    return latents

@torch.no_grad()
def decode(vae, latents, img_shapes):
    """Packed latents (I, 64) -> (PIL image, None); or (None, the model that has computed NaN or Inf, "transformer" or
    "VAE"), as the picture would be black. If a whole picture does not fit into the memory, it and all later ones are
    decoded in tiles."""
    # (1, 16, 1, 2h, 2w): one frame, as the VAE knows videos
    _, h, w = img_shapes[0]
    z = QwenImageEditPlusPipeline._unpack_latents(latents[None], 16 * h, 16 * w, 8).to(vae.device, vae.dtype)
    mean, std = [torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std)]
    z = z / (1.0 / std).to(z) + mean.to(z) # in this order, for the stock pipeline's bits
    pixels = None
    with suppress(torch.OutOfMemoryError):
        pixels = vae.decode(z).sample
    if pixels is None: # not in an except block, which would keep what that attempt has made
        tell(f"warning: {vae.device} has too little memory to decode a whole picture; this one and the rest are "
             "decoded in tiles (--vae_device cpu decodes whole ones)", file=sys.stderr)
        torch.cuda.empty_cache()
        vae.decode = vae.tiled_decode # not enable_tiling, by which a training would encode in tiles too
        pixels = vae.decode(z).sample
    if not tensor_files.is_finite(pixels): # the VAE makes NaN of latents that are not finite
        return None, "VAE" if tensor_files.is_finite(latents) else "transformer"
    return VaeImageProcessor(16).postprocess(pixels[:, :, 0])[0], None

def generate_samples(transformer, vae, scheduler_config, requests, max_tokens, device, encoders=None,
                     share=slice(None), bar=None):
    """Yields (place in this list of requests, what `decode` returns), many at once. requests: [(planned sample,
    Settings)]; encoders: as for load_job. share: which of the packs this process generates. Without a VAE nothing is
    decoded, nor yielded."""
    lengths = []
    for sample, settings in requests:
        images = sum(h * w for _, h, w in sample.encodings[0]["img_shapes"])
        lengths.append(sum(images + sample.texts[key]["tokens"] for key in text_keys_of(sample, settings)))
    # these packs are the jobs that are in memory at once: denoise packs each of their steps anew, as they end at
    # different steps
    for pack in plan_packs(dict(enumerate(lengths)), max_tokens)[share]:
        jobs = [load_job(*requests[i], device, encoders) for i in pack]
        drawn = denoise(transformer, scheduler_config, jobs, max_tokens, bar)
        for i, job, latents in zip(pack, jobs, drawn, strict=True):
            if vae is not None:
                yield i, decode(vae, latents, job.img_shapes)

# ---- pictures --------------------------------------------------------------------------------------------------------

def save_png(image, path, *texts):
    """texts: as for encode_png. InputError if the disk is full, or if there is a file that is not ours."""
    common.write_file(path, encode_png(image, *texts), result_files.OURS)

# ==== the command line ================================================================================================

def find_geometry(args, loras):
    """The sizes to generate at: those of the flags, else those at which the first LoRA was trained, else stock's."""
    # tiny knows pictures of 160 pixels, and would be lost at a megapixel
    area = "native" if hub.is_tiny(args.model) else 1024 * 1024
    geometry = dict(target_pixels=area, control_pixels=area, upscale=True)
    for lora in reversed(loras): # the first one has the last word
        geometry |= lora.meta.get("train.geometry") or {}
    for name in geometry:
        if getattr(args, name) is not None:
            geometry[name] = getattr(args, name)
    return geometry | dict(target_pixels=[geometry["target_pixels"]]) # cache.plan_samples takes several

# ---- what is to be generated -----------------------------------------------------------------------------------------

def complete_settings(sample, args, shift_terminal):
    """-> Settings: the flags, and what the sample's own line of --jobs sets, which counts more; of several --seed the
    first. InputError for what makes no sense. shift_terminal: the scheduler's; with one a schedule needs two steps."""
    # the flags first, then the line's own fields, which replace them
    own = sample.job_fields
    where = f"{args.jobs or '--image'}: {sample.name}"
    values = dict(seed=args.seed[0], sigmas=args.sigmas)
    values |= {name: getattr(args, name) for name in SAMPLE_FLAGS}
    values |= {name: value for name, value in own.items() if name not in ("out", "line")}
    if "num_inference_steps" in own: # which replaces the command line's --sigmas
        if "sigmas" in own:
            raise InputError(f"{where}: both sigmas and num_inference_steps; leave one out")
        values["sigmas"] = None
    sigmas = values["sigmas"] or []
    if sigmas:
        values["num_inference_steps"] = len(sigmas)
    settings = Settings(**values)
    # what stock would fail at later, or silently do otherwise
    command_line.check_text(f"{where}: negative prompt", settings.negative_prompt)
    if not sample.controls:
        raise InputError(f"{where}: a picture without a control cannot be edited; leave it out")
    if (settings.size_from or 0) > len(sample.controls):
        raise InputError(f"{where}: size_from {settings.size_from}; give 1 to {len(sample.controls)}")
    if sigmas != sorted(set(sigmas), reverse=True):
        raise InputError(f"{where}: sigmas {sigmas}; give falling numbers")
    if settings.num_inference_steps == 1 and shift_terminal and not settings.shift:
        raise InputError(f"{where}: num_inference_steps 1; give 2 or more, or a shift")
    # a line may name its file, in --out_dir; a folder's picture has its subfolder there
    out = own.get("out", sample.name)
    if not common.is_inside((args.out_dir / out).parent, args.out_dir):
        raise InputError(f"{where}: out {out!r}; give a path below --out_dir")
    if "seed" in own and len(args.seed) > 1:
        raise InputError(f"{where}: its own seed, and --seed gives several; leave one out")
    return settings

def plan_requests(pipe, samples, geometry, args):
    """-> ([(planned sample, its Settings)] of all good samples, problems). geometry: as for cache.plan_sizes."""
    requests = []
    problems = []
    facts = dataset.remember_facts(samples, args.cache_dir)
    for sample in common.progress("planning", samples, unit="sample"):
        with common.collect_errors(problems):
            settings = complete_settings(sample, args, pipe.scheduler.config.shift_terminal)
            # each sample may have a size of its own, so the geometry is completed for each
            shape = dict(height=settings.height, width=settings.width, size_from=settings.size_from)
            planned = cache.plan_sample(pipe, sample, text_keys_of(sample, settings), geometry | shape,
                                        pipe.fingerprints, args, facts)
            requests.append((planned, settings))
    return requests, problems

@dataclass
class Picture:
    """A result: there is one for each sample, seed and scale."""
    sample: dataset.Planned
    settings: Settings
    strengths: tuple # of its LoRAs
    row: int # its sample's number
    title: str # what sets it apart in this row of a sheet
    key: str # a hash of all that decides it
    path: Path # the file for it

    def about(self, jobs):
        """-> what its file says of it, beside the command, which may make many. jobs: --jobs."""
        said = dict(prompt=self.sample.prompts[0], controls=self.sample.controls)
        said |= {name: value for name, value in vars(self.settings).items() if value is not None}
        if self.strengths:
            said["lora_scale"] = self.strengths
        if "line" in self.sample.job_fields:
            said["line"] = f"{jobs}:{self.sample.job_fields['line']}"
        return said

def plan_pictures(requests, args, models, loras):
    """-> [Picture]. requests: plan_requests's; models: {part: hash} of transformer and scheduler; loras: hashes of
    args.lora, as one that is trained on is another one."""
    pictures = []
    for (row, (sample, settings)), seed, scale in product(enumerate(requests), args.seed, args.scales):
        if len(args.seed) > 1: # a line's own seed is the only one
            settings = replace(settings, seed=seed)
        strengths = tuple(lora_scale * scale for lora_scale in args.lora_scale)
        # its key: the encoded files stand for pictures, prompts, sizes, the encoders and VAE, and --dtype
        encoded = [file.stem for file in cache.files_of(sample)]
        deciding = {name: value for name, value in vars(settings).items() if name != "size_from"}
        key = common.content_key(files=encoded, **models, quantize=args.quantize, loras=[*zip(loras, strengths)],
                                 code=args.code, **deciding)
        # its title, and the end of its name, where there are several of a sample
        words = []
        end = ""
        if len(args.seed) > 1:
            words.append(f"seed {seed}")
            end += f"-s{seed}"
        if len(args.scales) > 1:
            words.append(f"LoRA x {scale:g}")
            end += f"-x{scale:g}"
        # its file: named by the user, or by its key
        path = result_files.result_path(args, sample, end, key)
        pictures.append(Picture(sample, settings, strengths, row, ", ".join(words) or "result", key, path))
    return pictures

# ---- generating ------------------------------------------------------------------------------------------------------

def generate(args, pipe, transformer_folder, transformer_file, loras, pictures, refuse_replaced):
    """Generates these pictures, many at once, and saves each when it is done -> problems: one that fails stops no
    others. refuse_replaced() raises InputError if code or models are not what the pictures' keys say."""
    problems = []
    try:
        transformer = load_transformer(transformer_folder, args.dtype, file=transformer_file)
        adapters = load_loras(transformer, loras)
        for lora in loras:
            lora.state = None # frees its tensors, as the adapters move to the device
        common.say(f"LoRA: {', '.join(args.lora) or 'none, this is the base model'}")
        # behind the LoRAs, which move to the device with their blocks
        place_transformer(transformer, args.transformer_device, args.quantize, args.offload)
    finally: # as it was mapped until now, and as a file that does not fit may have changed, too
        refuse_replaced()
    # the encoders have left the devices; only the VAE comes back, to decode
    cache.load_encoder(pipe, "vae", args)
    vae = pipe.vae.to(args.vae_device) # with its decoder
    t0 = monotonic()
    # the bar counts steps, as a picture of the real model takes half a minute
    bar = common.progress(f"{len(pictures)} pictures", unit="step",
                          total=sum(p.settings.num_inference_steps for p in pictures))
    for strengths in dict.fromkeys(p.strengths for p in pictures): # two of a LoRA cannot share a forward pass
        chosen = [p for p in pictures if p.strengths == strengths]
        if adapters:
            active = {name: strength for name, strength in zip(adapters, strengths) if strength} # 0 * Inf would be NaN
            transformer.set_adapters(list(active), list(active.values()))
        for i, (image, broken) in generate_samples(transformer, vae, pipe.scheduler.config,
                                                   [(p.sample, p.settings) for p in chosen], args.max_tokens,
                                                   args.transformer_device, bar=bar):
            # saved as soon as it is decoded: a kill costs the pictures at work, and no others
            picture = chosen[i]
            try:
                result_files.refuse_not_finite(picture.path, broken)
                save_png(image, picture.path, picture.key, picture.about(args.jobs))
                tell(f"{picture.path}: {image.width}x{image.height} | {picture.sample.prompts[0]}")
            except InputError as e: # NaN, or a full disk: other pictures may be good
                problems.append(str(e))
                tell(str(e), file=sys.stderr)
    bar.close()
    gib = devices.memory_of(args.transformer_device)
    common.say(f"pictures: {len(pictures) - len(problems)}, {monotonic() - t0:.1f} s, {gib:.1f} GiB")
    return problems

def main(args):
    devices.find_devices(args)
    check_file(args)
    devices.start_processes(args)
    first = common.rank() == 0

    # what to generate, at which sizes, with which models. LoRAs are read once, so they are what their hashes say.
    # Models are hashed before they are loaded (the sizes that the first LoRA wants are in the pictures' keys, too)
    loras = [read_lora(path) for path in args.lora]
    lora_hashes = [lora.hash for lora in loras]
    devices.refuse_differences("--lora", dict(sha256=lora_hashes)) # processes may be on several machines
    geometry = find_geometry(args, loras)
    # a bad sample is a line in `problems`, printed before anything slow; the good ones are drawn all the same
    samples, problems = dataset.read_samples(args)
    inputs = {path for s in samples for path in (*dataset.pictures_of(s), *s.overlays.values())}
    folder = cache.find_model(args.model, cache.ENCODERS)
    transformer_folder, transformer_file = find_transformer(args)
    parts = dict(transformer=Path(transformer_file or transformer_folder / "transformer"),
                 scheduler=folder / "scheduler")
    if transformer_file:
        parts["config"] = transformer_folder / "transformer/config.json"
    hash_part = partial(cache.hash_part, cache_dir=args.cache_dir)
    models = common.on_first_process(lambda: dict(zip(parts, map(hash_part, parts.values()))))

    def refuse_replaced(): # on each process, where the same files may lie elsewhere. (LoRAs are in memory, not mapped)
        if result_files.drawing_hash(__file__) != args.code:
            raise InputError("predict.py: the code that draws has changed since this command began; run it again")
        cache.refuse_changed_parts(parts.values(), models.values(), args.cache_dir)

    # a LoRA on another base than its own is allowed, with a line
    here = lora_file.base_of(args.model, args.transformer, folder, transformer_folder)
    lora_file.warn_other_base(loras, here)
    pipe = cache.load_pipeline(folder, args.cache_dir)
    requests, wrong = plan_requests(pipe, samples, geometry, args)
    if first:
        common.print_problems(sample_checks.result_warnings(args, requests))

    # a picture for each sample, seed and scale; those that are there already, whole, stay
    pictures = plan_pictures(requests, args, models, lora_hashes)

    def find_finished():
        result_files.refuse_names(pictures, inputs, args.jobs or "--image")
        return {p.path for p in pictures if is_finished(p.path, p.key)}

    # only the first process looks, as another one may have begun to write by the time that the next one looks
    finished = common.on_first_process(find_finished)
    missing = list({p.path: p for p in pictures if p.path not in finished}.values())
    if missing:
        common.on_first_process(lambda: disk.try_cache(args))
        common.on_first_process(lambda: disk.try_out(args.out_dir))
    if finished:
        common.say(f"{args.out_dir}: {len(finished)} of {len(pictures)} pictures are there already, with the same "
                   "settings")

    # encode everything, let the encoders go, then generate this process's share of what could be encoded
    chosen = [p.sample for p in missing]
    cache.keep_from_prune(chosen)
    failed = cache.encode_samples(pipe, chosen, args, verify=True)
    problems += [*wrong, *dict.fromkeys(failed.values())]
    if first:
        common.print_problems(problems)
    # of what could be encoded each process draws every n-th picture
    encoded = [p for p in missing if failed.keys().isdisjoint(cache.files_of(p.sample))]
    mine = encoded[common.rank()::common.world()]
    try:
        if mine:
            problems += generate(args, pipe, transformer_folder, transformer_file, loras, mine, refuse_replaced)
    except torch.OutOfMemoryError:
        raise InputError(f"--max_tokens {args.max_tokens}: out of memory; lower it, or give --quantize, --offload "
                         "or, where it decodes, --vae_device cpu. the same command continues with what is missing")
    common.gather_objects(None) # waits for all: torchrun would end the others when one returns 1
    if first and missing:
        # a contact sheet of the first rows, with the pictures of earlier calls, if there are several
        drawn = [p for p in pictures if p.row < contact_sheets.SHEET_ROWS and is_finished(p.path, p.key)]
        if len(drawn) > 1:
            key = common.content_key(pictures=[p.key for p in drawn])
            path = result_files.keyed_path(args.out_dir, "sheet", key)
            save_png(contact_sheets.results_sheet(drawn), path, key)
            common.say(f"{path}: {len(drawn)} of them side by side")
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(1 if problems else 0)

if __name__ == "__main__":
    main(args)
