"""
log.jsonl: a line for each step, each validation and each warning of a run. A disk that refuses a line, as network disks
do at times, gets it with the next one.
"""
import json
import os

import common


class Log: # a class because it keeps the lines that are not on the disk yet

    def __init__(self, path):
        self.path = path
        self.waiting, self.step = [], 0 # lines, in order, and the last one's step
        self.warnings = 0 # of common.warned: so many are written, or wait
        self.whole = None # bytes of the file before an attempt that failed, and may have left half a line

    def write(self, record, sync=False):
        """Appends the line of a step or a validation. sync: as for flush."""
        self.step = record["step"]
        self.waiting.append(json.dumps(record))
        self.flush(sync)

    def flush(self, sync=False):
        """Writes what waits, and the warnings until now -> whether it worked; if not, a warning says so, once. sync:
        onto the disk, so that after a power loss the log is never behind a checkpoint."""
        for line in common.warned[self.warnings:]:
            self.waiting.append(json.dumps(dict(step=self.step, warning=line)))
        self.warnings = len(common.warned)
        with common.tried(self.path), open(self.path, "ab") as f:
            if self.whole is None:
                self.whole = f.tell()
            elif f.tell() > self.whole:
                f.truncate(self.whole)
            f.write("".join(f"{line}\n" for line in self.waiting).encode())
            f.flush()
            if sync:
                os.fsync(f.fileno())
            self.waiting, self.whole = [], None
        return not self.waiting
