"""
The ground that all scripts stand on: errors of the user, lines on a terminal, processes, signals, threads, and files
that are written whole or not at all. It knows no model, dataset or LoRA, and imports no other file of ours.
"""
import contextlib
import difflib
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import shlex
import signal
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

# torch, diffusers and transformers take five seconds to import, so the functions that need them import them: most tools
# print their -h, or find a typo, without.

# ---- errors of the user ----------------------------------------------------------------------------------------------

def error_line(message):
    return "error: " + printable(message)

class InputError(SystemExit):
    """The user's input is wrong: InputError('<file or flag>: <what is wrong>; <what to do>'). A SystemExit, so that the
    script ends with this line and status 1, without a traceback."""

    def __init__(self, message):
        super().__init__(error_line(message))

class Exists(InputError):
    """Something is where a file was to be written, and may not be replaced."""

def flag_error(line):
    """Ends the script with status 2, as argparse does, for a flag that cannot be meant."""
    tell(error_line(line), file=sys.stderr)
    sys.exit(2)

@contextlib.contextmanager
def collect_errors(problems):
    """Within `with`, an InputError becomes a line of this list, and the code behind the block runs all the same."""
    try:
        yield
    except InputError as e:
        problems.append(str(e))

def print_problems(lines):
    """Prints error lines to stderr, those that are alike as one."""
    tell(*fold(lines), file=sys.stderr)

FEW = 3 # so many lines that are alike are printed one by one

def fold(lines):
    """Lines that differ only in the file that they begin with become one, which names the others. A few stay."""
    groups, folded = {}, []
    for line in lines:
        file, _, rest = line.removeprefix("error: ").partition(": ")
        path = Path(file)
        # the rest may name the caption or control that is wanted; its name stands before a suffix
        reason = re.sub(rf"(?<!\w){re.escape(path.stem)}(?=\.\w)", "*", rest)
        groups.setdefault(reason, []).append((line, path.name))
    for first, *others in groups.values():
        if len(others) < FEW:
            folded += [line for line, _ in [first, *others]]
        else:
            names = textwrap.shorten(", ".join(name for _, name in others), 300, placeholder=" ...")
            folded.append(f"{first[0]}; and {len(others)} others likewise: {names}")
    return folded

def first_words(e):
    """What an exception says, in one line."""
    return textwrap.shorten(str(e), 300) or type(e).__name__

def first_line(e):
    """Of what an exception says the first line alone: CUDA's go on for several, about other things."""
    return first_words((str(e).strip() or type(e).__name__).splitlines()[0])

def closest(word, known, least=0.7):
    """-> what the name stands for that is most like this word, in whatever letters; None if none is at least so much.
    known: {name: what it stands for}."""
    by_lower = {name.lower(): meant for name, meant in known.items()}
    near = difflib.get_close_matches(word.lower(), by_lower, 1, least)
    return by_lower[near[0]] if near else None

def near_file(path):
    """-> what is there with a name like that of a path where nothing is, or None."""
    return closest(path.name, {other.name: other for other in path.parent.glob("[!.]*")})

# ---- lines on a terminal, whoever wrote them and whether or not anybody reads them -----------------------------------

# On Linux a name is bytes, and old archives and disks have some that are no UTF-8. Python has such a byte as half a
# character: \xe9 as \udce9, in sys.argv and in what it lists of folders. Python opens these names, and JSON (in ASCII)
# holds them. What encodes a text as UTF-8 itself fails at them: such texts come from printable() or shell_command(),
# and such files from library/files/tensor_files.py's open_tensors().

# what moves a terminal's cursor, starts a line, rings, or turns the direction of writing
CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

def printable(text):
    """A name, a prompt, or what else comes from a file, as a line on a terminal may have it: a control character
    becomes \\n, \\x1b, \\u202e; a byte that is no UTF-8 becomes \\xe9, as shell_command() writes it."""
    def escaped(control):
        byte = ord(control[0]) - 0xdc00
        return rf"\x{byte:02x}" if 0x80 <= byte <= 0xff else control[0].encode("unicode_escape").decode()
    return CONTROLS.sub(escaped, str(text))

