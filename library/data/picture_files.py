"""
Files of pictures and masks -> pixels that the rest can rely on.

A picture becomes RGB of 8 bits in sRGB, turned upright (read_image). The model and all else take pixels to be sRGB:
Display P3 (phones), Adobe RGB (cameras), CMYK (print) and gray of another gamma hold other numbers for the same
colours, so a colour profile is converted. A mask, in any program's form, becomes gray with the edited region in white
(read_mask). The chapters, in the order in which a file meets them:

    opening     PNG, JPEG, WebP and BMP; TIFF, AVIF and HEIC; what is refused. Only the header is read
    pixels      rotation by EXIF, size, decoding, read_image, the size to resize to
    colours     ICC profiles, 16 bits, transparency
    masks       the forms in which other programs write them
    memory      how many pixels threads may hold at once
"""
import contextlib
import functools
import hashlib
import io
import math
import os
import sys
import threading
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms
from PIL.ImageCms import Flags, Intent

from common import InputError, MAX_PIXELS, tell
from library.files import stray_files
from library.models.host_memory import host_memory

Image.MAX_IMAGE_PIXELS = None # PIL's own limit is a warning first, and threads cannot silence a warning safely

# ---- opening: only the header is read --------------------------------------------------------------------------------

PAGE_KIND, BITS, WHITE_IS_ZERO, PLANES, SIGNED, DNG = 254, 258, 262, 284, 339, 50706 # tags of TIFF
HDR, WIDE = (16, 18), (9, 12) # of ITU-T H.273: curves of PQ and HLG, primaries of BT.2020 and P3

def open_image(path, content=None):
    """Header only: a PIL image whose size is known and allowed; its raw_mode is PIL's name for the pixels in the file,
    such as "RGB;16B", or "". InputError names the file. content: the hash of dataset.picture_facts, which the file's
    bytes, read once, must have."""
    if not os.path.isfile(path): # a FIFO or socket would hang, a folder or dangling link cannot be read
        raise InputError(f"{path}: {stray_files.why_gone(path) or 'no file of that name; add it'}")
    source = path if content is None else None # what cannot be read is not opened without its hash, either
    try:
        if content is not None:
            data = Path(path).read_bytes()
            if not content.startswith(hashlib.sha256(data).hexdigest()): # a mark may follow
                raise InputError(f"{path}: has changed since it was looked at; run the same command again")
            source = io.BytesIO(data)
        image = Image.open(source, formats=["PNG", "JPEG", "WEBP", "BMP"])
    except PermissionError:
        raise InputError(f"{path}: may not be read; mend its permissions")
    except Exception: # it is another kind; or damaged, and can fail in any way
        image = open_photo(path, source)
    if image.width * image.height > MAX_PIXELS:
        raise InputError(f"{path}: {image.width}x{image.height} is over {MAX_PIXELS // 10**6} megapixels; shrink it")
    # PIL would read the first one, which of layers is not the picture
    if image.format in ("PNG", "WEBP", "AVIF", "TIFF") and image.is_animated:
        raise InputError(f"{path}: several frames or pages, maybe a thumbnail; export one alone")
    if image.format == "PNG" and "icc_profile" not in image.info:
        check_numbers(path)
    if image.format == "PNG" and "exif" not in image.info: # it may stand behind the pixels
        with contextlib.suppress(Exception): # damaged notes must not matter
            notes = Image.open(image.fp, formats=["PNG"])
            notes.load_prepare() # what PIL does before and after it decodes the pixels, which is left out here: sizes
            notes.load_end() # are asked of a whole dataset
            image.info |= notes.info
    args = image.tile[0].args if image.tile else ""
    image.raw_mode = args if isinstance(args, str) else args[0]
    return image

