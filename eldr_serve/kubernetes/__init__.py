"""A deployment as a RayService, which KubeRay keeps on Kubernetes: `eldr kubernetes`. Nothing is started."""
