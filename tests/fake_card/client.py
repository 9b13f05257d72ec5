"""
The tests' side of program.py: starts its server, and asks it for runs.
"""
import functools
import json
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace

from tests.fake_card import guard

HERE = Path(__file__).parents[2]

@functools.cache # one server for all tests of a session
def server():
    library = guard.build(tempfile.mkdtemp())
    env = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    process = subprocess.Popen([sys.executable, "-m", "tests.fake_card.program", library], cwd=HERE, env=env,
                               encoding="utf-8",
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    weakref.finalize(server, process.communicate) # at the end of the session it reads no more lines, and ends too
    return process

def ask(**request):
    """program.run with these arguments, in a process of its own -> its answer, with `steps`: the readings of train.py's
    steps."""
    process = server()
    process.stdin.write(json.dumps(request, default=str) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, "the server of imitated cards has died; what it said stands above"
    answer = SimpleNamespace(**json.loads(line))
    clocks = [n for n, reading in enumerate(getattr(answer, "readings", [])) if reading.get("by") == "clock"]
    answer.steps = [SimpleNamespace(**answer.readings[n]) for n in clocks[1::2]] # what began at the clock before it
    return answer
