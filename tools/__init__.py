"""What commands, load generation and benchmarks share; `eldr_serve` never imports it."""
