"""
tools/settings.py: a configuration of another trainer becomes a line of train.py with its values, and a line for all
that has no counterpart; nothing is dropped in silence. The examples have the keys of those that the programs document.
"""
import json
import re
import shlex
import shutil

import pytest
import yaml
from PIL import Image

from common import CONTROLS
from library.cli import command_line
from library.data.dataset import read_dataset
from tests.harness import is_one_line, paint_picture, paste, run_script, save
from tools import settings

def dataset(folder, names="abcd", **folders):
    """Pairs in FOLDER/after and FOLDER/before, or in folders that are named so."""
    for n, name in enumerate(names):
        for role, place in (dict(after="after", before="before") | folders).items():
            save(paint_picture((64, 48), seed=2 * n + (role == "after")), folder / place / f"{name}.png")
            if role == "after":
                (folder / place / f"{name}.txt").write_text("make it snow", "utf-8")

def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else json.dumps(text), "utf-8")
    return path

AITOOLKIT = dict(job="extension", meta=dict(name="[name]", version="1.0"), config=dict(name="snow_v1", process=[dict(
    type="diffusion_trainer", training_folder="output", sqlite_db_path="./aitk_db.db", device="cuda", trigger_word=None,
    performance_log_every=10,
    network=dict(type="lora", linear=32, linear_alpha=16, conv=16, conv_alpha=16, lokr_full_rank=True, lokr_factor=-1,
                 network_kwargs=dict(ignore_if_contains=[])),
    save=dict(dtype="bf16", save_every=250, max_step_saves_to_keep=4, save_format="diffusers", push_to_hub=False),
    datasets=[dict(
        folder_path="after", control_path=["before"], mask_path=None, mask_min_value=0.1, default_caption="",
        caption_ext="txt", caption_dropout_rate=0.05, cache_latents_to_disk=False, is_reg=False, network_weight=1,
        resolution=[512, 768, 1024], controls=[], shrink_video_to_frames=True, num_frames=1, flip_x=False, flip_y=True,
        num_repeats=2, do_i2v=True)],
    train=dict(
        batch_size=2, bypass_guidance_embedding=False, steps=3000, gradient_accumulation=3, train_unet=True,
        train_text_encoder=False, gradient_checkpointing=True, noise_scheduler="flowmatch", optimizer="adamw8bit",
        timestep_type="weighted", content_or_style="balanced",
        optimizer_params=dict(weight_decay=1e-4, betas=[0.9, 0.99]), unload_text_encoder=False,
        cache_text_embeddings=True, lr="2e-4", lr_scheduler="cosine", max_grad_norm=0.5,
        ema_config=dict(use_ema=True, ema_decay=0.99), skip_first_sample=False, force_first_sample=False,
        disable_sampling=False, dtype="bf16", diff_output_preservation=True, diff_output_preservation_multiplier=1.0,
        diff_output_preservation_class="person", switch_boundary_every=1, loss_type="mse"),
    logging=dict(log_every=1, use_ui_logger=True),
    model=dict(name_or_path="Qwen/Qwen-Image-Edit-2509", arch="qwen_image_edit_plus", quantize=True,
               qtype="uint3|someone/adapters/uint3.safetensors", quantize_te=True, qtype_te="qfloat8", low_vram=True,
               model_kwargs=dict(match_target_res=False), compile=False, layer_offloading=True,
               layer_offloading_transformer_percent=0.5, layer_offloading_text_encoder_percent=1.0),
    sample=dict(sampler="flowmatch", sample_every=250, sample_start_step=0, width=1024, height=768, neg="", seed=42,
                walk_seed=True, guidance_scale=3, sample_steps=25, samples=[
                    dict(prompt="make it snow", ctrl_img_1="before/a.png"),
                    dict(prompt="at night", ctrl_img_1="before/b.png", ctrl_img_2="before/c.png", seed=7)]))]))
