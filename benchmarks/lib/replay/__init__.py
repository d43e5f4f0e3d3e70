"""Replays: one real engine serves the requests of simulated workers, one worker after the other."""
