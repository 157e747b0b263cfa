// How this process ends once Python is gone, and all exit handlers of the program have run. MPI is
// finalized then, for one of them may finalize it, too; or never, for it would hang when a rank is
// missing, as mpi4py's exit handler does.
#pragma once

namespace ringcomm {

enum class LastAct { none, exit, kill, finalize };

// For this process alone, not for its forks.
void set_last_act(LastAct act, int code);

// The act is LastAct::finalize: call MPI_Finalize, unless MPI is finalized, and leave in order.
struct MpiEnd {
  int (*finalize)();
  int (*finalized)(int*);
};
void finalize_mpi_at_last(MpiEnd mpi);

// Carries it out; returns if there is none.
void act_at_last();

}  // namespace ringcomm
