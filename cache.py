"""
Encode samples once, so that training and sampling need only the transformer.

A sample is one or more control (input) pictures and an instruction; for training also a target, and maybe a mask. A
dataset is a folder of samples, or a manifest (metadata.jsonl) with paths inside its folder:
    data/target/cat.png     data/target/cat.txt         the picture wanted and the instruction that asks for it;
                                                        several lines are several wordings: one is drawn per use
    data/control/cat.png    data/control/cat_1.png ...  the picture given; further ones, any number, any sizes
    data/mask/cat.png                                   optional: white = the edited region
    data/metadata.jsonl     {"target": "a.png", "control": ["b.png"], "prompt": "make it snow", "mask": "c.png"}
tools/import_data.py converts other layouts. Encoded samples go to CACHE_DIR/latents/*.safetensors and
CACHE_DIR/text/*.safetensors, named by a hash of all that decides their content: a second run encodes only what has
changed (tools/prune.py deletes what is left over). CACHE_DIR/<model>-<data>.json, an index, joins them to the samples;
train.py also takes it as --data.

$ python cache.py                                                     # the toy dataset in tiny/
$ python cache.py --model Qwen/Qwen-Image-Edit-2509 --data photos     # yours
$ torchrun --nproc_per_node=4 cache.py --model ... --data photos      # four processes share the work
$ python cache.py --model ... --data photos drawings --repeats 1 5 --reg_data faces  # mixed; faces: pictures alone

train.py and predict.py call the same functions; run this script alone to encode on another machine.
"""
import argparse
import contextlib
import difflib
import gc
import hashlib
import importlib
import inspect
import json
import math
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
import unicodedata
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import diffusers
import numpy as np
import psutil
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from diffusers import AutoencoderKLQwenImage, DiffusionPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE, calculate_dimensions
from PIL import Image
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import BatchFeature, Qwen2_5_VLForConditionalGeneration

try: # the one that works without torchvision; from transformers 5.4 on it has a name of its own
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
except ModuleNotFoundError:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Qwen2VLImageProcessorPil

from rope_patch import ROPE_TABLE

VERSION = "2.0" # of the cache files
PREPROCESSING = 1 # part of every key: add 1 when the preparation of pictures or prompts changes
KINDS = {".txt": "caption", **dict.fromkeys([".png", ".jpg", ".jpeg", ".webp", ".bmp"], "picture"), # by suffix
         **dict.fromkeys([".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl"], "other")} # not read, but named
FOLDERS = dict(target=("target", "training_images"), control=("control", "control_images"), mask=("mask",))
LAYOUT = "want target/NAME.png + .txt and control/NAME.png, or metadata.jsonl; tools/import_data.py converts others"
MAX_PIXELS = 100_000_000 # a larger picture is refused before it is decoded
Image.MAX_IMAGE_PIXELS = None # PIL's own limit is a warning first, and threads cannot silence a warning safely
NEGATIVE_PROMPT = " " # what an unconditional run is told, as in the model cards

@dataclass
class Sample:
    """A training pair, a held-out pair, a line of jobs.jsonl, a photo to edit."""
    name: str # its path in the dataset, without suffix
    root: str # the dataset's name
    controls: list # pictures given, in order; none: text-to-image
    prompts: list # wordings of the instruction; an epoch draws one of them each time
    target: str | None = None # the picture wanted; None: the sample is only drawn
    mask: str | None = None # white = the edited region
    repeats: int = 1 # how often an epoch has it
    settings: dict = field(default_factory=dict) # flags of predict.py that its line of jobs.jsonl sets
    # plan_sample adds what will be encoded:
    # (width, height) in pixels: of the target, or of what the result takes its shape from, then of the controls
    sizes: list = field(default_factory=list)
    # the same of the controls' copies for the text encoder
    prompt_sizes: list = field(default_factory=list)
    # for each of --target_pixels dict(file of the latents, img_shapes: (1, height, width) in tokens, target's first,
    # mask="auto" if it is to be made)
    resolutions: list = field(default_factory=list)
    # {(prompt, whether pictures come with it): dict(file, tokens)}
    texts: dict = field(default_factory=dict)

def error_line(message):
    return "error: " + message.replace("\n", "\\n") # names may hold anything

class InputError(SystemExit): # so that a script ends with this one line and status 1, without a traceback
    """Something of the user's is wrong: InputError('<file or flag>: <what is wrong>; <what to do>')."""

    def __init__(self, message):
        super().__init__(error_line(message))

# ---- the command line: what the scripts share ------------------------------------------------------------------------

TINY_DATA = Path(__file__).with_name("tiny") / "data"
TINY = dict(data=[str(TINY_DATA)], target_pixels=["native"], control_pixels="native") # defaults of --model tiny
EXTRAS = dict(quantize="low_bit", quantize_text_encoder="low_bit", offload="offload", fsdp="shard", plan="plan",
              tracker="track", mask="motion") # flag: the file in extras/ that it switches on
PACKAGES = dict(nf4="bitsandbytes", tensorboard="tensorboard", wandb="wandb") # a flag's value: what it needs

def find_extra(name):
    """The module extras/NAME.py, or None if it was deleted."""
    try:
        return importlib.import_module(f"extras.{name}")
    except ModuleNotFoundError as e:
        if not e.name.startswith("extras"):
            raise

def load_extra(flag):
    """The module in extras/ that this flag switches on. InputError if it is not here."""
    if module := find_extra(EXTRAS[flag]):
        return module
    raise InputError(f"--{flag}: needs extras/{EXTRAS[flag]}.py; copy it here, or leave the flag out")

def pixels(text):
    """'native', 1048576 or 1024*1024 -> 'native' or an area in pixels."""
    if text == "native":
        return text
    area = math.prod(int(n) for n in re.split(r"[*x]", text)) if re.fullmatch(r"\d+([*x]\d+)?", text) else 0
    if text.isdigit() and area <= 4096: # other trainers give a side
        raise argparse.ArgumentTypeError(f"{text} would be an area; give {text}x{text}")
    if area < 32 * 32:
        raise argparse.ArgumentTypeError(f"{text!r} is no area; give 1048576, 1024x1024 or native")
    return area

def number(kind, low, high=math.inf):
    """For argparse's type=: an int or a float from low to high; anything else ends the script with status 2."""
    def parse(text):
        if not low <= (value := kind(text)) <= high: # False for nan too
            raise argparse.ArgumentTypeError(
                f"{text} is out of range; give {low} " + ("or more" if high == math.inf else f"to {high}"))
        return value
    parse.__name__ = kind.__name__ # argparse says "invalid int value"
    return parse

def add_model_flags(parser):
    flag = parser.add_argument_group("model").add_argument
    flag("--model", default="tiny", help="hub id (ID@REVISION pins it) or folder of Qwen-Image-Edit, -2509 or -2511")
    flag("--dtype", choices=["float32", "bfloat16", "float16"],
         help="of the frozen models and the cache (default: float32 on CPU, else bfloat16)")
    flag("--device", help="default: cuda if there is one, else cpu; under torchrun one per process")
    flag("--flash_attention", choices=["auto", "2"], default="auto",
         help="auto: 3 on Hopper, 4 on data centre Blackwell, where its package is installed; else 2")
    flag("--cache_dir", default="cache", help="where encoded samples of all models and datasets are kept")
    flag("--max_sequence_length", type=number(int, 1), default=1024,
         help="most tokens in a prompt; a longer prompt is an error, it is not cut")
    flag("--vae_device", help="where pictures are encoded and decoded (default: --device)")
    flag("--text_encoder_device", help="default: --device; cpu if memory runs out while encoding")
    add_quantize_flag(flag, "--quantize_text_encoder", "the text encoder's linear layers, 16 GB in bf16")

def add_quantize_flag(flag, name, what):
    flag(name, choices=["none", "int8", "fp8", "nf4"], default="none",
         help=f"{what}: int8 or fp8 (half the memory) or nf4 (a quarter; pip install bitsandbytes)")

