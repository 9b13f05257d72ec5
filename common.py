"""
What comes before a model, for all scripts. `Sample`, below, is what they all pass around. The rest is plumbing, and can
wait: error lines, flags, processes and devices, files that are written whole and checked, datasets, pictures.
"""
import argparse
import contextlib
import functools
import hashlib
import io
import json
import math
import os
import re
import signal
import sys
import textwrap
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import safetensors
from PIL import Image
from tqdm import tqdm

from extras import surroundings
from extras.strangers import command, is_inside, lost, show_streams, shown # (command: for others to import)

# torch, diffusers and transformers take five seconds to import, so the functions that need them import them: most tools
# print their -h, or find a typo, without.

VERSION = "2.0" # of the cache files
TINY_DATA = Path(__file__).with_name("tiny") / "data"
TINY_WIDTH = '"joint_attention_dim": 64,' # in the config.json of tiny's transformer; the real model has 3584
LORA_FILE = "pytorch_lora_weights.safetensors" # the name that stock load_lora_weights looks for in a folder
PEFT_FILE = "adapter_model.safetensors" # as peft calls it
MOST_RANK = 3072 # of a LoRA: as the layers are wide
MOST_ALPHA = 1e6 # of a LoRA: a stronger one draws black
NAME_BYTES = 255 # a file's name may have so many
MOST_CONTROLS = 99 # of a sample
LONG_TEXT = 2**30 # bytes of a manifest, a table or an index at most: a million samples
NEGATIVE_PROMPT = " " # the prompt of an unconditional run, as in the model cards

@dataclass
class Sample:
    """A training pair, a validation pair, a line of jobs.jsonl, a photo to edit."""
    name: str # its path in the dataset, without suffix
    root: str # the dataset's name
    controls: list # pictures given, in order; none: text-to-image
    prompts: list # the instruction, in one or several wordings; each use of the sample picks one
    target: str | None = None # the picture wanted; None: one will be generated
    others: dict = field(default_factory=dict) # {role: picture that lies over the target}, of ROLES
    repeats: int = 1 # how often an epoch has it
    # flags of predict.py: those that its line of jobs.jsonl sets, with its `line`; predict.py adds the others
    settings: dict = field(default_factory=dict)

    # what cache.plan_sample adds
    contents: dict = field(default_factory=dict) # {path of a picture of it: hash of its file}
    # original (width, height) in pixels: of the target (without one, of the control that gives the shape), the controls
    sizes: list = field(default_factory=list)
    prompt_sizes: list = field(default_factory=list) # (width, height) of the controls' copies for the text encoder
    # for each of --target_pixels dict(file=of the latents, img_shapes=[(1, height, width), ...]), in tokens, the target
    # first; and mask="auto" if --mask auto makes one
    encodings: list = field(default_factory=list)
    # {text key: dict(file=, tokens=)}; a text key is (prompt, whether the pictures come with it)
    texts: dict = field(default_factory=dict)

    @property
    def mask(self):
        return self.others.get("mask")

@dataclass
class Role:
    """What a sample has a picture for."""
    folders: tuple # names that its folder in a dataset may have
    tensor: str # what becomes of it in an encoded file, where train.py's load_item finds it
    is_mask: bool = False # read as a mask, which becomes one number a token; else in RGB, encoded by the VAE

# A role that you add here is found everywhere by its name, which is also its field in metadata.jsonl. A sample has at
# most one such picture, in Sample.others: of the target's shape, read at its size, and in the key of what is encoded.
ROLES = dict(target=Role(("target", "training_images"), "pixel_latent"),
             control=Role(("control", "control_images"), "control_latent"),
             mask=Role(("mask",), "edit_mask", is_mask=True)) # white = the edited region

def other_roles():
    """Those of Sample.others."""
    return [role for role in ROLES if role not in ("target", "control")]

# ---- errors of the user ----------------------------------------------------------------------------------------------

def error_line(message):
    return "error: " + shown(message)

class InputError(SystemExit):
    """The user's input is wrong: InputError('<file or flag>: <what is wrong>; <what to do>'). A SystemExit, so that the
    script ends with this line and status 1, without a traceback."""

    def __init__(self, message):
        super().__init__(error_line(message))

class Exists(InputError):
    """Something is where a file was to be written, and may not be replaced."""

def tell(*lines, file=None):
    """Prints these lines, each shown(), above a bar if there is one. file: sys.stderr, or None for sys.stdout."""
    for line in lines:
        tqdm.write(shown(line), file=file)
    while lost:
        name, why = lost.pop()
        warn_once(f"warning: {name}: lines are lost ({why}); the work goes on",
                  file=sys.stdout if name == "stderr" else sys.stderr)

WARNED = [] # what warn_once has said: train.py writes it into its log, too

@functools.cache # which parse_args empties, and `WARNED`
def warn_once(line, file=None):
    """Once in a run, however often it finds the reason; on the first process."""
    if rank() == 0:
        WARNED.append(line)
        tell(line, file=file or sys.stderr)

def flag_error(line):
    """Ends the script with status 2, as argparse does, for a flag that cannot be meant."""
    tell(error_line(line), file=sys.stderr)
    sys.exit(2)

@contextlib.contextmanager
def noted(problems):
    """Within `with`, an InputError becomes a line of this list, and the code behind the block runs all the same."""
    try:
        yield
    except InputError as e:
        problems.append(str(e))

def print_problems(lines):
    from extras import hints
    tell(*hints.fold(lines), file=sys.stderr)

def first_words(e):
    """What an exception says, in one line."""
    return textwrap.shorten(str(e), 300) or type(e).__name__

def first_line(e):
    """Of what an exception says the first line alone: CUDA's go on for several, about other things."""
    return first_words((str(e).strip() or type(e).__name__).splitlines()[0])

# ---- the command line ------------------------------------------------------------------------------------------------

def pixels(text):
    """For argparse's type=: 'native', 1048576 or 1024*1024 -> 'native' or an area in pixels."""
    if text == "native":
        return text
    if re.fullmatch(r"\d+([*x]\d+)?", text):
        area = math.prod(map(int, re.split("[*x]", text)))
        least = 4097 if text.isdigit() else 32 * 32 # a smaller number is a side, as other trainers give it
        if least <= area <= MAX_PIXELS:
            return area
    raise argparse.ArgumentTypeError(f"{text!r} is no area; give 1024x1024, 1048576 or native")

