"""
--gradient_checkpointing on a GPU, if no number is given: recompute as few blocks as the GPU's memory allows.

It measures, before the first step: a pass over the largest pack that can come, with no block kept; then passes with as
many blocks kept as surely fit, until no further one does. So the answer is right for any card, --quantize, --offload
and --compile, without a formula for each. The gradients of these passes are thrown away, and train.py seeds dropout
anew for each pack.

With --fsdp the processes compute such a pass together: if one of them runs out of memory, the others wait for its part,
and its own blocks stay gathered. So no such pass goes on; the run ends with a line, and less is tried (EDGE).
"""
import time
from dataclasses import MISSING, fields
from itertools import product
from math import inf, isqrt

import torch
import torch.distributed as dist
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import rope_patch
from common import InputError, gather_objects

GIB = 2**30
STATES = 5 # of each parameter beside its weight: a gradient, and AdamW's two moments or Prodigy's four; --ema adds one
EDGE = 0.9 # with --fsdp: the share of the free memory that a try may take by the estimate

# ---- the largest pack ------------------------------------------------------------------------------------------------

def lengths_of(samples, Pick):
    """All lengths that train.py may pick, in tokens. Pick: its class."""
    lengths = set()
    for sample in samples:
        for encoding, (prompt, with_controls) in product(sample.encodings, sample.texts):
            picked = Pick(sample=sample, encoding=encoding, prompt=prompt, with_controls=with_controls, preserve=False,
                          s=None, noise_generator=None)
            lengths.add(picked.tokens)
    return lengths

def table_bytes(samples):
    """What the rotary tables of these samples take at most: diffusers keeps those of the last 128 pictures on the
    device, one for each size and place in its sample, 64 complex numbers a token."""
    pictures = {(n, h, w) for s in samples for e in s.encodings for n, (_, h, w) in enumerate(e["img_shapes"])}
    return 64 * 8 * sum(sorted([h * w for _, h, w in pictures])[-128:])

