"""The CNI plugin: the program that runtimes execute, its protocol with the agent, and the types of the specification.

Standard library only. Nothing else of weft is imported here, and `main.py` imports nothing but built-in modules.
"""
