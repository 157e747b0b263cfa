#include "peer_messages.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "../loop/grave.hpp"
#include "../loop/loop.hpp"

namespace ringcomm {
namespace {

// Of a pipe, and of all pipes of a rank that talks to all others of its node.
constexpr std::size_t kPipeMost = 256u << 10, kPipeLeast = 64u << 10, kPipesMost = 8u << 20;
constexpr std::size_t kWhole = 16u << 10;  // longer messages are faster read where they are (measured)
// Of a message to another host, whose receiver would else be asked first; and of all that this rank has
// room for. With its heads such a message is still one that Open MPI sends at once (64 KiB).
constexpr std::size_t kWholeByWire = 48u << 10, kLeastByWire = 4u << 10, kRoomsMost = 8u << 20;
constexpr std::size_t kHeads = 8u << 10;  // room for the outlines
constexpr std::size_t kLooksAround = 64;  // more wires are not opened to say what has come
constexpr std::size_t kPieceRead = 256u << 10;  // of what is read where it is, before others' turn

const std::byte* bytes_of(const std::string& text) {
  return reinterpret_cast<const std::byte*>(text.data());
}

template <class List>
void remove(List& list, const PeerMessage* message) {
  list.erase(std::remove(list.begin(), list.end(), message), list.end());
}

}  // namespace

struct PeerMessages::Head {
  enum class Kind : std::uint32_t {
    whole,    // outline, data
    offer,    // outline; the data are at `place`
    piece,    // data from `place` on
    taken,    // of an offer: its data are not needed any more
    wanted,   // of an offer: its data are to come in pieces, from `place` on; or by the wire
    refused,  // the outlines of both sides
    given_up, // of an offer: its data do not come
  };

  Kind kind;
  std::uint32_t n_sent, n_wanted;  // bytes of the outlines
  std::uint32_t is_in_arena;
  Mailbox mailbox;
  std::uint64_t serial, nbytes, place;
};

struct PeerMessages::Arrived {
  Mate* mate;
  Head head;
  std::string outline, data;
};

struct PeerMessages::Mate {
  // What finds no room in the pipe: a message, or bytes about one that end a receive.
  struct Unsent {
    PeerMessage* send;
    std::string bytes;
    PeerMessage* ends;
  };

