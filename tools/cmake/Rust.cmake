# The Rust crate of src/hf as a static library. Cargo's target folder is shared by all checkouts, so that the
# dependencies (three minutes) compile once a machine; the crate's own result is copied into the build folder.
# tools/setup keeps the folder of the cargo that it chose, which may be on no PATH.
set(rust_bin)
if(EXISTS ${TAPETUNE_CACHE}/rust)
  file(STRINGS ${TAPETUNE_CACHE}/rust rust_bin LIMIT_COUNT 1)
endif()
find_program(CARGO cargo HINTS ${rust_bin} NO_CACHE REQUIRED)
set(rust_target ${TAPETUNE_CACHE}/cargo)
set(rust_out ${CMAKE_BINARY_DIR}/rust)
file(MAKE_DIRECTORY ${rust_out}/include ${rust_target})
add_subdirectory(${CMAKE_SOURCE_DIR}/src/hf)
add_library(tapetune_rust INTERFACE)
target_include_directories(tapetune_rust SYSTEM INTERFACE ${rust_out}/include)
target_link_libraries(tapetune_rust INTERFACE ${rust_out}/libtapetune_hf.a pthread dl m)
