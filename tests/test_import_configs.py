"""
tools/import_configs.py: the datasets of other trainers' configurations, and their settings, which become a line of
train.py; what it has not stands in a line, too. The keys are those that the programs document.
"""
import argparse
import json
import re

import numpy as np
import pytest

from common import CONTROLS
from library.cli import command_line
from tests.harness import is_one_line, paste, run_script, save, works
from tests.import_sources import hole, import_data, masks_of, put, write_rows
from tools import import_configs
from tools.import_configs import Settings, translate

# ---- datasets of musubi-tuner and ai-toolkit -------------------------------------------------------------------------

def configuration(path, *datasets, **job):
    """It writes a .toml of musubi-tuner with these datasets, or a .yaml of ai-toolkit, where the job has settings."""
    if path.suffix == ".yaml":
        return write_rows(path, dict(config=dict(process=[job | dict(datasets=datasets)]))) # JSON is YAML
    lines = []
    for dataset in datasets:
        lines += ["[[datasets]]", *[f"{key} = {json.dumps(value)}" for key, value in dataset.items()]]
    return write_rows(path, "\n".join(lines))

KOHYA = dict(image_directory="after", control_directory="before")
TOOLKIT = dict(folder_path="after", control_path="before")
CONFIGS = { # file, its dataset, pictures, captions, and the numbers of the samples' pictures
    "musubi-tuner": ("a.toml", KOHYA, "after/x.jpg before/x.png after/y.jpg "
                     "before/y_0000.png before/y_0001.png", "after/x.txt after/y.txt", dict(x=[0, 1], y=[2, 3, 4])),
    "a caption beside the control": ("a.toml", KOHYA | dict(caption_extension="cap"), "after/x.jpg before/x.png",
                                     "before/x.cap", dict(x=[0, 1])),
    "ai-toolkit": ("a.yaml", TOOLKIT | dict(caption_ext="txt"), "after/x.png before/x.jpg", "after/x.txt",
                   dict(x=[0, 1])),
    "a list": ("a.yaml", TOOLKIT | dict(control_path=["one", "two"]), "after/x.png one/x.png two/x.jpg", "after/x.txt",
               dict(x=[0, 1, 2])),
    "numbers": ("a.yaml", dict(folder_path="after", control_path_1="one", control_path_2="two", control_path_3=None,
                               mask_path="mask"),
                "after/x.png one/x.png two/x.png mask/x.png", "after/x.txt", dict(x=[0, 1, 2])),
    "a number beside none": ("a.yaml", dict(folder_path="after", control_path="one", control_path2="two",
                                            mask_path=None),
                             "after/x.png one/x.png two/x.png", "two/x.txt", dict(x=[0, 1, 2]))}
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_is_read_as_its_trainer_documents_it(tmp_path, kind):
    name, dataset, pictures, captions, want = CONFIGS[kind]
    put(tmp_path, pictures, captions.split())
    got = import_data(configuration(tmp_path / name, dataset), tmp_path / "out")
    mask = 3 if dataset.get("mask_path") else None
    assert got.samples == {name: (["go"], numbers, mask) for name, numbers in want.items()}

def test_datasets_of_one_configuration_keep_apart(tmp_path):
    """Their names may meet. What is set for some of them is not taken over."""
    put(tmp_path, "a/x.png b/x.png c/x.png d/x.png", ["a/x.txt", "c/x.txt"])
    write_rows(tmp_path / "rows.jsonl", dict(image_path="a/x.png", control_path="b/x.png", caption="row"))
    folders = [dict(image_directory=after, control_directory=before, num_repeats=3) for after, before in ("ab", "cd")]
    config = configuration(tmp_path / "a.toml", *folders, dict(image_jsonl_file="rows.jsonl"))
    got = import_data(config, tmp_path / "out")
    assert got.samples == {"0/x": (["go"], [0, 1], None), "1/x": (["go"], [2, 3], None),
                           "2/000000-x": (["row"], [0, 1], None)}
    assert "not taken over: num_repeats = 3" in got.out

