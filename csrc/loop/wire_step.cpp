#include "wire_step.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "grave.hpp"
#include "loop.hpp"

namespace ringcomm {
namespace {

// Each rank sends what all others bring. Above this, an algorithm that sends less is faster. (64 KiB, and
// the header of one rank of two.)
constexpr std::size_t kMostSent = (std::size_t{64} << 10) + 64;
constexpr std::size_t kBlockAlignment = 64;

constexpr std::size_t padded(std::size_t nbytes) { return (nbytes + 15) / 16 * 16; }

}  // namespace

// Then come the header, and if is_whole the data, each padded.
struct WireStep::Head {
  std::uint64_t fingerprint;
  std::uint64_t nbytes;  // shown, also if they are not here
  std::uint32_t header_nbytes;
  std::uint32_t is_whole;
  std::uint64_t is_told;  // the header is here, if only an empty one
};

void WireStep::Free::operator()(std::byte* memory) const {
  ::operator delete[](memory, std::align_val_t{kBlockAlignment});
}

WireTeam::WireTeam(std::shared_ptr<Wire> wire, std::vector<int> ranks, std::size_t index, int first_tag,
                   int tag_stride, std::size_t n_slots)
    : wire_(std::move(wire)),
      ranks_(std::move(ranks)),
      index_(index),
      first_tag_(first_tag),
      tag_stride_(tag_stride),
      n_slots_(n_slots),
      most_brought_(most_brought(ranks_.size())) {
  if (index >= ranks_.size() || ranks_.size() < 2) throw std::invalid_argument("there are no others");
}

std::size_t WireTeam::most_brought(std::size_t n) { return n < 2 ? 0 : kMostSent / (n - 1) / 16 * 16; }

int WireTeam::tag_of(std::size_t slot) const {
  if (slot >= n_slots_) throw std::invalid_argument("no slot " + std::to_string(slot));
  return first_tag_ + static_cast<int>(slot) * tag_stride_;
}

std::shared_ptr<CollectiveStep> WireTeam::begin(std::size_t slot, std::uint64_t fingerprint,
                                                NodeReduction what) {
  return std::make_shared<WireStep>(shared_from_this(), tag_of(slot), fingerprint, std::move(what));
}

std::shared_ptr<CollectiveStep> WireTeam::begin(std::size_t slot, std::uint64_t fingerprint,
                                                NodeCopy what) {
  if (what.places) throw std::invalid_argument("between hosts, a step gets no place");
  return std::make_shared<WireStep>(shared_from_this(), tag_of(slot), fingerprint, std::move(what));
}

WireStep::WireStep(std::shared_ptr<const WireTeam> team, int tag, std::uint64_t fingerprint, What what)
    : team_(std::move(team)), tag_(tag), what_(std::move(what)) {
  const std::size_t most = size() * (sizeof(Head) + team_->most_brought_);
  auto* const memory = static_cast<std::byte*>(::operator new[](most, std::align_val_t{kBlockAlignment}));
  traffic_->blocks.reset(memory);
  ends_.reserve(size());
  if (const auto* reduction = std::get_if<NodeReduction>(&what_))
    bring(fingerprint, reduction->source, reduction->bounds.back(), {}, true, false);
  else if (const auto* copy = std::get_if<NodeCopy>(&what_))
    bring(fingerprint, copy->shown, copy->nbytes, copy->header, copy->is_whole, copy->stays_here);
}

WireStep::~WireStep() {
  if (!is_over()) abandon();
}

void WireStep::bring(std::uint64_t fingerprint, const std::byte* data, std::size_t nbytes,
                     const std::string& header, bool is_whole, bool stays_here) {
  const std::size_t most = team_->most_brought_;
  const bool is_told = is_whole && padded(header.size()) <= most;
  const bool fits = is_told && !stays_here && padded(header.size()) + padded(nbytes) <= most;
  const auto header_nbytes = static_cast<std::uint32_t>(is_told ? header.size() : 0);
  const Head head{fingerprint, nbytes, header_nbytes, fits ? 1u : 0u, is_told ? 1u : 0u};
  std::byte* at = traffic_->blocks.get();
  std::memcpy(at, &head, sizeof head);
  at += sizeof head;
  if (is_told) {
    if (!header.empty()) std::memcpy(at, header.data(), header.size());
    at += padded(header.size());
  }
  if (fits) {
    if (nbytes != 0) std::memcpy(at, data, nbytes);
    at += padded(nbytes);
  }
  ends_.push_back(static_cast<std::size_t>(at - traffic_->blocks.get()));
}

const WireStep::Head& WireStep::head_of(std::size_t member) const {
  const std::size_t place = (team_->index_ + size() - member) % size();
  return *reinterpret_cast<const Head*>(traffic_->blocks.get() + (place == 0 ? 0 : ends_[place - 1]));
}

const char* WireStep::header_of(std::size_t member) const {
  return reinterpret_cast<const char*>(&head_of(member) + 1);
}

const std::byte* WireStep::data_of(std::size_t member) const {
  return reinterpret_cast<const std::byte*>(header_of(member)) + padded(head_of(member).header_nbytes);
}

void WireStep::begin_round() {
  Wire& wire = *team_->wire_;
  const std::size_t n = size(), many = n_of_round();
  const int source = team_->ranks_[(team_->index_ + n - distance_) % n];
  const int dest = team_->ranks_[(team_->index_ + distance_) % n];
  std::byte* const blocks = traffic_->blocks.get();
  const std::size_t room = many * (sizeof(Head) + team_->most_brought_);
  traffic_->receive = wire.receive_at_most(blocks + ends_.back(), room, source, tag_);
  traffic_->receive->start();
  traffic_->sends.push_back(wire.send(blocks, ends_[many - 1], dest, tag_));
  traffic_->sends.back()->start();
}

// Appends the blocks of a round. Their sizes come from another rank: none may reach beyond what came.
void WireStep::take_in(std::size_t nbytes) {
  std::size_t at = ends_.back();
  const std::size_t end = at + nbytes;
  for (std::size_t i = 0; i < n_of_round(); ++i) {
    if (end - at < sizeof(Head)) throw std::runtime_error("a message of another kind came");
    const Head& head = *reinterpret_cast<const Head*>(traffic_->blocks.get() + at);
    const std::size_t most = team_->most_brought_;
    if (head.header_nbytes > most || (head.is_whole != 0 && head.nbytes > most))
      throw std::runtime_error("a message of another kind came");
    const std::size_t data = padded(head.header_nbytes) + (head.is_whole != 0 ? padded(head.nbytes) : 0);
    if (end - at - sizeof(Head) < data) throw std::runtime_error("a message of another kind came");
    at += sizeof(Head) + data;
    ends_.push_back(at);
  }
}

bool WireStep::is_as_expected() const {
  const auto* copy = std::get_if<NodeCopy>(&what_);
  if (copy == nullptr || !copy->expected) return true;
  for (std::size_t member = 0; member < size(); ++member) {
    const Shown& due = (*copy->expected)[member];
    const Head& head = head_of(member);
    if (head.nbytes != due.nbytes || head.header_nbytes != due.header.size() ||
        std::memcmp(header_of(member), due.header.data(), due.header.size()) != 0)
      return false;
  }
  return true;
}

bool WireStep::are_all_told() const {
  for (std::size_t member = 0; member < size(); ++member)
    if (head_of(member).is_told == 0) return false;
  return true;
}

void WireStep::meet() {
  const std::uint64_t own = head_of(team_->index_).fingerprint;
  for (std::size_t member = 0; member < size(); ++member) {
    agrees_ = agrees_ && head_of(member).fingerprint == own;
    is_whole_ = is_whole_ && head_of(member).is_whole != 0;
  }
  const auto* copy = std::get_if<NodeCopy>(&what_);
  if (!agrees_ || copy == nullptr || (!is_whole_ && !are_all_told())) return;
  // Who wanted to pull what does not come has to know of it all the same.
  const bool is_ready = is_as_expected() && (is_whole_ || copy->stays_here);
  if (copy->pulls && (!copy->expected || is_ready)) return;
  for (std::size_t member = 0; member < size(); ++member)
    shown_.push_back({std::string(header_of(member), head_of(member).header_nbytes), head_of(member).nbytes});
  is_to_choose_.store(true, std::memory_order_release);
}

void WireStep::choose(std::vector<Pull> pulls) {
  if (!is_to_choose()) throw std::logic_error("this step is not to be told what to pull");
  std::get<NodeCopy>(what_).pulls = std::move(pulls);
  is_to_choose_.store(false, std::memory_order_release);
}

void WireStep::work() {
  if (!agrees_ || !is_whole_) return;
  if (const auto* reduction = std::get_if<NodeReduction>(&what_)) {
    std::vector<const void*> sources;
    for (std::size_t member = 0; member < size(); ++member) {
      if (head_of(member).nbytes != reduction->bounds.back())
        throw std::runtime_error("a rank shows another number of bytes than this one");
      sources.push_back(data_of(member));
    }
    reduce_what_is_due(*reduction, team_->index_, sources);
    return;
  }
  for (const Pull& each : *std::get<NodeCopy>(what_).pulls) {
    if (each.offset + each.nbytes > head_of(each.member).nbytes)
      throw std::runtime_error("a rank shows fewer bytes than another was to read");
    if (each.nbytes != 0) std::memcpy(each.target, data_of(each.member) + each.offset, each.nbytes);
  }
}

bool WireStep::are_all_sent() {
  while (n_sent_ < traffic_->sends.size() && traffic_->sends[n_sent_]->test()) ++n_sent_;
  return n_sent_ == traffic_->sends.size();
}

Program::Step WireStep::advance() {
  if (is_over()) return Step::waiting;
  try {
    return go_on();
  } catch (const std::exception& problem) {
    abandon();
    end(problem.what());
    return Step::moved;
  }
}

Program::Step WireStep::go_on() {
  bool has_moved = false;
  for (; distance_ < size(); distance_ *= 2, has_moved = true) {
    if (traffic_->receive == nullptr) begin_round();
    if (!traffic_->receive->test()) return has_moved ? Step::moved : Step::waiting;
    take_in(traffic_->receive->received_nbytes());
    traffic_->receive = nullptr;
  }
  if (!std::exchange(has_met_, true)) {
    meet();
    has_moved = true;
  }
  if (is_to_choose()) {
    if (!std::exchange(has_told_, true)) return Step::news;
    return has_moved ? Step::moved : Step::waiting;
  }
  if (!std::exchange(has_worked_, true)) {
    work();
    has_moved = true;
  }
  if (!are_all_sent()) return has_moved ? Step::moved : Step::waiting;
  end();
  return Step::moved;
}

void WireStep::abandon() {
  if (traffic_ == nullptr || is_over()) return;
  if (traffic_->receive != nullptr) traffic_->receive->cancel();
  if (traffic_->receive != nullptr || !traffic_->sends.empty()) bury(std::move(traffic_));
}

bool WireStep::drive(std::int64_t limit_ns) { return drive_polling(*this, limit_ns); }

}  // namespace ringcomm
