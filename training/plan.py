"""
--plan: what a training would take: tokens, forward passes, memory with these and with other flags, hours.

It runs the training's own code on fake tensors, which have shapes and no memory, so it needs config files and no
weights. This is an estimate: within 3 % of what the imitated card of the tests counts, which no real card has checked.
The hours are those of all that the command does: `counts` says what that is, `hours_on` how long each part takes.
"""
import atexit
import json
import shutil
import tempfile
import weakref
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import mean, median
from unittest.mock import patch

import torch
from diffusers import AutoencoderKLQwenImage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2_5_VLForConditionalGeneration

import common
import rope_patch
from cache import files_of
from common import say, world
from library.models import model_files, quantization
from library.models.host_memory import host_memory
from library.models.model_files import CONFIGS
from predict import text_keys_of
from training import memory_fit

GIB = 2**30
CARDS = (8, 12, 16, 24, 32, 48, 80, 141) # GB
# {card: (GB; TFLOP/s in bf16 of matrix products, of attention forward and backward (FA2); TB/s of its memory; GB/s from
# the host, between cards of one machine)}. These rates are assumed: others have reported them for such kernels.
# NVIDIA's data sheets say 312 TFLOP/s and 2.04 TB/s of an A100 with 80 GB, 209.5 and 1.79 of an RTX 5090, 989 TFLOP/s
# of an H100; FlashAttention-2 reaches up to 73 % of the A100's in its forward pass, 63 % in its backward pass (Dao
# 2023). Between cards: H100 as in nccl's issue 1264, A100 nccl-tests' 149, 5090 nccl's 1639; 4090: all that PCIe 4 has
RATES = {"H200": (141, 640, 400, 310, 3.6, 50, 380), "H100": (80, 640, 400, 310, 2.6, 50, 380),
         "A100": (80, 230, 220, 180, 1.6, 25, 200), "RTX 5090": (32, 180, 175, 140, 1.5, 50, 28),
         "RTX 4090": (24, 150, 140, 110, 0.85, 25, 25)}
# Others report steps of this model that take 1.2 to 3.3 times as long as step_seconds says of as many tokens: on A100,
# H200 and RTX 5090 users of musubi-tuner (its issues 408, 694, 700, 722), on A100 and RTX 4090 qwen-image-finetune's
# README. (A forward pass alone takes sglang and vllm-omni 0.8 to 0.9 times as long.)
SLOWEST = 3
# milliseconds of the host for a block in a training pass: kept, computed again, that without its attention; and in a
# forward pass alone. Assumed: a shared, busy core took 2 to 4 times as long for a training pass, and the host of such a
# card is faster
HOST = dict(kept=1.3, recomputed=3.5, selective=6.5, forward=0.6)
DISK = 1 # GB/s, assumed: a network's disk is slower, an NVMe faster
# seconds to read and encode a file, and to decode a picture, assumed: up to 16 threads read, and one needs 0.37 s for a
# photograph of 12 megapixels. Of a megapixel the VAE computes 2.9 and 4.7 TFLOP (by torch's counter), and an A800
# reaches 75 and 69 TFLOP/s there (FastVAE's README)
PICTURE = 0.1
DECODING = 193 # numbers of a pixel that are alive where the VAE decodes most, as the tests' imitated card counts them
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
            stack.enter_context(patch.dict(vars(quantization), multiplied))
            # they are on their device, and Module.to fails on a fake tensor that is the first of its shape
            stack.enter_context(patch.object(torch.nn.Linear, "to", lambda linear, device: linear))
            quantization.quantize_linears(rope_patch.blocks_of(model), "fp8" if quantize == "fp8" else "int8", "cpu")
        rope_patch.checkpoint_blocks(model.train(), recomputed, **options)
        with LiveBytes(model) as live:
            items = memory_fit.blank_items(Item, pack, model)
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
    vae = model_files.empty_model(AutoencoderKLQwenImage, folder / "vae")
    text = model_files.empty_model(Qwen2_5_VLForConditionalGeneration, folder / "text_encoder")
    text.lm_head = torch.nn.Identity() # as in cache.load_encoder
    return model_bytes(torch.nn.Module.to(vae, dtype)), model_bytes(torch.nn.Module.to(text, dtype), quantize)

def card_room(gb):
    """Bytes that tensors can have on a card that is sold with so many GB: torch finds 98 % of them or a little more."""
    return 0.98 * gb * GIB - memory_fit.margin(0.98 * gb * GIB) - 0.6 * GIB # CUDA itself

