"""
A model's folder from a stranger is data: its defaults.json sets numbers and choices alone, and says so; its other JSON
files may say anything, and cost a line.

$ python -m pytest -q tests/test_foreign_models.py --fuzz 2000     # so many damages to each file
"""
import contextlib
import copy
import json
import math
import os
import random
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import OPTIONS
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLForConditionalGeneration

import cache
import common
from library.cli import defaults
from library.data import dataset, stat_cache
from library.models import model_files, published
import predict
from tests.harness import (HERE, TINY, add_item, copy_model, is_one_line, paint_picture, refused, run_script,
                           samples_of, save, within)

# ---- defaults.json ---------------------------------------------------------------------------------------------------

RUN = {"train.py": ["--data", "nowhere"], "cache.py": ["--data", "nowhere"],
       "predict.py": ["--image", "nowhere.png", "--prompt", "x"]}

def start(folder, text, script="train.py", *flags):
    """It starts a script with a model whose defaults.json holds this text or object."""
    folder.mkdir(exist_ok=True)
    (folder / "defaults.json").write_text(text if isinstance(text, str) else json.dumps({script: text}), "utf-8")
    return run_script(script, "--model", folder, *RUN[script], *flags)

def assert_refused(result, folder, *named):
    """It ends with one line that names the file."""
    assert result.status == 1 and len(result.err.splitlines()) == 1, result.err + result.out
    assert is_one_line(result.errors[0], str(folder / "defaults.json"), *named), result.err
    assert len(result.errors[0]) < 600 and not result.out

@pytest.mark.parametrize("script, name, value", [
    ("train.py", "data", ["{folder}/data"]), ("train.py", "val_data", ["/etc"]), ("train.py", "out_dir", "/tmp/x"),
    ("train.py", "lora", "a/b"), ("train.py", "transformer", "a/b"), ("train.py", "pretrained_lora", "a/b"),
    ("train.py", "tracker", "wandb"), ("train.py", "cache_dir", "/tmp"), ("train.py", "device", "cpu"),
    ("train.py", "sample_lora", ["a/b"]), ("train.py", "model", "a/b"), ("train.py", "lora_args", [["a", 1]]),
    ("train.py", "negative_prompt", "x"), ("train.py", "resume", True), ("train.py", "seed", 3),
    ("train.py", "help", True), ("train.py", "no_such", 3), ("train.py", "a\nb\x1b[2J", 3), ("train.py", "", 3),
    ("train.py", "--lr", 3), ("train.py", "keep", 1), ("predict.py", "out", "/tmp/x.png"),
    ("predict.py", "lora", ["a/b"]),
    ("predict.py", "jobs", "/etc/passwd"), ("predict.py", "image", ["/etc/passwd"]), ("predict.py", "prompt", "x"),
    ("predict.py", "out_dir", "/tmp"), ("cache.py", "data", ["/etc"]), ("cache.py", "cache_dir", "/tmp"),
    ("cache.py", "preserve_prompts", ["x"]), ("cache.py", "skip_bad", True)])
def test_a_models_folder_sets_nothing_but_numbers_and_choices(tmp_path, script, name, value):
    """Each other entry is one line that names it, also where another script would read it."""
    for reader in RUN:
        result = start(tmp_path / "m", json.dumps({script: {name: value}}), reader)
        assert_refused(result, tmp_path / "m", f"sets {common.printable(name)} of {script}", "delete the entry")

@pytest.mark.parametrize("flags", [["--plan"], ["--resume"], ["--lr", "1"]])
def test_no_flag_leads_around_the_list(tmp_path, flags):
    """The file is read before all that a flag switches on."""
    assert_refused(start(tmp_path / "m", dict(out_dir="/tmp/x"), "train.py", *flags), tmp_path / "m", "sets out_dir")

@pytest.mark.parametrize("tool", ["lean_train"])
def test_a_tool_that_reads_the_file_obeys_the_list(tmp_path, tool):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/defaults.json").write_text('{"train.py": {"optimizer": "mine.Opt"}}', "utf-8")
    result = run_script(f"tools/{tool}.py", "--model", tmp_path / "m", "--data", "nowhere")
    assert_refused(result, tmp_path / "m", "optimizer of train.py", "mine.Opt")

