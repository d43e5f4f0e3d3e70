"""Faults on purpose: the serving code on virtual time, and the whole application under kill -9."""