def test_a_dataset_that_is_listed_for_each_of_its_sizes_is_read_once(tmp_path):
    """As ai-toolkit's users do it. Twice, --hold_out would hold out pairs that are also trained."""
    put(tmp_path, "after/x.png before/x.png after/y.png before/y.png", ["after/x.txt", "after/y.txt"])
    config = configuration(tmp_path / "x.yaml", *[TOOLKIT | dict(resolution=[n]) for n in (512, 768)])
    got = import_data(config, tmp_path / "out", "--hold_out", 2)
    assert len(got.samples) == 1, got.samples # the other one is held out
    assert "each is read once" in got.out and "--target_pixels 512x512 768x768" in got.out

def test_a_relative_folder_is_found_where_the_trainer_is_started(tmp_path):
    """Which is two folders above its configurations, but not three, or the working folder."""
    put(tmp_path, "data/after/a.png data/before/a.png", ["data/after/a.txt"])
    own = dict(folder_path="data/after", control_path="data/before", flip_x=True)
    got = import_data(configuration(tmp_path / "ai-toolkit/config/a.yaml", own), tmp_path / "out")
    assert got.samples == {"a": (["go"], [0, 1], None)} and "datasets.flip_x = True" in got.out
    deep = configuration(tmp_path / "ai-toolkit/config/examples/a.yaml", own)
    failed = import_data(deep, tmp_path / "none", status=1)
    assert is_one_line(failed.errors[0], deep.parent / "data/after") and not failed.out
    assert "1 samples" in works("tools/import_data.py", deep, tmp_path / "none", folder=tmp_path).out

BROKEN = { # file: its text, and what is named
    "config.toml": ("[general]", "(no 'datasets')"), "path.toml": ("[[datasets]]\nimage_directory = 5", "layout"),
    "dataset.toml": ("[[datasets]]\nvideo_directory = 'x'", "image_directory"),
    "cut.toml": ("[[datasets", "line 1"), "cut.yaml": ("a: [", "line 2"), "text.yaml": ("hello", "layout"),
    "none.yaml": ("config: {process: [{datasets: null}]}", "(no 'datasets')"),
    "gone.toml": ("[[datasets]]\nimage_directory = '/no/such/folder'", "/no/such/folder: no folder"),
    "blank.yaml": ("config: {process: [{datasets: [{folder_path: a, caption_ext: a/b}]}]}", "write them as .txt"),
    "json.yaml": ("config: {process: [{datasets: [{folder_path: a, caption_ext: json}]}]}", "write them as .txt"),
    "turned.yaml": ("config: {process: [{datasets: [{folder_path: a, mask_path: a, invert_mask: true}]}]}",
                    "invert the masks"),
    "twice.yaml": ("config: {process: [{datasets: [{folder_path: a, control: b, control: c}]}]}",
                   "'control' is given twice"),
    "twice.toml": ("[[datasets]]\nimage_directory = 'a'\ncontrol = 'b'\ncontrol = 'c'", "Cannot overwrite"),
    "alias.yaml": ("x: &x a\nconfig: {process: [{datasets: [{folder_path: *x}]}]}", "write its value in its place"),
    "table.toml": ("[[datasets]]\nimage_jsonl_file = 'rows.jsonl'", "rows.jsonl does not exist"),
    "alone.toml": ("[[datasets]]\nimage_directory = 'a'", "a: no control has the name", "--alone")}
@pytest.mark.parametrize("name", BROKEN)
def test_a_configuration_that_cannot_be_used_names_the_flags_that_would_do(tmp_path, name):
    text, *named = BROKEN[name]
    put(tmp_path, "a/x.png", ["a/x.txt"])
    errors = import_data(write_rows(tmp_path / name, text), tmp_path / "out", status=1).errors
    assert len(errors) == 1 and is_one_line(errors[0], *named, "--target DIR --control DIR"), errors
    if name == "alone.toml":
        assert import_data(tmp_path / name, tmp_path / "out", "--alone").samples == {"x": (["go"], [0], None)}

