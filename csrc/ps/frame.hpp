// Frames of the parameter server as C++ reads and writes them. Their meanings are in
// ringcomm/ps/protocol/frames.py and frame_meta.py.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "update.hpp"

namespace ringcomm::ps {

enum class Kind : std::uint8_t { reply = 1, push = 2, record = 14 };  // those understood here
enum class Copy : std::uint32_t { done = 1, push = 8 };              // options of a record, likewise
enum class Where : std::uint8_t { none = 0, inline_ = 1, shared = 2, message = 3 };

// Numbers are little-endian, as on every machine that this runs on.
struct FrameHeader {
  Kind kind;
  Where where;
  std::uint16_t status;
  std::uint32_t view, origin, home;
  std::uint64_t sequence;
  std::uint32_t table, partition;
  std::int64_t clock;
  std::uint32_t n_meta, option;
  std::uint64_t place, n_body;
};
static_assert(sizeof(FrameHeader) == 64);

// A frame that fills a whole message.
struct Frame {
  FrameHeader header;
  const std::byte* meta;
  const std::byte* body;  // if it is inline
};

// Reads the first frame of a message; nothing if the message holds more, or less.
std::optional<Frame> read_frame(const std::byte* data, std::size_t nbytes);

// A push within a record, as its primary sends it to the follower.
struct CopiedPush {
  std::uint32_t source;  // the client
  FrameHeader header;    // where: none if the body is that of the record
  const std::byte* meta;
};

// Its bytes begin with the source, and two times that are of no use here.
struct CopiedPushHead {
  std::uint64_t source;
  double times[2];
  FrameHeader header;
};
static_assert(sizeof(CopiedPushHead) == 88);

// Reads the meta of a record; nothing if it is cut off, or of another kind.
std::optional<CopiedPush> read_copied_push(const std::byte* meta, std::size_t nbytes);

// What explains a push of a gradient.
struct PushMeta {
  std::uint64_t start, n;
  std::uint16_t flags;
  DType dtype;
  std::size_t n_hyper;
  std::array<double, kMaxHyper> hyper;
};

// Nothing if it is cut off, or says what is not known here.
std::optional<PushMeta> read_push_meta(const std::byte* meta, std::size_t nbytes);

}  // namespace ringcomm::ps
