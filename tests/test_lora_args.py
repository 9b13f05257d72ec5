"""
--lora_args, i.e. whatever peft.LoraConfig takes: the LoRA's file on the published base is the model that was trained,
or one line says why it would not be, before a model is loaded.

$ python -m pytest -q tests/test_lora_args.py    # half a minute
"""
import copy
import json

import pytest
import torch
from peft.tuners.lora import LoraConfig

import cache
import predict
from extras import lora_args
from tests.harness import TINY, is_one_line, rel, run_script

def flags_of(given):
    return ["--lora_args", *[f"{key}={json.dumps(value)}" for key, value in given.items()]]

REFUSED = [ # arguments, words of the line
    *[(dict(init_lora_weights=word), "changes 8 of the base model's 77 weights") for word in (
        "olora", "Olora", "OLORA", "pissa", "pissa_niter_4")],
    *[(dict(init_lora_weights=word), "no effect") for word in ("eva", "lora_ga", "")],
    (dict(init_lora_weights="eva", eva_config={}), "no effect"),
    (dict(init_lora_weights="mica"), "no plain LoRA"), (dict(alora_invocation_tokens=[1, 2]), "no plain LoRA"),
    (dict(monteclora_config={}), "no plain LoRA"), (dict(velora_config={}), "no plain LoRA"),
    (dict(kasa_config={}), "no plain LoRA"),
    (dict(bias="all"), "img_in.bias"), (dict(bias="lora_only"), "bias"), (dict(modules_to_save=["img_in"]), "img_in"),
    (dict(lora_bias=True, init_lora_weights=True), "lora_B.bias"),
    *[({key: value}, "no effect") for key, value in dict(
        fan_in_fan_out=True, inference_mode=True, task_type="CAUSAL_LM", peft_type="IA3", use_qalora=True,
        eva_config={}, megatron_config={}, megatron_core="x", ensure_weight_tying=True, qalora_group_size=8,
        revision="x", base_model_name_or_path="x", auto_mapping={}, lora_ga_config={}).items()]]

@pytest.mark.parametrize("given, words", REFUSED, ids=str)
def test_what_a_file_cannot_hold_or_has_no_effect_is_refused_before_a_model_is_looked_for(monkeypatch, given, words):
    monkeypatch.setattr(cache, "find_model", lambda *_, **__: pytest.fail("model looked for"))
    result = run_script("train.py", *flags_of(given))
    assert result.status == 1 and is_one_line(result.errors[0], "--lora_args", words), result.err

PEFT_REFUSES = [dict(init_lora_weights=word) for word in ("PISSA", "corda", "loftq", "nonsense", "True", 1)] + [
    dict(layer_replication=[[0, 1]]), dict(runtime_config={}), dict(trainable_token_indices=[1]),
    dict(arrow_config={}), dict(use_bdlora={}), dict(target_parameters=["attn.to_q.weight"]),
    dict(layers_pattern="transformer_blocks")]

@pytest.mark.parametrize("given", PEFT_REFUSES, ids=str)
def test_what_peft_refuses_is_one_line(small, tmp_path, given):
    result = run_script("train.py", *small.flags, "--out_dir", tmp_path / "a", *flags_of(given))
    assert result.status == 1 and is_one_line(result.errors[0], "--lora_args"), result.err
    assert not (tmp_path / "a/log.jsonl").exists()

INITS = True, False, None, "gaussian", "Gaussian", "orthogonal", "Mica"
TRAINED = [dict(init_lora_weights=word) for word in INITS] + [
    dict(use_rslora=True), dict(use_rslora=False, bias="none"), dict(lora_dropout=0.3),
    dict(rank_pattern={"to_q": 4}, init_lora_weights=False), dict(alpha_pattern={r"1\.attn\.to_v": 7}),
    dict(rank_pattern={"to_q": 4}, alpha_pattern={"to_v": 7}, use_rslora=True, init_lora_weights=False),
    dict(layers_to_transform=[1], layers_pattern="transformer_blocks"), dict(exclude_modules=["to_v"]),
    dict(peft_type="LORA")]

@pytest.mark.parametrize("given", TRAINED, ids=str)
def test_the_file_on_the_published_base_is_what_was_trained(small, tmp_path, given):
    """Every weight of the base is as it was, and a model that loads the file predicts what the trained one does."""
    result = run_script("train.py", *small.flags, "--max_steps", 2, "--out_dir", tmp_path / "a", *flags_of(given))
    assert result.status == 0, result.err
    ns = result.globals
    fresh = predict.load_transformer(TINY, "float32")
    weights = {name.replace(".base_layer", ""): p for name, p in ns["transformer"].named_parameters()}
    assert all(torch.equal(p, weights[name]) for name, p in fresh.named_parameters())
    item = ns["load_item"](ns["pick"](0))
    bare, = ns["predict_velocity"](fresh, [item])
    predict.load_loras(fresh, [tmp_path / "a"])
    with torch.no_grad():
        ns["transformer"].eval()
        trained, loaded = [ns["predict_velocity"](model, [item])[0] for model in (ns["transformer"], fresh)]
    assert rel(loaded, trained) < 1e-5 and not torch.equal(loaded, bare)

