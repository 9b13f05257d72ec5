"""
How fast is a batch of mixed sizes? This script times one training step of a LoRA, computed in several ways that take
turns:

    packed     rope_patch: all samples in one row, without padding or a mask
    padded     stock's forward with rope_patch's attention: a batch padded to its longest sample, with a mask
    sorted     the same, but samples of similar length share a batch of two
    single     stock diffusers with our LoRA layer, one sample at a time
    stock      what other trainers run, uncompiled: one sample at a time, all blocks checkpointed, peft's LoRA in fp32

and likewise what stock computes in another way of a picture (the VAE) and of prompts (the text encoder).

$ python tools/bench.py                                # a small model (d = 512, 2 blocks) on one thread: some minutes
$ python tools/bench.py --what vae --rounds 2          # the VAE in its real shape, a picture of 256 * 256
$ python tools/bench.py --what text --dtype bfloat16   # the text encoder at its real width, six of its 60 layers
$ python tools/bench.py --device cuda --rounds 15      # four of the real transformer's 60 blocks, all checkpointed

Times are compared only within a round. A line shows the median and the quartiles of a ratio over all rounds. A round
without a clock comes first: in it all ways must agree on the loss and the LoRA's gradients, or on what is encoded.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import library # first, so that no other folder is taken for one of our modules
import common
from library.cli import command_line
from library.models import environment

parser = command_line.Parser(__doc__)
flag = parser.group("flags")
flag("--what", None, "samples of one training step, by their sizes (PRESETS in bench_common.py); the VAE; or the text "
     "encoder (default: mixed mild; on a GPU mixed_1024)", nargs="+",
     choices=["mixed", "mild", "quick", "mixed_1024", "vae", "text"])
flag("--rounds", 9, "number of timed rounds; use 9 or more for a figure that you quote", type=command_line.positive)
flag("--device", "cpu", "cpu, cuda, cuda:1, ...")
flag("--dtype", None, "dtype of the model (default: float32, on a GPU bfloat16)", choices=["float32", "bfloat16"])
args = parser.parse_args()
environment.refuse_devices(args)

# What follows takes seconds to import, so it comes behind the flags.
import copy
import json
from functools import cache, partial

import numpy as np
import psutil
import torch
from diffusers import AutoencoderKLQwenImage
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from cache import TINY_DATA, Qwen2VLImageProcessorPil, add_token_types, encode_prompts, load_pipeline
from library.models import model_files, one_pass
from library.models.picture_vae import patch_vae_for_pictures
import predict
from rope_patch import patch_qwen_model_for_multi_resolution
from tools.bench_common import (FEW, MODELS, PRESETS, distance, make_model, make_samples, open_device, peak_gib,
                                seconds, train_step, with_lora, with_pads)

on_card = args.device.startswith("cuda")
dtype = getattr(torch, args.dtype or ("bfloat16" if on_card else "float32"))
device_name = open_device(args.device, dtype)
config = MODELS["full"] | dict(num_layers=FEW) if on_card else MODELS["small"]

# ---- what is timed: each yields a title and {way: call}, ours first. All calls return the same tensors ---------------

def twin(model):
    """-> a copy with the same weights, so the device never holds a second one."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})

@cache
def make_models():
    """-> {way: model}. They share the frozen weights; each has a LoRA of its own."""
    base = predict.place_transformer(make_model(config, dtype, args.device), args.device)
    packed = with_lora(patch_qwen_model_for_multi_resolution(twin(base)))
    padded = with_lora(with_pads(twin(base)))
    single = with_lora(twin(base))
    stock = with_lora(twin(base), ours=False)
    stock.enable_gradient_checkpointing()
    if on_card: # where the whole model would not fit without it
        for model in (packed, padded, single):
            model.enable_gradient_checkpointing()
    return dict(packed=packed, padded=padded, sorted=padded, single=single, stock=stock)

def training(preset):
    """One step -> its loss and the LoRA's gradients."""
    samples = make_samples(config, PRESETS[preset], dtype, args.device)
    by_length = sorted(samples, key=lambda s: sum(s.lens))
    one_by_one = [[s] for s in samples]
    # {way: its batches, and the mode of run_on}
    plans = dict(packed=([samples], "packed"),
                 padded=([samples], "with pads"),
                 sorted=([by_length[:2], by_length[2:]], "with pads"),
                 single=(one_by_one, "stock"),
                 stock=(one_by_one, "stock"))
    ways = {way: partial(train_step, model, *plans[way]) for way, model in make_models().items()}
    yield f"{preset}, (image, text) tokens {' '.join(str(s.lens) for s in samples)}", ways

def encode(vae, pixels):
    return [vae.encode(pixels).latent_dist.mode()]

def decode(vae, latents):
    return [vae.decode(latents).sample]

