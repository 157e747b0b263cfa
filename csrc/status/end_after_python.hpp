// How this process ends once Python is gone: mpi4py's exit handler would finalize MPI, and hang when a
// rank is missing.
#pragma once

namespace ringcomm {

enum class LastAct { none, exit, kill };

// For this process alone, not for its forks.
void set_last_act(LastAct act, int code);

// Carries it out; returns if there is none.
void act_at_last();

}  // namespace ringcomm
