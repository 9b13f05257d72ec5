"""
What:   run_packed for FLUX.2: samples of any sizes in one pass of diffusers' Flux2Transformer2DModel, no block touched.
For:    FLUX.2: copy this beside rope_patch.py, and call it for its run_packed. What else: GUIDE, "A new model family".
Costs:  a mask of S x S, whose masked part is computed, too: keep packs small. blocks_of needs the single blocks, too.
Paper:  none; hooks on what differs from sample to sample (modulations, norm_out), FLUX.2's own ids for each token.
Fails:  nothing; tests/test_flux2_pack.py compares it with stock, one sample at a time.
"""
import torch

from rope_patch import RowsByIndex # Shape letters as there; E: width of the model


def image_ids(pictures):
    """[(1, h, w), ...] in tokens, target first -> (I, 4) positions (10 * picture, y, x, 0), as in Flux2Pipeline."""
    ids = []
    for number, (_, h, w) in enumerate(pictures):
        number, zero = torch.tensor([10 * number]), torch.tensor([0])
        ids.append(torch.cartesian_prod(number, torch.arange(h), torch.arange(w), zero))
    return torch.cat(ids)

def text_ids(length):
    """-> (T, 4) positions (0, 0, 0, place in the text)."""
    return torch.nn.functional.pad(torch.arange(length)[:, None], (3, 0))

def mask_of(sample_S):
    """The sample of each token -> (1, 1, S, S), true where both are of one sample."""
    return (sample_S[:, None] == sample_S)[None, None]

def run_packed(model, latents, prompt_embeds, timesteps, img_shapes, guidance=None):
    """Lists of (I_b, C), target and its controls, and of (T_b, J); (B,) timesteps from 0 to 1; per sample [(1, h, w),
    ...]; (B,) guidance, if the model takes it -> list of (I_b, C_out)."""
    device, samples = latents[0].device, torch.arange(len(latents))
    img_lens, txt_lens = [torch.tensor([len(x) for x in rows]) for rows in (latents, prompt_embeds)]
    img_sample, txt_sample = [samples.repeat_interleave(lens).to(device) for lens in (img_lens, txt_lens)]
    both = torch.cat([txt_sample, img_sample]) # [all text, all image], as the model joins them

    def modulate_by(sample): # (B, 6E) or (B, 3E) -> (1, tokens, ...), of each token its sample's row
        return lambda module, args, mod: RowsByIndex.apply(mod, sample)[None]

    def normalize_by_sample(module, args): # (1, sum I, E), (B, E) -> a batch of tokens, each with its sample's row
        x, temb = args
        return x.transpose(0, 1), RowsByIndex.apply(temb, img_sample)

    hooks = [model.double_stream_modulation_img.register_forward_hook(modulate_by(img_sample)),
             model.double_stream_modulation_txt.register_forward_hook(modulate_by(txt_sample)),
             model.single_stream_modulation.register_forward_hook(modulate_by(both)),
             model.norm_out.register_forward_pre_hook(normalize_by_sample)]
    try:
        out = model(torch.cat(latents)[None], torch.cat(prompt_embeds)[None], timestep=timesteps, guidance=guidance,
                    img_ids=torch.cat([image_ids(pictures) for pictures in img_shapes]).to(device),
                    txt_ids=torch.cat([text_ids(len(prompt)) for prompt in prompt_embeds]).to(device),
                    joint_attention_kwargs=dict(attention_mask=mask_of(both)), return_dict=False)[0]
    finally: # stock again
        for hook in hooks:
            hook.remove()
    return list(out[:, 0].split(img_lens.tolist()))