@pytest.mark.parametrize("entry", [
    '"max_steps": -5', '"max_steps": 0', '"max_steps": 0.5', '"max_steps": 1e3', '"max_steps": true',
    '"max_steps": null', '"max_steps": {}', '"max_steps": [5, 6]', '"max_steps": []', '"max_steps": "five"',
    '"max_steps": [[5]]', f'"max_steps": {10**40}', f'"max_steps": 1{"0" * 4000}', f'"max_steps": 1{"0" * 5000}',
    '"lr": NaN', '"lr": Infinity', '"lr": 1e999', '"lr": -1', '"lr": "1e-4; x"', '"lr": "\\ud800"',
    '"lr": 1, "lr": 2', '"lr_scheduler": "other"', '"lr_scheduler": ["cosine", "linear"]',
    '"lr_scheduler": "\\u001b[2J\\u202e"', '"upscale": 0', '"upscale": "true"', '"upscale": [true]',
    '"target_pixels": "512"', '"target_pixels": ["native", "9x9"]', '"target_pixels": "100000x100000"',
    '"control_pixels": ["native"], "control_pixels": "native"', '"control_pixels": [1048576, 1048576]',
    '"batch_size": 1000000000', '"lora_targets": ["to_q", "--out_dir=x"]', '"lora_targets": ["(.+)+!"]',
    '"lora_targets": [".*"]', '"lora_targets": [3.5, "a b"]', '"optimizer": "{folder}.evil.Opt"',
    '"optimizer": "evil"', '"optimizer": "torch.optim"', '"optimizer": "torch.optim.adamw.os.system"',
    '"optimizer": "torch.optim.AdamW.__init__"', '"optimizer": "torch.optim.lr_scheduler.LambdaLR"',
    '"optimizer": "torch.optim.AdamW\\n"', '"optimizer": ["torch.optim.SGD", "torch.optim.SGD"]',
    '"optimizer": "bitsandbytes.optim.AdamW8bit"', '"optimizer": "os.system"', '"optimizer": 3',
    '"optimizer_args": "lr=3"', '"optimizer_args": {"lr": 3}', '"optimizer_args": [["a"]]',
    '"optimizer_args": [["a", "b", "c"]]', '"optimizer_args": [["a-b", 1]]', '"optimizer_args": [[{}, 1]]',
    '"optimizer_args": [["a", NaN]]', '"optimizer_args": [["a", [[1]]]]', '"optimizer_args": [["a", {"b": 1}]]',
    '"optimizer_args": [["a", "x y"]]', '"optimizer_args": [["a", [1,2,3,4,5,6,7,8,9]]]', '"shift": 0',
    '"num_inference_steps": 1001', '"true_cfg_scale": 1e300', '"val_pictures": -1', '"warmup_steps": 1.5'])
def test_a_value_that_its_flag_would_refuse_is_one_line(tmp_path, entry):
    """Of the wrong type, out of range, several for one, twice, nested, huge; an optimizer that is not torch.optim's."""
    with within(5):
        result = start(tmp_path / "m", '{"train.py": {' + entry + "}}")
    assert_refused(result, tmp_path / "m", "mend")

@pytest.mark.parametrize("text", [
    "", "[]", "3", "null", '{"train.py": []}', '{"train.py": null}', '{"evil.py": {}}',
    '{"train.py": {}, "train.py": {}}', "{", "\0", "[" * 60_000, '{"train.py": ' * 5000, f'{{"{"x" * 60_000}": {{}}}}',
    " " * 70_000])
def test_a_file_of_another_form_is_one_line(tmp_path, text):
    """Empty, no object, twice, deep, long."""
    with within(5):
        result = start(tmp_path / "m", text)
    assert result.status == 1 and len(result.err) < 700 and is_one_line(result.errors[0], "defaults.json"), result.err

def test_a_file_that_is_none_or_not_in_the_folder_is_one_line(tmp_path):
    """A pipe, which would hang; a folder; a device; a link that leads out, or nowhere; a gigabyte; Latin-1."""
    (tmp_path / "secret").write_text('{"train.py": {"lr": "a key"}}', "utf-8")
    file = tmp_path / "m/defaults.json"
    (tmp_path / "m").mkdir()
    makers = [lambda: os.mkfifo(file), file.mkdir, lambda: file.symlink_to("/dev/zero"),
              lambda: file.symlink_to("../secret"), lambda: file.symlink_to("gone"),
              lambda: file.write_bytes(b'{"train.py": {"\xe9": 1}}')]
    for n, make in enumerate(makers):
        make()
        with within(5):
            result = run_script("train.py", "--model", tmp_path / "m", "--data", "nowhere")
        assert result.status == 1 and is_one_line(result.errors[0], "defaults.json"), (n, result.err)
        assert "a key" not in result.err and len(result.err.splitlines()) == 1
        file.rmdir() if file.is_dir() else file.unlink()
    with open(file, "wb") as f:
        f.truncate(2**30)
    assert_refused(run_script("train.py", "--model", tmp_path / "m", "--data", "nowhere"), tmp_path / "m", "65,536")

