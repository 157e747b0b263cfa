// Messages between ranks as C++ sees them. Two fillers: MPI, and ranks as threads.
#pragma once
#include <cstddef>
#include <memory>
#include <stdexcept>

namespace ringcomm {

// The wire refused an operation. A hint that a peer died; the dead set decides.
struct WireFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A message of fixed buffer, peer and tag that is sent or received once, or again and again. Its
// buffer belongs to the wire from start() until test() is true. For one thread at a time.
class Message {
 public:
  virtual ~Message() = default;

  // Begins a round; the one before must be complete. Throws WireFault.
  virtual void start() = 0;

  // True once the round is complete, or none was begun; never blocks. Throws WireFault, also if a
  // message of another size has come.
  virtual bool test() = 0;

  // How much has come, once the round of a receive is complete.
  virtual std::size_t received_nbytes() const = 0;

  // Gives up a receive that has not been matched. No effect on a send.
  virtual void cancel() = 0;
};

// What an operation needs of a transport while it runs without Python. Ranks are those of the job.
// Messages of one (source, tag) arrive in the order in which they were started.
class Wire {
 public:
  virtual ~Wire() = default;
  virtual std::unique_ptr<Message> send(const std::byte* data, std::size_t nbytes, int dest,
                                        int tag) = 0;
  virtual std::unique_ptr<Message> receive(std::byte* out, std::size_t nbytes, int source,
                                           int tag) = 0;
  // The same for a message of at most so many bytes.
  virtual std::unique_ptr<Message> receive_at_most(std::byte* out, std::size_t nbytes, int source,
                                                   int tag) = 0;

  // Nothing is started any more, and messages that are kept let go of the library under them.
  virtual void close() {}
};

}  // namespace ringcomm
