"""Expert counts, signatures, routing tables, predictors, expert placement; neither Ray nor vLLM."""
