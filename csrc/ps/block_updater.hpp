// Applies pushes to a dense block without Python; knows the state of the updater.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "block.hpp"
#include "frame.hpp"

namespace ringcomm::ps {

// Counts of what a block has done since they were last read.
struct Traffic {
  std::uint64_t pushes = 0, nbytes = 0;
  std::int64_t apply_ns = 0;
  std::map<std::uint64_t, std::uint64_t> staleness;  // updates that were missed -> how often
};

// For one thread at a time.
class BlockUpdater {
 public:
  BlockUpdater(Block block, std::size_t count, DType dtype)
      : block_(block), count_(count), dtype_(dtype) {}

  Block& block() { return block_; }
  std::size_t count() const { return count_; }
  DType dtype() const { return dtype_; }

  // The updater and its state: kept by the caller, who calls again when they change.
  void attach(int code, std::size_t n_hyper, const std::array<void*, kMaxSlots>& slots,
              std::size_t n_slots, std::size_t rows);

  // What push() would do with a push of a gradient of the whole block. Nothing if it is another kind
  // of push, or the block is not open for it. body: at a multiple of its element.
  std::optional<Rule> rule_for(const FrameHeader& header, const PushMeta& meta,
                               const std::byte* body) const;
  // Carries out a push. False if there is no rule for it: then nothing was touched.
  bool push(const FrameHeader& header, const PushMeta& meta, const std::byte* body);

  bool may_ack = false;     // pushes may be carried out, and acknowledged, without Python
  std::uint64_t steps = 0;  // updates that the updater has made
  Traffic traffic;
  std::map<std::uint32_t, std::uint64_t> applied;  // sequence of the last push, by rank

 private:
  Block block_;
  std::size_t count_;
  DType dtype_;
  int code_ = -1;
  std::size_t n_hyper_ = 0;
  std::array<void*, kMaxSlots> slots_{};
  std::size_t n_slots_ = 0, rows_ = 1;
};

}  // namespace ringcomm::ps