  std::uint32_t rank;
  std::shared_ptr<NodeMemory> memory;  // null: it has none, or shares none with this rank
  std::unique_ptr<WirePipe> wire;      // null: it is reached by memory
  int wire_rank = -1;
  std::string fault;                   // of the wire, which is not used any more
  std::vector<PeerMessage*> moving;    // whose data the wire moves
  Outbox* outbox = nullptr;  // of this rank, for that one
  const Outbox* its_outbox = nullptr;
  Pipe to_it, from_it;
  std::uint32_t n_seen = 0;  // of its outboxes
  std::size_t n_open = 0;    // sends to it and receives from it that are not over
  std::deque<Unsent> unsent;
  std::map<std::uint64_t, PeerMessage*> offered;   // sends, by serial
  std::deque<PeerMessage*> streaming;              // sends that go in pieces
  std::vector<PeerMessage*> copying;               // receives whose data this rank reads
  std::map<std::uint64_t, PeerMessage*> incoming;  // receives whose data come in pieces
  std::deque<Refusal> refusals;                // of sends that are over
};

// A rank that shares no memory talks to itself through this.
struct PeerMessages::OwnPipe {
  alignas(64) std::byte memory[kPipeLeast];
  Outbox outbox{};
};

// --- one message ---

PeerMessage::PeerMessage(std::shared_ptr<PeerMessages> messages, SharedEnvelope envelope, std::int64_t tag,
                         const std::byte* from, std::byte* to)
    : messages_(std::move(messages)), envelope_(std::move(envelope)), tag_(tag), from_(from), to_(to),
      is_by_wire_(messages_->is_by_wire(envelope_->rank)) {}

PeerMessage::~PeerMessage() {
  if (is_open_ && !is_over()) abandon();
}

Program::Step PeerMessage::advance() { return messages_->pass(*this); }

void PeerMessage::abandon() {
  if (messages_->pid_ != getpid()) return;  // a fork must not speak for its parent
  const std::lock_guard lock(messages_->mutex_);
  if (is_over()) return;
  messages_->forget(*this);
  end("this rank has given it up");
}

bool PeerMessage::drive_for(std::int64_t limit_ns) {
  if (is_over()) return true;
  if (needs_polling()) return drive_polling(*this, limit_ns);
  return drive(*this, messages_->bell(), messages_->patience_, limit_ns);
}

// --- all of a rank ---

PeerMessages::PeerMessages(std::uint32_t rank, std::map<std::uint32_t, std::shared_ptr<NodeMemory>> memories,
                           Patience patience, bool may_read, WirePeers others)
    : rank_(rank),
      memory_(memories.empty() ? nullptr : memories.at(rank)),
      patience_(patience),
      others_(std::move(others)),
      reads_memory_(may_read) {
  const std::size_t share = kPipesMost / std::max<std::size_t>(memories.size(), 1) / 64 * 64;  // alike in the node
  pipe_nbytes_ = std::min(std::max(share, kPipeLeast), kPipeMost);
  const std::size_t room = kRoomsMost / std::max<std::size_t>(others_.ranks.size(), 1);  // alike in the job
  most_whole_by_wire_ = std::min(std::max(room, kLeastByWire), kWholeByWire);
  for (auto& [other, memory] : memories) add_mate(other, std::move(memory));
  if (memory_ == nullptr) {
    own_pipe_ = std::make_unique<OwnPipe>();
    pipe_nbytes_ = kPipeLeast;
    add_mate(rank, nullptr);
  } else {
    memory_->head().n_outboxes.store(0);
  }
  for (const auto& [other, wire_rank] : others_.ranks) {
    if (mates_.count(other) != 0) throw std::invalid_argument("a rank is reached in two ways");
    add_mate(other, nullptr);
    Mate& mate = *mates_[other];
    mate.wire_rank = wire_rank;
    mate.wire = std::make_unique<WirePipe>(others_.wire, wire_rank, others_.pipe_tag, most_whole_by_wire_ + kHeads);
  }
}

void PeerMessages::add_mate(std::uint32_t rank, std::shared_ptr<NodeMemory> memory) {
  auto mate = std::make_unique<Mate>();
  mate->rank = rank;
  mate->memory = std::move(memory);
  mates_[rank] = std::move(mate);
}

PeerMessages::~PeerMessages() {
  for (const auto& [rank, mate] : mates_) {
    if (mate->wire == nullptr) continue;
    if (pid_ == getpid())
      mate->wire->close(0);
    else
      (void)mate->wire.release();  // its messages are the parent's
  }
}

PeerMessages::Mate& PeerMessages::mate_of(std::uint32_t rank) const {
  const auto at = mates_.find(rank);
  if (at == mates_.end()) throw std::invalid_argument("there is no such rank");
  return *at->second;
}

bool PeerMessages::is_by_wire(std::uint32_t rank) const {
  return rank == kAnyRank ? !others_.ranks.empty() : mate_of(rank).wire != nullptr;
}

std::size_t PeerMessages::most_whole(const Mate& mate) const {
  return mate.wire == nullptr ? kWhole : most_whole_by_wire_;
}

std::shared_ptr<PeerMessage> PeerMessages::send(const SharedEnvelope& to, std::int64_t tag, const std::byte* data,
                                                std::int64_t limit_ns) {
  std::shared_ptr<PeerMessage> message;
  {
    const std::lock_guard lock(mutex_);
    message = begin_send(to, tag, data);
    tell_own_threads();
  }
  return rest_of(std::move(message), limit_ns);
}

std::shared_ptr<PeerMessage> PeerMessages::receive(const SharedEnvelope& from, std::int64_t tag, std::byte* out,
                                                   std::int64_t limit_ns, std::uint32_t& source) {
  std::shared_ptr<PeerMessage> message;
  {
    const std::lock_guard lock(mutex_);
    message = begin_receive(from, tag, out);
    tell_own_threads();
  }
  auto rest = rest_of(message, limit_ns);
  if (rest == nullptr) source = message->source_;
  return rest;
}

std::pair<std::shared_ptr<PeerMessage>, std::shared_ptr<PeerMessage>> PeerMessages::exchange(
    const SharedEnvelope& to, std::int64_t sendtag, const std::byte* data, const SharedEnvelope& from,
    std::int64_t recvtag, std::byte* out, std::int64_t limit_ns, std::uint32_t& source) {
  std::shared_ptr<PeerMessage> send, receive;
  {
    const std::lock_guard lock(mutex_);
    Mate& dest = mate_of(to->rank);
    hear(dest);
    if (!dest.refusals.empty()) {
      receive = std::make_shared<PeerMessage>(shared_from_this(), from, recvtag, nullptr, out);
      hear_of_earlier(dest, *receive);
      return {nullptr, std::move(receive)};
    }
    receive = begin_receive(from, recvtag, out);
    if (receive->is_over() && receive->refusal_ && receive->refusal_->is_of_earlier)
      return {nullptr, std::move(receive)};
    send = begin_send(to, sendtag, data);
    tell_own_threads();
  }
  auto rest = rest_of(receive, limit_ns);
  send = rest_of(std::move(send), limit_ns);
  if (rest == nullptr) source = receive->source_;
  return {std::move(send), std::move(rest)};
}

std::optional<Refusal> PeerMessages::exchange_all(const std::vector<Parcel>& sends, const std::vector<Parcel>& receives,
                                                  std::int64_t limit_ns,
                                                  std::vector<std::shared_ptr<PeerMessage>>& rests) {
  rests.reserve(sends.size() + receives.size());
  {
    const std::lock_guard lock(mutex_);
    require_open();
    for (const auto* side : {&sends, &receives}) {
      for (const Parcel& each : *side) {
        Mate& mate = mate_of(each.envelope->rank);
        hear(mate);
        if (mate.refusals.empty()) continue;
        Refusal refusal = std::move(mate.refusals.front());
        mate.refusals.pop_front();
        tell_own_threads();
        return refusal;
      }
    }
    for (const Parcel& each : receives) rests.push_back(begin_receive(each.envelope, each.tag, each.data));
    for (const Parcel& each : sends) rests.push_back(begin_send(each.envelope, each.tag, each.data));
    tell_own_threads();
  }
  for (auto& each : rests) {
    each = rest_of(std::move(each), limit_ns);
    if (each != nullptr) limit_ns = 0;  // the moment is over
  }
  return {};
}

// Stays with a message for a moment. Null if it is over, and nothing is to be said about it.
std::shared_ptr<PeerMessage> PeerMessages::rest_of(std::shared_ptr<PeerMessage> message,
                                           std::int64_t limit_ns) const {
  if (message == nullptr) return nullptr;
  if (!message->drive_for(limit_ns) || message->refusal_ || !message->fault().empty()) return message;
  return nullptr;
}

void PeerMessages::close_wires(std::int64_t limit_ns) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(has_closed_wires_, true)) return;
  const std::int64_t deadline = monotonic_ns() + limit_ns;
  for (const auto& [rank, mate] : mates_) {
    if (mate->wire == nullptr) continue;
    for (PeerMessage* const each : mate->moving) stop_data(*each);
    mate->wire->close(std::max<std::int64_t>(deadline - monotonic_ns(), 0));
    mate->fault = "the wire is closed";
  }
}

