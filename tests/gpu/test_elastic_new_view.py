"""An elastic job loses a rank: the others reduce on their GPUs with teams that are made anew."""

import threading

import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import TRANSPORTS, begin, choose
from harness import outcomes, run_ranks
from simulated_nccl import FakeNccl

import ringcomm as rc
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import end_view
from ringcomm.gpu.executor.engine_gpus import Gpus


class OfOldView(AssertionError):
    """Something of the old view was used in the new one."""


def forbid(team):
    """Let each further use of a team, and of its transport, be an error."""

    def refuse(*_, **__):
        raise OfOldView

    team.turn = refuse
    for name in ("enqueue", "launch", "add", "release"):
        if hasattr(team.transport, name):
            setattr(team.transport, name, refuse)


@pytest.fixture
def gpus():
    """GPUs by rank, which are closed at the end."""
    made = {}
    yield made
    for gpu in made.values():
        gpu.close()


def committed(rank, gpus, folder, transport):
    """Return a state with one commit, while a sum waits for rank 1 on the streams of the others."""
    gpu = gpus[rank] = begin(rank, folder, **choose(transport))
    state = rc.elastic.ArrayState(step=0)
    x = sim.array(np.full(1000, rank + 1.0))
    rc.allreduce_(x)
    state.commit()
    if rank == 1:
        gpu.freeze()
    rc.allreduce_(x)  # the hosts have met, the streams have not
    return state


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_what_waits_for_a_lost_rank_on_a_stream_is_not_committed(transport, gpus, tmp_path):
    all_wait = threading.Barrier(3)

    def body(rank):
        state = committed(rank, gpus, tmp_path, transport)
        all_wait.wait(120)
        if rank == 1:
            raise ValueError("boom")
        for _ in range(2):  # the second time, nothing is under way any more
            with pytest.raises(rc.PeerFailedError):
                state.commit()
        assert state.has_commit
        return state.n_commits

    first, lost, third = outcomes(3, body)
    assert isinstance(lost, ValueError)
    assert (first, third) == (1, 1)


def test_a_rank_whose_stream_was_let_go_by_another_commits_nothing(gpus, tmp_path):
    """Rank 0 knows of an error, and ends the waits for rank 1; rank 2 does not know of it yet."""
    all_wait, has_gone_on = threading.Barrier(3), threading.Event()

    def body(rank):
        state = committed(rank, gpus, tmp_path, "ipc")
        all_wait.wait(120)
        if rank == 0:
            (team,) = Gpus.of(engine())._teams.values()
            team.transport.release()
        if rank == 2:
            gpus[2].synchronize()
            has_gone_on.set()
        has_gone_on.wait(120)
        if rank == 1:
            raise ValueError("boom")
        with pytest.raises(rc.PeerFailedError):
            state.commit()
        return state.n_commits

    first, lost, third = outcomes(3, body)
    assert isinstance(lost, ValueError)
    assert (first, third) == (1, 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_after_a_loss_sums_are_right_and_nothing_of_the_old_view_is_used(transport, tmp_path):
    """The streams of those that are left wait for the lost rank when it dies."""
    gpus, teams = {}, {}
    all_wait = threading.Barrier(3)

    def old_view(rank):
        gpu = gpus[rank] = begin(rank, tmp_path, **choose(transport))
        x = sim.array(np.full(1000, rank + 1.0))
        rc.allreduce_(x)
        assert (x.get() == 6).all()
        teams[rank] = tuple(Gpus.of(engine())._teams.values())
        if rank == 1 and transport != "staged":
            gpu.freeze()
        if transport != "staged":
            rc.allreduce_async_(x, name="lost").wait()  # the hosts have met, the streams have not
        all_wait.wait(120)
        if rank == 1:
            raise ValueError("boom")
        with pytest.raises(rc.PeerFailedError) as failed:
            rc.allreduce_(sim.array(np.ones(1000)))
        end_view(engine(), failed.value)
        gpu.finish(0)  # no stream waits for the lost rank any more

    first, lost, third = outcomes(3, old_view)
    assert isinstance(lost, ValueError)
    assert (first, third) == (None, None)
    left = [gpus[0], gpus[2]]
    mapped = [set(gpu._mapped) for gpu in left]
    for each in (*teams[0], *teams[2]):
        if transport == "nccl":
            assert each.transport._comm.is_aborted
        forbid(each)

    def new_view(rank):
        gpu = left[rank]
        sim.use(gpu)
        nccl = FakeNccl(gpu, tmp_path) if transport == "nccl" else None
        Gpus.use(engine(), sim.drivers(nccl))
        sums = []
        for step in range(3):
            x = sim.array(np.full(1000 + step, rank + 1.0 + step))
            rc.allreduce_(x)
            sums.append(x.get())
        gpu.synchronize()
        for team in Gpus.of(engine())._teams.values():
            assert not {id(team), id(team.transport)} & {
                id(part)
                for old in teams.values()
                for each in old
                for part in (each, each.transport)
            } - {id(None)}
        assert gpu.failure is None
        return sums

    try:
        for sums in run_ranks(2, new_view):
            for step, each in enumerate(sums):
                assert each.shape == (1000 + step,)
                assert (each == 3.0 + 2 * step).all()
        if transport == "ipc":
            assert all(set(gpu._mapped) > old for gpu, old in zip(left, mapped, strict=True))
    finally:
        for gpu in gpus.values():
            gpu.close()
