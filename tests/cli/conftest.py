"""What the commands see of the machine: no server that happens to run on it, and nobody's key."""

from __future__ import annotations

import os

os.environ["QUIRE_SERVER"] = "none"
os.environ.pop("QUIRE_API_KEY", None)
