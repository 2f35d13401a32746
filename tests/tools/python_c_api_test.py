"""Tests of tools/python_c_api.py: the files in the tree are up to date, and it reads everything that a header may hold.
"""

import ctypes
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import python_c_api  # noqa: E402

SMALL = """
/* A page of words: struct ignored { int32_t x; }; */
#pragma once
#define LOGITLESS_MAX_RANK 4
#ifdef __cplusplus
extern "C" {
#endif
typedef int32_t logitless_colour;
enum {
  LOGITLESS_COLOUR_RED = -1, /* of a request only */
  LOGITLESS_COLOUR_DARK_BLUE =
      2
};
typedef struct logitless_plan logitless_plan;
typedef void (*logitless_trace_function)(const char* line, void* user);

/* ---- Options
 * ---------------- */

/* A comment of
 * two lines. */
typedef struct logitless_paint {
  size_t struct_size;
  int64_t
      coats;      /* default -3; of this
                     and that */
  /* Before its field. */
  float gloss;
  logitless_colour colour; /* default LOGITLESS_COLOUR_DARK_BLUE */
  const int64_t* under;
  int64_t shape[LOGITLESS_MAX_RANK];
} logitless_paint;
LOGITLESS_API const char* logitless_name(const logitless_plan* plan, size_t index);
LOGITLESS_API void logitless_all(void);
LOGITLESS_API int32_t logitless_many(logitless_plan** plans, const void* const* data,
                                     const char* const* names, logitless_trace_function trace);
#ifdef __cplusplus
}
#endif
"""


def written(text):
    header = python_c_api.parse(text)
    header.structs[python_c_api.TERMS] = python_c_api.parse(
        "typedef struct logitless_loss_terms { size_t struct_size; double a; /* in [-1, 2.5]: \"it\" */\n"
        "double b; /* >= 0.5 */\ndouble c; /* default 2; any */ } logitless_loss_terms;"
    ).structs[python_c_api.TERMS]
    weights = python_c_api.WEIGHTS[0]
    header.structs[weights] = python_c_api.parse(
        "typedef struct logitless_weights { size_t struct_size; const void* hidden; /* [..., D] */\n"
        "const void* d; /* optional f32 [V] */ } logitless_weights;"
    ).structs["logitless_weights"]
    for name in python_c_api.VALUES:
        header.structs[name] = header.structs["logitless_paint"]
    space = {"__name__": "written"}
    exec(python_c_api.Writer(header).module(), space)
    return space


class PythonCApiTest(unittest.TestCase):
    def test_the_files_of_the_tree_are_up_to_date(self):
        command = [sys.executable, ROOT / "tools/python_c_api.py", "--check"]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)

    def test_a_change_of_the_header_is_found_and_written(self):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for path in (*python_c_api.HEADERS, python_c_api.MODULE, *python_c_api.STUBS):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, root / path)
            header = (root / python_c_api.HEADERS[0]).read_text()
            end = "} logitless_loss_terms;"
            changed = header.replace(end, f"  double warmth; /* in [0, 3] */\n{end}")
            self.assertNotEqual(header, changed)
            (root / python_c_api.HEADERS[0]).write_text(changed)
            command = [sys.executable, ROOT / "tools/python_c_api.py", "--root", root]
            done = subprocess.run([*command, "--check"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 1)
            self.assertEqual(done.stdout.count("tools/python_c_api.py writes it"), 2)
            subprocess.run(command, check=True, capture_output=True)
            self.assertEqual(subprocess.run([*command, "--check"]).returncode, 0)
            stub = (root / python_c_api.STUBS[0]).read_text()
            self.assertEqual(stub.count("    warmth: float = 0.0,  # in [0, 3]\n"), 2)

    def test_what_a_header_may_hold(self):
        c = written(SMALL)
        self.assertEqual(c["LOSS_WEIGHTS"], {"d": "[V]"})
        self.assertEqual((c["MAX_RANK"], c["COLOUR_RED"], c["COLOUR_DARK_BLUE"]), (4, -1, 2))
        self.assertEqual(c["COLOURS"], {"red": -1, "dark_blue": 2})
        paint = c["Paint"]
        self.assertEqual(
            paint._fields_,
            [("struct_size", ctypes.c_size_t), ("coats", ctypes.c_int64), ("gloss", ctypes.c_float),
             ("colour", ctypes.c_int32), ("under", ctypes.POINTER(ctypes.c_int64)), ("shape", ctypes.c_int64 * 4)],
        )
        self.assertEqual(paint.defaults, {"coats": -3, "colour": 2})
        void, text = ctypes.c_void_p, ctypes.c_char_p
        self.assertEqual(c["FUNCTIONS"]["logitless_name"], (text, [void, ctypes.c_size_t]))
        self.assertEqual(c["FUNCTIONS"]["logitless_all"], (None, []))
        many = [ctypes.POINTER(void), ctypes.POINTER(void), ctypes.POINTER(text), c["TraceFunction"]]
        self.assertEqual(c["FUNCTIONS"]["logitless_many"], (ctypes.c_int32, many))
        self.assertEqual(c["LOSS_TERMS"]["a"], (0.0, -1.0, 2.5, 'in [-1, 2.5]: "it"'))
        self.assertEqual(c["LOSS_TERMS"]["b"], (0.0, 0.5, float("inf"), ">= 0.5"))
        self.assertEqual(c["LOSS_TERMS"]["c"], (2.0, float("-inf"), float("inf"), "default 2; any"))
        self.assertEqual(c["HeadValues"](), ("dark_blue", -3, 0.0, 0, 0.0))

    def test_callbacks_and_several_headers(self):
        one = "typedef int32_t logitless_status;\nenum { LOGITLESS_OK = 0 };\n"
        two = "typedef logitless_status (*logitless_wait)(int64_t limit, void* user);\n"
        header = python_c_api.parse(one, two)
        self.assertEqual(header.callbacks, {"logitless_wait": ("logitless_status", ["int64_t", "void *"])})
        self.assertEqual(python_c_api.Writer(header).ctype("logitless_status", ""), "c_int32")

    def test_comments_go_to_their_fields(self):
        coats, gloss, colour = python_c_api.parse(SMALL).structs["logitless_paint"][1:4]
        self.assertEqual(coats.text, "default -3; of this and that")
        self.assertEqual(gloss.text, "Before its field.")
        self.assertEqual(colour.text, "default LOGITLESS_COLOUR_DARK_BLUE")

    def test_what_it_cannot_read_is_named(self):
        for text, message in (
            ("int32_t x;", "line 1: cannot read a declaration that begins with int32_t x"),
            ("typedef int32_t logitless_e;\nenum { LOGITLESS_A };", "line 2: LOGITLESS_A of logitless_e has no value"),
            ("typedef struct logitless_s { long x; } logitless_s;", "logitless_s.x: long is no type that Python knows"),
            ("typedef struct logitless_s { char x; } logitless_s;", "logitless_s.x: cannot pass a char by value"),
        ):
            with self.assertRaisesRegex(python_c_api.HeaderError, message):
                header = python_c_api.parse(text)
                list(python_c_api.Writer(header).struct("logitless_s", header.structs["logitless_s"]))


if __name__ == "__main__":
    unittest.main()
