"""Who may read a rank's private memory, and how its long messages come if nobody may.

The ranks are two processes here, of which the second one receives.
"""

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from loopback import LoopbackHub
from member_of_node import LONG, N, bytes_of, exchange
from sample_values import whole_numbers

from ringcomm._core import Correspondence, NodeMemory, PeerMessages
from ringcomm.config import Settings
from ringcomm.engine.core.context import EngineContext
from ringcomm.transport.node import private_memory
from ringcomm.transport.node.private_memory import common_ancestor, let_siblings_read
from ringcomm.transport.node.shared_memory import SharedNode

TESTS = Path(__file__).parents[1]

RECEIVER = """
import json, os, sys, time
sys.path.insert(0, sys.argv[2])
import numpy as np
from refused_system_calls import PROCESS_VM_READV, refuse
from ringcomm._core import Correspondence, NodeMemory, PeerMessages
LONG, N = int(sys.argv[3]), int(sys.argv[4])
if sys.argv[1] == "refused":
    refuse(PROCESS_VM_READV)
mine = NodeMemory.create(2, 64 << 20)
print(os.getpid(), mine.board_fd, mine.arena_fd, flush=True)
pid, board, arena = map(int, input().split())
memories = {0: NodeMemory.open(pid, board, arena, 1), 1: mine}
messages = PeerMessages(1, memories, is_crowded=True, may_read=sys.argv[1] != "off")
source = Correspondence(messages, 0, 7, b"bytes", LONG)
sums, deadline = [], time.monotonic() + 20
for _ in range(N):
    out = np.zeros(LONG, np.uint8)
    rest = source.receive(out, 0, 1.0)
    while rest != 0 and not rest.is_over and time.monotonic() < deadline:
        rest.advance()
        time.sleep(1e-3)
    sums.append([int(out[7]), int(out.sum(dtype=np.int64)), out.tobytes().hex()[-20:]])
print(json.dumps([messages.reads_memory, messages.reading_error, sums]), flush=True)
input()
"""


@contextlib.contextmanager
def receiver(how, n=N, program=RECEIVER):
    """Yield a process that receives n messages, and the memory of this one and of that one."""
    mine = NodeMemory.create(1, 64 << 20)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program, how, str(TESTS), str(LONG), str(n)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        if not line:
            pytest.skip("no seccomp here")
        its = NodeMemory.open(*map(int, line.split()), 2)
        process.stdin.write(f"{os.getpid()} {mine.board_fd} {mine.arena_fd}\n")
        process.stdin.flush()
        yield process, [mine, its]
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def sent(memories):
    """Send, as rank 0, without a look at what becomes of it."""
    messages = PeerMessages(0, dict(enumerate(memories)), is_crowded=True, may_read=True)
    xs = [whole_numbers(i, LONG, np.uint8) for i in range(N)]
    to = Correspondence(messages, 1, 7, b"bytes", LONG)
    return xs, [to.send(x, 0, 0.0) for x in xs]


def seen_of(xs):
    return [[int(x[7]), int(x.sum(dtype=np.int64)), x.tobytes().hex()[-20:]] for x in xs]


@pytest.mark.skipif((private_memory.ptrace_scope() or 0) > 1, reason="Yama forbids it")
def test_a_long_message_is_read_while_its_sender_does_nothing():
    with receiver("read") as (process, memories):
        let_siblings_read([process.pid])
        xs, _unseen = sent(memories)
        assert json.loads(process.stdout.readline()) == [True, 0, seen_of(xs)]


@pytest.mark.parametrize(("how", "error"), [("refused", errno.EPERM), ("off", 0)])
def test_a_long_message_that_may_not_be_read_comes_in_pieces(how, error):
    with receiver(how) as (process, memories):
        xs, letters = sent(memories)
        deadline = time.monotonic() + 20
        while not all(each.is_over for each in letters):
            assert time.monotonic() < deadline
            for each in letters:
                each.advance()
            time.sleep(1e-3)
        assert json.loads(process.stdout.readline()) == [False, error, seen_of(xs)]


MEMBER = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
from refused_system_calls import PROCESS_VM_READV, refuse
from ringcomm._core import NodeMemory
from ringcomm.transport.node.private_memory import let_siblings_read
from member_of_node import exchange
if sys.argv[1] == "refused":
    refuse(PROCESS_VM_READV)
