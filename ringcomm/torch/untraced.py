"""Keeps torch.compile from tracing functions: hooks of autograd, methods that C++ calls, step()."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
_torch: Final[Any] = torch  # its stubs lack these names


def untraced(function: F, *, with_callees: bool = True) -> F:
    """Keep torch.compile from tracing `function`, and functions that it calls; return `function`.

    In a compiled step, torch would trace all that runs after a graph break, as backward() is one.
    This replaces torch._disable_dynamo(), whose first call takes 1 to 2 s: it imports all of
    torch._dynamo.
    """
    frames = _torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):  # before torch 2.7
        return _torch._disable_dynamo(function, with_callees)  # type: ignore[no-any-return]
    action = frames._FrameAction
    skip = frames._FrameExecStrategy(action.SKIP, action.SKIP if with_callees else action.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skip)
    return function


def untrace_methods(kind: type, below: type) -> None:
    """Keep torch.compile from tracing methods of `kind` and of its bases that derive from `below`.

    A traced function that calls one is interrupted there: a graph break.
    """
    for each in kind.__mro__[: kind.__mro__.index(below)]:
        for name, method in vars(each).copy().items():
            # What a decorator has made shares its code with functions that are not ours.
            is_plain = inspect.isfunction(method) and not hasattr(method, "__wrapped__")
            if is_plain and not hasattr(method, "_torchdynamo_disable"):
                setattr(each, name, not_inlined(method))


def not_inlined(function: F) -> F:
    """Return untraced(function); functions that call it are not traced through it, either."""
    function = untraced(function)
    # What torch.compiler.disable() sets:
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it waits for other ranks"  # type: ignore[attr-defined]
    return function
