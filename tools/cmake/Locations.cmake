# TAPETUNE_TORCH: the folder with LibTorch's lib and include, from the command line, the environment, or tools/setup
# (which keeps a folder that the environment once named in build/torch).
if(NOT DEFINED TAPETUNE_TORCH AND NOT "$ENV{TAPETUNE_TORCH}" STREQUAL "")
  set(TAPETUNE_TORCH $ENV{TAPETUNE_TORCH})
endif()
if(NOT TAPETUNE_TORCH AND NOT TAPETUNE_FUZZ)
  execute_process(COMMAND ${CMAKE_CURRENT_LIST_DIR}/../setup --where
    OUTPUT_VARIABLE TAPETUNE_TORCH OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "LibTorch was not found: run tools/setup, or set TAPETUNE_TORCH to its folder.")
  endif()
endif()

# What all checkouts share: downloads and compiled Rust crates.
if(NOT "$ENV{TAPETUNE_CACHE}" STREQUAL "")
  set(TAPETUNE_CACHE $ENV{TAPETUNE_CACHE})
elseif(NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
  set(TAPETUNE_CACHE $ENV{XDG_CACHE_HOME}/tapetune)
else()
  set(TAPETUNE_CACHE $ENV{HOME}/.cache/tapetune)
endif()
