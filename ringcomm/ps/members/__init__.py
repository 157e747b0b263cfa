"""How a rank that stands by takes the place of a worker, or an evaluator, that died."""
