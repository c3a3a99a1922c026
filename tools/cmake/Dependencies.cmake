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

if(BUILD_TESTING OR NOT DEFINED BUILD_TESTING)
  find_package(Catch2 QUIET) # version 2 or 3
  if(NOT Catch2_FOUND)
    tapetune_fetch(Catch2 ${github}/catchorg/Catch2/archive/v3.6.0.tar.gz
      485932259a75c7c6b72d4b874242c489ea5155d17efa345eb8cc72159f49f356)
  endif()
endif()
