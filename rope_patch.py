"""
Let one batch of Qwen-Image-Edit hold pictures of different sizes.

Stock diffusers takes the rotary positions of the whole batch from its first sample and merely warns; its 2511 model
(zero_cond_t) cannot hold a ragged batch at all. After

    patch_qwen_model_for_multi_resolution(transformer)

every mixture of sizes, picture counts and prompt lengths gives the numbers of the stock model run one sample at a time
($ pytest test_consistency.py). Weights, names and old calls stay as they are. forward() can be called in four modes:

    stock        equal sizes, no new argument     diffusers' own code, bit for bit
    packed       txt_seq_lens=[T_0, ...]          (1, sum I, C) rows: all samples in one row, without pads or a mask
    padded       img_shapes differ                (B, I, C) rows: the pads are dropped, the rest runs packed, and the
                                                  results go back to their places
    precomputed  image_rotary_emb=(img, txt)      as padded, with positions and mask made by the caller

So there is one arithmetic beside stock's. It is packed_forward(); its parts stand before it: positions, pads,
attention, block.

This module is pure: it knows no files, flags or ranks. Shape suffixes:
B samples, I image tokens (target first, then controls), T text tokens, S = T + I, C channels, H heads, D head dim,
R = D/2 complex rotations.
"""
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from types import MethodType

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from diffusers.models.attention_dispatch import (
    AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn)
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.utils import apply_lora_scale
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

ROPE_TABLE = 4096 # positions in diffusers' tables; a slice past the end is silently shorter there

# ---- rotary positions ------------------------------------------------------------------------------------------------

def apply_rotary_emb_qwen_batched(x, freqs_cis):
    """Rotate queries or keys. x: (B, S, H, D). freqs_cis: complex (S, R), shared by the batch, or (B, S, R), per
    sample. Returns x's shape and dtype. Same arithmetic as diffusers' apply_rotary_emb_qwen, which knows the shared
    form only (there a 3D freqs_cis silently broadcasts over the heads). ValueError if sizes differ."""
    B, S, _, D = x.shape
    check_freqs("rotary frequencies: got", freqs_cis, B, S, D // 2)
    return rotate(x, real_freqs(freqs_cis))

def real_freqs(freqs_cis):
    """Complex (..., R) -> (..., D) of cos, sin, cos, ..., as torch.compile cannot fuse complex numbers."""
    return torch.view_as_real(freqs_cis).flatten(-2)

def rotate(x, freqs):
    """x: (B, S, H, D); freqs: real_freqs, (S, D) or (B, S, D). Pairs of channels are complex numbers, and a rotation is
    a product with a number of length 1."""
    pairs, freqs = x.float().unflatten(-1, (-1, 2)), freqs.unsqueeze(-2).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        (a, b), (cos, sin) = pairs.unbind(-1), freqs.unbind(-1)
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)
    else:
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(freqs))
    return rotated.flatten(3).type_as(x)

def check_freqs(got, freqs, batch, n, half_dim):
    """ValueError, which begins with `got`, unless these are the frequencies of n tokens."""
    want = (n, half_dim), (batch, n, half_dim)
    if not torch.is_tensor(freqs) or not freqs.is_complex() or tuple(freqs.shape) not in want:
        what = f"{tuple(freqs.shape)}, {freqs.dtype}" if torch.is_tensor(freqs) else type(freqs).__name__
        raise ValueError(f"{got} {what}, want a complex tensor, {want[0]} or {want[1]}: torch.complex(cos, sin)")

def check_rotary_emb(image_rotary_emb, batch, img_len, txt_len, half_dim):
    """A caller's (img, txt) -> both as (B, N, R). Each is checked by itself: if only their sum were right, text
    positions that are too many would serve image tokens."""
    if not isinstance(image_rotary_emb, (list, tuple)) or len(image_rotary_emb) != 2:
        raise ValueError(f"image_rotary_emb: got {len(image_rotary_emb)} ({type(image_rotary_emb).__name__}), want a "
                         "tuple of 2, (img, txt)")
    img_freqs, txt_freqs = image_rotary_emb
    check_freqs("image_rotary_emb: got pictures of", img_freqs, batch, img_len, half_dim)
    check_freqs("image_rotary_emb: got text of", txt_freqs, batch, txt_len, half_dim)
    return img_freqs.expand(batch, -1, -1), txt_freqs.expand(batch, -1, -1)

