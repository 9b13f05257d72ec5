"""
What the settings of another trainer mean here: the line of train.py, with their values, and lines for all that has no
counterpart. tools/import_configs.py reads the files, tools/import_data.py prints these lines.

A row of a table is KEYS: ANSWER; indented lines continue it. A * in a key stands for any letters. An answer in one word
is a sentence of WORDS, a flag of train.py, FLAG=VALUE for a switch that means this whatever else is set, or what
`finish` makes flags of, such as batch, accumulation and epochs; other answers are printed. KEY=VALUE|VALUE: with these
values nothing is lost. The names and defaults are those of the programs, in October 2025 to August 2026: ai-toolkit's
toolkit/config_modules.py and ui/.../jobConfig.ts, musubi-tuner's training/parser_common.py and docs/dataset_config.md,
sd-scripts' library/train_util.py and docs/config_README-en.md, OneTrainer's modules/util/config/, SimpleTuner's
documentation/ (OPTIONS.md, DATALOADER.md, quickstart/QWEN_EDIT.md) and helpers/configuration/env_file.py,
DiffSynth-Studio's diffsynth/diffusion/parsers.py.
"""
import json
import math
import re
import shlex
from collections import defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import common
from common import CONTROLS
from library.cli import flag_types
from library.data.dataset import as_list

WORDS = dict(
    auto="automatic here, or of no effect on the result",
    names="names, places and logs are train.py's own; see --out_dir, --cache_dir, --tracker",
    plain="no counterpart, pictures and captions are trained as they are",
    network="no counterpart, only a LoRA of the transformer is trained",
    loss="no counterpart, the loss is flow_loss in train.py",
    noise="no counterpart, --timestep_sampling chooses, or pick_timestep in train.py",
    own="not needed, it is --model's",
    memory="not needed, what fits is found out; --offload, --quantize and --max_tokens save memory",
    video="not needed for pictures", data="read with the pictures")

# rows that several programs share, as they have the same flags
FLAGS = """
learning_rate: lr
lora_rank: lora_rank
lora_alpha: lora_alpha
lr_scheduler: lr_scheduler
lr_warmup_steps: warmup
max_grad_norm: max_grad_norm
seed: seed
gradient_accumulation_steps: accumulation
num_processes training_num_processes: processes
max_train_steps max_num_steps: max_steps
gradient_checkpointing* use_gradient_checkpointing*: memory
mixed_precision dataloader_* persistent_data_loader_workers max_data_loader_n_workers: auto
output_dir output_name output_path logging_dir log_* wandb_* tracker_* hub_* push_* huggingface_* config_file
    num_machines machine_rank main_process_* num_cpu_threads_per_process accelerate_* *_token *api_key: names
report_to log_with: tracker
"""

