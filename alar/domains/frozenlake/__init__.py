"""A turn-based world in RAGEN's manner: gymnasium's FrozenLake as text, in the same agent loop.

It shows what the loop, the engines and the trainers need from a further domain: a form
(`protocol`), an environment (`environment`) and questions (`lakes`), nothing else.
"""
