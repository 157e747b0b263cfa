"""Short messages come also if a rank dies meanwhile."""

from collections import deque
from types import SimpleNamespace

from ringcomm.transport.unannounced_messages import ShortMessages

PENDING = 76


class Failed(Exception):
    def Get_error_class(self):
        return PENDING


class Receive:
    """A receive of Open MPI 5: once a death has interrupted it, test() fails for ever."""

    def __init__(self, buffer):
        self.buffer, self.is_complete, self.has_failed = buffer, False, False

    def Test(self, _):
        if self.has_failed:
            raise Failed
        return self.is_complete

    def Get_status(self, _):
        return self.is_complete


def test_a_message_that_completes_a_receive_after_a_death_is_taken():
    status = SimpleNamespace(source=3, Get_count=lambda _: 2)
    mpi = SimpleNamespace(
        BYTE=None, ANY_SOURCE=-1, Status=lambda: status, Exception=Failed, ERR_PROC_FAILED=75,
        ERR_PROC_FAILED_PENDING=PENDING,
    )  # fmt: skip
    receives = deque()

    def receive(spec, _source, _tag):
        receives.append(Receive(spec[0]))
        return receives[-1]

    comm = SimpleNamespace(Irecv=receive, Ack_failed=lambda: None)
    messages = ShortMessages(mpi, comm, 1)
    receives[0].has_failed = True
    assert messages.collect() == []
    for first in (receives[0], receives[1]):
        first.buffer[:2], first.is_complete = b"ab", True
    assert messages.collect() == [(3, b"ab"), (3, b"ab")]
    assert len(receives) == 10