TABLES = dict(
    aitoolkit="""
mask_path alpha_mask: use_mask_background_weight
folder_path caption_ext caption_type trigger_word invert_mask default_caption
    control_path control_path[0-9] control_path_[0-9]: data
network.linear network.rank: lora_rank
network.linear_alpha network.alpha: lora_alpha
network.dropout: lora_dropout
network.type=lora: network
network.network_kwargs*: no counterpart, --lora_targets names the layers
network.pretrained_lora_path: pretrained_lora
network.conv* network.lokr_* network.old_lokr_format network.split_multistage_loras network.transformer_only
    network.all_layers network.layer_offloading: auto
save.save_every: save_every
save.max_step_saves_to_keep: keep
job name type meta.* training_folder sqlite_db_path device performance_log_every save.* logging.*: names
resolution: target_pixels
caption_dropout_rate caption_dropout: caption_dropout_rate
num_repeats: repeats
mask_min_value: mask_background_weight
control_transparent_color=255,255,255: no counterpart, what is transparent becomes white
controls control_from_same_folder num_controls_from_same_folder inpaint_path unconditional_path clip_image_*
    dataset_path: no counterpart, pictures must lie in folders of their own
cache_* load_image_when_caching_latents num_workers prefetch_factor persistent_workers gpu_prefetch_batches
    fast_image_size debug buckets bucket_tolerance full_size_control_images replay_transforms: auto
loss_multiplier=1|1.0 network_weight=1|1.0: loss
datasets.type=image num_frames=1 shrink_video_to_frames auto_frame_count trim_auto_frame_count_tail fps do_i2v
    do_audio audio_*: video
flip_x flip_y: no counterpart, changes/mirror.diff mirrors pairs
random_crop random_scale square_crop augments augmentations* shuffle_* is_reg prior_reg *token_dropout_rate
    keep_tokens random_triggers* replacements use_short_captions standardize_images scale=1|1.0: plain
train.steps: max_steps
train.lr: lr
train.unet_lr: lr
train.batch_size datasets.batch_size: batch
train.gradient_accumulation train.gradient_accumulation_steps: accumulation
train.optimizer: optimizer
train.optimizer_params.weight_decay: weight_decay
train.optimizer_params*: optimizer_args
train.lr_scheduler: lr_scheduler
train.lr_scheduler_params.warmup_steps train.lr_scheduler_params.num_warmup_steps: warmup
train.max_grad_norm: max_grad_norm
train.timestep_type: timestep_sampling
train.ema_config.use_ema: use_ema
train.ema_config.ema_decay: ema
train.prompt_dropout_prob: caption_dropout_rate
train.content_or_style=balanced train.min_denoising_steps train.max_denoising_steps=999|1000: noise
train.noise_scheduler=flowmatch sample.sampler=flowmatch: noise
train.train_unet=True train.train_text_encoder train.*_lr train.train_refiner=True: network
train.dtype model.dtype model.vae_dtype model.te_dtype train.bypass_guidance_embedding train.cache_text_embeddings
    train.unload_text_encoder train.sdp train.xformers train.attention_backend train.skip_first_sample
    train.force_first_sample train.switch_boundary_every=1 train.diff_output_preservation_multiplier=1
    train.diff_output_preservation_class model.compile_* model.block_compile model.attn_masking: auto
train.gradient_checkpointing model.low_vram model.auto_memory model.*_offloading_text_encoder_percent: memory
train.diff_output_preservation train.blank_prompt_preservation: no counterpart, --preserve 0.1 is the nearest
train.loss_type=mse train.*loss* train.snr_gamma train.min_snr_gamma train.inverted_mask_prior*: loss
train.disable_sampling: not needed, --sample_every 0 draws at the end alone
model.name_or_path: model
model.arch model.is_* model.extras_name_or_path model.model_kwargs* model.vae_path model.te_name_or_path: own
model.quantize: use_quantize
model.qtype: quantize
model.quantize_te: use_quantize_text_encoder
model.qtype_te: quantize_text_encoder
model.layer_offloading: use_offload_share
model.layer_offloading_transformer_percent: offload_share
model.compile: compile
model.assistant_lora_path: no counterpart, tools/convert_lora.py --to model merges a LoRA
sample.sample_every: sample_every
sample.sample_steps: num_inference_steps
sample.guidance_scale: true_cfg_scale
sample.neg: negative_prompt
sample.samples.network_multiplier=1|1.0 sample.network_multiplier=1|1.0: no counterpart, give --lora_scale to predict.py
sample.samples* sample.prompts sample.seed sample.width sample.height sample.walk_seed: jobs
sample.sample_start_step sample.format sample.fps sample.num_frames: auto""",
    kohya=FLAGS + """
image_directory control_directory image_jsonl_file multiple_target image_dir conditioning_data_dir caption_extension
    caption_extention dataset_config: data
train_data_dir reg_data_dir in_json: no counterpart, name the folders; import_data.py OUT --target DIR --control DIR
resolution: size
control_resolution qwen_image_edit_control_resolution: control_size
no_resize_control qwen_image_edit_no_resize_control: native
num_repeats dataset_repeats: repeats
bucket_no_upscale: no-upscale
batch_size train_batch_size: batch
caption_dropout_rate: caption_dropout_rate
enable_bucket *_bucket_reso bucket_reso_steps cache_* vae_cache_cpu skip_cache_check debug_dataset: auto
flip_aug: no counterpart, changes/mirror.diff mirrors pairs
color_aug random_crop face_crop_aug_range shuffle_caption keep_tokens* caption_prefix caption_suffix *_separator
    enable_wildcard resize_interpolation caption_tag_dropout_rate caption_dropout_every_n_epochs
    class_tokens is_reg: plain
target_frames max_frames frame_* source_fps video_* fp_*: video
model_version: model
dit transformer: transformer
pretrained_model_name_or_path: model
vae* text_encoder text_encoder_dtype dit_dtype edit edit_plus v2 v_parameterization clip_l t5xxl ae: own
network_dim: lora_rank
network_alpha: lora_alpha
network_dropout: lora_dropout
network_weights: pretrained_lora
network_args: no counterpart, --lora_targets and --lora_args choose layers and ranks
network_module=networks.lora|networks.lora_qwen_image text_encoder_lr dim_from_weights: network
unet_lr: lr
base_weights*: no counterpart, tools/convert_lora.py --to model merges a LoRA
max_train_epochs: epochs
optimizer_type: optimizer
optimizer_args: optimizer_args
lr_decay_steps lr_scheduler_*: no counterpart, a schedule ends with --max_steps
timestep_sampling: timestep_sampling
discrete_flow_shift=1|1.0 sigmoid_scale=1|1.0 weighting_scheme logit_* mode_scale min_timestep max_timestep
    num_timestep_buckets preserve_distribution_shape guidance_scale=1|1.0 noise_offset*: noise
loss_type=l2 huber_* min_snr_gamma prior_loss_weight=1|1.0 masked_loss alpha_mask scale_weight_norms
    model_prediction_type=raw: loss
fp8_base fp8_scaled: use_quantize
fp8_vl: use_quantize_text_encoder
blocks_to_swap: offload
use_pinned_memory_for_block_swap block_swap_* img_in_txt_in_offloading disable_numpy_memmap lowram highvram: memory
compile torch_compile: compile
compile_* dynamo_* cuda_* sdpa xformers mem_eff_attn flash_attn flash3 sage_attn split_attn full_bf16 full_fp16
    ddp_* clip_skip max_token_length num_layers show_timesteps network_train_unet_only: auto
save_every_n_steps: save_every
save_every_n_epochs: save_epochs
save_last_n_*: no counterpart, --keep counts checkpoints
save_precision save_model_as save_state* no_metadata metadata_* training_comment resume: names
sample_every_n_steps: sample_every
sample_every_n_epochs: sample_epochs
sample_at_first: auto
sample_prompts: no counterpart, write them as lines of a jobs.jsonl for predict.py --jobs""",
    onetrainer="""
concepts.path path concept_file_name concepts.enabled concepts.type=STANDARD: data
concepts.balancing: repeats
concepts.balancing_strategy=REPEATS concepts.loss_weight=1.0|1: plain
concepts.name concepts.seed concepts.concept_stats* concepts.include_subdirectories concepts.text.prompt_source
    concepts.text.tag_delimiter concepts.text.keep_tags_count concepts.*_variations=1: auto
concepts.*: plain
training_method=LORA peft_type=LORA transformer.train=True text_encoder.train lora_decompose: network
model_type output_model_format __version: own
base_model_name: model
transformer.model_name: transformer
lora_model_name: pretrained_lora
lora_rank: lora_rank
lora_alpha: lora_alpha
layer_filter: lora_targets
layer_filter_preset layer_filter_regex quantization.*: auto
dropout_probability: lora_dropout
text_encoder.dropout_probability: caption_dropout_rate
transformer.weight_dtype: quantize
text_encoder.weight_dtype: quantize_text_encoder
transformer.offload_fraction layer_offload_fraction: offload_share
lora_* bundle_additional_embeddings oft_* lokr_* transformer.* text_encoder* vae.* unet.* prior.*
    unconditional_transformer.* effnet_encoder.* decoder* embedding* additional_embeddings* preserve_*: auto
resolution: target_pixels
batch_size: batch
gradient_accumulation_steps: accumulation
learning_rate: lr
learning_rate_scheduler: lr_scheduler
learning_rate_warmup_steps: warmup
learning_rate_cycles=1|1.0 learning_rate_* custom_learning_rate_scheduler scheduler_params:
    no counterpart, a schedule ends with --max_steps
epochs: epochs
clip_grad_norm: max_grad_norm
optimizer.optimizer: optimizer
optimizer.weight_decay: weight_decay
optimizer.adam_w_mode optimizer.fused* optimizer.foreach optimizer.stochastic_rounding: auto
optimizer.beta1=0.9 optimizer.beta2=0.999: no counterpart, give both as --optimizer_args betas=[0.9,0.99]
optimizer.eps=1e-08 optimizer.* optimizer_defaults*: no counterpart, give it as --optimizer_args KEY=VALUE
ema: use_ema
ema_decay: ema
ema_update_step_interval: auto
timestep_distribution: timestep_sampling
dynamic_timestep_shifting: timestep_sampling=qwen_shift
timestep_shift=1.0|1 noising_* min_noising_strength max_noising_strength=1.0|1 offset_noise_weight
    perturbation_noise_weight: noise
mse_strength=1.0|1 mae_strength log_cosh_strength huber_* vb_loss_strength=1.0|1 loss_weight_*=CONSTANT loss_scaler
    generalized_offset_noise force_* rescale_noise_*: loss
masked_training: use_mask_background_weight
normalize_masked_area_loss unmasked_probability custom_conditioning_image: auto
unmasked_weight: mask_background_weight
masked_prior_preservation_weight: no counterpart, --preserve 0.1 is the nearest
gradient_checkpointing enable_activation_offloading enable_async_offloading async_offloading train_device temp_device
    train_dtype fallback_train_dtype weight_dtype enable_autocast_cache attention_mechanism latent_caching
    clear_cache_before_training aspect_ratio_bucketing only_cache dataloader_threads multi_gpu device_indexes
    gradient_reduce_precision *_gradient_reduce* output_dtype force_circular_padding frames: auto
compile: compile
save_every: save_every
sample_after: sample_every
rolling_backup_count: keep
save_* sample_* samples_* non_ema_sampling backup_* rolling_backup continue_last_backup prevent_overwrites
    include_train_config debug_* workspace_dir cache_dir huggingface_cache_dir offline_mode tensorboard* validation*
    validate_* output_model_destination cloud* secrets*: names
samples*: no counterpart, write them as lines of a jobs.jsonl for predict.py --jobs""",
    simpletuner=FLAGS + """
instance_data_* conditioning_data id conditioning.id type dataset_type conditioning.dataset_type disabled disable
    conditioning.type conditioning.instance_data_* conditioning_type conditioning.conditioning_type source_dataset_id
    conditioning.source_dataset_id caption_strategy instance_prompt only_instance_prompt prepend_instance_prompt
    disable_multiline_split data_backend_config dataloader_config: data
resolution: target_pixels
conditioning.resolution: control_pixels
resolution_type=pixel_area|area conditioning.resolution_type=pixel_area|area: no counterpart, an area is meant
repeats: more_repeats
train_batch_size: batch
num_train_epochs num_epochs: epochs
caption_dropout_probability: caption_dropout_rate
crop conditioning.crop *minimum_image_size *maximum_image_size *minimum_aspect_ratio *maximum_aspect_ratio
    target_downsample_size start_epoch=1: plain
probability=1|1.0: no counterpart, --repeats gives datasets a weight
cache_* conditioning.cache_* *metadata_* *hash_filenames text_embeds image_embeds conditioning_image_embeds
    *skip_file_discovery *preserve_data_backend_cache *vae_cache_* *crop_style *crop_aspect*
    *write_batch_size *read_batch_size vae_batch_size text_encoder_batch_size compress_disk_cache
    aspect_bucket_* disable_bucket_pruning disable_benchmark strict_epoch_limit num_eval_images allow_tf32
    attention_mechanism quantize_via quantize_activations image_processing_batch_size torch_num_threads: auto
model_type=lora lora_type=standard lora_format lycoris_config use_dora: network
model_family=qwen_image model_kwargs*: own
model_flavour pretrained_model_name_or_path model_name: model
pretrained_transformer_model_name_or_path: transformer
pretrained_* qwen_text_encoder_model_name_or_path: own
init_lora: pretrained_lora
flux_lora_target peft_lora_target_modules: no counterpart, --lora_targets names the layers
lora_dropout: lora_dropout
lr_schedule: lr_scheduler
lr_*: no counterpart, a schedule ends with --max_steps
optimizer: optimizer
optimizer_config: optimizer_args
optimizer_*: no counterpart, give it as --optimizer_args KEY=VALUE
adam_weight_decay weight_decay: weight_decay
training_seed: seed
use_ema: use_ema
ema_decay: ema
ema_*: auto
flow_schedule_auto_shift: timestep_sampling=qwen_shift
flow_use_uniform_schedule: timestep_sampling=uniform
flow_schedule_shift: noise
flow_* snr_gamma: noise
base_model_precision: quantize
text_encoder_[1-4]_precision: quantize_text_encoder
musubi_blocks_to_swap: offload
enable_group_offload enable_model_cpu_offload: offload=all
use_gradient_checkpointing group_offload_* offload_*: memory
checkpoint_step_interval checkpointing_steps checkpoint_steps: save_every
checkpoint_epoch_interval: save_epochs
checkpoints_total_limit checkpointing_limit: keep
validation_step_interval validation_steps: sample_every
validation_epoch_interval: sample_epochs
validation_num_inference_steps: num_inference_steps
validation_guidance validation_guidance_real: true_cfg_scale
validation_negative_prompt: negative_prompt
validation_prompt* user_prompt_library: no counterpart, --val_data has pairs with their prompts
validation_* eval_*: auto
resume_from_checkpoint resume_checkpoint model_card_* publishing_config webhook_*: names""",
    diffsynth=FLAGS + """
dataset_base_path dataset_metadata_path data_file_keys extra_inputs: data
max_pixels: target_pixels
height width: no counterpart, pictures keep their shapes; --target_pixels is the area
dataset_repeat: repeats
num_epochs: epochs
weight_decay: weight_decay
customized_optimizer: optimizer
model_id_with_origin_paths: model
model_paths tokenizer_path processor_path remove_prefix_in_ckpt zero_cond_t initialize_model_on_cpu: own
lora_base_model=dit trainable_models task=sft: network
lora_target_modules: lora_targets
lora_checkpoint: pretrained_lora
preset_lora_*: no counterpart, tools/convert_lora.py --to model merges a LoRA
fp8_models: use_quantize
quant_options: no counterpart, give --quantize nf4, int8 or fp8
enable_model_cpu_offload: offload=all
enable_optimizer_cpu_offload cpu_offload_split_threshold offload_models find_unused_parameters
    dataset_num_workers num_frames: auto
save_steps: save_every
resume_from_checkpoint enable_* swanlab_*: names""")

