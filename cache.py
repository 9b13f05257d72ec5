"""
Encode samples once, so that training and sampling need only the transformer.

A sample is one or more control (input) pictures and an instruction; for training also a target, and maybe a mask. A
dataset is a folder of samples, or a manifest (metadata.jsonl) with paths inside its folder:
    data/target/cat.png     data/target/cat.txt         the picture wanted, and its prompt: the instruction for it
                                                        (several lines: several prompts; each use picks one)
    data/control/cat.png    data/control/cat_1.png ...  the picture given; further ones, any number, any sizes
    data/mask/cat.png                                   optional: white = the edited region
    data/metadata.jsonl     {"target": "a.png", "control": ["b.png"], "prompt": "make it snow", "mask": "c.png"}
A folder without control/ (a line with "control": []) holds pictures alone: they are trained as text-to-image.
Nothing outside of a dataset's folder is read: not what a line names, nor what a link leads to.
tools/import_data.py converts other layouts. Encoded samples go to CACHE_DIR/latents/*.safetensors and
CACHE_DIR/text/*.safetensors, named by a hash of all that decides their content: a second run encodes only what has
changed (tools/prune.py deletes what is left over). CACHE_DIR/<model>-<data>.json, an index, joins them to the samples;
train.py also takes it as --data (library/data/index_file.py). CACHE_DIR/pictures.txt says which pictures need not be
read again.

$ python cache.py                                                     # the photographs in tiny/
$ python cache.py --model Qwen/Qwen-Image-Edit-2509 --data photos     # yours
$ torchrun --nproc_per_node=4 cache.py --model ... --data photos      # four processes share the work
$ python cache.py --model ... --data photos drawings faces --repeats 1 5 1 # mixed; faces/ holds pictures alone

train.py and predict.py call the same functions; run this script alone to encode on another machine.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__))) # PYTHONSAFEPATH leaves it out
import library # before all others: refuses a folder here that Python would import in place of one of them
import atexit
import gc
import inspect
import json
import math
import re
import secrets
from contextlib import closing, suppress
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import common
from common import InputError, content_key, file_hash, first_words, print_problems, tell
from library.cli import command_line
from library.cli.command_line import NEGATIVE_PROMPT, is_index
from library.data import automatic_mask, dataset, index_file, sample_checks, stat_cache
from library.data.dataset import MAX_TOKENS, Planned
from library.data.picture_files import fit_size, read_image, read_mask, reserve_pixels
from library.files import disk, stray_files, tensor_files
from library.files.tensor_files import VERSION, read_tensors
from library.models import hub
from library.models.hub import TINY_DATA

def read_flags():
    """-> args. A slip ends the script here."""
    parser = command_line.Parser(__doc__, "--model MODEL --data DIR [--val_data DIR] [--target_pixels AREA]")
    command_line.add_model_flags(parser)
    command_line.add_data_flags(parser)
    parser.group("check")("--verify", False, "read every file of the cache; encode damaged ones again")
    args = command_line.parse_data_args(parser, "cache.py")
    dataset.check_datasets(args)
    common.say(f"{args.cache_dir}: encodes {' '.join(args.data)} with {args.model}; the libraries take some seconds")
    return args

if __name__ == "__main__": # before the imports below: a slip is answered in a second, and they take ten
    args = read_flags()

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLQwenImage, DiffusionPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE
from huggingface_hub import snapshot_download
from PIL import Image
from transformers import BatchFeature, Qwen2_5_VLForConditionalGeneration

try: # the one that works without torchvision; from transformers 5.4 on it has a name of its own
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
except ModuleNotFoundError:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Qwen2VLImageProcessorPil

from library.models import devices, model_files, one_pass, picture_vae, quantization
from rope_patch import ROPE_TABLE, plan_packs

PREPROCESSING = 4 # part of every key: add 1 when the preparation of pictures or prompts changes

# ---- models ----------------------------------------------------------------------------------------------------------

ENCODERS = "vae text_encoder tokenizer processor scheduler".split() # folders of a model
CONFIG_FILES = {".": "model_index.json", "tokenizer": "tokenizer_config.json", "scheduler": "scheduler_config.json",
                "processor": "preprocessor_config.json"} # the other parts have config.json
PARTS_OF = dict(vae=["vae"], text=["text_encoder", "tokenizer", "processor"]) # that decide what an encoder computes

class Processor: # a class because the pipeline calls it as pipe.processor, and reads its attributes
    """Qwen2VLProcessor without its video half, which cannot be loaded without torchvision: transformers' PIL image
    processor, and the tokenizer on texts where each <|image_pad|> stands once per merged patch. All texts speak of the
    same pictures."""

    def __init__(self, tokenizer, image_processor):
        self.tokenizer, self.image_processor = tokenizer, image_processor

    def __call__(self, text, images=None, padding=True, return_tensors="pt"):
        pictures = {}
        if images is not None:
            pictures = self.image_processor(images=images, return_tensors=return_tensors)
            counts = cycle((pictures["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist())

            def repeat(pad): # the k-th pad of each text stands for the k-th picture
                return pad[0] * next(counts)
            text = [re.sub(r"<\|image_pad\|>", repeat, one) for one in text]
        tokens = self.tokenizer(text, padding=padding, return_tensors=return_tensors)
        return BatchFeature({**tokens, **pictures})

def find_model(model, parts, weights=True, flag="--model"):
    """--model or --transformer (flag) -> a local folder, downloaded if need be, that holds these parts. Their files are
    checked before any is loaded, without weights all but the weights."""
    folder = TINY_DATA.parent if model == "tiny" else Path(model)
    if folder.is_file():
        raise InputError(f"{flag} {model}: one file; give a diffusers folder, or Qwen/Qwen-Image-Edit-2509 (train.py "
                         "and predict.py take the file as --transformer beside it)")
    # no folder: an id of the hub, of which only these parts are downloaded
    if not folder.is_dir():
        repo, _, revision = model.partition("@")
        wanted = ["model_index.json", *[f"{part}/*" for part in parts]]
        folder = hub.from_hub(f"{flag} {model}", lambda: snapshot_download(
            repo, revision=revision or None, allow_patterns=wanted,
            ignore_patterns=None if weights else "*.safetensors"))
    if flag == "--model":
        parts = [".", *parts] # the folder itself
    for part in parts:
        model_files.check_files(folder / part, part, CONFIG_FILES.get(part, "config.json"), weights, flag)
    return folder

def load_pipeline(folder, cache_dir=None):
    """The stock pipeline of model_index.json (v1 or Plus) without weights: tokenizer, processor and scheduler only. Its
    methods then prepare pictures and prompts; load_encoder adds VAE and text encoder. pipe.fingerprints: of the
    encoders, before anything is read of them. A script that fills no cache gives no cache_dir, where hashes are
    remembered, and gets none."""
    fingerprints = {}
    try:
        # a new model family begins here; GUIDE.md lists the other places
        name = json.loads((folder / "model_index.json").read_bytes())["_class_name"]
        if name not in ("QwenImageEditPipeline", "QwenImageEditPlusPipeline"):
            raise InputError(f"{folder / 'model_index.json'}: a {name!s:.99}; want QwenImageEdit(Plus)Pipeline")
        if cache_dir:
            fingerprints = common.on_first_process(lambda: encoder_fingerprints(folder, cache_dir))
        image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder, subfolder="processor")
        # parts that are None are not loaded
        pipe = DiffusionPipeline.from_pretrained(
            folder, vae=None, text_encoder=None, transformer=None, processor=None)
        pipe.processor = Processor(pipe.tokenizer, image_processor)
        pipe.tokenizer.model_max_length = 10**9 # beyond it the tokenizer would warn; check_lengths knows the real limit
        model_files.try_processor(pipe, prompt_length)
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{folder}: cannot be loaded ({first_words(e)}); is the download complete?")
    config = folder / "text_encoder/config.json" # (tools/measure.py does without)
    pad_id = pipe.tokenizer.convert_tokens_to_ids("<|image_pad|>") # a tokenizer without vocabulary gives another one
    if config.is_file() and json.loads(config.read_bytes()).get("image_token_id") != pad_id:
        raise InputError(f"{folder / 'tokenizer'}: is not the text encoder's; download it again")
    pipe.fingerprints = fingerprints | dict(pipeline=type(pipe).__name__)
    return pipe

def find_pipeline(args, weights=True):
    """-> (the folder of --model, load_pipeline of it, or None where all datasets are indexes: these need no encoders,
    only the VAE, for the pictures of validations)."""
    indexes = all(map(is_index, args.data + args.val_data))
    if not indexes and weights: # (--plan writes nothing)
        common.on_first_process(lambda: disk.try_cache(args))
    folder = find_model(args.model, ["scheduler", "vae"] if indexes else ENCODERS, weights)
    return folder, None if indexes else load_pipeline(folder, args.cache_dir)

def load_part(cls, folder, dtype):
    """One frozen model from its safetensors files. InputError names the folder."""
    model_files.check_weights(cls, folder)
    try:
        model, info = cls.from_pretrained(folder, torch_dtype=getattr(torch, dtype), use_safetensors=True,
                                          output_loading_info=True)
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{folder}: cannot be loaded ({first_words(e)}); download it again")
    if missing := sorted(info["missing_keys"]): # these weights would be random numbers
        raise InputError(f"{folder}: {len(missing)} tensors are missing, for instance {missing[0]}; download it again")
    return model_files.copy_mapped_weights(model).requires_grad_(False).eval()

def load_vae(folder, dtype):
    """The VAE in this folder, which computes pictures as pictures."""
    return picture_vae.patch_vae_for_pictures(load_part(AutoencoderKLQwenImage, folder, dtype))

def load_encoder(pipe, encoder, args):
    """Adds the VAE ("vae") or the text encoder ("text") to the pipeline, on its device. The VAE's decoder stays on the
    CPU: encoding does not need it. args: dtype, device and quantization flags of command_line.add_model_flags.
    InputError if its files are no longer what load_pipeline has hashed: what it encodes would lie under the wrong key
    for ever."""
    folder = Path(pipe.name_or_path)
    if encoder == "vae": # its encoder is what encode_image uses
        pipe.vae = load_vae(folder / "vae", args.dtype)
        pipe.vae.encoder.to(args.vae_device)
        pipe.vae.quant_conv.to(args.vae_device)
    else:
        model = load_part(Qwen2_5_VLForConditionalGeneration, folder / "text_encoder", args.dtype)
        model.lm_head = torch.nn.Identity() # 1 GB, and a tenth of the work, for logits that nobody reads
        one_pass.patch_text_encoder(model).register_forward_pre_hook(add_token_types, with_kwargs=True)
        try:
            # quantized layer by layer, so that the device never holds all of it in full precision
            if args.quantize_text_encoder != "none":
                quantization.quantize_linears(model, args.quantize_text_encoder, args.text_encoder_device)
            pipe.text_encoder = model.to(args.text_encoder_device)
        except torch.OutOfMemoryError:
            raise InputError(f"--text_encoder_device {args.text_encoder_device}: too little memory for the text "
                             "encoder, 16 GB in bf16; --quantize_text_encoder takes less, or give cpu")
    if encoder in pipe.fingerprints and hash_encoder(folder, encoder, args.cache_dir) != pipe.fingerprints[encoder]:
        raise InputError(f"{folder}: {' or '.join(PARTS_OF[encoder])} has changed since it was looked at; run the same "
                         "command again")

def add_token_types(encoder, args, kwargs):
    """A forward pre-hook that marks the tokens of pictures. From 5.3 on transformers wants these marks, and diffusers
    0.42.1 does not pass them (its issue 14194): without them all pictures lose their rows and columns, silently."""
    wanted = "mm_token_type_ids" in inspect.signature(type(encoder).forward).parameters
    if wanted and kwargs.get("image_grid_thw") is not None:
        kwargs.setdefault("mm_token_type_ids", (kwargs["input_ids"] == encoder.config.image_token_id).int())
    return args, kwargs

def drop_encoders(pipe):
    """VAE and text encoder leave their devices, and the host's memory."""
    pipe.vae = pipe.text_encoder = None
    gc.collect() # hooks refer to the model that holds them, in circles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats() # train.py's log shows the training's peak, not the encoding's

