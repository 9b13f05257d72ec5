"""
--offload without --fsdp: frozen blocks wait in pinned host memory, and each is copied while the one before it computes.

All offloaded blocks share two buffers on the device: the k-th of them always lies in buffer k % 2. So its parameters
are views that stay the same, for autograd and torch.compile, and only the buffers' bytes change.

The copy costs no time if a pass has enough tokens. By count: a block in bf16 is 0.7 GB, 28 ms at 25 GB/s, in which a
GPU at 200 TFLOP/s computes 14,000 tokens forward. The buffers hold two blocks, so --offload N frees N - 2 blocks.

Why not FSDP2's offloading: in a single process it copies on the stream that computes, and each tensor twice. Why not
diffusers' group offloading: when a block's backward pass begins, it has already removed the block's weights.
"""
import os

import psutil
import torch
from torch.autograd.graph import register_multi_grad_hook

from common import InputError, first_line
from library.models.host_memory import host_memory

def choose_blocks(offload, blocks):
    """-> the numbers of the blocks that --offload sends away, of so many: evenly spread, so that the blocks between two
    of them hide the next copy."""
    offload = min(offload, blocks)
    return [i * blocks // offload for i in range(offload)]

def too_little(blocks, need, found):
    return InputError(f"--offload: {blocks} blocks need {need / 2**30:.1f} GiB of host memory, {found}; offload fewer, "
                      "or --quantize")

def check_host(block, blocks, shards=1):
    """-> bytes of host memory that the frozen weights of so many blocks like this one take in this process, which holds
    one of `shards` parts of each. InputError if they do not fit: Linux would kill the process without a word."""
    need = blocks * sum(p.nbytes for name, p in block.named_parameters() if ".lora_" not in name) // shards
    (free, total), own = host_memory(), psutil.Process().memory_info()
    # Weights that were converted to another dtype are in memory already, and are freed as they are copied; all others
    # are mapped from files. So this much will become free, at most (on systems that tell).
    converted = own.rss - getattr(own, "shared", own.rss)
    if need > free + converted:
        raise too_little(blocks, need, f"{free / 2**30:.1f} are free")
    # all processes of this host together: compared with its whole memory, as some may have taken theirs already
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes * need > total:
        raise too_little(blocks, processes * need, f"{total / 2**30:.1f} are there for {processes} processes")
    return need

def place(transformer, blocks, device, offloaded_blocks, prepare_block):
    """Brings the transformer, with its LoRAs, to the device, one block after the other, and calls prepare_block(block)
    first. offloaded_blocks: the numbers of those whose frozen weights go to pinned host memory, as one tensor each ->
    transformer. InputError if the host has too little memory."""
    device = torch.device(device)
    hosts, buffers = [], []
    for i, block in enumerate(blocks):
        prepare_block(block)
        if i in offloaded_blocks:
            if not hosts:
                need = check_host(block, len(offloaded_blocks))
            frozen = [p for name, p in block.named_parameters() if ".lora_" not in name]
            sizes = [-(-p.nbytes // 256) * 256 for p in frozen] # aligned as by CUDA's allocator
            try:
                host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
            except RuntimeError as e: # a system may allow less pinned memory than is free
                raise too_little(len(offloaded_blocks), need, f"which cannot be pinned ({first_line(e)})")
            hosts.append(host)
            if len(buffers) < 2:
                buffers.append(torch.empty_like(host, device=device))
            buffer = buffers[(len(hosts) - 1) % 2] # it has the right size, as all blocks are alike
            for p, *parts in zip(frozen, host.split(sizes), buffer.split(sizes)):
                waiting, view = [part[:p.nbytes].view(p.dtype).view(p.shape) for part in parts]
                waiting.copy_(p)
                p.data = view # p keeps its version: to autograd it never changes
        block.to(device)
    copy_ahead([blocks[i] for i in offloaded_blocks], hosts, buffers, device)
    return transformer.to(device)

def copy_ahead(blocks, hosts, buffers, device):
    """Adds hooks that fill the buffers: a block's weights (from `hosts`) are on the device when it computes, and those
    of the next are on their way. Blocks may be entered in any order, and a pass may stop halfway: a copy then comes
    late, and is still right."""
    api = getattr(torch, device.type) # torch.cpu has the names of torch.cuda, which do nothing
    copying = api.Stream(device)
    number = {block: k for k, block in enumerate(blocks)}
    held = [None, None] # the block whose weights are in each buffer
    entered = -1 # the latest block that was entered

    def copy(k):
        if 0 <= k < len(hosts) and held[k % 2] != k:
            # Nothing reads this buffer's old weights any more: a forward pass calls one block after the other, and
            # autograd, which takes the latest of all nodes that are ready, finishes a block before it enters an earlier
            # one. The copy waits only for kernels that have been queued.
            copying.wait_stream(api.current_stream(device))
            with api.stream(copying):
                buffers[k % 2].copy_(hosts[k], non_blocking=True)
            held[k % 2] = k

    @torch.compiler.disable # or the hook itself would be compiled, anew for each k
    def enter(block, *_):
        nonlocal entered
        k = number[block]
        if k != entered: # else it is here already, and waiting now would mean waiting for its neighbour's copy
            copy(k) # only the first block is not on its way yet
            api.current_stream(device).wait_stream(copying)
            copy(k + 1 if k > entered or k == 0 else k - 1)
            entered = k

    @torch.compiler.disable
    def enter_on_return(block, args, out): # also for blocks that are not recomputed: autograd has saved their views
        register_multi_grad_hook(out, lambda grad: enter(block), mode="any")

    for block in blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(enter_on_return)
