"""rc.Grid: ranks in a Cartesian grid, and the exchange of the edges of their blocks."""

import contextlib
import itertools
import math
import threading

import ml_dtypes
import numpy as np
import pytest
from harness import outcomes, run_ranks, torch_or_skip
from loopback import LoopbackHub

import ringcomm as rc
from ringcomm.collectives import cartesian
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.executors.mail import mail_of

on_both_wires = pytest.mark.usefixtures("wire")
SHAPES = [(3,), (1,), (2, 2), (1, 4), (3, 2), (2, 1, 2)]


# --- arithmetic ---------------------------------------------------------------------------------
def best_by_trying_all(size, n):
    """Return the lengths of which the longest is least, then the second one, and so on."""
    lengths = [d for d in range(1, size + 1) if size % d == 0]
    ways = itertools.combinations_with_replacement(lengths[::-1], n)
    return min(way for way in ways if math.prod(way) == size)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_chosen_dims_are_as_close_to_each_other_as_possible(n):
    for size in [*range(1, 101), 180, 256]:
        assert cartesian.completed(size, [0] * n) == best_by_trying_all(size, n)


def test_a_large_number_is_divided_at_once():
    assert cartesian.balanced_dims(1_000_003, 3) == (1_000_003, 1, 1)
    assert cartesian.balanced_dims(1 << 20, 4) == (32, 32, 32, 32)


@pytest.mark.parametrize(
    ("size", "dims", "found"),
    [
        (12, (0, 2, 0), (3, 2, 2)),
        (12, (2, 0), (2, 6)),
        (6, (3, 2), (3, 2)),
        (6, (0, 6), (1, 6)),
    ],
)
def test_dims_that_are_given_stay(size, dims, found):
    assert cartesian.completed(size, dims) == found


@pytest.mark.parametrize("dims", SHAPES)
def test_ranks_are_in_the_c_order_of_their_coordinates(dims):
    at = [cartesian.coords_of(rank, dims) for rank in range(math.prod(dims))]
    assert at == list(np.ndindex(dims))
    periodic = (False,) * len(dims)
    assert [cartesian.rank_of(coords, dims, periodic) for coords in at] == list(range(len(at)))


# --- a grid of ranks ----------------------------------------------------------------------------
def test_a_grid_knows_its_places():
    def body(rank):
        grid = rc.Grid((None, 2), (True, False))
        assert (grid.dims, grid.periodic) == ((3, 2), (True, False))
        assert (grid.rank, grid.size, grid.coords) == (rank, 6, divmod(rank, 2))
        assert grid.coords_of(5) == (2, 1)
        assert [grid.rank_of(at) for at in ((2, 1), (-1, 1), (4, 0))] == [5, 5, 2]
        assert grid.shift(0) == ((rank - 2) % 6, (rank + 2) % 6)
        assert grid.shift(0, -4) == ((rank + 8) % 6, (rank - 8) % 6)
        lower, upper = grid.shift(1)
        assert lower == (rank - 1 if rank % 2 else rc.PROC_NULL)
        assert upper == (rc.PROC_NULL if rank % 2 else rank + 1)
        assert grid.shift(1, 2) == (rc.PROC_NULL, rc.PROC_NULL)
        assert grid.neighbours == (grid.shift(0), grid.shift(1))
        assert repr(grid) == "Grid((3, 2), periodic=(True, False))"

    run_ranks(6, body)


def test_a_grid_is_a_group_of_its_ranks():
    def body(rank):
        some = rc.Group([3, 1, 2])
        if rank == 0:
            return
        grid = rc.Grid([3], group=some)
        assert grid.rank == some.rank
        assert rc.allgather(np.array([rank]), group=grid).tolist() == [3, 1, 2]
        ghosts = np.full(3, float(rank))
        grid.exchange_halo(ghosts)
        assert ghosts.tolist() == {3: [3, 3, 1], 1: [3, 1, 2], 2: [1, 2, 2]}[rank]

    run_ranks(4, body)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rc.Grid((4, 2)), ValueError, r"dims are \(4, 2\), .*must be 8, but there are 4"),
        (lambda: rc.Grid((3, 0)), ValueError, r"dims are \(3, \*\), .*a multiple of 3, but .* 4 "),
        (lambda: rc.Grid(()), ValueError, "one or more lengths"),
        (lambda: rc.Grid((-2, -2)), ValueError, "none negative"),
        (lambda: rc.Grid(4), TypeError, "dims must be a sequence, one for each dimension, not 4"),
        (lambda: rc.Grid((2.0, 2)), TypeError, "each of dims must be a number of ranks"),
        (lambda: rc.Grid((2, 2), (True,)), ValueError, "periodic is for 1 dimensions"),
        (lambda: rc.Grid((2, 2), 1.5), TypeError, "periodic must be a sequence"),
        (lambda: rc.Grid((2, 2), "no"), TypeError, "True or False"),
    ],
)
def test_a_bad_grid_is_the_same_error_on_all_ranks(call, error, message):
    def body(_):
        with pytest.raises(error, match=message):
            call()
        rc.barrier()

    run_ranks(4, body)


