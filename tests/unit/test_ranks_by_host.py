"""Which ranks share a host."""

import pytest

from ringcomm.collectives import ranks_by_host


def test_hosts_come_in_the_order_of_their_first_ranks():
    assert ranks_by_host.hosts((5, 2, 5, 9)) == ((0, 2), (1,), (3,))


def test_host_order_visits_a_host_once():
    assert ranks_by_host.host_order((0, 1, 2, 0, 1, 2)) == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ((0,), "1 host x 1 rank"),
        ((0, 0, 0), "1 host x 3 ranks"),
        ((0, 0, 2, 2), "2 hosts x 2 ranks"),
        ((0, 1, 1), "2 hosts of 1, 2 ranks"),
        ((0, 1, 0, 1), "2 hosts, ranks on hosts 0 1 0 1"),
        ((7, 3, 7, 3), "2 hosts, ranks on hosts 0 1 0 1"),
    ],
)
def test_a_layout_in_words(nodes, text):
    assert ranks_by_host.describe(nodes) == text
