"""
Let one batch of Qwen-Image-Edit hold pictures of different sizes.

Stock diffusers takes the rotary positions of the whole batch from its first sample and merely warns; its 2511 model
(zero_cond_t) cannot hold a ragged batch at all. After

    patch_qwen_model_for_multi_resolution(transformer)

every mixture of sizes, picture counts and prompt lengths gives the numbers of the stock model run one sample at a time
($ pytest test_consistency.py). Weights, names and old calls stay as they are. forward() can be called in four modes:

    stock        equal sizes, no new argument     diffusers' own code, bit for bit
    packed       txt_seq_lens=[T_0, ...]          (1, sum I, C) rows: all samples in one row, no pads and no mask
    padded       img_shapes differ                (B, I, C) rows, whose pads are dropped: what is left runs packed
    precomputed  image_rotary_emb=(img, txt)      as padded, with positions and mask made by the caller

So beside stock's there is one way to compute: packed_forward. Its parts stand before it, from positions to blocks.
This module is pure: it knows no files, flags or ranks, and imports nothing of ours, so you can copy it into another
project. Shape suffixes: B samples, I image tokens (target first, then controls), T text tokens, S = T + I, C channels,
H heads, D head dim, R = D/2 complex rotations, N tokens of either kind.
"""
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from types import MethodType

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
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
    return rotate(x, real_freqs("rotary frequencies", freqs_cis, B, S, D // 2))

def rotate(x, freqs):
    """x: (B, S, H, D); freqs: real_freqs', (B, S, D) -> x's shape and dtype."""
    # (..., D) -> (..., R, 2): pairs are complex numbers, and a rotation is a product with one of length 1
    pairs, freqs = [t.unflatten(-1, (-1, 2)) for t in (x.float(), freqs[:, :, None])]
    if torch.compiler.is_compiling(): # the compiler fuses real numbers only
        (a, b), (cos, sin) = pairs.unbind(-1), freqs.unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(3).type_as(x)
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(freqs)).flatten(3).type_as(x)

def real_freqs(name, freqs, batch, n, half_dim):
    """Frequencies of n tokens, complex (N, R) or (B, N, R) -> (B, N, D) of cos, sin, cos, ..., as torch.compile cannot
    fuse complex numbers (and takes a last dimension of 2 for a batch of 2). ValueError if they are something else."""
    if not torch.is_tensor(freqs):
        raise ValueError(f"{name}: got a {type(freqs).__name__}, want a complex tensor: torch.complex(cos, sin)")
    want = (n, half_dim), (batch, n, half_dim)
    if not freqs.is_complex() or tuple(freqs.shape) not in want:
        raise ValueError(f"{name}: got shape {tuple(freqs.shape)}, {freqs.dtype}, want {want[0]} or {want[1]}, complex")
    return torch.view_as_real(freqs.expand(batch, -1, -1)).flatten(-2)

def real_pair(image_rotary_emb, batch, img_len, txt_len, half_dim):
    """A pair (img, txt) of complex frequencies -> both as real_freqs, the text's first, as in joint rows. ValueError if
    one does not fit: if only their sum did, text positions that are too many would serve image tokens."""
    pair = image_rotary_emb if isinstance(image_rotary_emb, (list, tuple)) else [image_rotary_emb]
    if len(pair) != 2:
        raise ValueError(f"image_rotary_emb: got {len(pair)}, want 2 complex tensors, (img, txt)")
    img, txt = [real_freqs("image_rotary_emb", freqs, batch, n, half_dim) for freqs, n in zip(pair, (img_len, txt_len))]
    return txt, img

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

# ---- attention -------------------------------------------------------------------------------------------------------
# A packed row needs no mask: torch's variable-length kernel is told where each sample begins. (FlexAttention has no
# backward pass on a CPU, and compiles anew for each layout. Nested tensors gained nothing.)

def use_fused(x):
    """Whether packed rows use fused kernels: on CUDA, where they save memory traffic and round less often than stock.
    On a CPU the results equal stock's bit for bit."""
    return x.is_cuda

@dataclass
class Segments:
    """A row of tokens as consecutive segments: one a sample, or in zero_cond_t models one for a sample's target and one
    for its controls. All tokens of a segment share one modulation vector, i.e. one row of `temb`."""
    lens: list # tokens of each segment
    longest: int
    begins: Tensor # (segments + 1,) int32, where each segment begins, and the end
    temb_rows: list # the row of temb of each segment
    index: Tensor # (tokens,) the row of temb of each token
    order: Tensor | None = None # (tokens,) for each the place from which attention takes it; None: it stands there
    inverse: Tensor | None = None # (tokens,) the way back

@dataclass
class Layout:
    """Where the samples stand in packed rows, made once per forward pass. A compiled block reads no list of it: one of
    another length would trigger a recompilation."""
    img: Segments # the image tokens of each sample
    txt: Segments # its text tokens
    joint: Segments # both, [text 0, image 0, text 1, image 1, ...], whereas blocks hold [all text, all image]
    img_parts: Segments # img, or in zero_cond_t models targets and controls apart
    one_kernel: bool # has_varlen
    last: bool = False # the last block: its text output is not used

def has_varlen(x):
    """torch's variable-length attention is flash attention: CUDA, half precision, Ampere or newer, and a torch that was
    built with it (on Windows none is). A backend chosen through diffusers, for all models or in a `with` block, takes
    precedence."""
    return (x.is_cuda and torch.version.hip is None # (which lacks it on many cards)
            and torch.backends.cuda.is_flash_attention_available()
            and x.dtype in (torch.bfloat16, torch.float16)
            and torch.cuda.get_device_capability(x.device) >= (8, 0)
            and _AttentionBackendRegistry.get_active_backend()[0] == AttentionBackendName.NATIVE)

def send(x, device):
    """-> x on the device. Only for CUDA the host does not wait: on MPS such a copy may read memory that is free again
    (pytorch issue 189690)."""
    return x.to(device, non_blocking=torch.device(device).type == "cuda")

def make_segments(lens, temb_rows, device):
    begins = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
    index = torch.tensor(temb_rows).repeat_interleave(torch.tensor(lens), output_size=sum(lens))
    # made once per forward pass: made in each block they would wait for the GPU 60 times
    return Segments(lens, max(lens), send(begins, device), temb_rows, send(index, device))

def make_layout(img_lens, txt_lens, targets, x):
    """-> Layout, for rows of x's device and dtype. img_lens, txt_lens: tokens of each sample; targets: for zero_cond_t
    models image tokens of each sample's target, its first ones, else None."""
    samples = list(range(len(txt_lens)))
    joint_lens = [t + i for t, i in zip(txt_lens, img_lens)]
    img, txt, joint = [make_segments(lens, samples, x.device) for lens in (img_lens, txt_lens, joint_lens)]
    img_parts = img
    if targets is not None: # the target is at its timestep (row b of temb), its controls are at t = 0 (row B + b)
        lens, temb_rows = [], []
        for b, target in enumerate(targets):
            lens += [target, img_lens[b] - target]
            temb_rows += [b, len(samples) + b]
        img_parts = make_segments(lens, temb_rows, x.device)
    if len(samples) > 1: # (one sample's text and image are in order already)
        # sorted by sample (stable: equal ones keep their order), each sample's text stands before its image
        joint.order = torch.cat([txt.index, img.index]).argsort(stable=True)
        joint.inverse = joint.order.argsort()
    return Layout(img, txt, joint, img_parts, has_varlen(x))

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
    the processor's, for dispatch_attention_fn."""
    joint = layout.joint
    k, v = [reorder(x, joint.order, joint.inverse) for x in (k, v)]
    queries = layout.img
    if not layout.last:
        q, queries = reorder(q, joint.order, joint.inverse), joint
    if layout.one_kernel and not any(options.values()):
        out = varlen_attn(q[0], k[0], v[0], queries.begins, joint.begins, queries.longest, joint.longest)[None]
    else:
        out = attention_by_sample(q, k, v, queries, joint, options)
    # (an order of None would do for the last block, too, but torch.compile would then recompute others by its graph)
    return out if layout.last else reorder(out, layout.joint.inverse, layout.joint.order)

@torch.compiler.disable # eager between two compiled halves of the block, which read no list
def attention_by_sample(q, k, v, queries, joint, options):
    outs = []
    for qkv in zip(q.split(queries.lens, 1), k.split(joint.lens, 1), v.split(joint.lens, 1)):
        outs.append(dispatch_attention_fn(*qkv, **options))
    return torch.cat(outs, dim=1)

def joint_mask(txt_mask, attention_mask, batch, txt_len, img_len):
    """The two masks that a caller may give, of the text and of [text, image], (B, N) or (B, 1, 1, N), of 0 and 1 in any
    dtype -> one bool (B, 1, 1, S) for both; None if there is neither. An additive mask (0 / -inf) would be read upside
    down, so it is a ValueError."""
    both = None
    for name, mask, width in (("encoder_hidden_states_mask", txt_mask, txt_len),
                              ("attention_mask", attention_mask, txt_len + img_len)):
        if mask is None:
            continue
        if tuple(mask.shape) not in ((batch, width), (batch, 1, 1, width)):
            raise ValueError(f"{name}: got shape {tuple(mask.shape)}, want {(batch, width)}")
        if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
            raise ValueError(f"{name}: got values other than 0 and 1 ({mask.dtype}), want 1 = attend, 0 = pad")
        mask_B11S = F.pad(mask.bool().reshape(batch, 1, 1, width), (0, txt_len + img_len - width), value=True)
        both = mask_B11S if both is None else both & mask_B11S
    return both

# a class because diffusers looks at the signature of __call__ and drops every argument that is not named there
class QwenDoubleStreamAttnProcessor2_0_MultiRes(QwenDoubleStreamAttnProcessor2_0):
    """Drop-in for diffusers' processor, bit-equal to it where both can run. In addition it takes 3D (per-sample)
    frequencies and a joint attention_mask over [text, image]; and from block_forward packed rows, with their Layout.
    Inherits the backend that model.set_attention_backend() writes on it."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, encoder_hidden_states_mask=None,
                 attention_mask=None, image_rotary_emb=None, layout=None):
        """hidden_states (B, I, C), encoder_hidden_states (B, T, C) -> the same after attention, the text as None in the
        last block. Packed rows have no masks, and image_rotary_emb is real_pair's."""
        if encoder_hidden_states is None:
            raise ValueError("encoder_hidden_states: got None, want the text stream (B, T, C)")
        img, txt = hidden_states, encoder_hidden_states
        (batch, img_len), txt_len = img.shape[:2], txt.shape[1]
        text_out = layout is None or not layout.last
        head_dim = attn.inner_dim // attn.heads

        def heads(x, norm=None):
            x = x.unflatten(-1, (-1, head_dim)) # -1: a tensor-parallel rank holds a part of the heads
            if norm is None:
                return x
            if layout is not None and use_fused(x): # diffusers' takes eight kernels in fp32
                return F.rms_norm(x, (head_dim,), norm.weight, norm.eps)
            return norm(x)

        # queries, keys and values of both streams, each (B, tokens, H, D); then of their joint row [text, image]
        q, k, v = heads(attn.to_q(img), attn.norm_q), heads(attn.to_k(img), attn.norm_k), heads(attn.to_v(img))
        if text_out:
            q = torch.cat([heads(attn.add_q_proj(txt), attn.norm_added_q), q], dim=1)
        k = torch.cat([heads(attn.add_k_proj(txt), attn.norm_added_k), k], dim=1)
        v = torch.cat([heads(attn.add_v_proj(txt)), v], dim=1)
        if image_rotary_emb is not None:
            pair = image_rotary_emb
            if layout is None:
                pair = real_pair(image_rotary_emb, batch, img_len, txt_len, head_dim // 2)
            freqs = torch.cat(pair, dim=1) # of [text, image]; in the last block q is the image alone
            q, k = rotate(q, freqs[:, -q.shape[1]:]), rotate(k, freqs)
        options = dict(backend=self._attention_backend, parallel_config=self._parallel_config)
        if layout is not None:
            out = packed_attention(q, k, v, layout, **options)
        else: # a stock call, or by hand
            mask_B11S = joint_mask(encoder_hidden_states_mask, attention_mask, batch, txt_len, img_len)
            out = dispatch_attention_fn(q, k, v, attn_mask=mask_B11S, **options)
        # contiguous, without which bf16 takes another GEMM path than stock and differs by 7e-3
        out = out.flatten(2, 3).to(q.dtype)
        txt_out, img_out = out.split([txt_len, img_len], dim=1) if text_out else (None, out)
        img_out = img_out.contiguous()
        for layer in attn.to_out: # a linear one, and dropout
            img_out = layer(img_out)
        return img_out, attn.to_add_out(txt_out.contiguous()) if text_out else None

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

def multiply_add(segments, x, y, z):
    """x * y + z -> (1, N, C). Each of them is tokens, (1, N, C), or modulation vectors, (rows of temb, C), of which
    every segment takes its row. Eager segment by segment, in stock's arithmetic; compiled at once."""
    compiling = torch.compiler.is_compiling()

    def parts(t):
        if t.ndim == 3:
            return [t.squeeze(0)] if compiling else t.squeeze(0).split(segments.lens)
        if compiling: # a gather, which the compiler fuses with the sum. Eager it would cost memory and one more kernel
            return [RowsByIndex.apply(t, segments.index)]
        rows = t.unbind()
        return [rows[row] for row in segments.temb_rows]

    sums = []
    for x, y, z in zip(parts(x), parts(y), parts(z)):
        sums.append(torch.addcmul(z, x, y) if use_fused(x) else x * y + z)
    whole = torch.cat(sums) if len(sums) > 1 else sums[0] # (cat would copy a single one)
    return whole[None]

def block_forward(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, image_rotary_emb=None,
                  joint_attention_kwargs=None, modulate_index=None):
    """QwenImageTransformerBlock.forward, and the same block for packed rows, whose modulation changes from segment to
    segment. modulate_index: stock's own, or a Layout, as stock's blocks have no other free argument. On a CPU it keeps
    stock's arithmetic, so that bf16 stays bit-equal. It replaces block.forward per instance, so every hook on
    block.__call__ (checkpointing, offload, FSDP, compile, peft) still fires."""
    if not isinstance(modulate_index, Layout):
        return type(self).forward(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb,
                                  image_rotary_emb, joint_attention_kwargs, modulate_index)
    if not isinstance(self.attn.processor, QwenDoubleStreamAttnProcessor2_0_MultiRes):
        raise ValueError(f"attention: got {type(self.attn.processor).__name__}, which cannot attend within samples; "
                         "want patch_qwen_model_for_multi_resolution, which sets the processors too")
    img, txt, layout = hidden_states, encoder_hidden_states, modulate_index
    # modulation of attention (1) and MLP (2), from each timestep's row of temb
    img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = self.img_mod(temb).chunk(6, dim=-1)
    if self.zero_cond_t: # its rows are [own timesteps, zeros]; text always takes its sample's own
        temb = temb.chunk(2)[0]
    txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = self.txt_mod(temb).chunk(6, dim=-1)
    img_attn, txt_attn = self.attn(
        hidden_states=multiply_add(layout.img_parts, self.img_norm1(img), 1 + img_scale1, img_shift1),
        encoder_hidden_states=multiply_add(layout.txt, self.txt_norm1(txt), 1 + txt_scale1, txt_shift1),
        image_rotary_emb=image_rotary_emb, layout=layout, **(joint_attention_kwargs or {}))
    img = multiply_add(layout.img_parts, img_gate1, img_attn, img)
    img_mlp = self.img_mlp(multiply_add(layout.img_parts, self.img_norm2(img), 1 + img_scale2, img_shift2))
    img = multiply_add(layout.img_parts, img_gate2, img_mlp, img)
    if not layout.last: # nobody reads the last block's text
        txt = multiply_add(layout.txt, txt_gate1, txt_attn, txt)
        txt_mlp = self.txt_mlp(multiply_add(layout.txt, self.txt_norm2(txt), 1 + txt_scale2, txt_shift2))
        txt = multiply_add(layout.txt, txt_gate2, txt_mlp, txt)
    if img.dtype == torch.float16: # as stock
        img, txt = img.clip(-65504, 65504), txt.clip(-65504, 65504)
    return txt, img

# ---- model -----------------------------------------------------------------------------------------------------------

def blocks_of(transformer):
    """The transformer's blocks, in the order in which they run, as the ModuleList that holds them. Whatever works block
    by block asks here: packing, recomputing, quantizing, offloading, sharding, compiling, estimates."""
    return transformer.transformer_blocks

def checkpoint_blocks(model, blocks=None, **options):
    """Gradient checkpointing: the backward pass recomputes the first `blocks` blocks (None: all) -> their number.
    options: torch.utils.checkpoint's."""
    recomputed = set(blocks_of(model)[:blocks])

    def run(block, *args):
        if block in recomputed:
            return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False, **options)
        return block(*args)
    model.enable_gradient_checkpointing(run)
    return len(recomputed)

@apply_lora_scale("attention_kwargs") # as stock's forward: takes "scale" out of them, and applies it during the call
def packed_forward(model, img, txt, freqs, layout, timestep, additional_t_cond, attention_kwargs):
    """Embedding, blocks and output of packed rows -> (1, sum I, C_out)."""
    # J: width of the text encoder; E: width of the model
    #
    #   img            (1, sum I, C)                  target 0, its controls, target 1, its controls, ...
    #   txt            (1, sum T, J)                  prompt 0, prompt 1, ...
    #   freqs          (1, sum T, D), (1, sum I, D)   real_pair's; positions begin anew with each sample
    #   timestep       (B,) or (1,)                   from 0 to 1; additional_t_cond: likewise, or None
    #   temb           (B, E), or zero_cond_t (2B, E) below the samples' rows B rows at t = 0, for the controls
    #   img, txt       (1, sum I, E), (1, sum T, E)   in the blocks
    #   scale, shift   (B, E) or (2B, E)              of a modulation, as temb; each segment takes its row
    #   q, k, v        (1, S, H, D)                   S = sum T + sum I: all text, all image; in attention: text 0,
    #                                                 image 0, text 1, image 1, ...
    B = len(layout.img.lens)
    img = model.img_in(img)
    txt = model.txt_in(model.txt_norm(txt))
    timestep = timestep.to(img.dtype).expand(B)
    if model.zero_cond_t: # 2511: the controls are clean pictures, and modulated as such
        timestep = torch.cat([timestep, timestep * 0])
        if additional_t_cond is not None:
            additional_t_cond = additional_t_cond.expand(B).repeat(2)
    temb = model.time_text_embed(timestep, img, additional_t_cond)
    blocks = blocks_of(model)
    for block in blocks:
        layout = replace(layout, last=block is blocks[-1])
        args = img, txt, None, temb, freqs, attention_kwargs, layout
        if torch.is_grad_enabled() and model.gradient_checkpointing:
            txt, img = model._gradient_checkpointing_func(block, *args)
        else:
            txt, img = block(*args)
    # AdaLayerNormContinuous, by sample. zero_cond_t or not, it takes the sample's own timestep (row b)
    scale, shift = model.norm_out.linear(model.norm_out.silu(temb).to(img.dtype)).chunk(2, dim=-1)
    return model.proj_out(multiply_add(layout.img, model.norm_out.norm(img), 1 + scale, shift))

def places_of(valid_BN, device):
    """-> (tokens,) the places of valid tokens among the B * N of all rows; None if there are no pads to drop."""
    if valid_BN.all():
        return None
    return send(torch.from_numpy(np.flatnonzero(valid_BN)), device)

def drop_pads(x_BNC, places):
    """-> (1, tokens, C), which knows nothing of what stood in the pads, NaN too."""
    row = x_BNC.flatten(0, 1)[None]
    return row if places is None else row.index_select(1, places)

def padded_forward(model, img, txt, txt_mask, txt_lens, timestep, img_shapes, attention_mask, image_rotary_emb,
                   additional_t_cond, attention_kwargs):
    """model_forward's answer (B, I, C_out) to padded and precomputed calls: the pads are dropped, what is left runs
    packed, and the answers go back to their places. Arguments as there."""
    (batch, img_len), txt_len, device = img.shape[:2], txt.shape[1], img.device
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

    # on the host, as the lengths of packed rows have to be known there
    img_valid_BI = lens_mask("img_shapes for hidden_states", img_lens, batch, img_len)
    txt_valid_BT = lens_mask("txt_seq_lens", txt_lens, batch, txt_len)
    mask_B11S = joint_mask(txt_mask, attention_mask, batch, txt_len, img_len)
    if mask_B11S is not None: # the host waits for it
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
                         additional_t_cond, attention_kwargs=attention_kwargs)
    if img_places is not None: # back to their places, with 0 at the pads
        out = out.new_zeros(1, batch * img_len, out.shape[-1]).index_copy(1, img_places, out)
    return out.view(batch, img_len, -1)

