"""tools/convert_lora.py: a LoRA in another form is the same LoRA, and a merged model is base + LoRAs."""
import functools
import json
import math
import os
import re

import numpy as np
import peft
import pytest
import torch
from diffusers import QwenImageEditPlusPipeline, QwenImageTransformer2DModel
from peft.tuners.lora.conversion import convert_to_lora
from PIL import Image
from safetensors.torch import load_file, save_file

import predict
from tests.harness import (EXACT, TINY, copy_model, is_one_line, lora_file, lora_tensors, paint_picture, rel, renamed,
                           run_script, save, show, stock_pipeline, works)

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
convert = functools.partial(works, "tools/convert_lora.py")

def refuse(*flags):
    """-> the one line with which these flags are refused."""
    result = run_script("tools/convert_lora.py", *flags)
    assert result.status == 1 and is_one_line(result.errors[-1]), result.err
    return result.errors[-1]

def predict_with(lora=None):
    """The answer of stock tiny, with a LoRA loaded by the stock pipeline."""
    pipe, g = stock_pipeline(TINY), torch.Generator().manual_seed(0)
    if lora:
        pipe.load_lora_weights(str(lora))
    x = dict(hidden_states=torch.randn(1, 40, 64, generator=g), timestep=torch.tensor([0.5]),
             encoder_hidden_states=torch.randn(1, 7, pipe.transformer.config.joint_attention_dim, generator=g))
    with torch.no_grad():
        return pipe.transformer(**x, img_shapes=[[(1, 4, 6), (1, 4, 4)]]).sample

def peft_folder(folder, tensors, **config):
    save_file(renamed("transformer.", "base_model.model.")(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config | dict(peft_type="LORA", some_new_field=1)), "utf-8")
    return folder

def test_a_comfyui_file_is_the_same_lora_in_stock(tmp_path, two_loras):
    """Of rsLoRA too; what the training noted is kept. (Other forms: test_foreign_loras.py.)"""
    for n, path in enumerate(two_loras):
        notes = {"train.geometry": dict(target_pixels="native", control_pixels=64 * 64, upscale=True)}
        ours = lora_file(tmp_path, load_file(path), **predict.read_lora(path).meta | notes)
        file = tmp_path / f"{n}.safetensors"
        convert(ours, "--to", "comfyui", "--out", file)
        assert notes == {k: v for k, v in predict.read_lora(file).meta.items() if k.startswith("train.")}
        got, want = predict_with(file), predict_with(path)
        show("ComfyUI's form, from diffusers'", rel(got, want), 1e-5)
        assert rel(got, want) <= 1e-5 < 1e-3 < rel(predict_with(), want)

def test_a_merged_model_is_a_whole_folder(tmp_path, two_loras, monkeypatch):
    """For stock diffusers, too. All its files can be read by everybody and edited without changing the original; large
    ones are links. A failure leaves nothing behind."""
    model, merged = copy_model(tmp_path / "base"), tmp_path / "m/merged"
    with open(model / "vae/large.bin", "wb") as f:
        f.truncate(2**26 + 1)
    flags = [*two_loras, "--to", "model", "--model", model, "--out", merged]
    with monkeypatch.context() as patch:
        patch.setattr(QwenImageTransformer2DModel, "save_pretrained", lambda *_: (_ for _ in ()).throw(OSError("full")))
        assert "--out" in refuse(*flags) and not [*(tmp_path / "m").iterdir()]
    assert f"{two_loras[0]} + {two_loras[1]} as model" in convert(*flags).out
    QwenImageEditPlusPipeline.from_pretrained(merged, processor=None)
    large = merged / "vae/large.bin"
    for file in [p for p in merged.rglob("*") if p.is_file() and p != large]:
        assert file.stat().st_nlink == 1 and file.stat().st_mode == large.stat().st_mode, file # the umask's
    assert large.samefile(model / "vae/large.bin") and [p.name for p in (tmp_path / "m").iterdir()] == ["merged"]

