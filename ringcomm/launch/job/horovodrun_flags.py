"""The flags of horovodrun: their meaning here, or our way beside theirs. Pure."""

from __future__ import annotations

from typing import Final

# Flags with a value, and the variable that has the same meaning. {} is the value.
AS_VARIABLES: Final = {
    "--fusion-threshold-mb": ("RINGCOMM_FUSION_MIB", "{}"),
    "--stall-check-warning-time-seconds": ("RINGCOMM_STALL_WARNING_S", "{}"),
    "--stall-check-shutdown-time-seconds": ("RINGCOMM_TIMEOUT_S", "{}"),
    "--log-level": ("HOROVOD_LOG_LEVEL", "{}"),
}
# Flags without a value.
AS_SWITCHES: Final = {
    "--no-stall-check": ("RINGCOMM_STALL_WARNING_S", "0"),
}
# Flags that ask for what is so anyway.
WITHOUT_EFFECT: Final = {
    "--mpi": "MPI starts the ranks",
    "--disable-cache": "nothing is cached",
    "--log-without-timestamp": "the log has no times unless the script adds them",
    "--log-hide-timestamp": "the log has no times unless the script adds them",
}
# Flags that are refused: whether they have a value, and what to do.
REFUSED: Final = {
    "--gloo": (0, "the ranks are started by MPI; leave it out"),
    "--use-gloo": (0, "the ranks are started by MPI; leave it out"),
    "--use-mpi": (0, "the ranks are started by MPI anyway; leave it out"),
    "--jsrun": (0, "use mpirun, the default, or --launcher srun"),
    "--check-build": (0, "run `ringcomm check`"),
    "-cb": (0, "run `ringcomm check`"),
    "--start-timeout": (1, "--env RINGCOMM_TIMEOUT_S=N is the deadline of init() and operations"),
    "--config-file": (1, "give the options on the command line"),
    "--tcp": (0, "--launcher-options '--mca pml ob1 --mca btl self,tcp' with Open MPI"),
    "--mpi-threads-disable": (0, "ringcomm needs MPI_THREAD_MULTIPLE; leave it out"),
    "--no-mpi-threads-disable": (0, "leave it out"),
    "--num-nccl-streams": (1, "ringcomm chooses its streams; leave it out"),
    "--thread-affinity": (1, "--launcher-options '--bind-to core' binds ranks with Open MPI"),
    "--gloo-timeout-seconds": (1, "--env RINGCOMM_TIMEOUT_S=N"),
    "--cycle-time-ms": (1, "ringcomm has no cycle: it begins an operation at once; leave it out"),
    "--cache-capacity": (1, "ringcomm has no such cache; leave it out"),
    "--hierarchical-allreduce": (0, "--env RINGCOMM_ALGORITHM=allreduce:hierarchical"),
    "--no-hierarchical-allreduce": (0, "--env RINGCOMM_ALGORITHM=allreduce:ring, or leave it out"),
    "--hierarchical-allgather": (0, "--env RINGCOMM_ALGORITHM=allgather:hierarchical"),
    "--no-hierarchical-allgather": (0, "--env RINGCOMM_ALGORITHM=allgather:ring, or leave it out"),
    "--torus-allreduce": (0, "--env RINGCOMM_ALGORITHM=allreduce:hierarchical"),
    "--autotune": (0, "--env RINGCOMM_FUSION_MIB=N sets the bucket size; leave it out"),
    "--no-autotune": (0, "nothing is tuned while training runs; leave it out"),
    "--autotune-log-file": (1, "nothing is tuned while training runs; leave it out"),
    "--autotune-warmup-samples": (1, "nothing is tuned while training runs; leave it out"),
    "--autotune-steps-per-sample": (1, "nothing is tuned while training runs; leave it out"),
    "--autotune-bayes-opt-max-samples": (1, "nothing is tuned while training runs; leave it out"),
    "--autotune-gaussian-process-noise": (1, "nothing is tuned while training runs; leave it out"),
    "--timeline-mark-cycles": (0, "ringcomm has no cycle; leave it out"),
    "--no-timeline-mark-cycles": (0, "leave it out"),
    "--stall-check": (0, "stalls are reported anyway; leave it out"),
    "--log-with-timestamp": (0, "set up Python's logging in the script"),
    "--no-log-hide-timestamp": (0, "set up Python's logging in the script"),
    "--prefix-output-with-timestamp": (0, "print times in the script; the logs have none"),
    "-prefix-timestamp": (0, "print times in the script; the logs have none"),
    "--host-discovery-script": (1, "--elastic MIN:MAX with -H: hosts do not come and go"),
    "--slots-per-host": (1, "-H h1:4,h2:4, or a --hostfile with `h1 slots=4`"),
    "--elastic-timeout": (1, "--elastic MIN:MAX; waits end by --env RINGCOMM_TIMEOUT_S=N"),
    "--reset-limit": (1, "--elastic MIN:MAX --env RINGCOMM_ELASTIC_LOSSES=N"),
    "--blacklist-cooldown-range": (2, "--elastic MIN:MAX; there is no list of bad hosts"),
}
