"""
Devices and processes: which device and dtype are used, how a card is set up before the first tensor is on it, how the
processes that torchrun has started meet, and that they agree.
"""
import contextlib
import os
from datetime import timedelta
from importlib.util import find_spec
from threading import Timer

import torch
import torch.distributed as dist

from common import InputError, first_line, flag_error, gather_objects, on_first_process, say, tell, world
from library.models import environment
from library.models.environment import MEETING
from library.models.hub import is_tiny

def check_device(flag, device):
    """flag_error if torch cannot compute on this device."""
    try:
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError) as e:
        other = "cpu" if device.startswith("cuda") else "cuda or cpu"
        flag_error(f"--{flag}: {device!r} cannot be used ({first_line(e)}); give {other}")

def find_devices(args):
    """Fills in devices and dtype. Refuses a device that cannot work."""
    refuse_cpu(args)
    default = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, device in vars(args).items():
        if not name.endswith("device"):
            continue
        device = device or default
        if device == "cuda": # each process its own
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        elif device.startswith("cuda") and world() > 1:
            flag_error(f"--{name}: {device} for all processes; give cuda, which is one for each")
        check_device(name, device)
        check_card(name, device, args.dtype)
        setattr(args, name, device)
    args.dtype = args.dtype or ("float32" if args.device.startswith("cpu") else "bfloat16")

def start_processes(args):
    """Lets the processes that torchrun has started find each other. Objects are sent over the CPU, gradients over
    --device."""
    import diffusers
    import transformers
    for package in (diffusers, transformers): # a bar for each small model would hide ours
        package.utils.logging.disable_progress_bar()
    if is_tiny(args.model) and args.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1) # too small for more: two take twice as long, beside a busy process ten times
    backend = "gloo"
    if args.device.startswith("cuda"):
        backend = "cpu:gloo,cuda:nccl"
        card = prepare_card(args.device, args.flash_attention)
        torch.cuda.set_device(args.device) # where NCCL works
        say(card)
    if world() > 1:
        join_processes(backend)
        if "nccl" in backend:
            start_nccl(args.device)

def memory_of(device):
    """GiB: on a GPU the most that torch has held since the encoders left or a validation ended, on a CPU what the
    process has now."""
    import psutil
    used = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else psutil.Process().memory_info().rss
    return used / 2**30

def check_card(flag, device, dtype):
    """flag_error if a card is too old for this dtype (None: bfloat16 on a card), or if several have no way to speak
    with each other."""
    if device.startswith("cuda") and world() > 1 and not dist.is_nccl_available(): # (gloo on cards cannot do --fsdp)
        flag_error(f"--{flag}: several GPUs need NCCL, which this torch lacks (on Windows all do); use one, without "
                   "torchrun")
    if (device.startswith("cuda") and torch.version.hip is None and dtype in (None, "bfloat16")
            and torch.cuda.get_device_capability(device) < (8, 0)):
        flag_error(f"--{flag}: {torch.cuda.get_device_name(device)} has no bfloat16 attention; take an "
                   "Ampere card (A100, RTX 30xx) or a newer one, or --dtype float32")

# -U, as pip takes the build without CUDA for the same version; the bound is that of requirements.txt
CUDA_BUILD = 'pip install -U "torch<2.15" --index-url https://download.pytorch.org/whl/cu130'

def refuse_cpu(args):
    """InputError if a large model would go to the CPU, in float32, only because no GPU can be used. (A machine without
    one is refused before torch is imported: environment.refuse_devices.)"""
    if not environment.wants_card(args) or torch.cuda.is_available():
        return
    if not (torch.version.cuda or torch.version.hip): # what PyPI has for Windows
        raise InputError(f"--device: torch {torch.__version__} is built without CUDA; {CUDA_BUILD}, or give --device "
                         "cpu")
    raise InputError(f"--device: no usable GPU (torch {torch.__version__} is built for CUDA "
                     f"{torch.version.cuda or '-'}; CUDA 13 needs driver 580 or newer, see nvidia-smi); update the "
                     "driver, install a torch that fits it, or give --device cpu")

# {major compute capability: (the flash attention that torch can use there instead of its own FA2, the module that it
# then loads, where to get that)}. Not on sm_120, where FA4 crashes (flash-attention issue 2860). PyPI's flash-attn-3 is
# empty
FASTER = {9: ("FA3", "flash_attn_interface", "flash-attn-3 (of download.pytorch.org/whl)"),
          10: ("FA4", "flash_attn.cute", "flash-attn-4")}

def find_flash(capability):
    """-> "FA3" on Hopper, "FA4" on data centre Blackwell, if its package is installed; else None."""
    impl, package, _ = FASTER.get(capability[0], (None, None, None))
    if impl not in getattr(torch.nn.attention, "list_flash_attention_impls", list)():
        return None
    try:
        return impl if find_spec(package) else None
    except (ModuleNotFoundError, ValueError): # no flash_attn at all, or one that is no package
        return None
    except Exception: # its __init__ fails: activate_flash will say how
        return impl

