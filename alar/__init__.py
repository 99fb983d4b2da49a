"""Adaptive Latent Agentic Reasoning: latent blocks, AASD, AR-GRPO, evaluation, inspection."""

__version__ = "0.1.0"
