# Plans, memory and refusals in more depth: other mixes of options, other entry points.
logitless_test(head_memory_mixes_test LABELS fast threads LIBRARIES test_support
  SOURCES memory_mixes_test.cpp mixes.cpp)
