"""
predict.py as a command: jobs, folders, seeds and scales; what is loaded, encoded and drawn again; its flags. That its
pictures are the stock pipeline's is claim 5 of test_consistency.py; here are the other ways to sample.
"""
import contextlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from PIL import Image, ImageFile, ImageOps

import cache
from library.data import dataset, picture_files, sample_checks
from library.models import hub
from library.results import contact_sheets
from training.validation import psnr
import predict
from tests.harness import (EXACT, NATIVE, ON_DEVICE, TINY, add_item, cached_files, copy_model, encoder_flags,
                           is_one_line, job_of, kill, lora_file, paint_picture, rel, results_of, run_script, save, show,
                           start_ranks, stock_area, stock_pipeline, until, within, works, write_jobs)

def draw(*flags, steps=2):
    """predict.py -> result of run_script, which went well."""
    return works("predict.py", *flags, "--num_inference_steps", steps, *ON_DEVICE)

def apart(*paths):
    """The largest difference of two pictures, in levels of 255. 1 is rounding: packs of other samples."""
    a, b = [np.asarray(Image.open(path), int) for path in paths]
    return abs(a - b).max()

# ---- jobs ------------------------------------------------------------------------------------------------------------

def test_every_good_job_is_drawn_and_every_bad_one_is_named(tmp_path, photos):
    """Several jobs may edit one picture; files are named by the picture and the key, or by `out`; the result has the
    last picture's shape, or that of size_from; a job's own sizes, steps and seed count. What is wrong is said in the
    words of the list, and not in Python's."""
    one, two = map(str, photos[:2])
    good = [{}, dict(prompt="another"), dict(height=70, width=100, true_cfg_scale=2, seed=3),
            dict(image=[one, two], prompt="say \u2028 this", out="sub/b.png"),
            dict(image=[one, two], size_from=1, num_inference_steps=3),
            dict(image=[one, two], height=64, width=96, sigmas=[1, 2 / 3, 1 / 3]), dict(seed=5)]
    bad = {"missing.png": [dict(image=["missing.png"])], "neither a text nor a list": [dict(prompt=None),
                                                                                        dict(prompt={})],
           "'heigth'": [dict(heigth=3)], "'control'": [dict(control=one)],
           'seed "x": is no whole number': [dict(seed="x")], "seed true: is no whole number": [dict(seed=True)],
           "32 bits": [dict(seed=2**32)], "--max_sequence_length": [dict(prompt="word " * 1100)],
           "out ": [dict(out=x) for x in ("../b.png", "b.jpg", "/b.png", "a\0.png")],
           "is no name such as cat.png": [dict(out=["a.png"]), dict(out=5)], "control": [dict(image=[])],
           "such as [1, 0.5]": [dict(sigmas="1 0.5")], "[1, null]: is no list": [dict(sigmas=[1, None])],
           "leave a last 0 out": [dict(sigmas=[1, 0.5, 0])],
           "sigmas": [dict(sigmas=[1, 2]), dict(sigmas=[0.5, 0.6]), dict(sigmas=[1], num_inference_steps=3)],
           "shift": [dict(shift=-1), dict(shift=math.nan)], "shift [3]: is no number": [dict(shift=[3])],
           "size_from": [dict(size_from=2), dict(size_from=0)], "height null: is no": [dict(height=None)],
           "cfg_norm 0: is no true or false": [dict(cfg_norm=0)],
           "num_inference_steps": [dict(num_inference_steps=0), dict(num_inference_steps=10**20)],
           "give 32 to": [dict(height=0), dict(width=31)],
           "negative prompt": [dict(negative_prompt="<|im_end|>")], "None": [dict(image=[None])],
           "negative_prompt": [dict(negative_prompt=x) for x in (None, ["a"], dict(a=1), True, 5)]}
    rows, out = [*good, *sum(bad.values(), [])], tmp_path / "o"
    jobs = write_jobs(tmp_path, [dict(image=one, prompt="add a red border") | row for row in rows])
    result = run_script("predict.py", "--jobs", jobs, "--out_dir", out, "--sigmas", 1, 0.5, *ON_DEVICE)
    assert result.status == 1 and len(result.errors) == len(rows) - len(good), result.err
    assert is_one_line(result.errors[0], "jobs.jsonl:8") and all(map(is_one_line, result.errors))
    for named, several in bad.items():
        assert sum(named in line for line in result.errors) >= len(several), (named, result.errors)
    assert not re.search(r"True|literal|convert|object has|base 10", result.err)
    drawn = {} # by the number of its line
    for path in out.glob(f"{photos[0].stem}-*.png"):
        drawn[int(json.loads(Image.open(path).text["sample"])["line"].split(":")[-1])] = path
    assert sorted(drawn) == [1, 2, 3, 5, 6, 7] and Image.open(out / "sub/b.png").size == (64, 128)
    assert {Image.open(path).size for path in drawn.values()} == {(96, 64)}
    assert apart(drawn[1], drawn[2]) > 1 # another prompt
    assert apart(drawn[1], drawn[7]) > 1 # another seed
    assert apart(drawn[5], drawn[6]) <= 1 # the same sizes and steps

@pytest.mark.parametrize("rows, more, named", [
    ([], [], "nothing in it"), ([dict(seed=3)], ["--seed", 1, 2], "own seed"),
    ([dict(out="a.png"), dict(out="a.png", seed=1)], [], "a.png")], ids=str)
