"""
tools/import_configs.py: the datasets of other trainers' configurations, and their settings, which become a line of
train.py; what it has not stands in a line, too. The examples have the keys of those that the programs document.
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml
from PIL import ImageOps

from common import CONTROLS
from library.cli import command_line
from library.data.dataset import read_dataset
from tests.harness import HERE, is_one_line, paint_picture, paste, run_script, save
from tests.import_sources import PICTURES, hole, import_data, masks_of, put, write_rows
from tools import import_configs
from tools.import_configs import Settings, translate

# ---- as the documents of other trainers write it ---------------------------------------------------------------------

MUSUBI_TEXT = """# general configurations
[general]
resolution = [960, 544]
caption_extension = ".txt"
batch_size = 1
enable_bucket = true
bucket_no_upscale = false

[[datasets]]
image_directory = "/path/to/image_dir"
control_directory = "/path/to/control_dir"
cache_directory = "/path/to/cache_directory" # recommended to set cache directory
num_repeats = 1 # optional, default is 1. Number of times to repeat the dataset.
control_resolution = [1024, 1024]
no_resize_control = false
"""
MUSUBI_JSONL = """[general]
resolution = [960, 544]

[[datasets]]
image_jsonl_file = "/path/to/metadata.jsonl"
cache_directory = "/path/to/cache_directory" # required for metadata jsonl file
"""
JSONL = ('{"image_path": "/path/to/image1.jpg", "control_path": "/path/to/control1.png", '
         '"caption": "A caption for image1"}\n'
         '{"image_path": "/path/to/image2.jpg", "control_path_0": "/path/to/control2_0.png", '
         '"control_path_1": "/path/to/control2_1.png", "caption": "A caption for image2"}\n')
AITOOLKIT_TEXT = """---
job: extension
config:
  # this name will be the folder and filename name
  name: "my_first_qwen_image_edit_2509_lora_v1"
  process:
    - type: 'diffusion_trainer'
      # root folder to save training sessions/samples/weights
      training_folder: "output"
      datasets:
        # datasets are a folder of images. captions need to be txt files with the same name as the image
        - folder_path: "/path/to/images/folder"
          # can do up to 3 control image folders, file names must match target file names
CONTROLS
          caption_ext: "txt"
          # default_caption: "a person" # if caching text embeddings, if you don't have captions, this will get cached
          caption_dropout_rate: 0.05  # will drop out the caption 5% of time
          resolution: [ 512, 768, 1024 ]  # qwen image enjoys multiple resolutions
meta:
  name: "[name]"
  version: '1.0'
"""
LIST = """          control_path:
            - "/path/to/control/images/folder1"
            - "/path/to/control/images/folder2"
            - "/path/to/control/images/folder3\""""
TEXT = '          control_path: "/path/to/control/images/folder"'
NUMBERED = """          mask_path: "/path/to/mask"
          mask_min_value: 0.1
          control_path_1: "/path/to/control/images/folder1"
          control_path_2: "/path/to/control/images/folder2"
          control_path_3: null"""
BESIDE = """          mask_path: null
          control_path: "/path/to/control/images/folder1"
          control_path2: "/path/to/control/images/folder2\""""
FOLDER = "images/folder/a.png control/images/folder1/a.png control/images/folder2/a.jpg control/images/folder3/a.png"

CONFIGS = { # file, its text, pictures below /path/to, captions, and the samples
    "musubi-tuner, folders": ("dataset.toml", MUSUBI_TEXT, "image_dir/image1.jpg control_dir/image1.png "
                              "image_dir/image2.jpg control_dir/image2_0000.png control_dir/image2_0001.png",
                              "image_dir/image1.txt image_dir/image2.txt", dict(image1=[0, 1], image2=[2, 3, 4])),
    "musubi-tuner, captions": ("dataset.toml", MUSUBI_TEXT.replace(".txt", ".caption"), "image_dir/a.jpg "
                               "control_dir/a.png", "image_dir/a.caption", dict(a=[0, 1])),
    "musubi-tuner, jsonl": ("dataset.toml", MUSUBI_JSONL, "image1.jpg control1.png image2.jpg control2_0.png "
                            "control2_1.png", "", {"000000-image1": [0, 1], "000001-image2": [2, 3, 4]}),
    "ai-toolkit, list": ("train.yaml", AITOOLKIT_TEXT.replace("CONTROLS", LIST), FOLDER, "images/folder/a.txt",
                         dict(a=[0, 1, 2, 3])),
    "ai-toolkit, text": ("train.yml", AITOOLKIT_TEXT.replace("CONTROLS", TEXT), "images/folder/a.png "
                         "control/images/folder/a.jpg", "images/folder/a.txt", dict(a=[0, 1])),
    "ai-toolkit, numbers": ("train.yaml", AITOOLKIT_TEXT.replace("CONTROLS", NUMBERED), FOLDER + " mask/a.png",
                            "images/folder/a.txt", dict(a=[0, 1, 2])),
    "ai-toolkit, 2": ("train.yaml", AITOOLKIT_TEXT.replace("CONTROLS", BESIDE), FOLDER, "control/images/folder2/a.txt",
                      dict(a=[0, 1, 2]))}
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_is_read_as_its_trainer_documents_it(tmp_path, kind):
    """All paths are absolute, and the configuration lies elsewhere. The captions may lie beside a control."""
    name, text, pictures, captions, want = CONFIGS[kind]
    source = put(tmp_path / "data", pictures, captions.split())
    for file, content in ((source / "metadata.jsonl", JSONL), (tmp_path / name, text)):
        write_rows(file, content.replace("/path/to", str(source)))
    got = import_data(tmp_path / name, tmp_path / "out")
    assert {name: sample[1] for name, sample in got.samples.items()} == want and not got.errors
    assert {sample[2] for sample in got.samples.values()} == {4 if kind == "ai-toolkit, numbers" else None}
    prompts = [sample[0] for sample in got.samples.values()]
    captions = [["A caption for image1"], ["A caption for image2"]]
    assert prompts == (captions if "jsonl" in kind else [["go"]] * len(want))