MUSUBI = """[general]
resolution = [960, 544]
caption_extension = ".txt"
batch_size = 2
enable_bucket = true
bucket_no_upscale = true
[[datasets]]
image_directory = "after"
control_directory = "before"
cache_directory = "cached"
num_repeats = 3
qwen_image_edit_control_resolution = [1024, 1024]
no_resize_control = false
"""
MUSUBI_FLAGS = """dit = "models/qwen_image_edit_2509_bf16.safetensors"
vae = "models/vae.safetensors"
text_encoder = "models/qwen_2.5_vl_7b.safetensors"
model_version = "edit-2509"
dataset_config = "dataset.toml"
sdpa = true
mixed_precision = "bf16"
[optimizer]
optimizer_type = "prodigyopt.Prodigy"
optimizer_args = ["betas=(0.9, 0.99)", "decouple=True"]
learning_rate = 1.0
lr_scheduler = "constant_with_warmup"
lr_warmup_steps = 0.1
max_grad_norm = 0.0
[training]
timestep_sampling = "shift"
discrete_flow_shift = 2.2
weighting_scheme = "none"
gradient_checkpointing = true
gradient_accumulation_steps = 2
max_data_loader_n_workers = 2
persistent_data_loader_workers = true
network_module = "networks.lora_qwen_image"
network_dim = 16
max_train_epochs = 16
seed = 42
fp8_base = true
fp8_scaled = true
fp8_vl = true
blocks_to_swap = 16
[output]
save_every_n_epochs = 1
sample_every_n_epochs = 2
sample_prompts = "prompts.txt"
output_dir = "lora"
output_name = "snow"
logging_dir = "logs"
"""
KOHYA = """pretrained_model_name_or_path = "someone/sdxl-base"
save_model_as = "safetensors"
network_module = "networks.lora"
network_dim = 64
network_alpha = 32
network_train_unet_only = true
learning_rate = 1e-4
unet_lr = 1e-4
optimizer_type = "AdamW8bit"
lr_scheduler = "cosine_with_restarts"
lr_scheduler_num_cycles = 3
lr_warmup_steps = 100
max_train_steps = 1600
save_every_n_steps = 400
save_last_n_steps = 800
mixed_precision = "bf16"
cache_latents = true
cache_latents_to_disk = true
xformers = true
clip_skip = 1
min_snr_gamma = 5
noise_offset = 0.05
train_batch_size = 4
[general]
shuffle_caption = true
caption_extension = ".txt"
keep_tokens = 1
[[datasets]]
resolution = 512
batch_size = 4
enable_bucket = true
min_bucket_reso = 256
max_bucket_reso = 1024
[[datasets.subsets]]
image_dir = "after"
conditioning_data_dir = "before"
class_tokens = "sks girl"
num_repeats = 10
"""
ONETRAINER = {
    "__version": 10, "training_method": "LORA", "model_type": "QWEN", "debug_mode": False,
    "workspace_dir": "workspace/run", "cache_dir": "workspace-cache/run", "tensorboard": True, "validation": False,
    "continue_last_backup": False, "base_model_name": "Qwen/Qwen-Image-Edit-2511", "output_dtype": "BFLOAT_16",
    "output_model_format": "SAFETENSORS", "output_model_destination": "models/snow.safetensors",
    "gradient_checkpointing": "CPU_OFFLOADED", "concept_file_name": "concepts.json", "aspect_ratio_bucketing": True,
    "latent_caching": True, "clear_cache_before_training": True, "learning_rate_scheduler": "COSINE",
    "learning_rate": 0.0003, "learning_rate_warmup_steps": 50.0, "learning_rate_cycles": 1, "epochs": 10,
    "batch_size": 2, "gradient_accumulation_steps": 1, "ema": "OFF", "ema_decay": 0.999, "ema_update_step_interval": 5,
    "dataloader_threads": 1, "train_device": "cuda", "temp_device": "cpu", "train_dtype": "BFLOAT_16",
    "fallback_train_dtype": "BFLOAT_16", "enable_autocast_cache": True, "only_cache": False, "resolution": "512,768",
    "attention_mechanism": "SDP", "mse_strength": 1.0, "mae_strength": 0.0, "loss_weight_fn": "CONSTANT",
    "loss_scaler": "NONE", "learning_rate_scaler": "NONE", "clip_grad_norm": 1.0, "offset_noise_weight": 0.0,
    "min_noising_strength": 0.0, "max_noising_strength": 1.0, "timestep_distribution": "LOGIT_NORMAL",
    "noising_weight": 0.0, "noising_bias": 0.0, "timestep_shift": 1.0, "dynamic_timestep_shifting": False,
    "transformer": {"model_name": "", "train": True, "weight_dtype": "FLOAT_8", "offload_fraction": 0.1},
    "text_encoder": {"train": False, "weight_dtype": "NFLOAT_4", "dropout_probability": 0.1},
    "vae": {"weight_dtype": "FLOAT_32"}, "quantization": {"layer_filter": "transformer_block", "layer_filter_preset":
    "blocks"}, "masked_training": False, "unmasked_weight": 0.1, "layer_filter": "attn,img_mlp,txt_mlp",
    "layer_filter_preset": "attn-mlp", "peft_type": "LORA", "lora_model_name": "", "lora_rank": 32, "lora_alpha": 1.0,
    "lora_decompose": False, "dropout_probability": 0.05, "lora_weight_dtype": "FLOAT_32",
    "optimizer": {"optimizer": "ADAMW_8BIT", "beta1": 0.9, "beta2": 0.999, "eps": 1e-08, "weight_decay": 0.02,
                  "amsgrad": False, "momentum": None}, "optimizer_defaults": {},
    "sample_definition_file_name": "training_samples/samples.json", "sample_after": 2, "sample_after_unit": "EPOCH",
    "sample_skip_first": 0, "sample_image_format": "JPG", "backup_after": 30, "backup_after_unit": "MINUTE",
    "rolling_backup": True, "rolling_backup_count": 3, "save_every": 1, "save_every_unit": "EPOCH",
    "save_filename_prefix": ""}
CONCEPTS = [{"image": {"enable_crop_jitter": True, "enable_random_flip": False}, "text": {
    "prompt_source": "sample", "prompt_path": "", "enable_tag_shuffling": False, "tag_delimiter": ",",
    "keep_tags_count": 1}, "name": "snow", "path": "concept", "seed": -12, "enabled": True, "type": "STANDARD",
    "include_subdirectories": False, "image_variations": 1, "text_variations": 1, "balancing": 5.0,
    "balancing_strategy": "REPEATS", "loss_weight": 1.0, "concept_stats": {}}]
SIMPLETUNER = {
    "--resume_from_checkpoint": "latest", "--data_backend_config": "config/multidatabackend.json",
    "--aspect_bucket_rounding": 2, "--seed": 42, "--minimum_image_size": 0, "--output_dir": "output/models",
    "--lora_type": "standard", "--lora_rank": 8, "--lora_alpha": 8, "--max_train_steps": 1000, "--num_train_epochs": 0,
    "--checkpoint_step_interval": 500, "--checkpoints_total_limit": 5, "--hub_model_id": "snow",
    "--push_to_hub": "false", "--tracker_project_name": "lora", "--tracker_run_name": "snow", "--report_to": "wandb",
    "--model_type": "lora", "--model_family": "qwen_image", "--model_flavour": "edit-v2", "--train_batch_size": 1,
    "--gradient_accumulation_steps": 4, "--gradient_checkpointing": "true", "--caption_dropout_probability": 0.1,
    "--resolution_type": "pixel_area", "--resolution": 512, "--validation_seed": 42, "--validation_step_interval": 100,
    "--validation_resolution": "1024x1024", "--validation_guidance": 4.0, "--validation_guidance_rescale": "0.0",
    "--validation_num_inference_steps": "30", "--validation_prompt": "make it snow", "--mixed_precision": "bf16",
    "--optimizer": "optimi-lion", "--learning_rate": "1e-4", "--lr_scheduler": "polynomial", "--lr_warmup_steps": 100,
    "--max_grad_norm": 0.01, "--base_model_precision": "int8-quanto", "--quantize_via": "cpu",
    "--quantize_activations": False, "--flow_schedule_shift": 1.73, "--use_ema": "true", "--ema_decay": 0.99,
    "--vae_batch_size": 1, "--num_eval_images": 1, "--disable_benchmark": False, "--validation_torch_compile": "false"}
