"""What C++ asks of an MPI library: a fake one, with the handles of either kind, answers."""

import ctypes
import logging
import threading

import numpy as np
import pytest
from harness import run_ranks, wait_until

import ringcomm as rc
from ringcomm import _core
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.progress import clock_without_stops

COMM, BYTE, TAG = 77, 88, 5
UNREACHABLE = 42


class FakeMpi:
    """One rank that sends to itself; counts the calls of each function.

    Args:
        handle: ctypes type of a handle: Open MPI has pointers, MPICH ints.
        short: bytes that each message comes short.
        failing: the functions that fail.
    """

    def __init__(self, handle, *, short=0, failing=()):
        self.calls = dict.fromkeys(_signatures(handle), 0)
        self._handle, self._short, self._failing = handle, short, failing
        self._requests = {}  # by handle: (is_receive, address, nbytes)
        self.received = []  # those of receives, also of what has ended
        self._sent = []
        self._next = 100
        self._kept = [kind(self._counted(name)) for name, kind in _signatures(handle).items()]

    def runner(self, segment_nbytes=1 << 30):
        functions = {
            name: ctypes.cast(function, ctypes.c_void_p).value
            for name, function in zip(self.calls, self._kept, strict=True)
        }
        return _core.mpi_runner(functions, ctypes.sizeof(self._handle), BYTE, COMM, segment_nbytes)

    def _counted(self, name):
        function = getattr(self, name.lower())

        def call(*arguments):
            self.calls[name] += 1
            if name in self._failing:
                return UNREACHABLE
            return function(*arguments) or 0

        return call

    def _new(self, request, *what):
        self._next += 1
        request[0] = self._next
        self._requests[self._next] = what

    def mpi_send_init(self, data, count, byte, dest, tag, comm, request):  # noqa: PLR0917
        assert (byte, dest, tag, comm) == (BYTE, 0, TAG, COMM)
        self._new(request, False, data, count)

    def mpi_recv_init(self, out, count, byte, source, tag, comm, request):  # noqa: PLR0917
        assert (byte, source, tag, comm) == (BYTE, 0, TAG, COMM)
        self._new(request, True, out, count)
        self.received.append((True, out, count))

    def mpi_isend(self, *arguments):
        self.mpi_send_init(*arguments)
        self.mpi_start(arguments[-1])

    def mpi_irecv(self, *arguments):
        self.mpi_recv_init(*arguments)
        self.mpi_start(arguments[-1])

    def mpi_start(self, request):
        is_receive, address, nbytes = self._requests[request[0]]
        if not is_receive:
            self._sent.append(ctypes.string_at(address, nbytes) if nbytes else b"")

    def mpi_test(self, request, flag, status):
        is_receive, address, nbytes = self._requests[request[0]]
        flag[0] = 1
        if is_receive:
            flag[0] = int(bool(self._sent))
            if self._sent:
                data = self._sent.pop(0)
                ctypes.memmove(address, data, nbytes)
                ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = len(data) - self._short

    def mpi_cancel(self, request):
        del self._requests[request[0]]

    def mpi_request_free(self, request):
        del self._requests[request[0]]

    def mpi_get_count(self, status, byte, count):
        assert byte == BYTE
        count[0] = ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0]

    def mpi_error_string(self, code, text, length):
        reason = b"error %d: no route to the peer" % code
        ctypes.memmove(text, reason, len(reason))
        length[0] = len(reason)


def _signatures(handle):
    request, number = ctypes.POINTER(handle), ctypes.POINTER(ctypes.c_int)
    integer, memory = ctypes.c_int, ctypes.c_void_p
    post = ctypes.CFUNCTYPE(integer, memory, integer, handle, integer, integer, handle, request)
    on_request = ctypes.CFUNCTYPE(integer, request)
    return {
        "MPI_Isend": post,
        "MPI_Irecv": post,
        "MPI_Send_init": post,
        "MPI_Recv_init": post,
        "MPI_Start": on_request,
        "MPI_Test": ctypes.CFUNCTYPE(integer, request, number, memory),
        "MPI_Cancel": on_request,
        "MPI_Request_free": on_request,
        "MPI_Get_count": ctypes.CFUNCTYPE(integer, memory, handle, number),
        "MPI_Error_string": ctypes.CFUNCTYPE(integer, integer, memory, number),
    }


