"""The wire over mpi4py, where a fake communicator shows what no job does in a test's time."""

from types import SimpleNamespace

from ringcomm.transport.presence import Line, Presence


class Group:
    """The group of some ranks, which counts those that nobody has freed."""

    alive = 0

    def __init__(self, ranks):
        self.ranks, self.size = ranks, len(ranks)
        Group.alive += 1

    def Translate_ranks(self, ranks, other):
        assert ranks is None
        return [other.ranks.index(rank) for rank in self.ranks]

    def Free(self):
        Group.alive -= 1


def test_looking_for_failed_ranks_leaves_no_groups():
    presence = Presence.__new__(Presence)
    presence.is_fault_tolerant = True
    control = SimpleNamespace(Get_failed=lambda: Group([5]), Get_group=lambda: Group([4, 5, 6]))
    presence.lines = [Line(None, control)]
    assert presence._failed_in_mpi() == [1]
    assert Group.alive == 0
