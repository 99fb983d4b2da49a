"""Engines beside the one in this process: vLLM, its server, any chat endpoint, and RL on verl."""
