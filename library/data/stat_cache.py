"""
What earlier starts have found out about files: a start reads only those that are new or have changed. Otherwise
every start would read every picture, and every byte of the model, some of it more than once.

CACHE_DIR/pictures.txt, masks.txt and models.txt list, by path, what was found out about a file (its content hash, a
picture's size), and the file's length, times and number on the disk when it was read. A file that has not passed all
checks is never listed. If two processes write a list at once, the last one wins, and the next start reads again what
the other has seen. Deleting a list does no harm.
"""
import contextlib
import hashlib
import json
import os
import time

from tqdm import tqdm

import common
from common import InputError, LONG_TEXT, quiet, run_ahead, write_file

OURS = rb"(?s)\A(\Z|.{64}\n\{)" # how it begins, even if it is damaged; a person's pictures.txt is not replaced
FORM = 5 # add 1 when an entry, or a check that a picture passes, changes: what others have written is not read
SETTLED = 2 * 10**9 # ns: a file that changes twice within one tick of its disk's clock (2 s on FAT) keeps its times

def remember_by_stat(paths, read, memory):
    """-> a function like read(path), but one that knows the answers for these paths: from the file `memory`, or read
    now by threads. Answers are what JSON holds. It raises read's InputErrors only when it is asked."""
    remembered = read_memory(memory)
    known = {} # {path: read's answer}
    new = [] # [(path, stamp)], to be read now
    fresh = {} # what of them will be remembered
    for path in dict.fromkeys(paths):
        stamp = stat_of(path)
        old_stamp, answer = remembered.get(os.path.abspath(path), (None, None))
        if stamp and stamp == old_stamp:
            known[path] = answer
        else:
            new.append((path, stamp))
    now = time.time_ns() # reading begins: a file that was settled by now, and changes, gets new times
    answers = run_ahead(read, [path for path, _ in new], threads=8, most=32)
    lengths = [stamp[0] if stamp else 0 for _, stamp in new]
    bar = tqdm(total=sum(lengths), desc=f"reading {memory.stem}", unit="B", unit_scale=True,
               disable=not new or quiet(), leave=False)
    try:
        for (path, stamp), length in zip(new, lengths):
            with contextlib.suppress(InputError): # plan_sample says it, when it asks about the picture
                known[path] = next(answers).result()
                # (None: it has come meanwhile.) A content of tomorrow is of a camera whose clock is ahead
                if stamp and stamp[2] < now - SETTLED and not now - SETTLED <= stamp[1] <= now:
                    fresh[os.path.abspath(path)] = stamp, known[path]
            bar.update(length)
    finally: # also after Ctrl-C, as reading a hundred thousand pictures takes an hour
        bar.close()
        if fresh: # read the list once more, as another process may have written it
            write_memory(memory, read_memory(memory) | fresh)
    return lambda path: known.get(path) or read(path)

def stat_of(path):
    """[length in bytes, time of the last change of the content, and of the file: ns, its number on the disk], or None
    if it is not there. The second time also changes if another file of the same length and age is moved here; the
    number, if that file's folder is: two BMPs written within a tick are alike in all else."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]

def read_memory(path):
    """{absolute path: (stamp, what was found out)}, or {} if there is none, or one that is damaged or not ours. A cache
    may come from anyone, and the digest in it, too; but no stranger knows the times and numbers that this disk has
    given to its files, so an entry that fits is our own."""
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
        if path.is_file() and path.stat().st_size <= LONG_TEXT: # (a pipe would hang)
            digest, text = path.read_text(encoding="utf-8").split("\n", 1)
            remembered = json.loads(text) if digest == digest_of(text) else None
            if all(isinstance(entry, list) and len(entry) == 2 for entry in remembered.values()):
                return remembered
    return {}

def digest_of(text):
    return hashlib.sha256(f"{FORM}\n{text}".encode()).hexdigest()

def write_memory(path, remembered):
    text = json.dumps(remembered, sort_keys=True)
    with contextlib.suppress(InputError): # nothing is lost but time
        write_file(path, f"{digest_of(text)}\n{text}".encode(), OURS)

def refuse_changed_files(places, hashes, hash_of):
    """InputError for a file or folder, as this process finds it, of which hash_of() gives another hash than it gave
    before the file was read: maybe on the first process, whose machine can have the same file elsewhere."""
    for place, before in zip(places, hashes):
        if hash_of(place) != before:
            elsewhere = ", or the first process has another one" if common.world() > 1 else ""
            raise InputError(f"{place}: has changed since it was looked at{elsewhere}; run the same command again")
