"""
A model's folder from a stranger is data: it sets no flag, and its JSON files may say anything, and cost a line.

$ python -m pytest -q tests/test_foreign_models.py --fuzz 2000     # so many damages to each file
"""
import contextlib
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLForConditionalGeneration

import cache
import common
from library.cli import command_line
from library.data import dataset, stat_cache
from library.models import model_files
import predict
from tests.fuzz import fuzz
from tests.harness import TINY, add_item, copy_model, paint_picture, refused, run_script, samples_of, save, within

# ---- defaults.json ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("script, flags", [("train.py", ["--data", "nowhere"]), ("cache.py", ["--data", "nowhere"]),
                                           ("predict.py", ["--image", "nowhere.png", "--prompt", "x"])])
def test_a_models_folder_sets_no_flag(tmp_path, monkeypatch, script, flags):
    """Only tiny has defaults, in our code; the file of this name, which earlier versions read, means nothing."""
    found = []
    monkeypatch.setattr(command_line.environment, "refuse_devices", found.append)
    text = json.dumps({script: dict(dtype="float16", seed=3, cache_dir="elsewhere", upscale=False)})
    (tmp_path / "defaults.json").write_text(text, "utf-8")
    for model in (tmp_path, tmp_path / "gone"):
        assert run_script(script, "--model", model, *flags).status == 1
    first, second = [{k: v for k, v in vars(args).items() if k != "model"} for args in found]
    assert first == second

def test_tiny_and_a_model_of_its_size_have_its_defaults(tmp_path, monkeypatch):
    """However it is called. What the command line says comes first; without the demo's --data its --val_data goes, too,
    and without its optimizer that one's arguments."""
    found = []
    monkeypatch.setattr(dataset, "check_datasets", lambda args: found.append(args) or exit())
    (tmp_path / "link").symlink_to(TINY)
    for model in ("tiny", TINY, tmp_path / "link", copy_model(tmp_path / "copy")):
        run_script("train.py", "--model", model)
        args = found.pop()
        assert args.data == [str(TINY / "data")] and args.val_data == [str(TINY / "val"), str(TINY / "known")]
        assert (args.max_steps, args.lr, args.shift, args.target_pixels) == (500, 0.005, 5, ["native"])
        assert args.optimizer_args == [("adjust_lr_fn", "match_rms_adamw"), ("ns_steps", 3)]
    run_script("train.py", "--data", "nowhere", "--lr=1", "--optimizer", "torch.optim.AdamW")
    args = found.pop()
    assert (args.data, args.val_data, args.lr, args.optimizer_args) == (["nowhere"], [], 1, []) and args.shift == 5
    run_script("train.py", "--model", tmp_path, "--data", "nowhere")
    assert found.pop().max_steps == 2000

# ---- the JSON files of a model ---------------------------------------------------------------------------------

JSON_FILES = sorted(path.relative_to(TINY).as_posix() for path in [*TINY.glob("*.json"), *TINY.glob("*/*.json")])

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
        settings = SimpleNamespace(shift=None, num_inference_steps=3, sigmas=None)
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

