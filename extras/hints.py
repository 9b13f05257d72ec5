"""
What a person may have meant by a flag that a script does not have: another trainer's name for it, or a slip; and by a
folder. What a person should know of the data before a training, and what may surprise in flags and pictures.
"""
import inspect
import logging
import math
import os
import re
import sys
import textwrap
from argparse import ArgumentTypeError
from pathlib import Path
from pydoc import locate

import common
from common import InputError
from extras import best, optimizers, slips, strays
from extras.strays import closest, near_path, nearest

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
MODELS = "tiny Qwen/Qwen-Image-Edit Qwen/Qwen-Image-Edit-2509 Qwen/Qwen-Image-Edit-2511".split()
NAMED = "--(image|jobs|model|transformer|sample_lora|.*data|.*dir|align|json|out)" # flags whose value is a name
PLAIN = "--optimizer", "--lora", "--pretrained_lora" # likewise, but an empty one means none
CONFIGS = ".yaml", ".yml", ".toml" # of other trainers
FEW = 3 # so many lines that are alike are printed one by one


def explain(message, parser):
    """What argparse, or a script, says about its flags -> the same with what to do about it."""
    known = parser._option_string_actions
    if message.startswith("unrecognized arguments: "):
        line = explain_flags(parser) or explain_bare(parser, slips.bare_words(parser))
    elif message.startswith(needs := "the following arguments are required: "):
        line = explain_flags(parser) or explain_place(message.removeprefix(needs), parser)
    else:
        line = slips.explain_value(message, known) or explain_missing(message, parser) or message
        m = re.match(r"--optimizer: found no '(\w+)'", message)
        if m and (ours := slips.ours_for("optimizer", m[1])):
            line = f"{m[0]}; here {ours[0]}"
        if message.startswith("--max_grad_norm: "):
            line += "; inf turns it off"
        if others := explain_flags(parser):
            line += f"; {others}"
    # nobody's flag, or a message of argparse that names no remedy
    return line if ";" in line and not line.endswith(": unknown") else f"{line}; leave it out, or see {parser.prog} -h"


def explain_place(name, parser):
    """What to type where a name without a flag is missing, such as OUT."""
    command = dict(slips.groups(sys.argv[1:]))
    *controls, last = command.get("--control") or [None]
    if name == "out" and controls: # it stood behind --control, which takes several
        words = slips.words_of(command | {"--control": controls})
        return f"out: missing; you may mean: {common.command(['python', sys.argv[0], last, *words])}"
    return f"{name}: missing; {slips.how_to_call(parser)}"


def explain_missing(message, parser):
    """Which one of predict.py's flags is missing that belong together."""
    if message.startswith("--image: give --image with --prompt") and not is_given("--jobs"):
        if not is_given("--image"):
            return "--prompt: nothing to edit; give --image"
        if not is_given("--prompt"):
            values = dict(slips.groups(sys.argv[1:]))["--image"]
            text = [("--image", word) for word in values if not (os.path.exists(word) or Path(word).suffix)]
            line = text and slips.meant_line(parser, text)
            remedy = f"put a text in quotes: {line}" if line else "give --prompt"
            return f"--image: no instruction; {remedy}"


