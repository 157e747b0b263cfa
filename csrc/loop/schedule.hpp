// An algorithm written down: what one rank does in one collective, step by step. Algorithms do not
// depend on the data, so a schedule is recorded once and run for any buffers of the same sizes.
#pragma once
#include <cstddef>
#include <variant>
#include <memory>
#include <vector>

#include "kernels/dtype_and_op_codes.hpp"

namespace ringcomm {

// Bytes of a buffer: one of the arguments, or of the scratch memory, which are numbered behind them.
struct Span {
  std::size_t buffer, offset, nbytes;
};

// kPhase: under which name its time stands in a timeline.
struct Start {
  static constexpr const char* kPhase = "start";
  std::size_t message;
};
struct Wait {
  static constexpr const char* kPhase = "wait";
  std::vector<std::size_t> messages;  // all of them must be complete
};
struct Combine {
  static constexpr const char* kPhase = "reduce";
  Span total, x;
  DType dtype;
  Op op;
};
struct CombineAtOnce {
  static constexpr const char* kPhase = "reduce";
  Span out;
  std::vector<Span> sources;
  DType dtype;
  Op op;
  std::size_t divisor;
};
struct Divide {
  static constexpr const char* kPhase = "reduce";
  Span total;
  DType dtype;
  std::size_t divisor;
};
struct Copy {
  static constexpr const char* kPhase = "copy";
  Span out, x;
};
using Action = std::variant<Start, Wait, Combine, CombineAtOnce, Divide, Copy>;

struct MessageSpec {
  bool is_receive;
  Span span;
  int peer;  // within the group
};

// Append-only while it is recorded, then constant and shared. Every function that appends throws
// std::invalid_argument for what lies outside of the buffers, or has no meaning.
class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  explicit Schedule(std::vector<std::size_t> arguments_nbytes);

  std::size_t add_scratch(std::size_t nbytes);  // the number of a new buffer
  std::size_t send(Span data, int peer);        // the number of a message, for wait()
  std::size_t receive(Span out, int peer);
  void wait(std::vector<std::size_t> messages);
  void combine(Span total, Span x, DType dtype, Op op);
  void combine_at_once(Span out, std::vector<Span> sources, DType dtype, Op op,
                       std::size_t divisor);
  void divide(Span total, DType dtype, std::size_t divisor);
  void copy(Span out, Span x);

  // Throws if a message would still be under way at the end.
  void finish() const;

  const std::vector<Action>& actions() const { return actions_; }
  const std::vector<MessageSpec>& messages() const { return messages_; }
  const std::vector<std::size_t>& buffers() const { return buffers_; }  // bytes of each
  std::size_t n_arguments() const { return n_arguments_; }
  std::size_t scratch_nbytes() const;

 private:
  std::size_t start(bool is_receive, Span span, int peer);
  void require(const Span& span) const;
  std::size_t count(const Span& span, DType dtype) const;

  const std::size_t n_arguments_;
  std::vector<std::size_t> buffers_;
  std::vector<MessageSpec> messages_;
  std::vector<bool> is_awaited_;
  std::vector<Action> actions_;
};

constexpr std::size_t kScratchAlignment = 64;  // a cache line; more than any element needs
constexpr std::size_t aligned(std::size_t nbytes) {
  return (nbytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

}  // namespace ringcomm
