"""The command line: the flags that scripts share, and a parser whose errors are one line."""
import argparse
import errno
import json
import math
import os
import re
import sys
import textwrap
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import library
from common import (InputError, MAX_PIXELS, WARNED, closest, end_by_ctrl_c, flag_error, make_streams_printable,
                    warn_once, world)
from library.models import environment, hub

# Flags and places whose value is a name. An empty one, of an unset shell variable, would mean the current folder.
NAMES = "image|jobs|json|model|transformer|sample_lora|(.*_)?(data|dataset|dir)|out|align|source|results|run"
FLAG = re.compile(r"(--?|[\u2010-\u2015\u2212]+)[A-Za-z]\S*$") # a word processor makes a long dash of two short ones

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
    flag("--cache_dir", "encoded", "where encoded samples of all models and datasets are kept")
    flag("--max_sequence_length", 1024,
         "most tokens in a prompt; a longer prompt is an error, it is not cut", type=positive)
    flag("--vae_device", None, "where pictures are encoded and decoded (default: --device)")
    flag("--text_encoder_device", None, "default: --device; cpu if memory runs out while encoding")
    add_quantize_flag(flag, "--quantize_text_encoder", "the text encoder's linear layers, 16 GB in bf16")

def add_quantize_flag(flag, name, what):
    flag(name, "none", f"{what}: int8 or fp8 (half the memory) or nf4 (a quarter; pip install bitsandbytes)",
         choices=["none", "int8", "fp8", "nf4"])

class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action): # a default of None is explained in the help itself
        explained = action.default in (None, []) or "default" in action.help
        return action.help if explained else super()._get_help_string(action)

class Parser(argparse.ArgumentParser): # a class because argparse calls its method `error`
    """-h shows all defaults; an error is one line, with the flag that may be meant, and status 2."""

    def __init__(self, description, usage=None): # usage: the flags that a person needs first
        if line := environment.environment_error(): # before any flag: a default may need their number
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
        flag_error(explain(message.removeprefix("argument "), self))

    def parse_args(self):
        sys.excepthook = end_by_ctrl_c
        make_streams_printable()
        warn_once.cache_clear()
        WARNED.clear()
        for line in environment.remove_other_numbers():
            warn_once(line)
        if world() > 1 and "--flash_attention" not in self._option_string_actions: # one of add_model_flags
            self.error(f"argument WORLD_SIZE: {world()}, and {self.prog} works in one process; unset RANK WORLD_SIZE")
        for flag in "--data --image --lora --sample_lora".split(): # argparse would keep the last one's values only
            if given_flags().count(flag) > 1:
                self.error(f"argument {flag}: given twice; put all values behind one")
        return super().parse_args()

    def _get_value(self, action, text): # argparse asks it for each value; it has no public way
        is_name = re.fullmatch(NAMES, action.dest)
        if is_name and not text:
            raise argparse.ArgumentError(action, "empty; give a name, or leave it out")
        if (is_name or action.dest.endswith("lora")) and is_too_long(text): # as a text without --prompt is
            raise argparse.ArgumentError(action, "longer than a file's name can be; shorten it")
        return super()._get_value(action, text)

def is_too_long(name):
    """Whether no file can have this name, as it is longer than the disk takes one."""
    try:
        os.lstat(name)
    except OSError as e:
        return e.errno == errno.ENAMETOOLONG
    return False

def given_flags():
    """The words of the command line, with --flag of --flag=value."""
    return [word.split("=")[0] for word in sys.argv[1:]]

def is_given(flag):
    """Whether the command line has this flag, with whatever value."""
    return flag in given_flags()

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

def add_sample_flags(flag, names):
    for name in names:
        kind, text = SAMPLE_FLAGS[name]
        default = SAMPLING.get(name)
        flag(f"--{name}", default, text, **({} if isinstance(default, bool) else dict(type=kind)))

def words_for_predict(args, default):
    """-> the words of a command line by which predict.py draws as these flags of train.py say: of the flags that both
    have, those that the person has given. default(flag): its default value."""
    words = []
    for name in ("model", "transformer", "quantize", "quantize_text_encoder", "offload", *SAMPLING):
        value = vars(args).get(name)
        if value == default(name):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        text = "all" if value == ALL_BLOCKS else str(value)
        # which may look like a flag itself
        words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return words

