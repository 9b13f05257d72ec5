"""
Converts caches of version 1.0 to the current version. A part of import_data.py, which is the command to run; its -h
tells what such a cache contains.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent)) # where the core scripts are
import library # first, so that no other folder is taken for one of our modules
import common
from common import InputError
from library.data import index_file
from library.data.dataset import Planned
from library.files import stray_files, tensor_files
from rope_patch import get_image_shapes_multi_resolution

def as_safetensors(path):
    """-> a command that converts a pickled dictionary of tensors and numbers without running the pickle's code."""
    code = ("import sys, torch, safetensors.torch as s; "
            "d = {k: torch.as_tensor(v).clone().contiguous() for k, v in torch.load(sys.argv[1], weights_only=True)"
            ".items()}; open(sys.argv[2], 'wb').write(s.save(d))") # (save_file takes no name that is not UTF-8)
    return common.shell_command(["python", "-c", code, path, path.with_suffix(".safetensors")])

def read_old(path):
    """Reads a dictionary of version 1.0, which may have padding and a batch dimension of 1 -> tensors, as cache.py
    stores them. InputError says what is wrong."""
    if path.suffix != ".safetensors":
        raise InputError(f"{path}: a pickle, which can run code when it is read; if it is a dictionary of tensors, "
                         f"convert it: {as_safetensors(path)}")
    if not path.is_file(): # a FIFO would hang
        raise InputError(f"{path}: no file; take it out of the folder")
    try:
        with tensor_files.open_tensors(path) as f:
            versions = {(f.metadata() or {}).get("version", "1.0")}
            tensors = {k: f.get_tensor(k) for k in f.keys()}
        if "version" in tensors: # some dictionaries contain their version, as a number
            versions.add(f"{float(tensors.pop('version')):.1f}")
        if versions != {"1.0"}:
            raise ValueError(f"version {', '.join(sorted(versions))}")
        if tensors.get("img_shapes", torch.empty(0)).ndim == 2: # one sample's shapes, (N, 3), lack the batch dimension
            tensors["img_shapes"] = tensors["img_shapes"][None]
        if not {"height", "width", "img_shapes"} & tensors.keys():
            raise ValueError("height and width are missing, and the tokens alone do not tell the shape: add both, in "
                             "pixels, as tensors")
        if batches := [len(t) for t in tensors.values() if t.ndim == 3 and len(t) != 1]:
            raise ValueError(f"a batch of {batches[0]} samples: write a file for each of them")
        shapes = get_image_shapes_multi_resolution(tensors, 1)[0]
        tensors = {k: t[0] if t.ndim == 3 or k.endswith("_mask") and t.ndim == 2 else t for k, t in tensors.items()}
        for name in {"prompt_embed", "empty_prompt_embed"} & tensors.keys(): # remove the padding
            tensors[name] = tensors[name][tensors.get(name + "s_mask", torch.ones(len(tensors[name]))).bool()]
            tensors[name + "s_mask"] = torch.ones(len(tensors[name]), dtype=torch.bool)
        rows = [tensors[name] for name in ("pixel_latent", "control_latent", "prompt_embed")]
        if raw := [list(t.shape) for t in rows[:2] if t.ndim != 2]:
            raise ValueError(f"latents of shape {raw[0]}: packed rows (tokens, 64) are wanted, of 2x2 pixels with 16 "
                             "channels")
        if len(shapes) == 1 and len(rows[1]) == len(rows[0]): # older caches have one size for both pictures
            shapes *= 2
        if any(len(shape) != 3 or min(shape) < 1 or shape[0] > 1 for shape in shapes):
            raise ValueError(f"shapes {shapes} instead of (1, height, width), in tokens")
        shapes = torch.tensor(shapes)
        areas, lengths = shapes.prod(-1).tolist(), [len(t) for t in (*rows[:2], tensors.get("edit_mask", rows[0]))]
        if lengths != [areas[0], sum(areas[1:]), areas[0]] or any(t.ndim != 2 for t in rows):
            raise ValueError(f"{lengths[:2]} tokens do not fit the shapes {shapes.tolist()}")
        if not all(t.is_floating_point() and t.isfinite().all() for t in rows) or not len(rows[2]):
            raise ValueError("latents or a prompt with NaN, Inf or numbers that are no floats, or an empty prompt")
        return tensors | dict(img_shapes=shapes)
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{path}: not a cache file of version 1.0 ({type(e).__name__}: {e}); encode the sample again")

PARTS = [("latents", "pixel_latent", "control_latent", "img_shapes", "edit_mask"), # folder and tensors of each new file
         ("text", "prompt_embed", "prompt_embeds_mask"), ("text", "empty_prompt_embed", "empty_prompt_embeds_mask")]

def convert_cache(paths, source, folder):
    """Converts these files, which lie in the folder `source` or are it, to a cache in `folder` -> (samples, problems).
    The files tell neither prompt nor model: the
    file's name serves as the prompt. Nor do they tell the areas: predict.py will generate at the stock area."""
    samples, problems = [], []
    for path in common.progress("converting", paths, unit=" files"):
        with common.collect_errors(problems):
            if path != source: # which the user has named
                stray_files.refuse_outside(path, source)
            tensors, name, files = read_old(path), path.stem, {}
            shapes = tensors["img_shapes"].tolist()
            sizes = [(16 * w, 16 * h) for _, h, w in shapes]
            for kind, first, *others in [part for part in PARTS if part[1] in tensors]:
                key = common.content_key(old=common.file_hash(path), part=first)
                files[first] = folder / kind / f"{key}.safetensors"
                about = dict(version=tensor_files.VERSION, key=key, sizes=sizes, sources=[str(path)])
                tensor_files.write_tensors(files[first], {k: tensors[k] for k in [first, *others] if k in tensors},
                                           about)
            texts = {(prompt, True): dict(tokens=len(tensors[part]), file=files[part])
                     for prompt, part in ((name, "prompt_embed"), ("", "empty_prompt_embed")) if part in files}
            encodings = [dict(img_shapes=shapes, file=files["pixel_latent"])]
            samples.append(Planned(name, path.parent.name, [], [name], contents={}, sizes=sizes, prompt_sizes=[],
                                   encodings=encodings, texts=texts))
    geometry = dict(target_pixels=[1024 * 1024], control_pixels=1024 * 1024, upscale=True)
    index = folder / f"{paths[0].resolve().parent.name}.json"
    index_file.write_index(index, samples, geometry, fingerprints={})
    return samples, problems
