// The updates, one value at a time. of() turns hyper-parameters, in float64, into the numbers that
// the loop needs, rounded once; operator() returns the new value and updates the slots.
//
// The operations and their order are those of torch's plain loops, so that NaN, inf and denormals
// come out as they do there: lerp_ and addcdiv_ are written out. Choices are made by `?:` on flags
// that do not change in the loop: it stays a loop that vectorises.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace ringcomm::ps {
namespace {

template <class T>
struct Weight {  // of Tensor.lerp_: exact at both ends
  T weight, rest;
  bool is_small;
  static Weight of(double w) {
    return {static_cast<T>(w), T{1} - static_cast<T>(w), std::abs(w) < 0.5};
  }
  T lerp(T start, T end) const {
    return is_small ? start + weight * (end - start) : end - (end - start) * rest;
  }
};

// Weight decay and maximize, which most optimizers share.
template <class T>
struct Pull {
  T sign, decay;
  bool decays;
  static Pull of(double weight_decay, double maximize) {
    return {maximize != 0 ? T{-1} : T{1}, static_cast<T>(weight_decay), weight_decay != 0};
  }
  T on(T grad, T value) const {
    const T signed_grad = sign * grad;
    return decays ? signed_grad + decay * value : signed_grad;
  }
};

template <class T>
T maximum(T a, T b) {  // a NaN wins, as in torch.maximum
  return a >= b || a != a ? a : b;
}

template <class T>
struct Assign {
  static constexpr std::size_t kFull = 0;
  static Assign of(const double*, double) { return {}; }
  T operator()(T, T grad) const { return grad; }
};

template <class T>
struct Add {
  static constexpr std::size_t kFull = 0;
  static Add of(const double*, double) { return {}; }
  T operator()(T value, T grad) const { return value + grad; }
};

template <class T>
struct Sgd {  // lr, momentum, dampening, weight_decay, nesterov, maximize
  static constexpr std::size_t kFull = 0;
  Pull<T> pull;
  T step;
  static Sgd of(const double* h, double) {
    return {Pull<T>::of(h[3], h[5]), static_cast<T>(-h[0])};
  }
  T operator()(T value, T grad) const { return value + step * pull.on(grad, value); }
};

template <class T>
struct Momentum {  // SGD where momentum is not 0
  static constexpr std::size_t kFull = 1;
  Pull<T> pull;
  T step, momentum, fresh;
  bool is_nesterov, is_first;
  static Momentum of(const double* h, double t) {
    return {Pull<T>::of(h[3], h[5]), static_cast<T>(-h[0]), static_cast<T>(h[1]),
            static_cast<T>(1 - h[2]), h[4] != 0, t == 1};
  }
  T operator()(T value, T grad, T& buffer) const {
    const T g = pull.on(grad, value);
    buffer = is_first ? g : buffer * momentum + fresh * g;  // the first is not dampened
    return value + step * (is_nesterov ? g + momentum * buffer : buffer);
  }
};

template <class T>
struct Adagrad {  // lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize
  static constexpr std::size_t kFull = 1;
  Pull<T> pull;
  T step, eps;
  static Adagrad of(const double* h, double t) {
    return {Pull<T>::of(h[2], h[5]), static_cast<T>(-h[0] / (1 + (t - 1) * h[1])),
            static_cast<T>(h[4])};
  }
  T operator()(T value, T grad, T& sum) const {
    const T g = pull.on(grad, value);
    sum = sum + g * g;
    return value + step * g / (std::sqrt(sum) + eps);
  }
};

template <class T>
struct Moments {  // exp_avg and exp_avg_sq of the Adam family
  Weight<T> first;
  T keep, fresh;
  static Moments of(double beta1, double beta2) {
    return {Weight<T>::of(1 - beta1), static_cast<T>(beta2), static_cast<T>(1 - beta2)};
  }
  void add(T grad, T& average, T& square) const {
    average = first.lerp(average, grad);
    square = square * keep + fresh * grad * grad;
  }
};

// Weight decay that is added to the gradient, or, decoupled, shrinks the value.
template <class T>
struct Decay {
  Pull<T> pull;
  T shrink;
  static Decay of(double lr, double weight_decay, double decoupled, double maximize) {
    const bool shrinks = decoupled != 0 && weight_decay != 0;
    return {Pull<T>::of(shrinks ? 0 : weight_decay, maximize),
            static_cast<T>(shrinks ? 1 - lr * weight_decay : 1)};
  }
};

template <class T, bool kAmsgrad>
struct Adam {  // lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled
  static constexpr std::size_t kFull = kAmsgrad ? 3 : 2;
  Decay<T> decay;
  Moments<T> moments;
  T step, root, eps;
  static Adam of(const double* h, double t) {
    return {Decay<T>::of(h[0], h[4], h[7], h[6]), Moments<T>::of(h[1], h[2]),
            static_cast<T>(-(h[0] / (1 - std::pow(h[1], t)))),
            static_cast<T>(std::sqrt(1 - std::pow(h[2], t))), static_cast<T>(h[3])};
  }
  T moved(T value, T average, T square) const {
    return value * decay.shrink + step * average / (std::sqrt(square) / root + eps);
  }
  T operator()(T value, T grad, T& average, T& square) const {
    moments.add(decay.pull.on(grad, value), average, square);
    return moved(value, average, square);
  }
  T operator()(T value, T grad, T& average, T& square, T& most) const {
    moments.add(decay.pull.on(grad, value), average, square);
    most = maximum(most, square);
    return moved(value, average, most);
  }
};

template <class T, bool kCentered, bool kMomentum>
struct RmsProp {  // lr, alpha, eps, weight_decay, momentum, centered, maximize
  static constexpr std::size_t kFull = 1 + kCentered + kMomentum;
  Pull<T> pull;
  Weight<T> first;
  T step, keep, fresh, eps, momentum;
  static RmsProp of(const double* h, double) {
    return {Pull<T>::of(h[3], h[6]), Weight<T>::of(1 - h[1]),    static_cast<T>(-h[0]),
            static_cast<T>(h[1]),    static_cast<T>(1 - h[1]), static_cast<T>(h[2]),
            static_cast<T>(h[4])};
  }
  T root(T grad, T& square) const {
    square = square * keep + fresh * grad * grad;
    return std::sqrt(square) + eps;
  }
  T root(T grad, T& square, T& average) const {
    square = square * keep + fresh * grad * grad;
    average = first.lerp(average, grad);
    return std::sqrt(square - average * average) + eps;
  }
  T operator()(T value, T grad, T& square) const {
    const T g = pull.on(grad, value);
    return value + step * g / root(g, square);
  }
  T operator()(T value, T grad, T& square, T& second) const {
    const T g = pull.on(grad, value);
    if constexpr (kCentered) return value + step * g / root(g, square, second);
    second = second * momentum + g / root(g, square);
    return value + step * second;
  }
  T operator()(T value, T grad, T& square, T& average, T& buffer) const {
    const T g = pull.on(grad, value);
    buffer = buffer * momentum + g / root(g, square, average);
    return value + step * buffer;
  }
};

template <class T>
struct Adadelta {  // lr, rho, eps, weight_decay, maximize
  static constexpr std::size_t kFull = 2;
  Pull<T> pull;
  T step, keep, fresh, eps;
  static Adadelta of(const double* h, double) {
    return {Pull<T>::of(h[3], h[4]), static_cast<T>(-h[0]), static_cast<T>(h[1]),
            static_cast<T>(1 - h[1]), static_cast<T>(h[2])};
  }
  T operator()(T value, T grad, T& square, T& moved) const {
    const T g = pull.on(grad, value);
    square = square * keep + fresh * g * g;
    const T delta = std::sqrt(moved + eps) / std::sqrt(square + eps) * g;
    moved = moved * keep + fresh * delta * delta;
    return value + step * delta;
  }
};

template <class T>
struct NAdam {  // lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled, maximize
  static constexpr std::size_t kFull = 2;
  static constexpr bool kHasRowState = true;
  Decay<T> decay;
  Moments<T> moments;
  T correction, eps;
  double lr, mu, mu_next;
  T by_grad, by_average;  // set by enter()
  static NAdam of(const double* h, double t) {
    const double mu = h[1] * (1 - 0.5 * std::pow(0.96, t * h[5]));
    const double mu_next = h[1] * (1 - 0.5 * std::pow(0.96, (t + 1) * h[5]));
    return {Decay<T>::of(h[0], h[4], h[6], h[7]), Moments<T>::of(h[1], h[2]),
            static_cast<T>(1 - std::pow(h[2], t)), static_cast<T>(h[3]), h[0], mu, mu_next, 0, 0};
  }
  void enter(T& mu_product, const T*, std::size_t) {
    mu_product = mu_product * static_cast<T>(mu);
    const auto product = static_cast<double>(mu_product);
    by_grad = static_cast<T>(-lr * (1 - mu) / (1 - product));
    by_average = static_cast<T>(-lr * mu_next / (1 - product * mu_next));
  }
  T operator()(T value, T grad, T& average, T& square) const {
    const T g = decay.pull.on(grad, value);
    moments.add(g, average, square);
    const T root = std::sqrt(square / correction) + eps;
    return value * decay.shrink + by_grad * g / root + by_average * average / root;
  }
};

template <class T>
struct RAdam {  // lr, beta1, beta2, eps, weight_decay, decoupled, maximize
  static constexpr std::size_t kFull = 2;
  Decay<T> decay;
  Moments<T> moments;
  T correction, lr, eps, root, rectifier;
  bool is_rectified;
  static RAdam of(const double* h, double t) {
    const double power = std::pow(h[2], t), correction2 = 1 - power;
    const double longest = 2 / (1 - h[2]) - 1;
    const double length = longest - 2 * t * power / correction2;
    const double rectifier = std::sqrt((length - 4) * (length - 2) * longest /
                                       ((longest - 4) * (longest - 2) * length));
    return {Decay<T>::of(h[0], h[4], h[5], h[6]),
            Moments<T>::of(h[1], h[2]),
            static_cast<T>(1 - std::pow(h[1], t)),
            static_cast<T>(h[0]),
            static_cast<T>(h[3]),
            static_cast<T>(std::sqrt(correction2)),
            static_cast<T>(rectifier),
            length > 5};
  }
  T operator()(T value, T grad, T& average, T& square) const {
    moments.add(decay.pull.on(grad, value), average, square);
    const T plain = average / correction * lr;
    const T adapted = plain * (root * (T{1} / (std::sqrt(square) + eps))) * rectifier;
    return value * decay.shrink - (is_rectified ? adapted : plain);
  }
};

// McMahan et al. 2013, doi:10.1145/2487575.2488200, algorithm 1. The paper starts from values of 0.
// Here z starts where its formula gives the value that stands there, so that random or pre-trained
// values are not forgotten by the first update.
template <class T>
struct Ftrl {  // lr, beta, l1, l2
  static constexpr std::size_t kFull = 2;
  T lr, beta, l1, l2;
  bool is_first;
  static Ftrl of(const double* h, double t) {
    return {static_cast<T>(h[0]), static_cast<T>(h[1]), static_cast<T>(h[2]),
            static_cast<T>(h[3]), t == 1};
  }
  T operator()(T value, T grad, T& z, T& n) const {
    const T origin = value == 0 ? T{0} : -value * (beta / lr + l2) - std::copysign(l1, value);
    const T root = std::sqrt(n);
    n = n + grad * grad;
    const T next = std::sqrt(n);
    z = (is_first ? origin : z) + grad - (next - root) / lr * value;
    const T moved = -(z - std::copysign(l1, z)) / ((beta + next) / lr + l2);
    return std::abs(z) <= l1 ? T{0} : moved;
  }
};

// One accumulator per row, the mean of its squared gradients: a table of 64 columns needs 1/64 of
// Adagrad's memory. As in FBGEMM's row-wise Adagrad (Naumov et al. 2019, arXiv:1906.00091).
template <class T>
struct RowwiseAdagrad {  // lr, eps
  static constexpr std::size_t kFull = 0;
  static constexpr bool kHasRowState = true;
  T lr, eps, step;
  static RowwiseAdagrad of(const double* h, double) {
    return {static_cast<T>(-h[0]), static_cast<T>(h[1]), 0};
  }
  // Summed in lanes of a fixed number: the same bits whatever the width of the vectors.
  void enter(T& sum, const T* grad, std::size_t n) {
    constexpr std::size_t kLanes = 8;
    double lanes[kLanes] = {};
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
      for (std::size_t k = 0; k < kLanes; ++k) {
        const auto g = static_cast<double>(grad[i + k]);
        lanes[k] += g * g;
      }
    for (std::size_t k = 0; i < n; ++i, ++k) {
      const auto g = static_cast<double>(grad[i]);
      lanes[k] += g * g;
    }
    double total = 0;
    for (const double lane : lanes) total += lane;
    if (n != 0) sum = sum + static_cast<T>(total / static_cast<double>(n));
    step = lr / (std::sqrt(sum) + eps);
  }
  T operator()(T value, T grad) const { return value + step * grad; }
};

}  // namespace
}  // namespace ringcomm::ps