def test_a_line_says_which_flags_the_folder_sets(tmp_path):
    """Those that count: not what the command line gives, or makes meaningless."""
    entries = dict(max_steps=500, lr=0.005, upscale=False, target_pixels=["native", "512x512"], lora_targets=["to_q"],
                   optimizer="torch.optim.SGD", optimizer_args=[["momentum", 0.9], ["nesterov", True]])
    line = str(tmp_path / "m/defaults.json") + " sets "
    result = start(tmp_path / "m", entries)
    assert result.out.splitlines() == [
        line + "--max_steps 500 --lr 0.005 --no-upscale --target_pixels native 262144 --lora_targets to_q --optimizer "
        "torch.optim.SGD --optimizer_args momentum=0.9 nesterov=True"], result.out + result.err
    result = start(tmp_path / "m", entries, "train.py", *shlex.split("--lr=1 --upscale --max_steps 3 --target_pixels "
                                                                     "native --optimizer torch.optim.Adam"))
    assert result.out.splitlines() == [line + "--lora_targets to_q"], result.out
    result = start(tmp_path / "m", dict(lr=1), "train.py", "--lr", 2)
    assert result.out == "" and result.errors == ["error: nowhere: does not exist; check the name"]

def test_what_the_folder_sets_is_what_the_flag_would_give(tmp_path, monkeypatch):
    """Types, too."""
    found = []
    monkeypatch.setattr(dataset, "check_datasets", lambda args: found.append(args) or exit())
    start(tmp_path / "m", dict(max_steps="500", lr=1, upscale=False, target_pixels="512x512", gradient_checkpointing=0,
                               optimizer_args=[["betas", [0.5, 0.9]], ["adjust_lr_fn", "original"]]))
    run_script("train.py", "--model", tmp_path, *RUN["train.py"], *shlex.split(
        "--max_steps 500 --lr 1 --no-upscale --target_pixels 512x512 --gradient_checkpointing 0 --optimizer_args "
        "betas=[0.5,0.9] adjust_lr_fn=original"))
    first, second = [{k: v for k, v in vars(args).items() if k != "model"} for args in found]
    assert first == second and repr(first) == repr(second)

def test_our_own_tiny_has_its_data_and_a_copy_has_none(tmp_path, monkeypatch):
    """However it is called; a copy keeps the numbers."""
    found = []
    monkeypatch.setattr(dataset, "check_datasets", lambda args: found.append(args) or exit())
    (tmp_path / "link").symlink_to(TINY)
    for model in ("tiny", TINY, tmp_path / "link", f"{TINY}/../tiny/"):
        run_script("train.py", "--model", model)
        args = found.pop()
        assert [os.path.realpath(path) for path in args.data] == [str(TINY / "data")], model
        assert [os.path.realpath(path) for path in args.val_data] == [str(TINY / "val"), str(TINY / "known")]
    result = run_script("train.py", "--model", "tiny", "--data", "nowhere")
    assert found.pop().val_data == [] and "sets" not in result.out # -h says what it sets
    copy = copy_model(tmp_path / "copy")
    assert is_one_line(run_script("train.py", "--model", copy).errors[0], "--data: missing")
    result = run_script("train.py", "--model", copy, "--data", "nowhere")
    assert found.pop().max_steps == 500 and f"{copy}/defaults.json sets --target_pixels native " in result.out

def test_all_that_may_be_set_is_a_flag_of_some_script():
    """The list has no name that nothing reads."""
    helps = "".join(run_script(script, "-h").out for script in RUN)
    for name in [*defaults.SETTABLE, *defaults.TEXTS]:
        assert f"  --{name} " in helps or f"  --{name}," in helps, name

