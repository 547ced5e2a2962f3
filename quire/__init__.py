"""quire: serve language models to many people at once, from code one can read."""

__version__ = "0.1.0"