def number(kind, low, high=math.inf, why=""):
    """For argparse's type=: an int or a float from low to high. argparse turns the error into a line and status 2. why:
    there is this limit."""
    def parse(text):
        value = kind(str(text)) # a number of jobs.jsonl too: int(0.5) would be 0
        if low <= value <= high: # False for nan too
            return value
        raise argparse.ArgumentTypeError(f"{text} is out of range{why and f' ({why})'}; give {low} to {high}")
    parse.__name__ = kind.__name__ # argparse says "invalid int value"
    return parse

def key_value(text):
    """For argparse's type=: 'use_rslora=true' -> ('use_rslora', True); the value is JSON, or else a string."""
    key, _, value = text.partition("=")
    if not key.isidentifier() or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE; give all three, as in use_rslora=true")
    value = {"True": "true", "False": "false", "None": "null"}.get(value, value) # as Python writes them
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value

natural, positive = number(int, 0, 10**9), number(int, 1, 10**9)
# torch's generator on a CPU takes 32 bits of a seed
seed_number = number(int, 0, 2**32 - 1, "torch uses 32 bits of a seed, so that a larger one repeats a smaller one's")
noise_level = number(float, 1e-6, 1, "a schedule ends at 0 by itself, so leave a last 0 out")
not_negative, fraction = number(float, 0, 1e30), number(float, 0, 1) # fp32 holds sums of such numbers

def add_model_flags(parser):
    """The flags that all scripts share."""
    flag = parser.group("model")
    flag("--model", "tiny", "hub id (ID@REVISION pins it) or folder of Qwen-Image-Edit, -2509 or -2511")
    flag("--dtype", None,
         "of the frozen models and the cache (default: float32 on CPU, else bfloat16)",
         choices=["float32", "bfloat16", "float16"])
    flag("--device", None, "default: cuda if there is one, else cpu; under torchrun one per process")
    flag("--flash_attention", "auto",
         "auto: 3 on Hopper, 4 on data centre Blackwell, where its package is installed; else 2", choices=["auto", "2"])
    flag("--cache_dir", "cache", "where encoded samples of all models and datasets are kept")
    flag("--max_sequence_length", 1024,
         "most tokens in a prompt; a longer prompt is an error, it is not cut", type=positive)
    flag("--vae_device", None, "where pictures are encoded and decoded (default: --device)")
    flag("--text_encoder_device", None, "default: --device; cpu if memory runs out while encoding")
    add_quantize_flag(flag, "--quantize_text_encoder", "the text encoder's linear layers, 16 GB in bf16")

ALL_BLOCKS = 10**9 # what --offload all is: more than any model has

def add_quantize_flag(flag, name, what):
    flag(name, "none", f"{what}: int8 or fp8 (half the memory) or nf4 (a quarter; pip install bitsandbytes)",
         choices=["none", "int8", "fp8", "nf4"])

class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action): # a default of None is explained in the help itself
        explained = action.default in (None, []) or "default" in action.help
        return action.help if explained else super()._get_help_string(action)

NEGATIVE = re.compile(r"(?i)-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\Z|-(inf|nan)\Z")

class Parser(argparse.ArgumentParser): # a class because argparse calls its method `error`
    """-h shows all defaults; an error is one line, with the flag that may be meant, and status 2."""

    def __init__(self, description, usage=None): # usage: the flags that a person needs first
        if line := surroundings.refusal(): # before any flag: a default may need their number
            raise InputError(line)
        super().__init__(description=description, usage=usage and f"%(prog)s {usage} [other flags: see below]",
                         formatter_class=HelpFormatter, allow_abbrev=False)
        self._negative_number_matcher = NEGATIVE # argparse takes -1e-1 for a flag

    def group(self, title):
        """-> flag(name, default, help, **what else argparse takes), which adds a flag to this new group."""
        group = self.add_argument_group(title)

        def flag(name, default, help, **others):
            if isinstance(default, bool): # --name and --no-name
                others["action"] = argparse.BooleanOptionalAction
            group.add_argument(name, default=default, help=help, **others)
        return flag

    def error(self, message):
        from extras import hints
        flag_error(hints.explain(message.removeprefix("argument "), self))

    def given(self):
        """The words of the command line, with --flag of --flag=value."""
        return [word.split("=")[0] for word in sys.argv[1:]]

    def parse_args(self):
        sys.excepthook = end_by_ctrl_c
        show_streams()
        warn_once.cache_clear()
        WARNED.clear()
        for line in surroundings.put_back():
            warn_once(line)
        if world() > 1 and "--flash_attention" not in self._option_string_actions: # one of add_model_flags
            self.error(f"argument WORLD_SIZE: {world()}, and {self.prog} works in one process; unset RANK WORLD_SIZE")
        for flag in "--data --image --lora --sample_lora".split(): # argparse would keep the last one's values only
            if self.given().count(flag) > 1:
                self.error(f"argument {flag}: given twice; put all values behind one")
        from extras import hints
        hints.refuse_slips(self)
        return super().parse_args()

def from_hub(name, fetch):
    """What fetch(), a download of huggingface_hub's, returns. InputError says that `name` is not there."""
    try:
        return Path(fetch())
    except Exception as e: # a dozen kinds: no such name, no network, no login, ...
        from extras import hints
        remedy = surroundings.offline() + hints.near_id(name)
        raise InputError(f"{name}: not here, and the hub does not give it; {remedy}check the name and "
                         f"the network, or log in: hf auth login ({type(e).__name__}: {first_words(e)})")

def is_tiny(model):
    """Whether this is tiny/ or a model of its size: a copy, a merged one."""
    config = Path(model, "transformer/config.json")
    if model == "tiny" or not config.is_file():
        return model == "tiny"
    with open(config, errors="replace", encoding="utf-8") as f:
        return TINY_WIDTH in f.read(2**16) # a stranger's file may have a gigabyte

