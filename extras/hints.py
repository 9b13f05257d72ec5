"""
What a person may have meant by a flag that a script does not have: another trainer's name for it, or a slip; and by a
folder. What a person should know of the data before a training.
"""
import difflib
import re
import sys

OTHER_NAMES = dict( # our flag: what others call it, where the spelling alone does not tell
    lr="learning_rate", lora_rank="rank network_dim linear", lora_alpha="linear_alpha network_alpha",
    max_steps="steps", offload="blocks_to_swap layer_offloading enable_model_cpu_offload musubi_blocks_to_swap",
    num_inference_steps="steps", true_cfg_scale="cfg guidance_scale",
    target_pixels="resolution image_size max_pixels", vae_device="vae_encoder_device", lora="adapter lora_path",
    image="control_image_path",
    pretrained_lora="network_weights init_lora lora_path lora_checkpoint",
    batch_size="gradient_accumulation_steps",
    lora_scale="lora_weight lora_multiplier",
    data="dataset_config train_data_dir dataset_base_path folder_path image_dir reg_data",
    model="pretrained_model_name_or_path dit", out="output output_path save_path", save_every="checkpointing_steps",
    dtype="mixed_precision", tracker="report_to log_with",
    quantize="fp8_base fp8_scaled quant_options base_model_precision", out_dir="save_dir output_name",
    jobs="from_file", resume="resume_from_checkpoint", repeats="dataset_repeat num_repeats",
    val_data="validation_prompts", sample_every="validation_step_interval sample_every_n_steps",
    lora_targets="network_args network_kwargs lora_target_modules flux_lora_target",
    timestep_sampling="flow_schedule_auto_shift timestep_type")
NOT_FLAGS = dict( # other trainers' flags, and what does the same here
    enable_bucket="no buckets are needed: any sizes share a batch", bucket_no_upscale="give --no-upscale",
    loss_norm="each sample's loss is the mean over its own tokens; README, 'How do I change', has the mean over all",
    **dict.fromkeys("merge_lora base_lora base_weights assistant_lora_path preset_lora_path".split(),
                    "python tools/convert_lora.py LORA --to model --model MODEL --out DIR, then --transformer DIR"))


def explain(message, known):
    """argparse's "unrecognized arguments: --a 1 --b" -> what to say about each flag; another message stays as it is.
    known: the script's own flags."""
    begin = "unrecognized arguments: "
    if not message.startswith(begin):
        return message
    words = message.removeprefix(begin).split()
    flags = [word for word in words if word.startswith("--")] or words[:1] or ["''"] # a blank one, of --flag "$EMPTY"
    return "; ".join(explain_word(word, known) for word in flags)


def refuse_slips(parser):
    """parser.error for a flag whose values argparse would partly drop, or whose empty one would mean this folder."""
    for flag in "--data --image --lora".split():
        if parser.given().count(flag) > 1:
            parser.error(f"argument {flag}: given twice; put all values behind one")
    flag = ""
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        if name.startswith("--"):
            flag, empty = name, word == f"{name}="
        else:
            empty = word == ""
        if empty and re.fullmatch("--(image|jobs|model|transformer|.*data|.*dir|align|json|out)", flag):
            parser.error(f"argument {flag}: empty; give a name, or leave it out")


def describe(samples, val_samples):
    """-> lines: what will be trained, how much of it is validated, too, and what rounding to 32 pixels does to a
    shape."""
    lines = [f"{len(samples)} samples with {sum(len(s.prompts) for s in samples)} prompts"]
    if alone := sum(not s.controls for s in samples):
        lines[0] += f", {alone} of them without a control: text-to-image"
    # files of latents are named after the content of the pictures
    trained = {encoding["file"].stem for s in samples for encoding in s.encodings}
    if shared := [s.name for s in val_samples if s.encodings[0]["file"].stem in trained]:
        lines.append(f"warning: {len(shared)} of {len(val_samples)} samples of --val_data have pictures that are also "
                     f"trained, for instance {shared[0]}: they do not tell what the LoRA makes of others; move such "
                     "pairs, do not copy them")
    # how much the aspect of each target changes, at each of its sizes
    distortions = []
    for s in samples:
        width, height = s.sizes[0]
        for encoding in s.encodings:
            _, h, w = encoding["img_shapes"][0]
            distortions.append((abs(w / h * height / width - 1), s.name))
    distortion, name = max(distortions)
    if distortion > 0.1:
        lines.append(f"warning: {name}: sides rounded to 32 change its aspect by {distortion:.1%}; a larger area bends "
                     "it less")
    return "\n".join(lines)


def explain_folder(names, wanted):
    """-> what to rename, if one of these names is nearly a folder of a dataset, such as Targets or controls."""
    for name in names:
        if (near := name.lower().rstrip("s")) in wanted:
            return f"rename {name} to {near}"


def explain_word(word, known):
    if not word.startswith("-"):
        places = "--data takes datasets, --out_dir runs; " if "--data" in known else ""
        return f"{word}: belongs to no flag; {places}put a text in quotes"
    name = word.split("=")[0].strip("-").replace("-", "_")
    if "epoch" in name:
        return f"{word}: unknown; count in steps: --max_steps, --save_every, --sample_every"
    if name in NOT_FLAGS:
        return f"{word}: unknown; {NOT_FLAGS[name]}"
    meant = [f"--{k}" for k, names in OTHER_NAMES.items() if name in names.split() and f"--{k}" in known]
    meant += difflib.get_close_matches(f"--{name}", known, 1, 0.8)
    return f"{word}: unknown" + (f"; here {meant[0]}" if meant else "")
