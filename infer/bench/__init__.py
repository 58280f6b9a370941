"""Measure methods side by side.

The words of this package:

- A *question* is a prompt with what its completion is scored against (``questions``).
- A *case* is a method with its options, one sampling and one batch size (``cases``).
- A *setting* is what all cases share: models, questions, seed (``timed_cases``).
- A *result* is what a case generated, once per repeat, with its times (``timed_cases``).
- A *row* is a result as a dict of figures; the report has one per case (``rows``).
- A *metric* scores completions (``metrics``). A *peer* is another library (``peers``).

``commands`` parses the command line, and ``benchmark`` runs the steps above in order.
"""
