"""
Edit pictures: control picture(s) and an instruction -> PNG, with the stock pipeline's numbers, and many jobs of mixed
sizes in one batch.

$ python predict.py                                    # embedded default: held-out toy pictures, with the newest LoRA
$ python predict.py --model Qwen/Qwen-Image-Edit-2509 --image cat.jpg --prompt "make it snow" --lora out/RUN
$ python predict.py --model ... --image person.png coat.png --prompt "the person wears the coat of picture 2"
$ python predict.py --model ... --jobs jobs.jsonl --out_dir edited # lines: {"image": ["a.jpg"], "prompt": "snow"}
$ python predict.py --model ... --transformer_device cuda:0 --text_encoder_device cuda:1 --vae_device cuda:1 ...

Where --jobs finds a picture that was made with the same settings, it leaves it: a second call draws what is missing.
A job's line may also set out, negative_prompt, height, width, seed, num_inference_steps and true_cfg_scale. Conditional
and unconditional runs of all jobs share the packs. Shape letters as in rope_patch.py.
"""
import argparse
import hashlib
import io
import json
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPlusPipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_shift, retrieve_timesteps
from diffusers.training_utils import cast_training_params
from diffusers.utils.torch_utils import randn_tensor
from peft.tuners import lora
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps, PngImagePlugin
from safetensors import SafetensorError
from tqdm import tqdm

from cache import (ENCODER_PARTS, InputError, TINY, add_model_flags, check_prompt, content_key, encode_image,
                   encode_prompt, find_model, fingerprint, fit_size, image_size, is_plus, load_encoders, load_part,
                   load_pipeline, number, parse_args, pixels, prompt_length, prompt_size, read_dataset, read_image,
                   read_tensors, read_text, sweep, write_file)
from rope_patch import patch_qwen_model_for_multi_resolution, plan_packs, run_packed

LORA_FILE = "pytorch_lora_weights.safetensors" # the name that stock load_lora_weights looks for in a folder

# ---- models ----------------------------------------------------------------------------------------------------------

def load_transformer(folder, dtype, device):
    """The frozen transformer, patched so that a batch may hold any sizes."""
    transformer = load_part(QwenImageTransformer2DModel, folder, "transformer", dtype)
    return patch_qwen_model_for_multi_resolution(transformer).to(device)

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
    """A LoRA file, or the one in this folder -> its path, which need not exist."""
    return Path(path, LORA_FILE) if Path(path).is_dir() else Path(path)

def read_lora(path):
    """LoRA file, or folder that holds one -> (state dict with transformer. keys, metadata). Keys of ComfyUI, kohya and
    peft files are converted by diffusers. InputError if it is no LoRA, has A without B, or holds NaN."""
    file = find_lora(path)
    if not file.is_file() or file.suffix != ".safetensors":
        raise InputError(f"{file}: no LoRA; want a .safetensors file, or a folder with {LORA_FILE}")
    try:
        with safetensors.safe_open(file, "pt") as f:
            meta = json.loads((f.metadata() or {}).get("lora_adapter_metadata", "{}"))
            raw = {k: f.get_tensor(k) for k in f.keys()}
        if not isinstance(meta, dict):
            raise ValueError("metadata is no dictionary")
        if "digest" in meta: # one of ours
            raw, meta = read_tensors(file, "lora_adapter_metadata")
        state = QwenImageEditPlusPipeline.lora_state_dict(raw)
    except (OSError, SafetensorError, ValueError, KeyError) as e:
        raise InputError(f"{file}: cannot be read as a LoRA ({str(e).splitlines()[0]}); take another file") from None
    if not all(k.startswith("transformer.") and ".lora_" in k for k in state) or not state:
        other = next((k for k in state if not k.startswith("transformer.") or ".lora_" not in k), "nothing")
        raise InputError(f"{file}: no LoRA of Qwen-Image: it holds {other}; want transformer.*.lora_A.weight")
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

