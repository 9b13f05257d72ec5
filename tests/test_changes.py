"""
README's "How do I change ...": each change, made in a copy of the project as it is printed there, runs, does something,
and fails just the claims that README names.
"""
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.harness import HERE, add_item, log_of, paint_picture, save

TEXT = (HERE / "README.md").read_text("utf-8").split("## How do I change")[1].split("\n## ")[0]
CHANGES = {} # {a word of the sentence before: (the file, lines that go, lines that come, claims that then fail)}
for word, sentence, block in re.findall(r"\n(?:The|An) (\w+)([^\n]*)\n```diff\n(.*?)```", TEXT, re.S):
    head, *lines = block.splitlines()
    CHANGES[word] = (head.split()[1], [line[1:] for line in lines if line[0] == "-"],
                     [line[1:] for line in lines if line[0] == "+"], re.findall(r"-k (\w+)", sentence))

def run(folder, *command):
    return subprocess.run([sys.executable, *map(str, command)], cwd=folder, capture_output=True, encoding="utf-8",
                          env=os.environ | {"OMP_NUM_THREADS": "1"})

@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a training of two steps on pairs of which each picture has a light left half."""
    folder = tmp_path_factory.mktemp("changes")
    for name in "ab":
        add_item(folder / "photos", name)
    half = np.asarray(paint_picture((64, 64))) // 4
    half[:, :32] += 150
    save(Image.fromarray(half), folder / "photos/target/a.png")
    return [folder, "--cache_dir", folder / "c", "--val_data", "--max_steps", 2, "--batch_size", 2, "--device", "cpu"]

def losses(project, flags, *more):
    folder, *others = flags
    result = run(folder, project / "train.py", "--data", "photos", *more, *others, "--out_dir", project / "run")
    assert result.returncode == 0, result.stderr
    return [record["loss"] for record in log_of(project / "run")]

def copy_of(folder):
    """The project, without what runs have made in it."""
    for pattern in ("*.py", "extras", "tools", "tiny", "tests/*.py", "*.ini"):
        for path in HERE.glob(pattern):
            copy = folder / path.relative_to(HERE)
            copy.parent.mkdir(exist_ok=True, parents=True)
            (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
    return folder

@pytest.fixture(scope="module")
def unchanged(flags, tmp_path_factory):
    return losses(copy_of(tmp_path_factory.mktemp("unchanged")), flags)

def test_readme_has_five_changes_and_names_what_fails():
    assert list(CHANGES) == ["loss", "timesteps", "sampler", "optimizer", "augmentation"]
    assert [fails for *_, fails in CHANGES.values()] == [["formula"], [], ["single_job"], [], []]

@pytest.mark.parametrize("what", CHANGES)
def test_a_change_as_readme_has_it(tmp_path, what, flags, unchanged):
    project = copy_of(tmp_path / "project")
    name, old, new, fails = CHANGES[what]
    text, folder = (project / name).read_text("utf-8") if old else "", flags[0]
    for before, after in zip(old, new):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (project / name).write_text(text if old else "\n".join(new) + "\n", "utf-8")
    more = dict(optimizer=["--optimizer", "mine.SignSGD"], augmentation=["mirrored"]).get(what, [])
    if what == "augmentation":
        assert run(folder, project / name).returncode == 0
        one, other = [np.asarray(Image.open(folder / f"{data}/target/a.png")) for data in ("photos", "mirrored")]
        assert np.array_equal(one[:, ::-1], other) and not np.array_equal(one, other)
    got = losses(project, flags, *more)
    assert np.isfinite(got).all() and (got == unchanged) == (what == "sampler"), (got, unchanged)
    for claim in fails:
        result = run(project, "-m", "pytest", "-q", "-x", "test_consistency.py", "-k", claim)
        assert result.returncode == 1 and "1 failed" in result.stdout, result.stdout
