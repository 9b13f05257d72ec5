"""
Converts a LoRA for the program that will use it, or to a complete model into which it is merged.

LORA is what predict.py --lora accepts: a file of any trainer, a run folder, a folder that peft has written, or
user/repo on the hub. Of a LoKr it makes a LoRA of at most --rank: the nearest one, and the command prints how far it is
off. diffusers, ComfyUI, InvokeAI, stable-diffusion.cpp, OneTrainer and SimpleTuner load the file of a run, or
of a checkpoint, without conversion. Others name the layers otherwise: give --to, such as --to mflux. The command prints
how the program loads what it has made. You can train another LoRA on a merged model. Its weights are rounded once, to
--dtype; the command prints how far that puts the change by the LoRAs off.

$ python tools/convert_lora.py out/RUN --to sglang --out snow.safetensors
$ python tools/convert_lora.py out/RUN --to vllm-omni --out snow
$ python tools/convert_lora.py PEFT_FOLDER --to diffusers --out snow.safetensors
$ python tools/convert_lora.py lokr.safetensors --rank 128 --to diffusers --out snow.safetensors
$ python tools/convert_lora.py out/RUN LIGHTNING --scale 0.8 1 --model Qwen/Qwen-Image-Edit-2509 --to model --out merged
$ python predict.py --model merged ...
"""
import contextlib
import json
import os
import re
import secrets
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import library # first, so that no other folder is taken for one of our modules
import common
from common import InputError, NOTHING, is_utf8, tell
from library.cli import command_line
from library.cli.command_line import number, positive
from library.files import disk, stray_files, tensor_files
from library.lora import lora_paths

# torch, predict.py and the like take seconds to import; the functions import them, so that -h and typos do not wait
LARGE = 2**26 # bytes: larger files are linked, not copied

# ---- one LoRA as a file ----------------------------------------------------------------------------------------------

def layers_of(lora):
    """A Lora -> {layer: (scale, lora_A, lora_B)}; the change of its weight is scale * lora_B @ lora_A."""
    from library.lora import lora_file, peft_config
    matrices = lora_file.matrices_of(lora)
    try: # our own patterns, but of layers and ranks that a stranger may have made up
        config = peft_config.check_config(lora.path, lora_file.config_of(lora), len(matrices))
    except ValueError as e:
        raise peft_config.lora_error(lora.path, common.first_words(e))
    return {layer: (peft_config.scale_of_layer(lora.path, config, layer, len(a)), a, b)
            for layer, (a, b) in matrices.items()}

# Each program, how it names layers (FORMS), and how it loads FILE (LOADED)
PROGRAMS = """
diffusers   transformer      pipe.load_lora_weights('FILE')
invokeai    transformer      install FILE, and set its weight to 1 where the page starts at 0.75
sd.cpp      transformer      --lora-model-dir with the folder of FILE, and <lora:NAME:1> in the prompt, its name
onetrainer  transformer      to train on: FILE as the LoRA base model, and a layer filter that selects just its layers
simpletuner transformer      to train on: --init_lora FILE --lora_rank RANK, without --lora_alpha
comfyui     diffusion_model  copy FILE to models/loras; node LoraLoaderModelOnly, strength 1
diffsynth   diffusion_model  pipe.load_lora(pipe.dit, 'FILE', alpha=1); edit_image=[picture]; zero_cond_t=True for 2511
sglang      diffusion_model  --lora-path FILE --lora-scale 1; "did not match any LoRA layer": it draws the base
mflux       diffusion_model  --lora FILE 1 --no-bake-lora
lightx2v    diffusion_model  "lora_configs": [{"path": "FILE", "strength": 1.0}] in its config
ai-toolkit  diffusion_model  to train on: network: type: lora, linear: RANK, pretrained_lora_path: FILE
musubi      lora_unet        to draw: --lora_weight FILE; to train on: --network_weights FILE --network_dim RANK \
--network_alpha RANK, never --dim_from_weights
kohya       lora_unet        to train on: --network_weights FILE --network_dim RANK --network_alpha RANK
vllm-omni   folder           --lora-path FILE --lora-scale 1, one at a time; without a negative_prompt no guidance
"""
FORMS, LOADED = {}, {}
for line in PROGRAMS.strip().splitlines():
    program, FORMS[program], LOADED[program] = line.split(None, 2)
