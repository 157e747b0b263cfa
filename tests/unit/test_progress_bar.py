"""Commands and ranks show on a terminal how far they are, and print nothing of it elsewhere."""

import os
import shutil
import subprocess
import sys

import pytest

WORKING = (
    "from ringcomm.progress_bar import working\n"
    "with working('two ranks do an allreduce'): print('in it', flush=True)\n"
    "print('done', flush=True)\n"
)


BAR = (
    "from ringcomm.progress_bar import progress_bar\n"
    "with progress_bar('tune', 4, after_s=0) as bar:\n"
    "    for part in range(4):\n"
    "        print(bar.over(f'part {part}'), flush=True)\n"
    "        bar.advance(1)\n"
    "print('done', flush=True)\n"
)
NO_RICH = "import sys\nsys.modules['rich'] = sys.modules['rich.console'] = None\n"
PARTS = b"part 0\npart 1\npart 2\npart 3\ndone\n"


def run(stderr, program, command=(sys.executable, "-P", "-c"), **environ):
    return subprocess.run(
        [*command, program],
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", **environ},
        timeout=60,
        check=True,
    )


def on_terminal(program, **how):
    ours, theirs = os.openpty()
    done = run(theirs, program, **how)
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
    out, shown = on_terminal(WORKING)
    assert out == b"in it\ndone\n"
    assert b"two ranks do an allreduce" in shown


def test_without_rich_or_a_terminal_nothing_is_shown():
    for program, expected in (WORKING, b"in it\ndone\n"), (BAR, PARTS):
        assert on_terminal(NO_RICH + program) == (expected, b"")
        done = run(subprocess.PIPE, program)
        assert (done.stdout, done.stderr) == (expected, b"")
    assert on_terminal(BAR, TERM="dumb") == (PARTS, b"")


def as_rank(tmp_path, redirected, first=""):
    """Return the command of a shell that is called mpirun, does `first`, and starts a rank."""
    launcher = tmp_path / "mpirun"
    shutil.copy(shutil.which("sh"), launcher)
    rank = f'{first} (exec "{sys.executable}" -P -c "$0" {redirected}); true'
    return {"command": (str(launcher), "-c", rank), "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize("is_rank", [False, True], ids=["alone", "rank"])
def test_a_bar_is_drawn_on_the_terminal_of_the_launcher_and_erased(is_rank, tmp_path):
    pytest.importorskip("rich", reason="the core is tested without rich, too")
    how = as_rank(tmp_path, "2>/dev/null") if is_rank else {}
    out, shown = on_terminal(BAR, **how)
    assert out == PARTS
    assert b"tune" in shown
    assert b" 25%" in shown
    assert shown.endswith(b"\r\x1b[2K"), "something of it stays"
    assert b"\x1b[?25l" not in shown, "a rank that is killed would leave the cursor hidden"


def test_lines_that_go_over_the_bar_erase_what_is_behind_them(tmp_path):
    pytest.importorskip("rich", reason="the core is tested without rich, too")
    out, shown = on_terminal(BAR, **as_rank(tmp_path, "2>/dev/null", "exec 1>&2;"))
    assert out == b""
    assert shown.count(b"\x1b[K\r\n") == 4, shown


def test_the_bar_of_a_rank_whose_launcher_has_no_terminal_is_not_drawn(tmp_path):
    done = run(subprocess.PIPE, BAR, **as_rank(tmp_path, ""))
    assert (done.stdout, done.stderr) == (PARTS, b"")
