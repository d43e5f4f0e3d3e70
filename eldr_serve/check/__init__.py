"""Whether a deployment would start on a described cluster: `eldr check`. Nothing is started."""
