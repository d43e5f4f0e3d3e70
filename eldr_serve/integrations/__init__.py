"""Parts for applications other than ours."""
