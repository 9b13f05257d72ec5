"""
--transformer FILE.safetensors: each form that ComfyUI, Civitai and diffusers write trains and draws what the folder of
the same weights does, bit for bit; fp8 stays fp8 under --quantize fp8; memory holds one block at a time; each other
file is one line.
"""
import json
import shlex
import shutil
import weakref
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cache
import common
from library.data import picture_files
from library.models import quantization
from library.models.one_file import MARK_2511, read_layout
import predict
from tests.harness import (ADAMW, NATIVE, TINY, add_item, assert_bitwise, copy_model, curve, is_one_line, log_of,
                           lora_file, lora_of, lora_tensors, refused, run_script, start_ranks, within, works)

OURS = safetensors.torch.load_file(TINY / "transformer/diffusion_pytorch_model.safetensors")
COMFY, E4M3 = "model.diffusion_model.", torch.float8_e4m3fn
MATRICES = [k for k, v in OURS.items() if v.dim() == 2 and k.startswith("transformer_blocks.")]
VARIANTS = ["bf16", "fp16", "ComfyUI's bf16", "all in one", "cast", "e5m2", "scale_weight", "weight_scale", "rows"]

def with_scale(rows):
    """-> (all of tiny's tensors, its blocks' matrices in fp8; {matrix: its scale, (N, 1) or ()})."""
    state, scales = dict(OURS), {}
    for k in MATRICES:
        weight = OURS[k].float()
        # a scale that is no power of two: to forget it, or to round it to bf16, shows in the last bit
        scales[k] = (weight.abs().amax(1, keepdim=True) if rows else weight.abs().max()).clamp_min(1e-6) / 400
        state[k] = (weight / scales[k]).to(E4M3)
    return state, scales

def file_of(form):
    """-> (tensors of a file in this form, {name: weight} as dequantized by hand)."""
    if form in ("cast", "e5m2", "fp16"): # as ComfyUI's ModelSave: everything, norms and biases too
        dtype = dict(cast=E4M3, e5m2=torch.float8_e5m2, fp16=torch.float16)[form]
        state = {k: v.to(dtype) for k, v in OURS.items()}
        return {COMFY + k: v for k, v in state.items()}, {k: v.float() for k, v in state.items()}
    if form in ("scale_weight", "weight_scale", "rows"):
        state, scales = with_scale(rows=form == "rows")
        want = {k: v.float() * scales.get(k, 1) for k, v in state.items()}
        notes = {} # for ComfyUI alone
        for n, (k, scale) in enumerate(scales.items()):
            layer = k.removesuffix(".weight")
            if n % 2: # other shapes of the same: (1,) and (N,)
                scale = scale.flatten()
            if form == "scale_weight":
                notes |= {f"{layer}.scale_weight": scale, f"{layer}.scale_input": torch.tensor(3.0)}
            else:
                said = dict(format="float8_e4m3fn", full_precision_matrix_mult=True)
                notes |= {f"{layer}.weight_scale": scale, f"{layer}.input_scale": torch.tensor(3.0),
                          f"{layer}.comfy_quant": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)}
        if form == "scale_weight":
            notes["scaled_fp8"] = torch.zeros(2, dtype=E4M3)
        return {(COMFY if form == "scale_weight" else "") + k: v for k, v in (state | notes).items()}, want
    state = OURS if form == "bf16" else {COMFY + k: v for k, v in OURS.items()}
    if form == "all in one":
        state |= {"vae.decoder.conv1.weight": torch.ones(2), "text_encoders.qwen.layers.0.self_attn.q.weight":
                  torch.ones(2, dtype=torch.int8)}
    return state, OURS

def write(state, path, **meta):
    save_file({k: v.clone() for k, v in state.items()}, path, metadata=meta or None)
    return path