void PeerMessages::retire() {
  const std::lock_guard lock(mutex_);
  if (is_retired_) return;
  is_retired_ = true;
  if (memory_ == nullptr) return;
  memory_->head().n_outboxes.store(0);
  for (const auto& [rank, mate] : mates_)
    if (mate->outbox != nullptr) memory_->allocator().give_back(mate->outbox->offset, pipe_nbytes_);
}

void PeerMessages::require_open() const {
  if (is_retired_) throw std::runtime_error("the ranks have ended their work together");
}

// Null: it has gone.
std::shared_ptr<PeerMessage> PeerMessages::begin_send(const SharedEnvelope& to, std::int64_t tag,
                                                      const std::byte* data) {
  require_open();
  Mate& mate = mate_of(to->rank);
  if (mate.outbox == nullptr && mate.wire == nullptr) make_pipe(mate);
  hear(mate);
  const std::uint64_t serial = ++n_sent_;
  if (mate.refusals.empty() && to->nbytes <= most_whole(mate) && mate.unsent.empty() &&
      put(mate, *to, tag, data, serial))
    return nullptr;
  const auto message = std::make_shared<PeerMessage>(shared_from_this(), to, tag, data, nullptr);
  if (hear_of_earlier(mate, *message)) return message;
  message->serial_ = serial;
  message->is_open_ = true;
  ++mate.n_open;
  mate.unsent.push_back({message.get(), {}, nullptr});
  message->waits_for_room_ = true;
  flush(mate);
  return message;
}

std::shared_ptr<PeerMessage> PeerMessages::begin_receive(const SharedEnvelope& from, std::int64_t tag,
                                                         std::byte* out) {
  require_open();
  const bool is_from_any = from->rank == kAnyRank;
  Mate* const named = is_from_any ? nullptr : &mate_of(from->rank);
  const auto message = std::make_shared<PeerMessage>(shared_from_this(), from, tag, nullptr, out);
  if (named != nullptr && hear_of_earlier(*named, *message)) return message;
  message->is_open_ = true;
  is_from_any ? ++n_from_any_ : ++named->n_open;
  const Mailbox mailbox{from->group, tag};
  if (const auto at = arrived_.find(mailbox); at != arrived_.end()) {
    auto& waiting = at->second;
    const auto first = std::find_if(waiting.begin(), waiting.end(), [&](const Arrived& each) {
      return is_from_any || each.mate == named;
    });
    if (first != waiting.end()) {
      const Arrived found = std::move(*first);
      waiting.erase(first);
      if (waiting.empty()) arrived_.erase(at);
      deliver(*found.mate, *message, found.head, found.outline, bytes_of(found.data));
      return message;
    }
  }
  receives_[mailbox].push_back(message.get());
  return message;
}

