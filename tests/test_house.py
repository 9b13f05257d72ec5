"""
The rule on the wall: the five core files, library/ and training/ are the program, which works when it is copied with
tiny/ alone; tools/ and tests/ can be deleted. (test_floors.py: who may import whom.)
"""
import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import common
from library.cli import command_line
from library.data import dataset
import rope_patch
from tests.harness import HERE, TINY, lora_file, lora_tensors, paint_picture, run_script, save

CORE = ["rope_patch.py", "common.py", "cache.py", "predict.py", "train.py"]

def copied(folder):
    folder.mkdir()
    for name in CORE:
        shutil.copy(HERE / name, folder)
    for name in ("library", "training", "tiny"):
        shutil.copytree(HERE / name, folder / name)
    return folder

def python(folder, *command):
    """A process of its own, in which only this copy can be found."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, command)], cwd=folder, env=env, capture_output=True,
                          encoding="utf-8")

def test_one_function_says_what_the_blocks_are():
    """A family with other blocks changes rope_patch.blocks_of, and none is left out by what quantizes, offloads, ..."""
    places = []
    patterns = ("*.py", "library/**/*.py", "training/*.py", "tools/*.py")
    for path in [p for pattern in patterns for p in HERE.glob(pattern)]:
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
        texts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values} # errors name it
        for node in nodes: # x.transformer_blocks, or the name alone, as for getattr
            name = getattr(node, "attr", None) or getattr(node, "value", None)
            if isinstance(name, str) and name.endswith("transformer_blocks") and node not in texts:
                places.append((path.name, node.lineno))
    lines, first = inspect.getsourcelines(rope_patch.blocks_of)
    assert places == [("rope_patch.py", first + len(lines) - 1)]

def test_a_script_imports_library_before_any_module_of_ours():
    """Or a folder cache/ beside it could be taken for cache.py. What comes before is there already."""
    ours = {name.removesuffix(".py") for name in CORE} | {"library", "training", "tools"}
    for path in [HERE / name for name in CORE[2:]] + [*(HERE / "tools").glob("*.py")]:
        source = path.read_text("utf-8")
        if "sys.path.insert" not in source: # it is imported by one that has
            assert "add_argument" not in source and "command_line.Parser" not in source, path
            continue
        nodes = [n for n in ast.parse(source).body if isinstance(n, (ast.Import, ast.ImportFrom))]
        names = [n.names[0].name if isinstance(n, ast.Import) else n.module for n in nodes]
        first = next(name for name in names if name.split(".")[0] in ours)
        assert first == "library", path
        if path.name in CORE: # which stand among all other folders
            assert names[:3] == ["os", "sys", "library"], path

IN_TURN = """
import json, os, runpy, sys
sys.path.insert(0, "")
os.environ["PATH"] = "" # no git
for sys.argv in json.loads(sys.argv[1]): # one process, as a start takes ten seconds
    runpy.run_path(sys.argv[0], run_name="__main__")
