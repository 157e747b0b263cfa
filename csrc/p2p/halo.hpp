// An exchange of cells of an array with other ranks, again and again with arrays of one layout.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "peer_messages.hpp"

namespace ringcomm {

// Some cells of an array: runs of bytes that follow each other in each of the outer dimensions.
struct Cells {
  std::ptrdiff_t offset;  // bytes from the array's first element
  std::vector<std::pair<std::size_t, std::ptrdiff_t>> outer;  // (length, stride in bytes)
  std::size_t run_nbytes;
  std::byte* buffer;  // in which they are sent or received; null: they are one run

  void pack(const std::byte* array) const;
  void unpack(std::byte* array) const;
};

class KnownHalo {
 public:
  struct Side {
    SharedEnvelope envelope;
    std::int64_t tag;
    Cells cells;
  };

  KnownHalo(std::shared_ptr<PeerMessages> messages, std::vector<Side> sends, std::vector<Side> receives)
      : messages_(std::move(messages)), sends_(std::move(sends)), receives_(std::move(receives)) {}

  // As PeerMessages::exchange_all(). If no rests are left, the cells of the array are what was received;
  // else they are in the buffers once the rests are over.
  std::optional<Refusal> run(std::byte* array, std::int64_t limit_ns,
                             std::vector<std::shared_ptr<PeerMessage>>& rests) const;

  std::size_t n_receives() const { return receives_.size(); }

 private:
  const std::shared_ptr<PeerMessages> messages_;
  const std::vector<Side> sends_, receives_;
};

}  // namespace ringcomm
