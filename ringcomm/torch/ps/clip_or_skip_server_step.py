"""Clipping and skipping of a step whose gradients the servers apply."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringcomm.torch.ps.bucket_pusher import BucketPusher
from ringcomm.torch.ps.clip_and_scale import factor_of, is_on
from ringcomm.torch.ps.row_gradients_until_step import RowGradients


@dataclass(frozen=True)
class ServerStep:
    """The end of a step; grad_scale is the factor of the loss."""

    pusher: BucketPusher
    rows: RowGradients
    grad_scale: float

    def own_factor(self) -> float | None:
        """Return the factor for the gradients before the push; None: push nothing.

        In modes without rounds each push is an update, and is clipped or skipped by itself.
        """
        if not self.pusher.options.needs_all:
            return 1.0
        if self.pusher.options.is_held:
            return self.poison() / (1.0 if self.pusher.options.pushes_scaled else self.grad_scale)
        squares, is_finite = self.pusher.own_squares()
        of_rows, are_finite = self.rows.own_squares()
        if not (is_finite and are_finite) and is_on(self.pusher.options.scaler):
            return None
        return factor_of(squares + of_rows, self.grad_scale, self.pusher.options.max_norm)

    def poison(self) -> float:
        """Return NaN, so that all workers skip the step, if waiting rows are not finite; else 1."""
        is_finite = not is_on(self.pusher.options.scaler) or self.rows.own_squares()[1]
        return 1.0 if is_finite else math.nan

    def release(self) -> bool:
        """Make updates of the means that the servers hold; return False if one is not finite.

        A late worker checks its own gradient instead.
        """
        scale = self.grad_scale if self.pusher.options.pushes_scaled else 1.0
        held = [bucket for bucket in self.pusher.buckets if bucket.push is not None]
        pushed = []
        for bucket in held:
            assert bucket.push is not None
            pushed.append(bucket.push.wait())
        if any(each.why == "late" for each in pushed):  # the means are of the other workers
            is_finite = not is_on(self.pusher.options.scaler) or (
                self.pusher.own_squares()[1] and self.rows.own_squares()[1]
            )
            self.finish_rows(1.0 if is_finite else None)
            return is_finite
        of_rows, are_finite = self.rows.mean_squares()
        are_finite &= all(each.is_finite for each in pushed)
        is_finite = are_finite or not is_on(self.pusher.options.scaler)
        squares = sum(each.squares for each in pushed) + of_rows * scale**2
        factor = factor_of(squares, scale, self.pusher.options.max_norm)
        releases = [bucket.table.release(factor if is_finite else None) for bucket in held]
        for each in releases:
            each.wait()
        self.finish_rows(factor * scale if is_finite else None)
        return is_finite

    def finish_rows(self, clip: float | None) -> None:
        """Update rows by their unscaled gradients times a factor; None: drop the gradients."""
        self.rows.release(clip)
        if clip is not None:
            self.rows.push(clip / self.grad_scale, self.pusher.weight)
