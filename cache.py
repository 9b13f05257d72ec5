"""
Encode a dataset of before/after pictures once, so that training needs only the transformer.

Reads folders, or manifests (metadata.jsonl, .json or .csv: target, control, prompt, mask; paths relative to it):
    data/target/cat.png     data/target/cat.txt         the picture wanted and the instruction that asks for it; several
                                                        lines: several wordings, of which each step draws one
    data/control/cat.png    data/control/cat_1.png ...  the picture given; further ones, any count, any sizes
    data/mask/cat.png                                   optional: white = the edited region
Other trainers' names for the same are in FOLDERS and COLUMNS below. Hugging Face's parquet files are exported once.
Writes CACHE_DIR/latents/*.safetensors, text/*.safetensors (named by a hash of all that decides their content, so that a
second run encodes only what changed) and index.json, which joins them to the samples.

$ python cache.py                                                     # the toy dataset of the embedded default
$ python cache.py --model Qwen/Qwen-Image-Edit-2509 --data photos     # yours
$ python cache.py --model ... --data photos --vae_encoder_device cuda:0 --text_encoder_device cuda:1
$ torchrun --nproc_per_node=4 cache.py --model ... --data photos      # four processes share the work
$ python cache.py --model ... --data photos drawings --repeats 1 5 --reg_data faces  # mixed; faces: pictures alone
$ python cache.py --model ... --data photos --report                  # looks for bad pairs; loads no model

train.py calls the same functions; run this one alone to check a dataset, or to encode on another machine.
"""
import argparse
import csv
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import unicodedata
import warnings
from datetime import timedelta
from pathlib import Path

import diffusers
import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from accelerate import init_empty_weights
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE, calculate_dimensions
from PIL import Image, ImageOps
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import BatchFeature, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from rope_patch import get_image_shapes_multi_resolution

VERSION = "2.0" # of the cache files
PREPROCESSING = 1 # part of every key: count it up when pictures or prompts are prepared in another way
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
OTHER_SUFFIXES = (".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl") # not read, but named
MAX_PIXELS = 100_000_000 # a larger picture is refused before it is decoded
LAYOUT = ("expected target/NAME.png, target/NAME.txt and control/NAME.png, or metadata.jsonl / .json / .csv with "
          "columns target, control, prompt")
# what others call it. folders: also musubi-tuner, ai-toolkit, qwen-image-finetune
FOLDERS = dict(target=("target", "targets", "target_images", "training_images", "images"),
               control=("control", "controls", "control_images"), mask=("mask", "masks", "mask_images"))
# columns: with or without path_ before, _path or _file_name behind; of controls also with a number, from 0 or 1
COLUMNS = dict(
    target=("target", "target_image", "target_img", "image", "output", "output_image", "edited_image", "file_name"),
    control=("control", "control_image", "control_images", "edit_image", "edit_images", "source", "source_image",
             "source_img", "input", "input_image", "original_image", "conditioning_image"),
    mask=("mask", "mask_image", "mask_img", "edit_mask", "control_mask"),
    prompt=("prompt", "caption", "text", "instruction", "edit_prompt", "edit_instruction"))

transformers.utils.logging.disable_progress_bar() # a bar for each of three small models would hide ours

class InputError(SystemExit): # so that a script ends with this one line and status 1, without a traceback
    """Something of the user's is wrong: InputError('<file or flag>: <what is wrong>; <what to do>')."""

    def __init__(self, message):
        super().__init__("error: " + message.replace("\n", "\\n")) # names may hold anything

# ---- flags that train.py has too -------------------------------------------------------------------------------------

# defaults that come with --model tiny
TINY = dict(data=[str(Path(__file__).with_name("tiny") / "data")], target_pixels=["native"], control_pixels="native")

def pixels(text):
    """'native', 1048576 or 1024*1024 -> 'native' or an area in pixels."""
    if text == "native":
        return text
    area = math.prod(int(n) for n in re.split(r"[*x]", text)) if re.fullmatch(r"\d+([*x]\d+)?", text) else 0
    if area < 32 * 32:
        raise argparse.ArgumentTypeError(f"{text!r} is no area; give 1048576, 1024*1024 or native")
    return area

def number(kind, low, high=float("inf")):
    """For argparse's type=: an int or a float from low to high; anything else ends the script with status 2."""
    def parse(text):
        if not low <= (value := kind(text)) <= high: # False for nan too
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value
    parse.__name__ = kind.__name__ # argparse says "invalid int value"
    return parse

def add_model_flags(parser):
    parser.add_argument("--model", default="tiny", help="hub id or folder of Qwen-Image-Edit, -2509 or -2511")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="of the frozen models and the cache (default: bfloat16 on CUDA, float32 on CPU)")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu; under torchrun one per process")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random")

def add_data_flags(parser):
    parser.add_argument("--data", nargs="+", metavar="DATA",
                        help="dataset folders, or manifests (metadata.jsonl); train.py: none for the cache alone")
    parser.add_argument("--repeats", type=number(int, 1), nargs="+", metavar="N",
                        help="how often an epoch has each --data, one number each: more for a small one (default: 1)")
    parser.add_argument("--reg_data", nargs="+", default=[], metavar="DIR",
                        help="folders of NAME.png + NAME.txt without controls: text-to-image pictures that are trained "
                             "beside the edits, so that the model does not forget (default: none)")
    parser.add_argument("--cache_dir", help="where encoded samples go (default: cache/<model>-<data>)")
    parser.add_argument("--target_pixels", type=pixels, nargs="+", default=[1024 * 1024], metavar="AREA",
                        help="area of the target; several: each step draws one; native: keep each picture's size")
    parser.add_argument("--control_pixels", type=pixels, default=1024 * 1024, metavar="AREA",
                        help="likewise, of controls")
    parser.add_argument("--upscale", action=argparse.BooleanOptionalAction, default=True,
                        help="enlarge smaller pictures to the area, as the stock pipeline does")
    parser.add_argument("--max_sequence_length", type=number(int, 1), default=1024,
                        help="tokens of a caption; a longer one is an error, nothing is cut silently")
    parser.add_argument("--skip_bad", action=argparse.BooleanOptionalAction, default=False,
                        help="go on without the samples that have an error")
    parser.add_argument("--vae_encoder_device", help="default: --device")
    parser.add_argument("--text_encoder_device", help="default: --device")
    add_quantize_flag(parser, "--quantize_text_encoder", "the text encoder's linear layers, 16 GB in bf16")

def add_quantize_flag(parser, name, what):
    parser.add_argument(name, choices=["none", "int8", "fp8", "nf4"], default="none",
                        help=f"{what}: int8 or fp8 (half the memory of bf16) or nf4 (a quarter; pip install "
                             "bitsandbytes)")

class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action): # a default that is None is explained in the help itself
        return action.help if action.default is None or "default" in action.help else super()._get_help_string(action)

def parse_args(parser, tiny):
    """parser.parse_args(), where --model tiny (the default) brings the defaults in `tiny`; devices are filled in."""
    parser.formatter_class = HelpFormatter
    for stream in (sys.stdout, sys.stderr): # a file name that is no UTF-8 must not end a run
        stream.reconfigure(errors="backslashreplace")
    parser.epilog = f"With --model tiny these defaults count: {tiny}"
    model = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    model.add_argument("--model", default="tiny")
    if model.parse_known_args()[0].model == "tiny" and not {"-h", "--help"} & set(sys.argv):
        parser.set_defaults(**tiny)
    args = parser.parse_args()
    if getattr(args, "repeats", None) and len(args.repeats) != len(args.data or ()):
        parser.error(f"argument --repeats: {len(args.repeats)} for {len(args.data or ())} --data; give one number each")
    if args.device == "cuda" or (args.device is None and torch.cuda.is_available()):
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" # each process its own
    args.device = args.device or "cpu"
    for name, value in vars(args).items():
        if name.endswith("device"):
            setattr(args, name, value or args.device)
            try:
                torch.empty(0, device=value or args.device)
            except (RuntimeError, AssertionError) as e:
                parser.error(f"argument --{name}: {value or args.device!r} cannot be used ({str(e).splitlines()[0]})")
    if args.device.startswith("cuda"):
        torch.cuda.set_device(args.device) # where NCCL works
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    return args

# ---- files: written whole or not at all, checked when read -----------------------------------------------------------

HOST = re.sub(r"\W", "", os.uname().nodename) # containers may all have the same process numbers

def write_file(path, data):
    """Bytes beside the target, fsync, rename, fsync of the folder: after a kill or power loss there is the old file or
    the new one, never a part. InputError if the disk is full or may not be written."""
    path = Path(path)
    tmp = path.with_name(f".tmp-{os.getpid()}-{HOST}-{path.name}.part") # glob("*.safetensors") finds hidden files
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(tmp, "wb") as f: # an old file of this name is what a dead process of our number left
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(tmp, path)
        except BaseException:
            tmp.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as e:
        raise InputError(f"{path}: {len(data):,} bytes cannot be written ({e.strerror}); free some space, or mend the "
                         "folder's permissions, and run again") from None

