"""The forms of an operation: one declaration gives those that block, and those that do not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from ringcomm.engine.api.forms import complete_doc, require_arguments
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.execution import Plan
from ringcomm.torch.horovod.handles import Handle
from ringcomm.torch.horovod.process_sets import ProcessSet

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_COMMON: Final = {
    "average": "Horovod's older way to say op: True is Average, False Sum.",
    "name": "matches operations of ranks that start them in different orders; without one they are "
    "matched by their order among those of their kind, in each process set.",
    "compression": "what is sent: Compression.none, fp16 or bf16.",
    "op": "Average (the default), Sum, Min, Max, Product or Adasum.",
    "prescale_factor": "multiplies what is reduced; integers are truncated toward zero then.",
    "postscale_factor": "multiplies the result; likewise.",
    "root_rank": "a rank of the job that takes part: its values count.",
    "process_set": "the ranks that take part; every one of them must call.",
}
_NOT_AWAITED: Final = (
    "Returns at once a handle for poll() and synchronize(); until then tensors passed in must not\n"
    "be changed. Gradients do not flow through it."
)


class Form(NamedTuple):
    """A way to call an operation."""

    in_place: bool = False  # the result overwrites the tensors
    is_awaited: bool = False  # the caller waits, so that the engine can take its shorter way there


AWAITED: Final = Form(is_awaited=True)
IN_PLACE: Final = Form(in_place=True, is_awaited=True)


def begin(
    form: Form,
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    plan: Callable[..., Plan[Any]],
    *args: Any,
    lane: str = "",
    **options: Any,
) -> Handle[Any]:
    """Begin what plan(group, name, *args, **options) plans, and return its handle.

    Without a name it is matched by order in the process set's lane, which is `kind` by default. The
    kind is also for a rank whose plan() fails. If the form is awaited, all is over on return.
    """
    ProcessSet.require(process_set)
    group = process_set.group if name is not None else process_set.lane(lane or kind)
    if form.is_awaited:
        result = engine().execute(kind, name, lambda g: plan(g, name, *args, **options), group)
        return Handle((), lambda: result)
    handle = engine().start(kind, name, lambda g: plan(g, name, *args, **options), group)
    return Handle((handle,), lambda result: result)


def document(function: F) -> F:
    """Add to a docstring the arguments that it does not list itself; return the function."""
    function.__doc__ = complete_doc(function, _COMMON)
    return function


def in_place_form(
    body: Callable[Concatenate[Form, P], Handle[R]], of: Callable[..., R], first_line: str
) -> Callable[P, R]:
    """Return the form of an operation that overwrites its tensors, and waits.

    The body starts the operation. The docstring has a first line of its own, and the arguments of
    `of`, the form that waits and returns new tensors.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            handle = body(IN_PLACE, *args, **kwargs)
        except TypeError as error:
            require_arguments(call, error, args, kwargs)
            raise
        return handle.wait()

    presented = _present(call, body, of, f"{of.__name__}_", first_line)
    signature, result = inspect.signature(presented), inspect.signature(of).return_annotation
    presented.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    return presented


def async_form(
    body: Callable[Concatenate[Form, P], Handle[R]],
    of: Callable[..., Any],
    *,
    in_place: bool = False,
) -> Callable[P, Handle[R]]:
    """Return the form of an operation that returns a handle; see in_place_form()."""
    form = Form(in_place=in_place)

    def call(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        try:
            return body(form, *args, **kwargs)
        except TypeError as error:
            require_arguments(call, error, args, kwargs)
            raise

    end = "_" * in_place
    beginning = f"Start {of.__name__}{end}().\n\n{_NOT_AWAITED}"
    return _present(call, body, of, f"{of.__name__}_async{end}", beginning)


def _present(
    call: F, body: Callable[..., Any], of: Callable[..., Any], name: str, beginning: str
) -> F:
    """Make a form look like a function of the module of its body."""
    signature = inspect.signature(body)
    _, *others = signature.parameters.values()
    call.__name__ = call.__qualname__ = name
    call.__module__ = body.__module__
    call.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    if of.__doc__ is not None:  # python -OO
        _, gap, arguments = of.__doc__.partition("\n\nArgs:")
        call.__doc__ = beginning + gap + arguments
    return document(call)
