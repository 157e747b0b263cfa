// What target_clones and __builtin_cpu_supports ask of the compiler's runtime library. That of zig
// (0.17) says of every processor that it has none of these instructions. The names and the numbers
// are those of GCC, gcc/common/config/i386/i386-cpuinfo.h, which Clang has taken over. GCC's own
// library is right, and is left alone.
#if defined(__clang__) && defined(__x86_64__)

#include <cpuid.h>

#include <cstdint>

#define RINGCOMM_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

struct RingcommCpuModel {
  unsigned vendor, type, subtype, features[1];
};

RINGCOMM_HIDDEN RingcommCpuModel __cpu_model = {};
RINGCOMM_HIDDEN unsigned __cpu_features2[4] = {};
RINGCOMM_HIDDEN int __cpu_indicator_init();
}

namespace {

enum Feature : unsigned { kAvx2 = 10, kF16c = 49, kX86_64_v3 = 97, kX86_64_v4 = 98 };

struct Cpuid {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Cpuid cpuid(unsigned leaf) {
  Cpuid x;
  __get_cpuid_count(leaf, 0, &x.eax, &x.ebx, &x.ecx, &x.edx);  // zeros if it has no such leaf
  return x;
}

bool has_all(unsigned word, unsigned bits) { return (word & bits) == bits; }

// Which registers the kernel saves.
std::uint64_t saved_registers() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

void set(Feature feature) {
  if (feature < 32)
    __cpu_model.features[0] |= 1u << feature;
  else
    __cpu_features2[feature / 32 - 1] |= 1u << feature % 32;
}

}  // namespace

// Called by resolvers before this library is relocated: it may use nothing of another library.
__attribute__((constructor(101))) int __cpu_indicator_init() {
  const Cpuid base = cpuid(1), more = cpuid(7), extended = cpuid(0x80000001);
  if (!has_all(base.ecx, bit_OSXSAVE | bit_AVX)) return 0;
  const std::uint64_t saved = saved_registers();
  constexpr std::uint64_t ymm = 0x6, zmm = 0xe6;
  if ((saved & ymm) != ymm) return 0;
  if (more.ebx & bit_AVX2) set(kAvx2);
  if (base.ecx & bit_F16C) set(kF16c);
  const bool is_v3 =
      has_all(base.ecx, bit_SSE3 | bit_SSSE3 | bit_FMA | bit_CMPXCHG16B | bit_SSE41 | bit_SSE42 |
                            bit_MOVBE | bit_POPCNT | bit_F16C) &&
      has_all(more.ebx, bit_BMI | bit_AVX2 | bit_BMI2) &&
      has_all(extended.ecx, bit_LAHF_LM | bit_LZCNT);
  if (!is_v3) return 0;
  set(kX86_64_v3);
  if ((saved & zmm) == zmm &&
      has_all(more.ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL))
    set(kX86_64_v4);
  return 0;
}

#endif