def refuse_slips(parser):
    """Ends the script if its words, each of which argparse would take, cannot be meant."""
    if parser.prog == "predict.py" and not sys.argv[1:]:
        examples = [line for line in parser.description.splitlines() if line.startswith("$")]
        lines = ["usage: predict.py FLAGS; predict.py -h lists them. For instance:", *examples[:4], ""]
        parser.exit(2, "\n".join(lines))
    slips.refuse_marks(parser)
    known = parser._option_string_actions
    places = any(not action.option_strings for action in parser._actions)
    for flag, values in slips.groups(sys.argv[1:]):
        # (of --image without --prompt it is the instruction, as explain_missing says)
        is_name = re.fullmatch(NAMED, flag) and (flag != "--image" or is_given("--prompt")) or flag in PLAIN
        for value in values:
            if (is_name or places and not flag) and slips.is_too_long(value):
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
    if flag == "--transformer" and common.is_one_file(value) and not os.path.exists(value) and nearest(value):
        return f"{value} is no file; {near_path(value)}"
    if flag in ("--model", "--transformer") and (meant := near_model(value)):
        return f"{value} is no folder; give {meant}"
    if flag == "--model" and (Path(value) / "log.jsonl").is_file():
        lora = "--lora" if "--lora" in known else "--pretrained_lora"
        return f"{value} is a run; give it as {lora}, and its own --model"
    if flag == "--out_dir" and common.KINDS.get(Path(value).suffix.lower()) == "picture" and not os.path.exists(value):
        return f"{value} is a picture's name, and this a folder; give --out {Path(value).with_suffix('.png')}"
    if flag == "--cache_dir" and is_dataset(Path(value)):
        return f"{value} is a dataset; give another folder, or leave it out"


def near_model(name):
    """-> the model that is meant by a name that is no folder, and lacks the user of a hub's id; or None."""
    if "/" in name or os.path.exists(name) or common.is_one_file(name) or name == "tiny":
        return None
    model, at, revision = name.partition("@")
    parts = [known for known in MODELS if len(model) > 3 and model.lower() in known.lower()] # qwen, 2509
    near = closest(model, {known.split("/")[-1]: known for known in MODELS}, 0.8)
    if not near and parts:
        near = parts[-1]
    return near and near + at + revision


def near_id(name):
    """-> what a line adds about a hub's id, the last word of `name`, that is like one of MODELS."""
    model = name.split()[-1]
    near = closest(model, dict(zip(MODELS, MODELS)), 0.9)
    return f"give {near}, " if near not in (None, model) else ""


def near_run(name):
    """-> the run that is meant by a name where none is, or None: in the same folder, or in out/."""
    path = Path(name)
    for log in (path, path.parent / "log.jsonl", path.parent.parent / "log.jsonl"): # a file in a run
        if log.name == "log.jsonl" and log.is_file():
            return log.parent
    return closest(path.name, {run.name: run for run in runs_in(Path("out")) + runs_in(path.parent)})


def runs_in(folder):
    """-> the runs in a folder, the one that was trained last behind the others."""
    return [log.parent for log in sorted(folder.glob("*/log.jsonl"), key=os.path.getmtime)]


def no_lora(path, file):
    """Why there is no LoRA at `path`, where `file` was looked for, and what may be meant."""
    found = sorted(path.glob("*.safetensors"))[:1] + runs_in(path)[-1:]
    if not found and not path.exists():
        near = [place for place in (nearest(path), near_run(path)) if place]
        for place in near:
            if place.is_file() or (place / common.LORA_FILE).is_file() or common.checkpoints(place):
                found.append(place)
    give = common.command(found[:1]) or (f"a .safetensors file, a folder with {common.LORA_FILE} or checkpoints, or "
                                         "user/repo of the hub")
    return f"{file}: no LoRA; give {give}"


def no_dataset(root):
    """-> why there is no dataset at `root`, and what may be meant."""
    for place in (root, root / "metadata.jsonl"):
        if why := strays.why_gone(place):
            return f"{place}: {why}"
    if re.match("[a-z0-9]+:/", str(root)): # which Path has made of ://
        return f"{root}: an address; copy what is there into a folder here"
    if not root.exists():
        return f"{root}: does not exist; {near_path(root)}"
    if not (root.is_file() or root.is_dir()): # bash's <(...), which names no folder, and can be read only once
        return f"{root}: is a pipe or a device; save its lines as a file, in the folder where their paths begin"
    if root.suffix.lower() in CONFIGS:
        return f"{root}: another trainer's configuration; first {import_of(root)}"
    what = "is a picture" if common.KINDS.get(root.suffix.lower()) in ("picture", "other") else "is no dataset"
    for folder in (root, *root.parents):
        if any(folder.name in role.folders for role in common.ROLES.values()) and is_dataset(folder.parent):
            return f"{root}: {what}; give {common.command([folder.parent])}"
    names = [path.name for path in strays.listed(root, "*")]
    holds = f"; it holds {', '.join(names[:5]) or 'nothing'}" if root.is_dir() else ""
    # nearly a folder of a dataset, such as Targets or controls
    near = {name: name.lower().rstrip("s") for name in names}
    renames = [f"rename {name} to {role}" for name, role in near.items() if role in common.ROLES and role != name]
    return f"{root}: {what}{holds}; {renames[0] if renames else common.LAYOUT}"


