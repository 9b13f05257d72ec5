"""
What a person may have meant by words of a command line that argparse does not take: a value in another form, a value
that is missing, a name without its flag. (hints.py has the flags of other trainers.)
"""
import contextlib
import difflib
import errno
import logging
import math
import os
import re
import sys
from argparse import ArgumentTypeError
from copy import copy
from pathlib import Path

import common
from library.cli import flag_types
from library.files import stray_files
from library.files.stray_files import closest, near_path, nearest
from library.models.hub import MODELS

# {flag: what others call its values, without marks and capitals: what they are here, and what that changes}
VALUES = dict(
    optimizer="""
adamw adamwbf16 adamwadv optimiadamw bnbadamw: torch.optim.AdamW
adam optimiadam bnbadam: torch.optim.Adam
adamw8bit adamw8 bnbadamw8bit aoadamw8bit: bitsandbytes.optim.AdamW8bit
pagedadamw8bit bnbadamw8bitpaged: bitsandbytes.optim.PagedAdamW8bit
adam8bit adam8 bnbadam8bit: bitsandbytes.optim.Adam8bit
ademamix8bit bnbademamix8bit: bitsandbytes.optim.AdEMAMix8bit
lion8bit bnblion8bit: bitsandbytes.optim.Lion8bit
lion optimilion bnblion: lion_pytorch.Lion
prodigy prodigy8bit prodigyadv: prodigyopt.Prodigy
prodigyplusschedulefree: prodigyplus.ProdigyPlusScheduleFree
adamwschedulefree schedulefreeadamw: schedulefree.AdamWScheduleFree
adafactor: torch.optim.Adafactor; with --lr, as its relative steps have no counterpart
sgd: torch.optim.SGD
came: came_pytorch.CAME
muon: torch.optim.Muon""",
    lr_scheduler="""
constant: constant
constantwithwarmup: constant; --warmup_steps comes before it
linear: linear
polynomial: linear; a power has no counterpart
cosine: cosine
cosineannealing cosinewithrestarts cosinewithhardrestarts cosinewithminlr sine rex: cosine; it falls once, to 0""",
    timestep_sampling="""
sigmoid logitnormal lognorm: logit_normal
uniform linear sigma: uniform
weighted: uniform; its loss weights have no counterpart
lognormblend: logit_normal; its linear part has no counterpart
qwenshift: qwen_shift
shift fluxshift flux2shift lumina2shift: qwen_shift; its shift follows the picture's size""",
    dtype="""
bf16: bfloat16
fp16: float16
fp32 no: float32""",
    quantize="""
true float8 qfloat8: fp8
qint8 8bit 8: int8
bnb int4 fp4 4bit 4: nf4; the nearest""",
    to="""
kohya: comfyui
merged: model""")
MISSING = {"--gradient_checkpointing": "automatic here; leave it out, or give a number of blocks (0: off)",
           "--offload": "no number; give all, or a number of blocks"}
NEEDED = {"--image": "PICTURE", "--prompt": "TEXT"} # what predict.py wants beside --jobs
UNITS = {"k": 1000, "%": 0.01}
DASHES = re.compile("[\u2010-\u2015\u2212]+") # a word processor makes these of - and --
LONG_DASH = re.compile("-*[\u2010-\u2015\u2212]+-*") # with which a word may begin
QUOTES = "\u201c\u201d\u201e\u2018\u2019'\"" # ' does not quote in cmd.exe


def read_table(table):
    """Yields (key, its usual values, answer) of a table's rows KEYS: ANSWER, where a key may be KEY=VALUE|VALUE, and
    indented lines continue a row."""
    for row in re.sub("\n +", " ", table.strip()).split("\n"):
        keys, _, answer = row.partition(": ")
        for key in keys.split():
            key, _, usual = key.partition("=")
            yield key, usual.split("|"), answer


def answers(table, name):
    """-> the answers of all rows that have this key."""
    return [answer for key, _, answer in read_table(table) if key == name]


def ours_for(flag, value):
    """-> [what another program's value of a flag is here, and what that changes, if anything]; [] if it is not in
    VALUES."""
    found = answers(VALUES.get(flag, ""), re.sub("[^a-z0-9]", "", value.lower()))
    return found[0].split("; ") if found else []