@pytest.mark.parametrize("flags, out, status, named", [
    ("no --to comfyui", "x.safetensors", 1, "no LoRA"), ("p --to comfyui", "x", 2, "--out"),
    ("p p --to diffusers", "x.safetensors", 2, "--to"), ("p --to comfyui --scale 2", "x.safetensors", 2, "--to"),
    ("p --to model --scale 1 2", "x", 2, "--scale"), ("p --to model", "p", 1, "already exists"),
    ("p --to diffusers --rank 3", "x.safetensors", 1, "--rank"), # what is a LoRA has one
    ("q --to diffusers", "x.safetensors", 1, "adapter_config.json"), ("r --to diffusers", "x.safetensors", 1, "NaN"),
    ("p --to model --model no", "x", 1, "--model"), ("p --to model", "q/adapter_model.safetensors/x", 1, "--out")])
def test_nonsense_is_one_line_and_leaves_nothing(tmp_path, flags, out, status, named):
    for name, factor in (("p", 1), ("q", 1), ("r", math.nan)):
        (tmp_path / name).mkdir()
        peft_folder(tmp_path / name, {k: v * factor for k, v in lora_tensors().items()}, r=2, lora_alpha=2)
    (tmp_path / "q/adapter_config.json").unlink()
    flags = [tmp_path / word if word in ("p", "q", "r", "no") else word for word in flags.split()]
    result = run_script("tools/convert_lora.py", *flags, "--out", tmp_path / out)
    assert result.status == status and (status == 2 or is_one_line(result.errors[-1])), result.err
    assert named in result.errors[-1] and sorted(p.name for p in tmp_path.iterdir()) == ["p", "q", "r"]

def trained(method, **config):
    """tiny with random factors of peft's in some layers -> the model, the layers' changes of the weights."""
    transformer = predict.load_transformer(TINY, "float32")
    torch.manual_seed(0)
    config = method(target_modules=["attn.to_q", "net.2"], init_weights=False, **config)
    model = peft.get_peft_model(transformer, config)
    layers = {name: m for name, m in transformer.named_modules() if hasattr(m, "get_delta_weight")}
    return model, {name: m.get_delta_weight("default").detach() for name, m in layers.items()}

def changes_of(file):
    """A LoRA file -> the layers' changes of the weights."""
    predict.load_loras(transformer := predict.load_transformer(TINY, "float32"), [predict.read_lora(file)])
    layers = {name: m for name, m in transformer.named_modules() if "lora0" in getattr(m, "lora_A", {})}
    return {name: m.get_delta_weight("lora0").detach() for name, m in layers.items()}

def off(got, want):
    """-> how far two sets of changes are apart, of all layers together and of the worst; as the tool prints it."""
    assert got.keys() == want.keys() and want
    errors = [rel(got[name], want[name]) for name in want]
    return rel(*[torch.cat([x[name].flatten() for name in want]) for x in (got, want)]), max(errors)

def as_lycoris(folder, file, alpha):
    """peft's folder -> a file as LyCORIS writes it: _ for points, and each layer's alpha."""
    tensors = {}
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        layer, name = key.removeprefix("base_model.model.").rsplit(".", 1)
        layer = "lycoris_" + layer.replace(".", "_")
        tensors |= {f"{layer}.{name}": tensor, f"{layer}.alpha": torch.tensor(float(alpha))}
    save_file(tensors, file)
    return file

LOW_RANK = {
    "LoKr": (peft.LoKrConfig, dict(r=4, alpha=6)),
    "LoKr of two whole matrices": (peft.LoKrConfig, dict(r=999, alpha=999, decompose_factor=8)),
    "LoKr, both narrow": (peft.LoKrConfig, dict(r=2, alpha=6, decompose_both=True, decompose_factor=8)),
    "LoKr with patterns": (peft.LoKrConfig, dict(r=4, alpha=6, rank_pattern={"net.2": 2}, alpha_pattern={"to_q": 3}))}

