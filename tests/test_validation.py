"""train.py's validations: their loss, pictures and PSNRs; they change no training. The best step: test_best_step.py."""
import pickle
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import cache
import common
from library.cli import command_line
from library.data import dataset, picture_files
from training import best_step, validation
import predict
from tests.harness import (ADAMW, EXACT, NATIVE, ON_DEVICE, add_item, curve, is_one_line, log_of, lora_of,
                           paint_picture, run_script, save, start_ranks, train, validations_of, works)

def test_validation_changes_no_number(tmp_path, data, monkeypatch):
    """With pictures drawn and the validation loss measured after every step: the same curve and LoRA, to the bit, with
    dropout. Pictures without the LoRA are drawn once."""
    monkeypatch.setitem(command_line.SAMPLING, "num_inference_steps", 2)
    flags = ["--cache_dir", tmp_path / "c", "--lora_dropout", 0.5, "--max_steps", 3, *NATIVE, *EXACT]
    drawn, denoise = [], predict.denoise
    monkeypatch.setattr(predict, "denoise", lambda *args: drawn.append(1) or denoise(*args))
    for more in ([], ["--val_data", data, "--sample_every", 1]):
        result = train(data, tmp_path, *flags, *more)
        assert result.status == 0, result.err
    a, b = tmp_path / "run-0", tmp_path / "run-1"
    assert curve(log_of(a)) == curve(log_of(b)) and len(drawn) == 1 + 3
    assert all(torch.equal(x, lora_of(b)[k]) for k, x in lora_of(a).items())
    assert [p.name for p in sorted((b / "samples").glob("*.png"))] == [f"step_{n:06d}_data.png" for n in (1, 2, 3)]
    assert [r["step"] for r in validations_of(b)] == [1, 2, 3] and not validations_of(a)
    for n in (1, 2, 3): # said before the pictures are drawn
        assert re.search(rf"step {n}: validation on \d+ samples\n(.*\n)?step {n}: validation loss", result.out)
    assert {p.requires_grad for n, p in result.globals["transformer"].named_parameters()} == {True, False}