def sample_freqs(pos_embed, shapes, txt_len, device):
    """One sample's (img (I, R), txt (T, R)) frequencies, from the model's own module, so that plain and layer3d RoPE
    keep their formulas. Text positions begin where *its own* pictures end. ValueError past the table of 4096."""
    if max(max(h - h // 2, w - w // 2) for _, h, w in shapes) > ROPE_TABLE:
        raise ValueError(f"rotary positions: got a picture of {shapes}, want sides of at most {2 * ROPE_TABLE} tokens")
    # by keyword: QwenEmbedRope and QwenEmbedLayer3DRope order these arguments differently
    img_freqs, txt_freqs = pos_embed([shapes], device=device, max_txt_seq_len=txt_len)
    if len(txt_freqs) != txt_len:
        raise ValueError(f"rotary positions: got {txt_len} text tokens after pictures {shapes}, want at most "
                         f"{len(txt_freqs)}: the table ends at {ROPE_TABLE}")
    return img_freqs, txt_freqs

# ---- pads ------------------------------------------------------------------------------------------------------------

def lens_mask(lens, width, device):
    """Lengths -> bool (B, width): True up to each length."""
    return torch.arange(width, device=device) < torch.tensor(lens, device=device)[:, None]

def as_bool_mask(mask, name, batch, width):
    """A 0/1 mask of any dtype, (B, N) or (B, 1, 1, N) -> bool (B, N). An additive mask (0 / -inf) would be read upside
    down, so it is a ValueError."""
    if tuple(mask.shape) not in ((batch, width), (batch, 1, 1, width)):
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}, want {(batch, width)}")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{name}: got values other than 0 and 1 ({mask.dtype}), want 1 = attend, 0 = pad")
    return mask.bool().view(batch, width)

def joint_mask(txt_mask, mask, batch, txt_len, img_len):
    """The two masks that a caller may give, encoder_hidden_states_mask (B, T) and attention_mask (B, S) or
    (B, 1, 1, S), bool, int or 0/1 float -> one bool (B, S) over [text, image]; None if there is neither."""
    mask_BS = None
    if txt_mask is not None:
        mask_BT = as_bool_mask(txt_mask, "encoder_hidden_states_mask", batch, txt_len)
        mask_BS = F.pad(mask_BT, (0, img_len), value=True)
    if mask is not None:
        other_BS = as_bool_mask(mask, "attention_mask", batch, txt_len + img_len)
        mask_BS = other_BS if mask_BS is None else mask_BS & other_BS
    return mask_BS

def drop_pads(rows, mask_BN):
    """(B, N, C), or B tensors of at most N rows -> (1, sum of their tokens, C). What stood in the pads, NaN too, is
    gone. mask_BN: bool; None: there are no pads."""
    if mask_BN is not None:
        rows = [row[valid[:len(row)]] for row, valid in zip(rows, mask_BN)]
    return torch.cat(list(rows))[None]

# ---- attention -------------------------------------------------------------------------------------------------------
# A packed row needs no mask: torch's variable-length kernel is told where each sample begins. (FlexAttention has no
# backward pass on a CPU, and compiles anew for each layout. Nested tensors gained nothing.)

def use_fused(x):
    """Whether packed rows use fused kernels: on CUDA, where they save memory traffic and round less often than stock.
    On a CPU the results equal stock's bit for bit."""
    return x.is_cuda

@dataclass
class Lens:
    """How long the samples of a packed row are."""
    each: list # tokens of each sample
    longest: int
    begins: Tensor | None # (B + 1,) int32, where each sample begins, and the end; None: varlen_attn cannot run

@dataclass
class Segments:
    """Consecutive tokens that share one modulation vector, i.e. one row of `temb`: a sample's, or in zero_cond_t models
    its target's and its controls'."""
    lens: list # tokens of each segment
    temb_rows: list # its row of temb
    index: Tensor # (tokens,) the row of every token

@dataclass
class Layout:
    """Where the samples stand in the packed rows, made once per forward pass. A compiled block reads no list of it: one
    of another length would trigger a recompilation."""
    joint: Lens # of text + image
    img: Lens # of the image tokens alone
    # (S,) where each token of the joint row [text 0, image 0, text 1, image 1, ...] stands in [all text, all image],
    # and the way back. None: of one sample both rows are the same
    order: Tensor | None
    inverse: Tensor | None
    img_segments: Segments
    txt_segments: Segments
    last: bool = False # the last block: its text output is not used

def has_varlen(x):
    """torch's variable-length attention is flash attention: CUDA, half precision, Ampere or newer. A backend chosen
    through diffusers, for all models or in a `with` block, takes precedence."""
    return (x.is_cuda and torch.version.hip is None # (which lacks it on many cards)
            and x.dtype in (torch.bfloat16, torch.float16)
            and torch.cuda.get_device_capability(x.device) >= (8, 0)
            and _AttentionBackendRegistry.get_active_backend()[0] == AttentionBackendName.NATIVE)

def make_lens(each, x):
    """-> Lens, for rows of x's device and dtype."""
    begins = None
    if has_varlen(x): # made once per forward pass: made in each block it would wait for the GPU 60 times
        begins = torch.tensor([0, *accumulate(each)], dtype=torch.int32).to(x.device, non_blocking=True)
    return Lens(each, max(each), begins)

def make_segments(lens, temb_rows, x):
    index = torch.repeat_interleave(torch.tensor(temb_rows), torch.tensor(lens), output_size=sum(lens))
    return Segments(lens, temb_rows, index.to(x.device, non_blocking=True))

