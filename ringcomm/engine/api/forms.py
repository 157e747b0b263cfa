"""The forms of a collective, made from one declaration: blocking, in place, asynchronous.

A declaration has the signature that a user sees, and returns a Request. The forms are typed by
ParamSpec, so type checkers know the signature and the result of each. Arguments that many of them
have are described here.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar

from ringcomm.engine.api.world import engine
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_COMMON: Final = {
    "x": "at least one dimension; same dtype on every rank, and same shape but for the first "
    "dimension.",
    "xs": "list or tuple; as many, of the same shapes and dtypes, on every rank. May be empty.",
    "root": "the rank that gets the result.",
    "op": "rc.SUM, AVERAGE, MIN, MAX, PRODUCT, BAND, BOR or BXOR.",
    "name": "matches the operations of this name on the other ranks; None: matched by order.",
    "group": "the ranks that take part; None: all.",
    "deterministic": "reduce in rank order, as allreduce() does then.",
}


class Request(NamedTuple, Generic[R]):
    """One call of a collective.

    Attributes:
        kind: name of the collective.
        name: the user's name for this operation.
        group: the ranks that take part; None: all.
        plan: plan(group, name, *args, **form) checks the arguments and says what to do.
        args: see plan.
        borrows: plan() has an option is_borrowed, for arguments that stay as they are.
    """

    kind: str
    name: str | None
    group: Group | None
    plan: Callable[..., Plan[R]]
    args: tuple[Any, ...] = ()
    borrows: bool = False

    def execute(self, mark: str = "", **form: bool) -> R:
        """Carry it out; return the result. `mark` follows the kind."""
        kind, name, group, plan, args, _ = self
        return engine().execute(kind + mark, name, lambda g: plan(g, name, *args, **form), group)

    def start(self, mark: str = "", **form: bool) -> Handle[R]:
        """Begin it; see execute()."""
        kind, name, group, plan, args, _ = self
        return engine().start(kind + mark, name, lambda g: plan(g, name, *args, **form), group)


def blocking(declaration: Callable[P, Request[R]]) -> Callable[P, R]:
    """Return the form that returns the result; a decorator of the declaration."""

    def form(*args: P.args, **kwargs: P.kwargs) -> R:
        request = declaration(*args, **kwargs)
        return request.execute(is_borrowed=True) if request.borrows else request.execute()

    doc = complete_doc(declaration, _COMMON)
    return _presented(form, declaration, declaration.__name__, doc)


def in_place(form: Callable[P, R], summary: str, returns: str = "x itself.") -> Callable[P, R]:
    """Return the form that overwrites its argument, with this summary and result in its help."""
    declaration = vars(form)["declaration"]

    def overwrite(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            request: Request[R] = declaration(*args, **kwargs)
        except TypeError as error:
            require_arguments(made, error, args, kwargs)
            raise
        return request.execute("_", in_place=True)

    doc = _in_place_doc(form.__doc__, summary, returns)
    made = _presented(overwrite, declaration, f"{form.__name__}_", doc)
    vars(made)["is_in_place"] = True
    return made


def started(form: Callable[P, R]) -> Callable[P, Handle[R]]:
    """Return the form that returns a Handle at once, of a blocking one."""
    declaration, is_in_place = vars(form)["declaration"], "is_in_place" in vars(form)

    def start(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        try:
            request: Request[R] = declaration(*args, **kwargs)
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
    """Raise TypeError in the name of the form if `error` is of the call and not from within it."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return
    try:
        inspect.signature(form).bind(*args, **kwargs)
    except TypeError as wrong:
        raise TypeError(f"{form.__name__}(): {wrong}") from None


def with_shortcut(form: F) -> Callable[[F], F]:
    """Decorator: a function that takes a shortcut, or else calls this form, looks like it."""

    def decorate(function: F) -> F:
        function.__doc__ = form.__doc__
        vars(function).update(vars(form))
        return function

    return decorate


def _presented(
    form: F, declaration: Callable[..., Any], name: str, doc: str | None, result: str = "{}"
) -> F:
    """Return a form that has its own name and docstring, and shows the declared parameters."""
    form.__name__ = form.__qualname__ = name
    form.__module__, form.__doc__ = declaration.__module__, doc
    returned = declaration.__annotations__["return"].removeprefix("Request[")[:-1]
    form.__annotations__ = {**declaration.__annotations__, "return": result.format(returned)}
    signature = inspect.signature(declaration)
    vars(form)["__signature__"] = signature.replace(return_annotation=result.format(returned))
    vars(form)["__wrapped__"] = declaration  # where typing.get_type_hints() finds the names
    vars(form)["declaration"] = declaration
    return form


def complete_doc(function: Callable[..., Any], common: Mapping[str, str]) -> str | None:
    """Return a docstring with the arguments that it does not list itself."""
    if function.__doc__ is None:  # python -OO
        return None
    head, returns, tail = inspect.cleandoc(function.__doc__).partition("\n\nReturns:")
    head, _, arguments = head.partition("\n\nArgs:")
    entries = {
        name: textwrap.fill(f"{name}: {text}", 92, subsequent_indent=" " * 8)
        for name, text in common.items()
    }
    entries |= {each.partition(":")[0]: each for each in re.split(r"\n    (?=\w)", arguments)[1:]}
    lines = [entries[name] for name in inspect.signature(function).parameters if name in entries]
    return "\n    ".join([f"{head}\n\nArgs:", *lines]) + returns + tail


def _in_place_doc(doc: str | None, summary: str, returns: str) -> str | None:
    """Return a docstring with another summary and result, and the same arguments."""
    if doc is None:
        return None
    arguments, _, tail = doc[doc.index("Args:") :].partition("\n\nReturns:\n")
    _, gap, rest = tail.partition("\n\n")
    return f"{summary}\n\n{arguments}\n\nReturns:\n    {returns}{gap}{rest}"
