"""
Remembers what was found in a dataset's pictures, so that a start opens only those that are new or changed; without this
file every start reads every picture.

CACHE_DIR/pictures.txt holds a picture's content hash and size under its path, with the file's length, times and number
on the disk when it was looked at. A picture that has not passed all checks is never in it. Of two processes that write
it at once the last one wins, and what the other has seen is read once more. Deleting it does no harm.
"""
import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from tqdm import tqdm

FORM = 1 # add 1 when an entry, or a check that a picture passes, changes: what others have written is not read
SETTLED = 2 * 10**9 # ns: a file that changes twice within a tick of its disk's clock (2 s on FAT) keeps its times


def look_ahead(samples, look, cache_dir, quiet, common):
    """-> a function that answers as look, cache.py's look_at(path), and knows what it says of these samples' pictures
    already: from pictures.txt, or read now by threads. It raises look's InputErrors only when it is asked. common: the
    module, as nothing here imports the core."""
    memory = Path(cache_dir, "pictures.txt")
    remembered = read_memory(memory)
    known = {} # {path: look's answer}
    new = [] # [(path, stamp)], to be read now
    fresh = {} # what of them will be remembered
    for path in dict.fromkeys(path for s in samples for path in (s.target, s.mask, *s.controls) if path):
        stamp = stamp_of(path)
        old_stamp, size, content = remembered.get(os.path.abspath(path), (None, None, None))
        if stamp and stamp == old_stamp:
            known[path] = tuple(size), content
        else:
            new.append((path, stamp))
    before = time.time_ns() - SETTLED # reading begins now: a file that is older than this, and changes, gets new times
    found = common.run_ahead(lambda item: look(item[0]), new, threads=8, most=32)
    try:
        for path, stamp in tqdm(new, desc="reading pictures", unit=" pictures", disable=quiet or None, leave=False):
            with contextlib.suppress(SystemExit): # an InputError, which is said when the picture's sample is planned
                known[path] = next(found).result()
                if stamp and max(stamp[1:3]) < before: # (None: it has come meanwhile)
                    fresh[os.path.abspath(path)] = stamp, *known[path]
    finally: # also after Ctrl-C: a hundred thousand pictures take an hour
        if fresh: # read once more, as another process may have written it
            write_memory(memory, read_memory(memory) | fresh, common.write_file)
    return lambda path: known.get(path) or look(path)


def stamp_of(path):
    """[length in bytes, time of the last change of the content, and of the file: ns, its number on the disk], or None
    if it is not there. The second time also changes if another file of the same length and age is moved here; the
    number, if that file's folder is: two BMPs written within a tick are alike in all else."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def read_memory(path):
    """{absolute path: (stamp, size, content hash)}, or {} if there is none, or a damaged one."""
    with contextlib.suppress(OSError, ValueError):
        digest, text = path.read_text().split("\n", 1)
        if digest == digest_of(text):
            return json.loads(text)
    return {}


def digest_of(text):
    return hashlib.sha256(f"{FORM}\n{text}".encode()).hexdigest()


def write_memory(path, remembered, write_file):
    text = json.dumps(remembered, sort_keys=True)
    with contextlib.suppress(SystemExit): # an InputError: nothing is lost but time
        write_file(path, f"{digest_of(text)}\n{text}".encode())
