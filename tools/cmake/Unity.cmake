# tapetune_unity(TARGET [UNITS]): compiles the sources of each folder as one translation unit, or those of the whole
# target as UNITS of them. Most of a build's work is parsing the same headers for every file; small folders share a
# unit. Sources with compiler options of their own are compiled alone: CMake leaves them out.
function(tapetune_unity target)
  set(index 0)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    if(ARGC GREATER 1)
      math(EXPR group "${index} % ${ARGV1}")
      math(EXPR index "${index} + 1")
    else()
      string(REGEX MATCH "^(src/)?[^/]+" group ${source}) # src/kernels, adapters
      string(REGEX REPLACE "^src/train$" "src/run" group "${group}")
      string(REGEX REPLACE "^src/compare$" "src/report" group "${group}")
      string(REGEX REPLACE "^src/export$" "src/plan" group "${group}")
      string(MAKE_C_IDENTIFIER "${group}" group)
    endif()
    set_property(SOURCE ${source} PROPERTY UNITY_GROUP ${group})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${TAPETUNE_UNITY} UNITY_BUILD_MODE GROUP)
endfunction()