def check_writable(folder, remedy):
    """Makes the folder. InputError if no file can be written in it: it may be there and be read-only."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise InputError(f"{folder}: cannot be written ({e.strerror}); {remedy}") from None

def sync_folder(path):
    """A rename is safe from power loss only when the folder is on the disk too."""
    folder = os.open(path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)

def sweep(folder):
    """Deletes the unfinished files of write_file whose process is dead, or (of other machines) that are an hour old."""
    for tmp in Path(folder).glob(".tmp-*"):
        of = re.match(rf"\.tmp-(\d+)-{HOST}-", tmp.name)
        try:
            dead = time.time() - tmp.stat().st_mtime > 3600
            if of and not dead:
                os.kill(int(of[1]), 0) # signal 0 only asks
        except ProcessLookupError:
            dead = True
        except OSError: # another user's process; or the file is gone meanwhile
            dead = False
        if dead:
            tmp.unlink(missing_ok=True)

NO_DIGEST = "0" * 64

def write_tensors(path, tensors, meta, meta_key="json"):
    """A safetensors file that carries the sha256 of all its bytes (read with 64 zeros in the digest's place). Metadata
    is one JSON string, because safetensors orders several metadata keys at random. Tensors go to the CPU."""
    tensors = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    data = safetensors.torch.save(tensors, {meta_key: json.dumps({"digest": NO_DIGEST, **meta})})
    digest = hashlib.sha256(data).hexdigest()
    write_file(path, data.replace(NO_DIGEST.encode(), digest.encode(), 1))

def read_tensors(path, meta_key="json", key=None):
    """-> (tensors, metadata). InputError if the file is no safetensors file, if a bit of it has changed since
    write_tensors, or if it holds other content than `key`. Never unpickles."""
    fix = "cache.py --verify encodes it again" if key else "it is damaged; take another copy"
    try:
        data = Path(path).read_bytes()
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        meta = json.loads(header["__metadata__"][meta_key])
        digest = meta.pop("digest").encode()
    except FileNotFoundError:
        raise InputError(f"{path}: missing; run cache.py again") from None
    except (OSError, SafetensorError, KeyError, ValueError, AttributeError, TypeError) as e:
        raise InputError(f"{path}: no checked safetensors file ({type(e).__name__}: {e}); {fix}") from None
    if hashlib.sha256(data.replace(digest, NO_DIGEST.encode(), 1)).hexdigest().encode() != digest:
        raise InputError(f"{path}: content does not match its digest; {fix}")
    if key is not None and meta.get("key") != key:
        raise InputError(f"{path}: holds {meta.get('key')}, not what its name says; {fix}")
    return tensors, meta

# ---- dataset ---------------------------------------------------------------------------------------------------------

def read_datasets(args):
    """--data and --reg_data -> (items, problems) of all; names begin with their root's where there are several."""
    roots = [*args.data, *args.reg_data]
    labels = [root_name(root) for root in roots]
    labels = labels if len(set(labels)) == len(roots) else list(map(str, roots))
    items, problems = [], []
    for n, root in enumerate(roots):
        found, wrong = read_dataset(root, alone=n >= len(args.data))
        for item in found:
            item["name"] = f"{labels[n]}/{item['name']}" if len(roots) > 1 else item["name"]
            item["repeats"] = args.repeats[n] if args.repeats and n < len(args.data) else 1
        items, problems = items + found, problems + wrong
    return items, problems

def root_name(data):
    """A manifest goes by its folder's name."""
    data = Path(data).resolve()
    return data.parent.name if data.is_file() else data.name

def read_dataset(data, alone=False):
    """Folder or manifest -> (items, problems): dicts of name, target, controls, mask, prompts; and one line for
    everything that is wrong. No picture is opened yet. InputError if there is no dataset at all. With `alone` the
    pictures of a folder have no controls."""
    data = Path(data)
    if data.is_dir():
        manifests = [data / f"metadata{s}" for s in (".jsonl", ".json", ".csv") if (data / f"metadata{s}").is_file()]
        if len(manifests) == 1 and (alone or not (find_folder(data, "target") and find_folder(data, "control"))):
            data = manifests[0]
        elif not alone and not find_folder(data, "target"):
            held = ", ".join(sorted(p.name for p in data.iterdir())[:5]) or "nothing"
            raise InputError(f"{data}: {'two manifests' if manifests else f'no dataset, it holds {held}'}; {LAYOUT}")
    if not data.exists():
        raise InputError(f"{data}: does not exist; {LAYOUT}")
    items, problems = read_folder(data, alone) if data.is_dir() else read_manifest(data, alone)
    if not items and not problems:
        raise InputError(f"{data}: no pictures in it; {LAYOUT}")
    return items, problems

def find_folder(data, role):
    """data/target under the name it has here, or None. InputError if there are two."""
    found = [data / name for name in FOLDERS[role] if (data / name).is_dir()]
    if len(found) > 1:
        raise InputError(f"{found[1]}: means the same as {found[0].name}/; keep one of them")
    return found[0] if found else None

unique = lambda values: list(dict.fromkeys(values))

def find_files(folder, suffixes):
    """Files below `folder` -> {stem relative to it: [paths]}, sorted. Stems are NFC, so that names from macOS match."""
    found = {}
    for root, dirs, names in os.walk(folder):
        dirs.sort()
        for name in sorted(names):
            path = Path(root, name)
            if path.suffix.lower() in suffixes and not name.startswith("."):
                stem = path.relative_to(folder).with_suffix("").as_posix()
                found.setdefault(unicodedata.normalize("NFC", stem), []).append(path)
    return dict(sorted(found.items()))

def read_folder(data, alone):
    roots = [data] if alone else [find_folder(data, role) or data / role for role in FOLDERS]
    targets, controls, masks = [find_files(root, SUFFIXES) for root in roots] + [{}] * (3 - len(roots))
    captions = find_files(roots[0], (".txt",))
    others = [find_files(root, OTHER_SUFFIXES) for root in roots]
    unused = {path: stem for found in (targets, controls, masks, captions, *others)
              for stem, paths in found.items() for path in paths}
    for found in (targets, controls, masks): # cat_mask.png, wherever it lies, is the mask of cat
        for stem in [s for s in found if s.endswith("_mask") and s.removesuffix("_mask") in targets
                     and (found is not targets or s not in captions)]:
            masks.setdefault(stem.removesuffix("_mask"), []).extend(found.pop(stem))
    further = {} # cat_1 and cat_control_1 are further controls of cat
    for stem in controls:
        if m := re.fullmatch(r"(?s)(.+)_(\d+)", stem):
            name = m[1] if m[1] in targets else m[1].removesuffix("_control")
            further.setdefault(name, []).append((int(m[2]), stem))
    items, problems = [], []
    for name, (target, *_) in targets.items():
        numbered = sorted(further.get(name, []))
        numbers = [number for number, _ in numbered]
        stems = ([name] if name in controls else []) + [stem for _, stem in numbered]
        mask, caption = masks.get(name, []), captions.get(name, [])
        own = targets[name] + caption + mask + [path for stem in stems for path in controls[stem]]
        for path in own:
            unused.pop(path, None)
        try:
            kind = lambda path: (path.with_suffix(""), path.suffix.lower() == ".txt") # cat.png beside cat.jpg
            twins = [p for p in own if [kind(q) for q in own].count(kind(p)) > 1]
            if twins:
                raise InputError(f"{twins[0]}: {twins[1].name} has the same name; keep one of them")
            if len(mask) > 1:
                raise InputError(f"{mask[0]}: {mask[1]} is a mask of it too; keep one of them")
            first = len(stems) - len(numbers) # musubi-tuner counts from cat_0
            if not alone and not first and 0 not in numbers:
                raise InputError(f"{target}: no control; expected {roots[1] / name}.png")
            for stem in stems[first:]:
                if stem in targets:
                    raise InputError(f"{controls[stem][0]}: the control of {stem} or the second one of {name}?; rename "
                                     "one target")
            if numbers != list(range(first, first + len(numbers))):
                raise InputError(f"{target}: controls are numbered {numbers}; number them 1, 2, ...")
            if not caption:
                raise InputError(f"{target}: no caption; expected {target.with_suffix('.txt')}")
            prompts = [line.strip() for line in re.split("[\r\n]", read_text(caption[0])) if line.strip()]
            if not prompts:
                raise InputError(f"{caption[0]}: empty caption; write the instruction into it")
            check_prompt(caption[0], " ".join(prompts))
            items.append(dict(name=name, target=target, controls=[controls[stem][0] for stem in stems],
                              mask=mask[0] if mask else None, prompts=unique(prompts)))
        except InputError as e:
            problems.append(str(e))
    problems += [str(InputError(f"{p}: a link to a folder, which is not followed; copy the pictures"))
                 for root in roots for p in root.rglob("*") if p.is_symlink() and p.is_dir()]
    problems += [str(InputError(f"{p}: not used, for there is a folder of targets; give it as --data, or move it away"))
                 for p in data.glob("metadata.*") if p.suffix in (".jsonl", ".json", ".csv")]
    problems += [str(InputError(f"{path}: not used, " + (
        "for its format is not read; save it as PNG" if path.suffix.lower() in OTHER_SUFFIXES else
        f"for there is no {roots[0] / stem}.png; add that, or delete this"))) for path, stem in unused.items()]
    return items, problems

def read_manifest(path, alone):
    items, problems, seen = [], [], {}
    for n, row in manifest_rows(path):
        try:
            item = read_row(path, f"{path}:{n}", row, alone)
            files = [str(p.resolve()) for p in [item["target"], *item["controls"]]]
            same = seen.setdefault(json.dumps([files, item["prompts"]]), n)
            if same != n:
                raise InputError(f"{path}:{n}: the same as line {same}; delete one")
            items.append(item)
        except InputError as e:
            problems.append(str(e))
    return items, problems

def manifest_rows(path):
    """-> [(n, row)]: an object, or a line of .jsonl that should be one."""
    text = read_text(path)
    if path.suffix == ".jsonl":
        return [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix == ".json":
        try:
            return list(enumerate(json.loads(text), 1))
        except (ValueError, TypeError, RecursionError) as e:
            raise InputError(f"{path}: no JSON list ({e}); want one object a sample") from None
    if path.suffix != ".csv":
        raise InputError(f"{path}: no dataset; {LAYOUT}")
    csv.field_size_limit(2**31 - 1) # an overlong caption has its own error
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), restkey="cells without a column")
        rows = [(reader.line_num, {k: v for k, v in row.items() if v not in (None, "", "NaN", "nan")})
                for row in reader]
    except csv.Error as e:
        raise InputError(f"{path}: no CSV ({e}); save it as comma-separated UTF-8") from None
    if len(set(reader.fieldnames or ())) != len(reader.fieldnames or ()):
        raise InputError(f"{path}: two columns of the same name in {reader.fieldnames}; rename one")
    return rows

