"""TokenSkip (arXiv 2502.12067): chains of thought compressed at several ratios, and a model told
which ratio to write at.

    collect    correct chains of thought, from the run's traces or sampled anew
    words      a text as words, and `score_words()`, the one interface of everything that judges them
    scorers    the language model's own judgement: surprisal, or gain from knowing the action
    lingua     LLMLingua-2's judgement, where the library and its weights are
    threshold  which words stay: LLMLingua-2's percentile rule
    compress   thoughts at all ratios, as rows of a file; requested against achieved rates
    examples   `<eos>ratio<eos>` after the user's text, and training examples with compressed turns
    measure    the trained model at every ratio, as rows of the common comparison and as TokenSkip's own table
    steps      finished steps taken over instead of repeated
    view       a text, its dropped words and the reasons why the achieved rate is not the requested one

For agents a chain of thought is compressed turn by turn, each against its own threshold; actions
stay as they are.
"""
