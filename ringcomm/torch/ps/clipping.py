"""Clipping by the global norm, and loss scaling, of gradients that the servers apply."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor of clip_grad_norm_() for this global norm; NaN for NaN."""
    return min(max_norm / (norm + 1e-6), 1.0)


def factor_of(squares: float, grad_scale: float, max_norm: float | None) -> float:
    """Return the factor that unscales and clips gradients; `squares` is of the scaled ones."""
    factor = 1 / grad_scale
    if max_norm is None:
        return factor
    return clip_factor(math.sqrt(squares) * factor, max_norm) * factor


def squares_of(gradients: Iterable[torch.Tensor]) -> tuple[float, bool]:
    """Return the sum of squares of flat gradients, and whether all values are finite."""
    squares, is_finite = 0.0, True
    for x in gradients:
        total = float(x.double().square().sum())
        squares += total
        is_finite &= math.isfinite(total) or bool(torch.isfinite(x).all())
    return squares, is_finite


def clip_gradients(gradients: Sequence[torch.Tensor], of_rows: float, max_norm: float) -> float:
    """Clip gradients in place; return the factor, which also holds for rows (of_rows: squares)."""
    squares, _ = squares_of(gradients)
    factor = clip_factor(math.sqrt(squares + of_rows), max_norm)
    for x in gradients:
        x.mul_(factor)
    return factor


def is_on(scaler: Any) -> bool:
    return scaler is not None and bool(scaler.is_enabled())


def note_found_inf(scaler: Any, optimizer: Optimizer, *, is_finite: bool) -> None:
    """Set what scaler.update() reads, within scaler.step(): the result of all workers."""
    for found in scaler._found_inf_per_device(optimizer).values():
        found.fill_(0.0 if is_finite else 1.0)
