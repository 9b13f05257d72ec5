"""
--quantize, --quantize_text_encoder: frozen linear layers with 8 or 4 bits a weight.

int8 and fp8 (e4m3): a byte a weight and a scale per row, as in torchao's weight-only configs; nf4: bitsandbytes' half
byte, and a scale per 64 weights. Why not a library's layers: fully_shard fails on the tensors of torchao 0.18, and
autograd keeps bf16 copies of their weights; bitsandbytes' own CPU layer (0.50) is wrong where a row is no multiple of
64; diffusers' layerwise casting has no scales, and cannot load a LoRA. GUIDE.md has the errors that were measured.
"""
import torch


class FrozenProduct(torch.autograd.Function):
    """x @ weight.T for a low-bit weight, which is unpacked anew in the backward pass. autograd alone would keep it as
    it was multiplied, in bf16: 27 GB of the real model."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        if layer.kind == "fp8" and has_fp8_matmul(x, layer): # rows of x get scales of their own
            rows = x.flatten(0, -2)
            scale = (rows.abs().amax(-1, keepdim=True).float() / 448).clamp_min(1e-12)
            out = torch._scaled_mm((rows / scale).to(torch.float8_e4m3fn), layer.weight.view(torch.float8_e4m3fn).T,
                                   scale, layer.scale.T, out_dtype=x.dtype)
            return out.unflatten(0, x.shape[:-1])
        return x @ layer.unpacked(x.dtype).T

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.layer.unpacked(grad.dtype), None


def has_fp8_matmul(x, layer):
    """_scaled_mm wants Ada or newer, and sides that are multiples of 16: 3420 of Qwen2.5-VL's vision MLP are none."""
    return (x.is_cuda and torch.version.hip is None and x.dtype == torch.bfloat16
            and torch.cuda.get_device_capability(x.device) >= (8, 9)
            and layer.in_features % 16 == 0 and layer.out_features % 16 == 0)


def bitsandbytes():
    import bitsandbytes.functional # slow to import, and only nf4 needs it
    return bitsandbytes.functional


class LowBitLinear(torch.nn.Linear): # a Linear, because peft puts LoRAs on such
    """A frozen linear layer of few bits. Weights and scales are plain parameters, which FSDP2 can split and copy."""

    def __init__(self, linear, kind):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.kind, weight = kind, linear.weight.detach()
        if kind == "nf4": # in rows of 64: on CPUs bitsandbytes 0.50 is wrong about others
            weight, state = bitsandbytes().quantize_4bit(weight.float().reshape(-1, 64), quant_type=kind,
                                                         compress_statistics=False)
            scale, self.code = state.absmax, state.code
        else:
            top = 127 if kind == "int8" else 448
            scale = (weight.float().abs().amax(1, keepdim=True) / top).clamp_min(1e-12)
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


def make_low_bit(module, kind, device):
    """Quantizes every linear layer under `module` except LoRAs, one at a time, on the device, in place -> module.
    kind: int8, fp8 or nf4."""
    for name, parent in list(module.named_modules()):
        for child, linear in list(parent.named_children()):
            if type(linear) is torch.nn.Linear and ".lora_" not in f".{name}.{child}":
                setattr(parent, child, LowBitLinear(linear.to(device), kind).train(linear.training))
    return module