def own_script(name):
    """-> how a command names one of our scripts from this folder, by how the one that runs was named."""
    here = Path(sys.argv[0]).parent
    return (here.parent if here.name == "tools" else here) / name


def import_of(config):
    """-> the command that reads another trainer's configuration."""
    return common.command(["python", own_script("tools/import_data.py"), config, "OUT"])


def is_dataset(folder):
    """Whether it has a folder of targets with a picture in it."""
    for target in filter(Path.is_dir, [folder / name for name in common.ROLES["target"].folders]):
        if any(kind == "picture" for _, kind in common.find_files(target)):
            return True
    return False


def fold(lines):
    """Lines that differ only in the file that they begin with become one, which names the others. A few stay."""
    groups, folded = {}, []
    for line in lines:
        file, _, rest = line.removeprefix("error: ").partition(": ")
        path = Path(file)
        # the rest may name the caption or control that is wanted; its name stands before a suffix
        reason = re.sub(rf"(?<!\w){re.escape(path.stem)}(?=\.\w)", "*", rest)
        groups.setdefault(reason, []).append((line, path.name))
    for first, *others in groups.values():
        if len(others) < FEW:
            folded += [line for line, _ in [first, *others]]
        else:
            names = textwrap.shorten(", ".join(name for _, name in others), 300, placeholder=" ...")
            folded.append(f"{first[0]}; and {len(others)} others likewise: {names}")
    return folded


def how_many(samples):
    """-> "19 samples", and how many prompts, if that is another number."""
    prompts = sum(len(s.prompts) for s in samples)
    return f"{len(samples)} samples" + (f" with {prompts} prompts" if prompts != len(samples) else "")


def describe(samples, val_samples):
    """-> lines: what will be trained, how many of it have a mask, and how much of it is validated, too."""
    lines = [how_many(samples)]
    if alone := sum(not s.controls for s in samples):
        lines[0] += f", {alone} of them without a control: text-to-image"
    from extras import mask # here, as it imports numpy, and an error line should take no time
    if line := mask.count(samples):
        lines.append(line)
    for role in common.other_roles():
        if count := sum(role in s.others for s in samples if role != "mask"):
            lines.append(f"{role}: {count} of {len(samples)} pairs")
    # encoded files are named after the content: a prompt's, which sees the controls, is the same with another mask
    trained = {file.stem for s in samples for file in common_files(s)}
    if shared := [s.name for s in val_samples if not trained.isdisjoint(f.stem for f in common_files(s))]:
        lines.append(f"warning: {len(shared)} of {len(val_samples)} samples of --val_data have pictures that are also "
                     f"trained, for instance {shared[0]}: they do not tell what the LoRA makes of others; move such "
                     "pairs, do not copy them")
    return lines


# train.py's flags that predict.py has, too, and needs for the same pictures
DRAWING = ["model", "transformer", "quantize", "quantize_text_encoder", "offload", *common.SAMPLING]


def option(name, value):
    """-> the words of a command that give a flag this value, which may look like a flag itself."""
    value = "all" if value == common.ALL_BLOCKS else str(value)
    return [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]


