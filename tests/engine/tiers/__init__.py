"""Tests of the tiers below the device."""
