"""The process of the DecodeRouter actor: live load, leases, policy, tables and status of one deployment.

Its clients, in `eldr_serve.router_client`, also import `messages`, `methods` and `settings`.
"""
