"""
NaN and Inf in what a model computes are an error line, or a line of a validation's; they become no
picture, no rank, no checkpoint and no LoRA.
"""
import math
import shutil
import warnings

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from PIL import Image

import cache
import common
from library.files import tensor_files
from training import best_step, validation
import predict
import rope_patch
from tests.harness import (EXACT, NATIVE, TINY, Reader, is_one_line, lora_file, lora_tensors, refused, results_of,
                           run_script, steps_of, validations_of, write_jobs)

def overflowing(folder, factor=1e37):
    """A LoRA whose numbers are finite, and what they make of an input is not."""
    folder.mkdir()
    tensors = {k: v * (factor if ".lora_B." in k else 1) for k, v in lora_tensors().items()}
    return lora_file(folder, tensors)

def draw(*flags):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning) # numpy's, of NaN that becomes a level
        return run_script("predict.py", *flags, "--num_inference_steps", 2, *EXACT, "--device", "cpu", *NATIVE)

def test_a_picture_of_nan_is_an_error_line_and_no_file_and_the_others_are_drawn(tmp_path, photos):
    """The same command says it again; a LoRA at strength 0 computes nothing, so that it shows the base."""
    flags = ["--image", photos[0], "--prompt", "go", "--lora", overflowing(tmp_path / "big"), "--scales", 1, 0,
             "--out_dir", tmp_path / "o", "--cache_dir", tmp_path / "c"]
    for _ in range(2):
        result = draw(*flags)
        assert result.status == 1 and len(result.errors) == 1, result.err
        assert is_one_line(result.errors[0], tmp_path / "o/0-x1-", "transformer", "--lora_scale", "--scales 0")
        assert "there already" not in result.errors[0]
        assert [*results_of(tmp_path / "o")] == ["0-x0"]
    assert "1 of 2 pictures are there already" in result.out
    base = draw(*flags[:4], "--lora", "", "--out", tmp_path / "base.png", "--cache_dir", tmp_path / "c")
    assert base.status == 0, base.err
    a, b = [np.asarray(Image.open(path)) for path in (results_of(tmp_path / "o")["0-x0"],
                                                      tmp_path / "base.png")]
    assert np.array_equal(a, b)

def test_one_of_several_loras_that_is_at_0_cannot_overflow(tmp_path, photos, two_loras):
    flags = ["--image", photos[0], "--prompt", "go", "--cache_dir", tmp_path / "c"]
    big = overflowing(tmp_path / "big")
    result = draw(*flags, "--lora", big, two_loras[0], "--lora_scale", 0, 1, "--out", tmp_path / "a.png")
    assert result.status == 0, result.err
    assert draw(*flags, "--lora", two_loras[0], "--out", tmp_path / "b.png").status == 0
    assert np.array_equal(*[np.asarray(Image.open(tmp_path / name)) for name in ("a.png", "b.png")])

@pytest.mark.parametrize("model", ["transformer", "VAE"])
def test_the_line_names_the_model_that_computed_it(tmp_path, photos, monkeypatch, model):
    """One sample of two: the other is drawn."""
    owner, name = dict(transformer=(predict, "denoise"), VAE=(AutoencoderKLQwenImage, "decode"))[model]
    real, calls = getattr(owner, name), []

    def spoiled(*args, **kwargs):
        made = real(*args, **kwargs)
        calls.append(made)
        if model == "transformer":
            made[0].fill_(math.inf)
        elif len(calls) == 1:
            made.sample[..., 3, 3] = math.nan # one pixel
        return made
    monkeypatch.setattr(owner, name, spoiled)
    jobs = write_jobs(tmp_path, [dict(image=[str(path)], prompt="go", out=path.name) for path in photos[:2]])
    result = draw("--jobs", jobs, "--lora", "", "--out_dir", tmp_path / "o", "--cache_dir", tmp_path / "c")
    drawn = {f"{name}.png" for name in results_of(tmp_path / "o")} - {"sheet.png"}
    assert result.status == 1 and len(drawn) == 1 and len(result.errors) == 1, result.err
    lost, = {path.name for path in photos[:2]} - drawn
    assert is_one_line(result.errors[0], tmp_path / "o" / lost, f"what the {model} computed")

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
def test_one_number_that_is_not_finite_is_found_wherever_it_stands(dtype):
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 7, 5 * 6 - 1):
            numbers = torch.linspace(-1, 1, 30).to(dtype)
            assert tensor_files.is_finite(numbers.view(5, 6))
            numbers = numbers.float()
            numbers[place] = bad
            assert not tensor_files.is_finite(numbers.to(dtype).view(5, 6))
    for tensor in (torch.zeros(0, 64, dtype=dtype), torch.ones(3, dtype=torch.bool)):
        assert tensor_files.is_finite(tensor)

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiles"])
def test_one_latent_that_is_not_finite_is_the_transformer_s(dtype, tiled):
    """The VAE makes no finite picture of it, so that the pixels alone need a look."""
    vae = cache.load_vae(TINY / "vae", dtype)
    if tiled:
        vae.decode = vae.tiled_decode
    latents = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)).to(vae.dtype)
    assert predict.decode(vae, latents, [(1, 4, 6)])[1] is None
    for bad, place in ((math.nan, (0, 0)), (math.inf, (20, 31)), (-math.inf, (13, 63))):
        spoiled = latents.clone()
        spoiled[place] = bad
        assert predict.decode(vae, spoiled, [(1, 4, 6)]) == (None, "transformer")

