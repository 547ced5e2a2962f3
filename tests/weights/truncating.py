"""A script that opens a checkpoint whose file another program truncates as soon as it is mapped: PATH, BYTES."""

from __future__ import annotations

TRUNCATED = """
import os, sys
from pathlib import Path
from quire.errors import ModelFileError
from quire.weights.checkpoint import FileMap
from quire.weights.opening import open_checkpoint

new = FileMap.__new__
def truncated(cls, path):
    made = new(cls, path)
    os.truncate(path, int(sys.argv[2]))  # by another program
    return made
FileMap.__new__ = truncated
try:
    open_checkpoint(Path(sys.argv[1]))
except ModelFileError as error:
    print(error)
"""
