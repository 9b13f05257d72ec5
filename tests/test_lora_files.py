"""
LoRA files: those of any tool are loaded whole or refused; what train.py writes loads in stock diffusers and goes on; a
LoRA to start from, and one to train on top of.
"""
import math
import re

import pytest
import safetensors.torch
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

import cache
import common
import predict
import rope_patch
from tests.harness import (DEVICE, DTYPE_NAME, E, ON_DEVICE, SMALL, TINY, assert_bitwise, assert_effect, curve,
                           damage_tensors, hot_model, is_one_line, layers_of, log_of, lora_file, lora_of, lora_tensors,
                           make_batch, patched_copy, refused, rel, renamed, run, run_script, show, stock_pipeline,
                           train_demo, train_log)

def tiny_with(path, scale=1.0):
    """The tiny transformer with this LoRA."""
    transformer = predict.load_transformer(TINY, DTYPE_NAME)
    predict.load_loras(transformer, [path], [scale])
    return predict.place_transformer(transformer, DEVICE)

# ---- files of other tools --------------------------------------------------------------------------------------------

def as_kohya(tensors):
    names = {k: k.removeprefix("transformer.").rsplit(".lora_", 1)[0].replace(".", "_") for k in tensors}
    return {f"lora_unet_{names[k]}.lora_{'down' if 'lora_A' in k else 'up'}.weight": v for k, v in tensors.items()}

def with_alpha(tensors):
    """alpha equal to the rank, which changes nothing."""
    return tensors | {k.rsplit(".lora_", 1)[0] + ".alpha": torch.tensor(2.0) for k in tensors}

FOREIGN = {
    "diffusers": lambda t: t,
    "ComfyUI": renamed("transformer.", "diffusion_model."),
    "ComfyUI, alpha": lambda t: with_alpha(renamed("transformer.", "diffusion_model.")(t)),
    "kohya, alpha": lambda t: with_alpha(as_kohya(t)),
    "peft, adapter named": lambda t: {k.replace("transformer.tr", "tr").replace(".weight", ".default.weight"): v
                                      for k, v in t.items()},
    "no prefix": lambda t: {k.removeprefix("transformer."): v for k, v in t.items()},
    "Qwen-Image-Lightning": lambda t: {k.removeprefix("transformer.").replace("lora_A", "lora_down").replace(
        "lora_B", "lora_up"): v for k, v in with_alpha(t).items()},
}

@pytest.mark.parametrize("kind", FOREIGN)
def test_a_lora_of_any_tool_is_loaded_whole(tmp_path, kind):
    assert_effect(tiny_with(lora_file(tmp_path, FOREIGN[kind](lora_tensors())), 0.5), lora_tensors(), 0.5)

LAYER = "transformer.transformer_blocks.0.attn.to_q"
A, B = f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"
BAD_LORAS = { # what becomes of a good one's six layers, and what the error counts or names
    "nothing in it": (lambda t: {}, "no LoRA"),
    "another model's layers": (renamed("to_q", "qkv"), "4 of 12"),
    "more blocks than the model has": (renamed("blocks.1", "blocks.57"), "6 of 12"),
    "A only": (lambda t: {k: v for k, v in t.items() if "lora_A" in k}, "does not fit"),
    "one B missing": (lambda t: {k: v for k, v in t.items() if k != B}, "to_q"),
    "wrong width": (lambda t: t | {A: torch.ones(2, 96)}, "to_q", "96"),
    "A and B of different rank": (lambda t: t | {B: torch.ones(128, 4)}, "to_q"),
    "a vector": (lambda t: t | {A: torch.ones(128)}, "to_q"),
    "NaN": (lambda t: t | {A: t[A].index_fill(1, torch.tensor(5), math.nan)}, "to_q"),
    "a checkpoint": (lambda t: {f"{LAYER}.weight": torch.ones(128, 128)}, "no LoRA"),
    "a text encoder's": (renamed("transformer.", "text_encoder."), "does not fit"),
    "of a layer that is not linear": (renamed("to_q", "norm_q"), "Norm"),
    "kohya of another model": (lambda t: as_kohya(renamed("attn.to_q", "self_attn.qkv")(t)),),
    "a LoKr": (lambda t: {"lycoris_unet_x.lokr_w1": torch.ones(2, 2)}, "LoKr"),
    "of another model": (renamed("transformer_blocks", "pipe.dit.transformer_blocks"), "does not fit"),
    "a DoRA of kohya": (lambda t: as_kohya(t) | {"lora_unet_x.dora_scale": torch.ones(128, 1)}, "DoRA"), # loads by half
    "a DoRA": (lambda t: t | {A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(128)}, "DoRA"),
    "peft's": (renamed("transformer.", "base_model.model."), "does not fit"), # its scale is in another file
}

