# Third-party libraries: the distribution's packages first, pinned sources where it has none.
include(FetchContent)
set(FETCHCONTENT_QUIET OFF)

function(tapetune_fetch name url hash)
  message(STATUS "${name} is not installed; fetching ${url}")
  FetchContent_Declare(${name} URL ${url} URL_HASH SHA256=${hash} DOWNLOAD_EXTRACT_TIMESTAMP ON)
  FetchContent_MakeAvailable(${name})
endfunction()

set(github https://github.com)
find_package(fmt 9 QUIET)
if(NOT fmt_FOUND)
  set(FMT_INSTALL ON)
  tapetune_fetch(fmt ${github}/fmtlib/fmt/archive/10.2.1.tar.gz
    1250e4cc58bf06ee631567523f48848dc4596133e163f02615c97f78bab6c811)
endif()

find_package(spdlog 1.10 QUIET)
if(NOT spdlog_FOUND)
  set(SPDLOG_FMT_EXTERNAL ON)
  set(SPDLOG_INSTALL ON)
  tapetune_fetch(spdlog ${github}/gabime/spdlog/archive/v1.13.0.tar.gz
    534f2ee1a4dcbeb22249856edfb2be76a1cf4f708a20b0ac2ed090ee24cfdbc9)
endif()

find_package(nlohmann_json 3.10 QUIET)
if(NOT nlohmann_json_FOUND)
  set(JSON_Install ON)
  tapetune_fetch(nlohmann_json ${github}/nlohmann/json/releases/download/v3.11.3/json.tar.xz
    d6c65aca6b1ed68e7a182f4757257b107ae403032760ed6ef121c9d55e81757d)
endif()

find_package(CLI11 2.1 QUIET)
if(NOT CLI11_FOUND)
  tapetune_fetch(CLI11 ${github}/CLIUtils/CLI11/archive/v2.4.2.tar.gz
    f2d893a65c3b1324c50d4e682c0cdc021dd0477ae2c048544f39eed6654b699a)
endif()

find_package(yaml-cpp 0.7 QUIET)
if(NOT yaml-cpp_FOUND)
  set(YAML_CPP_INSTALL ON)
  tapetune_fetch(yaml-cpp ${github}/jbeder/yaml-cpp/archive/0.8.0.tar.gz
    fbe74bbdcee21d656715688706da3c8becfd946d92cd44705cc6098bb23b3a16)
endif()
if(NOT TARGET yaml-cpp) # from 0.8 on
  add_library(yaml-cpp ALIAS yaml-cpp::yaml-cpp)
endif()

# What reads .gz and .zst.
find_package(ZLIB QUIET)
find_path(ZSTD_INCLUDE_DIR zstd.h)
find_library(ZSTD_LIBRARY zstd)
if(NOT ZLIB_FOUND OR NOT ZSTD_INCLUDE_DIR OR NOT ZSTD_LIBRARY)
  message(FATAL_ERROR "zlib or libzstd was not found: run tools/setup, or install zlib1g-dev and libzstd-dev.")
endif()
add_library(tapetune_unpackers INTERFACE)
target_include_directories(tapetune_unpackers SYSTEM INTERFACE ${ZSTD_INCLUDE_DIR})
target_link_libraries(tapetune_unpackers INTERFACE ZLIB::ZLIB ${ZSTD_LIBRARY})

# What our programs set before main(): OpenMP's waiting and the heap. Sanitizers bring their own heap, and a library leaves
# both to whoever links it.
add_library(tapetune_program INTERFACE)
find_library(JEMALLOC_LIBRARY jemalloc)
if(NOT (TAPETUNE_SANITIZE OR TAPETUNE_TSAN OR TAPETUNE_FUZZ))
  target_sources(tapetune_program INTERFACE ${CMAKE_SOURCE_DIR}/src/core/openmp_start.cpp)
  if(JEMALLOC_LIBRARY)
    target_sources(tapetune_program INTERFACE ${CMAKE_SOURCE_DIR}/src/core/heap.cpp)
    target_link_libraries(tapetune_program INTERFACE ${JEMALLOC_LIBRARY})
  else()
    message(STATUS "jemalloc is not installed (libjemalloc-dev): training will need up to 1.5 times the memory")
  endif()
endif()

if(TAPETUNE_SANITIZE)
  target_sources(tapetune_program INTERFACE ${CMAKE_SOURCE_DIR}/src/core/sanitizer_start.cpp)
endif()

if(BUILD_TESTING OR NOT DEFINED BUILD_TESTING)
  find_package(Catch2 QUIET) # version 2 or 3
  if(NOT Catch2_FOUND)
    tapetune_fetch(Catch2 ${github}/catchorg/Catch2/archive/v3.6.0.tar.gz
      485932259a75c7c6b72d4b874242c489ea5155d17efa345eb8cc72159f49f356)
  endif()
endif()
