"""Names of the application over engines that compute nothing."""

MODEL, APPLICATION = "fake", "bench-streams"
