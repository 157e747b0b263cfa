#include "update.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../kernels/target_clones.hpp"
#include "../kernels/half.hpp"
#include "../kernels/reduction_job.hpp"
#include "../kernels/fp_environment.hpp"
#include "update_formulas.hpp"

namespace ringcomm::ps {
namespace {

template <class U, class = void>
struct HasRowState : std::false_type {};
template <class U>
struct HasRowState<U, std::void_t<decltype(U::kHasRowState)>> : std::true_type {};

template <class T, class U>
void update_range(const U& update, const Piece<T>& piece, std::size_t n) {
  const T *const in = piece.in, *const grad = piece.grad;
  T *const out = piece.out, *const a = piece.slots[0], *const b = piece.slots[1],
          *const c = piece.slots[2];
  RINGCOMM_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    if constexpr (U::kFull == 0) out[i] = update(in[i], grad[i]);
    if constexpr (U::kFull == 1) out[i] = update(in[i], grad[i], a[i]);
    if constexpr (U::kFull == 2) out[i] = update(in[i], grad[i], a[i], b[i]);
    if constexpr (U::kFull == 3) out[i] = update(in[i], grad[i], a[i], b[i], c[i]);
  }
}

template <class T, class U>
void update_pieces(const Piece<T>* pieces, std::size_t n_pieces, std::size_t n) {
  static_assert(sizeof(U) <= sizeof(Coefs) && std::is_trivially_copyable_v<U>);
  for (std::size_t k = 0; k < n_pieces; ++k) {
    U update;
    std::memcpy(&update, pieces[k].coefs, sizeof update);
    if constexpr (HasRowState<U>::value)
      update.enter(*pieces[k].slots[U::kFull], pieces[k].grad, n);
    update_range<T, U>(update, pieces[k], n);
  }
}

template <class U>
void prepare(const double* hyper, std::int64_t step, Coefs& coefs) {
  const U update = U::of(hyper, static_cast<double>(step));
  std::memcpy(&coefs, &update, sizeof update);
}

// target_clones cannot stand on a template, so each loop gets a name.
#define RINGCOMM_KERNEL(name, T, ...)                                                     \
  RINGCOMM_CLONES void name(const Piece<T>* pieces, std::size_t n_pieces, std::size_t n) { \
    update_pieces<T, __VA_ARGS__>(pieces, n_pieces, n);                                   \
  }
#define RINGCOMM_KERNELS(T)                                 \
  RINGCOMM_KERNEL(assign_##T, T, Assign<T>)                 \
  RINGCOMM_KERNEL(add_##T, T, Add<T>)                       \
  RINGCOMM_KERNEL(sgd_##T, T, Sgd<T>)                       \
  RINGCOMM_KERNEL(momentum_##T, T, Momentum<T>)             \
  RINGCOMM_KERNEL(adagrad_##T, T, Adagrad<T>)               \
  RINGCOMM_KERNEL(adam_##T, T, Adam<T, false>)              \
  RINGCOMM_KERNEL(amsgrad_##T, T, Adam<T, true>)            \
  RINGCOMM_KERNEL(rms_##T, T, RmsProp<T, false, false>)     \
  RINGCOMM_KERNEL(rms_m_##T, T, RmsProp<T, false, true>)    \
  RINGCOMM_KERNEL(rms_c_##T, T, RmsProp<T, true, false>)    \
  RINGCOMM_KERNEL(rms_cm_##T, T, RmsProp<T, true, true>)    \
  RINGCOMM_KERNEL(adadelta_##T, T, Adadelta<T>)             \
  RINGCOMM_KERNEL(nadam_##T, T, NAdam<T>)                   \
  RINGCOMM_KERNEL(radam_##T, T, RAdam<T>)                   \
  RINGCOMM_KERNEL(ftrl_##T, T, Ftrl<T>)                     \
  RINGCOMM_KERNEL(rowwise_adagrad_##T, T, RowwiseAdagrad<T>)

RINGCOMM_KERNELS(float)
RINGCOMM_KERNELS(double)

// Which formula a rule asks for. The same order as RINGCOMM_METHODS.
enum Formula : std::size_t {
  kAssign, kAdd, kSgd, kMomentum, kAdagrad, kAdam, kAmsgrad, kRms, kRmsM, kRmsC, kRmsCM, kAdadelta,
  kNAdam, kRAdam, kFtrl, kRowwise
};

#define RINGCOMM_METHODS(T)                                                                      \
  {prepare<Assign<T>>, assign_##T}, {prepare<Add<T>>, add_##T}, {prepare<Sgd<T>>, sgd_##T},      \
      {prepare<Momentum<T>>, momentum_##T}, {prepare<Adagrad<T>>, adagrad_##T},                  \
      {prepare<Adam<T, false>>, adam_##T}, {prepare<Adam<T, true>>, amsgrad_##T},                \
      {prepare<RmsProp<T, false, false>>, rms_##T}, {prepare<RmsProp<T, false, true>>, rms_m_##T}, \
      {prepare<RmsProp<T, true, false>>, rms_c_##T}, {prepare<RmsProp<T, true, true>>, rms_cm_##T}, \
      {prepare<Adadelta<T>>, adadelta_##T}, {prepare<NAdam<T>>, nadam_##T},                      \
      {prepare<RAdam<T>>, radam_##T}, {prepare<Ftrl<T>>, ftrl_##T},                              \
      {prepare<RowwiseAdagrad<T>>, rowwise_adagrad_##T}

constexpr Method<float> kFloatMethods[] = {RINGCOMM_METHODS(float)};
constexpr Method<double> kDoubleMethods[] = {RINGCOMM_METHODS(double)};

Formula formula_of(const Rule& rule) {
  const auto& h = rule.hyper;
  switch (rule.updater) {
    case Updater::assign: return kAssign;
    case Updater::add: return kAdd;
    case Updater::sgd: return h[1] != 0 ? kMomentum : kSgd;
    case Updater::adagrad: return kAdagrad;
    case Updater::adam: return h[5] != 0 ? kAmsgrad : kAdam;
    case Updater::rmsprop:
      return h[5] != 0 ? (h[4] > 0 ? kRmsCM : kRmsC) : (h[4] > 0 ? kRmsM : kRms);
    case Updater::adadelta: return kAdadelta;
    case Updater::nadam: return kNAdam;
    case Updater::radam: return kRAdam;
    case Updater::ftrl: return kFtrl;
    case Updater::rowwise_adagrad: return kRowwise;
  }
  throw std::invalid_argument("no such updater");
}

constexpr std::size_t kHyperOf[] = {0, 0, 6, 6, 8, 7, 5, 8, 7, 4, 2};

}  // namespace

Rule rule_of(int code, const double* hyper, std::size_t n_hyper) {
  if (code < 0 || static_cast<std::size_t>(code) >= std::size(kHyperOf))
    throw std::invalid_argument("updater: no code " + std::to_string(code));
  const std::size_t expected = kHyperOf[code];
  if (n_hyper != expected)
    throw std::invalid_argument("updater: code " + std::to_string(code) + " has " +
                                std::to_string(expected) + " hyper-parameters, got " +
                                std::to_string(n_hyper));
  Rule rule{static_cast<Updater>(code), {}};
  std::copy_n(hyper, n_hyper, rule.hyper.begin());
  return rule;
}

SlotPlan plan_of(const Rule& rule) {
  switch (formula_of(rule)) {
    case kAssign: case kAdd: case kSgd: return {0, 0, {}};
    case kMomentum: case kRms: return {1, 0, {}};
    case kAdagrad: return {1, 0, {rule.hyper[3]}};
    case kAdam: case kRmsM: case kRmsC: case kAdadelta: case kRAdam: case kFtrl: return {2, 0, {}};
    case kAmsgrad: case kRmsCM: return {3, 0, {}};
    case kNAdam: return {2, 1, {0, 0, 1}};
    case kRowwise: return {0, 1, {}};
  }
  throw std::invalid_argument("no such updater");
}

bool is_rowwise(Updater updater) { return updater == Updater::rowwise_adagrad; }

template <>
Method<float> method_of<float>(const Rule& rule) {
  return kFloatMethods[formula_of(rule)];
}
template <>
Method<double> method_of<double>(const Rule& rule) {
  return kDoubleMethods[formula_of(rule)];
}

namespace {

template <class T>
void widen_range_f16(T* out, const std::uint16_t* x, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<T>(widen_float16(x[i]));
}
template <class T>
void widen_range_bf16(T* out, const std::uint16_t* x, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i)
    out[i] = static_cast<T>(float_of_bits(static_cast<std::uint32_t>(x[i]) << 16));
}
#define RINGCOMM_WIDENING(T)                                                               \
  RINGCOMM_CLONES void widen_f16(T* out, const std::uint16_t* x, std::size_t n) {          \
    widen_range_f16<T>(out, x, n);                                                         \
  }                                                                                        \
  RINGCOMM_CLONES void widen_bf16(T* out, const std::uint16_t* x, std::size_t n) {         \
    widen_range_bf16<T>(out, x, n);                                                        \
  }
RINGCOMM_WIDENING(float)
RINGCOMM_WIDENING(double)

bool is_16bit(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

// The part of an update that begins at value `start`.
template <class T>
Piece<T> piece_at(const DenseUpdate& u, const Coefs& coefs, std::size_t start, std::size_t row,
                  const T* grad) {
  const SlotPlan plan = plan_of(u.rule);
  Piece<T> piece{&coefs, at<T>(u.in, start), at<T>(u.out, start), grad, {}};
  for (std::size_t k = 0; k < plan.count(); ++k)
    piece.slots[k] = at<T>(u.slots[k], k < plan.full ? start : row);
  return piece;
}

template <class T>
void apply_rows(const DenseUpdate& u, const Method<T>& method, const Coefs& coefs) {
  const std::size_t width = u.count / u.rows;
  std::vector<T> room(is_16bit(u.grad_dtype) ? width : 0);
  const std::size_t grad_item = is_16bit(u.grad_dtype) ? 2 : sizeof(T);
  for (std::size_t row = 0; row < u.rows; ++row) {
    const void* raw = at<std::byte>(u.grad, row * width * grad_item);
    const T* grad = as_values<T>(u.grad_dtype, raw, room.data(), width);
    const Piece<T> piece = piece_at<T>(u, coefs, row * width, row, grad);
    method.run(&piece, 1, width);
  }
}

constexpr std::size_t kChunk = 2048;  // a converted gradient, or a mean, stays in the L1 cache

template <class T>
const T* values_at(DType dtype, const void* grad, std::size_t start, std::size_t n, T* room) {
  const std::size_t itemsize = is_16bit(dtype) ? sizeof(std::uint16_t) : sizeof(T);
  return as_values<T>(dtype, at<std::byte>(grad, start * itemsize), room, n);
}

template <class T>
const T* mean_at(const GradMean& mean, std::size_t start, std::size_t n, T* out) {
  T room[kChunk];
  bool is_first = true;
  for (const GradPart& part : mean.parts) {
    const T* const grad = values_at<T>(part.dtype, part.grad, start, n, room);
    const T weight = static_cast<T>(part.weight);
    if (is_first && !mean.is_weighed)
      std::copy(grad, grad + n, out);
    else if (is_first)
      for (std::size_t i = 0; i < n; ++i) out[i] = grad[i] * weight;
    else if (!mean.is_weighed)
      for (std::size_t i = 0; i < n; ++i) out[i] += grad[i];
    else
      for (std::size_t i = 0; i < n; ++i) out[i] += grad[i] * weight;
    is_first = false;
  }
  const T divisor = static_cast<T>(mean.divisor);
  for (std::size_t i = 0; i < n; ++i) out[i] /= divisor;
  return out;
}

template <class T>
void apply_chunks(const DenseUpdate& u, const Method<T>& method, const Coefs& coefs) {
  T room[kChunk];
  for (std::size_t start = 0; start < u.count; start += kChunk) {
    const std::size_t n = std::min(kChunk, u.count - start);
    const T* const grad = u.mean != nullptr ? mean_at<T>(*u.mean, start, n, room)
                                            : values_at<T>(u.grad_dtype, u.grad, start, n, room);
    const Piece<T> piece = piece_at<T>(u, coefs, start, 0, grad);
    method.run(&piece, 1, n);
  }
}

template <class T>
void apply_as(const DenseUpdate& u) {
  const Method<T> method = method_of<T>(u.rule);
  Coefs coefs;
  method.prepare(u.rule.hyper.data(), u.step, coefs);
  // What is kept once per row sees all of the row at once.
  const bool has_rows = plan_of(u.rule).per_row != 0;
  if (u.mean == nullptr && (!is_16bit(u.grad_dtype) || has_rows))
    apply_rows<T>(u, method, coefs);
  else
    apply_chunks<T>(u, method, coefs);
}

}  // namespace

template <class T>
const T* as_values(DType dtype, const void* grad, T* room, std::size_t n) {
  if (dtype == DType::float16) widen_f16(room, static_cast<const std::uint16_t*>(grad), n);
  if (dtype == DType::bfloat16) widen_bf16(room, static_cast<const std::uint16_t*>(grad), n);
  return is_16bit(dtype) ? room : static_cast<const T*>(grad);
}
template const float* as_values<float>(DType, const void*, float*, std::size_t);
template const double* as_values<double>(DType, const void*, double*, std::size_t);

void require_doable(const DenseUpdate& u) {
  if (u.mean != nullptr && (u.mean->parts.empty() || plan_of(u.rule).per_row != 0))
    throw std::invalid_argument("the mean of no gradients, or for a rule with a number per row");
}

void apply(const DenseUpdate& u) {
  require_doable(u);
  if (u.rows == 0) return;
  const DefaultFpEnvironment here;
  u.dtype == DType::float64 ? apply_as<double>(u) : apply_as<float>(u);
}

}  // namespace ringcomm::ps
