"""Where KV blocks lie that left their pool, and the copies that this takes."""