def add_data_flags(parser):
    flag, on_off = parser.add_argument_group("data").add_argument, argparse.BooleanOptionalAction
    flag("--data", nargs="+", metavar="DATA",
         help="dataset folders or metadata.jsonl files; or one index (.json) that cache.py has written")
    flag("--repeats", type=number(int, 1), nargs="+", metavar="N",
         help="how many times an epoch uses each --data, one number for each (default: 1)")
    flag("--reg_data", nargs="+", default=[], metavar="DIR", help="folders of NAME.png + NAME.txt without controls, "
         "trained beside the edits as text-to-image, so that the model does not forget (default: none)")
    flag("--val_data", nargs="*", metavar="DATA", help="validation datasets, not trained on: their loss is "
         "logged, their pictures are drawn without and with the LoRA (default: none; the toy dataset has its own)")
    flag("--target_pixels", type=pixels, nargs="+", default=[1024 * 1024], metavar="AREA",
         help="area of the target (default: 1024x1024); several: one is drawn for each sample; native: own size")
    flag("--control_pixels", type=pixels, default=1024 * 1024, metavar="AREA",
         help="area of the controls, likewise (default: 1024x1024)")
    flag("--upscale", action=on_off, default=True, help="enlarge smaller pictures to the area, as stock does")
    flag("--caption_dropout_rate", type=number(float, 0, 1), default=0.0,
         help="share of samples trained with the empty prompt")
    flag("--prompt_image_dropout_rate", type=number(float, 0, 1), default=0.0,
         help="share of samples trained as text-to-image, without their controls; not with v1")
    flag("--preserve", type=number(float, 0, 1), default=0.0, metavar="P", help="share of samples that get another "
         "instruction and learn what the base answers to it, so that the model does not forget")
    flag("--preserve_prompts", nargs="+", default=[NEGATIVE_PROMPT], metavar="TEXT",
         help="instructions that the base follows, for --preserve (default: an empty one)")
    flag("--mask", choices=["auto"], help="auto: a pair without a mask gets one of where target and control differ "
         "(default: none; tools/doctor.py --mask auto draws them)")
    flag("--skip_bad", action=on_off, default=False, help="go on without the samples that have an error")

class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action): # a default of None is explained in the help itself
        explained = action.default in (None, []) or "default" in action.help
        return action.help if explained else super()._get_help_string(action)

OTHER_NAMES = dict( # our flag: what others call it, where the spelling alone does not tell
    lr="learning_rate", lora_rank="rank network_dim linear", lora_alpha="linear_alpha", max_steps="steps", offload=
    "blocks_to_swap layer_offloading enable_model_cpu_offload", num_inference_steps="steps", true_cfg_scale=
    "cfg guidance_scale", target_pixels="resolution image_size", lora="adapter lora_path", image="control_image_path",
    pretrained_lora="network_weights init_lora lora_path lora_checkpoint preset_lora_path", base_lora=
    "base_weights assistant_lora_path", batch_size="gradient_accumulation_steps", lora_scale="lora_weight "
    "lora_multiplier", data="dataset_config train_data_dir dataset_base_path folder_path image_dir", model=
    "pretrained_model_name_or_path dit", out="output output_path save_path", save_every="checkpointing_steps",
    dtype="mixed_precision", tracker="report_to log_with", quantize="fp8_base fp8_scaled quant_options "
    "base_model_precision", out_dir="save_dir output_name", jobs="from_file", resume="resume_from_checkpoint",
    repeats="dataset_repeat num_repeats", val_data="validation_prompts", sample_every="validation_step_interval")

