"""Process sets of Horovod: their numbers, their ranks, and collectives among these."""

import pytest
import torch
from harness import outcomes, run_ranks

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.transport.membership.view import View

pytestmark = pytest.mark.usefixtures("wire")


def test_process_sets_are_numbered_alike_and_shared_by_their_ranks():
    def body(rank):
        even = hvd.add_process_set([2, 0])
        odd = hvd.add_process_set(hvd.ProcessSet([1, 3]))
        assert (even.process_set_id, odd.process_set_id) == (1, 2)
        assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2, 3], 1: [0, 2], 2: [1, 3]}
        mine = even if rank % 2 == 0 else odd
        other = odd if mine is even else even
        assert mine.included()
        assert not other.included()
        assert (mine.size(), mine.rank(), other.rank()) == (2, rank // 2, -1)
        with pytest.raises(ValueError, match="not a member"):
            hvd.allreduce(torch.ones(1), process_set=other)
        root = mine.ranks[1]
        return [
            hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=mine).item(),
            hvd.allgather(torch.tensor([rank]), process_set=mine).tolist(),
            hvd.broadcast(torch.tensor([rank]), root, process_set=mine).item(),
        ]

    even, odd, *_ = results = run_ranks(4, body)
    assert even == [2, [0, 2], 2]
    assert odd == [4, [1, 3], 3]
    assert results[2:] == [even, odd]


@pytest.mark.parametrize("ranks", [[2, 0], [0, 1, 2]])
def test_a_second_process_set_of_the_same_ranks_is_refused_on_every_rank(ranks):
    def body(rank):
        some = hvd.add_process_set([0, 2])
        for again in (ranks, hvd.ProcessSet(ranks), *([some] if len(ranks) == 2 else [])):
            with pytest.raises(ValueError, match=r"process_set_id=\d.* has these ranks already"):
                hvd.add_process_set(again)
        assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2]}
        hvd.remove_process_set(some)
        return hvd.add_process_set([0, 2]).process_set_id

    assert run_ranks(3, body) == [2, 2, 2]


@pytest.mark.parametrize(
    ("size", "lists", "at", "error"),
    [
        (2, [[0], [0], [1]], 1, "is a duplicate: .*0"),
        (2, [[0], [1, 0], [1]], 1, "is a duplicate: .*0"),
        (4, [[0, 1], [2, 3], [1, 0]], 2, "is a duplicate: .*0, 1"),
        (4, [[0, 1], [2, 3], [4]], None, "4"),
    ],
)
def test_init_that_refuses_a_process_set_takes_none_of_the_list(size, lists, at, error):
    def body(rank):
        hvd.init(process_sets="Dynamic")
        refused = [hvd.ProcessSet(ranks) for ranks in lists]
        text = error if at is None else f"process_sets entry number {at} {error}"
        with pytest.raises(ValueError, match=text):
            hvd.init(process_sets=refused)
        with pytest.raises(ValueError, match="not in use"):
            hvd.allreduce(torch.ones(1), process_set=refused[0])
        assert hvd.get_process_set_ids_and_ranks() == {0: list(range(size))}
        hvd.init(process_sets=[refused[0], hvd.ProcessSet([1])])
        return hvd.get_process_set_ids_and_ranks()

    valid = {0: list(range(size)), 1: lists[0], 2: [1]}
    assert run_ranks(size, body) == [valid] * size


def test_after_a_first_call_that_nobody_else_makes_the_next_one_says_why():
    def body(rank):
        if rank:
            return None
        errors = []
        for _ in range(2):
            with pytest.raises(rc.RingcommError) as caught:
                hvd.allreduce(torch.ones(1))
            errors.append(str(caught.value))
        return errors

    results = outcomes(2, body, settings=Settings(timeout_s=1))
    first, later = results[0]
    assert "ProcessSet" not in later, results
    assert "rank 1" in first
    assert "rank 1" in later


def test_init_refuses_ranks_that_are_no_process_set():
    def body(rank):
        told = r"must be a hvd.ProcessSet, not \[0\]\. hvd.add_process_set\(ranks\), called on all"
        with pytest.raises(TypeError, match=told):
            hvd.init(process_sets=[[0]])

    run_ranks(2, body)


def test_a_process_set_that_is_removed_is_not_used_again():
    def body(rank):
        some = hvd.add_process_set([0, 1])
        assert hvd.remove_process_set(some)
        assert not hvd.remove_process_set(hvd.global_process_set)
        assert not hvd.remove_process_set(some)
        assert not hvd.remove_process_set(hvd.ProcessSet([0, 1]))
        with pytest.raises(ValueError, match=r"not in use: it was removed.*Pass a new one"):
            hvd.allreduce(torch.ones(1), process_set=some)
        later = [hvd.add_process_set(ranks).process_set_id for ranks in ([0, 1], [1, 2])]
        assert later == [2, 3]
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3

    run_ranks(3, body)


