#include "schedule.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/reduce.hpp"

namespace ringcomm {

Schedule::Schedule(std::vector<std::size_t> arguments_nbytes)
    : n_arguments_(arguments_nbytes.size()), buffers_(std::move(arguments_nbytes)) {}

std::size_t Schedule::add_scratch(std::size_t nbytes) {
  buffers_.push_back(nbytes);
  return buffers_.size() - 1;
}

std::size_t Schedule::send(Span data, int peer) { return start(false, data, peer); }

std::size_t Schedule::receive(Span out, int peer) { return start(true, out, peer); }

std::size_t Schedule::start(bool is_receive, Span span, int peer) {
  require(span);
  if (peer < 0) throw std::invalid_argument("a schedule knows whom it speaks to");
  messages_.push_back({is_receive, span, peer});
  is_awaited_.push_back(false);
  actions_.emplace_back(Start{messages_.size() - 1});
  return messages_.size() - 1;
}

void Schedule::wait(std::vector<std::size_t> messages) {
  for (const std::size_t message : messages) is_awaited_.at(message) = true;
  if (!messages.empty()) actions_.emplace_back(Wait{std::move(messages)});
}

void Schedule::combine(Span total, Span x, DType dtype, Op op) {
  if (count(total, dtype) != count(x, dtype)) throw std::invalid_argument("spans differ in size");
  ringcomm::combine(op, dtype, nullptr, nullptr, 0);  // throws where op means nothing for dtype
  if (total.nbytes > 0) actions_.emplace_back(Combine{total, x, dtype, op});
}

void Schedule::combine_at_once(Span out, std::vector<Span> sources, DType dtype, Op op,
                               std::size_t divisor) {
  for (const Span& source : sources)
    if (count(source, dtype) != count(out, dtype))
      throw std::invalid_argument("spans differ in size");
  if (divisor == 0) throw std::invalid_argument("divisor is 0");
  if (out.nbytes > 0)
    actions_.emplace_back(CombineAtOnce{out, std::move(sources), dtype, op, divisor});
}

void Schedule::divide(Span total, DType dtype, std::size_t divisor) {
  count(total, dtype);
  if (divisor == 0) throw std::invalid_argument("divisor is 0");
  if (total.nbytes > 0) actions_.emplace_back(Divide{total, dtype, divisor});
}

void Schedule::copy(Span out, Span x) {
  require(out);
  require(x);
  if (out.nbytes != x.nbytes) throw std::invalid_argument("spans differ in size");
  if (out.nbytes > 0) actions_.emplace_back(Copy{out, x});
}

void Schedule::finish() const {
  if (std::find(is_awaited_.begin(), is_awaited_.end(), false) != is_awaited_.end())
    throw std::invalid_argument("the algorithm ends with a message that it has not waited for");
}

std::size_t Schedule::scratch_nbytes() const {
  std::size_t total = 0;
  for (std::size_t i = n_arguments_; i < buffers_.size(); ++i) total += aligned(buffers_[i]);
  return total;
}

void Schedule::require(const Span& span) const {
  if (span.buffer >= buffers_.size() || span.offset > buffers_[span.buffer] ||
      span.nbytes > buffers_[span.buffer] - span.offset)
    throw std::invalid_argument("a span lies outside of its buffer");
}

std::size_t Schedule::count(const Span& span, DType dtype) const {
  require(span);
  if (span.nbytes % itemsize(dtype) != 0 || span.offset % alignment(dtype) != 0)
    throw std::invalid_argument("a span is no whole number of elements");
  return span.nbytes / itemsize(dtype);
}

}  // namespace ringcomm
