"""
A graphics card that does not exist: it has so many GiB, counts what a program does with it, and computes nothing.

    guard.load(library, cards=1)            # before torch is imported
    card = Card(gib=80, capability=(9, 0))
    with card:
        model.cuda()(x.cuda()).sum().backward()
    print(card.reading())

Tensors of cuda are fake tensors: shape, dtype, strides and device, but no bytes. CPU tensors stay what they are, and
are computed, so that a program's own arithmetic (seeds, shapes, schedules) is real. What comes back from the card is
zeros, except integers and booleans that were made of known ones only: lengths and masks decide shapes. README.md says
how it works and what it cannot see.
"""
import collections
import contextlib
import os
import sys
import threading
import weakref

import torch
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
FAKE = torch._C._TorchDispatchModeKey.FAKE
GIB = 2**30
CONTEXT = 0.6 # GiB that CUDA and its libraries take beside the tensors
SMALL = 2**20 # elements: integer tensors up to this size are also computed

# What launches no kernel, although its result is no view of an argument.
NO_KERNEL = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
             "aten::_unsafe_view", "aten::_reshape_alias", "aten::set_", "aten::resize_", "aten::record_stream",
             "aten::is_pinned", "aten::lift_fresh", "aten::_local_scalar_dense"}
# Tensors on the CPU and on a card may meet here: to be copied, or as indices, which CUDA's kernels copy for themselves.
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
MIXING = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", *INDEXING}
# Where not even a number on the CPU may be among tensors of a card.
STRICT = {"aten::cat", "aten::stack"}
UNWRITTEN = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}