lost_lines = [] # ("stdout" or "stderr", why lines of it are lost), once for each: tell() empties it, and says so

def tell(*lines, file=None):
    """Each process prints these lines (say: the first alone), each printable(), above a bar if there is one. file:
    sys.stderr, or None for sys.stdout."""
    for line in lines:
        tqdm.write(printable(line), file=file)
    while lost_lines:
        name, why = lost_lines.pop()
        warn_once(f"warning: {name}: lines are lost ({why}); the work goes on",
                  file=sys.stdout if name == "stderr" else sys.stderr)

WARNED = [] # what warn_once has said: train.py writes it into its log, too

@functools.cache # command_line.Parser.parse_args clears this cache, and WARNED
def warn_once(line, file=None):
    """Once in a run, however often it finds the reason; on the first process."""
    if rank() == 0:
        WARNED.append(line)
        tell(line, file=file or sys.stderr)

@contextlib.contextmanager
def warn_on_failure(what):
    """Within `with`, an exception or a library's sys.exit is a warning, the first time, and ends nothing. what: the
    warning's beginning."""
    try:
        yield
    except (Exception, SystemExit) as e:
        warn_again(what, e)

def warn_again(what, why):
    """Prints a warning the first time that this fails. why: an exception, or words."""
    if not any(line.startswith(f"warning: {what}: ") for line in WARNED):
        why = first_words(why).removeprefix("error: ")
        warn_once(f"warning: {what}: {why}; the work goes on, and tries it again next time")

class PrintableStream: # a class because it stands for sys.stdout and sys.stderr, for all that prints
    """A stream whose lines are printable(), whoever writes them: a library, a traceback, a print() of yours. tqdm's \\r
    before and behind a bar stays, and its moves up. It never raises: the work goes on when nobody reads."""

    def __init__(self, name, stream):
        self.name, self.stream, self.failed = name, stream, False

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        inner = text.strip("\r")
        if inner.replace("\x1b[A", ""): # else tqdm alone has written it
            text = text.replace(inner, "\n".join(map(printable, inner.split("\n"))), 1)
        self.attempt(self.stream.write, text)
        return len(text)

    def flush(self):
        self.attempt(self.stream.flush)

    def attempt(self, act, *text):
        """What a full disk refuses stays in Python's buffer, and is tried again with the next line."""
        try:
            act(*text)
        except (OSError, ValueError) as e: # ValueError: somebody has closed it
            if not self.failed:
                lost_lines.append((self.name, str(e)))
            self.failed = True
            if isinstance(e, (BrokenPipeError, ValueError)): # it stays so: nothing is tried again, also not at the end
                gone, self.stream = self.stream, open(os.devnull, "w", encoding="utf-8")
                with contextlib.suppress(OSError, ValueError): # libraries in C write there, too
                    os.dup2(self.stream.fileno(), gone.fileno())

def make_streams_printable():
    """From now on all lines of this process are printable, and no stream ends it. A file name that is no UTF-8 must not
    end a run, either."""
    lost_lines.clear()
    for number in range(3):
        try:
            os.fstat(number)
        # Who has started us has closed it. The next file, such as a log, would get its number, and what C prints.
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")
        with contextlib.suppress(AttributeError, OSError): # a notebook's cannot; a full disk's is flushed here
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
        setattr(sys, name, PrintableStream(name, stream))

def shell_command(words):
    """Words as a command that a person can paste into bash or zsh: a control character, or a byte that is no UTF-8,
    which always stands in quotes ('), becomes $'...' between them. On Windows: see windows_word. ValueError for half a
    character, which JSON may have, and no name."""
    def escaped(control):
        return f"'${repr(control[0].encode(errors='surrogateescape'))[1:]}'"
    if os.name == "nt":
        return printable(" ".join(map(windows_word, map(str, words))))
    return CONTROLS.sub(escaped, shlex.join(map(str, words)))