def is_plus(pipe):
    return type(pipe).__name__ == "QwenImageEditPlusPipeline"

def hash_part(place, cache_dir):
    """A folder of a model, or its one file -> a hash of every file's content, because a merged LoRA may change any
    tensor, and no length. The folder's name does not matter, nor does a README. CACHE_DIR/models.txt remembers the
    hashes of the files, because to read 58 GB takes a minute."""
    inside = stray_files.listed(place, "*") if place.is_dir() else [place]
    files = [file for file in inside if file.is_file() and file.suffix != ".md"]
    hash_of = stat_cache.remember_by_stat(files, file_hash, Path(cache_dir, "models.txt"))
    return content_key(files=[[file.relative_to(place).as_posix(), hash_of(file)] for file in files])

# Weights are mapped from their files until they are copied, so a file that changes meanwhile would change the model.

def refuse_changed_parts(places, hashes, cache_dir):
    """InputError if one of these parts of models is no longer what hash_part has hashed, as this process finds it."""
    stat_cache.refuse_changed_files(places, hashes, lambda place: hash_part(place, cache_dir))

def hash_encoder(folder, encoder, cache_dir):
    return content_key(**{part: hash_part(folder / part, cache_dir) for part in PARTS_OF[encoder]})

def encoder_fingerprints(folder, cache_dir):
    """What decides encoded files, of a model -> dict(pipeline: its class, vae: a hash, text: a hash). An encoder whose
    weights are not here is left out."""
    found = dict(pipeline=json.loads((folder / "model_index.json").read_bytes())["_class_name"])
    for encoder, parts in PARTS_OF.items():
        if any((folder / parts[0]).glob("*.safetensors")):
            found[encoder] = hash_encoder(folder, encoder, cache_dir)
    return found

