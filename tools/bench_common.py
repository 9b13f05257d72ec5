"""
What bench.py, gpu_check.py and gpu_numbers.py share: models with random weights, samples of noise, and how to count
FLOPs, seconds and memory.
"""
import contextlib
import ctypes
import gc
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig

from library.models import devices, quantization
from training import memory_fit
import predict
import rope_patch

HERE = Path(__file__).resolve().parents[1]
MODELS = dict(
    small=dict(num_layers=2, attention_head_dim=64, num_attention_heads=8, joint_attention_dim=256,
               axes_dims_rope=(8, 28, 28)),
    full=dict(num_layers=60, attention_head_dim=128, num_attention_heads=24, joint_attention_dim=3584,
              axes_dims_rope=(16, 56, 56)))

def open_device(device, dtype):
    """Sets up the device as train.py does, before it holds any tensor -> its name. Ends the script if the device cannot
    be used."""
    devices.check_device("device", device)
    devices.check_card("device", device, str(dtype).removeprefix("torch."))
    if not device.startswith("cuda"):
        return f"CPU, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    torch.cuda.set_device(torch.device(device).index or 0) # all clocks and counters below read this GPU
    return devices.prepare_card(device, "auto")

# ---- models and samples ----------------------------------------------------------------------------------------------

def make_model(config, dtype, device):
    """-> a model with random weights. They are made on the device, in their final dtype: in fp32 the full model would
    not fit."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    with torch.device(device):
        model = QwenImageTransformer2DModel(**config)
    torch.set_default_dtype(before)
    return model.requires_grad_(False)

def with_lora(model, ours=True, targets=("to_q", "to_k", "to_v", "to_out.0"), dropout=0.0):
    """Adds a LoRA whose fp32 weights are far from zero. ours: train.py's layer, which casts them when it uses them; or
    else peft's own."""
    config = dict(r=16, lora_alpha=16, target_modules=list(targets), lora_dropout=dropout)
    if ours:
        predict.add_lora(model, **config)
    else:
        model.add_adapter(LoraConfig(**config))
        cast_training_params(model, torch.float32)
    torch.manual_seed(1)
    model.lora = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for p in model.lora.values():
        p.data = torch.randn(p.shape, device=p.device).mul(.02)
    return model.train()

def recompute(model, which):
    """Sets gradient checkpointing: "all" blocks, "all but attention" (where attention is one kernel), or "none"."""
    options = memory_fit.options_of(selective=which == "all but attention")
    rope_patch.checkpoint_blocks(model, 0 if which == "none" else None, **options)

def multiplies(model, dtype, device):
    """Whether this model multiplies its eight-bit weights directly, without unpacking them."""
    layer = next(module for module in model.modules() if isinstance(module, quantization.LowBitLinear))
    return quantization.has_product(torch.empty(32, layer.in_features, dtype=dtype, device=device), layer)

def share(source):
    """-> a stock model that uses the same frozen tensors as `source`, so the device never holds a second copy."""
    with torch.device("meta"):
        model = QwenImageTransformer2DModel.from_config(source.config).requires_grad_(False)
    frozen = {k.replace(".base_layer", ""): v for k, v in source.state_dict().items() if ".lora_" not in k}
    model.load_state_dict(frozen, assign=True)
    model.pos_embed = source.pos_embed # its tables are not in the state dict
    return model

def heat(model):
    """Scales the weights so that a wrong position changes the output by a third. With the initial weights it changes by
    6e-4, which the rounding of bf16 would hide. (hot_model in tests/harness.py does the same.)"""
    for name, weight in model.named_parameters():
        if name.endswith("_mod.1.bias"):
            weight.data.normal_()
        elif re.search(r"norm_(added_)?[qk]\.weight$", name):
            weight.data.fill_(2)
        elif name.endswith(("to_v.weight", "add_v_proj.weight")):
            weight.data.mul_(4)
    return model

