"""Buffers of a model on the servers, such as the running means of BatchNorm.

They are no parameters: each worker has its own, and no gradient changes them. The chief's are sent
to the servers in each step, so that evaluators and checkpoints have them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ringcomm.ps.client.dense.table import Table, table
from ringcomm.ps.client.future import Future, Pushed
from ringcomm.ps.optim import Assign
from ringcomm.ps.session import acts_as_chief
from ringcomm.ps.table_spec import Part
from ringcomm.torch.ps.options import WHO

Named = Iterable[tuple[str, Tensor]]
_IN_FLOAT32: Final = (
    torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.complex64,
)  # fmt: skip
_IN_FLOAT64: Final = (torch.float64, torch.int32, torch.int64, torch.complex128)
_MOST: Final = 1 << 53  # all integers up to here are float64


class Buffer(NamedTuple):
    """A buffer of a model.

    Attributes:
        name: in the model.
        home: where the model keeps it.
        key: its key there.
    """

    name: str
    home: dict[str, Any]
    key: str

    @property
    def value(self) -> Tensor:
        value: Tensor = self.home[self.key]
        return value


def buffers_of(named_parameters: object, buffers: Named | None) -> list[Buffer]:
    """Return the buffers that ps.DistributedOptimizer() is to serve.

    Args:
        named_parameters: as passed. If it is model.named_parameters(), which has not begun, the
            model is known.
        buffers: as passed; None: those of that model that its state_dict() has.

    Raises:
        TypeError: `buffers` are no named tensors.
    """
    if buffers is not None:
        given = list(buffers)
        for each in given:
            is_pair = isinstance(each, tuple | list) and len(each) == 2
            if not (is_pair and isinstance(each[0], str) and isinstance(each[1], Tensor)):
                raise TypeError(
                    f"{WHO}: buffers must yield pairs (name, tensor), not {each!r}: pass "
                    "buffers=model.named_buffers()"
                )
        return [Buffer(name, {name: value}, name) for name, value in given]
    if not inspect.isgenerator(named_parameters):
        return []
    if named_parameters.gi_code is not nn.Module.named_parameters.__code__:
        return []
    arguments = inspect.getgeneratorlocals(named_parameters)
    if inspect.getgeneratorstate(named_parameters) != inspect.GEN_CREATED:
        return []
    return list(_persistent(arguments["self"], arguments["prefix"]))


def _persistent(model: nn.Module, prefix: str) -> Iterator[Buffer]:
    for path, module in model.named_modules(prefix=prefix):
        for key, value in module._buffers.items():
            if value is not None and key not in module._non_persistent_buffers_set:
                yield Buffer(f"{path}.{key}" if path else key, module._buffers, key)


class ServedBuffers:
    """The buffers of a model, which begin with the chief's values. Collective to make.

    Args:
        buffers: of the model.
        scope: whose buffers they are, for the names of tables.
    """

    def __init__(self, buffers: Sequence[Buffer], scope: str) -> None:
        in32 = [each for each in buffers if each.value.dtype in _IN_FLOAT32]
        in64 = [each for each in buffers if each.value.dtype in _IN_FLOAT64]
        for each in buffers:
            if each.value.dtype not in (*_IN_FLOAT32, *_IN_FLOAT64) or each.value.is_sparse:
                raise TypeError(
                    f"{WHO}: servers cannot keep the buffer {each.name}, of {each.value.dtype} and "
                    f"{each.value.layout}. Pass buffers= without it, or buffers=() for none"
                )
        kinds = ((in32, torch.float32), (in64, torch.float64))
        self._tables = [_Buffers(some, dtype, scope) for some, dtype in kinds if some]

    @property
    def tables(self) -> list[Table]:
        return [each.table for each in self._tables]

    def push(self) -> None:
        if self._tables and acts_as_chief():
            for each in self._tables:
                each.push()

    def wait(self) -> None:
        for each in self._tables:
            each.wait()

    def forget_pushes(self) -> None:
        for each in self._tables:
            each.forget_pushes()

    def fetch(self) -> None:
        """Set the model's buffers to the servers' values, or to those of this rank's snapshot."""
        for each in self._tables:
            each.fetch()


class _Buffers:
    """Buffers that share a table."""

    def __init__(self, buffers: Sequence[Buffer], dtype: torch.dtype, scope: str) -> None:
        self._buffers = buffers
        self._shapes = [each.value.shape for each in buffers]
        counts = [_as_real(each.value).numel() for each in buffers]
        self._flat = torch.empty(sum(counts), dtype=dtype)  # what the servers have, of this rank
        self._bounds = list(accumulate(counts, initial=0))
        self._views = torch.split(self._flat, counts)
        self._pushes: list[Future[Pushed]] = []
        for place in range(len(buffers)):
            self._views[place].copy_(self._checked(place))
        kind = str(dtype).removeprefix("torch.")
        self.table = table(
            f"buffers in {kind} ({scope})", len(self._flat), kind, updater=Assign(), scope=scope,
            init=self._flat.numpy().copy(), parts=[_part(each) for each in buffers],
        )  # fmt: skip

    def _checked(self, place: int) -> Tensor:
        """Return the values of a buffer, flat. Raises ValueError."""
        buffer, value = self._buffers[place], self._buffers[place].value
        if value.shape != self._shapes[place]:
            raise ValueError(
                f"{WHO}: the buffer {buffer.name} had shape {tuple(self._shapes[place])} when the "
                f"optimizer was wrapped, and has {tuple(value.shape)} now. Wrap it once shapes "
                "stay, or pass buffers= without it"
            )
        if value.dtype == torch.int64 and value.numel():
            least, most = (int(x) for x in torch.aminmax(value))
            if max(-least, most) > _MOST:
                raise ValueError(
                    f"{WHO}: the buffer {buffer.name} has {least if -least > most else most}, and "
                    "servers keep integers up to 2^53. Pass buffers= without it"
                )
        return _as_real(value.detach()).reshape(-1)

    def push(self) -> None:
        self.wait()
        changed = []
        for place, view in enumerate(self._views):
            value = self._checked(place).to("cpu", view.dtype)
            if not torch.equal(view, value):
                view.copy_(value)
                changed.append(place)
        for start, stop in _runs(changed):
            where = slice(self._bounds[start], self._bounds[stop])
            values = self._flat[where].numpy()
            self._pushes.append(self.table.push(values, where=where, assign=True))

    def wait(self) -> None:
        while self._pushes:
            self._pushes[-1].wait()
            self._pushes.pop()

    def forget_pushes(self) -> None:
        self._pushes.clear()

    def fetch(self) -> None:
        self.table.pull(out=self._flat.numpy()).wait()
        with torch.no_grad():
            for buffer, view in zip(self._buffers, self._views, strict=True):
                real = _as_real(buffer.value)
                real.copy_(view.view(real.shape))


def _part(buffer: Buffer) -> Part:
    kind = str(buffer.value.dtype).removeprefix("torch.")
    return Part(buffer.name, tuple(buffer.value.shape), dtype=kind)


def _as_real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of neighbouring places: the first, and the one behind the last."""
    gaps = [k for k, (a, b) in enumerate(pairwise(places), 1) if b != a + 1]
    for first, last in pairwise([0, *gaps, len(places)]):
        if first < last:
            yield places[first], places[last - 1] + 1
