"""What all unit tests have in common."""

from __future__ import annotations

from hypothesis import settings

# Hypothesis fails an example that takes 200 ms; on busy cores any may, and time is not what is tested.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
