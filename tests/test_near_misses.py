"""
Near misses: another trainer's name, a misspelt flag, choice or path, a word without its flag: one line
says what to give.

$ python -m pytest -q tests/test_near_misses.py    # 20 seconds
"""
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import common
from library.cli import command_line
from library.lora import lora_paths
from library.models import environment
from tests.harness import (HERE, add_item, is_one_line, lora_file, lora_tensors, paint_picture, run_script,
                           save)

def answer(script, *flags, status):
    """The one line that this command ends with."""
    result = run_script(script, *flags)
    assert result.status == status and len(result.err.splitlines()) == 1, result.err
    assert is_one_line(result.errors[0])
    return result.errors[0]

# ---- the table of other trainers' names ------------------------------------------------------------------------------

SCRIPTS = ["train.py", "predict.py", "cache.py", "tools/doctor.py", "tools/import_data.py", "tools/convert_lora.py"]
ROWS = [row.split(": ", 1) for row in command_line.OTHER_NAMES.strip().splitlines()]

@pytest.fixture(scope="module")
def flags_of():
    """-> {script: its flags}, by -h."""
    return {script: set(re.findall(r"(?m)(?:^  |, )(--[\w-]+)", run_script(script, "-h").out)) for script in SCRIPTS}

@pytest.mark.parametrize("names, ours", [row for row in ROWS if "=" not in row[0]])
def test_another_trainers_name_is_answered_with_ours(flags_of, names, ours):
    """By a script that has our flag, where it stands for nothing else; and no name is a flag of all of these."""
    having = [script for script in SCRIPTS if not ours.startswith("--") or ours.split()[0] in flags_of[script]]
    answered = set()
    for script in having:
        unknown = [name for name in names.split() if f"--{name}" not in flags_of[script]]
        if unknown:
            line = answer(script, *[f"--{name}" for name in unknown], "x", status=2)
            for name in unknown:
                assert re.search(rf"--{name}: unknown; (here )?([^;]* or )?{re.escape(ours)}", line), line
        answered.update(unknown)
    assert answered == set(names.split()), having

@pytest.mark.parametrize("names, ours", [row for row in ROWS if "=" in row[0]])
def test_another_trainers_word_for_a_value_is_answered_with_ours(flags_of, names, ours):
    for name in names.split():
        flag, value = f"--{name}".split("=")
        script = next(script for script in SCRIPTS if flag in flags_of[script])
        assert answer(script, flag, *value.split(), status=2).endswith(f"; give {ours}")

def test_of_several_rows_those_count_whose_flag_the_script_has():
    for script, ours in (("train.py", "--max_steps or --num_inference_steps"), ("predict.py", "--num_inference_steps")):
        assert answer(script, "--steps", 3, status=2) == f"error: --steps: unknown; here {ours}"

# ---- the first hour: what is typed, and what the one line must hold to help ------------------------------------------

