"""
The examples of the documents that this project grew from, as far as they are ours to run: S0 is the summary of
multi-resolution training, S1 and S4 describe the trainer, S2 the tests of the custom transformer, S3 the architecture.
The seven tests of S0 and the ten of S2 are in test_consistency.py.
"""
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import safetensors.torch
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image

import cache
from library.data import index_file
from library.files import tensor_files
from library.models import devices, environment
import predict
import rope_patch
from tests.harness import (DEVICE, EQUAL, MIXED, NATIVE, TINY, add_item, assert_bitwise, assert_one_by_one, copy_model,
                           encoder_flags, hot_model, image_lens, is_one_line, joint_mask_of, make_batch, make_cache,
                           padded_call, paint_picture, patched_model, rel, run, run_script, samples_of, save,
                           stock_call, train, works)

# ---- S0 and S3: calls of the transformer -----------------------------------------------------------------------------

@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("lens", [list, torch.tensor])
def test_one_row_with_mask_and_text_length_is_the_stock_call(holes, lens):
    """S0's step 1 and S3's list of inputs; older diffusers' pipelines called it so."""
    model, samples, length = patched_model(), EQUAL[:1], 6 if holes else 9
    mask_BT = torch.arange(9, device=DEVICE)[None] < length
    call = stock_call(model, samples) | dict(encoder_hidden_states_mask=mask_BT)
    got = model(**call, txt_seq_lens=lens([length])).sample
    assert_bitwise(got, hot_model()(**call).sample)
    joint = torch.cat([mask_BT, mask_BT.new_ones(1, 40)], 1)
    call |= dict(encoder_hidden_states_mask=None, attention_kwargs={"attention_mask": joint})
    assert rel(model(**call, txt_seq_lens=lens([length])).sample, got) <= 1e-2

@torch.no_grad()
def test_one_row_without_a_mask_stays_packed():
    for mode in ("stock", "packed"):
        assert_one_by_one(run(patched_model(), mode, EQUAL[:1], txt_seq_lens=[9]), EQUAL[:1])

@pytest.mark.parametrize("kind", [list, torch.tensor])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_flat_list_of_one_sample_s_pictures_is_refused(batch, kind):
    """S3's img_shapes = [(frame, height, width), ...] for two pictures in each sample: read as one picture a sample it
    would blank the second ones."""
    model, pictures = patched_model(), [(1, 6, 4), (1, 4, 4)]
    call = stock_call(model, EQUAL[:batch]) | dict(img_shapes=kind(pictures))
    with pytest.raises(ValueError, match="img_shapes: got .* want"):
        model(**call)
    alone = kind([(1, 6, 4)] * batch) # too few tokens: stock fails too
    for which in (model, hot_model()):
        with pytest.raises((ValueError, RuntimeError)):
            which(**call | dict(img_shapes=alone))

def precomputing_lines():
    """The three lines in the docstring of forward()."""
    lines = inspect.getdoc(rope_patch.model_forward).splitlines()
    first = next(n for n, line in enumerate(lines) if "freqs = [" in line)
    return textwrap.dedent("\n".join(lines[first:first + 3]))

@torch.no_grad()
@pytest.mark.parametrize("variant", ["v1", "2511"])
def test_the_docstring_s_lines_precompute_what_padded_mode_computes(variant):
    """S0, 3.3: positions for each sample, made by the caller, and S0's mask (B, 1, 1, S)."""
    model, call = patched_model(variant), padded_call(patched_model(variant), MIXED, spare=0)
    names = dict(vars(rope_patch), model=model, img_shapes=call["img_shapes"], device=DEVICE, txt_len=12)
    exec(precomputing_lines(), names)
    mask_BS = joint_mask_of(MIXED, call["hidden_states"].shape[1])
    call |= dict(image_rotary_emb=names["image_rotary_emb"], encoder_hidden_states_mask=None,
                 attention_kwargs={"attention_mask": mask_BS.view(2, 1, 1, -1)})
    out = model(**call, return_dict=False)[0]
    assert_one_by_one([row[:n] for row, n in zip(out, image_lens(MIXED))], MIXED, variant=variant)

