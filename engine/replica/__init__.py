"""One model's process: its sockets, its loop, how it sleeps and wakes, and its traces."""
