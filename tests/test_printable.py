"""
What comes from a file is shown escaped: names, prompts, "out", tensor names and texts of any kind move no cursor, ring
no bell, turn no direction of writing, and begin no line on a terminal or in a page, where they could pass for ours.
"""
import ast
import json
import os
import subprocess
import sys

import pytest
import torch
from PIL import Image

from common import CONTROLS, shell_command
from tests.harness import (EXACT, HERE, NATIVE, add_item, copy_model, is_one_line, log_of, lora_file, lora_tensors,
                           paint_picture, paste, renamed, run_script, save)

PLANTED = "error: PLANTED: broken; paste this"
# a cleared screen, a bell, line ends of many kinds, a C1 control, text from right to left
TEXT = f"a\x1b[2J\x07\x9b31m\u202e\r\n{PLANTED}\n\u2028{PLANTED}\x85{PLANTED}\rnext:\n  python evil.py"
NAME = os.fsdecode(b"\xff\xfe") + TEXT # as a file's name: its first bytes are no UTF-8

def is_shown(text):
    """Whether there is no control character but line ends, and no line is a planted one."""
    lines = text.split("\n")
    planted = [line for line in lines if line.startswith((PLANTED, "next:", "  python evil"))]
    return not planted and not any(map(CONTROLS.search, lines))

def run_shown(script, *flags, status=0):
    """-> run_script's result, whose lines have to be shown."""
    result = run_script(script, *flags)
    assert result.status == status, result.err
    for text in (result.out, result.err):
        for own in ("predict.py", "tools/doctor.py", "train.py"): # with which our own lists of commands begin
            text = text.replace(f"\nnext:\n  python {own} ", "\n")
        assert is_shown(text), repr(text)
    return result

@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """A dataset, jobs and a model whose names and texts are like that."""
    folder = tmp_path_factory.mktemp("strange")
    data = folder / NAME
    for n in range(3):
        add_item(data, f"{n}{NAME}"[:60], caption="an \x1b[2J edit\u202e\x9b31m\x07")
    return data

def flags_for(data, folder):
    return ["--data", data, "--cache_dir", folder / "cache", "--device", "cpu", *EXACT]

def small_training(data, folder, *more):
    return [*flags_for(data, folder), "--val_data", data, "--out_dir", folder / TEXT, "--batch_size", 1,
            "--lora_rank", 2, "--sample_every", 1, "--val_pictures", 1, "--lora_targets", "to_q",
            "--lr_scheduler", "constant", "--warmup_steps", 0, *more]

def test_a_training_of_strange_names_shows_them_and_its_commands_can_be_pasted(tmp_path, strange):
    """Also its page, the contact sheet's PNG, and a copy for ComfyUI."""
    run_shown("cache.py", *flags_for(strange, tmp_path), "--val_data", strange)
    result = run_shown("train.py", *small_training(strange, tmp_path, "--max_steps", 2))
    assert "\\x1b[2J" in result.out and len(log_of(tmp_path / TEXT)) == 2
    command = next(line for line in result.out.splitlines() if line.startswith("  python tools/page.py"))
    words = paste(command)
    assert words[:2] == ["python", "tools/page.py"] and words[2:] == [str(tmp_path / TEXT)]
    run_shown("tools/page.py", *words[2:])
    assert is_shown((tmp_path / TEXT / "index.html").read_text("utf-8").replace("\n", ""))
    sheet = next((tmp_path / TEXT / "samples").glob("step_*.png"))
    with Image.open(sheet) as image:
        assert paste(image.info["command"])[2:4] == ["--data", str(strange)]
    run_shown("tools/convert_lora.py", tmp_path / TEXT, "--to", "comfyui", "--out", tmp_path / f"{TEXT}.safetensors")
    result = run_shown("train.py", *small_training(strange, tmp_path, "--max_steps", 3), "--resume")
    assert len(log_of(tmp_path / TEXT)) == 3
    (tmp_path / TEXT / "checkpoint-000003/optimizer.safetensors").write_bytes(b"x")
    run_shown("train.py", *small_training(strange, tmp_path, "--max_steps", 4), "--resume")
    run_shown("train.py", *small_training(strange, tmp_path, "--max_steps", 4), "--resume", "--seed", 1, status=1)
    run_shown("tools/prune.py", tmp_path / "cache")
    again = run_shown("train.py", *small_training(strange, tmp_path, "--max_steps", 5, "--negative_prompt=-\x1b[2J",
                                                  "--true_cfg_scale", 2), "--resume").out
    words = paste(next(line for line in again.splitlines() if line.startswith("  python predict.py")))
    assert "--negative_prompt=-\x1b[2J" in words and words[-3:] == ["CONTROL.png", "--prompt", "..."]

