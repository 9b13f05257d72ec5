"""
A safetensors file of this project that is not as this version has written it: of another version, changed by another
program, or damaged.

Such a file carries one entry of JSON, and its format is known by how that begins:

    1  {"digest": ...}                              until 25 November 2026: a sha256 of the whole file
    2  {"sha256": ..., "dtypes": [...]}             common.content_digest
    3  {"format": 3, "sha256": ..., "tensors": ...} the same, with a number and common.rows_of

Format 2 is checked like format 3, so common.read_tensors reads both. tests/formats holds a file of each.
"""
import hashlib
import json
import re

from common import FORMAT, NO_DIGEST, InputError, OtherVersion, command, rows_of

DTYPE = re.compile(r" (torch\.\w+) (?=\[[\d, ]*\]$)") # in a row of rows_of
HALVES = {"torch.float32", "torch.float16", "torch.bfloat16"}


def judge(path, data, tensors, text, fix, note):
    """Returns if a file whose digest is not right can be used all the same: note(line) says why. Only a LoRA has a
    note, as its user may have changed it on purpose; nobody changes a cache or a checkpoint. OtherVersion, or an
    InputError of damage, for all others. data: the file; text: our entry of its header; fix: what to do about
    damage."""
    about = json.loads(text)
    number = format_of(text, about)
    if number > FORMAT:
        raise OtherVersion(f"{path}: was written by a newer version of this project (format {number}, and this one "
                           f"knows {FORMAT}); update this one")
    if number == 1 and not note:
        raise OtherVersion(f"{path}: was written by an older version of this project; use that one, or make the file "
                           "again (cache.py --verify does so in a cache)")
    if number == 1 and is_whole(data, about["digest"]):
        return note(f"warning: {path}: was written by an older version of this project; its content is intact")
    now, rows = {str(v.dtype) for v in tensors.values()}, rows_of(tensors)
    if note and (before := cast_from(number, about, rows, now)):
        return note(f"warning: {path}: was cast from {', '.join(before)} to {', '.join(now)} since it was written, so "
                    "its tensors cannot be checked")
    if note and number == FORMAT and is_changed(about["tensors"], rows):
        return note(f"warning: {path}: was changed by another program since it was written, so it cannot be checked")
    if note:
        words = command(["python", "tools/convert_lora.py", path, "--unchecked", "--to", "diffusers", "--out",
                         "NEW.safetensors"])
        fix = f"it is damaged: take another copy; or, if you have changed it on purpose, use what this makes: {words}"
    raise InputError(f"{path}: content does not match its digest; {fix}")


def format_of(text, about):
    """The number of a file's format, or 0 if its entry is damaged. about: what this text says; a stranger's may say
    anything."""
    number = about.get("format")
    if text.startswith('{"format": ') and type(number) is int:
        ours = number == FORMAT and is_list_of_text(about.get("tensors"))
        return number if ours or FORMAT < number < 1000 else 0
    if text.startswith('{"sha256": ') and is_list_of_text(about.get("dtypes")):
        return 2
    return 1 if text.startswith('{"digest": ') and isinstance(about["digest"], str) else 0


def is_list_of_text(value):
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def is_whole(data, digest):
    """Whether a file of format 1 is as it was written."""
    return hashlib.sha256(data.replace(digest.encode(), NO_DIGEST.encode(), 1)).hexdigest() == digest


def cast_from(number, about, rows, now):
    """-> the dtypes that a LoRA had before another program has cast all of its tensors; [] for another change. A
    flipped bit cannot look like a cast: the dtype that was written is still a known one, and no tensor has it."""
    before = about.get("dtypes", ["torch.float32"]) # format 1 does not tell: it was fp32
    if number == FORMAT:
        written = [DTYPE.split(row) for row in about["tensors"]]
        if [row[::2] for row in written] != [DTYPE.split(row)[::2] for row in rows]:
            return []
        before = sorted({row[1] for row in written})
    return before if number and set(before) < HALVES and now.isdisjoint(before) else []


def is_changed(written, found):
    """Whether the rows of a file's tensors differ from those that were written by more than a flipped bit, in one of
    these or in the header that they are made from. It cannot alter how many there are."""
    lost, new = sorted({*written} - {*found}), sorted({*found} - {*written})
    if len(written) != len(found) or len(lost) != 1 or len(new) != 1:
        return lost != new
    one, two = lost[0].encode(), new[0].encode()
    return (int.from_bytes(one) ^ int.from_bytes(two)).bit_count() > 1
