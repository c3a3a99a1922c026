# The CUDA compiler of the Python wheels beside LibTorch (tools/setup --full), unless CMAKE_CUDA_COMPILER names another.
if(TAPETUNE_CUDA)
  get_filename_component(cuda_wheels ${TAPETUNE_TORCH}/../nvidia ABSOLUTE)
  set(cuda_root ${cuda_wheels}/cu13)
  if(NOT CMAKE_CUDA_COMPILER)
    if(NOT EXISTS ${cuda_root}/bin/nvcc)
      message(FATAL_ERROR "No CUDA compiler beside LibTorch: run tools/setup --full, or set CMAKE_CUDA_COMPILER.")
    endif()
    set(CMAKE_CUDA_COMPILER ${cuda_root}/bin/nvcc)
  endif()
  # CMake 3.25 knows neither C++20 for nvcc nor where the wheels keep libcudart.
  set(CMAKE_CUDA_FLAGS_INIT "-std=c++20 -L${cuda_root}/lib")
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90) # A100; H100, and what comes after through its intermediate code
  endif()
endif()

function(tapetune_enable_cuda target kernels wrappers)
  # Apart from the rest, because CMake 3.25 would pass on the C++ standard and believes that nvcc has no C++20.
  add_library(tapetune_cuda STATIC ${kernels})
  set_property(TARGET tapetune_cuda PROPERTY CXX_STANDARD)
  target_include_directories(tapetune_cuda PRIVATE ${CMAKE_SOURCE_DIR}/src)
  target_sources(${target} PRIVATE ${wrappers})
  target_compile_definitions(${target} PUBLIC TAPETUNE_CUDA) # public, or the shared precompiled header would not fit
  target_include_directories(${target} SYSTEM PRIVATE ${cuda_root}/include ${cuda_wheels}/nccl/include)
  target_link_libraries(${target} PUBLIC $<BUILD_INTERFACE:tapetune_cuda> -Wl,--no-as-needed
    ${TAPETUNE_TORCH}/lib/libtorch_cuda.so ${TAPETUNE_TORCH}/lib/libc10_cuda.so ${cuda_root}/lib/libcudart.so.13 -Wl,--as-needed)
  target_link_options(${target} PUBLIC "LINKER:-rpath,${cuda_root}/lib")
endfunction()