def add_data_flags(parser):
    flag = parser.group("data")
    flag("--data", None,
         "dataset folders or metadata.jsonl files; or one index (.json) that cache.py has written",
         nargs="+")
    flag("--repeats", None,
         "how many times an epoch uses each --data, one number for each (default: 1)",
         type=number(int, 1, 10_000), nargs="+")
    flag("--val_data", [],
         "validation datasets, not trained on: their loss is logged, their pictures are generated without and with the "
         "LoRA (default: none; the demo has its own)", nargs="*")
    flag("--target_pixels", [1024 * 1024],
         "area of the target (default: 1024x1024); several: each use of a sample picks one; native: own size",
         type=pixels, nargs="+")
    flag("--control_pixels", 1024 * 1024,
         "area of the controls, likewise (default: 1024x1024)", type=pixels)
    flag("--upscale", True, "enlarge smaller pictures to the area, as stock does")
    flag("--caption_dropout_rate", 0.0, "share of samples trained with the empty prompt", type=fraction)
    flag("--prompt_image_dropout_rate", 0.0,
         "share of samples trained as text-to-image, without their controls; not with v1", type=fraction)
    flag("--preserve", 0.0,
         "share of samples with controls that get another instruction and learn what the base answers to it, so that "
         "the model does not forget", type=fraction)
    flag("--preserve_prompts", [NEGATIVE_PROMPT],
         "instructions that the base follows, for --preserve (default: an empty one)", nargs="+")
    flag("--mask", None,
         "auto: a pair without a mask gets one of where target and control differ (default: none; tools/doctor.py "
         "--mask auto shows them)", choices=["auto"])
    flag("--skip_bad", False, "go on without the samples that have an error")

def number_of_blocks(text):
    return ALL_BLOCKS if text == "all" else natural(text)

def is_one_file(name):
    return Path(name or "").is_file() or str(name).endswith((".safetensors", ".gguf"))

def add_transformer_flags(parser):
    """Which transformer train.py and predict.py use, and what they can do if it is too large for its device -> the
    add_argument of the flags' group."""
    flag = parser.group("transformer, memory")
    flag("--transformer", None, "hub id or folder whose transformer/ replaces --model's; or one .safetensors file of "
         "ComfyUI, Civitai or diffusers, in bf16 or fp8: of --model only its other parts are needed")
    add_quantize_flag(flag, "--quantize", "the frozen blocks of the transformer, 41 GB in bf16")
    flag("--offload", 0,
         "blocks (a number, or all) that wait in host memory and are copied to the device for each forward and "
         "backward pass, behind the computation if a pass has enough tokens: raise --max_tokens too",
         type=number_of_blocks)
    return flag

# how the stock pipeline samples, as the model cards have it
SAMPLING = dict(negative_prompt=NEGATIVE_PROMPT, num_inference_steps=20, true_cfg_scale=4.0, sigmas=None,
                shift=None)
def png_name(text):
    if not text.lower().endswith(".png") or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no .png name")
    return text

def only_text(value):
    if not isinstance(value, str):
        raise TypeError("is no text")
    return value

# Flags that a line of jobs.jsonl may set, too, for its own picture: {name: (type, help)}. train.py has those of
# SAMPLING, for its validation pictures.
SAMPLE_FLAGS = dict(
    negative_prompt=(only_text, "prompt of the unconditional pass (default: one space)"),
    num_inference_steps=(number(int, 1, 1000), "Euler steps: at least 2, or 1 with a --shift"),
    true_cfg_scale=(number(float, 0, 1e6), "CFG scale; at 1 or below no unconditional pass is run: half the time"),
    shift=(number(float, 1e-6, 1e6), "one shift for all sizes, not stretched: 3 for Qwen-Image-Lightning (default: the "
           "model's own, by size)"),
    height=(number(int, 32, 16384), "of the result, in pixels, rounded down to 16 (default: from the area)"),
    width=(number(int, 32, 16384), "pixels, likewise"),
    size_from=(positive, "which picture gives the result its shape, from 1 (default: the last, as in stock)"))

def add_sample_flags(flag, names):
    for name in names:
        kind, text = SAMPLE_FLAGS[name]
        flag(f"--{name}", SAMPLING.get(name), text, type=kind)

PACKAGES = dict(nf4="bitsandbytes", tensorboard="tensorboard", wandb="wandb") # which package this value of a flag needs

def parse_args(parser, script):
    """parser.parse_args(), twice, as the folder of --model may set defaults for this script. It needs no
    torch, so that a slip is answered at once; find_devices does the rest."""
    from extras import defaults
    parser.epilog = defaults.epilog(parser, script)
    args = parser.parse_args()
    defaults.apply(parser, args.model, script)
    args = parser.parse_args()
    surroundings.refuse_devices(args)
    for flag in ("quantize", "quantize_text_encoder", "tracker"):
        value = getattr(args, flag, None)
        if value in PACKAGES and not find_spec(PACKAGES[value]):
            parser.error(f"argument --{flag}: {value} needs a missing package; pip install {PACKAGES[value]}")
    return args

def parse_data_args(parser, script):
    """parse_args, with the flags of add_data_flags."""
    args = parse_args(parser, script)
    if not args.data:
        parser.error("argument --data: missing; give a dataset folder, a metadata.jsonl, or an index of cache.py")
    if len({Path(root).resolve() for root in args.data}) < len(args.data):
        parser.error("argument --data: names a dataset twice; leave one out; --repeats uses it more often")
    if any(map(is_index, args.data)) and (len(args.data) > 1 or args.mask or args.repeats):
        parser.error("argument --data: an index holds a whole training's samples with their masks and repeats; give it "
                     "alone, without --mask and --repeats")
    if args.preserve_prompts != [NEGATIVE_PROMPT] and not args.preserve:
        parser.error("argument --preserve_prompts: has no use without --preserve; give both")
    for prompt in args.preserve_prompts:
        check_text("--preserve_prompts", prompt)
    if args.repeats and len(args.repeats) != len(args.data):
        parser.error(f"argument --repeats: {len(args.repeats)} for {len(args.data)} --data; give one number each")
    return args

# ---- processes and devices -------------------------------------------------------------------------------------------

def rank():
    """The number of this process, from 0, as torchrun says."""
    return int(os.environ.get("RANK", 0))

def world():
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", 1))

def quiet():
    """tqdm's `disable`: the first process alone shows bars, and only on a terminal (None)."""
    return True if rank() else None

def say(*lines):
    """The first process prints these lines, as tell does."""
    if rank() == 0:
        tell(*lines)

def progress(what, items=None, **options):
    """A bar of tqdm, which goes when it is done."""
    return tqdm(items, desc=what, disable=quiet(), leave=False, **options)

def check_device(flag, device):
    """flag_error if torch cannot compute on this device."""
    import torch
    try:
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError) as e:
        other = "cpu" if device.startswith("cuda") else "cuda or cpu"
        flag_error(f"--{flag}: {device!r} cannot be used ({first_line(e)}); give {other}")