def test_datasets_of_one_configuration_keep_apart_and_what_is_not_taken_over_is_said(tmp_path):
    """Paths may begin at the working folder, or beside the configuration; names may meet."""
    put(tmp_path, "a/x.png b/x.png c/x.png d/x.png", ["a/x.txt", "c/x.txt"])
    write_rows(tmp_path / "rows.jsonl", dict(image_path="a/x.png", control_path="b/x.png", caption="row"))
    text = "[[datasets]]\nnum_repeats = 3\nimage_directory = 'a'\ncontrol_directory = 'b'\n"
    text += text.replace("'a'", "'c'").replace("'b'", "'d'") + "[[datasets]]\nimage_jsonl_file = 'rows.jsonl'\n"
    got = import_data(write_rows(tmp_path / "dataset.toml", text), tmp_path / "out")
    assert got.samples == {"0/x": (["go"], [0, 1], None), "1/x": (["go"], [2, 3], None),
                           "2/000000-x": (["row"], [0, 1], None)}
    assert "not taken over: num_repeats = 3" in got.out # as the third one's is 1
    config = write_rows(tmp_path / "elsewhere/and/deeper/dataset.toml", text)
    assert len(import_data(config, tmp_path / "none", status=1).errors) == 1
    config = write_rows(tmp_path / "elsewhere/dataset.toml", text)
    (tmp_path / "rows.jsonl").rename(tmp_path / "elsewhere/rows.jsonl") # its own paths are not beside it any more
    write_rows(config, text.replace("rows.jsonl", "elsewhere/rows.jsonl"))
    command = [sys.executable, str(HERE / "tools/import_data.py"), str(config), "second"]
    subprocess.run(command, cwd=tmp_path, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert len(list((tmp_path / "second/target").rglob("*.png"))) == 3

def test_a_dataset_that_is_listed_for_each_of_its_sizes_is_read_once(tmp_path):
    """As ai-toolkit's users do it. Twice, --hold_out would hold out pairs that are also trained."""
    put(tmp_path, "a/x.png b/x.png a/y.png b/y.png", ["a/x.txt", "a/y.txt"])
    same = f"folder_path: {tmp_path}/a, control_path: {tmp_path}/b"
    each = ", ".join(f"{{{same}, resolution: [{n}]}}" for n in (512, 768))
    config = write_rows(tmp_path / "x.yaml", f"config: {{process: [{{datasets: [{each}]}}]}}")
    got = import_data(config, tmp_path / "out", "--hold_out", 2)
    assert len(got.samples) == 1, got.samples # the other one is held out
    assert "is there twice, and is read once" in got.out and "--target_pixels" in got.out

BROKEN = { # file: its text, and what is named
    "config.toml": ("[general]", "(no 'datasets')"),
    "dataset.toml": ("[[datasets]]\nvideo_directory = 'x'", "image_directory"),
    "cut.toml": ("[[datasets", "line 1"), "list.toml": ("datasets = [1]", "layout"),
    "path.toml": ("[[datasets]]\nimage_directory = 5", "layout"), "cut.yaml": ("a: [", "line 2"),
    "text.yaml": ("hello", "layout"), "none.yaml": ("config: {process: [{datasets: null}]}", "(no 'datasets')"),
    "gone.toml": (MUSUBI_TEXT, "/path/to/image_dir: does not exist"),
    "code.yaml": ("!!python/object/apply:os.getcwd []", "line 1"),
    "blank.yaml": ("config: {process: [{datasets: [{folder_path: a, caption_ext: a/b}]}]}", "suffix"),
    "ext.yaml": ("config: {process: [{datasets: [{folder_path: x, caption_ext: 5}]}]}", "layout"),
    "table.toml": (MUSUBI_JSONL, "metadata.jsonl does not exist"), "alone.toml": (
        "[[datasets]]\nimage_directory = 'a'", "a: no control has the name", "--alone")}
@pytest.mark.parametrize("name", BROKEN)
def test_a_configuration_that_cannot_be_used_names_the_flags_that_would_do(tmp_path, name):
    text, *named = BROKEN[name]
    put(tmp_path, "a/x.png", ["a/x.txt"])
    errors = import_data(write_rows(tmp_path / name, text), tmp_path / "out", status=1).errors
    assert len(errors) == 1 and is_one_line(errors[0], *named), errors
    assert "--target DIR --control DIR" in errors[0] or name == "table.toml"
    if name == "alone.toml":
        assert import_data(tmp_path / name, tmp_path / "out", "--alone").samples == {"x": (["go"], [0], None)}

def test_a_caption_of_another_suffix_may_lie_beside_the_control(tmp_path):
    put(tmp_path, "after/a.png before/a.png")
    (tmp_path / "before/a.cap").write_text("so", "utf-8")
    config = f"""[[datasets]]
                 image_directory = "{tmp_path}/after"
                 control_directory = "{tmp_path}/before"
                 caption_extension = "cap\""""
    got = import_data(write_rows(tmp_path / "a.toml", config), tmp_path / "out")
    assert {name: prompts for name, (prompts, *_) in got.samples.items()} == dict(a=["so"])

def test_ai_toolkits_trigger_word_takes_its_place(tmp_path):
    """Or, as in ai-toolkit, stands before a caption that has none."""
    put(tmp_path, "after/a.png before/a.png after/b.png before/b.png")
    (tmp_path / "after/a.txt").write_text("[trigger] so", "utf-8")
    (tmp_path / "after/b.txt").write_text("in snow", "utf-8")
    config = f"""config: {{process: [{{trigger_word: p3rson, datasets: [{{folder_path: {tmp_path}/after,
                 control_path: {tmp_path}/before}}]}}]}}"""
    got = import_data(write_rows(tmp_path / "a.yaml", config), tmp_path / "out")
    assert {name: prompts for name, (prompts, *_) in got.samples.items()} == dict(a=["p3rson so"], b=["p3rson in snow"])
    write_rows(tmp_path / "b.yaml", config.replace("trigger_word: p3rson, ", ""))
    [error] = import_data(tmp_path / "b.yaml", tmp_path / "none", status=1).errors
    assert is_one_line(error, "a.txt", "[trigger]", "give the .yaml with its trigger_word")
    (tmp_path / "after/b.txt").unlink() # --prompt is a caption as well; YAML has numbers, and another placeholder
    (tmp_path / "after/a.txt").write_text("[name] so", "utf-8")
    write_rows(tmp_path / "c.yaml", config.replace("p3rson", "0, resolution: [512, 768], caption_dropout_rate: 1.0"))
    got = import_data(tmp_path / "c.yaml", tmp_path / "third", "--prompt", "[trigger] here")
    assert {name: prompts for name, (prompts, *_) in got.samples.items()} == dict(a=["0 so"], b=["0 here"])
    for words in ("python train.py --model Qwen", "--target_pixels 512x512 768x768 --caption_dropout_rate 1", "'0'"):
        assert got.out.count(words) == 1, got.out
    [error] = import_data(tmp_path / "b.yaml", tmp_path / "none", "--prompt", "[trigger]", status=1).errors
    assert is_one_line(error, "--prompt", "[trigger]")
    write_rows(tmp_path / "d.yaml", config.replace("p3rson", "[a, b]"))
    [error] = import_data(tmp_path / "d.yaml", tmp_path / "none", status=1).errors
    assert is_one_line(error, "d.yaml", "trigger_word")

def aitoolkit(tmp_path, **settings):
    """-> a configuration of ai-toolkit with these settings; its targets have a hole in their alpha."""
    for n, name in enumerate("ab"):
        target = PICTURES[n].convert("RGBA")
        target.putalpha(hole(32) if name == "a" else 255)
        save(target, tmp_path / f"after/{name}.png"), save(PICTURES[n], tmp_path / f"before/{name}.png")
        save(hole(), tmp_path / f"masks/{name}.png")
        (tmp_path / f"after/{name}.txt").write_text("go", "utf-8")
    dataset = dict(folder_path=f"{tmp_path}/after", control_path=f"{tmp_path}/before") | settings
    return write_rows(tmp_path / "a.yaml", yaml.dump(dict(config=dict(process=[dict(datasets=[dataset])]))))

def test_invert_mask_inverts_and_alpha_mask_takes_the_target_s_alpha(tmp_path):
    mask_path = f"{tmp_path}/masks"
    for n, (settings, want) in enumerate([
            (dict(mask_path=mask_path), dict(a=hole(), b=hole())),
            (dict(mask_path=mask_path, invert_mask=True), dict.fromkeys("ab", ImageOps.invert(hole()))),
            (dict(alpha_mask=True), dict(a=hole(32))), # b is opaque everywhere
            (dict(alpha_mask=True, invert_mask=True, mask_path=mask_path), dict(a=ImageOps.invert(hole(32))))]):
        config, out = aitoolkit(tmp_path, **settings), tmp_path / f"out{n}"
        result = run_script("tools/import_data.py", config, out)
        assert result.status == 0 and not result.err, result.err
        masks = masks_of(out)
        assert {name: np.asarray(mask).tolist() for name, mask in masks.items()} == {
            name: np.asarray(mask).tolist() for name, mask in want.items()}, settings
        assert ("left out, 1: " in result.out and "after/b.png" in result.out) == (len(want) == 1)
        assert ("mask_path is not converted, as alpha_mask is set" in result.out) == (n == 3)
        assert ("becomes white" in result.out) == (n >= 2) and "--mask_background_weight 0" in result.out
        assert (out / "target/a.png").samefile(tmp_path / "after/a.png") # as it is

def test_several_targets_of_one_sample_are_refused(tmp_path):
    put(tmp_path, "a/x.png b/x.png", ["a/x.txt"])
    text = f"[[datasets]]\nimage_directory = '{tmp_path}/a'\ncontrol_directory = '{tmp_path}/b'\nmultiple_target = "
    assert import_data(write_rows(tmp_path / "a.toml", text + "false"), tmp_path / "out").samples.keys() == {"x"}
    [error] = import_data(write_rows(tmp_path / "b.toml", text + "true"), tmp_path / "none", status=1).errors
    assert is_one_line(error, "b.toml", "multiple_target")

def test_anchors_of_yaml_may_be_used_twice(tmp_path):
    """A merged key is no key given twice."""
    put(tmp_path, "a/x.png b/x.png", ["a/x.txt"])
    text = f"""shared: &shared {{control_path: {tmp_path}/gone, caption_ext: txt}}
config: {{process: [{{datasets: [{{<<: *shared, folder_path: {tmp_path}/a, control_path: {tmp_path}/b}}]}}]}}"""
    assert import_data(write_rows(tmp_path / "a.yaml", text), tmp_path / "out").samples == {"x": (["go"], [0, 1], None)}

# ---- SimpleTuner -----------------------------------------------------------------------------------------------------

def backend(folder, *rows):
    """SimpleTuner's multidatabackend.json."""
    return write_rows(folder / "config/multidatabackend.json", json.dumps(rows))

def test_simpletuners_list_of_folders_is_read(tmp_path):
    """A conditioning dataset holds controls, or masks, of the datasets that name it, or that it names. Its caches are
    nothing to read; what else is set is printed."""
    put(tmp_path, "edits/a.png edits/b.png refs/a.png refs/b.png second/a.png second/b.png")
    for name in ("a", "b"):
        save(PICTURES[2].point(lambda v: 255 * (v > 99)), tmp_path / f"masks/{name}.png", format="PNG")
        (tmp_path / f"edits/{name}.txt").write_text("make it so\n\nmore so\n", "utf-8")
    usual = dict(type="local", probability=1.0, start_epoch=1,
                 resolution=1024, resolution_type="pixel_area", cache_dir_vae="x", repeats=0)
    table = backend(tmp_path,
        dict(id="second", dataset_type="conditioning", source_dataset_id="edits", instance_data_dir="second"),
        dict(id="edits", conditioning_data=["refs", "masks"], instance_data_dir="edits", caption_strategy="textfile",
             crop=True, repeats=3, crop_style="center", **{k: v for k, v in usual.items() if k != "repeats"}),
        dict(id="refs", dataset_type="conditioning", conditioning_type="reference_strict", instance_data_dir="refs"),
        dict(id="masks", dataset_type="conditioning", conditioning_type="mask", instance_data_dir="masks"),
        dict(id="off", instance_data_dir="nowhere", disabled=True, conditioning_data="off-refs"),
        dict(id="off-refs", dataset_type="conditioning", instance_data_dir="nowhere"),
        dict(id="off-masks", dataset_type="conditioning", source_dataset_id="off", instance_data_dir="nowhere"),
        dict(id="films", dataset_type="video"),
        dict(id="texts", dataset_type="text_embeds", default=True, cache_dir="x", type="aws"))
    got = import_data(table, tmp_path / "out")
    assert got.samples.keys() == {"a", "b"}
    assert got.samples["a"][:2] == (["make it so", "more so"], [0, 2, 4]) and (tmp_path / "out/mask/b.png").exists()
    for words in ("datasets.crop = True", "films: dataset_type video is not",
                  "a control of each of 2 datasets", "out: 2 samples", "--target_pixels 1024x1024 --repeats 4"):
        assert got.out.count(words) == 1, got.out

@pytest.mark.parametrize("settings, prompts", [
    (dict(caption_strategy="textfile"), ["in\nsnow"]), (dict(caption_strategy="filename"), ["cat on mat"]),
    (dict(), ["in\nsnow"]), (dict(caption_strategy="textfile", disable_multiline_split=True), ["in snow"]),
    (dict(caption_strategy="instanceprompt", instance_prompt="a cat"), ["a cat"]),
    (dict(caption_strategy="instanceprompt", instance_prompt=["a cat", "one cat"]), ["a cat\none cat"]),
    (dict(caption_strategy="textfile", instance_prompt="a cat", only_instance_prompt=True), ["a cat"]),
    (dict(caption_strategy="textfile", instance_prompt="a cat"), ["in\nsnow"]),
    (dict(caption_strategy="filename", instance_prompt="tabby", prepend_instance_prompt=True), ["tabby cat on mat"]),
    (dict(caption_strategy="textfile", instance_prompt="snow", prepend_instance_prompt=True), ["snow in\nsnow"])])
def test_simpletuners_strategies_give_its_captions(tmp_path, settings, prompts):
    put(tmp_path, "edits/cat_on_mat.png refs/cat_on_mat.png", ["edits/cat_on_mat.txt"])
    (tmp_path / "edits/cat_on_mat.txt").write_text("in\nsnow", "utf-8")
    edits = dict(id="e", conditioning_data="r", instance_data_dir=str(tmp_path / "edits"), **settings)
    table = backend(tmp_path, edits,
                    dict(id="r", dataset_type="conditioning", instance_data_dir=str(tmp_path / "refs")))
    got = import_data(table, tmp_path / "out", *["--prompt", "other"])
    assert got.samples == {"cat_on_mat": (prompts[0].split("\n"), [0, 1], None)}

@pytest.mark.parametrize("target, condition, words", [
    (dict(type="aws"), {}, "edits: its type is aws"), (dict(type="huggingface"), {}, "its type is huggingface"),
    (dict(conditioning_data=[]), {}, "refs: no dataset has it as conditioning_data"),
    (dict(caption_strategy="parquet"), {}, "caption_strategy parquet"),
    (dict(caption_strategy="instanceprompt"), {}, "no 'instance_prompt'"),
    (dict(prepend_instance_prompt=True), {}, "no 'instance_prompt'"),
    ({}, dict(instance_data_dir=None), "refs"), ({}, dict(instance_data_dir="gone"), "gone"),
    (dict(conditioning_data=["refs", "refs2"]), dict(conditioning_type="mask"), "two datasets of masks"),
    (dict(instance_prompt=3, caption_strategy="instanceprompt"), {}, "multidatabackend.json")])
def test_what_simpletuner_has_elsewhere_is_refused(tmp_path, target, condition, words):
    put(tmp_path, "edits/a.png refs/a.png", ["edits/a.txt"])
    rows = [dict(id="edits", conditioning_data=["refs"], instance_data_dir=str(tmp_path / "edits")) | target]
    for name in rows[0]["conditioning_data"] or ["refs"]:
        rows.append(dict(id=name, dataset_type="conditioning", instance_data_dir=str(tmp_path / "refs")) | condition)
    [error] = import_data(backend(tmp_path, *rows), tmp_path / "out", status=1).errors
    assert words in error, error

# ---- where the paths of a configuration begin ------------------------------------------------------------------------

@pytest.mark.parametrize("place", ["ai-toolkit/config", "ai-toolkit/config/examples"])
def test_a_relative_folder_is_found_where_the_trainer_is_started(tmp_path, place):
    """Which is above its configurations, but not two more folders up. Nothing is noted of what did not work."""
    config = """config: {process: [{datasets: [{folder_path: data/after, control_path: data/before, flip_x: true}]}]}"""
    path = write_rows(tmp_path / place / "a.yaml", config)
    put(tmp_path / "data", "after/a.png before/a.png", ["after/a.txt"]) # too far up for the second place
    if place.endswith("examples"):
        failed = import_data(path, tmp_path / "out", status=1)
        assert is_one_line(failed.errors[0], tmp_path / place / "data/after") and not failed.out
        (tmp_path / "data").rename(tmp_path / "ai-toolkit/data")
    got = import_data(path, tmp_path / "out")
    assert got.samples == {"a": (["go"], [0, 1], None)} and "datasets.flip_x = True" in got.out

# ---- settings --------------------------------------------------------------------------------------------------------

def make_pairs(folder, names="abcd"):
    """Pairs in FOLDER/after and FOLDER/before."""
    for n, name in enumerate(names):
        save(paint_picture((64, 48), seed=2 * n), folder / f"before/{name}.png")
        save(paint_picture((64, 48), seed=2 * n + 1), folder / f"after/{name}.png")
        (folder / f"after/{name}.txt").write_text("make it snow", "utf-8")

def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else json.dumps(text), "utf-8")
    return path

