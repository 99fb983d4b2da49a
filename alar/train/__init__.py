"""Training on given text: AASD, the mode warm-up, and the pretraining of the embedded bases.

examples        trajectories → ids and labels, and batches of similar shape
config          the parameters of every stage
supervised      one training on examples, in one process or many (`distributed`)
labels          how often the labels of thoughts are read
display         an example as people read it
pretrain        where an embedded base comes from (`pretrain_tool`: the tool domain's text)
resume          how an interrupted training keeps its state
"""