HANDLES = [ctypes.c_int, ctypes.c_void_p]


def to_itself(nbytes):
    """Return a schedule that copies its first argument to its second by a message."""
    schedule = _core.Schedule([nbytes, nbytes])
    received = schedule.receive((1, 0, nbytes), 0)
    schedule.wait([schedule.send((0, 0, nbytes), 0), received])
    return schedule


def sample(n):
    return (np.arange(n) % 251).astype(np.uint8)


@pytest.mark.parametrize("handle", HANDLES)
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_messages_go_through_the_functions_that_were_handed_over(handle, n):
    mpi, out = FakeMpi(handle), np.zeros(n, np.uint8)
    run = mpi.runner().run(to_itself(n), [sample(n), out], [0], TAG)
    assert run.drive(5)
    assert run.fault == ""
    assert np.array_equal(out, sample(n))
    assert (mpi.calls["MPI_Isend"], mpi.calls["MPI_Irecv"]) == (1, 1)


@pytest.mark.parametrize(("n", "pieces"), [(0, 1), (999, 1), (1000, 1), (1001, 2), (10_000, 10)])
def test_long_messages_are_cut_into_segments(n, pieces):
    mpi, out = FakeMpi(ctypes.c_int), np.zeros(n, np.uint8)
    assert mpi.runner(1000).run(to_itself(n), [sample(n), out], [0], TAG).drive(5)
    assert np.array_equal(out, sample(n))
    assert (mpi.calls["MPI_Isend"], mpi.calls["MPI_Irecv"]) == (pieces, pieces)


@pytest.mark.parametrize("segment", [0, (1 << 30) + 1])
def test_segments_fit_the_counts_of_mpi(segment):
    with pytest.raises(ValueError, match="1 byte to 1 GiB"):
        FakeMpi(ctypes.c_int).runner(segment)


@pytest.mark.parametrize("handle", HANDLES)
def test_an_operation_that_comes_again_has_persistent_requests_and_no_more(handle):
    mpi, data, out = FakeMpi(handle), sample(2500), np.zeros(2500, np.uint8)
    runner, schedule = mpi.runner(1000), to_itself(2500)
    for turn in range(100):
        data[:] = sample(2500) + np.uint8(turn)
        assert runner.run(schedule, [data, out], [0], TAG).drive(5)
        assert np.array_equal(out, data)
    posted = ("MPI_Isend", "MPI_Irecv", "MPI_Send_init", "MPI_Recv_init")
    assert [mpi.calls[name] for name in posted] == [3, 3, 3, 3]
    assert mpi.calls["MPI_Start"] == 99 * 6
    runner.close()
    assert mpi.calls["MPI_Request_free"] == 6


def test_another_tag_or_address_has_messages_of_its_own():
    mpi, schedule = FakeMpi(ctypes.c_int), to_itself(8)
    runner = mpi.runner()
    data, outs = sample(8), np.zeros((3, 8), np.uint8)
    for out in outs:
        assert runner.run(schedule, [data, out], [0], TAG).drive(5)
        assert np.array_equal(out, data)
    assert mpi.calls["MPI_Isend"] == 3
    assert mpi.calls["MPI_Start"] == 0


def test_after_the_end_of_the_wire_no_request_is_freed():
    """MPI may have been finalized."""
    mpi, out = FakeMpi(ctypes.c_int), np.zeros(8, np.uint8)
    runner, data = mpi.runner(), sample(8)
    schedule = to_itself(8)
    for _ in range(2):
        assert runner.run(schedule, [data, out], [0], TAG).drive(5)
    late = runner.run(schedule, [data, out], [0], TAG)
    runner.close()
    assert late.drive(5)
    assert "closed" in late.fault
    del late, runner
    assert mpi.calls["MPI_Request_free"] == 0