def commands(result):
    """-> the words of the doctor's and of train.py's command, which end what import_data.py prints."""
    *_, title, doctor, train = result.out.splitlines()
    assert title in ("next:", "when the pictures are imported:") and doctor.startswith("  python tools/doctor.py ")
    assert train.startswith("  python train.py ")
    return paste(doctor)[2:], paste(train)[2:]

def flag_in(words, name):
    """-> the values behind this flag, or None."""
    if name not in words:
        return None
    rest = words[words.index(name) + 1:]
    return rest[:next((n for n, word in enumerate(rest) if word.startswith("--")), len(rest))]

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

PROCESS = dict( # of ai-toolkit
    type="diffusion_trainer", training_folder="output", trigger_word=None,
    network=dict(type="lora", linear=32, linear_alpha=16, conv=16, lokr_full_rank=True),
    save=dict(save_every=250, max_step_saves_to_keep=4, push_to_hub=False),
    datasets=[dict(
        folder_path="after", control_path_1="before", mask_path=None, mask_min_value=0.1, default_caption="",
        caption_ext="txt", caption_dropout_rate=0.05, resolution=[512, 768, 1024], flip_x=False, num_repeats=2)],
    train=dict(
        batch_size=2, steps=3000, gradient_accumulation=3, noise_scheduler="flowmatch", optimizer="adamw8bit",
        timestep_type="weighted", optimizer_params=dict(weight_decay=1e-4, betas=[0.9, 0.99]), lr="2e-4",
        lr_scheduler="cosine", ema_config=dict(use_ema=True, ema_decay=0.99), disable_sampling=False),
    model=dict(name_or_path="Qwen/Qwen-Image-Edit-2509", arch="qwen_image_edit_plus", quantize=True,
               qtype="uint3|someone/adapters/uint3.safetensors", quantize_te=True, qtype_te="qfloat8", low_vram=True,
               layer_offloading_transformer_percent=0.5),
    sample=dict(sampler="flowmatch", sample_every=250, width=1024, seed=42, walk_seed=True, guidance_scale=3, samples=[
        dict(prompt="make it snow", ctrl_img_1="before/a.png", network_multiplier="0.9")]))
