"""
A LoRA's file: read, hashed and parsed once, into one object, which predict.py, train.py and tools/convert_lora.py hand
on.

foreign_loras.py brings the tensors of any program's file to one form, and says what is wrong with all others. The last
chapter is about the model that a LoRA was trained on.
"""
import functools
import hashlib
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mode

import safetensors.torch

from common import InputError, MAX_PIXELS, first_words, printable, warn_once
from library.files import tensor_files
from library.lora import foreign_loras
from library.lora.lora_paths import find_lora
from library.lora.peft_config import check_config, lora_error, number_of_file, scale_of_layer, words_of

PLAIN = re.compile(r"transformer\.(.+)\.lora_([AB])\.weight") # a name in a Lora's state: (layer, A or B)
# A file costs no more than its size: a LoRA of all of Qwen-Image's layers has 5,000 tensors, with names of 80 letters.
MOST_TENSORS, MOST_LETTERS = 20_000, 500
MOST_BYTES = 2**35 # of all matrices: rank 512 of all layers in fp32 has half of that
LARGE = 2**30 # bytes: a larger file is not read before all names of its tensors are known

@dataclass
class Lora:
    """A LoRA in memory: what was hashed and checked is what is used, so a file that changes later does not matter."""
    path: Path # the file
    hash: str # sha256 of its bytes
    header: dict # as tensor_files.read_header has it, with the notes of other programs; no tensors
    # {transformer.LAYER.lora_A.weight: (r, inputs), transformer.LAYER.lora_B.weight: (outputs, r)}, on the CPU; None
    # where a script has freed them
    state: dict
    # as diffusers has them: transformer.lora_alpha, transformer.alpha_pattern; and our own entries, train.NAME
    meta: dict

def read_lora(path, rank=64, unchecked=False):
    """What find_lora takes -> Lora. rank: of what is made of a LoKr. unchecked: a file of ours may have another digest
    than it says. InputError if it is no LoRA, damaged, or holds NaN."""
    file = find_lora(path)
    try:
        data, header = read_bytes(file)
    except OSError as e:
        raise InputError(f"{file}: cannot be read ({e.strerror}); mend that, and run the same command again")
    notes = header.get("__metadata__") or {}
    signed = [key for key, text in notes.items() if tensor_files.SIGNED.match(text)]
    if signed and not unchecked: # this project wrote the file, so it can be checked to the bit
        tensors, _ = tensor_files.read_tensors(file, signed[0], data=data, note=warn_once)
    else:
        tensors = load_tensors(file, data)
    state, meta = foreign_loras.convert(file, header, tensors, rank)
    lora = Lora(file, hashlib.sha256(data).hexdigest(), header, state, meta)
    check_geometry(lora)
    warn_no_effect(lora)
    return lora

def read_bytes(file):
    """-> (the bytes of a LoRA's file, its header as tensor_files.read_header has it). InputError says what it is
    instead, or that it is larger than a LoRA, by its header, before the rest is read."""
    with open(file, "rb") as f:
        try:
            header = tensor_files.read_header(f)
            tensors = {key: tensor for key, tensor in header.items() if key != "__metadata__"}
            end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
            if not all(isinstance(text, str) for text in (header.get("__metadata__") or {}).values()):
                raise ValueError("its header's notes are no texts")
        except Exception as e: # a foreign file can fail in any way
            refuse_file(file, first_words(e))
        try:
            refuse_header(header)
        except ValueError as e:
            raise lora_error(file, first_words(e))
        except Exception as e:
            refuse_file(file, first_words(e))
        size = f.tell() + end
        if size != f.seek(0, 2):
            refuse_file(file, f"its header is for {size:,} bytes")
        if size > LARGE: # no LoRA, or one that takes a while
            foreign_loras.group_by_layer(file, tensors)
        f.seek(0)
        return f.read(), header

def refuse_file(file, reason):
    tensor_files.refuse_other_kind(file, reason, functools.partial(lora_error, file), "give a LoRA in .safetensors")

def refuse_header(header):
    """ValueError for more tensors, or longer names, than a LoRA has, before a regex sees them; and for larger matrices,
    before one is read: a file with holes takes no place on the disk. header: tensor_files.read_header's. Raises
    anything for one that is none."""
    names = header.keys() - {"__metadata__"}
    longest = max(names, key=len, default="")
    if len(names) > MOST_TENSORS or len(longest) > MOST_LETTERS:
        raise ValueError(f"it has {len(names):,} tensors, and names of up to {len(longest):,} letters "
                         f"({longest[:60]} ...)")
    total = 0
    for key in names:
        if foreign_loras.PARTS.fullmatch(key): # a whole model, which may be larger, gets a better line
            shape, (begin, end) = header[key]["shape"], header[key]["data_offsets"]
            total += max(4 * math.prod(shape), end - begin)
            if max(shape, default=0) > foreign_loras.MOST_WIDTH or total > MOST_BYTES:
                raise ValueError(f"its matrices are larger than a LoRA's ({key} is {shape})")

