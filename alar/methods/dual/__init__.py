"""Dual vocabulary: the model thinks in latent mirrors of its tokens and acts in the tokens
themselves. From the project LatentReasoning (a RAGEN fork).

Visible ids are [0, V), latent mirrors [V, V + L). A mirror starts as a copy of its source's
embedding and head rows, and the logits are constrained: mirrors inside `<think>`, visible ids
outside.

    vocabulary   `DualVocab`, what a checkpoint's config.json says about its mirrors
    phases       where a turn stands: outside, thinking, inside `</think>`
    constraint   which ids each phase allows; one table for both engines and RL's log-probs
    codec        `DualCodec`, named in config.json, which every engine thereby finds
    build        a dual checkpoint from any causal LM, and the verification of one
    examples     traces as training examples whose chains of thought are mirrors
    identity     what follows before anything is trained: cross-entropy + ln 2, the same text

Mirrors are ids of the model only, not tokens of the tokenizer. So no text from outside can contain
one, and the tokenizer loads as fast as its base's. `DualCodec.text` shows them as the text of their
sources.
"""
