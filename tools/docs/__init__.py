"""What the documentation site has that is made from the code."""
