"""Wraps an optimizer in a class derived from its own class, and names its parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM
from ringcomm.torch.untraced import not_inlined, untrace_methods

T = TypeVar("T", bound=Optimizer)
Settings = dict[str, Any]  # a param_group without its parameters


def derive(optimizer: T, part: type[Optimizer], **attributes: Any) -> T:
    """Return an optimizer of a new class that inherits from `part` and from the optimizer's class.

    It has the given attributes, and shares everything with the original, whose step() is now that
    of the result. Schedulers of either one notice these steps.
    """
    untrace_methods(part, Optimizer)
    part.step.hooked = True  # type: ignore[attr-defined]  # torch need not wrap step() to run hooks
    base = type(optimizer)
    kind: type[T] = type(base.__name__, (part, base), {"__doc__": base.__doc__})
    wrapped = object.__new__(kind)
    wrapped.__dict__ = optimizer.__dict__
    wrapped.__dict__.update(attributes)
    _share_step(wrapped, optimizer)
    PROGRAM.add_rate(functools.partial(_rate_setter, weakref.ref(wrapped)))
    return wrapped


def _rate_setter(reference: weakref.ref[Optimizer]) -> Callable[[float], None] | None:
    """Return the function by which commands set the learning rate; None: the optimizer is gone."""
    optimizer = reference()
    if optimizer is None:
        return None

    def set_rate(rate: float) -> None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    return set_rate


def underlying(wrapped: Optimizer, attributes: Collection[str]) -> Optimizer:
    """Return a plain optimizer that shares everything with `wrapped`, except these attributes."""
    plain: Optimizer = object.__new__(type(wrapped).__bases__[1])
    plain.__dict__ = {k: v for k, v in wrapped.__dict__.items() if k not in attributes}
    return plain


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return step() of a class, without the wrapper by which torch calls the hooks of a step."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step


def settings_of(optimizer: Optimizer) -> list[Settings]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def name_last_group(optimizer: Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of the last param_group, with made-up names."""
    g = len(optimizer.param_groups) - 1
    return [(f"group{g}.{i}", p) for i, p in enumerate(optimizer.param_groups[g]["params"])]


def renamed(
    optimizer: Optimizer, known: Iterable[tuple[str, torch.nn.Parameter]]
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the optimizer's parameters with names, after some were exchanged in param_groups.

    Known ones keep their names. A new one gets the name of the known one that had its place, if
    that is gone.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = list(known)
    name_of = {p: name for name, p in before}
    used = {name_of[p] for p in parameters if p in name_of}
    named = []
    for place, p in enumerate(parameters):
        name = name_of.get(p)
        if name is None:
            name = before[place][0] if len(before) == len(parameters) else f"parameter{place}"
            while name in used:
                name += "'"
            used.add(name)
        named.append((name, p))
    return named


def named_in_order(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the optimizer's parameters with their names, in the optimizer's order."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return [(f"parameter{i}", p) for i, p in enumerate(parameters)]
    given = list(named_parameters)
    for index, each in enumerate(given):
        if not (isinstance(each, tuple | list) and len(each) == 2 and isinstance(each[0], str)):
            raise ValueError(
                "named_parameters must yield pairs (name, parameter), but its item "
                f"{index} is a {type(each).__name__}: pass "
                "named_parameters=model.named_parameters(), not model.parameters()"
            )
    names = [name for name, _ in given]
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ValueError(f"named_parameters has names that are not unique: {', '.join(doubles)}")
    name_of = {p: name for name, p in given}
    nameless = [i for i, p in enumerate(parameters) if p not in name_of]
    if nameless:
        raise ValueError(
            f"{len(nameless)} of the optimizer's {len(parameters)} parameters are not in "
            "named_parameters; pass model.named_parameters() of the whole model"
        )
    return [(name_of[p], p) for p in parameters]


def _share_step(wrapped: Optimizer, original: Optimizer) -> None:
    """Set the attribute by which both objects have one step(), and schedulers notice its calls.

    Both have one __dict__. A program may keep either one, or both.
    """
    kind = type(wrapped)
    # A cycle would keep a dropped optimizer, and its hooks, alive.
    of_wrapped, of_original = weakref.ref(wrapped), weakref.ref(original)

    @functools.wraps(kind.step)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = of_wrapped()
        if optimizer is None:
            kept = of_original()
            assert kept is not None
            optimizer = object.__new__(kind)
            optimizer.__dict__ = kept.__dict__
        optimizer.__dict__["_opt_called"] = True
        return kind.step(optimizer, *args, **kwargs)

    step = not_inlined(step)
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    wrapped.step = step  # type: ignore[method-assign]
