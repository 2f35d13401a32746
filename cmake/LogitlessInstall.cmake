# Installation: the shared library, its headers, the logitless command, find_package(logitless) and pkg-config. The
# library contains all that it links: users of an installed logitless need no other package.

# The version is written in two files that must agree: project() and the public header.
file(READ "${PROJECT_SOURCE_DIR}/include/logitless/version.h" version_header)
foreach(part MAJOR MINOR PATCH)
  string(REGEX MATCH "LOGITLESS_VERSION_${part} ([0-9]+)" found "${version_header}")
  if(NOT found OR NOT CMAKE_MATCH_1 EQUAL PROJECT_VERSION_${part})
    message(FATAL_ERROR "LOGITLESS_VERSION_${part} of include/logitless/version.h is '${CMAKE_MATCH_1}'; "
                        "the version in CMakeLists.txt is ${PROJECT_VERSION}")
  endif()
endforeach()

if(NOT LOGITLESS_INSTALL)
  return()
endif()
include(CMakePackageConfigHelpers)

install(TARGETS logitless EXPORT logitless_targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/logitless DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h")

# Relative path from bin/ to the library, which survives a moved prefix.
file(RELATIVE_PATH bin_to_lib "${CMAKE_INSTALL_FULL_BINDIR}" "${CMAKE_INSTALL_FULL_LIBDIR}")
if(TARGET logitless_cli)
  set_target_properties(logitless_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${bin_to_lib}")
  install(TARGETS logitless_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# All installed targets and nothing else: `make install` builds this.
add_custom_target(installed DEPENDS logitless)
if(TARGET logitless_cli)
  add_dependencies(installed logitless_cli)
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/logitless)
install(EXPORT logitless_targets NAMESPACE logitless:: FILE logitlessTargets.cmake DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/logitlessConfig.cmake.in
  ${PROJECT_BINARY_DIR}/logitlessConfig.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/logitlessConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/logitlessConfig.cmake ${PROJECT_BINARY_DIR}/logitlessConfigVersion.cmake
        DESTINATION ${package_dir})

# The .pc file computes its prefix from its own location.
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pc_to_prefix "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
file(RELATIVE_PATH pc_libdir "${CMAKE_INSTALL_PREFIX}" "${CMAKE_INSTALL_FULL_LIBDIR}")
file(RELATIVE_PATH pc_includedir "${CMAKE_INSTALL_PREFIX}" "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/logitless.pc.in ${PROJECT_BINARY_DIR}/logitless.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/logitless.pc DESTINATION ${pkgconfig_dir})

# The Python wheel (pyproject.toml): the library beside the package that loads it, with the libraries that it links and
# that Python's users may lack.
if(LOGITLESS_PYTHON)
  set_target_properties(logitless PROPERTIES INSTALL_RPATH "$ORIGIN")
  install(TARGETS logitless LIBRARY DESTINATION logitless/lib COMPONENT python)
  get_target_property(hwy_library hwy::hwy IMPORTED_LOCATION_NONE)
  if(NOT hwy_library)
    get_target_property(hwy_library hwy::hwy LOCATION)
  endif()
  if(hwy_library MATCHES "\\.so")
    get_filename_component(hwy_real "${hwy_library}" REALPATH)
    install(FILES "${hwy_real}" DESTINATION logitless/lib RENAME libhwy.so.1 COMPONENT python)
  endif()
endif()