@torch.no_grad()
def test_text_positions_shared_by_pictures_of_mixed_sizes_are_refused():
    """S0's recipe keeps the last sample's txt_freqs for all, which is wrong by 0.3. Shared by equal sizes they are
    right, and image positions shared by all are the caller's word that sizes are equal."""
    model, call = patched_model(), padded_call(patched_model(), MIXED, spare=0)
    freqs = [rope_patch.sample_freqs(model.pos_embed, s.shapes, 12, DEVICE) for s in MIXED]
    img_freqs_BIR, txt_freqs = rope_patch.pad_latents_for_multi_res([img for img, _ in freqs])[0], freqs[-1][1]
    with pytest.raises(ValueError, match=r"image_rotary_emb: got .* want \(2, 12, R\), as text begins"):
        model(**call, image_rotary_emb=(img_freqs_BIR, txt_freqs))
    meant = model(**call, image_rotary_emb=(img_freqs_BIR, txt_freqs.expand(2, -1, -1))).sample
    assert rel(meant[0], model(**call).sample[0]) > 0.1 # so much for the recipe
    # 5x4 and 6x4 begin alike, but the text begins at 2 after the one and at 3 after the other
    samples = make_batch(([(1, 5, 4)], 9), ([(1, 6, 4)], 9))
    freqs = [rope_patch.sample_freqs(model.pos_embed, s.shapes, 9, DEVICE) for s in samples]
    assert torch.equal(freqs[0][0], freqs[1][0][:20]) and not torch.equal(freqs[0][1], freqs[1][1])
    with pytest.raises(ValueError, match="image_rotary_emb: got"):
        model(**padded_call(model, samples, 0), image_rotary_emb=(
            rope_patch.pad_latents_for_multi_res([img for img, _ in freqs])[0], freqs[0][1]))

def test_text_positions_shared_by_equal_sizes_are_right_beside_a_joint_mask():
    """Which hides pictures' tokens of one sample: the positions that were given are still the same."""
    samples = make_batch(([(1, 4, 4)], 9), ([(1, 4, 4)], 9))
    model, call = patched_model(), padded_call(patched_model(), samples, 0)
    img_freqs, txt_freqs = rope_patch.sample_freqs(model.pos_embed, [(1, 4, 4)], 9, DEVICE)
    mask_BS = torch.ones(2, 9 + 16, dtype=torch.bool, device=DEVICE)
    mask_BS[1, 20] = False
    call |= dict(attention_kwargs=dict(attention_mask=mask_BS))
    shared, each = [model(**call, image_rotary_emb=(img_freqs.expand(2, -1, -1), txt)).sample
                    for txt in (txt_freqs, txt_freqs.expand(2, -1, -1))]
    assert torch.equal(shared, each)

# ---- S1 and S4: caches of version 1.0 --------------------------------------------------------------------------------

SIX = ["pixel_latent", "control_latent", "prompt_embed", "prompt_embeds_mask", "empty_prompt_embed",
       "empty_prompt_embeds_mask"]

def tensors_of(cache_dir):
    """The one sample of a cache, whole."""
    index, = cache_dir.glob("*.json")
    (sample, *_), *_ = index_file.read_index(index)
    tensors = tensor_files.read_tensors(sample.encodings[0]["file"])[0]
    for text in sample.texts.values():
        tensors |= tensor_files.read_tensors(text["file"])[0]
    return tensors

@pytest.fixture(scope="module")
def today(tmp_path_factory):
    """A cache of today: one sample, whose control has the target's size."""
    root = tmp_path_factory.mktemp("today")
    add_item(root / "data", "cat", [(96, 64), (96, 64)])
    assert make_cache(root / "data", root / "cache", "--caption_dropout_rate", 0.5, *NATIVE).status == 0
    return root / "cache"

def old_dictionary(today, *sizes):
    """The six keys, in rows of a batch of 1 with four pads, and these sizes in pixels."""
    old = {name: tensors_of(today)[name] for name in SIX}
    for name in ("prompt_embed", "empty_prompt_embed"):
        old[name] = torch.nn.functional.pad(old[name], (0, 0, 0, 4))
        old[name + "s_mask"] = torch.nn.functional.pad(old[name + "s_mask"].long(), (0, 4))
    return {name: t[None] for name, t in old.items()} | dict(zip(("height", "width"), map(torch.tensor, sizes)))

def import_cache(source, out):
    return run_script("tools/import_data.py", source, out)

def assert_today_s(out, today):
    got, want = tensors_of(out), tensors_of(today)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)

