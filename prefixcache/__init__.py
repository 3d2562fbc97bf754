"""The prefix cache: which KV blocks already hold which tokens. Standard library only."""
