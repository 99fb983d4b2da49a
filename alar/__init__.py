"""Adaptive Latent Agentic Reasoning: latent blocks, AASD, AR-GRPO, their evaluation and inspection."""

__version__ = "0.1.0"
