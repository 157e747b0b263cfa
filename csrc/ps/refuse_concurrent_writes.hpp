// Guards of a partition: they refuse reads and writes at the same time.
#pragma once
#include <stdexcept>

#include "hash_partition.hpp"

namespace ringcomm::ps {

class HashPartition::Reading {
 public:
  explicit Reading(const HashPartition& rows) : Reading(rows.common_->users) {}
  explicit Reading(Users& users) : users_(users) {
    if (users_.fetch_add(1, std::memory_order_acquire) >= 0) return;
    users_.fetch_sub(1, std::memory_order_relaxed);
    throw std::logic_error("rows: read while another thread writes to the same partition");
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
  ~Reading() { users_.fetch_sub(1, std::memory_order_release); }

 private:
  std::atomic<std::int32_t>& users_;
};

class HashPartition::Writing {
 public:
  explicit Writing(const HashPartition& rows) : Writing(rows.common_->users) {}
  explicit Writing(Users& users) : users_(users) {
    std::int32_t nobody = 0;
    if (users_.compare_exchange_strong(nobody, kWriter, std::memory_order_acquire)) return;
    throw std::logic_error("rows: written while another thread uses the same partition");
  }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;
  ~Writing() { users_.fetch_sub(kWriter, std::memory_order_release); }

 private:
  static constexpr std::int32_t kWriter = -(1 << 30);
  std::atomic<std::int32_t>& users_;
};

}  // namespace ringcomm::ps