// True: the message is over without having begun, and tells of an earlier one.
bool PeerMessages::hear_of_earlier(Mate& mate, PeerMessage& message) {
  if (mate.refusals.empty()) return false;
  message.refusal_ = std::move(mate.refusals.front());
  mate.refusals.pop_front();
  message.end();
  return true;
}

std::optional<Refusal> PeerMessages::earlier_refusal(std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  require_open();
  Mate& mate = mate_of(rank);
  hear(mate);
  tell_own_threads();
  if (mate.refusals.empty()) return {};
  Refusal refusal = std::move(mate.refusals.front());
  mate.refusals.pop_front();
  return refusal;
}

std::vector<PeerMessages::Unasked> PeerMessages::unasked(std::uint64_t group, std::size_t most) {
  const std::lock_guard lock(mutex_);
  std::vector<Unasked> found;
  if (is_retired_) return found;
  for (const auto& [rank, mate] : mates_)
    if (mate->wire == nullptr || others_.ranks.size() <= kLooksAround) hear(*mate);
  tell_own_threads();
  for (const auto& [mailbox, messages] : arrived_)
    for (const Arrived& each : messages)
      if (mailbox.group == group && found.size() < most)
        found.push_back({each.mate->rank, mailbox.tag, each.outline});
  return found;
}

// One of them may wait for a message that another has ended.
void PeerMessages::tell_own_threads() {
  if (std::exchange(has_ended_, false)) bell().ring();
}

// Of the thread that advances a message: all that can go on goes on.
Program::Step PeerMessages::pass(PeerMessage& by) {
  const std::lock_guard lock(mutex_);
  if (by.is_over()) return Program::Step::waiting;
  if (is_retired_) {
    by.end("the ranks have ended their work together");
    return Program::Step::moved;
  }
  bool has_moved = false;
  try {
    for (const auto& [rank, mate] : mates_)
      if (mate->n_open != 0 || n_from_any_ != 0) has_moved |= look_at(*mate);
  } catch (const std::exception& error) {
    if (!by.is_over()) {
      forget(by);
      by.end(error.what());
    }
    return Program::Step::moved;
  }
  const std::uint32_t other = by.source_ != kAnyRank ? by.source_ : by.envelope_->rank;
  if (!by.is_over() && other != kAnyRank) {
    Mate& mate = mate_of(other);
    if (!mate.fault.empty()) {
      forget(by);
      by.end(mate.fault);
    } else if (by.from_ == nullptr && by.source_ == kAnyRank) {
      if (!mate.refusals.empty()) forget(by);
      hear_of_earlier(mate, by);
    }
  }
  tell_own_threads();
  return has_moved || by.is_over() ? Program::Step::moved : Program::Step::waiting;
}

bool PeerMessages::look_at(Mate& mate) {
  bool has_moved = hear(mate);
  if (!mate.moving.empty()) has_moved |= move_data(mate);
  for (std::size_t i = mate.copying.size(); i-- > 0;) has_moved |= copy_piece(mate, *mate.copying[i]);
  return !mate.streaming.empty() ? stream(mate) || has_moved : has_moved;
}

// Takes what has come, and leaves the long copies for later.
bool PeerMessages::hear(Mate& mate) {
  bool has_moved = !mate.unsent.empty() && flush(mate);
  if (mate.wire != nullptr) return hear_by_wire(mate) || has_moved;
  if (mate.its_outbox == nullptr) find_pipe(mate);
  if (mate.its_outbox != nullptr) {
    const bool was_filled = mate.from_it.n_unread() > pipe_nbytes_ / 4;
    for (Pipe::Message next = mate.from_it.peek(); next.data != nullptr; next = mate.from_it.peek()) {
      take(mate, next.data, next.nbytes);
      mate.from_it.pop();
      has_moved = true;
    }
    if (was_filled && mate.memory != nullptr) mate.memory->bell().ring();  // it may wait for room
    if (mate.its_outbox->is_given_up.load() != 0) fail_receives_from(mate);
  }
  return has_moved;
}

