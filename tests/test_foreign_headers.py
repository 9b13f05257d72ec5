"""
LoRA files and run folders of strangers are data: no name that they say is looked up, no pattern of theirs is a regex
that hangs, no link of theirs leads out, and whatever they say is taken or refused in one line before the work begins.

$ python -m pytest -q tests/test_foreign_headers.py              # a minute
$ python -m pytest -q tests/test_foreign_headers.py --fuzz 2000  # so many damages of each file
"""
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import safetensors.torch
import torch
from diffusers import QwenImageTransformer2DModel

import common
from library.files import tensor_files
from library.lora import foreign_loras, lora_paths, peft_config
from library.lora.lora_file import unfold
from training import resume, run_folder
import predict
from tests.fuzz import fuzz, nested
from tests.harness import (ON_DEVICE, TINY, assert_bitwise, is_one_line, layers_of, log_of, lora_file, lora_of,
                           lora_tensors, refused, renamed, run_script, within, works)

LAYER = "transformer.transformer_blocks.0.attn.to_q"

def of_diffusers(**config):
    return dict(lora_adapter_metadata=json.dumps({f"transformer.{k}": v for k, v in config.items()}))

def save(path, tensors, header=None):
    safetensors.torch.save_file(tensors, path, metadata=header)
    return path

def save_as_peft(folder, config):
    """A LoRA under peft's names, with this text as the config beside it."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(config, "utf-8")
    return save(folder / lora_paths.PEFT_FILE, renamed("transformer.", "base_model.model.")(lora_tensors()))

# ---- run folders: links ----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def made(small, tmp_path_factory):
    """A run of two steps with torch's AdamW, whose state has moments and a step for each parameter, and a checkpoint
    after each step; the names of train.py after it."""
    folder = tmp_path_factory.mktemp("made") / "run"
    flags = [*small.flags, "--max_steps", 2, "--save_every", 1, "--optimizer", "torch.optim.AdamW"]
    return SimpleNamespace(folder=folder, flags=flags, names=works("train.py", *flags, "--out_dir", folder).globals)

@pytest.fixture
def run(made, tmp_path):
    """A copy of its folder, to be changed."""
    return shutil.copytree(made.folder, tmp_path / "run")

@pytest.fixture
def mine(tmp_path):
    """A folder of the user's, with files that must stay as they are."""
    folder = tmp_path / "mine"
    (folder / "step_0000").mkdir(parents=True)
    (folder / "step_0000/photo.png").write_bytes(b"mine")
    (folder / "key.txt").write_text("SECRET KEY\n", "utf-8")
    (folder / "empty").touch()
    return folder

def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}

LINKS = { # name in the run folder: what of the user's it leads to
    "samples": "", "samples/step_000001": "step_0000", "samples/base": "", "samples/target/a.png": "key.txt",
    ".lock": "empty", "checkpoint-000001": "", "checkpoint-000002": "", "checkpoint-000003": "nothing",
    "checkpoint-000002/optimizer.safetensors": "key.txt", f"checkpoint-000002/{predict.LORA_FILE}": "key.txt",
    "log.jsonl": "key.txt", "DONE": "empty", predict.LORA_FILE: "key.txt", "tensorboard": "", "tensorboard/events": "",
    "wandb": "", "wandb/latest-run": "step_0000", ".tmp-checkpoint-000003": "step_0000", ".tmp-1": "key.txt",
    "notes/deep/link": "key.txt"}

def put_link(path, target):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)

def find_folder(folder, **flags):
    args = SimpleNamespace(**dict(out_dir=str(folder), resume=True, plan=False, tracker="none") | flags)
    return run_folder.find(args, "tiny-data")

@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_a_run_folder_is_named_and_nothing_outside_is_touched(run, mine, name):
    """With --resume, with --plan, relative or absolute."""
    before = contents(mine)
    put_link(run / name, mine / LINKS[name])
    for flags in (dict(), dict(plan=True)):
        with refused(run / name, "link"):
            find_folder(run, **flags)
    put_link(run / name, os.path.relpath(mine / LINKS[name], (run / name).parent))
    with refused(run / name, "link"):
        find_folder(run)
    assert contents(mine) == before

@pytest.mark.parametrize("name, begins", [
    ("samples", False), (".lock", False), ("checkpoint-000001", False), (".lock", True),
    (".tmp-checkpoint-000001", True)])
def test_train_py_looks_before_it_reads(tmp_path, made, run, mine, name, begins):
    """In a run that goes on, and in a folder without one. There hidden names do not count as content, so that --out_dir
    takes such a folder without --resume."""
    before = contents(mine)
    folder, more = (tmp_path / "new", []) if begins else (run, ["--resume", "--max_steps", 3])
    put_link(folder / name, mine / LINKS.get(name, "step_0000"))
    result = run_script("train.py", *made.flags, "--out_dir", folder, *more)
    assert result.status == 1 and is_one_line(result.errors[-1], folder / name), result.err
    assert contents(mine) == before and (run / "log.jsonl").read_bytes() == (made.folder / "log.jsonl").read_bytes()

def test_the_lock_s_package_does_not_cut_off_a_file_behind_a_link():
    """CVE-2025-68146 and CVE-2026-22701: mended in 3.20.1 and 3.20.3, which .ci/run tries."""
    line, = re.findall(r"^filelock>=([\d.]+),", (TINY.parent / "requirements.txt").read_text("utf-8"), re.M)
    assert tuple(map(int, line.split("."))) >= (3, 20, 3)

def test_the_lean_training_copies_nothing_that_a_link_leads_to(tmp_path, made, mine):
    """It writes the lines of its log again."""
    flags = [flag for flag in made.flags if flag != "--val_data"] + ["--out_dir", tmp_path / "run"]
    assert run_script("tools/lean_train.py", *flags).status == 0
    put_link(tmp_path / "run/log.jsonl", mine / "key.txt")
    result = run_script("tools/lean_train.py", *flags, "--resume")
    assert result.status == 1 and is_one_line(result.errors[-1], tmp_path / "run/log.jsonl"), result.err
    assert (tmp_path / "run/log.jsonl").is_symlink() and "SECRET" not in result.err

