"""
The files that a script is about to need: CACHE_DIR/.planned-HASH lists them, so that tools/prune.py, which knows the
files of indexes only, leaves them alone while they are encoded and until an index names them or pictures are drawn.
"""
import contextlib
from pathlib import Path

import common


@contextlib.contextmanager
def planned(samples, cache_dir, files_of):
    """Within `with` the list is there, written by the first process. It goes whether the block succeeds, fails or is
    interrupted; only a process that was killed leaves its list. files_of: cache.files_of. (An index of another folder
    has its files there, and keeps them itself.)"""
    files = set()
    for sample in samples if common.rank() == 0 else []:
        files.update(f"{file.parent.name}/{file.name}" for file in files_of(sample))
    path = Path(cache_dir, f".planned-{common.content_key(files=sorted(files))}")
    if files:
        common.write_file(path, "\n".join(sorted(files)).encode())
    try:
        yield
    finally:
        if files:
            path.unlink(missing_ok=True)
