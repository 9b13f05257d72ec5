"""
A name on Linux is bytes, and some are no UTF-8: those of old archives and network disks. Every flag that takes a path
takes such a one, or refuses it in one line before anything slow; what comes out of it can be read, continued, pasted.
"""
import json
import os
import re
import shutil
import sys
from types import SimpleNamespace
from urllib.parse import unquote_to_bytes

import pytest
import safetensors.torch
import torch
from PIL import Image

from common import is_utf8, printable, shell_command
from library.data import stat_cache
from library.data.index_file import read_index
from library.files.tensor_files import open_tensors
from library.lora import lora_paths
from tests.harness import (EXACT, TINY, Reader, add_item, assert_same_run, copy_model, is_one_line, lora_file,
                           lora_tensors, paste, run_script, works)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names are UTF-8 here")

BYTES = os.fsdecode(b"caf\xe9")
FLAGS = ["--device", "cpu", *EXACT]
FEW = ["--max_steps", 1, "--batch_size", 1, "--lora_rank", 4, "--num_inference_steps", 2]

def make_tree(root):
    """Everything that a flag may lead to."""
    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 0, 32, 32))
    add_item(add_item(root / "data", "good", mask=mask), BYTES)
    (root / "jobs.jsonl").write_text(json.dumps(dict(image=[f"data/control/{BYTES}.png"], prompt="snow")), "utf-8")
    lora_file(root, lora_tensors(rank=4), **{"transformer.r": 4, "transformer.lora_alpha": 4})
    copy_model(root / "model")
    shutil.copy(TINY / "transformer/diffusion_pytorch_model.safetensors", root / "one.safetensors")
    tensors = dict(pixel_latent=torch.rand(1, 6, 64), control_latent=torch.rand(1, 6, 64), img_shapes=torch.tensor(
        [[[1, 2, 3], [1, 2, 3]]]), prompt_embed=torch.rand(1, 4, 64), prompt_embeds_mask=torch.ones(1, 4))
    (root / "old").mkdir()
    safetensors.torch.save_file(tensors, root / "old/a.safetensors")
    (root / "table.json").write_text(json.dumps([dict(target=f"data/target/{BYTES}.png", prompt="snow",
                                                      control=f"data/control/{BYTES}.png")]), encoding="utf-8")

@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """Two folders with the same in them: one with a usual name, one with such a one; each has a run, too."""
    top = tmp_path_factory.mktemp("trees")
    make_tree(top / "plain")
    flags = ["--data", top / "plain/data", "--val_data", top / "plain/data", "--cache_dir", top / "plain/cache"]
    assert run_script("train.py", *flags, "--out_dir", top / "plain/run", *FEW, *FLAGS).status == 0
    assert run_script("predict.py", "--jobs", top / "plain/data", "--cache_dir", top / "plain/cache", "--out_dir",
                      top / "plain/drawn", "--num_inference_steps", 2, *FLAGS).status == 0
    shutil.copytree(top / "plain", top / BYTES)
    return SimpleNamespace(plain=top / "plain", strange=top / BYTES)

CPU = "--device cpu --dtype float32"
TRAIN = f"--data @data --cache_dir @cache --out_dir >run --max_steps 1 --batch_size 1 {CPU}"
DRAW = f"--cache_dir @cache --num_inference_steps 2 {CPU}"
# script -> commands. A word behind @ is a path in a tree, one behind > is a new one
WORDS = {
    "cache.py": [f"--data @data --val_data @data --cache_dir >cache --model @model {CPU}"],
    "train.py": [f"{TRAIN} --val_data @data --num_inference_steps 2 --model @model --transformer @one.safetensors "
                 f"--sample_lora @{lora_paths.LORA_FILE}",
                 f"{TRAIN} --val_data --pretrained_lora @{lora_paths.LORA_FILE}",
                 f"--data @cache/tiny-data.json --val_data --cache_dir >cache --out_dir >run --max_steps 1 {CPU}"],
    "predict.py": [f"--image @data/control/good.png --prompt snow --out >new.png --model @model {DRAW} "
                   f"--transformer @one.safetensors --lora @{lora_paths.LORA_FILE}",
                   f"--image @data/control --prompt snow --out_dir >results {DRAW}",
                   f"--jobs @jobs.jsonl --out_dir >results --transformer @model --lora @run {DRAW}"],
    "tools/lean_train.py": [f"{TRAIN} --model @model --transformer @one.safetensors"],
    "tools/doctor.py": ["@data --out >report --align >aligned"],
    "tools/page.py": ["@run --out >page.html"],
    "tools/prune.py": ["@cache"],
    "tools/measure.py": ["@drawn @data --model @model"],
    "tools/convert_lora.py": [f"@{lora_paths.LORA_FILE} --to comfyui --out >comfy.safetensors",
                              "@run --to diffusers --out >ours.safetensors",
                              f"@{lora_paths.LORA_FILE} --to model --model @model --out >merged"],
    "tools/import_data.py": [">imported --target @data/target --control @data/control --mask @data/mask",
                             "@data >imported", "@table.json >imported", "@old >imported"]}
TRIES = [(script, number, place) for script, lines in WORDS.items() for number, line in enumerate(lines)
         for place, word in enumerate(line.split()) if word[0] in "@>"]

def is_refused(flag, path):
    """Whether safetensors has to open, or to write, what lies below this path."""
    return (flag, path) in {("--model", "@model"), ("--transformer", "@model"), ("--out", ">merged")}

