#!/usr/bin/env bash
# ffmpeg saves the same frame of a video in other colours as JPEG or WebP than as PNG.
#
# ffmpeg 9.0.2 (imageio-ffmpeg 0.8.1): HD video has BT.709's matrix between YCbCr and RGB. A PNG frame is converted
# rightly. For JPEG and WebP the YCbCr numbers are copied; but these formats are read by BT.601's matrix, so a red of
# 200 60 40 becomes 186 47 40. The filter scale=out_color_matrix=bt601 mends it. Video of BT.601 is
# right in all of them.
#
# $ bash findings/ffmpeg_jpeg_of_hd_video.sh    # prints one colour, read back from both files; fails if it changes
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check imageio-ffmpeg==0.8.1 Pillow==13.0.0
cat > "$work/frames.py" <<'PY'
import subprocess
import sys
import imageio_ffmpeg
from PIL import Image

def ffmpeg(*words):
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *words], check=True, cwd=sys.argv[1])

Image.new("RGB", (64, 64), (200, 60, 40)).save(f"{sys.argv[1]}/red.png")
for matrix, tag in (("bt709", "bt709"), ("bt601", "smpte170m")):
    ffmpeg("-loop", "1", "-i", "red.png", "-frames:v", "3", "-vf", f"scale=out_color_matrix={matrix}",
           "-colorspace", tag, "-pix_fmt", "yuv420p", "-c:v", "libx264", "v.mp4")
    for name, words in (("png", []), ("jpg", []), ("webp", []), ("jpg", ["-vf", "scale=out_color_matrix=bt601"])):
        ffmpeg("-i", "v.mp4", "-frames:v", "1", "-q:v", "2" if name == "jpg" else "90", *words, f"frame.{name}")
        print(matrix, name, *words, *Image.open(f"{sys.argv[1]}/frame.{name}").convert("RGB").getpixel((32, 32)))
PY
"$work/venv/bin/python" "$work/frames.py" "$work" 2>&1 | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
bt709 png 199 58 39
bt709 jpg 186 47 40
bt709 webp 187 47 42
bt709 jpg -vf scale=out_color_matrix=bt601 198 59 38
bt601 png 200 59 39
bt601 jpg 200 61 38
bt601 webp 201 61 40
bt601 jpg -vf scale=out_color_matrix=bt601 200 61 38
SEEN
