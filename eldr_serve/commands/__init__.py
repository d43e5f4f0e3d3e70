"""What all `eldr` commands share: late imports, error sentences, the HTTP client of a running service."""
