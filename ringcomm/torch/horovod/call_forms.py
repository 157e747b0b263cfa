"""Makes the in-place and asynchronous forms of an operation from one function that starts it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

import torch

from ringcomm.collectives.operators import Op
from ringcomm.engine.api.blocking_async_in_place import complete_doc, require_arguments
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.executors.short_calls import short_calls_of
from ringcomm.torch.horovod.handles import HorovodHandle
from ringcomm.torch.horovod.process_sets import ProcessSet

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_COMMON: Final = {
    "average": "Horovod's older argument for op: True is Average, False is Sum.",
    "name": "operations with equal names match, so ranks may start them in different orders. All "
    "ranks of a process set must start operations of one kind without names in the same order.",
    "compression": "compressor for the tensors: Compression.none, fp16 or bf16.",
    "op": "Average (the default), Sum, Min, Max, Product or Adasum.",
    "prescale_factor": "factor for each rank's tensor, before the reduction; products of integers "
    "are truncated toward zero.",
    "postscale_factor": "factor for the result, with the same truncation.",
    "root_rank": "the rank whose values all ranks get, by its number in the job. It is a member of "
    "process_set.",
    "process_set": "the ranks that take part; each of them must call this function.",
}
_NOT_AWAITED: Final = (
    "Returns a handle for poll() and synchronize() at once. Before synchronize() has returned, do\n"
    "not change the tensors that you pass in. Gradients do not flow through this form."
)


class Form(NamedTuple):
    """A way to call an operation."""

    in_place: bool = False  # the result overwrites the tensors
    is_awaited: bool = False  # the caller waits, so the engine can take its fast path


AWAITED: Final = Form(is_awaited=True)
IN_PLACE: Final = Form(in_place=True, is_awaited=True)


def begin(
    form: Form,
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    plan: Callable[..., Plan[Any]],
    *args: Any,
    family: str = "",
) -> HorovodHandle[Any]:
    """Start the operation that plan(group, name, *args) plans; return its handle.

    If the form is awaited, the operation is over when begin() returns. If the form is in place,
    plan() gets in_place=True. Other ranks see `kind` even if plan() raises here. Operations without
    a name are matched by order within their family, which is `kind` by default; see
    ProcessSet.group_for().
    """
    group = _group_for(process_set, family or kind, name)
    options = {}
    if form.in_place:
        kind, options = f"{kind}_", {"in_place": True}
    if form.is_awaited:
        result = engine().execute(kind, name, lambda g: plan(g, name, *args, **options), group)
        return HorovodHandle((), lambda: result)
    handle = engine().start(kind, name, lambda g: plan(g, name, *args, **options), group)
    return HorovodHandle((handle,), lambda result: result)


def carry_out(  # noqa: PLR0917 - the first five as begin()
    form: Form,
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    x: Any = None,
    op: Op | None = None,
    root: int = 0,
    *,
    family: str = "",
) -> HorovodHandle[Any] | None:
    """Carry out the operation by a short call, and return its handle; None if that cannot be.

    It is the operation that begin() would start, of a tensor in host memory.
    """
    if not (form.is_awaited and (x is None or isinstance(x, torch.Tensor))):
        return None
    calls = short_calls_of(_group_for(process_set, family or kind, name))
    if calls is None:
        return None
    result = calls.run(f"{kind}_" if form.in_place else kind, x, op, root, name)
    return HorovodHandle((), lambda: result)


def _group_for(process_set: ProcessSet, family: str, name: str | None) -> Group:
    ProcessSet.require(process_set)
    return process_set.group if name is not None else process_set.group_for(family)


def document(function: F) -> F:
    function.__doc__ = complete_doc(function, _COMMON)
    return function


def in_place_form(
    body: Callable[Concatenate[Form, P], HorovodHandle[R]], of: Callable[..., R]
) -> Callable[P, R]:
    """Return the form that overwrites its tensors and waits.

    `body` starts the operation. `of` is the form that waits and returns new tensors: its name and
    its documented arguments are also those of the new form.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return body(IN_PLACE, *args, **kwargs).wait()
        except TypeError as error:
            require_arguments(call, error, args, kwargs)
            raise

    signature = inspect.signature(of)
    first, returned = next(iter(signature.parameters)), signature.return_annotation
    beginning = f"Overwrite `{first}` with the result of {of.__name__}(), and return `{first}`."
    return _presented(call, body, of, f"{of.__name__}_", beginning, return_annotation=returned)


def async_form(
    body: Callable[Concatenate[Form, P], HorovodHandle[R]],
    of: Callable[..., Any],
    *,
    in_place: bool = False,
) -> Callable[P, HorovodHandle[R]]:
    form = Form(in_place=in_place)

    def call(*args: P.args, **kwargs: P.kwargs) -> HorovodHandle[R]:
        try:
            return body(form, *args, **kwargs)
        except TypeError as error:
            require_arguments(call, error, args, kwargs)
            raise

    mark = "_" * in_place
    beginning = f"Start {of.__name__}{mark}().\n\n{_NOT_AWAITED}"
    return _presented(call, body, of, f"{of.__name__}_async{mark}", beginning)


def _presented(
    form: F,
    body: Callable[..., Any],
    of: Callable[..., Any],
    name: str,
    beginning: str,
    **returns: Any,
) -> F:
    """Give a form its name, its docstring and the parameters of its body; return the form."""
    signature = inspect.signature(body)
    _, *parameters = signature.parameters.values()
    form.__name__ = form.__qualname__ = name
    form.__module__ = body.__module__
    form.__signature__ = signature.replace(parameters=parameters, **returns)  # type: ignore[attr-defined]
    if of.__doc__ is not None:  # python -OO
        _, gap, arguments = of.__doc__.partition("\n\nArgs:")
        form.__doc__ = beginning + gap + arguments
    return document(form)