def folder_of(weights, folder):
    """A diffusers folder with these weights, those in fp32 as fp64: weights that are mapped lie at other addresses than
    converted ones, and a product on a CPU may differ by that in its last bit."""
    weights = {k: v.double() if v.dtype == torch.float32 else v for k, v in weights.items()}
    (folder / "transformer").mkdir(parents=True)
    shutil.copy(TINY / "transformer/config.json", folder / "transformer")
    write(weights, folder / "transformer/diffusion_pytorch_model.safetensors", format="pt")
    return folder

@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """There are a dataset of two pairs, and the flags of a training on it."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("cat", "dog"):
        add_item(folder / "data", name, [(32, 64), (64, 32)])
    return folder

def flags_of_three(home, dtype="float32", layers=("--lora_rank", 2, "--lora_targets", "to_q", "net.2")):
    """Of a training of three steps."""
    return ["--data", home / "data", "--val_data", "--cache_dir", home / f"cache-{dtype}", "--max_steps", 3,
            "--batch_size", 2, *NATIVE, "--device", "cpu", "--dtype", dtype, *layers]

def train_three(home, out, *flags, dtype="float32"):
    """-> the result of that training, with its curve and LoRA."""
    own = flags_of_three(home, dtype, layers=()) if "--pretrained_lora" in flags else flags_of_three(home, dtype)
    result = run_script("train.py", *own, "--out_dir", out, *flags)
    if result.status == 0 and "--plan" not in flags:
        result.curve, result.lora = curve(log_of(out)), lora_of(out)
    return result

def draw(home, out, *flags):
    works("predict.py", "--image", home / "data/control/cat.png", "--prompt", "add a red border",
          "--cache_dir", home / "cache-float32", "--out", out, "--num_inference_steps", 2, *NATIVE,
          "--device", "cpu", "--dtype", "float32", "--lora", *flags)
    return picture_files.read_image(out).tobytes()

@pytest.mark.parametrize("form", VARIANTS)
def test_a_file_trains_and_draws_as_the_folder_of_its_weights(tmp_path, home, form):
    """Losses, LoRA and pictures, bit for bit. An fp8 file's folder is dequantized by hand."""
    state, weights = file_of(form)
    file, folder = write(state, tmp_path / "x.safetensors"), folder_of(weights, tmp_path / "folder")
    got = train_three(home, tmp_path / "file", "--transformer", file)
    assert got.status == 0, got.err
    want = train_three(home, tmp_path / "by hand", "--transformer", folder)
    assert got.curve == want.curve
    assert_bitwise(got.lora, want.lora)
    ask = ["", "--true_cfg_scale", 1]
    assert draw(home, tmp_path / "a.png", *ask, "--transformer", file) == draw(
        home, tmp_path / "b.png", *ask, "--transformer", folder)
    if form == "cast": # and not as --model's own
        assert got.curve != train_three(home, tmp_path / "own").curve

@pytest.mark.parametrize("dtype, flags", [
    ("bfloat16", ["--pretrained_lora", "LORA", "--offload", 2]), ("bfloat16", ["--quantize", "int8"]),
    ("float32", ["--quantize", "nf4", "--offload", "all"])])
def test_other_ways_to_place_its_blocks_are_those_of_the_folder(tmp_path, home, dtype, flags):
    """Offloaded, in few bits, from another LoRA, in bf16."""
    if "nf4" in flags:
        pytest.importorskip("bitsandbytes")
    state, weights = file_of("rows")
    flags = [lora_file(tmp_path, {k: 0.05 * v for k, v in lora_tensors().items()}) if flag == "LORA" else flag
             for flag in flags]
    runs = [train_three(home, tmp_path / f"run-{path.stem}", "--transformer", path, *flags, dtype=dtype)
            for path in (write(state, tmp_path / "x.safetensors"), folder_of(weights, tmp_path / "folder"))]
    assert [run.status for run in runs] == [0, 0], runs[0].err
    assert runs[0].curve == runs[1].curve
    assert_bitwise(runs[0].lora, runs[1].lora)

