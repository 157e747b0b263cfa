// What a job of `ringcomm run` leaves in its run folder, so that its launcher need not believe mpirun's
// exit code: each rank records how far it came, and each guardian what it saw.
// ringcomm/launch/job/records.py reads both.
#pragma once
#include <cstdint>
#include <string>

#include "report.hpp"

namespace ringcomm {

// From now on this process appends to the file `path`: "began" (now), "role NAME" (the last one counts),
// "left", "exit CODE". Throws std::system_error.
void record_this_rank_in(const std::string& path);

// Learns which folder is that of the run, by the environment of this process.
void learn_run_folder();

// Opens a file in the folder of the run: not where a link leads, nor in another folder that somebody has
// put in its place since. Returns -1, and sets errno, if that is so. Async-signal-safe.
int open_in_run_folder(const char* path, int flags);

// Async-signal-safe. Nothing without record_this_rank_in(), and in forked children.
void record_left();
void record_role(const std::string& role);  // not async-signal-safe
void record_exit(int code);

// The file of a guardian: lines "watches PID", "report RANK CODE EVIDENCE TIME_NS NBYTES" followed by so
// many bytes of text, "note NBYTES" likewise, and "end". Each is one write. RANK is -1 if nobody
// failed: the job was ended from outside. EVIDENCE: report.hpp; TIME_NS: when it failed, since 1970,
// by the clock of this host.
class GuardianRecord {
 public:
  // "": there is no file. Throws std::system_error.
  explicit GuardianRecord(std::string path);

  // False if there is no file, or no room for it: the text is for somebody else then.
  bool report(int rank, int code, Evidence evidence, std::int64_t time_ns,
              const std::string& text) const;
  bool note(const std::string& text) const;
  void end() const;

 private:
  std::string path_;
};

}  // namespace ringcomm
