#!/usr/bin/env bash
# bitsandbytes' LAMB never trains a new LoRA: lora_B stays exactly 0, with no error and no warning.
#
# LAMB multiplies each step by the norm of the weight over the norm of the update (You et al. 2020, arxiv.org/abs/
# 1904.00962). A LoRA's B begins at 0, and bitsandbytes 0.50.2 takes that ratio as it is: 0, for ever. As B is 0, A gets
# no gradient either. After hours the file is whole, and changes nothing.
#
# $ bash findings/lamb_on_a_new_lora.sh    # prints the largest number of B after 200 steps; fails if that changes
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 bitsandbytes==0.50.2 numpy
cat > "$work/train.py" <<'PY'
import bitsandbytes
import torch
for kind in (torch.optim.AdamW, bitsandbytes.optim.LAMB):
    torch.manual_seed(0)
    x, y = torch.randn(256, 64), torch.randn(256, 64)
    a, b = torch.nn.Parameter(torch.randn(8, 64) / 8), torch.nn.Parameter(torch.zeros(64, 8))
    optimizer = kind([a, b], lr=1e-3)
    for _ in range(200):
        loss = ((x @ a.T @ b.T - y)**2).mean()
        loss.backward()
        assert b.grad.abs().max() > 0
        optimizer.step()
        optimizer.zero_grad()
    print(f"{kind.__name__}: max |B| {'0' if b.abs().max() == 0 else 'above 0'}, loss {loss.item():.3f}")
PY
"$work/venv/bin/python" "$work/train.py" 2> /dev/null | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
AdamW: max |B| above 0, loss 0.918
LAMB: max |B| 0, loss 0.997
SEEN
