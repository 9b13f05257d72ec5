"""
A LoRA in another form: for ComfyUI, in ours (which is diffusers'), or merged into the weights of a complete model.

LORA is what predict.py --lora takes: a file, a run folder, user/repo of the hub; or a folder of peft
(adapter_model.safetensors and adapter_config.json). ComfyUI loads a finished run's file as it is; a checkpoint has to
be converted for it if --lora_alpha was not the rank. A merged model can be the base of another training.

$ python tools/convert_lora.py out/RUN --to comfyui --out snow.safetensors
$ python tools/convert_lora.py FOLDER_OF_PEFT --to diffusers --out snow.safetensors
$ python tools/convert_lora.py out/RUN LIGHTNING --scale 0.8 1 --model Qwen/Qwen-Image-Edit-2509 --to model --out merged
$ python predict.py --model merged ...
"""
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import safetensors.torch
import torch
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError

import cache
import common
import predict
from common import InputError, number

PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
LARGE = 2**26 # bytes of a file that is linked, not copied

def from_peft(folder, file):
    """A folder of peft -> a file that predict.py reads. The scale of the LoRA stands in the config only."""
    try:
        config = json.loads((folder / PEFT_CONFIG).read_text())
        tensors = safetensors.torch.load_file(folder / PEFT_FILE)
        state = {k.removeprefix("base_model.model."): v for k, v in tensors.items()}
        meta = {k: config[k] for k in ("rank_pattern", "alpha_pattern", "use_rslora") if k in config}
        meta |= dict(r=config["r"], lora_alpha=config["lora_alpha"], target_modules=sorted({
            k.rsplit(".lora_", 1)[0] for k in state}))
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{folder}: no LoRA of peft ({type(e).__name__}: {e}); want {PEFT_FILE} and {PEFT_CONFIG}")
    ours = lambda d: {f"transformer.{k}": v for k, v in d.items()}
    common.write_tensors(file, ours(state), ours(meta), "lora_adapter_metadata")

def convert(path, to, out):
    """A LoRA that predict.py reads -> a file for ComfyUI or diffusers."""
    (state, meta), config = predict.read_lora(path), predict.lora_config(path)
    train = {k: v for k, v in meta.items() if k.startswith("train.")}
    if to == "diffusers":
        ours = {f"transformer.{k}": v for k, v in config.items()}
        return common.write_tensors(out, state, ours | train, "lora_adapter_metadata")
    tensors = {k.replace("transformer.", "diffusion_model.", 1): v for k, v in state.items()}
    patterns = config["alpha_pattern"]
    for key in [k.removeprefix("transformer.") for k in state if k.endswith(".lora_A.weight")]:
        layer, rank = key.removesuffix(".lora_A.weight"), len(state[f"transformer.{key}"])
        alpha = patterns.get(get_pattern_key(patterns, layer), config["lora_alpha"])
        if config.get("use_rslora"): # which multiplies by alpha / sqrt(rank); ComfyUI by alpha / rank
            alpha *= math.sqrt(rank)
        tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(float(alpha))
    # not under the other name, from where diffusers would apply rank and alpha once more
    common.write_tensors(out, tensors, train, "train")

def merge(files, scales, model, dtype, out):
    """Writes a complete model folder: the LoRAs added to the transformer's weights, the other parts as they are. It
    appears whole."""
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
        for file in (tmp / "transformer").iterdir(): # safetensors makes them private
            file.chmod(0o666 & ~umask)
        os.replace(tmp, out)
    except (OSError, SafetensorError) as e:
        raise InputError(f"--out {out}: cannot be written ({e}); free some space, or correct the path")
    finally:
        shutil.rmtree(tmp, ignore_errors=True)

def copy_file(source, target):
    """Large weights become hard links where that works; of the others a user may edit the copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.stat().st_size > LARGE:
        with contextlib.suppress(OSError): # another disk, or one without links
            return os.link(source.resolve(), target) # the hub's files are links themselves
    shutil.copyfile(source, target)

def main():
    parser = common.Parser(__doc__)
    parser.add_argument("lora", nargs="+", type=Path, help="the LoRA; several only with --to model")
    parser.add_argument("--to", choices=["comfyui", "diffusers", "model"], required=True, help="what to make of it")
    parser.add_argument("--out", type=Path, required=True, help="new .safetensors file; of --to model a new folder")
    parser.add_argument("--model", help="to merge into: hub id or folder (default: tiny)")
    parser.add_argument("--scale", type=number(float, -10, 10), nargs="+", help="to merge: of each LoRA (default: 1)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="to merge (default: bfloat16)")
    args = parser.parse_args()
    if args.to != "model" and (len(args.lora) > 1 or args.model or args.scale or args.dtype):
        parser.error(f"argument --to: {args.to} takes one LoRA, and no --model, --scale or --dtype; leave them out")
    if args.to != "model" and args.out.suffix != ".safetensors":
        parser.error(f"argument --out: {args.out} is no .safetensors file; give it that ending")
    if args.scale and len(args.scale) != len(args.lora):
        parser.error(f"argument --scale: {len(args.scale)} for {len(args.lora)} LoRAs; give one each")
    if args.out.exists():
        raise InputError(f"--out {args.out}: is there already; give another name")

    with tempfile.TemporaryDirectory() as tmp:
        files = []
        for n, path in enumerate(args.lora):
            folder = path.parent if path.name == PEFT_FILE else path
            files.append(path)
            if (folder / PEFT_FILE).is_file():
                files[-1] = Path(tmp, str(n), folder.name, predict.LORA_FILE) # errors name it
                from_peft(folder, files[-1])
        trained = [g for g in (predict.read_lora(file)[1].get("train.geometry") for file in files) if g]
        if args.to == "model":
            merge(files, args.scale or [1.0] * len(files), args.model or "tiny", args.dtype or "bfloat16", args.out)
        else:
            convert(files[0], args.to, args.out)
    print(f"{args.out}: {' + '.join(map(str, args.lora))} as {args.to}")
    if args.to == "model" and trained: # the LoRA told predict.py, which now has to be told
        sizes = [f"--{k} {v}" for k, v in trained[0].items() if k != "upscale"]
        sizes += ["--no-upscale"] * (not trained[0]["upscale"])
        print(f"as trained: python predict.py --model {args.out}", *sizes)

if __name__ == "__main__":
    main()