@pytest.mark.parametrize("names, words, remedy", [
    (["lora"], "transformer computed with the trained LoRA (1.png)", "lower --lr"),
    (["lora", "base"], "of the base (0.png)", "another copy of the model, or leave out --sample_lora"),
    (["lora", "vae"], "VAE computed for the vae", "another copy of the model, or leave out --sample_lora")], ids=str)
def test_a_validation_s_line_names_a_picture_that_is_lost(names, words, remedy):
    """Of several pictures one that the training cannot have spoilt, as its cause is not the LoRA."""
    lost = [(name, "VAE" if name == "vae" else "transformer", f"{name != 'base':d}.png") for name in names]
    line = validation.why_validation_not_finite(lost)
    assert is_one_line(f"error: {line}", words, remedy), line

@pytest.mark.parametrize("name", ["control_latent", "prompt_embed"])
def test_nan_in_an_encoded_file_is_encoded_again(tmp_path, photos, name):
    """Its digest is right, as whoever has made it has computed that, too."""
    flags = ["--image", photos[0], "--prompt", "go", "--lora", "", "--cache_dir", tmp_path / "c"]
    assert draw(*flags, "--out", tmp_path / "a.png").status == 0
    spoil(tmp_path / "c", name)
    result = draw(*flags, "--out", tmp_path / "b.png")
    assert result.status == 0 and "encoding it again" in result.err, result.err
    assert np.array_equal(*[np.asarray(Image.open(tmp_path / name)) for name in ("a.png", "b.png")])

def spoil(cache_dir, name, index=None):
    """It writes NaN into the first file with this tensor, of those that the index names, and returns the file."""
    files = sorted(cache_dir.glob(f"{'latents' if 'latent' in name else 'text'}/*.safetensors"))
    file = next(file for file in files if index is None or file.stem in index.read_text("utf-8"))
    tensors, meta = tensor_files.read_tensors(file, key=file.stem)
    tensors[name][1, 2] = math.nan
    tensor_files.write_tensors(file, tensors, meta)
    return file

@pytest.mark.parametrize("name", ["pixel_latent", "prompt_embed"])
def test_a_training_on_a_foreign_index_names_the_file_with_nan(small, tmp_path, name):
    """And not the samples of a step whose loss it would spoil."""
    shutil.copytree(small.cache, tmp_path / "cache")
    # other tests may have encoded more into that cache
    file = spoil(tmp_path / "cache", name, tmp_path / "cache/tiny-data.json")
    flags = [tmp_path / "cache/tiny-data.json" if word == small.cache / "tiny-data.json" else word
             for word in small.flags]
    result = run_script("train.py", *flags, "--out_dir", tmp_path / "run")
    assert result.status == 1 and is_one_line(result.errors[-1], file, name, "cache.py --verify"), result.err

# ---- validations -----------------------------------------------------------------------------------------------------