@pytest.mark.parametrize("form", ["cast", "weight_scale", "rows"])
def test_fp8_stays_fp8_under_quantize_fp8(tmp_path, form):
    """Bytes and scales are the file's: nothing is rounded a second time. Other layers are unpacked."""
    state, weights = file_of(form)
    file = write(state, tmp_path / "x.safetensors")
    transformer = predict.load_transformer(TINY, "float32", file=str(file))
    predict.add_lora(transformer, r=2, target_modules=["to_q"]) # whose base layers are elsewhere
    predict.place_transformer(transformer, "cpu", "fp8")
    assert not transformer.training
    names = {name.replace(".base_layer", ""): m for name, m in transformer.named_modules()
             if isinstance(m, quantization.LowBitLinear)}
    assert {f"{name}.weight" for name in names} == set(MATRICES)
    for name, layer in names.items():
        stored = next(v for k, v in state.items() if k.endswith(f"{name}.weight"))
        assert torch.equal(layer.weight, stored.view(torch.int8)) and layer.scale.shape == (len(stored), 1)
        assert torch.equal(layer.unpacked(torch.float32), weights[f"{name}.weight"]), name
        assert torch.equal(layer.bias, weights[f"{name}.bias"].float()), name
    for name, p in transformer.named_parameters():
        if "transformer_blocks" not in name:
            assert torch.equal(p, weights[name].float()), name

class Held(TorchDispatchMode):
    """Inside `with`: the greatest number of bytes, beside mappings of a file, that were alive at once. (LiveBytes of
    training/plan.py counts a mapping, too, once an operation returns a view of it.)"""
    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for t in tree_leaves(out):
            if torch.is_tensor(t) and t.device.type == "cpu" and t.untyped_storage()._cdata not in known:
                storage = t.untyped_storage()
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out

@pytest.mark.parametrize("how", ["none", "int8", "fp8"])
def test_host_memory_holds_one_block(tmp_path, how):
    """Eight blocks of an fp8 file go to a device, bf16 or in few bits; the host never has two of them in bf16, and with
    fp8 not even one: a block as it is in the file is half a one."""
    config = json.loads((TINY / "transformer/config.json").read_bytes()) | dict(num_layers=8)
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer/config.json").write_text(json.dumps(config), "utf-8")
    state, scales = with_scale(rows=True)
    state |= {f"{k.removesuffix('.weight')}.weight_scale": v for k, v in scales.items()}
    for n in range(1, 8):
        state |= {k.replace(".0.", f".{n}.", 1): v for k, v in state.items() if k.startswith("transformer_blocks.0.")}
    file = write(state, tmp_path / "x.safetensors")
    block = 2 * sum(v.numel() for k, v in OURS.items() if k.startswith("transformer_blocks.0."))
    with Held() as held:
        transformer = predict.load_transformer(folder, "bfloat16", file=str(file))
        predict.place_transformer(transformer, "meta", how)
    print(f"{how}: {held.peak / block:.2f} blocks")
    assert block / 2 < held.peak < dict(none=1.85, int8=1.85, fp8=0.95)[how] * block

def files_of(folder):
    return {path: common.file_hash(path) for path in folder.rglob("*") if path.is_file()}

LAYER = "transformer_blocks.0.attn.to_q"
U8, I8 = torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.int8)

def noted(**said):
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

def without(names, state=OURS):
    """A state dict without the tensors whose names contain one of these, or are one of them."""
    return {k: v for k, v in state.items() if k not in names and (not isinstance(names, str) or names not in k)}

def stripped(form, all_of_them=False):
    """A file in fp8 that has lost the scale of its first matrix, or all of them."""
    state, _ = file_of(form)
    scales = sorted(k for k in state if k.endswith((".scale_weight", ".weight_scale")))
    return without(tuple(scales if all_of_them else scales[:1]), state)