def takes(action, value):
    """Whether this flag takes this text."""
    with contextlib.suppress(ValueError, TypeError, ArgumentTypeError):
        made = action.type(value) if action.type else value
        return not action.choices or made in action.choices
    return False


def mended(action, value):
    """-> the text nearest to `value` that this flag takes, or None."""
    plain = DASHES.sub("-", value.strip().lower())
    near = [*ours_for(action.dest, value)[:1], value, plain, *difflib.get_close_matches(plain, action.choices or (), 1)]
    if action.type is flag_types.pixels: # 512, 1024,1024, 1024x1024px
        sides = re.findall(r"\d+", plain)
        near.append("x".join(sides * 2 if len(sides) == 1 else sides))
    elif action.type is flag_types.png_name:
        near += [str(Path(value).with_suffix(".png"))] if Path(value).name else []
    elif not action.choices and action.type:
        near += number_in(plain)
    if action.nargs == "+":
        near.append(value.replace(",", " "))
    return next((text for text in near if all(takes(action, part) for part in text.split() or [text])), None)


def number_in(text):
    """[the number that 0,5, 2,000, 1k, 80%, 1000px or 1*10^-4 stand for, as Python writes it], or []."""
    text = re.sub(r"[*x\u00d7]?10\^", "e", text).strip(",;")
    found = re.fullmatch(r"([-+]?[\d.,_']+)(e[-+]?\d+)?\s*(k|%|px|steps?)?", text)
    if not found:
        return []
    digits, power, unit = found.groups()
    if re.fullmatch(r"[1-9]\d{0,2}([,._']\d{3})+", digits): # thousands
        digits = re.sub(r"\D", "", digits)
    with contextlib.suppress(ValueError, OverflowError):
        value = float(digits.replace(",", ".") + (power or "")) * UNITS.get(unit, 1)
        return [str(int(value) if value == int(value) else value)]
    return []


def explain_value(message, known):
    """argparse's message about a flag's value -> what to give; None for another message."""
    if found := re.match(r"(--\w+)(?:/\S+)?: ignored explicit argument '(.*)'", message):
        flag, value = found.groups()
        off = f"--no-{flag[2:]}" if value.lower() in ("false", "0", "no") else None
        return f"{flag}={value}: this flag takes no value; give {off if off in known else flag} alone"
    if found := re.match(r"(--\w+): expected (one|at least one) argument", message):
        flag, action = found[1], known[found[1]]
        first = re.split("; | [(]", action.help)[0]
        sizes = ["1024x1024", "512x512", "native"] if action.type is flag_types.pixels else action.choices
        give = f"give {listed(sizes)}" if sizes else f"give one: {first}"
        return f"{flag}: {MISSING.get(flag, f'its value is missing; {give}')}"
    found = re.match(r"(--\w+): (?:invalid (\w+)(?: value)?: )?'(.*?)'(?: [(]choose| is no |$)", message)
    if not found or found[1] not in known:
        return None
    flag, kind, value = found.groups()
    action = known[flag]
    meant = mended(action, value)
    if action.type is flag_types.png_name:
        folder = f", or --out_dir {common.shell_command([value])} for a folder" if not Path(value).suffix else ""
        return f"{flag}: {value!r} is no .png name; give {common.shell_command([meant or 'NAME.png'])}{folder}"
    if action.type is flag_types.pixels and meant:
        return f"{flag}: {value} is {'a side' if value.isdigit() else 'no area'}; give {meant}"
    if action.type is flag_types.pixels and re.fullmatch(r"\d+([*x]\d+)?", value):
        area = math.prod(map(int, re.findall(r"\d+", value)))
        return f"{flag}: {value} is too {'small' if area < common.MAX_PIXELS else 'large'}; give 1024x1024"
    if kind == "choice":
        ours = ours_for(action.dest, value)
        give = "; ".join(ours) if ours[:1] == [meant] else meant or listed(action.choices)
        return f"{flag}: {value!r} is not one of {', '.join(map(str, action.choices))}; give {give}"
    if flag in MISSING and not meant:
        return f"{flag}: {MISSING[flag]}"
    default = action.default[0] if isinstance(action.default, list) and action.default else action.default
    usual = next((f"one, such as {n}" for n in (default, 1, 10) if takes(action, str(n))), "a number")
    number = "whole number" if kind == "int" else "number"
    return kind and f"{flag}: {value!r} is no {number}; give {meant or usual}"


def listed(choices):
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}"


