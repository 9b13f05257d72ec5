"""
The files that a script is about to need: CACHE_DIR/.planned-TOKEN lists them, so that tools/prune.py, which knows the
files of indexes only, leaves them alone while they are encoded and until an index names them or pictures are drawn. A
cache that cannot be written has no such list, and serves if it is complete.
"""
import contextlib
import secrets
from pathlib import Path

import common
from extras import disk


@contextlib.contextmanager
def keep_from_prune(samples, cache_dir, files_of):
    """Within `with` the list is there, written by the first process -> whether the cache can be written; InputError if
    not, and if it lacks a file. The list goes whether the block succeeds, fails or is interrupted; only a process that
    was killed leaves it. files_of: cache.files_of. (An index of another folder has its files there, and keeps them
    itself.)"""
    # each command has its own list, as several may work on the same pictures
    path = Path(cache_dir, f".planned-{secrets.token_hex(16)}")
    writable = common.on_first_process(lambda: write_list(path, samples, files_of))
    try:
        yield writable
    finally:
        with contextlib.suppress(OSError): # as a list of a killed process
            path.unlink(missing_ok=True)


def write_list(path, samples, files_of):
    files = {file for sample in samples for file in files_of(sample)}
    names = sorted(f"{file.parent.name}/{file.name}" for file in files)
    try:
        if files:
            common.write_file(path, "\n".join(names).encode())
        return True
    except common.InputError as e:
        missing = sum(not file.is_file() for file in files)
        if missing:
            index = min(path.parent.glob("*.json"), default="")
            other = f", or one of its indexes as --data, such as {index}" if index else ""
            why = disk.reason_of(e.__cause__)
            raise common.InputError(f"--cache_dir {path.parent}: cannot be written ({why}), and lacks {missing} of "
                                    f"{len(files)} files; give another folder{other}")
        return False # as extras/disk.py has said
