"""
changes/flux2_pack.py: packs of FLUX.2 against diffusers' own model, one sample at a time.
"""
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from diffusers import Flux2Pipeline, Flux2Transformer2DModel

from tests.harness import HERE, rel, show

spec = importlib.util.spec_from_file_location("flux2_pack", HERE / "changes/flux2_pack.py")
flux2_pack = importlib.util.module_from_spec(spec)
spec.loader.exec_module(flux2_pack)

C, J = 16, 48
SHAPES = [[(1, 6, 10)], [(1, 4, 6), (1, 8, 3)], [(1, 3, 5), (1, 2, 2), (1, 5, 4)]] # target, then controls
TEXT_LENS = [7, 12, 3]

@pytest.fixture(scope="module")
def model():
    """As initialised it hardly feels modulation and attention; so these are stronger."""
    torch.manual_seed(0)
    model = Flux2Transformer2DModel(in_channels=C, num_layers=2, num_single_layers=2, attention_head_dim=32,
                                    num_attention_heads=4, joint_attention_dim=J, axes_dims_rope=(8, 8, 8, 8),
                                    timestep_guidance_channels=32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "timestep_embedder.linear_2" in name or "guidance_embedder.linear_2" in name:
                weight.mul_(8)
            elif "modulation" in name or name == "norm_out.linear.weight":
                weight.mul_(4)
            elif "norm_" in name:
                weight.fill_(2)
    return model

@pytest.fixture(scope="module")
def samples():
    torch.manual_seed(1)
    lens = [sum(h * w for _, h, w in shapes) for shapes in SHAPES]
    return SimpleNamespace(latents=[torch.randn(n, C) for n in lens], prompts=[torch.randn(n, J) for n in TEXT_LENS],
                           timesteps=torch.tensor([0.2, 0.5, 0.9]), guidance=torch.tensor([4.0, 2.5, 1.0]))

def one_by_one(model, samples):
    """What stock answers to each sample alone, with the positions of diffusers' pipeline."""
    outs = []
    for shapes, x, prompt, t, guidance in zip(
            SHAPES, samples.latents, samples.prompts, samples.timesteps, samples.guidance, strict=True):
        target, *controls = [torch.zeros(1, C, h, w) for _, h, w in shapes]
        ids = [Flux2Pipeline._prepare_latent_ids(target)]
        if controls:
            ids.append(Flux2Pipeline._prepare_image_ids(controls))
        outs.append(model(x[None], prompt[None], timestep=t[None], guidance=guidance[None], img_ids=torch.cat(ids, 1),
                          txt_ids=Flux2Pipeline._prepare_text_ids(prompt[None]), return_dict=False)[0][0])
    return outs

def packed(model, samples, **changes):
    call = dict(latents=samples.latents, prompt_embeds=samples.prompts, timesteps=samples.timesteps, img_shapes=SHAPES,
                guidance=samples.guidance)
    return flux2_pack.run_packed(model, **call | changes)

def gradients(model, outs):
    model.zero_grad()
    generator = torch.Generator().manual_seed(2)
    torch.autograd.backward(outs, [torch.randn(out.shape, generator=generator) for out in outs])
    return {name: p.grad for name, p in model.named_parameters()}

@pytest.mark.parametrize("recomputed", [False, True])
def test_a_pack_of_flux2_equals_stock_one_by_one(model, samples, recomputed):
    """Outputs and gradients, also with gradient checkpointing; afterwards the model is stock again."""
    want = one_by_one(model, samples)
    if recomputed:
        model.enable_gradient_checkpointing()
    got = packed(model.train(), samples)
    errors = list(map(rel, got, want))
    show("outputs", max(errors), 1e-5)
    assert max(errors) <= 1e-5
    grads, wanted = gradients(model, got), gradients(model, want)
    model.disable_gradient_checkpointing()
    errors = [rel(grads[name], wanted[name]) for name in wanted]
    show("gradients", max(errors), 3e-5)
    assert max(errors) <= 3e-5 # summed over the samples in another order
    assert all(map(torch.equal, one_by_one(model, samples), want))

WRONG = {
    "positions": dict(img_shapes=[[(1, w, h) for _, h, w in shapes] for shapes in SHAPES]),
    "modulation": dict(timesteps=torch.tensor([0.2, 0.2, 0.2])),
    "guidance": dict(guidance=torch.tensor([4.0, 4.0, 4.0])),
    "attention": {}}

@torch.no_grad()
@pytest.mark.parametrize("what", WRONG)
def test_what_is_the_sample_s_own_matters(model, samples, what, monkeypatch):
    """The negative control: with the first sample's conditions for all, turned pictures, or without the mask, the last
    sample is wrong by more than 0.1."""
    if what == "attention":
        monkeypatch.setattr(flux2_pack, "mask_of", lambda sample_S: None)
    error = rel(packed(model, samples, **WRONG[what])[-1], one_by_one(model, samples)[-1])
    show(what, error, 0.1)
    assert error > 0.1
