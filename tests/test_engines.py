"""
LoRA files for other programs: the names, factors, ranks, zeros and headers that each of them reads.

$ python -m pytest -q tests/test_engines.py    # a minute; with --full it downloads the programs, and asks them
"""
import json
import math
import re
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import predict
from library.data.picture_files import fit_size
from library.files import tensor_files
from tests.engine_loaders import WHEELS, NotInstalled, ask, changes_of, make_lora
from tests.harness import ADAMW, FULL, assert_bitwise, lora_of, run_script, works
from tools.convert_lora import FORMS, LEFT_OUT

DECISIVE = {f"transformer.{name}" for name in "r lora_alpha rank_pattern alpha_pattern target_modules".split()}
NAMES = { # of a tensor
    "transformer": r"transformer\.[\w.]+\.lora_[AB]\.weight", "folder": r"transformer\.[\w.]+\.lora_[AB]\.weight",
    "diffusion_model": r"diffusion_model\.[\w.]+\.lora_[AB]\.weight",
    "lora_unet": r"lora_unet_\w+\.(lora_(down|up)\.weight|alpha)"}
SHORT = ["--max_steps", 2, "--lora_rank", 4, "--lora_alpha", 3]
NOTED = {"modelspec.sai_model_spec": "1.0.0", "modelspec.architecture": "Qwen-Image-Edit-Plus/lora",
         "modelspec.title": "run", "ss_base_model_version": "qwen_image_edit", "ss_network_dim": "4",
         "ss_network_alpha": "4"}

def header_of(file):
    with safe_open(file, "pt") as f:
        return f.metadata()

def products_of(tensors):
    """The matrices alone, and kohya's alpha -> {layer with _: the change of its weight}, and the ranks."""
    changes, ranks = {}, set()
    for key, a in tensors.items():
        if re.search(r"lora_(A|down)\.", key):
            b = tensors[key.replace("lora_A", "lora_B").replace("lora_down", "lora_up")]
            layer = re.split(r"\.lora_", key)[0]
            alpha = tensors.get(f"{layer}.alpha", torch.tensor(len(a)))
            layer = re.sub(r"^(transformer|diffusion_model)\.|^lora_unet_", "", layer).replace(".", "_")
            changes[re.sub("to_out$", "to_out_0", layer)] = alpha / len(a) * b @ a
            ranks.add(len(a))
    return changes, ranks

def assert_same_changes(got, want):
    for layer, change in want.items():
        assert (got[layer.replace(".", "_")] - change).norm() <= 1e-6 * change.norm(), layer

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """-> the path of a file of ours, the changes of the weights."""
    path = tmp_path_factory.mktemp("made") / "x.safetensors"
    return path, make_lora(path)

@pytest.mark.parametrize("to", FORMS)
def test_each_program_gets_its_names_and_the_whole_change_in_its_matrices(tmp_path, made, to):
    path, want = made
    form, out = FORMS[to], tmp_path / ("RANK folder" if to == "vllm-omni" else "RANK x.safetensors")
    said = works("tools/convert_lora.py", path, "--to", to, "--out", out).out
    file = out / "adapter_model.safetensors" if to == "vllm-omni" else out
    tensors, header = load_file(file), header_of(file)
    assert all(re.fullmatch(NAMES[form], name) for name in tensors), tensors.keys()
    changes, ranks = products_of(tensors)
    assert_same_changes(changes, want)
    # q, k and v are all there
    zero = "transformer_blocks_2_attn_add_q_proj"
    assert changes.keys() - {name.replace(".", "_") for name in want} == {zero} and not changes[zero].any()
    one = form in ("lora_unet", "folder")
    assert ranks == ({16} if one else {8, 16})
    assert header["modelspec.architecture"] == "Qwen-Image-Edit-2511/lora" and header["modelspec.title"] == "a b"
    assert ("lora_adapter_metadata" in header) == (form == "transformer")
    if form == "folder":
        config = json.loads((out / "adapter_config.json").read_bytes())
        assert config == dict(peft_type="LORA", r=16, lora_alpha=16)
        assert not any("to_out.0" in name for name in tensors)
    lora = predict.read_lora(out) # it comes back
    assert_same_changes(products_of(lora.state)[0], want)
    assert not any(lora.state[f"transformer.transformer_blocks.2.attn.add_q_proj.lora_{half}.weight"].any()
                   for half in "AB")
    # how it is loaded, and what is lost
    line, = [line for line in said.splitlines() if line.startswith(f"{to}: ")]
    assert "FILE" not in line and "_dim RANK" not in line and str(tmp_path) in line
    outside, mods = {"img_in", "proj_out"}, {name for name in want if "img_mod" in name}
    lost = {"mflux": outside | mods, "ai-toolkit": outside, "musubi": outside, "kohya": outside}.get(to)
    share = sum(want[name].square().sum() for name in lost or ()) / sum(c.square().sum() for c in want.values())
    words = f"{to} leaves out {len(lost or ())} of {len(want)} layers, {share**0.5:.1%} of the change"
    assert (words in said) == bool(lost), said

