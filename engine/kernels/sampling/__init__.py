"""From logits to tokens: what is forbidden or penalised, what filters leave, and the draw."""
