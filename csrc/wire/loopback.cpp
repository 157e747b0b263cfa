#include "loopback.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace ringcomm {
namespace {

class LoopbackWire final : public Wire {
 public:
  LoopbackWire(std::shared_ptr<LoopbackHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  std::unique_ptr<Message> send(const std::byte* data, std::size_t nbytes, int dest,
                                int tag) override {
    return hub_->send(rank_, data, nbytes, dest, tag);
  }
  std::unique_ptr<Message> receive(std::byte* out, std::size_t nbytes, int source,
                                   int tag) override {
    return hub_->receive(rank_, out, nbytes, source, tag);
  }
  std::unique_ptr<Message> receive_at_most(std::byte* out, std::size_t nbytes, int source,
                                           int tag) override {
    return hub_->receive(rank_, out, nbytes, source, tag, false);
  }

 private:
  const std::shared_ptr<LoopbackHub> hub_;
  const int rank_;
};

}  // namespace

std::unique_ptr<LoopbackMessage> LoopbackHub::send(int rank, const std::byte* data,
                                                   std::size_t nbytes, int dest, int tag) {
  return std::make_unique<LoopbackMessage>(shared_from_this(), false, rank,
                                           const_cast<std::byte*>(data), nbytes, dest, tag, true);
}

std::unique_ptr<LoopbackMessage> LoopbackHub::receive(int rank, std::byte* out, std::size_t nbytes,
                                                      int source, int tag, bool is_exact) {
  return std::make_unique<LoopbackMessage>(shared_from_this(), true, rank, out, nbytes, source, tag,
                                           is_exact);
}

std::shared_ptr<Wire> LoopbackHub::wire(int rank) {
  return std::make_shared<LoopbackWire>(shared_from_this(), rank);
}

void LoopbackHub::sleep(int rank, double seconds) {
  std::unique_lock lock(mutex_);
  Mailbox& mine = box(rank);
  mine.bell.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return mine.has_rung; });
  mine.has_rung = false;
}

void LoopbackHub::ring(int rank) {
  std::lock_guard lock(mutex_);
  ring_locked(rank);
}

void LoopbackHub::ring_locked(int rank) {
  box(rank).has_rung = true;
  box(rank).bell.notify_all();
}

void LoopbackHub::post(LoopbackMessage& message) {
  using State = LoopbackMessage::State;
  std::lock_guard lock(mutex_);
  Mailbox& room = box(message.is_receive_ ? message.rank_ : message.peer_);
  auto& others = message.is_receive_ ? room.sends : room.receives;
  const auto found = std::find_if(others.begin(), others.end(), [&](LoopbackMessage* other) {
    return message.is_receive_ ? other->fits(message) : message.fits(*other);
  });
  if (found == others.end()) {
    message.state_.store(State::posted, std::memory_order_release);
    (message.is_receive_ ? room.receives : room.sends).push_back(&message);
    return;
  }
  LoopbackMessage& send = message.is_receive_ ? **found : message;
  LoopbackMessage& receive = message.is_receive_ ? message : **found;
  others.erase(found);
  State outcome = State::done;
  if (send.nbytes_ == receive.nbytes_ || (!receive.is_exact_ && send.nbytes_ < receive.nbytes_)) {
    receive.received_nbytes_ = send.nbytes_;
    if (send.nbytes_ > 0) std::memcpy(receive.data_, send.data_, send.nbytes_);
  } else {
    outcome = State::faulty;
    send.fault_ = receive.fault_ = std::to_string(send.nbytes_) + " bytes sent, " +
                                   std::to_string(receive.nbytes_) + " expected";
  }
  ring_locked(send.rank_);
  ring_locked(receive.rank_);
  send.state_.store(outcome, std::memory_order_release);
  receive.state_.store(outcome, std::memory_order_release);
}

bool LoopbackHub::withdraw(LoopbackMessage& message) {
  std::lock_guard lock(mutex_);
  if (message.state_.load(std::memory_order_relaxed) != LoopbackMessage::State::posted)
    return false;
  Mailbox& room = box(message.is_receive_ ? message.rank_ : message.peer_);
  (message.is_receive_ ? room.receives : room.sends).remove(&message);
  return true;
}

LoopbackMessage::LoopbackMessage(std::shared_ptr<LoopbackHub> hub, bool is_receive, int rank,
                                 std::byte* data, std::size_t nbytes, int peer, int tag, bool is_exact)
    : hub_(std::move(hub)), is_receive_(is_receive), rank_(rank), data_(data), nbytes_(nbytes),
      peer_(peer), tag_(tag), is_exact_(is_exact) {}

LoopbackMessage::~LoopbackMessage() { hub_->withdraw(*this); }

void LoopbackMessage::start() {
  if (state_.load(std::memory_order_acquire) == State::posted)
    throw WireFault("started again before its last round was complete");
  hub_->post(*this);
}

bool LoopbackMessage::test() {
  const State state = state_.load(std::memory_order_acquire);
  if (state == State::faulty) throw WireFault(fault_);
  return state != State::posted;
}

void LoopbackMessage::cancel() {
  if (is_receive_) hub_->withdraw(*this);
}

bool LoopbackMessage::fits(const LoopbackMessage& receive) const {
  return tag_ == receive.tag_ && receive.peer_ == rank_;
}

}  // namespace ringcomm