def open_photo(path, source):
    """A file that is no PNG, JPEG, WebP or BMP -> PIL image, of which only the header was read: a TIFF, an AVIF or a
    HEIC. source: the path, or its bytes as a file. InputError if it is none of these, or would be misread."""
    formats = ["TIFF", "AVIF"]
    try:
        import pillow_heif
        pillow_heif.register_heif_opener()
        formats.append("HEIF")
    except ImportError: # most people have no HEIC
        pass
    try:
        image = Image.open(source, formats=formats)
        image.filename = "" # or PIL maps the file into memory, and scrambles a TIFF that has to be turned
        if image.format == "TIFF":
            check_tiff(path, image)
        elif "icc_profile" not in image.info:
            check_numbers(path)
    except Exception: # a damaged picture can fail in any way
        raise InputError(f"{path}: {why_not(path, formats)}")
    image.info.pop("xmp", None) # PIL would turn by it, too, which these formats do not mean
    return image

def why_not(path, formats):
    """What is wrong with a file that none of these formats can open, and what to do."""
    try:
        with open(path, "rb") as file:
            head = file.read(32)
    except OSError as e: # of a broken disk
        return f"cannot be read ({e.strerror}); take another copy"
    stray_files.refuse_pointer(path, head)
    if head.startswith((b"\xff\n", b"\0\0\0\fJXL ")):
        return "a JPEG XL, which is not read; export it as PNG, or run djxl FILE FILE.png"
    if not head:
        return "an empty file; replace it"
    # HEIC begins with the length of its first box, "ftyp", and heic, heix, hevc, mif1, ...
    if head[4:8] == b"ftyp" and head[8:10] in (b"he", b"mi", b"ms") and "HEIF" not in formats:
        return "HEIC needs a package; pip install pillow-heif"
    if head[:4] in (b"II*\0", b"MM\0*"): # also of most raw files
        return "a TIFF or raw file of a kind that is not read; export it as a JPEG, or as a TIFF of 8 or 16 bits"
    return "no PNG, JPEG, WebP, BMP, TIFF, AVIF or HEIC picture; replace it"

def check_tiff(path, image):
    """InputError for a TIFF whose first page is not the picture, or whose numbers PIL would take for others."""
    tags = image.tag_v2
    if tags.get(PAGE_KIND, 0) & 1 or DNG in tags:
        raise InputError(f"{path}: a raw file, of which only the preview could be read; develop it, and export a JPEG")
    bits = tags.get(BITS, (1,))
    is_other_gray = image.mode.startswith("I;16") and (bits != (16,) or tags[WHITE_IS_ZERO] != 1)
    is_planar = tags.get(PLANES) == 2 and bits[0] == 16
    if image.mode in ("I", "F", "LAB") or 2 in tags.get(SIGNED, ()) or is_other_gray or is_planar:
        raise InputError(f"{path}: {bits[0]} bits of a kind that is not read (floats, signed, Lab, planar, or with "
                         "white as 0); save it in RGB with 8 or 16 bits, interleaved")

def check_numbers(path):
    """InputError for an AVIF, HEIC or PNG whose colours are told by numbers of ITU-T H.273, as those of an ICC profile
    would be, and are not sRGB's: PIL does not read these."""
    with open(path, "rb") as file:
        head = file.read(2**16)
    _, found, numbers = head.partition(b"colrnclx") # two bytes each, the high one first
    primaries, curve = numbers[1:4:2] if found else (0, 0)
    if head.startswith(b"\x89PNG"):
        _, found, numbers = head.partition(b"IDAT")[0].partition(b"cICP")
        primaries, curve = numbers[:2] if found else (0, 0)
    if primaries in WIDE or curve in HDR:
        raise InputError(f"{path}: HDR or wide colours without an ICC profile; export it as JPEG or TIFF")

# ---- pixels: upright, decoded, resized -------------------------------------------------------------------------------

TURN = {2: Image.FLIP_LEFT_RIGHT, 3: Image.ROTATE_180, 4: Image.FLIP_TOP_BOTTOM, 5: Image.TRANSPOSE,
        6: Image.ROTATE_270, 7: Image.TRANSVERSE, 8: Image.ROTATE_90} # by EXIF orientation
