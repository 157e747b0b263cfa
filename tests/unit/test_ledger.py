"""Which operation is which: pure, so two ranks are two ledgers."""

import pytest

from ringcomm.engine.core.ledger import Ledger, Ticket, base_of
from ringcomm.transport.tags import WIDEST, TagLayout


def pair(tags=WIDEST):
    return Ledger(3, is_first=True, tags=tags), Ledger(3, is_first=False, tags=tags)


def settle(ledgers, tickets, fingerprint):
    stream = max(each.proposal(t) for each, t in zip(ledgers, tickets, strict=True))
    for each, ticket in zip(ledgers, tickets, strict=True):
        each.settle(ticket, stream, fingerprint)
        each.finish(ticket)
    return stream


def agree(ledgers, name, fingerprint=77):
    return settle(ledgers, [each.enter(name) for each in ledgers], fingerprint)


def test_unnamed_operations_are_numbered_and_have_streams_of_their_own():
    first, second = pair()
    tickets = [first.enter(None) for _ in range(3)]
    assert [t.number for t in tickets] == [1, 2, 3]
    assert tickets == [second.enter(None) for _ in range(3)]
    assert len({t.key for t in tickets}) == 3
    assert len({first.proposal(t) for t in tickets}) == 3
    assert first.cached_stream(tickets[0], 77) is None


def test_unnamed_operations_in_flight_on_any_two_ranks_share_no_stream():
    """One rank may be as many operations ahead of another as may be pending."""
    first, _ = pair()
    tickets = [first.enter(None) for _ in range(2 * WIDEST.n_streams // 4)]
    streams = {first.proposal(t) for t in tickets}
    assert len(streams) == len(tickets)
    assert max(streams) < WIDEST.n_streams // 2


def test_names_get_the_same_stream_on_all_ranks_whatever_their_order():
    first, second = ledgers = pair()
    one = [first.enter("a"), first.enter("b")]
    other = [second.enter("b"), second.enter("a")]
    a = settle(ledgers, [one[0], other[1]], 77)
    b = settle(ledgers, [one[1], other[0]], 78)
    assert a != b
    for each in ledgers:
        assert each.cached_stream(each.enter("a"), 77) == a
        assert each.cached_stream(each.enter("b"), 78) == b


def test_each_use_of_a_cached_name_has_a_key_of_its_own():
    ledgers = pair()
    agree(ledgers, "a")
    keys = set()
    for _ in range(3):
        tickets = [each.enter("a") for each in ledgers]
        assert tickets[0].key == tickets[1].key
        keys.add(tickets[0].key)
        settle(ledgers, tickets, 77)
    assert len(keys) == 3


def test_a_pending_name_cannot_be_entered():
    first, _ = pair()
    ticket = first.enter("a")
    with pytest.raises(ValueError, match="'a' is pending"):
        first.enter("a")
    first.finish(ticket)
    first.enter("a")


def test_another_call_under_a_known_name_is_not_cached_but_keeps_the_stream():
    ledgers = pair()
    stream = agree(ledgers, "a", 77)
    ticket = ledgers[1].enter("a")
    assert ledgers[1].cached_stream(ticket, 78) is None
    assert ledgers[1].proposal(ticket) == stream


def test_a_name_that_is_poisoned_never_gets_its_stream_again():
    ledgers = pair()
    stream = agree(ledgers, "a", 77)
    assert agree(ledgers, "a", None) == stream
    assert not ledgers[0].is_cached(ledgers[0].enter("a"))
    ledgers[0].finish(Ticket("a", 0, 0))
    assert agree(ledgers, "b") != stream
    assert agree(ledgers, "a") != stream


def test_a_mismatch_before_anything_moved_wastes_no_stream():
    ledgers = pair()
    stream = agree(ledgers, "a", None)
    assert agree(ledgers, "a", 77) == stream
    assert ledgers[0].cached_stream(ledgers[0].enter("a"), 77) == stream


def test_names_beyond_the_limit_are_remembered_by_nobody():
    ledgers = first, second = pair(TagLayout(0, 1, n_streams=8))
    agree(ledgers, "a")
    agree(ledgers, "b")
    assert not first.has_overflown
    streams = [agree(ledgers, f"passing {i}") for i in range(5)]
    assert streams == [6, 7, 6, 7, 6]
    assert first.has_overflown
    assert second.has_overflown
    assert len(first._entries) == 2
    assert first.enter("passing 0").number == 0


def test_who_has_entered_is_remembered_by_number():
    ledgers = first, second = pair()
    first.enter(None)
    base = base_of(3, None)
    assert first.has_entered(base, 1)
    assert not first.has_entered(base, 2)
    assert not second.has_entered(base, 1)
    agree(ledgers, "a")
    ticket = first.enter("a")
    assert first.has_entered(ticket.base, ticket.number)
    assert not second.has_entered(ticket.base, ticket.number)
    assert not first.has_entered(base_of(4, "a"), 0)


def test_groups_and_names_never_share_a_key():
    bases = {base_of(c, n) for c in range(50) for n in (None, "", "a", "1:a", "None", "\udcff")}
    assert len(bases) == 300


def test_a_name_that_comes_once_is_not_kept_and_has_a_stream_that_passes():
    first, second = ledgers = pair()
    tickets = [each.enter("once", is_once=True) for each in ledgers]
    assert tickets[0] == tickets[1]
    stream = settle(ledgers, tickets, 77)
    assert first.slot(tickets[0], stream) is None
    assert not first.is_cached(tickets[0])
    assert first.cached_stream(second.enter("once", is_once=True), 77) is None
    assert not first.has_overflown
    assert agree(ledgers, "kept") == WIDEST.n_streams // 2  # no name before it has taken room
