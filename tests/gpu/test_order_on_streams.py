"""What is ordered by events and flags: right under any schedule, and wrong without each of them."""

import contextlib
import threading

import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import TRANSPORTS, choose, on_gpus
from harness import at_length
from sample_values import total as total_of
from sample_values import whole_numbers

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.gpu.executor import host_staging
from ringcomm.gpu.executor import team as gpu_team
from ringcomm.gpu.executor.streams import Issue, Launched, Reached
from ringcomm.gpu.transports import ipc, slices

SIZE = 3
SEEDS = 25
MOST_SEEDS = 250  # of which one at least must show a fault


def busy(rank):
    """Keep the streams full, drop what can be dropped, and return what came of it."""
    sums, total = [], sim.array(whole_numbers(rank, 600, "f8"))
    own = rc.zeros(600, "float64", device="cuda")
    for turn in range(4):
        x = sim.array(np.arange(600.0) * (turn + 1) + rank)
        handle = rc.allreduce_async(x, name=f"sum {turn % 2}")
        del x  # its memory is another's from now on
        own.fill_later(whole_numbers(rank, 600, "f8", turn=turn))
        rc.allreduce_(own)
        with sim.on_stream(own.gpu.new_stream()):
            mean = rc.allreduce(sim.array(np.full(50, float(rank))), rc.AVERAGE)
            sums.append(mean.get())
        sums += [handle.wait().get(), own.get()]
        total = rc.allreduce(total)
        rows = rc.allgather(sim.array(whole_numbers(rank, 10, "i2", turn=turn).reshape(5, 2)))
        sums.append(rows.get())
        sums.append(np.stack([out.get() for out in passed_round(rank)]))
    return [*sums, total.get()]


def passed_round(rank):
    """Return what the left neighbour has sent, in several messages at once."""
    right, left = (rank + 1) % SIZE, (rank - 1) % SIZE
    outs = [sim.array(np.zeros(700)) for _ in range(4)]
    for tag, out in enumerate(outs):
        rc.sendrecv(sim.array(whole_numbers(rank, 700, "f8", turn=tag)), right, out, left)
    return outs


def is_passed_round(rank, got):
    left = (rank - 1) % SIZE
    return np.array_equal(got, [whole_numbers(left, 700, turn=tag) for tag in range(4)])


def expected():
    wanted = []
    for turn in range(4):
        wanted += [
            np.full(50, 1.0),
            SIZE * np.arange(600.0) * (turn + 1) + 3,
            total_of(SIZE, 600, turn=turn),
            np.concatenate([whole_numbers(r, 10, "i2", turn=turn) for r in range(SIZE)]).reshape(
                15, 2
            ),
            None,  # another one on each rank
        ]
    return [*wanted, total_of(SIZE, 600) * SIZE**3]


def is_right(seed, folder, transport, **options):
    results = on_gpus(SIZE, busy, folder, seed=seed, **choose(transport), **options)
    wanted = expected()
    return all(
        is_passed_round(rank, got) if want is None else np.array_equal(got, want)
        for rank, result in enumerate(results)
        for got, want in zip(result, wanted, strict=True)
    )


@pytest.fixture(autouse=True)
def small_staging(monkeypatch):
    monkeypatch.setattr(slices, "STAGING_NBYTES", 4096)
    monkeypatch.setattr(host_staging, "PIECE_NBYTES", 1024)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", at_length(range(SEEDS), range(2)))
def test_any_schedule_of_the_streams_gives_the_same(seed, transport, tmp_path):
    assert is_right(seed, tmp_path, transport)


@pytest.mark.parametrize("seed", at_length(range(SEEDS), range(2)))
def test_hosts_meet_where_streams_cannot(seed, tmp_path):
    assert is_right(seed, tmp_path, "ipc", has_stream_values=False)


def _never(*_args, **_kwargs):
    return None


def _one_phase(phases):
    def wrapper(self, work, outlines):
        for number, _ in enumerate(phases(self, work, outlines)):
            if number != 0:
                yield

    return wrapper


def _last_phase_missing(phases):
    def wrapper(self, work, outlines):
        steps = list(range(2))
        for number, _ in enumerate(phases(self, work, outlines)):
            if number % 2 == steps[0]:
                yield

    return wrapper


def _unkept(watch):
    def wrapper(self, stream, t, launched, keeps):
        return watch(self, stream, t, launched, ())

    return wrapper


def _no_event(empty):
    def wrapper(self, like, shape):
        made = empty(self, like, shape)
        del self.ready[1:]
        return made

    return wrapper