// Returns what `use` returns; false once the wire to that rank refuses. Then its messages fail.
template <class Use>
bool PeerMessages::use_wire(Mate& mate, const Use& use) {
  if (!mate.fault.empty()) return false;
  try {
    return use();
  } catch (const WireFault& fault) {
    mate.fault = fault.what();
    has_ended_ = true;
    return false;
  }
}

bool PeerMessages::hear_by_wire(Mate& mate) {
  return use_wire(mate, [&] {
    bool has_moved = false;
    for (Pipe::Message next = mate.wire->peek(); next.data != nullptr; next = mate.wire->peek()) {
      take(mate, next.data, next.nbytes);
      mate.wire->pop();
      has_moved = true;
    }
    return has_moved;
  });
}

void PeerMessages::find_pipe(Mate& mate) const {
  if (mate.memory == nullptr) return;  // it has not written to itself yet
  const BoardHead& head = mate.memory->head();
  const std::uint32_t n = head.n_outboxes.load();
  for (; mate.n_seen < n && mate.its_outbox == nullptr; ++mate.n_seen) {
    const Outbox& outbox = head.outboxes[mate.n_seen];
    if (outbox.receiver != rank_) continue;
    std::byte* const at = mate.memory->arena() + outbox.offset;
    if (!mate.memory->holds(at, pipe_nbytes_)) throw std::runtime_error("a pipe is in no arena");
    mate.from_it = Pipe(at, pipe_nbytes_);
    mate.its_outbox = &outbox;
  }
}

void PeerMessages::make_pipe(Mate& mate) {
  if (mate.memory == nullptr) {
    mate.to_it = mate.from_it = Pipe(own_pipe_->memory, pipe_nbytes_);
    mate.to_it.clear();
    mate.its_outbox = mate.outbox = &own_pipe_->outbox;
    return;
  }
  BoardHead& head = memory_->head();
  const std::uint32_t n = head.n_outboxes.load();
  if (n == kOutboxes) throw std::runtime_error("this rank sends to more than 2048 others");
  Outbox& outbox = head.outboxes[n];
  outbox.receiver = mate.rank;
  outbox.is_given_up.store(0);
  outbox.offset = memory_->allocator().take(pipe_nbytes_);
  mate.to_it = Pipe(memory_->arena() + outbox.offset, pipe_nbytes_);
  mate.to_it.clear();
  mate.outbox = &outbox;
  head.n_outboxes.store(n + 1);
}

// --- from this rank ---

// False: there is no room.
bool PeerMessages::put(Mate& mate, const Envelope& to, std::int64_t tag, const std::byte* data,
                       std::uint64_t serial) {
  const bool is_whole = to.nbytes <= most_whole(mate);
  Head head{};
  head.kind = is_whole ? Head::Kind::whole : Head::Kind::offer;
  head.n_sent = static_cast<std::uint32_t>(to.outline.size());
  head.serial = serial;
  head.mailbox = {to.group, tag};
  head.nbytes = to.nbytes;
  if (!is_whole) {
    head.is_in_arena = mate.wire == nullptr && memory_ != nullptr && memory_->holds(data, to.nbytes);
    head.place = head.is_in_arena ? static_cast<std::uint64_t>(data - memory_->arena())
                                  : reinterpret_cast<std::uintptr_t>(data);
  }
  const Chunk chunks[] = {{&head, sizeof head},
                          {to.outline.data(), to.outline.size()},
                          {data, is_whole ? to.nbytes : 0}};
  return put_chunks(mate, chunks, 3);
}

bool PeerMessages::put_chunks(Mate& mate, const Chunk* chunks, std::size_t n) {
  if (mate.wire != nullptr) return use_wire(mate, [&] { return mate.wire->put(chunks, n); });
  if (!mate.to_it.put(chunks, n)) return false;
  (mate.memory == nullptr ? own_bell_ : mate.memory->bell()).ring();
  return true;
}

// Says something about a message of that rank; `ends` is over once that is in the pipe.
void PeerMessages::tell(Mate& mate, Head head, const Refusal* refusal, PeerMessage* ends) {
  if (mate.outbox == nullptr && mate.wire == nullptr) make_pipe(mate);
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
  if (refusal != nullptr) bytes += refusal->sent + refusal->wanted;
  mate.unsent.push_back({nullptr, std::move(bytes), ends});
  if (ends != nullptr) ends->waits_for_room_ = true;
  flush(mate);
}