def make_layout(txt_lens, img_parts, x):
    """-> Layout, for rows of x's device and dtype. img_parts: as packed_forward's."""
    img_lens = list(map(sum, img_parts))
    joint_lens = [t + i for t, i in zip(txt_lens, img_lens)]
    B, order, inverse = len(txt_lens), None, None
    if B > 1:
        places = torch.arange(sum(joint_lens)).split([*txt_lens, *img_lens])
        order = torch.cat([own for b in range(B) for own in (places[b], places[B + b])])
        order, inverse = [o.to(x.device, non_blocking=True) for o in (order, order.argsort())]
    # a sample's first part takes row b of temb, its own timestep; its controls take row B + b, t = 0
    part_lens = [n for parts in img_parts for n in parts]
    temb_rows = [b + B * i for b, parts in enumerate(img_parts) for i in range(len(parts))]
    return Layout(make_lens(joint_lens, x), make_lens(img_lens, x), order, inverse,
                  make_segments(part_lens, temb_rows, x), make_segments(txt_lens, list(range(B)), x))

def reorder(x, order, inverse):
    return x if order is None else Reorder.apply(x, order, inverse)

class Reorder(torch.autograd.Function): # a class because autograd wants one
    """x[:, order]. Its gradient is a gather by the inverse order, where autograd's own would add atomically."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(order, inverse)
        return x[:, order]

    @staticmethod
    def backward(ctx, grad):
        order, inverse = ctx.saved_tensors
        return Reorder.apply(grad, inverse, order), None, None

def packed_attention(q, k, v, layout, **options):
    """Attention within each sample's [text, image]. q, k, v: (1, S, H, D), [all text, all image]; in the last block q
    is the image alone -> q's shape and order. One kernel where torch has it, else one unmasked call a sample. options:
    dispatch_attention_fn's, as the processor has them."""
    # -> [text 0, image 0, text 1, image 1, ...]
    k, v = [reorder(x, layout.order, layout.inverse) for x in (k, v)]
    lens, q_lens = layout.joint, layout.img
    if not layout.last:
        q, q_lens = reorder(q, layout.order, layout.inverse), layout.joint
    if lens.begins is None or any(option is not None for option in options.values()):
        out = attention_by_sample(q, k, v, q_lens, lens, options)
    else:
        out = varlen_attn(q[0], k[0], v[0], q_lens.begins, lens.begins, q_lens.longest, lens.longest)[None]
    return out if layout.last else reorder(out, layout.inverse, layout.order)

@torch.compiler.disable # eager between two compiled halves of the block
def attention_by_sample(q, k, v, q_lens, lens, options):
    outs = []
    for qkv in zip(q.split(q_lens.each, 1), k.split(lens.each, 1), v.split(lens.each, 1)):
        outs.append(dispatch_attention_fn(*qkv, **options))
    return torch.cat(outs, dim=1)

