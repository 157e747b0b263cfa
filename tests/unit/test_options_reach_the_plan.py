"""No option of a reduction is dropped, also where the ranks of a node have a short call ready."""

import inspect

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm.engine.api import collectives
from ringcomm.engine.executors import short_calls

# A value that is not the default, for each option. A new option needs one.
OTHER = {"op": rc.MAX, "deterministic": True}
OPTIONS = sorted(inspect.signature(rc.allreduce_).parameters.keys() - {"x", "name", "group"})


@pytest.fixture
def planned(monkeypatch):
    """Return the list of the options of all plans from now on."""
    options, plan = [], collectives.plan_allreduce

    def note(group, name, x, given, **form):
        options.append(given)
        return plan(group, name, x, given, **form)

    monkeypatch.setattr("harness.wire", "node")
    for module in (collectives, short_calls):
        monkeypatch.setattr(module, "plan_allreduce", note)
    return options


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("form", [rc.allreduce_, rc.allreduce, rc.allreduce_async_])
def test_an_option_reaches_the_plan(form, option, planned):
    def body(_):
        x = np.ones(5)
        for _ in range(3):
            rc.allreduce_(x)
        rc.barrier()
        planned.clear()
        rc.barrier()
        handle = form(x, **{option: OTHER[option]})
        if form is rc.allreduce_async_:
            handle.wait()

    run_ranks(2, body)
    assert [getattr(each, option) for each in planned] == [OTHER[option]] * 2


def test_defaults_that_are_passed_do_not_close_the_short_call(planned):
    def body(_):
        x = np.ones(5)
        for _ in range(2):
            rc.allreduce_(x)
        rc.barrier()
        planned.clear()
        rc.barrier()
        rc.allreduce_(x, deterministic=False)
        with pytest.raises(TypeError, match="deterministic must be True or False, not 0"):
            rc.allreduce_(x, deterministic=0)

    run_ranks(2, body)
    assert [each.deterministic for each in planned] == [0, 0]
    assert all(each.deterministic is not False for each in planned)