def test_links_that_stay_inside_and_those_of_a_hub_snapshot_are_fine(tmp_path, made, run):
    """wandb makes some, a person too, and the run folder itself may be one."""
    (run / "wandb/run-1").mkdir(parents=True)
    (run / "wandb/latest-run").symlink_to("run-1")
    (run / "latest").symlink_to("checkpoint-000002")
    (tmp_path / "link").symlink_to(run)
    assert find_folder(run) == run and find_folder(tmp_path / "link") == tmp_path / "link"
    snapshot = tmp_path / "hub/models--a--b/snapshots/1"
    (tmp_path / "hub/models--a--b/blobs").mkdir(parents=True)
    for path in [path for path in made.folder.rglob("*") if path.is_file() and path.name != ".lock"]:
        blob = tmp_path / "hub/models--a--b/blobs" / path.relative_to(made.folder).as_posix().replace("/", "-")
        shutil.copy(path, blob)
        put_link(snapshot / path.relative_to(made.folder), blob)
    assert find_folder(snapshot) == snapshot
    assert_bitwise(lora_of(snapshot), lora_of(made.folder))

FORMS = { # what stands in the place of which name
    "checkpoint-000002": "a file", "samples": "a file", "wandb": "a file", "log.jsonl": "a folder", "DONE": "a folder",
    ".lock": "a folder", predict.LORA_FILE: "a folder"}

@pytest.mark.parametrize("name", FORMS)
def test_a_file_in_the_place_of_a_folder_or_a_folder_of_a_file_is_one_line(made, run, name):
    if (run / name).is_dir():
        shutil.rmtree(run / name)
    (run / name).unlink(missing_ok=True)
    (run / name).touch() if FORMS[name] == "a file" else (run / name).mkdir()
    result = run_script("train.py", *made.flags, "--out_dir", run, "--resume", "--max_steps", 3)
    assert result.status == 1 and is_one_line(result.errors[-1], run / name), result.err

@pytest.mark.parametrize("name", ["checkpoint-99999999999999999999", "checkpoint-" + "9" * 238,
                                  "checkpoint-0000000000000000002x", "checkpoint-\u0663"])
def test_a_checkpoint_of_a_strange_name_does_not_stop_a_run(made, run, name):
    """It is damaged, or none: the run goes on from the whole one, and ends with DONE."""
    shutil.copytree(run / "checkpoint-000002", run / name)
    result = run_script("train.py", *made.flags, "--out_dir", run, "--resume", "--max_steps", 3)
    assert result.status == 0 and [r["step"] for r in log_of(run)] == [1, 2, 3], result.err
    assert (run / "DONE").exists()

def test_find_lora_takes_what_is_inside_a_folder_only(tmp_path, mine, made):
    """Not through a link to a LoRA elsewhere, to a key, of a checkpoint. A file that is named is taken."""
    for name in (predict.LORA_FILE, lora_paths.PEFT_FILE, f"checkpoint-000001/{predict.LORA_FILE}"):
        folder = tmp_path / name.replace("/", "-")
        put_link(folder / name, mine / "key.txt")
        with refused(folder / name, "link"):
            lora_paths.find_lora(folder)
    put_link(tmp_path / "by_folder/checkpoint-000002", made.folder / "checkpoint-000002")
    with refused("by_folder", "link"):
        lora_paths.find_lora(tmp_path / "by_folder")
    put_link(tmp_path / "named.safetensors", made.folder / predict.LORA_FILE)
    assert_bitwise(lora_of(tmp_path / "named.safetensors"), lora_of(made.folder))

def test_a_text_file_is_not_quoted(tmp_path, mine):
    """It may lie behind a stranger's link. Nor is a config beside a LoRA."""
    put_link(tmp_path / "lora.safetensors", mine / "key.txt")
    with refused("lora.safetensors", "no whole .safetensors") as e:
        predict.read_lora(tmp_path / "lora.safetensors")
    assert "SECRET" not in str(e.value)
    theirs = save_as_peft(tmp_path / "theirs", "")
    (mine / "key.txt").write_text('"SECRET KEY"', "utf-8")
    put_link(theirs.with_name("adapter_config.json"), mine / "key.txt")
    with refused("link") as e:
        predict.read_lora(theirs)
    assert "SECRET" not in str(e.value)

# ---- run folders: what costs more than it weighs ---------------------------------------------------------------------

@pytest.mark.parametrize("name", [
    "fifo", "notes/deep/fifo", "checkpoint-000002/optimizer.safetensors", f"checkpoint-000002/{predict.LORA_FILE}"])
def test_what_is_neither_file_nor_folder_is_named_and_read_by_nobody(run, name):
    """A FIFO hangs who reads it, in a checkpoint too."""
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for flags in (dict(), dict(plan=True)):
        with within(5), refused(run / name):
            find_folder(run, **flags)
    with within(5), refused(run / name):
        tensor_files.read_tensors(run / name)
    if "checkpoint" in name:
        with within(5), refused(run / name):
            resume.read_checkpoint(run / "checkpoint-000002")

def put_sparse(path, shapes, notes=None):
    """Writes a safetensors file of fp32 tensors that are holes: it takes 4 KB of the disk."""
    header, end = {"__metadata__": notes} if notes else {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = dict(dtype="F32", shape=shape, data_offsets=[begin, end])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    return path

@contextlib.contextmanager
def in_memory(most):
    """The block takes at most so many bytes more than there are, at any moment."""
    Path("/proc/self/clear_refs").write_text("5", "utf-8") # the peak begins anew
    def peak():
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text("utf-8"))[1])
    before = peak()
    yield
    assert peak() - before < most

