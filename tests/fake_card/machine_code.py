"""
Compiles a transformer block for cards that are not there, down to their machine code, and says what came out.

Dynamo and inductor make Triton kernels of one block of the real width, forward and backward, as train.py --compile does
on an H100; then Triton and ptxas, both of Triton's package, compile each kernel for other cards as well. Nothing runs.

$ python -m tests.fake_card.machine_code LIBGUARD 80 90    # compute capabilities; its last line is JSON
"""
import json
import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace

# Nothing of an earlier run is used. One thread, because inductor's others would be processes without the guard.
os.environ |= dict(TRITON_CACHE_DIR=tempfile.mkdtemp(), TORCHINDUCTOR_CACHE_DIR=tempfile.mkdtemp(),
                   TORCHINDUCTOR_COMPILE_THREADS="1", TRITON_DUMP_PTXAS_LOG="1")

from tests.fake_card import guard

if __name__ == "__main__":
    guard.load(sys.argv[1], 1)

import torch
import torch._inductor.config as inductor_config
import triton
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.codecache import PyCodeCache
from torch._inductor.fx_passes import fuse_attention
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget

import predict
import rope_patch

CARD, H100 = "cuda:0", 90
# {compute capability: multiprocessors, threads that each of them can have, KiB of its memory that a kernel can have}:
# what decides a kernel's configurations
CARDS = {80: (108, 2048, 163), 89: (128, 1536, 99), 90: (132, 2048, 227), 100: (148, 2048, 227), 120: (170, 1536, 99)}
SAMPLES = [([(1, 64, 64), (1, 64, 64)], 258), ([(1, 32, 32), (1, 32, 32)], 250)] # pictures in tokens, text tokens
LORA = "to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj to_add_out img_mod.1".split()


class Generated(Exception):
    """Inductor's code is there, and cannot run."""


# ---- an H100, as far as inductor and Triton ask ----------------------------------------------------------------------

def properties_of(capability):
    processors, threads, kib = CARDS[capability]
    return dict(name="imitated", major=capability // 10, minor=capability % 10, multi_processor_count=processors,
                warp_size=32, max_threads_per_multi_processor=threads, max_threads_per_block=1024,
                regs_per_multiprocessor=2**16, shared_memory_per_block=48 * 2**10, total_memory=80 * 2**30,
                shared_memory_per_block_optin=kib * 2**10, L2_cache_size=50 * 2**20, gcnArchName="")


def pretend(capability):
    """torch, inductor and Triton find such a card, until this process ends."""
    properties = SimpleNamespace(**properties_of(capability))
    for owner in (torch.cuda, CudaInterface, CudaInterface.Worker):
        owner.get_device_properties = staticmethod(lambda device=None: properties)
        owner.is_available = staticmethod(lambda: True)
        owner.current_device = staticmethod(lambda: 0)
    CudaInterface.get_compute_capability = staticmethod(lambda device=None: capability)
    CudaInterface.get_raw_stream = staticmethod(lambda device: 0)
    torch.cuda._lazy_init = lambda: None
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    torch.backends.cuda.is_flash_attention_available = lambda: True
    torch.cuda.get_rng_state = lambda device=None: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *args, **kwargs: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda._exchange_device = lambda index: 0
    torch.cuda._maybe_exchange_device = lambda index: 0 # a function of its own: dynamo has a table of them
    torch.version.cuda = torch.version.cuda or "13.0"
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0, is_active=lambda: True,
        get_active_torch_device=lambda: torch.device(CARD)))
    triton_helpers.set_driver_to_gpu = lambda: None # it would load the real driver
    fake_tensor.CONSTANT_NUMEL_LIMIT = -1 # small tensors would keep their numbers, and then really move to the card


# ---- inductor's code -------------------------------------------------------------------------------------------------

def make_model():
    """-> three blocks of the real width, without weights, of which the middle one will be compiled: its inputs have
    gradients, and its text output is used. Bfloat16, but LoRAs in float32, as train.py has them."""
    with init_empty_weights():
        model = QwenImageTransformer2DModel(num_layers=3, zero_cond_t=True).bfloat16().requires_grad_(False)
        rope_patch.patch_qwen_model_for_multi_resolution(model).train()
        predict.add_lora(model, r=16, target_modules=LORA)
    model.transformer_blocks[1].compile(dynamic=True, fullgraph=True) # fullgraph: a graph break is an error
    return model