class Parser(argparse.ArgumentParser): # a class because argparse calls its method `error`
    """-h shows all defaults; what is wrong is one line, with the flag that may be meant, and status 2."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=HelpFormatter, allow_abbrev=False)

    def error(self, message):
        line, unknown = message.removeprefix("argument "), message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flags = [word for word in unknown.split() if word.startswith("--")] or unknown.split()[:1]
            line = "; ".join(map(self.unknown, flags))
        if ";" not in line: # argparse's own, which names no remedy
            line += f"; see {self.prog} -h"
        self.exit(2, error_line(line) + "\n")

    def unknown(self, word):
        if not word.startswith("-"):
            return f"{word}: belongs to no flag; --data takes datasets, --out_dir runs; put a text in quotes"
        name, known = word.split("=")[0].strip("-").replace("-", "_"), self._option_string_actions
        if "epoch" in name:
            return f"{word}: unknown; count in steps: --max_steps, --save_every, --sample_every"
        meant = [f"--{k}" for k, names in OTHER_NAMES.items() if name in names.split() and f"--{k}" in known]
        meant += difflib.get_close_matches(f"--{name}", known, 1, 0.8)
        return f"{word}: unknown" + (f"; here {meant[0]}" if meant else "")

    def parse_args(self):
        sys.excepthook = end_by_ctrl_c
        for flag in ("--data", "--reg_data", "--image", "--lora"): # argparse would take the last one alone
            if sys.argv.count(flag) > 1:
                self.error(f"argument {flag}: given twice; put all values behind one")
        return super().parse_args()

def is_tiny(model):
    """Whether this is tiny/, however its path is spelled, or a model of the same shape: a copy, a merged one."""
    def shape(folder): # the rest says where it was saved, by which version
        config = json.loads((folder / "transformer" / "config.json").read_text())
        return {k: v for k, v in config.items() if not k.startswith("_")}
    try:
        return model == "tiny" or shape(Path(model)) == shape(TINY_DATA.parent)
    except (OSError, ValueError, AttributeError): # no folder, or a broken one: find_model says so
        return False

def parse_args(parser, tiny):
    """parser.parse_args(), where --model tiny (the default) brings the defaults in `tiny`. Fills in devices and dtype,
    and refuses a flag whose package or file in extras/ is missing."""
    parser.epilog = f"With --model tiny these defaults apply: {tiny}"
    args = parser.parse_args()
    if is_tiny(args.model):
        parser.set_defaults(**tiny)
        args = parser.parse_args()
    if args.device is None and not torch.cuda.is_available() and not is_tiny(args.model) and not vars(args).get("plan"):
        check_size_for_cpu(args.model)
    if not args.cache_dir:
        parser.error("argument --cache_dir: empty; give a folder")
    default = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name in [name for name in vars(args) if name.endswith("device")]:
        device = getattr(args, name) or default
        if device == "cuda": # each process its own
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        elif device.startswith("cuda") and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            parser.error(f"argument --{name}: {device} for all processes; give cuda, which is one for each")
        setattr(args, name, device)
        if problem := device_problem(device):
            parser.error(f"argument --{name}: {problem}")
    args.dtype = args.dtype or ("float32" if args.device.startswith("cpu") else "bfloat16")
    tuned = args.device.startswith("cuda") and find_extra("cuda") # without it a card works as torch sets it up
    if tuned and (problem := tuned.problem(args.device, args.dtype)):
        parser.error(f"argument --device: {problem}")
    for name, value in vars(args).items():
        if name in EXTRAS and value and value != "none":
            load_extra(name)
            if value in PACKAGES and not find_spec(PACKAGES[value]):
                parser.error(f"argument --{name}: {value} needs a missing package; pip install {PACKAGES[value]}")
    return args

def device_problem(device):
    """Why torch cannot use a device of this name here, or None."""
    try:
        torch.empty(0, device=device).cpu() # (meta has no numbers)
    except (RuntimeError, AssertionError) as e:
        return f"{device!r} cannot be used ({first_words(e, 90)})"

def first_words(e, most=300):
    """What an exception says, in one line."""
    return textwrap.shorten(str(e).strip() or type(e).__name__, most)

def check_size_for_cpu(model):
    """InputError where a large model would go to the CPU, in float32, because no GPU can be used."""
    weights = [file.stat().st_size for file in Path(model).glob("*/*.safetensors")]
    if not Path(model).exists() or sum(weights) > 4e9:
        raise InputError(f"--device: no usable GPU (torch {torch.__version__} is built for CUDA "
                         f"{torch.version.cuda or '-'}; CUDA 13 needs driver 580 or newer, see nvidia-smi); update the "
                         "driver, install a torch that fits it, or give --device cpu")

def parse_data_args(parser, tiny):
    """parse_args, with the flags of add_data_flags."""
    args = parse_args(parser, tiny)
    if args.val_data is None: # not given
        own = args.data == TINY["data"]
        args.val_data = [str(TINY_DATA.with_name("val")), str(TINY_DATA.with_name("known"))] if own else []
    if not args.data or not all(args.data):
        parser.error("argument --data: missing; give a dataset folder, a metadata.jsonl, or an index of cache.py")
    if any(map(is_index, args.data)) and len(args.data + args.reg_data) > 1:
        parser.error("argument --data: an index holds a whole training's samples; give it alone")
    if args.mask and any(map(is_index, args.data)):
        parser.error("argument --mask: an index has its masks; leave it out, or give it to cache.py")
    if args.preserve_prompts != [NEGATIVE_PROMPT] and not args.preserve:
        parser.error("argument --preserve_prompts: has no use without --preserve; give both")
    if args.repeats and len(args.repeats) != len(args.data):
        parser.error(f"argument --repeats: {len(args.repeats)} for {len(args.data)} --data; give one number each")
    return args

def end_by_ctrl_c(kind, error, trace):
    """One line where no signals_noted is at work: files appear whole or not at all, so nothing is to be cleaned up."""
    first = error
    while first and not isinstance(first, KeyboardInterrupt): # it may have come while a library held a lock
        first = first.__context__
    if not first:
        return sys.__excepthook__(kind, error, trace)
    print("\nstopped by Ctrl-C: what is written stays; the same command goes on with the rest", file=sys.stderr)

def start_processes(args):
    """-> (rank, number of processes), as torchrun says. Objects are sent over the CPU, gradients over --device."""
    for library in (diffusers, transformers): # a bar for each small model would hide ours
        library.utils.logging.disable_progress_bar()
    for stream in (sys.stdout, sys.stderr): # a file name that is no UTF-8 must not end a run
        stream.reconfigure(errors="backslashreplace")
    if is_tiny(args.model) and args.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1) # too small for more: two take twice as long, beside a busy process ten times
    cuda = args.device.startswith("cuda")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if cuda:
        tuned = find_extra("cuda")
        card = tuned.prepare(args.device, args.flash_attention) if tuned else "extras/cuda.py is missing: slower"
        torch.cuda.set_device(args.device) # where NCCL works
        if rank == 0:
            print(card)
    if world_size > 1: # some wait for hours while others encode or draw (with device_id they would wait in NCCL)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=6))
    return rank, world_size

def memory_of(device):
    """GiB: on a GPU the most that torch has held since the encoders left, on a CPU what the process has now."""
    used = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else psutil.Process().memory_info().rss
    return used / 2**30

@contextlib.contextmanager
def signals_noted():
    """with signals_noted() as stopped: signals only fill this list, so that what is begun can be finished."""
    stopped, handle = [], signal.signal # a name of its own, as modules are gone when the interpreter ends
    numbers = [getattr(signal, n) for n in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, n)] # Windows lacks one
    before = {number: handle(number, lambda number, _: stopped.append(number)) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            handle(number, handler)

# ---- files: written whole or not at all, checked when read -----------------------------------------------------------

def write_file(path, data):
    """Writes a temporary file beside `path`, fsyncs and renames it, and fsyncs the folder: after a kill or a power loss
    there is the old file or the new one, never a part. InputError if the disk is full or may not be written."""
    path = Path(path)
    tmp = path.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(tmp, "xb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
        sync_folder(path.parent)
    except OSError as e:
        with contextlib.suppress(OSError): # what a kill leaves here, prepare_folder deletes
            tmp.unlink()
        raise InputError(f"{path}: {len(data):,} bytes cannot be written ({e.strerror}); free some space, or fix the "
                         "folder's permissions, and run again")

def sync_folder(path):
    """A rename is safe from power loss only when the folder is on the disk too (Windows cannot do that)."""
    if os.name != "nt":
        folder = os.open(path, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

def prepare_folder(path, remedy):
    """Makes the folder; deletes what killed processes left unfinished (an hour old: younger ones may be at work).
    InputError if no file can be written there."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
        for tmp in Path(path).glob(".tmp-*"):
            with contextlib.suppress(FileNotFoundError): # another process has deleted it
                if tmp.is_file() and time.time() - tmp.stat().st_mtime > 3600:
                    tmp.unlink()
    except OSError as e:
        raise InputError(f"{path}: cannot be written ({e.strerror}); {remedy}")

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
        raise InputError(f"{path}: missing; {'run cache.py again' if key else 'take another copy'}")
    except (OSError, SafetensorError, KeyError, ValueError, AttributeError, TypeError) as e:
        raise InputError(f"{path}: no checked safetensors file ({type(e).__name__}: {e}); {fix}")
    if hashlib.sha256(data.replace(digest, NO_DIGEST.encode(), 1)).hexdigest().encode() != digest:
        raise InputError(f"{path}: content does not match its digest; {fix}")
    if key is not None and (meta.get("key"), meta.get("version")) != (key, VERSION):
        raise InputError(f"{path}: holds {meta.get('key')} of version {meta.get('version')}, want {VERSION}; {fix}")
    return tensors, meta

