"""The world of this process: its engine, and what lasts while the views of its job change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ringcomm._version import __version__
from ringcomm.config import Settings
from ringcomm.engine.core import current_engine
from ringcomm.engine.core.context import Topology
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.meet_and_leave import end_view, meet
from ringcomm.errors import PeerFailedError, RingcommError
from ringcomm.launched.launcher import command_for
from ringcomm.status.last_words import Failure, LastWords
from ringcomm.status.page_enums import RESERVE, SPARE, PageState
from ringcomm.transport.membership.detect_launcher_fault_tolerance import hosts_of
from ringcomm.transport.membership.launcher_fault_tolerance import Gap

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ringcomm.status.guardian import Guardian
    from ringcomm.transport.membership.service import MembershipService
    from ringcomm.transport.mpi import MpiTransport
    from ringcomm.transport.presence import Presence


class World(NamedTuple):
    """The objects that init() has made; in a later view, `engine` and `transport` are others."""

    engine: Engine
    transport: MpiTransport
    words: LastWords
    guardian: Guardian | None
    start_again: Callable[[], None]
    gap: Gap | None  # which losses the launcher lets the others not survive

    @property
    def presence(self) -> Presence:
        return self.transport.presence

    @property
    def membership(self) -> MembershipService | None:
        """The agreement on the members; None if the job ends when a rank is lost."""
        return self.presence.membership

    @property
    def is_outside(self) -> bool:
        """True if this process has no place in the job: a spare, or a rank that was too many."""
        return self.membership is not None and not self.membership.state.is_member

    @property
    def is_changed(self) -> bool:
        """True if the job has gone on in another view, maybe without this process."""
        here = self.transport.view.number
        return here > 0 or (self.membership is not None and self.membership.state.view.number > 0)

    @property
    def survives_deaths(self) -> bool:
        """True if the launcher lets other ranks go on after a death."""
        is_elastic = self.membership is not None and not (self.gap and self.gap.ends_job)
        return self.presence.is_fault_tolerant or is_elastic

    @property
    def heals(self) -> bool:
        """True if the ranks go on in another view after a death, or because some join or leave."""
        if self.membership is None:
            return False
        return self.survives_deaths or self.membership.state.wants_another_size

    def gap_text(self, what: str) -> str:
        """Return one line on the losses that this job does not survive; "" if it survives all."""
        presence, gap = self.presence, self.gap
        if self.membership is None and not (gap and gap.ends_job):
            gap = Gap("RINGCOMM_ELASTIC is not 1")
        if gap is None or presence.size == 1:
            return ""
        outside = () if self.membership is None else self.membership.state.outside
        n, hosts = presence.size - len(outside), hosts_of(presence)
        where = ["-H", ",".join(f"{host}:{n}" for host, n in hosts.items())]
        least = self.engine.settings.elastic_min
        elastic = ["--elastic", f"{least}:{presence.size}"]
        return gap.text(what, command_for(n, *elastic, *(where if len(hosts) > 1 else [])))


_world: World | None = None


def current() -> World | None:
    return _world


def is_outside() -> bool:
    return _world is not None and _world.is_outside


def enter(world: World | None) -> None:
    global _world  # noqa: PLW0603 - one per process, as in MPI
    _world = world
    current_engine.serve_process(None if world is None else world.engine)


def engine_for(transport: MpiTransport, settings: Settings) -> Engine:
    topology = topology_of(transport.places, transport.rank)
    engine = Engine(transport, settings, topology, transport.page)
    presence, members = transport.presence, transport.view.members
    engine.watch.line_of = lambda rank: presence.where_is(members[rank])
    return engine


def begin_view(world: World) -> None:
    """Enter a world, and return once all ranks of its view have; see meet()."""
    from ringcomm.engine.api.tuning_files import load

    engine = world.engine
    enter(world)
    table = load(engine.settings, engine.transport) if engine.job_rank == 0 else ""
    meet(engine, __version__, table)
    engine.progress.work_in_background()
    page, view = world.transport.page, world.transport.view
    page.set_state(PageState.RUNNING)
    if world.membership is not None:
        me = world.transport.rank
        page.set_role("" if me == world.presence.number else f"rank {me}")
        if view.number:
            page.note_event(f"goes on as rank {me} of {len(view.members)}, view {view.number}")


def stay_outside(world: World) -> None:
    """Enter a world in which this process, a spare, has no place yet: its operations are errors."""
    enter(world)
    error = RingcommError(
        f"this process (number {world.presence.number}) has no place in the job, because it is a "
        "spare: only a function with @rc.elastic.run gives it one. Move collective calls that come "
        "before it into that function"
    )
    end_view(world.engine, error)  # its page says STARTING, until it has a place
    is_reserve = world.presence.number >= world.presence.size - world.engine.settings.reserves
    world.transport.page.set_role(RESERVE if is_reserve else SPARE)


def topology_of(places: NDArray[Any], rank: int) -> Topology:
    me = places[rank]
    peers = sorted(set(places["machine"][places["local_rank"] == me["local_rank"]].tolist()))
    cross_rank = peers.index(me["machine"])
    return Topology(int(me["local_rank"]), int(me["local_size"]), cross_rank, len(peers))


def blamed(error: PeerFailedError) -> int:
    """Return the rank that an error blames, by its number in the first view."""
    return error.rank if _world is None else _world.presence.number_of(error.rank, error.view)


def tell_the_others(failure: Failure) -> None:
    """Announce a failure to the other ranks, and end this rank's own waits; any thread may call."""
    if _world is None:
        return
    watch, view = _world.engine.watch, _world.transport.view
    culprit = None if failure.blames is None else view.rank_of(failure.blames)
    if culprit is None:
        watch.own_failure = f"{failure.reason} in another thread"
    watch.announce_failed(watch.transport.rank if culprit is None else culprit, failure.reason)
