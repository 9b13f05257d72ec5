"""
Which pictures predict.py need not draw: those that are there, whole, with the same settings (their key), and drawn by
code that computes the same (extras/sources.py). predict.save_png writes both into each PNG.
"""
import contextlib
import io
import json
from collections import Counter

from PIL import Image

import common
from extras.sources import changes, is_current

END = b"\0\0\0\0IEND\xaeB`\x82" # the last chunk of every PNG


def drawn_by(path, key):
    """The code that has drawn this picture with this key; {} of one from before that was noted. None if there is no
    such picture, or if any bit of it has changed: every byte is read, and no pixel decoded."""
    with contextlib.suppress(Exception), Image.open(path) as image:
        if image.info.get("key") == key:
            image.fp.seek(-len(END), io.SEEK_END)
            whole = image.fp.read() == END # which verify does not compare
            image.verify() # the checksums of all chunks before it
            return dict(json.loads(image.info.get("code", "{}"))) if whole else None


def is_finished(codes, look, path, key):
    """Whether this picture is there, whole, with this key, and drawn by its code. codes: {key: sources.with_encoding};
    look: drawn_by, or one that remembers what it has read."""
    return is_current(look(path, key), codes[key])


def describe(where, pictures, look):
    """Says how many of these pictures (predict.Picture) are there, and why others are drawn again. where: the folder;
    look: as for is_finished."""
    drawn = [look(p.path, p.key) for p in pictures]
    kept = [(p.code, then or {}) for p, then in zip(pictures, drawn) if p.done]
    if kept:
        common.say(f"{where}: {len(kept)} of {len(pictures)} pictures are there already, with the same settings")
    old = [changes(then, p.code, packages=False) for p, then in zip(pictures, drawn) if not p.done and then is not None]
    if old:
        names = list(dict.fromkeys(sum(old, [])))
        why = "they were drawn by an older version"
        if names:
            why = f"{', '.join(names)} {'have' if names[1:] else 'has'} changed since they were drawn"
        common.say(f"{where}: {len(old)} pictures are drawn again: {why}")
    others = Counter()
    for here, then in kept:
        names = changes(then, here, packages=True)
        others.update(f"{name} {then[name]!s:.30} (here {here[name]})" for name in names)
    for package, count in others.items():
        common.say(f"{where}: {count} pictures that are there were drawn with {package}")
