"""`hearth models import`: a GGUF file becomes a folder that Hearth serves."""
