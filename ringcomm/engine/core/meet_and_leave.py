"""The beginning and the end of an engine: ranks compare their settings, and leave."""

from __future__ import annotations

from ringcomm.collectives.measured_times import TimeTable
from ringcomm.config import Settings
from ringcomm.engine.core.agreement import broadcast_bytes
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.progress.deadlines import Farewell
from ringcomm.errors import CommTimeoutError, PeerFailedError, RingcommError
from ringcomm.ranks_as_text import ranks_text
from ringcomm.status.page_enums import PageState
from ringcomm.transport.channel import Channel
from ringcomm.transport.failure_news import DIRECT, REST_S, RESTS, WAITS

_DRIVER_S = 5.0  # for another thread of this rank, which drives, to end


def meet(engine: Engine, version: str, table: str = "") -> None:
    """Return once all ranks agree on version and settings. This is an engine's first operation.

    `table` is rank 0's table of measured times; all ranks choose algorithms by it. Raises
    MismatchError if ranks differ in their version, or in a setting that must be the same.
    """
    call = Call("init", settings=settings_to_compare(engine.settings, version))

    async def share(t: Channel) -> None:
        text = await broadcast_bytes(table.encode(), 0, t)
        engine.selection.table = TimeTable.loads(text.decode()) if text else None

    engine.execute("init", None, lambda _: Plan(call, 0, share))


def settings_to_compare(settings: Settings, version: str) -> tuple[str, ...]:
    return (f"ringcomm {version}", *settings.shared)


def leave(engine: Engine, how: str, *, keeps_wire: bool = False) -> bool:
    """Complete the pending operations, announce that this rank leaves, and wait for the others.

    Returns when all ranks have left. There is no deadline, because one rank may evaluate for hours
    after the others are done; a warning names the ranks that are still here. An operation that
    needs this rank raises PeerFailedError on the others, and a death ends this wait. After a
    failure this rank waits for at most REST_S, and only in a large job.

    Args:
        how: text for the other ranks, such as "called shutdown()".
        keeps_wire: if state.has_waited_in_vain, do not close, so that see_others_leave() can
            use the engine.

    Returns:
        True if the engine is not broken, and no rank has failed without which the job cannot go on.
        MPI can be finalized if none has died at all.
    """
    state, progress, watch = engine.state, engine.progress, engine.watch
    if state.is_closed or state.is_in_child:
        return False
    with serve_thread(engine):  # the process may have none any more
        unsaid = engine.extensions.say_goodbye()
    with engine.pending.lock:
        state.close()
    was_broken = state.is_broken
    while pending := engine.pending.operations():  # new ones may begin meanwhile; see follow_up()
        for operation in pending:
            progress.wait(operation.task)
            if isinstance(operation.task.error, PeerFailedError):
                unsaid = unsaid or operation.task.error  # though the engine may be usable
    state.broke_while_leaving = unsaid if was_broken else state.error or unsaid
    progress.stop(state.copy_of_error)
    if engine.page is not None:
        engine.page.set_state(PageState.LEAVING)
    engine.pending.record(None)
    watch.announce_left(how, RESTS if state.is_broken else WAITS)
    if not state.is_broken:
        progress.run_until(Farewell(watch, engine.settings).is_over)
    if engine.job_size > DIRECT and (state.is_broken or not watch.peers.are_all_gone):
        _rest(engine, how)
    is_clean = not state.is_broken and not watch.peers.is_fatal
    if not (keeps_wire and state.has_waited_in_vain):
        close(engine, is_clean=is_clean and not watch.peers.dead)
    return is_clean


def _rest(engine: Engine, how: str) -> None:
    """Pass news on for a while, after a failure in a large job; see News."""
    if not engine.state.is_broken:  # so far this rank has announced that it waits
        engine.watch.announce_left(how, RESTS)
    engine.progress.run_until(lambda: engine.watch.peers.are_all_gone, timeout_s=REST_S)
    engine.watch.end_rest()


def see_others_leave(engine: Engine) -> None:
    """Return once all others have left; call it after leave(keeps_wire=True), before close().

    Raises CommTimeoutError after RINGCOMM_TIMEOUT_S, PeerFailedError if a rank died or failed.
    """
    limit_s, peers = engine.settings.timeout_or_inf, engine.watch.peers
    engine.progress.run_until(Farewell(engine.watch, engine.settings, limit_s).is_over)
    for rank, reason in peers.dead.items():
        raise PeerFailedError(
            f"init: {engine.transport.label(rank)} {reason}, so the ranks cannot begin "
            "anew. End this job",
            rank=rank,
            reason=reason,
            view=engine.transport.view.number,
        )
    if not peers.are_all_gone:
        raise CommTimeoutError(
            f"init: rank {engine.job_rank} has waited {limit_s:g} s for ranks that have not called "
            f"shutdown(): {ranks_text(peers.still_here)}. After an error all ranks must "
            "call shutdown() before they call init() again. End this job if they cannot",
            missing=peers.still_here,
        )


def close(engine: Engine, *, is_clean: bool) -> None:
    """Free the wire and all extensions. `is_clean`: all ranks close, no message is under way."""
    engine.extensions.close(is_clean=is_clean)
    engine.control.signals.release()
    engine.transport.close(is_clean=is_clean)
    _drop_references(engine)


def _drop_references(engine: Engine) -> None:
    engine.groups.default.short_calls = engine.groups.default.mail = None
    engine.watch.forget_engine()  # a cycle would keep the page's descriptor open
    engine.watch.before_poll = None
    engine.progress.close()


def end_view(engine: Engine, error: RingcommError) -> None:
    """End an engine whose view is over, without a message to others; its wire stays open.

    `error` ends the operations that are under way, and is the error of all later ones. When this
    returns, no thread of this rank works for the engine, and no other rank uses its memory.
    """
    engine.state.fail(error)
    engine.progress.stop(engine.state.copy_of_error)
    engine.progress.await_driver(_DRIVER_S)
    if engine.transport.node is not None:
        engine.transport.node.abandon()
    engine.pending.record(None)
    engine.extensions.close(is_clean=False)
    _drop_references(engine)


def stop(engine: Engine) -> None:
    state = engine.state
    state.fail(RingcommError("this rank has failed, so its operations were broken off"))
    engine.progress.stop(state.copy_of_error)
    engine.pending.record(None)
