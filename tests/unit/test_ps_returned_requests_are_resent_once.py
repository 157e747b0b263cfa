"""A request that both copies of a server return, as its partition has moved, is resent once."""

from types import SimpleNamespace

from ringcomm.ps.client.client import Client
from ringcomm.ps.client.request import Request
from ringcomm.ps.protocol.frame_meta import packed_owners
from ringcomm.ps.protocol.frames import FrameHeader, FrameKind, Status
from ringcomm.ps.protocol.link import Delivery

TABLE = 1


def test_a_request_that_is_returned_twice_is_sent_again_once():
    sent = []  # (server, view, sequence)
    link = SimpleNamespace(
        ask=lambda rank, header, *_: sent.append((rank, header[1], header[3])),
        send=lambda *_: None,
    )
    layout = SimpleNamespace(
        rank_of=lambda server: server, servers=(0, 1), server_numbers=(0, 1), hosts={}
    )
    client = Client(SimpleNamespace(job_rank=9), link, layout, 60.0)
    client.owners.add_table(TABLE, [0], {})
    request = Request(FrameKind.PUSH, partition=(TABLE, 0))
    request.future = SimpleNamespace(acked_by=None)
    client.submit([request])
    ((_, _, sequence),) = sent
    returned = FrameHeader(
        FrameKind.REPLY, origin=0, status=Status.WRONG_VIEW, view=0, sequence=sequence, table=TABLE
    )
    for _ in range(2):
        client.on_reply(Delivery(0, returned, packed_owners(1, [1]), None))
    assert sent == [(0, 0, sequence), (1, 1, sequence)]