def move(model):
    """To the card, as fake tensors, which are made here."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                fake = torch.empty(p.shape, dtype=p.dtype, device=CARD)
                module._parameters[name] = torch.nn.Parameter(fake, p.requires_grad)
    for name in ("pos_freqs", "neg_freqs"): # the rotary tables
        setattr(model.pos_embed, name, torch.empty_like(getattr(model.pos_embed, name), device=CARD))


def generate():
    """-> inductor's code of the block: [forward, backward]."""
    codes = []

    def keep_code(graph): # in the place of GraphLowering.compile_to_module
        codes.append(graph.codegen()[0].value)

        def call(args):
            raise Generated
        return SimpleNamespace(call=call, __file__="", __name__="")
    GraphLowering.compile_to_module = keep_code
    inductor_config.force_disable_caches = True
    # what would compute on the card: constants, the times of padded products, and patterns for an attention in parts
    inductor_config.joint_graph_constant_folding = inductor_config.shape_padding = False
    fuse_attention._sfdp_init = lambda device=None: None

    model = make_model()
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        move(model)
        shapes = [pictures for pictures, _ in SAMPLES]
        latents = [torch.zeros(n, 64, dtype=torch.bfloat16, device=CARD) for n in rope_patch.image_lens(shapes)]
        prompts = [torch.zeros(n, 3584, dtype=torch.bfloat16, device=CARD) for _, n in SAMPLES]
        try:
            rope_patch.run_packed(model, latents, prompts, torch.zeros(len(SAMPLES), device=CARD), shapes)
        except Generated:
            return codes


# ---- machine code ----------------------------------------------------------------------------------------------------

def kernels_of(code, capability):
    """-> {name: inductor's object for this Triton kernel}, for such a card."""
    properties = properties_of(capability)
    device = DeviceProperties("cuda", 0, cc=capability, **{
        name: properties[name] for name in DeviceProperties._fields if name in properties})
    kernels = {}
    sources = r"^(triton_\w+) = async_compile\.triton\('\w+', '''$(.*?)^'''"
    for name, source in re.findall(sources, code, re.MULTILINE | re.DOTALL):
        source = re.sub(r"DeviceProperties\([^)]*\)", repr(device), source)
        kernels[name] = getattr(PyCodeCache.load(source), name)
    return kernels


def compile_kernel(kernel):
    """-> of its first configuration (inductor measures several, and takes the fastest): dict(card, registers, spilled,
    shared: bytes, atomics: instructions)."""
    compiled, binaries, log = triton.compile, [], StringIO()

    def compile_and_keep(*args, **kwargs):
        binaries.append(compiled(*args, **kwargs))
        return binaries[-1]
    triton.compile = compile_and_keep
    with redirect_stdout(log): # ptxas's words, which Triton prints
        kernel._precompile_config(kernel.configs[0])
    triton.compile, log = compiled, log.getvalue()
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return dict(card=re.search(r"for '(sm_\w+)'", log)[1], spilled=sum(map(int, spilled)),
                shared=binaries[0].metadata.shared, registers=int(re.search(r"Used (\d+) registers", log)[1]),
                atomics=re.findall(r"\b(?:atom|red)\.[\w.:]+", binaries[0].asm["ptx"]))


def describe(code, capabilities):
    """-> dict(launches: of kernels in this pass; calls: {what is not Triton}; kernels: {capability: {name:
    compile_kernel's}})."""
    body = code[code.index("def call("):]
    calls = re.findall(r"\b(?:extern_kernels|torch\.ops|aten)\.[\w.]+(?=\()", body)
    kernels = {capability: {name: compile_kernel(kernel) for name, kernel in kernels_of(code, capability).items()}
               for capability in capabilities}
    return dict(launches=len(calls) + len(re.findall(r"\btriton_\w+\.run\(", body)), calls=sorted({*calls}),
                kernels=kernels)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pretend(H100)
    cards = list(map(int, sys.argv[2:]))
    print(json.dumps([describe(code, cards) for code in generate()]))
