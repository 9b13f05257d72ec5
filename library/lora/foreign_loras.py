"""
LoRA files of other programs: kohya, musubi-tuner, ComfyUI, ai-toolkit, OneTrainer, DiffSynth, LightX2V, peft, LyCORIS.

`read` brings one to diffusers' form, or says in one line what the file is instead. Names come with many prefixes, with
dots or underscores, and with lora_A, lora_down or lora.down for the narrow matrix. A LoKr or LoHa becomes the nearest
LoRA of rank 64 (tools/convert_lora.py --rank makes another one).

The scale of a layer is alpha / rank (of an rsLoRA: alpha / sqrt(rank)), and the alpha may stand in four places: a
tensor X.alpha, which every program reads as alpha / rank; lora_adapter_metadata, which diffusers writes into the
header; lora_alpha or alpha in a flat header, as LightX2V has it; adapter_config.json, which peft writes beside its
file. Each that is there must say the same; if none is, alpha is the rank. kohya's ss_network_alpha is a note about the
training: musubi-tuner's converter keeps it although it multiplies the alpha into the weights. So it counts only for
files with kohya's names that have lost their alpha tensors.
"""
import functools
import io
import math
import re
from collections import Counter

import safetensors.torch
import torch
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel

import common
from common import InputError, MAX_PIXELS, first_words, is_inside, read_object, tell, warn_once
from library.cli.flag_types import MOST_ALPHA, MOST_RANK
from library.files import sniff, tensor_files
from library.files.stray_files import read_text
from library.lora.layer_patterns import PATTERNS, number_of_file, of_layer, read_patterns, words_of
from library.lora.lora_paths import PEFT_FILE

PEFT_CONFIG = "adapter_config.json" # beside PEFT_FILE
PREFIXES = re.compile(r"(base_model|model|diffusion_model|transformer|unet|pipe|dit|module|_orig_mod)\.|"
                      r"(lycoris|lora_unet|lora_transformer|lora_dit|unet|transformer(?!_blocks))_")
# the name of a tensor in diffusers' form: (layer, A or B)
PLAIN = re.compile(r"transformer\.((?:transformer_blocks\.\d+\.(?:attn|(?:img|txt)_(?:mlp|mod))\.|time_text_embed\.|"
                   r"norm_out\.|img_in|txt_in|proj_out)[\w.]{0,99})\.lora_([AB])\.weight")
PLAIN_DTYPES = torch.float32, torch.float16, torch.bfloat16
# how a tensor's name ends: the matrices of a LoRA, with or without an adapter's name; alpha; those of a LoKr or LoHa
PARTS = re.compile(r"(.+?)\.(?:lora_(?:linear_layer\.)?|lora\.)(?P<half>A|B|down|up)"
                   r"(?:\.(?!weight$|bias$)\w+)?(?:\.weight)?"
                   r"|(.+)\.(?P<alpha>(?:lora_|network_)?alpha)"
                   r"|(.+)\.(?P<factor>lokr_w[12](?:_[ab])?|hada_w[12]_[ab])(?:\.\w+)?")
HALVES = dict(A="A", down="A", B="B", up="B")
# what is no plain LoRA, by its tensors' names
OTHERS = {r"dora_scale|lora_magnitude": "a DoRA, whose magnitudes cannot be used here",
          r"lora_mid|lokr_t2|hada_t[12]": "a LoRA in Tucker's form (lora_mid, t2), which is for convolutions",
          r"\.diff(_[bg])?$|\.set_weight$": "differences of whole weights or biases (diff, diff_b), not only a LoRA",
          r"[wb]_norm$": "with trained norms", r"oft_|boft": "an OFT", r"\.[ab][12]\.weight$": "a GLoRA",
          r"lora_embedding": "a LoRA with token embeddings", r"lora_(B|up)\.(\w+\.)?bias$": "a LoRA with biases",
          r"lora.*(scale_weight|weight_scale)$": "a LoRA in scaled fp8"}
FLAT = dict(alpha="lora_alpha network_alpha alpha transformer.lora_alpha".split(),
            rank="lora_rank network_dim rank r transformer.r".split())
