"""
Texts and paths of a stranger: how a name or a prompt is shown in a line on a terminal, how it is written in a command
that a person pastes, whether a path stays in its folder, and how a file is opened whose name is no UTF-8. And what
becomes of a line if its terminal, pipe or disk is gone: it ends nothing.

On Linux a name is bytes, and old archives and disks have some that are no UTF-8. Python has such a byte as half a
character: \\xe9 as \\udce9, in sys.argv and in what it lists of folders. Python opens these names, and JSON (in ASCII)
holds them. What encodes a text as UTF-8 itself fails at them: such texts come from shown() or command(), and such files
from open_tensors().
"""
import contextlib
import os
import re
import shlex
import sys
from pathlib import Path

import safetensors

# what moves a terminal's cursor, starts a line, rings, or turns the direction of writing
CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text):
    """A name, a prompt, or what else comes from a file, as a line on a terminal may have it: a control character
    becomes \\n, \\x1b, \\u202e; a byte that is no UTF-8 becomes \\xe9, as command() writes it."""
    def escaped(control):
        byte = ord(control[0]) - 0xdc00
        return rf"\x{byte:02x}" if 0x80 <= byte <= 0xff else control[0].encode("unicode_escape").decode()
    return CONTROLS.sub(escaped, str(text))


lost = [] # ("stdout" or "stderr", why lines of it are lost), once for each: common.tell takes it and says so


class ShownStream: # a class because it stands for sys.stdout and sys.stderr, for all that prints
    """A stream whose lines are shown(), whoever writes them: a library, a traceback, a print() of yours. tqdm's \\r
    before and behind a bar stays, and its moves up. It never raises: the work goes on when nobody reads."""

    def __init__(self, name, stream):
        self.name, self.stream, self.failed = name, stream, False

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        inner = text.strip("\r")
        if inner.replace("\x1b[A", ""): # else tqdm alone has written it
            text = text.replace(inner, "\n".join(map(shown, inner.split("\n"))), 1)
        self.attempt(self.stream.write, text)
        return len(text)

    def flush(self):
        self.attempt(self.stream.flush)

    def attempt(self, act, *text):
        """What a full disk refuses stays in Python's buffer, and is tried again with the next line."""
        try:
            act(*text)
        except (OSError, ValueError) as e: # ValueError: somebody has closed it
            if not self.failed:
                lost.append((self.name, str(e)))
            self.failed = True
            if isinstance(e, (BrokenPipeError, ValueError)): # it stays so: nothing is tried again, also not at the end
                gone, self.stream = self.stream, open(os.devnull, "w", encoding="utf-8")
                with contextlib.suppress(OSError, ValueError): # libraries in C write there, too
                    os.dup2(self.stream.fileno(), gone.fileno())


def show_streams():
    """From now on all lines of this process are shown(), and no stream ends it. A file name that is no UTF-8 must not
    end a run, either."""
    lost.clear()
    for number in range(3):
        try:
            os.fstat(number)
        # Who has started us has closed it. The next file, such as a log, would get its number, and what C prints.
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")
        with contextlib.suppress(AttributeError, OSError): # a notebook's cannot; a full disk's is flushed here
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
        setattr(sys, name, ShownStream(name, stream))


def command(words):
    """Words as a command that a person can paste into bash or zsh: a control character, or a byte that is no UTF-8,
    which always stands in quotes ('), becomes $'...' between them. On Windows: see windows_word. ValueError for half a
    character, which JSON may have, and no name."""
    def escaped(control):
        return f"'${repr(control[0].encode(errors='surrogateescape'))[1:]}'"
    if os.name == "nt":
        return shown(" ".join(map(windows_word, map(str, words))))
    return CONTROLS.sub(escaped, shlex.join(map(str, words)))


def windows_word(word):
    """A word in the one form that cmd.exe and PowerShell share: in double quotes, and " as "". They still read more
    into a % (cmd.exe), a $ or a ` (PowerShell), and PowerShell 5.1 loses a "."""
    if re.fullmatch(r"[\w.:/\\=+-]+", word):
        return word
    # of backslashes before a quote, or before the end, each needs another one
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + 2 * found[2], word) + '"'


def is_inside(path, folder):
    """Whether a path that a file names, or a link that stands in a folder, leads to a place in this folder. Links are
    followed, also the folder's own. (A snapshot in the hub's cache has links to ../../blobs, which are its files; and
    a folder that older versions have downloaded to leads there from elsewhere. A file there is named by its hash, which
    nobody knows who does not have the file.)"""
    folder, path = [Path(os.path.realpath(place)) for place in (folder, path)]
    if path.parent.name == "blobs" and re.match("(datasets|models|spaces)--", path.parent.parent.name):
        return True
    inside = [folder]
    for above in (folder, *folder.parents):
        if above.parent.name == "snapshots":
            inside.append(above.parent.parent / "blobs")
    return any(map(path.is_relative_to, inside))


def is_utf8(path):
    return not re.search("[\ud800-\udfff]", str(path))


def open_tensors(path, framework="pt"):
    """safetensors.safe_open, also of a path that is no UTF-8, which that refuses."""
    if is_utf8(path):
        return safetensors.safe_open(path, framework)
    with open(path, "rb") as file: # Linux, which alone has such names, gives an open file a second one
        return safetensors.safe_open(f"/proc/self/fd/{file.fileno()}", framework)
