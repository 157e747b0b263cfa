#include "postbox.hpp"

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

PostBox::PostBox(std::uint32_t rank, std::shared_ptr<NodeMemory> memory, std::vector<Mate> mates,
                 bool goes_on_alone, int looks, Patience patience, std::size_t inline_max,
                 std::size_t meta_max)
    : rank_(rank),
      memory_(std::move(memory)),
      goes_on_alone_(goes_on_alone),
      looks_(looks),
      patience_(patience),
      inline_max_(inline_max),
      meta_max_(meta_max) {
  for (Mate& mate : mates) {
    lines_.push_back(std::make_unique<Line>());
    lines_.back()->mate = std::move(mate);
    by_rank_[lines_.back()->mate.rank] = lines_.back().get();
  }
}

PostBox::Line* PostBox::line_of(std::uint32_t rank) const {
  const auto at = by_rank_.find(rank);
  return at == by_rank_.end() ? nullptr : at->second;
}

bool PostBox::reaches(std::uint32_t rank) const { return line_of(rank) != nullptr; }

void PostBox::send(std::uint32_t rank, const void* frame, std::size_t nbytes) {
  Line* const line = line_of(rank);
  if (line == nullptr) throw std::invalid_argument("that rank is not on this node");
  if (nbytes > line->mate.to_it.longest()) throw std::length_error("a frame is too long for a pipe");
  const Chunk chunk{frame, nbytes};
  if (!put(*line, &chunk, 1)) memory_->bell().ring();  // who drives is to try again
}

bool PostBox::ask(std::uint32_t rank, FrameHeader header, Chunk meta, Chunk body) {
  static constexpr std::byte kGap[8]{};
  Line* const line = line_of(rank);
  if (line == nullptr || meta.nbytes > meta_max_) return false;
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
  if (!put(*line, chunks, 5)) memory_->bell().ring();  // who drives is to try again
  return true;
}

// False if it waits for room.
bool PostBox::put(Line& line, const Chunk* chunks, std::size_t n) {
  const std::lock_guard lock(line.mutex);
  if (line.unsent.empty() && line.mate.to_it.put(chunks, n)) {
    line.mate.memory->bell().ring();
    return true;
  }
  std::string& kept = line.unsent.emplace_back();
  for (std::size_t i = 0; i < n; ++i)
    kept.append(static_cast<const char*>(chunks[i].data), chunks[i].nbytes);
  ++n_unsent_;
  return false;
}

bool PostBox::flush(Line& line) {
  const std::lock_guard lock(line.mutex);
  bool has_moved = false;
  while (!line.unsent.empty()) {
    const Chunk chunk{line.unsent.front().data(), line.unsent.front().size()};
    if (!line.mate.to_it.put(&chunk, 1)) break;
    line.unsent.pop_front();
    --n_unsent_;
    has_moved = true;
  }
  if (has_moved) line.mate.memory->bell().ring();
  return has_moved;
}

void PostBox::leave() {
  desk_.unlock();
  if (was_missed_.exchange(false)) memory_->bell().ring();
}

std::vector<std::pair<std::uint32_t, std::string>> PostBox::collect() {
  if (!fault_text_.empty()) throw std::runtime_error(fault_text_);
  if (!is_abandoned_) pass();
  n_inbox_ = n_acks_ = 0;
  for (const auto& line : lines_) line->is_held = false;
  return std::exchange(inbox_, {});
}

std::vector<PostBox::Ack> PostBox::take_acks() {
  if (reported_) acks_.insert(acks_.begin(), *std::exchange(reported_, std::nullopt));
  return std::exchange(acks_, {});
}

void PostBox::hold(std::uint32_t rank) {
  if (Line* const line = line_of(rank)) line->is_held = true;
}

void PostBox::open(std::uint32_t table, std::uint32_t partition, std::uint32_t epoch,
                   std::shared_ptr<Counter> counter) {
  open_[key_of(table, partition)] = {epoch, std::move(counter)};
}

void PostBox::close(std::uint32_t table, std::uint32_t partition) {
  open_.erase(key_of(table, partition));
}

std::int64_t PostBox::await_ack(std::uint64_t sequence, std::int64_t limit_ns,
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

PostBox::Look PostBox::look_for(std::uint64_t sequence, std::uint64_t taken, std::int64_t& clock) {
  const std::unique_lock lock(desk_, std::try_to_lock);
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

Program::Step PostBox::advance() {
  std::unique_lock lock(desk_, std::try_to_lock);
  if (!lock.owns_lock()) {
    was_missed_ = true;
    return Step::waiting;
  }
  return is_abandoned_ ? Step::waiting : pass_or_fault();
}

Program::Step PostBox::pass_or_fault() {
  try {
    return pass();
  } catch (const std::exception& error) {  // collect() tells it
    is_abandoned_ = true;
    fault_text_ = error.what();
    n_inbox_ = 1;
    return Step::news;
  }
}

void PostBox::abandon() {
  const std::lock_guard lock(desk_);
  is_abandoned_ = true;
}

Program::Step PostBox::pass() {
  bool has_moved = false, has_news = false;
  for (const auto& each : lines_) {
    Line& line = *each;
    if (n_unsent_ != 0) has_moved |= flush(line);
    while (inbox_.size() < kInboxMax) {
      const Pipe::Message message = line.mate.from_it.peek();
      if (message.data == nullptr) break;
      if (!line.is_held && note_ack(message.data, message.nbytes)) {
        has_news = true;
      } else if (line.is_held || !carry_out(line, message.data, message.nbytes)) {
        inbox_.emplace_back(line.mate.rank,
                            std::string(reinterpret_cast<const char*>(message.data), message.nbytes));
        line.is_held = has_news = true;
      }
      line.mate.from_it.pop();
      has_moved = true;
    }
  }
  n_inbox_ = inbox_.size();
  n_acks_ = acks_.size();
  return has_news ? Step::news : has_moved ? Step::moved : Step::waiting;
}

const std::byte* PostBox::body_of(const Line& line, const Frame& frame) const {
  if (frame.header.where == Where::inline_) return frame.body;
  if (frame.header.where != Where::shared) return nullptr;
  const NodeMemory& memory = *line.mate.memory;
  const std::byte* const at = memory.arena() + frame.header.place;
  return memory.holds(at, frame.header.n_body) ? at : nullptr;
}

// False if it says more.
bool PostBox::note_ack(const std::byte* data, std::size_t nbytes) {
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
bool PostBox::carry_out(Line& line, const std::byte* data, std::size_t nbytes) {
  if (open_.empty()) return false;
  const auto frame = read_frame(data, nbytes);
  if (!frame || frame->header.kind != Kind::push) return false;
  const FrameHeader& header = frame->header;
  const auto at = open_.find(key_of(header.table, header.partition));
  if (at == open_.end() || at->second.epoch != header.view) return false;
  Counter& counter = *at->second.counter;
  const auto meta = read_push_meta(frame->meta, header.n_meta);
  const std::byte* const body = body_of(line, *frame);
  if (!meta || body == nullptr || !counter.push(header, *meta, body)) return false;
  ++n_requests;
  n_body += header.n_body;
  FrameHeader reply{};
  reply.kind = Kind::reply;
  reply.view = header.view;
  reply.origin = rank_;
  reply.sequence = header.sequence;
  reply.table = header.table;
  reply.partition = header.partition;
  reply.clock = counter.block().clock();
  const Chunk chunk{&reply, sizeof reply};
  put(line, &chunk, 1);
  return true;
}

}  // namespace ringcomm::ps