def model_forward(self, hidden_states, encoder_hidden_states=None, encoder_hidden_states_mask=None, timestep=None,
                  img_shapes=None, guidance=None, attention_kwargs=None, controlnet_block_samples=None,
                  additional_t_cond=None, return_dict=True, *, image_rotary_emb=None, txt_seq_lens=None):
    """QwenImageTransformer2DModel.forward with four modes (see the top of this file). J: width of the text encoder.

    hidden_states               (B, I, C): of each sample its target and its controls, then pads
                                packed: (1, sum I_b, C)
    encoder_hidden_states       (B, T, J); packed: (1, sum T_b, J)
    encoder_hidden_states_mask  (B, T) bool, int or 0/1 float, may have holes; packed: None
    timestep                    (B,) or (1,), from 0 to 1; packed: (B,); additional_t_cond: likewise, or None
    img_shapes                  per sample [(frames, h, w), ...] in tokens, target first; one entry serves all samples
    attention_kwargs            "scale": of the LoRA; "attention_mask": (B, S) or (B, 1, 1, S) over [text, image], for
                                padded and precomputed calls
    txt_seq_lens                [T_0, ...] for one row makes the call packed. For B rows, or beside a mask, these are
                                the lengths that older diffusers wanted; beside a mask they are not read
    image_rotary_emb            (img, txt) complex frequencies, each (N, R) or (B, N, R), which win over img_shapes;
                                packed: (sum N_b, R)
        freqs = [sample_freqs(model.pos_embed, shapes, txt_len, device) for shapes in img_shapes] # T = txt_len
        img_freqs_BIR, _ = pad_latents_for_multi_res([img for img, _ in freqs])
        image_rotary_emb = img_freqs_BIR, torch.stack([txt for _, txt in freqs])

    Returns hidden_states' shape, with C_out channels. Rows at pads are exactly 0, and what stands in the pads (NaN too)
    changes nothing. ValueErrors name what was got and what was wanted.
    """
    img, txt, txt_mask = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
    (rows, img_len), txt_len = img.shape[:2], txt.shape[1]
    txt_lens = txt_seq_lens.tolist() if torch.is_tensor(txt_seq_lens) else txt_seq_lens
    kwargs = dict(attention_kwargs or {}) # a copy: the caller's stays as it is
    attention_mask = kwargs.pop("attention_mask", None)
    masked = attention_mask is not None or txt_mask is not None

    # is it packed? (a single masked row with a text length is not: older diffusers wanted that length)
    packed = txt_lens is not None and rows == 1 and not (masked and len(txt_lens) == 1)
    if packed and masked:
        raise ValueError("packed: got a mask, want none (packed rows have no pads)")
    B = len(txt_lens) if packed else rows
    per_sample = [t.numel() for t in (timestep, additional_t_cond) if t is not None]
    allowed = {B} if packed else {B, 1} # one timestep may serve all rows
    if len(txt) != rows or not allowed.issuperset(per_sample):
        raise ValueError(f"batch: got {len(txt)} rows of text and {per_sample} timesteps and additional_t_cond, want "
                         f"{rows} and {B} each")

    # stock: equal sizes without pads need nothing of this file
    if not packed and attention_mask is None and image_rotary_emb is None:
        shapes = sample_shapes(img_shapes, rows)
        if not should_use_multi_resolution_mode(shapes) and image_lens(shapes)[0] == img_len:
            # stock is silent where the table of positions ends: sample_freqs raises
            sample_freqs(self.pos_embed, shapes[0], txt_len, img.device)
            if txt_mask is None and txt_lens is not None:
                txt_mask = lens_mask("txt_seq_lens", txt_lens, rows, txt_len)
                txt_mask = None if txt_mask.all() else torch.from_numpy(txt_mask).to(img.device)
            if txt_mask is not None: # NaN at its pads would spoil stock's attention: 0 * NaN is NaN
                txt_mask = joint_mask(txt_mask, None, rows, txt_len, img_len)[:, 0, 0, :txt_len]
                txt = txt.masked_fill(~txt_mask[..., None], 0)
            return type(self).forward(
                self, img, txt, txt_mask, timestep, shapes, guidance, attention_kwargs=attention_kwargs,
                controlnet_block_samples=controlnet_block_samples, additional_t_cond=additional_t_cond,
                return_dict=return_dict)

    if guidance is not None or controlnet_block_samples is not None:
        raise ValueError("guidance, controlnet_block_samples: got one, want None in a batch of mixed sizes")
    if kwargs.get("scale", 1) != 1 and self.gradient_checkpointing and torch.is_grad_enabled():
        raise ValueError(f"scale: got {kwargs['scale']} beside gradient checkpointing, whose second pass would have "
                         "none; want 1, or no checkpointing")

    if packed:
        shapes = sample_shapes(img_shapes, B)
        img_lens = image_lens(shapes)
        if (sum(txt_lens), sum(img_lens)) != (txt_len, img_len):
            raise ValueError(f"packed: got {txt_len} text and {img_len} image tokens, want {sum(txt_lens)} and "
                             f"{sum(img_lens)} for txt_seq_lens {txt_lens} and img_shapes {shapes}")
        if image_rotary_emb is None: # each sample has positions of its own
            pairs = [sample_freqs(self.pos_embed, s, n, img.device) for s, n in zip(shapes, txt_lens)]
            image_rotary_emb = [torch.cat(freqs) for freqs in zip(*pairs)]
        freqs = real_pair(image_rotary_emb, 1, img_len, txt_len, self.config.attention_head_dim // 2)
        targets = [prod(s[0]) for s in shapes] if self.zero_cond_t else None
        layout = make_layout(img_lens, txt_lens, targets, img)
        output = packed_forward(self, img, txt, freqs, layout, timestep, additional_t_cond, attention_kwargs=kwargs)
    else:
        output = padded_forward(self, img, txt, txt_mask, txt_lens, timestep, img_shapes, attention_mask,
                                image_rotary_emb, additional_t_cond, kwargs)
    return Transformer2DModelOutput(sample=output) if return_dict else (output,)

def patch_qwen_forward_for_multi_resolution(model):
    """Give this QwenImageTransformer2DModel (not its class, not other models) model_forward, and its blocks
    block_forward. Parameters, state dict, config and save_pretrained stay stock's. Idempotent. Returns the model.
    ValueError if something else has replaced a forward before: offload and compile come after the patch."""
    if hasattr(model, "multi_resolution"): # patched already, and hooks may have come since
        return model
    # hooks replace forward on the instance, too: patched over, they would no longer run
    if any("forward" in m.__dict__ for m in [model, *blocks_of(model)]):
        raise ValueError("patch: got a model with hooks on its forward, want the patch first, then offload or hooks")
    model.forward = MethodType(model_forward, model) # bound methods, not closures: copy.deepcopy follows them
    model.multi_resolution = True
    for block in blocks_of(model):
        block.forward = MethodType(block_forward, block)
    return model

def patch_qwen_model_for_multi_resolution(model):
    """The one call that users need: attention processors and forward. Idempotent. Returns the model."""
    patch_qwen_forward_for_multi_resolution(model)
    for block in blocks_of(model):
        if not isinstance(block.attn.processor, QwenDoubleStreamAttnProcessor2_0_MultiRes):
            processor = QwenDoubleStreamAttnProcessor2_0_MultiRes()
            processor.__dict__.update(block.attn.processor.__dict__) # a backend that was chosen before the patch
            block.attn.set_processor(processor)
    return model

# ---- shapes ----------------------------------------------------------------------------------------------------------

def image_lens(shapes):
    return [sum(map(prod, s)) for s in shapes]

def sample_shapes(img_shapes, batch):
    """img_shapes in any accepted form -> one list of (frames, h, w) per sample, target first. Accepted are such a list
    of lists, one list for all samples, a flat list of one picture a sample or one for all, and a tensor (B, N, 3),
    whose pictures without area are padding, and dropped. ValueError if there are none, or not `batch` of them."""
    def as_list(x):
        return x.tolist() if torch.is_tensor(x) else list(x)

    if img_shapes is None:
        raise ValueError("img_shapes: got None, want the pictures of every sample, target first")
    shapes = []
    for entry in as_list(img_shapes):
        entry = as_list(entry)
        pictures = entry if isinstance(entry[0], (list, tuple, Tensor)) else [entry]
        pictures = [tuple(map(int, picture)) for picture in pictures]
        if wrong := [picture for picture in pictures if len(picture) != 3]:
            raise ValueError(f"img_shapes: got a picture of {wrong[0]}, want (frames, h, w)")
        shapes.append([picture for picture in pictures if prod(picture) > 0])
    if len(shapes) not in (1, batch) or not all(shapes):
        raise ValueError(f"img_shapes: got {len(shapes)} entries, want {batch}, each with at least one (1, h, w)")
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
        names = [f"_control_{i + 1}" for i in range(further)]
        if "height_control" in embeddings:
            names.insert(0, "_control")
        shapes.append([])
        for name in ["", *names]:
            height, width = [extract_batch_field(embeddings, side + name, b) for side in ("height", "width")]
            if height is not None:
                shapes[b].append((1, int(height) // 16, int(width) // 16))
    return shapes

# ---- batches ---------------------------------------------------------------------------------------------------------

def lens_mask(name, lens, batch, width):
    """Lengths -> bool array (B, width) on the host: True up to each length. ValueError if they do not fit."""
    if len(lens) != batch or min(lens) < 0 or max(lens) > width:
        raise ValueError(f"{name}: got lengths {lens}, want {batch} from 0 to {width}")
    return np.arange(width) < np.array(lens)[:, None]

def pad_latents_for_multi_res(samples, max_len=None):
    """Right-pad a list of (N_b, C) tensors with zeros -> (B, N, C), bool mask (B, N). N: max_len, or the longest
    sample. ValueError on an empty list, other ranks, differing channels, or a sample longer than max_len."""
    if len({s.shape[1:] for s in samples}) != 1 or samples[0].ndim != 2:
        raise ValueError(f"samples: got shapes {[tuple(s.shape) for s in samples]}, want at least one, all (N, C)")
    lens = [len(s) for s in samples]
    max_len = max(lens) if max_len is None else max_len
    mask = lens_mask("samples for max_len", lens, len(samples), max_len)
    padded = samples[0].new_zeros(len(samples), max_len, samples[0].shape[1])
    for row, s in zip(padded, samples): # F.pad and stack would write each sample twice
        row[:len(s)] = s
    return padded, send(torch.from_numpy(mask), padded.device)

def run_packed(model, latents, prompt_embeds, timesteps, img_shapes):
    """One forward pass over samples of any sizes, without a pad. Lists of (I_b, C) and (T_b, C), (B,) timesteps,
    per-sample shapes -> list of (I_b, C_out)."""
    out = model(torch.cat(latents)[None], torch.cat(prompt_embeds)[None], timestep=timesteps, img_shapes=img_shapes,
                txt_seq_lens=[len(p) for p in prompt_embeds], return_dict=False)[0]
    return list(out[0].split([len(x) for x in latents]))

def plan_packs(lengths, max_tokens):
    """{sample: its tokens} -> lists of samples, in few packs of at most max_tokens each, longest first, by best fit; a
    sample that is longer by itself makes a pack of its own. A pure function: all processes plan alike."""
    packs, rooms = [], [] # rooms: sorted (tokens that are left, number of the pack)
    for sample in sorted(lengths, key=lengths.get, reverse=True): # (equal ones keep their order)
        place = bisect_left(rooms, (lengths[sample],)) # the fullest pack that has room
        if place == len(rooms):
            rooms.append((max_tokens, len(packs)))
            packs.append([])
        room, number = rooms.pop(place)
        packs[number].append(sample)
        insort(rooms, (room - lengths[sample], number))
    return packs
