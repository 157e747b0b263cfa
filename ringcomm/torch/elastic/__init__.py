"""Elastic training with torch, with Horovod's names; see docs/elastic.md and docs/horovod.md."""

from ringcomm.elastic import HostsUpdatedInterrupt, run
from ringcomm.torch.elastic.sampler import ElasticSampler
from ringcomm.torch.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]
