"""Parameter server for torch: all of ringcomm.ps, an optimizer, and embeddings on the servers."""

from ringcomm.ps import *  # noqa: F403 - this face is that module and more
from ringcomm.ps import __all__ as _of_ps
from ringcomm.torch.ps.collection import EmbeddingCollection
from ringcomm.torch.ps.conversion import convert
from ringcomm.torch.ps.embeddings import Embedding, EmbeddingBag
from ringcomm.torch.ps.optimizer import DistributedOptimizer
from ringcomm.torch.ps.server_state import model_state_dict

__all__ = [  # noqa: PLE0604 - names of another __all__
    "DistributedOptimizer",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "convert",
    "model_state_dict",
    *_of_ps,
]
