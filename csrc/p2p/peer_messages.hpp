// Messages between ranks. A message and its receive find each other by the two ranks and a mailbox; those
// of one sender and mailbox arrive in their order.
//
// Between ranks that share memory, who sends owns a pipe to each rank that it has sent to: in its arena,
// and its board says where. Between others a WirePipe takes its place. A short message goes through the
// pipe as a whole, and its sender goes on at once. Of a long one an offer goes. In a node the receiver
// reads the data where they are: in the sender's arena, or in its private memory if the system allows
// that; else it asks for them in pieces, through the pipe. Else it asks for them once its receive is with
// the wire, which carries them from array to array.
//
// A message that does not fit its receive is refused. Its sender hears of it if it waits for the message
// still, else in its next call with that rank.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../loop/program.hpp"
#include "../shm/memory.hpp"
#include "../shm/pipe.hpp"
#include "../wire/wire.hpp"
#include "wire_pipe.hpp"

namespace ringcomm {

struct Mailbox {
  std::uint64_t group;
  std::int64_t tag;

  bool operator<(const Mailbox& other) const {
    return group < other.group || (group == other.group && tag < other.tag);
  }
};

constexpr std::uint32_t kAnyRank = ~std::uint32_t{0};

// A message that did not fit its receive: what the two sides had.
struct Refusal {
  std::uint32_t sender = kAnyRank, receiver = kAnyRank;
  std::int64_t tag = 0;
  std::string sent, wanted;
  bool is_of_earlier = false;  // of a send that is over, not of the call that hears of it
};

// What is alike in many messages between the same two ranks.
struct Envelope {
  std::uint32_t rank;   // the other one; of a receive: kAnyRank, or who is to send
  std::uint64_t group;
  std::string outline;  // of the array: compared before any data moves
  std::size_t nbytes;
};

using SharedEnvelope = std::shared_ptr<const Envelope>;

// What is sent, or received, with others at once.
struct Parcel {
  SharedEnvelope envelope;
  std::int64_t tag;
  std::byte* data;
};

class PeerMessages;

// How ranks that share no memory are reached.
struct WirePeers {
  std::shared_ptr<Wire> wire;
  std::map<std::uint32_t, int> ranks;  // as the wire counts them, by rank
  int pipe_tag = 0;
  int first_tag = 0, tag_stride = 0;  // of long messages
  std::size_t n_tags = 0;
};

// One send or receive.
class PeerMessage final : public Program {
 public:
  PeerMessage(std::shared_ptr<PeerMessages> messages, SharedEnvelope envelope, std::int64_t tag, const std::byte* from,
              std::byte* to);
  ~PeerMessage() override;  // as abandon(), if it is not over
  Step advance() override;
  bool needs_polling() const override { return is_by_wire_ || waits_for_room_.load(); }
  // No rank of the node touches its buffer after this returns; a wire that moves its data may. A send
  // that was offered, and is given up, makes its receive fail.
  void abandon() override;
  bool is_by_wire() const { return is_by_wire_; }
  bool waits_for_room() const { return waits_for_room_.load(); }
  // Stays with it for limit_ns; returns true once it is over.
  bool drive_for(std::int64_t limit_ns);

  // To be read once it is over.
  std::uint32_t source() const { return source_; }  // of a receive
  const std::optional<Refusal>& refusal() const { return refusal_; }

 private:
  friend class PeerMessages;

  const std::shared_ptr<PeerMessages> messages_;
  const SharedEnvelope envelope_;
  const std::int64_t tag_;
  const std::byte* const from_;  // null: it is a receive
  std::byte* const to_;
  const bool is_by_wire_;  // or may be
  std::atomic<bool> waits_for_room_{false};
  // The rest is guarded by the mutex of PeerMessages.
  bool is_open_ = false;  // it is counted among those that are not over
  std::uint64_t serial_ = 0;     // of the message, among those of its sender
  std::uint32_t source_ = kAnyRank;
  std::uint64_t place_ = 0;      // of the data at the sender
  bool is_in_arena_ = false;     // place_ is an offset in the sender's arena, else an address
  std::size_t n_moved_ = 0;      // bytes
  std::unique_ptr<Message> data_;  // of a long one, once the wire moves them
  std::optional<Refusal> refusal_;
};

// One rank's messages with all others, and with itself.
class PeerMessages : public std::enable_shared_from_this<PeerMessages> {
 public:
  // memories: by rank, of this node; none: this rank shares none. may_read: other processes' private
  // memory, where the system allows it.
  PeerMessages(std::uint32_t rank, std::map<std::uint32_t, std::shared_ptr<NodeMemory>> memories,
               Patience patience, bool may_read, WirePeers others = {});
  PeerMessages(const PeerMessages&) = delete;
  PeerMessages& operator=(const PeerMessages&) = delete;
  ~PeerMessages();

  bool reaches(std::uint32_t rank) const { return mates_.count(rank) != 0; }

  // Begins a send, and stays with it for limit_ns. Null: it is over, and was not refused.
  // Throws std::bad_alloc if there is no memory for the pipe.
  std::shared_ptr<PeerMessage> send(const SharedEnvelope& to, std::int64_t tag, const std::byte* data,
                                    std::int64_t limit_ns);
  // The same for a receive; `source` becomes the rank that sent it.
  std::shared_ptr<PeerMessage> receive(const SharedEnvelope& from, std::int64_t tag, std::byte* out,
                                       std::int64_t limit_ns, std::uint32_t& source);
  // Both at once; but if an earlier message to one of the two ranks was refused, the receive tells that,
  // and nothing has begun.
  std::pair<std::shared_ptr<PeerMessage>, std::shared_ptr<PeerMessage>> exchange(
      const SharedEnvelope& to, std::int64_t sendtag, const std::byte* data, const SharedEnvelope& from,
      std::int64_t recvtag, std::byte* out, std::int64_t limit_ns, std::uint32_t& source);

