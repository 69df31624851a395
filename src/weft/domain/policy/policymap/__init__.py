"""The policy map: compiles the engine's rules into identities and policy entries that a datapath looks up by key.

Start with `policy_state` (what a datapath holds), then `policy_map` (how a change becomes a delta).
"""
