"""Deaths of servers without copies, as a model runs them: whoever dies, whoever hears of it first.

No push is lost that was acknowledged before the checkpoint to which all go back, and none since
then; none is doubled; each request is answered, be it by ServerLostError.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ps_simulation import Choices
from ps_simulation_of_recovery import LossyCopiesNet, LossyNet
from ps_simulation_with_copies import ANY_ORDER, MODES

from ringcomm.ps.protocol.frames import FrameKind

pytestmark = pytest.mark.usefixtures("model_time")


@pytest.mark.parametrize("mode", ["async", "sync", "ssp"])
@ANY_ORDER
@given(
    numbers=st.binary(min_size=100, max_size=900), n_servers=st.integers(1, 4),
    n_workers=st.integers(2, 3), n_steps=st.integers(3, 12), n_deaths=st.integers(1, 3),
    spares=st.integers(0, 2), n_evaluators=st.integers(0, 1), moves=st.booleans(),
    commands=st.booleans(),
)  # fmt: skip
def test_all_go_back_to_one_checkpoint_and_go_on_whoever_dies(mode, numbers, n_servers, **sizes):
    n_servers += sizes["spares"]
    net = LossyNet(MODES[mode], Choices(numbers), n_servers=n_servers, **sizes)
    net.run()
    net.require_all()


@pytest.mark.parametrize("mode", ["async", "sync", "ssp"])
@ANY_ORDER
@given(
    numbers=st.binary(min_size=100, max_size=900), n_servers=st.integers(3, 5),
    n_workers=st.integers(2, 3), n_steps=st.integers(3, 12), n_deaths=st.integers(2, 4),
    spares=st.integers(0, 2), n_evaluators=st.integers(0, 1), moves=st.booleans(),
    commands=st.booleans(),
)  # fmt: skip
def test_so_it_is_if_both_copies_of_a_server_are_lost(mode, numbers, **sizes):
    net = LossyCopiesNet(MODES[mode], Choices(numbers), **sizes)
    net.run()
    net.require_all()


def with_a_checkpoint(**sizes):
    """Return a run of one worker, rank 0, and two servers, of which the second is about to die."""
    net = LossyNet(
        MODES["sync"], Choices(b""), n_servers=2, n_workers=1, n_steps=3, n_deaths=0, **sizes
    )
    net.settle()
    net.client(0).act()
    net.settle()
    assert net.checkpoint is not None
    net.kill(1)
    return net


def test_what_a_rank_asks_for_that_is_to_hear_of_a_loss_is_void():
    """Else a snapshot that is gone would keep the rounds of the new tables from ending."""
    net = with_a_checkpoint()
    chief, leader, dead = net.client(0), 1, 2
    net.hear(leader, dead)
    chief.save()  # it has not heard of the death
    net.deliver_all(0, leader)
    assert not net.channels[leader, 0]
    net.hear(0, dead)
    chief.act()
    net.deliver_all(0, leader)
    net.run()
    net.require_all()
    assert net.n_recovered == 1


def test_what_an_evaluator_asks_of_tables_that_are_lost_ends_once_it_hears_of_the_loss():
    """It is the last to hear of it: the others have recovered."""
    net = with_a_checkpoint(n_evaluators=1)
    chief, leader, dead, evaluator = net.client(0), 1, 2, net.client(3)
    net.hear(leader, dead)
    net.hear(0, dead)
    chief.act()
    while net.n_recovered == 0:
        assert net.deliver_one()
    evaluator.read(0)
    net.deliver_all(3, leader)
    net.deliver_all(leader, 3)
    assert any(header.kind == FrameKind.PULL for _, header, *_ in evaluator.asked.values())
    net.hear(3, dead)
    evaluator.act()
    net.settle()
    net.run()
    net.require_all()
    assert net.n_followed == 1
