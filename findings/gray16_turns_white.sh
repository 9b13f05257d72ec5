#!/usr/bin/env bash
# Pillow reads a colour picture of 16 bits rightly, and the same picture in gray as white.
#
# Pillow 13.0.0: a 16-bit RGB PNG opens in mode RGB, each value divided by 256. A 16-bit gray PNG opens in mode I;16,
# and convert("L") or convert("RGB") then cuts at 255 instead: all but the darkest 0.4 % of the range is white. There is
# no error and no warning. Masks, depth maps and scans are the usual 16-bit gray files; a soft mask becomes a hard one
# that covers nearly everything. Dividing the array by 257 gives what one would expect.
#
# $ bash findings/gray16_turns_white.sh    # one ramp from black to white, as gray and as colour; fails if changed
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check Pillow==13.0.0 opencv-python-headless==5.0.0.93 numpy==2.4.6
cat > "$work/ramp.py" <<'PY'
import sys
import cv2 # Pillow itself writes no colour of 16 bits
import numpy as np
from PIL import Image
ramp = (np.arange(5, dtype=np.uint16) * 16383)[None] # 0 to 65532
for name, pixels in (("gray", ramp), ("colour", np.dstack([ramp] * 3))):
    file = f"{sys.argv[1]}/{name}.png"
    cv2.imwrite(file, pixels)
    picture = Image.open(file)
    print(f"{name}, mode {picture.mode}: as L", *np.asarray(picture.convert("L"))[0],
          "| as RGB", *np.asarray(picture.convert("RGB"))[0, :, 0])
print("gray / 257:", *np.rint(np.asarray(Image.open(f"{sys.argv[1]}/gray.png"))[0] / 257).astype(int))
PY
"$work/venv/bin/python" "$work/ramp.py" "$work" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
gray, mode I;16: as L 0 255 255 255 255 | as RGB 0 255 255 255 255
colour, mode RGB: as L 0 63 127 191 255 | as RGB 0 63 127 191 255
gray / 257: 0 64 127 191 255
SEEN