def test_a_process_set_of_an_earlier_init_removes_no_other_of_its_id():
    old = run_ranks(3, lambda _: hvd.add_process_set([0, 1]))

    def body(rank):
        assert hvd.add_process_set([1, 2]).process_set_id == old[rank].process_set_id
        assert not hvd.remove_process_set(old[rank])
        return hvd.get_process_set_ids_and_ranks()

    assert run_ranks(3, body) == [{0: [0, 1, 2], 1: [1, 2]}] * 3


def test_ranks_that_add_different_process_sets_all_hear_of_it():
    def body(rank):
        hvd.init()
        with pytest.raises(rc.MismatchError, match=r"rank 0 adds ranks \[0\], rank 1 adds \[1\]"):
            hvd.add_process_set([rank])
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert run_ranks(2, body) == [2, 2]


def add(some):
    hvd.add_process_set([0, 1])


@pytest.mark.parametrize(("change", "verb"), [(add, "add"), (hvd.remove_process_set, "remove")])
def test_process_sets_are_not_changed_while_a_rank_is_in_join(change, verb):
    def body(rank):
        some = hvd.add_process_set([1, 2])
        if rank != 2:
            with pytest.raises(rc.MismatchError, match=rf"ranks \[2\] are in join\(\).* {verb} a"):
                change(some)
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        hvd.join()
        change(some)
        return hvd.get_process_set_ids_and_ranks(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    sets = {0: [0, 1, 2], 1: [1, 2], 2: [0, 1]} if change is add else {0: [0, 1, 2]}
    assert run_ranks(3, body) == [(sets, 3)] * 3


def test_ranks_that_add_and_remove_all_hear_of_it():
    def body(rank):
        some = hvd.add_process_set([0])
        text = r"rank 0 removes ranks \[0\], rank 1 adds \[0\]"
        with pytest.raises(rc.MismatchError, match=text):
            hvd.remove_process_set(some) if rank == 0 else hvd.add_process_set([0])
        return hvd.get_process_set_ids_and_ranks()

    assert run_ranks(2, body) == [{0: [0, 1], 1: [0]}] * 2


def test_in_another_view_a_process_set_is_over_and_nobody_waits_or_trains_alone():
    models = [torch.nn.Linear(2, 1) for _ in range(4)]
    sets, optimizers = [None] * 4, [None] * 4

    def wrapped(model, process_set):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return hvd.DistributedOptimizer(sgd, model.named_parameters(), process_set=process_set)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    def train(rank):
        sets[rank] = hvd.add_process_set([0, 2])
        optimizers[rank] = wrapped(models[rank], sets[rank])
        step(models[rank], optimizers[rank])

    run_ranks(4, train)

    def go_on(rank):  # without process 1: ranks 0 and 2 are others now
        process = rank + (rank > 0)
        engine().transport.view = View(1, (0, 2, 3))
        old, optimizer, model = sets[process], optimizers[process], models[process]
        optimizer._reducer.begin_view()
        if rank == 0:  # the others do not take part
            for use in (
                old.included,
                lambda: hvd.allreduce(torch.ones(1), process_set=old),
                lambda: step(model, optimizer),
            ):
                with pytest.raises(ValueError, match=r"ranks=\[0, 2\].* is of view 0 .* in view 1"):
                    use()
        rc.barrier()
        step(model, wrapped(model, hvd.add_process_set([0, 2])))
        return hvd.add_process_set([1, 2]).ranks, hvd.add_process_set(hvd.ProcessSet([1])).rank()

    sets[1] = optimizers[1] = None
    assert run_ranks(3, go_on) == [([1, 2], -1), ([1, 2], 0), ([1, 2], -1)]


def test_a_communicator_that_is_added_again_stands_for_the_numbers_of_its_processes_today():
    class Comm:
        """An mpi4py communicator of processes 0 and 2, or 1 and 3; the wire has none."""

        def Get_group(self):
            """Not called."""

    sets = [hvd.ProcessSet(Comm()) for _ in range(4)]

    def add(rank):
        engine().transport.ranks_of = lambda _: (rank % 2, rank % 2 + 2)
        return hvd.add_process_set(sets[rank]).ranks

    def add_again(rank):  # without process 1
        engine().transport.view = View(1, (0, 2, 3))
        engine().transport.ranks_of = lambda _: (0, 1) if rank < 2 else (2,)
        return hvd.add_process_set(sets[rank + (rank > 0)]).ranks

    assert run_ranks(4, add) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert run_ranks(3, add_again) == [[0, 1], [0, 1], [2]]


@pytest.mark.parametrize("ranks", [[0, 5], [0, 0], []])
def test_process_sets_of_ranks_that_do_not_exist_are_refused(ranks):
    def body(rank):
        with pytest.raises(ValueError, match="rank"):
            hvd.add_process_set(ranks)

    run_ranks(2, body)


def test_a_root_outside_the_process_set_is_refused():
    def body(rank):
        some = hvd.add_process_set([0, 1])
        if rank < 2:
            with pytest.raises(ValueError, match="root_rank is 2"):
                hvd.broadcast(torch.ones(1), 2, process_set=some)
            with pytest.raises(hvd.HorovodInternalError, match="rank 1 could not take part"):
                hvd.broadcast(torch.ones(1), 2 * rank, process_set=some)

    run_ranks(3, body)
