"""The ingress's view of the engine replicas: which replicas are live, channels to them, and calls of them.

Everything here runs in an ingress, in whose process Serve's handles run replica_publisher.
"""