@pytest.mark.parametrize("handle", HANDLES)
@pytest.mark.parametrize("function", ["MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Get_count"])
def test_an_error_code_is_a_fault_with_its_text(handle, function):
    mpi = FakeMpi(handle, failing=[function])
    run = mpi.runner().run(to_itself(8), [sample(8), np.zeros(8, np.uint8)], [0], TAG)
    assert run.drive(5)
    assert run.fault == "error 42: no route to the peer"


def test_an_error_code_without_a_text_is_told_as_a_number():
    mpi = FakeMpi(ctypes.c_int, failing=("MPI_Isend", "MPI_Error_string"))
    run = mpi.runner().run(to_itself(8), [sample(8), np.zeros(8, np.uint8)], [0], TAG)
    assert run.drive(5)
    assert run.fault == "MPI error 42"


def test_a_message_that_comes_short_is_a_fault():
    mpi = FakeMpi(ctypes.c_int, short=3)
    run = mpi.runner().run(to_itself(8), [sample(8), np.zeros(8, np.uint8)], [0], TAG)
    assert run.drive(5)
    assert run.fault == "a message came 3 bytes short"


def test_what_is_given_up_is_cancelled_if_it_is_a_receive():
    mpi = FakeMpi(ctypes.c_int)
    schedule = _core.Schedule([8])
    schedule.wait([schedule.receive((0, 0, 8), 0)])
    run = mpi.runner().run(schedule, [np.zeros(8, np.uint8)], [0], TAG)
    assert not run.drive(0)
    run.abandon()
    assert mpi.calls["MPI_Cancel"] == 1
    assert not run.advance()


def test_scratch_memory_of_what_was_given_up_is_nobody_elses():
    """Peers may still write into it."""
    mpi, nbytes = FakeMpi(ctypes.c_void_p), 3000
    schedule = _core.Schedule([])
    schedule.wait([schedule.receive((schedule.add_scratch(nbytes), 0, nbytes), 0)])
    runner = mpi.runner()

    def begin():
        run = runner.run(schedule, [], [0], TAG)
        assert not run.drive(0)
        return run

    begin().abandon()
    later = [begin() for _ in range(20)]
    addresses = [address for _, address, _ in mpi.received]
    assert len(set(addresses)) == len(addresses) == 1 + len(later)


def test_a_library_that_lacks_a_function_is_refused():
    with pytest.raises(ValueError, match="has no MPI_Irecv"):
        _core.mpi_runner({"MPI_Isend": 1}, 4, BYTE, COMM, 1000)


def test_handles_of_another_size_are_refused():
    mpi = FakeMpi(ctypes.c_int)
    mpi._handle = ctypes.c_int16
    with pytest.raises(ValueError, match="handles of 2 bytes"):
        mpi.runner()


@pytest.mark.parametrize("is_own_thread", [False, True])
def test_a_rank_whose_mpi_does_not_return_says_so_itself(is_own_thread, monkeypatch):
    monkeypatch.setattr(clock_without_stops, "STANDSTILL_S", 0.5)
    is_inside, is_told, told = threading.Event(), threading.Event(), []

    class Blocking(FakeMpi):
        def mpi_test(self, *args):
            is_inside.set()
            is_told.wait(20)
            super().mpi_test(*args)

    class Release(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())
            is_told.set()

    def body(rank):
        engine().progress.work_in_background()
        data, out = np.ones(8, np.uint8), np.zeros(8, np.uint8)
        run = Blocking(ctypes.c_int).runner().run(to_itself(8), [data, out], [0], TAG)
        if is_own_thread:
            assert run.drive(60)
            return out.sum()
        engine().transport.loop.add(run)
        assert is_inside.wait(60)
        rc.allreduce(np.ones(3), name="w")  # the driver of Python goes on
        wait_until(lambda: run.is_over, "it does not go on once MPI does")
        return out.sum()

    log, handler = logging.getLogger("ringcomm"), Release(level=logging.WARNING)
    log.addHandler(handler)
    try:
        assert run_ranks(1, body) == [8]
    finally:
        log.removeHandler(handler)
    (text,) = told
    assert text.startswith("rank 0: its own MPI has not returned for "), text
    assert _core.in_mpi_since() == 0