NO_FLASH = "no flash attention in this torch (on Windows in none): attention one sample at a time, which is slower"

def activate_flash(capability, newer=True):
    """Activates the fastest flash attention that can be loaded (newer=False: torch's own) -> words for the log."""
    if not torch.backends.cuda.is_flash_attention_available(): # then rope_patch.has_varlen is False
        return NO_FLASH
    impl = find_flash(capability) if newer else None
    if impl:
        try:
            torch.nn.attention.activate_flash_attention_impl(impl)
            return f"flash attention {impl[2:]}"
        except Exception as e: # a package for another torch or another CUDA can fail in any way
            return f"flash attention 2 ({impl} cannot be loaded: {first_line(e)})"
    if newer and capability[0] in FASTER and torch.version.hip is None: # (AMD's MI300 is a 9 too)
        return f"flash attention 2; {FASTER[capability[0]][2]} would compute attention faster"
    return "flash attention 2"

def prepare_card(device, flash_attention):
    """Call it before the first tensor is on the device. flash_attention: auto or 2 -> words for the log."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        # Every step has new sizes, which fragment memory: hence expandable segments. Pinned tensors are not rounded up
        # to powers of two, and then must not be cached either: torch 2.13 could give one to a larger tensor (PR 192722)
        configure_allocator("expandable_segments:True,pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1",
                            "expandable_segments:True")
    # without cuDNN, stock, padded and packed calls use one family of kernels, and no new shape costs a new plan
    torch.backends.cuda.enable_cudnn_sdp(False)
    # sums of thousands of tokens (RowsByIndex of rope_patch.py) stay in fp32 until the end, if a product is split
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    varlen = getattr(torch.nn.attention, "varlen", None)
    if hasattr(varlen, "_should_use_cudnn"): # torch after 2.13: five times slower on mixed lengths (issue 187770)
        varlen._should_use_cudnn = lambda *args, **kwargs: False
    torch._dynamo.config.recompile_limit = 64 # past it --compile would fall back to eager without a word
    capability = torch.cuda.get_device_capability(device)
    words = activate_flash(capability, flash_attention == "auto")
    return f"{torch.cuda.get_device_name(device)}, {words}"

def start_nccl(device):
    """NCCL waits minutes, not hours: a step waits for its slowest process, and one that has died never comes. And it
    is used once, as it takes its memory then: before training/memory_fit.py measures what is free."""
    dist.group.WORLD._get_backend(torch.device(device))._set_default_timeout(timedelta(minutes=20))
    dist.all_reduce(torch.zeros(1, device=device))

def configure_allocator(*choices):
    """Sets the allocator to the first of these settings that this torch knows."""
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
    for settings in choices:
        with contextlib.suppress(RuntimeError, ValueError): # an older torch does not know every key
            return configure(settings)

PATIENCE = 20 # seconds in which processes that exist have met

def join_processes(backend):
    """Lets the processes find each other. InputError if this one cannot. Where these variables were left, the others do
    not exist, and it would wait for hours: so it says whom it waits for."""
    rank, world, address, port = [os.environ[name] for name in MEETING]
    line = (f"process {rank} of {world} (RANK, WORLD_SIZE) waits for the others at {address}:{port}; if there are "
            "none, unset these")
    waiting = Timer(PATIENCE, tell, [line])
    waiting.daemon = True
    waiting.start()
    timeout = timedelta(hours=6) # as processes without work wait for the encoders; NCCL gets a shorter one
    restarts, new_store = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), {}
    try:
        # torchrun --max_restarts keeps the store, which has the addresses of the processes that have died. (On several
        # machines the counts may differ, so there it stays as it is.)
        if restarts != "0" and os.environ.get("LOCAL_WORLD_SIZE") == world:
            store, *_ = next(dist.rendezvous("env://", timeout=timeout))
            new_store = dict(store=dist.PrefixStore(restarts, store), rank=int(rank), world_size=int(world))
        # (Windows' torch may lack libuv: this asks for it on other systems alone; torchrun's own store always does.)
        dist.init_process_group(backend, timeout=timeout, **new_store)
    except (RuntimeError, ValueError) as e:
        raise InputError(f"MASTER_ADDR {address}, MASTER_PORT {port}: process {rank} of {world} cannot meet the others "
                         f"there ({first_line(e)}); give the first one's address and a free port, or use torchrun")
    finally:
        waiting.cancel()

def refuse_differences(out_dir, assumed):
    """InputError names what the processes do not agree on. Each would train its own order of samples, silently."""
    views = gather_objects(assumed)

    def compare():
        for n, view in enumerate(views):
            for name, value in view.items():
                if value != views[0][name] and not name.endswith("device"):
                    raise InputError(f"{out_dir}: process {n} has {name} {value}, the first one {views[0][name]}; "
                                     "start all with the same command and the same files")
    on_first_process(compare)
