"""Overwritten by mistake at 21:35:43 on 2026-11-15 while two people wrote this file at once.

Whoever ran `python -m bench control` at 21:35:24: the text you had here is gone, please write it again from what you
have; the other version is kept aside and nobody else will touch this folder. This notice is to be replaced.
"""

raise SystemExit("bench: this file was overwritten by mistake, see its first lines")