PACKAGES = dict(nf4="bitsandbytes", tensorboard="tensorboard", wandb="wandb") # which package this value of a flag needs

def set_tiny_defaults(parser, flags):
    """Makes these words of a command line, as far as this parser has their flags, its defaults."""
    words = [str(hub.TINY_DATA.parents[1] / word) if word.startswith("tiny/") else word for word in flags.split()]
    parser.set_defaults(**vars(parser.parse_known_args(words)[0]))
    if is_given("--data"): # whose validation is not the demo's
        parser.set_defaults(val_data=[])
    if is_given("--optimizer"):
        parser.set_defaults(optimizer_args=[])

def parse_args(parser, script):
    """parser.parse_args(), twice with a model of tiny's size, as it has defaults of its own. It needs no torch, so
    that a slip is answered at once; find_devices does the rest."""
    flags = hub.TINY_DEFAULTS[script]
    parser.epilog = textwrap.fill(f"With --model tiny these defaults apply: {flags}", 100, break_on_hyphens=False)
    args = parser.parse_args()
    if hub.is_tiny(args.model):
        set_tiny_defaults(parser, flags)
        args = parser.parse_args()
    environment.refuse_devices(args)
    # what is written into a dataset would be read as a part of it
    if args.cache_dir and Path(args.cache_dir, "target").is_dir():
        parser.error(f"argument --cache_dir: {args.cache_dir} is a dataset; give another folder, or leave it out")
    for folder in (args.cache_dir, getattr(args, "out_dir", None)):
        if folder and os.path.dirname(os.path.realpath(folder)) == library.ROOT:
            library.refuse_package(os.path.realpath(folder)) # before we make it, as the next start would refuse it
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

# ---- what a flag, a prompt or a field of jobs.jsonl may hold ---------------------------------------------------------

NEGATIVE_PROMPT = " " # the prompt of an unconditional run, as in the model cards

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
ALL_BLOCKS = 10**9 # what --offload all is: more than any model has
NEGATIVE = re.compile(r"(?i)-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\Z|-(inf|nan)\Z")

def number_of_blocks(text):
    return ALL_BLOCKS if text == "all" else natural(text)

def is_one_file(name):
    return Path(name or "").is_file() or str(name).endswith((".safetensors", ".gguf"))

# how the stock pipeline samples, as the model cards have it
SAMPLING = dict(negative_prompt=NEGATIVE_PROMPT, num_inference_steps=20, true_cfg_scale=4.0, cfg_norm=True,
                sigmas=None, shift=None)

def png_name(text):
    if not text.lower().endswith(".png") or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no .png name; give one, or --out_dir for a folder")
    return text

def only_text(value):
    if not isinstance(value, str):
        raise TypeError("is no text")
    return value

def true_or_false(value):
    if not isinstance(value, bool):
        raise TypeError("is neither true nor false")
    return value

# Flags that a line of jobs.jsonl may set, too, for its own picture: {name: (type, help)}. train.py has those of
# SAMPLING but --sigmas, for its validation pictures.
SAMPLE_FLAGS = dict(
    negative_prompt=(only_text, "prompt of the unconditional pass (default: one space)"),
    num_inference_steps=(number(int, 1, 1000), "Euler steps: at least 2, or 1 with a --shift"),
    true_cfg_scale=(number(float, 0, 1e6), "CFG scale; at 1 or below no unconditional pass is run: half the time"),
    cfg_norm=(true_or_false, "set what CFG predicts back to the norm of the prompt's own prediction, as stock and "
              "ComfyUI's CFGNorm do; DiffSynth, InvokeAI and stable-diffusion.cpp do not"),
    shift=(number(float, 1e-6, 1e6), "one shift for all sizes, not stretched to end at 0.02: 3 for "
           "Qwen-Image-Lightning (default: the model's own, by size)"),
    height=(number(int, 32, 16384), "of the result, in pixels, rounded down to 16 (default: from the area)"),
    width=(number(int, 32, 16384), "pixels, likewise"),
    size_from=(positive, "which picture gives the result its shape, from 1 (default: the last, as in stock)"))
INVISIBLE = "\u115f\u1160\u2800\u3164\uffa0" # fillers and a blank, which count as letters or symbols

