"""The one module that uses autograd's inner workings: hooks of parameters, and runs.

A run is one execution of autograd's engine. A reentrant checkpoint starts runs inside a run; the
user's backward() is the outermost run.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ringcomm.errors import RingcommError
from ringcomm.torch.untraced import untraced


class Listener(Protocol):
    """An object that hooks call before and after each gradient, with the parameter's index."""

    def before_gradient(self, index: int) -> None: ...

    def after_gradient(self, index: int) -> None: ...


_LOST_HOOK: Final = (
    "torch {} added to the gradient of parameter {} of the optimizer without calling the hook "
    "first, so the gradient would be wrong. torch forgets the hooks of a parameter that a "
    "torch.autograd.Function saves by ctx.save_for_backward() within "
    "torch.utils.checkpoint(use_reentrant=False): keep the parameter as an attribute of ctx "
    "instead, or use a newer torch"
)


class Hooks:
    """Hooks of parameters. They call a listener, except in a forked child.

    The listener is held weakly: an optimizer that was dropped reduces nothing.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = weakref.ref(listener)
        self._nodes: dict[int, Node] = {}  # kept alive: the hooks of a node end with the node
        self._handles: list[RemovableHandle] = []
        self._announced: set[int] = set()  # gradients that are about to be added
        self._others: set[int] = set()  # parameters with hooks of the program, which run before
        weakref.finalize(listener, _remove, self._handles).atexit = False

    def add(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Attach hooks to a leaf that requires gradients."""
        pid, announced, nodes, ref = os.getpid(), self._announced, self._nodes, self._listener
        handles, others = self._handles, self._others

        @untraced
        def before(gradients: Sequence[torch.Tensor | None]) -> None:
            listener = ref()
            if listener is not None and gradients[0] is not None and os.getpid() == pid:
                announced.add(index)
                if len(hooks) > 1 and index not in others:
                    others.add(index)  # hooks of the node run after all hooks of the tensor
                    handles.append(nodes[index].register_hook(after_others))
                listener.before_gradient(index)

        @untraced
        def after(tensor: torch.Tensor) -> None:
            listener = ref()
            if index in announced:
                if index not in others and listener is not None:
                    announced.discard(index)
                    listener.after_gradient(index)
                return
            if listener is None or os.getpid() != pid:
                return
            if get_gradient_edge(tensor).node is nodes.get(index):
                raise RingcommError(_LOST_HOOK.format(torch.__version__, index))
            listener.after_gradient(index)

        @untraced
        def after_others(*_: object) -> None:
            listener = ref()
            if index in announced and listener is not None:
                announced.discard(index)
                listener.after_gradient(index)

        # On the node, not on the tensor: autograd.grad() calls a tensor's hooks, too.
        node = get_gradient_edge(parameter).node
        self._nodes[index] = node
        self._handles.append(node.register_prehook(before))
        self._handles.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]
        hooks = parameter._post_accumulate_grad_hooks

    def remove_all(self) -> None:
        _remove(self._handles)
        self._nodes.clear()
        self._announced.clear()
        self._others.clear()

    def has_new_node(self, index: int, parameter: torch.Tensor) -> bool:
        """Return True if autograd has replaced the node: the parameter's dtype or device changed.

        The new node does not have the hook that add() attached.
        """
        node = self._nodes.get(index)
        return node is not None and get_gradient_edge(parameter).node is not node


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def has_other_hooks(parameter: torch.Tensor) -> bool:
    hooks = parameter._post_accumulate_grad_hooks
    return hooks is not None and len(hooks) > 1


def current_run() -> int:
    """Return the number of the current run; only hooks call this function."""
    return torch._C._current_graph_task_id()


def at_end_of_run(callback: Callable[[], None]) -> None:
    """Call `callback` when the current run ends, unless it fails; only hooks call this function."""
    Variable._execution_engine.queue_callback(partial(_run, callback))


@untraced
def _run(callback: Callable[[], None]) -> None:
    callback()


def within_outer_run(callback: Callable[[], None]) -> bool:
    """Call `callback` in the run that contains the ending run; return False if no run does."""
    node = torch._C._current_autograd_node()  # the node that the outer run executes
    after = [successor for successor, _ in node.next_functions if successor] if node else []
    handles: list[RemovableHandle] = []

    @untraced
    def once(_: object) -> None:
        _remove(handles)
        callback()

    handles += [successor.register_prehook(once) for successor in after]
    return bool(handles)