FOREIGN = [
    # (by one function with --lora: test_foreign_loras.py has all that is no safetensors file)
    ("gguf", lambda: b"GGUF" + bytes(200)), ("pickle", lambda: b"PK\3\4" + bytes(200)),
    ("no whole", lambda: safetensors.torch.save(OURS)[:-5]), ("none", lambda: {}),
    ("a LoRA", lambda: lora_tensors()),
    ("a LoRA", lambda: {"lora_unet_transformer_blocks_0_attn_to_q.lora_down.weight": torch.ones(2, 2)}),
    ("nvfp4", lambda: OURS | {f"{LAYER}.weight": U8, f"{LAYER}.comfy_quant": noted(format="nvfp4"),
                              f"{LAYER}.weight_scale_2": torch.ones(())}),
    ("mxfp8", lambda: OURS | {f"{LAYER}.comfy_quant": noted(format="mxfp8")}),
    ("int8_tensorwise, ConvRot", lambda: {COMFY + k: v for k, v in OURS.items()} | {
        f"{COMFY}{LAYER}.comfy_quant": noted(format="int8_tensorwise", convrot=True)}),
    ("float8_e4m3fn, ConvRot", lambda: OURS | {f"{LAYER}.comfy_quant": noted(format="float8_e4m3fn", convrot=True)}),
    ("notes", lambda: OURS | {f"{LAYER}.comfy_quant": torch.tensor([1, 2], dtype=torch.uint8)}),
    ("nvfp4", lambda: safetensors.torch.save(OURS, dict(_quantization_metadata=json.dumps(
        dict(layers={LAYER: dict(format="nvfp4"), "text_encoder.x": dict(format="mxfp8")}))))),
    ("int8", lambda: OURS | {f"{LAYER}.weight": I8, f"{LAYER}.weight_scale": torch.ones(4)}),
    ("4 bits", lambda: OURS | {f"{LAYER}.weight": U8}),
    ("SVDQuant", lambda: without(f"{LAYER}.") | {f"{LAYER}.qweight": I8, f"{LAYER}.wscales": torch.ones(4)}),
    ("GPTQ", lambda: without(f"{LAYER}.") | {f"{LAYER}.qweight": I8, f"{LAYER}.qzeros": I8}),
    ("bitsandbytes", lambda: OURS | {f"{LAYER}.weight.absmax": torch.ones(4)}),
    ("neither one scale", lambda: OURS | {f"{LAYER}.weight_scale": torch.ones(160, 4)}),
    ("neither one scale", lambda: OURS | {"transformer_blocks.9.weight_scale": torch.ones(1)}),
    ("ema.diffusion_model.transformer_blocks and model.diffusion_model.transformer_blocks", lambda: {
        f"{prefix}.diffusion_model.{k}": v for prefix in ("ema", "model") for k, v in OURS.items()}),
    ("lack their scale", lambda: stripped("weight_scale")),
    ("42 weights in fp8 lack their scale", lambda: stripped("scale_weight", all_of_them=True)),
    ("has scaled_fp8", lambda: file_of("cast")[0] | {f"{COMFY}scaled_fp8": torch.zeros(2, dtype=E4M3)}),
    ("1 weights in fp8 lack their scale", lambda: file_of("rows")[0] | {
        "img_in.weight": OURS["img_in.weight"].to(E4M3)}),
    ("Flux", lambda: {"text_encoders.t5xxl.x": torch.ones(2), **{f"{COMFY}{kind}transformer_blocks.0.attn.to_q.weight":
                                                              torch.ones(2) for kind in ("", "single_")}}),
    ("Flux", lambda: {"transformer_blocks.0.attn.to_q.weight": torch.ones(2),
                      "single_transformer_blocks.0.attn.to_q.weight": torch.ones(2)}),
    ("SDXL", lambda: {f"{COMFY}input_blocks.0.0.weight": torch.ones(2), "conditioner.x": torch.ones(2),
                      f"{COMFY}input_blocks.4.1.transformer_blocks.0.attn1.to_q.weight": torch.ones(2)}),
    ("SD 3", lambda: {f"{COMFY}joint_blocks.0.x_block.attn.qkv.weight": torch.ones(2)}),
    ("is no transformer of Qwen-Image (a tensor of it: x)", lambda: {"x": torch.ones(2)})]

