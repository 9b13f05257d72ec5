"""
--compile: torch.compile, one block at a time, because they are alike; with dynamic lengths, because every batch
differs.
"""
import os
import shutil

import torch

from common import InputError

if os.name == "nt" and torch.cuda.is_available(): # elsewhere torch brings triton along; this one has a compiler
    try:
        import triton # noqa: F401
    except ImportError:
        raise InputError("--compile: needs triton, which is missing; pip install triton-windows, or leave the flag out")
elif not {"CC", "CXX"} & set(os.environ) and not any(map(shutil.which, ("g++", "gcc", "clang", "cc", "cl"))):
    raise InputError("--compile: found no C++ compiler; install g++ (on Windows Visual Studio's Build Tools), or leave "
                     "the flag out")

def compile_blocks(blocks):
    # Where attention is not one kernel, a graph break splits a block into functions that are compiled one by one. torch
    # gives up on such a function for good once a variant of it has nothing to compute. The backward pass could then
    # recompute other tensors than the forward pass has saved, which is an error.
    torch._dynamo.config.allow_empty_graphs = True
    for block in blocks:
        block.compile(dynamic=True)
