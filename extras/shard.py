"""
--fsdp: the transformer's frozen blocks split over processes, and with --offload waiting in host memory.

This is FSDP2 (torch's fully_shard): a block is gathered when it is entered, in the forward as in the backward pass, and
freed behind it; the next one comes while it computes. All other layers and the LoRAs are whole on every device, so that
train.py's one all-reduce and its checkpoints serve as ever.
"""
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(transformer, device, away, smaller):
    """Brings the transformer, with its LoRAs, to the device, block by block: smaller(block) first, then it is split
    over the processes, and the blocks of the numbers `away` wait in pinned host memory -> transformer. MemoryError,
    in words for the user, if the host has too little."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view") # nothing works in place
    device, blocks = torch.device(device), transformer.transformer_blocks
    if device.type == "cuda": # where FSDP2 works; set_device wants a number
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for i, block in enumerate(blocks):
        smaller(block)
        if i in away[:1]:
            from extras.offload import check_host # here, as without --offload its file may be gone
            check_host(block, len(away), dist.get_world_size())
        loras = {p for name, p in block.named_parameters() if ".lora_" in name}
        for p in loras:
            p.data = p.data.to(device)
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=loras, offload_policy=(
            CPUOffloadPolicy(pin_memory=device.type == "cuda") if i in away else OffloadPolicy()))
    for name, child in transformer.named_children():
        if name != "transformer_blocks":
            child.to(device)
    # the root ties the blocks together: they share streams, and know who comes next
    fully_shard(transformer, mesh=mesh, ignored_params={
        p for p in transformer.parameters() if not isinstance(p, DTensor)})
    return transformer