@pytest.mark.parametrize("kind", BAD_LORAS)
def test_a_lora_that_does_not_fit_is_an_error_with_counts(tmp_path, kind):
    """diffusers itself only warns, and draws the base model's picture."""
    change, *named = BAD_LORAS[kind]
    with refused(tmp_path, *named):
        tiny_with(lora_file(tmp_path, change(lora_tensors())))

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5000000000\n"

@pytest.mark.parametrize("name, content", [
    ("gone.safetensors", None), ("no/such/user", None), (".", None), ("empty.safetensors", b""),
    ("pointer.safetensors", POINTER), ("picture.png", b"\x89PNG")])
def test_a_lora_that_is_no_lora_is_one_line(tmp_path, monkeypatch, name, content):
    monkeypatch.setattr(cache, "load_pipeline", lambda *_: pytest.fail("not told before the work began"))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = run_script("predict.py", "--lora", tmp_path / name, *ON_DEVICE)
    assert result.status == 1 and is_one_line(result.errors[-1], tmp_path / name)

def test_a_safetensors_file_of_anything_else_is_one_line(tmp_path):
    """An optimizer's, as it lies beside each checkpoint's LoRA; a model's; names that a reader may trip on."""
    path = tmp_path / "x.safetensors"
    matrix, whole = torch.zeros(2, 2), lora_tensors()
    names = ["", "lora", "a.lora_A", "lora_A.weight", "transformer.lora_A.weight", "lora_unet_x.lora_down.weight",
             "transformer_blocks.0.attn.to_q.lora_A.default.weight", "diffusion_model.x.lora_down.weight", "x.alpha",
             "exp_avg.transformer_blocks.0.attn.to_q.lora_A.default.weight", "lora_te1_x.lora_up.weight",
             "lora_unet_transformer_blocks_0_attn_to_q.alpha"]
    for tensors in [{name: matrix} for name in names] + [{f"exp_avg.{k}": v for k, v in whole.items()},
                                                         {k: v[0] for k, v in whole.items()}]:
        safetensors.torch.save_file(tensors, path)
        with refused(path):
            tiny_with(path)
    for part in ("vae", "text_encoder", "transformer"):
        file, = (TINY / part).glob("*.safetensors")
        with refused(file) as e:
            predict.read_lora(file)

@pytest.mark.parametrize("meta", ["{", "[]", "5", "null", '{"transformer.r": 2}', '{"transformer.rank_pattern": 3}'])
def test_a_lora_with_strange_metadata_is_no_traceback(tmp_path, meta):
    path = tmp_path / predict.LORA_FILE
    safetensors.torch.save_file(lora_tensors(), path, metadata=dict(lora_adapter_metadata=meta))
    try:
        tiny_with(path)
    except common.InputError as e:
        assert is_one_line(str(e), path)

