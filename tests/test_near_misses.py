"""
Near misses: what is nearly right is answered at once with what is probably meant.

$ python -m pytest -q tests/test_near_misses.py    # 10 seconds
"""
import os
import subprocess
import sys

import pytest

import common
from extras import hints
from tests.harness import HERE, add_item, is_one_line, paint_picture, run_script, save

def answer(script, *flags, status):
    """The one line that this command ends with."""
    result = run_script(script, *flags)
    assert result.status == status and len(result.err.splitlines()) == 1, result.err
    assert is_one_line(result.errors[0])
    return result.errors[0]

# ---- folders ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def two(tmp_path):
    """-> a folder with the datasets photos and photos_val."""
    for name in ("photos", "photos_val"):
        add_item(tmp_path / name, "a")
    save(paint_picture(), tmp_path / "photo.jpg")
    return tmp_path

@pytest.mark.parametrize("typed, meant", [("photo", "photos"), ("photo_val", "photos_val"), ("photoz", "photos")])
def test_a_dataset_that_is_not_there_is_answered_with_the_nearest_one(two, typed, meant):
    for script, *flags in (["train.py", "--data"], ["train.py", "--data", two / "photos", "--val_data"],
                           ["cache.py", "--data"], ["tools/doctor.py"]):
        assert f"{two / typed}: does not exist; give {two / meant}" in answer(script, *flags, two / typed, status=1)
    assert f"does not exist; give {two / meant}" in answer("tools/import_data.py", two / typed, two / "x", status=1)
    line = answer("tools/import_data.py", two / "x", "--target", two / typed, "--alone", status=1)
    assert f"give {two / meant}" in line

def test_what_is_near_nothing_is_to_be_checked(two):
    for name in ("cats", "photo.jsonl", "no/photo"):
        assert "does not exist; check the name" in answer("cache.py", "--data", two / name, status=1)

def test_a_part_of_a_dataset_is_answered_with_the_dataset(two):
    for part in ("target", "control", "target/a.png"):
        assert f"give {two / 'photos'}" in answer("train.py", "--data", two / "photos" / part, status=1)
    assert "a picture" in answer("train.py", "--data", two / "photos/target/a.png", status=1)
    line = answer("train.py", "--data", two / "photo.jpg", status=1)
    assert "a picture" in line and "give" not in line and common.LAYOUT in line
    (two / "other/target").mkdir(parents=True) # a name alone makes no dataset
    assert f"give {two / 'other'}" not in answer("train.py", "--data", two / "other/target", status=1)

# ---- flags -----------------------------------------------------------------------------------------------------------

def test_areas_have_limits_that_are_allowed():
    assert common.pixels("32x32") == 1024 and common.pixels("12500*12800") == common.MAX_PIXELS
    assert common.pixels("native") == "native" and common.pixels("4097") == 4097

def test_a_model_that_is_here_needs_no_user(tmp_path, monkeypatch):
    """Nor does a hub's, or one file of a transformer."""
    (tmp_path / "Qwen-Image-Edit").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen-Image-Edit", "tiny", "Qwen/Qwen-Image-Edit", "qwen-image-edit-2511.gguf", "gpt2"):
        assert hints.near_model(name) is None, name

def test_predict_without_flags_prints_how_it_is_used():
    result = run_script("predict.py")
    lines = result.err.splitlines()
    assert result.status == 2 and len(lines) == 5 and not result.out
    assert lines[0].startswith("usage: ") and "-h" in lines[0]
    assert all(line.startswith("$ python predict.py ") for line in lines[1:])
    assert any(line.startswith("$ python predict.py --image") or " --image " in line for line in lines)

def test_import_data_needs_no_source_beside_control(tmp_path):
    """The line is the command that is meant, also in another order."""
    for flags in (["src", "out", "--control", "a", "b"], ["src", "out", "--mask", "c", "--control", "a", "b"]):
        line = answer("tools/import_data.py", *flags, status=2)
        assert "there is no SOURCE" in line and "import_data.py out --target src --control a b" in line
    line = answer("tools/import_data.py", "src", "out", "--target", "t", "--control", "a", status=2)
    assert "src: " in line and "--target" in line and "put a text in quotes" not in line

# ---- warnings of sizes -----------------------------------------------------------------------------------------------

