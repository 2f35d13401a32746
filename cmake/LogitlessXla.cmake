# Finds XLA's FFI headers, which jaxlib contains. LOGITLESS_HAS_XLA says whether the handlers of logitless.jax are
# built; LOGITLESS_XLA_HEADERS is the headers' folder. It searches at each configuration, since a wheel's build
# environment is temporary.
set(LOGITLESS_HAS_XLA OFF)
set(LOGITLESS_XLA_HEADERS "${LOGITLESS_XLA_INCLUDE_DIR}")
if(NOT LOGITLESS_XLA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "LOGITLESS_XLA is '${LOGITLESS_XLA}'; expected AUTO, ON or OFF")
endif()
if(LOGITLESS_XLA)
  if(NOT LOGITLESS_XLA_HEADERS)
    set(python ${Python3_EXECUTABLE})
    if(NOT python)
      find_program(LOGITLESS_PYTHON3 python3)
      set(python ${LOGITLESS_PYTHON3})
    endif()
    set(jaxlib "")
    if(python)
      execute_process(
        COMMAND ${python} -c "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0])"
        OUTPUT_VARIABLE jaxlib OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
    if(jaxlib)
      set(LOGITLESS_XLA_HEADERS "${jaxlib}/include")
    endif()
  endif()
  if(EXISTS "${LOGITLESS_XLA_HEADERS}/xla/ffi/api/ffi.h")
    set(LOGITLESS_HAS_XLA ON)
  elseif(LOGITLESS_XLA STREQUAL "ON")
    message(FATAL_ERROR "LOGITLESS_XLA is ON, and '${LOGITLESS_XLA_HEADERS}' has no xla/ffi/api/ffi.h; install jaxlib "
                        "for python3 or set LOGITLESS_XLA_INCLUDE_DIR")
  endif()
endif()
message(STATUS "XLA handlers: ${LOGITLESS_HAS_XLA}")