def bytes_of(content):
    return content if isinstance(content, bytes) else safetensors.torch.save({k: v.clone() for k, v in content.items()})

@pytest.mark.parametrize("what, make", FOREIGN, ids=lambda x: x if isinstance(x, str) else "")
def test_a_file_of_another_kind_is_one_line_that_names_it(tmp_path, what, make):
    """By the flag's type, so before anything is downloaded or written."""
    file = tmp_path / "x.safetensors"
    file.write_bytes(bytes_of(make()))
    before = files_of(tmp_path)
    with refused(f"--transformer {file}", what):
        read_layout(str(file))
    assert files_of(tmp_path) == before

@pytest.mark.parametrize("form", ["scale_weight", "weight_scale", "rows"])
def test_matrices_in_bf16_beside_scaled_ones_and_marks_of_other_parts_are_taken(tmp_path, form):
    """As in ComfyUI's mixed files; what stands beside the transformer's prefix has its own scales."""
    state, _ = file_of(form)
    prefix = COMFY if form == "scale_weight" else ""
    name = f"{LAYER}.weight"
    state = without(f"{LAYER}.", state) | {prefix + k: v for k, v in OURS.items() if k.startswith(f"{LAYER}.")}
    layout = read_layout(write(state, tmp_path / "x.safetensors"))
    assert name not in layout.scales and len(layout.scales) == len(MATRICES) - 1
    cast, _ = file_of("cast")
    beside = {"text_encoders.qwen.scaled_fp8": torch.zeros(2, dtype=E4M3),
              "text_encoders.qwen.x.comfy_quant": noted(format="float8_e4m3fn")}
    assert not read_layout(write(cast | beside, tmp_path / "y.safetensors")).scales

MISFITS = [
    ("missing in the file, [", lambda: without("transformer_blocks.2.")),
    ("1 tensors are not as", lambda: without("img_in.bias")),
    ("missing by the config", lambda: OURS | {"transformer_blocks.3.attn.to_q.weight": torch.ones(2)}),
    ("img_in.bias: [3] in the file, [", lambda: OURS | {"img_in.bias": torch.ones(3)})]

@pytest.mark.parametrize("what, make", MISFITS, ids=[what for what, _ in MISFITS])
def test_a_file_that_does_not_fit_the_model_is_one_line(tmp_path, what, make):
    file = write(make(), tmp_path / "x.safetensors")
    args = SimpleNamespace(model="tiny", transformer=str(file))
    with refused(f"--transformer {file}", what, TINY / "transformer/config.json"):
        predict.find_transformer(args)

@pytest.mark.parametrize("prefix", ["", COMFY])
def test_the_mark_of_a_2511_must_be_the_models(tmp_path, prefix):
    model = changed_model(tmp_path / "tiny-2511", zero_cond_t=True)
    state = {prefix + k: v for k, v in OURS.items()}
    file = write(state, tmp_path / "2509.safetensors")
    marked = write(state | {prefix + MARK_2511: torch.tensor([])}, tmp_path / "2511.safetensors")
    def find(path, folder):
        return predict.find_transformer(SimpleNamespace(model=str(folder), transformer=str(path)))
    for path, folder in ((marked, model), (file, TINY)):
        assert find(path, folder) == (folder, str(path))
    transformer = predict.load_transformer(model, "float32", file=str(marked))
    predict.place_transformer(transformer, "cpu")
    assert transformer.zero_cond_t
    for path, folder, word in ((marked, TINY, "has"), (file, model, "lacks")):
        with refused(path, f"{word} {MARK_2511}", folder / "transformer/config.json", "zero_cond_t"):
            find(path, folder)

