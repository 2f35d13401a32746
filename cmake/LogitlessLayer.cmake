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
