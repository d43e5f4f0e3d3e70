"""Hostile requests and connections: the service refuses or survives all of them."""
