"""
A LoRA on a bf16 base: casts the fp32 weights of a block's LoRA layers all at once. (Taken if this file is there.)

One by one, in forward pass, recomputation and backward pass, these casts were a sixth of the kernels that a small pack
waits for. The numbers are the same.
"""
from functools import partial

import torch


def cast_together(blocks):
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
