"""The forms of a collective, made from one declaration: blocking, in place, asynchronous.

A declaration is a function that has the user's arguments and returns a PlannedCall. blocking(),
in_place() and started() make forms of it, which have the same arguments; ParamSpec lets type
checkers see them. The help of arguments that many collectives have is here, too.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar, cast

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.engine.core.plan import Plan

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_COMMON: Final = {
    "x": "array with at least one dimension; same dtype on every rank, and same shape except for "
    "the first dimension.",
    "xs": "list or tuple of arrays, with the same shapes and dtypes on every rank. May be empty.",
    "root": "the rank that gets the result.",
    "op": "rc.SUM, AVERAGE, MIN, MAX, PRODUCT, BAND, BOR or BXOR.",
    "name": "the ranks' operations of one name belong together; None: matched by order.",
    "group": "the ranks that take part; None: all.",
    "deterministic": "reduce in rank order; see allreduce().",
}


class PlannedCall(NamedTuple, Generic[R]):
    """One call of a collective."""

    kind: str  # name of the collective
    name: str | None  # given by the user
    group: Group | None
    plan: Callable[..., Plan[R]]  # plan(group, name, *args, **form)
    args: tuple[Any, ...] = ()
    borrows: bool = False  # plan() has the option is_borrowed; see Reduction

    def execute(self, mark: str = "", **form: bool) -> R:
        """Carry out the operation and return its result. `mark` is appended to the kind."""
        kind, name, group, plan, args, _ = self
        return engine().execute(kind + mark, name, lambda g: plan(g, name, *args, **form), group)

    def start(self, mark: str = "", **form: bool) -> Handle[R]:
        kind, name, group, plan, args, _ = self
        return engine().start(kind + mark, name, lambda g: plan(g, name, *args, **form), group)


def blocking(declaration: Callable[P, PlannedCall[R]]) -> Callable[P, R]:
    """Return the blocking form of a declaration; a decorator."""

    def form(*args: P.args, **kwargs: P.kwargs) -> R:
        request = declaration(*args, **kwargs)
        return request.execute(is_borrowed=True) if request.borrows else request.execute()

    return _presented(form, declaration, declaration.__name__, complete_doc(declaration, _COMMON))


def in_place(form: Callable[P, R], summary: str, returns: str = "x itself.") -> Callable[P, R]:
    """Return the in-place form of a blocking form; its help gets `summary` and `returns`."""
    declaration = vars(form)["__wrapped__"]

    def overwrite(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            request: PlannedCall[R] = declaration(*args, **kwargs)
        except TypeError as error:
            require_arguments(made, error, args, kwargs)
            raise
        return request.execute("_", in_place=True)

    doc = _in_place_doc(form.__doc__, summary, returns)
    made = _presented(overwrite, declaration, f"{form.__name__}_", doc)
    vars(made)["is_in_place"] = True
    return made


def started(form: Callable[P, R]) -> Callable[P, Handle[R]]:
    """Return the asynchronous form of a blocking or in-place one."""
    declaration, is_in_place = vars(form)["__wrapped__"], "is_in_place" in vars(form)

    def start(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        try:
            request: PlannedCall[R] = declaration(*args, **kwargs)
        except TypeError as error:
            require_arguments(made, error, args, kwargs)
            raise
        if is_in_place:
            return request.start("_", in_place=True)
        return request.start()

    base = form.__name__
    name = f"{base}async_" if base.endswith("_") else f"{base}_async"
    doc = form.__doc__ and f"Start {base}(). Return a Handle at once.\n\n{form.__doc__}"
    made = _presented(start, declaration, name, doc, "Handle[{}]")
    return made


def require_arguments(
    form: Callable[..., Any], error: TypeError, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return
    try:
        inspect.signature(form).bind(*args, **kwargs)
    except TypeError as wrong:
        raise TypeError(f"{form.__name__}(): {wrong}") from None


def with_shortcut(form: F) -> Callable[[Callable[..., Any]], F]:
    """Decorate a faster variant of `form`: give it the form's help, signature and attributes."""

    def decorate(function: Callable[..., Any]) -> F:
        function.__doc__, function.__annotations__ = form.__doc__, form.__annotations__
        function.__name__ = function.__qualname__ = form.__name__
        function.__module__ = form.__module__
        vars(function).update(vars(form))
        return cast("F", function)

    return decorate


def _presented(
    form: F, declaration: Callable[..., Any], name: str, doc: str | None, result: str = "{}"
) -> F:
    """Set name, docstring and signature of a form; return the form."""
    form.__name__ = form.__qualname__ = name
    form.__module__, form.__doc__ = declaration.__module__, doc
    returned = declaration.__annotations__["return"].removeprefix("PlannedCall[")[:-1]
    form.__annotations__ = {**declaration.__annotations__, "return": result.format(returned)}
    signature = inspect.signature(declaration)
    vars(form)["__signature__"] = signature.replace(return_annotation=result.format(returned))
    vars(form)["__wrapped__"] = declaration  # as functools.wraps() does
    return form


def complete_doc(function: Callable[..., Any], common: Mapping[str, str]) -> str | None:
    """Return the docstring; the texts of `common` describe arguments that it does not list."""
    if function.__doc__ is None:  # python -OO
        return None
    head, returns, tail = inspect.cleandoc(function.__doc__).partition("\n\nReturns:")
    head, _, arguments = head.partition("\n\nArgs:")
    entries = {each.partition(":")[0]: each for each in re.split(r"\n    (?=\w)", arguments)[1:]}
    lines = [
        entries.get(name) or _entry(name, common[name])
        for name in inspect.signature(function).parameters
        if name in entries or name in common
    ]
    return "\n    ".join([f"{head}\n\nArgs:", *lines]) + returns + tail


@functools.cache  # a rank that starts waits for it
def _entry(name: str, text: str) -> str:
    return textwrap.fill(f"{name}: {text}", 92, subsequent_indent=" " * 8)


def _in_place_doc(doc: str | None, summary: str, returns: str) -> str | None:
    if doc is None:
        return None
    arguments, _, tail = doc[doc.index("Args:") :].partition("\n\nReturns:\n")
    _, gap, rest = tail.partition("\n\n")
    return f"{summary}\n\n{arguments}\n\nReturns:\n    {returns}{gap}{rest}"