@pytest.mark.parametrize("script", ["train.py", "predict.py"])
def test_scripts_stop_at_second_zero(tmp_path, home, script):
    """With one shard of several; nothing is written but what train.py has learned of the pictures. (With no file at
    all: test_seeds.py.)"""
    shard = write(without("img_in"), tmp_path / "m-00001-of-00005.safetensors")
    ask = ["--data", home / "data"] if script == "train.py" else ["--image", home / "data/control/cat.png", "--prompt",
                                                                  "go", "--lora", ""]
    result = run_script(script, *ask, "--cache_dir", tmp_path / "c", *NATIVE, "--transformer", shard)
    assert result.status == 1 and len(result.err.splitlines()) == 1, result.err
    assert is_one_line(result.errors[0], f"--transformer {shard}", "one of several")
    assert files_of(tmp_path).keys() <= {shard, tmp_path / "c/pictures.txt"}

def test_a_file_as_the_model_names_the_flag(tmp_path):
    with refused("--model", "take the file as --transformer"):
        cache.find_model(str(write(OURS, tmp_path / "x.safetensors")), ["transformer"])

def test_a_run_says_on_which_file_it_was_trained(tmp_path, home):
    """In its log, its LoRA, its last command; --resume takes the same file under another name; --plan takes it."""
    state, _ = file_of("scale_weight")
    file = write(state, tmp_path / "my model.safetensors")
    flags = ["--transformer", file, "--quantize", "fp8"]
    FakeTensorMode.cache_clear() # what earlier tests have planned would hide that the first plan fails
    plan = train_three(home, tmp_path / "run", *flags, "--plan")
    assert plan.status == 0 and "expected memory" in plan.out and not (tmp_path / "run").exists(), plan.err
    result = train_three(home, tmp_path / "run", *flags, "--lr_scheduler", "constant")
    assert result.status == 0, result.err
    assert "my model.safetensors: the transformer, 42 matrices in fp8 (e4m3) and" in result.out, result.out
    assert json.loads((tmp_path / "run/log.jsonl").read_bytes().splitlines()[0])["flags"]["transformer"] == str(file)
    assert predict.read_lora(tmp_path / "run").meta["train.transformer"] == str(file)
    [line] = [line for line in result.out.splitlines() if "python predict.py" in line]
    assert shlex.join(map(str, flags)) in line
    renamed = file.rename(tmp_path / "renamed.safetensors")
    more = ["--quantize", "fp8", "--lr_scheduler", "constant", "--max_steps", 4, "--resume", "--transformer", renamed]
    assert train_three(home, tmp_path / "run", *more).status == 0

def test_shards_of_a_file_train_as_one_process(tmp_path, home, start):
    file = write(file_of("rows")[0], tmp_path / "x.safetensors")
    flags = [*ADAMW, "--transformer", file, "--quantize", "fp8"]
    one = train_three(home, tmp_path / "one", *flags)
    assert one.status == 0, one.err
    ranks = start_ranks(start, *flags_of_three(home), *flags, "--out_dir", tmp_path / "two", "--fsdp", "--offload", 1)
    assert not any([r.wait() for r in ranks]), [r.output() for r in ranks]
    assert sum("the transformer" in r.output() for r in ranks) == 1 # the first process says it
    assert [loss for _, loss, *_ in curve(log_of(tmp_path / "two"))] == pytest.approx(
        [loss for _, loss, *_ in one.curve], rel=1e-5)

# ---- a folder --------------------------------------------------------------------------------------------------------

def changed_model(folder, pipeline=None, without=(), **fields):
    """A copy of tiny with another pipeline's class, or other fields in its transformer's config.json."""
    model = copy_model(folder, *without)
    for path, change in ((model / "model_index.json", dict(_class_name=pipeline) if pipeline else {}),
                         (model / "transformer/config.json", fields)):
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_bytes()) | change), "utf-8")
    return model

