"""The policy engine: cluster state in, ordered rules and verdicts out.

`engine` holds the state and resolves keys and addresses to identities, `membership` keeps set members up to date,
`decide` picks the deciding rule, and `engine_sync` feeds the engine from the store.
"""
