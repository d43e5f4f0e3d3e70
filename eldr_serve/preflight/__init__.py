"""`eldr check`: check whether a deployment would start on a described cluster, without starting anything."""
