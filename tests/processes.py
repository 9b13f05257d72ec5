"""
Processes of their own, for tests: a script of this project in one that can be killed or given a signal, or in several
ranks as torchrun starts them. tests/harness.py has what is compared afterwards.
"""
import atexit
import contextlib
import functools
import multiprocessing
import os
import random
import re
import runpy
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import cache
import predict

HERE = Path(cache.__file__).parent

def in_child(script, flags, env, prelude, output):
    """It runs `python SCRIPT FLAGS` in a process that has its imports behind it; prelude() comes first."""
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8")
    sys.stderr = open(2, "w", closefd=False, buffering=1, encoding="utf-8")
    os.environ.update(env)
    sys.argv = [str(HERE / script), *map(str, flags)]
    signal.signal(signal.SIGINT, signal.default_int_handler) # the server of forks ignores it
    torch.set_num_threads(1)
    status = 0
    try:
        if prelude:
            prelude()
        if script in ("cache.py", "predict.py"):
            module = {"cache.py": cache, "predict.py": predict}[script]
            module.main(module.read_flags())
        else:
            runpy.run_path(str(HERE / script), run_name="__main__")
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        print(e.code if isinstance(e.code, str) else "")
    except BaseException:
        sys.excepthook(*sys.exc_info()) # as the interpreter does it
        status = 1
    sys.stdout.flush()
    # as an interpreter does that ends: it waits for a thread that is writing a file
    threading._shutdown(), atexit._run_exitfuncs()
    os._exit(status)

def starter(folder):
    """It returns start(script, *flags, env={}, prelude=None), which runs a script in a process of its own."""
    # a process has pid, wait() -> status (-9 of SIGKILL), alive() and output()
    forks = multiprocessing.get_context("forkserver") # which Windows has not
    forks.set_forkserver_preload(["tests.harness"])
    with contextlib.chdir(HERE): # where the server looks for it; each process goes back to the folder of pytest
        multiprocessing.forkserver.ensure_running()

    def start(script, *flags, env={}, prelude=None):
        output = folder / f"{len(list(folder.iterdir()))}.txt"
        output.touch()
        process = forks.Process(target=in_child, args=(script, flags, env, prelude, str(output)))
        process.start()

        def wait():
            process.join()
            return process.exitcode
        return SimpleNamespace(pid=process.pid, wait=wait, alive=process.is_alive,
                               output=functools.partial(output.read_text, "utf-8"))
    return start

def free_port():
    """It returns a port at which nobody listens."""
    # below those that the system hands out (Linux from 32768, others from 49152): until ours is used, no connection of
    # another program gets it
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port

def start_ranks(start, *flags, preludes=(None, None), script="train.py"):
    """It starts a script with a process per prelude, as torchrun does."""
    env = dict(WORLD_SIZE=str(len(preludes)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    return [start(script, *flags, env=env | {"RANK": str(n)}, prelude=p) for n, p in enumerate(preludes)]

def kill(process, number=9): # SIGKILL, a name that Windows has not
    """It sends the signal to a process if that still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)

def until(condition, seconds=180):
    """It waits until the condition holds; the limit is for what never comes, not for a slow machine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)

def error_of(process):
    """It returns the error line that a process has written."""
    return re.search(r"error: .*", process.output())[0]