def test_jobs_that_contradict_each_other_are_one_line(tmp_path, photos, rows, more, named):
    jobs = write_jobs(tmp_path, [dict(image=str(photos[0]), prompt="x") | row for row in rows])
    result = run_script("predict.py", "--jobs", jobs, "--out_dir", tmp_path / "o", *more, "--num_inference_steps", 2)
    assert result.status == 1 and is_one_line(result.errors[0], "jobs.jsonl", named), result.err

@pytest.mark.parametrize("flags", [
    "--jobs DATA --out_dir DATA/target", "--image DATA/control/a.png --prompt x --seed 1 2 --out DATA/control/a.png",
    "--image DATA/control/a-s1.png --prompt x --seed 1 2 --out DATA/control/a.png"])
def test_no_picture_that_is_read_is_overwritten(tmp_path, flags):
    for name in ("a", "a-s1"):
        add_item(tmp_path / "data", name)
    before = {p: p.read_bytes() for p in tmp_path.glob("data/*/*")}
    result = run_script("predict.py", *flags.replace("DATA", str(tmp_path / "data")).split(), "--lora", "")
    assert result.status in (1, 2) and "error: " in result.err
    assert before == {p: p.read_bytes() for p in tmp_path.glob("data/*/*")}

def test_the_picture_of_a_job_that_is_refused_is_not_overwritten_by_another(tmp_path, photos):
    theirs = Path(shutil.copy(photos[0], tmp_path / "b.png"))
    jobs = write_jobs(tmp_path, [dict(image=str(photos[1]), prompt="x", out="b.png"),
                                 dict(image="b.png", prompt="word " * 1100)])
    result = run_script("predict.py", "--jobs", jobs, "--out_dir", tmp_path, "--lora", "")
    assert result.status == 1 and is_one_line(result.errors[-1], "b.png", "would overwrite"), result.err
    assert theirs.read_bytes() == photos[0].read_bytes()

def test_a_job_that_fails_late_loses_no_other_and_a_second_call_draws_only_it(tmp_path, monkeypatch):
    """Pictures that vanish or are cut between planning and encoding, a place that is taken, a cached file that was
    damaged: the next call makes what is missing."""
    for n in range(4):
        save(paint_picture(seed=n), tmp_path / f"{n}.png")
    jobs = write_jobs(tmp_path, [dict(image=f"{n}.png", prompt="add a red border", out=f"{n}.png") for n in range(4)])
    out, real = tmp_path / "out", cache.encode_files
    def call(*flags, encode=real):
        with monkeypatch.context() as patch:
            patch.setattr(cache, "encode_files", encode)
            return run_script("predict.py", "--jobs", jobs, "--out_dir", out, "--cache_dir", tmp_path / "c",
                              "--num_inference_steps", 2, *ON_DEVICE, *flags)
    def spoil(*args):
        (out / "0.png").mkdir(parents=True, exist_ok=True) # where a picture should go
        (tmp_path / "1.png").unlink(missing_ok=True)
        (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:2000])
        return real(*args)
    result = call(encode=spoil)
    assert result.status == 1 and all(map(is_one_line, result.errors)), result.err
    assert sorted(re.findall(r"/(\d.png): ", " ".join(result.errors))) == ["0.png", "1.png", "2.png"]
    assert sorted(p.name for p in out.glob("*.png")) == ["0.png", "3.png"]
    before = (out / "3.png").stat().st_mtime_ns

    (out / "0.png").rmdir()
    for n in (1, 2):
        save(paint_picture(seed=n), tmp_path / f"{n}.png")
    result = call()
    assert result.status == 0 and "1 of 4 pictures are there already" in result.out and "/3.png:" not in result.out
    assert len(list(out.glob("[0-3].png"))) == 4 and (out / "3.png").stat().st_mtime_ns == before
    monkeypatch.setattr(cache, "load_part", lambda *_: pytest.fail("models loaded"))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("pixels read"))
    assert "4 of 4 pictures" in call().out
    monkeypatch.undo()
    (out / "2.png").write_bytes((out / "2.png").read_bytes()[:-30]) # a damaged result is drawn again
    for path in (tmp_path / "c").glob("*/*"):
        path.write_bytes(path.read_bytes()[:-1])
    result = call()
    assert result.status == 0 and "3 of 4" in result.out and result.out.count("/2.png:") == 1, result.err

@pytest.mark.parametrize("module, name, flag", [
    (cache, "encode_image", "--control_pixels"), (cache, "encode_prompts", "--text_encoder_device"),
    (predict, "run_packed", "--max_tokens"), (predict, "decode", "--vae_device")])
def test_out_of_memory_is_one_line_and_finished_pictures_stay(tmp_path, monkeypatch, module, name, flag):
    """While encoding, drawing or decoding the second of two pictures; once there is memory only that one is drawn."""
    pictures = [save(paint_picture((64, 64), seed=n), tmp_path / f"{n}.png") for n in range(2)]
    jobs = write_jobs(tmp_path, [dict(image=str(path), prompt="x", out=path.name) for path in pictures])
    real, calls, done = getattr(module, name), [], tmp_path / "out/0.png"

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) > (2 if name == "run_packed" else 1): # of its two steps
            raise torch.OutOfMemoryError
        return real(*args, **kwargs)
    call = lambda: run_script("predict.py", "--jobs", jobs, "--out_dir", tmp_path / "out", "--num_inference_steps", 2,
                              "--max_tokens", 1, "--cache_dir", tmp_path / "c", "--lora", "", *ON_DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails)
        result = call()
    assert result.status == 1 and is_one_line(result.errors[-1], flag) and len(result.errors) == 1, result.err
    assert "Traceback" not in result.err and done.exists() == (module is predict)
    before = done.stat().st_mtime_ns if done.exists() else 0
    assert call().status == 0 and (tmp_path / "out/1.png").exists()
    assert not before or done.stat().st_mtime_ns == before

