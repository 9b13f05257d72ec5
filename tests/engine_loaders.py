"""
What other programs make of a LoRA of ours: their own loaders, from pinned wheels, on models of tiny's size.

Each program's wheels are unpacked in a folder of their own, and each runs in a process of its own. A layer's change is
how its outputs differ after loading, for each unit vector as input; its factor is that change over the trained one: 1
is right, 0 is left out.

$ python tests/engine_loaders.py                        # a table of all programs; it downloads 30 MB of wheels
$ python tests/engine_loaders.py PROGRAM FILE WANTED    # one program's factors as JSON, with its wheels in PYTHONPATH
"""
import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import types
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
WHEELS = {"diffsynth": ["diffsynth==2.1.12"], "mflux": ["mflux==0.24.0", "mlx==0.32.4", "mlx-cpu==0.32.4"],
          "invokeai": ["invokeai==6.14.2", "pydantic-settings==2.16.3", "python-dotenv==1.2.4"]}
# What they import, and loading a LoRA does not need.
NOT_NEEDED = """modelscope einops ftfy pandas torchvision toml matplotlib piexif platformdirs sentencepiece blake3
    compel cv2 deprecated gguf onnx onnxruntime picklescan spandrel""".split()

class NotInstalled(Exception):
    """The wheels cannot be had: no network, or none for this Python."""

# ---- stand-ins -------------------------------------------------------------------------------------------------------

class StandIn(type):
    """A class whose attributes are such classes; called, it takes anything, and as a decorator it does nothing."""
    def __new__(cls, name, bases=(), names=None, **_):
        return super().__new__(cls, name, (), {})

    def __init__(cls, *_, **__):
        pass

    def __getitem__(cls, _):
        return cls

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name)

    def __call__(cls, *args, **_):
        return args[0] if len(args) == 1 and callable(args[0]) else cls

