"""AR-GRPO: the shaped reward, the objective, and the trainer that runs in one process."""
