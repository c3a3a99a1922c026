# cmake --install, and find_package(tapetune) for programs that use it as a library.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tapetune)
install(TARGETS tapetune_cli RUNTIME)
install(TARGETS tapetune tapetune_commands tapetune_formats EXPORT tapetune ARCHIVE)
install(FILES ${rust_out}/libtapetune_hf.a DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY adapters DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tapetune FILES_MATCHING PATTERN "*.h")
install(DIRECTORY src/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tapetune FILES_MATCHING PATTERN "*.h"
  PATTERN cli EXCLUDE PATTERN cpu EXCLUDE PATTERN pch.h EXCLUDE)
install(FILES src/cli/run.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tapetune/cli)
# What a program of ours sets before main(), compiled into the program itself.
install(FILES src/core/openmp_start.cpp src/core/heap.cpp DESTINATION ${CMAKE_INSTALL_DATADIR}/tapetune/program)
install(DIRECTORY recipes/ DESTINATION ${CMAKE_INSTALL_DATADIR}/tapetune/recipes)
install(EXPORT tapetune NAMESPACE tapetune:: FILE tapetuneTargets.cmake DESTINATION ${package_dir})
configure_package_config_file(tools/cmake/tapetuneConfig.cmake.in ${CMAKE_BINARY_DIR}/tapetuneConfig.cmake
  INSTALL_DESTINATION ${package_dir} PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_DATADIR)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/tapetuneConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/tapetuneConfig.cmake ${CMAKE_BINARY_DIR}/tapetuneConfigVersion.cmake
  tools/cmake/Torch.cmake DESTINATION ${package_dir})