PLUS, V1 = "QwenImageEditPlusPipeline", "QwenImageEditPipeline"
OTHER_FOLDERS = { # what differs in --transformer's folder, or in --model's; what the error names
    "text-to-image": (dict(pipeline="QwenImagePipeline"), {}, ["QwenImagePipeline"]),
    "Flux": (dict(pipeline="FluxPipeline"), {}, ["FluxPipeline"]),
    "v1 beside 2509": (dict(pipeline=V1), {}, [V1, PLUS]), "2509 beside v1": ({}, dict(pipeline=V1), [V1, PLUS]),
    "another class": (dict(_class_name="FluxTransformer2DModel"), {}, ["FluxTransformer2DModel"]),
    "2511 beside 2509": (dict(zero_cond_t=True), {}, ["zero_cond_t True", "False"]),
    "layered": (dict(use_layer3d_rope=True), {}, ["use_layer3d_rope"]),
    "channels": (dict(in_channels=128), {}, ["in_channels 128", "64"]),
    "another text encoder": (dict(joint_attention_dim=3584), {}, ["joint_attention_dim 3584", "64"])}

@pytest.mark.parametrize("kind", OTHER_FOLDERS)
def test_a_folder_of_another_model_is_one_line_that_names_both(tmp_path, kind):
    theirs, ours, words = OTHER_FOLDERS[kind]
    other, model = changed_model(tmp_path / "other", **theirs), changed_model(tmp_path / "model", **ours)
    args = SimpleNamespace(model=str(model), transformer=str(other))
    with refused(f"--transformer {other}", *words):
        predict.find_transformer(args)

def test_folders_that_people_have_are_taken(tmp_path, capfd):
    """A merged 2509; a folder with nothing but transformer/, also of a v1, of which nothing tells; a --model without a
    transformer; fields that a newer diffusers has added; a pruned one."""
    model = changed_model(tmp_path / "model")
    encoders = changed_model(tmp_path / "encoders")
    shutil.rmtree(encoders / "transformer")
    alone = folder_of(OURS, tmp_path / "alone")
    old = changed_model(tmp_path / "old")
    config = json.loads((old / "transformer/config.json").read_bytes())
    for field in ("zero_cond_t", "use_layer3d_rope", "use_additional_t_cond"):
        config.pop(field)
    (old / "transformer/config.json").write_text(json.dumps(config | dict(pooled_projection_dim=768)), "utf-8")
    for base in (model, encoders):
        for other in (changed_model(tmp_path / f"{base.name}-merged"), alone, old,
                      changed_model(tmp_path / f"{base.name}-pruned", num_layers=2)):
            args = SimpleNamespace(model=str(base), transformer=str(other))
            assert predict.find_transformer(args) == (other, None)
    assert capfd.readouterr() == ("", "")

@pytest.mark.parametrize("name, size, notes", [
    ("a" * 900_000 + ".qweight", 1, {}), ("_" * 900_000 + "b", 1, {}), ("lora" * 200_000, 1, {}),
    ("transformer_blocks.0.attn.to_q.comfy_quant", 10**8, {}),
    *[("transformer_blocks.0.attn.to_q.weight", 1, {"_quantization_metadata": text}) for text in (
        "[]", "3", '{"layers": []}', '{"layers": {"transformer_blocks.0.attn.to_q": 3}}', "[" * 100_000,
        json.dumps({"layers": {"transformer_blocks.0.attn.to_q": {"format": "x\x1b" * 9999, "convrot": [1]}}}),
        json.dumps({"layers": {"transformer_blocks.0.attn.to_q": {"format": "x\x1b" * 9999, "convrot": True}}}))]])
def test_a_strangers_names_and_notes_cost_a_line(tmp_path, name, size, notes):
    """Long names, of which a regular expression would make hours; a note of 100 MB; notes of other types."""
    path = tmp_path / "a.safetensors"
    save_file({name: torch.zeros(size, dtype=torch.uint8)}, path, metadata=notes or None)
    with within(5), pytest.raises(common.InputError) as e:
        read_layout(path)
    assert is_one_line(str(e.value), str(path)) and len(str(e.value)) < 1000
