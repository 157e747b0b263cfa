"""An uncaught error shows the user's frames and its text, once for all ranks of a host."""

import os
import re
import subprocess
import sys
import traceback

import pytest
from harness import DEADLINE_S, job_environment
from hypothesis import given, settings
from hypothesis import strategies as st

import ringcomm as rc
from ringcomm.launch.job.output_lines import LinesOf, Tracebacks, error_of_log
from ringcomm.ranks_as_text import ranks_in
from ringcomm.status.error_text import OWN_FILES, text_of_error


def own(code, names=None):
    """Run code as if it were a module of ringcomm."""
    exec(compile(code, OWN_FILES + "of_a_test.py", "exec"), names or {})


def raise_value_error():
    raise ValueError("of the user")


def error_of(call, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call(*args)
    return caught.value


def files_of(error):
    """Return the files whose frames are shown."""
    lines = text_of_error(error).splitlines()
    return [line.split('"')[1] for line in lines if line.startswith('  File "')]


def test_a_users_mistake_shows_his_frames_alone_and_the_error_stays_as_it_is():
    error = error_of(rc.rank)
    before = traceback.format_exception(error)
    assert set(files_of(error)) == {__file__}
    assert text_of_error(error).endswith("call ringcomm.init() first\n")
    assert traceback.format_exception(error) == before
    assert OWN_FILES in "".join(before)


def test_frames_of_the_user_and_of_others_are_kept_below_those_of_ringcomm():
    error = error_of(own, "import runpy; call()", {"call": raise_value_error})
    assert files_of(error) == [__file__] * 3
    imported = error_of(own, "import importlib; importlib.import_module('no_such_module')")
    assert "importlib" not in text_of_error(imported)


def test_an_error_that_was_being_handled_in_ringcomm_alone_is_left_out():
    code = "try: [].x\nexcept AttributeError: raise TypeError('no list')"
    text = text_of_error(error_of(own, code))
    assert "During handling" not in text
    assert "AttributeError" not in text


def test_causes_keep_their_texts_and_the_users_frames():
    code = "try: {CALL}\nexcept Exception as error: raise RuntimeError('after') from error"
    text = text_of_error(error_of(own, code.format(CALL="open('/no/such/file')")))
    assert text.startswith("FileNotFoundError: ")
    assert "\n\nThe above exception was the direct cause" in text
    error = error_of(own, code.format(CALL="call()"), {"call": raise_value_error})
    assert files_of(error).count(__file__) == 3
    assert 'raise ValueError("of the user")' in text_of_error(error)


def test_a_bug_of_ringcomm_shows_all_frames_and_so_does_the_setting(monkeypatch):
    assert OWN_FILES in text_of_error(error_of(own, "[][0]"))
    assert OWN_FILES in text_of_error(error_of(own, "assert False"))
    error = error_of(own, "def f(): pass\nf(opp=1)")
    assert OWN_FILES not in text_of_error(error)
    monkeypatch.setenv("RINGCOMM_TRACEBACK", "full")
    assert OWN_FILES in text_of_error(error)


# --- in processes -------------------------------------------------------------------------------
PRELUDE = "import sys, threading\n"


def start(code, **environ):
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PRELUDE + code],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=job_environment(environ),
    )


def ended(process):
    return process.communicate("\n", timeout=DEADLINE_S)[1]


def test_python_prints_it_so_also_for_a_thread():
    code = """
import ringcomm as rc
from ringcomm.status.error_printer import print_error_of_thread
threading.excepthook = print_error_of_thread
thread = threading.Thread(target=rc.rank, name="mine")
thread.start()
thread.join()
rc.size()
"""
    with start(code) as process:
        said = ended(process)
    assert said.startswith("Exception in thread mine:\nTraceback"), said
    assert said.count("NotInitializedError: ") == 2
    assert OWN_FILES not in said


def test_a_rank_prints_an_error_as_often_as_it_raises_it():
    """It takes none of them for that of another rank, which has printed it."""
    code = """
import ringcomm as rc
from ringcomm.status.error_printer import print_error_of_thread
threading.excepthook = print_error_of_thread
for _ in range(2):
    thread = threading.Thread(target=rc.rank, name="mine")
    thread.start()
    thread.join()
"""
    alone = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}  # on its host
    with start(code, **place(0) | alone) as process:
        assert ended(process).count("rank 0:\nException in thread mine:\n") == 2


def test_an_excepthook_of_the_user_gets_the_error_in_each_rank():
    code = """
sys.excepthook = lambda kind, error, trace: print("mine", error, file=sys.stderr)
import ringcomm
raise ValueError("boom")
"""
    ranks = [start(code, **place(rank)) for rank in range(2)]
    for process in ranks:
        with process:
            assert ended(process) == "mine boom\n"


def place(rank):
    return {
        "OMPI_COMM_WORLD_RANK": f"{rank}",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
        "PMIX_NAMESPACE": f"a-job-of-{os.getpid()}",
    }


def test_ranks_that_raise_alike_are_named_below_one_traceback_and_others_print_theirs():
    ranks = [
        start(f"import ringcomm; raise ValueError({rank} // 2)", **place(rank)) for rank in range(3)
    ]
    said = []
    for process in ranks:
        with process:
            said.append(ended(process))
    assert said[2].startswith("rank 2:\nTraceback")
    silent = said.index("")
    assert said[1 - silent].startswith(f"rank {1 - silent}:\nTraceback")
    assert said[1 - silent].endswith(f"\nlikewise: rank {silent}\n")