def windows_word(word):
    """A word in the one form that cmd.exe and PowerShell share: in double quotes, and " as "". They still read more
    into a % (cmd.exe), a $ or a ` (PowerShell), and PowerShell 5.1 loses a "."""
    if re.fullmatch(r"[\w.:/\\=+-]+", word):
        return word
    # of backslashes before a quote, or before the end, each needs another one
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + 2 * found[2], word) + '"'

# ---- processes: torchrun starts several, each with a rank ------------------------------------------------------------

def rank():
    """The number of this process, from 0, as torchrun says."""
    return int(os.environ.get("RANK", 0))

def world():
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", 1))

def say(*lines):
    """The first process prints these lines, as tell does."""
    if rank() == 0:
        tell(*lines)

def quiet():
    """tqdm's `disable`: the first process alone shows bars, and only on a terminal (None)."""
    return True if rank() else None

def progress(what, items=None, **options):
    """A bar of tqdm, which goes when it is done."""
    return tqdm(items, desc=what, disable=quiet(), leave=False, **options)

# What follows costs milliseconds on gloo. It carries paths, problems and hashes; tensors travel by all_reduce.

def gather_objects(value):
    """-> [value of each process]. Waits for all of them."""
    import torch.distributed as dist
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values

def on_first_process(make):
    """What make() returns on the first process, for all of them. If it fails, all processes exit, and the first one
    prints the error."""
    result, problems = None, []
    if rank() == 0:
        with collect_errors(problems):
            result = make()
    result, problems = gather_objects((result, problems))[0]
    if problems:
        sys.exit(problems[0] if rank() == 0 else 1)
    return result

class FailedElsewhere(SystemExit): # a class because warn_of_validation must know it from a library's
    """Another process has failed, and prints the reason. This one exits with status 1 and prints nothing."""

    def __init__(self, reason):
        super().__init__(reason)
        self.code = 1

def on_all_processes(work, fsdp=False):
    """-> work(), which each process does for itself. If it fails on one, it raises on all of them, before they wait for
    each other: there its own exception, elsewhere FailedElsewhere. fsdp: the processes wait for each other within
    work(), so this cannot help."""
    if fsdp:
        return work()
    failure = None
    try:
        result = work()
    except (Exception, SystemExit) as e:
        failure = e
    reasons = gather_objects(first_words(failure) if failure else "")
    try:
        for rank, reason in enumerate(reasons):
            if reason:
                raise failure or FailedElsewhere(f"{reason.removeprefix('error: ')} (on process {rank})")
    finally:
        failure = None # it and this function would hold each other, and all tensors of the functions that have failed
    return result

# ---- signals and threads ---------------------------------------------------------------------------------------------

# A signal asks the work to end at its next good moment, and ends nothing by itself.

@contextlib.contextmanager
def catch_signals():
    """with catch_signals() as seen: signals only fill this list, so that work that has begun can be finished."""
    seen = []
    terminals = list(filter(os.isatty, (1, 2))) # of stdout, stderr

    def note(number, frame):
        seen.append(number)
        with contextlib.suppress(OSError):
            for stream in terminals:
                if not os.isatty(stream): # closed, and no print into it must end the run before its checkpoint
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            if terminals: # (print may be at work already)
                os.write(terminals[-1], b"\nends as soon as it can; please wait\n")
    with contextlib.ExitStack() as stack: # which puts the old handlers back
        for name in "SIGTERM SIGINT SIGUSR1 SIGHUP SIGBREAK".split(): # the last two: a terminal that is closed
            number = getattr(signal, name, None) # Windows lacks some
            if number and signal.getsignal(number) != signal.SIG_IGN: # ignored: the user has asked for nohup
                stack.callback(signal.signal, number, signal.signal(number, note))
        yield seen

