#!/usr/bin/env bash
# A shift of 3 makes another schedule as the scheduler's argument than by set_shift or as mu.
#
# diffusers 0.42.1, FlowMatchEulerDiscreteScheduler: shift=3.0 shifts the table of 1,000 noise levels when it is made;
# set_timesteps then spreads its steps down to the table's last, already shifted level, and shifts again. So the last
# step begins at 0.0089 and not at 0.0030, and those between move. set_shift(3.0) and dynamic shifting with mu = log(3)
# shift once; one would expect all three to agree. If one gives the noise levels (sigmas), they do.
#
# $ bash findings/one_shift_two_schedules.sh    # prints the noise levels of four steps; fails if they change
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 numpy
cat > "$work/shift.py" <<'PY'
import math
import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler as Scheduler
by_argument, by_method, by_mu = Scheduler(shift=3.0), Scheduler(), Scheduler(use_dynamic_shifting=True)
by_method.set_shift(3.0)
for name, scheduler in {"shift=3.0": by_argument, "set_shift(3.0)": by_method, "mu=log(3)": by_mu}.items():
    mu = dict(mu=math.log(3)) if scheduler is by_mu else {}
    for steps in ({"num_inference_steps": 4}, {"sigmas": np.linspace(1, 1 / 4, 4)}):
        scheduler.set_timesteps(**steps, **mu)
        print(f"{name}, {[*steps][0]}:", " ".join(f"{sigma:.4f}" for sigma in scheduler.sigmas[:-1]))
PY
"$work/venv/bin/python" "$work/shift.py" 2> "$work/words.txt" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
shift=3.0, num_inference_steps: 1.0000 0.8577 0.6022 0.0089
shift=3.0, sigmas: 1.0000 0.9000 0.7500 0.5000
set_shift(3.0), num_inference_steps: 1.0000 0.8573 0.6007 0.0030
set_shift(3.0), sigmas: 1.0000 0.9000 0.7500 0.5000
mu=log(3), num_inference_steps: 1.0000 0.8573 0.6007 0.0030
mu=log(3), sigmas: 1.0000 0.9000 0.7500 0.5000
SEEN
