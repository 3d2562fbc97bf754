"""A request's sequences, what is checked of it, its images, and the accounts that take turns."""
