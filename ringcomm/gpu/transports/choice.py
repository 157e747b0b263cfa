"""Chooses the transport of a group's arrays on GPUs, and says why. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from ringcomm.errors import ConfigError
from ringcomm.nvidia.presence import version_text

TRANSPORTS: Final = ("nccl", "ipc", "staged")  # config.GPU_TRANSPORTS, which this may not import


@dataclass(frozen=True)
class Facts:
    """Facts of one rank's GPU, by which all ranks choose.

    Attributes:
        node: a number that identifies its host.
        reaches: uuids of the GPUs of this host whose memory this one can reach, its own among them.
        can_export: its memory can be mapped by other processes.
        nccl: version of NCCL as a number, such as 22703; 0 if NCCL cannot be used.
        no_nccl: why not.
        shares_gpus: NCCL lets ranks share a GPU.
    """

    uuid: str
    name: str
    node: int
    reaches: tuple[str, ...] = ()
    can_export: bool = True
    nccl: int = 0
    no_nccl: str = ""
    shares_gpus: bool = False

    def pack(self) -> bytes:
        """Return the wire form."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Facts:
        """Return the facts that pack() packed."""
        fields = json.loads(packed)
        return cls(**fields | {"reaches": tuple(fields["reaches"])})


@dataclass(frozen=True)
class GpuChoice:
    """A transport, and why not the others, by name; is_forced: the user wants it."""

    transport: str
    unfit: dict[str, str] = field(default_factory=dict)
    is_forced: bool = False

    def without(self, problem: str) -> GpuChoice:
        """Return the next best choice, because setting up this one failed.

        Raises:
            ConfigError: the user wants this one.
        """
        if self.is_forced:
            raise ConfigError(
                f"RINGCOMM_GPU_TRANSPORT is {self.transport}, which cannot be used: {problem}. "
                "Fix that, or set it to auto"
            )
        unfit = {**self.unfit, self.transport: problem}
        return GpuChoice(next(name for name in TRANSPORTS if name not in unfit), unfit)

    def __str__(self) -> str:
        why = "as RINGCOMM_GPU_TRANSPORT says" if self.is_forced else "the first usable"
        lines = [f"{self.transport}, {why} of {', '.join(TRANSPORTS)}"]
        lines += [f"  {name}: no, {reason}" for name, reason in self.unfit.items()]
        return "\n".join(lines)


def choose_transport(facts: Sequence[Facts], forced: str = "auto") -> GpuChoice:
    """Return the transport of these ranks; `forced` is RINGCOMM_GPU_TRANSPORT."""
    unfit = {
        name: why
        for name, why in (("nccl", _no_nccl(facts, forced)), ("ipc", _no_ipc(facts)))
        if why
    }
    if forced != "auto":
        return GpuChoice(forced, unfit, is_forced=True)
    return GpuChoice(next(name for name in TRANSPORTS if name not in unfit), unfit)


def _no_nccl(facts: Sequence[Facts], forced: str) -> str:
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
        return f"ranks {shared[0]} and {shared[1]} share a GPU, and NCCL needs one for each rank"
    return ""


def _no_ipc(facts: Sequence[Facts]) -> str:
    other = next((r for r, each in enumerate(facts) if each.node != facts[0].node), None)
    if other is not None:
        return f"rank 0 and rank {other} are on different hosts"
    for rank, each in enumerate(facts):
        if not each.can_export:
            return f"rank {rank}: its GPU's memory cannot be mapped by other processes"
    for rank, each in enumerate(facts):
        for peer, its in enumerate(facts):
            if its.uuid not in each.reaches:
                return f"the GPU of rank {rank} cannot reach the memory of rank {peer}'s"
    return ""


def _shared_gpu(facts: Sequence[Facts]) -> tuple[int, int] | None:
    first: dict[str, int] = {}
    for rank, each in enumerate(facts):
        if each.uuid in first:
            return first[each.uuid], rank
        first[each.uuid] = rank
    return None
