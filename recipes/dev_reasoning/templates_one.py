"""Questions that need one calculation."""

from recipes.dev_reasoning.shape import Draw, Problem, Template, compute, conclude, fact

FRACTIONS = {2: "half", 3: "one third", 4: "one quarter", 5: "one fifth"}


def add_two(draw: Draw) -> Problem:
    (who,), (thing,), (a, b) = draw.names(1), draw.things(1), draw.sum_pair()
    verb = draw.pick("buys", "finds")
    return Problem(
        operands=(a, b),
        prompt=f"{who} has {a} {thing}. {who} {verb} {b} more {thing}. How many {thing} does {who} have now?",
        steps=(fact("We add."), compute(f"{a} + {b} = {a + b}"), conclude(f"So {who} has {a + b} {thing}.")),
        answer=str(a + b),
    )


def sub_two(draw: Draw) -> Problem:
    (who, friend), (thing,), (a, b) = draw.names(2), draw.things(1), draw.difference_pair()
    gone = draw.pick(f"gives {b} {thing} to {friend}", f"loses {b} {thing}")
    return Problem(
        operands=(a, b),
        prompt=f"{who} has {a} {thing}. {who} {gone}. How many {thing} does {who} have left?",
        steps=(fact("We take away."), compute(f"{a} - {b} = {a - b}"), conclude(f"So {who} has {a - b} {thing}.")),
        answer=str(a - b),
    )


def mul_groups(draw: Draw) -> Problem:
    (thing,), holder, (a, b) = draw.things(1), draw.holder(), draw.factors()
    return Problem(
        operands=(a, b),
        prompt=f"There are {a} {holder} with {b} {thing} in each. How many {thing} are there in all?",
        steps=(fact("We multiply."), compute(f"{a} * {b} = {a * b}"), conclude(f"So there are {a * b} {thing}.")),
        answer=str(a * b),
    )


def div_share(draw: Draw) -> Problem:
    (who,), (thing,), d, q = draw.names(1), draw.things(1), draw.between(2, 10), draw.between(2, 15)
    return Problem(
        operands=(d * q, d),
        prompt=f"{who} shares {d * q} {thing} equally among {d} friends. How many {thing} does each friend get?",
        steps=(fact("We divide."), compute(f"{d * q} / {d} = {q}"), conclude(f"So each friend gets {q} {thing}.")),
        answer=str(q),
    )


def how_many_more(draw: Draw) -> Problem:
    (who, other), (thing,), (a, b) = draw.names(2), draw.things(1), draw.difference_pair()
    return Problem(
        operands=(a, b),
        prompt=f"{who} has {a} {thing} and {other} has {b} {thing}. "
        f"How many more {thing} does {who} have than {other}?",
        steps=(fact("We take away."), compute(f"{a} - {b} = {a - b}"), conclude(f"So {who} has {a - b} more {thing}.")),
        answer=str(a - b),
    )


def missing_addend(draw: Draw) -> Problem:
    (who,), (thing,), (a, b) = draw.names(1), draw.things(1), draw.difference_pair()
    return Problem(
        operands=(a, b),
        prompt=f"{who} has {b} {thing} and wants to have {a} {thing}. How many more {thing} does {who} need?",
        steps=(
            fact("We take away."),
            compute(f"{a} - {b} = {a - b}"),
            conclude(f"So {who} needs {a - b} more {thing}."),
        ),
        answer=str(a - b),
    )


def price_total(draw: Draw) -> Problem:
    (who,), (thing,), (a, b) = draw.names(1), draw.things(1), draw.factors()
    return Problem(
        operands=(a, b),
        prompt=f"{who} buys {a} {thing} for {b} dollars each. How many dollars does {who} pay?",
        steps=(fact("We multiply."), compute(f"{a} * {b} = {a * b}"), conclude(f"So {who} pays {a * b} dollars.")),
        answer=str(a * b),
    )


def pages_per_day(draw: Draw) -> Problem:
    (who,), d, q = draw.names(1), draw.between(2, 10), draw.between(2, 15)
    return Problem(
        operands=(d * q, d),
        prompt=f"A book has {d * q} pages. {who} reads {d} pages each day. How many days does {who} need?",
        steps=(fact("We divide."), compute(f"{d * q} / {d} = {q}"), conclude(f"So {who} needs {q} days.")),
        answer=str(q),
    )


def age_future(draw: Draw) -> Problem:
    (who,), (a, b) = draw.names(1), draw.sum_pair()
    return Problem(
        operands=(a, b),
        prompt=f"{who} is {a} years old. How old will {who} be in {b} years?",
        steps=(fact("We add."), compute(f"{a} + {b} = {a + b}"), conclude(f"So {who} will be {a + b} years old.")),
        answer=str(a + b),
    )


def rectangle_area(draw: Draw) -> Problem:
    place, (a, b) = draw.pick("garden", "room"), draw.factors()
    return Problem(
        operands=(a, b),
        prompt=f"A {place} is {a} meters long and {b} meters wide. How many square meters is the {place}?",
        steps=(
            fact("We multiply."),
            compute(f"{a} * {b} = {a * b}"),
            conclude(f"So the {place} is {a * b} square meters."),
        ),
        answer=str(a * b),
    )


def fraction_of(draw: Draw) -> Problem:
    (who,), (thing,), d, q = draw.names(1), draw.things(1), draw.between(2, 5), draw.between(3, 20)
    share = FRACTIONS[d]
    return Problem(
        operands=(d * q, share),
        prompt=f"{who} has {d * q} {thing} and {share} of the {thing} are red. How many {thing} are red?",
        steps=(
            fact(f"To get {share} we divide by {d}."),
            compute(f"{d * q} / {d} = {q}"),
            conclude(f"So {q} {thing} are red."),
        ),
        answer=str(q),
    )


def percent_of(draw: Draw) -> Problem:
    (who,), (thing,), d, q = draw.names(1), draw.things(1), draw.pick(2, 4, 5, 10), draw.between(2, 16)
    percent = 100 // d
    return Problem(
        operands=(d * q, percent),
        prompt=f"{who} has {d * q} {thing} and {percent} percent of the {thing} are blue. How many {thing} are blue?",
        steps=(
            fact(f"To get {percent} percent we divide by {d}."),
            compute(f"{d * q} / {d} = {q}"),
            conclude(f"So {q} {thing} are blue."),
        ),
        answer=str(q),
    )


_CATEGORY = {
    add_two: "addition",
    sub_two: "subtraction",
    mul_groups: "multiplication",
    div_share: "division",
    how_many_more: "comparison",
    missing_addend: "comparison",
    price_total: "money",
    pages_per_day: "division",
    age_future: "time",
    rectangle_area: "geometry",
    fraction_of: "fractions",
    percent_of: "fractions",
}

ONE_STEP = tuple(
    Template(
        build=build,
        category=category,
        difficulty="medium" if category == "fractions" else "easy",
        section="reasoning",
        train=13,
        eval_section="core",
        held_out=4 if build is add_two else 3,
    )
    for build, category in _CATEGORY.items()
)