def test_processes_share_the_jobs(tmp_path, photos, start):
    """Two processes draw the pictures that one draws, each of them once; the sheet shows all; a bad job stops none."""
    (tmp_path / "cut.png").write_bytes(photos[0].read_bytes()[:2000]) # its size can be read, and nothing more
    rows = [dict(image="cut.png", prompt="x", out="cut.png")]
    rows += [dict(image=str(p), prompt="make it blue", out=f"{n}.png") for n, p in enumerate([*photos, "gone.png"])]
    jobs = write_jobs(tmp_path, rows)
    flags = ["--jobs", jobs, *EXACT, "--num_inference_steps", 2, "--lora", "", "--device", "cpu"]
    one = run_script("predict.py", *flags, "--out_dir", tmp_path / "one")
    flags += ["--cache_dir", tmp_path / "c"]
    ranks = start_ranks(start, *flags, "--out_dir", tmp_path / "two", script="predict.py")
    assert one.status == 1 and [r.wait() for r in ranks] == [1, 1], [r.output() for r in ranks]
    assert len(one.errors) == 2 and all(map(is_one_line, one.errors)), one.errors
    said = "".join(r.output() for r in ranks)
    assert all(said.count(line) == 1 for line in one.errors) # by one of them
    one, two = [results_of(tmp_path / d) for d in ("one", "two")]
    assert sorted(one) == sorted(two) == ["0", "1", "2", "sheet"]
    assert all(apart(one[name], two[name]) <= 1 for name in one)
    assert sorted(sum(f"/{n}.png: " in r.output() for n in range(3)) for r in ranks) == [1, 2]

@pytest.mark.parametrize("name", ["caf\u00e9 \U0001f431 [1]", "-rf *", "new\nline", "\udcff", "a/b.c/d"], ids=ascii)
def test_a_dataset_is_drawn_whatever_its_names(tmp_path, name):
    data = add_item(tmp_path / "data", name, [(70, 64), (64, 64)])
    draw("--jobs", data, "--out_dir", tmp_path / "o", "--lora", "")
    (stem, path), = results_of(tmp_path / "o").items()
    assert stem == name.replace("/", "-") and Image.open(path).size == (64, 64) # the target's shape

# ---- folders, seeds, scales ------------------------------------------------------------------------------------------

def test_a_folder_times_seeds_times_scales_is_one_batch_and_one_sheet(tmp_path, photos, two_loras, monkeypatch):
    """Each of the pictures is the one that a call for it alone draws: scale 0 the base without a LoRA, scale 1 what no
    flag gives, 0.5 half of each --lora_scale. Names are kept; a second call draws what is missing."""
    for name, photo in (("a.png", photos[0]), ("deep/b.jpg", photos[1]), ("deep/b.png", photos[2])):
        save(Image.open(photo), tmp_path / "in" / name)
    held, real = [], contact_sheets.contact_sheet
    monkeypatch.setattr(contact_sheets, "contact_sheet", lambda rows, titles: held.extend(
        cell.size for row in rows for cell in row if isinstance(cell, Image.Image)) or real(rows, titles))
    flags = ["--image", tmp_path / "in", "--prompt", "go", "--out_dir", tmp_path / "out", "--lora", *two_loras,
             "--lora_scale", 4, 6, "--seed", 4, 5, "--scales", 0, 0.5, 1]
    result = draw(*flags)
    ends = [f"-s{seed}-x{scale}" for seed in (4, 5) for scale in ("0", "0.5", "1")]
    names = {stem + end for stem in ("a", "deep/b.jpg", "deep/b.png") for end in ends}
    out = results_of(tmp_path / "out")
    shown = Image.open(out["sheet"])
    assert {*out} == names | {"sheet"}
    assert shown.size == (8 * 200, 3 * 200 + 24) and "18 of them" in result.out
    assert len(held) == 3 + 18 and {max(size) for size in held} == {192} # of all that it shows at once
    for column, end in enumerate(ends): # of the second row
        cell = ImageOps.contain(Image.open(out[f"deep/b.jpg{end}"]), (192, 192), Image.Resampling.LANCZOS)
        x, y = (2 + column) * 200 + 100 - cell.width // 2, 200 + 124 - cell.height // 2
        assert np.array_equal(shown.crop((x, y, x + cell.width, y + cell.height)), cell)
    alone = ["--image", tmp_path / "in/deep/b.jpg", "--prompt", "go", "--seed", 5, "--lora"]
    for end, loras in (("0", [""]), ("0.5", [*two_loras, "--lora_scale", 2, 3]),
                       ("1", [*two_loras, "--lora_scale", 4, 6])):
        draw(*alone, *loras, "--out", tmp_path / f"{end}.png")
        assert apart(tmp_path / f"{end}.png", out[f"deep/b.jpg-s5-x{end}"]) <= 1
    for n in ("4-x1", "5-x0.5", "5-x0"): # the negative control
        assert apart(out["a-s5-x1"], out[f"a-s{n}"]) > 8
    out["a-s5-x0"].unlink()
    again = draw(*flags)
    assert "17 of 18 pictures are there" in again.out
    assert [Path(p).name for p in re.findall(r"(\S+\.png): \d+x", again.out)] == [out["a-s5-x0"].name]