def is_visible(text):
    """Whether it has a character that can be seen: no space, control or format character (such as U+200B), or mark."""
    return any(unicodedata.category(c) not in "Cc Cf Mn Zl Zp Zs" and c not in INVISIBLE for c in text)

def check_text(where, prompt):
    if len(prompt) > 200_000: # its tokens are counted, which takes minutes for more
        raise InputError(f"{where}: prompt of {len(prompt):,} letters; shorten it")
    if re.search("<[|]|[\0\ud800-\udfff]", prompt):
        raise InputError(f"{where}: a special token, NUL, or half a character, in {prompt!r:.200}; leave it out, or "
                         "if it looks right to you, set LC_ALL=C.UTF-8")
    if found := re.search(r"\[(trigger|name)\]", prompt): # ai-toolkit's, which would be trained literally
        raise InputError(f"{where}: {found[0]} stands for a word in {prompt!r:.200}; write the word itself")

def is_index(root):
    return Path(root).suffix == ".json"

# ---- what an unknown flag means --------------------------------------------------------------------------------------

# Other trainers' names -> ours. A row is "their names: our flag (what differs)", or what to do where no flag of ours
# stands for it. NAME=VALUE is a value of our flag in their words, NAME= our flag without one.
OTHER_NAMES = """
learning_rate: --lr
r rank network_dim linear: --lora_rank
alpha linear_alpha network_alpha: --lora_alpha
dropout network_dropout: --lora_dropout
network_args network_kwargs target_modules lora_target_modules flux_lora_target: --lora_targets
steps max_train_steps num_steps: --max_steps
epochs num_epochs num_train_epochs max_train_epochs: --max_steps (epochs x pairs / --batch_size)
train_batch_size batch bs: --batch_size
gradient_accumulation_steps gradient_accumulation: --batch_size (your batch times the accumulation)
optimizer_type: --optimizer (the class, such as torch.optim.AdamW)
use_8bit_adam: --optimizer bitsandbytes.optim.AdamW8bit
betas adam_beta1 adam_beta2: --optimizer_args betas=[0.9,0.99]
lr_warmup_steps: --warmup_steps
use_ema ema_decay: --ema 0.99
flow_schedule_auto_shift timestep_type discrete_flow_shift weighting_scheme: --timestep_sampling
diff_output_preservation: --preserve 0.1 (a share of the samples)
dataset dataset_path train_data_dir dataset_base_path folder_path image_dir instance_data_dir reg_data d: --data
image: --data (the folder of all pairs)
dataset_repeat num_repeats: --repeats
val validation_data val_dir: --val_data
resolution image_size max_pixels target size height width: --target_pixels 1024x1024 (an area, not a side)
bucket_no_upscale: --no-upscale
pretrained_model_name_or_path name_or_path m: --model
dit: --transformer
mixed_precision precision bf16 full_bf16 fp16: --dtype bfloat16
quant_options base_model_precision qtype fp8_base fp8_scaled: --quantize fp8
quantize_te qtype_te fp8_vl: --quantize_text_encoder fp8
blocks_to_swap musubi_blocks_to_swap: --offload (as many blocks)
low_vram layer_offloading enable_model_cpu_offload: --offload all
deepspeed: --fsdp
cpu: --device cpu
gpu gpus gpu_ids: --device cuda:1
vae_encoder_device: --vae_device
network_weights init_lora lora lora_path lora_checkpoint load_lora pretrained_weight: --pretrained_lora
adapter lora_path load_lora lora_weight lora_weights lora_model: --lora
lora_multiplier network_multiplier strength lora_strength: --lora_scale
resume_from_checkpoint: --resume
checkpointing_steps save_every_n_steps save_steps: --save_every
checkpoints_total_limit max_step_saves_to_keep: --keep
validation_step_interval sample_every_n_steps validation_steps sample_steps: --sample_every
dry_run: --plan
report_to log_with wandb: --tracker wandb
output output_path save_path out_dir output_dir o: --out
output_dir output output_path save_path out save_dir output_name training_folder name run_name: --out_dir
i input input_image image_path image_paths control_image_path prompt_image ctrl_img_1: --image
p: --prompt
neg: --negative_prompt
steps infer_steps sample_steps: --num_inference_steps
cfg cfg_scale guidance_scale: --true_cfg_scale
flow_shift: --shift
num_images num_samples num_images_per_prompt n: --seed 0 1 2 (makes three)
data from_file: --jobs
before control_path control_dir control_directory control_images: --control
after target_path target_dir: --target
config config_file dataset_config: no config files; python tools/import_data.py CONFIG OUT prints the flags of yours
trigger_word instance_prompt caption captions prompt: write it into the captions, NAME.txt beside each target
validation_prompt validation_prompts sample_prompts: validations draw the pairs of --val_data, with their captions
flip_x random_flip center_crop: pictures stay as they are; changes/mirror.diff mirrors pairs
noise_offset min_snr_gamma snr_gamma: for models that predict noise; leave it out
use_gradient_checkpointing use_gradient_checkpointing_offload: automatic here; leave it out
num_gpus num_processes: torchrun --nproc_per_node=N as many as you say
sampler scheduler sample_solver: the model's own; --shift and --sigmas change it
merge_lora base_lora base_weights: python tools/convert_lora.py --to model, then --transformer
push_to_hub hub_model_id: hf upload YOU/NAME OUT_DIR, when it is trained
model_type model_version network_module arch sdpa xformers flash_attn enable_bucket: not needed here; leave it out
cache_latents cache_latents_to_disk cache_text_embeddings save_state: always done here; leave it out
dataloader_num_workers max_data_loader_n_workers num_workers workers: not needed here; leave it out
gradient_checkpointing= gradient_checkpointing=true: a number of blocks (0: off), or leave it out: it is automatic
offload=: all, or a number of blocks
timestep_sampling=shift: qwen_shift (its shift follows the picture's size)
timestep_sampling=sigmoid timestep_sampling=lognorm: logit_normal
lr_scheduler=cosine_with_restarts: cosine (it falls once)
quantize=4bit quantize=int4 quantize_text_encoder=4bit quantize_text_encoder=int4: nf4
quantize=true quantize_text_encoder=true: fp8"""

