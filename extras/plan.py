"""
--plan: what a training would take, before it is begun: tokens, forward passes, memory with these and with other flags.

It runs the training's own code on tensors that have shapes and no memory, so it needs config files only, no weights. An
estimate: on a CPU, with d = 512, it is 6 to 12 % below the growth of the process.
"""
import os
import weakref
from types import SimpleNamespace

import psutil # comes with accelerate
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLQwenImage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2_5_VLForConditionalGeneration

GIB = 2**30
CARDS = (8, 12, 16, 24, 32, 48, 80, 141) # GB
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


def step_bytes(model, flow_loss, checkpoint_blocks, pack, checkpointed):
    """Peak bytes, beside the weights, of a forward and backward pass over `pack`, a list of (img_shapes, text tokens).
    Afterwards the model is of no other use: its parameters are fake tensors."""
    dtype, width = model.dtype, model.config.joint_attention_dim
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    fake = torch.empty(p.shape, dtype=p.dtype)
                    module._parameters[name] = torch.nn.Parameter(fake, p.requires_grad)
        checkpoint_blocks(model.train(), checkpointed)
        with LiveBytes(model) as live:
            items = []
            for shapes, text in pack:
                target, *controls = [h * w for _, h, w in shapes]
                items.append(SimpleNamespace(
                    x0=torch.empty(target, 64), noise=torch.empty(target, 64), velocity=torch.empty(target, 64),
                    s=torch.empty(()), controls=torch.empty(sum(controls), 64, dtype=dtype),
                    prompt=torch.empty(text, width, dtype=dtype), img_shapes=shapes, weight=torch.empty(target)))
            sum(loss for loss, _ in flow_loss(model, items)).backward()
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
    block, number = transformer.transformer_blocks[0], len(transformer.transformer_blocks)
    each, rest, away = model_bytes(block, quantize), model_bytes(transformer) - number * model_bytes(block), min(
        offload, number)
    # the block at work and the next one; between processes also the buffer in which that arrives
    gathered = 3 * each if parts > 1 else min(2, away) * each
    linears = [m for name, m in block.named_modules() if isinstance(m, torch.nn.Linear) and ".lora_" not in name]
    unpacked = max(map(model_bytes, linears)) if quantize != "none" else 0
    return rest + (number - away) * each // parts + gathered + unpacked, away * each // parts


def product_bytes(transformer, quantize, tokens):
    """What a product of eight bits holds for a while, beside its result."""
    widest = max(m.in_features for m in transformer.transformer_blocks[0].modules() if hasattr(m, "in_features"))
    # int8: its int32, and that in bf16; fp8: a gradient times the weight's scales, that divided by its own, and in fp8
    return dict(int8=4 + 2, fp8=2 + 2 + 1).get(quantize, 0) * widest * tokens


def encoder_bytes(folder, dtype, quantize):
    """-> bytes of the VAE's and of the text encoder's weights, from their config files; 0 where there are none."""
    if not (folder / "text_encoder").is_dir():
        return 0, 0
    with init_empty_weights():
        vae = AutoencoderKLQwenImage.from_config(AutoencoderKLQwenImage.load_config(folder / "vae"))
        text = Qwen2_5_VLForConditionalGeneration._from_config(
            Qwen2_5_VLForConditionalGeneration.config_class.from_pretrained(folder / "text_encoder"))
    text.lm_head = torch.nn.Identity() # as in cache.load_encoder
    return model_bytes(torch.nn.Module.to(vae, dtype)), model_bytes(torch.nn.Module.to(text, dtype), quantize)


