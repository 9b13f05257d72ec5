"""
LoRA files of all programs: diffusers' and ours, kohya, musubi-tuner, ComfyUI, ai-toolkit, OneTrainer, DiffSynth,
LightX2V, peft, LyCORIS.

`convert` brings one to one form, or says in one line what the file is instead. Names come with many prefixes,
with dots or underscores, and with lora_A, lora_down or lora.down for the narrow matrix. A LoKr becomes the nearest LoRA
of rank 64 (tools/convert_lora.py --rank makes another one).

The scale of a layer is alpha / rank (of an rsLoRA: alpha / sqrt(rank)), and the alpha may stand in four places: a
tensor X.alpha, which every program reads as alpha / rank; lora_adapter_metadata, which diffusers writes into the
header; lora_alpha or alpha in a flat header, as LightX2V has it; adapter_config.json, which peft writes beside its
file. Each that is there must say the same; if none is, alpha is the rank. kohya's ss_network_alpha is a note about the
training: musubi-tuner's converter keeps it although it multiplies the alpha into the weights. So it counts only for
files with kohya's names that have lost their alpha tensors.
"""
import functools
import math
import re
from collections import Counter

import torch
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel

import common
from common import first_words, is_inside, read_object, tell, warn_once
from library.files import tensor_files
from library.files.stray_files import read_text
from library.lora.lora_paths import PEFT_FILE
from library.lora.peft_config import (MOST_RANK, check_config, lora_error, number_of_file, refuse_changes,
                                      scale_of_layer, warn_unknown)

PEFT_CONFIG = "adapter_config.json" # beside PEFT_FILE
PREFIXES = re.compile(r"(base_model|model|diffusion_model|transformer|unet|pipe|dit|module|_orig_mod)\.|"
                      r"(lycoris|lora_unet|lora_transformer|lora_dit|unet|transformer(?!_blocks))_")
DTYPES = torch.float32, torch.float16, torch.bfloat16 # of the matrices that are used as they are
# how a tensor's name ends: the matrices of a LoRA, with or without an adapter's name; alpha; those of a LoKr
PARTS = re.compile(r"(.+?)\.(?:lora_(?:linear_layer\.)?|lora\.)(?P<half>A|B|down|up)"
                   r"(?:\.(?!weight$|bias$)\w+)?(?:\.weight)?"
                   r"|(.+)\.(?P<alpha>(?:lora_|network_)?alpha)"
                   r"|(.+)\.(?P<factor>lokr_w[12](?:_[ab])?)(?:\.\w+)?")
HALVES = dict(A="A", down="A", B="B", up="B")
# what is no plain LoRA, by its tensors' names
NO_PLAIN_LORA = {r"dora_scale|lora_magnitude": "a DoRA, whose magnitudes cannot be used here",
                 r"lora_mid|lokr_t2": "a LoRA in Tucker's form (lora_mid, t2), which is for convolutions",
                 r"\.hada_": "a LoHa, which multiplies two LoRAs",
                 r"\.base_layer\.(weight|bias)$": "a whole model that was saved with LoRA layers around its own",
                 r"\.diff(_[bg])?$|\.set_weight$": "differences of whole weights or biases (diff, diff_b), not only a "
                                                "LoRA",
                 r"\.[wb]_norm$": "with trained norms", r"\.b?oft_": "an OFT or BOFT",
                 r"\.[ab][12]\.weight$": "a GLoRA",
                 r"lora_embedding": "a LoRA with token embeddings", r"lora_(B|up)\.(\w+\.)?bias$": "a LoRA with biases",
                 r"lora.*(scale_weight|weight_scale)$": "a LoRA in scaled fp8"}
FLAT = dict(alpha="lora_alpha network_alpha alpha transformer.lora_alpha".split(),
            rank="lora_rank network_dim rank r transformer.r".split())
NOTES = dict(alpha=["ss_network_alpha"], rank=["ss_network_dim"])
MOST_WIDTH = 20_000 # no layer of Qwen-Image has more inputs or outputs; a product of two small matrices could

# ---- names -----------------------------------------------------------------------------------------------------------