def test_six_keys_with_height_and_width_alone_are_read(tmp_path, today):
    """S4's _compute_loss takes one height and width: target and control were resized to one size."""
    (tmp_path / "old").mkdir()
    safetensors.torch.save_file(old_dictionary(today, 64, 96), tmp_path / "old/cat.safetensors")
    assert import_cache(tmp_path / "old", tmp_path / "out").status == 0
    assert_today_s(tmp_path / "out", today)
    assert tensors_of(tmp_path / "out")["img_shapes"].tolist() == [[1, 4, 6], [1, 4, 6]]
    losses = [train(index, tmp_path, "--caption_dropout_rate", 0.5).losses
              for index in (tmp_path / "out/old.json", next(today.glob("*.json")))]
    assert len(losses[0]) == 2 and losses[0] == losses[1]

@pytest.mark.parametrize("sizes, changes, named", [
    ((), {}, ["add both"]), ((64, 96), dict(control_latent=torch.zeros(1, 20, 64)), ["[24, 20] tokens"]),
    ((64, 96), dict(pixel_latent=torch.zeros(16, 1, 8, 12)), ["[16, 1, 8, 12]", "packed rows (tokens, 64)"])],
    ids=["no sizes", "another control", "raw"])
def test_what_nobody_wrote_is_not_guessed(tmp_path, today, sizes, changes, named):
    """S1's six keys alone: 24 tokens may be 4x6 or 6x4. A control of another length has another size. And S3's raw
    form, (1, channels, 1, height, width) instead of rows."""
    (tmp_path / "old").mkdir()
    safetensors.torch.save_file(old_dictionary(today, *sizes) | changes, tmp_path / "old/cat.safetensors")
    error, = import_cache(tmp_path / "old", tmp_path / "out").errors
    assert is_one_line(error, "cat.safetensors", *named), error

def test_a_pt_file_is_refused_with_the_line_that_converts_it(tmp_path, today):
    source = tmp_path / "it's old"
    source.mkdir()
    torch.save(old_dictionary(today) | dict(height=64, width=96), source / "cat.pt")
    error, = import_cache(source, tmp_path / "out").errors
    assert is_one_line(error, "cat.pt", "pickle") and not (tmp_path / "out").exists()
    command = error.partition("convert it: ")[2].replace("python", sys.executable, 1)
    assert subprocess.run(["sh", "-c", command], capture_output=True).returncode == 0
    (source / "cat.pt").unlink()
    assert import_cache(source, tmp_path / "out").status == 0
    assert_today_s(tmp_path / "out", today)

# ---- S1 and S4: another transformer than the model folder's; a quantized one -----------------------------------------

@pytest.fixture(scope="module")
def other_transformer(tmp_path_factory):
    """A folder that holds a transformer/ only, with other weights than tiny's."""
    folder = tmp_path_factory.mktemp("other")
    model = QwenImageTransformer2DModel.from_pretrained(TINY / "transformer")
    with torch.no_grad():
        model.proj_out.weight.mul_(-1)
    model.save_pretrained(folder / "transformer")
    return folder

@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    return save(paint_picture((64, 96)), tmp_path_factory.mktemp("photo") / "a.png")

def predict_photo(photo, tmp_path, *flags, device="cpu"):
    out = tmp_path / f"{len(list(tmp_path.glob('*.png')))}.png"
    result = run_script("predict.py", "--image", photo, "--prompt", "add a red border", "--lora", "", "--dtype",
                        "float32", "--device", device, "--cache_dir", photo.parent / "cache", "--out", out,
                        "--num_inference_steps", 2, *flags)
    result.picture = Image.open(out).tobytes() if out.is_file() else None
    return result

def test_another_transformer_beside_the_model_trains_and_draws(tmp_path, other_transformer, photo):
    """As a whole model with that transformer does, and not as --model's own."""
    whole = copy_model(tmp_path / "whole")
    shutil.rmtree(whole / "transformer")
    shutil.copytree(other_transformer / "transformer", whole / "transformer")
    ways = [["--model", whole, *NATIVE], ["--transformer", other_transformer, *NATIVE], NATIVE]
    drawn = [predict_photo(photo, tmp_path, *flags, "--true_cfg_scale", 1).picture for flags in ways]
    assert drawn[0] == drawn[1] != drawn[2]
    data = add_item(tmp_path / "data", "cat")
    same = ["--cache_dir", tmp_path / "c", "--lora_targets", "to_q", "--timestep_sampling", "uniform", "--lr", 1e-3,
            "--lr_scheduler", "constant", "--warmup_steps", 0] # of --model tiny they have other defaults
    runs = [train(data, tmp_path, *flags, *same) for flags in ways]
    assert runs[0].losses == runs[1].losses != runs[2].losses
    assert f"--transformer {other_transformer}" in runs[1].out # in the command to draw with
    changed = run_script("train.py", "--data", data, "--val_data", "--out_dir", tmp_path / "run-1", "--resume", *NATIVE,
                         "--cache_dir", tmp_path / "c")
    assert is_one_line(changed.errors[0], "--resume", "other settings")

