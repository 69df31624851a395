"""The policy engine: two vocabularies, one intermediate form, one decision, and its explanation.

Read `rules` first (the intermediate form), then `decide` (its precedence), `contiv` and `kubernetes` (how each
vocabulary is compiled to it), `membership` and `engine` (state, kept incrementally), `explain` and `diff`.
"""