@pytest.mark.parametrize("name, word", [("optimizer.safetensors", "over"), (predict.LORA_FILE, "larger")])
def test_a_checkpoint_with_holes_is_not_read(checkpoint, name, word):
    """2 GB of zeros take no place on the disk, and would take 4 GB of the memory."""
    put_sparse(checkpoint / name, {f"{LAYER}.lora_A.weight": (1, 2**29)})
    for optimizer in ("", "torch.optim.AdamW"):
        with in_memory(2**28), within(5), refused(checkpoint / name, word):
            resume.read_checkpoint(checkpoint, optimizer)

def test_a_lora_with_holes_is_not_read(tmp_path, monkeypatch):
    """As diffusers writes it, as this project does, and as other programs do; nor many matrices, each of which a layer
    could have."""
    monkeypatch.setattr("library.lora.lora_file.MOST_BYTES", 2**30) # else the file would need 32 GB of address space
    signed = json.dumps({"format": tensor_files.FORMAT, "sha256": tensor_files.NO_DIGEST})
    one = {f"{LAYER}.lora_A.weight": (1, 2**29)}
    many = {f"{LAYER.replace('.0.', f'.{n}.')}.lora_A.weight": (3000, 20_000) for n in range(5)}
    for shapes, notes in ((one, {}), (one, dict(lora_adapter_metadata=signed)), (one, dict(alpha="1")), (many, {})):
        path = put_sparse(tmp_path / "x.safetensors", shapes, notes)
        with in_memory(2**28), within(5), refused(path, "larger"):
            predict.read_lora(path)

def test_a_long_config_beside_a_lora_is_not_read(tmp_path):
    path = save_as_peft(tmp_path, "")
    os.truncate(tmp_path / "adapter_config.json", 2**30)
    with in_memory(2**28), within(5), refused("adapter_config.json", "over"):
        predict.read_lora(path)

def test_a_log_longer_than_any_is_not_read(run):
    os.truncate(run / "log.jsonl", common.LONG_TEXT + 1)
    with within(5), refused(run / "log.jsonl", "over"):
        find_folder(run)

# ---- run folders: what a checkpoint says -----------------------------------------------------------------------------

def restored(made, folder):
    """Whether a checkpoint is put back; an InputError passes. The run of `made` is left as it was."""
    names = made.names
    checkpoint = resume.read_checkpoint(folder)
    optimizer = names["make_optimizer"](names["lora"].values())
    resume.load_checkpoint(checkpoint, names["lora"], optimizer, names["make_optimizer"])
    for p in names["lora"].values():
        p.grad = torch.zeros_like(p)
    optimizer.step()

def rewrite(folder, change, name="optimizer.safetensors"):
    """Writes a checkpoint's file again, after change(tensors, metadata), with the right digest."""
    key = "lora_adapter_metadata" if name == predict.LORA_FILE else "json"
    tensors, meta = tensor_files.read_tensors(folder / name, key)
    change(tensors, meta)
    tensor_files.write_tensors(folder / name, tensors, meta, key)
    return folder

def pairs_of(meta, place):
    """The [key, value] pairs of the first param group, or of a parameter's state."""
    saved = meta["optimizer"]
    return (saved["param_groups"]["list"][0] if place == "group" else saved["state"][place])["dict"]

def set_entry(place, key, value):
    """It returns a function that puts an entry in the place of the one of that name, or adds it."""
    def change(tensors, meta):
        pairs = pairs_of(meta, place)
        pairs[:] = [pair for pair in pairs if pair[0] != key] + [[key, value]]
    return change

def set_saved(key, value):
    return lambda tensors, meta: meta["optimizer"].update({key: value})

FIRST = "transformer_blocks.0.attn.to_q.lora_A.default.weight"
OWNED = Path(tempfile.mkdtemp()) / "owned"
COMMAND = {"subprocess.call": ["touch", str(OWNED)]}
STATES = {
    "a command": set_entry("group", "x", COMMAND), "a command for a state": set_saved("state", COMMAND),
    "a command for groups": set_saved("param_groups", COMMAND),
    "another kind": set_entry("group", "betas", {"set": [1]}),
    "two kinds": set_entry("group", "betas", {"list": [1], "tuple": [2]}), "no kind": set_entry("group", "betas", {}),
    "a list for a state": set_saved("state", []), "no state": set_saved("state", {}),
    "no group": set_saved("param_groups", {"list": []}), "groups that are a number": set_saved("param_groups", 3),
    "two groups": lambda tensors, meta: meta["optimizer"]["param_groups"]["list"].extend(
        meta["optimizer"]["param_groups"]["list"]),
    "no parameters": set_entry("group", "params", {"list": []}),
    "a text for a number": set_entry("group", "eps", "1e-8"), "a number for two": set_entry("group", "betas", 0.9),
    "a huge number": set_entry("group", "weight_decay", 1e300),
    "a number of many digits": set_entry("group", "weight_decay", 10**400),
    "NaN": set_entry("group", "eps", math.nan),
    "another parameter": lambda tensors, meta: meta["optimizer"]["state"].update({"x.99": {"dict": []}}),
    "a number for a parameter's state": lambda tensors, meta: meta["optimizer"]["state"].update({FIRST: 3}),
    "a key that is a list": set_entry("group", {"list": []}, 1),
    "no tensor of that name": set_entry(FIRST, "exp_avg", {"tensor": ["nothing", False]}),
    "a number for a tensor": set_entry(FIRST, "exp_avg", 1),
    "a tensor of another": set_entry(FIRST, "exp_avg", {"tensor": ["step." + FIRST, True]}),
    "a deep list": set_entry("group", "betas", nested(300)),
    "an entry of one": lambda tensors, meta: pairs_of(meta, "group").append(["lr"]),
    "nothing": lambda tensors, meta: meta["optimizer"].clear(),
    "a parameter missing": lambda tensors, meta: [meta["optimizer"]["state"].pop(FIRST)] + [
        tensors.pop(f"{key}.{FIRST}") for key in ("step", "exp_avg", "exp_avg_sq")],
    "a moment missing": lambda tensors, meta: (tensors.pop("exp_avg." + FIRST), pairs_of(meta, FIRST).remove(
        next(pair for pair in pairs_of(meta, FIRST) if pair[0] == "exp_avg"))),
    "a tensor missing": lambda tensors, meta: tensors.pop("exp_avg." + FIRST),
    "a tensor more": lambda tensors, meta: tensors.update(evil=torch.ones(2)),
    "a tensor of another shape": lambda tensors, meta: tensors.update({"exp_avg." + FIRST: torch.zeros(3)}),
    "a tensor with NaN": lambda tensors, meta: tensors["exp_avg_sq." + FIRST].fill_(math.nan),
    "a negative step": lambda tensors, meta: tensors["step." + FIRST].fill_(-5),
    "no config": lambda tensors, meta: meta.update(config=7),
    "a step that is a float": lambda tensors, meta: meta.update(step=2.0),
    "a step that is true": lambda tensors, meta: meta.update(step=True)}

