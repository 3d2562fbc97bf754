"""What `hearth accounts` and `hearth apply` do beyond one change of one account."""