@pytest.mark.parametrize("kind", LOW_RANK)
def test_a_lokr_becomes_the_nearest_lora_and_the_error_is_said(tmp_path, kind):
    """peft tells the change of the weights, and how near a LoRA of a rank can come; a file of LyCORIS is the same."""
    method, config = LOW_RANK[kind]
    model, want = trained(method, **config)
    model.save_pretrained(folder := tmp_path / "peft")
    sources = [folder]
    if "patterns" not in kind:
        alpha = 1e10 if "whole" in kind else config["alpha"] # as of ai-toolkit; LyCORIS does not read it then
        sources.append(as_lycoris(folder, tmp_path / "lycoris.safetensors", alpha))
    for source in sources:
        for rank in (3, 999):
            out = tmp_path / f"{source.stem}-{rank}.safetensors"
            said = convert(source, "--rank", rank, "--to", "diffusers", "--out", out).out
            mean, worst = off(changes_of(out), want)
            show(f"{kind}, rank {rank}, of all layers and the worst", mean, 1)
            printed = [float(share) / 100 for share in re.findall(r"([\d.]+)%", said)]
            assert printed == pytest.approx([mean, worst], abs=6e-5), said
            _, best = convert_to_lora(model, rank=min(rank, 64))
            best = {k.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): best[k.replace("_A", "_B")] @ a
                    for k, a in best.items() if ".lora_A." in k}
            assert mean <= off(best, want)[0] + 1e-5 and (mean > 0.1 if rank == 3 else mean < 1e-5)

def test_a_lokr_is_loaded_with_one_line_that_says_how_far_off_it_is(tmp_path, capsys):
    model, want = trained(peft.LoKrConfig, r=4, alpha=6)
    model.save_pretrained(folder := tmp_path / "peft")
    for path in (as_lycoris(folder, tmp_path / "lokr.safetensors", 6), folder):
        capsys.readouterr()
        assert off(changes_of(path), want)[0] < 1e-5
        out = capsys.readouterr().out
        assert len(out.splitlines()) == 1 and "at most rank 64" in out and "0.00% off" in out, out

@pytest.mark.parametrize("spoil, named", [
    (lambda t: {k.replace("to_q", "to_z"): v for k, v in t.items()}, "to_z"),
    (lambda t: {k: v * (math.nan if "lokr_w1" in k else 1) for k, v in t.items()}, "NaN"),
    (lambda t: t | {"a.lora_A.weight": torch.zeros(1, 1)}, "lora_A"),
    (lambda t: t | {"b.dora_scale": torch.zeros(1)}, "dora"),
    (lambda t: dict([*t.items()][1:]), "lokr_w1"), (lambda t: t | {"x.lokr_t2": torch.zeros(1, 1, 1, 1)}, "lokr_t2")])
def test_a_strange_lokr_is_one_line_and_leaves_nothing(tmp_path, spoil, named):
    tensors = {f"diffusion_model.transformer_blocks.0.attn.to_q.{k}": torch.ones(4, 4) for k in ("lokr_w1", "lokr_w2")}
    save_file(spoil(tensors), file := tmp_path / "lokr.safetensors")
    line = refuse(file, "--to", "diffusers", "--out", tmp_path / "out.safetensors")
    assert str(file) in line and named in line and [*tmp_path.iterdir()] == [file]

# ---- a merge is as near to base + LoRAs as its dtype allows, and says how near ---------------------------------------

@pytest.fixture(scope="module")
def three_loras(tmp_path_factory, two_loras):
    """The two, and a foreign one with an alpha of its own, on layers outside of the blocks too -> ([path], the changes
    of the weights that stock's peft makes of each, at scale 1)."""
    folder, names = tmp_path_factory.mktemp("foreign"), [
        "proj_out", "img_in", "time_text_embed.timestep_embedder.linear_1", "norm_out.linear",
        "transformer_blocks.1.attn.to_q"]
    weights, tensors, rng = load_file(TINY / WEIGHTS), {}, torch.Generator().manual_seed(7)
    for name in names:
        out_len, in_len = weights[f"{name}.weight"].shape
        tensors[f"diffusion_model.{name}.lora_A.weight"] = torch.randn(3, in_len, generator=rng)
        tensors[f"diffusion_model.{name}.lora_B.weight"] = 0.05 * torch.randn(out_len, 3, generator=rng)
        tensors[f"diffusion_model.{name}.alpha"] = torch.tensor(1.5)
    save_file(tensors, folder / "foreign.safetensors")
    paths = [*two_loras, folder / "foreign.safetensors"]
    return paths, [changes_of(path) for path in paths]