@functools.cache
def layer_names():
    """-> {name with _ for each point: name} of the linear layers of Qwen-Image, of its first block for all."""
    with init_empty_weights():
        model = QwenImageTransformer2DModel(num_layers=1, num_attention_heads=1, attention_head_dim=16, in_channels=4,
                                            axes_dims_rope=(4, 6, 6), joint_attention_dim=8)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return {name.replace(".", "_"): name for name in names}

def find_layer(text):
    """A layer's name as its trainer writes it -> ours, or None."""
    text = text.replace("._orig_mod.", ".").removesuffix(".base_layer")
    while prefix := PREFIXES.match(text):
        text = text[prefix.end():]
    text = re.sub(r"\.processor\.(\w+)_lora$", r".\1", text)
    flat = re.sub("_to_out$", "_to_out_0", text.replace(".", "_")) # vLLM-Omni's
    block = re.match(r"transformer_blocks_(\d{1,4})_", flat)
    if not block:
        return layer_names().get(flat)
    name = layer_names().get(flat.replace(f"_{block[1]}_", "_0_", 1))
    return name and name.replace(".0.", f".{int(block[1])}.", 1)

def group_by_layer(file, tensors):
    """{name: tensor} -> {layer: {A, B, alpha, lokr_w1, ...: tensor}}. InputError says what is no LoRA of Qwen-Image."""
    layers, unknown, kinds = {}, [], set()
    for key, tensor in tensors.items():
        key = key.replace("_lora.", ".lora.") if re.search(r"_lora\.(down|up)\.weight$", key) else key
        match = PARTS.fullmatch(key)
        if not match:
            unknown.append(key)
            continue
        part = HALVES.get(match["half"]) or match["factor"] or "alpha"
        kinds.add(part)
        layer = find_layer(match[1] or match[3] or match[5])
        if not layer:
            unknown.append(key)
        elif part in layers.setdefault(layer, {}):
            raise lora_error(file, f"{layer} has two tensors {part}, of which one is {key}", "leave one copy in it")
        else:
            layers[layer][part] = tensor
    for pattern, what in NO_PLAIN_LORA.items():
        keys = [key for key in tensors if re.search(pattern, key)]
        if keys:
            raise lora_error(file, f"{what} ({keys[0]})", "take a plain LoRA")
    if not kinds - {"alpha"}:
        refuse_no_lora(file, tensors)
    if unknown:
        what, pattern = tensor_files.family_of(unknown)
        if what:
            unknown = [key for key in unknown if re.search(pattern, key)] + unknown
        words = f", which looks like {what}" if what else ""
        raise lora_error(file, f"{len(set(unknown))} of {len(tensors)} tensors are no matrices of a LoRA of "
                         f"Qwen-Image's linear layers, for instance {unknown[0]}{words}")
    return layers

def refuse_no_lora(file, tensors):
    """InputError for a file without a LoRA's matrices."""
    if any(re.search(r"transformer_blocks\.\d+\.attn\.add_q_proj\.(weight|bias)$", key) for key in tensors):
        raise lora_error(file, "it holds no LoRA but a whole transformer of Qwen-Image", "give it as --transformer")
    what, _ = tensor_files.family_of(tensors)
    words = f"but {what}" if what else f"(a tensor of it: {min(tensors, default='none')})"
    raise lora_error(file, f"it holds no LoRA {words}")

def as_number(text):
    """A flat header's text as a number; as it is, if it is none."""
    try:
        return float(text)
    except ValueError:
        return text

def flat_config(header, names):
    """A flat header's alpha and rank -> as peft's config; {} without an alpha."""
    alphas = [as_number(header[key]) for key in names["alpha"] if key in header]
    # (kohya's rank may be the word Dynamic)
    ranks = [as_number(header[key]) for key in names["rank"] if re.fullmatch(r"[\d.]+", header.get(key, ""))]
    config = dict(lora_alpha=alphas[0], use_rslora=header.get("use_rslora")) if alphas else {}
    return config | dict(r=ranks[0]) if alphas and ranks else config

def is_peft_s(file, tensors):
    """Whether a file is one of peft's own, which has its config beside it."""
    return file.name == PEFT_FILE or any(key.startswith("base_model.model.") for key in tensors)