OUTSIDE = r"(?!transformer_blocks)" # of the blocks
LEFT_OUT = {"mflux": OUTSIDE + r"|.*_mod\.", **dict.fromkeys(["ai-toolkit", "musubi", "kohya"], OUTSIDE)} # layers

def pairs_of(lora):
    """A Lora -> ({layer: (lora_A, lora_B)}, our entries {name: value}) with the scales in lora_B. SGLang computes
    add_q_proj, add_k_proj and add_v_proj at once, and wants all three or takes none, so that a missing one becomes
    zeros: of each LoRA of ours the last block's add_q_proj, whose output nothing reads."""
    import torch
    from library.lora import lora_file
    layers = layers_of(lora_file.unfold(lora))
    train = {key.removeprefix("train."): value for key, value in lora.meta.items() if key.startswith("train.")}
    train, pairs = train | lora_file.training_of(lora), {}
    for layer, (scale, a, b) in layers.items():
        # (only another scale wants fp32, as a product in half precision is rounded)
        pairs[layer] = (a, b) if scale == 1 else (a.float(), scale * b.float())
    for layer, (a, b) in [item for item in pairs.items() if ".attn.add_" in item[0]]:
        block, _ = layer.split(".attn.add_")
        for third in "qkv":
            pairs.setdefault(f"{block}.attn.add_{third}_proj", (torch.zeros_like(a), torch.zeros_like(b)))
    if "folded" in train: # a training that goes on from it looks them all up
        train["folded"] = dict.fromkeys(pairs, 1.0) | {layer: scale for layer, (scale, _, _) in layers.items()}
    return pairs, train

def convert(lora, to, out):
    """Writes a Lora as this program reads it -> lines: what the program leaves out, and how it loads the file."""
    import torch
    from torch.nn.functional import pad
    from library.lora import lora_file
    form, (pairs, train) = FORMS[to], pairs_of(lora)
    rank, tensors = max(len(a) for a, _ in pairs.values()), {}
    for layer, (a, b) in pairs.items():
        name, halves = f"{form}.{layer}", ("lora_A", "lora_B")
        if form in ("lora_unet", "folder"): # where one number stands for all ranks, zeros fill up the smaller ones
            more = rank - len(a)
            a, b = pad(a, (0, 0, 0, more)), pad(b, (0, more))
        if form == "folder":
            name = f"transformer.{layer.replace('.to_out.0', '.to_out')}" # as vLLM-Omni calls it
        if form == "lora_unet":
            name, halves = f"lora_unet_{layer.replace('.', '_')}", ("lora_down", "lora_up")
            tensors[f"{name}.alpha"] = torch.tensor(float(rank))
        tensors |= {f"{name}.{half}.weight": matrix for half, matrix in zip(halves, (a, b))}
    if form == "transformer":
        lora_file.write_lora(out, tensors, train, NOTHING)
    else: # not as lora_adapter_metadata: diffusers would look for its names
        meta, notes = lora_file.with_prefix("train", train), lora_file.notes_of(out, rank, train)
        if form == "folder":
            write_folder(out, rank, tensors, meta, notes)
        else:
            tensor_files.write_tensors(out, tensors, meta, "train", NOTHING, notes)
    words = {"'FILE'": repr(str(out)), '"FILE"': json.dumps(str(out)), "FILE": common.shell_command([out]),
             "RANK": str(rank)} # in Python, in JSON, in a shell
    way = re.sub("""'FILE'|"FILE"|FILE|RANK""", lambda found: words[found[0]], LOADED[to])
    return [*left_out(pairs, to), f"{to}: {way}"]

