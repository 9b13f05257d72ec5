#!/usr/bin/env bash
# diffusers' "cosine" rate, trained past its last step, climbs back to the full learning rate.
#
# diffusers 0.42.1 (get_scheduler): at num_training_steps the rate is 0, as one would expect. Beyond it "linear",
# "polynomial" and "cosine_with_restarts" stay there; "cosine" goes up again, to the full rate at twice the steps. A
# finished run that is resumed with more steps, or a scheduler that steps more often than the optimizer (per
# micro-batch, or per process), so ends at a high rate. Nothing is said.
#
# $ bash findings/cosine_climbs_again.sh    # prints the rates of 100 steps and of 100 more; fails if they change
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 numpy
cat > "$work/rates.py" <<'PY'
import torch
from diffusers.optimization import get_scheduler
for name in ("linear", "polynomial", "cosine_with_restarts", "cosine"):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=100)
    rates = []
    for step in range(1, 201):
        optimizer.step()
        scheduler.step()
        if step % 50 == 0:
            rates.append(f"step {step}: {scheduler.get_last_lr()[0]:.2f}")
    print(f"{name}:", ", ".join(rates))
PY
"$work/venv/bin/python" "$work/rates.py" 2> "$work/words.txt" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
linear: step 50: 0.50, step 100: 0.00, step 150: 0.00, step 200: 0.00
polynomial: step 50: 0.50, step 100: 0.00, step 150: 0.00, step 200: 0.00
cosine_with_restarts: step 50: 0.50, step 100: 0.00, step 150: 0.00, step 200: 0.00
cosine: step 50: 0.50, step 100: 0.00, step 150: 0.50, step 200: 1.00
SEEN
