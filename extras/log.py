"""
log.jsonl: a line for each step, each validation and each warning of a run. A disk that refuses a line, as network disks
do at times, gets it with the next one.
"""
import json
import os

import common
from extras import disk, failures


class Log: # a class because it keeps the lines that are not on the disk yet

    def __init__(self, path):
        self.path = path
        self.waiting, self.step = [], 0 # lines, in order, and the last one's step
        self.warnings = 0 # of common.WARNED: so many are written, or wait
        self.size, self.failed = path.stat().st_size, False # bytes of it that are whole; whether more may follow

    def write(self, record, sync=False):
        """Appends the line of a step or a validation. sync: as for flush."""
        self.step = record["step"]
        self.waiting.append(json.dumps(record))
        self.flush(sync)

    def flush(self, sync=False):
        """Writes what waits, and the warnings until now -> whether it worked; if not, a warning says so, once. sync:
        onto the disk, so that after a power loss the log is never behind a checkpoint."""
        for line in common.WARNED[self.warnings:]:
            self.waiting.append(json.dumps(dict(step=self.step, warning=line)))
        self.warnings = len(common.WARNED)
        with failures.tried(self.path):
            with open(self.path, "ab") as f:
                if self.failed and os.fstat(f.fileno()).st_size > self.size: # half a line
                    f.truncate(self.size)
                f.write("".join(f"{line}\n" for line in self.waiting).encode())
                f.flush()
                if sync:
                    disk.sync(f.fileno(), self.path.parent)
                size = os.fstat(f.fileno()).st_size
            # only when it is closed, as NFS may refuse it then
            self.waiting, self.size = [], size
        self.failed = bool(self.waiting)
        return not self.waiting
