"""
The safetensors files of this project: caches, LoRAs, optimizer states. Each carries a digest, so that a changed bit is
noticed. What differs is told apart: another version of this project, a change by another program, or damage.

Such a file has one entry of JSON in its header, which begins so:

    {"format": 3, "sha256": content_digest, "tensors": rows_of, ...}

The last chapter says in words what a file of another kind is, for --lora and --transformer.
"""
import hashlib
import io
import json
import math
import re

import safetensors

from common import InputError, first_words, is_utf8, shell_command, write_file

# torch, diffusers and transformers take five seconds to import, so the functions that need them import them: most tools
# print their -h, or find a typo, without.

VERSION = "2.0" # of the cache files
FORMAT = 3 # of the files of write_tensors: add 1 when they change. Files of another format are not read
NO_DIGEST = "0" * 64
# how the JSON begins that write_tensors adds, with a damaged number, name or digest too
SIGNED = re.compile(r'\{".{6}": .{1,3}, ".{6}": ".{64}"')

class OtherVersion(InputError):
    """A file that another version of this project has written, and this one cannot use."""

def write_tensors(path, tensors, meta, meta_key="json", mark=b"", notes=None):
    """A safetensors file that carries content_digest: our entry of its header is made with zeros where the digest will
    stand. notes: {name: text} of other entries, which come with a hash of the tensors; ours says them, too, as they
    count for the digest. The header is put together here, because safetensors orders its entries at random. Tensors go
    to the CPU. mark: as for write_file."""
    import safetensors.torch
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()} # some share memory
    about = {"format": FORMAT, "sha256": NO_DIGEST, "tensors": rows_of(tensors), **meta}
    data = safetensors.torch.save(tensors)
    header, tail = read_header(io.BytesIO(data)), memoryview(data)[8 + int.from_bytes(data[:8], "little"):]
    if notes:
        digest = hashlib.sha256(tail).hexdigest()
        notes = notes | {"sshs_model_hash": digest, "modelspec.hash_sha256": f"0x{digest}"}
        about["notes"] = notes
    text = json.dumps(about, default=sorted) # sets become lists
    entries = {meta_key: text.replace(NO_DIGEST, content_digest(data, text), 1)} | (notes or {})
    head = json.dumps({"__metadata__": entries} | header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8) # the tensors begin at a multiple of 8
    write_file(path, b"".join([len(head).to_bytes(8, "little"), head, tail]), mark)

def rows_of(tensors):
    """-> a text for each tensor, by which is_changed tells a change of another program from damage."""
    return [f"{name} {v.dtype} {list(v.shape)}" for name, v in sorted(tensors.items())]

