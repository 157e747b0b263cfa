// What the ranks of a node tell each other in shared memory: the layout, and nothing else.
//
// Every rank has a board that all ranks of its node map. In it each group has a window, and in it
// each operation in flight a slot: 16 for the unnamed ones, in turn, and one per cached name. A rank
// writes to its own slots alone, but for the claims of work that any rank may take over.
//
// A slot carries one step after the other; its `seq` counts them, alike on all ranks. Arrivals and
// inline payloads are kept for two steps: a rank arrives at step k + 2 only after it has seen all
// ranks at k + 1, and they came there after they were done with k. So nobody overwrites what another
// still reads, and no further flag is needed for that.
//
// A rank may have to give up a step: its deadline passes, or its user interrupts it. What is its own
// is its user's again then, so no other rank may read or write it any more. A rank that gives up
// stores `abandoned`, then waits until nobody is `touching`; who goes on stores `touching`, then looks
// at everybody's `abandoned`. All of these are seq_cst: one of the two sees the other.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "bell.hpp"

namespace ringcomm {

constexpr std::uint64_t kBoardMagic = 0x72696e67636f6d36;  // "ringcom6"
constexpr std::size_t kUnnamedSlots = 16;
constexpr std::size_t kNamedSlots = 4096;
constexpr std::size_t kSlots = kUnnamedSlots + kNamedSlots;
constexpr std::size_t kInline = 8192;  // bytes of payload beside the flags
constexpr std::size_t kWindows = 1024;  // groups
constexpr unsigned kProgressBits = 24;  // segments or pieces of one step

enum class Source : std::uint32_t {
  inlined,     // in the slot's inline payload
  registered,  // the whole of it in the arena, at `source`
  staged,      // segment by segment in a lane of the arena
  readable,    // in private memory, which the others read; at the address `source`. Who may not reads it staged
};

// What a rank brings to a step.
struct alignas(64) Arrival {
  std::atomic<std::uint64_t> seq;  // stored last
  std::uint64_t fingerprint;       // of the call: nothing is touched unless all ranks have the same
  std::uint64_t source, target;    // offsets in the rank's arena
  std::uint64_t nbytes;
  Source kind;
  std::uint32_t has_target;  // the result may be written to `target` by others
  std::uint64_t header_nbytes;  // of a copy: what stands in the inline payload before the bytes shown
  std::atomic<std::uint64_t> abandoned;  // == seq: this rank has given the step up
};
static_assert(sizeof(Arrival) == 64, "who looks at one member's part of a step misses one cache line");

// How far a rank is in a step: progress_of(seq, n) for n segments.
struct alignas(64) StepProgress {
  std::atomic<std::uint64_t> ready;    // its segments that others may read
  std::atomic<std::uint64_t> reduced;  // segments of its slice that others may fetch
                                       // (of a copy: 1, it may not read what is `readable`)
  std::atomic<std::uint64_t> done;     // segments that it will not read any more
  std::uint64_t lane;  // offset in its arena; written before `ready`
  std::uint64_t place;  // of the operation among those that member 0 has given a place;
  std::atomic<std::uint64_t> placed;  // == seq: it has given this step one
};

// Written by this rank at every look, and read by who gives up alone: so it has a cache line of its own.
struct alignas(64) Presence {
  std::atomic<std::uint64_t> touching;  // the step whose memory, anybody's, it may touch now; or 0
};

// Pieces of this rank's slice: who is free takes the next. Written by all ranks.
struct alignas(64) Claims {
  std::atomic<std::uint64_t> taken, finished;
};

struct Slot {
  Arrival arrival[2];
  StepProgress progress;
  Claims claims;
  Presence presence;
};

// Whether a rank reads the private memory of all other members of a group.
enum class Reading : std::uint32_t { untried, allowed, refused };

struct Window {
  Slot slots[kSlots];
  std::byte payload[kSlots][2][kInline];
  alignas(64) std::atomic<Reading> reading;
};

// Where a rank finds the pipe through which this one sends to it; see messages.hpp.
struct Outbox {
  std::uint32_t receiver;
  std::atomic<std::uint32_t> is_given_up;  // a message was, while the receiver may have read its data
  std::uint64_t offset;                    // of the pipe in the arena
};
constexpr std::size_t kOutboxes = 2048;

struct BoardHead {
  std::uint64_t magic;
  std::uint64_t nonce;  // tells this board from that of a recycled pid
  std::uint64_t probe;  // address in its rank's private memory, where the nonce stands, too
  alignas(64) Bell bell;
  // 1: its rank died, and another one answers for what is in its arena. Any rank of the node sets it.
  alignas(64) std::atomic<std::uint32_t> is_withdrawn;
  alignas(64) std::atomic<std::uint32_t> n_outboxes;  // that others may look at
  Outbox outboxes[kOutboxes];
};

// What is mapped by itself begins with a page. Those of Arm and POWER are of 64 KiB where the system
// was built so; for smaller ones the gaps cost nothing.
constexpr std::size_t kLargestPage = 65536;
constexpr std::size_t kHeadBytes = kLargestPage;
constexpr std::size_t kWindowBytes =
    (sizeof(Window) + kLargestPage - 1) / kLargestPage * kLargestPage;
static_assert(sizeof(BoardHead) <= kHeadBytes);
constexpr std::size_t kBoardBytes = kHeadBytes + kWindows * kWindowBytes;  // sparse

constexpr std::uint64_t progress_of(std::uint64_t seq, std::uint64_t n) {
  return (seq << kProgressBits) | n;
}
constexpr std::uint64_t kAllDone = (1u << kProgressBits) - 1;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "flags are shared by processes");

}  // namespace ringcomm