# ---- encoding: what the stock pipeline computes, one picture or prompt at a time -------------------------------------

def to_pixels(pipe, image):
    """RGB image -> (1, 3, 1, H, W), from -1 to 1. The VAE knows videos, so a picture is one frame."""
    return pipe.image_processor.preprocess(image).unsqueeze(2)

@torch.no_grad()
def encode_image(pipe, pixels):
    """to_pixels of an image -> (tokens, 64): the posterior's mode, normalized by latents_mean/std, 2x2 patches packed.
    fp32 or bf16 as the VAE; on the VAE encoder's device."""
    weight = next(pipe.vae.encoder.parameters())
    z = pipe._encode_vae_image(pixels.to(weight.device, weight.dtype), generator=None)
    return pipe._pack_latents(z, 1, z.shape[1], *z.shape[3:])[0]

@torch.no_grad()
def encode_prompts(pipe, prompts, images):
    """Prompts, and the pictures that all of them speak of -> (T, 3584) of each, without the template's first 64 tokens:
    one pass, with the numbers of one prompt at a time."""
    given = (images or None) if is_plus(pipe) else images[0] # v1 has one picture, and not in a list
    embeds, mask = pipe.encode_prompt(prompts, given, device=pipe.text_encoder.device)
    if mask is None: # there are no pads
        mask = embeds.new_ones(embeds.shape[:2])
    embeds = [rows[real.bool()] for rows, real in zip(embeds, mask)]
    if len(prompts) > 1 and not all(bool(rows.isfinite().all()) for rows in embeds):
        # a prompt that overflows spoils the others, as 0 * NaN is NaN, also behind a mask
        return [encode_prompts(pipe, [prompt], images)[0] for prompt in prompts]
    return embeds