# Of 16 bits a channel PIL keeps the higher byte; told the other order of bytes, it keeps the lower one. (N: libtiff's,
# i.e. the processor's. RGBa: times alpha; where that is partial, the lower byte is not exact.)
LOWER = {f"{colours};16{order}": f"{colours};16{other}" for colours in ("RGB", "RGBX", "RGBA", "RGBa")
         for order, other in ("BL", "LB", "NB")}

def orientation(image):
    """EXIF orientation, 1 to 8 if there is a sound one, from the header alone: PngImageFile.getexif would decode each
    picture of a dataset, and ImageOps.exif_transpose trips over damaged EXIF, which must not matter."""
    if image.format != "TIFF": # PIL turns that by itself
        with contextlib.suppress(Exception): # whatever a damaged block makes PIL do
            return Image.Image.getexif(image).get(0x0112)

def image_size(path):
    """(width, height) as it will be seen, i.e. after the EXIF rotation. InputError for sizes that make no sense."""
    with open_image(path) as image:
        w, h = image.size
        if orientation(image) in range(5, 9): # lies on its side
            w, h = h, w
    if min(w, h) < 32 or max(w, h) > 10 * min(w, h):
        raise InputError(f"{path}: {w}x{h}; sides of at least 32 pixels and an aspect of at most 10:1 are needed")
    return w, h

def decode(path, content, raw_mode=None):
    """-> PIL image in the file's own mode and format, after the EXIF rotation. content: as for open_image. raw_mode: in
    place of the file's, for another byte of its channels."""
    with open_image(path, content) as image:
        turn = TURN.get(orientation(image))
        if raw_mode:
            image.tile = [tile._replace(args=raw_mode if image.format == "PNG" else (raw_mode, *tile.args[1:]))
                          for tile in image.tile]
        try:
            image.load()
        except Exception as e: # a damaged picture can fail in any way
            raise InputError(f"{path}: broken picture ({e}); replace it")
    turned = image.transpose(turn) if turn is not None else image
    turned.format, turned.raw_mode = image.format, image.raw_mode # which transpose drops
    return turned

def read_image(path, content=None):
    """-> RGB PIL image in sRGB: EXIF rotation applied, alpha composited on white, 16-bit gray scaled (PIL alone clips
    it), colours of 16 bits converted as such. content: as for open_image; InputError if the file has changed since."""
    return to_rgb(decode(path, content), path, content)

def to_rgb(image, path, content=None):
    """What decode gives -> as read_image returns it."""
    if "icc_profile" in image.info or image.mode.startswith("I;16") or image.has_transparency_data:
        lower = decode(path, content, LOWER[image.raw_mode]) if find_tables(image, path) else None
        return to_plain(image, path, lower)
    return image.convert("RGB")

def fit_size(size, area, upscale=True):
    """(width, height) to resize to: the stock pipeline's calculate_dimensions(area, w / h), i.e. sides rounded to 32;
    with area = 'native', or where upscale is off and the picture is smaller, its own sides rounded to 32."""
    w, h = size
    if area != "native" and (upscale or w * h >= area):
        ratio = w / h
        w = math.sqrt(area * ratio)
        h = w / ratio
    return tuple(max(round(side / 32) * 32, 32) for side in (w, h)) # stock's can be 0 for long thin pictures

# ---- colours: profiles, 16 bits, transparency ------------------------------------------------------------------------

