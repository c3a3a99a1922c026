# Compiler, linker and cache settings shared by all targets: link tapetune_options privately.
add_library(tapetune_options INTERFACE)
target_compile_options(tapetune_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic>)
if(TAPETUNE_WERROR) # not for users, whose compilers know warnings that ours does not
  target_compile_options(tapetune_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror;-Wno-error=deprecated-declarations>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(tapetune_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>) # gcc 12 sees overlaps in std::string that are none
endif()
# For targets that take longer to optimise than they run. They share a precompiled header with code at -O3, which gcc 13
# and newer refuse unless these two flags, which -O2 sets, agree.
set(light_optimisation -O1)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13
    AND CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64)
  list(APPEND light_optimisation -munroll-only-small-loops -mvzeroupper)
endif()
# The standard library's own checks (an index or a span outside of its range), which do not change the ABI.
if(TAPETUNE_SANITIZE)
  target_compile_definitions(tapetune_options INTERFACE _GLIBCXX_ASSERTIONS)
else()
  target_compile_definitions(tapetune_options INTERFACE $<$<CONFIG:Debug>:_GLIBCXX_ASSERTIONS>)
endif()
if(TAPETUNE_SANITIZE) # undefined behaviour ends the program, as a bad address does: a test must not pass with a message
  set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=undefined)
  # What the checks add to the code makes gcc see uninitialised variables in inlined headers that are none.
  target_compile_options(tapetune_options INTERFACE ${sanitizers} -fno-omit-frame-pointer -Wno-maybe-uninitialized)
  target_link_options(tapetune_options INTERFACE ${sanitizers})
endif()

find_program(CCACHE ccache)
if(CCACHE)
  # A precompiled header confuses ccache's checks of time stamps and macros; paths relative to the source folder let
  # another checkout use the same results.
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime CCACHE_PCH_EXTSUM=1 ${CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endif()

find_program(MOLD mold)
if(MOLD AND NOT TAPETUNE_FUZZ)
  if(CMAKE_CXX_COMPILER_ID STREQUAL Clang OR CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12.1)
    add_link_options(-fuse-ld=mold)
  endif()
endif()
