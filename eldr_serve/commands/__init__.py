"""Shared parts of the `eldr` commands: late imports, error sentences, the client of a running service."""