# what a program takes where its file is silent, and train.py takes something else: PROGRAM KEY: VALUE
DEFAULTS = """
aitoolkit.network.linear: 4
aitoolkit.network.alpha: 1
aitoolkit.train.lr: 1e-6
aitoolkit.train.steps: 1000
aitoolkit.train.batch_size: 1
aitoolkit.train.timestep_type: sigmoid
aitoolkit.lora_targets: all-linear
aitoolkit.no-upscale: true
kohya.network_dim: 4
kohya.network_alpha: 1
kohya.learning_rate: 2e-6
kohya.max_train_steps: 1600
kohya.batch_size: 1
kohya.timestep_sampling: sigma
kohya.lora_targets: attention,net.0.proj,net.2
onetrainer.lora_rank: 16
onetrainer.lora_alpha: 1
onetrainer.batch_size: 1
onetrainer.epochs: 100
onetrainer.learning_rate: 3e-6
onetrainer.learning_rate_warmup_steps: 200
onetrainer.resolution: 512
onetrainer.timestep_distribution: UNIFORM
onetrainer.layer_filter: full
onetrainer.unmasked_weight: 0.1
simpletuner.lora_rank: 16
simpletuner.train_batch_size: 4
simpletuner.ema_decay: 0.995
simpletuner.lora_targets: to_q,to_k,to_v,to_out.0
diffsynth.lora_rank: 32
diffsynth.num_epochs: 1
diffsynth.batch: 1
diffsynth.no-upscale: true"""

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
# their words for values, beside those
CHOICES = VALUES | dict(
    native="true: native",
    model="""
edit editv1: Qwen/Qwen-Image-Edit
edit2509 editv2: Qwen/Qwen-Image-Edit-2509
edit2511 editv3: Qwen/Qwen-Image-Edit-2511""",
    tracker="""
tensorboard: tensorboard
wandb all: wandb""")

