"""What every Transport promises, over loopback; tests/mpi runs the same bodies over MPI."""

import threading

import conformance
import pytest

from ringcomm.transport.loopback import LoopbackHub


@pytest.mark.parametrize("body", conformance.BODIES, ids=lambda body: body.__name__)
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
