"""Queues and rates: predicted waits, retry times, turns at an engine."""
