// Descriptors of processes: Linux 5.3 and later, which neither every kernel in use nor the headers of
// every C library know.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include "../descriptor.hpp"

#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace ringcomm {

// Returns a descriptor that can be read once the process has ended. Throws std::system_error: ESRCH
// if there is no such process, others (ENOSYS, EPERM in a sandbox) if there are no such descriptors.
inline Descriptor open_pidfd(int pid) {
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)), "pidfd_open");
}

}  // namespace ringcomm
