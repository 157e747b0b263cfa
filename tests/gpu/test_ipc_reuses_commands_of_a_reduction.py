"""What ipc keeps of a reduction for the next one like it, and what an operation costs its rank."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import simulated_gpu as sim
from gpu_ranks import choose, on_gpus
from harness import wait_until

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.gpu.executor import team as team_module
from ringcomm.gpu.executor.engine_gpus import Gpus
from ringcomm.gpu.executor.team import LaunchOrder
from ringcomm.gpu.executor.watched_stream import WatchedStream
from ringcomm.gpu.transports import ipc_commands
from ringcomm.transport.channel import Until, Wait

BENCH = Path(__file__).parents[2] / "ci" / "bench"


def test_the_commands_of_a_reduction_are_made_once(tmp_path, monkeypatch):
    made, phases = [], ipc_commands.phases
    monkeypatch.setattr(
        ipc_commands,
        "phases",
        lambda work, view: made.append(work) or phases(work, view),
    )

    def body(rank):
        x = rc.zeros(1000, "float32", device="cuda")
        for turn in range(5):
            x.fill(rank + turn)
            rc.allreduce_(x)
            assert x.get().tolist() == [1 + 2 * turn] * 1000

    on_gpus(2, body, tmp_path)
    assert len(made) == 2  # one per rank


def test_a_rank_may_come_with_another_array_each_time(tmp_path):
    def body(rank):
        mine = [rc.zeros(1000, "float32", device="cuda") for _ in range(3)]
        mine += [sim.array(np.zeros(1000, np.float32)) for _ in range(2)]  # private
        for turn in range(12):
            x = mine[turn * rank % len(mine)]  # rank 0 has the same one in each turn
            x.fill(100 * rank + turn)
            rc.allreduce_(x, rc.AVERAGE)
            assert x.get().tolist() == [100 + turn] * 1000, turn

    on_gpus(3, body, tmp_path)


def test_memory_that_is_used_again_holds_the_next_array(tmp_path):
    def body(rank):
        for turn in range(6):
            x = rc.zeros((1 + turn % 2) * 500, "float32", device="cuda")
            x.fill(rank + turn)
            assert rc.allreduce(x).get().tolist() == [1 + 2 * turn] * x.count
            del x

    on_gpus(2, body, tmp_path)


def test_the_measurement_of_an_operation_runs():
    small = ["--operations", "3", "--repeats", "1", "--ranks", "4"]
    command = [sys.executable, "-P", BENCH, "gpu_call_overhead", *small]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    ipc, nccl = done.stdout.splitlines()
    assert ipc.startswith("ipc   N=4: ")
    assert ipc.endswith(" 8.0 calls of CUDA")  # whatever the number of ranks
    assert nccl.endswith(" 6.0 calls of CUDA")


def test_what_is_done_already_is_not_watched():
    tasks = []
    extensions = SimpleNamespace(follow_up=lambda *of, **_: tasks.append(of))
    engine = SimpleNamespace(extensions=extensions)
    stream = WatchedStream(engine, (0,), 0, tuple, lambda *_: None)
    stream.add("done", SimpleNamespace(is_reached=True), None)
    assert (tasks, stream.n_added, stream.earliest()) == ([], 1, None)
    under_way = SimpleNamespace(is_reached=False)
    stream.add("under way", under_way, None)
    assert (len(tasks), stream.n_added, stream.earliest()) == (1, 2, under_way)
    tasks[0][2].close()  # its coroutine


def test_what_is_reached_after_a_release_is_not_done():
    tasks = []
    extensions = SimpleNamespace(follow_up=lambda *of, **_: tasks.append(of))
    engine = SimpleNamespace(extensions=extensions)
    stream = WatchedStream(engine, (0,), 0, tuple, lambda *_: None, is_released=lambda: True)
    reached = SimpleNamespace(is_reached=True)
    stream.add("let go", reached, None)
    assert (len(tasks), stream.earliest()) == (1, reached)
    tasks[0][2].close()  # its coroutine


def test_a_rank_may_begin_an_operation_before_it_has_a_transport(tmp_path, monkeypatch):
    """In the round of the second operation, rank 0 has an outline, and rank 1 has none yet."""
    told, tell, set_up = [], LaunchOrder.place_and_bytes, team_module.set_up_transport

    async def note(order, t, mine):
        told.append((t.rank, mine[0]))
        return await tell(order, t, mine)

    async def set_up_late(provider, engine, memory, t):
        made = await set_up(provider, engine, memory, t)
        if t.rank == 1:
            await Wait((Until(lambda: len([r for r, _ in told if r == 1]) == 2),))
        return made

    monkeypatch.setattr(LaunchOrder, "place_and_bytes", note)
    monkeypatch.setattr(team_module, "set_up_transport", set_up_late)

    def body(rank):
        a, b = (rc.zeros(100, "float32", device="cuda").fill(rank + k) for k in range(2))
        handles = [rc.allreduce_async_(a, name="a")]
        team = Gpus.of(engine()).team(engine().groups.default)
        while rank == 0 and team.transport is None:
            time.sleep(1e-3)  # the background thread sets it up
        handles.append(rc.allreduce_async_(b, name="b"))
        for handle in handles:
            handle.wait()
        return a.get().tolist(), b.get().tolist()

    assert (
        on_gpus(2, body, tmp_path, settings=Settings(timeout_s=20), **choose("ipc"))
        == [([1] * 100, [3] * 100)] * 2
    )
    assert sorted(told) == [(0, 0), (0, 1), (1, 0), (1, 0)]


def test_one_task_watches_all_that_is_under_way(tmp_path):
    names = [f"op {k}" for k in range(5)]

    def body(rank):
        x, gpu = sim.array(np.ones(10)), sim.current_gpu()
        rc.allreduce_(x)
        gpu.synchronize()
        rc.barrier()
        gpu.freeze()
        try:
            handles = [rc.allreduce_async(x, name=name) for name in names]
            wait_until(lambda: all(each.done() for each in handles), "not enqueued")
            seen = labels_as_each_is_done()
            rc.barrier()
        finally:
            gpu.thaw()
        assert sorted(seen) == [f"allreduce[{name}] on the GPU" for name in names]
        sums = [handle.wait().get()[0] for handle in handles]
        wait_until(lambda: not labels(), "a stream is watched for ever")
        memory = Gpus.of(engine()).memory(gpu.index)
        return sums, len(memory.idle_calls._are_idle)

    def labels():
        return [each.task.label for each in engine().pending.operations()]

    def labels_as_each_is_done():
        wait_until(lambda: len(labels()) == 1, lambda: f"{labels()}")
        seen, team = labels(), Gpus.of(engine()).team(engine().groups.default)
        has_gone_on = lambda: labels() != seen[-1:]  # noqa: E731
        for _ in names[1:]:
            mark = team._under_way.earliest()
            mark.marks._word[0] = mark.number  # as the stream writes once it has done that one
            # Sooner than the operation's own deadline, whose error would hide this one.
            wait_until(has_gone_on, "the task has the label of an operation that is done", 20)
            seen += labels()
        return seen

    found = on_gpus(2, body, tmp_path, settings=Settings(timeout_s=60), **choose("ipc"))
    assert found == [([4] * 5, 1)] * 2
