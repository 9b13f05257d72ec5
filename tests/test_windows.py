"""
Native Windows, as tests/places/windows.py imitates it: what it forbids, one whole road through the scripts, a run that
is killed, a second one; what is printed and written for it. And the claims:

$ python -m pytest -p tests.places.windows test_consistency.py      # a minute
"""
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import common
from training import run_folder
from tests.harness import (EXACT, HERE, NATIVE, add_item, assert_same_run, kill, log_of, refused, run_script, steps_of,
                           until, works)
from tests.places.windows import NO_MODULES, NO_OS, SIGNALS, install, is_ours, windows # noqa: F401 (a fixture)
from tools import bench_common, page_common

# ---- the place itself ------------------------------------------------------------------------------------------------

def test_the_imitation_forbids_what_windows_forbids(tmp_path, windows):
    """Each refusal by itself; and what Windows allows is allowed."""
    file, other = tmp_path / "a.txt", tmp_path / "b.txt"
    file.write_text("caf\u00e9\n", encoding="locale") # as without a word
    assert file.read_bytes() == b"caf\xe9\r\n" and file.read_text(encoding="locale") == "caf\u00e9\n"
    assert file.write_text("\u00e9", encoding="utf-8") and file.read_bytes() == "\u00e9".encode()
    with pytest.raises(UnicodeEncodeError):
        other.write_text("\u732b", encoding="locale")
    other.write_bytes(b"x")
    with open(file, "rb"):
        for forbidden in (file.unlink, lambda: os.replace(file, tmp_path / "c"), lambda: os.replace(other, file),
                          lambda: tmp_path.rename(tmp_path.with_name("moved"))):
            with pytest.raises(PermissionError):
                forbidden()
    assert file.exists()
    with pytest.raises(FileExistsError):
        other.rename(file)
    with pytest.raises(PermissionError):
        os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError):
        (tmp_path / "link").symlink_to(file)
    for name in ("a:b", "what?", "nul", "Con.txt", "end.", "end ", "a" * 260, "A.TXT"):
        for make in (Path.mkdir, Path.touch, lambda path: path.write_bytes(b""), lambda path: os.link(other, path)):
            with pytest.raises(OSError):
                make(tmp_path / name)
    os.replace(other, file)
    with open(file, "rb"), pytest.raises(PermissionError):
        shutil.rmtree(tmp_path)
    shutil.rmtree(tmp_path)
    assert (common.os.name, common.os.path) == ("nt", os.path)
    assert not hasattr(common.signal, "SIGHUP") and not hasattr(common.os, "killpg")

# ---- one road --------------------------------------------------------------------------------------------------------

JAPANESE = partial(install, code_page="cp932")

