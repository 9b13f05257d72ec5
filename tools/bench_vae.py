"""
bench.py --what vae: one picture in the VAE's real shape, with random weights, as library/models/picture_vae.py computes
it and as stock does.
"""
import copy

import torch
from diffusers import AutoencoderKLQwenImage

from common import tell
from library.models.picture_vae import patch_vae_for_pictures
from tools.bench_common import peak_gib

SIDES = dict(small=[256], full=[512, 1024])

def encode(vae, pixels):
    return vae.encode(pixels).latent_dist.mode()

def decode(vae, latents):
    return vae.decode(latents).sample

@torch.no_grad()
def bench_vae(size, dtype, device, measure):
    """Prints stock's time and memory divided by ours. measure({way: call}) -> {way: seconds of every round}."""
    torch.manual_seed(0)
    stock = AutoencoderKLQwenImage().requires_grad_(False).eval().to(device, dtype)
    models = dict(ours=patch_vae_for_pictures(copy.deepcopy(stock)), stock=stock)
    limit = 1e-5 if dtype == torch.float32 else 0.05
    for side in SIDES[size]:
        pixels, latents = torch.randn(1, 3, 1, side, side), torch.randn(1, 16, 1, side // 8, side // 8)
        for compute, x in ((encode, pixels), (decode, latents)):
            x = x.to(device, dtype)
            ours, want = [compute(vae, x) for vae in models.values()]
            if not (ours - want).norm() <= limit * want.norm():
                raise SystemExit(f"error: {compute.__name__} of {side} * {side}: its numbers are not stock's")
            del ours, want
            ways = {way: lambda vae=vae: compute(vae, x) for way, vae in models.items()}
            times = measure(ways)
            fast, slow = [min(times[way]) for way in models]
            small, large = [peak_gib(way, device) for way in ways.values()]
            tell(f"{compute.__name__} {side} * {side}: stock {slow:.2f} s, ours {fast:.2f} s, {slow / fast:.2f} x | "
                 f"memory {large:.2f} and {small:.2f} GiB, {small / large:.2f}")