NOTES = dict(alpha=["ss_network_alpha"], rank=["ss_network_dim"])
VARIANTS = "use_dora use_qalora alora_invocation_tokens".split()
# A file costs no more than its size: a LoRA of all of Qwen-Image's layers has 5,000 tensors, with names of 80 letters.
# No layer of it has more inputs or outputs than MOST_WIDTH, which a Kronecker product of two small matrices could have.
MOST_TENSORS, MOST_LETTERS, MOST_WIDTH = 20_000, 500, 20_000
MOST_BYTES = 2**35 # of all matrices: rank 512 of all layers in fp32 has half of that
LARGE = 2**30 # bytes: a larger file is not read before all names of its tensors are known
MOST_MATCHED = 10**8 # letters of patterns x layers, which take a second. Ours for all layers have 3e7
LOHA_RANK = 64 # its work grows with the fourth power of it


def check_notes(file, state, meta):
    """A line for a LoRA that changes nothing, by what predict.read_lora returns. InputError for sizes of its training
    that are none: they count as much as the flags --target_pixels, --control_pixels and --upscale."""
    geometry = meta.get("train.geometry")
    if geometry is not None:
        wanted = {"target_pixels", "control_pixels", "upscale"}
        if not isinstance(geometry, dict) or geometry.keys() != wanted or type(geometry["upscale"]) is not bool:
            raise error_of(file, f"train.geometry in its header wants {', '.join(sorted(wanted))}, the last of them "
                           "true or false")
        for name in ("target_pixels", "control_pixels"):
            area = geometry[name]
            if area != "native" and (type(area) is not int or not 32 * 32 <= area <= MAX_PIXELS):
                raise error_of(file, f"{name} {words_of(area)} of train.geometry in its header is no area")
    alphas = [meta.get("transformer.lora_alpha", 1), *(meta.get("transformer.alpha_pattern") or {}).values()]
    if not any(a.any() and b.any() for a, b in matrices_of(state).values()):
        warn_once(f"warning: {file}: has no effect: each layer's lora_A or lora_B is zero, as before the first step of "
                  "a training")
    elif not any(alphas):
        warn_once(f"warning: {file}: has no effect: its alpha is 0")
    elif min(alphas) < 0:
        warn_once(f"warning: {file}: has a negative alpha, {min(alphas):g}, so it does the opposite of what was "
                  "trained")


def matrices_of(state):
    """What predict.read_lora returns -> {layer: [lora_A, lora_B]}."""
    layers = [key[len("transformer."):-len(".lora_A.weight")] for key in state if key.endswith(".lora_A.weight")]
    return {layer: [state[f"transformer.{layer}.lora_{half}.weight"] for half in "AB"] for layer in layers}


def error_of(file, what, remedy="take another file"):
    return InputError(f"{file}: cannot be used as a LoRA: {what}; {remedy}")


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
    flat = text.replace(".", "_")
    block = re.match(r"transformer_blocks_(\d{1,4})_", flat)
    if not block:
        return layer_names().get(flat)
    name = layer_names().get(flat.replace(f"_{block[1]}_", "_0_", 1))
    return name and name.replace(".0.", f".{int(block[1])}.", 1)


def refuse_header(header):
    """ValueError for more tensors, or longer names, than a LoRA has, before a regex sees them; and for larger matrices,
    before one is read: a file with holes takes no place on the disk. header: common.read_header's. Raises anything for
    one that is none."""
    names = header.keys() - {"__metadata__"}
    longest = max(names, key=len, default="")
    if len(names) > MOST_TENSORS or len(longest) > MOST_LETTERS:
        raise ValueError(f"it has {len(names):,} tensors, and names of up to {len(longest):,} letters "
                         f"({longest[:60]} ...)")
    total = 0
    for key in names:
        if PARTS.fullmatch(key): # a whole model, which may be larger, gets a better line
            shape, (begin, end) = header[key]["shape"], header[key]["data_offsets"]
            total += max(4 * math.prod(shape), end - begin)
            if max(shape, default=0) > MOST_WIDTH or total > MOST_BYTES:
                raise ValueError(f"its matrices are larger than a LoRA's ({key} is {shape})")


