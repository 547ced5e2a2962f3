"""Tests of the levels below the device."""
