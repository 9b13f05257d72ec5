"""A mask's file, in any program's form -> white where the picture is edited."""

import numpy as np
from PIL import Image

from common import InputError
from library.data.picture_files import decode

def read_mask(path, content=None):
    """-> PIL image "L", white = the edited region. Other programs write masks in these forms:

        gray, also soft; 1 bit; 16 bits   white is the region; in 16 bits 65535 or, if no level is above it, 255
        labels 0 and 1 only               1 is the region
        black and one other colour        the other colour is the region
        white on transparency             the white is the region, as opaque as it is
        black, or a photo, with a hole    the hole is the region (as ComfyUI's mask editor and MagicBrush have it)

    Alpha that is the same everywhere, and any colour under alpha 0, mean nothing. content: as for read_image.
    InputError if the mask could mean several things. One that selects nothing or everything is returned: see
    mask_is_empty."""
    image = read_form(decode(path, content))
    if image is None:
        raise InputError(f"{path}: its colours, labels or transparency do not tell which region is edited; paint the "
                         "edited region white on black")
    return image.convert("L")

def mask_is_empty(mask):
    """Whether read_mask's mask selects nothing or everything: all of it weighs the same (but for noise of JPEG)."""
    low, high = mask.getextrema()
    return high - low < 8

# masks by hand
WHITE, BLACK = 224, 31 # levels that white strokes have at least, and black at most: editors and WebP round them
OFF = 32 # levels that a channel may be off the colour that it is taken for

def read_form(image):
    """A mask as its file has it -> PIL image "L", white = the edited region; None if it could mean several things.
    common.read_mask lists the forms."""
    if image.mode.startswith("I;16"):
        mask_HW = np.asarray(image)
        if mask_HW.max() >= 2**14:
            mask_HW = (np.arange(2**16) / np.float32(257)).round().astype(np.uint8)[mask_HW]
    else:
        rgba_HW4 = rgba_of(image)
        if rgba_HW4[..., 3].min() == 255 and np.ptp(rgba_HW4[..., :3], -1).max() <= 32: # gray, through JPEG or WebP
            del rgba_HW4
            mask_HW = np.asarray(image.convert("RGB").convert("L"))
        else:
            mask_HW = region_of(rgba_HW4)
    if mask_HW is None:
        return None
    has_level = np.zeros(2**16, bool)
    for row_W in mask_HW: # all at once would take 8 bytes a pixel
        has_level[row_W] = True
    levels = np.flatnonzero(has_level).tolist()
    dark = [level for level in levels if level < 255]
    # Up to 32 levels below 96 are labels (COCO has 91), beside which 255 means "ignore", or a gray without any white.
    # In a JPEG or WebP they are noise.
    is_labels = image.format in ("PNG", "BMP", "TIFF") and 1 < len(dark) <= 32 and dark[-1] < 96
    if is_labels and levels == [0, 1]:
        mask_HW = mask_HW * 255
    elif is_labels or levels[-1] > 255:
        return None
    return Image.fromarray(mask_HW.astype(np.uint8))

def rgba_of(image):
    """-> its pixels as RGBA: uint8 (H, W, 4). In strips, as PIL needs three copies for this."""
    w, h = image.size
    rgba_HW4 = np.empty((h, w, 4), np.uint8)
    for top in range(0, h, 256):
        rgba_HW4[top:top + 256] = image.crop((0, top, w, min(top + 256, h))).convert("RGBA")
    return rgba_HW4

def region_of(rgba_HW4):
    """The pixels of a mask that has colours or transparency -> its region: uint8 (H, W), white = edited. None if it
    could be another region just as well. common.read_mask lists the forms."""
    colours_HW3, alpha_HW = rgba_HW4[..., :3], rgba_HW4[..., 3]
    if not alpha_HW.any(): # a layer that nothing was painted on
        return alpha_HW
    if alpha_HW.min() < alpha_HW.max():
        shown_N3 = colours_HW3[alpha_HW >= alpha_HW.max() / 2] # where less is seen, programs round the colour
        if shown_N3.min() >= WHITE:
            return alpha_HW
        # black strokes and cut-out objects look like this, too, but cover less than a picture with a hole
        is_hole = (shown_N3.max() <= BLACK or is_photo(shown_N3)) and (alpha_HW >= 128).mean() > 0.5
        # else they are strokes of a colour, or black ones beside white ones: what is transparent may be the region, or
        # what is not edited
        return 255 - alpha_HW if is_hole else None
    if np.ptp(colours_HW3, -1).max() <= OFF: # gray, all of it half transparent
        return np.asarray(Image.fromarray(colours_HW3).convert("L"))
    bright_HW = colours_HW3.max(-1)
    brightest = colours_HW3.reshape(-1, 3)[bright_HW.argmax()]
    region_HW = np.empty_like(bright_HW)
    for region_W, bright_W, colours_W3 in zip(region_HW, bright_HW, colours_HW3): # at once: 40 bytes a pixel
        share_W = bright_W / np.float32(brightest.max()) # of this colour; less at soft edges
        if abs(share_W[:, None] * brightest - colours_W3).max() > OFF:
            return None
        region_W[:] = (255 * share_W).round()
    return region_HW

def is_photo(shown_N3):
    """Whether a tenth of these colours, uint8 (N, 3), has other ones than the eight commonest, of 32 levels a channel.
    Strokes and labels have not, nor have drawings in flat colours: these cannot be told from labels."""
    some_N3 = shown_N3[::len(shown_N3) // 10**5 + 1]
    counts = np.sort(np.bincount(some_N3 // 8 @ [1024, 32, 1]))
    return counts[:-8].sum() > len(some_N3) / 10
