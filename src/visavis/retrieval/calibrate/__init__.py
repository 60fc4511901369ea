"""Match probabilities of scores, and the corrections that a search applies."""