def write_folder(out, rank, tensors, meta, notes):
    """A LoRA as peft's folder, which is there when it is whole."""
    tmp = out.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        config = dict(peft_type="LORA", r=rank, lora_alpha=rank)
        common.write_file(tmp / "adapter_config.json", json.dumps(config).encode(), NOTHING)
        tensor_files.write_tensors(tmp / lora_paths.PEFT_FILE, tensors, meta, "train", NOTHING, notes)
        disk.rename_folder(tmp, out)
    except OSError as e:
        raise common.disk_error(f"--out {out}", e)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)

def left_out(pairs, to):
    """-> a line if this program leaves out layers of these pairs."""
    from library.lora import foreign_loras
    if to not in LEFT_OUT:
        return []
    sizes = {layer: square(b.float() @ a.float()) for layer, (a, b) in pairs.items() if b.any()}
    lost = {layer: size for layer, size in sizes.items() if re.match(LEFT_OUT[to], layer)}
    if not lost:
        return []
    share = foreign_loras.relative_error(sum(lost.values()), sum(sizes.values()))
    when = "" if to == "mflux" else " where it trains on" # musubi draws with all
    return [f"warning: {to} leaves out {len(lost)} of {len(sizes)} layers, {share:.1%} of the change by its norm, for "
            f"instance {next(iter(lost))}{when}"]

# ---- a model with LoRAs in it ----------------------------------------------------------------------------------------

def merge(loras, scales, model, dtype, out):
    """Writes a complete model folder, in which the LoRAs [Lora] are added to the transformer's weights and the other
    parts are copies -> lines: how far rounding puts the change off, and whether the folder's name misleads. The folder
    appears under its name only when it is complete."""
    import cache
    import predict
    from library.lora import lora_file
    from safetensors import SafetensorError
    disk.try_renames(out, f"--out {out}")
    folder = cache.find_model(model, [*cache.ENCODERS, "transformer"])
    copied = [file for part in cache.ENCODERS for file in (folder / part).rglob("*") if file.is_file()]
    copied.append(folder / "model_index.json")
    for file in copied:
        stray_files.refuse_outside(file, folder)
    base = lora_file.base_of(model, None, folder, folder)
    lora_file.warn_other_base(loras, base)
    transformer = predict.load_transformer(folder, dtype)
    line = add_loras(transformer, folder / "transformer", loras, scales, dtype)
    tmp = out.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        for file in copied:
            copy_file(file, tmp / file.relative_to(folder))
        transformer.save_pretrained(tmp / "transformer")
        os.umask(umask := os.umask(0))
        for file in (tmp / "transformer").iterdir(): # safetensors lets only the owner read them
            file.chmod(0o666 & ~umask)
        common.refuse_to_replace(out) # it may have come since the start
        disk.rename_folder(tmp, out)
    except OSError as e:
        raise common.disk_error(f"--out {out}", e)
    except SafetensorError as e: # whose words have the system's number: "(os error 28)"
        raise InputError(f"--out {out}: cannot be written ({common.first_words(e)}); free some space, or give another "
                         "disk")
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    # SGLang and mflux look for these words in the name of a model's folder
    kind = "2511" if base["zero_cond_t"] else dict(QwenImageEditPlusPipeline="2509").get(base["pipeline"], "")
    name = f"Qwen-Image-Edit-{kind}".rstrip("-")
    if name in out.name:
        return [line]
    return [line, f"{out}: SGLang and mflux take a model's kind from its folder's name; for them call it {name}-..."]