@pytest.mark.parametrize("script", ["train.py", "predict.py"])
def test_a_transformer_that_is_not_there_is_named(tmp_path, script, photo):
    ask = ["--image", photo, "--prompt", "go"] if script == "predict.py" else ["--out_dir", tmp_path / "run"]
    result = run_script(script, *ask, "--transformer", TINY / "data", "--cache_dir", tmp_path / "c")
    assert result.status == 1 and is_one_line(result.errors[0], "transformer/config.json", "--transformer")
    assert not (tmp_path / "c/latents").exists() # before anything slow

@pytest.mark.parametrize("part, flag", [("transformer", "--quantize nf4"),
                                        ("text_encoder", "--quantize_text_encoder nf4")])
def test_a_quantized_model_is_refused_with_the_remedy(tmp_path, part, flag, photo):
    """S2's ovedrive/Qwen-Image-Edit-2509-4bit, as its config.json and one of its layers are."""
    folder = copy_model(tmp_path / "4bit")
    config = json.loads((folder / part / "config.json").read_bytes())
    (folder / part / "config.json").write_text(json.dumps(config | dict(quantization_config=dict(
        quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16"))),
            encoding="utf-8")
    file, = (folder / part).glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    name = next(n for n in tensors if n.endswith("to_q.weight") or n.endswith("q_proj.weight"))
    n = tensors[name].numel()
    tensors |= {name: torch.zeros(n // 2, 1, dtype=torch.uint8), f"{name}.absmax": torch.zeros(n // 64)}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    ask = ["--image", photo, "--prompt", "go", "--lora", ""]
    for flags in ([["--model", folder]] + [["--transformer", folder]] * (part == "transformer")):
        for script, more in (("train.py", ["--data", TINY / "val"]), ("predict.py", ask)):
            result = run_script(script, *flags, *more, "--cache_dir", tmp_path / "c", "--device", "cpu")
            assert result.status == 1, result.err
            assert is_one_line(result.errors[0], f"{part}/config.json", "quantized already", flag)
    assert not (tmp_path / "c/latents").exists()
    # the remedy on the same model
    assert predict_photo(photo, tmp_path, *NATIVE, "--quantize", "int8").status == 0

# ---- field.md: models that already run -------------------------------------------------------------------------------

REAL = dict(attention_head_dim=128, axes_dims_rope=[16, 56, 56], guidance_embeds=False, in_channels=64,
            joint_attention_dim=3584, num_attention_heads=24, num_layers=60, out_channels=16, patch_size=2)

def test_firered_s_classes_are_taken(tmp_path):
    """FireRed-Image-Edit 1.0 and 1.1 name the classes of Qwen-Image-Edit-2509, at its size. No weights are needed to
    see that they are taken."""
    folder = copy_model(tmp_path / "FireRed-Image-Edit-1.1")
    for file in folder.glob("*/*.safetensors"):
        file.unlink()
    for file, config in (("transformer/config.json", REAL | {"_class_name": "QwenImageTransformer2DModel"}),
                         ("model_index.json", json.loads((folder / "model_index.json").read_bytes()) |
                          {"_class_name": "QwenImageEditPlusPipeline"})):
        (folder / file).write_text(json.dumps(config | {"_diffusers_version": "0.36.0.dev0"}), "utf-8")
    transformer = predict.load_transformer(cache.find_model(str(folder), ["transformer"], weights=False), "bfloat16",
                                           weights=False)
    assert transformer.multi_resolution and not transformer.zero_cond_t
    assert round(sum(p.numel() for p in transformer.parameters()) / 1e9, 1) == 20.4
    pipe = cache.load_pipeline(cache.find_model(str(folder), cache.ENCODERS, weights=False))
    assert cache.is_plus(pipe)

# ---- S1 and S4: devices, checkpointing, reports ----------------------------------------------------------------------

def test_predict_reports_time_and_memory(tmp_path, photo, monkeypatch):
    said = re.search(r"^pictures: 1, (\d+\.\d) s, (\d+\.\d) GiB$", predict_photo(photo, tmp_path).out, re.M)
    assert 0 < float(said[2]) < 100 and float(said[1]) < 60
    peaks = {"cuda:1": 3 * 2**30}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[device])
    assert devices.memory_of("cuda:1") == 3 # that of the device which is asked for

class Reached(Exception):
    """What a test waits for has been seen."""

def devices_of(module):
    return {p.device.type for p in module.parameters()}

def test_encoders_stand_where_their_flags_say_and_get_their_inputs_there(data):
    """meta stands for a second device: no kernel takes tensors of it and of the CPU together."""
    pipe = cache.load_pipeline(TINY)
    cache.load_encoder(pipe, "vae", encoder_flags(vae_device="meta"))
    assert devices_of(pipe.vae.encoder) == devices_of(pipe.vae.quant_conv) == {"meta"}
    assert devices_of(pipe.vae.decoder) == {"cpu"} # S1: the decoder stays behind
    assert cache.encode_image(pipe, cache.to_pixels(pipe, paint_picture((64, 32)))).device.type == "meta"
    seen = []

    def stop(module, args, kwargs):
        seen.append({x.device.type for x in (*args, *kwargs.values()) if torch.is_tensor(x)})
        raise Reached
    for quantize in ("none", "int8"):
        pipe = cache.load_pipeline(TINY)
        cache.load_encoder(pipe, "text", encoder_flags(text_encoder_device="meta", quantize_text_encoder=quantize))
        assert devices_of(pipe.text_encoder) == {"meta"}
        pipe.text_encoder.register_forward_pre_hook(stop, with_kwargs=True)
        sample = samples_of(pipe, data)[0]["cat"]
        with pytest.raises(Reached):
            cache.load_text(sample, next(iter(sample.texts)), pipe)
        assert seen.pop() == {"meta"}

def test_each_part_of_predict_stands_on_its_own_device(tmp_path, photo, monkeypatch):
    """S1's predict.devices. The text encoder alone, the VAE alone, the transformer alone on another device."""
    assert predict_photo(photo, tmp_path).status == 0 # the encodings
    seen, real = [], predict.decode
    monkeypatch.setattr(devices, "check_device", lambda flag, device: None)
    monkeypatch.setattr(environment, "refuse_devices", lambda args: None) # of all but cuda and cpu
    def decode(vae, latents, shapes):
        seen.append((devices_of(vae), latents.device.type))
        return (paint_picture(), None) if latents.is_meta else real(vae, latents, shapes)
    monkeypatch.setattr(predict, "decode", decode)
    monkeypatch.setattr(predict.VaeImageProcessor, "postprocess", lambda self, image: [(image, paint_picture())[1]])
    for flag, want in (("transformer", ({"cpu"}, "meta")), ("vae", ({"meta"}, "cpu")),
                       ("text_encoder", ({"cpu"}, "cpu"))):
        result = predict_photo(photo, tmp_path, f"--{flag}_device", "meta")
        assert result.status == 0 and seen.pop() == want, result.err
    # --device is the default of all three
    assert predict_photo(photo, tmp_path, device="meta").status == 0 and seen.pop() == ({"meta"}, "meta")

@pytest.mark.parametrize("live", [True, False])
def test_a_validation_leaves_no_decoder_on_the_device(tmp_path, live, monkeypatch):
    """S1 and S4: in real-time training only the VAE's encoder is on the device. cpu:0 stands for it."""
    data, moves, real = add_item(tmp_path / "data", "cat"), [], torch.nn.Module.to
    def to(module, *args, **kwargs):
        moves.append((type(module).__name__, str(args[0]) if args else ""))
        return real(module, *args, **kwargs)
    monkeypatch.setattr(torch.nn.Module, "to", to)
    works("train.py", "--data", data, "--val_data", data, "--out_dir", tmp_path / "run", "--max_steps", 1,
          "--cache_dir", tmp_path / "c", "--device", "cpu", "--vae_device", "cpu:0", "--dtype", "float32",
          *["--no-use_cache"] * live)
    *_, (last, where) = [m for m in moves if m[0] in ("AutoencoderKLQwenImage", "QwenImageDecoder3d")]
    assert where == "cpu" and last == ("QwenImageDecoder3d" if live else "AutoencoderKLQwenImage")
    assert ("AutoencoderKLQwenImage", "cpu:0") in moves # there it was
    if live: # the encoder stays for the next batch
        assert ("AutoencoderKLQwenImage", "cpu") not in moves and ("QwenImageEncoder3d", "cpu") not in moves
