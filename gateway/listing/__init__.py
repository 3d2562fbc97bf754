"""The catalogue in the shapes of Workers AI, OpenAI and OpenRouter."""
