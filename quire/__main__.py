"""`python -m quire` is `quire`."""

from quire.cli.main import run

run()