def find_devices(args):
    """Fills in devices and dtype. Refuses what cannot work: a device, one file of a transformer."""
    import torch
    from extras import cuda
    cuda.refuse_cpu(args)
    default = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, device in vars(args).items():
        if not name.endswith("device"):
            continue
        device = device or default
        if device == "cuda": # each process its own
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        elif device.startswith("cuda") and world() > 1:
            flag_error(f"--{name}: {device} for all processes; give cuda, which is one for each")
        check_device(name, device)
        cuda.check(name, device, args.dtype)
        setattr(args, name, device)
    args.dtype = args.dtype or ("float32" if args.device.startswith("cpu") else "bfloat16")
    if is_one_file(getattr(args, "transformer", None)): # looked at before anything slow
        from extras import transformer # which imports diffusers
        transformer.read_layout(args.transformer)

def start_processes(args):
    """Lets the processes that torchrun has started find each other. Objects are sent over the CPU, gradients over
    --device."""
    import diffusers
    import torch
    import transformers
    from extras import cuda
    for library in (diffusers, transformers): # a bar for each small model would hide ours
        library.utils.logging.disable_progress_bar()
    if is_tiny(args.model) and args.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1) # too small for more: two take twice as long, beside a busy process ten times
    backend = "gloo"
    if args.device.startswith("cuda"):
        backend = "cpu:gloo,cuda:nccl"
        card = cuda.prepare(args.device, args.flash_attention)
        torch.cuda.set_device(args.device) # where NCCL works
        say(card)
    if world() > 1:
        surroundings.meet(backend)
        if "nccl" in backend:
            cuda.start_nccl(args.device)

def gather_objects(value):
    """-> [value of each process]. Waits for all of them."""
    import torch.distributed as dist
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values

def on_first_process(make):
    """What make() returns on the first process, for all of them. If it fails, all processes exit, and the first one
    prints the error."""
    result, problems = None, []
    if rank() == 0:
        with noted(problems):
            result = make()
    result, problems = gather_objects((result, problems))[0]
    if problems:
        sys.exit(problems[0] if rank() == 0 else 1)
    return result

def refuse_differences(out_dir, assumed):
    """InputError names what the processes do not agree on. Each would train its own order of samples, silently."""
    views = gather_objects(assumed)

    def compare():
        for n, view in enumerate(views):
            for name, value in view.items():
                if value != views[0][name] and not name.endswith("device"):
                    raise InputError(f"{out_dir}: process {n} has {name} {value}, the first one {views[0][name]}; "
                                     "start all with the same command and the same files")
    on_first_process(compare)

def memory_of(device):
    """GiB: on a GPU the most that torch has held since the encoders left or a validation ended, on a CPU what the
    process has now."""
    import psutil
    import torch
    used = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else psutil.Process().memory_info().rss
    return used / 2**30

@contextlib.contextmanager
def signals_noted():
    """with signals_noted() as seen: signals only fill this list, so that work that has begun can be finished."""
    seen = []
    terminals = list(filter(os.isatty, (1, 2))) # of stdout, stderr

    def note(number, frame):
        seen.append(number)
        with contextlib.suppress(OSError):
            for stream in terminals:
                if not os.isatty(stream): # closed, and no print into it must end the run before its checkpoint
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            if terminals: # (print may be at work already)
                os.write(terminals[-1], b"\nends as soon as it can; please wait\n")
    with contextlib.ExitStack() as stack: # which puts the old handlers back
        for name in "SIGTERM SIGINT SIGUSR1 SIGHUP SIGBREAK".split(): # the last two: a terminal that is closed
            number = getattr(signal, name, None) # Windows lacks some
            if number and signal.getsignal(number) != signal.SIG_IGN: # ignored: the user has asked for nohup
                stack.callback(signal.signal, number, signal.signal(number, note))
        yield seen

def end_by_ctrl_c(kind, error, trace):
    """Ctrl-C where no signals_noted is at work: one line instead of a traceback. Files appear whole or not at all, so
    there is nothing to clean up."""
    if kind is not KeyboardInterrupt:
        return sys.__excepthook__(kind, error, trace)
    print("\nstopped by Ctrl-C: what is written stays; the same command continues with the rest", file=sys.stderr)

def run_ahead(work, items, threads=1, most=1):
    """Yields a future of work(item) for each item, in order, while threads do the next ones, as many as `most`."""
    pool = ThreadPoolExecutor(threads)
    waiting = []
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > most:
                yield waiting.pop(0)
        yield from waiting
    # Also if the caller stops early. The threads end when their pool is gone. We do not call pool.shutdown(), which
    # takes a lock: the garbage collector may run this while a thread begins, which holds that lock.
    finally:
        for future in waiting:
            future.cancel()

# ---- files: written whole or not at all, checked when read -----------------------------------------------------------

def write_file(path, data, mark=b""):
    """Writes a temporary file beside `path`, fsyncs and renames it, and fsyncs the folder: after a kill or a power loss
    there is the old file or the new one, never a part. mark: a regular expression for the first bytes of what may be
    replaced; by default all may be. Exists if something else is there, InputError if the disk is full or read-only."""
    from extras import disk
    refuse_to_replace(path, mark)
    try:
        with disk.file_in(path.parent) as tmp:
            with open(tmp, "xb") as f:
                f.write(data)
                f.flush()
                disk.sync(f.fileno(), path.parent)
            if not (mark and link_new(tmp, path)):
                refuse_to_replace(path, mark) # it may have come since we looked
                os.replace(tmp, path)
            disk.sync_folder(path.parent)
    except OSError as e:
        raise disk.refusal(path, e, f"{len(data):,} bytes cannot be written") from e

NOTHING = rb"(?!)" # as a mark: nothing may be replaced

def refuse_to_replace(path, mark=NOTHING):
    """Exists if something is at `path`, unless it is a file whose first 4 KiB match `mark`, a regular expression, which
    says that a script of ours has written it. Whatever replaces or deletes a file in a place that you name calls this
    before the work begins; write_file calls it once more."""
    if os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as f:
            if re.search(mark, f.read(4096)):
                return
    if os.path.lexists(path): # also a folder, or a link that leads nowhere
        raise Exists(f"{path}: already exists, and may be yours; move it elsewhere, or give another name")

def link_new(source, target):
    """Gives a file one more name -> whether it has it: not if anything had it before, which is one act, whoever else
    tries; nor on a disk without hard links, where two processes may both see that nothing is there."""
    from extras import disk
    try:
        os.link(source, target)
        return True
    except OSError as e:
        disk.say_unlinked(target.parent, e)

