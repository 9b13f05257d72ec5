#!/usr/bin/env bash
# diffusers' EMAModel(decay=0.9999) averages over a tenth of the run, not over 10,000 steps, with use_ema_warmup=False.
#
# diffusers 0.42.1: the decay of step n is at most (1 + n) / (10 + n), whatever decay says; use_ema_warmup only chooses
# between two such curves. After 1,000 steps it has reached 0.991, so hardly anything is left of the first half. By
# its name and default one would expect no warm-up: 0.9999 from the start, of which torch's own AveragedModel still has
# 90 % of the first weights after 1,000 steps. Two trainers with "EMA 0.9999" so keep quite different weights.
# min_decay=0.9999 gives torch's.
#
# $ bash findings/ema_warms_up_unasked.sh    # a weight jumps from 0 to 1: how much of the 0 is left; fails if changed
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 \
    accelerate==1.15.0 numpy
cat > "$work/average.py" <<'PY'
import torch
from diffusers.training_utils import EMAModel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

def left(make, steps=1000):
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    update, weight = make(model)
    update()
    model.weight.data.fill_(1)
    for _ in range(steps):
        update()
    return 1 - weight().item()

def diffusers(**more):
    def make(model):
        average = EMAModel(model.parameters(), decay=0.9999, **more)
        return lambda: average.step(model.parameters()), lambda: average.shadow_params[0]
    return make

def torchs(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    return lambda: average.update_parameters(model), lambda: average.module.weight

print(f"torch's AveragedModel, 0.9999: {left(torchs):.1%}")
for more in ({}, {"use_ema_warmup": True}, {"min_decay": 0.9999}):
    print(f"EMAModel, 0.9999, {more}: {left(diffusers(**more)):.1%}")
PY
"$work/venv/bin/python" "$work/average.py" 2> "$work/words.txt" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
torch's AveragedModel, 0.9999: 90.5%
EMAModel, 0.9999, {}: 0.0%
EMAModel, 0.9999, {'use_ema_warmup': True}: 0.0%
EMAModel, 0.9999, {'min_decay': 0.9999}: 90.5%
SEEN