ROWS = 256 # of a strip
CODES = np.arange(2**16) / (2**16 - 1) # of 16 bits, from 0 to 1
GRAYS = (255 * CODES).round().astype(np.uint8) # of 8 bits, for each
# if the codes are sRGB, their light; if they are light, its level in sRGB
LIGHT = np.where(CODES <= 0.04045, CODES / 12.92, ((CODES + 0.055) / 1.055) ** 2.4).astype(np.float32)
LEVELS = np.interp(CODES, LIGHT, 255 * CODES).round().astype(np.uint8)
LARGE_PROFILE = 2**24 # bytes; those of printers have up to 3 MB
# 16 levels of red, green and blue each; as "L" nearly all grays
PROBE = Image.fromarray(np.stack(np.meshgrid(*3 * [np.arange(0, 256, 17, dtype=np.uint8)]), -1).reshape(64, 64, 3))
CLOSE = 2 # levels by which profiles that say sRGB differ from it: small ones have curves of few points

@functools.lru_cache(16) # a camera gives all its pictures the same profile
def conversion(profile, mode):
    """An ICC profile's bytes, a picture's mode -> (the transform to sRGB or None, what is wrong with the profile or
    None). A profile that changes nothing, i.e. sRGB under any name, needs no transform."""
    spaces = ["CMYK" if mode == "CMYK" else "RGB"]
    if mode.startswith(("1", "L", "I;16")): # gray; editors save it with profiles of RGB, too
        spaces = ["GRAY", "RGB"]
    try:
        source, srgb = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
        space = source.profile.xcolor_space.strip()
        if space not in spaces:
            return None, f"is for {space}, and the picture is {spaces[0]}"
        if mode.startswith("I;16") and space == "RGB":
            source, space = as_gray(profile, b"gTRC"), "GRAY"
        pixels = "L" if space == "GRAY" else space
        # Without the cache threads may share it. Of three curves and a matrix, as phones and cameras have, the library
        # makes tables that are exact; those of other profiles miss dark grays by up to 10 levels, but take a tenth of
        # the time.
        exact = Flags.NONE if pixels == "RGB" and source.profile.is_matrix_shaper else Flags.NOOPTIMIZE
        build = functools.partial(ImageCms.buildTransform, source, srgb, outMode="RGB", flags=Flags.NOCACHE | exact)
        if pixels != "CMYK": # perceptual tables change colours even of sRGB to sRGB, so it is not asked here
            probe = PROBE.convert(pixels)
            seen = build(inMode=pixels, renderingIntent=Intent.RELATIVE_COLORIMETRIC).apply(probe)
            change = np.asarray(seen, int) - np.asarray(probe.convert("RGB"))
            if abs(change).max() <= CLOSE:
                return None, None
        # of more than 8 bits the library takes gray alone
        pixels = mode if mode.startswith("I;16") else pixels
        return build(inMode=pixels, renderingIntent=Intent.PERCEPTUAL), None
    except Exception: # a damaged profile can fail in any way
        return None, "is broken"

def find_conversion(profile, mode):
    """conversion, of a profile that is small enough to be remembered."""
    if len(profile or b"") > LARGE_PROFILE:
        return None, f"has over {LARGE_PROFILE:,} bytes"
    return conversion(profile, mode)

def mark_of(image, path):
    """What open_image gives -> what dataset.picture_facts writes behind its content hash. InputErrors: find_tables'."""
    find_tables(image, path)
    transform, _ = find_conversion(image.info.get("icc_profile"), image.mode)
    return " in sRGB" if transform else ""

# In linear light, as GIMP and darktable export it, the darks are in the lower byte of 16 bits. PIL converts colours of
# 8 bits only, which would be up to 20 levels off; so three curves and a matrix, as nearly all profiles are, are applied
# here. But PIL reads the curves, as it converts gray of 16 bits.

def as_gray(profile, curve):
    """An ICC profile's bytes -> a profile of gray with this one of its curves: b"rTRC", b"gTRC" or b"bTRC"."""
    named = profile[20:].replace(curve, b"kTRC", 1) # its table of contents comes first
    return ImageCms.ImageCmsProfile(io.BytesIO(profile[:16] + b"GRAY" + named))

