"""Collectives on arrays of simulated GPUs: the real engine, ranks as threads or as processes."""

import time
from functools import partial

import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import TRANSPORTS, choose, on_gpus, with_fault
from harness import at_length
from loopback import LoopbackTransport
from random_programs import make_program, run_program
from sample_values import total as total_of
from sample_values import whole_numbers
from simulated_nccl import FakeCommunicator

import ringcomm as rc
from ringcomm.collectives.message_patterns import chunks
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.operations.adasum import plan_adasum
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.grouped import plan_grouped_allreduce
from ringcomm.engine.operations.into_array import plan_allgather_into
from ringcomm.engine.operations.reduce_scatter import plan_reduce_scatter
from ringcomm.gpu.executor import plans, team
from ringcomm.gpu.executor.engine_gpus import Gpus
from ringcomm.gpu.transports import slices
from ringcomm.gpu.transports.ipc import IpcTransport
from ringcomm.gpu.transports.nccl import NcclTransport
from ringcomm.transport.tags import TagLayout

COUNTS = (3, 70_000, 1)
SCALED = ReductionOptions().scaled(2, 0.25)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_allreduce_has_the_bits_of_the_sum_in_rank_order(size, transport, tmp_path):
    def body(rank):
        values = np.random.default_rng(rank).standard_normal(1000).astype(np.float32)
        x = sim.array(values)
        return rc.allreduce(x, deterministic=True).get(), x.get()

    expected = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for rank in range(1, size):
        expected += np.random.default_rng(rank).standard_normal(1000).astype(np.float32)
    for rank, (total, x) in enumerate(on_gpus(size, body, tmp_path, **choose(transport))):
        assert np.array_equal(total, expected)
        assert np.array_equal(x, np.random.default_rng(rank).standard_normal(1000).astype("f4"))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", at_length(range(12), range(3)))
