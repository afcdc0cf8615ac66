"""Questions that need two dependent calculations, or that hold a number to leave out."""

from recipes.dev_reasoning.shape import Draw, Problem, Template, compute, conclude, fact


def add_three(draw: Draw) -> Problem:
    (x, y, z), (thing,) = draw.names(3), draw.things(1)
    (a, b), c = draw.sum_pair(), draw.between(2, 12)
    return Problem(
        operands=(a, b, c),
        prompt=f"{x} has {a} {thing}, {y} has {b} {thing} and {z} has {c} {thing}. How many {thing} are there in all?",
        steps=(
            fact("We add, then we add."),
            compute(f"{a} + {b} = {a + b}"),
            compute(f"{a + b} + {c} = {a + b + c}"),
            conclude(f"So there are {a + b + c} {thing}."),
        ),
        answer=str(a + b + c),
    )


def add_then_sub(draw: Draw) -> Problem:
    (who,), (thing,), (a, b), c = draw.names(1), draw.things(1), draw.sum_pair(), draw.between(2, 9)
    verb = draw.pick("buys", "finds")
    return Problem(
        operands=(a, b, c),
        prompt=f"{who} has {a} {thing}. {who} {verb} {b} more {thing} and then loses {c} {thing}. "
        f"How many {thing} does {who} have left?",
        steps=(
            fact("We add, then we take away."),
            compute(f"{a} + {b} = {a + b}"),
            compute(f"{a + b} - {c} = {a + b - c}"),
            conclude(f"So {who} has {a + b - c} {thing}."),
        ),
        answer=str(a + b - c),
    )


def mul_then_add(draw: Draw) -> Problem:
    (thing,), holder, (a, b), c = draw.things(1), draw.holder(), draw.factors(), draw.between(2, 12)
    return Problem(
        operands=(a, b, c),
        prompt=f"There are {a} {holder} with {b} {thing} in each and {c} {thing} on the table. "
        f"How many {thing} are there in all?",
        steps=(
            fact("We multiply, then we add."),
            compute(f"{a} * {b} = {a * b}"),
            compute(f"{a * b} + {c} = {a * b + c}"),
            conclude(f"So there are {a * b + c} {thing}."),
        ),
        answer=str(a * b + c),
    )


