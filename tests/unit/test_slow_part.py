"""Who is slow in which part of a step is told from the latest steps; nobody in a balanced job."""

import random

import pytest

from ringcomm.launch.watch.diagnosis import OWN_PARTS, slow_parts, slow_server

MS = 1_000_000


def steps_of(durations_ms, no_core_ms=None, first=0):
    """Return steps as a page has them; durations_ms: of each step, those of its 4 parts."""
    found, now = [], 10**12
    for number, parts in enumerate(durations_ms, first):
        marks = [now]
        for part in parts:
            marks.append(marks[-1] + int(part * MS))
        now = marks[-1]
        missing = (0, 0, 0, 0) if no_core_ms is None else no_core_ms[number - first]
        found.append((number, tuple(marks), tuple(int(each * MS) for each in missing)))
    return found


def job(size, n=40, *, late=(), noise_ms=3.0, seed=0, exchange_ms=5.0):
    """Return steps of a job; late: (rank, part, ms) that a rank takes more in a part."""
    rng = random.Random(seed)
    rows = [
        [
            [10 + rng.random() * noise_ms, 20 + rng.random() * noise_ms, 0, 3 + rng.random()]
            for _ in range(size)
        ]
        for _ in range(n)
    ]
    for row in rows:
        for rank, part, ms in late:
            row[rank][part] += ms
        latest = max(parts[0] + parts[1] for parts in row)
        for parts in row:
            parts[2] = latest - parts[0] - parts[1] + exchange_ms
    return {rank: steps_of([row[rank] for row in rows]) for rank in range(size)}


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("part", OWN_PARTS)
def test_the_slow_rank_and_the_part_are_named(size, part):
    (found,) = slow_parts(job(size, late=[(1, part, 50)]))
    assert (found.who, found.part) == ("rank 1", OWN_PARTS[part])
    assert found.extra_s == pytest.approx(0.05, abs=0.005)
    assert f"rank 1 is slow {OWN_PARTS[part]}: +" in str(found)


def test_a_rank_is_not_slower_by_more_than_its_step():
    """Its own steps may be longer than those of ranks that do not wait for it."""
    steps = {r: steps_of([[10, 20, 5, 3 + 150 * (r == 2)]] * 40) for r in range(3)}
    (found,) = slow_parts(steps)
    assert str(found).endswith(": +150 ms of 188 ms per step")


def test_two_slow_ranks_are_both_named():
    found = slow_parts(job(5, late=[(1, 0, 50), (4, 1, 30)]))
    assert [each.who for each in found] == ["rank 1", "rank 4"]


@pytest.mark.parametrize("seed", range(30))
def test_nobody_is_named_in_a_balanced_job_however_noisy(seed):
    assert slow_parts(job(4, noise_ms=random.Random(seed).choice([1, 20, 80]), seed=seed)) == []


def test_nobody_is_named_before_there_are_20_steps_and_alone():
    assert slow_parts(job(4, 19, late=[(1, 1, 50)])) == []
    assert slow_parts(job(1, late=[(0, 1, 50)])) == []
    assert slow_parts({}) == []
    assert len(slow_parts(job(4, 20, late=[(1, 1, 50)]))) == 1


def test_a_rank_that_had_no_core_is_not_slow():
    steps = job(3, late=[(2, 1, 50)])
    without = [(number, marks, (0, 50 * MS, 0, 0)) for number, marks, _ in steps[2]]
    assert slow_parts(steps | {2: without}) == []


def test_the_same_steps_are_compared_if_a_rank_is_ahead():
    steps = job(3, 50, late=[(2, 0, 50)])
    (found,) = slow_parts({0: steps[0][:45], 1: steps[1][3:], 2: steps[2][1:48]})
    assert found.who == "rank 2"


# --- servers ------------------------------------------------------------------------------------
def test_a_server_is_named_if_the_last_worker_waits_for_it_too():
    steps = job(3, exchange_ms=60)
    found = slow_server(steps, {0: 0.6}, {0: 3})
    assert (found.who, found.part) == ("server 0 (rank 3)", "to answer")
    assert slow_server(job(3), {0: 0.6}, {0: 3}) is None
    assert slow_server(steps, {}, {}) is None  # a job without servers


def test_a_server_that_lacks_cores_is_not_slow():
    assert slow_server(job(3, exchange_ms=60), {0: 0.05}, {0: 3}) is None
    assert slow_server(job(3, exchange_ms=60), {}, {0: 3}) is None


def test_a_server_is_named_although_its_workers_lack_cores_for_most_of_a_step():
    steps = job(3, exchange_ms=40)
    loaded = {
        rank: [
            (n, (*marks[:2], *(each + 300 * MS for each in marks[2:])), (0, 300 * MS, 40 * MS, 0))
            for n, marks, _ in each
        ]
        for rank, each in steps.items()
    }
    found = slow_server(loaded, {0: 0.5}, {0: 3})
    assert found.who == "server 0 (rank 3)"
    assert found.extra_s < found.step_s
    assert slow_server(loaded, {0: 0.02}, {0: 3}) is None


def test_a_slow_worker_is_no_slow_server():
    steps = job(3, late=[(1, 1, 80)])
    assert slow_server(steps, {0: 0.6}, {0: 3}) is None
    (found,) = slow_parts(steps)
    assert found.who == "rank 1"


def test_of_several_servers_the_one_that_is_most_at_work_is_named():
    steps = job(3, exchange_ms=60)
    assert slow_server(steps, {0: 0.1, 1: 0.8}, {0: 3, 1: 4}).who == "server 1 (rank 4)"
    assert slow_server(steps, {0: 0.7, 1: 0.8}, {0: 3, 1: 4}).who == "each server"
