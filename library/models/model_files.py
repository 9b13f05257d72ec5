"""
What is in a model's folder, checked before a library reads it: JSON files and the headers of weights; models without
weights, for their shapes; the configs of the published models. Such a folder may come from anyone, and the libraries
make whatever its numbers ask for, a billion layers too. What is wrong with one is an error line of its own.
"""
import json
from pathlib import Path

import safetensors
import torch
from PIL import Image
from accelerate import init_empty_weights
from diffusers import FlowMatchEulerDiscreteScheduler
from torch._subclasses.fake_tensor import FakeTensorMode

from common import InputError, first_words, is_utf8

MOST_BYTES = 2**20 # of a JSON file, but for
WORDS = {"tokenizer.json": 2**26, "vocab.json": 2**26} # the published ones have 11 and 3 MB
TOKENIZERS = "Qwen2Tokenizer", "Qwen2TokenizerFast" # others make of their files what those ask for
TIMES = 8 # a number may be so many times the published models'
MOST = 2**24 # and one that CONFIGS does not list so much: a token's number, an area in pixels
# what the code around the models counts on: a token is 2x2 latents of 8x8 pixels, a thousandth is a timestep
EXACT = "patch_size z_dim merge_size spatial_merge_size temporal_patch_size num_train_timesteps".split()

def check_files(folder, part, config, weights, flag):
    """InputError names a file that is missing or broken: `config` and the other JSON files of this folder, which is the
    model's `part`; and if `weights` all weight files that are here or that an index of shards names, by their
    headers."""
    shards = set(folder.glob("*.safetensors"))
    try:
        for file in folder.glob("*" if part == "." else "**/*"):
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise ValueError("a pipe or a device") # which would keep a library waiting
        for file in [folder / config, *folder.glob("*.json")]:
            content = read_json(file)
            if file.name == config:
                check_config(part, config, content)
            # library/models/quantization.py says why such weights are of no use here
            if file.name == "config.json" and content.get("quantization_config"):
                raise InputError(f"{file}: the weights are quantized already; take the bf16 model and --quantize nf4 "
                                 "(for the text encoder --quantize_text_encoder nf4)")
            if file.name.endswith(".safetensors.index.json"):
                shards |= {folder / plain_name(name) for name in content["weight_map"].values()}
        for file in shards if weights else []:
            if not is_utf8(file):
                raise InputError(f"{flag} {file}: a name that is no UTF-8, which safetensors cannot open; rename it")
            # this reads the header and compares it with the file's length
            refuse_wrapped(f"{flag} {file}", safetensors.safe_open(file, "pt").keys())
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{file}: missing or broken ({first_words(e)}); download it again (after a git clone: git lfs "
                         f"pull), as {flag} wants a complete diffusers folder")

def refuse_wrapped(place, names):
    """InputError for a model that was saved while LoRAs were loaded. names: its tensors'."""
    if wrapped := [name for name in names if ".base_layer." in name]:
        raise InputError(f"{place}: was saved with LoRA layers around its own ({wrapped[0]}); save it again, after "
                         "pipe.unload_lora_weights(), and before that pipe.fuse_lora() if the LoRA shall stay in it")

def read_json(file):
    """-> what a JSON file holds. ValueError if it is so long that to read it takes the memory of a model."""
    most = WORDS.get(file.name, MOST_BYTES)
    if file.stat().st_size > most:
        raise ValueError(f"more than {most:,} bytes")
    return json.loads(file.read_bytes())

def plain_name(name):
    """ValueError unless it is the name of a file, and leads nowhere else."""
    if name != Path(name).name or not name.endswith(".safetensors"):
        raise ValueError(f"{name!r:.99} is no file's name")
    return name

def check_config(part, config, content):
    """ValueError or TypeError for a value that is out of all proportion to those of the published models."""
    if not isinstance(content, dict):
        raise TypeError("no JSON object")
    if not isinstance(content.get("_class_name", ""), str):
        raise TypeError("_class_name is no name")
    if part == "." and content.get("tokenizer", TOKENIZERS)[1] not in TOKENIZERS:
        raise ValueError(f"its tokenizer is none of {', '.join(TOKENIZERS)}")
    without = content | dict(model_max_length=0) # (often 1e30; load_pipeline sets its own)
    check_values(without, flat(CONFIGS.get(f"{part}/{config}", {})))
    if part == "scheduler":
        try_schedule(content)
    if part == "transformer":
        axes, head = content.get("axes_dims_rope", (16, 56, 56)), content.get("attention_head_dim", 128)
        if sum(axes) != head or any(axis % 2 for axis in axes):
            raise ValueError(f"axes_dims_rope {axes} are no even parts of attention_head_dim {head}")
    if part == "vae":
        for name in ("latents_mean", "latents_std"):
            numbers = content.get(name, [1.0] * 16) # of each channel of a latent
            if len(numbers) != 16 or not {*map(type, numbers)} <= {int, float}:
                raise TypeError(f"{name} are no 16 numbers")
        if 0 in content.get("latents_std", ()): # which a latent is divided by
            raise TypeError("latents_std has a 0")