def test_a_hub_id_is_fetched_unless_a_folder_of_ours_has_its_name(tmp_path, monkeypatch):
    def download(repo, name):
        if repo == "a/none":
            raise ConnectionError
        return f"/hub/{repo}/{name}"
    monkeypatch.setattr("predict.hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    assert predict.find_lora("a/b").as_posix() == f"/hub/a/b/{predict.LORA_FILE}"
    assert predict.find_lora("a/b/deep/y.safetensors").as_posix() == "/hub/a/b/deep/y.safetensors"
    with refused("a/none", "hub"):
        predict.find_lora("a/none")
    (tmp_path / "a").mkdir()
    with refused("a/b"): # a path of ours, mistyped
        predict.find_lora("a/b")

# ---- what train.py writes, and reads ---------------------------------------------------------------------------------

def first_item(ns):
    return ns["load_item"](ns["pick"](0))

def stock_loss(ns, *loras):
    """The stock model's loss, with LoRAs loaded by the stock pipeline, for the first sample of this training."""
    pipe = stock_pipeline(TINY)
    for i, path in enumerate(loras):
        pipe.load_lora_weights(str(path), adapter_name=f"l{i}")
        pipe.set_adapters([f"l{j}" for j in range(i + 1)])
    return loss_of(pipe.transformer, ns)

def loss_of(transformer, ns):
    item = first_item(ns)
    x = torch.cat([(1 - item.s) * item.x0 + item.s * item.noise, item.controls])
    with torch.no_grad():
        v = transformer(hidden_states=x[None], encoder_hidden_states=item.prompt[None], timestep=item.s[None],
                        img_shapes=[item.img_shapes], return_dict=False)[0][0]
    error = (v[:len(item.noise)] - (item.noise - item.x0)).square().mean(-1)
    return ((error * item.weight).sum() / item.weight.sum()).item()

ONE = ["--batch_size", 1, "--lr_scheduler", "constant", "--device", "cpu"]

def comfyui_model(path):
    """tiny with this file, as ComfyUI adds it (comfy/lora.py and comfy/weight_adapter/lora.py of its commit 17358c8).
    It knows layers by three prefixes, reads no metadata, and where a layer has no .alpha it takes the rank -> (model,
    the file's keys that it leaves out, which its console lists)."""
    model = QwenImageTransformer2DModel.from_pretrained(TINY / "transformer")
    tensors = safetensors.torch.load_file(path)
    left = set(tensors)
    for name, weight in model.state_dict().items():
        for prefix in ("", "transformer.", "diffusion_model."):
            layer = prefix + name.removesuffix(".weight")
            b, a, alpha = keys = [f"{layer}.{end}" for end in ("lora_B.weight", "lora_A.weight", "alpha")]
            if b in tensors:
                scale = tensors[alpha].item() / len(tensors[a]) if alpha in tensors else 1.0
                weight += scale * (tensors[b] @ tensors[a])
                left -= set(keys)
    return model, left

def short_run(tmp_path, *flags):
    """Two steps with these flags, all-linear -> result of run_script, and the loss of the model that was trained."""
    run = train_demo(tmp_path / "a", *ONE, "--lora_targets", "all-linear", "--max_steps", 2, *flags)
    assert run.status == 0, run.err
    return run, loss_of(run.globals["transformer"], run.globals)

ALPHA = ["--lora_rank", 4, "--lora_alpha", 6]
KINDS = { # -> flags, and the scales in training
    "plain": (ALPHA, {1.5}),
    "rsLoRA": ([*ALPHA, "--lora_args", "use_rslora=true"], {3.0}),
    "patterns": ([*ALPHA, "--lora_args", 'rank_pattern={"to_q":2,"net.2":8}', 'alpha_pattern={"to_k":3}'],
                 {3.0, 1.5, 0.75})}

@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_lora_train_save_load_in_stock_and_go_on(tmp_path, kind, caplog):
    """The file and a checkpoint's in the stock pipeline, and as --pretrained_lora, give the loss of the model that was
    trained; stock says nothing about their metadata; it resumes bit for bit; damaged it is refused. Every layer
    learns."""
    flags, _ = KINDS[kind]
    run, want = short_run(tmp_path, *flags)
    again = [*ONE, "--lora_targets", "all-linear", *flags]
    train_log(tmp_path / "r", *again, "--max_steps", 1)
    assert curve(train_log(tmp_path / "r", *again, "--max_steps", 2, "--resume")) == curve(log_of(tmp_path / "a"))
    assert_bitwise(lora_of(tmp_path / "r"), lora_of(tmp_path / "a"))
    meta = predict.read_lora(tmp_path / "a")[1]
    lora_args = [list(common.key_value(text)) for text in flags[5:]]
    assert meta["train.config"]["lora_args"] == lora_args and meta["train.config"]["data_hash"]
    assert {"torch", "peft"} <= meta["train.versions"].keys()
    assert abs(want / stock_loss(run.globals) - 1) > 1e-4
    for path in (tmp_path / "a", tmp_path / "a/checkpoint-000002"):
        caplog.clear()
        assert stock_loss(run.globals, path / predict.LORA_FILE) == pytest.approx(want, rel=1e-6)
        assert not [r for r in caplog.records if r.name.startswith("diffusers")], caplog.text
        log = train_log(tmp_path / f"p{path.name}", "--pretrained_lora", path, *ONE, "--max_steps", 1)
        assert log[0]["loss"] == pytest.approx(want, rel=1e-6)
    model = QwenImageTransformer2DModel.from_pretrained(TINY / "transformer")
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "_blocks." in n}
    last = rf"blocks\.{len(model.transformer_blocks) - 1}\.(attn\.(add_q_proj|to_add_out)|txt_mlp)"
    dead = {n for n in linears if re.search(last, n)}
    zeros = {"transformer_blocks.2.txt_mod.1"} if kind == "DoRA" else set()
    assert set(layers_of(lora_of(tmp_path / "a"))) == linears - dead - zeros and len(dead) == 4
    assert all(v.any() for k, v in lora_of(tmp_path / "a").items() if "lora_B" in k)
    damage_tensors(tmp_path / "a" / predict.LORA_FILE)
    with refused(tmp_path / "a"):
        predict.read_lora(tmp_path / "a")