FORMAT = 3 # of the files of write_tensors: add 1 when they change. extras/formats.py knows the others
NO_DIGEST = "0" * 64
# how the JSON begins that write_tensors adds, in all formats, with a damaged number, name or digest too
SIGNED = re.compile(r'\{".{6}": (.{1,3}, ".{6}": )?".{64}"')

class OtherVersion(InputError):
    """A file that an older or newer version of this project has written, and this one cannot use."""

def write_tensors(path, tensors, meta, meta_key="json", mark=b""):
    """A safetensors file that carries content_digest: it is made with zeros where the digest will stand, the first in
    the file; the digest takes their place. Metadata is one JSON string, because safetensors orders several metadata
    keys at random. Tensors go to the CPU. mark: as for write_file."""
    import safetensors.torch
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()} # some share memory
    about = {"format": FORMAT, "sha256": NO_DIGEST, "tensors": rows_of(tensors), **meta}
    text = json.dumps(about, default=sorted) # sets become lists
    data = safetensors.torch.save(tensors, {meta_key: text})
    write_file(path, data.replace(NO_DIGEST.encode(), content_digest(data, text).encode(), 1), mark)

def rows_of(tensors):
    """-> a text for each tensor. By these extras/formats.py tells a change of another program from damage."""
    return [f"{name} {v.dtype} {list(v.shape)}" for name, v in sorted(tensors.items())]

def content_digest(data, text):
    """sha256 of what a safetensors file says: of `text`, our JSON with NO_DIGEST in it, and of each tensor's name,
    dtype, shape and bytes. Other entries of the header do not count: many programs add some."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(safetensors.deserialize(data)):
        digest.update(json.dumps([name, tensor["dtype"], tensor["shape"]]).encode())
        digest.update(tensor["data"])
    return digest.hexdigest()

def read_header(f):
    """-> the header of a safetensors file that is open: {name: dict(dtype=, shape=, data_offsets=), "__metadata__":
    {key: text}}. The tensors are not read. Raises anything for another file."""
    size = int.from_bytes(f.read(8), "little")
    return json.loads(f.read(min(size, 2**26))) # in a file with holes it could have any length

def read_tensors(path, meta_key="json", key=None, data=None, note=None):
    """-> (tensors, metadata). InputError if the file is no safetensors file, if a bit of its tensors or of our metadata
    has changed since write_tensors, or if it holds other content than `key`; OtherVersion if it has another format.
    Never unpickles. data: the file's bytes, if they have been read. note: is called with a line where another program
    has added to the header, and where extras/formats.py finds that a LoRA can be used although it has changed (without
    a note these are errors)."""
    import safetensors.torch
    fix = "cache.py --verify encodes it again" if key else "it is damaged; take another copy"
    try:
        if not path.is_file(): # a FIFO would hang
            raise FileNotFoundError("no file")
        data = data or path.read_bytes()
        tensors = safetensors.torch.load(data)
        entries = read_header(io.BytesIO(data))["__metadata__"]
        meta = json.loads(entries[meta_key])
        number, digest, _ = [meta.pop(name, "") for name in ("format", "sha256", "tensors")]
        unsigned = entries[meta_key].replace(digest, NO_DIGEST, 1)
        intact = number in ("", FORMAT) and content_digest(data, unsigned) == digest # format 2 has no number yet
    except Exception as e: # it is missing, or a foreign file, which can fail in any way
        raise InputError(f"{path}: no checked safetensors file ({type(e).__name__}: {first_words(e)}); {fix}")
    if not intact: # of another version, changed by another program, or damaged
        from extras import formats
        formats.judge(path, data, tensors, entries[meta_key], fix, note)
    elif note and len(entries) > 1:
        note(f"warning: {path}: its header was edited since it was written; its tensors are intact")
    if key and (meta.get("key"), meta.get("version")) != (key, VERSION):
        raise InputError(f"{path}: holds {meta.get('key')} of version {meta.get('version')}, want {VERSION}; {fix}")
    return tensors, meta

def file_hash(path):
    """InputError if it cannot be read, maybe as it has gone since it was found."""
    try:
        with open(path, "rb") as f: # not read whole: a model has 41 GB
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror}); mend that, and run the same command again")

def content_key(**fields):
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

def refuse_outside(path, folder):
    """InputError unless is_inside: who has made a dataset does not choose what else is read of this disk."""
    from extras import strays
    if why := strays.why_gone(path):
        raise InputError(f"{path}: {why}")
    if not is_inside(path, folder):
        raise InputError(f"{path}: a link that leads out of {folder}, and so is not read; if you trust it, make a copy "
                         "with the files themselves: cp -rL")

# ---- LoRA files, in run folders and elsewhere ------------------------------------------------------------------------

def number_of(path):
    """200 of checkpoint-000200, 1 of tiny-data-001."""
    return int(path.name.split("-")[-1])

def numbered(folder, name):
    """What is called NAME-<number> in a folder, in order. A person's copies (checkpoint-000200.bak) are none of it."""
    found = [path for path in Path(folder).glob("*") if re.fullmatch(re.escape(name) + r"-\d{1,12}", path.name)]
    return sorted(found, key=number_of)

def checkpoints(run):
    """The checkpoints in a run's folder, oldest first: those with a LoRA, which is written last and deleted first."""
    return [path for path in numbered(run, "checkpoint") if (path / LORA_FILE).is_file()]

def find_lora(path):
    """-> a LoRA's file: `path` itself, the one in this folder (peft's too), the one in the newest checkpoint of an
    unfinished run, or user/repo[/file.safetensors] of the hub."""
    folder = Path(path)
    file = folder / LORA_FILE if folder.is_dir() else folder
    if not file.exists():
        if (folder / PEFT_FILE).is_file():
            file = folder / PEFT_FILE
        elif saved := checkpoints(folder): # of a run that has not finished, or was stopped
            file = saved[-1] / LORA_FILE
            warn_once(f"{path}: not finished; taking its newest checkpoint, {file.parent.name}")
    hub_id = re.fullmatch(r"([\w-]+/[\w.-]+)(?:/(.+\.safetensors))?", str(path))
    if hub_id and not file.parent.exists(): # not here
        from huggingface_hub import hf_hub_download
        repo, name = hub_id[1], hub_id[2] or LORA_FILE
        return from_hub(f"{path}: {name}", lambda: hf_hub_download(repo, name))
    if not file.is_file():
        if (folder / "optimizer.safetensors").exists(): # extras/resume.py writes it before the LoRA
            raise InputError(f"{path}: no LoRA, but a half-written checkpoint; give another one, or its run")
        from extras import hints
        raise InputError(hints.no_lora(folder, file))
    if folder.is_dir() and not is_inside(file, folder): # a stranger's, to what is yours
        raise InputError(f"{file}: a link that leads out of {path}; give the file itself")
    return file

