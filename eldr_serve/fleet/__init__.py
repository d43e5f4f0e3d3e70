"""The engine replicas as an ingress knows them: the live ones, the channels to them, and its calls.

All modules run in an ingress process. Ray Serve instantiates `ReplicaPublisher` there as the request router
of each handle.
"""