def next_commands(args, out_dir, default):
    """-> lines: what a person may want to do with a finished run of train.py. default(flag): its default value."""
    lines, flags = [], []
    for name in DRAWING:
        value = vars(args).get(name)
        if value != default(name):
            flags += option(name, value)
    chosen = out_dir
    for folder, names in best.better_checkpoints(out_dir).items():
        lines.append(f"{folder} is better than the last one by {' and '.join(names)}; compare them")
        if len(names) == len(best.best_steps(out_dir)): # by all measures
            chosen = folder
    draw = common.command(["python", "predict.py", *flags, "--lora", chosen, *args.sample_lora])
    look = common.command(["python", "tools/page.py", out_dir, "--data", *args.data])
    return [*lines, "next:", f"  {draw} --image CONTROL.png --prompt \"...\"", f"  {look}",
            f"ComfyUI: copy it to models/loras; diffusers: pipe.load_lora_weights({str(chosen / common.LORA_FILE)!r})"]


def common_files(sample):
    """Those files of a sample that another one has only if it has the same pictures."""
    texts = [text["file"] for (_, with_pictures), text in sample.texts.items() if with_pictures]
    return [encoding["file"] for encoding in sample.encodings] + (texts if sample.controls else [])


def explain_flags(parser):
    """-> what to give in place of each flag that this script does not have; "" if it has all."""
    remedies = {}
    for flag, values in slips.groups(sys.argv[1:])[1:]:
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
            other = f"; to continue that run give --resume --out_dir {common.command([word])}"
        return f"{before} {word}: this flag takes no value; leave {word} out{other}"
    if Path(word).suffix.lower() in CONFIGS:
        return (f"{word}: belongs to no flag, as there are no config files; {import_of(word)} prints the flags that "
                "another's means")
    name, equals, value = word.partition("=")
    if equals and f"--{name}" in known:
        return f"{word}: belongs to no flag, as these begin with two dashes; give --{name} {common.command([value])}"
    line = slips.meant_line(parser, bare)
    places = slips.groups(sys.argv[1:])[0][1]
    if {"--target", "--control"} <= known.keys() and len(places) == 3: # tools/import_data.py BEFORE AFTER OUT
        words = [places[2], "--target", places[1], "--control", places[0], *sys.argv[4:]]
        line = common.command(["python", sys.argv[0], *words])
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
    if remedies := slips.answers(INSTEAD, name):
        return remedies[0].replace("IMPORT", import_of(*values[:1] or ["CONFIG"]))
    ours = slips.answers(OTHER_NAMES, name)
    meant = [remedy for remedy in ours if remedy.split()[0] in known]
    if meant and " " in meant[0]: # with the value that others do not give
        return f"here {meant[0]}"
    places = [action.dest for action in parser._actions if not action.option_strings]
    if not meant and closest(name, dict.fromkeys(places, True), 0.65):
        words = []
        for flag, others in slips.groups(sys.argv[1:]):
            words += [flag, *others] if flag in known else others
        return f"give the value alone: {common.command(['python', sys.argv[0], *words])}"
    if not meant and (script := owner([f"--{name}", *[remedy.split()[0] for remedy in ours]])):
        return f"it is a flag of {script}, leave it out"
    if not meant and len(name) > 3: # a shorter one is like too many
        near = closest(f"--{name}", dict(zip(known, known)), 0.8)
        meant = [near] if near else []
    return f"here {with_values(meant, values, known)}" if meant else ""


def with_values(flags, values, known):
    """-> the first of our flags that takes these values, as they are or mended, with them; or the first one alone."""
    flags = sorted(flags, key=lambda flag: not all(slips.takes(known[flag], value) for value in values))
    action = known[flags[0]]
    texts = [slips.mended(action, value) for value in values]
    plain = action.type or action.choices or re.fullmatch(NAMED, flags[0]) or flags[0] in PLAIN
    if action.nargs == 0 or not plain: # not of a text
        return flags[0]
    if None in texts:
        return flags[0] + why_not(action, values[texts.index(None)])
    return common.command([flags[0], *texts])


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
    texts = [Path(common.__file__).with_name(name).read_text("utf-8") for name in (script, "common.py")]
    sampling = [f"--{name}" for name in common.SAMPLING if name in common.SAMPLE_FLAGS]
    return {*sampling, *re.findall(r'flag\((?:flag, )?"(--[a-z_]+)"', "".join(texts))}


