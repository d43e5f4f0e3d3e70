"""Replays of schedules on real engines, which serve one worker's requests after the other's."""
