// Ranks as threads of one process. Stricter than MPI may be: a send completes only when its receive
// has been matched, so code that relies on MPI buffering small messages fails here at once.
#pragma once
#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "wire.hpp"

namespace ringcomm {

class LoopbackMessage;

// The room in which `size` ranks meet: their mailboxes, and a bell for each. Thread-safe.
class LoopbackHub : public std::enable_shared_from_this<LoopbackHub> {
 public:
  explicit LoopbackHub(int size) : boxes_(static_cast<std::size_t>(size)) {}

  std::unique_ptr<LoopbackMessage> send(int rank, const std::byte* data, std::size_t nbytes,
                                        int dest, int tag);
  std::unique_ptr<LoopbackMessage> receive(int rank, std::byte* out, std::size_t nbytes, int source,
                                           int tag, bool is_exact = true);
  std::shared_ptr<Wire> wire(int rank);

  // Sleeps until something was delivered from or to `rank`, or its bell rung, since its last sleep.
  void sleep(int rank, double seconds);
  void ring(int rank);

 private:
  friend class LoopbackMessage;
  struct Mailbox {
    std::list<LoopbackMessage*> sends, receives;  // posted and not matched, oldest first
    std::condition_variable bell;
    bool has_rung = false;
  };

  Mailbox& box(int rank) { return boxes_.at(static_cast<std::size_t>(rank)); }
  void post(LoopbackMessage& message);
  bool withdraw(LoopbackMessage& message);
  void ring_locked(int rank);

  std::mutex mutex_;
  std::vector<Mailbox> boxes_;
};

class LoopbackMessage final : public Message {
 public:
  LoopbackMessage(std::shared_ptr<LoopbackHub> hub, bool is_receive, int rank, std::byte* data,
                  std::size_t nbytes, int peer, int tag, bool is_exact);
  ~LoopbackMessage() override;  // one that is not matched yet is withdrawn
  LoopbackMessage(const LoopbackMessage&) = delete;
  LoopbackMessage& operator=(const LoopbackMessage&) = delete;

  void start() override;
  bool test() override;
  std::size_t received_nbytes() const override { return received_nbytes_; }
  void cancel() override;

 private:
  friend class LoopbackHub;
  enum class State { idle, posted, done, faulty };

  bool fits(const LoopbackMessage& receive) const;

  const std::shared_ptr<LoopbackHub> hub_;
  const bool is_receive_;
  const int rank_;
  std::byte* const data_;
  const std::size_t nbytes_;
  const int peer_, tag_;
  const bool is_exact_;  // a receive of another size than the send is a fault
  std::size_t received_nbytes_ = 0;
  std::string fault_;
  std::atomic<State> state_{State::idle};  // what is written before it changes is read after
};

}  // namespace ringcomm
