"""What must hold at the end of a job of ci/ps_worker_spares_job.py.

| promise | what tells |
|---|---|
| who lives ends, with code 0 | the results; the exit code |
| the state is exact | in each line a rank's own column is what was there, and what it pushed |
| no acknowledged push of the dead is lost or doubled | their columns; one more may have come |
| "sync": a round is the mean over those in it, all who live are, on all servers the same | rounds |
| a newcomer is in exactly the rounds from its first step on | rounds |
| `ps.SSP(s)`: reads have what others pushed more than s steps before, a newcomer, too | seen |
| each place is taken once, and all know by whom | filled |
| the chief is who was there first | is_chief |
| each part of a WorkQueue counts once; what the dead had is given out again | took |
"""

from collections import Counter

import numpy as np
from ps_storm_base import BOUND, SHARE


def problems_of(storm, out, results):
    """Yield what is wrong.

    Args:
        storm: which job it was; see ps_storms.WorkerSpareStorm.
        out: its folder.
        results: what those have written that ended, by rank of the job.
    """
    dead = {int(path.suffix[1:]) for path in out.glob("dead.*")}
    began = {int(path.suffix[1:]): int(path.read_text()) for path in out.glob("began.*")}
    if {*results} != began.keys() - dead:
        yield f"{sorted(began.keys() - dead)} trained and live, and {sorted(results)} have ended"
        return
    if not results:
        return  # all workers have died, and so ended the job
    for each in results.values():
        yield from each["problems"]
        yield from _wrong_values(storm, each, dead)
    yield from _wrong_places(storm, results, dead)
    if not (out / "recovered").exists():
        acked = {rank: (out / f"acked.{rank}").read_bytes() for rank in began}
        yield from _wrong_pushes_of_the_dead(storm, results, acked, dead & began.keys())
        if storm.mode == "ssp":
            yield from _reads_that_miss(storm, results, began, dead)
    if storm.mode == "sync":
        yield from _wrong_rounds(storm, results, began, dead)
    if storm.queue:
        yield from _wrong_parts(storm, out, dead)


def _wrong_values(storm, result, dead):
    me = result["rank"]
    values, before = np.array(result["values"]), np.array(result["before"])
    own = values[:, me] - before[:, me]
    pushed = np.array([*[result["n_dense"]] * (len(own) - 1), result["n_rows"]])
    steps = storm.steps - result["began"]
    if storm.mode in ("async", "ssp"):
        if (own != pushed).any():
            yield f"worker {me} has {own.tolist()}, and has pushed {pushed.tolist()}"
        if not result["n_recovered"] and (pushed != steps).any():
            yield f"worker {me} has made {steps} steps, and pushed {pushed.tolist()}"
    elif ((own < pushed * SHARE / storm.n_workers) | (own > pushed * SHARE)).any():
        yield f"worker {me} has {own.tolist()}, and was in {pushed.tolist()} rounds"
    # Rows of one round are on several servers, of which one may drop what the dead had pushed.
    sums = values[:-1].sum(axis=1)
    if storm.mode == "first_of" and (sums % SHARE).any():
        yield f"worker {me}: {sums.tolist()} is of no whole rounds"
    # If all workers have died, the last step of one of them counts, and is made again.
    n_again = len(dead) if {*range(storm.n_workers)} <= dead else 0
    n_rounds = {int(each) for each in sums / SHARE}
    if storm.mode == "sync" and not n_rounds <= {*range(storm.steps, storm.steps + n_again + 1)}:
        yield f"worker {me}: the sums of {storm.steps} rounds are {sums.tolist()}"


def _wrong_places(storm, results, dead):
    for each in results.values():
        me, filled = each["rank"], each["filled"]
        newcomers, places = [x[0] for x in filled], [x[2] for x in filled]
        if len({*newcomers}) < len(filled) or len({*places}) < len(filled):
            yield f"worker {me} knows of places that were taken twice: {filled}"
        if {*places} - dead:
            yield f"worker {me} knows of places of those that live: {filled}"
        if (me >= storm.n_workers) != (me in newcomers):
            yield f"worker {me} knows of {filled}"
    taken = Counter(each["place"] for each in results.values())
    if taken and max(taken.values()) > 1:
        yield f"two workers have one place: {taken}"
    order = {rank: number for each in results.values() for rank, number in each["joined"]}
    first = min(results, key=lambda rank: (order.get(rank, 0), rank))
    chiefs = [each["rank"] for each in results.values() if each["is_chief"]]
    if chiefs != [first]:
        yield f"{chiefs} say they are the chief, and {first} was there first"


def _wrong_pushes_of_the_dead(storm, results, acked, dead):
    for each in results.values():
        values = np.array(each["values"])
        for rank in dead:
            n_rows = acked[rank].count(b"r")
            least = np.array([*[acked[rank].count(b"w")] * (len(values) - 1), n_rows])
            most = least + 1
            if storm.mode in ("sync", "first_of"):
                least, most = least * SHARE / storm.n_workers, most * SHARE
            if ((values[:, rank] < least) | (values[:, rank] > most)).any():
                yield (
                    f"worker {each['rank']} has {values[:, rank].tolist()} of {rank}, which died: "
                    f"{least.tolist()} were acknowledged"
                )


def _reads_that_miss(storm, results, began, dead):
    """Yield reads of ps.SSP that lack what others had pushed: one push in each step."""
    for each in results.values():
        for step, least in each["seen"]:
            for rank in began.keys() - dead:
                wanted = step - BOUND - began[rank]
                if rank != each["rank"] and least[rank] < wanted:
                    yield (
                        f"worker {each['rank']} has read {least[rank]:g} of {rank} in step {step}; "
                        f"{wanted} were due"
                    )


def _wrong_rounds(storm, results, began, dead):
    """Yield rounds that are not of all who live, or not of the same on all servers."""
    known = {}
    for each in results.values():
        for step, lines in each["rounds"]:
            live = sorted(rank for rank in began.keys() - dead if began[rank] <= step)
            for line in lines:
                if sorted({*line} - dead) != live:
                    yield f"round {step} has {line} for {each['rank']}, and {live} live"
            if each["n_recovered"] == 0 and known.setdefault(step, lines) != lines:
                yield f"round {step}: {lines} for {each['rank']}, {known[step]} for others"
            early = {rank for line in lines for rank in line if began.get(rank, 0) > step}
            if early:
                yield f"round {step} has {sorted(early)}, which began later"


def _wrong_parts(storm, out, dead):
    """Yield parts of the epoch that were done twice, or by nobody.

    A part that the dead had last may be theirs, or be given out again.
    """
    done, last = Counter(), Counter()
    for path in out.glob("took.*"):
        parts = np.frombuffer(path.read_bytes(), np.int32).tolist()
        is_dead = int(path.suffix[1:]) in dead
        done.update(parts[:-1] if is_dead else parts)
        last.update(parts[-1:] if is_dead else [])
    twice = sorted(part for part, times in done.items() if times > 1)
    missing = {*range(storm.queue)} - {*done} - {*last}
    if twice or missing:
        yield f"parts {twice} were done twice, and {sorted(missing)[:9]} by nobody"
