// Updaters: they apply a gradient to values, one block at a time.
//
// Every formula is that of torch.optim (its plain loop: foreach=False, fused=False), in the dtype of
// the values, so that a model trained through servers is the model trained without. Where torch has
// none, the paper is named. Elementwise: cutting a tensor changes no bit. (RowwiseAdagrad alone has
// one number per row, so rows are its unit.)
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../kernels/dtype_and_op_codes.hpp"

namespace ringcomm::ps {

// The order is that of the codes in ringcomm/ps/optim.py; a test compares them.
enum class Updater : int {
  assign = 0, add, sgd, adagrad, adam, rmsprop, adadelta, nadam, radam, ftrl, rowwise_adagrad
};

constexpr std::size_t kMaxHyper = 8;
constexpr std::size_t kMaxSlots = 3;

// An updater with its hyper-parameters: as many as it has, in the order of its dataclass.
struct Rule {
  Updater updater;
  std::array<double, kMaxHyper> hyper;
};

// Throws invalid_argument for an unknown code or a wrong number of hyper-parameters.
Rule rule_of(int code, const double* hyper, std::size_t n_hyper);

// The state of an updater beside the values: `full` slots with a number per value, then `per_row`
// (0 or 1) with one number per row (of a dense block: per block). `fill` is what they start with.
struct SlotPlan {
  std::size_t full, per_row;
  std::array<double, kMaxSlots> fill;
  std::size_t count() const { return full + per_row; }
};
SlotPlan plan_of(const Rule& rule);

// Whether the values of a dense block are rows to it: then its one per-row slot says how many.
bool is_rowwise(Updater updater);

// A rule at a step, as the kernel of the rule reads it.
struct Coefs {
  alignas(16) std::byte bytes[128];
};

// `n` values that are updated together. `out` may be `in`; otherwise nothing overlaps.
template <class T>
struct Piece {
  const Coefs* coefs;
  const T* in;
  T* out;
  const T* grad;
  T* slots[kMaxSlots];
};

// How a rule is carried out, for the dtype T: float or double.
template <class T>
struct Method {
  void (*prepare)(const double* hyper, std::int64_t step, Coefs& coefs);
  void (*run)(const Piece<T>* pieces, std::size_t n_pieces, std::size_t n);
};
template <class T>
Method<T> method_of(const Rule& rule);

// A gradient of dtype `grad` (T, float16 or bfloat16) as T: `grad` itself, or converted to `room`.
template <class T>
const T* as_values(DType dtype, const void* grad, T* room, std::size_t n);

// The mean of gradients: the sum of those that are there, in this order, each times its weight where
// there are weights, by `divisor`.
struct GradPart {
  DType dtype;  // T, float16 or bfloat16
  const void* grad;
  double weight;
};
struct GradMean {
  std::vector<GradPart> parts;
  bool is_weighed;
  double divisor;
};

// A dense update. `step` counts the updates of the block from 1.
struct DenseUpdate {
  Rule rule;
  std::int64_t step;
  DType dtype;  // of values and slots: float32 or float64
  const void* in;
  void* out;
  void* slots[kMaxSlots];
  std::size_t rows;  // 1, but for is_rowwise()
  DType grad_dtype;
  const void* grad;
  std::size_t count;
  const GradMean* mean;  // null: `grad`. Only for rules without a slot per row
};
void apply(const DenseUpdate& update);
void require_doable(const DenseUpdate& update);  // throws what apply() would

}  // namespace ringcomm::ps