class Card(TorchDispatchMode): # a class because torch calls its __torch_dispatch__ for every operation
    """The cards that this process sees. They share one counter, so a program uses the one of torch.cuda.set_device."""

    def __init__(self, gib, capability=(9, 0), cards=1, taken=0.0, clock="clock"):
        """gib: what torch would call its memory; taken: GiB of it that something else has; clock: the function whose
        calls of torch.cuda.synchronize begin a new reading. Any other waits."""
        super().__init__()
        self.gib, self.capability, self.cards, self.index = gib, tuple(capability), cards, 0
        self.total, self.unusable = int(gib * GIB), int((CONTEXT + taken) * GIB)
        self.now = 0 # bytes of all tensors on the card
        self.peak = 0 # torch.cuda.max_memory_allocated: the program may reset it
        self.highest = 0 # the same since the last reading
        self.pinned = 0 # bytes of pinned host memory
        self.kernels = self.copies = self.bytes_in = 0 # since the last reading
        self.waits = collections.Counter() # {what waits for the card, and where: times}
        self.ops = collections.Counter() # {operation: kernels}
        self.readings, self.clock = [], clock
        self.sizes = WeakIdKeyDictionary() # {storage: [bytes, whether it is pinned]}
        self.overwritten = WeakIdKeyDictionary() # {storage of which something was known: True}
        self.lock = threading.RLock() # autograd's threads and Python's garbage collector come at any time
        self.fake = FakeTensorMode()
        self.fake.dispatch = self.one_at_a_time(self.fake.dispatch)
        # it would keep weak references to what it has converted, and torch moves no parameter that has one
        self.fake.fake_tensor_converter.set_tensor_memo = lambda real, fake: None
        self.patches = contextlib.ExitStack()

    def __enter__(self):
        patch_torch(self)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patches.close()

    @classmethod
    def _should_skip_dynamo(cls):
        return False # else each operation would pass through a wrapper that keeps dynamo away, at 20 us

    @classmethod
    def ignore_compile_internals(cls):
        return True # torch.compile compiles although we are there

    def one_at_a_time(self, call):
        """cache.py's threads share the mode of fake tensors, all of which are on "meta" while it is in a kernel."""
        def locked(*args, **kwargs):
            with self.lock:
                return call(*args, **kwargs)
        return locked

    # ---- one operation -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self.lock:
            return self.dispatch(func, types, args, kwargs)

    def dispatch(self, func, types, args, kwargs):
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if torch._C._get_dispatch_mode(FAKE): # another one's: DTensor tries an operation on shapes first, --plan all
            return func(*args, **(kwargs or {}))
        for kind in types: # a DTensor: torch calls us again with the tensors that it consists of
            if kind not in (FakeTensor, torch.Tensor, torch.nn.Parameter):
                return NotImplemented
        kwargs, tensors = kwargs or {}, tensors_of(args, kwargs or {})
        wanted = kwargs.get("device")
        on_card = any(isinstance(t, FakeTensor) and t.fake_mode is self.fake for t in tensors)
        name = func._schema.name
        pinned = kwargs.get("pin_memory") or name == "aten::_pin_memory" and args[0].is_floating_point()
        if not on_card and not pinned and (wanted is None or torch.device(wanted).type != "cuda"):
            return func(*args, **kwargs) # the CPU's own
        if name not in MIXING:
            self.refuse_mixed_devices(name, tensors)
        if name == "aten::_local_scalar_dense":
            return self.item(args[0])
        if name == "aten::is_pinned":
            return args[0].untyped_storage() in self.sizes and args[0].device.type == "cpu"
        if name == "aten::record_stream":
            return None
        if name in INDEXING and args[0].device.type == "cpu" and any(t.is_cuda for t in tensors):
            raise RuntimeError(f"{name}: indices on the card into a tensor on the CPU")
        if name in ("aten::index", "aten::index_put", "aten::index_put_") and not self.all_known(tensors):
            args = (args[0], self.whole_numbers(args[1]), *args[2:])
            for index in args[1]:
                if index is not None and index.device.type == "cpu" and args[0].device.type == "cuda":
                    self.copies += 1
                    self.bytes_in += index.nbytes
                    self.wait("copy of indices from the host")
        if name == "aten::copy_" and not isinstance(args[0], FakeTensor):
            return self.copy_to_host(*args)

        fake_args, fake_kwargs = args, kwargs
        if not all(isinstance(t, FakeTensor) for t in tensors):
            fake_args, fake_kwargs = tree_map(self.stand_in, (args, kwargs))
        if name == "aten::_pin_memory":
            out = self.empty(args[0], torch.device("cpu"))
        elif torch.Tag.dynamic_output_shape in func.tags and self.all_known(tensors):
            self.wait(f"shape of {name}") # the host must know how much memory the result takes
            out = tree_map(self.stand_in_on_card, self.on_known(func, args, kwargs))
        else:
            out = self.fake.__torch_dispatch__(func, types, fake_args, fake_kwargs)
        if pinned: # weights, mostly: only their bytes matter
            self.account(out, pinned=True)
            return out
        return self.finish(func, name, args, kwargs, tensors, out)

    def refuse_mixed_devices(self, name, tensors):
        """As CUDA does: of several devices only a CPU tensor without dimensions is taken, as a number."""
        devices = {t.device for t in tensors if t.dim() or t.device.type != "cpu" or name in STRICT}
        if len(devices) > 1:
            shapes = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in tensors)
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {shapes}")

    def finish(self, func, name, args, kwargs, tensors, out):
        """Counts what an operation has done -> its result, as the program gets it."""
        results = [out] if isinstance(out, FakeTensor) else [t for t in tree_leaves(out) if isinstance(t, FakeTensor)]
        for t in results:
            if t.device.type == "cuda":
                self.account(t)
        if name not in UNWRITTEN and self.all_known(tensors) and all(is_small_and_whole(t) for t in results):
            values = tree_leaves(self.on_known(func, args, kwargs))
            for t, value in zip(results, values):
                t.value = value
        elif func._schema.is_mutable: # what was known of these, and of all their views, has been overwritten
            for arg, way in zip(args, func._schema.arguments):
                for t in tree_leaves(arg) if way.alias_info and way.alias_info.is_write else []:
                    self.overwritten[t.untyped_storage()] = True
        source = args[1] if name == "aten::copy_" else args[0] if name == "aten::_to_copy" else None
        if source is not None and results[0].device.type != source.device.type:
            if results[0].device.type == "cuda":
                self.copies += 1
                self.bytes_in += source.numel() * source.element_size()
                # (on another stream it is behind no kernel, unless that stream has waited for one)
                stream = getattr(chosen, "stream", None)
                if not is_non_blocking(name, args, kwargs) and (stream is None or stream.behind):
                    self.wait("copy from the host")
                return out
            self.wait("copy to the host")
            return self.on_host(results[0], self.value_of(source))
        if any(t.device.type == "cuda" for t in results or tensors) and launches(func):
            self.launch(name)
        return out

    # ---- what is known of numbers ------------------------------------------------------------------------------------

    def stand_in(self, t):
        """A fake tensor for a real one of the CPU."""
        if not isinstance(t, torch.Tensor) or isinstance(t, FakeTensor):
            return t
        return self.empty(t, torch.device("cpu"))

    def stand_in_on_card(self, t):
        return self.empty(t, torch.device("cuda", self.index)) if isinstance(t, torch.Tensor) else t

    def empty(self, like, device):
        return self.fake.__torch_dispatch__(aten.empty_strided.default, (), (like.shape, like.stride()),
                                            dict(dtype=like.dtype, device=device))

    def all_known(self, tensors):
        """Whether these are integers or booleans of which the host has known all since they were made."""
        return all(is_small_and_whole(t) and (not isinstance(t, FakeTensor) or self.knows(t)) for t in tensors)

    def knows(self, t):
        return hasattr(t, "value") and t.untyped_storage() not in self.overwritten

    def on_known(self, func, args, kwargs):
        """The result of an operation on such tensors, computed on the CPU."""
        def known(x):
            if isinstance(x, FakeTensor):
                return x.value
            return torch.device("cpu") if isinstance(x, torch.device) else x
        return func(*tree_map(known, args), **tree_map(known, kwargs))

    def whole_numbers(self, indices):
        """Masks among indices as the numbers of the places where they are true, which decide the result's shape."""
        out = []
        for mask in indices:
            if mask is None or mask.dtype != torch.bool or not isinstance(mask, FakeTensor):
                out.append(mask)
                continue
            self.wait("shape of a selection by a mask")
            known = mask.value if self.knows(mask) else torch.ones(mask.shape, dtype=torch.bool)
            for places in known.nonzero().unbind(1):
                out.append(self.stand_in_on_card(places))
        return out

    def value_of(self, t):
        return t.value if self.knows(t) else None

    def item(self, t):
        if t.device.type == "cuda":
            self.wait("item")
        if self.knows(t):
            return t.value.item()
        return self.on_host(t, None).item()

    def on_host(self, t, value):
        """What a program gets that copies this tensor from the card."""
        if value is not None:
            return value.to(t.dtype, copy=True)
        real = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        return real.fill_(True) if t.dtype == torch.bool else real.zero_()

    def copy_to_host(self, to, source, non_blocking=False):
        if not non_blocking:
            self.wait("copy to the host")
        return to.copy_(self.on_host(source, self.value_of(source)))

    # ---- counters ----------------------------------------------------------------------------------------------------

    def account(self, t, pinned=False):
        """A tensor is there: its memory counts from now on, until nobody holds it."""
        storage = t.untyped_storage()
        with self.lock:
            if storage in self.sizes:
                return
            size = self.sizes[storage] = [0, pinned]
            weakref.finalize(storage, self.resize, size, 0).atexit = False
        self.resize(size, storage.nbytes())

    def resize(self, size, wanted):
        """A storage gets so many bytes, in whole blocks of CUDA's allocator."""
        with self.lock:
            more = -(-wanted // 512) * 512 - size[0]
            if size[1]:
                self.pinned += more
            else:
                if more > 0 and self.now + more + self.unusable > self.total:
                    raise torch.OutOfMemoryError(
                        f"CUDA out of memory (an imitated card): {more / GIB:.2f} GiB wanted, {self.now / GIB:.2f} GiB "
                        f"taken, {(self.total - self.unusable - self.now) / GIB:.2f} GiB free")
                self.now += more
                self.peak, self.highest = max(self.peak, self.now), max(self.highest, self.now)
            size[0] += more

    def launch(self, name, kernels=1):
        self.kernels += kernels
        self.ops[name] += kernels

    def wait(self, what):
        """The host stands still until the card has done all that it was given."""
        frame, places = sys._getframe(1), []
        while frame and len(places) < 2: # the project's own lines: neither torch's nor this file's
            file = frame.f_code.co_filename
            if "site-packages" not in file and file != __file__ and not file.startswith("<"):
                places.append(f"{file.rpartition('/')[2]}:{frame.f_lineno}")
            frame = frame.f_back
        self.waits[f"{what} at {' < '.join(places)}"] += 1

    def reading(self):
        """-> the counters since the last reading, which begin anew."""
        read = dict(now=self.now, peak=self.highest, kernels=self.kernels, copies=self.copies, bytes_in=self.bytes_in,
                    waits=sum(self.waits.values()), where=dict(self.waits), ops=dict(self.ops), pinned=self.pinned)
        self.highest, self.kernels, self.copies, self.bytes_in = self.now, 0, 0, 0
        self.waits.clear(), self.ops.clear()
        return read

# torch.compile captures what a program does, not what this file does in it
set_code_exec_strategy(Card.__torch_dispatch__.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))

WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}

def is_non_blocking(name, args, kwargs):
    """Of aten::_to_copy and aten::copy_(to, source, non_blocking)."""
    return bool(kwargs.get("non_blocking") or name == "aten::copy_" and args[2:] and args[2])

def is_small_and_whole(t):
    return t.dtype in WHOLE and t.numel() <= SMALL

def tensors_of(args, kwargs):
    """The tensors among an operation's arguments, also those in lists."""
    found = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += [y for y in x if isinstance(y, torch.Tensor)]
    return found

kernel_of = {} # {operation: whether it launches one}

def launches(func):
    if func not in kernel_of:
        schema = func._schema
        views = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
        kernel_of[func] = schema.name not in NO_KERNEL and not (views and all(views))
    return kernel_of[func]

# ---- torch's questions to a card -------------------------------------------------------------------------------------

chosen = threading.local() # its `stream`: the one that a thread has chosen by torch.cuda.stream

@contextlib.contextmanager
def on_stream(stream):
    before, chosen.stream = getattr(chosen, "stream", None), stream
    try:
        yield
    finally:
        chosen.stream = before

class Stream: # what torch.cuda.Stream and torch.cuda.Event would be; all work is done at once, in one order
    def __init__(self, *args, **kwargs):
        self.device, self.device_index, self.device_type, self.stream_id, self.cuda_stream = "cuda", 0, 1, 0, 0
        self.behind = False # whether it has ever waited for another stream

    def wait_stream(self, stream):
        self.behind = True
    wait_event = wait_stream

    def nothing(self, *args, **kwargs):
        return None
    record = wait = nothing

    def record_event(self, event=None):
        return event or Stream()

    def query(self):
        return True

    def synchronize(self):
        active().wait("synchronize of a stream or an event")

    def elapsed_time(self, other):
        return 1.0 # milliseconds: no time is known, but a program may divide by it