def test_an_interrupted_validation_is_taken_again(tmp_path, data, monkeypatch):
    """A kill while pictures are drawn after step 2 of 4: the resumed run has log and sheets of an unbroken one."""
    flags = ["--cache_dir", tmp_path / "c", "--val_data", data, "--max_steps", 4, "--sample_every", 2, *NATIVE, *EXACT]
    train(data, tmp_path, *flags)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt): # what else fails there is a warning
        patch.setattr(predict, "generate_samples", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        train(data, tmp_path, *flags)
    whole, cut = tmp_path / "run-0", tmp_path / "run-1"
    assert [r["step"] for r in log_of(cut)] == [1, 2]
    for _ in range(2): # and once more, from the end
        (cut / "DONE").unlink(missing_ok=True)
        assert train(data, tmp_path, *flags, "--out_dir", cut, "--resume").status == 0
        # the one that was interrupted has been taken again; one that was not may stand twice
        logs = [{r["step"]: r | dict(seconds=0) for r in validations_of(run)} for run in (cut, whole)]
        assert logs[0] == logs[1]
        assert [r["step"] for r in validations_of(whole)] == [2, 4]
        assert curve(log_of(cut)) == curve(log_of(whole))
    assert sorted(p.name for p in cut.glob("samples/*")) == sorted(p.name for p in whole.glob("samples/*"))

def test_held_out_pictures_stay_in_full_and_the_log_knows_them(tmp_path, data, monkeypatch):
    """For a page that shows the run: each validation's pictures, as drawn, and once what they are compared with, all in
    the drawn size. Of more than 20 validations the oldest pictures go, but for those of the best steps."""
    monkeypatch.setitem(command_line.SAMPLING, "num_inference_steps", 2)
    add_item(data, "deep/cat", [(64, 96), (96, 64), (300, 40)])
    flags = ["--cache_dir", tmp_path / "c", "--val_data", data, "--max_steps", 2, "--sample_every", 1, *NATIVE, *EXACT]
    assert train(data, tmp_path, *flags).status == 0
    run, read = tmp_path / "run-0", lambda *parts: picture_files.read_image(tmp_path.joinpath("run-0/samples", *parts))
    first, last = validations_of(run)
    assert [p["file"] for p in last["pictures"]] == sorted(p["file"] for p in first["pictures"])
    cat, = [p for p in last["pictures"] if p["file"] == "data/deep-cat.png"]
    assert cat["controls"] == 2 and cat["prompt"] == dataset.read_dataset(data)[0][0].prompts[0]
    base, target, control, drawn = [read(d, cat["file"]) for d in ("base", "target", "control", "step_000002")]
    assert base.size == target.size == control.size == drawn.size == (64, 96)
    assert read("control_1", cat["file"]).width == 64 and drawn != read("step_000001", cat["file"])
    got = [validation.psnr(image, target) for image in (control, base, drawn)]
    assert cat["psnr"][:3] == pytest.approx(got, abs=0.01)
    assert last["psnr"]["data/deep"]["lora"] == pytest.approx(got[2])
    for n in range(30):
        (run / f"samples/step_9{n:05}").mkdir()
    (run / "DONE").unlink()
    assert train(data, tmp_path, *flags, "--out_dir", run, "--resume").status == 0
    kept = [f"step_{step:06d}" for step in sorted(best_step.steps_to_keep(validations_of(run)))]
    newest = [f"step_9{n:05}" for n in range(10, 30)]
    assert kept and sorted(p.name for p in run.glob("samples/step_*/")) == kept + newest

def test_validation_losses_compare_across_runs(tmp_path, data, monkeypatch):
    """While the LoRA does nothing they are one number in every step and for every --seed, whatever is dropped; it falls
    when the pictures themselves are learned; and it is the training's loss, with its mask."""
    monkeypatch.setattr(predict, "denoise", lambda model, config, jobs, *_: [job.noise for job in jobs]) # nobody looks
    add_item(data, "dog", mask=Image.fromarray(np.eye(64, dtype=bool)))
    flags = ["--cache_dir", tmp_path / "c", "--val_data", data, "--sample_every", 1, *NATIVE, *EXACT]
    for more in (["--lr", 0, "--lora_dropout", 0.9], ["--lr", 0, "--seed", 1], ["--max_steps", 5, "--warmup_steps", 0],
                 ["--lr", 0, "--mask_foreground_weight", 9]):
        result = train(data, tmp_path, *flags, *more)
        assert result.status == 0, result.err
    first, second, learned, masked = [[r["val_loss"] for r in validations_of(tmp_path / f"run-{n}")] for n in range(4)]
    assert len({*first, *second}) == 1 and len(learned) == 5 and learned[-1] < 0.98 * first[0]
    assert abs(masked[0] / first[0] - 1) > 1e-3
    levels, ns, real = [], result.globals, result.globals["load_item"]
    monkeypatch.setitem(ns["validation_loss"].__globals__, "load_item",
                        lambda picked: levels.append(picked.s.item()) or real(picked))
    with torch.no_grad():
        losses = ns["validation_loss"]()
    assert losses.mean().item() == pytest.approx(masked[-1])
    whole = ns["validation_loss"].__globals__
    with monkeypatch.context() as patch, torch.no_grad(): # each has its own place
        patch.setitem(whole, "load_item", real)
        patch.setitem(whole, "val_samples", whole["val_samples"][:1])
        assert ns["validation_loss"]().tolist() == pytest.approx(losses.tolist()[:1])
    assert sorted(levels) == sorted([0.125, 0.375, 0.625, 0.875] * len(ns["val_samples"])) and len(levels) >= 8

@pytest.mark.parametrize("most, made", [(2, [0, 2]), (9, [0, 1, 2, 3, 4]), (0, [])])
def test_a_validation_makes_at_most_val_pictures_and_computes_the_loss_of_all(tmp_path, monkeypatch, most, made):
    """They are spread over all samples, and in the sheet. What goes to the first process are numbers, no pictures."""
    monkeypatch.setitem(command_line.SAMPLING, "num_inference_steps", 2)
    for n in range(5):
        add_item(tmp_path / "data", f"{n}/cat", [(160, 160), (128, 160)])
    losses, sent, real_generate, real_gather = [], [], predict.generate_samples, common.gather_objects
    names, first = [], None

    def generate_samples(transformer, vae, config, requests, *args):
        names.append([int(sample.name[0]) for sample, _ in requests])
        return real_generate(transformer, vae, config, requests, *args)

    def gather_objects(value):
        sent.append(len(pickle.dumps(value)))
        return real_gather(value)
    monkeypatch.setattr(predict, "generate_samples", generate_samples)
    monkeypatch.setattr(predict, "denoise", lambda model, config, jobs, *_: [job.noise for job in jobs])
    monkeypatch.setattr(common, "gather_objects", gather_objects)
    for flags in (["--val_pictures", most], []):
        result = train(tmp_path / "data", tmp_path, "--cache_dir", tmp_path / "c", "--val_data", tmp_path / "data",
                       "--max_steps", 1, *flags, *NATIVE, *EXACT)
        assert result.status == 0, result.err
        first = first or result
        losses += [r["val_loss"] for r in validations_of(tmp_path / f"run-{len(losses)}")]
    assert losses[0] == losses[1] and names == [made] * 2 + [[0, 1, 2, 3, 4]] * 2 # base and LoRA
    assert sent and max(sent) < 20_000
    record, = validations_of(tmp_path / "run-0")
    sheets = [Image.open(path).size[1] for path in (tmp_path / "run-0/samples").glob("*.png")]
    assert sheets == [200 * len(made) + 24] * bool(made)
    assert list(record["psnr"]) == [f"data/{n}" for n in made] and ("PSNR" in first.out) is bool(made)
    whole, = validations_of(tmp_path / "run-1")
    assert record["psnr"].items() <= whole["psnr"].items() # each compared with its own target

@pytest.mark.parametrize("more", [[], ["--fsdp", "--max_steps", 2, "--sample_every", 1]], ids=["data parallel", "fsdp"])
def test_two_processes_share_a_validation(tmp_path, start, data, more):
    """The same validation loss, PSNRs and sheet as one process; twice, as pictures of the base are drawn the first time
    only, on all processes or on none."""
    flags = ["--data", data, "--val_data", data, "--cache_dir", tmp_path / "c", "--max_steps", 1, "--batch_size", 2,
             *NATIVE, *EXACT, *ADAMW]
    assert run_script("train.py", *flags, *more[1:], "--out_dir", tmp_path / "one").status == 0
    ranks = start_ranks(start, *flags, *more, "--out_dir", tmp_path / "two")
    assert [r.wait() for r in ranks] == [0, 0], [r.output() for r in ranks]
    one, two = [validations_of(tmp_path / name)[-1] for name in ("one", "two")]
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-6)
    assert two["psnr"]["data"] == pytest.approx(one["psnr"]["data"], abs=0.05)
    a, b = [np.asarray(Image.open(tmp_path / d / "samples/step_000001_data.png"), int) for d in ("one", "two")]
    assert a.shape == b.shape and np.abs(a - b).max() <= 1

