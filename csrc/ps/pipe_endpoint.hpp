// Frames between the ranks of a node without MPI; and the pushes among them that need no Python.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../loop/program.hpp"
#include "../shm/memory.hpp"
#include "../shm/pipe.hpp"
#include "block_updater.hpp"
#include "home_pushes.hpp"

namespace ringcomm::ps {

// A rank of this node, and the two pipes.
struct Mate {
  std::uint32_t rank;
  Pipe to_it, from_it;
  std::shared_ptr<NodeMemory> memory;
};

// A rank's end of its pipes to the ranks of its node. The loop looks after it; what Python is to do is
// kept for collect(). Frames of one sender are handed on, or carried out, in their order.
class PipeEndpoint : public Program {
 public:
  // goes_on_alone: others are waiting for what this rank does while its thread computes.
  // inline_max, meta_max: bytes of a body within a frame, and of what explains it. looks: see Program.
  // patience: of await_ack().
  PipeEndpoint(std::uint32_t rank, std::shared_ptr<NodeMemory> memory, std::vector<Mate> mates,
          bool goes_on_alone, int looks, Patience patience, std::size_t inline_max,
          std::size_t meta_max);

  bool reaches(std::uint32_t rank) const;

  // Any thread. A frame that finds no room waits here.
  void send(std::uint32_t rank, const void* frame, std::size_t nbytes);
  // A request of this rank: header with all but where and n_body. False, and nothing was sent, if that
  // rank is not reached, or the body can be neither in the frame nor read where it stands.
  bool ask(std::uint32_t rank, FrameHeader header, Chunk meta, Chunk body);
  std::size_t n_unsent() const { return n_unsent_.load(); }
  // Any thread. That rank is dead: what it has sent, and what is for it, is dropped from now on.
  void forget(std::uint32_t rank);

  // What Python does between these two is not interfered with.
  void enter() { mutex_.lock(); }
  void leave();

  // Inside: what has come for Python. All that these senders send after it is for Python, too, until
  // the next call. But first, what take_acks() returns: that came before.
  std::vector<std::pair<std::uint32_t, std::string>> collect();

  // A reply that says no more than that a request was carried out.
  struct Ack {
    std::uint64_t sequence;
    std::int64_t clock;
  };
  // Inside, after collect(): those that came.
  std::vector<Ack> take_acks();
  // Outside: looks until the ack of a request comes, and returns its clock. -1 if anything else comes,
  // or it does not within limit_ns: who drives is to look. The ack stays for take_acks(), so that an
  // interrupt loses none, until a call says that it has been `taken`.
  std::int64_t await_ack(std::uint64_t sequence, std::int64_t limit_ns, std::uint64_t taken);
  // Inside: what this sender sends next is for Python, until the next collect().
  void hold(std::uint32_t rank);
  // True if collect() would return something.
  bool has_frames() const { return n_inbox_.load() + n_acks_.load() != 0; }

  // Inside: pushes for this block that name this epoch need no Python from now on. home: of which it
  // is a part; null: there are no copies.
  void open(std::uint32_t table, std::uint32_t partition, std::uint32_t epoch,
            std::shared_ptr<BlockUpdater> updater, std::shared_ptr<HomePushes> home = nullptr);
  void close(std::uint32_t table, std::uint32_t partition);

  // Inside: makes a copy of a home begin here, instead of one that was.
  std::shared_ptr<HomePushes> begin_home(std::uint32_t number);
  void drop_home(std::uint32_t number);
  // Inside, at the primary: the follower has done all changes up to this one.
  void complete(HomePushes& home, std::uint64_t number);
  // Inside, at the follower: carries out a push within a record, of which Python has these parts.
  void follow(HomePushes& home, Chunk meta, Chunk body);

  std::atomic<std::uint64_t> n_requests{0}, n_body{0};  // that were carried out here, without copies

  Step advance() override;
  bool needs_polling() const override { return n_unsent_.load() != 0; }
  bool goes_on_alone() const override { return goes_on_alone_; }
  int looks() const override { return looks_; }
  void abandon() override;

 private:
  struct Connection {
    Mate mate;
    std::mutex mutex;
    std::deque<std::string> unsent;
    std::atomic<bool> is_forgotten{false};
    bool is_held = false;
  };
  struct Open {
    std::uint32_t epoch;
    std::shared_ptr<BlockUpdater> updater;
    std::shared_ptr<HomePushes> home;
  };

  Connection* connection_to(std::uint32_t rank) const;
  bool put(Connection& connection, const Chunk* chunks, std::size_t n);
  bool flush(Connection& connection);
  enum class Look { nothing, found, other };
  Look look_for(std::uint64_t sequence, std::uint64_t taken, std::int64_t& clock);
  Step pass();
  Step pass_or_fault();
  bool carry_out(Connection& connection, const std::byte* data, std::size_t nbytes);
  bool carry_out_record(Connection& connection, const Frame& record);
  bool forward(HomePushes& home, std::uint32_t source, const Frame& frame, const std::byte* data,
               std::size_t nbytes);
  bool note_ack(const std::byte* data, std::size_t nbytes);
  void reply(Connection& connection, const FrameHeader& request, BlockUpdater& updater);
  void report(Connection& primary);
  const Open* open_for(const FrameHeader& header) const;
  const std::byte* body_of(const Connection& connection, const Frame& frame) const;

  const std::uint32_t rank_;
  const std::shared_ptr<NodeMemory> memory_;
  const bool goes_on_alone_;
  const int looks_;
  const Patience patience_;
  const std::size_t inline_max_, meta_max_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::unordered_map<std::uint32_t, Connection*> by_rank_;
  std::atomic<std::size_t> n_unsent_{0};

  std::mutex mutex_;  // of what follows
  std::atomic<bool> was_missed_{false};  // advance() found it locked
  bool is_abandoned_ = false;
  std::string fault_text_;
  std::unordered_map<std::uint64_t, Open> open_;
  std::unordered_map<std::uint32_t, std::shared_ptr<HomePushes>> homes_;
  std::vector<std::pair<std::uint32_t, std::string>> inbox_;
  std::vector<Ack> acks_;
  std::optional<Ack> reported_;  // by await_ack(), and not known to be taken
  std::atomic<std::size_t> n_inbox_{0}, n_acks_{0};
};

}  // namespace ringcomm::ps
