"""The built-in model, Ember: its config, weights and tokenizer. Data alone; benchmarks/ember trains it."""