# --- `ringcomm run` -------------------------------------------------------------------------------
TRACE = b"""Traceback (most recent call last):
  File "train.py", line 1, in <module>
    f()
ValueError: two
"""
BEFORE = b"\nThe above exception was the direct cause of the following exception:\n\n"


def written(*texts):
    """Return the text that is shown of ranks that have written these, within a second."""
    shown, tracebacks = b"", Tracebacks()
    for rank, text in enumerate(texts):
        lines = LinesOf(b"[%d] " % rank)
        shown += tracebacks.add(rank, lines.add(text) + lines.flush(), now=0.1 * rank)
    assert tracebacks.due(now=0.9) == b""
    return (shown + tracebacks.flush()).decode()


def marked(ranks, text):
    return LinesOf(f"[{ranks}] ".encode()).add(text).decode()


def test_a_traceback_of_several_ranks_is_shown_once_and_what_follows_by_rank():
    assert written(TRACE, TRACE, TRACE) == marked("0-2", TRACE)
    assert written(b"step 1\n" + TRACE, TRACE) == "[0] step 1\n" + marked("0-1", TRACE)
    more = b"\tof the text\n"
    assert written(TRACE + more, TRACE + more) == marked("0-1", TRACE + more)
    ends = marked("0-1", TRACE) + "[0] a\n[1] b\n"
    assert written(TRACE + b"a\n", TRACE + b"b\n") == ends
    assert written(TRACE + b"a\n", TRACE + b"a\n") == ends.replace("b\n", "a\n")
    chained = TRACE + BEFORE + TRACE
    assert written(chained, chained) == marked("0-1", chained)
    thread = b"Exception in thread Thread-1 (f):\n" + TRACE
    assert written(thread, thread) == marked("0-1", thread)


def test_different_tracebacks_are_whole_and_apart():
    other = TRACE.replace(b"two", b"three")
    assert written(TRACE, other, TRACE) == marked("0,2", TRACE) + marked("1", other)
    assert written(TRACE + TRACE, TRACE) == marked("0-1", TRACE) + marked("0", TRACE)
    assert written(TRACE[:60]) == marked("0", TRACE[:60] + b"\n")


def test_a_rank_that_goes_on_is_shown_after_a_second():
    tracebacks = Tracebacks()
    text = marked("4", TRACE + b"go on\n").encode()
    assert tracebacks.add(4, text, now=7.0) == b""
    assert tracebacks.add(4, b"[4] and on\n", now=7.5) == b""
    assert tracebacks.due(now=8.1) == text + b"[4] and on\n"
    assert tracebacks.add(4, b"[4] at once\n", now=8.2) == b"[4] at once\n"
    flood = tracebacks.add(4, text, now=9.0) + tracebacks.add(4, b"[4] y\n" * (1 << 18), now=9.0)
    assert flood.startswith(text)


SHOWN = re.compile(r"\[([\d,-]+)\] (.*\n)")


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([b"two", b"three", None]), min_size=1, max_size=4),
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 5)), max_size=16),
    last=st.permutations(range(4)),
)
def test_of_whatever_ranks_write_and_when_nothing_is_lost_and_the_first_error_comes_first(
    kinds, turns, last
):
    """A turn: a rank writes so many lines, and so many quarters of a second go by."""
    texts = [b"a\n" + (TRACE.replace(b"two", kind) if kind else b"") + b"b\n" for kind in kinds]
    left = [text.splitlines(keepends=True) for text in texts]
    tracebacks, now, began = Tracebacks(), 0.0, {}
    shown = [""] * len(kinds)
    errors = []  # when those began that are shown

    def show(output):
        found = SHOWN.findall(output.decode())
        assert "".join(f"[{ranks}] {line}" for ranks, line in found) == output.decode()
        for prefix, line in found:
            ranks = ranks_in(prefix)
            if line.startswith("Traceback"):
                errors.append(min(began[rank] for rank in ranks))
            for rank in ranks:
                shown[rank] += line

    def write(rank, n_lines):
        lines, left[rank] = left[rank][:n_lines], left[rank][n_lines:]
        if any(line.startswith(b"Traceback") for line in lines):
            began[rank] = now
        show(tracebacks.add(rank, LinesOf(b"[%d] " % rank).add(b"".join(lines)), now))

    for rank, n_lines, quarters in turns:
        write(rank % len(kinds), n_lines)
        now += quarters / 4
        show(tracebacks.due(now))
        for each, text in enumerate(texts):
            if each not in began or began[each] <= now - 1:
                written = text.splitlines(keepends=True)[: -len(left[each]) or None]
                assert shown[each] == b"".join(written).decode(), "it is shown after a second"
    for rank in (each for each in last if each < len(kinds)):
        write(rank, len(left[rank]))
        now += 1 / 8
    show(tracebacks.flush())
    assert [text.encode() for text in shown] == texts
    assert errors == sorted(errors), "the first error is the cause of the others"


def test_the_error_of_a_log_is_that_of_its_last_traceback():
    frame = 'File "train.py", line 1, in <module>'
    other = TRACE.replace(b"two", b"three")
    assert error_of_log(other + BEFORE + TRACE + b"  more\n") == [frame, "ValueError: two"]
    assert error_of_log(b"no error\n") == error_of_log(TRACE[:60]) == []