def refuse_marks(parser):
    """Ends the script if a word is a mark of a word processor, or of another shell."""
    for word in sys.argv[1:]:
        flag = f"--{LONG_DASH.sub('', word, 1)}"
        if LONG_DASH.match(word) and flag.split("=")[0] in parser._option_string_actions:
            parser.error(f"argument {word}: begins with a long dash, of a word processor; type {flag}")
        if word in ("\\", "`", "^"):
            parser.error(f"argument {word}: is of another shell; where a line goes on, end it with \\ in bash, ` in "
                         "PowerShell, ^ in cmd.exe, and nothing behind it")


def is_too_long(word):
    """Whether no file can have this name, as it is longer than the disk takes one."""
    try:
        os.lstat(word)
    except OSError as e:
        return e.errno == errno.ENAMETOOLONG
    return False


def how_to_call(parser):
    """-> the first example of the script's docstring."""
    line = next(line for line in parser.description.splitlines() if line.startswith("$ ") and parser.prog in line)
    return f"for instance: {re.split('  +#|  +->', line[2:])[0].strip()}"


def groups(words):
    """Words of a command line -> [(a flag, or '' before the first one, [the words behind it, or behind its =])]."""
    found = [("", [])]
    for word in words:
        if re.match("--?[A-Za-z]", word) and not flag_types.NEGATIVE.match(word):
            flag, equals, value = word.partition("=")
            found.append((flag, [value] if equals else []))
        else:
            found[-1][1].append(word)
    return found


def words_of(command):
    """{flag, or '' before the first one: the words behind it} -> the words of the command line. See groups."""
    words = [word for flag, values in command.items() for word in (flag, *values)]
    return words[1:] # without ''


def bare_words(parser):
    """-> [(the flag before it, or '', a word that no flag takes)], at least one."""
    left = parser.parse_known_args()[1]
    found = []
    for flag, words in groups(sys.argv[1:]):
        for word in words:
            if word in left:
                left.remove(word)
                found.append((flag, word))
    return found or [("", left[-1])] # of -- --seed argparse takes neither for a flag


def flag_of(word, known):
    """The flag that this word may be a value of, by what lies there and by its form; or None."""
    path, suffix = Path(word), Path(word).suffix.lower()
    # (a text is longer than any name: of one Path.is_file raises, and os.path.isfile is False)
    wanted = [flag for flag, action in known.items() if action.choices and word in map(str, action.choices)]
    if word.startswith("Qwen/") or os.path.isfile(path / "model_index.json"):
        wanted = ["--model"]
    elif suffix == ".safetensors" or os.path.isfile(path / "log.jsonl"): # the latter is a run
        wanted = ["--lora", "--pretrained_lora"]
    elif "--image" in known and (os.path.isdir(path) or stray_files.KINDS.get(suffix) in ("picture", "other")):
        wanted = ["--image"]
    elif suffix == ".jsonl" or "--data" in known and re.fullmatch(r"[\w./\\-]+", word):
        wanted = ["--jobs", "--data"]
    return next((flag for flag in wanted if flag in known), None)


def meant_line(parser, bare):
    """-> the command that is meant by one with these words that belong to no flag; None if that cannot be told. bare:
    as of bare_words."""
    known, command, texts = parser._option_string_actions, {}, []
    for flag, values in groups(sys.argv[1:]):
        command.setdefault(flag, []).extend(values)
    wanted = [flag_of(word, known) for _, word in bare]
    for (before, word), flag in zip(bare, wanted):
        command[before].remove(word)
        if flag is None or None in wanted and known[flag].choices: # "make it 2 times larger" names no kernel
            texts.append(word)
        else:
            command.setdefault(flag, []).append(word)
    behind_prompt = texts and ("--prompt", texts[0]) in bare # without quotes it took the first word alone
    if texts and ("--image" not in known or "--prompt" in command and not behind_prompt):
        return None # of a script that edits nothing, or that has its instruction
    if texts:
        text = " ".join(command.pop("--prompt", []) + texts)
        command["--prompt"] = [text.strip(QUOTES)]
    if "--image" in known and "--jobs" not in command: # these two go together
        command = command | {flag: command.get(flag) or [name] for flag, name in NEEDED.items()}
    words = words_of(command)
    return common.shell_command(["python", sys.argv[0], *words]) if is_taken(parser, words) else None


