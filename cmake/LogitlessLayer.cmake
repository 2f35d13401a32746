# logitless_layer(NAME SOURCES file... [NEEDS target...])
# Adds one folder of src/: an object library whose objects end up in liblogitless. NEEDS are the layers below it
# (tools/check_layers.py checks the includes) and outside libraries.
function(logitless_layer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;NEEDS" ${ARGN})
  add_library(logitless_${name} OBJECT ${ARG_SOURCES})
  target_include_directories(logitless_${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(logitless_${name} PRIVATE logitless_settings ${ARG_NEEDS})
  target_compile_definitions(logitless_${name} PRIVATE LOGITLESS_BUILDING)
  logitless_precompile(logitless_${name} logitless_core ${logitless_std_headers})
  set_property(GLOBAL APPEND PROPERTY LOGITLESS_LAYERS logitless_${name})
endfunction()

# logitless_embed(NAME OUTPUT file...)
# Writes the files, without their #include and #pragma once lines, as one string literal each to OUTPUT, which sources of
# the layer include.
function(logitless_embed name output)
  set(text "")
  foreach(file ${ARGN})
    file(READ ${file} content)
    string(REGEX REPLACE "#(include|pragma once)[^\n]*" "" content "${content}")
    string(APPEND text "R\"cuda(${content})cuda\"\n")
  endforeach()
  file(CONFIGURE OUTPUT embedded/${output} CONTENT "${text}" @ONLY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${ARGN})
  target_include_directories(logitless_${name} PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/embedded)
endfunction()
