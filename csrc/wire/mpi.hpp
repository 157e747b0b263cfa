// A wire over whatever MPI library is loaded. Nothing is compiled against it: functions come as
// addresses, handles are void* (Open MPI, the MPI ABI) or int (MPICH), and a status is opaque.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "wire.hpp"

namespace ringcomm {

constexpr std::size_t kMpiStatusMax = 256;  // room for any library's MPI_Status; 20-32 bytes today

struct MpiLibrary {
  std::map<std::string, std::uintptr_t> functions;  // "MPI_Isend" etc.
  std::size_t handle_nbytes;                        // of MPI_Comm, MPI_Request and MPI_Datatype
  std::uint64_t byte;                               // the handle MPI_BYTE
};

// Messages over `comm`, a handle whose errors are returned; each is cut into pieces of at most
// `segment_nbytes`, for MPI's counts are ints. Throws std::invalid_argument if a function lacks.
std::shared_ptr<Wire> make_mpi_wire(const MpiLibrary& library, std::uint64_t comm,
                                    std::size_t segment_nbytes);

// When that call of MPI began in which a thread of this process has been the longest, as monotonic_ns();
// 0: none is in one. A call waits for nothing, so one that lasts does not come back: MPI may read a
// connection to its port without a deadline. Calls that begin at the same time from more than 64
// threads may be missed.
std::int64_t in_mpi_since();

}  // namespace ringcomm
