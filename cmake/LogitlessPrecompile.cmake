# Headers that are parsed once for many files. TESTS: gtest.h, for the test programs. Each of their files includes it, so
# that no missing include is hidden. ALL, for sanitizer builds: those of the standard library, too, for all targets. A file
# that forgets to include one of these compiles there, and does not compile in a release.
set(LOGITLESS_PRECOMPILE OFF CACHE STRING "Precompiled headers: OFF, TESTS (gtest.h) or ALL (the standard library's, too)")
set_property(CACHE LOGITLESS_PRECOMPILE PROPERTY STRINGS OFF TESTS ALL)
if(NOT LOGITLESS_PRECOMPILE MATCHES "^(OFF|TESTS|ALL)$")
  message(FATAL_ERROR "LOGITLESS_PRECOMPILE is '${LOGITLESS_PRECOMPILE}'; expected OFF, TESTS or ALL")
endif()

set(logitless_std_headers "")
if(LOGITLESS_PRECOMPILE STREQUAL "ALL")
  set(logitless_std_headers <algorithm> <array> <cmath> <cstdint> <cstring> <functional> <map> <memory> <numeric>
      <optional> <set> <span> <string> <string_view> <utility> <vector>)
endif()

# logitless_precompile(TARGET OWNER header...): the headers, if any, come first in every C++ file of TARGET. OWNER is the
# target that compiles them: TARGET itself, or another of the same kind (library or program) and optimisation, none of
# whose macros TARGET leaves out. GCC warns of headers that it cannot use and parses them.
function(logitless_precompile target owner)
  if(NOT ARGN)
    return()
  endif()
  if(target STREQUAL owner)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  else()
    target_precompile_headers(${target} REUSE_FROM ${owner})
  endif()
  # ccache needs -fpch-preprocess, and below its sloppiness, to tell precompiled headers apart.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
  if(LOGITLESS_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-error=invalid-pch>)
  endif()
  if(LOGITLESS_ENV AND CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache$")
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER
      "${LOGITLESS_ENV};CCACHE_SLOPPINESS=pch_defines,time_macros;${CMAKE_CXX_COMPILER_LAUNCHER}")
  endif()
endfunction()