RUN = "out/tiny-photos-001"
PHOTO = "predict.py --image photo.jpg --prompt x " # a command to which a slip is added
PAIRS = "train.py --data photos "
LONG = "make it warm, " * 30
MISSES = [
    # another spelling of a flag; a place that was given as a flag
    ("train.py --lora-rank=3", "--lora-rank: unknown; here --lora_rank"), ("train.py --modle x", "here --model"),
    (PAIRS + "-max_steps 5", "here --max_steps"), (PAIRS + "--Max_Steps 5", "here --max_steps"),
    ("train.py \u2013data photos", "here --data"), ("predict.py --image photo.jpg \u2014prompt x", "here --prompt"),
    ("predict.py -i photo.jpg -p x", "-i: unknown; here --image; -p: unknown; here --prompt"),
    (PAIRS + "--network_dim 3 --foo", "here --lora_rank; --foo: unknown; see train.py -h"),
    (PAIRS + "--network_dim 3 make it", "error: --network_dim: unknown; here --lora_rank"),
    ("cache.py --zzz", "--zzz: unknown; see cache.py -h"), ("tools/gpu_check.py --row int8", "here --rows"),
    ("tools/doctor.py --data photos", "--data: unknown; give its value alone, without a flag"),
    # a word without its flag
    ("predict.py photo.jpg 'make it warm'", "'photo.jpg make it warm': belongs to no flag; put a text in quotes"),
    ("predict.py --image photo.jpg --prompt make it warm", "'it warm': belongs to no flag; put a text in quotes"),
    ("train.py photos", "'photos': belongs to no flag"), (PAIRS + "--warmup_steps 5 -1", "'-1': belongs to no flag"),
    ("train.py --seed 1 ''", "'': belongs to no flag"), (f"train.py '{LONG}'", "put a text in quotes"),
    ("train.py --data a --data=b", "put all values behind"),
    # no value, an empty one, one that is too long
    (PAIRS + "--quantize", "expected one argument; give one of none, int8, fp8, nf4"),
    ("train.py --data", "expected at least one argument; see train.py -h"),
    ("predict.py --image '' --prompt x", "--image: empty; give a name, or"), ("train.py --model=", "--model: empty"),
    ("cache.py --data x ''", "--data: empty"), ("tools/page.py ''", "run: empty"),
    (f"predict.py --prompt x --image '{LONG}'", "--image: longer than a file's name can be; shorten it"),
    (PHOTO + f"--lora '{LONG}'", "--lora: longer than"), (f"tools/doctor.py '{LONG}'", "data: longer than"),
    # choices, numbers and areas
    (PAIRS + "--dtype bf16", "--dtype: invalid choice: 'bf16'; give bfloat16"),
    (PAIRS + "--timestep_sampling qwenshift", "give qwen_shift"), (PAIRS + "--quantize int9", "give int8"),
    (PAIRS + "--lr_scheduler x", "give one of constant, cosine, linear"),
    (f"tools/convert_lora.py {RUN} --to comfy --out x.safetensors", "give comfyui"),
    ("tools/gpu_check.py --rows x", "give one of claims, packed, padded, kept"),
    (PAIRS + "--lr 0,0001", "--lr: invalid float value: '0,0001'; see train.py -h"),
    (PHOTO + "--seed -1", "give 0 to 4294967295"), (PAIRS + "--lora_rank 100000", "give 1 to 3072"),
    (PAIRS + "--max_grad_norm 0", "0 is out of range"), (PAIRS + "--lora_args use_rslora", "as in use_rslora=true"),
    ("train.py --target_pixels 512", "'512' is no area; give 1024x1024"),
    ("train.py --target_pixels 1000000x1000000", "is no area; give 1024x1024"),
    (PHOTO + "--out edited", "'edited' is no .png name; give one, or --out_dir for a folder"),
    (PHOTO + "--device gpu", "only cuda and cpu"), (PAIRS + "--optimizer AdamW8bit", "torch.optim.AdamW"),
    (PAIRS + "--cache_dir photos", "--cache_dir: photos is a dataset; give another folder"),
    # what belongs together
    ("predict.py", "give --image with --prompt, or --jobs"), ("predict.py --image photo.jpg", "give --image with --pr"),
    ("predict.py --prompt x", "give --image with --prompt"), ("tools/doctor.py", "required: data; see doctor.py -h"),
    # names of files and folders: the nearest that is there
    ("predict.py --image photo.JPG --prompt x", "give photo.jpg"),
    ("predict.py --image photo.png --prompt x", "give photo.jpg"),
    ("predict.py --image Photos.jpg --prompt x", "give photo.jpg"),
    ("predict.py --image dog.png --prompt x", "no file of that name; check the name"),
    ("predict.py --image photos --prompt x", "a dataset, with its targets; give photos/control, or --jobs photos"),
    ("predict.py --jobs jobs.json", "give jobs.jsonl"), ("predict.py --jobs job.jsonl", "give jobs.jsonl"),
    (PHOTO + "--lora out/tiny-photos-01", f"give {RUN}"), (PHOTO + "--lora tiny-photos-001", f"give {RUN}"),
    (PHOTO + "--lora tiny-photos", f"give {RUN}"), (PHOTO + "--lora out", f"give {RUN}"),
    (PHOTO + f"--lora {RUN}/lora.safetensors", f"give {RUN}"), (PHOTO + "--lora out/dogs-1", "user/repo of the hub"),
    (PHOTO + f"--lora {RUN}/checkpoint-200", f"give {RUN}/checkpoint-000200"),
    (PHOTO + "--lora sdxl.safetensors", "looks like a UNet (Stable Diffusion, SDXL)"),
    (PAIRS + "--pretrained_lora out/tiny-photos-01", f"give {RUN}"),
    ("tools/convert_lora.py tiny-photos-001 --to comfyui --out x.safetensors", f"give {RUN}"),
    ("tools/page.py tiny-photos-001", f"give {RUN}"), ("tools/page.py out/tiny-photos-01", f"give {RUN}"),
    ("tools/page.py out", f"give {RUN}"), (f"tools/page.py {RUN}/log.jsonl", f"give {RUN}"),
    ("train.py --data Photos", "give photos"), ("train.py --data photos/target", "give photos"),
    ("cache.py --data photo_val", "photo_val: does not exist; give photos_val"),
    (PAIRS + "--val_data photoz", "photoz: does not exist; give photos"),
    ("tools/import_data.py photoz x", "give photos"), ("tools/import_data.py x --target photoz --alone", "give photos"),
    ("cache.py --data no/photo", "does not exist; check the name"), ("train.py --data photo.jpg", "is no dataset"),
    ("train.py --data photos/target/a.png", "give photos"),
    ("tools/import_data.py src out --mask c --control a b", "name the folders: OUT --target DIR --control DIR"),
    ("tools/import_data.py src out --target t --control a", "src: "),
    ("tools/doctor.py photo", "give photos"), ("train.py --data before after", "tools/import_data.py converts"),
    ("tools/doctor.py config.yaml", "tools/import_data.py converts others"),
    ("cache.py --data photos photos/../photos", "--data: names a dataset twice"),
    ("tools/import_data.py config.yml pairs", "give config.yaml"), ("tools/prune.py encode", "give encoded"),
    (f"tools/prune.py {RUN}", "not a cache folder"),
    ("tools/measure.py edited photos", "python predict.py --lora RUN --jobs photos --out_dir edited"),
    (f"tools/convert_lora.py {RUN} --to comfyui --out x", "give x.safetensors"),
    (f"tools/page.py {RUN} --out page", "page/index.html"),
    # models
    (PHOTO + "--transformer qwen_fp8.safetensors", "no file of that name; give qwen-fp8.safetensors"),
    (PHOTO + f"--model {RUN}", "--model wants a complete"),
]

