"""`eldr check`: the check whether a deployment would start on a described cluster; it starts nothing."""
