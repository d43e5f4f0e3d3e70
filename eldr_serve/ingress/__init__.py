"""The ingress deployment: HTTP endpoints, admission, request log and traces."""
