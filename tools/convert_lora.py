"""
Converts a LoRA: for ComfyUI, to our format (which is diffusers'), or to a complete model into which it is merged.

LORA is what predict.py --lora accepts (a file, a run folder, or user/repo on the hub), or a folder that peft has
written (adapter_model.safetensors and adapter_config.json), or a LoKr or LoHa (of peft, ai-toolkit or LyCORIS), of
which it makes a LoRA of at most --rank: the nearest one, and the command prints how far it is off. ComfyUI can load the
file of a finished run without conversion. Convert a checkpoint for it if it is an rsLoRA, or if --lora_alpha was not
the rank. You can train another LoRA on a merged model.

$ python tools/convert_lora.py out/RUN --to comfyui --out snow.safetensors
$ python tools/convert_lora.py PEFT_FOLDER --to diffusers --out snow.safetensors
$ python tools/convert_lora.py lokr.safetensors --rank 128 --to diffusers --out snow.safetensors
$ python tools/convert_lora.py out/RUN LIGHTNING --scale 0.8 1 --model Qwen/Qwen-Image-Edit-2509 --to model --out merged
$ python predict.py --model merged ...
"""
import contextlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
from common import InputError, number, positive

# torch, predict.py and the like take seconds to import; the functions import them, so that -h and typos do not wait
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIXES = r"^(base_model\.model\.|(model\.)?diffusion_model\.|transformer\.|lycoris_|lora_(unet|transformer)_)"
LARGE = 2**26 # bytes: larger files are linked, not copied

def with_prefix(named):
    """-> this dictionary with the names that diffusers gives to tensors and settings of a transformer's LoRA."""
    return {f"transformer.{k}": v for k, v in named.items()}

# ---- peft's folders --------------------------------------------------------------------------------------------------

def from_peft(folder, file):
    """Converts a folder of peft to a file that predict.py reads. Only peft's config tells the scale of the LoRA."""
    import safetensors.torch
    try:
        config = json.loads((folder / PEFT_CONFIG).read_text())
        tensors = safetensors.torch.load_file(folder / PEFT_FILE)
        state = {k.removeprefix("base_model.model."): v for k, v in tensors.items()}
        meta = {k: config[k] for k in ("rank_pattern", "alpha_pattern", "use_rslora") if k in config}
        meta |= dict(r=config["r"], lora_alpha=config["lora_alpha"], target_modules=sorted({
            k.rsplit(".lora_", 1)[0] for k in state}))
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{folder}: no LoRA of peft ({type(e).__name__}: {e}); "
                         f"it must contain {PEFT_FILE} and {PEFT_CONFIG}")
    common.write_tensors(file, with_prefix(state), with_prefix(meta), "lora_adapter_metadata")

# ---- LoKr and LoHa: other forms of a change of the weights -----------------------------------------------------------
# A LoKr adds the Kronecker product of two small matrices to a weight, a LoHa the elementwise product of two LoRAs. Both
# may have a high rank. The nearest LoRA of a rank is the first part of the singular value decomposition (Eckart and
# Young 1936), which both allow without one of the whole matrix: that of a Kronecker product is the Kronecker product of
# two small ones; a LoHa of rank r is a product of two matrices with r * r columns and rows.

def find_factors(path):
    """-> the .safetensors file of a LoKr or LoHa, which may be in a folder of peft; None if it is none."""
    import predict
    import safetensors
    folder = path.parent if path.name == PEFT_FILE else path
    file = folder / PEFT_FILE if (folder / PEFT_FILE).is_file() else predict.find_lora(path)
    with contextlib.suppress(Exception): # a file that cannot be read gets its error line later
        with safetensors.safe_open(file, "pt") as f:
            return file if re.search("lokr_|hada_", " ".join(f.keys())) else None

def layer_names():
    """-> {name with _ for each point: name} of the linear layers of Qwen-Image. All its models have these, in more
    blocks than tiny's two."""
    import predict
    import torch
    model = predict.load_transformer(common.TINY_DATA.parent, "float32", weights=False)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return {name.replace(".", "_"): name for name in names}

