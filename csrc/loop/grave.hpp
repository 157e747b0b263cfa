// Keeps what peers may still write into.
#pragma once
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ringcomm {

// What is buried is never freed, also when the process ends.
template <class T, class D>
void bury(std::unique_ptr<T, D> body) {
  static auto* mutex = new std::mutex;
  static auto* grave = new std::vector<std::unique_ptr<T, D>>;
  const std::lock_guard lock(*mutex);
  grave->push_back(std::move(body));
}

}  // namespace ringcomm
