"""
--plan: what a training would take: tokens, forward passes, memory with these and with other flags, time.

It runs the training's own code on fake tensors, which have shapes and no memory, so it needs config files and no
weights. This is an estimate: within 3 % of what the imitated card of the tests counts, which no real card has checked.
"""
import os
import weakref
from contextlib import ExitStack
from copy import deepcopy
from functools import cache
from unittest.mock import patch

import psutil # comes with accelerate
import torch
from diffusers import AutoencoderKLQwenImage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2_5_VLForConditionalGeneration

import rope_patch
from common import say
from extras import configs, fit
from extras import quantize as low_bit
from extras.published import stand_in # noqa: F401 (train.py calls it as plan's)

GIB = 2**30
CARDS = (8, 12, 16, 24, 32, 48, 80, 141) # GB
# {card: (GB; TFLOP/s in bf16 of its data sheet, of matrix products, of attention forward and backward (FA2); TB/s of
# its memory; GB/s from the host)}. These rates are assumed: others have reported them for such kernels. NVIDIA's data
# sheets say 312 TFLOP/s and 2.04 TB/s of an A100 with 80 GB, and 209.5 and 1.79 of an RTX 5090; FlashAttention-2
# reaches up to 73 % of the A100's in its forward pass, 63 % in its backward pass (Dao 2023)
RATES = {"H200": (141, 989, 640, 400, 310, 3.6, 50), "H100": (80, 989, 640, 400, 310, 2.6, 50),
         "A100": (80, 312, 230, 220, 180, 1.6, 25), "RTX 5090": (32, 210, 180, 175, 140, 1.5, 50),
         "RTX 4090": (24, 165, 150, 140, 110, 0.85, 25)}
# Others report steps of this model that take 1.2 to 3.3 times as long as step_seconds says of as many tokens: on A100,
# H200 and RTX 5090 users of musubi-tuner (its issues 408, 694, 700, 722), on A100 and RTX 4090 qwen-image-finetune's
# README. (A forward pass alone takes sglang and vllm-omni 0.8 to 0.9 times as long.)
SLOWEST = 3
# milliseconds of the host for a block in a training pass: kept, computed again, that without its attention. Assumed: a
# shared, busy core took 2 to 4 times as long, and the host of such a card is faster
HOST = dict(kept=1.3, recomputed=3.5, selective=6.5)
BYTES = dict(int8=1, fp8=1, nf4=0.5 + 4 / 64) # a weight; with 8 bits 4 more a row


class LiveBytes(TorchDispatchMode):
    """Inside `with`: the bytes of all tensors made there that are alive (`now`), and their greatest number (`peak`)."""

    def __init__(self, model):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet(p.untyped_storage() for p in model.parameters())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and (storage := tensor.untyped_storage()) not in self.known:
                self.known.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return out

    def add(self, n):
        self.now += n
        self.peak = max(self.peak, self.now)