"""

def test_the_five_files_alone_cache_train_and_sample(tmp_path):
    """Also where no git is. (As on Windows: test_windows.py.)"""
    folder = copied(tmp_path / "alone")
    for part in ("target", "control"): # four pictures are enough
        shutil.move(folder / "tiny/known" / part / "keep", folder / "keep" / part)
    steps = ["--num_inference_steps", "2"]
    commands = [["cache.py"], ["train.py", "--max_steps", "2", "--val_data", "keep", "--batch_size", "2", *steps],
                ["predict.py", "--jobs", "keep", "--lora", "out/tiny-data-001", *steps]]
    result = python(folder, "-c", IN_TURN, json.dumps(commands))
    assert result.returncode == 0, result.stderr[-2000:]
    assert (folder / "out/tiny-data-001/DONE").exists()
    assert '"psnr"' in (folder / "out/tiny-data-001/log.jsonl").read_text("utf-8")
    assert len(list((folder / "out/predict").glob("*.png"))) == 5 # four, and a sheet of them

def test_the_claims_run_as_a_script_too(monkeypatch):
    calls = []
    monkeypatch.setattr(pytest, "main", lambda flags: calls.append(flags) or 5)
    assert run_script("test_consistency.py", "-x").status == 5
    assert calls == [[str(HERE / "test_consistency.py"), "-x"]]

@pytest.mark.parametrize("script", ["cache.py", "train.py", "predict.py"])
def test_help_prints_commands_and_defaults(script):
    result = run_script(script, "-h")
    assert result.status == 0 and f"$ python {script}" in result.out and "(default: tiny)" in result.out
    assert result.out.startswith(f"usage: {script} --model MODEL ") and "[other flags: see below]" in result.out
    end = result.out.split("With --model tiny these defaults apply: ")[1] # as flags
    assert end.startswith("--") and not set("{}'") & set(end) and "\nmodel:\n" in result.out

def test_the_names_in_the_guides_table_are_answered_with_ours():
    guide = (HERE / "GUIDE.md").read_text("utf-8").split("## Coming from another trainer")[1]
    helps = "".join(run_script(script, "-h").out for script in ("train.py", "predict.py"))
    known = re.findall(r"^  (--\w+)[ ,]", helps, re.MULTILINE)
    own = {flag: flag for flag in known}
    answered = 0
    for row in re.findall(r"^\| `(--\w+).*?` \|(.*)", guide, re.MULTILINE):
        ours, others = row
        for name in re.findall(r"--(\w+)", others):
            if f"--{name}" not in known: # what is spelled alike is no question
                assert command_line.meant_by(name, own).split()[0] == ours
                answered += 1
    assert answered > 10

def test_the_lines_for_own_photographs_make_both_datasets(tmp_path):
    """As GUIDE prints them, with photographs of any suffix and what a Mac leaves behind."""
    [code] = re.findall(r'^python -c "\n(from pathlib.*?)"$', (HERE / "GUIDE.md").read_text("utf-8"), re.M | re.S)
    shutil.copy(HERE / "common.py", tmp_path), shutil.copytree(HERE / "library", tmp_path / "library")
    for folder, names in (("duo", ("a.JPG", "b.png", "c.tif")), ("duo_val", ("d.jpg",))):
        for n, name in enumerate(names):
            save(paint_picture((64, 48), n), tmp_path / folder / "control" / name)
        (tmp_path / folder / "control/.DS_Store").write_text("x", "utf-8")
    assert python(tmp_path, "-c", code).returncode == 0
    for folder, names in (("duo", "abc"), ("duo_val", "d")):
        samples, problems = dataset.read_dataset(tmp_path / folder)
        assert [s.name for s in samples] == list(names) and not problems

def test_files_have_the_mode_that_umask_gives(tmp_path):
    common.write_file(tmp_path / "a", b"")
    for tool in ("import_data", "convert_lora"):
        out = tmp_path / tool
        flags = dict(import_data=[TINY / "known", out], convert_lora=[
            lora_file(tmp_path, lora_tensors()), "--to", "model", "--out", out])[tool]
        assert run_script(f"tools/{tool}.py", *flags).status == 0
        modes = {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file() and path.stat().st_nlink == 1}
        assert modes == {(tmp_path / "a").stat().st_mode & 0o777} and out.stat().st_mode & 0o777 == 0o755, tool

DOCS = ["README.md", "README.zh.md", "GUIDE.md"]

def text_of(name):
    return (HERE / name).read_text("utf-8")

def commands_of(name):
    """-> the lines of the blocks of code, without their comments. Lines in Chinese are none."""
    blocks = re.findall(r"^```(?:powershell)?\n(.*?)^```", text_of(name), re.M | re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.isascii()]

def test_the_chinese_readme_has_readmes_commands():
    """All that it has, and as many of python and pip."""
    ours, theirs = commands_of("README.md"), commands_of("README.zh.md")
    assert all(any(line.startswith(command) for line in ours) for command in theirs)
    count = lambda commands: sum(command.startswith(("python ", "pip ")) for command in commands)
    assert count(theirs) == count(ours)

def test_the_chinese_readme_has_no_other_numbers_than_readme():
    ours, theirs = [set(re.findall(r"\d[\d,.]*\d|\d", text_of(name))) for name in ("README.md", "README.zh.md")]
    assert len(theirs) > 50 and not theirs - ours

@pytest.mark.parametrize("name", DOCS)
def test_links_lead_somewhere(name):
    """Files that exist, and headings as GitHub names them."""
    for file, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text_of(name)):
        assert (HERE / (file or name)).exists(), file
        titles = re.findall(r"^#+ (.*)", text_of(file or name), re.M) if heading else []
        slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not heading or heading in slugs, heading

def test_no_line_is_longer_than_120_columns_and_all_is_ascii():
    files = [p for pattern in ("*.py", "library/**/*.py", "training/*.py", "tools/*.py", "tests/**/*.py",
                               "changes/*.py", "*.md",
                               "requirements.txt", ".ci/run") for p in HERE.glob(pattern)]
    assert len(files) > 20
    for path in files:
        for n, line in enumerate(path.read_bytes().splitlines(), 1):
            assert not line.endswith((b" ", b"\t")), f"{path}:{n}"
            # a line break between two Chinese characters would show as a space
            assert path.name == "README.zh.md" or line.isascii() and len(line) <= 120, f"{path}:{n}"