def merged(tmp_path, paths, scales, dtype, model=TINY):
    """-> the merged weights, what was said, the folder."""
    out = tmp_path / f"merged-{len(os.listdir(tmp_path))}"
    result = convert(*paths, "--scale", *scales, "--to", "model", "--model", model, "--dtype", dtype, "--out", out)
    return load_file(out / WEIGHTS), result.out, out

def in_words(said):
    """The shares in the line of a merge: of the weights, off, at worst."""
    return [float(share) / 100 for share in re.findall(r"([\d.]+)%", said)][:3]

def sum_of(changes, scales):
    total = {}
    for change, scale in zip(changes, scales):
        for name, matrix in change.items():
            total[name] = total.get(name, 0) + scale * matrix
    return total

@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_the_sum_of_all_loras_is_rounded_once_and_the_line_is_how_far_it_is_off(tmp_path, three_loras, stored):
    """Also where the base's file is of another dtype than what is written; each LoRA would be one rounding more."""
    paths, changes = three_loras
    model, scales = copy_model(tmp_path / "base"), [1, -0.7, 0.9]
    base = {name: w.float() for name, w in load_file(TINY / WEIGHTS).items()}
    if stored != torch.bfloat16:
        base = {name: (w * (1 + 1e-3 * torch.randn(w.shape, generator=torch.Generator().manual_seed(1)))).to(stored)
                for name, w in base.items()}
        save_file(base, model / WEIGHTS, metadata={"format": "pt"})
    got, said, _ = merged(tmp_path, paths, scales, "bfloat16", model=model)
    wanted = sum_of(changes, scales)
    assert len(wanted) == 10
    for name, w in base.items():
        change = wanted.get(name.removesuffix(".weight"), 0)
        if name.endswith(".weight"):
            assert torch.allclose(got[name].float(), (w.float() + change).bfloat16().float(), atol=0, rtol=2**-8)
            assert (got[name] != (w.float() + change).bfloat16()).float().mean() < 1e-3, name # ties of another sum
    errors = {name: got[f"{name}.weight"].float() - base[f"{name}.weight"].float() for name in wanted}
    assert in_words(said)[1:] == pytest.approx(off(errors, wanted), abs=2e-4), said

def test_a_merge_in_fp32_is_peft_s(tmp_path, three_loras):
    """Scales of 0 and below, too. It loses nothing, and the line says so."""
    paths, scales = three_loras[0], [0.7, 0.0, -1.3]
    got, said, _ = merged(tmp_path, paths, scales, "float32")
    transformer = predict.load_transformer(TINY, "float32")
    predict.load_loras(transformer, list(map(predict.read_lora, paths)), scales)
    transformer.fuse_lora()
    transformer.unload_lora()
    want = transformer.state_dict()
    assert got.keys() == want.keys() and max(rel(got[name], want[name]) for name in want) < 1e-6
    assert in_words(said)[1:] == [0, 0] and "warning" not in said
    said = merged(tmp_path, paths, [0, 0, 0], "bfloat16")[1]
    assert "the LoRAs change nothing" in said

