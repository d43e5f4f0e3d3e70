"""Expert counts, signatures, routing tables, predictors and expert placements, without Ray or vLLM."""