def test_what_another_trainer_does_with_captions_and_masks_is_said(tmp_path):
    """A trigger word, a default caption and alpha as a mask are not taken over; where a placeholder or no caption is
    left, the line says what to do."""
    put(tmp_path, "after/a.png before/a.png masks/a.png", ["after/a.txt"])
    own = TOOLKIT | dict(default_caption="a house", alpha_mask=True, mask_path="masks", invert_mask=False)
    config = configuration(tmp_path / "a.yaml", own, trigger_word="p3r5on")
    result = import_data(config, tmp_path / "out")
    assert result.samples == {"a": (["go"], [0, 1], 2)} and "--mask_background_weight 0" in result.out
    assert not_taken_over(result) == ["trigger_word", "datasets.default_caption", "datasets.alpha_mask",
                                      "datasets.invert_mask"]
    (tmp_path / "after/a.txt").write_text("[trigger] so", "utf-8")
    [error] = import_data(config, tmp_path / "none", status=1).errors
    assert is_one_line(error, "a.txt", "[trigger]", "write the word itself")
    (tmp_path / "after/a.txt").unlink()
    assert is_one_line(*import_data(config, tmp_path / "none", status=1).errors, "no caption", "--prompt")
    assert import_data(config, tmp_path / "second", "--prompt", "so").samples == {"a": (["so"], [0, 1], 2)}

# ---- SimpleTuner -----------------------------------------------------------------------------------------------------

CONDITION = dict(dataset_type="conditioning")

def backend(folder, *rows):
    """SimpleTuner's multidatabackend.json."""
    return write_rows(folder / "config/multidatabackend.json", list(rows))

def test_simpletuners_list_of_folders_is_read(tmp_path):
    """A conditioning dataset holds controls, or masks, of the datasets that name it. What else is set is printed."""
    put(tmp_path, "edits/a.png refs/a.png second/a.png")
    (tmp_path / "edits/a.txt").write_text("make it so\n\nmore so\n", "utf-8")
    save(hole(), tmp_path / "masks/a.png")
    table = backend(
        tmp_path, CONDITION | dict(id="second", source_dataset_id="edits", instance_data_dir="second"),
        dict(id="edits", conditioning_data=["refs", "masks", "second"], instance_data_dir="edits", crop=True,
             repeats=3),
        CONDITION | dict(id="refs", conditioning_type="reference_strict", instance_data_dir="refs"),
        CONDITION | dict(id="masks", conditioning_type="mask", instance_data_dir="masks"),
        dict(id="off", instance_data_dir="nowhere", disabled=True, conditioning_data="off-refs"),
        CONDITION | dict(id="off-refs", instance_data_dir="nowhere"),
        dict(id="films", dataset_type="video", disabled=True), dict(id="texts", dataset_type="text_embeds", type="aws"))
    got = import_data(table, tmp_path / "out")
    assert got.samples.keys() == {"a"} and got.samples["a"][:2] == (["make it so", "more so"], [0, 1, 2])
    assert np.array_equal(masks_of(tmp_path / "out")["a"], hole())
    for words in ("datasets.crop = True", "datasets.repeats = 3", "a control of each of 2 datasets"):
        assert got.out.count(words) == 1, got.out

@pytest.mark.parametrize("target, condition, words", [
    (dict(type="aws"), {}, "edits: only folders"), (dict(dataset_type="video"), {}, "edits: only folders"),
    (dict(caption_strategy="instanceprompt"), {}, "edits: only captions in files are read, and --prompt"),
    (dict(only_instance_prompt=True), {}, "edits: only captions in files"),
    (dict(conditioning_data=[]), {}, "refs: no dataset has it as conditioning_data"),
    ({}, dict(disabled=True), "no 'refs'"), ({}, dict(instance_data_dir=None), "another one"),
    ({}, dict(instance_data_dir="gone"), "gone"),
    (dict(conditioning_data=["refs", "refs2"]), dict(conditioning_type="mask"), "two datasets of masks")])
