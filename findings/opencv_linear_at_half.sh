#!/usr/bin/env bash
# OpenCV's INTER_LINEAR averages when it halves a picture exactly, and aliases at every other size.
#
# opencv-python-headless 5.0.0.93, cv2.resize, its default filter: one would expect that a picture of 1024 x 1024 and
# one of 1022 x 1022 become nearly the same 512 x 512. At exactly half the size each result is a mean of four pixels;
# elsewhere it is weighted from four neighbours whatever the scale, so most pixels of a larger picture do not count. A
# check at 1024 -> 512 finds the filter sound, and photographs of other sizes get moire and harder grain. INTER_AREA is
# smooth at all sizes.
#
# $ bash findings/opencv_linear_at_half.sh    # prints how much grain of a noise picture is left; fails if changed
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check opencv-python-headless==5.0.0.93 numpy==2.4.6
cat > "$work/halve.py" <<'PY'
import cv2
import numpy as np
noise = np.random.default_rng(0).integers(0, 256, (1026, 1026, 3), dtype=np.uint8)
for side in (1022, 1024, 1026):
    source = noise[:side, :side]
    left = {}
    for name in ("INTER_LINEAR", "INTER_AREA", "INTER_CUBIC"):
        small = cv2.resize(source, (512, 512), interpolation=getattr(cv2, name))
        left[name] = small.std() / source.std()
    print(f"{side} -> 512:", ", ".join(f"{name} {share:.2f}" for name, share in left.items()))
PY
"$work/venv/bin/python" "$work/halve.py" | tee "$work/found.txt"
# a mean of four independent pixels leaves 0.50
diff "$work/found.txt" - <<'SEEN'
1022 -> 512: INTER_LINEAR 0.67, INTER_AREA 0.42, INTER_CUBIC 0.85
1024 -> 512: INTER_LINEAR 0.50, INTER_AREA 0.50, INTER_CUBIC 0.72
1026 -> 512: INTER_LINEAR 0.67, INTER_AREA 0.42, INTER_CUBIC 0.85
SEEN