def read_sample(text):
    """"64x64 32x48 500" -> ([(1, 64, 64), (1, 32, 48)], 500): the shapes of a target and of its controls, and the
    length of a text, all in tokens."""
    *pictures, length = text.split()
    return [(1, *map(int, sides.split("x"))) for sides in pictures], int(length)

def make_samples(config, preset, dtype, device):
    """-> samples of noise. preset: a text for each, as read_sample has it."""
    def randn(*shape):
        return torch.randn(*shape, generator=g).to(device)
    g, samples = torch.Generator().manual_seed(2), []
    for text in preset:
        img_shapes, txt_len = read_sample(text)
        lengths = [h * w for _, h, w in img_shapes]
        samples.append(SimpleNamespace(
            img_shapes=img_shapes, lens=(sum(lengths), txt_len), latents=randn(sum(lengths), 64).to(dtype),
            prompt=randn(txt_len, config["joint_attention_dim"]).to(dtype),
            timestep=torch.rand((), generator=g).to(device), target=randn(lengths[0], 64)))
    return samples

# ---- measuring -------------------------------------------------------------------------------------------------------

def flops(config, lens, checkpointed=0, tail=True):
    """-> the FLOPs of one training step. lens: (image tokens, text tokens) of each sample; a multiplication with its
    addition counts as 2. The backward pass of a frozen linear layer costs as much as its forward pass, as only the
    inputs have a gradient; for attention it costs 2.5 times as much. A checkpointed block costs one more forward pass.
    Nothing reads the text that leaves the last block, so its output layer and MLP have no backward pass; without
    `tail`, as in rope_patch, they have no forward pass either, and the text has no query."""
    d, layers, total = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"], 0
    for img, txt in lens:
        linear, attention = 24 * d * d * (img + txt), 4 * d * (img + txt) ** 2
        total += layers * (2 * linear + 3.5 * attention) + checkpointed * (linear + attention)
        total -= 18 * d * d * txt
        if not tail:
            total -= (22 + 20 * (checkpointed == layers)) * d * d * txt + 3.5 * 4 * d * txt * (img + txt)
    return total

def run_on(model, samples, mode="packed"):
    """Runs all samples in one forward pass -> their predictions. mode: packed; padded, as others call it; with pads,
    which are computed; or stock, diffusers' own code, for samples of equal shapes."""
    runs = {"packed": rope_patch.run_packed, "padded": run_padded, "with pads": run_with_pads,
            "stock": run_stock}
    latents, prompts, shapes = [[getattr(s, name) for s in samples] for name in ("latents", "prompt", "img_shapes")]
    return runs[mode](model, latents, prompts, torch.stack([s.timestep for s in samples]), shapes)

def run_padded(model, latents, prompts, timesteps, img_shapes):
    """rope_patch.run_packed's answer, by a call with rows that are padded to the longest sample."""
    rows, _ = rope_patch.pad_latents_for_multi_res(latents)
    texts, _ = rope_patch.pad_latents_for_multi_res(prompts)
    out = model(rows, texts, timestep=timesteps, img_shapes=img_shapes, txt_seq_lens=[len(p) for p in prompts],
                return_dict=False)[0]
    return [row[:len(x)] for row, x in zip(out, latents)]

def run_stock(model, latents, prompts, timesteps, img_shapes):
    rows = torch.stack(latents)
    return model(rows, torch.stack(prompts), timestep=timesteps.to(rows.dtype), img_shapes=img_shapes,
                 return_dict=False)[0]

class SamplePositions(torch.nn.Module): # a class because the model calls it as its pos_embed
    """Each sample's own rotary positions, 3D, where stock's module gives all samples those of the first."""

    def __init__(self, pos_embed):
        super().__init__()
        self.stock = pos_embed

    def forward(self, img_shapes, max_txt_seq_len, device):
        freqs = [rope_patch.sample_freqs(self.stock, s, max_txt_seq_len, device) for s in img_shapes]
        img_freqs_BIR, _ = rope_patch.pad_latents_for_multi_res([img for img, _ in freqs])
        return img_freqs_BIR, torch.stack([txt for _, txt in freqs])

