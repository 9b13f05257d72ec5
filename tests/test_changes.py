"""
changes/: each recipe applies to this tree, trains, does what its head says, and fails just the claims that it names.
README lists them all, and prints two.
"""
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.harness import FULL, HERE, add_item, log_of, paint_picture, save

RECIPES = {file.stem: file.read_text("utf-8") for file in sorted(HERE.glob("changes/*.diff"))}
README = (HERE / "README.md").read_text("utf-8").split("## How do I change")[1].split("\n## ")[0]

# One process imports the libraries, which takes seconds; each command is a fork of it, with nothing of ours imported.
FORKS = """
import gc, json, os, runpy, sys
import diffusers, peft, transformers.models.qwen2_5_vl.modeling_qwen2_5_vl # and with them torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
gc.freeze() # what is imported need not be searched by each gc.collect() of a run
for line in sys.stdin:
    folder, files, sys.argv = json.loads(line)
    pid = os.fork()
    if not pid:
        os.chdir(folder)
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), number)
        if sys.argv[0] == "-m":
            sys.path[0] = folder
            sys.argv = sys.argv[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(sys.argv[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

@functools.cache
def forks():
    return subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            encoding="utf-8", env=os.environ | {"OMP_NUM_THREADS": "1"})

def run(folder, *command):
    """`python COMMAND` in this folder -> its returncode, stdout and stderr."""
    with tempfile.TemporaryDirectory() as said:
        files = [f"{said}/stdout", f"{said}/stderr"]
        forks().stdin.write(json.dumps([str(folder), files, list(map(str, command))]) + "\n")
        forks().stdin.flush()
        status = int(forks().stdout.readline())
        return SimpleNamespace(returncode=status, **{Path(file).name: Path(file).read_text("utf-8") for file in files})

@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a training of two steps: each picture has a light left half, one a mask; rated/ has rejected pictures, too."""
    folder = tmp_path_factory.mktemp("changes")
    half = np.asarray(paint_picture((64, 64))) // 4
    half[:, :32] += 150
    for name in "ab":
        add_item(folder / "photos", name)
    save(Image.fromarray(half), folder / "photos/target/a.png")
    save(Image.fromarray(half).convert("L").point(lambda x: 255 * (x > 128)), folder / "photos/mask/a.png")
    shutil.copytree(folder / "photos", folder / "rated")
    for name in "ab":
        save(Image.fromarray(255 - half), folder / f"rated/rejected/{name}.png")
    return [folder, "--cache_dir", folder / "c", "--val_data", "--max_steps", 2, "--batch_size", 2, "--device", "cpu"]

def records(project, flags, *more):
    """Trains -> what the log says of the two steps."""
    folder, *others = flags
    data = "rated" if project.name == "preferences" else "photos"
    result = run(folder, project / "train.py", "--data", data, *more, *others, "--out_dir", project / "run")
    assert result.returncode == 0, result.stderr
    return log_of(project / "run")

def losses_of(records):
    return [record["loss"] for record in records]

def copy_of(folder):
    """The project, without what runs have made in it."""
    for pattern in ("*.py", "library", "training", "tools", "tiny", "tests/*.py", "*.ini"):
        for path in HERE.glob(pattern):
            copy = folder / path.relative_to(HERE)
            copy.parent.mkdir(exist_ok=True, parents=True)
            (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
    return folder

@pytest.fixture(scope="module")
def unchanged(flags, tmp_path_factory):
    return losses_of(records(copy_of(tmp_path_factory.mktemp("unchanged")), flags))

def head_of(text):
    return dict(re.findall(r"^(\w+): +(.+)$", text.split("\ndiff --git")[0], re.M))

def test_readme_lists_every_recipe_and_prints_two():
    assert set(re.findall(r"`changes/(\w+)\.(?:diff|py)`", README)) == {*RECIPES, "flux2_pack"}
    printed = re.findall(r"```diff\n(.*?)```", README, re.S)
    assert len(printed) == 2
    for block in printed:
        changed = {line for line in block.splitlines() if not line.startswith("---")}
        assert any(changed <= set(text.splitlines()) for text in RECIPES.values()), block

@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_applies_runs_and_does_what_it_says(tmp_path, name, flags, unchanged):
    """With --full also: of all claims it fails just those that it names."""
    project = copy_of(tmp_path / name)
    applied = subprocess.run(["git", "apply", HERE / f"changes/{name}.diff"], cwd=project, capture_output=True)
    assert applied.returncode == 0, applied.stderr
    DOES[name](project, flags, unchanged)
    named = re.findall(r"-k (\w+)", head_of(RECIPES[name])["Fails"])
    for claim in named:
        result = run(project, "-m", "pytest", "-q", "-x", "test_consistency.py", "-k", claim)
        assert result.returncode == 1 and "1 failed" in result.stdout, result.stdout
    if FULL:
        result = run(project, "-m", "pytest", "-q", "test_consistency.py")
        failed = re.findall(r"^FAILED \S+::(\S+)", result.stdout, re.M)
        assert all(any(claim in test for claim in named) for test in failed) and bool(failed) == bool(named), failed

# ---- what each does --------------------------------------------------------------------------------------------------

def trains_otherwise(project, flags, unchanged, *more):
    """-> the log of two steps, whose losses are finite, and others than those of the unchanged project."""
    log = records(project, flags, *more)
    assert np.isfinite(losses_of(log)).all() and losses_of(log) != unchanged
    return log

def samples_otherwise(project, flags, unchanged):
    """The training is the same; with many steps at little noise its pictures are others."""
    assert losses_of(records(project, flags)) == unchanged

def mirrors(project, flags, unchanged):
    folder = flags[0]
    result = run(folder, project / "mirror.py", "photos", "mirrored")
    assert result.returncode == 0, result.stderr
    for part in ("target", "mask"):
        one, other = [np.asarray(Image.open(folder / f"{data}/{part}/a.png").convert("RGB"))
                      for data in ("photos", "mirrored")]
        assert np.array_equal(one[:, ::-1], other) and not np.array_equal(one, other)
    trains_otherwise(project, flags, unchanged, "mirrored")

def begins_undecided(project, flags, unchanged):
    """The first step's model is the reference, so the loss is log 2; and the rejected pictures are learned from."""
    log = trains_otherwise(project, flags, unchanged)
    assert log[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and log[0]["grad_norm"] > 0
    assert log[1]["loss"] != log[0]["loss"]

def logs_quarters(project, flags, unchanged):
    """Each step's mean losses by quarter of the noise levels, and the page has a chart of them."""
    folder = flags[0]
    log = records(project, [*flags, "--max_steps", 4])
    for record in log:
        quarters = {}
        for s, loss in zip(record["timesteps"], record["losses"]):
            quarters.setdefault(min(int(4 * s), 3), []).append(loss)
        for quarter, losses in quarters.items():
            assert record[f"loss_{quarter + 1}"] == pytest.approx(np.mean(losses), abs=1e-4)
        assert {key for key in record if key.startswith("loss_")} == {f"loss_{q + 1}" for q in quarters}
    result = run(folder, project / "tools/page.py", project / "run")
    assert result.returncode == 0, result.stderr
    page = max(project.rglob("*.html"), key=lambda path: path.stat().st_mtime).read_text("utf-8")
    assert "Loss by noise" in page

DOES = dict(huber=trains_otherwise, logit_normal=trains_otherwise, sampler=samples_otherwise, mirror=mirrors,
            sign_sgd=lambda *arguments: trains_otherwise(*arguments, "--optimizer", "mine.SignSGD"),
            preferences=begins_undecided, noise_quarters=logs_quarters, x0_outside_mask=trains_otherwise)
