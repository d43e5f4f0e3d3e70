"""Names of the application whose engines are fakes, in a module that does not import Ray."""

MODEL, APPLICATION = "fake", "bench-streams"
