"""rc.Grid: ranks in a Cartesian grid, and the exchange of the edges of their blocks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm._core import KnownHalo
from ringcomm.arrays import Array, adapter_for, arrived
from ringcomm.arrays.numpy import NUMPY
from ringcomm.collectives import cartesian
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.api.point_to_point import Begun, begin_halo, exchange
from ringcomm.engine.core.call import Call, require_flag, shape_text
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.executors.mail import KnownCells, Mail, mail_of
from ringcomm.engine.operations.barrier import plan_barrier
from ringcomm.engine.operations.base import int_of, rank_of
from ringcomm.transport.base import PROC_NULL

_MAX_DIMS: Final = 32
_MAX_LAYOUTS: Final = 64  # of arrays, whose buffers are kept


class Grid(Group):
    """Ranks at the points of a Cartesian grid: a Group, which also knows who is next to whom.

    Collective over all ranks of `group`. The ranks keep their order, which is the C order of their
    coordinates: the last one changes first. As `group=` of a collective or message, it stands for
    these ranks. It belongs to one view of the job, as any Group does.

    Args:
        dims: number of ranks in each dimension; 0 or None: chosen, so that these lengths are close
            to each other and do not increase, as MPI_Dims_create does.
        periodic: whether the last rank of a dimension is next to the first one; one bool for all
            dimensions, or one for each.
        group: the ranks; None: all ranks.

    Attributes:
        dims: number of ranks in each dimension, a tuple.
        periodic: a bool for each dimension, a tuple.
        coords: of this rank, a tuple.
        rank, size, ranks: see Group.

    Raises:
        ValueError, TypeError: a bad argument, such as dims whose product is not the number of
            ranks, or this rank is not in the group.
        MismatchError: other ranks passed other arguments.
        RingcommError: there are too many groups; see Group.
    """

    dims: tuple[int, ...]
    periodic: tuple[bool, ...]
    coords: tuple[int, ...]

    def __init__(
        self,
        dims: Iterable[int | None],
        periodic: bool | Iterable[bool] = False,
        *,
        group: Group | None = None,
    ) -> None:
        current = engine()
        whole = current.groups.or_default(group)

        def plan(group: Group) -> Plan[None]:
            self.dims = cartesian.completed(group.size, _lengths(dims))
            self.periodic = _flags(periodic, len(self.dims))
            meeting = plan_barrier(group, None)
            meeting.call = Call(f"Grid({self.dims}, periodic={self.periodic})")
            return meeting

        current.execute("Grid", None, plan, group)
        self._create(current, whole.ranks)
        self.coords = cartesian.coords_of(self.index, self.dims)
        self._steps: dict[Any, list[_Step]] = {}

    @functools.cached_property
    def _text(self) -> str:
        return f"Grid({self.dims}, periodic={self.periodic})"

    def rank_of(self, coords: Sequence[int]) -> int:
        """Return the rank at the coordinates; those of a periodic dimension may be any ints.

        Raises:
            ValueError: they are beyond a border, or not one for each dimension.
        """
        at = [int_of("a coordinate", coord) for coord in _few(coords, "coords")]
        if len(at) != len(self.dims):
            raise ValueError(f"coords are {tuple(at)}; {self!r} has {len(self.dims)} dimensions")
        rank = cartesian.rank_of(at, self.dims, self.periodic)
        if rank is None:
            raise ValueError(f"coords {tuple(at)} are beyond a border of {self!r}")
        return rank

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank of the grid."""
        return cartesian.coords_of(rank_of("rank", rank, self), self.dims)

    def shift(self, dimension: int, displacement: int = 1) -> tuple[int, int]:
        """Return (source, dest) of a shift along a dimension, as MPI_Cart_shift does.

        Each of them is a rank of the grid, or rc.PROC_NULL where the shift leaves it.

        Args:
            dimension: 0 to len(dims) - 1.
            displacement: how far dest is up this dimension; source is as far down. May be negative.
        """
        along, by = self._dimension(dimension), int_of("displacement", displacement)
        source, dest = (self._at(along, step) for step in (-by, by))
        return source, dest

    @property
    def neighbours(self) -> tuple[tuple[int, int], ...]:
        """The ranks next to this one, (lower, upper) for each dimension; rc.PROC_NULL for none."""
        return tuple(self.shift(dimension) for dimension in range(len(self.dims)))

    def exchange_halo(
        self, x: Array, width: int = 1, *, dimensions: Sequence[int] | None = None
    ) -> None:
        """Fill the ghost cells of this rank's block with the edge cells of its neighbours' blocks.

        Collective. Dimension d of x has `width` ghost cells at either end; between them are this
        rank's own cells. The lower ghost cells become the last own cells of the lower neighbour,
        the upper ones the first own cells of the upper neighbour. Beyond a border that is not
        periodic, ghost cells stay as they are.

        The dimensions follow each other, and each message spans the ghost cells of the others. So
        corners are right, too, as a 9-point stencil needs them.

        One thread at a time. Messages have the tags -1 to -2 * len(dims). Edges that are not
        contiguous are copied through buffers, which are kept for the next array of this layout.

        Args:
            x: numpy array, or a contiguous torch tensor in host memory, with at least as many
                dimensions as the grid. Dimensions beyond those of the grid are parts of a cell.
                Blocks may differ in length along a dimension if their edges still fit.
            width: number of ghost cells at each end of a dimension.
            dimensions: whose ghost cells are filled, in this order; None: all, from the first.

        Raises:
            MismatchError: a neighbour's edge has another shape or dtype. Some ghost cells may have
                been filled, and messages may be left: make a new Grid. As after rc.send(), the next
                message to that neighbour may raise the error of a short one once more.
            ValueError, TypeError: a bad argument, such as an x with fewer than `width` own cells.
            PeerFailedError, CommTimeoutError: see rc.send().
        """
        self.ledger_for(engine())
        x = arrived(x)
        view = x if type(x) is np.ndarray else _as_numpy(x)
        if dimensions is not None and type(dimensions) is not tuple:
            dimensions = tuple(_few(dimensions, "dimensions"))
        layout = view.dtype, view.shape, view.strides, width, dimensions
        steps = self._steps.get(layout) if view.flags.writeable else None
        if steps is None:
            steps = self._plan(view, width, dimensions)
            while len(self._steps) >= _MAX_LAYOUTS:
                del self._steps[next(iter(self._steps))]
            self._steps[layout] = steps
        for step in steps:
            step.run(view, self)
        if view is not x:
            adapter_for(x).written(x)

    def _plan(self, x: NDArray[Any], width: int, dimensions: Sequence[int] | None) -> list[_Step]:
        NUMPY.dtype(x)
        NUMPY.require_writable(x)
        width = int_of("width", width)
        if width < 0:
            raise ValueError(f"width is {width}; it must be at least 0")
        if x.ndim < len(self.dims):
            raise ValueError(
                f"exchange_halo: x has shape {x.shape}, but {self!r} has {len(self.dims)} "
                "dimensions: pass a block with as many, or more"
            )
        along = range(len(self.dims)) if dimensions is None else dimensions
        return [self._step(x, width, self._dimension(each)) for each in along if width]

    def _step(self, x: NDArray[Any], width: int, dimension: int) -> _Step:
        length = x.shape[dimension]
        if length < 3 * width:
            raise ValueError(
                f"exchange_halo: x has shape {x.shape}, so dimension {dimension} has "
                f"{max(length - 2 * width, 0)} own cells beside 2 * {width} ghost cells; it must "
                f"have at least {width}. Pass larger blocks, or a smaller width"
            )

        def cells(begin: int) -> _Cells:
            return (slice(None),) * dimension + (slice(begin, begin + width),)

        def buffer(part: _Cells) -> NDArray[Any] | None:
            region = x[part]
            return None if region.flags.carray else np.empty(region.shape, x.dtype)

        low_ghost, low_edge = cells(0), cells(width)
        high_edge, high_ghost = cells(length - 2 * width), cells(length - width)
        lower, upper = self._at(dimension, -1), self._at(dimension, 1)
        if lower == upper == self.rank:
            return _Step([(low_ghost, high_edge), (high_ghost, low_edge)], [], [], None, None)
        down, up = -2 * dimension - 1, -2 * dimension - 2  # tags, by the way of the message
        sides = (lower, low_edge, down, low_ghost, up), (upper, high_edge, up, high_ghost, down)
        there = [side for side in sides if side[0] != PROC_NULL]
        sends = [_Message(edge, buffer(edge), rank, tag) for rank, edge, tag, _, _ in there]
        receives = [_Message(ghost, buffer(ghost), rank, tag) for rank, _, _, ghost, tag in there]
        mail = mail_of(self)
        known = mail.known_halo([e.known(x) for e in sends], [e.known(x) for e in receives])
        return _Step([], sends, receives, known, mail)

    def _dimension(self, dimension: int) -> int:
        number = int_of("dimension", dimension)
        if not 0 <= number < len(self.dims):
            raise ValueError(
                f"dimension is {number}; those of {self!r} are 0 to {len(self.dims) - 1}"
            )
        return number

    def _at(self, dimension: int, displacement: int) -> int:
        coords = list(self.coords)
        coords[dimension] += displacement
        rank = cartesian.rank_of(coords, self.dims, self.periodic)
        return PROC_NULL if rank is None else rank