bool PeerMessages::flush(Mate& mate) {
  bool has_moved = false;
  while (!mate.unsent.empty()) {
    const Mate::Unsent& next = mate.unsent.front();
    PeerMessage* const send = next.send;
    const Chunk chunk{next.bytes.data(), next.bytes.size()};
    const bool has_room = send != nullptr ? put(mate, *send->envelope_, send->tag_, send->from_, send->serial_)
                                          : put_chunks(mate, &chunk, 1);
    if (!has_room) break;
    PeerMessage* const ends = next.ends;
    mate.unsent.pop_front();
    has_moved = true;
    if (ends != nullptr) finish(*ends);
    if (send == nullptr) continue;
    send->waits_for_room_ = false;
    if (send->envelope_->nbytes <= most_whole(mate))
      finish(*send);
    else
      mate.offered[send->serial_] = send;
  }
  return has_moved;
}

bool PeerMessages::stream(Mate& mate) {
  bool has_moved = false;
  while (!mate.streaming.empty() && mate.unsent.empty()) {
    PeerMessage& send = *mate.streaming.front();
    const std::size_t n = std::min(pipe_nbytes_ / 4, send.envelope_->nbytes - send.n_moved_);
    Head head{};
    head.kind = Head::Kind::piece;
    head.serial = send.serial_;
    head.nbytes = n;
    head.place = send.n_moved_;
    const Chunk chunks[] = {{&head, sizeof head}, {send.from_ + send.n_moved_, n}};
    if (!put_chunks(mate, chunks, 2)) break;
    send.n_moved_ += n;
    has_moved = true;
    if (send.n_moved_ < send.envelope_->nbytes) continue;
    mate.streaming.pop_front();
    mate.offered.erase(send.serial_);
    finish(send);
  }
  return has_moved;
}

// --- to this rank ---

void PeerMessages::take(Mate& mate, const std::byte* data, std::size_t nbytes) {
  Head head;
  if (nbytes < sizeof head) throw std::runtime_error("a message in a pipe is cut off");
  std::memcpy(&head, data, sizeof head);
  const std::size_t n_outlines = std::size_t{head.n_sent} + head.n_wanted;
  const std::size_t n_data =
      head.kind == Head::Kind::whole || head.kind == Head::Kind::piece ? head.nbytes : 0;
  if (nbytes != sizeof head + n_outlines + n_data)
    throw std::runtime_error("a message in a pipe has another length than it says");
  const auto* const text = reinterpret_cast<const char*>(data + sizeof head);
  const std::byte* const body = data + sizeof head + n_outlines;
  switch (head.kind) {
    case Head::Kind::whole:
    case Head::Kind::offer:
      if (PeerMessage* const receive = receive_for(mate, head.mailbox))
        deliver(mate, *receive, head, {text, head.n_sent}, body);
      else
        arrived_[head.mailbox].push_back({&mate, head, std::string(text, head.n_sent),
                                          std::string(reinterpret_cast<const char*>(body), n_data)});
      return;
    case Head::Kind::piece:
      take_piece(mate, head, body);
      return;
    case Head::Kind::refused:
      hear_refusal(mate, head, text);
      return;
    case Head::Kind::given_up:
      hear_of_end(mate, head.serial);
      return;
    case Head::Kind::taken:
    case Head::Kind::wanted:
      break;
  }
  const auto at = mate.offered.find(head.serial);
  if (at == mate.offered.end()) {  // it was given up
    if (mate.wire != nullptr && head.kind == Head::Kind::wanted) say_it_is_given_up(mate, head.serial);
    return;
  }
  PeerMessage& send = *at->second;
  if (head.kind == Head::Kind::wanted && mate.wire != nullptr) {
    mate.offered.erase(at);
    begin_data(mate, send);
    return;
  }
  if (head.kind == Head::Kind::wanted) {
    send.n_moved_ = head.place;
    send.waits_for_room_ = true;
    mate.streaming.push_back(&send);
    return;
  }
  mate.offered.erase(at);
  finish(send);
}

void PeerMessages::hear_of_end(Mate& mate, std::uint64_t serial) {
  const auto at = std::find_if(mate.moving.begin(), mate.moving.end(), [&](const PeerMessage* each) {
    return each->from_ == nullptr && each->serial_ == serial;
  });
  if (at == mate.moving.end()) return;
  PeerMessage& receive = **at;
  forget(receive);
  finish(receive, "rank " + std::to_string(mate.rank) + " has given this message up");
}

void PeerMessages::say_it_is_given_up(Mate& mate, std::uint64_t serial) {
  Head head{};
  head.kind = Head::Kind::given_up;
  head.serial = serial;
  tell(mate, head, nullptr, nullptr);
}

