#include "pipe_endpoint.hpp"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace ringcomm::ps {
namespace {

constexpr std::size_t kInboxMax = 256;  // frames; the rest stays in the pipes, so senders slow down

std::uint64_t key_of(std::uint32_t table, std::uint32_t partition) {
  return std::uint64_t{table} << 32 | partition;
}

}  // namespace

PipeEndpoint::PipeEndpoint(std::uint32_t rank, std::shared_ptr<NodeMemory> memory,
                           std::vector<Mate> mates, bool goes_on_alone, int looks,
                           Patience patience, std::size_t inline_max, std::size_t meta_max)
    : rank_(rank),
      memory_(std::move(memory)),
      goes_on_alone_(goes_on_alone),
      looks_(looks),
      patience_(patience),
      inline_max_(inline_max),
      meta_max_(meta_max) {
  for (Mate& mate : mates) {
    connections_.push_back(std::make_unique<Connection>());
    connections_.back()->mate = std::move(mate);
    by_rank_[connections_.back()->mate.rank] = connections_.back().get();
  }
}

PipeEndpoint::Connection* PipeEndpoint::connection_to(std::uint32_t rank) const {
  const auto at = by_rank_.find(rank);
  return at == by_rank_.end() ? nullptr : at->second;
}

bool PipeEndpoint::reaches(std::uint32_t rank) const { return connection_to(rank) != nullptr; }

void PipeEndpoint::send(std::uint32_t rank, const void* frame, std::size_t nbytes) {
  Connection* const connection = connection_to(rank);
  if (connection == nullptr) throw std::invalid_argument("that rank is not on this node");
  if (nbytes > connection->mate.to_it.longest())
    throw std::length_error("a frame is too long for a pipe");
  const Chunk chunk{frame, nbytes};
  if (!put(*connection, &chunk, 1)) memory_->bell().ring();  // who drives is to try again
}

bool PipeEndpoint::ask(std::uint32_t rank, FrameHeader header, Chunk meta, Chunk body) {
  static constexpr std::byte kGap[8]{};
  Connection* const connection = connection_to(rank);
  if (connection == nullptr || meta.nbytes > meta_max_) return false;
  header.n_meta = static_cast<std::uint32_t>(meta.nbytes);
  header.n_body = body.nbytes;
  header.where = body.nbytes == 0 ? Where::none : Where::inline_;
  const bool is_inline = body.nbytes <= inline_max_;
  if (!is_inline) {
    const auto* const at = static_cast<const std::byte*>(body.data);
    if (!memory_->holds(at, body.nbytes)) return false;
    header.where = Where::shared;
    header.place = static_cast<std::uint64_t>(at - memory_->arena());
    body.nbytes = 0;
  }
  const auto gap = [](std::size_t n) { return Chunk{kGap, (8 - n % 8) % 8}; };
  const Chunk chunks[] = {{&header, sizeof header}, meta, gap(meta.nbytes), body, gap(body.nbytes)};
  if (!put(*connection, chunks, 5)) memory_->bell().ring();  // who drives is to try again
  return true;
}

// False if it waits for room.
bool PipeEndpoint::put(Connection& connection, const Chunk* chunks, std::size_t n) {
  const std::lock_guard lock(connection.mutex);
  if (connection.is_forgotten) return true;
  if (connection.unsent.empty() && connection.mate.to_it.put(chunks, n)) {
    connection.mate.memory->bell().ring();
    return true;
  }
  std::string& kept = connection.unsent.emplace_back();
  for (std::size_t i = 0; i < n; ++i)
    kept.append(static_cast<const char*>(chunks[i].data), chunks[i].nbytes);
  ++n_unsent_;
  return false;
}

void PipeEndpoint::forget(std::uint32_t rank) {
  Connection* const connection = connection_to(rank);
  if (connection == nullptr) return;
  const std::lock_guard lock(connection->mutex);
  connection->is_forgotten = true;
  n_unsent_ -= connection->unsent.size();
  connection->unsent.clear();
}

bool PipeEndpoint::flush(Connection& connection) {
  const std::lock_guard lock(connection.mutex);
  bool has_moved = false;
  while (!connection.unsent.empty()) {
    const Chunk chunk{connection.unsent.front().data(), connection.unsent.front().size()};
    if (!connection.mate.to_it.put(&chunk, 1)) break;
    connection.unsent.pop_front();
    --n_unsent_;
    has_moved = true;
  }
  if (has_moved) connection.mate.memory->bell().ring();
  return has_moved;
}

void PipeEndpoint::leave() {
  mutex_.unlock();
  if (was_missed_.exchange(false)) memory_->bell().ring();
}

std::vector<std::pair<std::uint32_t, std::string>> PipeEndpoint::collect() {
  if (!fault_text_.empty()) throw std::runtime_error(fault_text_);
  if (!is_abandoned_) pass();
  n_inbox_ = n_acks_ = 0;
  for (const auto& connection : connections_) connection->is_held = false;
  return std::exchange(inbox_, {});
}

std::vector<PipeEndpoint::Ack> PipeEndpoint::take_acks() {
  if (reported_) acks_.insert(acks_.begin(), *std::exchange(reported_, std::nullopt));
  return std::exchange(acks_, {});
}

void PipeEndpoint::hold(std::uint32_t rank) {
  if (Connection* const connection = connection_to(rank)) connection->is_held = true;
}

