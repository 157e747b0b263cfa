"""Which host has a slow link is told from what the kernels count; nobody in a balanced cluster."""

import os
import random
import socket
import threading

import pytest

from ringcomm.launch.watch.other_hosts import HostReport, traffic_by_host, traffic_of
from ringcomm.launch.watch.slow_link import Traffic, slow_link

MB = 10**6


def ring(rates, rtt_ms=None):
    """Return the traffic of a ring of hosts; rates: MB/s from each host to the next."""
    size = len(rates)
    times = rtt_ms or [0.2] * size
    return {
        (f"h{i}", f"h{(i + 1) % size}"): Traffic(100 * MB, int(100 * MB / rate), int(1000 * ms))
        for i, (rate, ms) in enumerate(zip(rates, times, strict=True))
    }


@pytest.mark.parametrize("size", [3, 4, 8])
def test_the_host_through_whose_link_all_is_slow_is_named(size):
    rates = [24, 24, *[110] * (size - 2)]  # to h1, and from it
    assert str(slow_link(ring(rates))) == (
        "the link of host h1 is slow: 24 MB/s, between the others 110 MB/s"
    )


def test_the_host_that_is_far_away_is_named():
    found = slow_link(ring([100, 100, 100, 100], [0.2, 20.3, 20.4, 0.2]))
    assert found.host == "h2"
    assert found.what == "20.3 ms there and back, between the others 0.2 ms"


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_named_among_equal_links(seed):
    rng = random.Random(seed)
    size = rng.choice([2, 3, 5])
    rates = [80 + 40 * rng.random() for _ in range(size)]
    assert slow_link(ring(rates, [0.1 + 4 * rng.random() for _ in range(size)])) is None


def test_two_hosts_and_little_traffic_prove_nothing():
    assert slow_link({}) is None
    assert slow_link(ring([24, 24])) is None
    few = {pair: Traffic(1000, 1000, 200) for pair in ring([1, 1, 1])}
    assert slow_link(few | {("h1", "h2"): Traffic(100 * MB, MB, 200)}) is None


def test_a_slow_direction_between_two_hosts_is_not_blamed_on_one_of_them():
    assert slow_link(ring([110, 24, 110, 110])) is None


def test_addresses_become_hosts():
    one = HostReport("h0", 0.0, (), {("10.0.0.1", "10.0.0.2"): Traffic(5, 1, 9)})
    two = HostReport("h1", 0.0, (), {("10.0.0.2", "10.0.0.1"): Traffic(7, 1, 9)})
    assert traffic_by_host([one, two]) == {
        ("h0", "h1"): Traffic(5, 1, 9),
        ("h1", "h0"): Traffic(7, 1, 9),
    }
    wider = HostReport("h0", 0.0, (), one.traffic | {("fd00::1", "10.0.0.2"): Traffic(3, 2, 4)})
    assert traffic_by_host([wider, two])["h0", "h1"] == Traffic(8, 3, 4)


def test_the_kernel_counts_what_a_process_sends():
    own = own_address()
    with socket.create_server((own, 0)) as server:
        reader = threading.Thread(target=drain, args=(server,))
        reader.start()
        with socket.create_connection(server.getsockname()[:2]) as client:
            client.sendall(bytes(3 * MB))
            client.recv(1)  # all has arrived
            found = traffic_of([os.getpid()])
            client.send(b"!")
        reader.join()
    assert found[own, own].nbytes >= 3 * MB
    assert found[own, own].busy_us >= 0  # the kernel counts ticks of some milliseconds
    assert found[own, own].rtt_us > 0
    assert traffic_of([]) == {}


def own_address():
    """Return an address of this host that is not 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.254.254.254", 1))  # sends nothing
        except OSError:
            pytest.skip("this host has no network")
        return probe.getsockname()[0]


def drain(server):
    connection, _ = server.accept()
    with connection:
        left = 3 * MB
        while left:
            left -= len(connection.recv(1 << 16))
        connection.send(b"!")
        connection.recv(1)  # the connection stands until it was looked at
