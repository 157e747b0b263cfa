#include "team.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "copy_step.hpp"
#include "reduce_step.hpp"

namespace ringcomm {
namespace {

constexpr std::size_t kSpareLanes = 4;
constexpr useconds_t kNapUs = 100;
constexpr int kNapsPerLook = 100;  // at whether a process lives

// False for one that has ended, also while its parent has not asked for its exit status. 0: not known.
bool is_alive(int pid) {
  if (pid == 0) return true;
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return kill(pid, 0) == 0 || errno == EPERM;  // a node may have no /proc
  char state = 'X';
  const bool is_read = std::fscanf(file, "%*d (%*[^)]) %c", &state) == 1;
  std::fclose(file);
  return !is_read || (state != 'Z' && state != 'X');
}

}  // namespace

Team::Team(std::size_t index, std::vector<Mate> mates, std::shared_ptr<NodeMemory> mine, bool is_crowded,
           std::shared_ptr<void> keep_alive, bool may_read)
    : index_(index),
      mates_(std::move(mates)),
      mine_(std::move(mine)),
      is_crowded_(is_crowded),
      may_read_(may_read),
      keep_alive_(std::move(keep_alive)),
      steps_(kSlots) {}

std::shared_ptr<Team> Team::of(std::size_t index, std::size_t context, bool is_crowded,
                               const std::vector<std::shared_ptr<NodeMemory>>& memories,
                               bool may_read) {
  if (index >= memories.size()) throw std::invalid_argument("this rank is no member");
  struct Kept {
    std::vector<std::shared_ptr<const Mapping>> windows;
    std::vector<std::shared_ptr<NodeMemory>> memories;
  };
  auto kept = std::make_shared<Kept>();
  std::vector<Mate> mates;
  for (const auto& memory : memories) {
    kept->windows.push_back(memory->window(context));
    mates.push_back({reinterpret_cast<Window*>(kept->windows.back()->data()), &memory->bell(),
                     memory->arena(), memory->pid(), &memory->head()});
  }
  kept->memories = memories;
  return std::make_shared<Team>(index, std::move(mates), memories[index], is_crowded, kept,
                                may_read);
}

Team::~Team() {
  for (const Lane& lane : lanes_)
    if (all_at(lane.slot, &StepProgress::done, lane.until)) mine_->allocator().give_back(lane.offset, kLane + kSkew);
}

void Team::retire() {
  const std::lock_guard lock(mutex_);
  for (Lane& lane : lanes_) lane.until = 0;
  is_retired_.store(true);
}

bool Team::all_read() const {
  return std::all_of(mates_.begin(), mates_.end(), [](const Mate& mate) {
    return mate.window->reading.load(std::memory_order_acquire) == Reading::allowed;
  });
}

void Team::try_reading() {
  std::atomic<Reading>& mine = me().window->reading;
  if (mine.load(std::memory_order_relaxed) != Reading::untried) return;
  const auto can_read = [this](const Mate& mate) {
    if (mate.pid == me().pid) return true;
    if (mate.pid == 0 || mate.head == nullptr) return false;
    std::uint64_t found = 0;
    const auto got = read_private(mate.pid, mate.head->probe, reinterpret_cast<std::byte*>(&found), sizeof found);
    return got == sizeof found && found == mate.head->nonce;
  };
  const bool can = may_read_ && std::all_of(mates_.begin(), mates_.end(), can_read);
  mine.store(can ? Reading::allowed : Reading::refused, std::memory_order_release);
}

void Team::let_read(bool may) {
  may_read_ = may;
  if (may) me().window->reading.store(Reading::untried, std::memory_order_release);
}

std::ptrdiff_t Team::read(std::size_t member, std::uint64_t place, std::byte* to, std::size_t nbytes) {
  if (mates_[member].pid == me().pid && may_read_) {
    std::memcpy(to, reinterpret_cast<const std::byte*>(place), nbytes);
    return static_cast<std::ptrdiff_t>(nbytes);
  }
  const std::ptrdiff_t got = may_read_ ? read_private(mates_[member].pid, place, to, nbytes) : -EPERM;
  if (got > 0) return got;
  if (got == -ESRCH) return 0;
  me().window->reading.store(Reading::refused, std::memory_order_release);
  return -1;
}

Patience Team::patience() const { return is_crowded_ ? kCrowded : kRoomy; }

void Team::signal(std::size_t slot, std::atomic<std::uint64_t> StepProgress::* counter,
                  std::uint64_t value) {
  std::atomic<std::uint64_t>& mine = this->slot(index_, slot).progress.*counter;
  const std::uint64_t before = mine.load(std::memory_order_relaxed);  // this rank alone writes it
  mine.store(value, std::memory_order_seq_cst);
  bool was_last = true;
  for (std::size_t member = 0; member < size() && was_last; ++member)
    was_last = member == index_ || before < (this->slot(member, slot).progress.*counter)
                                                .load(std::memory_order_seq_cst);
  if (was_last) ring();
}

bool Team::all_at(std::size_t slot, std::atomic<std::uint64_t> StepProgress::* counter,
                  std::uint64_t value) const {
  for (std::size_t member = 0; member < size(); ++member)
    if ((this->slot(member, slot).progress.*counter).load(std::memory_order_seq_cst) < value)
      return false;
  return true;
}

void Team::ring() const {
  for (std::size_t member = 0; member < size(); ++member)
    if (member != index_) mates_[member].bell->ring();
}

void Team::await_untouched(std::size_t slot, std::uint64_t seq, std::int64_t deadline) const {
  for (std::size_t member = 0; member < size(); ++member) {
    const auto& touching = this->slot(member, slot).presence.touching;
    for (int naps = 1; touching.load(std::memory_order_seq_cst) == seq; ++naps) {
      if (monotonic_ns() >= deadline) return;
      if (naps % kNapsPerLook == 0 && !is_alive(mates_[member].pid)) break;
      usleep(kNapUs);
    }
  }
}

void Team::abandon() {
  std::vector<std::pair<std::size_t, std::uint64_t>> given_up;
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    const std::uint64_t seq = steps_[slot].open.load(std::memory_order_relaxed);
    if (seq == 0) continue;
    this->slot(index_, slot).arrival[seq % 2].abandoned.store(seq, std::memory_order_seq_cst);
    given_up.emplace_back(slot, seq);
  }
  if (given_up.empty()) return;
  ring();
  me().bell->ring();  // another thread may sleep for one of them
  const std::int64_t deadline = monotonic_ns() + kStuckNs;  // of all: there may be thousands
  for (const auto& [slot, seq] : given_up) await_untouched(slot, seq, deadline);
}