@pytest.mark.parametrize("words", [[TEXT], [NAME, "a b", "it's"], ["\udc80e", "\x85f'\"\\n", "\ud7ff\u2066"],
                                   ["--data=\x1b'$(touch hit)'"], ["$HOME", "!!", "\\x41", "\t", "-n"]])
def test_a_printed_command_can_be_pasted(words):
    line = shell_command(words)
    assert is_shown(line) and "\n" not in line and paste(line) == words

@pytest.mark.parametrize("out", ["\x1b[2J\n" + PLANTED + ".png", "/abs\x07\u202e.png", "a\r" + PLANTED])
def test_jobs_of_strange_names_and_outs(tmp_path, out):
    """One that is generated, and two that are errors."""
    image = save(paint_picture(), tmp_path / "a.png")
    job = dict(image=[str(image)], prompt=f"go\n{PLANTED}\x1b[2J", out=out)
    (tmp_path / "jobs.jsonl").write_text(json.dumps(job) + "\n", "utf-8")
    flags = ["--jobs", tmp_path / "jobs.jsonl", "--out_dir", tmp_path / NAME, "--cache_dir", tmp_path / "cache",
             "--num_inference_steps", 2, *EXACT, "--device", "cpu"]
    good = out.endswith(f"{PLANTED}.png")
    result = run_shown("predict.py", *flags, status=not good)
    assert len(list((tmp_path / NAME).glob("*.png") if good else result.errors)) == 1

def test_the_doctor_and_its_page(tmp_path, strange):
    """Findings and errors."""
    (strange / f"target/9{NAME}.gif").write_bytes(b"x")
    try:
        run_shown("tools/doctor.py", strange, "--out", tmp_path / NAME, status=1)
    finally:
        (strange / f"target/9{NAME}.gif").unlink()
    assert is_shown((tmp_path / NAME / "index.html").read_text("utf-8").replace("\n", ""))
    save(paint_picture(), strange / f"target/same{TEXT}.png")
    (strange / f"target/same{TEXT}.txt").write_text("x", "utf-8")
    save(paint_picture(), strange / f"control/same{TEXT}.png")
    try:
        result = run_shown("tools/doctor.py", strange, "--out", tmp_path / NAME)
    finally:
        for path in [*strange.glob("*/same*")]:
            path.unlink()
    assert "identical, 1" in result.out

def test_what_import_data_says_of_a_table(tmp_path):
    """Its columns, its rows; also what it says when the work is done."""
    for name in ("a", "b"):
        save(paint_picture(seed=ord(name)), tmp_path / f"{name}.png")
    rows = [dict(target="a.png", control="b.png", prompt="x", **{f"column\n{PLANTED}\x1b[2J": 1}),
            dict(target=f"none\n{PLANTED}\x07.png", control="b.png", prompt="y")]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    result = run_shown("tools/import_data.py", tmp_path / "table.jsonl", tmp_path / NAME, "--skip_bad")
    assert "columns that are not read: column\\nerror" in result.out and "1 samples" in result.out
    run_shown("tools/import_data.py", tmp_path / NAME / "none", tmp_path / "out", status=1)

STRANGE_LORAS = { # what is done to the tensors of a LoRA that fits, and to its metadata
    "a layer that is none": (renamed("to_q", f"to_q\x1b[2J\n{PLANTED}\u202e"), {}),
    "another name": (lambda t: t | {f"\x07\n{PLANTED}": torch.ones(2)}, {}),
    "metadata": (lambda t: t, {"transformer.r": f"\x1b[2J\n{PLANTED}", "train.model": f"\n{PLANTED}\x07"}),
    "a rank's pattern": (lambda t: t, {"transformer.rank_pattern": {f"\n{PLANTED}\x1b[2J": "x"}})}

@pytest.mark.parametrize("kind", STRANGE_LORAS)
def test_a_lora_of_strange_names(tmp_path, kind):
    change, meta = STRANGE_LORAS[kind]
    folder = tmp_path / TEXT # (safetensors opens no name that is not UTF-8)
    folder.mkdir()
    image = save(paint_picture(), tmp_path / "a.png")
    lora_file(folder, change(lora_tensors()), **meta)
    for script, *flags in (["predict.py", "--image", image, "--prompt", "x", "--out", tmp_path / "o.png", "--lora",
                            folder, "--num_inference_steps", 2, "--cache_dir", tmp_path / "cache", *EXACT, *NATIVE],
                           ["tools/convert_lora.py", folder, "--to", "comfyui", "--out", tmp_path / "c.safetensors"]):
        result = run_script(script, *flags)
        assert is_shown(result.out) and is_shown(result.err), (result.out, result.err)
        assert result.status == 0 or is_one_line(result.errors[-1]), result.err