def test_another_program_s_alpha_goes_the_same_way_out(tmp_path):
    """kohya's, in half precision; and what its header tells of the base."""
    torch.manual_seed(0)
    name, a, b = "lora_unet_transformer_blocks_0_attn_to_q", torch.randn(4, 160), torch.randn(160, 4)
    tensors = {f"{name}.lora_down.weight": a.half(), f"{name}.lora_up.weight": b.half(),
               f"{name}.alpha": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "k.safetensors", {"modelspec.architecture": "Qwen-Image-Edit/lora"})
    want = {name.removeprefix("lora_unet_"): 0.75 * b.half().float() @ a.half().float()}
    for to in ("diffusers", "sglang", "musubi"):
        out = tmp_path / f"{to}.safetensors"
        works("tools/convert_lora.py", tmp_path / "k.safetensors", "--to", to, "--out", out)
        assert_same_changes(products_of(load_file(out))[0], want)
        header = header_of(out)
        assert header["modelspec.architecture"] == "Qwen-Image-Edit/lora" and header["modelspec.title"] == to

def test_a_run_s_file_and_a_checkpoint_s_are_whole_and_say_what_they_are(small, tmp_path, monkeypatch, capfd):
    """By their tensors, with few fields for peft; read without a word. A run that is resumed on another day has the
    same bytes, and so has an older checkpoint's run, whose LoRA was kept as it was trained."""
    flags = [*small.flags, *ADAMW, *SHORT, "--save_every", 1]
    run = works("train.py", *flags, "--out_dir", tmp_path / "a/run")
    files = [tmp_path / f"a/run/{place}{predict.LORA_FILE}" for place in ("", "checkpoint-000002/")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert_same_changes(products_of(load_file(files[0]))[0], changes_of(run.globals["transformer"]))
    header = header_of(files[0])
    fields = {name for name in json.loads(header["lora_adapter_metadata"]) if name.startswith("transformer.")}
    assert fields == DECISIVE and NOTED.items() <= header.items()
    assert re.fullmatch(r"[\d-]{10}", header["modelspec.date"])
    data = files[0].read_bytes()
    digest = tensor_files.hashlib.sha256(data[8 + int.from_bytes(data[:8], "little"):]).hexdigest()
    assert header["sshs_model_hash"] == digest and header["modelspec.hash_sha256"] == f"0x{digest}"
    capfd.readouterr()
    assert predict.read_lora(tmp_path / "a/run").meta["train.run"] == "run" and not capfd.readouterr().err
    for kind in ("new", "older"):
        out_dir = tmp_path / kind / "run"
        works("train.py", *flags, "--max_steps", 1, "--out_dir", out_dir)
        checkpoint = out_dir / "checkpoint-000001"
        tensors, info = tensor_files.read_tensors(checkpoint / "optimizer.safetensors")
        lora, meta = tensor_files.read_tensors(checkpoint / predict.LORA_FILE, "lora_adapter_metadata")
        kept = {name.removeprefix("trained."): tensors[name] for name in tensors if name.startswith("trained.")}
        assert kept.keys() == {name for name in lora if "lora_B" in name}
        if kind == "older":
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("trained.")}
            tensor_files.write_tensors(checkpoint / "optimizer.safetensors", tensors, info)
            meta = {k: v for k, v in meta.items() if k != "train.folded"} | {"transformer.lora_alpha": 3}
            tensor_files.write_tensors(checkpoint / predict.LORA_FILE, lora | kept, meta, "lora_adapter_metadata")
        with monkeypatch.context() as patch:
            patch.setattr(time, "strftime", lambda *_: "2031-01-01")
            works("train.py", *flags, "--out_dir", out_dir, "--resume")
        assert_bitwise(lora_of(out_dir), lora_of(tmp_path / "a/run"))
        assert kind == "older" or (out_dir / predict.LORA_FILE).read_bytes() == data

