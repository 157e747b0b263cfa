"""The bits of a message's tag. Pure."""

from __future__ import annotations

from typing import NamedTuple, Self

from ringcomm.errors import ConfigError

# Channels: payload of collectives, calls, payload of send(), messages that make a group.
DATA, CALLS, P2P, GROUPS = 0, 1, 2, 3
_CHANNEL_BITS = 2
_CONTEXTS_MAX, _STREAM_BITS_MAX = 1 << 10, 16
_LEAST_LARGEST = (1 << 15) - 1  # MPI 4.1, 9.1.2: TAG_UB is at least this


class TagLayout(NamedTuple):
    """The layout of a tag: a context, a stream, and two bits of channel."""

    largest_tag: int  # the largest tag that all ranks can send
    n_contexts: int  # number of groups that can exist at a time, the group of all ranks included
    n_streams: int  # number of operations of a group that can be under way at a time

    @classmethod
    def within(cls, largest_tag: int) -> Self:
        """Return the layout for tags of 0 to `largest_tag`.

        With 28 bits or more, the context has 10 bits and the stream 16. Raises ConfigError if
        largest_tag is too small.
        """
        if largest_tag < _LEAST_LARGEST:
            raise ConfigError(
                f"ringcomm.init needs message tags up to {_LEAST_LARGEST}, and the MPI library of "
                f"a rank has tags up to {largest_tag} (TAG_UB). Use another of its "
                "transports: with Open MPI, `mpirun --mca pml ob1`"
            )
        bits = (largest_tag + 1).bit_length() - 1 - _CHANNEL_BITS
        n_streams = 1 << min(bits * 5 // 8, _STREAM_BITS_MAX)
        n_contexts = (largest_tag + 1) // (n_streams << _CHANNEL_BITS)
        return cls(largest_tag, min(n_contexts, _CONTEXTS_MAX), n_streams)

    def tag(self, context: int, stream: int, channel: int) -> int:
        """Return the tag of messages of a group (context), an operation (stream) and a channel."""
        return (context * self.n_streams + stream) << _CHANNEL_BITS | channel


WIDEST = TagLayout.within((1 << 28) - 1)  # the tags of MPICH over libfabric
