// Numbers that Python passes for an enumeration: they are checked here, and cast nowhere else.
//
// An enumeration that crosses the boundary has the codes 0, 1, ... and a last(E), beside it.
#pragma once
#include <cstddef>
#include <stdexcept>
#include <string>

namespace ringcomm {

template <class E>
constexpr std::size_t n_codes = static_cast<std::size_t>(last(E{})) + 1;

// Throws std::invalid_argument for a code that E does not have.
template <class E>
E from_code(const char* what, int code) {
  if (code < 0 || static_cast<std::size_t>(code) >= n_codes<E>)
    throw std::invalid_argument(std::string(what) + " " + std::to_string(code) +
                                ": the codes are 0 to " + std::to_string(n_codes<E> - 1));
  return static_cast<E>(code);
}

}  // namespace ringcomm
