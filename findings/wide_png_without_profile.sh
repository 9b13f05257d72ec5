#!/usr/bin/env bash
# A wide-gamut PNG that says so in the new way (cICP) is read, and written again, as sRGB by Pillow and libvips.
#
# Pillow 13.0.0, libvips 8.18.7: in PNG's third edition (June 2025) four bytes may name the colour space in place of an
# ICC profile, and go before one; 12 13 0 1 is Display P3. One would expect what these readers do with a profile: keep
# it beside the picture, so that it can be applied. They drop it, and no field of the picture names it. A P3 red of
# 200 60 40 is sRGB's 218 42 23, and is taken for 200 60 40 from then on, also in the file that they write.
#
# $ bash findings/wide_png_without_profile.sh    # what is left of either tag; fails if that changes
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check Pillow==13.0.0 pyvips==3.2.0 pyvips-binary==8.18.7
cat > "$work/tags.py" <<'PY'
import os
import sys
import pyvips
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo
os.chdir(sys.argv[1])
red, wide = Image.new("RGB", (32, 32), (200, 60, 40)), PngInfo()
wide.add(b"cICP", bytes([12, 13, 0, 1])) # primaries of P3, sRGB's curve, RGB, full range
red.save("cICP.png", pnginfo=wide)
any_profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
red.save("iCCP.png", icc_profile=any_profile)
for name in ("iCCP", "cICP"):
    picture = Image.open(f"{name}.png")
    picture.load()
    picture.save("copy_of_pillow.png")
    by_vips = pyvips.Image.new_from_file(f"{name}.png")
    by_vips.write_to_file("copy_of_vips.png")
    colour = [field for field in by_vips.get_fields() if "profile" in field or "cicp" in field.lower()]
    files = (f"{name}.png", "copy_of_pillow.png", "copy_of_vips.png")
    kept = [name.encode() in open(file, "rb").read() for file in files]
    print(f"{name}: Pillow has {[*picture.info]}, libvips {colour}; in file and copies: {kept}")
PY
"$work/venv/bin/python" "$work/tags.py" "$work" 2> "$work/words.txt" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
iCCP: Pillow has ['icc_profile'], libvips ['icc-profile-data']; in file and copies: [True, True, True]
cICP: Pillow has [], libvips []; in file and copies: [True, False, False]
SEEN