def read_configs(file, header, tensors):
    """-> [(where, config)] of diffusers' entry in the header, ours, and peft's config beside the file. InputError if
    one of these, or any other text of the header, says that the file is no plain LoRA."""
    refuse_changes(file, "its header", header)
    texts = {f"{key} in its header": text for key, text in header.items()}
    if is_peft_s(file, tensors) and (file.parent / PEFT_CONFIG).is_file():
        if not is_inside(file.parent / PEFT_CONFIG, file.parent): # an error line could quote it
            raise lora_error(file, f"{PEFT_CONFIG} beside it is a link that leads out of its folder", "put it there")
        texts[f"{PEFT_CONFIG} beside it"] = read_text(file.parent / PEFT_CONFIG)
    configs = []
    for where, text in texts.items():
        ours = bool(tensor_files.SIGNED.match(text))
        scaled = ours or where.startswith(("lora_adapter_metadata ", PEFT_CONFIG))
        try:
            meta = read_object(text)
        except (ValueError, TypeError, RecursionError) as e:
            if not scaled: # another program's
                continue
            raise lora_error(file, f"{where} cannot be read ({first_words(e)})")
        refuse_changes(file, where, meta)
        if scaled or where.startswith("train "): # what tools/convert_lora.py writes for ComfyUI
            config = {k.removeprefix("transformer."): v for k, v in meta.items()}
            if scaled and not ours:
                warn_unknown(file, where, config)
            configs.append((where, config))
    return configs

def find_scales(file, header, tensors, configs):
    """-> [(where, a config that says alpha)] but for the tensors' own. configs: read_configs'."""
    sources = [*configs, ("alpha in its header", flat_config(header, FLAT))]
    with_alpha = any(key.endswith("alpha") for key in tensors)
    noted = {} if with_alpha else flat_config(header, NOTES)
    if noted and any("lora_unet_" in key for key in tensors):
        sources.append(("ss_network_alpha in its header", noted))
    elif noted and noted["lora_alpha"] != noted.get("r"):
        warn_once(f"warning: {file}: ss_network_alpha {header['ss_network_alpha']:.20} in its header is taken for a "
                  "note about the training, whose alpha is in the weights, as musubi-tuner's converter puts it there; "
                  "if not, --lora_scale")
    sources = [(where, config) for where, config in sources if {"lora_alpha", "alpha"} & config.keys()]
    if is_peft_s(file, tensors) and not sources and not with_alpha:
        if file.name == PEFT_FILE:
            raise lora_error(file, f"{PEFT_CONFIG} is not beside it, which tells its scale", "put it there")
        warn_once(f"warning: {file}: has peft's names, and {PEFT_CONFIG}, which tells its scale, is not beside it; "
                  "alpha is taken for the rank")
    return sources

def scale_of(layer, parts, rank, configs):
    """-> the scale of a layer. ValueError if two sources differ. rank: of a LoRA's matrices, or None."""
    said = {where: scale_of_layer(where, config, layer, rank) for where, config in configs}
    if "alpha" in parts:
        if parts["alpha"].numel() != 1:
            raise ValueError(f"{layer} has {parts['alpha'].numel()} alphas")
        if parts["alpha"].is_complex() or parts["alpha"].dtype == torch.bool:
            raise ValueError(f"{layer} has an alpha of {parts['alpha'].dtype}")
        if not rank: # a LoKr's: LyCORIS gives one of two whole matrices no scale, and ai-toolkit an alpha of 1e10
            narrow = [parts[name] for name in ("lokr_w2_b", "lokr_w1_b") if name in parts]
            rank = len(narrow[0]) if narrow else None
        said["its alpha tensors"] = 1.0
        if rank:
            alpha = number_of_file(parts["alpha"].float().mean().item(), f"the alpha of {layer}")
            said["its alpha tensors"] = alpha / rank
    values = list(said.values())
    # alpha tensors may be rounded to bf16 or fp8
    if any(not math.isclose(value, values[0], rel_tol=0.05 if "alpha" in parts else 1e-6) for value in values):
        words = ", ".join(f"{value:g} by {where}" for where, value in said.items())
        raise ValueError(f"two sources tell different scales of {layer}: {words}")
    return values[0] if values else 1.0

