"""
The PNG of a result: what it is called, what it says of itself, and whether it is there already.

A name that we choose is NAME-1a2b3c4d.png: the sample's name, and eight letters of the result's key, a hash of all that
decides the picture: encoded files, LoRAs, settings, and the bytes of the code that draws. So the same command finds its
pictures finished, another one writes beside them, and edited code draws anew. A name that you give (--out, or `out` of
a line of --jobs) is that file: an older picture of ours is replaced there, and anything else is an error.
"""
import contextlib
import io
import json
import os
import sys
from glob import glob
from pathlib import Path

from PIL import Image, PngImagePlugin

import common
import library
from common import InputError, refuse_to_replace

OURS = rb"tEXtkey\0" # is in every picture that predict.py and train.py have written
END = b"\0\0\0\0IEND\xaeB`\x82" # the last chunk of every PNG
MOST_BYTES = 133 # of a name that we choose: some disks (eCryptfs) take 143
# the code that draws, beside predict.py and library/lora
DRAWING = [
    "rope_patch.py",
    *library.ENCODING,
    "library/models/quantization.py",
    "library/models/offloading.py",
    "library/models/one_file.py"]

def drawing_hash(script):
    """A hash of the code that draws. script: the path of predict.py, or of an edited copy."""
    rooms = sorted(glob("library/lora/*.py", root_dir=library.ROOT))
    return library.code_hash([script, *DRAWING, *rooms])

# ---- names -----------------------------------------------------------------------------------------------------------

def picture_stem(sample):
    """A sample's name may lead through folders of its dataset; its picture's name does not."""
    return sample.name.replace("/", "-")

def result_path(args, sample, end, key):
    """-> the file of a result: the one that the user has named (--out, or `out` of the sample's line of --jobs), or a
    name that we choose in --out_dir. end: what sets it apart from the sample's other results, such as -s1."""
    named = args.out
    if "out" in sample.job_fields:
        named = args.out_dir / sample.job_fields["out"]
    if named:
        return named.with_stem(named.stem + end)
    stem = sample.name if args.image else picture_stem(sample) # a folder's picture keeps its subfolder
    if "line" in sample.job_fields: # without the line's number, which an edit of the list changes
        stem = stem.split("-", 1)[1]
    return keyed_path(args.out_dir, stem + end, key)

def keyed_path(folder, stem, key):
    """The name that we choose for a result: its stem and eight letters of its key, in MOST_BYTES. The stem may begin
    with a subfolder."""
    return beside(folder / f"{stem}.png", f"-{key[:8]}.png")

def beside(path, end):
    """-> a name of MOST_BYTES at most that begins as this one and has an end such as -2.png: a long one is cut."""
    stem = path.stem
    if len(os.fsencode(stem + end)) > MOST_BYTES:
        stem = os.fsencode(stem)[:MOST_BYTES - len(end)].decode(errors="ignore") # never within a letter
    return path.with_name(stem + end)

def identity_of(path):
    """-> what tells that two paths lead to one file, also through links, or in other letter case: its number on the
    disk; the place where it would be if nothing is there."""
    with contextlib.suppress(OSError):
        about = os.stat(path)
        return about.st_dev, about.st_ino
    return str(path.parent.resolve() / path.name)

def refuse_names(results, inputs, where):
    """InputError if a result would overwrite a picture that is read, another result, or a file that is not ours.
    results: what has a path and a key; inputs: paths that are read; where: the flag that has named the results."""
    used = {identity_of(Path(path)): None for path in inputs}
    for result in results:
        path = result.path
        if len(os.fsencode(path.name)) > common.NAME_BYTES:
            raise InputError(f"{path}: its name is too long for a file; give a shorter one, with --out or a line of "
                             "--jobs")
        if used.setdefault(identity_of(path), result.key) != result.key:
            raise InputError(f"{where}: {path} would overwrite a picture that is read, or another result; give it "
                             "another name")
        refuse_to_replace(path, OURS)

# ---- what a picture says of itself -----------------------------------------------------------------------------------

def encode_png(image, key="", said=None):
    """-> the bytes of a PNG with its key, the command that has made it, and `said`: the settings of this picture."""
    png, meta = io.BytesIO(), PngImagePlugin.PngInfo()
    meta.add_text("key", key)
    meta.add_text("command", common.shell_command(["python", *sys.argv]))
    if said:
        meta.add_text("sample", json.dumps(said))
    image.save(png, format="PNG", pnginfo=meta, icc_profile=None) # (a profile would stand before the key)
    return png.getvalue()

def is_finished(path, key):
    """Whether the picture with this key is there, whole: every byte is read, and no pixel decoded."""
    with contextlib.suppress(Exception), Image.open(path) as image:
        if image.info.get("key") == key:
            image.fp.seek(-len(END), io.SEEK_END)
            whole = image.fp.read() == END # which verify does not compare
            image.verify() # the checksums of all chunks before it
            return whole
    return False

# ---- what is no picture ----------------------------------------------------------------------------------------------

def refuse_not_finite(path, model):
    """InputError if this model, "transformer" or "VAE", has computed NaN or Inf for this picture; it may be None."""
    if model:
        raise InputError(f"{path}: NaN or Inf in what the {model} computed, and no picture; lower --lora_scale "
                         "(--scales 0 is the base alone) or --true_cfg_scale, give --dtype bfloat16 or float32, or "
                         "take another copy of the model")
