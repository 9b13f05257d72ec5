"""
Caches of version 1.0 become today's: a part of import_data.py, which is the command and tells what such a folder holds.
"""
import shlex
import sys
from pathlib import Path

import safetensors
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent)) # where the core scripts are
import cache
import common
from common import InputError, Sample
from rope_patch import get_image_shapes_multi_resolution

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl") # all but the first are pickles, which are refused

def as_safetensors(path):
    """A command that turns a pickled dictionary of tensors and numbers into safetensors, without running its code."""
    code = ("import sys, torch, safetensors.torch as s; "
            "d = {k: torch.as_tensor(v).clone().contiguous() for k, v in torch.load(sys.argv[1], weights_only=True)"
            ".items()}; s.save_file(d, sys.argv[2])")
    return shlex.join(["python", "-c", code, str(path), str(path.with_suffix(".safetensors"))])

def read_old(path):
    """A dictionary of version 1.0, perhaps with pads and a batch dimension of 1 -> tensors as cache.py has them."""
    if path.suffix != ".safetensors":
        raise InputError(f"{path}: a pickle, which can run code when it is read; convert a dictionary of tensors by: "
                         + as_safetensors(path))
    try:
        with safetensors.safe_open(path, "pt") as f:
            versions = {(f.metadata() or {}).get("version", "1.0")}
            tensors = {k: f.get_tensor(k) for k in f.keys()}
        if "version" in tensors: # a number that stood in the dictionary
            versions.add(f"{float(tensors.pop('version')):.1f}")
        if versions != {"1.0"}:
            raise ValueError(f"version {', '.join(sorted(versions))}")
        if tensors.get("img_shapes", torch.empty(0)).ndim == 2: # one sample's own, (N, 3), without a batch dimension
            tensors["img_shapes"] = tensors["img_shapes"][None]
        if not {"height", "width", "img_shapes"} & tensors.keys():
            raise ValueError("it has no height and width, and tokens alone may have any shape: add both, in pixels, "
                             "as tensors")
        if batches := [len(t) for t in tensors.values() if t.ndim == 3 and len(t) != 1]:
            raise ValueError(f"a batch of {batches[0]} samples; want a file for each")
        shapes = get_image_shapes_multi_resolution(tensors, 1)[0]
        tensors = {k: t[0] if t.ndim == 3 or k.endswith("_mask") and t.ndim == 2 else t for k, t in tensors.items()}
        for name in [name for name in ("prompt_embed", "empty_prompt_embed") if name in tensors]: # pads go
            tensors[name] = tensors[name][tensors.get(name + "s_mask", torch.ones(len(tensors[name]))).bool()]
            tensors[name + "s_mask"] = torch.ones(len(tensors[name]), dtype=torch.bool)
        rows = [tensors[name] for name in ("pixel_latent", "control_latent", "prompt_embed")]
        if len(shapes) == 1 and len(rows[1]) == len(rows[0]): # of the time when both were resized to one size
            shapes *= 2
        if any(len(shape) != 3 or min(shape) < 1 or shape[0] > 1 for shape in shapes):
            raise ValueError(f"shapes {shapes}; want (1, height, width), in tokens")
        shapes = torch.tensor(shapes)
        areas, lengths = shapes.prod(-1).tolist(), [len(t) for t in (*rows[:2], tensors.get("edit_mask", rows[0]))]
        if lengths != [areas[0], sum(areas[1:]), areas[0]] or any(t.ndim != 2 for t in rows):
            raise ValueError(f"{lengths[:2]} tokens for {shapes.tolist()}")
        if not all(t.is_floating_point() and t.isfinite().all() for t in rows) or not len(rows[2]):
            raise ValueError("no numbers, NaN or Inf in the latents or the prompt, or an empty prompt")
        return tensors | dict(img_shapes=shapes)
    except (OSError, safetensors.SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as e:
        raise InputError(f"{path}: no version 1.0 cache file ({type(e).__name__}: {e}); encode it again")

PARTS = [("latents", "pixel_latent", "control_latent", "img_shapes", "edit_mask"), # a file's folder and tensors
         ("text", "prompt_embed", "prompt_embeds_mask"), ("text", "empty_prompt_embed", "empty_prompt_embeds_mask")]

def convert_cache(paths, folder):
    """-> (samples, problems). The files name no prompts and no model; predict.py will draw at the stock area."""
    samples, problems = [], []
    for path in tqdm(paths, desc="converting", unit=" files", disable=None, leave=False):
        try:
            tensors, name, files = read_old(path), path.stem, {}
            shapes = tensors["img_shapes"].tolist()
            sizes = [(16 * w, 16 * h) for _, h, w in shapes]
            for kind, first, *others in [part for part in PARTS if part[1] in tensors]:
                key = common.content_key(old=common.file_hash(path), part=first)
                files[first] = folder / kind / f"{key}.safetensors"
                common.write_tensors(files[first], {k: tensors[k] for k in [first, *others] if k in tensors},
                                    dict(version=common.VERSION, key=key, sizes=sizes, sources=[str(path)]))
            texts = {(prompt, True): dict(tokens=len(tensors[part]), file=files[part])
                     for prompt, part in ((name, "prompt_embed"), ("", "empty_prompt_embed")) if part in files}
            encodings = [dict(img_shapes=shapes, file=files["pixel_latent"])]
            samples.append(Sample(name, path.parent.name, [], [name], sizes=sizes, encodings=encodings,
                                  texts=texts))
        except InputError as e:
            problems.append(str(e))
    geometry = dict(target_pixels=[1024 * 1024], control_pixels=1024 * 1024, upscale=True)
    cache.write_index(folder / f"{paths[0].resolve().parent.name}.json", samples, geometry, fingerprints={})
    return samples, problems