def free_bytes(device):
    """What this process could still take on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else psutil.virtual_memory().available


def print_plan(args, transformer, lora, folder, epoch, pick_sample, count_tokens, deal_packs, flow_loss,
               checkpoint_blocks, say):
    """args: train.py's flags; transformer, with its LoRA's parameters `lora`, on the meta device; folder: the model's;
    epoch: samples in one; then train.py's functions."""
    lengths, packs, padded, processes = [], [], 0, int(os.environ.get("WORLD_SIZE", 1))
    steps = range(min(args.max_steps, 50)) # so many tell enough
    for step in steps:
        drawn = [pick_sample(step * args.batch_size + i) for i in range(args.batch_size)]
        tokens = [count_tokens(*d) for d in drawn]
        lengths += tokens
        packs += [[drawn[i] for i in pack] for dealt in deal_packs(tokens) for pack, counts in dealt if counts]
        ordered = sorted(tokens, reverse=True)
        padded += sum(ordered[i - i % 4] for i in range(len(ordered))) # fours of neighbours in length
    of_pack = lambda pack: [count_tokens(*d) for d in pack]
    cost = (lambda n: len(n) * max(n)) if args.batching == "padded" else sum
    heaviest = max(packs, key=lambda pack: cost(of_pack(pack)))
    lora_bytes, ordered = 4 * sum(p.numel() for p in lora.values()), sorted(lengths)
    say(f"tokens a sample: {ordered[0]:,} to {ordered[-1]:,}, median {ordered[len(ordered) // 2]:,}; padding fours of "
        f"neighbours in length would compute {padded / sum(lengths):.2f} times as many tokens")
    say(f"{args.max_steps} steps of {args.batch_size} samples, {args.max_steps * args.batch_size / epoch:.1f} epochs; "
        f"{len(packs) / len(steps) / processes:.1f} forward passes a step and process, the heaviest (of {len(steps)} "
        f"steps) of {len(heaviest)} samples and {cost(of_pack(heaviest)):,} tokens (--max_tokens {args.max_tokens:,})")
    say(f"parameters: {sum(p.numel() for p in transformer.parameters()):,}, of which {lora_bytes // 4:,} in the LoRA")
    encoders = encoder_bytes(folder, transformer.dtype, args.quantize_text_encoder)
    say(f"encoders, in GiB: VAE {encoders[0] / GIB:.1f}, text {encoders[1] / GIB:.1f}; "
        + ("one after the other, before the training" if args.use_cache else "all the time, so in `base`"))
    say("\nexpected memory of a process, in GiB. an estimate; 1 GiB for CUDA and fragmentation is in `card`\n"
        f"{'base':>7} {'LoRA':>7} {'step':>7} {'total':>7} {'host':>7}  card  flags")
    blocks = len(transformer.transformer_blocks)
    checkpointed = blocks if args.gradient_checkpointing is None else min(blocks, args.gradient_checkpointing)
    given = checkpointed, args.quantize, min(args.offload, blocks)
    others = [(0, "none", 0), (blocks, "none", 0), (blocks, "int8", 0), (blocks, "nf4", 0),
              (blocks, "none", blocks // 2), (blocks, "none", blocks), (blocks, "int8", blocks)]
    bases = {row: transformer_bytes(transformer, *row[1:], processes if args.fsdp else 1) for row in [given, *others]}
    sizes = [([tuple(shape) for shape in resolution["img_shapes"]], sample.texts[text]["tokens"])
             for sample, resolution, text in heaviest]
    peaks = {n: step_bytes(transformer, flow_loss, checkpoint_blocks, sizes, n) for n in {checkpointed, 0, blocks}}
    for row, (base, host) in bases.items():
        base += 0 if args.use_cache else sum(encoders)
        # weights and two moments; then activations and gradients
        step = peaks[row[0]] + product_bytes(transformer, row[1], cost(of_pack(heaviest)))
        device = base, 3 * lora_bytes, max(step, 3 * lora_bytes)
        cards = [f"{c} GB" for c in CARDS if sum(device) / GIB + 1 <= 0.9375 * c] # of their GB
        say(" ".join(f"{n / GIB:7.2f}" for n in (*device, sum(device), host)) + f" {[*cards, '-'][0]:>6}"
            f"  --gradient_checkpointing {row[0]} --quantize {row[1]} --offload {row[2]}"
            + " --fsdp" * args.fsdp + " (as given)" * (row == given))
    say(f"{args.device} has {free_bytes(args.device) / GIB:.1f} GiB free")
