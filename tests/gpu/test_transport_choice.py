"""Which transport is chosen, and which elements are whose: decisions without a GPU."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ringcomm.config import GPU_TRANSPORTS
from ringcomm.errors import ConfigError
from ringcomm.gpu.transports.slices import even_parts, passes
from ringcomm.gpu.transports.transport_choice import TRANSPORTS, GpuFacts, choose_transport

NAMES = ("a", "b")
APART = [GpuFacts(name, 0, NAMES, nccl=22703) for name in NAMES]
SHARED = [GpuFacts("a", 0, ("a",), nccl=22703) for _ in range(3)]


def changed(facts, rank, **fields):
    return [replace(each, **fields) if r == rank else each for r, each in enumerate(facts)]


@pytest.mark.parametrize(
    ("facts", "transport", "name", "reason"),
    [
        (APART, "nccl", None, ""),
        (SHARED, "ipc", "nccl", "ranks 0 and 1 share a GPU"),
        (changed(APART, 1, nccl=0, no_nccl="no libnccl"), "ipc", "nccl", "rank 1: no libnccl"),
        (changed(APART, 1, nccl=23001), "ipc", "nccl", "rank 0 has NCCL 2.27.3, rank 1 has 2.30.1"),
        (changed(SHARED, 2, node=7), "staged", "ipc", "rank 0 and rank 2 are on different hosts"),
        (changed(SHARED, 1, can_export=False), "staged", "ipc", "rank 1: its GPU's memory cannot"),
        (changed(SHARED, 2, reaches=()), "staged", "ipc", "GPU of rank 0 cannot reach|rank 2 cann"),
        (changed(SHARED[:1], 0, can_export=False, nccl=0, no_nccl="none"), "staged", "ipc", "rank"),
    ],
)
def test_the_first_that_can_is_chosen(facts, transport, name, reason):
    choice = choose_transport(facts)
    assert choice.transport == transport
    if name is not None:
        assert any(part in choice.unfit[name] for part in reason.split("|"))
        assert f"{name}: no, " in str(choice)


def test_a_set_up_that_fails_leads_to_the_next_unless_it_is_wanted():
    choice = choose_transport(APART).without("rank 1: refused")
    assert (choice.transport, choice.unfit["nccl"]) == ("ipc", "rank 1: refused")
    assert choice.without("refused, too").transport == "staged"
    wanted = choose_transport(APART, "ipc")
    assert "as RINGCOMM_GPU_TRANSPORT says" in str(wanted)
    with pytest.raises(ConfigError, match="RINGCOMM_GPU_TRANSPORT is ipc, which cannot be used: x"):
        wanted.without("x")


def test_nccl_may_share_a_gpu_where_it_can_and_is_wanted():
    able = [replace(each, nccl=23001, shares_gpus=True) for each in SHARED]
    assert choose_transport(able).transport == "ipc"
    assert "nccl" not in choose_transport(able, "nccl").unfit
    assert (
        "share a GPU" in choose_transport(changed(able, 1, shares_gpus=False), "nccl").unfit["nccl"]
    )


def test_facts_survive_the_wire():
    for facts in (*APART, *SHARED):
        assert GpuFacts.unpack(facts.pack()) == facts


def test_the_transports_of_the_setting_are_those_there_are():
    assert TRANSPORTS == GPU_TRANSPORTS


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 1000, 4099])
def test_even_parts_cover_all_and_begin_aligned(count, size, itemsize):
    parts = even_parts(count, size, itemsize)
    assert len(parts) == size
    assert (parts[0].start, parts[-1].stop) == (0, count)
    for part, following in pairwise(parts):
        assert part.stop == following.start
        assert part.stop * itemsize % 16 == 0 or part.stop == count


@pytest.mark.parametrize("itemsize", [1, 2, 4, 16])
@pytest.mark.parametrize("bounds", [[0, 0, 5], [0, 999, 1000], [0, 3, 3, 2000, 2001]])
def test_passes_own_every_element_once_within_their_room(bounds, itemsize):
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    room = 256
    seen = []
    for slices in passes(parts, itemsize, room * len(parts)):
        for rank, piece in enumerate(slices):
            seen += range(piece.start, piece.stop)
            end = piece.staged_at + piece.count * itemsize
            assert room * rank <= piece.staged_at <= end <= room * (rank + 1)
            assert (piece.staged_at - piece.start * itemsize) % 16 == 0
    assert sorted(seen) == list(range(bounds[-1]))
