"""
What a person may have meant by a flag that a script does not have: another trainer's name for it, or a slip; and by a
folder.
"""
import difflib

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