class FusedRmsNorm(torch.autograd.Function): # a class because autograd wants one
    """The memory of F.rms_norm's one kernel on CUDA, and nothing else of it: on a CPU it is taken apart, in fp32."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(grad), None, None, None

def step_bytes(model, Item, flow_loss, pack, recomputed, quantize="none", **options):
    """Peak bytes, beside the weights, of a forward and backward pass over `pack`, a list of (img_shapes, text tokens).
    Item, flow_loss: train.py's; recomputed, options: of checkpoint_blocks; quantize: --quantize's. Eight bits are
    multiplied as such, as on cards of 8.x and 12.x; to unpack the weights, as other cards do, takes a little less.
    In bf16 it counts what CUDA's kernels keep: fake tensors of CUDA have no gradients where there is no CUDA.
    Afterwards the model is of no other use: its parameters are fake tensors."""
    with ExitStack() as stack:
        if model.dtype == torch.bfloat16:
            on_card = dict.fromkeys(("use_fused", "has_varlen"), lambda x: True)
            stack.enter_context(patch.dict(vars(rope_patch), on_card))
            stack.enter_context(patch.object(torch.nn.functional, "rms_norm", FusedRmsNorm.apply))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    fake = torch.empty(p.shape, dtype=p.dtype)
                    module._parameters[name] = torch.nn.Parameter(fake, p.requires_grad)
        if quantize != "none":
            # four bits are unpacked to what eight bits are, and count as such: bitsandbytes need not be here
            multiplied = dict(has_product=lambda x, layer: quantize != "nf4" and x.numel() > 16 * x.shape[-1])
            stack.enter_context(patch.dict(vars(low_bit), multiplied))
            # they are on their device, and Module.to fails on a fake tensor that is the first of its shape
            stack.enter_context(patch.object(torch.nn.Linear, "to", lambda linear, device: linear))
            low_bit.quantize_linears(rope_patch.blocks_of(model), "fp8" if quantize == "fp8" else "int8", "cpu")
        rope_patch.checkpoint_blocks(model.train(), recomputed, **options)
        with LiveBytes(model) as live:
            items = fit.blank_items(Item, pack, model)
            sum(flow_loss(model, items)).backward()
        return live.peak


def model_bytes(model, quantize="none"):
    """Bytes of the weights, LoRAs apart, the linear layers in so many bits. The model may be on the meta device."""
    total = sum(p.numel() * p.itemsize for name, p in model.named_parameters() if ".lora_" not in name)
    for name, module in model.named_modules() if quantize != "none" else []:
        if isinstance(module, torch.nn.Linear) and ".lora_" not in name:
            w = module.weight
            total += w.numel() * (BYTES[quantize] - w.itemsize) + (4 * len(w) if quantize != "nf4" else 0)
    return int(total)


def transformer_bytes(transformer, quantize, offload, parts):
    """-> (bytes on the device, bytes of pinned host memory); parts: processes under --fsdp."""
    blocks = rope_patch.blocks_of(transformer)
    block, number = blocks[0], len(blocks)
    each, away = model_bytes(block, quantize), min(offload, number)
    rest = model_bytes(transformer) - number * model_bytes(block)
    # the block that computes and the next one; with --fsdp also the buffer in which the next one arrives
    gathered = 3 * each if parts > 1 else min(2, away) * each
    return rest + (number - away) * each // parts + gathered, away * each // parts


def encoder_bytes(folder, dtype, quantize):
    """-> bytes of the VAE's and of the text encoder's weights, from their config files; 0 where there are none."""
    if not (folder / "text_encoder").is_dir():
        return 0, 0
    vae = configs.empty_model(AutoencoderKLQwenImage, folder / "vae")
    text = configs.empty_model(Qwen2_5_VLForConditionalGeneration, folder / "text_encoder")
    text.lm_head = torch.nn.Identity() # as in cache.load_encoder
    return model_bytes(torch.nn.Module.to(vae, dtype)), model_bytes(torch.nn.Module.to(text, dtype), quantize)


def free_bytes(device):
    """What this process could still take on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else psutil.virtual_memory().available


def card_room(gb):
    """Bytes that tensors can have on a card that is sold with so many GB: torch finds 98 % of them or a little more."""
    return 0.98 * gb * GIB - fit.margin(0.98 * gb * GIB) - 0.6 * GIB # CUDA itself