def is_taken(parser, words):
    """Whether these words are a command that the script takes."""
    def refuse(message):
        raise ValueError(message)
    trial = copy(parser)
    trial.error = refuse
    with contextlib.suppress(ValueError):
        return not trial.parse_known_args(words)[1]
    return False


# ---- hints ------------------------------------------------------------------------------------------
# What a person may have meant by a flag that a script does not have: another trainer's name for it, or a slip; and by a
# folder. What a person should know of the data before a training, and what may surprise in flags and pictures.

# bitsandbytes misses a package that only its layers on a CPU would use, which reads like an error of ours
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# names of others: what they are here (rows as slips.read_table reads them)
OTHER_NAMES = """
use_8bit_adam: --optimizer bitsandbytes.optim.AdamW8bit
fp8_base fp8_scaled: --quantize fp8
fp8_vl: --quantize_text_encoder fp8
low_vram layer_offloading enable_model_cpu_offload: --offload all
use_ema: --ema 0.99
bf16 full_bf16 fp16: --dtype bfloat16
wandb: --tracker wandb
dry_run: --plan
cpu: --device cpu
learning_rate: --lr
r rank network_dim linear: --lora_rank
alpha linear_alpha network_alpha: --lora_alpha
dropout network_dropout: --lora_dropout
steps max_train_steps num_steps: --max_steps
blocks_to_swap musubi_blocks_to_swap: --offload
steps infer_steps sample_steps: --num_inference_steps
cfg cfg_scale guidance_scale: --true_cfg_scale
resolution image_size max_pixels multi_resolutions size target target_size: --target_pixels
vae_encoder_device: --vae_device
output output_path save_path out_dir output_dir o: --out
output_dir output output_path save_path out save_dir output_name training_folder name run_name: --out_dir
output output_dir out out_dir: --cache_dir
lora_multiplier network_multiplier lora_weight strength lora_strength: --lora_scale
adapter lora_path load_lora lora_weight lora_weights lora_model: --lora
neg: --negative_prompt
p: --prompt
control_image_path prompt_image input input_image image_path ctrl_img_1 i: --image
network_weights init_lora lora lora_path lora_checkpoint load_lora pretrained_weight: --pretrained_lora
gradient_accumulation_steps gradient_accumulation: --batch_size N, your batch times the accumulation
train_batch_size batch bs: --batch_size
height width: --target_pixels
control_path control_dir control_directory control_images: --control
target_path target_dir: --target
deepspeed: --fsdp
dataset dataset_path train_data_dir dataset_base_path folder_path image_dir instance_data_dir reg_data d: --data
pretrained_model_name_or_path name_or_path m: --model
dit: --transformer
checkpointing_steps save_every_n_steps save_steps: --save_every
checkpoints_total_limit max_step_saves_to_keep: --keep
diff_output_preservation: --preserve
mixed_precision precision: --dtype
report_to log_with: --tracker
lr_warmup_steps: --warmup_steps
quant_options base_model_precision qtype: --quantize
quantize_te qtype_te: --quantize_text_encoder
from_file data: --jobs
resume_from_checkpoint: --resume
dataset_repeat num_repeats: --repeats
val validation_data val_dir: --val_data
validation_step_interval sample_every_n_steps validation_steps sample_steps: --sample_every
network_args network_kwargs target_modules lora_target_modules flux_lora_target: --lora_targets
flow_schedule_auto_shift timestep_type discrete_flow_shift weighting_scheme: --timestep_sampling
flow_shift: --shift
ema_decay: --ema"""
# flags of others that none of ours stands for: what does the same here
INSTEAD = """
config config_file dataset_config data_backend_config:
    there are no config files, only flags; IMPORT prints those that yours means
dataset_metadata_path data_file_keys extra_inputs:
    tools/import_data.py TABLE OUT reads it, --columns names its columns
trigger_word instance_prompt caption captions prompt: write it into the captions, NAME.txt beside each target
image: --data takes the folder of all pairs
before: here --control
after: here --target
validation_prompt validation_prompts sample_prompts sample_at_first:
    validations draw the pairs of --val_data, with their captions, from step 0 on
fix repair: --align DIR writes a repaired copy
enable_bucket: no buckets are needed: any sizes share a batch
bucket_no_upscale: give --no-upscale
flip_x random_flip center_crop: pictures stay as they are; changes/mirror.diff mirrors pairs
loss_norm: each sample's loss is the mean over its own tokens; flow_loss in train.py is the place for another
noise_offset min_snr_gamma snr_gamma: it is for models that predict noise; leave it out
betas adam_beta1 adam_beta2: --optimizer_args betas=[0.9,0.99]
init_lora_weights: --lora_args init_lora_weights=...
vae: it is --model's, in vae/; --vae_device says where it runs
text_encoder: it is --model's, in text_encoder/; --text_encoder_device says where it runs
edit_plus model_version network_module arch model_type model_family lora_type model_id_with_origin_paths lora_base_model
    remove_prefix_in_ckpt: not needed: --model's files say what it is
sdpa xformers split_attn flash_attn enable_xformers_memory_efficient_attention:
    not needed: attention takes the fastest kernel here
cache_latents cache_latents_to_disk cache_text_embeddings: not needed: always done
workers num_workers dataloader_num_workers dataset_num_workers max_data_loader_n_workers persistent_data_loader_workers
    find_unused_parameters allow_tf32 scale_lr vae_dtype: not needed here; leave it out
use_gradient_checkpointing use_gradient_checkpointing_offload: automatic here; leave it out
gpu gpus num_gpus num_processes gpu_ids:
    --device cuda:1 takes another GPU, torchrun --nproc_per_node=N as many as you say
num_images num_samples num_images_per_prompt n: --seed 0 1 2 makes three
sampler scheduler sample_solver: it is the model's own; --shift and --sigmas change it
save_state: not needed: a checkpoint always holds it
push_to_hub hub_model_id: hf upload YOU/NAME OUT_DIR, when it is trained
logging logging_dir: --out_dir says where the log is, --tracker where else
save_lora: a run's LoRA is OUT_DIR/pytorch_lora_weights.safetensors, and --save_every writes checkpoints
merge_lora base_lora base_weights assistant_lora_path preset_lora_path:
    python tools/convert_lora.py LORA --to model --model MODEL --out DIR, then --transformer DIR"""
