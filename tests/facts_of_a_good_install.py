"""What `ringcomm check` and `ringcomm run` find out where all is well: Open MPI, torch, no GPU."""

from ringcomm.launch.check_install.facts import Facts, Launcher, Library
from ringcomm.launch.mpi_kind import MpiKind

OPENMPI = MpiKind("Open MPI", "5.0.11", "openmpi")
OPENMPI_4 = MpiKind("Open MPI", "4.1.4", "openmpi")
MPICH = MpiKind("MPICH", "5.0.2", "mpich")
INTEL = MpiKind("Intel MPI", "2021.5", "mpich")
BARE = {"numpy": "2.4.6", "mpi4py": "4.1.2", "torch": "2.13.0+cpu"}  # no MPI from pip
GOOD = Facts(
    python=("3.11.7", "/v/bin/python"),
    versions=BARE | {"openmpi": "5.0.11"},
    floors={"numpy": "1.26", "mpi4py": "4.1", "torch": "2.6"},
    mpi=Library(OPENMPI, "/v/lib/libmpi.so.40"),
    launcher=Launcher("/v/bin/mpirun", OPENMPI),
    core="/v/ringcomm/_core.so",
    guardian="/v/ringcomm/ringcomm-guardian",
    is_guardian_executable=True,
    cores=8,
    is_root=False,
    allows_root=False,
)
