"""News that thousands of ranks pass on, simulated: a clock, delays, and deaths at any moment."""

import heapq
import itertools
import math
import random

import pytest
from harness import at_length

from ringcomm.ranks_as_text import ranges_of, ranks_in, ranks_text
from ringcomm.transport.control_header import ControlKind
from ringcomm.transport.failure_news import DIRECT, GRACE_S, REST_S, RESTS, WAITS, Fact, News

NODE = 4  # ranks that see each other's deaths
DELAY_S, NOTICE_S = 1e-3, 0.05
LEFT = Fact(ControlKind.LEFT, "called shutdown()", key=WAITS)
RESTING = LEFT._replace(key=RESTS)
# The cost of a job is the square of its size.
N_JOBS = {DIRECT + 1: 6, 60: 6, **at_length({257: 6}, {129: 2})}
JOBS = [(size, seed) for size, n in N_JOBS.items() for seed in range(n)]


class Job:
    """Ranks that look for messages, and messages and deaths that are under way."""

    def __init__(self, size, seed=0):
        self.size, self.random = size, random.Random(seed)
        self.ranks = {rank: News(rank, size) for rank in range(size)}
        self.heard = {rank: {} for rank in range(size)}  # fact -> ranks that said so
        self.n_sent = dict.fromkeys(range(size), 0)
        self.leaving, self.resting = set(), set()  # ranks that wait only for others to leave
        self.end_s = 0.0  # when a rank became silent
        self.silent = {}  # ranks that look no more, and what they have not read
        self.longest = 0
        self.last_s = 0.0  # when something was new to a rank
        self.looks = {}  # when a rank looks again
        self.now, self._events, self._order = 0.0, [], itertools.count()

    def at(self, seconds, do, *args):
        heapq.heappush(self._events, (seconds, next(self._order), do, args))

    def run(self, until=math.inf):
        while self._events and self._events[0][0] <= until:
            self.now, _, do, args = heapq.heappop(self._events)
            do(*args)

    def say(self, rank, fact):
        if rank in self.ranks:
            self.heard[rank].setdefault(fact, set()).add(rank)
            self.ranks[rank].say(fact, self.now)
            self.look(rank)

    def look(self, rank, n_before_death=None):
        """Let a rank send what is due; it may die in the middle."""
        news = self.ranks.get(rank)
        if news is None:
            return
        self.send(rank, list(itertools.islice(news.due(self.now), n_before_death)))
        if news.due_at < self.looks.get(rank, math.inf):
            self.looks[rank] = news.due_at
            self.at(news.due_at, self.look_again, rank)

    def send(self, rank, messages):
        for message in messages:
            assert message.dest != rank
            self.n_sent[rank] += 1
            self.longest = max(self.longest, len(message.ranks))
            self.at(self.now + self.random.expovariate(1 / DELAY_S), self.arrive, message)

    def look_again(self, rank):
        self.looks.pop(rank, None)
        self.look(rank)

    def arrive(self, message):
        dest, fact, ranks, is_round = message
        if dest in self.silent:
            self.silent[dest][1].append(message)
        elif dest in self.ranks:
            self.heard[dest].setdefault(fact, set()).update(ranks_in(ranks))
            news = self.ranks[dest]
            if news.hear(fact, ranks_in(ranks), self.now, is_round=is_round):
                self.last_s = self.now
                if fact.kind is ControlKind.FAILED:
                    news.lose(fact.about, self.now)
            self.look(dest)
            self.end_if_all_are_gone(dest)

    def kill(self, rank):
        self.look(rank, self.random.randrange(4))
        self.ranks.pop(rank, None)
        for mate in range(rank - rank % NODE, rank - rank % NODE + NODE):
            if mate in self.ranks:
                self.at(self.now + self.random.random() * NOTICE_S, self.notice, mate, rank)

    def leave(self, rank, rest_s=math.inf):
        """Leave; after a failure the rank rests so long at most, and is silent then."""
        is_resting = rest_s < math.inf
        self.say(rank, RESTING if is_resting else LEFT)
        self.leaving.add(rank)
        if is_resting:
            self.resting.add(rank)
            self.at(self.now + rest_s, self.be_silent, rank)
        self.end_if_all_are_gone(rank)

    def end_if_all_are_gone(self, rank):
        if rank in self.leaving and len(self.gone(rank)) == self.size:
            if rank in self.resting:
                self.be_silent(rank)
            self.ranks.pop(rank, None)

    def be_silent(self, rank):
        if rank in self.ranks:
            self.send(rank, self.ranks[rank].end_of_rest())
            self.end_s = self.now
            self.silent[rank] = self.ranks.pop(rank), []

    def begin_anew(self, rank):
        """Look again, as init() does until all others have left."""
        self.ranks[rank], unread = self.silent.pop(rank)
        for message in unread:
            self.arrive(message)

    def gone(self, rank):
        """Return the ranks of which this one has heard that they left or died."""
        words = self.heard[rank].items()
        dead = {fact.about for fact, _ in words if fact.kind is ControlKind.FAILED}
        return dead.union(*(who for fact, who in words if fact.kind is ControlKind.LEFT))

    def notice(self, rank, dead):
        if rank in self.ranks:
            self.ranks[rank].lose(dead, self.now)
            self.say(rank, Fact(ControlKind.FAILED, "was killed", about=dead))

    def ignorance(self, fact, sayers):
        """Return the ranks that live and have not heard it from all who said it."""
        return [r for r in self.ranks if not sayers <= self.heard[r].get(fact, set())]


