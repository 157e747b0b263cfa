"""One rank's calls to a hash table whose rows move, in whatever order servers answer."""

from types import SimpleNamespace

import numpy as np
import pytest

from ringcomm.ps.client.client import Client
from ringcomm.ps.client.rows.maintenance import Maintenance
from ringcomm.ps.client.rows.row_calls import RowCalls
from ringcomm.ps.protocol.frame_meta import packed_owners
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind, NewsOption, Status
from ringcomm.ps.protocol.link import Delivery

TABLE = 1


class Servers:
    """Two servers of one table, whose answers come as the test says."""

    def __init__(self):
        self.asked = []  # (server, sequence, view) of requests without an answer
        self.confirmed = []  # views
        self.meanwhile = lambda: None  # what happens while a call begins
        link = SimpleNamespace(ask=self._ask, send=self._confirm)
        engine = SimpleNamespace(
            job_rank=9, nudge=lambda: None, state=SimpleNamespace(require_usable=lambda: None)
        )
        layout = SimpleNamespace(
            rank_of=lambda server: server, servers=(0, 1), server_numbers=(0, 1), hosts={}
        )
        self.client = Client(engine, link, layout, 60.0)
        self._reserve, self.client.reserve = self.client.reserve, self._while_rows_may_move
        self.maintenance = Maintenance(
            SimpleNamespace(client=self.client, memory_for=lambda _, n: np.empty(n, np.uint8)),
            RowCalls(self.client, {"number": TABLE, "owners": [0, 1], "epochs": {}}),
            "emb",
            TABLE,
        )

    def _while_rows_may_move(self, requests, future, *, needs_credit):
        self._reserve(requests, future, needs_credit=needs_credit)
        self.meanwhile()

    def _ask(self, server, header, _meta, _body):
        _, view, _, sequence, *_ = header
        self.asked.append((server, sequence, view))

    def _confirm(self, _rank, header, _meta):
        self.confirmed.append(header.clock)

    @property
    def views(self):
        """Return server and view of each request without an answer."""
        return [(server, view) for server, _, view in self.asked]

    def notify(self, view):
        """All rows are server 1's from this view on."""
        header = FrameHeader(FrameKind.NEWS, table=TABLE, clock=view, option=NewsOption.MOVED)
        self.client.on_notice(Delivery(0, header, packed_owners(view, [1, 1]), None))

    def answer(self, server, view, count):
        """Answer the oldest request of a view; count None: return it, for rows have moved."""
        found = next(each for each in self.asked if each[0] == server and each[2] == view)
        self.asked.remove(found)
        status = Status.OK if count is not None else Status.WRONG_VIEW
        meta = b"" if count is not None else packed_owners(view + 1, [1, 1])
        header = FrameHeader(
            FrameKind.REPLY, origin=server, status=status, sequence=found[1], clock=count or 0
        )
        self.client.on_reply(Delivery(server, header, meta, None))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("is_returned_first", [False, True])
def test_a_server_that_counted_in_an_older_view_does_not_count(first, is_returned_first):
    servers = Servers()
    future = servers.maintenance.n_rows()
    answers = [(first, 0, 164), (1 - first, 0, None)]
    for each in reversed(answers) if is_returned_first else answers:
        servers.answer(*each)
    assert not future.done()
    servers.answer(first, 1, 400)
    servers.answer(1 - first, 1, 200)
    assert future.result() == 600


@pytest.mark.parametrize("is_returned_first", [False, True])
def test_what_a_server_evicted_in_an_older_view_counts(is_returned_first):
    servers = Servers()
    future = servers.maintenance.evict()
    answers = [(0, 0, 5), (1, 0, None)]
    for each in reversed(answers) if is_returned_first else answers:
        servers.answer(*each)
    servers.answer(0, 1, 1)
    servers.answer(1, 1, 2)
    assert future.result() == 8


def test_rows_that_move_again_are_counted_again():
    servers = Servers()
    future = servers.maintenance.n_rows()
    for view in range(3):
        servers.answer(1, view, None)
        servers.answer(0, view, 100 + view)
    servers.answer(0, 3, 1)
    servers.answer(1, 3, 2)
    assert future.result() == 3


def test_a_call_that_begins_while_rows_move_goes_to_their_new_owner():
    servers = Servers()
    servers.meanwhile = lambda: servers.notify(1)
    future = servers.maintenance.erase(np.arange(50))
    assert servers.views == [(1, 1)]
    servers.answer(1, 1, 50)
    assert future.result() == 50


def test_a_move_is_confirmed_once_what_came_back_was_sent_again():
    servers = Servers()
    servers.maintenance.n_rows()
    servers.notify(1)
    servers.answer(0, 0, 100)
    assert servers.confirmed == []
    servers.answer(1, 0, None)
    assert servers.views == [(0, 1), (1, 1)]
    assert servers.confirmed == [1, 1]  # to both servers