def test_ranks_that_pass_other_dims_hear_of_it():
    def body(rank):
        with pytest.raises(rc.MismatchError) as caught:
            rc.Grid((2, 1) if rank else (1, 2), periodic=True)
        rc.barrier()
        return str(caught.value)

    texts = run_ranks(2, body)
    assert texts[0] == texts[1]
    assert "rank 0 called Grid((1, 2), periodic=(True, True))" in texts[0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda grid: grid.rank_of((0, 2)), ValueError, r"\(0, 2\) are beyond a border of Grid"),
        (lambda grid: grid.rank_of((0,)), ValueError, "has 2 dimensions"),
        (lambda grid: grid.rank_of((0, 0.5)), TypeError, "a coordinate must be an int"),
        (lambda grid: grid.coords_of(4), ValueError, "rank is 4; ranks are 0 to 3"),
        (lambda grid: grid.shift(2), ValueError, "dimension is 2; those of .* are 0 to 1"),
        (lambda grid: grid.shift(0, None), TypeError, "displacement must be an int"),
        (lambda grid: grid.exchange_halo(np.ones(9)), ValueError, "pass a block with as many"),
        (
            lambda grid: grid.exchange_halo(np.ones((9, 5)), 2),
            ValueError,
            r"shape \(9, 5\), so dimension 1 has 1 own cells .* at least 2",
        ),
        (lambda grid: grid.exchange_halo(np.ones((1, 9))), ValueError, "dimension 0 has 0 own"),
        (lambda grid: grid.exchange_halo(np.ones((9, 9)), -1), ValueError, "width is -1"),
        (lambda grid: grid.exchange_halo(np.ones((9, 9)), 1.5), TypeError, "width must be an int"),
        (lambda grid: grid.exchange_halo([[1.0]]), TypeError, "cannot communicate a builtins.list"),
        (lambda grid: grid.exchange_halo(np.full((9, 9), "x")), TypeError, "dtype"),
        (
            lambda grid: grid.exchange_halo(np.ones((9, 9)), dimensions=(0, 2)),
            ValueError,
            "dimension is 2",
        ),
        (
            lambda grid: grid.exchange_halo(np.broadcast_to(np.ones(9), (9, 9))),
            ValueError,
            "read-only",
        ),
        (
            lambda grid: grid.exchange_halo(
                np.lib.stride_tricks.as_strided(np.ones(99), (9, 9), (8, 8), writeable=True)
            ),
            ValueError,
            "overlap",
        ),
    ],
)
def test_bad_arguments_of_a_grid_are_refused_at_once(call, error, message):
    def body(_):
        grid = rc.Grid((2, 2))
        with pytest.raises(error, match=message):
            call(grid)
        require_fills(grid, (5, 4), 1)

    run_ranks(4, body)


# --- halos --------------------------------------------------------------------------------------
GHOST = -7


def whole_array(dims, own, parts=(), turn=0, dtype=np.float64):
    """Return the array that is divided into blocks; no two of its cells are alike."""
    shape = *(n * length for n, length in zip(dims, own, strict=True)), *parts
    return (np.arange(math.prod(shape)) * 3 % 8191 + turn * 8192).reshape(shape).astype(dtype)


def block_of(whole, coords, own, width, periodic):
    """Return what a rank's block is to be after the exchange, and which of it are own cells."""
    lengths = whole.shape[: len(own)]
    places = [np.arange(-width, n + width) + c * n for n, c in zip(own, coords, strict=True)]
    wrapped = [at % length for at, length in zip(places, lengths, strict=True)]
    expected = whole[np.ix_(*wrapped)].copy()
    for axis, (at, length) in enumerate(zip(places, lengths, strict=True)):
        if not periodic[axis]:
            expected[(slice(None),) * axis + ((at < 0) | (at >= length),)] = GHOST
    return expected, tuple(slice(width, width + n) for n in own)


