"""Levels of the cache below the device: host memory and disk, with searches, reads, loads and saves."""
