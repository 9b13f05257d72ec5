"""
The code is an input, too: this project is used by editing it. A picture that predict.py has drawn carries hashes of
the source that decides it, and is drawn again when that has changed; an encoded file carries one of the functions that
encode. A comment, a docstring or a blank line does not count: people write comments, and no picture depends on them.

Versions of torch, diffusers, transformers and peft are noted in a picture, and a difference is told, but they draw
nothing again: an update would cost thousands of pictures for differences below a level, as CI shows, which compares the
oldest packages with the newest.
"""
import ast
import contextlib
import functools
import hashlib
import io
import json
import sys
import tokenize
from importlib.metadata import version
from pathlib import Path

import safetensors

import common
from common import is_one_file, load_extra, tell
from extras import ROOT, unchanged

PACKAGES = "torch diffusers transformers peft".split()
WHOLE = "predict.py rope_patch.py".split() # decide a picture from the first line to the last
# and of cache.py what predict.py draws with
DRAWING = ("load_part", "load_encoder", "load_latents", "load_text", "read_encoded")
# what decides an encoded file, beside the model; photos and mask whole, as most of them is at work
ENCODING = {
    "cache.py": ("Processor", "load_part", "load_encoder", "add_token_types", "is_plus", "encode_image",
                 "encode_prompt", "read_pictures", "encode_latents", "encode_text"),
    "common.py": ("open_image", "orientation", "decode", "read_image", "read_mask", "mask_is_empty", "fit_size"),
    "extras/photos.py": None,
    "extras/mask.py": None}


def read(file):
    """The source of a file of ours, "" if it was deleted."""
    path = Path(ROOT, file)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


# read when a script begins, as Python does: an edit that comes later is not what runs
TEXTS = {file: read(file) for file in [*WHOLE, *ENCODING]}


def refuse_edits():
    """InputError if someone has saved one of the files in the ten seconds in which the libraries are loaded, and some
    of our modules with them: which one runs?"""
    unchanged.refuse_changes(TEXTS, read)


def code_only(text):
    """Source without comments, docstrings and blank lines. By the places of its tokens, so that every version of Python
    gives the same text."""
    lines = text.split("\n") # as Python counts lines
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type != tokenize.NL]
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    begins = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT} # of a statement
    tokens = [token for token in tokens if token.type != tokenize.COMMENT]
    for before, token, after in zip([None, *tokens], tokens, tokens[1:]):
        alone = after.type == tokenize.NEWLINE and (before is None or before.type in begins)
        if token.type == tokenize.STRING and alone:
            (first, column), (last, end) = token.start, token.end
            lines[first - 1:last] = [lines[first - 1][:column]] + [""] * (last - first)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def functions_of(text, names):
    """Of a module's source only these functions and classes, in the order of the source."""
    lines, found = text.split("\n"), []
    for node in ast.parse(text).body:
        if getattr(node, "name", None) in names:
            first = min([node.lineno, *[mark.lineno for mark in node.decorator_list]])
            found += lines[first - 1:node.end_lineno]
    return "\n".join(found) + "\n"


@functools.lru_cache
def digest(text, names=None):
    """A short hash of what a source computes, or these functions of it."""
    text = functions_of(text, names) if names else text
    return hashlib.sha256(code_only(text).encode()).hexdigest()[:12]


# ---- pictures --------------------------------------------------------------------------------------------------------

def drawing(args):
    """{file: hash of its source, package: its version} of all that draws with these flags of predict.py."""
    extras = dict(quantize=args.quantize != "none", offload=args.offload, transformer=is_one_file(args.transformer),
                  lora_files=args.lora)
    files = {file: digest(TEXTS[file]) for file in WHOLE} | {"cache.py": digest(TEXTS["cache.py"], DRAWING)}
    for name, in_use in extras.items():
        if in_use:
            with contextlib.suppress(SystemExit): # (it was deleted, and is not needed for plain files)
                load_extra(name) # now, so that what runs is what is hashed
                files[f"extras/{name}.py"] = digest(read(f"extras/{name}.py"))
    return files | {package: version(package) for package in PACKAGES}


def changes(then, now, packages):
    """The names that differ between two drawing()s which both have them: of files, or of packages."""
    return [name for name in now if (name in PACKAGES) is packages and then.get(name, now[name]) != now[name]]


def is_current(then, now):
    """Whether a picture that was drawn by the code `then` (None: there is none) would be drawn alike now. An extra that
    only one of them has changes no picture, or its flag is in the picture's key."""
    return then is not None and WHOLE[0] in then and not changes(then, now, packages=False)


# ---- encoded files ---------------------------------------------------------------------------------------------------

def encoding():
    """A hash of the functions that encode."""
    digests = [digest(TEXTS[file], names) for file, names in ENCODING.items()]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:12]


def warn_of_encoding(files, preprocessing):
    """A warning if some of these encoded files were made by other functions than ours. Only the headers of a few are
    read, as a cache may hold a hundred thousand; files of an older cache.py, or of another program, say nothing."""
    files = sorted(files) if common.rank() == 0 else []
    for file in [*files[:2], *files[-2:]]: # latents/ comes before text/
        made_by = None
        # a foreign file can fail in any way
        with contextlib.suppress(Exception), safetensors.safe_open(file, "np") as f:
            made_by = json.loads(f.metadata()["json"]).get("code")
        if made_by not in (None, encoding()):
            tell("warning: cache: encoded by another cache.py than this one (its encoding functions differ); if they "
                 f"compute something else now, add 1 to PREPROCESSING ({preprocessing}) in cache.py", file=sys.stderr)
            return
