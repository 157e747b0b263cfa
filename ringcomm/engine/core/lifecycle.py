"""The beginning and the end of an engine: what all ranks compare, and how they part."""

from __future__ import annotations

from ringcomm.collectives.table import Table
from ringcomm.engine.core.agreement import broadcast_bytes
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.state import n_forks
from ringcomm.engine.progress.deadlines import Farewell
from ringcomm.errors import CommTimeoutError, PeerFailedError, RingcommError
from ringcomm.status.page import State
from ringcomm.transport.channel import Channel
from ringcomm.transport.members import ranks_text


def meet(engine: Engine, version: str, table: str = "") -> None:
    """Return when every rank runs this version and its guardian watches; first call of all.

    table: on rank 0: what was measured on this topology; all ranks choose by it.

    Raises:
        MismatchError: ranks differ in their version, or in a setting that must be alike.
    """
    call = Call("init", settings=(f"ringcomm {version}", *engine.settings.shared))

    async def share(t: Channel) -> None:
        text = await broadcast_bytes(table.encode(), 0, t)
        engine.selection.table = Table.loads(text.decode()) if text else None

    engine.execute("init", None, lambda _: Plan(call, 0, share))


def leave(engine: Engine, how: str, *, keeps_wire: bool = False) -> bool:
    """Complete what was started and announce that this rank takes part in nothing more.

    Returns when no other rank does. There is no deadline: a rank may evaluate for hours after the
    others are done, but a warning says for whom this one waits. Whoever needs this rank after all
    gets a PeerFailedError, and a death ends this wait. An engine that is unusable does not wait.

    Args:
        how: "called shutdown()".
        keeps_wire: an engine that has_waited_in_vain is not closed, so that it can still
            see_others_leave().

    Returns:
        True if every rank left in order, so that MPI can be finalized.
    """
    state, progress, watch = engine.state, engine.progress, engine.watch
    if state.is_closed or state.n_forks != n_forks():
        return False
    unsaid = engine.extensions.say_goodbye()
    with engine.pending.lock:
        state.is_closed = True
    was_broken = state.is_broken
    while pending := engine.pending.operations():  # some leave others behind; see follow_up()
        for operation in pending:
            progress.wait(operation.task)
    state.broke_while_leaving = unsaid if was_broken else state.error or unsaid
    progress.stop(state.copy_of_error)
    if engine.page is not None:
        engine.page.set_state(State.LEAVING)
    engine.pending.record(None)
    watch.announce_left(how, is_last=state.is_broken)
    if not state.is_broken:
        progress.run_until(Farewell(watch, engine.settings).is_over)
        if not watch.peers.are_all_gone:  # one has died
            watch.announce_left(how, is_last=True)
    is_clean = not state.is_broken and not watch.peers.dead
    if not (keeps_wire and state.has_waited_in_vain):
        close(engine, is_clean=is_clean)
    return is_clean


def see_others_leave(engine: Engine) -> None:
    """Return once all other ranks have left; after leave(keeps_wire=True), and before close().

    Raises:
        CommTimeoutError: some have not within RINGCOMM_TIMEOUT_S.
        PeerFailedError: one died or failed meanwhile.
    """
    limit_s, peers = engine.settings.timeout_or_inf, engine.watch.peers
    engine.progress.run_until(Farewell(engine.watch, engine.settings, limit_s).is_over)
    for rank, reason in peers.dead.items():
        raise PeerFailedError(
            f"init: {engine.transport.label(rank)} {reason}, so the ranks cannot begin "
            "anew. End this job",
            rank=rank,
            reason=reason,
        )
    if not peers.are_all_gone:
        raise CommTimeoutError(
            f"init: rank {engine.job_rank} has waited {limit_s:g} s for ranks that have not called "
            f"shutdown(): {ranks_text(peers.still_here)}. After an error all ranks "
            "call shutdown() before they can init() again. End this job if they cannot",
            missing=peers.still_here,
        )


def close(engine: Engine, *, is_clean: bool) -> None:
    """Free what MPI and the wire hold; `is_clean`: all ranks do, and no message is under way."""
    engine.extensions.close(is_clean=is_clean)
    engine.transport.close(is_clean=is_clean)
    engine.groups.default.short_calls = None
    engine.watch.listeners.clear()  # no cycle may keep the page's descriptor
    engine.watch.before_poll = None
    engine.progress.close()


def stop(engine: Engine) -> None:
    """End the thread in the background and what is under way: this rank has failed."""
    state = engine.state
    state.error = state.error or RingcommError(
        "this rank has failed, so its operations were broken off"
    )
    engine.progress.stop(state.copy_of_error)
