"""The engine interface (`protocol`), its vLLM implementation (`vllm`), and a fake for tests (`fake`)."""