def load_lora(transformer, path, scale=1.0, name="default"):
    """Adds a LoRA to the transformer -> its metadata. diffusers itself only warns, or says nothing, when keys fit
    nothing or in part; here that is an InputError with counts."""
    state, meta = read_lora(path)
    modules = dict(transformer.named_modules())
    missing, misfit = set(), []
    for key, value in state.items():
        module, kind = key.removeprefix("transformer.").rsplit(".lora_", 1)
        if module not in modules:
            missing.add(module)
            continue
        want = getattr(modules[module], "in_features" if kind == "A.weight" else "out_features", None)
        if want != value.shape[1 if kind == "A.weight" else 0]:
            misfit.append(f"{module} (got {tuple(value.shape)}, the model has {want})")
    if missing:
        raise InputError(f"{path}: {len(missing)} of {len(state) // 2} layers are not in this model, for instance "
                         f"{sorted(missing)[0]}; it was made for another one")
    if misfit:
        raise InputError(f"{path}: {len(misfit)} of {len(state)} matrices do not fit, for instance {misfit[0]}; it was "
                         "made for another model")
    try:
        QwenImageEditPlusPipeline.load_lora_into_transformer(state, transformer, adapter_name=name,
                                                             metadata=meta or None)
    except (TypeError, ValueError, KeyError, RuntimeError) as e:
        raise InputError(f"{path}: diffusers cannot load it ({str(e).splitlines()[0]}); take another file") from None
    transformer.set_adapters([name], [scale])
    return meta

# ---- sampling: what the stock pipeline computes ----------------------------------------------------------------------

def plan_job(pipe, job):
    """Fills in what can be known before any model runs: sizes, shapes and token counts (which decide the packs). As in
    stock, the last picture gives the target's aspect, and sides are rounded down to 16. (size_from: a dataset's job
    has a target of its own, whose size counts.)"""
    sizes = [image_size(path) for path in job.image]
    if not sizes:
        raise InputError(f"{job.out}: a picture without a control; predict.py edits pictures, so leave it out")
    if not is_plus(pipe) and len(sizes) > 1:
        raise InputError(f"{job.image[1]}: Qwen-Image-Edit v1 takes one picture; leave it out")
    if job.num_inference_steps < 2:
        raise InputError(f"{job.image[0]}: {job.num_inference_steps} steps; at least 2 are needed, as the schedule is "
                         "stretched between its first and its last")
    width, height = fit_size(image_size(job.size_from or job.image[-1]), job.target_pixels, job.upscale)
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

def encode_job(pipe, job, device):
    """Noise, control latents and prompt embeddings, on the transformer's device."""
    images = [read_image(path) for path in job.image]
    job.control_latent = torch.cat([encode_image(pipe, im, s) for im, s in zip(images, job.control_sizes)]).to(device)
    job.prompt_embeds = [encode_prompt(pipe, p, images, job.prompt_sizes).to(device) for p in job.prompts]
    shape = 1, 1, pipe.vae.config.z_dim, job.height // 8, job.width // 8
    noise = randn_tensor(shape, torch.Generator().manual_seed(job.seed), device, job.prompt_embeds[0].dtype)
    job.noise = pipe._pack_latents(noise, 1, *shape[2:])[0]

def set_schedule(job, config):
    """The job's own timesteps: their shift depends on the target's number of tokens."""
    mu = calculate_shift(len(job.noise), config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096),
                         config.get("base_shift", 0.5), config.get("max_shift", 1.15))
    job.scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    sigmas = np.linspace(1.0, 1 / job.num_inference_steps, job.num_inference_steps)
    job.timesteps, _ = retrieve_timesteps(job.scheduler, device=job.noise.device, sigmas=sigmas, mu=mu)
    job.scheduler.set_begin_index(0)

@torch.no_grad()
def denoise(transformer, scheduler_config, jobs, max_tokens, progress=False):
    """Euler steps from job.noise to job.latents, (I_0, 64), for all jobs at once; each forward pass takes at most
    max_tokens tokens. Jobs may differ in everything, the number of steps too."""
    for j in jobs:
        set_schedule(j, scheduler_config)
        j.latents = j.noise
    steps = range(max(len(j.timesteps) for j in jobs))
    for i in tqdm(steps, desc=f"{len(jobs)} jobs", unit=" steps", disable=not progress or None):
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

