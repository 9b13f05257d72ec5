"""
--quantize, --quantize_text_encoder: frozen linear layers with 8 or 4 bits a weight.

int8 and fp8 (e4m3) take a byte a weight and a scale per row; nf4 takes bitsandbytes' half byte, and a scale per 64
weights. The transformer multiplies eight-bit numbers as such where that saves time (has_product), as torchao's
dynamic-activation configs do. The text encoder, whose output is made once and kept, takes the more exact way: it
unpacks its weights.

Why not a library's layers: fully_shard fails on int8 and fp8 tensors of torchao 0.18, and autograd keeps bf16 copies of
their weights; bitsandbytes' own CPU layer (0.50) is wrong where a row is no multiple of 64, and FSDP2 loses the scales
of its 4-bit weights; diffusers' layerwise casting has no scales, and cannot load a LoRA. So we refuse a model that is
stored in few bits: quantize the bf16 one. (fp8 in one file is taken: library/models/one_file.py.) GUIDE.md has the
errors that were measured.
"""
import functools
import math

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from common import first_line, warn_once

TOP = dict(int8=127, fp8=448) # the greatest value of a format

class FrozenProduct(torch.autograd.Function):
    """x @ weight.T for a low-bit weight. Where eight bits are multiplied as such, x and the output's gradient get eight
    bits too, with a scale a row. Else the weight is unpacked, and once more in the backward pass: autograd alone would
    keep the unpacked ones, 27 GB of the real model in bf16."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        if not has_product(x, layer):
            return x @ layer.unpacked(x.dtype).T
        out = eight_bit_product(*rows_of(x, layer.kind), layer.weight, layer.scale, layer.kind, x.dtype, fast=True)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, grad):
        layer = ctx.layer
        if not has_product(grad, layer):
            return grad @ layer.unpacked(grad.dtype), None
        # this sum runs over the weight's rows, so their scales go into the gradient first; and the kernels want the
        # weight's columns to be contiguous
        rows = quantize_rows(grad * layer.scale.T.to(grad.dtype), layer.kind)
        ones = layer.scale.new_ones(layer.in_features, 1)
        out = eight_bit_product(*rows, layer.weight.T.contiguous(), ones, layer.kind, grad.dtype)
        return out.unflatten(0, grad.shape[:-1]), None

def has_product(x, layer):
    """Whether to multiply eight bits as such: where that saves time, by count and not by measurement. To quantize x
    takes several passes over it. On Hopper and data centre Blackwell these cost what the product saves, unless
    torch.compile makes one pass of them; on 8.x and 12.x the product saves more: GeForce cards compute bf16 with fp32
    sums at half the rate. The kernels want more than 16 rows (modulation has few), and sides that are multiples of 16
    (the 3420 of Qwen2.5-VL's vision MLP is none)."""
    return (layer.multiply and x.dtype == torch.bfloat16
            and (torch.compiler.is_compiling() or torch.cuda.get_device_capability(x.device)[0] in (8, 12))
            and x.numel() > 16 * x.shape[-1] and layer.in_features % 16 == 0 and layer.out_features % 16 == 0)

@functools.cache # asked for each block
def can_multiply(kind, device):
    """Whether a device has eight-bit products: int8 from Ampere on, fp8 from Ada on. We try one, as libraries have
    refused newer cards; a refusal costs speed only, so it is a warning."""
    device = torch.device(device)
    if kind not in TOP or device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) < ((8, 9) if kind == "fp8" else (8, 0)):
        return False
    try:
        rows, scale = quantize_rows(torch.ones(32, 32, dtype=torch.bfloat16, device=device), kind)
        for fast in (True, False): # the forward and the backward pass, whose layouts are the same
            eight_bit_product(rows, scale, rows, scale, kind, torch.bfloat16, fast).cpu()
    except (RuntimeError, ValueError) as e:
        warn_once(f"warning: --quantize {kind}: {device} cannot multiply it as such ({first_line(e)}); its weights are "
                  "unpacked for each product")
        return False
    return True

def quantize_rows(x, kind):
    """(..., K) -> (M, K) of eight bits, and (M, 1): what each row was divided by."""
    x = x.flatten(0, -2)
    # in x's dtype, so that nothing is written in fp32. It may be rounded up by 1/256, hence 0.99 of the greatest value
    inverse = (0.99 * TOP[kind] / torch.linalg.vector_norm(x, math.inf, -1, keepdim=True).clamp_min(1e-30)).to(x.dtype)
    rows = (x * inverse).round_().to(torch.int8) if kind == "int8" else (x * inverse).to(torch.float8_e4m3fn)
    return rows, 1 / inverse.float()