current = []

def active():
    return current[-1]

def patch_torch(card):
    """Puts our answers in the place of torch's, until card.patches is closed. Each patch has its reason."""
    def put(owner, name, new):
        before = getattr(owner, name)
        setattr(owner, name, new)
        card.patches.callback(setattr, owner, name, before)
    current.append(card)
    card.patches.callback(current.pop)

    # torch.cuda: a build without CUDA, or a machine without a driver, raises for each of these
    def set_device(device):
        card.index = device if isinstance(device, int) else torch.device(device).index or 0

    def reset_peak(device=None):
        card.peak = card.now

    def synchronize(device=None):
        if sys._getframe(1).f_code.co_name == card.clock: # train.py's, where a step begins and where it ends
            card.readings.append(dict(card.reading(), by=card.clock))
        else:
            card.wait("synchronize")

    properties = collections.namedtuple("Properties", "name major minor total_memory multi_processor_count gcnArchName")
    for name, answer in dict(
            is_available=lambda: True, is_initialized=lambda: True, _lazy_init=lambda: None, init=lambda: None,
            device_count=lambda: card.cards, current_device=lambda: card.index, set_device=set_device,
            get_device_capability=lambda device=None: card.capability,
            get_device_name=lambda device=None: f"an imitated card of {card.gib:g} GiB",
            get_device_properties=lambda device=None: properties("imitated", *card.capability, card.total, 132, ""),
            is_bf16_supported=lambda including_emulation=True: card.capability >= (8, 0),
            memory_allocated=lambda device=None: card.now, memory_reserved=lambda device=None: card.now,
            max_memory_allocated=lambda device=None: card.peak, reset_peak_memory_stats=reset_peak,
            mem_get_info=lambda device=None: (card.total - card.unusable - card.now, card.total),
            empty_cache=lambda: None, synchronize=synchronize, manual_seed=lambda seed: None,
            manual_seed_all=lambda seed: None, get_rng_state=lambda device=None: torch.zeros(0, dtype=torch.uint8),
            set_rng_state=lambda state, device=None: None, is_current_stream_capturing=lambda: False,
            Stream=Stream, Event=Stream, stream=on_stream,
            current_stream=lambda device=None: Stream(), default_stream=lambda device=None: Stream()).items():
        put(torch.cuda, name, answer)
    # so is what a build without CUDA lacks beside it
    put(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    put(torch.distributed, "is_nccl_available", lambda: True)
    put(torch.Tensor, "record_stream", lambda tensor, stream: None) # it wants a real stream

    # a mode belongs to the thread that has entered it; those that a program starts have the card, too
    run = threading.Thread.run

    def run_with_card(thread):
        _push_mode(card)
        try:
            run(thread)
        finally:
            _pop_mode()
    put(threading.Thread, "run", run_with_card)

    # a parameter stays the object that it is when it moves to the card, and when it gets other data there: optimizers
    # hold it. Real and fake tensors cannot exchange their data, but everything at once
    put(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    data = torch.Tensor.data

    def set_data(self, new):
        if not isinstance(new, FakeTensor) or isinstance(self, FakeTensor) and self.device == new.device:
            return data.__set__(self, new)
        new = data.__get__(new) # with a version of its own: what is copied into a buffer changes none of its views
        if isinstance(self, torch.nn.Parameter):
            new = torch.nn.Parameter(new, self.requires_grad)
        torch.utils.swap_tensors(self, new)
    put(torch.Tensor, "data", property(data.__get__, set_data))

    # FSDP2 frees and takes memory so, without an operation that we could see
    real_resize = torch.UntypedStorage.resize_

    def resize_(storage, size):
        if storage in card.sizes:
            card.resize(card.sizes[storage], size)
        return real_resize(storage, size)
    put(torch.UntypedStorage, "resize_", resize_)

    # a fake tensor would ask for one number after the other, where a real one is copied to the host at once
    put(FakeTensor, "tolist", lambda self: self.cpu().tolist())

    # torch.tensor(numbers, device="cuda") fills the card's memory unseen, unless it makes the tensor on the CPU first
    card.patches.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
    torch._C._set_only_lift_cpu_tensors(True)

    # it also reads tensors among the numbers unseen, one after the other, as a card's would be
    tensor = torch.tensor

    def tensor_of_numbers(data, **kwargs):
        if isinstance(data, (list, tuple)):
            data = [x.item() if isinstance(x, FakeTensor) else x for x in data]
        return tensor(data, **kwargs)
    put(torch, "tensor", tensor_of_numbers)

    # optimizers and gradient clipping take one kernel for many tensors if they know the tensors' class
    for module in (sys.modules["torch.optim.optimizer"], _foreach_utils): # (torch.optim hides its module)
        put(module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor])

    # two functions choose a kernel in C++, by asking the card itself; without one they take it apart into many
    rms_norm, attention = torch.nn.functional.rms_norm, torch.nn.functional.scaled_dot_product_attention

    def fused_rms_norm(x, shape, weight=None, eps=None):
        if not x.is_cuda or torch.compiler.is_compiling():
            return rms_norm(x, shape, weight, eps)
        return FusedRmsNorm.apply(x, weight)

    def one_kernel_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                             enable_gqa=False):
        q, k, v = query, key, value
        if not q.is_cuda:
            return attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            k, v = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
        flash = attn_mask is None and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256
        if flash and q.shape[-1] % 8 == 0:
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None: # as a bias that is added
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
            attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
        return aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p,
                                                            is_causal, scale=scale)[0]
    put(torch.nn.functional, "rms_norm", fused_rms_norm)
    put(torch.nn.functional, "scaled_dot_product_attention", one_kernel_attention)

