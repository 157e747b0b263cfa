"""Connections to the dashboard that do not show its token make way, and end after a time."""

import asyncio

import pytest

pytest.importorskip("uvicorn", reason="the core is tested without it, too")

from ringcomm.launch.dashboard.connections import Door

FOREVER_S = 1e6
DEADLINE_S = 20.0


class Transport:
    def __init__(self):
        self.is_aborted = False

    def abort(self):
        self.is_aborted = True


def entered(door, n, first=0):
    """Return the transports of n new connections, whose clients have ports from `first` on."""
    transports = [Transport() for _ in range(n)]
    for port, each in enumerate(transports, first):
        door.enter(("127.0.0.1", port), each)
    return transports


def aborted(transports):
    return [i for i, each in enumerate(transports) if each.is_aborted]


def test_the_oldest_without_the_token_makes_way():
    async def case():
        door = Door(4, FOREVER_S)
        transports = entered(door, 4)
        door.has_shown_token(("127.0.0.1", 0))
        door.leave(("127.0.0.1", 1))
        transports += entered(door, 3, first=4)
        return aborted(transports)

    assert asyncio.run(case()) == [2, 3]


def test_who_has_shown_the_token_stays_and_is_counted():
    async def case():
        door = Door(2, FOREVER_S)
        transports = entered(door, 2)
        for port in range(2):
            door.has_shown_token(("127.0.0.1", port))
        transports += entered(door, 1, first=2)
        door.leave(("127.0.0.1", 0))
        transports += entered(door, 2, first=3)
        return aborted(transports)

    assert asyncio.run(case()) == [2, 3]


def test_who_does_not_show_the_token_in_time_is_gone():
    async def case():
        door = Door(4, 0.0)
        transports = entered(door, 3)
        door.has_shown_token(("127.0.0.1", 1))
        door.leave(("127.0.0.1", 2))
        async with asyncio.timeout(DEADLINE_S):
            while not transports[0].is_aborted:
                await asyncio.sleep(0)
        return aborted(transports)

    assert asyncio.run(case()) == [0]
