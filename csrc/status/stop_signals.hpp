// SIGTERM and SIGUSR1 ask a job that can save a checkpoint to stop in order, after its step.
#pragma once

namespace ringcomm {

// Catches them from now on: they end this process no more. Leaves alone what the program handles or
// ignores. Any thread may call this; children that are forked are ended by them as ever.
void catch_stop_signals();

// The one that came first; 0: none.
int stop_signal();

// What was there before catch_stop_signals() has its turn again.
void release_stop_signals();

}  // namespace ringcomm