@pytest.mark.parametrize("file", JSON_FILES)
def test_a_damaged_json_file_of_a_model_is_one_line(tmp_path, file):
    """Whatever it says it takes no long time and little memory, and ends in a line, if it is of any harm. What is cut
    short is, too. Undamaged they pass, as the published configs do."""
    add_item(tmp_path / "data", "a")
    folder = copy_model(tmp_path / "m")
    text = (folder / file).read_text("utf-8")
    def case(value):
        (folder / file).write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")
        try:
            use_model(folder, Path(file).parent.name, tmp_path / "data")
        except common.InputError as e:
            assert str(folder) in str(e)
            raise
    with little_memory():
        case(json.loads(text))
        fuzz(file, json.loads(text), case, seconds=10, share=0.25, refuses=False)
        with refused(folder):
            case(text[:len(text) // 2])
    for name, content in model_files.CONFIGS.items():
        model_files.check_config(*name.split("/"), content)

@pytest.mark.parametrize("file, changes, named", [
    ("transformer/config.json", dict(num_layers=10**9), "num_layers"),
    ("transformer/config.json", dict(num_layers=400), "asks for"),
    ("transformer/config.json", dict(axes_dims_rope=[10**9] * 3), "axes_dims_rope"),
    ("transformer/config.json", dict(other=[[["x", 1e300]]]), "other"),
    ("transformer/config.json", dict(zero_cond_t="false"), "zero_cond_t is the text"), # which is true
    ("vae/config.json", dict(dim_mult=[10**6] * 4), "dim_mult"), ("vae/config.json", dict(z_dim=32), "z_dim"),
    ("vae/config.json", dict(base_dim=500), "asks for"),
    ("vae/config.json", dict(latents_std=[1.0] * 15 + [0]), "latents_std"),
    ("text_encoder/config.json", dict(text_config=dict(hidden_size=2048)), "asks for"),
    ("processor/preprocessor_config.json", dict(merge_size=1), "merge_size"),
    ("scheduler/scheduler_config.json", dict(num_train_timesteps=10**9), "num_train_timesteps"),
    ("scheduler/scheduler_config.json", dict(max_shift="0.9"), "real number"),
    ("scheduler/scheduler_config.json", dict(shift_terminal=1.0), "scheduler"),
    ("tokenizer/tokenizer_config.json", dict(auto_map={"AutoTokenizer": ["evil.Tokenizer", None]}), None),
    ("tokenizer/tokenizer_config.json", dict(model_max_length=10**30), None), # as transformers writes "no limit"
    ("model_index.json", dict(scheduler=["evil", "Scheduler"]), "cannot be loaded"),
    ("model_index.json", dict(tokenizer=["os", "system"]), "tokenizer"),
    ("model_index.json", dict(tokenizer=[]), "model_index.json")])
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

def test_an_index_of_shards_names_files_of_its_folder_alone(tmp_path):
    """Plain names; all else is one line."""
    folder = copy_model(tmp_path / "m")
    index = folder / "transformer/diffusion_pytorch_model.safetensors.index.json"
    for name in ("/etc/passwd", "../secret.safetensors", "a/b.safetensors", "", 3, None, ["x"]):
        index.write_text(json.dumps(dict(metadata={}, weight_map={"x": name})), "utf-8")
        with refused(str(index)):
            cache.find_model(str(folder), ["transformer"])

@pytest.mark.parametrize("place", ["vae/x", "text_encoder/config.json", "scheduler/a/b", "x.json"])
def test_a_pipe_or_a_gigabyte_of_json_in_a_model_is_one_line(tmp_path, place):
    """Which would keep a library waiting for ever; before it is read."""
    folder = copy_model(tmp_path / "m")
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).unlink(missing_ok=True)
    os.mkfifo(folder / place)
    with within(5), refused(str(folder / place)):
        cache.find_model(str(folder), cache.ENCODERS)
    (folder / place).unlink()
    (folder / "vae/more.json").touch()
    os.truncate(folder / "vae/more.json", 2**30)
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

def test_lists_of_a_strangers_cache_are_read_as_lists(tmp_path):
    """Of right digests and wrong types: the files are looked at again. (An answer stands beside the number and times of
    a file on this disk, which no stranger knows.)"""
    path = str(save(paint_picture(), tmp_path / "a.png"))
    stamp, size = stat_cache.stat_of(path), [64, 64]
    good = dict(pictures=[size, "x"], masks=[size, "x", True], models="x")
    for kind, answer in good.items():
        memory = tmp_path / f"{kind}.txt"
        stat_cache.write_memory(memory, {path: [stamp, answer]})
        assert stat_cache.remember_by_stat([path], lambda path: "looked", memory)(path) == answer
        wrong = [[], None, 3, "x", {path: 3}, {path: []}, {path: [stamp]}, {path: [stamp, answer, 1]}, {"other": None}]
        for text in [*map(json.dumps, wrong), "[" * 100_000]:
            memory.write_text(f"{stat_cache.digest_of(text)}\n{text}", "utf-8")
            assert stat_cache.remember_by_stat([path], lambda path: "looked", memory)(path) == "looked", text[:99]
        memory.unlink()
        os.mkfifo(memory)
        with within(5):
            assert stat_cache.read_memory(memory) == {}
