"""
--fsdp and --offload: the transformer's frozen blocks split over processes, or waiting in host memory.

Both are FSDP2 (torch's fully_shard): a block is gathered when it is entered, in the forward as in the backward pass,
and freed behind it. Between processes the next block comes while this one computes; from host memory alone it does not.
All other layers and the LoRAs are whole on every device, so that train.py's one all-reduce and its checkpoints serve as
ever. (diffusers' group offloading has taken a block away when its backward pass began.)
"""
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(transformer, device, offload, fsdp, pack):
    """Brings the transformer, with its LoRAs, to the device, one block after the other: pack(block) first, then it is
    split over the processes (fsdp), and `offload` of the blocks, spread evenly, wait in pinned host memory ->
    transformer, with bytes_away: what a forward or a backward pass copies from there. Makes a process group where there
    is none."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view") # nothing works in place
    device, blocks = torch.device(device), transformer.transformer_blocks
    offload = min(offload, len(blocks))
    away = [i * len(blocks) // offload for i in range(offload)]
    transformer.bytes_away = 0
    if device.type == "cuda": # where FSDP2 works; set_device wants a number
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0,
                                world_size=1)
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (1, ranks) if fsdp else (ranks, 1), mesh_dim_names=("copies", "parts"))
    mesh = mesh["parts"]
    for i, block in enumerate(blocks):
        pack(block)
        if not fsdp and i not in away:
            block.to(device)
            continue
        loras = {p for name, p in block.named_parameters() if ".lora_" in name}
        for p in loras:
            p.data = p.data.to(device)
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=loras, offload_policy=(
            CPUOffloadPolicy(pin_memory=device.type == "cuda") if i in away else OffloadPolicy()))
        frozen = [p.to_local().nbytes for p in block.parameters() if p not in loras]
        transformer.bytes_away += sum(frozen) if i in away else 0
    for name, child in transformer.named_children():
        if name != "transformer_blocks":
            child.to(device)
    # the root ties the blocks together: they share streams, and know who comes next
    fully_shard(transformer, mesh=mesh, ignored_params={
        p for p in transformer.parameters() if not isinstance(p, DTensor)})
    return transformer
