"""
bench.py --what text: the prompts about one picture in one pass of the text encoder, and stock, which takes them one by
one. The encoder has the real width and random weights.
"""
import copy
import json

import torch
from accelerate import init_empty_weights
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import cache
from common import tell
from library.models import model_files, one_pass

REAL = model_files.CONFIGS["text_encoder/config.json"]
LAYERS = dict(small=(4, 2), full=(32, 28)) # of the vision tower, and of what follows it
WORDS = "make it snow on all the roofs and in the garden, and let smoke rise from every chimney"


def load_pipelines(size, dtype, device):
    """-> tiny's pipeline (ours, stock), with an encoder of random weights, which they share."""
    ours = cache.load_pipeline(cache.TINY_DATA.parent)
    ours.processor.image_processor = cache.Qwen2VLImageProcessorPil() # tiny's makes one row of a picture
    config = json.loads((cache.TINY_DATA.parent / "text_encoder/config.json").read_bytes())
    depth, layers = LAYERS[size]
    config["vision_config"] |= REAL["vision_config"] | dict(depth=depth, fullatt_block_indexes=[*range(3, depth, 4)])
    config["text_config"] |= REAL["text_config"] | dict(
        num_hidden_layers=layers, vocab_size=config["text_config"]["vocab_size"], # tiny's words
        layer_types=["full_attention"] * layers,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]))
    with init_empty_weights():
        encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config)).eval()
    encoder.lm_head = torch.nn.Identity()
    weights = {}
    for name, p in encoder.state_dict().items():
        weights[name] = torch.randn(p.shape, dtype=dtype, device=device) / 50
        if "norm" in name:
            weights[name] += 1
    encoder.load_state_dict(weights, assign=True)
    encoder.to(device).register_forward_pre_hook(cache.add_token_types, with_kwargs=True)
    stock = copy.copy(ours)
    stock.text_encoder = copy.deepcopy(encoder, {id(p): p for p in encoder.parameters()})
    ours.text_encoder = one_pass.patch_text_encoder(encoder)
    return ours, stock


def bench_text(size, dtype, device, interleave):
    """Prints how many times as fast one pass is. interleave({way: call}) -> {way: seconds of each round}."""
    torch.manual_seed(0)
    ours, stock = load_pipelines(size, dtype, device)
    picture = Image.effect_noise((384, 384), 64).convert("RGB")
    for n in (2, 4):
        prompts = [WORDS[:20 * (k + 1)] for k in range(n)]
        ways = dict(ours=lambda: cache.encode_prompts(ours, prompts, [picture]),
                    stock=lambda: [cache.encode_prompts(stock, [prompt], [picture])[0] for prompt in prompts])
        errors = [(got - want).norm() / want.norm() for got, want in zip(*[encode() for encode in ways.values()])]
        if max(errors) > (1e-5 if dtype == torch.float32 else 0.05):
            raise SystemExit(f"error: {n} prompts in one pass are not what stock makes of them, by {max(errors):.1g}")
        seconds = {way: min(times) for way, times in interleave(ways).items()}
        tokens = [cache.prompt_length(ours, prompt, [picture.size]) for prompt in prompts]
        tell(f"{n} prompts, of {tokens} tokens: stock one by one {seconds['stock']:.2f} s, in one pass "
             f"{seconds['ours']:.2f} s, {seconds['stock'] / seconds['ours']:.2f} x")