@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Folders of another trainer, with pictures that have Japanese names, and texts that no code page has."""
    folder = tmp_path_factory.mktemp("source")
    for n, name in enumerate(("one", "two words", "\u732b", "cats/three", "four")):
        add_item(folder / "pairs", name, [(64, 64 + 32 * (n % 2)), (64, 64)], f"caf\u00e9 \u732b {n}")
    (folder / "pairs/target").rename(folder / "pairs/edited")
    (folder / "pairs/control").rename(folder / "pairs/source")
    return folder / "pairs"

def test_one_road_from_foreign_folders_to_a_page(tmp_path, source, start, windows):
    """Import, doctor, cache, plan, train, a kill, --resume (as unbroken), predict, page, convert, prune, lean_train."""
    data, cached, run = tmp_path / "data", tmp_path / "cache", tmp_path / "run"
    works("tools/import_data.py", data, "--target", source / "edited", "--control", source / "source")
    works("tools/doctor.py", data, "--out", tmp_path / "doctor", *NATIVE)
    on_cpu = ["--cache_dir", cached, "--device", "cpu", *EXACT]
    works("cache.py", "--data", data, "--val_data", *on_cpu)
    flags = ["--data", data, "--val_data", data, *on_cpu, "--max_steps", 4, "--save_every", 2, "--batch_size", 2,
             "--lora_rank", 2, "--sample_every", 2, "--num_inference_steps", 2, "--lr_scheduler", "constant"]
    works("train.py", *flags, "--plan")
    works("train.py", *flags, "--out_dir", tmp_path / "unbroken")
    process = start("train.py", *flags, "--out_dir", run, prelude=JAPANESE) # its streams, too
    until(lambda: run.exists() and steps_of(run) or not process.alive())
    kill(process) # as TerminateProcess does
    process.wait()
    assert steps_of(run), process.output()
    works("train.py", *flags, "--out_dir", run, "--resume")
    assert_same_run(run, tmp_path / "unbroken")
    for _ in range(2): # the second finds its pictures
        works("predict.py", "--lora", run, "--jobs", data, "--num_inference_steps", 2, "--out_dir", tmp_path / "edited",
              *on_cpu)
    drawn = {path.stem for path in (tmp_path / "edited").glob("*.png")}
    assert {re.sub("-[0-9a-f]{8}$", "", name) for name in drawn} > {"one", "two words", "\u732b", "cats-three", "four"}
    works("tools/page.py", run)
    works("tools/convert_lora.py", run, "--to", "comfyui", "--out", tmp_path / "comfy.safetensors")
    works("tools/convert_lora.py", run, "--to", "model", "--out", tmp_path / "merged")
    works("tools/prune.py", cached, "--delete")
    for more in (["--save_every", 1], ["--resume"]):
        works("tools/lean_train.py", "--data", data, *on_cpu, "--max_steps", 2, "--out_dir", tmp_path / "lean", *more)
    assert not list(tmp_path.rglob(".tmp-*"))

def test_ctrl_break_and_a_closed_console_end_a_run_with_its_checkpoint(tmp_path, small, start):
    """Both are SIGBREAK there, which SIGUSR2 stands for."""
    process = start("train.py", *small.flags, "--out_dir", tmp_path, "--max_steps", 5000, "--save_every", 5000,
                    prelude=install)
    until(lambda: (tmp_path / "log.jsonl").exists() and log_of(tmp_path)[1:] or not process.alive())
    kill(process, signal.SIGUSR2)
    assert process.wait() == 0 and "stopped by a signal" in process.output() and steps_of(tmp_path), process.output()

def test_a_second_start_is_told_that_a_run_is_at_work(tmp_path, monkeypatch, windows):
    """Its .lock cannot even be read there. With --out_dir one line says so; without, the run gets the next number."""
    monkeypatch.chdir(tmp_path)
    args = SimpleNamespace(out_dir="out/run-001", resume=False)
    folder, lock = run_folder.lock(args, Path("out/run-001"), "run")
    with refused("--out_dir", "another run is at work in it"):
        run_folder.lock(args, Path("out/run-001"), "run")
    args.out_dir = None
    again, other = run_folder.lock(args, Path("out/run-001"), "run")
    assert again.name == "run-002"
    lock.release()
    other.release()

def test_gpu_check_runs_there_and_ends_what_it_has_started(tmp_path, monkeypatch, windows):
    """No SIGALRM, no killpg; a process is killed with those that it has started. Elsewhere than on Linux no peak of
    this process's memory is known, and none is shown."""
    sleep = f"600.{os.getpid()}"
    child = f"import subprocess; subprocess.run(['sleep', '{sleep}'])"
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start(
        [sys.executable, "-c", child] if "pytest" in command else command, **options))
    result = run_script("tools/gpu_check.py", "--device", "cpu", "--rows", "claims", "--minutes", 0.1, "--out",
                        tmp_path / "found.json")
    assert result.status == 0 and "stopped after two fifths" in result.out, result.err
    until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if sleep in (p.info["cmdline"] or ())])
    assert math.isnan(bench_common.peak_gib(list, "cpu")) and bench_common.used_gib("cpu") > 0

HERE_ONLY = {"gpu_check.py: signal.setitimer", "gpu_check.py: signal.SIGALRM",
             "gpu_check.py: signal.ITIMER_REAL", # behind hasattr
             "bench_common.py: /proc", "bench_common.py: malloc_trim", # behind sys.platform
             "tensor_files.py: /proc", "host_memory.py: /proc", # for names that Linux alone has
             "run_folder.py: fcntl"} # it does without

def test_nothing_asks_for_what_windows_or_a_mac_lacks():
    """By the imitation's lists; common.catch_signals asks by name."""
    found = set()
    patterns = ("*.py", "library/**/*.py", "training/*.py", "tools/*.py")
    for path in [path for pattern in patterns for path in HERE.glob(pattern)]:
        code = path.read_text(encoding="utf-8")
        if is_ours(str(path)):
            found |= {f"{path.name}: os.{name}" for name in re.findall(r"\bos\.(\w+)", code) if name in NO_OS}
            asked = re.findall(r"\bsignal\.(\w+)", code)
            found |= {f"{path.name}: signal.{name}" for name in asked if name not in SIGNALS}
            found |= {f"{path.name}: {name}" for name in ("/proc", "malloc_trim") if name in code}
            found |= {f"{path.name}: {name}" for name in NO_MODULES if re.search(rf"^\s*import {name}\b", code, re.M)}
    assert found <= HERE_ONLY

