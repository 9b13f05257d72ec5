"""
Streams that go away, or cannot be written, end nothing: a pipe whose reader has died, a terminal that is closed, a full
disk, a stream that was closed before the start. -h's promise about signals holds with all of them gone.

$ python -m pytest -q tests/test_streams.py --kills 200    # four minutes; without the flag four kills
"""
import functools
import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.harness import HERE, kill, killed_runs, log_of, records_of, start_ranks, steps_of, until

# a script as ours are, in a second: two lines, and what stood in them is in a file
SCRIPT = """
import sys; sys.path.insert(0, {here!r})
import library, common, json
from library.cli import command_line
command_line.Parser("x").parse_args()
opened = open({result!r}, "w")
for n in range(3):
    common.say("out" + "x" * 200_000 * (n == 1))
    common.tell("err", file=sys.stderr)
    for _ in common.progress("bar", range(2)):
        pass
json.dump([common.WARNED, opened.fileno()], opened)
"""

def run_in_shell(tmp_path, redirect, python):
    """-> (exit status, what the terminal got, warnings, the number that the first file of ours has)."""
    result, script = tmp_path / "result", tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(HERE), result=str(result)), encoding="utf-8")
    line = f"set -o pipefail; {python.replace('python', sys.executable)} {script} {redirect}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, encoding="utf-8", timeout=300)
    warnings, number = json.loads(result.read_text(encoding="utf-8"))
    return done.returncode, done.stdout + done.stderr, warnings, number

@pytest.mark.parametrize("redirect, warned", [
    ("| true", ["stdout"]), ("2>&1 | true", ["stderr", "stdout"]), (">/dev/full", ["stdout"]),
    ("2>/dev/full", ["stderr"]), (">/dev/full 2>&1", ["stderr", "stdout"]), (">&-", []), ("2>&-", []),
    ("<&- >&- 2>&-", []), ("<&-", [])])
@pytest.mark.parametrize("python", ["env -u PYTHONUNBUFFERED python", "python -u -X dev"])
def test_a_stream_that_cannot_be_written_ends_nothing(tmp_path, redirect, warned, python):
    """Status 0, each loss is said once, nothing else is printed, and no file of ours gets the number of a stream, into
    which a library in C may print."""
    status, output, warnings, number = run_in_shell(tmp_path, redirect, python)
    assert status == 0 and number > 2
    assert sorted(line.split(":")[1].strip() for line in warnings) == warned
    assert output.count("warning: ") == (len(warned) == 1) # of two that are gone none can say it
    assert "Exception" not in output and "Traceback" not in output and "Error" not in output.replace("[Errno", "")