def content_digest(data, text):
    """sha256 of what a safetensors file says: of `text`, our JSON with NO_DIGEST in it, and of each tensor's name,
    dtype, shape and bytes. Other entries of the header do not count: many programs add some."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(safetensors.deserialize(data)):
        digest.update(json.dumps([name, tensor["dtype"], tensor["shape"]]).encode())
        digest.update(tensor["data"])
    return digest.hexdigest()

def read_header(f):
    """-> the header of a safetensors file that is open: {name: dict(dtype=, shape=, data_offsets=), "__metadata__":
    {key: text}}. The tensors are not read. Raises anything for another file."""
    size = int.from_bytes(f.read(8), "little")
    return json.loads(f.read(min(size, 2**26))) # in a file with holes it could have any length

def read_tensors(path, meta_key="json", key=None, data=None, note=None):
    """-> (tensors, metadata). InputError if the file is no safetensors file, if a bit of its tensors or of our metadata
    has changed since write_tensors, or if it holds other content than `key`; OtherVersion if it has another format.
    Never unpickles. data: the file's bytes, if they have been read. note: is called with a line where another program
    has added to the header, and where a LoRA can be used although it has changed (see judge; without a note these are
    errors)."""
    import safetensors.torch
    fix = "cache.py --verify encodes it again" if key else "it is damaged; take another copy"
    try:
        if not path.is_file(): # a FIFO would hang
            raise FileNotFoundError("no file")
        data = data or path.read_bytes()
        tensors = safetensors.torch.load(data)
        entries = read_header(io.BytesIO(data))["__metadata__"]
        meta = json.loads(entries[meta_key])
        number, digest, _ = [meta.pop(name, "") for name in ("format", "sha256", "tensors")]
        unsigned = entries[meta_key].replace(digest, NO_DIGEST, 1)
        written = [f"{name} {text}" for name, text in meta.pop("notes", {}).items()]
        found = [f"{name} {text}" for name, text in entries.items() if name != meta_key]
        edited = is_changed(written, found) # and not just a flipped bit
        intact = number == FORMAT and content_digest(data, unsigned) == digest and (edited or written == found)
    except Exception as e: # it is missing, or a foreign file, which can fail in any way
        raise InputError(f"{path}: no checked safetensors file ({type(e).__name__}: {first_words(e)}); {fix}")
    if not intact: # of another version, changed by another program, or damaged
        judge(path, tensors, entries[meta_key], fix, note)
    elif note and edited:
        note(f"warning: {path}: its header was edited since it was written; its tensors are intact")
    if key and (meta.get("key"), meta.get("version")) != (key, VERSION):
        raise InputError(f"{path}: holds {meta.get('key')} of version {meta.get('version')}, want {VERSION}; {fix}")
    return tensors, meta

def judge(path, tensors, text, fix, note):
    """Returns if a file whose digest is not right can be used all the same: note(line) says why. Only a LoRA has a
    note, as its user may have changed it on purpose; nobody changes a cache or a checkpoint. OtherVersion, or an
    InputError of damage, for all others. text: our entry of its header; fix: what to do about damage."""
    about = json.loads(text)
    number = about.get("format") # a stranger's may be anything
    written = about.get("tensors")
    is_newer = type(number) is int and number > FORMAT
    if is_newer or not SIGNED.match(text):
        other = "a newer" if is_newer else "another"
        raise OtherVersion(f"{path}: is of {other} version of this project, or of another program; use that one, or "
                           "make the file again (cache.py --verify does so in a cache)")
    if note:
        is_list = isinstance(written, list) and all(isinstance(row, str) for row in written)
        if is_list and number == FORMAT and is_changed(written, rows_of(tensors)): # or cast
            return note(f"warning: {path}: was changed by another program since it was written, so it cannot be "
                        "checked")
        words = shell_command(["python", "tools/convert_lora.py", path, "--unchecked", "--to", "diffusers", "--out",
                               "NEW.safetensors"])
        fix = f"it is damaged: take another copy; or, if you have changed it on purpose, use what this makes: {words}"
    raise InputError(f"{path}: content does not match its digest; {fix}")

def is_changed(written, found):
    """Whether the rows of a file's tensors, or of its notes, differ from those that were written by more than a flipped
    bit, in one of these or in the header that they are made from. It cannot alter how many there are."""
    lost, new = sorted({*written} - {*found}), sorted({*found} - {*written})
    if len(written) != len(found) or len(lost) != 1 or len(new) != 1:
        return lost != new
    one, two = lost[0].encode(), new[0].encode()
    return (int.from_bytes(one) ^ int.from_bytes(two)).bit_count() > 1

def is_finite(tensor):
    """Whether it holds neither NaN nor Inf. It is copied to the CPU, which costs a GPU one wait and no kernels, and is
    read once (isfinite() takes 20 times as long, and knows no fp8). What has no floats, or is empty, or has no memory,
    holds none."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return True
    tensor = tensor.detach().cpu()
    if tensor.itemsize == 1:
        tensor = tensor.float()
    least, greatest = tensor.aminmax() # NaN, if there is one
    return math.isfinite(least) and math.isfinite(greatest)

def refuse_not_finite(path, tensors, remedy):
    """InputError if one of a file's tensors {name: tensor} holds NaN or Inf."""
    broken = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if broken:
        raise InputError(f"{path}: NaN or Inf in {len(broken)} of {len(tensors)} tensors, for instance {broken[0]}; "
                         f"{remedy}")

# ---- what a file of another kind is, in words ------------------------------------------------------------------------

# how files begin that are no safetensors files
SIGNS = {b"GGUF": "a gguf", b"PK": "a pickle or another zip archive, which may run code",
         b"\x80": "a pickle, which may run code",
         b"version https://git-lfs": "a pointer of git lfs, not the file itself",
         b"<": "a web page, such as a hub's login"}

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

def family_of(names):
    """-> in words, which model it is that has tensors of these names, and the pattern that tells; or (None, None)."""
    text = "\n".join(names)
    for pattern, words in FAMILIES.items():
        if re.search(pattern, text, re.M):
            return words, pattern
    return None, None

def open_tensors(path):
    """safetensors.safe_open, also of a path that is no UTF-8, which that refuses."""
    if is_utf8(path):
        return safetensors.safe_open(path, "pt")
    with open(path, "rb") as file: # Linux, which alone has such names, gives an open file a second one
        return safetensors.safe_open(f"/proc/self/fd/{file.fileno()}", "pt")

def open_safetensors(path, error_of, of_gguf):
    """-> the file, mapped by safetensors. Raises error_of(what the file is instead, what to do). of_gguf: what to do
    about a gguf, which is a whole model."""
    try:
        return open_tensors(path)
    except Exception as e: # a foreign file can fail in any way
        refuse_other_kind(path, str(e), error_of, of_gguf)

def refuse_other_kind(path, reason, error_of, of_gguf):
    """For a file that safetensors cannot read, for this reason: raises what open_safetensors does."""
    with open(path, "rb") as f:
        start, size = f.read(200), f.seek(0, 2)
    for sign, what in SIGNS.items():
        if start.lstrip().startswith(sign) and start[8:9] != b"{": # else a header's length happens to begin so
            raise error_of(what, of_gguf if what == "a gguf" else "download the .safetensors file itself")
    if not start:
        raise error_of("an empty file", "download it again")
    raise error_of(f"is no whole .safetensors file ({' '.join(reason.split())[:200]}; it has {size:,} bytes)",
                   "download it again")
