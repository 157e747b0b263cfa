"""A rank with few descriptors, with forks and with signals: no number is closed twice or lost."""

import errno
import os
import select
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from harness import run_command, wait_until

from ringcomm import open_errors
from ringcomm._core import Loop, NodeMemory, StatusPage, take, view
from ringcomm.transport.node.neighbours import Neighbour, Offer
from ringcomm.transport.node.shared_memory import make_memory
from ringcomm.transport.presence import Parking

# Runs in a process of its own, whose limit of descriptors then matters to nobody else.
FEW = """
import os, resource, select
from ringcomm._core import Loop, NodeMemory, StatusPage
from ringcomm.transport.presence import Parking
loop, news = Loop(None, False), select.epoll()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for _ in range({spare}):
    os.close(taken.pop())
try:
    {code}
except OSError as error:
    print(error.errno, error)
for each in range({spare}):
    os.open("/dev/null", os.O_RDONLY)  # else a descriptor was left
"""
CALLS = {
    "loop": ("loop.watch(news.fileno())", "eventfd", 0),
    "page": ('StatusPage.create("j", "h", 0, 1, 0, 5)', "memfd_create", 0),
    "lifeline": ('StatusPage.create("j", "h", 0, 1, 0, 5)', "pipe2", 2),
    "board": ("NodeMemory.create(5, 1 << 20)", "memfd_create", 0),
    "arena": ("NodeMemory.create(5, 1 << 20)", "memfd_create", 1),
    "parking": ("Parking(news.fileno())", "what wakes this rank", 1),
}


@pytest.mark.parametrize("what", CALLS)
def test_without_descriptors_there_is_an_error_that_says_so(what):
    code, call, spare = CALLS[what]
    script = FEW.format(code=code, spare=spare)
    ended = run_command([sys.executable, "-P", "-c", script])
    assert ended.returncode == 0, ended.stderr
    number, _, text = ended.stdout.partition(" ")
    assert int(number or 0) == errno.EMFILE, ended.stdout
    assert call in text
    assert "`ulimit -n` allows 64 (raise it)" in text


REFUSED = """
import sys
sys.path.insert(0, sys.argv[1])
from refused_system_calls import MEMFD_CREATE, refuse
from ringcomm._core import NodeMemory, StatusPage
try:
    refuse(MEMFD_CREATE, {error})
except OSError:
    sys.exit("no seccomp here")
try:
    {code}
except OSError as error:
    print(error.errno, error)
"""


@pytest.mark.parametrize("what", ["page", "board"])
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_sandbox_that_refuses_memory_to_share_is_named(what, error):
    script = REFUSED.format(code=CALLS[what][0], error=error)
    ended = run_command([sys.executable, "-P", "-c", script, str(Path(__file__).parents[1])])
    if "no seccomp here" in ended.stderr:
        pytest.skip("no seccomp here")
    assert ended.stdout.startswith(f"{error} "), ended
    assert "ringcomm needs the system call memfd_create" in ended.stdout
    assert "seccomp profile" in ended.stdout


def test_other_errors_do_not_blame_the_limit():
    with pytest.raises(FileNotFoundError, match=r"the wheel: No such file or directory$"):  # noqa: SIM117
        with open_errors.needed_for("the wheel"):
            os.open("/nonexistent", os.O_RDONLY)


def test_a_fork_closes_the_lifeline_once_and_no_file_of_its_own():
    pages = [StatusPage.create("j", "h", rank, 2, rank, 5) for rank in range(2)]
    child = os.fork()
    if child == 0:
        os._exit(_status_of_fork(pages))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _status_of_fork(pages):
    mine = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]  # in the places of what was closed
    pages.clear()
    try:
        for each in mine:
            os.fstat(each)
    except OSError:
        return 1
    return 0


def test_the_lifeline_hangs_up_with_its_page_and_not_before():
    page = StatusPage.create("j", "h", 0, 1, 0, 5)
    end = page.open_lifeline(os.getpid())
    poll = select.poll()
    poll.register(end, 0)
    assert poll.poll(0) == []
    del page
    assert poll.poll(0) == [(end, select.POLLHUP)]
    os.close(end)


