"""The process of the DecodeRouter actor: live load, leases, policy, tables and status of one deployment.

`messages` and `settings` are also imported by its clients, in `eldr_serve.router_client`.
"""
