"""Synthetic questions on letters, digits and sequences. Letters stand apart so that a tokenizer sees each one."""

from recipes.dev_reasoning.shape import Draw, Problem, Template, compute, conclude, fact

# fmt: off
WORDS = (
    "bird", "blue", "boat", "bone", "cake", "calm", "card", "city", "clay", "coat", "cold", "corn", "crab", "dark",
    "desk", "dish", "dust", "face", "farm", "fish", "flag", "gate", "gift", "goat", "gold", "hand", "herb", "home",
    "iron", "jump", "kind", "king", "lamb", "lamp", "land", "lion", "milk", "mint", "moth", "nest", "note", "open",
    "oval", "pack", "path", "pink", "pony", "quiz", "rain", "rich", "road", "salt", "sand", "ship", "silk", "snow",
    "song", "spin", "star", "stem", "tail", "time", "town", "tube", "unit", "vase", "verb", "wave", "west", "wind",
    "wolf", "yard", "zinc", "hill", "moon",
)
# fmt: on


def reverse_letters(draw: Draw) -> Problem:
    word = draw.pick(*WORDS)
    places = [f"{place} {letter}" for place, letter in enumerate(word, start=1)]
    backwards = " ".join(reversed(word))
    return Problem(
        operands=(word,),
        prompt=f"Write the letters in reverse order: {' '.join(word)}",
        steps=(
            fact(f"Places: {', '.join(places)}."),
            compute(f"Backwards: {', '.join(reversed(places))}."),
            conclude(f"So the letters are {backwards}."),
        ),
        answer=backwards,
    )


def _one_letter_each(draw: Draw, *, which: str) -> Problem:
    place, verb = (0, "starts") if which == "first" else (-1, "ends")
    words = draw.shuffled(list(WORDS))[:3]
    spelled = [" ".join(word) for word in words]
    letters = " ".join(word[place] for word in words)
    claims = (compute(f"{text} {verb} with {text[place]}.") for text in spelled)
    return Problem(
        operands=tuple(words),
        prompt=f"Write the {which} letter of each word: {', '.join(spelled)}",
        steps=(*claims, conclude(f"So the letters are {letters}.")),
        answer=letters,
    )


def first_letters(draw: Draw) -> Problem:
    return _one_letter_each(draw, which="first")


def last_letters(draw: Draw) -> Problem:
    return _one_letter_each(draw, which="last")


def count_letter(draw: Draw) -> Problem:
    wanted, *others = draw.shuffled(list("abcdeghknost"))[:4]
    times = draw.between(2, 6)
    letters = draw.shuffled([wanted] * times + [draw.pick(*others) for _ in range(9 - times)])
    places = " ".join(str(place) for place, letter in enumerate(letters, start=1) if letter == wanted)
    return Problem(
        operands=(wanted, "".join(letters)),
        prompt=f"How many times is {wanted} in this row: {' '.join(letters)}",
        steps=(
            fact("We look at each place."),
            compute(f"{wanted} is at places {places}."),
            conclude(f"So {wanted} is there {times} times."),
        ),
        answer=str(times),
    )


def sort_digits(draw: Draw) -> Problem:
    digits = draw.shuffled(list(range(1, 10)))[:4]
    low, second, third, high = sorted(digits)
    ordered = f"{low} {second} {third} {high}"
    return Problem(
        operands=tuple(digits),
        prompt=f"Sort the digits from small to large: {' '.join(map(str, digits))}",
        steps=(
            fact(f"The smallest is {low} and the largest is {high}."),
            compute(f"Between them are {second} and {third}."),
            conclude(f"So the order is {ordered}."),
        ),
        answer=ordered,
    )


def sum_of_list(draw: Draw) -> Problem:
    (a, b), c = draw.sum_pair(), draw.between(2, 12)
    return Problem(
        operands=(a, b, c),
        prompt=f"What is the sum of {a}, {b} and {c}?",
        steps=(
            fact("We add, then we add."),
            compute(f"{a} + {b} = {a + b}"),
            compute(f"{a + b} + {c} = {a + b + c}"),
            conclude(f"So the sum is {a + b + c}."),
        ),
        answer=str(a + b + c),
    )


def sequence_next(draw: Draw) -> Problem:
    start, gap = draw.between(2, 60), draw.between(2, 15)
    terms = [start + gap * place for place in range(4)]
    after = terms[-1] + gap
    return Problem(
        operands=tuple(terms),
        prompt=f"What number comes next: {', '.join(map(str, terms))}?",
        steps=(
            compute(f"{terms[1]} - {terms[0]} = {gap}"),
            fact(f"Each number goes up by {gap}."),
            compute(f"{terms[-1]} + {gap} = {after}"),
            conclude(f"So the next number is {after}."),
        ),
        answer=str(after),
    )


def larger_sum(draw: Draw) -> Problem:
    (a, b), (c, d) = draw.sum_pair(), draw.sum_pair()
    while a + b == c + d:
        c, d = draw.sum_pair()
    larger = max(a + b, c + d)
    return Problem(
        operands=(a, b, c, d),
        prompt=f"Write the larger sum: {a} + {b} or {c} + {d}",
        steps=(
            compute(f"{a} + {b} = {a + b}"),
            compute(f"{c} + {d} = {c + d}"),
            conclude(f"So the larger sum is {larger}."),
        ),
        answer=str(larger),
    )


# template: (category, difficulty, training rows, held-out rows). A count is easy to guess, so one is held out.
_ROWS = {
    reverse_letters: ("letters", "medium", 14, 3),
    first_letters: ("letters", "easy", 13, 3),
    last_letters: ("letters", "easy", 13, 3),
    count_letter: ("letters", "medium", 12, 1),
    sort_digits: ("digits", "medium", 14, 3),
    sum_of_list: ("addition", "easy", 14, 3),
    sequence_next: ("sequences", "medium", 16, 4),
    larger_sum: ("comparison", "medium", 14, 3),
}

SYNTHETIC = tuple(
    Template(
        build=build,
        category=category,
        difficulty=difficulty,
        section="synthetic",
        train=train,
        eval_section="core",
        held_out=held_out,
    )
    for build, (category, difficulty, train, held_out) in _ROWS.items()
)
