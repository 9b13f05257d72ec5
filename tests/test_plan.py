"""train.py --plan: its hours are those of all that the command does, counted in a run of it."""
import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import cache
import predict
import rope_patch
from training import plan, validation
from tests.harness import TINY, add_item, run_script, works

def rows_of(out):
    """-> {row of the table of hours: what its last column says}."""
    table = out.partition("expected hours")[2]
    return dict(re.findall(r"^(\S.*?) {2,}.*?(\S+)$", table, re.M))

@pytest.fixture
def quick(monkeypatch):
    """--plan without the seconds in which it counts memory."""
    monkeypatch.setattr(plan, "step_bytes", lambda *_, **__: 0)

def rehearse(patch):
    """-> a Counter of what a run of train.py does from now on: forward passes, files encoded, pictures decoded."""
    done, drawing = Counter(), ["base"]

    def count(module, name, kind):
        f = getattr(module, name)

        def counted(first, *args, **kwargs):
            done[kind(first)] += 1
            return f(first, *args, **kwargs)
        patch.setattr(module, name, counted)
    # as train.py imports it, and as the sampler has it
    count(rope_patch, "run_packed", lambda model: "steps" if torch.is_grad_enabled() else
          "asked" if model.training else "loss")
    count(predict, "run_packed", lambda _: drawing[-1])
    count(predict, "decode", lambda _: drawing[-1])
    count(cache, "refuse_overflow", lambda _: "encoded") # of each file
    generate = validation.Drawer.generate

    def told(self, trained):
        drawing.append("pictures" if trained else "base")
        images = generate(self, trained)
        drawing.append("pictures") # then compare() decodes what the VAE alone makes
        return images
    patch.setattr(validation.Drawer, "generate", told)
    return done

def test_the_hours_of_the_plan_are_those_of_all_that_the_run_does(tmp_path, monkeypatch, quick):
    """On a card where each pass, each file that is encoded and each picture that is decoded takes an hour, the rows are
    what a run of the same command has counted: guidance, the base's pictures and the last validation are among it."""
    for n in range(5):
        add_item(tmp_path / "data", f"{n}", [(64, 64 + 32 * (n % 2)), (64, 64)])
    for n in range(3):
        add_item(tmp_path / "val", f"{n}", [(64, 96 + 32 * n), (64, 64)], "make it warm")
    flags = ["--data", tmp_path / "data", "--val_data", tmp_path / "val", "--cache_dir", tmp_path / "c", "--max_steps",
             5, "--sample_every", 2, "--val_pictures", 2, "--num_inference_steps", 3, "--true_cfg_scale", 2,
             "--max_tokens", 150, "--batch_size", 3, "--device", "cpu", "--lora_targets", "to_q", "--dtype", "bfloat16",
             "--preserve", 0.99] # so that all but surely each pass asks the base
    blocks = json.loads((TINY / "transformer/config.json").read_bytes())["num_layers"]
    monkeypatch.setattr(plan, "RATES", {"Card": (10**4, *[1e30] * 6)})
    monkeypatch.setattr(plan, "HOST", dict.fromkeys(plan.HOST, 3_600_000 / blocks))
    monkeypatch.setattr(plan, "PICTURE", 3600)
    monkeypatch.setattr(plan, "DISK", 1e30)

    def planned_rows():
        planned = works("train.py", *flags, "--plan")
        return rows_of(planned.out)
    rows = planned_rows()
    with pytest.MonkeyPatch.context() as patch:
        done = rehearse(patch)
        result = run_script("train.py", *flags, "--out_dir", tmp_path / "run")
    assert result.status == 0, result.err
    expected = {"5 steps": done["steps"], "3 validations: loss": done["loss"],
                "3 validations: 2 pictures each": done["pictures"], "the base's 2 pictures": done["base"],
                f"encoding {done['encoded']} files that the cache lacks": done["encoded"]}
    assert {row: float(rows[row]) for row in expected} == expected
    assert float(rows["what the base answers to --preserve"]) == pytest.approx(done["asked"], rel=0.02)
    total = sum(done.values()) - 0.01 * done["asked"]
    assert rows["in all"] == rows["card-hours"] == f"{total:.1f}-{3 * total:.1f}"
    assert "encoding" not in " ".join(planned_rows()) # now that it is in the cache

@pytest.mark.parametrize("flags, hours", [(["--resume"], True), (["--dtype", "float32"], False)])
def test_a_published_model_is_planned_for_a_card_on_any_machine(tmp_path, quick, flags, hours):
    """In bfloat16 and with hours, without --dtype and without a GPU."""
    folder = plan.write_configs("Qwen/Qwen-Image-Edit-2511")
    result = works("train.py", "--plan", "--model", folder, "--data", TINY / "data", "--device", "cpu",
                   "--cache_dir", tmp_path / "c", "--gradient_checkpointing", 60, "--out_dir", "run", *flags)
    assert ("expected hours" in result.out) == hours == (", in bfloat16." in result.out)
    assert ("whole run, with the steps before --resume" in result.out) == hours

def test_eight_cards_share_the_work_and_wait_for_each_other(monkeypatch):
    """Each row of several processes: the one with most to do decides, files and pictures are shared, gradients travel,
    with --fsdp every step asks the base, and card-hours are hours of all."""
    monkeypatch.setattr(plan, "RATES", {"Card": (10**4, *[1e30] * 5, 1)}) # GB/s between cards
    monkeypatch.setattr(plan, "HOST", dict.fromkeys(plan.HOST, 3_600_000)) # an hour a pass
    monkeypatch.setattr(plan, "PICTURE", 3600)
    monkeypatch.setattr(plan, "DISK", 1e30)
    monkeypatch.setattr(plan, "world", lambda: 8)
    model = SimpleNamespace(inner_dim=8, transformer_blocks=[None])
    monkeypatch.setattr(rope_patch, "blocks_of", lambda model: model.transformer_blocks)
    most, least = [[9], [9], [9]], [[9]]
    work = plan.Work([[least, most]], 2, [most, least], [least, most], 16, 24)
    args = SimpleNamespace(max_steps=10, preserve=0.5, fsdp=False, num_inference_steps=5)
    expected = {"10 steps": 30, "what the base answers to --preserve": 15, "gradients, added up over 8 cards": 20,
                "encoding 24 files that the cache lacks": 3, "2 validations: loss": 6,
                "2 validations: 16 pictures each": 2 * (5 * 3 + 2 + 2), "the base's 16 pictures": 5 * 3 + 2}
    for args.fsdp, asked in ((False, 15), (True, 30)):
        expected["what the base answers to --preserve"] = asked
        rows = plan.hours_on("Card", args, work, model, (1, False), 0, 2 * 3600e9, 0, 0)
        assert {row: float(rows[row]) for row in expected} == expected
        total = sum(expected.values())
        assert rows["in all"] == f"{total:.1f}-{3 * total:.1f}"
        assert rows["card-hours"] == f"{8 * total:.1f}-{24 * total:.1f}"
