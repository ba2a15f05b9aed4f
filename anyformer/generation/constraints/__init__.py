"""Constraints on answers: regular expressions, JSON schemas, phrases, banned strings.

automaton        automaton over UTF-8 bytes, built from a tree of characters as texts reach its states
banned           texts that contain none of some strings
constraint       base class; one of several id sequences (`Trie`)
json_schema      JSON schemas as trees of characters
json_text        JSON strings, numbers, constants and free values as trees of characters
phrases          phrases that must occur, for beam search
regex            regular expressions, parsed into trees of characters
rollback         a constraint as a mask over any history, also after tokens were dropped
text_constraint  texts of a language (`Regex`, `JsonSchema`), however they are cut into tokens
token_masks      masks over the vocabulary by llguidance
"""
