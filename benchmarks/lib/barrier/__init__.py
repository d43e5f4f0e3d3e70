"""The parts of the benchmark `barrier`: requests of a trace, the ranks' steps, predictions and rows."""
