"""The rooms of fdora/integrations/vllm.py, none of which imports vLLM before it is called."""
