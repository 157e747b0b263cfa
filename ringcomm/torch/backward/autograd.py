"""All that is used of autograd's inner workings: hooks of a parameter, runs, what encloses them.

A run is one execution of autograd's engine. A reentrant checkpoint starts runs within runs; the
user's backward() is the outermost.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ringcomm.errors import RingcommError


class Listener(Protocol):
    """An object that autograd calls before and after each gradient, by its parameter's index."""

    def before_gradient(self, index: int) -> None:
        """Make ready for a gradient that is about to be added to .grad."""
        ...

    def after_gradient(self, index: int) -> None:
        """Take the gradient: .grad is as this run leaves it."""
        ...


_LOST: Final = (
    "torch {} has added to the gradient of parameter {} of the optimizer and not told so before, "
    "so it would be wrong. It forgets the hooks of a parameter that a torch.autograd.Function saves"
    " by ctx.save_for_backward() within torch.utils.checkpoint(use_reentrant=False): keep it as an"
    " attribute of ctx instead, or use a newer torch"
)


class Hooks:
    """Tell a listener of gradients for as long as it lives; never in a forked child.

    The listener is held weakly: an optimizer that was dropped reduces nothing. The parameters, by
    index, are leaves that require gradients.
    """

    def __init__(self, listener: Listener, parameters: dict[int, torch.nn.Parameter]) -> None:
        self._nodes: dict[int, Node] = {}  # a node's hooks go with it, and nobody else keeps it
        self._handles: list[RemovableHandle] = []
        self._announced: set[int] = set()  # gradients that are about to be added
        ref = weakref.ref(listener)
        for index, parameter in parameters.items():
            self._attach(ref, index, parameter)
        weakref.finalize(listener, _remove, self._handles).atexit = False

    def remove(self) -> None:
        """Tell nobody any more."""
        _remove(self._handles)
        self._nodes.clear()

    def has_lost(self, index: int, parameter: torch.Tensor) -> bool:
        """Return True if autograd uses another node for it now: its dtype or device changed."""
        node = self._nodes.get(index)
        return node is not None and get_gradient_edge(parameter).node is not node

    def _attach(
        self, ref: weakref.ref[Listener], index: int, parameter: torch.nn.Parameter
    ) -> None:
        pid, announced, nodes = os.getpid(), self._announced, self._nodes

        def before(gradients: Sequence[torch.Tensor | None]) -> None:
            listener = ref()
            if listener is not None and gradients[0] is not None and os.getpid() == pid:
                announced.add(index)
                listener.before_gradient(index)

        def after(tensor: torch.Tensor) -> None:
            listener = ref()
            if listener is None or os.getpid() != pid:
                return
            is_silent = index not in announced
            if is_silent and get_gradient_edge(tensor).node is nodes.get(index):  # see has_lost()
                raise RingcommError(_LOST.format(torch.__version__, index))
            announced.discard(index)
            listener.after_gradient(index)

        # Of the node, not of the tensor: autograd.grad() runs a tensor's hooks as well.
        node = get_gradient_edge(parameter).node
        self._nodes[index] = node
        self._handles.append(node.register_prehook(before))
        self._handles.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def current_run() -> int:
    """Return the number of the run in which this hook is called."""
    return torch._C._current_graph_task_id()


def at_end_of_run(callback: Callable[[], None]) -> None:
    """Call back when the run of this hook has ended well; forget it if the run fails."""
    Variable._execution_engine.queue_callback(callback)


def within_outer_run(callback: Callable[[], None]) -> bool:
    """Call back from the run that encloses the one that ends now; return False if there is none."""
    node = torch._C._current_autograd_node()  # what the outer run is executing
    after = [successor for successor, _ in node.next_functions if successor] if node else []
    handles: list[RemovableHandle] = []

    def once(_: object) -> None:
        _remove(handles)
        callback()

    handles += [successor.register_prehook(once) for successor in after]
    return bool(handles)
