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

pytestmark = pytest.mark.usefixtures("model_time")


@pytest.mark.parametrize("mode", ["async", "sync", "ssp"])
@ANY_ORDER
@given(
    numbers=st.binary(min_size=100, max_size=900), n_servers=st.integers(1, 4),
    n_workers=st.integers(2, 3), n_steps=st.integers(3, 12), n_deaths=st.integers(1, 3),
    spares=st.integers(0, 2),
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
    spares=st.integers(0, 2),
)  # fmt: skip
def test_so_it_is_if_both_copies_of_a_server_are_lost(mode, numbers, **sizes):
    net = LossyCopiesNet(MODES[mode], Choices(numbers), **sizes)
    net.run()
    net.require_all()