def test_what_simpletuner_has_elsewhere_is_refused(tmp_path, target, condition, words):
    put(tmp_path, "edits/a.png refs/a.png", ["edits/a.txt"])
    rows = [dict(id="edits", conditioning_data=["refs"], instance_data_dir="edits") | target]
    for name in rows[0]["conditioning_data"] or ["refs"]:
        rows.append(CONDITION | dict(id=name, instance_data_dir="refs") | condition)
    [error] = import_data(backend(tmp_path, *rows), tmp_path / "out", status=1).errors
    assert words in error, error

# ---- settings --------------------------------------------------------------------------------------------------------

def make_pairs(folder, target="after/{}.png", control="before/{}.png"):
    names = [form.format(name) for name in "abc" for form in (target, control)]
    return put(folder, " ".join(names), [target.format(name).replace("png", "txt") for name in "abc"])

def commands(result):
    """-> the words of the doctor's and of train.py's command, which end what import_data.py prints."""
    *_, title, doctor, train = result.out.splitlines()
    assert title in ("next:", "when the pictures are imported:") and doctor.startswith("  python tools/doctor.py ")
    assert train.startswith("  python train.py ")
    return paste(doctor)[2:], paste(train)[2:]

def not_taken_over(result):
    """-> the keys in the line of what is not taken over."""
    line, = [line for line in result.out.splitlines() if "not taken over: " in line]
    return re.findall(r"(?:: |, )([\w.]+) = ", line)

def train_parser(words):
    """-> (train.py's own parser, what it makes of this command line). The script does not go on."""
    class Parsed(Exception):
        pass
    def stop(parser, script):
        raise Parsed(parser, command_line.Parser.parse_args(parser))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "parse_args", stop)
        with pytest.raises(Parsed) as caught:
            run_script("train.py", *words)
    return caught.value.args

MUSUBI = """[general]
batch_size = 4
enable_bucket = true
[[datasets]]
image_directory = "after"
control_directory = "before"
num_repeats = 5
"""
MUSUBI_FLAGS = """model_version = "edit-2511"
dataset_config = "dataset.toml"
[training] # sections mean nothing
network_dim = 16
network_module = "networks.lora_qwen_image"
max_train_epochs = 16
max_train_steps = 1600
"""
BACKEND = [
    dict(id="edits", type="local", instance_data_dir="after", resolution=1024, conditioning_data=["refs"], repeats=1),
    dict(id="refs", instance_data_dir="before", resolution=768, **CONDITION),
    dict(id="texts", dataset_type="text_embeds", cache_dir="cache/text")]
