"""
--lora_args: the fields of peft.LoraConfig that a LoRA's file can hold. The file on the published base is the model that
was trained; one line refuses every other field, before a model is loaded.

$ python -m pytest -q tests/test_lora_args.py    # half a minute
"""
import json
from dataclasses import fields

import pytest
import torch
from peft import LoraConfig

import cache
import predict
from library.lora.peft_config import PATTERNS
from library.lora import peft_config
from tests.harness import TINY, assert_same_run, is_one_line, lora_of, rel, run_script, works

def flags_of(given):
    return ["--lora_args", *[f"{key}={json.dumps(value)}" for key, value in given.items()]]

def refusal_of(given):
    """It returns the line with which the flags are refused."""
    result = run_script("train.py", *flags_of(given))
    assert result.status == 2 and len(result.errors) == 1 and is_one_line(result.errors[0], "--lora_args"), result.err
    return result.errors[0]

REFUSED = [ # arguments, words of the line
    *[(dict(init_lora_weights=word), 'or "gaussian"') for word in (
        "olora", "OLORA", "pissa", "pissa_niter_4", "eva", "loftq", "nonsense", "Gaussian", "True", None, 1, [True])],
    *[(dict(use_rslora=word), "true or false") for word in ("yes", "wrong", 1, 0, None)],
    # the remedy is a flag, or a field that a file holds
    *[(field, "--lora_rank") for field in (dict(r=4), dict(lora_alpha=3), dict(lora_dropout=0.3), dict(use_dora=True),
                                           dict(target_modules=["to_q"]), dict(modules_to_save=["img_in"]))],
    # patterns that a file may not have, or the LoRA could not be read again
    (dict(rank_pattern={"(.+)+!": 4}), "rank_pattern"), (dict(alpha_pattern={"(to_q": 4}), "alpha_pattern"),
    (dict(alpha_pattern={"to_q": 1e300}), "alpha_pattern"), (dict(rank_pattern=["to_q"]), "rank_pattern"),
    (dict(alpha_pattern={"to_q": "8"}), "alpha_pattern"),
    *[(dict(alpha_pattern=given), "learns nothing") for given in ({"to_q": 0}, {}, None)]]

@pytest.mark.parametrize("given, words", REFUSED, ids=str)
def test_what_a_file_cannot_hold_is_refused_before_a_model_is_looked_for(monkeypatch, given, words):
    monkeypatch.setattr(cache, "find_model", lambda *_, **__: pytest.fail("model looked for"))
    assert words in refusal_of(given)

def test_no_other_field_of_peft_comes_through(capsys):
    """A new version's fields, too, and what is no field."""
    names = [field.name for field in fields(LoraConfig)]
    assert {*PATTERNS, *peft_config.VALUES} < {*names} and len(names) > 30
    for name in {*names, "no_such"} - {*PATTERNS}:
        with pytest.raises(SystemExit) as e:
            peft_config.refuse_lora_args({name: "x"})
        assert e.value.code == 2 and is_one_line(capsys.readouterr().err.strip(), f"--lora_args {name}=x", "give ")

TRAINED = [dict(init_lora_weights=word) for word in (True, False, "gaussian", "orthogonal")] + [
    dict(use_rslora=False), dict(rank_pattern={"to_q": 4}, alpha_pattern={r"1\.attn\.to_v": 7}, use_rslora=True)]

@pytest.mark.parametrize("given", TRAINED, ids=str)
def test_the_file_on_the_published_base_is_what_was_trained(small, tmp_path, given):
    """Every weight of the base is as it was, and a model that loads the file predicts what the trained one does."""
    result = works("train.py", *small.flags, "--max_steps", 2, "--out_dir", tmp_path / "a", *flags_of(given))
    ns = result.globals
    fresh = predict.load_transformer(TINY, "float32")
    weights = {name.replace(".base_layer", ""): p for name, p in ns["transformer"].named_parameters()}
    assert all(torch.equal(p, weights[name]) for name, p in fresh.named_parameters())
    item = ns["load_item"](ns["pick"](0))
    bare, = ns["predict_velocity"](fresh, [item])
    predict.load_loras(fresh, [predict.read_lora(tmp_path / "a")])
    with torch.no_grad():
        ns["transformer"].eval()
        trained, loaded = [ns["predict_velocity"](model, [item])[0] for model in (ns["transformer"], fresh)]
    assert rel(loaded, trained) < 1e-5 and not torch.equal(loaded, bare)

@pytest.mark.parametrize("given, words", [
    (dict(rank_pattern={"to_q": 4, "to_qq": 8}), "to_qq"), (dict(alpha_pattern={"net.2": 3}), "net.2"),
    (dict(rank_pattern={"to_q": 8.5}), "peft refuses")], ids=str)
def test_a_pattern_that_fits_no_layer_or_is_no_rank_is_refused(small, tmp_path, given, words):
    result = run_script("train.py", *small.flags, "--out_dir", tmp_path / "a", *flags_of(given))
    assert result.status == 1 and is_one_line(result.errors[0], "--lora_args", words), result.err

def test_with_good_arguments_a_plan_is_made(small, tmp_path):
    """It has a base without numbers."""
    works("train.py", *small.flags, "--max_steps", 1, "--out_dir", tmp_path / "a", "--plan",
          *flags_of(dict(use_rslora=True, rank_pattern={"to_q": 4})))

def test_layers_of_single_blocks_are_named_as_targets(small, tmp_path):
    """What layers_to_transform is for, in every version of peft."""
    name = "transformer_blocks.1.attn.to_q"
    works("train.py", *small.flags, "--max_steps", 1, "--lora_targets", name, "--out_dir", tmp_path)
    assert lora_of(tmp_path).keys() == {f"transformer.{name}.lora_{half}.weight" for half in "AB"}

def test_full_layers_are_trained_and_resumed_as_full_ranks(small, tmp_path):
    """norm_out.linear and proj_out at the smaller of their sides: their LoRA can become any change of the weight."""
    config = json.loads((TINY / "transformer/config.json").read_bytes())
    inner = config["num_attention_heads"] * config["attention_head_dim"]
    ranks = {"norm_out.linear": inner, "proj_out": min(inner, 4 * config["out_channels"])}
    flags = [*small.flags, "--lora_targets", "attention", *ranks, *flags_of(dict(rank_pattern=ranks))]
    for name, steps, more in (("a", 2, []), ("b", 1, []), ("b", 2, ["--resume"])):
        works("train.py", *flags, "--max_steps", steps, *more, "--out_dir", tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    state = lora_of(tmp_path / "a")
    for layer, rank in ranks.items():
        a, b = [state[f"transformer.{layer}.lora_{half}.weight"] for half in "AB"]
        assert len(a) == rank and torch.linalg.matrix_rank(a) == min(a.shape[1], len(b)) and b.any()
