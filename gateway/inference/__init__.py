"""One call from checked input to its settled end. It knows no JSON and no routes."""