std::shared_ptr<CollectiveStep> Team::begin(std::size_t slot, std::uint64_t fingerprint,
                                            NodeReduction what) {
  return std::make_shared<ReduceStep>(Meeting(shared_from_this(), slot, fingerprint), std::move(what));
}

std::shared_ptr<CollectiveStep> Team::begin(std::size_t slot, std::uint64_t fingerprint, NodeCopy what) {
  return std::make_shared<CopyStep>(Meeting(shared_from_this(), slot, fingerprint), std::move(what));
}

Lane Team::take_lane() {
  const std::lock_guard lock(mutex_);
  for (auto lane = lanes_.begin(); lane != lanes_.end(); ++lane) {
    if (!all_at(lane->slot, &StepProgress::done, lane->until)) continue;
    const Lane taken = *lane;
    lanes_.erase(lane);
    return taken;
  }
  return {mine_->allocator().take(kLane + kSkew), 0, 0};
}

void Team::give_back(Lane lane) {
  const std::lock_guard lock(mutex_);
  lanes_.push_back(lane);
  for (auto each = lanes_.begin(); lanes_.size() > kSpareLanes && each != lanes_.end();) {
    const bool is_free = all_at(each->slot, &StepProgress::done, each->until);
    if (is_free) mine_->allocator().give_back(each->offset, kLane + kSkew);
    each = is_free ? lanes_.erase(each) : std::next(each);
  }
}

}  // namespace ringcomm