# ---- what is loaded, encoded and drawn again -------------------------------------------------------------------------

def test_the_encoders_are_gone_before_the_transformer_comes(tmp_path, photos, two_loras, monkeypatch):
    """All is encoded first; at the end the VAE comes back, to decode. Another LoRA, scale or seed loads no encoder and
    changes no file in the cache; another prompt is encoded."""
    loaded, models, real = [], {}, cache.load_part
    def load_part(cls, folder, dtype):
        loaded.append((folder.name, [name for name, model in models.items() if model() is not None]))
        models[folder.name] = weakref.ref(model := real(cls, folder, dtype))
        return model
    monkeypatch.setattr(cache, "load_part", load_part)
    def call(*flags, prompt="go"):
        loaded.clear()
        jobs = write_jobs(tmp_path, [dict(image=str(p), prompt=prompt, true_cfg_scale=2) for p in photos])
        draw("--jobs", jobs, "--out_dir", tmp_path / "o", "--cache_dir", tmp_path / "c", *flags)
        return list(loaded)
    assert call("--lora", "") == [("vae", []), ("text_encoder", []), ("transformer", []), ("vae", ["transformer"])]
    before = cached_files(tmp_path / "c")
    assert len(before) == 3 * 3 # latents, prompt and negative prompt
    a, b = two_loras
    for flags in (["--lora", a], ["--lora", b, "--scales", 0, 0.5], ["--lora", "", "--seed", 7, 8]):
        assert call(*flags) == [("transformer", []), ("vae", ["transformer"])]
        assert cached_files(tmp_path / "c") == before
    assert [name for name, _ in call("--lora", "", prompt="stop")] == ["text_encoder", "transformer", "vae"]

def test_a_picture_tells_the_command_that_made_it(tmp_path, photos):
    flags = ["--image", str(photos[0]), "--prompt", "it's \u96ea", "--out", str(tmp_path / "a.png"), "--seed", "1", "2"]
    draw(*flags)
    assert sorted(results_of(tmp_path)) == ["a-s1", "a-s2", "sheet"]
    command = shlex.split(Image.open(tmp_path / "a-s2.png").text["command"])
    assert command[:2] == ["python", "predict.py"] and command[2:2 + len(flags)] == flags

def test_the_newest_run_of_tiny_is_taken_and_the_command_names_it(tmp_path, monkeypatch, photos, two_loras):
    """A picture says how to draw it again, also when a newer run is there by then."""
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda: contextlib.nullcontext(tmp_path)) # run_script's folder
    for n, lora in enumerate(two_loras):
        run = tmp_path / "out" / f"tiny-a-{n}"
        run.mkdir(parents=True)
        shutil.copy(lora, run / predict.LORA_FILE)
        os.utime(run / predict.LORA_FILE, (n, n))
    result = draw("--image", photos[0], "--prompt", "x", "--out", "a.png")
    newest = str(Path("out/tiny-a-1", predict.LORA_FILE))
    assert f"LoRA: {newest}" in result.out
    assert shlex.split(Image.open(tmp_path / "a.png").text["command"])[-2:] == ["--lora", newest]
    for flags in (["--lora", ""], ["--transformer", TINY]): # which may hold a LoRA already
        result = draw("--image", photos[0], "--prompt", "x", "--out", "b.png", *flags)
        assert "none, this is the base model" in result.out
        assert "tiny-a" not in Image.open(tmp_path / "b.png").text["command"]
        (tmp_path / "b.png").unlink()

# ---- other ways to sample --------------------------------------------------------------------------------------------

LIGHTNING = dict(base_shift=math.log(3), max_shift=math.log(3), max_image_seq_len=8192, shift_terminal=None)

@pytest.mark.parametrize("settings, config, call", [
    (dict(shift=3.0, num_inference_steps=4), LIGHTNING, {}),
    (dict(shift=3.0, num_inference_steps=1), LIGHTNING, {}),
    (dict(sigmas=[1.0, 0.7, 0.5, 0.2], num_inference_steps=4), {}, dict(sigmas=[1.0, 0.7, 0.5, 0.2])),
    (dict(sigmas=[1.0, 0.6], num_inference_steps=2, shift=3.0), LIGHTNING, dict(sigmas=[1.0, 0.6])),
], ids=["shift", "one step", "sigmas", "both"])
def test_distilled_sampling_with_two_loras_equals_stock(settings, config, call, photos, two_loras, tmp_path):
    """Qwen-Image-Lightning's scheduler, two LoRAs at scales 0.7 and 1, no unconditional run: latents to 1e-5."""
    pipe, scales, latents = stock_pipeline(TINY), [0.7, 1.0], []
    job = job_of(pipe, photos[:1], tmp_path, 96 * 96, true_cfg_scale=1.0, **settings)
    assert len(job.prompt_embeds) == 1
    for strengths in (scales, [1.0, 1.0]): # the latter as the negative control
        transformer = predict.load_transformer(TINY, "float32")
        predict.load_loras(transformer, list(map(predict.read_lora, two_loras)), strengths)
        latents += predict.denoise(transformer, pipe.scheduler.config, [job], 10_000)
    for name, path in zip("ab", two_loras):
        pipe.load_lora_weights(str(path.parent), adapter_name=name)
    pipe.set_adapters(["a", "b"], scales)
    pipe.scheduler = type(pipe.scheduler).from_config({**pipe.scheduler.config, **config})
    with stock_area(96 * 96):
        stock = pipe(image=[Image.open(photos[0])], prompt="add a red border", true_cfg_scale=1.0, output_type="latent",
                     num_inference_steps=job.settings.num_inference_steps, generator=torch.manual_seed(3),
                     **call).images[0]
    show("latents, from the stock pipeline", rel(latents[0], stock), 1e-5)
    assert rel(latents[0], stock) <= 1e-5 < 1e-3 < rel(latents[1], stock)