def load_tensors(file, data):
    """-> {name: tensor}, sorted, as a file has any order."""
    try:
        return dict(sorted(safetensors.torch.load(data).items()))
    except safetensors.SafetensorError as e:
        refuse_file(file, first_words(e))
    except Exception as e: # a dtype that torch lacks
        raise lora_error(file, f"its tensors cannot be read ({first_words(e)})")

# ---- what a LoRA tells -----------------------------------------------------------------------------------------------

def check_geometry(lora):
    """InputError for sizes of its training that are none: they count as much as the flags --target_pixels,
    --control_pixels and --upscale."""
    geometry = lora.meta.get("train.geometry")
    if geometry is None:
        return
    wanted = {"target_pixels", "control_pixels", "upscale"}
    if not isinstance(geometry, dict) or geometry.keys() != wanted or type(geometry["upscale"]) is not bool:
        raise lora_error(lora.path, f"train.geometry in its header wants {', '.join(sorted(wanted))}, the last of them "
                         "true or false")
    for name in ("target_pixels", "control_pixels"):
        area = geometry[name]
        if area != "native" and (type(area) is not int or not 32 * 32 <= area <= MAX_PIXELS):
            raise lora_error(lora.path, f"{name} {words_of(area)} of train.geometry in its header is no area")

def warn_no_effect(lora):
    """A line for a LoRA that changes nothing, or does the opposite of what was trained."""
    alphas = [lora.meta["transformer.lora_alpha"], *lora.meta["transformer.alpha_pattern"].values()]
    if not any(a.any() and b.any() for a, b in matrices_of(lora).values()):
        warn_once(f"warning: {lora.path}: has no effect: each layer's lora_A or lora_B is zero, as before the first "
                  "step of a training")
    elif not any(alphas):
        warn_once(f"warning: {lora.path}: has no effect: its alpha is 0")
    elif min(alphas) < 0:
        warn_once(f"warning: {lora.path}: has a negative alpha, {min(alphas):g}, so it does the opposite of what was "
                  "trained")

def matrices_of(lora):
    """-> {layer: [lora_A (r, inputs), lora_B (outputs, r)]}."""
    state = lora.state
    layers = [key[len("transformer."):-len(".lora_A.weight")] for key in state if key.endswith(".lora_A.weight")]
    matrices = {}
    for layer in layers:
        matrices[layer] = [state[f"transformer.{layer}.lora_{half}.weight"] for half in "AB"]
    return matrices

def config_of(lora):
    """-> LoraConfig's arguments: layers and ranks are those of the tensors, alpha is the metadata's, or else the
    rank."""
    matrices = matrices_of(lora)
    ranks = {layer: len(matrices[layer][0]) for layer in sorted(matrices)} # safetensors has any order
    most = mode(ranks.values())
    patterns = {} # ^: these layers and no others. One pattern for each rank, as peft tries all of them for each layer
    for rank in {*ranks.values()} - {most}:
        patterns[f"^({'|'.join(layer for layer in ranks if ranks[layer] == rank)})"] = rank
    config = dict(r=most, lora_alpha=most, rank_pattern=patterns, alpha_pattern=patterns, target_modules=list(ranks))
    if "transformer.lora_alpha" in lora.meta:
        config.update(lora_alpha=lora.meta["transformer.lora_alpha"],
                      alpha_pattern=lora.meta["transformer.alpha_pattern"])
    return config

def with_prefix(prefix, named):
    """{name: value} -> {prefix.name: value}."""
    return {f"{prefix}.{name}": value for name, value in named.items()}

# ---- writing: files for use, which say by their tensors alone what they change ---------------------------------------

# Many programs read no header, and some no alpha tensors, but all of them take a missing alpha for the rank. So each
# file that we write has the scale (alpha / rank) in lora_B, and an alpha that is the rank.

def scales_of(transformer):
    """-> {layer: scale} of its adapter "default"."""
    return {name: module.scaling["default"] for name, module in transformer.named_modules()
            if "default" in getattr(module, "scaling", {})}

def write_lora(path, state, train, mark=b""):
    """Writes a LoRA whose scales are 1 as diffusers' file. Its header has no other fields of LoraConfig than decide
    something, as an older peft refuses a newer one's. state: as in Lora; train: a dictionary of our own entries; mark:
    as for write_file."""
    config = config_of(Lora(path, "", {}, state, {}))
    meta = with_prefix("transformer", config) | with_prefix("train", train)
    tensor_files.write_tensors(path, state, meta, "lora_adapter_metadata", mark, notes_of(path, config["r"], train))

def notes_of(path, rank, train):
    """-> {name: text} of a header, as managers and other trainers read it: github.com/Stability-AI/ModelSpec, and
    kohya's ss_. train: our entries of the LoRA, of which `run` is its title, or else the file's name."""
    notes = {"modelspec.sai_model_spec": "1.0.0",
             "modelspec.implementation": "https://github.com/huggingface/diffusers",
             "modelspec.title": train.get("run") or path.stem, "ss_network_dim": rank, "ss_network_alpha": rank,
             "ss_base_model_version": "qwen_image_edit"}
    for name, kind in ARCHITECTURES.items():
        if kind == (train.get("pipeline"), train.get("zero_cond_t")):
            notes["modelspec.architecture"] = f"{name}/lora"
    if "date" in train:
        notes["modelspec.date"] = train["date"]
    return {name: printable(value) for name, value in notes.items()}