PROGRAMS = { # program: its files, of which the first one is given; keys not taken over; flags. One pair is held out
    "ai-toolkit": ({"train.yaml": """job: extension
config:
  process:
    - network: {type: lora, linear: 32}
      datasets:
        - folder_path: after # their comments do not count
          control_path_1: before
          resolution: [512, 768]
      train: {lr: 2e-4, optimizer: adamw8bit}
      model: {name_or_path: Qwen/Qwen-Image-Edit-2511}
"""}, "job network.type", "--model Qwen/Qwen-Image-Edit-2511 --target_pixels 512x512 768x768 --lora_rank 32 "
      "--optimizer bitsandbytes.optim.AdamW8bit --lr 2e-4"),
    "musubi-tuner": ({"flags.toml": MUSUBI_FLAGS, "dataset.toml": MUSUBI},
                     "network_module enable_bucket max_train_epochs",
                     "--model Qwen/Qwen-Image-Edit-2511 --repeats 5 --lora_rank 16 --batch_size 4 --max_steps 1600"),
    "sd-scripts": ({"kohya.toml": """pretrained_model_name_or_path = "someone/sdxl-base"
network_dim = 64
[general]
shuffle_caption = true
[[datasets]]
resolution = 512
[[datasets.subsets]]
image_dir = "after"
conditioning_data_dir = "before"
num_repeats = 10
"""}, "pretrained_model_name_or_path shuffle_caption",
      "--model Qwen/Qwen-Image-Edit-2511 --target_pixels 512x512 --repeats 10 --lora_rank 64"),
    "OneTrainer": ({
        "snow.json": dict(training_method="LORA", concept_file_name="concepts.json", resolution=512, lora_rank=32,
                          transformer=dict(weight_dtype="FLOAT_8"), secrets=dict(huggingface_token="hf_secret")),
        "concepts.json": [dict(path="concept", enabled=True, balancing=5.0, balancing_strategy="REPEATS", seed=-1)]},
        "training_method secrets.huggingface_token concepts.balancing concepts.balancing_strategy concepts.seed",
        "--model Qwen/Qwen-Image-Edit-2511 --target_pixels 512x512 --lora_rank 32 --quantize fp8"),
    "SimpleTuner": ({
        "config/config.json": {"--data_backend_config": "config/multidatabackend.json", "--model_flavour": "edit-v2",
                               "--lora_rank": 8, "--use_ema": "true", "--ema_decay": 0.99, "--report_to": "wandb"},
        "config/multidatabackend.json": BACKEND},
        "use_ema ema_decay report_to datasets.repeats", "--model Qwen/Qwen-Image-Edit-2509 --target_pixels 1024x1024 "
        "--control_pixels 768x768 --lora_rank 8"),
    "DiffSynth-Studio": ({"train.sh": r"""modelscope download --dataset someone/example --local_dir ./data
accelerate launch --num_processes 2 examples/qwen_image/model_training/train.py \
  --dataset_base_path data --dataset_metadata_path data/metadata.csv \
  --max_pixels 1048576 --num_epochs 5 \
  --model_id_with_origin_paths "Qwen/Qwen-Image-Edit-2511:transformer/diffusion*.safetensors,Qwen/Qwen-Image:vae/x" \
  --lora_target_modules "to_q,to_k" \
  --zero_cond_t # of 2511
""", "data/metadata.csv": "image,edit_image,prompt\n" + "".join(
        f"after/{name}.png,before/{name}.png,go\n" for name in "abc")},
        "num_processes num_epochs lora_target_modules zero_cond_t",
        "--model Qwen/Qwen-Image-Edit-2511 --target_pixels 1048576")}

@pytest.mark.parametrize("program", PROGRAMS)
def test_every_setting_is_in_the_line_of_train_py_or_in_the_line_of_what_is_not_taken_over(tmp_path, program):
    """Or it says which pictures there are. train.py's own parser takes its line."""
    files, rest, want = PROGRAMS[program]
    if program == "OneTrainer":
        make_pairs(tmp_path / "concept", "{}.png", "{}-condlabel.png")
    else:
        make_pairs(tmp_path / "data" if program == "DiffSynth-Studio" else tmp_path)
    given, *_ = [write_rows(tmp_path / name, content) for name, content in files.items()]
    out, val, want = tmp_path / "photos", tmp_path / "photos_val", want.split()
    result = works("tools/import_data.py", given, out, "--hold_out", 3)
    doctor, train = commands(result)
    assert train == [*want[:2], "--data", str(out), "--val_data", str(val), *want[2:]]
    assert doctor[:2] == [str(out), str(val)] and " ".join(doctor[2:]) in " ".join(want)
    assert sorted(not_taken_over(result)) == sorted(rest.split()) and "hf_secret" not in result.out
    assert train_parser(train)[1].data == [str(out)]

