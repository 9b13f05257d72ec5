"""
How much memory of the host this job may take. The machine's own numbers are not enough: a container, a batch job or a
service has a limit of its own, past which it is killed without a word.
"""
import contextlib
from pathlib import Path

import psutil

CGROUPS, OWN_GROUPS = "/sys/fs/cgroup", "/proc/self/cgroup" # where Linux shows control groups, and the names of ours
# of a group: its limit, what it uses, and how names of memory.stat begin that include the groups below
GROUP_FILES = [("memory.max", "memory.current", ""), ("memory.high", "memory.current", ""),
               ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")]

def group_folders():
    """-> the folders of our control groups and of all above them, in version 1 or 2; some are not there. A container
    may see its own group at the top, under a name that only the host knows: so each end of a name counts."""
    folders = []
    with contextlib.suppress(OSError):
        for line in Path(OWN_GROUPS).read_text("utf-8").splitlines():
            names = Path(line.split(":", 2)[-1]).parts[1:]
            for start in range(len(names) + 1):
                for version in ("", "memory", "unified"):
                    folder = Path(CGROUPS, version, *names[start:])
                    folders += [folder, *folder.parents]
    return dict.fromkeys(folders)

def files_read(folder, prefix):
    """-> bytes of the files that a control group has read, such as a model's: they go when memory is wanted."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        stat = dict(line.split() for line in (folder / "memory.stat").read_text("utf-8").splitlines())
        return int(stat[f"{prefix}active_file"]) + int(stat[f"{prefix}inactive_file"])
    return 0

def host_memory():
    """-> (bytes that are free for this process, bytes in all), by the machine and its control groups."""
    machine = psutil.virtual_memory() # (of a container: its host's)
    found = [(machine.available, machine.total)]
    for folder in group_folders():
        for limit, usage, prefix in GROUP_FILES:
            with contextlib.suppress(OSError, ValueError): # there is no such group, or its limit is the word max
                total, used = [int((folder / name).read_text("utf-8")) for name in (limit, usage)]
                found.append((max(0, total - used + files_read(folder, prefix)), total))
    free, total = zip(*found)
    return min(free), min(total)
