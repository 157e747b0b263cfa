// The floating-point environment (rounding, subnormals) that all threads compute in.
#pragma once
#include <cstdint>

namespace ringcomm {

// While it lives, this thread's sums are those of IEEE 754: rounded to nearest, with subnormal numbers.
// A thread has the rounding and the flushing to zero that somebody has set in it, as
// torch.set_flush_denormal() does: ranks, and threads of one rank, would come to different bits.
class DefaultFpEnvironment {
 public:
  DefaultFpEnvironment() : before_(read()) {
    if ((before_ & kDeviations) != 0) write(before_ & ~kDeviations);
  }
  DefaultFpEnvironment(const DefaultFpEnvironment&) = delete;
  DefaultFpEnvironment& operator=(const DefaultFpEnvironment&) = delete;
  ~DefaultFpEnvironment() {
    if ((before_ & kDeviations) != 0) write(before_);
  }

 private:
  // What is computed in between stays there: it is loaded and stored, and these touch memory.
#if defined(__x86_64__)
  using Word = std::uint32_t;
  static constexpr Word kDeviations = 0x8000 | 0x6000 | 0x40;  // of MXCSR: FTZ, RC, DAZ

  static Word read() {
    Word word;
    asm volatile("stmxcsr %0" : "=m"(word));
    return word;
  }
  static void write(Word word) { asm volatile("ldmxcsr %0" : : "m"(word) : "memory"); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  // Of FPCR: DN, FZ, RMode, FZ16, AH, FIZ.
  static constexpr Word kDeviations = 1 << 25 | 1 << 24 | 3 << 22 | 1 << 19 | 1 << 1 | 1;

  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
  using Word = std::uint32_t;
  static constexpr Word kDeviations = 0;

  static Word read() { return 0; }
  static void write(Word) {}
#endif

  const Word before_;
};

}  // namespace ringcomm