BACKEND = [
    dict(id="edits", type="local", instance_data_dir="after", caption_strategy="textfile", resolution=1024,
         resolution_type="pixel_area", conditioning_data=["refs"], conditioning_image_embeds="embeds",
         cache_dir_vae="cache/vae/edits", repeats=1, crop=False, minimum_image_size=0),
    dict(id="refs", type="local", dataset_type="conditioning", instance_data_dir="before",
         conditioning_type="reference_strict", resolution=768, cache_dir_vae="cache/vae/refs"),
    dict(id="embeds", type="local", dataset_type="conditioning_image_embeds", cache_dir="cache/embeds"),
    dict(id="texts", dataset_type="text_embeds", default=True, type="local", cache_dir="cache/text")]
DIFFSYNTH = r"""modelscope download --dataset someone/example --local_dir ./data
accelerate launch --num_processes 2 examples/qwen_image/model_training/train.py \
  --dataset_base_path data \
  --dataset_metadata_path data/metadata_edit.csv \
  --data_file_keys "image,edit_image" \
  --extra_inputs "edit_image" \
  --max_pixels 1048576 \
  --dataset_repeat 50 \
  --model_id_with_origin_paths "Qwen/Qwen-Image-Edit-2511:transformer/diffusion*.safetensors,Qwen/Qwen-Image:vae/x" \
  --learning_rate 1e-4 \
  --num_epochs 5 \
  --remove_prefix_in_ckpt "pipe.dit." \
  --output_path "./models/train/lora" \
  --lora_base_model "dit" \
  --lora_target_modules "to_q,to_k,to_v,to_out.0,img_mlp.net.2" \
  --lora_rank 32 \
  --use_gradient_checkpointing \
  --dataset_num_workers 8 \
  --find_unused_parameters \
  --zero_cond_t # of 2511
"""

def place_diffsynth(folder):
    dataset(folder / "data")
    write(folder / "data/metadata_edit.csv", "image,edit_image,prompt\n" + "".join(
        f"after/{n}.png,before/{n}.png,make it snow\n" for n in "abcd"))
    return write(folder / "train.sh", DIFFSYNTH)

def place_onetrainer(folder):
    for n, name in enumerate("abcd"):
        for end in ("", "-condlabel"):
            save(paint_picture((64, 48), seed=2 * n + bool(end)), folder / f"concept/{name}{end}.png")
        (folder / f"concept/{name}.txt").write_text("make it snow", "utf-8")
    write(folder / "concepts.json", CONCEPTS)
    return write(folder / "snow.json", ONETRAINER)

def place_simpletuner(folder):
    dataset(folder)
    write(folder / "config/multidatabackend.json", BACKEND)
    return write(folder / "config/config.json", SIMPLETUNER)

def place(name, text, **others):
    """-> a function of a folder, which writes a dataset, these files, and the configuration."""
    def placed(folder):
        dataset(folder)
        for other, content in others.items():
            write(folder / other.replace("_", "."), content)
        return write(folder / name, text)
    return placed