def save_png(image, path, settings=""):
    png, notes = io.BytesIO(), PngImagePlugin.PngInfo()
    notes.add_text("settings", settings)
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
                size_from=None)
TINY_SAMPLING = dict(true_cfg_scale=1.0) # tiny was not trained to go without a prompt
JOB_KEYS = dict(prompt=str, negative_prompt=str, out=str, height=int, width=int, seed=int, num_inference_steps=int,
                true_cfg_scale=(int, float))

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
    for n, line in enumerate(read_text(Path(path)).splitlines(), 1):
        try:
            if line.strip():
                row = json.loads(line)
                images = [row["image"]] if isinstance(row["image"], str) else row["image"]
                wrong = [k for k, v in row.items() if k != "image" and not isinstance(v, JOB_KEYS.get(k, ()))]
                if wrong or "prompt" not in row:
                    raise ValueError(f"field {(wrong or ['prompt'])[0]!r} is unknown, missing or of a wrong type")
                own = dict(out=f"{n:03d}-{Path(images[0]).stem}.png") | row
                jobs.append(SimpleNamespace(**defaults | own | dict(image=[Path(path).parent / i for i in images])))
        except (ValueError, KeyError, TypeError, IndexError) as e:
            problems.append(f'error: {path}:{n}: {e}; want {{"image": ["a.png"], "prompt": "..."}}')
    return jobs, problems