def largest_pack(lengths, args, processes):
    """-> lengths of one or more samples that take as much memory as any forward pass of samples of `lengths`, which is
    a question of their sum. processes: each gets a sample of a step before one gets a second."""
    most_samples = max(1, args.batch_size - processes + 1)
    longest = max(lengths)
    limit = min(args.max_tokens, most_samples * longest)
    sums = 1 # all sums that samples can have, as the bits of one integer: at first the sum 0 alone
    for _ in range(most_samples):
        fewer = sums # the sums of one sample less
        for n in lengths:
            sums |= (fewer << n) & ((2 << limit) - 1)
        if sums == fewer or sums >> limit: # nothing new, or the limit itself
            break
    most, several = max(longest, sums.bit_length() - 1), 0
    for n in lengths if most_samples > 1 else ():
        several |= ((sums & ~1) << n) & ((2 << limit) - 1)
    # several samples of nearly that sum take a little more than one, as they are put in order for the attention
    return [most - most // 2, most // 2] if several.bit_length() - 1 > 0.95 * most else [most]

def shape_of(tokens):
    """-> (img_shapes, text tokens) of a sample of so many tokens, or a few more."""
    text = min(256, tokens // 2)
    height = isqrt(tokens - text)
    width = -(-(tokens - text) // height)
    return [(1, height, width)], text

def blank_items(Item, shapes, model, device=None):
    """Items of zeros. Item: train.py's class, which says dtype and shape of each tensor; shapes: (img_shapes, text
    tokens) of each item. A field with a default stays at it: few samples have it, and all would pay for it."""
    dtypes = dict(float32=torch.float32, base=model.dtype)
    items = []
    for img_shapes, text in shapes:
        target, *controls = [h * w for _, h, w in img_shapes]
        sizes = dict(I=target, K=sum(controls), T=text, C=model.config.in_channels, J=model.config.joint_attention_dim)
        tensors = {}
        for field in fields(Item):
            if field.name != "img_shapes" and field.default is MISSING:
                dtype, *letters = field.type.split()
                shape = [sizes[letter] for letter in letters]
                tensors[field.name] = torch.zeros(shape, dtype=dtypes[dtype], device=device)
        items.append(Item(**tensors, img_shapes=img_shapes))
    return items

# ---- memory ----------------------------------------------------------------------------------------------------------

def has_own_memory(device):
    return device.startswith("cuda")

def margin(total):
    """Bytes of a card's memory that stay free, for fragments and for what CUDA and its libraries take."""
    return max(0.05 * total, GIB)

def room(device):
    """Bytes that this process can still take on the device, less the margin."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused - margin(total)

def measure(f, device):
    """-> (peak bytes of the tensors on the device while f() runs, less those before; its seconds). If it runs out of
    memory both are inf."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    begun = time.perf_counter()
    try:
        f()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, time.perf_counter() - begun
    except torch.OutOfMemoryError:
        return inf, inf
    finally:
        torch.cuda.reset_peak_memory_stats(device) # the log's `memory` is the training's
        torch.cuda.empty_cache()

def learning_bytes(transformer, args):
    """Bytes that are taken beside a pass: gradients of the packs before it, and the optimizer's state. (A validation
    copies the weights where --ema has an average, and has no gradients then.)"""
    states = STATES + 1 if args.ema else STATES
    return states * sum(p.nbytes for p in transformer.parameters() if p.requires_grad)

def input_bytes(transformer, pack):
    """Bytes of the inputs of all blocks, which a recomputed pass saves."""
    return len(rope_patch.blocks_of(transformer)) * sum(pack) * transformer.inner_dim * transformer.dtype.itemsize

def find_fit(blocks, free, inputs, added, selective, edge=1):
    """-> (how many of the blocks are kept, whether the others keep their attention, bytes that a pass adds then).
    free: bytes that a pass may add. added(kept, selective): (bytes that it does add, seconds), inf if it runs out of
    memory. inputs: those of added(0, False) that are the saved inputs of all blocks; the rest is one block at work, and
    a kept block costs no more than that. selective: whether the attention's output can be kept by itself: it is as
    large as the inputs, and the most expensive to recompute. But each operation of the block then passes through
    Python, which takes longer than a short attention: so the faster of both passes is chosen. edge: nothing is tried
    that takes more of `free` by this estimate."""
    kept = 0
    adds, seconds = added(0, False)
    one_block, keeps_attention = adds - inputs, False
    if selective and edge * free >= adds + 1.05 * inputs:
        selective_adds, selective_seconds = added(0, True)
        if selective_adds <= free and selective_seconds < seconds:
            adds, keeps_attention = selective_adds, True
    while kept < blocks and edge * free - adds >= one_block:
        more = min(blocks, kept + int((edge * free - adds) // one_block))
        more_adds, _ = added(more, keeps_attention)
        if more_adds > free: # fragments, or another process on this card
            break
        kept, adds = more, more_adds
        # what the kept blocks have cost is a better guess, still too high, as it counts all else that a pass takes
        one_block = min(one_block, (adds - inputs * (1 + keeps_attention)) / kept)
    return kept, keeps_attention and kept < blocks, adds

def keep_attention():
    """For torch.utils.checkpoint: recomputed blocks keep what the attention kernel gives."""
    return create_selective_checkpoint_contexts([torch.ops.torch_attn._varlen_attn.default])

def options_of(selective):
    """-> checkpoint_blocks' options, so that recomputed blocks keep their attention (selective), or nothing."""
    return dict(context_fn=keep_attention) if selective else {}

def keep_what_fits(transformer, lengths, tables, Item, flow_loss, recompute, args, say):
    """Checkpoints as few blocks as the device's memory allows -> their number, the same on every process; None where
    the device has no memory of its own. lengths, tables: lengths_of's and table_bytes'; Item, flow_loss, say:
    train.py's; recompute(number, **options): checkpoint_blocks. InputError if the largest pack does not fit although
    all blocks are computed again."""
    if not has_own_memory(args.device):
        return None
    blocks, processes = len(rope_patch.blocks_of(transformer)), dist.get_world_size() if dist.is_initialized() else 1
    pack = largest_pack(lengths, args, processes)
    items = blank_items(Item, map(shape_of, pack), transformer, args.device)
    too_little = InputError(f"--max_tokens {args.max_tokens}: out of memory in the largest pass that can come, of "
                            f"{sum(pack)} tokens; lower it, or give {'' if args.resume else '--quantize or '}--offload")
    too_much = InputError(f"--fsdp: out of memory in a try; give --gradient_checkpointing {blocks}, with which the "
                          "largest pass has fitted")

    def step():
        try:
            sum(flow_loss(transformer, items)).backward()
        finally:
            for p in transformer.parameters():
                p.grad = None

    def added(kept, selective):
        recompute(blocks - kept, **options_of(selective))
        bytes_, seconds = measure(step, args.device)
        if args.fsdp and bytes_ == inf: # not gathered: the others are still in that pass
            raise too_much if kept or selective else too_little
        measured = gather_objects((bytes_, seconds))
        return tuple(map(max, zip(*measured))) # the process that needs most, and the slowest

    added(0, False) # the first pass loads kernels and libraries, which take memory that no later pass needs
    free = min(gather_objects(room(args.device) - learning_bytes(transformer, args) - tables))
    one_kernel = rope_patch.has_varlen(items[0].prompt)
    selective = one_kernel and not args.compile # (of compiled blocks it is untested)
    kept, selective, adds = find_fit(blocks, free, input_bytes(transformer, pack), added, selective,
                                     edge=EDGE if args.fsdp else 1)
    if adds == inf:
        raise too_little
    words = f"{kept} blocks are kept" + (f", and the attention of the other {blocks - kept}" if selective else "")
    say(f"gradient checkpointing: {words}; a pass of {sum(pack):,} tokens, the largest, takes about {adds / GIB:.1f} "
        f"of {free / GIB:.1f} GiB" + (" and a part of the margin: lower --max_tokens" if adds > free else ""))
    return recompute(blocks - kept, **options_of(selective))
