"""
A LoRA on a bf16 base, in bf16: its fp32 weights are cast when they are used.

A block's LoRA layers cast theirs all at once. One by one, in forward pass, recomputation and backward pass, these casts
were a sixth of the kernels that a small pack waits for. The numbers are the same.
"""
from functools import partial

import torch
import torch.nn.functional as F
from peft.tuners import lora

class LoraLinear(lora.Linear): # a class because peft takes one in the place of its own
    """peft computes an fp32 adapter in fp32 even where the base is bf16: 12 to 16 % of such a step on a CPU. Here
    its weights are cast when they are used, while they, their gradients and the file stay fp32. Plain LoRA, and no
    other one beside it: all else is left to peft."""
    cast = None # lora_A and lora_B in the base's dtype, if `cast` has made them

    def lora_weights(self):
        return self.lora_A["default"].weight, self.lora_B["default"].weight # (r, in), (out, r)

    def forward(self, x, *args, **kwargs):
        # (a variant is a LoRA with more to it, such as aLoRA)
        if (x.dtype == torch.float32 or self.active_adapters != ["default"] or self.disable_adapters or self.merged
                or args or kwargs or "default" in self.lora_variant or self.lora_bias["default"]):
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x)
        a, b = self.cast or [weight.to(x.dtype) for weight in self.lora_weights()]
        narrow = F.linear(self.lora_dropout["default"](x), a) # (..., r)
        # product, scale and sum in one kernel: apart they would read and write the wide output twice more
        result_2d = torch.addmm(result.flatten(0, -2), narrow.flatten(0, -2), b.T, alpha=self.scaling["default"])
        return result_2d.view_as(result)

def share_casts(blocks):
    """Registers hooks on the blocks whose LoRA layers (those with an attribute `cast`) take part."""
    for block in blocks:
        layers = [module for module in block.modules() if hasattr(module, "cast")]
        if layers:
            block.register_forward_pre_hook(partial(cast, layers))
            # also when recomputation stops a block halfway, which it does by an exception
            block.register_forward_hook(partial(forget, layers), always_call=True)

def cast(layers, block, args):
    dtype = block.attn.norm_q.weight.dtype # (a quantized layer's would be int8)
    if dtype == torch.float32 or torch.compiler.is_compiling(): # the compiler fuses them
        return
    weights = [layer.lora_weights() for layer in layers]
    flat = torch.cat([w.flatten() for pair in weights for w in pair]).to(dtype)
    parts = iter(flat.split([w.numel() for pair in weights for w in pair]))
    for layer, pair in zip(layers, weights):
        layer.cast = [next(parts).view_as(w) for w in pair]

def forget(layers, block, args, output):
    for layer in layers:
        layer.cast = None