def step_seconds(transformer, lengths, card, recomputed, selective, copied, passes):
    """-> (a step's time on one of RATES, counted and not measured: matrix products, attention, and the bytes of all
    other kernels, as eager code with a LoRA on the attention has them; its MFU: the useful share of the data sheet's
    FLOPs in that time). It is the host's time, which gives the GPU its orders, if that is longer. Traffic between GPUs
    and the unpacking of few bits are not counted. lengths: tokens of its samples; recomputed: share of the blocks;
    selective: their attention is not; copied: bytes of --offload in all its passes."""
    _, peak, matmul, forward, backward, memory, host = RATES[card]
    d, blocks, again = transformer.inner_dim, len(rope_patch.blocks_of(transformer)), 0 if selective else recomputed
    seconds = useful = 0
    for n in lengths:
        products = 24 * d**2 * n * (2 + recomputed) / matmul # the frozen weights have no gradients
        attention = 4 * d * n**2 * ((1 + again) / forward + 2.5 / backward)
        others = d * n * (378 + 150 * recomputed) / memory
        seconds += blocks * (products + attention + others) / 1e12
        useful += blocks * (2 * 24 * d**2 * n + 3.5 * 4 * d * n**2) / 1e12
    again_ms = HOST["selective" if selective else "recomputed"]
    orders = passes * blocks * (recomputed * again_ms + (1 - recomputed) * HOST["kept"]) / 1000
    seconds = max(seconds, copied / (host * 1e9), orders)
    return seconds, useful / seconds / peak

