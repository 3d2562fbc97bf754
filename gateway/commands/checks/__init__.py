"""What `hearth doctor` looks at, by subject. Nothing here prints, or changes anything."""