@functools.lru_cache(4) # of a megabyte each
def tables_of(profile):
    """An ICC profile's bytes -> (float32 (3, 65536): the light of red, green and blue at each level; the matrix (3, 3)
    from these lights to sRGB's). None if it has no curves and matrix, or more than these."""
    with contextlib.suppress(Exception): # a damaged profile can fail in any way
        source, srgb = ImageCms.ImageCmsProfile(io.BytesIO(profile)).profile, ImageCms.createProfile("sRGB")
        coded = as_gray(ImageCms.ImageCmsProfile(srgb).tobytes(), b"rTRC")
        levels = Image.fromarray(np.arange(2**16, dtype=np.uint16)[None])
        # optimized, they would have 4096 levels
        curves = [ImageCms.buildTransform(as_gray(profile, name), coded, "I;16", "I;16", flags=Flags.NOOPTIMIZE)
                  for name in (b"rTRC", b"gTRC", b"bTRC")]
        lights = LIGHT[[np.asarray(curve.apply(levels))[0] for curve in curves]]
        primaries = [np.array([p.red_colorant[0], p.green_colorant[0], p.blue_colorant[0]]).T for p in (srgb, source)]
        matrix = np.linalg.solve(*primaries).astype(np.float32)
        return (lights, matrix) if b"A2B0" not in profile else None

def find_tables(image, path):
    """What open_image gives -> tables_of its profile if it has colours of 16 bits a channel, and they are converted;
    else None. InputError if only 8 bits of them could be."""
    raw_mode, profile = image.raw_mode, image.info.get("icc_profile")
    transform, _ = find_conversion(profile, "LA" if raw_mode == "LA;16B" else image.mode)
    if not transform or ";16" not in raw_mode or raw_mode[0] == "I": # gray is converted whole
        return None
    tables = tables_of(profile)
    if not tables or raw_mode not in LOWER:
        raise InputError(f"{path}: 16 bits with a profile that is applied to 8 only (one of tables, or of gray with "
                         "alpha); save it in sRGB, or with 8 bits")
    return tables

def convert_16(image, lower, lights, matrix):
    """A picture's higher and lower bytes as images -> RGB image in sRGB, without alpha. lights, matrix: tables_of's."""
    levels_HW3 = 256 * np.asarray(image.convert("RGB"), np.uint16) + np.asarray(lower.convert("RGB"))
    light_HW3 = lights[range(3), levels_HW3] @ matrix.T
    return Image.fromarray(LEVELS[(65535 * light_HW3.clip(0, 1)).round().astype(np.uint16)])

warned = set() # paths: a file is read for the VAE, the text encoder and the sheets

def to_srgb(image, profile, path, lower=None):
    """A picture whose ICC profile has these bytes -> the same in sRGB. A profile that cannot be used is ignored, with a
    line: the colours count as sRGB, as they do without any. lower: the lower bytes of 16 bits a channel, if tables_of
    the profile are to be used."""
    transform, problem = find_conversion(profile, image.mode)
    if problem and path not in warned:
        warned.add(path)
        tell(f"warning: {path}: its colour profile {problem}; it is ignored, and the colours count as sRGB",
             file=sys.stderr)
    if not transform:
        return image
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    if lower:
        image = convert_16(image, lower, *tables_of(profile))
    else:
        image = transform.apply(image.convert(transform.input_mode))
    if alpha:
        image.putalpha(alpha)
    return image

def to_plain(image, path, lower=None):
    """A decoded picture -> RGB of 8 bits, opaque, in sRGB and without a profile, as read_image returns it. In
    strips, since most of these steps make a copy: a picture of 160 megapixels would take gigabytes. lower: as for
    to_srgb."""
    # it is None where a PNG's or JPEG's is broken
    has_profile, profile = "icc_profile" in image.info, image.info.get("icc_profile")
    plain = Image.new("RGB", image.size)
    for top in range(0, image.height, ROWS):
        box = (0, top, image.width, min(top + ROWS, image.height))
        strip = image.crop(box)
        strip.info.pop("icc_profile", None)
        if has_profile:
            strip = to_srgb(strip, profile, path, lower and lower.crop(box))
        if strip.mode.startswith("I;16"):
            strip = Image.fromarray(GRAYS[np.asarray(strip)])
        if strip.has_transparency_data:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
        plain.paste(strip.convert("RGB"), (0, top))
    return plain

