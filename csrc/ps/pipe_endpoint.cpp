#include "pipe_endpoint.hpp"

#include <cstring>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace ringcomm::ps {
namespace {

constexpr std::size_t kInboxMax = 256;  // frames; the rest stays in the pipes, so senders slow down
constexpr std::size_t kReported = 8;   // frames, after which a follower reports what it has done

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
                        std::shared_ptr<BlockUpdater> updater, std::shared_ptr<HomePushes> home) {
  open_[key_of(table, partition)] = {epoch, std::move(updater), std::move(home)};
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
    std::size_t n_unreported = 0;
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
      if (!homes_.empty() && ++n_unreported == kReported) {
        report(connection);
        n_unreported = 0;
      }
    }
    if (n_unreported != 0) report(connection);
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
      header.home != 0 || header.option != 0)
    return false;
  acks_.push_back({header.sequence, header.clock});
  return true;
}

const PipeEndpoint::Open* PipeEndpoint::open_for(const FrameHeader& header) const {
  const auto at = open_.find(key_of(header.table, header.partition));
  return at == open_.end() || at->second.epoch != header.view ? nullptr : &at->second;
}

// False if Python must do it, and nothing was done.
bool PipeEndpoint::carry_out(Connection& connection, const std::byte* data, std::size_t nbytes) {
  if (open_.empty()) return false;
  const auto frame = read_frame(data, nbytes);
  if (!frame) return false;
  const FrameHeader& header = frame->header;
  if (header.kind == Kind::record) return carry_out_record(connection, *frame);
  if (header.kind != Kind::push) return false;
  const Open* const open = open_for(header);
  if (open == nullptr) return false;
  BlockUpdater& updater = *open->updater;
  const auto meta = read_push_meta(frame->meta, header.n_meta);
  const std::byte* const body = body_of(connection, *frame);
  if (!meta || body == nullptr) return false;
  if (HomePushes* const home = open->home.get()) {
    if (!home->is_primary() || home->is_kept) return false;
    if (home->follower())
      return updater.rule_for(header, *meta, body) &&
             forward(*home, connection.mate.rank, *frame, data, nbytes);
  }
  if (!updater.push(header, *meta, body)) return false;
  if (open->home) {
    open->home->count(header.n_body);
  } else {
    ++n_requests;
    n_body += header.n_body;
  }
  reply(connection, header, updater);
  return true;
}

void PipeEndpoint::reply(Connection& connection, const FrameHeader& request, BlockUpdater& updater) {
  FrameHeader reply{};
  reply.kind = Kind::reply;
  reply.view = request.view;
  reply.origin = rank_;
  reply.sequence = request.sequence;
  reply.table = request.table;
  reply.partition = request.partition;
  reply.clock = updater.block().clock();
  const Chunk chunk{&reply, sizeof reply};
  put(connection, &chunk, 1);
}

// --- pushes of which there are two copies ---

std::shared_ptr<HomePushes> PipeEndpoint::begin_home(std::uint32_t number) {
  drop_home(number);
  return homes_[number] = std::make_shared<HomePushes>(number);
}

void PipeEndpoint::drop_home(std::uint32_t number) {
  homes_.erase(number);
  for (auto at = open_.begin(); at != open_.end();) {
    const bool is_its = at->second.home && at->second.home->number() == number;
    at = is_its ? open_.erase(at) : std::next(at);
  }
}

