# Imported targets over LibTorch. Its own find_package asks for a CUDA toolkit even where only the CPU half is used.
if(NOT EXISTS ${TAPETUNE_TORCH}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "TAPETUNE_TORCH=${TAPETUNE_TORCH} has no lib/libtorch_cpu.so; give the folder with lib and include.")
endif()
foreach(header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
  if(EXISTS ${TAPETUNE_TORCH}/include/${header})
    file(STRINGS ${TAPETUNE_TORCH}/include/${header} lines REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
    string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" torch_version "${lines}")
    break()
  endif()
endforeach()
if(torch_version VERSION_LESS 2.8)
  message(FATAL_ERROR "LibTorch ${torch_version} in ${TAPETUNE_TORCH} is too old: 2.8 or newer is needed.")
endif()
message(STATUS "LibTorch ${torch_version}: ${TAPETUNE_TORCH}")

if(TARGET tapetune_torch) # found before
  return()
endif()
add_library(tapetune_torch INTERFACE)
# After the system's folders, because LibTorch carries headers of other libraries (fmt) in other versions.
target_compile_options(tapetune_torch INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter \"${TAPETUNE_TORCH}/include\">"
  "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter \"${TAPETUNE_TORCH}/include/torch/csrc/api/include\">")
target_compile_definitions(tapetune_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
target_link_libraries(tapetune_torch INTERFACE ${TAPETUNE_TORCH}/lib/libtorch_cpu.so ${TAPETUNE_TORCH}/lib/libc10.so)
target_link_options(tapetune_torch INTERFACE "LINKER:-rpath,${TAPETUNE_TORCH}/lib")

# One OpenMP runtime in the process: the wheel brings its own, and a second one would fight it for the cores.
file(GLOB torch_gomp ${TAPETUNE_TORCH}/lib/libgomp*.so*)
if(TARGET OpenMP::OpenMP_CXX)
  # the caller's choice
elseif(torch_gomp)
  list(GET torch_gomp 0 torch_gomp)
  add_library(OpenMP::OpenMP_CXX INTERFACE IMPORTED)
  set_target_properties(OpenMP::OpenMP_CXX PROPERTIES
    INTERFACE_COMPILE_OPTIONS $<$<COMPILE_LANGUAGE:CXX>:-fopenmp> INTERFACE_LINK_LIBRARIES ${torch_gomp})
else()
  find_package(OpenMP REQUIRED)
endif()