# ---- what is printed and written for it ------------------------------------------------------------------------------

WORDS = ["python", "plain", "two words", "a&b", "(x)", "it's", 'say "hi"', "C:\\my dir\\", "C:\\x\\y", "a,b;c",
         "tail\\", 'slash\\" in', "\u732b", "--data=a b", "x^y|z<w>", "", "@file", "#1", "{a}"]

def words_of(line):
    """What a program gets of a command line, by the rules of Microsoft's C runtime."""
    words, word, quoted, at = [], None, False, 0
    while at < len(line):
        slashes = len(line) - at - len(line[at:].lstrip("\\"))
        at += slashes
        if line[at:at + 1] == '"':
            word = (word or "") + "\\" * (slashes // 2)
            if slashes % 2 or quoted and line[at + 1:at + 2] == '"':
                word, at = word + '"', at + (slashes % 2 == 0)
            else:
                quoted = not quoted
        elif slashes:
            word, at = (word or "") + "\\" * slashes, at - 1
        elif line[at] == " " and not quoted:
            words, word = words + [word], None
        else:
            word = (word or "") + line[at]
        at += 1
    return words + [word]

def test_a_printed_command_can_be_pasted_there(windows):
    """Words come back as they were, and nothing stands outside of double quotes that a shell reads as its own."""
    line = common.shell_command(WORDS)
    assert words_of(line) == WORDS
    assert re.fullmatch(r'([\w.:/\\=+-]|"[^"]*")+', line.replace(" ", ""))
    assert "\n" not in common.shell_command(["a\nb"]) and common.os.name == "nt"

def test_a_picture_on_another_drive_has_a_link(monkeypatch, tmp_path):
    def relpath(path, start):
        raise ValueError("path is on mount 'D:', start on mount 'C:'")
    monkeypatch.setattr(os.path, "relpath", relpath)
    assert page_common.link(tmp_path / "a b.png", tmp_path / "index.html") == (tmp_path / "a b.png").as_uri()

def test_git_changes_no_byte_of_a_checkout():
    """Git for Windows would make CRLF of 676 files, whose hashes name encodings; .gitattributes forbids it for all."""
    git = lambda *words, given=b"": subprocess.run(["git", *words], cwd=HERE, input=given, capture_output=True)
    files = git("ls-files", "-z")
    if files.returncode:
        pytest.skip("a copy without git")
    said = git("check-attr", "-z", "--stdin", "text", "eol", "filter", given=files.stdout).stdout.split(b"\0")
    values = set(zip(said[1::3], said[2::3]))
    assert values == {(b"text", b"unset"), (b"eol", b"unspecified"), (b"filter", b"unspecified")}
    assert not [name for name in files.stdout.split(b"\0")[:-1] if name.endswith((b".py", b".json", b".txt"))
                and b"\r\n" in (HERE / os.fsdecode(name)).read_bytes()]

# what PowerShell 5.1, which every Windows has, reads otherwise than bash
NOT_POWERSHELL = {"&&": r"&&|\|\|", "line end": r"\\\s*$", "single quotes": "'", "bash": r"\b(export|source|sudo)\b",
                  "activate": r"(^|\s)\. \S*bin/", "python3": r"\bpython3\b", "variable": r"\$(?!env:)"}

def test_readme_gives_the_two_commands_for_powershell():
    """Three lines at most, by PowerShell's rules, with a torch for CUDA; and README says what has not been run."""
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```powershell\n(.*?)```", readme, re.S)
    assert blocks and "Windows: imitated in the tests, not run" in readme
    for block in blocks:
        wrong = [name for name, pattern in NOT_POWERSHELL.items() if re.search(pattern, block, re.M)]
        assert block.count("\n") <= 3 and not wrong, block
    for word in ("py -m venv env", r"env\Scripts\activate", "pip install -r requirements.txt", "python train.py",
                 "https://download.pytorch.org/whl/cu130"):
        assert word in "".join(blocks), word

def test_the_programs_names_have_no_separator_of_one_system():
    """No path is cut at "/" as a text: names are made by as_posix, parts by pathlib. What is cut there is a name."""
    cut = re.compile(r"""str\([^()]*\)\.(?:r?split|r?partition)\(["']/|os\.sep\b|\.split\(os\.path\.sep""")
    patterns = ("*.py", "library/**/*.py", "training/*.py", "tools/*.py")
    for path in [path for pattern in patterns for path in HERE.glob(pattern)]:
        assert not cut.search(path.read_text(encoding="utf-8")), path