def test_every_script_with_a_model_reads_the_file_through_the_list():
    """library/cli/defaults.py alone reads it; tools/convert_lora.py writes what that has read."""
    readers = [path.name for pattern in ("*.py", "library/**/*.py", "training/*.py", "tools/*.py") for path in HERE.glob(pattern)
               if "defaults.json" in path.read_text("utf-8").replace("tiny/defaults.json", "")]
    assert readers == ["defaults.py", "convert_lora.py"]
    assert "defaults.read_sections(" in (HERE / "tools/convert_lora.py").read_text("utf-8")

# ---- all other JSON files of a model ---------------------------------------------------------------------------------

JUNK = [None, True, False, -1, 0, 1, 3, 2.5, 10**9, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", "x",
        "\x1b[2J\u202e\n", "../../../etc/passwd", "{folder}", "a" * 5000, [], {}, [1, [2, [3]]], {"a": {"b": [None]}},
        [10**9] * 50, ["x"], "torch.nn.Linear", "os.system", ["os", "system"], {"__class__": "x"}]
JSON_FILES = sorted(path.relative_to(TINY).as_posix() for path in [*TINY.glob("*.json"), *TINY.glob("*/*.json")])

def junk(rng):
    return copy.deepcopy(rng.choice(JUNK))

def places_of(value, path=()):
    """Yields the path of each value in a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places_of(one, (*path, key))

def damaged(text, rng):
    """A text of JSON with one to three damages: another value, one more, one less, one renamed; or a text cut short."""
    value = json.loads(text)
    if rng.random() < 0.1:
        return text[:rng.randrange(len(text))]
    for _ in range(rng.choice([1, 1, 2, 3])):
        path = rng.choice(list(places_of(value))[:400])
        if not path:
            if rng.random() < 0.1:
                return json.dumps(junk(rng))
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        kind = rng.choice(["value", "value", "value", "less", "more"])
        if kind == "value":
            parent[path[-1]] = junk(rng)
        elif kind == "less":
            del parent[path[-1]]
        elif isinstance(parent, dict):
            names = ["x", "auto_map", "quantization_config", "trust_remote_code", "_class_name", "dtype"]
            parent[rng.choice(names)] = junk(rng)
        else:
            parent.append(junk(rng))
    return json.dumps(value)

def use_model(folder, part, data):
    """What the scripts do with a model before the first step, as far as this part has to do with it."""
    found = cache.find_model(str(folder), [*cache.ENCODERS, "transformer"])
    classes = dict(vae=AutoencoderKLQwenImage, text_encoder=Qwen2_5_VLForConditionalGeneration,
                   transformer=QwenImageTransformer2DModel)
    if part in classes:
        model_files.empty_model(classes[part], found / part)
        cache.load_part(classes[part], found / part, "float32")
    if part == "transformer":
        return
    pipe = cache.load_pipeline(found)
    cache.encoder_fingerprints(found, folder / "c")
    schedule = FlowMatchEulerDiscreteScheduler.from_pretrained(found / "scheduler").config
    for tokens in (1, 256, 8192):
        assert math.isfinite(predict.find_mu(tokens, schedule))
        settings = dict(shift=None, num_inference_steps=3, sigmas=None)
        predict.make_schedule(SimpleNamespace(noise=torch.zeros(tokens, 1), settings=settings), schedule)
    if part in ("processor", "tokenizer"):
        samples_of(pipe, data)

@contextlib.contextmanager
def little_memory(gib=4):
    """What takes more than this within the block fails. (Windows has no such limit.)"""
    resource = pytest.importorskip("resource")
    before, now = resource.getrlimit(resource.RLIMIT_AS), psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (now + gib * 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

@pytest.mark.parametrize("file", [name for name in JSON_FILES if name != "defaults.json"])
def test_a_damaged_json_file_of_a_model_is_one_line(tmp_path, file, capfd):
    """Whatever it says it takes no long time and little memory, and ends in a line, if it is of any harm."""
    add_item(tmp_path / "data", "a")
    folder = copy_model(tmp_path / "m")
    text = (folder / file).read_text("utf-8")
    refusals = 0
    for seed in range(OPTIONS["fuzz"] or 25):
        (folder / file).write_text(new := damaged(text, random.Random(f"{file} {seed}")), "utf-8")
        with within(10), little_memory():
            try:
                use_model(folder, Path(file).parent.name, tmp_path / "data")
            except common.InputError as e:
                refusals += 1
                assert is_one_line(str(e), str(folder)) and len(str(e)) < 1500, (seed, str(e))
            except Exception as e:
                raise AssertionError(f"{file}, seed {seed}: {new[:3000]}") from e
    assert refusals or len(text) < 300

def test_damaged_defaults_are_one_line(tmp_path, monkeypatch):
    """The same, for all three scripts."""
    text = (TINY / "defaults.json").read_text("utf-8")
    monkeypatch.setattr(dataset, "check_datasets", lambda args: exit())
    for seed in range(OPTIONS["fuzz"] or 60):
        script = list(RUN)[seed % 3]
        new = damaged(text, random.Random(seed))
        result = start(tmp_path / "m", new, script)
        assert result.status == 0 or is_one_line(result.errors[-1]), (new, result.err)
        assert len(result.err.splitlines()) < 2 and len(result.err) < 1000, (new, result.err)

@pytest.mark.parametrize("file, changes, named", [
    ("transformer/config.json", dict(num_layers=10**9), "num_layers"),
    ("transformer/config.json", dict(num_layers=-1), "num_layers"),
    ("transformer/config.json", dict(num_layers="2"), "num_layers"),
    ("transformer/config.json", dict(num_layers=[2]), "num_layers"),
    ("transformer/config.json", dict(num_layers=400), "asks for"),
    ("transformer/config.json", dict(axes_dims_rope=[10**9] * 3), "axes_dims_rope"),
    ("transformer/config.json", dict(axes_dims_rope=[8, 8]), "axes_dims_rope"),
    ("transformer/config.json", dict(axes_dims_rope=[2, 2, 2]), "attention_head_dim"),
    ("transformer/config.json", dict(_class_name=["x"]), "_class_name"),
    ("transformer/config.json", dict(other=[[["x", 1e300]]]), "other"),
    ("vae/config.json", dict(num_res_blocks=10**9), "num_res_blocks"),
    ("vae/config.json", dict(dim_mult=[10**6] * 4), "dim_mult"), ("vae/config.json", dict(z_dim=32), "z_dim"),
    ("vae/config.json", dict(base_dim=500), "asks for"),
    ("vae/config.json", dict(latents_mean=[0.5] * 15), "latents_mean"),
    ("vae/config.json", dict(latents_mean="x" * 16), "latents_mean"),
    ("vae/config.json", dict(latents_std=[1.0] * 15 + [0]), "latents_std"),
    ("vae/config.json", dict(latents_std=[1.0] * 15 + [True]), "latents_std"),
    ("text_encoder/config.json", dict(vision_config=dict(depth=10**9)), "depth"),
    ("text_encoder/config.json", dict(text_config=dict(hidden_size=2048)), "asks for"),
    ("text_encoder/config.json", dict(text_config=dict(num_hidden_layers=float("nan"))), "num_hidden_layers"),
    ("processor/preprocessor_config.json", dict(merge_size=1), "merge_size"),
    ("processor/preprocessor_config.json", dict(size=dict(shortest_edge=10**12)), "shortest_edge"),
    ("scheduler/scheduler_config.json", dict(num_train_timesteps=10**9), "num_train_timesteps"),
    ("scheduler/scheduler_config.json", dict(base_image_seq_len=8192), "base_image_seq_len"),
    ("scheduler/scheduler_config.json", dict(max_shift="0.9"), "max_shift"),
    ("scheduler/scheduler_config.json", dict(shift_terminal=1.0), "scheduler"),
    ("tokenizer/tokenizer_config.json", dict(auto_map={"AutoTokenizer": ["evil.Tokenizer", None]}), None),
    ("tokenizer/tokenizer_config.json", dict(model_max_length=10**30), None), # as transformers writes "no limit"
    ("model_index.json", dict(scheduler=["evil", "Scheduler"]), "cannot be loaded"),
    ("model_index.json", dict(tokenizer=["os", "system"]), "tokenizer"),
    ("model_index.json", dict(tokenizer=["transformers", "PreTrainedTokenizerFast"]), "tokenizer"),
    ("model_index.json", dict(tokenizer=[]), "model_index.json"),
    ("vae/config.json", dict(x=[0] * 10**6), "more than 1,048,576 bytes")])
def test_a_number_out_of_proportion_is_one_line_at_once(tmp_path, file, changes, named):
    """Before a library makes what it asks for; and no class of the folder is run."""
    folder = copy_model(tmp_path / "m")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\nclass Tokenizer: pass\nScheduler = 3",
                                    "utf-8")
    shutil.copy(folder / "evil.py", folder / "tokenizer")
    shutil.copy(folder / "evil.py", folder / "scheduler")
    content = json.loads((folder / file).read_bytes())
    (folder / file).write_text(json.dumps(content | changes), "utf-8")
    with within(10), little_memory(), refused(str(folder), named) if named else contextlib.nullcontext():
        use_model(folder, Path(file).parent.name, add_item(tmp_path / "data", "a"))
    assert not (tmp_path / "marker").exists()

@pytest.mark.parametrize("name", ["/etc/passwd", "../secret.safetensors", "a/b.safetensors", "", 3, None, ["x"]])
def test_an_index_of_shards_names_files_of_its_folder_alone(tmp_path, name):
    """Plain names; all else is one line."""
    folder = copy_model(tmp_path / "m")
    index = folder / "transformer/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps(dict(metadata={}, weight_map={"x": name})), "utf-8")
    with refused(str(index)):
        cache.find_model(str(folder), ["transformer"])

@pytest.mark.parametrize("place", [
    "vae/x", "tokenizer/merges.txt", "text_encoder/config.json", "scheduler/a/b", "x.json"])
def test_a_pipe_in_a_model_is_one_line(tmp_path, place):
    """It would keep a library waiting for ever."""
    folder = copy_model(tmp_path / "m")
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).unlink(missing_ok=True)
    os.mkfifo(folder / place)
    with within(5), refused(str(folder / place)):
        cache.find_model(str(folder), cache.ENCODERS)

def test_a_json_file_of_a_gigabyte_is_one_line(tmp_path):
    """Before it is read."""
    folder = copy_model(tmp_path / "m")
    with open(folder / "vae/more.json", "wb") as f:
        f.truncate(2**30)
    with little_memory(1), refused(str(folder / "vae/more.json"), "bytes"):
        cache.find_model(str(folder), ["vae"])

@pytest.mark.parametrize("section", [[2, 3], [2, 3, "x"], [8, 8, 8], "x", None, {}])
def test_a_text_encoder_whose_fields_do_not_fit_is_one_line(tmp_path, section):
    """A pass without numbers shows it, before one with numbers does."""
    folder = copy_model(tmp_path / "m")
    content = json.loads((folder / "text_encoder/config.json").read_bytes())
    content["text_config"]["rope_parameters"]["mrope_section"] = section
    (folder / "text_encoder/config.json").write_text(json.dumps(content), "utf-8")
    with refused(str(folder / "text_encoder")):
        use_model(folder, "text_encoder", None)

def test_the_published_configs_pass():
    """And a folder of ours does."""
    for name, content in published.CONFIGS.items():
        model_files.check_config(*name.split("/"), content)
    use_model(TINY, "transformer", None)

def test_lists_of_a_strangers_cache_are_read_as_lists(tmp_path):
    """Of right digests and wrong types: the files are looked at again."""
    path = str(save(paint_picture(), tmp_path / "a.png"))
    stamp, size = stat_cache.stat_of(path), [64, 64]
    good = dict(pictures=[size, "x"], masks=[size, "x", True], models="x")
    for kind, answer in good.items():
        memory = tmp_path / f"{kind}.txt"
        stat_cache.write_memory(memory, {path: [stamp, answer]})
        assert stat_cache.remember_by_stat([path], lambda path: "looked", memory)(path) == answer
        others = [a for a in good.values() if a != answer] + [None, {}, [], 3, [size], [[64], "x"], [["64", 64], "x"],
                                                             [[-1, 64], "x"], [[10**9, 10**9], "x"], [[64.5, 64], "x"]]
        for wrong in [[], None, 3, "x", {path: 3}, {path: []}, {path: [stamp]}, {path: [stamp, answer, 1]},
                      {"other": None}, *({path: [stamp, other]} for other in others)]:
            text = json.dumps(wrong)
            memory.write_text(f"{stat_cache.digest_of(text)}\n{text}", "utf-8")
            assert stat_cache.remember_by_stat([path], lambda path: "looked", memory)(path) == "looked", wrong
        text = "[" * 100_000
        memory.write_text(f"{stat_cache.digest_of(text)}\n{text}", "utf-8")
        assert stat_cache.remember_by_stat([path], lambda path: "looked", memory)(path) == "looked"
        memory.unlink()
        os.mkfifo(memory)
        with within(5):
            assert stat_cache.read_memory(memory) == {}