class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is NOT_NEEDED and not installed; it is asked last."""
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in NOT_NEEDED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = StandIn(spec.name).__getattr__
        return module

    def exec_module(self, module):
        pass

# ---- the programs: each returns (our name of a layer -> this layer as a function, a function that loads a file) ------

def tiny():
    from diffusers import QwenImageTransformer2DModel
    return QwenImageTransformer2DModel.from_config(QwenImageTransformer2DModel.load_config(ROOT / "tiny/transformer"))

def diffsynth():
    from diffsynth.models.qwen_image_dit import QwenImageDiT
    from diffsynth.pipelines.qwen_image import QwenImagePipeline
    pipe = QwenImagePipeline(device="cpu", torch_dtype=torch.float32)
    with torch.device("meta"): # its widths are fixed
        pipe.dit = QwenImageDiT(num_layers=3)
    for name, module in tiny().named_modules():
        if isinstance(module, torch.nn.Linear):
            pipe.dit.get_submodule(name) # raises an error if there is no such layer
            pipe.dit.set_submodule(name, module)
    return pipe.dit.get_submodule, lambda file: pipe.load_lora(pipe.dit, file)

def mflux():
    import mlx.core as mx
    import numpy as np
    from mflux.models.common.lora.mapping.lora_loader import LoRALoader
    from mflux.models.qwen.model.qwen_transformer.qwen_transformer import QwenTransformer
    from mflux.models.qwen.weights.qwen_lora_mapping import QwenLoRAMapping
    model = QwenTransformer(num_layers=3, attention_head_dim=32, num_attention_heads=5, joint_attention_dim=64)

    def layer(name):
        for ours, its in ({"mlp.net.0.proj": "ff.mlp_in", "mlp.net.2": "ff.mlp_out", "mod.1": "mod_linear",
                           "to_out.0": "attn_to_out.0"}).items():
            name = name.replace(ours, its)
        module = model
        for part in name.split("."):
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        return lambda x: torch.from_numpy(np.array(module(mx.array(x.numpy()))))
    return layer, lambda file: LoRALoader.load_and_apply_lora(QwenLoRAMapping.get_mapping(), model, [file], [1.0])

def invokeai():
    import invokeai.backend.model_manager.load # noqa: F401 (first, as its parts import each other)
    from invokeai.backend.model_manager.configs.lora import LoRA_LyCORIS_QwenImage_Config
    from invokeai.backend.model_manager.load.model_cache.torch_module_autocast import torch_module_autocast
    from invokeai.backend.model_manager.model_on_disk import ModelOnDisk
    from invokeai.backend.patches.layer_patcher import LayerPatcher
    from invokeai.backend.patches.lora_conversions import qwen_image_lora_conversion_utils as conversion
    model = tiny()
    torch_module_autocast.apply_custom_layers_to_model(model)

    def load(file):
        known = dict(hash="x", path=file, file_size=1, name="x", source="x", source_type="path")
        LoRA_LyCORIS_QwenImage_Config.from_model_on_disk(ModelOnDisk(Path(file)), known) # an error if it is of no kind
        patch = conversion.lora_model_from_qwen_image_state_dict(load_file(file))
        prefix = conversion.QWEN_IMAGE_EDIT_LORA_TRANSFORMER_PREFIX
        keep.enter_context(LayerPatcher.apply_smart_model_patches(
            model=model, patches=[(patch, 1.0)], prefix=prefix, dtype=torch.float32))
    keep = contextlib.ExitStack()
    return model.get_submodule, load

PROGRAMS = {"diffsynth": diffsynth, "mflux": mflux, "invokeai": invokeai}

def measure(program, file, wanted):
    """-> {layer: (its factor, the part of its change that is not the trained one, over the trained one's norm)}"""
    # these look for optional packages, which must not be stand-ins then
    from diffusers import DiffusionPipeline, QwenImageTransformer2DModel # noqa: F401
    from transformers import AutoProcessor, CLIPTextModel # noqa: F401
    sys.meta_path.append(StandIns())
    layer, load = PROGRAMS[program]()
    inputs = {name: torch.eye(change.shape[1]) for name, change in wanted.items()}
    before = {name: layer(name)(x) for name, x in inputs.items()}
    load(file)
    found = {}
    for name, want in wanted.items():
        change = (layer(name)(inputs[name]) - before[name]).T
        size = want.norm().item()
        factor = (change * want).sum().item() / size**2 if size else 0.0
        found[name] = factor, (change - factor * want).norm().item() / (size or 1)
    return found

# ---- from a LoRA to the table ----------------------------------------------------------------------------------------

def make_lora(path):
    """A file of ours: alpha 4 of rank 16, one layer of rank 8, layers outside of the blocks and, of the last block, two
    of add_q, add_k, add_v -> {layer: the change of its weight}"""
    import predict
    transformer = predict.load_transformer(ROOT / "tiny", "float32")
    torch.manual_seed(0)
    predict.add_lora(transformer, r=16, lora_alpha=4, rank_pattern={"0.attn.to_q": 8}, init_lora_weights=False,
                     target_modules=["to_q", "to_out.0", "img_mod.1", "2.attn.add_k_proj", "2.attn.add_v_proj",
                                     "net.2", "txt_mlp.net.0.proj", "img_in", "proj_out"])
    predict.save_lora(path, transformer, dict(pipeline="QwenImageEditPlusPipeline", zero_cond_t=True, run="a b"))
    return changes_of(transformer)

def changes_of(transformer):
    """-> {layer: the change of its weight}, by what is trained."""
    return {name: m.scaling["default"] * m.lora_B["default"].weight.detach() @ m.lora_A["default"].weight.detach()
            for name, m in transformer.named_modules() if "default" in getattr(m, "scaling", {})}

def python(*command, **env):
    return subprocess.run([sys.executable, *map(str, command)], env=os.environ | env, capture_output=True,
                          encoding="utf-8", errors="replace")

def ask(program, lora, changes, folder):
    """What this program makes of a LoRA of ours, after `convert_lora.py --to PROGRAM` -> as measure(), of all layers of
    tiny; or NotInstalled. The folder is an empty one, for its wheels."""
    wheels, out = folder / "wheels", folder / "out.safetensors"
    got = python("-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--only-binary", ":all:", "--target",
                 wheels, *WHEELS[program])
    if got.returncode:
        raise NotInstalled(f"{' '.join(WHEELS[program])}: {got.stderr.strip().splitlines()[-1]}")
    got = python(ROOT / "tools/convert_lora.py", lora, "--to", program, "--out", out)
    assert got.returncode == 0, got.stderr
    wanted = {name: torch.zeros_like(module.weight) for name, module in tiny().named_modules()
              if isinstance(module, torch.nn.Linear)}
    save_file(wanted | changes, folder / "wanted.safetensors")
    got = python(__file__, program, out, folder / "wanted.safetensors", PYTHONPATH=str(wheels), HOME=str(folder),
                 INVOKEAI_ROOT=str(folder))
    assert got.returncode == 0, got.stderr[-4000:]
    return json.loads(got.stdout)

def table():
    """Prints what each program makes of one LoRA."""
    print(f"{date.today()}: a LoRA of alpha 4, rank 16; factors of its layers\n")
    for program, wheels in WHEELS.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            changes = make_lora(folder / "x.safetensors")
            try:
                found = ask(program, folder / "x.safetensors", changes, folder)
            except NotInstalled as e:
                print(f"{program}: not installed: {e}")
                continue
        factors = {name: f"{found[name][0]:.3f}" for name in changes}
        right = [name for name in factors if factors[name] == "1.000"]
        others = {name: factors[name] for name in factors if name not in right}
        print(f"{wheels[0]}: {len(right)} of {len(changes)} layers right; others: {others}")

if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.path[0] = str(ROOT)
        table()
    else:
        sys.path.pop(0) # our tests' names
        program, file, wanted = sys.argv[1:]
        with contextlib.redirect_stdout(sys.stderr), torch.no_grad():
            found = measure(program, file, load_file(wanted))
        print(json.dumps(found))
