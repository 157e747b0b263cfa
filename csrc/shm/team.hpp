// The members of a group that share a node, and the slots in which their operations meet.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../loop/collective_step.hpp"
#include "board.hpp"
#include "memory.hpp"

namespace ringcomm {

// One member, as this rank sees it.
struct Mate {
  Window* window;
  Bell* bell;
  std::byte* arena;
  int pid;  // 0: not known
  const BoardHead* head = nullptr;
};

// How long a member may take for a piece of a step before it counts as stopped.
constexpr std::int64_t kStuckNs = 5'000'000'000;

constexpr std::size_t kLane = 1u << 20;

// A load waits for an earlier store whose address has the same last 12 bits, wholly or in part: a copy
// between buffers that lie 16 bytes apart in this sense takes 12 times longer (measured, AMD EPYC:
// 23.6 against 1.9 us for 64 KiB). So lanes begin half a page away from the buffer they serve.
constexpr std::size_t kSkew = 4096;
inline std::size_t skew_from(const void* buffer) {
  return (reinterpret_cast<std::uintptr_t>(buffer) + kSkew / 2) % kSkew / 64 * 64;
}

// A piece of this rank's arena through which private buffers pass.
struct Lane {
  std::size_t offset;
  std::size_t slot;     // last used there,
  std::uint64_t until;  // and free again when all members' `done` there has come to this
};

class Team final : public MeetingPlace, public std::enable_shared_from_this<Team> {
 public:
  // mates: by index, this rank's own at `index`. mine: where its lanes come from. is_crowded: the
  // node has more ranks than cores. keep_alive: what the pointers of the mates point into. may_read:
  // this rank reads private memory of the others, and they read that of its.
  Team(std::size_t index, std::vector<Mate> mates, std::shared_ptr<NodeMemory> mine, bool is_crowded,
       std::shared_ptr<void> keep_alive, bool may_read = true);
  // The ranks with these memories, of which `index` is this process's; `context` is the group's window.
  static std::shared_ptr<Team> of(std::size_t index, std::size_t context, bool is_crowded,
                                  const std::vector<std::shared_ptr<NodeMemory>>& memories,
                                  bool may_read);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() override;

  std::size_t own_index() const override { return index_; }
  std::size_t n_members() const override { return mates_.size(); }
  std::shared_ptr<CollectiveStep> begin(std::size_t slot, std::uint64_t fingerprint,
                                        NodeReduction what) override;
  std::shared_ptr<CollectiveStep> begin(std::size_t slot, std::uint64_t fingerprint,
                                        NodeCopy what) override;

  std::size_t index() const { return index_; }
  std::size_t size() const { return mates_.size(); }
  const Mate& mate(std::size_t member) const { return mates_[member]; }
  const Mate& me() const { return mates_[index_]; }
  Slot& slot(std::size_t member, std::size_t which) const {
    return mates_[member].window->slots[which];
  }
  NodeMemory& memory() const { return *mine_; }
  bool is_crowded() const { return is_crowded_; }
  Patience patience() const;

  // True if all members read the private memory of all others, as far as they have found out.
  bool all_read() const;
  // Finds out whether this member does, unless it has.
  void try_reading();
  // True: it is to find out anew. False: from now on, the system counts as having refused it.
  void let_read(bool may);
  // Reads private memory of a member; returns how many bytes, 0 if that rank has ended, less if this
  // member may not any more: then all_read() is false from now on.
  std::ptrdiff_t read(std::size_t member, std::uint64_t place, std::byte* to, std::size_t nbytes);

  // Takes part in the next step of a slot; returns its number, alike on all members.
  std::uint64_t next_step(std::size_t slot) {
    Step& step = steps_[slot];
    step.open.store(++step.number, std::memory_order_relaxed);
    return step.number;
  }
  // That step is over on this member.
  void close_step(std::size_t slot) { steps_[slot].open.store(0, std::memory_order_relaxed); }

  // Gives up every step that is not over, also what another thread advances; see NodeStep::abandon().
  void abandon();

  // No member uses it any more, so nobody reads its lanes: whoever goes on with the windows of its
  // members may clear them. Steps of this team that are not over touch nothing from now on.
  void retire();
  bool is_retired() const { return is_retired_.load(); }

  // Stores `value`, and wakes the others if they may have waited for it: if this member was the only
  // one behind, so that the least of all counters has grown.
  void signal(std::size_t slot, std::atomic<std::uint64_t> StepProgress::* counter, std::uint64_t value);
  bool all_at(std::size_t slot, std::atomic<std::uint64_t> StepProgress::* counter,
              std::uint64_t value) const;

  // Wakes every other member's process if it sleeps.
  void ring() const;

  // Returns once no member that lives touches memory of this step, this member's other threads
  // included; at `deadline` in any case. This member has abandoned it, so none begins to.
  void await_untouched(std::size_t slot, std::uint64_t seq, std::int64_t deadline) const;

  // Returns kLane + kSkew bytes of this rank's arena that nobody reads any more.
  Lane take_lane();
  void give_back(Lane lane);

 private:
  struct Step {
    std::uint64_t number = 0;            // of the last
    std::atomic<std::uint64_t> open{0};  // the same while it is not over, else 0
  };

  std::size_t index_;
  std::vector<Mate> mates_;
  std::shared_ptr<NodeMemory> mine_;
  bool is_crowded_;
  std::atomic<bool> may_read_;
  std::shared_ptr<void> keep_alive_;
  std::vector<Step> steps_;  // by slot
  std::atomic<bool> is_retired_{false};
  std::mutex mutex_;
  std::vector<Lane> lanes_;  // not in use by this rank; others may still read them
};

}  // namespace ringcomm
