"""
Padded rows, as other trainers give them to the patched model: the pads are dropped, what is left runs packed, and the
answers go back to their places. rope_patch.py's model_forward() comes here when samples have image pads, when they
differ in size, and when the caller has made the positions. Shape letters as there; N tokens.
"""
from math import prod

import numpy as np
import torch

from rope_patch import Batch, check_rotary_emb, pad_latents_for_multi_res, sample_freqs


def make_batch(model, img, txt, img_lens, txt_lens, mask_BS, shapes, image_rotary_emb):
    """-> the Batch of what is no pad in img (B, I, C) and txt (B, T, C), and the places of its image tokens, for
    put_back. img_lens, txt_lens: tokens of each row, then pads; mask_BS: bool, False at further pads, or None; shapes:
    of the pictures, or None; image_rotary_emb: the caller's, or None. ValueError if they do not fit."""
    (batch, img_len), txt_len, device = img.shape[:2], txt.shape[1], img.device
    if max(img_lens) > img_len:
        raise ValueError(f"hidden_states: got {img_len} image tokens, want {max(img_lens)} for {shapes}")
    if image_rotary_emb is None: # pads may have any positions
        img_freqs, txt_freqs = zip(*[sample_freqs(model.pos_embed, s, txt_len, device) for s in shapes])
        img_freqs_BIR, txt_freqs_BTR = pad_latents_for_multi_res(img_freqs, img_len)[0], torch.stack(txt_freqs)
    else:
        half_dim = model.config.attention_head_dim // 2
        img_freqs_BIR, txt_freqs_BTR = check_rotary_emb(image_rotary_emb, batch, img_len, txt_len, half_dim)
        img_freqs, txt_freqs = image_rotary_emb
        if img_freqs.ndim > txt_freqs.ndim and (img_freqs != img_freqs[:1]).any(): # one text for different pictures
            raise ValueError(f"image_rotary_emb: got text frequencies ({txt_len}, R) for pictures of different sizes, "
                             f"want ({batch}, {txt_len}, R), as text begins where a sample's own pictures end")

    # on the host (by numpy, as --plan's tensors have no numbers): the lengths of packed rows have to be known there
    img_valid_BI = np.arange(img_len) < np.array(img_lens)[:, None]
    txt_valid_BT = np.arange(txt_len) < np.array(txt_lens)[:, None]
    if mask_BS is not None: # the one thing for which the host waits
        mask_BS = mask_BS.cpu().numpy()
        img_valid_BI &= mask_BS[:, txt_len:]
        txt_valid_BT &= mask_BS[:, :txt_len]
    targets = None
    if model.zero_cond_t: # of each target the tokens that are left
        lens = [prod(s[0]) for s in shapes]
        if max(lens) > img_len:
            raise ValueError(f"hidden_states: got {img_len} image tokens, want at least the targets of {shapes}")
        targets = [int(valid[:n].sum()) for valid, n in zip(img_valid_BI, lens)]

    img_places, txt_places = places_of(img_valid_BI, device), places_of(txt_valid_BT, device)
    freqs = drop_pads(img_freqs_BIR, img_places), drop_pads(txt_freqs_BTR, txt_places)
    return Batch(drop_pads(img, img_places), drop_pads(txt, txt_places), freqs, img_valid_BI.sum(1).tolist(),
                 txt_valid_BT.sum(1).tolist(), targets), img_places

def places_of(valid_BN, device):
    """-> (tokens,) the places of valid tokens among the B * N of all rows; None if there are no pads to drop."""
    if valid_BN.all():
        return None
    return torch.from_numpy(np.flatnonzero(valid_BN)).to(device, non_blocking=True)

def drop_pads(x_BNC, places):
    """-> (1, tokens, C), which knows nothing of what stood in the pads, NaN too."""
    row = x_BNC.flatten(0, 1)[None]
    return row if places is None else row.index_select(1, places)

def put_back(row, places, batch, width):
    """(1, tokens, C) -> (B, N, C), with 0 at the pads."""
    if places is not None:
        row = row.new_zeros(1, batch * width, row.shape[-1]).index_copy(1, places, row)
    return row.view(batch, width, -1)

def run_padded(model, latents, prompt_embeds, timesteps, img_shapes):
    """rope_patch.run_packed's answer, by a call with rows that are padded to the longest sample."""
    img_BIC, _ = pad_latents_for_multi_res(latents)
    txt_BTC, _ = pad_latents_for_multi_res(prompt_embeds)
    out = model(img_BIC, txt_BTC, timestep=timesteps, img_shapes=img_shapes,
                txt_seq_lens=[len(p) for p in prompt_embeds], return_dict=False)[0]
    return [row[:len(x)] for row, x in zip(out, latents)]
