"""The process of the DecodeRouter actor: live load, leases, policy, tables and status of one deployment."""
