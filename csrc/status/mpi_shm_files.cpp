#include "mpi_shm_files.hpp"

#include <unistd.h>

#include <fstream>

namespace ringcomm {

std::set<std::string> mpi_segments_of(int pid) {
  std::set<std::string> paths;
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::size_t start = line.find(" /dev/shm/");
    if (start == std::string::npos || line.find(" (deleted)") != std::string::npos) continue;
    const std::string path = line.substr(start + 1);
    const std::string name = path.substr(path.rfind('/') + 1);  // it may be in a folder of the run
    for (const char* prefix : {"mpich_shm_", "sm_segment.", "vader_segment.", "Intel_MPI_"})
      if (name.rfind(prefix, 0) == 0) paths.insert(path);
  }
  return paths;
}

void remove_files(const std::set<std::string>& paths) {
  for (const std::string& path : paths) unlink(path.c_str());
}

}  // namespace ringcomm
