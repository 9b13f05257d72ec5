"""
The stage `numbers` of gpu_check.py. It computes one step of a few blocks of the real width in two ways that should
agree, and trains tiny in processes of their own, to compare a resumed and a sharded run with a plain one.

A row shows relative L2 distances between the two ways: of all outputs (or losses), and of the gradient (or LoRA) matrix
that differs most. It is `wrong` if a distance is beyond the limit, or is NaN. A limit of 0 means equal bits.
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
BLOCKS = 4 # enough for --offload to fill each of its two buffers twice
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
LORAS = {"attention": ATTENTION, "all-linear": [*ATTENTION, "img_mod.1", "txt_mod.1", "net.0.proj", "net.2"]}

# ---- rows ------------------------------------------------------------------------------------------------------------

def worst(got, want):
    """-> the largest distance between tensors of the same name in two dicts; NaN if one contains NaN."""
    if got.keys() != want.keys():
        return float("inf")
    pairs = [(got[name].double(), want[name].double()) for name in want]
    return float(np.max([((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in pairs]))

def row(what, got, want, limit):
    """-> a row of the table. got, want: {column: {name: tensor}}."""
    distances = {column: worst(got[column], want[column]) for column in want}
    cells = dict(what=what) | distances | dict(limit=limit)
    good = all(distance <= limit for distance in distances.values()) # False for NaN
    return cells if good else cells | dict(wrong="beyond the limit")

# ---- a step in two ways ----------------------------------------------------------------------------------------------

@contextlib.contextmanager
def deterministic():
    """Within it, kernels add up in a fixed order, without which no two results would have equal bits. (gpu_check.py has
    set the environment variable that cuBLAS needs for this.)"""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

def build(setup, quantize="none", kind=None, targets=LORAS["all-linear"], dropout=0.0):
    """-> the model with a LoRA, on the device; it recomputes no block. kind: its dtype, if it is not the setup's."""
    model = torch.nn.Module.to(make_model(setup.config, setup.dtype, setup.device), kind or setup.dtype)
    model = with_lora(rope_patch.patch_qwen_model_for_multi_resolution(model), targets=targets, dropout=dropout)
    return predict.place_transformer(model, setup.device, quantize)

def step(setup, model):
    """Computes one training step -> dict(outputs={name: tensor}, gradients={name: tensor})."""
    torch.manual_seed(0) # of LoRA dropout
    samples = make_samples(setup.config, setup.pack, setup.dtype, setup.device)
    for s in samples: # round timesteps here: the model would round them to its own dtype, which may be another one
        s.timestep = s.timestep.to(setup.dtype).float()
        s.latents, s.prompt = s.latents.to(model.dtype), s.prompt.to(model.dtype)
    preds = run_on(model, samples)
    loss_of(samples, preds).backward()
    grads = {name: p.grad for name, p in model.lora.items() if p.grad is not None}
    model.zero_grad()
    return dict(outputs={"": torch.cat(preds).detach()}, gradients=grads)

def rounding(setup):
    """Against the same weights in fp32, where attention is one call for each sample, without flash attention."""
    if setup.dtype == torch.bfloat16:
        want = step(setup, build(setup, kind=torch.float32))
        yield row("bf16 from fp32", step(setup, build(setup)), want, 5e-2)

def flash_attention(setup):
    kernel = torch.nn.attention.current_flash_attention_impl() # (extras/cuda.py has chosen it)
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
        model, suffix = build(setup, dropout=dropout), ", LoRA dropout" if dropout else ""
        want = step(setup, model)
        recompute(model, "all")
        yield row(f"recomputed from kept{suffix}", step(setup, model), want, 0)
        what = f"all but attention recomputed, from kept{suffix}"
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
begin = dist.init_process_group # NCCL refuses two processes on one GPU
dist.init_process_group = lambda backend, **options: begin(backend.replace("nccl", "gloo"), **options)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

def start(folder, name, device, *flags, processes=1):
    """Starts six steps of train.py on twelve pictures of tiny, with folder/name as --out_dir -> its processes."""
    kind, _, number = device.partition(":") # two processes share one GPU
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
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
    """Waits until all processes end. If one of them fails: RuntimeError with the last line of their output."""
    statuses = [None]
    while None in statuses and not any(statuses): # (a process whose peer has died might never end)
        time.sleep(0.1)
        statuses = [process.poll() for process in processes]
    if any(statuses):
        text = (folder / f"{name}.txt").read_text(errors="replace")
        raise RuntimeError(text.strip().rpartition("\n")[2] or f"train.py ended with {statuses}")

def trained(folder):
    """-> what to compare of a finished run: its losses and its LoRA."""
    losses = [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()[1:]]
    lora, _ = read_tensors(folder / predict.LORA_FILE, "lora_adapter_metadata")
    return dict(losses={"": torch.tensor(losses)}, LoRA=lora)

def resumed(setup, folder, running):
    """Resumes a copy of the run that looks as if it had been killed after step 3."""
    wait(running["whole"], folder, "whole")
    shutil.copytree(folder / "whole", folder / "resumed", ignore=shutil.ignore_patterns("*-000006", "DONE"))
    running["resumed"] = start(folder, "resumed", setup.device, "--dtype", "bfloat16", "--resume")
    wait(running["resumed"], folder, "resumed")
    yield row("train.py resumed, from unbroken", trained(folder / "resumed"), trained(folder / "whole"), 0)

def sharded(setup, folder, running):
    """In fp32: two processes pack the samples in another way than one, which bf16 would round differently."""
    wait(running["one"], folder, "one")
    try:
        wait(running["two"], folder, "two")
    except RuntimeError as e:
        if setup.device == "cpu":
            raise
        yield dict(note=str(e)) # gloo may lack on a GPU what FSDP2 needs; we have not tried
        return
    got, want = [dict(losses=trained(folder / name)["losses"]) for name in ("two", "one")]
    yield row("train.py, two processes with --fsdp, from one", got, want, 1e-5)

# ---- all of it -------------------------------------------------------------------------------------------------------

def comparisons(config, pack, dtype, device):
    """Yields a generator of rows for each comparison, so that one that breaks does not end the others. config: of the
    model, whose width counts here; pack: a preset of make_samples. Closing this generator ends its processes."""
    setup = SimpleNamespace(config=config | dict(num_layers=BLOCKS), pack=pack, dtype=dtype, device=device)
    running = {} # the trainings run in the background while steps are compared
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
                yield compiled(setup) # this comes last because it takes minutes
        finally: # a process left behind would occupy the GPU
            for process in [process for processes in running.values() for process in processes]:
                end(process)
