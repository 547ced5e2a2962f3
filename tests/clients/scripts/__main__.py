"""Runs the checks of one client, in its environment: `python tests/clients/scripts by_llm`."""

import sys

import checks

checks.run(sys.argv[1])