def file_hash(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()

def content_key(**fields):
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

# ---- datasets: folders and manifests -> samples ----------------------------------------------------------------------

def root_name(data):
    """A dataset's name: its folder's."""
    data = Path(data).resolve()
    return data.parent.name if data.is_file() else data.name

def read_dataset(root, alone=False):
    """A folder or manifest -> (samples, problems): one line for everything that is wrong. No picture is opened yet.
    InputError if there is no dataset at all. With `alone` the pictures of a folder have no controls."""
    root = Path(root)
    manifest = root if root.is_file() else root / "metadata.jsonl"
    if root.is_dir() and (find_folder(root, "target").is_dir() or (alone and not manifest.is_file())):
        samples, problems = read_folder(root, alone)
    elif manifest.is_file() and manifest.suffix == ".jsonl":
        samples, problems = read_manifest(manifest, alone)
    else:
        held = ", ".join(sorted(p.name for p in root.iterdir())[:5]) if root.is_dir() else ""
        what = "no dataset" + f", it holds {held}" * bool(held) if root.exists() else "does not exist"
        raise InputError(f"{root}: {what}; {LAYOUT}")
    if not samples and not problems:
        raise InputError(f"{root}: no pictures in it; {LAYOUT}")
    return samples, problems

def find_folder(data, role):
    """data/target under the name that it has here. InputError if there are two."""
    found = [data / name for name in FOLDERS[role] if (data / name).is_dir()]
    if len(found) > 1:
        raise InputError(f"{found[1]}: means the same as {found[0].name}/; keep one of them")
    return found[0] if found else data / role

def find_files(folder):
    """Files below `folder` -> {(stem relative to it, kind): [paths]}, sorted; kind: one of KINDS, or "link" for a link
    to a folder, which is not followed. Stems are NFC, so that names from macOS match."""
    def unreadable(e):
        if not isinstance(e, FileNotFoundError): # mask/ need not be there
            raise InputError(f"{e.filename}: cannot be read ({e.strerror}); fix its permissions")
    found = {}
    for root, dirs, names in os.walk(folder, onerror=unreadable):
        links = [name for name in dirs if Path(root, name).is_symlink()]
        for path in [Path(root, name) for name in sorted(names + links) if not name.startswith(".")]:
            if kind := "link" if path.name in links else KINDS.get(path.suffix.lower()):
                stem = path.relative_to(folder).with_suffix("").as_posix()
                found.setdefault((unicodedata.normalize("NFC", stem), kind), []).append(path)
    return dict(sorted(found.items()))

def read_folder(data, alone=False):
    """target/, control/ and mask/ below `data` (with `alone`, `data` itself as the targets) -> (samples, problems)."""
    folders = dict(target=data) if alone else {role: find_folder(data, role) for role in FOLDERS}
    left = {(role, *key): paths for role, folder in folders.items() for key, paths in find_files(folder).items()}
    take = lambda role, stem, kind="picture": left.pop((role, stem, kind), [])
    samples, problems = [], []
    for name in [stem for role, stem, kind in left if (role, kind) == ("target", "picture")]:
        target, caption, mask = take("target", name), take("target", name, "caption"), take("mask", name)
        controls, next_name = [take("control", name)], f"{name}_1"
        while ("target", next_name, "picture") not in left and (paths := take("control", next_name)):
            controls.append(paths)
            next_name = f"{name}_{len(controls)}"
        try:
            for first, *twins in filter(None, (target, caption, mask, *controls)):
                if twins:
                    raise InputError(f"{first}: {twins[0].name} has the same name; keep one of them")
            if not alone and not controls[0]:
                raise InputError(f"{target[0]}: no control; expected {folders['control'] / name}.png")
            if further := left.get(("control", next_name, "picture")): # and a target has this name
                raise InputError(f"{further[0]}: either the control of the target with its name, or one more control "
                                 f"of {name}; rename one of the two targets")
            if not caption:
                raise InputError(f"{target[0]}: no caption; expected {target[0].with_suffix('.txt')}")
            lines = [line.strip() for line in re.split("[\r\n]", read_text(caption[0])) if line.strip()]
            samples.append(make_sample(caption[0], data, name, target[0], sum(controls, []), lines, *mask))
        except InputError as e:
            problems.append(str(e))
    strays = [path for paths in left.values() for path in paths]
    strays += [data / "metadata.jsonl"] * (not alone and (data / "metadata.jsonl").exists())
    return samples, problems + [
        error_line(f"{path}: not used: no target has this name (controls are NAME, NAME_1, NAME_2, ... without gaps), "
                   "or this kind of file is not read; rename, convert or delete it") for path in strays]

def read_manifest(path, alone=False, settings=None):
    """metadata.jsonl, lines of JSON with target, control, prompt and mask; or with `settings`, {field: type},
    jobs.jsonl, with control (or image), prompt and any of these -> (samples, problems)."""
    samples, problems, seen = [], [], {}
    lines = read_text(path).split("\n") # not splitlines, which takes U+2028 in a prompt for the end of a line
    lines = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if settings is None and lines and not re.search('"(target|prompt)"', lines[0][1]):
        raise InputError(f"{path}: another trainer's manifest; python tools/import_data.py {path} NEW_FOLDER")
    for n, line in lines:
        try:
            sample = read_row(path, n, line, alone, settings)
            pictures = [os.path.realpath(p) for p in (sample.target or str(n), *sample.controls, sample.mask or "")]
            if seen.setdefault(key := json.dumps([pictures, sample.prompts]), n) != n:
                raise InputError(f"{path}:{n}: the same as line {seen[key]}; delete one")
            samples.append(sample)
        except InputError as e:
            problems.append(str(e))
    return samples, problems

def read_row(manifest, n, line, alone, settings):
    """A line of a manifest -> Sample, named as its target; without one by the line's number and its first picture."""
    where = f"{manifest}:{n}"
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise TypeError(f"a {type(row).__name__}")
        if settings is not None and "control" not in row and "image" in row:
            row["control"] = row.pop("image")
        known = dict(control=(str, list)) | (dict(prompt=str) | settings if settings is not None else dict(
            prompt=(str, list), target=str, mask=(str, type(None))))
        need = ["prompt"] + ["target"] * (settings is None) + ["control"] * (not alone)
        wrong = [k for k in [*need, *row] if k not in row or not isinstance(row[k], known.get(k, ()))
                 or isinstance(row[k], bool)] # which is an int to Python
    except (ValueError, RecursionError, AttributeError, TypeError) as e:
        raise InputError(f"{where}: no JSON object ({e}); one a line, no comma behind its last field")
    if wrong:
        raise InputError(f"{where}: field {wrong[0]!r} is missing, unknown or of a wrong type; want {', '.join(known)} "
                         '("control": [] for a picture without controls)')
    listed = lambda value: [value] if isinstance(value, str) else value
    target, mask = [find_picture(manifest, where, row[k], settings) if row.get(k) is not None else None
                    for k in ("target", "mask")]
    controls = [find_picture(manifest, where, name, settings) for name in listed(row.get("control", []))]
    name = f"{n:03}" + "".join(f"-{p.stem}" for p in controls[:1])
    name = os.path.splitext(os.path.relpath(target, manifest.parent))[0] if target else name
    return make_sample(where, manifest, name, target, controls, listed(row["prompt"]), mask,
                       {k: v for k, v in row.items() if k in (settings or ())})

def find_picture(manifest, where, name, settings):
    """A manifest's path -> file. A dataset's, which may come from strangers, stays in its folder, also after following
    links; your own jobs.jsonl may name any file."""
    folder = manifest.parent
    try:
        file = Path(os.path.normpath(folder / name))
        found = file.is_file() and (settings is not None or file.resolve().is_relative_to(folder.resolve()))
    except (TypeError, ValueError, OSError, RuntimeError): # no text, half a character or NUL in it, links in a circle
        found = False
    if not found and settings is not None:
        raise InputError(f"{where}: {name!r} is no file; give its path, from {folder} or from /")
    if not found:
        raise InputError(f"{where}: {name!r} is no file inside {folder}; correct it, or move the "
                         "manifest to a folder above its pictures")
    return file

def make_sample(where, root, name, target, controls, prompts, mask=None, settings=None):
    """-> Sample. InputError if a prompt is empty, or holds what the tokenizer would take for its own marks."""
    for prompt in prompts or [""]:
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError(f"{where}: empty prompt, or no text; write the instruction into it")
        check_text(where, prompt)
    return Sample(str(name), root_name(root), list(map(str, controls)), list(dict.fromkeys(p.strip() for p in prompts)),
                  target and str(target), mask and str(mask), settings=settings or {})

def check_text(where, prompt):
    if "<|" in prompt or re.search("[\ud800-\udfff]", prompt):
        raise InputError(f"{where}: a special token, or half a character, in {prompt!r}; leave it out")

def read_text(path):
    """A text file in UTF-8 (editors on Windows write a mark before it). InputError names the file."""
    if not path.exists():
        raise InputError(f"{path}: does not exist; check the name")
    try:
        text = path.read_bytes().decode("utf-8-sig") if path.is_file() else "\0" # a FIFO would hang
        if "\0" not in text: # UTF-16 can pass for UTF-8
            return text
    except (OSError, ValueError):
        pass
    raise InputError(f"{path}: no readable text in UTF-8 (Latin-1 or UTF-16?); save it as UTF-8")

# ---- pictures --------------------------------------------------------------------------------------------------------

def open_image(path):
    """Header only: a PIL image whose size is known and allowed. InputError names the file."""
    if not os.path.isfile(path): # a FIFO or socket would hang, a folder or dangling link cannot be read
        raise InputError(f"{path}: no file of that name; add it")
    try:
        image = Image.open(path, formats=["PNG", "JPEG", "WEBP", "BMP"])
    except PermissionError:
        raise InputError(f"{path}: may not be read; mend its permissions")
    except (OSError, ValueError, SyntaxError):
        what = "an empty file" if os.path.getsize(path) == 0 else "no PNG, JPEG, WebP or BMP picture"
        raise InputError(f"{path}: {what}; replace it")
    if image.width * image.height > MAX_PIXELS:
        raise InputError(f"{path}: {image.width}x{image.height} is over {MAX_PIXELS // 10**6} megapixels; shrink it")
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

one_large_picture = threading.Lock() # at a time: 100 megapixels take 1.1 GB while they are read

def read_image(path):
    """-> RGB PIL image: EXIF rotation applied, alpha composited on white, 16-bit gray scaled (PIL alone clips it)."""
    with open_image(path) as image, one_large_picture if image.width * image.height > 32e6 else nullcontext():
        turn = TURN.get(orientation(image))
        try:
            image.load()
        except (OSError, ValueError, SyntaxError) as e:
            raise InputError(f"{path}: broken picture ({e}); replace it")
        image = image.transpose(turn) if turn is not None else image
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image).astype(np.float32) / 257).round().astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")