# ---- masks: white where the picture is edited ------------------------------------------------------------------------

def read_mask(path, content=None):
    """-> PIL image "L", white = the edited region. Other programs write masks in these forms:

        gray, also soft; 1 bit; 16 bits   white is the region; in 16 bits 65535 or, if no level is above it, 255
        labels 0 and 1 only               1 is the region
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

WHITE, BLACK = 224, 31 # levels that white strokes have at least, and black at most: editors and WebP round them
OFF = 32 # levels that a channel may be off the colour that it is taken for

def read_form(image):
    """A mask as its file has it -> PIL image "L", white = the edited region; None if it could mean several things.
    read_mask lists the forms."""
    if image.mode.startswith("I;16"):
        mask_HW = np.asarray(image)
        if mask_HW.max() >= 2**14:
            mask_HW = GRAYS[mask_HW]
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
    for top in range(0, h, ROWS):
        rgba_HW4[top:top + ROWS] = image.crop((0, top, w, min(top + ROWS, h))).convert("RGBA")
    return rgba_HW4

def region_of(rgba_HW4):
    """The pixels of a mask that has colours or transparency -> its region: uint8 (H, W), white = edited. None if it
    could be another region just as well. read_mask lists the forms."""
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
    return None # colours, which may stand for anything

def is_photo(shown_N3):
    """Whether a tenth of these colours, uint8 (N, 3), has other ones than the eight commonest, of 32 levels a channel.
    Strokes and labels have not, nor have drawings in flat colours: these cannot be told from labels."""
    some_N3 = shown_N3[::len(shown_N3) // 10**5 + 1]
    counts = np.sort(np.bincount(some_N3 // 8 @ [1024, 32, 1]))
    return counts[:-8].sum() > len(some_N3) / 10

# ---- memory ----------------------------------------------------------------------------------------------------------

# Threads hold pictures at full size, to resize or compare them. A PNG of 600 KB may hold 160 megapixels, i.e. a
# gigabyte while it is decoded, and four to sixteen threads read at once. So there is a limit for all of them together.

# PIL takes memory in blocks. Those of up to 32 MB, such as its usual 16 MB, stay with their thread when they are freed
# (glibc's heaps), and four threads then keep 6 GB; larger ones go back to the system at once.
Image.core.set_block_size(2**26)

# 8 bytes each at the peak (12 if 16 bits are converted), i.e. 2 GB: five photographs of 48 megapixels, or one that is
# as large as may be. Whatever needs more, such as a pair of the largest, is read alone.
MOST = MAX_PIXELS * 3 // 2

@functools.cache
def pixels_that_fit():
    """Those that half of the memory holds that is free at the first picture."""
    free, _ = host_memory()
    return free // 2 // 8

turn = threading.Condition()
held = {} # {thread: the pixels that it holds}

def pixels_of(path):
    """From the picture's header. What cannot be opened holds nothing: reading it names the error."""
    with contextlib.suppress(InputError), open_image(path) as image:
        return image.width * image.height
    return 0

@contextlib.contextmanager
def reserve_pixels(paths):
    """Waits until there is room for these pictures, all at once: if each of two threads had one picture and waited for
    room for a second one, neither would go on. So a thread that holds some already does not wait."""
    thread = threading.get_ident()
    if thread in held:
        yield
        return
    pixels = sum(map(pixels_of, paths))
    most = min(MOST, pixels_that_fit())
    with turn:
        turn.wait_for(lambda: not held or sum(held.values()) + pixels <= most)
        held[thread] = pixels
    try:
        yield
    finally:
        with turn:
            del held[thread]
            turn.notify_all()
