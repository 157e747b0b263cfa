"""What every Transport promises, over loopback; tests/mpi runs the same bodies over MPI."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import transport_conformance
from loopback import LoopbackHub

from ringcomm._core import WireFault
from ringcomm.transport import mpi


@pytest.mark.parametrize("body", transport_conformance.BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_loopback(body, size):
    hub = LoopbackHub(size)
    problems = []

    def main(rank):
        try:
            body(hub.transport(rank))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if problems:
        raise problems[0]


@pytest.mark.parametrize("dropped", ["send", "receive"])
def test_a_message_that_is_dropped_is_not_matched_any_more(dropped):
    hub = LoopbackHub(2)
    source, dest = hub.transport(0), hub.transport(1)
    lost, sent, received = (np.full(3001, byte, np.uint8) for byte in (7, 61, 0))
    if dropped == "send":
        source.isend(lost, 1, 5)
        _idle = hub.messages.send(0, lost, 1, 5)  # may stand where the one that is dropped did
        receiving = dest.irecv(received, 0, 5)
        assert not receiving.test()
        sending = source.isend(sent, 1, 5)
    else:
        dest.irecv(lost, 0, 5)
        _idle = hub.messages.receive(1, lost, 0, 5)
        sending = source.isend(sent, 1, 5)
        assert not sending.test()
        receiving = dest.irecv(received, 0, 5)
    assert (sending.test(), receiving.test()) == (True, True)
    assert (received == 61).all()
    assert (lost == 7).all()


@pytest.mark.parametrize("is_receive", [False, True])
def test_segments_before_one_that_mpi_refuses_are_given_up_and_keep_their_memory(
    is_receive, monkeypatch
):
    """MPI may still read, or write to, the memory of a message that has begun."""

    class Refused(Exception):
        pass

    class Begun:
        is_cancelled = False

        def Test(self, _):
            return False

        def Cancel(self):
            self.is_cancelled = True

    begun = []

    def call(part, peer, tag):
        if len(begun) == 2:
            raise Refused("no more")
        begun.append(Begun())
        return begun[-1]

    monkeypatch.setattr(mpi, "_SEGMENT", 100)
    transport = mpi.MpiTransport.__new__(mpi.MpiTransport)
    transport._mpi = SimpleNamespace(Exception=Refused, Status=object)
    transport._abandoned = []
    buffer = np.zeros(350, np.uint8)
    with pytest.raises(WireFault, match="no more"):
        transport._begin(call, buffer, 1, 5, is_receive=is_receive)
    assert [each.buffer is buffer for each in transport._abandoned] == [True]
    assert [each.is_cancelled for each in begun] == [is_receive] * 2
