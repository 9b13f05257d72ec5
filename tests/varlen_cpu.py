"""
A CPU kernel for torch's variable-length attention, which has none. The file is its own because importing it changes
torch, which has to be as users have it wherever the harness is: in every test, and in the processes that tests start.
"""
import torch
import torch.nn.attention.varlen as torch_varlen

def varlen_reference(q, k, v, cu_q, cu_k):
    """This is torch.nn.attention.varlen.varlen_attn in plain words, for tensors of (N, H, D)."""
    cut = lambda x, cu: [x[a:b].transpose(0, 1) for a, b in zip(cu, cu[1:])]
    return torch.cat([torch.nn.functional.scaled_dot_product_attention(*qkv).transpose(0, 1)
                      for qkv in zip(cut(q, cu_q), cut(k, cu_k), cut(v, cu_k))])

@torch_varlen._varlen_attn.register_kernel("cpu")
def varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, *_, **__):
    """It also asserts what the kernel of a card relies on."""
    assert q.ndim == 3 and cu_q.dtype == cu_k.dtype == torch.int32 and len(cu_q) == len(cu_k)
    assert (max_q, max_k, len(q), len(k)) == (cu_q.diff().max(), cu_k.diff().max(), cu_q[-1], cu_k[-1])
    return (varlen_reference(q, k, v, cu_q, cu_k).contiguous(), torch.zeros(q.shape[1], len(q)),
            torch.zeros(2, dtype=torch.uint64))

@torch_varlen._varlen_attn_backward.register_kernel("cpu")
def varlen_backward(grad, q, k, v, out, lse, cu_q, cu_k, *_, **__):
    """The softmax is computed again, as in the kernel of a card."""
    grads = [torch.empty_like(x) for x in (q, k, v)]
    for (a, b), (c, d) in zip(zip(cu_q, cu_q[1:]), zip(cu_k, cu_k[1:])):
        gr, qu, ke, va, ou = [x.transpose(0, 1).float() for x in (grad[a:b], q[a:b], k[c:d], v[c:d], out[a:b])]
        scale = q.shape[-1]**-0.5
        weights = (scale * qu @ ke.mT).softmax(-1)
        inner = scale * weights * (gr @ va.mT - (gr * ou).sum(-1, keepdim=True)) # of the softmax
        for x, there, value in zip(grads, ((a, b), (c, d), (c, d)), (inner @ ke, inner.mT @ qu, weights.mT @ gr)):
            x[slice(*there)] = value.transpose(0, 1)
    return tuple(grads)
