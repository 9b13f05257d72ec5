"""
What gpu_check.py compares: one step of a few blocks of the real width, computed in two ways that should agree; and what
it runs on two GPUs.

Each function of a setup yields (what, got, want, limit); got and want are {column: {name: tensor}}. `row` makes a line
of the table of these: so tests/fake_card, where tensors have no numbers, can run everything but the verdicts.
"""
import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

import predict
import rope_patch
from library.models.compilation import compile_blocks
from tools.bench_common import (heat, loss_of, make_model, make_samples, multiplies, output_of, recompute, run_on,
                                seconds, with_lora)

BLOCKS = 4 # enough for --offload to fill each of its two buffers twice
LINEAR = ("to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj to_add_out img_mod.1 txt_mod.1 net.0.proj net.2"
          .split())
KINDS = ["none", "int8", "fp8"] + ["nf4"] * bool(find_spec("bitsandbytes"))
ROUNDING, PRODUCTS = 0.1, dict(int8=0.25, fp8=0.6) # limits: about twice what a CPU has, at d = 512

# ---- rows ------------------------------------------------------------------------------------------------------------

def distance(got, want):
    """-> the relative L2 distance between two dicts of tensors, all together; infinite if their names differ."""
    if got.keys() != want.keys():
        return float("inf")
    a, b = [torch.cat([tensors[name].double().flatten() for name in want]) for tensors in (got, want)]
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()

def row(what, got, want, limit):
    """-> a line of the table. A limit of 0 means equal bits; what is shown wrong has to be beyond the limit."""
    distances = {column: distance(got[column], want[column]) for column in want}
    if "wrong" in what:
        good = min(distances.values()) > limit
    else:
        good = all(d <= limit for d in distances.values()) # False for NaN
    cells = dict(what=what) | distances | dict(limit=limit)
    return cells if good else cells | dict(wrong="on the wrong side of the limit")

# ---- a step in two ways. setup: config, of a model of few blocks; pack, for make_samples; dtype; device --------------

def build(setup, quantize="none", dtype=None, dropout=0.0):
    """-> the model with a LoRA, on the device; it recomputes no block. dtype: if it is not the setup's."""
    model = torch.nn.Module.to(heat(make_model(setup.config, setup.dtype, setup.device)), dtype or setup.dtype)
    model = with_lora(rope_patch.patch_qwen_model_for_multi_resolution(model), targets=LINEAR, dropout=dropout)
    return predict.place_transformer(model, setup.device, quantize)

def step(setup, model, mode="packed", turned=False):
    """Computes one training step -> dict(outputs={name: tensor}, gradients={name: tensor}). turned: with the sides of
    all pictures swapped, which is wrong."""
    torch.manual_seed(0) # of LoRA dropout
    samples = make_samples(setup.config, setup.pack, setup.dtype, setup.device)
    for s in samples: # round here: the model would round to its own dtype, which may be another one
        s.timestep = s.timestep.to(setup.dtype).float()
        s.latents, s.prompt = s.latents.to(model.dtype), s.prompt.to(model.dtype)
        if turned:
            s.img_shapes = [(f, w, h) for f, h, w in s.img_shapes]
    batches = [[s] for s in samples] if mode == "stock" else [samples]
    preds = [pred for batch in batches for pred in run_on(model, batch, mode)]
    loss_of(samples, preds).backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.lora.items()}
    model.zero_grad()
    return dict(outputs={"": torch.cat(preds).detach()}, gradients=grads)

def modes(setup):
    """Against stock diffusers on one sample at a time, in fp32."""
    model = build(setup, dtype=torch.float32)
    want = step(setup, model, "stock")
    yield "shown wrong: sides swapped", step(setup, model, "stock", turned=True), want, ROUNDING
    for mode in ("packed", "padded"):
        yield f"{mode}, float32", step(setup, model, mode), want, 1e-4
    model = build(setup)
    for mode in ("stock", "packed", "padded") if model.dtype != torch.float32 else ():
        yield f"{mode}, bfloat16", step(setup, model, mode), want, ROUNDING

def few_bits(setup, compiled=False):
    """Against the same weights in fp32, where they are unpacked, and attention is one call a sample."""
    for quantize in KINDS:
        want = step(setup, build(setup, quantize, torch.float32))
        model, what, limit = build(setup, quantize), f"--quantize {quantize}", ROUNDING
        if quantize in PRODUCTS and (compiled or multiplies(model, setup.dtype, setup.device)):
            what, limit = f"{what}, multiplied as such", PRODUCTS[quantize]
        if compiled:
            compile_blocks(rope_patch.blocks_of(model))
            what += ", compiled"
        yield f"{what}, from fp32", step(setup, model), want, limit
        torch._dynamo.reset() # its graphs would keep the model

def equal_bits(setup):
    """Recomputed blocks, whose LoRA dropout has to come again, and blocks that are copied on a stream of their own."""
    model, none = build(setup, dropout=0.3), torch.empty(0, dtype=setup.dtype, device=setup.device)
    want = step(setup, model)
    ways = ["all", "all but attention"] if rope_patch.has_varlen(none) else ["all"]
    for which in ways:
        recompute(model, which)
        yield f"{which} recomputed, from kept", step(setup, model), want, 0
    predict.place_transformer(model, setup.device, offload=BLOCKS)
    for which in ("none", "all"):
        recompute(model, which)
        yield f"offloaded, {which} recomputed, from on the device", step(setup, model), want, 0

# ---- two GPUs --------------------------------------------------------------------------------------------------------

def on_two(*script):
    return output_of("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, *script)

def sharded(setup):
    """Six steps of train.py on tiny, in fp32: two processes pack the samples in another way than one, which bf16 would
    round differently."""
    with tempfile.TemporaryDirectory() as folder:
        losses = []
        for run, *more in ([output_of], [on_two, "--fsdp"]):
            out_dir = Path(folder, run.__name__)
            run("train.py", "--val_data", "--max_steps", 6, "--batch_size", 4, "--device", setup.device.split(":")[0],
                "--dtype", "float32", "--cache_dir", Path(folder, "cache"), "--out_dir", out_dir, *more)
            log = (out_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()[1:]
            losses.append(dict(losses={"": torch.tensor([json.loads(line)["loss"] for line in log])}))
        yield "train.py --fsdp on two GPUs, from one", losses[1], losses[0], 1e-4

def all_reduce():
    """One of torchrun's two processes, each with a GPU. The first prints a row; GB/s as nccl-tests counts them."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    x = torch.ones(2**29, dtype=torch.bfloat16, device="cuda")
    took = min(seconds(lambda: dist.all_reduce(x), "cuda") for _ in range(6))
    row = {"GiB": 1, "s": took, "GB/s": x.nbytes / took / 1e9}
    if dist.get_rank() == 0:
        print(json.dumps(row if x.min().item() == x.max().item() == 2**6 else row | dict(wrong="the sum of ones")))
    dist.destroy_process_group()

if __name__ == "__main__":
    all_reduce()
