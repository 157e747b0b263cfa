"""Models of the size that a training step is measured with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model and what it is trained on.

    Attributes:
        make: returns a new model; its values follow torch's seed.
        samples: of a rank's batch, by default.
        batch: returns `n` samples.
        loss: returns the loss of the model on a batch.
    """

    make: Callable[[], nn.Module]
    samples: int
    batch: Callable[[int], Tensor]
    loss: Callable[[nn.Module, Tensor], Tensor]


def _mlp() -> nn.Module:
    """Return a perceptron of 20 M parameters in 12 tensors."""
    widths = [1024, 2048, 2048, 2048, 2048, 2048, 512]
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Transformer(nn.Module):
    """A language model of 7 M parameters: many small tensors, and two large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, _WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, nhead=4, dim_feedforward=4 * _WIDTH, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=4)
        self.head = nn.Linear(_WIDTH, _TOKENS)
        mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of the next token, shape (n, length, tokens)."""
        hidden = self.layers(self.embedding(tokens), mask=self.mask, is_causal=True)
        scores: Tensor = self.head(hidden)
        return scores


_TOKENS, _WIDTH, _LENGTH = 8192, 256, 64


def _next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    scores = model(tokens[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


WORKLOADS: Final = {
    "mlp": Workload(
        make=_mlp,
        samples=32,
        batch=lambda n: torch.randn(n, 1024),
        loss=lambda model, x: model(x).pow(2).mean(),
    ),
    "transformer": Workload(
        make=_Transformer,
        samples=8,
        batch=lambda n: torch.randint(_TOKENS, (n, _LENGTH + 1)),
        loss=_next_token_loss,
    ),
}