AITOOLKIT = dict(job="extension", config=dict(name="snow_v1", process=[PROCESS]))
MUSUBI = """[general]
resolution = [960, 544]
caption_extension = ".txt"
batch_size = 2
bucket_no_upscale = true
[[datasets]]
image_directory = "after"
control_directory = "before"
cache_directory = "cached"
num_repeats = 3
qwen_image_edit_control_resolution = [1024, 1024]
"""
MUSUBI_FLAGS = """dit = "models/qwen_image_edit_2509_bf16.safetensors"
model_version = "edit-2509"
dataset_config = "dataset.toml"
[optimizer]
optimizer_type = "prodigyopt.Prodigy"
optimizer_args = ["betas=(0.9, 0.99)", "decouple=True"]
learning_rate = 1.0
lr_scheduler = "constant_with_warmup"
lr_warmup_steps = 0.1
max_grad_norm = 0.0
[training]
timestep_sampling = "shift"
discrete_flow_shift = 2.2
gradient_accumulation_steps = 2
network_module = "networks.lora_qwen_image"
network_dim = 16
max_train_epochs = 16
max_train_steps = 1600
seed = 42
fp8_base = true
fp8_scaled = true
fp8_vl = true
blocks_to_swap = 16
save_every_n_epochs = 1
output_name = "snow"
"""
KOHYA = """pretrained_model_name_or_path = "someone/sdxl-base"
network_dim = 64
network_alpha = 32
learning_rate = 1e-4
unet_lr = 1e-4
optimizer_type = "AdamW8bit"
lr_scheduler = "cosine_with_restarts"
lr_warmup_steps = 100
max_train_steps = 1600
save_every_n_steps = 400
min_snr_gamma = 5
train_batch_size = 4
[general]
shuffle_caption = true
caption_extension = ".txt"
[[datasets]]
resolution = 512
batch_size = 4
[[datasets.subsets]]
image_dir = "after"
conditioning_data_dir = "before"
class_tokens = "sks girl"
num_repeats = 10
"""
ONETRAINER = {
    "__version": 10, "training_method": "LORA", "base_model_name": "Qwen/Qwen-Image-Edit-2511",
    "concept_file_name": "concepts.json", "learning_rate_scheduler": "COSINE", "learning_rate": 0.0003,
    "learning_rate_warmup_steps": 50.0, "learning_rate_cycles": 1, "epochs": 10, "batch_size": 2,
    "gradient_accumulation_steps": 1, "ema": "OFF", "ema_decay": 0.999, "resolution": "512,768", "clip_grad_norm": 1.0,
    "timestep_distribution": "LOGIT_NORMAL", "transformer": {"train": True, "weight_dtype": "FLOAT_8"},
    "text_encoder": {"train": False, "weight_dtype": "NFLOAT_4", "dropout_probability": 0.1}, "lora_rank": 32,
    "lora_alpha": 1.0, "dropout_probability": 0.05, "secrets": {"huggingface_token": "hf_secret"},
    "optimizer": {"optimizer": "ADAMW_8BIT", "beta1": 0.9, "weight_decay": 0.02, "momentum": None},
    "optimizer_defaults": {}, "sample_after": 20, "sample_after_unit": "STEP", "save_every": 1,
    "save_every_unit": "EPOCH"}
