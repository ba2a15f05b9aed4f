"""Constraints on generated tokens: regular expressions, JSON schemas, phrases, banned strings.

automaton    From a tree of characters to an automaton over the bytes of UTF-8, whose states are made when they are fi
banned       Texts that hold none of some strings
constraint   Constraints on what is decoded
json_schema  JSON Schema as a tree of characters
json_text    How JSON is written, as trees of characters
phrases      Phrases that must appear in the answer
regex        Regular expressions, read into a tree of four nodes
rollback     A constraint while tokens are tried out and taken back
"""