@pytest.fixture
def checkpoint(made, tmp_path):
    """A copy of its last checkpoint, to be changed."""
    return shutil.copytree(made.folder / "checkpoint-000002", tmp_path / "checkpoint-000002")

def test_a_checkpoint_as_it_is_can_be_restored(made, checkpoint):
    """So can one of an older torch, whose groups lacked a setting."""
    restored(made, checkpoint)
    rewrite(checkpoint, lambda tensors, meta: pairs_of(meta, "group").remove(["foreach", None]))
    restored(made, checkpoint)

@pytest.mark.parametrize("place", ["group", FIRST])
@pytest.mark.parametrize("key", ["step", "evil", "_optimizer_step_pre_hooks", "__class__", "state", "param_groups"])
def test_a_stranger_s_state_reaches_two_dictionaries_and_no_attribute(made, checkpoint, place, key):
    """Whatever name it has there, it is a plain value in a param group or in a parameter's state."""
    rewrite(checkpoint, set_entry(place, "step.1" if key == "step" and place != "group" else key, {"dict": [["x", 3]]}))
    names = made.names
    optimizer = names["make_optimizer"](names["lora"].values())
    def attributes():
        return {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    before = attributes()
    resume.load_checkpoint(resume.read_checkpoint(checkpoint), names["lora"], optimizer, names["make_optimizer"])
    assert attributes() == before
    assert type(optimizer) is torch.optim.AdamW and optimizer.step.__func__ is torch.optim.AdamW.step
    values = [*optimizer.param_groups[0].values()]
    for state in optimizer.state.values():
        values += state.values()
    assert {"x": 3} in [value for value in values if isinstance(value, dict)]

@pytest.mark.parametrize("kind", STATES)
def test_a_stranger_s_optimizer_state_is_one_line_and_runs_nothing(made, checkpoint, kind):
    """Its digest is right: a stranger can compute it, too."""
    rewrite(checkpoint, STATES[kind])
    with refused(checkpoint):
        restored(made, checkpoint)
    assert not OWNED.exists()

@pytest.mark.parametrize("kind", ["a command", "no group", "a tensor of another shape", "a tensor with NaN"])
def test_train_py_ends_before_the_first_step_and_changes_nothing(made, run, kind):
    rewrite(run / "checkpoint-000002", STATES[kind])
    before = contents(run)
    result = run_script("train.py", *made.flags, "--out_dir", run, "--resume", "--max_steps", 3)
    assert result.status == 1 and is_one_line(result.errors[-1], run / "checkpoint-000002/optimizer.safetensors")
    assert contents(run) == before and not OWNED.exists()

LORAS = {
    "a layer missing": lambda tensors, meta: tensors.pop(min(tensors)),
    "another name": lambda tensors, meta: tensors.update({"evil": tensors.pop(min(tensors))}),
    "a layer more": lambda tensors, meta: tensors.update({f"{LAYER}x.lora_A.weight": torch.ones(2, 2)}),
    "another rank": lambda tensors, meta: tensors.update(
        {k: v[:1] if "_A" in k else v[:, :1] for k, v in tensors.items()}),
    "another dtype": lambda tensors, meta: tensors.update({k: v.half() for k, v in tensors.items()}),
    "NaN": lambda tensors, meta: tensors[min(tensors)].fill_(math.nan)}

@pytest.mark.parametrize("kind", LORAS)
def test_a_checkpoint_with_another_lora_is_one_line(made, checkpoint, kind):
    rewrite(checkpoint, LORAS[kind], predict.LORA_FILE)
    with refused(checkpoint / predict.LORA_FILE):
        restored(made, checkpoint)

CONFIGS = {"a deep list": {"lr": nested(200)}, "long": {"lr": "x" * 10**6}, "a text": {"data_hash": [1]},
           "controls": {"lr": "\x1b[2J\nerror"}, "empty": {}}

@pytest.mark.parametrize("kind", CONFIGS)
def test_a_checkpoint_s_config_is_compared_whatever_it_says(made, run, kind):
    def change(tensors, meta):
        meta["config"] = meta["config"] | CONFIGS[kind] if CONFIGS[kind] else {}
    rewrite(run / "checkpoint-000002", change)
    result = run_script("train.py", *made.flags, "--out_dir", run, "--resume", "--max_steps", 3)
    assert result.status == 1 and is_one_line(result.errors[-1], "--resume"), result.err
    assert len(result.errors[-1]) < 2000 and "\x1b" not in result.err

# ---- LoRA files: alpha -----------------------------------------------------------------------------------------------

HUGE = ["1e999", "NaN", "Infinity", "2e6", "true", '"8"', "null", "[8]", "9" * 400]

def alpha_files(folder, text):
    """-> paths of LoRAs, each of which says this alpha in another place."""
    for name, entry in dict(header='"transformer.lora_alpha": %s}', pattern=(
            '"transformer.lora_alpha": 2, "transformer.alpha_pattern": {"to_q": %s}}')).items():
        header = dict(lora_adapter_metadata='{"transformer.r": 2, ' + entry % text)
        yield save(folder / f"{name}.safetensors", lora_tensors(), header)
    yield save_as_peft(folder / "peft", '{"r": 2, "lora_alpha": %s}' % text)
    if text not in ('"8"', "null", "[8]"): # in a flat header a number is a text anyway
        yield save(folder / "flat.safetensors", lora_tensors(), dict(lora_alpha=text, r="2"))

@pytest.mark.parametrize("text", HUGE, ids=lambda text: text[:9])
def test_an_alpha_that_is_no_finite_number_is_one_line_wherever_it_stands(tmp_path, text):
    for path in alpha_files(tmp_path, text):
        with refused(path):
            predict.read_lora(path)
    for value in (math.inf, math.nan, 1e30, True):
        path = save(tmp_path / "x.safetensors", lora_tensors() | {f"{LAYER}.alpha": torch.tensor(value)})
        with refused(path, "alpha"):
            predict.read_lora(path)

# ---- LoRA files: what makes one no plain LoRA ------------------------------------------------------------------------

def test_every_field_of_peft_s_configs_is_known():
    """A new one fails here: does it change what a file's two matrices mean? (Of LoKr, which becomes a LoRA, the tests
    of its forms ask the same.)"""
    names = set()
    for config in (peft.LoraConfig, peft.LoKrConfig):
        names |= {field.name for field in dataclasses.fields(config)}
    lists = [peft_config.SCALE, peft_config.TRAINING, [*peft_config.CHANGES]]
    assert sorted(sum(lists, [])) == sorted(names)

CHANGED = [*(dict(init_lora_weights=init) for init in (
    "pissa", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga", "of tomorrow")), *(
    dict(peft_type=kind) for kind in ("LOHA", "IA3", "ADALORA", "OFT", "XLORA")), dict(use_dora=True),
    dict(use_qalora=True),
    dict(alora_invocation_tokens=[1, 2]), dict(lora_bias=True), dict(bias="lora_only"), dict(bias="all"),
    dict(modules_to_save=["proj_out"]), dict(layer_replication=[[0, 2]]), dict(trainable_token_indices=[1]),
    dict(kasa_config={"beta": 1}), dict(arrow_config={"top_k": 1}), dict(use_bdlora={"nblocks": 2})]
UNCHANGED = [*(dict(init_lora_weights=init) for init in (True, False, None, "gaussian", "orthogonal", "eva")), dict(
    peft_type="LORA", bias="none", use_dora=False, modules_to_save=None, alora_invocation_tokens=[], lora_dropout=0.5,
    megatron_core="megatron.core", qalora_group_size=16, loftq_config={"loftq_bits": 4}, target_modules=["to_q"])]

def places_of(folder, said):
    """-> a LoRA's files, each of which says this in another place."""
    config = dict(r=2, lora_alpha=2, **said)
    flat = {key: str(value) for key, value in said.items()}
    headers = [of_diffusers(**config), dict(lora_adapter_metadata=json.dumps(config)), flat,
               {f"transformer.{key}": text for key, text in flat.items()}, dict(ss_network_args=json.dumps(said))]
    for n, header in enumerate(headers):
        yield save(folder / f"{n}.safetensors", lora_tensors(), header)
        bare = renamed("transformer.", "")(lora_tensors())
        yield save(folder / f"{n}-bare.safetensors", bare, header)
    yield save_as_peft(folder / "peft", json.dumps(config)).parent

@pytest.mark.parametrize("said", CHANGED, ids=str)
def test_what_changes_the_meaning_of_the_matrices_is_refused_wherever_it_stands(tmp_path, said):
    for path in places_of(tmp_path, said):
        with refused(path, f"says {min(said)} ", "plain LoRA"):
            predict.read_lora(path)

@pytest.mark.parametrize("said", UNCHANGED, ids=str)
def test_what_tells_of_the_training_alone_is_read_without_a_word(tmp_path, said, capfd):
    for path in places_of(tmp_path, said):
        predict.read_lora(path)
    assert capfd.readouterr() == ("", "")

def test_a_field_of_a_later_peft_is_one_warning(tmp_path, capfd):
    predict.read_lora(save(tmp_path / "x.safetensors", lora_tensors(), of_diffusers(r=2, lora_alpha=2, use_new=True)))
    error = capfd.readouterr().err
    assert error.startswith("warning: ") and "use_new" in error and error.count("\n") == 1, error

def test_a_model_saved_with_its_lora_layers_is_told_so(tmp_path):
    """As a folder, as one file, and as a LoRA; before it is loaded."""
    model = QwenImageTransformer2DModel.from_pretrained(TINY / "transformer")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"]))
    model.save_pretrained(tmp_path / "m/transformer")
    file, = tmp_path.glob("m/transformer/*.safetensors")
    for name in (tmp_path / "m", file):
        result = run_script("predict.py", "--transformer", name, *ON_DEVICE)
        assert result.status == 1 and is_one_line(result.errors[-1], name, "pipe.unload_lora_weights()"), result.err
        assert len(result.err.splitlines()) == 1
    with refused(file, "LoRA layers around its own"):
        predict.read_lora(file)

# ---- LoRA files: names and patterns ----------------------------------------------------------------------------------

SLOW = ["(.+)+!", "(a|a)(a|a)(a|a)", ".*.*.*.*!", "(\\w+\\s?)+$", "(?=x)", "((a))", "a{1000}", "[a-z]+", "(to_q", "\\",
        "(x+x+)+y", "\\d+\\d+\\d+\\d+!", "to_q)", "*", "\x1b[2J"]
NO_PATTERNS = [*({pattern: 2} for pattern in SLOW), [1], "to_q", 3, True]

@pytest.mark.parametrize("patterns", NO_PATTERNS, ids=repr)
def test_a_pattern_that_could_search_long_is_one_line_at_once(tmp_path, patterns):
    """In peft these are regexes. In the header, and beside a file of peft's names; and what is no pattern at all. Such
    a rank_pattern is not needed, as the tensors tell the ranks."""
    for field in ("rank_pattern", "alpha_pattern"):
        config = dict(r=8, lora_alpha=1) | {field: patterns}
        for file in (save(tmp_path / "x.safetensors", lora_tensors(), of_diffusers(**config)),
                     save_as_peft(tmp_path / "peft", json.dumps(config))):
            with within(5):
                if field == "rank_pattern":
                    assert predict.read_lora(file).meta["transformer.lora_alpha"] == 1
                    continue
                with refused(file, field):
                    predict.read_lora(file)

def test_many_patterns_and_wildcards_end_soon(tmp_path):
    """As many as are taken, in a LoRA of 840 layers."""
    layers = {f"transformer_blocks.{b}.attn.x{n}": n for b in range(60) for n in range(14)}
    for patterns in ({f".*{n}.*x{n}": 1 for n in range(20)}, {name: 1 for name in layers},
                     {f"^({'|'.join(layers)})": 1}, {f"x\\d+{n}": 1 for n in range(2000)}):
        begun = time.process_time()
        read = peft_config.read_patterns(patterns, "rank_pattern")
        assert [peft_config.number_of_layer(read, layer, 0) for layer in layers]
        assert time.process_time() - begun < 10
    read = peft_config.read_patterns({r"transformer_blocks\.[01]\.attn": 4}, "alpha_pattern")
    assert [peft_config.number_of_layer(read, f"transformer_blocks.{n}.attn", 2) for n in range(3)] == [4, 4, 2]
    for patterns in ({f".*{n}": 1 for n in range(50)}, {f"x{n}": 1 for n in range(3000)}, {"x" * 300_000: 1}):
        with pytest.raises(ValueError, match="too many"):
            peft_config.read_patterns(patterns, "rank_pattern")

def test_a_long_pattern_for_many_layers_is_one_line_at_once(tmp_path):
    """Each of 10,000 layers would go through 200,000 letters; and ours for all layers of the real model are taken."""
    names = [f"transformer_blocks.{b}.attn.to_q" for b in range(10_000)]
    tensors = {f"transformer.{name}.lora_{half}.weight": torch.ones(1, 1) for name in names for half in "AB"}
    pattern = f"^({'|'.join(['x' * 19] * 9_990)})"
    path = save(tmp_path / "x.safetensors", tensors, of_diffusers(r=1, lora_alpha=1, alpha_pattern={pattern: 2}))
    with within(10), refused(path, "too many names"):
        predict.read_lora(path)
    linears = [name for name in foreign_loras.layer_names().values() if ".0." in name]
    names = [name.replace(".0.", f".{b}.", 1) for b in range(60) for name in linears]
    patterns = foreign_loras.alpha_meta({name: n % 8 for n, name in enumerate(names)})["transformer.alpha_pattern"]
    config = dict(r=1, lora_alpha=1, rank_pattern={pattern: 1 for pattern in patterns}, alpha_pattern=patterns)
    peft_config.check_config("x", config, len(names))

def test_many_small_tensors_are_one_line_at_once(tmp_path):
    with within(10), refused("100,000"):
        predict.read_lora(put_sparse(tmp_path / "x.safetensors", {f"t{n}": (0,) for n in range(100_000)}))

LAYERS = layers_of(lora_tensors())
FOLDED = [4.0, "x", None, [], {"to_z": 4.0}, *[dict.fromkeys(LAYERS, value) for value in (
    "4", True, 1e-7, -2e6, math.nan, 10**400, [4.0])]]

@pytest.mark.parametrize("folded, b", [
    *((folded, 1.0) for folded in FOLDED), # and scales whose alpha is too large, or that make lora_B overflow
    (dict.fromkeys(LAYERS, 1e6), 1.0), (dict.fromkeys(LAYERS, 1e-6), 1e36)], ids=lambda value: f"{value!s:.20}")
def test_a_folded_scale_that_cannot_be_ours_is_one_line(tmp_path, folded, b):
    """It comes with the file, whose digest is right. predict.py, which does not need it, reads the file."""
    tensors = {key: torch.full_like(value, b) for key, value in lora_tensors(rank=16).items()}
    meta = {"transformer.r": 16, "transformer.lora_alpha": 16, "train.folded": folded}
    tensor_files.write_tensors(tmp_path / "x.safetensors", tensors, meta, "lora_adapter_metadata")
    lora = predict.read_lora(tmp_path / "x.safetensors")
    with refused(lora.path, "train.folded"):
        unfold(lora)

def test_train_py_looks_at_a_folded_scale_before_it_begins(tmp_path):
    path = lora_file(tmp_path, lora_tensors(), **{"train.folded": 4.0})
    result = run_script("train.py", "--pretrained_lora", path, "--out_dir", tmp_path / "a")
    assert result.status == 1 and is_one_line(result.errors[-1], path, "train.folded"), result.err
    assert not (tmp_path / "a").exists()

def test_what_reaches_peft_are_patterns_of_our_own(tmp_path):
    path = save(tmp_path / "x.safetensors", lora_tensors(), of_diffusers(
        r=2, lora_alpha=2, alpha_pattern={".*\\d+.attn.to_q": 4}, target_modules="(.+)+!", exclude_modules="(.+)+!",
        layers_to_transform=[0], layers_pattern="(.+)+!", lora_dropout=0.5))
    config = predict.config_of(predict.read_lora(path))
    blocks = [f"transformer_blocks.{b}.attn.to_q" for b in (0, 1)]
    assert config["alpha_pattern"] == {f"^({'|'.join(map(re.escape, blocks))})": 4}
    assert not {"exclude_modules", "layers_to_transform", "layers_pattern"} & config.keys()
    assert sorted(config["target_modules"]) == layers_of(lora_tensors())
    with within(30):
        predict.load_loras(predict.load_transformer(TINY, "float32"), [predict.read_lora(path)])

KEYS = [".lora_" * 20_000, "transformer." * 20_000 + "img_in.lora_A.weight", "_lora." * 20_000,
        "transformer_blocks." + "9" * 5000 + ".attn.to_q.lora_A.weight", ".lora_A.weight" * 9000,
        "transformer.img_in" + "x" * 100_000 + ".lora_A.weight", "lora_B." + "a." * 20_000 + "bias"]

@pytest.mark.parametrize("key", KEYS, ids=lambda key: key[:20])
def test_a_long_name_of_a_tensor_is_one_short_line_at_once(tmp_path, key):
    for tensors in ({key: torch.ones(2, 2)}, lora_tensors() | {key: torch.ones(2, 2)}):
        path = save(tmp_path / "x.safetensors", tensors)
        with within(5), pytest.raises(common.InputError) as e:
            predict.read_lora(path)
        assert is_one_line(str(e.value), path) and len(str(e.value)) < 1000

def test_the_words_for_another_model_are_found_in_no_time():
    """foreign.family's patterns, over names that each of them nearly fits."""
    names = [word * 20 for word in ("transformer_blocks.1.", "layers_1_", "single_", "te1_te2_", "decoder.", "1" * 40)]
    begun = time.process_time()
    tensor_files.family_of(names * 3000)
    assert time.process_time() - begun < 5

# ---- LoRA files: sizes -----------------------------------------------------------------------------------------------

def lora_shapes(a, b):
    return {"lora_A.weight": a, "lora_B.weight": b}

SHAPES = { # of a layer's tensors, each of a few KB: of a LoRA or a LoKr
    "rank 0": lora_shapes((0, 128), (160, 0)), "no inputs": lora_shapes((2, 0), (160, 2)),
    "no outputs": lora_shapes((2, 128), (0, 2)), "rank 4000": lora_shapes((4000, 4), (4, 4000)),
    "rank 0 alone": lora_shapes((0, 0), (0, 0)),
    "kron of columns": dict(lokr_w1=(10**5, 1), lokr_w2=(10**5, 1)),
    "kron of rows": dict(lokr_w1=(1, 10**5), lokr_w2=(1, 10**5)),
    "narrow": dict(lokr_w1_a=(10**5, 1), lokr_w1_b=(1, 10**5), lokr_w2_a=(10**5, 1), lokr_w2_b=(1, 10**5)),
    "no rank": dict(lokr_w1=(4, 4), lokr_w2_a=(4, 0), lokr_w2_b=(0, 4)),
    "not equal": dict(lokr_w1=(4, 4), lokr_w2_a=(4, 3), lokr_w2_b=(2, 4)),
    "a LoHa": dict(hada_w1_a=(4, 4), hada_w1_b=(4, 4), hada_w2_a=(4, 4), hada_w2_b=(4, 4))}

@pytest.mark.parametrize("kind", SHAPES)
def test_a_lora_of_impossible_size_is_one_line_at_once(tmp_path, kind):
    path = save(tmp_path / "x.safetensors", {f"{LAYER}.{k}": torch.ones(shape) for k, shape in SHAPES[kind].items()})
    with within(10), refused(path):
        predict.load_loras(predict.load_transformer(TINY, "float32", weights=False), [predict.read_lora(path)])

def test_a_lokr_without_one_of_its_matrices_names_it(tmp_path):
    for names, missing in ((["lokr_w1"], "lokr_w2_a"), (["lokr_w1_a", "lokr_w2"], "lokr_w1_b")):
        tensors = {f"{LAYER}.{name}": torch.ones(4, 4) for name in names}
        with refused(f"{LAYER.removeprefix('transformer.')} has no {missing}"):
            predict.read_lora(save(tmp_path / "x.safetensors", tensors))

def test_a_lokr_whose_change_overflows_is_one_line(tmp_path):
    tensors = {f"{LAYER}.lokr_w1": torch.full((4, 4), 3e38), f"{LAYER}.lokr_w2": torch.full((4, 4), 3e38)}
    with refused("to_q"):
        predict.read_lora(save(tmp_path / "x.safetensors", tensors, of_diffusers(r=1, lora_alpha=1e6)))

GEOMETRIES = [["x"], "abc", None, True, {}, dict(target_pixels=10**9), dict(target_pixels="1"),
              dict(target_pixels=["native"]), dict(target_pixels=1e6), dict(target_pixels=True), dict(upscale=1),
              dict(control_pixels=None), dict(control_pixels=31), dict(evil=1)]

NO_SIZES = SimpleNamespace(model="tiny", target_pixels=None, control_pixels=None, upscale=None) # predict.py's flags

@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda value: str(value)[:40])
def test_a_lora_s_sizes_are_such_as_the_flags_take_or_one_line(tmp_path, geometry):
    """In a file of ours, whose digest is right, in one of diffusers, and in one that other programs write."""
    if isinstance(geometry, dict) and geometry:
        geometry = dict(target_pixels=1024**2, control_pixels="native", upscale=True) | geometry
    meta = {"transformer.r": 2, "transformer.lora_alpha": 2, "train.geometry": geometry}
    file = tmp_path / "x.safetensors"
    tensor_files.write_tensors(file, lora_tensors(), meta, "lora_adapter_metadata")
    others = save(tmp_path / "y.safetensors", lora_tensors(prefix="diffusion_model."), dict(train=json.dumps(meta)))
    for path in (file, lora_file(tmp_path, lora_tensors(), **meta), others):
        if geometry is None: # says nothing
            assert predict.find_geometry(NO_SIZES, [predict.read_lora(path)])["target_pixels"] == ["native"]
            continue
        with refused(path, "geometry"):
            predict.read_lora(path)

@pytest.mark.parametrize("name", ["lora_adapter_metadata", "train"])
def test_deep_or_strange_json_in_a_header_is_no_traceback(tmp_path, name):
    for text in ("[" * 10**5, '{"a":' * 10**5, '{"transformer.lora_alpha":' + "[" * 900 + "]" * 900 + "}",
                 "{", "[]", "5", "null", '{"transformer.r": 2}', '{"transformer.rank_pattern": 3}'):
        path = save(tmp_path / "x.safetensors", lora_tensors(), {name: text})
        try:
            predict.read_lora(path)
        except common.InputError as e:
            assert is_one_line(str(e), path)

# ---- fuzz ------------------------------------------------------------------------------------------------------------

META = {f"transformer.{k}": v for k, v in dict(
    r=2, lora_alpha=3, rank_pattern={}, alpha_pattern={"to_q": 4, "^(transformer_blocks\\.0\\.attn\\.to_out\\.0)": 5},
    use_rslora=False, target_modules=["to_q"], exclude_modules=None, layers_to_transform=None, layers_pattern=None,
    lora_dropout=0.0, use_dora=False, bias="none", modules_to_save=None).items()} | {
    "train.step": 2, "train.geometry": dict(target_pixels=1024**2, control_pixels="native", upscale=True),
    "train.config": {"lr": 1}, "train.versions": {"torch": "2"}, "train.model": "tiny"}

def all_of(path):
    """What predict.py does with a LoRA's file before it draws."""
    lora = predict.read_lora(path)
    predict.config_of(lora)
    predict.find_geometry(NO_SIZES, [lora])

def test_fuzz_of_a_lora_s_metadata(tmp_path):
    """Of diffusers, of ours with the right digest, and as flat texts."""
    tensors, path = lora_tensors(), tmp_path / "x.safetensors"
    def diffusers(meta):
        all_of(save(path, tensors, dict(lora_adapter_metadata=json.dumps(meta))))
    def ours(meta):
        if isinstance(meta, dict):
            tensor_files.write_tensors(path, tensors, meta, "lora_adapter_metadata")
            all_of(path)
    def flat(meta):
        if isinstance(meta, dict):
            all_of(save(path, tensors, {k: v if isinstance(v, str) else json.dumps(v) for k, v in meta.items()}))
    fuzz("diffusers", META, diffusers)
    fuzz("ours", META, ours)
    fuzz("flat", dict(lora_alpha="2", r="2", use_rslora="False", ss_network_alpha="1", format="pt"), flat)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]

