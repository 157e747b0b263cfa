"""What `ringcomm run` says of a job that starts, on a terminal in one line that is wiped."""

import contextlib
import os
import sys

import pytest

from ringcomm.launch.job import show
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.job.run_words import Stages, lost_text, start_text
from ringcomm.launch.job.supervisor import Supervisor


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (Stages(4), "0 of 4 ranks started; 12 s"),
        (Stages(4, 3), "3 of 4 ranks started; 12 s"),
        (Stages(4, 4), "4 ranks started, importing; 12 s"),
        (Stages(4, 4, 1), "1 of 4 ranks in init(), for 3 s; the others import"),
        (Stages(4, 4, 4), "0 of 4 ranks through init(), for 3 s"),
        (Stages(4, 4, 4, 3), "3 of 4 ranks through init(), for 3 s"),
        (Stages(4, 4, 4, 4), "4 ranks through init() after 2.6 s; no output yet"),
        (Stages(1, 1), "1 rank started, importing; 12 s"),
    ],
)
def test_a_line_says_how_far_the_ranks_are(stages, text):
    assert start_text(stages, 12.4, 2.6) == text


def test_the_records_of_a_run_say_how_far_its_ranks_are(tmp_path):
    folder = RunFolder(tmp_path)
    for name in (
        "rank-0.at",
        "rank-1.at",
        "rank-2.at",
        "rank-0.log",
        "rank-2.starts",
        "rank-0.end",
    ):
        (tmp_path / name).touch()
    assert folder.stages(4) == Stages(4, 3, 2, 1)
    assert folder.stages(1) == Stages(1, 1, 1, 1)  # others have planted more


@contextlib.contextmanager
def terminal(term="xterm"):
    """Let stderr be a terminal of 30 columns; yield a function that returns what it has got.

    That goes as far as a whole line.
    """
    ours, theirs = os.openpty()

    def text():
        found = ""
        while not found.endswith("\r\n"):
            found += os.read(ours, 1 << 16).decode()
        return found

    with open(theirs, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setenv("TERM", term)
        patch.setenv("COLUMNS", "30")
        yield text
    os.close(ours)


def test_a_line_changes_is_cut_at_the_edge_and_is_wiped_before_other_text():
    with terminal() as text:
        assert show.can_show_line()
        show.show_line("first")
        show.show_line("first")
        show.show_line("x" * 40)
        show.say("a word")
        wipe = "\r\x1b[2K"
        assert text() == f"{wipe}first{wipe}{'x' * 29}{wipe}ringcomm run: a word\r\n"


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_line_tells_of_the_beginning_on_a_terminal_until_the_first_line_of_a_rank(
    term, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("ringcomm.launch.job.supervisor._REDRAW_S", 0.01)
    folder = RunFolder(tmp_path / "run")
    assert folder.claim()
    script = 'sleep 0.3; touch "$0/rank-0.at"; sleep 0.3; echo text > "$0/rank-0.log"; sleep 0.2'
    argv, environ = ["sh", "-c", script, str(folder.path)], {"PATH": os.environ["PATH"]}
    with terminal(term) as text:
        Supervisor(argv, environ, folder, size=1, grace_s=1, tells_beginning=True).run()
        show.say("end")
        shown = text()
    told = ["0 of 1 rank started; 0 s", "1 rank started, importing; ", "\r\x1b[2Kringcomm run: "]
    if term == "dumb":
        told = ["ringcomm run: "]
        assert "\x1b" not in shown
    places = [shown.find(each) for each in told]
    assert (min(places) >= 0, sorted(places)) == (True, places), shown
    assert capsys.readouterr().out == "text\n"


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        ({}, ""),
        ({1: "raised ValueError"}, "lost rank 1 (raised ValueError) on the way"),
        (
            {4: "killed by SIGKILL", 1: "killed by SIGKILL", 2: "raised KeyError"},
            "lost ranks 1, 4 (killed by SIGKILL) and rank 2 (raised KeyError) on the way",
        ),
        (
            dict.fromkeys(range(10), "killed by SIGKILL"),
            "lost ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more (killed by SIGKILL) on the way",
        ),
    ],
)
def test_the_ranks_that_a_job_has_lost_are_named_with_what_they_did(lost, text):
    assert lost_text(lost) == text