def test_random_programs_agree_with_numpy(seed, transport, tmp_path):
    size = 1 + seed % 4 if seed > 3 else 4 - seed
    program = make_program(1000 * size + seed, size)
    body = lambda rank: run_program(program, rank, seed, sim.Simulated())  # noqa: E731
    on_gpus(size, body, tmp_path, seed=seed, **choose(transport))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_scaled_and_grouped_reductions(transport, tmp_path):
    def body(rank):
        xs = [sim.array(whole_numbers(rank, n)) for n in COUNTS]
        xs.append(sim.array(np.full(5, rank, np.int32)))
        totals = rc.grouped_allreduce(xs)
        rows = rc.grouped_reduce_scatter([sim.array(np.arange(6.0) + rank)])
        every = rc.grouped_allgather([sim.array(np.full((rank, 2), rank))])
        plan = partial(plan_allreduce, name=None, x=xs[0], options=SCALED)
        scaled = engine().execute("allreduce", None, plan)
        return [[x.get() for x in each] for each in (totals, rows, every, [scaled])]

    for rank, (totals, rows, every, scaled) in enumerate(
        on_gpus(3, body, tmp_path, **choose(transport))
    ):
        for n, got in zip(COUNTS, totals, strict=False):
            assert np.array_equal(got, total_of(3, n))
        assert totals[3].tolist() == [3] * 5
        assert rows[0].tolist() == (3 * np.arange(6) + 3)[2 * rank : 2 * rank + 2].tolist()
        assert every[0].tolist() == [[1, 1], [2, 2], [2, 2]]
        assert np.array_equal(scaled[0], total_of(3, COUNTS[0]) / 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_factors_give_the_bits_of_host_memory(transport, tmp_path, caplog):
    factors = ReductionOptions(rc.SUM, deterministic=True).scaled(1 / 3, 0.7)
    told = "factors of integers and complex numbers are applied by the CPU"

    def body(rank):
        floats = [of_dtype(rank, dtype) for dtype in ("f2", "f8")]
        rc.barrier()
        is_early = told in caplog.text
        rc.barrier()
        return [*floats, of_dtype(rank, "i4")], is_early

    def of_dtype(rank, dtype):
        xs = [np.random.default_rng([rank, n]).normal(0, 99, n).astype(dtype) for n in (700, 0, 9)]
        results = []
        for of in (sim.array, lambda x: x):
            forms = [
                ("allreduce", partial(plan_allreduce, x=of(xs[0].copy()), in_place=True)),
                ("allreduce", partial(plan_allreduce, x=of(xs[0]))),
                ("reduce_scatter", partial(plan_reduce_scatter, x=of(xs[0]))),
                ("grouped_allreduce", partial(plan_grouped_allreduce, xs=[of(x) for x in xs])),
            ]
            got = [
                engine().execute(kind, None, partial(form, name=None, options=factors))
                for kind, form in forms
            ]
            got = [*got[:-1], *got[-1]]
            results.append([x if isinstance(x, np.ndarray) else x.get() for x in got])
        return results

    for of_dtypes, is_early in on_gpus(3, body, tmp_path, **choose(transport)):
        assert not is_early, "floats have been told of"
        for on_gpu, on_host in of_dtypes:
            assert [x.tobytes() for x in on_gpu] == [x.tobytes() for x in on_host]
    assert (told in caplog.text) == (transport != "staged")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_scans_go_through_host_memory_in_pieces(transport, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("ringcomm.gpu.executor.host_staging.PIECE_NBYTES", 4096)

    def body(rank):
        x = sim.array(whole_numbers(rank, 5000))
        handle = rc.exscan_async(x, name="n")
        return [each.get() for each in (rc.scan(x), handle.wait(), rc.exscan(x, rc.MIN), x)]

    for rank, (inclusive, exclusive, lowest, x) in enumerate(
        on_gpus(3, body, tmp_path, **choose(transport))
    ):
        assert np.array_equal(inclusive, total_of(rank + 1, 5000))
        assert np.array_equal(exclusive, total_of(rank, 5000) if rank else np.zeros(5000))
        assert np.isinf(lowest).all() == (rank == 0)
        assert np.array_equal(x, whole_numbers(rank, 5000))
    told = "an operation on a GPU goes through host memory: transports of GPUs do not compute scans"
    assert caplog.text.count(told) == (transport != "staged")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_arrays_that_others_map_are_reduced_where_they_stand(transport, tmp_path, monkeypatch):
    monkeypatch.setattr("ringcomm.gpu.transports.slices.STAGING_NBYTES", 4096)

    def body(rank):
        x = rc.zeros((5, 1000), "float32", device="cuda")
        x.fill_later(whole_numbers(rank, 5000).reshape(5, 1000))
        assert rc.allreduce_(x) is x
        part = rc.reduce_scatter_(x)
        whole = rc.allgather(part)
        mean = rc.allreduce(sim.array(np.arange(5000.0)), rc.AVERAGE)
        return x.get(), part.get(), whole.get(), mean.get()

    for rank, (x, part, whole, mean) in enumerate(on_gpus(4, body, tmp_path, **choose(transport))):
        expected = 4 * total_of(4, 5000).reshape(5, 1000)
        own = np.array_split(np.arange(5), 4)[rank]
        assert np.array_equal(part, expected[own])
        assert np.array_equal(whole, expected)
        assert np.array_equal(mean, np.arange(5000.0))
        assert np.array_equal(x[own], expected[own])


@pytest.mark.parametrize("in_place", [False, True])
def test_owners_combine_in_passes_that_need_little_memory(in_place, tmp_path, monkeypatch):
    monkeypatch.setattr("ringcomm.gpu.transports.slices.STAGING_NBYTES", 4096)

    def body(rank):
        taken = []
        regions = sim.current_gpu().regions
        take = regions.take
        regions.take = lambda nbytes, *of: taken.append(nbytes) or take(nbytes, *of)
        results = []
        for count, dtype in [(9001, "f2"), (3, "f2"), (2500, "f4")]:
            values = [whole_numbers(r, count, dtype) for r in range(3)]
            x = sim.array(values[rank])
            form = rc.allreduce_ if in_place else rc.allreduce
            total = form(x, rc.MAX)
            at_root = rc.reduce(sim.array(values[rank]), rc.MAX, root=1)
            rows = rc.reduce_scatter(sim.array(np.resize(values[rank], (count, 2))), rc.MAX)
            results.append((total.get(), at_root and at_root.get(), rows.get()))
        return results, max(taken)

    for rank, (results, most) in enumerate(on_gpus(3, body, tmp_path, **choose("nccl"))):
        assert most <= 4096
        for (total, at_root, rows), (count, dtype) in zip(
            results, [(9001, "f2"), (3, "f2"), (2500, "f4")], strict=True
        ):
            largest = np.max([whole_numbers(r, count, dtype) for r in range(3)], axis=0)
            assert np.array_equal(total, largest)
            assert (at_root is not None) == (rank == 1)
            assert at_root is None or np.array_equal(at_root, largest)
            whole = np.resize(largest, (count, 2))
            assert np.array_equal(rows, whole[np.array_split(np.arange(count), 3)[rank]])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_go_from_rank_to_rank(transport, tmp_path):
    def body(rank):
        out = sim.array(np.zeros(9))
        right, left = (rank + 1) % 3, (rank - 1) % 3
        source = rc.sendrecv(sim.array(whole_numbers(rank, 9, "f8")), right, out, left)
        return source, out.get()

    for rank, (source, out) in enumerate(on_gpus(3, body, tmp_path, **choose(transport))):
        assert source == (rank - 1) % 3
        assert np.array_equal(out, whole_numbers(source, 9))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_adasum_is_that_of_host_memory(in_place, transport, tmp_path):
    def body(rank):
        values = [np.random.default_rng([rank, n]).standard_normal(n) for n in (5, 0, 1000)]
        values[2] = values[2].astype(np.float16)
        results = []
        for xs in (values, [sim.array(x) for x in values]):
            plan = partial(plan_adasum, name="a", xs=xs, in_place=in_place, options=SCALED)
            results.append(engine().execute("adasum", "a", plan))
            assert [a is b for a, b in zip(results[-1], xs, strict=True)] == [in_place] * 3
        of_integers = partial(
            plan_adasum, name="b", xs=[sim.array(np.ones(2, np.int32))], options=SCALED
        )
        with pytest.raises(TypeError, match="Adasum of int32 has no meaning"):
            engine().execute("adasum", "b", of_integers)
        rc.join()
        return results[0], [x.get() for x in results[1]]

    for host, device in on_gpus(3, body, tmp_path, **choose(transport)):
        for a, b in zip(host, device, strict=True):
            assert a.dtype == b.dtype
            assert np.array_equal(a, b)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_has_joined_stands_in(transport, tmp_path):
    def body(rank):
        if rank == 2:
            return rc.join(), None
        total = rc.allreduce(sim.array(np.full(4, rank + 1.0)))
        lowest = rc.allreduce(sim.array(np.full(4, rank + 1.0)), rc.MIN, name="lowest")
        rows = rc.allgather(sim.array(np.full((1, 2), rank)))
        plan = partial(
            plan_adasum, name="apart", xs=[sim.array(np.eye(2)[rank])], options=ReductionOptions()
        )
        (apart,) = engine().execute("adasum", "apart", plan)
        return rc.join(), [each.get().ravel().tolist() for each in (total, lowest, rows, apart)]

    results = on_gpus(3, body, tmp_path, **choose(transport))
    for _, values in results[:2]:
        assert values == [[3.0] * 4, [1.0] * 4, [0, 0, 1, 1], [1, 1]]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_factor_changes_what_a_rank_gives_that_has_joined(transport, tmp_path):
    how = ReductionOptions(rc.MAX).scaled(-1, 1)

    def body(rank):
        results = []
        for dtype in ("f4", "i4") if rank < 2 else ():
            x = sim.array(np.array([3, -5, 2 + rank], dtype))
            whole = partial(plan_allreduce, name=None, x=x, options=how)
            several = partial(plan_grouped_allreduce, name=None, xs=[x, x], options=how)
            rows = partial(plan_reduce_scatter, name=None, x=x, options=how)
            rc.grouped_allreduce([x, x], rc.MAX)  # the next call needs the kernel of factors alone
            results += [
                *engine().execute("grouped_allreduce", None, several),
                engine().execute("allreduce", None, whole),
                engine().execute("reduce_scatter", None, rows),
            ]
        return rc.join(), [x.get().tolist() for x in results]

    for rank, (_, results) in enumerate(on_gpus(3, body, tmp_path, **choose(transport))[:2]):
        largest = [-3, 5, -2]
        assert results == [*[largest] * 3, largest[rank : rank + 1]] * 2


def test_ranks_that_pass_other_kinds_of_arrays_are_told(tmp_path):
    def body(rank):
        x = np.ones(3, "f4")
        with pytest.raises(rc.MismatchError) as caught:
            rc.allreduce(x if rank == 1 else sim.array(x), name="loss")
        assert rc.allreduce(sim.array(x)).get().tolist() == [2.0] * 3  # the engine works on
        return str(caught.value)

    texts = on_gpus(2, body, tmp_path)
    assert texts[0] == texts[1]
    assert "allreduce[loss]: rank 0 sent float32 (3,) on a GPU" in texts[0]
    assert "rank 1 sent float32 (3,) in host memory" in texts[0]


def test_calls_that_differ_take_no_place_among_the_launches(tmp_path):
    def body(rank):
        x = sim.array(np.ones(3, "f4"))
        rc.allreduce(x)
        rc.allreduce(x, name="known")
        for name in (None, "known"):
            for _ in range(2):
                with pytest.raises(rc.MismatchError):
                    rc.allreduce(sim.array(np.ones(2 + rank, "f4")), name=name)
                assert rc.allreduce(x).get().tolist() == [3.0] * 3
                assert rc.allreduce(x, name=f"after {name}").get().tolist() == [3.0] * 3

    on_gpus(3, body, tmp_path)


def test_who_cannot_prepare_a_call_hears_first_that_the_calls_differ(tmp_path, monkeypatch):
    async def prepare(transport, jobs, launcher, *, as_ever=team.prepare):
        if jobs[0].work.source.count == 5:
            raise MemoryError("no room")
        return await as_ever(transport, jobs, launcher)

    monkeypatch.setattr(team, "prepare", prepare)

    heard = []

    def body(rank, gpu):
        x = sim.array(np.ones(3, "f4"))
        rc.allreduce(x)
        with pytest.raises(rc.MismatchError):
            rc.allreduce(sim.array(np.ones(5 + rank, "f4")))
        assert rc.allreduce(x).get().tolist() == [2.0] * 3
        heard.append(rank)
        rc.allreduce(sim.array(np.ones(5, "f4")))

    errors = with_fault(2, body, tmp_path, **choose("ipc"))
    assert sorted(heard) == [0, 1], errors
    kinds = {type(each) for each in errors}  # one may hear first that the other has failed
    assert MemoryError in kinds <= {MemoryError, rc.PeerFailedError}, errors


def test_operations_go_on_after_one_whose_kernel_cannot_be_compiled(tmp_path, monkeypatch):
    async def load(loaded, todo, *others, as_ever=team.LoadedKernels.load):
        if todo[0].work.source.count == 5:
            raise rc.ConfigError("the compiler is too old")
        await as_ever(loaded, todo, *others)

    monkeypatch.setattr(team.LoadedKernels, "load", load)

    def body(rank):
        x = sim.array(np.ones(3, "f4"))
        for name in (None, "known"):
            rc.allreduce(x, name=name)
            for _ in range(2):
                with pytest.raises(rc.ConfigError, match="too old"):
                    rc.allreduce(sim.array(np.ones(5, "f4")))
                assert rc.allreduce(x, name=name).get().tolist() == [2.0] * 3

    on_gpus(2, body, tmp_path, **choose("ipc"))


def test_named_operations_may_be_started_in_any_order(tmp_path):
    def body(rank):
        arrays = {name: sim.array(np.full(1000, i + rank)) for i, name in enumerate("abcdef")}
        for turn in range(3):  # from the second on the names are known
            order = sorted(arrays, reverse=(rank + turn) % 2)
            handles = {n: rc.allreduce_async(arrays[n], name=n) for n in order}
            got = {n: handles[n].wait().get()[0] for n in "abcdef"}
            assert got == {name: 4 * i + 6 for i, name in enumerate("abcdef")}

    for seed in range(3):
        on_gpus(4, body, tmp_path, seed=seed)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_transport_is_a_route_of_its_own(transport, tmp_path, monkeypatch):
    taken = set()

    def note(name, carried_out):
        return lambda *args, **options: taken.add(name) or carried_out(*args, **options)

    monkeypatch.setattr(NcclTransport, "phases", note("nccl", NcclTransport.phases))
    monkeypatch.setattr(IpcTransport, "phases", note("ipc", IpcTransport.phases))
    monkeypatch.setattr(plans, "through_host", note("staged", plans.through_host))

    def body(rank):
        before = str(rc.explain(1 << 20, device="cuda"))
        rc.allreduce(sim.array(np.ones(3)))
        return before, str(rc.explain(1 << 20, device="cuda"))

    before, after = on_gpus(2, body, tmp_path, **choose(transport))[1]
    assert taken == {transport}
    assert before.startswith("arrays on GPUs: not chosen yet")
    assert after.startswith(f"arrays on GPUs: {transport}, the first usable of nccl, ipc, staged")
    assert ("nccl: no, rank 0: there is no NCCL" in after) is (transport != "nccl")


def test_what_the_user_wants_and_cannot_be_is_an_error_on_all_ranks(tmp_path):
    def body(rank):
        for _ in range(2):
            with pytest.raises(
                rc.ConfigError, match="GPU_TRANSPORT is nccl, which cannot be used: rank"
            ):
                rc.allreduce(sim.array(np.ones(3)))
        return rc.allreduce(np.ones(3))[0]  # the engine works on

    assert on_gpus(2, body, tmp_path, settings=Settings(gpu_transport="nccl")) == [2, 2]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("is_own_part", [False, True])
def test_allgather_into_fills_what_is_passed(is_own_part, transport, tmp_path):
    counts = [3, 0, 500]

    def body(rank):
        whole = sim.array(np.full(503, -99.0))
        start = sum(counts[:rank])
        part = whole[start : start + counts[rank]]
        values = whole_numbers(rank, counts[rank], "f8")
        x = part.fill_later(values) if is_own_part else sim.array(values)
        plan = lambda g: plan_allgather_into(g, None, whole, x, counts)  # noqa: E731
        return engine().execute("allgather_into", None, plan).get()

    for got in on_gpus(3, body, tmp_path, **choose(transport)):
        expected = [whole_numbers(r, n) for r, n in enumerate(counts)]
        assert np.array_equal(got, np.concatenate(expected))


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_nothing_of_many_groups_is_left_on_the_gpu(transport, tmp_path, monkeypatch):
    """Few contexts, each used again and again; what is under way outlasts its group's reference."""
    monkeypatch.setattr(LoopbackTransport, "tags", TagLayout((1 << 22) - 1, 6, 1 << 16))
    destroyed = []
    monkeypatch.setattr(FakeCommunicator, "comm_destroy", lambda self: destroyed.append(id(self)))
    ranks = ([0, 1, 2], [2, 0], [1, 2])
    n_each = at_length(17, 7)

    def values(rank, index):
        return np.random.default_rng([rank, index]).integers(0, 999, 1 + 173 * index).astype("f4")

    def held(gpu):
        others = [len(each) for each in (gpu._streams, gpu._mapped, gpu.registered)]
        return len(Gpus.of(engine())._teams), len(engine().extensions._entered), *others

    def body(rank):
        gpu = sim.current_gpu()
        rc.allreduce(sim.array(np.ones(5, "f4")))
        before = held(gpu)
        for index in range(3 * n_each):
            members = ranks[index % len(ranks)]
            group = rc.Group(members) if rank in members else None
            if group is None:
                continue
            total = rc.allreduce_async(sim.array(values(rank, index)), group=group)
            del group
            expected = sum(values(each, index) for each in members)
            assert np.array_equal(total.wait().get(), expected), index
            del total
        deadline = time.monotonic() + 60
        while rc.allreduce(np.array([held(gpu) != before]), op=rc.MAX).item():
            assert time.monotonic() < deadline, (before, held(gpu))
            time.sleep(0.01)  # the last of the groups are over once all have heard of it
        return len(gpu.regions._memories)

    n_allocated = on_gpus(3, body, tmp_path, **choose(transport))
    assert max(n_allocated) < 12  # which the groups used in turn
    assert len(destroyed) == ((3 + 2 + 2) * n_each if transport == "nccl" else 0)


@pytest.mark.parametrize(
    ("n_gpus", "is_mapped"), [(1, True), (1, False), (2, True), (2, False), (4, True)]
)
def test_one_rank_of_each_gpu_reduces(n_gpus, is_mapped, tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "STAGING_NBYTES", 1 << 14)  # an array takes several passes
    count = 20_011

    def body(rank):
        gpu = sim.current_gpu()
        gpu.uuid, gpu.reaches = f"gpu-{rank % n_gpus}", tuple(f"gpu-{k}" for k in range(n_gpus))
        x = sim.array(whole_numbers(rank, count, "f4"))
        if is_mapped:
            y = rc.zeros(count, "float32", device="cuda").fill_later(
                whole_numbers(rank, count, "f4")
            )
            x = y
        total, first = rc.allreduce(x), rc.reduce(x, root=3)
        gpu.synchronize()
        n_before = gpu.n_reductions
        part = rc.reduce_scatter(x)
        assert np.array_equal(x.get(), whole_numbers(rank, count, "f4"))
        in_place = rc.reduce_scatter_(x)
        gpu.synchronize()
        scattered = gpu.n_reductions - n_before
        parts = part.get(), in_place.get()
        return total.get(), first and first.get(), parts, n_before, scattered

    found = on_gpus(4, body, tmp_path, **choose("ipc"))
    total = total_of(4, count, "f4")
    for rank, (whole, first, parts, n_reduced, n_scattered) in enumerate(found):
        assert np.array_equal(whole, total)
        assert (first is None) if rank != 3 else np.array_equal(first, total)
        for part in parts:
            assert np.array_equal(part, total[chunks(count, 4)[rank]])
        assert (n_reduced > 0) == (n_scattered > 0) == (rank < n_gpus)
