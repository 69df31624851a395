"""The CNI plugin: the program a runtime executes, what it says to the agent, and the words of the CNI specification.

Standard library only; nothing else of ours is imported here, and `main.py` imports nothing but built-in modules.
"""