# {program: (what writes it, keys whose values are in the line, keys that say which pictures there are, flags of the
# line)}. Three samples are trained, one is held out.
PROGRAMS = dict(
    aitoolkit=(place("train.yaml", yaml.dump(AITOOLKIT)), """datasets.resolution datasets.num_repeats
        datasets.caption_dropout_rate network.linear network.linear_alpha train.steps train.batch_size
        train.gradient_accumulation train.optimizer train.optimizer_params.weight_decay train.optimizer_params.betas
        train.lr train.lr_scheduler train.max_grad_norm train.ema_config.use_ema train.ema_config.ema_decay
        model.name_or_path model.quantize model.quantize_te model.qtype_te model.layer_offloading
        model.layer_offloading_transformer_percent sample.sample_every sample.sample_steps sample.guidance_scale
        save.save_every save.max_step_saves_to_keep""",
        """datasets.folder_path datasets.control_path datasets.default_caption datasets.caption_ext
        trigger_word sample.width sample.height sample.seed sample.walk_seed sample.samples.prompt
        sample.samples.ctrl_img_1 sample.samples.ctrl_img_2 sample.samples.seed""",
        "--model Qwen/Qwen-Image-Edit-2509 --target_pixels 512x512 768x768 1024x1024 --no-upscale --repeats 2 "
        "--caption_dropout_rate 0.05 --lora_rank 32 --lora_alpha 16 --lora_targets all-linear --max_steps 3000 "
        "--batch_size 6 --optimizer bitsandbytes.optim.AdamW8bit --optimizer_args betas=[0.9,0.99] --lr 0.0002 "
        "--lr_scheduler cosine --weight_decay 0.0001 --max_grad_norm 0.5 --ema 0.99 --timestep_sampling uniform "
        "--quantize nf4 --quantize_text_encoder fp8 --offload 30 --sample_every 250 --num_inference_steps 25 "
        "--true_cfg_scale 3 --save_every 250 --keep 4"),
    musubi=(place("flags.toml", MUSUBI_FLAGS, dataset_toml=MUSUBI), """datasets.resolution datasets.batch_size
        datasets.bucket_no_upscale datasets.num_repeats datasets.qwen_image_edit_control_resolution dit model_version
        optimizer_type optimizer_args learning_rate lr_warmup_steps max_grad_norm
        gradient_accumulation_steps network_dim max_train_epochs seed fp8_base fp8_vl blocks_to_swap
        save_every_n_epochs sample_every_n_epochs""", """datasets.caption_extension datasets.image_directory
        datasets.control_directory dataset_config""",
        "--model Qwen/Qwen-Image-Edit-2509 --target_pixels 960x544 --control_pixels 1024x1024 --no-upscale --repeats 3 "
        "--lora_rank 16 --lora_alpha 1 --lora_targets attention net.0.proj net.2 --max_steps 48 --batch_size 4 "
        "--optimizer prodigyopt.Prodigy --optimizer_args betas=[0.9,0.99] decouple=True --lr 1 --lr_scheduler constant "
        "--warmup_steps 5 --weight_decay 0 --max_grad_norm inf --timestep_sampling qwen_shift --transformer "
        "models/qwen_image_edit_2509_bf16.safetensors --quantize fp8 --quantize_text_encoder fp8 --offload 16 "
        "--seed 42 --sample_every 6 --save_every 3"),
    musubi_dataset=(place("dataset.toml", MUSUBI), """datasets.resolution datasets.batch_size
        datasets.bucket_no_upscale datasets.num_repeats datasets.qwen_image_edit_control_resolution""",
        "datasets.caption_extension datasets.image_directory datasets.control_directory",
        "--model Qwen/Qwen-Image-Edit-2509 --target_pixels 960x544 --control_pixels 1024x1024 --no-upscale --repeats 3 "
        "--batch_size 2"),
    kohya=(place("kohya.toml", KOHYA), """datasets.resolution datasets.batch_size datasets.num_repeats network_dim
        network_alpha learning_rate optimizer_type lr_warmup_steps max_train_steps save_every_n_steps""",
        "datasets.caption_extension datasets.image_dir datasets.conditioning_data_dir",
        "--model Qwen/Qwen-Image-Edit-2509 --target_pixels 512x512 --repeats 10 --lora_rank 64 --lora_alpha 32 "
        "--lora_targets attention net.0.proj net.2 --max_steps 1600 --batch_size 4 --optimizer "
        "bitsandbytes.optim.AdamW8bit --lr 0.0001 --lr_scheduler cosine --warmup_steps 100 --timestep_sampling uniform "
        "--save_every 400"),
    onetrainer=(place_onetrainer, """concepts.balancing base_model_name learning_rate_scheduler learning_rate
        learning_rate_warmup_steps epochs batch_size gradient_accumulation_steps resolution clip_grad_norm
        timestep_distribution transformer.weight_dtype transformer.offload_fraction text_encoder.weight_dtype
        text_encoder.dropout_probability layer_filter lora_rank lora_alpha dropout_probability optimizer.optimizer
        optimizer.weight_decay sample_after rolling_backup_count save_every""",
        "concepts.path concepts.enabled concepts.type concept_file_name",
        "--model Qwen/Qwen-Image-Edit-2511 --target_pixels 512x512 768x768 --repeats 5 --caption_dropout_rate 0.1 "
        "--lora_rank 32 --lora_alpha 1 --lora_dropout 0.05 --lora_targets attention net.0.proj net.2 --max_steps 80 "
        "--batch_size 2 --optimizer bitsandbytes.optim.AdamW8bit --lr 0.0003 --lr_scheduler cosine --warmup_steps 50 "
        "--weight_decay 0.02 --max_grad_norm 1 --timestep_sampling logit_normal --quantize fp8 "
        "--quantize_text_encoder nf4 --offload 6 --sample_every 16 --save_every 8 --keep 3"),
    simpletuner=(place_simpletuner, """datasets.resolution conditioning.resolution datasets.repeats seed lora_rank
        lora_alpha max_train_steps checkpoint_step_interval checkpoints_total_limit report_to model_flavour
        train_batch_size gradient_accumulation_steps caption_dropout_probability validation_step_interval
        validation_guidance validation_num_inference_steps optimizer learning_rate lr_warmup_steps max_grad_norm
        base_model_precision use_ema ema_decay""", """datasets.id datasets.type datasets.instance_data_dir
        datasets.caption_strategy datasets.conditioning_data conditioning.id conditioning.type
        conditioning.dataset_type conditioning.instance_data_dir conditioning.conditioning_type
        data_backend_config""",
        "--model Qwen/Qwen-Image-Edit-2509 --target_pixels 1024x1024 --control_pixels 768x768 --repeats 2 "
        "--caption_dropout_rate 0.1 --lora_rank 8 --lora_alpha 8 --lora_targets to_q to_k to_v to_out.0 --max_steps "
        "1000 --batch_size 4 --optimizer lion_pytorch.Lion --lr 0.0001 --lr_scheduler linear --warmup_steps 100 "
        "--weight_decay 0 --max_grad_norm 0.01 --ema 0.99 --quantize int8 --seed 42 --sample_every 100 "
        "--num_inference_steps 30 --true_cfg_scale 4 --save_every 500 --keep 5 --tracker wandb"),
    diffsynth=(place_diffsynth, """num_processes max_pixels dataset_repeat model_id_with_origin_paths learning_rate
        num_epochs lora_target_modules lora_rank""",
        "dataset_base_path dataset_metadata_path data_file_keys extra_inputs",
        "--model Qwen/Qwen-Image-Edit-2511 --target_pixels 1048576 --no-upscale --repeats 50 --lora_rank 32 "
        "--lora_targets to_q to_k to_v to_out.0 img_mlp.net.2 --max_steps 375 --batch_size 2 --lr 0.0001"))

def keys_of(program):
    """The keys of a program's files, with dots; those of its datasets begin with datasets, conditioning or concepts."""
    def keys(value, key=""):
        if isinstance(value, dict) and value:
            return set().union(*[keys(inner, f"{key}.{name}") for name, inner in value.items()])
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return set().union(*[keys(one, key) for one in value])
        return {key.strip(".-").replace(".--", ".")}
    if program == "aitoolkit":
        others = dict(AITOOLKIT, config={"name": 1}, **AITOOLKIT["config"]["process"][0])
        return {key.removeprefix("config.") for key in keys(others)}
    if program == "diffsynth":
        return set(re.findall(r"--(\w+)", DIFFSYNTH.split("\n", 1)[1]))
    if program == "onetrainer":
        return keys(dict(ONETRAINER, concepts=CONCEPTS))
    if program == "simpletuner":
        return keys(SIMPLETUNER) | keys(dict(datasets=BACKEND[0], conditioning=BACKEND[1]))
    found = set()
    for text in dict(musubi=[MUSUBI, MUSUBI_FLAGS], musubi_dataset=[MUSUBI], kohya=[KOHYA])[program]:
        flags, _, datasets = text.partition("[general]")
        found |= set(re.findall(r"(?m)^(\w+) =", flags))
        found |= {f"datasets.{key}" for key in re.findall(r"(?m)^(\w+) =", datasets)}
    return found

