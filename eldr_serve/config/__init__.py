"""Schema of a deployment YAML, and the options of Ray and Ray Serve that follow from it."""