def prompt_length(pipe, prompt, sizes):
    """T of encode_prompts, from the tokenizer alone."""
    images = pipe.processor.image_processor
    counts = [images.get_number_of_image_patches(h, w, {}) // images.merge_size**2 for w, h in sizes]
    pictures = "".join(f"Picture {i + 1}: <|vision_start|><|image_pad|><|vision_end|>" for i in range(len(sizes)))
    text = pipe.prompt_template_encode.format((pictures if is_plus(pipe) else "") + prompt)
    # the pad of a picture is one token here, and will be `count` of them
    return len(pipe.tokenizer(text).input_ids) + sum(counts) - len(counts) - pipe.prompt_template_encode_start_idx

def read_planned(sample, path):
    """-> one of a planned sample's pictures, as it is on the disk. InputError if it is another one by now."""
    return read_image(path, sample.contents[path])

def read_pictures(pipe, sample, encoder, what):
    """Reads and resizes the pictures that encode_texts or encode_latents encodes; threads can do it ahead, as PIL
    releases the GIL. encoder "text": `what` is a text key; "vae": it is one of sample.encodings -> {a role of
    dataset.ROLES: [pictures]}, for the text of the controls alone, or {}; for the VAE as to_pixels makes them. A mask
    has one pixel a token. InputError for a picture that is another one than was planned: its encoding would lie under
    the wrong key for ever."""
    def resize(picture, size):
        return pipe.image_processor.resize(picture, size[1], size[0])

    def read(path, size):
        return to_pixels(pipe, resize(read_planned(sample, path), size))

    # the text encoder sees small copies of the controls
    if encoder == "text":
        _, with_pictures = what
        if not with_pictures:
            return {}
        return dict(control=[resize(read_planned(sample, path), size)
                             for path, size in zip(sample.controls, sample.prompt_sizes)])
    # a token is 16x16 pixels; shapes are (frames, height, width), and PIL's sizes (width, height)
    (width, height), *control_sizes = [(16 * w, 16 * h) for _, h, w in what["img_shapes"]]
    pictures = {}
    if sample.target:
        whole = read_planned(sample, sample.target)
        pictures["target"] = [to_pixels(pipe, resize(whole, (width, height)))]
    if "mask" in what: # --mask auto compares the pictures at their own sizes
        mask = automatic_mask.auto_mask(whole, read_planned(sample, sample.controls[0]), (width, height))
        pictures["mask"] = [mask] if mask else []
    for role, path in sample.overlays.items():
        if dataset.ROLES[role].is_mask:
            mask = read_mask(path, sample.contents[path])
            pictures[role] = [mask.resize((width // 16, height // 16), Image.BOX)]
        else:
            pictures[role] = [read(path, (width, height))]
    pictures["control"] = list(map(read, sample.controls, control_sizes))
    return pictures

def encode_latents(pipe, sample, encoding, pictures=None):
    """-> img_shapes (N, 3), and of each role that has pictures its tensor, as dataset.ROLES calls it: control_latent
    (sum I_c, 64), which may be (0, 64), pixel_latent (I_0, 64), edit_mask (I_0,): the edited share of each token's
    16x16 pixels. pictures: read_pictures's, if it has been called."""
    out = dict(img_shapes=torch.tensor(encoding["img_shapes"]))
    for role, images in (pictures or read_pictures(pipe, sample, "vae", encoding)).items():
        rows = []
        for image in images: # one at a time: no batch, so no size has to fit another's
            if dataset.ROLES[role].is_mask: # resizing has averaged it: one value a token, from 0 (black) to 1
                rows.append(torch.from_numpy(np.asarray(image).flatten() / np.float32(255)))
            else:
                rows.append(encode_image(pipe, image))
        if rows:
            out[dataset.ROLES[role].tensor] = torch.cat(rows)
    if not sample.controls:
        out["control_latent"] = out["pixel_latent"][:0]
    return out

def encode_texts(pipe, text_keys, pictures):
    """-> of each text key prompt_embed (T, 3584) and prompt_embeds_mask (T,), with the controls that read_pictures has
    read for all of them, or without. For the prompt "" their names begin with empty_, as in the caches of other
    trainers."""
    encoded = []
    prompts = [prompt for prompt, _ in text_keys]
    for prompt, embed in zip(prompts, encode_prompts(pipe, prompts, pictures.get("control"))):
        name = "prompt_embed" if prompt else "empty_prompt_embed"
        encoded.append({name: embed, name + "s_mask": torch.ones(len(embed), dtype=torch.bool)})
    return encoded

def refuse_overflow(sample, tensors):
    # half precision can overflow, and one NaN in a batch would make all weights NaN
    tensor_files.refuse_not_finite(sample.target or sample.controls[0], tensors, "try --dtype float32")
    return tensors

# ---- the plan: what will be encoded of each sample, and in which file ------------------------------------------------

def plan_sizes(pipe, sizes, geometry):
    """The original (width, height) of target and controls -> those at which they are encoded: [the target's at each of
    its areas], [the controls'], [the controls' for the text encoder]. geometry: dict(target_pixels=[...],
    control_pixels, upscale), and for a result maybe width and height, which count more than the area."""
    base_size, *own_sizes = sizes
    target_sizes = []
    for area in geometry["target_pixels"]:
        w, h = fit_size(base_size, area, geometry["upscale"])
        # sides that are given are rounded as in stock; fitted ones are multiples of 32
        target_sizes.append([(geometry.get("width") or w) // 16 * 16, (geometry.get("height") or h) // 16 * 16])
    control_sizes = [fit_size(size, geometry["control_pixels"], geometry["upscale"]) for size in own_sizes]
    # the text encoder sees 384*384 (Plus), or the same copy as the VAE (v1)
    prompt_sizes = control_sizes
    if is_plus(pipe):
        prompt_sizes = [fit_size(size, CONDITION_IMAGE_SIZE) for size in own_sizes]
    return target_sizes, control_sizes, prompt_sizes

def check_lengths(pipe, sample, max_sequence_length):
    """InputError for a prompt of a planned sample that is too long, alone or with its pictures."""
    for prompt, _ in sample.texts:
        tokens = len(pipe.tokenizer(prompt).input_ids)
        if tokens > max_sequence_length:
            raise InputError(f"{sample.name}: prompt of {tokens} tokens, over --max_sequence_length "
                             f"{max_sequence_length}; shorten {prompt[:40]!r} ...")
    sides = [sides for encoding in sample.encodings for _, *sides in encoding["img_shapes"]] # in tokens
    if math.prod(max(sides, key=math.prod)) > MAX_TOKENS: # it would fill the memory
        raise InputError(f"{sample.name}: would be computed with over 4096x4096 pixels; give smaller --target_pixels "
                         "and --control_pixels")
    # rotary positions: pictures are centred on 0, and the text begins where the largest ends
    left = ROPE_TABLE - max(map(max, sides)) // 2
    tokens = max(text["tokens"] for text in sample.texts.values())
    if tokens > left:
        raise InputError(f"{sample.name}: {tokens} tokens of prompt and pictures, of which {left} have positions; "
                         "shorten the prompt, or give fewer pictures")

def plan_sample(pipe, sample, text_keys, geometry, fingerprints, args, facts=()):
    """-> Planned: what will be encoded of this sample, in which files. geometry: as for plan_sizes, and for a result
    maybe size_from; fingerprints: encoder_fingerprints; args: cache_dir, dtype, max_sequence_length,
    quantize_text_encoder and maybe mask. facts: dataset.remember_facts's, which know the answers; else the sample's
    pictures are read here. InputError names what is wrong with it."""
    if not is_plus(pipe) and len(sample.controls) != 1:
        raise InputError(f"{[sample.target, *sample.controls][-1]}: Qwen-Image-Edit v1 takes one control, here are "
                         f"{len(sample.controls)}; give it one, or take 2509 or 2511")
    sizes, contents, overlays = dataset.read_facts(sample, *facts, size_from=geometry.get("size_from"))
    target_sizes, control_sizes, prompt_sizes = plan_sizes(pipe, sizes, geometry)
    # what decides the content of every file
    shared = dict(version=VERSION, preprocessing=PREPROCESSING, pipeline=fingerprints["pipeline"], dtype=args.dtype)

    def cache_file(folder, **fields):
        return Path(args.cache_dir, folder, content_key(**shared, **fields) + ".safetensors")

    # latents: one file for each area of the target, with the controls in it
    control_hashes = [contents[path] for path in sample.controls]
    overlay_hashes = {role: contents[path] for role, path in overlays.items()}
    # further roles are in the key only of samples that have them, so that the keys of all others stay
    hashes = [*control_hashes, contents.get(sample.target), overlay_hashes.pop("mask", None)]
    auto = {} # goes into the key as well: with the mask the file has other content
    if getattr(args, "mask", None) and sample.target and sample.controls and "mask" not in overlays:
        auto = dict(mask="auto")
    encodings = []
    for target_size in target_sizes:
        all_sizes = [target_size, *control_sizes]
        file = cache_file("latents", vae=fingerprints.get("vae"), pictures=hashes, sizes=all_sizes, **auto,
                          **overlay_hashes)
        shapes = [(1, h // 16, w // 16) for w, h in all_sizes]
        encodings.append(dict(img_shapes=shapes, file=file) | auto)
    # texts: one file for each prompt, as the text encoder sees it: with the controls' copies, or without
    texts = {}
    for prompt, with_pictures in text_keys:
        seen_hashes, seen_sizes = (control_hashes, prompt_sizes) if with_pictures else ([], [])
        file = cache_file("text", text=fingerprints.get("text"), quantize=args.quantize_text_encoder, prompt=prompt,
                          seen=[seen_hashes, seen_sizes])
        texts[prompt, with_pictures] = dict(tokens=prompt_length(pipe, prompt, seen_sizes), file=file)
    given = vars(sample) | dict(overlays=overlays)
    planned = Planned(**given, contents=contents, sizes=sizes, prompt_sizes=prompt_sizes, encodings=encodings,
                      texts=texts)
    check_lengths(pipe, planned, args.max_sequence_length)
    return planned

def plan_samples(pipe, samples, texts_of, geometry, args):
    """-> ([Planned] of all good samples, problems). texts_of(sample) -> its text keys; geometry: as for plan_sizes."""
    good = []
    problems = []
    facts = dataset.remember_facts(samples, args.cache_dir)
    for sample in common.progress("planning", samples, unit="sample"):
        with common.collect_errors(problems):
            good.append(plan_sample(pipe, sample, texts_of(sample), geometry, pipe.fingerprints, args, facts))
    return good, problems

# ---- the cache: encoded files ----------------------------------------------------------------------------------------

def files_of(sample):
    """A planned sample's {file: (encoder, what it encodes: one of sample.encodings or a text key)}."""
    files = {encoding["file"]: ("vae", encoding) for encoding in sample.encodings}
    for key, text in sample.texts.items():
        files[text["file"]] = "text", key
    return files

def data_hash(epoch):
    """A hash of planned samples: their names, and their encoded files, which are named by all that they depend on."""
    contents = []
    for sample in epoch:
        contents.append([sample.name, [file.stem for file in files_of(sample)]])
    return content_key(samples=contents)

def encode_samples(pipe, samples, args, verify=False):
    """Each process encodes its share of what the cache lacks -> {file: error line} of what cannot be encoded, the same
    on every process; a bad sample does not stop the others. The encoders are loaded only if needed, one after the
    other, and unloaded before this returns. With `verify` every file is read, and damaged ones are encoded again."""
    jobs = {} # {file: (sample, encoder, what)}: a file that several samples share is encoded once
    for sample in samples:
        for file, job in files_of(sample).items():
            jobs[file] = sample, *job
    # by key, and not by place: the processes' lists of missing files may differ, as one may have written some already;
    # a process does all of a sample, whose prompts share a pass
    my_files = {file for file, (sample, *_) in jobs.items()
                if int(sample.encodings[0]["file"].stem, 16) % common.world() == common.rank()}
    if verify:
        remove_damaged(filter(Path.is_file, my_files), pipe)
    missing, failed = [file for file in jobs if not file.is_file()], {}
    if pipe: # (an index alone cannot encode anything again)
        warn_of_other_code(jobs.keys() - {*missing})
    if missing:
        for folder in {file.parent for file in missing}:
            stray_files.refuse_outside(folder, args.cache_dir)
            disk.try_out(folder)
        common.say(f"encoding {len(missing)} files into {args.cache_dir}")
        failed = encode_files(pipe, {file: jobs[file] for file in missing if file in my_files}, args)
    # what is neither here nor failed has gone meanwhile; to leave it out would train on fewer samples than were planned
    gone = [file for file in my_files if file not in failed and not file.is_file()]
    all_failed = {}
    for theirs, lost in common.gather_objects((failed, gone)): # waits until the others have written their files
        if lost:
            raise InputError(f"{lost[0]}: was deleted while {args.cache_dir} was filled, and {len(lost) - 1} more; run "
                             "the same command again, and nothing else that deletes there")
        all_failed |= theirs
    return all_failed

# A key says what an encoded file was made of, and PREPROCESSING stands for the code. Someone who edits that code may
# forget the number, so each file also notes a hash of the code, which decides nothing.

def warn_of_other_code(files):
    """A warning if some of these encoded files were made by other code than ours. Only the headers of 32 are read,
    evenly spread, as a cache may hold a hundred thousand: of a mixture the few can be missed. A file of another program
    says nothing."""
    files = sorted(files) if common.rank() == 0 else []
    for file in files[::len(files) // 32 + 1]:
        code = None
        with suppress(Exception), open(file, "rb") as f: # a foreign file can fail in any way
            code = json.loads(tensor_files.read_header(f)["__metadata__"]["json"]).get("code")
        if code not in (None, library.code_hash(library.ENCODING)):
            tell("warning: cache: encoded by another cache.py than this one, or with other files of library/data; if "
                 f"they compute something else now, add 1 to PREPROCESSING ({PREPROCESSING}) in cache.py",
                 file=sys.stderr)
            return

def remove_damaged(files, pipe):
    for file in common.progress("verifying", list(files), unit="file"):
        # reading compares the digest that the file carries with its content
        try:
            tensors, _ = read_tensors(file, key=file.stem)
            tensor_files.refuse_not_finite(file, tensors, "encode it again")
        except InputError as e:
            what = "of another version of this project" if isinstance(e, tensor_files.OtherVersion) else "damaged"
            if pipe is None:
                raise InputError(f"{file}: {what}, and an index alone cannot encode it again; give the dataset as "
                                 "--data, or copy the cache once more")
            disk.delete(file, what, "give another --cache_dir")
            tell(f"{file}: {what}; encoding it again", file=sys.stderr)

PASS_TOKENS = 8192 # of prompts that share a pass, each with its pictures: 60 MB of numbers come of so many
WAITING = 2**31 # bytes of pictures that are read ahead, at 12 a pixel of a target and of a control

def plan_passes(jobs):
    """encode_files's jobs -> [[file, ...] of each pass of an encoder], all latents before all texts, so that the
    encoders are loaded once each, and are never in memory together. Prompts about the same pictures share passes."""
    latents, alike = [], {} # {pictures and their sizes, or () without pictures: {file: tokens of the text}}
    for file, (sample, encoder, what) in jobs.items():
        if encoder == "vae":
            latents.append([file])
        else:
            _, with_pictures = what
            seen = (*sample.controls, *map(tuple, sample.prompt_sizes)) if with_pictures else ()
            alike.setdefault(seen, {})[file] = sample.texts[what]["tokens"]
    return latents + [files for lengths in alike.values() for files in plan_packs(lengths, PASS_TOKENS)]

def encode_files(pipe, jobs, args):
    """Encodes and writes {file: (sample, encoder, what)}, all latents before all texts -> {file: error line}. Other
    threads read and write, as they wait for the disk."""
    failed = {}
    order = plan_passes(jobs)

    def read(files):
        sample, *_ = jobs[files[0]]
        with reserve_pixels(sample.contents): # threads wait where pictures would fill the memory
            return read_pictures(pipe, *jobs[files[0]])
    # a photograph takes the host longer than the card
    largest = max(256 * h * w for sample, *_ in jobs.values() for _, h, w in sample.encodings[0]["img_shapes"])
    most = max(1, min(common.THREADS + 4, WAITING // (24 * largest)))
    reads = common.run_ahead(read, order, common.THREADS, most)

    def encode_all(): # yields write_tensors' arguments
        loaded = None
        for files, pictures in zip(order, reads):
            if signals_seen:
                return
            sample, encoder, what = jobs[files[0]]
            if encoder != loaded:
                drop_encoders(pipe)
                load_encoder(pipe, encoder, args)
                loaded = encoder
            try:
                if encoder == "vae":
                    encoded = [encode_latents(pipe, sample, what, pictures.result())]
                else:
                    encoded = encode_texts(pipe, [jobs[file][2] for file in files], pictures.result())
            except InputError as e:
                failed.update(dict.fromkeys(files, str(e)))
                encoded = []
            except torch.OutOfMemoryError:
                raise InputError(f"{sample.name}: out of memory in the {encoder} encoder; lower --control_pixels and "
                                 "--target_pixels, or give cpu for --vae_device or --text_encoder_device")
            for file, tensors in zip(files, encoded):
                sample, *_ = jobs[file]
                meta = dict(version=VERSION, key=file.stem, sizes=sample.sizes,
                            sources=[sample.target, *sample.controls], code=library.code_hash(library.ENCODING))
                try:
                    yield file, refuse_overflow(sample, tensors), meta
                except InputError as e:
                    failed[file] = str(e)
            bar.update(len(files))

    # the encoder runs in this thread; others read ahead of it, and four write. A signal ends it between two passes, so
    # that no file is half-written, and the next call encodes the rest
    with (common.catch_signals() as signals_seen, closing(reads), # closed also if this ends early
          common.progress("encoding", total=len(jobs), unit="file") as bar):
        for written in common.run_ahead(lambda job: tensor_files.write_tensors(*job), encode_all(), threads=4, most=16):
            written.result() # a full disk raises its InputError here
        if signals_seen:
            tell(f"{args.cache_dir}: stopped by a signal; run the same command again for the rest")
            sys.exit(128 + signals_seen[0])
    drop_encoders(pipe)
    return failed

def load_latents(sample, encoding, encoders=None):
    """encode_latents of one of sample.encodings: from the cache, or encoded now by the pipeline `encoders`."""
    if encoders:
        return refuse_overflow(sample, encode_latents(encoders, sample, encoding))
    return read_encoded(sample, encoding)

def load_text(sample, text_key, encoders=None):
    """prompt_embed (T, 3584) of a text key, likewise."""
    if encoders:
        tensors, = encode_texts(encoders, [text_key], read_pictures(encoders, sample, "text", text_key))
        refuse_overflow(sample, tensors)
    else:
        tensors = read_encoded(sample, sample.texts[text_key])
    return tensors["prompt_embed" if text_key[0] else "empty_prompt_embed"]

def read_encoded(sample, encoded):
    """A file of the cache -> its tensors. InputError if they are not what was planned, as an index may be foreign."""
    tensors, _ = read_tensors(encoded["file"], key=encoded["file"].stem)
    index_file.check_tensors(tensors, sample, encoded)
    return tensors

def keep_from_prune(samples):
    """FOLDER/.planned-TOKEN lists the files of these samples until this process ends, in each cache folder that has
    some -> the folders that can be written. tools/prune.py, which knows the files of indexes only, leaves these alone:
    while they are encoded, and while a run reads them, whose index may be replaced meanwhile. Only a process that was
    killed leaves its list. A folder that cannot be written has none, and serves if it is complete; InputError if it is
    not."""
    folders = {}
    for sample in samples:
        for file in files_of(sample):
            folders.setdefault(file.parents[1], set()).add(file)

    def list_all():
        return [folder for folder, files in folders.items() if list_files(folder, files)]
    return common.on_first_process(list_all)

def list_files(folder, files):
    """Writes keep_from_prune's list of one folder -> whether that can be written."""
    # each command has its own list, as several may work on the same pictures
    path = folder / f".planned-{secrets.token_hex(16)}"
    names = sorted(f"{file.parent.name}/{file.name}" for file in files)
    try:
        common.write_file(path, "\n".join(names).encode())
    except InputError as e:
        missing = sum(not file.is_file() for file in files)
        if missing:
            index = min(folder.glob("*.json"), default="")
            other = f", or one of its indexes as --data, such as {index}" if index else ""
            why = common.os_reason(e.__cause__)
            raise InputError(f"--cache_dir {folder}: cannot be written ({why}), and lacks {missing} of "
                             f"{len(files)} files; give another folder{other}")
        return False # as library/files/disk.py has said
    atexit.register(forget, path)
    return True

def forget(path):
    with suppress(OSError): # as a list of a killed process
        path.unlink()

# ---- what a training reads -------------------------------------------------------------------------------------------

def plan_training(pipe, folder, args):
    """-> (planned samples, planned validation samples, geometry, problems), of datasets or of indexes."""
    geometry = {name: getattr(args, name) for name in ("target_pixels", "control_pixels", "upscale")}
    # whether the pictures come with the prompt
    picture_choices = [True, False] if args.prompt_image_dropout_rate else [True]
    if pipe and not is_plus(pipe) and args.prompt_image_dropout_rate:
        raise InputError("--prompt_image_dropout_rate: Qwen-Image-Edit v1 has a picture in every prompt; leave it out")
    preserve_prompts = args.preserve_prompts if args.preserve else []
    negative_prompt = getattr(args, "negative_prompt", NEGATIVE_PROMPT) # cache.py has no such flag

    # the text keys that a training may pick, and those of a validation: its loss, and its pictures with true CFG
    def texts_of(sample):
        prompts = [*sample.prompts, ""] if args.caption_dropout_rate else sample.prompts
        text_keys = list(product(prompts, picture_choices))
        return text_keys + [(prompt, True) for prompt in preserve_prompts if sample.controls]

    def val_texts_of(sample):
        return [(prompt, True) for prompt in [*sample.prompts, negative_prompt]]

    problems = []

    def read_root(root, wanted_texts, geometry): # -> (samples, geometry); an index brings its own
        if is_index(root):
            encoders = encoder_fingerprints(folder, args.cache_dir)
            return index_file.open_index(root, encoders, wanted_texts, args)
        given, wrong = dataset.read_dataset(root)
        planned, more = plan_samples(pipe, given, wanted_texts, geometry, args)
        problems.extend(wrong + more)
        return planned, geometry

    samples = []
    for n, root in enumerate(args.data):
        planned, geometry = read_root(root, texts_of, geometry) # an index is the only root
        if args.repeats:
            planned = [replace(sample, repeats=args.repeats[n]) for sample in planned]
        samples += planned
    # the first area alone is validated
    val_geometry = geometry | dict(target_pixels=geometry["target_pixels"][:1])
    val_samples = []
    for root in args.val_data:
        val_samples += read_root(root, val_texts_of, val_geometry)[0]
    if alone := [sample.name for sample in val_samples if not sample.controls]:
        raise InputError(f"--val_data: {alone[0]} has no control, so that nothing can be generated; leave it out")
    places = {(sample.root, sample.name.replace("/", "-")) for sample in val_samples} # in train.py's samples/
    if len(places) < len(val_samples):
        raise InputError(f"--val_data {' '.join(args.val_data)}: two pictures of it would have one name (a/b and a-b "
                         "are one, too); rename one, or its folder")
    # the base shall answer the other instructions, not the one that is being trained
    for sample in samples:
        if learned := {prompt.strip() for prompt in preserve_prompts} & set(sample.prompts):
            raise InputError(f"--preserve_prompts: {min(learned)!r} is trained; leave it out")
    print_problems(problems) # now, as the encoding may take hours
    empty = [] # masks that mark nothing or everything: read_facts has hashed them, and dropped them from the overlays
    for s in [*samples, *val_samples]:
        empty += s.contents.keys() - {*s.overlays.values(), *dataset.pictures_of(s)}
    if empty:
        tell(f"warning: {len(empty)} masks mark nothing or everything, for instance {empty[0]}; these pairs are "
             "trained without a mask", file=sys.stderr)
    print_problems(sample_checks.training_warnings(args, samples, val_samples))
    return samples, val_samples, geometry, problems

def write_indexes(args, samples, val_samples, geometry, fingerprints):
    """The index of --data, and that of --val_data, unless they are indexes themselves."""
    for roots, encoded, end in ((args.data, samples, ""), (args.val_data, val_samples, "-val")):
        if encoded and not any(map(is_index, roots)):
            path = Path(args.cache_dir, f"{dataset.run_name(args.model, roots)}{end}.json")
            index_file.write_index(path, encoded, geometry, fingerprints, roots)
            tell(f"{path}: {len(encoded)} samples")

def make_cache(pipe, folder, args, encode=True, verify=False):
    """What a training with the flags of add_data_flags reads -> (samples, validation samples, geometry, areas), the
    same on every process: the sizes at the first target area, as a LoRA's header has them, and all such areas. What the
    cache lacks is encoded, and indexes are written (unless `encode` is False). Ends the script if a sample has an
    error, without --skip_bad. pipe: load_pipeline's; None if all datasets are indexes."""
    # only the first process reads the pictures
    samples, val_samples, geometry, problems = common.on_first_process(lambda: plan_training(pipe, folder, args))
    failed = {}
    writable = keep_from_prune(samples + val_samples if encode else [])
    if encode:
        failed = encode_samples(pipe, samples + val_samples, args, verify)
        # a sample whose encoding failed is no sample
        for one_of in (samples, val_samples):
            one_of[:] = [sample for sample in one_of if failed.keys().isdisjoint(files_of(sample))]
        if common.rank() == 0:
            print_problems(dict.fromkeys(failed.values())) # each once: two files may have met the same problem
    if (problems or failed) and not args.skip_bad:
        sys.exit("correct these samples, or go on without them: --skip_bad" if common.rank() == 0 else 1)
    if not samples:
        raise InputError(f"{' '.join(args.data)}: no usable sample; fix the errors listed above")
    if pipe and Path(args.cache_dir) in writable and common.rank() == 0: # which another machine can train from
        write_indexes(args, samples, val_samples, geometry, pipe.fingerprints)
    common.say(*sample_checks.describe(samples, val_samples))
    areas = geometry["target_pixels"]
    return samples, val_samples, geometry | dict(target_pixels=areas[0]), areas

# ---- command line ----------------------------------------------------------------------------------------------------

def main(args):
    devices.find_devices(args)
    devices.start_processes(args)
    folder, pipe = find_pipeline(args)
    samples, val_samples, *_ = make_cache(pipe, folder, args, verify=args.verify)
    common.say(f"{args.cache_dir}: complete, {len(samples)} samples and {len(val_samples)} for validation. "
               "next: python train.py, with the same flags")
    if dist.is_initialized():
        dist.destroy_process_group()

if __name__ == "__main__":
    main(args)