def parsed(words, tmp_path):
    """What train.py's own parser makes of its command line; it does not go on."""
    class Parsed(Exception):
        pass
    def stop(parser, script):
        raise Parsed(command_line.Parser.parse_args(parser))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "parse_args", stop)
        with pytest.raises(Parsed) as caught:
            run_script("train.py", *words)
    return caught.value.args[0]

def commands(result):
    """-> the words of the doctor's and of train.py's command, which end what import_data.py prints."""
    *_, title, doctor, train = result.out.splitlines()
    assert title in ("next:", "when the pictures are imported:") and doctor.startswith("  python tools/doctor.py ")
    assert train.startswith("  python train.py ")
    return paste(doctor)[2:], paste(train)[2:]

@pytest.mark.parametrize("program", PROGRAMS)
def test_every_setting_is_answered_and_the_line_has_the_values(tmp_path, program):
    """Each key is in the line, with the pictures, or in a line of its own; train.py's parser takes the line."""
    make, taken, data, want = PROGRAMS[program]
    out, val = tmp_path / "photos", tmp_path / "photos_val"
    result = run_script("tools/import_data.py", make(tmp_path), out, "--hold_out", 4)
    assert result.status == 0 and not result.err, result.err
    doctor, train = commands(result)
    want = shlex.split(want)
    assert train == [*want[:2], "--data", str(out), "--val_data", str(val), *want[2:]]
    assert doctor[:2] == [str(out), str(val)] and " ".join(doctor[2:]) in " ".join(want)
    said = set()
    for line in result.out.splitlines():
        if not line.startswith(str(out)):
            said |= {part.split(" = ")[0].split(": ")[-1] for part in line.split(", ")}
    keys = keys_of(program)
    assert keys - said == {*taken.split(), *data.split()}, (keys - said) ^ {*taken.split(), *data.split()}
    args = parsed(train, tmp_path)
    assert args.data == [str(out)] and args.val_data == [str(val)]

ADDED = dict( # a setting that no program has, in the place of its kind
    aitoolkit=lambda text: text.replace("      lr: ", "      frobnicate: 7\n      lr: "),
    musubi=lambda text: text + "[more]\nfrobnicate = 7\n",
    musubi_dataset=lambda text: text + "frobnicate = 7\n", kohya=lambda text: "frobnicate = 7\n" + text,
    onetrainer=lambda text: text.replace("{", '{"frobnicate": 7, ', 1),
    simpletuner=lambda text: text.replace("{", '{"--frobnicate": 7, ', 1),
    diffsynth=lambda text: text.replace("--lora_rank", "--frobnicate 7 --lora_rank"))