def test_psnrs_are_those_of_the_pictures(tmp_path, data, monkeypatch):
    """The input against the target by hand; groups are folders; the VAE alone is the ceiling of a perfect model."""
    add_item(data, "deep/cat", [(64, 96), (96, 64)])
    target = {}
    real = cache.load_latents

    def perfect(model, config, jobs, *_):
        return [target[len(job.noise)] for job in jobs]
    monkeypatch.setattr(cache, "load_latents", lambda *args: target.update(
        {len(t["pixel_latent"]): t["pixel_latent"] for t in [real(*args)]}) or real(*args))
    monkeypatch.setattr(predict, "denoise", perfect)
    result = train(data / "target/../../data", tmp_path, "--cache_dir", tmp_path / "c", "--max_steps", 1,
                   "--val_data", data, *NATIVE, *EXACT)
    assert result.status == 0, result.err
    record, = validations_of(tmp_path / "run-0")
    psnr = record["psnr"]
    assert list(psnr) == ["data", "data/deep"]
    # a row has what the best step is chosen by
    row = re.search("^all pictures +([0-9]+)((?: +[0-9.]+){4})$", result.out, re.M)
    assert int(row[1]) == len(record["pictures"])
    assert row[2].split() == [f"{mean:.1f}" for mean in best_step.mean_psnr(record).values()]
    got, want = [Image.open(data / kind / "deep/cat.png") for kind in ("control", "target")]
    assert psnr["data/deep"]["input"] == pytest.approx(validation.psnr(got.resize(want.size, Image.LANCZOS), want))
    deep = psnr["data/deep"]
    assert deep["lora"] == deep["base"] == deep["vae"] > deep["input"]

