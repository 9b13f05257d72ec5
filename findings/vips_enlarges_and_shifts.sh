#!/usr/bin/env bash
# A picture that libvips enlarges has moved by half a pixel, right and down; one that it reduces has not.
#
# libvips 8.18.7: resize() places the pixels' centres rightly when it reduces. When it enlarges, by any kernel but
# "nearest", the result lies half a pixel of its own further right and down, whatever the factor. thumbnail_image() and
# sharp use the same code. Pillow's and OpenCV's results stay where they are. Of a before/after pair whose one side was
# brought to the other's size so, all edges differ a little. Enlarge both sides by the same program.
#
# $ bash findings/vips_enlarges_and_shifts.sh    # where a round spot is, enlarged four times; fails if changed
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check Pillow==13.0.0 pyvips==3.2.0 pyvips-binary==8.18.7 \
    opencv-python-headless==5.0.0.93 numpy==2.4.6
cat > "$work/spot.py" <<'PY'
import cv2
import numpy as np
import pyvips
from PIL import Image
y, x = np.mgrid[:80, :120] + 0.5
small = (200 * np.exp(-((x - 60) ** 2 + (y - 40) ** 2) / 200)).round().astype(np.uint8) # its middle is the picture's
vips = pyvips.Image.new_from_array(small)
ways = {"Pillow LANCZOS": np.asarray(Image.fromarray(small).resize((480, 320), Image.LANCZOS)),
        "OpenCV INTER_CUBIC": cv2.resize(small, (480, 320), interpolation=cv2.INTER_CUBIC)}
for kernel in ("nearest", "linear", "cubic", "lanczos3"):
    ways[f"libvips {kernel}"] = vips.resize(4, kernel=kernel).numpy()
ways["libvips thumbnail_image"] = vips.thumbnail_image(480, height=320, size="force").numpy()
ways["libvips reduced"] = vips.resize(0.5).numpy()
for way, picture in ways.items():
    h, w = picture.shape
    y, x = np.mgrid[:h, :w] + 0.5
    weight = picture.astype(float)
    right, down = [(weight * axis).sum() / weight.sum() - middle for axis, middle in ((x, w / 2), (y, h / 2))]
    print(f"{way}: {right + 0:+.1f} px right, {down + 0:+.1f} px down")
PY
"$work/venv/bin/python" "$work/spot.py" | sed 's/-0\.0/+0.0/g' | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
Pillow LANCZOS: +0.0 px right, +0.0 px down
OpenCV INTER_CUBIC: +0.0 px right, +0.0 px down
libvips nearest: +0.0 px right, +0.0 px down
libvips linear: +0.5 px right, +0.5 px down
libvips cubic: +0.5 px right, +0.5 px down
libvips lanczos3: +0.5 px right, +0.5 px down
libvips thumbnail_image: +0.5 px right, +0.5 px down
libvips reduced: +0.0 px right, +0.0 px down
SEEN
