// SIGTERM and SIGUSR1 ask a job that can save a checkpoint to stop in order, after its step.
//
// Launchers and schedulers signal whole process groups, so the processes that a rank has started get the
// signal, too. Without them, such as the workers of a loader, the rank would not come to the end of its
// step. They hold a signal that their rank catches; it has its turn when the rank ends.
#pragma once
#include <sys/types.h>

namespace ringcomm {

// Catches them from now on: they end this process no more. Leaves alone what the program handles or
// ignores. Any thread may call this.
void catch_stop_signals();

// The one that came first; 0: none.
int stop_signal();

// What was there before catch_stop_signals() has its turn again.
void release_stop_signals();

// In a rank, once: what it forks from now on holds the signals that it catches. A fork takes one all the
// same if a process sent it that is this rank, or descends from it, as by Process.terminate(); or if the
// rank is no ancestor of the fork any more; or if the fork handles it itself. Throws std::system_error.
void let_forks_hold_stop_signals();

// The same for this process, which the rank has started by exec, and for its forks. Nothing if that rank
// has ended, or lets nobody hold them. Throws std::system_error.
void hold_stop_signals_of(pid_t rank);

// In a process that may hold them: it does so again, though another library has set a handler since. That
// one has its turn when this process takes the signal. Nothing elsewhere.
void hold_stop_signals_again();

// In a rank: those which it has started and which hold a signal get SIGTERM.
void pass_stop_signals_on();

}  // namespace ringcomm