_Cells = tuple[slice, ...]


class _Message(NamedTuple):
    cells: _Cells  # of the array
    buffer: NDArray[Any] | None  # in which they are sent or received; None: they are contiguous
    rank: int  # of the other side
    tag: int

    def known(self, x: NDArray[Any]) -> KnownCells:
        """Return the same as C++ takes it."""
        region = x[self.cells]
        begin = self.cells[-1].start * x.strides[len(self.cells) - 1]
        outer = [(n, step) for n, step in zip(region.shape, region.strides, strict=True) if n != 1]
        run = x.itemsize
        while outer and outer[-1][1] == run:
            run *= outer.pop()[0]
        address = 0
        if self.buffer is not None:
            address = self.buffer.ctypes.data
            outer = outer or [(1, run)]
        outline = f"{NUMPY.dtype(x)} {shape_text(region.shape)}"
        return KnownCells(self.rank, self.tag, outline, region.nbytes, (begin, outer, run, address))


class _Step(NamedTuple):
    """What happens along one dimension, for arrays of one layout."""

    copies: list[tuple[_Cells, _Cells]]  # to ghost cells, from edges of the same block
    sends: list[_Message]
    receives: list[_Message]
    known: KnownHalo | None  # the messages, if there are any
    mail: Mail | None

    def run(self, x: NDArray[Any], group: Group) -> None:
        for ghost, edge in self.copies:
            x[ghost] = x[edge]
        if not self.sends:
            return
        begun: Literal[True] | Begun | None = None
        if self.known is not None and self.mail is not None:
            begun = begin_halo(self.known, x, self.mail)
        if begun is True:
            return
        sent, received = [], []
        for cells, buffer, rank, tag in self.sends:
            data = x[cells]
            if buffer is not None:
                if begun is None:
                    buffer[...] = data
                data = buffer
            sent.append((data, rank, tag))
        for cells, buffer, rank, tag in self.receives:
            received.append((x[cells] if buffer is None else buffer, rank, tag))
        exchange(sent, received, group, begun)
        for cells, buffer, _, _ in self.receives:
            if buffer is not None:
                x[cells] = buffer


