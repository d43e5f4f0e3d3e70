"""The engine replicas as an ingress knows them: the live ones, the channels to them, and its calls.

All modules run in the process of an ingress, where Serve's handles call `replica_publisher`.
"""