def fit_size(size, area, upscale=True):
    """(width, height) to resize to: the stock pipeline's calculate_dimensions(area, w / h), i.e. sides rounded to 32;
    with area = 'native', or where upscale is off and the picture is smaller, its own sides rounded to 32."""
    w, h = size
    if area == "native" or (not upscale and w * h < area):
        w, h = round(w / 32) * 32, round(h / 32) * 32
    else:
        w, h = calculate_dimensions(area, w / h)
    return max(w, 32), max(h, 32) # calculate_dimensions can give 0 for long thin pictures

# ---- models ----------------------------------------------------------------------------------------------------------

ENCODERS = ["vae", "text_encoder", "tokenizer", "processor", "scheduler"] # folders of a model
CONFIG_FILES = dict(tokenizer="tokenizer_config.json", processor="preprocessor_config.json",
                    scheduler="scheduler_config.json") # the others': config.json

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

def find_model(model, parts, weights=True, flag="--model"):
    """--model or --transformer -> a local folder that holds the folders in `parts` (downloaded where missing), with or
    without their weights, and for --model model_index.json. InputError names a file that is missing or cut, before any
    is loaded."""
    folder = TINY_DATA.parent if model == "tiny" else Path(model)
    if folder.is_file():
        raise InputError(f"{flag} {model}: one file; give a diffusers folder, or Qwen/Qwen-Image-Edit-2509")
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        repo, _, revision = model.partition("@")
        try:
            folder = Path(snapshot_download(repo, revision=revision or None, allow_patterns=[
                "model_index.json", *[f"{p}/*" for p in parts]], ignore_patterns=None if weights else "*.safetensors"))
        except Exception as e: # a dozen kinds: no such name, no network, no login, ...
            raise InputError(f"{flag} {model}: not a folder, and not downloadable from the hub ({type(e).__name__}); "
                             "check the name and the network, or log in: hf auth login")
    files = [folder / "model_index.json"] * (flag == "--model")
    for part in [folder / part for part in parts]:
        files += [part / CONFIG_FILES.get(part.name, "config.json"), *part.glob("*.json")]
        files += part.glob("*.safetensors") if weights else []
    for file in files:
        try:
            if file.suffix == ".safetensors":
                safetensors.safe_open(file, "pt").keys() # reads the header and compares it with the file's length
                continue
            content = json.loads(file.read_text())
            if file.name == "config.json" and dict(content).get("quantization_config"): # see extras/low_bit.py
                raise InputError(f"{file}: the weights are quantized already; take the bf16 model and --quantize nf4 "
                                 "(for the text encoder --quantize_text_encoder nf4)")
            if file.name.endswith(".safetensors.index.json") and weights:
                files += [file.parent / name for name in set(content["weight_map"].values())] # the loop gets there too
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as e:
            raise InputError(f"{file}: missing or broken ({first_words(e)}); download it again (after a git "
                             f"clone: git lfs pull), as {flag} wants a complete diffusers folder")
    return folder

def load_pipeline(folder):
    """The stock pipeline of model_index.json (v1 or Plus) without weights: tokenizer, processor and scheduler only. Its
    methods then prepare pictures and prompts; load_encoder adds VAE and text encoder."""
    try:
        name = json.loads((folder / "model_index.json").read_text())["_class_name"]
        if name not in ("QwenImageEditPipeline", "QwenImageEditPlusPipeline"):
            raise InputError(f"{folder / 'model_index.json'}: a {name}; want QwenImageEdit(Plus)Pipeline")
        image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder, subfolder="processor")
        pipe = DiffusionPipeline.from_pretrained(
            folder, vae=None, text_encoder=None, transformer=None, processor=None)
    except (OSError, KeyError, ValueError) as e:
        raise InputError(f"{folder}: cannot be loaded ({first_words(e)}); is the download complete?")
    config = folder / "text_encoder" / "config.json" # (tools/doctor.py does without)
    known = pipe.tokenizer.convert_tokens_to_ids("<|image_pad|>") # another one where the vocabulary is missing
    if config.is_file() and json.loads(config.read_text())["image_token_id"] != known:
        raise InputError(f"{folder / 'tokenizer'}: is not the text encoder's; download it again")
    pipe.processor = Processor(pipe.tokenizer, image_processor)
    pipe.tokenizer.model_max_length = 10**9 # its warning of indexing errors is wrong here: plan_sample counts
    return pipe

