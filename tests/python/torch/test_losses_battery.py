"""The losses of losses_battery with heads, by autochunk. losses_battery/checks.py has the requirements."""

from losses_battery.tests import *  # noqa: F403

FAMILIES = ["language", "narrow", "preference", "reinforcement", "distillation"]
