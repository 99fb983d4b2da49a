"""Static answer datasets (GSM8K, MATH, MMLU, MetaMathQA, own files): one question, one turn, one
judged answer.

`sets` reads rows into questions, `answers` judges predictions, and `forms` says how a turn looks.
`environment` joins them for the agent loop. `arithmetic` is a set that is generated here, with
chains of thought that a tiny model can learn.
"""
