#!/usr/bin/env bash
# Inside one torch.autocast that holds the whole training loop, a LoRA learns nothing that the loop can see.
#
# torch 2.13.0 (CPU, bf16): until the context ends, autocast keeps the bf16 copy of each fp32 weight that wants a
# gradient. optimizer.step() changes the weight; the next forward pass still multiplies by the copy of step 1. Loss and
# gradients are those of the first step for ever, whatever the optimizer does, and there is no warning. One would expect
# `with torch.autocast(...)` to be the same around a step and around the loop. cache_enabled=False makes it so.
#
# $ bash findings/autocast_around_the_loop.sh    # losses of four steps in three places of the context; fails if changed
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy
cat > "$work/loop.py" <<'PY'
import contextlib
import torch

def train(around_loop, around_forward):
    torch.manual_seed(0)
    x, y = torch.randn(256, 64), torch.randn(256, 64)
    a, b = torch.nn.Parameter(torch.randn(8, 64) / 8), torch.nn.Parameter(torch.randn(64, 8) / 8)
    optimizer = torch.optim.AdamW([a, b], lr=1e-2)
    losses = []
    with around_loop():
        for _ in range(4):
            with around_forward():
                loss = (torch.nn.functional.linear(torch.nn.functional.linear(x, a), b).float() - y).square().mean()
            losses.append(f"{loss.item():.3f}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return " ".join(losses)

autocast = lambda **more: lambda: torch.autocast("cpu", torch.bfloat16, **more)
nothing = contextlib.nullcontext
print("around the forward pass:", train(nothing, autocast()))
print("around the loop:", train(autocast(), nothing))
print("around the loop, cache_enabled=False:", train(autocast(cache_enabled=False), nothing))
PY
"$work/venv/bin/python" "$work/loop.py" 2> "$work/words.txt" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
around the forward pass: 1.116 1.081 1.055 1.035
around the loop: 1.116 1.116 1.116 1.116
around the loop, cache_enabled=False: 1.116 1.081 1.055 1.035
SEEN