def test_lines_come_again_when_a_full_disk_has_room(tmp_path):
    """Also those that Python's buffer has held."""
    code = f"""if True:
        import sys; sys.path.insert(0, {str(HERE)!r})
        import library, common, os
        from library.cli import command_line
        command_line.Parser("x").parse_args()
        room = os.dup(1)
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        common.say("one")
        os.dup2(room, 1)
        common.say("two")"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, env=env)
    assert done.stdout == "one\ntwo\n" and done.stderr.count("warning: stdout") == 1

@pytest.mark.parametrize("script", ["train.py", "predict.py", "cache.py", "tools/doctor.py"])
def test_help_into_a_pipe_that_is_closed_says_nothing(script):
    """As `-h | head` does in every shell."""
    done = subprocess.run(["bash", "-c", f"{sys.executable} {HERE / script} -h | head -1"], capture_output=True)
    assert done.returncode == 0 and done.stdout and done.stderr == b""

# ---- trainings -------------------------------------------------------------------------------------------------------

def words_of(small, out_dir, *more):
    return [sys.executable, str(HERE / "train.py"), *map(str, [*small.flags, "--out_dir", out_dir, *more])]

LONG = ["--max_steps", 5000, "--save_every", 5000]

def test_ctrl_c_in_a_terminal_with_tee_ends_with_a_checkpoint_and_status_0(tmp_path, small):
    """`train.py 2>&1 | tee log`: Ctrl-C reaches both, and tee dies first. The log says that the streams are gone."""
    line = f'"$@" 2>&1 | tee {tmp_path}/tee.txt; echo "${{PIPESTATUS[*]}}" > {tmp_path}/status'
    child, terminal = pty.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.SIG_DFL) # pytest's may be ignored, and is inherited
        os.execvp("bash", ["bash", "-c", line, "bash", *words_of(small, tmp_path / "run", *LONG)])
    shown = b""
    while b"step 2/" not in shown: # (which may come in two parts)
        shown += os.read(terminal, 10_000)
    os.write(terminal, b"\x03")
    until(lambda: (tmp_path / "status").exists())
    os.close(terminal)
    os.waitpid(child, 0)
    assert (tmp_path / "status").read_text(encoding="utf-8") == "0 130\n"
    assert steps_of(tmp_path / "run") == [log_of(tmp_path / "run")[-1]["step"]]
    said = {r["warning"].split(":")[1].strip() for r in records_of(tmp_path / "run") if "warning" in r}
    assert said & {"stdout", "stderr"}

def close_streams(how):
    """For a child process: nobody reads stdout and stderr, a pipe or a terminal, or they were closed before the start;
    its own group."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN if how == "nohup" else signal.SIG_DFL)
    read, write = os.openpty() if how == "terminal" else os.pipe()
    for number in (1, 2):
        os.dup2(write, number)
    os.close(read)
    sys.stdout, sys.stderr = [open(number, "w", closefd=False, encoding="utf-8") for number in (1, 2)]
    if how == "closed":
        sys.stdout = sys.stderr = None
        os.closerange(0, 3)

@pytest.mark.parametrize("how, number", [
    ("pipe", signal.SIGINT), ("terminal", signal.SIGHUP), ("closed", signal.SIGTERM), ("nohup", signal.SIGUSR1)])
def test_signals_keep_their_promise_with_every_stream_gone(tmp_path, small, start, how, number):
    """Under nohup SIGHUP changes nothing."""
    process = start("train.py", *small.flags, *LONG, "--out_dir", tmp_path / "run",
                    prelude=functools.partial(close_streams, how))
    until(lambda: (tmp_path / "run/log.jsonl").exists() and len(log_of(tmp_path / "run")) > 1)
    if how == "nohup":
        kill(process, signal.SIGHUP)
        before = len(log_of(tmp_path / "run"))
        until(lambda: len(log_of(tmp_path / "run")) > before + 2)
    kill(process, number)
    assert process.wait() == 0 and steps_of(tmp_path / "run") == [log_of(tmp_path / "run")[-1]["step"]]

def test_two_processes_end_together_with_every_stream_gone(tmp_path, small, start):
    """One gets the signal, as torchrun's processes may."""
    prelude = functools.partial(close_streams, "pipe")
    ranks = start_ranks(start, *small.flags, *LONG, "--out_dir", tmp_path / "run", preludes=(prelude, prelude))
    until(lambda: (tmp_path / "run/log.jsonl").exists() and len(log_of(tmp_path / "run")) > 1)
    kill(ranks[1], signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert steps_of(tmp_path / "run") == [log_of(tmp_path / "run")[-1]["step"]]

def test_killed_with_a_closed_pipe_at_any_instant_nothing_is_lost(tmp_path, small, start, unbroken):
    """By signals of all kinds; what a checkpoint had stays, and the run ends as the unbroken one."""
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
    closed = functools.partial(close_streams, "pipe")
    for out_dir, _, status, number in killed_runs(start, small, unbroken, tmp_path, 1, closed, signals):
        # ended by the signal: at once before the loop began, else with a checkpoint
        assert status != 1 or number == signal.SIGINT, status
        if status == 0:
            assert max(steps_of(out_dir)) == log_of(out_dir)[-1]["step"]
