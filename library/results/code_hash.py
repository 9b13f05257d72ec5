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

import common
from common import tell
from library import ROOT
from library.cli.flag_types import is_one_file
from library.data import stat_cache
from library.files import tensor_files

PACKAGES = "torch diffusers transformers peft".split()
# what decides a picture: whole files are the safe choice, although an edit of a help text draws it again, too
WHOLE = "predict.py rope_patch.py".split()
# and of cache.py what predict.py draws with
DRAWING = ("load_part", "load_encoder", "load_latents", "load_text", "read_encoded")
# what decides an encoded file, beside the model; photos and mask whole, as most of them is at work
ENCODING = {
    "cache.py": ("Processor", "load_part", "load_encoder", "add_token_types", "is_plus", "encode_image",
                 "encode_prompt", "read_pictures", "encode_latents", "encode_text"),
    "library/data/picture_files.py": None,
    "library/data/mask_files.py": None,
    "library/data/automatic_mask.py": None}
# rooms that draw if a flag wants them; the first decides texts, too
OPTIONAL = [f"library/{name}.py" for name in
            ("models/quantization", "models/offloading", "models/one_file", "lora/foreign_loras")]


def read(file):
    return Path(ROOT, file).read_text(encoding="utf-8")


# read when a script begins, as Python does: an edit that comes later is not what runs
TEXTS = {file: read(file) for file in [*WHOLE, *ENCODING, *OPTIONAL]}
TRAINING = read("train.py")


def refuse_edits():
    """InputError if someone has saved one of the files in the ten seconds in which the libraries are loaded, and some
    of our modules with them: which one runs?"""
    stat_cache.refuse_changed_files(TEXTS, TEXTS.values(), read)


def code_of(text, names=None):
    """Source without comments, docstrings and blank lines; with names only these functions and classes of it. By the
    places of its tokens, so that every version of Python gives the same text."""
    lines, tree = text.split("\n"), ast.parse(text) # as Python counts lines
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str): # a text, and no more
            first, last = node.lineno - 1, node.end_lineno
            code = lines[first][:node.col_offset] + lines[last - 1][node.end_col_offset:]
            lines[first:last] = [code] + [""] * (last - first - 1)
    rows = set() # those with code, blank lines in a text of three quotes too
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
        (first, column), (last, _) = token.start, token.end
        if token.type == tokenize.COMMENT:
            lines[first - 1] = lines[first - 1][:column].rstrip()
        elif token.type not in (tokenize.NL, tokenize.DEDENT, tokenize.ENDMARKER):
            rows.update(range(first, last + 1))
    wanted, above = set(), 0
    for node in tree.body: # what stands above it, such as a decorator, is a part of it
        if not names or getattr(node, "name", None) in names:
            wanted.update(range(above + 1, node.end_lineno + 1))
        above = node.end_lineno
    return "\n".join(lines[row - 1] for row in sorted(rows & wanted))


@functools.lru_cache
def digest(text, names=None):
    """A short hash of what a source computes, or these functions of it."""
    return hashlib.sha256(code_of(text, names).encode()).hexdigest()[:12]


# ---- trainings -------------------------------------------------------------------------------------------------------

# functions of train.py: what decides a training
RECIPE = "load_item", "predict_velocity", "flow_loss", "pick", "pick_timestep", "ask_base", "learning_rate"


def training(names):
    """A hash of these functions of train.py: a run that goes on, or is compared, may have had others."""
    return digest(TRAINING, names)


# ---- pictures --------------------------------------------------------------------------------------------------------

def drawing(args):
    """{file: hash of its source, package: its version} of all that draws with these flags of predict.py."""
    in_use = args.quantize != "none", args.offload, is_one_file(args.transformer), args.lora # as in OPTIONAL
    rooms = [file for file, used in zip(OPTIONAL, in_use) if used]
    files = {file: digest(TEXTS[file]) for file in [*WHOLE, *rooms]}
    return files | {"cache.py": digest(TEXTS["cache.py"], DRAWING)} | {name: version(name) for name in PACKAGES}


def changes(then, now, packages):
    """The names that differ between two drawing()s which both have them: of files, or of packages."""
    return [name for name in now if (name in PACKAGES) is packages and then.get(name, now[name]) != now[name]]


def is_current(then, now):
    """Whether a picture that was drawn by the code `then` (None: there is none) would be drawn alike now. An extra that
    only one of them has changes no picture, or its flag is in the picture's key."""
    return then is not None and WHOLE[0] in then and not changes(then, now, packages=False)


# ---- encoded files ---------------------------------------------------------------------------------------------------

def encoding(file, quantize):
    """A hash of the functions that make this encoded file. quantize: --quantize_text_encoder."""
    parts = dict(ENCODING)
    if file.parent.name == "text" and quantize != "none":
        parts[OPTIONAL[0]] = None
    digests = [digest(TEXTS[file], names) for file, names in parts.items()]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:12]


def made_by(file):
    """-> what an encoded file says of the functions that made it; None if it says nothing."""
    with contextlib.suppress(Exception), open(file, "rb") as f: # a foreign file can fail in any way
        return json.loads(tensor_files.read_header(f)["__metadata__"]["json"]).get("code")


def with_encoding(code, files, quantize):
    """drawing()'s answer -> the same, and which functions have encoded the files from which a picture is drawn: ours,
    if they are not there yet. Someone who edits these may empty the cache, and not think of PREPROCESSING."""
    found = {made_by(file) if file.is_file() else encoding(file, quantize) for file in files}
    return code | {"cache.py's encoding": " ".join(sorted(map(str, found)))}


def warn_of_encoding(files, quantize, preprocessing):
    """A warning if some of these encoded files were made by other functions than ours. Only the headers of 32 are read,
    evenly spread, as a cache may hold a hundred thousand: of a mixture the few can be missed. Files of an older
    cache.py, or of another program, say nothing."""
    files = sorted(files) if common.rank() == 0 else []
    for file in files[::len(files) // 32 + 1]:
        if made_by(file) not in (None, encoding(file, quantize)):
            tell("warning: cache: encoded by another cache.py than this one (its encoding functions differ); if they "
                 f"compute something else now, add 1 to PREPROCESSING ({preprocessing}) in cache.py", file=sys.stderr)
            return