def sort_tensors(file, tensors):
    """{name: tensor} -> {layer: {A, B, alpha, lokr_w1, ...: tensor}}. InputError says what is no LoRA of Qwen-Image."""
    layers, strange, kinds = {}, [], Counter()
    for key, tensor in tensors.items():
        key = key.replace("_lora.", ".lora.") if re.search(r"_lora\.(down|up)\.weight$", key) else key
        found = PARTS.fullmatch(key)
        if not found:
            strange.append(key)
            continue
        part = HALVES.get(found["half"]) or found["factor"] or "alpha"
        kinds[part] += 1
        layer = find_layer(found[1] or found[3] or found[5])
        if not layer:
            strange.append(key)
        elif part in layers.setdefault(layer, {}):
            raise error_of(file, f"{layer} has two tensors {part}, of which one is {key}", "leave one copy in it")
        else:
            layers[layer][part] = tensor
    for pattern, what in OTHERS.items():
        if found := [key for key in tensors if re.search(pattern, key)]:
            raise error_of(file, f"{what} ({found[0]})", "take a plain LoRA")
    if not kinds.keys() - {"alpha"}:
        refuse_model(file, tensors)
    if strange:
        what, pattern = sniff.family(strange)
        if what:
            strange = [key for key in strange if re.search(pattern, key)] + strange
        words = f", which looks like {what}" if what else ""
        raise error_of(file, f"{len(set(strange))} of {len(tensors)} tensors are of no linear layer of Qwen-Image, for "
                       f"instance {strange[0]}{words}")
    return layers


def refuse_model(file, tensors):
    """InputError for a file without a LoRA's matrices."""
    if any(re.search(r"transformer_blocks\.\d+\.attn\.add_q_proj\.", key) for key in tensors):
        raise error_of(file, "it holds no LoRA but a whole transformer of Qwen-Image", "give it as --transformer")
    what, _ = sniff.family(tensors)
    words = f"but {what}" if what else f"(a tensor of it: {min(tensors, default='none')})"
    raise error_of(file, f"it holds no LoRA {words}")


def of_config(where, config, layer, rank):
    """The scale of a layer by peft's config, which stands at `where`. rank: the tensors', or None."""
    alpha = config.get("lora_alpha", config.get("alpha"))
    alpha = number_of_file(of_layer(config["alpha_pattern"], layer, alpha), "lora_alpha")
    said = number_of_file(of_layer(config["rank_pattern"], layer, config.get("r", rank)), "r")
    if rank and said != rank and not config.get("ours"): # see note_ranks
        raise ValueError(f"{where} says rank {said:g} for {layer}, and its tensors have {rank}")
    if said < 1:
        raise ValueError(f"{where} says rank {said:g} for {layer}")
    return alpha / (math.sqrt(said) if config["use_rslora"] else said)


def note_ranks(file, configs, state):
    """A line if another program has changed the ranks of a file of ours. The header then tells the old ones, and the
    scale alpha / old rank is kept: who resizes a LoRA (sd-scripts, ComfyUI's nodes) keeps the product of its matrices,
    and writes alpha tensors if it knows of another scale. (Stock diffusers cannot load such a file, and in ComfyUI,
    which does not read the header, the scale is 1, as it is by the header of a finished run.)"""
    for where, config in configs:
        for layer in state if config.get("ours") else ():
            rank, said = len(state[layer]), of_layer(config["rank_pattern"], layer, config.get("r"))
            if said and said != rank:
                scale = of_config(where, config, layer, rank)
                return warn_once(f"warning: {file}: {layer} has rank {rank} now, and {said:g} by its header; the scale "
                                 f"of the header is kept, {scale:g}; if that is too much or too little, --lora_scale")


