"""verl's `model.external_lib`: imported by every process that builds the model's configuration."""

import alar.engines.verl.engine  # noqa: F401  the engine, under the vendor "alar"
import alar.engines.verl.loss  # noqa: F401  the policy loss "alar"
import alar.engines.verl.rollout  # noqa: F401  the rollouts "alar_hf" and "alar_vllm"
import alar.model  # noqa: F401  latent_qwen2 and latent_qwen3 for transformers' Auto classes