def require_fills(grid, own, width, *, parts=(), turn=0, dtype=np.float64, make=np.array):
    whole = whole_array(grid.dims, own, parts, turn, dtype)
    expected, mine = block_of(whole, grid.coords, own, width, grid.periodic)
    start = np.full_like(expected, GHOST)
    start[mine] = expected[mine]
    x = make(start)
    grid.exchange_halo(x, width)
    assert np.array_equal(x, expected), (grid, grid.rank, np.array(x), expected)


@on_both_wires
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("is_periodic", [False, True])
def test_ghosts_are_the_edges_of_neighbours_also_at_corners(dims, is_periodic):
    own = (5, 4, 6)[: len(dims)]

    def body(_):
        grid = rc.Grid(dims, is_periodic)
        for turn, width in enumerate([1, 1, 2, 4, 1, 2]):
            require_fills(grid, own, width, turn=turn)
        require_fills(grid, own, 0)

    run_ranks(math.prod(dims), body)


@on_both_wires
@pytest.mark.parametrize("periodic", [(True, False), (False, True)])
def test_one_dimension_may_be_periodic_alone(periodic):
    def body(_):
        require_fills(rc.Grid((2, 2), periodic), (3, 4), 1)

    run_ranks(4, body)


def on_one_node(size):
    return LoopbackHub(size, (0,) * size)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("make", [np.array, np.asfortranarray])
def test_within_a_node_messages_need_no_python(dtype, make, monkeypatch):
    monkeypatch.delattr("ringcomm.engine.api.grid.exchange")

    def body(_):
        grid = rc.Grid((2, 2), True)
        mail_of(grid).moment_s = 60.0
        for turn in range(3):
            require_fills(grid, (5, 4), 2, parts=(3,), turn=turn, dtype=dtype, make=make)

    run_ranks(4, body, hub=on_one_node(4))


@pytest.mark.parametrize("own", [(3, 4), (3000, 5), (7, 4000)])
def test_who_is_late_is_waited_for(own):
    def body(rank):
        grid = rc.Grid((2, 1), True)
        mail_of(grid).moment_s = 0.0
        for turn in range(5):
            require_fills(grid, own, 2, turn=turn)

    run_ranks(2, body, hub=on_one_node(2))


def test_an_earlier_mismatch_is_told_before_an_exchange_begins():
    heard = threading.Barrier(2)

    def body(rank):
        grid = rc.Grid((1, 2))
        for turn in range(3):
            if rank == 1:
                with pytest.raises(rc.MismatchError):
                    rc.recv(np.zeros(4), 0, tag=9)
                heard.wait(60)
            else:
                rc.send(np.ones(3), 1, tag=9)
                heard.wait(60)
                with pytest.raises(rc.MismatchError, match=r"an earlier message .* tag=9: rank 0"):
                    grid.exchange_halo(np.full((5, 5), 99.0))
            require_fills(grid, (3, 3), 1, turn=turn)

    run_ranks(2, body, hub=on_one_node(2), settings=Settings(timeout_s=30))


@on_both_wires
@pytest.mark.parametrize("own", [(3000, 5), (7, 4000)])
def test_long_edges_are_exchanged_again_and_again(own):
    def body(_):
        grid = rc.Grid((2, 1), True)
        for turn in range(4):
            require_fills(grid, own, 2, turn=turn)

    run_ranks(2, body)


@on_both_wires
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.complex128, np.bool_, "i2"])
def test_cells_may_have_parts_and_any_dtype(dtype):
    def body(_):
        grid = rc.Grid((1, 2))
        for turn in range(2):
            require_fills(grid, (3, 4), 1, parts=(3, 2), turn=turn, dtype=dtype)

    run_ranks(2, body)


@on_both_wires
@pytest.mark.parametrize("make", [np.asfortranarray, lambda x: np.repeat(x, 2, axis=1)[:, ::2]])
def test_a_block_may_be_a_view_in_any_order(make):
    def body(_):
        grid = rc.Grid((2, 2), True)
        for turn in range(3):
            require_fills(grid, (5, 4), 2, turn=turn, make=make)

    run_ranks(4, body)


