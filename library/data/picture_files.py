"""
Photographs as cameras and editors make them: TIFF, AVIF and HEIC files, 16-bit gray, and colour profiles other than
sRGB. common.py asks here only about a picture that has one of these.

The model and all else take pixels to be sRGB. Display P3 (phones), Adobe RGB (cameras), CMYK (print) and gray of
another gamma hold other numbers for the same colours, so they are converted.
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

MAX_TOKENS = 65536 # of a picture as it is encoded or generated: 4096x4096 pixels
Image.MAX_IMAGE_PIXELS = None # PIL's own limit is a warning first, and threads cannot silence a warning safely

def open_image(path, content=None):
    """Header only: a PIL image whose size is known and allowed. InputError names the file. content: look_at's hash,
    which the file's bytes, read once, must have."""
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
    if image.format in ("PNG", "WEBP", "AVIF") and image.n_frames > 1:
        raise InputError(f"{path}: animated; export one frame")
    if image.format == "PNG" and "exif" not in image.info: # it may stand behind the pixels
        with contextlib.suppress(Exception): # damaged notes must not matter
            notes = Image.open(image.fp, formats=["PNG"])
            notes.load_prepare() # what PIL does before and after it decodes the pixels, which is left out here: sizes
            notes.load_end() # are asked of a whole dataset
            image.info |= notes.info
    return image

TURN = {2: Image.FLIP_LEFT_RIGHT, 3: Image.ROTATE_180, 4: Image.FLIP_TOP_BOTTOM, 5: Image.TRANSPOSE,
        6: Image.ROTATE_270, 7: Image.TRANSVERSE, 8: Image.ROTATE_90} # by EXIF orientation

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

def decode(path, content):
    """-> PIL image in the file's own mode and format, after the EXIF rotation. content: as for open_image."""
    with open_image(path, content) as image:
        turn = TURN.get(orientation(image))
        if "progressive" in image.info:
            check_scans(path)
        try:
            image.load()
        except Exception as e: # a damaged picture can fail in any way
            raise InputError(f"{path}: broken picture ({e}); replace it")
    turned = image.transpose(turn) if turn is not None else image
    turned.format = image.format # which transpose drops
    return turned

def read_image(path, content=None):
    """-> RGB PIL image in sRGB: EXIF rotation applied, alpha composited on white, 16-bit gray scaled (PIL alone clips
    it). content: look_at's hash; InputError if the file has changed since."""
    image = decode(path, content)
    if "icc_profile" in image.info or image.mode.startswith("I;16") or image.has_transparency_data:
        return to_plain(image, path)
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

PAGE_KIND, OLD_KIND, BITS, WHITE_IS_ZERO, PLANES, SIGNED, DNG = 254, 255, 258, 262, 284, 339, 50706 # tags of TIFF
SMALLER, MASK = 1, 4 # bits of PAGE_KIND
HDR, WIDE = (16, 18), (9, 12) # of ITU-T H.273: curves of PQ and HLG, primaries of BT.2020 and P3
ROWS = 256 # of a strip
MOST_SCANS = 100
GRAYS = (np.arange(2**16, dtype=np.float32) / 257).round().astype(np.uint8) # of 8 bits, for each of 16
LARGE_PROFILE = 2**24 # bytes; those of printers have up to 3 MB
CLOSE = 2 # levels by which profiles that say sRGB differ from it: small ones have curves of few points

# ---- opening ---------------------------------------------------------------------------------------------------------

def open_photo(path, source):
    """A file that is no PNG, JPEG, WebP or BMP -> PIL image, of which only the header was read: a TIFF's first page, an
    AVIF or a HEIC. source: the path, or its bytes as a file. InputError if it is none of these, or would be misread."""
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
            check_pages(path, source)
        elif "icc_profile" not in image.info:
            check_numbers(path)
    except Exception: # a damaged picture can fail in any way
        raise InputError(f"{path}: {why_not(path, formats)}")
    if image.mode == "LAB": # which needs no profile, but is converted by one; PIL's own way is coarse
        lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
        image.info.setdefault("icc_profile", lab.tobytes())
    image.info.pop("xmp", None) # PIL would turn by it, too, which these formats do not mean
    return image

def why_not(path, formats):
    """What is wrong with a file that none of these formats can open, and what to do."""
    with open(path, "rb") as file:
        head = file.read(32)
    stray_files.refuse_pointer(path, head)
    if not head:
        return "an empty file; replace it"
    # HEIC begins with the length of its first box, "ftyp", and heic, heix, hevc, mif1, ...
    if head[4:8] == b"ftyp" and head[8:10] in (b"he", b"mi", b"ms") and "HEIF" not in formats:
        return "HEIC needs a package; pip install pillow-heif"
    if head[:4] in (b"II*\0", b"MM\0*"): # also of most raw files
        return "a TIFF or raw file of a kind that is not read; export it as a JPEG, or as a TIFF of 8 or 16 bits"
    return "no PNG, JPEG, WebP, BMP, TIFF, AVIF or HEIC picture; replace it"

