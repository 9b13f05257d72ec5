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
from extras.sources import PACKAGES, changes, is_current

END = b"\0\0\0\0IEND\xaeB`\x82" # the last chunk of every PNG


def key_of(path):
    """The key of a picture that save_png has saved, also of one that was damaged since. None of any other file."""
    with contextlib.suppress(Exception), Image.open(path) as image:
        return image.info["key"]


def drawn_by(path, key):
    """The code that has drawn this picture with this key; {} of one from before that was noted. None if there is no
    such picture, or if any bit of it has changed: every byte is read, and no pixel decoded."""
    with contextlib.suppress(Exception), Image.open(path) as image:
        if image.info.get("key") == key:
            image.fp.seek(-len(END), io.SEEK_END)
            whole = image.fp.read() == END # which verify does not compare
            image.verify() # the checksums of all chunks before it
            return dict(json.loads(image.info.get("code", "{}"))) if whole else None


def finished(path, key):
    """Whether an earlier call has saved this picture with the same key, by whatever code."""
    return drawn_by(path, key) is not None


def pictures_to_draw(where, pictures, code):
    """-> those of predict.plan_pictures that are not there, or damaged, or drawn by other code; and says how many are
    there. where: the folder. code: sources.drawing."""
    drawn = [drawn_by(p.path, p.key) for p in pictures]
    missing = [p for p, then in zip(pictures, drawn) if not is_current(then, code)]
    if len(missing) < len(pictures):
        common.say(f"{where}: {len(pictures) - len(missing)} of {len(pictures)} pictures are there already, with the "
                   "same settings")
    old = [then for then in drawn if then is not None and not is_current(then, code)]
    if old:
        names = list(dict.fromkeys(name for then in old for name in changes(then, code, packages=False)))
        why = "they were drawn by an older version"
        if names:
            why = f"{', '.join(names)} {'have' if names[1:] else 'has'} changed since they were drawn"
        common.say(f"{where}: {len(old)} pictures are drawn again: {why}")
    others = Counter()
    for then in drawn:
        if is_current(then, code):
            names = changes(then, code, packages=True)
            others.update(f"{name} {then[name]!s:.30} (here {code[name]})" for name in names)
    for package, count in others.items():
        common.say(f"{where}: {count} pictures that are there were drawn with {package}")
    return missing