NAMED = "--(image|jobs|model|transformer|sample_lora|.*data|.*dir|align|json|out)" # flags whose value is a name
PLAIN = "--optimizer", "--lora", "--pretrained_lora" # likewise, but an empty one means none
CONFIGS = ".yaml", ".yml", ".toml" # of other trainers


def explain(message, parser):
    """What argparse, or a script, says about its flags -> the same with what to do about it."""
    known = parser._option_string_actions
    if message.startswith("unrecognized arguments: "):
        line = explain_flags(parser) or explain_bare(parser, bare_words(parser))
    elif message.startswith(needs := "the following arguments are required: "):
        line = explain_flags(parser) or explain_place(message.removeprefix(needs), parser)
    else:
        line = explain_value(message, known) or explain_missing(message, parser) or message
        m = re.match(r"--optimizer: found no '(\w+)'", message)
        if m and (ours := ours_for("optimizer", m[1])):
            line = f"{m[0]}; here {ours[0]}"
        if message.startswith("--max_grad_norm: "):
            line += "; inf turns it off"
        if others := explain_flags(parser):
            line += f"; {others}"
    # nobody's flag, or a message of argparse that names no remedy
    return line if ";" in line and not line.endswith(": unknown") else f"{line}; leave it out, or see {parser.prog} -h"


def explain_place(name, parser):
    """What to type where a name without a flag is missing, such as OUT."""
    command = dict(groups(sys.argv[1:]))
    *controls, last = command.get("--control") or [None]
    if name == "out" and controls: # it stood behind --control, which takes several
        words = words_of(command | {"--control": controls})
        return f"out: missing; you may mean: {common.shell_command(['python', sys.argv[0], last, *words])}"
    return f"{name}: missing; {how_to_call(parser)}"


def explain_missing(message, parser):
    """Which one of predict.py's flags is missing that belong together."""
    if message.startswith("--image: give --image with --prompt") and not is_given("--jobs"):
        if not is_given("--image"):
            return "--prompt: nothing to edit; give --image"
        if not is_given("--prompt"):
            values = dict(groups(sys.argv[1:]))["--image"]
            text = [("--image", word) for word in values if not (os.path.exists(word) or Path(word).suffix)]
            line = text and meant_line(parser, text)
            remedy = f"put a text in quotes: {line}" if line else "give --prompt"
            return f"--image: no instruction; {remedy}"


