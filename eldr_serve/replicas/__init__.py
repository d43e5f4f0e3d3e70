"""The process of an engine replica: the Ray Serve deployments that own an engine and handle channel calls.

Only `autoscaling` runs elsewhere, in Serve's controller.
"""