def end_by_ctrl_c(kind, error, trace):
    """Ctrl-C where no catch_signals is at work: one line instead of a traceback. Files appear whole or not at all, so
    there is nothing to clean up."""
    if kind is not KeyboardInterrupt:
        return sys.__excepthook__(kind, error, trace)
    print("\nstopped by Ctrl-C: what is written stays; the same command continues with the rest", file=sys.stderr)

THREADS = min(16, os.cpu_count() or 1) # that read pictures: not more, as each holds those of a sample

def run_ahead(work, items, threads=1, most=1):
    """Yields a future of work(item) for each item, in order, while threads do the next ones, as many as `most`."""
    pool = ThreadPoolExecutor(threads)
    waiting = []
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > most:
                yield waiting.pop(0)
        yield from waiting
    # Also if the caller stops early. The threads end when their pool is gone. We do not call pool.shutdown(), which
    # takes a lock: the garbage collector may run this while a thread begins, which holds that lock.
    finally:
        for future in waiting:
            future.cancel()

# ---- files: written whole or not at all ------------------------------------------------------------------------------

NAME_BYTES = 255 # a file's name may have so many
LONG_TEXT = 2**30 # bytes of a manifest, a table or an index at most: a million samples
MAX_PIXELS = 160_000_000 # a larger picture is refused before it is decoded

def write_file(path, data, mark=b""):
    """Writes a temporary file beside `path`, fsyncs and renames it, and fsyncs the folder: after a kill or a power loss
    there is the old file or the new one, never a part. mark: a regular expression for the first bytes of what may be
    replaced; by default all may be. Exists if something else is there, InputError if the disk is full or read-only."""
    refuse_to_replace(path, mark)
    try:
        with file_in(path.parent) as tmp:
            with open(tmp, "xb") as f:
                f.write(data)
                f.flush()
                sync(f.fileno(), path.parent)
            if not (mark and link_new(tmp, path)):
                refuse_to_replace(path, mark) # it may have come since we looked
                os.replace(tmp, path)
            sync_folder(path.parent)
    except OSError as e:
        raise disk_error(path, e, f"{len(data):,} bytes cannot be written") from e

# A file that a user names may be anything of his. So what we may replace must begin as our own files do.
NOTHING = rb"(?!)" # as a mark: nothing may be replaced

def refuse_to_replace(path, mark=NOTHING):
    """Exists if something is at `path`, unless it is a file whose first 4 KiB match `mark`, a regular expression, which
    says that a script of ours has written it. Whatever replaces or deletes a file in a place that you name calls this
    before the work begins; write_file calls it once more."""
    if os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as f:
            if re.search(mark, f.read(4096)):
                return
    if os.path.lexists(path): # also a folder, or a link that leads nowhere
        raise Exists(f"{path}: already exists, and may be yours; move it elsewhere, or give another name")

# A hard link is the one way to create a name only if it is free. os.replace would replace, and a check before it races.

def link_new(source, target):
    """Gives a file one more name -> True. None if anything has that name already, which is one act whoever else tries,
    and on a disk without hard links, where two processes may both find it free."""
    try:
        os.link(source, target)
        return True
    except OSError as e:
        warn_no_hard_links(target.parent, e)

@contextlib.contextmanager
def file_in(folder):
    """Makes the folder. Within `with` the path of a temporary file there, which must be closed by the end: if it still
    has this name, it is deleted then. (tempfile's are deleted while they are open, which not every disk can do.)"""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".tmp-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        with contextlib.suppress(OSError): # what a kill leaves here, tools/prune.py deletes
            path.unlink(missing_ok=True)

def is_inside(path, folder):
    """Whether a path that a file names, or a link that stands in a folder, leads to a place in this folder. Links are
    followed, also the folder's own. (A snapshot in the hub's cache has links to ../../blobs, which are its files; and
    a folder that older versions have downloaded to leads there from elsewhere. A file there is named by its hash, which
    nobody knows who does not have the file.)"""
    folder, path = [Path(os.path.realpath(place)) for place in (folder, path)]
    if path.parent.name == "blobs" and re.match("(datasets|models|spaces)--", path.parent.parent.name):
        return True
    inside = [folder]
    for above in (folder, *folder.parents):
        if above.parent.name == "snapshots":
            inside.append(above.parent.parent / "blobs")
    return any(map(path.is_relative_to, inside))