MOST_REPEATS = 10_000
COUNTED = "repeats batch_size max_steps save_every sample_every warmup_steps".split()
KINDS = { # train.py's type of a number; a 0 of the first ones is none
    flag_types.positive: "max_steps save_every keep epochs save_epochs batch accumulation processes",
    flag_types.number(int, 1, flag_types.MOST_RANK): "lora_rank", flag_types.number(int, 1, MOST_REPEATS): "repeats",
    flag_types.natural: "offload sample_every sample_epochs more_repeats",
    **{flag_types.SAMPLE_FLAGS[name][0]: name for name in ("num_inference_steps", "true_cfg_scale")},
    flag_types.number(float, 1e-6, flag_types.MOST_ALPHA): "lora_alpha",
    flag_types.number(float, 0, 0.99): "lora_dropout", flag_types.number(float, 0, 0.99999): "ema",
    flag_types.not_negative: "lr weight_decay warmup max_grad_norm mask_background_weight",
    flag_types.fraction: "caption_dropout_rate offload_share", flag_types.seed_number: "seed"}
BLOCKS = 60 # of Qwen-Image-Edit's transformer
OFF = "none off no never no_change false [] {}".split() + [""] # null is None
ORDER = """target_pixels control_pixels no-upscale repeats caption_dropout_rate mask_foreground_weight
    mask_background_weight lora_rank lora_alpha lora_dropout lora_targets pretrained_lora max_steps batch_size optimizer
    optimizer_args lr lr_scheduler warmup_steps weight_decay max_grad_norm ema timestep_sampling transformer quantize
    quantize_text_encoder offload compile seed sample_every num_inference_steps true_cfg_scale negative_prompt
    save_every keep tracker""".split()

