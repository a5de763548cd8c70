"""HTTP: the OpenAI schema over the engine."""
