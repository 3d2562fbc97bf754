"""The console in the browser: static files, and what serves them."""