@pytest.mark.parametrize("kind", KINDS)
def test_a_run_s_file_has_its_strength_in_comfyui_too(tmp_path, kind):
    """Its alpha is its rank in every layer, and a training goes on from there; a checkpoint keeps the alpha, which
    ComfyUI does not know: tools/convert_lora.py tells it. ComfyUI leaves out a DoRA's magnitudes, and nothing else."""
    flags, scales = KINDS[kind]
    run, want = short_run(tmp_path, *flags)
    folders = tmp_path / "a", tmp_path / "a/checkpoint-000002"
    for folder, expected in zip(folders, ({1.0}, scales)):
        layers = [m for m in tiny_with(folder).modules() if hasattr(m, "lora_A")]
        assert {m.scaling["lora0"] for m in layers} == expected
    (model, left), (of_checkpoint, _) = [comfyui_model(folder / predict.LORA_FILE) for folder in folders]
    if kind == "DoRA":
        assert left == {k for k in lora_of(folders[0]) if "magnitude" in k} and left
        return
    assert not left and loss_of(model, run.globals) == pytest.approx(want, rel=1e-6)
    assert loss_of(of_checkpoint, run.globals) != pytest.approx(want, rel=1e-5)
    for n, folder in enumerate(folders):
        file = tmp_path / f"{n}.safetensors"
        assert run_script("tools/convert_lora.py", folder, "--to", "comfyui", "--out", file).status == 0
        model, left = comfyui_model(file)
        assert not left and loss_of(model, run.globals) == pytest.approx(want, rel=1e-6)

def test_a_lora_s_dropout_is_the_training_s_alone(tmp_path):
    """Pictures are generated without, here and in the stock pipeline, although the LoRA was trained with it; predict.py
    also where another program's file still says it."""
    run, _ = short_run(tmp_path, "--lora_dropout", 0.5)
    assert stock_loss(run.globals, tmp_path / "a") == stock_loss(run.globals, tmp_path / "a")
    state, meta = predict.read_lora(tmp_path / "a")
    assert meta["transformer.lora_dropout"] == 0 and meta["train.config"]["lora_dropout"] == 0.5
    meta = {k: v for k, v in meta.items() if k.startswith("transformer.")} | {"transformer.lora_dropout": 0.5}
    transformer = tiny_with(lora_file(tmp_path, state, **meta))
    assert any(isinstance(m, torch.nn.Dropout) and m.p == 0.5 for m in transformer.modules())
    assert loss_of(transformer, run.globals) == loss_of(transformer, run.globals)

def test_with_alpha_as_the_rank_a_run_s_file_is_its_last_checkpoint_s(tmp_path):
    short_run(tmp_path, "--lora_rank", 4)
    files = [tmp_path / folder / predict.LORA_FILE for folder in ("a", "a/checkpoint-000002")]
    assert files[0].read_bytes() == files[1].read_bytes()

def test_a_lora_that_was_merged_is_part_of_the_frozen_base(tmp_path, two_loras):
    """tools/convert_lora.py LORA --to model, then --transformer: the first loss is stock's with that LoRA loaded; only
    the trained one is saved; both in stock give the loss after training; another base is refused on --resume."""
    for n, lora in enumerate(two_loras):
        assert run_script("tools/convert_lora.py", lora, "--to", "model", "--out", tmp_path / f"merged-{n}", "--dtype",
                          "float32").status == 0
    flags, out_dir = [*ONE, "--lora_targets", "to_q", "--transformer"], tmp_path / "my run"
    run = train_demo(out_dir, *flags, tmp_path / "merged-1", "--max_steps", 1)
    first, want = log_of(out_dir)[0]["loss"], stock_loss(run.globals, two_loras[1])
    show("first loss, from stock's", abs(first / want - 1), 1e-5)
    assert first == pytest.approx(want, rel=1e-5) and first != pytest.approx(stock_loss(run.globals), rel=1e-4)
    assert {k.rsplit(".lora_")[0].rsplit(".", 1)[1] for k in lora_of(out_dir)} == {"to_q"}
    with torch.no_grad():
        loss, = run.globals["flow_loss"](run.globals["transformer"], [first_item(run.globals)])
    want = stock_loss(run.globals, out_dir, two_loras[1])
    assert loss.item() == pytest.approx(want, rel=1e-5) and want != pytest.approx(first, rel=1e-4)
    result = train_demo(out_dir, *flags, tmp_path / "merged-0", "--max_steps", 2, "--resume")
    assert result.status == 1 and is_one_line(result.errors[-1], "model_hash: ")