def checked(where, config, layers):
    """A config that says alpha, its patterns read, and use_rslora as true or false. ValueError says what is wrong, or
    that it would take long to look up so many layers in the patterns."""
    patterns = {name: read_patterns(config.get(name), f"{name} of {where}") for name in PATTERNS}
    letters = sum(len(regex.pattern) for regex, _ in sum(patterns.values(), []))
    if letters * layers > MOST_MATCHED:
        raise ValueError(f"the patterns of {where} have too many names: {letters:,} letters for {layers:,} layers")
    root = config.get("use_rslora") or False
    if isinstance(root, str): # in a flat header
        root = {"true": True, "1": True, "false": False, "0": False, "none": False}.get(root.lower())
    if type(root) is not bool:
        raise ValueError(f"use_rslora of {where} is neither true nor false")
    return config | patterns | dict(use_rslora=root)


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


def find_configs(file, header, tensors):
    """-> [(where, a config that says alpha)] but for the tensors' own, and our entries of the header."""
    # diffusers' entry, and what tools/convert_lora.py writes for ComfyUI
    texts = {f"{key} in its header": header.get(key, "{}") for key in ("lora_adapter_metadata", "train")}
    peft_s = file.name == PEFT_FILE or any(key.startswith("base_model.model.") for key in tensors)
    if peft_s and (file.parent / PEFT_CONFIG).is_file():
        if not is_inside(file.parent / PEFT_CONFIG, file.parent): # an error line could quote it
            raise error_of(file, f"{PEFT_CONFIG} beside it is a link that leads out of its folder", "put it there")
        texts[f"{PEFT_CONFIG} beside it"] = read_text(file.parent / PEFT_CONFIG)
    sources, train = [], {}
    for where, text in texts.items():
        try:
            meta = read_object(text)
        except (ValueError, TypeError, RecursionError) as e:
            if where.startswith("train "): # another program's
                continue
            raise error_of(file, f"{where} cannot be read ({first_words(e)})")
        train |= {k: v for k, v in meta.items() if k.startswith("train.")}
        config = {k.removeprefix("transformer."): v for k, v in meta.items()}
        sources.append((where, config | dict(ours=bool(tensor_files.SIGNED.match(text)))))
    sources.append(("alpha in its header", flat_config(header, FLAT)))
    with_alpha = any(key.endswith("alpha") for key in tensors)
    noted = {} if with_alpha else flat_config(header, NOTES)
    if noted and any("lora_unet_" in key for key in tensors):
        sources.append(("ss_network_alpha in its header", noted))
    elif noted and noted["lora_alpha"] != noted.get("r"):
        warn_once(f"warning: {file}: ss_network_alpha {header['ss_network_alpha']:.20} in its header is taken for a "
                  "note about the training, whose alpha is in the weights, as musubi-tuner's converter puts it there; "
                  "if not, --lora_scale")
    for where, config in sources:
        for name in VARIANTS:
            if config.get(name):
                raise error_of(file, f"{where} says {name}, which is no plain LoRA")
    sources = [(where, config) for where, config in sources if {"lora_alpha", "alpha"} & config.keys()]
    if peft_s and not sources and not with_alpha:
        if file.name == PEFT_FILE:
            raise error_of(file, f"{PEFT_CONFIG} is not beside it, which tells its scale", "put it there")
        warn_once(f"warning: {file}: has peft's names, and {PEFT_CONFIG}, which tells its scale, is not beside it; "
                  "alpha is taken for the rank")
    return sources, train


def scale_of(layer, parts, rank, configs):
    """-> the scale of a layer. ValueError if two sources differ. rank: of a LoRA's matrices, or None."""
    said = {where: of_config(where, config, layer, rank) for where, config in configs}
    if "alpha" in parts:
        if parts["alpha"].numel() != 1:
            raise ValueError(f"{layer} has {parts['alpha'].numel()} alphas")
        if parts["alpha"].is_complex() or parts["alpha"].dtype == torch.bool:
            raise ValueError(f"{layer} has an alpha of {parts['alpha'].dtype}")
        alpha = number_of_file(parts["alpha"].float().mean().item(), f"the alpha of {layer}")
        if rank:
            said["its alpha tensors"] = alpha / rank
        else: # LyCORIS: a LoKr of two whole matrices has no scale
            narrow = [parts[name] for name in ("lokr_w2_b", "lokr_w1_b", "hada_w1_b") if name in parts]
            said["its alpha tensors"] = alpha / len(narrow[0]) if narrow else 1.0
    values = list(said.values())
    # alpha tensors may be rounded to bf16 or fp8
    if any(not math.isclose(value, values[0], rel_tol=0.05 if "alpha" in parts else 1e-6) for value in values):
        words = ", ".join(f"{value:g} by {where}" for where, value in said.items())
        raise ValueError(f"two sources tell different scales of {layer}: {words}")
    return values[0] if values else 1.0


