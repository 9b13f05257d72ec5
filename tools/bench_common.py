"""
What bench.py and gpu_check.py share: models with random weights, samples of noise, a step in several modes, and how to
count FLOPs, seconds and memory.
"""
import ctypes
import gc
import math
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig

from library.models import devices
import predict
import rope_patch

MODELS = dict(
    small=dict(num_layers=2, attention_head_dim=64, num_attention_heads=8, joint_attention_dim=256,
               axes_dims_rope=(8, 28, 28)),
    full=dict(num_layers=60, attention_head_dim=128, num_attention_heads=24, joint_attention_dim=3584,
              axes_dims_rope=(16, 56, 56)))
FEW = 4 # blocks, where the numbers are compared; enough for --offload to fill each of its two buffers twice
# per sample, in tokens: height x width of its target and of its controls, and the length of its text
PRESETS = dict(
    mixed=["8x8 8x8 20", "16x8 8x16 60", "16x16 16x16 110", "32x16 32x16 175"],
    mild=["15x15 15x15 96", "14x16 16x15 90", "16x16 15x16 115", "15x17 15x16 105"],
    quick=["2x3 3x2 5", "4x4 4x4 2x2 9", "6x3 3x6 3"], # only shows that it runs
    mixed_1024=["64x64 64x64 500", "32x32 32x32 300", "48x24 48x24 350", "24x40 24x40 300"],
    pair_1024=["64x64 64x64 200"]) # that of GUIDE's table of memory

def open_device(device, dtype):
    """Sets up the device as train.py does, before it holds any tensor -> its name. Ends the script if the device cannot
    be used."""
    devices.check_device("device", device)
    devices.check_card("device", device, str(dtype).removeprefix("torch."))
    if not device.startswith("cuda"):
        torch.set_num_threads(1) # so processor time is the clock, as the machine may be shared
        return "CPU, 1 thread"
    torch.cuda.set_device(torch.device(device).index or 0) # all clocks and counters below read this GPU
    return devices.prepare_card(device, "auto")

# ---- models and samples ----------------------------------------------------------------------------------------------

def make_model(config, dtype, device):
    """-> a model whose blocks get their weights from predict.place_transformer, one by one, as those of a single file
    do: so a card that is too small for the whole model can hold it quantized or offloaded."""
    torch.manual_seed(0)
    with init_empty_weights():
        model = QwenImageTransformer2DModel(**config).requires_grad_(False)
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            blank = torch.zeros((), dtype=dtype).expand(p.shape) # the memory of one number
            setattr(module, name, torch.nn.Parameter(blank, requires_grad=False))
    blocks = {*rope_patch.blocks_of(model)}
    for child in model.children():
        if blocks.isdisjoint(child.modules()):
            fill(child, device)
    model.fill_from_file = lambda block, quantize: fill(block, device)
    return model

def fill(module, device):
    """Gives random numbers to the frozen weights, such that a wrong position changes the model's output by a third. As
    torch initialises them it changes by 6e-4, which the rounding of bf16 would hide. (hot_model in tests/harness.py is
    the same.)"""
    for name, p in module.named_parameters():
        if p.requires_grad: # a LoRA's
            continue
        bound = p.shape[-1] ** -0.5
        weight = torch.empty(p.shape, device=device).uniform_(-bound, bound)
        if name.endswith("_mod.1.bias"):
            weight.normal_()
        elif p.dim() == 1 and name.endswith("weight"): # a norm's
            weight.fill_(2)
        elif name.endswith(("to_v.weight", "add_v_proj.weight")):
            weight.mul_(4)
        p.data = weight.bfloat16().to(p.dtype) # so a model in fp32 has the same weights as one in bf16

def with_lora(model, ours=True):
    """Adds a LoRA whose fp32 weights are far from zero. ours: train.py's layer, which casts them when it uses them; or
    else peft's own."""
    config = dict(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
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

def make_samples(config, preset, dtype, device):
    """-> samples of noise. preset: a text for each, as in PRESETS."""
    def randn(*shape):
        return torch.randn(*shape, generator=g).to(device)
    g, samples = torch.Generator().manual_seed(2), []
    for text in preset:
        *pictures, length = text.split()
        img_shapes = [(1, *map(int, sides.split("x"))) for sides in pictures]
        lengths = [h * w for _, h, w in img_shapes]
        timestep = torch.rand((), generator=g).to(dtype).float() # rounded, as a model would round it to its own dtype
        samples.append(SimpleNamespace(
            img_shapes=img_shapes,
            lens=(sum(lengths), int(length)),
            latents=randn(sum(lengths), 64).to(dtype),
            prompt=randn(int(length), config["joint_attention_dim"]).to(dtype),
            timestep=timestep.to(device),
            target=randn(lengths[0], 64)))
    return samples

# ---- a step ----------------------------------------------------------------------------------------------------------

def run_on(model, samples, mode="packed"):
    """Runs all samples in one forward pass -> their predictions. mode: packed; padded, as others call it; with pads,
    which are computed; or stock, diffusers' own code, for samples of equal shapes."""
    runs = {"packed": rope_patch.run_packed, "padded": run_padded,
            "with pads": run_with_pads, "stock": run_stock}
    latents = [s.latents.to(model.dtype) for s in samples]
    prompts = [s.prompt.to(model.dtype) for s in samples]
    timesteps = torch.stack([s.timestep for s in samples])
    return runs[mode](model, latents, prompts, timesteps, [s.img_shapes for s in samples])

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

def train_step(model, batches, mode="packed"):
    """Computes one training step, a forward and a backward pass for each batch -> its loss and the LoRA's gradients, as
    a list of tensors."""
    for p in model.lora.values():
        p.grad = None
    total = 0
    for batch in batches:
        preds = run_on(model, batch, mode)
        loss = sum((p[:len(s.target)].float() - s.target).square().mean() for s, p in zip(batch, preds))
        loss.backward()
        total = total + loss.detach()
    return [total, *[p.grad for p in model.lora.values()]]

def distance(got, want):
    """-> the relative L2 distance between two lists of tensors, all together."""
    def join(tensors):
        return torch.cat([tensor.double().flatten() for tensor in tensors])
    return ((join(got) - join(want)).norm() / join(want).norm()).item()

# ---- measuring -------------------------------------------------------------------------------------------------------

def flops(config, lens):
    """-> the FLOPs of one training step of rope_patch that recomputes nothing. lens: (image tokens, text tokens) of
    each sample; a multiplication with its addition counts as 2. The backward pass of a frozen linear layer costs as
    much as its forward pass, as only the inputs have a gradient; for attention it costs 2.5 times as much. Nothing
    reads the text that leaves the last block, so that has no query, output layer or MLP."""
    d, total = config["num_attention_heads"] * config["attention_head_dim"], 0
    for img, txt in lens:
        linear, attention = 24 * d * d * (img + txt), 4 * d * (img + txt) ** 2
        total += config["num_layers"] * (2 * linear + 3.5 * attention)
        total -= 40 * d * d * txt + 3.5 * 4 * d * txt * (img + txt)
    return total

def seconds(f, device):
    """-> how long one call takes: on a GPU by its own clock, on a CPU in processor time."""
    if device.startswith("cuda"):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    t0 = time.process_time()
    f()
    return time.process_time() - t0

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

def matmul_rate(dtype, device):
    """-> the FLOP/s of one large matrix product on this device. MFU is a share of it."""
    n = 8192 if device.startswith("cuda") else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    times = []
    for _ in range(10):
        times.append(seconds(lambda: a @ a, device))
    return 2 * n**3 / min(times) # the fastest is the card's own; the first ones also wait for clocks and kernels