def test_fuzz_of_peft_s_config(tmp_path):
    def case(config):
        all_of(save_as_peft(tmp_path, json.dumps(config)))
    fuzz("adapter_config.json", {k.removeprefix("transformer."): v for k, v in META.items() if "train." not in k}, case)

def test_fuzz_of_a_lora_s_tensors(tmp_path):
    """Their names and shapes: each a JSON value here, which is written if safetensors can."""
    rng = random.Random(0)
    names = ["", "lora_A.weight", LAYER, f"{LAYER}.alpha", f"{LAYER}.lora_B.bias", f"{LAYER}.dora_scale",
             "img_in.lokr_w1", f"{LAYER}.lokr_w1", f"{LAYER}.hada_w1_a", "lora_unet_img_in.lora_down.weight", "\x1b[2J",
             "x" * 400, f"{LAYER}.lora_A.evil.weight", "base_model.model.txt_in.lora_A.weight"]
    shapes = [(), (0,), (1,), (2, 0), (0, 128), (2, 128), (128, 2), (2, 2, 1, 1), (2, 2, 2), (1, 1, 1, 1, 1)]
    dtypes = [torch.float32, torch.float16, torch.bool, torch.int8, torch.int64, torch.complex64, torch.float8_e4m3fn]
    def case(_):
        tensors = lora_tensors()
        for _ in range(rng.randint(1, 4)):
            name = rng.choice([*names, *tensors])
            tensors[name] = torch.ones(rng.choice(shapes)).to(rng.choice(dtypes))
            if rng.random() < 0.3:
                tensors.pop(rng.choice(list(tensors)))
        all_of(save(tmp_path / "x.safetensors", tensors))
    fuzz("tensors", {}, case)