# ---- warnings: they yield lines, or raise InputError. The table at the end says which flags each gets ----------------


def overwritten(samples, jobs, out_dir):
    """InputError if the results of a dataset, whose folders are read as a whole, would lie among its targets."""
    place, folders = out_dir.resolve(), {Path(s.target).resolve().parent for s in samples if s.target}
    if jobs and folders & {place, *place.parents}:
        raise InputError(f"--out_dir {out_dir}: lies among the dataset's targets; give another folder")


def is_given(flag):
    return flag in {word.split("=")[0] for word in sys.argv[1:]}


def no_pictures(val_samples, sample_every):
    if sample_every and not val_samples and is_given("--sample_every"): # (tiny has a default)
        yield "--sample_every: nothing will be generated; give pairs that are not trained as --val_data"


def only_rises(warmup_steps, max_steps, lr):
    if warmup_steps >= max_steps and is_given("--warmup_steps"): # (tiny has a default)
        yield (f"--warmup_steps {warmup_steps}: the run has {max_steps} steps, so its learning rate only rises, to "
               f"{lr * max_steps / warmup_steps:.1e} in the last; lower it, or raise --max_steps")


def scheduled_twice(optimizer, lr_scheduler):
    if lr_scheduler != "constant" and optimizers.has_average(locate(optimizer)):
        yield (f"--lr_scheduler {lr_scheduler}: {optimizer} is schedule-free, and its average replaces a schedule; "
               "give constant")


def preserved(samples, preserve, pretrained_lora):
    """What --preserve is of all samples, as only those with controls can be asked of the base."""
    with_controls = sum(sample.repeats for sample in samples if sample.controls)
    epoch = sum(sample.repeats for sample in samples)
    if preserve == 1 and with_controls == epoch and not pretrained_lora:
        yield ("--preserve 1: all samples learn what the base answers, which a new LoRA already does; lower it, or "
               "give a --pretrained_lora")
    if preserve and with_controls < epoch:
        yield (f"--preserve {preserve:g}: is {preserve * with_controls / epoch:.3g} of all samples, as those without a "
               "control are always trained; raise it for a larger share")


NO_EFFECT = "has no effect at a CFG scale of 1 or below; raise --true_cfg_scale, or leave it out"


def without_cfg(true_cfg_scale):
    """Of a training's validation pictures."""
    if is_given("--negative_prompt") and true_cfg_scale <= 1:
        yield f"--negative_prompt: {NO_EFFECT}"


def results_without_cfg(samples, negative_prompt):
    """Of results; each line of --jobs may have settings of its own."""
    without = []
    for sample in samples:
        own = is_given("--negative_prompt") or sample.settings["negative_prompt"] != negative_prompt
        if own and sample.settings["true_cfg_scale"] <= 1:
            without.append(sample.name)
    if without:
        yield f"{without[0]}: its negative prompt {NO_EFFECT}{others(without)}"


def one_result(samples, image):
    """Of several pictures, of several prompts."""
    if image and len(image) > 3:
        yield f"--image: {len(image)} pictures make one result; give their folder to edit each"
    if several := [sample.name for sample in samples if len(sample.prompts) > 1]:
        yield f"{several[0]}: of several prompts only the first is used{others(several)}"


def others(names):
    return f" ({len(names) - 1} others likewise)" if len(names) > 1 else ""


MARKUP = re.compile(r"#+ |[-*+] |\d+\. |\*\*|```|[{}\[\]]|\"\w+\": ") # how lines of Markdown and JSON begin


def one_text_in_lines(samples):
    """A caption as language models write it; each of its lines is a prompt of its own."""
    found = [sample for sample in samples if len(sample.prompts) > 1 and any(map(MARKUP.match, sample.prompts))]
    if found:
        one = found[0]
        yield (f"{one.name}: its caption has {len(one.prompts)} lines, and each is trained as a prompt of its own, for "
               f"instance {next(filter(MARKUP.match, one.prompts))!r}; write a text in one line"
               + others([sample.name for sample in found]))