@dataclass
class Work:
    """What a training does. A round: for each process its forward passes, and of each the tokens of its samples."""
    steps: list # rounds: the training's first steps, which are enough for an average
    validations: int # with the one at the end
    loss: list # the round of a validation's loss
    sampling: list # the round of one sampling step of all pictures that a validation draws
    pictures: int # so many
    encoded: int # files that the cache lacks

def make_round(tokens, dealt):
    """dealt: for each process packs of places in `tokens`; an empty one is an idle pass, with the shortest sample."""
    def tokens_in(pack):
        return [tokens[place] for place in pack] or [min(tokens)]
    return [list(map(tokens_in, packs)) for packs in dealt]

def counts(args, epoch, val_samples, requests, plan_step, deal_packs):
    """-> Work. What it gets is print_plan's."""
    def runs_of(sample, keys):
        image = sum(h * w for _, h, w in sample.encodings[0]["img_shapes"])
        return [image + sample.texts[key]["tokens"] for key in keys]

    def pack(tokens):
        return rope_patch.plan_packs(dict(enumerate(tokens)), args.max_tokens)

    steps, jobs = [], []
    for n in range(min(args.max_steps, 50)):
        tokens = [p.tokens for p in plan_step(n)[0]]
        steps.append(make_round(tokens, deal_packs(tokens)))
    tokens = 4 * sum([runs_of(s, [(s.prompts[0], True)]) for s in val_samples], []) # at four noise levels
    loss = make_round(tokens, deal_packs(tokens))
    # predict.generate_samples deals jobs to the processes, and denoise packs the runs of each
    runs = [runs_of(sample, text_keys_of(sample, settings)) for sample, settings in requests]
    for job in pack(list(map(sum, runs))):
        tokens = sum([runs[place] for place in job], [])
        jobs += make_round(tokens, [pack(tokens)])
    sampling = [sum(jobs if args.fsdp else jobs[rank::world()], []) for rank in range(world())]
    # the one at the end is what range counts as that of step 0
    validations = len(range(0, args.max_steps, args.sample_every or args.max_steps)) if val_samples else 0
    files = {file for sample in epoch + val_samples for file in files_of(sample)} if args.use_cache else ()
    return Work(steps, validations, loss, sampling, len(runs), sum(not file.is_file() for file in files))

def step_seconds(transformer, packs, card, recomputed, selective, moving, learns=1):
    """-> a step's time on one of RATES, counted and not measured: matrix products, attention, and the bytes of all
    other kernels, as eager code with a LoRA on the attention has them. It is the host's time, which gives the GPU its
    orders, or that of moving weights, if that is longer. The unpacking of few bits is not counted. packs: lists of the
    tokens of its samples; recomputed: share of the blocks; selective: their attention is not; moving: seconds in which
    a pass gets its weights, forward or backward; learns: 0 for forward passes alone, which compute what recomputed=1
    computes again."""
    _, matmul, forward, backward, memory, *_ = RATES[card]
    d, blocks, again = transformer.inner_dim, len(rope_patch.blocks_of(transformer)), 0 if selective else recomputed
    seconds = 0
    for n in chain.from_iterable(packs):
        products = 24 * d**2 * n * (2 * learns + recomputed) / matmul # the frozen weights have no gradients
        attention = 4 * d * n**2 * ((learns + again) / forward + 2.5 * learns / backward)
        others = d * n * (378 * learns + 150 * recomputed) / memory
        seconds += blocks * (products + attention + others) / 1e12
    kind = "selective" if selective else "recomputed"
    again_ms = HOST[kind if learns else "forward"]
    orders = blocks * (recomputed * again_ms + (1 - recomputed) * HOST["kept"]) / 1000
    return max(seconds, len(packs) * orders, len(packs) * (1 + learns) * moving)

def say_tokens(args, work, samples, largest):
    lengths = sum([sum(packs, []) for dealt in work.steps for packs in dealt], [])
    passes = mean(len(packs) for dealt in work.steps for packs in dealt)
    say(f"tokens a sample: {min(lengths):,} to {max(lengths):,}, median {median(lengths):,.0f}")
    say(f"{args.max_steps} steps of {args.batch_size} samples, {args.max_steps * args.batch_size / samples:.1f} "
        f"epochs; {passes:.1f} forward passes a step and process, the largest that can come of {sum(largest):,} tokens "
        f"(--max_tokens {args.max_tokens:,})")

