"""
Padded rows, as other trainers give them to the patched model: the pads are dropped, what is left runs packed, and the
answers go back to their places. rope_patch.py's model_forward() comes here when samples have image pads, when they
differ in size, and when the caller brings positions or a mask over [text, image]. Shape letters as there; N tokens.
"""
from math import prod

import numpy as np
import torch

from rope_patch import (image_lens, joint_mask, lens_mask, make_layout, packed_forward, pad_latents_for_multi_res,
                        real_pair, sample_freqs, sample_shapes, send)


def forward(model, img, txt, txt_mask, timestep, img_shapes, attention_kwargs, additional_t_cond, image_rotary_emb,
            txt_lens):
    """The answer (B, I, C_out) to model_forward's arguments, which are in addition to what stands there:

    img, txt            (B, I, C): target and its controls, then pads; (B, T, C)
    txt_mask            (B, T) bool, int or 0/1 float, may have holes
    txt_lens            lengths of the rows of text, as older diffusers had them; beside a mask they are not read
    attention_kwargs    "attention_mask": (B, S) or (B, 1, 1, S) over [text, image]
    image_rotary_emb    (img, txt) complex frequencies, each (N, R) or (B, N, R); wins over img_shapes:
        freqs = [sample_freqs(model.pos_embed, shapes, txt_len, device) for shapes in img_shapes] # T = txt_len
        img_freqs_BIR, _ = pad_latents_for_multi_res([img for img, _ in freqs])
        image_rotary_emb = img_freqs_BIR, torch.stack([txt for _, txt in freqs])

    Rows at pads are exactly 0, and what stands in the pads (NaN too) changes nothing.
    """
    (batch, img_len), txt_len, device = img.shape[:2], txt.shape[1], img.device
    kwargs = dict(attention_kwargs) # a copy: the caller's stays as it is
    attention_mask = kwargs.pop("attention_mask", None)
    shapes, img_lens = None, [img_len] * batch
    if img_shapes is not None or image_rotary_emb is None or model.zero_cond_t:
        shapes = sample_shapes(img_shapes, batch)
    # img_shapes tell how long the samples are; but beside a caller's own positions a joint mask does, if there is one
    if shapes and (image_rotary_emb is None or attention_mask is None):
        img_lens = image_lens(shapes)
        if np.ndim(img_shapes[0]) == 1 and max(img_lens) != img_len:
            raise ValueError(f"img_shapes: got one picture a sample, of at most {max(img_lens)} tokens, want the "
                             f"{img_len} of hidden_states; list a sample's pictures as [[(1, h, w), (1, h, w)], ...]")
    if txt_lens is None or txt_mask is not None: # (older diffusers took both; then the mask says the same)
        txt_lens = [txt_len] * batch

    # on the host (by numpy, as --plan's tensors have no numbers): the lengths of packed rows have to be known there
    img_valid_BI = lens_mask("img_shapes for hidden_states", img_lens, batch, img_len)
    txt_valid_BT = lens_mask("txt_seq_lens", txt_lens, batch, txt_len)
    mask_B11S = joint_mask(txt_mask, attention_mask, batch, txt_len, img_len)
    if mask_B11S is not None: # the one thing for which the host waits
        mask_BS = mask_B11S[:, 0, 0].cpu().numpy()
        txt_valid_BT &= mask_BS[:, :txt_len]
        img_valid_BI &= mask_BS[:, txt_len:]
    targets = None
    if model.zero_cond_t: # of each target the tokens that are left
        target_lens = [prod(s[0]) for s in shapes]
        in_target_BI = lens_mask("targets of img_shapes for hidden_states", target_lens, batch, img_len)
        targets = (img_valid_BI & in_target_BI).sum(1).tolist()
    layout = make_layout(img_valid_BI.sum(1).tolist(), txt_valid_BT.sum(1).tolist(), targets, img)

    if image_rotary_emb is None: # pads may have any positions
        img_freqs, txt_freqs = zip(*[sample_freqs(model.pos_embed, s, txt_len, device) for s in shapes])
        image_rotary_emb = pad_latents_for_multi_res(img_freqs, img_len)[0], torch.stack(txt_freqs)
    freqs = real_pair(image_rotary_emb, batch, img_len, txt_len, model.config.attention_head_dim // 2)
    img_freqs, txt_freqs = image_rotary_emb
    if img_freqs.ndim > txt_freqs.ndim and (img_freqs != img_freqs[:1]).any(): # one text for different pictures
        raise ValueError(f"image_rotary_emb: got text frequencies ({txt_len}, R) for pictures of different sizes, "
                         f"want ({batch}, {txt_len}, R), as text begins where a sample's own pictures end")

    img_places, txt_places = places_of(img_valid_BI, device), places_of(txt_valid_BT, device)
    freqs = drop_pads(freqs[0], txt_places), drop_pads(freqs[1], img_places)
    out = packed_forward(model, drop_pads(img, img_places), drop_pads(txt, txt_places), freqs, layout, timestep,
                         additional_t_cond, attention_kwargs=kwargs)
    if img_places is not None: # back to their places, with 0 at the pads
        out = out.new_zeros(1, batch * img_len, out.shape[-1]).index_copy(1, img_places, out)
    return out.view(batch, img_len, -1)

def places_of(valid_BN, device):
    """-> (tokens,) the places of valid tokens among the B * N of all rows; None if there are no pads to drop."""
    if valid_BN.all():
        return None
    return send(torch.from_numpy(np.flatnonzero(valid_BN)), device)

def drop_pads(x_BNC, places):
    """-> (1, tokens, C), which knows nothing of what stood in the pads, NaN too."""
    row = x_BNC.flatten(0, 1)[None]
    return row if places is None else row.index_select(1, places)