# ---- LoKr and LoHa: other forms of a change of the weights -----------------------------------------------------------
# A LoKr adds the Kronecker product of two small matrices to a weight, a LoHa the elementwise product of two LoRAs. Both
# may have a high rank. The nearest LoRA of a rank is the first part of the singular value decomposition (Eckart and
# Young 1936), which both allow without one of the whole matrix: that of a Kronecker product is the Kronecker product of
# two small ones; a LoHa of rank r is a product of two matrices with r * r columns and rows.

def decompose(factors, rank):
    """The matrices of a layer -> U (outputs, n), S (n,), V (n, inputs), where U diag(S) V is the nearest matrix of
    rank n <= `rank` to the change of its weight; and how far off it is, and how large the change is, both squared."""
    f = {name: tensor.double() for name, tensor in factors.items()}
    refuse_size(f)
    if "hada_w1_a" in f:
        a = torch.einsum("oi,oj->oij", f["hada_w1_a"], f["hada_w2_a"]).flatten(1)
        b = torch.einsum("io,jo->ijo", f["hada_w1_b"], f["hada_w2_b"]).flatten(0, 1)
        kept = slice(rank)
        u, s, v = svd_of_product(a, b, kept)
    else:
        (u1, s1, v1), (u2, s2, v2) = [
            torch.linalg.svd(f[w], full_matrices=False) if w in f else svd_of_product(f[f"{w}_a"], f[f"{w}_b"])
            for w in ("lokr_w1", "lokr_w2")]
        s = torch.kron(s1, s2) # not sorted
        kept = s.topk(min(rank, len(s))).indices
        of_1, of_2 = kept // len(s2), kept % len(s2)
        u = torch.einsum("in,jn->ijn", u1[:, of_1], u2[:, of_2]).flatten(0, 1)
        v = torch.einsum("ni,nj->nij", v1[of_1], v2[of_2]).flatten(1)
    size = s.square().sum().item()
    return u, s[kept], v, max(0, size - s[kept].square().sum().item()), size


def svd_of_product(a, b, kept=slice(None)):
    """-> U, S, V of a @ b, without that matrix, which two narrow ones can make as large as they like; of U and V those
    columns and rows that are kept."""
    (q_a, r_a), (q_b, r_b) = torch.linalg.qr(a), torch.linalg.qr(b.T)
    u, s, v = torch.linalg.svd(r_a @ r_b.T, full_matrices=False)
    return q_a @ u[:, kept], s, v[kept] @ q_b.T


def refuse_size(f):
    """ValueError for a change of more outputs or inputs than a layer has, or a LoHa whose product would take hours."""
    if "hada_w1_a" in f:
        outputs, inputs = len(f["hada_w1_a"]), f["hada_w1_b"].shape[1]
        ranks = len(f["hada_w1_b"]), len(f["hada_w2_b"])
        if math.prod(ranks) > LOHA_RANK**2:
            raise ValueError(f"a LoHa of rank {max(ranks)}, and {LOHA_RANK} is the most")
    else:
        outputs, inputs = 1, 1
        for w in ("lokr_w1", "lokr_w2"):
            left, right = (f[w], f[w]) if w in f else (f[f"{w}_a"], f[f"{w}_b"])
            outputs, inputs = outputs * len(left), inputs * right.shape[1]
    if max(outputs, inputs) > MOST_WIDTH:
        raise ValueError(f"{outputs:,} outputs and {inputs:,} inputs, and no layer has more than {MOST_WIDTH:,}")


def share(lost, size):
    """-> how far a change of the weights is off, as a share of it. Both squared."""
    return math.sqrt(lost / max(size, 1e-300))


