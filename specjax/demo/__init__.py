"""The embedded demo models, and the functions that they are shown on."""