def _lengths(dims: Iterable[int | None]) -> tuple[int, ...]:
    """Return dims, 0 where a length is to be chosen."""
    what = "Grid: each of dims"
    lengths = [
        0 if each is None else int_of(what, each, "a number of ranks, or 0 or None")
        for each in _few(dims, "dims")
    ]
    if not lengths or min(lengths) < 0:
        raise ValueError(
            f"Grid: dims are {tuple(lengths)}; pass one or more lengths, none negative"
        )
    return tuple(lengths)


def _flags(periodic: bool | Iterable[bool], n: int) -> tuple[bool, ...]:
    flags = [periodic] * n if isinstance(periodic, bool | np.bool_) else _few(periodic, "periodic")
    for flag in flags:
        require_flag("Grid: periodic, for each dimension,", flag)
    if len(flags) != n:
        raise ValueError(f"Grid: periodic is for {len(flags)} dimensions, but dims are {n}")
    return tuple(map(bool, flags))


def _few(values: Iterable[Any], what: str) -> list[Any]:
    """Return the values as a list. They may be endless, so few are read."""
    try:
        found = list(itertools.islice(values, _MAX_DIMS + 1))
    except TypeError as error:
        raise TypeError(
            f"{what} must be a sequence, one for each dimension, not {values!r}"
        ) from error
    if len(found) > _MAX_DIMS:
        raise ValueError(f"{what} has more than {_MAX_DIMS} elements")
    return found


def _as_numpy(x: Array) -> NDArray[Any]:
    """Return an array of numpy in the memory of x."""
    adapter = adapter_for(x)
    adapter.require_writable(x)
    if isinstance(x, np.ndarray):
        adapter.dtype(x)
        return x.view(np.ndarray)
    if not adapter.is_contiguous(x):
        raise ValueError("exchange_halo: a tensor must be contiguous: pass x.contiguous()")
    flat = adapter.flat(x)
    kind = NUMPY.make(flat.dtype, ()).dtype
    return flat.bytes.view(kind).reshape(adapter.shape(x))
