"""A command shows on a terminal that it still works, and prints nothing of it elsewhere."""

import os
import subprocess
import sys

import pytest

PROGRAM = (
    "from ringcomm.launch.progress import working\n"
    "with working('two ranks do an allreduce'): print('in it', flush=True)\n"
    "print('done', flush=True)\n"
)


def run(stderr, before=""):
    return subprocess.run(
        [sys.executable, "-P", "-c", before + PROGRAM],
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        timeout=60,
        check=True,
    )


def on_terminal(before=""):
    ours, theirs = os.openpty()
    done = run(theirs, before)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # the end of a terminal
        pass
    os.close(ours)
    return done.stdout, shown


def test_a_terminal_shows_that_there_is_work_and_stdout_has_nothing_of_it():
    pytest.importorskip("rich", reason="the core is tested without rich, too")
    out, shown = on_terminal()
    assert out == b"in it\ndone\n"
    assert b"two ranks do an allreduce" in shown


def test_without_rich_or_a_terminal_nothing_is_shown():
    out, shown = on_terminal(
        "import sys\nsys.modules['rich'] = sys.modules['rich.console'] = None\n"
    )
    assert (out, shown) == (b"in it\ndone\n", b"")
    done = run(subprocess.PIPE)
    assert (done.stdout, done.stderr) == (b"in it\ndone\n", b"")