void PipeEndpoint::open(std::uint32_t table, std::uint32_t partition, std::uint32_t epoch,
                        std::shared_ptr<BlockUpdater> updater) {
  open_[key_of(table, partition)] = {epoch, std::move(updater)};
}

void PipeEndpoint::close(std::uint32_t table, std::uint32_t partition) {
  open_.erase(key_of(table, partition));
}

std::int64_t PipeEndpoint::await_ack(std::uint64_t sequence, std::int64_t limit_ns,
                                     std::uint64_t taken) {
  Backoff backoff(patience_);
  const std::int64_t end = monotonic_ns() + limit_ns;
  std::int64_t clock = -1;
  while (true) {
    const Look look = look_for(sequence, taken, clock);
    if (was_missed_.exchange(false)) memory_->bell().ring();
    if (look == Look::found) return clock;
    if (look == Look::other || !backoff.linger() || monotonic_ns() > end) return -1;
  }
}

PipeEndpoint::Look PipeEndpoint::look_for(std::uint64_t sequence, std::uint64_t taken,
                                          std::int64_t& clock) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return Look::nothing;  // another thread looks
  if (is_abandoned_) return Look::other;
  if (reported_ && reported_->sequence == taken) reported_.reset();
  pass_or_fault();
  if (reported_) {
    acks_.insert(acks_.begin(), *std::exchange(reported_, std::nullopt));
    n_acks_ = acks_.size();
  }
  if (n_inbox_ != 0 || acks_.size() > 1) return Look::other;
  if (acks_.empty()) return Look::nothing;
  if (acks_[0].sequence != sequence) return Look::other;
  clock = acks_[0].clock;
  reported_ = acks_[0];
  acks_.clear();
  n_acks_ = 0;
  return Look::found;
}

Program::Step PipeEndpoint::advance() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    was_missed_ = true;
    return Step::waiting;
  }
  return is_abandoned_ ? Step::waiting : pass_or_fault();
}

Program::Step PipeEndpoint::pass_or_fault() {
  try {
    return pass();
  } catch (const std::exception& error) {  // collect() throws it
    is_abandoned_ = true;
    fault_text_ = error.what();
    n_inbox_ = 1;
    return Step::news;
  }
}

void PipeEndpoint::abandon() {
  const std::lock_guard lock(mutex_);
  is_abandoned_ = true;
}

Program::Step PipeEndpoint::pass() {
  bool has_moved = false, has_news = false;
  for (const auto& each : connections_) {
    Connection& connection = *each;
    if (n_unsent_ != 0) has_moved |= flush(connection);
    while (inbox_.size() < kInboxMax) {
      const Pipe::Message message = connection.mate.from_it.peek();
      if (message.data == nullptr) break;
      if (connection.is_forgotten) {
        connection.mate.from_it.pop();
        continue;
      }
      if (!connection.is_held && note_ack(message.data, message.nbytes)) {
        has_news = true;
      } else if (connection.is_held || !carry_out(connection, message.data, message.nbytes)) {
        inbox_.emplace_back(connection.mate.rank,
                            std::string(reinterpret_cast<const char*>(message.data), message.nbytes));
        connection.is_held = has_news = true;
      }
      connection.mate.from_it.pop();
      has_moved = true;
    }
  }
  n_inbox_ = inbox_.size();
  n_acks_ = acks_.size();
  return has_news ? Step::news : has_moved ? Step::moved : Step::waiting;
}

const std::byte* PipeEndpoint::body_of(const Connection& connection, const Frame& frame) const {
  if (frame.header.where == Where::inline_) return frame.body;
  if (frame.header.where != Where::shared) return nullptr;
  const NodeMemory& memory = *connection.mate.memory;
  const std::byte* const at = memory.arena() + frame.header.place;
  return memory.holds(at, frame.header.n_body) ? at : nullptr;
}

// False if it says more.
bool PipeEndpoint::note_ack(const std::byte* data, std::size_t nbytes) {
  if (nbytes != sizeof(FrameHeader)) return false;
  FrameHeader header;
  std::memcpy(&header, data, sizeof header);
  if (header.kind != Kind::reply || header.where != Where::none || header.status != 0 ||
      header.option != 0)
    return false;
  acks_.push_back({header.sequence, header.clock});
  return true;
}

// False if Python must do it, and nothing was done.
bool PipeEndpoint::carry_out(Connection& connection, const std::byte* data, std::size_t nbytes) {
  if (open_.empty()) return false;
  const auto frame = read_frame(data, nbytes);
  if (!frame || frame->header.kind != Kind::push) return false;
  const FrameHeader& header = frame->header;
  const auto at = open_.find(key_of(header.table, header.partition));
  if (at == open_.end() || at->second.epoch != header.view) return false;
  BlockUpdater& updater = *at->second.updater;
  const auto meta = read_push_meta(frame->meta, header.n_meta);
  const std::byte* const body = body_of(connection, *frame);
  if (!meta || body == nullptr || !updater.push(header, *meta, body)) return false;
  ++n_requests;
  n_body += header.n_body;
  FrameHeader reply{};
  reply.kind = Kind::reply;
  reply.view = header.view;
  reply.origin = rank_;
  reply.sequence = header.sequence;
  reply.table = header.table;
  reply.partition = header.partition;
  reply.clock = updater.block().clock();
  const Chunk chunk{&reply, sizeof reply};
  put(connection, &chunk, 1);
  return true;
}

}  // namespace ringcomm::ps