# ---- LoKr: another form of a change of the weights -------------------------------------------------------------------
# A LoKr adds the Kronecker product of two small matrices to a weight, which may have a high rank. The nearest LoRA of a
# rank is the first part of the singular value decomposition (Eckart and Young 1936): that of a Kronecker product is the
# Kronecker product of two small ones.

def decompose(factors, rank):
    """The matrices of a layer -> U (outputs, n), S (n,), V (n, inputs), where U diag(S) V is the nearest matrix of
    rank n <= `rank` to the change of its weight; and how far off it is, and how large the change is, both squared."""
    f = {name: tensor.double() for name, tensor in factors.items()}
    refuse_large(f)
    (u1, s1, v1), (u2, s2, v2) = [
        torch.linalg.svd(f[w], full_matrices=False) if w in f else svd_of_product(f[f"{w}_a"], f[f"{w}_b"])
        for w in ("lokr_w1", "lokr_w2")]
    s = torch.kron(s1, s2) # not sorted
    largest = s.topk(min(rank, len(s))).indices
    of_1, of_2 = largest // len(s2), largest % len(s2)
    u = torch.einsum("in,jn->ijn", u1[:, of_1], u2[:, of_2]).flatten(0, 1)
    v = torch.einsum("ni,nj->nij", v1[of_1], v2[of_2]).flatten(1)
    size = s.square().sum().item()
    return u, s[largest], v, max(0, size - s[largest].square().sum().item()), size

def svd_of_product(a, b):
    """-> U, S, V of a @ b, without that matrix, which two narrow ones can make as large as they like."""
    (q_a, r_a), (q_b, r_b) = torch.linalg.qr(a), torch.linalg.qr(b.T)
    u, s, v = torch.linalg.svd(r_a @ r_b.T, full_matrices=False)
    return q_a @ u, s, v @ q_b.T

def refuse_large(f):
    """ValueError for a change of more outputs or inputs than a layer has."""
    outputs, inputs = 1, 1
    for w in ("lokr_w1", "lokr_w2"):
        left, right = (f[w], f[w]) if w in f else (f[f"{w}_a"], f[f"{w}_b"])
        outputs, inputs = outputs * len(left), inputs * right.shape[1]
    if max(outputs, inputs) > MOST_WIDTH:
        raise ValueError(f"{outputs:,} outputs and {inputs:,} inputs, and no layer has more than {MOST_WIDTH:,}")

def relative_error(lost, size):
    """-> how far a change of the weights is off, as a share of it. lost, size: both squared."""
    return math.sqrt(lost / max(size, 1e-300))

def error_in_words(off):
    """{layer: (lost, size) for relative_error} -> the relative error of all layers, and in words."""
    mean = relative_error(*map(sum, zip(*off.values())))
    worst, layer = max((relative_error(*errors), layer) for layer, errors in off.items())
    return mean, f"{mean:.2%} off, at worst {worst:.2%} ({layer})"

def is_lokr(header):
    """Whether a file with this header is a LoKr."""
    return "lokr_" in " ".join(header)

# ---- to one form -----------------------------------------------------------------------------------------------------

