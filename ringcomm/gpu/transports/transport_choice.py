"""Chooses the transport for a group's arrays on GPUs, and says why. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from ringcomm.errors import ConfigError
from ringcomm.nvidia.judge_software import version_text

TRANSPORTS: Final = ("nccl", "ipc", "staged")  # config.GPU_TRANSPORTS: not importable here


@dataclass(frozen=True)
class GpuFacts:
    """Facts about one rank's GPU, from which all ranks make the same choice.

    Attributes:
        uuid: the GPU's uuid.
        node: the same number on all ranks that share memory.
        reaches: uuids of the GPUs of this host whose memory the GPU can reach, including its own.
        can_export: other processes can map the GPU's memory.
        nccl: version of NCCL, such as 22703; 0 if NCCL cannot be used.
        no_nccl: why NCCL cannot be used.
        shares_gpus: NCCL lets ranks share a GPU.
    """

    uuid: str
    node: int
    reaches: tuple[str, ...] = ()
    can_export: bool = True
    nccl: int = 0
    no_nccl: str = ""
    shares_gpus: bool = False

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> GpuFacts:
        fields = json.loads(packed)
        return cls(**fields | {"reaches": tuple(fields["reaches"])})


@dataclass(frozen=True)
class GpuChoice:
    transport: str
    unfit: dict[str, str] = field(default_factory=dict)  # other transport -> why it cannot be used
    is_forced: bool = False  # RINGCOMM_GPU_TRANSPORT names it

    def without(self, problem: str) -> GpuChoice:
        """Return the next choice after `problem` prevented this one.

        Raises:
            ConfigError: the user forced this choice.
        """
        if self.is_forced:
            raise ConfigError(
                f"RINGCOMM_GPU_TRANSPORT is {self.transport}, which cannot be used: {problem}. "
                "Fix that, or set the variable to auto"
            )
        return _first_except({**self.unfit, self.transport: problem})

    def __str__(self) -> str:
        why = "as RINGCOMM_GPU_TRANSPORT says" if self.is_forced else "the first usable"
        lines = [f"{self.transport}, {why} of {', '.join(TRANSPORTS)}"]
        lines += [f"  {name}: no, {reason}" for name, reason in self.unfit.items()]
        return "\n".join(lines)


def choose_transport(facts: Sequence[GpuFacts], forced: str = "auto") -> GpuChoice:
    """Return the transport of these ranks; `forced` is RINGCOMM_GPU_TRANSPORT."""
    reasons = {"nccl": _no_nccl(facts, forced), "ipc": _no_ipc(facts)}
    unfit = {name: why for name, why in reasons.items() if why}
    if forced != "auto":
        return GpuChoice(forced, unfit, is_forced=True)
    return _first_except(unfit)


def _first_except(unfit: dict[str, str]) -> GpuChoice:
    return GpuChoice(next(name for name in TRANSPORTS if name not in unfit), unfit)


def _no_nccl(facts: Sequence[GpuFacts], forced: str) -> str:
    for rank, each in enumerate(facts):
        if each.no_nccl:
            return f"rank {rank}: {each.no_nccl}"
    other = next((r for r, each in enumerate(facts) if each.nccl != facts[0].nccl), None)
    if other is not None:
        return (
            f"rank 0 has NCCL {version_text(facts[0].nccl)}, rank {other} has "
            f"{version_text(facts[other].nccl)}: install the same on all"
        )
    shared = _shared_gpu(facts)
    may_share = forced == "nccl" and all(each.shares_gpus for each in facts)
    if shared and not may_share:
        return f"ranks {shared[0]} and {shared[1]} share a GPU, and NCCL needs a GPU for each rank"
    return ""


def _no_ipc(facts: Sequence[GpuFacts]) -> str:
    other = next((r for r, each in enumerate(facts) if each.node != facts[0].node), None)
    if other is not None:
        return f"rank 0 and rank {other} are on different hosts"
    for rank, each in enumerate(facts):
        if not each.can_export:
            return f"rank {rank}: its GPU's memory cannot be mapped by other processes"
    for rank, each in enumerate(facts):
        for peer, other_facts in enumerate(facts):
            if other_facts.uuid not in each.reaches:
                return f"the GPU of rank {rank} cannot reach the memory of rank {peer}'s"
    return ""


def _shared_gpu(facts: Sequence[GpuFacts]) -> tuple[int, int] | None:
    first: dict[str, int] = {}
    for rank, each in enumerate(facts):
        if each.uuid in first:
            return first[each.uuid], rank
        first[each.uuid] = rank
    return None
