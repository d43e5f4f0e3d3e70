"""Parts for other Ray Serve applications than eldr_serve's."""
