"""Process sets where the servers are not the last ranks of the job, as on several hosts."""

from types import SimpleNamespace

import harness
import pytest
import torch
from loopback import LoopbackHub, LoopbackTransport
from ps_ranks_as_threads import run_all

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm import ps
from ringcomm.ps.job import session

HOSTS = (0, 0, 0, 3, 3, 3)  # ranks 2 and 5 become servers; ranks 0, 1, 3, 4 of the job are workers


@pytest.fixture(autouse=True)
def two_hosts(monkeypatch):
    """Let ranks be on two hosts, and have communicators, whose ranks are those of the job."""
    monkeypatch.setattr(harness, "LoopbackHub", lambda size, _: LoopbackHub(size, HOSTS))
    monkeypatch.setattr(LoopbackTransport, "ranks_of", lambda _, comm: comm.ranks)


def run_workers(body):
    results = run_all(4, body, 2)
    assert [results.pop(rank) for rank in (5, 2)] == ["ended with 0"] * 2
    return results


def communicator(*ranks):
    return SimpleNamespace(ranks=ranks, Get_group=None)


def test_process_sets_and_groups_number_the_workers_alike():
    def body(_):
        assert session().layout.servers == (2, 5)
        mine = rc.rank()
        last = hvd.add_process_set([2, 3])
        halves = [communicator(0, 3), communicator(1, 4)]  # as Split(color=rc.rank() % 2) makes
        half = hvd.add_process_set(hvd.ProcessSet(halves[mine % 2]))
        assert half.ranks == [mine % 2, mine % 2 + 2]
        sums = [hvd.allreduce(torch.tensor(mine), op=hvd.Sum, process_set=half).item()]
        if mine >= 2:
            sums.append(hvd.allreduce(torch.tensor(mine), op=hvd.Sum, process_set=last).item())
            x = rc.allreduce(torch.tensor(mine), group=rc.Group([2, 3]))
            sums.append(x.item())
        return sums

    assert run_workers(body) == [[2], [4], [2, 5, 5], [4, 5, 5]]


def test_a_communicator_with_a_server_is_refused_on_every_worker():
    def body(_):
        with pytest.raises(ValueError, match="rank 2 of the job is a parameter server or"):
            hvd.add_process_set(hvd.ProcessSet(communicator(0, 2)))
        return ps.is_chief()

    assert sum(run_workers(body)) == 1