def train(small, tmp_path, *flags):
    more = [word for word in small.flags if word != small.cache / "tiny-data.json"]
    more[:2] = ["--data", small.folder / "data", "--val_data", small.folder / "data"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return run_script("train.py", *more, "--val_pictures", 2, "--num_inference_steps", 2, "--sample_every", 1,
                          "--cache_dir", tmp_path / "c", "--out_dir", tmp_path / "run", *flags)

def spoil_validation(monkeypatch, number, lora=True):
    """Of the pictures of this validation one is NaN: the LoRA's, or the base's, which is drawn in the first one."""
    real, calls = predict.denoise, []

    def denoise(*args):
        latents = real(*args)
        calls.append(1)
        # each draws two pictures in one pack; the base's come once, before all others
        if len(calls) == (number + 1 if lora else 1):
            latents[0][5] = math.nan
        return latents
    monkeypatch.setattr(predict, "denoise", denoise)

@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "base"])
def test_a_validation_with_nan_has_no_psnr_and_no_rank_and_the_training_goes_on(small, tmp_path, monkeypatch, lora):
    """What is finite is saved. All that ranks by PSNR leaves the step out; the page says it in words."""
    spoil_validation(monkeypatch, 2, lora)
    result = train(small, tmp_path, "--max_steps", 3, "--keep", 1)
    assert result.status == 0, result.err
    run, found = tmp_path / "run", validations_of(tmp_path / "run")
    lost = [record["step"] for record in found if record.get("not_finite")]
    assert lost == ([2] if lora else [1, 2, 3])
    record = found[1]
    assert record["psnr"] == {} and record["pictures"] == [] and math.isfinite(record["val_loss"])
    name, = record["not_finite"]
    assert name.startswith("lora of data/" if lora else "base of data/")
    assert len(list(run.glob("samples/step_000002/data/*.png"))) == (1 if lora else 2)
    assert len(list(run.glob("samples/base/data/*.png"))) == (2 if lora else 1)
    warning, = {line for line in result.out.splitlines() if line.startswith("warning: NaN")}
    assert ("with the trained LoRA" in warning) == lora == ("--lr" in warning) and name.split(" of ")[1] in warning
    best = best_step.best_steps(best_step.read_validations(run)).get("mean PSNR")
    assert best not in lost and (best is not None) == lora
    assert run_script("tools/page.py", run).status == 0
    text = " ".join(Reader(run / "index.html").texts["p"])
    assert f"Steps at which NaN or Inf was computed: {', '.join(map(str, lost))}" in text

def test_a_loss_of_nan_is_said_in_words_and_never_ranked_or_kept(small, tmp_path, monkeypatch):
    run, real_run, real_progress, validations = tmp_path / "run", rope_patch.run_packed, common.progress, []

    def progress(what, *args, **options):
        validations.extend([what] * (what == "validation loss"))
        return real_progress(what, *args, **options)

    def run_packed(*args): # train.py's, not predict.py's
        spoilt = len(validations) in (2, 4) and not torch.is_grad_enabled()
        return [pred * (math.nan if spoilt else 1) for pred in real_run(*args)]
    monkeypatch.setattr(rope_patch, "run_packed", run_packed)
    monkeypatch.setattr(common, "progress", progress)
    result = train(small, tmp_path, "--max_steps", 4, "--keep", 1, "--val_pictures", 0)
    assert result.status == 0, result.err
    lines = [line for line in result.out.splitlines() if "validation loss" in line and "best so far" not in line]
    assert [("NaN or Inf" in line) for line in lines[:4]] == [False, True, False, True] and " nan" not in result.out
    assert "best so far: step 3 by validation loss" in result.out
    assert "the last, step 4, has NaN or Inf" in result.out and steps_of(run) == [3, 4]
    assert f"{run / 'checkpoint-000003'} is better than the last one by validation loss" in result.out
    assert run_script("tools/page.py", run).status == 0
    assert ">nan" not in (run / "index.html").read_text("utf-8")

# ---- what is saved ---------------------------------------------------------------------------------------------------

class Spoiler(torch.optim.SGD):
    """Its third step makes a NaN, although the gradient has none; but not in the preflight's trial with few of them."""

    def step(self, closure=None):
        super().step(closure)
        p = self.param_groups[0]["params"][0]
        count = self.state[p].setdefault("count", 0)
        self.state[p]["count"] = count + 1
        if count == 2 and len(self.param_groups[0]["params"]) > 4:
            p.data.view(-1)[3] = math.nan

@pytest.mark.parametrize("save_every", [1, 9], ids=["checkpoint before", "none before"])
def test_nan_that_the_last_step_has_made_becomes_no_checkpoint_and_no_lora(small, tmp_path, save_every):
    """An error line; the checkpoint before stays, and nothing is left half-written."""
    result = train(small, tmp_path, "--max_steps", 3, "--save_every", save_every, "--sample_every", 0, "--optimizer",
                   "tests.test_finite.Spoiler")
    assert result.status == 1 and is_one_line(result.errors[-1], "checkpoint-000003", "NaN", "--lr"), result.err
    run = tmp_path / "run"
    assert steps_of(run) == ([1, 2] if save_every == 1 else []) and not (run / "DONE").exists()
    assert not (run / predict.LORA_FILE).exists() and not list(run.rglob(".tmp-*"))

def test_a_scale_that_makes_inf_of_a_finite_lora_is_not_saved(tmp_path):
    """A finished LoRA has its scale in lora_B, where fp32 may end."""
    transformer = predict.load_transformer(TINY, "float32")
    lora = predict.add_lora(transformer, r=1, lora_alpha=1e6, target_modules=["to_q"])
    next(p for name, p in lora.items() if "lora_B" in name).data.fill_(1e35)
    with refused(tmp_path / "b.safetensors", "lora_B"):
        predict.save_lora(tmp_path / "b.safetensors", transformer, {})
    assert not [*tmp_path.iterdir()]