@on_both_wires
def test_tensors_are_filled_in_place():
    torch = torch_or_skip()

    def body(_):
        grid = rc.Grid((2, 1), True)
        for turn in range(3):
            require_fills(grid, (5, 4), 1, turn=turn, make=torch.from_numpy)
        x = torch.ones((4, 4), requires_grad=True)
        y = (x * 2).exp()
        with torch.no_grad():
            grid.exchange_halo(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        with pytest.raises(ValueError, match="must be contiguous"):
            grid.exchange_halo(torch.ones((4, 5)).T)

    run_ranks(2, body)


@on_both_wires
def test_chosen_dimensions_are_filled_in_the_order_that_is_passed():
    def body(rank):
        grid = rc.Grid((1, 2), True)
        x = np.full((4, 4), 10.0 * rank) + np.arange(4)[:, None]
        grid.exchange_halo(x, dimensions=[1])
        assert x[:, 0].tolist() == [10 * (1 - rank) + i for i in range(4)]
        assert x[0, 1:3].tolist() == [10 * rank] * 2  # dimension 0 is as it was
        grid.exchange_halo(x, dimensions=(1, 0))
        assert x[0].tolist() == x[2].tolist()
        assert x[3].tolist() == x[1].tolist()

    run_ranks(2, body)


@on_both_wires
def test_blocks_of_other_length_fit_if_their_edges_do():
    def body(rank):
        grid = rc.Grid((3,))
        x = np.full(3 + rank, float(rank))
        grid.exchange_halo(x)
        assert x[0] == max(rank - 1, 0)
        assert x[-1] == min(rank + 1, 2)

    run_ranks(3, body)


@on_both_wires
def test_a_grid_takes_no_message_of_its_ranks_outside_of_it():
    def body(rank):
        grids = [rc.Grid((2,), True) for _ in range(2)]
        others = [rc.isend(np.full(1, 99.0), 1 - rank, tag=tag) for tag in (-1, -2)]
        for turn in range(3):
            for number, grid in enumerate(grids):
                require_fills(grid, (4,), 1, turn=2 * turn + number)
        for tag, other in zip((-1, -2), others, strict=True):
            rc.recv(out := np.zeros(1), 1 - rank, tag=tag)
            other.wait()
            assert out == 99

    run_ranks(2, body)


@on_both_wires
@pytest.mark.parametrize(
    "other",
    [lambda n: np.ones((n, n), np.float32), lambda n: np.ones((n + 1, n + 1))],
    ids=["dtype", "length"],
)
@pytest.mark.parametrize("n", [5, 5000])
def test_an_edge_that_does_not_fit_is_a_mismatch_on_both_sides_and_the_engine_goes_on(n, other):
    heard = threading.Barrier(2)

    def body(rank):
        grid, later = rc.Grid((1, 2)), rc.Grid((2, 1))
        x = other(n) if rank == 1 else np.ones((n, n))
        with pytest.raises(rc.MismatchError, match=r"rank . sent float.* rank . receives float"):
            grid.exchange_halo(x, dimensions=(1,))
        heard.wait(60)
        for _ in range(2):  # its short message was refused, too, which it may hear now
            with contextlib.suppress(rc.MismatchError):
                require_fills(later, (5, 4), 1)
                return
        raise AssertionError("it heard of more than one")

    run_ranks(2, body, settings=Settings(timeout_s=30))


@on_both_wires
def test_a_neighbour_that_dies_is_an_error():
    def body(rank):
        grid = rc.Grid((3,), True)
        x = np.ones(4)
        grid.exchange_halo(x)
        if rank == 1:
            raise ValueError("boom")
        for _ in range(3):
            grid.exchange_halo(x)

    errors = outcomes(3, body)
    assert [type(each) for each in errors] == [rc.PeerFailedError, ValueError, rc.PeerFailedError]


def test_a_grid_of_an_earlier_view_is_refused():
    hub = LoopbackHub(1, (0,))
    first = Engine(hub.transport(0), Settings())
    with serve_thread(first):
        grid = rc.Grid((1,), True)
        grid.exchange_halo(np.ones(3))
    later = Engine(LoopbackHub(1, (0,)).transport(0), Settings())
    with serve_thread(later):
        assert engine() is later
        with pytest.raises(ValueError, match=r"Grid\(\(1,\), .* is of an earlier ringcomm.init"):
            grid.exchange_halo(np.ones(3))


# --- what a step costs --------------------------------------------------------------------------
def test_buffers_are_kept_between_calls_and_not_for_ever():
    def body(_):
        grid = rc.Grid((1, 2))
        for _ in range(3):
            grid.exchange_halo(np.ones((5, 5)))
        assert len(grid._steps) == 1
        for n in range(3, 90):
            grid.exchange_halo(np.ones((n, 4)))
        assert len(grid._steps) == 64

    run_ranks(2, body)
