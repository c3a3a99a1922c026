# The Rust crate of src/hf as a static library. Cargo's target folder is shared by all checkouts, so that the
# dependencies (three minutes) compile once a machine; the crate's own result is copied into the build folder.
find_program(CARGO cargo REQUIRED)
set(rust_target ${TAPETUNE_CACHE}/cargo)
set(rust_out ${CMAKE_BINARY_DIR}/rust)
file(GLOB rust_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/hf/src/*.rs)
file(MAKE_DIRECTORY ${rust_out}/include ${rust_target})
add_custom_command(
  OUTPUT ${rust_out}/libtapetune_hf.a ${rust_out}/include/hf_bridge.h ${rust_out}/include/rust/cxx.h
  COMMAND flock ${rust_target}/tapetune.lock ${CMAKE_SOURCE_DIR}/tools/cmake/build-rust
    ${CARGO} ${CMAKE_SOURCE_DIR}/src/hf ${rust_target} ${rust_out}
  DEPENDS ${rust_sources} ${CMAKE_SOURCE_DIR}/src/hf/build.rs ${CMAKE_SOURCE_DIR}/src/hf/Cargo.toml
    ${CMAKE_SOURCE_DIR}/src/hf/Cargo.lock ${CMAKE_SOURCE_DIR}/tools/cmake/build-rust
  COMMENT "Building the Rust crate (three minutes the first time on a machine)"
  USES_TERMINAL VERBATIM)
add_custom_target(tapetune_rust_build DEPENDS ${rust_out}/libtapetune_hf.a)
add_library(tapetune_rust INTERFACE)
add_dependencies(tapetune_rust tapetune_rust_build)
target_include_directories(tapetune_rust SYSTEM INTERFACE ${rust_out}/include)
target_link_libraries(tapetune_rust INTERFACE ${rust_out}/libtapetune_hf.a pthread dl m)