def with_pads(model):
    """A stock model -> one that run_with_pads can run: with our attention processor and SamplePositions."""
    model.set_attn_processor(rope_patch.QwenDoubleStreamAttnProcessor2_0_MultiRes())
    model.pos_embed = SamplePositions(model.pos_embed)
    return model

def run_with_pads(model, latents, prompts, timesteps, img_shapes):
    """What padding costs. The patched model drops the pads of its rows; this computes them, in stock's forward with a
    mask: one pass over all samples, padded to the longest -> predictions as run_packed's."""
    rows, img_mask = rope_patch.pad_latents_for_multi_res(latents)
    texts, txt_mask = rope_patch.pad_latents_for_multi_res(prompts)
    out = model(rows, texts, timestep=timesteps.to(rows.dtype), img_shapes=img_shapes, return_dict=False,
                attention_kwargs={"attention_mask": torch.cat([txt_mask, img_mask], dim=1)})[0]
    return [row[:len(x)] for row, x in zip(out, latents)]

def loss_of(samples, preds):
    return sum((p[:len(s.target)].float() - s.target).square().mean() for s, p in zip(samples, preds))

def seconds(f, device):
    """-> how long one call takes: on a GPU by its own clock; on a CPU in processor time with one thread, as the machine
    may be shared, or else in wall time."""
    if device.startswith("cuda"):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    t0 = clock()
    f()
    return clock() - t0

def used_gib(device):
    """-> the GiB that tensors use on the GPU now, or this process on a CPU."""
    gc.collect()
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated() / 2**30
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0) # gives freed memory back to the system
    return psutil.Process().memory_info().rss / 2**30

def peak_gib(f, device):
    """-> the GiB that one call adds at its peak; on a CPU nan, except on Linux, where a process can reset its peak."""
    before = used_gib(device)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        f()
        return torch.cuda.max_memory_allocated() / 2**30 - before
    if sys.platform != "linux":
        f()
        return math.nan
    Path("/proc/self/clear_refs").write_bytes(b"5")
    f()
    return int(re.search(rb"VmHWM:\s*(\d+)", Path("/proc/self/status").read_bytes())[1]) / 2**20 - before

def timed(f, device, before):
    """-> dict: the seconds of the first call, which may compile; the median of three later ones; the GiB that they add.
    before() runs once, after the warm-up."""
    first, times = seconds(f, device), []
    f()
    before()
    peak = peak_gib(lambda: times.extend(seconds(f, device) for _ in range(3)), device)
    return {"first call": first, "seconds": float(np.median(times)), "added GiB": peak}

def matmul_rate(dtype, device):
    """-> the FLOP/s of one large matrix product on this device. MFU is a share of it."""
    n = 8192 if device.startswith("cuda") else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / min(seconds(lambda: a @ a, device) for _ in range(10))

# ---- other programs --------------------------------------------------------------------------------------------------

started = [] # all processes; the caller has to end those that are left: they would occupy the GPU

def start(*command):
    """Starts `python COMMAND` in the project's folder -> its process, whose output is a pipe."""
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=HERE, start_new_session=True, encoding="utf-8",
                               errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started.append(process)
    return process

def output_of(*command):
    """Starts it and waits for it -> what it wrote. RuntimeError with the last error in that if it fails."""
    process = start(*command)
    text = process.communicate()[0].strip()
    if process.returncode:
        errors = [line for line in text.splitlines() if "rror:" in line]
        raise RuntimeError(errors[0] if errors else text[-90:])
    return text

def end(process):
    """Kills a process, and those that it has started."""
    if process.poll() is None:
        whole = psutil.Process(process.pid)
        for each in [whole, *whole.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