def find_layer(text, names):
    """A layer's name as its trainer writes it -> ours. names: layer_names()."""
    text = re.sub(PREFIXES, "", text)
    block = re.search(r"(?<=transformer_blocks[._])\d+", text)
    first = re.sub(r"(?<=transformer_blocks[._])\d+", "0", text).replace(".", "_")
    if first not in names:
        raise ValueError(f"{text} is no linear layer of Qwen-Image")
    return names[first].replace(".0.", f".{block[0]}.", 1) if block else names[first]

def read_factors(file):
    """-> {layer: {lokr_w1, hada_w1_a, ...: matrix}}, and a function that returns a layer's scale."""
    import safetensors.torch
    from peft.utils.other import get_pattern_key
    layers, names = {}, layer_names()
    for key, tensor in safetensors.torch.load_file(file).items():
        m = re.fullmatch(r"(.+)\.(lokr_w[12](?:_[ab])?|hada_w[12]_[ab]|alpha)(?:\.weight)?", key)
        if not m or (m[2] != "alpha" and tensor.ndim != 2) or not tensor.isfinite().all():
            raise ValueError(f"{key} of shape {list(tensor.shape)}: unknown, or NaN in it")
        layers.setdefault(find_layer(m[1], names), {})[m[2]] = tensor
    with safetensors.safe_open(file, "pt") as f:
        config = json.loads((f.metadata() or {}).get("lora_adapter_metadata", "{}"))
    if (file.parent / PEFT_CONFIG).is_file():
        config = json.loads((file.parent / PEFT_CONFIG).read_text())
    config = {key.removeprefix("transformer."): value for key, value in config.items()}

    def scale(layer):
        if "r" in config: # peft, and diffusers by it: alpha / rank in any case
            ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
            return (alphas.get(get_pattern_key(alphas, layer), config["alpha"])
                    / ranks.get(get_pattern_key(ranks, layer), config["r"]))
        # LyCORIS: a LoKr of two whole matrices has no scale
        narrow = [layers[layer][name] for name in ("lokr_w2_b", "lokr_w1_b", "hada_w1_b") if name in layers[layer]]
        return layers[layer]["alpha"].item() / len(narrow[0]) if narrow and "alpha" in layers[layer] else 1.0
    return layers, scale

def decompose(factors, rank):
    """The matrices of a layer -> U (outputs, n), S (n,), V (n, inputs), where U diag(S) V is the nearest matrix of
    rank n <= `rank` to the change of its weight; and how far off it is, and how large the change is, both squared."""
    import torch
    f = {name: tensor.double() for name, tensor in factors.items()}
    if "hada_w1_a" in f:
        a = torch.einsum("oi,oj->oij", f["hada_w1_a"], f["hada_w2_a"]).flatten(1)
        b = torch.einsum("io,jo->ijo", f["hada_w1_b"], f["hada_w2_b"]).flatten(0, 1)
        (q_a, r_a), (q_b, r_b) = torch.linalg.qr(a), torch.linalg.qr(b.T)
        u, s, v = torch.linalg.svd(r_a @ r_b.T, full_matrices=False)
        kept = slice(rank)
        u, v = q_a @ u[:, kept], v[kept] @ q_b.T
    else:
        w1, w2 = [f[w] if w in f else f[f"{w}_a"] @ f[f"{w}_b"] for w in ("lokr_w1", "lokr_w2")]
        (u1, s1, v1), (u2, s2, v2) = [torch.linalg.svd(w, full_matrices=False) for w in (w1, w2)]
        s = torch.kron(s1, s2) # not sorted
        kept = s.topk(min(rank, len(s))).indices
        of_1, of_2 = kept // len(s2), kept % len(s2)
        u = torch.einsum("in,jn->ijn", u1[:, of_1], u2[:, of_2]).flatten(0, 1)
        v = torch.einsum("ni,nj->nij", v1[of_1], v2[of_2]).flatten(1)
    size = s.square().sum().item()
    return u, s[kept], v, max(0, size - s[kept].square().sum().item()), size