def unfold(lora):
    """-> a LoRA for a training that goes on from it. The scales that predict.save_lora has folded into lora_B become
    alphas again: the change of the weights stays, and a step makes of it what it made of it in its run. InputError for
    an entry that cannot be ours."""
    if "train.folded" not in lora.meta:
        return lora
    file, folded = lora.path, lora.meta["train.folded"]
    alphas, state = {}, dict(lora.state)
    try:
        matrices = matrices_of(lora)
        config = {key.removeprefix("transformer."): value for key, value in lora.meta.items()}
        config = check_config(file, config, len(matrices))
        for layer, (a, b) in matrices.items():
            # of a file of ours the scale by its config is 1 now; another program may have changed its alpha
            own = scale_of_layer(file, config, layer, len(a))
            scale = number_of_file(folded[layer], f"that of {layer}")
            if min(abs(scale), abs(own)) < 1e-6: # (number_of_file knows what is too large)
                raise ValueError(f"that of {layer} is {scale:g}")
            alphas[layer] = number_of_file(own * scale * len(a), f"the alpha of {layer}")
            state[f"transformer.{layer}.lora_B.weight"] = b = b.float() / scale
            if not b.isfinite().all():
                raise ValueError(f"lora_B of {layer} would overflow")
    except (ArithmeticError, KeyError, TypeError, ValueError) as e:
        raise lora_error(file, f"its entry train.folded is no scale of 1e-6 to 1e6 for each layer ({first_words(e)})",
                         "take another copy, or a checkpoint of its run")
    train = {key: value for key, value in lora.meta.items() if key.startswith("train.")}
    return replace(lora, state=state, meta=foreign_loras.alpha_meta(alphas) | train)

# ---- the model that a LoRA was trained on ----------------------------------------------------------------------------

# A difference is no error, as mixing may be wanted, such as a LoRA of -2509 on -2511. Files of other programs say
# nothing, but for musubi-tuner's. (Weights are not compared: a merged model, or a copy in fewer bits, is of the same
# kind.)

PIPELINES = dict(QwenImageEditPipeline="v1", QwenImageEditPlusPipeline="Plus")
# modelspec.architecture of musubi-tuner: the pipeline, and whether it is a 2511
ARCHITECTURES = {"Qwen-Image-Edit": ("QwenImageEditPipeline", False),
                 "Qwen-Image-Edit-Plus": ("QwenImageEditPlusPipeline", False),
                 "Qwen-Image-Edit-2511": ("QwenImageEditPlusPipeline", True)}

def base_of(model, transformer, folder, transformer_folder):
    """-> what a LoRA's file says of its base: the flags --model and --transformer, the pipeline's class, and whether
    the transformer is that of a 2511. The folders are --model's, and find_transformer's."""
    files = folder / "model_index.json", transformer_folder / "transformer/config.json"
    index, config = [json.loads(file.read_bytes()) for file in files] # which cache.find_model has looked at
    named = dict(model=model, transformer=transformer) if transformer else dict(model=model)
    return named | dict(pipeline=index["_class_name"], zero_cond_t=bool(config.get("zero_cond_t")))

def warn_other_base(loras, here):
    """A line for each Lora that was trained on a base of another kind, as far as it tells. here: base_of's."""
    for lora in loras:
        trained = training_of(lora)
        # what is not told is taken to be the same
        kind = {name: trained.get(name, here[name]) for name in ("pipeline", "zero_cond_t")}
        if kind != {name: here[name] for name in kind}:
            warn_once(f"warning: {lora.path}: was trained on {name_of(trained | kind)}; here is {name_of(here)}, which "
                      "gets its pictures, or their noise level, in another way, so the LoRA may do less, or something "
                      "else")

def training_of(lora):
    """-> what a LoRA tells of its base: base_of's entries, as far as they are of the right kind: a foreign header may
    hold anything."""
    notes = lora.header.get("__metadata__") or {}
    architecture = ARCHITECTURES.get(notes.get("modelspec.architecture", "").removesuffix("/lora"))
    training = dict(zip(("pipeline", "zero_cond_t"), architecture or ()))
    kinds = dict(model=str, transformer=str, pipeline=str, zero_cond_t=bool, model_hash=str, run=str, date=str)
    for name, kind in kinds.items():
        value = lora.meta.get(f"train.{name}")
        if isinstance(value, kind):
            training[name] = value
    return training

def name_of(base):
    """A model in words: its name, and which of the pipelines it has."""
    kind = "2511" if base["zero_cond_t"] else PIPELINES.get(base["pipeline"], base["pipeline"])
    return f"{base.get('transformer') or base.get('model') or 'another model':.200} ({kind:.40})"
