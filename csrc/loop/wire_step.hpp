// Small collectives between hosts: what each member brings goes to all others with its call, so that the
// ranks agree and have the data in ceil(log2 n) messages each (dissemination).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "../shm/copy_step.hpp"
#include "../shm/reduce_step.hpp"
#include "../wire/wire.hpp"
#include "collective_step.hpp"

namespace ringcomm {

// The members of a group that spans hosts.
class WireTeam final : public MeetingPlace, public std::enable_shared_from_this<WireTeam> {
 public:
  // ranks: of the members, as the wire counts them; this rank is the one at `index`. A step of slot s has
  // the tag first_tag + s * tag_stride. Throws std::invalid_argument.
  WireTeam(std::shared_ptr<Wire> wire, std::vector<int> ranks, std::size_t index, int first_tag,
           int tag_stride, std::size_t n_slots);

  std::size_t own_index() const override { return index_; }
  std::size_t n_members() const override { return ranks_.size(); }
  std::shared_ptr<CollectiveStep> begin(std::size_t slot, std::uint64_t fingerprint,
                                        NodeReduction what) override;
  std::shared_ptr<CollectiveStep> begin(std::size_t slot, std::uint64_t fingerprint,
                                        NodeCopy what) override;

  // The most bytes, its header included, that each of n members may bring.
  static std::size_t most_brought(std::size_t n);

 private:
  friend class WireStep;
  int tag_of(std::size_t slot) const;

  const std::shared_ptr<Wire> wire_;
  const std::vector<int> ranks_;
  const std::size_t index_;
  const int first_tag_, tag_stride_;
  const std::size_t n_slots_, most_brought_;
};

// Each rank keeps the blocks of all in the order own, own - 1, own - 2, ...: what it sends is the
// beginning of that, and what it receives is appended.
class WireStep final : public CollectiveStep {
 public:
  using What = std::variant<NodeReduction, NodeCopy>;
  WireStep(std::shared_ptr<const WireTeam> team, int tag, std::uint64_t fingerprint, What what);
  ~WireStep() override;

  Step advance() override;
  bool needs_polling() const override { return true; }
  // The buffers of messages under way stay alive for ever: peers may still write to them.
  void abandon() override;

  bool drive(std::int64_t limit_ns) override;
  bool agrees() const override { return agrees_; }
  bool is_whole() const override { return is_whole_; }
  bool has_arrived(std::size_t) const override { return true; }  // what is missing may come from any
  std::size_t size() const override { return team_->ranks_.size(); }
  bool is_to_choose() const override { return is_to_choose_.load(std::memory_order_acquire); }
  const std::vector<Shown>& shown() const override { return shown_; }
  void choose(std::vector<Pull> pulls) override;

 private:
  struct Head;
  struct Free { void operator()(std::byte* memory) const; };
  struct Traffic {
    std::unique_ptr<std::byte[], Free> blocks;
    std::unique_ptr<Message> receive;  // of the round under way
    std::vector<std::unique_ptr<Message>> sends;
  };

  Step go_on();
  void bring(std::uint64_t fingerprint, const std::byte* data, std::size_t nbytes,
             const std::string& header, bool is_whole, bool stays_here);
  void begin_round();
  void take_in(std::size_t nbytes);
  void meet();
  void work();
  bool is_as_expected() const;
  bool are_all_told() const;
  bool are_all_sent();
  std::size_t n_of_round() const { return std::min(distance_, size() - distance_); }
  const Head& head_of(std::size_t member) const;
  const std::byte* data_of(std::size_t member) const;
  const char* header_of(std::size_t member) const;

  const std::shared_ptr<const WireTeam> team_;
  const int tag_;
  What what_;
  std::unique_ptr<Traffic> traffic_ = std::make_unique<Traffic>();
  std::vector<std::size_t> ends_;  // of the blocks that are here
  std::size_t distance_ = 1;  // to the peers of the round
  std::size_t n_sent_ = 0;    // sends that are complete
  std::vector<Shown> shown_;
  std::atomic<bool> is_to_choose_{false};
  bool has_told_ = false, has_met_ = false, has_worked_ = false;
  bool agrees_ = true, is_whole_ = true;
};

}  // namespace ringcomm