def price_change(draw: Draw) -> Problem:
    (who,), (thing,), a, b = draw.names(1), draw.things(1), draw.between(2, 8), draw.between(2, 7)
    cost = a * b
    paid = 10 * ((cost + 1) // 10 + draw.between(1, 4))
    return Problem(
        operands=(a, b, paid),
        prompt=f"{who} buys {a} {thing} for {b} dollars each and pays with {paid} dollars. "
        f"How many dollars does {who} get back?",
        steps=(
            fact("We multiply, then we take away."),
            compute(f"{a} * {b} = {cost}"),
            compute(f"{paid} - {cost} = {paid - cost}"),
            conclude(f"So {who} gets {paid - cost} dollars back."),
        ),
        answer=str(paid - cost),
    )


def two_prices(draw: Draw) -> Problem:
    (who,), (thing, other), b, c = draw.names(1), draw.things(2), draw.between(2, 15), draw.between(2, 15)
    a = b + c + draw.between(2, 60)
    return Problem(
        operands=(a, b, c),
        prompt=f"{who} has {a} dollars. {who} pays {b} dollars for {thing} and {c} dollars for {other}. "
        f"How many dollars are left?",
        steps=(
            fact("We take away, then we take away."),
            compute(f"{a} - {b} = {a - b}"),
            compute(f"{a - b} - {c} = {a - b - c}"),
            conclude(f"So {a - b - c} dollars are left."),
        ),
        answer=str(a - b - c),
    )


def double_then(draw: Draw) -> Problem:
    (who, other), (thing,), a, b = draw.names(2), draw.things(1), draw.between(4, 30), draw.between(2, 12)
    return Problem(
        operands=(a, b),
        prompt=f"{other} has {a} {thing}. {who} has twice as many and finds {b} more {thing}. "
        f"How many {thing} does {who} have now?",
        steps=(
            fact("We double, then we add."),
            compute(f"{a} * 2 = {a * 2}"),
            compute(f"{a * 2} + {b} = {a * 2 + b}"),
            conclude(f"So {who} has {a * 2 + b} {thing}."),
        ),
        answer=str(a * 2 + b),
    )


def half_then(draw: Draw) -> Problem:
    (who, friend), (thing,), half, b = draw.names(2), draw.things(1), draw.between(4, 30), draw.between(2, 12)
    return Problem(
        operands=(half * 2, b),
        prompt=f"{who} has {half * 2} {thing}. {who} gives half of the {thing} to {friend} "
        f"and then buys {b} more {thing}. How many {thing} does {who} have now?",
        steps=(
            fact("We halve, then we add."),
            compute(f"{half * 2} / 2 = {half}"),
            compute(f"{half} + {b} = {half + b}"),
            conclude(f"So {who} has {half + b} {thing}."),
        ),
        answer=str(half + b),
    )


def rectangle_perimeter(draw: Draw) -> Problem:
    place, a, b = draw.pick("garden", "room"), draw.between(4, 30), draw.between(2, 12)
    return Problem(
        operands=(a, b),
        prompt=f"A {place} is {a} meters long and {b} meters wide. How many meters is it around the {place}?",
        steps=(
            fact("We add, then we double."),
            compute(f"{a} + {b} = {a + b}"),
            compute(f"{a + b} * 2 = {(a + b) * 2}"),
            conclude(f"So it is {(a + b) * 2} meters around the {place}."),
        ),
        answer=str((a + b) * 2),
    )


def total_of_two(draw: Draw) -> Problem:
    (who, other), (thing,), a, b = draw.names(2), draw.things(1), draw.between(3, 30), draw.between(2, 12)
    return Problem(
        operands=(a, b),
        prompt=f"{other} has {a} {thing}. {who} has {b} more {thing} than {other}. How many {thing} are there in all?",
        steps=(
            fact("We add, then we add."),
            compute(f"{a} + {b} = {a + b}"),
            compute(f"{a + b} + {a} = {a + b + a}"),
            conclude(f"So there are {a + b + a} {thing}."),
        ),
        answer=str(a + b + a),
    )


def div_leftover(draw: Draw) -> Problem:
    (who,), (thing,), d = draw.names(1), draw.things(1), draw.between(6, 10)
    q, r = draw.between(2, 9), draw.between(2, d - 1)
    n = d * q + r
    return Problem(
        operands=(n, d),
        prompt=f"{who} has {n} {thing} and fills bags with {d} {thing} in each. How many {thing} are left over?",
        steps=(fact("We divide."), compute(f"{n} = {d} * {q} + {r}"), conclude(f"So {r} {thing} are left over.")),
        answer=str(r),
    )


def hours_to_minutes(draw: Draw) -> Problem:
    what, hours, minutes = draw.pick("film", "game", "trip"), draw.between(2, 5), 5 * draw.between(1, 11)
    return Problem(
        operands=(hours, minutes),
        prompt=f"A {what} takes {hours} hours and {minutes} minutes. How many minutes is that?",
        steps=(
            fact("One hour has 60 minutes."),
            compute(f"{hours} * 60 = {hours * 60}"),
            compute(f"{hours * 60} + {minutes} = {hours * 60 + minutes}"),
            conclude(f"So it is {hours * 60 + minutes} minutes."),
        ),
        answer=str(hours * 60 + minutes),
    )


def days_in_weeks(draw: Draw) -> Problem:
    what, weeks, days = draw.pick("trip", "camp", "job"), draw.between(2, 12), draw.between(2, 6)
    return Problem(
        operands=(weeks, days),
        prompt=f"A {what} takes {weeks} weeks and {days} days. How many days is that?",
        steps=(
            fact("One week has 7 days."),
            compute(f"{weeks} * 7 = {weeks * 7}"),
            compute(f"{weeks * 7} + {days} = {weeks * 7 + days}"),
            conclude(f"So it is {weeks * 7 + days} days."),
        ),
        answer=str(weeks * 7 + days),
    )


def distractor_age(draw: Draw) -> Problem:
    (who,), (thing,), age, (a, b) = draw.names(1), draw.things(1), draw.between(6, 40), draw.sum_pair()
    return Problem(
        operands=(age, a, b),
        prompt=f"{who} is {age} years old and has {a} {thing}. {who} buys {b} more {thing}. "
        f"How many {thing} does {who} have now?",
        steps=(
            fact("The age does not matter. We add."),
            compute(f"{a} + {b} = {a + b}"),
            conclude(f"So {who} has {a + b} {thing}."),
        ),
        answer=str(a + b),
    )


def distractor_things(draw: Draw) -> Problem:
    (who,), (thing, other), (a, b), c = draw.names(1), draw.things(2), draw.sum_pair(), draw.between(2, 20)
    return Problem(
        operands=(a, b, c),
        prompt=f"{who} has {a} red {thing}, {c} {other} and {b} blue {thing}. How many {thing} does {who} have?",
        steps=(
            fact(f"The {other} do not matter. We add."),
            compute(f"{a} + {b} = {a + b}"),
            conclude(f"So {who} has {a + b} {thing}."),
        ),
        answer=str(a + b),
    )


# template: (category, difficulty, training rows, held-out rows)
_ROWS = {
    add_three: ("addition", "medium", 16, 1),
    add_then_sub: ("addition", "medium", 17, 2),
    mul_then_add: ("multiplication", "medium", 17, 2),
    price_change: ("money", "hard", 17, 2),
    two_prices: ("money", "medium", 16, 1),
    double_then: ("multiplication", "medium", 16, 1),
    half_then: ("fractions", "medium", 16, 1),
    rectangle_perimeter: ("geometry", "medium", 16, 1),
    total_of_two: ("comparison", "hard", 17, 2),
    div_leftover: ("division", "hard", 16, 1),
    hours_to_minutes: ("time", "medium", 16, 1),
    days_in_weeks: ("time", "medium", 16, 1),
    distractor_age: ("distractor", "medium", 17, 2),
    distractor_things: ("distractor", "medium", 16, 2),
}

CHAINS = tuple(
    Template(
        build=build,
        category=category,
        difficulty=difficulty,
        section="reasoning",
        train=train,
        eval_section="trace",
        held_out=held_out,
    )
    for build, (category, difficulty, train, held_out) in _ROWS.items()
)
