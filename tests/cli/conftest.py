"""The environment of the commands: no server and no API key of this machine."""

from __future__ import annotations

import os

os.environ["QUIRE_SERVER"] = "none"
os.environ.pop("QUIRE_API_KEY", None)