def check_tiff(path, image):
    """InputError for a TIFF whose first page is not the picture, or not the only one, or whose numbers PIL would take
    for others."""
    tags = image.tag_v2
    if tags.get(PAGE_KIND, 0) & 1 or DNG in tags:
        raise InputError(f"{path}: a raw file, of which only the preview could be read; develop it, and export a JPEG")
    bits = tags.get(BITS, (1,))
    is_16_bit_gray = bits == (16,) and tags[WHITE_IS_ZERO] == 1
    if image.mode in ("I", "F") or 2 in tags.get(SIGNED, ()) or (image.mode.startswith("I;16") and not is_16_bit_gray):
        raise InputError(f"{path}: {bits[0]} bits of a kind that is not read (floats, signed, or with white as 0); "
                         "save it with 8 or 16 bits")
    if tags.get(PLANES) == 2 and bits[0] == 16: # PIL takes them for another order
        raise InputError(f"{path}: 16 bits with each colour apart (planar), which is not read; save it interleaved")

def check_pages(path, source):
    """InputError for a TIFF of several pictures, such as layers or a scanned book. Its further pages may be smaller
    copies of the first one, or its mask, as cameras and editors write them."""
    # read apart, as PIL would mix what two pages say of themselves
    with Image.open(path if source is path else io.BytesIO(source.getvalue()), formats=["TIFF"]) as pages:
        with contextlib.suppress(EOFError): # behind the last page
            while True:
                pages.seek(pages.tell() + 1)
                tags = pages.tag_v2
                if not tags.get(PAGE_KIND, 0) & (SMALLER | MASK) and tags.get(OLD_KIND) != 2: # 2: smaller
                    raise InputError(f"{path}: several pages; export one")

def check_numbers(path):
    """InputError for an AVIF or HEIC whose colours are told by numbers of ITU-T H.273, as those of an ICC profile would
    be, and are not sRGB's: PIL does not read these."""
    with open(path, "rb") as file:
        _, found, numbers = file.read(2**16).partition(b"colrnclx")
    if found and (numbers[1] in WIDE or numbers[3] in HDR): # two bytes each, the high one first
        raise InputError(f"{path}: HDR or wide colours without an ICC profile; export it as JPEG or TIFF")

def check_scans(path):
    """InputError for a progressive JPEG of so many scans, each of which may be of the whole picture, that it would take
    minutes. (Encoders write about ten. Their marker stands nowhere else, but for notes.)"""
    with open(path, "rb") as file:
        scans = file.read().count(b"\xff\xda")
    if scans > MOST_SCANS:
        raise InputError(f"{path}: a JPEG of {scans} scans; save it anew")

# ---- colours ---------------------------------------------------------------------------------------------------------

@functools.lru_cache(16) # a camera gives all its pictures the same profile
def conversion(profile, mode):
    """An ICC profile's bytes, a picture's mode -> (the transform to sRGB or None, what is wrong with the profile or
    None). A profile that changes nothing, i.e. sRGB under any name, needs no transform."""
    spaces = {"CMYK": ["CMYK"], "LAB": ["Lab"]}.get(mode, ["RGB"])
    if mode.startswith(("1", "L", "I;16")) and mode != "LAB": # gray; editors save it with profiles of RGB, too
        spaces = ["GRAY", "RGB"]
    try:
        source, srgb = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
        space = source.profile.xcolor_space.strip()
        if space not in spaces:
            return None, f"is for {space}, and the picture is {spaces[0]}"
        pixels = dict(RGB="RGB", GRAY="L", CMYK="CMYK", Lab="LAB")[space]
        # Without the cache threads may share it. Of three curves and a matrix, as phones and cameras have, the library
        # makes tables that are exact; those of other profiles miss dark grays by up to 10 levels, but take a tenth of
        # the time.
        exact = Flags.NONE if pixels == "RGB" and source.profile.is_matrix_shaper else Flags.NOOPTIMIZE
        build = functools.partial(ImageCms.buildTransform, source, srgb, pixels, "RGB", flags=Flags.NOCACHE | exact)
        if pixels in ("RGB", "L"): # perceptual tables change colours even of sRGB to sRGB, so it is not asked here
            probe = probe_of(pixels)
            seen = build(renderingIntent=Intent.RELATIVE_COLORIMETRIC).apply(probe)
            change = np.asarray(seen, int) - np.asarray(probe.convert("RGB"))
            if abs(change).max() <= CLOSE:
                return None, None
        return build(renderingIntent=Intent.PERCEPTUAL), None
    except Exception: # a damaged profile can fail in any way
        return None, "is broken"

