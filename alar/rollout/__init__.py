"""Writing trajectories: one agent loop, and the engine that runs in this process.

Read in this order:

    loop         question → turns → observations → answer, and the record of it
    engine       what an engine is, and `TurnWriter`, the state machine of a latent block
    codec        text to token ids and back, with origins
    hf           the in-process engine: continuous batching on a transformers model
    cache        its keys and values, and the attention that reads them in place
    sampling     drawing a token with one uniform number
    constraint   what a codec may forbid the policy to write
    modes        p(latent | state), exactly, at every turn

The room knows no domain and no compared method: an environment and an engine are passed in.
"""