def refuse_slips(parser):
    """Ends the script if its words, each of which argparse would take, cannot be meant."""
    if parser.prog == "predict.py" and not sys.argv[1:]:
        examples = [line for line in parser.description.splitlines() if line.startswith("$")]
        lines = ["usage: predict.py FLAGS; predict.py -h lists them. For instance:", *examples[:4], ""]
        parser.exit(2, "\n".join(lines))
    refuse_marks(parser)
    known = parser._option_string_actions
    places = any(not action.option_strings for action in parser._actions)
    for flag, values in groups(sys.argv[1:]):
        # (of --image without --prompt it is the instruction, as explain_missing says)
        is_name = re.fullmatch(NAMED, flag) and (flag != "--image" or is_given("--prompt")) or flag in PLAIN
        for value in values:
            if (is_name or places and not flag) and is_too_long(value):
                parser.error(f"argument {flag or value[:40]}: longer than a file's name can be; shorten it")
            if slip := slip_of(flag, value, known):
                parser.error(f"argument {flag}: {slip}")


def slip_of(flag, value, known):
    """-> what is wrong with a flag's value that argparse would take, and what to do; or None."""
    if not value and re.fullmatch(NAMED, flag):
        return "empty; give a name, or leave it out" # it would mean this folder
    if flag == "--transformer" and re.fullmatch(r"cuda(:\d+)?|cpu|mps", value):
        meant = "--transformer_device" if "--transformer_device" in known else "--device"
        return f"{value} is a device; here {meant} {value}"
    if flag == "--transformer" and flag_types.is_one_file(value) and not os.path.exists(value) and nearest(value):
        return f"{value} is no file; {near_path(value)}"
    if flag in ("--model", "--transformer") and (meant := near_model(value)):
        return f"{value} is no folder; give {meant}"
    if flag == "--model" and (Path(value) / "log.jsonl").is_file():
        lora = "--lora" if "--lora" in known else "--pretrained_lora"
        return f"{value} is a run; give it as {lora}, and its own --model"
    if flag == "--out_dir" and stray_files.KINDS.get(Path(value).suffix.lower()) == "picture" and not os.path.exists(value):
        return f"{value} is a picture's name, and this a folder; give --out {Path(value).with_suffix('.png')}"
    if flag == "--cache_dir" and (Path(value) / "target").is_dir():
        return f"{value} is a dataset; give another folder, or leave it out"


def near_model(name):
    """-> the model that is meant by a name that is no folder, and lacks the user of a hub's id; or None."""
    if "/" in name or os.path.exists(name) or flag_types.is_one_file(name) or name == "tiny":
        return None
    model, at, revision = name.partition("@")
    parts = [known for known in MODELS if len(model) > 3 and model.lower() in known.lower()] # qwen, 2509
    near = closest(model, {known.split("/")[-1]: known for known in MODELS}, 0.8)
    if not near and parts:
        near = parts[-1]
    return near and near + at + revision


def own_script(name):
    """-> how a command names one of our scripts from this folder, by how the one that runs was named."""
    here = Path(sys.argv[0]).parent
    return (here.parent if here.name == "tools" else here) / name


def import_of(config):
    """-> the command that reads another trainer's configuration."""
    return common.shell_command(["python", own_script("tools/import_data.py"), config, "OUT"])


def explain_flags(parser):
    """-> what to give in place of each flag that this script does not have; "" if it has all."""
    remedies = {}
    for flag, values in groups(sys.argv[1:])[1:]:
        if flag not in parser._option_string_actions:
            remedies.setdefault(explain_word(flag, values, parser), []).append(flag)
    lines = [f"{', '.join(flags)}: unknown" + (f"; {remedy}" if remedy else "") for remedy, flags in remedies.items()]
    return "; ".join(sorted(lines, key=lambda line: line.endswith(": unknown")))


