"""AR-GRPO on verl 0.9.1 as released: the same algorithm as `alar.rl.trainer`, over many processes
and GPUs.

Nothing of verl is copied or patched; each part of ours sits where verl has an extension point:

    data        the prompts as the Parquet file that verl reads, in the order of the steps
    settings    one `Job` (model, prompts, environment, config, strategy) as verl's configuration
    external    `model.external_lib`, which every process imports: registers what follows
    engine      the FSDP engine: latent positions, vocabulary, frozen projector, learning rate
    loss        verl's own policy loss, and how far the actor is from the policy that sampled
    worker      the worker that holds the engines, and writes checkpoint folders
    rollout     the in-process engine as a rollout server, with verl's route for new weights
    vllm        vLLM with our plugin as a rollout server (not yet run on a GPU)
    agent       the agent loop manager: our agent loop, batch by batch
    buffer      the replay buffer: batches in a fixed order, failures that end the job
    trainer     the synchronous PPO trainer with the strategy's reward and credit, and our metrics
    launch      starting, following, resuming and ending a job; several nodes
    cpu         a verl platform without accelerators, for tests and small models

Importing this package imports neither verl nor Ray.
"""

from alar.engines.verl.settings import TESTED_VERL, Job, VerlUnavailable, require_verl

__all__ = ["TESTED_VERL", "Job", "VerlUnavailable", "require_verl"]
