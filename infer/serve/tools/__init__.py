"""Tools: how a model writes calls, how they are read, and the grammars that they must follow."""