# a class because diffusers looks at the signature of __call__ and drops every argument that is not named there
class QwenDoubleStreamAttnProcessor2_0_MultiRes(QwenDoubleStreamAttnProcessor2_0):
    """Drop-in for diffusers' processor, bit-equal to it where both can run. In addition it takes 3D (per-sample)
    frequencies and a joint attention_mask over [text, image]; and from block_forward packed rows with their layout.
    Inherits the backend that model.set_attention_backend() writes on it."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, encoder_hidden_states_mask=None,
                 attention_mask=None, image_rotary_emb=None, layout=None):
        """hidden_states (B, I, C), encoder_hidden_states (B, T, C) -> the same after attention, the text as None in the
        last block. With a layout: B = 1, no masks, and image_rotary_emb as real_freqs (1, N, D)."""
        if encoder_hidden_states is None:
            raise ValueError("encoder_hidden_states: got None, want the text stream (B, T, C)")
        img, txt = hidden_states, encoder_hidden_states
        (batch, img_len), txt_len = img.shape[:2], txt.shape[1]
        text_out = layout is None or not layout.last
        head_dim = attn.inner_dim // attn.heads

        def heads(x):
            return x.unflatten(-1, (-1, head_dim)) # -1: a tensor-parallel rank holds a part of the heads

        def normed(norm, x):
            x = heads(x)
            if layout is not None and use_fused(x): # diffusers' takes eight kernels in fp32
                return F.rms_norm(x, (head_dim,), norm.weight, norm.eps)
            return norm(x)

        # queries, keys and values of both streams, each (B, tokens, H, D); then of their joint row [text, image]
        q, k, v = normed(attn.norm_q, attn.to_q(img)), normed(attn.norm_k, attn.to_k(img)), heads(attn.to_v(img))
        if text_out:
            q = torch.cat([normed(attn.norm_added_q, attn.add_q_proj(txt)), q], dim=1)
        k = torch.cat([normed(attn.norm_added_k, attn.add_k_proj(txt)), k], dim=1)
        v = torch.cat([heads(attn.add_v_proj(txt)), v], dim=1)
        if image_rotary_emb is not None:
            if layout is None:
                freqs = check_rotary_emb(image_rotary_emb, batch, img_len, txt_len, head_dim // 2)
                image_rotary_emb = list(map(real_freqs, freqs))
            img_freqs, txt_freqs = image_rotary_emb
            freqs = torch.cat([txt_freqs, img_freqs], dim=1)
            q, k = rotate(q, freqs if text_out else img_freqs), rotate(k, freqs)

        options = dict(backend=self._attention_backend, parallel_config=self._parallel_config)
        if layout is not None:
            out = packed_attention(q, k, v, layout, **options)
        else: # stock, or called by hand
            mask = joint_mask(encoder_hidden_states_mask, attention_mask, batch, txt_len, img_len)
            out = dispatch_attention_fn(q, k, v, attn_mask=None if mask is None else mask[:, None, None], **options)
        # to the streams again; contiguous, without which bf16 takes another GEMM path than stock and differs by 7e-3
        out = out.flatten(2, 3).to(q.dtype)
        txt_out, img_out = [part.contiguous() for part in out.split([out.shape[1] - img_len, img_len], dim=1)]
        for layer in attn.to_out: # a linear one, and dropout
            img_out = layer(img_out)
        return img_out, attn.to_add_out(txt_out) if text_out else None

# ---- block -----------------------------------------------------------------------------------------------------------

class RowsByIndex(torch.autograd.Function): # a class because autograd wants one
    """rows[index]. Its gradient adds thousands of tokens into each row. Autograd would add them one by one in the rows'
    dtype, and a bf16 sum no longer changes once it is 256 times a term. This one product adds them up in fp32."""

    @staticmethod
    def forward(ctx, rows, index):
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows[index]

    @staticmethod
    def backward(ctx, grad):
        index, = ctx.saved_tensors
        is_mine = torch.arange(ctx.count, device=grad.device)[:, None] == index
        return is_mine.to(grad.dtype) @ grad, None

def by_segment(f, segments, modulations, *rows):
    """f(*vectors, *tokens) for all segments -> (1, N, C). modulations: (rows of temb, C) tensors; vectors: their rows
    that modulate these tokens, (C,) for a segment's, (N, C) when compiled. rows: (1, N, C)."""
    tokens = [row[0] for row in rows]
    # compiled: a gather, which the compiler fuses with f. Eager it would cost memory and one more kernel
    if torch.compiler.is_compiling():
        return f(*[RowsByIndex.apply(m, segments.index) for m in modulations], *tokens)[None]
    # eager: segment by segment, in stock's arithmetic
    vectors, parts = [m.unbind() for m in modulations], []
    for row, *own_tokens in zip(segments.temb_rows, *[x.split(segments.lens) for x in tokens]):
        parts.append(f(*[v[row] for v in vectors], *own_tokens))
    whole = torch.cat(parts) if len(parts) > 1 else parts[0] # (cat would copy a single one)
    return whole[None]

def multiply_add(x, y, z):
    return torch.addcmul(z, x, y) if use_fused(x) else x * y + z

def modulate(segments, x, shift, scale):
    return by_segment(lambda shift, scale, x: multiply_add(x, scale, shift), segments, [shift, 1 + scale], x)

def add_gated(segments, x, gate, y):
    return by_segment(lambda gate, x, y: multiply_add(gate, y, x), segments, [gate], x, y)

def block_forward(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, image_rotary_emb=None,
                  joint_attention_kwargs=None, modulate_index=None):
    """QwenImageTransformerBlock.forward, and the same block for packed rows, whose modulation changes from segment to
    segment. modulate_index: stock's own, or for packed rows their Layout. On a CPU it keeps stock's arithmetic, so that
    bf16 stays bit-equal. It replaces block.forward per instance, so every hook on block.__call__ (checkpointing,
    offload, FSDP, compile, peft) still fires."""
    if not isinstance(modulate_index, Layout):
        return type(self).forward(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb,
                                  image_rotary_emb, joint_attention_kwargs, modulate_index)
    if not isinstance(self.attn.processor, QwenDoubleStreamAttnProcessor2_0_MultiRes):
        raise ValueError(f"attention: got {type(self.attn.processor).__name__}, which cannot attend within samples; "
                         "want patch_qwen_model_for_multi_resolution, which sets the processors too")
    img, txt, layout = hidden_states, encoder_hidden_states, modulate_index
    img_segments, txt_segments = layout.img_segments, layout.txt_segments
    # modulation of attention (1) and MLP (2), from each timestep's row of temb
    img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = self.img_mod(temb).chunk(6, dim=-1)
    if self.zero_cond_t: # its rows are [own timesteps, zeros]; text always takes its sample's own
        temb = temb.chunk(2)[0]
    txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = self.txt_mod(temb).chunk(6, dim=-1)
    img_attn, txt_attn = self.attn(
        hidden_states=modulate(img_segments, self.img_norm1(img), img_shift1, img_scale1),
        encoder_hidden_states=modulate(txt_segments, self.txt_norm1(txt), txt_shift1, txt_scale1),
        image_rotary_emb=image_rotary_emb, layout=layout, **joint_attention_kwargs)
    img = add_gated(img_segments, img, img_gate1, img_attn)
    img_mlp = self.img_mlp(modulate(img_segments, self.img_norm2(img), img_shift2, img_scale2))
    img = add_gated(img_segments, img, img_gate2, img_mlp)
    if not layout.last: # nobody reads the last block's text
        txt = add_gated(txt_segments, txt, txt_gate1, txt_attn)
        txt_mlp = self.txt_mlp(modulate(txt_segments, self.txt_norm2(txt), txt_shift2, txt_scale2))
        txt = add_gated(txt_segments, txt, txt_gate2, txt_mlp)
    if img.dtype == torch.float16: # as stock
        img, txt = img.clip(-65504, 65504), txt.clip(-65504, 65504)
    return txt, img