def adder(args, transformer, largest, Item, flow_loss):
    """-> added(kept, selective=False, quantize=): bytes that the largest pack adds with so many blocks kept."""
    blocks, shapes = len(rope_patch.blocks_of(transformer)), list(map(memory_fit.shape_of, largest))
    small = deepcopy(transformer)
    del rope_patch.blocks_of(small)[5:] # `added` asks for five at most

    @cache
    def step_of_few(number, kept, selective, quantize):
        """Those that it adds in a model of the first blocks alone."""
        few = deepcopy(small)
        del rope_patch.blocks_of(few)[number:]
        return step_bytes(few, Item, flow_loss, shapes, number - kept, quantize, **memory_fit.options_of(selective))

    def added(kept, selective=False, quantize=args.quantize):
        """Those that it adds in the whole one: all blocks but the last are alike."""
        if blocks <= 5:
            return step_of_few(blocks, kept, selective, quantize)
        # what a block keeps for the backward pass does not depend on its weights' bits
        few = step_of_few(4, 2, selective, "none")
        recomputed_more = step_of_few(5, 2, selective, "none") - few
        kept_more = step_of_few(4, 3, selective, "none") - few
        more = (blocks - 4) * recomputed_more + max(0, kept - 2) * kept_more
        return step_of_few(4, min(kept, 2), selective, quantize) + more
    return added