mine = NodeMemory.create(2, 64 << 20)
print(os.getpid(), mine.board_fd, mine.arena_fd, flush=True)
pid, board, arena = map(int, input().split())
let_siblings_read([pid])
memories = [NodeMemory.open(pid, board, arena, 1), mine]
if sys.argv[1] == "dies":
    wait = lambda step: print("here", flush=True) or input()
    found = exchange(1, memories, may_read=True, in_last=wait)
later = (lambda: refuse(PROCESS_VM_READV)) if sys.argv[1] == "later" else (lambda: None)
found = exchange(1, memories, may_read=sys.argv[1] != "off", before_last=later)
print(json.dumps(found), flush=True)
input()
"""


@pytest.mark.parametrize("how", ["later", "read", "refused", "off"])
def test_what_all_ranks_show_is_read_where_it_is_if_all_may_read_it(how):
    if how in ("read", "later") and (private_memory.ptrace_scope() or 0) > 1:
        pytest.skip("Yama forbids it")
    with receiver(how, program=MEMBER) as (process, memories):
        let_siblings_read([process.pid])
        found = exchange(0, memories, may_read=True)
        wanted = [bytes_of(LONG, rank, N - 1) for rank in range(2)]
        was_shared = how != "read"
        assert found == [wanted, was_shared]
        assert json.loads(process.stdout.readline()) == [wanted, was_shared]


@pytest.mark.skipif((private_memory.ptrace_scope() or 0) > 1, reason="Yama forbids it")
def test_what_a_rank_has_shown_that_is_dead_is_waited_for_until_others_notice():
    with receiver("dies", program=MEMBER) as (process, memories):
        let_siblings_read([process.pid])

        def kill():
            assert process.stdout.readline() == "here\n"
            process.kill()
            process.wait()

        def look(step):
            is_over = step.drive(0.1)
            step.abandon()
            return is_over, step.fault

        found = exchange(0, memories, may_read=True, before_last=kill, in_last=look)
        assert found == (False, "this rank has given it up")


FAMILY = {10: 5, 11: 5, 12: 11, 20: 6, 5: 3, 6: 3, 3: 1, 30: 1, 40: 0}


@pytest.mark.parametrize(
    ("pids", "ancestor"),
    [
        ((10, 11), 5),
        ((10, 12), 5),
        ((11, 12), 11),
        ((12, 11), 11),
        ((10, 20), 3),
        ((10, 11, 20), 3),
        ((10, 30), None),  # init alone
        ((10, 40), None),  # its parent is in another namespace
        ((10,), 10),
    ],
)
def test_the_nearest_process_that_has_started_all_is_named_but_never_init(pids, ancestor):
    assert common_ancestor(pids, lambda pid: FAMILY.get(pid, 0)) == ancestor


@pytest.fixture
def named(monkeypatch):
    """The pids that this process lets in, though no kernel hears of it."""
    pids = []
    monkeypatch.setattr(private_memory, "_name_reader", pids.append)
    return pids


@pytest.fixture
def scope(request, monkeypatch, tmp_path):
    monkeypatch.setattr(private_memory, "_SCOPE", str(tmp_path / "scope"))
    if request.param is not None:
        (tmp_path / "scope").write_text(f"{request.param}\n")
    return request.param


@pytest.mark.parametrize("scope", [0, 1, 2, 3, None], indirect=True)
def test_this_process_lets_others_in_only_where_yama_asks_for_it(scope, named):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    expected = os.getpid() if scope == 1 else None
    assert let_siblings_read([os.getpid(), child.pid, 0]) == expected
    assert named == ([] if expected is None else [expected])
    child.communicate(b"\n")


@pytest.mark.parametrize("scope", [1], indirect=True)
@pytest.mark.parametrize("may_read", [True, False])
def test_a_rank_lets_the_others_in_when_it_joins_unless_the_user_forbids_it(may_read, named, scope):
    with receiver("off", 0) as (_, memories):
        transport = LoopbackHub(1).transport(0)
        transport.size, transport.node = 2, SharedNode(memories[0], 0, 2)
        transport.node.adopt(1, memories[1])
        assert named == []
        EngineContext(transport, Settings(read_memory=int(may_read)))
        assert named == ([os.getpid()] if may_read else [])
        assert transport.node.may_read is may_read


def test_what_names_the_readers_is_the_call_of_yama(monkeypatch):
    calls = []

    class Library:
        @staticmethod
        def prctl(option, pid, *rest):
            calls.append((option, pid.value, *rest))

    monkeypatch.setattr(private_memory.ctypes, "CDLL", lambda _: Library)
    private_memory._name_reader(4711)
    assert calls == [(int.from_bytes(b"Yama", "big"), 4711, 0, 0, 0)]