@pytest.mark.parametrize("share, worst, strength", [(0.0075, 0.24, 0.97), (0.0019, 0.6, 0.97), (0.0004, 1.3, 0.95)])
def test_a_small_change_keeps_its_strength_in_bf16_and_a_line_says_what_it_lost(tmp_path, three_loras, share, worst,
                                                                                strength):
    """Rounding to the nearest keeps 0.85 of one by 0.19 % of the weights, and 0.35 of one by 0.04 %."""
    paths, changes = three_loras
    base = load_file(TINY / WEIGHTS)
    norm = torch.cat([base[f"{name}.weight"].float().flatten() for name in changes[0]]).norm()
    scale = float(share * norm / torch.cat([change.flatten() for change in changes[0].values()]).norm())
    got, said, _ = merged(tmp_path, paths[:1], [scale], "bfloat16")
    wanted = {name: scale * change for name, change in changes[0].items()}
    made = {name: got[f"{name}.weight"].float() - base[f"{name}.weight"].float() for name in wanted}
    mean, _ = off(made, wanted)
    kept = sum((made[name] * wanted[name]).sum() for name in wanted) / sum(w.square().sum() for w in wanted.values())
    show("off, of the change", mean, worst)
    assert in_words(said)[:2] == pytest.approx([share, mean], rel=0.02), said
    assert 0.05 < mean < worst and strength < kept < 1.05
    assert "warning" in said and "--dtype float32" in said and "predict.py --lora" in said
    # and what is added to keep it
    plain = {name: (base[f"{name}.weight"].float() + change).bfloat16() for name, change in wanted.items()}
    stronger = sum(not torch.equal(got[f"{name}.weight"], weight) for name, weight in plain.items())
    told = re.search(r"; in (\d+) of (\d+) layers it is added up to ([\d.]+) times as strong, as rounding", said)
    if share == 0.0075:
        assert stronger == 0 and not told, said
    else:
        count, layers, factor = map(float, told.groups())
        assert count == stronger > 0 and layers == len(wanted) and 1 < factor <= 4, said
        show("up to times as strong", factor, 4)

def test_a_merged_weight_that_overflows_is_one_line_that_names_it(tmp_path, three_loras):
    paths, _ = three_loras
    for flags, named in ((["--dtype", "float16", "--scale", 10], "--dtype bfloat16"), (["--scale", 10], "--scale")):
        tensors = load_file(paths[0])
        for half, factor in dict(A=1e3, B=1e3 if "float16" in flags else 1e38).items():
            tensors[f"transformer.transformer_blocks.1.attn.to_q.lora_{half}.weight"] *= factor
        file = lora_file(tmp_path, tensors)
        line = refuse(file, "--to", "model", *flags, "--out", tmp_path / "m")
        assert "transformer_blocks.1.attn.to_q.weight" in line and named in line and [*tmp_path.iterdir()] == [file]

def test_a_merged_tiny_draws_what_tiny_with_the_lora_draws(tmp_path, three_loras, photos):
    """With the defaults of tiny, such as its CFG scale, which a model of its size has, too."""
    paths, _ = three_loras
    out = merged(tmp_path, paths, [1, 1, 1], "float32")[2]
    flags = ["--image", photos[0], "--prompt", "go", "--cache_dir", tmp_path / "c", *EXACT, "--device", "cpu"]
    for name, more in (("a", ["--model", out]), ("b", ["--lora", *paths, "--lora_scale", 1]),
                       ("c", ["--lora", ""])):
        result = run_script("predict.py", *flags, *more, "--out", tmp_path / f"{name}.png")
        assert result.status == 0, result.err
    a, b, c = [np.asarray(Image.open(tmp_path / f"{name}.png"), int) for name in "abc"]
    assert abs(a - b).max() <= 1 < 15 < abs(a - c).max()

@pytest.mark.parametrize("what", ["file", "empty folder", "folder"])
def test_what_has_come_to_the_merged_model_s_place_meanwhile_stays(tmp_path, two_loras, monkeypatch, what):
    """Two commands may have been given one name; the second one to finish says so. (A file: test_result_files.py.)"""
    out, real = tmp_path / "o/a", predict.read_lora

    def read_lora(*args):
        if what == "file":
            save(paint_picture(), out, format="PNG")
        else:
            (out / ("mine" if what == "folder" else "")).mkdir(parents=True)
        return real(*args)
    monkeypatch.setattr("library.lora.lora_file.read_lora", read_lora)
    assert f"{out}: already exists" in refuse(two_loras[0], "--to", "model", "--out", out)
    assert len([*out.parent.rglob("*")]) == (2 if what == "folder" else 1)