def test_fuzz_of_a_safetensors_header(tmp_path):
    """The JSON before the tensors: names, dtypes, shapes, offsets."""
    data = safetensors.torch.save(lora_tensors(), of_diffusers(r=2, lora_alpha=2))
    size = int.from_bytes(data[:8], "little")
    header, path = json.loads(data[8:8 + size]), tmp_path / "x.safetensors"
    def case(changed):
        text = json.dumps(changed).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size:])
        all_of(path)
    fuzz("header", header, case)

@pytest.mark.parametrize("part", ["optimizer", "info", "lora"])
def test_fuzz_of_a_checkpoint(made, checkpoint, part):
    """The optimizer's state in JSON, what else its header says, and the LoRA's. With the right digests."""
    name = predict.LORA_FILE if part == "lora" else "optimizer.safetensors"
    key = "lora_adapter_metadata" if part == "lora" else "json"
    tensors, meta = tensor_files.read_tensors(checkpoint / name, key)
    parser, config = made.names["parser"], made.names["config"]
    def case(value):
        if part == "optimizer":
            value = meta | dict(optimizer=value)
        if isinstance(value, dict):
            tensor_files.write_tensors(checkpoint / name, tensors, value, key)
            info = resume.read_checkpoint(checkpoint).info
            resume.refuse_changes(checkpoint, info["config"], config, parser)
            restored(made, checkpoint)
    value = {k: v for k, v in meta.items() if k != "optimizer"} if part == "info" else meta
    if part == "info":
        real, case = case, lambda value: real(value | dict(optimizer=meta["optimizer"])) if value else None
    fuzz(f"checkpoint, {part}", meta["optimizer"] if part == "optimizer" else value, case)
    assert {path.name for path in checkpoint.iterdir()} == {predict.LORA_FILE, "optimizer.safetensors"}
