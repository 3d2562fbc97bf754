"""Zero retention in this process: what is overwritten, and when."""
