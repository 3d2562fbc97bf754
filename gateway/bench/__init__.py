"""Measures a server over HTTP as its clients see it. What is measured in process is engine/bench's."""