def meant_by(name, own):
    """-> what a name of OTHER_NAMES, or a misspelt one, is here, such as "--lr"; "" if nothing is near. own: {--name:
    how the script takes it}. Of several rows those count whose flag is one of these."""
    if f"--{name}" in own:
        return own[f"--{name}"]
    rows = [row.split(": ", 1) for row in OTHER_NAMES.strip().splitlines()]
    answers = [answer for names, answer in rows if name in names.split()]
    meant = [answer for answer in answers if not answer.startswith("--") or answer.split()[0] in own]
    if meant:
        return " or ".join(meant)
    return closest(f"--{name}", own, 0.8) or "" # a bolder guess would name --max_tokens for --max_steps

def explain(message, parser):
    """What argparse says of a command line -> the same, with what may be meant. Unknown flags come first: what they
    are meant to be explains what else is missing, or too much."""
    known = parser._option_string_actions
    own = dict(zip(known, known))
    for action in parser._actions:
        if not action.option_strings:
            own[f"--{action.dest}"] = "give its value alone, without a flag"
    unknown = []
    for word in sys.argv[1:]:
        flag = word.partition("=")[0]
        if flag in known or not FLAG.match(word) or NEGATIVE.match(word):
            continue
        name = re.sub(r"^\W+", "", flag).replace("-", "_").lower()
        meant = meant_by(name, own) or f"see {parser.prog} -h"
        if meant.startswith("--"):
            meant = f"here {meant}"
        unknown.append(f"{flag}: unknown; {meant}")
    if unknown:
        return "; ".join(dict.fromkeys(unknown))
    if message.startswith("unrecognized arguments: "):
        words = message.partition(": ")[2]
        return f"{words[:200]!r}: belongs to no flag; put a text in quotes, a file behind its flag"
    if found := re.match(r"(--\w+): (?:expected|invalid \w+(?: value)?: '(.*?)')", message):
        flag, value = found.groups("")
        choices = {str(choice): choice for choice in known[flag].choices or ()}
        meant = meant_by(f"{flag[2:]}={value}", {}) or closest(value, choices, 0.5)
        if choices and not meant:
            meant = "one of " + ", ".join(choices)
        if meant:
            message = message.split(" (choose")[0] # argparse lists the choices, too
            return f"{message}; give {meant}"
    return message if ";" in message else f"{message}; see {parser.prog} -h"