# ---- model -----------------------------------------------------------------------------------------------------------

def checkpoint_blocks(model, blocks=None, **options):
    """Gradient checkpointing: the backward pass recomputes the first `blocks` blocks (None: all) -> their number.
    options: torch.utils.checkpoint's."""
    recomputed = set(model.transformer_blocks[:blocks])

    def run(block, *args):
        if block in recomputed:
            return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False, **options)
        return block(*args)
    model.enable_gradient_checkpointing(run)
    return len(recomputed)

@apply_lora_scale("attention_kwargs") # as on stock's forward: takes "scale" out, and applies it during the call
def packed_forward(model, img, txt, img_freqs, txt_freqs, img_parts, txt_lens, timestep, additional_t_cond,
                   attention_kwargs):
    """Embedding, blocks and output of every mode but stock's -> (1, sum I, C_out)."""
    # For B samples in one row (J: channels of the text encoder, E: the model's width):
    #
    #   img            (1, sum I, C)     target 0, its controls, target 1, its controls, ...
    #   txt            (1, sum T, J)     prompt 0, prompt 1, ...
    #   img_freqs      (1, sum I, R)     complex; positions begin anew with each sample
    #   txt_freqs      (1, sum T, R)     complex
    #   img_parts      B lists           [image tokens], or in zero_cond_t models [target's, controls']
    #   txt_lens       B numbers         text tokens
    #   timestep       (B,) or (1,)      from 0 to 1; additional_t_cond: likewise, whole numbers, or None
    #
    # and in the blocks, whose linears, norms and MLPs see one row of tokens:
    #
    #   img, txt       (1, sum I, E), (1, sum T, E)
    #   temb           (B, E)            a sample's modulation; in zero_cond_t models (2 B, E), B rows of t = 0 after it
    #   freqs          (1, sum I, D), (1, sum T, D)
    #   q, k, v        (1, S, H, D)      S = sum T + sum I; in the order text 0, image 0, text 1, image 1, ... for the
    #                                    attention, which stays within each sample
    B = len(txt_lens)
    layout = make_layout(txt_lens, img_parts, img)
    img = model.img_in(img)
    txt = model.txt_in(model.txt_norm(txt))
    timestep = timestep.to(img.dtype).expand(B)
    if model.zero_cond_t: # 2511: the controls are clean pictures, and modulated as such
        timestep = torch.cat([timestep, timestep * 0])
        if additional_t_cond is not None:
            additional_t_cond = additional_t_cond.expand(B).repeat(2)
    temb = model.time_text_embed(timestep, img, additional_t_cond)
    freqs = real_freqs(img_freqs), real_freqs(txt_freqs)
    for block in model.transformer_blocks:
        layout = replace(layout, last=block is model.transformer_blocks[-1])
        args = img, txt, None, temb, freqs, attention_kwargs, layout # in modulate_index: stock's has no other free one
        if torch.is_grad_enabled() and model.gradient_checkpointing:
            txt, img = model._gradient_checkpointing_func(block, *args)
        else:
            txt, img = block(*args)
    # AdaLayerNormContinuous, by segment. zero_cond_t or not, it takes the sample's own timestep (row b)
    scale, shift = model.norm_out.linear(model.norm_out.silu(temb).to(img.dtype)).chunk(2, dim=-1)
    segments = make_segments(layout.img.each, list(range(B)), img)
    return model.proj_out(modulate(segments, model.norm_out.norm(img), shift, scale))

def image_lens(shapes):
    return [sum(map(prod, s)) for s in shapes]