def how_far(off):
    """{layer: `share`'s arguments} -> the share of all layers, and in words."""
    mean = share(*map(sum, zip(*off.values())))
    worst, layer = max((share(*errors), layer) for layer, errors in off.items())
    return mean, f"{mean:.2%} off, at worst {worst:.2%} ({layer})"


def has_factors(header):
    """Whether a file with this header is a LoKr or LoHa."""
    return bool(re.search("lokr_|hada_", " ".join(header)))


# ---- reading ---------------------------------------------------------------------------------------------------------

def read_file(file):
    """-> (the bytes of a LoRA's file, its header as common.read_header has it). InputError says what it is instead, or
    that it is larger than a LoRA, by its header, before the rest is read."""
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
            raise error_of(file, first_words(e))
        except Exception as e:
            refuse_file(file, first_words(e))
        size = f.tell() + end
        if size != f.seek(0, 2):
            refuse_file(file, f"its header is for {size:,} bytes")
        if size > LARGE: # no LoRA, or one that takes a while
            sort_tensors(file, tensors)
        f.seek(0)
        return f.read(), header


def load_tensors(file, data):
    """-> {name: tensor}, sorted, as a file has any order."""
    try:
        return dict(sorted(safetensors.torch.load(data).items()))
    except safetensors.SafetensorError as e:
        refuse_file(file, first_words(e))
    except Exception as e: # a dtype that torch lacks
        raise error_of(file, f"its tensors cannot be read ({first_words(e)})")


def diffusers_meta(notes):
    """-> diffusers' entry of a header's notes {key: text}; None for one that find_configs will refuse."""
    try:
        return read_object(notes.get("lora_adapter_metadata", "{}"))
    except (ValueError, TypeError, RecursionError):
        return None


def is_plain(file, notes, state, meta):
    """Whether a file is as train.py and diffusers write it: of each layer, under diffusers' names, the two matrices of
    the rank that its metadata tells; and one alpha for all. notes: its header's; meta: what diffusers_meta returns."""
    # patterns are regexes, which could search for years, and an alpha may stand in another place
    if meta is None or "alpha" in " ".join(notes) or file.name == PEFT_FILE:
        return False
    if any(meta.get(f"transformer.{field}") for field in PATTERNS):
        return False
    alpha, root = meta.get("transformer.lora_alpha", 1), meta.get("transformer.use_rslora", False)
    if type(alpha) not in (int, float) or type(root) is not bool or not abs(alpha) <= MOST_ALPHA: # NaN, too
        return False
    ranks = {}
    for key, matrix in state.items():
        named = PLAIN.fullmatch(key)
        if not named or matrix.ndim != 2 or matrix.dtype not in PLAIN_DTYPES:
            return False
        ranks.setdefault(named[1], []).append(matrix.shape["AB".index(named[2])])
    for rank, *others in ranks.values():
        if others != [rank] or not 0 < rank == meta.get("transformer.r", rank) <= MOST_RANK:
            return False
    return bool(ranks)


def refuse_file(file, reason):
    sniff.refuse(file, reason, functools.partial(error_of, file), "give a LoRA in .safetensors")


def read(file, data, header, rank=64):
    """A LoRA's file -> (state dict {transformer.LAYER.lora_A.weight: (r, inputs), ....lora_B.weight: (outputs, r)},
    metadata: transformer.lora_alpha, transformer.alpha_pattern, and our train. entries). rank: of what is made of a
    LoKr or LoHa. data, header: what read_file returns. InputError says what the file is instead."""
    if not has_factors(header):
        return convert(file, data, header, rank)
    state, meta = decomposed(file, data, rank)
    return dict(state), dict(meta)


@functools.lru_cache(2) # it takes a minute, and a command reads a file several times
def decomposed(file, data, rank):
    return convert(file, data, tensor_files.read_header(io.BytesIO(data)), rank)