# ---- datasets: folders and manifests -> samples ----------------------------------------------------------------------

# what PNG, JPEG, WebP, BMP, TIFF, AVIF and HEIC files are called, by browsers on Windows and by Twitter, too
PICTURES = """.png .apng .jpg .jpeg .jpe .jfif .jfi .jif .pjpeg .pjp .mpo .webp .bmp .dib .tif .tiff .avif .avifs .heic
              .heics .heif .heifs .hif .jpg_large .jpeg_large .png_large .jpg-large .png-large .jpg:large .png:large
              .jpg_orig .jpeg_orig .png_orig .jpg:orig .png:orig""".split()
NOT_READ = ".gif .jxl .cr2 .cr3 .nef .arw .dng .raf .orf .rw2".split() # reported; most are raw files
KINDS = {".txt": "caption", **dict.fromkeys(PICTURES, "picture"), **dict.fromkeys(NOT_READ, "other")} # by suffix
LAYOUT = "want target/NAME.png + .txt and control/NAME.png, or metadata.jsonl; tools/import_data.py converts others"

def root_name(data):
    """A dataset's name: its folder's."""
    data = Path(data).resolve()
    return (data.parent if data.is_file() else data).name

def read_dataset(root, is_job=False):
    """A folder or manifest -> (samples, problems): a line for each thing that is wrong. No picture is opened yet.
    InputError if there is no dataset at all. is_job: a manifest is jobs.jsonl, see extras/manifest.py."""
    import extras.manifest
    from extras import hints
    root = Path(root)
    folders = find_folders(root)
    manifest = root if root.is_file() else root / "metadata.jsonl"
    if "target" in folders:
        samples, problems = read_folder(root, folders)
    elif manifest.is_file() and manifest.suffix == ".jsonl":
        samples, problems = extras.manifest.read(manifest, is_job, root)
    else:
        raise InputError(hints.no_dataset(root))
    if not samples and not problems:
        raise InputError(f"{root}: nothing in it; {LAYOUT}")
    return samples, problems

def find_folders(data):
    """{"target": data/target, ...}: those that are here, under their names. InputError if a role has two."""
    folders = {}
    for role in ROLES:
        for name in ROLES[role].folders:
            if not os.path.lexists(data / name):
                continue
            if role in folders:
                raise InputError(f"{data / name}: means the same as {folders[role].name}/; keep one of them")
            folders[role] = data / name
    return folders

def find_files(folder):
    """Files below `folder` -> {(stem relative to it, kind): [paths]}, sorted; kind: one of KINDS, or of those that
    extras/strays.py takes out of a dataset: junk, links to folders, ... Stems are NFC, so that names from macOS match.
    """
    from extras import strays

    def unreadable(e):
        raise InputError(f"{e.filename}: cannot be read as a folder ({e.strerror}); mount it, or fix its permissions")
    found = {}
    for root, dirs, names in os.walk(folder, onerror=unreadable):
        folders = {name: strays.kind_of_folder(Path(root, name)) for name in dirs}
        dirs[:] = [name for name in dirs if not folders[name]] # those to walk
        for name in sorted([*names, *folders.keys() - dirs]):
            path = Path(root, name)
            stem = path.relative_to(folder).with_suffix("").as_posix()
            kind = folders.get(name) or strays.kind_of(path)
            found.setdefault((unicodedata.normalize("NFC", stem), kind), []).append(path)
    return dict(sorted(found.items()))

def read_folder(data, folders):
    """What find_folders has found -> (samples, problems). Without a folder of controls they are pictures alone."""
    from extras import strays
    for path in data.glob("*/"): # a misspelt control/ would silently mean pictures alone
        if path not in folders.values() and not strays.is_junk(path.name):
            raise InputError(f"{path}: a dataset has no folder of this name; call it {'/, '.join(ROLES)}/ if it is one "
                             "of these, or move it elsewhere")
    for folder in folders.values():
        refuse_outside(folder, data)
    # what no sample has taken yet
    left = {(role, *key): paths for role, folder in folders.items() for key, paths in find_files(folder).items()}
    samples = []
    problems = strays.sort_out(data, left)
    for role, name, kind in list(left):
        if (role, kind) == ("target", "picture"):
            with noted(problems):
                samples.append(take_sample(data, folders, left, name))
    if (data / "metadata.jsonl").exists():
        problems.append(error_line(f"{data / 'metadata.jsonl'}: not used beside target/; give the file itself as the "
                                   "dataset, or delete it"))
    for (_, _, kind), paths in left.items():
        why = "no target has this name (controls are NAME, NAME_1, NAME_2, ... without gaps); rename or delete it"
        if kind == "other":
            why = f"{paths[0].suffix} is not read; convert it to PNG or JPEG"
        problems += [error_line(f"{path}: not used: {why}") for path in paths]
    return samples, problems

def take_sample(data, folders, left, name):
    """The Sample of target/NAME. Its files are taken out of `left`: {(role, stem, kind): paths}."""
    def take(role, stem=name, kind="picture"):
        return left.pop((role, stem, kind), [])
    target, caption, controls = take("target"), take("target", kind="caption"), [take("control")]
    others = {role: take(role) for role in other_roles()}
    # NAME_1, NAME_2, ... are further controls, unless a target of that name claims one
    next_name = f"{name}_1"
    while ("control", next_name, "picture") in left and ("target", next_name, "picture") not in left:
        controls.append(take("control", next_name))
        next_name = f"{name}_{len(controls)}"
    for paths in (target, caption, *others.values(), *controls):
        if len(paths) > 1:
            raise InputError(f"{paths[0]}: {paths[1].name} has the same name; keep one of them")
        if paths and paths[0].is_symlink():
            refuse_outside(paths[0], data)
    if not controls[0] and "control" in folders:
        raise InputError(f"{target[0]}: no control; expected {folders['control'] / name}.png or .jpg")
    if further := left.get(("control", next_name, "picture")): # not taken above, as there is a target of this name
        raise InputError(f"{further[0]}: either the control of the target with its name, or one more control of "
                         f"{name}; rename one of the two targets")
    if not caption:
        raise InputError(f"{target[0]}: no caption; expected {target[0].with_suffix('.txt')}")
    lines = list(filter(is_visible, re.split("[\r\n]", read_text(caption[0]))))
    others = {role: path for role, paths in others.items() for path in paths} # one of each, or none
    return make_sample(caption[0], data, name, target[0], sum(controls, []), lines, others)