def stored_weights(folder):
    """-> a function: the name of a weight -> it, in the dtype in which this folder's files have it."""
    from safetensors import safe_open
    names, index = ["diffusion_pytorch_model.safetensors"], folder / "diffusion_pytorch_model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    files = {}
    for name in names:
        f = safe_open(folder / name, "pt")
        files |= dict.fromkeys(f.keys(), f)
    return lambda name: files[name].get_tensor(name)

def add_loras(transformer, folder, loras, scales, dtype):
    """Adds the LoRAs, each at its scale, to the weights of a transformer, whose files are in this folder: in fp32,
    layer by layer, so that each weight is rounded once to `dtype` -> a line that says what rounding costs."""
    import predict
    from library.lora import foreign_loras
    stored, parts = stored_weights(folder), {} # {layer: [(factor, lora_A, lora_B)] of all LoRAs}
    for lora, strength in zip(loras, scales):
        predict.check_fit(transformer, lora.state, lora.path)
        for layer, (scale, a, b) in layers_of(lora).items():
            parts.setdefault(layer, []).append((strength * scale, a, b))
    # squared norms: {layer: (what rounding adds to its change, the change)}, of all weights; the factors of `rounded`
    off, weights, factors = {}, 0, []
    for layer in common.progress("merging", parts, unit="layer"):
        weight = stored(f"{layer}.weight").float()
        change = sum(factor * (b.float() @ a.float()) for factor, a, b in parts[layer])
        p = transformer.get_submodule(layer).weight
        p.data, factor = rounded(weight, change, p.dtype)
        factors.append(factor)
        weights += square(weight)
        if change.any():
            off[layer] = square(p.data.float() - weight - change), square(change)
    remedy = "lower --scale" if dtype != "float16" else "give --dtype bfloat16 or float32"
    tensor_files.refuse_not_finite(f"--dtype {dtype}", dict(transformer.named_parameters()),
                                   f"{remedy}, or take another copy of --model")
    if not off:
        return "the merged model is the base: the LoRAs change nothing"
    error, words = foreign_loras.error_in_words(off)
    size = foreign_loras.relative_error(sum(size for _, size in off.values()), weights)
    line = f"the change by the LoRAs, {size:.2%} of the weights, is {words}, as {dtype} rounds it"
    if max(factors) > 1:
        stronger = sum(factor > 1 for factor in factors)
        line += (f"; in {stronger} of {len(factors)} layers it is added up to {max(factors):.1f} times as strong, as "
                 "rounding would weaken it")
    if error > 0.05:
        return f"warning: {line}; --dtype float32 keeps it, and predict.py --lora, without merging, does too"
    return line

def square(tensor):
    """-> its squared norm."""
    import torch
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2

def rounded(weight, change, dtype):
    """weight + change, both fp32 -> (in this dtype, rounded once, to the nearest number; the change's factor: 1). If
    the change is small compared to the dtype's steps, most weights stay as they are, and what is left of it is weaker:
    bf16 keeps 0.85 of a change by 0.19 % of the weights, 0.35 of one by 0.04 %. Then the change is added with a factor,
    at most 4, that gives its strength back. The weights are no nearer to the exact ones for it, but what tiny predicts
    is, as all layers lose strength together: a change by 0.19 % is then 9 % off in the prediction, and not 16 %; one by
    0.04 % 20 %, and not 62 %. (Stochastic rounding: 13 % and 33 %. Errors carried along a row: 13 % and 48 %.)"""
    size = square(change)

    def strength(factor):
        kept = (weight + factor * change).to(dtype).float() - weight
        return (kept * change).sum().item() / size
    if not size or not strength(1) < 0.98: # (nor for NaN)
        return (weight + change).to(dtype), 1
    factor = 4
    for n in range(1, 9): # bisection
        less = factor - 3 / 2**n
        if not strength(less) < 1:
            factor = less
    return (weight + factor * change).to(dtype), factor