@dataclass
class Settings:
    """What a configuration says beside which pictures there are."""
    file: Path
    program: str # a name in TABLES
    values: dict # {key, with dots: [a value for each dataset that has it]}
    datasets: int = 1
    jobs: list = field(default_factory=list) # sample prompts, as rows of jobs.jsonl
    no_data: str = "" # why its pictures are not found, if they are not

# ---- files -> {key: [values]} ----------------------------------------------------------------------------------------

def flatten(value, key=""):
    """Yields (key with dots, value). Of a list of objects each one counts, so a key may come several times."""
    if isinstance(value, dict) and (value or not key):
        for name, inner in value.items():
            yield from flatten(inner, f"{key}.{name}".strip("-.")[:200])
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        for one in value:
            yield from flatten(one, key)
    else:
        yield key, {"true": True, "false": False}.get(str(value).lower(), value)

def collect(configs):
    """-> {key: [its values]} of these dictionaries. ValueError for more settings than a program has."""
    values = {}
    for config in configs:
        for key, value in flatten(config):
            values.setdefault(key, []).append(value)
    if len(values) > 5000:
        raise ValueError(f"{len(values):,} settings")
    return values

def read_shell(text):
    """A script with `accelerate launch train.py --flag value ...`, or lines of NAME=value -> {flag or name in small
    letters: value}. Nothing is run, and no variable is filled in."""
    found = {}
    for line in re.sub(r"[\\^`]\r?\n", " ", text).splitlines():
        flag = None
        if not re.search(r"^--|\.py\b|\blaunch\b|^(export )?\w+=", line): # a download
            continue
        for word in shlex.split(line, comments=True):
            if word.startswith("--"):
                flag, _, word = word[2:].partition("=")
                found[flag] = word or found.get(flag) or True
            elif flag and word in ("&&", "||", "|", ";", "&"):
                flag = None
            elif flag and not word.endswith(".py"):
                found[flag] = word if found[flag] is True else [*as_list(found[flag]), word]
            elif "=" in word:
                name, _, word = word.partition("=")
                found |= read_shell(word) if word.startswith("--") else {name.lower(): word}
    return found

