"""
The configs of the three published models, for --plan where neither the cache nor the hub has them.

The models are Qwen/Qwen-Image-Edit, -2509 and -2511 on huggingface.co, by the Qwen team, under the Apache License 2.0,
https://www.apache.org/licenses/LICENSE-2.0. What follows are those values of their config files that shapes, lengths
and noise levels depend on, as diffusers' defaults and other projects give them; the text encoder and its processor are
those of Qwen/Qwen2.5-VL-7B-Instruct. Of the tokenizer (11 MB) there is nothing here: tiny's stands in.
"""
import atexit
import json
import shutil
import tempfile
from pathlib import Path

import common

CONFIGS = {
    "transformer/config.json": dict(
        _class_name="QwenImageTransformer2DModel", num_layers=60, num_attention_heads=24, attention_head_dim=128,
        in_channels=64, out_channels=16, joint_attention_dim=3584, axes_dims_rope=[16, 56, 56], patch_size=2,
        guidance_embeds=False),
    "scheduler/scheduler_config.json": dict(
        _class_name="FlowMatchEulerDiscreteScheduler", num_train_timesteps=1000, base_shift=0.5, max_shift=0.9,
        base_image_seq_len=256, max_image_seq_len=8192, shift=1.0, shift_terminal=0.02, use_dynamic_shifting=True,
        time_shift_type="exponential"),
    "vae/config.json": dict(
        _class_name="AutoencoderKLQwenImage", base_dim=96, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
        temperal_downsample=[False, True, True], z_dim=16),
    # Qwen2.5-VL-7B
    "text_encoder/config.json": dict(
        model_type="qwen2_5_vl", tie_word_embeddings=False,
        text_config=dict(
            model_type="qwen2_5_vl_text", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
            num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, max_position_embeddings=128000),
        vision_config=dict(
            model_type="qwen2_5_vl", depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16,
            out_hidden_size=3584, patch_size=14, spatial_merge_size=2, temporal_patch_size=2)),
    "processor/preprocessor_config.json": dict(
        image_processor_type="Qwen2VLImageProcessor", patch_size=14, temporal_patch_size=2, merge_size=2,
        min_pixels=56 * 56, max_pixels=28 * 28 * 16384)}
PARTS = dict(scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"], tokenizer=["transformers", "Qwen2Tokenizer"],
             processor=["transformers", "Qwen2VLProcessor"], vae=["diffusers", "AutoencoderKLQwenImage"],
             text_encoder=["transformers", "Qwen2_5_VLForConditionalGeneration"],
             transformer=["diffusers", "QwenImageTransformer2DModel"])
# {model: (its pipeline, what its transformer's config has besides)}
MODELS = {"Qwen/Qwen-Image-Edit": ("QwenImageEditPipeline", {}),
          "Qwen/Qwen-Image-Edit-2509": ("QwenImageEditPlusPipeline", {}),
          "Qwen/Qwen-Image-Edit-2511": ("QwenImageEditPlusPipeline", dict(zero_cond_t=True))}


def settle(args):
    """What --plan takes for granted, before a device decides it: configs that cannot be had, and bfloat16 for a model
    as large as these, which only a card trains, on whatever machine it is planned."""
    from predict import find_transformer # here, as it reads CONFIGS
    stand_in(args)
    folder, _ = find_transformer(args, weights=False)
    file = "transformer/config.json"
    if CONFIGS[file].items() <= json.loads((folder / file).read_bytes()).items():
        args.dtype = args.dtype or "bfloat16"


def stand_in(args):
    """Where --model or --transformer is one of MODELS, and its configs cannot be had, puts a temporary folder in its
    place, with those that are here."""
    for flag in ("model", "transformer"):
        name = getattr(args, flag)
        model = str(name).partition("@")[0] # without its revision
        if model in MODELS and not at_hand(name):
            setattr(args, flag, write_configs(model))


def at_hand(model):
    from cache import find_model # here, as it reads CONFIGS
    try:
        find_model(model, [*PARTS], weights=False)
        return True
    except common.InputError:
        common.say(f"{model}: neither here nor from the hub; planned with its configs in extras/published.py, and with "
                   "tiny's tokenizer, which makes two to four times as many tokens of a prompt as the model's own")
        return False


def write_configs(model):
    """-> a folder that lives as long as this process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(common.TINY_DATA.parent / "tokenizer", folder / "tokenizer")
    tokens = json.loads((folder / "tokenizer/tokenizer.json").read_bytes())["added_tokens"]
    [pad] = [token["id"] for token in tokens if token["content"] == "<|image_pad|>"]
    pipeline, more = MODELS[model]
    files = CONFIGS | {"model_index.json": dict(PARTS, _class_name=pipeline)}
    files["transformer/config.json"] = files["transformer/config.json"] | more
    # cache.load_pipeline compares it with the tokenizer
    files["text_encoder/config.json"] = files["text_encoder/config.json"] | dict(image_token_id=pad)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return str(folder)
