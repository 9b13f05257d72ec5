#!/usr/bin/env bash
# The same array is a picture in tensorboard and black in wandb, or right in wandb and white in tensorboard.
#
# tensorboard 2.21.0 (torch 2.13.0's SummaryWriter) multiplies all but uint8 by 255; wandb 0.31.0 casts all numbers to
# bytes as they are. So floats of 0 to 1 are right in one and black in the other, and whole numbers of 0 to 255 (an
# int64 mask, say) white in one and right in the other. Floats of -1 to 1, as a VAE gives, lose their dark half in
# tensorboard; in wandb black becomes white, and all else black. Only uint8 is drawn alike. Neither says a word.
#
# $ bash findings/arrays_in_trackers.sh    # five grays from black to white as four kinds of array; fails if changed
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 tensorboard==2.21.0 \
    wandb==0.31.0 Pillow==13.0.0 numpy==2.4.6
cat > "$work/draw.py" <<'PY'
import io
import sys
import numpy as np
import wandb
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

grays = np.tile(np.array([0, 64, 128, 191, 255], np.uint8)[None, :, None], (4, 1, 3)) # (height, width, channels)
kinds = {"uint8": grays, "int64 of 0 to 255": grays.astype(np.int64),
         "float32 of 0 to 1": np.float32(grays / 255), "float32 of -1 to 1": np.float32(grays / 127.5 - 1)}
writer = SummaryWriter(sys.argv[1])
for name, array in kinds.items():
    writer.add_image(name, array, dataformats="HWC")
writer.close()
events = EventAccumulator(sys.argv[1]).Reload()
for name, array in kinds.items():
    by_tensorboard = Image.open(io.BytesIO(events.Images(name)[0].encoded_image_string))
    by_wandb = wandb.Image(array).image
    print(f"{name}: tensorboard", *np.asarray(by_tensorboard)[0, :, 0], "| wandb", *np.asarray(by_wandb)[0, :, 0])
PY
"$work/venv/bin/python" "$work/draw.py" "$work/log" 2> "$work/words.txt" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
uint8: tensorboard 0 64 128 191 255 | wandb 0 64 128 191 255
int64 of 0 to 255: tensorboard 0 255 255 255 255 | wandb 0 64 128 191 255
float32 of 0 to 1: tensorboard 0 64 128 191 255 | wandb 0 0 0 0 1
float32 of -1 to 1: tensorboard 0 0 1 127 255 | wandb 255 0 0 0 1
SEEN