# ---- one value -------------------------------------------------------------------------------------------------------

def answer_to(rows, key):
    """-> (answer, usual values) of the first of these rows that fits; (None, []) if none does."""
    for name in (key, key.removeprefix("datasets.")):
        for pattern, usual, answer in rows:
            if fnmatchcase(name, pattern):
                return answer, usual
    return None, []

def is_off(value, usual):
    """Whether a value switches nothing on, or is one that changes nothing here."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.lower() in OFF or text in usual

def only_name(value):
    """ValueError unless it is a text that means in a command what it means in a file, and is no flag."""
    strange = value.startswith("-") or CONTROLS.search(value) or "$" in value or "<|" in value
    if len(value) > 300 or strange:
        raise ValueError("is no name")
    return flag_types.only_text(value)

def numeral(value):
    """A number as the type of a flag reads it: 2000.0 -> "2000"."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)

def areas(value, is_pair=False):
    """512, "512,768" or [512, 768] -> areas of train.py. is_pair: two numbers are a width and a height."""
    parts = value if isinstance(value, list) else str(value).split(",")
    parts = [numeral(part).strip() for part in parts]
    if is_pair and len(parts) > 1:
        parts = ["x".join(parts)]
    return list(map(area, parts))

def area(text):
    """960x544, a side, megapixels (up to 16) or pixels (above 4096) -> an area of train.py."""
    if "x" not in text and float(text) <= 16: # SimpleTuner's
        text = str(round(float(text) * 10**6))
    elif "x" not in text and float(text) <= 4096:
        text = f"{text}x{text}"
    flag_types.pixels(text) # fails for what is none
    return text

def low_bits(value):
    """A name with a number of bits -> what --quantize calls it."""
    name = flag_types.only_text(value).lower()
    bits = int(re.search(r"\d+", name)[0])
    if bits > 8:
        return "none"
    if bits < 8:
        near = "nf4; the nearest. int8 and fp8 err less: README has the flags of each card"
        return "nf4" if "nf4" in name or "nfloat" in name else near
    return "fp8" if "f" in name else "int8"

def model(value):
    """The name of a Qwen-Image-Edit; in DiffSynth-Studio's list of files the first one."""
    name = only_name(value).split(":transformer")[0].split(",")[-1]
    if "qwenimageedit" not in re.sub("[-_ ]", "", name.lower()):
        raise ValueError("is another model")
    return name

def layers(value):
    """Names of layers, also OneTrainer's parts of names -> those of --lora_targets."""
    known = dict(attn="attention", img_mlp="net.0.proj net.2", txt_mlp="", transformer_block="all-linear",
                 full="all-linear")
    names = " ".join(known.get(name, name) for name in only_name(value).split(",")).split()
    if not all(re.fullmatch(r"[\w.-]+", name) for name in names):
        raise ValueError("are no layers")
    return names

def optimizer_args(key, value):
    """A value of ai-toolkit's optimizer_params, or KEY=VALUE, ... of the others -> words for --optimizer_args."""
    if "optimizer_params." in key:
        pairs = [f"{key.split('.')[-1]}={json.dumps(value)}"]
    else:
        pairs = value if isinstance(value, list) else re.split(r",\s*(?=\w+=)", value)
    pairs = [only_name(pair).replace("(", "[").replace(")", "]").replace(" ", "") for pair in pairs]
    if "lr" in [flag_types.key_value(pair)[0] for pair in pairs]: # train.py refuses it
        raise ValueError("--lr is its place")
    return pairs

NUMBERS = {name: kind for kind, names in KINDS.items() for name in names.split()}
WAYS = dict(target_pixels=areas, control_pixels=areas, size=partial(areas, is_pair=True),
            control_size=partial(areas, is_pair=True), model=model, lora_targets=layers, quantize=low_bits,
            quantize_text_encoder=low_bits, transformer=only_name, pretrained_lora=only_name, negative_prompt=only_name)
SAME = dict(size="target_pixels", control_size="control_pixels", native="control_pixels") # flags of these meanings
# what use_ema, ... switch on, and its value where nothing else says one
SWITCHES = dict(mask_background_weight=0, ema=0.999, quantize="fp8", quantize_text_encoder="fp8", offload_share=1)

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


