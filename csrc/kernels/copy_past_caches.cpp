#include "copy_past_caches.hpp"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ringcomm {

#if defined(__SSE2__)  // part of x86-64

void copy_streamed(void* out, const void* x, std::size_t nbytes) {
  constexpr std::size_t kLine = 64;
  auto* to = static_cast<std::byte*>(out);
  const auto* from = static_cast<const std::byte*>(x);
  if (nbytes < kStreamed) {
    if (nbytes != 0) std::memcpy(to, from, nbytes);
    return;
  }
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kLine;
  std::memcpy(to, from, head);
  std::size_t done = head;
  for (; done + kLine <= nbytes; done += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from + done);
    auto* target = reinterpret_cast<__m128i*>(to + done);
    const __m128i line[] = {_mm_loadu_si128(source), _mm_loadu_si128(source + 1),
                            _mm_loadu_si128(source + 2), _mm_loadu_si128(source + 3)};
    for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, line[i]);
  }
  std::memcpy(to + done, from + done, nbytes - done);
  _mm_sfence();  // streamed stores are ordered by nothing else
}

#else

void copy_streamed(void* out, const void* x, std::size_t nbytes) {
  if (nbytes != 0) std::memcpy(out, x, nbytes);
}

#endif

}  // namespace ringcomm