@pytest.mark.parametrize("flags, status, named", [
    ("--pretrained_lora GOOD --lora_rank 8", 2, "--lora_rank"), ("--pretrained_lora GOOD --lora_rank=8", 2, "rank"),
    ("--pretrained_lora GOOD --lora_alpha 3", 2, "--lora_alpha"), ("--pretrained_lora BAD", 1, "4 of 12"),
    ("--pretrained_lora GOOD --lora_targets to_q", 2, "--lora_targets"), ("--lora_args use_dora=true", 2, "use_dora"),
    ("--pretrained_lora GOOD --lora_args use_rslora=true", 2, "--lora_args"), ("--lora_args =3", 2, "--lora_args"),
    ("--lora_args use_dora", 2, "--lora_args"), ("--lora_args no_such=1", 1, "--lora_args"),
    ("--lora_args init_lora_weights=nonsense", 1, "--lora_args")])
def test_a_lora_to_start_from_that_does_not_fit_or_flags_is_refused(tmp_path, two_loras, flags, status, named):
    bad = lora_file(tmp_path, renamed("to_q", "qkv")(lora_tensors()))
    result = train_demo(tmp_path / "a", *flags.replace("GOOD", str(two_loras[0])).replace("BAD", str(bad)).split())
    assert result.status == status and named in result.errors[-1] and (status == 2 or is_one_line(result.errors[-1]))

def test_lora_on_a_bf16_base_is_cast_when_used():
    """Master weights, their gradients and the file stay fp32, peft's own layer gives the same but for bf16's rounding,
    scale and disable work; on an fp32 base nothing differs at all."""
    x, config = torch.randn(3, 24, E), dict(r=4, lora_alpha=6, target_modules=["to_q"], init_lora_weights=False)
    def compute(dtype, ours, scale):
        torch.manual_seed(0)
        model = QwenImageTransformer2DModel(**SMALL).to(dtype).requires_grad_(False)
        predict.add_lora(model, **config) if ours else model.add_adapter(LoraConfig(**config))
        cast_training_params(model)
        layer = model.transformer_blocks[0].attn.to_q
        weights = [p for p in layer.parameters() if p.requires_grad]
        assert isinstance(layer, predict.LoraLinear) == ours and [w.dtype for w in weights] == [torch.float32] * 2
        for n, p in enumerate(weights):
            p.data.normal_(generator=torch.Generator().manual_seed(n))
        layer.enable_adapters(scale > 0)
        layer.scale_layer(scale or 1)
        out = layer(x.to(dtype))
        return [out, *(torch.autograd.grad(out.float().square().sum(), weights) if scale else [])]
    for scale in (1, 0.5, 0):
        exact = compute(torch.float32, False, scale)
        assert_bitwise(compute(torch.float32, True, scale), exact)
        out, *grads = compute(torch.bfloat16, True, scale)
        assert out.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in grads)
        assert [error < 2e-2 for error in map(rel, [out, *grads], exact)] == [True] * len(exact)

class Casts(TorchDispatchMode):
    """Inside `with`: the number of casts to bf16, and those back."""
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten._to_copy.default and args[0].dtype != kwargs.get("dtype")
        return function(*args, **(kwargs or {}))

def test_the_loras_of_a_block_are_cast_together(monkeypatch):
    """Kept or recomputed, the numbers are those of single casts, to the bit; afterwards none is left. So are
    those of the base."""
    samples = make_batch(([(1, 8, 8), (1, 8, 6)], 20), ([(1, 4, 12), (1, 4, 4)], 9))
    def compute(together, recomputed):
        with monkeypatch.context() as patch:
            if not together:
                patch.setattr(common, "find_extra", lambda name: None)
            model = patched_copy(hot_model("2511", dtype=torch.bfloat16, num_layers=3)).requires_grad_(False).train()
            torch.manual_seed(0)
            weights = predict.add_lora(model, r=4, init_lora_weights=False, target_modules=[
                "to_q", "to_k", "add_v_proj", "img_mod.1", "img_mlp.net.2"]).values()
        rope_patch.checkpoint_blocks(model, recomputed)
        with Casts() as casts:
            out = run(model, "packed", samples)
            grads = torch.autograd.grad(sum(o.float().square().sum() for o in out), [*weights])
        assert all(m.cast is None for m in model.modules() if isinstance(m, predict.LoraLinear))
        model.disable_adapters()
        base = run(model, "packed", samples)
        return casts.number, [*out, *grads, *base]
    for recomputed in (0, 3):
        (many, want), (few, got) = compute(False, recomputed), compute(True, recomputed)
        assert_bitwise(got, want)
        assert many - few >= 3 * 2 * (2 * 5 - 1), (many, few) # blocks, there and back, matrices of five layers