def choose(meaning, value):
    """A word of CHOICES, or of another form if the meaning has one."""
    name = re.sub("[^a-z0-9]", "", str(value).split(".")[-1].lower())
    found = answers(CHOICES[meaning], name)
    return found[0] if found or meaning not in WAYS else WAYS[meaning](value)

def convert(meaning, key, values):
    """Values of theirs, of one key -> ours: a number, a text that may end in "; " and what is not the same, or a list
    of words. Any exception if there is none, or if there are several."""
    if meaning in NUMBERS:
        values = map(numeral, values)
    way = NUMBERS.get(meaning) or WAYS.get(meaning, bool)
    if meaning == "optimizer_args":
        way = partial(optimizer_args, key)
    if meaning in CHOICES:
        way = partial(choose, meaning)
    made = list(map(way, values))
    if isinstance(made[0], list):
        made = [list(dict.fromkeys(sum(made, [])))]
    if any(one != made[0] for one in made) or meaning.startswith("control_") and len(made[0]) > 1:
        raise ValueError("differs")
    return made[0]

# ---- all of them -----------------------------------------------------------------------------------------------------

NOTHING = "off or empty there, or as it is here"
HARMLESS = [NOTHING, *[WORDS[name] for name in ("auto", "names", "own", "memory", "video")]]

def find_meaning(settings, rows, key, values):
    """-> (a meaning, those of the values that switch something on), or (a sentence that answers the key, [])."""
    answer, usual = answer_to(rows, key)
    unit = settings.values.get(f"{key}_unit", ["STEP"])[0] # OneTrainer's
    if unit == "EPOCH":
        answer = dict(save_every="save_epochs", sample_every="sample_epochs").get(answer, answer)
    if answer is None:
        return "unknown to this script, look at train.py -h", []
    on = [value for value in values if not is_off(value, usual)]
    if "repeats" in answer and len(on) < settings.datasets:
        on.append(answer == "repeats") # a dataset without counts once
    if NUMBERS.get(answer) in (None, flag_types.positive): # a 0 is none
        on = [value for value in on if value]
    if answer == "data" or answer == "jobs" and settings.jobs:
        return answer, []
    if not on or unit == "NEVER":
        return NOTHING, []
    if answer == "jobs":
        return "no counterpart without pictures; write prompts and pictures as a jobs.jsonl for predict.py --jobs", []
    if unit not in ("STEP", "EPOCH"):
        return "no counterpart, train.py counts steps", []
    return WORDS.get(answer, answer), on

def is_training(facts):
    """Whether there is more than a dataset's settings."""
    return not {"lora_rank", "lr", "max_steps", "epochs"}.isdisjoint(facts)

def translate(settings):
    """-> ({meaning: value of ours}, {answer: ["key = value of theirs", ...]} of all that has none)."""
    rows = list(read_table(TABLES[settings.program]))
    facts, said, answers = {}, {}, defaultdict(list)

    def take(meaning, key, values, text):
        name, _, fixed = SAME.get(meaning, meaning).partition("=")
        if fixed:
            facts[name] = said[name] = fixed
            return ""
        before = said.setdefault(name, text).split(" = ")[0]
        try:
            ours = convert(meaning, key, values)
        except Exception: # a foreign file can have any value
            return "no counterpart for this value, or several that differ; see train.py -h"
        if isinstance(ours, str) and name in CHOICES | WAYS:
            ours, _, change = ours.partition("; ")
            if change:
                answers[f"here --{name} {ours}; {change}"].append(text)
        if name == "optimizer_args":
            ours = facts.get(name, []) + ours
        elif name in facts:
            return f"{before} comes first" if ours != facts[name] else NOTHING
        facts[name] = ours
        return ""
    for key, values in settings.values.items():
        meaning, on = find_meaning(settings, rows, key, values)
        text = f"{key} = {', '.join(dict.fromkeys(map(str, values))):.80}"
        answer = take(meaning, key, on, text) if on and " " not in meaning else meaning
        if " " in answer: # one word says that something else reads it
            answers[answer].append(text)
    for name, _, value in read_table(DEFAULTS) if is_training(facts) else ():
        program, _, key = name.partition(".")
        meaning = answer_to(rows, key)[0] or key
        counted = meaning == "max_steps" and "epochs" in facts
        if program == settings.program and SAME.get(meaning, meaning) not in said and not counted:
            take(meaning, key, [value], f"{key} = {value}")
            if meaning not in SWITCHES: # it may be switched off
                answers["not in the file, so its program's default"].append(f"{key} = {value}")
    # without a size of their own, musubi-tuner's controls have the target's
    if "datasets.control_directory" in settings.values and len(facts.get("target_pixels", [])) == 1:
        facts.setdefault("control_pixels", facts["target_pixels"])
    for name, default in SWITCHES.items():
        if facts.pop(f"use_{name}", False):
            facts.setdefault(name, default)
        elif any(answer == f"use_{name}" for _, _, answer in rows) and facts.pop(name, None) is not None:
            if said[name].split(" = ")[0] in settings.values: # no default
                answers[NOTHING].append(said[name])
    return facts, answers