CONCEPTS = [{"image": {"enable_crop_jitter": True}, "text": {"prompt_source": "sample"}, "path": "concept", "seed": -12,
             "enabled": True, "type": "STANDARD", "balancing": 5.0, "balancing_strategy": "REPEATS"}]
SIMPLETUNER = {
    "--data_backend_config": "config/multidatabackend.json", "--seed": 42, "--lora_type": "standard", "--lora_rank": 8,
    "--lora_alpha": 8, "--max_train_steps": 1000, "--num_train_epochs": 0, "--checkpoint_step_interval": 500,
    "--push_to_hub": "false", "--report_to": "wandb", "--model_family": "qwen_image", "--model_flavour": "edit-v2",
    "--train_batch_size": 1, "--gradient_accumulation_steps": 4, "--caption_dropout_probability": 0.1,
    "--resolution": 512, "--validation_step_interval": 100, "--optimizer": "optimi-lion", "--learning_rate": "1e-4",
    "--lr_scheduler": "polynomial", "--lr_warmup_steps": 100, "--max_grad_norm": 0.01,
    "--base_model_precision": "int8-quanto", "--use_ema": "true", "--ema_decay": 0.99}
BACKEND = [
    dict(id="edits", type="local", instance_data_dir="after", caption_strategy="textfile", resolution=1024,
         conditioning_data=["refs"], cache_dir_vae="cache/vae/edits", repeats=1, crop=False),
    dict(id="refs", type="local", dataset_type="conditioning", instance_data_dir="before",
         conditioning_type="reference_strict", resolution=768, cache_dir_vae="cache/vae/refs"),
    dict(id="texts", dataset_type="text_embeds", default=True, type="local", cache_dir="cache/text")]
DIFFSYNTH = r"""modelscope download --dataset someone/example --local_dir ./data
accelerate launch --num_processes 2 examples/qwen_image/model_training/train.py \
  --dataset_base_path data \
  --dataset_metadata_path data/metadata_edit.csv \
  --data_file_keys "image,edit_image" \
  --max_pixels 1048576 \
  --dataset_repeat 50 \
  --model_id_with_origin_paths "Qwen/Qwen-Image-Edit-2511:transformer/diffusion*.safetensors,Qwen/Qwen-Image:vae/x" \
  --learning_rate 1e-4 \
  --num_epochs 5 \
  --lora_target_modules "to_q,to_k,to_v,to_out.0,img_mlp.net.2" \
  --lora_rank 32 \
  --use_gradient_checkpointing \
  --zero_cond_t # of 2511
"""

def place_diffsynth(folder):
    make_pairs(folder / "data")
    write(folder / "data/metadata_edit.csv", "image,edit_image,prompt\n" + "".join(
        f"after/{n}.png,before/{n}.png,make it snow\n" for n in "abcd"))
    return write(folder / "train.sh", DIFFSYNTH)

def place_onetrainer(folder):
    make_pairs(folder)
    (folder / "concept").mkdir()
    for name in "abcd":
        (folder / f"before/{name}.png").rename(folder / f"concept/{name}-condlabel.png")
        for suffix in ("png", "txt"):
            (folder / f"after/{name}.{suffix}").rename(folder / f"concept/{name}.{suffix}")
    write(folder / "concepts.json", CONCEPTS)
    return write(folder / "snow.json", ONETRAINER)

def place_simpletuner(folder):
    make_pairs(folder)
    write(folder / "config/multidatabackend.json", BACKEND)
    return write(folder / "config/config.json", SIMPLETUNER)

def place(name, text, **others):
    """-> a function of a folder, which writes a dataset, these files, and the configuration."""
    def placed(folder):
        make_pairs(folder)
        for other, content in others.items():
            write(folder / other.replace("_", "."), content)
        return write(folder / name, text)
    return placed

