"""What an elastic job says of the losses that it does not survive."""

import pytest

from ringcomm.launched.launcher import command_for
from ringcomm.transport.membership.launcher_fault_tolerance import Gap, Launch, gap_of

CONTINUOUS = ("--runtime-options", "continuous")
ULFM = ("--with-ft", "ulfm")
ALLOWS_EXITS = ("--runtime-options", "error-nonzero-status=0")
BOTH = ("--runtime-options", "continuous,error-nonzero-status=0")


def launch(*options, library="Open MPI v5.0.11", n_hosts=1, size=4, **facts):
    command = ("prterun", *options, "-np", "4", "python", "train.py")
    known = {"is_ulfm": "ulfm" in options, "is_by_srun": False, "mpirun": command} | facts
    return Launch(library=library, size=size, n_hosts=n_hosts, **known)


@pytest.mark.parametrize(
    "covered",
    [
        launch(*ULFM, *ALLOWS_EXITS),
        launch(*ULFM, *ALLOWS_EXITS, n_hosts=3),
        launch(*ULFM, mpirun=()),
        launch(*BOTH),
        launch("--runtime-options=continuous", "--runtime-options=error-nonzero-status=0"),
        launch(size=1),
    ],
)
def test_nothing_is_said_where_all_losses_are_covered(covered):
    assert gap_of(covered) is None


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (launch(), "mpirun ends the other ranks"),
        (launch(*ALLOWS_EXITS), "mpirun ends the other ranks"),
        (launch(library="MPICH Version: 5.0.2"), "MPICH 5.0.2 ends a job when a rank is lost"),
        (launch(*ULFM, library="Open MPI v4.1.6"), "Open MPI v4.1.6 ends a job"),
        (launch(is_by_srun=True, mpirun=()), "srun ends a job"),
        (launch(*BOTH, n_hosts=3), "continuous` is not enough on 3 hosts"),
        (launch(mpirun=(), n_hosts=2), "it cannot be seen"),
    ],
)
def test_a_launcher_that_ends_the_job_is_named(job, why):
    gap = gap_of(job)
    assert gap.ends_job
    text = gap.text("elastic job", "ringcomm run X")
    assert why in text
    assert text.endswith("start it by `ringcomm run X` (docs/elastic.md)")
    assert "so a failure of a rank ends this job" in text
    assert "\n" not in text


def test_continuous_alone_covers_signals_only():
    gap = gap_of(launch(*CONTINUOUS))
    assert not gap.ends_job
    assert "--runtime-options continuous,error-nonzero-status=0" in gap.why


@pytest.mark.parametrize("n_hosts", [1, 3])
def test_ulfm_alone_does_not_cover_that_half_of_the_processes_exit(n_hosts):
    gap = gap_of(launch(*ULFM, n_hosts=n_hosts))
    assert not gap.ends_job
    assert "half of its processes have exited with another code than 0" in gap.why
    assert "`--runtime-options error-nonzero-status=0`" in gap.why


def test_a_job_whose_mpirun_is_out_of_sight_may_go_on_on_one_host():
    assert gap_of(launch(mpirun=())) == Gap(
        "it cannot be seen whether mpirun lets the others go on when a rank is lost", ends_job=False
    )


def test_the_command_is_that_of_this_program():
    assert command_for(4, "--elastic", "2:4", argv=["train.py", "--name", "a b"]) == (
        "ringcomm run -np 4 --elastic 2:4 train.py --name 'a b'"
    )
    assert command_for(2, argv=["-c"]) == "ringcomm run -np 2 train.py"
