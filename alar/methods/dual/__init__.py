"""Dual vocabulary: the model thinks in latent mirrors of its tokens and acts in the tokens
themselves.

Visible ids are [0, V), latent mirrors [V, V + L); a mirror starts as a copy of its source's
embedding and head rows, and the logits are constrained: mirrors inside `<think>`, visible ids
outside. From the project LatentReasoning (a RAGEN fork).

    alar.methods.dual.vocabulary   `DualVocab`, the facts that a checkpoint folder carries in dual_vocab_meta.json
    alar.methods.dual.constraint      which ids a phase of a turn allows; the same table for both engines and the log-probs of RL
    build                        a dual checkpoint from any causal LM, and the verification of one
    examples                     traces as training examples whose chains of thought are mirrors
    identity                     what the construction implies before anything is trained: cross-entropy + ln 2, the same text

Mirrors are ids of the model only, not tokens of the tokenizer: so no text from outside can contain
one, and the tokenizer loads as fast as its base's. `Codec.text` shows them as the text of their
sources. The first two modules stand below the engines, so that a dual folder is recognised wherever
it is opened.
"""
