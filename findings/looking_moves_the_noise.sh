#!/usr/bin/env bash
# Looking at a DataLoader, though it neither shuffles nor has workers, changes all later noise of the training.
#
# torch 2.13.0: each start of an iteration draws a seed for workers from the global generator, also with num_workers=0
# and shuffle=False. So a run that validates every 100 steps has other noise and timesteps after step 100 than one that
# does not, and "the same seed" does not compare the two; one would expect a loop over a list in its order to draw
# nothing. A DataLoader with a generator of its own leaves the global one alone.
#
# $ bash findings/looking_moves_the_noise.sh    # the next random number after each way of looking; fails if changed
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy
cat > "$work/look.py" <<'PY'
import torch
from torch.utils.data import DataLoader
pictures = torch.zeros(4, 2)
ways = {"no validation": lambda: None, "a list": lambda: list(pictures),
        "DataLoader": lambda: list(DataLoader(pictures)),
        "DataLoader, own generator": lambda: list(DataLoader(pictures, generator=torch.Generator()))}
for name, validate in ways.items():
    torch.manual_seed(0)
    validate()
    print(f"{name}: next noise {torch.randn(1).item():.4f}")
PY
"$work/venv/bin/python" "$work/look.py" 2> "$work/words.txt" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
no validation: next noise 1.5410
a list: next noise 1.5410
DataLoader: next noise -0.2905
DataLoader, own generator: next noise 1.5410
SEEN