void PeerMessages::hear_refusal(Mate& mate, const Head& head, const char* outlines) {
  Refusal refusal{rank_, mate.rank, head.mailbox.tag, std::string(outlines, head.n_sent),
                  std::string(outlines + head.n_sent, head.n_wanted), true};
  const auto at = mate.offered.find(head.serial);
  if (at == mate.offered.end()) {
    mate.refusals.push_back(std::move(refusal));
    return;
  }
  PeerMessage& send = *at->second;
  refusal.is_of_earlier = false;
  send.refusal_ = std::move(refusal);
  mate.offered.erase(at);
  finish(send);
}

// The oldest receive for a message of that rank; it waits for no other any more.
PeerMessage* PeerMessages::receive_for(const Mate& mate, const Mailbox& mailbox) {
  const auto at = receives_.find(mailbox);
  if (at == receives_.end()) return nullptr;
  std::list<PeerMessage*>& waiting = at->second;
  const auto first = std::find_if(waiting.begin(), waiting.end(), [&](const PeerMessage* each) {
    return each->envelope_->rank == mate.rank || each->envelope_->rank == kAnyRank;
  });
  if (first == waiting.end()) return nullptr;
  PeerMessage* const found = *first;
  waiting.erase(first);
  if (waiting.empty()) receives_.erase(at);
  return found;
}

void PeerMessages::deliver(Mate& mate, PeerMessage& receive, const Head& head, std::string_view outline,
                       const std::byte* data) {
  receive.source_ = mate.rank;
  receive.serial_ = head.serial;
  if (receive.envelope_->rank == kAnyRank) {
    --n_from_any_;
    ++mate.n_open;
  }
  if (outline != receive.envelope_->outline || head.nbytes != receive.envelope_->nbytes) {
    receive.refusal_ = Refusal{mate.rank, rank_, head.mailbox.tag, std::string(outline),
                               receive.envelope_->outline, false};
    Head answer{};
    answer.kind = Head::Kind::refused;
    answer.n_sent = head.n_sent;
    answer.n_wanted = static_cast<std::uint32_t>(receive.envelope_->outline.size());
    answer.serial = head.serial;
    answer.mailbox = head.mailbox;
    tell(mate, answer, &*receive.refusal_, &receive);
    return;
  }
  if (head.kind == Head::Kind::whole) {
    if (head.nbytes != 0) std::memcpy(receive.to_, data, head.nbytes);
    finish(receive);
    return;
  }
  if (mate.wire != nullptr) {
    begin_data(mate, receive);
    Head answer{};
    answer.kind = Head::Kind::wanted;
    answer.serial = head.serial;
    tell(mate, answer, nullptr, nullptr);
    return;
  }
  receive.place_ = head.place;
  receive.is_in_arena_ = head.is_in_arena != 0;
  if (receive.is_in_arena_ && !mate.memory->holds(mate.memory->arena() + head.place, head.nbytes))
    throw std::runtime_error("a message is said to be where its sender has no memory");
  mate.copying.push_back(&receive);
}

// The wire moves the data of a long message, whose other side does the same. Its tag is that of no other
// message between the two ranks, so that one that is given up does no harm to the next.
void PeerMessages::begin_data(Mate& mate, PeerMessage& message) {
  mate.moving.push_back(&message);
  use_wire(mate, [&] {
    const int tag = others_.first_tag + static_cast<int>(message.serial_ % others_.n_tags) * others_.tag_stride;
    const std::size_t nbytes = message.envelope_->nbytes;
    message.data_ = message.from_ == nullptr ? others_.wire->receive(message.to_, nbytes, mate.wire_rank, tag)
                                             : others_.wire->send(message.from_, nbytes, mate.wire_rank, tag);
    message.data_->start();
    return true;
  });
}

bool PeerMessages::move_data(Mate& mate) {
  bool has_moved = false;
  for (std::size_t i = mate.moving.size(); i-- > 0;) {
    PeerMessage& message = *mate.moving[i];
    if (!use_wire(mate, [&] { return message.data_->test(); })) continue;
    mate.moving.erase(mate.moving.begin() + static_cast<std::ptrdiff_t>(i));
    message.data_ = nullptr;
    finish(message);
    has_moved = true;
  }
  return has_moved;
}

void PeerMessages::stop_data(PeerMessage& message) {
  if (message.data_ == nullptr) return;
  message.data_->cancel();
  bury(std::move(message.data_));
}

