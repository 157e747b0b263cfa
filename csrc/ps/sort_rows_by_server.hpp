// Sorts keys by server; copies rows to where a server reads them, and checks that they are finite.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../kernels/dtype_and_op_codes.hpp"

namespace ringcomm::ps {

// Copies n rows of `dim` floats, the order[i]-th first (null: in their order). Returns whether all
// of them are finite.
bool stage_rows(void* out, const void* rows, const std::int64_t* order, std::size_t n,
                std::size_t dim, DType dtype);

// Returns whether none of n floats is NaN or inf.
bool all_finite(const void* x, std::size_t n, DType dtype);

// The keys of one call, and the server of each partition of its table.
struct CallKeys {
  const std::uint64_t* keys;
  std::size_t n;
  const std::uint32_t* owners;
};

// Sorts the keys of calls by server; those of a server by call, and then as they come. order: which
// of its call's keys each is. counts: how many, by server and call. Throws std::out_of_range if an
// owner is not one of n_servers.
void deal_keys(const std::vector<CallKeys>& calls, std::uint32_t n_parts, std::size_t n_servers,
               std::uint64_t* keys, std::int64_t* order, std::int64_t* counts);

}  // namespace ringcomm::ps