def make_sample(where, root, name, target, controls, prompts, others=None, settings=None):
    """-> Sample. InputError if a prompt is empty, or holds what the tokenizer would take for its own marks."""
    for prompt in prompts or [""]:
        if not isinstance(prompt, str) or not is_visible(prompt):
            raise InputError(f"{where}: empty prompt, or no text; write the instruction into it")
        check_text(where, prompt)
    return Sample(str(name), root_name(root), list(map(str, controls)), list(dict.fromkeys(map(str.strip, prompts))),
                  target and str(target), {role: str(path) for role, path in (others or {}).items()},
                  settings=settings or {})

INVISIBLE = "\u115f\u1160\u2800\u3164\uffa0" # fillers and a blank, which count as letters or symbols

def is_visible(text):
    """Whether it has a character that can be seen: no space, control or format character (such as U+200B), or mark."""
    return any(unicodedata.category(c) not in "Cc Cf Mn Zl Zp Zs" and c not in INVISIBLE for c in text)

def check_text(where, prompt):
    if len(prompt) > 200_000: # its tokens are counted, which takes minutes for more
        raise InputError(f"{where}: prompt of {len(prompt):,} letters; shorten it")
    if re.search("<[|]|[\ud800-\udfff]", prompt):
        raise InputError(f"{where}: a special token, or half a character, in {prompt!r:.200}; leave it out, or "
                         "if it looks right to you, set LC_ALL=C.UTF-8")
    if found := re.search(r"\[(trigger|name)\]", prompt): # ai-toolkit's, which would be trained literally
        raise InputError(f"{where}: {found[0]} stands for a word in {prompt!r:.200}; write the word itself")

def read_text(path, most=2**20):
    """A text file in UTF-8, without the marks that editors on Windows write before it (and that `cat` leaves inside).
    most: bytes; the default is for a caption or a configuration. InputError names the file."""
    from extras import strays
    if not path.exists():
        raise InputError(f"{path}: does not exist; {strays.near_path(path)}")
    with contextlib.suppress(OSError, ValueError):
        if path.stat().st_size > most:
            raise InputError(f"{path}: over {most:,} bytes, which is no text of this kind; shorten it")
        # a FIFO would hang; UTF-16 can pass for UTF-8
        if path.is_file() and "\0" not in (text := path.read_bytes().decode()):
            strays.refuse_pointer(path, text.encode())
            return text.replace("\ufeff", "")
    raise InputError(f"{path}: no readable text in UTF-8 (Latin-1 or UTF-16?); save it as UTF-8")

def read_json(text): # these two serve extras and tools, which read JSON of a person or of another program
    """json.loads, but ValueError for an object that has a key twice: of two values json would drop one in silence."""
    def unique(pairs):
        found = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{key!r:.100} is given twice")
            found[key] = value
        return found
    return json.loads(text, object_pairs_hook=unique)

def read_object(text):
    """read_json's dict. ValueError if it is something else."""
    value = read_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"no JSON object: {text:.60}")
    return value

def is_index(root):
    return Path(root).suffix == ".json"

def run_name(model, roots):
    """<model>-<data>+<more data>, for indexes and run folders."""
    model = Path(model).name if Path(model).is_dir() else model.split("/", 1)[-1].replace("/", "-") # (ID@refs/pr/3)
    names = [Path(root).stem if is_index(root) else root_name(root) for root in roots]
    return f"{model}-{'+'.join(names).removeprefix(model + '-')}" # an index has that name already

def look_at(path):
    """-> [(width, height), content hash] of a picture; behind the hash stands a mark if its colours are converted to
    sRGB, which earlier versions did not do: such a picture is encoded again. InputErrors are image_size's."""
    from extras import photos
    with open_image(path) as image:
        mark = photos.mark_of(image) if "icc_profile" in image.info else ""
    return [image_size(path), file_hash(path) + mark]

def look_at_mask(path):
    """-> [(width, height), content hash, whether it marks a part] of a mask. InputErrors are read_mask's."""
    content = file_hash(path)
    return [image_size(path), content, not mask_is_empty(read_mask(path, content))]

def pictures_of(sample):
    """The paths of its target, if it has one, and its controls."""
    return [path for path in (sample.target, *sample.controls) if path]

def looks(samples, cache_dir):
    """-> look_at and look_at_mask, which already know the answers for the pictures of these samples."""
    from extras import known
    pictures, masks = [], []
    for sample in samples:
        pictures += pictures_of(sample)
        for role, path in sample.others.items():
            (masks if ROLES[role].is_mask else pictures).append(path)
    return (known.look_ahead(pictures, look_at, Path(cache_dir, "pictures.txt")),
            known.look_ahead(masks, look_at_mask, Path(cache_dir, "masks.txt")))

def check_shape(path, size, target_size):
    """InputError for a picture that cannot lie over the target: of another shape (it may have another size)."""
    (w, h), (target_w, target_h) = size, target_size
    if abs(w / h / (target_w / target_h) - 1) > 0.02:
        raise InputError(f"{path}: {w}x{h} for a target of {target_w}x{target_h}; give it that shape")

def look_at_sample(sample, look=look_at, look_mask=look_at_mask):
    """Sets the sample's contents and sizes. A mask that marks nothing or everything is left out. InputErrors are those
    of look_at, look_at_mask and check_shape."""
    sizes = []
    for path in pictures_of(sample):
        size, sample.contents[path] = look(path)
        sizes.append(size)
    if not sample.target: # which control gives the shape; size_from counts from 1, and the last one does it in stock
        sizes.insert(0, sizes[(sample.settings.get("size_from") or 0) - 1])
    sample.sizes = sizes
    for role, path in list(sample.others.items()):
        size, sample.contents[path], *marks = (look_mask if ROLES[role].is_mask else look)(path)
        check_shape(path, size, sizes[0])
        if marks == [False]:
            del sample.others[role]

