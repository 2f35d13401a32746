"""``python -m logitless`` prints ``build_info()``."""

from . import build_info

if __name__ == "__main__":
    print(build_info())