def test_a_signal_does_not_end_the_watch_on_deaths():
    loop, news = Loop(None, False), os.eventfd(0)
    before = set(os.listdir("/proc/self/task"))
    loop.watch(news)
    (watcher,) = set(os.listdir("/proc/self/task")) - before
    came = threading.Event()
    previous = signal.signal(signal.SIGUSR1, lambda *_: came.set())
    try:
        wait_until(lambda: _sleeps(watcher), "the watcher does not come to its sleep")
        _signal_thread(int(watcher))
        wait_until(came.is_set, "the signal does not arrive")
        wait_until(lambda: _sleeps(watcher), "the watcher has ended")
    finally:
        signal.signal(signal.SIGUSR1, previous)
    loop.await_news(0.0)
    os.eventfd_write(news, 1)
    woken = threading.Thread(target=loop.await_news, args=(60.0,))
    woken.start()
    woken.join(30)
    assert not woken.is_alive()
    loop.stop()
    os.close(news)


def _sleeps(thread):
    try:
        with open(f"/proc/self/task/{thread}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "S"
    except FileNotFoundError:
        return False


def _signal_thread(thread):
    """Let the kernel give a signal to one thread of this process, one of no Python at that."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.tgkill.argtypes = [ctypes.c_int] * 3
    assert libc.tgkill(os.getpid(), thread, signal.SIGUSR1) == 0, os.strerror(ctypes.get_errno())


def test_a_sleep_ends_with_news_and_with_a_call():
    news = os.eventfd(0)
    parking = Parking(news)
    os.eventfd_write(news, 1)
    parking.sleep(60.0)
    os.eventfd_read(news)
    parking.wake()
    parking.sleep(60.0)
    parking.close()
    parking.wake()  # of one that is closed: nobody sleeps
    os.close(news)


def test_memory_of_another_process_that_is_gone_is_an_os_error():
    with pytest.raises(FileNotFoundError, match="/proc/0/fd/3"):
        NodeMemory.open(0, 3, 4, 5)
    with pytest.raises(FileNotFoundError, match="/proc/0/fd/3"):
        StatusPage.open(0, 3, 5)


@pytest.mark.parametrize("is_handed", [False, True])
def test_a_neighbour_takes_two_descriptors_and_its_part_of_the_addresses(is_handed):
    n_ranks, of_machine = 64, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    page, memory = StatusPage.create("j", "h", 0, n_ranks, 0, 5), make_memory(5, n_ranks)
    fds = (page.fd, page.lifeline_fd, memory.board_fd, memory.arena_fd)
    offer = Offer(os.getpid(), 5, *fds)
    n_before, nbytes_before = n_open(), address_nbytes()
    if is_handed:
        neighbour = Neighbour.handed(offer, os.getpid(), [os.dup(fd) for fd in offer.descriptors])
    else:
        neighbour = Neighbour.reached(offer)
    mapped = neighbour.memory()
    neighbour.close_handed()
    assert n_open() - n_before == 2
    assert address_nbytes() - nbytes_before < 4 * of_machine / n_ranks + (1 << 28)
    piece = take(memory, 5000)
    piece[:] = np.arange(5000) % 61
    assert np.array_equal(view(mapped, memory.offset_of(piece), 5000), piece)
    neighbour.close()
    del mapped
    assert n_open() == n_before


def n_open():
    return len(os.listdir("/proc/self/fd"))


def address_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


RECORD = """
from ringcomm._core import StatusPage
for rank in range(5):
    StatusPage.create("j", "h", rank, 5, rank, 5).record_this_process()
print(sum("ringcomm-status" in line for line in open("/proc/self/maps")))
"""


def test_the_page_of_an_earlier_init_does_not_stay_mapped():
    # In a process of its own, whose end the pages record.
    ended = run_command([sys.executable, "-P", "-c", RECORD])
    assert ended.stdout == "1\n", ended.stdout + ended.stderr


def test_a_rank_without_memory_is_no_missing_file():
    page = StatusPage.create("j", "h", 0, 1, 0, 5)
    neighbour = Neighbour.reached(Offer(os.getpid(), 5, page.fd, page.lifeline_fd))
    with pytest.raises(OSError, match=r"^it has none$"):
        neighbour.memory()
    neighbour.close()