// Sends a push to the follower. False if it has no pipe to there.
bool PipeEndpoint::forward(HomePushes& home, std::uint32_t source, const Frame& push,
                           const std::byte* data, std::size_t nbytes) {
  static constexpr std::byte kGap[8]{};
  Connection* const follower = connection_to(*home.follower());
  if (follower == nullptr) return false;
  const bool is_inline = push.header.where == Where::inline_;
  CopiedPushHead head{source, {}, push.header};
  if (is_inline) head.header.where = Where::none;
  FrameHeader record{};
  record.kind = Kind::record;
  record.home = home.number() + 1;
  record.option = static_cast<std::uint32_t>(Copy::push);
  record.sequence = home.next();
  record.n_meta = static_cast<std::uint32_t>(sizeof head) + push.header.n_meta;
  record.where = is_inline ? Where::inline_ : Where::none;
  record.n_body = is_inline ? push.header.n_body : 0;
  const auto gap = [](std::size_t n) { return Chunk{kGap, (8 - n % 8) % 8}; };
  const Chunk chunks[] = {{&record, sizeof record},        {&head, sizeof head},
                          {push.meta, push.header.n_meta}, gap(record.n_meta),
                          {push.body, record.n_body},      gap(record.n_body)};
  home.keep(record.sequence, source, std::string(reinterpret_cast<const char*>(data), nbytes));
  put(*follower, chunks, 6);
  return true;
}

void PipeEndpoint::complete(HomePushes& home, std::uint64_t number) {
  while (const auto push = home.take(number)) {
    const auto frame = read_frame(reinterpret_cast<const std::byte*>(push->frame.data()),
                                  push->frame.size());
    const Open* const open = open_for(frame->header);
    Connection& client = *connection_to(push->source);
    const auto meta = read_push_meta(frame->meta, frame->header.n_meta);
    if (open == nullptr || !open->updater->push(frame->header, *meta, body_of(client, *frame)))
      throw std::runtime_error("ps: a block was closed while a push for it was under way");
    home.count(frame->header.n_body);
    reply(client, frame->header, *open->updater);
  }
}

void PipeEndpoint::follow(HomePushes& home, Chunk meta, Chunk body) {
  const auto push = read_copied_push(static_cast<const std::byte*>(meta.data), meta.nbytes);
  if (!push) throw std::runtime_error("ps: a record of a push is cut off");
  const FrameHeader& header = push->header;
  const Open* const open = open_for(header);
  const Connection* const client = connection_to(push->source);
  const auto explained = read_push_meta(push->meta, header.n_meta);
  const auto* at = static_cast<const std::byte*>(body.data);
  if (header.where == Where::shared)
    at = client == nullptr ? nullptr : body_of(*client, {header, push->meta, nullptr});
  else if (header.n_body != body.nbytes)
    at = nullptr;
  if (open == nullptr || open->home.get() != &home || !explained || at == nullptr ||
      !open->updater->push(header, *explained, at))
    throw std::runtime_error("ps: a copy of server " + std::to_string(home.number()) +
                             " cannot carry out a push that the other one can. This is a defect");
  home.count(header.n_body);
}

// False if Python must take it.
bool PipeEndpoint::carry_out_record(Connection& connection, const Frame& record) {
  const FrameHeader& header = record.header;
  const auto at = homes_.find(header.home - 1);
  if (at == homes_.end()) return false;
  HomePushes& home = *at->second;
  if (header.option == static_cast<std::uint32_t>(Copy::done)) {
    if (home.follower() != connection.mate.rank) return false;
    complete(home, header.sequence);
    return !home.is_kept || home.n_under_way() != 0;  // what Python keeps is behind all of them
  }
  if (header.option != static_cast<std::uint32_t>(Copy::push) || !home.follows(connection.mate.rank))
    return false;
  follow(home, {record.meta, header.n_meta}, {record.body, header.n_body});
  home.unreported = header.sequence;
  return true;
}

// Tells the primary what was carried out.
void PipeEndpoint::report(Connection& primary) {
  for (const auto& [number, home] : homes_) {
    if (home->unreported == 0 || !home->follows(primary.mate.rank)) continue;
    FrameHeader record{};
    record.kind = Kind::record;
    record.home = number + 1;
    record.option = static_cast<std::uint32_t>(Copy::done);
    record.sequence = std::exchange(home->unreported, 0);
    const Chunk chunk{&record, sizeof record};
    put(primary, &chunk, 1);
  }
}


}  // namespace ringcomm::ps
