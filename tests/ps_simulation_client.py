"""A fake client: it keeps the order of its requests as ringcomm.ps.client does.

It fails where it reads less than it must, and where a push counts in a part of a table.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from ps_simulation_message_types import FIRST_SERVER, Notice, RankOrder, Reply, Request

from ringcomm.ps.client.request_order import RequestOrder
from ringcomm.ps.control.agreement import OrdersTaken
from ringcomm.ps.control.commands import MEET, STAND_STILL
from ringcomm.ps.moment_numbers import moment_number
from ringcomm.ps.placement.replacement_workers import Beginning
from ringcomm.ps.protocol.frames import (
    EntryOption,
    FrameHeader,
    FrameKind,
    NewsOption,
    ServerOption,
    Status,
)
from ringcomm.ps.server.core.actions import Key


def nothing(_):
    """Do nothing with a reply."""


@dataclass(eq=False)
class Ask:
    """A request, or a call to a hash table, until it is answered."""

    kind: FrameKind
    key: tuple[int, int] | None = None  # a partition; None: a server, or a hash table
    clock: int = 0
    flag: str = ""
    option: int = 0
    body: Any = None
    on_done: Any = nothing
    pieces: dict[int, Any] = field(default_factory=dict)  # of a call: what each server is asked
    back: list[Any] = field(default_factory=list)
    epoch: int = 0
    replies: list[Reply] = field(default_factory=list)


class Client:
    """A worker, or an evaluator, which reads and takes snapshots alone."""

    stands_by = False

    def __init__(self, world, rank, n_ops):
        self.world, self.rank, self.n_ops = world, rank, n_ops
        self.sequence = self.clock = self.n_moved = self.n_moments = 0
        self.asked: dict[int, Ask] = {}
        self.orders: dict[tuple[int, int], RequestOrder] = {}
        self.row_orders: dict[int, RequestOrder] = {}
        self.owners: dict[int, list[int]] = {}
        self.calls: dict[int, dict[int, Ask]] = defaultdict(dict)
        self.notices: list[tuple[Key, int]] = []
        self.undecided = 0
        self.holding: dict[int, int] = {}  # by table: a round that is to be released
        self.is_blocked = self.has_left = self.is_leaving = self.has_abandoned = False
        self.is_resting = self.has_rested = False
        self.opening: set[int] = set()
        self.newcomers: Counter[int] = Counter()  # that are to begin where this worker is
        self.stands_for: set[int] = set()  # those of them that it has said so
        self.orders_taken = OrdersTaken(
            {STAND_STILL: self.note_newcomer, MEET: self.meet}, lambda: 0
        )  # fmt: skip
        self.n_pushed: dict[int, int] = defaultdict(int)
        self.rounds: dict[int, int] = defaultdict(int)
        self.issued: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.steps: dict[Any, int] = {}  # of each update
        self.seen: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.moment: int | None = None
        self.when_settled = None
        for number, shape in world.shapes.items():
            if not shape.is_late:
                self.know(number, 0, world.first_owners(number), {})
                if shape.is_of_chief and rank == world.chief:
                    self.begin(number)

    @property
    def is_worker(self):
        return self.rank in self.world.workers

    # --- requests, and their order
    def know(self, number, epoch, owners, epochs):
        shape = self.world.shapes[number]
        self.owners[number] = [*owners]
        if shape.is_dense:
            for part in range(shape.n_partitions):
                self.orders[number, part] = RequestOrder(epochs.get(part, 0))
        else:
            self.row_orders[number] = RequestOrder(epoch)

    def send(self, server, ask, *, view=0, sequence=None, table=0, body=None):
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        part = 0 if ask.key is None else ask.key[1]
        table = ask.key[0] if ask.key else table
        header = FrameHeader(
            ask.kind, view=view, origin=self.rank, sequence=sequence, table=table, partition=part,
            clock=ask.clock, option=ask.option,
        )  # fmt: skip
        content = body if ask.kind == FrameKind.ASK else None
        request = Request(self.rank, header, ask.flag, body, content)
        self.asked[sequence] = ask
        self.world.ask(self.rank, FIRST_SERVER + server, request)

    def ask_servers(self, kind, on_done, servers=None, *, content=None, table=0, **more):
        """Ask servers, all by default; on_done(replies) once all have answered."""
        servers = range(self.world.n_servers) if servers is None else servers
        replies = []

        def note(reply):
            replies.append(reply)
            if len(replies) == len(servers):
                on_done(replies)

        for server in servers:
            ask = Ask(kind, on_done=note, **more)
            self.send(server, ask, table=table, body=content)

    def ask_partition(self, ask):
        self.sequence += 1
        sequence = self.sequence
        self.asked[sequence] = ask
        if self.orders[ask.key].add(sequence):
            self.send_to_owner(sequence, ask)

    def send_to_owner(self, sequence, ask):
        number, part = ask.key
        ask.epoch = self.orders[ask.key].epoch
        self.send(self.owners[number][part], ask, view=ask.epoch, sequence=sequence, body=ask.body)

    def send_again(self, sequences):
        for sequence in sequences:
            self.n_moved += 1
            self.send_to_owner(sequence, self.asked[sequence])

    def follow(self, key, epoch, owners):
        if epoch > self.orders[key].epoch:
            self.owners[key[0]][key[1]] = owners[key[1]]

    def call(self, number, ask):
        """Make a call to a hash table; its body is by partition."""
        self.sequence += 1
        self.calls[number][self.sequence] = ask
        ask.back = [ask.body]
        if self.row_orders[number].add(self.sequence):
            self.send_calls(number, [self.sequence])

    def send_calls(self, number, calls):
        for each in calls:
            ask = self.calls[number][each]
            body = {part: name for piece in ask.back for part, name in piece.items()}
            ask.back, ask.epoch, pieces = [], 0, {}
            has_rounds = self.world.shapes[number].mode.has_rounds
            if ask.kind == FrameKind.PUSH and has_rounds and ask.flag != "assign":
                pieces = {server: {} for server in range(self.world.n_servers)}
            for part, name in body.items():
                pieces.setdefault(self.owners[number][part], {})[part] = name
            ask.pieces = pieces
            self.n_moved += 1
            for server, piece in sorted(pieces.items()):
                one = Ask(ask.kind, clock=ask.clock, flag=ask.flag)
                one.on_done = lambda reply, n=each, s=server, p=piece: self.on_piece(
                    number, n, s, p, reply
                )
                view = self.row_orders[number].epoch
                self.send(server, one, view=view, table=number, body=piece)

    def on_piece(self, number, call, server, piece, reply):
        ask, order, due = self.calls[number][call], self.row_orders[number], []
        del ask.pieces[server]
        if reply.status == Status.WRONG_VIEW:
            ask.back.append(piece)
            ask.epoch = max(ask.epoch, reply.owners[0])
            self.send_calls(number, self.learn(number, *reply.owners))
        else:
            ask.replies.append(reply)
        if ask.pieces:
            return
        if ask.back:
            if ask.flag in ("release", "drop"):  # all are asked anew
                ask.replies.clear()
            due = order.returned(call, ask.epoch)
        else:
            del self.calls[number][call]
            due = order.answered(call)
        self.send_calls(number, due)
        self.answer_notices()
        if not ask.back and call not in self.calls[number]:
            ask.on_done(ask.replies)

    def learn(self, number, epoch, owners):
        if epoch <= self.row_orders[number].epoch:
            return []
        self.owners[number] = [*owners]
        return self.row_orders[number].moved(epoch)

    def receive(self, message):
        if isinstance(message, Notice):
            self.on_notice(message)
            return
        if isinstance(message, RankOrder):
            is_valid, answer = self.orders_taken.take(*message)
            said = {"do": "answer of an order", "from": self.rank, "is_server": False}
            if is_valid:
                said |= {"number": message.number, "content": answer}
                self.world.send(self.rank, self.world.leader_rank, said)
            return
        sequence = message.to.header.sequence
        ask = self.asked.get(sequence)
        if ask is None:
            return  # it was answered: this is of a request that came twice
        if message.status == Status.WRONG_VIEW and ask.key is not None:
            if message.to.header.view != ask.epoch:
                return  # likewise
            epoch, owners = message.owners
            self.follow(ask.key, epoch, owners)
            ask.epoch = -1
            self.send_again(self.orders[ask.key].returned(sequence, epoch))
            self.answer_notices()
            return
        del self.asked[sequence]
        self.note_ack(message)
        if ask.key is not None:
            self.send_again(self.orders[ask.key].answered(sequence))
            self.answer_notices()
        ask.on_done(message)

    def note_ack(self, reply):
        """Take note of what must be in the values, whatever dies."""
        header, shape = reply.to.header, self.world.shapes.get(reply.to.header.table)
        is_update = header.kind == FrameKind.PUSH and reply.to.flag in ("", "assign")
        if is_update and not shape.is_held and reply.status == Status.OK:
            places = reply.to.body.items()
            self.world.acked.update((header.table, part, name) for part, name in places)

    def on_notice(self, notice):
        key, epoch, owners = notice
        number = key[0]
        if number not in self.owners:
            self.say_noted(key, epoch)
            return
        if self.world.shapes[number].is_dense:
            self.follow(key, epoch, owners)
            self.send_again(self.orders[key].moved(epoch))
        else:
            self.send_calls(number, self.learn(number, epoch, owners))
        self.notices.append((key, epoch))
        self.answer_notices()

    def order_of(self, key):
        is_dense = self.world.shapes[key[0]].is_dense
        return self.orders[key] if is_dense else self.row_orders[key[0]]

    def answer_notices(self):
        due = [each for each in self.notices if self.order_of(each[0]).is_settled]
        self.notices = [each for each in self.notices if each not in due]
        for key, epoch in due:
            self.say_noted(key, epoch)

    def say_noted(self, key, epoch):
        header = FrameHeader(
            FrameKind.NEWS, origin=self.rank, table=key[0], partition=key[1], clock=epoch,
            option=NewsOption.NOTED,
        )  # fmt: skip
        if not self.has_left or self.stands_by:
            for server in range(self.world.n_servers):
                request = Request(self.rank, header)
                self.world.ask(self.rank, FIRST_SERVER + server, request)

    @property
    def is_settled(self):
        orders = [*self.orders.values(), *self.row_orders.values()]
        return not self.undecided and all(order.is_settled for order in orders)

    @property
    def is_idle(self):
        return not (
            self.asked or self.holding or any(self.calls.values()) or self.moment or self.undecided
        )

    @property
    def is_ending(self):
        """True once this worker leaves or rests: no place is taken any more."""
        return self.is_leaving or self.has_left or self.is_resting

    @property
    def is_between_steps(self):
        return not (self.is_ending or self.is_blocked or self.undecided or self.holding)

    # --- ranks that take places, see ringcomm.ps.members.let_in
    def note_newcomer(self, rank):
        self.newcomers[rank] += 1
        if rank in self.stands_for:
            self.say_where(rank)

    def meet(self, taken):
        for newcomer in taken:
            self.go_on(newcomer.rank)

    def stand_still(self):
        self.is_blocked = True
        self.stands_for = {*self.newcomers}
        for rank in sorted(self.newcomers):
            self.say_where(rank)

    def say_where(self, newcomer):
        shapes = self.world.shapes
        rounds = {n: self.rounds[n] for n in shapes if shapes[n].mode.has_rounds}
        begins = Beginning(self.clock, rounds).to_json()
        self.ask_leader(
            lambda _: self.go_on(newcomer), "here", newcomer=newcomer, begins=begins, calls=0
        )

    def go_on(self, newcomer):
        self.newcomers.pop(newcomer, None)
        if newcomer in self.stands_for:
            self.stands_for.discard(newcomer)
            self.is_blocked = bool(self.stands_for)

    # --- what a program does
    def act(self):
        """Do the next thing; return False if there is none now."""
        if self.is_leaving or self.has_left or self.is_blocked:
            return False
        if self.newcomers and self.is_between_steps:
            self.stand_still()
            return True
        choose = self.world.choices
        if self.n_ops <= 0:
            abandons = choose.below(4) == 3
            if not (abandons or self.is_idle):
                return False
            self.has_abandoned = not self.is_idle
            self.leave()
            return True
        self.n_ops -= 1
        ops = [self.read, self.snapshot, self.move, self.wait_for_steps]
        if self.is_worker and not self.is_resting:
            ops = [self.push] * 5 + [self.read] * 3 + [self.step] * 2 + [self.move] * 3
            ops += [self.snapshot, self.assign] + [self.rest] * self.world.may_rest
        op = ops[choose.below(len(ops))]
        if op in (self.step, self.snapshot, self.wait_for_steps, self.rest):
            op()
            return True
        number = choose.below(len(self.world.shapes))
        if number in self.owners:
            op(number)
        elif number not in self.opening:
            self.open(number)
        return True

    def open(self, number):
        self.opening.add(number)

        def note(replies):
            (reply,) = replies
            if self.world.shapes[number].is_dense:
                self.know(number, 0, reply.owners[1], reply.content)
            else:
                self.know(number, *reply.owners, {})

        leader = [self.world.members.leader]
        self.ask_servers(FrameKind.ASK, note, leader, table=number)

    def begin(self, number):
        for part in range(self.world.shapes[number].n_partitions):
            self.push_part(number, part, "initial", (self.rank, "initial"))

    def push_part(self, number, part, flag, name, clock=0, *, on_done=nothing):
        ask = Ask(FrameKind.PUSH, (number, part), clock, flag, body={part: name}, on_done=on_done)
        self.ask_partition(ask)

    def parts_of(self, number, *, all_of_them=False):
        parts = [*range(self.world.shapes[number].n_partitions)]
        return parts if all_of_them else self.world.choices.some_of(parts)

    def new_name(self, number, parts, *tags):
        name = (self.rank, self.n_pushed[number], *tags)
        self.n_pushed[number] += 1
        self.steps[number, name] = self.clock
        for part in parts:
            self.issued[number, part].append(name)
        return name

    def assign(self, number):
        parts = self.parts_of(number)
        name = self.new_name(number, parts, "assigned")
        if self.world.shapes[number].is_dense:
            for part in parts:
                self.push_part(number, part, "assign", name)
        else:
            self.call(
                number, Ask(FrameKind.PUSH, None, 0, "assign", body=dict.fromkeys(parts, name))
            )

    def push(self, number):
        shape = self.world.shapes[number]
        if number in self.holding:
            return  # a round is released before the next push
        has_rounds = shape.mode.has_rounds
        parts = self.parts_of(number, all_of_them=has_rounds and shape.is_dense)
        clock = self.rounds[number] if has_rounds else 0
        self.rounds[number] += 1
        if shape.is_held:
            self.holding[number] = clock
        if shape.mode.name == "first_of" and not shape.is_dense:
            self.push_rows_if_in(number, parts, clock)
            return
        name = self.new_name(number, parts)
        if shape.mode.name == "sync":
            self.world.let_in(number, clock, name, parts)
        push = self.push_dense if shape.is_dense else self.push_rows
        push(number, parts, clock, name)
        if shape.is_held and shape.mode.name == "sync" and self.world.choices.below(2):
            self.release(number, clock)

    def push_dense(self, number, parts, clock, name):
        statuses = []

        def note(reply):
            statuses.append(reply.status)
            if len(statuses) == len(parts):
                self.pushed(number, clock, statuses)

        flag = "hold" if self.world.shapes[number].is_held else ""
        for part in parts:
            self.push_part(number, part, flag, name, clock, on_done=note)
        if self.world.shapes[number].mode.name != "first_of":
            return

        def answered(is_in):
            if is_in:
                self.world.let_in(number, clock, name, parts)
            option = EntryOption.IN if is_in else EntryOption.OUT
            for part in parts:
                self.ask_partition(Ask(FrameKind.ENTER, (number, part), clock, option=option))

        self.enter(number, clock, answered)

    def push_rows_if_in(self, number, parts, clock):
        self.is_blocked = True

        def answered(is_in):
            self.is_blocked = False
            if is_in:
                name = self.new_name(number, parts)
                self.world.let_in(number, clock, name, parts)
                self.push_rows(number, parts, clock, name)
            else:
                self.holding.pop(number, None)

        self.enter(number, clock, answered)

    def push_rows(self, number, parts, clock, name):
        def note(replies):
            self.pushed(number, clock, [each.status for each in replies])

        flag = "hold" if self.world.shapes[number].is_held else ""
        body = dict.fromkeys(parts, name)
        self.call(number, Ask(FrameKind.PUSH, None, clock, flag, body=body, on_done=note))

    def enter(self, number, clock, on_answer):
        self.undecided += 1

        def note(replies):
            self.undecided -= 1
            on_answer(replies[0].status == Status.OK)

        server = [number % self.world.n_servers]
        self.ask_servers(
            FrameKind.ENTER, note, server, table=number, option=EntryOption.ASK, clock=clock
        )

    def pushed(self, number, clock, statuses):
        """A push has been answered by all: it counts everywhere, or nowhere."""
        assert len(set(statuses)) == 1, f"torn: {statuses}"
        is_in = statuses[0] == Status.OK
        if self.world.shapes[number].mode.name == "first_of":
            assert is_in == self.world.is_in(number, clock, self.rank)
        else:
            assert is_in
        if self.holding.get(number) == clock:
            del self.holding[number]
            if is_in and not self.is_leaving:
                self.release(number, clock)

    def release(self, number, clock):
        """Say what becomes of the mean of a round, also before it is there."""
        self.holding.pop(number, None)
        flag = "release" if self.world.is_kept(number, clock) else "drop"
        if self.world.shapes[number].is_dense:
            for part in self.parts_of(number, all_of_them=True):
                self.push_part(number, part, flag, None, clock)
        else:
            self.call(number, Ask(FrameKind.PUSH, None, clock, flag, body={}))

    def read(self, number):
        shape = self.world.shapes[number]
        parts = self.parts_of(number)
        wanted = 0
        if shape.mode.has_rounds and self.is_worker:
            wanted = self.rounds[number]
        elif shape.mode.name == "ssp":
            wanted = max(0, self.clock - shape.mode.bound)
        expected = {
            part: (wanted, [*self.issued[number, part]], self.seen[number, part]) for part in parts
        }

        def note(reply):
            for part in reply.body:
                self.require_own(number, part, reply, expected[part])
                self.seen[number, part] = max(self.seen[number, part], reply.body[part], key=len)
            if shape.mode.has_rounds:
                self.rounds[number] = max(self.rounds[number], reply.clock)

        if shape.is_dense:
            for part in parts:
                if not self.read_memory(number, part, expected[part]):
                    self.ask_partition(Ask(FrameKind.PULL, (number, part), wanted, on_done=note))
        else:
            ask = Ask(FrameKind.PULL, None, wanted, body=dict.fromkeys(parts))

            def notes(replies):
                for reply in replies:
                    asked = {part: reply.body[part] for part in reply.to.body}
                    note(reply._replace(body=asked))

            ask.on_done = notes
            self.call(number, ask)

    def read_memory(self, number, part, expected):
        """Read where the server has the values, if it may be; return False if not."""
        mode, order = self.world.shapes[number].mode, self.orders[number, part]
        server = self.world.servers[self.owners[number][part]]
        values = server.values.get((number, part))
        if mode.name == "ssp" or not order.is_empty or values is None:
            return False
        is_ready = server.core.unit_of((number, part)).is_ready
        if values.opened != order.epoch or not is_ready or values.version < expected[0]:
            return False
        reply = Reply(None, Status.OK, values.version, body={part: [*values.logs[part]]})
        self.require_own(number, part, reply, expected)
        self.seen[number, part] = reply.body[part]
        return True

    def require_own(self, number, part, reply, expectation):
        """Fail unless what was read has all own updates, and all that was read before."""
        wanted, expected, before = expectation
        log = reply.body[part]
        assert log[: len(before)] == before
        if self.world.shapes[number].mode.has_rounds:
            assert reply.clock >= wanted or self.world.is_abandoned_by_all
        else:
            own = [name for name in log if name[0] == self.rank and name[1] != "initial"]
            assert own[: len(expected)] == expected

    def step(self):
        self.clock += 1
        self.ask_servers(FrameKind.TICK, nothing, clock=self.clock)

    def wait_for_steps(self):
        wanted = self.world.choices.below(3)

        def note(replies):
            assert replies[0].status == Status.LATE or replies[0].clock >= wanted

        self.ask_servers(FrameKind.TICK, note, [self.world.members.leader], option=1, clock=wanted)

    def move(self, number):
        below, n = self.world.choices.below, self.world.n_servers
        moves = [(number, part, 0, below(n)) for part in self.parts_of(number)]

        def note(replies):
            problems = replies[0].content["problems"]
            assert self.world.may_have_problems or not problems, problems

        self.ask_leader(note, "move", moves=moves)

    def snapshot(self):
        """Ask for a moment, read it, and let it go."""
        if self.moment is not None:
            return
        self.n_moments += 1
        number = self.moment = moment_number(self.rank, self.n_moments)

        def held(replies):
            if replies[0].status == Status.FAILED:  # rounds of new tables were over too soon
                self.moment = None
            elif not self.is_leaving:
                moment = replies[0].content
                self.world.require_moment(number, moment["tables"], moment["rounds"])
                self.ask_leader(over, "end", number=number, is_taken=False)

        def over(_):
            self.moment = None

        self.ask_leader(held, "snapshot", number=number, patience_s=1.0, save_to=None)

    def ask_leader(self, on_done, command, **more):
        content, leader = {"command": command, **more}, [self.world.members.leader]
        self.ask_servers(FrameKind.ASK, on_done, leader, content=content)

    # --- its end
    def leave(self):
        """Leave as ringcomm.ps.end_of_job says."""
        self.is_leaving = True
        self.settle(self.say_left)

    def rest(self):
        """Rest as ringcomm.ps.end_of_job says; a mean that is held is released before."""
        if self.holding:
            return
        self.is_resting = self.is_blocked = True
        self.settle(self.say_rested)

    def settle(self, then):
        n_moved = [-1]

        def granted(_):
            n_moved[0] = self.n_moved
            self.ask_servers(FrameKind.SERVER, settled, option=ServerOption.SETTLE)

        def settled(_):
            self.when_settled = go_on

        def go_on():
            if n_moved[0] == self.n_moved:
                then()
            else:
                granted(None)

        self.ask_leader(granted, "pause", number=moment_number(self.rank), patience_s=0.0)

    def say_left(self):
        self.ask_servers(FrameKind.SERVER, nothing, option=ServerOption.LEAVE)
        self.has_left = True

    def say_rested(self):
        self.has_rested = True

        def rested(_):
            number = moment_number(self.rank)
            self.ask_leader(resumed, "end", number=number, is_taken=False)

        def resumed(_):
            self.is_blocked = False

        self.ask_servers(FrameKind.SERVER, rested, option=ServerOption.REST)

    def look(self):
        """Go on leaving or resting if all is settled; return True if so."""
        if self.has_left or not self.is_settled:
            return False
        go_on, self.when_settled = self.when_settled, None
        if go_on is not None:
            go_on()
        return go_on is not None

    def succeed(self):
        """Be the chief from now on: send first values of what may have none."""
        for number in self.owners:
            if self.world.shapes[number].is_of_chief:
                self.begin(number)

    def die(self):
        """Be dead: each server hears of it behind all that was sent."""
        self.has_left = True
        for server in range(self.world.n_servers):
            header = FrameHeader(FrameKind.SERVER, origin=self.rank)
            request = Request(self.rank, header, content="died")
            self.world.ask(self.rank, FIRST_SERVER + server, request)