def model_forward(self, hidden_states, encoder_hidden_states=None, encoder_hidden_states_mask=None, timestep=None,
                  img_shapes=None, guidance=None, attention_kwargs=None, controlnet_block_samples=None,
                  additional_t_cond=None, return_dict=True, *, image_rotary_emb=None, txt_seq_lens=None):
    """QwenImageTransformer2DModel.forward with four modes (see the top of this file).

    hidden_states               padded (B, I, C): target and its controls, then pads; packed (1, sum I_b, C)
    encoder_hidden_states       padded (B, T, C); packed (1, sum T_b, C)
    encoder_hidden_states_mask  (B, T) bool, int or 0/1 float, may have holes; not when packed
    timestep                    (B,) from 0 to 1
    img_shapes                  per sample [(frames, h, w), ...] in tokens, target first; one entry serves all samples
    attention_kwargs            "attention_mask": (B, S) or (B, 1, 1, S) over [text, image]; "scale": of the LoRA
    image_rotary_emb            (img, txt) complex frequencies, each (N, R) or (B, N, R); wins over img_shapes:
        freqs = [sample_freqs(model.pos_embed, shapes, txt_len, device) for shapes in img_shapes] # T = txt_len
        img_freqs_BIR, _ = pad_latents_for_multi_res([img for img, _ in freqs])
        image_rotary_emb = img_freqs_BIR, torch.stack([txt for _, txt in freqs])
    txt_seq_lens                one row of text, no mask: packed. Else its lengths, as older diffusers had them

    Returns the shape of hidden_states with the output's channels; rows at pads are exactly 0, and what stands in the
    pads (NaN too) changes nothing. ValueErrors name what was got and what was wanted.
    """
    (rows, img_len), txt_len, device = hidden_states.shape[:2], encoder_hidden_states.shape[1], hidden_states.device
    own_kwargs = dict(attention_kwargs or {}) # a copy: the caller's stays as it is
    attention_mask = own_kwargs.pop("attention_mask", None)
    masked = encoder_hidden_states_mask is not None or attention_mask is not None
    txt_lens = txt_seq_lens.tolist() if torch.is_tensor(txt_seq_lens) else txt_seq_lens

    # which mode is meant? (a single masked row with a text length is padded: older diffusers wanted that length)
    packed = txt_lens is not None and rows == 1 and not (masked and len(txt_lens) == 1)
    if packed and masked:
        raise ValueError("packed: got a mask, want none (packed rows have no pads)")
    B = len(txt_lens) if packed else rows

    # rows and timesteps belong together (but when packed, one timestep may serve all samples); then the pictures
    per_sample = [t.numel() for t in (timestep, additional_t_cond) if t is not None]
    if len(encoder_hidden_states) != rows or not {B, B if packed else 1}.issuperset(per_sample):
        raise ValueError(f"batch: got {len(encoder_hidden_states)} rows of text and {per_sample} timesteps and "
                         f"additional_t_cond, want {rows} and {B} each")
    if img_shapes is None and (packed or image_rotary_emb is None or self.zero_cond_t):
        raise ValueError("img_shapes: got None, want the pictures of every sample, target first")

    # how many tokens has each sample? img_shapes tell, but beside a caller's own positions a joint mask does
    masks_tell = image_rotary_emb is not None and attention_mask is not None
    shapes, img_lens = None, [img_len] * B
    if img_shapes is not None:
        shapes = sample_shapes(img_shapes, B, None if packed or masks_tell else img_len)
        if not masks_tell:
            img_lens = image_lens(shapes)
    if txt_lens is None:
        txt_lens = [txt_len] * B
    if packed:
        want = sum(img_lens), sum(txt_lens)
        fits = want == (img_len, txt_len)
    else:
        want = max(img_lens), max(txt_lens, default=0)
        fits = want[0] <= img_len and want[1] <= txt_len and len(txt_lens) == B
    if not fits or min(txt_lens) < 0:
        raise ValueError(f"hidden_states: got rows of {img_len} image and {txt_len} text tokens, want {want[0]} and "
                         f"{want[1]} for img_shapes {shapes} and {B} txt_seq_lens, {txt_lens}")

    # which of a row's tokens are no pads?
    img_mask_BI = txt_mask_BT = None # packed: all
    if not packed:
        mask_BS = torch.cat([lens_mask(txt_lens, txt_len, device), lens_mask(img_lens, img_len, device)], dim=1)
        if masked:
            mask_BS &= joint_mask(encoder_hidden_states_mask, attention_mask, B, txt_len, img_len)
        txt_mask_BT, img_mask_BI = mask_BS.split([txt_len, img_len], dim=1)

    # stock: equal sizes without pads need nothing of this file
    if (not packed and image_rotary_emb is None and attention_mask is None and img_lens[0] == img_len
            and not should_use_multi_resolution_mode(shapes)):
        # stock is silent where the table of positions ends: sample_freqs raises
        sample_freqs(self.pos_embed, shapes[0], txt_len, device)
        if masked or txt_seq_lens is not None: # in pads NaN would spoil stock's attention: 0 * NaN is NaN
            encoder_hidden_states = encoder_hidden_states.masked_fill(~txt_mask_BT[..., None], 0)
        else:
            txt_mask_BT = None
        return type(self).forward(
            self, hidden_states, encoder_hidden_states, txt_mask_BT, timestep, shapes, guidance,
            attention_kwargs=attention_kwargs, controlnet_block_samples=controlnet_block_samples,
            additional_t_cond=additional_t_cond, return_dict=return_dict)
    if guidance is not None or controlnet_block_samples is not None:
        raise ValueError("guidance, controlnet_block_samples: got one, want None in a batch of mixed sizes")
    if own_kwargs.get("scale", 1) != 1 and self.gradient_checkpointing and torch.is_grad_enabled():
        raise ValueError(f"scale: got {own_kwargs['scale']} beside gradient checkpointing, whose second pass would "
                         "have none; want 1, or no checkpointing")

    # positions: each sample's own, or the caller's -> (N, R) of every sample, or of every row
    if image_rotary_emb is None:
        img_freqs, txt_freqs = zip(*[sample_freqs(self.pos_embed, s, n, device) for s, n in zip(shapes, txt_lens)])
    else:
        img_freqs, txt_freqs = check_rotary_emb(
            image_rotary_emb, rows, img_len, txt_len, self.config.attention_head_dim // 2)
        if image_rotary_emb[0].ndim > image_rotary_emb[1].ndim and (img_freqs != img_freqs[:1]).any():
            raise ValueError(f"image_rotary_emb: got text frequencies ({txt_len}, R) for pictures of different sizes, "
                             f"want ({B}, {txt_len}, R), as text begins where a sample's own pictures end")
    # without the pads samples are shorter. Their first tokens are the target
    if not packed:
        img_lens, txt_lens = img_mask_BI.sum(1).tolist(), txt_mask_BT.sum(1).tolist()
    img_parts = [[n] for n in img_lens]
    if self.zero_cond_t:
        for b, parts in enumerate(img_parts):
            target = prod(shapes[b][0])
            if target > img_len:
                raise ValueError(f"hidden_states: got {img_len} image tokens, want at least the targets of {shapes}")
            if not packed:
                target = int(img_mask_BI[b, :target].sum())
            parts[:] = target, parts[0] - target
    output = packed_forward(
        self, drop_pads(hidden_states, img_mask_BI), drop_pads(encoder_hidden_states, txt_mask_BT),
        drop_pads(img_freqs, img_mask_BI), drop_pads(txt_freqs, txt_mask_BT), img_parts, txt_lens, timestep,
        additional_t_cond, attention_kwargs=own_kwargs)
    if not packed: # back to where the tokens stood; the pads are 0
        padded_BIC = output.new_zeros(B, img_len, output.shape[-1])
        padded_BIC[img_mask_BI] = output[0]
        output = padded_BIC
    return Transformer2DModelOutput(sample=output) if return_dict else (output,)

def patch_qwen_forward_for_multi_resolution(model):
    """Give this QwenImageTransformer2DModel (not its class, not other models) model_forward, and its blocks
    block_forward. Parameters, state dict, config and save_pretrained stay stock's. Idempotent. Returns the model.
    ValueError if something else has replaced a forward before: offload and compile come after the patch."""
    if hasattr(model, "multi_resolution"): # patched already, and hooks may have come since
        return model
    # hooks replace forward on the instance, too: patched over, they would no longer run
    if any("forward" in m.__dict__ for m in [model, *model.transformer_blocks]):
        raise ValueError("patch: got a model with hooks on its forward, want the patch first, then offload or hooks")
    model.forward = MethodType(model_forward, model) # bound methods, not closures: copy.deepcopy follows them
    model.multi_resolution = True
    for block in model.transformer_blocks:
        block.forward = MethodType(block_forward, block)
    return model

def patch_qwen_model_for_multi_resolution(model):
    """The one call that users need: attention processors and forward. Idempotent. Returns the model."""
    patch_qwen_forward_for_multi_resolution(model)
    for block in model.transformer_blocks:
        if not isinstance(block.attn.processor, QwenDoubleStreamAttnProcessor2_0_MultiRes):
            processor = QwenDoubleStreamAttnProcessor2_0_MultiRes()
            processor.__dict__.update(block.attn.processor.__dict__) # a backend that was chosen before the patch
            block.attn.set_processor(processor)
    return model

# ---- shapes ----------------------------------------------------------------------------------------------------------

def sample_shapes(img_shapes, batch, img_len=None):
    """img_shapes in any accepted form -> one list of (frames, h, w) per sample, target first:

        [[(1, h, w), (1, h, w)], [(1, h, w)]]   the pictures of each sample
        [[(1, h, w), (1, h, w)]]                one entry serves all samples
        [(1, h, w), (1, h, w)]                  flat: one picture a sample, or one for all samples
        tensor (B, N, 3)                        as the first; pictures without area are padding, and dropped

    ValueError if the number of entries is not `batch`, or if the longest of a flat list has not img_len tokens."""
    def as_list(x):
        return x.tolist() if torch.is_tensor(x) else list(x)

    shapes, flat = [], False
    for pictures in map(as_list, as_list(img_shapes)):
        if not isinstance(pictures[0], (list, tuple, Tensor)):
            pictures, flat = [pictures], True
        shapes.append([tuple(map(int, picture)) for picture in pictures if prod(picture) > 0])
    if len(shapes) not in (1, batch) or not all(shapes):
        raise ValueError(f"img_shapes: got {len(shapes)} entries, want {batch}, each with at least one (1, h, w)")
    longest = max(image_lens(shapes))
    if flat and img_len not in (None, longest):
        raise ValueError(f"img_shapes: got one picture a sample, of at most {longest} tokens, want the {img_len} of "
                         "hidden_states; list a sample's pictures as [[(1, h, w), (1, h, w)], ...]")
    return shapes if len(shapes) == batch else shapes * batch

def should_use_multi_resolution_mode(img_shapes):
    """True if the samples' lists of (frames, h, w) differ. Equal token counts are not enough: 8x32 is not 16x16."""
    return any(s != img_shapes[0] for s in img_shapes)

def extract_batch_field(embeddings, key, batch_idx):
    """Sample batch_idx's value of embeddings[key]: a list's item, a tensor's element as a python number (a 1-element
    tensor serves all samples), a scalar as it is. KeyError names an unknown key."""
    if key not in embeddings:
        raise KeyError(f"{key}: not in embeddings, which have {sorted(embeddings)}")
    value = embeddings[key]
    if torch.is_tensor(value):
        return value.item() if value.numel() == 1 else value[batch_idx].item()
    return value[batch_idx] if isinstance(value, (list, tuple)) else value

def get_image_shapes_multi_resolution(embeddings, batch_size):
    """Per sample [(1, h, w), ...] in tokens, target first, from `img_shapes`, or rebuilt from pixels (16 a token):
    height, width; height_control, width_control; and n_controls further ones height_control_1, ... (without n_controls,
    as many as there are keys). Each field may be per sample, so the number of pictures may differ; None: no picture."""
    if embeddings.get("img_shapes") is not None:
        return sample_shapes(embeddings["img_shapes"], batch_size)
    n_keys = sum(key.startswith("height_control_") for key in embeddings)
    shapes = []
    for b in range(batch_size):
        further = int(extract_batch_field(embeddings, "n_controls", b)) if "n_controls" in embeddings else n_keys
        names = [""] + [f"_control_{i + 1}" for i in range(further)]
        if "height_control" in embeddings:
            names.insert(1, "_control")
        shapes.append([])
        for name in names:
            height = extract_batch_field(embeddings, "height" + name, b)
            width = extract_batch_field(embeddings, "width" + name, b)
            if height is not None:
                shapes[b].append((1, int(height) // 16, int(width) // 16))
    return shapes

# ---- batches ---------------------------------------------------------------------------------------------------------

def pad_latents_for_multi_res(samples, max_len=None):
    """Right-pad a list of (N_b, C) tensors with zeros -> (B, N, C), bool mask (B, N). N: max_len, or the longest
    sample. ValueError on an empty list, other ranks, differing channels, or a sample longer than max_len."""
    if not samples or any(s.ndim != 2 or s.shape[1] != samples[0].shape[1] for s in samples):
        raise ValueError(f"samples: got shapes {[tuple(s.shape) for s in samples]}, want at least one, all (N, C)")
    lens = [len(s) for s in samples]
    max_len = max(lens) if max_len is None else max_len
    if max(lens) > max_len:
        raise ValueError(f"samples: got {max(lens)} tokens, want at most max_len = {max_len}")
    padded = samples[0].new_zeros(len(samples), max_len, samples[0].shape[1])
    for row, s in zip(padded, samples): # F.pad and stack would write each sample twice
        row[:len(s)] = s
    return padded, lens_mask(lens, max_len, padded.device)

def run_packed(model, latents, prompt_embeds, timesteps, img_shapes):
    """One forward pass over samples of any sizes, without a pad. Lists of (I_b, C) and (T_b, C), (B,) timesteps,
    per-sample shapes -> list of (I_b, C_out)."""
    out = model(torch.cat(latents)[None], torch.cat(prompt_embeds)[None], timestep=timesteps, img_shapes=img_shapes,
                txt_seq_lens=[len(p) for p in prompt_embeds], return_dict=False)[0]
    return list(out[0].split([len(x) for x in latents]))

def run_padded(model, latents, prompt_embeds, timesteps, img_shapes):
    """The same numbers by padding to the longest sample: the reference, and what other models' code understands."""
    padded, _ = pad_latents_for_multi_res(latents)
    prompts, prompt_mask = pad_latents_for_multi_res(prompt_embeds)
    out = model(padded, prompts, prompt_mask, timesteps, img_shapes, return_dict=False)[0]
    return [row[:len(x)] for row, x in zip(out, latents)]

def plan_packs(lengths, max_tokens, padded=False):
    """Indices of `lengths` (tokens) in few packs of at most max_tokens each, longest first; a sample that is longer by
    itself makes a pack of its own. Packed: best fit. Padded: neighbours in length together, as each costs as much as
    the longest. A pure function: all processes plan alike."""
    packs, rooms = [], [] # rooms: sorted (tokens that are left, number of the pack)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(rooms, (lengths[i],)) # the fullest pack that has room
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = max_tokens, len(packs)
            packs.append([])
        packs[number].append(i)
        if padded: # each row costs as much as the first, which is the longest
            longest = lengths[packs[number][0]]
            room = max_tokens if longest * (len(packs[number]) + 1) <= max_tokens else -1
        else:
            room -= lengths[i]
        insort(rooms, (room, number))
    return packs
