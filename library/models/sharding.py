"""
--fsdp: shard the transformer's frozen blocks over the processes (FSDP2); with --offload the shards wait in host memory.

A GPU holds 1/N of the frozen blocks, and two whole ones while they compute: torch's fully_shard gathers a block when it
is entered, in the forward and in the backward pass, frees it afterwards, and fetches the next one meanwhile. All other
layers and the LoRAs are whole on every device, so train.py's one all-reduce and its checkpoints work as without.
"""
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from library.models.offloading import check_host

def shard(transformer, blocks, device, offloaded_blocks, prepare_block):
    """Brings the transformer, with its LoRAs, to the device, block by block: prepare_block(block), then its shards.
    offloaded_blocks: the numbers of those whose shards go to pinned host memory -> transformer. InputError if the host
    has too little memory."""
    # the warning fears for outputs that are changed in place, and none is
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    device = torch.device(device)
    if device.type == "cuda": # where FSDP2 works; set_device wants a number
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for i, block in enumerate(blocks):
        prepare_block(block)
        if i in offloaded_blocks[:1]:
            check_host(block, len(offloaded_blocks), dist.get_world_size())
        # FSDP leaves LoRA parameters alone, so they stay whole, and plain tensors
        loras = {p for name, p in block.named_parameters() if ".lora_" in name}
        for p in loras:
            p.data = p.data.to(device)
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=loras, offload_policy=(
            CPUOffloadPolicy(pin_memory=device.type == "cuda") if i in offloaded_blocks else OffloadPolicy()))
    for child in transformer.children():
        if {*blocks}.isdisjoint(child.modules()):
            child.to(device)
    # the root ties the blocks together: they share streams, and know who comes next
    fully_shard(transformer, mesh=mesh, ignored_params={
        p for p in transformer.parameters() if not isinstance(p, DTensor)})
    return transformer
