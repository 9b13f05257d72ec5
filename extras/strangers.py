"""
Texts and paths of a stranger: how a name or a prompt is shown in a line on a terminal, how it is written in a command
that a person pastes, and whether a path stays in its folder.
"""
import os
import re
import shlex
import sys
from pathlib import Path

# what moves a terminal's cursor, starts a line, rings, or turns the direction of writing
CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text):
    """A name, a prompt, or what else comes from a file, as a line on a terminal may have it: a control character
    becomes \\n, \\x1b, \\u202e."""
    return CONTROLS.sub(lambda control: control[0].encode("unicode_escape").decode(), str(text))


class ShownStream: # a class because it stands for sys.stdout and sys.stderr, for all that prints
    """A stream whose lines are shown(), whoever writes them: a library, a traceback, a print() of yours. tqdm's \\r
    before and behind a bar stays, and its moves up."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        inner = text.strip("\r")
        if inner.replace("\x1b[A", ""): # else tqdm alone has written it
            text = text.replace(inner, "\n".join(map(shown, inner.split("\n"))), 1)
        return self.stream.write(text)


def show_streams():
    """From now on all lines of this process are shown(). A file name that is no UTF-8 must not end a run, either."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, ShownStream(stream))


def command(words):
    """Words as a command that a person can paste into bash or zsh: a control character, which always stands in quotes
    ('), becomes $'...' between them."""
    def escaped(control):
        return f"'${repr(control[0].encode(errors='surrogateescape'))[1:]}'"
    return CONTROLS.sub(escaped, shlex.join(map(str, words)))


def is_inside(path, folder):
    """Whether a path that a file names, or a link that stands in a folder, leads to a place in this folder. Links are
    followed, also the folder's own. (A snapshot in the hub's cache has links to ../../blobs, which are its files.)"""
    folder, path = [Path(os.path.realpath(place)) for place in (folder, path)]
    inside = [folder]
    for above in (folder, *folder.parents):
        if above.parent.name == "snapshots":
            inside.append(above.parent.parent / "blobs")
    return any(map(path.is_relative_to, inside))
