"""Which irregular forms the reward `lexical` counts: python docs/tools/measure_inflections.py

It needs the extra ``words``. Of common verbs and nouns it prints how many irregular forms there
are, and which of them the reward does not count.
"""

from specjax.rewards.lexical import inflections

# A word and its irregular forms.
IRREGULAR = """
be was were been, begin began begun, blow blew blown, break broke broken, bring brought,
build built, buy bought, catch caught, choose chose chosen, come came, dig dug, do did done,
draw drew drawn, drink drank drunk, drive drove driven, eat ate eaten, fall fell fallen,
feed fed, feel felt, fight fought, find found, fly flew flown, forget forgot forgotten,
freeze froze frozen, get got, give gave given, go went gone, grow grew grown, hang hung,
hear heard, hide hid hidden, hold held, keep kept, know knew known, lead led, leave left,
lie lay lain, light lit, lose lost, make made, mean meant, meet met, pay paid, ride rode ridden,
ring rang rung, rise rose risen, run ran, say said, see saw seen, sell sold, send sent,
shake shook shaken, shine shone, shoot shot, sing sang sung, sit sat, sleep slept, slide slid,
speak spoke spoken, spend spent, spin spun, stand stood, steal stole stolen, stick stuck,
sting stung, strike struck, sweep swept, swim swam swum, swing swung, take took taken,
teach taught, tear tore torn, tell told, think thought, throw threw thrown, wake woke woken,
wear wore worn, win won, wind wound, write wrote written, child children, foot feet, tooth teeth,
man men, woman women, mouse mice, goose geese, knife knives, leaf leaves, wolf wolves,
person people, shelf shelves, calf calves, lay laid, bend bent, bite bit bitten, bleed bled,
sew sewn, weave wove woven, kneel knelt, leap leapt,
"""


def main() -> None:
    """Prints the counts and the forms that are missing."""
    pairs = []
    for entry in IRREGULAR.strip().rstrip(",").split(","):
        word, *forms = entry.split()
        pairs += [(word, form) for form in forms]
    missing = [f"{form} of {word}" for word, form in pairs if form not in inflections(word)]
    print(f"{len(pairs)} irregular forms of {len({word for word, _ in pairs})} words")
    print(f"{len(missing)} missing: {', '.join(missing)}")


if __name__ == "__main__":
    main()