@pytest.mark.parametrize("script, number, place", TRIES)
def test_a_path_of_any_bytes_works_or_is_one_line_at_the_start(trees, tmp_path, script, number, place):
    """One path of a command at a time; all others are usual ones."""
    line, words = WORDS[script][number].split(), []
    for n, word in enumerate(line):
        root = trees.strange if n == place else trees.plain
        if word[0] == ">":
            root = tmp_path / (BYTES if n == place else "plain")
        words.append(root / word[1:] if word[0] in "@>" else word)
    result = run_script(script, *words)
    made = [path for path in (tmp_path / BYTES).rglob("*") if path.is_file()]
    if is_refused(line[place - 1], line[place]):
        assert result.status == 1 and is_one_line(result.errors[0], "caf\\xe9", "no UTF-8"), result.err
        assert len(result.errors) == 1 and not re.search("encoding|step 1|LoRA: ", result.out) and not made
    else:
        assert result.status == 0, result.err
        assert made or line[place][0] != ">"

# ---- what comes out of such names ------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A training with such a byte in each name: of the dataset, a folder in it, a pair, the cache, the run."""
    top = tmp_path_factory.mktemp("work")
    data = add_item(add_item(top / BYTES, f"{BYTES}/{BYTES}"), "good")
    flags = ["--data", data, "--val_data", data, "--cache_dir", top / f"cache-{BYTES}", "--out_dir",
             top / f"run-{BYTES}", "--mask", "auto", "--mask_background_weight", 0, "--batch_size", 1, "--val_pictures",
             1, "--num_inference_steps", 2, "--lr_scheduler", "constant", *FLAGS]
    result = works("train.py", *flags, "--max_steps", 1)
    return SimpleNamespace(data=data, flags=flags, run=flags[7], cache=flags[5], out=result.out)

def test_the_log_the_index_and_the_lists_have_the_bytes_again(work):
    """As what they name must be found."""
    begin = json.loads((work.run / "log.jsonl").read_text("utf-8").splitlines()[0])
    assert begin["flags"]["data"] == [str(work.data)] and str(work.run) in begin["command"]
    samples = {}
    for index in work.cache.glob("*.json"):
        samples |= {sample.name: sample for sample in read_index(index)[0]}
    assert set(samples) == {f"{BYTES}/{BYTES}", "good"}
    assert all(os.path.isfile(path) for sample in samples.values() for path in sample.contents)
    entry = {str(next(iter(samples["good"].contents))): [[1, 2, 3, 4], [[64, 64], "0" * 64]]}
    stat_cache.write_memory(work.cache / "pictures.txt", entry)
    assert stat_cache.read_memory(work.cache / "pictures.txt") == entry

def test_its_commands_can_be_pasted_and_its_page_opens(work):
    """Those of the last lines, and that of a contact sheet; links of the page lead to files."""
    lines = [line for line in work.out.splitlines() if line.startswith("  python ")]
    assert [str(work.run) in paste(line) for line in lines] == [True, True]
    with Image.open(next((work.run / "samples").glob("step_*.png"))) as sheet:
        assert paste(sheet.info["command"])[2:] == list(map(str, [*work.flags, "--max_steps", 1]))
    words = paste(lines[1])
    assert run_script(*words[1:]).status == 0 and words[2:] == [str(work.run)]
    page = Reader(work.run / "index.html")
    links = [picture["src"] for picture in page.pictures if not picture["src"].startswith("data:")]
    assert links and all((work.run / os.fsdecode(unquote_to_bytes(link))).is_file() for link in links)
    assert any("caf\\xe9" in text for text in page.texts["h1"])

def test_a_run_of_such_a_name_continues_as_one_of_a_usual_name(work, tmp_path):
    """To the bit."""
    flags = list(work.flags)
    flags[7] = tmp_path / "run"
    assert run_script("train.py", *flags, "--max_steps", 2).status == 0
    result = run_script("train.py", *work.flags, "--max_steps", 2, "--resume")
    assert result.status == 0 and "continues after step 1" in result.out, result.err
    assert_same_run(work.run, tmp_path / "run")

def test_a_tracker_that_takes_no_such_name_says_so(trees, tmp_path):
    pytest.importorskip("tensorboard")
    result = run_script("train.py", "--data", trees.plain / "data", "--cache_dir", tmp_path / "cache", "--out_dir",
                        tmp_path / BYTES, "--tracker", "tensorboard", *FEW, *FLAGS)
    assert result.status == 1 and is_one_line(result.errors[-1], "--tracker tensorboard", "leave the flag out")

def test_one_way_to_show_a_byte_and_one_to_paste_it():
    """Half a character that is no byte of a name, as only JSON can have it, is shown, and cannot be pasted."""
    assert printable(f"a{BYTES}\ud800") == "acaf\\xe9\\ud800" and paste(shell_command([BYTES])) == [BYTES]
    assert is_utf8("caf\xe9") and not is_utf8(BYTES)
    with pytest.raises(ValueError):
        shell_command(["\ud800"])

def test_the_way_around_reads_what_safetensors_refuses(tmp_path):
    """Also behind the file's end of use, as a mapping stays."""
    path = tmp_path / f"{BYTES}.safetensors"
    path.write_bytes(safetensors.torch.save({"a": torch.arange(3)}))
    with pytest.raises(Exception, match="UTF-8"):
        safetensors.safe_open(path, "pt")
    assert open_tensors(path).get_tensor("a").tolist() == [0, 1, 2]
