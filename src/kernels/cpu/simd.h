// How the inner loops are compiled: for several instruction sets, of which the loader picks the widest that the machine
// has. With gcc on x86 and without sanitizers; elsewhere once, for what the compiler takes by default.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define TAPETUNE_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// Where code for the widest has another shape: two functions, between which has_wide_vectors() decides.
#define TAPETUNE_WIDE __attribute__((target("arch=x86-64-v4")))
#define TAPETUNE_NARROW __attribute__((target_clones("arch=x86-64-v3", "default")))
inline bool has_wide_vectors() { return __builtin_cpu_supports("x86-64-v4") != 0; }
#else
#define TAPETUNE_SIMD
#define TAPETUNE_WIDE
#define TAPETUNE_NARROW
inline bool has_wide_vectors() { return false; }
#endif
// Helpers must become part of each clone.
#define TAPETUNE_INLINE inline __attribute__((always_inline))