def probe_of(mode):
    """-> a small picture of all 256 grays, or of 16 levels of red, green and blue each."""
    if mode == "L":
        return Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    levels = np.arange(0, 256, 17, dtype=np.uint8)
    return Image.fromarray(np.stack(np.meshgrid(levels, levels, levels), -1).reshape(64, 64, 3))

def find_conversion(profile, mode):
    """conversion, of a profile that is small enough to be remembered."""
    if len(profile or b"") > LARGE_PROFILE:
        return None, f"has over {LARGE_PROFILE:,} bytes"
    return conversion(profile, mode)

def mark_of(image):
    """A picture with a profile -> what common.look_at writes behind its content hash."""
    transform, _ = find_conversion(image.info["icc_profile"], image.mode)
    return " in sRGB" if transform else ""

warned = set() # paths: a file is read for the VAE, the text encoder and the sheets

def to_srgb(image, profile, path):
    """A picture of 8 bits whose ICC profile has these bytes -> the same in sRGB. A profile that cannot be used is
    ignored, with a line: the colours count as sRGB, as they do without any."""
    transform, problem = find_conversion(profile, image.mode)
    if problem and path not in warned:
        warned.add(path)
        tell(f"warning: {path}: its colour profile {problem}; it is ignored, and the colours count as sRGB",
             file=sys.stderr)
    if not transform:
        return image
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    image = transform.apply(image.convert(transform.input_mode))
    if alpha:
        image.putalpha(alpha)
    return image

def to_plain(image, path):
    """A decoded picture -> RGB of 8 bits, opaque, in sRGB and without a profile, as common.read_image returns it. In
    strips, since most of these steps make a copy: a picture of 160 megapixels would take gigabytes."""
    # it is None where a PNG's or JPEG's is broken
    has_profile, profile = "icc_profile" in image.info, image.info.get("icc_profile")
    plain = Image.new("RGB", image.size)
    for top in range(0, image.height, ROWS):
        strip = image.crop((0, top, image.width, min(top + ROWS, image.height)))
        strip.info.pop("icc_profile", None)
        if strip.mode.startswith("I;16"):
            strip = Image.fromarray(GRAYS[np.asarray(strip)])
        if has_profile:
            strip = to_srgb(strip, profile, path)
        if strip.has_transparency_data:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
        plain.paste(strip.convert("RGB"), (0, top))
    return plain


# ---- flight ------------------------------------------------------------------------------------------
# How many pixels may be in flight: of pictures that threads hold at full size, to resize or compare them. A PNG of 600 KB
# may hold 160 megapixels, i.e. a gigabyte while it is decoded, and four to sixteen threads read at once.

# PIL takes memory in blocks. Those of up to 32 MB, such as its usual 16 MB, stay with their thread when they are freed
# (glibc's heaps), and four threads then keep 6 GB; larger ones go back to the system at once.
Image.core.set_block_size(2**26)

# 8 bytes each at the peak, i.e. 2 GB: five photographs of 48 megapixels, or one that is as large as may be. Whatever
# needs more, such as a pair of the largest, is read alone.
MOST = MAX_PIXELS * 3 // 2

turn = threading.Condition()
held = {} # {thread: the pixels that it holds}


def pixels_of(path):
    """From the picture's header. What cannot be opened holds nothing: reading it names the error."""
    with contextlib.suppress(InputError), open_image(path) as image:
        return image.width * image.height
    return 0


def limit_pixels_in_memory(read_pictures):
    """cache.read_pictures, with room for all pictures of its sample."""
    def read(pipe, sample, *what):
        with reserve_pixels(sample.contents):
            return read_pictures(pipe, sample, *what)
    return read


@contextlib.contextmanager
def reserve_pixels(paths):
    """Waits until there is room for these pictures, all at once: if each of two threads had one picture and waited for
    room for a second one, neither would go on. So a thread that holds some already does not wait."""
    thread = threading.get_ident()
    if thread in held:
        yield
        return
    pixels = sum(map(pixels_of, paths))
    with turn:
        turn.wait_for(lambda: not held or sum(held.values()) + pixels <= MOST)
        held[thread] = pixels
    try:
        yield
    finally:
        with turn:
            del held[thread]
            turn.notify_all()
