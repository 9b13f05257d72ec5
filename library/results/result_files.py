"""
The PNG of a result: what it is called, what it says of itself, and whether it is there already.

A name that we choose is NAME-1a2b3c4d.png: the sample's name, and eight letters of the result's key, a hash of all that
decides the picture: encoded files, LoRAs, settings, and the bytes of the code that draws. So the same command finds its
pictures finished, another one writes beside them, and edited code draws anew. A name that you give (--out, or `out` of
a line of --jobs) is that file: an older picture of ours is replaced there, and anything else is an error.
"""
import contextlib
import errno
import io
import json
import os
import secrets
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
DRAWING = ["rope_patch.py", *library.ENCODING] # the code that draws, beside predict.py

def drawing_hash(script, args):
    """A hash of the code that draws with these flags of predict.py. script: its path, which may be an edited copy's."""
    files = [script, *DRAWING]
    if args.lora:
        files += sorted(glob("library/lora/*.py", root_dir=library.ROOT))
    if args.quantize != "none":
        files.append("library/models/quantization.py")
    if args.offload:
        files.append("library/models/offloading.py")
    if args.transformer: # perhaps one file
        files.append("library/models/one_file.py")
    return library.code_hash(files)

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
    return beside(folder / f"{stem}.png", f"-{key[:8]}.png", MOST_BYTES)

def beside(path, end, most):
    """-> a name of so many bytes at most that begins as this one and has an end such as -2.png: a long one is cut."""
    stem = path.stem
    if len(os.fsencode(stem + end)) > most:
        stem = os.fsencode(stem)[:most - len(end)].decode(errors="ignore") # never within a letter
    return path.with_name(stem + end)

def longest_name(folder):
    """-> bytes that a file's name may have here: encrypted disks take fewer than others."""
    while not folder.is_dir():
        folder = folder.parent
    for size in (common.NAME_BYTES, 143, 100):
        trial = folder / (".tmp-" + secrets.token_hex(size)[5:size])
        try:
            trial.touch()
            trial.unlink()
            break
        except OSError as e:
            if e.errno != errno.ENAMETOOLONG: # which the trial of the folder will tell
                break
    return size

def identity_of(path):
    """-> what tells that two paths lead to one file, also through links, or in other letter case: its number on the
    disk; the place where it would be if nothing is there."""
    with contextlib.suppress(OSError):
        about = os.stat(path)
        return about.st_dev, about.st_ino
    return str(path.parent.resolve() / path.name)

def refuse_names(results, inputs, where, most):
    """InputError if a result would overwrite a picture that is read, another result, or a file that is not ours.
    results: what has a path and a key; inputs: paths that are read; where: the flag that has named the results; most:
    bytes of a name on this disk."""
    used = {identity_of(Path(path)): None for path in inputs}
    for result in results:
        path = result.path
        if len(os.fsencode(path.name)) > most:
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

def cause_of(model, lora, cfg, dtype=""):
    """-> what may have made this model, "transformer" or "VAE", compute NaN or Inf, and what helps: those suspects that
    are at work. lora: what makes a LoRA weaker, or "" if there is none; cfg: the CFG scale."""
    suspects = {f"a LoRA that is too strong ({lora})": lora,
                "float16, which ends at 65,504 (give --dtype bfloat16 or float32)": dtype == "float16",
                f"--true_cfg_scale {cfg:g} (lower it)": cfg > 30}
    at_work = [words for words, is_there in suspects.items() if is_there]
    return " or ".join(at_work or [f"damaged weights of the {model} (take another copy of them)"])

def refuse_not_finite(path, model, strengths, cfg, dtype):
    """InputError if this model has computed NaN or Inf for this picture; model may be None. strengths: of its LoRAs."""
    if model:
        lora = any(strengths) and "lower --lora_scale; --scales 0 is the base alone"
        raise InputError(f"{path}: NaN or Inf in what the {model} computed, and no picture; the cause may be "
                         f"{cause_of(model, lora, cfg, dtype)}")
