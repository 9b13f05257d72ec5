"""
Several prompts about the same pictures in one pass of Qwen2.5-VL, the text encoder. The template, the pictures and what
the prompts begin with in common are computed once; the vision tower sees the pictures once. Copied alone, this file
serves other programs.

    patch_text_encoder(encoder)                                   # this instance; its weights and names stay
    encoder(input_ids=ids, attention_mask=mask, pixel_values=pixels, image_grid_thw=grid) # several rows, pictures once

A causal attention does not see what follows, so a common beginning has the same numbers in front of every ending. The
pass is one row, with a mask in which each ending sees the beginning and itself:

    [beginning, end 1, end 2, ...]

An ending gets the positions that it would have if the other endings were not there. One prompt is computed by stock's
own forward.
"""
from os.path import commonprefix
from types import MethodType, SimpleNamespace

import torch
import torch.nn.functional as F

def patch_text_encoder(encoder):
    """Extends forward() of this Qwen2_5_VLForConditionalGeneration to several prompts about the same pictures -> it."""
    encoder.forward = MethodType(encode_together, encoder)
    patch_embed = encoder.model.visual.patch_embed
    patch_embed.forward = MethodType(embed_patches, patch_embed)
    return encoder

def encode_together(self, input_ids, attention_mask, **given):
    """input_ids, attention_mask (B, T): prompts with pads on either side. pixel_values and image_grid_thw: those of the
    pictures once, not for each prompt -> hidden_states, whose last is (B, T, C), with zeros at the pads."""
    if len(input_ids) == 1:
        return type(self).forward(self, input_ids=input_ids, attention_mask=attention_mask, **given)
    real = attention_mask.bool()
    rows = [row[at] for row, at in zip(input_ids, real)]
    # each prompt needs a row of its own to end in, also if two are equal
    common = len(commonprefix([row[:-1].tolist() for row in rows]))
    ends = [row[common:] for row in rows]
    lengths = [common, *map(len, ends)]
    packed_BS = torch.cat([rows[0][:common], *ends])[None]

    # part 0 is the beginning, part k the k-th ending
    part = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(input_ids.device)
    mask_SS = ((part[:, None] == part) | (part == 0)).tril()
    # the pictures lie in the beginning, and behind them all axes count on by one; an ending does not count the others
    pictures = {name: given.get(name) for name in ("pixel_values", "image_grid_thw")}
    types = (packed_BS == self.config.image_token_id).int() # transformers below 5.3 ignores them
    positions, _ = self.model.get_rope_index(packed_BS, image_grid_thw=pictures["image_grid_thw"],
                                             mm_token_type_ids=types)
    before = torch.tensor([0, 0, *lengths[1:-1]]).cumsum(0).to(part.device)
    hidden = self.model(input_ids=packed_BS, attention_mask=mask_SS[None, None], position_ids=positions - before[part],
                        use_cache=False, **pictures).last_hidden_state[0]

    beginning, *ends = hidden.split(lengths)
    out_BTC = hidden.new_zeros(*input_ids.shape, hidden.shape[-1])
    out_BTC[real] = torch.cat([torch.cat([beginning, end]) for end in ends])
    return SimpleNamespace(hidden_states=[out_BTC])

def embed_patches(self, hidden_states):
    """The vision tower's patches (N, 3 * 2 * 14 * 14) -> (N, C). Stock calls a Conv3d whose stride is its kernel, which
    is one matrix product; as a Conv3d in bf16 it takes 70 times as long on a CPU, and torch 2.9's is slow on a GPU."""
    weight = self.proj.weight.flatten(1)
    return F.linear(hidden_states.view(-1, weight.shape[1]).to(weight.dtype), weight, self.proj.bias)
