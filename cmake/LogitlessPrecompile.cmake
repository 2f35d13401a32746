# Sanitizer builds, whose presets ask for it, parse the headers of the standard library and of GoogleTest once. Other
# builds parse them in every file, so that a file which forgets to include one does not compile there.
option(LOGITLESS_PRECOMPILE "Precompile the headers of the standard library and of GoogleTest" OFF)

set(logitless_std_headers <algorithm> <array> <cmath> <cstdint> <cstring> <functional> <map> <memory> <numeric> <optional>
    <set> <span> <string> <string_view> <utility> <vector>)

# logitless_precompile(TARGET OWNER header...): the headers come first in every C++ file of TARGET. OWNER is the target
# that compiles them: TARGET itself, or another of the same kind (library or program) and optimisation, none of whose
# macros TARGET leaves out. GCC warns of headers that it cannot use and parses them.
function(logitless_precompile target owner)
  if(NOT LOGITLESS_PRECOMPILE)
    return()
  endif()
  if(target STREQUAL owner)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  else()
    target_precompile_headers(${target} REUSE_FROM ${owner})
  endif()
  # ccache needs it to tell precompiled headers apart.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
endfunction()
