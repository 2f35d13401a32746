# Language, warnings, optimisation and dependencies for the whole tree.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()

# Shares compiled objects between checkouts. Paths below the checkout are hashed as relative ones. The compiler's
# working directory, which debug information contains, is not hashed.
find_program(LOGITLESS_CCACHE ccache)
find_program(LOGITLESS_ENV env)
if(LOGITLESS_CCACHE)
  set(logitless_launcher ${LOGITLESS_CCACHE})
  if(LOGITLESS_ENV)
    set(logitless_launcher ${LOGITLESS_ENV} CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${LOGITLESS_CCACHE})
  endif()
endif()
if(LOGITLESS_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${logitless_launcher})
endif()

# Disables contraction: a*b+c is fused only where the code says so, so that results do not depend on the compiler.
add_library(logitless_settings INTERFACE)
target_compile_options(logitless_settings INTERFACE -Wall -Wextra -Wshadow -ffp-contract=off
                       $<$<BOOL:${LOGITLESS_WARNINGS_AS_ERRORS}>:-Werror>)
# GCC 12 reports overlapping copies in every string + string (its bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(logitless_settings INTERFACE -Wno-restrict)
endif()
target_include_directories(logitless_settings INTERFACE
                           $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)

find_package(Threads REQUIRED)
