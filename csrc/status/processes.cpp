#include "processes.hpp"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace ringcomm {
namespace {

std::ifstream open_of(int pid, const char* file) {
  return std::ifstream("/proc/" + std::to_string(pid) + "/" + file);
}

}  // namespace

std::optional<Process> process_of(int pid) {
  std::string line;
  std::ifstream file = open_of(pid, "stat");
  if (!std::getline(file, line, '\0')) return {};
  const std::size_t begin = line.find('('), stop = line.rfind(')');  // a name may have both in it
  if (begin == std::string::npos || stop == std::string::npos) return {};
  Process found;
  found.pid = pid;
  found.name = line.substr(begin + 1, stop - begin - 1);
  const int n = std::sscanf(line.c_str() + stop + 1,
                            " %c %*d %d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d "
                            "%*d %llu",
                            &found.state, &found.group, &found.session, &found.start_ticks);
  if (n != 4) return {};
  return found;
}

std::vector<Process> all_processes() {
  std::vector<Process> found;
  std::error_code error;
  for (std::filesystem::directory_iterator each("/proc", error), end; !error && each != end;
       each.increment(error)) {
    const int pid = std::atoi(each->path().filename().c_str());
    if (pid <= 0) continue;
    if (auto process = process_of(pid)) found.push_back(std::move(*process));
  }
  return found;
}

bool was_started_with(int pid, const std::string& beginning) {
  std::ifstream file = open_of(pid, "environ");
  for (std::string variable; std::getline(file, variable, '\0');)
    if (variable.rfind(beginning, 0) == 0) return true;
  return false;
}

Image image_of(int pid) {
  Image found = Image::none;
  std::ifstream file = open_of(pid, "maps");
  for (std::string line; std::getline(file, line); found = Image::without_page)
    if (line.find("/memfd:ringcomm-status-") != std::string::npos) return Image::with_page;
  return found;
}

}  // namespace ringcomm