@pytest.mark.parametrize("name, said", [("snow", True), ("Qwen-Image-Edit-2509-snow", False)])
def test_a_merged_model_s_folder_that_hides_its_kind_is_one_line(tmp_path, two_loras, name, said):
    result = run_script("tools/convert_lora.py", two_loras[0], "--to", "model", "--out", tmp_path / name)
    assert result.status == 0 and ("SGLang and mflux" in result.out) == said, result.out

# what FluxKontextImageScale of ComfyUI's templates crops to, and the transposed ones
KONTEXT = [(672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104),
           (1024, 1024)]

@pytest.mark.parametrize("aspect, ours, cropped, reference", [
    (1, (1024, 1024), 0, (1024, 1024)), (16 / 9, (1376, 768), 0.040, (1368, 768)),
    (5 / 4, (1152, 928), 0.064, (1144, 920)), (4 / 3, (1184, 896), 0.009, (1176, 888)),
    (3 / 2, (1248, 832), 0, (1256, 840)), (21 / 9, (1568, 672), 0, (1568, 672))])
def test_sizes_of_comfyui_s_nodes_beside_ours(aspect, ours, cropped, reference):
    """What GUIDE says of them, by the formulas of their public source: FluxKontextImageScale's crop, and the reference
    that TextEncodeQwenImageEditPlus makes of a picture of our size."""
    size = round(6000 * aspect), 6000
    assert fit_size(size, 1024 * 1024) == ours
    shapes = KONTEXT + [(h, w) for w, h in KONTEXT]
    width, height = min(shapes, key=lambda shape: abs(aspect - shape[0] / shape[1]))
    lost = 1 - min(aspect * height / width, width / height / aspect)
    assert lost == pytest.approx(cropped, abs=6e-4)
    scale = math.sqrt(1024 * 1024 / math.prod(ours))
    assert tuple(round(side * scale / 8) * 8 for side in ours) == reference
    width, height = size # ImageScaleToTotalPixels: one megapixel, steps of 32
    scale = math.sqrt(1024 * 1024 / (width * height))
    assert tuple(round(side * scale / 32) * 32 for side in size) == ours

@pytest.mark.skipif(not FULL, reason="downloads 30 MB; it runs with --full")
@pytest.mark.parametrize("program", WHEELS)
def test_each_program_s_own_loader_makes_the_whole_change(tmp_path, made, program):
    """Of each layer but those that convert_lora.py says it leaves out; and no other layer changes."""
    path, want = made
    try:
        found = ask(program, path, want, tmp_path)
    except NotInstalled as e:
        pytest.skip(str(e))
    assert want.keys() < found.keys()
    left_out = re.compile(LEFT_OUT.get(program, "$"))
    wanted = {layer: int(layer in want and not left_out.match(layer)) for layer in found}
    wrong = {layer: found[layer] for layer in found if found[layer] != pytest.approx((wanted[layer], 0), abs=1e-3)}
    assert not wrong

@pytest.mark.parametrize("to, out, said", [
    ("SGLang", "a", "a.safetensors"), ("Stable-Diffusion.cpp", "a", "a.safetensors"),
    ("vLLM-Omni", "a.safetensors", "reads a folder; give a")])
def test_programs_may_be_spelled_as_they_spell_themselves(two_loras, to, out, said):
    result = run_script("tools/convert_lora.py", two_loras[0], "--to", to, "--out", out)
    assert result.status == 2 and said in result.err and "invalid choice" not in result.err
