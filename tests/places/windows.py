"""
A Windows that does not exist: what it forbids is forbidden here, too, in this process, to our files and to libraries.

    def test_x(windows)                          # the fixture at the end: until the test ends, for run_script
    start("train.py", ..., prelude=install)      # a process of its own, from its beginning
    $ python -m pytest -p tests.places.windows test_consistency.py # .ci/run does so

In the folders that are watched, the checkout and temporary ones: a file that is open or mapped is not moved, replaced
or deleted; a locked one is not read; os.rename replaces nothing; names are Windows' (and two may not differ in case
alone); folders are not opened; nobody may make symbolic links; text has the code page and CRLF, unless a call says
something else. Our own modules see an os, a signal and a sys without what Windows lacks, and no module of POSIX, no
/proc. What it cannot do: backslashes and drives (paths stay Linux'), delays of a deletion, consoles, handles of other
processes.
"""
import builtins
import contextlib
import errno
import fcntl
import io
import os
import re
import shutil
import signal
import sys
import tempfile
import types
from pathlib import Path

import pytest

TREE = str(Path(__file__).resolve().parents[2])
NO_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "curses", "readline", "syslog", "spwd"}
NO_OS = set("""killpg getloadavg mkfifo mknod fork forkpty getuid geteuid getgid getegid getgroups setuid setsid getsid
    getpgid getpgrp setpgid sysconf pathconf fpathconf confstr nice uname wait3 wait4 statvfs fstatvfs chown fchown
    lchown fchmod chroot pread pwrite readv writev posix_fadvise posix_fallocate sendfile sched_getaffinity
    sched_setaffinity openpty ttyname lockf sync fdatasync memfd_create getxattr setxattr posix_spawn getrandom
    O_NOFOLLOW O_DIRECTORY O_TMPFILE O_CLOEXEC O_NONBLOCK O_SYNC O_DSYNC O_NOCTTY O_PATH""".split())
SIGNALS = set("""SIGABRT SIGBREAK SIGFPE SIGILL SIGINT SIGSEGV SIGTERM SIG_DFL SIG_IGN NSIG Signals Handlers signal
    getsignal raise_signal default_int_handler strsignal valid_signals set_wakeup_fd""".split())
BAD_NAME = re.compile(r'(?i)[:*?"<>|\\\0-\x1f]|[. ]\Z|\A(con|prn|aux|nul|com[1-9]|lpt[1-9])(\..*)?\Z')
real, real_open = types.SimpleNamespace(**vars(os)), open

def is_ours(file):
    """Whether this code is the program's, and no test."""
    return file.startswith(TREE) and not re.match(r"/(tests/|test_|conftest)", file.removeprefix(TREE))

def asker():
    """-> the file of the code that has called, maybe through pathlib."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or frame.f_code.co_filename.endswith("/pathlib.py"):
        frame = frame.f_back
    return frame.f_code.co_filename

def has_windows_code():
    """tempfile and filelock do other things there."""
    return re.search(r"/tempfile\.py|/filelock/", asker())

def watched(path):
    """-> the whole path as a text, if it is in a folder that is watched."""
    if isinstance(path, int):
        return None
    path = os.path.abspath(os.fsdecode(path))
    return path if path.startswith((TREE + "/", tempfile.gettempdir() + "/")) else None

def refuse(kind, number, path):
    raise kind({22: errno.EINVAL, 80: errno.EEXIST}.get(number, errno.EACCES), f"[WinError {number}, imitated]", path)

def holders(path):
    """-> what this process has open or mapped at the path, or below it."""
    found = []
    for fd in real.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError): # another thread has closed it meanwhile
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    with real_open("/proc/self/maps", "rb") as file:
        found += [os.fsdecode(line.split(None, 5)[5].rstrip(b"\n")) for line in file if b" /" in line]
    return [held for held in found if held == path or held.startswith(path + "/")]

def check_new(path):
    """Of a name that is about to be made."""
    if not (whole := watched(path)):
        return
    folder, _, name = whole.rpartition("/")
    if BAD_NAME.search(name) or len(whole) > 259:
        refuse(OSError, 22, whole)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if any(other != name and other.lower() == name.lower() for other in real.listdir(folder)):
            refuse(FileExistsError, 80, whole) # (there it would be the other file)

def check_free(*paths):
    for path in filter(None, map(watched, paths)):
        if holders(path):
            refuse(PermissionError, 32, path)

def is_locked(path):
    """Whether anybody holds filelock's lock of this file, in this process or another."""
    with real_open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True

