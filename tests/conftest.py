"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("nestpipe", deadline=None)  # a busy machine is not a wrong program
settings.load_profile("nestpipe")
