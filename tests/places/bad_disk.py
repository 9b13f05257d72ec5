"""
A disk that refuses: below one folder, calls of the system fail as they do on network disks, mounted buckets and NAS
folders. Each fault is {what is refused: the errno}:

    write           whatever writes: a read-only disk
    append          to open a file at its end
    rename          of a file;  rename_folder: of a folder;  rename_full: of one with something in it
    fsync           of a file;  fsync_folder: of a folder
    flock, link     locks, hard links
    unlink, rmdir   deleting a file, a folder;  unlink_open: a file that is open
    name            names of more than 143 bytes

with bad_disk(folder, "bucket"): here, in this process. For another one: start(..., prelude=on(folder, "bucket")).
"""
import builtins
import contextlib
import errno
import fcntl
import functools
import io
import os
import stat
import tempfile

BUCKET = dict(rename_folder=errno.ENOSYS, fsync=errno.EINVAL, fsync_folder=errno.EINVAL, flock=errno.ENOSYS,
              link=errno.ENOTSUP)

def path_of(path, dir_fd=None):
    """-> the absolute path of what a call is given: a descriptor, a path, a name in an open folder."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    path = os.fsdecode(path)
    return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path) if dir_fd else os.path.abspath(path)

def open_files():
    """-> the descriptors of this process that lead to something."""
    return [int(n) for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")]

def install(folder, faults):
    """From now on this disk is bad -> a function that mends it."""
    faults = BUCKET if faults == "bucket" else faults
    folder, undo = os.path.abspath(folder), []

    def refuse(kind, path, second=None):
        if kind in faults and f"{path}/".startswith(f"{folder}/"):
            raise OSError(faults[kind], os.strerror(faults[kind]), path, None, second)

    def check_name(path):
        if len(os.fsencode(os.path.basename(path))) > 143:
            refuse("name", path)

    def check_write(path, second=None):
        check_name(path)
        refuse("write", path, second)

    def renaming(real, source, target, **fds):
        kind = "rename_folder" if os.path.isdir(source) else "rename"
        if kind == "rename_folder" and os.listdir(source):
            refuse("rename_full", path_of(target), path_of(source))
        refuse(kind, path_of(target), path_of(source))
        check_write(path_of(target), path_of(source))
        return real(source, target, **fds)

    def syncing(real, descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        refuse("fsync_folder" if is_folder else "fsync", path_of(descriptor))
        return real(descriptor)

    def locking(real, f, operation):
        if not operation & fcntl.LOCK_UN:
            refuse("flock", path_of(f if isinstance(f, int) else f.fileno()))
        return real(f, operation)

    def linking(real, source, target, **more):
        refuse("link", path_of(target))
        check_write(path_of(target))
        return real(source, target, **more)

    def deleting(kind, real, path, *, dir_fd=None):
        if "unlink_open" in faults and path_of(path, dir_fd) in map(path_of, open_files()):
            refuse("unlink_open", path_of(path, dir_fd))
        for what in (kind, "write"):
            refuse(what, path_of(path, dir_fd))
        return real(path, dir_fd=dir_fd)

    def making(real, path, *mode, **more):
        check_write(path_of(path))
        return real(path, *mode, **more)

    def opening(real, file, mode="r", *more, **others):
        if not isinstance(file, int) and set(mode) & set("wxa+"):
            check_write(path_of(file))
            if "a" in mode:
                refuse("append", path_of(file))
        return real(file, mode, *more, **others)

    def opening_low(real, path, flags, *mode, **more):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not more:
            check_write(path_of(path))
        return real(path, flags, *mode, **more)

    def replace(place, name, function):
        real = getattr(place, name)
        undo.append(functools.partial(setattr, place, name, real))
        setattr(place, name, functools.partial(function, real))
    for name in ("rename", "replace"):
        replace(os, name, renaming)
    replace(os, "fsync", syncing)
    replace(fcntl, "flock", locking)
    replace(os, "link", linking)
    replace(os, "mkdir", making)
    for name, kind in (("unlink", "unlink"), ("remove", "unlink"), ("rmdir", "rmdir")):
        replace(os, name, functools.partial(deleting, kind))
    for place in (builtins, io):
        replace(place, "open", opening)
    replace(os, "open", opening_low)
    if "unlink_open" in faults: # nor has such a disk files without a name
        undo.append(functools.partial(setattr, tempfile, "_O_TMPFILE_WORKS", tempfile._O_TMPFILE_WORKS))
        tempfile._O_TMPFILE_WORKS = False
    return lambda: [mend() for mend in undo]

def on(folder, faults):
    """-> a prelude for a process of its own."""
    return functools.partial(install, folder, faults)

@contextlib.contextmanager
def bad_disk(folder, faults):
    mend = install(folder, faults)
    try:
        yield
    finally:
        mend()