@pytest.mark.parametrize(("size", "seed"), JOBS)
def test_all_who_live_learn_all_deaths_and_words_whoever_dies_meanwhile(size, seed):
    job = Job(size, seed)
    survivors = {
        node + job.random.randrange(min(NODE, size - node)) for node in range(0, size, NODE)
    }
    mortal = sorted(set(range(size)) - survivors)
    dead = job.random.sample(mortal, job.random.randrange(1, min(20, len(mortal))))
    sayers = job.random.sample(sorted(set(range(size)) - set(dead)), 3)
    broke = Fact(ControlKind.BROKE, "was killed", about=dead[0])
    for rank in dead:
        job.at(job.random.random(), job.kill, rank)
    for rank in sayers:
        job.at(job.random.random(), job.say, rank, broke)
    job.run()
    assert job.last_s < 5.0
    assert job.ignorance(broke, set(sayers)) == []
    for rank in dead:
        assert job.ignorance(Fact(ControlKind.FAILED, "was killed", about=rank), set()) == []
        assert all(any(f.about == rank for f in job.heard[r]) for r in job.ranks)


@pytest.mark.parametrize("longest_rest_s", [0.0, 0.1, REST_S])
@pytest.mark.parametrize(("size", "seed"), JOBS)
def test_ranks_that_leave_after_a_failure_and_pass_on_nothing_cut_off_nobody(
    size, seed, longest_rest_s
):
    job = Job(size, seed)
    leavers = job.random.sample(range(size), job.random.randrange(size // 3, size - 1))
    stay = sorted(set(range(size)) - set(leavers))
    for rank in leavers:
        rest_s = job.random.random() * longest_rest_s
        job.at(job.random.random() * 0.3, job.leave, rank, rest_s)
    for rank in stay:
        job.at(job.random.random() * 2.0, job.leave, rank)
    job.run()
    assert job.last_s < 8.0
    assert job.ranks == {}  # who is not silent has ended, for it knew that all are gone
    for rank in list(job.silent):
        job.begin_anew(rank)
    job.run()
    assert job.ranks == {}


@pytest.mark.parametrize("n_stay", [0, 1, 3])
def test_leaving_after_a_death_takes_a_few_times_log2_messages(n_stay):
    job = Job(size := at_length(500, 129))
    dead, *stay = job.random.sample(range(size), 1 + n_stay)
    job.at(0.0, job.kill, dead)
    for rank in set(range(size)) - {dead, *stay}:
        job.at(0.2 + job.random.random() * 0.05, job.leave, rank, REST_S)
    job.run()
    assert len(job.silent) == size - 1 - n_stay
    assert (job.end_s < REST_S) == (n_stay == 0)
    assert all(job.gone(rank) == set(range(size)) - set(stay) for rank in stay)
    assert sum(job.n_sent.values()) < 8 * size * math.log2(size)
    assert max(job.n_sent.values()) < 10 * math.log2(size)


def test_the_end_of_a_rest_is_news_for_ranks_that_stay_and_that_wait():
    news = News(0, size := 40)
    news.hear(LEFT, [1], 0.0)
    news.hear(RESTING, [2], 0.0)
    news.lose(3, 0.0)
    news.say(RESTING, 0.0)
    assert {each.dest for each in news.end_of_rest()} == set(range(size)) - {0, 2, 3}


def test_what_a_rank_says_itself_goes_out_however_many_gave_up_before():
    news = News(99, 200)
    for n in range(70):
        news.hear(Fact(ControlKind.GAVE_UP, f"text {n}"), [n], 0.0)
    news.due(1.0)
    news.say(Fact(ControlKind.GAVE_UP, "own"), 2.0)
    assert {each.dest for each in news.due(10.0) if each.fact.text == "own"} >= {100, 101, 103}


def test_the_next_who_live_are_told_what_the_dead_had_been_told():
    news, broke = News(0, 32), Fact(ControlKind.BROKE, "was killed", about=31)
    news.say(broke, 0.0)
    assert [message.dest for message in news.due(0.0)] == [1, 2, 4, 8, 16]
    for dead in (1, 2, 4, 8, 16):
        news.lose(dead, 1.0)
    assert {(each.dest, each.fact) for each in news.due(1.0)} == {(n, broke) for n in (3, 5, 9, 17)}


@pytest.mark.parametrize("size", [DIRECT + 1, 64, at_length(500, 200)])
def test_goodbyes_of_all_take_log2_messages_of_each_rank(size):
    job = Job(size)
    for rank in range(size):
        job.at(job.random.random() * GRACE_S / 4, job.say, rank, LEFT)
    job.run()
    assert job.ignorance(LEFT, set(range(size))) == []
    assert set(job.n_sent.values()) == {math.ceil(math.log2(size))}
    assert job.last_s < GRACE_S


def test_who_stays_longer_learns_soon_who_has_left_and_at_last_all_do():
    job, stays = Job(size := at_length(150, 110)), {7, 8, 100}
    for rank in sorted(set(range(size)) - stays):
        job.at(job.random.random() * 3, job.say, rank, LEFT)
    job.run()
    assert job.last_s < 3.0 + 10.0
    assert job.ignorance(LEFT, set(range(size)) - stays) == []
    for rank in stays:
        job.at(100.0 + rank, job.say, rank, LEFT)
    job.run()
    assert job.ignorance(LEFT, set(range(size))) == []
    assert max(job.n_sent.values()) < 20 * 8


def test_what_all_say_in_the_same_words_is_put_together():
    job, broke = Job(200), Fact(ControlKind.BROKE, "was killed", about=1)
    for rank in range(200):
        job.at(job.random.random() * 0.01, job.say, rank, broke)
    job.run()
    assert job.ignorance(broke, set(range(200))) == []
    assert max(job.n_sent.values()) < 10 * 8
    assert job.longest <= 900


def test_texts_of_many_ranks_are_ranges():
    assert ranks_text([3, 1, 2]) == "3, 1, 2"
    assert ranks_text(range(2, 40)) == "2-39"
    assert ranks_text([*range(16), 17]) == "0-15, 17"
    assert ranks_text(range(0, 40, 2)).endswith("30, ... (20 in all)")
    for ranks in ([], [5], [0, 1, 2, 9], list(range(100))):
        assert ranks_in(ranges_of(ranks)) == ranks