  // The same for several. `rests` become those of the receives, then those of the sends; or an earlier
  // refusal is returned, and nothing has begun.
  std::optional<Refusal> exchange_all(const std::vector<Parcel>& sends, const std::vector<Parcel>& receives,
                                      std::int64_t limit_ns, std::vector<std::shared_ptr<PeerMessage>>& rests);

  // A message to that rank, whose send was over before it was refused; each is told once.
  std::optional<Refusal> earlier_refusal(std::uint32_t rank);

  // At most `most` messages of a group that have come, and that no receive has asked for.
  struct Unasked {
    std::uint32_t sender;
    std::int64_t tag;
    std::string outline;
  };
  std::vector<Unasked> unasked(std::uint64_t group, std::size_t most);

  // Messages to and from other hosts come to an end. What is on its way there has limit_ns to arrive.
  void close_wires(std::int64_t limit_ns);
  // No rank uses its messages any more: the pipes are given back.
  void retire();

  std::size_t most_whole_by_wire() const { return most_whole_by_wire_; }

  bool reads_memory() const { return reads_memory_; }
  int reading_error() const { return reading_error_; }  // errno by which the system has refused it; 0: it has not

 private:
  friend class PeerMessage;
  struct Head;     // of what is in a pipe
  struct Arrived;  // a message that no receive has asked for yet
  struct Mate;     // another rank, or this one
  struct OwnPipe;

  Mate& mate_of(std::uint32_t rank) const;
  void add_mate(std::uint32_t rank, std::shared_ptr<NodeMemory> memory);
  Bell& bell() { return memory_ == nullptr ? own_bell_ : memory_->bell(); }
  bool is_by_wire(std::uint32_t rank) const;
  std::size_t most_whole(const Mate& mate) const;
  void require_open() const;
  std::shared_ptr<PeerMessage> begin_send(const SharedEnvelope& to, std::int64_t tag, const std::byte* data);
  std::shared_ptr<PeerMessage> begin_receive(const SharedEnvelope& from, std::int64_t tag, std::byte* out);
  std::shared_ptr<PeerMessage> rest_of(std::shared_ptr<PeerMessage> message, std::int64_t limit_ns) const;
  bool hear_of_earlier(Mate& mate, PeerMessage& message);
  void tell_own_threads();
  Program::Step pass(PeerMessage& by);
  bool look_at(Mate& mate);
  bool hear(Mate& mate);
  void find_pipe(Mate& mate) const;
  void make_pipe(Mate& mate);
  bool put(Mate& mate, const Envelope& to, std::int64_t tag, const std::byte* data,
           std::uint64_t serial);
  bool put_chunks(Mate& mate, const Chunk* chunks, std::size_t n);
  template <class Use>
  bool use_wire(Mate& mate, const Use& use);
  bool hear_by_wire(Mate& mate);
  bool move_data(Mate& mate);
  void begin_data(Mate& mate, PeerMessage& message);
  void stop_data(PeerMessage& message);
  void tell(Mate& mate, Head head, const Refusal* refusal, PeerMessage* ends);
  bool flush(Mate& mate);
  bool stream(Mate& mate);
  void take(Mate& mate, const std::byte* data, std::size_t nbytes);
  void hear_of_end(Mate& mate, std::uint64_t serial);
  void say_it_is_given_up(Mate& mate, std::uint64_t serial);
  void hear_refusal(Mate& mate, const Head& head, const char* outlines);
  PeerMessage* receive_for(const Mate& mate, const Mailbox& mailbox);
  void deliver(Mate& mate, PeerMessage& receive, const Head& head, std::string_view outline,
               const std::byte* data);
  bool copy_piece(Mate& mate, PeerMessage& receive);
  void ask_for_pieces(Mate& mate, PeerMessage& receive);
  void take_piece(Mate& mate, const Head& head, const std::byte* data);
  void finish(PeerMessage& message, std::string fault = {});
  void close(PeerMessage& message);
  void forget(PeerMessage& message);
  void fail_receives_from(Mate& mate);

  const std::uint32_t rank_;
  const std::shared_ptr<NodeMemory> memory_;  // may be null
  const Patience patience_;
  const WirePeers others_;
  const pid_t pid_ = getpid();
  Bell own_bell_{};
  std::unique_ptr<OwnPipe> own_pipe_;  // to itself, if it shares no memory
  std::size_t most_whole_by_wire_;
  std::size_t pipe_nbytes_;
  std::atomic<bool> reads_memory_;
  std::atomic<int> reading_error_{0};
  // Of what follows. Recursive: a message that an error ends while it begins gives itself up.
  std::recursive_mutex mutex_;
  std::map<std::uint32_t, std::unique_ptr<Mate>> mates_;
  std::map<Mailbox, std::list<PeerMessage*>> receives_;  // without a message
  std::map<Mailbox, std::deque<Arrived>> arrived_;       // without a receive
  std::size_t n_from_any_ = 0;  // of receives_, those that anybody may serve
  std::uint64_t n_sent_ = 0;
  bool is_retired_ = false, has_closed_wires_ = false;
  bool has_ended_ = false;  // a message, since tell_own_threads()
};

}  // namespace ringcomm
