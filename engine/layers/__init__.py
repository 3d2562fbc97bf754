"""A parameter in its format, and its matmul for any number of rows."""