@pytest.mark.parametrize("file, text", [
    ("model_index.json", json.dumps({"_class_name": TEXT})),
    ("scheduler/scheduler_config.json", "\x1b[2J\n" + PLANTED), ("transformer/config.json", json.dumps({TEXT: 1}))])
def test_a_model_of_strange_texts(tmp_path, file, text):
    model = copy_model(tmp_path / NAME[:50])
    (model / file).write_text(text, "utf-8")
    image = save(paint_picture(), tmp_path / "a.png")
    result = run_script("predict.py", "--model", model, "--image", image, "--prompt", "x", "--out", tmp_path / "o.png",
                        "--num_inference_steps", 2, "--cache_dir", tmp_path / "cache", *EXACT)
    assert is_shown(result.out) and is_shown(result.err), (result.out, result.err)

@pytest.mark.parametrize("script", ["train.py", "predict.py", "cache.py", "tools/page.py"])
def test_flags_that_are_wrong(script):
    """argparse quotes them in its messages."""
    for flags in ([f"--{TEXT}", "x"], ["--seed", TEXT], [TEXT], ["--data", NAME], ["--cache_dir", "a", TEXT]):
        result = run_script(script, *flags)
        assert result.status and is_shown(result.out) and is_shown(result.err), result.err

def run_code(code):
    """It runs these lines of Python in a process of their own, behind command_line.Parser's parse_args."""
    begin = (f"import sys; sys.path.insert(0, {str(HERE)!r}); import library, common, logging, warnings\n"
             "from library.cli import command_line\ncommand_line.Parser('x').parse_args()")
    return subprocess.run([sys.executable, "-c", f"{begin}\n{code}"],
                          capture_output=True, encoding="utf-8", errors="surrogateescape")

def test_whoever_writes_moves_no_cursor():
    """Libraries and Python itself write to the same streams; their lines end where they end them."""
    text = repr(TEXT)
    ways = [f"warnings.warn({text})", f"logging.warning({text})", f"sys.exit({text})", f"raise ValueError({text})",
            f"print({text}); print('b', {text}, file=sys.stderr)",
            f"from tqdm import tqdm; [0 for _ in tqdm(range(3), desc={text}, postfix=dict(a={text}), ascii=True)]"]
    for way in ways:
        result = run_code(way)
        output = (result.stdout + result.stderr).replace("\r", "\n" if "tqdm" in way else "\r")
        assert PLANTED in output and not any(map(CONTROLS.search, output.split("\n"))), (way, output)

def test_a_line_of_ours_is_one_line():
    """Whatever is in it."""
    text = repr(TEXT)
    result = run_code(f"common.say({text}); common.tell({text}, file=sys.stderr); raise common.InputError({text})")
    assert is_shown(result.stdout) and is_shown(result.stderr)
    assert result.stdout.count("\n") == 1 and result.stderr.count("\n") == 2

def test_a_print_of_yours_and_a_traceback_keep_their_lines():
    """As who changes a script prints tensors and models; and of an error in our code."""
    result = run_code("print('[[1, 2],\\n [3, 4]]'); 1 / 0")
    assert result.stdout == "[[1, 2],\n [3, 4]]\n"
    lines = result.stderr.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1] == "ZeroDivisionError: division by zero" and len(lines) > 2

MAY_PRINT = ["tools/bench.py", "tools/gpu_check.py"] # only numbers

def test_all_lines_of_ours_are_told():
    """common.tell and common.say show what is in a line; print and tqdm.write would leave its line ends."""
    patterns = ("*.py", "library/**/*.py", "training/*.py", "tools/*.py")
    for path in [path for pattern in patterns for path in HERE.glob(pattern)]:
        name = path.relative_to(HERE).as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("print", "tqdm.write") and name not in MAY_PRINT and not name.startswith(("test_", "conf")):
                is_ours = isinstance(node.args[0], ast.Constant) or ast.unparse(node.args[0]) == "printable(line)"
                assert is_ours, f"{name}:{node.lineno}: {called}(...) of what a file may say; call common.tell"
