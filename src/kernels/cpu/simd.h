// How the inner loops are compiled: for several instruction sets, of which the loader picks the widest that the machine
// has. With gcc on x86 and without sanitizers; elsewhere once, for what the compiler takes by default.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define TAPETUNE_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TAPETUNE_SIMD
#endif
// Helpers must become part of each clone.
#define TAPETUNE_INLINE inline __attribute__((always_inline))
