"""Tests. Support code is in ``tests.support``."""
