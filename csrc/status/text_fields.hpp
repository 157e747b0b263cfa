// Texts in fields of fixed size of the status page.
#pragma once
#include <algorithm>
#include <cstring>
#include <string>

namespace ringcomm {

inline bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

// Texts are UTF-8 and are cut between characters, never within one.
template <std::size_t N>
void store_text(char (&field)[N], const std::string& text) {
  std::size_t n = std::min(text.size(), N - 1);
  while (n > 0 && n < text.size() && is_continuation(text[n])) --n;
  std::memcpy(field, text.data(), n);
  field[n] = '\0';
}

template <std::size_t N>
void store_tail(char (&field)[N], const std::string& text) {
  std::size_t start = text.size() < N ? 0 : text.size() - (N - 1);
  while (start < text.size() && is_continuation(text[start])) ++start;
  store_text(field, text.substr(start));
}

template <std::size_t N>
std::string load_text(const char (&field)[N]) {
  return std::string(field, strnlen(field, N));
}

}  // namespace ringcomm