def load_part(cls, folder, dtype):
    """One frozen model from its safetensors files. InputError names the folder."""
    try:
        model, info = cls.from_pretrained(folder, torch_dtype=getattr(torch, dtype), use_safetensors=True,
                                          output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        raise InputError(f"{folder}: cannot be loaded ({first_words(e)}); download it again")
    if missing := sorted(info["missing_keys"]): # they would be random numbers
        raise InputError(f"{folder}: {len(missing)} tensors are missing, for instance {missing[0]}; download it again")
    return model.requires_grad_(False).eval()

def load_encoder(pipe, part, args):
    """Adds the VAE ("vae") or the text encoder ("text") to the pipeline, on its device. The VAE's decoder stays on the
    CPU: encoding does not need it. args: dtype, device and quantisation flags of add_model_flags."""
    if part == "vae":
        pipe.vae = load_part(AutoencoderKLQwenImage, Path(pipe.name_or_path, "vae"), args.dtype)
        pipe.vae.encoder.to(args.vae_device)
        pipe.vae.quant_conv.to(args.vae_device)
        return
    encoder = load_part(Qwen2_5_VLForConditionalGeneration, Path(pipe.name_or_path, "text_encoder"), args.dtype)
    adapt_text_encoder(encoder)
    try:
        if args.quantize_text_encoder != "none":
            make_low_bit = load_extra("quantize_text_encoder").make_low_bit
            make_low_bit(encoder, args.quantize_text_encoder, args.text_encoder_device)
        pipe.text_encoder = encoder.to(args.text_encoder_device)
    except torch.OutOfMemoryError:
        raise InputError(f"--text_encoder_device {args.text_encoder_device}: too little memory for the text encoder, "
                         "16 GB in bf16; --quantize_text_encoder takes less, or give cpu")

def adapt_text_encoder(encoder):
    encoder.lm_head = torch.nn.Identity() # 1 GB, and a tenth of the work, for logits that nobody reads
    encoder.register_forward_pre_hook(add_token_types, with_kwargs=True)

def add_token_types(encoder, args, kwargs):
    """A forward pre-hook that marks the tokens of pictures. From 5.3 on transformers wants these marks, and diffusers
    0.42.1 does not pass them (its issue 14194): without them all pictures lose their rows and columns, silently."""
    wanted = "mm_token_type_ids" in inspect.signature(encoder.forward).parameters
    if wanted and kwargs.get("image_grid_thw") is not None and "mm_token_type_ids" not in kwargs:
        kwargs["mm_token_type_ids"] = (kwargs["input_ids"] == encoder.config.image_token_id).int()
    return args, kwargs

def drop_encoders(pipe):
    """Both leave their devices, and the host's memory."""
    pipe.vae = pipe.text_encoder = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats() # train.py's log shows the training's peak, not the encoding's

def is_plus(pipe):
    return type(pipe).__name__ == "QwenImageEditPlusPipeline"

def fingerprint(folder):
    """Identifies a model's folder: every small file whole, of each large one the size and three 1 MiB windows (hashing
    all 16 GB of a text encoder would cost a minute at every start, and two trainings hardly share all windows)."""
    h = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
        size = path.stat().st_size
        h.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as f:
            for start in [0, size // 2, size - 2**20] if size > 2**24 else [0]:
                f.seek(start)
                h.update(f.read(2**20 if size > 2**24 else size))
    return h.hexdigest()[:16]

def encoder_fingerprints(folder):
    """What decides latents, what decides prompt embeddings (where the weights are here), and how both see pictures."""
    parts = dict(vae=["vae"], text=["text_encoder", "tokenizer", "processor"])
    found = {name: content_key(**{p: fingerprint(folder / p) for p in of})
             for name, of in parts.items() if any((folder / of[0]).glob("*.safetensors"))}
    return found | dict(pipeline=json.loads((folder / "model_index.json").read_text())["_class_name"])

# ---- encoding: what the stock pipeline computes, one picture or prompt at a time -------------------------------------

@torch.no_grad()
def encode_image(pipe, image):
    """RGB image -> (tokens, 64): the posterior's mode, normalised by latents_mean/std, 2x2 patches packed. fp32 or bf16
    as the VAE; on the VAE encoder's device."""
    weight = next(pipe.vae.encoder.parameters())
    x = pipe.image_processor.preprocess(image).unsqueeze(2).to(weight.device, weight.dtype)
    z = pipe._encode_vae_image(x, generator=None)
    return pipe._pack_latents(z, 1, z.shape[1], *z.shape[3:])[0]

@torch.no_grad()
def encode_prompt(pipe, prompt, images):
    """Instruction and the pictures it speaks of -> (T, 3584), without the template's first 64 tokens."""
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

def read_pictures(pipe, sample, part, what):
    """Reads and resizes what encode_text or encode_latents takes; threads can do it ahead, as PIL releases the GIL. For
    part "text": the controls, or []. For "vae": [*controls, target or None, mask or None], a pixel of the mask for each
    token."""
    read = lambda path, size: path and pipe.image_processor.resize(read_image(path), size[1], size[0])
    if part == "text":
        return list(map(read, sample.controls, sample.prompt_sizes)) if what[1] else []
    (w, h), *sizes = [(w * 16, h * 16) for _, h, w in what["img_shapes"]]
    target, mask = read(sample.target, (w, h)), sample.mask
    if "mask" in what: # (--prompt_image_dropout_rate may have left out the controls)
        mask = load_extra("mask").auto_mask(target, read_image(sample.controls[0]))
    elif mask:
        mask = read_image(mask).convert("L").resize((w // 16, h // 16), Image.BOX)
    return [*map(read, sample.controls, sizes), target, mask]

def encode_latents(pipe, sample, resolution, pictures=None):
    """-> control_latent (sum I_c, 64), which may be (0, 64), img_shapes (N, 3), where there is a target pixel_latent
    (I_0, 64), and where there is a mask edit_mask (I_0,): the edited share of each token's 16x16 pixels."""
    *controls, target, mask = read_pictures(pipe, sample, "vae", resolution) if pictures is None else pictures
    latents = [encode_image(pipe, image) for image in controls]
    out = dict(img_shapes=torch.tensor(resolution["img_shapes"]))
    if target:
        out["pixel_latent"] = encode_image(pipe, target)
    out["control_latent"] = torch.cat(latents or [out["pixel_latent"][:0]])
    if mask:
        out["edit_mask"] = torch.from_numpy(np.asarray(mask).flatten() / np.float32(255))
    return finite(out, sample)

def encode_text(pipe, sample, text, pictures=None):
    """-> prompt_embed (T, 3584), prompt_embeds_mask (T,) of text = (prompt, whether pictures come with it): of the
    prompt and, as the encoder sees both, the sample's controls. For the prompt "" the names begin with empty_."""
    pictures = read_pictures(pipe, sample, "text", text) if pictures is None else pictures
    embed = encode_prompt(pipe, text[0], pictures)
    name = "prompt_embed" if text[0] else "empty_prompt_embed"
    return finite({name: embed, name + "s_mask": torch.ones(len(embed), dtype=torch.bool)}, sample)

def finite(tensors, sample):
    for name, t in tensors.items():
        if not t.isfinite().all():
            raise InputError(f"{sample.target or sample.controls[0]}: {name} has NaN or Inf; try --dtype float32")
    return tensors

# ---- the cache -------------------------------------------------------------------------------------------------------

def plan_sample(pipe, sample, texts, geometry, models, args):
    """Adds to the sample what will be encoded of it, from its pictures' headers and hashes. texts: [(prompt, whether
    with pictures)]; geometry: dict(target_pixels=[...], control_pixels, upscale); models: encoder_fingerprints.
    InputError names what is wrong with it."""
    sizes, pictures = [image_size(path) for path in sample.controls], [file_hash(path) for path in sample.controls]
    # without a target a control gives the result its shape: that of size_from, counted from 1, or as in stock the last
    shape = image_size(sample.target) if sample.target else sizes[(sample.settings.get("size_from") or 0) - 1]
    check_mask(sample, shape)
    if not is_plus(pipe) and len(sizes) != 1:
        raise InputError(f"{[sample.target, *sample.controls][-1]}: Qwen-Image-Edit v1 takes one control, here are "
                         f"{len(sizes)}; remove it, or take 2509 or 2511")
    tokens = max(len(pipe.tokenizer(prompt).input_ids) for prompt, _ in texts)
    if tokens > args.max_sequence_length:
        raise InputError(f"{sample.name}: prompt of {tokens} tokens, over --max_sequence_length "
                         f"{args.max_sequence_length}; shorten it")
    fit = lambda size, area: fit_size(size, area, geometry["upscale"])
    control_sizes = [fit(size, geometry["control_pixels"]) for size in sizes]
    # what the vision-language encoder sees: 384*384 (Plus), or the same copy as the VAE's (v1)
    sample.prompt_sizes = [fit_size(size, CONDITION_IMAGE_SIZE) for size in sizes] if is_plus(pipe) else control_sizes
    sample.sizes, sample.resolutions = [shape, *sizes], []
    common = dict(version=VERSION, preprocessing=PREPROCESSING, pipeline=models["pipeline"], dtype=args.dtype)
    file = lambda folder, **fields: Path(args.cache_dir, folder, content_key(**common, **fields) + ".safetensors")
    auto = dict(mask="auto") if vars(args).get("mask") and sample.target and sample.controls and not sample.mask else {}
    pictures_too = [path and file_hash(path) for path in (sample.target, sample.mask)]
    for area in geometry["target_pixels"]:
        target_size = [(sample.settings.get(side) or n) // 16 * 16 # a given side is rounded as in stock
                       for side, n in zip(("width", "height"), fit(shape, area))]
        used = [target_size, *control_sizes]
        sample.resolutions.append(auto | dict(img_shapes=[(1, h // 16, w // 16) for w, h in used], file=file(
            "latents", vae=models.get("vae"), pictures=pictures + pictures_too, sizes=used, **auto)))
    for prompt, shown in texts:
        seen = [pictures, sample.prompt_sizes] if shown else [[], []]
        sample.texts[prompt, shown] = dict(tokens=prompt_length(pipe, prompt, seen[1]), file=file(
            "text", text=models.get("text"), quantize=args.quantize_text_encoder, prompt=prompt, seen=seen))
    start = max(side // 2 for r in sample.resolutions for _, *sides in r["img_shapes"] for side in sides)
    tokens = max(text["tokens"] for text in sample.texts.values())
    if start + tokens > ROPE_TABLE:
        raise InputError(f"{sample.name}: {tokens} tokens of prompt and pictures, of which {ROPE_TABLE - start} have "
                         "positions; shorten the prompt, or give fewer pictures")

def check_mask(sample, target_size):
    """InputError if its mask has another shape; it may have another size."""
    if sample.mask:
        (w, h), (target_w, target_h) = image_size(sample.mask), target_size
        if abs(w / h / (target_w / target_h) - 1) > 0.02:
            raise InputError(f"{sample.mask}: {w}x{h} for a target of {target_w}x{target_h}; give it that shape")

def broken_pictures(sample):
    """A line for each of its pictures that cannot be used; decodes them all."""
    problems = []
    for path in filter(None, [sample.target, *sample.controls, sample.mask]):
        try:
            image_size(path)
            read_image(path)
        except InputError as e:
            problems.append(str(e))
    return problems

def plan_samples(pipe, samples, texts, geometry, args, quiet):
    """plan_sample for all -> (good samples, problems). texts(sample) -> [(prompt, whether with pictures)]."""
    good, problems, models = [], [], encoder_fingerprints(Path(pipe.name_or_path))
    # disable=None here and elsewhere: tqdm hides itself where there is no terminal
    for sample in tqdm(samples, desc="reading pictures", unit=" samples", disable=quiet or None, leave=False):
        try:
            plan_sample(pipe, sample, texts(sample), geometry, models, args)
            good.append(sample)
        except InputError as e:
            problems += broken_pictures(sample) or [str(e)]
        except OSError as e:
            problems.append(error_line(f"{e.filename or sample.name}: {e.strerror}; make it readable"))
    return good, problems

def files_of(sample):
    """{file: (encoder, what it encodes)} of a planned sample."""
    return ({resolution["file"]: ("vae", resolution) for resolution in sample.resolutions}
            | {text["file"]: ("text", key) for key, text in sample.texts.items()})

def is_cached(sample):
    return all(file.exists() for file in files_of(sample))

def encode_samples(pipe, samples, args, rank=0, world_size=1, verify=False):
    """Each process encodes its share of what the cache lacks -> problems, the same on every process; a bad sample does
    not stop the others. The encoders are loaded only if needed, one after the other, and unloaded before this returns.
    With `verify` every file is read, and damaged ones are encoded again."""
    jobs = {file: (sample, *job) for sample in samples for file, job in files_of(sample).items()} # a shared file once
    # dealt by key, not by place in the list: a process that lists the files later finds some of them there already
    mine = [file for file in jobs if int(file.stem, 16) % world_size == rank]
    if verify:
        for file in tqdm([f for f in mine if f.is_file()], desc="verifying", unit=" files", disable=rank > 0 or None):
            try:
                read_tensors(file, key=file.stem)
            except InputError:
                tqdm.write(f"{file}: damaged; encoding it again", file=sys.stderr)
                file.unlink()
    problems, missing = [], {file: job for file, job in jobs.items() if not file.is_file()}
    if missing and pipe is None: # all --data are indexes
        raise InputError(f"{next(iter(missing))}: missing; copy the whole cache, or run cache.py again")
    if missing:
        check_space(pipe, missing.values(), args, rank > 0)
        problems = encode_files(pipe, {file: missing[file] for file in mine if file in missing}, args, rank > 0)
    if world_size > 1:
        shares = [None] * world_size
        dist.all_gather_object(shares, problems) # also waits for the others' files
        problems = sum(shares, [])
    return list(dict.fromkeys(problems))

def check_space(pipe, jobs, args, quiet):
    """Says what will be written, of [(sample, encoder, what)]. InputError if it does not fit on the disk."""
    config = json.loads(Path(pipe.name_or_path, "text_encoder", "config.json").read_text())
    width = config.get("text_config", config)["hidden_size"]
    elements = [64 * sum(h * w for _, h, w in what["img_shapes"]) if part == "vae" else
                width * sample.texts[what]["tokens"] for sample, part, what in jobs]
    for folder in ("latents", "text"):
        prepare_folder(Path(args.cache_dir, folder), "choose another --cache_dir")
    need, free = sum(elements) * getattr(torch, args.dtype).itemsize / 1e9, shutil.disk_usage(args.cache_dir).free / 1e9
    if not quiet:
        print(f"encoding {len(jobs)} files, {need:.3f} GB, into {args.cache_dir} ({free:.3f} GB free)")
    if need > free:
        raise InputError(f"{args.cache_dir}: {need:.3f} GB needed, {free:.3f} GB free; choose another --cache_dir")

def encode_files(pipe, jobs, args, quiet):
    """Encodes and writes {file: (sample, encoder, what)}, all latents before all texts -> problems."""
    problems, loaded, order = [], None, sorted(jobs, key=lambda file: jobs[file][1] == "text")
    with signals_noted() as stopped, ThreadPoolExecutor(4) as pool:
        later = iter(order) # pictures are read while the encoder works, 8 files ahead
        reads = deque(pool.submit(read_pictures, pipe, *jobs[file]) for file in islice(later, 8))
        for file in tqdm(order, desc="encoding", unit=" files", disable=quiet or None):
            reads.extend(pool.submit(read_pictures, pipe, *jobs[file]) for file in islice(later, 1))
            read = reads.popleft()
            sample, part, what = jobs[file]
            if part != loaded:
                drop_encoders(pipe)
                load_encoder(pipe, part, args)
                loaded = part
            try:
                encode = encode_latents if part == "vae" else encode_text
                tensors = encode(pipe, sample, what, read.result())
            except InputError as e:
                problems += broken_pictures(sample) or [str(e)]
            except torch.OutOfMemoryError:
                raise InputError(f"{sample.name}: out of memory in the {part} encoder; lower --control_pixels and "
                                 "--target_pixels, or give cpu for --vae_device or --text_encoder_device")
            else:
                write_tensors(file, tensors, dict(version=VERSION, key=file.stem, sizes=sample.sizes, sources=[
                    sample.target, *sample.controls]))
            if stopped:
                pool.shutdown(cancel_futures=True)
                tqdm.write(f"{args.cache_dir}: stopped by a signal; run the same command again for the rest")
                sys.exit(128 + stopped[0])
    drop_encoders(pipe)
    return problems

def load_latents(sample, resolution, pipe=None):
    """encode_latents of one of sample.resolutions, from the cache, or with `pipe` now."""
    file = resolution["file"]
    return encode_latents(pipe, sample, resolution) if pipe else read_tensors(file, key=file.stem)[0]

def load_text(sample, text, pipe=None):
    """prompt_embed (T, 3584) of one of the keys of sample.texts, likewise."""
    file = sample.texts[text]["file"]
    tensors = encode_text(pipe, sample, text) if pipe else read_tensors(file, key=file.stem)[0]
    return tensors["prompt_embed" if text[0] else "empty_prompt_embed"]

# ---- indexes: a dataset's samples and their files --------------------------------------------------------------------

def is_index(root):
    return Path(root).suffix == ".json"

def run_name(model, roots):
    """<model>-<data>+<more data>, for indexes and run folders."""
    model = Path(model).name if Path(model).is_dir() else model.split("/", 1)[-1].replace("/", "-") # (ID@refs/pr/3)
    names = [Path(root).stem.removeprefix(model + "-") if is_index(root) else root_name(root) for root in roots]
    return f"{model}-{'+'.join(names)}"

def index_path(cache_dir, name, roots):
    """Where the index of these datasets goes: with a hash in its name if the index of others, which are still there,
    has the name already."""
    path = Path(cache_dir, f"{name}.json")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError): # none, or a broken one, which is replaced
        others = json.loads(path.read_text())["roots"]
        if others != roots and all(map(os.path.exists, others)):
            return path.with_stem(f"{name}-{content_key(roots=roots)[:6]}")
    return path

def write_index(path, samples, geometry, models, roots=()):
    """JSON that read_index reads. Files go by their names below the index's folder, which may be copied elsewhere."""
    below = lambda encoded: encoded | dict(file=encoded["file"].relative_to(path.parent).as_posix())
    rows = [asdict(s) | dict(resolutions=list(map(below, s.resolutions)),
                             texts=[[*key, below(text)] for key, text in s.texts.items()]) for s in samples]
    index = dict(version=VERSION, models=models, geometry=geometry, roots=roots, samples=rows)
    write_file(path, json.dumps(index, indent=1).encode())

def read_index(path):
    """-> (samples, geometry, encoder_fingerprints). InputError if it is damaged."""
    path = Path(path)
    try:
        index = json.loads(path.read_text())
        samples = [Sample(**row) for row in index["samples"]]
        for s in samples:
            s.resolutions = [r | dict(file=path.parent / r["file"]) for r in s.resolutions]
            s.texts = {(prompt, shown): text | dict(file=path.parent / text["file"]) for prompt, shown, text in s.texts}
        if index["version"] != VERSION or not samples:
            raise ValueError(f"version {index['version']}, {len(samples)} samples")
        return samples, index["geometry"], index["models"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"{path}: no index of version {VERSION} ({type(e).__name__}: {e}); run cache.py again")

def open_index(path, folder, texts):
    """read_index -> (samples, geometry). InputError if another model has encoded them, or if a text is missing that
    texts(sample) asks for."""
    samples, geometry, models = read_index(path)
    for part, here in encoder_fingerprints(folder).items():
        if models.get(part, here) != here: # a cache of other origin names no model
            raise InputError(f"{path}: encoded with another model than {folder} ({part}); run cache.py with this one")
    lacking = [text for s in samples for text in texts(s) if text not in s.texts]
    if lacking:
        prompt, shown = lacking[0]
        raise InputError(f"{path}: lacks the prompt {prompt!r} {'with' if shown else 'without'} pictures; run cache.py "
                         "with the same --val_data, --caption_dropout_rate, --prompt_image_dropout_rate, --preserve*")
    return samples, geometry

def read_roots(pipe, folder, args, quiet, roots, texts, geometry, repeats=None, alone=False):
    """Datasets (planned now) or indexes -> (samples, geometry, problems). An index brings its own geometry."""
    samples, problems = [], []
    for n, root in enumerate(roots):
        if is_index(root):
            found, geometry = open_index(root, folder, texts)
        else:
            found, wrong = read_dataset(root, alone)
            found, more = plan_samples(pipe, found, texts, geometry, args, quiet)
            problems += wrong + more
        for sample in found:
            sample.repeats = repeats[n] if repeats else sample.repeats
        samples += found
    return samples, geometry, problems

def make_cache(pipe, folder, args, rank=0, world_size=1, encode=True, verify=False):
    """What a training with the flags of add_data_flags reads -> (samples, validation samples, geometry, problems), the
    same on every process. What the cache lacks is encoded, and the indexes are written (unless `encode` is False); an
    index among --data or --val_data is only read. pipe: load_pipeline's; None if all are indexes."""
    geometry = dict(target_pixels=args.target_pixels, control_pixels=args.control_pixels, upscale=args.upscale)
    dropped, shown = [""] * (args.caption_dropout_rate > 0), [True] + [False] * (args.prompt_image_dropout_rate > 0)
    if pipe is not None and not is_plus(pipe) and len(shown) > 1:
        raise InputError("--prompt_image_dropout_rate: Qwen-Image-Edit v1 has a picture in every prompt; leave it out")

    read = partial(read_roots, pipe, folder, args, rank > 0)
    others = args.preserve_prompts * (args.preserve > 0)
    for prompt in others:
        check_text("--preserve_prompts", prompt)
    texts = lambda s: [(prompt, with_pictures) for prompt in s.prompts + dropped for with_pictures in shown] + [
        (prompt, True) for prompt in others if s.controls]
    samples, geometry, problems = read(args.data, texts, geometry, repeats=args.repeats)
    alone, _, wrong = read(args.reg_data, texts, geometry, alone=True)
    val_texts = lambda s: [(prompt, True) for prompt in s.prompts + [NEGATIVE_PROMPT]]
    first = geometry | dict(target_pixels=geometry["target_pixels"][:1]) # the only one that is validated
    val_samples, _, more = read(args.val_data, val_texts, first)
    samples, problems = samples + alone, problems + wrong + more
    if not encode and not args.plan: # nobody reads the pictures before the training does
        sound = lambda sample: not problems.extend(lines := broken_pictures(sample)) and not lines
        samples, val_samples = list(filter(sound, samples)), list(filter(sound, val_samples))

    if learned := set(others) & {prompt for s in samples for prompt in s.prompts}:
        raise InputError(f"--preserve_prompts: {min(learned)!r} is trained; leave it out")

    def say(lines):
        if rank == 0 and lines:
            print("\n".join(lines), file=sys.stderr)
    say(problems) # now, as the encoding may take hours
    if encode:
        later = encode_samples(pipe, samples + val_samples, args, rank, world_size, verify)
        later = [p for p in later if p not in problems]
        say(later)
        problems += later
        samples, val_samples = list(filter(is_cached, samples)), list(filter(is_cached, val_samples))
        for roots, encoded, end in ((args.data, samples, ""), (args.val_data, val_samples, "-val")):
            # with errors an index would look complete
            if rank == 0 and encoded and not any(map(is_index, roots)) and (args.skip_bad or not problems):
                places = list(map(os.path.realpath, roots))
                index = index_path(args.cache_dir, run_name(args.model, roots) + end, places)
                write_index(index, encoded, geometry, encoder_fingerprints(folder), places)
                print(f"{index}: {len(encoded)} samples")
    say(["correct these samples, or go on without them: --skip_bad"] * bool(problems and not args.skip_bad))
    if rank == 0:
        print(describe(samples))
    return samples, val_samples, geometry, problems

def describe(samples):
    """A line on what will be trained: counts, tokens, and what rounding to 32 pixels does to the shapes."""
    if not samples:
        return "0 samples"
    pairs = [(s, r["img_shapes"]) for s in samples for r in s.resolutions]
    tokens = [sum(h * w for _, h, w in shapes) + s.texts[p, True]["tokens"] for s, shapes in pairs for p in s.prompts]
    bent, name = max((abs(w / h * s.sizes[0][1] / s.sizes[0][0] - 1), s.name) for s, [(_, h, w), *_] in pairs)
    return (f"{len(samples)} samples with {sum(len(s.prompts) for s in samples)} prompts, "
            f"{len({tuple(shapes[0]) for _, shapes in pairs})} target sizes, "
            f"up to {max(len(s.controls) for s in samples)} controls, {min(tokens)} to {max(tokens)} tokens; "
            f"sides rounded to 32 change the aspect by at most {bent:.1%} ({name})"
            + ": a warning, a larger area bends it less" * (bent > 0.1))

# ---- command line ----------------------------------------------------------------------------------------------------

def main():
    parser = Parser(__doc__)
    add_model_flags(parser)
    add_data_flags(parser)
    parser.add_argument("--verify", action="store_true", help="read every file of the cache; encode damaged ones again")
    args = parse_data_args(parser, TINY)
    rank, world_size = start_processes(args)
    folder = find_model(args.model, ENCODERS)
    pipe = load_pipeline(folder)
    samples, val_samples, _, problems = make_cache(pipe, folder, args, rank, world_size, verify=args.verify)
    if world_size > 1:
        dist.destroy_process_group()
    if not samples or (problems and not args.skip_bad):
        sys.exit(1)
    if rank == 0:
        print(f"{args.cache_dir}: complete, {len(samples)} samples and {len(val_samples)} for validation. "
              "next: python train.py, with the same flags")

if __name__ == "__main__":
    main()
