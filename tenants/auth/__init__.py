"""Who is calling: API tokens and JSON Web Tokens."""