@pytest.mark.parametrize("program", PROGRAMS)
def test_an_unknown_setting_is_a_line_and_changes_nothing_else(tmp_path, program):
    """Whatever it is called, as programs get new ones."""
    config = PROGRAMS[program][0](tmp_path)
    before = run_script("tools/import_data.py", config, tmp_path / "photos").out.splitlines()
    for path in tmp_path.glob("photos*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    config.write_text(ADDED[program](config.read_text("utf-8")), "utf-8")
    after = run_script("tools/import_data.py", config, tmp_path / "photos").out.splitlines()
    new, = [line for line in after if line not in before]
    assert "unknown to this script" in new and "frobnicate = 7" in new and len(after) == len(before) + 1

def imported(tmp_path, *flags, sample=(), process=(), **settings):
    """-> (result, the words of train.py's command) for an ai-toolkit yaml with these settings of `train`."""
    dataset(tmp_path)
    own = dict(datasets=[dict(folder_path="after", control_path="before")], train=settings, sample=dict(sample))
    text = dict(config=dict(process=[own | dict(process)]))
    result = run_script("tools/import_data.py", write(tmp_path / "a.yaml", text), tmp_path / "out", *flags)
    assert result.status == 0, result.err
    return result, commands(result)[1]

def flag_in(words, name):
    """-> the values behind this flag, or None."""
    if name not in words:
        return None
    rest = words[words.index(name) + 1:]
    return rest[:next((n for n, word in enumerate(rest) if word.startswith("--")), len(rest))]

VALUES = { # what is set: the flag and its values, a part of a line
    "another optimizer": (dict(lr=1, optimizer="automagic"), "--optimizer", None, "train.optimizer = automagic"),
    "prodigy": (dict(lr=1, optimizer="prodigy"), "--weight_decay", ["0"], ""), # its own; train.py's is AdamW's
    "its alpha is 1": (dict(lr=1), "--lora_alpha", ["1"], "its program's default"),
    "a shift": (dict(lr=1, timestep_type="shift"), "--timestep_sampling", ["qwen_shift"], "follows the picture's size"),
    "no EMA": (dict(lr=1, ema_config=dict(use_ema=False, ema_decay=0.9)), "--ema", None, "train.ema_config.ema_decay"),
    "EMA by itself": (dict(lr=1, ema_config=dict(use_ema=True)), "--ema", ["0.999"], ""),
    "no number": (dict(lr="fast", steps=9), "--lr", None, "no counterpart for this value"),
    "no clipping": (dict(lr=1, max_grad_norm=0), "--max_grad_norm", ["inf"], ""),
    "not above 1": (dict(lr=1, prompt_dropout_prob=1.5), "--caption_dropout_rate", None, "train.prompt_dropout_prob"),
    "too large together": (dict(lr=1, batch_size=10**8, gradient_accumulation=11), "--batch_size", None,
                           "--batch_size 1100000000 is more than train.py takes"),
    "no held-out pairs": (dict(lr=1, steps=10), "--sample_every", None, "--sample_every 5 needs pairs"),
    "a validation": (dict(lr=1, steps=10), "--sample_every", ["5"], "", "--hold_out", 2)}

@pytest.mark.parametrize("kind", VALUES)
def test_a_value_becomes_ours_or_a_line_that_says_why_not(tmp_path, kind):
    """What the words of the other program mean."""
    settings, flag, want, words, *flags = VALUES[kind]
    result, train = imported(tmp_path, *flags, sample=dict(sample_every=5), **settings)
    assert flag_in(train, flag) == want and words in result.out, result.out
    parsed(train, tmp_path)

FLAGS = { # lines of a musubi-tuner toml behind `resolution = 512`: a flag, its values
    "": ("--control_pixels", ["512x512"]), # as large as the target
    "no_resize_control = true": ("--control_pixels", ["native"]),
    "control_resolution = [768, 512]": ("--control_pixels", ["768x512"]),
    "flip_aug = true": ("--repeats", None),
    "model_version = 'edit'": ("--model", ["Qwen/Qwen-Image-Edit"]),
    "model_version = 'edit-2511'": ("--model", ["Qwen/Qwen-Image-Edit-2511"]),
    "timestep_sampling = 'qwen_shift'": ("--timestep_sampling", ["qwen_shift"]),
    "timestep_sampling = 'sigmoid'": ("--timestep_sampling", ["logit_normal"]),
    "network_dim = 8": ("--timestep_sampling", ["uniform"]), # its default, sigma
    "network_dim = 8\nlearning_rate = 1": ("--lora_alpha", ["1"]),
    "max_train_epochs = 400000000": ("--max_steps", None), # of four steps each
    "network_dim = 8\nnetwork_alpha = 4": ("--lora_alpha", ["4"]),
    "lr_warmup_steps = 0.25\nmax_train_steps = 80": ("--warmup_steps", ["20"]),
    "lr_warmup_steps = 1\nmax_train_steps = 80": ("--warmup_steps", ["1"]), # a step, and no share
    "optimizer_args = ['weight_decay=0.1']\noptimizer_type = 'Lion'": ("--weight_decay", None),
    "optimizer_args = ['a=1', 'lr=2']": ("--optimizer_args", None), # train.py has --lr for it
    "network_weights = 'a.safetensors'\nnetwork_dim = 8": ("--lora_rank", None)}

@pytest.mark.parametrize("lines", FLAGS)
def test_flags_of_musubi_tuner_mean_what_they_mean_there(tmp_path, lines):
    """Also where its file is silent."""
    flag, want = FLAGS[lines]
    dataset(tmp_path)
    text = f"{lines}\n[[datasets]]\nresolution = 512\nimage_directory = 'after'\ncontrol_directory = 'before'\n"
    result = run_script("tools/import_data.py", write(tmp_path / "a.toml", text), tmp_path / "out")
    train = commands(result)[1]
    assert flag_in(train, flag) == want, result.out
    parsed(train, tmp_path)

@pytest.mark.parametrize("program, key, flag, want", [
    ("onetrainer", "dynamic_timestep_shifting", "timestep_sampling", "qwen_shift"),
    ("simpletuner", "flow_schedule_auto_shift", "timestep_sampling", "qwen_shift"),
    ("simpletuner", "flow_use_uniform_schedule", "timestep_sampling", "uniform"),
    ("simpletuner", "enable_group_offload", "offload", "all"),
    ("diffsynth", "enable_model_cpu_offload", "offload", "all")])
def test_a_switch_means_one_value_whatever_else_is_set(program, key, flag, want):
    """Before or behind it; switched off it means nothing."""
    others = dict(timestep_distribution=["UNIFORM"], musubi_blocks_to_swap=[3])
    for values in (others | {key: [True]}, {key: [True]} | others):
        facts, _ = settings.translate(settings.Settings("a.json", program, values))
        assert facts[flag] == want
    facts, answers = settings.translate(settings.Settings("a.json", program, {key: [False]}))
    assert not facts and answers == {settings.NOTHING: [f"{key} = False"]}

def test_an_offload_that_is_switched_off_keeps_its_share_to_itself(tmp_path):
    """As a window leaves it behind; and what a sample prompt has beside its pictures is a line."""
    for on, share, want in ((False, 1, None), (True, 0.5, 30), (True, None, "all")):
        values = {"model.layer_offloading": [on]}
        if share:
            values["model.layer_offloading_transformer_percent"] = [share]
        facts, _ = settings.translate(settings.Settings("a.yaml", "aitoolkit", values))
        assert settings.finish(facts, 4, False)[0].get("offload") == want
    sample = dict(samples=[dict(prompt="x", ctrl_img="before/a.png", network_multiplier="0.9")])
    result, _ = imported(tmp_path, sample=sample)
    assert "--lora_scale to predict.py: sample.samples.network_multiplier = 0.9" in result.out

@pytest.mark.parametrize("value, want", [(1.0, "1000000"), ("0.5", "500000"), (768, "768x768"), ("1024", "1024x1024")])
def test_simpletuners_resolution_is_a_side_or_an_area_in_megapixels(tmp_path, value, want):
    """By its size."""
    config = place_simpletuner(tmp_path)
    rows = [dict(row, resolution=value) if row["id"] == "edits" else row for row in BACKEND]
    write(tmp_path / "config/multidatabackend.json", rows)
    doctor, train = commands(run_script("tools/import_data.py", config, tmp_path / "out"))
    assert flag_in(train, "--target_pixels") == flag_in(doctor, "--target_pixels") == [want]

def test_another_model_is_named_and_ours_takes_its_place(tmp_path):
    """As nothing else can be trained here; a pretrained LoRA has its own rank."""
    result, train = imported(tmp_path, lr=1, process=dict(
        model=dict(name_or_path="black-forest-labs/FLUX.1-dev"), network=dict(linear=8, pretrained_lora_path="a.st")))
    assert train[:2] == ["--model", "Qwen/Qwen-Image-Edit-2509"] and "FLUX.1-dev" in result.out
    assert flag_in(train, "--pretrained_lora") == ["a.st"] and "--lora_rank" not in train and "own rank" in result.out

OWN = { # a file with a learning rate, or a rank, alone: what its program takes for the rest
    "a.yaml": (dict(config=dict(process=[dict(train=dict(lr=1))])), "--no-upscale --lora_rank 4 --lora_alpha 1 "
               "--lora_targets all-linear --max_steps 1000 --batch_size 1 --lr 1 --timestep_sampling logit_normal"),
    "a.json": (dict(training_method="LORA", learning_rate=1), "--target_pixels 512x512 --lora_rank 16 --lora_alpha 1 "
               "--lora_targets all-linear --batch_size 1 --lr 1 --warmup_steps 200 --timestep_sampling uniform"),
    "b.json": (dict(model_type="lora", learning_rate=1), "--lora_rank 16 --lora_targets to_q to_k to_v to_out.0 "
               "--batch_size 4 --lr 1"),
    "a.sh": ("train.py --dataset_base_path x --learning_rate 1", "--no-upscale --lora_rank 32 --batch_size 1 --lr 1"),
    "a.toml": ("max_train_steps = 9", "--lora_rank 4 --lora_alpha 1 --lora_targets attention net.0.proj net.2 "
               "--max_steps 9 --batch_size 1 --lr 2e-06 --timestep_sampling uniform"),
    "c.json": (dict(network_dim=8), "--lora_rank 8 --lora_alpha 1 --lora_targets attention net.0.proj net.2 "
               "--max_steps 1600 --batch_size 1 --lr 2e-06 --timestep_sampling uniform"),
    "b.toml": ("network_dim = 4", "--lora_rank 4 --lora_alpha 1 --lora_targets attention net.0.proj net.2 "
               "--max_steps 1600 --batch_size 1 --lr 2e-06 --timestep_sampling uniform")}

@pytest.mark.parametrize("name", OWN)
def test_a_silent_file_means_its_program_s_own_defaults(tmp_path, name):
    """And not train.py's."""
    text, want = OWN[name]
    result = run_script("tools/import_data.py", write(tmp_path / name, text), tmp_path / "out")
    assert commands(result)[1][4:] == want.split(), result.out

def test_masks_have_the_weights_that_they_have_there(tmp_path):
    """1 in the region and mask_min_value elsewhere; without masks there is nothing to weigh."""
    for n, mask in enumerate((None, "mask")):
        folder = tmp_path / str(n)
        for name in "abcd":
            save(Image.new("L", (64, 48)).point(lambda _: 0), folder / f"mask/{name}.png")
            with Image.open(folder / f"mask/{name}.png") as image:
                image.paste(255, (8, 8, 24, 24))
                image.save(folder / f"mask/{name}.png")
        _, train = imported(folder, process=dict(datasets=[dict(
            folder_path="after", control_path="before", mask_path=mask, mask_min_value=0.1)]))
        weights = [flag_in(train, f"--mask_{part}_weight") for part in ("foreground", "background")]
        assert weights == ([["1"], ["0.1"]] if mask else [None, None])
    text = dict(training_method="LORA", learning_rate=1, masked_training=True) # of OneTrainer, which has its own
    result = run_script("tools/import_data.py", write(tmp_path / "one.json", text), tmp_path / "one")
    assert flag_in(commands(result)[1], "--mask_background_weight") == ["0.1"]

def test_datasets_that_differ_are_a_line(tmp_path):
    """They are one here, so that each number of repeats has no dataset of its own. Sizes are collected."""
    dataset(tmp_path / "x")
    parts = [dict(folder_path=place + "after", control_path=place + "before", num_repeats=n, resolution=size)
             for place, n, size in (("", 1, 512), ("x/", 3, [512, 768]))]
    for n, second in enumerate((parts[1], {key: parts[1][key] for key in ("folder_path", "control_path")})):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        result, train = imported(tmp_path, process=dict(datasets=[parts[1 - n] if n == 0 else parts[1], second][::-1]
                                                        if n else parts))
        assert "--repeats" not in train and "several that differ" in result.out, result.out
        assert flag_in(train, "--target_pixels") == ["512x512", "768x768"]

def test_sample_prompts_become_jobs(tmp_path):
    """predict.py reads them, from any folder; the trigger word is in its place, and no such file is replaced."""
    picture = dict(prompt="[trigger] in snow", ctrl_img="before/a.png")
    sample = dict(samples=[picture, picture | dict(seed=7), dict(prompt="alone")], seed=42, walk_seed=True, width=640)
    result, _ = imported(tmp_path, sample=sample, process=dict(trigger_word="sks"))
    jobs, problems = read_dataset(tmp_path / "out_jobs.jsonl", is_job=True)
    assert not problems and "out_jobs.jsonl: 2 sample prompts" in result.out
    assert [(job.prompts, job.controls, job.job_fields) for job in jobs] == [
        (["sks in snow"], [str(tmp_path / "before/a.png")], dict(width=640, seed=seed, line=n + 1))
        for n, seed in enumerate((42, 7))]
    shutil.rmtree(tmp_path / "out")
    result = run_script("tools/import_data.py", tmp_path / "a.yaml", tmp_path / "out")
    assert result.status == 1 and is_one_line(result.errors[0], "out_jobs.jsonl") and not (tmp_path / "out").exists()

def test_settings_without_data_are_printed_and_the_error_says_how_to_import_it(tmp_path):
    """Data that is elsewhere, or that a file outside of the configuration's folder names; then there are no steps."""
    write(tmp_path / "other/dataset.toml", MUSUBI)
    for name, change in (("gone", "gone.toml"), ("outside", "../other/dataset.toml")):
        config = write(tmp_path / f"flags/{name}.toml", MUSUBI_FLAGS.replace("dataset.toml", change))
        result = run_script("tools/import_data.py", config, tmp_path / "out")
        assert result.status == 1 and not (tmp_path / "out").exists()
        assert is_one_line(result.errors[0], change.split("/")[-1], "--target DIR --control DIR"), result.errors
        assert flag_in(commands(result)[1], "--lora_rank") == ["16"] and "16 epochs are --max_steps 16 x" in result.out
    dataset(tmp_path)
    text = (tmp_path / "flags/gone.toml").read_text("utf-8") + MUSUBI.replace("after", "no_such_folder")
    result = run_script("tools/import_data.py", write(tmp_path / "both.toml", text), tmp_path / "out")
    assert result.status == 1 and is_one_line(result.errors[0], "no_such_folder") and commands(result)

def test_a_config_env_of_simpletuner_and_a_command_line_are_read_as_data(tmp_path):
    """No variable is filled in, and a flag that has one is a line; a list of folders finds the settings beside it."""
    dataset(tmp_path)
    write(tmp_path / "config/config.env", """export MODEL_TYPE='lora'
export LEARNING_RATE=1e-4
export MAX_NUM_STEPS=800 # in all
MODEL_NAME="$HOME/qwen-image-edit"
export TRAINER_EXTRA_ARGS="--lora_rank=64 --use_ema"
export SEED=$(touch hit)
""")
    write(tmp_path / "config/multidatabackend.json", BACKEND)
    result = run_script("tools/import_data.py", tmp_path / "config/multidatabackend.json", tmp_path / "out")
    train = commands(result)[1]
    got = {flag: flag_in(train, flag) for flag in ("--lr", "--max_steps", "--lora_rank", "--ema", "--seed")}
    assert list(got.values()) == [["0.0001"], ["800"], ["64"], ["0.995"], None], got
    assert "model_name = $HOME/qwen-image-edit" in result.out and "Qwen/Qwen-Image-Edit-2509" in train
    shell = write(tmp_path / "train.bat.sh", "accelerate launch --mixed_precision bf16 src/qwen_image_train_network.py "
                  "^\n --network_dim 8 ^\n --optimizer_args \"a=1\" \"b=(1,2)\" --learning_rate=3e-4 && echo done\n")
    result = run_script("tools/import_data.py", shell, tmp_path / "second")
    train = commands(result)[1]
    assert result.status == 1 and flag_in(train, "--optimizer_args") == ["a=1", "b=[1,2]"]
    assert flag_in(train, "--lora_rank") == ["8"] and flag_in(train, "--lr") == ["0.0003"]
    assert "dataset_base_path" not in result.out and "echo" not in result.out

TEXT = "a\x1b[2J\x07\u202e\nerror: planted"
HOSTILE = [TEXT, "-x", "--data", "$(touch hit)", "`hit`", "'; touch hit #", "x" * 10**4, [["a"] * 30] * 30,
           {"a": {"b": [1]}}, 1e308, float("inf"), float("nan"), -1, 10**40, True, [TEXT], ["--resume"], [None],
           "\ud800", "evil.Opt", 0]

@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: f"{value!r:.20}")
def test_a_strangers_value_stays_data(tmp_path, value):
    """Whatever a setting holds: each line is short and shown, the command is one, and train.py takes it."""
    process = yaml.load(yaml.dump(AITOOLKIT), yaml.SafeLoader)["config"]["process"][0]
    def spoiled(inner):
        if isinstance(inner, dict):
            return {key: spoiled(one) for key, one in inner.items()} | {f"k{TEXT}": value}
        return value
    spoil = {name: spoiled(process[name]) for name in ("network", "save", "train", "model")}
    data = process["datasets"][0] | dict(num_repeats=value, resolution=value, caption_dropout_rate=value)
    result, train = imported(tmp_path, process=spoil | dict(datasets=[data], sample=spoiled(dict(process["sample"]))))
    lines = result.out.splitlines()
    assert not any(map(CONTROLS.search, lines)) and not any(line.startswith("error") for line in lines)
    assert max(map(len, lines)) < 20_000 and not list(tmp_path.rglob("hit"))
    args = parsed(train, tmp_path)
    assert not args.resume and args.data == [str(tmp_path / "out")] and "evil" not in args.optimizer

