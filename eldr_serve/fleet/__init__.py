"""The ingress's view of the engine replicas: which replicas are live, channels to them, and calls of them.

Everything here runs in an ingress; only request_router runs in each Serve handle of an engine deployment.
"""