def test_a_flag_takes_what_train_py_s_own_parser_takes():
    """So that no value is in the line that it refuses."""
    parser, _ = train_parser([])
    def is_taken(kind, word):
        try:
            kind(word)
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            return False
        return True
    actions = {action.dest: action for action in parser._actions}
    words = ("-1 0 1 2 0.5 0.99 0.995 1.5 3072 3073 10000 10001 1e6 1e7 1000000000 1000000001 4294967295 4294967296 "
             "1e-12 1e30 1e31 inf nan native 512 64x64 True")
    for flag, kind in import_configs.TYPES.items():
        if flag != "model":
            for word in [*words.split(), "9" * 30, ""]:
                assert is_taken(kind, word) == is_taken(actions[flag].type, word), (flag, word)
    for flag, known in import_configs.WORDS.items():
        if actions[flag].choices:
            assert set(known.values()) <= set(actions[flag].choices)

VALUES = [ # program, its settings, flags of the line, keys of the other line
    ("aitoolkit", {
        "model.name_or_path": "Qwen/Qwen-Image-Edit-2509", "datasets.resolution": [512, 768], "datasets.num_repeats": 2,
        "network.linear": 16, "network.rank": 8, "network.linear_alpha": 16, "train.batch_size": 2,
        "train.gradient_accumulation": 3, "train.optimizer": "adamw", "train.lr": "2e-4",
        "train.lr_scheduler": "cosine", "train.ema_config.ema_decay": 0.99, "model.quantize": True},
     "--model Qwen/Qwen-Image-Edit-2509 --target_pixels 512x512 768x768 --repeats 2 --lora_rank 16 --lora_alpha 16 "
     "--batch_size 2 --optimizer torch.optim.AdamW --lr 2e-4 --lr_scheduler cosine",
     "network.rank train.gradient_accumulation train.ema_config.ema_decay model.quantize"),
    ("aitoolkit", {"model.name_or_path": "/my/Qwen-Image-Edit-2511", "train.optimizer": "automagic",
                   "train.lr": "fast"}, "--model /my/Qwen-Image-Edit-2511", "train.optimizer train.lr"),
    ("kohya", dict(
        model_version="edit-2511", resolution=[960, 544], qwen_image_edit_control_resolution=[1024, 1024],
        train_batch_size=2, max_train_epochs=3, max_grad_norm=0, optimizer_type="prodigyopt.Prodigy", learning_rate=1.0,
        lr_scheduler="constant_with_warmup", lr_warmup_steps=0.1, fp8_base=True, blocks_to_swap=16),
     "--model Qwen/Qwen-Image-Edit-2511 --target_pixels 960x544 --control_pixels 1024x1024 --batch_size 2 "
     "--optimizer prodigyopt.Prodigy --lr 1.0 --lr_scheduler constant --quantize fp8 --offload 16",
     "lr_warmup_steps max_grad_norm max_train_epochs"),
    ("kohya", dict(resolution="768,512", fp8_base=False), "", "resolution fp8_base"),
    ("onetrainer", {"lora_alpha": 1.0, "batch_size": 2.0, "optimizer.optimizer": "ADAMW_8BIT",
                    "learning_rate_scheduler": "COSINE", "text_encoder.weight_dtype": "NFLOAT_4", "save_every": 3},
     "--lora_alpha 1.0 --optimizer bitsandbytes.optim.AdamW8bit --lr_scheduler cosine --quantize_text_encoder nf4",
     "batch_size save_every"),
    ("simpletuner", {
        "optimizer": "optimi-lion", "lr_scheduler": "polynomial", "seed": -1, "base_model_precision": "int8-quanto",
        "checkpointing_steps": 500, "datasets.resolution": 1.0, "datasets.repeats": 1, "": 5}, # 1.0: megapixels
     "--quantize int8 --save_every 500", "optimizer lr_scheduler seed  datasets.resolution datasets.repeats"),
    ("diffsynth", dict(dataset_repeat=50, num_epochs=5), "--repeats 50", "num_epochs")]