def read_row(manifest, where, row, alone):
    """A manifest's row, of any names of columns -> item."""
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as e:
            raise InputError(f"{where}: no JSON ({e}); one object a line") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: {type(row).__name__} instead of an object; one object a line")
    if "cells without a column" in row:
        raise InputError(f"{where}: more cells than columns; put a prompt that holds a comma in quotes")
    row = by_role(row, where)
    if "control" not in row and not alone:
        raise InputError(f"{where}: no column 'control'; add it, or [] for a picture without controls")
    target = inside(manifest, row.get("target"), where, "target")
    controls = [inside(manifest, name, where, "control") for name in row.get("control", [])]
    prompts = row.get("prompt", [])
    if not prompts or not all(isinstance(p, str) and p.strip() for p in prompts):
        raise InputError(f"{where}: column 'prompt' is {prompts or None!r}; want text, not empty")
    check_prompt(f"{where}: column 'prompt'", " ".join(prompts))
    return dict(name=str(Path(row["target"]).with_suffix("")), target=target, controls=controls,
                mask=inside(manifest, row["mask"], where, "mask") if row.get("mask") else None,
                prompts=unique(p.strip() for p in prompts))

def by_role(row, where):
    """A row with any names of COLUMNS -> those of target, control (a list), mask and prompt (a list) that are there.
    InputError if two columns mean the same."""
    found, columns = {}, {}
    for column, value in row.items():
        base, number = re.fullmatch(r"(?s)(?:path_)?(.*?)(?:_path|_file_name)?(?:_(\d+))?", column).groups()
        role = next((role for role, names in COLUMNS.items() if base in names), None)
        if role is None or value is None or (number and role != "control"):
            continue
        if columns.setdefault(role, base) != base or (role, int(number or -1)) in found:
            raise InputError(f"{where}: column {column!r} means {role}, as another one does; keep one of them")
        found[role, int(number or -1)] = value
    row = {}
    for (role, _), value in sorted(found.items(), key=lambda entry: entry[0]):
        if role in ("control", "prompt"):
            row[role] = row.get(role, []) + (value if isinstance(value, list) else [value])
        else:
            row[role] = value
    return row

def export_parquet(roots, cache_dir, rank=0, world_size=1):
    """Folders that hold Hugging Face parquet files -> the same as folders with target/, control/ and captions, which
    rank 0 writes once to CACHE_DIR/exported (anew if the files have changed). Other roots stay as they are."""
    out = []
    for root in map(Path, roots):
        files = [*root.glob("*.parquet"), *root.glob("data/*.parquet")]
        key = content_key(files=[[p.name, fingerprint(p.parent)] for p in sorted(files)])
        folder = Path(cache_dir, "exported", key, root.resolve().name)
        if files and rank == 0 and not folder.exists():
            tmp = folder.with_name(".tmp")
            shutil.rmtree(tmp, ignore_errors=True)
            try:
                import datasets
                rows = datasets.load_dataset(str(root), split="train", streaming=True).decode(False)
                for n, row in enumerate(tqdm(rows, desc=f"exporting {root}", unit=" rows", disable=None)):
                    roles = by_role(row, f"{root}: row {n}")
                    if not roles.get("target"):
                        raise InputError(f"{root}: none of {list(row)} is a target; name one of them so")
                    write_row(tmp, f"{n:08d}", roles)
                os.replace(tmp, folder)
            except ImportError:
                raise InputError(f"{root}: parquet files need the package datasets; pip install datasets") from None
            except Exception as e: # whatever a dozen packages make of a broken file; a full disk
                raise InputError(f"{root}: cannot be exported ({type(e).__name__}: {str(e) or 'no row'}); mend it, or "
                                 f"give its pictures as a folder") from None
        out.append(str(folder) if files else str(root))
    if world_size > 1:
        dist.barrier()
    return out

def write_row(folder, name, row):
    """A row of pictures as bytes -> files of the folder layout."""
    pictures = dict(target=row["target"], mask=row.get("mask"))
    pictures = {f"{role}/{name}": p for role, p in pictures.items()} | {
        f"control/{name}_{k}" if k else f"control/{name}": p for k, p in enumerate(row.get("control", []))}
    for path, picture in pictures.items():
        if picture is not None:
            suffix = {b"\xff\xd8": ".jpg", b"RI": ".webp", b"BM": ".bmp"}.get(picture["bytes"][:2], ".png")
            Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, path + suffix).write_bytes(picture["bytes"])
    lines = [re.sub(r"\s*[\r\n]\s*", " ", p) for p in row.get("prompt", [])] # a line would be one more wording
    Path(folder, "target", name + ".txt").write_text("\n".join(lines), encoding="utf-8")

def inside(manifest, name, where, column):
    """A manifest's path: relative, a file, and inside the manifest's folder also after following links. No URLs."""
    root = manifest.parent.resolve()
    try:
        file = Path(os.path.normpath(manifest.parent / os.fsdecode(os.fsencode(name))))
        if Path(name).is_absolute() or "://" in name or not (root / name).resolve().is_relative_to(root):
            raise InputError(f"{where}: column {column!r}: {name!r} is outside {manifest.parent}; move the file inside "
                             "and give its relative path")
        if not file.is_file():
            raise InputError(f"{where}: column {column!r}: no file {name!r} in {manifest.parent}; add it")
    except (TypeError, ValueError, OSError, RuntimeError): # no text, half a character or NUL in it, links in a circle
        raise InputError(f"{where}: column {column!r}: {name!r} is no file name; give a relative path") from None
    return file

def read_text(path):
    """A text file in UTF-8. InputError names the file."""
    try:
        if not path.is_file(): # a FIFO would hang
            raise InputError(f"{path}: no file; write text into it")
        text = path.read_bytes().decode("utf-8-sig") # editors on Windows write a BOM
        if "\0" in text: # UTF-16 can pass for UTF-8
            raise ValueError
        return text
    except ValueError:
        raise InputError(f"{path}: not UTF-8 (Latin-1 or UTF-16?); save it as UTF-8") from None
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}; make it readable") from None

def open_image(path):
    """Header only: a PIL image whose size is known and allowed. InputError names the file."""
    if not os.path.isfile(path): # a FIFO or socket would hang, a folder or dangling link cannot be read
        raise InputError(f"{path}: no file of that name; add it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning) # we say it ourselves below
            image = Image.open(path, formats=["PNG", "JPEG", "WEBP", "BMP"])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
        what = "an empty file" if os.path.getsize(path) == 0 else "no PNG, JPEG, WebP or BMP picture"
        what = str(e) if isinstance(e, Image.DecompressionBombError) else what
        raise InputError(f"{path}: {what}; replace it") from None
    if image.width * image.height > MAX_PIXELS:
        raise InputError(f"{path}: {image.width}x{image.height} is over {MAX_PIXELS // 10**6} megapixels; make it "
                         "smaller")
    if image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) > 1:
        raise InputError(f"{path}: animated; export one frame")
    return image

TURN = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90}

def orientation(image):
    """EXIF orientation, 1 to 8, from the header alone: PngImageFile.getexif would decode each picture of a dataset, and
    ImageOps.exif_transpose trips over damaged EXIF, which must not matter."""
    try:
        value = Image.Image.getexif(image).get(0x0112)
    except Exception: # whatever a damaged block makes PIL do
        value = None
    return value if value in TURN else 1

def image_size(path):
    """(width, height) as it will be seen, i.e. after the EXIF rotation. InputError for sizes that make no sense."""
    with open_image(path) as image:
        w, h = image.size
        if orientation(image) >= 5: # lies on its side
            w, h = h, w
    if min(w, h) < 32 or max(w, h) > 10 * min(w, h):
        raise InputError(f"{path}: {w}x{h}; sides of at least 32 pixels and an aspect of at most 10:1 are needed")
    return w, h

def read_image(path):
    """-> RGB PIL image: EXIF rotation applied, alpha composited on white, 16-bit gray scaled (PIL alone would clip
    it)."""
    with open_image(path) as image:
        turn = TURN.get(orientation(image))
        try:
            image.load()
        except (OSError, ValueError, SyntaxError) as e:
            raise InputError(f"{path}: broken picture ({e}); replace it") from None
        image = image.transpose(turn) if turn is not None else image
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).astype(np.float32) / 257).round().astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise InputError(f"{path}: pixels of mode {image.mode}; save it with 8 bits a channel")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")

# ---- geometry --------------------------------------------------------------------------------------------------------

def fit_size(size, area, upscale=True):
    """(width, height) to resize to: the stock pipeline's calculate_dimensions(area, w / h), i.e. sides rounded to 32;
    with area = 'native', or where upscale is off and the picture is smaller, its own sides rounded to 32."""
    w, h = size
    if area == "native" or (not upscale and w * h < area):
        w, h = round(w / 32) * 32, round(h / 32) * 32
    else:
        w, h = calculate_dimensions(area, w / h)
    return max(w, 32), max(h, 32) # calculate_dimensions can give 0 for long thin pictures

def prompt_size(pipe, size, control_pixels, upscale):
    """Size of the copy that the vision-language encoder sees: 384*384 (Plus), or the same copy as the VAE's (v1)."""
    return fit_size(size, CONDITION_IMAGE_SIZE) if is_plus(pipe) else fit_size(size, control_pixels, upscale)