def say_memory(args, blocks, lora_bytes, added, weights):
    free, total = host_memory()
    say("")
    say(f"expected memory of a process in GiB, in {args.dtype}. an estimate; what CUDA and fragments take is in `card`")
    say(f"`host`: what --offload takes of the host's memory, of which this job may have {total / GIB:.1f} here, and "
        f"{free / GIB:.1f} are free")
    say(f"{'base':>7} {'LoRA':>7} {'step':>7} {'total':>7} {'host':>7}  card  flags")
    recomputed = blocks if args.gradient_checkpointing is None else min(blocks, args.gradient_checkpointing)
    given = recomputed, args.quantize, min(args.offload, blocks)
    others = [(0, "none", 0), (blocks, "none", 0), (blocks, "int8", 0), (blocks, "nf4", 0),
              (blocks, "none", blocks // 2), (blocks, "none", blocks), (blocks, "int8", min(20, blocks)),
              (blocks, "int8", blocks)]
    for row in dict.fromkeys([given, *others]):
        again, quantize, offload = row
        base, host = weights(quantize, offload)
        learning = (4 if args.ema else 3) * lora_bytes # weights, two moments, --ema's average
        # and then activations and gradients
        device = base, learning, max(added(blocks - again, quantize=quantize), 3 * lora_bytes)
        cards = [f"{gb} GB" for gb in CARDS if sum(device) <= card_room(gb)]
        numbers = " ".join(f"{n / GIB:7.2f}" for n in (*device, sum(device), host))
        words = f"--gradient_checkpointing {again} --quantize {quantize} --offload {offload}"
        if args.fsdp:
            words += " --fsdp"
        if row == given:
            words += " (as given)"
        say(f"{numbers} {[*cards, '-'][0]:>6}  {words}")

def fit_on(card, args, transformer, largest, added, taken):
    """-> (blocks that are kept on this card, whether the others keep their attention), as the flags say or else as
    training/memory_fit.py finds them; None if it does not fit. taken: bytes beside a pass."""
    free, blocks = card_room(RATES[card][0]) - taken, len(rope_patch.blocks_of(transformer))
    if args.gradient_checkpointing is not None:
        kept, selective = max(0, blocks - args.gradient_checkpointing), False
        adds = added(kept)
    else:
        def tried(kept, selective):
            return added(kept, selective), step_seconds(transformer, [largest], card, 1 - kept / blocks, selective, 0)
        kept, selective, adds = memory_fit.find_fit(blocks, free, memory_fit.input_bytes(transformer, largest), tried,
                                                    not args.compile, edge=memory_fit.EDGE if args.fsdp else 1)
    return (kept, selective) if adds <= free else None

def to_slowest(number):
    return f"{number:.1f}-{SLOWEST * number:.1f}"

def hours_on(card, args, work, transformer, fits, model, shared, copied, gathered):
    """-> {row of the table: this card's text}; {} if fit_on, whose answer is `fits`, has found no way. model: bytes of
    the model's files; shared: of gradients that come and go; copied, gathered: of a pass's weights, by --offload and by
    --fsdp."""
    if fits is None:
        return {}
    kept, selective = fits
    *_, host, link = RATES[card]
    blocks, moving = len(rope_patch.blocks_of(transformer)), max(copied / host, gathered / link) / 1e9
    step, forward = (1 - kept / blocks, selective, moving), (1, False, moving, 0)

    def seconds_of(dealt, how): # the processes wait for the one that has most to do
        return max(step_seconds(transformer, packs, card, *how) for packs in dealt)
    a_step = mean(seconds_of(dealt, step) for dealt in work.steps)
    asking = mean(seconds_of(dealt, forward) for dealt in work.steps)
    asked = 1 if args.fsdp and args.preserve else args.preserve # as in train.py's ask_base
    pictures = work.pictures * PICTURE / world()
    drawing = args.num_inference_steps * seconds_of(work.sampling, forward) + pictures
    seconds = {
        f"reading the model's files, {model / 1e9:.0f} GB": model / (DISK * 1e9),
        f"encoding {work.encoded:,} files that the cache lacks": work.encoded * PICTURE / world(),
        f"{args.max_steps:,} steps": args.max_steps * a_step,
        "what the base answers to --preserve": args.max_steps * asked * asking,
        f"gradients, added up over {world()} cards": args.max_steps * shared / (link * 1e9),
        f"{work.validations} validations: loss": work.validations * seconds_of(work.loss, forward),
        # and what the VAE alone makes of each target
        f"{work.validations} validations: {work.pictures} pictures each": work.validations * (drawing + pictures),
        f"the base's {work.pictures} pictures": drawing}
    hours = {part: round(number / 3600, 2) for part, number in seconds.items() if number}
    total = sum(hours.values())
    return {"a step, in seconds": to_slowest(a_step),
            f"of {blocks} blocks, computed again (*: not their attention)": f"{blocks - kept}{'*' * selective}",
            **{part: f"{number:.2f}" for part, number in hours.items()},
            "in all": to_slowest(total), "card-hours": to_slowest(total * world())}

def say_hours(columns):
    """columns: {card: hours_on's}."""
    say("")
    say("expected hours with the flags as given, counted and not measured (hours_on in training/plan.py)")
    say(f"{'':55}" + "".join(f"{card:>13}" for card in columns))
    for row in max(columns.values(), key=len):
        say(f"{row:55}" + "".join(f"{column.get(row, '-'):>13}" for column in columns.values()))
    say("-: does not fit with these flags; see `card` above. ranges: from a card that reaches the rates assumed there "
        f"to {SLOWEST} times as long, as others report",
        "not in it: downloads, the passes that find what fits, saving, --compile, --no-use_cache, the unpacking of few "
        "bits")

def print_plan(args, transformer, folder, epoch, val_samples, requests, plan_step, deal_packs, Item, flow_loss):
    """args: train.py's flags; transformer, with its LoRA, on the meta device; folder: the model's; epoch: its samples;
    requests: validation.choose_pictures' answer; plan_step(n) -> step n's Picks, and more; deal_packs: of samples of
    these lengths each process's packs; then train.py's own."""
    work = counts(args, epoch, val_samples, requests, plan_step, deal_packs)
    blocks = len(rope_patch.blocks_of(transformer))
    Pick = type(plan_step(0)[0][0]) # train.py's
    largest = memory_fit.largest_pack(memory_fit.lengths_of(epoch, Pick), args, world())
    say_tokens(args, work, len(epoch), largest)
    lora_bytes = 4 * sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    # LoRAs of --sample_lora
    others = sum(p.numel() for name, p in transformer.named_parameters() if ".lora_" in name and not p.requires_grad)
    parameters = sum(p.numel() for p in transformer.parameters()) - others
    if args.dtype == "float32":
        say("for a model in float32, as trained without a GPU; add --dtype bfloat16 for what a GPU takes")
    say(f"parameters: {parameters:,}, of which {lora_bytes // 4:,} in the LoRA")
    encoders = encoder_bytes(folder, transformer.dtype, args.quantize_text_encoder)
    say(f"encoders, in GiB: VAE {encoders[0] / GIB:.1f}, text {encoders[1] / GIB:.1f}; "
        + ("one after the other, before the training" if args.use_cache else "all the time, so in `base`"))
    if requests:
        pixels = max(256 * h * w for sample, _ in requests for _, h, w in sample.encodings[0]["img_shapes"][:1])
        decoding = encoders[0] + pixels * DECODING * transformer.dtype.itemsize
        say(f"a validation's largest picture is decoded in {decoding / GIB:.2f} GiB beside `base`")
    resident = others * transformer.dtype.itemsize + (0 if args.use_cache else sum(encoders))
    parts = world() if args.fsdp else 1

    def weights(quantize, offload):
        device, host = transformer_bytes(transformer, quantize, offload, parts)
        return device + resident, host
    added = adder(args, transformer, largest, Item, flow_loss)
    say_memory(args, blocks, lora_bytes, added, weights)
    if transformer.dtype != torch.bfloat16:
        return
    base, copied = weights(args.quantize, args.offload)
    taken = base + memory_fit.learning_bytes(transformer, args) + memory_fit.table_bytes(epoch)
    model = model_bytes(transformer) + sum(encoder_bytes(folder, transformer.dtype, "none"))
    # of what there is every process gets the others' share
    shared = 2 * lora_bytes * (world() - 1) / world()
    gathered = blocks * model_bytes(rope_patch.blocks_of(transformer)[0], args.quantize) * (parts - 1) / parts
    columns = {}
    for card in RATES:
        fits = fit_on(card, args, transformer, largest, added, taken)
        columns[card] = hours_on(card, args, work, transformer, fits, model, shared, copied, gathered)
    say_hours(columns)
    if args.resume:
        say("they are those of the whole run, with the steps before --resume")

PARTS = dict(scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"], tokenizer=["transformers", "Qwen2Tokenizer"],
             processor=["transformers", "Qwen2VLProcessor"], vae=["diffusers", "AutoencoderKLQwenImage"],
             text_encoder=["transformers", "Qwen2_5_VLForConditionalGeneration"],
             transformer=["diffusers", "QwenImageTransformer2DModel"])
# {model: (its pipeline, what its transformer's config has besides)}
PUBLISHED = {"Qwen/Qwen-Image-Edit": ("QwenImageEditPipeline", {}),
             "Qwen/Qwen-Image-Edit-2509": ("QwenImageEditPlusPipeline", {}),
             "Qwen/Qwen-Image-Edit-2511": ("QwenImageEditPlusPipeline", dict(zero_cond_t=True))}

def settle(args):
    """What --plan takes for granted, before a device decides it: configs that cannot be had, and bfloat16 for a model
    as large as these, which only a card trains, on whatever machine it is planned."""
    from predict import find_transformer # here, as it reads CONFIGS
    stand_in(args)
    folder, _ = find_transformer(args, weights=False)
    file = "transformer/config.json"
    if CONFIGS[file].items() <= json.loads((folder / file).read_bytes()).items():
        args.dtype = args.dtype or "bfloat16"

def stand_in(args):
    """Where --model or --transformer is one of PUBLISHED, and its configs cannot be had, puts a temporary folder in its
    place, with those that are here."""
    for flag in ("model", "transformer"):
        name = getattr(args, flag)
        model = str(name).partition("@")[0] # without its revision
        if model in PUBLISHED and not at_hand(name):
            setattr(args, flag, write_configs(model))

def at_hand(model):
    from cache import find_model # here, as it reads CONFIGS
    try:
        find_model(model, [*PARTS], weights=False)
        return True
    except common.InputError:
        common.say(f"{model}: neither here nor from the hub; planned with the configs of the published models, and "
                   "with tiny's tokenizer, which makes two to four times as many tokens of a prompt as the model's own")
        return False

def write_configs(model):
    """-> a folder that lives as long as this process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(Path(__file__).parents[1] / "tiny/tokenizer", folder / "tokenizer")
    tokens = json.loads((folder / "tokenizer/tokenizer.json").read_bytes())["added_tokens"]
    [pad] = [token["id"] for token in tokens if token["content"] == "<|image_pad|>"]
    pipeline, more = PUBLISHED[model]
    files = CONFIGS | {"model_index.json": dict(PARTS, _class_name=pipeline)}
    files["transformer/config.json"] = files["transformer/config.json"] | more
    # cache.load_pipeline compares it with the tokenizer
    files["text_encoder/config.json"] = files["text_encoder/config.json"] | dict(image_token_id=pad)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return str(folder)