def print_plan(args, transformer, folder, epoch, plan_step, Pick, Item, flow_loss):
    """args: train.py's flags; transformer, with its LoRA, on the meta device; folder: the model's; epoch: its samples;
    plan_step(n) -> step n's Picks and this process's packs of them; then train.py's own."""
    processes, blocks = int(os.environ.get("WORLD_SIZE", 1)), len(rope_patch.blocks_of(transformer))
    lengths, passes, padded = [], 0, 0
    steps = min(args.max_steps, 50) # these are enough for an average
    for step in range(steps):
        picks, packs = plan_step(step)
        tokens = sorted([p.tokens for p in picks], reverse=True)
        lengths += tokens
        passes += len(packs)
        padded += sum(tokens[i - i % 4] for i in range(len(tokens))) # fours of neighbours in length
    largest = fit.largest_pack(fit.lengths_of(epoch, Pick), args, processes)
    lora_bytes, ordered = 4 * sum(p.numel() for p in transformer.parameters() if p.requires_grad), sorted(lengths)
    say(f"tokens a sample: {ordered[0]:,} to {ordered[-1]:,}, median {ordered[len(ordered) // 2]:,}; padding fours of "
        f"neighbours in length would compute {padded / sum(lengths):.2f} times as many tokens")
    say(f"{args.max_steps} steps of {args.batch_size} samples, {args.max_steps * args.batch_size / len(epoch):.1f} "
        f"epochs; {passes / steps:.1f} forward passes a step and process, the largest that can come of "
        f"{sum(largest):,} tokens (--max_tokens {args.max_tokens:,})")
    # LoRAs of --sample_lora
    others = sum(p.numel() for name, p in transformer.named_parameters() if ".lora_" in name and not p.requires_grad)
    parameters = sum(p.numel() for p in transformer.parameters()) - others
    if args.dtype == "float32":
        say("for a model in float32, as trained without a GPU; add --dtype bfloat16 for what a GPU takes")
    say(f"parameters: {parameters:,}, of which {lora_bytes // 4:,} in the LoRA")
    encoders = encoder_bytes(folder, transformer.dtype, args.quantize_text_encoder)
    say(f"encoders, in GiB: VAE {encoders[0] / GIB:.1f}, text {encoders[1] / GIB:.1f}; "
        + ("one after the other, before the training" if args.use_cache else "all the time, so in `base`"))
    resident = others * transformer.dtype.itemsize + (0 if args.use_cache else sum(encoders))

    shapes = list(map(fit.shape_of, largest))

    small = deepcopy(transformer)
    del rope_patch.blocks_of(small)[5:] # `added` asks for five at most

    @cache
    def step_of_few(number, kept, selective, quantize):
        """Bytes that the largest pack adds in a model of the first blocks alone."""
        few = deepcopy(small)
        del rope_patch.blocks_of(few)[number:]
        return step_bytes(few, Item, flow_loss, shapes, number - kept, quantize, **fit.options_of(selective))

    def added(kept, selective=False, quantize=args.quantize):
        """Bytes that it adds in the whole one: all blocks but the last are alike."""
        if blocks <= 5:
            return step_of_few(blocks, kept, selective, quantize)
        # what a block keeps for the backward pass does not depend on its weights' bits
        few = step_of_few(4, 2, selective, "none")
        recomputed_more = step_of_few(5, 2, selective, "none") - few
        kept_more = step_of_few(4, 3, selective, "none") - few
        more = (blocks - 4) * recomputed_more + max(0, kept - 2) * kept_more
        return step_of_few(4, min(kept, 2), selective, quantize) + more

    def weights(quantize, offload):
        device, host = transformer_bytes(transformer, quantize, offload, processes if args.fsdp else 1)
        return device + resident, host

    say("")
    say("expected memory of a process, in GiB. an estimate; what CUDA and fragments take is in `card`")
    say(f"{'base':>7} {'LoRA':>7} {'step':>7} {'total':>7} {'host':>7}  card  flags")
    recomputed = blocks if args.gradient_checkpointing is None else min(blocks, args.gradient_checkpointing)
    given = recomputed, args.quantize, min(args.offload, blocks)
    others = [(0, "none", 0), (blocks, "none", 0), (blocks, "int8", 0), (blocks, "nf4", 0),
              (blocks, "none", blocks // 2), (blocks, "none", blocks), (blocks, "int8", blocks)]
    for row in dict.fromkeys([given, *others]):
        again, quantize, offload = row
        base, host = weights(quantize, offload)
        learning = (4 if args.ema else 3) * lora_bytes # weights, two moments, --ema's average
        # and then activations and gradients
        device = base, learning, max(added(blocks - again, quantize=quantize), 3 * lora_bytes)
        cards = [f"{gb} GB" for gb in CARDS if sum(device) <= card_room(gb)]
        numbers = " ".join(f"{n / GIB:7.2f}" for n in (*device, sum(device), host))
        say(f"{numbers} {[*cards, '-'][0]:>6}  --gradient_checkpointing {again} --quantize {quantize} --offload "
            f"{offload}{' --fsdp' if args.fsdp else ''}{' (as given)' if row == given else ''}")
    say(f"{args.device} has {free_bytes(args.device) / GIB:.1f} GiB free")

    if transformer.dtype == torch.bfloat16:
        say("")
        say("expected time with the flags as given, counted and not measured (step_seconds in extras/plan.py). "
            f"the lower end is a card that reaches the rates assumed there; others report up to {SLOWEST} times that")
        base, host = weights(args.quantize, args.offload)
        inputs = fit.input_bytes(transformer, largest)
        for card, (gb, *_) in RATES.items():
            free = card_room(gb) - base - fit.learning_bytes(transformer, args) - fit.table_bytes(epoch)
            if args.gradient_checkpointing is None:
                selective = not args.compile

                def tried(kept, selective):
                    seconds, _ = step_seconds(transformer, largest, card, 1 - kept / blocks, selective, 0, 1)
                    return added(kept, selective), seconds
                kept, selective, adds = fit.find_fit(blocks, free, inputs, tried, selective,
                                                     edge=fit.EDGE if args.fsdp else 1)
            else:
                kept, selective, adds = blocks - recomputed, False, added(blocks - recomputed)
            if adds > free:
                say(f"{card:>9}: does not fit")
                continue
            copied = 2 * host * passes * processes
            seconds, mfu = step_seconds(transformer, lengths, card, 1 - kept / blocks, selective, copied,
                                        passes * processes)
            seconds /= steps * processes
            hours = seconds * args.max_steps / 3600
            words = ", but not their attention" if selective else ""
            say(f"{card:>9}: {seconds:6.1f} to {SLOWEST * seconds:.1f} s a step (at best {mfu:.0%} of its data sheet), "
                f"{hours:.1f} to {SLOWEST * hours:.1f} h in all; {blocks - kept} of {blocks} blocks computed again"
                f"{words}")
