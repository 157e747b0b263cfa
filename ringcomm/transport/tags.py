"""The tags of messages: how their bits are divided. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ringcomm.errors import ConfigError

# What a message holds: payload of a collective, calls, payload of send(), what makes a group.
DATA, CALLS, P2P, GROUPS = 0, 1, 2, 3
_CHANNEL_BITS = 2
_CONTEXTS_MAX, _STREAM_BITS_MAX = 1 << 10, 16
_LEAST_LARGEST = (1 << 15) - 1  # MPI 4.1, 9.1.2: TAG_UB is at least this


@dataclass(frozen=True, slots=True)
class TagLayout:
    """A tag holds a context, a stream, and two bits of channel."""

    largest_tag: int  # that all ranks can send
    n_contexts: int  # how many groups have tags at a time, that of all ranks among them
    n_streams: int  # how many a group has, for operations in flight

    @classmethod
    def within(cls, largest_tag: int) -> Self:
        """Return the layout for a wire with these tags: from 28 bits on, 10 of context and 16.

        Raises:
            ConfigError: they are too few.
        """
        if largest_tag < _LEAST_LARGEST:
            raise ConfigError(
                f"ringcomm.init needs message tags up to {_LEAST_LARGEST}, and the MPI library of "
                f"a rank has tags up to {largest_tag} (TAG_UB). Let it use another of its "
                "transports: with Open MPI, `mpirun --mca pml ob1`"
            )
        bits = (largest_tag + 1).bit_length() - 1 - _CHANNEL_BITS
        n_streams = 1 << min(bits * 5 // 8, _STREAM_BITS_MAX)
        n_contexts = (largest_tag + 1) // (n_streams << _CHANNEL_BITS)
        return cls(largest_tag, min(n_contexts, _CONTEXTS_MAX), n_streams)

    def tag(self, context: int, stream: int, channel: int) -> int:
        """Return the tag of a message.

        Args:
            context: of the group, below n_contexts.
            stream: of the operation among those in flight, below n_streams.
            channel: DATA, CALLS, P2P or GROUPS.
        """
        return (context * self.n_streams + stream) << _CHANNEL_BITS | channel


WIDEST = TagLayout.within((1 << 28) - 1)  # what MPICH has over libfabric
