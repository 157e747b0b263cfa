"""A fake server: it carries out the actions of a core as ringcomm.ps.server.server does, on lists.

The values of a partition are the names of the updates that are in it. It fails where two servers
act for one partition, where rounds are not counted one by one, and where what moves changes.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

from ps_simulation_message_types import FIRST_SERVER, Notice, RankOrder, Reply, Request

from ringcomm.ps.control.agreement import Member
from ringcomm.ps.control.commands import (
    HOLD,
    HOW_FAR,
    LET,
    RETRACT,
    STOP,
    TAKE_PLACE,
    WITHOUT,
    command_of,
)
from ringcomm.ps.placement.replacement_workers import Beginning
from ringcomm.ps.protocol.frames import (
    EntryOption,
    FrameHeader,
    FrameKind,
    ServerOption,
    Status,
)
from ringcomm.ps.server.core import actions as do
from ringcomm.ps.server.core import events as on
from ringcomm.ps.server.core.core import Core
from ringcomm.ps.server.core.core_table import ServedTable
from ringcomm.ps.server.core.unit import AppliedHere, Unit


@dataclass
class Values:
    """What a server has of a unit."""

    logs: dict[int, list[Any]]  # by partition
    applied: AppliedHere = field(default_factory=AppliedHere)
    version: int = 0
    held: list[Any] | None = None
    opened: int = -1  # the epoch in which memory and C++ answer

    def add(self, body):
        for part, update in body.items():
            self.logs[part].append(update)

    def state(self, part):
        """Return a copy of a partition: its log, the version, its share of a held mean."""
        held = self.held
        share = None if held is None else [{p: n for p, n in x.items() if p == part} for x in held]
        return [*self.logs[part]], self.version, share


class Server:
    def __init__(self, world, index):
        self.world, self.index, self.rank = world, index, FIRST_SERVER + index
        self.core = Core(index, lambda: world.members)
        self.values: dict[do.Key, Values] = {}
        self.retired = {}
        self.snapshots: dict[int, dict[do.Key, Any]] = {}
        self.opening = {}
        self.sent = {}

    # --- tables
    def install(self, number, shape):
        owners = self.world.first_owners(number)
        self.core.add_table(ServedTable(number, f"t{number}", shape.mode, shape.is_dense, owners))
        own = [part for part, owner in enumerate(owners) if owner == self.index]
        units = [[part] for part in own] if shape.is_dense else [own]
        for parts in units:
            key = number, parts[0] if shape.is_dense else 0
            values = Values({part: [] for part in parts})
            self.add_unit(key, values, is_ready=not (shape.is_dense and shape.is_of_chief))

    def add_unit(self, key, values, *, is_ready):
        self.values[key] = values
        mode = self.core.tables[key[0]].mode
        unit = Unit(key, mode, values.applied, self.core.live_workers, is_ready=is_ready)
        self.perform(self.core.add_unit(unit))
        return unit

    def epoch(self, key):
        return self.core.tables[key[0]].epoch_of(key)

    def owners(self, key):
        return self.epoch(key), list(self.core.tables[key[0]].owners)

    # --- what arrives
    def receive(self, message):
        if isinstance(message, Request):
            self.on_request(message)
        elif message["do"] == "adopt":
            self.install(message["table"], self.world.shapes[message["table"]])
            self.world.send(self.rank, self.world.leader_rank, {**message, "do": "adopted"})
        elif message["do"] == "adopted":
            self.adopted(message["table"])
        elif message["do"] == "order":
            self.carry_out(message)
        elif message["do"] == "answer of an order":
            member = Member(message["from"], message["is_server"])
            self.handle(on.Answered(member, message["number"], message["content"]))
        elif message["do"] == "take":
            why = self.take_over(message)
            dest = FIRST_SERVER + message["from"]
            self.world.send(self.rank, dest, {**message, "do": "taken", "why": why})
        else:
            key = message["table"], message["unit"]
            if message["why"]:
                del self.sent[key, message["part"]]
            self.handle(on.Taken(key, message["part"], message["why"]))

    def on_request(self, request):
        header, content = request.header, request.content
        kind = header.kind
        if content == "died":
            self.handle(on.Died(request.source))
        elif request.source in self.core.dead:
            return
        elif kind in (FrameKind.PUSH, FrameKind.PULL):
            self.arrived(request)
        elif kind == FrameKind.ENTER and header.option == EntryOption.ASK:
            self.handle(on.Entered(request))
        elif kind == FrameKind.ENTER:
            self.arrived(request)
        elif kind == FrameKind.TICK:
            self.handle(on.ClockAwaited(request) if header.option else on.Ticked(request))
        elif kind == FrameKind.ASK and content is None:
            self.create(request)
        elif kind == FrameKind.ASK:
            self.handle(on.Asked(request, command_of(content, request)))
        elif kind == FrameKind.NEWS:
            key = header.table, header.partition
            self.handle(on.Noted(request.source, key, header.clock))
            self.world.settle(request, self.rank)
        elif header.option == ServerOption.SETTLE:
            self.handle(on.Settling(request))
        else:
            rests = header.option == ServerOption.REST
            self.handle(on.Left(request.source, request, still_asks=rests))

    def carry_out(self, message):
        """Carry out an order of the server that leads."""
        header = FrameHeader(FrameKind.ORDER, clock=message["number"])
        order, content = Request(FIRST_SERVER + message["from"], header), message["content"]
        if message["what"] == STOP:
            self.handle(on.Stopped(order, content))
        elif message["what"] == HOLD:
            number, _, rounds = content
            self.snapshots[number] = {}
            self.handle(on.Held(order, number, rounds))
        elif message["what"] == LET:
            self.handle(on.MomentEnded(order, *content))
        elif message["what"] == HOW_FAR:
            self.handle(on.HowFar(order, content))
        elif message["what"] == TAKE_PLACE:
            newcomer, begins, beside = content
            self.handle(on.TookPlace(order, newcomer, Beginning.of_json(begins), beside))
        elif message["what"] == WITHOUT:
            self.handle(on.Without(*content))
        elif message["what"] == RETRACT:
            self.world.n_returned += 1
            self.handle(on.Retracted(order, content))
        else:
            key, more = content
            self.handle(on.MoveOrdered(order, message["what"], key, copy.deepcopy(more)))

    def create(self, request):
        number = request.header.table
        if number not in self.core.tables:
            self.install(number, self.world.shapes[number])
            self.core.tables[number].is_open = False
            others = [n for n in range(self.world.n_servers) if n != self.index]
            self.opening[number] = len(others), []
            for other in others:
                self.world.send_to_server(self, other, {"do": "adopt", "table": number})
        if number in self.opening:
            self.opening[number][1].append(request)
        else:
            self.answer(request, owners=self.owners((number, 0)), content=self.epochs(number))

    def epochs(self, number):
        return dict(self.core.tables[number].epochs)

    def adopted(self, number):
        n, asked = self.opening[number]
        self.opening[number] = n - 1, asked
        if n == 1:
            del self.opening[number]
            self.core.tables[number].is_open = True
            for request in asked:
                self.answer(request, owners=self.owners((number, 0)), content=self.epochs(number))

    def arrived(self, request):
        header = request.header
        table = self.core.tables[header.table]
        key, round_of = table.key_of(header.partition), None
        if header.kind == FrameKind.PUSH and table.mode.has_rounds:
            round_of = None if request.flag in ("assign", "initial") else header.clock
        if self.is_at_once(key, request):
            self.carry_out_at_once(key, request)
            return
        arrived = on.Arrived(request, key, round_of)
        if self.core.admits(key, header.view):  # as the server asks, for it is fast
            assert self.core.handle(arrived, self.world.now) == [do.Carry(request)]
            self.perform([do.Carry(request)])
            return
        self.handle(arrived)

    def is_at_once(self, key, request):
        """Return True for a push that C++ carries out without the core."""
        values, table = self.values.get(key), self.core.tables[key[0]]
        is_plain = request.header.kind == FrameKind.PUSH and not request.flag
        if not is_plain or not table.is_dense or table.mode.has_rounds or values is None:
            return False
        return values.opened == request.header.view and self.core.unit_of(key).is_ready

    def carry_out_at_once(self, key, request):
        header, unit = request.header, self.core.unit_of(key)
        if not unit.came_before(request):
            unit.applied.note_last(header.origin, header.sequence)
            self.apply(do.Apply(key, request, request.body))
        else:
            self.answer(request)

    # --- actions
    def handle(self, event):
        self.perform(self.core.handle(event, self.world.now))

    def tell(self, action):
        if not action.is_server:
            content = copy.deepcopy(action.content)
            order = RankOrder(action.step, action.do, content)
            self.world.send(self.rank, action.dest, order)
            return
        order = {"number": action.step, "what": action.do, "content": action.content}
        self.world.send_to_server(self, action.dest, {"do": "order", **order})

    def step(self, action):
        self.perform(action.actions)
        self.handle(on.StepDone(action.key, ""))

    def fail(self, action):
        self.answer(action.request, Status.FAILED)

    def reply(self, action):
        header = action.request.header
        if header.kind == FrameKind.ORDER:
            answer = {"number": header.clock, "content": action.content, "is_server": True}
            server = action.request.source - FIRST_SERVER
            self.world.send_to_server(self, server, {"do": "answer of an order", **answer})
            return
        self.answer(
            action.request,
            Status.LATE if action.is_late else Status.OK,
            clock=action.clock,
            content=action.content,
        )

    def perform(self, actions):
        for action in actions:
            if isinstance(action, do.Apply | do.Write | do.Hold | do.End):
                self.require_owned(action.key)
            getattr(self, type(action).__name__.lower())(action)

    def require_owned(self, key):
        for part in self.values[key].logs:
            claim = self.world.claims.setdefault((key[0], part, self.epoch(key)), self.index)
            assert claim == self.index, f"servers {claim} and {self.index} own {key} {part}"

    def answer(self, request, status=Status.OK, **more):
        version = 0
        key = request.header.table, request.header.partition
        if request.header.kind in (FrameKind.PUSH, FrameKind.PULL) and status != Status.WRONG_VIEW:
            version = self.values[self.core.tables[key[0]].key_of(key[1])].version
        self.world.settle(request, self.rank)
        more.setdefault("clock", version)
        self.world.send(self.rank, request.source, Reply(request, status, **more))

    def key_of(self, request):
        return self.core.tables[request.header.table].key_of(request.header.partition)

    def carry(self, action):
        request = action.request
        header, key = request.header, self.key_of(request)
        if header.kind == FrameKind.PULL:
            self.handle(on.Read(key, request))
        elif header.kind == FrameKind.ENTER:
            self.handle(on.Decided(key, request, header.option == EntryOption.IN))
        elif request.flag in ("release", "drop"):
            self.handle(on.Released(key, request, None, drops=request.flag == "drop"))
        elif request.flag in ("initial", "assign"):
            event = on.Initialized if request.flag == "initial" else on.Assigned
            self.handle(event(key, request, request.body))
        else:
            lets_in = not self.core.tables[key[0]].is_dense
            is_held = request.flag == "hold"
            self.handle(
                on.Contributed(key, request, request.body, is_held=is_held, lets_in=lets_in)
            )

    def retry(self, action):
        self.arrived(action.request)

    def redirect(self, action):
        self.world.forget(action.request, self.rank)
        owners = self.owners(self.key_of(action.request))
        self.answer(action.request, Status.WRONG_VIEW, owners=owners)

    def acknowledge(self, action):
        self.answer(action.request)

    def serve(self, action):
        key = self.key_of(action.request)
        self.require_owned(key)
        self.world.require_bounded(self, key, action.request)
        values = self.values[key]
        self.answer(action.request, body=copy.deepcopy(values.logs))

    def apply(self, action):
        values = self.values[action.key]
        values.add(action.payload)
        values.version += 1
        self.answer(action.request)

    def write(self, action):
        if action.payload is not None:
            self.values[action.key].add(action.payload)
        self.answer(action.request)

    def hold(self, action):
        values = self.values[action.key]
        assert values.held is None
        assert action.number == values.version + 1
        values.held = [dict(each.payload) for each in action.contributions]
        for each in action.contributions:
            self.answer(each.request)

    def end(self, action):
        values = self.values[action.key]
        assert action.number == values.version + 1
        gradients = [each.payload for each in action.contributions]
        if not gradients:
            gradients, values.held = values.held, None
        values.version = action.number
        if not action.drops:
            for part, log in values.logs.items():
                if names := [each[part] for each in gradients if part in each]:
                    log.append((action.number - 1, *names))
        for each in action.contributions:
            self.answer(each.request)

    def late(self, action):
        self.answer(action.contribution.request, Status.LATE)

    def releasedone(self, action):
        self.answer(action.request)

    def open(self, action):
        self.values[action.key].opened = action.epoch

    def close(self, action):
        if action.key in self.values:
            self.values[action.key].opened = -1

    def retire(self, action):
        values = self.values.pop(action.key)
        assert values.opened < 0
        self.require_unchanged(action.key, action.key[1], values)
        self.retired[action.key, action.epoch] = values

    def require_unchanged(self, key, part, values):
        """Fail if a partition has changed since it was sent to its new owner."""
        assert self.sent.pop((key, part)) == values.state(part)

    def free(self, action):
        self.retired.pop((action.key, action.epoch), None)
        self.world.require_unread(action.key, action.epoch)

    def take(self, action):
        self.snapshots[action.moment][action.key] = copy.deepcopy(self.values[action.key])

    def drop(self, action):
        self.snapshots.pop(action.moment, None)

    def export(self, action):
        key, part, dest = action
        unit, values = self.core.unit_of(key), self.values[key]
        if self.world.makes_a_mistake():
            self.handle(on.Taken(key, part, "no memory"))
            return
        rounds = unit.rounds
        held = None if rounds is None or rounds.held is None else sorted(rounds.held)
        log, version, share = self.sent[key, part] = values.state(part)
        state = {
            "log": [*log],
            "version": version,
            "held": share,
            "held_of": held,
            "let_in": [] if rounds is None else rounds.let_in(),
            "applied": unit.applied_without_pending(),
            "is_ready": unit.is_ready,
        }
        message = {"do": "take", "table": key[0], "unit": key[1], "part": part, "state": state}
        self.world.send_to_server(self, dest, message)

    def take_over(self, message):
        if self.world.makes_a_mistake():
            return "no memory"
        key, part, state = (message["table"], message["unit"]), message["part"], message["state"]
        if not self.core.tables[key[0]].is_dense:
            values = self.values[key]
            if self.core.unit_of(key).rounds is not None:
                assert values.version == state["version"]
            values.logs[part] = state["log"]
            pairs = zip(values.held or [], state["held"] or [], strict=True)
            for own, other in pairs:  # one gradient for each worker, wherever its rows are
                own.update(other)
            return ""
        values = Values({part: state["log"]}, version=state["version"], held=state["held"])
        for rank, last in state["applied"].items():
            values.applied.note_last(rank, last)
        unit = self.add_unit(key, values, is_ready=state["is_ready"])
        if unit.rounds is not None:
            unit.rounds.resume(state["version"], state["let_in"], state["held_of"])
        return ""

    def forget(self, action):
        values = self.values[action.key]
        self.require_unchanged(action.key, action.part, values)
        del values.logs[action.part]
        for each in values.held or ():
            each.pop(action.part, None)

    def moved(self, action):
        assert all(source != dest for source, dest in action.servers)

    def notify(self, action):
        epoch, owners = self.owners(action.key)
        for rank in action.ranks:
            self.world.send(self.rank, rank, Notice(action.key, epoch, owners))

    def settled(self, action):
        self.handle(on.Finished(action.key))