# {program: (what writes its files, keys whose values are in the line, keys that say which pictures there are, flags of
# the line)}. Three samples are trained, one is held out.
PROGRAMS = dict(
    aitoolkit=(place("train.yaml", yaml.dump(AITOOLKIT)), """datasets.resolution datasets.num_repeats
        datasets.caption_dropout_rate network.linear network.linear_alpha train.steps train.batch_size
        train.gradient_accumulation train.optimizer train.optimizer_params.weight_decay train.lr train.lr_scheduler
        train.ema_config.use_ema train.ema_config.ema_decay model.name_or_path model.quantize_te model.qtype_te
        sample.sample_every save.save_every""",
        """datasets.folder_path datasets.control_path_1 datasets.mask_path datasets.default_caption datasets.caption_ext
        trigger_word""",
        "--model Qwen/Qwen-Image-Edit-2509 --target_pixels 512x512 768x768 1024x1024 --repeats 2 "
        "--caption_dropout_rate 0.05 --lora_rank 32 --lora_alpha 16 --batch_size 6 --max_steps 3000 "
        "--optimizer bitsandbytes.optim.AdamW8bit --lr 2e-4 --lr_scheduler cosine --weight_decay 0.0001 --ema 0.99 "
        "--quantize_text_encoder fp8 --sample_every 250 --save_every 250"),
    musubi=(place("flags.toml", MUSUBI_FLAGS, dataset_toml=MUSUBI), """resolution batch_size num_repeats
        qwen_image_edit_control_resolution model_version optimizer_type learning_rate lr_scheduler
        gradient_accumulation_steps network_dim max_train_epochs seed fp8_base fp8_vl blocks_to_swap""",
        "caption_extension image_directory control_directory dataset_config",
        "--model Qwen/Qwen-Image-Edit-2509 --target_pixels 960x544 --control_pixels 1024x1024 --repeats 3 "
        "--lora_rank 16 --batch_size 4 --max_steps 48 --optimizer prodigyopt.Prodigy --lr 1 --lr_scheduler constant "
        "--seed 42 --quantize fp8 --quantize_text_encoder fp8 --offload 16"),
    kohya=(place("kohya.toml", KOHYA), """resolution batch_size num_repeats network_dim network_alpha learning_rate
        optimizer_type lr_warmup_steps max_train_steps save_every_n_steps""",
        "caption_extension image_dir conditioning_data_dir",
        "--model Qwen/Qwen-Image-Edit-2509 --target_pixels 512x512 --repeats 10 --lora_rank 64 --lora_alpha 32 "
        "--batch_size 4 --max_steps 1600 --optimizer bitsandbytes.optim.AdamW8bit --lr 0.0001 --warmup_steps 100 "
        "--save_every 400"),
    onetrainer=(place_onetrainer, """concepts.balancing concepts.balancing_strategy base_model_name learning_rate
        learning_rate_scheduler learning_rate_warmup_steps epochs batch_size gradient_accumulation_steps resolution
        clip_grad_norm transformer.weight_dtype text_encoder.weight_dtype text_encoder.dropout_probability lora_rank
        lora_alpha dropout_probability optimizer.optimizer optimizer.weight_decay sample_after sample_after_unit""",
        "concepts.path concepts.enabled concept_file_name",
        "--model Qwen/Qwen-Image-Edit-2511 --target_pixels 512x512 768x768 --repeats 5 --caption_dropout_rate 0.1 "
        "--lora_rank 32 --lora_alpha 1 --lora_dropout 0.05 --batch_size 2 --max_steps 80 --optimizer "
        "bitsandbytes.optim.AdamW8bit --lr 0.0003 --lr_scheduler cosine --warmup_steps 50 --weight_decay 0.02 "
        "--max_grad_norm 1 --quantize fp8 --quantize_text_encoder nf4 --sample_every 20"),
    simpletuner=(place_simpletuner, """datasets.resolution conditioning.resolution datasets.repeats seed lora_rank
        lora_alpha max_train_steps checkpoint_step_interval model_flavour train_batch_size gradient_accumulation_steps
        caption_dropout_probability validation_step_interval learning_rate lr_warmup_steps max_grad_norm
        base_model_precision use_ema ema_decay""", """datasets.id datasets.type datasets.instance_data_dir
        datasets.caption_strategy datasets.conditioning_data conditioning.id conditioning.type
        conditioning.dataset_type conditioning.instance_data_dir conditioning.conditioning_type
        data_backend_config""",
        "--model Qwen/Qwen-Image-Edit-2509 --target_pixels 1024x1024 --control_pixels 768x768 --repeats 2 "
        "--caption_dropout_rate 0.1 --lora_rank 8 --lora_alpha 8 --batch_size 4 --max_steps 1000 --lr 1e-4 "
        "--warmup_steps 100 --max_grad_norm 0.01 --ema 0.99 --seed 42 --quantize int8 --sample_every 100 "
        "--save_every 500"),
    diffsynth=(place_diffsynth, "max_pixels dataset_repeat model_id_with_origin_paths learning_rate num_epochs "
        "lora_rank", "dataset_base_path dataset_metadata_path",
        "--model Qwen/Qwen-Image-Edit-2511 --target_pixels 1048576 --repeats 50 --lora_rank 32 --max_steps 750 --lr "
        "1e-4"))

def keys_of(program):
    """The keys of a program's files, with dots."""
    def keys(value, key=""):
        if isinstance(value, dict) and value:
            return set().union(*[keys(inner, f"{key}.{name}") for name, inner in value.items()])
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return set().union(*[keys(one, key) for one in value])
        return {key.strip(".-").replace(".--", ".")}
    if program == "aitoolkit":
        return keys(PROCESS | dict(job=1, name=1))
    if program == "diffsynth":
        return set(re.findall(r"--(\w+)", DIFFSYNTH.split("\n", 1)[1]))
    if program == "onetrainer":
        return keys(dict(ONETRAINER, concepts=CONCEPTS))
    if program == "simpletuner":
        return keys(SIMPLETUNER) | keys(dict(datasets=BACKEND[0], conditioning=BACKEND[1]))
    return set(re.findall(r"(?m)^(\w+) =", dict(musubi=MUSUBI + MUSUBI_FLAGS, kohya=KOHYA)[program]))