def convert(file, data, header, rank):
    tensors = load_tensors(file, data)
    layers = sort_tensors(file, tensors)
    configs, train = find_configs(file, header.get("__metadata__") or {}, tensors)
    state, alphas, off = {}, {}, {}
    factored = has_factors(header)
    each = common.progress("decomposing", layers.items(), unit=" layers") if factored else layers.items()
    try:
        configs = [(where, checked(where, config, len(layers))) for where, config in configs]
        for layer, parts in each:
            a, b, alphas[layer], off[layer] = to_lora(layer, parts, rank, configs)
            state[f"transformer.{layer}.lora_A.weight"], state[f"transformer.{layer}.lora_B.weight"] = a, b
    except ValueError as e:
        raise error_of(file, first_words(e))
    except Exception as e: # a foreign file can fail in any way
        raise error_of(file, f"{layer}: {first_words(e)}")
    if factored and common.rank() == 0:
        tell(f"{file}: a LoRA of at most rank {rank} for its {len(layers)} layers; its change of the weights is "
             f"{how_far(off)[1]}; a larger --rank of tools/convert_lora.py is nearer")
    note_ranks(file, configs, {layer: state[f"transformer.{layer}.lora_A.weight"] for layer in layers})
    without = [layer for layer, parts in layers.items() if "alpha" not in parts]
    if without and len(without) < len(layers) and not configs:
        warn_once(f"warning: {file}: {len(without)} of its {len(layers)} layers have no alpha tensor, for instance "
                  f"{without[0]}; theirs is taken for the rank, as ComfyUI does")
    return state, meta_of(alphas) | train


def to_lora(layer, parts, rank, configs):
    """A layer's tensors -> (lora_A (r, inputs), lora_B (outputs, r), alpha, `share`'s arguments). ValueError says what
    is wrong."""
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
    if tensor.dtype not in PLAIN_DTYPES: # fp8, fp64
        tensor = tensor.float()
    if not tensor.isfinite().all():
        raise ValueError(f"NaN or Inf in {layer} ({name}): its training diverged")
    return tensor.contiguous()


def meta_of(alphas):
    """{layer: alpha} -> diffusers' metadata: the most frequent one, and one pattern for each other."""
    most = Counter(alphas.values()).most_common(1)[0][0]
    others = {}
    for layer, alpha in alphas.items():
        if alpha != most:
            others.setdefault(alpha, []).append(re.escape(layer))
    patterns = {f"^({'|'.join(names)})": alpha for alpha, names in others.items()}
    return {"transformer.lora_alpha": most, "transformer.alpha_pattern": patterns}


# ---- a finished run's file, for a training that goes on from it ------------------------------------------------------

def unfold(file, state, meta):
    """predict.read_lora's state and metadata of a file -> the same, if predict.save_lora has not folded the scales into
    lora_B; else as in the run's checkpoints: lora_B as it was trained, and each layer's alpha. The change of the
    weights stays, and a step of training makes of it what it makes of the checkpoint's. InputError for an entry that
    cannot be ours."""
    if "train.folded" not in meta:
        return state, meta
    folded, alphas, state = meta["train.folded"], {}, dict(state)
    try:
        layers = matrices_of(state)
        config = {key.removeprefix("transformer."): value for key, value in meta.items()}
        config = checked(file, config, len(layers))
        for layer, (a, b) in layers.items():
            # of a file of ours the scale by its config is 1 now; another program may have changed its alpha
            own = of_config(file, config, layer, len(a)) if "lora_alpha" in config else 1.0
            scale = number_of_file(folded[layer], f"that of {layer}")
            if min(abs(scale), abs(own)) < 1e-6: # (`number` knows what is too large)
                raise ValueError(f"that of {layer} is {scale:g}")
            alphas[layer] = number_of_file(own * scale * len(a), f"the alpha of {layer}")
            state[f"transformer.{layer}.lora_B.weight"] = b = b.float() / scale
            if not b.isfinite().all():
                raise ValueError(f"lora_B of {layer} would overflow")
    except (ArithmeticError, KeyError, TypeError, ValueError) as e:
        raise error_of(file, f"its entry train.folded is no scale of 1e-6 to 1e6 for each layer ({first_words(e)})",
                       "take another copy, or a checkpoint of its run")
    return state, meta_of(alphas) | {key: value for key, value in meta.items() if key.startswith("train.")}