def copy_file(source, target):
    """Hard-links a large file, where the disk allows it. Copies other files, so that a user can edit the copies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.stat().st_size > LARGE:
        with contextlib.suppress(OSError): # the target is on another disk, or its disk knows no links
            return os.link(source.resolve(), target) # (the hub's cache consists of symbolic links)
    shutil.copyfile(source, target)

def sizes_of_training(loras, model):
    """-> a line with the command that edits with a merged model at the sizes of the training. (Of a LoRA predict.py
    reads them itself.)"""
    for lora in loras:
        if sizes := lora.meta.get("train.geometry"):
            words = ["python", "predict.py", "--model", model]
            for name, value in sizes.items():
                if name != "upscale": # which is a switch
                    words += [f"--{name}", value]
                elif not value:
                    words.append("--no-upscale")
            words += ["--image", "CONTROL.png", "--prompt", "TEXT"]
            return [f"to edit at the sizes of the training: {common.shell_command(words)}"]
    return []

def main():
    parser = command_line.Parser(__doc__)
    parser.add_argument("lora", nargs="+", type=Path, help="the LoRA; several only with --to model")
    flag = parser.group("flags")
    flag("--to", None, "the program that will load it, or a merged model", choices=[*FORMS, "model"], required=True,
         type=lambda text: text.lower().replace("stable-diffusion.cpp", "sd.cpp"))
    flag("--out", None, "the .safetensors file to write; with --to model or vllm-omni the folder to write", type=Path,
         required=True)
    flag("--model", None, "with --to model: hub id or folder of the base model (default: tiny)")
    flag("--scale", None, "with --to model: one number for each LoRA (default: 1)", type=number(float, -10, 10),
         nargs="+")
    flag("--rank", None, "of the LoRA that is made of a LoKr (default: 64)", type=positive)
    flag("--unchecked", False, "use a LoRA of train.py although its digest is not right, as you have changed it")
    flag("--dtype", None, "with --to model: dtype of the merged weights (default: bfloat16)",
         choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    if args.to != "model" and (len(args.lora) > 1 or args.model or args.scale or args.dtype):
        parser.error(f"argument --to: {args.to} works with one LoRA, without --model, --scale and --dtype; leave the "
                     "others out, or merge all with --to model")
    if args.to == "vllm-omni" and args.out.suffix == ".safetensors":
        parser.error(f"argument --out: {args.out}: vLLM-Omni reads a folder; give {args.out.with_suffix('')}")
    if args.to not in ("model", "vllm-omni") and args.out.suffix != ".safetensors":
        parser.error(f"argument --out: {args.out} does not end in .safetensors; give "
                     + str(args.out / "NAME.safetensors" if args.out.is_dir() else f"{args.out}.safetensors"))
    if args.scale and len(args.scale) != len(args.lora):
        parser.error(f"argument --scale: {len(args.scale)} numbers for {len(args.lora)} LoRAs; give one for each")
    # before anything is read; what comes there meanwhile is refused at the end
    common.refuse_to_replace(args.out)
    if args.to == "model" and not is_utf8(args.out):
        raise InputError(f"--out {args.out}: a name that is no UTF-8, which safetensors cannot write; give another one")

    sources = list(map(lora_paths.find_lora, args.lora))
    from library.lora import foreign_loras, lora_file
    loras = [lora_file.read_lora(source, args.rank or 64, args.unchecked) for source in sources]
    if args.rank and not any(foreign_loras.is_lokr(lora.header) for lora in loras):
        raise InputError(f"--rank: {args.lora[0]} is no LoKr; leave --rank out")
    lines = [f"{args.out}: {' + '.join(map(str, args.lora))} as {args.to}"]
    if args.to == "model":
        scales = args.scale or [1.0] * len(loras)
        lines += merge(loras, scales, args.model or "tiny", args.dtype or "bfloat16", args.out)
        lines += sizes_of_training(loras, args.out)
    else:
        lines += convert(loras[0], args.to, args.out)
    tell(*lines)

if __name__ == "__main__":
    main()