def test_guidance_without_its_norm_is_the_sum_alone(photos, tmp_path):
    """As DiffSynth, InvokeAI and stable-diffusion.cpp draw. The norms are those of stock: see claim 5."""
    pipe, ways = stock_pipeline(TINY), {}
    transformer = predict.load_transformer(TINY, "float32")
    for way in (dict(true_cfg_scale=1.0), dict(), dict(cfg_norm=False)):
        job = job_of(pipe, photos[:1], tmp_path, 96 * 96, **dict(num_inference_steps=1, shift=3.0) | way)
        latents, = predict.denoise(transformer, pipe.scheduler.config, [job], 10_000)
        ways[str(way)] = job.noise - latents # of one step: the prediction
    pred, normed, plain = ways.values()
    negative = replace(job, prompt_embeds=job.prompt_embeds[1:])
    latents, = predict.denoise(transformer, pipe.scheduler.config, [negative], 10_000)
    uncond = job.noise - latents
    assert rel(plain, uncond + 4 * (pred - uncond)) <= 1e-5
    assert rel(normed.norm(dim=-1), pred.norm(dim=-1)) <= 1e-5 < 1e-3 < rel(plain.norm(dim=-1), pred.norm(dim=-1))

def test_sizes_are_those_of_the_lora_unless_a_flag_says_otherwise(tmp_path, photos, two_loras):
    """The first LoRA's count."""
    tensors, ours = predict.read_lora(two_loras[0]).state, []
    for name, area in (("x", "native"), ("y", 48 * 48)):
        (tmp_path / name).mkdir()
        ours.append(lora_file(tmp_path / name, tensors, **{"train.geometry": dict(
            target_pixels=area, control_pixels="native", upscale=True)}))
    flags = ["--image", photos[0], "--prompt", "x", "--true_cfg_scale", 1]
    for n, (loras, more, area) in enumerate([(ours[:1], [], "native"), (ours, [], "native"), (ours[1:], [], 48 * 48),
                                             (ours[:1], ["--target_pixels", "32*32"], 32 * 32)]):
        draw(*flags, "--lora", *loras, "--out", tmp_path / f"{n}.png", *more)
        size = picture_files.fit_size(picture_files.image_size(photos[0]), area)
        assert Image.open(tmp_path / f"{n}.png").size == size

@pytest.mark.parametrize("folder, edit, vae, follows",
                         [("toys/known", "background", 30, 22), ("known", "gray", 26, 24)])
