"""What the API server's door is told (overlay/vllm_exl3/door/rules.py): one variable, made from the settings."""

from __future__ import annotations

import json
from collections.abc import Callable

from launcher.table import DOOR

NAME = "EXL3_DOOR"


def door_rules(value_of: Callable[[str], object]) -> str:
    """JSON. `value_of` gives the value of a setting by its name in capitals."""
    return json.dumps({row.name.lower(): value_of(row.name) for row in DOOR}, separators=(",", ":"))