def explain_bare(parser, bare):
    """-> what to do about words [(the flag before it, word)] that no flag takes."""
    known = parser._option_string_actions
    before, word = bare[0]
    if not word.strip():
        return f"{word!r}: belongs to no flag; leave it out (at the end of a line nothing may follow its \\)"
    if word in ("help", "/?", "/h", "?"):
        return f"{word}: belongs to no flag; for all flags give -h"
    if before in known and known[before].nargs == 0: # of --use_cache true
        other = f"; or give --no-{before[2:]}" if f"--no-{before[2:]}" in known else ""
        if before == "--resume" and (Path(word) / "log.jsonl").is_file():
            other = f"; to continue that run give --resume --out_dir {common.shell_command([word])}"
        return f"{before} {word}: this flag takes no value; leave {word} out{other}"
    if Path(word).suffix.lower() in CONFIGS:
        return (f"{word}: belongs to no flag, as there are no config files; {import_of(word)} prints the flags that "
                "another's means")
    name, equals, value = word.partition("=")
    if equals and f"--{name}" in known:
        return f"{word}: belongs to no flag, as these begin with two dashes; give --{name} {common.shell_command([value])}"
    line = meant_line(parser, bare)
    places = groups(sys.argv[1:])[0][1]
    if {"--target", "--control"} <= known.keys() and len(places) == 3: # tools/import_data.py BEFORE AFTER OUT
        words = [places[2], "--target", places[1], "--control", places[0], *sys.argv[4:]]
        line = common.shell_command(["python", sys.argv[0], *words])
    remedy = f"you may mean: {line}" if line else "leave it out, or put a text in quotes"
    return f"{word}: belongs to no flag; {remedy}"


def explain_word(word, values, parser):
    """-> what to give in place of a flag that this script does not have, or "". values: the words behind it."""
    known = parser._option_string_actions
    name = word.strip("-").replace("-", "_").lower()
    if "epoch" in name:
        return ("count in steps: --max_steps is epochs x pairs / --batch_size, and so are --save_every and "
                "--sample_every")
    if f"--{name}" in known:
        return f"here {with_values([f'--{name}'], values, known)}"
    if remedies := answers(INSTEAD, name):
        return remedies[0].replace("IMPORT", import_of(*values[:1] or ["CONFIG"]))
    ours = answers(OTHER_NAMES, name)
    meant = [remedy for remedy in ours if remedy.split()[0] in known]
    if meant and " " in meant[0]: # with the value that others do not give
        return f"here {meant[0]}"
    places = [action.dest for action in parser._actions if not action.option_strings]
    if not meant and closest(name, dict.fromkeys(places, True), 0.65):
        words = []
        for flag, others in groups(sys.argv[1:]):
            words += [flag, *others] if flag in known else others
        return f"give the value alone: {common.shell_command(['python', sys.argv[0], *words])}"
    if not meant and (script := owner([f"--{name}", *[remedy.split()[0] for remedy in ours]])):
        return f"it is a flag of {script}, leave it out"
    if not meant and len(name) > 3: # a shorter one is like too many
        near = closest(f"--{name}", dict(zip(known, known)), 0.8)
        meant = [near] if near else []
    return f"here {with_values(meant, values, known)}" if meant else ""


def with_values(flags, values, known):
    """-> the first of our flags that takes these values, as they are or mended, with them; or the first one alone."""
    flags = sorted(flags, key=lambda flag: not all(takes(known[flag], value) for value in values))
    action = known[flags[0]]
    texts = [mended(action, value) for value in values]
    plain = action.type or action.choices or re.fullmatch(NAMED, flags[0]) or flags[0] in PLAIN
    if action.nargs == 0 or not plain: # not of a text
        return flags[0]
    if None in texts:
        return flags[0] + why_not(action, values[texts.index(None)])
    return common.shell_command([flags[0], *texts])


def why_not(action, value):
    """-> why a flag does not take this value, in brackets; "" if its type says nothing."""
    try:
        action.type(value)
    except ArgumentTypeError as e:
        return f" ({e})"
    except (TypeError, ValueError): # no type, or one of Python's own
        pass
    return ""


def owner(flags):
    """-> the one of our scripts that has one of these flags, or None."""
    for script in ("train.py", "predict.py"):
        if not flags_of(script).isdisjoint(flags):
            return script


def flags_of(script):
    """-> the flags of train.py or predict.py, by its text and common.py's: to import train.py would train."""
    texts = [(Path(common.__file__).parent / name).read_text("utf-8") for name in (script, "library/cli/command_line.py")]
    sampling = [f"--{name}" for name in flag_types.SAMPLING if name in flag_types.SAMPLE_FLAGS]
    return {*sampling, *re.findall(r'flag\((?:flag, )?"(--[a-z_]+)"', "".join(texts))}


def is_given(flag):
    return flag in {word.split("=")[0] for word in sys.argv[1:]}
