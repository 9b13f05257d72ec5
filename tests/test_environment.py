"""
The environment is not trusted: every text is UTF-8 by word, RANK and the like without torchrun are one line, and what a
variable says does not change numbers in silence.
"""
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import common
from library.cli import command_line
from library.models import devices, environment, hub
from training import run_log
from tests.harness import HERE, ON_DEVICE, add_item, assert_same_run, is_one_line, refused, run_script, works

# ---- texts -----------------------------------------------------------------------------------------------------------

OURS = r"(__main__|common|cache|predict|rope_patch|library|training|tools)\b"
LEGACY = """
import runpy, sys, warnings
warnings.filterwarnings("error", category=EncodingWarning, module={ours!r})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

def test_a_training_in_a_locale_that_is_not_utf_8_is_the_same_one(tmp_path):
    """A process in ASCII, which takes no byte of tokenizer.json as it is, learns what one in UTF-8 learns."""
    data = tmp_path / "data"
    for name in "ab":
        add_item(data, name, caption="f\u00fcge Schnee hinzu \u96ea")
    flags = ["--data", data, "--val_data", data, "--cache_dir", tmp_path / "cache", "--device", "cpu", "--max_steps", 2,
             "--batch_size", 2, "--val_pictures", 1, "--num_inference_steps", 2, "--lora_rank", 2]
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", LEGACY.format(ours=OURS), HERE / "train.py",
         *map(str, flags), "--out_dir", tmp_path / "ascii"], env=env, capture_output=True, cwd=tmp_path)
    assert job.returncode == 0, job.stderr[-2000:]
    result = run_script("train.py", *flags, "--out_dir", tmp_path / "utf-8")
    assert result.status == 0 and "encoding" not in result.out, result.err # its cache is complete
    assert_same_run(tmp_path / "ascii", tmp_path / "utf-8")

def test_a_prompt_that_the_locale_cannot_read_is_one_line_with_the_way_out():
    """As it arrives from a terminal in UTF-8 where the locale is ASCII."""
    prompt = b"\xe9\x9b\xaa".decode("ascii", "surrogateescape")
    result = run_script("predict.py", "--image", "a.png", "--prompt", prompt)
    assert result.status == 1 and is_one_line(result.errors[0], "--prompt", "LC_ALL=C.UTF-8"), result.err

# ---- processes -------------------------------------------------------------------------------------------------------

HERE_IS = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
STRAYS = [dict(RANK="1"), dict(WORLD_SIZE="2"), dict(LOCAL_RANK="1"), dict(LOCAL_WORLD_SIZE="8"), dict(RANK="x"),
          dict(WORLD_SIZE=""), dict(RANK="0", WORLD_SIZE="2"), dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="a"),
          HERE_IS | dict(WORLD_SIZE="2"), HERE_IS | dict(RANK="2", WORLD_SIZE="2"), dict(RANK="-1"),
          HERE_IS | dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="1"), HERE_IS | dict(RANK="0", WORLD_SIZE="0"),
          dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="http")]
SCRIPTS = ["train.py", "cache.py", "predict.py", *(f"tools/{name}.py" for name in (
    "bench convert_lora doctor gpu_check import_data lean_train measure page prune").split())]

def with_environment(patch, variables):
    for name in (*environment.NUMBERS, *HERE_IS, "TORCHELASTIC_RUN_ID"):
        patch.delenv(name, raising=False)
    for name, value in variables.items():
        patch.setenv(name, value)

@pytest.mark.parametrize("variables", STRAYS, ids=lambda variables: " ".join(map("=".join, variables.items())))
def test_variables_of_no_process_are_one_line_that_names_them_and_what_unsets_them(monkeypatch, variables):
    """Half of a set, no numbers, or a rank beyond the number of processes."""
    with_environment(monkeypatch, variables)
    result = run_script("train.py")
    assert result.status == 1 and len(result.err.splitlines()) == 1, result.err
    assert is_one_line(result.errors[0], *map("=".join, variables.items()), "; unset ", "start with torchrun")

@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_falls_silent_with_a_rank_that_is_left(monkeypatch, script):
    """Nor is a complete set taken by a script that works in one process: several would write the same files."""
    with_environment(monkeypatch, dict(RANK="1"))
    result = run_script(script)
    assert result.status == 1 and is_one_line(result.errors[0], "RANK=1", "unset RANK"), result.err
    if script in ("train.py", "cache.py", "predict.py", "tools/lean_train.py"):
        return
    with_environment(monkeypatch, HERE_IS | dict(RANK="1", WORLD_SIZE="2"))
    result = run_script(script)
    assert result.status == 2 and is_one_line(result.errors[0], "WORLD_SIZE", "works in one process"), result.err

def test_one_process_of_one_is_a_process(monkeypatch, data, tmp_path):
    """As a pod or srun has it, and half of that, which means the same."""
    for variables in (HERE_IS | dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"), dict(RANK="0"), HERE_IS):
        with_environment(monkeypatch, variables)
        assert run_script("cache.py", "--data", data, "--val_data", "--cache_dir", tmp_path / "cache").status == 0
        assert run_script("tools/prune.py", tmp_path / "cache").status == 0

def test_a_process_that_waits_for_the_others_says_so(monkeypatch, capsys):
    """Or one alone, in a shell where a complete set is left, would wait for hours in silence."""
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_, **__: iter([(None, 1, 2)]))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: time.sleep(1))
    with_environment(monkeypatch, HERE_IS | dict(RANK="1", WORLD_SIZE="2"))
    for patience, said in ((0.01, True), (20, False)):
        monkeypatch.setattr(devices, "PATIENCE", patience)
        devices.join_processes("gloo")
        out = capsys.readouterr().out
        assert ("process 1 of 2 (RANK, WORLD_SIZE) waits for the others at 127.0.0.1:29500" in out) == said

def test_a_port_that_another_program_has_is_one_line(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with_environment(monkeypatch, HERE_IS | dict(RANK="0", WORLD_SIZE="2", MASTER_PORT=str(port)))
        with refused(f"MASTER_PORT {port}", "a free port"):
            devices.join_processes("gloo")

# ---- what is set before our first line -------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [
    "DIFFUSERS_ATTN_BACKEND", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ACCELERATE_USE_FSDP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_a_variable_that_changes_numbers_is_not_used_and_said(monkeypatch, name):
    """One that changes the speed alone stays."""
    monkeypatch.setenv(name, "1"), monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = run_script("tools/prune.py", "none")
    assert f"warning: {name}=1: not used" in result.err and name not in os.environ and "OMP_NUM_THREADS" in os.environ
    assert "not used" not in run_script("tools/prune.py", "none").err

def test_python_without_docstrings_is_one_line(monkeypatch):
    monkeypatch.setattr(environment, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    with refused("PYTHONOPTIMIZE", "leave it out"):
        command_line.Parser(None)

def test_a_hub_that_the_environment_forbids_is_named(monkeypatch):
    """The network is not what has to be checked then."""
    for value, said in (("1", True), ("0", False)):
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        with pytest.raises(common.InputError) as e:
            hub.from_hub("some/model", lambda: 1 / 0)
        assert is_one_line(str(e.value), "some/model") and ("unset HF_HUB_OFFLINE" in str(e.value)) == said

def test_a_run_that_goes_on_in_other_surroundings_or_with_another_script_says_so(data, tmp_path, monkeypatch):
    """The log's first line has packages, Python and variables; the same ones, and a log that does not know, are no
    line."""
    script = Path(shutil.copy(HERE / "train.py", tmp_path))
    flags = ["--data", data, "--val_data", "--batch_size", 2, "--lr_scheduler", "constant", "--cache_dir",
             tmp_path / "cache", "--out_dir", tmp_path / "run", *ON_DEVICE]

    def said(steps, *more):
        """-> what the run says of its surroundings."""
        result = works(str(script), *flags, "--max_steps", steps, *more)
        return re.findall("other than when this run began: (.*?);", result.out)
    assert said(1) == said(2, "--resume") == []
    begun = json.loads((tmp_path / "run/log.jsonl").read_bytes().splitlines()[0])
    assert {"torch", "python", "machine", "environment"} <= begun.keys()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert said(3, "--resume")[0].startswith("environment")
    monkeypatch.delenv("MKL_CBWR")
    script.write_text(script.read_text("utf-8") + "\n# edited\n", "utf-8")
    assert said(4, "--resume")[0].startswith("script")
    assert run_log.environment_changes("{}", dict(script="a")) == []

def test_a_plan_and_a_device_that_is_named_need_no_card(tmp_path):
    """Nor does tiny, nor a name that is only misspelt, as another line answers it."""
    def wants(model="Qwen/Qwen-Image-Edit-2511", **flags):
        return environment.wants_card(SimpleNamespace(**dict(device=None, plan=False) | flags, model=str(model)))
    assert wants() and not wants(plan=True) and not wants(device="cpu")
    assert not any(map(wants, ["tiny", tmp_path, "./a/b", "qwen"]))