def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    # what to draw
    parser.add_argument("--image", nargs="+", type=Path, help="control picture(s)")
    parser.add_argument("--prompt", help="the instruction")
    parser.add_argument("--negative_prompt", help="what the unconditional run is told (default: one blank)")
    parser.add_argument("--jobs", help="jobs.jsonl, or a dataset folder: many pictures in one batch")
    parser.add_argument("--out", default="out.png", help="PNG of --image")
    parser.add_argument("--out_dir", default="out/predict", help="folder for the PNGs of --jobs")
    # how
    parser.add_argument("--num_inference_steps", type=number(int, 2), help="Euler steps; at least 2")
    parser.add_argument("--true_cfg_scale", type=float, help="at 1 or below no unconditional run, half the time")
    parser.add_argument("--height", type=number(int, 32), help="pixels (default: from the last picture's aspect)")
    parser.add_argument("--width", type=number(int, 32), help="pixels")
    parser.add_argument("--target_pixels", type=pixels, metavar="AREA",
                        help="area of the result, or native (default: as the LoRA was trained, else 1024*1024)")
    parser.add_argument("--control_pixels", type=pixels, metavar="AREA", help="likewise, of the pictures given")
    parser.add_argument("--upscale", action=argparse.BooleanOptionalAction, default=None,
                        help="enlarge smaller pictures to the area (default: as the LoRA was trained, else yes)")
    parser.add_argument("--lora", help="LoRA file or run folder (default: none; with --model tiny the newest run's)")
    parser.add_argument("--lora_scale", type=float, default=1.0, help="strength of the LoRA: 0 is none, 1 as trained")
    parser.add_argument("--max_tokens", type=number(int, 1), default=20_000,
                        help="tokens per forward pass; lower it if memory runs out")
    parser.add_argument("--vae_device", help="default: --device")
    parser.add_argument("--text_encoder_device", help="default: --device")
    parser.add_argument("--transformer_device", help="default: --device")
    runs = sorted(Path("out").glob(f"tiny-*/{LORA_FILE}"), key=lambda p: p.stat().st_mtime)
    no_job = not any(a.split("=")[0] in ("--image", "--jobs") for a in sys.argv[1:])
    parser.set_defaults(**SAMPLING)
    args = parse_args(parser, TINY_SAMPLING | dict(
        target_pixels="native", control_pixels="native", upscale=True, lora=runs[-1] if runs else None,
        jobs=str(Path(TINY["data"][0]).with_name("val")) if no_job else None))
    if bool(args.image) == bool(args.jobs) or bool(args.image) != (args.prompt is not None):
        parser.error("argument --image: give --image with --prompt, or --jobs")

    geometry = {name: getattr(args, name) for name in ("target_pixels", "control_pixels", "upscale")}
    if args.lora:
        trained = read_lora(args.lora)[1].get("train.geometry", {}) # so that inference sees the scale of training
        geometry = {name: trained.get(name) if value is None else value for name, value in geometry.items()}
    geometry = {name: (True if name == "upscale" else 1024 * 1024) if v is None else v for name, v in geometry.items()}
    defaults = {**geometry, **{name: getattr(args, name) for name in ("image", "prompt", "out", "seed", *SAMPLING)}}
    jobs, problems = ([SimpleNamespace(**defaults)], []) if args.image else read_jobs(args.jobs, defaults)
    out_dir = Path("") if args.image else Path(args.out_dir)

    folder = find_model(args.model, [*ENCODER_PARTS, "transformer"])
    pipe = load_pipeline(folder)
    # what decides a picture besides its job. the scripts too, for they are made to be edited
    hashed = lambda path: hashlib.sha256(Path(path).read_bytes()).hexdigest()
    common = dict(model=[fingerprint(folder / part) for part in (*ENCODER_PARTS, "transformer")], dtype=args.dtype,
                  lora=[hashed(find_lora(args.lora)), args.lora_scale] if args.lora else None,
                  scripts=[hashed(Path(__file__).with_name(f)) for f in ("predict.py", "cache.py", "rope_patch.py")])
    good, rows, outs = [], [], set()
    if args.jobs:
        sweep(out_dir)
    for job in jobs:
        try:
            if job.out in outs:
                raise InputError(f"{args.jobs}: two jobs write {job.out}; give each its own 'out'")
            plan_job(pipe, job)
            outs.add(job.out)
            job.settings = content_key(**common, **{k: v for k, v in vars(job).items() if k not in (
                "image", "size_from", "out", "name")}, pictures=[hashed(path) for path in job.image])
            done = finished(out_dir / job.out, job.settings) if args.jobs else None
            if not done:
                good.append(job)
            elif len(rows) < 24:
                rows.append(sheet_row(job) + [done])
        except InputError as e:
            problems.append(str(e))
    if len(outs) > len(good):
        print(f"{out_dir}: {len(outs) - len(good)} of {len(jobs)} pictures are there already, with the same settings")
    for p in problems:
        print(p, file=sys.stderr)
    if not good:
        sys.exit(1 if problems else 0)
    place = out_dir if args.jobs else Path(args.out).parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as e:
        raise InputError(f"{place}: cannot be written ({e.strerror}); choose another folder") from None

    load_encoders(pipe, folder, args.dtype, args.vae_device, args.text_encoder_device)
    pipe.vae.to(args.vae_device)
    transformer = load_transformer(folder, args.dtype, args.transformer_device)
    if args.lora:
        load_lora(transformer, args.lora, args.lora_scale)
        print(f"LoRA {args.lora} at scale {args.lora_scale}")

    def attempt(function, *given):
        """Whether function(*given) went well. A job that fails (a broken picture, a full disk) stops no others."""
        try:
            function(*given)
        except InputError as e:
            problems.append(str(e))
            print(e, file=sys.stderr)
            return False
        return True

    def prepare(job):
        encode_job(pipe, job, args.transformer_device)
        if len(rows) < 24:
            job.row = sheet_row(job) # now, for the pictures may be gone afterwards

    for pack in plan_packs([j.tokens for j in good], args.max_tokens):
        batch = [good[i] for i in pack if attempt(prepare, good[i])]
        if batch:
            denoise(transformer, pipe.scheduler.config, batch, args.max_tokens, progress=True)
        for job in batch:
            result = decode(pipe, job.latents, job.height, job.width)
            job.latents = job.control_latent = job.prompt_embeds = None # a thousand jobs' would fill the memory
            if attempt(save_png, result, out_dir / job.out, job.settings):
                print(f"{out_dir / job.out}: {job.width}x{job.height} | {job.prompt}")
                if len(rows) < 24:
                    rows.append(job.row + [result])
    if len(rows) > 1:
        save_png(contact_sheet(rows, ["control", "instruction", "result"]), out_dir / "sheet.png")
        print(f"{out_dir / 'sheet.png'}: {len(rows)} of them side by side")
    sys.exit(1 if problems else 0)

if __name__ == "__main__":
    main()
