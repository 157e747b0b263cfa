"""What a rank starts holds SIGTERM and SIGUSR1 while the rank catches them.

csrc/status/stop_signals.hpp says what that means. Forks of a rank do, all that multiprocessing
starts, and any other child once it imports ringcomm. Other programs, such as a shell command, do
not: they cannot tell who sent a signal, and if they ignored SIGTERM they would outlive
Popen.terminate().
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from multiprocessing import context, util
from typing import Any

from ringcomm._core import (
    hold_stop_signals_again,
    hold_stop_signals_of,
    let_forks_hold_stop_signals,
)
from ringcomm.launched.child_marks import parent_rank_pid

_TORCH = "torch.utils.data._utils.signal_handling"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_HOLD_FIRST = """
import signal
try:
    import ringcomm
except ImportError:
    pass
signal.pthread_sigmask(signal.SIG_UNBLOCK, {numbers})
"""
_start_program: Any = util.spawnv_passfds


def let_children_hold() -> None:
    let_forks_hold_stop_signals()
    _prepare_multiprocessing()


def hold_with_rank() -> None:
    """Hold stop signals with the rank that has started this process; nothing if none has."""
    rank = parent_rank_pid()
    if rank is None:
        return
    hold_stop_signals_of(rank)
    _prepare_multiprocessing()
    # A spawned process calls none of what register_after_fork() has, but this.
    context.SpawnProcess._after_fork = staticmethod(_hold_after_torch)  # type: ignore[attr-defined]


def _prepare_multiprocessing() -> None:
    util.spawnv_passfds = _start_holding
    util.register_after_fork(_hold_after_torch, _call)


def _start_holding(path: str | bytes, args: Sequence[Any], passfds: Sequence[int]) -> Any:
    """Start a program of multiprocessing: a spawned process, its forkserver or resource tracker.

    Its imports may take seconds, and Python itself 20 ms, before it could hold a signal. So it
    inherits the signals as blocked until it holds them.
    """
    words = list(args)
    if "-c" not in words:  # a frozen program
        return _start_program(path, words, passfds)
    code = words.index("-c") + 1
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    numbers = [int(each) for each in _SIGNALS if each not in before]
    words[code] = _HOLD_FIRST.format(numbers=numbers) + words[code]
    try:
        return _start_program(path, words, passfds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hold_after_torch() -> None:
    """Let workers of torch's loader hold SIGTERM, though they set a handler when they start."""
    module = sys.modules.get(_TORCH)
    if module is None:
        return
    set_handlers = module._set_worker_signal_handlers

    def set_handlers_and_hold() -> None:
        set_handlers()
        hold_stop_signals_again()

    module._set_worker_signal_handlers = set_handlers_and_hold  # type: ignore[attr-defined]


def _call(function: Any) -> None:
    function()
