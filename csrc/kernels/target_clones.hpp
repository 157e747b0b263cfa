#pragma once

// A function with all that it calls, compiled for several instruction sets, one of which is chosen
// when the library is loaded: too early for ThreadSanitizer, hence RINGCOMM_NO_CLONES. Clang 22 takes
// no "flatten" beside the clones: CMakeLists.txt has it inline without a limit in these files.
#if !defined(__x86_64__) || defined(RINGCOMM_NO_CLONES)
#define RINGCOMM_CLONES_FOR(...)
#elif defined(__clang__) && __clang_major__ >= 18
#define RINGCOMM_CLONES_FOR(...) __attribute__((target_clones(__VA_ARGS__, "default")))
#elif !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12
#define RINGCOMM_CLONES_FOR(...) __attribute__((flatten, target_clones(__VA_ARGS__, "default")))
#else
#define RINGCOMM_CLONES_FOR(...)
#endif
#define RINGCOMM_CLONES RINGCOMM_CLONES_FOR("arch=x86-64-v4", "arch=x86-64-v3")