def bend_of(samples):
    """The target whose aspect changes most, if that is by more than 10 %, at one of its sizes."""
    bends = [] # (by how much, the new aspect, sample)
    for sample in samples:
        width, height = sample.sizes[0]
        for encoding in sample.encodings:
            _, h, w = encoding["img_shapes"][0]
            bends.append((abs(w / h * height / width - 1), w / h, sample))
    bend, aspect, sample = max(bends, key=lambda one: one[0])
    own = [side for side in ("height", "width") if sample.settings.get(side)]
    if bend <= 0.1:
        return
    if len(own) > 1:
        (width, height), wide = sample.sizes[0], sample.settings["width"]
        yield (f"{sample.name}: --width and --height change its shape from {width / height:.2f} to {aspect:.2f}; give "
               f"--width {wide} --height {round(wide * height / width)}, or leave one out")
    elif own:
        yield f"{sample.name}: {own[0]} alone changes its aspect by {bend:.1%}; give --height and --width"
    else:
        yield f"{sample.name}: sides rounded to 32 change its aspect by {bend:.1%}; a larger area bends it less"


def size_for_tiny(samples, model):
    """tiny was made for pictures of 160x160: a photograph of 12 megapixels would take it minutes a step."""
    large, remedies = [], set()
    for sample in samples if common.is_tiny(model) else []:
        both = sample.settings.get("width") and sample.settings.get("height") # one alone keeps the area
        of_target = "a smaller --width and --height" if both else "--target_pixels 160x160"
        for encoding in sample.encodings:
            for n, (_, h, w) in enumerate(encoding["img_shapes"]):
                if h * w > 400:
                    large.append((h * w, 16 * w, 16 * h, sample.name))
                    remedies.add("--control_pixels 160x160" if n else of_target)
    if large:
        _, width, height, name = max(large)
        yield (f"{name}: {width}x{height} is slow with the model tiny, which knows small pictures; give "
               f"{' '.join(sorted(remedies, reverse=True))}")


def longest_of(samples, max_tokens):
    """--max_tokens cannot hold for a sample that is longer by itself."""
    lengths = []
    for sample in samples:
        text = max(text["tokens"] for text in sample.texts.values())
        for encoding in sample.encodings:
            lengths.append((sum(h * w for _, h, w in encoding["img_shapes"]) + text, sample.name))
    length, name = max(lengths)
    if length > max_tokens:
        yield f"--max_tokens {max_tokens}: {name} has {length} by itself, and is computed all the same"


def of_masks(samples, mask_foreground_weight, mask_background_weight):
    """What is wrong with the weights of masks."""
    weights = mask_foreground_weight, mask_background_weight
    if not any(weights):
        raise InputError("--mask_foreground_weight: both mask weights are 0, so nothing would be learned; give one")
    masked = any(sample.mask or "mask" in encoding for sample in samples for encoding in sample.encodings)
    if weights != (2, 1) and not masked:
        yield "--mask_foreground_weight, --mask_background_weight: there is no mask; add mask/, or give --mask auto"


# {a flag that tells which script asks: its warnings, whose parameters are flags}
WARNINGS = dict(
    model=[bend_of, size_for_tiny], # of all scripts
    data=[one_text_in_lines], # of all that train or encode
    # of trainings, then of predict.py
    max_steps=[longest_of, of_masks, no_pictures, without_cfg, only_rises, scheduled_twice, preserved],
    jobs=[overwritten, one_result, results_without_cfg])


def warnings(args, samples, val_samples=()):
    """What a person may not expect of these flags and planned samples -> lines; InputError for what cannot be meant. A
    script that lacks a flag, as tools/lean_train.py does, misses the warnings that read it."""
    known, lines = vars(args) | dict(samples=samples, val_samples=val_samples), []
    if not samples: # all have errors, which are listed
        return []
    for flag, functions in WARNINGS.items():
        for warn in functions:
            read = inspect.signature(warn).parameters
            if known.keys() >= {flag, *read}:
                lines += warn(*[known[name] for name in read]) or ()
    return [f"warning: {line}" for line in lines]