def look_over(args):
    """Ends the script if a dataset of --data or --val_data has an error, without --skip_bad: before the libraries are
    loaded, as a person has to mend these first. (Of several processes none looks: make_cache's first one will.)"""
    problems = []
    if args.skip_bad or world() > 1:
        return
    for root in [*args.data, *args.val_data]:
        if not is_index(root):
            samples, wrong = read_dataset(root)
            problems += wrong
            look, look_mask = looks(samples, args.cache_dir)
            for sample in samples:
                with noted(problems):
                    look_at_sample(sample, look, look_mask)
    if problems:
        print_problems(problems)
        sys.exit("correct these samples, or go on without them: --skip_bad")

# ---- pictures --------------------------------------------------------------------------------------------------------

MAX_PIXELS = 160_000_000 # a larger picture is refused before it is decoded
MAX_TOKENS = 65536 # of a picture as it is encoded or generated: 4096x4096 pixels
Image.MAX_IMAGE_PIXELS = None # PIL's own limit is a warning first, and threads cannot silence a warning safely

def open_image(path, content=None):
    """Header only: a PIL image whose size is known and allowed. InputError names the file. content: look_at's hash,
    which the file's bytes, read once, must have."""
    from extras import photos, strays
    if not os.path.isfile(path): # a FIFO or socket would hang, a folder or dangling link cannot be read
        raise InputError(f"{path}: {strays.why_gone(path) or 'no file of that name; add it'}")
    source = path if content is None else None # what cannot be read is not opened without its hash, either
    try:
        if content is not None:
            data = Path(path).read_bytes()
            if not content.startswith(hashlib.sha256(data).hexdigest()): # a mark may follow
                raise InputError(f"{path}: has changed since it was looked at; run the same command again")
            source = io.BytesIO(data)
        image = Image.open(source, formats=["PNG", "JPEG", "WEBP", "BMP"])
    except PermissionError:
        raise InputError(f"{path}: may not be read; mend its permissions")
    except Exception: # it is another kind; or damaged, and can fail in any way
        image = photos.open_photo(path, source)
    if image.width * image.height > MAX_PIXELS:
        raise InputError(f"{path}: {image.width}x{image.height} is over {MAX_PIXELS // 10**6} megapixels; shrink it")
    if image.format in ("PNG", "WEBP", "AVIF") and image.n_frames > 1:
        raise InputError(f"{path}: animated; export one frame")
    if image.format == "PNG" and "exif" not in image.info: # it may stand behind the pixels
        with contextlib.suppress(Exception): # damaged notes must not matter
            notes = Image.open(image.fp, formats=["PNG"])
            notes.load_prepare() # what PIL does before and after it decodes the pixels, which is left out here: sizes
            notes.load_end() # are asked of a whole dataset
            image.info |= notes.info
    return image

TURN = {2: Image.FLIP_LEFT_RIGHT, 3: Image.ROTATE_180, 4: Image.FLIP_TOP_BOTTOM, 5: Image.TRANSPOSE,
        6: Image.ROTATE_270, 7: Image.TRANSVERSE, 8: Image.ROTATE_90} # by EXIF orientation

def orientation(image):
    """EXIF orientation, 1 to 8 if there is a sound one, from the header alone: PngImageFile.getexif would decode each
    picture of a dataset, and ImageOps.exif_transpose trips over damaged EXIF, which must not matter."""
    if image.format != "TIFF": # PIL turns that by itself
        with contextlib.suppress(Exception): # whatever a damaged block makes PIL do
            return Image.Image.getexif(image).get(0x0112)

def image_size(path):
    """(width, height) as it will be seen, i.e. after the EXIF rotation. InputError for sizes that make no sense."""
    with open_image(path) as image:
        w, h = image.size
        if orientation(image) in range(5, 9): # lies on its side
            w, h = h, w
    if min(w, h) < 32 or max(w, h) > 10 * min(w, h):
        raise InputError(f"{path}: {w}x{h}; sides of at least 32 pixels and an aspect of at most 10:1 are needed")
    return w, h

def decode(path, content):
    """-> PIL image in the file's own mode and format, after the EXIF rotation. content: as for open_image."""
    from extras import photos
    with open_image(path, content) as image:
        turn = TURN.get(orientation(image))
        if "progressive" in image.info:
            photos.check_scans(path)
        try:
            image.load()
        except Exception as e: # a damaged picture can fail in any way
            raise InputError(f"{path}: broken picture ({e}); replace it")
    turned = image.transpose(turn) if turn is not None else image
    turned.format = image.format # which transpose drops
    return turned

def read_image(path, content=None):
    """-> RGB PIL image in sRGB: EXIF rotation applied, alpha composited on white, 16-bit gray scaled (PIL alone clips
    it). content: look_at's hash; InputError if the file has changed since."""
    from extras import photos
    image = decode(path, content)
    if "icc_profile" in image.info or image.mode.startswith("I;16") or image.has_transparency_data:
        return photos.to_plain(image, path)
    return image.convert("RGB")

def read_mask(path, content=None):
    """-> PIL image "L", white = the edited region. Other programs write masks in these forms:

        gray, also soft; 1 bit; 16 bits   white is the region; in 16 bits 65535 or, if no level is above it, 255
        labels 0 and 1 only               1 is the region
        black and one other colour        the other colour is the region
        white on transparency             the white is the region, as opaque as it is
        black, or a photo, with a hole    the hole is the region (as ComfyUI's mask editor and MagicBrush have it)

    Alpha that is the same everywhere, and any colour under alpha 0, mean nothing. content: as for read_image.
    InputError if the mask could mean several things. One that selects nothing or everything is returned: see
    mask_is_empty."""
    from extras import mask
    image = mask.read_form(decode(path, content))
    if image is None:
        raise InputError(f"{path}: its colours, labels or transparency do not tell which region is edited; paint the "
                         "edited region white on black")
    return image.convert("L")

def mask_is_empty(mask):
    """Whether read_mask's mask selects nothing or everything: all of it weighs the same (but for noise of JPEG)."""
    low, high = mask.getextrema()
    return high - low < 8

def fit_size(size, area, upscale=True):
    """(width, height) to resize to: the stock pipeline's calculate_dimensions(area, w / h), i.e. sides rounded to 32;
    with area = 'native', or where upscale is off and the picture is smaller, its own sides rounded to 32."""
    w, h = size
    if area != "native" and (upscale or w * h >= area):
        ratio = w / h
        w = math.sqrt(area * ratio)
        h = w / ratio
    return tuple(max(round(side / 32) * 32, 32) for side in (w, h)) # stock's can be 0 for long thin pictures
