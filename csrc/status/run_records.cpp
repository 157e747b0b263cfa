#include "run_records.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <utility>

#include "../clock.hpp"
#include "../descriptor.hpp"

namespace ringcomm {
namespace {

constexpr std::size_t kPathMax = 4096;
char rank_path[kPathMax];
pid_t rank_pid = 0;

// The folder of the run, as rank_program.py has found it; 0 0 if nobody says which it is.
unsigned long long folder_device = 0, folder_inode = 0;

bool is_of_run(int folder) {
  struct stat facts {};
  return folder_inode == 0 || (fstat(folder, &facts) == 0 && facts.st_dev == folder_device &&
                               facts.st_ino == folder_inode);
}

// Opened anew each time: a program may close all descriptors that it does not know.
bool append(const char* path, const char* text, std::size_t size) {
  const int fd = open_in_run_folder(path, O_WRONLY | O_CREAT | O_APPEND);
  if (fd < 0) return false;
  const auto written = uninterrupted([&] { return ::write(fd, text, size); });
  ::close(fd);
  return written == static_cast<ssize_t>(size);
}

// In the order of Evidence.
constexpr const char* kEvidence[] = {"abort", "own", "killed", "silent", "asked", "mpi"};

// Clocks of different hosts have different zeros, but for that of the calendar.
std::int64_t since_1970(std::int64_t monotonic) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec - (monotonic_ns() - monotonic);
}

void append_to_rank(const char* text, std::size_t size) {
  if (rank_pid == getpid()) append(rank_path, text, size);
}

}  // namespace

void learn_run_folder() {
  const char* text = std::getenv("RINGCOMM_RUN_FOLDER_ID");  // of launched/child_marks.py
  unsigned long long device = 0, inode = 0;
  if (text == nullptr || std::sscanf(text, "%llu:%llu", &device, &inode) != 2) return;
  folder_device = device;
  folder_inode = inode;
}

int open_in_run_folder(const char* path, int flags) {
  char folder[kPathMax];
  const char* slash = std::strrchr(path, '/');
  const std::size_t size = slash == nullptr ? 0 : static_cast<std::size_t>(slash - path);
  if (size == 0 || size >= kPathMax) return -1;
  std::memcpy(folder, path, size);
  folder[size] = '\0';
  const int folder_only = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  const int at = uninterrupted([&] { return ::open(folder, folder_only); });
  if (at < 0) return -1;
  const int all = flags | O_CLOEXEC | O_NOFOLLOW;
  int fd = -1;
  if (is_of_run(at))
    fd = uninterrupted([&] { return ::openat(at, slash + 1, all, 0644); });
  else
    errno = ESTALE;
  const int error = errno;
  ::close(at);
  errno = error;
  return fd;
}

void record_this_rank_in(const std::string& path) {
  if (path.size() >= kPathMax) {
    errno = ENAMETOOLONG;
    throw_errno(path);
  }
  std::memcpy(rank_path, path.c_str(), path.size() + 1);
  rank_pid = getpid();
  learn_run_folder();
  if (!append(rank_path, "began\n", 6)) throw_errno(path);
}

void record_left() { append_to_rank("left\n", 5); }

void record_role(const std::string& role) {
  const std::string text = "role " + role + "\n";
  append_to_rank(text.data(), text.size());
}

// snprintf is not async-signal-safe.
void record_exit(int code) {
  char text[] = "exit 000\n";
  const int low = code & 0xff;  // as the parent sees it
  text[5] = static_cast<char>('0' + low / 100);
  text[6] = static_cast<char>('0' + low / 10 % 10);
  text[7] = static_cast<char>('0' + low % 10);
  append_to_rank(text, sizeof text - 1);
}

GuardianRecord::GuardianRecord(std::string path) : path_(std::move(path)) {
  learn_run_folder();
  const std::string text = "watches " + std::to_string(getpid()) + "\n";
  if (!path_.empty() && !append(path_.c_str(), text.data(), text.size())) throw_errno(path_);
}

bool GuardianRecord::report(int rank, int code, Evidence evidence, std::int64_t time_ns,
                            const std::string& text) const {
  if (path_.empty()) return false;
  const std::string all = "report " + std::to_string(rank) + " " + std::to_string(code) + " " +
                          kEvidence[static_cast<int>(evidence)] + " " +
                          std::to_string(since_1970(time_ns)) + " " +
                          std::to_string(text.size()) + "\n" + text;
  return append(path_.c_str(), all.data(), all.size());
}

bool GuardianRecord::note(const std::string& text) const {
  if (path_.empty()) return false;
  const std::string all = "note " + std::to_string(text.size()) + "\n" + text;
  return append(path_.c_str(), all.data(), all.size());
}

void GuardianRecord::end() const {
  if (!path_.empty()) append(path_.c_str(), "end\n", 4);
}

}  // namespace ringcomm