latest = WeakTensorKeyDictionary() # the tensor that was quantized last, as q, k and v multiply the same one

def rows_of(x, kind):
    if torch.compiler.is_compiling() or x.is_inference(): # the compiler sees for itself that it is the same tensor
        return quantize_rows(x, kind)
    if x not in latest or latest[x][:2] != (kind, x._version):
        latest.clear()
        latest[x] = kind, x._version, quantize_rows(x, kind)
    return latest[x][2]

def eight_bit_product(rows, row_scale, weight, scale, kind, dtype, fast=False):
    """(M, K) @ (N, K).T, times the scales (M, 1) and (N, 1) of their rows -> (M, N). fast: fp8 adds up with fewer bits,
    as is usual in a forward pass; a gradient's small terms would be lost."""
    if kind == "fp8":
        return torch._scaled_mm(rows, weight.view(torch.float8_e4m3fn).T, row_scale, scale.T, out_dtype=dtype,
                                use_fast_accum=fast)
    return torch._int_mm(rows, weight.T) * row_scale.to(dtype) * scale.T.to(dtype)

def bitsandbytes():
    import bitsandbytes.functional # slow to import, and only nf4 needs it
    return bitsandbytes.functional

class LowBitLinear(torch.nn.Linear): # a Linear, because peft puts LoRAs on such
    """A frozen linear layer of few bits. Weights and scales are plain parameters, which FSDP2 can shard and copy."""

    def __init__(self, linear, kind, multiply=False):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.kind, self.multiply, weight = kind, multiply, linear.weight.detach()
        if weight.dtype == torch.float8_e4m3fn: # of --transformer FILE, with its scales (library/models/one_file.py)
            weight, scale = weight.view(torch.int8), linear.scale
        elif kind == "nf4": # in rows of 64: on CPUs bitsandbytes 0.50 gets other rows wrong
            weight, state = bitsandbytes().quantize_4bit(weight.float().reshape(-1, 64), quant_type=kind,
                                                         compress_statistics=False)
            scale, self.code = state.absmax, state.code
        else:
            scale = (weight.float().abs().amax(1, keepdim=True) / TOP[kind]).clamp_min(1e-12)
            weight = weight.float() / scale
            weight = weight.round() if kind == "int8" else weight.to(torch.float8_e4m3fn).view(torch.int8)
            weight = weight.to(torch.int8)
        self.weight, self.scale = [torch.nn.Parameter(t, requires_grad=False) for t in (weight, scale)]

    def unpacked(self, dtype):
        """-> weight (out_features, in_features)."""
        if self.kind == "nf4":
            blocks = torch.Size([len(self.scale), 64])
            state = bitsandbytes().QuantState(self.scale, blocks, self.code, 64, self.kind, dtype)
            return bitsandbytes().dequantize_4bit(self.weight, state).view(self.out_features, self.in_features)
        if self.kind == "int8":
            return self.weight * self.scale.to(dtype) # promoted inside the one kernel
        return self.weight.view(torch.float8_e4m3fn).to(dtype).mul_(self.scale.to(dtype))

    def forward(self, x):
        out = FrozenProduct.apply(x, self)
        return out if self.bias is None else out + self.bias

def quantize_linears(module, kind, device, multiply=False):
    """Quantizes every linear layer under `module` except LoRAs, one at a time, on the device, in place -> module.
    kind: int8, fp8 or nf4. multiply: multiply eight-bit numbers as such where has_product says so, which is less
    exact."""
    multiply = multiply and can_multiply(kind, device) # asked here, as nothing can be tried while torch.compile traces
    # a list of all modules would hold the layers that have been replaced, and so their weights on the device
    parents = [(name, m) for name, m in module.named_modules() if type(m) is not torch.nn.Linear]
    for name, parent in parents:
        for child in [child for child, _ in parent.named_children()]:
            linear = getattr(parent, child)
            if type(linear) is torch.nn.Linear and ".lora_" not in f".{name}.{child}":
                setattr(parent, child, LowBitLinear(linear.to(device), kind, multiply).train(linear.training))
    return module