@pytest.fixture(scope="module")
def first_hour(tmp_path_factory):
    """-> a folder as after a first hour: pairs, pictures, another trainer's config, a run with a checkpoint."""
    home = tmp_path_factory.mktemp("home")
    for name in ("photos", "photos_val"):
        add_item(home / name, "a")
    for name in ("photo.jpg", "cat.png", "before/a.png", "after/a.png"):
        save(paint_picture(), home / name)
    for place in (home / RUN, home / RUN / "checkpoint-000200"):
        place.mkdir(parents=True)
        lora_file(place, lora_tensors())
    for name in (f"{RUN}/log.jsonl", "config.yaml", "jobs.jsonl", "qwen-fp8.safetensors"):
        (home / name).write_text("{}\n", "utf-8")
    (home / "encoded").mkdir()
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q.lora_down.weight"
    save_file({name: torch.zeros(4, 4)}, home / "sdxl.safetensors")
    return home

@pytest.mark.parametrize("typed, helps", MISSES)
def test_a_near_miss_is_one_line_that_says_what_to_type(first_hour, typed, helps):
    """As a beginner types it; nothing is trained, drawn or written."""
    before = sorted(first_hour.rglob("*"))
    result = run_script(*shlex.split(typed), folder=first_hour)
    assert result.status and len(result.err.splitlines()) == 1 and is_one_line(result.errors[0], helps), result.err
    assert sorted(path for path in first_hour.rglob("*") if "encoded" not in path.parts) == [
        path for path in before if "encoded" not in path.parts]

# flags of the script, and at the end a value that it never takes
ODD = {
    "train.py": "--data --lr --resume --target_pixels --quantize --lora_args --repeats --offload --optimizer --seed zz",
    "predict.py": "--image --prompt --out --out_dir --lora --scales --jobs --sigmas --transformer --height zz",
    "tools/doctor.py": "--out --mask --align --target_pixels zz", "tools/convert_lora.py": "--to --scale --rank zz"}
WORDS = ["", "x", "photo.jpg", "photos", RUN, "-1", "0,5", "512", "--", "-", "=", "a=b", "a b", "\u201cq\u201d", "\\",
         "*", "~", "'", "1,000", "%", "10^", "\udcff", "--rank", "--output", "--resolution", "--run", "--nope", "-i",
         "--=", "--x=1", "--lora", "--dataset", "--fp8_base", "--data=photos", "--n"]

@pytest.mark.parametrize("script", ODD)
def test_no_order_of_odd_words_ends_in_a_traceback(first_hour, script):
    """One line for each, whatever is misspelt at the same time."""
    rng, (*flags, value) = random.Random(1), ODD[script].split()
    for _ in range(30):
        words = rng.choices([*flags, *WORDS], k=rng.randint(0, 8))
        result = run_script(script, *words, flags[-1], value, folder=first_hour)
        assert result.status in (1, 2) and len(result.err.splitlines()) == 1, (words, result.err)
        assert is_one_line(result.errors[0]), (words, result.err)

# ---- flags -----------------------------------------------------------------------------------------------------------

