"""Shared by commands, load generation and benchmarks; `eldr_serve` never imports it."""