def join_group(card):
    """torch.distributed among ranks that do not exist: torch's fake process group, which sends nothing. A collective
    leaves what it should receive as it is, and a gathered object is this rank's own, from each rank."""
    import torch.distributed as dist
    from torch.distributed._tools import fake_collectives # noqa: F401 (collectives on fake tensors)
    from torch.testing._internal.distributed.fake_pg import FakeStore
    torch._C._distributed_c10d.FakeProcessGroup._set_default_timeout = lambda group, timeout: None # as NCCL's has it
    init = dist.init_process_group

    def init_process_group(*args, **kwargs):
        init("fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))

    def all_gather_object(gathered, value, group=None):
        gathered[:] = [value] * len(gathered)
    for name, new in dict(init_process_group=init_process_group, all_gather_object=all_gather_object).items():
        card.patches.callback(setattr, dist, name, getattr(dist, name))
        setattr(dist, name, new)

class FusedRmsNorm(torch.autograd.Function): # a class because autograd wants one
    """The one kernel of F.rms_norm on CUDA, for a weight that is not trained: what it makes, and what it keeps."""

    @staticmethod
    def forward(ctx, x, weight):
        assert not weight.requires_grad, "a gradient of its weight is not imitated"
        active().refuse_mixed_devices("aten::rms_norm", [x, weight])
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        active().launch("aten::_fused_rms_norm")
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors # which a recomputed block only makes here
        active().launch("aten::_fused_rms_norm_backward")
        return torch.empty_like(grad), None