def from_factors(path, source, rank, file):
    """Converts a LoKr or LoHa to a file that predict.py reads, and prints how far it is off."""
    from tqdm import tqdm
    state, ranks, errors, off, all_of_it = {}, {}, {}, 0, 0
    try:
        layers, scale = read_factors(source)
        for layer, factors in tqdm(layers.items(), desc="decomposing", unit=" layers", disable=None, leave=False):
            u, s, v, lost, size = decompose(factors, rank)
            dtype = next(tensor.dtype for name, tensor in factors.items() if name != "alpha")
            root = s.sqrt() # in equal shares, so that half precision holds both
            state[f"{layer}.lora_A.weight"] = (root[:, None] * v).to(dtype)
            state[f"{layer}.lora_B.weight"] = (scale(layer) * u * root).to(dtype)
            errors[layer] = math.sqrt(lost / max(size, 1e-300))
            off += scale(layer) ** 2 * lost
            all_of_it += scale(layer) ** 2 * size
            if len(s) < rank:
                ranks[layer] = len(s)
        meta = dict(r=rank, lora_alpha=rank, rank_pattern=ranks, alpha_pattern=ranks, target_modules=sorted(layers))
        common.write_tensors(file, with_prefix(state), with_prefix(meta), "lora_adapter_metadata")
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{path}: no LoKr or LoHa of Qwen-Image's linear layers ({common.first_words(e)}); take "
                         "another file")
    worst = max(errors, key=errors.get)
    mean = math.sqrt(off / max(all_of_it, 1e-300))
    print(f"{path}: a LoRA of at most rank {rank} for its {len(layers)} layers; its change of the weights is {mean:.2%}"
          f" off, at worst {errors[worst]:.2%} ({worst}); a larger --rank is nearer")

# ---- what is written -------------------------------------------------------------------------------------------------

def convert(path, to, out):
    """Writes a LoRA that predict.py can read as a file for ComfyUI or diffusers."""
    import predict
    import torch
    from peft.utils.other import get_pattern_key
    (state, meta), config = predict.read_lora(path), predict.lora_config(path)
    train = {k: v for k, v in meta.items() if k.startswith("train.")}
    if to == "diffusers":
        return common.write_tensors(out, state, with_prefix(config) | train, "lora_adapter_metadata")
    tensors = {k.replace("transformer.", "diffusion_model.", 1): v for k, v in state.items()}
    patterns = config["alpha_pattern"]
    for key in [k.removeprefix("transformer.") for k in state if k.endswith(".lora_A.weight")]:
        layer, rank = key.removesuffix(".lora_A.weight"), len(state[f"transformer.{key}"])
        alpha = patterns.get(get_pattern_key(patterns, layer), config["lora_alpha"])
        if config.get("use_rslora"): # it multiplies by alpha / sqrt(rank), but ComfyUI by alpha / rank
            alpha *= math.sqrt(rank)
        tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(float(alpha))
    # not as lora_adapter_metadata: diffusers would read rank and alpha there, and apply them a second time
    common.write_tensors(out, tensors, train, "train")

