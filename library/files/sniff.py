"""
What a file of another kind is, in words: for --lora (library/lora/foreign_loras.py) and --transformer
(library/models/one_file.py).
"""
import contextlib
import os
import re

import common
from common import open_tensors
from library.files import tensor_files

# how files begin that are no safetensors files
SIGNS = {b"GGUF": "a gguf", b"PK": "a pickle or another zip archive, which may run code",
         b"\x80": "a pickle, which may run code",
         b"version https://git-lfs": "a pointer of git lfs, not the file itself",
         b"<": "a web page, such as a hub's login", b"\x89PNG": "a picture", b"\xff\xd8\xff": "a picture",
         b"RIFF": "a picture or a sound", b"Rar!": "a rar archive", b"7z": "a 7z archive",
         b"\x1f\x8b": "a gzip archive"}

# which model has tensors of these names, dots or underscores between their parts; the first that fits
FAMILIES = {
    r"(^|[._])(te\d?|text_encoders?(_?\d)?|text_model|clip_[lg]|t5xxl)[._]|visual[._]blocks[._]\d"
    r"|layers[._]\d+[._]self_attn[._]": "a text encoder",
    r"(^|\.)decoder\.(conv|up)": "a VAE",
    r"(double|single)_blocks[._]\d|single_transformer_blocks[._]\d": "Flux or one of its kin",
    r"((in|out)put|down|up)_blocks[._]\d|mid_block[._]|middle_block[._]": "a UNet (Stable Diffusion, SDXL)",
    r"joint_blocks[._]\d": "SD 3",
    r"(noise|context)_refiner[._]|layers[._]\d+[._](attention|feed_forward|adaLN)": "Z-Image or Lumina",
    r"transformer_blocks[._]\d+[._](attn1|attn2|ff)[._]": "LTX-Video, PixArt, SD 3, Flux or one of their kin",
    r"double_stream_blocks[._]\d": "HiDream",
    r"(?<!transformer)(^|[._])blocks[._]\d": "Wan or another video model",
    r"(^|\.)decoder\.": "a VAE"}

def family(names):
    """-> in words, which model it is that has tensors of these names, and the pattern that tells; or (None, None)."""
    text = "\n".join(names)
    for pattern, words in FAMILIES.items():
        if re.search(pattern, text, re.M):
            return words, pattern
    return None, None

def refuse_family(path):
    """InputError for a LoRA all of whose tensors have names of another model. Its header tells, before torch is
    imported; of any other file those say what is wrong who read it."""
    names = []
    with contextlib.suppress(Exception): # a foreign file can fail in any way
        with open(path, "rb") as f:
            names = tensor_files.read_header(f).keys() - {"__metadata__"}
    families = [family([name])[0] for name in names]
    if families and all(families):
        raise common.InputError(f"{path}: a LoRA of another model, which looks like {families[-1]} ({max(names)}); "
                                "take one of Qwen-Image-Edit")

def open_file(path, error_of, of_gguf):
    """-> the file, mapped by safetensors. Raises error_of(what the file is instead, what to do). of_gguf: what to do
    about a gguf, which is a whole model."""
    try:
        return open_tensors(path)
    except Exception as e: # a foreign file can fail in any way
        refuse(path, str(e), error_of, of_gguf)

def refuse(path, reason, error_of, of_gguf):
    """For a file that safetensors cannot read, for this reason: raises what open_file does."""
    with open(path, "rb") as f:
        start, size = f.read(200), f.seek(0, 2)
    for sign, what in SIGNS.items():
        if start.lstrip().startswith(sign) and start[8:9] != b"{": # else a header's length happens to begin so
            raise error_of(what, of_gguf if what == "a gguf" else "download the .safetensors file itself")
    if not start:
        raise error_of("an empty file", "download it again")
    if re.fullmatch(rb"[\t\r\n -~]+", start):
        if os.path.islink(path): # perhaps a stranger's, to a key
            raise error_of("a link to a text file", "download the .safetensors file itself")
        said = " ".join(start[:60].decode().split())
        raise error_of(f"a text file, which begins with {said!r}", "download the .safetensors file itself")
    raise error_of(f"is no whole .safetensors file ({' '.join(reason.split())[:200]}; it has {size:,} bytes)",
                   "download it again")
