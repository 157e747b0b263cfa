"""Workers read the memory of a server that has a copy, and of a dead one: nobody reads what is old.

ps_simulation_over_pipes has the real memory. What it requires of each read: all that was
acknowledged, or read by anybody, before it began.
"""

import numpy as np
import pytest
from ps_simulation import Choices
from ps_simulation_over_pipes import PipeNet, PipeWire
from ps_simulation_with_copies import MODES

OTHER, PRIMARY, FOLLOWER = 1, 2, 3  # ranks of a job of two workers, as to the blocks of server 0


class Run:
    """Two workers that know where the blocks of server 0 are; nothing is under way."""

    def __init__(self, mode="async", n_servers=2):
        self.net = PipeNet(
            MODES[mode], Choices([0]), n_servers=n_servers, n_workers=2, n_steps=0, n_deaths=0
        )
        self.settle()
        self.part = self.net.client(0).part_at(0)
        for worker in (0, OTHER):
            assert not self.read(worker)
        self.settle()

    def settle(self):
        while self.net.deliver_one():
            pass

    def push(self, worker, *, clock=0):
        self.net.client(worker).push_part(self.part, clock)

    def read(self, worker):
        """Let a worker read; return True if it did so in place."""
        client = self.net.client(worker)
        before = client.n_in_place
        client.read(self.part)
        return client.n_in_place > before

    def block(self, rank):
        return self.net.ranks[rank].homes._homes[0].server.catalog.contents[1].parts[self.part]

    def end(self):
        self.net.run()
        self.net.require_all()


def test_reads_ask_nobody_while_nothing_of_the_reader_is_under_way():
    run = Run()
    for _ in range(3):
        assert run.read(0)
        assert run.read(OTHER)
        run.push(0)
        assert not run.read(0)  # its push may not be there yet
        assert run.read(OTHER)
        run.settle()
    run.end()


@pytest.mark.parametrize("n_turns", range(5))  # sent; sent on; carried out; acknowledged; noted
@pytest.mark.parametrize("victim", [PRIMARY, FOLLOWER])
def test_nobody_reads_what_is_old_whenever_a_server_dies(n_turns, victim):
    run = Run()
    net = run.net
    run.push(0)
    for rank in (PRIMARY, FOLLOWER, PRIMARY, 0)[:n_turns]:
        net.poll(rank)
        run.read(OTHER)
    net.kill(victim - PRIMARY)
    assert run.read(OTHER)  # of a dead one, too: nobody has gone on in its place
    survivor = PRIMARY + FOLLOWER - victim
    net.hear(survivor, victim)
    assert run.read(OTHER) == (victim == FOLLOWER)
    net.hear(0, victim)
    for _ in range(3):
        run.push(0)
        for rank in (survivor, 0, survivor, 0):
            net.poll(rank)
            run.read(OTHER)  # it has not heard of the death
    assert sum(net.acked[run.part].values()) == 4
    net.hear(OTHER, victim)
    run.settle()
    assert run.read(OTHER)
    run.end()


def test_what_was_read_outlives_the_primary():
    """So nothing may be in its block that the follower has not."""
    run = Run()
    run.push(0)
    for rank in (PRIMARY, FOLLOWER, PRIMARY):
        net, least = run.net, run.net.least(run.part).sum()
        net.poll(rank)
        assert run.block(FOLLOWER).values.sum() >= run.block(PRIMARY).values.sum() >= least
        assert run.read(OTHER)
    net.kill(0)
    run.end()


@pytest.mark.parametrize("mode", ["sync", "first_of"])
def test_rounds_are_read_in_place_and_outlive_the_primary(mode):
    run = Run(mode)
    for number in range(3):
        for worker in (0, OTHER):
            run.net.client(worker).push()
        run.settle()
        assert run.read(0)
        assert run.read(OTHER)
        assert run.net.seen[run.part].max() > number / 2
    run.net.kill(0)
    run.net.run()
    assert (run.block(FOLLOWER).values >= run.net.seen[run.part]).all()


def test_a_copy_that_was_made_again_is_read_in_place_and_takes_over():
    run = Run(n_servers=3)
    for victim in (0, 1):
        run.push(0)
        run.settle()
        run.read(OTHER)
        run.net.kill(victim)
        run.net.settle()
        run.read(OTHER)
        run.net.settle()
        assert run.read(OTHER)
    assert np.count_nonzero(run.net.seen[run.part]) == 2
    run.end()


@pytest.mark.parametrize("far", [None, FOLLOWER, 4])
def test_blocks_are_read_in_place_only_if_each_server_could_withdraw_them(far, monkeypatch):
    """Any of them may follow one day, and a server on another host cannot."""
    monkeypatch.setattr(PipeWire, "shares_memory", lambda self, rank: rank != far)
    net = PipeNet(MODES["async"], Choices([0]), n_servers=3, n_workers=2, n_steps=0, n_deaths=0)
    while net.deliver_one():
        pass
    blocks = net.ranks[PRIMARY].homes._homes[0].server.catalog.contents[1].parts.values()
    assert {(block.may_ack, block.may_read) for block in blocks} == {(True, far is None)}
