"""AR-GRPO in one process. Read it in this order:

reward      the reward of one trajectory among its group, published and repaired
objective   advantages, clipped loss, KL, and the credit of every turn's mode
summary     what all of these know of a trajectory
strategy    reward, credit, sampler and loss as objects; `ar_grpo` puts them together
trainer     one step: roll out, reward, credit, update
config      the parameters
"""
