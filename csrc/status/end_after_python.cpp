#include "end_after_python.hpp"

#include <unistd.h>

#include <csignal>
#include <cstdio>

#include "page.hpp"
#include "run_records.hpp"

namespace ringcomm {
namespace {

LastAct last_act = LastAct::none;
int last_code = 0;
pid_t last_pid = 0;
MpiEnd mpi_end{};

void finalize_mpi_unless_it_is() {
  int is_over = 0;
  if (mpi_end.finalized(&is_over) == 0 && is_over == 0) mpi_end.finalize();
  note_left();
}

}  // namespace

void set_last_act(LastAct act, int code) {
  last_act = act;
  last_code = code;
  last_pid = getpid();
}

void finalize_mpi_at_last(MpiEnd mpi) {
  mpi_end = mpi;
  set_last_act(LastAct::finalize, 0);
}

void act_at_last() {
  if (last_act == LastAct::none || last_pid != getpid()) return;
  if (last_act == LastAct::finalize) return finalize_mpi_unless_it_is();
  std::fflush(nullptr);
  if (last_act == LastAct::kill) std::raise(SIGKILL);
  record_exit(last_code);
  _exit(last_code);
}

}  // namespace ringcomm
