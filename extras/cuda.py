"""
--device cuda: what a card wants before the first tensor is on it.
"""
import contextlib
import os
from importlib.util import find_spec
from pathlib import Path

import torch


def problem(device, dtype):
    """Why torch cannot train or sample on this device in this dtype (default: bfloat16 on a card), or None."""
    try:
        torch.empty(0, device=device).cpu() # (meta has no numbers)
    except (RuntimeError, AssertionError) as e:
        return f"{device!r} cannot be used ({str(e).strip().splitlines()[0][:90]})"
    if (device.startswith("cuda") and torch.version.hip is None and dtype in (None, "bfloat16")
            and torch.cuda.get_device_capability(device) < (8, 0)):
        return (f"{torch.cuda.get_device_name(device)} has no bfloat16 attention; take an Ampere card (A100, RTX 30xx) "
                "or a newer one, or --dtype float32")


def too_large_for_cpu(args):
    """Why a large model should not go to the CPU, in float32, only because no GPU can be used; or None."""
    weights = [file.stat().st_size for file in Path(args.model).glob("*/*.safetensors")]
    small = args.model == "tiny" or (Path(args.model).exists() and sum(weights) < 4e9)
    if small or args.device or getattr(args, "plan", False) or torch.cuda.is_available():
        return None
    return (f"no usable GPU (torch {torch.__version__} is built for CUDA {torch.version.cuda or '-'}; CUDA 13 needs "
            "driver 580 or newer, see nvidia-smi); update the driver, install a torch that fits it, or give --device "
            "cpu")


def find_flash(capability):
    """The flash attention that torch can take instead of its own (FA2) on such a card, if its package is installed: FA3
    on Hopper, FA4 on data centre Blackwell. Not FA4 on sm_120, where it crashes (flash-attention issue 2860)."""
    for impl, package, major in (("FA3", "flash_attn_interface", 9), ("FA4", "flash_attn", 10)):
        known = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
        if capability[0] == major and impl in known and find_spec(package):
            return impl
    return None


def prepare(device, flash_attention):
    """Call it before the first tensor is on the device. flash_attention: auto or 2 -> words for the log."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        # every step has new sizes, which fragment memory; and pinned tensors are not rounded up to powers of two
        configure_allocator("expandable_segments:True,pinned_max_round_threshold_mb:1", "expandable_segments:True")
    # one family of kernels for stock, padded and packed calls, and no plan for every new shape, as cuDNN would make
    torch.backends.cuda.enable_cudnn_sdp(False)
    varlen = getattr(torch.nn.attention, "varlen", None)
    if hasattr(varlen, "_should_use_cudnn"): # torch after 2.13: five times slower on mixed lengths (issue 187770)
        varlen._should_use_cudnn = lambda *args, **kwargs: False
    torch._dynamo.config.recompile_limit = 64 # past it --compile would go on in eager, without a word
    impl = find_flash(torch.cuda.get_device_capability(device)) if flash_attention == "auto" else None
    if impl:
        torch.nn.attention.activate_flash_attention_impl(impl)
    return f"{torch.cuda.get_device_name(device)}, flash attention {(impl or 'FA2')[2:]}"


def configure_allocator(*choices):
    """Takes the first of these settings that this torch knows."""
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
    for settings in choices:
        with contextlib.suppress(RuntimeError, ValueError): # an older torch does not know every key
            return configure(settings)
