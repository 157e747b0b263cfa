#include "lifeline.hpp"

#include <fcntl.h>
#include <pthread.h>

#include <atomic>
#include <utility>

namespace ringcomm {
namespace {

constexpr int kPlaces = 64;
// Held ends, as descriptor + 1; 0: free. Whoever takes one out closes it, so that in a fork, where
// the handler below has done it, the destructor does not: the number may be another file's by then.
std::atomic<int> held[kPlaces];

void close_held(int place) {
  if (const int taken = held[place].exchange(0); taken != 0) close(taken - 1);
}

void close_all_in_fork() {
  for (int place = 0; place < kPlaces; ++place) close_held(place);
}

// Returns the place, -1 if there is none.
int hold(int fd) {
  static const int error = pthread_atfork(nullptr, nullptr, close_all_in_fork);
  for (int place = 0; error == 0 && place < kPlaces; ++place) {
    int free = 0;
    if (held[place].compare_exchange_strong(free, fd + 1)) return place;
  }
  return -1;
}

}  // namespace

Lifeline Lifeline::create() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe2");
  Lifeline made;
  made.end_ = Descriptor(ends[0]);
  made.place_ = hold(ends[1]);
  if (made.place_ < 0) made.untold_ = Descriptor(ends[1]);
  return made;
}

Lifeline::Lifeline(Lifeline&& other) noexcept
    : end_(std::move(other.end_)),
      place_(std::exchange(other.place_, -1)),
      untold_(std::move(other.untold_)) {}

Lifeline& Lifeline::operator=(Lifeline&& other) noexcept {
  std::swap(end_, other.end_);
  std::swap(place_, other.place_);
  std::swap(untold_, other.untold_);
  return *this;
}

Lifeline::~Lifeline() {
  if (place_ >= 0) close_held(place_);
}

}  // namespace ringcomm