def merge(files, scales, model, dtype, out):
    """Writes a complete model folder, in which the LoRAs are added to the transformer's weights and the other parts are
    copies. The folder appears under its name only when it is complete."""
    import cache
    import predict
    from safetensors import SafetensorError
    folder = cache.find_model(model, [*cache.ENCODERS, "transformer"])
    transformer = predict.load_transformer(folder, dtype)
    predict.load_loras(transformer, files, scales)
    transformer.fuse_lora()
    transformer.unload_lora()
    tmp = out.with_name(f".tmp-{os.getpid()}-{out.name}")
    try:
        parts = [file for part in cache.ENCODERS for file in (folder / part).rglob("*") if file.is_file()]
        for file in [folder / "model_index.json", *parts]:
            copy_file(file, tmp / file.relative_to(folder))
        transformer.save_pretrained(tmp / "transformer")
        os.umask(umask := os.umask(0))
        for file in (tmp / "transformer").iterdir(): # safetensors lets only the owner read them
            file.chmod(0o666 & ~umask)
        os.replace(tmp, out)
    except (OSError, SafetensorError) as e:
        raise InputError(f"--out {out}: cannot be written ({e}); free some space, or correct the path")
    finally:
        shutil.rmtree(tmp, ignore_errors=True)

def copy_file(source, target):
    """Hard-links a large file, where the disk allows it. Copies other files, so that a user can edit the copies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.stat().st_size > LARGE:
        with contextlib.suppress(OSError): # the target is on another disk, or its disk knows no links
            return os.link(source.resolve(), target) # (the hub's cache consists of symbolic links)
    shutil.copyfile(source, target)

def main():
    parser = common.Parser(__doc__)
    parser.add_argument("lora", nargs="+", type=Path, help="the LoRA; several only with --to model")
    parser.add_argument("--to", choices=["comfyui", "diffusers", "model"], required=True, help="what to convert it to")
    parser.add_argument("--out", type=Path, required=True,
                        help="the .safetensors file to write; with --to model the folder to write")
    parser.add_argument("--model", help="with --to model: hub id or folder of the base model (default: tiny)")
    parser.add_argument("--scale", type=number(float, -10, 10), nargs="+",
                        help="with --to model: one number for each LoRA (default: 1)")
    parser.add_argument("--rank", type=positive, help="of the LoRA that is made of a LoKr or LoHa (default: 64)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="with --to model: dtype of the merged weights (default: bfloat16)")
    args = parser.parse_args()
    if args.to != "model" and (len(args.lora) > 1 or args.model or args.scale or args.dtype):
        parser.error(f"argument --to: {args.to} works with one LoRA, without --model, --scale and --dtype; leave the "
                     "others out")
    if args.to != "model" and args.out.suffix != ".safetensors":
        parser.error(f"argument --out: {args.out} does not end in .safetensors; add that")
    if args.scale and len(args.scale) != len(args.lora):
        parser.error(f"argument --scale: {len(args.scale)} numbers for {len(args.lora)} LoRAs; give one for each")
    common.refuse_to_replace(args.out)

    import predict
    with tempfile.TemporaryDirectory() as tmp:
        files = []
        sources = [find_factors(path) for path in args.lora]
        if args.rank and not any(sources):
            raise InputError(f"--rank: {args.lora[0]} is no LoKr or LoHa; leave --rank out")
        for n, (path, source) in enumerate(zip(args.lora, sources)):
            folder = path.parent if path.name == PEFT_FILE else path
            made = Path(tmp, str(n), folder.name, predict.LORA_FILE) # errors show this path
            if source:
                from_factors(path, source, args.rank or 64, made)
            elif (folder / PEFT_FILE).is_file():
                from_peft(folder, made)
            files.append(made if made.exists() else path)
        trained = [g for g in (predict.read_lora(file)[1].get("train.geometry") for file in files) if g]
        if args.to == "model":
            merge(files, args.scale or [1.0] * len(files), args.model or "tiny", args.dtype or "bfloat16", args.out)
        else:
            convert(files[0], args.to, args.out)
    print(f"{args.out}: {' + '.join(map(str, args.lora))} as {args.to}")
    if args.to == "model" and trained: # predict.py reads them from a LoRA; for a merged model it needs the flags
        sizes = [f"--{k} {v}" for k, v in trained[0].items() if k != "upscale"]
        sizes += ["--no-upscale"] * (not trained[0]["upscale"])
        print(f"to edit at the sizes of the training: python predict.py --model {args.out}", *sizes)

if __name__ == "__main__":
    main()