bool PeerMessages::copy_piece(Mate& mate, PeerMessage& receive) {
  const std::size_t n = std::min(kPieceRead, receive.envelope_->nbytes - receive.n_moved_);
  std::byte* const to = receive.to_ + receive.n_moved_;
  const std::uint64_t place = receive.place_ + receive.n_moved_;
  if (receive.is_in_arena_) {
    std::memcpy(to, mate.memory->arena() + place, n);
  } else if (mate.rank != rank_ && (!reads_memory_ || mate.memory->pid() == 0)) {
    ask_for_pieces(mate, receive);
    return true;
  } else if (mate.rank == rank_ || mate.memory->is_of_this_process()) {
    std::memcpy(to, reinterpret_cast<const std::byte*>(place), n);
  } else {
    const std::ptrdiff_t got = read_private(mate.memory->pid(), place, to, n);
    if (got == -ESRCH) return false;  // it has died, which others notice
    if (got == -EFAULT) {
      const std::string fault = "the sender's array is not in its memory any more";
      forget(receive);
      finish(receive, fault);
      return true;
    }
    if (got <= 0) {  // a sandbox may refuse it in its own way
      reading_error_ = got < 0 ? static_cast<int>(-got) : EIO;
      reads_memory_ = false;
      ask_for_pieces(mate, receive);
      return true;
    }
    receive.n_moved_ += static_cast<std::size_t>(got) - n;
  }
  receive.n_moved_ += n;
  if (receive.n_moved_ < receive.envelope_->nbytes) return true;
  if (mate.its_outbox->is_given_up.load() != 0) return false;  // these may be other data
  remove(mate.copying, &receive);
  Head head{};
  head.kind = Head::Kind::taken;
  head.serial = receive.serial_;
  tell(mate, head, nullptr, &receive);
  return true;
}

void PeerMessages::ask_for_pieces(Mate& mate, PeerMessage& receive) {
  remove(mate.copying, &receive);
  mate.incoming[receive.serial_] = &receive;
  Head head{};
  head.kind = Head::Kind::wanted;
  head.serial = receive.serial_;
  head.place = receive.n_moved_;
  tell(mate, head, nullptr, nullptr);
}

void PeerMessages::take_piece(Mate& mate, const Head& head, const std::byte* data) {
  const auto at = mate.incoming.find(head.serial);
  if (at == mate.incoming.end()) return;  // it was given up
  PeerMessage& receive = *at->second;
  if (head.place != receive.n_moved_ || head.nbytes > receive.envelope_->nbytes - receive.n_moved_)
    throw std::runtime_error("a piece of a message does not follow the one before");
  std::memcpy(receive.to_ + receive.n_moved_, data, head.nbytes);
  receive.n_moved_ += head.nbytes;
  if (receive.n_moved_ < receive.envelope_->nbytes) return;
  mate.incoming.erase(at);
  finish(receive);
}

// --- ends ---

// It is in no list any more, but for that of its receives without a message.
void PeerMessages::finish(PeerMessage& message, std::string fault) {
  close(message);
  has_ended_ = true;
  message.end(std::move(fault));
}

void PeerMessages::close(PeerMessage& message) {
  if (!std::exchange(message.is_open_, false)) return;
  const std::uint32_t rank = message.source_ != kAnyRank ? message.source_ : message.envelope_->rank;
  rank == kAnyRank ? --n_from_any_ : --mate_of(rank).n_open;
}

// Takes a message that is not over out of all lists.
void PeerMessages::forget(PeerMessage& message) {
  close(message);
  if (const auto at = receives_.find({message.envelope_->group, message.tag_}); at != receives_.end()) {
    at->second.remove(&message);
    if (at->second.empty()) receives_.erase(at);
  }
  const std::uint32_t rank = message.source_ != kAnyRank ? message.source_ : message.envelope_->rank;
  if (rank == kAnyRank) return;
  Mate& mate = mate_of(rank);
  for (auto each = mate.unsent.begin(); each != mate.unsent.end();) {
    if (each->ends == &message) each->ends = nullptr;
    each = each->send == &message ? mate.unsent.erase(each) : std::next(each);
  }
  remove(mate.copying, &message);
  remove(mate.streaming, &message);
  remove(mate.moving, &message);
  stop_data(message);
  if (message.from_ == nullptr) {
    mate.incoming.erase(message.serial_);
  } else if (mate.offered.erase(message.serial_) != 0) {
    if (mate.wire != nullptr) {
      say_it_is_given_up(mate, message.serial_);
    } else {
      mate.outbox->is_given_up.store(1);
      (mate.memory == nullptr ? own_bell_ : mate.memory->bell()).ring();
    }
  }
}

// Its data may be others by now.
void PeerMessages::fail_receives_from(Mate& mate) {
  std::vector<PeerMessage*> failed = mate.copying;
  for (const auto& [serial, receive] : mate.incoming) failed.push_back(receive);
  for (PeerMessage* const receive : failed) {
    forget(*receive);
    finish(*receive, "rank " + std::to_string(mate.rank) + " has given this message up");
  }
}

}  // namespace ringcomm
