"""
--offload without --fsdp: frozen blocks wait in pinned host memory, and each is copied while the one before it computes.

All blocks that are away share two buffers on the device: number k of them always lies in buffer k % 2. So its
parameters are views that stay the same, for autograd and torch.compile, and only the buffers' bytes change. FSDP2,
where there is one process, copies on the stream that computes, and each tensor twice; and diffusers' group offloading
has taken a block away when its backward pass begins.
"""
import os

import psutil # comes with accelerate
import torch
from torch.autograd.graph import register_multi_grad_hook


def too_little(blocks, need, found):
    """A MemoryError whose words are for the user."""
    return MemoryError(f"{blocks} blocks need {need / 2**30:.1f} GiB of host memory, {found}; offload fewer, or "
                       "--quantize")


def check_host(block, blocks, shards=1):
    """-> bytes of host memory that the frozen weights of so many blocks like this one take, in this process, which has
    one of `shards` parts. MemoryError if they do not fit: the kernel would end a process without a word."""
    need = blocks * sum(p.nbytes for name, p in block.named_parameters() if ".lora_" not in name) // shards
    host, own = psutil.virtual_memory(), psutil.Process().memory_info()
    # weights that were converted to another dtype are in memory already, and go while they are copied; others are files
    converted = own.rss - getattr(own, "shared", own.rss) # (at most; where this is known)
    if need > host.available + converted:
        raise too_little(blocks, need, f"{host.available / 2**30:.1f} are free")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) # some may have theirs by now: so not of what is free
    if processes * need > host.total:
        raise too_little(blocks, processes * need, f"{host.total / 2**30:.1f} are there for {processes} processes")
    return need


def place(transformer, device, away, smaller):
    """Brings the transformer, with its LoRAs, to the device, one block after the other: smaller(block) first, then the
    frozen weights of the blocks of the numbers `away` go to pinned host memory, one tensor a block -> transformer.
    MemoryError, in words for the user, if the host has too little."""
    device, blocks = torch.device(device), transformer.transformer_blocks
    hosts, buffers = [], []
    for i, block in enumerate(blocks):
        smaller(block)
        if i in away:
            if not hosts:
                need = check_host(block, len(away))
            frozen = [p for name, p in block.named_parameters() if ".lora_" not in name]
            sizes = [-(-p.nbytes // 256) * 256 for p in frozen] # aligned as by CUDA's allocator
            try:
                host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
            except RuntimeError as e: # a system may let less be pinned than is free
                first_line = str(e).partition("\n")[0][:90]
                raise too_little(len(away), need, f"which cannot be pinned ({first_line})")
            hosts.append(host)
            if len(buffers) < 2:
                buffers.append(torch.empty_like(host, device=device))
            buffer = buffers[(len(hosts) - 1) % 2] # of this size too, as all blocks are alike
            for p, *parts in zip(frozen, host.split(sizes), buffer.split(sizes)):
                waiting, view = [part[:p.nbytes].view(p.dtype).view(p.shape) for part in parts]
                waiting.copy_(p)
                p.data = view # p keeps its version: to autograd it never changes
        block.to(device)
    copy_ahead([blocks[i] for i in away], hosts, buffers, device)
    return transformer.to(device)


def copy_ahead(blocks, hosts, buffers, device):
    """Hooks that fill the buffers: each block's weights (hosts) are there when it computes, and the next one's on the
    way. Blocks may be entered in any order, and a pass may stop halfway: the order only decides what comes early."""
    api = getattr(torch, device.type) # torch.cpu has the same names, which do nothing
    copying = api.Stream(device)
    number = {block: k for k, block in enumerate(blocks)}
    held = [None, None] # the block whose weights are in each buffer
    entered = -1 # the latest block that was entered

    def copy(k):
        if 0 <= k < len(hosts) and held[k % 2] != k:
            # what was in this buffer has been used: a forward pass calls one block after the other, and autograd, which
            # takes the latest of all nodes that are ready, has run all of a block before it enters an earlier one
            copying.wait_stream(api.current_stream(device))
            with api.stream(copying):
                buffers[k % 2].copy_(hosts[k], non_blocking=True)
            held[k % 2] = k

    @torch.compiler.disable # or the hook itself would be compiled, anew for each k
    def enter(block, *_):
        nonlocal entered
        k = number[block]
        if k != entered: # else it is here, and to wait now would be to wait for its neighbour
            copy(k) # already done, but for the first one
            api.current_stream(device).wait_stream(copying)
            copy(k + 1 if k > entered or k == 0 else k - 1)
            entered = k

    @torch.compiler.disable
    def enter_on_return(block, args, out): # also where nothing is computed again: what autograd has saved are the views
        register_multi_grad_hook(out, lambda grad: enter(block), mode="any")

    for block in blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(enter_on_return)
