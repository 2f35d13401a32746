# Finds the system's packages before all else: a machine without some of them reports all in one line.

set(LOGITLESS_MISSING "")

# logitless_package(NAME DEBIAN) runs find_package(NAME); Debian's package DEBIAN provides it.
macro(logitless_package name debian)
  find_package(${name} QUIET)
  if(NOT ${name}_FOUND)
    list(APPEND LOGITLESS_MISSING ${debian})
  endif()
endmacro()

# logitless_header(VARIABLE NAME DEBIAN) sets VARIABLE to the folder of the header NAME of Debian's package DEBIAN.
macro(logitless_header variable name debian)
  find_path(${variable} ${name})
  if(NOT ${variable})
    list(APPEND LOGITLESS_MISSING ${debian})
  endif()
endmacro()

logitless_package(hwy libhwy-dev)
logitless_package(nlohmann_json nlohmann-json3-dev)
logitless_package(Eigen3 libeigen3-dev)
if(LOGITLESS_BUILD_CLI)
  logitless_package(fmt libfmt-dev)
  logitless_package(CLI11 libcli11-dev)
  logitless_header(SENTENCEPIECE_INCLUDE_DIR sentencepiece_trainer.h libsentencepiece-dev)
  logitless_header(PCRE2_INCLUDE_DIR pcre2.h libpcre2-dev)
  logitless_header(UTF8PROC_INCLUDE_DIR utf8proc.h libutf8proc-dev)
endif()
if(LOGITLESS_BUILD_TESTS)
  logitless_package(GTest libgtest-dev)
endif()

if(LOGITLESS_MISSING)
  list(JOIN LOGITLESS_MISSING " " missing)
  # A line that begins with a space is printed unwrapped.
  message(FATAL_ERROR " logitless: missing ${missing}; on Debian: apt-get install -y ${missing}")
endif()
