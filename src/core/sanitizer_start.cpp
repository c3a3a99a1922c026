// What the address sanitizer reads before main(), in programs of the cpu-asan build.

extern "C" const char* __asan_default_options();  // NOLINT(bugprone-reserved-identifier): the sanitizer's name

const char* __asan_default_options() {  // NOLINT(bugprone-reserved-identifier)
  return
      // LibTorch is not instrumented: elements that it appends to a vector of ours look as if they were not there.
      "detect_container_overflow=0:"
      // What cannot be allocated ends in std::bad_alloc, as in other builds.
      "allocator_may_return_null=1";
}