def convert(file, header, tensors, rank):
    """A LoRA's file -> (state dict {transformer.LAYER.lora_A.weight: (r, inputs), ....lora_B.weight: (outputs, r)},
    metadata: transformer.lora_alpha, transformer.alpha_pattern, and our train. entries). header: as
    tensor_files.read_header has it; tensors: {name: tensor}; rank: of what is made of a LoKr. InputError says what the
    file is instead."""
    tensors = dict(sorted(tensors.items())) # a file has any order
    notes = header.get("__metadata__") or {}
    said = read_configs(file, notes, tensors)
    layers = group_by_layer(file, tensors)
    configs = find_scales(file, notes, tensors, said)
    train = {}
    for _, config in said:
        train |= {k: v for k, v in config.items() if k.startswith("train.")}
    state, alphas, off = {}, {}, {}
    factored = is_lokr(header)
    each = common.progress("decomposing", layers.items(), unit=" layers") if factored else layers.items()
    try:
        configs = [(where, check_config(where, config, len(layers))) for where, config in configs]
        for layer, parts in each:
            a, b, alphas[layer], off[layer] = to_lora(layer, parts, rank, configs)
            state[f"transformer.{layer}.lora_A.weight"], state[f"transformer.{layer}.lora_B.weight"] = a, b
    except ValueError as e:
        raise lora_error(file, first_words(e))
    except KeyError as e: # of decompose
        raise lora_error(file, f"{layer} has no {e.args[0]}")
    except Exception as e: # a foreign file can fail in any way
        raise lora_error(file, f"{layer}: {first_words(e)}")
    if factored and common.rank() == 0:
        tell(f"{file}: a LoRA of at most rank {rank} for its {len(layers)} layers; its change of the weights is "
             f"{error_in_words(off)[1]}; a larger --rank of tools/convert_lora.py is nearer")
    without = [layer for layer, parts in layers.items() if "alpha" not in parts]
    if without and len(without) < len(layers) and not configs:
        warn_once(f"warning: {file}: {len(without)} of its {len(layers)} layers have no alpha tensor, for instance "
                  f"{without[0]}; theirs is taken for the rank, as ComfyUI does")
    return state, alpha_meta(alphas) | train

def to_lora(layer, parts, rank, configs):
    """A layer's tensors -> (lora_A (r, inputs), lora_B (outputs, r), alpha, (lost, size) for relative_error).
    ValueError says what is wrong."""
    matrices = {name: to_matrix(layer, name, tensor) for name, tensor in parts.items() if name != "alpha"}
    if not {"A", "B"} & matrices.keys():
        if not matrices:
            raise ValueError(f"{layer} has an alpha and no matrices")
        scale = scale_of(layer, parts, None, configs)
        u, s, v, *off = decompose(matrices, rank)
        dtype, root = next(iter(matrices.values())).dtype, s.sqrt() # in equal shares, so that half precision holds both
        a, b = (root[:, None] * v).to(dtype), (scale * u * root).to(dtype)
        if not a.isfinite().all() or not b.isfinite().all():
            raise ValueError(f"{layer} changes its weight by more than {dtype} holds")
        return a, b, len(s), [scale**2 * n for n in off]
    if matrices.keys() != {"A", "B"}:
        words = " and ".join(f"lora_{name}" for name in sorted(matrices))
        raise ValueError(f"{layer} has {words}, and not just lora_A and lora_B")
    a, b = matrices["A"], matrices["B"]
    if len(a) > MOST_RANK:
        raise ValueError(f"{layer} has rank {len(a):,}, and {MOST_RANK:,} is the most")
    if len(a) != b.shape[1]:
        raise ValueError(f"{layer} has matrices of different ranks, {list(a.shape)} and {list(b.shape)}")
    return a, b, scale_of(layer, parts, len(a), configs) * len(a), (0, 0)

def to_matrix(layer, name, tensor):
    """A matrix of fp32, fp16 or bf16; some programs write those of a linear layer as of a 1x1 convolution."""
    if tensor.ndim == 4 and tensor.shape[2:] == (1, 1):
        tensor = tensor[..., 0, 0]
    if tensor.ndim != 2 or not tensor.is_floating_point() or not tensor.numel():
        raise ValueError(f"{layer}: {name} is {list(tensor.shape)} of {tensor.dtype}, no matrix")
    if tensor.dtype not in DTYPES: # fp8, fp64
        tensor = tensor.float()
    if not tensor.isfinite().all():
        raise ValueError(f"NaN or Inf in {layer} ({name}): its training diverged")
    return tensor.contiguous()

def alpha_meta(alphas):
    """{layer: alpha} -> diffusers' metadata: the most frequent one, and one pattern for each other."""
    most = Counter(alphas.values()).most_common(1)[0][0]
    layers = {} # {another alpha: its layers}
    for layer, alpha in alphas.items():
        if alpha != most:
            layers.setdefault(alpha, []).append(re.escape(layer))
    patterns = {f"^({'|'.join(names)})": alpha for alpha, names in layers.items()}
    return {"transformer.lora_alpha": most, "transformer.alpha_pattern": patterns}
