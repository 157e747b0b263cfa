// The shared-memory files that MPI libraries make in /dev/shm, and leave there when ranks are killed.
#pragma once
#include <set>
#include <string>

namespace ringcomm {

// Paths that process `pid` has mapped, and only under the names that MPI libraries give them.
std::set<std::string> mpi_segments_of(int pid);

void remove_files(const std::set<std::string>& paths);

}  // namespace ringcomm