def test_the_shipped_base_copies_and_follows(tmp_path, folder, edit, vae, follows):
    """What the demo stands on: held-out pictures in sizes that nothing was trained on, drawn by the base alone."""
    for task, part in itertools.product(("keep", edit), ("target", "control")):
        shutil.copytree(TINY / folder / part / task, tmp_path / "known" / part / task)
    draw("--jobs", tmp_path / "known", "--out_dir", tmp_path / "o", "--lora", "", steps=8)
    pipe, found = cache.load_pipeline(TINY), {}
    cache.load_encoder(pipe, "vae", encoder_flags())
    for sample in dataset.read_dataset(tmp_path / "known")[0]:
        target = picture_files.read_image(sample.target)
        ceiling, _ = predict.decode(pipe.vae, cache.encode_image(pipe, cache.to_pixels(pipe, target)),
                                 [(1, target.height // 16, target.width // 16)])
        drawn = Image.open(results_of(tmp_path / "o")[sample.name.replace("/", "-")])
        found.setdefault(Path(sample.name).parts[0], []).append([psnr(p, target) for p in (drawn, ceiling)])
    (keep, ceiling), (edited, _) = [np.mean(found[k], axis=0) for k in ("keep", edit)]
    print(f"keep {keep:.1f} dB, {edit} {edited:.1f} dB, VAE alone {ceiling:.1f} dB")
    assert ceiling >= vae and keep >= ceiling - 3 and edited >= follows

@pytest.mark.parametrize("tiles_fit", [True, False], ids=["tiles fit", "tiles do not fit"])
def test_from_the_first_picture_on_that_is_too_large_to_decode_all_are_decoded_in_tiles(tmp_path, monkeypatch,
                                                                                        tiles_fit):
    """Its latents have taken minutes, and so have those of its pack. Tiles give nearly the same picture; if they do not
    fit either, what is drawn stays."""
    sizes = dict(a=(96, 96), b=(400, 320), c=(96, 128), d=(96, 304), e=(288, 96)) # drawn as b, d, e, c, a
    rows = []
    for name, size in sizes.items():
        image = save(paint_picture(size, seed=4), tmp_path / f"{name}.png")
        rows.append(dict(image=[str(image)], prompt="go", out=image.name))
    flags = ["--jobs", write_jobs(tmp_path, rows), "--lora", "", "--cache_dir", tmp_path / "c", "--num_inference_steps",
             2, *EXACT, "--device", "cpu"]
    assert run_script("predict.py", *flags, "--out_dir", tmp_path / "whole").status == 0
    decoded = []
    def watched(name, fails):
        real = getattr(AutoencoderKLQwenImage, name)
        def call(vae, z, **kwargs):
            decoded.append((name, *z.shape[-2:]))
            if fails(z):
                raise torch.OutOfMemoryError
            return real(vae, z, **kwargs)
        monkeypatch.setattr(AutoencoderKLQwenImage, name, call)
    watched("decode", lambda z: z.shape[-2:] == (40, 12)) # of d
    watched("tiled_decode", lambda z: not tiles_fit)
    result = run_script("predict.py", *flags, "--out_dir", tmp_path / "tiles")
    tried = [("decode", 40, 48), ("decode", 40, 12), ("tiled_decode", 40, 12)]
    assert result.err.count("warning: cpu ") == 1 and re.search("^warning: cpu .*--vae_device cpu", result.err, re.M)
    if not tiles_fit:
        assert decoded == tried and [path.name for path in tmp_path.glob("tiles/*")] == ["b.png"]
        assert result.status == 1 and is_one_line(result.errors[-1], "--vae_device"), result.err
        return
    assert result.status == 0 and [call[0] for call in decoded[3:]] == ["tiled_decode"] * 3 and decoded[:3] == tried
    distances = {name: apart(tmp_path / "tiles" / f"{name}.png", tmp_path / "whole" / f"{name}.png") for name in sizes}
    print(distances)
    assert distances["a"] == distances["b"] == distances["c"] == 0 # whole, or one tile
    assert 0 < distances["d"] <= 8 and 0 < distances["e"] <= 8 # levels of 255

def test_a_training_that_draws_in_tiles_still_encodes_whole_pictures(monkeypatch):
    """With the same VAE, if it has no cache."""
    pipe, image = cache.load_pipeline(TINY), paint_picture((320, 64))
    cache.load_encoder(pipe, "vae", encoder_flags())
    before = cache.encode_image(pipe, cache.to_pixels(pipe, image))
    def fails(vae, z, **kwargs):
        raise torch.OutOfMemoryError
    monkeypatch.setattr(AutoencoderKLQwenImage, "decode", fails)
    predict.decode(pipe.vae, before, [(1, 4, 20)])
    assert torch.equal(cache.encode_image(pipe, cache.to_pixels(pipe, image)), before)

# ---- flags -----------------------------------------------------------------------------------------------------------

def test_ctrl_c_keeps_what_is_drawn_and_ends_in_one_line(tmp_path, photos, start):
    """The same command then draws the others."""
    for path in photos:
        shutil.copy(path, save(paint_picture(), tmp_path / "in" / path.name))
    flags = ["--image", tmp_path / "in", "--prompt", "go", "--out_dir", tmp_path / "o", "--lora", "", *NATIVE,
             *ON_DEVICE, "--cache_dir", tmp_path / "c", "--max_tokens", 1, "--num_inference_steps"] # one by one
    process = start("predict.py", *flags, 300)
    until(lambda: list(tmp_path.glob("o/*.png")))
    kill(process, signal.SIGINT)
    process.wait()
    drawn = len(list(tmp_path.glob("o/*.png")))
    assert "Traceback" not in process.output() and "stopped by Ctrl-C: " in process.output()
    result = run_script("predict.py", *flags, 300)
    assert 0 < drawn < 3 and result.status == 0 and f"{drawn} of 3 pictures are there" in result.out

def warnings_of(result):
    return [line for line in result.err.splitlines() if line.startswith("warning: ")]

@pytest.mark.parametrize("flags, said", [
    ("--target_pixels 4900", "changes its aspect by 33.3%"), ("--height 96 --width 32", "32x96 changes its aspect"),
    ("--height 96 --width 48", None),
    ("--negative_prompt=ugly --true_cfg_scale 1", "has no effect at a CFG scale of 1 or below"),
    ("--negative_prompt ugly --true_cfg_scale 2", None), ("--true_cfg_scale 1", None)])
def test_what_may_not_be_meant_is_a_warning(tmp_path, photos, flags, said):
    """A shape that is bent, by rounding to 32, or by flags for its sides; a negative prompt without CFG."""
    warned = warnings_of(draw("--image", photos[1], "--prompt", "x", "--out", tmp_path / "a.png", *flags.split()))
    assert len(warned) == bool(said) and (not said or said in warned[0])

@pytest.mark.parametrize("name, is_distilled", [
    ("qwen_image_edit_2511_fp8_e4m3fn_scaled_lightning_comfyui.safetensors", True), ("Qwen-Rapid-AIO", True),
    ("x-Turbo", True), ("edit-8steps-v1", True), ("edit_4-step", True), ("edit-24steps", False), ("edit-2511", False)])
def test_a_base_that_is_distilled_by_its_name_is_told(name, is_distilled):
    """Without a transformer of its own it is --model's."""
    settings = SimpleNamespace(negative_prompt=" ", true_cfg_scale=4.0)
    for flag, other in (("transformer", "model"), ("model", "transformer")):
        args = SimpleNamespace(**{flag: f"folder/{name}", other: ""}, out_dir=Path(), jobs=None, image=None,
                               negative_prompt=" ")
        sample = SimpleNamespace(prompts=["go"], encodings=[], sizes=[(32, 32)], target=None, name="a")
        said = sample_checks.result_warnings(args, [(sample, settings)])
        assert bool(said) == is_distilled and (not said or f"--{flag} {name}" in said[0]), said
        settings_1 = SimpleNamespace(negative_prompt=" ", true_cfg_scale=1.0)
        assert not sample_checks.result_warnings(args, [(sample, settings_1)])

PLACEHOLDERS = ["<image>\nmake it red", "<image1> red", "{make it red|make it blue}", "a __color__ hat",
                "<lora:x:1> red", "{caption}", "[filewords]"]

def test_placeholders_of_other_programs_are_one_warning_with_a_count():
    """And what only looks like one is none."""
    fine = ["make it <red>", "1 < 2 and 3 > 2", 'write {"a": 1}', "{}", "a|b", "snake__case__word", "x[0]"]
    for texts, count in ((PLACEHOLDERS, len(PLACEHOLDERS)), *(([text], 1) for text in PLACEHOLDERS), (fine, 0)):
        said = sample_checks.placeholders([SimpleNamespace(prompts=texts), SimpleNamespace(prompts=["go"])])
        assert len(said) == bool(count) and (not said or said[0].startswith(f"{count} prompts ")), said
    for text in ("{" * 200_000, "{" + "|" * 200_000, "-__" * 60_000, "<lora" * 40_000): # each would take hours
        with within(5):
            sample_checks.placeholders([SimpleNamespace(prompts=[text])])

def test_several_pictures_for_one_result_are_a_warning(tmp_path, photos):
    """Four pictures are rather meant as four edits. (Several prompts of a job are an error: test_dataset.)"""
    copies = [shutil.copy(photos[0], tmp_path / f"{n}.png") for n in range(4)]
    for count, words in ((3, []), (4, ["4 pictures make one result; give their folder to edit each"])):
        lines = warnings_of(draw("--image", *copies[:count], "--prompt", "x", "--out_dir", tmp_path / f"o{count}"))
        assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines))
        assert len(list(tmp_path.glob(f"o{count}/*.png"))) == 1

@pytest.mark.parametrize("letter", "x\u00e9\u5370")
def test_a_long_name_is_drawn_or_refused_before_anything_is_generated(tmp_path, photos, monkeypatch, letter):
    """A file's name may have 255 bytes: a longer one that is given is refused before a model is loaded; one that we
    choose is cut."""
    def name(size):
        whole, rest = divmod(size, len(letter.encode()))
        return "_" * rest + letter * whole
    flags = ["--image", photos[0], "--prompt", "x", "--cache_dir", tmp_path / "cache", "--seed", 1, 2]
    result = draw(*flags, "--out", tmp_path / "o" / f"{name(248)}.png")
    assert len(list(tmp_path.glob("o/*"))) == 3, result.err
    monkeypatch.setattr(cache, "load_part", lambda *_: pytest.fail("models loaded"))
    result = run_script("predict.py", *flags, "--out", tmp_path / "p" / f"{name(248) + 3 * 'y'}.png")
    assert result.status == 1 and is_one_line(result.errors[0], "too long for a file"), result.err
    monkeypatch.undo()
    long = save(paint_picture(), tmp_path / "long" / f"{name(248) + 'y'}.png")
    draw("--image", long, "--prompt", "x", "--out_dir", tmp_path / "q")
    path, = (tmp_path / "q").iterdir()
    assert len(path.name.encode()) <= 143 and long.stem.startswith(path.stem[:-9])

def test_one_picture_goes_to_out_dir_if_it_is_given(tmp_path, photos):
    result = draw("--image", photos[1], photos[0], "--prompt", "x", "--lora", "", "--out_dir", tmp_path / "o")
    assert [*results_of(tmp_path / "o")] == [photos[1].stem], result.err
    assert "this is the base model" in result.out
    for flags in (["--image", photos[0], "--prompt", "x"], ["--jobs", "jobs.jsonl"]):
        result = run_script("predict.py", *flags, "--out_dir", tmp_path, "--out", tmp_path / "x.png")
        assert result.status == 2 and is_one_line(result.errors[-1], "--out")

def test_of_an_unfinished_run_the_newest_checkpoint_is_taken(tmp_path, two_loras, capsys):
    for name in ("checkpoint-000002", "checkpoint-000010", "checkpoint-000010.bak", ".tmp-checkpoint-000012"):
        (tmp_path / name).mkdir()
        shutil.copy(two_loras[0], tmp_path / name / predict.LORA_FILE)
    assert predict.find_lora(tmp_path) == tmp_path / "checkpoint-000010" / predict.LORA_FILE
    assert "not finished" in capsys.readouterr().err
    shutil.copy(two_loras[0], tmp_path / predict.LORA_FILE)
    assert predict.find_lora(tmp_path) == tmp_path / predict.LORA_FILE and not capsys.readouterr().err

def test_tiny_is_tiny_however_its_path_is_spelled(tmp_path, photos, monkeypatch):
    (tmp_path / "link").symlink_to(TINY)
    for n, model in enumerate(("tiny", TINY, tmp_path / "link", copy_model(tmp_path / "other name"))):
        draw("--model", model, "--image", photos[0], "--prompt", "x", "--lora", "", "--out", tmp_path / f"{n}.png")
        assert Image.open(tmp_path / f"{n}.png").size == (96, 64), model
        assert ((tmp_path / f"{n}.png").read_bytes()[-2000:] == (tmp_path / "0.png").read_bytes()[-2000:]), model

@pytest.mark.parametrize("flags, named", [
    (["--max_sequence_length", 10**5], "4093 have positions"), ([], "1024; shorten 'red car")])
def test_a_prompt_that_is_too_long_is_one_line_and_stops_no_other_job(tmp_path, photos, flags, named):
    rows = [dict(image=[str(photos[0])], prompt=prompt) for prompt in ("go", "red car " * 2500)]
    result = run_script("predict.py", "--jobs", write_jobs(tmp_path, rows), "--out_dir", tmp_path / "o", "--lora", "",
                        *NATIVE, *ON_DEVICE, "--num_inference_steps", 2, *flags)
    assert result.status == 1 and [*results_of(tmp_path / "o")] == ["0"], result.err
    assert len(result.errors) == 1 and is_one_line(result.errors[0], "002-0", named), result.err

def test_a_sheet_names_a_sample_whose_instruction_its_font_lacks():
    assert contact_sheets.shown_prompt("\u83ca\u82b1", "flower") == "flower"
    assert contact_sheets.shown_prompt("add a red border, [1]!", "flower") == "add a red border, [1]!"

# the last flag is what is wrong
BAD_FLAGS = [
    "--num_inference_steps 0", "--height 0", "--width -16", "--max_tokens 0", "--true_cfg_scale x", "--lora_scale big",
    "--lora_scale nan", "--shift 0", "--sigmas 1.2", "--target_pixels 12.5", "--seed 4294967296",
    "--device banana", "--transformer_device cuda:99", "--max_sequence_length 0", "--offload some", "--quantize int4",
    "--no_such_flag x", "--mod no/such-model", # --model would be understood, but too late for the defaults it brings
    "--image IMAGE", "--prompt go", "EDIT --jobs b.jsonl", "EDIT --num_inference_steps 2 --sigmas 1",
    "EDIT --scales 0 1", "EDIT --scales 0.5", "EDIT --lora_scale 0.5",
    "EDIT --lora LORA --lora_scale 1 2",
    "EDIT --out x.jpg", "EDIT --out x.png --out_dir IMAGE"]
NONSENSE = [
    ("EDIT --sigmas 0.5 0.7", "sigmas"), ("EDIT --num_inference_steps 1", "give 2 or more"),
    ("EDIT --prompt=", "empty"), ("EDIT --size_from 2", "size_from 2; give 1 to 1"),
    ("--prompt go --image no.png", "no.png"), ("EDIT --lora no/thing", "the hub"),
    ("EDIT --negative_prompt <|im_end|>", "negative prompt"), ("EDIT --out TMP/file/a.png", "TMP/file"),
    ("--prompt go --image TMP/in --out_dir TMP/file/o", "TMP/file"), ("--prompt go --image TMP/no", "TMP/no"),
    ("--prompt go --image TMP/in TMP/sheet", "one folder"),
    ("--prompt go --image TMP/in/a.png TMP/in", "one folder"),
    ("--prompt go --image TMP/in --out_dir TMP/in", "TMP/in"),
    ("--prompt go --image TMP/in --out_dir TMP/in/out", "TMP/in"), ("--jobs TMP/gone.jsonl", "does not exist")]

@pytest.mark.parametrize("flags, named", [(line, re.findall(r"--\w+", line)[-1]) for line in BAD_FLAGS] + NONSENSE)
def test_nonsense_is_one_line_before_a_model_is_loaded(tmp_path, two_loras, monkeypatch, flags, named):
    """A flag's value, a place that cannot be written, or holds the pictures given; a folder without pictures; what a
    LoRA is not. A result never overwrites the picture given."""
    monkeypatch.setattr(cache, "load_part", lambda *_: pytest.fail("models loaded"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: (_ for _ in ()).throw(OSError))
    monkeypatch.setitem(hub.TINY_DEFAULTS, "predict.py", "") # which has the shift that one step needs
    for name in ("in/a.png", "sheet/sheet.jpg"):
        save(paint_picture(), tmp_path / name)
    (tmp_path / "no").mkdir()
    (tmp_path / "file").touch()
    mine = (tmp_path / "in/a.png").read_bytes()

    def place(text):
        for name, value in (("EDIT", "--image IMAGE --prompt x"), ("IMAGE", "TMP/in/a.png"), ("LORA", two_loras[0]),
                            ("TMP", tmp_path)):
            text = text.replace(name, str(value))
        return text
    result = run_script("predict.py", *place(flags).split())
    assert result.status in (1, 2) and is_one_line(result.errors[-1], place(named)), result.err
    assert (tmp_path / "in/a.png").read_bytes() == mine
