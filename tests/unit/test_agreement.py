"""The agreement's messages, with ranks as coroutines: whoever differs, all ranks know it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from ringcomm.engine.core.agreement import agree

SIZES = [2, 3, 4, 5, 8, 9]


class Ranks:
    """Messages of ranks that are coroutines of one thread."""

    def __init__(self, size):
        self.size = size
        self.sent = {}

    def channel(self, rank):
        def tell(dest, kind, text="", *, key, fingerprint, value, flag, round):
            header = SimpleNamespace(fingerprint=fingerprint, value=value, flag=flag)
            self.sent[rank, dest, round] = SimpleNamespace(header=header, text=text)

        async def hear(kind, key, source, round_):
            while (source, rank, round_) not in self.sent:
                await Turn()
            return self.sent.pop((source, rank, round_))

        return SimpleNamespace(
            rank=rank, size=self.size, key="", tell=tell, hear=hear, phase=lambda _: nullcontext()
        )

    def run(self, body):
        """Return what `await body(rank, channel)` gives on each rank."""
        running = {rank: body(rank, self.channel(rank)) for rank in range(self.size)}
        results = {}
        for _ in range(100 * self.size):
            for rank, coroutine in list(running.items()):
                try:
                    coroutine.send(None)
                except StopIteration as end:
                    results[rank] = end.value
                    del running[rank]
        assert not running, f"ranks {list(running)} wait for ever"
        return [results[rank] for rank in range(self.size)]


class Turn:
    def __await__(self):
        yield


@pytest.mark.parametrize("size", SIZES)
def test_whoever_differs_all_ranks_know_it(size):
    for dissenter in range(size):
        verdicts = Ranks(size).run(lambda r, t, odd=dissenter: agree(7 + (r == odd), 0, t))
        assert [each.is_agreed for each in verdicts] == [False] * size


@pytest.mark.parametrize("size", SIZES)
def test_equal_calls_are_agreed_on_with_the_largest_proposal_and_the_bits_of_all(size):
    verdicts = Ranks(size).run(lambda r, t: agree(7, (r * 5) % size, t, in_use=1 << r))
    assert {(each.is_agreed, each.value, each.in_use) for each in verdicts} == {
        (True, max((r * 5) % size for r in range(size)), (1 << size) - 1)
    }
