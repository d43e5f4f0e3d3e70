"""Names of the application whose engines are fakes."""

MODEL, APPLICATION = "fake", "bench-streams"
