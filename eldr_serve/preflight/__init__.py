"""`eldr check`, which checks whether a deployment would start on a cluster, without starting anything."""
