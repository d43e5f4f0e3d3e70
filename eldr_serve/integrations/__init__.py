"""Parts for Ray Serve applications other than eldr_serve's."""
