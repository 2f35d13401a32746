"""The layers and other losses of losses_battery, by autochunk. losses_battery/checks.py has the requirements."""

from losses_battery.tests import *  # noqa: F403

FAMILIES = ["attention", "contrastive", "layers", "margins", "speech", "vision"]
