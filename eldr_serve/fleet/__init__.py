"""The ingress's view of the engine replicas: which live, channels to them, and calls to one or all of them.

Everything here runs in an ingress, but request_router runs in every Serve handle of an engine deployment.
"""
