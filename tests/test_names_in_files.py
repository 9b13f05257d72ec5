"""
What comes from elsewhere names no code: which modules are imported is said by our own code and by flags; a folder that
stands beside the scripts, in the current folder or on PYTHONPATH is not taken for one of our modules; and every place
where a text could become code is listed here.
"""
import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from extras import OurFolder
from tests.harness import HERE, TINY

# ---- folders that are called as modules are --------------------------------------------------------------------------

OURS = "cache common train predict rope_patch extras tools".split()
OTHERS = "pillow_heif yaml torch bitsandbytes wandb tensorboard pyarrow diffusers json flash_attn_interface".split()

def add_packages(folder, names, marker):
    """Each of these packages notes in the file `marker` that it was imported."""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text(f"open({str(marker)!r}, 'a').write(__file__ + '\\n')\n")

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project with a stranger's folders everywhere, and a person's own mine.py; elsewhere: a folder with
    the same, which is no project."""
    top = tmp_path_factory.mktemp("strangers")
    root, marker = top / "project", top / "marker"
    for path in [*HERE.glob("*.py"), *HERE.glob("extras/*.py"), *HERE.glob("tools/*")]:
        (root / path.relative_to(HERE)).parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            shutil.copy(path, root / path.relative_to(HERE))
    shutil.copytree(TINY, root / "tiny")
    add_packages(root, [*OURS[:5], *OTHERS, "tests"], marker)
    add_packages(root / "cache", OURS + OTHERS, marker)
    (root / "cache/cache.py").write_text((root / "cache/__init__.py").read_text())
    add_packages(top / "elsewhere", OURS + ["tests"], marker)
    add_packages(top / "data", OURS + OTHERS, marker)
    (top / "link").symlink_to(root)
    (top / "started.py").symlink_to(root / "train.py")
    names = OTHERS[:-1]
    (root / "mine.py").write_text(
        "import json, torch\nfrom importlib.util import find_spec\n"
        f"print('FOUND', json.dumps({{name: str(find_spec(name) and find_spec(name).origin) for name in {names}}}))\n"
        "class Noisy(torch.optim.SGD): pass\n")
    return root, top, marker

def python(top, command, folder, **env):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"} | env
    return subprocess.run([sys.executable, *map(str, command)], cwd=folder, env=env, capture_output=True, text=True)

@pytest.mark.parametrize("script, folder, env", [
    ("project/cache.py", "project", {}), ("project/predict.py", "data", {}),
    ("link/cache.py", "data", {"PYTHONSAFEPATH": "1"}), ("started.py", "project/cache", {}),
    ("project/predict.py", "elsewhere", {"PYTHONPATH": "elsewhere"}),
    ("project/tools/doctor.py", "project", {"PYTHONPATH": "elsewhere"}),
    ("project/tools/page.py", "data", {"PYTHONSAFEPATH": "1", "PYTHONPATH": "elsewhere"}),
    ("project/cache.py", "data", {"PYTHONPATH": "link"})])
def test_a_script_imports_our_modules_whatever_stands_around_it(place, script, folder, env):
    """Through a link, from another folder, in safe mode, and where PYTHONPATH leads to a package of the same name."""
    root, top, marker = place
    env = {key: str(top / value) if key == "PYTHONPATH" else value for key, value in env.items()}
    result = python(top, [top / script, "-h"], top / folder, **env)
    assert result.returncode == 0 and "usage: " in result.stdout, result.stderr
    assert not marker.exists(), marker.read_text()

def test_a_whole_start_takes_no_folder_for_a_package_and_a_persons_own_module_is_found(place):
    """All libraries are imported; the cache folder is a stranger's, too."""
    root, top, marker = place
    flags = ["--plan", "--optimizer", "mine.Noisy", "--max_steps", 1, "--cache_dir", root / "cache"]
    result = python(top, [root / "train.py", *flags], root)
    assert result.returncode == 0, result.stderr
    assert not marker.exists(), marker.read_text()
    found = json.loads(result.stdout.split("FOUND ")[1].splitlines()[0])
    assert found["torch"].endswith("torch/__init__.py") and str(top) not in json.dumps(found)

def test_the_processes_that_compile_do_not_look_beside_our_modules(monkeypatch):
    """They get sys.path as PYTHONPATH, without the folder of the project."""
    from torch._inductor.utils import python_subprocess_env
    compiled = pytest.importorskip("extras.compile")
    monkeypatch.setattr(sys, "path", ["", str(HERE), f"{HERE}/", *sys.path])
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("TORCH_CUSTOM_PYTHONPATH", "to be restored")
    monkeypatch.delenv("TORCH_CUSTOM_PYTHONPATH")
    compiled.compile_blocks([])
    paths = python_subprocess_env()["PYTHONPATH"].split(os.pathsep)
    assert len(paths) > 2 and not any(os.path.realpath(path) == str(HERE) for path in paths)

def test_no_compiled_file_or_folder_of_the_project_is_a_module(tmp_path):
    """A package, one without __init__.py, a .pyc and a .so beside the scripts are none; what you add as a .py is."""
    for name in ("folder/__init__.py", "bare/a.py", "compiled.pyc", "library.so", "mine.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    code = ("import extras, importlib.util as u, sys; extras.ROOT = sys.argv[1]; sys.path.insert(0, extras.ROOT); "
            "print(*[n for n in sys.argv[2:] if u.find_spec(n)])")
    result = python(tmp_path, ["-c", code, tmp_path, "folder", "bare", "compiled", "library", "mine"], HERE)
    assert result.stdout.split() == ["mine"], result.stderr
