"""
What gpu_check.py compares in its stage `numbers`: a step of a few blocks of the real width, computed in two ways that
should agree, and trainings of tiny in processes of their own, resumed and sharded.

A row has the relative L2 distance of the one way from the other: of all outputs (or losses), and of the gradient (or
LoRA) matrix that is worst. `wrong`: one of them is beyond the limit, or not a number. A limit of 0 means equal bits.
"""
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import predict
import rope_patch
from common import read_tensors
from tools.bench_common import (end, loss_of, make_model, make_samples, multiplies, recompute, run_on, unpack,
                                with_lora)

HERE = Path(__file__).resolve().parents[1]
BLOCKS = 4 # so that --offload fills each of its two buffers twice
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
LORAS = {"attention": ATTENTION, "all-linear": [*ATTENTION, "img_mod.1", "txt_mod.1", "net.0.proj", "net.2"]}

# ---- rows ------------------------------------------------------------------------------------------------------------

def worst(got, want):
    """The greatest distance of all tensors, dicts of which these are. NaN if one has NaN."""
    if got.keys() != want.keys():
        return float("inf")
    pairs = [(got[name].double(), want[name].double()) for name in want]
    return float(np.max([((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in pairs]))

def row(what, got, want, limit):
    """got, want: {column: {name: tensor}}."""
    far = {column: worst(got[column], want[column]) for column in want}
    made = dict(what=what) | far | dict(limit=limit)
    good = all(distance <= limit for distance in far.values()) # (NaN is not)
    return made if good else made | dict(wrong="beyond the limit")

# ---- a step in two ways ----------------------------------------------------------------------------------------------

@contextlib.contextmanager
def deterministic():
    """Kernels that add up in any order would never give equal bits. (gpu_check.py has set cuBLAS's variable.)"""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

def build(setup, quantize="none", kind=None, targets=LORAS["all-linear"], dropout=0.0):
    """The model with a LoRA on the device, no block recomputed. kind: its dtype, if it is not the setup's."""
    model = torch.nn.Module.to(make_model(setup.config, setup.dtype, setup.device), kind or setup.dtype)
    model = with_lora(rope_patch.patch_qwen_model_for_multi_resolution(model), targets=targets, dropout=dropout)
    return predict.place_transformer(model, setup.device, quantize)

def step(setup, model):
    torch.manual_seed(0) # of LoRA dropout
    samples = make_samples(setup.config, setup.pack, setup.dtype, setup.device)
    for s in samples: # the model rounds a timestep to its dtype: another one, if that is not done before
        s.timestep = s.timestep.to(setup.dtype).float()
        s.latents, s.prompt = s.latents.to(model.dtype), s.prompt.to(model.dtype)
    preds = run_on(model, samples)
    loss_of(samples, preds).backward()
    grads = {name: p.grad for name, p in model.lora.items() if p.grad is not None}
    model.zero_grad()
    return dict(outputs={"": torch.cat(preds).detach()}, gradients=grads)

def rounding(setup):
    """The same weights in fp32, where attention is one call a sample and no flash attention."""
    if setup.dtype == torch.bfloat16:
        want = step(setup, build(setup, kind=torch.float32))
        yield row("bf16 from fp32", step(setup, build(setup)), want, 5e-2)

def flash_attention(setup):
    kernel = torch.nn.attention.current_flash_attention_impl() # extras/cuda.py has chosen it
    if not kernel:
        yield dict(what="FA3 or FA4 from FA2", note="not installed, or not for this device")
        return
    model = build(setup)
    got = step(setup, model)
    torch.nn.attention.restore_flash_attention_impl()
    try:
        want = step(setup, model)
    finally:
        torch.nn.attention.activate_flash_attention_impl(kernel)
    yield row(f"{kernel} from FA2", got, want, 2e-2)

def recomputed(setup):
    for dropout in (0.0, 0.3):
        model, words = build(setup, dropout=dropout), ", LoRA dropout" if dropout else ""
        want = step(setup, model)
        recompute(model, "all")
        yield row(f"recomputed from kept{words}", step(setup, model), want, 0)
        what = f"all but attention recomputed, from kept{words}"
        if rope_patch.has_varlen(torch.empty(0, dtype=setup.dtype, device=setup.device)):
            recompute(model, "all but attention")
            yield row(what, step(setup, model), want, 0)
        else:
            yield dict(what=what, note="attention is not one kernel here")

def offloaded(setup):
    model = build(setup)
    want = step(setup, model)
    predict.place_transformer(model, setup.device, offload=BLOCKS)
    for which, name in (("none", "kept"), ("all", "recomputed")):
        recompute(model, which)
        yield row(f"offloaded from on the device, {name}", step(setup, model), want, 0)

def eight_bits(setup):
    for quantize, limit in (("int8", 5e-2), ("fp8", 1e-1)):
        what, model = f"{quantize} products from unpacked", build(setup, quantize)
        if multiplies(model, setup.dtype, setup.device):
            got = step(setup, model)
            unpack(model)
            yield row(what, got, step(setup, model), limit)
        else:
            yield dict(what=what, note="not on this device")

def compiled(setup):
    limit = 5e-2 if setup.dtype == torch.bfloat16 else 1e-4
    for name, targets in LORAS.items():
        model = build(setup, targets=targets)
        want = step(setup, model)
        for block in model.transformer_blocks:
            block.compile(dynamic=True)
        yield row(f"compiled from eager, LoRA on {name}", step(setup, model), want, limit)
        torch._dynamo.reset() # its graphs would keep the model

# ---- trainings -------------------------------------------------------------------------------------------------------

TRAIN = """
import runpy, sys
import torch
import torch.distributed as dist
torch.use_deterministic_algorithms(True)
begin = dist.init_process_group # NCCL refuses two processes on one card
dist.init_process_group = lambda backend, **options: begin(backend.replace("nccl", "gloo"), **options)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

def start(folder, name, device, *flags, processes=1):
    """Six steps of train.py on twelve pictures of tiny, into folder/name -> its processes."""
    kind, _, number = device.partition(":") # two processes take the same card
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", TRAIN, "train.py", "--data", "tiny/val", "--val_data", "--max_steps", "6",
               "--save_every", "3", "--batch_size", "4", "--device", kind, "--cache_dir", folder / "cache",
               "--out_dir", folder / name, *flags]
    started = []
    for rank in range(processes):
        env = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", WORLD_SIZE=str(processes), RANK=str(rank),
                   LOCAL_RANK=number or "0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with open(folder / f"{name}.txt", "a") as output:
            started.append(subprocess.Popen(list(map(str, command)), cwd=HERE, env=env, stdout=output,
                                            stderr=subprocess.STDOUT, start_new_session=True))
    return started

def wait(processes, folder, name):
    """RuntimeError, with the last line that they wrote, if one of them fails."""
    statuses = [None]
    while None in statuses and not any(statuses): # a process whose peer has died might wait for ever
        time.sleep(0.1)
        statuses = [process.poll() for process in processes]
    if any(statuses):
        text = (folder / f"{name}.txt").read_text(errors="replace")
        raise RuntimeError(text.strip().rpartition("\n")[2] or f"train.py ended with {statuses}")

def trained(folder):
    losses = [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()[1:]]
    lora, _ = read_tensors(folder / predict.LORA_FILE, "lora_adapter_metadata")
    return dict(losses={"": torch.tensor(losses)}, LoRA=lora)

def resumed(setup, folder, running):
    """As if it had been killed after step 3."""
    wait(running["whole"], folder, "whole")
    shutil.copytree(folder / "whole", folder / "resumed", ignore=shutil.ignore_patterns("*-000006", "DONE"))
    running["resumed"] = start(folder, "resumed", setup.device, "--dtype", "bfloat16", "--resume")
    wait(running["resumed"], folder, "resumed")
    yield row("train.py resumed, from unbroken", trained(folder / "resumed"), trained(folder / "whole"), 0)

def sharded(setup, folder, running):
    """In fp32, as two processes pack other samples together, which bf16 would round in another way."""
    wait(running["one"], folder, "one")
    try:
        wait(running["two"], folder, "two")
    except RuntimeError as e:
        if setup.device == "cpu":
            raise
        yield dict(note=str(e)) # gloo may not do on a card what FSDP2 wants: nobody has tried
        return
    got, want = [dict(losses=trained(folder / name)["losses"]) for name in ("two", "one")]
    yield row("train.py, two processes with --fsdp, from one", got, want, 1e-5)

# ---- all of it -------------------------------------------------------------------------------------------------------

def comparisons(config, pack, dtype, device):
    """Yields generators of rows, by themselves, so that one that breaks does not end the others. config: of the model,
    whose width it takes; pack: as make_samples wants it. Close it, and its processes end."""
    setup = SimpleNamespace(config=config | dict(num_layers=BLOCKS), pack=pack, dtype=dtype, device=device)
    running = {} # trainings take their time while steps are compared
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            running["whole"] = start(folder, "whole", device, "--dtype", "bfloat16")
            running["one"] = start(folder, "one", device, "--dtype", "float32")
            running["two"] = start(folder, "two", device, "--dtype", "float32", "--fsdp", processes=2)
            with deterministic():
                for compare in (rounding, flash_attention, recomputed, offloaded, eight_bits):
                    yield compare(setup)
                yield resumed(setup, folder, running)
                yield sharded(setup, folder, running)
                yield compiled(setup) # the last, as it takes minutes
        finally: # one left behind would hold the card
            for process in [process for processes in running.values() for process in processes]:
                end(process)
