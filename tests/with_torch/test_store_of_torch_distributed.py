"""The store that rank 0 serves for torch.distributed."""

from datetime import timedelta
from pathlib import Path

from ringcomm.torch.distributed import rendezvous
from ringcomm.torch.distributed.compat import c10d

LISTENS = "0A"
LOOPBACK = "0100007F"


def addresses_of(port):
    texts = [Path("/proc/self/net", each).read_text() for each in ("tcp", "tcp6")]
    sockets = [line.split() for text in texts for line in text.splitlines()[1:]]
    local = [each[1].split(":") for each in sockets if each[3] == LISTENS]
    return [address for address, each in local if int(each, 16) == port]


def test_a_store_for_one_host_listens_on_it_alone(monkeypatch):
    for each in ("size", "local_size"):
        monkeypatch.setattr(rendezvous, each, lambda: 2)
    timeout = timedelta(seconds=60)
    store = rendezvous._serve_store(2, timeout)
    found = addresses_of(store.port)
    other = c10d.TCPStore("127.0.0.1", store.port, 2, False, timeout)
    store.set("key", "value")
    value = other.get("key")
    del other, store  # it listens no more, also if this test fails
    assert (found, value) == ([LOOPBACK], b"value")