def warned(tmp_path, size, *flags):
    """The warnings of predict.py for a picture of this size."""
    save(paint_picture(size), tmp_path / "p.png")
    result = run_script("predict.py", "--image", tmp_path / "p.png", "--prompt", "x", "--out_dir", tmp_path / "o",
                        "--num_inference_steps", 2, "--true_cfg_scale", 1, *flags)
    assert result.status == 0, result.err
    return [line for line in result.err.splitlines() if line.startswith("warning: ")]

def test_both_sides_of_another_shape_are_a_warning(tmp_path):
    line, = warned(tmp_path, (96, 64), "--width", 64, "--height", 64)
    assert line == ("warning: p: --width and --height change its shape from 1.50 to 1.00; give --width 64 --height 43, "
                    "or leave one out")
    assert not warned(tmp_path, (96, 64), "--width", 144, "--height", 96)

@pytest.mark.parametrize("flags, remedy", [
    (["--width", 384, "--height", 384], "give a smaller --width and --height"),
    (["--height", 384, "--target_pixels", "384x384"], "give --target_pixels 160x160"),
    (["--target_pixels", "384x384"], "give --target_pixels 160x160"),
    (["--control_pixels", "384x384"], "give --control_pixels 160x160"),
    (["--target_pixels", "384x384", "--control_pixels", "384x384"],
     "give --target_pixels 160x160 --control_pixels 160x160")])
def test_slow_sizes_of_tiny_are_answered_with_the_flags_that_make_them_smaller(tmp_path, flags, remedy):
    line, = [line for line in warned(tmp_path, (64, 64), *flags) if "slow" in line]
    assert line.endswith(f"; {remedy}"), line

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

def test_few_lines_and_other_reasons_stay_apart():
    lines = [f"error: d/{name}.png: no caption; expected d/{name}.txt" for name in ("a", "b (1)", "caption")]
    assert hints.fold(lines) == lines
    more = [*lines, "error: d/x.png: no caption; expected d/y.txt", "error: d/e: other; z"]
    assert hints.fold(more) == more
    four = [*lines, "error: d/.x.png: no caption; expected d/.x.txt"]
    assert hints.fold(four) == [f"{lines[0]}; and 3 others likewise: b (1).png, caption.png, .x.png"]
    assert len(hints.fold([f"error: m.jsonl:{n}: no field 'target'; want it" for n in range(9)])) == 1
    long, = hints.fold([f"error: {n:0200}.png: no; do" for n in range(9)])
    assert len(long) < 700

# ---- at once ---------------------------------------------------------------------------------------------------------

SLOW = """import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as e:
    print(bool(e.code), *{"torch", "diffusers", "transformers", "peft", "huggingface_hub"} & set(sys.modules))
"""

@pytest.mark.parametrize("command", [
    "predict.py", "predict.py --input x", "train.py --data photo", "cache.py --model Qwen-Image-Edit",
    "train.py --target_pixels 512", "tools/doctor.py photo",
    "predict.py --image gone.jpg --prompt x", "predict.py --image empty/text.jpg --prompt x",
    "predict.py --image photos/target/a.png gone.jpg --prompt x", "predict.py --jobs gone.jsonl",
    "predict.py --jobs bad.jsonl", "predict.py --jobs empty", "predict.py --image empty --prompt x",
    "predict.py --image photos --prompt x --out_dir photos/out", "predict.py --image photos empty --prompt x",
    "predict.py --image photo.jpg --prompt="])
def test_a_near_miss_imports_nothing_slow(two, command):
    """Also where a run of tiny is there, whose LoRA predict.py would take. Among what is answered at once is a list
    with bad lines only, and a folder whose pictures cannot be read."""
    save(paint_picture(), two / "out/tiny-a-001" / common.LORA_FILE, format="PNG")
    (two / "empty").mkdir()
    (two / "empty/text.jpg").write_text("x", "utf-8")
    (two / "bad.jsonl").write_text('{"image": "photo.jpg"}\n{"image": "gone.jpg", "prompt": "x"}\n', "utf-8")
    script, *flags = command.split()
    env = os.environ | dict(PYTHONPATH=str(HERE))
    command = [sys.executable, "-c", SLOW, HERE / script, *flags]
    result = subprocess.run(command, cwd=two, env=env, capture_output=True, encoding="utf-8")
    assert result.stdout == "True\n", (result.stdout, result.stderr)