# ---- models ----------------------------------------------------------------------------------------------------------

class Processor: # a class because the pipeline keeps and calls it as pipe.processor
    """Qwen2VLProcessor without its video half, which cannot be loaded without torchvision: transformers' PIL image
    processor, and the tokenizer on a text where each <|image_pad|> stands once per merged patch."""

    def __init__(self, tokenizer, image_processor):
        self.tokenizer, self.image_processor = tokenizer, image_processor

    def __call__(self, text, images=None, padding=True, return_tensors="pt"):
        pictures = {} if images is None else dict(self.image_processor(images=images, return_tensors=return_tensors))
        patches = pictures["image_grid_thw"].prod(-1).tolist() if pictures else []
        counts = [n // self.image_processor.merge_size**2 for n in patches]
        tokens = self.tokenizer(expand_image_pads(text, counts), padding=padding, return_tensors=return_tensors)
        return BatchFeature({**tokens, **pictures})

def expand_image_pads(texts, counts):
    """The k-th <|image_pad|> in the list of texts becomes counts[k] of them."""
    counts = iter(counts)
    return [re.sub(re.escape("<|image_pad|>"), lambda m: m[0] * next(counts), text) for text in texts]

def find_model(model, parts, weights=True):
    """--model -> a local folder that holds model_index.json and the folders in `parts` (downloaded where missing), with
    or without their weights."""
    folder = Path(__file__).with_name("tiny") if model == "tiny" else Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        try:
            folder = Path(snapshot_download(model, ignore_patterns=None if weights else "*.safetensors",
                                            allow_patterns=["model_index.json", *[f"{p}/*" for p in parts]]))
        except Exception as e: # a dozen kinds: no such name, no network, no login, ...
            raise InputError(f"--model {model}: neither a folder nor to be had from the hub ({type(e).__name__}); "
                             "check the name, or log in with `hf auth login`") from None
    for file in [folder / "model_index.json", *[folder / p / CONFIG_FILE[p] for p in parts]]:
        try:
            json.loads(file.read_text())
        except (OSError, ValueError):
            if file.name != "tokenizer.json" or not file.with_name("vocab.json").is_file(): # older tokenizers
                raise InputError(f"{file}: missing or broken; --model wants a complete diffusers folder of "
                                 "Qwen-Image-Edit: download it again (after a git clone: git lfs pull)") from None
    for part in parts if weights else []:
        shards = {folder / part / name for index in (folder / part).glob("*.safetensors.index.json")
                  for name in json.loads(index.read_text())["weight_map"].values()}
        for file in sorted(shards | set((folder / part).glob("*.safetensors"))):
            try:
                safetensors.safe_open(file, "pt").keys() # reads the header and compares it with the file's length
            except (OSError, SafetensorError) as e:
                raise InputError(f"{file}: no weights ({str(e).splitlines()[0]}); download it again (after a git "
                                 "clone: git lfs pull)") from None
    return folder

CONFIG_FILE = dict(vae="config.json", text_encoder="config.json", transformer="config.json", tokenizer="tokenizer.json",
                   processor="preprocessor_config.json", scheduler="scheduler_config.json")
ENCODER_PARTS = ["vae", "text_encoder", "tokenizer", "processor", "scheduler"]

def load_pipeline(folder):
    """The stock pipeline of model_index.json (v1 or Plus) without weights: tokenizer, processor and scheduler only. Its
    methods then prepare pictures and prompts; load_encoders and predict.py add the models."""
    try:
        name = json.loads((folder / "model_index.json").read_text())["_class_name"]
        if name not in ("QwenImageEditPipeline", "QwenImageEditPlusPipeline"):
            raise InputError(f"{folder / 'model_index.json'}: a {name}; want QwenImageEdit(Plus)Pipeline")
        tokenizer = Qwen2Tokenizer.from_pretrained(folder, subfolder="tokenizer")
        image_processor = Qwen2VLImageProcessor.from_pretrained(folder, subfolder="processor")
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    except (OSError, KeyError, json.JSONDecodeError) as e:
        raise InputError(f"{folder}: cannot be loaded ({str(e).splitlines()[0]}); is the download complete?") from None
    return getattr(diffusers, name)(scheduler=scheduler, vae=None, text_encoder=None, tokenizer=tokenizer,
                                    processor=Processor(tokenizer, image_processor), transformer=None)

def load_part(cls, folder, part, dtype):
    """One frozen model from its safetensors files. InputError names the folder."""
    try:
        model, info = cls.from_pretrained(folder / part, torch_dtype=getattr(torch, dtype), use_safetensors=True,
                                          output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        raise InputError(f"{folder / part}: cannot be loaded ({str(e).splitlines()[0]}); download it again") from None
    if info["missing_keys"]: # they would be random numbers
        raise InputError(f"{folder / part}: {len(info['missing_keys'])} tensors are missing, for instance "
                         f"{sorted(info['missing_keys'])[0]}; download it again")
    return model.requires_grad_(False).eval()

class FrozenProduct(torch.autograd.Function):
    """x @ weight.T for a low-bit weight, which is unpacked anew in the backward pass. autograd alone would keep it as
    it was multiplied, in bf16: 27 GB of the real model."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        if layer.kind == "fp8" and has_fp8_matmul(x): # rows of x get scales of their own
            rows = x.flatten(0, -2)
            scale = (rows.abs().amax(-1, keepdim=True).float() / 448).clamp_min(1e-12)
            out = torch._scaled_mm((rows / scale).to(torch.float8_e4m3fn), layer.weight.view(torch.float8_e4m3fn).T,
                                   scale, layer.scale.T, out_dtype=x.dtype)
            return out.unflatten(0, x.shape[:-1])
        return x @ layer.unpacked(x.dtype).T

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.layer.unpacked(grad.dtype), None

def has_fp8_matmul(x):
    return (x.is_cuda and torch.version.hip is None and x.dtype == torch.bfloat16
            and torch.cuda.get_device_capability(x.device) >= (8, 9))

class LowBitLinear(torch.nn.Linear): # a class, and a Linear, because peft puts LoRAs on such
    """A frozen linear layer. int8 and fp8 (e4m3): a byte a weight and a scale per row, as in torchao's weight-only
    configs; nf4: bitsandbytes' half byte, and a scale per 64 weights. Weights and scales are plain parameters, which
    FSDP2 can split and copy: on torchao's own tensors (0.18) fully_shard fails."""

    def __init__(self, linear, kind):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.kind, weight = kind, linear.weight.detach()
        if kind == "nf4": # in rows of 64: on CPUs bitsandbytes 0.50 is wrong about others
            weight, state = bitsandbytes().quantize_4bit(weight.float().reshape(-1, 64), quant_type=kind,
                                                         compress_statistics=False)
            scale, self.code = state.absmax, state.code
        else:
            top = 127 if kind == "int8" else 448
            scale = (weight.float().abs().amax(1, keepdim=True) / top).clamp_min(1e-12)
            weight = weight.float() / scale
            weight = weight.round() if kind == "int8" else weight.to(torch.float8_e4m3fn).view(torch.int8)
            weight = weight.to(torch.int8)
        self.weight, self.scale = [torch.nn.Parameter(t, requires_grad=False) for t in (weight, scale)]

    def unpacked(self, dtype):
        """-> weight (out_features, in_features)."""
        if self.kind == "nf4":
            blocks = torch.Size([len(self.scale), 64])
            state = bitsandbytes().QuantState(self.scale, blocks, self.code, 64, self.kind, dtype)
            return bitsandbytes().dequantize_4bit(self.weight, state).view(self.out_features, self.in_features)
        weight = self.weight if self.kind == "int8" else self.weight.view(torch.float8_e4m3fn)
        return weight.to(dtype) * self.scale.to(dtype)

    def forward(self, x):
        out = FrozenProduct.apply(x, self)
        return out if self.bias is None else out + self.bias

def bitsandbytes():
    try:
        import bitsandbytes.functional
        return bitsandbytes.functional
    except ImportError:
        raise InputError("--quantize nf4: needs a package that is not here; pip install bitsandbytes") from None

LOW_BIT_BYTES = dict(int8=1, fp8=1, nf4=0.5 + 4 / 64) # a weight; with 8 bits 4 more a row

def model_bytes(model, quantize="none"):
    """Bytes of the weights, LoRAs apart, once make_low_bit has packed them. The model may be on the meta device."""
    total = sum(p.numel() * p.itemsize for name, p in model.named_parameters() if ".lora_" not in name)
    for name, module in model.named_modules() if quantize != "none" else []:
        if type(module) is torch.nn.Linear and ".lora_" not in name:
            w = module.weight
            total += w.numel() * (LOW_BIT_BYTES[quantize] - w.itemsize) + (4 * len(w) if quantize != "nf4" else 0)
    return int(total)

def make_low_bit(module, kind, device):
    """Every linear layer under `module`, LoRAs apart, with 8 or 4 bits a weight, one by one on the device -> module."""
    for name, parent in list(module.named_modules()):
        for child, linear in list(parent.named_children()):
            if type(linear) is torch.nn.Linear and ".lora_" not in f".{name}.{child}":
                setattr(parent, child, LowBitLinear(linear.to(device), kind).train(linear.training))
    return module

def load_encoders(pipe, folder, dtype, vae_encoder_device, text_encoder_device, quantize="none", parts=("vae", "text")):
    """Adds VAE and text encoder to the pipeline, or one of them, and brings them to their devices. The VAE's decoder
    stays on the CPU: training does not need it."""
    if "vae" in parts:
        pipe.vae = pipe.vae or load_part(AutoencoderKLQwenImage, folder, "vae", dtype)
        pipe.vae.encoder.to(vae_encoder_device)
        pipe.vae.quant_conv.to(vae_encoder_device)
    if "text" in parts and pipe.text_encoder is None:
        pipe.text_encoder = load_part(Qwen2_5_VLForConditionalGeneration, folder, "text_encoder", dtype)
        if quantize != "none":
            make_low_bit(pipe.text_encoder, quantize, text_encoder_device)
    if "text" in parts:
        try:
            pipe.text_encoder.to(text_encoder_device)
        except torch.OutOfMemoryError:
            raise InputError(f"--text_encoder_device {text_encoder_device}: too little memory for the text encoder, "
                             "16 GB in bf16; --quantize_text_encoder takes less, or give cpu") from None

def empty_encoders(folder, args):
    """-> [(model without weights, its quantisation)] of what load_encoders loads: VAE, text encoder."""
    with init_empty_weights():
        vae = AutoencoderKLQwenImage.from_config(AutoencoderKLQwenImage.load_config(folder / "vae"))
        text = Qwen2_5_VLForConditionalGeneration._from_config(
            Qwen2_5_VLForConditionalGeneration.config_class.from_pretrained(folder / "text_encoder"))
    dtype = getattr(torch, args.dtype)
    return [(torch.nn.Module.to(vae, dtype), "none"), (torch.nn.Module.to(text, dtype), args.quantize_text_encoder)]

def model_fingerprints(folder):
    """What decides latents and what decides prompt embeddings, of those parts that are there."""
    text = ["text_encoder", "tokenizer", "processor"]
    return {name: content_key(**{p: fingerprint(folder / p) for p in parts})
            for name, parts in (("vae", ["vae"]), ("text", text)) if all((folder / p).is_dir() for p in parts)}

def is_plus(pipe):
    return type(pipe).__name__ == "QwenImageEditPlusPipeline"

def fingerprint(folder):
    """Identifies a model's folder: every small file whole, of each large one the size and three 1 MiB windows (hashing
    all 16 GB of a text encoder would cost a minute at every start, and no two trainings share those windows)."""
    h = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
        size = path.stat().st_size
        h.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as f:
            for start in [0, size // 2, size - 2**20] if size > 2**24 else [0]:
                f.seek(start)
                h.update(f.read(2**20 if size > 2**24 else size))
    return h.hexdigest()[:16]

# ---- encoding: what the stock pipeline computes, one picture or prompt at a time -------------------------------------

@torch.no_grad()
def encode_image(pipe, image, size):
    """RGB image -> (tokens, 64): the posterior's mode, normalised by latents_mean/std, 2x2 patches packed. fp32 or bf16
    as the VAE; on the VAE encoder's device."""
    weight = next(pipe.vae.encoder.parameters())
    x = pipe.image_processor.preprocess(image, size[1], size[0]).unsqueeze(2).to(weight.device, weight.dtype)
    z = pipe._encode_vae_image(x, generator=None)
    return pipe._pack_latents(z, 1, z.shape[1], *z.shape[3:])[0]

@torch.no_grad()
def encode_prompt(pipe, prompt, images, sizes):
    """Instruction and the pictures it speaks of -> (T, 3584), without the template's first 64 tokens."""
    images = [pipe.image_processor.resize(im, h, w) for im, (w, h) in zip(images, sizes)]
    images = (images or None) if is_plus(pipe) else images[0]
    embeds, _ = pipe.encode_prompt([prompt], images, device=pipe.text_encoder.device)
    return embeds[0]

def prompt_length(pipe, prompt, sizes):
    """T of encode_prompt, from the tokenizer alone."""
    processor = pipe.processor.image_processor
    counts = [processor.get_number_of_image_patches(h, w, {}) // processor.merge_size**2 for w, h in sizes]
    pictures = "".join(f"Picture {i + 1}: <|vision_start|><|image_pad|><|vision_end|>" for i in range(len(sizes)))
    text = pipe.prompt_template_encode.format((pictures if is_plus(pipe) else "") + prompt)
    return len(pipe.tokenizer(expand_image_pads([text], counts)[0]).input_ids) - pipe.prompt_template_encode_start_idx

def encode_latents(pipe, sample, scale):
    """-> pixel_latent (I_0, 64), control_latent (sum I_c, 64), which may be (0, 64), img_shapes (N, 3), and edit_mask
    (I_0,) where there is one: the edited share of each token's 16x16 pixels."""
    target_size, *control_sizes = [(w * 16, h * 16) for _, h, w in scale["img_shapes"]]
    controls = [encode_image(pipe, read_image(path), size) for path, size in zip(sample["control"], control_sizes)]
    target = encode_image(pipe, read_image(sample["target"]), target_size)
    out = dict(pixel_latent=target, control_latent=torch.cat([target[:0], *controls]),
               img_shapes=torch.tensor(scale["img_shapes"]))
    if sample["mask"]:
        mask = read_image(sample["mask"]).convert("L").resize((target_size[0] // 16, target_size[1] // 16), Image.BOX)
        out["edit_mask"] = torch.from_numpy(np.asarray(mask).flatten() / np.float32(255))
    return finite(out, sample["target"])

def encode_text(pipe, sample, text):
    """-> prompt_embed (T, 3584), prompt_embeds_mask (T,): the text's prompt with the sample's pictures, since the
    encoder sees both; a plain text's without. For the prompt "" the names begin with empty_."""
    pictures = [] if text.get("plain") else [read_image(c) for c in sample["control"]]
    embed = encode_prompt(pipe, text["prompt"], pictures, sample["prompt_sizes"])
    name = "prompt_embed" if text["prompt"] else "empty_prompt_embed"
    return finite({name: embed, name + "s_mask": torch.ones(len(embed), dtype=torch.bool)}, sample["target"])

def check_prompt(where, prompt):
    """InputError for what the tokenizer would take for its own marks, or cannot take at all."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: half a character in the prompt {prompt!r}; write it anew") from None
    if "<|" in prompt:
        raise InputError(f"{where}: a special token of the encoder in the prompt {prompt!r}; leave out <|...|>")

def finite(tensors, path):
    for name, t in tensors.items():
        if not t.isfinite().all():
            raise InputError(f"{path}: {name} has NaN or Inf; try --dtype float32")
    return tensors

# ---- index: samples joined to their files ----------------------------------------------------------------------------

def file_hash(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()

def content_key(**fields):
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

def run_name(model, roots):
    """<model>-<data>+<more data>, for the default folders of caches and runs."""
    return f"{Path(model).name}-{'+'.join(map(root_name, roots))}"

def build_index(pipe, folder, args, empty_prompt, quiet=False, plain_prompt=False):
    """Reads every picture's header and hash -> (index, problems). index["samples"]: name, sources, how often an epoch
    `repeats` it; `text`, its wordings, and `empty_text`: each a prompt and a key with its number of tokens; `scales`,
    one per --target_pixels: key and img_shapes. With plain_prompt also `plain_text`: `text` and `empty_text` as they
    are without the pictures."""
    if plain_prompt and not is_plus(pipe):
        raise InputError("--prompt_image_dropout_rate, --plain_prompt: Qwen-Image-Edit v1 has a picture in every "
                         "prompt; leave it out, or train 2509 or 2511")
    items, problems = read_datasets(args)
    models = model_fingerprints(folder)
    common = dict(version=VERSION, preprocessing=PREPROCESSING, pipeline=type(pipe).__name__, dtype=args.dtype)
    if args.quantize_text_encoder != "none":
        models["text"] += "-" + args.quantize_text_encoder
    samples = []
    # disable=None here and elsewhere: tqdm hides itself where there is no terminal
    for item in tqdm(items, desc="reading pictures", unit=" samples", disable=quiet or None, leave=False):
        try:
            samples.append(index_sample(pipe, item, args, empty_prompt, plain_prompt, models, common))
        except InputError as e:
            problems.append(str(e))
        except OSError as e:
            problems.append(f"error: {e.filename or item['target']}: {e.strerror}; make it readable")
    return dict(**common, models=models, target_pixels=args.target_pixels, control_pixels=args.control_pixels,
                upscale=args.upscale, samples=samples), problems

def index_sample(pipe, item, args, empty_prompt, plain_prompt, models, common):
    """One of read_dataset's items -> its entry in the index. models, common: what its keys depend on beside it."""
    target, controls, mask = item["target"], item["controls"], item["mask"]
    sizes = [image_size(path) for path in [target, *controls]]
    pictures = [file_hash(path) for path in [target, *controls]]
    if mask:
        (w, h), (tw, th) = image_size(mask), sizes[0]
        if abs(w / h / (tw / th) - 1) > 0.02: # it may have another scale, not another shape
            raise InputError(f"{mask}: {w}x{h} for a target of {tw}x{th}; give it the target's shape")
    if not is_plus(pipe) and len(controls) != 1:
        raise InputError(f"{[target, *controls][min(2, len(controls))]}: Qwen-Image-Edit v1 takes one control, "
                         f"here are {len(controls)}; remove it, or train 2509 or 2511")
    tokens = max(len(pipe.tokenizer(prompt).input_ids) for prompt in item["prompts"])
    if tokens > args.max_sequence_length:
        raise InputError(f"{target}: caption of {tokens} tokens, over --max_sequence_length "
                         f"{args.max_sequence_length}; shorten it")
    prompt_sizes = [prompt_size(pipe, size, args.control_pixels, args.upscale) for size in sizes[1:]]
    control_sizes = [fit_size(size, args.control_pixels, args.upscale) for size in sizes[1:]]
    scales = []
    for area in args.target_pixels:
        used = [fit_size(sizes[0], area, args.upscale), *control_sizes]
        key = content_key(**common, vae=models["vae"], pictures=pictures, sizes=used, mask=file_hash(mask) if mask else
                          None)
        scales.append(dict(img_shapes=[(1, h // 16, w // 16) for w, h in used], key=key))

    def text(prompt, pictures, sizes):
        key = content_key(**common, text=models["text"], prompt=prompt, pictures=pictures, sizes=sizes)
        return dict(prompt=prompt, tokens=prompt_length(pipe, prompt, sizes), key=key)

    entry = dict(name=item["name"], target=str(target), control=list(map(str, controls)), mask=mask and str(mask),
                 repeats=item["repeats"], sizes=sizes, prompt_sizes=prompt_sizes, scales=scales,
                 text=[text(prompt, pictures[1:], prompt_sizes) for prompt in item["prompts"]],
                 empty_text=text("", pictures[1:], prompt_sizes) if empty_prompt else None)
    if plain_prompt: # the wordings, and then the empty prompt, without pictures
        entry["plain_text"] = [dict(text(prompt, [], []), plain=True)
                               for prompt in [*item["prompts"], *[""] * empty_prompt]]
    return entry

def latents_file(cache_dir, scale):
    return Path(cache_dir, "latents", scale["key"] + ".safetensors")

def text_file(cache_dir, text):
    return Path(cache_dir, "text", text["key"] + ".safetensors")

def sample_files(cache_dir, sample):
    """{file: (encode function, its arguments)} of one sample: latents at every scale, prompts, empty prompt, and these
    without pictures."""
    files = {latents_file(cache_dir, s): (encode_latents, s) for s in sample["scales"]}
    texts = [*sample["text"], sample["empty_text"], *sample.get("plain_text", [])]
    return files | {text_file(cache_dir, t): (encode_text, t) for t in texts if t}

def encode_missing(pipe, folder, index, cache_dir, args, rank=0, world_size=1, verify=False):
    """Encodes this rank's share of what the cache lacks -> problems; a bad sample stops no others. The encoders
    are loaded only if there is something to do. With `verify` its share of the files is read, and what is damaged is
    encoded again. InputError if the disk is too small or full."""
    jobs = {path: (sample, *job) for sample in index["samples"] # a file that samples share stands there once
            for path, job in sample_files(cache_dir, sample).items()}
    # dealt by key, not by place in the list: a rank that lists the files later finds some of them there already
    mine = {path for path in jobs if int(path.stem, 16) % world_size == rank}
    for path in tqdm(sorted(mine), desc="verifying", unit=" files", disable=rank > 0 or None) if verify else []:
        try:
            if path.is_file():
                read_tensors(path, key=path.stem)
        except InputError:
            tqdm.write(f"{path}: damaged; encoding it again", file=sys.stderr)
            path.unlink()
    jobs = {path: job for path, job in jobs.items() if not path.is_file()}
    if not jobs:
        return []
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    width = config.get("text_config", config)["hidden_size"]
    need = 0
    for _, _, arg in jobs.values():
        elements = width * arg["tokens"] if "tokens" in arg else 64 * sum(h * w for _, h, w in arg["img_shapes"])
        need += elements * getattr(torch, args.dtype).itemsize
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir).free
    if rank == 0:
        print(f"encoding {len(jobs)} files, {need / 1e9:.3f} GB, into {cache_dir} ({free / 1e9:.0f} GB free)")
    if need > free:
        raise InputError(f"{cache_dir}: {need / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; take another --cache_dir")
    problems = []
    # latents first, then texts: the two encoders are never on the device together
    share = sorted(((path, job) for path, job in jobs.items() if path in mine), key=lambda s: s[1][2] is encode_text)
    stopped, loaded = [], []
    handlers = {s: signal.signal(s, lambda *_: stopped.append(True)) # what is begun is finished
                for s in (signal.SIGTERM, signal.SIGINT)}
    for path, (sample, encode, arg) in tqdm(share, desc="encoding", unit=" files", disable=rank > 0 or None):
        if stopped:
            tqdm.write(f"{cache_dir}: stopped by a signal; run the same command again for the rest")
            sys.exit(0)
        part = "vae" if encode is encode_latents else "text"
        if part not in loaded:
            if pipe.vae is not None:
                pipe.vae.to("cpu")
            load_encoders(pipe, folder, args.dtype, args.vae_encoder_device, args.text_encoder_device,
                          args.quantize_text_encoder, [part])
            loaded.append(part)
        try:
            tensors = encode(pipe, sample, arg)
        except InputError as e:
            problems.append(str(e))
            continue
        write_tensors(path, tensors, dict(
            version=VERSION, key=path.stem, sources=[sample["target"], *sample["control"]], sizes=sample["sizes"]))
    for s, handler in handlers.items():
        signal.signal(s, handler)
    return problems

def make_cache(pipe, folder, args, cache_dir, empty_prompt=False, rank=0, world_size=1, verify=False,
               plain_prompt=False):
    """Dataset -> encoded files and index.json -> (index of the good samples, problems), the same on every rank. `pipe`
    is load_pipeline's; it has its encoders afterwards if there was something to encode."""
    index, problems = build_index(pipe, folder, args, empty_prompt, rank > 0, plain_prompt)
    for place in (Path(cache_dir, "latents"), Path(cache_dir, "text"), Path(cache_dir)):
        check_writable(place, "choose another --cache_dir")
        sweep(place)
    if rank == 0: # the encoding may take hours
        for p in problems:
            print(p, file=sys.stderr)
    try:
        old = {s["name"]: s for s in load_index(cache_dir)["samples"]}
    except InputError: # none yet, or a damaged one
        old = {}
    for s in index["samples"]: # texts without prompt or pictures that another call has encoded stay
        before = old.get(s["name"], {})
        if before.get("text") == s["text"]:
            s.update({k: before[k] for k in ("empty_text", "plain_text") if before.get(k) and not s.get(k)})
    found = encode_missing(pipe, folder, index, cache_dir, args, rank, world_size, verify)
    if world_size > 1:
        shares = [None] * world_size
        dist.all_gather_object(shares, found) # also waits for the others' files
        found = [p for share in shares for p in share]
    index["samples"] = [s for s in index["samples"] if all(f.exists() for f in sample_files(cache_dir, s))]
    found = [p for p in dict.fromkeys(found) if p not in problems] # a bad picture may be met twice
    if rank == 0:
        if index["samples"]:
            write_file(Path(cache_dir, "index.json"), json.dumps(index, indent=1).encode())
        report(index, found)
    return index, problems + found

def report(index, problems):
    """What will be trained on stdout, what is wrong on stderr. None of a progress bar's letters stand before an
    error."""
    print(describe(index))
    for p in problems:
        print(p, file=sys.stderr)

def describe(index):
    """One paragraph on what will be trained: counts, tokens, and what rounding to 32 pixels does to the shapes."""
    samples = index["samples"]
    if not samples:
        return "0 samples"
    pairs = [(s, scale["img_shapes"]) for s in samples for scale in s["scales"]]
    tokens = [sum(h * w for _, h, w in shapes) + t["tokens"] for s, shapes in pairs for t in s["text"]]
    bent, name = max((abs(w / h * s["sizes"][0][1] / s["sizes"][0][0] - 1), s["name"]) for s, [(_, h, w), *_] in pairs)
    several = [len(s["text"]) for s in samples if len(s["text"]) > 1]
    return (f"{len(samples)} samples, {len({tuple(shapes[0]) for _, shapes in pairs})} target sizes, up to "
            f"{max(len(s['control']) for s in samples)} controls, {min(tokens)} to {max(tokens)} tokens; sides rounded "
            f"to 32 change the aspect by at most {bent:.1%} ({name})"
            + (f"; {len(several)} captions have several lines, {sum(several)} wordings: each step draws one"
               if several else ""))

# ---- reading the cache -----------------------------------------------------------------------------------------------

def load_sample(cache_dir, sample, scale, *texts):
    """One sample's tensors at one scale, checked: pixel_latent, control_latent, img_shapes, prompt_embed,
    prompt_embeds_mask, and where they were made edit_mask, empty_prompt_embed, empty_prompt_embeds_mask. `texts`: which
    of its texts (default: the first and the empty one)."""
    if "v1" in sample:
        return read_v1(sample["v1"])
    tensors = {}
    texts = texts or (sample["text"][0], sample["empty_text"])
    for file, item in ((latents_file, scale), *[(text_file, text) for text in texts]):
        if item:
            found, meta = read_tensors(file(cache_dir, item), key=item["key"])
            if meta["version"] != VERSION:
                raise InputError(f"{file(cache_dir, item)}: version {meta['version']}, not {VERSION}; run cache.py "
                                 "again")
            tensors.update(found)
    return tensors

def load_index(cache_dir):
    """index.json of a folder that cache.py wrote; or, for a folder of version 1.0 dictionaries (one safetensors file a
    sample, height and width instead of img_shapes), the same made from the files."""
    path = Path(cache_dir, "index.json")
    if path.is_file():
        try:
            index = json.loads(path.read_text())
            if index["version"] != VERSION or not index["samples"]:
                raise ValueError(f"version {index['version']}, {len(index['samples'])} samples")
            for s in index["samples"]: # until there were several wordings, `text` was the one
                s["text"] = s["text"] if isinstance(s["text"], list) else [s["text"]]
            return index
        except (ValueError, KeyError, TypeError) as e:
            raise InputError(f"{path}: no index of version {VERSION} ({e}); run cache.py again") from None
    samples = []
    for path in sorted(p for p in Path(cache_dir).glob("*") if p.is_file()):
        if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
            raise InputError(f"{path}: a pickle, which can run code when it is read; encode the pictures anew")
        if path.suffix == ".safetensors":
            t = read_v1(path)
            text, empty = [dict(tokens=len(t[k])) if k in t else None for k in ("prompt_embed", "empty_prompt_embed")]
            samples.append(dict(name=path.stem, v1=str(path), text=[text], empty_text=empty,
                                scales=[dict(img_shapes=t["img_shapes"].tolist())]))
    if not samples:
        raise InputError(f"{cache_dir}: no cache in it; run cache.py, or give --data")
    return dict(version="1.0", models=None, samples=samples)

def read_v1(path):
    """A version 1.0 dictionary (no img_shapes, no digest, perhaps a batch dimension of 1) in today's form."""
    try:
        tensors = safetensors.torch.load(Path(path).read_bytes())
        with safetensors.safe_open(path, "pt") as f:
            version = (f.metadata() or {}).get("version", "1.0")
        if version != "1.0":
            raise InputError(f"{path}: cache version {version}; {VERSION} needs its index.json, others cannot be read")
        shapes = torch.tensor(get_image_shapes_multi_resolution(tensors, 1)[0])
        tensors = {k: v[0] if v.ndim == 3 or k.endswith("_mask") and v.ndim == 2 else v for k, v in tensors.items()}
        for text in ("prompt_embed", "empty_prompt_embed"): # 1.0 padded prompts; here pads go
            if text in tensors:
                tensors[text] = tensors[text][tensors.get(text + "s_mask", torch.ones(len(tensors[text]))).bool()]
                tensors[text + "s_mask"] = torch.ones(len(tensors[text]), dtype=torch.bool)
        if any(tensors[k].ndim != 2 for k in ("pixel_latent", "control_latent", "prompt_embed")):
            raise ValueError("want (tokens, channels)")
        tokens = len(tensors["pixel_latent"]), len(tensors["control_latent"])
    except (OSError, SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as e:
        raise InputError(f"{path}: no version 1.0 cache file ({type(e).__name__}: {e}); encode it again") from None
    areas = shapes.prod(-1).tolist()
    if tokens != (areas[0], sum(areas[1:])):
        raise InputError(f"{path}: {tokens} target and control tokens, but sizes {shapes.tolist()}; encode it again")
    return {**tensors, "img_shapes": shapes}

def look_after(cache_dir, index, prune):
    """Files that no sample uses are never trained; they are named, and deleted only when asked."""
    used = {path for s in index["samples"] for path in sample_files(cache_dir, s)}
    unused = [p for d in ("latents", "text") for p in Path(cache_dir, d).glob("*.safetensors") if p not in used]
    if unused:
        print(f"{len(unused)} files in {cache_dir} belong to no sample" + (
            "; deleted" if prune else " (--prune deletes them)"))
    for path in unused if prune else []:
        path.unlink()

# ---- report: what a dataset holds, and which of its pairs look wrong -------------------------------------------------

DOCTOR = dict( # when a pair is named. lengths in pixels of a copy whose longest side is `side`, colours in levels
    side=256, # enough to see a shift of 4 pixels in 1024, and 60 ms a pair
    aspect=1.05, scale=2.0, # target and control: quotient of the aspects, of the sides. 5 % is a visible stretch
    identical=5.0, block=9.0, # RMS, and largest mean of 8x8 pixels: JPEG of quality 70 makes up to 4.5 and 8
    edge=1.0, # what shift and zoom move at the picture's edge: less than a pixel is within the error of measurement
    far=0.15, # of the side, and zoom: beyond, no estimate was ever right
    structure=6.0, fits=0.35, # high-pass levels of what counts as an edge; error in parts of it where two edges fit
    wins=1.1, share=0.02, clear=0.05, # edges that fit only when moved: of those that fit only at rest, of all, product
    cast=5.0, zero=4.0, # levels of a recolouring to be named; of a colour that is not recoloured
    recoloured=0.08, unchanged=0.1, # of all colours in the picture: at least, at most
    twin=4.0, other=16.0) # RMS of 16x16 pixels: re-encoded copies stay below 3; of clearly different targets

def high_pass(image, size):
    """-> brightness, and what of it is finer than a 24th of the picture: float (H, W)."""
    x = image.convert("L").resize(size, Image.Resampling.BOX).convert("F")
    coarse = x.resize([max(2, round(24 * n / max(size))) for n in size], Image.Resampling.BOX)
    return np.asarray(x), np.asarray(x) - np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))

def moved(x, motion):
    """x as (shift x, shift y, zoom about the middle) show it."""
    (h, w), (dx, dy, zoom) = x.shape, motion
    affine = (1 + zoom, 0, dx - zoom * w / 2, 0, 1 + zoom, dy - zoom * h / 2)
    return np.asarray(Image.fromarray(x).transform((w, h), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR))

def find_motion(target, control, size):
    """-> (shift x, shift y, zoom) of what the target shows, against the control; or None. Robust least squares on
    gradients (Lucas and Kanade 1981), coarse to fine, from rest, from where phase correlation peaks, and from zooms.
    What was edited never fits: of the edges that fit only at rest or only moved, most must be of the second kind."""
    pyramid = [(scale, *high_pass(target, z), *high_pass(control, z)) for scale in (8, 4, 2, 1)
               if max(z := [max(4, round(n / scale)) for n in size]) >= 24 or scale == 1]
    _, _, a, _, b = pyramid[-1]
    window = np.hanning(a.shape[0])[:, None] * np.hanning(a.shape[1])
    cross = np.fft.rfft2(b * window) * np.fft.rfft2(a * window).conj()
    peak = np.fft.irfft2(cross / (abs(cross) + 1e-3 * abs(cross).max() + 1e-9), a.shape)
    far = np.unravel_index(peak.argmax(), a.shape)
    far = [n - length if n > length / 2 else n for n, length in zip(far, a.shape)]
    best = 0, None
    for n, motion in enumerate(np.array([[0, 0, 0], [far[1], far[0], 0], [0, 0, 0.05], [0, 0, -0.05]])):
        for scale, rest_a, a, rest_b, b in pyramid[-2:] if n else pyramid:
            h, w = a.shape
            y, x = np.mgrid[:h, :w] - np.array([(h - 1) / 2, (w - 1) / 2])[:, None, None]
            inside_both = lambda m: (abs(x + m[2] * x + m[0]) < w / 2 - 1) & (abs(y + m[2] * y + m[1]) < h / 2 - 1)
            motion = motion / [scale, scale, 1]
            for _ in range(6):
                now, seen = moved(b, motion), inside_both(motion)
                dy, dx = np.gradient(now)
                columns, error = np.stack([dx, dy, dx * x + dy * y], -1)[seen], (a - now)[seen]
                weighted = columns / (1 + (error[:, None] / 12) ** 2) ** 2
                motion = motion + np.linalg.solve(weighted.T @ columns + 1e-3 * np.eye(3), weighted.T @ error)
                motion = motion.clip([-w, -h, -0.5], [w, h, 0.5])
            motion = motion * [scale, scale, 1]
        # edges of both pictures that fit at rest, and moved; or by brightness alone, if their surroundings were edited
        there, errors = moved(b, motion), []
        for place, rest in ((b, rest_b), (there, moved(rest_b, motion))):
            error = np.minimum(abs(a - place), abs(rest_a - rest))
            edge = inside_both(motion) & (np.minimum(abs(a), abs(place)) > DOCTOR["structure"])
            errors.append((error, edge & (error < DOCTOR["fits"] * np.maximum(abs(a), abs(place)))))
        (error, fits), (error_then, fits_then) = errors
        up, down = (fits_then & (error > error_then + 2)).sum(), (fits & (error_then > error + 2)).sum()
        shift, edges = np.hypot(*motion[:2]), (np.maximum(abs(a), abs(there)) > 2 * DOCTOR["structure"]).sum()
        reach = max(shift, abs(motion[2]) * max(size) / 2)
        if reach < DOCTOR["edge"] / 2: # at rest, and so it would be from any start
            return None
        if (up > DOCTOR["wins"] * down and up > DOCTOR["share"] * edges and up - down > best[0]
                and up**2 > DOCTOR["clear"] * edges * (down + 3) # by chance there are many of neither, or few of both
                and reach > DOCTOR["edge"] and max(shift / max(size), abs(motion[2])) < DOCTOR["far"]):
            best = up - down, -motion
    return best[1]

def find_cast(target, control):
    """-> mean change of red, green, blue if an offset and a gain for each turn the control's colours, edited or not,
    into the target's; else None. Each colour has one vote, whatever its area: a new background is no cast. uint8 (H, W,
    3)."""
    control = control.reshape(-1, 3).astype(float)
    change = target.reshape(-1, 3) - control
    _, colour, count = np.unique(control // 32 @ [64, 8, 1], return_inverse=True, return_counts=True)
    vote = np.where(count >= 3, 1 / count, 0)[colour]
    vote = vote / max(vote.sum(), 1e-9)
    columns = np.stack([control / 128 - 1, np.ones_like(control)], -1)
    _, group = np.unique(change // 12 @ [10_000, 100, 1], return_inverse=True)
    fit = change[group == np.bincount(group, vote).argmax()].mean(0) # the most frequent; then robustly
    for sigma in (24, 16, 12, 8, 6, 6, 6):
        weight = vote / (1 + (abs(change - fit).max(1) / sigma) ** 2) ** 2
        gram = np.einsum("n,nci,ncj->cij", weight, columns, columns) + weight.sum() * np.diag([0.02, 1e-6]) + 1e-12
        right = np.einsum("n,nci,nc->ci", weight, columns, change)
        fit = np.einsum("nci,ci->nc", columns, np.linalg.solve(gram, right[..., None])[..., 0])
    like, unchanged = abs(change - fit).max(1) < 6, vote @ (abs(change).max(1) < DOCTOR["zero"])
    if unchanged > DOCTOR["unchanged"] or vote @ like < DOCTOR["recoloured"] + 1.5 * unchanged:
        return None # as many are alike by chance
    cast = np.average(fit[like], axis=0, weights=vote[like] + 1e-12)
    return cast if abs(cast).max() > DOCTOR["cast"] else None

def examine(sample):
    """-> {what is wrong with the pair of target and first control: in words}, and 16x16 copies of both, (2, 768)."""
    pair = [read_image(path) for path in [sample["target"], *sample["control"]][:2]]
    copies = [np.asarray(im.resize((16, 16), Image.Resampling.BOX)).flatten() for im in pair]
    if not sample["control"]:
        return {}, np.stack(copies * 2)
    found, (target, control) = {}, pair
    (w, h), (cw, ch) = target.size, control.size
    aspect, scale = abs(math.log(w / h / (cw / ch))), abs(math.log(w * h / (cw * ch))) / 2
    if aspect > math.log(DOCTOR["aspect"]) or scale > math.log(DOCTOR["scale"]):
        found["other shape"] = f"target {w}x{h}, control {cw}x{ch}"
    size = [max(8, round(n * min(1, DOCTOR["side"] / max(w, h)))) for n in (w, h)]
    at = lambda n: [np.asarray(im.resize([max(1, round(s / n)) for s in size], Image.Resampling.BOX)) for im in pair]
    whole, blocks = [np.subtract(*at(n), dtype=float) for n in (1, 8)]
    if np.sqrt((whole.mean(-1) ** 2).mean()) < DOCTOR["identical"] and abs(blocks).max() < DOCTOR["block"]:
        return found | {"identical": f"differ by {abs(whole).mean():.1f} levels"}, np.stack(copies)
    if aspect < math.log(DOCTOR["aspect"]) and (motion := find_motion(target, control, size)) is not None:
        dx, dy = motion[:2] * max(w, h) / max(size)
        found["moved"] = f"{dx:+.1f} px right, {dy:+.1f} px down, zoom {100 * motion[2]:+.1f} %"
    if (cast := find_cast(*at(max(1, max(size) / 64)))) is not None:
        found["recoloured"] = "by {:+.0f} red, {:+.0f} green, {:+.0f} blue".format(*cast)
    return found, np.stack(copies)

def find_twins(samples, copies):
    """-> [(kind, in words, (i, j))]: the same pair twice, and captions that contradict each other. copies:
    (2, N, 768)."""
    ids = lambda values: np.unique(values, return_inverse=True)[1]
    asked = ids([" ".join(s["text"][0]["prompt"].lower().split()) for s in samples])
    further = ids([str(s["control"][1:]) + str(bool(s["control"])) for s in samples])
    edits, twins = np.array([bool(s["control"]) for s in samples]), []
    x = copies.astype(np.float32) - 128
    square = (x ** 2).sum(-1)
    for i, sample in enumerate(samples):
        target, control = [np.sqrt(abs(q[i:] + q[i] - 2 * y[i:] @ y[i]) / 768) for q, y in zip(square, x)]
        near, same = (control < DOCTOR["twin"]) & (further[i:] == further[i]), asked[i:] == asked[i]
        for kind, which in (("duplicate", near & same & (target < DOCTOR["twin"])),
                            ("other caption", near & ~same & (target < DOCTOR["twin"])),
                            ("other target", near & same & edits[i:] & (target > DOCTOR["other"]))):
            twins += [(kind, f"and {samples[i + j]['name']}", (i, i + j)) for j in np.flatnonzero(which) if j]
    return twins

def write_report(every_sample, folder):
    """FOLDER/report.json and sheet_*.png; prints a table of what the dataset holds, and what was found -> problems."""
    samples, found, copies, problems = [], [], [], []
    for sample in tqdm(every_sample, desc="examining pairs", unit=" samples", disable=None, leave=False):
        try:
            wrong, small = examine(sample)
        except InputError as e: # a broken picture
            problems.append(str(e))
            continue
        found += [(kind, words, (len(samples),)) for kind, words in wrong.items()]
        samples.append(sample)
        copies.append(small)
    for p in problems:
        print(p, file=sys.stderr)
    if not samples:
        return problems
    found += find_twins(samples, np.stack(copies, 1))
    rows = [dict(name=s["name"], sizes=s["sizes"], aspect=s["sizes"][0][0] / s["sizes"][0][1], repeats=s["repeats"],
                 controls=len(s["control"]), text_tokens=[t["tokens"] for t in s["text"]],
                 findings=[f"{kind}: {words}" for kind, words, of in found if of[0] == i],
                 image_tokens=[sum(h * w for _, h, w in scale["img_shapes"]) for scale in s["scales"]])
            for i, s in enumerate(samples)]
    lines = ",\n".join(map(json.dumps, rows))
    write_file(Path(folder, "report.json"), f"[{lines}]\n".encode())
    by_kind = {}
    for entry in found:
        by_kind.setdefault(entry[0], []).append(entry)
    overview = [("overview", s["text"][0]["prompt"], (i,)) for i, s in enumerate(samples)]
    write_sheets(samples, {"overview": overview[::max(1, len(samples) // 12)][:12], **by_kind}, folder)
    print_table(rows)
    for kind, entries in by_kind.items():
        names = [f"{samples[of[0]]['name']} {words}" for _, words, of in entries[:8]]
        print(f"{kind}, {len(entries)}: {'; '.join(names)}{'; ...' if len(entries) > 8 else ''}")
    print(f"{folder}: report.json has all of them, sheet_*.png their pictures")
    return problems

def write_sheets(samples, by_kind, folder):
    """FOLDER/sheet_<kind>_<page>.png; an entry is (kind, words, (index of a sample, perhaps of its twin))."""
    from predict import contact_sheet, save_png # predict.py imports this file
    for old in Path(folder).glob("sheet_*.png"):
        old.unlink()
    for kind, entries in by_kind.items():
        titles = ["", "control", "target", "its control", "its target"][:1 + 2 * len(entries[0][2])]
        for page in range(0, len(entries), 24):
            rows = []
            for _, words, of in entries[page:page + 24]:
                paths = [path for i in of for path in ((samples[i]["control"] or [None])[0], samples[i]["target"])]
                small = lambda path: ImageOps.contain(read_image(path), (192, 192), Image.Resampling.LANCZOS)
                pictures = [path and small(path) for path in paths]
                rows.append([f"{samples[of[0]]['name']}: {words}", *pictures])
            save_png(contact_sheet(rows, titles),
                     Path(folder, f"sheet_{kind.replace(' ', '_')}_{page // 24 + 1}.png"))

def print_table(rows):
    lengths = np.array([[r["image_tokens"][0], r["text_tokens"][0]] for r in rows])
    order = np.random.default_rng(0).permutation(len(rows))
    padded = sum(len(four) * lengths[four].max(0).sum() for four in np.split(order, range(4, len(order), 4)))
    print(f"{len(rows)} samples, {sum(r['repeats'] for r in rows)} in an epoch; padding random batches of 4 would "
          f"compute {padded / lengths.sum() - 1:.0%} more tokens than packing them")
    columns = {"target width": [r["sizes"][0][0] for r in rows], "aspect": [r["aspect"] for r in rows],
               "target height": [r["sizes"][0][1] for r in rows], "controls": [r["controls"] for r in rows],
               "image tokens": [n for r in rows for n in r["image_tokens"]],
               "text tokens": [n for r in rows for n in r["text_tokens"]]}
    print(f"{'':16}     min  median     max")
    for title, values in columns.items():
        print(f"{title:16}{min(values):8.5g}{np.median(values):8.5g}{max(values):8.5g}")

# ---- command line ----------------------------------------------------------------------------------------------------

def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    add_data_flags(parser)
    parser.add_argument("--empty_prompt", action=argparse.BooleanOptionalAction, default=False,
                        help="encode the empty prompt too, for train.py --caption_dropout_rate")
    parser.add_argument("--plain_prompt", action=argparse.BooleanOptionalAction, default=False,
                        help="encode prompts without their pictures too, for train.py --prompt_image_dropout_rate")
    parser.add_argument("--verify", action="store_true", help="read every file of the cache; encode damaged ones again")
    parser.add_argument("--report", action="store_true",
                        help="encode nothing: tell what the dataset holds, and look for bad pairs (shifted, "
                             "recoloured, twice, ...); CACHE_DIR/report has their pictures")
    parser.add_argument("--prune", action="store_true", help="delete files that no sample of this dataset uses")
    args = parse_args(parser, TINY)
    if not args.data or not all(args.data):
        parser.error("argument --data: missing; give the dataset's folder or manifest")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    cache_dir = Path(args.cache_dir or Path("cache", run_name(args.model, args.data)))
    folder = find_model(args.model, ENCODER_PARTS)
    args.data, args.reg_data = [export_parquet(r, cache_dir, rank, world_size) for r in (args.data, args.reg_data)]
    if args.report:
        index, problems = build_index(load_pipeline(folder), folder, args, args.empty_prompt)
        report(index, problems)
        problems += write_report(index["samples"], cache_dir / "report")
        sys.exit(1 if problems and not args.skip_bad or not index["samples"] else 0)
    index, problems = make_cache(load_pipeline(folder), folder, args, cache_dir, args.empty_prompt, rank, world_size,
                                 args.verify, args.plain_prompt)
    if rank == 0:
        if args.prune and problems:
            raise InputError("--prune: would delete what the samples above need once they are mended; mend them first")
        look_after(cache_dir, index, args.prune)
    if world_size > 1:
        dist.destroy_process_group()
    if not index["samples"] or (problems and not args.skip_bad):
        sys.exit(1)
    if rank == 0:
        print(f"{cache_dir}: complete. next: python train.py, with the same --model, --data and sizes")

if __name__ == "__main__":
    main()