def finish(facts, count, held_out):
    """What depends on several settings, or on the data -> ({flag of train.py: value}, lines). count: of the samples
    that are trained, 0 if it is not known; held_out: whether there are others."""
    flags, lines = dict(facts), []
    batch = math.prod(flags.pop(name, 1) for name in ("batch", "accumulation", "processes"))
    if not {"batch", "accumulation"}.isdisjoint(facts):
        flags["batch_size"] = batch
    if "more_repeats" in facts:
        flags["repeats"] = facts["more_repeats"] + 1
    if flags.get("repeats") == 1:
        del flags["repeats"]
    epoch = math.ceil(count * flags.get("repeats", 1) / batch) # in steps
    for name, flag in dict(epochs="max_steps", save_epochs="save_every", sample_epochs="sample_every").items():
        if name in facts and epoch:
            flags[flag] = facts[name] * epoch
            lines.append(f"{facts[name]} epochs of {epoch} steps, each of {batch} samples, are --{flag} {flags[flag]}")
        elif name in facts:
            lines.append(f"{facts[name]} epochs are --{flag} {facts[name]} x samples x repeats / {batch}; add it")
    if "warmup" in facts:
        steps = facts["warmup"]
        if steps < 1: # a share
            steps *= flags.get("max_steps", 2000)
        flags["warmup_steps"] = round(steps)
    if facts.get("max_grad_norm") == 0:
        flags["max_grad_norm"] = "inf"
    if "mask_background_weight" in facts:
        flags["mask_foreground_weight"] = 1 # there the region has 1, and the rest has less
    if "offload_share" in facts:
        flags["offload"] = "all" if facts["offload_share"] == 1 else round(BLOCKS * facts["offload_share"])
    if "AdamW" not in facts.get("optimizer", "AdamW") and "weight_decay" not in str(facts.get("optimizer_args")):
        flags.setdefault("weight_decay", 0) # their own default; train.py's is AdamW's
    if "pretrained_lora" in facts:
        for name in ("lora_rank", "lora_alpha", "lora_targets"):
            flags.pop(name, None)
        lines.append("--pretrained_lora has its own rank, alpha and layers")
    if "sample_every" in flags and not held_out:
        lines.append(f"--sample_every {flags.pop('sample_every')} needs pairs that are not trained: import with "
                     "--hold_out 10, then add it")
    for name in COUNTED: # products of numbers that may each be taken
        if flags.get(name, 0) > (MOST_REPEATS if name == "repeats" else 10**9):
            lines.append(f"--{name} {flags.pop(name)} is more than train.py takes; look at train.py -h")
    return flags, lines

def words_of(flags, names):
    """{flag: value} -> words of a command, of these flags in their order."""
    words = []
    for name in names:
        value = flags.get(name)
        if value is True:
            words.append(f"--{name}")
        elif value:
            words += [f"--{name}", *(value if isinstance(value, list) else [numeral(value)])]
        elif value == 0:
            words += [f"--{name}", "0"]
    return words

def next_commands(settings, out, val, count):
    """-> lines: what became of each setting, and the commands that come next. settings: or None, of data without; val:
    the folder of the samples that are held out, or None; count: of the others, 0 if it is not known."""
    folders = [out, val] if val else [out]
    if not settings:
        return ["next:", f"  {common.shell_command(['python', 'tools/doctor.py', *folders])}"]
    facts, answers = translate(settings)
    flags, notes = finish(facts, count, bool(val))
    lines = [f"{settings.file.name}: {note}" for note in notes]
    for answer in sorted(answers, key=HARMLESS.__contains__): # these come last, without values
        texts = answers[answer]
        if answer in HARMLESS:
            texts = [text.split(" = ")[0] for text in texts]
        more = f" and {len(texts) - 99:,} more" if len(texts) > 99 else ""
        lines.append(f"{settings.file.name}: {answer}: {', '.join(texts[:99])}{more}")
    if is_training(facts) and "model" not in facts:
        lines.append(f"{settings.file.name}: no Qwen-Image-Edit is named; --model is a choice of ours")
    doctor = ["python", "tools/doctor.py", *folders, *words_of(flags, ORDER[:3])]
    train = ["python", "train.py", "--model", flags.get("model", "Qwen/Qwen-Image-Edit-2509"), "--data", out,
             *(["--val_data", val] if val else []), *words_of(flags, ORDER)]
    head = "next:" if count else "when the pictures are imported:"
    return [*lines, head, f"  {common.shell_command(doctor)}", f"  {common.shell_command(train)}"]
