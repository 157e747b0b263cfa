// From the last words of the ranks of a node to the report of a failed run. Pure: facts in, text out.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "page.hpp"

namespace ringcomm {

struct RankFacts {
  int rank = 0, pid = 0;
  std::string host, role;
  State state = State::starting;
  std::uint64_t step = 0;
  OpView op;
  EndView end;
  bool is_gone = false;         // the process is no more
  std::string replaced_by;      // the program that it has become by exec; "": none
  std::int64_t gone_ns = 0;     // when that was seen
  std::int64_t closed_ns = 0;   // when the kernel closed its descriptors; 0: not seen
  std::int64_t leaving_ns = 0;  // 0: never said it leaves
  int exit_code = -1;           // -1: not known
  int killed_by = 0;            // signal, as the kernel says; 0: not known, or none
};

constexpr int kNobody = -1;

// By what a failure is known, the surest sign that it came first in the job at the front. Guardians of
// other hosts have theirs, and `ringcomm run` compares them (ringcomm/launch/job/verdict.py).
enum class Evidence {
  abort,   // MPI_Abort, after which the launcher ends the others, also in an elastic job
  own,     // the rank's own deed: an exception, an exit, a crash
  killed,  // SIGKILL, as of the out-of-memory killer; launchers send it to the others in the end
  silent,  // it is dead, and nothing says how
  asked,   // a signal that asks it to end, as launchers send first
  mpi,     // an exit in C code, as of MPI when another host fails
};

// True of a process that came to the end of its program and returned 0.
bool ended_well(const RankFacts& rank);

// Index into `ranks` of the one that failed first, or kNobody. Later failures follow from it:
// a PeerFailedError and a SIGTERM are never the cause.
int culprit(const std::vector<RankFacts>& ranks);

// True if this rank, dead without a record, may only have followed one whose death is still to be
// seen: that one's descriptors were closed before.
bool may_follow(const std::vector<RankFacts>& ranks, int index);

// Indices of the ranks that were ended from outside (Ctrl-C, SIGTERM).
std::vector<int> interrupted(const std::vector<RankFacts>& ranks);

// True if nobody failed and someone was ended from outside.
bool was_interrupted(const std::vector<RankFacts>& ranks);

// Indices of the ranks that ended in the same way at the same place: the report of one names the others.
std::vector<int> alike(const std::vector<RankFacts>& ranks, int culprit);

// The report, at most 10 lines. `ops` is what each rank was doing when the fault was seen.
std::string report(const std::vector<RankFacts>& ranks, int culprit,
                   const std::vector<OpView>& ops, std::int64_t fault_ns);

// `culprit` is one that failed.
Evidence evidence_of(const RankFacts& culprit);

// When it failed, by monotonic_ns(), or left while others waited for it.
std::int64_t time_of_failure(const RankFacts& culprit);

// The exit code that this failed rank gives to its job: its own, 128 + signal, or 0 if it is not known.
int code_of(const RankFacts& rank);

std::string interruption(const std::vector<RankFacts>& ranks);

}  // namespace ringcomm