@pytest.mark.parametrize("program, values, want, named", VALUES)
def test_a_value_is_in_the_line_only_if_it_means_the_same_there(program, values, want, named):
    """Every key whose value is in no flag is named."""
    settings = Settings("a", program, {key: [value] for key, value in values.items()}, 1)
    flags, rest = translate(settings)
    assert " ".join(f"--{flag} {' '.join(words)}" for flag, words in flags.items()) == want
    assert sorted(text.split(" = ")[0] for text in rest) == sorted(named.split(" "))

def test_a_command_line_is_read_as_data(tmp_path):
    """Nothing is run, and no variable is filled in: a flag that has one is not taken over."""
    make_pairs(tmp_path)
    write_rows(tmp_path / "dataset.toml", MUSUBI)
    shell = write_rows(tmp_path / "train.sh", "# don't\naccelerate launch --mixed_precision bf16 train_network.py ^\n "
                       "--network_dim 8 --seed $(touch hit) --dataset_config dataset.toml ^\n "
                       "--optimizer_args \"a=1\" \"b=(1,2)\" --learning_rate=3e-4")
    result = import_data(shell, tmp_path / "out")
    train = commands(result)[1]
    assert "optimizer_args = a=1 b=(1,2)" in result.out and "seed = $(touch hit)" in result.out
    assert "--lora_rank 8 --batch_size 4 --lr 3e-4" in " ".join(train) and "--seed" not in train

TEXT = "a\x1b[2J\x07\u202e\nerror: planted"
HOSTILE = [TEXT, "-x", "--data", "$(touch hit)", "`hit`", "'; touch hit #", "x" * 10**4, [["a"] * 30] * 30,
           {"a": {"b": [1]}}, 1e308, float("inf"), float("nan"), -1, 10**40, True, [TEXT], ["--resume"], [None],
           "\ud800", "evil.Opt", 0, "0" * 999 + "1"]

@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: f"{value!r:.20}")
def test_a_strangers_value_stays_data(tmp_path, value):
    """Whatever a setting holds: each line is short and shown, the command is one, and train.py takes it."""
    make_pairs(tmp_path)
    keys = [row.split()[0] for row in import_configs.TABLES["aitoolkit"].strip().splitlines()]
    dataset = TOOLKIT | dict(num_repeats=value, resolution=value, caption_dropout_rate=value)
    config = configuration(tmp_path / "a.yaml", dataset, **dict.fromkeys([*keys, f"k{TEXT}"], value))
    result = works("tools/import_data.py", config, tmp_path / "out")
    lines = result.out.splitlines()
    assert not any(map(CONTROLS.search, lines)) and not any(line.startswith("error") for line in lines)
    assert max(map(len, lines)) < 20_000 and not list(tmp_path.rglob("hit"))
    _, args = train_parser(commands(result)[1])
    assert not args.resume and args.data == [str(tmp_path / "out")] and "evil" not in args.optimizer

@pytest.mark.parametrize("program", import_configs.TABLES)
def test_a_strangers_value_is_taken_over_or_named(program):
    """Under each key of each program."""
    for row in import_configs.TABLES[program].strip().splitlines():
        key, flag = row.split()
        for value in HOSTILE:
            flags, rest = translate(Settings("a", program, {key: [value]}, 1))
            assert bool(flags) != any(text.startswith(f"{key} = ") for text in rest)
            assert all(len(word) < 400 and not CONTROLS.search(word) for words in flags.values() for word in words)

def test_a_file_with_many_settings_is_a_short_line(tmp_path):
    make_pairs(tmp_path)
    text = "".join(f"a{n} = 1\n" for n in range(6000)) + MUSUBI
    result = import_data(write_rows(tmp_path / "a.toml", text), tmp_path / "out")
    assert "a1 = 1" in result.out and len(result.out) < 25_000