def test_areas_have_limits_that_are_allowed():
    assert command_line.pixels("32x32") == 1024 and command_line.pixels("12500*12800") == common.MAX_PIXELS
    assert command_line.pixels("native") == "native" and command_line.pixels("4097") == 4097

def test_no_reason_is_cut_within_a_word():
    """A line of CUDA's may be long; what it says next is about other things."""
    error = RuntimeError("Found no NVIDIA driver on your system. " * 20 + "\nCUDA kernel errors")
    for line in (common.first_line(error), common.first_words(error)):
        assert set(line.split()) <= {*str(error).split(), "[...]"} and "kernel" not in line and 200 < len(line) <= 300

# ---- many lines ------------------------------------------------------------------------------------------------------

def test_lines_that_differ_only_in_the_file_are_one(tmp_path):
    for n in range(25):
        add_item(tmp_path / "photos", f"IMG_{n:02}")
        (tmp_path / f"photos/target/IMG_{n:02}.txt").unlink()
    save(paint_picture(), tmp_path / "photos/target/alone.png")
    for result in (run_script("train.py", "--data", tmp_path / "photos"),
                   run_script("cache.py", "--data", tmp_path / "photos", "--cache_dir", tmp_path / "cache")):
        folded, alone = result.errors
        assert "IMG_00.png: no caption; expected" in folded and "; and 24 others likewise: IMG_01.png, IMG_02" in folded
        assert "alone.png: no control" in alone
    result = run_script("tools/import_data.py", tmp_path / "out", "--target", tmp_path / "photos/target", "--control",
                        tmp_path / "photos/control")
    assert len(result.errors) == 2 and "and 24 others likewise" in result.err

# ---- at once ---------------------------------------------------------------------------------------------------------

SLOW = """import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as e:
        status = e.code
    print(bool(status), *{"torch", "diffusers", "transformers", "peft", "huggingface_hub"} & set(sys.modules))
"""
NO_CARD = ["train.py --data photos --model Qwen/Qwen-Image-Edit-2512", "tools/gpu_check.py",
           "cache.py --data photos --device cuda:1", "train.py --device cuda", "predict.py --device cuda"]
AT_ONCE = [
    "predict.py", "predict.py --input x", "train.py --data photo", "cache.py --dtype bf16", "train.py --model=",
    "train.py --target_pixels 512", "train.py photos", "tools/doctor.py photo",
    "predict.py --image gone.jpg --prompt x", "predict.py --image empty/text.jpg --prompt x",
    "predict.py --image photos/target/a.png gone.jpg --prompt x", "predict.py --jobs gone.jsonl",
    "predict.py --jobs bad.jsonl", "predict.py --jobs empty", "predict.py --image empty --prompt x",
    "predict.py --image photos --prompt x --out_dir photos/out", "predict.py --image photos empty --prompt x",
    "predict.py --image photo.jpg --prompt=", "predict.py --image photo.jpg --prompt x --device gpu",
    "predict.py --image photo.jpg --prompt x --lora out/tiny-b", "tools/prune.py cach", "tools/page.py out/tiny-a",
    "tools/convert_lora.py out/tiny-b --to comfyui --out x.safetensors", "tools/measure.py photos photo"]

TOOLS = "bench convert_lora doctor gpu_check import_data lean_train measure page prune".split()

def test_a_near_miss_imports_nothing_slow(first_hour, tmp_path):
    """Also where a run of tiny is there, whose LoRA predict.py would take. Among what is answered at once is a list
    with bad lines only, a folder whose pictures cannot be read, and what a machine without a card cannot do."""
    home = shutil.copytree(first_hour, tmp_path / "home")
    save(paint_picture(), home / "out/tiny-a-001" / lora_paths.LORA_FILE, format="PNG")
    (home / "empty").mkdir()
    (home / "empty/text.jpg").write_text("x", "utf-8")
    (home / "bad.jsonl").write_text('{"image": "photo.jpg"}\n{"image": "gone.jpg", "prompt": "x"}\n', "utf-8")
    typos = [f"tools/{tool}.py x y --nosuch 3" for tool in TOOLS]
    commands = AT_ONCE + typos + (NO_CARD if environment.no_card() else [])
    words = [[str(HERE / script), *flags] for script, *flags in map(str.split, commands)]
    env = os.environ | dict(PYTHONPATH=str(HERE))
    result = subprocess.run([sys.executable, "-c", SLOW, json.dumps(words)], cwd=home, env=env, capture_output=True,
                            encoding="utf-8")
    found = dict(zip(commands, result.stdout.splitlines()))
    assert found == dict.fromkeys(commands, "True"), (found, result.stderr)
