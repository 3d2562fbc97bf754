"""What a caller may use, reserved before a call and settled after it."""
