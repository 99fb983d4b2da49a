"""TokenSkip (arXiv 2502.12067): one model that is told how much of its chain of thought to write.

    collect    which trajectories to compress, and their chains of thought
    words      a text as words, what scores them, and LLMLingua-2's rule that picks those that stay
    scorers    the language model's own judgement: surprisal, or gain from knowing the action
    lingua     LLMLingua-2's own judgement; needs its weights
    compress   thoughts at all ratios, as rows of a file; requested against achieved rates
    examples   `<eos>ratio<eos>` after the user's text, and training examples of compressed turns
    measure    the trained model at every ratio: rows of the comparison, and TokenSkip's own table
    steps      finished steps that are reused instead of repeated
    view       a text, its dropped words, and why the achieved rate is not the requested one

An agent's chain of thought is compressed turn by turn, each against its own threshold; actions stay
as they are. The samples come from `alar.methods.samples` or from the run's teacher traces.
"""
