#include "wire_pipe.hpp"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "../clock.hpp"
#include "../loop/grave.hpp"

namespace ringcomm {

WirePipe::WirePipe(std::shared_ptr<Wire> wire, int peer, int tag, std::size_t longest)
    : wire_(std::move(wire)), peer_(peer), tag_(tag), longest_(longest) {
  if (longest > kWindow / 4) throw std::invalid_argument("messages are at most a fourth of the window");
}

void WirePipe::open() {
  if (std::exchange(is_open_, true)) return;
  for (Letter& each : receives_) {
    each.bytes.reset(new std::byte[room()]);
    each.message = wire_->receive_at_most(each.bytes.get(), room(), peer_, tag_);
    each.message->start();
  }
}

void WirePipe::forget_sent() {
  while (!sends_.empty() && sends_.front().message->test()) sends_.pop_front();
}

void WirePipe::send(std::unique_ptr<std::byte[]> bytes, std::size_t nbytes) {
  const Head head{n_taken_};
  std::memcpy(bytes.get(), &head, sizeof head);
  n_told_ = n_taken_;
  auto message = wire_->send(bytes.get(), nbytes, peer_, tag_);
  sends_.push_back({std::move(bytes), std::move(message)});
  sends_.back().message->start();
  forget_sent();
}

bool WirePipe::put(const Chunk* chunks, std::size_t n) {
  std::size_t nbytes = sizeof(Head);
  for (std::size_t i = 0; i < n; ++i) nbytes += chunks[i].nbytes;
  if (nbytes > room()) throw std::length_error("a message is longer than its pipe");
  if (n_sent_ + nbytes - n_acknowledged_ > kWindow) return false;
  std::unique_ptr<std::byte[]> bytes(new std::byte[nbytes]);
  std::byte* at = bytes.get() + sizeof(Head);
  for (std::size_t i = 0; i < n; ++i) {
    if (chunks[i].nbytes != 0) std::memcpy(at, chunks[i].data, chunks[i].nbytes);
    at += chunks[i].nbytes;
  }
  n_sent_ += nbytes;
  send(std::move(bytes), nbytes);
  return true;
}

Pipe::Message WirePipe::peek() {
  open();
  while (true) {
    Letter& letter = receives_[next_];
    if (n_held_ == 0) {
      if (!letter.message->test()) return {nullptr, 0};
      const std::size_t nbytes = letter.message->received_nbytes();
      Head head;
      if (nbytes < sizeof head) throw WireFault("a message of another kind came");
      std::memcpy(&head, letter.bytes.get(), sizeof head);
      n_acknowledged_ = head.n_taken;
      if (nbytes == sizeof head) {  // it says no more, and does not count
        letter.message->start();
        next_ = (next_ + 1) % receives_.size();
        continue;
      }
      n_held_ = nbytes;
    }
    return {letter.bytes.get() + sizeof(Head), n_held_ - sizeof(Head)};
  }
}

void WirePipe::pop() {
  n_taken_ += std::exchange(n_held_, 0);
  receives_[next_].message->start();
  next_ = (next_ + 1) % receives_.size();
  if (n_taken_ - n_told_ >= kWindow / 4) say_what_is_taken();
}

void WirePipe::say_what_is_taken() { send(std::unique_ptr<std::byte[]>(new std::byte[sizeof(Head)]), sizeof(Head)); }

void WirePipe::close(std::int64_t limit_ns) noexcept {
  const auto keep = [](Letter& letter) {
    if (letter.message != nullptr) bury(std::make_unique<Letter>(std::move(letter)));
  };
  try {
    const std::int64_t deadline = monotonic_ns() + limit_ns;
    for (forget_sent(); !sends_.empty() && monotonic_ns() < deadline; forget_sent()) usleep(100);
  } catch (const WireFault&) {  // the other is dead
  }
  for (Letter& each : receives_) {
    if (each.message == nullptr) continue;
    each.message->cancel();
    try {
      if (each.message->test()) each = {};
    } catch (const WireFault&) {
    }
    keep(each);
  }
  for (Letter& each : sends_) keep(each);
  sends_.clear();
}

}  // namespace ringcomm
