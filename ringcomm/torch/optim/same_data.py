"""Notices that all ranks train on the same data, which costs their work and gains nothing.

In the first step the ranks tell each other a digest of their gradients, before these are reduced.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.group import Group

_SAMPLE: Final = 4096  # elements of each gradient
_MOST: Final = 64  # gradients
NO_VALUES: Final = (0, 0)

_log = logging.getLogger("ringcomm")


def digest_of(gradients: Iterable[torch.Tensor | None]) -> tuple[int, ...]:
    """Return two int32 that tell samples of gradients apart; NO_VALUES if these are all 0."""
    digest, n, is_zero = hashlib.blake2b(digest_size=8), 0, True
    for gradient in gradients:
        if gradient is None or gradient.layout is not torch.strided or not gradient.is_cpu:
            continue
        sample = gradient.detach().reshape(-1)[:_SAMPLE].resolve_conj().resolve_neg().contiguous()
        is_zero = is_zero and not bool(sample.any())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
        n += 1
        if n == _MOST:
            break
    if is_zero:
        return NO_VALUES
    return tuple(np.frombuffer(digest.digest(), np.int32).tolist())


def warn_of_same_data(digests: NDArray[Any], group: Group) -> None:
    """Log a warning on the first rank if all digests, by rank, are the same."""
    if len(digests) < 2 or group.rank != 0 or not engine().settings.hints:
        return
    if (digests != digests[0]).any() or tuple(digests[0]) == NO_VALUES:
        return
    _log.warning(
        "the first gradients of all %d ranks are the same bit for bit: each rank seems to train on "
        "the same data, which takes their work and gains nothing. Give each one its part: "
        "DataLoader(dataset, sampler=ringcomm.data.ShardedSampler(dataset)). RINGCOMM_HINTS=0 "
        "silences this",
        len(digests),
    )