def flat(config):
    """{field: value} of a config and of those inside it. Of two values of a name the greater one counts."""
    fields = {}
    for name, value in config.items():
        inside = flat(value) if isinstance(value, dict) else {name: value}
        for inner, number in inside.items():
            fields[inner] = max(number, fields.get(inner, number))
    return fields

def check_values(value, published, name=""):
    """ValueError for a number out of all proportion, or a list of another length, in what a config holds under this
    name. published: {field: value}. (A value of another type fails where a model is made of it.)"""
    wanted = published.get(name)
    if isinstance(value, dict):
        for inner, one in value.items():
            check_values(one, published, inner)
    elif isinstance(value, list):
        if isinstance(wanted, list) and len(wanted) not in (0, len(value)):
            raise ValueError(f"{name} has {len(value)} entries, and {len(wanted)} in the published models")
        most = None
        if isinstance(wanted, list):
            most = max(wanted, default=None)
        for one in value:
            check_values(one, {name: most}, name)
    elif str(value).lower() == "false" and value is not False: # a text, which would count as true
        raise ValueError(f"{name} is the text {value!r}; want false")
    elif type(value) in (int, float): # no bool
        most = MOST
        if type(wanted) in (int, float):
            most = TIMES * wanted
        if not -MOST <= value <= most or name in EXACT and value != wanted: # (NaN, too)
            raise ValueError(f"{name} is {value!r:.99}, and {wanted or 'less'} in the published models")

def try_schedule(content):
    """Fails if the noise levels that the config makes are no numbers."""
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(content)
    config = scheduler.config
    if not config.base_image_seq_len < config.max_image_seq_len: # predict.find_mu divides by the difference
        raise ValueError("base_image_seq_len is not below max_image_seq_len")
    for mu in (config.base_shift, config.max_shift):
        scheduler.set_timesteps(sigmas=[1.0, 0.6, 0.2], mu=mu)
        if not bool(scheduler.sigmas.isfinite().all()):
            raise ValueError("its noise levels are no numbers")

def try_processor(pipe, prompt_length):
    """Fails if the numbers of the tokenizer or of the image processor do not fit together, which shows when they are
    used. prompt_length: cache.py's."""
    pipe.processor(["<|image_pad|>"], [Image.new("RGB", (56, 56))])
    prompt_length(pipe, "", [(56, 56)])

def empty_model(cls, folder):
    """A model of diffusers or transformers on the meta device, from its config.json. InputError names the folder."""
    try:
        with init_empty_weights():
            if hasattr(cls, "load_config"):
                return cls.from_config(cls.load_config(folder))
            return cls._from_config(cls.config_class.from_pretrained(folder))
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{folder}: cannot be loaded ({first_words(e)}); download it again")

def check_weights(cls, folder):
    """InputError if config.json asks for more weights than the files can hold, which a library would make up, in
    memory; or if a text encoder's fields do not fit together, as a pass without numbers shows."""
    model = empty_model(cls, folder)
    asked = sum(weight.numel() for weight in model.parameters())
    held = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if asked > held: # in bytes, of which a weight takes one at least
        raise InputError(f"{folder}: its config.json asks for {asked:,} weights, more than its files hold; download it "
                         "again")
    try:
        if hasattr(model, "lm_head"):
            with FakeTensorMode(allow_non_fake_inputs=True): # (transformers 5.2 has no pass on the meta device)
                model.to_empty(device="cpu")(input_ids=torch.zeros(1, 2, dtype=torch.long))
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{folder / 'config.json'}: its fields do not fit together ({first_words(e)}); download it "
                         "again")

SMALL = 2**30 # bytes of a model whose weights are copied

def copy_mapped_weights(model):
    """-> the model, whose weights no longer lie in its files, if it is small. safetensors maps files into memory, so a
    file that is written over later, in place, would change the weights of a process at work, or end it by SIGBUS. What
    remains: the text encoder and the transformer of the real model, 16 and 41 GB, are mapped until they are copied to
    their device, and as long as the process lives if that is the CPU (and --dtype is the files')."""
    weights = [weight for weight in [*model.parameters(), *model.buffers()] if weight.device.type == "cpu"]
    if sum(weight.nbytes for weight in weights) < SMALL:
        for weight in weights:
            weight.data = weight.data.clone()
    return model

# ---- the published models --------------------------------------------------------------------------------------------

# Qwen/Qwen-Image-Edit, -2509 and -2511 on huggingface.co, by the Qwen team, under the Apache License 2.0,
# https://www.apache.org/licenses/LICENSE-2.0: those values of their config files that shapes, lengths and noise levels
# depend on, as diffusers' defaults and other projects give them; the text encoder and its processor are those of
# Qwen/Qwen2.5-VL-7B-Instruct. Of the tokenizer (11 MB) there is nothing here: tiny's stands in. --plan uses them where
# neither the cache nor the hub has a model, and a stranger's config is compared with them.

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
