"""Limits of clients: keys, tenants, token rates and concurrency."""
