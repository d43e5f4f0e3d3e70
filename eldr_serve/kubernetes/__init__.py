"""`eldr kubernetes`: write a deployment as a RayService for KubeRay, without starting anything."""