@pytest.mark.parametrize("given", [
    dict(rank_pattern={"(.+)+!": 4}), dict(alpha_pattern={"(to_q": 4}), dict(alpha_pattern={"to_q": 1e300}),
    dict(rank_pattern=["to_q"]), dict(alpha_pattern={"to_q": "8"})], ids=str)
def test_a_pattern_that_a_file_may_not_have_is_refused_before_it_is_trained(given):
    """Or the LoRA could not be read again."""
    result = run_script("train.py", *flags_of(given))
    assert result.status == 1 and is_one_line(result.errors[0], "--lora_args", next(iter(given))), result.err

@pytest.mark.parametrize("given", [
    dict(rank_pattern={"to_q": 4, "to_qq": 8}), dict(alpha_pattern={"net.2": 3}),
    dict(layers_to_transform=[0, 60], layers_pattern="transformer_blocks")], ids=str)
def test_a_pattern_that_fits_no_layer_is_refused(small, tmp_path, given):
    result = run_script("train.py", *small.flags, "--out_dir", tmp_path / "a", *flags_of(given))
    field = next(iter(given))
    last = str([*given[field]][-1])
    assert result.status == 1 and is_one_line(result.errors[0], f"--lora_args {field}", last), result.err

@pytest.mark.parametrize("plan", [[], ["--plan"]])
def test_with_good_arguments_a_plan_is_made(small, tmp_path, plan):
    """--plan has a base without numbers."""
    result = run_script("train.py", *small.flags, "--max_steps", 1, "--out_dir", tmp_path / "a", *plan,
                        *flags_of(dict(use_rslora=True, rank_pattern={"to_q": 4})))
    assert result.status == 0, result.err

@pytest.mark.parametrize("word, count", [("Olora", 32), ("pissa_niter_2", 32)]) # tiny has so many layers with a LoRA
def test_a_change_of_the_real_base_is_counted_too(small, tmp_path, monkeypatch, word, count):
    """Even if the small trial has not seen it."""
    monkeypatch.setattr(lora_args, "try_out", lambda *_: None)
    flags = [flag for flag in small.flags if flag not in ("--lora_targets", "to_q", "to_v")]
    result = run_script("train.py", *flags, "--out_dir", tmp_path / "a", "--lora_args", f"init_lora_weights={word}")
    assert result.status == 1 and is_one_line(result.errors[0], "--lora_args", f"changes {count} of"), result.err
    assert not (tmp_path / "a/log.jsonl").exists()

def test_one_weight_of_the_base_that_changes_by_a_bit_is_noticed(monkeypatch):
    """The check has teeth: any weight, the least change."""
    model, weights = lora_args.added({}, predict.add_lora)
    lora_args.refuse(model, weights, {})
    for name in list(weights)[::9]:
        changed = {k: v.clone() for k, v in weights.items()}
        bits = changed[name].view(torch.int32).flatten()
        bits[-1] ^= 1
        with pytest.raises(SystemExit, match=f"changes 1 of .* instance {name}"):
            lora_args.refuse(model, changed, {})
    # so are one more trained weight, and one that is not trained
    for requires_grad, name in ((True, "img_in.bias"), (False, "lora_A.default.weight")):
        other = copy.deepcopy(model)
        next(p for n, p in other.named_parameters() if n.endswith(name)).requires_grad_(requires_grad)
        with pytest.raises(SystemExit, match="for 1 tensors"):
            lora_args.refuse(other, weights, {})

@pytest.mark.parametrize("given", [dict(r=4), dict(lora_alpha=3)], ids=str)
def test_what_has_a_flag_of_its_own_is_refused(given):
    result = run_script("train.py", *flags_of(given))
    assert result.status == 2 and is_one_line(result.errors[0], "--lora_args", "--lora_rank"), result.err

def test_every_field_of_peft_is_tried_here():
    """A new version's new fields belong into one of the lists above."""
    tried = {key for given in [given for given, _ in REFUSED] + PEFT_REFUSES + TRAINED for key in given}
    others = {"target_modules", "r", "lora_alpha", "use_dora", "corda_config", "loftq_config", "peft_version"}
    assert not {field for field in LoraConfig.__dataclass_fields__} - tried - others
