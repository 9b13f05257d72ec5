"""
The files that a script is about to need: CACHE_DIR/.planned-TOKEN lists them, so that tools/prune.py, which knows the
files of indexes only, leaves them alone while they are encoded and until an index names them or pictures are drawn.
"""
import contextlib
import secrets
from pathlib import Path

import common


@contextlib.contextmanager
def keep_from_prune(samples, cache_dir, files_of):
    """Within `with` the list is there, written by the first process. It goes whether the block succeeds, fails or is
    interrupted; only a process that was killed leaves its list. files_of: cache.files_of. (An index of another folder
    has its files there, and keeps them itself.)"""
    files = set()
    for sample in samples if common.rank() == 0 else []:
        files.update(f"{file.parent.name}/{file.name}" for file in files_of(sample))
    # each command has its own list, as several may work on the same pictures
    path = Path(cache_dir, f".planned-{secrets.token_hex(16)}")
    if files:
        common.write_file(path, "\n".join(sorted(files)).encode())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
