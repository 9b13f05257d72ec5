"""Where LoRAs lie: in files, run folders, checkpoints, on the hub."""
import os
import re
from pathlib import Path

import common
from common import InputError, closest, is_inside, near_file, warn_once
from library.models.hub import from_hub

LORA_FILE = "pytorch_lora_weights.safetensors" # the name that stock load_lora_weights looks for in a folder
PEFT_FILE = "adapter_model.safetensors" # as peft calls it

def number_of(path):
    """200 of checkpoint-000200, 1 of tiny-data-001."""
    return int(path.name.split("-")[-1])

def numbered(folder, name):
    """What is called NAME-<number> in a folder, in order. A person's copies (checkpoint-000200.bak) are none of it."""
    found = [path for path in Path(folder).glob("*") if re.fullmatch(re.escape(name) + r"-\d{1,12}", path.name)]
    return sorted(found, key=number_of)

def checkpoints(run):
    """The checkpoints in a run's folder, oldest first: those with a LoRA, which is written last and deleted first."""
    return [path for path in numbered(run, "checkpoint") if (path / LORA_FILE).is_file()]

def find_lora(path):
    """-> a LoRA's file: `path` itself, the one in this folder (peft's too), the one in the newest checkpoint of an
    unfinished run, or user/repo[/file.safetensors] of the hub."""
    folder = Path(path)
    file = folder / LORA_FILE if folder.is_dir() else folder
    if not file.exists():
        if (folder / PEFT_FILE).is_file():
            file = folder / PEFT_FILE
        elif saved := checkpoints(folder): # of a run that has not finished, or was stopped
            file = saved[-1] / LORA_FILE
            warn_once(f"{path}: not finished; taking its newest checkpoint, {file.parent.name}")
    hub_id = re.fullmatch(r"([\w-]+/[\w.-]+)(?:/(.+\.safetensors))?", str(path))
    if hub_id and not file.parent.exists(): # not here
        from huggingface_hub import hf_hub_download
        repo, name = hub_id[1], hub_id[2] or LORA_FILE
        return from_hub(f"{path}: {name}", lambda: hf_hub_download(repo, name))
    if not file.is_file():
        if (folder / "optimizer.safetensors").exists(): # training/resume.py writes it before the LoRA
            raise InputError(f"{path}: no LoRA, but a half-written checkpoint; give another one, or its run")
        raise InputError(no_lora(folder, file))
    if folder.is_dir() and not is_inside(file, folder): # a stranger's, to what is yours
        raise InputError(f"{file}: a link that leads out of {path}; give the file itself")
    return file

def near_run(name):
    """-> the run that is meant by a name where none is, or None: in the same folder, or in out/."""
    path = Path(name)
    for log in (path, path.parent / "log.jsonl", path.parent.parent / "log.jsonl"): # a file in a run
        if log.name == "log.jsonl" and log.is_file():
            return log.parent
    return closest(path.name, {run.name: run for run in runs_in(Path("out")) + runs_in(path.parent)})

def runs_in(folder):
    """-> the runs in a folder, the one that was trained last behind the others."""
    return [log.parent for log in sorted(folder.glob("*/log.jsonl"), key=os.path.getmtime)]

def no_lora(path, file):
    """Why there is no LoRA at `path`, where `file` was looked for, and what may be meant."""
    found = sorted(path.glob("*.safetensors"))[:1] + runs_in(path)[-1:]
    if not found and not path.exists():
        near = [place for place in (near_file(path), near_run(path)) if place]
        for place in near:
            if place.is_file() or (place / LORA_FILE).is_file() or checkpoints(place):
                found.append(place)
    give = common.shell_command(found[:1]) or (f"a .safetensors file, a folder with {LORA_FILE} or checkpoints, or "
                                               "user/repo of the hub")
    return f"{file}: no LoRA; give {give}"