@pytest.mark.parametrize("program", PROGRAMS)
def test_every_setting_is_in_the_line_of_train_py_or_in_the_line_of_what_is_not_taken_over(tmp_path, program):
    """Or it says which pictures there are. train.py's own parser takes its line."""
    make, taken, data, want = PROGRAMS[program]
    out, val = tmp_path / "photos", tmp_path / "photos_val"
    result = run_script("tools/import_data.py", make(tmp_path), out, "--hold_out", 4)
    assert result.status == 0 and not result.err, result.err
    doctor, train = commands(result)
    want = shlex.split(want)
    assert train == [*want[:2], "--data", str(out), "--val_data", str(val), *want[2:]]
    assert doctor[:2] == [str(out), str(val)] and " ".join(doctor[2:]) in " ".join(want)
    line, = [line for line in result.out.splitlines() if "not taken over: " in line]
    rest = re.findall(r"(?:: |, )([\w.]+) = ", line)
    assert sorted(rest + taken.split() + data.split()) == sorted(keys_of(program))
    assert "hf_secret" not in result.out
    assert train_parser(train)[1].data == [str(out)]

def test_a_flag_takes_what_train_py_s_own_parser_takes():
    """So that no value is in the line that it refuses."""
    parser, _ = train_parser([])
    def is_taken(kind, word):
        try:
            kind(word)
        except (ValueError, TypeError, import_configs.argparse.ArgumentTypeError):
            return False
        return True
    actions = {action.dest: action for action in parser._actions}
    words = "-1 0 1 2 0.5 0.99 0.995 1.5 3072 3073 10000 10001 1e6 1e7 1000000000 1e30 1e31 inf nan native 512 64x64"
    for flag, kind in import_configs.TYPES.items():
        if flag != "model":
            for word in [*words.split(), "1000000001", "4294967295", "4294967296", "1e-12", "9" * 30, "True", ""]:
                assert is_taken(kind, word) == is_taken(actions[flag].type, word), (flag, word)
    for flag, known in import_configs.WORDS.items():
        if actions[flag].choices:
            assert set(known.values()) <= set(actions[flag].choices)

VALUES = [ # program, its settings, flags of the line
    ("aitoolkit", {"train.optimizer": "automagic", "train.lr": "fast"}, {}),
    ("aitoolkit", {"train.ema_config.use_ema": False, "train.ema_config.ema_decay": 0.9}, {}),
    ("aitoolkit", {"model.quantize": False, "model.qtype": "qfloat8"}, {}), # as a window leaves it behind
    ("aitoolkit", {"model.quantize": True, "model.qtype": "qfloat8"}, dict(quantize=["fp8"])),
    ("aitoolkit", {"model.name_or_path": "black-forest-labs/FLUX.1-dev"}, {}),
    ("aitoolkit", {"model.name_or_path": "/models/Qwen-Image-Edit-2511"}, dict(model=["/models/Qwen-Image-Edit-2511"])),
    ("aitoolkit", {"train.batch_size": 10**8, "train.gradient_accumulation": 11}, dict(batch_size=["100000000"])),
    ("aitoolkit", {"train.gradient_accumulation_steps": 4}, dict(batch_size=["4"])),
    ("aitoolkit", {"train.steps": 10, "sample.sample_every": 5}, dict(max_steps=["10"])), # no pairs are held out
    ("aitoolkit", {"train.steps": 2000.0, "network.linear": 16, "network.rank": 8},
     dict(max_steps=["2000"], lora_rank=["16"])),
    ("kohya", dict(resolution=[768, 512]), dict(target_pixels=["768x512"])),
    ("kohya", dict(resolution="768,512", fp8_base=False), dict(target_pixels=["768x512"])),
    ("kohya", dict(model_version="edit-2511", blocks_to_swap=0), dict(model=["Qwen/Qwen-Image-Edit-2511"],
                                                                      offload=["0"])),
    ("kohya", dict(max_train_epochs=0, max_train_steps=80, max_grad_norm=0), dict(max_steps=["80"])),
    ("kohya", dict(max_train_epochs=400_000_000), {}), # of four steps each
    ("kohya", dict(max_train_epochs=2, batch_size=3), dict(batch_size=["3"], max_steps=["4"])),
    ("kohya", dict(optimizer_args=["lr=2"], network_args=["a=1"]), {}),
    ("onetrainer", dict(ema="GPU", ema_decay=0.99, save_every=3, save_every_unit="STEP"),
     dict(ema=["0.99"], save_every=["3"])),
    ("onetrainer", dict(save_every=3, sample_after=3, ema_decay=0.99), {}), # no unit, no EMA
    ("onetrainer", {"concepts.balancing": 5, "concepts.balancing_strategy": "SAMPLES"}, {}),
    ("simpletuner", {"datasets.resolution": 1.0}, {}), # megapixels
    ("simpletuner", {"datasets.resolution": "1024", "datasets.repeats": 0.5}, dict(target_pixels=["1024x1024"])),
    ("simpletuner", {"num_train_epochs": 3, "lr": 1, "seed": -1, "": 5, "resolution": []}, dict(max_steps=["12"]))]

@pytest.mark.parametrize("program, values, want", VALUES)
def test_a_value_is_in_the_line_only_if_it_means_the_same_there(program, values, want):
    """Every key whose value is in no flag is named."""
    flags, rest = translate(Settings("a", program, {key: [value] for key, value in values.items()}), samples=4)
    assert flags == want
    named = {text.split(" = ")[0] for text in rest}
    table = [row.split() for row in import_configs.TABLES[program].strip().splitlines()]
    meanings = dict(epochs="max_steps", accumulation="batch_size")
    silent = {key.removeprefix("datasets.") for key in values.keys() - named}
    for key, flag, *condition in table:
        if key in silent:
            assert meanings.get(flag, flag) in flags
            silent -= {key, *[part.split("=")[0] for part in condition]}
    assert not silent

def imported(tmp_path, *flags, sample=(), process=(), **settings):
    """-> (result, the words of train.py's command) for an ai-toolkit yaml with these settings of `train`."""
    make_pairs(tmp_path)
    own = dict(datasets=[dict(folder_path="after", control_path="before")], train=settings, sample=dict(sample))
    text = dict(config=dict(process=[own | dict(process)]))
    result = run_script("tools/import_data.py", write(tmp_path / "a.yaml", text), tmp_path / "out", *flags)
    assert result.status == 0, result.err
    return result, commands(result)[1]

def test_datasets_that_differ_are_not_taken_over(tmp_path):
    """They are one here, so that each number of repeats has no dataset of its own. Sizes are collected."""
    make_pairs(tmp_path / "x")
    first, second = [dict(folder_path=place + "after", control_path=place + "before", num_repeats=n, resolution=size)
                     for place, n, size in (("", 1, 512), ("x/", 3, [512, 768]))]
    alone = {key: first[key] for key in ("folder_path", "control_path")} # without repeats: once
    for one in (first, alone):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        result, train = imported(tmp_path, process=dict(datasets=[one, second]))
        assert "--repeats" not in train and "datasets.num_repeats = " in result.out, result.out
        assert flag_in(train, "--target_pixels") == ["512x512", "768x768"]

