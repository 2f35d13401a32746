# logitless_test(NAME SOURCES file... LABELS fast|slow|cuda [threads...] [LIBRARIES target...] [INSTALLED_API])
# One test program on GoogleTest; every TEST in it is a test of ctest named NAME.Suite.Case.
#   LABELS      exactly one of fast, slow and cuda (skips without a GPU); threads: ThreadSanitizer build, too
#   LIBRARIES   linked libraries beside GoogleTest
#   INSTALLED_API  links the shared library as users do; without it logitless_internal, which exposes all of src/
# Targets tests_fast, tests_slow and tests_threads build the programs of one label.
include(GoogleTest)

foreach(label fast slow cuda threads)
  if(NOT TARGET tests_${label})
    add_custom_target(tests_${label})
  endif()
endforeach()

set(LOGITLESS_TEST_OPTIONS "" CACHE STRING "Options of the compiler for the sources of the test programs alone")
set(logitless_test_options ${LOGITLESS_TEST_OPTIONS})
# GCC 12 with -O1 reports copies out of bounds in string + string + string, as with -Wrestrict in LogitlessSettings.cmake.
# AddressSanitizer finds real ones.
if(LOGITLESS_TEST_OPTIONS MATCHES "-O1" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  list(APPEND logitless_test_options -Wno-array-bounds -Wno-stringop-overflow)
endif()

# GNU gold links programs of a sanitizer build, which are large, in two thirds of the time.
option(LOGITLESS_GOLD "Link the test programs with gold where it is found" OFF)
if(LOGITLESS_GOLD)
  find_program(LOGITLESS_GOLD_LINKER ld.gold)
  if(LOGITLESS_GOLD_LINKER)
    add_link_options(-fuse-ld=gold)
  endif()
endif()

set(data_default "${PROJECT_SOURCE_DIR}/../shared/data")
if(DEFINED ENV{LOGITLESS_DATA_DIR})
  set(data_default "$ENV{LOGITLESS_DATA_DIR}")
endif()
set(LOGITLESS_DATA_DIR "${data_default}" CACHE PATH
    "Folder of real heads that some tests read; they are skipped when it is absent")

function(logitless_test name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "INSTALLED_API" "" "SOURCES;LABELS;LIBRARIES")
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "logitless_test(${name}): unknown arguments '${ARG_UNPARSED_ARGUMENTS}'")
  endif()
  if(NOT ARG_SOURCES)
    message(FATAL_ERROR "logitless_test(${name}): no SOURCES")
  endif()
  set(speed ${ARG_LABELS})
  list(FILTER speed INCLUDE REGEX "^(fast|slow|cuda)$")
  list(LENGTH speed speeds)
  if(NOT speeds EQUAL 1)
    message(FATAL_ERROR "logitless_test(${name}): LABELS is '${ARG_LABELS}'; expected one of fast, slow and cuda in it")
  endif()

  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  set(library logitless_internal)
  if(ARG_INSTALLED_API)
    set(library logitless::logitless)
  endif()
  target_link_libraries(${name} PRIVATE ${library} logitless_settings ${ARG_LIBRARIES} GTest::gtest_main)
  target_compile_options(${name} PRIVATE ${logitless_test_options})
  logitless_precompile(${name} tests_headers ${logitless_test_headers})

  # Discovers tests when ctest starts, not in the build: a program that crashes then fails as a test. Names omit the
  # values of parameters: a bracket in one would drop the test and its label from the list.
  gtest_discover_tests(${name} TEST_PREFIX "${name}." TEST_LIST ${name}_cases NO_PRETTY_VALUES
                       DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                       PROPERTIES ENVIRONMENT "LOGITLESS_DATA_DIR=${LOGITLESS_DATA_DIR}")
  # Sets labels in a file that ctest reads afterwards: gtest_discover_tests(PROPERTIES) cannot pass a list of them.
  set(script "${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake")
  file(CONFIGURE OUTPUT "${script}" @ONLY CONTENT [[
if(@name@_cases)
  set_tests_properties(${@name@_cases} PROPERTIES LABELS "@ARG_LABELS@")
else()  # gtest_discover_tests's name for a program that was not built: it fails
  set_tests_properties("@name@_NOT_BUILT" PROPERTIES LABELS "@ARG_LABELS@")
endif()
]])
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${script}")

  foreach(label IN LISTS ARG_LABELS)
    if(NOT TARGET tests_${label})
      add_custom_target(tests_${label})
    endif()
    add_dependencies(tests_${label} ${name})
  endforeach()
endfunction()