def test_a_long_word_in_many_sample_prompts_costs_no_memory(tmp_path):
    """A prompt may name the trigger word a hundred thousand times."""
    samples = [dict(prompt="[name]" * n, ctrl_img="before/a.png") for n in (1500, 100_000)]
    dataset(tmp_path)
    sample = dict(samples=samples, width="9" * 300_000) # which each job would repeat
    text = dict(config=dict(process=[dict(trigger_word="x" * 900, sample=sample, datasets=[
        dict(folder_path="after", control_path="before")])]))
    result = run_script("tools/import_data.py", write(tmp_path / "a.yaml", text), tmp_path / "out")
    assert result.status == 0 and (tmp_path / "out_jobs.jsonl").stat().st_size < 200_000, result.err

def test_a_file_with_too_many_settings_is_one_line(tmp_path):
    """Each of them would be compared with each row of a table."""
    dataset(tmp_path)
    text = "".join(f"a{n} = 1\n" for n in range(6000)) + MUSUBI
    result = run_script("tools/import_data.py", write(tmp_path / "a.toml", text), tmp_path / "out")
    assert result.status == 1 and is_one_line(result.errors[0], "settings") and len(result.out) < 500

def test_an_import_without_settings_ends_with_the_doctors_command(tmp_path):
    """Of both folders that it has written."""
    dataset(tmp_path)
    result = run_script("tools/import_data.py", tmp_path / "out", "--target", tmp_path / "after", "--control",
                        tmp_path / "before", "--hold_out", 2)
    title, doctor = result.out.splitlines()[-2:]
    folders = [str(tmp_path / name) for name in ("out", "out_val")]
    assert title == "next:" and paste(doctor) == ["python", "tools/doctor.py", *folders]