MUTANTS = {
    "the stream does not wait for the caller's": ("ipc", Issue, "let_wait", lambda f: _never),
    "the caller's stream does not wait for the result": ("ipc", Launched, "take", lambda f: (
        lambda self: self._result)),
    "flags are not awaited": ("ipc", sim.SimulatedGpu, "await_value", lambda f: _never),
    "ranks read before all have staged": ("ipc", ipc.IpcTransport, "phases", _one_phase),
    "ranks go on before all have read": ("ipc", ipc.IpcTransport, "phases", _last_phase_missing),
    "arrays are dropped while the stream uses them": ("ipc", gpu_team.GpuTeam, "_watch", _unkept),
    "nccl: the caller's stream does not wait": ("nccl", Launched, "take", lambda f: (
        lambda self: self._result)),
    "nccl: the stream does not wait for the caller's": (
        "nccl", Issue, "let_wait", lambda f: _never),
    "nccl: dropped early": ("nccl", gpu_team.GpuTeam, "_watch", _unkept),
    "staged: the host reads what has not come": ("staged", Reached, "test", lambda f: (
        lambda self: True)),
    "staged: the result is used before it has come": ("staged", Launched, "take", lambda f: (
        lambda self: self._result)),
    "staged: dropped early": ("staged", gpu_team.GpuTeam, "_watch", _unkept),
}  # fmt: skip


@pytest.mark.parametrize("fault", at_length(MUTANTS, list(MUTANTS)[2::4]))  # one of each transport
def test_each_missing_order_is_seen(fault, tmp_path, monkeypatch):
    transport, owner, name, change = MUTANTS[fault]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    for seed in range(MOST_SEEDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with contextlib.suppress(AssertionError):
            if is_right(seed, folder, transport):
                continue
        return
    raise AssertionError(f"no schedule of {MOST_SEEDS} shows that {fault}")


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@pytest.mark.parametrize("nvtx", [0, 1])
def test_a_profiler_is_shown_the_operations_if_it_wants(nvtx, transport, tmp_path):
    def body(rank):
        rc.allreduce_async_(sim.array(np.ones(3)), name="loss").wait()
        return sim.current_gpu().ranges

    settings = Settings(nvtx=nvtx)
    for ranges in on_gpus(2, body, tmp_path, settings=settings, **choose(transport)):
        assert ranges == ([("allreduce_[loss]", True)] if nvtx else [])


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_no_host_waits_for_a_gpu(transport, tmp_path):
    """With all GPUs standing still calls and waits return: what is to be done is on streams."""

    def body(rank):
        x = sim.array(np.full(600, rank + 1.0))
        rc.allreduce_(x)  # the first one founds the team
        x.gpu.finish()
        rc.barrier()
        x.gpu.freeze()
        handles = [rc.allreduce_async_(x, name=f"bucket {i}") for i in range(3)]
        rows = rc.allgather(x)
        for handle in handles:
            handle.wait()
        n_done = x.gpu.n_done
        rc.barrier()
        assert x.gpu.n_done == n_done
        x.gpu.thaw()
        return x.get()[0], rows.get()[-1]

    for first, last in on_gpus(SIZE, body, tmp_path, **choose(transport)):
        assert first == 6 * SIZE**3
        assert last in {6 * SIZE**k for k in range(4)}  # by the order in which they were launched


def gather_into_dropped_memory(folder, seed):
    """Return what is gathered, when the result's memory is of an array that is still written to."""
    is_dropped = threading.Event()

    def body(rank):
        x = sim.array(np.full(300, float(rank)))
        rc.allgather(x)
        x.gpu.finish()
        if rank == 1:
            assert is_dropped.wait(120)
            return rc.allgather(x).get()
        x.gpu.freeze()
        late = rc.allgather_async(x)  # has no memory yet: rank 1 has not come
        dropped = sim.array(np.zeros(600))
        for value in range(5):
            dropped.fill(value)
        del dropped
        is_dropped.set()
        result = late.wait()
        x.gpu.thaw()
        return result.get()

    return on_gpus(2, body, folder, seed=seed, **choose("ipc"))


@pytest.mark.parametrize("has_event", [True, False])
def test_results_come_behind_what_their_memory_was_before(has_event, tmp_path, monkeypatch):
    if not has_event:
        monkeypatch.setattr(Issue, "empty", _no_event(Issue.empty))
    wanted, seen = np.repeat([0.0, 1.0], 300), []
    for seed in range(20):
        (tmp_path / str(seed)).mkdir()
        got = gather_into_dropped_memory(tmp_path / str(seed), seed)
        seen.append(all(np.array_equal(each, wanted) for each in got))
        if not all(seen):
            break
    assert all(seen) == has_event