def test_validation_pictures_that_are_trained_too_are_counted_by_content(data, tmp_path):
    """Copied instead of moved, under another name; by cache.py and train.py; not where all are moved."""
    val = add_item(tmp_path / "val", "new")
    for path in data.glob("*/cat.*"): # the same pair, under another name
        shutil.copy(path, val / path.parent.name / f"copy{path.suffix}")
    words = "warning: 1 of 2 samples of --val_data have pictures that are also trained, for instance copy"
    flags = ["--data", data, "--cache_dir", tmp_path / "c", *ON_DEVICE]
    save(paint_picture().convert("L"), data / "mask/cat.png") # which changes the latents' file
    assert words in run_script("cache.py", *flags, "--val_data", val).out
    result = run_script("train.py", *flags, "--val_data", val, "--max_steps", 1, "--out_dir", tmp_path / "run",
                        "--batch_size", 2)
    assert result.status == 0 and result.out.count(words) == 1, result.err
    for path in val.glob("*/copy*"):
        path.unlink()
    assert "also trained" not in run_script("cache.py", *flags, "--val_data", val).out

@pytest.mark.parametrize("names", [["one/val/a", "two/val/a"], ["one/val/x/a", "one/val/x-a"]])
def test_validation_samples_that_would_share_their_pictures_are_refused(data, tmp_path, names):
    for name in names:
        root, sample = re.fullmatch("(.*/val)/(.*)", name).groups()
        add_item(tmp_path / root, sample)
    roots = sorted(path.parent for path in tmp_path.glob("*/val/target"))
    result = run_script("train.py", "--data", data, "--cache_dir", tmp_path / "c", "--val_data", *roots, "--max_steps",
                        1, "--out_dir", tmp_path / "run", *ON_DEVICE)
    assert result.status == 1 and len(result.errors) == 1 and is_one_line(result.errors[0], "--val_data"), result.err
    assert not list(tmp_path.glob("c/*/*"))

def test_a_resumed_run_with_other_validation_pictures_compares_with_these(data, tmp_path):
    """Of the same names: target, control and base are saved anew."""
    def steps(val, *flags):
        works("train.py", "--data", data, "--cache_dir", tmp_path / "c", "--val_data", val, "--out_dir",
              tmp_path / "run", "--batch_size", 2, "--lr_scheduler", "constant", *ON_DEVICE, *flags)
        return {kind: (tmp_path / f"run/samples/{kind}/val/v.png").read_bytes()
                for kind in ("target", "control", "base")}
    add_item(tmp_path / "one/val", "v")
    first = steps(tmp_path / "one/val", "--max_steps", 1)
    for role in ("target", "control"):
        save(paint_picture((64, 64), seed=99), tmp_path / f"two/val/{role}/v.png")
    shutil.copy(tmp_path / "one/val/target/v.txt", tmp_path / "two/val/target")
    second = steps(tmp_path / "two/val", "--max_steps", 2, "--resume")
    assert all(first[kind] != second[kind] for kind in first)
