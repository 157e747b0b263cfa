"""A dense block is read while it is written, and never torn."""

import mmap
import os
import threading

import numpy as np
import pytest
from sample_values import whole_numbers

from ringcomm import _core
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.ps import optim

FLOAT32, FLOAT64 = DTYPES["float32"].kernel, DTYPES["float64"].kernel


def memory_for(nbytes):
    room = np.zeros(_core.block_nbytes(nbytes) + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + _core.block_nbytes(nbytes)]


def read(memory, count, dtype=np.float32, **options):
    out = np.empty(count, dtype)
    version = _core.read_block(memory, out.view(np.uint8), **options)
    return version, out


def add(block, x, step=1):
    return block.apply(optim.Add().code, optim.Add().hyper, step, [], x)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000])
def test_every_version_is_read_as_it_was_written(count):
    memory = memory_for(4 * count)
    block = _core.DenseBlock(memory, count, FLOAT32)
    expected = np.zeros(count, np.float32)
    for version in range(1, 6):
        change = whole_numbers(version, count)
        expected = expected + change
        assert add(block, change) == version == block.version
        assert memory[:16].view(np.uint64).tolist() == [version] * 2  # begun, done
        assert read(memory, count)[0] == version
        assert np.array_equal(read(memory, count)[1], expected)
        assert np.array_equal(memory[block.offset :][: 4 * count].view(np.float32), expected)


def test_updates_are_those_of_apply_update():
    rng, u = np.random.default_rng(1), optim.Adam(0.1)
    memory = memory_for(8 * 100)
    block, expected = _core.DenseBlock(memory, 100, FLOAT64), rng.standard_normal(100)
    slots, more = (u.new_slots((100,), np.float64) for _ in range(2))
    block.write(expected)
    for step in range(1, 8):
        grad = rng.standard_normal(100)
        _core.apply_update(u.code, u.hyper, step, expected, expected, slots, grad)
        block.apply(u.code, u.hyper, step, more, grad)
    assert np.array_equal(read(memory, 100, np.float64)[1], expected)


def test_a_refused_update_leaves_the_version():
    memory = memory_for(40)
    block = _core.DenseBlock(memory, 10, FLOAT32)
    with pytest.raises(ValueError, match="9 elements"):
        add(block, np.ones(9, np.float32))
    assert read(memory, 10)[0] == block.version == 0


def test_versions_go_on_where_a_checkpoint_ended():
    memory = memory_for(40)
    block = _core.DenseBlock(memory, 10, FLOAT32, 41)
    assert block.write(np.arange(10, dtype=np.float32)) == 42
    version, values = read(memory, 10)
    assert version == 42
    assert values.tolist() == list(range(10))


def test_parts_are_read_from_read_only_memory():
    memory = memory_for(40)
    _core.DenseBlock(memory, 10, FLOAT32).write(np.arange(10, dtype=np.float32))
    memory.flags.writeable = False
    assert read(memory, 3, offset=16)[1].tolist() == [4, 5, 6]


def test_another_mapping_sees_what_the_first_wrote():
    with mmap.mmap(-1, 4096) as shared:
        memory = np.frombuffer(shared, np.uint8)
        block = _core.DenseBlock(memory, 10, FLOAT32)
        add(block, np.ones(10, np.float32))
        assert read(np.frombuffer(shared, np.uint8), 10)[0] == 1
        del block, memory


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: _core.DenseBlock(memory_for(40)[:-1], 10, FLOAT32), "bytes needs"),
        (lambda: _core.DenseBlock(memory_for(400)[1:], 1, FLOAT32), "multiple of 64"),
        (lambda: _core.DenseBlock(memory_for(40), 10, 0), "float32 or float64"),
        (lambda: _core.read_block(np.zeros(3, np.uint8), np.zeros(1, np.uint8)), "no block"),
        (lambda: read(memory_for(40), 11), "0 to 44 of 0"),
    ],
)
def test_memory_is_checked(make, error):
    with pytest.raises(ValueError, match=error):
        make()


@pytest.fixture
def shared():
    """Return memory of a rank with an open block of ten ones in it, and another mapping of both."""
    server = _core.NodeMemory.create(7, 1 << 20)
    memory = _core.take(server, _core.block_nbytes(40))
    block = _core.DenseBlock(memory, 10, FLOAT32)
    block.write(np.ones(10, np.float32))
    block.may_read = True
    other = _core.NodeMemory.open(os.getpid(), server.board_fd, server.arena_fd, 7)
    return server, block, other, _core.view(other, server.offset_of(memory), memory.nbytes)


def test_an_open_block_is_read_until_it_is_closed(shared):
    _, block, *other = shared
    out = np.zeros(10, np.float32)
    assert _core.read_open_block(*other, out.view(np.uint8), 0, 0) == 0
    assert out.tolist() == [1] * 10
    assert _core.read_open_block(*other, out.view(np.uint8), 0, 1) == -1
    block.may_read = False
    assert _core.read_open_block(*other, out.view(np.uint8), 0, 0) == -1


@pytest.mark.parametrize("who", [0, 2])
def test_no_block_of_a_rank_is_read_once_its_memory_is_withdrawn(shared, who):
    _, block, *other = shared
    out = np.zeros(10, np.float32)
    shared[who].withdraw()
    assert _core.read_open_block(*other, out.view(np.uint8), 0, 0) == -1
    block.may_read = True  # a process that was taken for dead opens none again
    assert _core.read_open_block(*other, out.view(np.uint8), 0, 0) == -1


def begun(memory, version):
    """Pretend that the update to `version` has begun and is not done."""
    memory[:8].view(np.uint64)[0] = version


@pytest.mark.parametrize(("ahead", "is_whole"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_copy_is_good_unless_the_update_after_the_next_has_begun(ahead, is_whole):
    memory = memory_for(40)
    _core.DenseBlock(memory, 10, FLOAT32).write(np.ones(10, np.float32))
    begun(memory, 1 + ahead)
    assert read(memory, 10, tries=3)[0] == (1 if is_whole else -1)


class Readers:
    """Threads that read until they are told to stop, and keep what they found torn."""

    def __init__(self, memory, count, n=2):
        self.memory, self.count = memory, count
        self.is_over, self.has_read = threading.Event(), threading.Semaphore(0)
        self.torn, self.reads = [], 0
        self.threads = [threading.Thread(target=self.run, daemon=True) for _ in range(n)]

    def run(self):
        last = 0
        while not self.is_over.is_set():
            version, values = read(self.memory, self.count)
            self.has_read.release()
            if version == -1:
                continue
            self.reads += 1
            if version < last or values.min() != version or values.max() != version:
                self.torn.append((last, version, values.min(), values.max()))
            last = version

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        for thread in self.threads:
            thread.join(60)


@pytest.mark.parametrize("count", [50, 20_000, 200_000])
def test_nothing_torn_is_read_while_another_thread_writes(count):
    memory = memory_for(4 * count)
    block, one = _core.DenseBlock(memory, count, FLOAT32), np.ones(count, np.float32)
    with Readers(memory, count) as readers:
        for _ in range(2):
            assert readers.has_read.acquire(timeout=60)
        for _ in range(1_500 if count < 100_000 else 400):
            add(block, one)
        for _ in range(4):
            assert readers.has_read.acquire(timeout=60)
    assert not readers.torn
    assert readers.reads > 4