def pictures():
    """One picture, as library/models/picture_vae.py computes it."""
    torch.manual_seed(0)
    stock = AutoencoderKLQwenImage().requires_grad_(False).eval().to(args.device, dtype)
    ours = patch_vae_for_pictures(copy.deepcopy(stock))
    for compute, shape in ((encode, (1, 3, 1, 256, 256)), (decode, (1, 16, 1, 32, 32))):
        x = torch.randn(shape).to(args.device, dtype)
        ways = dict(ours=partial(compute, ours, x), stock=partial(compute, stock, x))
        yield f"VAE, {compute.__name__} 256 * 256", ways

def make_encoder(folder):
    """-> a text encoder of the real width, with random weights, four layers of the vision tower and two behind it."""
    config = json.loads((folder / "text_encoder/config.json").read_bytes()) # tiny's, for its words
    real = model_files.CONFIGS["text_encoder/config.json"]
    words = config["text_config"]["vocab_size"]
    # every fourth layer of the tower lets all patches see each other, as every eighth of the real 32
    config["vision_config"] |= real["vision_config"] | dict(depth=4, fullatt_block_indexes=[3])
    config["text_config"] |= real["text_config"] | dict(
        num_hidden_layers=2,
        vocab_size=words,
        layer_types=["full_attention"] * 2,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]))
    torch.manual_seed(0)
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config)).requires_grad_(False).eval()
    encoder.lm_head = torch.nn.Identity() # as in cache.load_encoder
    encoder.register_forward_pre_hook(add_token_types, with_kwargs=True)
    return encoder.to(args.device, dtype)

def prompts():
    """The prompts about one picture in one pass of the text encoder, and one by one."""
    ours = load_pipeline(TINY_DATA.parent)
    ours.processor.image_processor = Qwen2VLImageProcessorPil() # tiny's makes one row of a picture
    stock = copy.copy(ours)
    stock.text_encoder = make_encoder(TINY_DATA.parent)
    ours.text_encoder = one_pass.patch_text_encoder(twin(stock.text_encoder))
    picture = Image.effect_noise((384, 384), 64).convert("RGB")
    words = "make it snow on all the roofs and in the garden, and let smoke rise from every chimney"

    def one_by_one(texts):
        return [encode_prompts(stock, [text], [picture])[0] for text in texts]
    for n in (2, 4):
        texts = [words[:20 * (k + 1)] for k in range(n)] # of different lengths, with a common beginning
        ways = dict(ours=partial(encode_prompts, ours, texts, [picture]),
                    stock=partial(one_by_one, texts))
        yield f"text encoder, {n} prompts", ways

# ---- measuring -------------------------------------------------------------------------------------------------------

def check(ways):
    """Ends the script unless all ways compute the same. It also warms up: clocks, kernels, the allocator."""
    ours, *others = ways
    want = ways[ours]() # any of them would do as the judge
    for way in others:
        off = distance(ways[way](), want)
        if not off <= (1e-4 if dtype == torch.float32 else 0.1): # (NaN fails too)
            raise SystemExit(f"error: {way}: its numbers are off by {off:.1e} from those of {ours}; it computes "
                             "something else, so its time would mean nothing")

def interleave(ways):
    """{way: call} -> {way: seconds of every round}. Every second round reverses the order, so that a machine that gets
    slower or faster affects all of them alike."""
    times = {way: [] for way in ways}
    for r in common.progress("rounds", range(args.rounds)):
        for way in list(ways) if r % 2 == 0 else reversed(list(ways)):
            times[way].append(seconds(ways[way], args.device))
    return {way: np.array(t) for way, t in times.items()}

def ratio(times, ours):
    """-> the text of times / ours: median and quartiles of the ratios within each round."""
    low, median, high = np.quantile(times / ours, [.25, .5, .75])
    noisy = " INVALID: measure again on a quieter machine" if high - low > .1 * median else ""
    return f"{median:5.2f} [{low:.2f}, {high:.2f}]{noisy}"

workloads = dict(vae=pictures, text=prompts)
for what in args.what or (["mixed_1024"] if on_card else ["mixed", "mild"]):
    for title, ways in workloads.get(what, partial(training, what))():
        load = " ".join(f"{x:.1f}" for x in psutil.getloadavg())
        print(f"\n{title} | {str(dtype)[6:]} | {device_name} | torch {torch.__version__} | load {load}")
        check(ways)
        times = interleave(ways)
        ours = next(iter(ways))
        print(f"way        seconds   peak GiB   time / {ours}, quartiles")
        for way, call in ways.items():
            peak = peak_gib(call, args.device) # beside the weights
            print(f"{way:9} {np.median(times[way]):8.3f} {peak:10.2f}   {ratio(times[way], times[ours])}", flush=True)