def replacements(code_page):
    """-> {(module, name): function}, of what all of the process calls."""
    def move(name):
        def moved(source, target, **options):
            check_new(target)
            check_free(source, target)
            if watched(target) and os.path.lexists(target) and (name == "rename" or os.path.isdir(target)):
                refuse(*((FileExistsError, 80) if name == "rename" else (PermissionError, 5)), target)
            return getattr(real, name)(source, target, **options)
        return moved

    def remove(path, *, dir_fd=None):
        if not has_windows_code():
            check_free(path)
        return real.unlink(path, dir_fd=dir_fd)

    def make(name):
        def made(*args, **options):
            check_new(args[-1] if name == "link" else args[0])
            return getattr(real, name)(*args, **options)
        return made

    def open_fd(path, flags, mode=0o777, *, dir_fd=None):
        if watched(path) and not has_windows_code():
            if os.path.isdir(path):
                refuse(PermissionError, 5, path)
            if flags & os.O_CREAT:
                check_new(path)
        return real.open(path, flags, mode, dir_fd=dir_fd)

    def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        if not isinstance(file, int) and os.fsdecode(file).startswith("/proc/") and is_ours(asker()):
            raise FileNotFoundError(errno.ENOENT, "imitated: no /proc", file)
        if path := watched(file):
            if set(mode) & set("wxa"):
                check_new(path)
            if os.path.isfile(path) and is_locked(path):
                refuse(PermissionError, 33, path)
            if "b" not in mode:
                encoding = code_page if encoding in (None, "locale") else encoding
                newline = "\r\n" if newline is None and set(mode) & set("wxa+") else newline
        return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    def no_links(source, target, *_, **__):
        refuse(OSError, 1314, target)
    return {(os, "rename"): move("rename"), (os, "replace"): move("replace"), (os, "unlink"): remove,
            (os, "remove"): remove, (os, "mkdir"): make("mkdir"), (os, "link"): make("link"), (os, "symlink"): no_links,
            (os, "open"): open_fd, (builtins, "open"): opened, (io, "open"): opened,
            (shutil, "_use_fd_functions"): False}

class Without(types.ModuleType): # a class because a module is what our code asks for its names
    """A module without some of its names, and with others."""
    def __init__(self, module, has, **others):
        self.__dict__.update(module=module, has=has, **others)

    def __getattr__(self, name):
        if name.startswith("_") or self.has(name):
            return getattr(self.module, name)
        raise AttributeError(f"module {self.module.__name__!r} has no attribute {name!r} (imitated)")

    def __setattr__(self, name, value):
        setattr(self.module, name, value)

OURS = dict(os=Without(os, lambda name: name not in NO_OS, name="nt"),
            signal=Without(signal, SIGNALS.__contains__, SIGBREAK=signal.SIGUSR2),
            sys=Without(sys, lambda name: name not in ("getdlopenflags", "abiflags"), platform="win32"))

def install(patch=None, code_page="cp1252"):
    """From now on; or until patch.undo(), of a pytest.MonkeyPatch."""
    put = (patch or pytest.MonkeyPatch()).setattr
    for (module, name), new in replacements(code_page).items():
        put(module, name, new)
    for module in list(sys.modules.values()): # of ours, those that are imported already
        if is_ours(getattr(module, "__file__", None) or ""):
            for name in OURS.keys() & vars(module).keys():
                put(module, name, OURS[name])
    import_module = builtins.__import__

    def imported(name, globals=None, *args, **options):
        if not is_ours((globals or {}).get("__file__") or ""):
            return import_module(name, globals, *args, **options)
        if name in NO_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r} (imitated)", name=name)
        return OURS.get(name) or import_module(name, globals, *args, **options)
    put(builtins, "__import__", imported)
    for stream in (sys.stdout, sys.stderr):
        if patch is None and hasattr(stream, "reconfigure"): # in a pipe, as Python opens it there
            stream.reconfigure(encoding=code_page, errors="strict" if stream is sys.stdout else "backslashreplace")

def pytest_configure():
    """For -p tests.places.windows."""
    install()

@pytest.fixture
def windows(monkeypatch):
    """Until the test ends."""
    install(monkeypatch)
