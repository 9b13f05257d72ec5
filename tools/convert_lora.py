"""
Converts a LoRA: for ComfyUI, to our format (which is diffusers'), or to a complete model into which it is merged.

LORA is what predict.py --lora accepts: a file of any trainer, a run folder, a folder that peft has written, or
user/repo on the hub. Of a LoKr or LoHa it makes a LoRA of at most --rank: the nearest one, and the command prints how
far it is off. ComfyUI can load the file of a finished run without conversion. Convert a checkpoint for it if it is an
rsLoRA, or if --lora_alpha was not the rank. You can train another LoRA on a merged model.

$ python tools/convert_lora.py out/RUN --to comfyui --out snow.safetensors
$ python tools/convert_lora.py PEFT_FOLDER --to diffusers --out snow.safetensors
$ python tools/convert_lora.py lokr.safetensors --rank 128 --to diffusers --out snow.safetensors
$ python tools/convert_lora.py out/RUN LIGHTNING --scale 0.8 1 --model Qwen/Qwen-Image-Edit-2509 --to model --out merged
$ python predict.py --model merged ...
"""
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import extras # first, so that no other folder is taken for one of our modules
import common
from common import InputError, number, positive, tell

# torch, predict.py and the like take seconds to import; the functions import them, so that -h and typos do not wait
LARGE = 2**26 # bytes: larger files are linked, not copied

# ---- what is written -------------------------------------------------------------------------------------------------

def convert(path, to, out):
    """Writes a LoRA that predict.py can read as a file for ComfyUI or diffusers."""
    import predict
    import torch
    from extras import lora_files
    state, meta = predict.read_lora(path)
    config = predict.config_of(state, meta)
    train = {k: v for k, v in meta.items() if k.startswith("train.")}
    if to == "diffusers":
        meta = predict.with_prefix("transformer", config) | train
        return common.write_tensors(out, state, meta, "lora_adapter_metadata")
    try: # our own patterns, but of layers and ranks that a stranger may have made up
        config = lora_files.checked(path, config)
        lora_files.refuse_slow(path, config, len(state) // 2)
    except ValueError as e:
        raise lora_files.error_of(path, common.first_words(e))
    tensors = {k.replace("transformer.", "diffusion_model.", 1): v for k, v in state.items()}
    for key in [k for k in state if k.endswith(".lora_A.weight")]:
        layer, rank = key.removeprefix("transformer.").removesuffix(".lora_A.weight"), len(state[key])
        scale = lora_files.of_config(path, config, layer, rank)
        tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(scale * rank) # ComfyUI divides it by the rank
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
            common.refuse_outside(file, folder)
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

def compare_bases(files, model):
    """A line for each LoRA that was trained on another model than this one."""
    import cache
    from extras import bases
    folder, weights = cache.find_model(model, [*cache.ENCODERS, "transformer"]), None
    if any("model_hash" in bases.notes_of(file) for file in files): # else 41 GB need not be read
        with tempfile.TemporaryDirectory() as tmp:
            weights = cache.hash_part(folder / "transformer", tmp)
    bases.compare(files, bases.base_of(model, None, folder, folder, weights))

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
    flag = parser.group("flags")
    flag("--to", None, "what to convert it to", choices=["comfyui", "diffusers", "model"], required=True)
    flag("--out", None, "the .safetensors file to write; with --to model the folder to write", type=Path, required=True)
    flag("--model", None, "with --to model: hub id or folder of the base model (default: tiny)")
    flag("--scale", None, "with --to model: one number for each LoRA (default: 1)", type=number(float, -10, 10),
         nargs="+")
    flag("--rank", None, "of the LoRA that is made of a LoKr or LoHa (default: 64)", type=positive)
    flag("--unchecked", False, "use a LoRA of train.py although its digest is not right, as you have changed it")
    flag("--dtype", None, "with --to model: dtype of the merged weights (default: bfloat16)",
         choices=["float32", "bfloat16", "float16"])
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
    from extras import lora_files
    with tempfile.TemporaryDirectory() as tmp:
        files = sources = [predict.find_lora(path) for path in args.lora]
        if args.rank and not any(map(lora_files.has_factors, sources)):
            raise InputError(f"--rank: {args.lora[0]} is no LoKr or LoHa; leave --rank out")
        if args.rank or args.unchecked: # otherwise predict.py makes its LoRA of a LoKr or LoHa
            files = []
            for n, source in enumerate(sources):
                state, meta = lora_files.read(source, args.rank or 64) # which does not look at a digest
                files.append(Path(tmp, f"{n}.safetensors"))
                common.write_tensors(files[-1], state, meta, "lora_adapter_metadata")
        trained = [g for g in (predict.read_lora(file)[1].get("train.geometry") for file in files) if g]
        if args.to == "model":
            compare_bases(sources, args.model or "tiny")
            merge(files, args.scale or [1.0] * len(files), args.model or "tiny", args.dtype or "bfloat16", args.out)
        else:
            convert(files[0], args.to, args.out)
    tell(f"{args.out}: {' + '.join(map(str, args.lora))} as {args.to}")
    if args.to == "model" and trained: # predict.py reads them from a LoRA; for a merged model it needs the flags
        sizes = [f"--{k} {v}" for k, v in trained[0].items() if k != "upscale"]
        sizes += ["--no-upscale"] * (not trained[0]["upscale"])
        tell(f"to edit at the sizes of the training: python predict.py --model {args.out} {' '.join(sizes)}")

if __name__ == "__main__":
    main()