def test_settings_without_data_are_printed_and_the_error_says_how_to_import_it(tmp_path):
    """Data that is elsewhere, or that a file outside of the configuration's folder names; then epochs are no steps."""
    write(tmp_path / "other/dataset.toml", MUSUBI)
    for name, change in (("gone", "gone.toml"), ("outside", "../other/dataset.toml")):
        config = write(tmp_path / f"flags/{name}.toml", MUSUBI_FLAGS.replace("dataset.toml", change))
        result = run_script("tools/import_data.py", config, tmp_path / "out")
        assert result.status == 1 and not (tmp_path / "out").exists()
        assert is_one_line(result.errors[0], change.split("/")[-1], "--target DIR --control DIR"), result.errors
        assert flag_in(commands(result)[1], "--lora_rank") == ["16"]
        assert "max_train_epochs = 16" in result.out and flag_in(commands(result)[1], "--max_steps") == ["1600"]
    make_pairs(tmp_path)
    text = (tmp_path / "flags/gone.toml").read_text("utf-8") + MUSUBI.replace("after", "no_such_folder")
    result = run_script("tools/import_data.py", write(tmp_path / "both.toml", text), tmp_path / "out")
    assert result.status == 1 and is_one_line(result.errors[0], "no_such_folder") and commands(result)

def test_a_config_env_of_simpletuner_and_a_command_line_are_read_as_data(tmp_path):
    """No variable is filled in, and a flag that has one is a line; a list of folders finds the settings beside it."""
    make_pairs(tmp_path)
    write(tmp_path / "config/config.env", """export MODEL_TYPE='lora'
export LEARNING_RATE=1e-4
export MAX_NUM_STEPS=800 # in all
MODEL_NAME="$HOME/qwen-image-edit"
export TRAINER_EXTRA_ARGS="--lora_rank=64 --use_ema"
export SEED=$(touch hit)
""")
    write(tmp_path / "config/multidatabackend.json", BACKEND)
    result = run_script("tools/import_data.py", tmp_path / "config/multidatabackend.json", tmp_path / "out")
    train = commands(result)[1]
    got = {flag: flag_in(train, flag) for flag in ("--lr", "--max_steps", "--lora_rank", "--ema", "--seed")}
    assert list(got.values()) == [["1e-4"], ["800"], ["64"], None, None], got
    assert "model_name = $HOME/qwen-image-edit" in result.out and "Qwen/Qwen-Image-Edit-2509" in train
    shell = write(tmp_path / "train.bat.sh", "accelerate launch --mixed_precision bf16 src/qwen_image_train_network.py "
                  "^\n --network_dim 8 ^\n --optimizer_args \"a=1\" \"b=(1,2)\" --learning_rate=3e-4 && echo done\n")
    result = run_script("tools/import_data.py", shell, tmp_path / "second")
    train = commands(result)[1]
    assert result.status == 1 and "optimizer_args = ['a=1', 'b=(1,2)']" in result.out
    assert flag_in(train, "--lora_rank") == ["8"] and flag_in(train, "--lr") == ["3e-4"]
    assert "dataset_base_path" not in result.out and "echo" not in result.out

TEXT = "a\x1b[2J\x07\u202e\nerror: planted"
HOSTILE = [TEXT, "-x", "--data", "$(touch hit)", "`hit`", "'; touch hit #", "x" * 10**4, [["a"] * 30] * 30,
           {"a": {"b": [1]}}, 1e308, float("inf"), float("nan"), -1, 10**40, True, [TEXT], ["--resume"], [None],
           "\ud800", "evil.Opt", 0, "0" * 999 + "1"]

@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: f"{value!r:.20}")
def test_a_strangers_value_stays_data(tmp_path, value):
    """Whatever a setting holds: each line is short and shown, the command is one, and train.py takes it."""
    process = yaml.load(yaml.dump(PROCESS), yaml.SafeLoader)
    def spoiled(inner):
        if isinstance(inner, dict):
            return {key: spoiled(one) for key, one in inner.items()} | {f"k{TEXT}": value}
        return value
    spoil = {name: spoiled(process[name]) for name in ("network", "save", "train", "model")}
    data = process["datasets"][0] | dict(num_repeats=value, resolution=value, caption_dropout_rate=value)
    result, train = imported(tmp_path, process=spoil | dict(datasets=[data], sample=spoiled(dict(process["sample"]))))
    lines = result.out.splitlines()
    assert not any(map(CONTROLS.search, lines)) and not any(line.startswith("error") for line in lines)
    assert max(map(len, lines)) < 20_000 and not list(tmp_path.rglob("hit"))
    _, args = train_parser(train)
    assert not args.resume and args.data == [str(tmp_path / "out")] and "evil" not in args.optimizer

@pytest.mark.parametrize("program", import_configs.TABLES)
def test_a_strangers_value_is_taken_over_or_named(program):
    """Under each key of each program."""
    for row in import_configs.TABLES[program].strip().splitlines():
        key, flag, *condition = row.split()
        for value in HOSTILE:
            values = {key: [value]} | {part.split("=")[0]: [part.split("=")[1].split("|")[0]] for part in condition}
            flags, rest = translate(Settings("a", program, values), samples=4, held_out=True)
            assert bool(flags) != any(text.startswith(f"{key} = ") for text in rest)
            assert all(len(word) < 400 and not CONTROLS.search(word) for words in flags.values() for word in words)

def test_a_file_with_too_many_settings_is_one_line(tmp_path):
    """Each of them would be compared with each row of a table."""
    make_pairs(tmp_path)
    text = "".join(f"a{n} = 1\n" for n in range(6000)) + MUSUBI
    result = run_script("tools/import_data.py", write(tmp_path / "a.toml", text), tmp_path / "out")
    assert result.status == 1 and is_one_line(result.errors[0], "settings") and len(result.out) < 500

def test_a_default_caption_is_the_prompt_of_targets_without_one(tmp_path):
    """--prompt comes before it."""
    make_pairs(tmp_path)
    (tmp_path / "after/a.txt").unlink()
    data = [dict(folder_path="after", control_path="before", default_caption="a house")]
    for name, flags, want in (("one", [], "a house"), ("two", ["--prompt", "so"], "so")):
        config = write(tmp_path / "a.yaml", dict(config=dict(process=[dict(datasets=data)])))
        result = run_script("tools/import_data.py", config, tmp_path / name, *flags)
        samples, _ = read_dataset(tmp_path / name)
        assert result.status == 0 and [s.prompts for s in samples] == [[want], *[["make it snow"]] * 3], result.err