def is_utf8(path):
    return not re.search("[\ud800-\udfff]", str(path))

# ---- what a disk refuses, in words -----------------------------------------------------------------------------------

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
# how disks say that they lack something: each network disk in its own way
LACKING = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.EBADF,
           errno.EISDIR, errno.ENOTTY, errno.EXDEV}

def os_reason(e):
    return e.strerror or first_words(e)

def disk_error(place, e, what="cannot be written"):
    """-> the InputError of an OSError; what: what failed at this place."""
    reason, remedy = os_reason(e), "give a folder on another disk"
    plain = what.endswith("cannot be written")
    if plain and e.errno in (errno.EEXIST, errno.ENOTDIR) and not e.filename2:
        path = Path(e.filename or "")
        for folder in (path, *path.parents):
            if os.path.lexists(folder) and not os.path.isdir(folder):
                return InputError(f"{place}: cannot be written, as {folder} is no folder, or a link that leads nowhere "
                                  f"({reason}); move it elsewhere, or give another folder")
    if os.name == "nt" and e.errno == errno.EACCES:
        remedy = "close the program that has it open, or mend the permissions"
    elif e.errno in FULL:
        remedy = "free some space, and run again"
    elif e.errno == errno.ENAMETOOLONG:
        remedy = "give shorter names"
    # of a copy, which also has two names, they are in two folders
    elif plain and e.filename2 and Path(e.filename).parent == Path(e.filename2).parent:
        what = "this disk cannot rename files"
    elif plain and e.errno in FORBIDDEN:
        remedy = "mend its permissions, or give another folder"
    return InputError(f"{place}: {what} ({reason}); {remedy}")

def sync(descriptor, place):
    """fsync. On a disk that has none it is left out, with a line; where it fails it raises OSError."""
    with warn_without_fsync(place):
        os.fsync(descriptor)

def sync_folder(path):
    """A rename is safe from power loss only when the folder is on the disk, too (Windows cannot do that)."""
    if os.name == "nt":
        return
    with warn_without_fsync(path):
        folder = os.open(path, os.O_RDONLY) # (not of one that may only be written)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

@contextlib.contextmanager
def warn_without_fsync(place):
    """Within `with`, what says that this disk has no fsync is a line, and any other failure is raised."""
    try:
        yield
    except OSError as e:
        warn_disk_lacks(place, e, "fsync", "a power loss may cost what was written last")
        if e.errno not in LACKING:
            raise OSError(e.errno, f"fsync: {os_reason(e)}") from e

def warn_no_hard_links(place, e):
    warn_disk_lacks(place, e, "hard links", "of two scripts that write one file at once the last one wins")

def warn_disk_lacks(place, e, what, then):
    """Once for a disk, which its mount point names; nothing if this OSError is about another thing."""
    if e.errno in LACKING:
        mount = Path(place).resolve()
        while not os.path.ismount(mount):
            mount = mount.parent
        warn_once(f"{mount}: no {what} on this disk ({os_reason(e)}): {then}")

# ---- hashes and JSON -------------------------------------------------------------------------------------------------

def file_hash(path):
    """InputError if it cannot be read, maybe as it has gone since it was found."""
    try:
        with open(path, "rb") as f: # not read whole: a model has 41 GB
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror}); mend that, and run the same command again")

def content_key(**fields):
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

def read_json(text): # for JSON of a person or of another program
    """json.loads, but ValueError for an object that has a key twice: of two values json would drop one in silence."""
    def unique(pairs):
        found = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{key!r:.100} is given twice")
            found[key] = value
        return found
    return json.loads(text, object_pairs_hook=unique)

def read_object(text):
    """read_json's dict. ValueError if it is something else."""
    value = read_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"no JSON object: {text:.60}")
    return value