def test_two_folders_of_pictures_are_answered_with_the_line_that_was_meant(tmp_path):
    """In either order; a folder that is there for another reason is not."""
    dataset(tmp_path)
    for order in ("before after", "after before"):
        error, = run_script("tools/import_data.py", *[tmp_path / name for name in order.split()]).errors
        meant = paste(error.split("give ")[1])
        assert is_one_line(error, "already exists")
        before, after = [str(tmp_path / name) for name in ("before", "after")]
        assert meant == ["import_data.py", "NEW", "--control", before, "--target", after]
    (tmp_path / "empty").mkdir()
    error, = run_script("tools/import_data.py", tmp_path / "before", tmp_path / "empty").errors
    assert "already" in error and "--control" not in error

def test_a_default_caption_is_the_prompt_of_targets_without_one(tmp_path):
    """--prompt comes before it."""
    dataset(tmp_path)
    (tmp_path / "after/a.txt").unlink()
    data = [dict(folder_path="after", control_path="before", default_caption="a house")]
    for name, flags, want in (("one", [], "a house"), ("two", ["--prompt", "so"], "so")):
        config = write(tmp_path / "a.yaml", dict(config=dict(process=[dict(datasets=data)])))
        result = run_script("tools/import_data.py", config, tmp_path / name, *flags)
        samples, _ = read_dataset(tmp_path / name)
        assert result.status == 0 and [s.prompts for s in samples] == [[want], *[["make it snow"]] * 3], result.err
