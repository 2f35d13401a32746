// Marks the symbols that a shared build exports. Everything else is hidden.
#pragma once

#if defined(_WIN32)
#if defined(LOGITLESS_BUILDING)
#define LOGITLESS_API __declspec(dllexport)
#else
#define LOGITLESS_API __declspec(dllimport)
#endif
#else
#define LOGITLESS_API __attribute__((visibility("default")))
#endif
